"""Architectures: what kron covers, what it refuses, and the exact diagonal as a way out."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import (
    block_diagonal,
    central_differences,
    ggn,
    parameter_jacobian,
    product,
    relative_error,
)

import laplace_invariance as li
from laplace_invariance.curvature import (
    AugmentedEF,
    AugmentedGGN,
    backend,
    load_state_dict,
    rules,
)
from laplace_invariance.curvature.trace import chunks, shortcuts
from laplace_invariance.curvature.trace.calls import Trace, backpropagate
from laplace_invariance.curvature.trace.matching import match

CLASSES = 3


class Residual(nn.Module):
    """As in torchvision: batch norm, in-place ReLU, in-place addition."""

    def __init__(self, n, inplace=True):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(n, n, 3, padding=1, bias=False),
            nn.Conv2d(n, n, 3, padding=1, bias=False),
        )
        self.bn1, self.bn2 = nn.BatchNorm2d(n), nn.BatchNorm2d(n)
        self.relu = nn.ReLU(inplace=inplace)
        self.inplace = inplace

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.inplace:
            y += x
        else:
            y = y + x
        return self.relu(y)


def resnet(inplace=True):
    stem = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace)]
    blocks = [Residual(4, inplace), Residual(4, inplace)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)]
    net = nn.Sequential(*stem, *blocks, *head)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    return net, torch.randn(7, 1, 6, 6)


def layer_norm_mlp():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, CLASSES)
    ), torch.randn(7, 1, 6, 6)


def grouped():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
    return net, torch.randn(7, 1, 6, 6)


class Attention(nn.Module):
    def __init__(self, width, heads, fused):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused = heads, fused

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        y = (
            F.scaled_dot_product_attention(q, k, v)
            if self.fused
            else (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, fused=True, width=8):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2, fused)
        self.mlp = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


def transformer():
    return Transformer(), torch.randn(7, 1, 6, 6)


class Twice(nn.Module):
    """A Linear that is used twice in a forward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = (
            nn.Linear(36, 4),
            nn.Linear(4, 4),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x):
        return self.last(
            self.shared(torch.tanh(self.shared(self.first(x.flatten(1)).tanh()))).tanh()
        )


def twice():
    return Twice(), torch.randn(7, 1, 6, 6)


class Frames(nn.Module):
    """Moves a position axis into the batch before it calls its layers, as models of video do."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv1d(1, 2, 3), nn.Linear(8, CLASSES)

    def forward(self, x):
        rows = x.flatten(0, 1).flatten(0, 1).unsqueeze(1)  # [n * channels * height, 1, width]
        return self.head(self.conv(rows).tanh().flatten(1)).view(len(x), -1, CLASSES).mean(1)


def frames():
    return Frames(), torch.randn(7, 1, 6, 6)


MODELS = [resnet, layer_norm_mlp, grouped, transformer, twice, frames]


def invariant(net, **kwargs):
    return li.InvariantModel(
        net, li.AffineImage(init=0.05, **kwargs), 3, generator=torch.Generator()
    )


def laplace_of(model, x, structure="kron", backend=AugmentedGGN, **options):
    model.generator.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator)), batch_size=4
    )
    la = Laplace(
        model,
        "classification",
        subset_of_weights="all",
        hessian_structure=structure,
        backend=backend,
        backend_kwargs=options,
    )
    la.fit(loader)
    return la


@pytest.mark.parametrize("backend", [AugmentedGGN, AugmentedEF])
@pytest.mark.parametrize("build", MODELS)
def test_kron_fits_and_differentiates(build, backend):
    net, x = build()
    model = invariant(net)

    def evidence():
        return laplace_of(model, x, backend=backend).log_marginal_likelihood()

    evidence().backward()
    eta = model.augmentation.eta
    assert (
        relative_error(eta.grad, central_differences(lambda: evidence().detach(), eta, 1e-7)) < 1e-4
    )


@pytest.mark.parametrize("build", MODELS)
def test_full_is_the_dense_ggn(build):
    net, x = build()
    model = invariant(net).eval()
    y = torch.randint(CLASSES, (len(x),))
    model.generator.manual_seed(1)
    _, full = AugmentedGGN(model, "classification").full(x, y)
    model.generator.manual_seed(1)
    expected = ggn(model, model(x), "classification")
    torch.testing.assert_close(full, expected.detach())


def test_in_place_layers_change_nothing():
    torch.manual_seed(3)
    net, x = resnet(inplace=True)
    torch.manual_seed(3)
    twin, _ = resnet(inplace=False)
    ours, expected = laplace_of(invariant(net), x), laplace_of(invariant(twin), x)
    torch.testing.assert_close(ours.log_marginal_likelihood(), expected.log_marginal_likelihood())


def test_directions_of_any_layout_are_backpropagated():
    """torch's own gradient through batch norm is wrong for one that is laid out otherwise."""
    norm, x = nn.BatchNorm2d(3).eval(), torch.randn(1, 3, 2, 2, requires_grad=True)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0])
    column = torch.randn(1, 4, 3).mT.view_as(x)
    (found,) = backpropagate(norm(x), [x], column)
    slope = norm.weight.detach() / (1 + norm.eps) ** 0.5
    torch.testing.assert_close(found, column * slope.view(3, 1, 1))


