"""Invariant weights: the bound against the exact evidence, weights against inputs, learning."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence
from twins import central_differences

import laplace_invariance as li
from laplace_invariance.draws import fixed_draws
from laplace_invariance.variational import ShallowNetwork, fit


def points_network(
    likelihood="classification", n_outputs=3, init=0.7, draws="grid", learn="rotation", **options
):
    augmentation = li.AffinePoints(init={"rotation": init}, learn=learn, draws=draws)
    options = {"n_features": 8, "n_samples": 5, "output_scale": 1.5, "noise": 0.6, **options}
    return ShallowNetwork(augmentation, (2,), n_outputs, likelihood=likelihood, **options)


def disturbed(model):
    """Give q and the first layer's bias values that nothing is special about."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def data(model, n=7):
    x = torch.randn(n, *model.in_shape)
    n_outputs = len(model.mean)
    return x, torch.randint(
        n_outputs, (n,)
    ) if model.likelihood == "classification" else torch.randn(n, n_outputs)


def posterior(model):
    """Return q, one Gaussian for every output."""
    root = model.basis @ (model.lower.tril(-1) + torch.diag_embed(model.log_diagonal.exp()))
    return MultivariateNormal(model.mean @ model.basis.mT, scale_tril=root)


# The bound.


def exact_evidence(model, x, y):
    phi = model.log_scale.exp() * model.features(x)
    covariance = phi @ phi.mT + (2 * model.log_noise).exp() * torch.eye(len(x))
    return MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y.mT).sum()


def set_posterior(model, x, y):
    """Set q to the exact posterior of a Gaussian likelihood."""
    with torch.no_grad():
        phi, precision = model.log_scale.exp() * model.features(x), (-2 * model.log_noise).exp()
        covariance = (torch.eye(phi.shape[1]) + precision * phi.mT @ phi).inverse()
        root = torch.linalg.cholesky(covariance)
        model.basis.copy_(torch.eye(len(root)))
        model.mean.copy_((covariance @ phi.mT @ y * precision).mT)
        model.lower.copy_(root.expand_as(model.lower))
        model.log_diagonal.copy_(root.diagonal().log().expand_as(model.log_diagonal))


@pytest.mark.parametrize("activation", ["cosine", "relu"])
def test_elbo_is_the_evidence_at_the_posterior_and_below_it_elsewhere(activation):
    model = points_network("regression", n_outputs=2, activation=activation)
    x, y = data(model)
    evidence = exact_evidence(model, x, y)
    assert model.elbo(x, y) < evidence
    set_posterior(model, x, y)
    torch.testing.assert_close(model.elbo(x, y), evidence)
    with torch.no_grad():
        for parameter in (model.mean, model.lower, model.log_diagonal):
            kept = parameter.clone()
            parameter.add_(0.05 * torch.randn_like(parameter))
            assert model.elbo(x, y) < evidence - 1e-3
            parameter.copy_(kept)


def test_q_starts_with_the_covariance_of_the_posterior():
    model = disturbed(points_network("regression", n_outputs=2))
    x, y = data(model)
    model.rebase_(x, restart=True)
    found = posterior(model)
    assert not found.mean.any()
    set_posterior(model, x, y)
    torch.testing.assert_close(found.covariance_matrix, posterior(model).covariance_matrix)
    bases = []
    for inputs, n_data in ((x[:1].expand(2, -1), 20), (x[:1].expand(20, -1), None)):
        model.rebase_(inputs, n_data)
        bases.append(model.basis.clone())
    torch.testing.assert_close(*bases)


def test_another_basis_is_the_same_q():
    model = disturbed(points_network())
    before = posterior(model)
    model.rebase_(torch.randn(9, 2))
    assert (model.basis - torch.eye(8)).abs().max() > 0.1
    torch.testing.assert_close(posterior(model).mean, before.mean)
    torch.testing.assert_close(posterior(model).covariance_matrix, before.covariance_matrix)


