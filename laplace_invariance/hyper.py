"""Hyperparameters: tensors that are learnt by the evidence, and not by the training loss.

A hyperparameter is a *buffer that requires grad*. It is not in ``model.parameters()``, so Laplace
puts neither a prior nor curvature on it and the optimiser of the weights never sees it; it is in
``state_dict()``; and it stays the same leaf tensor through ``.to()``, ``deepcopy``,
``load_state_dict`` and pickling. Modules read it with ``self.hyperparameter(name)``, which is
detached everywhere but inside :func:`differentiable`, the context in which a curvature backend
differentiates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "Hyperparameterised",
    "Learner",
    "StepGuard",
    "at_values",
    "being_learnt",
    "differentiable",
    "hyperparameters",
    "learning",
    "named_hyperparameters",
    "original_of",
]

logger = logging.getLogger(__name__)

_being_learnt: set[int] = set()  # ids of tensors inside a learning() context
# Deep copies, and the modules that they were made of; neither keeps the other alive.
_originals: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = WeakKeyDictionary()
_differentiable: ContextVar[bool] = ContextVar("laplace_invariance_differentiable", default=False)


@contextmanager
def differentiable() -> Iterator[None]:
    """Let forward passes depend on hyperparameters differentiably, not on detached values."""
    token = _differentiable.set(True)
    try:
        yield
    finally:
        _differentiable.reset(token)


@contextmanager
def at_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Let hyperparameters have other values inside the context.

    Args:
        tensors: Hyperparameters, whose graph does not notice.
        values: A tensor for each, of its shape.
    """
    before = [tensor.data for tensor in tensors]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data = value
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data = value


class Hyperparameterised(nn.Module):
    """Base class of modules with hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self._hyperparameter_names: tuple[str, ...] = ()

    def register_hyperparameter(self, name: str, value: Tensor) -> None:
        """Add a hyperparameter, to be read with :meth:`hyperparameter`.

        Args:
            name: Name of the buffer; its entry in ``state_dict()``.
            value: Initial value, a floating-point tensor, which is copied.

        Raises:
            TypeError: If the value is not a floating-point tensor.
        """
        if not value.is_floating_point():
            raise TypeError(
                f"hyperparameter {name!r} must be a floating-point tensor, got {value.dtype}"
            )
        self.register_buffer(name, value.detach().clone().requires_grad_())
        self._hyperparameter_names = (*self._hyperparameter_names, name)

    def hyperparameter(self, name: str) -> Tensor:
        """Return the hyperparameter ``name``, detached unless inside :func:`differentiable`."""
        value = self.get_buffer(name)
        if _differentiable.get():
            return value
        return value.detach()

    def project_(self) -> None:
        """Bring hyperparameters back into their domain, in place; called after every step."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # as the default, but the copy is known as one: see original_of
        reduced = self.__reduce_ex__(4)
        assert not isinstance(reduced, str)
        make, arguments, state, *_ = reduced
        copied = make(*arguments)
        memo[id(self)] = copied
        copied.__setstate__(deepcopy(state, memo))
        _originals[copied] = ref(self)
        return copied

    def _own_hyperparameters(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(name) for name in self._hyperparameter_names}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Hyperparameterised:
        # nn.Module would replace a buffer by fn(buffer), a new tensor with a graph, while
        # optimisers and hooks hold the old one. Put the new data into the old tensor instead.
        kept = self._own_hyperparameters()
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            converted = self.get_buffer(name)
            if converted is tensor:
                continue
            gradient = tensor.grad
            tensor.grad = None
            tensor.data = converted.detach()
            if gradient is not None:
                tensor.grad = fn(gradient)
            self._buffers[name] = tensor
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # load_state_dict(assign=True) puts the loaded tensor itself in place of the buffer.
        kept = self._own_hyperparameters()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, tensor in kept.items():
            loaded = self.get_buffer(name)
            if loaded is not tensor:
                tensor.data = loaded.detach()
                self._buffers[name] = tensor


