"""How the evidence is estimated: the Laplace approximation with its settings, and the loaders that it is fitted on."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from laplace import Laplace
from laplace.baselaplace import BaseLaplace
from laplace.curvature.curvature import CurvatureInterface
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_invariance.marglik.priors import Priors

__all__ = ["Curvature", "OneBatch", "PartlyDifferentiable"]


@dataclass(frozen=True)
class Curvature:
    """How the evidence is estimated."""

    likelihood: str
    hessian_structure: str
    backend: type[CurvatureInterface]
    backend_kwargs: dict[str, Any] | None
    temperature: float
    dict_key_x: str
    dict_key_y: str

    def laplace(
        self, model: nn.Module, priors: Priors, enable_backprop: bool = False
    ) -> BaseLaplace:
        noise = priors.noise
        return Laplace(
            model,
            self.likelihood,
            subset_of_weights="all",
            hessian_structure=self.hessian_structure,
            sigma_noise=1.0 if noise is None else noise.detach(),
            prior_precision=priors.precision.detach(),
            temperature=self.temperature,
            enable_backprop=enable_backprop,
            backend=self.backend,
            backend_kwargs=self.backend_kwargs,
            dict_key_x=self.dict_key_x,
            dict_key_y=self.dict_key_y,
        )


class PartlyDifferentiable:
    """A loader under which hyperparameters require grad in some of the batches only."""

    def __init__(
        self, loader: DataLoader, hyperparameters: Sequence[Tensor], chosen: set[int]
    ) -> None:
        self.loader, self.hyperparameters, self.chosen = loader, hyperparameters, chosen
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.loader):
            for tensor in self.hyperparameters:
                tensor.requires_grad_(index in self.chosen)
            yield batch


class OneBatch:
    """A loader with one batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.dataset = next(iter(batch.values())) if isinstance(batch, MutableMapping) else batch[0]

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self.batch
