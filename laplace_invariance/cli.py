"""The command line: ``laplace-invariance`` or ``python -m laplace_invariance``."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from laplace_invariance import __version__

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace-invariance",
        description="Learn data augmentations by gradient of the marginal likelihood, on the training data alone.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the library does")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run a small demonstration and save its figure")
    demos = demo.add_subparsers(dest="demo", required=True, metavar="NAME")
    points = demos.add_parser(
        "points",
        help="learn how far shapes of 2-D points may be turned (under a minute)",
        description="Learn the range of rotations to which the classes of a 2-D data set are invariant, "
        "with stock laplace.marglik_training.",
    )
    points.add_argument(
        "--out", type=Path, default=Path("demo"), metavar="DIR", help="where the figure goes (default: demo)"
    )
    points.add_argument("--epochs", type=int, default=240, help="epochs of training (default: 240)")
    points.add_argument("--samples", type=int, default=16, help="sampled rotations per example (default: 16)")
    points.add_argument("--seed", type=int, default=0, help="of data, weights and draws (default: 0)")
    points.add_argument("--quiet", action="store_true", help="no progress bar")
    points.set_defaults(run=_demo_points)
    return parser


def _demo_points(arguments: argparse.Namespace) -> None:
    from laplace_invariance import demos

    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the figure needs matplotlib: pip install 'laplace-invariance[plots]'")
    if arguments.epochs < demos.BURN_IN + demos.EVERY:
        raise SystemExit(f"--epochs must be at least {demos.BURN_IN + demos.EVERY}, got {arguments.epochs}")
    start = time.perf_counter()
    result = demos.points(
        arguments.out,
        n_epochs=arguments.epochs,
        n_samples=arguments.samples,
        seed=arguments.seed,
        progress_bar=not arguments.quiet,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(f"{result}\ntime            {time.perf_counter() - start:.0f} s")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with the given arguments, by default those of the process."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING)
    if not arguments.verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about itself
    try:
        arguments.run(arguments)
    except ValueError as error:
        raise SystemExit(f"laplace-invariance: {error}") from error


if __name__ == "__main__":
    main()
