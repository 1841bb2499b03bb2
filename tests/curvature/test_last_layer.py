"""Approximations of some weights: gradients arrive where users look."""

import copy
import gc
import io
import weakref

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.hyper import original_of

CLASSES = 3


def points():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    augmentation = li.AffinePoints(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05])
    return li.InvariantModel(net, augmentation, 4), torch.randn(11, 2)


def images():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.Flatten(), nn.Linear(32, CLASSES))
    augmentation = li.AffineImage(init=[0.1, -0.2, 0.3, 0.15, 0.25, 0.05])
    return li.InvariantModel(net, augmentation, 4), torch.randn(11, 1, 6, 6)


def loader_of(x):
    return DataLoader(TensorDataset(x, torch.randint(CLASSES, (len(x),))), batch_size=4)


def fit(model, loader, structure="kron", subset="last_layer"):
    torch.manual_seed(1)
    options = {"subset_of_weights": subset, "hessian_structure": structure}
    if subset == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([1, 4, 17, 30])
    la = Laplace(model, "classification", backend=AugmentedGGN, prior_precision=0.5, **options)
    la.fit(loader)
    return la


CHOICES = [
    ("last_layer", "kron"),
    ("last_layer", "diag"),
    ("last_layer", "full"),
    ("subnetwork", "diag"),
    ("subnetwork", "full"),
]


@pytest.mark.parametrize(("subset", "structure"), CHOICES)
@pytest.mark.parametrize("data", [points, images])
def test_gradient_of_the_user_equals_central_differences(data, subset, structure):
    model, x = data()
    loader, eta = loader_of(x), model.augmentation.eta

    def evidence():
        return fit(model, loader, structure, subset).log_marginal_likelihood()

    evidence().backward()
    step, tolerance = (1e-5, 1e-5) if data is points else (1e-7, 1e-4)
    assert relative_error(eta.grad, central_differences(evidence, eta, step)) < tolerance


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_copy_gets_the_same_gradient(structure):
    model, x = points()
    la = fit(model, loader_of(x), structure)
    evidence = la.log_marginal_likelihood()
    (expected,) = torch.autograd.grad(evidence, model.augmentation.eta, retain_graph=True)
    evidence.backward()
    (eta,) = li.hyperparameters(la.model)
    assert eta is not model.augmentation.eta
    for found in (eta.grad, model.augmentation.eta.grad):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    eta.grad.zero_()
    assert model.augmentation.eta.grad.abs().max() > 0  # not the same memory


def test_the_default_of_laplace_can_be_learnt():
    model, x = points()
    loader, before = loader_of(x), model.augmentation.eta.detach().clone()
    with li.learning(model, lr=0.05, optimizer=torch.optim.SGD) as learner:
        for _ in range(2):
            la = Laplace(model, "classification", backend=AugmentedGGN)
            la.fit(loader)
            (-la.log_marginal_likelihood()).backward()
    assert learner.steps == {"augmentation.eta": 2}
    assert not torch.equal(model.augmentation.eta, before)
    torch.testing.assert_close(
        next(li.hyperparameters(la.model)).detach(), learner.history["augmentation.eta"][1]
    )


def test_the_gradient_is_that_at_the_copy():
    """laplace fits the weights and hyperparameters that it copied."""
    model, x = points()
    la = fit(model, loader_of(x))
    (expected,) = torch.autograd.grad(la.log_marginal_likelihood(), model.augmentation.eta)
    model.augmentation.eta.data += 0.5
    (actual,) = torch.autograd.grad(la.log_marginal_likelihood(), model.augmentation.eta)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("change", ["gone", "frozen", "another shape"])
def test_only_originals_that_are_learnt_get_gradients(change):
    model, x = points()
    loader, eta = loader_of(x), model.augmentation.eta
    la = Laplace(model, "classification", backend=AugmentedGGN)
    if change == "gone":
        del model
        gc.collect()
    elif change == "frozen":
        eta.requires_grad_(False)
    else:
        model.augmentation._buffers["eta"] = torch.zeros(7, requires_grad=True)
    la.fit(loader)
    la.log_marginal_likelihood().backward()
    assert next(li.hyperparameters(la.model)).grad.abs().max() > 0
    assert eta.grad is None


def test_copies_of_the_user_are_independent():
    model, x = points()
    twin = copy.deepcopy(model)
    fit(twin, loader_of(x)).log_marginal_likelihood().backward()
    assert twin.augmentation.eta.grad.abs().max() > 0
    assert model.augmentation.eta.grad is None
    fit(twin, loader_of(x), subset="all").log_marginal_likelihood().backward()
    assert model.augmentation.eta.grad is None


def test_a_copy_knows_its_original_and_keeps_nothing_alive():
    model, _ = points()
    twin = copy.deepcopy(model)
    assert original_of(twin, twin.augmentation.eta) is model.augmentation.eta
    assert original_of(model, model.augmentation.eta) is None
    assert list(twin.state_dict()) == list(model.state_dict())
    assert twin.augmentation.__dict__.keys() == model.augmentation.__dict__.keys()
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert original_of(loaded, loaded.augmentation.eta) is None
    gc.disable()  # no cycles: reference counts suffice
    try:
        first, second = weakref.ref(model.augmentation), weakref.ref(twin.augmentation)
        del model
        assert first() is None
        assert original_of(twin, twin.augmentation.eta) is None
        del twin
        assert second() is None
    finally:
        gc.enable()


def test_copies_of_one_module_in_two_places_are_one():
    augmentation = li.AffinePoints(init=0.1)
    twin = copy.deepcopy(nn.ModuleList([augmentation, augmentation]))
    assert twin[0] is twin[1]
    assert twin[0].eta.requires_grad
    assert original_of(twin, twin[1].eta) is augmentation.eta
