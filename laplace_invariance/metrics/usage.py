"""How much of each path of a network is in use, after the evidence chose.

A tensor with curvature eigenvalues ``l_i`` and prior precision ``d`` has ``gamma = sum_i l_i /
(l_i + d)`` effective parameters (MacKay, 1992): those that the data determine rather than the
prior. A path with a large prior precision has none, whatever its size, and the layer is then
what the other paths make it. Paths differ in their number of parameters ``P``, so they are
compared by ``gamma / P``, relative to the sum over the paths of a layer.

These shares say how much of a path the data determine, not how much the network needs it: one
with a share of a few percent may fail without. What a layer chose is therefore decided by leaving
paths out (:mod:`laplace_invariance.metrics.ablation`), if the data are there to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace
from torch import Tensor, nn

from laplace_invariance.layers.paths import label_of
from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.metrics.ablation import Ablation
from laplace_invariance.metrics.fitted import curvature_spectra, tensors_of
from laplace_invariance.tables import table

__all__ = ["LayerReport", "PathReport", "effective_parameters", "layer_report"]

# Share of a layer from which on a path counts, where nothing better is known.
IN_USE = 0.05
HEADER = (
    "place",
    "path",
    "parameters",
    "prior precision",
    "norm",
    "effective",
    "normalised",
    "relative",
)
LEFT_OUT = ("costs", "accuracy")  # of what is without the path, if that is known


@torch.no_grad()
def effective_parameters(la: ParametricLaplace) -> dict[str, float]:
    """Return the effective number of parameters of every tensor, by its name in the model.

    Args:
        la: Fitted Laplace approximation of all weights, with Kronecker-factored, diagonal or
            full curvature.

    Raises:
        TypeError: If it is another one, or was not fitted.
    """
    tensors = tensors_of(la)
    if isinstance(la, KronLaplace):
        precision = la.posterior_precision
        spectra = zip(
            tensors,
            curvature_spectra(precision),
            precision.deltas.expand(len(tensors)),
            strict=True,
        )
        return {name: (l_i / (l_i + delta)).sum().item() for name, l_i, delta in spectra}
    if isinstance(la, DiagLaplace):
        variances = 1 / la.posterior_precision
    else:
        assert isinstance(la, FullLaplace)
        variances = la.posterior_covariance.diagonal()
    shares = 1 - la.prior_precision_diag * variances
    parts = shares.split([parameter.numel() for parameter in tensors.values()])
    return {name: part.sum().item() for name, part in zip(tensors, parts, strict=True)}


@dataclass(frozen=True)
class PathReport:
    """How much of one path of one layer is in use.

    Attributes:
        place: Name of the layer, a ``ResidualPathway``.
        path: Name of the path in it.
        kind: Label of the kind of path, ``"CONV"``, ``"F-FC"``, ...
        parameters: Number of parameters.
        precision: Prior precision of the weights, the largest if there are several tensors;
            None if every parameter has its own.
        precisions: Prior precision of every tensor, by name.
        norm: Euclidean norm of all weights.
        effective: Effective number of parameters; None if the path is frozen.
        normalised: Effective number over the number of parameters that are not frozen.
        relative: Normalised number over the sum of those of the layer's paths; None if one of
            them is frozen, or none is in use.
        chosen: Whether the network needs the path, by ablation; without one, whether the relative
            number is 5 percent or more.
        cost: By how much the log evidence per training example is lower without the path; None
            without ablation.
        accuracy: Accuracy without the path; None without ablation, or of a regression.
    """

    place: str
    path: str
    kind: str
    parameters: int
    precision: float | None
    precisions: dict[str, float]
    norm: float
    effective: float | None
    normalised: float | None
    relative: float | None = None
    chosen: bool = False
    cost: float | None = None
    accuracy: float | None = None

    @property
    def name(self) -> str:
        """Name and kind of the path, as in the table."""
        if self.path == self.kind:
            return self.path
        return f"{self.path} ({self.kind})"

    def cells(self) -> list[str]:
        """Return the cells of the table that concern this path alone."""
        return [
            self.name,
            f"{self.parameters:,}",
            _text(self.precision, ".3g"),
            f"{self.norm:.3g}",
            _text(self.effective, ".1f", missing="frozen"),
            _text(self.normalised, ".2e"),
            _text(self.relative, ".1%"),
            _text(self.cost, ".3f"),
            _text(self.accuracy, ".1%"),
        ]


def _text(value: float | None, form: str, missing: str = "") -> str:
    return missing if value is None else format(value, form)


class LayerReport:
    """Paths of all layers, as :func:`layer_report` found them; prints as a table.

    Args:
        rows: The paths, layer by layer.
    """

    def __init__(self, rows: list[PathReport]) -> None:
        self.rows = rows

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> LayerReport:
        """Return the report of which :meth:`as_dict` gave the numbers.

        Args:
            numbers: All numbers, by place and path.
        """
        return cls([PathReport(**row) for paths in numbers.values() for row in paths.values()])

    @property
    def places(self) -> dict[str, list[PathReport]]:
        """The paths of each layer, in order."""
        found: dict[str, list[PathReport]] = {}
        for row in self.rows:
            found.setdefault(row.place, []).append(row)
        return found

    @property
    def is_learnt(self) -> bool:
        """Whether paths were told apart, by ablation or by prior precisions that differ."""
        if any(row.cost is not None for row in self.rows):
            return True
        found = {value for row in self.rows for value in row.precisions.values()}
        return len(found) != 1

    @property
    def chosen(self) -> dict[str, str]:
        """The kind of layer that was chosen, by place, such as ``"CONV"`` or ``"CONV+F-FC"``.

        Nothing was, without ablation, if all paths have the same prior precision.
        """
        found: dict[str, str] = {}
        for place, rows in self.places.items() if self.is_learnt else ():
            kinds = [row.kind for row in rows if row.chosen]
            if kinds:
                found[place] = "+".join(kinds)
        return found

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all numbers, by place and path, ready for JSON."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in self.rows:
            found.setdefault(row.place, {})[row.path] = asdict(row)
        return found

    def __str__(self) -> str:
        header = [*HEADER]
        if any(row.cost is not None for row in self.rows):
            header += LEFT_OUT
        n_cells = len(header) - 1
        lines: list[Sequence[str]] = [[*header, "chosen"]]
        chosen = self.chosen
        for place, (first, *others) in self.places.items():
            lines.append([place, *first.cells()[:n_cells], chosen.get(place, "")])
            lines += [["", *row.cells()[:n_cells], ""] for row in others]
        shown = table(lines, right=range(2, n_cells + 1))
        if self.is_learnt:
            return shown
        return (
            f"{shown}\nnothing was learnt: all paths have the same prior precision; learn them by "
            "marglik_training(..., prior_structure='layerwise'), or give ablation(la, loader)"
        )

    __repr__ = __str__


class _TensorUse(NamedTuple):
    effective: float
    precision: float | None


def layer_report(la: ParametricLaplace, ablation: Ablation | None = None) -> LayerReport:
    """Return how much of every path of every ``ResidualPathway`` in the model is in use.

    Args:
        la: Fitted Laplace approximation of all weights, such as ``marglik_training(...).la``.
        ablation: What the network loses without each path, ``ablation(la, loader)``, which decides
            what was chosen. None decides by shares, which is only a guess.

    Raises:
        TypeError: If it is another one, or was not fitted.
        ValueError: If the model has no ``ResidualPathway``.
    """
    uses = _uses(la)
    rows: list[PathReport] = []
    found = False
    for place, module in la.model.named_modules():
        if isinstance(module, ResidualPathway):
            found = True
            rows += _compared([_report(place, *path, uses) for path in module.paths.items()])
    if not found:
        raise ValueError("the model has no ResidualPathway, whose paths could be compared")
    if ablation is not None:
        rows = [_decided(row, ablation) for row in rows]
    return LayerReport(rows)


def _decided(row: PathReport, ablation: Ablation) -> PathReport:
    """Return a row with what is known of the network without the path."""
    without = ablation.row(row.place, row.path)
    return replace(row, cost=without.cost, accuracy=without.accuracy, chosen=without.chosen)


def _uses(la: ParametricLaplace) -> dict[int, _TensorUse]:
    """Return effective parameters and prior precision of every tensor, by its id."""
    tensors = tensors_of(la)
    effective = effective_parameters(la)
    precisions: list[float | None] = [None] * len(tensors)
    if la.prior_precision.numel() in (1, len(tensors)):
        precisions = la.prior_precision.expand(len(tensors)).tolist()
    return {
        id(tensor): _TensorUse(effective[name], precision)
        for (name, tensor), precision in zip(tensors.items(), precisions, strict=True)
    }


def _report(place: str, name: str, path: nn.Module, uses: Mapping[int, _TensorUse]) -> PathReport:
    """Return what is known of a path on its own."""
    own = dict(path.named_parameters())
    learnt = {key: uses[id(tensor)] for key, tensor in own.items() if id(tensor) in uses}
    precisions = {key: use.precision for key, use in learnt.items() if use.precision is not None}
    of_weights = [value for key, value in precisions.items() if own[key].ndim > 1]
    effective = normalised = None
    if learnt:
        effective = sum(use.effective for use in learnt.values())
        normalised = effective / sum(own[key].numel() for key in learnt)
    return PathReport(
        place,
        name,
        label_of(path),
        parameters=sum(map(Tensor.numel, own.values())),
        precision=max(of_weights or precisions.values(), default=None),
        precisions=precisions,
        norm=_norm(own.values()),
        effective=effective,
        normalised=normalised,
    )


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [tensor.detach().norm() for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


def _compared(rows: Sequence[PathReport]) -> list[PathReport]:
    """Return the paths of a layer that have parameters, with how they compare with each other."""
    rows = [row for row in rows if row.parameters]
    shares = [row.normalised for row in rows if row.normalised is not None]
    total = sum(shares)
    if len(shares) < len(rows) or not total > 0:
        return rows
    relative = [share / total for share in shares]
    return [
        replace(row, relative=share, chosen=share >= IN_USE)
        for row, share in zip(rows, relative, strict=True)
    ]
