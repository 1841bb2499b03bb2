"""Prior precisions and observation noise: what the evidence moves beside the hyperparameters of modules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from laplace.utils import expand_prior_precision, fix_prior_prec_structure
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace_invariance.layers.residual import ResidualPathway

__all__ = ["Priors", "grouping"]

OF_LAPLACE = ("scalar", "layerwise", "diag")


def grouping(model: nn.Module, structure: str | Sequence[str]) -> dict[str, str]:
    """Return the name of every trainable tensor's group, by name of the tensor; a group shares one prior precision.

    Args:
        model: whose parameters are grouped.
        structure: ``"path"``, or regular expressions that match whole names; see
            :func:`~laplace_invariance.marglik_training`.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if isinstance(structure, str):
        if structure != "path":
            raise ValueError(
                f"prior_structure must be one of {', '.join(map(repr, (*OF_LAPLACE, 'path')))} or a list of regular "
                f"expressions, got {structure!r}; a pattern goes into a list: [{structure!r}]"
            )
        return _by_path(model, names)
    if not isinstance(structure, Sequence) or not all(
        isinstance(pattern, str) for pattern in structure
    ):
        raise TypeError(
            f"prior_structure must be a name or a list of regular expressions, got {structure!r}"
        )
    return _by_pattern(structure, names)