def test_at_the_posterior_the_elbo_has_the_gradient_of_the_evidence():
    model = points_network("regression", n_outputs=2)
    x, y = data(model)
    set_posterior(model, x, y)
    model.elbo(x, y).backward()
    for tensor in li.hyperparameters(model):
        torch.testing.assert_close(
            tensor.grad, central_differences(lambda: exact_evidence(model, x, y).detach(), tensor)
        )
    assert model.augmentation.eta.grad.abs().max() > 0.1


def test_elbo_of_classification_is_below_the_evidence():
    """By brute force: the mean likelihood over draws from the prior of one weight per class."""
    model = disturbed(points_network(n_outputs=2, n_features=2))
    x, y = data(model, 4)
    with torch.no_grad():
        phi = model.log_scale.exp() * model.features(x)
        logits = torch.einsum("nm,scm->snc", phi, torch.randn(200_000, 2, 2))
        evidence = (
            logits.log_softmax(-1)
            .gather(-1, y.expand(len(logits), -1).unsqueeze(-1))
            .sum((1, 2))
            .exp()
            .mean()
            .log()
        )
        assert model.elbo(x, y, n_outputs_drawn=10_000) < evidence
    fit(model, x, y, n_epochs=300, batch_size=4, lr_mean=0.05, lr_hyper=0.0)
    with torch.no_grad():
        gap = evidence - model.elbo(x, y, n_outputs_drawn=10_000)
    assert -0.01 < gap < 0.15  # q is independent between classes, the posterior is not


def test_kl_is_that_of_the_distributions():
    model = points_network()
    model.rebase_(torch.randn(9, 2))
    prior = MultivariateNormal(torch.zeros(8), torch.eye(8))
    torch.testing.assert_close(disturbed(model).kl(), kl_divergence(posterior(model), prior).sum())


def test_moments_are_those_of_outputs_under_q():
    model = points_network()
    model.rebase_(torch.randn(9, 2))
    x = torch.randn(7, 2)
    mean, variance = disturbed(model).moments(model.features(x))
    phi, q = model.features(x) * model.log_scale.exp(), posterior(model)
    torch.testing.assert_close(mean, torch.einsum("nm,cm->nc", phi, q.mean))
    torch.testing.assert_close(
        variance, torch.einsum("nm,cmk,nk->nc", phi, q.covariance_matrix, phi)
    )
    torch.testing.assert_close(model(x), mean)


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_batches_add_up_to_all_data(likelihood):
    model = disturbed(points_network(likelihood))
    if likelihood == "classification":  # q a point, so that the draws of outputs do not matter
        model.lower.data.zero_(), model.log_diagonal.data.fill_(-50.0)
    x, y = data(model, 10)
    parts = [
        len(a) / 10 * model.elbo(a, b, 10) for a, b in zip(x.split(4), y.split(4), strict=True)
    ]
    torch.testing.assert_close(sum(parts), model.elbo(x, y))


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("activation", ["cosine", "relu"])
def test_gradients_equal_central_differences(likelihood, activation):
    model = disturbed(
        points_network(likelihood, activation=activation, n_features=4, draws="sobol", learn="all")
    )
    x, y = data(model)

    def elbo():
        torch.manual_seed(1)  # the same draws of transformations and outputs
        return model.elbo(x, y, 20)

    elbo().backward()
    tensors = {**dict(model.named_parameters()), **dict(li.named_hyperparameters(model))}
    assert {"augmentation.eta", "log_scale", "mean", "lower"} <= set(tensors)
    for name, tensor in tensors.items():
        expected = central_differences(lambda: elbo().detach(), tensor)
        assert expected.abs().max() > 1e-3, name
        torch.testing.assert_close(
            tensor.grad, expected, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_only_the_objectives_reach_hyperparameters():
    model = disturbed(points_network())
    x, y = data(model)
    model.log_likelihood(model(x), y).sum().backward()
    assert all(tensor.grad is None for tensor in li.hyperparameters(model))
    model.point_log_likelihood(x, y).backward()
    assert model.augmentation.eta.grad is not None
    assert model.lower.grad is None  # the covariance is not used


# Weights and inputs.


def of_transformed_inputs(model, x, draws):
    """Features, by transforming each input and averaging."""
    samples = model.augmentation.transform(x, draws).flatten(0, 1)
    still = ShallowNetwork.features(model, samples, torch.zeros_like(draws[:, :1]))
    return still.unflatten(0, (len(x), draws.shape[1])).mean(1)


@pytest.mark.parametrize("activation", ["cosine", "relu"])
@pytest.mark.parametrize(
    ("dimensions", "in_shape"), [(2, (2,)), (2, (5, 2)), (3, (3,)), (3, (4, 3))]
)
def test_transformed_weights_are_transformed_coordinates(activation, dimensions, in_shape):
    augmentation = li.AffinePoints(dimensions, init=0.4)
    model = disturbed(ShallowNetwork(augmentation, in_shape, 3, 6, activation=activation))
    x, draws = torch.randn(7, *in_shape), augmentation.sample(1, 5)
    torch.testing.assert_close(model.features(x, draws), of_transformed_inputs(model, x, draws))
    assert (model.features(x, draws) - model.features(x, 0 * draws)).abs().max() > 0.01


@pytest.mark.parametrize(
    "ranges",
    [{"rotation": 2.0}, {"x_translation": 0.2}, {"x_scale": 0.3}, {"shear": 0.2, "rotation": 0.5}],
)
def test_transformed_weights_are_transformed_images_up_to_interpolation(ranges):
    augmentation = li.AffineImage(init=ranges, draws="independent")
    model = ShallowNetwork(augmentation, (2, 29, 29), 3, 8, length_scale=2.0, n_samples=1)
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, 29), torch.linspace(-1, 1, 29), indexing="ij")
    centres = 0.6 * torch.rand(5, 2, 2, 1, 1) - 0.3
    x = torch.exp(
        -((xs - centres[:, :, 0]) ** 2 + (ys - centres[:, :, 1]) ** 2) / 0.05
    )  # smooth, dark at the border
    draws = augmentation.sample(1, 3)
    found, expected = model.features(x, draws), of_transformed_inputs(model, x, draws)
    assert (found - expected).abs().max() < 0.02
    assert (found - model.features(x, 0 * draws)).abs().max() > 0.05
    assert (
        found - model.features(x, -draws)
    ).abs().max() > 0.05  # the inverse is another transformation


