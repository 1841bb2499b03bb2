"""Prior precisions: which tensors share one, by what gradient it is learnt, what is refused."""

import json
import math
import re

import pytest
import torch
from builders import invariant_network, labelled_points, training_settings
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.layers.factored import FactoredLinear2d
from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.layers.sparse import SparseLinear2d
from laplace_invariance.layers.starts import closed_paths
from laplace_invariance.marglik.loop import Trainer
from laplace_invariance.marglik.priors import Priors, grouping
from laplace_invariance.marglik.settings import PriorSettings

FEW = {"n_epochs": 3, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}
PATHS = {
    "0.conv.weight": "0.conv",
    "0.conv.bias": "0.conv",
    "0.f_fc.theta_2.weight": "0.f_fc",
    "0.f_fc.theta_2.bias": "0.f_fc",
    "0.f_fc.theta_1.weight": "0.f_fc",
    "0.f_fc.theta_1.bias": "0.f_fc",
    "3.weight": "3.weight",
    "3.bias": "3.bias",
}
STRUCTURES = {
    "path": "path",
    "one pattern": [r".*bias"],
    "captured": (r"(.*)\.f_fc\..*", r"3\..*"),
    "all": [r".*"],
}


def network():
    pathway = ResidualPathway(conv=nn.Conv2d(1, 2, 3, padding=1), f_fc=FactoredLinear2d(1, 2, 4))
    return nn.Sequential(pathway, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def images(n=10):
    return TensorDataset(torch.randn(n, 1, 4, 4), torch.arange(n) % 3)


def loader_of(data):
    return DataLoader(data, batch_size=5, shuffle=True)


def priors_of(model, structure, precision=1.0, temperature=1.0):
    settings = PriorSettings(
        prior_structure=structure,
        prior_prec_init=precision,
        sigma_noise_init=1.0,
        fix_sigma_noise=True,
        lr_hyp=0.1,
    )
    return Priors(model, settings, temperature, has_noise=False)


def members(groups):
    """Sets of tensors that share, without the names of the groups."""
    return {
        frozenset(name for name in groups if groups[name] == group) for group in groups.values()
    }


# Who shares.


def test_paths_share_and_all_else_does_not():
    assert grouping(network(), "path") == PATHS


def test_a_model_that_is_a_pathway_has_its_paths():
    assert grouping(ResidualPathway(nn.Linear(2, 3), nn.Linear(2, 3, bias=False)), "path") == {
        "0.weight": "0",
        "0.bias": "0",
        "1.weight": "1",
    }


def test_the_innermost_path_counts():
    inner = ResidualPathway(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    model = nn.Sequential(
        ResidualPathway(free=nn.Sequential(nn.Linear(2, 2), inner), b=nn.Linear(2, 2)),
        nn.Linear(2, 3),
    )
    assert members(grouping(model, "path")) == {
        frozenset({"0.free.0.weight", "0.free.0.bias"}),
        frozenset({"0.free.1.a.weight", "0.free.1.a.bias"}),
        frozenset({"0.free.1.b.weight", "0.free.1.b.bias"}),
        frozenset({"0.b.weight", "0.b.bias"}),
        frozenset({"1.weight"}),
        frozenset({"1.bias"}),
    }


def test_parameters_that_a_module_declares_keep_their_own_precision():
    class Scaled(nn.Linear):
        own_prior_parameters = ("scale",)

        def __init__(self):
            super().__init__(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

    model = nn.Sequential(ResidualPathway(conv=nn.Linear(2, 2), free=nn.Sequential(Scaled())))
    assert members(grouping(model, "path")) == {
        frozenset({"0.conv.weight", "0.conv.bias"}),
        frozenset({"0.free.0.weight", "0.free.0.bias"}),
        frozenset({"0.free.0.scale"}),
    }


def test_what_only_begins_like_a_path_is_not_on_it():
    model = ResidualPathway(**{name: nn.Linear(2, 3) for name in ("conv", "conv1")})
    model.conv_scale = nn.Parameter(torch.ones(1))
    assert members(grouping(model, "path")) == {
        frozenset({"conv_scale"}),
        frozenset({"conv.weight", "conv.bias"}),
        frozenset({"conv1.weight", "conv1.bias"}),
    }


PATTERNS = {
    "one": ([r".*bias"], {".*bias": 4}),
    "captured": ([r"(.*)\.f_fc\..*"], {r"(.*)\.f_fc\..* (0)": 4}),
    "optional": (
        [r"(\d)\.(.*\.)?(weight|bias)"],
        {r"(\d)\.(.*\.)?(weight|bias) (3, None, weight)": 1},
    ),
    "nested": ([r"3\.bias", r".*bias", r".*"], {r"3\.bias": 1, ".*bias": 3, ".*": 4}),
    "tuple": ((r"3.*",), {"3.*": 2, "0.conv.weight": 1}),
    "none": ([], {"0.conv.weight": 1, "3.bias": 1}),
}


@pytest.mark.parametrize(("patterns", "expected"), PATTERNS.values(), ids=PATTERNS)
def test_patterns_match_whole_names_and_the_first_counts(patterns, expected):
    groups = grouping(network(), patterns)
    assert list(groups) == list(PATHS)
    for group, size in expected.items():
        assert list(groups.values()).count(group) == size
    unmatched = {name for name, group in groups.items() if name == group}
    assert not any(re.fullmatch(pattern, name) for pattern in patterns for name in unmatched)


def test_captured_texts_tell_groups_apart():
    model = nn.Sequential(
        *(ResidualPathway(conv=nn.Conv2d(1, 1, 1), free=nn.Conv2d(1, 1, 1)) for _ in range(2))
    )
    assert members(grouping(model, [r"(\d)\.free\..*", r".*\.conv\.(.*)"])) == {
        frozenset({"0.free.weight", "0.free.bias"}),
        frozenset({"1.free.weight", "1.free.bias"}),
        frozenset({"0.conv.weight", "1.conv.weight"}),
        frozenset({"0.conv.bias", "1.conv.bias"}),
    }


def test_only_trainable_tensors_are_grouped():
    model = network()
    model[0].conv.requires_grad_(False)
    priors = priors_of(model, "path")
    assert priors.groups == ["0.f_fc", "3.weight", "3.bias"]
    assert len(priors.precision) == 6


@pytest.mark.parametrize(
    ("structure", "names", "size"),
    [
        ("scalar", ["all"], 1),
        ("layerwise", list(PATHS), 8),
        ("diag", [], sum(p.numel() for p in network().parameters())),
        ("path", ["0.conv", "0.f_fc", "3.weight", "3.bias"], 8),
    ],
    ids=["scalar", "layerwise", "diag", "path"],
)
def test_precision_is_what_laplace_takes_and_named_says_whose(structure, names, size):
    priors = priors_of(network(), structure, 2.0)
    torch.testing.assert_close(priors.precision, torch.full((size,), 2.0))
    assert priors.named() == pytest.approx(dict.fromkeys(names, 2.0))


# Gradients.


@pytest.mark.parametrize("hessian_structure", ["kron", "diag"])
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_gradient_is_the_sum_of_its_tensors_and_that_of_differences(structure, hessian_structure):
    torch.manual_seed(0)
    model = network()
    la = Laplace(model, "classification", "all", hessian_structure, backend=AugmentedGGN)
    la.fit(DataLoader(images(), 5))
    shared, alone = priors_of(model, structure), priors_of(model, "layerwise")
    values = torch.randn(len(shared.groups))
    places = [shared.groups.index(group) for group in shared.grouping.values()]
    shared.log_precision.data.copy_(values)
    alone.log_precision.data.copy_(values[places])

    for priors in (shared, alone):
        la.log_marginal_likelihood(priors.precision).backward()
    summed = torch.zeros(len(values)).index_add(0, torch.tensor(places), alone.log_precision.grad)
    torch.testing.assert_close(shared.log_precision.grad, summed)

    def evidence(log_precision):
        with torch.no_grad():
            shared.log_precision.copy_(log_precision)
            return la.log_marginal_likelihood(shared.precision).item()

    step = 1e-5
    for i, gradient in enumerate(shared.log_precision.grad.tolist()):
        move = step * torch.eye(len(values))[i]
        assert gradient == pytest.approx(
            (evidence(values + move) - evidence(values - move)) / (2 * step), rel=1e-6
        )


def test_penalty_has_the_precision_of_each_tensors_group():
    model = network()
    priors = priors_of(model, "path")
    priors.log_precision.data.normal_()
    named = priors.named()
    expected = (
        sum(named[PATHS[n]] * p.detach().square().sum() for n, p in model.named_parameters())
        / 2
        / 7
    )
    torch.testing.assert_close(priors.penalty(7).detach(), expected)


# Training.


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_tensors_of_a_group_learn_one_precision(structure):
    torch.manual_seed(0)
    model = network()
    result = li.marglik_training(model, loader_of(images()), prior_structure=structure, **FEW)
    groups = grouping(model, structure)
    assert set(result.prior_precisions) == set(groups.values())
    assert len(set(result.prior_precisions.values())) == len(
        result.prior_precisions
    )  # each has learnt its own
    assert result.prior_precision.tolist() == [
        result.prior_precisions[group] for group in groups.values()
    ]
    assert torch.equal(result.la.prior_precision, result.prior_precision)
    record = result.history[result.best_epoch - 1]
    assert record["prior_precisions"] == result.prior_precisions
    assert record["prior_precision"] == result.prior_precision.tolist()
    assert json.loads(json.dumps(record)) == record


def test_groups_of_one_are_the_layerwise_structure():
    """Bit for bit."""
    found = []
    data = images()
    for structure in ("layerwise", [], [r"(.*)"]):
        torch.manual_seed(0)
        found.append(
            li.marglik_training(network(), loader_of(data), prior_structure=structure, **FEW)
        )
    for other in found[1:]:
        assert torch.equal(found[0].prior_precision, other.prior_precision)
        assert (found[0].losses, found[0].margliks) == (other.losses, other.margliks)


def test_many_groups_are_not_in_the_history():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(101)), nn.Linear(1, 3))
    data = TensorDataset(torch.randn(4, 1), torch.arange(4) % 3)
    result = li.marglik_training(model, DataLoader(data, 4), n_epochs=1, n_hypersteps=1)
    assert result.history[0]["prior_precisions"] is None
    assert len(result.history[0]["prior_precision"]) == len(result.prior_precisions) == 204


def test_resume_needs_the_same_groups(tmp_path):
    path = tmp_path / "run.pt"
    data = images()

    def run(structure, n_epochs):
        torch.manual_seed(0)
        return li.marglik_training(
            network(),
            loader_of(data),
            prior_structure=structure,
            checkpoint=path,
            resume=True,
            **FEW | {"n_epochs": n_epochs},
        )

    run([r"0\.(.*)\.bias"], 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"number of prior precisions is 8 there and 4 here"):
        run("path", 2)
    with pytest.raises(
        ValueError,
        match=r"groups of prior precisions differ: 0\.conv\.weight is 0\.conv\.weight there",
    ):
        run([r"0\.(.*)\.weight"], 2)
    with pytest.raises(
        ValueError, match=r"differ: 0\.conv\.bias is .* there and 0\.conv\.bias here"
    ):
        run("layerwise", 2)
    assert path.read_bytes() == before
    resumed = run([r"0\.(.*)\.bias"], 3)
    path.unlink()
    assert resumed.prior_precisions == run([r"0\.(.*)\.bias"], 3).prior_precisions


# What is refused.


BAD_STRUCTURES = {
    "unknown": (
        "layer",
        ValueError,
        "one of 'scalar', 'layerwise', 'diag', 'path' or a list of .*, got 'layer'",
    ),
    "pattern alone": (r".*bias", ValueError, r"a pattern goes into a list: \['\.\*bias'\]"),
    "part of a name": (
        [r".*bias", "0.conv"],
        ValueError,
        r"'0\.conv', which matches no whole name .* 0\.conv\.weight, .*, 3\.bias$",
    ),
    "too late": (
        [r".*", r".*bias"],
        ValueError,
        r"'\.\*bias', which matches only what patterns before it match",
    ),
    "no expression": (
        [r"(.*"],
        ValueError,
        r"'\(\.\*', which is no regular expression: missing \)",
    ),
    "number": ([3], TypeError, r"a list of regular expressions, got \[3\]"),
    "set, which has no first": ({r".*bias"}, TypeError, "a list of regular expressions"),
    "nothing": (None, TypeError, "a list of regular expressions, got None"),
}


@pytest.mark.parametrize(
    ("structure", "error", "match"), BAD_STRUCTURES.values(), ids=BAD_STRUCTURES
)
def test_structures_that_cannot_be_meant_are_explained(structure, error, match):
    with pytest.raises(error, match=match):
        li.marglik_training(network(), loader_of(images()), prior_structure=structure, **FEW)


def test_precisions_start_where_patterns_say():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

    def started(structure, values):
        return priors_of(model, structure, values).precision.detach()

    values = {r"1\..*": 9.0, r".*bias": 4.0}  # the first that matches counts
    torch.testing.assert_close(started("layerwise", values), torch.tensor([1.0, 4.0, 9.0, 9.0]))
    expected = torch.tensor([1.0] * 6 + [4.0] * 2 + [9.0] * 6)
    torch.testing.assert_close(started("diag", values), expected)
    torch.testing.assert_close(started([r"1\..*"], values), torch.tensor([1.0, 4.0, 9.0, 9.0]))
    torch.testing.assert_close(started("scalar", {".*": 3.0}), torch.tensor([3.0]))
    halved = priors_of(model, "layerwise", values, temperature=0.5).precision
    torch.testing.assert_close(halved.detach(), started("layerwise", values) / 2)


BAD_STARTS = {
    "part of all": ("scalar", {"0.*": 3.0}, "shares its prior precision"),
    "part of a group": ([".*bias"], {r"0\.bias": 3.0}, "1.bias shares its prior precision"),
    "no name": ("layerwise", {"2.*": 3.0}, r"'2\.\*', which matches no whole name.*0\.weight"),
    "zero": ("layerwise", {"0.*": 0.0}, "positive and finite, got 0.0"),
    "no expression": ("layerwise", {"(": 1.0}, "no regular expression"),
    "too late": ("layerwise", {".*": 3.0, ".*bias": 7.0}, "only what patterns before it match"),
    "text": ("layerwise", {".*": "3"}, "got '3' for"),
}


@pytest.mark.parametrize(("structure", "values", "message"), BAD_STARTS.values(), ids=BAD_STARTS)
def test_patterns_that_make_no_start_are_refused(structure, values, message):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=message):
        priors_of(model, structure, values)


