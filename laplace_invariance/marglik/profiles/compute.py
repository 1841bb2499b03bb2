"""The evidence along one range: is the learnt value a maximum, and how flat is it?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tqdm
from torch import nn
from torch.utils.data import DataLoader

from laplace_invariance.marglik.evidence import check_options, settings_of_evidence
from laplace_invariance.marglik.loaders import is_in_order
from laplace_invariance.marglik.profiles.known import KnownEvidences
from laplace_invariance.marglik.profiles.results import Profile
from laplace_invariance.marglik.profiles.retuning import Amounts, Retuning
from laplace_invariance.marglik.randomness import RandomStates
from laplace_invariance.precision import without_autocast

__all__ = ["profile"]


def profile(
    model: nn.Module,
    loader: DataLoader,
    name: str,
    values: Sequence[float] | None = None,
    likelihood: str = "classification",
    *,
    n_steps: int = 100,
    n_samples: int | None = None,
    n_repeats: int = 2,
    hold_others: bool = False,
    optimizer_kwargs: dict[str, Any] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> Profile:
    """Return the log evidence of a trained network along one of its ranges.

    At each value a copy of the network, with the range fixed there, trains its weights for a while,
    from those that it has, with a step size that falls to zero. Meanwhile other open ranges follow
    by small gradient steps on the evidence, from where they were learnt, since another range can
    stand in for a part of the one that is fixed. Priors then go to their optimum, and the evidence
    is estimated. The learnt value is treated like all others, and all have the same batches and
    draws. The model stays as it is, and so do random states.

    Weights that were trained with the learnt range suit it: after a few steps a curve has its
    maximum there rather than where a network trained from scratch would have it. With more steps
    that matters less; with none, the weights as they are decide alone.

    Args:
        model: Trained network with an augmentation, such as an ``InvariantModel``.
        loader: Loader of the data that it was trained on.
        name: Name of the range, such as ``"rotation"``, preceded by that of the module if several
            have ranges to learn: ``"net.augmentation.rotation"``.
        values: Widths of the range in the units of ``augmentation.widths()``; the learnt one is
            added. None is about nine: zero, narrower and wider ones, and the limit if there is one.
        likelihood: Either ``"classification"`` or ``"regression"``.
        n_steps: Number of steps on the weights at each value.
        n_samples: Number of samples that outputs are averaged over in estimates; None is twice that
            of the model, as in training.
        n_repeats: Number of repetitions, with other batches and draws, from which standard errors
            are estimated. Everything random is seeded anew for each of them. With a loader that
            does not shuffle only draws differ, and errors are too small; there is a warning.
        hold_others: Whether other ranges stay as they were learnt, which takes less time. Those
            that are narrower than 0.1 always do, and so do hyperparameters that are not ranges.
        optimizer_kwargs: Arguments of Adam, such as ``{"lr": 1e-3}``.
        checkpoint: File of JSON that gets every evidence as soon as it is known. It must not exist
            unless ``resume``.
        resume: Whether to take known evidences from ``checkpoint`` if it exists. The result is the
            same, bit for bit, as without an interruption, if model, loader and arguments are made
            as before; there may be other values and more repetitions.
        progress_bar: Whether to show a progress bar.
        **options: ``hessian_structure``, ``backend``, ``backend_kwargs``, ``prior_structure``,
            ``subset_of_weights``, ``optimizer_cls`` and ``dict_key_x``, ``dict_key_y``, as for
            :func:`~laplace_invariance.marglik_training`.

    Returns:
        Values, evidences with standard errors, and what follows: whether the learnt value is a
        maximum, and how flat. Where training diverges the evidence is minus infinity, and there is
        a warning.

    Raises:
        TypeError: If values are not several numbers, or an option is not known.
        ValueError: If there is no such range to learn, a value is outside of its limits or there
            twice, a constraint cannot reach it, all targets are the same, a label is beyond the
            outputs, other ranges cannot follow as the backend does not differentiate them, or the
            checkpoint is damaged or of something else.
        FileExistsError: If ``checkpoint`` exists and is not resumed from.
        FloatingPointError: If training diverges at all values.
    """
    check_options("profile", options)
    amounts = Amounts(n_steps, n_samples, n_repeats, hold_others)
    settings = settings_of_evidence(
        loader, likelihood, optimizer_kwargs=optimizer_kwargs, progress_bar=progress_bar, **options
    )
    if n_repeats > 1 and n_steps and is_in_order(loader):
        warnings.warn(
            "the loader does not shuffle: all repetitions have the same batches, and standard "
            "errors are those of draws alone; give one with shuffle=True",
            stacklevel=2,
        )
    random_states = RandomStates(model, (loader,))
    before = random_states.state_dict()
    try:
        retuning = Retuning(model, settings, name, amounts)
        points = retuning.range.points(values)
        signature = {} if checkpoint is None else retuning.signature()
        known = KnownEvidences(checkpoint, resume, signature)
        return _profile(retuning, points, known, progress_bar)
    finally:
        random_states.load_state_dict(before)


@without_autocast()
def _profile(
    retuning: Retuning, points: tuple[float, ...], known: KnownEvidences, progress_bar: bool
) -> Profile:
    n_repeats = retuning.amounts.n_repeats
    bar = tqdm.tqdm(
        total=n_repeats * len(points),
        disable=not progress_bar,
        unit="point",
        desc=f"profile of {retuning.range.name}",
    )
    repeats = []
    with bar:
        for repeat in range(n_repeats):
            found = []
            for value in points:
                if (value, repeat) not in known:
                    known.add(value, repeat, _evidence(retuning, value, repeat))
                found.append(known[value, repeat])
                bar.update()
                bar.set_postfix_str(f"{retuning.range.in_words(value)}: {found[-1]:.3f}")
            repeats.append(tuple(found))
    place = retuning.range
    return Profile(place.name, points, tuple(repeats), place.learnt, place.limit, place.in_words)


def _evidence(retuning: Retuning, value: float, repeat: int) -> float:
    """Return the evidence at a value; minus infinity, with a warning, where training diverges."""
    try:
        found = retuning.evidence(value, repeat)
    except FloatingPointError:  # too many steps in a row were skipped
        found = -math.inf
    if math.isfinite(found):
        return found
    place = f"{retuning.range.name} {retuning.range.in_words(value)}"
    warnings.warn(
        f"the evidence at {place} is not finite in repetition {repeat + 1}; it counts as minus "
        "infinity; a smaller step size may help, by optimizer_kwargs={'lr': ...}",
        stacklevel=2,
    )
    return -math.inf
