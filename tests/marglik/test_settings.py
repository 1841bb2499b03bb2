"""Settings check themselves, and say when and how far steps are taken."""

import dataclasses
import math

import pytest
import torch
from builders import (
    invariant_network,
    labelled_points,
    plain_network,
    shuffled,
    training_settings,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF
from laplace_invariance.marglik import (
    Augerino,
    Evidence,
    KernelBound,
    Refit,
    Running,
    Search,
    training,
)

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}
EMPTY = DataLoader(TensorDataset(torch.zeros(0, 2), torch.zeros(0)))
PARTIAL = DataLoader(TensorDataset(torch.randn(9, 2), torch.zeros(9).long()), 3, sampler=[0, 1, 2])

N = 30
POINTS = labelled_points(N)


class Batches:
    """A batch sampler that says nothing of what is in its batches."""

    def __init__(self, indices, size=7):
        self.batches = [indices[i : i + size] for i in range(0, len(indices), size)]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def in_batches(sampler):
    return DataLoader(POINTS, batch_sampler=BatchSampler(sampler, 7, drop_last=False))


REPEATING = {
    "replacement": DataLoader(POINTS, 7, sampler=RandomSampler(POINTS, replacement=True)),
    "weights": DataLoader(POINTS, 7, sampler=WeightedRandomSampler(torch.rand(N), N)),
    "replacement in batches": in_batches(RandomSampler(POINTS, replacement=True)),
    "weights in batches": in_batches(WeightedRandomSampler(torch.rand(N), N)),
    "list": DataLoader(POINTS, 7, sampler=[*range(N - 1), 3]),
    "batches": DataLoader(POINTS, batch_sampler=Batches([*range(N), 3])),
    "negative": DataLoader(POINTS, batch_sampler=Batches([*range(N - 1), -2])),
}
PARTS = {
    "subset in batches": in_batches(SubsetRandomSampler(range(11))),
    "batches": DataLoader(POINTS, batch_sampler=Batches(list(range(N - 1)))),
}
WHOLE = {
    "without replacement": DataLoader(
        POINTS, 7, sampler=WeightedRandomSampler(torch.rand(N) + 1, N, replacement=False)
    ),
    "permutation": DataLoader(POINTS, 7, sampler=SubsetRandomSampler(range(N))),
    "batches": DataLoader(POINTS, batch_sampler=Batches(list(reversed(range(N))))),
    "tensors": DataLoader(POINTS, batch_sampler=Batches(torch.arange(N))),
}

BAD = {
    "likelihood": ({"likelihood": "poisson"}, ValueError, "'classification' or 'regression'"),
    "no epochs": ({"n_epochs": 0}, ValueError, "n_epochs must be positive"),
    "half an epoch": ({"n_epochs": 2.5}, ValueError, "n_epochs .*, an integer, got 2.5"),
    "a float of epochs": ({"n_epochs": 2.0}, ValueError, "n_epochs .*, an integer, got 2.0"),
    "epochs as a text": ({"n_epochs": "3"}, TypeError, "n_epochs must be positive .*got '3'"),
    "infinite step": ({"lr_aug": math.inf}, ValueError, "lr_aug must be positive and finite"),
    "step that is no number": ({"lr_aug_min": math.nan}, ValueError, "lr_aug_min must be finite"),
    "no temperature": ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    "no noise": ({"sigma_noise_init": 0.0}, ValueError, "sigma_noise_init must be positive"),
    "negative precision": ({"prior_prec_init": -1.0}, ValueError, "prior_prec_init must be"),
    "no such estimator": ({"estimator": "exact"}, ValueError, "one of running, refit, kernel"),
    "no estimator": ({"estimator": 3}, TypeError, "a name or an object"),
    "no such subset": ({"subset_of_weights": "some"}, ValueError, "one of all, last_layer"),
    "no such structure": ({"hessian_structure": "lowrank"}, ValueError, "one of kron, diag, full"),
    "negative steps": (
        {"n_hypersteps": -1},
        ValueError,
        "n_hypersteps must be finite and at least 0",
    ),
    "no rounds": (
        {"n_hypersteps": 0, "n_hypersteps_prior": 3},
        ValueError,
        "number of rounds and must be positive",
    ),
    "no bad step": ({"max_bad_steps": 0}, ValueError, "max_bad_steps must be positive"),
    "LBFGS": ({"optimizer_cls": torch.optim.LBFGS}, ValueError, "LBFGS"),
    "class as objective": ({"objective": Augerino}, TypeError, "objective must be an instance"),
    "one callback": ({"callbacks": print}, TypeError, "callbacks must be a list"),
    "name as callback": ({"callbacks": ["print"]}, TypeError, "callbacks must be a list"),
    "partial sampler": ({"train_loader": PARTIAL}, ValueError, "sampler yields 3 of 9"),
    "nothing to resume": ({"resume": True}, ValueError, "resume=True needs to know the checkpoint"),
    "one file for both": (
        {"checkpoint": "a", "history": "./a"},
        ValueError,
        "checkpoint and history cannot both be a",
    ),
    "no data": ({"train_loader": EMPTY}, ValueError, "train_loader is empty"),
    "list as loader": ({"train_loader": [1, 2]}, TypeError, "train_loader must be a DataLoader"),
    "no validation data": ({"valid_loader": EMPTY}, ValueError, "valid_loader is empty"),
    "other evidence data": (
        {"marglik_loader": shuffled(labelled_points(9))},
        ValueError,
        "evidence is that of the training data",
    ),
    "two sizes": (
        {"marglik_loader": shuffled(labelled_points()), "marglik_batch_size": 3},
        ValueError,
        "not both",
    ),
    "persistent workers": (
        {
            "train_loader": shuffled(labelled_points(), num_workers=1, persistent_workers=True),
            "checkpoint": "a",
        },
        ValueError,
        "persistent_workers=True cannot be resumed",
    ),
    "frozen model": (
        {"model": plain_network().requires_grad_(False)},
        ValueError,
        "no parameter that requires grad",
    ),
}