def test_free_paths_start_closed_but_for_what_is_frozen_or_a_width():
    paths = ResidualPathway(
        conv=nn.Conv2d(1, 2, 3, padding=1),
        s_fc=SparseLinear2d(1, 2, 4, learn_omega="weight", scale=0.01),
    )
    model = nn.Sequential(paths, nn.Flatten(), nn.Linear(32, 3))
    paths.s_fc.theta_1.weight.requires_grad_(False)
    closed = closed_paths(model)
    assert sorted(closed) == [r"0\.s_fc\.basis_out\.bias", r"0\.s_fc\.theta_2\.weight"]
    priors_of(model, "layerwise", closed)
    groups = grouping(model, "path")
    assert groups["0.s_fc.theta_2.weight"] == "0.s_fc"
    assert groups["0.s_fc.basis_in.omega"] == "0.s_fc.basis_in.omega"
    with pytest.raises(ValueError, match=r"closed_paths\(model, shared=True\)"):
        priors_of(model, "path", closed)
    priors_of(model, "path", closed_paths(model, shared=True))


def test_another_start_is_not_resumed(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.randint(2, (8,))), batch_size=4)
    files = {"checkpoint": tmp_path / "run.pt", "history": tmp_path / "run.jsonl"}
    li.marglik_training(
        nn.Linear(3, 2), loader, n_epochs=1, prior_prec_init={".*bias": 5.0}, **files
    )
    with pytest.raises(ValueError, match="prior_prec_init"):
        li.marglik_training(nn.Linear(3, 2), loader, n_epochs=2, resume=True, **files)


