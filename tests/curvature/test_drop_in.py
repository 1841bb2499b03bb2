"""What users of laplace-torch do with its own backends works with ours, or says why not."""

from collections import UserDict, defaultdict
from collections.abc import MutableMapping

import pytest
import torch
from laplace import Laplace
from laplace.baselaplace import ELLA, VaLLA
from laplace.curvature import AsdlEF, AsdlGGN, CurvlinopsGGN
from laplace.utils.matrix import KronDecomposed
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from twins import ggn, parameter_jacobian

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedEF, AugmentedGGN, TangentKernelBound

CLASSES = 3
STRUCTURES = ("kron", "diag", "full")


def net(n_in=4, n_out=CLASSES):
    return nn.Sequential(nn.Linear(n_in, 5), nn.Tanh(), nn.Linear(5, n_out))


def averaged(n_in=2):
    return li.InvariantModel(net(n_in), li.AffinePoints(init=0.3), 4)


class Batches(list):
    """A loader of given batches."""

    dataset = range(10)


def evidence(model, loader, structure="kron", backend=AugmentedGGN, subset="all", **options):
    la = Laplace(model, "classification", subset, structure, backend=backend, **options)
    la.fit(loader)
    return la, la.log_marginal_likelihood().detach()


# Mappings.


class OfMapping(nn.Module):
    def __init__(self, function, shared):
        super().__init__()
        self.net, self.function = net(), function
        self.shared = shared

    def forward(self, data):
        return self.function(self.net, data["input_ids"], data["shared"])


class Frozen(MutableMapping):
    """A mapping that is not made from another one."""

    def __init__(self, source, note):
        self.source, self.note = source, note

    def __getitem__(self, name):
        return self.source[name]

    def __setitem__(self, name, value):
        self.source[name] = value

    def __delitem__(self, name):
        del self.source[name]

    def __iter__(self):
        return iter(self.source)

    def __len__(self):
        return len(self.source)


MAPPINGS = {
    "longer table": (lambda net, x, t: net(x) * t.mean(), lambda: torch.arange(11.0) / 5),
    "shorter table": (lambda net, x, t: net(x) * t.mean(), lambda: torch.arange(3.0)),
    "positions": (lambda net, x, t: net(x + t), lambda: torch.randn(1, 4)),
    "vector": (lambda net, x, t: net(x * t), lambda: torch.randn(4)),
    "matrix": (lambda net, x, t: net(x @ t), lambda: torch.randn(4, 4)),
    "scalar": (lambda net, x, t: net(x) * t, lambda: torch.tensor(2.0)),
    "list": (lambda net, x, t: net(x + torch.stack(t)), lambda: [torch.randn(4) for _ in range(5)]),
    "rows": (lambda net, x, t: net(x) * t.unsqueeze(1), lambda: torch.rand(5)),
}
KINDS = {
    "dict": dict,
    "UserDict": UserDict,
    "defaultdict": lambda source: defaultdict(list, source),
}


def mappings(make, kind=dict, sizes=(5, 5)):
    shared = make()
    return Batches(
        kind({"input_ids": torch.randn(n, 4), "labels": torch.randint(3, (n,)), "shared": shared})
        for n in sizes
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAPPINGS)
def test_mappings_are_cut_where_they_have_rows(name, kind):
    function, make = MAPPINGS[name]
    batches = mappings(make, KINDS[kind])
    model = OfMapping(function, batches[0]["shared"])
    for structure in ("kron", "full"):
        stock, expected = evidence(model, batches, structure, AsdlGGN)
        for chunk_size in (None, 2):
            options = {"backend_kwargs": {"chunk_size": chunk_size}}
            la, actual = evidence(model, batches, structure, **options)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(la(batches[0]), stock(batches[0]))
    assert type(batches[0]) is type(KINDS[kind]({}))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_table_as_long_as_the_batch_is_not_cut_silently(structure):
    function, _ = MAPPINGS["longer table"]
    table = torch.arange(5.0)
    model = OfMapping(function, table)
    with pytest.raises(ValueError, match=r"'shared', with 5 entries.*first axis of 1"):
        evidence(model, mappings(lambda: table), structure)
    # a batch of another size has shown that it belongs to all inputs
    batches = mappings(lambda: table, sizes=(4, 5, 1))
    _, expected = evidence(model, batches, structure, AsdlGGN)
    for chunk_size in (None, 2):
        options = {"backend_kwargs": {"chunk_size": chunk_size}}
        torch.testing.assert_close(evidence(model, batches, structure, **options)[1], expected)


