"""The functions that one evidence and its gradient pass through: ``python benchmarks/walk.py``.

Six inputs in one batch, two linear layers, four samples: stock ``Laplace`` is fitted and its
evidence differentiated while ``sys.setprofile`` watches. Every function of the package is
counted once, by its code object; lambdas, comprehensions and generator expressions count too.
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


def walk() -> None:
    """Fit stock Laplace with our backend, and differentiate the evidence in the hyperparameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), n_samples=4)
    loader = DataLoader(TensorDataset(torch.randn(6, 2), torch.arange(6) % 3), batch_size=6)
    la = laplace.Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )

    def fit_and_differentiate() -> None:
        la.fit(loader)
        (-la.log_marginal_likelihood()).backward()

    return fit_and_differentiate


def functions_called(call: Callable[[], object]) -> set[CodeType]:
    """Return the code of every function of the package that runs during a call."""
    found: set[CodeType] = set()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {code for code in found if PACKAGE in Path(code.co_filename).parents}


def by_file(codes: set[CodeType]) -> dict[str, list[str]]:
    """Return the functions of each file, by its path inside the package, in the file's order."""
    files: dict[str, list[str]] = {}
    for code in sorted(codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
        path = str(Path(code.co_filename).relative_to(PACKAGE))
        files.setdefault(path, []).append(f"{code.co_firstlineno} {code.co_name}")
    return files


def main() -> None:
    """Print the number of functions and of files, and all their names."""
    codes = functions_called(walk())
    files = by_file(codes)
    print(f"{len(codes)} functions in {len(files)} files")
    for path, functions in files.items():
        print(f"\n{path} ({len(functions)})")
        print("".join(f"  {function}\n" for function in functions), end="")


if __name__ == "__main__":
    main()
