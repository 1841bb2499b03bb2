"""Batches of tensors, indexed at once: those of the loader, and the same random numbers."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from laplace_invariance.marglik import batches
from laplace_invariance.marglik.batches import batches_of

X, Y = torch.arange(22.0).view(11, 2), torch.arange(11)
DATA = TensorDataset(X, Y)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * part for part in super().__getitem__(index))


class Rows(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def seen(iterate, loader):
    """Return batches of two epochs, and the next random numbers."""
    torch.manual_seed(3)
    if loader.generator is not None:
        loader.generator.manual_seed(4)
    found = [batch for _ in range(2) for batch in iterate(loader)]
    return found, torch.rand(2), None if loader.generator is None else loader.generator.get_state()


OPTIONS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "own generator": {"shuffle": True, "generator": torch.Generator()},
    "without the last": {"shuffle": True, "drop_last": True},
    "one by one": {"batch_size": None},
    "collated": {"collate_fn": lambda rows: [len(rows)]},
}


@pytest.mark.parametrize("data", [DATA, Doubled(X, Y), Rows(), Subset(DATA, [3, 1, 7])])
@pytest.mark.parametrize("name", OPTIONS)
def test_batches_are_those_of_the_loader(name, data):
    loader = DataLoader(data, **({"batch_size": 4} | OPTIONS[name]))
    found, expected = (seen(iterate, loader) for iterate in (batches_of, iter))
    assert len(found[0]) == len(expected[0]) == 2 * len(loader)
    for batch, other in zip(found[0], expected[0], strict=True):
        assert type(batch) is type(other)
        for part, same in zip(batch, other, strict=True):
            assert torch.equal(torch.as_tensor(part), torch.as_tensor(same))
            assert not isinstance(part, torch.Tensor) or part.dtype == same.dtype
    assert torch.equal(found[1], expected[1])
    assert found[2] is expected[2] is None or torch.equal(found[2], expected[2])


def test_tensors_are_indexed_once_per_batch(monkeypatch):
    asked = []

    class Tensors(TensorDataset):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    monkeypatch.setattr(batches, "TensorDataset", Tensors)
    assert len(list(batches_of(DataLoader(Tensors(X, Y), batch_size=4)))) == 3
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_whatever_yields_batches_is_iterated_over():
    assert list(batches_of(iter([1, 2]))) == [1, 2]
