"""Curvature of averaged networks, differentiable in hyperparameters.

The life of a batch, from ``la.fit(loader)`` to ``eta.grad``. Axes: ``batch`` B inputs, ``sample`` S
transformed copies of each, ``rows`` = B * S, ``shared`` R positions at which one matrix is applied,
``column`` K directions of the loss Hessian; ``N`` is the size of the data set.

1.  laplace calls ``AugmentedGGN.kron(x, y, N)`` with x ``[B, ...]`` (``ggn``). On the first batch,
    every parameter is matched with the layers that own it and their rules, and these are verified
    against autograd on two inputs (``trace.matching``, ``rules``).
2.  The batch is split into chunks that fit into memory (``trace.chunks``). Each is run without
    a graph inside one node of the graph per batch (``recompute``), and its draws are recorded.
3.  ``InvariantModel`` makes samples ``[rows, ...]`` of x, runs its network on them and averages:
    outputs f ``[B, C]``. An engine keeps what each layer received and returned
    (``engines``, ``trace.calls``).
4.  The loss Hessian is expressed by K directions, each ``[B, C]`` (``loss_hessian``): exact ones
    are fixed and weighted by probabilities ``[B, K]``, leading and random ones carry the gradient
    themselves. For each the engine finds the gradients at all layers, ``[rows, ...]``.
5.  Rules turn a layer's input into ``a`` ``[rows, R, d_in]`` and gradients into ``g``
    ``[rows, R, d_out]``. Samples are folded: inputs are averaged, gradients summed, to
    ``[B, R, d_in]`` and ``[B, K, R, d_out]``.
6.  Products (``kfac``) give the factors ``G`` ``[d_out, d_out]`` and ``A / N`` ``[d_in, d_in]`` of
    each matrix, as blocks or as a diagonal where they are no more than that, and one exact block
    ``[d, d]`` for each other parameter, in the order of ``model.parameters()``: a
    ``DifferentiableKron`` (``kron``).
7.  laplace adds these up over batches, and calls ``decompose`` (``eigen``) and ``logdet``:
    eigenvalues of G and A give the log determinant, and laplace the marginal likelihood.
8.  ``.backward()``: the eigenvalues give dL/dG and dL/dA, with no decomposition differentiated. At
    each batch's node these are the cotangents with which steps 3 to 6 are run once more, chunk by
    chunk, with the same draws, now by autograd with a graph and with cheaper double backward passes
    (``trace.shortcuts``), without values that nobody asks for, and inside
    ``hyper.differentiable()``: the gradient arrives at ``eta``.

``diag`` and ``full`` differ in step 5, where Jacobians ``[B, K, P]`` are formed instead. A chunk of
rows smaller than S splits the samples of an input, with a node for each part.
"""

from typing import Any

from laplace_invariance import _laplace  # noqa: F401
from laplace_invariance.curvature.check import check_model
from laplace_invariance.curvature.constant import constant_curvature
from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.kron import (
    DifferentiableKron,
    DifferentiableKronDecomposed,
    load_state_dict,
)
from laplace_invariance.curvature.names import BACKENDS, LATER, find_backend, import_name
from laplace_invariance.curvature.ntk import BoundEstimate, TangentKernelBound
from laplace_invariance.curvature.rules import Block, ElementwiseBlock, MatrixBlock, register_rule

__all__ = [
    "BACKENDS",
    "AugmentedEF",
    "AugmentedGGN",
    "Block",
    "BoundEstimate",
    "DifferentiableKron",
    "DifferentiableKronDecomposed",
    "ElementwiseBlock",
    "MatrixBlock",
    "TangentKernelBound",
    "check_model",
    "constant_curvature",
    "find_backend",
    "load_state_dict",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in LATER:  # what needs other packages is imported when asked for
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_name(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LATER})
