"""Augmentations whose coefficients are drawn from a learnt box or parallelepiped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import laplace_invariance.augmentations.sampling as sampling
from laplace_invariance.augmentations.base import Augmentation, check_draws, check_n_samples

__all__ = ["BoxAugmentation"]

CONSTRAINTS = (None, "softplus", "tanh")
DRAWS = ("independent", "sobol", "grid")

Init = float | Sequence[float] | Mapping[str, float] | Tensor
Names = str | Sequence[str]


class BoxAugmentation(Augmentation):
    """Transformations by coefficients ``c = L e``, ``e`` uniform on ``[-1, 1]^k``.

    ``L = diag(eta)`` by default, so that ``eta_i`` is the half-width of the range of coefficient ``i``. With
    ``correlated=True``, ``L = diag(eta) + tril(mixing, -1)``: independent ranges cannot say "both axes are scaled together".
    Draws are symmetric, so the sign of ``eta`` means nothing; :meth:`magnitudes` and :meth:`ranges` report absolute values.
    Subclasses say in :meth:`move` what coefficients do to an input: nothing, if they are zero.

    Args:
        names: the coefficients' names, each of one generator of transformations.
        limits: the largest useful magnitude of each, or infinity; :meth:`project_` clamps to it.
        init: initial ``eta``: one number, one per generator, or a mapping from names (others are zero).
        learn: ``"all"``, a name, or names of the generators to learn; the others stay at ``init``.
        constraint: None (``eta`` itself), ``"softplus"`` (positive) or ``"tanh"`` (magnitude below ``limits``, or 1).
        correlated: learn a lower-triangular mixing of the generators, too.
        draws: ``"independent"``; ``"sobol"``, spread like a Sobol set, another one for every input: each draw is uniform, and
            the samples of one input cover the range evenly, which makes their mean less noisy; or ``"grid"``, the same evenly
            spaced draws for every input, for at most two generators that move. A grid is symmetric, hence has no gradient at
            ``init=0``.
    """

    def __init__(
        self,
        names: Sequence[str],
        limits: Sequence[float],
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "independent",
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
        self.learnt = self._indices(
            self.names if isinstance(learn, str) and learn == "all" else learn
        )
        mask = torch.zeros(len(self.names))
        mask[list(self.learnt)] = 1
        self.register_buffer("limits", torch.tensor(list(limits)), persistent=False)
        self.register_buffer("learnt_mask", mask, persistent=False)
        start = self._initial(init)
        self.register_hyperparameter("eta", self._unconstrained(start))
        if correlated:
            self.register_hyperparameter("mixing", torch.zeros(len(self.names), len(self.names)))
        self.moving = tuple(sorted({*self.learnt, *torch.nonzero(start).flatten().tolist()}))
        if draws == "grid" and (correlated or len(self.moving) > 2):
            raise ValueError(
                "draws='grid' covers one or two generators without mixing, but "
                f"{[self.names[i] for i in self.moving]} can move; use draws='sobol' or fewer names in learn="
            )

    def _indices(self, names: Names) -> tuple[int, ...]:
        names = (names,) if isinstance(names, str) else tuple(names)
        for name in names:
            if name not in self.names:
                raise ValueError(
                    f"{type(self).__name__} has no generator {name!r}; choose from {', '.join(self.names)}"
                )
        return tuple(sorted(self.names.index(name) for name in names))

    def _initial(self, init: Init) -> Tensor:
        k = len(self.names)
        if isinstance(init, Mapping):
            values = torch.zeros(k)
            for name, value in init.items():
                values[self._indices(name)[0]] = value
        else:
            values = torch.as_tensor(init, dtype=torch.get_default_dtype()).detach().clone()
            if values.ndim == 0:  # one number: the range of what is learnt
                values = values * self.learnt_mask
            if values.shape != (k,):
                raise ValueError(
                    f"init must be one number or {k}, for {', '.join(self.names)}; got {list(values.shape)}"
                )
        if not torch.isfinite(values).all():
            raise ValueError(f"init must be finite, got {values.tolist()}")
        return values

    def _bounds(self) -> Tensor:
        return torch.where(torch.isfinite(self.limits), self.limits, torch.ones_like(self.limits))

    def _unconstrained(self, values: Tensor) -> Tensor:
        """Return the ``eta`` whose constrained value is ``values``; what is not learnt is not constrained either."""
        if self.constraint == "softplus":
            # zero is at minus infinity; 1e-3 is a range that changes nothing and still has a gradient
            raw = torch.log(torch.expm1(values.abs().clamp(min=1e-3)))
            return torch.where(self.learnt_mask > 0, raw, values)
        if self.constraint == "tanh":
            bounds = self._bounds()
            if (values.abs() >= bounds).any():
                raise ValueError(
                    f"init must be below {bounds.tolist()} in magnitude for constraint='tanh', got {values.tolist()}"
                )
            return torch.where(self.learnt_mask > 0, bounds * torch.atanh(values / bounds), values)
        return values

    def half_widths(self) -> Tensor:
        """Return the constrained ``eta``, ``[k]``; differentiable inside ``differentiable()`` where learnt."""
        eta = widths = self.hyperparameter("eta")
        if self.constraint == "softplus":
            widths = F.softplus(eta)
        elif self.constraint == "tanh":
            bounds = self._bounds()
            widths = bounds * torch.tanh(eta / bounds)
        return torch.where(self.learnt_mask > 0, widths, eta.detach())

    def coefficients(self, draws: Tensor) -> Tensor:
        """Return ``L e`` for draws ``e``, ``[..., k]``."""
        widths = self.half_widths()
        if not self.correlated:
            return draws * widths
        learnt = self.learnt_mask
        mixing = torch.tril(self.hyperparameter("mixing"), -1) * torch.outer(learnt, learnt)
        return draws @ (torch.diag(widths) + mixing).mT

    def sample(self, n: int, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        check_n_samples(n_samples)
        if self.draws == "grid":
            return self.fixed(n_samples)
        return sampling.sample(self.draws, n, n_samples, len(self.names), self.eta, generator)

    def fixed(self, n_samples: int) -> Tensor:
        check_n_samples(n_samples)
        if self.draws == "grid":
            return sampling.grid(n_samples, len(self.names), self.moving, self.eta)
        return sampling.sobol(n_samples, len(self.names), self.eta)

    def transform(self, x: Tensor, draws: Tensor) -> Tensor:
        check_draws(draws, len(x), (len(self.names),), self)
        return self.move(x, self.coefficients(draws.to(self.eta)))

    def move(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """Transform ``x`` ``[n, ...]`` by ``coefficients`` ``[n or 1, n_samples, k]`` into ``[n, n_samples, ...]``."""
        raise NotImplementedError

    @torch.no_grad()
    def magnitudes(self) -> dict[str, float]:
        """Return the largest magnitude that each coefficient can take, by name (radians for rotations)."""
        reach = self.coefficients(torch.eye(len(self.names)).to(self.eta)).abs().sum(0)
        return dict(zip(self.names, reach.tolist(), strict=True))

    def project_(self) -> None:
        if self.constraint is None:
            self.eta.data.copy_(self.eta.data.maximum(-self.limits).minimum(self.limits))


def in_degrees(magnitude: float) -> str:
    """Say a range of angles, given in radians, in words."""
    return f"±{math.degrees(magnitude):.1f} degrees"


def as_factor(magnitude: float) -> str:
    """Say a range of logarithms in words, as that of the factor."""
    return f"factor {math.exp(-magnitude):.2f} to {math.exp(magnitude):.2f}"
