"""Features of an averaged network, as laplace's last-layer classes expect them: one per input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from laplace_invariance.curvature import kfac
from laplace_invariance.invariant import LEVELS, InvariantModel

__all__ = ["average_features"]


def average_features(extractor: nn.Module) -> None:
    """Let laplace's ``FeatureExtractor`` return features that are averaged over samples.

    laplace applies sampled weights of the last layer to features that it kept (``pred_type="nn"``).
    The layer is linear, so averages may be taken before it.

    Args:
        extractor: What laplace made of a copy of the model; left alone if nothing is averaged, or
            if it is another module.
    """
    if not isinstance(extractor, FeatureExtractor) or extractor.last_layer is None:
        return
    hooks = extractor.last_layer._forward_hooks.values()
    averaged = any(isinstance(module, InvariantModel) for module in extractor.modules())
    if averaged and not any(isinstance(hook, _AverageFeatures) for hook in hooks):
        extractor.last_layer.register_forward_hook(_AverageFeatures(extractor._features))


@dataclass
class _AverageFeatures:
    """Average the features that the hook of a ``FeatureExtractor`` has just kept.

    Attributes:
        features: Features by name of the layer.
    """

    features: dict[str, Tensor]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        for name, features in self.features.items():
            self.features[name] = kfac.fold_inputs(features, LEVELS.get())
