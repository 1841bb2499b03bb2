"""What metrics read from a fitted Laplace approximation: its tensors and their curvature."""

from __future__ import annotations

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace
from laplace.utils.matrix import KronDecomposed
from torch import Tensor, nn

from laplace_invariance.curvature import DifferentiableKronDecomposed

__all__ = ["curvature_spectra", "tensors_of"]


def curvature_spectra(precision: KronDecomposed) -> list[Tensor]:
    """Return the eigenvalues of the curvature of every tensor.

    Args:
        precision: Posterior precision of Kronecker factors.
    """
    if isinstance(precision, DifferentiableKronDecomposed):
        return precision.curvature_spectra()
    found = []
    for values in precision.eigenvalues:
        found.append(torch.outer(*values) if len(values) == 2 else values[0])
    return found


def tensors_of(la: ParametricLaplace) -> dict[str, nn.Parameter]:
    """Return the tensors that have a posterior, by name.

    Args:
        la: Laplace approximation.

    Raises:
        TypeError: If it is not one of all weights, or was not fitted.
    """
    needed = (
        "effective parameters and ablations need a fitted Laplace approximation of all weights, "
        f"'kron', 'diag' or 'full'; got {type(la).__name__}"
    )
    if not isinstance(la, KronLaplace | DiagLaplace | FullLaplace):
        raise TypeError(needed)
    names = {id(parameter): name for name, parameter in la.model.named_parameters()}
    params = getattr(la, "params", [])
    if not names.keys() >= set(map(id, params)):
        raise TypeError(needed)
    if la.n_data == 0 or la.n_params != sum(map(Tensor.numel, params)):
        raise TypeError(f"{needed} before fit()")
    if isinstance(la, KronLaplace) and not isinstance(la.H, KronDecomposed):
        raise TypeError(needed)
    return {names[id(parameter)]: parameter for parameter in params}
