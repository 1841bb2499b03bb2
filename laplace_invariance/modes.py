"""Run a module in evaluation mode for a while, or as it is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from laplace_invariance.precision import without_autocast

__all__ = ["as_written", "evaluation", "in_modes", "modes_of"]


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Put a module and its children into evaluation mode, and each back into its own mode after.

    Args:
        module: The module; ``requires_grad`` and everything else stay as they are.
    """
    with in_modes(modes_of(module)):
        module.eval()
        yield


Modes = list[tuple[nn.Module, bool]]


def modes_of(module: nn.Module) -> Modes:
    """Return a module and its children, each with whether it is in training mode."""
    return [(child, child.training) for child in module.modules()]


@contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Put modules into given modes, as of :func:`modes_of`, and each back into its own after."""
    before = [(module, module.training) for module, _ in modes]
    for module, training in modes:
        module.training = training
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def as_written() -> Iterator[None]:
    """Run modules inside the context as they are written: without autocast, and not compiled.

    What ``torch.compile`` made of a module calls no hooks that were not there when it was compiled.
    """
    with ExitStack() as stack:
        stack.enter_context(without_autocast())
        if "torch._dynamo" in sys.modules:  # else nothing was compiled; to import it takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
