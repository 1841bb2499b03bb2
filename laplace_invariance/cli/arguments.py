"""Arguments that several verbs have."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace_invariance import datasets

__all__ = ["data_arguments", "explained", "out_arguments", "run_arguments"]


def explained(words: Mapping[str, str]) -> str:
    """Return choices with their meanings, for a help text."""
    return "; ".join(f"{name} ({meaning})" for name, meaning in words.items())


def data_arguments(
    parser: argparse.ArgumentParser,
    default: Any,
    many: bool = False,
    kinds: Sequence[str] = datasets.KINDS,
) -> None:
    """Add from what images is learnt.

    Args:
        parser: of the verb.
        default: an experiment, whose fields are the defaults.
        many: whether it takes several transformations.
        kinds: transformations to choose from.
    """
    parser.add_argument(
        "--data",
        default=default.data,
        metavar="DATA",
        help=f"{', '.join(datasets.SOURCES)}, or a FILE.npz with x_train, y_train, x_test, y_test (default: %(default)s)",
    )
    parser.add_argument(
        "--transform",
        **({"nargs": "+"} if many else {}),
        default=list(kinds) if many else default.transform,
        type=lambda name: name.replace("-", "_"),
        choices=kinds,
        metavar="KIND",
        help=f"how images are moved: {', '.join(k.replace('_', '-') for k in kinds)} "
        f"(default: {'all' if many else default.transform.replace('_', '-')})",
    )


def run_arguments(parser: argparse.ArgumentParser, default: Any, many: bool = False) -> None:
    """Add how long, from how many images, and where everything is and goes; ``many`` takes several seeds."""
    parser.add_argument(
        "--epochs",
        type=int,
        default=default.n_epochs,
        help="epochs of training (default: %(default)s)",
    )
    parser.add_argument(
        "--train", type=int, metavar="N", help="use so many training images (default: all)"
    )
    parser.add_argument(
        "--test", type=int, metavar="N", help="use so many test images (default: all)"
    )
    parser.add_argument(
        "--seed",
        **({"nargs": "+"} if many else {}),
        type=int,
        default=[default.seed] if many else default.seed,
        help="of subset, transformations, weights, draws (default: 0)",
    )
    parser.add_argument(
        "--root",
        default=default.root,
        metavar="DIR",
        help="of torchvision's data sets (default: %(default)s)",
    )
    parser.add_argument(
        "--download", action="store_true", help="fetch a data set of torchvision that is not there"
    )
    out_arguments(parser)


def out_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where results go, whether they are gone on with, and what is shown meanwhile."""
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where everything goes"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what is in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
