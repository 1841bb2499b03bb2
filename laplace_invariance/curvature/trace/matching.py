"""Which layer explains which parameter, verified on the first inputs that a backend sees."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import (
    AnyBlock,
    ElementwiseBlock,
    Map,
    MatrixBlock,
    blocks_of,
    rules,
)
from laplace_invariance.curvature.trace.calls import Call, Layers, backpropagate
from laplace_invariance.curvature.trace.guards import Guards
from laplace_invariance.draws import fixed_draws
from laplace_invariance.hyper import hyperparameters, named_hyperparameters
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.precision import HALF

__all__ = ["Coverage", "Match", "Owner", "coverage", "match"]


PERTURBATION = 0.05  # of parameters, relative to their size, while rules are verified

WAYS_OUT = (
    "Ways out: backend_kwargs={'on_unsupported': 'diag'} uses their exact diagonal instead (one "
    "input at a time, hence slow); register_rule teaches the backend a layer in a few lines; "
    "requires_grad_(False) leaves a parameter out of the posterior; hessian_structure='diag' or "
    "'full' needs no rule. laplace_invariance.curvature.check_model(model, x) shows all."
)


@dataclass(frozen=True)
class Owner:
    """A module that owns a parameter, and what its rule says of it.

    Attributes:
        path: Name of the module in the model.
        module: The module.
        name: Name of the parameter in the module.
        blocks: Blocks of the parameter.
        reason: Why there is none, if so.
    """

    path: str
    module: nn.Module
    name: str
    blocks: tuple[AnyBlock, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'model'}.{self.name} ({type(self.module).__name__})"


@dataclass(frozen=True)
class Coverage:
    """What is known of one parameter: its owners with their blocks, or why there are none.

    Attributes:
        name: Name of the parameter in the model.
        parameter: The parameter.
        owners: Modules that own it; several share it.
        reason: Why it has no Kronecker curvature, or None if it has.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[Owner, ...]
    reason: str | None

    @property
    def supported(self) -> bool:
        """Whether rules cover the parameter."""
        return self.reason is None

    @property
    def is_promised(self) -> bool:
        """Whether a rule was registered for the very class of an owner, other than those of torch.

        Such a rule is wrong if it does not explain a gradient.
        """
        kinds = [type(owner.module) for owner in self.owners if owner.blocks]
        return any(kind in rules() and not kind.__module__.startswith("torch.") for kind in kinds)


