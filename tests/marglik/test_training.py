"""Training in one call: equal to laplace's without hyperparameters, and what it learns."""

import inspect
import itertools
import math
import warnings

import laplace
import pytest
import torch
from builders import invariant_network, labelled_points, plain_network, shuffled
from laplace.curvature import CurvlinopsGGN
from laplace.utils.enums import HessianStructure, Likelihood, PriorStructure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance import datasets
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.marglik import training

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


# The same as laplace.


OPTIONS = {
    "defaults": {},
    "scalar": {
        "prior_structure": "scalar",
        "temperature": 0.5,
        "sigma_noise_init": 0.7,
        "fix_sigma_noise": True,
    },
    "diag": {
        "marglik_frequency": 2,
        "n_epochs_burnin": 3,
        "prior_prec_init": 3.0,
        "prior_structure": "diag",
    },
}


def known_to_laplace():
    """All combinations but one: laplace has no diagonal prior for Kronecker factors."""
    combinations = itertools.product(
        OPTIONS, ["kron", "diag", "full"], ["classification", "regression"]
    )
    return [names for names in combinations if names[:2] != ("diag", "kron")]


@pytest.mark.parametrize(("options", "structure", "likelihood"), known_to_laplace())
def test_equals_laplace_without_hyperparameters(options, structure, likelihood):
    outputs = 3 if likelihood == "classification" else 1
    settings = FEW | {"likelihood": likelihood, "hessian_structure": structure, **OPTIONS[options]}
    if structure == "kron":  # laplace drops the gradient of the noise for Kronecker factors
        settings["fix_sigma_noise"] = True
    data = labelled_points(classes=outputs if outputs > 1 else 0)
    found = []
    for train in (laplace.marglik_training, li.marglik_training):
        torch.manual_seed(1)
        model = plain_network(outputs)
        found.append(tuple(train(model, shuffled(data), backend=AugmentedGGN, **settings)))
    (_, _, margliks, losses), (la, _, our_margliks, our_losses) = found
    torch.testing.assert_close(our_losses, losses)
    torch.testing.assert_close(our_margliks, margliks)
    assert la.log_marginal_likelihood().isfinite()


def test_accepts_every_argument_of_laplace():
    theirs = inspect.signature(laplace.marglik_training).parameters
    ours = inspect.signature(li.marglik_training).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in set(theirs) - {"backend"}:
        assert ours[name].default == theirs[name].default
    assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def test_describes_every_argument_once():
    text = inspect.getdoc(li.marglik_training)
    for name in inspect.signature(li.marglik_training).parameters:
        assert text.count(f"\n    {name}: ") == 1, name


def test_works_with_a_backend_of_laplace():
    model, loader = plain_network(), shuffled(labelled_points())
    result = li.marglik_training(model, loader, backend=CurvlinopsGGN, **FEW)
    assert len(result.margliks) == 8


def test_enumerations_of_laplace_are_their_names(tmp_path):
    model, loader = invariant_network(), shuffled(labelled_points())
    arguments = {
        "likelihood": Likelihood.CLASSIFICATION,
        "hessian_structure": HessianStructure.DIAG,
        "prior_structure": PriorStructure.SCALAR,
    }
    more = {"checkpoint": tmp_path / "run.pt", "resume": True, "n_hypersteps": 1}
    li.marglik_training(model, loader, n_epochs=2, **arguments, **more)
    names = {argument: value.value for argument, value in arguments.items()}
    result = li.marglik_training(model, loader, n_epochs=3, **names, **more)
    assert len(result.history) == 3
    assert list(result.prior_precisions) == ["all"]


# What it learns.


def test_result_unpacks_to_four_and_carries_the_rest():
    valid_loader = shuffled(labelled_points(11))
    result = li.marglik_training(
        invariant_network(), shuffled(labelled_points()), valid_loader=valid_loader, **FEW
    )
    la, model, margliks, losses = result
    assert (la, model, margliks, losses) == (result[0], result[1], result[2], result[3])
    assert len(result) == 4
    assert len(losses) == len(result.history) == 4
    assert len(margliks) == 3  # in the last quarter only weights are trained
    record = result.history[2]
    terms = record["log_likelihood"] - 0.5 * (record["log_det_ratio"] + record["scatter"])
    assert record["evidence"] == pytest.approx(terms)
    assert 0 <= record["valid"]["accuracy"] <= 1
    assert set(record["hyperparameters"]) == set(result.hyperparameters) == {"augmentation.eta"}
    rotation = record["hyperparameters"]["augmentation.eta"][2]
    assert record["ranges"]["augmentation"]["rotation"] == abs(rotation)
    assert len(record["prior_precision"]) == 4
    assert record["seconds"]["train"] > 0
    assert record["skipped"] == {"weights": 0, "priors": 0, "hyperparameters": 0}


