"""``profile``: what it leaves alone, what it computes, resumes, concludes and refuses."""

import json
import math
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from builders import NoisyPoints, invariant_network, labelled_points, plain_network, shuffled
from laplace.curvature import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.marglik import Profile
from laplace_invariance.marglik import profile as package_function
from laplace_invariance.marglik.evidence import settings_of_evidence
from laplace_invariance.marglik.profiles import profile_of
from laplace_invariance.marglik.profiles.ranges import Range, around
from laplace_invariance.marglik.profiles.retuning import Amounts, RetunedCopy, Retuning
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.marglik.search.pilots import Pilots

LEARNT = 0.2  # of the network


@pytest.fixture
def model():
    return invariant_network()


@pytest.fixture
def loader():
    return shuffled(labelled_points())


def everything_of(model):
    """Return all that a call could change in a model."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        *(tensor.detach().clone() for tensor in tensors),
        *(tensor.requires_grad for tensor in tensors),
        *(None if tensor.grad is None else tensor.grad.clone() for tensor in tensors),
        *(module.training for module in model.modules()),
        model.n_samples,
    ]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


def test_the_function_is_public():
    assert li.profile is package_function


def test_model_and_random_states_stay_as_they_are(loader):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 3))
    augmentation = li.AffinePoints(init=0.2, correlated=True)
    generator = torch.Generator().manual_seed(2)
    model = li.InvariantModel(net, augmentation, 3, generator).eval()
    model.net[0].weight.grad = torch.ones(5, 2)
    model.net[0].train()
    before = everything_of(model)
    states = torch.get_rng_state(), generator.get_state()
    others = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    li.profile(model, loader, "shear", [0.0, 0.4], n_steps=3)
    assert_same(everything_of(model), before)
    assert_same((torch.get_rng_state(), generator.get_state()), states)
    assert (np.random.get_state()[1] == others[0]).all()  # noqa: NPY002
    assert random.getstate() == others[1]


def test_random_states_come_back_after_an_interruption(model, loader, monkeypatch):
    def interrupted(trainer, batches):
        next(iter(batches))
        raise KeyboardInterrupt

    monkeypatch.setattr("laplace_invariance.marglik.loop.Trainer.train_on", interrupted)
    before, state = everything_of(model), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        li.profile(model, loader, "rotation", n_steps=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(everything_of(model), before)


def test_without_steps_it_is_the_evidence_of_the_model_at_other_ranges(model, loader):
    found = li.profile(model, loader, "rotation", [0.0, 1.5], n_steps=0, n_samples=5, n_repeats=1)
    assert found.values == (0.0, pytest.approx(LEARNT), 1.5)
    for value, evidence in zip(found.values, found.evidences, strict=True):
        model.augmentation.resize_("rotation", value)
        expected = li.log_evidence(model, loader, n_samples=5) / 30
        assert evidence == pytest.approx(expected, abs=1e-5)
    assert len({round(evidence, 4) for evidence in found.evidences}) == 3


def test_with_steps_it_is_the_evidence_of_a_pilot(model, loader):
    """Of the same batches, draws and directions; only the priors at the start differ."""
    options = {"optimizer_kwargs": {"lr": 1e-3}}
    found = li.profile(
        model,
        loader,
        "rotation",
        [1.5],
        n_steps=4,
        n_repeats=1,
        backend_kwargs={"stochastic": True},
        **options,
    )
    settings = settings_of_evidence(loader, "classification", **options)
    states = RandomStates(model, (loader,))
    torch.manual_seed(0)
    pilots = Pilots(model, settings, states, n_steps=4, n_samples=2, n_examples=1000)
    pilots._assess()  # which takes the priors to where a profile starts
    pilots._start = pilots._state()
    for value, evidence in zip(found.values, found.evidences, strict=True):
        candidate = pilots.space.candidate({"rotation": value})
        assert evidence == pytest.approx(pilots.evidence((candidate,)), abs=1e-5)


def assert_alike(model, loader, name, n_steps, **options):
    """Assert that values have the same evidence, bit for bit, whatever is tried before them."""
    alone = li.profile(model, loader, name, [1.0], n_steps=n_steps, **options)
    among = li.profile(model, loader, name, [0.0, 0.5, 1.0], n_steps=n_steps, **options)
    for one, other in zip(alone.repeats, among.repeats, strict=True):
        assert dict(zip(alone.values, one, strict=True)).items() <= (
            dict(zip(among.values, other, strict=True)).items()
        )
    return alone


def test_all_values_are_trained_alike(model):
    loader = shuffled(labelled_points(), generator=torch.Generator().manual_seed(4))
    model.generator = torch.Generator().manual_seed(5)
    alone = assert_alike(model, loader, "rotation", 5, n_repeats=1)
    untrained = li.profile(model, loader, "rotation", [1.0], n_steps=0, n_repeats=1)
    assert untrained.evidences != alone.evidences


def test_repetitions_have_other_draws_and_give_errors(model, loader):
    found = li.profile(model, loader, "rotation", [1.0], n_steps=2, n_repeats=3)
    assert len({*found.repeats}) == 3
    assert found.evidences == pytest.approx(np.mean(found.repeats, axis=0).tolist())
    below = np.array(found.repeats)[:, [found.values.index(found.best)]] - np.array(found.repeats)
    assert found.errors == pytest.approx((below.std(axis=0, ddof=1) / math.sqrt(3)).tolist())
    assert found.loss_error == found.errors[found.values.index(found.learnt)]
    assert li.profile(model, loader, "rotation", [1.0], n_steps=2, n_repeats=1).errors is None
    untrained = li.profile(model, loader, "rotation", [1.0], n_steps=0, n_repeats=2)
    assert untrained.repeats[0] != untrained.repeats[1]


def drawless():
    """Return a network whose evidence depends on nothing random but batches."""
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn="rotation", draws="grid")
    return li.InvariantModel(plain_network(), augmentation, n_samples=3)


def test_repetitions_have_other_batches():
    data = labelled_points()
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=1, rank=0)
    sampler.set_epoch(7)
    loaders = {
        "plain": shuffled(data),
        "its own generator": shuffled(data, generator=torch.Generator()),
        "distributed": DataLoader(data, 7, sampler=sampler),
    }
    for kind, loader in loaders.items():
        found = li.profile(drawless(), loader, "rotation", [1.0], n_steps=3)
        assert found.repeats[0] != found.repeats[1], kind
    assert sampler.epoch == 7


def test_all_that_is_random_differs_in_repetitions(model):
    model.generator = torch.Generator()
    with pytest.warns(UserWarning, match="does not shuffle: .* errors are those of draws alone"):
        found = li.profile(model, DataLoader(NoisyPoints(), 7), "rotation", [1.0], n_steps=3)
    assert found.repeats[0] != found.repeats[1]
    with pytest.warns(UserWarning, match="does not shuffle"):
        found = li.profile(
            drawless(), DataLoader(labelled_points(), 7), "rotation", [1.0], n_steps=3
        )
    assert found.repeats[0] == found.repeats[1]


def rings(n=240):
    """Points in three rings, each over a sector, turned at random: only the radius is known."""
    torch.manual_seed(3)
    y = torch.arange(n) % 3
    radius = 1 + y + 0.1 * torch.randn(n)
    angle = 0.3 * torch.randn(n) + 2 * math.pi * torch.rand(n)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y)


def test_rotated_data_prefer_a_wide_range():
    data = rings()
    augmentation = li.AffinePoints(learn="rotation")
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    model = li.InvariantModel(net, augmentation, n_samples=8)
    loader = DataLoader(data, batch_size=120, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(30):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = li.profile(
        model,
        loader,
        "rotation",
        [1.5, math.pi],
        n_steps=40,
        n_repeats=1,
        optimizer_kwargs={"lr": 0.02},
    )
    at_zero, _, wide = found.evidences
    assert wide > at_zero + 0.05
    assert found.learnt == 0.0
    assert not found.is_maximum
    assert found.best > 1
    assert "whether rotation ±0.0 degrees is a maximum is not clear: " in str(found)
    assert "but its error is not known, from one repetition" in str(found)


# Other ranges.


def affine_network():
    """Return a network with all ranges, of which rotation and both scales are open."""
    widths = {"rotation": 0.5, "x_scale": 0.3, "y_scale": 0.2, "shear": 0.02}
    return li.InvariantModel(plain_network(), li.AffinePoints(init=widths), n_samples=3)


def trained_copy(model, loader, name="x_scale", value=0.7, hold_others=False, n_steps=60):
    """Return the copy of a model that a profile along a range trained at a value."""
    settings = settings_of_evidence(loader, "classification")
    copy = deepcopy(model)
    retuned = RetunedCopy(copy, settings, name, Amounts(n_steps, None, 1, hold_others))
    retuned.evidence(value, 0, retuned.best_priors())
    return copy


def test_other_open_ranges_follow_and_all_else_is_held(loader):
    model = affine_network()
    before = model.augmentation.widths()
    copy = trained_copy(model, loader)
    after = copy.augmentation.widths()
    assert after["x_scale"] == pytest.approx(0.7)
    for name in ("rotation", "y_scale"):
        assert 1e-3 < abs(after[name] - before[name]) < 0.4
    for name in ("x_translation", "y_translation", "shear"):
        assert after[name] == before[name]
    assert [t.requires_grad for t in copy.buffers()] == [t.requires_grad for t in model.buffers()]
    held = trained_copy(model, loader, hold_others=True).augmentation.widths()
    assert held == pytest.approx(before | {"x_scale": 0.7}, abs=1e-7)


def test_without_other_open_ranges_nothing_follows(model, loader):
    options = {"n_steps": 30, "n_repeats": 1}
    found = li.profile(model, loader, "rotation", [1.0], **options)
    assert li.profile(model, loader, "rotation", [1.0], hold_others=True, **options) == found
    model = affine_network()
    found = li.profile(model, loader, "rotation", [1.0], **options)
    assert li.profile(model, loader, "rotation", [1.0], hold_others=True, **options) != found


@pytest.mark.parametrize("n_steps", [7, 18, 40])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_ranges_follow_alike_whatever_is_tried_before(loader, subset, n_steps):
    """Also where the last minibatches that were looked at had not come to an estimate."""
    assert_alike(affine_network(), loader, "x_scale", n_steps, subset_of_weights=subset)


class Moving(nn.Module):
    """State that training changes: a buffer that is not kept, and a number that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.zeros(1), persistent=False)
        self.count = 0

    def forward(self, x):
        if self.training:
            self.offset.add_(0.01)
            self.count += 1
        return x + self.offset + 0.001 * self.count


