"""Steps on the prior do not run the model, inside of constant_curvature; outside, it is named."""

import warnings

import laplace
import pytest
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN

CHOICES = [(s, h) for s in ("all", "last_layer") for h in ("kron", "diag", "full")]
NAMED = "constant_curvature"


class Counted(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def setting():
    net = Counted(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    model = li.InvariantModel(net, li.AffinePoints(init=0.3), 3)
    data = TensorDataset(torch.randn(20, 2), torch.randint(3, (20,)))
    return model, DataLoader(data, batch_size=8)


def fit(model, loader, subset="all", structure="kron", backend=AugmentedGGN):
    torch.manual_seed(1)
    la = Laplace(model, "classification", subset, structure, backend=backend)
    la.fit(loader)
    return la


def optimise(la, n_steps=6):
    la.optimize_prior_precision(method="marglik", pred_type="glm", n_steps=n_steps)
    return la.prior_precision.clone()


def network_of(la):
    model = getattr(la.model, "model", la.model)  # inside of laplace's FeatureExtractor
    return model.net


@pytest.mark.parametrize(("subset", "structure"), CHOICES)
@pytest.mark.filterwarnings("ignore")
def test_the_prior_is_optimised_without_running_the_model(subset, structure):
    model, loader = setting()
    expected = optimise(fit(model, loader, subset, structure))
    la = fit(model, loader, subset, structure)
    model.augmentation.eta.grad = None
    calls = network_of(la).calls
    with li.constant_curvature(la):
        actual = optimise(la)
    assert network_of(la).calls == calls
    assert model.augmentation.eta.grad is None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    la.log_marginal_likelihood().backward()  # and afterwards hyperparameters can be differentiated
    assert network_of(la).calls > calls
    assert model.augmentation.eta.grad.abs().max() > 0


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_backends_of_laplace_are_left_alone(structure):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    la = fit(net, setting()[1], structure=structure, backend=CurvlinopsGGN)
    curvature, evidence = la.H, la.log_marginal_likelihood()
    with li.constant_curvature(la):
        torch.testing.assert_close(la.log_marginal_likelihood(), evidence)
    assert la.H is curvature


def test_a_fit_inside_stays():
    model, loader = setting()
    la = fit(model, loader)
    with li.constant_curvature(la):
        la.fit(loader)
        inside = la.H
    assert la.H is inside
    assert la.log_marginal_likelihood().requires_grad


def test_an_error_inside_restores_the_curvature():
    la = fit(*setting())
    curvature, loss = la.H, la.loss
    with pytest.raises(KeyError), li.constant_curvature(la):
        raise KeyError
    assert la.H is curvature
    assert la.loss is loss


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return sum(NAMED in str(warning.message) for warning in caught)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_many_backward_passes_through_a_fit_are_named_once(subset):
    model, loader = setting()
    la = fit(model, loader, subset)
    assert warned(lambda: optimise(la, 3)) == 0
    assert warned(lambda: optimise(la, 3)) == 1
    assert warned(lambda: optimise(la, 5)) == 0
    la.fit(loader)
    assert warned(lambda: optimise(la, 5)) == 1
    with li.constant_curvature(la):
        assert warned(lambda: optimise(la, 5)) == 0


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_learning_may_run_back_as_often_as_it_likes(subset):
    model, loader = setting()
    la = fit(model, loader, subset)
    with li.learning(model, lr=1e-3):
        assert warned(lambda: optimise(la, 6)) == 0


@pytest.mark.parametrize("train", [laplace.marglik_training, li.marglik_training])
def test_training_is_not_warned(train):
    model, loader = setting()
    options = {"backend": AugmentedGGN, "n_epochs": 6, "n_hypersteps": 1}
    assert warned(lambda: train(model, loader, **options)) == 0
