"""Measure how invariant networks are."""

from __future__ import annotations

import argparse

from laplace_invariance import datasets
from laplace_invariance.cli.arguments import explained, run_arguments
from laplace_invariance.cli.output import files, say
from laplace_invariance.experiments.measure import GROUPS, METHODS, MeasurementExperiment, measure

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verb ``measure``."""
    parser = commands.add_parser(
        "measure",
        help="measure how invariant networks are, in and out of distribution",
        description="Train a network in several ways that should make it invariant, and measure how invariant it is, really: on "
        "test images, and on images of another kind.",
    )
    _arguments(parser)
    parser.set_defaults(run=_run)


def _arguments(parser: argparse.ArgumentParser) -> None:
    default = MeasurementExperiment()
    source = f"{', '.join(datasets.SOURCES)}, or a FILE.npz"
    parser.add_argument(
        "--data", default=default.data, metavar="DATA", help=f"{source} (default: %(default)s)"
    )
    parser.add_argument(
        "--shifted",
        metavar="DATA",
        help=f"other images: {source} (default: negatives of test images)",
    )
    parser.add_argument(
        "--group",
        default=default.group,
        choices=GROUPS,
        help="transformations (default: %(default)s)",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        default=list(METHODS),
        choices=METHODS,
        metavar="METHOD",
        help=f"{explained(METHODS)} (default: all)",
    )
    parser.add_argument(
        "--samples", type=int, default=default.n_samples, help="rotations (default: %(default)s)"
    )
    parser.add_argument(
        "--strength",
        type=float,
        default=default.strength,
        help="of the invariance error (default: %(default)s)",
    )
    run_arguments(parser, default)


def _run(arguments: argparse.Namespace) -> None:
    experiment = MeasurementExperiment(
        data=arguments.data,
        shifted=arguments.shifted,
        group=arguments.group,
        n_samples=arguments.samples,
        n_epochs=arguments.epochs,
        n_train=arguments.train,
        n_test=arguments.test,
        strength=arguments.strength,
        seed=arguments.seed,
        root=arguments.root,
        download=arguments.download,
    )
    shown = not arguments.quiet
    measured = measure(
        experiment, arguments.method, arguments.out, arguments.resume, shown, say if shown else None
    )
    print(f"{measured}\n\n{files(arguments.out)}")