def _owned_hyperparameters(module: nn.Module) -> Iterator[tuple[str, Hyperparameterised, Tensor]]:
    """Yield name, owner and tensor of every hyperparameter, each tensor once."""
    seen = set()
    for prefix, owner in module.named_modules():
        if not isinstance(owner, Hyperparameterised):
            continue
        for name in owner._hyperparameter_names:
            tensor = owner.get_buffer(name)
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}".removeprefix("."), owner, tensor


def named_hyperparameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every hyperparameter of ``module``, each tensor once."""
    for name, _, tensor in _owned_hyperparameters(module):
        yield name, tensor


def hyperparameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield every hyperparameter of ``module``, each tensor once."""
    for _, _, tensor in _owned_hyperparameters(module):
        yield tensor


def original_of(module: nn.Module, tensor: Tensor) -> Tensor | None:
    """Return the hyperparameter that one of a deep copy was copied from.

    laplace-torch makes such a copy for its approximations of the last layer. Otherwise copies are
    independent of what they were made of.

    Args:
        module: The copy, or a module with it inside.
        tensor: A hyperparameter of it.

    Returns:
        The tensor of the original, or None if ``tensor`` is not that of a copy, or if the original
        is gone, has another shape by now or does not require grad.
    """
    for name, owner, found in _owned_hyperparameters(module):
        source = _originals.get(owner)
        original = None if source is None else source()
        if found is not tensor or not isinstance(original, Hyperparameterised):
            continue
        theirs = original._own_hyperparameters().get(name.rpartition(".")[2])
        if theirs is not None and theirs.shape == tensor.shape and theirs.requires_grad:
            return theirs
    return None


def being_learnt(tensors: Iterable[Tensor]) -> bool:
    """Return whether one of the tensors is inside a :func:`learning` context."""
    return any(id(tensor) in _being_learnt for tensor in tensors)


