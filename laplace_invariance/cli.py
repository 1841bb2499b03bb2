"""The command line: ``laplace-invariance`` or ``python -m laplace_invariance``.

Every verb is a module of :mod:`laplace_invariance.experiments`, and its options are the fields of
its configuration: names, types, choices, defaults and help texts are taken from the dataclass. An
experiment, and torch with it, is imported only when it runs.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import Field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from laplace_invariance import __version__
from laplace_invariance.allocator import keep_freed_memory
from laplace_invariance.experiments.checks import Config, choices_of, normalised
from laplace_invariance.experiments.jobs import FailedRuns
from laplace_invariance.experiments.options import (
    CompareConfig,
    DemoConfig,
    LayersConfig,
    LearnConfig,
    MeasureConfig,
    PairsConfig,
    PlaneConfig,
    ProfileConfig,
    ReproduceConfig,
    SuggestConfig,
    VariationalConfig,
)
from laplace_invariance.tables import labelled

if TYPE_CHECKING:
    from laplace_invariance.marglik.ranks import Ranks

__all__ = ["VERBS", "Verb", "main"]


class Verb(NamedTuple):
    """A command: the function of the same name in the module of the same name.

    Attributes:
        config: Configuration that the function takes, from which the options are made.
        help: Line in the list of commands.
        description: Paragraph in the command's own help.
        out: Default of ``--out``; None makes it required.
        resumes: Whether the function takes ``resume``.
        before_files: What separates the result from the list of files; None lists none.
        hint: What to do next, printed last, with the directory for ``{out!r}``.
        joins: Whether several processes of ``torchrun`` can share the work.
    """

    config: type[Config]
    help: str
    description: str
    out: str | None = None
    resumes: bool = True
    before_files: str | None = "\n"
    hint: str = ""
    joins: bool = False


VERBS = {
    "learn": Verb(
        LearnConfig,
        "learn to which transformations images are invariant, and how far",
        "Train a network on images, as they are or transformed in a known way, and learn by "
        "evidence to which transformations it should be invariant, and how far.",
        hint="laplace_invariance.load_run({out!r}) has the model and, if there is one, the "
        "augmentation, whose to_transform() is for torchvision",
        joins=True,
    ),
    "compare": Verb(
        CompareConfig,
        "compare learnt ranges with other ways, in one table",
        "Run several methods on several kinds of images, with the same code, network and images.",
        before_files=None,
    ),
    "profile": Verb(
        ProfileConfig,
        "show whether a learnt range is a maximum of the evidence, and how flat",
        "Learn ranges as learn does, and compute the evidence at other widths of one of them, the "
        "weights and other open ranges trained for a while at each.",
        before_files="\n\n",
    ),
    "suggest": Verb(
        SuggestConfig,
        "suggest augmentations for a network that was trained without any",
        "Train a network without augmentation, or read its weights, and say which augmentations, "
        "and how far, would raise its evidence, with standard errors.",
    ),
    "layers": Verb(
        LayersConfig,
        "learn layer by layer which symmetry a network should have",
        "Train a network whose layers are sums of paths, such as a convolution and a fully "
        "connected one, and learn by evidence which of them each layer needs.",
    ),
    "measure": Verb(
        MeasureConfig,
        "measure how invariant networks are, in and out of distribution",
        "Train a network in several ways that should make it invariant, and measure how invariant "
        "it is, really: on test images, and on images of another kind.",
        before_files="\n\n",
    ),
    "pairs": Verb(
        PairsConfig,
        "learn a code that ignores unknown transformations, from pairs",
        "Train autoencoders on pairs of vectors of which only distances are known, zero if one is "
        "the other, transformed, and measure how far a part of their code ignores the "
        "transformation.",
    ),
    "variational": Verb(
        VariationalConfig,
        "learn ranges by a lower bound on the evidence of a shallow network",
        "Train a network of one hidden layer, whose weights are transformed, on images that were "
        "transformed, and learn by the ELBO how far they were, from several starts; compare with "
        "fixed ranges and a point estimate.",
    ),
    "plane": Verb(
        PlaneConfig,
        "learn whether labels of points ignore rotations, and draw predictions",
        "Learn labels of a few points in the plane, which depend on their radius or on their "
        "angle, with no, a learnt, or all invariance to rotations, and draw what is predicted.",
    ),
    "reproduce": Verb(
        ReproduceConfig,
        "repeat a table of a paper, as far as it has not been run",
        "Run what is missing of a table of one of the papers that are implemented here, several "
        "runs at a time, keep one small file of each, and print the table; call it again to "
        "continue.",
        out="results",
        resumes=False,
        before_files=None,
    ),
    "demo": Verb(
        DemoConfig,
        "run a small demonstration and save its figure",
        "Learn the range of rotations to which the classes of a 2-D data set are invariant, with "
        "stock laplace.marglik_training.",
        out="demo",
        resumes=False,
        before_files=None,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Arguments; None takes those of the process.

    Raises:
        SystemExit: With one line that says what is wrong, and code 2, if the experiment cannot
            run; with code 1 if it is interrupted, its numbers are not finite, memory is short, or
            some of its runs failed.
    """
    arguments = _parser().parse_args(argv)
    level = logging.WARNING
    if arguments.verbose:
        level = logging.INFO
    logging.basicConfig(level=level)
    if not arguments.verbose:
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch's, about itself
    try:
        with _short_warnings():
            _run(arguments)
    except (FloatingPointError, FailedRuns) as error:
        raise SystemExit(f"laplace-invariance: {error}") from error
    except (KeyboardInterrupt, RuntimeError) as error:
        # torch.save raises an error of its own if it is interrupted
        interrupts = (error, error.__context__)
        if not any(isinstance(one, KeyboardInterrupt) for one in interrupts):
            if re.search(r"alloc\w* memory|out of memory", str(error)):
                raise _out_of_memory(error) from error
            raise
        message = "laplace-invariance: interrupted"
        if VERBS[arguments.verb].resumes:
            message += "; the same command with --resume continues"
        raise SystemExit(message) from None
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise _refusal(error) from error
    except MemoryError as error:
        raise _out_of_memory(error) from error


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Write warnings on one line, without the place in the code that they come from."""
    before = warnings.formatwarning

    def short(message: Warning | str, *_: Any, **__: Any) -> str:
        return f"laplace-invariance: warning: {message}\n"

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = before


def _out_of_memory(error: BaseException) -> SystemExit:
    """Return an exit for an allocation that failed in Python, numpy or torch."""
    found = " ".join(str(error).split())
    return SystemExit(
        "laplace-invariance: there is not enough memory; fewer samples, or fewer or smaller "
        f"images, need less: {found}"
    )


def _refusal(error: Exception) -> SystemExit:
    """Print why an experiment cannot run, on one line; return an exit with code 2."""
    message = f"laplace-invariance: {' '.join(str(error).split())}"
    print(message, file=sys.stderr)
    refusal = SystemExit(message)
    refusal.code = 2
    return refusal


def _run(arguments: argparse.Namespace) -> None:
    verb = VERBS[arguments.verb]
    config = _config(verb.config, arguments)
    keep_freed_memory()
    module = import_module(f"laplace_invariance.experiments.{arguments.verb}")
    run = getattr(module, arguments.verb)
    if verb.resumes:
        run = partial(run, resume=arguments.resume)
    with _joined(arguments.verb, config) as ranks:
        result = run(config, arguments.out, progress_bar=not arguments.quiet)
    if not ranks.is_first:
        return
    if verb.before_files is None:
        print(result)
    else:
        print(result, _files(arguments.out), sep=verb.before_files)
    if verb.hint:
        print(labelled("next", verb.hint.format(out=str(arguments.out))))


def _joined(verb: str, config: Config) -> AbstractContextManager[Ranks]:
    """Return a context in which the processes of ``torchrun`` work together.

    Raises:
        ValueError: If there are several, and the experiment is for one.
    """
    from laplace_invariance.experiments.processes import joined

    n_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if n_processes > 1 and not VERBS[verb].joins:
        able = ", ".join(name for name, one in VERBS.items() if one.joins)
        raise ValueError(
            f"{verb} runs in one process, but torchrun started {n_processes}, which can only share "
            f"the work of {able}; leave torchrun out"
        )
    return joined(getattr(config, "device", "cpu"))


def _config(kind: type[Config], arguments: argparse.Namespace) -> Config:
    values = {entry.name: getattr(arguments, entry.name) for entry in fields(kind)}
    for name, hint in get_type_hints(kind).items():
        if get_origin(hint) is Mapping:
            values[name] = dict(values[name])
    return kind(**values)


def _files(out: Path) -> str:
    """Return a line about what is in a directory."""
    names = sorted(path.name for path in out.iterdir())
    return labelled("files", f"{out}: {', '.join(names)}")


# The parser, made from the configurations.


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laplace-invariance",
        description="Learn data augmentations and symmetries of layers by gradient of the marginal "
        "likelihood, on the training data alone.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the library does")
    commands = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for name, verb in VERBS.items():
        command = commands.add_parser(name, help=verb.help, description=verb.description)
        _add_fields(command, verb.config)
        _add_output(command, verb)
    return parser


def _add_output(parser: argparse.ArgumentParser, verb: Verb) -> None:
    """Add ``--out``, ``--resume`` and ``--quiet``."""
    words = "directory for all results"
    if verb.out is None:
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=words)
    else:
        words = f"{words} (default: {verb.out})"
        parser.add_argument("--out", type=Path, default=Path(verb.out), metavar="DIR", help=words)
    if verb.resumes:
        parser.add_argument("--resume", action="store_true", help="continue what is in DIR")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_fields(parser: argparse.ArgumentParser, kind: type[Config]) -> None:
    """Add one option per field of a configuration."""
    hints = get_type_hints(kind)
    words = _attribute_docs(kind)
    defaults = kind()
    for entry in fields(kind):
        default = getattr(defaults, entry.name)
        hint = hints[entry.name]
        text = _help(words[entry.name], entry, choices_of(hint), default)
        if entry.metadata.get("positional"):
            parser.add_argument(entry.name, choices=choices_of(hint), help=text)
            continue
        option = entry.metadata.get("option", entry.name.removeprefix("n_"))
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            dest=entry.name,
            default=default,
            help=text,
            **_settings(option, hint, entry.metadata.get("degrees", False)),
        )


def _settings(option: str, hint: Any, in_degrees: bool) -> dict[str, Any]:
    """Return how an option is read, by the type of its field, and whether degrees may be given."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Mapping:
        return {"nargs": "+", "type": _named_range, "metavar": "NAME=RANGE"}
    choices = choices_of(hint)
    settings: dict[str, Any] = {"type": str, "metavar": option.upper()}
    if choices:
        settings["type"] = partial(normalised, choices=choices)
        settings["choices"] = choices
    for number, metavar in ((int, "N"), (float, "X")):
        if number in (hint, *get_args(hint)):
            settings = {"type": number, "metavar": metavar}
    if in_degrees:
        settings["type"] = _width
    if get_origin(hint) is tuple:
        settings["nargs"] = "*"
    return settings


