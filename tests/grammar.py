"""Networks from a grammar of what the library supports, as code that can be pasted.

A network is a text, an expression of modules of this file, of torch and of the library. Texts are
drawn by hypothesis, which makes a failing one as short as it can; ``build`` makes the network.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import laplace_invariance as li
from laplace_invariance import layers

CHANNELS, SIZE = 2, 4
ACTIVATIONS = (
    "nn.Tanh()",
    "nn.Softplus()",
    "nn.GELU()",
    "nn.ELU()",
    "nn.Sigmoid()",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.SiLU(inplace=True)",
)


class Residual(nn.Module):
    """``x + inner(x)``."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x.clone())  # which may work in place


class Twice(nn.Module):
    """A module that is called two times."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(self.inner(x))


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self, n):
        super().__init__()
        self.first, self.second = nn.Linear(n, n), nn.Linear(n, n)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Again(nn.Module):
    """A module whose activations are computed again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Attention(nn.Module):
    """Positions that attend to each other, by linear layers."""

    def __init__(self, n):
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(n, n) for _ in range(3))

    def forward(self, x):
        weights = self.queries(x) @ self.keys(x).mT / x.shape[-1] ** 0.5
        return weights.softmax(-1) @ self.values(x)


class Scaled(nn.Module):
    """A parameter outside of layers, one number per channel."""

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.scale


class Positions(nn.Module):
    """From feature maps to positions with features: a view."""

    def forward(self, x):
        return x.flatten(2).mT


@dataclass(frozen=True)
class Case:
    """A network, and how it is looked at.

    Attributes:
        code: Expression of the network.
        likelihood: Likelihood.
        n_samples: Number of samples of an augmentation; 0 for none.
        draws: Draws of the augmentation.
        chunk_size: Rows at a time; None for all.
        seed: Seed of weights, statistics and data.
        structure: Structure of the curvature whose evidence is differentiated.
    """

    code: str
    likelihood: str
    n_samples: int
    draws: str
    chunk_size: int | None
    seed: int
    structure: str = "kron"

    def build(self):
        """Return the model, in evaluation mode, inputs and targets."""
        torch.manual_seed(self.seed)
        names = {"nn": nn, "layers": layers, **globals()}
        net = eval(self.code, names).eval()
        for parameter in net.parameters():
            nn.init.normal_(parameter, std=0.5)
        for name, statistic in net.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                nn.init.uniform_(statistic, 0.5, 2.0)
        model = net
        if self.n_samples:
            ranges = {"rotation": 0.3, "x_scale": 0.2, "y_translation": 0.1}
            augmentation = li.AffineImage(init=ranges, learn=tuple(ranges), draws=self.draws)
            model = li.InvariantModel(net, augmentation, self.n_samples).eval()
        x = torch.rand(3, CHANNELS, SIZE, SIZE)
        y = torch.tensor([0, 2, 1])
        if self.likelihood == "regression":
            y = torch.randn(3, 3)
        return model, x, y


def is_valid(case):
    """Return whether torch can differentiate a network.

    It cannot where an activation overwrites what the one before it saved: dropout in evaluation
    mode returns its input itself, and tanh saves its output.
    """
    model, x, _ = case.build()
    try:
        model(x).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return False
        raise
    return True


def maps(channels, size):
    """Layers that keep feature maps as they are in shape."""
    n = channels
    conv = f"nn.Conv2d({n}, {n}, 3, padding=1"
    simple = [
        f"{conv})",
        f"{conv}, bias=False)",
        f"{conv}, padding_mode='circular')",
        f"nn.Conv2d({n}, {n}, 3, padding=1, groups={n})",
        f"nn.BatchNorm2d({n})",
        f"nn.GroupNorm(1, {n})",
        f"layers.FactoredLinear2d({n}, {n}, ({size}, {size}))",
        f"layers.SparseLinear2d({n}, {n}, ({size}, {size}))",
        f"layers.SparseConv2d({n}, {n}, 3, padding=1)",
        f"layers.SparseConv2d({n}, {n}, 3, padding=1, learn_omega='weight')",
        f"nn.Sequential(layers.LiftingConv2d({n}, {n}, 3, padding=1), layers.GroupPool())",
        "layers.ScalarScale()",
        "nn.Dropout(0.3)",
        "nn.Identity()",
    ]
    return nested(simple)


def rows(n):
    """Layers that keep the last axis as it is."""
    simple = [
        f"nn.Linear({n}, {n})",
        f"nn.Linear({n}, {n}, bias=False)",
        f"nn.LayerNorm({n})",
        f"Tied({n})",
        f"Scaled({n})",
        "nn.Dropout(0.3)",
    ]
    return nested(simple)


def nested(simple):
    """Layers, each with an activation perhaps, alone, reused, beside the identity, checkpointed."""
    layer = st.sampled_from(simple)
    active = st.builds("nn.Sequential({}, {})".format, layer, st.sampled_from(ACTIVATIONS))
    base = st.one_of(layer, active, active)
    wrapped = st.builds("{}({})".format, st.sampled_from(["Residual", "Twice", "Again"]), base)
    return st.one_of(base, base, base, wrapped)


def joined(parts):
    """Return the expression of modules in a row."""
    return f"nn.Sequential({', '.join(parts)})"


@st.composite
def codes(draw):
    """Expressions of networks from images to three outputs."""
    width = draw(st.integers(1, 3))
    parts = [f"nn.Conv2d({CHANNELS}, {width}, 3, padding=1)"]
    parts += draw(st.lists(maps(width, SIZE), max_size=3))
    end = draw(st.sampled_from(["flat", "pooled", "positions"]))
    if end == "flat":
        parts += ["nn.MaxPool2d(2)", "nn.Flatten()", f"nn.Linear({4 * width}, 4)", "nn.Tanh()"]
        parts += draw(st.lists(rows(4), max_size=2))
        return joined([*parts, "nn.Linear(4, 3)"])
    if end == "pooled":
        return joined([*parts, "nn.AdaptiveAvgPool2d(1)", "nn.Flatten()", f"nn.Linear({width}, 3)"])
    parts += ["Positions()", f"Attention({width})", *draw(st.lists(rows(width), max_size=1))]
    return joined([*parts, "nn.Flatten()", f"nn.Linear({width * SIZE**2}, 3)"])


cases = st.builds(
    Case,
    codes(),
    st.sampled_from(["classification", "classification", "regression"]),
    st.sampled_from([0, 2, 3]),
    st.sampled_from(["independent", "sobol"]),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 9),
    st.sampled_from(["kron", "kron", "diag", "full"]),
).filter(is_valid)
