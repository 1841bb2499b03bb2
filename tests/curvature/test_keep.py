"""Batches are kept outside of the heap, and a fit notices whether its weights are the same."""

import gc
import weakref
from copy import deepcopy
from itertools import count

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.curvature.trace import keep as keeping
from laplace_invariance.curvature.trace.guards import Guards
from laplace_invariance.curvature.trace.keep import keep, keep_batch


def test_copies_are_equal_and_in_one_region():
    tensors = [
        torch.randn(3, 5),
        torch.randint(9, (7,)),
        torch.rand(2, 3) > 0.5,
        torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(5, 7).mT,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
    ]
    copies = keep(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
        assert copy.data_ptr() != tensor.data_ptr()
        assert copy.data_ptr() % 64 == 0
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_views_are_copied_and_what_is_not_plain_is_left_alone():
    whole = torch.randn(10, 3)
    for view in (whole[2:5], whole[:1].expand(4, 3)):
        (copy,) = keep([view])
        assert torch.equal(copy, view)
        assert copy.data_ptr() != view.data_ptr()
    others = [torch.zeros(0), torch.ones(2, requires_grad=True), torch.empty(3, device="meta")]
    for kept, tensor in zip(keep(others), others, strict=True):
        assert kept is tensor
    first, second = keep([whole, whole])
    assert first is second


class Ring:
    """A loader that fills the same two buffers again and again."""

    def __init__(self, x, y):
        self.dataset = TensorDataset(x, y)
        self.buffers = torch.empty(2, 4, *x.shape[1:])

    def __len__(self):
        return len(self.dataset) // 4

    def __iter__(self):
        x, y = self.dataset.tensors
        for i in range(len(self)):
            buffer = self.buffers[i % 2]
            buffer.copy_(x[4 * i : 4 * i + 4])
            yield buffer, y[4 * i : 4 * i + 4]


def test_buffers_that_a_loader_fills_again_are_kept_as_they_were():
    x, y = torch.randn(16, 2), torch.randint(3, (16,))
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    found = []
    for loader in (DataLoader(TensorDataset(x, y), 4), Ring(x, y)):
        augmentation = li.AffinePoints(init={"rotation": 0.3}, learn="rotation", draws="grid")
        model = li.InvariantModel(net, augmentation, 2)
        la = Laplace(model, "classification", "all", "kron", backend=AugmentedGGN)
        la.fit(loader)
        la.log_marginal_likelihood().backward()
        found.append(model.augmentation.eta.grad)
    torch.testing.assert_close(*found)
    assert found[0].abs().max() > 0


def test_mappings_keep_their_type_and_what_is_not_a_tensor():
    class Batch(dict):
        pass

    y = torch.arange(3)
    x, targets = keep_batch(Batch(ids=torch.randn(3, 2), labels=y, note="n"), y)
    assert type(x) is Batch
    assert x["note"] == "n"
    assert x["labels"] is targets
    assert torch.equal(targets, y)


def test_the_region_is_freed_with_the_last_copy(monkeypatch):
    regions = []

    class Region(keeping.mmap.mmap):
        def __new__(cls, *args, **kwargs):
            made = super().__new__(cls, *args, **kwargs)
            regions.append(weakref.ref(made))
            return made

    monkeypatch.setattr(keeping.mmap, "mmap", Region)
    first, second = keep([torch.randn(3), torch.randn(4)])
    row = second[1:]
    del first, second
    assert regions[0]() is not None
    assert torch.isfinite(row).all()
    del row
    gc.collect()
    assert regions[0]() is None


def setting():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 4)
    data = TensorDataset(torch.randn(20, 2), torch.randint(3, (20,)))
    return model, DataLoader(data, batch_size=7)


def fit(model, loader):
    torch.manual_seed(3)
    la = Laplace(model, "classification", "all", "kron", backend=AugmentedGGN)
    la.fit(loader)
    return la


class OneBuffer:
    """A loader that puts every batch into the same tensors."""

    def __init__(self, loader):
        self.dataset, self._batches = loader.dataset, list(loader)[:2]

    def __len__(self):
        return 2

    def __iter__(self):
        x, y = (torch.zeros_like(tensor) for tensor in self._batches[0])
        for batch in self._batches:
            x.copy_(batch[0])
            y.copy_(batch[1])
            yield x, y


