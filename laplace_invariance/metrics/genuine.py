"""How invariant a network really is: its predictions, its logits and its saliency along orbits.

A network that classifies every rotated image correctly need not be invariant: it may have
learnt each rotation on its own, from the training images, and then nothing is known of others.
Three measures tell (after Moskalev et al., *On genuine invariance learning without
weight-tying*, 2023), on any inputs, in or out of the distribution of the training images, with
labels or without: they are 0, 0 and 1 for a network that is invariant by construction.

The network is evaluated in evaluation mode, and an ``InvariantModel`` with its fixed draws, as
for predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laplace_invariance.augmentations.base import Augmentation, check_n_samples
from laplace_invariance.draws import fixed_draws
from laplace_invariance.metrics.orbits import Data, GroupLike, Orbit, batches, check_outputs
from laplace_invariance.modes import evaluation
from laplace_invariance.tables import table

__all__ = [
    "Invariance",
    "InvarianceError",
    "InvarianceReport",
    "invariance_report",
    "logit_invariance",
    "predictive_invariance",
    "saliency_invariance",
]

DIVERGENCES = ("js", "kl")


@torch.no_grad()
def _along(model: nn.Module, data: Data, orbit: Orbit, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return outputs at inputs ``[n, outputs]``, and along orbits ``[n, size, outputs]``."""
    plain, along = [], []
    with evaluation(model):
        for x in batches(data, model, max(batch_size // orbit.size, 1)):
            rows = orbit.all(x).flatten(0, 1)
            plain.append(check_outputs(model(x), len(x)))
            along.append(check_outputs(model(rows), len(rows)).unflatten(0, (len(x), -1)))
    return torch.cat(plain), torch.cat(along)


def predictive_invariance(
    model: nn.Module,
    data: Data,
    group: GroupLike,
    *,
    divergence: str = "js",
    n_samples: int = 8,
    batch_size: int = 512,
) -> float:
    """Return how far class probabilities at ``g x`` are from those at ``x``, in nats.

    It is the mean, over inputs and transformations, of a divergence of the two distributions, 0
    if they never change. That of Jensen and Shannon is symmetric and at most log 2 = 0.69, so
    that no single overconfident image decides the mean, as it may for that of Kullback and
    Leibler.

    Args:
        model: Maps inputs to logits ``[n, classes]``.
        data: Inputs ``[n, ...]``, or a loader of them, or of tuples whose first entries they
            are.
        group: ``"p4"`` or another name, a :class:`~laplace_invariance.layers.Group` or an
            augmentation; the identity does not count, and elements of a finite group count
            alike.
        divergence: ``"js"``, or ``"kl"`` for ``KL(p(x) | p(g x))``.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        batch_size: Number of rows to evaluate at a time.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"unknown divergence {divergence!r}; choose from {', '.join(DIVERGENCES)}")
    outputs, along = _along(model, data, Orbit(group, n_samples), batch_size)
    if outputs.shape[1] < 2:
        raise ValueError(
            f"class probabilities need two logits or more, got outputs {list(outputs.shape)}"
        )
    p = outputs.log_softmax(-1).unsqueeze(1)
    q = along.log_softmax(-1)
    if divergence == "kl":
        return _kl(p, q).mean().item()
    middle = torch.logaddexp(p, q) - math.log(2)
    return (_kl(p, middle) + _kl(q, middle)).mean().item() / 2


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of log probabilities ``[..., classes]``, not negative by rounding."""
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)


def logit_invariance(
    model: nn.Module, data: Data, group: GroupLike, *, n_samples: int = 8, batch_size: int = 512
) -> float:
    """Return ``E |f(g x) - f(x)|^2 / E |f(x') - f(x)|^2``.

    It is 0 if outputs never change, and 1 if they are like those of another input. The
    denominator has all pairs of inputs, which is twice the variance of outputs over the data.
    So neither scale nor offset of the outputs matter, and a network is not called invariant for
    being insensitive to everything.

    Args:
        model: Maps inputs to ``[n, outputs]``.
        data: Two inputs or more, as for :func:`predictive_invariance`.
        group: The group, as for :func:`predictive_invariance`.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        batch_size: Number of rows to evaluate at a time.
    """
    outputs, along = _along(model, data, Orbit(group, n_samples), batch_size)
    if len(outputs) < 2:
        raise ValueError(
            "logit_invariance compares with other inputs, so it needs two or more, got 1"
        )
    change = (along - outputs.unsqueeze(1)).square().sum(-1).mean()
    spread = 2 * outputs.var(0).sum()
    tiny = torch.finfo(spread.dtype).tiny  # a constant is invariant
    return (change / spread.clamp_min(tiny)).item()


def saliency_invariance(
    model: nn.Module, data: Data, group: GroupLike, *, n_samples: int = 8, batch_size: int = 512
) -> float:
    """Return the similarity of saliency maps at ``g x``, transformed back, with those at ``x``.

    It is 1 if the network looks at the same parts of an image, wherever these are. The saliency
    map is the gradient, in the input, of the logit of the class that is predicted at ``x``.
    That at ``g x`` is transformed back by the transpose of ``g`` as a linear map on images,
    which makes it the gradient of ``f(g x)`` in ``x``: exact for quarter turns and flips, whose
    transpose is their inverse, and, by the chain rule, the very map that an invariant network
    has at ``x`` where ``g`` interpolates. What leaves the image has no part in it: the cosine
    of the two maps has the pixels that ``g`` keeps.

    Args:
        model: Maps inputs to ``[n, outputs]``, differentiable in its input.
        data: Inputs, as for :func:`predictive_invariance`.
        group: The group, as for :func:`predictive_invariance`.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        batch_size: Number of rows to evaluate at a time.
    """
    orbit = Orbit(group, n_samples)
    cosines = []
    with torch.enable_grad(), evaluation(model), fixed_draws():
        for x in batches(data, model, max(batch_size // orbit.size, 1)):
            cosines.append(_saliency_cosines(model, x.detach().requires_grad_(), orbit))
    return torch.cat(cosines).mean().item()


def _saliency_cosines(model: nn.Module, x: Tensor, orbit: Orbit) -> Tensor:
    """Return cosines ``[n, size]`` of the saliency at ``x`` and those along its orbit."""
    transformed = orbit.all(x)
    outputs = check_outputs(model(x), len(x))
    classes = outputs.argmax(-1, keepdim=True)
    own = _saliency(outputs, classes, x)
    rows = transformed.detach().flatten(0, 1).requires_grad_()
    along = check_outputs(model(rows), len(rows))
    there = _saliency(along, classes.repeat_interleave(orbit.size, 0), rows)
    there = there.unflatten(0, transformed.shape[:2])
    cosines = []
    for part, saliency in zip(transformed.unbind(1), there.unbind(1), strict=True):
        (back,) = torch.autograd.grad(part, x, saliency, retain_graph=True)
        (kept,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
        cosines.append(_cosine((own * (kept != 0)).flatten(1), back.flatten(1)))
    return torch.stack(cosines, 1)


def _saliency(outputs: Tensor, classes: Tensor, x: Tensor, *, create_graph: bool = False) -> Tensor:
    """Return the gradient in ``x`` of the logit of one class ``[n, 1]`` of each row."""
    logits = outputs.gather(1, classes)
    (found,) = torch.autograd.grad(
        logits.sum(), x, allow_unused=True, materialize_grads=True, create_graph=create_graph
    )
    return found


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return cosines ``[n]`` of rows; 1 if both are zero, 0 if one is."""
    size_a = a.norm(dim=1)
    size_b = b.norm(dim=1)
    product = size_a * size_b
    return torch.where(product > 0, (a * b).sum(1) / product, (size_a == size_b).to(a.dtype))


class InvarianceError:
    """The invariance error as a penalty, ``E |f(g x) - f(x)|^2 / 2``, over random transformations.

    With ``saliency`` above zero, ``saliency * E |s(g x) - g s(x)|^2`` is added, where ``s`` is the
    gradient, in the input, of the logit of the class that is predicted at ``x``: what a network
    looks at should move with the image. It makes networks more invariant on other images, too.

    Add it to the loss of any training loop, ``loss + strength * penalty(model, x)``, or give it
    to ours, ``marglik_training(..., objective=Regularised(penalty, strength))``. Both inputs go
    through the network in one batch; an ``InvariantModel`` has draws of its own for each.

    Args:
        group: The group, as for :func:`predictive_invariance`.
        n_samples: Number of random transformations of each input, without the identity.
        generator: Source of randomness; None is torch's default generator.
        saliency: Weight of the change of saliency maps, for images; it takes second derivatives.
    """

    def __init__(
        self,
        group: GroupLike,
        n_samples: int = 1,
        generator: torch.Generator | None = None,
        saliency: float = 0.0,
    ) -> None:
        self.orbit = Orbit(group)
        self.n_samples = check_n_samples(n_samples)
        self.generator = generator
        if not 0 <= saliency < math.inf:
            raise ValueError(f"saliency must be finite and not negative, got {saliency}")
        self.saliency = saliency
        if getattr(group, "draws", None) == "grid":
            raise ValueError(
                "draws of a grid are always the same, and one is the identity; "
                "use draws='independent'"
            )

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the error for inputs ``x`` ``[n, ...]``, differentiable in the model's weights."""
        if not isinstance(x, Tensor) or not len(x):
            kind = "no inputs" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"the invariance error is that of a batch of inputs, a tensor, got {kind}"
            )
        if self.saliency:
            return self._with_saliency(model, x)
        along = self.orbit.random(x, self.n_samples, self.generator)
        rows = torch.cat([x.unsqueeze(1), along], dim=1).flatten(0, 1)
        outputs = check_outputs(model(rows), len(rows)).unflatten(0, (len(x), -1))
        return (outputs[:, 1:] - outputs[:, :1]).square().flatten(2).sum(-1).mean() / 2

    @torch.enable_grad()
    def _with_saliency(self, model: nn.Module, x: Tensor) -> Tensor:
        """Return the error of outputs and of their gradients in images."""
        if x.ndim != 4:
            raise ValueError(
                "saliency maps are transformed like images [n, channels, height, width], got "
                f"inputs of shape {list(x.shape)}"
            )
        x = x.detach().requires_grad_()
        outputs = check_outputs(model(x), len(x))
        classes = outputs.argmax(-1, keepdim=True)
        own = _saliency(outputs, classes, x, create_graph=True)
        # as further channels of the image, a map is transformed by the same draws
        both = self.orbit.random(torch.cat([x, own], dim=1), self.n_samples, self.generator)
        along, moved = both.flatten(0, 1).chunk(2, dim=1)
        rows = along.detach().requires_grad_()
        outputs_along = check_outputs(model(rows), len(rows))
        repeated = classes.repeat_interleave(self.n_samples, 0)
        there = _saliency(outputs_along, repeated, rows, create_graph=True)
        change = outputs_along - outputs.repeat_interleave(self.n_samples, 0)
        error = change.square().sum(-1).mean() / 2
        return error + self.saliency * (there - moved).square().flatten(1).sum(-1).mean()

    def __repr__(self) -> str:
        # A checkpoint is known by it, so it must not say ranges, which may be being learnt.
        group = self.orbit.group
        name = type(group).__name__ if isinstance(group, Augmentation) else repr(group.name)
        more = f", saliency={self.saliency}" if self.saliency else ""
        return f"InvarianceError({name}, n_samples={self.n_samples}{more})"


@dataclass(frozen=True)
class Invariance:
    """All three measures of one network on one data set.

    Attributes:
        predictive: See :func:`predictive_invariance`.
        logit: See :func:`logit_invariance`.
        saliency: See :func:`saliency_invariance`.
    """

    predictive: float
    logit: float
    saliency: float


@dataclass(frozen=True)
class InvarianceReport:
    """Measures of several networks on several data sets; prints as a table.

    Attributes:
        rows: Measures by network and data set.
    """

    rows: dict[str, dict[str, Invariance]]

    def __str__(self) -> str:
        lines = [("network", "data", "predictive", "logit", "saliency")]
        for network, found in self.rows.items():
            name = network  # in the first of its lines
            for data, one in found.items():
                numbers = f"{one.predictive:.1e}", f"{one.logit:.1e}", f"{one.saliency:.3f}"
                lines.append((name, data, *numbers))
                name = ""
        return table(lines, right=(2, 3, 4))

    __repr__ = __str__


def invariance_report(
    models: Mapping[str, nn.Module],
    data: Mapping[str, Data],
    group: GroupLike,
    *,
    n_samples: int = 8,
    batch_size: int = 512,
) -> InvarianceReport:
    """Measure networks on data sets, say in and out of the distribution of their training data.

    Args:
        models: Networks by name.
        data: Inputs by name, each as for :func:`predictive_invariance`; a loader is read three
            times for every network.
        group: The group, as for :func:`predictive_invariance`.
        n_samples: Number of fixed draws of an augmentation that is not a finite group.
        batch_size: Number of rows to evaluate at a time.
    """

    measures = (predictive_invariance, logit_invariance, saliency_invariance)
    rows: dict[str, dict[str, Invariance]] = {}
    for name, model in models.items():
        rows[name] = {}
        for where, x in data.items():
            options = {"n_samples": n_samples, "batch_size": batch_size}
            rows[name][where] = Invariance(*(f(model, x, group, **options) for f in measures))
    return InvarianceReport(rows)
