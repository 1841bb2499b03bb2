"""Networks that do not run as they are written: activation checkpointing, and torch.compile."""

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, TangentKernelBound
from laplace_invariance.draws import common_draws


class Checkpointed(nn.Module):
    """A module whose activations are computed again in the backward pass."""

    def __init__(self, module, use_reentrant=False):
        super().__init__()
        self.module = module
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)


def convolutional(activation=nn.Tanh):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), activation(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 5)
    )


def invariant(body):
    augmentation = li.AffineImage(init=0.3, learn=("rotation", "x_scale"))
    return li.InvariantModel(nn.Sequential(body, nn.Tanh(), nn.Linear(5, 3)), augmentation, 3)


def evidence(model, x, y, structure="kron", backend=AugmentedGGN, subset="all"):
    la = Laplace(model, "classification", subset, structure, backend=backend)
    with common_draws(0):
        la.fit(DataLoader(TensorDataset(x, y), 3))
    return la.log_marginal_likelihood()


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_checkpointed_activations_change_nothing(activation, structure, backend):
    x, y = torch.rand(6, 1, 4, 4), torch.randint(3, (6,))
    body = convolutional(activation)
    found = []
    for part in (body, Checkpointed(body)):
        torch.manual_seed(1)
        model = invariant(part)
        value = evidence(model, x, y, structure, backend)
        value.backward()
        found.append((value.detach(), model.augmentation.eta.grad))
    torch.testing.assert_close(*found)


def test_the_gradient_through_checkpointed_activations_equals_central_differences():
    x, y = torch.rand(6, 1, 4, 4), torch.randint(3, (6,))
    model = invariant(Checkpointed(convolutional()))
    evidence(model, x, y).backward()
    eta = model.augmentation.eta
    expected = central_differences(lambda: evidence(model, x, y), eta, 1e-6)
    mask = model.augmentation.learnt_mask
    assert relative_error(mask * eta.grad, mask * expected) < 1e-5


def test_tangent_kernels_of_checkpointed_activations():
    x, body = torch.rand(6, 1, 4, 4), convolutional()
    found = []
    for part in (body, Checkpointed(body)):
        torch.manual_seed(1)
        model = invariant(part)
        with common_draws(0):
            bound = TangentKernelBound(model, "classification")
            bound.log_determinant(x, torch.ones(1)).backward()
        found.append(model.augmentation.eta.grad)
    torch.testing.assert_close(*found)


def test_reentrant_checkpoints_are_refused(backend):
    x, y = torch.rand(6, 1, 4, 4), torch.randint(3, (6,))
    model = invariant(Checkpointed(convolutional(), use_reentrant=True))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        evidence(model, x, y, backend=backend)


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("compiled", ["network", "layer"])
def test_compiled_networks_are_run_as_they_are_written(compiled):
    x, y = torch.rand(6, 1, 4, 4), torch.randint(3, (6,))
    body = convolutional()
    found = []
    for convert in (lambda module: module, lambda module: torch.compile(module, backend="eager")):
        torch.manual_seed(1)
        model = invariant(convert(body) if compiled == "layer" else body)
        if compiled == "network":
            model.net = convert(model.net)
        model(x)  # compiles
        value = evidence(model, x, y)
        value.backward()
        found.append((value.detach(), model.augmentation.eta.grad))
    torch._dynamo.reset()
    torch.testing.assert_close(*found)
