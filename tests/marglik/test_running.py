"""Estimates from minibatches on the way, and the evidence at the end of a run."""

import laplace
import pytest
import torch
from builders import invariant_network, labelled_points, plain_network, shuffled, training_settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN
from laplace_invariance.draws import common_draws
from laplace_invariance.marglik import MAP, KernelBound, Refit, Running, loop
from laplace_invariance.marglik.estimators import running
from laplace_invariance.marglik.loop import Trainer

FEW = {"n_epochs": 4, "n_hypersteps": 2, "optimizer_kwargs": {"lr": 1e-2}}


def trainer_of(model, loader, **changes):
    return Trainer(model, training_settings(loader, **FEW | changes))


def stock(model, likelihood="classification", subset="all", structure="kron", **kwargs):
    return laplace.Laplace(model, likelihood, subset, structure, backend=AugmentedGGN, **kwargs)


def summed(approximation, loader):
    """Loss and curvature of all batches."""
    found = [approximation.curvature(*batch) for batch in loader]
    return [sum(tensors) for tensors in zip(*found, strict=True)]


# What minibatches say of all data.


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_gradients_of_minibatches_average_to_that_of_the_evidence(subset, structure):
    model, loader = invariant_network(draws="grid"), DataLoader(labelled_points(), 10)
    changes = {"subset_of_weights": subset, "hessian_structure": structure}
    trainer = trainer_of(model, loader, **changes, prior_structure="scalar")
    approximation = trainer.estimator.approximation
    leaves = approximation.put(summed(approximation, loader), differentiate=True)
    precision = trainer.priors.precision.detach()
    evidence = approximation.la.log_marginal_likelihood(precision)
    cotangents = approximation.cotangents(evidence, leaves)
    found = [approximation.pull_back(*batch, cotangents)[1][0] for batch in loader]
    assert (found[0] - found[1]).abs().max() > 1e-3

    la = stock(model, subset=subset, structure=structure, prior_precision=precision)
    la.fit(loader)
    expected = la.log_marginal_likelihood()
    torch.testing.assert_close(evidence, expected)
    expected.backward()
    torch.testing.assert_close(sum(found), model.augmentation.eta.grad)


def test_a_step_sees_the_gradient_of_the_evidence(monkeypatch):
    """With all data in one minibatch and nothing else that moves, it is that of the evidence."""
    seen = []
    step = torch.optim.Adam.step

    def spy(self, *args, **kwargs):
        tensors = self.param_groups[0]["params"]
        if len(tensors) == 1 and tensors[0].shape == (6,):
            seen.append(tensors[0].grad.clone())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    model, loader = invariant_network(draws="grid"), DataLoader(labelled_points(), 30)
    still = {"n_epochs": 2, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}, "lr_aug": 1e-12}
    exact = {"backend_kwargs": {"stochastic": False}}
    li.marglik_training(model, loader, estimator=Running(every=1, oversampling=1), **still, **exact)
    (found,) = seen  # the first epoch has no derivatives of the log determinant yet
    la = stock(model)
    la.fit(loader)
    (-la.log_marginal_likelihood()).backward()
    torch.testing.assert_close(found, model.augmentation.eta.grad)


def test_an_estimate_is_that_of_all_data_whatever_was_seen():
    model, data = invariant_network(draws="grid"), labelled_points()
    twice = TensorDataset(*(torch.cat([tensor, tensor]) for tensor in data.tensors))
    half = trainer_of(model, DataLoader(twice, 30), estimator=Running(), n_hypersteps=0)
    half.estimator.observe(*data.tensors, epoch=1)
    whole = trainer_of(model, DataLoader(twice, 30), n_hypersteps=0, estimator=Refit())
    options = {"stochastic": True, "num_samples": 2}  # of three classes, hence exact
    assert half.estimator.approximation.la.backend.num_samples == 1
    half = trainer_of(
        model,
        DataLoader(twice, 30),
        estimator=Running(oversampling=1),
        n_hypersteps=0,
        backend_kwargs=options,
    )
    half.estimator.observe(*data.tensors, epoch=1)
    assert half.estimator.estimate(1)["evidence"] == pytest.approx(
        whole.estimator.estimate(1)["evidence"]
    )


