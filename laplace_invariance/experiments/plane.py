"""Learn whether labels of points in the plane ignore rotations, and draw what is predicted where.

The same few points are learnt without invariance, with a range of rotations that is learnt, and
with all rotations, by the evidence of a small network (Laplace) or by the bound of a shallow one
(ELBO). Where labels depend on the radius, a network that ignores rotations predicts well far from
any example; where they depend on the angle, it cannot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance import plots
from laplace_invariance.augmentations import AffinePoints
from laplace_invariance.datasets import labelled_points
from laplace_invariance.experiments.base import cosine_recipe, seeded
from laplace_invariance.experiments.choices import PLANE_BY, PLANE_LABELS, PLANE_METHODS
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import PlaneConfig
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik import Refit, marglik_training
from laplace_invariance.tables import labelled
from laplace_invariance.variational import ShallowNetwork, fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PlaneConfig", "PlaneResult", "plane"]

N_TEST = 2000
REACH = 3.0  # of the picture, to either side of the origin
N_PIXELS = 41  # of the picture, along a side
START = math.pi / 2  # of a range that is learnt: near zero, the evidence may have a maximum
LENGTH_SCALE = 1.0  # of the features of the shallow network
N_DRAWN = 64  # outputs of the shallow network, for its predictions
INITIAL = {"none": 0.0, "learnt": START, "all": math.pi}  # range of rotations


@dataclass(frozen=True)
class PlaneResult:
    """What was learnt of the plane; prints as a summary.

    Attributes:
        config: Configuration of the run.
        evidence: Log evidence per training point, or its bound.
        accuracy: Accuracy on 2000 other points.
        range: Range of rotations, in degrees.
        seconds: Duration of training.
        picture: Predicted probabilities over a square, and the training points, as
            ``plots.predictive`` draws them.
    """

    config: PlaneConfig
    evidence: float
    accuracy: float
    range: float
    seconds: float
    picture: dict[str, Any] = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Return configuration and numbers, for JSON."""
        numbers = {name: value for name, value in vars(self).items() if name != "config"}
        return {"experiment": asdict(self.config), **numbers}

    def __str__(self) -> str:
        config = self.config
        score = "log evidence" if config.by == "evidence" else "ELBO"
        lines = [
            labelled("labels", f"{config.labels}: {PLANE_LABELS[config.labels]}"),
            labelled("rotations", f"{config.method}: {PLANE_METHODS[config.method]}"),
            labelled("learnt by", PLANE_BY[config.by]),
            labelled("range", f"±{self.range:.0f} degrees"),
            labelled("test accuracy", f"{self.accuracy:.1%}"),
            labelled(score, f"{self.evidence:.3f} per training point"),
            labelled("time", f"{self.seconds:.0f} s"),
        ]
        return "\n".join(lines)


def plane(
    config: PlaneConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> PlaneResult:
    """Learn labels of points in the plane, and whether they ignore rotations.

    Args:
        config: Labels, method and training.
        out: Directory for ``summary.json`` and the figure ``plane.png``; None keeps nothing.
        resume: Whether a finished run in ``out`` is read; others start again.
        progress_bar: Whether to show progress.

    Returns:
        Evidence, accuracy, range and predictions.
    """
    with RunDirectory(out, config, resume) as directory, seeded(config.seed):
        summary = directory.finished()
        if summary is not None:
            del summary["experiment"]
            return PlaneResult(config, **summary)
        directory.begin()
        train = labelled_points(config.n_train, config.labels)
        test = labelled_points(N_TEST, config.labels)
        augmentation = AffinePoints(
            init={"rotation": INITIAL[config.method]}, learn="rotation", draws="independent"
        )
        if config.method != "learnt":
            augmentation = augmentation.frozen()
        started = time.perf_counter()
        learn = _by_evidence if config.by == "evidence" else _by_elbo
        evidence, probabilities = learn(config, augmentation, train, progress_bar)
        seconds = time.perf_counter() - started
        x, y = test.tensors
        result = PlaneResult(
            config,
            evidence=evidence,
            accuracy=(probabilities(x).argmax(-1) == y).double().mean().item(),
            range=math.degrees(augmentation.magnitudes()["rotation"]),
            seconds=seconds,
            picture=_picture(probabilities, train),
        )
        directory.save("summary.json", result.summary())
        _draw(directory, result)
    return result


Predictions = Callable[[Tensor], Tensor]


def _by_evidence(
    config: PlaneConfig, augmentation: AffinePoints, train: TensorDataset, progress_bar: bool
) -> tuple[float, Predictions]:
    """Return the log evidence per point, and the posterior predictive probabilities."""
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
    model: nn.Module = net
    if config.method != "none":
        model = InvariantModel(net, augmentation, config.n_samples)
    recipe = cosine_recipe(config.n_epochs, 1, lr=1e-2, n_epochs_burnin=100, n_hypersteps=10)
    recipe["backend_kwargs"] = {}  # two classes have one direction
    result = marglik_training(
        model,
        DataLoader(train, len(train), shuffle=True),
        estimator=Refit(),
        lr_aug=0.1,
        progress_bar=progress_bar,
        **recipe,
    )

    la: Any = result.la  # which returns a tensor for classes

    def probabilities(x: Tensor) -> Tensor:
        found: Tensor = la(x, pred_type="glm", link_approx="probit")
        return found.detach()

    return result.evidence / len(train), probabilities


def _by_elbo(
    config: PlaneConfig, augmentation: AffinePoints, train: TensorDataset, progress_bar: bool
) -> tuple[float, Predictions]:
    """Return the bound per point, and the predictive probabilities under ``q``."""
    x, y = train.tensors
    model = ShallowNetwork(
        augmentation, (2,), 2, n_samples=config.n_samples, length_scale=LENGTH_SCALE
    )
    fit(model, x, y, n_epochs=config.n_epochs, batch_size=len(x), progress_bar=progress_bar)

    @torch.no_grad()
    def probabilities(x: Tensor) -> Tensor:
        mean, variance = model.moments(model.features(x))
        drawn = mean + variance.sqrt() * torch.randn(N_DRAWN, *mean.shape)
        return drawn.softmax(-1).mean(0)

    with torch.no_grad():
        bound = model.elbo(x, y, n_outputs_drawn=N_DRAWN).item()
    return bound / len(x), probabilities


def _picture(probabilities: Predictions, train: TensorDataset) -> dict[str, Any]:
    """Return what is predicted over a square of the plane."""
    steps = torch.linspace(-REACH, REACH, N_PIXELS)
    ys, xs = torch.meshgrid(steps, steps, indexing="ij")
    grid = torch.stack([xs, ys], dim=-1).view(-1, 2)
    rows = probabilities(grid)[:, 1].view(N_PIXELS, N_PIXELS)
    x, y = train.tensors
    points = {str(label): _rounded(x[y == label]) for label in (0, 1)}
    return {"reach": REACH, "probabilities": _rounded(rows), "points": points}


def _rounded(values: Tensor) -> list[list[float]]:
    """Return rows of numbers that need few digits in a file."""
    return [[round(value, 3) for value in row] for row in values.tolist()]


def _draw(directory: RunDirectory, result: PlaneResult) -> None:
    config = result.config

    def draw(figure: Figure) -> None:
        plots.predictive(result.picture, figure.subplots()).set_title(
            f"labels by {config.labels}, rotations: {config.method}, ±{result.range:.0f}°"
        )

    directory.figure("plane.png", (5, 5), draw)
