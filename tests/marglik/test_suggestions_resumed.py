"""``suggest``: files that it resumes from, and those that it refuses."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.marglik.search.pilots import Pilots

ROTATION = li.AffinePoints(learn="rotation")
STARTED = li.AffinePoints(learn="rotation", init=0.3)
X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.norm(dim=1) > 1.1).long()


def net_of(activation):
    torch.manual_seed(0)
    first, last = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((2, 8), (8, 2)))
    return nn.Sequential(first, activation, last)


def frozen_net():
    net = net_of(nn.Tanh())
    net[0].requires_grad_(False)
    return net


def suggested(path, **changes):
    given = {
        "model": net_of(nn.Tanh()),
        "loader": DataLoader(TensorDataset(X, Y), 20),
        "augmentation": ROTATION,
        "ranges": {"rotation": 1.0},
        "n_samples": 4,
        "n_steps": 4,
        "n_repeats": 2,
        "margin": 9.0,
    }
    return li.suggest(**given | {"checkpoint": path, "resume": True} | changes)


@pytest.fixture
def known(tmp_path):
    """A file of evidences, and what was suggested."""
    path = tmp_path / "trials.json"
    return path, suggested(path)


@pytest.fixture
def trained(monkeypatch):
    """The pilots that are trained from now on."""
    evidence, found = Pilots.evidence, []

    def counted(self, pilot):
        found.append(pilot)
        return evidence(self, pilot)

    monkeypatch.setattr(Pilots, "evidence", counted)
    return found


def test_more_repeats_and_other_ranges_may_be_asked_for(known, trained):
    path, before = known
    more = suggested(path, n_repeats=4)
    assert len(trained) == 8  # two candidates, two new repeats, two evidences each
    assert more.rows[0].gains[:2] == before.rows[0].gains
    assert more == suggested(None, resume=False, n_repeats=4)
    trained.clear()
    other = suggested(path, ranges={"rotation": (2.0, 1.0)}, n_repeats=3)
    assert len(trained) == 6
    assert other == suggested(None, resume=False, ranges={"rotation": (1.0, 2.0)}, n_repeats=3)


def test_fewer_repeats_may_be_asked_for(known, trained):
    path, before = known
    more = suggested(path, n_repeats=3)
    trained.clear()
    content = path.read_bytes()
    assert suggested(path) == before
    assert trained == []
    assert path.read_bytes() == content
    assert suggested(path, n_repeats=3) == more


def test_what_does_not_matter_may_differ(known, trained):
    path, before = known
    loader = DataLoader(TensorDataset(X, Y), 20, shuffle=True)
    assert suggested(path, augmentation=STARTED, loader=loader) == before
    assert trained == []


def loader_of(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), **{"batch_size": 20} | options)


CHANGED = X.clone()
CHANGED[-1] += 1e-9
SWAPPED = torch.cat([Y[:40], Y[40:].flip(0)])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"loader": loader_of(CHANGED, Y)}, "checksum of the inputs"),
        ({"loader": loader_of(X, SWAPPED)}, "checksum of the targets"),
        ({"loader": loader_of(X, Y, batch_size=30)}, "checksum of the inputs"),  # of batches
        ({"loader": loader_of(X, Y, drop_last=True)}, "drop_last"),
        ({"loader": loader_of(X[:59], Y[:59])}, "checksum of the inputs"),
        ({"model": net_of(nn.Sigmoid())}, "checksum of the model's options"),
        ({"model": net_of(nn.ELU(0.5))}, "checksum of the model's options"),
        ({"model": frozen_net()}, "learnt weights"),
        (
            {"augmentation": li.AffinePoints(learn="rotation", draws="grid")},
            "checksum of the model's options",
        ),
        (
            {"augmentation": li.AffinePoints(learn="rotation", constraint="tanh")},
            "checksum of the model's options",
        ),
        ({"augmentation": li.AffinePoints()}, "checksum of the model"),
        ({"n_samples": 8}, "checksum of the model's options"),
        ({"n_steps": 6}, "n_steps"),
        ({"n_examples": 30}, "n_examples"),
        ({"optimizer_cls": torch.optim.SGD}, "optimizer"),
        ({"optimizer_kwargs": {"lr": 1e-4}}, "optimizer_kwargs"),
        ({"prior_structure": "scalar"}, "prior_structure"),
        ({"hessian_structure": "diag"}, "hessian_structure"),
        ({"backend": "ef"}, "backend"),
        ({"backend_kwargs": {"stochastic": False}}, "backend_kwargs"),
        ({"subset_of_weights": "last_layer"}, "subset_of_weights"),
    ],
)
def test_files_of_something_else_are_refused(known, trained, changes, match):
    path, _ = known
    content = path.read_bytes()
    with pytest.raises(ValueError, match=rf"trials.json was written by another call: its {match} "):
        suggested(path, **{"model": net_of(nn.Tanh())} | changes)
    assert path.read_bytes() == content
    assert trained == []


def of_trial(**changes):
    """Return a change of the content of a file: another last trial."""

    def change(content):
        content["trials"][-1] |= changes
        return content

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: {"format": 2},
        lambda content: {"format": 1},
        lambda content: [],
        lambda content: None,
        lambda content: "text",
        lambda content: content | {"signature": []},
        lambda content: content | {"signature": None},
        lambda content: content | {"trials": {}},
        lambda content: content | {"trials": None},
        lambda content: content | {"trials": [1]},
        lambda content: content | {"trials": [{}]},
        lambda content: content | {"trials": [[]]},
        lambda content: content | {"format": "2"},
        of_trial(ranges=None),
        of_trial(ranges=["rotation"]),
        of_trial(ranges={"rotation": "wide"}),
        of_trial(ranges={"rotation": -1.0}),
        of_trial(ranges={"rotation": "NaN"}),
        of_trial(repeat="0"),
        of_trial(repeat=-1),
        of_trial(repeat=True),
        of_trial(repeat=0.0),
        of_trial(evidence="high"),
        of_trial(evidence=[0.5]),
        of_trial(evidence=True),
        of_trial(evidence="Infinity"),
        of_trial(evidence=10**400),
        of_trial(earlier="NaN"),
        of_trial(more=1),
        of_trial(ranges={}, evidence=None),
    ],
)
def test_damaged_files_are_refused_by_name(known, trained, change):
    path, _ = known
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"trials\.json (is damaged|has no evidences)"):
        suggested(path)
    assert path.read_bytes() == content
    assert trained == []


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"format": 2, "trials": [1,'])
def test_files_that_are_no_json_are_refused_by_name(known, trained, content):
    path, _ = known
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trials\.json is damaged"):
        suggested(path)
    assert path.read_bytes() == content
    assert trained == []