def test_a_loader_may_reuse_its_memory():
    model, loader = setting()
    own = OneBuffer(loader)
    expected, actual = fit(model, list_of(own)), fit(model, own)
    gradients = []
    for la in (expected, actual):
        gradients += torch.autograd.grad(la.log_marginal_likelihood(), model.augmentation.eta)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


def list_of(loader):
    """The same batches, each in memory of its own."""
    batches = [(x.clone(), y.clone()) for x, y in loader]

    class Batches(list):
        dataset = loader.dataset

    return Batches(batches)


def test_only_what_will_be_differentiated_is_kept(monkeypatch):
    model, loader = setting()
    kept = []
    monkeypatch.setattr(
        keeping, "_region", lambda size: kept.append(size) or torch.zeros(size, dtype=torch.uint8)
    )
    fit(model, loader)
    assert len(kept) == 2 * len(loader)  # inputs with targets, and draws
    kept.clear()
    model.augmentation.eta.requires_grad_(False)
    fit(model, loader)
    assert not kept


def test_the_heap_is_trimmed_once_in_a_number_of_batches(monkeypatch):
    calls = []
    monkeypatch.setattr(keeping, "_malloc_trim", lambda: calls.append)
    monkeypatch.setattr(keeping, "_batches", count(1))
    monkeypatch.setattr(keeping, "TRIM_EVERY", 2)
    model, loader = setting()
    la = fit(model, loader)
    assert calls == [0]  # three batches
    la.log_marginal_likelihood().backward()
    assert calls == [0, 0, 0]
    monkeypatch.undo()
    keeping._malloc_trim()(0)


# The weights of a fit.


def swap(w):
    w.data[[0, 1]] = w.data[[1, 0]]


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.data[1:].mul_(1.1),
        lambda w: w.data.neg_(),
        lambda w: w.data[:2].neg_(),
        lambda w: w.data.copy_(w.data.flip(0)),
        swap,
        lambda w: w.data[-1].mul_(1 + max(1e-6, 2 * torch.finfo(w.dtype).eps)),
    ],
    ids=["entries", "signs", "two signs", "order", "two entries", "a little"],
)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("n", [6, 600_000])
def test_guards_notice_what_has_no_version(n, dtype, change):
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(n).to(dtype))
    guards = Guards(model)
    before = guards.fingerprints()
    guards.check(before)
    kept = model.weight.data.clone()
    change(model.weight)
    assert not torch.equal(model.weight.data, kept)
    with pytest.raises(RuntimeError, match="weights changed after fit"):
        guards.check(before)
    guards.check(guards.fingerprints())
    model.weight.data = kept
    guards.check(before)


def test_changed_weights_are_noticed_and_restored_ones_are_accepted():
    model, loader = setting()
    la = fit(model, loader)
    la(torch.randn(5, 2), pred_type="nn", link_approx="mc", n_samples=3)  # puts weights in and back
    la.log_marginal_likelihood().backward()
    with torch.no_grad():
        model.net[0].weight[0, 0] += 0.5
    with pytest.raises(RuntimeError, match="the weights changed after fit"):
        la.log_marginal_likelihood().backward()


def evidence(la):
    return la.log_marginal_likelihood()