def test_small_data_are_looked_at_more_often():
    def every(n, batch_size, **changes):
        data = TensorDataset(torch.zeros(n, 2), torch.zeros(n).long())
        settings = training_settings(DataLoader(data, batch_size), **changes)
        return running._largest_interval(settings)

    assert every(100, 25, marglik_frequency=2) == 2  # all examples for each estimate
    assert every(1200, 100, marglik_frequency=2) == 12
    assert every(60_000, 100) == 300
    assert every(10, 10) == 1


@pytest.mark.parametrize("shape", [(5,), (5, 5), (3, 5, 5)], ids=str)
def test_averages_have_the_present_scale(shape):
    old, new = torch.rand(shape), 3 * torch.rand(shape)
    found = running._averaged(old, new, 0.4)
    torch.testing.assert_close(running._trace(found), running._trace(new))
    expected = 0.4 * old / running._trace(old) + 0.6 * new / running._trace(new)
    torch.testing.assert_close(found / running._trace(found), expected)
    assert torch.equal(running._averaged(torch.zeros(shape), new, 0.4), new)
    assert running._averaged(torch.tensor(3.0), torch.tensor(5.0), 0.4) == 5


def test_bad_minibatches_do_not_poison_later_estimates():
    model, data = invariant_network(), labelled_points()
    trainer = trainer_of(model, DataLoader(data, 30), estimator=Running(every=1))
    x, y = data.tensors
    trainer.estimator.observe(x, y, epoch=1)
    trainer.estimator._own[1][0, 0] = torch.nan
    assert trainer.estimator.estimate(1) == {}
    assert trainer.guard.skipped["priors"] == 1
    trainer.estimator.observe(x, y, epoch=2)
    assert trainer.estimator.estimate(2)["evidence"] is not None


# Steps on priors.


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_evidence_of_priors_is_that_of_laplace(likelihood, structure, subset):
    classes = 3 if likelihood == "classification" else 0
    model, loader = plain_network(classes or 1), DataLoader(labelled_points(classes=classes), 10)
    changes = {"likelihood": likelihood, "subset_of_weights": subset, "temperature": 0.7}
    trainer = trainer_of(model, loader, prior_structure=structure, **changes)
    approximation, priors = trainer.estimator.approximation, trainer.priors
    approximation.put(summed(approximation, loader))
    with torch.no_grad():
        priors.log_precision += torch.randn_like(priors.log_precision)
    found = []
    for evidence in (approximation.evidence_of_priors(), approximation.la.log_marginal_likelihood):
        value = evidence(priors.precision, priors.noise)
        found.append((value, torch.autograd.grad(value, priors.learnt)))
    torch.testing.assert_close(*found)


def test_the_prior_of_the_last_layer_is_learnt_and_others_stay():
    model, loader = plain_network(), DataLoader(labelled_points(), 10)
    initial = {"prior_prec_init": {"0.*": 3.0, "2.*": 5.0}, "subset_of_weights": "last_layer"}
    priors = trainer_of(model, loader, **initial, temperature=0.5).priors
    assert priors.last_layer == "2"
    assert list(priors.named()) == ["2"]
    torch.testing.assert_close(priors.precision, torch.tensor([2.5]))
    squares = {name: p.square().sum() for name, p in model.named_parameters()}
    weighted = sum(5 * squares[n] if n.startswith("2") else 3 * squares[n] for n in squares)
    torch.testing.assert_close(priors.penalty(30), 0.5 * weighted / 30)
    with pytest.raises(ValueError, match="for the last layer"):
        trainer_of(model, loader, subset_of_weights="last_layer", prior_structure="path")


