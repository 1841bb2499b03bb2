"""The command line: ``laplace-invariance`` or ``python -m laplace_invariance``. Each verb has a module, or shares one."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Sequence

from laplace_invariance import __version__
from laplace_invariance.cli import demo, layers, learn, measure, pairs, variational

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace-invariance",
        description="Learn data augmentations and symmetries of layers by gradient of the marginal likelihood, on the training "
        "data alone.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the library does")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for verb in (learn, layers, measure, pairs, variational, demo):
        verb.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with the given arguments, by default those of the process."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING)
    if not arguments.verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about itself
    try:
        arguments.run(arguments)
    except (KeyboardInterrupt, RuntimeError) as error:
        # torch.save raises an error of its own if it is interrupted
        if not isinstance(error, KeyboardInterrupt) and not isinstance(
            error.__context__, KeyboardInterrupt
        ):
            raise
        raise SystemExit(
            "laplace-invariance: interrupted; the same command with --resume goes on"
        ) from None
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        raise SystemExit(f"laplace-invariance: {error}") from error
