"""Transformations by independent coefficients, each uniform on a range that is learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_invariance.augmentations.base import (
    CLOSED,
    WIDTHS,
    Augmentation,
    Openings,
    Shape,
    check_draws,
    check_n_samples,
    check_names,
)
from laplace_invariance.draws import fixed_cube, grid_cube, sample_cube
from laplace_invariance.precision import HALF, single, without_autocast

__all__ = ["BoxAugmentation", "BoxOptions", "Init", "Names", "as_factor", "in_degrees"]

CONSTRAINTS = (None, "softplus", "tanh")
DRAWS = ("independent", "sobol", "grid")

# Widths at which a search opens ranges with a limit first, as shares of it
SHARES = (0.25, 0.75)
AXES = ("x_", "y_", "z_")

Init = float | Sequence[float] | Mapping[str, float] | Tensor
Names = str | Sequence[str]


class BoxOptions(TypedDict, total=False):
    """Keyword arguments that subclasses of :class:`BoxAugmentation` pass on to it."""

    constraint: str | None
    correlated: bool
    draws: str


class BoxAugmentation(Augmentation):
    """Transformations by coefficients ``c = L e``, ``e`` uniform on ``[-1, 1]^k``.

    ``L = diag(eta)`` by default, so that ``eta_i`` is the half-width of the range of coefficient
    ``i``. With ``correlated=True``, ``L = diag(eta) + tril(mixing, -1)``: independent ranges cannot
    say "both axes are scaled together". Draws are symmetric, so that the sign of ``eta`` means
    nothing; :meth:`magnitudes` and :meth:`ranges` report absolute values.

    Subclasses define :meth:`transform_by`, which must be the identity for coefficients of zero.

    Args:
        names: Names of the coefficients, each that of one generator of transformations.
        limits: Largest useful magnitude of each coefficient, or infinity; :meth:`project_` clamps
            to it.
        init: Initial ``eta``: one number for all generators that are learnt, one number for each
            generator, or a mapping from names (the others are zero).
        learn: Generators to learn: ``"all"``, a name, or names; the others stay at ``init``.
        constraint: None (``eta`` itself), ``"softplus"`` (positive) or ``"tanh"`` (magnitude below
            ``limits``, or below 1 where they are infinite).
        correlated: Whether to learn a lower-triangular mixing of the generators, too.
        draws: ``"sobol"``, evenly spread draws, by another set for every input, which makes the
            mean over samples less noisy (a scrambled Sobol set for powers of two, a Latin hypercube
            for other numbers of samples); ``"independent"``; or ``"grid"``, the same evenly spaced
            draws for every input, for at most two generators whose coefficient is not always zero.
            A grid is symmetric and hence has no gradient at ``init=0``.

    Attributes:
        names: Names of the coefficients.
        learnt: Indices of the generators that are learnt.
        active: Indices of the generators whose coefficient is not always zero.
    """

    eta: Tensor
    mixing: Tensor
    limits: Tensor
    learnt_mask: Tensor

    def __init__(
        self,
        names: Sequence[str],
        limits: Sequence[float],
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "sobol",
    ) -> None:
        super().__init__()
        if constraint not in CONSTRAINTS:
            raise ValueError(f"unknown constraint {constraint!r}; choose from {CONSTRAINTS}")
        if draws not in DRAWS:
            raise ValueError(f"unknown draws {draws!r}; choose from {DRAWS}")
        self.names = tuple(names)
        self.constraint = constraint
        self.correlated = correlated
        self.draws = draws
        if isinstance(learn, str) and learn == "all":
            learn = self.names
        self.learnt = self._indices(learn)
        mask = torch.zeros(len(self.names))
        mask[list(self.learnt)] = 1
        self.register_buffer("limits", torch.tensor(list(limits)), persistent=False)
        self.register_buffer("learnt_mask", mask, persistent=False)
        start = self._initial(init)
        self.register_hyperparameter("eta", self._unconstrained(start))
        if correlated:
            self.register_hyperparameter("mixing", torch.zeros(len(self.names), len(self.names)))
        self.active = tuple(sorted({*self.learnt, *torch.nonzero(start).flatten().tolist()}))
        if draws == "grid" and (correlated or len(self.active) > 2):
            raise ValueError(
                "draws='grid' covers one or two generators without mixing, but "
                f"{[self.names[i] for i in self.active]} can differ from zero; use draws='sobol' "
                "or fewer names in learn="
            )

    def _indices(self, names: Names) -> tuple[int, ...]:
        """Return the sorted indices of generators that are given by name."""
        if isinstance(names, str):
            names = (names,)
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"{type(self).__name__} has no generator {name!r}; "
                    f"choose from {', '.join(self.names)}"
                )
        return tuple(sorted(self.names.index(name) for name in names))

    def _initial(self, init: Init) -> Tensor:
        """Return the initial half-widths ``[k]``, before any constraint."""
        if isinstance(init, Mapping):
            values = torch.zeros(len(self.names))
            for name, value in init.items():
                values[self._indices(name)[0]] = value
        else:
            values = torch.as_tensor(init, dtype=torch.get_default_dtype()).detach().clone()
            if values.ndim == 0:
                values = values * self.learnt_mask
        if values.shape != (len(self.names),):
            raise ValueError(
                f"init must be one number or {len(self.names)}, for {', '.join(self.names)}; "
                f"got {list(values.shape)}"
            )
        if not torch.isfinite(values).all():
            raise ValueError(f"init must be finite, got {values.tolist()}")
        self._check_angles(values)
        return values

    def _check_angles(self, values: Tensor) -> None:
        """Raise if an initial angle is beyond half a turn, most likely because it is in degrees."""
        for name, value, limit in zip(self.names, values, self.limits, strict=True):
            is_angle = math.isclose(limit, math.pi, rel_tol=1e-6)
            if is_angle and value.abs() > limit * (1 + 1e-6):  # but for round-off
                raise ValueError(
                    f"{name} must be at most pi, which is all angles, got {value:.4g}; it is in "
                    "radians: 90 degrees are math.radians(90)"
                )

    def _bounds(self) -> Tensor:
        """Return the bounds ``[k]`` of the constraint ``"tanh"``: the limits, or 1."""
        limits = single(self.limits)
        return torch.where(torch.isfinite(limits), limits, torch.ones_like(limits))

    def _unconstrained(self, widths: Tensor) -> Tensor:
        """Return the ``eta`` of given :meth:`half_widths`; only what is learnt is constrained."""
        if self.constraint is None:
            return widths
        if self.constraint == "softplus":
            # zero is at minus infinity; 1e-3 is a range that changes nothing and has a gradient
            positive = widths.abs().clamp(min=1e-3)
            eta = positive + torch.log(-torch.expm1(-positive))  # which does not overflow
        else:
            bounds = self._bounds()
            if (widths.abs() >= bounds).any():
                raise ValueError(
                    f"init must be below {bounds.tolist()} in magnitude for constraint='tanh', "
                    f"got {widths.tolist()}"
                )
            eta = bounds * torch.atanh(widths / bounds)
        return torch.where(self.learnt_mask > 0, eta, widths)

    def half_widths(self) -> Tensor:
        """Return the constrained ``eta``, ``[k]``, in single precision or better.

        It is differentiable inside :func:`~laplace_invariance.hyper.differentiable`, where learnt.
        """
        eta = widths = single(self.hyperparameter("eta"))
        if self.constraint == "softplus":
            widths = F.softplus(eta)
        elif self.constraint == "tanh":
            bounds = self._bounds()
            widths = bounds * torch.tanh(eta / bounds)
        return torch.where(self.learnt_mask > 0, widths, eta.detach())

    @without_autocast()
    def coefficients(self, draws: Tensor) -> Tensor:
        """Return the coefficients ``L e`` ``[..., k]`` of draws ``e`` ``[..., k]``."""
        widths = self.half_widths()
        draws = draws.to(widths)
        if not self.correlated:
            return draws * widths
        learnt = self.learnt_mask
        mixing = torch.tril(single(self.hyperparameter("mixing")), -1)
        return draws @ (torch.diag(widths) + mixing * torch.outer(learnt, learnt)).mT

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Return fresh draws ``[n, n_samples, k]``, or the fixed ones ``[1, ...]`` of a grid."""
        if self.draws == "grid":
            return self.fixed(n_samples)
        check_n_samples(n_samples)
        return sample_cube(self.draws, n, n_samples, len(self.names), self.eta, generator)

    def fixed(self, n_samples: int) -> Tensor:
        """Return one set of draws ``[1, n_samples, k]``, always the same, evenly spread."""
        check_n_samples(n_samples)
        if self.draws == "grid":
            return grid_cube(n_samples, len(self.names), self.active, self.eta)
        return fixed_cube(n_samples, len(self.names), self.eta)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by given ``draws`` ``[n or 1, n_samples, k]``."""
        check_draws(draws, len(x), (len(self.names),), self)
        with without_autocast():
            samples = self.transform_by(single(x), self.coefficients(draws))
        return samples.to(x.dtype) if x.dtype in HALF else samples

    def transform_by(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by given ``coefficients`` ``[n or 1, n_samples, k]``.

        Returns:
            Samples ``[n, n_samples, ...]``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def magnitudes(self) -> dict[str, float]:
        """Return the largest magnitude that each coefficient can take, by name."""
        units = torch.eye(len(self.names), dtype=self.eta.dtype, device=self.eta.device)
        reach = self.coefficients(units).abs().sum(0)
        return dict(zip(self.names, reach.tolist(), strict=True))

    def ranges(self, shape: Shape | None = None) -> dict[str, str]:
        """Return the range of each coefficient, by name, in words and units."""
        reach = self.magnitudes()
        return {name: self.in_words(name, value, shape) for name, value in reach.items()}

    def openings(self) -> Openings:
        """Return which learnt ranges open together: those of all axes, and others alone."""
        if not self.eta.requires_grad:
            return {}
        units: dict[str, list[int]] = {}
        for i in self.learnt:
            name = self.names[i]
            kind = name[2:] if name[:2] in AXES else name
            units.setdefault(kind, []).append(i)
        found: Openings = {}
        for indices in units.values():
            limit = min(self.largest(self.names[i]) for i in indices)
            widths: tuple[float, ...] = WIDTHS
            if math.isfinite(limit):
                widths = tuple(share * limit for share in SHARES)
            found[tuple(self.names[i] for i in indices)] = widths
        return found

    def largest(self, name: str) -> float:
        """Return the limit of a range; with ``"tanh"`` a width below its bound, with a gradient."""
        (i,) = self._indices(name)
        if self.constraint == "tanh":
            return 0.95 * self._bounds()[i].item()
        return self.limits[i].item()

    @torch.no_grad()
    def open_(self, widths: Mapping[str, float]) -> None:
        """Set learnt ranges to given widths, in place, and those that are not named to zero."""
        check_names(self, widths, [self.names[i] for i in self.learnt])
        wanted = self.half_widths()
        for i in self.learnt:
            wanted[i] = self._possible_width(i, float(widths.get(self.names[i], 0.0)))
        self.eta.copy_(self._unconstrained(wanted))
        if self.correlated:
            self.mixing.zero_()

    def _possible_width(self, i: int, width: float) -> float:
        """Return a width, or the nearest that a constraint lets it have; raise if out of limits."""
        limit = self.limits[i].item()
        if not 0 <= width <= limit * (1 + 1e-6):
            raise ValueError(
                f"{self.names[i]} must be between 0 and {limit:.4g}, its limit, got {width}"
            )
        if self.constraint == "tanh":  # which comes to its bound at infinity
            width = min(width, 0.9999 * self._bounds()[i].item())
        return width

    def widths(self) -> dict[str, float]:
        """Return the widths of learnt ranges, by name."""
        if not self.eta.requires_grad:
            return {}
        reach = self.magnitudes()
        return {self.names[i]: reach[self.names[i]] for i in self.learnt}

    @torch.no_grad()
    def resize_(self, name: str, width: float) -> None:
        """Set one learnt range to a given width, in place; all others stay as they are.

        Its correlations with others stay, too.
        """
        check_names(self, {name: width}, list(self.widths()))
        before = self.widths()[name]
        if width == before:  # to the last digit, whatever the constraint
            return
        (i,) = self._indices(name)
        width = self._possible_width(i, width)
        wanted = torch.zeros_like(self.half_widths())
        wanted[i] = width
        if before > CLOSED:
            wanted[i] = self.half_widths()[i] * (width / before)
        self.eta[i] = self._unconstrained(wanted)[i]
        if self.correlated and before > CLOSED:
            self.mixing[i] *= width / before

    def entries(self, name: str) -> list[Tensor]:
        """Return the numbers that a range is made of: its ``eta``, and what is mixed into it."""
        (i,) = self._indices(name)
        own = [self.eta.detach()[i]]
        if self.correlated:
            own.append(self.mixing.detach()[i])
        return own

    def project_(self) -> None:
        """Clamp ``eta`` to the limits, in place, unless a constraint keeps it within them."""
        if self.constraint is None:
            self.eta.data.copy_(self.eta.data.maximum(-self.limits).minimum(self.limits))


def in_degrees(magnitude: float) -> str:
    """Return a range of angles, given in radians, in words."""
    return f"±{math.degrees(magnitude):.1f} degrees"


def as_factor(magnitude: float) -> str:
    """Return a range of logarithms in words, as that of the factor."""
    return f"factor {math.exp(-magnitude):.2f} to {math.exp(magnitude):.2f}"
