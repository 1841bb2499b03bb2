"""Functions on a small grid, as sums of a few basis functions.

A function ``f`` on ``T`` grid points is given by ``M`` numbers ``u`` that belong to anchors
``z``, through the kernel ``k(r) = exp(-omega^2 r^2 / 2)``:

    f = u Phi,      regression:   Phi = (K_zz + 1e-4 I)^-1 K_zt,    exponential:   Phi = K_zt,

with ``Phi`` ``[M, T]``. In a regression ``u`` are, but for the jitter, the values of ``f`` at
the anchors, and the kernel interpolates between them. Positions are in units of the grid's
spacing, and zero is the middle of the grid. The larger ``omega``, the narrower and the less
smooth are the functions; its sign means nothing.

A function on a finite group and a grid has a grid point for each element and position. Elements
are matrices, whose distance the group does not change, in a unit in which the nearest are as far
apart as neighbouring positions; squared distances of element and position add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laplace_invariance.hyper import Hyperparameterised
from laplace_invariance.layers.symmetry import Group

__all__ = ["Basis", "HasBasis", "basis_derivative", "basis_matrix", "grid_points", "spread"]

JITTER = 1e-4
CHOICES = {
    "kind": ("regression", "exponential"),
    "anchors": ("grid", "random", "learnt"),
    "learn_omega": ("fixed", "weight", "hyperparameter"),
}


def grid_points(height: int, width: int, device: torch.device | None = None) -> Tensor:
    """Return the positions ``[height * width, 2]`` of a grid, row by row, around its middle."""
    rows = torch.arange(height, dtype=torch.float64, device=device) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float64, device=device) - (width - 1) / 2
    return torch.cartesian_prod(rows, columns)


def spread(height: int, width: int) -> Tensor:
    """Return the indices ``[height * width]`` of grid points in an order that spreads them.

    The first few, however many, are spread evenly over the grid. The order is that of ordered
    dithering, outwards from a point in or next to the middle. The first half, rounded up, are
    the fields of one colour of a chessboard.
    """
    middle_row = height // 2
    middle_column = width // 2
    # One column further where the middle has the other colour than the corners.
    middle_column += (middle_row + middle_column) % 2
    row, column = torch.meshgrid(
        torch.arange(height) - middle_row, torch.arange(width) - middle_column, indexing="ij"
    )
    rank = torch.zeros_like(row)
    for bit in range(max(height, width).bit_length()):
        rank = 4 * rank + 2 * ((row ^ column) >> bit & 1) + (row >> bit & 1)
    return rank.flatten().argsort()


def spread_on_group(order: int, height: int, width: int) -> Tensor:
    """Return the indices ``[order * height * width]`` of :func:`spread`, for all elements in turn.

    Every other element has them from the last to the first. Its first half then are the fields of
    the other colour.
    """
    positions = spread(height, width)
    both = torch.stack([positions, positions.flip(0)])
    elements = torch.arange(order)
    return (both[elements % 2] + len(positions) * elements.unsqueeze(1)).T.flatten()


def _squared_distances(z: Tensor, t: Tensor) -> Tensor:
    return (z.unsqueeze(1) - t).square().sum(-1)


def _kernel(omega: Tensor, squared: Tensor) -> Tensor:
    return torch.exp(-(omega**2) * squared / 2)


def _jittered(kernel: Tensor) -> Tensor:
    return kernel + JITTER * torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)


def _solved(kernel: Tensor, right: Tensor) -> Tensor:
    """Return ``(K + 1e-4 I)^-1 B``; the matrix is never singular, so nobody waits to be told."""
    return torch.linalg.solve_ex(_jittered(kernel), right).result


def basis_matrix(kind: str, omega: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return the basis functions ``Phi`` ``[M, T]``.

    Args:
        kind: ``"regression"`` or ``"exponential"``, see the top of the module.
        omega: Inverse width of the kernel, one number.
        z: Anchors ``[M, 2]``.
        t: Grid points ``[T, 2]``.
    """
    k_zt = _kernel(omega, _squared_distances(z, t))
    if kind == "exponential":
        return k_zt
    k_zz = _kernel(omega, _squared_distances(z, z))
    return _solved(k_zz, k_zt)


