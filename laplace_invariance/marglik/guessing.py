"""The evidence of guessing without looking at inputs, which a network should be better than."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from laplace_invariance.marglik.settings import EvidenceSettings

__all__ = ["guessing"]


def guessing(targets: Tensor, settings: EvidenceSettings) -> float:
    """Return the log likelihood per example of guessing, tempered as that of a network is.

    Classes are guessed by their frequencies, and targets of a regression by a Gaussian about their
    mean, with the noise that is best for all outputs in common.

    Args:
        targets: Classes ``[n]``, or targets ``[n, outputs]`` of a regression.
        settings: Settings of the evidence.
    """
    if settings.is_regression:
        squares = (targets - targets.mean(0)).double().square()
        variance = squares.mean().item() / settings.temperature  # of the best noise
        variance = max(variance, sys.float_info.min)
        return -0.5 * (1 + math.log(2 * math.pi * variance)) * squares[0].numel()
    shares = torch.bincount(targets.flatten()).double()
    shares = shares[shares > 0] / shares.sum()
    return (shares * shares.log()).sum().item() / settings.temperature
