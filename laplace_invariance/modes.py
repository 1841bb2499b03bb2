"""Run a module in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation"]


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module and its children into evaluation mode, and each back into its own mode after.

    Args:
        module: The module; ``requires_grad`` and everything else stay as they are.
    """
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training