def test_many_cosines_are_the_squared_exponential_kernel():
    augmentation = li.AffinePoints(learn="rotation")
    model = ShallowNetwork(
        augmentation, (2,), 1, 100, likelihood="regression", n_samples=1, length_scale=0.8
    )
    model.weight, model.bias = (
        torch.randn(50_000, 2) / 0.8,
        torch.zeros(50_000),
    )  # many, without a q that is as wide
    x = torch.randn(5, 2)
    phi = model.features(x) * math.sqrt(100 / 100_000)
    torch.testing.assert_close(
        phi @ phi.mT, torch.exp(-(torch.cdist(x, x) ** 2) / (2 * 0.8**2)), atol=0.02, rtol=0
    )


def test_blur_limits_frequencies_and_keeps_sums():
    model = ShallowNetwork(li.AffineImage(), (1, 15, 15), 3, 4, blur=0.2)
    model.weight.zero_()
    model.weight[:, :, 7, 7] = 1
    blurred = model.filter_bank(1, 3)[0, 1, 0]
    steps = (torch.arange(15) - 7) / (0.2 * 7)
    torch.testing.assert_close(
        blurred / blurred.max(), torch.exp(-(steps**2 + steps[:, None] ** 2) / 2)
    )
    assert blurred.sum().item() == pytest.approx(1)
    model.blur = 0.0
    torch.testing.assert_close(model.filter_bank(1, 3)[0, 1], model.weight[0])


# Draws.


def test_filter_bank_goes_from_end_to_end():
    model = ShallowNetwork(li.AffineImage(init={"rotation": math.pi / 2}), (1, 7, 7), 3, 6)
    bank = model.filter_bank(2, 3)
    assert bank.shape == (2, 3, 1, 7, 7)
    torch.testing.assert_close(bank[:, 0], bank[:, 1].rot90(1, (-2, -1)))
    torch.testing.assert_close(bank[:, 2], bank[:, 1].rot90(-1, (-2, -1)))


