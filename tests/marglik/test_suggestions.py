"""``suggest``: what it finds, leaves alone, resumes and refuses."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.marglik import Suggestion, Suggestions
from laplace_invariance.marglik.evidence import settings_of_evidence
from laplace_invariance.marglik.guessing import guessing
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search.candidates import Space
from laplace_invariance.marglik.search.pilots import Pilots
from laplace_invariance.marglik.suggestions import compare

QUICK = {"n_samples": 4, "n_steps": 4, "n_repeats": 2}
ROTATION = li.AffinePoints(learn="rotation")


def points(kind, n=120):
    """Points in the plane, labelled by what rotations leave or change."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    labels = {"radius": x.norm(dim=1) > 1.1, "angle": x[:, 0] > 0, "same": x[:, 0] > 9}
    return DataLoader(TensorDataset(x, labels[kind].long()), batch_size=30, shuffle=True)


def trained(loader, n_epochs=30):
    """Return a network that was trained in the ordinary way."""
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(n_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net


@pytest.fixture
def radius():
    loader = points("radius")
    return trained(loader), loader


def row(gains, earlier=None, margin=0.02, words="rotation", width=1.0, can_widen=False):
    earlier = gains[0] if earlier is None else earlier
    return Suggestion({"rotation": width}, words, gains, earlier, margin, can_widen)


# What it finds.


@pytest.fixture(scope="module")
def found():
    """What is suggested for points that are labelled by radius, and by angle."""
    torch.manual_seed(0)
    results = {}
    for kind in ("radius", "angle"):
        loader = points(kind)
        results[kind] = li.suggest(
            trained(loader), loader, ROTATION, ranges={"rotation": 2.0}, **QUICK | {"n_steps": 40}
        )
    return results


def test_rotations_are_suggested_where_labels_ignore_them(found):
    best = found["radius"].best
    assert best.gain > 2 * best.error > 0
    assert f"\n{best}" in str(found["radius"])
    assert str(best).startswith("rotation ±")


def test_rotations_are_not_suggested_where_labels_depend_on_them(found):
    assert found["angle"].best is None
    assert [row.verdict for row in found["angle"].rows] == ["lowers it"]
    assert "no augmentation is clearly better than none" in str(found["angle"])


def test_the_best_is_tried_wider_and_narrower(found):
    rows = found["radius"].rows
    assert sorted(row.ranges["rotation"] for row in rows) == pytest.approx([4 / 3, 2.0, 3.0])
    assert [row.gain for row in rows] == sorted((row.gain for row in rows), reverse=True)
    assert len(found["angle"].rows) == 1


def test_evidences_are_those_of_pilots(radius):
    net, loader = radius
    found = li.suggest(net, loader, ROTATION, ranges={"rotation": 1.0}, margin=9.0, **QUICK)
    averaged = li.InvariantModel(net, li.AffinePoints(learn="rotation"), 4)
    own = DataLoader(loader.dataset, 30, shuffle=True, generator=torch.Generator())
    settings = settings_of_evidence(own, "classification", optimizer_kwargs={"lr": 2e-3})
    (one,) = found.rows
    evidences = []
    for repeat, gain in enumerate(one.gains):
        torch.manual_seed(repeat)
        own.generator.manual_seed(repeat)
        states = RandomStates(averaged, [own])
        pilots = Pilots(averaged, settings, states, 2, 1, 1000, seed=repeat)
        nothing = pilots.evidence((pilots.space.candidate({}),) * 2)
        rotated = pilots.evidence((pilots.space.candidate({"rotation": 1.0}),) * 2)
        assert gain == rotated - nothing
        evidences.append(nothing)
    assert found.evidence == pytest.approx(sum(evidences) / 2, abs=1e-12)
    assert one.gains[0] != one.gains[1]


def test_all_widths_of_a_single_unit_are_tried():
    candidates = compare.candidates_of(ROTATION, None)
    assert [dict(one.widths).get("rotation", 0) for one in candidates] == pytest.approx(
        [0, math.pi / 4, 3 * math.pi / 4]
    )


def test_images_need_no_augmentation():
    x = torch.rand(20, 1, 5, 5)
    loader = DataLoader(TensorDataset(x, torch.arange(20) % 2), batch_size=10)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 2))
    ranges = {("x_scale", "y_scale"): 0.2, "shear": 0.1}
    found = li.suggest(net, loader, ranges=ranges, margin=9.0, n_samples=2, n_steps=2, n_repeats=2)
    words = {one.words for one in found.rows}
    assert words == {
        "x_scale and y_scale factor 0.82 to 1.22",
        "shear factor 0.90 to 1.11 along the diagonals",
    }


