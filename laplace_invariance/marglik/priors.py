"""Prior precisions and observation noise, which the evidence learns beside hyperparameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace_invariance.layers.residual import ResidualPathway
from laplace_invariance.marglik.settings import PriorSettings

__all__ = ["Priors", "grouping", "last_layer_of"]

STRUCTURES = ("scalar", "layerwise", "diag", "path")

# The search for the best priors on one decomposition.
MOST_ITERATIONS = 100
SMALL_GAIN = 1e-7  # share of the evidence by which an iteration raises it, after which it ends
ROUGH_GAIN = 1e-5  # the same, while weights are trained
LEAST_FREE = 1e-3  # share of targets that weights leave free for the noise
MOST_CHANGE = 3.0  # of a logarithm in an iteration
LEAST_DETERMINED = 1e-3  # of the weights that share a precision, for it to change
TINY = 1e-8
MOST_LOGARITHM = 20.0  # in magnitude, of what has no maximum


def grouping(model: nn.Module, structure: str | Sequence[str]) -> dict[str, str]:
    """Return the name of every trainable tensor's group, by name of the tensor.

    The tensors of a group share one prior precision. With ``"diag"``, under which every number has
    its own, there are no groups, and nothing is returned.

    Args:
        model: Model whose parameters are grouped.
        structure: One of ``"scalar"``, ``"layerwise"``, ``"diag"`` and ``"path"``, or regular
            expressions that match whole names; see :func:`~laplace_invariance.marglik_training`.

    Raises:
        TypeError: If the structure is neither a name nor a list of regular expressions.
        ValueError: If there is no such structure, or a pattern is wrong or has nothing to match.
    """
    names = _trainable_names(model)
    if structure == "diag":
        return {}
    if structure == "scalar":
        return dict.fromkeys(names, "all")
    if structure == "layerwise":
        return {name: name for name in names}
    if structure == "path":
        return _by_path(model, names)
    if isinstance(structure, str):
        raise ValueError(
            f"prior_structure must be one of {', '.join(map(repr, STRUCTURES))} or a list of "
            f"regular expressions, got {structure!r}; a pattern goes into a list: [{structure!r}]"
        )
    is_list = isinstance(structure, Sequence)
    if not is_list or not all(isinstance(pattern, str) for pattern in structure):
        raise TypeError(
            f"prior_structure must be a name or a list of regular expressions, got {structure!r}"
        )
    return _by_pattern(structure, names)


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _trainable_names(model: nn.Module) -> list[str]:
    return [name for name, _ in _trainable(model)]


def _by_path(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Group by the innermost path of a ``ResidualPathway``; other tensors are groups of one.

    So are those that a module on a path declares in ``own_prior_parameters``, because their size
    says nothing about how much of the path is used.
    """
    paths: list[str] = []
    alone: set[str] = set()
    for place, module in model.named_modules():
        prefix = f"{place}." if place else ""
        if isinstance(module, ResidualPathway):
            paths += [prefix + child for child in module.paths]
        alone.update(prefix + name for name in getattr(module, "own_prior_parameters", ()))
    groups = {}
    for name in names:
        around = [path for path in paths if name.startswith(f"{path}.")]
        if name in alone or not around:
            groups[name] = name
        else:
            groups[name] = max(around, key=len)
    return groups


