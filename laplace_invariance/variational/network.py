"""The shallow network, its first layer under transformations, and the bound on its evidence."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from laplace_invariance.augmentations import AffineImage, AffinePoints
from laplace_invariance.augmentations.affine import warp_images
from laplace_invariance.augmentations.base import check_n_samples
from laplace_invariance.draws import are_fixed, taped
from laplace_invariance.hyper import Hyperparameterised, differentiable

__all__ = ["ACTIVATIONS", "ShallowNetwork"]

ACTIVATIONS = ("cosine", "relu")
LIKELIHOODS = ("classification", "regression")


class ShallowNetwork(Hyperparameterised):
    """One hidden layer under transformations of its weights, and a Gaussian over the last layer.

    Draws of transformations are shared by a batch; they are fresh wherever gradients are enabled
    and one fixed, evenly spread set under ``torch.no_grad()``. The ELBO is differentiable in the
    hyperparameters: ranges of the augmentation, ``log_scale`` of the outputs and, in regression,
    ``log_noise``.

    Args:
        augmentation: An ``AffineImage`` or ``AffinePoints``.
        in_shape: Shape of one input: channels, height and width, or coordinates, or points and
            coordinates.
        n_outputs: Number of classes, or of targets.
        n_features: Width of the hidden layer; even for cosines, which come in pairs of one
            frequency, a quarter period apart.
        activation: ``"cosine"``, random Fourier features whose weights stay as drawn: as the width
            grows, a Gaussian process with squared-exponential kernel; or ``"relu"``, with weights
            to be learnt.
        likelihood: ``"classification"`` (softmax) or ``"regression"`` (Gaussian).
        n_samples: Number of transformations that the features are averaged over.
        length_scale: Length scale of that kernel, in units of the (blurred) input.
        output_scale: Initial standard deviation of the outputs under the prior, without
            transformations; it is learnt.
        noise: Initial standard deviation of targets in regression; it is learnt.
        blur: Standard deviation in half-widths of a Gaussian that limits the frequencies in rows of
            the first layer, for images, whose resampling would otherwise do so.
        generator: Source of the weights and draws; None is torch's default generator.
    """

    weight: Tensor
    bias: Tensor
    basis: Tensor
    log_scale: Tensor
    log_noise: Tensor

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
        _check_in_shape(augmentation, in_shape)
        _check_choices(activation=(activation, ACTIVATIONS), likelihood=(likelihood, LIKELIHOODS))
        _check_positive(length_scale=length_scale, output_scale=output_scale, noise=noise)
        if not 0 <= blur < math.inf:
            raise ValueError(f"blur must not be negative, got {blur}")
        if n_outputs < 1 + (likelihood == "classification"):
            raise ValueError(f"{likelihood} with n_outputs = {n_outputs} has nothing to predict")
        self.augmentation = augmentation
        self.in_shape = in_shape
        self.activation = activation
        self.likelihood = likelihood
        self.n_samples = check_n_samples(n_samples)
        self.blur = blur
        self.generator = generator
        self._add_first_layer(n_features, length_scale)
        self.register_hyperparameter("log_scale", torch.tensor(math.log(output_scale)))
        if likelihood == "regression":
            self.register_hyperparameter("log_noise", torch.tensor(math.log(noise)))
        # q is N(A m, A L L^T A^T) with basis A, mean m, and L by its strictly lower part (the rest
        # is ignored) and the logarithm of its diagonal
        self.register_buffer("basis", torch.eye(n_features))
        self.mean = nn.Parameter(torch.zeros(n_outputs, n_features))
        self.lower = nn.Parameter(torch.zeros(n_outputs, n_features, n_features))
        self.log_diagonal = nn.Parameter(torch.zeros(n_outputs, n_features))

    def _add_first_layer(self, n_features: int, length_scale: float) -> None:
        """Draw the weights: buffers for cosines, parameters with Xavier's variance for ReLU."""
        cosine = self.activation == "cosine"
        if n_features < 1 or (cosine and n_features % 2):
            rule = "positive, and even for cosines" if cosine else "positive"
            raise ValueError(f"n_features must be {rule}, got {n_features}")
        rows = n_features // 2 if cosine else n_features
        normal = torch.randn(rows, *self.in_shape, generator=self.generator)
        if cosine:
            self.register_buffer("weight", normal / length_scale)
            self.register_buffer("bias", torch.zeros(rows))
        else:
            self.weight = nn.Parameter(normal * math.sqrt(2 / (rows + math.prod(self.in_shape))))
            self.bias = nn.Parameter(torch.zeros(rows))

    # The first layer.

    def transformed_weights(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and biases of the first layer, transformed.

        For coordinates that is a matrix product, exactly what transforming inputs would give. An
        image's pixel reads at ``T p``, so a pixel of the weights reads at ``T^-1 p``, times the
        determinant of ``T^-1``: equal up to interpolation.

        Args:
            draws: Draws ``[1, samples, k]``, as of ``augmentation.sample(1, samples)``.

        Returns:
            Weights ``[samples, rows, *in_shape]`` and biases ``[samples or 1, rows]``.
        """
        bias = self.bias.unsqueeze(0)
        if isinstance(self.augmentation, AffineImage):
            return self._warped_weights(draws), bias
        d = self.in_shape[-1]
        matrices = self.augmentation.matrices(draws)[0].to(self.weight)
        points = self.weight.view(len(self.weight), -1, d)
        products = torch.einsum("rpi,sij->srpj", points, matrices[:, :d])
        weights = products[..., :d].reshape(-1, *self.weight.shape)
        return weights, bias + products[..., d].sum(-1)

    def _warped_weights(self, draws: Tensor) -> Tensor:
        height, width = self.in_shape[-2:]
        blurred = _blur(height, self.blur, self.weight) @ self.weight
        blurred = (_blur(width, self.blur, self.weight) @ blurred.mT).mT
        inverse = self.augmentation.matrices(-draws)
        images = rearrange(blurred, "r c h w -> 1 (r c) h w")
        warped = warp_images(images, inverse[..., :2, :])
        warped = rearrange(warped, "1 s (r c) h w -> s r c h w", r=len(blurred))
        return warped * torch.linalg.det(inverse[0]).to(warped).view(-1, 1, 1, 1, 1)

    def _shared_draws(self, n: int) -> Tensor:
        """Return fresh draws ``[1, samples, k]`` for all of ``n`` inputs."""
        return self.augmentation.sample(1, self.n_samples, self.generator)

    def features(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the features ``[n, n_features]`` of inputs, averaged over transformations.

        Args:
            x: Inputs ``[n, *in_shape]``.
            draws: Draws ``[1, samples, k]``; None is fresh or fixed ones, as the class says.
        """
        if x.shape[1:] != self.in_shape or x.dtype != self.weight.dtype:
            wanted = f"[n, {', '.join(map(str, self.in_shape))}] of {self.weight.dtype}"
            raise ValueError(f"inputs must be {wanted}, got shape {list(x.shape)} of {x.dtype}")
        if draws is None and are_fixed():
            draws = self.augmentation.fixed(self.n_samples)
        elif draws is None:
            draws = taped(self._shared_draws, len(x))
        weight, bias = self.transformed_weights(draws)
        rows = rearrange(weight, "s r ... -> (s r) (...)")
        hidden = rearrange(x.flatten(1) @ rows.mT, "n (s r) -> n s r", s=len(weight)) + bias
        if self.activation == "cosine":
            features = torch.cat([hidden.cos().mean(1), hidden.sin().mean(1)], dim=1)
        else:
            features = hidden.relu().mean(1)
        return features * math.sqrt(2 / self.mean.shape[1])

    @torch.no_grad()
    def filter_bank(self, rows: int, n_samples: int = 7) -> Tensor:
        """Return the first rows of the first layer, ``[rows, n_samples, *in_shape]``.

        They are transformed in even steps from one end of the ranges to the other; an odd number of
        samples has the row itself in the middle.
        """
        steps = torch.linspace(-1, 1, n_samples).to(self.weight).view(1, -1, 1)
        draws = steps.repeat(1, 1, len(self.augmentation.names))
        return self.transformed_weights(draws)[0][:, :rows].transpose(0, 1)

    # The last layer.

    def _root(self) -> Tensor:
        """Return ``L`` ``[n_outputs, n_features, n_features]`` of ``q``, in its basis."""
        return self.lower.tril(-1) + torch.diag_embed(self.log_diagonal.exp())

    def moments(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance ``[n, n_outputs]`` of the outputs under ``q``.

        Given the features ``[n, n_features]`` the outputs are independent.
        """
        scaled = features @ self.basis * self.hyperparameter("log_scale").exp()
        spread = scaled @ self.lower.tril(-1) + scaled * self.log_diagonal.exp().unsqueeze(1)
        return scaled @ self.mean.mT, spread.square().sum(-1).mT

    @torch.no_grad()
    def rebase_(self, x: Tensor, n_data: int | None = None, restart: bool = False) -> None:
        """Choose the basis ``A`` in which ``q`` is optimised, so that Adam needs few steps.

        ``A A^T = (I + n_data c E[phi phi^T])^-1``, with the curvature ``c`` of the likelihood at
        outputs of zero, is about the covariance of the posterior under the present
        hyperparameters, in regression exactly. The family of ``q`` does not change.

        Args:
            x: Inputs ``[n, *in_shape]``, all or some of them.
            n_data: Number of all data; None if these are all.
            restart: Whether to restart ``q`` from ``N(0, A A^T)`` instead of keeping it.
        """
        basis = self._posterior_basis(x, n_data)
        if restart:
            for parameter in (self.mean, self.lower, self.log_diagonal):
                parameter.zero_()
        else:
            change = torch.linalg.solve_triangular(basis, self.basis, upper=False)
            root = change @ self._root()
            self.mean.copy_(self.mean @ change.mT)
            self.lower.copy_(root)
            self.log_diagonal.copy_(root.diagonal(dim1=-2, dim2=-1).log())
        self.basis.copy_(basis)

    def _posterior_basis(self, x: Tensor, n_data: int | None) -> Tensor:
        # in double precision, because the precision matrix may be all but singular
        features = (self.features(x) * self.log_scale.exp()).double()
        n_outputs = len(self.mean)
        curvature: Tensor | float = (n_outputs - 1) / n_outputs**2
        if self.likelihood == "regression":
            curvature = (-2 * self.log_noise).exp()
        if n_data is None:
            n_data = len(x)
        identity = torch.eye(features.shape[1]).to(features)
        precision = identity + n_data / len(x) * curvature * features.mT @ features
        # P = U U^T with U upper triangular, by Cholesky from the last row up; then A = U^-T
        upper = torch.linalg.cholesky(precision.flip(0, 1)).flip(0, 1)
        return torch.linalg.solve_triangular(upper, identity, upper=True).mT.to(self.basis)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the outputs ``[n, n_outputs]``: logits, or predictions."""
        return self.features(x) @ self.basis @ self.mean.mT * self.hyperparameter("log_scale").exp()

    # The objectives.

    def kl(self) -> Tensor:
        """Return the divergence ``sum_c (tr S_c + |m_c|^2 - n_features - log det S_c) / 2``."""
        squares = (self.basis @ self._root()).square().sum()
        squares = squares + (self.mean @ self.basis.mT).square().sum()
        log_root = self.log_diagonal.sum() + len(self.mean) * self.basis.diagonal().log().sum()
        return (squares - self.mean.numel()) / 2 - log_root

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log densities ``[..., n]`` of data given outputs.

        Args:
            outputs: Outputs ``[..., n, n_outputs]``.
            y: Labels ``[n]``, or targets ``[n, n_outputs]``.
        """
        if self.likelihood == "classification":
            _check_labels(y, outputs)
            index = y.long().expand(outputs.shape[:-1]).unsqueeze(-1)
            return outputs.log_softmax(-1).gather(-1, index).squeeze(-1)
        if y.shape != outputs.shape[-2:]:
            raise ValueError(
                f"targets must be {list(outputs.shape[-2:])}, got shape {list(y.shape)}"
            )
        log_noise = self.hyperparameter("log_noise")
        squares = (y - outputs).square() / (2 * log_noise).exp()
        return -(squares + 2 * log_noise + math.log(2 * math.pi)).sum(-1) / 2

    def expected_log_likelihood(self, x: Tensor, y: Tensor, n_outputs_drawn: int = 4) -> Tensor:
        """Return ``E_q[log p(y_n | f(x_n))]``, ``[n]``.

        It has a closed form in regression, and is a mean over draws of the outputs in
        classification.
        """
        mean, variance = self.moments(self.features(x))
        if self.likelihood == "regression":
            at_mean = self.log_likelihood(mean, y)
            noise = (2 * self.hyperparameter("log_noise")).exp()
            return at_mean - (variance / noise).sum(-1) / 2
        shape = (n_outputs_drawn, *mean.shape)
        normal = torch.randn(shape, generator=self.generator, dtype=mean.dtype).to(mean.device)
        # ReLU features may all be zero, where a root has no gradient
        spread = variance.clamp(min=1e-12).sqrt()
        return self.log_likelihood(mean + spread * normal, y).mean(0)

    def elbo(
        self, x: Tensor, y: Tensor, n_data: int | None = None, n_outputs_drawn: int = 4
    ) -> Tensor:
        """Return the lower bound on the log evidence, estimated without bias from a batch.

        It is differentiable in hyperparameters. Draws of transformations keep it a bound, because
        log likelihoods are concave in the outputs.

        Args:
            x: Inputs ``[n, *in_shape]``.
            y: Labels ``[n]``, or targets ``[n, n_outputs]``.
            n_data: Number of all data; None if these are all.
            n_outputs_drawn: Number of draws of the outputs, for classification.
        """
        if n_data is None:
            n_data = len(x)
        with differentiable():
            mean = self.expected_log_likelihood(x, y, n_outputs_drawn).mean()
        return n_data * mean - self.kl()

    def point_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean log likelihood at the mean of ``q``, differentiable like the ELBO."""
        with differentiable():
            return self.log_likelihood(self(x), y).mean()


def _check_in_shape(augmentation: AffineImage | AffinePoints, in_shape: tuple[int, ...]) -> None:
    if isinstance(augmentation, AffineImage):
        fits, wanted = len(in_shape) == 3, "(channels, height, width)"
    elif isinstance(augmentation, AffinePoints):
        d = augmentation.dimensions
        fits, wanted = len(in_shape) in (1, 2) and in_shape[-1] == d, f"({d},) or (points, {d})"
    else:
        raise TypeError(
            "weights are transformed by an AffineImage or AffinePoints, "
            f"got {type(augmentation).__name__}"
        )
    if not fits or min(in_shape) < 1:
        raise ValueError(f"{type(augmentation).__name__} needs in_shape {wanted}, got {in_shape}")


def _check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}; choose from {', '.join(known)}")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def _check_labels(y: Tensor, outputs: Tensor) -> None:
    n, n_outputs = outputs.shape[-2:]
    if y.shape != (n,) or y.is_floating_point():
        raise ValueError(f"labels must be integers [n], got shape {list(y.shape)} of {y.dtype}")
    if y.min() < 0 or y.max() >= n_outputs:
        raise ValueError(
            f"labels must be from 0 to {n_outputs - 1}, got {y.min().item()} to {y.max().item()}"
        )


def _blur(size: int, width: float, like: Tensor) -> Tensor:
    """Return the matrix ``[size, size]`` of a Gaussian blur of ``width`` half-sizes."""
    steps = torch.arange(size, device=like.device, dtype=like.dtype)
    steps = (steps.unsqueeze(1) - steps) * 2 / max(width * (size - 1), 1e-6)
    kernel = torch.exp(-steps.square() / 2)
    return kernel / kernel[size // 2].sum()
