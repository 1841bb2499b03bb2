"""Compute in single precision or better, whatever inputs have and whatever torch.autocast does."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "HALF",
    "at_least_single",
    "check_precision",
    "single",
    "with_autocast",
    "without_autocast",
]

HALF = (torch.float16, torch.bfloat16)

# Device types and dtypes of the autocast that the outermost without_autocast() disabled.
_disabled: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar(
    "laplace_invariance_autocast", default=()
)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and any other dtype as it is."""
    return torch.float32 if dtype in HALF else dtype


def single(x: Any) -> Any:
    """Return a tensor, or a mapping with tensors in it, in single precision instead of half.

    Everything else is returned as it is.
    """
    if isinstance(x, Tensor):
        return x.to(at_least_single(x.dtype))
    if isinstance(x, MutableMapping):
        tensors = [value for value in x.values() if isinstance(value, Tensor)]
        if any(tensor.dtype in HALF for tensor in tensors):
            values = {key: single(v) if isinstance(v, Tensor) else v for key, v in x.items()}
            return type(x)(values)  # type: ignore[call-arg]  # such as a dict
    return x


def _accelerator() -> torch.device | None:
    """Return the accelerator of this machine, if there is one."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # of torch 2.6 if there is none
        return None


@contextmanager
def without_autocast() -> Iterator[None]:
    """Disable ``torch.autocast`` inside the context."""
    kinds = ["cpu"]
    accelerator = _accelerator()
    if accelerator is not None:
        kinds.append(accelerator.type)
    enabled = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    if not enabled:
        yield
        return
    found = tuple((kind, torch.get_autocast_dtype(kind)) for kind in enabled)
    token = _disabled.set(found)
    try:
        with ExitStack() as stack:
            for kind, dtype in found:
                stack.enter_context(torch.autocast(kind, dtype, enabled=False))
            yield
    finally:
        _disabled.reset(token)


@contextmanager
def with_autocast() -> Iterator[None]:
    """Enable the autocast again that :func:`without_autocast` disabled, if there was one.

    Weights are converted anew with every use: what torch keeps of them until the outermost autocast
    ends would be that of weights before the first step.
    """
    with ExitStack() as stack:
        for kind, dtype in _disabled.get():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
        yield


def check_precision(model: nn.Module) -> None:
    """Raise unless curvature and evidence of a model can be computed in single precision.

    laplace-torch computes prior terms and sums of curvature in the dtype of the first parameter,
    and for half precision these would be off by many nats.

    Args:
        model: Any module; frozen parameters may be in half precision, but for the first.

    Raises:
        TypeError: If weights are in half precision, or complex.
    """
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.is_complex() and parameter.requires_grad:
            raise TypeError(
                f"weights are complex ({name}: {parameter.dtype}), for which laplace has no prior; "
                "keep real and imaginary parts as two parameters"
            )
        if parameter.dtype in HALF and (i == 0 or parameter.requires_grad):
            raise TypeError(
                f"weights are in half precision ({name}: {parameter.dtype}), in which an evidence "
                "is off by many nats; convert the model with model.float(), and train it under "
                "torch.autocast if it is to be fast"
            )
