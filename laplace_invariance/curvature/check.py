"""What a curvature backend will make of a model, reported before any training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from laplace.curvature import (
    AsdlHessian,
    AsdlInterface,
    BackPackEF,
    BackPackInterface,
    CurvatureInterface,
    CurvlinopsHessian,
    CurvlinopsInterface,
    EFInterface,
)
from torch import Tensor, nn

from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.names import AnyBackend, find_backend
from laplace_invariance.curvature.trace.coverage import Coverage, coverage
from laplace_invariance.curvature.trace.matching import match
from laplace_invariance.hyper import named_hyperparameters
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.modes import as_written, evaluation
from laplace_invariance.precision import check_precision, single
from laplace_invariance.tables import table

__all__ = ["ModelReport", "check_model"]

Backend = type[CurvatureInterface]

# What the backends of laplace-torch 0.3 do; tests/curvature/test_check.py runs them to see that
# this is so.
WITHOUT_KRON = (AsdlHessian, BackPackEF, CurvlinopsHessian)
ANY_CONVOLUTION = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True, repr=False)
class ModelReport:
    """What :func:`check_model` found; true if all is supported, and a table as a string.

    Attributes:
        rows: What is known of each parameter.
        objections: What is wrong with the backend for the model as a whole.
    """

    rows: list[Coverage]
    objections: list[str]

    @property
    def supported(self) -> bool:
        """Whether Kronecker curvature covers all parameters, and there is no objection."""
        return not self.objections and all(row.supported for row in self.rows)

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        cells = [("parameter", "shape", "module", "Kronecker curvature")]
        for row in self.rows:
            shape = " x ".join(map(str, row.parameter.shape)) or "scalar"
            cells.append((row.name, shape, type(row.owners[0].module).__name__, _verdict(row)))
        return "\n".join([table(cells), *self.objections])

    __repr__ = __str__


def _verdict(row: Coverage) -> str:
    if row.reason is not None:
        return f"no: {row.reason}"
    n_axes = row.parameter.ndim
    if 1 <= n_axes <= 4:
        return "yes"
    return f"in the backend, but KronLaplace refuses {n_axes} axes: use 'diag' or 'full'"


def check_model(
    model: nn.Module, example: Any = None, backend: AnyBackend = AugmentedGGN
) -> ModelReport:
    """Report which parameters Kronecker curvature covers, and why not the others.

    Modules are judged as ``laplace`` will see them, in evaluation mode.

    Args:
        model: Any module.
        example: Inputs ``[batch, ...]`` of the model, two at least. With them the report is that of
            ``fit``: rules are verified, and parameters that are used outside of layers found.
            Without them it is by the classes of modules alone.
        backend: The class that will be handed to ``laplace``, or the name of one of ours. For one
            that is not ours, the report says what it cannot do with samples and with layers that it
            does not know, which it may compute wrongly without saying so.

    Raises:
        TypeError: ``backend`` is not a class of curvature backends, ``example`` is one, or weights
            are in half precision.
        ValueError: There is no backend of this name.
    """
    if isinstance(example, type):
        raise TypeError(f"example must be inputs of the model; pass backend={example.__name__}")
    backend = find_backend(backend)
    check_precision(model)
    with evaluation(model), as_written():
        rows = coverage(model)
        if example is not None:
            parameters = [row.parameter for row in rows]
            rows = list(match(model, parameters, model, _at_most_two(single(example))).coverage)
    if issubclass(backend, AugmentedGGN | AugmentedEF):
        return ModelReport(rows, [])
    return ModelReport([_as_seen_by(backend, row) for row in rows], _objections(backend, model))


def _at_most_two(example: Any) -> Any:
    """Return two inputs, which are enough; a mapping is left as it is."""
    return example[:2] if isinstance(example, Tensor) else example


def _as_seen_by(backend: Backend, row: Coverage) -> Coverage:
    """Return what laplace's own backend will do with a parameter."""
    name, ours = backend.__name__, _ours(backend).__name__
    modules = [owner.module for owner in row.owners]
    grouped = any(getattr(module, "groups", 1) > 1 for module in modules)
    reason = None
    if issubclass(backend, WITHOUT_KRON):
        reason = f"{name} has no Kronecker curvature"
    elif any(type(module) not in _known_layers(backend) for module in modules):
        verb = "does" if row.supported else "does not either"
        reason = f"{name} does not know {type(modules[0]).__name__}; {ours} {verb}"
    elif grouped and not issubclass(backend, CurvlinopsInterface):
        reason = f"{name} does not know groups of channels, {ours} does"
    return replace(row, reason=reason)


def _known_layers(backend: Backend) -> tuple[type[nn.Module], ...]:
    if issubclass(backend, AsdlInterface):
        return (nn.Linear, nn.Conv2d, nn.Embedding)
    if issubclass(backend, BackPackInterface):
        return (nn.Linear, *ANY_CONVOLUTION)
    return (nn.Linear, nn.Conv2d)


def _with_samples(backend: Backend) -> str:
    """Return what laplace's own backend does with an InvariantModel."""
    if issubclass(backend, WITHOUT_KRON):
        return "it has no 'kron', with samples or without"
    if issubclass(backend, BackPackInterface):
        return (
            "'kron' and 'diag' fail at the mean over samples, 'full' grows with their number, "
            "without an error"
        )
    return (
        "in 'kron' every sample counts as an input of its own, which is another curvature, "
        "without an error"
    )


def _objections(backend: Backend, model: nn.Module) -> list[str]:
    """Return what is wrong with laplace's own backend for the model as a whole."""
    name, ours = backend.__name__, _ours(backend).__name__
    found = []
    for path, module in model.named_modules():
        if isinstance(module, InvariantModel):
            found.append(
                f"{path or 'the model'} is an InvariantModel, which {name} does not know: "
                f"{_with_samples(backend)}. Use {ours}."
            )
    learnt = [path for path, tensor in named_hyperparameters(model) if tensor.requires_grad]
    if learnt:
        found.append(
            f"{name} gives no gradient with respect to {', '.join(learnt)}, so these are not "
            f"learnt. Use {ours}."
        )
    return found


def _ours(backend: Backend) -> Backend:
    return AugmentedEF if issubclass(backend, EFInterface) else AugmentedGGN
