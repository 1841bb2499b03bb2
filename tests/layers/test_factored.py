"""Factored layers equal their dense matrix, and their curvature the dense GGN where it must."""

import itertools

import pytest
import torch
from builders import affine_matrix, place_of
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, ggn, relative_error

from laplace_invariance.curvature import (
    AugmentedEF,
    AugmentedGGN,
    DifferentiableKron,
    kfac,
    load_state_dict,
)
from laplace_invariance.layers import (
    FactoredLinear2d,
    Linear2d,
    SlotLinear,
)


def test_factored_equals_its_dense_matrix():
    layer = FactoredLinear2d(2, 3, (4, 5), (3, 2))
    nn.init.normal_(layer.theta_1.bias)
    nn.init.normal_(layer.theta_2.bias)
    theta_1 = layer.theta_1.weight.unflatten(1, (3, 2))  # [x', c', c]
    theta_2 = layer.theta_2.weight.unflatten(1, (2, 20))  # [c', c, x]
    expected = torch.zeros(3, 6, 2, 20)
    for c_out, x_out, c, x in itertools.product(range(3), range(6), range(2), range(20)):
        expected[c_out, x_out, c, x] = theta_1[x_out, c_out, c] * theta_2[c_out, c, x]
    matrix, offset = affine_matrix(layer, (2, 4, 5))
    torch.testing.assert_close(matrix, expected.flatten(2).flatten(0, 1).detach())
    for c_out, x_out in itertools.product(range(3), range(6)):
        through = sum(theta_1[x_out, c_out, c] * layer.theta_2.bias[c_out] for c in range(2))
        torch.testing.assert_close(
            offset[6 * c_out + x_out], (through + layer.theta_1.bias[x_out]).detach()
        )


def test_dense_layer_is_a_linear_one():
    layer = Linear2d(2, 3, (4, 5), (3, 2))
    matrix, offset = affine_matrix(layer, (2, 4, 5))
    torch.testing.assert_close(matrix, layer.linear.weight.detach())
    torch.testing.assert_close(offset, layer.linear.bias.detach())


@pytest.mark.parametrize("cls", [FactoredLinear2d, Linear2d])
def test_sizes_that_do_not_match_are_named(cls):
    layer = cls(2, 3, (4, 5))
    with pytest.raises(
        ValueError, match=rf"{cls.__name__} was built for \[n, 2, 4, 5\], got shape \[7, 2, 5, 4\]"
    ):
        layer(torch.zeros(7, 2, 5, 4))
    with pytest.raises(ValueError, match="in_shape must be height and width"):
        cls(2, 3, (4, 5, 6))
    with pytest.raises(ValueError, match="needs channels"):
        cls(0, 3, 4)


def test_starts_at_the_variance_that_it_says():
    torch.manual_seed(0)
    layer, x = FactoredLinear2d(20, 30, 8, 6), torch.randn(50, 20, 8, 8)
    assert 0.9 < layer(x).std() < 1.1
    assert 0.009 < FactoredLinear2d(20, 30, 8, 6, scale=0.01)(x).std() < 0.011
    assert 0.9 < Linear2d(20, 10, 8, 6)(x).std() < 1.1


def classifier(channels=2, out_channels=3, n_classes=4):
    layer = FactoredLinear2d(channels, out_channels, (2, 3), (3, 1))
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(3 * out_channels, n_classes))


def index_of(model, name):
    return [n for n, _ in model.named_parameters()].index(name)


def kfac_and_exact(model, x, name, **options):
    y = torch.randint(4, (len(x),))
    _, kron = AugmentedGGN(model, "classification", **options).kron(x, y, N=len(x))
    exact = ggn(model, model(x), "classification").detach()
    part = place_of(model, name)
    return kron.to_matrix()[part, part], exact[part, part]


@pytest.mark.parametrize("per_slot", [False, True])
def test_theta_2_is_exact_for_one_datum_and_one_input_channel(per_slot):
    model = classifier(channels=1)
    approximate, exact = kfac_and_exact(
        model, torch.randn(1, 1, 2, 3), "0.theta_2.weight", per_slot=per_slot
    )
    torch.testing.assert_close(approximate, exact)