def basis_derivative(kind: str, omega: Tensor, z: Tensor, t: Tensor) -> Tensor:
    """Return ``dPhi / domega`` ``[M, T]``, with the arguments of :func:`basis_matrix`.

    For a regression it is ``(K_zz + 1e-4 I)^-1 (dK_zt - dK_zz Phi)``.
    """
    squared = _squared_distances(z, t)
    k_zt = _kernel(omega, squared)
    dk_zt = -omega * squared * k_zt
    if kind == "exponential":
        return dk_zt
    squared = _squared_distances(z, z)
    k_zz = _kernel(omega, squared)
    dk_zz = -omega * squared * k_zz
    phi = _solved(k_zz, k_zt)
    return _solved(k_zz, dk_zt - dk_zz @ phi)


class HasBasis(Hyperparameterised):
    """Base class of layers whose weights are sums of basis functions on a grid.

    It owns ``omega`` ``[1]`` and ``anchors`` ``[M, 2]``, which are in ``state_dict()`` under
    these names, whether they are learnt or not. On a group, anchors have further coordinates.
    """

    # Parameters that keep a prior precision of their own where a path shares one: the width of
    # basis functions says nothing about how much of a path is used.
    own_prior_parameters: ClassVar[tuple[str, ...]] = ("omega",)

    omega: Tensor
    anchors: Tensor
    elements: Tensor | None  # where the elements of a group are, [order, coordinates]

    def _add_basis(
        self,
        shape: Sequence[int],
        kind: str = "regression",
        n_anchors: int | None = None,
        anchors: str = "grid",
        omega: float = 1.0,
        learn_omega: str = "fixed",
        generator: torch.Generator | None = None,
        group: Group | None = None,
    ) -> None:
        """Add the functions; arguments are those of :class:`Basis`."""
        _check_choices(kind=kind, anchors=anchors, learn_omega=learn_omega)
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(
                f"the grid of a basis has a height and a width, both positive, got {tuple(shape)}"
            )
        if group is not None and shape[0] % group.order:
            raise ValueError(
                f"a grid on group {group.name!r} has a height of {group.order} times that of an "
                f"element, got {shape[0]}"
            )
        if not (math.isfinite(omega) and omega > 0):
            raise ValueError(f"omega must be positive and finite, got {omega}")
        self.kind = kind
        self.learn_omega = learn_omega
        self.grid = int(shape[0]), int(shape[1])
        self.on_group = group
        self.register_buffer("elements", None if group is None else group.embedding, False)
        self.n_points = math.prod(self.grid)
        self.n_anchors = (self.n_points + 1) // 2 if n_anchors is None else n_anchors
        if not 1 <= self.n_anchors <= self.n_points:
            raise ValueError(
                f"n_anchors must be at least 1 and at most {self.n_points}, the points of a grid "
                f"of {self.grid[0]} x {self.grid[1]}; got {n_anchors}"
            )
        self._cache: tuple[Tensor, Tensor, Tensor] | None = None  # omega, anchors, and their matrix
        positions = self._initial_anchors(anchors == "random", generator)
        self._register("anchors", positions, "hyperparameter" if anchors == "learnt" else "fixed")
        self._register("omega", torch.tensor([float(omega)]), learn_omega)

    def points(self, device: torch.device | None = None) -> Tensor:
        """Return the grid points, ``[T, 2]`` or, on a group, ``[T, 2 + coordinates]``."""
        height, width = self.grid
        if self.elements is None:
            return grid_points(height, width, device)
        elements = self.elements.double()
        positions = grid_points(height // len(elements), width, device)
        n_positions = len(positions)
        return torch.cat(
            [positions.repeat(len(elements), 1), elements.repeat_interleave(n_positions, 0)], 1
        )

    def _initial_anchors(self, random: bool, generator: torch.Generator | None) -> Tensor:
        if random:
            device = None if generator is None else generator.device
            order = torch.randperm(self.n_points, generator=generator, device=device).cpu()
        elif self.on_group is None:
            order = spread(*self.grid)
        else:
            n_elements = self.on_group.order
            order = spread_on_group(n_elements, self.grid[0] // n_elements, self.grid[1])
        chosen = self.points()[order[: self.n_anchors]]
        return chosen.to(torch.get_default_dtype())

    def _register(self, name: str, value: Tensor, role: str) -> None:
        if role == "weight":
            self.register_parameter(name, nn.Parameter(value))
        elif role == "hyperparameter":
            self.register_hyperparameter(name, value)
        else:
            self.register_buffer(name, value)

    def _current(self, name: str) -> Tensor:
        """Return a tensor; a hyperparameter is detached unless inside ``differentiable()``."""
        if name in self._hyperparameter_names:
            return self.hyperparameter(name)
        return getattr(self, name)

    def _evaluate(self, function: Callable[..., Tensor], omega: Tensor, anchors: Tensor) -> Tensor:
        # In double precision, whatever that of the weights: neighbouring rows of a smooth kernel
        # are nearly the same.
        points = self.points(omega.device)
        values = function(self.kind, omega.double(), anchors.double(), points)
        return values.to(omega.dtype).contiguous()

    def matrix(self) -> Tensor:
        """Return ``Phi`` ``[M, T]``.

        It is differentiable in ``omega`` if that is a weight and, inside ``differentiable()``,
        in hyperparameters. Where nothing is to be differentiated it is computed, on a CPU, only
        after ``omega`` or ``anchors`` changed; on a GPU, to compare them would be to wait for it.
        """
        omega = self._current("omega")
        anchors = self._current("anchors")
        differentiate = torch.is_grad_enabled() and (omega.requires_grad or anchors.requires_grad)
        if differentiate or omega.device.type != "cpu":
            return self._evaluate(basis_matrix, omega, anchors)
        if self._cache is not None:
            kept_omega, kept_anchors, kept = self._cache
            if _same(kept_omega, omega) and _same(kept_anchors, anchors):
                return kept
        # Not an inference tensor: later passes that are differentiated use it, too.
        with torch.inference_mode(False), torch.no_grad():
            matrix = self._evaluate(basis_matrix, omega, anchors)
            self._cache = omega.clone(), anchors.clone(), matrix
        return matrix

    def derivative(self) -> Tensor:
        """Return ``dPhi / domega`` ``[M, T]``, differentiable in the same tensors as the matrix."""
        return self._evaluate(basis_derivative, self._current("omega"), self._current("anchors"))

    def amplitude(self) -> float:
        """Return the root mean square of functions whose coefficients have unit variance."""
        with torch.no_grad():
            return self.matrix().square().sum(0).mean().sqrt().item()

    def project_(self) -> None:
        """Make ``omega`` positive, which changes nothing else, and keep anchors on the grid."""
        if "omega" in self._hyperparameter_names:
            self.omega.abs_()
        if "anchors" in self._hyperparameter_names:
            points = self.points(self.anchors.device).to(self.anchors.dtype)
            self.anchors.clamp_(points.amin(0), points.amax(0))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None}

    def extra_repr(self) -> str:
        learnt = "learnt " if "anchors" in self._hyperparameter_names else ""
        anchors = f"{self.n_anchors} {learnt}anchors on {self.grid[0]} x {self.grid[1]}"
        return f"{self.kind} from {anchors}, omega={self.omega.item():.3g} ({self.learn_omega})"


class Basis(HasBasis):
    """Basis functions on a grid.

    Args:
        shape: Height and width of the grid.
        kind: ``"regression"`` or ``"exponential"``, see the top of the module.
        n_anchors: Number of anchors; None is half the number of grid points, rounded up.
        anchors: Where anchors are. ``"grid"`` takes grid points that are spread evenly,
            ``"random"`` distinct grid points at random, ``"learnt"`` makes the positions a
            hyperparameter that starts like ``"grid"`` and stays within the grid.
        omega: Initial inverse width of the basis functions.
        learn_omega: What ``omega`` is: ``"fixed"``; a ``"weight"``, which the training loss
            changes and which has a prior and curvature; or a ``"hyperparameter"``, which the
            evidence changes.
        generator: Source of random anchors; None is torch's default generator.
        group: Group that the functions are on, too. The grid is then that of all elements, one
            below the other, so that its height is ``order`` times that of the positions.
    """

    def __init__(
        self,
        shape: Sequence[int],
        kind: str = "regression",
        n_anchors: int | None = None,
        anchors: str = "grid",
        omega: float = 1.0,
        learn_omega: str = "fixed",
        generator: torch.Generator | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self._add_basis(shape, kind, n_anchors, anchors, omega, learn_omega, generator, group)


def _check_choices(**options: str) -> None:
    for name, value in options.items():
        known = CHOICES[name]
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def _same(kept: Tensor, now: Tensor) -> bool:
    # Values, not version counters, which `omega.data.fill_(2)` and `vector_to_parameters` leave
    # alone.
    if kept.dtype != now.dtype or kept.device != now.device:
        return False
    return torch.equal(kept, now)
