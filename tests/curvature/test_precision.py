"""Curvature in single precision or better: without autocast, and refused for half precision."""

import contextlib

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, TangentKernelBound, check_model
from laplace_invariance.draws import common_draws
from laplace_invariance.precision import without_autocast

HALF = (torch.float16, torch.bfloat16)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)
every_structure = pytest.mark.parametrize("structure", ["kron", "diag", "full"])


def setting(likelihood="classification", dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 3).to(dtype)
    y = torch.randint(3, (20,)) if likelihood == "classification" else torch.randn(20, 3).to(dtype)
    return model, DataLoader(TensorDataset(torch.randn(20, 2).to(dtype), y), batch_size=8)


def fitted(model, loader, likelihood, subset, structure, backend):
    la = Laplace(model, likelihood, subset, structure, backend=backend)
    with common_draws(0):
        la.fit(loader)
    return la


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize(
    ("likelihood", "subset"), [("classification", "all"), ("regression", "last_layer")]
)
@every_structure
def test_a_fit_under_autocast_equals_one_without(likelihood, structure, subset, dtype, backend):
    found = []
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype)):
        model, loader = setting(likelihood)
        with context:
            la = fitted(model, loader, likelihood, subset, structure, backend)
        evidence = la.log_marginal_likelihood()
        with context:
            evidence.backward()
        found.append((evidence.detach(), model.augmentation.eta.grad, la.posterior_precision))
    for values in zip(*found, strict=True):
        without, inside = [getattr(v, "to_matrix", lambda v=v: v)() for v in values]
        assert inside.dtype == torch.float32
        assert torch.equal(without, inside)


def test_predictions_under_autocast_equal_those_without():
    model, loader = setting()
    la = fitted(model, loader, "classification", "all", "kron", AugmentedGGN)
    x = torch.randn(5, 2, dtype=torch.float32)
    posterior = la.posterior_precision  # without the prior, eigenvalues may be zero
    expected = la.backend.jacobians(x), posterior.to_matrix(-0.5), posterior.logdet()
    with torch.autocast("cpu", torch.float16):
        found = la.backend.jacobians(x), posterior.to_matrix(-0.5), posterior.logdet()
        la.backend.gradients(x, torch.arange(5) % 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_inputs_in_half_precision_are_converted():
    found = []
    for convert in (lambda x: x, lambda x: x.half().float(), torch.Tensor.half):
        model, loader = setting()
        x, y = loader.dataset.tensors
        loader = DataLoader(TensorDataset(convert(x), y), 8)
        with torch.autocast("cpu", torch.float16):  # else not even the network takes them
            la = fitted(model, loader, "classification", "all", "kron", AugmentedGGN)
        found.append(la.log_marginal_likelihood().detach())
    assert found[2] == found[1] != found[0]


@every_half
@every_structure
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_weights_in_half_precision_are_refused(subset, structure, dtype, backend):
    model, loader = setting(dtype=dtype)
    with pytest.raises(TypeError, match=r"half precision .*0.weight.*model\.float\(\)"):
        fitted(model, loader, "classification", subset, structure, backend)


@every_half
def test_other_uses_of_weights_in_half_precision_are_refused(dtype):
    model, loader = setting(dtype=dtype)
    x, y = next(iter(loader))
    backend = AugmentedGGN(model, "classification")
    with pytest.raises(TypeError, match="half precision"):
        backend.pull_back("kron", x, y, 20, [])
    with pytest.raises(TypeError, match="half precision"):
        backend.jacobians(x)
    with pytest.raises(TypeError, match="half precision"):
        backend.gradients(x, y)
    with pytest.raises(TypeError, match="half precision"):
        TangentKernelBound(model, "classification").log_determinant(x, torch.ones(1))
    with pytest.raises(TypeError, match="half precision"):
        check_model(model, x)
    with pytest.raises(TypeError, match="half precision"):
        li.marglik_training(model, loader, n_epochs=1)


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_complex_weights_are_refused(structure):
    class Complex(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype)).real

    model = Complex(2, 3, dtype=torch.complex64)
    x, y = torch.randn(4, 2), torch.randint(3, (4,))
    with pytest.raises(TypeError, match=r"weights are complex \(weight"):
        getattr(AugmentedGGN(model, "classification"), structure)(x, y, N=4)


class Casting(nn.Module):
    """A network that computes in half precision whatever it is told."""

    def __init__(self, dtype):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).float()
        self.dtype = dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.net(x).float()


def test_a_model_that_computes_in_half_precision_by_itself_is_refused(backend):
    _, loader = setting()
    with pytest.raises(TypeError, match=r"by itself.*take torch.autocast"):
        fitted(Casting(torch.float16), loader, "classification", "all", "kron", backend)


def test_frozen_weights_may_be_in_half_precision():
    model, loader = setting()
    scale = nn.Linear(3, 3).half().requires_grad_(False)
    scale.weight.data.copy_(2 * torch.eye(3))
    scale.bias.data.zero_()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = model.net, scale

        def forward(self, x):
            return self.scale(self.net(x).half()).float()

    class Exact(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model.net

        def forward(self, x):
            return 2 * self.net(x)

    found = [
        fitted(m, loader, "classification", "all", "kron", AugmentedGGN).log_marginal_likelihood()
        for m in (Scaled(), Exact())
    ]
    torch.testing.assert_close(*found, rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
@pytest.mark.parametrize("estimator", ["running", "refit"])
def test_training_under_autocast_is_that_without_but_for_rounding(estimator, dtype):
    found = []
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype)):
        model, loader = setting()
        model.float()
        with context:
            result = li.marglik_training(
                model,
                loader,
                n_epochs=4,
                optimizer_kwargs={"lr": 0.1},
                estimator=estimator,
                lr_aug=0.05,
            )
        found.append([*result.losses, result.evidence / 20, *model.augmentation.eta.tolist()])
    without, inside = torch.tensor(found)
    assert without[3] < without[0] - 0.02  # it learns
    torch.testing.assert_close(inside, without, rtol=0, atol=0.02)
    assert not torch.equal(inside, without)  # the training loss does use it


def test_a_machine_without_accelerator_has_none_in_any_version_of_torch(monkeypatch):
    def refuse():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)  # torch 2.6
    with torch.autocast("cpu", torch.bfloat16), without_autocast():
        assert not torch.is_autocast_enabled("cpu")
