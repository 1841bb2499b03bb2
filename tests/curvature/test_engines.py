"""All engines compute the same for every layer with a rule, and leave all as they found it."""

import copy
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import asdl.core
import asdl.operations
import backpack
import processes
import pytest
import torch
from builders import Gain, Stretch
from cases import COMPOSED, WITH_RULES, name_of
from torch import nn

import laplace_invariance as li
from laplace_invariance import curvature
from laplace_invariance.curvature import ElementwiseBlock, register_rule
from laplace_invariance.curvature import rules as rules_module
from laplace_invariance.curvature.engines.backpack import DERIVATIVES
from laplace_invariance.layers import FactoredLinear2d, GroupConv2d, LiftingConv2d, ScalarScale

ENGINES = ("Asdl", "BackPack")
KINDS = ("GGN", "EF")
STRUCTURES = ("kron", "diag", "full")


def backend(engine, kind):
    return getattr(curvature, f"{engine}Augmented{kind}")


def averaged(net, n_samples):
    return li.InvariantModel(net, Stretch(), n_samples=n_samples)


def curvature_of(cls, model, x, y, structure, likelihood="classification", **options):
    """Loss, curvature and the gradient to hyperparameters of a weighted sum of both."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, li.InvariantModel):
            module.generator = torch.Generator().manual_seed(1)
    loss, result = getattr(cls(model, likelihood, **options), structure)(x, y, N=7)
    flat = (
        [factor for factors in result.kfacs for factor in factors]
        if structure == "kron"
        else [result]
    )
    hyper = [tensor for tensor in li.hyperparameters(model) if tensor.requires_grad]
    if hyper:
        weighted = [(f * torch.sin(torch.arange(f.numel()).view_as(f))).sum() for f in flat]
        (1.3 * loss + sum(weighted)).backward()
    return [loss.detach(), *(f.detach() for f in flat)], [
        torch.zeros(()) if t.grad is None else t.grad for t in hyper
    ]


def assert_agree(actual, expected, tolerance=1e-10):
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        # the curvature of a scale before a normalisation is zero but for round-off
        assert (a - e).abs().max() <= tolerance * (e.abs().max() + 1e-8)


def around(build, shape):
    """A small network around a layer, averaged over three samples, and a batch for it."""
    layer = build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randint(11, shape) if isinstance(layer, nn.Embedding) else torch.randn(shape)
    # before the layer, so that columns have to pass through it
    before = [ScalarScale()] if x.is_floating_point() else []
    after = [nn.Tanh(), nn.Flatten(), nn.AdaptiveAvgPool1d(4), nn.Linear(4, 3)]
    net = nn.Sequential(*before, layer, *after)
    return li.InvariantModel(net, Stretch(), n_samples=3), x, torch.tensor([0, 2])


# Engines differ in the calls and gradients that they hand over, not in what is made of these:
# "kron" reads the averaged ones, "full" the exact ones as "diag" does, and the one column of the
# empirical Fisher passes through the same code as the first of several.
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("build", "shape"), WITH_RULES + COMPOSED, ids=name_of)
def test_engines_agree(build, shape, engine, caplog):
    caplog.set_level("INFO", logger="laplace_invariance")
    model, x, y = around(build, shape)
    for structure in ("kron", "full"):
        values, gradients = curvature_of(backend(engine, "GGN"), model, x, y, structure)
        expected = curvature_of(backend("", "GGN"), model, x, y, structure)
        assert_agree(values, expected[0])
        assert_agree(gradients, expected[1])
        if x.is_floating_point():
            assert any(gradient.abs().max() > 0 for gradient in gradients)
    assert not caplog.text  # BackPACK did not lose track of the batch, and leave it to autograd


# Networks that are not a plain chain of layers.


class Residual(nn.Module):
    """A layer called twice, a functional activation, a sum."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = h + self.b(h)
        return self.c(h + torch.relu(self.b(h)))