def test_mappings_of_other_kinds_are_refused_only_where_they_must_be_made():
    function, make = MAPPINGS["vector"]
    (batch,) = mappings(make, sizes=(2,))
    model = OfMapping(function, batch["shared"])
    expected = evidence(model, Batches([batch]))[1]
    odd = Frozen(dict(batch), "note")
    torch.testing.assert_close(evidence(model, Batches([odd]))[1], expected)
    with pytest.raises(TypeError, match=r"Frozen, which cannot be made .* return a dict"):
        evidence(model, Batches([odd]), backend_kwargs={"chunk_size": 1})
    assert odd.source.keys() == batch.keys()


def test_mappings_without_the_key_say_so():
    batches = Batches([{"x": torch.randn(5, 4), "labels": torch.randint(3, (5,))}])

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, data):
            return self.net(data["x"])

    with pytest.raises(KeyError, match=r"no 'input_ids', only 'x', 'labels'.*dict_key_x"):
        evidence(Other(), batches, "diag")
    evidence(Other(), batches, "diag", dict_key_x="x")


# Objects.


class Graphs:
    """Nodes of several graphs, which can be moved and nothing else."""

    def __init__(self, nodes, graph, n):
        self.nodes, self.graph, self.n = nodes, graph, n

    def to(self, device):
        return self


class OfGraphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        pooled = x.nodes.new_zeros(x.n, 5)
        return self.head(pooled.index_add(0, x.graph, torch.tanh(self.embed(x.nodes))))


def graphs():
    graph = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    return Graphs(torch.randn(7, 4), graph, 3), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_objects_that_cannot_be_cut_are_run_as_they_are(structure, ggn_backend):
    model, (x, y) = OfGraphs(), graphs()
    _, actual = getattr(ggn_backend(model, "classification"), structure)(x, y)
    expected = ggn(model, model(x), "classification")
    torch.testing.assert_close(actual, expected.diagonal() if structure == "diag" else expected)
    jacobians, _ = ggn_backend(model, "classification", chunk_size=1).jacobians(x)
    torch.testing.assert_close(jacobians, parameter_jacobian(model, model(x)).detach())


def test_objects_in_laplace():
    model, batch = OfGraphs(), graphs()
    batches = Batches([batch])
    stock, expected = evidence(model, batches, "diag", CurvlinopsGGN)
    la, actual = evidence(model, batches, "diag")
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(la(batch[0]), stock(batch[0]))
    with pytest.raises(NotImplementedError, match="no Kronecker curvature for"):
        evidence(model, batches)
    frozen = OfGraphs()
    frozen.embed.requires_grad_(False)
    torch.testing.assert_close(
        evidence(frozen, batches)[1], evidence(frozen, batches, "kron", AsdlGGN)[1]
    )


# Modes, and numbers that are not finite.


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_predictions_in_inference_mode(structure, subset, ggn_backend):
    model, x = averaged(), torch.randn(6, 2)
    loader = DataLoader(TensorDataset(x, torch.randint(3, (6,))), batch_size=3)
    la, before = evidence(model, loader, structure, ggn_backend, subset)
    expected = la(x)
    with torch.inference_mode():
        torch.testing.assert_close(la(x), expected)
        torch.testing.assert_close(la(x + 0), expected)  # made in this mode
        assert torch.isfinite(la.predictive_samples(x, n_samples=3)).all()
    torch.testing.assert_close(la.log_marginal_likelihood().detach(), before)


def test_a_fit_in_inference_mode():
    loader = DataLoader(TensorDataset(torch.randn(6, 4), torch.randint(3, (6,))), batch_size=3)
    model = net()
    _, expected = evidence(model, loader)
    with torch.inference_mode():
        _, actual = evidence(model, loader)
    torch.testing.assert_close(actual, expected)


