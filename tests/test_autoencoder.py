"""Invariant codes from pairs: the layer, the networks and the loss."""

import math

import pytest
import torch

from laplace_invariance.autoencoder import (
    InvariantAutoencoder,
    RichLayer,
    inverse_distance_loss,
    network,
)
from laplace_invariance.curvature import check_model
from laplace_invariance.datasets import fourier_code

# The layer.


def test_rich_layer_is_its_formula():
    layer = RichLayer(3, n_pairs=5)
    x = torch.randn(7, 3)
    y = layer(x)
    assert y.shape == (7, layer.out_features) == (7, 3 + 4 * 5)
    weight, bias = layer.linear.weight.detach(), layer.linear.bias.detach()
    for n in range(7):
        for j in range(5):
            even, odd = (weight[2 * j + k] @ x[n] + bias[2 * j + k] for k in (0, 1))
            norm = math.sqrt(even**2 + odd**2 + layer.eps)
            expected = torch.tensor([norm, even / norm, odd / norm, even * odd / norm**2])
            torch.testing.assert_close(y[n, 3 + j :: 5], expected)
    assert torch.equal(y[:, :3], x)


def test_by_default_the_output_is_three_times_the_input():
    assert RichLayer(10).out_features == RichLayer(10)(torch.randn(2, 10)).shape[1] == 30


def test_gradients_equal_finite_differences():
    layer = RichLayer(3, n_pairs=2)
    assert torch.autograd.gradcheck(layer, torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3])
def test_values_and_gradients_are_finite_where_norms_vanish(dtype, scale):
    layer = RichLayer(4, n_pairs=3).to(dtype)
    torch.nn.init.zeros_(layer.linear.bias)
    x = (scale * torch.randn(5, 4, dtype=dtype)).requires_grad_()
    y = layer(x)
    assert torch.isfinite(y).all()
    assert y[:, 7:].abs().max() <= 1  # what is normalised
    gradients = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    bound = 3 / math.sqrt(layer.eps)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert gradients[2].abs().max() <= len(x) * bound


def test_one_rich_layer_has_the_fourier_transform():
    d = 6
    net = network("rich", d, 3 * d, depth=1, width=2 * d)
    angles = 2 * math.pi * torch.outer(torch.arange(d), torch.arange(d)) / d
    layer, last = net
    with torch.no_grad():
        layer.linear.weight.copy_(torch.stack([angles.cos(), -angles.sin()], 1).flatten(0, 1))
        for module in (layer.linear, last):
            module.bias.zero_()
        last.weight.zero_()
        # columns: input, norm, normalised even, normalised odd, their product
        # rows: modulus, sine, cosine
        for target, source in enumerate((1, 3, 2)):
            last.weight[target * d : (target + 1) * d, source * d : (source + 1) * d] = torch.eye(d)
    x = 2 * torch.rand(50, d) - 1
    clear = (torch.fft.fft(x).abs() > 0.1).repeat(1, 3)  # elsewhere phases depend on eps
    torch.testing.assert_close(
        net(x)[clear], fourier_code(x)[clear], rtol=0, atol=layer.eps / 0.1**2
    )


def test_networks_have_their_widths_and_curvature():
    rich, selu = (network(layer, 5, 7, depth=2, width=6) for layer in ("rich", "selu"))
    assert [type(module).__name__ for module in rich] == ["RichLayer", "RichLayer", "Linear"]
    assert [module.out_features for module in rich] == [5 + 12, 5 + 24, 7]
    assert [type(module).__name__ for module in selu] == [
        "Linear",
        "SELU",
        "Linear",
        "SELU",
        "Linear",
    ]
    x = torch.randn(3, 5)
    assert rich(x).shape == selu(x).shape == (3, 7)
    assert " no" not in str(check_model(rich))


def test_selu_networks_start_with_unit_variance():
    net = network("selu", 100, 1, depth=6, width=300)
    assert net[:-1](torch.randn(500, 100)).var().item() == pytest.approx(1, abs=0.15)


# The autoencoder and its loss.


def test_codes_are_split_and_decoded_together():
    model = InvariantAutoencoder(torch.nn.Linear(3, 7), torch.nn.Linear(7, 3), n_invariant=2)
    x = torch.randn(5, 3)
    reconstruction, codes = model(x)
    assert (codes.invariant.shape, codes.variant.shape) == ((5, 2), (5, 5))
    torch.testing.assert_close(torch.cat(codes, 1), model.encoder(x))
    torch.testing.assert_close(reconstruction, model.decoder(model.encoder(x)))
    torch.testing.assert_close(model.encode(x).variant, codes.variant)


def test_loss_is_its_formula():
    code, other, distance = torch.randn(5, 3), torch.randn(5, 3), torch.rand(5)
    terms = [
        (1 / (0.5 + 2 * d**2) - 1 / (0.5 + 2 * math.dist(z, w) ** 2)) ** 2
        for z, w, d in zip(code.tolist(), other.tolist(), distance.tolist(), strict=True)
    ]
    assert inverse_distance_loss(code, other, distance, 0.5, 2.0).item() == pytest.approx(
        sum(terms) / 5
    )
    kept = (code - other).norm(dim=1)
    assert inverse_distance_loss(code, other, kept).item() == pytest.approx(0, abs=1e-20)


def test_loss_has_a_gradient_where_codes_are_equal():
    code, distance = torch.randn(4, 3, requires_grad=True), torch.rand(4)
    other = code.detach().clone()
    inverse_distance_loss(code, other, torch.zeros(4)).backward()
    assert torch.equal(code.grad, torch.zeros(4, 3))
    assert torch.autograd.gradcheck(
        lambda z: inverse_distance_loss(z, other.roll(1, 0), distance), code
    )


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: RichLayer(3), "give n_pairs for in_features=3"),
        (lambda: RichLayer(4, 0), "must be positive, got 4, 0 and"),
        (lambda: RichLayer(4, eps=0.0), "must be positive, got 4, 2 and 0.0"),
        (lambda: network("gelu", 2, 2, 1, 4), "unknown layer 'gelu'; choose from rich, selu"),
        (lambda: network("rich", 2, 2, 1, 5), "width must be even, got 5"),
        (lambda: network("selu", 2, 2, -1, 5), "no negative depth, got .*depth=-1"),
        (
            lambda: InvariantAutoencoder(torch.nn.Identity(), torch.nn.Identity(), 0),
            "n_invariant must be positive",
        ),
        (
            lambda: InvariantAutoencoder(torch.nn.Identity(), torch.nn.Identity(), 3)(
                torch.zeros(2, 3)
            ),
            r"k above n_invariant=3.*\[2, 3\]",
        ),
        (
            lambda: inverse_distance_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1)),
            r"and \[2, 1\]",
        ),
        (
            lambda: inverse_distance_loss(
                torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), 0.0
            ),
            "got 0.0 and 0.3",
        ),
    ],
)
def test_networks_and_loss_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call()
