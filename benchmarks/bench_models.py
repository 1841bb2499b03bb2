"""Time of curvature and its gradient on networks of torchvision, and on LeNet, against goals.

``python benchmarks/bench_models.py`` measures and prints the table; ``--write`` also keeps it in
benchmarks/README.md. Times are CPU time of one thread, the minimum of several rounds in which all
steps of a network alternate in one process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial

import bench

UNIT = "training step"
VARIANTS = {"exact": {}, "stochastic": {"stochastic": True, "num_samples": 1}}

fresh = partial(bench.fresh, module="bench_models")


@dataclass(frozen=True)
class Case:
    """A network and the batch that it is measured on.

    Attributes:
        network: Name of a function of torchvision.models, or of ``bench.NETWORKS``.
        shape: Batch, channels, height and width.
        n_samples: Number of samples S.
        variants: Names of the ``VARIANTS`` to measure.
        goals: Largest multiples of a training step to aim at, by step.
    """

    network: str
    shape: tuple[int, int, int, int]
    n_samples: int
    variants: tuple[str, ...] = ("stochastic",)
    goals: dict[str, float] = field(default_factory=dict)


LENET_GOALS = {"exact: kron": 2, "exact: gradient": 4.5}
CASES = (
    Case("resnet18", (8, 3, 32, 32), 2, goals={"stochastic: gradient": 6}),
    Case("mobilenet_v2", (4, 3, 64, 64), 2, goals={"stochastic: kron": 4}),
    Case("shufflenet_v2_x0_5", (4, 3, 64, 64), 2),
    Case("LeNet", (100, 1, 28, 28), 8, ("exact", "stochastic"), LENET_GOALS),
    Case("LeNet", (100, 1, 28, 28), 31, ("exact", "stochastic"), LENET_GOALS),
)


def network(case: Case):
    """Return a network with random weights, in evaluation mode, its statistics those of noise."""
    import torch
    import torchvision

    if case.network in bench.NETWORKS:
        return bench.network(case.network).eval()
    net = getattr(torchvision.models, case.network)(num_classes=bench.CLASSES)
    with torch.no_grad():
        for _ in range(2):
            net(torch.rand(case.shape))
    return net.eval()


def times(index: int, rounds: int) -> dict[str, float]:
    """Return the smallest time of each step of a case, in seconds."""
    import torch

    import laplace_invariance as li
    from laplace_invariance.curvature import AugmentedGGN

    case = CASES[index]
    torch.manual_seed(0)
    model = li.InvariantModel(network(case), li.AffineImage(init=0.1), case.n_samples)
    x, y = torch.rand(case.shape), torch.randint(bench.CLASSES, case.shape[:1])
    steps = {UNIT: bench.training_step(model, [(x, y)])}
    for name in case.variants:
        curvature = AugmentedGGN(model, "classification", **VARIANTS[name])
        steps |= bench.curvature_steps(name, curvature, model, [(x, y)])
    return bench.fastest_alone(steps, rounds)


def cells(case: Case, label: str, found: dict[str, float]) -> list[str]:
    """Return a step as a multiple of the unit, and its goal if it has one."""
    goal = ""
    if label in case.goals:
        goal = f"{case.goals[label]:g}x"
    return [bench.multiple(found[label], found[UNIT]), goal]


def rows(case: Case, found: dict[str, float]) -> list[list[str]]:
    """Return a row for each variant of a case."""
    made = []
    for name in case.variants:
        shape = " x ".join(map(str, case.shape[1:]))
        row = [f"{case.network}, {shape}, B = {case.shape[0]}, S = {case.n_samples}", name]
        row.append(bench.multiple(found[UNIT], found[UNIT], is_unit=True))
        for step in ("kron", "gradient"):
            row += cells(case, f"{name}: {step}", found)
        made.append(row)
    return made


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    options = bench.parser(__doc__)
    options.add_argument("--networks", nargs="*", help="networks to measure (default: all)")
    arguments = options.parse_args()
    lines = []
    for index, case in enumerate(CASES):
        if arguments.networks and case.network not in arguments.networks:
            continue
        print(f"{case.network}, S = {case.n_samples} ...", file=sys.stderr, flush=True)
        lines += rows(case, fresh(f"times({index}, {arguments.rounds})"))
    header = ["", "loss Hessian", UNIT, "kron", "goal", "gradient", "goal"]
    text = (
        f"CPU time of one thread, minimum of {arguments.rounds} rounds, as a multiple of a "
        f"training step.\n\n{bench.table(header, lines)}"
    )
    print(text)
    if arguments.write:
        bench.write("models", text)


if __name__ == "__main__":
    main()
