"""BackPACK's and ASDL's own curvature of networks with our layers, against our native engine."""

from copy import deepcopy

import pytest
import torch
from asdl import core
from backpack import backpack, extend
from backpack.extensions import KFAC, KFLR, DiagGGNExact
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.module_extension import ModuleExtension
from laplace import Laplace
from laplace.curvature import AsdlEF, AsdlGGN, BackPackEF, BackPackGGN
from laplace.utils import Kron
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import laplace_invariance as li
from laplace_invariance.curvature import (
    AugmentedEF,
    AugmentedGGN,
    DifferentiableKron,
    register_asdl,
    register_backpack,
)
from laplace_invariance.layers import (
    FactoredLinear2d,
    GroupConv2d,
    GroupPool,
    LiftingConv2d,
    PolyphasePool2d,
    ResidualPathway,
    ScalarScale,
    SparseConv2d,
    SparseLinear2d,
)

N = 11  # size of the data set, of which there is a batch of five


def head(features):
    return nn.Flatten(), nn.Linear(features, 3)


NETWORKS = {
    "f_fc": lambda: [FactoredLinear2d(2, 3, 4, 2), nn.Tanh(), *head(12)],
    "s_fc": lambda: [SparseLinear2d(2, 3, 4, 2), nn.Tanh(), *head(12)],
    "s_fc without bias": lambda: [SparseLinear2d(2, 3, 4, 2, bias=False), nn.Tanh(), *head(12)],
    "s_conv": lambda: [SparseConv2d(2, 3, 3), nn.ReLU(), *head(12)],
    "grouped s_conv": lambda: [SparseConv2d(2, 4, 3, groups=2), nn.ReLU(), *head(16)],
    "group": lambda: [
        LiftingConv2d(2, 2, 3, padding=1),
        nn.Tanh(),
        GroupConv2d(2, 3, 3, padding=1),
        GroupPool(),
        *head(48),
    ],
    "paths": lambda: [
        ResidualPathway(conv=nn.Conv2d(2, 3, 3, padding=1), f_fc=FactoredLinear2d(2, 3, 4)),
        nn.ReLU(),
        PolyphasePool2d(2),
        ResidualPathway(conv=nn.Conv2d(3, 2, 1), s_fc=SparseLinear2d(3, 2, 2)),
        *head(8),
    ],
}
LIKELIHOODS = ["classification", "regression"]


def network(kind):
    torch.manual_seed(0)
    net = nn.Sequential(*NETWORKS[kind]()).double()
    net.output_size = 3  # of which laplace asks BackPACK for gradients
    return net


def batch(likelihood):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    if likelihood == "classification":
        return x, torch.randint(3, (5,), generator=generator)
    return x, torch.randn(5, 3, generator=generator, dtype=torch.float64)


def blocks(kron):
    """Return the dense block of each parameter."""
    if isinstance(kron, DifferentiableKron):
        return [DifferentiableKron([factors]).to_matrix() for factors in kron.kfacs]
    return [Kron([factors]).to_matrix() for factors in kron.kfacs]


# BackPACK.


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("kind", NETWORKS)
def test_backpack_of_laplace_agrees_with_ours(kind, likelihood):
    """All of it: KFLR has our factors, and DiagGGN, SumGradSquared and BatchGrad are exact."""
    net, (x, y) = network(kind), batch(likelihood)
    with register_backpack(net):
        ggn, ef = BackPackGGN(net, likelihood), BackPackEF(net, likelihood)
        loss, kron = ggn.kron(x, y, N=N)
        found = [ggn.diag(x, y)[1], ef.diag(x, y)[1], ggn.jacobians(x)[0]]
    ours = AugmentedGGN(net, likelihood)
    expected_loss, expected_kron = ours.kron(x, y, N=N)
    native_ef = AugmentedEF(net, likelihood)
    expected = [ours.diag(x, y)[1], native_ef.diag(x, y)[1], ours.jacobians(x)[0]]
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(blocks(kron), blocks(expected_kron))
    torch.testing.assert_close(found, expected)


def test_backpack_itself_works_after_registration():
    net, (x, y) = network("f_fc"), batch("classification")
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))
    with register_backpack(net):
        extend(net)
        with backpack(KFLR(), DiagGGNExact(), KFAC(mc_samples=1000)):
            loss(net(x), y).backward()
    _, diagonal = AugmentedGGN(net, "classification").diag(x, y)
    torch.testing.assert_close(
        torch.cat([p.diag_ggn_exact.flatten() for p in net.parameters()]), diagonal
    )
    for parameter in net.parameters():  # sampled, hence about the same
        exact, sampled = (Kron([own]).to_matrix() for own in (parameter.kflr, parameter.kfac))
        assert (sampled - exact).norm() < 0.2 * exact.norm()


