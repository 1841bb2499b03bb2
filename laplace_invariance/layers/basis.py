"""Functions on a small grid, as sums of a few basis functions.

A function ``f`` on ``T`` grid points is given by ``M`` numbers ``u`` that belong to anchors ``z``, through the kernel
``k(r) = exp(-omega^2 r^2 / 2)``:

    f = u Phi,      regression:   Phi = (K_zz + 1e-4 I)^-1 K_zt,    exponential:   Phi = K_zt,

with ``Phi`` ``[M, T]``. In a regression ``u`` are, but for the jitter, the values of ``f`` at the anchors, and the kernel says
how to go on between them. Positions are in units of the grid's spacing, and zero is the middle of the grid. The larger
``omega``, the narrower and the less smooth are the functions; its sign means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.hyper import Hyperparameterised

__all__ = ["Basis", "basis_derivative", "basis_matrix", "grid_points", "spread"]

JITTER = 1e-4
KINDS = ("regression", "exponential")
ANCHORS = ("grid", "random", "learnt")
LEARN_OMEGA = ("fixed", "weight", "hyperparameter")


def grid_points(height: int, width: int) -> Tensor:
    """Return the positions ``[height * width, 2]`` of a grid, row by row, around its middle."""
    rows = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    return torch.cartesian_prod(rows, columns)


def spread(height: int, width: int) -> Tensor:
    """Return the indices ``[height * width]`` of grid points in an order of which any beginning is spread evenly.

    It is that of ordered dithering, outwards from a point in or next to the middle. The first half, rounded up, are the
    fields of one colour of a chessboard.
    """
    row = torch.arange(height) - height // 2
    column = torch.arange(width) - (
        width // 2 + (height // 2 + width // 2) % 2
    )  # keeps the colour of the corners
    row, column = torch.meshgrid(row, column, indexing="ij")
    rank = torch.zeros_like(row)
    for bit in range(max(height, width).bit_length()):
        rank = 4 * rank + 2 * ((row ^ column) >> bit & 1) + (row >> bit & 1)
    return rank.flatten().argsort()


def _squared_distances(z: Tensor, t: Tensor) -> Tensor:
    return (z.unsqueeze(1) - t).square().sum(-1)


def _kernel(omega: Tensor, squared: Tensor) -> Tensor:
    return torch.exp(-(omega**2) * squared / 2)


def _jittered(kernel: Tensor) -> Tensor:
    return kernel + JITTER * torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)


def basis_matrix(kind: str, omega: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return ``Phi`` ``[M, T]`` for anchors ``z`` ``[M, 2]``, grid points ``t`` ``[T, 2]`` and a number ``omega``."""
    k_zt = _kernel(omega, _squared_distances(z, t))
    if kind == "exponential":
        return k_zt
    return torch.linalg.solve(_jittered(_kernel(omega, _squared_distances(z, z))), k_zt)


