"""The search over starts of free paths: what is tried and put in, and what it leaves behind."""

import copy

import pytest
import torch
from builders import shuffled, training_settings, without_times
from torch import nn
from torch.utils.data import TensorDataset

import laplace_invariance as li
from laplace_invariance.layers import (
    FactoredLinear2d,
    ResidualPathway,
    free_paths,
    rescale_paths,
    start_precisions,
)
from laplace_invariance.marglik import Search
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search import PathSpace, space_of
from laplace_invariance.marglik.search.pilots import Pilots

SHORT = {"n_epochs": 2, "optimizer_kwargs": {"lr": 1e-2}}
SMALL = Search(n_steps=2, keep=2, n_rounds=1)


def network(scale=1.0):
    first = ResidualPathway(
        conv=nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"),
        f_fc=FactoredLinear2d(1, 2, 4, scale=scale),
    )
    second = ResidualPathway(
        conv=nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        f_fc=FactoredLinear2d(2, 3, 4, scale=scale),
    )
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), pool, nn.Flatten(), nn.Linear(3, 2))


def images(n=20):
    return TensorDataset(torch.randn(n, 1, 4, 4), torch.randint(2, (n,)))


def lit_places(n=100):
    """A bright pixel, labelled by the half that it is in; convolutions cannot tell."""
    place = torch.randint(16, (n,))
    x = 0.1 * torch.randn(n, 16)
    x[torch.arange(n), place] += 3
    return TensorDataset(x.view(n, 1, 4, 4), (place >= 8).long())


def space_for(model, **changes):
    return space_of(model, training_settings(shuffled(images()), **changes))


# What is tried.


def test_starts_are_tried_in_all_layers_and_in_the_last():
    space = space_for(network())
    assert isinstance(space, PathSpace)
    first = [str(candidate) for candidate in space.first()]
    assert first == ["off", "closed", "half open", "open", "0 closed, 2 open"]
    assert space.n_steps(7) == 70
    assert space.n_steps(200) == 400  # on much data steps count, not epochs


def test_neighbours_close_and_open_the_layers_at_edges():
    layers = [ResidualPathway(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)) for _ in range(4)]
    space = space_for(nn.Sequential(*layers, nn.Flatten()))
    closed = space.candidate({})
    assert [str(found) for found in space.neighbours(closed)] == [
        "0 off, 1 to 3 closed",
        "0 half open, 1 to 3 closed",
        "0 to 2 closed, 3 off",
        "0 to 2 closed, 3 half open",
    ]
    late = space.candidate({"2": "open", "3": "open"})
    found = [str(candidate) for candidate in space.neighbours(late)]
    assert "0 closed, 1 half open, 2 to 3 open" in found
    assert "0 to 1 closed, 2 half open, 3 open" in found
    assert late.n_open == 2
    assert space.known(late.as_dict()) == late


def test_ranges_are_searched_first():
    averaged = li.InvariantModel(network(), li.AffineImage(learn="rotation"), 2)
    assert not isinstance(space_for(averaged), PathSpace)
    frozen = li.InvariantModel(network(), li.AffineImage(init=0.1).frozen(), 2)
    assert isinstance(space_for(frozen), PathSpace)


# What is put in.


@pytest.mark.parametrize("structure", ["layerwise", "path", "diag"])
def test_put_sets_weights_and_precisions(structure):
    model = network()
    settings = training_settings(
        shuffled(images()), prior_structure=structure, prior_prec_init={r"6\..*": 5.0}
    )
    priors = Priors(model, settings.priors, temperature=1.0, has_noise=False)
    space = space_of(model, settings)
    space.put(space.candidate({"2": "half open"}), priors)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    each = priors.precision
    if structure == "diag":
        each = torch.stack([part[0] for part in each.split(list(sizes.values()))])
    found = dict(zip(sizes, each.tolist(), strict=True))
    inner = 1e3 if structure == "path" else 4 * 16
    assert found["0.f_fc.theta_1.weight"] == pytest.approx(1e3)
    assert found["0.f_fc.theta_2.weight"] == pytest.approx(inner)
    assert found["2.f_fc.theta_1.weight"] == pytest.approx(1.0)
    assert found["0.conv.weight"] == pytest.approx(1.0)
    assert found["6.weight"] == pytest.approx(5.0)
    assert model[0].f_fc.theta_1.weight.std().item() < 0.1