@pytest.mark.parametrize(("change", "error", "match"), BAD.values(), ids=BAD)
def test_bad_arguments_are_explained(tmp_path, monkeypatch, change, error, match):
    monkeypatch.chdir(tmp_path)
    arguments = {"model": invariant_network(), "train_loader": shuffled(labelled_points())}
    with pytest.raises(error, match=match):
        li.marglik_training(**arguments | FEW | change)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argument", ["train_loader", "marglik_loader"])
@pytest.mark.parametrize(
    ("loader", "match"),
    [
        *((loader, "of every example once; give marglik_loader=") for loader in REPEATING.values()),
        *((loader, r"yields \d+ of 30 examples.*data\.Subset") for loader in PARTS.values()),
    ],
    ids=[*(f"repeats, {name}" for name in REPEATING), *(f"part, {name}" for name in PARTS)],
)
def test_evidence_of_other_data_is_refused(loader, match, argument):
    arguments = {"train_loader": shuffled(POINTS)} | {argument: loader}
    with pytest.raises(ValueError, match=match):
        li.marglik_training(plain_network(), **arguments, **FEW)


@pytest.mark.parametrize("loader", WHOLE.values(), ids=WHOLE)
def test_samplers_of_all_examples_are_checked_without_a_trace(loader):
    before = torch.get_rng_state()
    assert training_settings(loader).data.evidence_loader is loader
    assert torch.equal(torch.get_rng_state(), before)


def test_the_way_out_of_weighted_training():
    """The evidence is that of other batches, unless it is estimated from those of training."""
    weighted = REPEATING["weights"]
    whole = DataLoader(POINTS, 11)
    settings = training_settings(weighted, marglik_loader=whole, estimator=Refit())
    assert settings.data.evidence_loader is whole
    for estimator in (Running(), KernelBound()):
        with pytest.raises(ValueError, match=r"draws with replacement.*estimator='refit'"):
            training_settings(weighted, marglik_loader=whole, estimator=estimator)