def _named_range(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = _number(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form rotation=3.14 or rotation=180deg"
        ) from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"the range of {name} must be finite, got {value}")
    return name, number


def _width(text: str) -> float:
    try:
        return _number(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor like 60deg") from None


def _number(text: str) -> float:
    """Return a number, in radians if it is written in degrees, like 60deg."""
    if text.endswith("deg"):
        return math.radians(float(text.removesuffix("deg")))
    return float(text)


# Help texts, from the docstrings.


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return the entries under ``Attributes:`` of a class and its bases, by name."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        docstring = inspect.cleandoc(base.__doc__ or "")
        _, _, section = docstring.partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]  # up to what is not indented
        for entry in re.split(r"\n(?=    \S)", section):
            name, _, text = entry.strip().partition(": ")
            found[name] = " ".join(text.replace("``", "").split())
    return found


def _help(text: str, entry: Field[Any], choices: tuple[str, ...], default: Any) -> str:
    """Return an entry with the choices and the default, as argparse takes it."""
    parts = [text[0].lower() + text[1:].removesuffix(".")]
    meanings = entry.metadata.get("meanings")
    if meanings is not None:
        named = {name.replace("_", "-"): words for name, words in meanings.items()}
        parts.append("; ".join(f"{name} ({words})" for name, words in named.items()))
    elif choices and not entry.metadata.get("positional"):
        parts.append(", ".join(choice.replace("_", "-") for choice in choices))
    shown = _shown(default, choices)
    words = ": ".join(parts)
    if shown and not entry.metadata.get("positional"):
        words = f"{words} (default: {shown})"
    return words.replace("%", "%%")


def _shown(default: Any, choices: tuple[str, ...]) -> str:
    """Return a default as it would be written on the command line; nothing if it has no words."""
    if default is None or default is False:
        return ""
    if default == ():
        return "none"
    if choices and default == choices:
        return "all"
    if isinstance(default, tuple):
        return " ".join(str(value) for value in default)
    if isinstance(default, Mapping):
        return " ".join(f"{name}={value:.6g}" for name, value in default.items())
    if choices:
        return default.replace("_", "-")
    return str(default)
