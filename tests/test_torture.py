"""Extreme uses, and what is expected of each: finite numbers, or this error."""

import math
import threading
import warnings

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN

FINITE = None
STRUCTURES = ("kron", "diag", "full")


def net(n_out=3, width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, n_out))


def build(change=None, *, n=12, n_out=3, n_samples=2, batch_size=5, init=0.1, images=None):
    """Return a model and a loader; ``change`` may alter the model in place."""
    model = li.InvariantModel(net(n_out), li.AffineImage(init=init), n_samples)
    if change is not None:
        with torch.no_grad():
            change(model)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 4, 4, generator=generator) if images is None else images
    y = torch.arange(len(x)) % min(n_out, 3)
    return model, DataLoader(TensorDataset(x, y), batch_size)


def dead(model):
    model.net[1].weight.zero_()
    model.net[1].bias.fill_(-1.0)


def duplicated(model):
    model.net[1].weight[1:] = model.net[1].weight[:1]


def saturated(model):
    model.net[3].weight.mul_(1e4)


def zero(model):
    for parameter in model.net.parameters():
        parameter.zero_()


CASES = {
    "dead units": (lambda: build(dead), {}, FINITE),
    "duplicated features": (lambda: build(duplicated), {}, FINITE),
    "all weights zero": (lambda: build(zero), {}, FINITE),
    "saturated logits": (lambda: build(saturated), {}, FINITE),
    "one datum": (lambda: build(n=1), {}, FINITE),
    "batches of one": (lambda: build(batch_size=1), {}, FINITE),
    "classes that are not seen": (lambda: build(n_out=7), {}, FINITE),
    "two classes": (lambda: build(n_out=2), {}, FINITE),
    "one sample": (lambda: build(n_samples=1), {}, FINITE),
    "500 samples": (lambda: build(n_samples=500, n=4), {}, FINITE),
    "constant images": (lambda: build(images=torch.full((9, 1, 4, 4), 0.5)), {}, FINITE),
    "black images": (lambda: build(images=torch.zeros(9, 1, 4, 4)), {}, FINITE),
    "equal images": (
        lambda: build(images=torch.rand(1, 1, 4, 4).expand(9, -1, -1, -1)),
        {},
        FINITE,
    ),
    "ranges at zero": (lambda: build(init=0.0), {}, FINITE),
    "rotation at its bound": (lambda: build(init={"rotation": math.pi}), {}, FINITE),
    "prior of 1e-30": (build, {"prior_precision": 1e-30}, FINITE),
    "prior of 1e30": (build, {"prior_precision": 1e30}, FINITE),
    "inputs of 1e20": (lambda: build(images=1e20 * torch.rand(9, 1, 4, 4)), {}, FINITE),
    "inputs that are no numbers": (
        lambda: build(images=torch.full((9, 1, 4, 4), math.nan)),
        {},
        (FloatingPointError, ValueError),
    ),
    "weights that are no numbers": (
        lambda: build(lambda model: model.net[1].weight.fill_(math.nan)),
        {},
        (FloatingPointError, ValueError),
    ),
}


def evidence(model, loader, structure, backend=AugmentedGGN, **options):
    """Return the evidence of a fit, after its gradient was asked for."""
    la = Laplace(model, "classification", "all", structure, backend=backend, **options)
    la.fit(loader)
    value = la.log_marginal_likelihood()
    value.backward()
    return value.item()


def check(make, structure, options, expected, backend=AugmentedGGN):
    model, loader = make()
    if expected is not FINITE:
        with pytest.raises(expected):
            evidence(model, loader, structure, backend, **options)
        return
    assert math.isfinite(evidence(model, loader, structure, backend, **options))
    for tensor in li.hyperparameters(model):
        assert torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", CASES)
def test_extremes_are_finite_or_refused(name, structure):
    make, options, expected = CASES[name]
    check(make, structure, options, expected)


@pytest.mark.parametrize("name", CASES)
def test_extremes_of_the_empirical_fisher(name):
    make, options, expected = CASES[name]
    check(make, "kron", options, expected, AugmentedEF)


OVERFLOWS = ("inputs of 1e20",)  # in single precision, whose largest number is 3e38
SINGLE = [name for name in CASES if CASES[name][2] is FINITE and name not in OVERFLOWS]


@pytest.mark.parametrize("name", OVERFLOWS)
def test_factors_that_overflow_in_single_precision_are_refused(name):
    torch.set_default_dtype(torch.float32)
    check(CASES[name][0], "kron", {}, torch.linalg.LinAlgError)


@pytest.mark.parametrize("name", SINGLE)
def test_extremes_in_single_precision(name):
    """But for the full structure, whose determinant laplace takes of a rounded matrix."""
    make, options, expected = CASES[name]
    torch.set_default_dtype(torch.float32)  # a fixture puts it back
    for structure in ("kron", "diag"):
        check(make, structure, options, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_refused(dtype):
    model, _ = build()
    data = TensorDataset(torch.rand(6, 1, 4, 4, dtype=dtype), torch.arange(6) % 3)
    with pytest.raises(TypeError, match="half precision"):
        evidence(model.to(dtype), DataLoader(data, 3), "kron")


def test_a_thousand_classes():
    model, _ = build(n_out=1000)
    data = TensorDataset(torch.rand(6, 1, 4, 4), torch.arange(6) * 100)
    options = {"backend_kwargs": {"stochastic": True, "num_samples": 1}}
    assert math.isfinite(evidence(model, DataLoader(data, 3), "kron", **options))


def test_deterministic_algorithms_change_nothing():
    model, loader = build()
    torch.manual_seed(2)
    expected = evidence(model, loader, "kron")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.manual_seed(2)
        assert evidence(model, loader, "kron") == expected
    finally:
        torch.use_deterministic_algorithms(before)


def test_two_threads_fit_at_once():
    made = [build(init=0.0) for _ in range(2)]  # before, as initial weights come from one generator
    expected = evidence(*made[0], "kron")
    found, errors = {}, []

    def run(i):
        try:
            found[i] = [evidence(*made[i], "kron") for _ in range(3)]
        except Exception as error:  # shown by the assertion
            errors.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert found == {i: [pytest.approx(expected)] * 3 for i in range(2)}


def test_no_grad_around_a_fit_gives_its_value():
    model, loader = build(init=0.0)
    expected = evidence(model, loader, "kron")
    with torch.no_grad():
        la = Laplace(model, "classification", "all", "kron", backend=AugmentedGGN)
        la.fit(loader)
        assert la.log_marginal_likelihood().item() == pytest.approx(expected)
