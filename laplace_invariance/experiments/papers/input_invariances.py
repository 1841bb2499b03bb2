"""Immer, van der Ouderaa, Rätsch, Fortuin and van der Wilk (2022): invariances of inputs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from laplace_invariance import plots
from laplace_invariance.experiments.choices import (
    Curvature,
    NetworkName,
    PlaneBy,
    PlaneLabels,
    PlaneMethod,
    Scale,
    Structure,
    Transform,
)
from laplace_invariance.experiments.options import LearnConfig, PlaneConfig
from laplace_invariance.experiments.papers.base import (
    Cell,
    Curve,
    Found,
    Measure,
    Picture,
    Table,
    open_ranges,
    spread,
)

__all__ = ["INPUT_TABLES"]

SOURCE = "Immer et al. (2022), Invariance Learning in Deep Neural Networks with Differentiable "
SOURCE += "Laplace Approximations"
KINDS: dict[Transform, str] = {
    "fully_rotated": "fully rotated",
    "partially_rotated": "partially rotated",
    "translated": "translated",
    "scaled": "scaled",
    "original": "original",
}
# Options of learn by row. As published, Augerino has a fixed weight decay and starts at zero.
METHODS: dict[str, dict[str, Any]] = {
    "evidence": {"method": "evidence"},
    "none": {"method": "none"},
    "Augerino": {"method": "augerino"},
    "Augerino as published": {"method": "augerino-published"},
}
DATA = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist"}


def _accuracy(results: Sequence[Found]) -> str:
    return spread([100 * result["accuracy"] for result in results])


def _evidence(results: Sequence[Found]) -> str:
    """Say what evidences are with 32 samples; with fewer, of runs that do not have it."""
    compared = [found for found in map(_compared, results) if found is not None]
    if compared:
        return spread(compared, "{:.3f}")
    n_samples = results[0]["config"]["n_samples"]
    return f"{spread([result['evidence'] for result in results], '{:.3f}')} ({n_samples} samples)"


def _bound(results: Sequence[Found]) -> str:
    return spread([result["evidence"] for result in results], "{:.3f}")


def _compared(result: Found) -> float | None:
    is_average = result["config"]["method"] != "none"
    found: float | None = result.get("evidence_compared" if is_average else "evidence")
    return found


def _ranges(results: Sequence[Found]) -> str:
    return open_ranges([result["magnitudes"] for result in results])


def _cost(results: Sequence[Found]) -> str:
    return spread([result["seconds"] / 60 for result in results])


ACCURACY = Measure("test accuracy in %", _accuracy)
EVIDENCE = Measure("log evidence per image, 32 samples", _evidence)
RANGES = Measure("ranges", _ranges)
COST = Measure("minutes", _cost)


def _kinds(net: NetworkName, scale: Scale, seeds: dict[str, int]) -> list[Cell]:
    """Return runs of methods on all kinds of images: seed by seed, and method by method.

    Args:
        net: Network.
        scale: Size.
        seeds: Number of seeds by method.
    """
    options: dict[str, Any] = {
        "small": {"n_epochs": 40},
        "large": {"n_train": 10_000, "n_epochs": 40},
        "paper": {"n_epochs": 1000, "n_samples": 31},
    }[scale]
    data = {"digits": "digits"} if scale == "small" else DATA
    kinds = ("fully_rotated", "original") if scale == "small" else tuple(KINDS)
    methods = ("evidence", "none") if scale == "small" else tuple(seeds)
    cells = []
    for seed in range(max(seeds.values())):
        for method, part, kind in itertools.product(methods, data, kinds):
            if seed < (1 if scale == "small" else seeds[method]):
                config = LearnConfig(
                    data=data[part],
                    transform=kind,
                    net=net,
                    seed=seed,
                    **METHODS[method],
                    **options,
                )
                cells.append(Cell(part, method, KINDS[kind], config))
    return cells


def _mlp(scale: Scale) -> list[Cell]:
    few = 3 if scale == "paper" else 1
    return _kinds(
        "mlp", scale, {"evidence": 3, "none": 3, "Augerino": few, "Augerino as published": few}
    )


def _cnn(scale: Scale) -> list[Cell]:
    n_seeds = 3 if scale == "paper" else 1
    net: NetworkName = "lenet" if scale == "paper" else "cnn"
    return _kinds(net, scale, {"evidence": n_seeds, "none": n_seeds})


def _all_images(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "n_epochs": 20},
        "large": {"data": "mnist", "n_epochs": 8},
        "paper": {"data": "mnist", "n_epochs": 1000, "n_samples": 31},
    }[scale]
    return [
        Cell("", method, net, LearnConfig(net=net, transform="fully_rotated", **how, **options))
        for net in ("mlp", "cnn")
        for method, how in METHODS.items()
        if method in ("evidence", "none")
    ]


def _cifar(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {
            "data": "digits",
            "n_train": 600,
            "n_epochs": 20,
            "n_samples": 4,
            "search": "off",
        },
        "large": {"data": "cifar10", "n_train": 5000, "n_epochs": 20, "n_samples": 4},
        "paper": {"data": "cifar10", "n_epochs": 200, "n_samples": 20},
    }[scale]
    if scale != "paper":
        options["search"] = "off"
    return [
        Cell("", method, KINDS[kind], LearnConfig(net="resnet", transform=kind, **how, **options))
        for kind in ("fully_rotated", "original")
        for method, how in METHODS.items()
        if method in ("evidence", "none")
    ]


def _ablation(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "n_epochs": 30},
        "large": {"data": "mnist", "n_train": 2000},
        "paper": {"data": "mnist", "n_train": 10_000, "n_epochs": 1000, "n_samples": 31},
    }[scale]
    structures: dict[Structure, str] = {"kron": "Kronecker-factored", "diag": "diagonal"}
    cells = []
    curvatures: tuple[Curvature, ...] = ("ggn", "ef")
    for curvature, structure in itertools.product(curvatures, structures):
        config = LearnConfig(
            transform="fully_rotated",
            net="mlp",
            curvature=curvature,
            structure=structure,
            search="off",
            **options,
        )
        cells.append(Cell("", structures[structure], curvature.upper(), config))
    return cells


def _sizes(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {"data": "digits" if scale == "small" else "mnist"}
    sizes = {
        "small": (200, 1000),
        "large": (300, 1000, 3000, 10_000, 30_000),
        "paper": (312, 1250, 5000, 20_000, 60_000),
    }[scale]
    cells = []
    for size in sizes:
        n_epochs = max(8, min(100, 400_000 // size))  # some 4,000 steps, at most 100 epochs
        for method in ("evidence", "none"):
            config = LearnConfig(
                transform="fully_rotated",
                net="mlp",
                n_train=size,
                n_epochs=n_epochs // 4 if scale == "small" else n_epochs,
                **METHODS[method],
                **options,
            )
            cells.append(Cell("", method, str(size), config))
    return cells


def _losses(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"data": "digits", "n_epochs": 40},
        "large": {"data": "mnist", "n_train": 2000},
        "paper": {"data": "mnist", "n_epochs": 1000, "n_samples": 31},
    }[scale]
    rows: dict[str, dict[str, Any]] = {
        "outputs, learnt ranges": {"method": "evidence"},
        "losses, learnt ranges": {"method": "evidence", "average": "losses"},
        "outputs, all rotations": {"method": "fixed"},
        "losses, all rotations": {"method": "fixed", "average": "losses"},
        "nothing": {"method": "none"},
    }
    kinds: tuple[Transform, ...] = ("fully_rotated", "original")
    return [
        Cell("", row, KINDS[kind], LearnConfig(transform=kind, net="mlp", **how, **options))
        for kind in kinds
        for row, how in rows.items()
    ]


def _plane(scale: Scale) -> list[Cell]:
    parts: dict[PlaneBy, str] = {"evidence": "evidence", "elbo": "ELBO"}
    columns: dict[PlaneLabels, str] = {"radius": "labels by radius", "angle": "labels by angle"}
    rows: dict[PlaneMethod, str] = {"none": "none", "learnt": "learnt", "all": "all rotations"}
    seeds = range(1 if scale == "small" else 3)
    return [
        Cell(
            parts[by],
            rows[method],
            columns[labels],
            PlaneConfig(by=by, labels=labels, method=method, seed=seed),
        )
        for seed, by, labels, method in itertools.product(seeds, parts, columns, rows)
    ]


INPUT_TABLES = {
    "input-mlp": Table(
        "Learnt ranges of an MLP, five kinds of images",
        f"{SOURCE}, table 1",
        "Ranges that the evidence learns give the best accuracy, or one that is as good, on every "
        "kind of images; without invariance, and by Augerino, it is lower on some.",
        _mlp,
        (ACCURACY, EVIDENCE, RANGES),
        remark="On scaled Fashion-MNIST learnt ranges have the better accuracy, but an evidence "
        "below that of none. Without ranges evidence rises in the last third of a training only, "
        "so comparisons early in training prefer ranges; a third network without them, trained "
        "beside the others to 30 % of the epochs, was still behind there and was left out again.",
    ),
    "input-cnn": Table(
        "Learnt ranges of a CNN, five kinds of images",
        f"{SOURCE}, table 1",
        "The same with convolutions.",
        _cnn,
        (ACCURACY, EVIDENCE, RANGES),
    ),
    "input-all": Table(
        "All 60,000 images, fully rotated",
        f"{SOURCE}, table 1",
        "The accuracy of learnt ranges is above that of none also with all images.",
        _all_images,
        (ACCURACY, EVIDENCE, RANGES, COST),
    ),
    "input-cifar": Table(
        "CIFAR-10, residual network without normalisation",
        f"{SOURCE}, table 1",
        "Learnt ranges raise accuracy on rotated images, and on images as they are.",
        _cifar,
        (ACCURACY, EVIDENCE, RANGES, COST),
        remark="At scale large the evidence is higher with learnt ranges on both kinds of images, "
        "but accuracy is not: trainings of 1,000 steps end before ranges do, and rotations are at "
        "half of the circle.",
    ),
    "input-ablation": Table(
        "Curvatures and their structures",
        f"{SOURCE}, appendix",
        "Kronecker factors of the GGN learn the ranges best; a diagonal is too coarse.",
        _ablation,
        (ACCURACY, EVIDENCE, RANGES, COST),
        corner="structure",
        remark="Kronecker factors of the empirical Fisher learn the range as well as those of the "
        "GGN. Evidences of the two are not of the same approximation, and cannot be compared.",
    ),
    "input-losses": Table(
        "Averages of outputs, and averages of losses",
        f"{SOURCE}, section 4.1",
        "Ranges are learnt by the evidence of a network whose outputs are averaged; if losses are, "
        "as in data augmentation, the evidence cannot choose them.",
        _losses,
        (ACCURACY, EVIDENCE, RANGES),
        corner="averages of",
    ),
    "plane": Table(
        "Points in the plane, and what is predicted far from them",
        f"{SOURCE}, figure 1, and Van der Ouderaa and van der Wilk (2021), Learning Invariant "
        "Weights in Neural Networks, figure 1",
        "Where labels ignore rotations, learnt invariance finds that out and extrapolates by it; "
        "where they do not, it stays closed.",
        _plane,
        (
            ACCURACY,
            Measure("log evidence per point, or its bound", _bound),
            Measure(
                "range in degrees",
                lambda results: spread([result["range"] for result in results], "{:.0f}"),
            ),
        ),
        corner="rotations",
        picture=Picture(lambda run, ax: plots.predictive(run["picture"], ax), (2.6, 2.8)),
    ),
    "input-sizes": Table(
        "Training sets of several sizes, fully rotated",
        f"{SOURCE}, figure 3",
        "With learnt ranges a network needs a fraction of the images for the same accuracy.",
        _sizes,
        (ACCURACY, EVIDENCE, RANGES),
        curve=Curve(
            "training images", "test accuracy in %", lambda result: 100 * result["accuracy"]
        ),
    ),
}
