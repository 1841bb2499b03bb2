"""Van der Ouderaa, Immer and van der Wilk (2023): symmetries of layers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from laplace_invariance import plots
from laplace_invariance.experiments import choices
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.options import LayersConfig
from laplace_invariance.experiments.papers.base import (
    Cell,
    Found,
    Measure,
    Picture,
    Table,
    spread,
)
from laplace_invariance.metrics import LayerReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LAYER_TABLES"]

SOURCE = "Van der Ouderaa et al. (2023), Learning Layer-wise Equivariances Automatically using "
SOURCE += "Gradients"
# On thousands of images a pass through all of them takes longer than an epoch. With 5e-3 and small
# batches networks of width 4 stayed at guessing.
ON_MANY: dict[str, Any] = {
    "lr": 2e-3,
    "batch_size": 50,
    "estimator": "running",
    "n_epochs_burnin": 2,
    "marglik_frequency": 2,
}
LAYERS_SIZE = (4.6, 2.4)
METHODS: dict[str, choices.LayersMethod] = {"evidence": "evidence", "MAP": "map"}


def _accuracy(results: Sequence[Found]) -> str:
    return spread([100 * result["accuracy"] for result in results])


def _evidence(results: Sequence[Found]) -> str:
    return spread([result["evidence"] for result in results], "{:.3f}")


def _chosen(results: Sequence[Found]) -> str:
    """Return what layers chose in the first run, runs of equal choices together."""
    parts: list[list[Any]] = []
    for chosen in results[0]["chosen"].values():
        if parts and parts[-1][0] == chosen:
            parts[-1][1] += 1
        else:
            parts.append([chosen, 1])
    return ", ".join(f"{count} x {chosen}" for chosen, count in parts)


def _shares(results: Sequence[Found]) -> str:
    """Return the mean and the range over layers of each kind's share, in the first run."""
    shares: dict[str, list[float]] = {}
    for paths in results[0]["report"].values():
        for row in paths.values():
            if row["relative"] is not None:
                shares.setdefault(row["kind"], []).append(100 * row["relative"])
    return ", ".join(
        f"{kind} {statistics.fmean(own):.0f} ({min(own):.0f}-{max(own):.0f})"
        for kind, own in shares.items()
    )


def _layers(result: Found, ax: Axes) -> None:
    """Draw shares of paths over layers, without what is long: layers have their numbers."""
    report = LayerReport.from_dict(result["report"])
    plots.layer_shares(report, ax).set_ylabel("share of the layer (%)")
    names = [place.removeprefix("layer") for place in report.places]
    ax.set_xticks(range(len(names)), names)
    ax.set_xlabel("layer")


ACCURACY = Measure("test accuracy in %", _accuracy)
EVIDENCE = Measure("log evidence per image", _evidence)
CHOSEN = Measure("what layers chose, from the first to the last", _chosen)
SHARES = Measure("share of effective parameters in %, mean (least-most) over layers", _shares)
LOG_LIKELIHOOD = Measure(
    "test log-likelihood per image",
    lambda results: spread([result["log_likelihood"] for result in results], "{:.3f}"),
)


def _quadrants(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "width": 2, "n_epochs": 60, "marglik_frequency": 10},
        "large": {"data": "mnist", "n_train": 10_000, "width": 10, "n_epochs": 8, **ON_MANY},
        "paper": {"data": "mnist", "width": 10, "n_epochs": 1000},
    }[scale]
    rows: dict[str, dict[str, Any]] = {
        "f_fc+conv, closed start": {"kind": "f_fc+conv"},
        "conv": {"kind": "conv"},
        "f_fc": {"kind": "f_fc"},
        "f_fc+conv, open start": {"kind": "f_fc+conv", "start": "open"},
        "f_fc+conv, search": {"kind": "f_fc+conv", "start": "search"},
    }
    tasks: dict[choices.LayersTask, str] = {"digit": "class", "both": "class and quadrant"}
    if scale == "small":
        rows = {row: rows[row] for row in ("f_fc+conv, closed start", "conv")}
    return [
        Cell("", row, tasks[task], LayersConfig(task=task, **how, **options))
        for row, how in rows.items()
        for task in tasks
    ]


def _cifar(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "width": 2, "n_epochs": 30, "marglik_frequency": 10},
        "large": {"data": "cifar10", "n_train": 5000, "width": 4, "n_epochs": 20, **ON_MANY},
        "paper": {"data": "cifar10", "width": 10, "n_epochs": 4000, "augment": True},
    }[scale]
    rows: dict[str, dict[str, Any]] = {
        "f_fc+conv": {"kind": "f_fc+conv"},
        "conv": {"kind": "conv"},
        "f_fc": {"kind": "f_fc"},
        "s_conv": {"kind": "s_conv"},
        "s_fc": {"kind": "s_fc"},
        "s_fc+s_conv": {"kind": "s_fc+s_conv"},
        "s_conv, learnt ω": {"kind": "s_conv", "omega": "weight"},
        "s_fc, learnt ω": {"kind": "s_fc", "omega": "weight"},
        "s_fc+s_conv, learnt ω": {"kind": "s_fc+s_conv", "omega": "weight"},
    }
    if scale == "small":
        rows = {row: rows[row] for row in ("f_fc+conv", "f_fc", "s_conv, learnt ω")}
    return [
        Cell("", row, name, LayersConfig(method=method, **how, **options))
        for row, how in rows.items()
        for name, method in METHODS.items()
    ]


