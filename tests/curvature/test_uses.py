"""Parameters that are used outside of layers: exact Jacobians, gradients and refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from builders import Stretch
from laplace import Laplace
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import central_differences, parameter_jacobian, relative_error

import laplace_invariance as li
from laplace_invariance.curvature import AugmentedGGN, check_model

D, T, CLASSES = 4, 3, 3


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


class Using(nn.Module):
    """Sequences ``[batch, T, D]``, changed in some way by parameters of its own."""

    def __init__(self, **parameters):
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(name, value)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        return self.head(self.change(x).tanh().mean(1))


class Positions(Using):
    def __init__(self):
        super().__init__(p=parameter(1, T, D))

    def change(self, x):
        return x + self.p


class Token(Using):
    def __init__(self):
        super().__init__(token=parameter(1, 1, D), p=parameter(1, T + 1, D))

    def change(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x += self.p
        return x


class SumOfTokens(Using):
    def __init__(self):
        super().__init__(token=parameter(1, 1, D), p=parameter(1, T + 1, D))

    def change(self, x):
        token = self.token + self.p[:, :1]
        return torch.cat((token.expand(len(x), -1, -1), x + self.p[:, 1:]), 1)


class Scaled(Using):
    def __init__(self):
        super().__init__(gamma=parameter(D), beta=parameter(D), t=parameter(1))

    def change(self, x):
        return (x * self.gamma - self.beta) * self.t


class ChannelsFirst(Using):
    def __init__(self):
        super().__init__(gamma=parameter(D), beta=parameter(D))

    def change(self, x):
        y = x.mT.unsqueeze(-1)
        y = y.mul(self.gamma.reshape(1, -1, 1, 1)) + self.beta[:, None, None]
        return y.squeeze(-1).mT


class Response(Using):
    def __init__(self):
        super().__init__(weight=parameter(D), bias=parameter(D))

    def change(self, x):
        return x + torch.addcmul(self.bias, self.weight, x.square())


class LinearFunction(Using):
    def __init__(self):
        super().__init__(w=parameter(D, D), b=parameter(D), v=parameter(D, D))

    def change(self, x):
        return F.linear(x, self.w, self.b).tanh() @ self.v


class PartlyBiased(Using):
    """As BEiT does: no bias for keys."""

    def __init__(self):
        super().__init__(w=parameter(3 * D, D), q=parameter(D), v=parameter(D))
        self.register_buffer("k", torch.zeros(D))

    def change(self, x):
        q, k, v = F.linear(x, self.w, torch.cat((self.q, self.k, self.v))).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


class Folded(Using):
    """As GPT-2 does: positions in the batch axis."""

    def __init__(self):
        super().__init__(w=parameter(D, D), b=parameter(D))

    def change(self, x):
        return torch.addmm(self.b, x.reshape(-1, D), self.w).view_as(x)


class Convolved(Using):
    def __init__(self):
        super().__init__(w=parameter(D, 2, 3), b=parameter(D))

    def change(self, x):
        return F.conv1d(x.mT, self.w, self.b, padding=1, groups=2).mT


class ConvolvedPlainly(Using):
    """With all options of the function at their defaults, then with a number for each."""

    def __init__(self):
        super().__init__(w=parameter(D, D, 2), v=parameter(D, 2, 1))

    def change(self, x):
        x = F.conv1d(F.pad(x.mT, (1, 2)), self.w).tanh()
        return F.conv1d(x, self.v, None, 2, 1, 2, 2).mT


class Normed(Using):
    def __init__(self):
        super().__init__(w=parameter(D), b=parameter(D), r=parameter(D), g=parameter(D))

    def change(self, x):
        x = F.layer_norm(x + x.square(), (D,), self.w, self.b)
        x = F.rms_norm(x, (D,), self.r)
        return F.group_norm(x.mT, 2, self.g).mT


class ActivatedNorm(nn.BatchNorm1d):
    """A norm with an activation inside, whose inherited rule is wrong."""

    def forward(self, x):
        return super().forward(x).relu()


class NormThenActivation(Using):
    def __init__(self):
        super().__init__()
        self.norm = ActivatedNorm(D)
        self.norm.running_mean.normal_()

    def change(self, x):
        return self.norm(x.mT).mT


class Biased(Using):
    """A table of biases that attention gathers from, more often from some places."""

    def __init__(self, fused):
        super().__init__(table=parameter(2 * T - 1, 1))
        self.fused = fused
        self.qkv = nn.Linear(D, 3 * D)
        places = torch.arange(T)
        self.register_buffer("places", places[:, None] - places[None] + T - 1)

    def change(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        bias = self.table[self.places.view(-1)].view(T, T, -1).permute(2, 0, 1).contiguous()[None]
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).squeeze(1)
        return ((q @ k.mT / 2 + bias).softmax(-1) @ v).squeeze(1)


class Attention(Using):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, **options)
        self.batch_first = options.get("batch_first", False)

    def change(self, x):
        mask = torch.triu(torch.full((T, T), -math.inf), 1)
        if not self.batch_first:
            x = x.transpose(0, 1)
        y, _ = self.attention(x, x, x, attn_mask=mask)
        return y if self.batch_first else y.transpose(0, 1)


class AttentionWeights(Using):
    """Attention whose weights are used, with masks of heads and of inputs."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.options = options

    def change(self, x):
        n = len(x)
        heads = torch.linspace(-1, 1, 2 * n * T * T).view(2 * n, T, T)
        last = torch.arange(T).expand(n, -1) == T - 1
        masks = {"attn_mask": heads, "key_padding_mask": last}
        y, weights = self.attention(x, x, x, **masks, **self.options)
        if weights is None:
            return y
        if weights.ndim == 4:
            weights = weights.sum(1)
        return y + weights @ x