def coverage(model: nn.Module) -> list[Coverage]:
    """Match every parameter that requires grad with the modules that own it, and their rules.

    Args:
        model: Any module. The rule of each of its modules runs once.

    Returns:
        An entry for each parameter, in the order of ``model.parameters()``.
    """
    owners: dict[nn.Parameter, list[Owner]] = {}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not any(parameter.requires_grad for parameter in own.values()):
            continue
        blocks, reason = blocks_of(module)
        for name, parameter in own.items():
            found = tuple(block for block in blocks if block.parameter == name)
            owners.setdefault(parameter, []).append(Owner(path, module, name, found, reason))
    return [
        Coverage(name, parameter, tuple(owners[parameter]), _objection(owners[parameter]))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _objection(owners: list[Owner]) -> str | None:
    """Return why the owners' blocks do not cover the parameter, or None if they do."""
    layouts = set()  # in which blocks of one parameter must agree
    for owner in owners:
        sizes = (getattr(owner.module, "groups", 1), getattr(owner.module, "slots", 1))
        layouts.add((type(owner.module), owner.name, *sizes))
    if len(layouts) > 1:
        return f"shared by modules of different kinds: {' and '.join(map(str, owners))}"
    return next((owner.reason for owner in owners if not owner.blocks), None)


@dataclass(frozen=True)
class Match:
    """Every parameter that requires grad, exactly once: with a block, or with a reason why not.

    Attributes:
        model: The model that is run.
        parameters: Parameters in the order of ``model.parameters()``.
        coverage: What is known of each of them.
        layers: Layers to capture.
        blocks: Block of each parameter, None for one without a rule.
        others: Indices of parameters without a rule, which autograd differentiates.
        objection: Which parameters lack a rule, why, and what to do; None if none does.
        twins: For a bias whose gradients are those of the weight matrix of the same layer,
            summed over its positions, the index of the weight, which is smaller.
        n_inputs: Number of inputs that this was verified on.
        n_outputs: Number of outputs of the model.
        size: Number of elements of all captured layers' outputs, per input.
        guards: Guards of what fits depend on, and of backward passes.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    coverage: Sequence[Coverage]
    layers: Layers
    blocks: Sequence[AnyBlock | None]
    others: Sequence[int]
    objection: str | None
    twins: dict[int, int]
    n_inputs: int
    n_outputs: int
    size: int
    guards: Guards

    def hyperparameters(self) -> list[Tensor]:
        """Return the hyperparameters of the model that are learnt."""
        return [tensor for tensor in hyperparameters(self.model) if tensor.requires_grad]

    def is_average(self) -> bool:
        """Return whether the model is an average over samples, with no other inside."""
        averages = [module for module in self.model.modules() if isinstance(module, InvariantModel)]
        return averages == [self.model]

    def n_samples(self) -> int:
        """Return the number of rows that one input becomes."""
        n = 1
        for module in self.model.modules():
            if isinstance(module, InvariantModel):
                n *= module.augmentation.count(module.n_samples)
        return n


def match(root: nn.Module, parameters: Sequence[nn.Parameter], model: nn.Module, x: Any) -> Match:
    """Match parameters with rules, and verify that these explain the gradients of the model.

    Args:
        root: The module whose parameters these are: the model, or its last layer.
        parameters: All parameters of ``root`` that require grad, in their order.
        model: The model that is run.
        x: Inputs to verify the rules on, ``[batch, ...]``; two show whether the batch comes first.

    Raises:
        FloatingPointError: Outputs or gradients of the model are not finite.
        TypeError: The model computes in half precision by itself.
        ValueError: The model does not return ``[batch, outputs]``, or a layer has no gradients.
    """
    entries = {entry.parameter: entry for entry in coverage(root)}
    covered = [entries[parameter] for parameter in parameters]
    with torch.enable_grad(), fixed_draws():
        seen = _look(covered, model, x)
        if seen.has_silent:
            with perturbed(model, x):
                seen = _look(covered, model, x)
    layers, outputs, calls, explained = seen.layers, seen.outputs, seen.calls, seen.explained
    blocks = [explained.get(index) for index in range(len(parameters))]
    covered = [_judged(entry, i in explained) for i, entry in enumerate(covered)]
    others = [index for index, entry in enumerate(covered) if entry.reason is not None]
    return Match(
        model,
        parameters,
        covered,
        layers,
        blocks=blocks,
        others=others,
        objection=_advice(covered) if others else None,
        twins=_find_twins(layers, covered),
        n_inputs=len(outputs),
        n_outputs=outputs.shape[-1],
        size=sum(call.output.numel() for call in calls) // len(outputs) + 1,
        guards=Guards(model),
    )


def _advice(covered: Sequence[Coverage]) -> str:
    """Return which parameters lack Kronecker curvature, why, and what to do."""
    lines = [
        f"  {entry.name} {list(entry.parameter.shape)}: {entry.reason}"
        for entry in covered
        if entry.reason is not None
    ]
    return "\n".join(["no Kronecker curvature for:", *lines, WAYS_OUT])


def _assign(covered: Sequence[Coverage], wanted: Collection[int] | None = None) -> Layers:
    """Return the layers whose calls explain (some) parameters, with the indices of these."""
    layers = Layers({})
    for index, entry in enumerate(covered):
        if entry.reason is not None or (wanted is not None and index not in wanted):
            continue
        for owner in entry.owners:
            own = layers.blocks.setdefault(owner.module, [])
            own.extend((index, block) for block in owner.blocks)
    return layers


@contextmanager
def perturbed(model: nn.Module, x: Any) -> Iterator[None]:
    """Change all parameters a little inside the context, so that no gradient is zero by chance.

    Behind weights that start at zero, wrong rules explain gradients as well as right ones. Weights
    stay as they are if the model has no finite outputs otherwise.

    Raises:
        RuntimeError: If the outputs are not the same afterwards.
    """
    kept = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = model(x)
    try:
        for parameter, before in kept:
            if parameter.is_floating_point():
                size = before.square().mean().sqrt().item() or 1.0
                noise = torch.randn(before.shape, generator=generator).to(before)
                parameter.data.add_(noise, alpha=PERTURBATION * size)
        with torch.no_grad():
            if not torch.isfinite(model(x)).all():
                _put_back(kept)
        yield
    finally:
        _put_back(kept)
    with torch.no_grad():
        same = torch.allclose(model(x), outputs, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not same:
        raise RuntimeError(
            "the model keeps something that it computed from earlier weights, so that its outputs "
            "are not those of its weights; clear what it caches, or do not let it cache"
        )


def _put_back(kept: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, before in kept:
        parameter.data.copy_(before)


def _rehearse(model: nn.Module, layers: Layers, x: Any) -> tuple[Tensor, list[Call]]:
    """Run the model, and once more with copies if it overwrites what its layers saw."""
    with layers.capture() as calls:
        outputs = model(x)
    if any(call.modified() for call in calls):
        layers.copies = True
        with layers.capture() as calls:
            outputs = model(x)
    if outputs.ndim != 2:
        raise ValueError(f"the model must return [batch, outputs], got shape {list(outputs.shape)}")
    if any(tensor.dtype in HALF for tensor in (outputs, *(call.output for call in calls))):
        raise TypeError(
            "the model computes in half precision by itself, which is too coarse for curvature; "
            "take torch.autocast, half() and bfloat16() out of its forward(), and enable autocast "
            "around it where it is trained"
        )
    if not all(call.output.requires_grad for call in calls):
        raise ValueError(
            "a layer ran without gradients, though its weights require them: call "
            "torch.utils.checkpoint with use_reentrant=False, and freeze weights that are used "
            "under torch.no_grad() by requires_grad_(False)"
        )
    return outputs, calls


def _check_finite(model: nn.Module, truth: _Truth) -> None:
    """Raise FloatingPointError unless outputs of a model and their gradients are finite."""
    for what, tensors in {"outputs": [truth.outputs], "gradients": truth.gradients}.items():
        if not all(torch.isfinite(tensor).all() for tensor in tensors):
            raise FloatingPointError(f"the {what} of the model are not finite{_cause(model)}")


def _cause(model: nn.Module) -> str:
    """Return, for a message, why a model does not return finite numbers for finite inputs."""
    tensors = dict(named_hyperparameters(model))
    found = {**dict(model.named_parameters()), **tensors}
    bad = [name for name, tensor in found.items() if not torch.isfinite(tensor).all()]
    if bad:
        return f", as {', '.join(bad)} are not"
    if not tensors:
        return "; check the size of its weights and of its inputs"
    widths = {name: f"{tensor.abs().max().item():.3g}" for name, tensor in tensors.items()}
    words = ", ".join(f"{name} up to {width}" for name, width in widths.items())
    return f"; check the size of its weights, of its inputs and of its ranges ({words})"


@dataclass(frozen=True)
class _Seen:
    """What running a model showed.

    Attributes:
        layers: Layers and further parameters whose uses are captured.
        outputs: Outputs of the model.
        calls: What was captured.
        explained: A block of each parameter whose gradient blocks explain, by index.
        has_silent: Whether the gradient of some parameter is zero, which anything explains.
    """

    layers: Layers
    outputs: Tensor
    calls: list[Call]
    explained: dict[int, AnyBlock]
    has_silent: bool


def _look(covered: Sequence[Coverage], model: nn.Module, x: Any) -> _Seen:
    """Run a model, and look for what rules do not explain outside of layers."""
    layers = _assign(covered)
    outputs, calls = _rehearse(model, layers, x)
    truth = _Truth(outputs, [entry.parameter for entry in covered])
    _check_finite(model, truth)
    explained = _verified(covered, truth, calls)
    layers.blocks = _assign(covered, explained).blocks
    missing = {i: entry for i, entry in enumerate(covered) if i not in explained}
    layers.used = {i: e.parameter for i, e in missing.items() if not e.is_promised}
    if layers.used:
        layers.constants = list(model.buffers())
        outputs, calls = _rehearse(model, layers, x)
        truth = _Truth(outputs, truth.parameters)
        explained = _verified(covered, truth, calls)
        layers.used = {i: p for i, p in layers.used.items() if i in explained}
    return _Seen(layers, outputs, calls, explained, truth.has_silent)


class _Truth:
    """The gradients of a model, input by input, along one direction of its outputs.

    Args:
        outputs: Outputs ``[batch, C]`` of the model.
        parameters: Its parameters.

    Attributes:
        outputs: The same.
        parameters: The same.
        direction: Direction ``[C]``.
        gradients: Gradient ``[batch, numel]`` of each parameter.
        has_silent: Whether one of them is zero.
    """

    def __init__(self, outputs: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        self.outputs = outputs
        self.parameters = parameters
        numbers = torch.arange(1, outputs.shape[-1] + 1, device=outputs.device)
        self.direction = torch.sin(numbers.to(outputs.dtype))
        self.gradients = [outputs.new_empty(len(outputs), p.numel()) for p in parameters]
        for i, row in enumerate(outputs):
            for found, gradient in zip(
                self.gradients, backpropagate(row, parameters, self.direction), strict=True
            ):
                found[i] = gradient.flatten()
        self.has_silent = not torch.stack(list(map(torch.any, self.gradients))).all()


def _judged(entry: Coverage, is_explained: bool) -> Coverage:
    """Return what is known of a parameter now that its gradient was looked at."""
    if is_explained:
        return replace(entry, reason=None)
    where = " and ".join(owner.path or "the model" for owner in entry.owners)
    unexplained = (
        f"calls of {where} do not explain its gradient: it is used outside of them as well, "
        "or the first axis of what they see is not the batch"
    )
    return replace(entry, reason=entry.reason or unexplained)


def _verified(
    covered: Sequence[Coverage], truth: _Truth, calls: Sequence[Call]
) -> dict[int, AnyBlock]:
    """Return a block of each parameter whose gradient, input by input, is what blocks say."""
    blocks: dict[int, AnyBlock] = {}
    for index, entry in enumerate(covered):
        if entry.reason is None:  # a layer that is not called has no curvature
            blocks[index] = entry.owners[0].blocks[0]
    layouts: dict[int, set[tuple[Any, ...]]] = {}
    for call in calls:
        for index, block in call.blocks:
            blocks[index] = block
            layouts.setdefault(index, set()).add(_layout(block))
    different = [index for index, found in layouts.items() if len(found) > 1]
    explained = _explain(truth, calls)
    largest = max(gradient.abs().max() for gradient in truth.gradients)
    tolerance = 10 * torch.finfo(truth.outputs.dtype).eps ** 0.5
    found = {}
    for index in sorted(blocks):
        expected = truth.gradients[index]
        actual = explained.get(index, torch.zeros_like(expected))
        if actual is None or index in different:
            continue
        allowed = tolerance * (expected.abs().max() + 1e-3 * largest)
        if (actual - expected).abs().max() <= allowed:
            found[index] = blocks[index]
    return found


def _layout(block: AnyBlock) -> tuple[Any, ...]:
    """Return that in which all blocks of one parameter must agree."""
    if isinstance(block, ElementwiseBlock):
        return (ElementwiseBlock,)
    return (MatrixBlock, block.transposed, block.slots, block.slotted_columns, block.rows)


def _explain(truth: _Truth, calls: Sequence[Call]) -> dict[int, Tensor | None]:
    """Return the gradients ``[batch, numel]`` that blocks make of calls, None for a mismatch."""
    explained: dict[int, Tensor | None] = {}
    if not calls:
        return explained
    outputs = truth.outputs
    tensors = [call.output for call in calls]
    gradients = backpropagate(outputs, tensors, truth.direction.expand_as(outputs))
    for call, gradient in zip(calls, gradients, strict=True):
        for index, block in call.blocks:
            shape = truth.gradients[index].shape
            before = explained.get(index, outputs.new_zeros(shape))
            explained[index] = None
            if before is not None:
                term = _term(block, call.x, gradient, len(outputs))
                if term is not None and term.shape == shape:
                    explained[index] = before + term
    return explained


def _term(block: AnyBlock, x: Tensor, gradient: Tensor, batch: int) -> Tensor | None:
    """Return the gradient ``[batch, numel]`` that a block makes of a call, None if it cannot.

    A rule that a module inherits may not fit what it sees: inputs and gradients may differ in their
    positions, or nothing works at all.
    """
    try:
        g = block.g(gradient)
        a = g if block.a is None else block.a(x)
        fits = len(a) % batch == len(g) % batch == 0
        if isinstance(block, ElementwiseBlock):
            fits &= a.numel() == g.numel()
        else:
            fits &= a.shape[:-1].numel() == g.shape[:-1].numel()
            fits &= a.ndim == g.ndim and a.shape[2:-1] == g.shape[2:-1]
        return block.gradient_map(x, batch)(gradient) if fits else None
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None


def _find_twins(layers: Layers, covered: Sequence[Coverage]) -> dict[int, int]:
    """Return the weight of each bias that shares its map of gradients, with a layer of its own."""
    twins = {}
    for own in layers.blocks.values():
        weights: dict[Map, int] = {}
        for index, block in own:
            if len(covered[index].owners) > 1:
                continue
            if isinstance(block, MatrixBlock):
                if not block.transposed:
                    weights[block.g] = index
            elif block.a is None and block.g in weights:
                twins[index] = weights[block.g]
    return twins