@pytest.mark.parametrize("per_slot", [False, True])
def test_theta_1_is_exact_for_one_datum_and_one_output_channel(per_slot):
    model = classifier(out_channels=1)
    approximate, exact = kfac_and_exact(
        model, torch.randn(1, 2, 2, 3), "0.theta_1.weight", per_slot=per_slot
    )
    torch.testing.assert_close(approximate, exact)


@pytest.mark.parametrize(
    ("channels", "out_channels", "name"), [(3, 2, "0.theta_2.weight"), (2, 3, "0.theta_1.weight")]
)
def test_several_channels_are_approximate_and_per_slot_is_closer(channels, out_channels, name):
    model, x = classifier(channels, out_channels), torch.randn(5, channels, 2, 3)
    shared, exact = kfac_and_exact(model, x, name)
    per_slot, _ = kfac_and_exact(model, x, name, per_slot=True)
    assert relative_error(shared, exact) > 0.05
    assert (per_slot - exact).norm() < (shared - exact).norm()
    off_diagonal = exact.clone()  # what no slot sees: pairs of different slots
    width = 6 if name == "0.theta_2.weight" else 2
    rows = model.get_parameter(name).shape[0]
    slots = channels if name == "0.theta_2.weight" else out_channels
    view = off_diagonal.view(rows, slots, width, rows, slots, width)
    for q in range(slots):
        view[:, q, :, :, q] = 0
    assert off_diagonal.norm() > 0.05 * exact.norm()
    mask = off_diagonal != 0
    assert (shared[mask] == 0).all()
    assert (per_slot[mask] == 0).all()


def test_one_active_channel_per_datum_with_equal_gradients_pins_the_scale():
    """Each channel is the only one that is not zero in one datum; all have the same gradient."""
    C = 3
    model = nn.Sequential(FactoredLinear2d(C, 2, (2, 3), (1, 1), bias=False), nn.Flatten())
    with torch.no_grad():  # dz(:, c) is theta_1(:, c), the same for all c
        theta_1 = model[0].theta_1.weight.view(1, 2, C)
        theta_1.copy_(theta_1[..., :1].expand(1, 2, C))
    pattern = torch.randn(2, 3)
    x = torch.zeros(C, C, 2, 3)
    for n in range(C):
        x[n, n] = pattern
    _, kron = AugmentedGGN(model, "regression").kron(x, torch.zeros(C, 2), N=C)
    part = place_of(model, "0.theta_2.weight")
    exact = ggn(model, model(x), "regression").detach()[part, part]
    # A_q = a a^T for each of C slots, G = (1 / C) sum_n sum_c g g^T = N g g^T: 1 / N times their
    # product is exact here.
    torch.testing.assert_close(kron.to_matrix()[part, part], exact)
    _, kron = AugmentedGGN(model, "regression", per_slot=True).kron(x, torch.zeros(C, 2), N=C)
    torch.testing.assert_close(kron.to_matrix()[part, part], exact)


def test_factors_are_those_of_the_block_matrix_in_the_papers():
    """A dense layer with inputs in slots and zeros elsewhere, at as many shared positions."""
    slots, d_in, d_out, n, columns = 3, 5, 2, 7, 4
    a, g = torch.randn(n, 1, slots, d_in), torch.randn(n, columns, 1, slots, d_out)
    weights = 0.9 * torch.randn(n, columns).softmax(-1)
    outer, inner = kfac.factors(a, g, weights, n, "expand", slotted_columns=True)
    placed = torch.zeros(n, slots, slots * d_in)
    for q in range(slots):
        placed[:, q, q * d_in : (q + 1) * d_in] = a[:, 0, q]
    dense_outer, dense_inner = kfac.factors(placed, g.squeeze(2), weights, n, "expand")
    torch.testing.assert_close(outer, dense_outer)
    torch.testing.assert_close(torch.block_diag(*inner), dense_inner)


