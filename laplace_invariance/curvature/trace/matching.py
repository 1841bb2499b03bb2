"""Which layer explains which parameter, verified on the first inputs that a backend sees."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_invariance.curvature.rules import AnyBlock, Map, MatrixBlock
from laplace_invariance.curvature.trace.calls import Call, Layers
from laplace_invariance.curvature.trace.coverage import Coverage, coverage
from laplace_invariance.curvature.trace.explaining import Truth, verified
from laplace_invariance.curvature.trace.guards import Guards
from laplace_invariance.draws import fixed_draws
from laplace_invariance.hyper import hyperparameters, named_hyperparameters
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.precision import HALF

__all__ = ["Match", "match"]


PERTURBATION = 0.05  # of parameters, relative to their size, while rules are verified

WAYS_OUT = (
    "Ways out: backend_kwargs={'on_unsupported': 'diag'} uses their exact diagonal instead (one "
    "input at a time, hence slow); register_rule teaches the backend a layer in a few lines; "
    "requires_grad_(False) leaves a parameter out of the posterior; hessian_structure='diag' or "
    "'full' needs no rule. laplace_invariance.curvature.check_model(model, x) shows all."
)


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


def _check_finite(model: nn.Module, truth: Truth) -> None:
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
    truth = Truth(outputs, [entry.parameter for entry in covered])
    _check_finite(model, truth)
    explained = verified(covered, truth, calls)
    layers.blocks = _assign(covered, explained).blocks
    missing = {i: entry for i, entry in enumerate(covered) if i not in explained}
    layers.used = {i: e.parameter for i, e in missing.items() if not e.is_promised}
    if layers.used:
        layers.constants = list(model.buffers())
        outputs, calls = _rehearse(model, layers, x)
        truth = Truth(outputs, truth.parameters)
        explained = verified(covered, truth, calls)
        layers.used = {i: p for i, p in layers.used.items() if i in explained}
    return _Seen(layers, outputs, calls, explained, truth.has_silent)


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
