"""``suggest``: the loaders that it takes, and those that it refuses."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import laplace_invariance as li
from laplace_invariance.marglik.settings import DataSettings
from laplace_invariance.marglik.suggestions.compare import shuffled

QUICK = {"n_samples": 4, "n_steps": 4, "n_repeats": 2}
ROTATION = li.AffinePoints(learn="rotation")
X = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.norm(dim=1) > 1.1).long()
DATA = TensorDataset(X, Y)
PART = SubsetRandomSampler(range(30))


def suggested(loader, net=None, **options):
    torch.manual_seed(0)
    net = nn.Linear(2, 2) if net is None else net
    return li.suggest(
        net, loader, ROTATION, **{"ranges": {"rotation": 1.0}, "margin": 9.0} | QUICK | options
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)

    def __len__(self):
        return len(DATA)


class Doubling(DataLoader):
    def __iter__(self):
        return ((2 * x, y) for x, y in super().__iter__())


class Buckets:
    """Batches of a part of the data, which says that it drops the last ones."""

    batch_size, drop_last = 10, True

    def __iter__(self):
        return iter(torch.randperm(30).view(3, 10).tolist())

    def __len__(self):
        return 3


# Which examples.


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (DataLoader(DATA, 20, sampler=PART), "the sampler yields 30 of 60 examples"),
        (DataLoader(DATA, 20, sampler=list(range(60))[::-1][:-1]), "yields 59 of 60"),
        (DataLoader(DATA, 20, sampler=[*range(59), 0]), "yields example 0 more than once"),
        (DataLoader(DATA, 20, sampler=RandomSampler(DATA, num_samples=40)), "yields 40 of 60"),
        (DataLoader(DATA, batch_sampler=BatchSampler(PART, 20, False)), "yields 30 of 60"),
        (DataLoader(DATA, batch_sampler=Buckets()), "leaves out 30 of 60 examples"),
        (
            DataLoader(DATA, 20, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            "draws with replacement, but .*; give a DataLoader of the same data without a sampler",
        ),
        (DataLoader(TensorDataset(X[:0], Y[:0]), 20), "loader is empty: 0 examples"),
        (DataLoader(DATA, 100, drop_last=True), "loader is empty: 60 examples in 0 batches"),
    ],
)
def test_loaders_that_leave_out_or_repeat_examples_are_refused(loader, match):
    with pytest.raises(ValueError, match=match):
        suggested(loader)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        ([1, 2], "loader must be a torch DataLoader with a batch size, .*, got list"),
        (None, "loader must be a torch DataLoader with a batch size, .*, got NoneType"),
        (DataLoader(DATA, batch_size=None), "with a batch size"),
        (DataLoader(Stream(), 20), "a data set with an index, .*, but Stream is an IterableD"),
        (Doubling(DATA, 20), "Doubling has an __iter__ of its own"),
    ],
)
def test_loaders_that_cannot_be_shuffled_are_refused(loader, match):
    with pytest.raises(TypeError, match=match):
        suggested(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, 20, shuffle=True),
        DataLoader(DATA, 20, sampler=SequentialSampler(DATA)),
        DataLoader(DATA, 20, sampler=RandomSampler(DATA, generator=torch.Generator())),
        DataLoader(DATA, 20, sampler=list(range(60))[::-1]),
        DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 20, False)),
        DataLoader(DATA, 20, shuffle=True, drop_last=True),
    ],
)
def test_the_order_of_examples_does_not_matter(loader):
    assert suggested(loader) == suggested(DataLoader(DATA, 20))


def test_the_last_batch_is_dropped_in_training_only():
    own = shuffled(DataLoader(DATA, 25, drop_last=True))
    assert [len(y) for _, y in own] == [25, 25]
    ordered = DataSettings(own, None, None, None, "x", "y").ordered_loader
    assert [len(y) for _, y in ordered] == [25, 25, 10]


def start(worker):
    np.random.seed(worker)  # noqa: NPY002


def test_how_batches_are_loaded_is_carried_over():
    options = {"num_workers": 1, "worker_init_fn": start, "timeout": 50.0, "prefetch_factor": 3}
    options |= {"collate_fn": list, "multiprocessing_context": "spawn", "pin_memory": True}
    loader = DataLoader(DATA, 20, persistent_workers=True, **options)
    own = shuffled(loader)
    for one in (own, DataSettings(own, None, None, None, "x", "y").ordered_loader):
        assert {name: getattr(one, name) for name in options} == {
            name: getattr(loader, name) for name in options
        }
        assert not one.persistent_workers  # they would go on with their own random numbers
