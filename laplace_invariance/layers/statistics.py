"""Networks whose batch norms keep the statistics that they were trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FixedStatistics"]


class FixedStatistics(nn.Module):
    """A network whose batch norms use, and keep, their running statistics in training as well.

    For networks that were trained before. The evidence is that of the network in evaluation mode,
    so weights should be trained for the same function, which depends on no batch. Weights and
    biases of batch norms are trained as others are, and everything else, such as dropout, changes
    its mode as usual.

    Args:
        net: The network.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        """Change the mode of all modules but batch norms, which are in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self
