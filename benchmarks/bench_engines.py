"""The engines side by side: time and memory of curvature by each, as multiples of the native one.

``python benchmarks/bench_engines.py`` measures and prints the tables; ``--write`` also keeps them in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable

from bench import BATCH, CLASSES, fastest, fresh, network, peak, resident, setting, table, write

ENGINES = ("", "BackPack", "Asdl")
LABELS = {"": "native", "BackPack": "BackPACK", "Asdl": "ASDL"}
STEPS = ("GGN kron", "GGN diag", "EF kron", "EF diag")
CELLS = tuple((name, n) for name in ("MLP", "LeNet") for n in (1, 8))


def step(name: str, n_samples: int, engine: str, what: str) -> Callable[[], object]:
    """Return what is measured: the curvature of one batch."""
    from laplace_invariance import curvature

    kind, structure = what.split()
    model, x, y = setting(name, n_samples)
    backend = getattr(curvature, f"{engine}Augmented{kind}")(model.eval(), "classification")
    return lambda: getattr(backend, structure)(x, y, N=BATCH)


def times(name: str, n_samples: int, what: str, rounds: int) -> dict[str, float]:
    return fastest({engine: step(name, n_samples, engine, what) for engine in ENGINES}, rounds)


def memory(name: str, n_samples: int, engine: str, what: str) -> float:
    """Return the peak memory above the start, in MB."""
    run = step(name, n_samples, engine, what)
    start = resident()
    run()
    return peak() - start


def stock_times(name: str, rounds: int) -> dict[str, float]:
    """Return the times of Kronecker curvature of a plain network, by our engines and by laplace's own backends."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds of which the minimum is taken"
    )
    parser.add_argument(
        "--write", action="store_true", help="replace the tables in benchmarks/README.md"
    )
    arguments = parser.parse_args()
    header = ["", *(f"{name}, S = {n}" for name, n in CELLS)]
    timed, sized = [], []
    for what in STEPS:
        call = f"{what!r}, {arguments.rounds})"
        seconds = {
            cell: fresh(f"times({cell[0]!r}, {cell[1]}, {call}", "bench_engines") for cell in CELLS
        }
        for engine in ENGINES:
            ratios = [f"{seconds[cell][engine] / seconds[cell]['']:.2f}x" for cell in CELLS]
            native = [f"{seconds[cell][''] * 1e3:.0f} ms" for cell in CELLS]
            timed.append([f"{what}, {LABELS[engine]}", *(ratios if engine else native)])
    for engine in ENGINES:
        values = [
            fresh(f"memory({name!r}, {n}, {engine!r}, 'GGN kron')", "bench_engines")
            for name, n in CELLS
        ]
        sized.append([f"GGN kron, {LABELS[engine]}", *(f"{value:.0f} MB" for value in values)])
    plain = {
        name: fresh(f"stock_times({name!r}, {arguments.rounds})", "bench_engines")
        for name in ("MLP", "LeNet")
    }
    stock = []
    for label in plain["MLP"]:
        ratios = [f"{plain[name][label] / plain[name]['native']:.2f}x" for name in plain]
        stock.append([label, *ratios])
    text = "\n\n".join(
        [
            f"Two threads, batch {BATCH}, minimum of {arguments.rounds} rounds, as a multiple of the native engine; peak memory "
            "above the start.",
            table(header, timed + sized),
            "Kronecker curvature of the plain network, without samples, as a multiple of the native engine:",
            table(["GGN kron", *plain], stock),
        ]
    )
    print(text)
    if arguments.write:
        write("engines", text)


if __name__ == "__main__":
    main()
