"""Learn ranges of transformations from images, by one method or, to compare, by several."""

from __future__ import annotations

import argparse
import itertools
import math
from typing import Any

from laplace_invariance.cli.arguments import data_arguments, explained, run_arguments
from laplace_invariance.cli.output import files, need_matplotlib, say
from laplace_invariance.experiments.compare import compare
from laplace_invariance.experiments.learn import METHODS, NETWORKS, Experiment, learn

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verbs ``learn`` and ``compare``."""
    learner = commands.add_parser(
        "learn",
        help="learn to which transformations images are invariant, and how far",
        description="Train a network on images that were moved in a known way, and learn by evidence how far they were.",
    )
    _arguments(learner, many=False)
    learner.set_defaults(run=_learn)
    comparer = commands.add_parser(
        "compare",
        help="compare learnt ranges with other ways, in one table",
        description="Run several methods on several kinds of images, with the same code, network and images.",
    )
    _arguments(comparer, many=True)
    comparer.set_defaults(run=_compare)


def _arguments(parser: argparse.ArgumentParser, many: bool) -> None:
    """Add what ``learn`` and ``compare`` take; the latter takes several transformations, methods and seeds."""
    several = {"nargs": "+"} if many else {}
    default = Experiment()
    data_arguments(parser, default, many)
    parser.add_argument(
        "--method",
        **several,
        default=list(METHODS) if many else default.method,
        choices=METHODS,
        metavar="METHOD",
        help=f"{explained(METHODS)} (default: {'all' if many else default.method})",
    )
    parser.add_argument(
        "--net", default=default.net, choices=NETWORKS, help="network (default: %(default)s)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=default.n_samples,
        help="sampled transformations per image (default: %(default)s)",
    )
    parser.add_argument(
        "--correlated", action="store_true", help="learn correlations of the ranges, too"
    )
    parser.add_argument(
        "--fixed",
        nargs="+",
        type=_range,
        default=list(default.fixed.items()),
        metavar="NAME=RANGE",
        help="ranges of the method fixed (default: rotation=3.14159, all rotations)",
    )
    parser.add_argument(
        "--strength",
        type=float,
        default=default.strength,
        help="of Augerino's reward for wide ranges (default: %(default)s)",
    )
    parser.add_argument(
        "--lr-augerino",
        type=float,
        default=default.lr_augerino,
        help="Augerino's step size of ranges (default: %(default)s)",
    )
    run_arguments(parser, default, many)


def _range(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form rotation=3.14") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"the range of {name} must be finite, got {value}")
    return name, number


def _experiment(arguments: argparse.Namespace, **changes: Any) -> Experiment:
    return Experiment(
        **{
            "data": arguments.data,
            "transform": arguments.transform,
            "method": arguments.method,
            "net": arguments.net,
            "n_samples": arguments.samples,
            "n_epochs": arguments.epochs,
            "n_train": arguments.train,
            "n_test": arguments.test,
            "correlated": arguments.correlated,
            "fixed": dict(arguments.fixed),
            "strength": arguments.strength,
            "lr_augerino": arguments.lr_augerino,
            "seed": arguments.seed,
            "root": arguments.root,
            "download": arguments.download,
        }
        | changes
    )


def _learn(arguments: argparse.Namespace) -> None:
    need_matplotlib()
    outcome = learn(
        _experiment(arguments), arguments.out, arguments.resume, progress_bar=not arguments.quiet
    )
    print(f"{outcome}\n{files(arguments.out)}")


def _compare(arguments: argparse.Namespace) -> None:
    need_matplotlib()
    runs = itertools.product(arguments.transform, arguments.method, arguments.seed)
    experiments = [_experiment(arguments, transform=t, method=m, seed=s) for t, m, s in runs]
    print(
        compare(
            experiments, arguments.out, arguments.resume, progress_bar=not arguments.quiet, say=say
        ),
    )
