"""What the paths of a trained network are worth: its evidence and accuracy without them.

A network is the sum of paths in every layer. Without some of them, all other weights as they are,
it is a smaller network with fewer weights, and its log evidence is that of a Laplace approximation
at these weights,

    log likelihood - 1/2 sum over the tensors that are left (log det ratio + scatter).

The log likelihood is computed anew. The terms of the tensors that are left are those of the whole
network: its curvature is used again, which is exact where a path does nothing, and that is where a
choice is close; where a path is needed, the log likelihood decides. So a path that is not used
costs less than nothing, as its share of the complexity is saved. The weights that are left are not
trained again: what a network without the path could learn is another question.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from laplace.baselaplace import FullLaplace, KronLaplace, ParametricLaplace
from torch import Tensor
from torch.utils.data import DataLoader

from laplace_invariance.layers.paths import label_of
from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.layers.starts import free_paths
from laplace_invariance.metrics.fitted import curvature_spectra, tensors_of
from laplace_invariance.modes import evaluation
from laplace_invariance.tables import table

__all__ = ["THRESHOLD", "Ablation", "AblationRow", "ablation"]

THRESHOLD = 0.01  # nats per example that a path must be worth to be chosen
FREE = "all free paths"
UNUSED = "all not chosen"

Path = tuple[str, str]  # place of a pathway, and name of a path in it


@dataclass(frozen=True)
class AblationRow:
    """What it costs to leave something out.

    Attributes:
        place: Name of the layer, a ``ResidualPathway``; or what is left out of all layers.
        path: Name of the path in it; empty for several.
        kind: Label of the kind of path, ``"CONV"``, ``"F-FC"``, ...; empty for several.
        cost: By how much the log evidence per training example is lower without it.
        log_likelihood: By how much the log likelihood per training example is lower.
        accuracy: Accuracy without it, on other data or on the training data; None of a regression.
        chosen: Whether the network needs the path.
    """

    place: str
    path: str
    kind: str
    cost: float
    log_likelihood: float
    accuracy: float | None
    chosen: bool = False

    @property
    def saved(self) -> float:
        """Complexity per example that is saved, half of log determinant ratio and scatter."""
        return self.log_likelihood - self.cost

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        accuracy = "" if self.accuracy is None else f"{self.accuracy:.1%}"
        numbers = [f"{value:.3f}" for value in (self.cost, self.log_likelihood, self.saved)]
        return [self.place, self.path, *numbers, accuracy, "yes" * self.chosen]


@dataclass(frozen=True)
class Ablation:
    """A network without each of its paths, as :func:`ablation` found it; prints as a table.

    Attributes:
        rows: One row per path, layer by layer.
        free: All free paths of all layers left out together.
        unused: All paths left out together that were not chosen.
        accuracy: Accuracy of the whole network; None of a regression.
    """

    rows: list[AblationRow]
    free: AblationRow
    unused: AblationRow
    accuracy: float | None

    @property
    def chosen(self) -> dict[str, str]:
        """The kind of layer that was chosen, by place, such as ``"CONV"`` or ``"CONV+F-FC"``."""
        found: dict[str, str] = {}
        for row in self.rows:
            if row.chosen:
                found[row.place] = "+".join(filter(None, (found.get(row.place), row.kind)))
        return found

    def row(self, place: str, path: str) -> AblationRow:
        """Return the row of a path.

        Args:
            place: Name of the layer.
            path: Name of the path in it.

        Raises:
            KeyError: If there is no such path.
        """
        for row in self.rows:
            if (row.place, row.path) == (place, path):
                return row
        raise KeyError(f"there is no path {path!r} at {place!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers, ready for JSON."""
        return {
            "accuracy": self.accuracy,
            "rows": [vars(row) for row in self.rows],
            "free": vars(self.free),
            "unused": vars(self.unused),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Ablation:
        """Return what :meth:`as_dict` describes."""
        rows = [AblationRow(**row) for row in found["rows"]]
        free, unused = AblationRow(**found["free"]), AblationRow(**found["unused"])
        return cls(rows, free, unused, found["accuracy"])

    def __str__(self) -> str:
        header = ["without", "path", "costs", "log likelihood", "saved", "accuracy", "chosen"]
        rows = [row.cells() for row in (*self.rows, self.free, self.unused)]
        return table([header, *rows], right=range(2, 6))


def ablation(
    la: ParametricLaplace,
    loader: DataLoader,
    test: Iterable[Any] | None = None,
    *,
    threshold: float = THRESHOLD,
) -> Ablation:
    """Return what a trained network loses without each of its paths.

    Each path is left out alone, and all free paths (all but the first of every layer) together.
    Paths that cost more than ``threshold`` are *chosen*. All others are then left out together; if
    that costs more, they are left out one after the other, those that cost least first, and stay
    out unless that costs more than ``threshold``. So of two paths that do the same one is chosen,
    though either is worth nothing while the other is there.

    A path is worth as much as the log evidence falls without it; how that is computed, and what it
    leaves aside, is said at the top of :mod:`laplace_invariance.metrics.ablation`. The model, its
    modes and torch's random states are left as they are.

    Args:
        la: Fitted Laplace approximation of all weights, such as ``marglik_training(...).la``.
        loader: The training data, batches of inputs and targets; they are read in order.
        test: Batches of other data, on which the accuracy is reported; None is the training data.
        threshold: Log evidence per example that a path must be worth to be chosen.

    Raises:
        TypeError: If the approximation is another one, or was not fitted.
        ValueError: If the model has no ``ResidualPathway``.
    """
    pathways = {n: m for n, m in la.model.named_modules() if isinstance(m, ResidualPathway)}
    if not pathways:
        raise ValueError("the model has no ResidualPathway, whose paths could be left out")
    paths = [(place, name) for place, module in pathways.items() for name in module.paths]
    paths = [path for path in paths if _has_parameters(pathways, path)]
    free = [(place, name) for place, names in free_paths(la.model).items() for name in names]
    network = _Network(la, pathways, loader, test)
    singles = [[path] for path in paths]
    nothing, without_free, *found = network.without([[], free, *singles])
    costs = {path: nothing.evidence - f.evidence for path, f in zip(paths, found, strict=True)}
    idle = [path for path, cost in costs.items() if cost <= threshold]
    unused = network.unused(sorted(idle, key=lambda path: costs[path]), nothing, threshold)
    (without_unused,) = network.without([unused])
    rows = []
    for path, without in zip(paths, found, strict=True):
        place, name = path
        kind = label_of(pathways[place].paths[name])
        rows.append(_row(place, name, kind, nothing, without, path not in unused))
    return Ablation(
        rows,
        _row(FREE, "", "", nothing, without_free, False),
        _row(UNUSED, "", "", nothing, without_unused, False),
        nothing.accuracy,
    )


def _has_parameters(pathways: Mapping[str, ResidualPathway], path: Path) -> bool:
    place, name = path
    return any(True for _ in pathways[place].paths[name].parameters())


@dataclass(frozen=True)
class _Found:
    """A network without some paths; evidence and likelihood are per training example."""

    evidence: float
    log_likelihood: float
    accuracy: float | None


def _row(
    place: str, path: str, kind: str, whole: _Found, without: _Found, chosen: bool
) -> AblationRow:
    cost = whole.evidence - without.evidence
    lost = whole.log_likelihood - without.log_likelihood
    return AblationRow(place, path, kind, cost, lost, without.accuracy, chosen)


class _Network:
    """A fitted network, whose paths can be left out.

    Args:
        la: Fitted Laplace approximation of all weights.
        pathways: The pathways of its model, by place.
        loader: Training data.
        test: Data for the accuracy; None is the training data.
    """

    def __init__(
        self,
        la: ParametricLaplace,
        pathways: Mapping[str, ResidualPathway],
        loader: DataLoader,
        test: Iterable[Any] | None,
    ) -> None:
        self._la = la
        self._pathways = pathways
        self._loader = _in_order(loader)
        self._test = test
        self._tensors = tensors_of(la)
        self._precision = _detached_precision(la)
        # a tensor may be used in several places, and have a name in each
        self._names: dict[int, list[str]] = {}
        for name, parameter in la.model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    def unused(self, idle: Sequence[Path], whole: _Found, threshold: float) -> list[Path]:
        """Return paths that can be left out together, from those that can be left out alone.

        Args:
            idle: Paths that cost no more than the threshold alone, those that cost least first.
            whole: The network with all paths.
            threshold: Evidence per example that is given up, for all at once or for each.
        """
        (together,) = self.without([idle], on_test=False)
        if whole.evidence - together.evidence <= threshold:
            return list(idle)
        found: list[Path] = []
        present = whole
        for path in idle:
            (tried,) = self.without([[*found, path]], on_test=False)
            if present.evidence - tried.evidence <= threshold:
                found.append(path)
                present = tried
        return found

    @torch.no_grad()
    def without(self, left_out: Sequence[Collection[Path]], on_test: bool = True) -> list[_Found]:
        """Return evidence and accuracy without each of several sets of paths.

        Args:
            left_out: The sets.
            on_test: Whether the accuracy is that on other data, if there are any.
        """
        la = self._la
        factor = float(la._H_factor)
        losses, correct, n_seen = self._pass(self._loader, left_out)
        if self._test is not None and on_test:
            _, correct, n_seen = self._pass(self._test, left_out)
        found = []
        for paths, loss, right in zip(left_out, losses, correct, strict=True):
            log_likelihood = -factor * loss / la.n_data
            evidence = log_likelihood - self._complexity(paths) / la.n_data
            accuracy = None if la.likelihood == "regression" else right / n_seen
            found.append(_Found(evidence, log_likelihood, accuracy))
        return found

    def _pass(
        self, batches: Iterable[Any], left_out: Sequence[Collection[Path]]
    ) -> tuple[list[float], list[float], int]:
        """Return sums of losses and of right predictions, and the number of examples."""
        model = self._la.model
        backend = self._la.backend
        device = next(model.parameters()).device
        losses, correct = [0.0] * len(left_out), [0.0] * len(left_out)
        n_seen = 0
        with evaluation(model), torch.random.fork_rng(devices=[]):
            for x, y in batches:
                x, y = x.to(device), y.to(device)
                n_seen += len(y)
                for i, paths in enumerate(left_out):
                    with self._switched_off(paths):
                        outputs = model(x)
                    losses[i] += backend.factor * backend.lossfunc(outputs, y).item()
                    if self._la.likelihood != "regression":
                        correct[i] += (outputs.argmax(-1) == y).sum().item()
        return losses, correct, n_seen

    @contextmanager
    def _switched_off(self, paths: Collection[Path]) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name in paths:
                stack.enter_context(self._pathways[place].without(name))
            yield

    def _complexity(self, paths: Collection[Path]) -> float:
        """Return half of log determinant ratio and scatter of the tensors that are left."""
        prefixes = tuple(f"{place}.{name}." if place else f"{name}." for place, name in paths)
        kept = []
        for parameter in self._tensors.values():
            names = self._names[id(parameter)]
            kept.append(not all(name.startswith(prefixes) for name in names))
        return self._precision.complexity(kept)


@dataclass(frozen=True)
class _Precision:
    """Terms of the evidence by tensor, or the whole matrix where these do not come apart.

    Attributes:
        scatter: Squared weights times their prior precision ``[tensors]``.
        log_det_ratio: Of posterior over prior precision ``[tensors]``; None with a matrix.
        matrix: Posterior precision ``[parameters, parameters]``; None without.
        prior: Prior precision ``[parameters]``.
        sizes: Numbers of parameters ``[tensors]``.
    """

    scatter: Tensor
    log_det_ratio: Tensor | None
    matrix: Tensor | None
    prior: Tensor
    sizes: Tensor

    def complexity(self, kept: Sequence[bool]) -> float:
        """Return half of log determinant ratio and scatter of some tensors."""
        mask = torch.tensor(kept, device=self.scatter.device)
        scatter = self.scatter[mask].sum()
        if self.log_det_ratio is not None:
            return 0.5 * (self.log_det_ratio[mask].sum() + scatter).item()
        assert self.matrix is not None
        each = mask.repeat_interleave(self.sizes)
        if not each.any():
            return 0.0
        log_det_ratio = self.matrix[each][:, each].logdet() - self.prior[each].log().sum()
        return 0.5 * (log_det_ratio + scatter).item()


@torch.no_grad()
def _detached_precision(la: ParametricLaplace) -> _Precision:
    """Return the terms of the evidence of a fitted Laplace approximation."""
    tensors = list(tensors_of(la).values())
    numbers = [tensor.numel() for tensor in tensors]
    sizes = torch.tensor(numbers, device=tensors[0].device)
    prior = la.prior_precision_diag.detach()
    squares = (la.mean - la.prior_mean).square()
    scatter = torch.stack([part.sum() for part in (squares * prior).split(numbers)])
    if isinstance(la, FullLaplace):
        return _Precision(scatter, None, la.posterior_precision.detach(), prior, sizes)
    if isinstance(la, KronLaplace):
        precision = la.posterior_precision
        deltas = precision.deltas.expand(len(tensors))
        pairs = zip(curvature_spectra(precision), deltas, strict=True)
        ratios = [torch.log1p(values / delta).sum() for values, delta in pairs]
    else:
        parts = (la.posterior_precision / prior).split(numbers)
        ratios = [part.log().sum() for part in parts]
    return _Precision(scatter, torch.stack(ratios), None, prior, sizes)


def _in_order(loader: DataLoader) -> Iterable[Any]:
    """Return a loader of the same examples that does not shuffle, and so draws nothing."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