class OverwrittenInput(nn.Module):
    """A layer that keeps a padded copy of its input for autograd, so that this may be changed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
        self.head = nn.Linear(50, CLASSES)

    def forward(self, x):
        x = self.first(x)
        x += self.second(x)
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    "make",
    [lambda: resnet(inplace=True), lambda: (OverwrittenInput(), torch.randn(4, 1, 5, 5))],
    ids=["output", "input"],
)
def test_in_place_layers_are_seen_as_layers(make):
    """Not only as the functions that they call, which other engines do not see."""
    net, x = make()
    found = match(net.eval(), list(net.parameters()), net, x)
    assert found.layers.copies
    assert not found.layers.used


def test_norms_are_exact_blocks():
    net, x = layer_norm_mlp()
    model = invariant(net)
    y = torch.randint(CLASSES, (len(x),))
    model.generator.manual_seed(1)
    _, kron = AugmentedGGN(model, "classification").kron(x, y, N=len(x))
    model.generator.manual_seed(1)
    expected = block_diagonal(ggn(model, model(x), "classification"), model)
    at = 36 * 5 + 5
    torch.testing.assert_close(
        kron.kfacs[2][0].detach(), expected[at : at + 5, at : at + 5].detach()
    )
    torch.testing.assert_close(
        kron.kfacs[3][0].detach(), expected[at + 5 : at + 10, at + 5 : at + 10].detach()
    )


def test_calls_are_further_positions():
    """One Linear at R positions, or R calls of it: the same factors."""
    torch.manual_seed(5)
    linear, head = nn.Linear(3, 4), nn.Linear(8, CLASSES)

    class Calls(nn.Module):
        def __init__(self, separately):
            super().__init__()
            self.linear, self.head, self.separately = linear, head, separately

        def forward(self, x):  # [n, 2, 3]
            y = (
                torch.stack([self.linear(x[:, 0]), self.linear(x[:, 1])], 1)
                if self.separately
                else self.linear(x)
            )
            return self.head(y.tanh().flatten(1))

    x, y = torch.randn(5, 2, 3), torch.randint(CLASSES, (5,))
    results = [
        AugmentedGGN(Calls(s), "classification").kron(x, y, N=5)[1].to_matrix()
        for s in (True, False)
    ]
    torch.testing.assert_close(*results)


def test_tied_modules_of_one_kind_are_further_positions():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight, second.bias = first.weight, first.bias
    net = nn.Sequential(first, nn.Tanh(), second, nn.Linear(4, CLASSES))
    x, y = torch.randn(5, 4), torch.randint(CLASSES, (5,))
    _, full = AugmentedGGN(net, "classification").full(x, y)
    torch.testing.assert_close(full, ggn(net, net(x), "classification").detach())
    assert len(AugmentedGGN(net, "classification").kron(x, y, N=5)[1]) == 4


def test_embedding():
    net = nn.Sequential(nn.Embedding(6, 3), nn.Flatten(), nn.Linear(12, CLASSES))
    x, y = torch.randint(6, (5, 4)), torch.randint(CLASSES, (5,))
    backend = AugmentedGGN(net, "classification")
    _, full = backend.full(x, y)
    torch.testing.assert_close(full, ggn(net, net(x), "classification").detach())
    _, kron = backend.kron(x, y, N=5)
    assert [f.shape for f in kron.kfacs[0]] == [(6,), (3, 3)]  # a diagonal, and a matrix
    counts = torch.bincount(x.flatten(), minlength=6)
    torch.testing.assert_close(kron.kfacs[0][0], counts / 5.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    la = Laplace(
        net,
        "classification",
        subset_of_weights="all",
        hessian_structure="kron",
        backend=AugmentedGGN,
    )
    la.fit(loader)
    assert torch.isfinite(la.log_marginal_likelihood())


def test_sparse_embeddings_have_exact_curvature_only():
    net = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Flatten(), nn.Linear(12, CLASSES))
    x, y = torch.randint(6, (5, 4)), torch.randint(CLASSES, (5,))
    backend = AugmentedGGN(net, "classification")
    _, full = backend.full(x, y)
    with pytest.raises(NotImplementedError, match="sparse=False computes the same"):
        backend.kron(x, y, N=5)
    net[0].sparse = False
    torch.testing.assert_close(full, ggn(net, net(x), "classification").detach())


class Sequence(nn.Module):
    """A recurrent layer of torch, which has no rule."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.squeeze(1))[0].mean(1))