def test_a_finite_group_is_opened_up_to_its_limit():
    x = torch.rand(20, 1, 5, 5)
    loader = DataLoader(TensorDataset(x, torch.arange(20) % 2), batch_size=10)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 2))
    found = li.suggest(net, loader, li.FiniteGroup("horizontal_flip"), **QUICK)
    words = [one.words for one in found.rows]
    assert "horizontal_flip weight 0.500" in words
    assert found.n_samples == 2  # as many as there are elements
    space = Space(li.FiniteGroup("horizontal_flip"))
    near = space.resized(space.candidate({"horizontal_flip": 1.0}))
    assert [one.widths[0][1] for one in near] == pytest.approx([1.0, 2 / 3])
    assert near[0].widths[0][1] <= 1.0
    space.put(near[0])


def test_regression():
    x = torch.randn(40, 2)
    loader = DataLoader(TensorDataset(x, x.norm(dim=1, keepdim=True)), batch_size=20)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    found = li.suggest(net, loader, ROTATION, "regression", ranges={"rotation": 3.0}, **QUICK)
    assert math.isfinite(found.rows[0].gain)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_regressions_are_guessed_by_mean_and_noise(temperature):
    """Guessing is a network that has the mean of the targets as its outputs, without a prior."""
    y = torch.randn(40, 3) * torch.tensor([1.0, 2.0, 5.0]) + 7
    loader = DataLoader(TensorDataset(torch.zeros(40, 2), y), batch_size=40)
    settings = settings_of_evidence(loader, "regression").evidence
    settings = dataclasses.replace(settings, temperature=temperature)
    net = nn.Linear(2, 3)
    with torch.no_grad():
        net.bias.copy_(y.mean(0))

    def likelihood(noise):
        la = Laplace(net, "regression", "all", "diag", sigma_noise=noise, temperature=temperature)
        la.fit(loader)
        return la.log_likelihood.item() / 40

    best = max(map(likelihood, torch.linspace(0.5, 5.0, 1000)))
    assert guessing(y, settings) == pytest.approx(best, rel=1e-5)


