"""Every registered rule equals the autograd Jacobian, and registering behaves."""

import pytest
import torch
from builders import Gain
from cases import GROUP, TORCH, WITH_RULES, name_of
from torch import nn
from twins import block_diagonal, ggn

from laplace_invariance.curvature import (
    AugmentedGGN,
    Block,
    ElementwiseBlock,
    MatrixBlock,
    check_model,
    register_rule,
)
from laplace_invariance.curvature import rules as rules_module
from laplace_invariance.curvature.rules import rules


@pytest.mark.parametrize(("build", "shape"), TORCH + GROUP, ids=name_of)
def test_rule_equals_autograd(build, shape):
    module = build()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randint(11, shape) if isinstance(module, nn.Embedding) else torch.randn(shape)
    output = module(x)
    g = torch.randn_like(output)
    blocks = {block.parameter: block for block in rules()[type(module)](module)}
    assert set(blocks) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        rows = [
            torch.autograd.grad(output[i], parameter, g[i], retain_graph=True)[0] for i in range(2)
        ]
        expected = torch.stack(rows).flatten(1)
        block = blocks[name]
        torch.testing.assert_close(block.gradient_map(x, 2)(g), expected)
        if isinstance(block, MatrixBlock) and block.linear:
            other = torch.randn(shape)
            torch.testing.assert_close(block.a(2 * x + other), 2 * block.a(x) + block.a(other))


def test_every_registered_type_is_tested():
    assert {type(build()) for build, _ in WITH_RULES} == set(rules())


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Squared(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.square(), self.bias)


def test_subclasses_inherit_rules_which_an_example_verifies():
    x = torch.randn(4, 2)
    for cls in (Doubled, Squared):
        model = nn.Sequential(nn.Linear(2, 3), cls(3, 2))
        assert check_model(model)
        report = check_model(model, x)
        assert [row.supported for row in report.rows] == [True, True, cls is Doubled, True]
    assert "1.weight" in str(report)
    assert "calls of 1 do not explain its gradient" in str(report)
    with pytest.raises(TypeError, match="pass backend=AugmentedGGN"):
        check_model(model, AugmentedGGN)


def test_a_custom_rule_takes_a_few_lines(monkeypatch):
    monkeypatch.setattr(rules_module, "_rules", rules())
    model, x, y = nn.Sequential(nn.Linear(2, 3), Gain(3)), torch.randn(4, 2), torch.randint(3, (4,))
    assert "Gain has no rule" in str(check_model(model))

    @register_rule(Gain)
    def gain(module):
        return [ElementwiseBlock("gain", lambda x: x.unsqueeze(1), lambda g: g.unsqueeze(1))]

    _, kron = AugmentedGGN(model, "classification").kron(x, y, N=4)
    torch.testing.assert_close(
        kron.kfacs[2][0], block_diagonal(ggn(model, model(x), "classification"), model)[9:, 9:]
    )
    with pytest.raises(ValueError, match="has a rule already"):
        register_rule(Gain)(gain)
    register_rule(Gain, overwrite=True)(gain)


def test_a_wrong_rule_is_found_out(monkeypatch):
    monkeypatch.setattr(rules_module, "_rules", rules())
    register_rule(Gain)(lambda module: [ElementwiseBlock("gain", None, lambda g: g.unsqueeze(1))])
    model, x, y = nn.Sequential(nn.Linear(2, 3), Gain(3)), torch.randn(4, 2), torch.randint(3, (4,))
    with pytest.raises(NotImplementedError, match=r"1\.gain.*do not explain its gradient"):
        AugmentedGGN(model, "classification").kron(x, y, N=4)


MISMATCHES = {
    "positions": ElementwiseBlock("gain", lambda x: x[:1].unsqueeze(1), lambda g: g.unsqueeze(1)),
    "rows": ElementwiseBlock("gain", None, lambda g: g.reshape(1, -1, 3)),
    "axes": MatrixBlock("gain", lambda x: x, lambda g: g.unsqueeze(1)),
    "size": MatrixBlock("gain", lambda x: x.unsqueeze(1), lambda g: g.unsqueeze(1)),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_rule_whose_shapes_do_not_fit_is_found_out(name, monkeypatch):
    monkeypatch.setattr(rules_module, "_rules", rules())
    register_rule(Gain)(lambda module: [MISMATCHES[name]])
    model, x, y = nn.Sequential(nn.Linear(2, 3), Gain(3)), torch.randn(4, 2), torch.randint(3, (4,))
    with pytest.raises(NotImplementedError, match=r"1\.gain.*do not explain its gradient"):
        AugmentedGGN(model, "classification").kron(x, y, N=4)
    AugmentedGGN(model, "classification", on_unsupported="diag").kron(x, y, N=4)


def test_check_model_leaves_modes_alone_and_judges_evaluation_mode():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()
    assert check_model(model)
    assert [module.training for module in model] == [True, True, False]


def test_check_model_says_what_stock_kron_refuses():
    assert "KronLaplace refuses 5 axes" in str(check_model(nn.Conv3d(1, 2, 3)))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(5, 3, max_norm=1.0), "max_norm"),
        (nn.Embedding(5, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(5, 3, sparse=True), "sparse=True"),
        (nn.BatchNorm1d(3, track_running_stats=False), "running statistics"),
        (nn.MultiheadAttention(4, 2), "MultiheadAttention has no rule"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else type(value).__name__,
)
def test_reasons_name_the_setting(module, reason):
    report = check_model(nn.Sequential(module))
    assert not report
    assert reason in str(report)


def test_block_is_deprecated_in_favour_of_two_classes():
    def identity(x):
        return x

    with pytest.warns(DeprecationWarning, match="MatrixBlock"):
        matrix = Block("weight", identity, identity, linear=False, slots=2)
    with pytest.warns(DeprecationWarning, match="ElementwiseBlock"):
        scale = Block("scale", identity, identity, elementwise=True, linear=False)
    with pytest.warns(DeprecationWarning, match="ElementwiseBlock"):
        bias = Block("bias", None, identity, elementwise=True)
    assert matrix == MatrixBlock("weight", identity, identity, linear=False, slots=2)
    assert scale == ElementwiseBlock("scale", identity, identity)
    assert bias == ElementwiseBlock("bias", None, identity)
