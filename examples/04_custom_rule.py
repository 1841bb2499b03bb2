"""Register the curvature rule of a layer of one's own, in a few lines, and check it.

A low-rank linear layer ``y = U V x`` is two matrices applied one after the other. For each
matrix, Kronecker curvature must know the input (``a``) and the gradient of the output (``g``):
the input of ``U`` is ``V x``, and the gradient at the output of ``V`` is ``U^T g``. The
diagonal of the curvature needs no rule, so with one datum, for which Kronecker factors are
exact, the two must agree.
"""

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance.curvature import AugmentedGGN, MatrixBlock, register_rule

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class LowRank(nn.Module):
    """A linear layer of low rank, ``y = U V x``."""

    def __init__(self, n_in: int, n_out: int, rank: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(n_out, rank) / rank**0.5)
        self.v = nn.Parameter(torch.randn(rank, n_in) / n_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v.T @ self.u.T


@register_rule(LowRank)
def low_rank(module: LowRank):
    # both take [rows, d] to [rows, shared, d]; here a matrix is applied at one position per row
    yield MatrixBlock(
        "u",
        a=lambda x: (x @ module.v.T).unsqueeze(1),
        g=lambda g: g.unsqueeze(1),
    )
    yield MatrixBlock(
        "v",
        a=lambda x: x.unsqueeze(1),
        g=lambda g: (g @ module.u).unsqueeze(1),
    )


def fitted(structure: str) -> Laplace:
    """Return a Laplace approximation with a curvature of the given structure."""
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=AugmentedGGN,
    )
    la.fit(loader)
    return la


model = nn.Sequential(LowRank(5, 7, 2), nn.Tanh(), LowRank(7, 3, 2))
loader = DataLoader(TensorDataset(torch.randn(1, 5), torch.tensor([2])))
by_rule = fitted("kron").H.diag()
exact = fitted("diag").H
error = ((by_rule - exact).abs().max() / exact.max()).item()
print(f"the rule's curvature equals the exact diagonal: {error < 1e-10}")
