"""Plan curvature before training: which options fit into memory, and what they cost."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from laplace.utils import FeatureExtractor
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.curvature.backend import AugmentedCurvature
from laplace_invariance.curvature.ggn import AugmentedGGN
from laplace_invariance.curvature.names import AnyBackend, find_backend
from laplace_invariance.curvature.trace.chunks import part_of
from laplace_invariance.hyper import hyperparameters
from laplace_invariance.marglik.plans.results import Choice, Plan, in_bytes, in_seconds
from laplace_invariance.marglik.plans.simulate import Batch, footprint, training_step
from laplace_invariance.marglik.priors import last_layer_of
from laplace_invariance.modes import evaluation

__all__ = ["plan"]

LONG = 60  # seconds from which a decomposition is warned of
MOST_FULL = 50_000  # weights up to which a full curvature is an option
ONE_RANDOM = {"stochastic": True, "num_samples": 1}
HYBRID = {"output_rank": 2, **ONE_RANDOM}
COLUMNS = ("output_rank", "stochastic", "num_samples")


@dataclass(frozen=True)
class _Option:
    """A row of the table: its name, and the arguments of training that it stands for."""

    name: str
    structure: str
    options: dict[str, Any]
    subset: str = "all"


def plan(
    model: nn.Module,
    loader: DataLoader,
    likelihood: str = "classification",
    *,
    hessian_structure: str | None = None,
    subset_of_weights: str | None = None,
    backend: AnyBackend = AugmentedGGN,
    backend_kwargs: dict[str, Any] | None = None,
    memory: int | None = None,
    dict_key_x: str = "input_ids",
    dict_key_y: str = "labels",
) -> Plan:
    """Return what curvature takes in memory and time, before anything is trained.

    The library's own code runs on shapes alone, one chunk of a batch of each option, and what it
    would allocate and compute is counted. Only two inputs pass through the model with numbers,
    those on which its layers are matched with rules. Memory is that of a fit and of the gradient of
    its evidence, beyond model and data, while freed memory is returned; an allocator that keeps it
    holds more.

    Args:
        model: Network with outputs ``[batch, outputs]``, such as an ``InvariantModel``.
        loader: Loader of the training data, of which one batch is drawn.
        likelihood: Either ``"classification"`` or ``"regression"``.
        hessian_structure: ``"kron"``, ``"diag"`` or ``"full"``; None plans all.
        subset_of_weights: ``"all"`` or ``"last_layer"``; None plans both.
        backend: Curvature backend of :mod:`laplace_invariance.curvature`, or its name.
        backend_kwargs: Options of the backend for all that is planned. With a choice of columns
            (``stochastic``, ``num_samples``, ``output_rank``) no others are planned.
        memory: Budget in bytes; None is what is available on the device of the model.
        dict_key_x: Key of the inputs, if the loader yields mappings.
        dict_key_y: Key of the targets, if the loader yields mappings.

    Raises:
        TypeError: ``backend`` is not one of ours.
        ValueError: An argument has a value that is not known, or the loader has no batch.
        NotImplementedError: A parameter has no Kronecker curvature; it says which, and why.

    Warns:
        UserWarning: A decomposition of the first option is expected to take minutes.
    """
    ours = _ours(backend)
    _check(hessian_structure, subset_of_weights, memory)
    keys = {"dict_key_x": dict_key_x, "dict_key_y": dict_key_y}
    with evaluation(model), torch.random.fork_rng(devices=[]):
        batch = _first_batch(model, loader, **keys)
        own = deepcopy(model)  # layers may keep what they computed, here of shapes alone
        planner = _Planner(own, likelihood, ours, dict(backend_kwargs or {}), keys, batch)
        options = planner.options(hessian_structure, subset_of_weights)
        choices = tuple(choice for option in options for choice in planner.choices(option))
        if memory is None:
            memory = _available(next(model.parameters()).device)
        recommended = planner.fitted(choices, memory)
    if not choices:
        raise ValueError("no option is left to plan")
    if choices[0].seconds >= LONG:
        warnings.warn(_warning(choices[0]), stacklevel=2)
    text = _recommendation(choices, memory, recommended)
    return Plan(choices, planner.step.peak, memory, text, recommended)


def _ours(backend: AnyBackend) -> type[AugmentedCurvature]:
    found = find_backend(backend)
    if not issubclass(found, AugmentedCurvature):
        raise TypeError(f"only backends such as AugmentedGGN can be planned, got {found.__name__}")
    return found


def _check(structure: str | None, subset: str | None, memory: int | None) -> None:
    if structure not in (None, "kron", "diag", "full"):
        raise ValueError(f"hessian_structure must be 'kron', 'diag' or 'full', got {structure!r}")
    if subset not in (None, "all", "last_layer"):
        raise ValueError(f"subset_of_weights must be 'all' or 'last_layer', got {subset!r}")
    if memory is not None and memory <= 0:
        raise ValueError(f"memory must be a positive number of bytes, got {memory}")


def _first_batch(model: nn.Module, loader: DataLoader, dict_key_x: str, dict_key_y: str) -> Batch:
    """Return the first batch, on the device of the model."""
    data = next(iter(loader), None)
    if data is None:
        raise ValueError("the loader has no batch")
    device = next(model.parameters()).device
    n_data, n_batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    if isinstance(data, MutableMapping):
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in data.items()}
        return Batch(type(data)(moved), moved[dict_key_y], n_data, n_batches)  # type: ignore[call-arg]
    x, y = data
    return Batch(x.to(device), y.to(device), n_data, n_batches)


class _Planner:
    """Runs options of one model on the shapes of one batch."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        backend: type[AugmentedCurvature],
        options: dict[str, Any],
        keys: dict[str, str],
        batch: Batch,
    ) -> None:
        self._model = model
        self._likelihood = likelihood
        self._backend = backend
        self._given = options
        self._keys = keys
        self._batch = batch
        self._learns = any(tensor.requires_grad for tensor in hyperparameters(model))
        self._last_layer: str | None = None
        whole = self._made({}, "all")
        matched = whole._prepare(batch.x)
        with torch.no_grad():  # so that what is kept of draws, for later calls as well, has numbers
            model(part_of(batch.x, slice(2), keys["dict_key_x"]))
        self._n_outputs = matched.n_outputs
        self._n_samples = matched.n_samples()
        self.step = training_step(whole, batch)

    def _made(self, options: dict[str, Any], subset: str) -> AugmentedCurvature:
        options = self._given | options | self._keys
        if subset == "all":
            return self._backend(self._model, self._likelihood, **options)
        if self._last_layer is None:
            two = part_of(self._batch.x, slice(2), self._keys["dict_key_x"])
            self._last_layer = last_layer_of(self._model, two)
        copied = FeatureExtractor(deepcopy(self._model), last_layer_name=self._last_layer)
        return self._backend(copied, self._likelihood, last_layer=True, **options)

    def options(self, structure: str | None, subset: str | None) -> list[_Option]:
        """Return the rows that are wanted, that of training first."""
        columns = [("one random column", ONE_RANDOM), ("all columns", {})]
        if self._likelihood == "classification" and self._n_outputs > 4:
            columns.insert(1, ("two leading and a random column", HYBRID))
        if set(COLUMNS) & set(self._given) or not issubclass(self._backend, AugmentedGGN):
            columns = [("", {})]
        rows = [_named("kron", name, options) for name, options in columns]
        rows.append(_named("diag", *columns[0]))
        rows.append(_named("full", *columns[-1]))
        rows.append(_named("kron", *columns[0], subset="last_layer"))
        wanted_structure = [row for row in rows if structure in (None, row.structure)]
        if subset == "last_layer" and structure not in (None, "kron"):
            column = columns[-1] if structure == "full" else columns[0]
            wanted_structure = [_named(structure, *column, subset="last_layer")]
        return [row for row in wanted_structure if subset in (None, row.subset)]

    def choices(self, option: _Option) -> list[Choice]:
        """Return what an option takes; nothing for a full curvature that is out of the question."""
        try:
            backend = self._made(option.options, option.subset)
        except ValueError:  # the network does not end with a linear layer
            if option.subset == "all":
                raise
            return []
        n_weights = sum(parameter.numel() for parameter in backend.params)
        if option.structure == "full" and n_weights > MOST_FULL:
            return []
        batch = self._batch
        found = footprint(backend, option.structure, batch, self._learns)
        kept = batch.nbytes * batch.n_data // len(batch.y) if self._learns else 0
        if option.subset == "last_layer":  # laplace copies the model
            kept += sum(parameter.nbytes for parameter in self._model.parameters())
        zeros = _dense_zeros(backend.params) if option.structure == "kron" else found.factors
        return [
            Choice(
                option.name,
                option.structure,
                option.subset,
                {**self._given, **option.options},
                found,
                found.peak(batch.n_batches, kept),
                found.peak(batch.n_batches, kept, zeros),
                found.work / self.step.work,
            )
        ]

    def fitted(self, choices: tuple[Choice, ...], memory: int | None) -> Choice | None:
        """Return the first option that fits, with smaller chunks if it does so only then."""
        for choice in choices:
            if memory is None or choice.peak <= memory:
                return choice
            smaller = self._in_smaller_chunks(choice, memory)
            if smaller is not None:
                return smaller
        return None

    def _in_smaller_chunks(self, choice: Choice, memory: int) -> Choice | None:
        """Return an option with the largest chunks of half the size, a quarter, ... that fits."""
        own = choice.footprint
        if choice.peak - own.chunk > memory or "chunk_size" in self._given:
            return None
        n_inputs = own.chunk_rows
        while n_inputs > 1:
            n_inputs = n_inputs // 2
            size = {"chunk_size": n_inputs * self._n_samples}
            options = dict(choice.backend_kwargs) | size
            option = _Option(
                choice.name, choice.hessian_structure, options, choice.subset_of_weights
            )
            (found,) = self.choices(option)
            if found.peak <= memory:
                return found
        return None


