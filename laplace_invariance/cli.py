"""The command line: ``laplace-invariance`` or ``python -m laplace_invariance``."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laplace_invariance import __version__, datasets
from laplace_invariance.comparison import compare
from laplace_invariance.experiments import METHODS, NETWORKS, Experiment, learn
from laplace_invariance.layers.networks import PATHS
from laplace_invariance.layerwise import METHODS as LAYER_METHODS
from laplace_invariance.layerwise import TASKS, LayerExperiment, learn_layers
from laplace_invariance.measurement import GROUPS, MeasurementExperiment, measure
from laplace_invariance.measurement import METHODS as MEASURED
from laplace_invariance.pairs import TASKS as PAIR_TASKS
from laplace_invariance.pairs import PairExperiment, learn_pairs
from laplace_invariance.recovery import METHODS as RECOVERY_METHODS
from laplace_invariance.recovery import TRANSFORMS, RecoveryExperiment, recover
from laplace_invariance.variational import ACTIVATIONS

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

    learner = commands.add_parser(
        "learn",
        help="learn to which transformations images are invariant, and how far",
        description="Train a network on images that were moved in a known way, and learn by evidence how far they were.",
    )
    _learn_arguments(learner, many=False)
    learner.set_defaults(run=_learn)
    comparer = commands.add_parser(
        "compare",
        help="compare learnt ranges with other ways, in one table",
        description="Run several methods on several kinds of images, with the same code, network and images.",
    )
    _learn_arguments(comparer, many=True)
    comparer.set_defaults(run=_compare)
    layers = commands.add_parser(
        "layers",
        help="learn layer by layer which symmetry a network should have",
        description="Train a network whose layers are sums of paths, such as a convolution and a fully connected one, and learn "
        "by evidence which of them each layer needs.",
    )
    _layer_arguments(layers)
    layers.set_defaults(run=_layers)
    measurer = commands.add_parser(
        "measure",
        help="measure how invariant networks are, in and out of distribution",
        description="Train a network in several ways that should make it invariant, and measure how invariant it is, really: on "
        "test images, and on images of another kind.",
    )
    _measure_arguments(measurer)
    measurer.set_defaults(run=_measure)
    pairs = commands.add_parser(
        "pairs",
        help="learn a code that ignores unknown transformations, from pairs",
        description="Train autoencoders on pairs of vectors of which only distances are known, zero if one is the other, "
        "transformed, and measure how far a part of their code ignores the transformation.",
    )
    _pair_arguments(pairs)
    pairs.set_defaults(run=_pairs)
    variational = commands.add_parser(
        "variational",
        help="learn a range of rotations by a lower bound on the evidence of a shallow network",
        description="Train a network of one hidden layer, whose weights are rotated, on images that were turned, and learn by "
        "the ELBO how far they were, from several starts; compare with fixed ranges and a point estimate.",
    )
    _variational_arguments(variational)
    variational.set_defaults(run=_variational)

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


def _learn_arguments(parser: argparse.ArgumentParser, many: bool) -> None:
    """Add what ``learn`` and ``compare`` take; the latter takes several transformations, methods and seeds."""
    several = {"nargs": "+"} if many else {}
    default = Experiment()
    _data_arguments(parser, default, many)
    parser.add_argument(
        "--method",
        **several,
        default=list(METHODS) if many else default.method,
        choices=METHODS,
        metavar="METHOD",
        help=f"{_explained(METHODS)} (default: {'all' if many else default.method})",
    )
    parser.add_argument("--net", default=default.net, choices=NETWORKS, help="network (default: %(default)s)")
    parser.add_argument(
        "--samples",
        type=int,
        default=default.n_samples,
        help="sampled transformations per image (default: %(default)s)",
    )
    parser.add_argument("--correlated", action="store_true", help="learn correlations of the ranges, too")
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
    _run_arguments(parser, default, many)


def _layer_arguments(parser: argparse.ArgumentParser) -> None:
    default = LayerExperiment()
    _data_arguments(parser, default, many=False)
    parser.add_argument(
        "--task",
        default=default.task,
        choices=TASKS,
        metavar="TASK",
        help=f"{_explained(TASKS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--kind",
        default=default.kind,
        metavar="KIND",
        help=f"paths of every layer, joined by +: {_explained(PATHS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--method",
        default=default.method,
        choices=LAYER_METHODS,
        metavar="METHOD",
        help=f"{_explained(LAYER_METHODS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--width", type=int, default=default.width, help="channels of the first layer (default: %(default)s)"
    )
    parser.add_argument(
        "--prior",
        default=default.prior_structure,
        choices=("layerwise", "path"),
        help="one prior precision per tensor, or one per path (default: %(default)s)",
    )
    parser.add_argument(
        "--per-slot", action="store_true", help="curvature of factored layers with a gradient factor for every slot"
    )
    _run_arguments(parser, default, many=False)


def _measure_arguments(parser: argparse.ArgumentParser) -> None:
    default = MeasurementExperiment()
    source = f"{', '.join(datasets.SOURCES)}, or a FILE.npz"
    parser.add_argument("--data", default=default.data, metavar="DATA", help=f"{source} (default: %(default)s)")
    parser.add_argument("--shifted", metavar="DATA", help=f"other images: {source} (default: negatives of test images)")
    parser.add_argument("--group", default=default.group, choices=GROUPS, help="transformations (default: %(default)s)")
    parser.add_argument(
        "--method",
        nargs="+",
        default=list(MEASURED),
        choices=MEASURED,
        metavar="METHOD",
        help=f"{_explained(MEASURED)} (default: all)",
    )
    parser.add_argument("--samples", type=int, default=default.n_samples, help="rotations (default: %(default)s)")
    parser.add_argument(
        "--strength", type=float, default=default.strength, help="of the invariance error (default: %(default)s)"
def _variational_arguments(parser: argparse.ArgumentParser) -> None:
    default = RecoveryExperiment()
    _data_arguments(parser, default, many=False, kinds=TRANSFORMS)
    for option, method in (("--init", "learnt"), ("--fixed", "fixed"), ("--point", "point")):
        start = getattr(default, method)
        parser.add_argument(
            option,
            dest=method,
            nargs="*",
            type=float,
            default=start,
            metavar="DEGREES",
            help=f"{RECOVERY_METHODS[method]}: a run for each of these (default: {', '.join(map(str, start)) or 'none'})",
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
        "--activation", default=default.activation, choices=ACTIVATIONS, help="of the layer (default: %(default)s)"
    )
    parser.add_argument(
        "--draws",
        default=default.draws,
        choices=("independent", "sobol", "grid"),
        help="of rotations; those of a grid are always the same (default: %(default)s)",
    )
    _run_arguments(parser, default, many=False)


def _pair_arguments(parser: argparse.ArgumentParser) -> None:
    default = PairExperiment()
    parser.add_argument(
        "--task",
        default=default.task,
        choices=PAIR_TASKS,
        metavar="TASK",
        help=f"{_explained(PAIR_TASKS)} (default: %(default)s)",
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
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{meaning} (default: %(default)s)")
    parser.add_argument("--width", type=int, metavar="N", help="linear units per layer (default: 8 for each feature)")
    parser.add_argument(
        "--alpha", type=float, default=default.alpha, help="of squared distances in the loss (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, help="step size at the start (default: 0.003, or 0.01 for selu in dft)")
    _out_arguments(parser)


def _explained(words: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({meaning})" for name, meaning in words.items())


def _data_arguments(
    parser: argparse.ArgumentParser,
    default: Experiment | LayerExperiment | RecoveryExperiment,
    many: bool,
    kinds: Sequence[str] = datasets.KINDS,
) -> None:
    """Add from what images is learnt."""
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


def _run_arguments(
    parser: argparse.ArgumentParser, default: Experiment | LayerExperiment | MeasurementExperiment, many: bool
    parser: argparse.ArgumentParser, default: Experiment | LayerExperiment | RecoveryExperiment, many: bool
) -> None:
    """Add how long, from how many images, and where everything is and goes."""
    parser.add_argument(
        "--epochs", type=int, default=default.n_epochs, help="epochs of training (default: %(default)s)"
    )
    parser.add_argument("--train", type=int, metavar="N", help="use so many training images (default: all)")
    parser.add_argument("--test", type=int, metavar="N", help="use so many test images (default: all)")
    parser.add_argument(
        "--seed",
        **({"nargs": "+"} if many else {}),
        type=int,
        default=[default.seed] if many else default.seed,
        help="of subset, transformations, weights, draws (default: 0)",
    )
    parser.add_argument(
        "--root", default=default.root, metavar="DIR", help="of torchvision's data sets (default: %(default)s)"
    )
    parser.add_argument("--download", action="store_true", help="fetch a data set of torchvision that is not there")
    _out_arguments(parser)


def _out_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where everything goes")
    parser.add_argument("--resume", action="store_true", help="go on with what is in DIR")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


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
    _need_matplotlib()
    outcome = learn(_experiment(arguments), arguments.out, arguments.resume, progress_bar=not arguments.quiet)
    print(f"{outcome}\n{_files(arguments.out)}")


def _layers(arguments: argparse.Namespace) -> None:
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
    outcome = learn_layers(experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet)
    print(f"{outcome}\n{_files(arguments.out)}")


def _measure(arguments: argparse.Namespace) -> None:
    experiment = MeasurementExperiment(
        data=arguments.data,
        shifted=arguments.shifted,
        group=arguments.group,
def _variational(arguments: argparse.Namespace) -> None:
    same = ("data", "transform", "learnt", "fixed", "point", "activation", "draws", "length_scale", "lr_hyper")
    experiment = RecoveryExperiment(
        **{name: getattr(arguments, name) for name in (*same, "seed", "root", "download")},
        n_features=arguments.features,
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
    measured = measure(experiment, arguments.method, arguments.out, arguments.resume, shown, _say if shown else None)
    print(f"{measured}\n\n{_files(arguments.out)}")


def _pairs(arguments: argparse.Namespace) -> None:
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
    outcome = learn_pairs(experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet)
    print(f"{outcome}\n{_files(arguments.out)}")
    )
    found = recover(experiment, arguments.out, arguments.resume, progress_bar=not arguments.quiet, say=_say)
    print(f"{found}\n{_files(arguments.out)}")


def _files(out: Path) -> str:
    return f"files           {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"


def _compare(arguments: argparse.Namespace) -> None:
    _need_matplotlib()
    runs = itertools.product(arguments.transform, arguments.method, arguments.seed)
    experiments = [_experiment(arguments, transform=t, method=m, seed=s) for t, m, s in runs]
    print(
        compare(experiments, arguments.out, arguments.resume, progress_bar=not arguments.quiet, say=_say),
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the figures need matplotlib: pip install 'laplace-invariance[plots]'")


def _demo_points(arguments: argparse.Namespace) -> None:
    from laplace_invariance import demos

    _need_matplotlib()
    if arguments.epochs < demos.BURN_IN + demos.EVERY:
        raise SystemExit(f"--epochs must be at least {demos.BURN_IN + demos.EVERY}, got {arguments.epochs}")
    start = time.perf_counter()
    result = demos.points(
        arguments.out,
        n_epochs=arguments.epochs,
        n_samples=arguments.samples,
        seed=arguments.seed,
        progress_bar=not arguments.quiet,
        say=_say,
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
    except (KeyboardInterrupt, RuntimeError) as error:
        # torch.save raises an error of its own if it is interrupted
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise SystemExit("laplace-invariance: interrupted; the same command with --resume goes on") from None
    except (ValueError, TypeError, OSError, ImportError, FloatingPointError) as error:
        raise SystemExit(f"laplace-invariance: {error}") from error


if __name__ == "__main__":
    main()