class Free(nn.Module):
    """A parameter without a rule."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.linear(x) * self.scale.exp()


def repeated():
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(5, 4), tanh, nn.Linear(4, 4), tanh, nn.Linear(4, 3))


def tied():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].weight = net[0].weight
    return net


def frozen():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net[0].weight.requires_grad_(False)
    return net


def every_derivative():
    """Every module whose derivatives BackPACK knows."""
    kinds = (nn.ReLU(inplace=True), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.Sigmoid(), nn.Tanh())
    hidden = [m for kind in kinds for m in (kind, nn.Linear(4, 4))]
    flat = [nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Unflatten(2, (1, 3))]
    square = [
        nn.Conv2d(2, 3, (1, 2)),
        nn.BatchNorm2d(3),
        nn.MaxPool2d((1, 2), stride=1),
        nn.Unflatten(3, (1, 1)),
    ]
    cube = [nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), nn.Flatten()]
    return nn.Sequential(*flat, *square, *cube, *hidden, nn.Linear(4, 3)).eval()


NETWORKS = {
    "residual": Residual,
    "residual in a chain": lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Residual()),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 3))
    ),
    "one layer": lambda: nn.Linear(5, 3),
    "invariant inside": lambda: nn.Sequential(
        nn.Linear(5, 4), averaged(nn.Linear(4, 3), 2), nn.Tanh(), nn.Linear(3, 3)
    ),
    "repeated": repeated,
    "tied": tied,
    "frozen": frozen,
    "every derivative": every_derivative,
}


def assert_engine_agrees(engine, model, x, y, likelihood="classification"):
    for kind, structure in (("GGN", "kron"), ("GGN", "full"), ("EF", "diag")):
        actual = curvature_of(backend(engine, kind), model, x, y, structure, likelihood)
        expected = curvature_of(backend("", kind), model, x, y, structure, likelihood)
        assert_agree(actual[0], expected[0])
        assert_agree(actual[1], expected[1])


@pytest.mark.parametrize(
    ("samples", "likelihood"),
    [(None, "regression"), (3, "classification")],
    ids=["plain", "averaged"],
)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_on_other_networks(engine, name, samples, likelihood):
    net = NETWORKS[name]()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.7)
    model = net if samples is None else averaged(net, samples)
    y = torch.randint(3, (4,)) if likelihood == "classification" else torch.randn(4, 3)
    assert_engine_agrees(engine, model, torch.randn(4, 5), y, likelihood)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_on_learnt_weights_of_samples(engine):
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    model = li.InvariantModel(net, li.FiniteGroup("quarter_turns", init=0.4))
    assert_engine_agrees(engine, model, torch.randn(4, 1, 3, 3), torch.randint(3, (4,)))


def test_every_derivative_of_backpack_is_tested():
    assert set(DERIVATIVES) - {type(module) for module in every_derivative()} == {
        type(li.InvariantModel(Residual(), Stretch()).mean)
    }


OPTIONS = [
    {"output_rank": 1},
    {"kfac_approx": "reduce"},
    {"chunk_size": 2},
    {"stochastic": True, "num_samples": 3},
    {"per_slot": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_have_the_same_options(engine, options):
    net = nn.Sequential(
        FactoredLinear2d(1, 2, 4, 4), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(8, 3)
    )
    model = li.InvariantModel(net, Stretch(), n_samples=3)
    x, y = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    results = []
    for cls in (backend(engine, "GGN"), backend("", "GGN")):
        torch.manual_seed(0)
        results.append(curvature_of(cls, model, x, y, "kron", **options))
    assert_agree(results[0][0], results[1][0])
    assert_agree(results[0][1], results[1][1])


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_without_a_rule_have_their_exact_diagonal(engine):
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    for net in (Free(), nn.Sequential(nn.Linear(5, 5), Free())):
        model = li.InvariantModel(net, Stretch(), n_samples=3)
        with pytest.raises(NotImplementedError, match="Free has no rule"):
            backend(engine, "GGN")(model, "classification").kron(x, y, N=4)
        for structure, options in [
            ("kron", {"on_unsupported": "diag"}),
            ("diag", {}),
            ("full", {}),
        ]:
            actual = curvature_of(backend(engine, "GGN"), model, x, y, structure, **options)
            expected = curvature_of(backend("", "GGN"), model, x, y, structure, **options)
            assert_agree(actual[0], expected[0])
            assert_agree(actual[1], expected[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_of_ones_own_works_in_every_engine(engine, monkeypatch):
    monkeypatch.setattr(rules_module, "_rules", rules_module.rules())

    @register_rule(Gain)
    def gain(module):
        return [ElementwiseBlock("gain", lambda x: x.unsqueeze(1), lambda g: g.unsqueeze(1))]

    net = nn.Sequential(nn.Linear(5, 4), Gain(4), nn.Tanh(), nn.Linear(4, 3))
    assert_engine_agrees(engine, averaged(net, 3), torch.randn(4, 5), torch.randint(3, (4,)))


class Idle(nn.Module):
    """Does not use the smaller of its parameters."""

    def __init__(self):
        super().__init__()
        self.gain, self.idle = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(1))

    def forward(self, x):
        return x * self.gain


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_without_effect_hides_no_other(engine, monkeypatch):
    monkeypatch.setattr(rules_module, "_rules", rules_module.rules())

    @register_rule(Idle)
    def idle(module):
        yield ElementwiseBlock("gain", lambda x: x.unsqueeze(1), lambda g: g.unsqueeze(1))
        yield ElementwiseBlock("idle", None, lambda g: g.new_zeros(len(g), 1, 1))

    net = nn.Sequential(Idle(), nn.Linear(5, 3))
    assert_engine_agrees(engine, averaged(net, 3), torch.randn(4, 5), torch.randint(3, (4,)))


# What is left behind: nothing.


class Fails(nn.Module):
    """Fails in the forward or in the backward pass, once armed."""

    def __init__(self):
        super().__init__()
        self.where = None

    def forward(self, x):
        if self.where == "forward":
            raise ArithmeticError("on purpose")
        if self.where == "backward":
            x = x * 1
            x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise ArithmeticError("on purpose")


def state_of(model):
    """Everything that engines touch."""
    modules = [*model.modules(), model.mean]
    hooks = [
        (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in modules
    ]
    attributes = [(sorted(m.__dict__), m._is_full_backward_hook) for m in modules]
    parameters = [sorted(p.__dict__) for p in model.parameters()]
    asdl_names = {
        name: value for name, value in vars(asdl.core).items() if not name.startswith("__")
    }
    context = backpack.context.CTX
    return (
        hooks,
        attributes,
        parameters,
        asdl_names,
        context.get_active_exts(),
        list(context.hook_handles),
    )


@pytest.mark.parametrize("where", [None, "forward", "backward"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_leave_everything_as_it_was(engine, where):
    fails = Fails()
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), fails, nn.Linear(4, 3))
    model, x, y = averaged(net, 2), torch.randn(4, 5), torch.randint(3, (4,))
    before = state_of(model)
    engine_backend = backend(engine, "GGN")(model, "classification")
    engine_backend.kron(x, y, N=4)
    assert state_of(model) == before
    assert net[1].inplace
    assert all(p.grad is None for p in model.parameters())
    fails.where = where
    if where is not None:
        before = state_of(model)
        for structure in STRUCTURES:
            with pytest.raises(ArithmeticError, match="on purpose"):
                getattr(engine_backend, structure)(x, y, N=4)
            assert state_of(model) == before
    copy.deepcopy(model)


@pytest.mark.parametrize("order", list(itertools.permutations(["Asdl", "BackPack", ""])), ids=str)
def test_engines_take_turns_on_one_model(order):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    results = [backend(engine, "GGN")(net, "classification").full(x, y)[1] for engine in order]
    assert_agree(results[1:], results[:1] * 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_run_in_threads(engine):
    nets = [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(2)]
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    expected = [backend("", "GGN")(net, "classification").full(x, y)[1] for net in nets]

    def often(net):
        return [backend(engine, "GGN")(net, "classification").full(x, y)[1] for _ in range(30)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(often, nets))
    finally:
        sys.setswitchinterval(interval)
    for found, one in zip(results, expected, strict=True):
        assert_agree(found, [one] * 30)


def test_asdl_is_as_it_was_when_it_cannot_be_entered(monkeypatch):
    model = li.InvariantModel(nn.Linear(5, 3), Stretch(), n_samples=2)
    before = state_of(model)

    def broken(*args, **kwargs):
        raise ArithmeticError("on purpose")

    monkeypatch.setattr(asdl.operations.Operation, "__init__", broken)
    with pytest.raises(ArithmeticError, match="on purpose"):
        backend("Asdl", "GGN")(model, "classification").kron(
            torch.randn(4, 5), torch.randint(3, (4,)), N=4
        )
    assert state_of(model) == before


def test_asdl_says_which_calls_it_cannot_tell_apart():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            self.linear(x)
            return self.linear(2 * x)

    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    with pytest.raises(NotImplementedError, match="cannot tell which 1 of 2 calls of Linear"):
        backend("Asdl", "GGN")(Unused(), "classification").kron(x, y, N=4)
    backend("BackPack", "GGN")(Unused(), "classification").kron(x, y, N=4)


def test_backpack_works_on_a_model_that_someone_extended():
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    expected, _ = curvature_of(backend("", "GGN"), net, x, y, "kron")
    backpack.extend(net)
    try:
        net(x)
        engine = backend("BackPack", "GGN")(net, "classification")
        _, result = engine.kron(x, y, N=7)
        assert_agree([f for factors in result.kfacs for f in factors], expected[1:])
    finally:
        backpack.context.CTX.remove_hooks()


def test_asdl_says_what_it_cannot_see():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(input=x)

    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    with pytest.raises(NotImplementedError, match="what Linear receives by keyword"):
        backend("Asdl", "GGN")(Keyword(), "classification").kron(x, y, N=4)
    net = nn.Sequential(nn.Linear(5, 3), Silent())
    with pytest.raises(NotImplementedError, match="ASDL found no gradient"):
        backend("Asdl", "GGN")(net, "classification").kron(x, y, N=4)
    net = nn.Sequential(nn.Linear(5, 3))
    net[0].register_full_backward_hook(lambda module, g_inp, g_out: None).remove()
    backend("Asdl", "GGN")(net, "classification").kron(x, y, N=4)
    net[0].register_full_backward_hook(lambda module, g_inp, g_out: None)
    with pytest.raises(NotImplementedError, match="full backward hooks"):
        backend("Asdl", "GGN")(net, "classification").kron(x, y, N=4)


class Silent(nn.Module):
    """Has no gradient, but does not say so."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return None

    def forward(self, x):
        return self.Function.apply(x)


