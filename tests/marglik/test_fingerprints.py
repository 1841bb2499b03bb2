"""Fingerprints: equal for the same model and data, different for any others; seeds of all draws."""

import copy
import random

import numpy as np
import pytest
import torch
from builders import NoisyPoints, invariant_network, labelled_points, shuffled, training_settings
from torch import nn
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import laplace_invariance as li
from laplace_invariance.marglik.fingerprints import (
    data_fingerprint,
    loader_fingerprint,
    model_fingerprint,
    seeded,
)
from laplace_invariance.marglik.randomness import RandomStates


class Scaled(nn.Module):
    """A module with an option that is in no state, and a buffer that is not kept."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("offset", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("coarse", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))
        self.inner = nn.Dropout(0.1)


def changed_weight(module):
    module.weight.data[1] += 1e-7


def changed_mask(module):
    module.mask[1] = True


def changed_coarse(module):
    module.coarse[0] = 2


def changed_count(module):
    module.count += 1


def changed_offset(module):
    module.offset[0] = 1


def changed_option(module):
    module.scale = 3.0


def changed_dropout(module):
    module.inner.p = 0.2


def changed_class(module):
    module.inner = nn.AlphaDropout(0.1)


@pytest.mark.parametrize(
    "change",
    [
        changed_weight,
        changed_mask,
        changed_coarse,
        changed_count,
        changed_offset,
        changed_option,
        changed_dropout,
        changed_class,
    ],
)
def test_models_that_differ_have_other_fingerprints(change):
    module = Scaled()
    before = model_fingerprint(module)
    other = copy.deepcopy(module).eval().requires_grad_(False)
    assert model_fingerprint(other) == before
    change(other)
    differs = [name for name, value in model_fingerprint(other).items() if value != before[name]]
    of_options = change in (changed_option, changed_dropout, changed_class)
    assert differs == ["checksum of the model's options" if of_options else "checksum of the model"]


def test_an_evidence_does_not_change_it():
    model, loader = invariant_network(), shuffled(labelled_points())
    before = model_fingerprint(model)
    li.log_evidence(model, loader)
    assert model_fingerprint(model) == before
    model.n_samples += 1
    assert model_fingerprint(model) != before


def fingerprint(loader, **options):
    return data_fingerprint(training_settings(loader, **options).data)


def differences(one, other):
    return {name for name in one if one[name] != other[name]}


def test_every_input_and_every_target_counts():
    data = labelled_points()
    x, y = data.tensors
    loader = shuffled(data)
    found = fingerprint(loader)
    state = torch.get_rng_state()
    assert fingerprint(shuffled(TensorDataset(x.clone(), y.clone()))) == found
    assert torch.equal(torch.get_rng_state(), state)
    x[-1, 0] += 1e-6
    assert differences(found, fingerprint(loader)) == {"checksum of the inputs"}
    x[-1, 0] = TensorDataset(x).tensors[0][-1, 0]
    found = fingerprint(loader)
    y[-1] += 1
    assert differences(found, fingerprint(loader)) == {"checksum of the targets"}


class Mappings(Dataset):
    def __init__(self, key="words"):
        self.data = labelled_points()
        self.key = key

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return {"input_ids": x, self.key: "abc"[: i % 3], "array": x.numpy(), "labels": y}


def test_inputs_may_be_mappings():
    data = Mappings()
    loader = shuffled(data)
    found = fingerprint(loader)
    assert found == fingerprint(loader)
    data.key = "others"
    assert differences(found, fingerprint(loader)) == {"checksum of the inputs"}
    data.key = "words"
    data.data.tensors[1][-1] += 1
    assert differences(found, fingerprint(loader)) == {"checksum of the targets"}


class Secret(Dataset):
    """Inputs with noise from a source that nothing seeds."""

    source = random.SystemRandom()

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return torch.tensor([self.source.random(), i]), i % 2


def test_random_transforms_do_not_change_it():
    loader = shuffled(NoisyPoints())
    found = fingerprint(loader)
    np.random.rand()  # noqa: NPY002
    random.random()
    torch.rand(3)
    state = loader.dataset.rng.bit_generator.state
    assert fingerprint(loader) == found
    assert found["checksum of the inputs"] is not None
    assert loader.dataset.rng.bit_generator.state == state
    found = fingerprint(shuffled(Secret()))
    assert found == fingerprint(shuffled(Secret()))
    assert found["checksum of the inputs"] is None
    assert found["checksum of the targets"] is not None


def test_what_a_loader_does_counts():
    data = labelled_points()
    found = loader_fingerprint(shuffled(data))
    assert loader_fingerprint(shuffled(data)) == found
    others = {
        "batch size": shuffled(data, 8),
        "drop_last": shuffled(data, drop_last=True),
        "order": DataLoader(data, 7),
        "generator": shuffled(data, generator=torch.Generator()),
        "indices": DataLoader(data, 7, sampler=SubsetRandomSampler(range(30))),
        "others": DataLoader(data, 7, sampler=SubsetRandomSampler(range(29, -1, -1))),
    }
    fingerprints = [found, *map(loader_fingerprint, others.values())]
    assert len({str(one) for one in fingerprints}) == len(fingerprints)


def test_a_seed_is_that_of_everything():
    loader = shuffled(NoisyPoints(), generator=torch.Generator())
    model = invariant_network()
    model.generator = torch.Generator()
    states = RandomStates(model, [loader])

    def draws(seed):
        with seeded(seed, states):
            return [next(iter(loader))[0].tolist(), model(torch.ones(4, 2)).tolist()]

    before = torch.get_rng_state(), loader.generator.get_state(), random.getstate()
    first = draws(1)
    assert draws(1) == first
    assert all(one != other for one, other in zip(draws(2), first, strict=True))
    after = torch.get_rng_state(), loader.generator.get_state(), random.getstate()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert after[2] == before[2]