def test_what_is_in_no_state_starts_anew_at_every_value(loader):
    net = nn.Sequential(Moving(), plain_network())
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn="rotation")
    model = li.InvariantModel(net, augmentation, n_samples=3)
    assert_alike(model, loader, "rotation", 6)
    assert net[0].count == 0


def test_random_data_do_not_depend_on_random_states(model, tmp_path):
    loader = shuffled(NoisyPoints())
    path = tmp_path / "profile.json"
    whole = li.profile(model, loader, "rotation", [0.5, 1.0], n_steps=3)
    li.profile(model, loader, "rotation", [0.5], n_steps=3, n_repeats=1, checkpoint=path)
    np.random.rand()  # noqa: NPY002
    random.random()
    kept = {"n_steps": 3, "checkpoint": path, "resume": True}
    assert li.profile(model, loader, "rotation", [0.5, 1.0], **kept) == whole


def twice():
    """Return a network with an augmentation within another one, each with open ranges."""
    inner = li.InvariantModel(plain_network(), li.AffinePoints(init=0.2), n_samples=2)
    return li.InvariantModel(inner, li.AffinePoints(init=0.3, learn="rotation"), n_samples=2)


@pytest.mark.parametrize("name", ["augmentation.rotation", "net.augmentation.shear"])
def test_ranges_of_several_augmentations_follow(loader, name):
    model = twice()
    after = trained_copy(model, loader, name).augmentation.widths()
    inner = trained_copy(model, loader, name).net.augmentation.widths()
    for other, width in inner.items():
        if name == f"net.augmentation.{other}":
            assert width == pytest.approx(0.7)
        else:
            assert abs(width - 0.2) > 1e-4
    if name == "augmentation.rotation":
        assert after["rotation"] == pytest.approx(0.7)
    else:
        assert abs(after["rotation"] - 0.3) > 1e-4
    assert_alike(model, loader, name, 8, n_repeats=1)


