"""A Kronecker-factored matrix whose log determinant can be differentiated, again and again.

Subclasses of laplace's ``Kron`` and ``KronDecomposed``. Python asks a subclass's ``__radd__`` before the parent's
``__add__``, so ``self.H += H_batch`` inside stock ``KronLaplace.fit`` yields our class, and its ``decompose`` is ours.

**Structure.** A factor is a matrix ``[d, d]``, a vector ``[d]`` (diagonal), or the blocks ``[q, d, d]`` of a block-diagonal
matrix, which are added, decomposed and differentiated one by one; the large matrix is never formed. If both factors are
blocks, ``G`` ``[q, o, o]`` and ``A`` ``[q, i, i]``, then block ``q`` of the one meets block ``q`` of the other: the
parameter is ``[o, q * i]`` and its curvature that of ``q`` matrices side by side, ``G_q (x) A_q`` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from laplace import KronLaplace
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor
from torch.autograd.function import once_differentiable

from laplace_invariance.curvature import kfac

__all__ = ["DifferentiableKron", "DifferentiableKronDecomposed", "load_state_dict"]


class DifferentiableKron(Kron):
    """Kronecker factors, one list per parameter: ``[G, A]``, ``[H]`` for a dense block, or a vector for a diagonal one.

    Factors may be the blocks of block-diagonal matrices.
    """

    def __add__(self, other: Kron) -> DifferentiableKron:
        if not isinstance(other, Kron):
            raise ValueError(f"can only add Kron to Kron, got {type(other).__name__}")
        if len(self) != len(other):
            raise ValueError(
                f"cannot add Kronecker factors of {len(self)} and of {len(other)} parameters"
            )
        return DifferentiableKron(
            [_add(ours, theirs) for ours, theirs in zip(self.kfacs, other.kfacs, strict=True)]
        )

    __radd__ = __add__

    def __mul__(self, scalar: float | Tensor) -> DifferentiableKron:
        return DifferentiableKron(
            [[scalar ** (1 / len(fs)) * factor for factor in fs] for fs in self.kfacs]
        )

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
        return DifferentiableKronDecomposed(
            vectors, values, [list(factors) for factors in self.kfacs]
        )

    def _bmm(self, W: Tensor) -> Tensor:
        rows = W.flatten(0, 1)
        parts = rows.split([_outer(diagonals).numel() for diagonals in self._diagonals()], dim=1)
        products = [
            _rotate(part.unflatten(1, _outer(diagonals).shape), factors).flatten(1)
            for part, diagonals, factors in zip(parts, self._diagonals(), self.kfacs, strict=True)
        ]
        return torch.cat(products, dim=1).view_as(W)

    def _diagonals(self) -> list[list[Tensor]]:
        return [
            [f if f.ndim == 1 else f.diagonal(dim1=-2, dim2=-1) for f in factors]
            for factors in self.kfacs
        ]

    def diag(self) -> Tensor:
        """Return the diagonal."""
        return torch.cat([_outer(diagonals).flatten() for diagonals in self._diagonals()])

    def to_matrix(self) -> Tensor:
        """Return the dense matrix; for tests and small models."""
        diagonal = self.diag()
        return self._bmm(torch.eye(len(diagonal)).to(diagonal).unsqueeze(0))[0]

    def logdet(self) -> Tensor:
        """Return the log determinant."""
        return self.decompose().logdet()


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
        raise torch.linalg.LinAlgError(
            "a curvature factor is not finite; check the loss and the inputs of the network"
        )
    if factor.ndim == 1:
        return factor.detach().clamp(min=0), None
    values, vectors = kfac.eigh(factor.detach())
    return values.clamp(min=0), vectors


class _LogDet(torch.autograd.Function):
    """``log det(s G (x) A + d I)`` from the eigenvalues, with a gradient that differentiates no decomposition.

    With eigenvalues l, m and eigenvectors Q, R of G, A: ``L = sum_ij log(s l_i m_j + d)``,
    ``dL/dG = s Q diag(sum_j m_j / (s l_i m_j + d)) Q^T`` and likewise for A, ``dL/ds = sum_ij l_i m_j / (...)``,
    ``dL/dd = sum_ij 1 / (...)``: finite for repeated and for zero eigenvalues. Of block-diagonal factors, block by block.
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
            diagonal = scale * (
                inverse if len(ctx.values) == 1 else _contract(inverse, ctx.values, i)
            )
            if vectors is not None:
                diagonal = diagonal.unsqueeze(-2)
                diagonal = (vectors * diagonal) @ vectors.mT
            gradients.append(diagonal)
        return tuple(gradients)


def _paired(values: Sequence[Tensor]) -> bool:
    """Tell whether block q of the one factor meets block q of the other only."""
    return len(values) == 2 and values[0].ndim == values[1].ndim == 2