def test_a_regression_of_noise_needs_no_augmentation():
    """A network below guessing gains by whatever hides its inputs."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 2), torch.randn(40, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 1))
    with torch.no_grad():
        for weights in net.parameters():
            weights.mul_(3)
    found = li.suggest(net, loader, ROTATION, "regression", ranges={"rotation": 1.0}, **QUICK)
    assert any(row.is_clear for row in found.rows)
    assert found.chance == pytest.approx(
        torch.distributions.Normal(y.mean(), y.std(correction=0)).log_prob(y).mean().item()
    )
    assert found.best is None
    assert "no better than that of guessing" in found.conclusion()


def test_guessing_is_that_of_the_examples_of_all_repeats(radius):
    net, loader = radius
    asked = {"ranges": {"rotation": 1.0}, "margin": 9.0, **QUICK}
    found = li.suggest(net, loader, ROTATION, n_examples=20, **asked)
    chances = []
    for repeat in range(2):
        torch.manual_seed(repeat)
        chosen = torch.randperm(120, generator=torch.Generator().manual_seed(repeat))[:20]
        shares = loader.dataset.tensors[1][chosen].bincount() / 20
        chances.append((shares * shares.log()).sum().item())
    assert chances[0] != chances[1]
    assert found.chance == pytest.approx(sum(chances) / 2, abs=1e-6)


# What is clear.


@pytest.mark.parametrize(
    ("gains", "earlier", "verdict"),
    [
        ([0.30, 0.32], 0.2, "raises it"),
        ([0.30, 0.32], 0.8, "not clear"),  # falling
        ([0.01, 0.012], 0.0, "not clear"),  # below the margin
        ([0.6, 0.1], 0.2, "not clear"),  # within two standard errors
        ([-0.30, -0.32], -0.31, "lowers it"),
        ([-0.30, -0.32], -0.8, "not clear"),  # still rising
        ([-0.30, -0.32], -0.1, "lowers it"),
        ([-0.01, -0.01], -0.01, "not clear"),
        ([-math.inf, -0.1], -0.1, "lowers it"),
        ([math.nan, 0.9], 0.1, "lowers it"),
        ([math.inf, -math.inf], 0.1, "lowers it"),
        ([0.30, 0.32], -math.inf, "not clear"),
        ([0.30, 0.32], math.nan, "not clear"),
        ([0.30], 0.2, "not clear"),  # one has no standard error
    ],
)
def test_verdicts(gains, earlier, verdict):
    assert row(gains, earlier).verdict == verdict


def test_errors_are_those_of_the_mean():
    one = row([0.1, 0.3, 0.2])
    assert one.gain == pytest.approx(0.2)
    assert one.error == pytest.approx(0.1 / math.sqrt(3))
    assert str(one) == "rotation: +0.200 ± 0.058 nats per example"


def test_what_is_as_good_as_the_best_is_told_by_paired_differences():
    rows = [row([0.5, 0.9], words="a"), row([0.49, 0.89], words="b"), row([0.4, 0.8], words="c")]
    found = Suggestions(rows, -1.0, -2.3, 8, 100, 2)
    assert [one.words for one in found.ties] == ["b"]
    assert "not clearly worse: b" in found.conclusion()


def test_nothing_is_clear_that_is_no_better_than_guessing():
    worse = Suggestions([row([0.5, 0.5])], -3.0, -2.3, 8, 100, 2)
    assert worse.best is None
    assert worse.conclusion().startswith("not clear: even the highest evidence is no better than")
    better = Suggestions([row([0.8, 0.8])], -3.0, -2.3, 8, 100, 2)
    assert better.best is better.rows[0]
    assert "guessing" not in better.conclusion()


def test_the_best_is_above_guessing_by_its_own_evidence():
    high = row([0.2, 1.8], words="high")  # not clear
    clear = row([0.5, 0.52], words="clear")
    found = Suggestions([high, clear], -3.0, -2.3, 8, 100, 2)
    assert found.is_better_than_guessing
    assert clear.is_clear
    assert found.best is None
    assert found.conclusion().startswith("not clear: what raises the evidence raises it no further")
    above = row([0.9, 0.92], words="above")
    assert Suggestions([high, above, clear], -3.0, -2.3, 8, 100, 2).best is above


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_what_is_not_finite_is_never_the_best_and_hides_nothing(bad):
    good = row([0.5, 0.51], words="good")
    for rows in ([row([bad, 0.3]), good], [good, row([0.3, bad], earlier=bad)]):
        found = Suggestions(rows, -1.0, -2.3, 8, 100, 2)
        assert found.is_better_than_guessing
        assert found.best is good
        assert found.ties == []
        assert "rotation" in str(found)
        back = Suggestions.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
        assert str(back) == str(found)


def test_suggestions_may_have_no_rows():
    found = Suggestions([], -1.0, -2.3, 8, 100, 2)
    assert found.is_better_than_guessing
    assert found.best is None
    assert str(found).endswith("no augmentation is clearly better than none")
    assert not Suggestions([], -3.0, -2.3, 8, 100, 2).is_better_than_guessing


def test_it_is_said_if_nothing_wider_was_tried():
    widest = row([0.5, 0.51], width=1.5, can_widen=True)
    narrow = row([0.3, 0.31], width=1.0, can_widen=True)
    wider = row([0.2, 0.21], width=2.0, can_widen=True)
    said = "nothing wider was tried"
    assert said in Suggestions([widest, narrow], -1.0, -2.3, 8, 100, 2).conclusion()
    assert said not in Suggestions([widest, wider], -1.0, -2.3, 8, 100, 2).conclusion()
    limited = dataclasses.replace(widest, can_widen=False)
    assert said not in Suggestions([limited, narrow], -1.0, -2.3, 8, 100, 2).conclusion()
    other = dataclasses.replace(wider, ranges={"shear": 9.0})
    assert said in Suggestions([widest, other], -1.0, -2.3, 8, 100, 2).conclusion()


def test_rows_know_whether_they_can_be_wider(found):
    can = {round(one.ranges["rotation"], 2): one.can_widen for one in found["radius"].rows}
    assert can == {1.33: True, 2.0: True, 3.0: False}  # half a turn is all rotations


def test_random_labels_need_no_augmentation():
    x = torch.rand(20, 1, 5, 5)
    loader = DataLoader(TensorDataset(x, torch.arange(20) % 2), batch_size=10)
    net = nn.Sequential(nn.Flatten(), nn.Linear(25, 2))
    found = li.suggest(net, loader, li.FiniteGroup("quarter_turns"), **QUICK)
    assert found.best is None
    words = [one.words for one in found.rows]
    assert "half_turn, quarter_turn and three_quarter_turn weight 0.250" in words


def test_results_survive_json():
    rows = [row([0.5, 0.6], 0.1), row([-math.inf, 0.2], -math.inf)]
    found = Suggestions(rows, -1.0, None, 8, 100, 2)
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert Suggestions.from_dict(json.loads(text)) == found


# What it leaves alone.


def test_network_augmentation_and_random_states_stay_as_they_are(radius):
    net, loader = radius
    augmentation = li.AffinePoints(init=0.3)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    first = li.suggest(net, loader, augmentation, ranges={"shear": 0.1}, **QUICK)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]  # noqa: NPY002
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())
    assert all(weight.requires_grad and weight.grad is not None for weight in net.parameters())
    assert net.training
    assert augmentation.magnitudes()["rotation"] == pytest.approx(0.3)
    torch.rand(3)  # answers do not depend on the state either
    assert li.suggest(net, loader, augmentation, ranges={"shear": 0.1}, **QUICK) == first


# Interrupted calls.


def test_an_interrupted_call_resumes_bit_for_bit(radius, tmp_path, monkeypatch):
    net, loader = radius
    asked = {"ranges": {"rotation": 3.0}, "margin": 0.001, **QUICK}
    whole = li.suggest(net, loader, ROTATION, **asked)
    path, evidence, n_pilots = tmp_path / "new" / "trials.json", Pilots.evidence, []

    def counted(self, pilot):
        n_pilots.append(pilot)
        if len(n_pilots) == 5:  # two evidences each
            raise KeyboardInterrupt
        return evidence(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", counted)
    with pytest.raises(KeyboardInterrupt):
        li.suggest(net, loader, ROTATION, checkpoint=path, **asked)
    assert len(json.loads(path.read_text())["trials"]) == 2
    with pytest.raises(FileExistsError, match="resume=True"):
        li.suggest(net, loader, ROTATION, checkpoint=path, **asked)
    assert li.suggest(net, loader, ROTATION, checkpoint=path, resume=True, **asked) == whole
    n_before = len(n_pilots)
    assert n_before - 5 == 2 * (len(whole.rows) * 2 + 2 - 2)  # all repeats, and nothing twice
    assert li.suggest(net, loader, ROTATION, checkpoint=path, resume=True, **asked) == whole
    assert len(n_pilots) == n_before


def test_a_file_of_another_call_is_refused(radius, tmp_path):
    net, loader = radius
    path = tmp_path / "trials.json"
    asked = {"ranges": {"rotation": 1.0}, "checkpoint": path, **QUICK}
    li.suggest(net, loader, ROTATION, **asked)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="its n_steps is 4 there and 6 here"):
        li.suggest(net, loader, ROTATION, resume=True, **asked | {"n_steps": 6})
    with torch.no_grad():
        net[0].weight[0] += 1
    with pytest.raises(ValueError, match="its checksum of the model is"):
        li.suggest(net, loader, ROTATION, resume=True, **asked)
    assert path.read_bytes() == before
    path.write_text("[]")
    with pytest.raises(ValueError, match="no evidences of suggest"):
        li.suggest(net, loader, ROTATION, resume=True, **asked)


# What makes no sense.


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"augmentation": ROTATION.frozen()}, "there is no range to try"),
        ({"ranges": {"rotation": 4.0}}, "rotation must be between 0 and 3.142, its limit, got 4"),
        ({"ranges": {"rotation": -1.0}}, "rotation must be between 0 and 3.142"),
        ({"ranges": {"rotation": math.nan}}, "rotation must be between 0 and 3.142"),
        ({"ranges": {"rotation": 0.0}}, "nothing is always among the candidates"),
        ({"ranges": {"twist": 1.0}}, "there is no range 'twist' to search; choose from rotation"),
        ({"ranges": {}}, "leave it out to try everything"),
        ({"augmentation": None}, r"must be images .* got \[30, 2\]; give an augmentation"),
        ({"n_repeats": 1}, "n_repeats must be finite and at least 2"),
        ({"n_steps": 3}, "n_steps must be even"),
        ({"n_samples": 0}, "n_samples must be a positive integer"),
        ({"likelihood": "guess"}, "likelihood must be"),
        ({"resume": True}, "resume=True needs to know the checkpoint="),
        ({"loader": points("same")}, "all targets are 0, which any network predicts"),
        ({"model": nn.Flatten()}, "the model has no parameters"),
        (
            {"model": li.InvariantModel(nn.Linear(2, 2), ROTATION)},
            "it is of class InvariantModel; give the network inside",
        ),
        (
            {"model": nn.Sequential(ROTATION, nn.Linear(2, 2))},
            "its module '0' is of class AffinePoints",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(changes, match):
    given = {"model": nn.Linear(2, 2), "loader": points("radius"), "augmentation": ROTATION}
    with pytest.raises(ValueError, match=match):
        li.suggest(**given | QUICK | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"augmentation": torch.sin}, "augmentation must be a laplace_invariance.Augmentation"),
        ({"loader": [1, 2]}, "loader must be a torch DataLoader with a batch size, .*, got list"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(changes, match):
    given = {"model": nn.Linear(2, 2), "loader": points("radius"), "augmentation": ROTATION}
    with pytest.raises(TypeError, match=match):
        li.suggest(**given | QUICK | changes)


def test_an_evidence_that_is_not_finite_is_refused(radius, monkeypatch):
    net, loader = radius
    monkeypatch.setattr(Pilots, "evidence", lambda *_: -math.inf)
    with pytest.raises(FloatingPointError, match="choose a smaller step size"):
        li.suggest(net, loader, ROTATION, **QUICK)
