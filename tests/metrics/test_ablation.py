"""What a network loses without its paths, and what is chosen by that."""

import copy
import json

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.layers import FactoredLinear2d, PolyphasePool2d, ResidualPathway
from laplace_invariance.metrics import Ablation, ablation, layer_report


def network():
    first = ResidualPathway(
        conv=nn.Conv2d(1, 2, 3, padding=1),
        f_fc=FactoredLinear2d(1, 2, 4, 2),
        pool=PolyphasePool2d(2),
    )
    second = ResidualPathway(conv=nn.Conv2d(2, 3, 1), f_fc=FactoredLinear2d(2, 3, 2))
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(12, 3))


def data(n=11):
    return TensorDataset(torch.randn(n, 1, 4, 4), torch.randint(3, (n,)))


def fitted(model, loader, structure="kron", likelihood="classification", precision=0.7):
    la = Laplace(
        model,
        likelihood,
        subset_of_weights="all",
        hessian_structure=structure,
        backend=AugmentedGGN,
        prior_precision=precision,
    )
    la.fit(loader)
    return la


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_costs_are_differences_of_evidence(structure):
    """The evidence without a path has its data term and the terms of all other tensors."""
    torch.manual_seed(0)
    model, loader = network(), DataLoader(data(), batch_size=5)
    names = [name for name, _ in model.named_parameters()]
    la = fitted(model, loader, structure, precision=torch.rand(len(names)) + 0.5)
    found = ablation(la, loader).row("2", "f_fc")
    smaller = copy.deepcopy(model)
    for parameter in smaller[2].f_fc.parameters():
        parameter.data.zero_()
    x, y = loader.dataset.tensors
    loss = nn.functional.cross_entropy(smaller(x), y, reduction="sum")
    kept = torch.cat(
        [
            torch.full((parameter.numel(),), not name.startswith("2.f_fc."))
            for name, parameter in model.named_parameters()
        ]
    )
    matrix = {
        "kron": lambda: la.H_facs.to_matrix(),
        "diag": lambda: la.H.diag(),
        "full": lambda: la.H,
    }[structure]()
    prior = la.prior_precision_diag[kept]
    posterior = matrix[kept][:, kept] + prior.diag()
    scatter = (la.mean[kept] ** 2 * prior).sum()
    evidence = -loss - 0.5 * (posterior.logdet() - prior.log().sum() + scatter)
    expected = (la.log_marginal_likelihood() - evidence) / len(y)
    assert found.cost == pytest.approx(expected.item(), rel=1e-4)
    assert found.log_likelihood == pytest.approx((loss + la.log_likelihood).item() / len(y))
    assert found.saved == pytest.approx(found.log_likelihood - found.cost)
    right = (smaller(x).argmax(-1) == y).double().mean().item()
    assert found.accuracy == pytest.approx(right)


def test_an_idle_path_is_not_chosen_and_a_needed_one_is():
    torch.manual_seed(0)
    model, examples = network(), data(60)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.f_fc.theta_1.weight.zero_()
        model[2].conv.weight.mul_(5)
        model[4].weight.mul_(5)
        labels = model(examples.tensors[0]).argmax(-1)
    loader = DataLoader(TensorDataset(examples.tensors[0], labels), batch_size=7, shuffle=True)
    la = fitted(model, loader, precision=0.1)
    found = ablation(la, loader, threshold=0.01)
    assert found.chosen == {"0": "CONV", "2": "CONV"}
    assert found.accuracy == 1.0
    assert found.free.cost < 0  # complexity that buys nothing
    assert found.free.log_likelihood == pytest.approx(0, abs=1e-6)
    assert found.free.accuracy == found.unused.accuracy == 1.0
    assert found.row("2", "conv").cost > 0.1
    report = layer_report(la, found)
    assert report.chosen == found.chosen
    assert report.rows[1].cost == found.row("0", "f_fc").cost
    assert "costs" in str(report).splitlines()[0]
    assert "costs" not in str(layer_report(la)).splitlines()[0]
    assert Ablation.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    assert "all free paths" in str(found)


def test_of_two_equal_paths_one_is_chosen():
    """Either costs nothing while the other is there, and yet the network needs one."""
    torch.manual_seed(0)
    one, other = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        one.weight.mul_(20)
        other.weight.copy_(one.weight)
    model = nn.Sequential(ResidualPathway(one=one, other=other))
    x = torch.randn(50, 4)
    loader = DataLoader(TensorDataset(x, model(x).argmax(-1)), batch_size=10)
    found = ablation(fitted(model, loader, precision=1e-3), loader)
    assert max(row.cost for row in found.rows) < 0.01
    assert [row.chosen for row in found.rows].count(True) == 1
    assert found.unused.accuracy == 1.0


def test_everything_is_left_as_it_was():
    torch.manual_seed(0)
    model, examples = network(), data()
    loader = DataLoader(examples, batch_size=5, shuffle=True)
    la = fitted(model, loader)
    model.train()
    model[2].eval()
    modes = [module.training for module in model.modules()]
    before = [tensor.clone() for tensor in model.state_dict().values()]
    test = DataLoader(data(), batch_size=4, shuffle=True)
    evidence, state = la.log_marginal_likelihood(), torch.get_rng_state()
    first = ablation(la, loader, test)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    for old, new in zip(before, model.state_dict().values(), strict=True):
        assert torch.equal(old, new)
    assert la.log_marginal_likelihood() == evidence
    assert not any(module._off for module in model.modules() if hasattr(module, "_off"))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert ablation(la, loader).rows[0].cost == first.rows[0].cost


def test_a_regression_has_no_accuracy():
    torch.manual_seed(0)
    model = network()
    loader = DataLoader(TensorDataset(torch.randn(11, 1, 4, 4), torch.randn(11, 3)), batch_size=5)
    la = fitted(model, loader, likelihood="regression")
    la.sigma_noise = 0.5
    found = ablation(la, loader)
    assert found.accuracy is None
    with model[0].without("conv"):
        la.loss = 0.5 * sum((model(x) - y).square().sum() for x, y in loader).detach()
    lost = found.row("0", "conv").log_likelihood
    la_whole = fitted(model, loader, likelihood="regression")
    la_whole.sigma_noise = 0.5
    assert lost == pytest.approx((la_whole.log_likelihood - la.log_likelihood).item() / 11)


def test_a_model_without_paths_is_refused():
    loader = DataLoader(data(), batch_size=5)
    la = fitted(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), loader)
    with pytest.raises(ValueError, match="no ResidualPathway"):
        ablation(la, loader)
    unfitted = Laplace(network(), "classification", "all", "kron", backend=AugmentedGGN)
    with pytest.raises(TypeError, match=r"need a fitted Laplace.*before fit\(\)"):
        ablation(unfitted, loader)
