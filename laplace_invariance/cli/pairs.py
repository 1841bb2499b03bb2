"""Learn a code that ignores unknown transformations, from pairs."""

from __future__ import annotations

import argparse

from laplace_invariance.cli.arguments import explained, out_arguments
from laplace_invariance.cli.output import files
from laplace_invariance.experiments.pairs import TASKS, PairExperiment, learn_pairs

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verb ``pairs``."""
    parser = commands.add_parser(
        "pairs",
        help="learn a code that ignores unknown transformations, from pairs",
        description="Train autoencoders on pairs of vectors of which only distances are known, zero if one is the other, "
        "transformed, and measure how far a part of their code ignores the transformation.",
    )
    _arguments(parser)
    parser.set_defaults(run=_run)


def _arguments(parser: argparse.ArgumentParser) -> None:
    default = PairExperiment()
    parser.add_argument(
        "--task",
        default=default.task,
        choices=TASKS,
        metavar="TASK",
        help=f"{explained(TASKS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        default=list(default.networks),
        metavar="LAYER-DEPTH",
        help=f"layers, rich or selu, and how many (default: {' '.join(default.networks)})",
    )
    for name, value, meaning in (
        ("features", default.n_features, "size of the vectors"),
        ("train", default.n_train, "pairs to train on"),
        ("test", default.n_test, "pairs to test on"),
        ("epochs", default.n_epochs, "epochs of training"),
        ("seed", default.seed, "of data, weights and batches"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=value,
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--width",
        type=int,
        metavar="N",
        help="linear units per layer (default: 8 for each feature)",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=default.alpha,
        help="of squared distances in the loss (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, help="step size at the start (default: 0.003, or 0.01 for selu in dft)"
    )
    out_arguments(parser)


def _run(arguments: argparse.Namespace) -> None:
    experiment = PairExperiment(
        task=arguments.task,
        networks=tuple(arguments.networks),
        n_features=arguments.features,
        width=arguments.width,
        n_train=arguments.train,
        n_test=arguments.test,
        n_epochs=arguments.epochs,
        lr=arguments.lr,
        alpha=arguments.alpha,
        seed=arguments.seed,
    )
    outcome = learn_pairs(
        experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet
    )
    print(f"{outcome}\n{files(arguments.out)}")
