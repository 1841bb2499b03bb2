"""Van der Ouderaa and van der Wilk (2021): invariant weights of shallow networks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from laplace_invariance.experiments import choices
from laplace_invariance.experiments.choices import Scale
from laplace_invariance.experiments.options import VariationalConfig
from laplace_invariance.experiments.papers.base import (
    Cell,
    Found,
    Measure,
    Table,
    open_ranges,
    spread,
)

__all__ = ["WEIGHTS_TABLES"]

SOURCE = "Van der Ouderaa and van der Wilk (2021), Learning Invariant Weights in Neural Networks"
TRUE: dict[choices.Transform, str] = {
    "fully_rotated": "±180°",
    "partially_rotated": "±90°",
    "original": "±0°",
}
SINGLE: dict[choices.Transform, str] = {
    "fully_rotated": "rotated",
    "translated": "translated",
    "scaled": "scaled",
    "original": "original",
}
COMBINED: dict[choices.Transform, str] = {
    "rotated_translated": "rotated and translated",
    "rotated_scaled": "rotated and scaled",
    "translated_scaled": "translated and scaled",
}
TRANSLATION: tuple[choices.RangeName, ...] = ("x_translation", "y_translation")
SCALES: tuple[choices.RangeName, ...] = ("x_scale", "y_scale")
# Options of variational by row
STARTS: dict[str, dict[str, Any]] = {
    "learnt, from ±5°": {"learnt": (5.0,)},
    "fixed at ±0°": {"learnt": (), "fixed": (0.0,)},
    "learnt, from ±90°": {"learnt": (90.0,)},
    "fixed at ±180°": {"learnt": (), "fixed": (180.0,)},
}
LEARNT: dict[str, dict[str, Any]] = {
    "none": {"learnt": (), "fixed": (0.0,)},
    "rotation": {"learn": ("rotation",)},
    "translation": {"learn": TRANSLATION},
    "scale": {"learn": SCALES},
    "affine": {"learn": (*TRANSLATION, "rotation", *SCALES, "shear")},
}
FEATURES: tuple[choices.Activation, ...] = ("cosine", "relu")


def _options(scale: Scale) -> dict[str, Any]:
    sizes: dict[Scale, dict[str, Any]] = {
        "small": {"data": "digits", "n_epochs": 10, "n_features": 128},
        "large": {"data": "mnist", "n_train": 10_000, "n_epochs": 15},
        "paper": {"data": "mnist", "n_epochs": 200, "n_features": 1024, "n_samples": 32},
    }
    return sizes[scale]


def _shallow(scale: Scale) -> list[Cell]:
    features = ("cosine",) if scale == "small" else FEATURES
    return [
        Cell(
            f"{activation} features",
            row,
            TRUE[kind],
            VariationalConfig(transform=kind, activation=activation, **how, **_options(scale)),
        )
        for activation, (row, how), kind in itertools.product(features, STARTS.items(), TRUE)
    ]


def _affine(scale: Scale) -> list[Cell]:
    """Return runs with all kinds of ranges; pairs of transformations are for ReLU, as published."""
    cells = []
    for activation in FEATURES:
        kinds = SINGLE if activation == "cosine" else SINGLE | COMBINED
        for kind, (row, how) in itertools.product(kinds, LEARNT.items()):
            config = VariationalConfig(
                transform=kind, activation=activation, **how, **_options(scale)
            )
            cells.append(Cell(f"{activation} features", row, kinds[kind], config))
    return cells


def _last(name: str) -> Measure:
    """Return a number of the only run of a result of ``variational``."""
    titles = {"elbo": ("ELBO per image", "{:.3f}"), "accuracy": ("test accuracy in %", "{:.1f}")}
    title, form = titles[name]
    factor = 100 if name == "accuracy" else 1
    return Measure(
        title, lambda results: spread([factor * found["runs"][0][name] for found in results], form)
    )


def _ranges(results: Sequence[Found]) -> str:
    runs = [found["runs"][0]["ranges"] for found in results]
    return open_ranges([{name: values[-1] for name, values in run.items()} for run in runs])


MEASURES = (Measure("ranges", _ranges), _last("elbo"), _last("accuracy"))

WEIGHTS_TABLES = {
    "shallow": Table(
        "A range of rotations by a bound on the evidence",
        f"{SOURCE}, tables 1, 4 and 5",
        "The bound is highest at the true range, and a learnt range goes there from any start.",
        _shallow,
        MEASURES,
        corner="range",
    ),
    "shallow-affine": Table(
        "Rotations, translations, scales and all of them by a bound on the evidence",
        f"{SOURCE}, tables 2 and 6 to 8",
        "Bound and accuracy are highest where the ranges that are learnt are those by which images "
        "were transformed, and as high where all affine ones are learnt at once.",
        _affine,
        MEASURES,
        corner="learnt",
    ),
}
