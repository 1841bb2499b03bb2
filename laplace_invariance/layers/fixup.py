"""Residual networks without normalisation: Fixup initialisation, and the scalars that it needs.

Batch statistics tie the inputs of a batch together, so that their curvature is not a sum over
inputs. A residual network trains without them if every block starts as the identity: the last
convolution of a block and the classifier are zero, the other convolutions of a block are scaled
by ``L^(-1 / (2 m - 2))`` for ``L`` blocks of ``m`` convolutions, and scalars take the place of
the normalisation's shift and scale: a bias before each convolution, activation and linear
layer, one multiplier per block (Zhang, Dauphin and Ma, 2019).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, ElementwiseBlock, register_rule
from laplace_invariance.layers.shapes import every_entry

__all__ = ["FixupBlock", "FixupResNet", "ScalarBias", "ScalarScale"]

BLOCK_DEPTH = 2  # convolutions per block
N_STAGES = 3
STEP_FACTOR = 0.1  # of scalars, which move all activations at once


class ScalarBias(nn.Module):
    """Add one number, zero at first, to everything: ``x + bias``."""

    step_factor = STEP_FACTOR

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class ScalarScale(nn.Module):
    """Multiply everything by one number, one at first: ``scale * x``."""

    step_factor = STEP_FACTOR

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


@register_rule(ScalarBias)
def scalar_bias(module: ScalarBias) -> Iterator[AnyBlock]:
    """Exact: one number."""
    yield ElementwiseBlock("bias", None, every_entry)


@register_rule(ScalarScale)
def scalar_scale(module: ScalarScale) -> Iterator[AnyBlock]:
    """Exact: one number."""
    yield ElementwiseBlock("scale", every_entry, every_entry)


class FixupBlock(nn.Module):
    """Two 3 x 3 convolutions with scalars, beside a shortcut, and a ReLU on their sum.

    The shortcut is the identity, or where the shape changes an average pooling and a 1 x 1
    convolution.

    Args:
        n_in: Channels of the input.
        n_out: Channels of the output.
        stride: Stride of the first convolution; 2 halves the size, rounded up.
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

    @torch.no_grad()
    def scale_(self, factor: float) -> None:
        """Scale the convolutions of the branch by ``factor``, and set the last of them to zero."""
        *inner, last = (module for module in self.branch if isinstance(module, nn.Conv2d))
        for convolution in inner:
            convolution.weight.mul_(factor)
        last.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        biased = self.bias(x)
        # The identity keeps the input as it was, without the bias.
        shortcut = self.shortcut(biased) if len(self.shortcut) else x
        return self.relu(shortcut + self.branch(biased))


class FixupResNet(nn.Module):
    """Residual network for small images without batch norm, in three stages.

    Each later stage has half the size of the one before. At first the outputs are zero,
    whatever the input. All parameters have a curvature rule.

    Args:
        in_channels: Channels of the images.
        n_classes: Number of outputs.
        depth: Number of layers, ``6 n + 2`` for ``n`` blocks per stage: 8, 14, 20, ...
        width: Channels of the first stage; the others have twice and four times as many.
    """

    def __init__(self, in_channels: int, n_classes: int, depth: int = 14, width: int = 16) -> None:
        super().__init__()
        n_blocks, rest = divmod(depth - 2, N_STAGES * BLOCK_DEPTH)
        if rest or n_blocks < 1:
            raise ValueError(
                f"depth must be 6 n + 2 for n blocks per stage (8, 14, 20, ...), got {depth}"
            )
        self.start = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), ScalarBias(), nn.ReLU()
        )
        blocks = [FixupBlock(width, width) for _ in range(n_blocks)]
        for stage in range(1, N_STAGES):
            n_out = width * 2**stage
            blocks.append(FixupBlock(n_out // 2, n_out, stride=2))
            blocks += [FixupBlock(n_out, n_out) for _ in range(n_blocks - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), ScalarBias())
        self.classifier = nn.Linear(n_out, n_classes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw He's normal weights, scaled or zero where Fixup says so, and scalars at 0 and 1."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, ScalarBias):
                module.bias.zero_()
            elif isinstance(module, ScalarScale):
                module.scale.fill_(1.0)
        blocks = [block for block in self.blocks if isinstance(block, FixupBlock)]
        for block in blocks:
            block.scale_(len(blocks) ** (-1 / (2 * BLOCK_DEPTH - 2)))
        nn.init.zeros_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.blocks(self.start(x))))