# The optimum of priors on one decomposition.


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("prior_structure", ["scalar", "layerwise", [r".*bias"]], ids=str)
def test_priors_go_to_where_the_evidence_has_no_slope(structure, likelihood, prior_structure):
    torch.manual_seed(1)
    classes = 3 if likelihood == "classification" else 0
    model = invariant_network(max(classes, 1), draws="grid")
    loader = DataLoader(labelled_points(classes=classes), 30)
    settings = training_settings(
        loader,
        likelihood=likelihood,
        hessian_structure=structure,
        prior_structure=prior_structure,
        temperature=0.5,
    )
    trainer = Trainer(model, settings)
    evidence = trainer.estimator.assess(loader)
    priors, la = trainer.priors, trainer.estimator.approximation.la
    before = [tensor.detach().clone() for tensor in priors.learnt]
    found = la.log_marginal_likelihood(priors.precision, priors.noise)
    assert found.item() == pytest.approx(evidence)
    slopes = torch.cat(torch.autograd.grad(found, priors.learnt))
    assert slopes.abs().max() < 3e-2  # below 1e-3 nats from the maximum
    for change in (-0.1, 0.1):  # a maximum along every coordinate
        for tensor, value in zip(priors.learnt, before, strict=True):
            for i in range(len(value)):
                tensor.data[i] = value[i] + change
                assert la.log_marginal_likelihood(priors.precision, priors.noise) < found
                tensor.data[i] = value[i]


