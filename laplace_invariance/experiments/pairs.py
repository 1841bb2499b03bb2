"""Learn an invariant code from pairs, with one call; what ``laplace-invariance pairs`` runs.

Data are vectors whose hidden symmetry is known to the generator alone: circular shifts of the whole, of each of two halves, along
a hidden cycle of the entries, or of a rescaled vector. What shifts leave unchanged are the moduli of the Fourier transform, and
their distances are all that an autoencoder is told, but for the task "dft", which teaches the Fourier transform itself.
"""

from __future__ import annotations

import importlib.util
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import trange

from laplace_invariance import plots
from laplace_invariance.autoencoder import (
    LAYERS,
    InvariantAutoencoder,
    inverse_distance_loss,
    network,
)
from laplace_invariance.datasets import HiddenShifts, fourier_code
from laplace_invariance.experiments.base import claim
from laplace_invariance.files import read_json, write_json

__all__ = ["TASKS", "PairExperiment", "PairOutcome", "learn_pairs"]

TASKS = {
    "dft": "circular shifts; the code is taught: moduli, sines and cosines of the Fourier transform",
    "shift": "circular shifts, learnt from pairs",
    "two-part": "circular shifts of each half, learnt from pairs",
    "permutation": "shifts along a hidden cycle of the entries, learnt from pairs",
    "scaled-shift": "circular shifts and multiplication by 1/2 to 2, learnt from pairs",
}
# what the table shows of all that is measured
SHOWN = {
    "dft": ("modulus", "sine", "cosine", "code", "reconstruction"),
    "pairs": ("loss", "same", "different", "reconstruction"),
}


# One experiment.


@dataclass(frozen=True)
class PairExperiment:
    """What is learnt from what.

    Attributes:
        task: one of ``TASKS``.
        networks: layers and depth of encoder and decoder, such as "rich-1"; each is trained on the same data.
        n_features: size of the vectors.
        width: linear units per layer; None is 8 for each feature.
        n_train: vectors, or pairs, to train on; each task draws its own.
        n_test: to test on.
        n_epochs: epochs of training.
        batch_size: of training.
        lr: step size of Adam at the start; it falls to zero along half a cosine. None is 3e-3, or
            1e-2 where SELU layers are taught, which is better for these there and too large elsewhere.
        weight: of the loss of the code, relative to that of the reconstruction.
        delta, alpha: of ``autoencoder.inverse_distance_loss``.
        seed: of data, weights and batches.
    """

    task: str = "dft"
    networks: tuple[str, ...] = ("rich-1", "selu-4")
    n_features: int = 10
    width: int | None = None
    n_train: int = 60_000
    n_test: int = 10_000
    n_epochs: int = 30
    batch_size: int = 128
    lr: float | None = None
    weight: float = 8.0
    delta: float = 1.0
    alpha: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "networks", tuple(self.networks))  # a list, if read from JSON
        for name in (
            "width",
            "n_train",
            "n_test",
            "n_epochs",
            "batch_size",
            "lr",
            "weight",
            "delta",
            "alpha",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not self.networks or len(set(self.networks)) < len(self.networks):
            raise ValueError(
                f"networks must be different ones, and at least one, got {list(self.networks)}"
            )
        with torch.random.fork_rng(
            devices=[]
        ):  # what cannot be made is told at once, and no draw is used up
            HiddenShifts.of(self.task, self.n_features)
            for name in self.networks:
                self.autoencoder(name)

    def autoencoder(self, name: str) -> InvariantAutoencoder:
        """Return a new network by its name: a third of its code is invariant, as many entries as there are features."""
        layer, _, depth = name.partition("-")
        if layer not in LAYERS or not depth.isdecimal():
            raise ValueError(
                f"unknown network {name!r}; write layer-depth, such as rich-2, of {', '.join(LAYERS)}"
            )
        d, width = self.n_features, self.width or 8 * self.n_features
        return InvariantAutoencoder(
            network(layer, d, 3 * d, int(depth), width),
            network(layer, 3 * d, d, int(depth), width),
            n_invariant=d,
        )


@dataclass(frozen=True)
class PairOutcome:
    """What was learnt.

    Attributes:
        experiment: what was asked.
        networks: by name, ``parameters``, ``seconds``, ``history``: one record of test errors per epoch, and the codes of one
            vector's ``orbit``, ``invariant`` and ``variant``.
        models: the trained networks, by name; not those that were read from a file.
    """

    experiment: PairExperiment
    networks: dict[str, dict[str, Any]]
    models: dict[str, InvariantAutoencoder] = field(default_factory=dict, repr=False, compare=False)

    def errors(self, name: str) -> dict[str, float]:
        """Return the test errors of a network at the end of training.

        Of the task "dft" mean squared errors of the parts of the code, of all of it, and of the reconstruction. Of all others the
        ``loss`` of pairs, squared differences of invariant codes, averaged over entries, of a vector and the ``same`` vector
        moved, and of ``different`` vectors, and the error of the reconstruction.
        """
        return self.networks[name]["history"][-1]

    def __str__(self) -> str:
        shown = _shown(self.experiment.task)
        lines = [["network", "parameters", *shown, "seconds"]]
        for name, found in self.networks.items():
            errors = [f"{self.errors(name)[key]:.1e}" for key in shown]
            lines.append([name, str(found["parameters"]), *errors, f"{found['seconds']:.0f}"])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def learn_pairs(
    experiment: PairExperiment,
    out: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
) -> PairOutcome:
    """Run an experiment.

    Args:
        experiment: what to learn.
        out: directory for ``result.json``, written after each network, and, where matplotlib is installed, the figure
            ``pairs.png``; None keeps nothing.
        resume: read networks that are finished in ``out``, and train the others.
        progress_bar: show one for each network.
    """
    out = None if out is None else Path(out)
    outcome = PairOutcome(experiment, {})
    if out is not None:
        claim(out, experiment, resume)
        write_json(out / "experiment.json", asdict(experiment))
        if (out / "result.json").exists():
            outcome.networks.update(read_json(out / "result.json"))
    with torch.random.fork_rng(devices=[]):
        for name in experiment.networks:
            if name in outcome.networks:
                continue
            torch.manual_seed(experiment.seed)
            symmetry = HiddenShifts.of(experiment.task, experiment.n_features)
            data = symmetry.pairs(experiment.n_train), symmetry.pairs(experiment.n_test)
            model = experiment.autoencoder(name)
            outcome.networks[name] = _train(experiment, name, model, symmetry, *data, progress_bar)
            outcome.models[name] = model
            if out is not None:
                write_json(out / "result.json", outcome.networks)
    if out is not None:
        _draw(outcome, out / "pairs.png")
    return outcome


Pairs = tuple[Tensor, Tensor, Tensor]


def _train(
    experiment: PairExperiment,
    name: str,
    model: InvariantAutoencoder,
    symmetry: HiddenShifts,
    train: Pairs,
    test: Pairs,
    progress_bar: bool,
) -> dict[str, Any]:
    """Train a network, and return what ``PairOutcome`` keeps of it."""
    start = time.perf_counter()
    lr = 1e-2 if experiment.task == "dft" and name.startswith("selu") else 3e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=experiment.lr or lr)
    n_steps = experiment.n_epochs * math.ceil(experiment.n_train / experiment.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    history: list[dict[str, float]] = []
    bar = trange(experiment.n_epochs, desc=name, disable=not progress_bar)
    for _ in bar:
        for batch in torch.randperm(experiment.n_train).split(experiment.batch_size):
            loss = _loss(experiment, model, *(values[batch] for values in train))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        history.append(_errors(experiment, model, symmetry, test))
        if not all(map(math.isfinite, history[-1].values())):
            raise FloatingPointError(
                f"{name} is not finite after epoch {len(history)}; a smaller lr may help"
            )
        bar.set_postfix({key: f"{history[-1][key]:.1e}" for key in _shown(experiment.task)})
    with torch.no_grad():
        codes = model.encode(symmetry.orbit(test[0][0]))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": time.perf_counter() - start,
        "history": history,
        "orbit": {part: values.tolist() for part, values in codes._asdict().items()},
    }