class Named(nn.Module):
    """Names that BackPACK uses for what modules receive and return."""

    def __init__(self):
        super().__init__()
        self.input0, self.input1, self.output = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.output(torch.tanh(self.input1(torch.tanh(self.input0(x)))))


class Apart(nn.Module):
    """Cuts the graph."""

    def forward(self, x):
        return x.detach()


class Held(nn.Module):
    """Calls a layer that is registered elsewhere."""

    def __init__(self, layer):
        super().__init__()
        self.held = [layer]

    def forward(self, x):
        return self.held[0](x)


class Doubles(nn.Module):
    """Overwrites its input."""

    def forward(self, x):
        return torch.relu(x.mul_(2))


class Pair(nn.Module):
    def forward(self, x):
        return x, x**2


class Join(nn.Module):
    def forward(self, pair):
        return pair[0] * pair[1]


class Shares(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return torch.tanh(self.layer(x))


def shared_by_blocks():
    layer = nn.Linear(5, 5)
    return nn.Sequential(Shares(layer), Shares(layer), nn.Linear(5, 3))


def held(first):
    layer = nn.Linear(5, 5)
    members = (layer, nn.Tanh(), Held(layer)) if first else (Held(layer), nn.Tanh(), layer)
    return nn.Sequential(*members, nn.Tanh(), nn.Linear(5, 3))


def replaced_forward():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    original = net[2].forward
    net[2].forward = lambda x: original(x) + x
    net[1].forward = torch.relu
    return net


def backward_hook():
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    net[1].register_full_backward_hook(lambda module, g_inp, g_out: (2 * g_inp[0],))
    return net


ODD = {
    "names": Named,
    "names in a chain": lambda: nn.Sequential(nn.Linear(5, 5), Named()),
    "cut": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Apart(), nn.Linear(4, 3)),
    "held before": lambda: held(first=False),
    "held after": lambda: held(first=True),
    "shared by blocks": shared_by_blocks,
    "in place": lambda: nn.Sequential(
        nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), Doubles(), nn.Linear(4, 3)
    ),
    "in place elu": lambda: nn.Sequential(nn.Linear(5, 4), nn.ELU(inplace=True), nn.Linear(4, 3)),
    "tuple": lambda: nn.Sequential(nn.Linear(5, 4), Pair(), Join(), nn.Linear(4, 3)),
    "replaced forward": replaced_forward,
    "backward hook": backward_hook,
    "unused": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Sequential(), nn.Linear(4, 3)),
    "factored view in place": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        FactoredLinear2d(1, 2, (1, 5)),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(10, 3),
    ),
    "group view in place": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        LiftingConv2d(1, 2, 3, padding=1),
        nn.ReLU(inplace=True),
        GroupConv2d(2, 1, 3, padding=1),
        nn.LeakyReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(20, 3),
    ),
    "returned inputs": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 5)),
        nn.Identity(),
        nn.Conv1d(1, 2, 3),
        nn.Identity(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Identity(),
        nn.Linear(6, 3),
        nn.Dropout(),
    ).eval(),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_on_odd_networks(engine, name, caplog):
    caplog.set_level("INFO", logger="laplace_invariance")
    net, x, y = ODD[name](), torch.randn(4, 5), torch.randint(3, (4,))
    for structure in STRUCTURES:
        actual = backend(engine, "GGN")(net, "classification")
        expected = backend("", "GGN")(net, "classification")
        results = [getattr(b, structure)(x, y, N=7)[1] for b in (actual, expected)]
        dense = [r.to_matrix() if structure == "kron" else r for r in results]
        assert_agree(dense[:1], dense[1:])
        assert dense[0].abs().max() > 0
    assert not caplog.text  # BackPACK did not leave it to autograd


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_hook_of_asdl_that_did_not_run_is_no_zero(structure, monkeypatch):
    hook = "laplace_invariance.curvature.engines.asdl._RuleOperation.backward_pre_process"
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    monkeypatch.setattr(hook, lambda *args, **kwargs: None)
    with pytest.raises(NotImplementedError, match=r"hook at Linear did not run.*AugmentedGGN"):
        getattr(backend("Asdl", "GGN")(net, "classification"), structure)(x, y, N=4)


