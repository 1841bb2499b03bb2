"""What a curvature backend will make of a model, told before any training."""

from __future__ import annotations

from dataclasses import replace

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
from torch import nn

from laplace_invariance.curvature.ggn import AugmentedEF, AugmentedGGN
from laplace_invariance.curvature.rules import Coverage, coverage
from laplace_invariance.hyper import named_hyperparameters
from laplace_invariance.invariant import InvariantModel

__all__ = ["ModelReport", "check_model"]

# What the backends of laplace-torch 0.3 do; tests/test_checking.py runs them to see that this is so.
WITHOUT_KRON = (AsdlHessian, BackPackEF, CurvlinopsHessian)
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
LAYERS = {
    AsdlInterface: (nn.Linear, nn.Conv2d, nn.Embedding),
    BackPackInterface: (nn.Linear, *CONVOLUTIONS),
}


class ModelReport:
    """What :func:`check_model` found: a table to print, ``supported`` to test, ``rows`` and ``objections`` to read."""

    def __init__(self, rows: list[Coverage], objections: list[str]) -> None:
        self.rows = rows
        self.objections = objections

    @property
    def supported(self) -> bool:
        return not self.objections and all(row.supported for row in self.rows)

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        cells = [("parameter", "shape", "module", "Kronecker curvature")]
        for row in self.rows:
            verdict = "yes" if row.supported else f"no: {row.reason}"
            if row.supported and not 1 <= row.parameter.ndim <= 4:
                verdict = f"in the backend, but KronLaplace refuses {row.parameter.ndim} axes: use 'diag' or 'full'"
            shape = " x ".join(map(str, row.parameter.shape)) or "scalar"
            cells.append((row.name, shape, type(row.modules[0][1]).__name__, verdict))
        widths = [max(len(line[i]) for line in cells) for i in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]])
            for line in cells
        ]
        return "\n".join([*lines, *self.objections])

    __repr__ = __str__


def check_model(model: nn.Module, backend: type[CurvatureInterface] = AugmentedGGN) -> ModelReport:
    """Tell, before any training, which parameters of ``model`` Kronecker curvature covers, and why not the others.

    Modules are judged as ``laplace`` will see them, in evaluation mode.

    Args:
        model: any module.
        backend: the class that will be handed to ``laplace``; of one that is not ours, what it cannot do with samples and with
            layers that it does not know, which it may compute wrongly without saying so.
    """
    if not (isinstance(backend, type) and issubclass(backend, CurvatureInterface)):
        raise TypeError(
            f"backend must be a class of curvature backends, such as AugmentedGGN; got {backend!r}"
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        rows = coverage(model)
        if issubclass(backend, AugmentedGGN | AugmentedEF):
            return ModelReport(rows, [])
        return ModelReport([_as_seen_by(backend, row) for row in rows], _objections(backend, model))
    finally:
        for module, training in modes:
            module.training = training


def _as_seen_by(backend: type[CurvatureInterface], row: Coverage) -> Coverage:
    """Return what laplace's own backend will do with a parameter."""
    name, ours = backend.__name__, _ours(backend).__name__
    known = next(
        (layers for kind, layers in LAYERS.items() if issubclass(backend, kind)),
        (nn.Linear, nn.Conv2d),
    )
    kinds = [type(module) for _, module in row.modules]
    reason = None
    if issubclass(backend, WITHOUT_KRON):
        reason = f"{name} has no Kronecker curvature"
    elif any(kind not in known for kind in kinds):
        reason = f"{name} does not know {kinds[0].__name__}; {ours} {'does' if row.supported else 'does not either'}"
    elif not issubclass(backend, CurvlinopsInterface) and any(
        getattr(m, "groups", 1) > 1 for _, m in row.modules
    ):
        reason = f"{name} does not know groups of channels, {ours} does"
    return replace(row, reason=reason)


def _of_samples(backend: type[CurvatureInterface]) -> str:
    """Say what laplace's own backend does with an InvariantModel."""
    if issubclass(backend, WITHOUT_KRON):
        return "it has no 'kron', with samples or without"
    if issubclass(backend, BackPackInterface):
        return "'kron' and 'diag' fail at the mean over samples, 'full' grows with their number, without an error"
    return "in 'kron' every sample counts as an input of its own, which is another curvature, without an error"


def _objections(backend: type[CurvatureInterface], model: nn.Module) -> list[str]:
    """Return what is wrong with laplace's own backend for the model as a whole."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, InvariantModel):
            where = f"{path} is an InvariantModel" if path else "the model is an InvariantModel"
            found.append(
                f"{where}, which {backend.__name__} does not know: {_of_samples(backend)}. Use {_ours(backend).__name__}."
            )
    names = [name for name, tensor in named_hyperparameters(model) if tensor.requires_grad]
    if names:
        found.append(
            f"{backend.__name__} gives no gradient with respect to {', '.join(names)}, so these are not learnt. "
            f"Use {_ours(backend).__name__}."
        )
    return found


def _ours(backend: type[CurvatureInterface]) -> type[CurvatureInterface]:
    return AugmentedEF if issubclass(backend, EFInterface) else AugmentedGGN
