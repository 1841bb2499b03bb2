"""Small demonstrations that show the library at work.

``points``: the same network is trained twice with stock ``laplace.marglik_training``, averaged over
rotations whose range is learnt by evidence, and without. Classes are shapes of 2-D points, rotated
by up to 120 degrees to either side; rotated further they are another class.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import laplace
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import plots
from laplace_invariance.augmentations import AffinePoints
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.datasets import rotate, rotated_shapes
from laplace_invariance.experiments.base import accuracy, say, seeded
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import DemoConfig
from laplace_invariance.hyper import learning
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.tables import labelled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DemoConfig", "DemoResult", "demo"]

MAX_ANGLE = 2 * math.pi / 3
N_TEST = 2000


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration found; prints as a summary.

    Attributes:
        true_range: True range of rotations, in radians.
        learnt_range: Learnt range, in radians.
        accuracy: Test accuracy with the learnt invariance.
        accuracy_without: Test accuracy without invariance.
        evidence: Log evidence per training example with the learnt invariance.
        evidence_without: Log evidence per training example without invariance.
        seconds: Duration of everything.
        figure: Path of the figure; None if there is none.
    """

    true_range: float
    learnt_range: float
    accuracy: float
    accuracy_without: float
    evidence: float
    evidence_without: float
    seconds: float = field(compare=False)
    figure: Path | None = None

    def __str__(self) -> str:
        learnt = f"±{math.degrees(self.learnt_range):.1f} degrees"
        accuracies = (
            f"{self.accuracy:.1%} with the learnt invariance, {self.accuracy_without:.1%} without"
        )
        evidences = f"{self.evidence:.3f} per datum with, {self.evidence_without:.3f} without"
        lines = [
            labelled("true range", f"±{math.degrees(self.true_range):.1f} degrees"),
            labelled("learnt range", f"{learnt}, from the training data alone"),
            labelled("test accuracy", accuracies),
            labelled("log evidence", evidences),
        ]
        if self.figure is not None:
            lines.append(labelled("figure", str(self.figure)))
        lines.append(labelled("time", f"{self.seconds:.0f} s"))
        return "\n".join(lines)


class _Trained(NamedTuple):
    """A trained network and its log evidence per datum, one value per estimate."""

    model: nn.Module
    evidence: list[float]


def demo(
    config: DemoConfig, out: str | Path | None = None, *, progress_bar: bool = False
) -> DemoResult:
    """Learn how far shapes of 2-D points may be rotated, with stock ``laplace.marglik_training``.

    Args:
        config: Which demonstration, its size and its seed.
        out: Directory for the figure ``points.png``, which is replaced if it exists; None draws
            none.
        progress_bar: Whether to show progress.

    Returns:
        True and learnt range, accuracies and evidences.
    """
    start = time.perf_counter()
    augmentation = AffinePoints(init={"rotation": 0.1}, learn="rotation", draws="independent")
    with RunDirectory(out) as directory, seeded(config.seed):
        directory.lock()
        train = rotated_shapes(config.n_train, MAX_ANGLE)
        test = rotated_shapes(N_TEST, MAX_ANGLE)
        weights = _network().state_dict()
        say("training without invariance ...", progress_bar)
        plain = _train(config, _network(weights), train, progress_bar)
        say("training with a range that the evidence learns ...", progress_bar)
        model = InvariantModel(_network(weights), augmentation, config.n_samples)
        with learning(model, lr=0.1) as learner:
            invariant = _train(config, model, train, progress_bar)
        history = torch.stack(learner.history["augmentation.eta"])[:, 2].abs()
        found = {
            "true_range": MAX_ANGLE,
            "learnt_range": augmentation.magnitudes()["rotation"],
            "accuracy": accuracy(invariant.model, test),
            "accuracy_without": accuracy(plain.model, test),
            "evidence": max(invariant.evidence),
            "evidence_without": max(plain.evidence),
        }
        figure = _draw(directory, config, train, plain, invariant, history)
    return DemoResult(**found, seconds=time.perf_counter() - start, figure=figure)


def _network(weights: dict[str, Any] | None = None) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 11))
    if weights is not None:
        net.load_state_dict(weights)
    return net


def _train(
    config: DemoConfig, model: nn.Module, train: TensorDataset, progress_bar: bool
) -> _Trained:
    _, model, margliks, _ = laplace.marglik_training(
        model,
        DataLoader(train, batch_size=len(train)),
        likelihood="classification",
        hessian_structure="kron",
        backend=AugmentedGGN,
        n_epochs=config.n_epochs,
        n_epochs_burnin=config.n_epochs_burnin,
        n_hypersteps=1,
        marglik_frequency=config.marglik_frequency,
        optimizer_kwargs={"lr": 1e-2},
        progress_bar=progress_bar,
    )
    return _Trained(model, [-marglik / len(train) for marglik in margliks])


@torch.no_grad()
def _by_angle(model: nn.Module, degrees: Tensor) -> Tensor:
    """Return mean probabilities of two classes for rotated shapes.

    Args:
        model: Network.
        degrees: Angles ``[angles]`` by which upright shapes are rotated.

    Returns:
        ``[angles, 2]``: the shape's own class, and that of shapes that are rotated too far.
    """
    generator = torch.Generator().manual_seed(1)
    x, y = rotated_shapes(500, angles=torch.zeros(500), generator=generator).tensors
    rows = []
    for angle in degrees.deg2rad().tolist():
        probabilities = model(rotate(x, torch.full((len(x),), angle))).softmax(-1)
        own = probabilities.gather(1, y.unsqueeze(1))
        rows.append(torch.stack([own.mean(), probabilities[:, 0].mean()]))
    return torch.stack(rows)


def _draw(
    directory: RunDirectory,
    config: DemoConfig,
    train: TensorDataset,
    plain: _Trained,
    invariant: _Trained,
    history: Tensor,
) -> Path | None:
    true_degrees = math.degrees(MAX_ANGLE)
    estimates = range(len(history) - 1)
    epochs = [config.n_epochs_burnin + config.marglik_frequency * i for i in estimates]
    curves: dict[str, Sequence[float]] = {
        "with invariance": invariant.evidence,
        "without": plain.evidence,
    }
    degrees = torch.linspace(-180, 180, 73)
    names = ("its own class", "class of those rotated further")

    def draw(figure: Figure) -> None:
        axes = figure.subplot_mosaic(
            [["data", "before", "after"], ["data", "range", "evidence"]],
            width_ratios=[1.25, 1, 1],
        )
        x, y = train.tensors
        plots.shapes(x[:42], y[:42], axes["data"])
        axes["data"].set_title("data: colour is the shape, grey: rotated further")
        before, after = (_by_angle(trained.model, degrees) for trained in (plain, invariant))
        plots.probability_by_angle(degrees, before, names, true_degrees, axes["before"])
        axes["before"].set_title("predictive without invariance")
        plots.probability_by_angle(degrees, after, names, true_degrees, axes["after"])
        axes["after"].set_title("with the learnt invariance")
        ranges, label = history.rad2deg(), "rotation, ± degrees"
        plots.learnt_range([0, *epochs], ranges, true_degrees, axes["range"], label)
        axes["range"].set_title("range over epochs")
        plots.evidence(epochs, curves, axes["evidence"]).set_title("evidence over epochs")

    return directory.figure("points.png", (15, 7.5), draw)
