"""What the evidence made of a network: how much of each of its paths is in use.

A tensor with curvature eigenvalues ``l_i`` and prior precision ``d`` has ``gamma = sum_i l_i / (l_i + d)`` effective parameters
(MacKay, 1992): those that the data determine rather than the prior. A path with a large prior precision has none, whatever its
size, and the layer is then what the other paths make it. Paths differ in their number of parameters ``P``, so they are compared
by ``gamma / P``, relative to the sum over the paths of a layer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace
from laplace.utils.matrix import KronDecomposed
from torch import Tensor, nn

from laplace_invariance.curvature import DifferentiableKronDecomposed
from laplace_invariance.layers import (
    FactoredLinear2d,
    GroupConv2d,
    LiftingConv2d,
    Linear2d,
    ResidualPathway,
    SparseConv2d,
    SparseLinear2d,
)

__all__ = ["LayerReport", "PathReport", "effective_parameters", "layer_report"]

LABELS = {
    nn.Conv2d: "CONV", SparseConv2d: "S-CONV", LiftingConv2d: "GCONV", GroupConv2d: "GCONV", nn.Linear: "FC", Linear2d: "FC",
    FactoredLinear2d: "F-FC", SparseLinear2d: "S-FC",
}  # fmt: skip


def _eigenvalues(precision: KronDecomposed) -> list[Tensor]:
    if isinstance(precision, DifferentiableKronDecomposed):
        return precision.curvature_spectra()
    return [torch.outer(*values) if len(values) == 2 else values[0] for values in precision.eigenvalues]


@torch.no_grad()
def effective_parameters(la: ParametricLaplace) -> dict[str, float]:
    """Return the effective number of parameters of every tensor, by its name in the model.

    Args:
        la: fitted Laplace approximation of all weights, with Kronecker-factored, diagonal or full curvature.
    """
    names = {id(parameter): name for name, parameter in la.model.named_parameters()}
    tensors = {names[id(parameter)]: parameter for parameter in la.params}
    if isinstance(la, KronLaplace) and isinstance(la.H, KronDecomposed):
        precision = la.posterior_precision
        deltas = precision.deltas.expand(len(tensors))
        gammas = [
            (values / (values + delta)).sum() for values, delta in zip(_eigenvalues(precision), deltas, strict=True)
        ]
        return {name: gamma.item() for name, gamma in zip(tensors, gammas, strict=True)}
    if not isinstance(la, DiagLaplace | FullLaplace) or la.n_params != sum(p.numel() for p in tensors.values()):
        raise TypeError(
            f"effective_parameters needs a fitted Laplace approximation of all weights, 'kron', 'diag' or 'full'; got "
            f"{type(la).__name__}"
        )
    covariance = 1 / la.posterior_precision if isinstance(la, DiagLaplace) else la.posterior_covariance.diagonal()
    shares = 1 - la.prior_precision_diag * covariance
    parts = shares.split([parameter.numel() for parameter in tensors.values()])
    return {name: part.sum().item() for name, part in zip(tensors, parts, strict=True)}


@dataclass(frozen=True)
class PathReport:
    """One path of one layer.

    Attributes:
        place: name of the layer, a ``ResidualPathway``.
        path: name of the path in it.
        kind: ``"CONV"``, ``"F-FC"``, ...
        parameters: their number.
        precision: prior precision of its weights; of several tensors the largest, which is the one that switches a path off.
        precisions: of every tensor.
        norm: Euclidean norm of all of its weights.
        effective: effective number of parameters.
        normalised: that over the number of parameters.
        relative: normalised, over the sum of the paths of the layer.
        chosen: whether this is the layer's largest.
    """

    place: str
    path: str
    kind: str
    parameters: int
    precision: float
    precisions: dict[str, float]
    norm: float
    effective: float
    normalised: float
    relative: float
    chosen: bool


class LayerReport:
    """What :func:`layer_report` found: a table to print, ``rows`` to read, :meth:`as_dict` to save."""

    def __init__(self, rows: list[PathReport]) -> None:
        self.rows = rows

    @property
    def places(self) -> dict[str, list[PathReport]]:
        """The paths of each layer, in order."""
        found: dict[str, list[PathReport]] = {}
        for row in self.rows:
            found.setdefault(row.place, []).append(row)
        return found

    @property
    def chosen(self) -> dict[str, str]:
        """The kind of layer that was chosen, by place."""
        return {row.place: row.kind for row in self.rows if row.chosen}

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all numbers, by place and path, ready for JSON."""
        return {place: {row.path: asdict(row) for row in rows} for place, rows in self.places.items()}

    def __str__(self) -> str:
        cells = [
            ("place", "path", "parameters", "prior precision", "norm", "effective", "normalised", "relative", "chosen")
        ]
        for rows in self.places.values():
            for i, row in enumerate(rows):
                cells.append(
                    (
                        "" if i else row.place,
                        row.path if row.path == row.kind else f"{row.path} ({row.kind})",
                        f"{row.parameters:,}",
                        f"{row.precision:.3g}",
                        f"{row.norm:.3g}",
                        f"{row.effective:.1f}",
                        f"{row.normalised:.2e}",
                        f"{row.relative:.1%}",
                        row.kind if row.chosen else "",
                    )
                )
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        left = {0, 1, 8}
        lines = [
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def _kind(path: nn.Module) -> str:
    known = (LABELS[type(module)] for module in path.modules() if type(module) in LABELS)
    return next(known, type(path).__name__)


def layer_report(la: ParametricLaplace) -> LayerReport:
    """Tell for every path of every ``ResidualPathway`` in the model how much of it is in use.

    Args:
        la: fitted Laplace approximation of all weights, such as ``marglik_training(...).la``.
    """
    pathways = {name: module for name, module in la.model.named_modules() if isinstance(module, ResidualPathway)}
    if not pathways:
        raise ValueError("the model has no ResidualPathway, whose paths could be compared")
    effective = effective_parameters(la)
    tensors = {name: parameter for name, parameter in la.model.named_parameters() if name in effective}
    prior = la.prior_precision.expand(len(tensors)) if la.prior_precision.numel() in (1, len(tensors)) else None
    rows: list[PathReport] = []
    for place, pathway in pathways.items():
        found: list[dict[str, Any]] = []
        for name, path in pathway.paths.items():
            prefix = f"{place}.{name}.".removeprefix(".")
            own = {n.removeprefix(prefix): p for n, p in tensors.items() if n.startswith(prefix)}
            if not own:
                continue
            size = sum(p.numel() for p in own.values())
            gamma = sum(effective[prefix + n] for n in own)
            precisions = {} if prior is None else {n: prior[list(tensors).index(prefix + n)].item() for n in own}
            weights = [value for n, value in precisions.items() if own[n].ndim > 1] or list(precisions.values())
            found.append(
                {
                    "place": place,
                    "path": name,
                    "kind": _kind(path),
                    "parameters": size,
                    "precision": max(weights, default=float("nan")),
                    "precisions": precisions,
                    "norm": torch.stack([p.detach().norm() for p in own.values()]).norm().item(),
                    "effective": gamma,
                    "normalised": gamma / size,
                }
            )
        total = sum(row["normalised"] for row in found)
        largest = max((row["normalised"] for row in found), default=0.0)
        for row in found:
            share = row["normalised"] / total if total else 0.0
            rows.append(PathReport(**row, relative=share, chosen=row["normalised"] == largest))
    return LayerReport(rows)
