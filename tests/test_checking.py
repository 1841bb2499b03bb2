"""What check_model says of laplace's own backends is what they do."""

import copy
import warnings

import pytest
import torch
from laplace.curvature import (
    AsdlEF,
    AsdlGGN,
    AsdlHessian,
    BackPackEF,
    BackPackGGN,
    CurvatureInterface,
    CurvlinopsEF,
    CurvlinopsGGN,
    CurvlinopsHessian,
)
from torch import nn

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN, check_model

STOCK = [AsdlEF, AsdlGGN, AsdlHessian, BackPackEF, BackPackGGN, CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian]


def plain():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


def invariant():
    return li.InvariantModel(plain(), li.FiniteGroup("quarter_turns"), n_samples=4)


def run(backend, model, structure):
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    model.output_size = 3
    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result = getattr(backend(model, "classification"), structure)(x, y, N=4)
    return result.to_matrix() if structure == "kron" else result


def twin_of(backend):
    return AugmentedEF if backend.__name__.endswith("EF") else AugmentedGGN


@pytest.mark.parametrize("backend", STOCK)
def test_stock_backends_without_kron_have_none(backend):
    report = check_model(plain(), backend)
    if backend in (AsdlHessian, BackPackEF, CurvlinopsHessian):
        assert not report
        assert f"no: {backend.__name__} has no Kronecker curvature" in str(report)
        with pytest.raises(NotImplementedError):
            run(backend, plain(), "kron")
    else:
        assert report
        run(backend, plain(), "kron")


@pytest.mark.parametrize("backend", STOCK)
def test_of_samples_it_says_what_happens(backend):
    model = invariant()
    report = check_model(model, backend)
    assert not report
    text = str(report)
    assert f"the model is an InvariantModel, which {backend.__name__} does not know" in text
    assert f"{backend.__name__} gives no gradient with respect to augmentation" in text
    assert f"Use {twin_of(backend).__name__}." in text
    if backend is BackPackGGN:
        assert "'kron' and 'diag' fail at the mean over samples" in text
        for structure in ("kron", "diag"):
            with pytest.raises(NotImplementedError, match=r"InvariantModel|SampleMean|FiniteGroup"):
                run(backend, model, structure)
        size = sum(parameter.numel() for parameter in model.parameters())
        assert run(backend, model, "full").shape == (4 * size, 4 * size)
    elif backend in (AsdlGGN, AsdlEF, CurvlinopsGGN, CurvlinopsEF):
        assert "every sample counts as an input of its own" in text
        ours = run(twin_of(backend), model, "kron")
        assert (run(backend, model, "kron") - ours).norm() > 0.5 * ours.norm()


@pytest.mark.parametrize("backend", [AsdlGGN, BackPackGGN, CurvlinopsGGN])
def test_of_layers_it_says_which_are_known(backend):
    layers = {
        "nn": nn.Conv2d(1, 2, 3),
        "ours": li.layers.SparseConv2d(1, 2, 3),
        "norm": nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.GroupNorm(1, 2)),
        "groups": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1, groups=2)),
    }
    for name, layer in layers.items():
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
        report = check_model(model, backend)
        assert bool(report) == (name == "nn" or (name == "groups" and backend is CurvlinopsGGN))
        if not report:
            assert f"no: {backend.__name__} " in str(report)
            size = sum(parameter.numel() for parameter in model.parameters())
            try:
                wrong = run(backend, model, "kron").shape != (size, size)
            except Exception:
                wrong = True
            assert wrong
        assert check_model(model)


def test_an_invariant_model_inside_is_named():
    model = nn.Sequential(nn.Identity(), invariant())
    assert "1 is an InvariantModel, which CurvlinopsGGN does not know" in str(check_model(model, CurvlinopsGGN))


def test_ours_have_nothing_against_it(backend):
    model = invariant()
    training = model.training
    assert check_model(model, backend)
    assert model.training == training


@pytest.mark.parametrize("backend", ["AugmentedGGN", int, nn.Linear(2, 2)])
def test_backend_must_be_one(backend):
    with pytest.raises(TypeError, match="backend must be a class of curvature backends"):
        check_model(plain(), backend)


def test_a_backend_of_ones_own_is_taken_for_one_of_laplace():
    class Own(CurvatureInterface):
        pass

    assert "Own does not know" in str(check_model(invariant(), Own))
