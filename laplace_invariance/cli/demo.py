"""Small demonstrations."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from laplace_invariance.cli.output import need_matplotlib, say

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add the verb ``demo``."""
    demo = commands.add_parser("demo", help="run a small demonstration and save its figure")
    demos = demo.add_subparsers(dest="demo", required=True, metavar="NAME")
    points = demos.add_parser(
        "points",
        help="learn how far shapes of 2-D points may be turned (under a minute)",
        description="Learn the range of rotations to which the classes of a 2-D data set are invariant, "
        "with stock laplace.marglik_training.",
    )
    points.add_argument(
        "--out",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="where the figure goes (default: demo)",
    )
    points.add_argument("--epochs", type=int, default=240, help="epochs of training (default: 240)")
    points.add_argument(
        "--samples", type=int, default=16, help="sampled rotations per example (default: 16)"
    )
    points.add_argument(
        "--seed", type=int, default=0, help="of data, weights and draws (default: 0)"
    )
    points.add_argument("--quiet", action="store_true", help="no progress bar")
    points.set_defaults(run=_points)


def _points(arguments: argparse.Namespace) -> None:
    from laplace_invariance.experiments import demo as demos

    need_matplotlib()
    if arguments.epochs < demos.BURN_IN + demos.EVERY:
        raise SystemExit(
            f"--epochs must be at least {demos.BURN_IN + demos.EVERY}, got {arguments.epochs}"
        )
    start = time.perf_counter()
    result = demos.points(
        arguments.out,
        n_epochs=arguments.epochs,
        n_samples=arguments.samples,
        seed=arguments.seed,
        progress_bar=not arguments.quiet,
        say=say,
    )
    print(f"{result}\ntime            {time.perf_counter() - start:.0f} s")