def _by_pattern(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Group by the first pattern that matches and what it captures; the rest are groups of one."""
    groups = {name: name for name in names}
    for name, match in _first_matches("prior_structure", patterns, names).items():
        groups[name] = match.re.pattern
        if match.groups():
            groups[name] += f" ({', '.join(map(str, match.groups()))})"
    return groups


def _first_matches(
    what: str, patterns: Sequence[str], names: Sequence[str]
) -> dict[str, re.Match[str]]:
    """Return the match of the first pattern that matches each whole name.

    Raises:
        ValueError: If a pattern is no regular expression, or not the first to match any name.
    """
    found: dict[str, re.Match[str]] = {}
    for pattern in patterns:
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{what} has {pattern!r}, which is no regular expression: {error}"
            ) from error
        matches = {name: match for name in names if (match := expression.fullmatch(name))}
        if not matches.keys() - found.keys():
            why = "no whole name of a trainable parameter"
            if matches:
                why = "only what patterns before it match; put it before them"
            raise ValueError(
                f"{what} has {pattern!r}, which matches {why}; "
                f"the parameters are {', '.join(names)}"
            )
        found = matches | found
    return found


def _initial_precisions(
    precision: float | Mapping[str, float], names: Sequence[str]
) -> dict[str, float]:
    """Return the initial precision of each tensor; 1 where no pattern matches its name."""
    if not isinstance(precision, Mapping):
        return dict.fromkeys(names, precision)
    for pattern, value in precision.items():
        if not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"prior_prec_init must be positive and finite, got {value!r} for {pattern!r}"
            )
    initial = dict.fromkeys(names, 1.0)
    for name, match in _first_matches("prior_prec_init", list(precision), names).items():
        initial[name] = precision[match.re.pattern]
    return initial


def _per_group(initial: dict[str, float], groups: dict[str, str]) -> list[float]:
    """Return the initial precision of each group; raise unless its tensors agree."""
    found: dict[str, float] = {}
    for name, value in initial.items():
        if found.setdefault(groups[name], value) != value:
            raise ValueError(
                f"{name} shares its prior precision with tensors for which prior_prec_init has "
                f"another value than {value:g}; give one value for all that share, e.g. by "
                "closed_paths(model, shared=True)"
            )
    return list(found.values())


def _weighted_squares(parameters: Collection[Tensor], precision: Tensor) -> Tensor:
    """Return ``theta^T P theta`` for one precision, one per tensor, or one per number."""
    if len(precision) in (1, len(parameters)):  # without copies of all weights
        norms = torch.stack([p.flatten().dot(p.flatten()) for p in parameters])
        return (precision * norms).sum()
    theta = parameters_to_vector(parameters)
    return (precision * theta) @ theta


def last_layer_of(model: nn.Module, x: Any) -> str:
    """Return the name of the layer that laplace takes for the last one.

    Args:
        model: Any module that ends with a linear layer.
        x: Inputs of a batch.

    Raises:
        ValueError: If the last module that is called is not linear.
    """
    extractor = FeatureExtractor(deepcopy(model).eval())
    with torch.no_grad():
        extractor.find_last_layer(x)
    return extractor._last_layer_name


class Priors:
    """Log prior precisions of the weights and, for regression, the log noise, with their optimiser.

    Args:
        model: Model whose trainable parameters have the prior.
        settings: Structure, initial values and step size.
        temperature: Temperature of the likelihood, as in laplace.
        has_noise: Whether the likelihood has observation noise, as that of a regression.
        last_layer: Name of the last layer, if the prior of its weights alone is learnt.

    Attributes:
        last_layer: The same.
        log_precision: Logarithms ``[groups]``, or ``[parameters]`` with ``"diag"``; learnt.
        log_noise: Logarithm ``[1]`` of the standard deviation of the noise; None without noise.
        learnt: Those of the two that are learnt.
        grouping: Name of every tensor's group, by name of the tensor; empty with ``"diag"``.
        groups: Names of the groups, in the order of ``log_precision``.
        optimizer: Optimiser of what is learnt.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: PriorSettings,
        temperature: float,
        has_noise: bool,
        last_layer: str | None = None,
    ) -> None:
        self._model = model
        self.last_layer = last_layer
        self._temperature = temperature
        self.grouping = grouping(model, settings.prior_structure)
        self._parameters = dict(_trainable(model))
        self._fixed: dict[str, nn.Parameter] = {}
        if last_layer is not None:
            self._leave_out_all_but(last_layer, settings.prior_structure)
        self.groups = list(dict.fromkeys(self.grouping.values()))
        first = next(iter(self._parameters.values()))
        initial = _initial_precisions(settings.prior_prec_init, _trainable_names(model))
        self._fixed_precision = temperature * first.new_tensor([initial[n] for n in self._fixed])
        self._initial = initial
        self.log_precision = self._initial_logarithms(initial, first)
        self.log_precision.requires_grad_()
        self.learnt = [self.log_precision]
        self.log_noise: Tensor | None = None
        if has_noise:
            self.log_noise = torch.full((1,), math.log(settings.sigma_noise_init)).to(first)
            self.log_noise.requires_grad_(not settings.fix_sigma_noise)
        if self.log_noise is not None and self.log_noise.requires_grad:
            self.learnt.append(self.log_noise)
        self.optimizer = torch.optim.Adam(self.learnt, lr=settings.lr_hyp)
        # laplace takes one precision for all, but otherwise wants one for every tensor
        self._group_of_tensor: Tensor | None = None
        if self.groups and last_layer is None and settings.prior_structure != "scalar":
            places = [self.groups.index(group) for group in self.grouping.values()]
            self._group_of_tensor = torch.tensor(places, device=first.device)

    def _leave_out_all_but(self, layer: str, structure: str | Sequence[str]) -> None:
        """Learn one precision for the tensors of a layer, or one for every number in it."""
        if structure not in ("scalar", "layerwise", "diag"):
            raise ValueError(
                "prior_structure must be 'scalar', 'layerwise' or 'diag' for the last layer, "
                f"got {structure!r}"
            )
        mine = {n: p for n, p in self._parameters.items() if n.startswith(f"{layer}.")}
        frozen = [p for p in self._model.get_submodule(layer).parameters() if not p.requires_grad]
        if frozen:
            raise ValueError(
                f"the last layer, {layer}, has parameters that do not require grad; the Laplace "
                "approximation of the last layer is of all of them"
            )
        self._fixed = {n: p for n, p in self._parameters.items() if n not in mine}
        self._parameters = mine
        if self.grouping:
            self.grouping = dict.fromkeys(mine, layer)

    def _initial_logarithms(self, initial: dict[str, float], like: Tensor) -> Tensor:
        own = {name: initial[name] for name in self._parameters}
        each_alone = {name: name for name in own}
        values = _per_group(own, self.grouping or each_alone)
        found = like.new_tensor([math.log(self._temperature * value) for value in values])
        if self.grouping:
            return found
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        return found.repeat_interleave(torch.tensor(sizes, device=like.device))

    @torch.no_grad()
    def start_from(self, precisions: Mapping[str, float]) -> None:
        """Start from other precisions of some tensors; others have those of the settings.

        Args:
            precisions: Initial precisions by name of the tensor.

        Raises:
            ValueError: If tensors that share a precision would have several.
        """
        initial = self._initial | dict(precisions)
        self.log_precision.copy_(self._initial_logarithms(initial, self.log_precision))

    @property
    def precision(self) -> Tensor:
        """Prior precisions as laplace takes them: one, or one per tensor or parameter."""
        values = self.log_precision.exp()
        if self._group_of_tensor is None:
            return values
        return values[self._group_of_tensor]

    def maximise(
        self,
        evidence: Callable[[Tensor, Tensor | None], Tensor],
        n_targets: int,
        roughly: bool = False,
    ) -> list[float]:
        """Take what is learnt to the maximum of the evidence, the curvature being constant.

        By fixed points: a precision is the number of weights that the data determine, divided by
        the sum of their squares; the variance of noise is the squared error, divided by the number
        of targets less that of all determined weights.

        Args:
            evidence: Evidence as a function of precisions and noise, as laplace takes them.
            n_targets: Number of training examples times that of outputs.
            roughly: Whether to end sooner, as the curvature will change anyway.

        Returns:
            The evidence before each iteration. The last one is not finite if it, or its gradient,
            was not; what is learnt is then as it was before.
        """
        start = [tensor.detach().clone() for tensor in self.learnt]
        found: list[float] = []
        squares = self._squares()
        small_gain = ROUGH_GAIN if roughly else SMALL_GAIN
        for _ in range(MOST_ITERATIONS):
            value = evidence(self.precision, self.noise)
            gradients = torch.autograd.grad(value, self.learnt)
            if not all(torch.isfinite(tensor).all() for tensor in (value, *gradients)):
                self._set_learnt(start)
                return [*found, math.nan]
            found.append(value.item())
            if len(found) > 1 and found[-1] - found[-2] < small_gain * abs(found[-1]):
                break
            changes = self._changes(gradients, squares, n_targets)
            for tensor, change in zip(self.learnt, changes, strict=True):
                tensor.data.add_(change).clamp_(-MOST_LOGARITHM, MOST_LOGARITHM)
        return found

    @torch.no_grad()
    def _set_learnt(self, values: Sequence[Tensor]) -> None:
        for tensor, value in zip(self.learnt, values, strict=True):
            tensor.copy_(value)

    def _squares(self) -> Tensor:
        """Return the sum of squares of the weights that share each precision."""
        weights = [parameter.detach() for parameter in self._parameters.values()]
        if not self.groups:
            return parameters_to_vector(weights).square()
        sums = torch.stack([weight.square().sum() for weight in weights])
        if self._group_of_tensor is None:
            return sums.sum().unsqueeze(0)
        return torch.zeros_like(self.log_precision).index_add(0, self._group_of_tensor, sums)

    @torch.no_grad()
    def _changes(
        self, gradients: Sequence[Tensor], squares: Tensor, n_targets: int
    ) -> list[Tensor]:
        """Return the change of every logarithm towards its fixed point."""
        scatter = squares * self.log_precision.exp()
        # The derivative in a log precision is (determined - scatter) / 2,
        determined = (2 * gradients[0] + scatter).clamp(min=0)
        change = torch.log((determined + TINY) / (scatter + TINY))
        # without any curvature there is no maximum but at zero
        changes = [change.where(determined > LEAST_DETERMINED, torch.zeros_like(change))]
        if len(gradients) > 1:
            # that in the log noise is squared error / variance - free.
            free = (n_targets - determined.sum()).clamp(min=LEAST_FREE * n_targets)
            error = (n_targets - determined.sum() + gradients[1]).clamp(min=0)
            changes.append(torch.log((error + TINY) / (free + TINY)) / 2)
        return [change.clamp(-MOST_CHANGE, MOST_CHANGE) for change in changes]

    def named(self) -> dict[str, float]:
        """Return the prior precisions by name of their group; nothing with ``"diag"``."""
        if not self.groups:
            return {}
        return dict(zip(self.groups, self.log_precision.detach().exp().tolist(), strict=True))

    @property
    def noise(self) -> Tensor | None:
        """Standard deviation ``[1]`` of the noise, differentiable if learnt; None without noise."""
        if self.log_noise is None:
            return None
        return self.log_noise.exp()

    def penalty(self, n_data: int) -> Tensor:
        """Return the negative log prior of the weights, to be added to the mean loss of a datum.

        Args:
            n_data: Number of training examples.
        """
        weighted = _weighted_squares(self._parameters.values(), self.precision.detach())
        if self._fixed:
            weighted = weighted + _weighted_squares(self._fixed.values(), self._fixed_precision)
        return (0.5 * weighted / n_data / self.loss_scale).squeeze()

    @property
    def loss_scale(self) -> float | Tensor:
        """Factor from the loss of a datum in training to its negative log likelihood."""
        if self.noise is None:
            return self._temperature
        return self._temperature / (2 * self.noise.detach().square())

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tensors whose prior precisions are learnt, in the order of the model."""
        return list(self._parameters.values())

    def values(self) -> dict[str, Tensor]:
        """Return copies of the logarithms."""
        found = {"log_precision": self.log_precision.detach().clone()}
        if self.log_noise is not None:
            found["log_noise"] = self.log_noise.detach().clone()
        return found

    @torch.no_grad()
    def set_values(self, values: dict[str, Tensor]) -> None:
        """Put back logarithms that :meth:`values` returned."""
        for name, value in values.items():
            getattr(self, name).copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return the logarithms and the state of the optimiser."""
        return {"values": self.values(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back a state that :meth:`state_dict` returned."""
        self.set_values(state["values"])
        self.optimizer.load_state_dict(state["optimizer"])
