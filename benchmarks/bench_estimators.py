"""Estimators of the evidence and of its gradient on trained networks: how near, at what cost.

``python benchmarks/bench_estimators.py`` runs the rows that benchmarks/results/estimators.json does
not have yet, adds each to it as it comes, and prints the tables; ``--write`` also keeps them in
benchmarks/README.md. All estimators see the same trained network, priors, batches and, unless they
are about these, augmentation draws. Times are CPU time of one thread.

A new estimator is an entry of ``ROWS``: options of :func:`by_laplace`, or another function.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import bench
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance import curvature, datasets
from laplace_invariance.files import read_json, write_text

RESULTS = bench.ROOT / "benchmarks/results/estimators.json"
FILES = {"MNIST": "mnist.npz", "CIFAR-10": "cifar10_5k.npz"}
FALLBACK = "digits"
TRANSFORM = "partially_rotated"
N_SAMPLES, BATCH = 4, 50
DRAWS_SEED = 0  # of the augmentation draws that all estimators share
STOCHASTIC = {"stochastic": True, "num_samples": 1}


# What is estimated.


@dataclass(frozen=True)
class Trained:
    """A trained network, and the data and priors that its evidence is that of.

    Attributes:
        model: The model, in evaluation mode; its generator makes the augmentation draws.
        loader: Batches of the training data, always in the same order.
        precision: Prior precision of each tensor of parameters.
        accuracy: Accuracy on the training data.
    """

    model: li.InvariantModel
    loader: DataLoader
    precision: Tensor
    accuracy: float

    @property
    def n(self) -> int:
        """Number of images."""
        return len(self.loader.dataset)

    def settings(self) -> dict[str, Any]:
        """Return what rows must agree in to stand in one table."""
        norm = sum(p.detach().double().square().sum().item() for p in self.model.net.parameters())
        return {
            "n": self.n,
            "accuracy": round(self.accuracy, 4),
            "norm of the weights": float(f"{math.sqrt(norm):.5g}"),
        }


def images(name: str, directory: Path, n: int) -> tuple[Tensor, Tensor]:
    """Return ``n`` rotated images and their labels."""
    if name == FALLBACK:
        split = datasets.load(name, n_train=n)
        x = datasets.framed(split.x_train, 28)
    else:
        split = datasets.load(directory / FILES[name], n_train=n)
        x = split.x_train
    generator = torch.Generator().manual_seed(0)
    return datasets.transformed(x, TRANSFORM, generator), split.y_train


def trained(name: str, directory: Path, n: int, n_epochs: int) -> Trained:
    """Train weights and priors by the evidence, the ranges of the augmentation fixed."""
    from torch import nn

    x, y = images(name, directory, n)
    torch.manual_seed(0)
    net = nn.Sequential(li.layers.Standardise.of(x), bench.conv_net(*x.shape[1:3]))
    augmentation = li.AffineImage(init=0.1)
    model = li.InvariantModel(net, augmentation, N_SAMPLES, torch.Generator().manual_seed(0))
    augmentation.eta.requires_grad_(False)
    result = li.marglik_training(
        model,
        DataLoader(TensorDataset(x, y), BATCH, shuffle=True),
        n_epochs=n_epochs,
        marglik_frequency=max(1, n_epochs // 3),
        optimizer_kwargs={"lr": 3e-3},
        backend_kwargs=STOCHASTIC,
    )
    augmentation.eta.requires_grad_()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x).argmax(-1) == y).float().mean().item()
    loader = DataLoader(TensorDataset(x, y), BATCH)
    return Trained(model, loader, result.prior_precision.detach(), accuracy)


# How it is estimated.


@dataclass(frozen=True)
class Estimate:
    """One estimate of the evidence and its gradient, and the seconds that they took."""

    evidence: float
    gradient: list[float]
    fit_seconds: float
    gradient_seconds: float


class DifferentiableIn:
    """A loader that lets a tensor require grad in some of its batches only."""

    def __init__(self, loader: DataLoader, tensor: Tensor, batches: set[int]) -> None:
        self.loader, self.tensor, self.batches = loader, tensor, batches
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self):
        for index, batch in enumerate(self.loader):
            self.tensor.requires_grad_(index in self.batches)
            yield batch


def by_laplace(
    state: Trained,
    repeat: int,
    *,
    backend: str = "AugmentedGGN",
    backend_kwargs: dict[str, Any] | None = None,
    subset: str = "all",
    share: float = 1.0,
    other_draws: bool = False,
) -> Estimate:
    """Estimate the evidence by stock Laplace.

    Args:
        state: The trained network.
        repeat: Seed of all that is random, but for the augmentation draws.
        backend: Name of a backend in ``laplace_invariance.curvature``.
        backend_kwargs: Its options.
        subset: Weights that are considered, ``"all"`` or ``"last_layer"``.
        share: Share of the batches in which hyperparameters are differentiated.
        other_draws: Whether the augmentation draws differ from repeat to repeat, too.
    """
    from laplace import Laplace

    state.model.generator.manual_seed(DRAWS_SEED + other_draws * (1 + repeat))
    torch.manual_seed(repeat)
    la = Laplace(
        state.model,
        "classification",
        subset_of_weights=subset,
        hessian_structure="kron",
        backend=getattr(curvature, backend),
        backend_kwargs=backend_kwargs,
    )
    (eta,) = li.hyperparameters(la.model)  # of a copy, if it is the last layer's
    n_chosen = max(1, round(share * len(state.loader)))
    chosen = set(torch.randperm(len(state.loader))[:n_chosen].tolist())
    loader = DifferentiableIn(state.loader, eta, chosen)
    fit_seconds = bench.seconds_of(lambda: la.fit(loader), time.thread_time)
    eta.requires_grad_()
    precision = state.precision
    if subset == "last_layer":
        precision = precision[-2]  # of its weight; laplace takes no more than one here
    evidence = la.log_marginal_likelihood(precision)
    eta.grad = None
    gradient_seconds = bench.seconds_of(evidence.backward, time.thread_time)
    gradient = eta.grad * len(state.loader) / n_chosen
    return Estimate(evidence.item(), gradient.tolist(), fit_seconds, gradient_seconds)


def by_bound(state: Trained, repeat: int, *, kind: str) -> Estimate:
    """Estimate a lower bound and its gradient from the tangent kernels of all minibatches."""
    state.model.generator.manual_seed(DRAWS_SEED)
    torch.manual_seed(repeat)
    bound = curvature.TangentKernelBound(state.model, "classification", kind)

    def estimates() -> list[curvature.BoundEstimate]:
        return [bound.estimate(x, y, state.n, state.precision) for x, y in state.loader]

    start = time.thread_time()
    found = estimates()
    seconds = time.thread_time() - start
    evidence = statistics.mean(float(each.evidence) for each in found)
    gradient = torch.stack([each.hyperparameter_gradients[0] for each in found]).mean(0)
    return Estimate(evidence, gradient.tolist(), 0.0, seconds)


@dataclass(frozen=True)
class Row:
    """An estimator.

    Attributes:
        options: Keyword arguments of ``estimate``.
        random: Whether repeats differ, so that there are to be many.
        estimate: Called with the trained network, the number of the repeat and the options.
    """

    options: dict[str, Any] = field(default_factory=dict)
    random: bool = False
    estimate: Callable[..., Estimate] = by_laplace


def ggn(random: bool = False, **options: Any) -> Row:
    """Return the row of the GGN with these options of the backend."""
    return Row({"backend_kwargs": options}, random)


REFERENCE = "exact"
ROWS = {
    REFERENCE: Row(),
    "output_rank=1": ggn(output_rank=1),
    "output_rank=2": ggn(output_rank=2),
    "output_rank=3": ggn(output_rank=3),
    "stochastic, 1": ggn(random=True, stochastic=True, num_samples=1),
    "stochastic, 2": ggn(random=True, stochastic=True, num_samples=2),
    "stochastic, 4": ggn(random=True, stochastic=True, num_samples=4),
    "output_rank=1 + stochastic, 1": ggn(random=True, output_rank=1, **STOCHASTIC),
    "output_rank=2 + stochastic, 1": ggn(random=True, output_rank=2, **STOCHASTIC),
    "EF": Row({"backend": "AugmentedEF"}),
    "exact, a quarter of the batches in the gradient": Row({"share": 0.25}, random=True),
    "exact, other augmentation draws": Row({"other_draws": True}, random=True),
    "exact, last layer": Row({"subset": "last_layer"}),
    "kernel bound, full": Row({"kind": "full"}, estimate=by_bound),
    "kernel bound, output": Row({"kind": "output"}, estimate=by_bound),
    "kernel bound, single": Row({"kind": "single"}, random=True, estimate=by_bound),
}


# Running and keeping.


def run(state: Trained, row: Row, repeats: int, rounds: int) -> dict[str, Any]:
    """Return all estimates of a row, and its smallest times in training steps' worth.

    Args:
        state: The trained network.
        row: The estimator.
        repeats: Number of estimates if they are random.
        rounds: Number of estimates if they are not, of which the fastest counts.
    """
    epoch = bench.training_step(state.model, list(state.loader))
    epochs, estimates = [], []
    for repeat in range(repeats if row.random else rounds):
        epochs.append(bench.seconds_of(epoch, time.thread_time))
        estimates.append(row.estimate(state, repeat, **row.options))
    unit = min(epochs)
    different = estimates if row.random else estimates[:1]
    return {
        "evidence": [round(each.evidence, 3) for each in different],
        "gradient": [[float(f"{g:.6g}") for g in each.gradient] for each in different],
        "fit": round(min(each.fit_seconds for each in estimates) / unit, 3),
        "gradient_time": round(min(each.gradient_seconds for each in estimates) / unit, 3),
    }


def save(results: dict[str, Any], path: Path) -> None:
    """Write results as JSON, a line for each."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load_results(path: Path) -> dict[str, Any]:
    """Return the results in a file; none if there is no file."""
    return read_json(path) if path.exists() else {}