def _groups(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"width": 1, "n_epochs": 60, "marglik_frequency": 15},
        "large": {"n_train": 10_000, "width": 2, "n_epochs": 50, **ON_MANY},
        "paper": {"width": 2, "n_epochs": 1000, **ON_MANY},
    }[scale]
    mixed = "f_fc+conv+gconv"
    rows: dict[str, dict[str, Any]] = {
        mixed: {"kind": mixed},
        f"{mixed}, elements as positions": {"kind": mixed, "elements": "positions"},
        "gconv": {"kind": "gconv"},
        "conv, as many channels": {"kind": "conv", "width": 4 * options["width"]},
        f"{mixed}, MAP": {"kind": mixed, "method": "map"},
    }
    data: dict[str, dict[str, Any]] = {
        "MNIST": {"data": "mnist"},
        "rotated MNIST": {"data": "mnist", "transform": "fully_rotated"},
        "translated MNIST": {"data": "mnist", "transform": "translated"},
        "CIFAR-10": {"data": "cifar10"},
        "rotated CIFAR-10": {"data": "cifar10", "transform": "fully_rotated"},
    }
    if scale == "small":
        rows = {mixed: rows[mixed]}
    if scale != "paper":
        data = {name: data[name] for name in ("MNIST", "rotated MNIST")}
    if scale == "small":
        data = {name: images | {"data": "digits"} for name, images in data.items()}
    return [
        Cell("", row, name, LayersConfig(**(options | images | how)))
        for row, how in rows.items()
        for name, images in data.items()
    ]


def _kernels(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "width": 1, "n_epochs": 20},
        "large": {"data": "cifar10", "n_train": 5000, "width": 4, "n_epochs": 40, "lr": 1e-3},
        "paper": {"data": "cifar10", "width": 10, "n_epochs": 4000, "lr": 1e-3},
    }[scale]
    kernels: tuple[choices.GroupKernel, ...] = ("full", "pointwise", "separable", "depthwise")
    rows: dict[str, dict[str, Any]] = {
        f"gconv, {kernel}": {"kind": "gconv", "kernel": kernel} for kernel in kernels
    }
    rows["conv"] = {"kind": "conv"}
    rows["gconv, pairwise"] = {"kind": "gconv", "kernel": "pairwise"}
    if scale == "small":
        rows = {row: rows[row] for row in ("gconv, full", "gconv, depthwise")}
    images: dict[str, Any] = {"transform": "fully_rotated", "method": "map"}
    return [
        Cell("", row, "rotated CIFAR-10", LayersConfig(**options, **images, **how))
        for row, how in rows.items()
    ]


LAYER_TABLES = {
    "quadrants": Table(
        "Digits in quadrants: is the place part of the label?",
        f"{SOURCE}, table 1",
        "One network, with learnt priors, is as good as the better of a convolutional and a fully "
        "connected one on both tasks.",
        _quadrants,
        (ACCURACY, EVIDENCE, CHOSEN),
        corner="network",
        remark="From the open start it is not: free paths stay open, and the evidence is lower by "
        "several nats than from the closed start. None of some twenty recipes closed them within "
        "60 epochs; a search of starts by evidence (start search) mostly takes the closed one.",
        picture=Picture(_layers, LAYERS_SIZE, ("f_fc+conv, closed start", "f_fc+conv, open start")),
    ),
    "layers-cifar": Table(
        "CIFAR-10: layers that choose",
        f"{SOURCE}, table 2",
        "By evidence a network with fully connected paths becomes convolutional and nearly as good "
        "as one that is; by MAP it stays behind.",
        _cifar,
        (ACCURACY, LOG_LIKELIHOOD, EVIDENCE, CHOSEN),
        corner="network",
        remark="By accuracy the lead over MAP is small after 2,000 steps of networks of width 4, "
        "and sparse paths have the better one by MAP; test log-likelihood and evidence are far "
        "better by evidence. Convolutions alone are behind networks that have other paths, too.",
        picture=Picture(_layers, LAYERS_SIZE, ("f_fc+conv", "s_fc+s_conv")),
    ),
    "layers-groups": Table(
        "Group convolutions beside convolutions and fully connected paths",
        f"{SOURCE}, table 3",
        "On rotated digits layers choose group convolutions.",
        _groups,
        (ACCURACY, LOG_LIKELIHOOD, EVIDENCE, SHARES, CHOSEN),
        corner="network",
        picture=Picture(_layers, LAYERS_SIZE, ("f_fc+conv+gconv", "f_fc+conv+gconv, MAP")),
    ),
    "layers-kernels": Table(
        "Kernels of group convolutions",
        f"{SOURCE}, table 7",
        "On rotated images full kernels are best, pointwise ones next, then separable and, last, "
        "depthwise-separable ones.",
        _kernels,
        (ACCURACY, LOG_LIKELIHOOD),
        corner="network",
    ),
}
