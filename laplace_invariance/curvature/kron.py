"""A Kronecker-factored matrix whose log determinant can be differentiated, again and again.

Subclasses of laplace's ``Kron`` and ``KronDecomposed``. Python asks a subclass's ``__radd__`` before the parent's
``__add__``, so ``self.H += H_batch`` inside stock ``KronLaplace.fit`` yields our class, and its ``decompose`` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["DifferentiableKron", "DifferentiableKronDecomposed"]


class DifferentiableKron(Kron):
    """Kronecker factors, one list per parameter: ``[G, A]``, ``[H]`` for a dense block, or a vector for a diagonal one."""

    def __add__(self, other: Kron) -> DifferentiableKron:
        if not isinstance(other, Kron):
            raise ValueError(f"can only add Kron to Kron, got {type(other).__name__}")
        if len(self) != len(other):
            raise ValueError(f"cannot add Kronecker factors of {len(self)} and of {len(other)} parameters")
        return DifferentiableKron([_add(ours, theirs) for ours, theirs in zip(self.kfacs, other.kfacs, strict=True)])

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> DifferentiableKron:
        return DifferentiableKron([[scalar ** (1 / len(fs)) * factor for factor in fs] for fs in self.kfacs])

    __rmul__ = __mul__

    def decompose(self, damping: bool = False) -> DifferentiableKronDecomposed:
        """Decompose every factor once; the decomposition keeps the factors, which carry the gradient."""
        if damping:
            raise NotImplementedError(
                "damping=True is not supported: stock laplace-torch ignores it after decomposition, too"
            )
        decompositions = [[_eigh(factor) for factor in factors] for factors in self.kfacs]
        values = [[value for value, _ in pairs] for pairs in decompositions]
        vectors = [[vector for _, vector in pairs] for pairs in decompositions]
        return DifferentiableKronDecomposed(vectors, values, [list(factors) for factors in self.kfacs])


def _add(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    if [f.shape for f in ours] == [f.shape for f in theirs]:
        return [f.add(t) for f, t in zip(ours, theirs, strict=True)]
    # KronLaplace starts from dense zeros of the shape that it expects of a parameter, which a block with another
    # structure replaces.
    if any(t.any() for t in theirs):
        raise ValueError(
            f"cannot add Kronecker factors of shapes {[list(t.shape) for t in theirs]} and {[list(f.shape) for f in ours]}"
        )
    return list(ours)


@torch.no_grad()
def _eigh(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues and eigenvectors (None for a diagonal factor); round-off below zero becomes zero."""
    if not torch.isfinite(factor).all():
        raise torch.linalg.LinAlgError("a curvature factor is not finite; check the loss and the inputs of the network")
    if factor.ndim == 1:
        return factor.detach().clamp(min=0), None
    low = factor.dtype in (torch.float16, torch.bfloat16)  # for which there is no eigh
    try:
        values, vectors = torch.linalg.eigh(factor.detach().float() if low else factor.detach())
    except torch.linalg.LinAlgError:  # rare, and known to go away in double precision
        values, vectors = torch.linalg.eigh(factor.detach().double())
    return values.clamp(min=0).to(factor.dtype), vectors.to(factor.dtype)


class _LogDet(torch.autograd.Function):
    """``log det(s G (x) A + d I)`` from the eigenvalues, with a gradient that differentiates no decomposition.

    With eigenvalues l, m and eigenvectors Q, R of G, A: ``L = sum_ij log(s l_i m_j + d)``,
    ``dL/dG = s Q diag(sum_j m_j / (s l_i m_j + d)) Q^T`` and likewise for A, ``dL/ds = sum_ij l_i m_j / (...)``,
    ``dL/dd = sum_ij 1 / (...)``: finite for repeated and for zero eigenvalues.
    """

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, delta: Tensor, values: list[Tensor], vectors: list[Tensor | None], *factors: Tensor
    ) -> Tensor:
        ctx.values, ctx.vectors = values, vectors
        products = _outer(values)
        spectrum = products * scale + delta
        ctx.save_for_backward(scale, products, spectrum)
        return spectrum.log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        scale, products, spectrum = ctx.saved_tensors
        inverse = cotangent / spectrum
        gradients: list[Tensor | None] = [(inverse * products).sum(), inverse.sum(), None, None]
        for i, vectors in enumerate(ctx.vectors):
            if not ctx.needs_input_grad[4 + i]:
                gradients.append(None)
                continue
            if len(ctx.values) == 1:
                diagonal = scale * inverse
            else:
                diagonal = scale * (inverse @ ctx.values[1] if i == 0 else inverse.mT @ ctx.values[0])
            gradients.append(diagonal if vectors is None else (vectors * diagonal) @ vectors.mT)
        return tuple(gradients)