def test_the_evidence_of_priors_keeps_its_digits():
    """In single precision, where nearly all of many weights are determined by the prior."""
    model = nn.Linear(4, 2, bias=False).float()
    priors = priors_of(model, "layerwise", 1.0)
    spectrum = torch.zeros(10**6).float()
    spectrum[:3] = 5.0

    def evidence(precision, noise):
        squares = model.weight.detach().square().sum()
        return -0.5 * (torch.log1p(spectrum / precision).sum() + precision.sum() * squares)

    found = priors.maximise(evidence, n_targets=10)
    assert found == sorted(found)
    precision = priors.precision.item()
    determined = 3 * 5.0 / (5.0 + precision)
    assert precision == pytest.approx(determined / model.weight.square().sum().item(), rel=1e-2)


def test_priors_stay_where_the_evidence_is_not_finite():
    priors = priors_of(nn.Linear(3, 2), "layerwise", 2.0)
    found = priors.maximise(lambda precision, noise: (precision * torch.nan).sum(), n_targets=1)
    assert math.isnan(found[-1])
    assert priors.precision.tolist() == pytest.approx([2.0, 2.0])


def test_without_steps_priors_keep_their_initial_values():
    model, loader = invariant_network(), DataLoader(labelled_points(), 10)
    result = li.marglik_training(model, loader, estimator="running", n_epochs=3, n_hypersteps=0)
    assert result.prior_precision.tolist() == pytest.approx([1.0] * 4)


def test_a_precision_stays_where_there_is_no_curvature():
    """As that of the first layer where the mean over a full turn of its inputs is zero."""
    priors = priors_of(nn.Linear(3, 2), "layerwise", 2.0)
    spectrum = torch.tensor([1e-12, 4.0])

    def evidence(precision, noise):
        ratios = torch.log1p(spectrum / precision).sum()
        return -0.5 * (ratios + (precision * priors._squares()).sum())

    priors.maximise(evidence, n_targets=10)
    undetermined, determined = priors.precision.tolist()
    assert undetermined == pytest.approx(2.0)
    assert determined != pytest.approx(2.0)