def _named(structure: str, columns: str, options: dict[str, Any], subset: str = "all") -> _Option:
    words = [structure, columns] if columns else [structure]
    if subset == "last_layer":
        words.insert(0, "last layer")
    return _Option(", ".join(words), structure, options, subset)


def _dense_zeros(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the zeros that laplace adds the factors of the first batch to.

    They have the rows of a parameter and, as one axis, all others, whatever its structure.
    """
    total = 0
    for parameter in parameters:
        sides = [parameter.shape[0], parameter.shape[1:].numel()][: parameter.ndim]
        total += sum(side * side for side in sides) * parameter.element_size()
    return total


def _available(device: torch.device) -> int | None:
    """Return the memory that is available on a device; None if that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    information = Path("/proc/meminfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # another system
        return None


def _warning(choice: Choice) -> str:
    largest = max(choice.footprint.sizes)
    return (
        f"the decomposition of the curvature is expected to take {in_seconds(choice.seconds)} on "
        f"one core, each time: its largest factor has {largest} rows. hessian_structure='diag' "
        "needs none, and a larger marglik_frequency fewer of them"
    )


def _recommendation(
    choices: tuple[Choice, ...], memory: int | None, recommended: Choice | None
) -> str:
    """Return which options fit into the budget."""
    if memory is None:
        return "the memory of the device is not known; pass memory=... for a recommendation"
    budget = in_bytes(memory)
    if recommended is None:
        least = min(choices, key=lambda choice: choice.peak)
        return (
            f"nothing fits into {budget}; the least is {least.name} with {in_bytes(least.peak)}: "
            "use smaller batches, or a narrower network"
        )
    chosen = f"{recommended.name} (peak {in_bytes(recommended.peak)})"
    arguments = [f"hessian_structure={recommended.hessian_structure!r}"]
    if recommended.subset_of_weights != "all":
        arguments.append(f"subset_of_weights={recommended.subset_of_weights!r}")
    if recommended.backend_kwargs:
        arguments.append(f"backend_kwargs={dict(recommended.backend_kwargs)!r}")
    fitting = sum(choice.peak <= memory for choice in choices)
    return (
        f"{fitting} of {len(choices)} fit into {budget} as they are; recommended: {chosen}, "
        f"{', '.join(arguments)}"
    )