class Masked(nn.Module):
    """Imputes what is missing, and masks by infinity."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, data):
        x = torch.nan_to_num(data["input_ids"], nan=0.5)
        return self.net((x + data["mask"]).softmax(-1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_infinite_masks_and_missing_values_mean_something(structure):
    x, mask = torch.randn(5, 4), torch.zeros(5, 4)
    x[1, 2], mask[:, 3], mask[2, 1] = torch.nan, -torch.inf, -torch.inf
    batches = Batches([{"input_ids": x, "labels": torch.randint(3, (5,)), "mask": mask}])
    model = Masked()
    stock, expected = evidence(model, batches, structure, AsdlGGN)
    la, actual = evidence(model, batches, structure)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(la(batches[0]), stock(batches[0]))


def test_numbers_that_are_not_finite_are_refused_where_they_spread():
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    backend = AugmentedGGN(net(), "classification")
    backend.diag(x, y)
    x[1, 2] = -torch.inf  # tanh makes the outputs finite, but not the curvature
    for call in (lambda: backend.diag(x, y), lambda: backend.full(x, y)):
        with pytest.raises(ValueError, match="NaN or infinite"):
            call()
    with pytest.raises(ValueError, match="NaN or infinite"):
        backend.jacobians(x)
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        AugmentedGGN(net(), "classification").jacobians(x)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_an_empty_batch_has_empty_predictions(subset):
    loader = DataLoader(TensorDataset(torch.randn(6, 4), torch.randint(3, (6,))), batch_size=3)
    la, _ = evidence(net(), loader, subset=subset)
    assert la(torch.empty(0, 4)).shape == (0, CLASSES)


# Outputs and targets.


class Reward(nn.Module):
    """Two logits for a pair, one for a single input."""

    def __init__(self):
        super().__init__()
        self.net = net(n_out=1)

    def forward(self, x):
        return self.net(x).flatten(1)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_reward_models_predict(batch_size, structure, ggn_backend):
    model, x = Reward(), torch.randn(5, 4)
    pairs = TensorDataset(torch.randn(8, 2, 4), torch.randint(2, (8,)))
    settings = {"hessian_structure": structure, "backend": ggn_backend}
    la = Laplace(model, "reward_modeling", "all", **settings)
    la.fit(DataLoader(pairs, batch_size=batch_size))
    mean, variance = la(x)
    torch.testing.assert_close(mean, model(x).detach())
    jacobian = parameter_jacobian(model, model(x)).detach()
    torch.testing.assert_close(variance, la.functional_variance(jacobian))
    twin = Laplace(model, "reward_modeling", "all", **settings)
    twin.load_state_dict(la.state_dict())
    torch.testing.assert_close(twin(x), (mean, variance))


def test_one_output_has_jacobians_under_classification(backend):
    model, x = net(n_out=1), torch.randn(5, 4)
    found = backend(model, "classification")
    jacobians, outputs = found.jacobians(x)
    torch.testing.assert_close(jacobians, parameter_jacobian(model, model(x)).detach())
    torch.testing.assert_close(outputs, model(x).detach())
    for structure in STRUCTURES:
        with pytest.raises(ValueError, match="at least two classes"):
            getattr(found, structure)(x, torch.zeros(5).long(), N=5)
    with pytest.raises(ValueError, match="at least two classes"):
        found.gradients(x, torch.zeros(5).long())


@pytest.mark.parametrize("structure", ["diag", "full"])
@pytest.mark.parametrize("targets", ["ignored", "probabilities"])
def test_fisher_of_all_targets_of_the_loss(targets, structure):
    model, x = net(), torch.randn(5, 4)
    y = torch.tensor([0, -100, 2, 1, -100])
    if targets == "probabilities":
        y = torch.rand(5, CLASSES)
    backend = AugmentedEF(model, "classification")
    loss, actual = getattr(backend, structure)(x, y)
    rows = []
    for i in range(5):
        one = backend.lossfunc(model(x[i : i + 1]), y[i : i + 1])
        gradients = torch.autograd.grad(one, list(model.parameters()))
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    expected = torch.stack(rows).mT @ torch.stack(rows)
    torch.testing.assert_close(loss, backend.lossfunc(model(x), y).detach())
    torch.testing.assert_close(actual, expected.diagonal() if structure == "diag" else expected)
    if targets == "ignored":
        torch.testing.assert_close(
            actual, getattr(AsdlEF(model, "classification"), structure)(x, y)[1]
        )
    assert torch.isfinite(backend.kron(x, y, N=5)[1].to_matrix()).all()


@pytest.mark.parametrize("options", [{}, {"output_rank": CLASSES}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("targets", ["ignored", "probabilities"])
def test_gauss_newton_of_all_targets_of_the_loss(targets, options, ggn_backend):
    """The curvature of an input is none if it is ignored, and in proportion to its total."""
    model, x = net(), torch.randn(5, 4)
    y = torch.tensor([0, -100, 2, 1, -100])
    totals = (y >= 0).double()
    if targets == "probabilities":
        y = torch.rand(5, CLASSES)
        totals = y.sum(-1)
    expected = sum(
        total * ggn(model, model(one[None]), "classification")
        for total, one in zip(totals, x, strict=True)
    ).detach()
    found = ggn_backend(model, "classification", **options)
    torch.testing.assert_close(found.full(x, y)[1], expected)
    torch.testing.assert_close(found.diag(x, y)[1], expected.diagonal())
    _, kron = found.kron(x, y, N=5)
    bias = expected[-CLASSES:, -CLASSES:]
    torch.testing.assert_close(kron.kfacs[-1][0], bias)
    bound = TangentKernelBound(model, "classification", kind="full")
    ratio = bound.estimate(x, y, 5, torch.ones(())).log_det_ratio
    torch.testing.assert_close(ratio, torch.logdet(torch.eye(len(expected)) + expected))


def test_two_classes_and_one_sample_have_no_variance():
    model, x, y = net(n_out=2), torch.randn(6, 4), torch.randint(2, (6,))
    _, expected = AugmentedGGN(model, "classification").diag(x, y)
    _, actual = AugmentedGGN(model, "classification", stochastic=True, num_samples=1).diag(x, y)
    torch.testing.assert_close(actual, expected)


# Loaders.


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.ones(6), 6),
        RandomSampler(range(6), replacement=True),
        RandomSampler(range(6), num_samples=4),
        SubsetRandomSampler([0, 2, 3]),
    ],
    ids=["weights", "replacement", "fewer", "subset"],
)
def test_samplers_of_other_data_are_refused(sampler, structure):
    data = TensorDataset(torch.randn(6, 4), torch.randint(CLASSES, (6,)))
    with pytest.raises(ValueError, match=r"draws \d of 6 examples.*Laplace.fit takes them for"):
        evidence(net(), DataLoader(data, 3, sampler=sampler), structure)
    every = SubsetRandomSampler(range(6))
    _, found = evidence(net(), DataLoader(data, 3, sampler=every), structure)
    assert torch.isfinite(found)


# Options.


@pytest.mark.parametrize("structure", STRUCTURES)
def test_unknown_arguments_are_refused(structure, backend):
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(TypeError, match=r"\['mc_samples'\].*backend_kwargs"):
        getattr(backend(net(), "classification"), structure)(x, y, N=5, mc_samples=100)


def test_damping_has_no_effect_as_in_laplace():
    loader = DataLoader(TensorDataset(torch.randn(6, 4), torch.randint(3, (6,))), batch_size=3)
    model = net()
    _, expected = evidence(model, loader)
    with pytest.warns(UserWarning, match="damping=True has no effect"):
        la, actual = evidence(model, loader, damping=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    _, stock = evidence(model, loader, backend=CurvlinopsGGN, damping=True)
    torch.testing.assert_close(actual, stock)
    assert isinstance(la.H, KronDecomposed)


# Predictions of averaged models.


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_last_layer_predictions_by_sampled_weights(structure, likelihood):
    """Equal to the model with the same weights; features are averaged like outputs."""
    model, x = averaged(), torch.randn(6, 2)
    y = torch.randint(3, (6,)) if likelihood == "classification" else torch.randn(6, 3)
    settings = {"hessian_structure": structure, "backend": AugmentedGGN}
    la = Laplace(model, likelihood, "last_layer", **settings)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=3))
    seeded = lambda: torch.Generator().manual_seed(3)  # noqa: E731
    weights = la.sample(4, generator=seeded())
    with torch.no_grad():
        actual = la.predictive_samples(x, pred_type="nn", n_samples=4, generator=seeded())
        expected = []
        for sample in weights:
            nn.utils.vector_to_parameters(sample, model.net[2].parameters())
            expected.append(model(x))
    expected = torch.stack(expected)
    if likelihood == "classification":
        torch.testing.assert_close(actual, expected.softmax(-1))
        with torch.no_grad():
            mean = la(x, pred_type="nn", link_approx="mc", n_samples=4)
        torch.testing.assert_close(mean.sum(-1), torch.ones(6))
    else:
        torch.testing.assert_close(actual, expected)
        mean, variance = la(x, diagonal_output=True)
        torch.testing.assert_close(variance, la(x)[1].diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("kind", ["ELLA", "VaLLA"])
def test_predictions_of_functional_approximations_repeat(kind, likelihood, ggn_backend):
    """laplace runs the model itself there, beside the backend's Jacobians."""
    model, x = averaged(), torch.randn(8, 2)
    y = torch.randn(8, 3) if likelihood == "regression" else torch.randint(3, (8,))
    if kind == "ELLA":
        la = ELLA(model, likelihood, 8, 3, backend=ggn_backend)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    else:
        la = VaLLA(model, likelihood, x[:3].clone(), backend=ggn_backend)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4), iterations=2)
    torch.testing.assert_close(la(x), la(x), rtol=0, atol=0)


def test_jacobians_of_selected_outputs():
    model, x = averaged(), torch.randn(5, 2)
    backend = AugmentedGGN(model, "classification")
    jacobians, outputs = backend.jacobians(x)
    one = torch.tensor([2, 0, 1, 1, 2])
    selected, values = backend.selected_output_jacobians(x, one)
    torch.testing.assert_close(selected[:, 0], jacobians[torch.arange(5), one])
    torch.testing.assert_close(values, outputs)
    two = torch.stack([one, one.flip(0)], dim=1)
    selected, _ = backend.selected_output_jacobians(x, two)
    torch.testing.assert_close(selected[:, 1], jacobians[torch.arange(5), two[:, 1]])
    with pytest.raises(ValueError, match="4 of 5 inputs"):
        backend.selected_output_jacobians(x, one[:4])