def test_best_evidence_restores_weights_hyperparameters_and_priors():
    torch.manual_seed(3)
    kept = {}

    def keep(record, model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        kept[record["epoch"]] = (record, weights)
        if record["epoch"] == 5:  # so that an earlier epoch is the best
            for parameter in model.parameters():
                parameter.data += 3

    arguments = FEW | {"n_epochs": 8, "lr_aug": 1.0, "callbacks": [keep], "estimator": "refit"}
    result = li.marglik_training(invariant_network(), shuffled(labelled_points()), **arguments)
    best = max(result.history, key=lambda record: record["evidence"])
    assert result.best_epoch == best["epoch"]
    assert result.best_epoch < 8
    record, weights = kept[result.best_epoch]
    for name, value in result.model.named_parameters():
        assert torch.equal(value, weights[name])
    assert result.prior_precision.tolist() == record["prior_precision"]
    # hyperparameters are those of the evidence, before their step
    found = record["hyperparameters"]["augmentation.eta"]
    assert found != kept[result.best_epoch + 1][0]["hyperparameters"]["augmentation.eta"]
    assert result.hyperparameters["augmentation.eta"].tolist() == found
    assert result.model.augmentation.eta.tolist() == found
    assert torch.equal(result.la.prior_precision, result.prior_precision)


def test_regression_learns_noise_priors_and_range():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    data = datasets.rotation_regression(100, noise=0.3, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1))
    augmentation = li.AffinePoints(learn="rotation")
    model = li.InvariantModel(net, augmentation, 8)
    result = li.marglik_training(
        model,
        shuffled(data, 25),
        "regression",
        n_epochs=150,
        n_epochs_burnin=10,
        marglik_frequency=2,
        marglik_batch_size=100,
        optimizer_kwargs={"lr": 5e-2},
    )
    x, y = data.tensors
    with torch.no_grad():
        residual = (model(x) - y).square().mean().sqrt().item()
    assert residual < result.sigma_noise.item() < 1.3 * residual  # less what weights fit of it
    assert 0.25 < result.sigma_noise.item() < 0.45
    assert augmentation.magnitudes()["rotation"] > 2.7
    assert result.prior_precision.log().std() > 1


def test_learns_how_far_signals_are_shifted():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    max_shift = 0.5
    augmentation = li.Sequence(padding="circular")
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 5))
    li.marglik_training(
        li.InvariantModel(net, augmentation, 8),
        shuffled(datasets.waves(400, max_shift, padding="circular"), 100),
        n_epochs=60,
        n_epochs_burnin=4,
        marglik_frequency=2,
        marglik_batch_size=400,
        optimizer_kwargs={"lr": 5e-3},
    )
    found = augmentation.magnitudes()
    assert found["shift"] == pytest.approx(max_shift, rel=0.15)
    assert found["stretch"] < 0.05


def test_learns_a_range_of_hues_and_nothing_else():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    split = datasets.load("digits", n_train=600)
    orange = torch.tensor([0.9, 0.45, 0.3]).view(3, 1, 1)
    x = datasets.hue_rotated(split.x_train * orange, math.pi)
    augmentation = li.Compose(li.AffineImage(), li.Colour())
    net = nn.Sequential(li.layers.Standardise.of(x), *li.layers.mlp(x.shape[1:], 10, width=50))
    li.marglik_training(
        li.InvariantModel(net, augmentation, 8),
        shuffled(TensorDataset(x, split.y_train), 100),
        n_epochs=60,
        n_epochs_burnin=4,
        marglik_frequency=2,
        n_hypersteps=2,
        marglik_batch_size=300,
        backend_kwargs={"output_rank": 3},
        optimizer_kwargs={"lr": 4e-3},
    )
    found = augmentation.magnitudes()
    assert found.pop("hue") == pytest.approx(math.pi, rel=0.15)
    assert max(found.values()) < 0.1


