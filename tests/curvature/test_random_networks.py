"""What must hold for every network: networks are drawn from a grammar, see ``tests/grammar.py``."""

import os

import pytest
import torch
from grammar import Case, cases
from hypothesis import HealthCheck, Phase, given, settings
from laplace import Laplace
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, ggn, product, slope_along

import laplace_invariance as li
from laplace_invariance.curvature import (
    AsdlAugmentedGGN,
    AugmentedGGN,
    BackPackAugmentedGGN,
    check_model,
)
from laplace_invariance.draws import common_draws
from laplace_invariance.hyper import differentiable

OPTIONS = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate),  # networks are short, and shrinking takes minutes
    "suppress_health_check": list(HealthCheck),
}
FEW = settings(max_examples=int(os.environ.get("NETWORKS", "50")), **OPTIONS)
MANY = settings(max_examples=500, **OPTIONS | {"derandomize": False})


def structure(case, name, backend=AugmentedGGN, **options):
    """Return loss and curvature of one structure, with draws that are always the same."""
    model, x, y = case.build()
    found = backend(model, case.likelihood, **options)
    with common_draws(5):
        return getattr(found, name)(x, y, N=len(x))


def check_every_property(case):
    check_coverage(case)
    check_diagonals(case)
    check_engines(case)
    check_gradients(case)


def check_coverage(case):
    """Every parameter once, by factors that are symmetric and positive semidefinite."""
    model, x, _ = case.build()
    assert check_model(model, x)
    _, kron = structure(case, "kron", chunk_size=case.chunk_size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert len(kron.kfacs) == len(parameters)
    for factors, parameter in zip(kron.kfacs, parameters, strict=True):
        matrix = product(factors)
        assert matrix.shape == (parameter.numel(),) * 2
        torch.testing.assert_close(matrix, matrix.T, rtol=1e-8, atol=1e-9)
        least = torch.linalg.eigvalsh(matrix).min()
        assert least > -1e-8 * (1 + matrix.abs().max())


def check_diagonals(case):
    """Those of the diagonal and of the full structure are those of the GGN, computed plainly."""
    model, x, _ = case.build()
    with common_draws(5), differentiable():
        exact = ggn(model, model(x), case.likelihood).detach()
    size = exact.abs().max().item() + 1
    for chunk_size in {None, case.chunk_size}:
        _, full = structure(case, "full", chunk_size=chunk_size)
        _, diag = structure(case, "diag", chunk_size=chunk_size)
        torch.testing.assert_close(full, exact, rtol=1e-7, atol=1e-9 * size)
        torch.testing.assert_close(diag, exact.diagonal(), rtol=1e-7, atol=1e-9 * size)


def check_engines(case):
    """Engines have the same factors, or say that they do not support the network."""
    _, native = structure(case, "kron")
    for backend in (AsdlAugmentedGGN, BackPackAugmentedGGN):
        try:
            _, other = structure(case, "kron", backend)
        except NotImplementedError:
            continue
        for found, wanted in zip(other.kfacs, native.kfacs, strict=True):
            size = product(wanted).abs().max().item() + 1
            torch.testing.assert_close(product(found), product(wanted), rtol=1e-6, atol=1e-8 * size)


def check_gradients(case):
    """The evidence has the gradient of central differences, in ranges, priors and noise."""
    model, x, y = case.build()
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    precision = torch.tensor(0.7, requires_grad=True)
    noise = torch.tensor(0.8, requires_grad=True) if case.likelihood == "regression" else None

    def fitted():
        options = {"chunk_size": case.chunk_size}
        kinds = (case.likelihood, "all", case.structure)
        la = Laplace(model, *kinds, backend=AugmentedGGN, backend_kwargs=options)
        with common_draws(5):
            la.fit(loader)
        return la

    def of(la):
        return la.log_marginal_likelihood(precision, noise)

    la = fitted()
    of(la).backward()

    for tensor in li.hyperparameters(model):
        direction = torch.randn(tensor.shape) * model.augmentation.learnt_mask
        slope = (tensor.grad * direction).sum()
        for step in (1e-5, 1e-6, 1e-4):  # the first may meet a kink
            wanted = slope_along(direction, lambda: of(fitted()), tensor, step)
            if torch.allclose(slope, wanted, rtol=1e-3, atol=1e-4):
                break
        torch.testing.assert_close(slope, wanted, rtol=1e-3, atol=1e-4)

    for tensor in (precision, noise):
        if tensor is not None:
            wanted = central_differences(lambda: of(la), tensor)
            torch.testing.assert_close(tensor.grad, wanted, rtol=1e-4, atol=1e-5)


@FEW
@given(cases)
def test_fifty_networks(case):
    check_every_property(case)


@pytest.mark.slow
@MANY
@given(cases)
def test_five_hundred_networks(case):
    check_every_property(case)


def test_a_failing_network_is_code_that_can_be_pasted():
    case = Case("nn.Sequential(nn.Flatten(), nn.Linear(32, 3))", "regression", 2, "sobol", None, 0)
    model, x, _ = eval(repr(case)).build()
    assert model(x).shape == (3, 3)
    assert isinstance(model, li.InvariantModel)


@pytest.mark.parametrize("kind", ["kron", "diag", "full"])
def test_batch_norm_of_one_row_before_a_transposition(kind):
    """torch's own gradient of one row is wrong there, if the gradient is laid out otherwise."""
    code = "nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), Positions(), nn.Flatten(), "
    case = Case(code + "nn.Linear(12, 3))", "classification", 2, "sobol", 1, 0, kind)
    check_gradients(case)
