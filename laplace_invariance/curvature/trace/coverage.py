"""Which modules own a parameter, and what their rules say of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from laplace_invariance.curvature.rules import AnyBlock, blocks_of, rules

__all__ = ["Coverage", "Owner", "coverage"]


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
