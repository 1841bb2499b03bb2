"""The functions that one evidence and its gradient pass through: ``python benchmarks/walk.py``.

Six inputs in one batch, two linear layers, four samples: stock ``Laplace`` is fitted and its
evidence differentiated while ``sys.setprofile`` watches. Every function of the package counts
once, by its code object. Lambdas count; comprehensions and generator expressions, which are part
of the function around them, do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import laplace
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN

PACKAGE = Path(li.__file__).resolve().parent
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def walk() -> Callable[[], None]:
    """Return the function that is watched: a fit of stock Laplace, and a backward pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), n_samples=4)
    loader = DataLoader(TensorDataset(torch.randn(6, 2), torch.arange(6) % 3), batch_size=6)
    settings = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": AugmentedGGN}
    la = laplace.Laplace(model, "classification", **settings)

    def fit_and_differentiate() -> None:
        la.fit(loader)
        (-la.log_marginal_likelihood()).backward()

    return fit_and_differentiate


def functions_called(call: Callable[[], object]) -> dict[CodeType, int]:
    """Return the code of every function of the package that runs during a call, and how often."""
    counts: dict[CodeType, int] = {}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code] = counts.get(frame.f_code, 0) + 1

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {
        code: n
        for code, n in counts.items()
        if PACKAGE in Path(code.co_filename).parents and code.co_name not in COMPREHENSIONS
    }


def by_file(counts: dict[CodeType, int]) -> dict[str, list[str]]:
    """Return the functions of each file, by its path inside the package, in the file's order."""
    files: dict[str, list[str]] = {}
    for code in sorted(counts, key=lambda code: (code.co_filename, code.co_firstlineno)):
        path = str(Path(code.co_filename).relative_to(PACKAGE))
        files.setdefault(path, []).append(f"{code.co_firstlineno} {code.co_name}")
    return files


def main() -> None:
    """Print the number of functions and of files, and all their names."""
    counts = functions_called(walk())
    files = by_file(counts)
    print(f"{len(counts)} functions in {len(files)} files, {sum(counts.values())} calls")
    for path, functions in files.items():
        print(f"\n{path} ({len(functions)})")
        for function in functions:
            print(f"  {function}")


if __name__ == "__main__":
    main()
