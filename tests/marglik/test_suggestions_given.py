"""``suggest``: what may be given, and what is refused before anything is trained."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import laplace_invariance as li
from laplace_invariance.augmentations import BoxAugmentation
from laplace_invariance.layers import ResidualPathway
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.search.candidates import Space
from laplace_invariance.marglik.suggestions import candidates_of

QUICK = {"n_samples": 4, "n_steps": 4, "n_repeats": 2, "margin": 9.0}
ROTATION = li.AffinePoints(learn="rotation")
X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.norm(dim=1) > 1.1).long()


def suggested(**changes):
    torch.manual_seed(0)
    given = {
        "model": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)),
        "loader": DataLoader(TensorDataset(X, Y), 20),
        "augmentation": ROTATION,
        "ranges": {"rotation": 1.0},
    }
    return li.suggest(**given | QUICK | changes)


@pytest.fixture
def untrained(monkeypatch):
    """Whatever is refused is refused before training."""
    monkeypatch.setattr(Trainer, "train_on", lambda *_: pytest.fail("something was trained"))


# Ranges.


@pytest.mark.parametrize(
    "width",
    [
        np.float32(1),
        np.float64(1),
        np.array(1.0),
        torch.tensor(1.0),
        torch.tensor([1.0]),
        np.array([1.0]),
        [torch.tensor(1.0)],
        [np.float32(1)],
        1,
        range(1, 2),
        {1.0},
    ],
)
def test_widths_may_be_numbers_of_any_kind(width):
    candidates = candidates_of(ROTATION, {"rotation": width})
    assert candidates == candidates_of(ROTATION, {"rotation": 1.0})
    assert type(candidates[1].widths[0][1]) is float


def test_names_of_a_tuple_may_have_any_order():
    augmentation = li.AffinePoints()
    one, other = (
        candidates_of(augmentation, {names: 0.3})
        for names in (("x_scale", "y_scale"), ("y_scale", "x_scale"))
    )
    assert one == other


@pytest.mark.parametrize(
    ("ranges", "error", "match"),
    [
        ({"rotation": None}, TypeError, "width of rotation must be a number, or .*, got None"),
        ({"rotation": "wide"}, TypeError, "width of rotation must be a number, or .*, got 'wide'"),
        ({"rotation": [1.0, "wide"]}, TypeError, "width of rotation must be a number"),
        ({"rotation": [[1.0]]}, TypeError, "width of rotation must be a number"),
        ({"rotation": True}, TypeError, "width of rotation must be a number"),
        ({"rotation": 1j}, TypeError, "width of rotation must be a number"),
        ({"rotation": []}, ValueError, "no width for rotation"),
        ({"rotation": math.inf}, ValueError, "rotation must be between 0 and 3.142"),
        ({"rotation": 1000}, ValueError, "rotation must be between 0 and 3.142"),
        ({"shear": math.inf}, ValueError, "the width of shear must be finite, got inf"),
        ({"shear": math.nan}, ValueError, "shear must be between 0 and inf"),
        ({"shear": 1000}, ValueError, "shear 1000.00 is too wide: transformed inputs are not fin"),
        ({"shear": -1}, ValueError, "shear must be between 0 and inf"),
        ({"shear": 0}, ValueError, "closes shear, and nothing is always among the candidates"),
        ({(): 0.3}, ValueError, "a tuple without names"),
        ({("shear", "shear"): 0.3}, ValueError, "shear, shear twice"),
        ({1: 0.3}, TypeError, "names, or tuples of names, as keys, got 1"),
        ({("shear", 1): 0.3}, TypeError, r"as keys, got \('shear', 1\)"),
        ({None: 0.3}, TypeError, "as keys, got None"),
        (["rotation"], TypeError, r"ranges must map names to widths, .*, got \['rotation'\]"),
        ("rotation", TypeError, "ranges must map names to widths"),
        ({}, ValueError, "names nothing to try; leave it out to try everything"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(untrained, ranges, error, match):
    with pytest.raises(error, match=match):
        suggested(augmentation=li.AffinePoints(), ranges=ranges)


# Augmentations.


class Turned(li.AffinePoints):
    """Rotations about a rotation, which cannot be closed."""

    def transform_by(self, x, coefficients):
        return super().transform_by(x.flip(-1), coefficients)


@pytest.mark.parametrize(
    ("augmentation", "match"),
    [
        (li.AffinePoints(learn="rotation", init={"shear": 0.5}), "not learnt: shear 0.5; they"),
        (li.AffinePoints(learn="rotation", init={"shear": 0.01}), "not learnt: shear 0.01; they"),
        (
            li.Compose(li.AffinePoints(init=0.2).frozen(), li.AffinePoints(learn="rotation")),
            "not learnt: x_translation 0.2, y_translation 0.2, rotation 0.2, ",
        ),
        (
            li.AffinePoints(learn="rotation", constraint="softplus"),
            r"closed \(rotation 0.001\), so that there is no network alone .*'softplus'",
        ),
        (Turned(learn="rotation"), r"closed \(Turned\)"),
    ],
)
def test_augmentations_that_cannot_be_closed_are_refused(untrained, augmentation, match):
    with pytest.raises(ValueError, match=match):
        suggested(augmentation=augmentation, ranges=None)


class Cropped(BoxAugmentation):
    """Loses a coordinate, whatever the range."""

    def __init__(self):
        super().__init__(["shift"], [math.inf])

    def transform_by(self, x, coefficients):
        return x[:, None, :1] + coefficients


def test_augmentations_to_another_shape_are_refused(untrained):
    with pytest.raises(ValueError, match=r"closed \(Cropped\)"):
        suggested(augmentation=Cropped(), ranges=None)


def test_widths_are_those_that_constraints_allow(untrained):
    bounded = li.AffinePoints(learn="shear", constraint="tanh")
    with pytest.raises(ValueError, match=r"shear must be between 0 and 0.95, its limit, got 2.0"):
        suggested(augmentation=bounded, ranges={"shear": 2.0})


def test_what_a_constraint_does_not_allow_is_not_tried_next():
    bounded = li.AffinePoints(learn="shear", constraint="tanh")
    space = Space(bounded)
    assert space.can_widen(space.candidate({"shear": 0.8}))
    assert not space.can_widen(space.candidate({"shear": 0.94}))
    found = suggested(augmentation=bounded, ranges={"shear": (0.3, 0.94)}, margin=0.0)
    assert all(one.ranges["shear"] <= 0.951 for one in found.rows)


def test_a_start_of_learnt_ranges_is_no_part_of_the_network_alone():
    started = li.AffinePoints(learn="rotation", init=0.4, correlated=True)
    assert suggested(augmentation=started) == suggested()


def test_all_elements_of_a_finite_group_may_be_one():
    x = torch.rand(20, 1, 5, 5)
    found = suggested(
        model=nn.Sequential(nn.Flatten(), nn.Linear(25, 2)),
        loader=DataLoader(TensorDataset(x, torch.arange(20) % 2), 10),
        augmentation=li.FiniteGroup(["quarter_turn"]),
        ranges=None,
    )
    assert [one.ranges for one in found.rows] == [{"quarter_turn": 1.0}]


@pytest.mark.parametrize("augmentation", [ROTATION.frozen(), li.FiniteGroup([])])
def test_paths_are_no_ranges(untrained, augmentation):
    paths = nn.Sequential(ResidualPathway(nn.Linear(2, 8), nn.Linear(2, 8)), nn.Linear(8, 2))
    with pytest.raises(ValueError, match="no range to try: the augmentation learns none") as raised:
        suggested(model=paths, augmentation=augmentation, ranges=None)
    assert "Pathway" not in str(raised.value)


def test_networks_may_have_paths():
    paths = nn.Sequential(ResidualPathway(nn.Linear(2, 8), nn.Linear(2, 8)), nn.Linear(8, 2))
    assert math.isfinite(suggested(model=paths).rows[0].gain)


# Mappings.


class Mapped(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"points": X[index], "ones": torch.ones(2), "kinds": Y[index]}


class OfPoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, batch):
        return self.net(batch["points"] * batch["ones"])


def test_inputs_may_be_mappings():
    torch.manual_seed(0)
    keys = {"dict_key_x": "points", "dict_key_y": "kinds"}
    found = suggested(model=OfPoints(), loader=DataLoader(Mapped(), 20), **keys)
    plain = suggested()
    assert found.rows[0].words == plain.rows[0].words
    assert found.rows[0].gains == pytest.approx(plain.rows[0].gains, abs=1e-12)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"dict_key_y": "kinds"}, "no tensor 'input_ids' among 'points', 'ones', 'kinds'; dict_k"),
        ({"dict_key_x": "points"}, "no tensor 'labels' among .*; dict_key_y= says which it is"),
        (
            {"dict_key_x": "points", "dict_key_y": "kinds", "augmentation": None},
            r"must be images .* got \[20, 2\]",
        ),
    ],
)
def test_mappings_without_their_keys_are_refused(untrained, keys, match):
    with pytest.raises(ValueError, match=match):
        suggested(model=OfPoints(), loader=DataLoader(Mapped(), 20), **keys)


# Data, networks and options.


FLAT = nn.Sequential(nn.Linear(2, 2).double(), nn.Flatten(0))


def loader_of(*tensors):
    return DataLoader(TensorDataset(*tensors), 20)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"loader": loader_of(X, 3 * Y)}, "label 3 is beyond the 2 outputs"),
        ({"loader": loader_of(X, -Y)}, "the label -1 is no class"),
        ({"loader": loader_of(X, 0 * Y)}, "all targets are 0"),
        ({"loader": loader_of(X, Y.float())}, r"targets must be classes, .* got torch.float32"),
        ({"loader": loader_of(X, nn.functional.one_hot(Y))}, r"must be classes, .* \[20, 2\]"),
        (
            {"loader": loader_of(X, X[:, 0]), "likelihood": "regression"},
            r"of the shape of outputs, \[n, 2\], got torch.float64 \[20\]",
        ),
        (
            {"loader": loader_of(X, torch.stack([Y, Y], 1)), "likelihood": "regression"},
            "targets of a regression must be floating-point",
        ),
        ({"loader": loader_of(X, X / 0), "likelihood": "regression"}, "targets must be finite"),
        (
            {"model": nn.Sequential(nn.Linear(2, 2).double(), nn.Flatten(0))},
            r"\[batch, outputs\], got \[16",
        ),
    ],
)
def test_data_that_make_no_sense_are_refused(untrained, changes, match):
    with pytest.raises(ValueError, match=match):
        suggested(**changes)


@pytest.mark.parametrize("name", ["n_steps", "n_repeats", "n_examples", "margin"])
def test_numbers_are_not_none(untrained, name):
    with pytest.raises(TypeError, match=f"{name} must be a number, got None"):
        suggested(**{name: None})


@pytest.mark.parametrize(
    "name",
    ["hessian_structure", "backend", "prior_structure", "subset_of_weights", "optimizer_cls"],
)
def test_options_are_not_none(untrained, name):
    with pytest.raises(TypeError, match=f"{name} must not be None; leave it out"):
        suggested(**{name: None})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"temperature": 2.0},
            "no option 'temperature'; there are optimizer_cls, .*dict_key_y",
        ),
        (
            {"optimizer_cls": "adam"},
            "optimizer_cls must be a class of .*, got 'adam'",
        ),
        ({"optimizer_kwargs": 1e-3}, "optimizer_kwargs must be a dictionary, got 0.001"),
        ({"optimizer_kwargs": {"rate": 1e-3}}, "optimizer_kwargs do not fit Adam: .*'rate'"),
        ({"optimizer_kwargs": {"lr": "small"}}, "optimizer_kwargs do not fit Adam"),
        ({"backend_kwargs": 3}, "backend_kwargs must be a dictionary, got 3"),
        ({"model": torch.sin}, "model must be a torch module, got builtin"),
        ({"loader": loader_of(X, Y, Y)}, r"pairs of .*, got \['Tensor', 'Tensor', 'Tensor'\]"),
        ({"loader": loader_of(X)}, r"pairs of .*, got \['Tensor'\]"),
    ],
)
def test_what_is_of_another_kind_is_refused(untrained, changes, match):
    with pytest.raises(TypeError, match=match):
        suggested(**changes)