def test_layers_without_a_rule_are_refused_by_name():
    x, y = torch.randn(3, 1, 5, 6), torch.randint(CLASSES, (3,))
    with pytest.raises(NotImplementedError) as error:
        AugmentedGGN(invariant(Sequence()), "classification").kron(x, y, N=3)
    message = str(error.value)
    assert "net.layer.weight_ih_l0" in message
    assert "LSTM has no rule" in message
    assert "net.head.weight" not in message
    assert "on_unsupported" in message
    assert "register_rule" in message


def test_exact_diagonal_is_counted_in_the_evidence():
    net, x = Sequence(), torch.randn(3, 1, 5, 6)
    model = invariant(net)
    model.generator.manual_seed(1)
    _, kron = AugmentedGGN(model, "classification", on_unsupported="diag").kron(
        x, torch.randint(CLASSES, (3,)), N=3
    )
    model.generator.manual_seed(1)
    expected = ggn(model, model(x), "classification").diagonal()
    sizes = [p.numel() for p in net.parameters()]
    diagonal = torch.cat([f[0] for f in kron.kfacs[:-2]])
    torch.testing.assert_close(diagonal.detach(), expected[: sum(sizes[:-2])].detach())
    assert [f[0].ndim for f in kron.kfacs] == [1] * (len(sizes) - 2) + [2, 2]

    def evidence():
        return laplace_of(model, x, on_unsupported="diag").log_marginal_likelihood()

    evidence().backward()
    eta = model.augmentation.eta
    assert (
        relative_error(eta.grad, central_differences(lambda: evidence().detach(), eta, 1e-7)) < 1e-4
    )


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_diag_and_full_need_no_rule(structure):
    net, x = Sequence(), torch.randn(3, 1, 5, 6)
    model = invariant(net)
    la = laplace_of(model, x, structure)
    model.generator.manual_seed(1)
    expected = ggn(model, model(x), "classification").detach()
    torch.testing.assert_close(
        la.H.detach(), expected if structure == "full" else expected.diagonal()
    )


class Tied(nn.Module):
    """A weight that two kinds of module share."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def test_parameter_shared_by_two_kinds_is_refused_and_exact_as_diagonal():
    net, x, y = Tied(), torch.randint(5, (4, 2)), torch.randint(5, (4,))
    with pytest.raises(
        NotImplementedError, match=r"embedding\.weight \(Embedding\) and head\.weight \(Linear\)"
    ):
        AugmentedGGN(net, "classification").kron(x, y, N=4)
    _, kron = AugmentedGGN(net, "classification", on_unsupported="diag").kron(x, y, N=4)
    torch.testing.assert_close(
        kron.kfacs[0][0], ggn(net, net(x), "classification").diagonal().detach()
    )


class Functional(nn.Module):
    """Uses a layer's weight outside of the layer, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(F.linear(self.linear(x).tanh(), self.linear.weight))


