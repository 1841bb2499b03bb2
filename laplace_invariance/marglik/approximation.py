"""Stock Laplace as a calculator: the curvature of batches is summed here, and put into it.

``Laplace.fit`` passes once through a loader and keeps what a backward pass would need. Training
knows more: which batches it wants, what it will differentiate, and when nothing has to be
differentiated at all. So an :class:`Approximation` asks the backend for batches itself, and leaves
to laplace what laplace defines: likelihoods, priors, and the marginal likelihood made of them.
"""

from __future__ import annotations

import zlib
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Sized,
)
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import tqdm
from laplace import Laplace
from laplace.utils import FeatureExtractor
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from laplace_invariance.curvature import kfac
from laplace_invariance.curvature.eigen import Decompositions
from laplace_invariance.curvature.kron import DifferentiableKron, DifferentiableKronDecomposed
from laplace_invariance.draws import Share, common_draws, sharing
from laplace_invariance.hyper import hyperparameters
from laplace_invariance.marglik.priors import Priors
from laplace_invariance.marglik.settings import Settings
from laplace_invariance.marglik.targets import check_labels
from laplace_invariance.modes import evaluation

DELAY = 5  # seconds until the progress of a pass through the data is shown

__all__ = [
    "Approximation",
    "added",
    "constant",
    "fresh_seed",
    "learnt_hyperparameters",
    "replayable",
]


def learnt_hyperparameters(module: nn.Module) -> list[Tensor]:
    """Return the hyperparameters of a module that require grad."""
    return [tensor for tensor in hyperparameters(module) if tensor.requires_grad]


@contextmanager
def constant(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let tensors require no grad inside the context, so that curvature keeps nothing for them."""
    for tensor in tensors:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.requires_grad_()


def fresh_seed(count: int) -> int:
    """Return a seed that follows from the state of torch's generator, which it does not change.

    Args:
        count: Number that changes from call to call, as the state may not.
    """
    return zlib.crc32(torch.get_rng_state().numpy().tobytes(), count) << 20


@contextmanager
def replayable(draws: int, others: int | None = None) -> Iterator[None]:
    """Draw inside the context from seeds, so that another pass can draw the same.

    Args:
        draws: Seed of the draws of augmentations.
        others: Seed of everything else; None is the same.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), common_draws(draws):
        torch.manual_seed(draws if others is None else others)
        yield


def added(totals: Sequence[Tensor], found: list[Tensor], share: Share) -> list[Tensor]:
    """Add loss and curvature of a batch to those of others, if there are any.

    Args:
        totals: Sums so far; empty before the first batch.
        found: Loss and curvature of the rows of this rank.
        share: Which rows they are; those that do not count are zero.
    """
    if not share.n_counted:
        found = [torch.zeros_like(tensor) for tensor in found]
    if not totals:
        return found
    return list(map(torch.add, totals, found))