def _by_path(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Group by the innermost path of a ``ResidualPathway``; tensors outside of paths are groups of one."""
    paths = [
        f"{name}.{child}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, ResidualPathway)
        for child in module.paths
    ]
    return {
        # the width of basis functions says nothing about how much of a path is used
        name: name
        if name.endswith(".omega")
        else max((p for p in paths if name.startswith(f"{p}.")), key=len, default=name)
        for name in names
    }


def _first_matches(
    what: str, patterns: Sequence[str], names: Sequence[str]
) -> dict[str, tuple[str, re.Match]]:
    """Return the first pattern that matches the whole of each name, and the match; a pattern without any is refused."""
    found: dict[str, tuple[str, re.Match]] = {}
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{what} has {pattern!r}, which is no regular expression: {error}"
            ) from error
        matches = {name: match for name in names if (match := expression.fullmatch(name))}
        if not matches.keys() - found.keys():
            why = "only what patterns before it match; put it before them"
            why = why if matches else "no whole name of a trainable parameter"
            raise ValueError(
                f"{what} has {pattern!r}, which matches {why}; the parameters are {', '.join(names)}"
            )
        found = {name: (pattern, match) for name, match in matches.items()} | found
    return found


def _by_pattern(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Group by the first pattern that matches and what it captures; tensors that none matches are groups of one."""
    groups = {name: name for name in names}
    for name, (pattern, match) in _first_matches("prior_structure", patterns, names).items():
        groups[name] = (
            f"{pattern} ({', '.join(map(str, match.groups()))})" if match.groups() else pattern
        )
    return groups


def _by_name(values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the value of the first pattern that matches each name, or 1."""
    for pattern, value in values.items():
        if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"prior_prec_init must be positive and finite, got {value!r} for {pattern!r}"
            )
    matched = _first_matches("prior_prec_init", list(values), names)
    return {name: float(values[matched[name][0]]) if name in matched else 1.0 for name in names}


class Priors:
    """Log prior precisions of the trainable parameters and, for regression, the log noise, with their optimiser.

    Args:
        model: whose parameters have the prior.
        structure: ``"scalar"``, ``"layerwise"`` (one per tensor) or ``"diag"``, as in laplace; or what
            :func:`grouping` takes.
        precision: initial prior precision; or one for each regular expression, which matches whole names of tensors, the first
            that matches counts, and 1 for the rest.
        noise: initial standard deviation of the observation noise; None where the likelihood has none.
        learn_noise: whether it is learnt.
        temperature: of the likelihood, as in laplace.
        lr: step size of Adam.

    Attributes:
        log_precision: one per group.
        groups: names of the groups; empty for ``"diag"``.
        grouping: name of every tensor's group, by name of the tensor; None for structures of laplace.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: str | Sequence[str],
        precision: float | Mapping[str, float],
        noise: float | None,
        learn_noise: bool,
        temperature: float,
        lr: float,
    ) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._temperature = temperature
        first = self._parameters[0]
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        sizes = len(self._parameters), sum(p.numel() for p in self._parameters)
        start = math.log(temperature * (1.0 if isinstance(precision, Mapping) else precision))
        structure = getattr(structure, "value", structure)  # laplace has an enumeration, too
        if structure in OF_LAPLACE:
            self.groups = {"scalar": ["all"], "layerwise": names, "diag": []}[structure]
            self.grouping, self._index = None, None
            self.log_precision = fix_prior_prec_structure(
                start, structure, *sizes, first.device, first.dtype
            )
        else:
            self.grouping = grouping(model, structure)
            self.groups = list(dict.fromkeys(self.grouping.values()))
            places = {group: place for place, group in enumerate(self.groups)}
            self._index = torch.tensor(
                [places[group] for group in self.grouping.values()], device=first.device
            )
            self.log_precision = torch.full(
                (len(self.groups),), start, device=first.device, dtype=first.dtype
            )
        if isinstance(precision, Mapping):
            self._start_at(_by_name(precision, names))
        self.log_precision.requires_grad_()
        self.log_noise = (
            None
            if noise is None
            else torch.full((1,), math.log(noise)).to(first).requires_grad_(learn_noise)
        )
        self.learnt = [
            t for t in (self.log_precision, self.log_noise) if t is not None and t.requires_grad
        ]
        self.optimizer = torch.optim.Adam(self.learnt, lr=lr)

    def _start_at(self, precisions: dict[str, float]) -> None:
        """Set the initial precision of every tensor; tensors that share one must agree."""
        values = torch.tensor(
            [math.log(self._temperature * value) for value in precisions.values()]
        )
        values = values.to(self.log_precision)
        if self.groups:
            count = len(self.log_precision)
            index = (
                torch.arange(len(values))
                if count == len(values)
                else torch.zeros(len(values), dtype=torch.long)
            )
            index = index.to(values.device) if self._index is None else self._index
            self.log_precision[index] = values
            different = [name for name, kept, wanted in zip(precisions, self.log_precision[index], values, strict=True)
                         if kept != wanted]  # fmt: skip
            if different:
                raise ValueError(
                    f"{different[0]} shares its prior precision with tensors for which prior_prec_init has another value than "
                    f"{precisions[different[0]]:g}; give one value for all that share, e.g. by closed_paths(model, shared=True)"
                )
        else:
            sizes = [parameter.numel() for parameter in self._parameters]
            self.log_precision.copy_(
                values.repeat_interleave(torch.tensor(sizes, device=values.device))
            )

    @property
    def precision(self) -> Tensor:
        """The prior precisions as laplace takes them, one, or one per tensor or parameter; differentiable."""
        values = self.log_precision.exp()
        return values if self._index is None else values[self._index]

    def named(self) -> dict[str, float]:
        """Return the prior precisions by name of their group; nothing if every parameter has its own."""
        return (
            dict(zip(self.groups, self.log_precision.detach().exp().tolist(), strict=True))
            if self.groups
            else {}
        )

    @property
    def noise(self) -> Tensor | None:
        """The standard deviation of the noise, differentiable if learnt; None for classification."""
        return None if self.log_noise is None else self.log_noise.exp()

    def penalty(self, n_data: int) -> Tensor:
        """Return the negative log prior, scaled to be added to the mean loss of a datum."""
        scale = (
            self._temperature
            if self.noise is None
            else self._temperature / (2 * self.noise.detach().square())
        )
        precision = self.precision.detach()
        if len(precision) in (1, len(self._parameters)):  # without copies of all weights
            norms = torch.stack([p.flatten().dot(p.flatten()) for p in self._parameters])
            weighted = (precision * norms).sum()
        else:
            theta = parameters_to_vector(self._parameters)
            weighted = (expand_prior_precision(precision, self._model) * theta) @ theta
        return (0.5 * weighted / n_data / scale).squeeze()

    def values(self) -> dict[str, Tensor]:
        """Return detached copies of the logarithms."""
        tensors = {"log_precision": self.log_precision, "log_noise": self.log_noise}
        return {
            name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None
        }

    @torch.no_grad()
    def set_values(self, values: dict[str, Tensor]) -> None:
        """Put such copies back."""
        for name, value in values.items():
            getattr(self, name).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_values(state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