class Hidden(torch.utils.data.Dataset):
    """Data of which targets are not at hand."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


@pytest.mark.parametrize("wrap", [lambda data: data, Hidden], ids=["at hand", "hidden"])
def test_labels_that_are_passed_over_are_refused(wrap):
    x, y = labelled_points(N).tensors
    y = y.index_fill(0, torch.tensor([17]), -100)
    data = TensorDataset(x, y)
    with pytest.raises(ValueError, match=r"label -100 is no class.*data\.Subset"):
        li.marglik_training(plain_network(), DataLoader(wrap(data), 7), **FEW)
    kept = torch.utils.data.Subset(data, [i for i in range(N) if i != 17])
    li.marglik_training(plain_network(), DataLoader(kept, 7), **FEW)


def test_labels_beyond_the_outputs_are_refused():
    x, y = labelled_points(N).tensors
    message = r"label 3 is beyond the 3 outputs .* count from 0 to 2"
    with pytest.raises(ValueError, match=message):
        li.marglik_training(plain_network(), DataLoader(TensorDataset(x, y + 1), 7), **FEW)


def test_every_argument_becomes_the_setting_of_its_name(monkeypatch, tmp_path):
    class Captured(Exception):
        pass

    def capture(model, settings):
        raise Captured(settings)

    data = labelled_points()
    given = {
        "train_loader": shuffled(data),
        "likelihood": "regression",
        "hessian_structure": "diag",
        "backend": AugmentedEF,
        "optimizer_cls": torch.optim.SGD,
        "optimizer_kwargs": {"lr": 0.5},
        "scheduler_cls": torch.optim.lr_scheduler.StepLR,
        "scheduler_kwargs": {"step_size": 3},
        "n_epochs": 31,
        "lr_hyp": 0.25,
        "prior_structure": "scalar",
        "n_epochs_burnin": 5,
        "n_hypersteps": 7,
        "marglik_frequency": 2,
        "prior_prec_init": 11.0,
        "sigma_noise_init": 13.0,
        "temperature": 17.0,
        "fix_sigma_noise": "fixed",
        "progress_bar": "bar",
        "enable_backprop": "backprop",
        "dict_key_x": "x",
        "dict_key_y": "y",
        "backend_kwargs": {"output_rank": 3},
        "objective": Evidence(),
        "search": Search(n_steps=41),
        "lr_aug": 0.75,
        "lr_aug_min": 0.125,
        "marglik_loader": None,
        "marglik_batch_size": 19,
        "n_hypersteps_prior": 23,
        "estimator": Running(every=29),
        "subset_of_weights": "last_layer",
        "valid_loader": shuffled(data),
        "callbacks": [print],
        "checkpoint": tmp_path / "a",
        "resume": "resume",
        "history": tmp_path / "b",
        "max_bad_steps": 37,
    }
    monkeypatch.setattr(training, "Trainer", capture)
    with pytest.raises(Captured) as captured:
        li.marglik_training(plain_network(), **given)
    (settings,) = captured.value.args
    found = {}
    for group in dataclasses.fields(settings):
        part = getattr(settings, group.name)
        if group.name == "ranks":  # which is no argument
            continue
        found |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    assert found == given


def test_layers_may_ask_for_smaller_steps():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), li.layers.ScalarBias())
    for arguments, rate in (({}, 1e-3), ({"lr": 0.5}, 0.5)):
        settings = training_settings(
            shuffled(labelled_points()), optimizer_kwargs=arguments
        ).optimizer
        optimizer, _ = settings.build(model)
        rates = {
            id(parameter): group["lr"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        assert rates[id(model[0].weight)] == rates[id(model[0].bias)] == rate
        assert rates[id(model[1].bias)] == pytest.approx(rate / 10)
        assert len(rates) == 3


def test_settings_are_frozen():
    settings = training_settings(shuffled(labelled_points()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.schedule.n_epochs = 3


def test_step_size_follows_half_a_cosine():
    loader = shuffled(labelled_points())
    settings = training_settings(loader, lr_aug=0.1, lr_aug_min=0.02).hyperparameters
    rates = [settings.rate(epoch, 11) for epoch in range(1, 12)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02 + 0.08 * (1 + math.cos(math.pi * 10 / 11)) / 2)
    assert rates == sorted(rates, reverse=True)
    settings = training_settings(loader, lr_aug=0.1).hyperparameters
    assert settings.rate(11, 10) == pytest.approx(0.001)  # a hundredth, one epoch after the end


def test_schedule_counts_epochs_from_one_and_steps_by_round():
    loader = shuffled(labelled_points())
    schedule = training_settings(loader, n_epochs_burnin=4, marglik_frequency=2).schedule
    assert [epoch for epoch in range(1, 9) if schedule.due(epoch)] == [4, 6, 8]
    assert (schedule.rounds, schedule.prior_steps) == (1, 10)
    schedule = training_settings(loader, n_hypersteps=2, n_hypersteps_prior=3).schedule
    assert (schedule.rounds, schedule.prior_steps) == (2, 3)


def test_evidence_has_batches_of_its_own():
    data = labelled_points()
    loader = DataLoader(data, batch_size=15)
    settings = training_settings(shuffled(data), marglik_batch_size=30).data
    assert len(settings.evidence_loader) == 1
    assert settings.evidence_loader is settings.evidence_loader
    settings = training_settings(shuffled(data), marglik_loader=loader).data
    assert settings.evidence_loader is loader
    assert training_settings(loader).data.evidence_loader is loader


def test_evidence_is_of_all_examples():
    """The evidence includes those examples that ``drop_last`` leaves out of training."""
    torch.manual_seed(0)
    data, model = labelled_points(), plain_network()
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}}
    whole = li.marglik_training(model, DataLoader(data, 30), **still)
    part = li.marglik_training(model, DataLoader(data, 16, drop_last=True), **still)
    assert part.history[0]["evidence"] == pytest.approx(whole.history[0]["evidence"])


@pytest.mark.parametrize("given", [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1}], ids=str)
def test_prior_replaces_weight_decay(given):
    before = dict(given)
    settings = training_settings(
        shuffled(labelled_points()), optimizer_cls=torch.optim.AdamW, optimizer_kwargs=given
    )
    optimizer, scheduler = settings.optimizer.build(plain_network())
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert scheduler is None
    assert given == before