@pytest.mark.parametrize("constraint", [None, "softplus", "tanh"])
def test_what_is_held_stays_to_the_last_digit(loader, constraint):
    """Also numbers beyond their limit, and widths beyond it that are a sum of correlations."""
    augmentation = li.AffinePoints(init=0.3, correlated=True, constraint=constraint)
    with torch.no_grad():
        augmentation.mixing[2, :2] = torch.tensor([2.5, -1.5])  # rotation, beyond half a turn
        augmentation.eta[1] = -5.0 if constraint == "softplus" else 0.01  # a closed one
        augmentation.mixing[1, 0] = 0.03
    model = li.InvariantModel(plain_network(), augmentation, n_samples=2)
    copy = trained_copy(model, loader, "rotation", augmentation.widths()["rotation"])
    for name in ("rotation", "y_translation"):
        assert_same(copy.augmentation.entries(name), augmentation.entries(name))
    moved = copy.augmentation.entries("shear")[0]
    assert moved != augmentation.entries("shear")[0]


def test_ranges_follow_the_evidence():
    """Rings are rotated by any angle, so that a narrow range of rotations becomes wider."""
    torch.manual_seed(4)
    augmentation = li.AffinePoints(init={"rotation": 0.6, "shear": 0.1}, draws="sobol")
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 3))
    model = li.InvariantModel(net, augmentation, n_samples=8)
    loader = DataLoader(rings(), batch_size=60, shuffle=True)
    li.marglik_training(
        model,
        loader,
        objective=li.marglik.MAP(),
        n_epochs=20,
        optimizer_kwargs={"lr": 0.03},
    )
    options = {"n_steps": 60, "n_repeats": 1, "optimizer_kwargs": {"lr": 1e-3}}
    followed = li.profile(model, loader, "shear", [0.0], **options)
    held = li.profile(model, loader, "shear", [0.0], hold_others=True, **options)
    gains = np.subtract(followed.evidences, held.evidences)
    assert (gains > 0.005).all()


def test_a_backend_without_gradients_holds_other_ranges(loader):
    model = affine_network()
    options = {"backend": CurvlinopsGGN, "n_steps": 0, "n_repeats": 1}
    with pytest.raises(ValueError, match=r"CurvlinopsGGN has no gradient .*, or hold_others=True"):
        li.profile(model, loader, "shear", [0.5], **options)
    found = li.profile(model, loader, "shear", [0.5], hold_others=True, **options)
    assert all(map(math.isfinite, found.evidences))


# What is kept.