def test_weight_used_outside_its_layer_is_counted_there_as_well():
    net, x = Functional(), torch.randn(4, 4)
    jacobians, _ = AugmentedGGN(net, "classification").jacobians(x)
    torch.testing.assert_close(jacobians, parameter_jacobian(net, net(x)))


class TimeFirst(nn.Module):
    """Puts another axis before the batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(3, 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.head(self.linear(x.transpose(0, 1)).tanh().mean(0))


@pytest.mark.parametrize("length", [4, 5])
def test_batch_must_come_first(length):
    x, y = torch.randn(4, length, 3), torch.randint(CLASSES, (4,))
    with pytest.raises(NotImplementedError, match=r"linear\.weight.*first axis"):
        AugmentedGGN(TimeFirst(), "classification").kron(x, y, N=4)


class Five(nn.Module):
    def __init__(self):
        super().__init__()
        self.five = nn.Parameter(torch.randn(2, 1, 1, 1, 3))
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x):
        return self.head(x @ self.five.view(2, 3).mT)


def test_parameter_of_five_axes_is_refused_by_name():
    x, y = torch.randn(4, 3), torch.randint(CLASSES, (4,))
    with pytest.raises(NotImplementedError, match=r"five \[2, 1, 1, 1, 3\]: Five has no rule"):
        AugmentedGGN(Five(), "classification").kron(x, y, N=4)
    with pytest.raises(
        ValueError, match="Invalid parameter shape"
    ):  # laplace-torch itself, before it asks the backend
        Laplace(
            Five(),
            "classification",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=AugmentedGGN,
        )


def test_batch_norm_in_training_mode_is_refused():
    net, x = resnet()
    with pytest.raises(NotImplementedError, match=r"call model\.eval\(\)"):
        AugmentedGGN(net, "classification").kron(x, torch.randint(CLASSES, (7,)), N=7)


def test_frozen_parameters_are_left_out():
    net, x = layer_norm_mlp()
    net[1].requires_grad_(False)
    model = invariant(net)
    la = laplace_of(model, x)
    assert la.n_params == sum(p.numel() for p in net.parameters() if p.requires_grad)
    la.log_marginal_likelihood().backward()
    assert model.augmentation.eta.grad.abs().max() > 0


def test_layer_that_is_not_called_has_zero_curvature():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, CLASSES), nn.Linear(2, 4)

        def forward(self, x):
            return self.used(x)

    net, x, y = Unused(), torch.randn(5, 3), torch.randint(CLASSES, (5,))
    _, kron = AugmentedGGN(net, "classification").kron(x, y, N=5)
    assert [f.shape[0] for fs in kron.kfacs for f in fs] == [3, 3, 3, 4, 2, 4]
    assert all(f.abs().max() == 0 for fs in kron.kfacs[2:] for f in fs)
    _, diagonal = AugmentedGGN(net, "classification").diag(x, y)
    assert diagonal[12:].abs().max() == 0


def test_the_sizes_that_chunks_are_made_by():
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    found = match(net, list(net.parameters()), net, torch.randn(4, 2))
    assert (found.n_inputs, found.n_outputs, found.size) == (4, CLASSES, 5 + CLASSES + 1)


def test_model_is_left_as_it_was():
    net, x = resnet()
    model = invariant(net).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, kron = AugmentedGGN(model, "classification").kron(x, torch.randint(CLASSES, (7,)), N=7)
    kron.kfacs[0][0].sum().backward()
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_outputs_must_be_a_matrix():
    net = nn.Sequential(nn.Linear(3, CLASSES))
    with pytest.raises(ValueError, match=r"\[batch, outputs\]"):
        AugmentedGGN(net, "regression").kron(torch.randn(4, 2, 3), torch.randn(4, 2, CLASSES), N=4)


class PointByPoint(nn.Module):
    """Moves points into the batch axis before it averages over samples."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):  # [n, points, 2]
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)


def test_samples_are_folded_in_the_order_in_which_they_were_made():
    x, y, layer = (
        torch.randn(4, 5, 2),
        torch.randint(CLASSES, (4,)),
        nn.Linear(2, CLASSES, bias=False),
    )
    wrapped = PointByPoint(
        li.InvariantModel(layer, li.AffinePoints(), 3)
    )  # eta = 0: the same network
    _, ours = AugmentedGGN(wrapped, "classification").kron(x, y, N=4)
    _, expected = AugmentedGGN(PointByPoint(layer), "classification").kron(x, y, N=4)
    torch.testing.assert_close(ours.to_matrix(), expected.to_matrix())