def test_backpack_is_used_on_a_chain(monkeypatch):
    """And autograd is not: BackPACK passes all columns through layers that it knows."""
    first, second = [nn.Linear(5, 4), nn.Tanh()], [nn.Linear(4, 4), nn.ReLU(inplace=True)]
    net = nn.Sequential(*first, *second, nn.Linear(4, 3))
    model, x, y = averaged(net, 3), torch.randn(4, 5), torch.randint(3, (4,))
    engine = backend("BackPack", "GGN")(model, "classification")
    engine.full(x, y)
    passes, original = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda *args, **kwargs: passes.append(1) or original(*args, **kwargs),
    )
    engine.full(x, y)
    assert len(passes) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_of_others_are_part_of_the_model(engine):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    net[1].register_forward_hook(lambda module, args, output: 2 * output)
    net[2].register_forward_pre_hook(lambda module, args: (args[0] ** 2,))
    assert_agree(*(curvature_of(backend(e, "GGN"), net, x, y, "full")[0] for e in (engine, "")))


def test_autograd_takes_over_when_backpack_loses_track(caplog):
    class Copies(nn.Tanh):
        def __call__(self, x):
            return super().__call__(x + 0)

    net = nn.Sequential(nn.Linear(5, 4), Copies(), nn.Linear(4, 3))
    x, y = torch.randn(4, 5), torch.randint(3, (4,))
    with caplog.at_level("INFO", logger="laplace_invariance"):
        actual = backend("BackPack", "GGN")(net, "classification").full(x, y)[1]
    assert "BackPACK lost track" in caplog.text
    assert_agree([actual], [backend("", "GGN")(net, "classification").full(x, y)[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_one_class_is_refused(kind):
    for engine in ("", *ENGINES):
        with pytest.raises(ValueError, match="at least two classes"):
            backend(engine, kind)(nn.Linear(5, 1), "classification").diag(
                torch.randn(4, 5), torch.zeros(4).long()
            )


def ask_for_engines():
    """Print why engines cannot be had, in a process in which their packages are not installed."""
    import laplace  # noqa: F401  (which itself needs both)

    processes.forget("backpack", "asdl", "laplace_invariance")
    sys.modules["backpack"] = sys.modules["asdl"] = None
    import laplace_invariance

    laplace_invariance.curvature.AugmentedGGN  # noqa: B018
    for name in ("BackPackAugmentedGGN", "AsdlAugmentedEF"):
        try:
            getattr(laplace_invariance.curvature, name)
        except ImportError as error:
            print(error)


def test_engines_are_optional(tmp_path):
    process = processes.start(ask_for_engines, log=tmp_path / "log")
    process.join()
    assert (tmp_path / "log").read_text().splitlines()[-2:] == [
        "BackPackAugmentedGGN needs the package 'backpack': pip install backpack-for-pytorch",
        "AsdlAugmentedEF needs the package 'asdl': pip install asdfghjkl",
    ]


def test_unknown_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'CurvlinopsAugmentedGGN'"):
        _ = curvature.CurvlinopsAugmentedGGN
    assert {"BackPackAugmentedGGN", "AsdlAugmentedEF"} <= set(dir(curvature))