def test_the_copy_that_laplace_makes_for_the_last_layer_follows_the_model():
    model, loader = invariant_network(draws="grid"), DataLoader(labelled_points(), 30)
    trainer = trainer_of(model, loader, subset_of_weights="last_layer")
    (batch,) = loader
    before = trainer.estimator.approximation.curvature(*batch)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.augmentation.eta):
            tensor += 0.3
    found = trainer.estimator.approximation.curvature(*batch)
    fresh = trainer_of(model, loader, subset_of_weights="last_layer").estimator.approximation
    torch.testing.assert_close(found, fresh.curvature(*batch))
    assert not torch.allclose(found[1], before[1])


def test_the_last_layer_learns_a_range():
    torch.manual_seed(0)
    model, loader = invariant_network(), shuffled(labelled_points(), 30)
    before = model.augmentation.eta.clone()
    result = li.marglik_training(model, loader, subset_of_weights="last_layer", **FEW)
    assert not torch.equal(model.augmentation.eta, before)
    la = stock(model, subset="last_layer", prior_precision=result.prior_precision)
    with common_draws(0):
        la.fit(DataLoader(loader.dataset, 30))
    assert result.evidence == pytest.approx(la.log_marginal_likelihood().item())


def test_weights_settle_at_the_end():
    model, loader = invariant_network(), shuffled(labelled_points(), 10)
    few = FEW | {"n_epochs": 8}
    result = li.marglik_training(model, loader, estimator=Running(every=1, settle=0.25), **few)
    estimated = [record["evidence"] is not None for record in result.history]
    assert estimated == [True] * 6 + [False] * 2
    ranges = [record["hyperparameters"]["augmentation.eta"] for record in result.history]
    assert ranges[4] != ranges[5] == ranges[6] == ranges[7]
    precisions = [record["prior_precision"] for record in result.history]
    assert precisions[5] == precisions[6] == precisions[7] != result.prior_precision.tolist()
    assert result.losses[6] != result.losses[7]


def test_the_step_size_of_ranges_ends_before_weights_settle(monkeypatch):
    rates = []
    original = loop.record_of

    def spy(trainer, *args):
        rates.append(trainer.hyperparameters._optimizer.param_groups[0]["lr"])
        return original(trainer, *args)

    monkeypatch.setattr(loop, "record_of", spy)
    estimator = Running(settle=0.5)
    li.marglik_training(
        invariant_network(), shuffled(labelled_points()), estimator=estimator, lr_aug=0.2, **FEW
    )
    settings = training_settings(shuffled(labelled_points()), lr_aug=0.2).hyperparameters
    assert rates == [settings.rate(1, 2), *[settings.rate(2, 2)] * 3]


@pytest.mark.parametrize("settle", [-0.1, 1.0, float("nan")])
def test_a_share_of_epochs_is_a_share(settle):
    with pytest.raises(ValueError, match="settle must be at least 0 and below 1"):
        Running(settle=settle)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("estimator", ["refit", "running"])
def test_the_history_has_the_newton_decrement(estimator, likelihood):
    """By the gradients of five minibatches, with weights and priors that do not move."""
    classes = 3 if likelihood == "classification" else 0
    data = labelled_points(classes=classes)
    model, loader = plain_network(max(classes, 1)), DataLoader(data, 6)
    chosen = Running(every=1, settle=0.0) if estimator == "running" else Refit()
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}}
    exact = {"backend_kwargs": {"stochastic": False}, "prior_prec_init": 0.7}
    exact["sigma_noise_init"] = 1.3
    result = li.marglik_training(model, loader, likelihood, estimator=chosen, **still, **exact)
    la = result.la
    gradients = []
    for x, y in loader:
        loss = la._H_factor * la.backend.factor * la.backend.lossfunc(model(x), y)
        found = torch.autograd.grad(5 * loss, list(model.parameters()))
        gradient = torch.cat([tensor.flatten() for tensor in found])
        gradients.append(gradient + la.prior_precision_diag * la.mean)
    one, other = torch.stack(gradients[::2]).mean(0), torch.stack(gradients[1::2]).mean(0)
    expected = 0.5 * one @ torch.linalg.solve(la.posterior_precision.to_matrix(), other)
    (record,) = result.history
    assert record["newton_decrement"] == pytest.approx(expected.item(), rel=1e-6)