def gradient_error(model, x, step=1e-6, **options):
    """Largest relative error of the gradient of a hyperparameter, from central differences."""
    loader = DataLoader(TensorDataset(x, torch.arange(len(x)) % CLASSES), batch_size=4)

    def evidence():
        torch.manual_seed(1)
        la = Laplace(
            model,
            "classification",
            subset_of_weights="all",
            hessian_structure="kron",
            backend=AugmentedGGN,
            backend_kwargs=options,
        )
        la.fit(loader)
        return la.log_marginal_likelihood()

    evidence().backward()
    return max(
        relative_error(tensor.grad, central_differences(lambda: evidence().detach(), tensor, step))
        for tensor in li.hyperparameters(model)
    )


def small_net(width=2):
    return nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def test_augmentation_as_a_module_of_a_network():
    model = nn.Sequential(li.AffinePoints(init=0.3), *small_net())
    assert gradient_error(model, torch.randn(7, 2)) < 1e-6


def test_layers_around_an_invariant_model():
    inner = li.InvariantModel(
        nn.Sequential(nn.Linear(2, 4), nn.Tanh()), li.AffinePoints(init=0.3), 3
    )
    model = nn.Sequential(nn.Linear(2, 2), inner, nn.Linear(4, CLASSES))
    assert gradient_error(model, torch.randn(7, 2)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=["whole", "chunk_size=2"])
def test_nested_invariant_models(options):
    inner = li.InvariantModel(small_net(), li.AffinePoints(init=0.3), 2)
    model = li.InvariantModel(inner, li.AffinePoints(init=0.2), 3)
    assert gradient_error(model, torch.randn(7, 2), **options) < 1e-6


@pytest.mark.parametrize("hooked", ["tanh", "relu", "pool"])
def test_hooks_of_the_user_are_respected(hooked):
    """They change what a module computes, so that it is no longer what a shortcut takes it for."""
    layers = {
        "conv": nn.Conv2d(1, 2, 3),
        "tanh": nn.Tanh(),
        "pool": nn.MaxPool2d(2),
        "relu": nn.ReLU(),
    }
    net = nn.Sequential(*layers.values(), nn.Flatten(), nn.Linear(8, CLASSES))
    layers[hooked].register_forward_hook(lambda module, args, y: y * y.sigmoid())
    model = li.InvariantModel(net, li.AffineImage(init=0.05), 3)
    assert gradient_error(model, torch.randn(7, 1, 6, 6), 1e-7) < 1e-4


