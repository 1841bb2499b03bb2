"""Teach the curvature a layer of one's own, in four lines, and check it.

A low-rank linear layer ``y = U V x`` is two matrices applied one after the other. What Kronecker curvature must know is, per
matrix, what goes in (``a``) and which gradient comes out (``g``): for ``U`` what goes in is ``V x``, for ``V`` the gradient that
comes out is ``U^T g``. The diagonal of the curvature needs no rule, so with one input, where Kronecker factors are exact, the two
must agree.
"""

import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance.curvature import AugmentedGGN, Block, register_rule

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class LowRank(nn.Module):
    """``y = U V x``."""

    def __init__(self, n_in: int, n_out: int, rank: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(n_out, rank) / rank**0.5)
        self.v = nn.Parameter(torch.randn(rank, n_in) / n_in**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v.T @ self.u.T


@register_rule(LowRank)
def low_rank(module: LowRank):
    yield Block("u", lambda x: (x @ module.v.T).unsqueeze(1), lambda g: g.unsqueeze(1))
    yield Block("v", lambda x: x.unsqueeze(1), lambda g: (g @ module.u).unsqueeze(1))


model = nn.Sequential(LowRank(5, 7, 2), nn.Tanh(), LowRank(7, 3, 2))
loader = DataLoader(TensorDataset(torch.randn(1, 5), torch.tensor([2])))
diagonals = []
for structure in ("kron", "diag"):
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=AugmentedGGN,
    )
    la.fit(loader)
    diagonals.append(la.H.diag() if structure == "kron" else la.H)
error = ((diagonals[0] - diagonals[1]).abs().max() / diagonals[1].max()).item()
print(f"the rule's curvature equals the exact diagonal: {error < 1e-10}")
