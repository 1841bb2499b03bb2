"""Backends by name: in our functions, and as entry points."""

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from builders import invariant_network, labelled_points, plain_network, shuffled
from laplace.curvature import CurvlinopsGGN

import laplace_invariance as li
from laplace_invariance import curvature
from laplace_invariance.curvature import BACKENDS, check_model, find_backend

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_is_that_of_a_class(name):
    engine, _, kind = name.rpartition("-")
    backend = find_backend(name)
    assert backend.__name__.lower() == f"{engine}augmented{kind}"
    assert backend is getattr(curvature, backend.__name__)


def test_classes_are_found_as_they_are():
    assert find_backend(curvature.AugmentedEF) is curvature.AugmentedEF
    assert find_backend(CurvlinopsGGN) is CurvlinopsGGN


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no backend 'GGN'.*'ggn', 'ef', .*'asdl-ef'"):
        find_backend("GGN")
    for wrong in (None, torch.nn.Linear, curvature.AugmentedGGN(plain_network(), "regression")):
        with pytest.raises(TypeError, match=r"must be one of 'ggn', .* or a class"):
            find_backend(wrong)


def test_functions_take_names():
    """A name and its class give the same, and another backend gives something else."""
    loader = shuffled(labelled_points())
    model = plain_network()
    found = [
        li.marglik.log_evidence(model, loader, backend=backend)
        for backend in ("ggn", "asdl-ggn", "ef", curvature.AugmentedEF)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[2] == pytest.approx(found[3], rel=1e-6)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


def test_training_planning_and_checking_take_names():
    model = invariant_network()
    loader = shuffled(labelled_points())
    result = li.marglik_training(model, loader, backend="backpack-ef", n_epochs=1)
    assert type(result.la.backend) is curvature.BackPackAugmentedEF
    own = {"hessian_structure": "diag", "subset_of_weights": "all"}
    ef, ggn = (li.plan(model, loader, backend=name, **own).default for name in ("ef", "ggn"))
    assert (ef.name, ggn.name) == ("diag", "diag, one random column")  # EF has none to choose
    assert str(check_model(model, backend="asdl-ggn")) == str(check_model(model))


def test_functions_refuse_unknown_names():
    model, loader = plain_network(), shuffled(labelled_points())
    for function in (li.marglik_training, li.marglik.log_evidence, li.plan):
        with pytest.raises(ValueError, match="there is no backend 'hessian'"):
            function(model, loader, backend="hessian")
    with pytest.raises(ValueError, match="there is no backend 'hessian'"):
        check_model(model, backend="hessian")


def test_entry_points_are_all_backends():
    """Under the names of their classes, as laplace has backends of the short names itself."""
    _, _, rest = PYPROJECT.read_text().partition('[project.entry-points."laplace.backends"]\n')
    declared = re.findall(r'^(.+) = "(.+)"$', rest.partition("\n\n")[0], re.MULTILINE)
    expected = {
        "-".join(filter(None, [engine, "augmented", kind])): find_backend(name)
        for name in BACKENDS
        for engine, _, kind in [name.rpartition("-")]
    }
    loaded = {name: EntryPoint(name, value, "laplace.backends").load() for name, value in declared}
    assert loaded == expected
