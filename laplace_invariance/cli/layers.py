"""Learn layer by layer which symmetry a network should have."""

from __future__ import annotations

import argparse

from laplace_invariance.cli.arguments import data_arguments, explained, run_arguments
from laplace_invariance.cli.output import files
from laplace_invariance.experiments.layers import METHODS, TASKS, LayerExperiment, learn_layers
from laplace_invariance.layers.paths import PATHS

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verb ``layers``."""
    parser = commands.add_parser(
        "layers",
        help="learn layer by layer which symmetry a network should have",
        description="Train a network whose layers are sums of paths, such as a convolution and a fully connected one, and learn "
        "by evidence which of them each layer needs.",
    )
    _arguments(parser)
    parser.set_defaults(run=_run)


def _arguments(parser: argparse.ArgumentParser) -> None:
    default = LayerExperiment()
    kinds = {name: kind.symmetry for name, kind in PATHS.items()}
    data_arguments(parser, default)
    parser.add_argument(
        "--task",
        default=default.task,
        choices=TASKS,
        metavar="TASK",
        help=f"{explained(TASKS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--kind",
        default=default.kind,
        metavar="KIND",
        help=f"paths of every layer, joined by +: {explained(kinds)} (default: %(default)s)",
    )
    parser.add_argument(
        "--method",
        default=default.method,
        choices=METHODS,
        metavar="METHOD",
        help=f"{explained(METHODS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--width",
        type=int,
        default=default.width,
        help="channels of the first layer (default: %(default)s)",
    )
    parser.add_argument(
        "--prior",
        default=default.prior_structure,
        choices=("layerwise", "path"),
        help="one prior precision per tensor, or one per path (default: %(default)s)",
    )
    parser.add_argument(
        "--per-slot",
        action="store_true",
        help="curvature of factored layers with a gradient factor for every slot",
    )
    run_arguments(parser, default)


def _run(arguments: argparse.Namespace) -> None:
    experiment = LayerExperiment(
        data=arguments.data,
        transform=arguments.transform,
        task=arguments.task,
        kind=arguments.kind,
        method=arguments.method,
        width=arguments.width,
        n_train=arguments.train,
        n_test=arguments.test,
        n_epochs=arguments.epochs,
        prior_structure=arguments.prior,
        per_slot=arguments.per_slot,
        seed=arguments.seed,
        root=arguments.root,
        download=arguments.download,
    )
    outcome = learn_layers(
        experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet
    )
    print(f"{outcome}\n{files(arguments.out)}")
