"""Modules that have moved still work, with a warning."""

import importlib
import sys

import pytest

from laplace_invariance import datasets

MODULES = {
    "laplace_invariance.quadrants": ("framed", "quadrants"),
    "laplace_invariance.pairs": ("HiddenShifts", "fourier_code"),
}


@pytest.mark.parametrize(("module", "names"), MODULES.items(), ids=MODULES)
def test_old_modules_have_their_names_and_warn(monkeypatch, module, names):
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{module} is deprecated.*datasets"):
        old = importlib.import_module(module)
    for name in names:
        assert getattr(old, name) is getattr(datasets, name)