def basis_derivative(kind: str, omega: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return ``dPhi / domega`` ``[M, T]``; of a regression, ``(K_zz + 1e-4 I)^-1 (dK_zt - dK_zz Phi)``."""
    squared = _squared_distances(z, t)
    k_zt = _kernel(omega, squared)
    dk_zt = -omega * squared * k_zt
    if kind == "exponential":
        return dk_zt
    squared = _squared_distances(z, z)
    k_zz = _kernel(omega, squared)
    dk_zz = -omega * squared * k_zz
    return torch.linalg.solve(
        _jittered(k_zz), dk_zt - dk_zz @ torch.linalg.solve(_jittered(k_zz), k_zt)
    )


class Basis(Hyperparameterised):
    """Base class of layers whose weights are sums of basis functions on a grid: they own ``omega`` and ``anchors``.

    Whatever is learnt, both are in ``state_dict()`` under these names, ``omega`` as ``[1]`` and ``anchors`` as ``[M, 2]``.

    Args:
        shape: height and width of the grid.
        kind: ``"regression"`` or ``"exponential"``, see the top of the module.
        n_anchors: how many; None is half as many as grid points, rounded up.
        anchors: ``"grid"`` takes grid points that are spread evenly, ``"random"`` distinct grid points at random, ``"learnt"``
            makes the positions a hyperparameter that starts like ``"grid"`` and stays within the grid.
        omega: the inverse width of the basis functions, at first.
        learn_omega: what ``omega`` is: ``"fixed"``, a ``"weight"``, which the training loss moves and which has a prior and
            curvature, or a ``"hyperparameter"``, which the evidence moves.
        generator: of random anchors; None is torch's default generator.
    """

    own_prior_parameters = ("omega",)  # a width says nothing about how much of a path is used

    def __init__(
        self,
        shape: Sequence[int],
        kind: str = "regression",
        n_anchors: int | None = None,
        anchors: str = "grid",
        omega: float = 1.0,
        learn_omega: str = "fixed",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("kind", kind, KINDS), ("anchors", anchors, ANCHORS), ("learn_omega", learn_omega, LEARN_OMEGA),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}"
                )
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(
                f"the grid of a basis has a height and a width, both positive, got {tuple(shape)}"
            )
        if not (math.isfinite(omega) and omega > 0):
            raise ValueError(f"omega must be positive and finite, got {omega}")
        self.kind, self.learn_omega = kind, learn_omega
        self.grid = height, width = int(shape[0]), int(shape[1])
        self.n_points = height * width
        self.n_anchors = (self.n_points + 1) // 2 if n_anchors is None else n_anchors
        if not 1 <= self.n_anchors <= self.n_points:
            raise ValueError(
                f"n_anchors must be at least 1 and at most {self.n_points}, the points of a grid of {height} x {width}; "
                f"got {n_anchors}"
            )
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None
        if anchors == "random":
            order = torch.randperm(
                self.n_points, generator=generator, device=generator and generator.device
            ).cpu()
        else:
            order = spread(height, width)
        positions = grid_points(height, width)[order[: self.n_anchors]].to(
            torch.get_default_dtype()
        )
        self._register("anchors", positions, "hyperparameter" if anchors == "learnt" else "fixed")
        self._register("omega", torch.tensor([float(omega)]), learn_omega)

    def _register(self, name: str, value: Tensor, role: str) -> None:
        if role == "weight":
            self.register_parameter(name, nn.Parameter(value))
        elif role == "hyperparameter":
            self.register_hyperparameter(name, value)
        else:
            self.register_buffer(name, value)

    def _current(self) -> tuple[Tensor, Tensor]:
        """Return omega and anchors, those of them that are hyperparameters detached unless inside ``differentiable()``."""
        names = self._hyperparameter_names
        omega, anchors = (
            self.hyperparameter(n) if n in names else getattr(self, n) for n in ("omega", "anchors")
        )
        return omega, anchors

    def _evaluate(self, function: Callable[..., Tensor], omega: Tensor, anchors: Tensor) -> Tensor:
        # In double precision, whatever that of the weights: neighbouring rows of a smooth kernel are nearly the same.
        points = grid_points(*self.grid).to(omega.device)
        return (
            function(self.kind, omega.double(), anchors.double(), points)
            .to(omega.dtype)
            .contiguous()
        )

    def matrix(self) -> Tensor:
        """Return ``Phi`` ``[M, T]``, differentiable in what is a weight and, inside ``differentiable()``, a hyperparameter.

        Where nothing is to be differentiated it is computed only after ``omega`` or ``anchors`` changed.
        """
        omega, anchors = self._current()
        if torch.is_grad_enabled() and (omega.requires_grad or anchors.requires_grad):
            return self._evaluate(basis_matrix, omega, anchors)
        if self._cache is None or not all(map(_same, self._cache, (omega, anchors))):
            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # for later passes that are differentiated
                self._cache = (
                    omega.clone(),
                    anchors.clone(),
                    self._evaluate(basis_matrix, omega, anchors),
                )
        return self._cache[2]

    def derivative(self) -> Tensor:
        """Return ``dPhi / domega`` ``[M, T]``, differentiable in the same."""
        return self._evaluate(basis_derivative, *self._current())

    def amplitude(self) -> float:
        """Return the root mean square, over the grid, of functions with independent coefficients of unit variance."""
        with torch.no_grad():
            return self.matrix().square().sum(0).mean().sqrt().item()

    def project_(self) -> None:
        """Make ``omega`` positive, which changes nothing else, and move learnt anchors that left the grid to its edge."""
        if "omega" in self._hyperparameter_names:
            self.omega.abs_()
        if "anchors" in self._hyperparameter_names:
            corner = grid_points(*self.grid)[-1].to(self.anchors)
            self.anchors.clamp_(-corner, corner)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def extra_repr(self) -> str:
        learnt = "learnt " if "anchors" in self._hyperparameter_names else ""
        basis = (
            f"{self.kind} from {self.n_anchors} {learnt}anchors on {self.grid[0]} x {self.grid[1]}"
        )
        return f"{basis}, omega={self.omega.item():.3g} ({self.learn_omega})"


def _same(kept: Tensor, now: Tensor) -> bool:
    # Values, not version counters: `omega.data.fill_(2)` and `vector_to_parameters` leave those alone.
    return (kept.dtype, kept.device) == (now.dtype, now.device) and torch.equal(kept, now)
