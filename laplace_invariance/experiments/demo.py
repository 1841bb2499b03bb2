"""Small programs that show the library at work; ``laplace-invariance demo NAME`` runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import laplace
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import plots
from laplace_invariance.augmentations import AffinePoints
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.datasets import rotate, rotated_shapes
from laplace_invariance.hyper import learning
from laplace_invariance.invariant import InvariantModel

__all__ = ["PointsResult", "points"]

MAX_ANGLE = 2 * math.pi / 3
BURN_IN, EVERY = 10, 2


@dataclass
class PointsResult:
    """What the demonstration found: ranges in radians, accuracies, and evidence per datum."""

    true_range: float
    learnt_range: float
    accuracy: float
    accuracy_without: float
    evidence: float
    evidence_without: float
    figure: Path | None

    def __str__(self) -> str:
        lines = [
            f"true range      ±{math.degrees(self.true_range):.1f} degrees",
            f"learnt range    ±{math.degrees(self.learnt_range):.1f} degrees, from the training data alone",
            f"test accuracy   {self.accuracy:.1%} with the learnt invariance, {self.accuracy_without:.1%} without",
            f"log evidence    {self.evidence:.3f} per datum with, {self.evidence_without:.3f} without",
        ]
        return "\n".join([*lines, *([f"figure          {self.figure}"] if self.figure else [])])


def points(
    out: Path | None = None,
    n: int = 200,
    n_samples: int = 16,
    n_epochs: int = 240,
    seed: int = 0,
    progress_bar: bool = True,
    say: Callable[[str], None] = print,
) -> PointsResult:
    """Learn how far shapes of 2-D points may be turned, with stock ``laplace.marglik_training``.

    The same network is trained twice with the same code: averaged over rotations whose range is learnt by evidence, and
    without. Classes are shapes that are turned by up to 120 degrees to either side; turned further they are another class.

    Args:
        out: directory for the figure; None draws none.
        n: training examples.
        n_samples: sampled rotations per example.
        n_epochs: epochs of training.
        seed: of data, weights and draws; the state of torch's default generator is restored.
        progress_bar: show one.
        say: prints progress in words.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        train = rotated_shapes(n, MAX_ANGLE)
        x_test, y_test = rotated_shapes(2000, MAX_ANGLE).tensors
        loader = DataLoader(train, batch_size=n)
        settings = {
            "likelihood": "classification",
            "hessian_structure": "kron",
            "backend": AugmentedGGN,
            "n_epochs": n_epochs,
            "n_epochs_burnin": BURN_IN,
            "n_hypersteps": 1,
            "marglik_frequency": EVERY,
            "optimizer_kwargs": {"lr": 1e-2},
            "progress_bar": progress_bar,
        }
        weights = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 11)
        ).state_dict()

        say("training without invariance ...")
        plain = _network(weights)
        _, _, plain_margliks, _ = laplace.marglik_training(plain, loader, **settings)

        say("training with a range that the evidence learns ...")
        augmentation = AffinePoints(init={"rotation": 0.1}, learn="rotation")
        model = InvariantModel(_network(weights), augmentation, n_samples)
        with learning(model, lr=0.1) as learner:
            _, model, margliks, _ = laplace.marglik_training(model, loader, **settings)

    history = torch.stack(learner.history["augmentation.eta"])[:, 2].abs()
    result = PointsResult(
        true_range=MAX_ANGLE,
        learnt_range=augmentation.magnitudes()["rotation"],
        accuracy=_accuracy(model, x_test, y_test),
        accuracy_without=_accuracy(plain, x_test, y_test),
        evidence=-min(margliks) / n,
        evidence_without=-min(plain_margliks) / n,
        figure=None,
    )
    if out is not None:
        curves = {"with invariance": margliks, "without": plain_margliks}
        curves = {name: [-value / n for value in values] for name, values in curves.items()}
        result.figure = _figure(Path(out) / "points.png", train, plain, model, history, curves)
    return result


def _network(weights: dict[str, Tensor]) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 50), nn.Tanh(), nn.Linear(50, 11))
    net.load_state_dict(weights)
    return net


@torch.no_grad()
def _accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax(-1) == y).float().mean().item()


@torch.no_grad()
def _by_angle(model: nn.Module, degrees: Tensor) -> Tensor:
    """Mean probabilities ``[angles, 2]`` of an upright shape's own class and of the class of those turned too far."""
    x, y = rotated_shapes(
        500, angles=torch.zeros(500), generator=torch.Generator().manual_seed(1)
    ).tensors
    rows = []
    for angle in degrees.deg2rad().tolist():
        probabilities = model(rotate(x, torch.full((len(x),), angle))).softmax(-1)
        rows.append(
            torch.stack(
                [probabilities.gather(1, y.unsqueeze(1)).mean(), probabilities[:, 0].mean()]
            )
        )
    return torch.stack(rows)


def _figure(
    path: Path,
    train: TensorDataset,
    plain: nn.Module,
    model: nn.Module,
    history: Tensor,
    curves: dict[str, list[float]],
) -> Path:
    figure = plots.figure((15, 7.5))
    mosaic = [["data", "before", "after"], ["data", "range", "evidence"]]
    layout = figure.subplot_mosaic(mosaic, width_ratios=[1.25, 1, 1])
    x, y = train.tensors
    plots.shapes(x[:42], y[:42], layout["data"])
    layout["data"].set_title("data: colour is the shape, grey: turned further")
    degrees = torch.linspace(-180, 180, 73)
    names = ("its own class", "class of those turned further")
    for place, net, title in (
        ("before", plain, "predictive without invariance"),
        ("after", model, "with the learnt invariance"),
    ):
        plots.probability_by_angle(
            degrees, _by_angle(net, degrees), names, math.degrees(MAX_ANGLE), layout[place]
        ).set_title(title)
    epochs = [BURN_IN + EVERY * i for i in range(len(history) - 1)]
    plots.learnt_range(
        [0, *epochs],
        history.rad2deg(),
        math.degrees(MAX_ANGLE),
        layout["range"],
        "rotation, ± degrees",
    )
    layout["range"].set_title("range over epochs")
    plots.evidence(epochs, curves, layout["evidence"]).set_title("evidence over epochs")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