class StepGuard:
    """Guard of optimisers: steps that are not finite are skipped, counted and logged.

    Args:
        kinds: Names of the kinds of steps, which are counted separately.
        max_bad_steps: Number of skipped steps of one kind in a row after which
            ``FloatingPointError`` is raised; None never gives up.

    Attributes:
        skipped: Number of steps that were skipped so far, by kind.
    """

    def __init__(self, kinds: Iterable[str], max_bad_steps: int | None = None) -> None:
        self.skipped = dict.fromkeys(kinds, 0)
        self._in_a_row = dict.fromkeys(self.skipped, 0)
        self._max_bad_steps = max_bad_steps

    def allows(self, kind: str, learnt: Iterable[Tensor], objective: Tensor | None = None) -> bool:
        """Return whether a step may be taken; if not, it counts as skipped.

        Args:
            kind: Kind of the step.
            learnt: Tensors that are to be stepped; each gradient that there is must be finite.
            objective: Value that was differentiated, which must be finite; None is not checked.

        Raises:
            FloatingPointError: If too many steps of this kind were skipped in a row.
        """
        checked = [tensor.grad for tensor in learnt if tensor.grad is not None]
        if objective is not None:
            checked.append(objective)
        if not _all_finite(checked):
            is_objective = objective is not None and not torch.isfinite(objective).all()
            cause = "the objective" if is_objective else "a gradient"
            self.skip(kind, f"{cause} is not finite")
            return False
        self._in_a_row[kind] = 0
        return True

    def skip(self, kind: str, cause: str) -> None:
        """Count and log a step that is skipped, and give up if there were too many in a row.

        Args:
            kind: Kind of the step.
            cause: Reason for the log and the error.

        Raises:
            FloatingPointError: If too many steps of this kind were skipped in a row.
        """
        self.skipped[kind] += 1
        self._in_a_row[kind] += 1
        logger.warning("step of %s skipped: %s (%d so far)", kind, cause, self.skipped[kind])
        if self._max_bad_steps is not None and self._in_a_row[kind] >= self._max_bad_steps:
            raise FloatingPointError(
                f"{self._in_a_row[kind]} steps of {kind} in a row were skipped, "
                f"the last one: {cause}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the counts."""
        return {"skipped": dict(self.skipped), "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back counts that :meth:`state_dict` returned."""
        self.skipped.update(state["skipped"])
        self._in_a_row.update(state["in_a_row"])


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are finite.

    One question is asked on each device, as every answer of a GPU has to be waited for.
    """
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor.sum().float())
    # one number that is not finite makes the sum so, which takes a tenth of the time
    if all(torch.stack(sums).isfinite().all() for sums in found.values()):
        return True
    return all(tensor.isfinite().all() for tensor in tensors)  # finite ones may do so, rarely


class Learner:
    """Steps hyperparameters whenever a backward pass delivers their gradient.

    It is made by :func:`learning`, which describes the arguments.

    Attributes:
        steps: Number of steps taken, by name of the hyperparameter.
        history: Initial value and value after every step, by name, as tensors on the CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.05,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        **optimizer_kwargs: Any,
    ) -> None:
        found = _owned_hyperparameters(model)
        self._owned = [
            (name, owner, tensor) for name, owner, tensor in found if tensor.requires_grad
        ]
        if not self._owned:
            raise ValueError(
                "the model has no hyperparameter that requires grad, so there is nothing to learn; "
                "wrap the network in InvariantModel(net, augmentation), or register one with "
                "Hyperparameterised.register_hyperparameter"
            )
        self._optimizers = {
            name: optimizer([tensor], lr=lr, **optimizer_kwargs) for name, _, tensor in self._owned
        }
        self._guard = StepGuard(self._optimizers)
        self._handles: list[RemovableHandle] = []
        self.steps = dict.fromkeys(self._optimizers, 0)
        self.history = {name: [_on_cpu(tensor)] for name, _, tensor in self._owned}

    @property
    def skipped(self) -> dict[str, int]:
        """Number of gradients that were not finite and therefore not stepped, by name."""
        return self._guard.skipped

    def _step(self, name: str, owner: Hyperparameterised, tensor: Tensor) -> None:
        if self._guard.allows(name, [tensor]):
            self._optimizers[name].step()
            with torch.no_grad():
                owner.project_()
            self.steps[name] += 1
        tensor.grad = None
        self.history[name].append(_on_cpu(tensor))

    def __enter__(self) -> Learner:
        if being_learnt(tensor for _, _, tensor in self._owned):
            raise RuntimeError(
                "a hyperparameter of this model is being learnt already; "
                "leave that learning() context first"
            )
        _being_learnt.update(id(tensor) for _, _, tensor in self._owned)
        for name, owner, tensor in self._owned:
            tensor.grad = None
            step = partial(self._step, name, owner)
            self._handles.append(tensor.register_post_accumulate_grad_hook(step))
        return self

    def __exit__(self, *_: object) -> None:
        _being_learnt.difference_update(id(tensor) for _, _, tensor in self._owned)
        while self._handles:
            self._handles.pop().remove()


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def learning(
    model: nn.Module,
    lr: float = 0.05,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    **optimizer_kwargs: Any,
) -> Learner:
    """Step hyperparameters, inside the context, with every gradient of a marginal likelihood.

    A step descends whatever was differentiated, so differentiate the *negative* log marginal
    likelihood, as ``laplace.marglik_training`` does, which then learns hyperparameters::

        with learning(model, lr=0.05) as learner:
            laplace.marglik_training(model, loader, backend=AugmentedGGN, n_hypersteps=1)

    Each of its ``n_hypersteps`` passes once through the data, with the curvature of the last fit:
    one step per fit is the meaningful setting. A step with a gradient that is not finite is
    skipped, counted in ``learner.skipped`` and logged.

    Args:
        model: Any module; all of :func:`named_hyperparameters` that require grad are learnt.
        lr: Step size.
        optimizer: Class of ``torch.optim``, called once per hyperparameter as
            ``optimizer([tensor], lr=lr, ...)``.
        **optimizer_kwargs: Further arguments of ``optimizer``.

    Returns:
        Context manager with the numbers of steps taken and skipped, and the values after each.

    Raises:
        ValueError: If the model has no hyperparameter that requires grad.
    """
    return Learner(model, lr, optimizer, **optimizer_kwargs)