def test_stock_laplace_fits_and_predicts_with_backpack():
    net, (x, y) = network("paths"), batch("classification")
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    evidences, predictions = [], []
    for backend in (BackPackGGN, AugmentedGGN):
        with register_backpack(net):
            la = Laplace(net, "classification", "all", "kron", backend=backend)
            la.fit(loader)
            evidences.append(la.log_marginal_likelihood())
            predictions.append(la(x))
    torch.testing.assert_close(*evidences)
    torch.testing.assert_close(*predictions)


def test_backpack_is_left_alone_without_registration():
    before = BackpropExtension.__init__, BackpropExtension.__call__
    net, (x, y) = network("f_fc"), batch("classification")
    handle = register_backpack(net)
    with register_backpack(network("s_conv")):
        handle.remove()
        handle.remove()
        assert BackpropExtension.__init__ is not before[0]
    assert (BackpropExtension.__init__, BackpropExtension.__call__) == before
    with pytest.raises(NotImplementedError, match="does not have an extension"):
        BackPackGGN(net, "classification").kron(x, y, N=N)


def test_backpack_keeps_its_own_and_refuses_to_overwrite_ours():
    net = network("f_fc")
    known = []

    class Noted(ModuleExtension):
        def __call__(self, extension, module, g_inp, g_out):
            known.append(module)

    with register_backpack(net):
        extension = DiagGGNExact()
        for cls in (nn.Linear, FactoredLinear2d):
            with pytest.raises(ValueError, match="overwrite"):
                extension.set_module_extension(cls, Noted())
        extension.set_module_extension(FactoredLinear2d, Noted(), overwrite=True)
        extension(net[0], (), ())
    assert known == [net[0]]


def test_models_that_backpack_cannot_follow_are_refused():
    x, y = batch("classification")
    net = network("f_fc")
    model = li.InvariantModel(net, li.AffineImage(init={"rotation": 0.1}))
    with pytest.raises(NotImplementedError, match="BackPackAugmentedGGN"):
        register_backpack(model)
    with register_backpack(net), pytest.raises(NotImplementedError, match="in no model"):
        BackPackGGN(deepcopy(net), "classification").kron(x, y, N=N)
    noisy = nn.Sequential(nn.Sequential(nn.Dropout(0.5)), nn.Flatten(), nn.Linear(32, 3)).double()
    noisy[0] = ResidualPathway(nn.Dropout(0.5))
    x.requires_grad_()
    with register_backpack(noisy), pytest.raises(RuntimeError, match="something else"):
        BackPackGGN(noisy, "classification").kron(x, y, N=N)


# ASDL.


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("theirs", "ours"), [(AsdlGGN, AugmentedGGN), (AsdlEF, AugmentedEF)])
@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind != "paths"])
def test_asdl_of_laplace_agrees_with_ours(kind, theirs, ours, likelihood):
    """Diagonals, gradients and the factors of weights; blocks of biases are laplace's."""
    net, (x, y) = network(kind), batch(likelihood)
    backend, native = theirs(net, likelihood), ours(net, likelihood)
    with register_asdl():
        diagonal, jacobians = backend.diag(x, y)[1], backend.jacobians(x)[0]
        if kind == "s_fc":  # whose bias is in a layer without weight
            with pytest.raises(NotImplementedError, match="FromBasis has parameters bias"):
                backend.kron(x, y, N=N)
        else:
            _, kron = backend.kron(x, y, N=N)
            expected = blocks(native.kron(x, y, N=N)[1])
            found = blocks(kron)
            assert len(found) == len(expected)
            for parameter, block, other in zip(net.parameters(), found, expected, strict=True):
                if parameter.ndim > 1:
                    torch.testing.assert_close(block, other)
            torch.testing.assert_close(found[-1], expected[-1])  # a bias with one position
    torch.testing.assert_close(diagonal, native.diag(x, y)[1])
    torch.testing.assert_close(jacobians, native.jacobians(x)[0])


def test_asdl_refuses_what_it_would_leave_out():
    x, y = batch("classification")
    net = nn.Sequential(ScalarScale(), *head(32)).double()
    with register_asdl(), pytest.raises(NotImplementedError, match=r"leave out 0\.scale"):
        AsdlGGN(net, "classification").kron(x, y, N=N)


def test_asdl_is_put_back():
    before = core.named_supported_modules, core.get_op_class
    outer = register_asdl()
    with register_asdl():
        outer.remove()
        assert core.get_op_class is not before[1]
    assert (core.named_supported_modules, core.get_op_class) == before