def _outer(values: Sequence[Tensor]) -> Tensor:
    """Return the eigenvalues of the product: ``[o, q * i]``, laid out as the parameter is, or ``[d]`` for a single factor."""
    if len(values) == 1:
        return values[0].flatten()
    if _paired(values):
        return (values[0].mT.unsqueeze(-1) * values[1]).flatten(1)
    return torch.outer(values[0].flatten(), values[1].flatten())


def _contract(x: Tensor, values: Sequence[Tensor], i: int) -> Tensor:
    """Return ``sum_j x_ij m_j`` for the first factor, ``sum_i x_ij l_i`` for the second, in the shape of its eigenvalues."""
    if _paired(values):
        x = x.unflatten(1, values[1].shape)  # [o, q, i]
        return (
            torch.einsum("oqi,qi->qo", x, values[1])
            if i == 0
            else torch.einsum("oqi,qo->qi", x, values[0])
        )
    summed = x @ values[1].flatten() if i == 0 else x.mT @ values[0].flatten()
    return summed.view_as(values[i])


class DifferentiableKronDecomposed(KronDecomposed):
    """Eigendecomposition of a :class:`DifferentiableKron`, times ``scale``, plus ``deltas`` on the diagonal.

    Stock laplace multiplies by the noise factor with ``math.pow`` and so loses its gradient; here ``scale`` is a tensor, and
    ``logdet`` is differentiable in it, in the deltas and in the factors.

    Args:
        eigenvectors: per parameter and factor, ``[d, d]`` or of every block ``[q, d, d]``; None for a diagonal factor.
        eigenvalues: per parameter and factor, ``[d]`` or ``[q, d]``.
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
        return self._with(
            scale=self.scale * (scalar.reshape(()) if isinstance(scalar, Tensor) else scalar)
        )

    __rmul__ = __mul__

    def logdet(self) -> Tensor:
        """Return ``sum_l log det(s G_l (x) A_l + d_l I)``."""
        blocks = zip(
            self.deltas.expand(len(self)),
            self.unscaled_eigenvalues,
            self.eigenvectors,
            self.factors,
            strict=True,
        )
        return sum(
            _LogDet.apply(self.scale, delta, values, vectors, *fs)
            for delta, values, vectors, fs in blocks
        )

    def curvature_spectra(self) -> list[Tensor]:
        """Return, per parameter, the eigenvalues without deltas, as a matrix if there are two factors."""
        return [_outer(values) * self.scale for values in self.unscaled_eigenvalues]

    def spectra(self, exponent: float = 1) -> list[Tensor]:
        """Return, per parameter, all eigenvalues to the power ``exponent``, as a matrix if there are two factors."""
        deltas = self.deltas.expand(len(self))
        return [
            torch.pow(v + delta, exponent)
            for v, delta in zip(self.curvature_spectra(), deltas, strict=True)
        ]

    def _bmm(self, W: Tensor, exponent: float = -1) -> Tensor:
        batch, k, total = W.shape
        rows = W.reshape(batch * k, total)
        spectra = self.spectra(exponent)
        parts = rows.split([spectrum.numel() for spectrum in spectra], dim=1)
        products = []
        for part, spectrum, vectors in zip(parts, spectra, self.eigenvectors, strict=True):
            rotated = _rotate(part.unflatten(1, spectrum.shape), _inverse(vectors)) * spectrum
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


def _inverse(vectors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if v is None else v.mT for v in vectors]


def _rotate(x: Tensor, vectors: Sequence[Tensor | None]) -> Tensor:
    """Multiply ``x`` ``[n, d]`` or ``[n, d_1, d_2]`` by the matrices ``vectors`` along its last axes; None is the identity."""
    if len(vectors) == 2 and all(v is not None and v.ndim == 3 for v in vectors):
        outer, inner = vectors  # of block q, which has columns of its own
        x = x.unflatten(-1, (len(inner), -1))
        return torch.einsum("qpo,qji,noqi->npqj", outer, inner, x).flatten(-2)
    for axis, v in zip((-1,) if len(vectors) == 1 else (-2, -1), vectors, strict=True):
        if v is None:
            continue
        y = x.movedim(axis, -1)
        if v.ndim == 3:
            y = torch.einsum("qpo,...qo->...qp", v, y.unflatten(-1, v.shape[:2])).flatten(-2)
        else:
            y = y * v if v.ndim == 1 else y @ v.mT
        x = y.movedim(-1, axis)
    return x


def load_state_dict(la: KronLaplace, state: dict[str, Any]) -> None:
    """Load what ``la.state_dict()`` returned, block-diagonal factors included, which laplace's own method does not know."""
    la.load_state_dict(state)
    la.H_facs = DifferentiableKron(la.H_facs.kfacs)
    la.H = la.H_facs.decompose()