def test_a_pilot_goes_on_from_its_own_weights():
    """What a candidate puts in is put in once, at the start of its training."""
    torch.manual_seed(0)
    model, loader = network(), shuffled(images())
    settings = training_settings(loader, optimizer_kwargs={"lr": 1e-2})
    states = RandomStates(model, [loader])
    pilots = Pilots(model, settings, states, n_steps=3, n_samples=1, n_examples=1000)
    closed, opened = pilots.space.candidate({}), pilots.space.candidate({"2": "open"})
    before = [tensor.clone() for tensor in model.state_dict().values()]
    whole = pilots.evidence((closed,) * 3)
    pilots.forget([])
    pilots.evidence((opened,))
    first, second = pilots.evidence((closed,)), pilots.evidence((closed,) * 2)
    assert pilots.evidence((closed,) * 3) == whole
    assert len({first, second, whole}) == 3
    # a second stage puts nothing in: weights go on, whatever it says
    assert pilots.evidence((closed, opened)) == second
    for old, new in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(old, new)


# What it finds, and leaves behind.


def train(model, data, **options):
    arguments = {"estimator": "refit", "search": SMALL, **SHORT} | options
    return li.marglik_training(model, shuffled(data, 20), **arguments)


def test_a_search_opens_what_is_needed():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    data = lit_places()
    search = Search(n_steps=25, keep=1, n_rounds=1)
    result = train(
        network(0.01), data, search=search, n_epochs=1, optimizer_kwargs={"lr": 5e-2}
    ).search
    by_name = {str(trial): trial for trial in result.trials}
    assert str(result.best) != "off"
    assert by_name["off"].loss > 0.05
    assert result.is_clear


def test_the_start_does_not_depend_on_how_the_model_was_built():
    data = images()
    found = []
    for scale in (1.0, 0.01):
        torch.manual_seed(0)
        model = network(scale)
        torch.manual_seed(1)
        found.append(train(model, data))
    one, other = found
    assert one.search.best.ranges == other.search.best.ranges
    assert one.evidence == pytest.approx(other.evidence, rel=1e-4)
    for first, second in zip(one.search.trials, other.search.trials, strict=True):
        assert first.evidence == pytest.approx(second.evidence, rel=1e-4)


def test_training_goes_on_as_if_it_had_started_there():
    torch.manual_seed(0)
    data, first = images(), network()
    second = copy.deepcopy(first)
    state = torch.get_rng_state()
    searched = train(first, data)
    levels = searched.search.best.ranges
    assert set(levels) == set(free_paths(second))
    precisions = start_precisions(second, levels)
    rescale_paths(second, levels)
    torch.set_rng_state(state)
    started = train(
        second,
        data,
        search=None,
        lr_aug=0.1,
        prior_prec_init={name.replace(".", r"\."): value for name, value in precisions.items()},
    )
    assert without_times(searched.history) == without_times(started.history)
    assert searched.evidence == started.evidence
    assert "free paths" in str(searched.search).splitlines()[0]


def test_an_interrupted_search_goes_on(tmp_path, monkeypatch):
    torch.manual_seed(0)
    data, whole_model = images(), network()
    model = copy.deepcopy(whole_model)
    start = copy.deepcopy(model)
    state = torch.get_rng_state()
    whole = train(whole_model, data)
    called, original = [], Pilots.evidence

    class Killed(Exception):
        pass

    def counted(self, pilot):
        called.append(pilot)
        if len(called) == 4:
            raise Killed
        return original(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", counted)
    arguments = {"checkpoint": tmp_path / "run.pt", "resume": True}
    torch.set_rng_state(state)
    with pytest.raises(Killed):
        train(model, data, **arguments)
    torch.manual_seed(5)
    resumed = train(start, data, **arguments)
    assert resumed.search == whole.search
    assert not set(called[:3]) & set(called[4:])
    assert resumed.evidence == whole.evidence
    assert train(start, data, **arguments).search == whole.search


BAD = {
    "no free path": ({"model": nn.Sequential(nn.Flatten(), nn.Linear(16, 2))}, "no range to"),
    "one path": (
        {"model": nn.Sequential(ResidualPathway(nn.Flatten()), nn.Linear(16, 2))},
        "nor a ResidualPathway with several paths",
    ),
    "frozen": ({"model": network().requires_grad_(False).append(nn.Linear(2, 2))}, "no range to"),
    "zero": ({"model": network(scale=0.0)}, "f_fc.theta_1.weight is zero, and cannot be rescaled"),
    "one prior": ({"prior_structure": "scalar"}, "needs prior precisions of their own"),
    "last layer": ({"subset_of_weights": "last_layer"}, "the evidence of all weights"),
    "shared": ({"prior_structure": [r".*weight"]}, "shares its prior precision"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_searched_is_refused(tmp_path, change, message):
    options = {"model": network(), "data": images(), "checkpoint": tmp_path / "run.pt"}
    with pytest.raises(ValueError, match=message):
        train(**options | change)
    assert not list(tmp_path.iterdir())


def test_candidates_that_are_not_there_are_refused():
    space = space_for(network())
    with pytest.raises(ValueError, match="no free paths at '1'; choose from 0, 2"):
        space.candidate({"1": "open"})
    with pytest.raises(ValueError, match="a level is one of"):
        space.candidate({"0": "ajar"})