def of_this_state(results: dict[str, Any], name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return results without those of another network on the same data."""
    if results.get(name) in (None, settings):
        return results | {name: settings}
    print(f"{name}: rows of another network, {results[name]}, are left out", file=sys.stderr)
    others = {k: v for k, v in results.items() if k != name and not k.startswith(f"{name}/")}
    return others | {name: settings}


def measure(name: str, state: Trained, rows: Sequence[str], arguments: Any) -> None:
    """Run the rows that are not there, and keep each as soon as it is done."""
    results = of_this_state(load_results(arguments.results), name, state.settings())
    for label in rows:
        key = f"{name}/{label}"
        if key in results and not arguments.again:
            continue
        print(f"{key} ...", file=sys.stderr, flush=True)
        try:
            results[key] = run(state, ROWS[label], arguments.repeats, arguments.rounds)
        except ValueError as error:
            if "output_rank" not in str(error):  # which versions combine differently
                raise
            print(f"{key} is refused: {error}", file=sys.stderr)
            continue
        save(results, arguments.results)


# Tables.


def norm(vector: Sequence[float]) -> float:
    """Return the Euclidean length."""
    return math.hypot(*vector)


def difference(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the difference of two vectors."""
    return [a - b for a, b in zip(first, second, strict=True)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    return sum(a * b for a, b in zip(first, second, strict=True)) / norm(first) / norm(second)


def mean_vector(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of vectors."""
    return [statistics.fmean(column) for column in zip(*vectors, strict=True)]


def spread(vectors: Sequence[Sequence[float]]) -> float:
    """Return the root of the summed variances of all components, from two vectors on."""
    return math.sqrt(sum(statistics.variance(column) for column in zip(*vectors, strict=True)))


def gradient_errors(gradients: list[list[float]], exact: list[float]) -> dict[str, float]:
    """Return how estimates of the gradient differ from the exact one.

    Args:
        gradients: The estimates.
        exact: The exact gradient.

    Returns:
        Mean cosine; mean length of the error, length of the mean error and, if there are several
        estimates, their spread, all relative to the length of the exact gradient.
    """
    length = norm(exact)
    errors = {
        "cosine": statistics.fmean(cosine(gradient, exact) for gradient in gradients),
        "error": statistics.fmean(norm(difference(each, exact)) for each in gradients) / length,
        "bias": norm(difference(mean_vector(gradients), exact)) / length,
    }
    if len(gradients) > 1:
        errors["spread"] = spread(gradients) / length
    return errors


def table_row(label: str, row: dict[str, Any], reference: dict[str, Any], n: int) -> list[str]:
    """Return the cells of an estimator."""
    errors = gradient_errors(row["gradient"], reference["gradient"][0])
    bias = (statistics.fmean(row["evidence"]) - reference["evidence"][0]) / n
    cells = [f"{errors['cosine']:.4f}", f"{errors['error']:.3f}", f"{errors['bias']:.3f}"]
    evidence_cells = [f"{bias:+.4f}", ""]
    if "spread" in errors:
        cells.append(f"{errors['spread']:.3f}")
        evidence_cells[1] = f"{statistics.stdev(row['evidence']) / n:.4f}"
    else:
        cells.append("")
    times = [f"{row['fit']:.2f}x", f"{row['gradient_time']:.2f}x"]
    return [label, *cells, *evidence_cells, *times]


def data_table(name: str, results: dict[str, Any]) -> str:
    """Return the table of one data set, with its settings above."""
    settings, reference = results[name], results[f"{name}/{REFERENCE}"]
    n = settings["n"]
    found = {label: results.get(f"{name}/{label}") for label in ROWS}
    lines = [table_row(label, row, reference, n) for label, row in found.items() if row]
    header = ["", "cosine", "relative error", "bias", "spread"]
    header += ["evidence: bias", "evidence: spread", "fit", "gradient"]
    evidence = reference["evidence"][0] / n
    title = (
        f"{name}, {n} images, training accuracy {settings['accuracy']:.1%}, "
        f"exact evidence {evidence:.4f} nats per image:"
    )
    return f"{title}\n\n{bench.table(header, lines)}"


def tables(results: dict[str, Any]) -> str:
    """Return the tables of all data sets whose exact row is there."""
    names = [name for name in (*FILES, FALLBACK) if f"{name}/{REFERENCE}" in results]
    parts = [data_table(name, results) for name in names]
    if FALLBACK in names:
        parts.append("Without the files of MNIST and CIFAR-10, digits of scikit-learn were used.")
    return "\n\n".join(parts)


def available(directory: Path) -> list[str]:
    """Return the data sets whose files are there, or the one that needs none."""
    found = [name for name, file in FILES.items() if (directory / file).exists()]
    if not found:
        print(f"no {', '.join(FILES.values())} in {directory}: digits instead", file=sys.stderr)
        found = [FALLBACK]
    return found


def missing(name: str, rows: Sequence[str], arguments: Any) -> list[str]:
    """Return the rows to run, the exact one included, since all are compared with it."""
    results = load_results(arguments.results)
    wanted = [label for label in ROWS if label in {REFERENCE, *rows}]
    if arguments.again:
        return wanted
    return [label for label in wanted if f"{name}/{label}" not in results]


def main() -> None:
    """Run what is missing, print the tables, and write them if asked to."""
    options = bench.parser(__doc__, rounds=3)
    add = partial(options.add_argument, metavar="")
    add("--data", type=Path, default=bench.ROOT / "../shared/data", help="directory of .npz files")
    add("--results", type=Path, default=RESULTS, help="file of the results")
    add("--rows", nargs="*", default=list(ROWS), choices=ROWS, help="rows to run (default: all)")
    options.add_argument("--again", action="store_true", help="run rows that are there, too")
    add("--repeats", type=int, default=10, help="estimates of random rows (default: %(default)s)")
    add("--n", type=int, default=1000, help="number of images (default: %(default)s)")
    add("--epochs", type=int, default=15, help="epochs of training (default: %(default)s)")
    arguments = options.parse_args()
    bench.restart_with_allocator()
    torch.set_num_threads(1)
    for name in available(arguments.data):
        rows = missing(name, arguments.rows, arguments)
        if rows:
            state = trained(name, arguments.data, arguments.n, arguments.epochs)
            measure(name, state, rows, arguments)
    text = tables(load_results(arguments.results))
    print(text)
    if arguments.write:
        bench.write("estimators", text)


if __name__ == "__main__":
    main()