class Ordered(nn.Tanh):
    """Features in another order, which a buffer of integers has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(5).roll(2))
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))  # as a counter may

    def forward(self, x):
        self.n_calls += 1
        return super().forward(x)[:, self.order]


def normalised():
    """Return an averaged network with batch normalisation, dropout and a frozen bias."""
    net = nn.Sequential(
        nn.Linear(2, 5), nn.BatchNorm1d(5), Ordered(), nn.Dropout(0.5), nn.Linear(5, 3)
    )
    net(torch.randn(20, 2))  # has statistics
    net[0].bias.requires_grad_(False)
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 4).eval()
    return model, setting()[1]


def frozen(model):
    return model.net[0].bias.data.add_(0.5)


def statistics(model):
    model.train()(torch.randn(9, 2))
    model.eval()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (frozen, "weights"),
        (statistics, "buffers"),
        (lambda m: m.net[4].weight.data.neg_(), "weights"),
        (lambda m: m.net[2].order.copy_(torch.arange(5).flip(0)), "buffers"),
        (lambda m: m.net.__setitem__(4, deepcopy(m.net[4])), "modules"),
        (lambda m: setattr(m.net[3], "p", 0.1), "modules"),
        (lambda m: m.net[4].register_forward_hook(lambda *_: None), "modules"),
        (lambda m: m.augmentation.eta.requires_grad_(False), "choice"),
        (lambda m: setattr(m, "augmentation", li.AffinePoints(init=0.3)), "choice"),
    ],
    ids=[
        "frozen weights",
        "statistics",
        "signs",
        "integers",
        "a copy of a layer",
        "an option",
        "a hook",
        "a frozen hyperparameter",
        "another augmentation",
    ],
)
def test_changes_after_a_fit_are_refused(change, what):
    model, loader = normalised()
    la = fit(model, loader)
    evidence(la).backward()
    change(model)
    with pytest.raises(RuntimeError, match=rf"the {what} .*changed after fit\(\).*fit again"):
        evidence(la).backward()


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_gradient_is_that_of_the_fit_whatever_hyperparameters_and_modes_are_now(
    structure, subset
):
    model, loader = normalised()
    torch.manual_seed(3)
    la = Laplace(model, "classification", subset, structure, backend=AugmentedGGN)
    la.fit(loader)
    eta = model.augmentation.eta
    evidence(la).backward()
    expected, eta.grad = eta.grad, None
    with torch.no_grad():
        eta.mul_(2)
    model.train()
    changed = eta.detach().clone()
    evidence(la).backward()
    torch.testing.assert_close(eta.grad, expected)
    assert torch.equal(eta, changed)
    assert all(module.training for module in model.modules())


class Noisy(nn.Module):
    """A network that adds something to its inputs."""

    def __init__(self, noise):
        super().__init__()
        self.net, self.noise, self.shift = nn.Linear(2, 3), noise, 0.0

    def forward(self, x):
        return self.net(x + 0.3 * self.noise(self, x))


@pytest.mark.parametrize(
    "noise",
    [
        lambda net, x: torch.randn_like(x),
        lambda net, x: nn.functional.dropout(x, 0.5, training=True),
        lambda net, x: net.shift,
    ],
    ids=["random", "dropout", "an attribute"],
)
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_models_that_do_not_repeat_have_no_gradient(structure, noise):
    model = li.InvariantModel(Noisy(noise), li.AffinePoints(init=0.3), 4)
    la = Laplace(model, "classification", "all", structure, backend=AugmentedGGN)
    la.fit(setting()[1])
    model.net.shift = 1.0
    with pytest.raises(RuntimeError, match=r"another loss in the backward.*random numbers"):
        evidence(la).backward()


def test_inputs_in_lists_of_a_mapping_are_watched():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 3)

        def forward(self, data):
            return self.net(data["input_ids"]) * data["scales"][0]

    model = li.InvariantModel(Network(), li.AffinePoints(init=0.3), 4)
    scale = torch.tensor(2.0)
    data = {"input_ids": torch.randn(5, 2), "scales": [scale]}
    loss, _ = AugmentedGGN(model, "classification").kron(data, torch.arange(5) % 3, N=5)
    loss.backward(retain_graph=True)
    scale.mul_(3)
    with pytest.raises(RuntimeError, match=r"inputs changed after fit\(\).*x.clone\(\)"):
        loss.backward()


def test_inputs_that_require_grad_are_watched():
    model, loader = setting()
    x, y = next(iter(loader))
    x.requires_grad_()
    loss, _ = AugmentedGGN(model, "classification").diag(x, y)
    loss.backward(retain_graph=True)
    x.data.mul_(0)
    with pytest.raises(RuntimeError, match="inputs changed after fit"):
        loss.backward()


@pytest.mark.parametrize("scale", [1e308, -1e308])
def test_finite_inputs_whose_sum_is_not_are_accepted(scale):
    from laplace_invariance.curvature.trace.chunks import are_finite

    assert are_finite(torch.full((4,), scale))
    assert not are_finite({"a": torch.tensor([float("inf"), float("-inf")])})