def test_resumed_profile_is_the_same_to_the_last_digit(loader, tmp_path, monkeypatch):
    model = affine_network()
    whole = li.profile(model, loader, "rotation", [0.0, 1.0], n_steps=20)
    path = tmp_path / "deep" / "profile.json"
    evidence, calls = Retuning.evidence, []

    def interrupted(self, value, repeat):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(value)
        return evidence(self, value, repeat)

    with monkeypatch.context() as patch:
        patch.setattr(Retuning, "evidence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            li.profile(model, loader, "rotation", [0.0, 1.0], n_steps=20, checkpoint=path)
    assert len(json.loads(path.read_text())["found"]) == 2
    torch.manual_seed(99)  # a new process has another state
    kept = {"n_steps": 20, "checkpoint": path, "resume": True}
    again = li.profile(model, loader, "rotation", [0.0, 1.0], **kept)
    assert again == whole
    monkeypatch.setattr(Retuning, "evidence", None)  # nothing is computed again
    assert li.profile(model, loader, "rotation", [0.0, 1.0], **kept) == whole
    assert li.profile(model, loader, "rotation", [1.0], n_repeats=1, **kept).repeats == (
        whole.repeats[0][1:],
    )


def test_a_file_of_something_else_is_not_touched(model, loader, tmp_path):
    path = tmp_path / "profile.json"
    options = {"n_steps": 0, "n_repeats": 1, "checkpoint": path}
    li.profile(model, loader, "rotation", [1.0], **options)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"profile.json exists; resume=True resumes"):
        li.profile(model, loader, "rotation", [1.0], **options)
    with pytest.raises(ValueError, match="another profile: it differs in number of steps"):
        li.profile(model, loader, "rotation", [1.0], **options | {"n_steps": 1}, resume=True)
    with pytest.raises(ValueError, match="another profile: it differs in hold_others"):
        li.profile(model, loader, "rotation", [1.0], **options, hold_others=True, resume=True)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="resume=True needs to know the checkpoint="):
        li.profile(model, loader, "rotation", [1.0], resume=True)


def other_weights(model, loader):
    model.net[0].weight.data[0, 0] += 1e-3
    return {}


def other_learnt_weights(model, loader):
    model.net[2].bias.requires_grad_()
    return {}


def other_frozen_weights(model, loader):
    model.net[2].bias.data[0] += 1e-3
    return {}


def other_buffer(model, loader):
    model.net[3].offset += 1
    return {}


def other_slope(model, loader):
    model.net[1].negative_slope = 0.3
    return {}


def other_samples(model, loader):
    model.n_samples = 4
    return {}


def other_inputs(model, loader):
    loader.dataset.tensors[0][-1, 0] += 1e-3
    return {}


def other_targets(model, loader):
    y = loader.dataset.tensors[1]
    y[-1] = (y[-1] + 1) % 3
    return {}


def other_batches(model, loader):
    return {"loader": shuffled(loader.dataset, drop_last=True)}


def other_order(model, loader):
    return {"loader": shuffled(loader.dataset, generator=torch.Generator())}


def other_optimizer(model, loader):
    return {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 1e-3}}


def other_structure(model, loader):
    return {"hessian_structure": "diag"}


OTHERS = {
    other_weights: "checksum of the model",
    other_learnt_weights: "learnt weights",
    other_frozen_weights: "checksum of the model",
    other_buffer: "checksum of the model",
    other_slope: "checksum of the model's options",
    other_samples: "checksum of the model's options",
    other_inputs: "checksum of the inputs",
    other_targets: "checksum of the targets",
    other_batches: "drop_last",
    other_order: "checksum of the sampler",
    other_optimizer: "optimizer",
    other_structure: "hessian_structure",
}


