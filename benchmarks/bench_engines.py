"""The engines side by side: time and memory of curvature by each, as multiples of the native one.

``python benchmarks/bench_engines.py`` measures and prints the tables; ``--write`` also keeps them
in benchmarks/README.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import bench
from bench import BATCH, CLASSES, fastest, network, peak, resident, setting, table

ENGINES = ("", "BackPack", "Asdl")
LABELS = {"": "native", "BackPack": "BackPACK", "Asdl": "ASDL"}
STEPS = ("GGN kron", "GGN diag", "EF kron", "EF diag")
CELLS = (("MLP", 1), ("MLP", 8), ("LeNet", 1), ("LeNet", 8))  # network, samples

fresh = partial(bench.fresh, module="bench_engines")


def step(name: str, n_samples: int, engine: str, what: str) -> Callable[[], object]:
    """Return the function to measure: the curvature of one batch."""
    from laplace_invariance import curvature

    kind, structure = what.split()
    model, x, y = setting(name, n_samples)
    backend = getattr(curvature, f"{engine}Augmented{kind}")(model.eval(), "classification")
    return lambda: getattr(backend, structure)(x, y, N=BATCH)


def times(name: str, n_samples: int, what: str, rounds: int) -> dict[str, float]:
    """Return the smallest time of each engine, in seconds."""
    return fastest({engine: step(name, n_samples, engine, what) for engine in ENGINES}, rounds)


def memory(name: str, n_samples: int, engine: str, what: str) -> float:
    """Return the peak memory above the start, in MB."""
    run = step(name, n_samples, engine, what)
    start = resident()
    run()
    return peak() - start


def stock_times(name: str, rounds: int) -> dict[str, float]:
    """Return times of Kronecker curvature of a plain network, by our engines and by laplace's."""
    from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN

    from laplace_invariance import curvature

    warnings.simplefilter("ignore")
    _, x, y = setting(name, 1)
    ours = {LABELS[engine]: getattr(curvature, f"{engine}AugmentedGGN") for engine in ENGINES}
    stock = {f"laplace {cls.__name__}": cls for cls in (CurvlinopsGGN, BackPackGGN, AsdlGGN)}

    def run(cls: type) -> Callable[[], object]:
        net = network(name).eval()  # one for each, since some leave hooks on it
        net.output_size = CLASSES
        backend = cls(net, "classification")
        return lambda: backend.kron(x, y, N=BATCH)

    return fastest({label: run(cls) for label, cls in (ours | stock).items()}, rounds)


def time_rows(what: str, rounds: int) -> list[list[str]]:
    """Measure a step in all cells; the first row has times, the others multiples of it."""
    seconds = [fresh(f"times({name!r}, {n}, {what!r}, {rounds})") for name, n in CELLS]
    rows = []
    for engine in ENGINES:
        if engine:
            cells = [f"{found[engine] / found['']:.2f}x" for found in seconds]
        else:
            cells = [f"{found[''] * 1e3:.0f} ms" for found in seconds]
        rows.append([f"{what}, {LABELS[engine]}", *cells])
    return rows


def memory_rows(what: str) -> list[list[str]]:
    """Measure the memory of a step in all cells, by each engine."""
    rows = []
    for engine in ENGINES:
        found = [fresh(f"memory({name!r}, {n}, {engine!r}, {what!r})") for name, n in CELLS]
        rows.append([f"{what}, {LABELS[engine]}", *(f"{value:.0f} MB" for value in found)])
    return rows


def stock_table(rounds: int) -> str:
    """Measure plain networks, and return multiples of the native engine as a table."""
    plain = {name: fresh(f"stock_times({name!r}, {rounds})") for name in ("MLP", "LeNet")}
    rows = []
    for label in plain["MLP"]:
        ratios = [f"{plain[name][label] / plain[name]['native']:.2f}x" for name in plain]
        rows.append([label, *ratios])
    return table(["GGN kron", *plain], rows)


def main() -> None:
    """Measure, print the tables, and write them if asked to."""
    arguments = bench.parser(__doc__).parse_args()
    rows = []
    for what in STEPS:
        rows += time_rows(what, arguments.rounds)
    rows += memory_rows("GGN kron")
    text = "\n\n".join(
        [
            f"Two threads, batch {BATCH}, minimum of {arguments.rounds} rounds, "
            "as a multiple of the native engine;\npeak memory above the start.",
            table(["", *(f"{name}, S = {n}" for name, n in CELLS)], rows),
            "Kronecker curvature of the plain network, without samples, "
            "as a multiple of the native engine:",
            stock_table(arguments.rounds),
        ]
    )
    print(text)
    if arguments.write:
        bench.write("engines", text)


if __name__ == "__main__":
    main()