class Blurred(li.Hyperparameterised):
    """A convolution whose weights depend on a hyperparameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, bias=False).requires_grad_(False)
        self.register_hyperparameter("width", torch.tensor(0.7))

    def forward(self, x):
        weight = self.conv.weight * self.hyperparameter("width")
        return torch.func.functional_call(self.conv, {"weight": weight}, (x,))


def test_weights_that_depend_on_a_hyperparameter():
    model = nn.Sequential(Blurred(), nn.Tanh(), nn.Flatten(), nn.Linear(32, CLASSES))
    assert gradient_error(model, torch.randn(7, 1, 6, 6)) < 1e-6


def test_activation_module_used_several_times_and_keyword_calls():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.pool = nn.GELU(), nn.MaxPool1d(2)
            self.first, self.second, self.head = (
                nn.Linear(2, 4),
                nn.Linear(4, 4),
                nn.Linear(2, CLASSES),
            )

        def forward(self, x):
            x = self.act(self.second(input=self.act(self.first(x))))
            return self.head(self.pool(x.unsqueeze(1)).squeeze(1))

    assert (
        gradient_error(li.InvariantModel(Reused(), li.AffinePoints(init=0.3), 3), torch.randn(7, 2))
        < 1e-6
    )


def test_shared_bias_collects_the_calls_of_both_layers():
    first, second = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES)
    second.weight.requires_grad_(False)
    second.bias = first.bias
    net, x, y = (
        nn.Sequential(first, nn.Tanh(), second),
        torch.randn(5, CLASSES),
        torch.randint(CLASSES, (5,)),
    )
    _, kron = AugmentedGGN(net, "classification").kron(x, y, N=5)
    torch.testing.assert_close(
        kron.kfacs[1][0], ggn(net, net(x), "classification")[9:, 9:].detach()
    )


def test_batch_axis_is_verified_as_soon_as_there_are_two_inputs():
    backend, x, y = (
        AugmentedGGN(TimeFirst(), "classification"),
        torch.randn(4, 8, 3),
        torch.randint(CLASSES, (4,)),
    )
    backend.kron(x[:1], y[:1], N=4)
    with pytest.raises(NotImplementedError, match="first axis"):
        backend.kron(x, y, N=4)


def test_weights_must_be_those_of_the_fit():
    model = li.InvariantModel(
        small_net(), li.AffinePoints(init=0.3), 3, generator=torch.Generator()
    )
    la = laplace_of(model, torch.randn(7, 2))
    evidence = la.log_marginal_likelihood()
    with torch.no_grad():
        la(
            torch.randn(3, 2), pred_type="nn", link_approx="mc", n_samples=2
        )  # changes the weights and puts them back
    evidence.backward(retain_graph=True)
    model.net[0].weight.data.mul_(1.01)
    with pytest.raises(RuntimeError, match="fit again"):
        evidence.backward()


def test_dictionaries_as_input():
    class FromDict(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net(3)

        def forward(self, data):
            return self.net(data["input_ids"])

    x, y = torch.randn(5, 3), torch.randint(CLASSES, (5,))
    model = FromDict()
    _, ours = AugmentedGGN(model, "classification", chunk_size=2).kron(
        {"input_ids": x, "labels": y}, y, N=5
    )
    _, expected = AugmentedGGN(model.net, "classification").kron(x, y, N=5)
    torch.testing.assert_close(ours.to_matrix(), expected.to_matrix())
    x[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        AugmentedGGN(model, "classification").kron({"input_ids": x}, y, N=5)


def test_targets_of_another_shape_are_refused():
    with pytest.raises(
        ValueError, match=r"targets \[4\] must have the shape of the outputs \[4, 1\]"
    ):
        AugmentedEF(nn.Linear(3, 1), "regression").kron(torch.randn(4, 3), torch.randn(4), N=4)


class Tokens(nn.Module):
    """Calls its embedding twice, and another one only for inputs that begin with a zero."""

    def __init__(self, padding_idx):
        super().__init__()
        self.embedding = nn.Embedding(6, 3, padding_idx=padding_idx)
        self.rare = nn.Embedding(7, 3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        features = self.embedding(x) + self.embedding(x.flip(1) // 2)
        if (x[:, 0] == 0).all():
            features = features + self.rare(x)
        return self.head(features.flatten(1).tanh())


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_counts_of_tokens_equal_one_hot_inputs(padding_idx, monkeypatch):
    """In a whole batch, and in chunks of which one does not call a layer."""
    net, y = Tokens(padding_idx), torch.randint(CLASSES, (5,))
    x = torch.randint(6, (5, 4))
    x[:2, 0], x[2:, 0] = 0, 1

    def kron(**options):
        return AugmentedGGN(net, "classification", chunk_size=2, **options).kron(x, y, N=5)[1]

    actual = kron()
    assert [f.shape for fs in actual.kfacs[:2] for f in fs] == [(6,), (3, 3), (7,), (3, 3)]
    assert kron(kfac_approx="reduce").kfacs[0][0].shape == (6, 6)
    plain = Trace.averaged_inputs
    monkeypatch.setattr(Trace, "averaged_inputs", lambda self, counts=False: plain(self))
    monkeypatch.setattr(backend, "no_factors", lambda *args: rules.no_factors(*args[:-1], False))
    dense = kron()
    assert dense.kfacs[0][0].shape == (6, 6)
    assert actual.kfacs[1][0].abs().max() > 0
    torch.testing.assert_close(actual.to_matrix(), dense.to_matrix())


def test_several_samples_of_tokens_have_a_dense_factor():
    """Samples are averaged before they are multiplied, so that tokens meet each other."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = Tokens(None)

        def forward(self, x):
            return self.tokens((2 * x.abs()).long().clamp(max=5))

    model = li.InvariantModel(Shift(), li.AffinePoints(init=0.5), 3)
    x, y = torch.randn(5, 4, 2).flatten(1)[:, :2], torch.randint(CLASSES, (5,))
    model.net.tokens.head = nn.Linear(6, CLASSES)
    _, kron = AugmentedGGN(model, "classification").kron(x, y, N=5)
    assert kron.kfacs[0][0].shape == (6, 6)


