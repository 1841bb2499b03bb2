"""Which layer explains which parameter, verified on the first inputs that a backend sees."""

from __future__ import annotations

from collections.abc import Sequence
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
)
from laplace_invariance.curvature.trace.calls import Call, Layers, backpropagate
from laplace_invariance.curvature.trace.guards import Guards
from laplace_invariance.draws import fixed_draws
from laplace_invariance.hyper import hyperparameters
from laplace_invariance.invariant import InvariantModel

__all__ = ["Coverage", "Match", "Owner", "coverage", "match"]


WAYS_OUT = (
    "Ways out: backend_kwargs={'on_unsupported': 'diag'} uses their exact diagonal instead (one "
    "input at a time, hence slow); register_rule teaches the backend a layer in a few lines; "
    "requires_grad_(False) leaves a parameter out of the posterior; hessian_structure='diag' or "
    "'full' needs no rule. laplace_invariance.curvature.check_model(model) shows the whole table."
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
        layers: Layers to capture.
        blocks: Block of each parameter, None for one without a rule.
        others: Indices of parameters without a rule, which autograd differentiates.
        objection: Which parameters lack a rule, why, and what to do; None if none does.
        twins: For a bias whose gradients are those of the weight matrix of the same layer,
            summed over its positions, the index of the weight, which is smaller.
        n_inputs: Number of inputs that this was verified on.
        n_outputs: Number of outputs of the model.
        size: Number of elements of all captured layers' outputs, per input.
        guards: Guards of the weights and of backward passes.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
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
        ValueError: The model does not return ``[batch, outputs]``.
    """
    entries = {entry.parameter: entry for entry in coverage(root)}
    covered = [entries[parameter] for parameter in parameters]
    layers = _assign(covered)
    with torch.enable_grad(), fixed_draws():
        outputs, calls = _rehearse(model, layers, x)
        unexplained = _verify(covered, outputs, calls)
    for index in unexplained:
        where = " and ".join(owner.path or "the model" for owner in covered[index].owners)
        reason = (
            f"calls of {where} do not explain its gradient: it is used outside of them as well, "
            "or the first axis of what they see is not the batch"
        )
        covered[index] = replace(covered[index], reason=reason)
    others = [index for index, entry in enumerate(covered) if entry.reason is not None]
    return Match(
        model,
        parameters,
        layers,
        blocks=_prune(layers, covered),
        others=others,
        objection=_advice(covered) if others else None,
        twins=_find_twins(layers, covered),
        n_inputs=len(outputs),
        n_outputs=outputs.shape[-1],
        size=sum(call.output.numel() for call in calls) // len(outputs) + 1,
        guards=Guards(parameters),
    )


def _advice(covered: Sequence[Coverage]) -> str:
    """Return which parameters lack Kronecker curvature, why, and what to do."""
    lines = [
        f"  {entry.name} {list(entry.parameter.shape)}: {entry.reason}"
        for entry in covered
        if entry.reason is not None
    ]
    return "\n".join(["no Kronecker curvature for:", *lines, WAYS_OUT])


def _assign(covered: Sequence[Coverage]) -> Layers:
    """Return the layers whose calls explain parameters, with the indices of these."""
    layers = Layers({})
    for index, entry in enumerate(covered):
        if entry.reason is not None:
            continue
        for owner in entry.owners:
            own = layers.blocks.setdefault(owner.module, [])
            own.extend((index, block) for block in owner.blocks)
    return layers


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
    return outputs, calls


def _verify(covered: Sequence[Coverage], outputs: Tensor, calls: Sequence[Call]) -> list[int]:
    """Return the covered parameters whose gradient, input by input, is not what blocks say."""
    supported = {i: entry.parameter for i, entry in enumerate(covered) if entry.reason is None}
    if not supported:
        return []
    direction = torch.sin(torch.arange(1, outputs.shape[-1] + 1).to(outputs))
    truth = [backpropagate(row, list(supported.values()), direction) for row in outputs]
    explained = _explain(supported, outputs, calls, direction)
    largest = max(gradient.abs().max() for row in truth for gradient in row)
    tolerance = 10 * torch.finfo(outputs.dtype).eps ** 0.5
    wrong = []
    for position, index in enumerate(supported):
        expected = torch.stack([row[position].flatten() for row in truth])
        actual = explained.get(index, torch.zeros_like(expected))
        allowed = tolerance * (expected.abs().max() + 1e-3 * largest)
        if actual is None or (actual - expected).abs().max() > allowed:
            wrong.append(index)
    return wrong


def _explain(
    parameters: dict[int, nn.Parameter], outputs: Tensor, calls: Sequence[Call], direction: Tensor
) -> dict[int, Tensor | None]:
    """Return the gradients ``[batch, numel]`` that blocks make of calls, None for a mismatch."""
    explained: dict[int, Tensor | None] = {}
    if not calls:
        return explained
    tensors = [call.output for call in calls]
    gradients = backpropagate(outputs, tensors, direction.expand_as(outputs))
    for call, gradient in zip(calls, gradients, strict=True):
        for index, block in call.blocks:
            shape = (len(outputs), parameters[index].numel())
            before = explained.get(index, outputs.new_zeros(shape))
            explained[index] = None
            if before is not None and _fits(block, call.x, gradient, len(outputs)):
                term = block.gradient_map(call.x, len(outputs))(gradient)
                explained[index] = before + term if term.shape == shape else None
    return explained


def _fits(block: AnyBlock, x: Tensor, gradient: Tensor, batch: int) -> bool:
    """Return whether input and gradient of a call have the same positions, for each input."""
    g = block.g(gradient)
    a = g if block.a is None else block.a(x)
    if len(a) % batch or len(g) % batch:
        return False
    if isinstance(block, ElementwiseBlock):
        return a.numel() == g.numel()
    same_positions = a.shape[:-1].numel() == g.shape[:-1].numel()
    return same_positions and a.ndim == g.ndim and a.shape[2:-1] == g.shape[2:-1]


def _prune(layers: Layers, covered: Sequence[Coverage]) -> list[AnyBlock | None]:
    """Forget blocks that explain nothing, and return the block of every parameter."""
    for module, own in list(layers.blocks.items()):
        kept = [(index, block) for index, block in own if covered[index].reason is None]
        layers.blocks[module] = kept
        if not kept:
            del layers.blocks[module]
    blocks: list[AnyBlock | None] = []
    for entry in covered:
        blocks.append(entry.owners[0].blocks[0] if entry.reason is None else None)
    return blocks


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
