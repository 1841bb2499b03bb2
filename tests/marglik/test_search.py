"""The search for ranges to start from: what is tried, how it is compared, what it leaves behind."""

import copy
import math

import pytest
import torch
import tqdm
from builders import invariant_network, labelled_points, shuffled, training_settings, without_times
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance import datasets
from laplace_invariance.marglik import MAP, Augerino, Search
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search.candidates import Space
from laplace_invariance.marglik.search.pilots import Pilots

SHORT = {"n_epochs": 2, "optimizer_kwargs": {"lr": 1e-2}}
SMALL = Search(n_steps=3, keep=2, n_rounds=1)


def pilots_of(model, loader, n_steps=3, n_examples=1000, **changes):
    settings = training_settings(loader, optimizer_kwargs={"lr": 1e-2}, **changes)
    states = RandomStates(model, [loader])
    return Pilots(model, settings, states, n_steps, n_samples=2, n_examples=n_examples)


def state_of(model):
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    return [tensor.clone() for tensor in tensors]


# What is tried.


def test_candidates_come_from_every_augmentation():
    inner = li.InvariantModel(nn.Linear(3, 2), li.AffinePoints(3, learn="z_rotation"), 2)
    model = li.InvariantModel(inner, li.AffinePoints(3, learn=("x_scale", "y_scale")), 2)
    space = Space(model)
    first = [dict(candidate.widths) for candidate in space.first()]
    scales, rotation = (
        ("augmentation.x_scale", "augmentation.y_scale"),
        "net.augmentation.z_rotation",
    )
    assert {} in first
    assert dict.fromkeys(scales, 0.6) in first
    assert {rotation: pytest.approx(0.75 * math.pi)} in first
    everything = {**dict.fromkeys(scales, 0.25), rotation: pytest.approx(math.pi / 4)}
    assert everything in first
    space.put(space.candidate({rotation: 1.0}))
    assert inner.augmentation.magnitudes()["z_rotation"] == 1.0
    assert not model.augmentation.eta.any()


def test_neighbours_resize_close_and_open():
    space = Space(li.InvariantModel(nn.Flatten(), li.AffineImage(), 2))
    pair = {"x_translation": 0.6, "y_translation": 0.6}
    found = [dict(c.widths) for c in space.neighbours(space.candidate(pair))]
    assert dict.fromkeys(pair, pytest.approx(0.9)) in found
    assert dict.fromkeys(pair, pytest.approx(0.4)) in found
    assert {"x_translation": 0.6} in found
    others = [space.candidate(widths) for widths in ({"rotation": 2.0}, {"shear": 0.25}, pair)]
    grown = [dict(c.widths) for c in space.grown(space.candidate(pair), others)]
    assert grown == [pair | {"rotation": 2.0}, pair | {"shear": 0.25}]
    wide = space.neighbours(space.candidate({"rotation": 3.0}))
    assert max(dict(c.widths).get("rotation", 0) for c in wide) == pytest.approx(math.pi)


# How they are compared.


def test_pilots_differ_in_their_ranges_alone():
    model, loader = invariant_network(), shuffled(labelled_points())
    pilots = pilots_of(model, loader)
    nothing, turned = pilots.space.candidate({}), pilots.space.candidate({"rotation": 1.0})
    before = state_of(model)
    first = pilots.evidence((turned,))
    pilots.evidence((nothing,))
    second = pilots.evidence((turned, turned))
    other = pilots.evidence((turned, nothing))
    pilots.forget([])
    torch.manual_seed(7)  # whatever has been drawn meanwhile
    assert pilots.evidence((turned, nothing)) == other != second  # trains the first stage again
    assert pilots.evidence((turned, turned)) == second  # goes on from where it was
    assert pilots.evidence((turned,)) == first
    for old, new in zip(before, state_of(model), strict=True):
        assert torch.equal(old, new)
    assert model.augmentation.eta.requires_grad


def test_a_pilot_has_the_evidence_of_the_network_it_trains():
    model, loader = invariant_network(draws="grid"), shuffled(labelled_points())
    pilots = pilots_of(model, loader, backend_kwargs={"stochastic": False})
    candidate = pilots.space.candidate({"rotation": 1.0})
    found = pilots.evidence((candidate,))
    state = pilots._states[candidate,]
    trained = copy.deepcopy(model)
    trained.load_state_dict(state["run"]["model"])
    assert trained.augmentation.magnitudes()["rotation"] == 1.0
    assert not torch.equal(trained.net[0].weight, model.net[0].weight)
    assert found == pytest.approx(li.log_evidence(trained, loader, n_samples=6) / 30, rel=1e-4)


