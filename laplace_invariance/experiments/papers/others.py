"""Both kinds of symmetry at once, codes from pairs, genuine invariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.options import LayersConfig, MeasureConfig, PairsConfig
from laplace_invariance.experiments.papers.base import (
    Cell,
    Curve,
    Found,
    Measure,
    Table,
    open_ranges,
    spread,
)
from laplace_invariance.experiments.papers.layers import ACCURACY, CHOSEN, EVIDENCE, ON_MANY

__all__ = ["OTHER_TABLES"]


def _network(result: Found) -> Found:
    (network,) = result["networks"].values()
    found: Found = network
    return found


def _pair_error(result: Found) -> float:
    """Return the error in the last epoch: of the code, or of vectors if it was not learnt."""
    last = _network(result)["history"][-1]
    found: float = last["code" if "code" in last else "reconstruction"]
    return found


def _codes(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"n_features": 6, "n_train": 4000, "n_test": 1000, "n_epochs": 6},
        "large": {"n_features": 20, "n_train": 60_000, "n_epochs": 15},
        "paper": {"n_features": 20, "n_train": 600_000, "n_epochs": 200},
    }[scale]
    parts: dict[str, dict[str, Any]] = {
        "moduli, sines and cosines": {},
        "moduli and phases": {"code": "phase"},
        "encoder alone": {"part": "encoder"},
        "decoder alone": {"part": "decoder"},
    }
    depths = (1, 2) if scale == "small" else (1, 2, 5, 10, 20)
    layers = ("rich", "selu") if scale == "small" else get_args(choices.PairsLayer)
    # Of deep networks. Twenty SELU layers diverge with their default, 1e-2.
    slower: dict[str, Any] = {"lr": 1e-3}

    def config(layer: str, depth: int, how: dict[str, Any]) -> PairsConfig:
        rate = slower if depth >= 10 else {}
        return PairsConfig(networks=(f"{layer}-{depth}",), **how, **options, **rate)

    return [
        Cell(part, layer, str(depth), config(layer, depth, how))
        for part, how in parts.items()
        for depth in depths
        for layer in layers
        if (layer != "rich" or depth <= 2) and (not how or layer in ("rich", "selu"))
    ]


def _pairs(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"n_features": 6, "n_train": 20_000, "n_test": 1000, "n_epochs": 20},
        "large": {},
        "paper": {"n_features": 20, "n_train": 600_000, "n_epochs": 200},
    }[scale]
    tasks: dict[str, choices.PairsTask] = {
        "shifts of both halves": "two-part",
        "shifts": "shift",
        "hidden cycles": "permutation",
        "shifts and factors": "scaled-shift",
    }
    networks = {"one rich layer": "rich-1", "two rich": "rich-2", "four SELU": "selu-4"}
    if scale == "small":
        tasks = {"shifts": "shift"}
    return [
        Cell("", row, column, PairsConfig(task=task, networks=(network,), **options))
        for column, network in networks.items()
        for row, task in tasks.items()
    ]


def _difference(name: str, title: str) -> Measure:
    """Return a test error in the last epoch as what is shown."""
    return Measure(
        title,
        lambda results: spread(
            [_network(result)["history"][-1][name] for result in results], "{:.1e}"
        ),
    )


def _error(place: int) -> Measure:
    """Return the change of outputs under the group, on test images (0) or others (1)."""
    titles = ("change of probabilities on test images", "change of probabilities on other images")

    def words(results: Sequence[Found]) -> str:
        found = [list(_network(result)["invariance"].values())[place] for result in results]
        return spread([invariance["predictive"] for invariance in found], "{:.4f}")

    return Measure(titles[place], words)


def _rate(results: Sequence[Found]) -> str:
    return spread([100 * _network(result)["accuracy_transformed"] for result in results])


def _genuine(scale: Scale) -> list[Cell]:
    sizes: dict[Scale, dict[str, Any]] = {
        "small": {"data": "digits", "n_epochs": 10},
        "large": {"data": "mnist", "shifted": "fashion-mnist", "n_train": 2000, "n_test": 1000},
        "paper": {"data": "mnist", "shifted": "fashion-mnist"},
    }
    options = sizes[scale]
    seeds = range(1) if scale == "small" else range(3)
    methods: dict[str, choices.MeasureMethod] = {
        "plain": "plain",
        "augmented": "augmented",
        "regularised": "regularised",
        "regularised, saliency too": "regularised-saliency",
        "averaged": "tied",
    }
    return [
        Cell("", row, "quarter turns", MeasureConfig(methods=(method,), seed=seed, **options))
        for seed in seeds
        for row, method in methods.items()
    ]


def _both(scale: Scale) -> list[Cell]:
    sizes: dict[Scale, dict[str, Any]] = {
        "small": {
            "data": "digits",
            "n_train": 600,
            "n_epochs": 20,
            "n_epochs_burnin": 10,
            "width": 2,
        },
        "large": {"data": "fashion-mnist", "n_train": 2000, "n_epochs": 40, "width": 2, **ON_MANY},
        "paper": {"data": "fashion-mnist", "width": 10, "n_epochs": 1000, "n_samples": 20},
    }
    options = sizes[scale]
    if scale != "paper":
        options |= {"n_samples": 4, "batch_size": 50}
    free = "conv+gconv" if scale == "small" else "f_fc+conv+gconv"
    rows: dict[str, dict[str, Any]] = {
        "both": {"kind": free, "ranges": "rotation"},
        "input averaging": {"kind": "conv", "ranges": "rotation"},
        "group paths": {"kind": free},
        "neither": {"kind": "conv"},
    }
    kinds: dict[choices.Transform, str] = {"fully_rotated": "rotated", "original": "original"}
    if scale == "small":
        del kinds["original"]
    return [
        Cell("", row, kinds[kind], LayersConfig(transform=kind, **how, **options))
        for kind in kinds
        for row, how in rows.items()
    ]


OTHER_TABLES = {
    "both": Table(
        "Symmetry of inputs, of layers, or both",
        "In none of the papers: the invariant average of a network whose layers choose",
        "None; the question is whether the evidence prefers averages over rotated inputs, paths of "
        "group convolutions, or both.",
        _both,
        (
            EVIDENCE,
            ACCURACY,
            Measure(
                "ranges",
                lambda results: open_ranges([result["magnitudes"] for result in results]),
            ),
            CHOSEN,
        ),
        corner="symmetry",
    ),
    "codes": Table(
        "Codes of hidden shifts, by depth",
        "Zhang and Arodz (2021), Learning Invariance in Deep Neural Networks, figures 1 to 3",
        "Layers with products learn the code that deep networks of ordinary layers do not; what is "
        "hard is the encoder, not the decoder.",
        _codes,
        (
            Measure(
                "mean squared error",
                lambda results: spread([_pair_error(result) for result in results], "{:.1e}"),
            ),
        ),
        corner="layers",
        curve=Curve("depth", "mean squared error", _pair_error, log_y=True),
    ),
    "pairs": Table(
        "Codes of transformations that are known from pairs alone",
        "Zhang and Arodz (2021), Learning Invariance in Deep Neural Networks",
        "From distances of pairs an autoencoder learns a code that the hidden transformation does "
        "not change and that tells other vectors apart; layers with products learn it best.",
        _pairs,
        (
            _difference("same", "squared difference of codes, same vector, transformed"),
            _difference("different", "squared difference of codes, different vectors"),
            _difference("reconstruction", "squared error of the reconstruction"),
        ),
        corner="hidden",
    ),
    "genuine": Table(
        "Is a network invariant, or only on images like those it was trained on?",
        "On genuine invariance learning (abstract), and Moskalev et al. (2023)",
        "Data augmentation does not make networks invariant on other images; a penalty does more, "
        "and holds under severe shifts.",
        _genuine,
        (Measure("accuracy on transformed test images in %", _rate), _error(0), _error(1)),
        remark="The penalty holds less on other images than on test images, where it was trained. "
        "In short trainings on digits, with one seed, stronger penalties cost accuracy, and "
        "penalties of probabilities instead of logits were no better. One of "
        "saliency maps as well makes changes smaller in both places, and most on "
        "other images, but cost some accuracy, too; it has a row.",
    ),
}
