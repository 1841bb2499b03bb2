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

IN_USE = 0.05  # share of a layer from which on a path counts: a layer with a free path in use has no symmetry

__all__ = ["LayerReport", "PathReport", "effective_parameters", "layer_report"]

LABELS = {
    nn.Conv2d: "CONV", SparseConv2d: "S-CONV", LiftingConv2d: "GCONV", GroupConv2d: "GCONV", nn.Linear: "FC", Linear2d: "FC",
    FactoredLinear2d: "F-FC", SparseLinear2d: "S-FC",
}  # fmt: skip


def _eigenvalues(precision: KronDecomposed) -> list[Tensor]:
    if isinstance(precision, DifferentiableKronDecomposed):
        return precision.curvature_spectra()
    return [
        torch.outer(*values) if len(values) == 2 else values[0] for values in precision.eigenvalues
    ]


def _tensors(la: ParametricLaplace) -> dict[str, nn.Parameter]:
    """Return the tensors that have a posterior, by name; refuse what is not fitted, or has one of some weights only."""
    names = (
        {id(p): name for name, p in la.model.named_parameters()}
        if isinstance(la, ParametricLaplace)
        else {}
    )
    params = getattr(la, "params", [])
    known = isinstance(la, KronLaplace | DiagLaplace | FullLaplace) and all(
        id(p) in names for p in params
    )
    fitted = known and la.n_data > 0 and la.n_params == sum(p.numel() for p in params)
    if not fitted or (isinstance(la, KronLaplace) and not isinstance(la.H, KronDecomposed)):
        raise TypeError(
            "effective parameters need a fitted Laplace approximation of all weights, 'kron', 'diag' or 'full'; got "
            f"{type(la).__name__}{' before fit()' if known and not fitted else ''}"
        )
    return {names[id(p)]: p for p in params}


@torch.no_grad()
def effective_parameters(la: ParametricLaplace) -> dict[str, float]:
    """Return the effective number of parameters of every tensor, by its name in the model.

    Args:
        la: fitted Laplace approximation of all weights, with Kronecker-factored, diagonal or full curvature.
    """
    tensors = _tensors(la)
    if isinstance(la, KronLaplace):
        precision = la.posterior_precision
        deltas = precision.deltas.expand(len(tensors))
        gammas = [
            (values / (values + delta)).sum()
            for values, delta in zip(_eigenvalues(precision), deltas, strict=True)
        ]
        return {name: gamma.item() for name, gamma in zip(tensors, gammas, strict=True)}
    covariance = (
        1 / la.posterior_precision
        if isinstance(la, DiagLaplace)
        else la.posterior_covariance.diagonal()
    )
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
        precision: prior precision of its weights; of several tensors the largest. None if every parameter has its own.
        precisions: of every tensor.
        norm: Euclidean norm of all of its weights.
        effective: effective number of parameters; None if the path is frozen.
        normalised: that over the number of parameters.
        relative: normalised, over the sum of the paths of the layer; None if one of them is frozen, or none is in use.
        chosen: whether that is 5 percent or more.
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
    relative: float | None
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
        """The kind of layer that was chosen, by place: of the paths in use, such as ``"CONV"`` or ``"CONV+F-FC"``."""
        kinds = {
            place: [row.kind for row in rows if row.chosen] for place, rows in self.places.items()
        }
        return {place: "+".join(chosen) for place, chosen in kinds.items() if chosen}

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all numbers, by place and path, ready for JSON."""
        return {
            place: {row.path: asdict(row) for row in rows} for place, rows in self.places.items()
        }

    def __str__(self) -> str:
        cells = [
            (
                "place",
                "path",
                "parameters",
                "prior precision",
                "norm",
                "effective",
                "normalised",
                "relative",
                "chosen",
            )
        ]
        for place, rows in self.places.items():
            for i, row in enumerate(rows):
                cells.append(
                    (
                        "" if i else row.place,
                        row.path if row.path == row.kind else f"{row.path} ({row.kind})",
                        f"{row.parameters:,}",
                        "" if row.precision is None else f"{row.precision:.3g}",
                        f"{row.norm:.3g}",
                        "frozen" if row.effective is None else f"{row.effective:.1f}",
                        "" if row.normalised is None else f"{row.normalised:.2e}",
                        "" if row.relative is None else f"{row.relative:.1%}",
                        "" if i else self.chosen.get(place, ""),
                    )
                )
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        left = {0, 1, 8}
        lines = [
            "  ".join(
                c.ljust(w) if i in left else c.rjust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
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
    tensors = _tensors(la)
    pathways = {
        name: module
        for name, module in la.model.named_modules()
        if isinstance(module, ResidualPathway)
    }
    if not pathways:
        raise ValueError("the model has no ResidualPathway, whose paths could be compared")
    effective = effective_parameters(la)
    precision = (
        la.prior_precision.expand(len(tensors)).tolist()
        if la.prior_precision.numel() in (1, len(tensors))
        else None
    )
    known = {
        id(tensor): (effective[name], None if precision is None else precision[i])
        for i, (name, tensor) in enumerate(tensors.items())
    }
    rows: list[PathReport] = []
    for place, pathway in pathways.items():
        found = [_describe(place, name, path, known) for name, path in pathway.paths.items()]
        found = [row for row in found if row["parameters"]]
        shares = [row["normalised"] for row in found]
        comparable = None not in shares and sum(shares) > 0
        for i, row in enumerate(found):
            relative = shares[i] / sum(shares) if comparable else None
            rows.append(
                PathReport(**row, relative=relative, chosen=comparable and relative >= IN_USE)
            )
    return LayerReport(rows)


def _describe(
    place: str, name: str, path: nn.Module, known: dict[int, tuple[float, float | None]]
) -> dict[str, Any]:
    """Return what is known of a path on its own; ``known`` has effective parameters and prior precision by tensor."""
    own = dict(path.named_parameters())
    learnt = {n: p for n, p in own.items() if id(p) in known}
    size = sum(p.numel() for p in learnt.values())
    gamma = sum(known[id(p)][0] for p in learnt.values())
    precisions = {n: known[id(p)][1] for n, p in learnt.items() if known[id(p)][1] is not None}
    weights = [value for n, value in precisions.items() if own[n].ndim > 1] or list(
        precisions.values()
    )
    return {
        "place": place,
        "path": name,
        "kind": _kind(path),
        "parameters": sum(p.numel() for p in own.values()),
        "precision": max(weights, default=None),
        "precisions": precisions,
        "norm": torch.stack([p.detach().norm() for p in own.values()]).norm().item()
        if own
        else 0.0,
        "effective": gamma if learnt else None,
        "normalised": gamma / size if learnt else None,
    }