def test_draws_are_fresh_with_gradients_and_fixed_without():
    model = points_network(draws="independent")
    x, _ = data(model)
    assert not torch.equal(model.features(x), model.features(x))
    with torch.no_grad():
        assert torch.equal(model.features(x), model.features(x))
        grid = points_network(draws="grid")
        grid.load_state_dict(model.state_dict())
    assert torch.equal(grid.features(x), grid.features(x))
    expected = grid.features(
        x, torch.tensor([-0.8, -0.4, 0.0, 0.4, 0.8]).view(1, 5, 1) * torch.eye(6)[2]
    )
    torch.testing.assert_close(grid.features(x), expected)


# Learning.


def ring(n=300, n_lobes=0):
    """Two classes on rings of their own, which swap places ``n_lobes`` times round the circle."""
    angles = math.pi * (2 * torch.rand(n) - 1)
    inner = torch.randint(2, (n,))
    radius = 1 + inner + 0.1 * torch.randn(n)
    points = torch.stack([radius * angles.cos(), radius * angles.sin()], -1)
    return points, torch.where((n_lobes * angles).cos() >= 0, inner, 1 - inner)


@pytest.mark.parametrize("draws", ["sobol", "grid"])
def test_elbo_widens_and_narrows_ranges(draws):
    options = {
        "n_features": 40,
        "n_outputs": 2,
        "length_scale": 0.7,
        "draws": draws,
        "n_samples": 16,
        "output_scale": 5.0,
    }
    training = {"n_epochs": 50, "batch_size": 100, "lr_hyper": 0.1, "n_epochs_burnin": 5}
    model = points_network(init=0.1, **options)
    history = fit(model, *ring(), **training)
    assert history[-1]["ranges"]["rotation"] == model.augmentation.magnitudes()["rotation"] > 1.8
    assert history[-1]["objective"] > history[0]["objective"] + 0.3
    assert [record["epoch"] for record in history] == list(range(1, 51))
    assert history[4]["ranges"]["rotation"] == pytest.approx(0.1)  # not yet
    model = points_network(init=0.6, **options)
    fit(model, *ring(n_lobes=4), **training)
    assert model.augmentation.magnitudes()["rotation"] < 0.4


def test_frozen_ranges_stay_and_everything_repeats():
    x, y = ring(50)
    found = []
    for _ in range(2):
        model = points_network(
            n_outputs=2, draws="sobol", generator=torch.Generator().manual_seed(3)
        )
        model.augmentation = model.augmentation.frozen()
        found.append((fit(model, x, y, n_epochs=3, batch_size=20), model.state_dict()))
    assert found[0][0] == found[1][0]
    assert all(
        torch.equal(a, b) for a, b in zip(found[0][1].values(), found[1][1].values(), strict=True)
    )
    assert model.augmentation.magnitudes()["rotation"] == pytest.approx(0.7)


def test_ranges_stay_in_their_domain():
    model = points_network(n_outputs=2, init=3.1, draws="sobol")
    history = fit(model, *ring(100), n_epochs=5, batch_size=50, lr_hyper=2.0, n_epochs_burnin=0)
    assert max(record["ranges"]["rotation"] for record in history) == pytest.approx(math.pi)