@pytest.mark.parametrize("groups", [2, 6])
def test_grouped_convolutions_keep_blocks_that_can_be_saved_and_predict(groups):
    """Blocks, or a diagonal for depthwise ones; all equal to those of dense factors."""
    net = nn.Sequential(nn.Conv2d(6, 6, 2, groups=groups), nn.Tanh(), nn.Flatten())
    net.append(nn.Linear(24, CLASSES))
    x, y = torch.randn(5, 6, 3, 3), torch.randint(CLASSES, (5,))
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    settings = {"subset_of_weights": "all", "hessian_structure": "kron", "backend": AugmentedGGN}
    la = Laplace(net, "classification", **settings)
    la.fit(loader)
    assert la.H_facs.kfacs[0][0].shape == ((6,) if groups == 6 else (2, 3, 3))
    matrix = torch.block_diag(*map(product, la.H_facs.kfacs))
    torch.testing.assert_close(la.H_facs.to_matrix(), matrix)
    precision = matrix + la.prior_precision * torch.eye(len(matrix))
    torch.testing.assert_close(la.posterior_precision.logdet(), precision.logdet())
    jacobian = parameter_jacobian(net, net(x)).detach()
    variance = jacobian @ torch.linalg.inv(precision) @ jacobian.mT
    torch.testing.assert_close(la.functional_variance(jacobian), variance)
    loaded = Laplace(net, "classification", **settings)
    load_state_dict(loaded, la.state_dict())
    torch.testing.assert_close(loaded.functional_variance(jacobian), variance)
    torch.testing.assert_close(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())


class Pooled(nn.Module):
    """Max pooling after activations, of which one is used elsewhere as well."""

    def __init__(self, activation, pooling):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 2)
        self.activation, self.other = activation, nn.Tanh()
        self.pooling, self.head = pooling, nn.Linear(3 + 2, CLASSES)

    def forward(self, x):
        features = self.activation(self.first(x))
        pooled = self.other(self.second(self.pooling(features)))
        return self.head(torch.cat([pooled.mean((2, 3)), features.mean((2, 3))], dim=1))


@pytest.mark.parametrize(
    "pooling",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d((2, 3), (2, 1), ceil_mode=True)],
    ids=str,
)
@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.LeakyReLU(0.1), nn.GELU()])
def test_pooled_activations_have_the_gradient_of_autograd(activation, pooling, monkeypatch):
    net = Pooled(activation, pooling)
    model = li.InvariantModel(net, li.AffineImage(init=0.1), 2, generator=torch.Generator())
    x, y = torch.randn(4, 1, 7, 6), torch.randint(CLASSES, (4,))

    def gradient():
        model.generator.manual_seed(1)
        loss, kron = AugmentedGGN(model, "classification").kron(x, y, N=4)
        tensors = [loss, *(f for fs in kron.kfacs for f in fs)]
        squares = [tensor.square().sum() for tensor in tensors]
        return torch.autograd.grad(squares, model.augmentation.eta)[0]

    actual = gradient()
    monkeypatch.setattr(chunks, "shortcuts", lambda modules: nullcontext())
    torch.testing.assert_close(actual, gradient())


@pytest.mark.parametrize(
    ("hooks", "expected"),
    [(lambda _: None, "_ElementwiseBackward"), (None, "TanhBackward0")],
    ids=["known", "unknown, as before torch 2.8"],
)
def test_a_shortcut_is_taken_only_if_it_is_known_not_to_be_in_a_checkpoint(
    hooks, expected, monkeypatch
):
    monkeypatch.setattr(shortcuts, "_saved_tensors_hooks", hooks)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    with shortcuts.shortcuts(net.modules()):
        assert type(net(torch.randn(2, 3)).grad_fn).__name__ == expected
