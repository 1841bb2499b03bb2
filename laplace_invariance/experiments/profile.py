"""Show whether a learnt range is a maximum of the evidence, and how flat.

A run of ``learn`` comes first, in a directory of its own; then the evidence is computed at other
widths of one range, from the weights that were learnt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import BATCH, SAMPLED, seeded
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.learn import LearnResult, learn, learnt_model
from laplace_invariance.experiments.options import ProfileConfig
from laplace_invariance.experiments.reports import profile_report
from laplace_invariance.marglik.profiles import Profile, profile_of
from laplace_invariance.marglik.profiles import profile as evidence_profile

__all__ = ["ProfileConfig", "ProfileResult", "profile"]


@dataclass(frozen=True)
class ProfileResult:
    """Evidences along one range; prints as a table with its conclusion.

    Attributes:
        config: Configuration of the run.
        profile: Evidences by width of the range.
        truth: How far the images were transformed along the range; None if that is not known.
        learnt: Result of ``learn``.
    """

    config: ProfileConfig
    profile: Profile
    truth: float | None
    learnt: LearnResult = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Return the configuration and the profile, for JSON."""
        return {"experiment": asdict(self.config), "truth": self.truth} | self.profile.summary()

    def __str__(self) -> str:
        if self.truth is None:
            return str(self.profile)
        return f"{self.profile}\ntrue is {self.profile.in_words(self.truth)}"


def profile(
    config: ProfileConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> ProfileResult:
    """Learn ranges, and compute the evidence along one of them.

    Args:
        config: What is learnt from what, the range and its values.
        out: Directory for the run of ``learn`` (in ``learn``), the evidences (``profile.json``),
            ``summary.json`` and ``profile.png``; None keeps nothing.
        resume: Whether to continue in ``out``: a finished run of ``learn`` and known evidences are
            read, and values and repetitions may be added.
        progress_bar: Whether to show progress.

    Returns:
        Evidences by width of the range.
    """
    with RunDirectory(out, config, resume) as directory:
        directory.lock()
        learnt = learn(
            config.run, directory.path("learn"), resume=resume, progress_bar=progress_bar
        )
        directory.begin()  # the configuration is possible, so the directory is this profile's
        found = _finished(directory, config)
        if found is None:
            found = _compute(config, directory, learnt, progress_bar)
        # in units of these images
        words = partial(AffineImage().in_words, config.name, shape=learnt.data["in_shape"])
        found = replace(found, in_words=words)
        result = ProfileResult(config, found, learnt.truth.get(config.name), learnt)
        pictures.draw_profile(directory, result)
        directory.save("summary.json", result.summary())
        profile_report(directory, result)
    return result


def _finished(directory: RunDirectory, config: ProfileConfig) -> Profile | None:
    """Return the profile that the directory has, if it is of the same values."""
    summary = directory.finished()
    if summary is None or ProfileConfig(**summary["experiment"]) != config:
        return None
    return profile_of(summary, partial(AffineImage().in_words, config.name))


def _compute(
    config: ProfileConfig, directory: RunDirectory, learnt: LearnResult, progress_bar: bool
) -> Profile:
    model, images = learnt_model(learnt, directory.path("learn"))
    with seeded(config.seed):
        return evidence_profile(
            model,
            DataLoader(images, BATCH, shuffle=True),
            config.name,
            config.values or None,
            n_steps=config.n_steps,
            n_repeats=config.n_repeats,
            hold_others=config.hold_others,
            subset_of_weights=config.subset_of_weights,
            hessian_structure=config.structure,
            prior_structure=config.prior_structure,
            backend=config.curvature,
            backend_kwargs=SAMPLED if config.curvature.endswith("ggn") else {},
            checkpoint=directory.path("profile.json"),
            resume=directory.out is not None,
            progress_bar=progress_bar,
        )