@pytest.mark.parametrize("change", OTHERS)
def test_evidences_of_something_else_are_refused(tmp_path, change):
    net = nn.Sequential(nn.Linear(2, 5), nn.LeakyReLU(), nn.Linear(5, 3), Moving())
    net[2].requires_grad_(False)
    augmentation = li.AffinePoints(init={"rotation": 0.2}, learn="rotation")
    model = li.InvariantModel(net, augmentation, n_samples=3)
    arguments = {"loader": shuffled(labelled_points()), "n_steps": 0, "n_repeats": 1}
    arguments |= {"name": "rotation", "values": [1.0], "checkpoint": tmp_path / "profile.json"}
    found = li.profile(model, **arguments)
    assert li.profile(model, **arguments, resume=True) == found
    changed = arguments | change(model, arguments["loader"])
    message = rf"profile.json is of another profile: it differs in .*{OTHERS[change]}.*; name"
    with pytest.raises(ValueError, match=message):
        li.profile(model, **changed, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: [1], "not of a profile in format 2"),
        (lambda saved: {"format": 1}, "not of a profile in format 2"),
        (lambda saved: {"format": 2}, "it has no signature"),
        (lambda saved: saved | {"signature": [1]}, "it has no signature"),
        (lambda saved: saved | {"signature": {}}, "it differs in tensors of the model, "),
        (lambda saved: {n: v for n, v in saved.items() if n != "found"}, "it has no evidences"),
        (lambda saved: saved | {"found": {"a": 1}}, "it has no evidences"),
        (lambda saved: saved | {"found": [*saved["found"], saved["found"][0]]}, "there twice"),
        (lambda saved: saved | {"found": [1.0]}, "1.0 is no width, repetition and evidence"),
        (lambda saved: saved | {"found": [[1.0, 0]]}, "is no width, repetition and evidence"),
        (lambda saved: saved | {"found": [[[1.0], 0, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [["1.0", 0, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, "0", -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, 0.5, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, True, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, -1, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[-1.0, 0, -1.0]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, 0, "NaN"]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[1.0, 0, "Infinity"]]}, "is no width, repetition"),
        (lambda saved: saved | {"found": [[None, 0, -1.0]]}, "is no width, repetition"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_forged_files_are_refused(model, loader, tmp_path, change, message):
    path = tmp_path / "profile.json"
    options = {"n_steps": 0, "n_repeats": 1, "checkpoint": path}
    li.profile(model, loader, "rotation", [1.0], **options)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"profile.json is.* {message}.*; nothing was changed"):
        li.profile(model, loader, "rotation", [1.0], **options, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[" * 100_000, b"null", b"NaN"])
def test_files_that_are_no_profile_are_refused(model, loader, tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    options = {"n_steps": 0, "n_repeats": 1, "checkpoint": path}
    with pytest.raises(ValueError, match=r"profile.json is .*; nothing was changed"):
        li.profile(model, loader, "rotation", [1.0], **options, resume=True)
    assert path.read_bytes() == content


def test_progress_is_shown_if_wanted(model, loader, capfd):
    options = {"n_steps": 0, "n_repeats": 1}
    li.profile(model, loader, "rotation", [1.0], **options)
    assert capfd.readouterr().err == ""
    li.profile(model, loader, "rotation", [1.0], progress_bar=True, **options)
    assert "profile of rotation: 100%" in capfd.readouterr().err


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "turn"}, "there is no range 'turn' to profile; choose from rotation"),
        ({"name": "shear"}, "there is no range 'shear' to profile; choose from rotation"),
        ({"values": [3.2]}, "between 0 and 3.142, its limit, got 3.2"),
        ({"values": [-0.1]}, "between 0 and 3.142, its limit, got -0.1"),
        ({"values": [math.nan]}, "between 0 and 3.142, its limit, got nan"),
        ({"values": [math.inf]}, "between 0 and 3.142, its limit, got inf"),
        ({"values": [1e30]}, r"between 0 and 3.142, its limit, got 1e\+30"),
        ({"values": [0.5, 0.7, 0.5]}, "values has 0.5 twice"),
        ({"values": []}, "nothing to compare the learnt rotation with"),
        ({"n_steps": -1}, "n_steps must be finite and at least 0 and whole, got -1"),
        ({"n_repeats": 0}, "n_repeats must be positive and finite and whole, got 0"),
        ({"n_samples": 0}, "n_samples must be positive and finite and whole, got 0"),
        ({"likelihood": "ranking"}, "likelihood must be 'classification' or 'regression'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused(model, loader, arguments, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        li.profile(model, loader, **{"name": "rotation"} | arguments)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": 0.5}, r"values must be several numbers, such as \[0, 0.5, 1\], got 0.5"),
        ({"values": "123"}, "values must be several numbers, .* got '123'"),
        ({"values": [0.5, None]}, "values must be numbers, got None among them"),
        ({"values": ["0.5"]}, "values must be numbers, got '0.5' among them"),
        ({"values": torch.ones(2, 2)}, r"values must be numbers, got \[1.0, 1.0\] among them"),
        ({"name": ["rotation"]}, r"name must be that of one range, .* got \['rotation'\]"),
        ({"n_steps": None}, "n_steps must be a whole number, got None"),
        ({"n_repeats": None}, "n_repeats must be a whole number, got None"),
        ({"n_repeats": "2"}, "n_repeats must be positive and finite and whole, got '2'"),
        ({"n_epochs": 3}, "profile has no option 'n_epochs'; choose from backend, backend_kwargs,"),
        ({"loader": [1]}, "must be a DataLoader with a length"),
        ({"values": torch.tensor(0.5)}, "values must be several numbers, .* got 0.5"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_what_is_of_another_kind_is_refused(model, loader, arguments, message):
    with pytest.raises(TypeError, match=message):
        li.profile(model, **{"name": "rotation", "loader": loader} | arguments)


class Own(torch.utils.data.Dataset):
    """Points whose targets are not at hand."""

    def __init__(self, *labels):
        self.labels = torch.tensor([0, 1, *labels] * 5)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.ones(2) * i, self.labels[i]


@pytest.mark.parametrize("at_hand", [True, False])
def test_labels_that_are_no_class_are_refused_before_any_training(model, at_hand, monkeypatch):
    monkeypatch.setattr("laplace_invariance.marglik.loop.Trainer.train_on", None)
    for label, message in ((3, "the label 3 is beyond the 3 outputs"), (-1, "the label -1 is no")):
        data = Own(2, label)
        if at_hand:
            data = TensorDataset(torch.randn(len(data), 2), data.labels)
        with pytest.raises(ValueError, match=message):
            li.profile(model, shuffled(data), "rotation", [1.0])


def test_models_and_data_without_sense_are_refused(model, loader):
    with pytest.raises(TypeError, match="weights are in half precision"):
        li.profile(deepcopy(model).half(), loader, "rotation")
    empty = DataLoader(TensorDataset(torch.ones(3, 2), torch.arange(3)), 7, drop_last=True)
    with pytest.raises(ValueError, match="empty: 3 examples in 0 batches"):
        li.profile(model, empty, "rotation")
    with torch.no_grad():
        model.augmentation.eta.fill_(math.nan)
    with pytest.raises(ValueError, match="rotation is not finite: nan"):
        li.profile(model, loader, "rotation")


def points(constraint, name, values=None, width=0.3):
    augmentation = li.AffinePoints(init=width, constraint=constraint)
    model = li.InvariantModel(plain_network(), augmentation, n_samples=2)
    found = Range(model, name).points(values)
    assert augmentation.widths() == li.AffinePoints(init=width, constraint=constraint).widths()
    return found


def test_what_a_constraint_cannot_reach_is_refused():
    with pytest.raises(ValueError, match=r"between 0 and 2.985, its limit, got 3.1"):
        points("tanh", "rotation", [3.1])
    with pytest.raises(ValueError, match=r"between 0 and 0.95, its limit, got 1.0"):
        points("tanh", "shear", [1.0])
    with pytest.raises(ValueError, match=r"cannot be 0: the nearest that its constraint .* 0.001"):
        points("softplus", "shear", [0.0])
    with pytest.raises(ValueError, match=r"shear must be at most 10000, got 1e\+30"):
        points(None, "shear", [1e30])
    assert points("softplus", "shear", [200.0])[-1] == 200.0  # whose exponential overflows


@pytest.mark.parametrize("width", [0.0, 0.3, 0.94])
@pytest.mark.parametrize("name", ["rotation", "shear"])
@pytest.mark.parametrize("constraint", [None, "softplus", "tanh"])
def test_default_values_can_be_reached(constraint, name, width):
    found = points(constraint, name, width=width)
    assert len(found) >= 8
    augmentation = li.AffinePoints(init=width, constraint=constraint)
    for value in found:
        augmentation.resize_(name, value)
        assert augmentation.widths()[name] == pytest.approx(value, rel=1e-5, abs=1e-7)


def test_a_value_that_is_the_learnt_one_is_not_another_one(model):
    place = Range(model.float(), "rotation")  # whose 0.2 is not that of Python
    assert place.learnt != 0.2
    assert place.points([0.2, 1.0]) == (place.learnt, 1.0)
    assert place.points(torch.tensor([0.2, 1.0])) == (place.learnt, 1.0)


@pytest.mark.parametrize("kind", ["plain", "frozen"])
def test_without_a_range_to_learn_it_is_refused(model, loader, kind):
    model.augmentation.eta.requires_grad_(False)
    chosen = plain_network() if kind == "plain" else model
    with pytest.raises(ValueError, match=r"no range to profile: .* wrap the network in Invariant"):
        li.profile(chosen, loader, "rotation")


def test_one_class_is_refused(model):
    data = TensorDataset(torch.randn(20, 2), torch.ones(20, dtype=torch.long))
    with pytest.raises(ValueError, match=r"all targets are 1.*two classes"):
        li.profile(model, shuffled(data), "rotation")


# Values, names and words.


@pytest.mark.parametrize("learnt", [0.0, 0.01, 0.3, 1.0, 2.5, 3.1, math.pi])
@pytest.mark.parametrize("limit", [math.pi, math.inf])
def test_default_values_are_around_the_learnt_one(learnt, limit):
    values = around(learnt, limit)
    assert learnt in values
    assert list(values) == sorted(set(values))
    assert values[0] <= 0.01 * values[-1]
    assert 9 <= len(values) <= 10
    assert values[-1] == limit if math.isfinite(limit) and learnt != 3.1 else values[-1] > learnt
    assert max(values) <= limit


def test_ranges_of_several_augmentations_have_the_names_of_their_modules(loader):
    inner = li.InvariantModel(plain_network(), li.AffinePoints(init=0.1), 2)
    model = li.InvariantModel(inner, li.AffinePoints(init=0.3, learn="rotation"), 2)
    options = {"n_steps": 0, "n_repeats": 1}
    found = li.profile(model, loader, "net.augmentation.shear", [0.0], **options)
    assert (found.name, found.learnt) == ("net.augmentation.shear", pytest.approx(0.1))
    with pytest.raises(ValueError, match=r"net\.augmentation\.shear, augmentation\.rotation$"):
        li.profile(model, loader, "rotation", [0.0], **options)


def test_regression_has_a_profile(loader):
    data = labelled_points(classes=0)
    found = li.profile(
        invariant_network(1), shuffled(data), "rotation", [1.0], "regression", n_steps=3
    )
    assert all(map(math.isfinite, found.evidences))


def curve(*evidences, learnt=1.0, **options):
    """Return the profile of some evidences, with two repetitions that differ in all alike."""
    values = tuple(0.5 * i for i in range(len(evidences)))
    raised = tuple(evidence + 0.5 for evidence in evidences)
    lowered = tuple(evidence - 0.5 for evidence in evidences)
    repeats = options.pop("repeats", (raised, lowered))
    return Profile("shear", values, repeats, learnt, **options)


def test_a_maximum_and_its_interval():
    found = curve(-1.0, -0.5, -0.1, -0.11, -0.15)
    assert (found.best, found.is_maximum, found.loss) == (1.0, True, 0.0)
    assert (found.verdict, found.loss_error) == ("maximum", 0.0)
    assert found.interval == (pytest.approx(0.975), pytest.approx(1.625))
    assert found.width == pytest.approx(0.65)
    lines = str(found).splitlines()
    assert lines[3].split() == ["±1.000", "-0.100", "0.000", "learnt,", "best"]
    assert lines[4].split() == ["±1.500", "-0.110", "0.010", "±", "0.000"]
    expected = "shear ±1.000 is a maximum; within 0.02 nats per example of the best from ±0.975"
    assert lines[-1] == f"{expected} to ±1.625"


def test_what_is_not_a_maximum_is_called_so():
    found = curve(-1.0, -0.5, -0.1, -0.05)
    assert (found.best, found.is_maximum, found.verdict) == (1.5, False, "no maximum")
    assert "is not a maximum: ±1.500 is better by 0.050 ± 0.000;" in str(found)
    assert str(found).endswith(", and nothing wider was tried")
    assert not str(curve(-1.0, -0.5, -0.1, -0.05, limit=1.5)).endswith("tried")
    assert curve(-1.0, -0.5, -0.1, -0.096).is_maximum
    found = Profile("shear", (0.5, 1.0), ((-1.0, -2.0), (-1.1, -2.1)), 1.0)
    assert str(found).endswith(", and nothing narrower was tried")


def test_one_repetition_is_not_clear():
    for repeats in (((-1.0, -0.5, -0.1, -0.2),), 2 * ((-1.0, -0.5, -0.1, -0.2),)):
        found = curve(*repeats[0], repeats=repeats)
        assert (found.errors, found.loss_error, found.is_maximum) == (None, None, True)
        assert found.verdict == "not clear"
        assert "is not clear: it is the best that was tried, but its error is not known" in (
            found.conclusion()
        )
    found = curve(-1.0, -0.5, -0.1, -0.05, repeats=((-1.0, -0.5, -0.1, -0.05),))
    assert (found.is_maximum, found.verdict) == (False, "not clear")
    assert "is not clear: ±1.500 is better by 0.050, but its error" in found.conclusion()


def test_what_is_within_the_errors_and_what_is_not_clear():
    noisy = ((-0.5, -0.3, -0.1, -0.20), (-0.5, -0.3, -0.2, -0.08))
    found = curve(*noisy[0], repeats=noisy)
    assert (found.is_maximum, found.verdict) == (True, "maximum within the errors")
    assert "is a maximum within the errors: ±1.500 is better by 0.010 ± 0.110;" in str(found)
    words = curve(-1.0, -0.5, -0.1, -0.096).conclusion()
    assert "is a maximum within 0.005 nats per example: ±1.500 is better by 0.004 ± 0.000" in words
    unclear = ((-0.5, -0.3, -0.1, -0.09), (-0.5, -0.3, -0.2, -0.1))
    found = curve(*unclear[0], repeats=unclear)
    assert (found.is_maximum, found.verdict) == (False, "not clear")
    assert "is not clear: ±1.500 is better by 0.055 ± 0.045; more repetitions tell" in str(found)
    shifted = ((-0.5, -0.3, -0.1, -0.09), (-1.5, -1.3, -1.1, -1.09))
    found = curve(*shifted[0], repeats=shifted)
    assert (found.is_maximum, found.verdict) == (False, "no maximum")
    assert found.errors == pytest.approx([0, 0, 0, 0])


def test_errors_are_those_of_the_difference_to_the_best():
    """Where another value is noisy, errors of the rest are as they are without it."""
    repeats = ((-0.5, -0.10, -0.11), (-0.9, -0.12, -0.13), (-0.1, -0.11, -0.12))
    found = curve(*repeats[0], repeats=repeats, learnt=0.5)
    assert found.errors[1:] == pytest.approx([0, 0], abs=1e-12)
    assert "± " not in str(found).splitlines()[2]  # that of the best


def test_evidences_that_are_not_finite_are_kept():
    found = curve(-math.inf, -0.5, -0.1, -0.2)
    text = json.dumps(found.summary(), allow_nan=False)
    assert profile_of(json.loads(text), str) == found
    assert found.interval[0] == pytest.approx(0.975)


@pytest.mark.parametrize("bad", [-math.inf, math.nan, math.inf])
def test_what_is_not_finite_is_minus_infinity_and_never_the_best(bad):
    repeats = ((bad, -0.101, -0.1, -0.11, -0.2), (-0.2, -0.101, -0.1, -0.11, bad))
    found = curve(*repeats[0], repeats=repeats)
    assert found.evidences[0] == found.evidences[-1] == -math.inf
    assert (found.best, found.verdict, found.interval) == (1.0, "maximum", (0.5, 1.5))
    assert str(found).splitlines()[1].split() == ["±0.000", "-inf", "diverged"]
    assert "inf" not in found.conclusion()
    assert "nan" not in f"{found} {found.summary()}"
    json.dumps(found.summary(), allow_nan=False)
    found = curve(*repeats[0], repeats=repeats, learnt=0.0)
    assert (found.is_maximum, found.verdict, found.loss) == (False, "no maximum", math.inf)
    assert "is not a maximum: training diverges there, and ±1.000 is the best" in str(found)
    with pytest.raises(FloatingPointError, match="finite at no width of shear: training diverged"):
        curve(bad, bad, bad)


def test_an_interval_crosses_dips_that_are_within_the_errors():
    noisy = ((-0.1, -0.14, -0.1, -0.11, -0.4), (-0.1, -0.10, -0.09, -0.11, -0.4))
    found = curve(*noisy[0], repeats=noisy)
    assert found.evidences[1] < found.evidences[2] - 0.02
    assert found.interval[0] == 0.0
    clear = curve(-0.1, -0.14, -0.09, -0.1, -0.2)
    assert clear.interval[0] > 0.5
    assert ", and again at ±0.000" in clear.conclusion()
    outer = ((-0.14, -0.12, -0.1), (-0.1, -0.12, -0.09))  # nothing within beyond it
    found = curve(*outer[0], repeats=outer)
    assert found.interval[0] == pytest.approx(0.6)


@pytest.mark.parametrize("n_steps", [0, 12])
def test_a_value_that_diverges_is_minus_infinity(loader, n_steps, tmp_path):
    class Diverging(li.AffinePoints):
        def transform_by(self, x, coefficients):
            found = super().transform_by(x, coefficients)
            return found / (self.eta.detach()[self.names.index("rotation")] < 2).to(found)

    augmentation = Diverging(init={"rotation": 0.2}, learn="rotation")
    model = li.InvariantModel(plain_network(), augmentation, n_samples=2)
    options = {"n_steps": n_steps, "checkpoint": tmp_path / "profile.json"}
    with pytest.warns(UserWarning, match="rotation ±143.2 degrees is not finite in repetition 2"):
        found = li.profile(model, loader, "rotation", [1.0, 2.5], **options)
    assert [math.isfinite(one) for one in found.evidences] == [True, True, False]
    assert li.profile(model, loader, "rotation", [1.0, 2.5], **options, resume=True) == found


def test_a_profile_that_diverges_everywhere_is_an_error(model, loader):
    options = {"n_steps": 20, "n_repeats": 1, "optimizer_kwargs": {"lr": 1e300}}
    with (
        pytest.warns(UserWarning, match="a smaller step size may help"),
        pytest.raises(FloatingPointError, match="finite at no width of rotation"),
    ):
        li.profile(model, loader, "rotation", [1.0], **options)


# Single ranges of augmentations.


@pytest.mark.parametrize("constraint", [None, "softplus", "tanh"])
@pytest.mark.parametrize("correlated", [False, True])
def test_one_range_is_set_and_others_stay(constraint, correlated):
    augmentation = li.AffinePoints(init=0.3, constraint=constraint, correlated=correlated)
    with torch.no_grad():
        augmentation.eta[0] *= -1
        if correlated:
            augmentation.mixing.copy_(0.1 * torch.randn(6, 6))
    before, eta = augmentation.widths(), augmentation.eta.detach().clone()
    tensors = [buffer.clone() for buffer in augmentation.buffers()]
    for name, width in before.items():
        augmentation.resize_(name, width)
    assert_same(augmentation.buffers(), tensors)
    augmentation.resize_("rotation", 0.7)
    assert augmentation.widths() == pytest.approx(before | {"rotation": 0.7})
    others = [i for i in range(6) if augmentation.names[i] != "rotation"]
    assert torch.equal(augmentation.eta[others], eta[others])
    with pytest.raises(ValueError, match=r"rotation must be between 0 and 3.142"):
        augmentation.resize_("rotation", 4.0)
    with pytest.raises(ValueError, match="learns no range 'turn'"):
        augmentation.resize_("turn", 0.1)


def test_a_closed_range_can_be_opened():
    augmentation = li.AffinePoints(correlated=True)
    augmentation.resize_("shear", 0.4)
    assert augmentation.widths()["shear"] == pytest.approx(0.4)


def test_single_ranges_of_compositions_and_finite_groups():
    both = li.Compose(li.AffineImage(init=0.1), li.Colour(init=0.2))
    before = both.widths()
    both.resize_("rotation", 0.5)
    assert both.widths() == pytest.approx(before | {"rotation": 0.5})
    assert both.in_words("rotation", math.pi) == "±180.0 degrees"
    group = li.FiniteGroup("flips", init=0.5)
    group.resize_("half_turn", 0.25)
    assert group.widths() == {"horizontal_flip": 0.5, "vertical_flip": 0.5, "half_turn": 0.25}
    assert group.in_words("half_turn", 0.25) == "0.250 of the identity's weight"
    assert li.FiniteGroup("flips").frozen().widths() == {}


class Several(li.Augmentation):
    """A range of two numbers, and one that is not learnt."""

    def __init__(self):
        super().__init__()
        self.register_hyperparameter("pair", torch.tensor([0.2, -0.4]))


def test_numbers_of_one_range_keep_their_proportions():
    augmentation = Several()
    kept = [tensor.clone() for tensor in augmentation.entries("pair")]
    augmentation.resize_("pair", 0.8)
    assert augmentation.pair.tolist() == pytest.approx([0.4, -0.8])
    for tensor, before in zip(augmentation.entries("pair"), kept, strict=True):
        tensor.copy_(before)
    assert torch.equal(augmentation.pair, torch.tensor([0.2, -0.4]))
    augmentation.resize_("pair", 0.0)
    augmentation.resize_("pair", 0.3)
    assert augmentation.pair.tolist() == pytest.approx([0.3, 0.3])
    augmentation = li.AffinePoints(init=0.2, correlated=True)
    with torch.no_grad():
        augmentation.mixing[2] = torch.tensor([0.1, -0.3, 0, 0, 0, 0])
    augmentation.resize_("rotation", 1.2)
    assert augmentation.eta[2].item() == pytest.approx(0.4)
    assert augmentation.mixing[2, :2].tolist() == pytest.approx([0.2, -0.6])


def test_a_range_that_says_not_what_it_is_made_of_is_named():
    with pytest.raises(NotImplementedError, match=r"Several must say by entries\(name\) what its"):
        Several().entries("turn")
