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

STOCK = [
    AsdlEF,
    AsdlGGN,
    AsdlHessian,
    BackPackEF,
    BackPackGGN,
    CurvlinopsEF,
    CurvlinopsGGN,
    CurvlinopsHessian,
]


def plain():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


def invariant():
    return li.InvariantModel(plain(), li.FiniteGroup("quarter_turns"), n_samples=4)


def run(backend, model, structure, x=None):
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    model.output_size = 3
    x, y = torch.randn(4, 1, 6, 6) if x is None else x, torch.tensor([0, 1, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, result = getattr(backend(model, "classification"), structure)(x, y, N=4)
    return result.to_matrix() if structure == "kron" else result


def twin_of(backend):
    return AugmentedEF if backend.__name__.endswith("EF") else AugmentedGGN


@pytest.mark.parametrize("backend", STOCK)
def test_stock_backends_without_kron_have_none(backend):
    report = check_model(plain(), backend=backend)
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
    report = check_model(model, backend=backend)
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
    elif backend in (AsdlHessian, BackPackEF, CurvlinopsHessian):
        assert "it has no 'kron', with samples or without" in text
    else:
        assert "every sample counts as an input of its own" in text
        ours = run(twin_of(backend), model, "kron")
        assert (run(backend, model, "kron") - ours).norm() > 0.5 * ours.norm()


LAYERS = {
    "Linear": (lambda: nn.Linear(5, 4), (4, 5)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3), (4, 2, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (4, 2, 3, 3)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 3, 2)),
    "groups": (lambda: nn.Conv2d(2, 4, 2, groups=2), (4, 2, 3, 3)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (4, 2, 3, 3)),
    "Embedding": (lambda: nn.Embedding(11, 3), (4, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(5), (4, 5)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 2), (4, 2, 3)),
    "SparseConv2d": (lambda: li.layers.SparseConv2d(2, 3, 2), (4, 2, 3, 3)),
    "LiftingConv2d": (lambda: li.layers.LiftingConv2d(2, 3, 2), (4, 2, 3, 3)),
    "FactoredLinear2d": (lambda: li.layers.FactoredLinear2d(2, 3, 3, 2), (4, 2, 3, 3)),
}


@pytest.mark.parametrize("backend", [AsdlEF, AsdlGGN, BackPackGGN, CurvlinopsEF, CurvlinopsGGN])
@pytest.mark.parametrize("name", LAYERS)
def test_of_layers_it_says_which_are_known(name, backend):
    build, shape = LAYERS[name]
    layer = build()
    x = torch.randint(11, shape) if name == "Embedding" else torch.randn(shape)
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(layer(x)[0].numel(), 3))
    size = sum(parameter.numel() for parameter in model.parameters())
    try:
        known = run(backend, model, "kron", x).shape == (size, size)
    except NotImplementedError:  # "un-supported layers", "does not have an extension", "groups"
        known = False
    report = check_model(model, backend=backend)
    assert bool(report) == known
    if not known:
        assert f"no: {backend.__name__} does not know" in str(report)


def test_an_invariant_model_inside_is_named():
    model = nn.Sequential(nn.Identity(), invariant())
    assert "1 is an InvariantModel, which CurvlinopsGGN does not know" in str(
        check_model(model, backend=CurvlinopsGGN)
    )


def test_ours_have_nothing_against_it(backend):
    model = invariant()
    training = model.training
    assert check_model(model, backend=backend)
    assert model.training == training


@pytest.mark.parametrize("backend", [int, nn.Linear(2, 2)])
def test_backend_must_be_one(backend):
    with pytest.raises(TypeError, match="a class of curvature backends such as"):
        check_model(plain(), backend=backend)


def test_a_backend_of_ones_own_is_taken_for_one_of_laplace():
    class Own(CurvatureInterface):
        pass

    assert "Own does not know" in str(check_model(invariant(), backend=Own))
