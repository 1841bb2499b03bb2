from importlib.metadata import EntryPoint

import pytest
import torch
from laplace import FunctionalLaplace, Laplace, marglik_training
from laplace.curvature import (
    AsdlEF,
    AsdlGGN,
    BackPackEF,
    BackPackGGN,
    CurvlinopsEF,
    CurvlinopsGGN,
    CurvlinopsHessian,
    registry,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

names = {
    "curvlinops-ggn": CurvlinopsGGN,
    "curvlinops-ef": CurvlinopsEF,
    "asdl-ggn": AsdlGGN,
    "asdl-ef": AsdlEF,
    "backpack-ggn": BackPackGGN,
    "backpack-ef": BackPackEF,
}


class OtherGGN(CurvlinopsGGN):
    pass


@pytest.fixture
def model():
    torch.manual_seed(711)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.fixture
def loader():
    torch.manual_seed(711)
    return DataLoader(TensorDataset(torch.randn(10, 3), torch.randint(2, (10,))), batch_size=3)


@pytest.fixture
def offer(monkeypatch):
    def points(*values):
        found = [EntryPoint(name, value, registry.GROUP) for name, value in values]
        monkeypatch.setattr(registry, "_entry_points", lambda: found)

    return points


@pytest.mark.parametrize("name", names)
def test_names_of_own_backends(name):
    assert registry.find_backend(name) is names[name]
    assert name in registry.backend_names()


@pytest.mark.parametrize("backend", [None, CurvlinopsGGN, OtherGGN])
def test_what_is_no_name_stays(backend):
    assert registry.find_backend(backend) is backend


@pytest.mark.parametrize("hessian_structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("subset_of_weights", ["all", "last_layer"])
def test_a_name_is_as_good_as_a_class(model, loader, subset_of_weights, hessian_structure):
    evidences = []
    for backend in ("curvlinops-ggn", CurvlinopsGGN):
        la = Laplace(model, "classification", subset_of_weights, hessian_structure, backend=backend)
        la.fit(loader)
        evidences.append(la.log_marginal_likelihood())
    torch.testing.assert_close(*evidences)


def test_names_for_subnetworks(model):
    indices = torch.LongTensor([0, 3])
    kwargs = {"subset_of_weights": "subnetwork", "hessian_structure": "diag"}
    la = Laplace(model, "classification", subnetwork_indices=indices, backend="asdl-ggn", **kwargs)
    assert isinstance(la.backend, AsdlGGN)
    with pytest.raises(ValueError, match="GGN and EF"):
        Laplace(
            model,
            "classification",
            subnetwork_indices=indices,
            backend="curvlinops-hessian",
            **kwargs,
        )


def test_names_for_functional_laplace(model):
    la = FunctionalLaplace(model, "classification", n_subset=3, backend="curvlinops-ggn")
    assert isinstance(la.backend, CurvlinopsGGN)


def test_names_for_marglik_training(model, loader):
    la, *_ = marglik_training(model, loader, backend="curvlinops-ggn", n_epochs=1, n_hypersteps=1)
    assert isinstance(la.backend, CurvlinopsGGN)


def test_backends_of_other_packages(offer, model):
    offer(("other-ggn", f"{__name__}:OtherGGN"))
    assert "other-ggn" in registry.backend_names()
    la = Laplace(model, "classification", "all", backend="other-ggn")
    assert isinstance(la.backend, OtherGGN)


def test_other_packages_do_not_replace_own_backends(offer):
    offer(("curvlinops-ggn", f"{__name__}:OtherGGN"))
    assert registry.find_backend("curvlinops-ggn") is CurvlinopsGGN


def test_names_that_mean_nothing_or_too_much(offer):
    offer(("other", f"{__name__}:OtherGGN"), ("other", "elsewhere:OtherGGN"), ("odd", "math:pi"))
    with pytest.raises(ValueError, match=r"Unknown backend 'ggnn'.*curvlinops-ggn.*other"):
        registry.find_backend("ggnn")
    with pytest.raises(ValueError, match="Several packages"):
        registry.find_backend("other")
    with pytest.raises(TypeError, match="no CurvatureInterface"):
        registry.find_backend("odd")


def test_the_hessian_has_a_name_too():
    assert registry.find_backend("curvlinops-hessian") is CurvlinopsHessian