class Approximation:
    """A Laplace approximation of a model that is trained, made anew of whatever is put into it.

    One object serves all estimates of a run, so that the backend matches and verifies the layers of
    the model once. For the last layer, laplace approximates a copy of the model, which gets the
    present weights and hyperparameters with every call.

    Args:
        model: Model that is trained.
        settings: Settings of the run.
        priors: Prior precisions and noise.
        options: Options of the backend.
        enable_backprop: Whether predictions are to be differentiable with respect to inputs.
        tolerance: Relative change of a Kronecker factor up to which its decomposition is used again
            at another scale.

    Attributes:
        decompositions: Decompositions of Kronecker factors so far; None without tolerance.
        la: The Laplace approximation; what it is made of is what was put in last.
        n_data: Number of training examples.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        priors: Priors,
        options: Mapping[str, Any] | None = None,
        enable_backprop: bool = False,
        tolerance: float = 0.0,
    ) -> None:
        self._model = model
        self._ranks = settings.ranks
        self._shows = settings.output.progress_bar and settings.ranks.is_first
        self.decompositions = (
            Decompositions(tolerance, self._ranks.decompose) if tolerance else None
        )
        self._key_y = settings.data.dict_key_y
        self._structure = settings.evidence.hessian_structure
        self.n_data = settings.data.n_data
        self._lengths: list[int] = []  # number of Kronecker factors of each parameter
        self._factors_of: Callable[[Any], Kron] = Kron
        arguments: dict[str, Any] = {}
        if priors.last_layer is not None:
            arguments["last_layer_name"] = priors.last_layer
        self.la: Any = Laplace(
            model,
            settings.evidence.likelihood,
            subset_of_weights=settings.evidence.subset_of_weights,
            hessian_structure=self._structure,
            sigma_noise=1.0 if priors.noise is None else priors.noise.detach(),
            prior_precision=priors.precision.detach(),
            temperature=settings.evidence.temperature,
            enable_backprop=enable_backprop,
            backend=settings.evidence.backend,
            backend_kwargs=dict(options or {}),
            dict_key_x=settings.data.dict_key_x,
            dict_key_y=settings.data.dict_key_y,
            **arguments,
        )

    def differentiates(self) -> bool:
        """Return whether the backend can differentiate hyperparameters."""
        return hasattr(self.la.backend, "pull_back")

    def samples_columns(self) -> bool:
        """Return whether the backend can estimate the loss Hessian from some of its columns."""
        return hasattr(self.la.backend, "output_rank")

    @property
    def n_outputs(self) -> int:
        """Number of outputs of the model; known after the first batch."""
        return self.la.n_outputs

    @property
    def n_targets(self) -> int:
        """Number of training examples times that of outputs."""
        return self.n_data * self.n_outputs

    def batch(self, data: Any) -> tuple[Any, Tensor]:
        """Return inputs and targets on the device of the weights; a mapping stays as it is."""
        device = self.la._device
        if isinstance(data, MutableMapping):
            x, y = data, data[self._key_y]
        else:
            x, y = data
            x = x.to(device, non_blocking=True)
        if self.la.likelihood == "classification":
            check_labels(y)
        return x, y.to(device, non_blocking=True)

    def curvature(self, x: Any, y: Tensor) -> list[Tensor]:
        """Return loss and curvature of a batch as a list of tensors, which add up over batches."""
        with self._ready(x), constant(learnt_hyperparameters(self.la.model)):
            loss, curvature = self.la._curv_closure(x, y, N=self.n_data)
        return [loss.detach(), *self._tensors(curvature)]

    def pull_back(
        self, x: Any, y: Tensor, cotangents: Sequence[Tensor], values: bool = True
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return what :meth:`curvature` does, and gradients of the learnt hyperparameters.

        Args:
            x: Inputs of a batch.
            y: Targets of a batch.
            cotangents: Derivatives with respect to the tensors, as :meth:`cotangents` returns them.
            values: Whether the tensors are wanted; the list is empty otherwise.
        """
        with self._ready(x):
            return self.la.backend.pull_back(self._structure, x, y, self.n_data, cotangents, values)

    def batches(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Tensor, Share]]:
        """Yield inputs and targets of this rank in every batch, and which of its rows they are.

        What draws for them must do so inside of ``sharing(share)``. If the user wants to see
        progress, and a pass takes long, it is shown.
        """
        n_batches = len(loader) if isinstance(loader, Sized) else None
        batches = self._ranks.batches(loader, self._key_y)
        for data, share in tqdm.tqdm(
            batches, "curvature", n_batches, leave=False, disable=not self._shows, delay=DELAY
        ):
            yield *self.batch(data), share

    def total(self, loader: Iterable[Any]) -> tuple[list[Tensor], int]:
        """Return loss and curvature, as of :meth:`curvature`, of all batches and ranks.

        And the number of examples that they are of.
        """
        totals: list[Tensor] = []
        n_seen = 0
        for x, y, share in self.batches(loader):
            with sharing(share):
                totals = added(totals, self.curvature(x, y), share)
            n_seen += share.n
        return self._ranks.sum(totals), n_seen

    def put(self, tensors: Sequence[Tensor], differentiate: bool = False) -> list[Tensor]:
        """Make loss and curvature of all data, as sums of :meth:`curvature`, those of ``la``.

        Args:
            tensors: Loss and tensors of the curvature.
            differentiate: Whether the evidence is going to be differentiated in them.

        Returns:
            The tensors as leaves of the graph that they are now.

        Raises:
            torch.linalg.LinAlgError: If a Kronecker factor is not finite.
        """
        leaves = [tensor.detach().requires_grad_(differentiate) for tensor in tensors]
        la = self.la
        la.loss, *rest = leaves
        la.n_data = self.n_data
        la.mean = parameters_to_vector(self._weights()).detach()
        la._posterior_scale = None  # which laplace keeps for a dense matrix
        if self._structure != "kron":
            (la.H,) = rest
            return leaves
        remaining = iter(rest)
        factors = [[next(remaining) for _ in range(n)] for n in self._lengths]
        la.H_facs = self._factors_of(factors)
        la.H = self._decomposed(factors, differentiate)
        return leaves

    def put_mean(self, fits: Sequence[Approximation]) -> None:
        """Make the mean curvature of several fits, of which this is the last, that of ``la``."""
        la = self.la
        if self._structure != "kron":
            la.H = torch.stack([fit.la.H for fit in fits]).mean(0)
            return
        total = fits[0].la.H_facs
        for fit in fits[1:]:
            total = total + fit.la.H_facs
        la.H_facs = type(total)([[f / len(fits) for f in factors] for factors in total.kfacs])
        la.H = la.H_facs.decompose()

    def _decomposed(self, factors: list[list[Tensor]], differentiate: bool) -> KronDecomposed:
        is_ours = isinstance(self.la.H_facs, DifferentiableKron)
        if self.decompositions is None and (self._ranks.size == 1 or not is_ours):
            return self.la.H_facs.decompose()
        every = list(chain.from_iterable(factors))
        if self.decompositions is not None:
            found = self.decompositions.decompose(every)
        else:
            found = self._ranks.decompose(every, vectors=differentiate)
        pairs = iter(found)
        own = [[next(pairs) for _ in group] for group in factors]
        values = [[pair[0] for pair in group] for group in own]
        vectors = None
        if differentiate or self.decompositions is not None:
            vectors = [[pair[1] for pair in group] for group in own]
        return DifferentiableKronDecomposed(vectors, values, factors)

    def evidence_of_priors(self) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return the evidence as a function of prior precisions and noise, without graph of others.

        It is ``la.log_marginal_likelihood``, but for Kronecker factors with one precision per
        tensor, or one for all, it does not expand precisions to all weights with every call.
        """
        la, weights = self.la, self._weights()
        if self._structure != "kron" or not isinstance(la.H, DifferentiableKronDecomposed):
            return la.log_marginal_likelihood
        spectra = [spectrum.flatten() for spectrum in la.H.detach().curvature_spectra()]
        squares = torch.stack([tensor.detach().square().sum() for tensor in weights])

        def evidence(precision: Tensor, noise: Tensor | None) -> Tensor:
            if noise is not None:
                la.sigma_noise = noise
            deltas = precision.expand(len(weights))
            pairs = zip(spectra, (la._H_factor / deltas).unbind(), strict=True)
            # whose derivative is a sum of small numbers, not a small difference of large ones
            log_det_ratio = torch.stack([torch.log1p(own * scale).sum() for own, scale in pairs])
            return la.log_likelihood - 0.5 * (log_det_ratio.sum() + (squares * deltas).sum())

        return evidence

    def cotangents(self, evidence: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the derivatives of an evidence in loss and curvature, for :meth:`pull_back`.

        Args:
            evidence: Log evidence of ``la``.
            leaves: What :meth:`put` returned.
        """
        found = torch.autograd.grad(evidence, leaves)
        # to the last digit, as a resumed run does when it finds them in its checkpoint
        return [kfac.symmetrised(cotangent.clone()) for cotangent in found]

    def newton_decrement(self, loader: Iterable[Any], seed: int) -> float:
        """Return by how much a Newton step on the weights would raise the log posterior.

        It is zero at a mode, where a Laplace approximation belongs: half of ``g^T P^-1 g``, with
        the gradient ``g`` of the log posterior and the posterior precision ``P`` of ``la``. Draws
        make gradients noisy, and the square of that noise would count as well. So the two gradients
        of the product have draws of their own: its mean is that of the mean gradient, and an
        estimate below zero is zero.

        Args:
            loader: Batches of all data.
            seed: Seed of the draws; those of the other gradient have the next one.
        """
        one = self._posterior_gradient(loader, seed)
        other = self._posterior_gradient(loader, seed + 1)
        return max(0.0, self.decrement_of(one, other))

    def decrement_of(self, one: Tensor, other: Tensor) -> float:
        """Return half of ``g^T P^-1 h`` for two gradients of minus the log posterior."""
        return 0.5 * one.dot(self._solved(other)).item()

    def _posterior_gradient(self, loader: Iterable[Any], seed: int) -> Tensor:
        """Return the gradient of minus the log posterior."""
        la, weights = self.la, self._weights()
        gradient = torch.zeros_like(la.mean)
        with replayable(seed):
            for x, y, share in self.batches(loader):
                with self._ready(x), torch.enable_grad(), sharing(share):
                    loss = la.backend.factor * la.backend.lossfunc(la.model(x), y)
                    found = torch.autograd.grad(loss, weights)
                if share.n_counted:
                    gradient += parameters_to_vector([tensor.contiguous() for tensor in found])
        (gradient,) = self._ranks.sum([gradient])
        return la._H_factor * gradient + la.prior_precision_diag * la.mean

    @torch.no_grad()
    def _solved(self, vector: Tensor) -> Tensor:
        """Return the posterior covariance times a vector."""
        precision = self.la.posterior_precision
        if self._structure == "kron":
            return precision.bmm(vector.unsqueeze(0), exponent=-1).flatten()
        if self._structure == "diag":
            return vector / precision
        return torch.linalg.solve(precision, vector)

    def _weights(self) -> list[nn.Parameter]:
        """Return the weights that the approximation is of."""
        if self._is_copy:
            return list(self.la.model.last_layer.parameters())
        return list(self.la.params)

    @property
    def _is_copy(self) -> bool:
        return isinstance(self.la.model, FeatureExtractor)

    @contextmanager
    def _ready(self, x: Any) -> Iterator[None]:
        """Put the model, or laplace's copy of it, into evaluation mode and the present state."""
        la = self.la
        if self._is_copy:
            la.model.model.load_state_dict(self._model.state_dict())
            for copied, buffer in zip(la.model.model.buffers(), self._model.buffers(), strict=True):
                copied.data.copy_(buffer)  # those that are in no state_dict, too
        with evaluation(la.model):
            if not la.n_outputs:
                with torch.no_grad():
                    la.n_outputs = la.model(x).shape[-1]
                la.model.output_size = la.n_outputs
            yield

    def _tensors(self, curvature: Any) -> list[Tensor]:
        if not isinstance(curvature, Kron):
            return [curvature.detach()]
        self._lengths = [len(factors) for factors in curvature.kfacs]
        self._factors_of = type(curvature)
        return [factor.detach() for factor in chain.from_iterable(curvature.kfacs)]