def _outer(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.outer(values[0], values[1])


class DifferentiableKronDecomposed(KronDecomposed):
    """Eigendecomposition of a :class:`DifferentiableKron`, times ``scale``, plus ``deltas`` on the diagonal.

    Stock laplace multiplies by the noise factor with ``math.pow`` and so loses its gradient; here ``scale`` is a tensor, and
    ``logdet`` is differentiable in it, in the deltas and in the factors.

    Args:
        eigenvectors: per parameter and factor; None for a diagonal factor.
        eigenvalues: per parameter and factor.
        factors: what was decomposed, with its graph.
        deltas: one per parameter.
        scale: scalar.
    """

    def __init__(
        self,
        eigenvectors: list[list[Tensor | None]],
        eigenvalues: list[list[Tensor]],
        factors: list[list[Tensor]],
        deltas: Tensor | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        self.eigenvectors = eigenvectors
        self.unscaled_eigenvalues = eigenvalues
        self.factors = factors
        self.scale = torch.as_tensor(scale).to(eigenvalues[0][0])
        self.damping = False
        self.deltas = eigenvalues[0][0].new_zeros(len(eigenvalues))
        if deltas is not None:
            self._check_deltas(deltas)
            self.deltas = deltas

    def __len__(self) -> int:
        return len(self.unscaled_eigenvalues)

    @property
    def eigenvalues(self) -> list[list[Tensor]]:
        """Eigenvalues per parameter and factor, the scale in the first."""
        return [[values[0] * self.scale, *values[1:]] for values in self.unscaled_eigenvalues]

    def _with(self, **changes: Any) -> DifferentiableKronDecomposed:
        kept = {"deltas": self.deltas, "scale": self.scale, "factors": self.factors} | changes
        return DifferentiableKronDecomposed(self.eigenvectors, self.unscaled_eigenvalues, **kept)

    def detach(self) -> DifferentiableKronDecomposed:
        return self._with(
            deltas=self.deltas.detach(),
            scale=self.scale.detach(),
            factors=[[factor.detach() for factor in factors] for factors in self.factors],
        )

    def __add__(self, deltas: Tensor) -> DifferentiableKronDecomposed:
        self._check_deltas(deltas)
        return self._with(deltas=self.deltas + deltas)

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> DifferentiableKronDecomposed:
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise ValueError(f"can only multiply by a scalar, got shape {list(scalar.shape)}")
        return self._with(scale=self.scale * (scalar.reshape(()) if isinstance(scalar, Tensor) else scalar))

    __rmul__ = __mul__

    def logdet(self) -> Tensor:
        """Return ``sum_l log det(s G_l (x) A_l + d_l I)``."""
        blocks = zip(
            self.deltas.expand(len(self)), self.unscaled_eigenvalues, self.eigenvectors, self.factors, strict=True
        )
        return sum(_LogDet.apply(self.scale, delta, values, vectors, *fs) for delta, values, vectors, fs in blocks)

    def spectra(self, exponent: float = 1) -> list[Tensor]:
        """Return, per parameter, all eigenvalues to the power ``exponent``, as a matrix if there are two factors."""
        values = zip(self.unscaled_eigenvalues, self.deltas.expand(len(self)), strict=True)
        return [torch.pow(_outer(v) * self.scale + delta, exponent) for v, delta in values]

    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        batch, k, total = W.shape
        rows = W.reshape(batch * k, total)
        spectra = self.spectra(exponent)
        parts = rows.split([spectrum.numel() for spectrum in spectra], dim=1)
        products = []
        for part, spectrum, vectors in zip(parts, spectra, self.eigenvectors, strict=True):
            rotated = _rotate(part.unflatten(1, spectrum.shape), vectors, inverse=True) * spectrum
            products.append(_rotate(rotated, vectors).flatten(1))
        return torch.cat(products, dim=1).reshape(batch, k, total)

    def diag(self, exponent: float = 1) -> Tensor:
        """Return the diagonal of the matrix to the power ``exponent``."""
        diagonals = []
        for spectrum, vectors in zip(self.spectra(exponent), self.eigenvectors, strict=True):
            squares = [None if v is None else v.square() for v in vectors]
            diagonals.append(_rotate(spectrum.unsqueeze(0), squares).flatten())
        return torch.cat(diagonals)

    def to_matrix(self, exponent: float = 1) -> Tensor:
        """Return the dense matrix to the power ``exponent``; for tests and small models."""
        total = sum(spectrum.numel() for spectrum in self.spectra())
        return self._bmm(torch.eye(total).to(self.deltas).unsqueeze(0), exponent)[0]


def _rotate(x: Tensor, vectors: Sequence[Tensor | None], inverse: bool = False) -> Tensor:
    """Multiply ``x`` ``[n, d]`` or ``[n, d_1, d_2]`` by the eigenvectors, or their inverse, along its last axes."""
    for axis, v in zip((-1,) if len(vectors) == 1 else (-2, -1), vectors, strict=True):
        if v is None:
            continue
        x = (x.movedim(axis, -1) @ (v if inverse else v.mT)).movedim(-1, axis)
    return x
