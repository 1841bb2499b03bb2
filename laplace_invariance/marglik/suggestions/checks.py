"""What is refused before anything is trained: data, networks and augmentations that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from laplace_invariance.augmentations.base import Augmentation
from laplace_invariance.augmentations.box import BoxAugmentation
from laplace_invariance.invariant import InvariantModel
from laplace_invariance.marglik.search.candidates import LEAST, Candidate, Space
from laplace_invariance.marglik.settings import Settings
from laplace_invariance.marglik.targets import check_labels, check_targets, targets_of
from laplace_invariance.modes import evaluation

__all__ = ["check_candidates", "check_data", "check_optimizer", "inputs_of"]

N_EXAMPLES, N_DRAWS = 8, 16  # that transformations are tried on
CLOSED = 3e-4  # root mean square of changes, as a share of that of inputs, for round-off
CLASSES = (torch.int64, torch.uint8)  # types of labels that torch takes


def inputs_of(settings: Settings) -> Tensor:
    """Return the first inputs that are to be transformed, or raise if batches are of no use."""
    batch = next(iter(settings.data.ordered_loader))
    key_x, key_y = settings.data.dict_key_x, settings.data.dict_key_y
    if isinstance(batch, Mapping):
        for name, key in {"dict_key_x": key_x, "dict_key_y": key_y}.items():
            if not isinstance(batch.get(key), Tensor):
                raise ValueError(
                    f"batches have no tensor {key!r} among {', '.join(map(repr, batch))}; "
                    f"{name}= says which it is"
                )
        return batch[key_x]
    is_pair = isinstance(batch, Sequence) and len(batch) == 2
    if not is_pair or not all(isinstance(part, Tensor) for part in batch):
        kinds = [type(part).__name__ for part in batch] if isinstance(batch, Sequence) else batch
        raise TypeError(
            "the loader must yield pairs of a tensor of inputs and one of targets, or mappings, "
            f"got {kinds if isinstance(kinds, list) else type(batch).__name__}"
        )
    return batch[0]


def check_data(model: InvariantModel, settings: Settings) -> None:
    """Raise unless outputs are ``[n, outputs]``, and all targets are such as they can be."""
    targets = list(targets_of(settings.data))
    check_targets(targets)
    n_outputs = _n_outputs(model, settings)
    for y in targets:
        if settings.evidence.is_regression:
            _check_numbers(y, n_outputs)
        else:
            _check_classes(y, n_outputs)


def _n_outputs(model: InvariantModel, settings: Settings) -> int:
    x = settings.data.example()
    if isinstance(x, Tensor):
        x = x[:N_EXAMPLES].to(next(model.parameters()).device)
    with torch.no_grad(), evaluation(model):
        outputs = model.net(x)
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        found = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(f"the network must have outputs [batch, outputs], got {found}")
    return outputs.shape[1]


def _check_classes(y: Tensor, n_outputs: int) -> None:
    if y.ndim != 1 or y.dtype not in CLASSES:
        raise ValueError(
            f"targets must be classes, whole numbers [n] of type torch.int64, got {y.dtype} "
            f"{list(y.shape)}; likelihood='regression' takes other numbers"
        )
    check_labels(y, n_outputs)


def _check_numbers(y: Tensor, n_outputs: int) -> None:
    if not y.is_floating_point() or tuple(y.shape) != (len(y), n_outputs):
        raise ValueError(
            f"targets of a regression must be floating-point numbers of the shape of outputs, "
            f"[n, {n_outputs}], got {y.dtype} {list(y.shape)}"
        )
    if not y.isfinite().all():
        raise ValueError("targets must be finite")


def check_optimizer(model: InvariantModel, settings: Settings) -> None:
    """Raise unless the optimiser of the weights can be made."""
    try:
        settings.optimizer.build(model)
    except (TypeError, ValueError) as error:
        name = settings.optimizer.optimizer_cls.__name__
        raise type(error)(f"optimizer_kwargs do not fit {name}: {error}") from error


@torch.no_grad()
def check_candidates(
    model: InvariantModel, candidates: Sequence[Candidate], inputs: Tensor
) -> None:
    """Raise unless nothing is the identity, and other candidates leave inputs finite.

    Args:
        model: Model with the augmentation, which is left with some candidate.
        candidates: What is to be tried, nothing first.
        inputs: Inputs of a batch.
    """
    _check_fixed(model.augmentation)
    space = Space(model)
    x = inputs[:N_EXAMPLES].to(next(model.parameters()).device)
    for candidate in candidates:
        reached = space.reached(candidate)
        samples = _samples(model, x)
        if not candidate.widths:
            _check_closed(model, x, samples)
        if reached != candidate:
            raise ValueError(f"{candidate} cannot be: a constraint makes it {reached}")
        if not samples.isfinite().all() and x.isfinite().all():
            raise ValueError(f"{candidate} is too wide: transformed inputs are not finite")


def _samples(model: InvariantModel, x: Tensor) -> Tensor:
    """Return transformed inputs, those that count."""
    draws = model.augmentation.fixed(N_DRAWS)
    samples = model.augmentation.transform(x, draws)
    return samples[:, model.augmentation.weights(draws.shape[1]) > 0]


def _check_fixed(augmentation: Augmentation) -> None:
    """Raise if there are open ranges that are not learnt."""
    found = []
    for part in augmentation.modules():
        if isinstance(part, BoxAugmentation):
            learnt = part.widths()
            reach = part.magnitudes().items()
            found += [f"{name} {w:.3g}" for name, w in reach if w > LEAST and name not in learnt]
    if found:
        raise ValueError(
            f"the augmentation has open ranges that are not learnt: {', '.join(found)}; they would "
            "be those of no candidate and of all; learn them, too, or start them at zero"
        )


def _check_closed(model: InvariantModel, x: Tensor, samples: Tensor) -> None:
    """Raise unless the augmentation that has nothing open is the identity."""
    change = torch.tensor(torch.inf)
    if samples.shape[2:] == x.shape[1:]:
        change = (samples - x.unsqueeze(1)).double().square().mean().sqrt()
    if change <= CLOSED * x.double().square().mean().sqrt():
        return
    reach = model.augmentation.magnitudes().items()
    opened = ", ".join(f"{name} {width:.3g}" for name, width in reach if width > LEAST / 2)
    raise ValueError(
        "the augmentation changes inputs even where all its ranges are closed "
        f"({opened or type(model.augmentation).__name__}), so that there is no network alone to "
        "compare with; constraint='softplus', for one, keeps ranges open"
    )
