"""Learn a range of rotations by a lower bound on the evidence."""

from __future__ import annotations

import argparse

from laplace_invariance.cli.arguments import data_arguments, run_arguments
from laplace_invariance.cli.output import files, say
from laplace_invariance.experiments.variational import (
    METHODS,
    TRANSFORMS,
    RecoveryExperiment,
    recover,
)
from laplace_invariance.variational import ACTIVATIONS

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verb ``variational``."""
    parser = commands.add_parser(
        "variational",
        help="learn a range of rotations by a lower bound on the evidence of a shallow network",
        description="Train a network of one hidden layer, whose weights are rotated, on images that were turned, and learn by "
        "the ELBO how far they were, from several starts; compare with fixed ranges and a point estimate.",
    )
    _arguments(parser)
    parser.set_defaults(run=_run)


def _arguments(parser: argparse.ArgumentParser) -> None:
    default = RecoveryExperiment()
    data_arguments(parser, default, kinds=TRANSFORMS)
    for option, method in (("--init", "learnt"), ("--fixed", "fixed"), ("--point", "point")):
        start = getattr(default, method)
        parser.add_argument(
            option,
            dest=method,
            nargs="*",
            type=float,
            default=start,
            metavar="DEGREES",
            help=f"{METHODS[method]}: a run for each of these (default: {', '.join(map(str, start)) or 'none'})",
        )
    for option, kind, meaning in (
        ("--features", int, "width of the hidden layer"),
        ("--samples", int, "rotations of its weights"),
        ("--length-scale", float, "of the cosines, in units of the image"),
        ("--lr-hyper", float, "step size of the range"),
    ):
        value = getattr(default, {int: "n_", float: ""}[kind] + option[2:].replace("-", "_"))
        parser.add_argument(option, type=kind, default=value, help=f"{meaning} (default: {value})")
    parser.add_argument(
        "--activation",
        default=default.activation,
        choices=ACTIVATIONS,
        help="of the layer (default: %(default)s)",
    )
    parser.add_argument(
        "--draws",
        default=default.draws,
        choices=("independent", "sobol", "grid"),
        help="of rotations; those of a grid are always the same (default: %(default)s)",
    )
    run_arguments(parser, default)


def _run(arguments: argparse.Namespace) -> None:
    same = (
        "data",
        "transform",
        "learnt",
        "fixed",
        "point",
        "activation",
        "draws",
        "length_scale",
        "lr_hyper",
    )
    experiment = RecoveryExperiment(
        **{name: getattr(arguments, name) for name in (*same, "seed", "root", "download")},
        n_features=arguments.features,
        n_samples=arguments.samples,
        n_epochs=arguments.epochs,
        n_train=arguments.train,
        n_test=arguments.test,
    )
    found = recover(
        experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet, say=say
    )
    print(f"{found}\n{files(arguments.out)}")