def _loss(
    experiment: PairExperiment,
    model: InvariantAutoencoder,
    x: Tensor,
    other: Tensor,
    distance: Tensor,
) -> Tensor:
    """Return the error of the reconstruction plus the weighted one of the code, whether taught or by pairs."""
    if experiment.task == "dft":
        reconstruction, codes = model(x)
        return F.mse_loss(reconstruction, x) + experiment.weight * F.mse_loss(
            torch.cat(codes, 1), fourier_code(x)
        )
    both = torch.cat([x, other])
    reconstruction, codes = model(both)
    pairs = inverse_distance_loss(
        *codes.invariant.chunk(2), distance, experiment.delta, experiment.alpha
    )
    return F.mse_loss(reconstruction, both) + experiment.weight * pairs


@torch.no_grad()
def _errors(
    experiment: PairExperiment, model: InvariantAutoencoder, symmetry: HiddenShifts, test: Pairs
) -> dict[str, float]:
    """Return what ``PairOutcome.errors`` explains."""
    x, other, distance = test
    reconstruction, codes = model(x)
    found = {"reconstruction": F.mse_loss(reconstruction, x)}
    if experiment.task == "dft":
        errors = (torch.cat(codes, 1) - fourier_code(x)).square()
        parts = zip(("modulus", "sine", "cosine"), errors.chunk(3, dim=1), strict=True)
        found |= {"code": errors.mean()} | {part: values.mean() for part, values in parts}
    else:
        code, others = codes.invariant, model.encode(other).invariant
        moved = symmetry.moved(x, torch.Generator().manual_seed(experiment.seed))
        found["loss"] = inverse_distance_loss(
            code, others, distance, experiment.delta, experiment.alpha
        )
        found["same"] = F.mse_loss(code, model.encode(moved).invariant)
        found["different"] = F.mse_loss(code, code.roll(1, 0))
    return {name: value.item() for name, value in found.items()}


def _shown(task: str) -> tuple[str, ...]:
    return SHOWN["dft" if task == "dft" else "pairs"]


def _error(record: dict[str, float]) -> float:
    """Return what the figure shows: of pairs a ratio, since a code that is nearly constant is no invariant one."""
    return (
        record["code"] if "code" in record else record["same"] / (record["different"] or math.nan)
    )


def _draw(outcome: PairOutcome, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    experiment = outcome.experiment
    figure = plots.figure((12, 6))
    layout = figure.subplot_mosaic([["errors", "invariant"], ["errors", "variant"]])
    taught = "mean squared error of the code"
    label = (
        taught
        if experiment.task == "dft"
        else "squared difference of invariant codes,\nsame over different vectors"
    )
    curves = {
        name: [_error(record) for record in found["history"]]
        for name, found in outcome.networks.items()
    }
    plots.errors(curves, label, layout["errors"]).set_title("test error")
    first = experiment.networks[0]
    for part, values in outcome.networks[first]["orbit"].items():
        plots.orbit_codes(values, layout[part]).set_title(f"{part} code of one vector, {first}")
    figure.suptitle(f"{experiment.task}: {TASKS[experiment.task]}")
    figure.savefig(path, dpi=120)
