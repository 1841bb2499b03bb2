"""Matrix Lie groups: ``T = expm(sum_i c_i G_i)`` with coefficients drawn from a learnt box or parallelepiped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laplace_invariance.augmentations.box import BoxAugmentation, Init, Names

__all__ = ["LieGroup"]


class LieGroup(BoxAugmentation):
    """Transformations ``expm(sum_i c_i G_i)``, ``c = L e``, ``e`` uniform on ``[-1, 1]^k``.

    Args:
        names: the generators' names.
        generators: their matrices, ``[k, d, d]``.
        limits, init, learn, constraint, correlated, draws: as for
            :class:`~laplace_invariance.augmentations.BoxAugmentation`.
    """

    def __init__(
        self,
        names: Sequence[str],
        generators: Tensor,
        limits: Sequence[float],
        init: Init = 0.0,
        learn: Names = "all",
        constraint: str | None = None,
        correlated: bool = False,
        draws: str = "independent",
    ) -> None:
        super().__init__(names, limits, init, learn, constraint, correlated, draws)
        self.register_buffer("generators", generators, persistent=False)

    def matrices(self, draws: Tensor) -> Tensor:
        """Return the transformation matrices ``[..., d, d]`` of draws ``[..., k]``."""
        return self._exponential(self.coefficients(draws))

    def _exponential(self, coefficients: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(
            torch.einsum("...k,kij->...ij", coefficients, self.generators)
        )

    def move(self, x: Tensor, coefficients: Tensor) -> Tensor:
        return self.act(x, self._exponential(coefficients))

    def act(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Apply ``matrices`` ``[n or 1, n_samples, d, d]`` to ``x`` ``[n, ...]``, giving ``[n, n_samples, ...]``."""
        raise NotImplementedError
