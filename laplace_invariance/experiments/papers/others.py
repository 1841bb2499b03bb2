"""Codes from pairs, genuine invariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.options import MeasureConfig, PairsConfig
from laplace_invariance.experiments.papers.base import Cell, Found, Measure, Table, spread

__all__ = ["OTHER_TABLES"]


def _network(result: Found) -> Found:
    (network,) = result["networks"].values()
    found: Found = network
    return found


def _pair_errors(results: Sequence[Found]) -> str:
    """Return the error of the code in the last epoch."""
    values = []
    for result in results:
        last = _network(result)["history"][-1]
        values.append(last.get("code", last.get("same")))
    return spread(values, "{:.1e}")


def _codes(scale: Scale) -> list[Cell]:
    options: dict[str, Any] = {
        "small": {"n_features": 6, "n_train": 4000, "n_test": 1000, "n_epochs": 6},
        "large": {"n_features": 20, "n_train": 60_000, "n_epochs": 15},
        "paper": {"n_features": 20, "n_train": 600_000, "n_epochs": 200},
    }[scale]
    depths = (1, 2) if scale == "small" else (1, 2, 5, 10, 20)
    layers = ("rich", "selu") if scale == "small" else ("rich", "selu", "relu", "tanh", "sigmoid")
    return [
        Cell("", layer, str(depth), PairsConfig(networks=(f"{layer}-{depth}",), **options))
        for depth in depths
        for layer in layers
        if layer != "rich" or depth <= 2
    ]


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
        "averaged": "tied",
    }
    return [
        Cell("", row, "quarter turns", MeasureConfig(methods=(method,), seed=seed, **options))
        for seed in seeds
        for row, method in methods.items()
    ]


OTHER_TABLES = {
    "codes": Table(
        "Codes of hidden shifts, by depth",
        "Codes from pairs, experiment II",
        "Layers with products learn the code that deep networks of ordinary layers do not.",
        _codes,
        (Measure("mean squared error of the code", _pair_errors),),
        corner="layers",
    ),
    "genuine": Table(
        "Is a network invariant, or only on images like those it was trained on?",
        "On genuine invariance learning (abstract), and Moskalev et al. (2023)",
        "Data augmentation does not make networks invariant on other images; a penalty does more.",
        _genuine,
        (Measure("accuracy on transformed test images in %", _rate), _error(0), _error(1)),
    ),
}