@pytest.mark.parametrize("backend", [AugmentedGGN, AugmentedEF])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_diag_and_full_are_exact(backend, structure):
    model, x, y = classifier(), torch.randn(3, 2, 2, 3), torch.randint(4, (3,))
    _, result = getattr(backend(model, "classification"), structure)(x, y)
    if backend is AugmentedGGN:
        exact = ggn(model, model(x), "classification").detach()
    else:
        rows = [torch.cat([g.flatten() for g in gradient]) for gradient in _gradients(model, x, y)]
        exact = torch.stack(rows).T @ torch.stack(rows)
    torch.testing.assert_close(result, exact if structure == "full" else exact.diagonal())


def _gradients(model, x, y):
    for i in range(len(x)):
        yield torch.autograd.grad(
            nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )


def test_biases_are_exact():
    model, x = classifier(), torch.randn(3, 2, 2, 3)
    for name in ("0.theta_2.bias", "0.theta_1.bias"):
        approximate, exact = kfac_and_exact(model, x, name)
        torch.testing.assert_close(approximate, exact)


@pytest.mark.parametrize("per_slot", [False, True])
def test_stock_laplace_fits_differentiates_and_predicts(per_slot):
    model, x, y = classifier(), torch.randn(12, 2, 2, 3), torch.randint(4, (12,))
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    options = {"backend": AugmentedGGN, "backend_kwargs": {"per_slot": per_slot}}
    la = Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="kron", **options
    )
    la.fit(loader)
    n = len(list(model.parameters()))
    log_precision = torch.randn(n).requires_grad_()
    la.log_marginal_likelihood(log_precision.exp()).backward()
    matrix = la.H_facs.to_matrix()
    sizes = torch.tensor([p.numel() for p in model.parameters()])

    def evidence():
        deltas = log_precision.detach().exp().repeat_interleave(sizes)
        return la.log_likelihood - 0.5 * (
            (matrix + deltas.diag()).logdet() - deltas.log().sum() + (deltas * la.mean).dot(la.mean)
        )

    torch.testing.assert_close(la.log_marginal_likelihood(log_precision.exp()).detach(), evidence())
    expected = central_differences(evidence, log_precision)
    torch.testing.assert_close(log_precision.grad, expected, rtol=1e-5, atol=1e-6)

    la.prior_precision = log_precision.detach().exp()
    covariance = torch.linalg.inv(matrix + la.prior_precision.repeat_interleave(sizes).diag())
    jacobians, _ = la.backend.jacobians(x[:3])
    torch.testing.assert_close(
        la.functional_variance(jacobians), jacobians @ covariance @ jacobians.mT
    )
    torch.testing.assert_close(la.posterior_precision.diag(-1), covariance.diagonal())

    again = Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="kron", **options
    )
    load_state_dict(again, la.state_dict())
    torch.testing.assert_close(
        again.functional_variance(jacobians), la.functional_variance(jacobians)
    )


@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize("per_slot", [False, True])
def test_batches_add_up_in_blocks(approx, per_slot):
    model, x, y = classifier(), torch.randn(6, 2, 2, 3), torch.randint(4, (6,))
    backend = AugmentedGGN(model, "classification", kfac_approx=approx, per_slot=per_slot)
    whole = backend.kron(x, y, N=6)[1]
    parts = backend.kron(x[:2], y[:2], N=6)[1] + backend.kron(x[2:], y[2:], N=6)[1]
    assert isinstance(parts, DifferentiableKron)
    inner = whole.kfacs[index_of(model, "0.theta_2.weight")][1]
    assert inner.shape == (2, 6, 6)  # never the 12 x 12 matrix
    assert whole.kfacs[index_of(model, "0.theta_2.weight")][0].shape == (
        (2, 3, 3) if per_slot else (3, 3)
    )
    for ours, theirs in zip(whole.kfacs, parts.kfacs, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_layer_that_is_not_called_has_factors_in_blocks_as_well():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 4), SlotLinear(2, 3, 5)

        def forward(self, x):
            return self.used(x)

    for per_slot, outer in ((False, (5, 5)), (True, (2, 5, 5))):
        backend = AugmentedGGN(Unused(), "classification", per_slot=per_slot)
        _, kron = backend.kron(torch.randn(2, 3), torch.tensor([0, 3]), N=2)
        assert [f.shape for f in kron.kfacs[2]] == [outer, (2, 3, 3)]
        assert all((f == 0).all() for f in kron.kfacs[2])
