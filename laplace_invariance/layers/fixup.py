"""Residual networks without normalisation: Fixup initialisation, and the scalars that it needs.

Batch statistics tie the inputs of a batch together, so that their curvature is not a sum over inputs. A residual network
trains without them if every block starts as the identity: the last convolution of a block and the classifier are zero, the
other convolutions of a block are scaled by ``L^(-1 / (2 m - 2))`` for ``L`` blocks of ``m`` convolutions, and scalars take the
place of the normalisation's shift and scale: a bias before each convolution, activation and linear layer, one multiplier per
block (Zhang, Dauphin and Ma, 2019).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import Block, register_rule

__all__ = ["FixupBlock", "FixupResNet", "ScalarBias", "ScalarScale"]

CONVOLUTIONS = 2  # per block


class ScalarBias(nn.Module):
    """Add one number, zero at first, to everything: ``x + bias``."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ScalarScale(nn.Module):
    """Multiply everything with one number, one at first: ``scale * x``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def _every_entry(x: Tensor) -> Tensor:
    """Bring ``[rows, ...]`` to ``[rows, shared, 1]``: all entries share the number."""
    return x.reshape(len(x), -1, 1)


@register_rule(ScalarBias)
def scalar_bias(module: ScalarBias) -> Iterable[Block]:
    """Exact: one number."""
    yield Block("bias", None, _every_entry, elementwise=True)


@register_rule(ScalarScale)
def scalar_scale(module: ScalarScale) -> Iterable[Block]:
    """Exact: one number."""
    yield Block("scale", _every_entry, _every_entry, elementwise=True)


class FixupBlock(nn.Module):
    """Two 3 x 3 convolutions, with scalars between them, beside a shortcut, and a ReLU on their sum.

    The shortcut is the identity, or where the shape changes an average pooling and a 1 x 1 convolution.

    Args:
        n_in: channels of the input.
        n_out: channels of the output.
        stride: of the first convolution; 2 halves the size, rounded up.
    """

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.bias = ScalarBias()
        self.branch = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False),
            ScalarBias(),
            nn.ReLU(),
            ScalarBias(),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            ScalarScale(),
            ScalarBias(),
        )
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.AvgPool2d(stride, ceil_mode=True))
        if n_in != n_out:
            self.shortcut.append(nn.Conv2d(n_in, n_out, 1, bias=False))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        biased = self.bias(x)
        return self.relu((self.shortcut(biased) if len(self.shortcut) else x) + self.branch(biased))


class FixupResNet(nn.Module):
    """Residual network for small images without batch norm, in three stages, the later two at half the size each.

    At first its outputs are zero, whatever the input. All parameters have a curvature rule.

    Args:
        in_channels: channels of the images.
        n_classes: number of outputs.
        depth: layers, ``6 n + 2`` for ``n`` blocks per stage: 8, 14, 20, ...
        width: channels of the first stage; the others have twice and four times as many.
    """

    def __init__(self, in_channels: int, n_classes: int, depth: int = 14, width: int = 16) -> None:
        super().__init__()
        n_blocks, rest = divmod(depth - 2, 3 * CONVOLUTIONS)
        if rest or n_blocks < 1:
            raise ValueError(
                f"depth must be 6 n + 2 for n blocks per stage (8, 14, 20, ...), got {depth}"
            )
        self.start = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), ScalarBias(), nn.ReLU()
        )
        blocks, n_in = [], width
        for stage in range(3):
            n_out = width * 2**stage
            for i in range(n_blocks):
                blocks.append(FixupBlock(n_in, n_out, stride=2 if stage and i == 0 else 1))
                n_in = n_out
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), ScalarBias())
        self.classifier = nn.Linear(n_in, n_classes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise anew: scalars at 0 and 1, He's normal weights, scaled or zero where Fixup says so."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, ScalarBias):
                module.bias.zero_()
            elif isinstance(module, ScalarScale):
                module.scale.fill_(1.0)
        for block in self.blocks:
            *inner, last = (module for module in block.branch if isinstance(module, nn.Conv2d))
            for convolution in inner:
                convolution.weight.mul_(len(self.blocks) ** (-1 / (2 * CONVOLUTIONS - 2)))
            last.weight.zero_()
        self.classifier.weight.zero_()
        self.classifier.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.blocks(self.start(x))))