class EncoderLayer(Using):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 2, 5, dropout=0.1, batch_first=True)

    def change(self, x):
        return self.layer(x)


class CalledOnce(Using):
    """Positions from an embedding that is called once for all inputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(T, D)

    def change(self, x):
        return x + self.embedding(torch.arange(T)[None])


CASES = {
    "positions": Positions,
    "token": Token,
    "sum of tokens": SumOfTokens,
    "scaled": Scaled,
    "channels first": ChannelsFirst,
    "response": Response,
    "linear": LinearFunction,
    "partly biased": PartlyBiased,
    "folded": Folded,
    "convolved": Convolved,
    "convolved plainly": ConvolvedPlainly,
    "normed": Normed,
    "activated norm": NormThenActivation,
    "table": lambda: Biased(fused=False),
    "table, fused": lambda: Biased(fused=True),
    "attention": lambda: Attention(batch_first=True),
    "attention, time first": lambda: Attention(bias=False),
    "attention weights": AttentionWeights,
    "attention weights of heads": lambda: AttentionWeights(average_attn_weights=False),
    "no attention weights": lambda: AttentionWeights(need_weights=False),
    "encoder layer": EncoderLayer,
    "embedding": CalledOnce,
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_is_explained_and_jacobians_are_exact(name):
    net, x = CASES[name]().eval(), torch.randn(5, T, D)
    before = net(x)
    report = check_model(net, x)
    assert report, str(report)
    jacobians, outputs = AugmentedGGN(net, "classification").jacobians(x)
    torch.testing.assert_close(outputs, before.detach())
    torch.testing.assert_close(jacobians, parameter_jacobian(net, net(x)))


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_evidence_is_that_of_differences(name):
    net, x, y = CASES[name]().eval(), torch.randn(4, T, D), torch.randint(CLASSES, (4,))
    model = li.InvariantModel(net, Stretch(), n_samples=3)
    loader = DataLoader(TensorDataset(x, y), 4)

    def evidence():
        torch.manual_seed(0)
        options = {"subset_of_weights": "all", "hessian_structure": "kron"}
        la = Laplace(model, "classification", backend=AugmentedGGN, **options)
        la.fit(loader)
        return la.log_marginal_likelihood()

    evidence().backward()
    eta = model.augmentation.eta
    expected = central_differences(lambda: evidence().detach(), eta, 1e-6)
    assert relative_error(eta.grad, expected) < 1e-5


def test_kronecker_factors_of_something_added_are_those_of_an_embedding():
    added, x, y = Positions(), torch.randn(4, T, D), torch.randint(CLASSES, (4,))
    embedded = CalledOnce()
    embedded.embedding.weight.data.copy_(added.p.data[0])
    embedded.head.load_state_dict(added.head.state_dict())
    factors = [
        AugmentedGGN(n, "classification").kron(x, y, N=4)[1].kfacs for n in (added, embedded)
    ]
    for one, other in zip(factors[0][0], factors[1][2], strict=True):
        torch.testing.assert_close(one, other)


class TwoWays(Using):
    def __init__(self):
        super().__init__(w=parameter(D, D))

    def change(self, x):
        return (x @ self.w).tanh() @ self.w.T


class Computed(Using):
    def __init__(self):
        super().__init__(w=parameter(D, D))

    def change(self, x):
        return F.linear(x, self.w.exp())


class Paired(Using):
    """Adds another row of the parameter to each input of a batch."""

    def __init__(self):
        super().__init__(p=parameter(2, 1, D))

    def change(self, x):
        return x + self.p[torch.arange(len(x)) % 2]


@pytest.mark.parametrize("cls", [TwoWays, Computed, Paired])
def test_what_is_not_understood_is_refused(cls):
    net, x, y = cls(), torch.randn(4, T, D), torch.randint(CLASSES, (4,))
    assert not check_model(net, x)
    with pytest.raises(NotImplementedError, match=f"{cls.__name__} has no rule"):
        AugmentedGGN(net, "classification").kron(x, y, N=4)
    jacobians, _ = AugmentedGGN(net, "classification").jacobians(x)
    torch.testing.assert_close(jacobians[:1], parameter_jacobian(net, net(x))[:1])


class Standardised(nn.Linear):
    """Inherits a rule that is wrong, since it divides its weight by its size."""

    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


def test_a_wrong_rule_behind_a_gain_of_zero_is_found_out():
    net = nn.Sequential(nn.Linear(2, 3), Standardised(3, 3), nn.Linear(3, CLASSES))
    nn.init.zeros_(net[2].weight)
    before, x = [p.clone() for p in net.parameters()], torch.randn(4, 2)
    report = check_model(net, x)
    assert [row.name for row in report.rows if not row.supported] == ["1.weight"]
    for parameter, value in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


class Caching(nn.Module):
    """Keeps something that it computed from its weights."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, CLASSES)
        nn.init.zeros_(self.head.weight)
        self.kept = None

    def forward(self, x):
        if self.kept is None or self.head.weight.any():
            self.kept = self.head.bias.detach().clone()
        return self.head(self.inner(x)) + self.kept


def test_a_model_that_keeps_what_it_computed_is_told():
    with pytest.raises(RuntimeError, match="computed from earlier weights"):
        check_model(Caching(), torch.randn(4, 2))


def small_swin():
    from torchvision.models.swin_transformer import SwinTransformer

    return SwinTransformer([4, 4], 8, [1, 1], [2, 2], [2, 2], num_classes=CLASSES)


def small_vit():
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(16, 8, 1, 2, 8, 16, num_classes=CLASSES)


def small_convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(4, 8, 1), CNBlockConfig(8, None, 1)], num_classes=CLASSES)


@pytest.mark.parametrize("make", [small_swin, small_vit, small_convnext])
def test_networks_of_torchvision_are_explained(make):
    net, x = make().double().eval(), torch.randn(3, 3, 16, 16)
    assert check_model(net, x)
    backend = AugmentedGGN(net, "classification")
    torch.testing.assert_close(backend.jacobians(x)[0], parameter_jacobian(net, net(x)))