def test_steps_that_are_not_finite_are_refused():
    model = points_network()
    x, y = data(model)
    with pytest.raises(
        FloatingPointError, match=r"the elbo is (nan|-inf) in epoch \d; use smaller step sizes"
    ):
        fit(model, x, y, lr=1e6)


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"augmentation": li.Colour()}, TypeError, "AffineImage or AffinePoints, got Colour"),
        (
            {"in_shape": (1, 8, 8)},
            ValueError,
            r"AffinePoints needs in_shape \(2,\) or \(points, 2\), got \(1, 8, 8\)",
        ),
        (
            {"augmentation": li.AffineImage()},
            ValueError,
            r"AffineImage needs in_shape \(channels, height, width\), got \(2,\)",
        ),
        ({"activation": "tanh"}, ValueError, "unknown activation 'tanh'; choose from cosine, relu"),
        (
            {"likelihood": "poisson"},
            ValueError,
            "unknown likelihood 'poisson'; choose from classification, regression",
        ),
        ({"n_features": 7}, ValueError, "positive, and even for cosines, got 7"),
        ({"n_features": 0, "activation": "relu"}, ValueError, "n_features must be positive, got 0"),
        ({"n_outputs": 1}, ValueError, "classification with n_outputs = 1 has nothing to predict"),
        ({"n_samples": 0}, ValueError, "n_samples must be a positive integer"),
        ({"length_scale": 0.0}, ValueError, "length_scale must be positive and finite, got 0.0"),
        ({"noise": math.nan}, ValueError, "noise must be positive and finite, got nan"),
        ({"blur": -0.1}, ValueError, "blur must not be negative, got -0.1"),
    ],
)
def test_networks_refuse(options, error, match):
    with pytest.raises(error, match=match):
        ShallowNetwork(
            **{
                "augmentation": li.AffinePoints(learn="rotation"),
                "in_shape": (2,),
                "n_outputs": 3,
                **options,
            }
        )


def test_data_that_do_not_fit_are_refused():
    model, regression = points_network(), points_network("regression")
    x, y = data(model)
    with pytest.raises(
        ValueError, match=r"inputs must be \[n, 2\] of torch.float64, got shape \[7, 3\]"
    ):
        model(torch.randn(7, 3))
    with pytest.raises(
        ValueError, match=r"labels must be integers \[n\], got shape \[7\] of torch.float64"
    ):
        model.elbo(x, y.double())
    with pytest.raises(ValueError, match="labels must be from 0 to 2, got 0 to 3"):
        model.elbo(x, torch.tensor([0, 1, 2, 3, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"targets must be \[7, 3\], got shape \[7, 2\]"):
        regression.elbo(x, torch.randn(7, 2))
    with pytest.raises(ValueError, match="as many labels or targets, got 7 and 6"):
        fit(model, x, y[:6])
    with pytest.raises(ValueError, match="n_epochs and batch_size must be positive, got 1 and 0"):
        fit(model, x, y, n_epochs=1, batch_size=0)
    with pytest.raises(ValueError, match="hold NaN or infinite values"):
        fit(model, x / 0, y)
    with pytest.raises(ValueError, match="unknown objective 'map'; choose from elbo, point"):
        fit(model, x, y, "map")


# More of draws and training.


def test_fixed_draws_are_those_of_predictions():
    model, x = points_network(draws="independent"), torch.randn(5, 2)
    with torch.no_grad():
        expected = model.features(x)
    with fixed_draws():
        torch.testing.assert_close(model.features(x), expected)
    assert not torch.allclose(model.features(x), expected)


def test_basis_exists_for_little_noise_in_single_precision():
    torch.set_default_dtype(torch.float32)
    model = ShallowNetwork(
        li.AffinePoints(init={"rotation": 0.3}, learn="rotation"),
        (2,),
        1,
        256,
        likelihood="regression",
        noise=0.01,
    )
    x = torch.randn(2000, 2)
    model.rebase_(x, 60000, restart=True)
    assert model.basis.isfinite().all()


def test_burn_in_must_end():
    model, x, y = points_network(), torch.randn(7, 2), torch.randint(3, (7,))
    with pytest.raises(ValueError, match="burn-in"):
        fit(model, x, y, n_epochs=2, n_epochs_burnin=2)


def test_labels_may_be_small_integers_and_data_must_be_there():
    model, x, y = points_network(), torch.randn(7, 2), torch.randint(3, (7,))
    torch.manual_seed(0)
    expected = model.elbo(x, y)
    torch.manual_seed(0)
    torch.testing.assert_close(model.elbo(x, y.to(torch.uint8)), expected)
    with pytest.raises(ValueError, match="there must be inputs"):
        fit(model, x[:0], y[:0], n_epochs=2)
    with pytest.raises(ValueError, match=r"of torch.float64, got .* of torch.float32"):
        model.elbo(x.float(), y)