# What cannot work, and what has no effect.


@pytest.mark.parametrize(
    ("model", "arguments", "error", "match"),
    [
        (nn.Sequential(plain_network(), nn.PReLU()), {}, NotImplementedError, r"1\.weight"),
        (plain_network(), {"prior_structure": "diag"}, ValueError, "Prior precision for Kron"),
        (
            invariant_network(),
            {"backend": CurvlinopsGGN},
            ValueError,
            r"no gradient with respect to augmentation\.eta; use backend=AugmentedGGN",
        ),
    ],
    ids=["a layer without a rule", "a prior that the structure has not", "a stock backend"],
)
def test_what_cannot_work_fails_before_training(tmp_path, model, arguments, error, match):
    arguments = FEW | arguments | {"n_epochs_burnin": 3, "checkpoint": tmp_path / "run.pt"}
    model = model.double()
    with pytest.raises(error, match=match):
        li.marglik_training(model, shuffled(labelled_points()), **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"n_epochs": 3, "n_epochs_burnin": 4}, "never estimated in 3 epochs"),
        ({"n_epochs": 1, "optimizer_kwargs": {"weight_decay": 0.1}}, "weight decay"),
    ],
    ids=["no estimate", "weight decay"],
)
def test_warns_the_caller_of_what_has_no_effect(monkeypatch, arguments, match):
    monkeypatch.setattr(training, "FAR_FROM_A_MODE", math.inf)
    with pytest.warns(UserWarning, match=match) as caught:
        li.marglik_training(plain_network(), shuffled(labelled_points()), **arguments)
    assert [warning.filename for warning in caught] == [__file__]


def test_without_an_estimate_the_end_is_the_best():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = li.marglik_training(
            plain_network(), shuffled(labelled_points()), n_epochs=3, n_epochs_burnin=4
        )
    assert result.margliks == []
    skipped = "{'weights': 0, 'priors': 0, 'hyperparameters': 0}"
    evidence = result.la.log_marginal_likelihood().item()
    assert repr(result) == f"Result(epochs=3, best_epoch=3, evidence={evidence}, skipped={skipped})"


def test_prints_and_warns_of_nothing(monkeypatch, capfd):
    monkeypatch.setattr(training, "FAR_FROM_A_MODE", math.inf)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        li.marglik_training(invariant_network(), shuffled(labelled_points()), **FEW)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_newton_decrement_is_that_of_the_posterior(structure, likelihood, subset):
    torch.manual_seed(0)
    classes = 3 if likelihood == "classification" else 0
    data = labelled_points(classes=classes)
    result = li.marglik_training(
        plain_network(max(classes, 1)),
        DataLoader(data, 10),
        likelihood,
        hessian_structure=structure,
        subset_of_weights=subset,
        temperature=0.7,
        **FEW,
    )
    la, model = result.la, result.model
    weights = list(model.parameters())
    if subset == "last_layer":
        weights = list(model[-1].parameters())
    x, y = data.tensors
    log_posterior = -la._H_factor * la.backend.factor * la.backend.lossfunc(model(x), y)
    theta = torch.nn.utils.parameters_to_vector(weights)
    log_posterior = log_posterior - 0.5 * (la.prior_precision_diag * theta.square()).sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(log_posterior, weights)])
    precision = la.posterior_precision
    if structure == "kron":
        precision = precision.to_matrix()
    elif structure == "diag":
        precision = precision.diag()
    expected = 0.5 * gradient @ torch.linalg.solve(precision, gradient)
    assert result.newton_decrement == pytest.approx(expected.item(), rel=1e-6)


def test_weights_far_from_a_mode_are_warned_of():
    loader = DataLoader(labelled_points(), 10)
    with pytest.warns(UserWarning, match="not at a mode, of which .* could rise by"):
        short = li.marglik_training(plain_network(), loader, n_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long = li.marglik_training(
            plain_network(), loader, n_epochs=150, optimizer_kwargs={"lr": 2e-2}
        )
    assert long.newton_decrement < 0.1 * short.newton_decrement
