"""A Kronecker-factored matrix whose log determinant can be differentiated, again and again.

Subclasses of laplace's ``Kron`` and ``KronDecomposed``. Python asks a subclass's ``__radd__``
before the parent's ``__add__``, so ``self.H += H_batch`` inside stock ``KronLaplace.fit`` yields
our class, and its ``decompose`` is ours.

**Structure.** A factor is a matrix ``[d, d]``, a vector ``[d]`` (diagonal), or the blocks
``[q, d, d]`` of a block-diagonal matrix, which are added, decomposed and differentiated one by one;
the large matrix is never formed. If both factors are blocks, ``G`` ``[q, o, o]`` and ``A``
``[q, i, i]``, then block ``q`` of the one meets block ``q`` of the other: the parameter is
``[o, q * i]`` and its curvature that of ``q`` matrices side by side, ``G_q (x) A_q`` each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from itertools import chain
from typing import Any

import torch
from laplace import KronLaplace
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor
from torch.autograd.function import once_differentiable

from laplace_invariance.curvature import eigen, kfac
from laplace_invariance.precision import without_autocast

__all__ = ["DifferentiableKron", "DifferentiableKronDecomposed", "load_state_dict"]


class DifferentiableKron(Kron):
    """Kronecker factors, one list per parameter.

    Args:
        kfacs: For each parameter ``[G, A]``, ``[H]`` for a dense block, or a vector for a diagonal
            one. Factors may be the blocks of block-diagonal matrices.
    """

    kfacs: list[list[Tensor]]  # type: ignore[assignment]  # laplace declares tuples of one tensor

    def __init__(self, kfacs: list[list[Tensor]]) -> None:
        self.kfacs = kfacs

    def __add__(self, other: Kron) -> DifferentiableKron:
        if not isinstance(other, Kron):
            raise ValueError(f"can only add Kron to Kron, got {type(other).__name__}")
        if len(self) != len(other):
            raise ValueError(
                f"cannot add Kronecker factors of {len(self)} and of {len(other)} parameters"
            )
        pairs = zip(self.kfacs, other.kfacs, strict=True)
        return DifferentiableKron([_add(ours, list(theirs)) for ours, theirs in pairs])

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> DifferentiableKron:
        products = []
        for factors in self.kfacs:
            root = scalar ** (1 / len(factors))
            products.append([root * factor for factor in factors])
        return DifferentiableKron(products)

    __rmul__ = __mul__

    @without_autocast()
    def decompose(self, damping: bool = False) -> DifferentiableKronDecomposed:
        """Decompose every factor once; the result keeps the factors, which carry the gradient."""
        if damping:
            warnings.warn(
                "damping=True has no effect: laplace-torch drops it when it adds the prior",
                stacklevel=2,
            )
        if any(factor.requires_grad for factor in chain.from_iterable(self.kfacs)):
            values, vectors = _decomposed(self.kfacs)
            return DifferentiableKronDecomposed(vectors, values, [list(fs) for fs in self.kfacs])
        values, _ = _decomposed(self.kfacs, vectors=False)
        return DifferentiableKronDecomposed(None, values, [list(fs) for fs in self.kfacs])

    @without_autocast()
    def _bmm(self, W: Tensor) -> Tensor:
        shapes = [_outer(diagonals).shape for diagonals in self._diagonals()]
        parts = W.flatten(0, 1).split([shape.numel() for shape in shapes], dim=1)
        products = [
            _rotate(part.unflatten(1, shape), factors).flatten(1)
            for part, shape, factors in zip(parts, shapes, self.kfacs, strict=True)
        ]
        return torch.cat(products, dim=1).view_as(W)

    def _diagonals(self) -> list[list[Tensor]]:
        return [list(map(_diagonal, factors)) for factors in self.kfacs]

    @without_autocast()
    def diag(self) -> Tensor:
        """Return the diagonal."""
        return torch.cat([_outer(diagonals).flatten() for diagonals in self._diagonals()])

    @without_autocast()
    def to_matrix(self) -> Tensor:
        """Return the dense matrix; for tests and small models."""
        diagonal = self.diag()
        return self._bmm(_identity(len(diagonal), diagonal).unsqueeze(0))[0]

    @without_autocast()
    def logdet(self) -> Tensor:
        """Return the log determinant."""
        return self.decompose().logdet()


def _decomposed(
    kfacs: Sequence[Sequence[Tensor]], vectors: bool = True
) -> tuple[list[list[Tensor]], list[list[Tensor | None]]]:
    """Return eigenvalues and, if wanted, eigenvectors, per parameter and factor."""
    pairs = iter(eigen.decompose(list(chain.from_iterable(kfacs)), vectors))
    own = [[next(pairs) for _ in factors] for factors in kfacs]
    values = [[pair[0] for pair in found] for found in own]
    return values, [[pair[1] for pair in found] for found in own]


def _diagonal(factor: Tensor) -> Tensor:
    if factor.ndim == 1:
        return factor
    return factor.diagonal(dim1=-2, dim2=-1)


def _add(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    if [f.shape for f in ours] == [f.shape for f in theirs]:
        return [f.add(t) for f, t in zip(ours, theirs, strict=True)]
    # KronLaplace starts from dense zeros of the shape that it expects of a parameter, which a
    # block with another structure replaces.
    if any(t.any() for t in theirs):
        raise ValueError(
            f"cannot add Kronecker factors of shapes {[list(t.shape) for t in theirs]} and "
            f"{[list(f.shape) for f in ours]}"
        )
    return list(ours)


class _LogDet(torch.autograd.Function):
    """``log det(s G (x) A + d I)``, with a gradient that differentiates no decomposition.

    With eigenvalues l, m and eigenvectors Q, R of G, A: ``L = sum_ij log(s l_i m_j + d)``,
    ``dL/dG = s Q diag(sum_j m_j / (s l_i m_j + d)) Q^T`` and likewise for A,
    ``dL/ds = sum_ij l_i m_j / (...)``, ``dL/dd = sum_ij 1 / (...)``: finite for repeated and for
    zero eigenvalues. Block-diagonal factors are differentiated block by block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scale: Tensor,
        delta: Tensor,
        values: list[Tensor],
        vectors: list[Tensor | None],
        *factors: Tensor,
    ) -> Tensor:
        ctx.values = values
        ctx.vectors = vectors
        products = _outer(values)
        spectrum = products * scale + delta
        ctx.save_for_backward(scale, products, spectrum)
        return spectrum.log().sum()

    @staticmethod
    @once_differentiable
    @without_autocast()
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        scale, products, spectrum = ctx.saved_tensors
        inverse = cotangent / spectrum
        gradients: list[Tensor | None] = [(inverse * products).sum(), inverse.sum(), None, None]
        for i, vectors in enumerate(ctx.vectors):
            if not ctx.needs_input_grad[4 + i]:
                gradients.append(None)
                continue
            diagonal = scale * _contract(inverse, ctx.values, i)
            gradients.append(_assemble(diagonal, vectors))
        return tuple(gradients)


