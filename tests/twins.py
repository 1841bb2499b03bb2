"""Obviously correct, but slow: what the library computes, computed in the plainest way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def parameter_jacobian(model: nn.Module, outputs: Tensor) -> Tensor:
    """Jacobian ``[batch, C, P]`` of outputs ``[batch, C]``, one scalar at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {"retain_graph": True, "create_graph": True, "allow_unused": True}
    rows = []
    for value in outputs.flatten():
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True, **options)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows).view(*outputs.shape, -1)


def loss_hessian(outputs: Tensor, likelihood: str) -> Tensor:
    """Hessian ``[batch, C, C]`` of the negative log likelihood in the outputs."""
    n, c = outputs.shape
    if likelihood == "regression":
        return torch.eye(c).expand(n, c, c)
    p = outputs.softmax(-1)
    return torch.diag_embed(p) - torch.einsum("bi,bj->bij", p, p)


def ggn(model: nn.Module, outputs: Tensor, likelihood: str) -> Tensor:
    """Dense generalised Gauss-Newton matrix ``[P, P]``."""
    jacobian = parameter_jacobian(model, outputs)
    return torch.einsum("bcp,bcd,bdq->pq", jacobian, loss_hessian(outputs, likelihood), jacobian)


def block_diagonal(matrix: Tensor, model: nn.Module) -> Tensor:
    """Keep the blocks of ``matrix`` that belong to single parameters."""
    result, start = torch.zeros_like(matrix), 0
    for parameter in model.parameters():
        stop = start + parameter.numel()
        result[start:stop, start:stop] = matrix[start:stop, start:stop]
        start = stop
    return result


def whole(factor: Tensor) -> Tensor:
    """The matrix whose diagonal ``[d]`` or blocks ``[q, d, d]`` a Kronecker factor holds."""
    if factor.ndim == 1:
        return factor.diag()
    return torch.block_diag(*factor) if factor.ndim == 3 else factor


def product(factors: list[Tensor]) -> Tensor:
    """The Kronecker product of the factors of one parameter, or its only factor."""
    matrices = [whole(factor) for factor in factors]
    return torch.kron(*matrices) if len(matrices) == 2 else matrices[0]


def central_differences(
    function: Callable[[], Tensor],
    tensor: Tensor,
    step: float = 1e-5,
    entries: Tensor | None = None,
) -> Tensor:
    """Derivative of ``function()`` in ``tensor``, which it reads, entry by entry.

    Of some entries only, as a vector, if their indices into the flattened tensor are given.
    """
    values = tensor.detach().view(-1)  # shares memory with the tensor
    indices = range(values.numel()) if entries is None else entries.tolist()
    result = values.new_zeros(len(indices))
    for position, i in enumerate(indices):
        original = values[i].item()
        values[i] = original + step
        above = float(torch.as_tensor(function()).detach())
        values[i] = original - step
        below = float(torch.as_tensor(function()).detach())
        values[i] = original
        result[position] = (above - below) / (2 * step)
    return result.view_as(tensor) if entries is None else result


def slope_along(
    direction: Tensor, function: Callable[[], Tensor], tensor: Tensor, step: float = 1e-5
) -> Tensor:
    """Derivative of ``function()`` along a direction of ``tensor``, which it reads."""
    values = tensor.detach()  # shares memory with the tensor
    before = values.clone()
    ends = []
    for sign in (1, -1):
        values.copy_(before + sign * step * direction)
        ends.append(torch.as_tensor(function()).detach())
    values.copy_(before)
    return (ends[0] - ends[1]) / (2 * step)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
