"""Invariant weights: a shallow network whose first layer is transformed, learnt by a lower bound on its evidence.

``f(x) = scale W2 mean_s phi(W1 T_s x + b)`` with transformations ``T_s`` of ranges ``eta``. Since ``W1 (T x) = (W1 T) x``, not
inputs but the rows of ``W1`` are transformed, once for a whole batch. The last layer has a Gaussian prior ``N(0, I)`` and for
every output a Gaussian ``q`` with full covariance, so that

    log p(y) >= E_q[log p(y | f)] - KL(q || prior)     (ELBO)

can be maximised over ``q`` *and* over ``eta``: van der Ouderaa and van der Wilk, *Learning Invariant Weights in Neural Networks*
(2022). The likelihood of a point estimate, without the KL, is there to compare with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import tqdm
from torch import Tensor, nn

from laplace_invariance.augmentations import AffineImage, AffinePoints
from laplace_invariance.augmentations.affine import warp_images
from laplace_invariance.augmentations.base import check_n_samples
from laplace_invariance.draws import are_fixed
from laplace_invariance.hyper import Hyperparameterised, differentiable, hyperparameters

__all__ = ["OBJECTIVES", "ShallowNetwork", "fit"]

ACTIVATIONS = ("cosine", "relu")
LIKELIHOODS = ("classification", "regression")
N_BASIS = 2000  # inputs that the basis of q is computed from
OBJECTIVES = {
    "elbo": "lower bound on the evidence",
    "point": "log likelihood at the mean of q, no KL",
}


class ShallowNetwork(Hyperparameterised):
    """One hidden layer under transformations of its weights, and a Gaussian over the weights of the last layer.

    Draws of transformations are shared by a batch; they are fresh wherever gradients are enabled and one fixed, evenly spread
    set under ``torch.no_grad()``. With ``draws="grid"`` of the augmentation they are always that set. The ELBO is
    differentiable in the hyperparameters: ranges of the augmentation, ``log_scale`` of the outputs and, in regression,
    ``log_noise``.

    Args:
        augmentation: an ``AffineImage`` or ``AffinePoints``.
        in_shape: of one input: channels, height and width, or coordinates, or points and coordinates.
        n_outputs: classes, or targets.
        n_features: width of the hidden layer; even for cosines, which come in pairs of one frequency, a quarter period apart.
        activation: ``"cosine"``, random Fourier features whose weights stay as drawn: as the width grows, a Gaussian process with
            squared-exponential kernel; or ``"relu"``, with weights to be learnt.
        likelihood: ``"classification"`` (softmax) or ``"regression"`` (Gaussian).
        n_samples: transformations that the features are averaged over.
        length_scale: of that kernel, in units of the (blurred) input.
        output_scale: standard deviation of the outputs under the prior, without transformations; the start, as it is learnt.
        noise: standard deviation of targets in regression; the start, as it is learnt.
        blur: standard deviation in half-widths of a Gaussian that limits the frequencies in rows of the first layer, for images,
            whose resampling would otherwise do so.
        generator: source of the weights and draws; None is torch's default generator.
    """

    def __init__(
        self,
        augmentation: AffineImage | AffinePoints,
        in_shape: tuple[int, ...],
        n_outputs: int,
        n_features: int = 256,
        activation: str = "cosine",
        likelihood: str = "classification",
        n_samples: int = 16,
        length_scale: float = 1.0,
        output_scale: float = 8.0,
        noise: float = 1.0,
        blur: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        in_shape = tuple(in_shape)
        _check(augmentation, in_shape)
        for name, value, known in (
            ("activation", activation, ACTIVATIONS),
            ("likelihood", likelihood, LIKELIHOODS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(known)}")
        for name, value in (
            ("length_scale", length_scale),
            ("output_scale", output_scale),
            ("noise", noise),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= blur < math.inf:
            raise ValueError(f"blur must not be negative, got {blur}")
        cosine = activation == "cosine"
        if n_features < 1 or (cosine and n_features % 2):
            raise ValueError(
                f"n_features must be positive{', and even for cosines' if cosine else ''}, got {n_features}"
            )
        if n_outputs < 1 + (likelihood == "classification"):
            raise ValueError(f"{likelihood} with n_outputs = {n_outputs} has nothing to predict")
        self.augmentation = augmentation
        self.in_shape = in_shape
        self.activation = activation
        self.likelihood = likelihood
        self.n_samples = check_n_samples(n_samples)
        self.blur = blur
        self.generator = generator
        rows = n_features // 2 if cosine else n_features
        normal = torch.randn(rows, *in_shape, generator=generator)
        if cosine:
            self.register_buffer("weight", normal / length_scale)
            self.register_buffer("bias", torch.zeros(rows))
        else:  # Xavier
            self.weight = nn.Parameter(normal * math.sqrt(2 / (rows + math.prod(in_shape))))
            self.bias = nn.Parameter(torch.zeros(rows))
        self.register_hyperparameter("log_scale", torch.tensor(math.log(output_scale)))
        if likelihood == "regression":
            self.register_hyperparameter("log_noise", torch.tensor(math.log(noise)))
        # q is N(A m, A L L^T A^T) with basis A, mean m, and L by its strictly lower part (the rest is ignored) and the log of its
        # diagonal
        self.register_buffer("basis", torch.eye(n_features))
        self.mean = nn.Parameter(torch.zeros(n_outputs, n_features))
        self.lower = nn.Parameter(torch.zeros(n_outputs, n_features, n_features))
        self.log_diagonal = nn.Parameter(torch.zeros(n_outputs, n_features))

    # The first layer.

    def transformed_weights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights ``[samples, rows, *in_shape]`` and biases ``[samples or 1, rows]`` of the first layer under draws.

        For coordinates that is a matrix product, exactly what transforming inputs would give. An image's pixel reads at ``T p``,
        so a pixel of the weights reads at ``T^-1 p``, times the determinant of ``T^-1``: equal up to interpolation.

        Args:
            draws: ``[1, samples, k]``, as of ``augmentation.sample(1, samples)``.
        """
        weight, bias = self.weight, self.bias.unsqueeze(0)
        if isinstance(self.augmentation, AffineImage):
            inverse = self.augmentation.matrices(-draws)
            for axis in (-2, -1):
                weight = (
                    _blur(weight.shape[axis], self.blur, weight) @ weight.movedim(axis, -2)
                ).movedim(-2, axis)
            moved = warp_images(weight.flatten(0, 1).unsqueeze(0), inverse[..., :2, :])[0].unflatten(
                1, weight.shape[:2]
            )
            return moved * torch.linalg.det(inverse[0]).to(moved).view(-1, 1, 1, 1, 1), bias
        matrices = self.augmentation.matrices(draws)[0].to(weight)
        d = self.in_shape[-1]
        moved = torch.einsum("rpi,sij->srpj", weight.view(len(weight), -1, d), matrices[:, :d])
        return moved[..., :d].reshape(-1, *weight.shape), bias + moved[..., d].sum(-1)

    def features(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the features ``[n, n_features]`` of inputs, averaged over transformations; by default those of the class."""
        if x.shape[1:] != self.in_shape or x.dtype != self.weight.dtype:
            wanted = f"[n, {', '.join(map(str, self.in_shape))}] of {self.weight.dtype}"
            raise ValueError(f"inputs must be {wanted}, got shape {list(x.shape)} of {x.dtype}")
        if draws is None:
            if torch.is_grad_enabled() and not are_fixed():
                draws = self.augmentation.sample(1, self.n_samples, self.generator)
            else:
                draws = self.augmentation.fixed(self.n_samples)
        weight, bias = self.transformed_weights(draws)
        before = (x.flatten(1) @ weight.flatten(0, 1).flatten(1).mT).unflatten(
            1, weight.shape[:2]
        ) + bias
        after = [before.cos(), before.sin()] if self.activation == "cosine" else [before.relu()]
        return torch.cat([part.mean(1) for part in after], dim=1) * math.sqrt(
            2 / self.mean.shape[1]
        )

    # The last layer.

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance ``[n, n_outputs]`` of the outputs under ``q``; given the features they are independent."""
        scaled = features @ self.basis * self.hyperparameter("log_scale").exp()
        spread = scaled @ self.lower.tril(-1) + scaled * self.log_diagonal.exp().unsqueeze(1)
        return scaled @ self.mean.mT, spread.square().sum(-1).mT

    @torch.no_grad()
    def rebase_(self, x: Tensor, n_data: int | None = None, restart: bool = False) -> None:
        """Choose the basis ``A`` in which ``q`` is optimised, such that Adam needs few steps though features are correlated.

        ``A A^T = (I + n_data c E[phi phi^T])^-1``, with the curvature ``c`` of the likelihood at outputs of zero, is about the
        covariance of the posterior under the present hyperparameters, in regression exactly. Which ``q`` can be does not change.

        Args:
            x: inputs, all or some of them.
            n_data: number of all data; None: these are all.
            restart: let ``q`` start anew from ``N(0, A A^T)`` instead of staying what it is.
        """
        features = (self.features(x) * self.log_scale.exp()).double()  # it may be all but singular
        n_outputs = len(self.mean)
        curvature = (
            (-2 * self.log_noise).exp()
            if self.likelihood == "regression"
            else (n_outputs - 1) / n_outputs**2
        )
        identity = torch.eye(features.shape[1]).to(features)
        precision = (
            identity
            + (len(x) if n_data is None else n_data) / len(x) * curvature * features.mT @ features
        )
        # P = U U^T with U upper triangular, by Cholesky from the last row up; then P^-1 = A A^T with A = U^-T
        upper = torch.linalg.cholesky(precision.flip(0, 1)).flip(0, 1)
        basis = torch.linalg.solve_triangular(upper, identity, upper=True).mT
        basis = basis.to(self.basis)
        if restart:
            for parameter in (self.mean, self.lower, self.log_diagonal):
                parameter.zero_()
        else:
            change = torch.linalg.solve_triangular(basis, self.basis, upper=False)
            root = change @ (self.lower.tril(-1) + torch.diag_embed(self.log_diagonal.exp()))
            self.mean.copy_(self.mean @ change.mT)
            self.lower.copy_(root)
            self.log_diagonal.copy_(root.diagonal(dim1=-2, dim2=-1).log())
        self.basis.copy_(basis)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the outputs ``[n, n_outputs]``: logits, or predictions."""
        return self.features(x) @ self.basis @ self.mean.mT * self.hyperparameter("log_scale").exp()

    def kl(self) -> Tensor:
        """Return the divergence of ``q`` from the prior, ``sum_c (tr S_c + |m_c|^2 - n_features - log det S_c) / 2``."""
        root = self.lower.tril(-1) + torch.diag_embed(self.log_diagonal.exp())
        squares = (self.basis @ root).square().sum() + (self.mean @ self.basis.mT).square().sum()
        log_root = self.log_diagonal.sum() + len(self.mean) * self.basis.diagonal().log().sum()
        return (squares - self.mean.numel()) / 2 - log_root

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log densities ``[..., n]`` of labels ``[n]`` or targets ``[n, outputs]`` given outputs ``[..., n, outputs]``."""
        if self.likelihood == "classification":
            if y.shape != outputs.shape[-2:-1] or y.is_floating_point():
                raise ValueError(
                    f"labels must be integers [n], got shape {list(y.shape)} of {y.dtype}"
                )
            if y.min() < 0 or y.max() >= outputs.shape[-1]:
                raise ValueError(
                    f"labels must be from 0 to {outputs.shape[-1] - 1}, got {y.min().item()} to {y.max().item()}"
                )
            return (
                outputs.log_softmax(-1)
                .gather(-1, y.long().expand(outputs.shape[:-1]).unsqueeze(-1))
                .squeeze(-1)
            )
        if y.shape != outputs.shape[-2:]:
            raise ValueError(
                f"targets must be {list(outputs.shape[-2:])}, got shape {list(y.shape)}"
            )
        log_noise = self.hyperparameter("log_noise")
        squares = (
            (y - outputs).square() / (2 * log_noise).exp() + 2 * log_noise + math.log(2 * math.pi)
        )
        return -squares.sum(-1) / 2

    def expected_log_likelihood(self, x: Tensor, y: Tensor, n_outputs_drawn: int = 4) -> Tensor:
        """Return ``E_q[log p(y_n | f(x_n))]``, ``[n]``: in closed form for regression, else over draws of the outputs."""
        mean, variance = self.moments(self.features(x))
        if self.likelihood == "regression":
            return (
                self.log_likelihood(mean, y)
                - (variance / (2 * self.hyperparameter("log_noise")).exp()).sum(-1) / 2
            )
        normal = torch.randn(
            n_outputs_drawn, *mean.shape, generator=self.generator, dtype=mean.dtype
        ).to(mean.device)
        spread = variance.clamp(
            min=1e-12
        ).sqrt()  # ReLU features may all be zero, where a root has no gradient
        return self.log_likelihood(mean + spread * normal, y).mean(0)

    def elbo(
        self, x: Tensor, y: Tensor, n_data: int | None = None, n_outputs_drawn: int = 4
    ) -> Tensor:
        """Return the lower bound on the log evidence of ``n_data`` data, without bias from a batch; None: these are all.

        Differentiable in hyperparameters. Draws of transformations keep it a bound: log likelihoods are concave in the outputs.
        """
        with differentiable():
            fit = self.expected_log_likelihood(x, y, n_outputs_drawn).mean()
        return (len(x) if n_data is None else n_data) * fit - self.kl()

    def point_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean log likelihood of data at the mean of ``q``; differentiable in hyperparameters, like the ELBO."""
        with differentiable():
            return self.log_likelihood(self(x), y).mean()

    @torch.no_grad()
    def filter_bank(self, rows: int, n_samples: int = 7) -> Tensor:
        """Return the first layer's first rows as transformations go from one end of their range to the other, evenly.

        Returns:
            Weights ``[rows, n_samples, *in_shape]``; an odd number of samples has the row itself in the middle.
        """
        draws = (
            torch.linspace(-1, 1, n_samples)
            .to(self.weight)
            .view(1, -1, 1)
            .repeat(1, 1, len(self.augmentation.names))
        )
        return self.transformed_weights(draws)[0][:, :rows].transpose(0, 1)


def _check(augmentation: AffineImage | AffinePoints, in_shape: tuple[int, ...]) -> None:
    if isinstance(augmentation, AffineImage):
        fits, wanted = len(in_shape) == 3, "(channels, height, width)"
    elif isinstance(augmentation, AffinePoints):
        d = augmentation.dimensions
        fits, wanted = len(in_shape) in (1, 2) and in_shape[-1] == d, f"({d},) or (points, {d})"
    else:
        raise TypeError(
            f"weights are transformed by an AffineImage or AffinePoints, got {type(augmentation).__name__}"
        )
    if not fits or min(in_shape) < 1:
        raise ValueError(f"{type(augmentation).__name__} needs in_shape {wanted}, got {in_shape}")


def _blur(size: int, width: float, like: Tensor) -> Tensor:
    """Return the matrix ``[size, size]`` of a Gaussian blur along an axis, zero outside; ``width`` is in half-sizes."""
    steps = torch.arange(size, device=like.device, dtype=like.dtype)
    steps = (steps.unsqueeze(1) - steps) * 2 / max(width * (size - 1), 1e-6)
    kernel = torch.exp(-steps.square() / 2)
    return kernel / kernel[size // 2].sum()


def fit(
    model: ShallowNetwork,
    x: Tensor,
    y: Tensor,
    objective: str = "elbo",
    n_epochs: int = 6,
    batch_size: int = 128,
    lr: float = 0.02,
    lr_mean: float = 0.3,
    lr_hyper: float = 0.1,
    n_epochs_burnin: int = 1,
    progress_bar: bool = False,
) -> list[dict[str, Any]]:
    """Maximise an objective by Adam over parameters and hyperparameters, with step sizes that fall to zero along half a cosine.

    Args:
        model: to train, in place; its ``q`` starts anew.
        x: inputs ``[n, *in_shape]``.
        y: labels ``[n]`` or targets ``[n, n_outputs]``.
        objective: one of ``OBJECTIVES``.
        n_epochs: passes over the data.
        batch_size: data per step.
        lr: step size at the start: of the covariance of ``q``, and of ReLU weights.
        lr_mean: that of the mean of ``q``, which is in units of its standard deviation and goes far.
        lr_hyper: that of hyperparameters.
        n_epochs_burnin: epochs, fewer than all, in which hyperparameters stay, since their gradient means nothing before ``q``
            fits at all: then any wide range looks good.
        progress_bar: show one.

    Returns:
        One record per epoch: ``epoch``, ``objective`` per datum, mean over its batches, and ``ranges`` at its end.
    """
    _check_training(x, y, objective, n_epochs, batch_size)
    if n_epochs_burnin >= n_epochs:
        raise ValueError(
            f"nothing is learnt in n_epochs={n_epochs} if n_epochs_burnin={n_epochs_burnin} of them are burn-in"
        )
    learnt = [tensor for tensor in hyperparameters(model) if tensor.requires_grad]
    rest = [parameter for parameter in model.parameters() if parameter is not model.mean]
    groups = [
        {"params": [model.mean], "lr": lr_mean},
        {"params": rest, "lr": lr},
        {"params": learnt, "lr": lr_hyper},
    ]
    optimizer = torch.optim.Adam(groups)
    n_steps = n_epochs * -(-len(x) // batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    history: list[dict[str, Any]] = []
    bar = tqdm.tqdm(range(1, n_epochs + 1), disable=not progress_bar, unit="epoch")
    for epoch in bar:
        total = 0.0
        model.rebase_(x[:N_BASIS], len(x), restart=epoch == 1)
        for batch in (
            torch.randperm(len(x), generator=model.generator).to(x.device).split(batch_size)
        ):
            value = _per_datum(model, objective, x[batch], y[batch], len(x))
            if not value.isfinite():
                raise FloatingPointError(
                    f"the {objective} is {value.item()} in epoch {epoch}; use smaller step sizes"
                )
            optimizer.zero_grad()
            (-value).backward()
            if epoch <= n_epochs_burnin:
                for tensor in learnt:
                    tensor.grad = None
            optimizer.step()
            scheduler.step()
            model.augmentation.project_()
            total += value.item() * len(batch)
        history.append(
            {"epoch": epoch, "objective": total / len(x), "ranges": model.augmentation.magnitudes()}
        )
        bar.set_postfix({objective: f"{total / len(x):.3f}", **_widest(model.augmentation)})
    return history


def _per_datum(model: ShallowNetwork, objective: str, x: Tensor, y: Tensor, n_data: int) -> Tensor:
    return (
        model.elbo(x, y, n_data) / n_data
        if objective == "elbo"
        else model.point_log_likelihood(x, y)
    )


def _check_training(x: Tensor, y: Tensor, objective: str, n_epochs: int, batch_size: int) -> None:
    if objective not in OBJECTIVES:
        raise ValueError(f"unknown objective {objective!r}; choose from {', '.join(OBJECTIVES)}")
    if n_epochs < 1 or batch_size < 1:
        raise ValueError(
            f"n_epochs and batch_size must be positive, got {n_epochs} and {batch_size}"
        )
    if len(x) != len(y) or not len(x):
        raise ValueError(
            f"there must be inputs, and as many labels or targets, got {len(x)} and {len(y)}"
        )
    if not (x.isfinite().all() and y.isfinite().all()):
        raise ValueError("inputs or targets hold NaN or infinite values")


def _widest(augmentation: AffineImage | AffinePoints) -> dict[str, str]:
    magnitudes = augmentation.magnitudes()
    name = max(magnitudes, key=magnitudes.__getitem__)
    return {name: augmentation.ranges()[name]}