def test_some_examples_stand_for_all():
    model, data = invariant_network(), labelled_points()
    many = TensorDataset(*(tensor.repeat(5, *[1] * (tensor.ndim - 1)) for tensor in data.tensors))
    loader = shuffled(many, 50)
    pilots = pilots_of(model, loader, n_examples=60)
    assert sum(len(y) for _, y in pilots._loader) == 60
    assert pilots.chance() > -math.log(3)
    assert -3 < pilots.evidence((pilots.space.candidate({}),)) < 0


def test_none_is_judged_below_chance():
    """Labels that cannot be learnt in a few steps: candidates are trained for longer first."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 2), torch.randint(3, (60,))
    loader = shuffled(TensorDataset(x, y), 20)
    model = li.InvariantModel(nn.Linear(2, 3), li.AffinePoints(learn="rotation"), 2)
    with pytest.warns(UserWarning, match="better than guessing"):
        result = li.marglik_training(
            model, loader, search=Search(n_steps=1), **SHORT | {"n_epochs": 12}
        )
    assert not result.search.is_clear
    # all up to a quarter of the 36 steps of training, then twice, and the last two four times
    assert {trial.n_steps for trial in result.search.trials} == {16, 32}


# What it finds, and leaves behind.


def test_guessing_is_tempered_as_the_evidence_is():
    data = labelled_points()
    loader = shuffled(data)
    model = invariant_network()
    plain, tempered = (
        pilots_of(model, loader, temperature=temperature).chance() for temperature in (1.0, 4.0)
    )
    assert tempered == pytest.approx(plain / 4)


def test_an_interrupted_pilot_leaves_the_model_as_it_was(monkeypatch):
    model = invariant_network()
    pilots = pilots_of(model, shuffled(labelled_points()))
    before = state_of(model)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(pilots, "_assess", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pilots.evidence((Space(model).candidate({"rotation": 1.0}),))
    for tensor, kept in zip(state_of(model), before, strict=True):
        assert torch.equal(tensor, kept)


def test_a_search_finds_the_range_that_a_start_cannot_leave():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    split = datasets.load("digits", n_train=300)
    x = datasets.transformed(split.x_train, {"rotation": math.radians(70)})
    loader = DataLoader(TensorDataset(x, split.y_train), batch_size=100, shuffle=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))
    augmentation = li.AffineImage()
    model = li.InvariantModel(net, augmentation, 4)
    result = li.marglik_training(
        model, loader, search=True, n_epochs=1, optimizer_kwargs={"lr": 5e-3}
    )
    assert set(result.search.best.ranges) == {"rotation"}
    assert 0.7 < result.search.best.ranges["rotation"] < 2.4
    assert result.search.is_clear
    assert all(trial.loss > -0.05 for trial in result.search.trials)
    nothing = next(trial for trial in result.search.trials if not trial.ranges)
    assert nothing.loss > 0.03
    assert "nothing" in str(result.search)


def test_what_is_close_behind_by_other_ranges_is_improved_as_well(monkeypatch):
    """Known evidences: a shift is ahead of a rotation at first, but not of a wider one."""
    model = li.InvariantModel(nn.Flatten(), li.AffineImage(learn=("x_translation", "rotation")), 2)
    quarter = math.pi / 4

    def evidence(self, pilot):
        widths = dict(pilot[-1].widths)
        values = {0.25: -1.0, quarter: -1.03, 1.5 * quarter: -0.9}
        only = [values.get(width, -2.0) for width in widths.values()]
        return only[0] if len(only) == 1 else -2.0

    monkeypatch.setattr(Pilots, "evidence", evidence)
    monkeypatch.setattr(Pilots, "state_of", lambda self, pilot: {})
    monkeypatch.setattr(Pilots, "chance", lambda self: -3.0)
    images = TensorDataset(torch.randn(6, 1, 3, 3), torch.arange(6) % 3)
    model = nn.Sequential(model, nn.Linear(9, 3))
    settings = training_settings(shuffled(images))
    states = RandomStates(model, [])
    priors = Priors(model, settings.priors, 1.0, has_noise=False)
    found = Search().run(model, settings, states, [], lambda: None, priors)
    assert found.best.ranges == {"rotation": pytest.approx(1.5 * quarter)}
    assert model[0].augmentation.magnitudes()["rotation"] == pytest.approx(1.5 * quarter)


def test_training_goes_on_as_if_it_had_started_there():
    torch.manual_seed(0)
    data = labelled_points()
    first = invariant_network()
    second = copy.deepcopy(first)
    state = torch.get_rng_state()
    searched = li.marglik_training(first, shuffled(data), search=SMALL, **SHORT)
    second.augmentation.open_(searched.search.best.ranges)
    torch.set_rng_state(state)
    started = li.marglik_training(second, shuffled(data), **SHORT)
    assert without_times(searched.history) == without_times(started.history)
    assert searched.evidence == started.evidence


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch):
    torch.manual_seed(0)
    data = labelled_points()
    whole_model = invariant_network()
    model = copy.deepcopy(whole_model)
    state = torch.get_rng_state()
    whole = li.marglik_training(whole_model, shuffled(data), search=SMALL, **SHORT)
    called, original = [], Pilots.evidence

    class Killed(Exception):
        pass

    def counted(self, pilot):
        called.append(pilot)
        if len(called) == 4:
            raise Killed
        return original(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", counted)
    start = copy.deepcopy(model)
    arguments = {"search": SMALL, "checkpoint": tmp_path / "run.pt", "resume": True, **SHORT}
    torch.set_rng_state(state)
    with pytest.raises(Killed):
        li.marglik_training(model, shuffled(data), **arguments)
    torch.manual_seed(5)
    resumed = li.marglik_training(start, shuffled(data), **arguments)
    assert resumed.search == whole.search
    done, killed, rest = called[:3], called[3], called[4:]
    assert killed == rest[0]
    assert not set(done) & set(rest)
    assert resumed.evidence == whole.evidence
    again = li.marglik_training(start, shuffled(data), **arguments)
    assert again.search == whole.search


BAD = {
    "nothing to learn": (
        {"model": li.InvariantModel(nn.Linear(2, 3), li.AffinePoints(init=0.1).frozen(), 2)},
        ValueError,
        "no range to search",
    ),
    "no augmentation": ({"model": nn.Linear(2, 3)}, ValueError, "no range to search"),
    "Augerino": ({"objective": Augerino(0.1)}, ValueError, "a search compares evidences"),
    "MAP": ({"objective": MAP()}, ValueError, "a search compares evidences"),
    "one class": (
        {"train_loader": shuffled(TensorDataset(torch.randn(20, 2), torch.ones(20).long()))},
        ValueError,
        "all targets are 1",
    ),
    "text": ({"search": "yes"}, TypeError, "search must be True, False, None or a Search"),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_searched_is_refused(tmp_path, change, error, message):
    arguments = {"model": invariant_network(), "search": True, **SHORT}
    arguments |= {"train_loader": shuffled(labelled_points()), "checkpoint": tmp_path / "run.pt"}
    with pytest.raises(error, match=message):
        li.marglik_training(**arguments | change)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["n_steps", "keep", "n_rounds", "oversampling", "n_examples"])
def test_options_are_checked(name):
    with pytest.raises(ValueError, match=name):
        Search(**{name: 0})


@pytest.mark.parametrize("name", ["keep", "n_rounds", "oversampling", "margin", "held"])
def test_options_are_numbers(name):
    with pytest.raises(TypeError, match=f"{name} must be a number, got None"):
        Search(**{name: None})


def test_widths_outside_their_limits_are_refused():
    space = Space(invariant_network())
    with pytest.raises(ValueError, match=r"rotation must be between 0 and 3\.142"):
        space.candidate({"rotation": 3.5})
    with pytest.raises(ValueError, match="no range 'shear' to search"):
        space.candidate({"shear": 0.1})


def test_progress_has_a_total_that_comes_true(monkeypatch):
    """What is left is estimated from the start, and known in the last stage."""
    seen = []

    class Bar(tqdm.tqdm):
        def update(self, n=1):
            seen.append((self.desc.removesuffix(": "), self.n + 1, self.total))
            return super().update(n)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    model, loader = invariant_network(), shuffled(labelled_points())
    li.marglik_training(model, loader, search=SMALL, progress_bar=True, **SHORT)
    stages = list(dict.fromkeys(words for words, _, _ in seen if words.startswith("search")))
    assert stages[0] == "search: first"
    assert stages[-1] == "search: last two"
    searching = [(n, total) for words, n, total in seen if words.startswith("search")]
    assert all(n <= total for n, total in searching)
    assert searching[-1] == (len(searching), len(searching))