def _assemble(values: Tensor, vectors: Tensor | None) -> Tensor:
    """Return ``Q diag(l) Q^T``, or the diagonal itself, and mark it as symmetric."""
    if vectors is None:
        return values
    scaled = vectors * values.unsqueeze(-2)
    if vectors.ndim == 2:
        return kfac.mark_symmetric(kfac.symmetric_product(scaled.mT, vectors.mT))
    return kfac.mark_symmetric(scaled @ vectors.mT)


def _paired(values: Sequence[Tensor]) -> bool:
    """Return whether block q of the one factor meets block q of the other only."""
    return len(values) == 2 and values[0].ndim == values[1].ndim == 2


def _outer(values: Sequence[Tensor]) -> Tensor:
    """Return the eigenvalues of the product, laid out as the parameter: ``[o, q * i]``.

    A single factor has a vector of them.
    """
    if len(values) == 1:
        return values[0].flatten()
    if _paired(values):
        return (values[0].mT.unsqueeze(-1) * values[1]).flatten(1)
    return torch.outer(values[0].flatten(), values[1].flatten())


def _contract(x: Tensor, values: Sequence[Tensor], i: int) -> Tensor:
    """Return ``sum_j x_ij m_j`` for the first factor, ``sum_i x_ij l_i`` for the second.

    The result has the shape of the factor's eigenvalues; for a single factor it is ``x``.
    """
    if len(values) == 1:
        return x
    if _paired(values):
        x = x.unflatten(1, values[1].shape)
        if i == 0:
            return torch.einsum("oqi,qi->qo", x, values[1])
        return torch.einsum("oqi,qo->qi", x, values[0])
    matrix = x if i == 0 else x.mT
    return (matrix @ values[1 - i].flatten()).view_as(values[i])


