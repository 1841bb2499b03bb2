"""How much of each path is in use: effective parameters, and the report."""

import json

import pytest
import torch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import ggn

from laplace_invariance.curvature import (
    AugmentedGGN,
)
from laplace_invariance.layers import (
    FactoredLinear2d,
    ResidualPathway,
)
from laplace_invariance.metrics import (
    LayerReport,
    effective_parameters,
    layer_report,
)


def small():
    paths = ResidualPathway(conv=nn.Conv2d(1, 2, 3, padding=1), f_fc=FactoredLinear2d(1, 2, 4))
    return nn.Sequential(paths, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))


def fitted(structure="kron", model=None, backend=AugmentedGGN):
    model = small() if model is None else model
    x, y = torch.randn(10, 1, 4, 4), torch.randint(3, (10,))
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=backend,
    )
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    return la, x, y


def test_effective_parameters_are_the_trace_of_curvature_times_covariance():
    la, x, _ = fitted("full")
    sizes = [parameter.numel() for parameter in la.model.parameters()]
    precision = torch.rand(len(sizes)) + 0.5
    la.prior_precision = precision
    exact = ggn(la.model, la.model(x), "classification").detach()
    shares = (
        exact @ torch.linalg.inv(exact + precision.repeat_interleave(torch.tensor(sizes)).diag())
    ).diagonal()
    found = effective_parameters(la)
    assert list(found) == [name for name, _ in la.model.named_parameters()]
    torch.testing.assert_close(
        torch.tensor(list(found.values())), torch.stack([p.sum() for p in shares.split(sizes)])
    )


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_effective_parameters_of_other_structures(structure):
    la, _, _ = fitted(structure)
    la.prior_precision = torch.rand(len(list(la.model.parameters()))) + 0.5
    matrix = la.H_facs.to_matrix() if structure == "kron" else la.H.diag()
    sizes = [parameter.numel() for parameter in la.model.parameters()]
    delta = la.prior_precision.repeat_interleave(torch.tensor(sizes)).diag()
    shares = (matrix @ torch.linalg.inv(matrix + delta)).diagonal().split(sizes)
    found = torch.tensor(list(effective_parameters(la).values()))
    torch.testing.assert_close(found, torch.stack([share.sum() for share in shares]))


def test_effective_parameters_of_a_stock_backend_agree():
    from laplace.curvature import CurvlinopsGGN

    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    ours, x, y = fitted(model=model)
    stock = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=CurvlinopsGGN,
    )
    stock.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    assert effective_parameters(stock) == pytest.approx(effective_parameters(ours))


def test_layer_report_says_which_path_is_in_use():
    la, _, _ = fitted()
    names = [name for name, _ in la.model.named_parameters()]
    off = torch.tensor([1e6 if ".f_fc." in name else 0.1 for name in names])
    la.prior_precision = off
    report = layer_report(la)
    assert report.chosen == {"0": "CONV"}
    conv, f_fc = report.rows
    effective = effective_parameters(la)
    assert conv.effective == pytest.approx(effective["0.conv.weight"] + effective["0.conv.bias"])
    assert conv.parameters == 20
    assert conv.normalised == pytest.approx(conv.effective / 20)
    assert conv.relative == pytest.approx(conv.normalised / (conv.normalised + f_fc.normalised))
    assert conv.relative + f_fc.relative == pytest.approx(1)
    assert f_fc.precision == pytest.approx(1e6)
    assert f_fc.precisions["theta_1.weight"] == pytest.approx(1e6)
    path = la.model[0].f_fc
    assert f_fc.norm == pytest.approx(
        torch.cat([p.flatten() for p in path.parameters()]).norm().item()
    )
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert "conv (CONV)" in lines[1]
    assert lines[1].endswith("CONV")
    numbers = json.loads(json.dumps(report.as_dict()))
    assert numbers["0"]["f_fc"]["kind"] == "F-FC"
    assert LayerReport.from_dict(numbers).rows == report.rows
    la.prior_precision = torch.tensor([1e6 if ".conv." in name else 0.1 for name in names])
    assert layer_report(la).chosen == {"0": "F-FC"}
    la.prior_precision = 2.0
    report = layer_report(la)
    assert report.rows[0].precision == 2.0
    assert min(row.relative for row in report.rows) > 0.05
    assert [row.chosen for row in report.rows] == [True, True]


def test_layer_report_says_if_nothing_was_learnt():
    la, _, _ = fitted()
    report = layer_report(la)
    assert report.chosen == {}
    assert str(report).splitlines()[-1].startswith("nothing was learnt: all paths have the same")
    n = len(list(la.model.parameters()))
    la.prior_precision = torch.linspace(1, 1.1, n)
    report = layer_report(la)
    assert report.chosen == {"0": "CONV+F-FC"}
    assert str(report).splitlines()[1].endswith("CONV+F-FC")
    assert "nothing" not in str(report)


def test_layer_report_needs_paths_and_a_fit():
    la, _, _ = fitted(model=nn.Sequential(nn.Flatten(), nn.Linear(16, 3)))
    with pytest.raises(ValueError, match="no ResidualPathway"):
        layer_report(la)
    for structure in ("kron", "diag", "full"):
        unfitted = Laplace(
            small(), "classification", subset_of_weights="all", hessian_structure=structure
        )
        with pytest.raises(TypeError, match=r"need a fitted Laplace.*before fit\(\)"):
            layer_report(unfitted)
    last = Laplace(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "classification", hessian_structure="kron"
    )
    for wrong in (last, small()):
        with pytest.raises(TypeError, match=f"need a fitted Laplace.*{type(wrong).__name__}"):
            layer_report(wrong)


def test_layer_report_does_not_choose_where_a_path_is_frozen():
    model = small()
    model[0].conv.requires_grad_(False)
    report = layer_report(fitted(model=model)[0])
    conv, f_fc = report.rows
    assert conv.effective is conv.relative is f_fc.relative is None
    assert f_fc.effective > 0
    assert report.chosen == {}
    assert "frozen" in str(report).splitlines()[1]


def test_layer_report_counts_a_shared_path_wherever_it_is():
    conv = nn.Conv2d(1, 1, 3, padding=1)
    first, second = (ResidualPathway(conv=conv, f_fc=FactoredLinear2d(1, 1, 4)) for _ in range(2))
    model = nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(16, 3))
    places = layer_report(fitted(model=model)[0]).places
    assert (
        [row.path for row in places["0"]] == [row.path for row in places["2"]] == ["conv", "f_fc"]
    )
    assert places["0"][0].effective == places["2"][0].effective > 0