# The end of a run.


@pytest.mark.parametrize("options", [{"output_rank": 1}, {"stochastic": True}], ids=str)
@pytest.mark.parametrize("estimator", ["refit", "running"])
def test_evidence_of_a_result_is_exact_with_common_draws(estimator, options):
    data = labelled_points()
    result = li.marglik_training(
        invariant_network(),
        shuffled(data),
        estimator=estimator,
        backend_kwargs=options,
        **FEW,
    )
    la = stock(result.model, prior_precision=result.prior_precision)
    with common_draws(0):
        la.fit(DataLoader(data, 30))  # other batches, the same draws for every example
    assert result.evidence == pytest.approx(la.log_marginal_likelihood().item())
    assert result.la.log_marginal_likelihood().item() == pytest.approx(result.evidence)
    assert result.evidence_error == 0
    assert result.n_samples == {"": 3}


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_evidence_of_many_outputs_has_a_stated_error(structure):
    """Few, hardly trained data, for which the log determinant of random columns is off."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randint(100, (40,)))
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 100))
    few = FEW | {"n_epochs": 1, "prior_prec_init": 0.1, "hessian_structure": structure}
    result = li.marglik_training(net, shuffled(data, 20), objective=MAP(), **few)
    la = stock(net, structure=structure, prior_precision=result.prior_precision)
    la.fit(DataLoader(data, 20))
    exact = la.log_marginal_likelihood().item()
    assert 0 < result.evidence_error < 0.02 * abs(exact)
    assert abs(result.evidence - exact) < 3 * result.evidence_error


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_evidence_of_many_outputs_is_exact_where_sampling_fails(likelihood):
    y = torch.randint(40, (20,)) if likelihood == "classification" else torch.randn(20, 40)
    data = TensorDataset(torch.randn(20, 3), y)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 40))
    few = FEW | {"hessian_structure": "full", "likelihood": likelihood}
    assert li.marglik_training(net, shuffled(data, 20), **few).evidence_error == 0


def test_nothing_of_the_data_is_kept():
    """The returned approximation has no graph, whatever was learnt."""
    result = li.marglik_training(invariant_network(), shuffled(labelled_points()), **FEW)
    assert not result.la.log_marginal_likelihood().requires_grad
    assert result.model.augmentation.eta.requires_grad


def test_estimates_do_not_change_what_training_draws():
    losses = []
    for estimator in (Running(every=1), Running(every=3), KernelBound(every=2)):
        torch.manual_seed(1)
        model = invariant_network()
        still = FEW | {"n_hypersteps": 0, "n_epochs": 2, "n_epochs_burnin": 1}
        loader = shuffled(labelled_points())
        result = li.marglik_training(model, loader, estimator=estimator, lr_aug=1e-12, **still)
        losses.append(result.losses[0])
    assert losses[0] == losses[1] == losses[2]


# Bounds.


def test_the_kernel_bound_learns_and_is_a_bound():
    torch.manual_seed(0)
    data = labelled_points()
    model = invariant_network(draws="grid")
    before = model.augmentation.eta.clone()
    estimator = KernelBound("full", every=1)
    arguments = FEW | {"n_epochs": 3, "n_epochs_burnin": 1, "optimizer_kwargs": {"lr": 0.0}}
    result = li.marglik_training(
        model, shuffled(data, 10), estimator=estimator, lr_aug=1e-9, lr_hyp=1e-9, **arguments
    )
    assert len(result.margliks) == 6  # three minibatches in each of two epochs
    assert not torch.equal(model.augmentation.eta, before)
    la = stock(model, structure="full", prior_precision=result.prior_precision)
    la.fit(DataLoader(data, 30))
    exact = la.log_marginal_likelihood().item()
    assert exact - 10 < result.history[-1]["evidence"] < exact


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Running(every=0), "every must be positive"),
        (lambda: Running(decay=1.0), "decay must be at least 0 and below 1"),
        (lambda: Running(tolerance=-1.0), "tolerance must be finite and at least 0"),
        (lambda: Refit(n_hyper_batches=0.5), "n_hyper_batches must be positive and finite and"),
        (lambda: KernelBound("some"), "one of full, output, single"),
    ],
    ids=["every", "decay", "tolerance", "batches", "kind"],
)
def test_bad_options_are_explained(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_the_kernel_bound_is_of_all_weights():
    with pytest.raises(ValueError, match="not of the last layer"):
        li.marglik_training(
            plain_network(),
            shuffled(labelled_points()),
            estimator="kernel",
            subset_of_weights="last_layer",
        )


# What reviewers broke.


def test_a_full_curvature_is_never_of_one_random_direction():
    loader = DataLoader(labelled_points(), 30)
    for structure, stochastic in (("full", False), ("kron", True)):
        changes = {"estimator": Running(), "hessian_structure": structure}
        trainer = trainer_of(invariant_network(), loader, **changes)
        assert trainer.estimator.approximation.la.backend.stochastic is stochastic


@pytest.mark.parametrize("estimator", ["running", "refit", "kernel"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_is_learnt_may_not_change_on_the_way(estimator, requires_grad):
    model = invariant_network()
    model.augmentation.eta.requires_grad_(not requires_grad)

    def change(record, model):
        model.augmentation.eta.requires_grad_(requires_grad)

    with pytest.raises(RuntimeError, match="what requires grad changed"):
        li.marglik_training(
            model, shuffled(labelled_points()), estimator=estimator, callbacks=[change], **FEW
        )


def test_a_batch_sampler_that_drops_examples_does_not_drop_them_from_the_evidence():
    data, model = labelled_points(), plain_network()
    still = {"n_epochs": 1, "n_hypersteps": 0, "optimizer_kwargs": {"lr": 0.0}}
    sampler = torch.utils.data.BatchSampler(range(30), 16, drop_last=True)
    part = li.marglik_training(model, DataLoader(data, batch_sampler=sampler), **still)
    whole = li.marglik_training(model, DataLoader(data, 30), **still)
    assert part.history[0]["evidence"] == pytest.approx(whole.history[0]["evidence"])
    assert part.evidence == pytest.approx(whole.evidence)
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(30), 30)
    with pytest.raises(ValueError, match="draws with replacement"):
        li.marglik_training(model, DataLoader(data, 10, sampler=weighted), **still)


def test_the_kernel_bound_takes_data_smaller_than_a_batch():
    loader = DataLoader(labelled_points(), 64)
    result = li.marglik_training(
        invariant_network(), loader, estimator=KernelBound(every=1), **FEW | {"n_epochs_burnin": 1}
    )
    assert len(result.margliks) == 3


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_model_is_returned_in_evaluation_mode(subset):
    result = li.marglik_training(
        plain_network(), shuffled(labelled_points()), subset_of_weights=subset, **FEW
    )
    assert not any(module.training for module in result.model.modules())


def test_a_last_layer_that_is_partly_frozen_is_refused():
    model = plain_network()
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="last layer, 2, has parameters that do not require grad"):
        li.marglik_training(
            model, shuffled(labelled_points()), subset_of_weights="last_layer", **FEW
        )


def test_priors_stay_where_the_evidence_is_never_estimated():
    with pytest.warns(UserWarning, match="never estimated"):
        result = li.marglik_training(
            invariant_network(), shuffled(labelled_points()), **FEW | {"n_epochs_burnin": 9}
        )
    assert result.prior_precision.tolist() == [1.0] * 4