class DifferentiableKronDecomposed(KronDecomposed):
    """Eigendecomposition of a :class:`DifferentiableKron`, scaled and shifted.

    Stock laplace multiplies by the noise factor with ``math.pow`` and so loses its gradient; here
    ``scale`` is a tensor, and ``logdet`` is differentiable in it, in the deltas and in the factors.

    Args:
        eigenvectors: For each parameter and factor, ``[d, d]``, or ``[q, d, d]`` for the blocks of
            a block-diagonal one; None for a diagonal one. None instead of all if no factor requires
            grad: evidence needs eigenvalues only, and these are found when predictions ask.
        eigenvalues: For each parameter and factor, ``[d]`` or ``[q, d]``.
        factors: The factors that were decomposed, with their graph.
        deltas: One number per parameter, added to the diagonal.
        scale: Scalar that the matrix is multiplied by.
    """

    def __init__(
        self,
        eigenvectors: list[list[Tensor | None]] | None,
        eigenvalues: list[list[Tensor]],
        factors: list[list[Tensor]],
        deltas: Tensor | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        self._eigenvectors = [eigenvectors]  # shared with scaled and shifted copies
        self.unscaled_eigenvalues = eigenvalues
        self.factors = factors
        like = eigenvalues[0][0]
        self.scale = scale.to(like) if isinstance(scale, Tensor) else like.new_full((), scale)
        self.damping = False
        self.deltas = eigenvalues[0][0].new_zeros(len(eigenvalues))
        if deltas is not None:
            self._check_deltas(deltas)
            self.deltas = deltas

    def __len__(self) -> int:
        return len(self.unscaled_eigenvalues)

    @property
    def eigenvectors(self) -> list[list[Tensor | None]]:  # type: ignore[override]  # laplace sets it
        """Eigenvectors per parameter and factor."""
        found = self._eigenvectors[0]
        if found is None:
            _, found = _decomposed(self.factors)
            self._eigenvectors[0] = found
        return found

    @property
    def eigenvalues(self) -> list[list[Tensor]]:  # type: ignore[override]  # laplace sets it
        """Eigenvalues per parameter and factor, the scale in the first."""
        return [[values[0] * self.scale, *values[1:]] for values in self.unscaled_eigenvalues]

    def detach(self) -> DifferentiableKronDecomposed:
        """Return the same decomposition without graph."""
        result = copy(self)
        result.deltas = self.deltas.detach()
        result.scale = self.scale.detach()
        result.factors = [[factor.detach() for factor in factors] for factors in self.factors]
        return result

    def __add__(self, deltas: Tensor) -> DifferentiableKronDecomposed:
        self._check_deltas(deltas)
        result = copy(self)
        result.deltas = self.deltas + deltas
        return result

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> DifferentiableKronDecomposed:
        if isinstance(scalar, Tensor):
            if scalar.numel() != 1:
                raise ValueError(f"can only multiply by a scalar, got shape {list(scalar.shape)}")
            scalar = scalar.reshape(())
        result = copy(self)
        result.scale = (self.scale * scalar).to(self.scale)
        return result

    __rmul__ = __mul__

    @without_autocast()
    def logdet(self) -> Tensor:
        """Return ``sum_l log det(s G_l (x) A_l + d_l I)``."""
        total = torch.zeros_like(self.scale)
        for i, delta in enumerate(self.deltas.expand(len(self))):
            values, factors = self.unscaled_eigenvalues[i], self.factors[i]
            vectors: list[Tensor | None] = [None] * len(factors)
            if any(factor.requires_grad for factor in factors):
                vectors = self.eigenvectors[i]
            total = total + _LogDet.apply(self.scale, delta, values, vectors, *factors)
        return total

    def curvature_spectra(self) -> list[Tensor]:
        """Return each parameter's eigenvalues without deltas, a matrix if it has two factors."""
        return [_outer(values) * self.scale for values in self.unscaled_eigenvalues]

    def spectra(self, exponent: float = 1) -> list[Tensor]:
        """Return each parameter's eigenvalues to a power, a matrix if it has two factors."""
        pairs = zip(self.curvature_spectra(), self.deltas.expand(len(self)), strict=True)
        return [torch.pow(spectrum + delta, exponent) for spectrum, delta in pairs]

    @without_autocast()
    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        spectra = self.spectra(exponent)
        parts = W.flatten(0, 1).split([spectrum.numel() for spectrum in spectra], dim=1)
        products = []
        for part, spectrum, vectors in zip(parts, spectra, self.eigenvectors, strict=True):
            inverse = [None if v is None else v.mT for v in vectors]
            rotated = _rotate(part.unflatten(1, spectrum.shape), inverse) * spectrum
            products.append(_rotate(rotated, vectors).flatten(1))
        return torch.cat(products, dim=1).view_as(W)

    @without_autocast()
    def diag(self, exponent: float = 1) -> Tensor:
        """Return the diagonal of the matrix to the power ``exponent``."""
        diagonals = []
        for spectrum, vectors in zip(self.spectra(exponent), self.eigenvectors, strict=True):
            squares = [None if v is None else v.square() for v in vectors]
            diagonals.append(_rotate(spectrum.unsqueeze(0), squares).flatten())
        return torch.cat(diagonals)

    @without_autocast()
    def to_matrix(self, exponent: float = 1) -> Tensor:
        """Return the dense matrix to the power ``exponent``; for tests and small models."""
        total = sum(spectrum.numel() for spectrum in self.spectra())
        return self._bmm(_identity(total, self.deltas).unsqueeze(0), exponent)[0]


def _identity(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _rotate(x: Tensor, vectors: Sequence[Tensor | None]) -> Tensor:
    """Multiply ``[n, d]`` or ``[n, d_1, d_2]`` by matrices along the last axes.

    Each is a matrix ``[d, d]``, its blocks ``[q, d, d]``, its diagonal ``[d]``, or None for one.
    """
    dense = [v for v in vectors if v is not None]
    if len(dense) == 2 and dense[0].ndim == dense[1].ndim == 3:
        outer, inner = dense  # block q of the one meets block q of the other, with its own columns
        x = x.unflatten(-1, (len(inner), -1))
        return torch.einsum("qpo,qji,noqi->npqj", outer, inner, x).flatten(-2)
    for axis, v in enumerate(vectors, start=-len(vectors)):
        if v is not None:
            x = _rotate_last(x.movedim(axis, -1), v).movedim(-1, axis)
    return x


def _rotate_last(x: Tensor, v: Tensor) -> Tensor:
    if v.ndim == 3:
        return torch.einsum("qpo,...qo->...qp", v, x.unflatten(-1, v.shape[:2])).flatten(-2)
    if v.ndim == 1:
        return x * v
    return x @ v.mT


def load_state_dict(la: KronLaplace, state: dict[str, Any]) -> None:
    """Load what ``la.state_dict()`` returned, with block-diagonal factors.

    Args:
        la: The Laplace object to load into; its own method does not know such factors.
        state: What ``la.state_dict()`` returned.
    """
    la.load_state_dict(state)
    assert la.H_facs is not None
    la.H_facs = DifferentiableKron([list(factors) for factors in la.H_facs.kfacs])
    la.H = la.H_facs.decompose()
