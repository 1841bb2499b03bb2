"""Hyperparameters: tensors that the evidence moves and the training loss does not.

A hyperparameter is a *buffer that requires grad*. It is not in ``model.parameters()``, so Laplace puts neither a prior
nor curvature on it and the weight optimiser never sees it; it is in ``state_dict()``; and it stays the same leaf tensor
through ``.to()``, ``deepcopy``, ``load_state_dict`` and pickling. Modules read it with ``self.hyperparameter(name)``,
which is detached everywhere but inside :func:`differentiable`, the context in which a curvature backend differentiates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "Hyperparameterised",
    "Learner",
    "differentiable",
    "hyperparameters",
    "learning",
    "named_hyperparameters",
]

logger = logging.getLogger(__name__)

_being_learnt: set[int] = set()  # ids of tensors inside a learning() context
_differentiable: ContextVar[bool] = ContextVar("laplace_invariance_differentiable", default=False)


@contextmanager
def differentiable() -> Iterator[None]:
    """Let forward passes depend on hyperparameters differentiably; outside they see detached values."""
    token = _differentiable.set(True)
    try:
        yield
    finally:
        _differentiable.reset(token)


def is_differentiable() -> bool:
    """Tell whether inside :func:`differentiable`."""
    return _differentiable.get()


class Hyperparameterised(nn.Module):
    """Base class of modules with hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self._hyperparameter_names: tuple[str, ...] = ()

    def register_hyperparameter(self, name: str, value: Tensor) -> None:
        """Add ``value`` as a hyperparameter called ``name``, to be read with :meth:`hyperparameter`."""
        if not value.is_floating_point():
            raise TypeError(
                f"hyperparameter {name!r} must be a floating-point tensor, got {value.dtype}"
            )
        self.register_buffer(name, value.detach().clone().requires_grad_())
        self._hyperparameter_names = (*self._hyperparameter_names, name)

    def hyperparameter(self, name: str) -> Tensor:
        """Return the hyperparameter ``name``, detached unless inside :func:`differentiable`."""
        value = self._buffers[name]
        assert value is not None
        return value if _differentiable.get() else value.detach()

    def project_(self) -> None:
        """Move hyperparameters back into their domain, in place; called after every step of :func:`learning`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Hyperparameterised:
        # nn.Module would replace a buffer by fn(buffer), a new tensor with a graph: optimisers and hooks would hold the
        # old one. Move the data into the tensor that everybody knows instead.
        kept = {name: self._buffers[name] for name in self._hyperparameter_names}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            moved = self._buffers[name]
            if moved is tensor:
                continue
            grad, tensor.grad = tensor.grad, None
            tensor.data = moved.detach()
            if grad is not None:
                tensor.grad = fn(grad)
            self._buffers[name] = tensor
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        kept = {name: self._buffers[name] for name in self._hyperparameter_names}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, tensor in kept.items():
            loaded = self._buffers[name]
            if (
                loaded is not tensor
            ):  # load_state_dict(assign=True) puts the loaded tensor itself in place
                tensor.data = loaded.detach()
                self._buffers[name] = tensor


def _owned(module: nn.Module) -> Iterator[tuple[str, Hyperparameterised, Tensor]]:
    seen = set()
    for prefix, owner in module.named_modules():
        if not isinstance(owner, Hyperparameterised):
            continue
        for name in owner._hyperparameter_names:
            tensor = owner._buffers[name]
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, owner, tensor


def named_hyperparameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every hyperparameter of ``module`` and its children, each tensor once."""
    for name, _, tensor in _owned(module):
        yield name, tensor


def hyperparameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield every hyperparameter of ``module`` and its children."""
    for _, tensor in named_hyperparameters(module):
        yield tensor


class Learner:
    """Steps hyperparameters whenever a backward pass delivers their gradient; made by :func:`learning`.

    Attributes:
        steps: number of steps taken, by hyperparameter name.
        skipped: number of gradients that were not finite and therefore not stepped, by name.
        history: value after every step, by name, as tensors on the CPU; the first entry is the value at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.05,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        **optimizer_kwargs: Any,
    ) -> None:
        self._owned = [entry for entry in _owned(model) if entry[2].requires_grad]
        if not self._owned:
            raise ValueError(
                "the model has no hyperparameter that requires grad, so there is nothing to learn; wrap the network in "
                "InvariantModel(net, augmentation), or register one with Hyperparameterised.register_hyperparameter"
            )
        self._optimizers = {
            name: optimizer([tensor], lr=lr, **optimizer_kwargs) for name, _, tensor in self._owned
        }
        self._handles: list[Any] = []
        self.steps = dict.fromkeys(self._optimizers, 0)
        self.skipped = dict.fromkeys(self._optimizers, 0)
        self.history = {name: [tensor.detach().cpu().clone()] for name, _, tensor in self._owned}

    def _step(self, name: str, owner: Hyperparameterised, tensor: Tensor) -> None:
        if torch.isfinite(tensor.grad).all():
            self._optimizers[name].step()
            with torch.no_grad():
                owner.project_()
            self.steps[name] += 1
        else:
            self.skipped[name] += 1
            logger.warning(
                "gradient of hyperparameter %s is not finite, step skipped (%d so far)",
                name,
                self.skipped[name],
            )
        tensor.grad = None
        self.history[name].append(tensor.detach().cpu().clone())

    def __enter__(self) -> Learner:
        if any(id(tensor) in _being_learnt for _, _, tensor in self._owned):
            raise RuntimeError(
                "a hyperparameter of this model is being learnt already; leave that learning() context first"
            )
        _being_learnt.update(id(tensor) for _, _, tensor in self._owned)
        for name, owner, tensor in self._owned:
            tensor.grad = None

            def hook(tensor: Tensor, name: str = name, owner: Hyperparameterised = owner) -> None:
                self._step(name, owner, tensor)

            self._handles.append(tensor.register_post_accumulate_grad_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        _being_learnt.difference_update(id(tensor) for _, _, tensor in self._owned)
        while self._handles:
            self._handles.pop().remove()


def learning(
    model: nn.Module,
    lr: float = 0.05,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **optimizer_kwargs: Any,
) -> Learner:
    """Step hyperparameters, inside the context, with every gradient that a marginal likelihood delivers to them.

    A step descends whatever was differentiated, so differentiate the *negative* log marginal likelihood, as
    ``laplace.marglik_training`` does. With it, stock training learns hyperparameters::

        with learning(model, lr=0.05) as learner:
            laplace.marglik_training(model, loader, backend=AugmentedGGN, n_hypersteps=1)

    Each of its ``n_hypersteps`` walks back through the data once, with the curvature of the last fit: one step per fit
    is the meaningful setting. A gradient that is not finite is skipped, counted in ``learner.skipped`` and logged.

    Args:
        model: any module; its hyperparameters are those of :func:`named_hyperparameters` that require grad.
        lr: step size.
        optimizer: class of ``torch.optim``, called once per hyperparameter as ``optimizer([tensor], lr=lr, ...)``.
        **optimizer_kwargs: further arguments of ``optimizer``.
    """
    return Learner(model, lr, optimizer, **optimizer_kwargs)
