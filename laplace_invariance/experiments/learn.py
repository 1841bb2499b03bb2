"""Learn to which transformations images are invariant, and how far.

Images are taken as they are, or transformed in a known way, so that it is known how far they were.
All methods run through ``marglik_training`` and differ in three things only: what the network is
averaged over, the objective, and what happens to training images on the way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from laplace_invariance import datasets
from laplace_invariance.augmentations import AffineImage
from laplace_invariance.experiments import pictures
from laplace_invariance.experiments.base import (
    BATCH,
    MARGLIK_BATCH,
    N_SHOWN,
    TEST_BATCH,
    accuracy,
    chosen_device,
    cosine_recipe,
    image_model,
    load_transformed,
    network_name,
    say,
    seeded,
    training_seconds,
)
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import LearnConfig
from laplace_invariance.experiments.reports import learn_report
from laplace_invariance.experiments.results import N_COMPARED, LearnResult, data_of
from laplace_invariance.files import replace
from laplace_invariance.layers import FixupResNet, cnn, lenet, mlp
from laplace_invariance.marglik import (
    Augerino,
    Evidence,
    Objective,
    Result,
    Running,
    Search,
    log_evidence,
    marglik_training,
    plan,
)
from laplace_invariance.marglik.estimators import Estimator, chosen_estimator

__all__ = [
    "LEARN_NETWORKS",
    "LearnConfig",
    "LearnResult",
    "build_model",
    "check_run",
    "learn",
    "learnt_model",
]

START_OF_AUGERINO = 0.1
PUBLISHED_STRENGTH = 0.01  # of Augerino's reward, and
PUBLISHED_DECAY = 1e-4  # of weights, by the mean loss
N_TOGETHER = 2000  # transformed images in a batch of an estimate
MOST_FULL = 10_000  # weights whose full curvature fits into memory


def _resnet(in_shape: tuple[int, ...], n_classes: int, depth: int, width: int) -> FixupResNet:
    return FixupResNet(in_shape[0], n_classes, depth, width)


LEARN_NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet": lenet,
    "resnet": partial(_resnet, depth=8, width=16),
    "wide-resnet": partial(_resnet, depth=14, width=64),
}


def learn(
    config: LearnConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> LearnResult:
    """Train one network, and learn to which transformations it should be invariant.

    Args:
        config: Images, transformation, method and network.
        out: Directory for ``checkpoint.pt``, ``history.jsonl``, ``summary.json`` and figures; None
            keeps nothing.
        resume: Whether to continue from a checkpoint in ``out``; a finished run is read.
        progress_bar: Whether to show progress.

    Returns:
        Learnt ranges, test accuracy and evidence.
    """
    with RunDirectory(out, config, resume) as directory, seeded(config.seed):
        summary = directory.finished()
        if summary is not None:
            del summary["experiment"]
            finished = LearnResult(config, **summary)
            if directory.writes:
                learn_report(directory, finished)
            return finished
        split, model = _prepare(config)
        directory.begin()
        start = time.perf_counter()
        training = _train(config, split, model, directory, progress_bar)
        # The history has the time of interrupted calls before, the clock that of validation.
        seconds = max(training_seconds(training.history), time.perf_counter() - start)
        result = _result(config, split, training, seconds)
        if not directory.writes:
            return result
        model_file = directory.path("model.pt")
        if model_file is not None:
            replace(model_file, lambda file: torch.save(model.state_dict(), file))
        estimator = chosen_estimator(_estimator(config), training.model, _objective(config))
        pictures.draw_learn(directory, result, _augmentation(config), estimator, split)
        directory.save("summary.json", result.summary())
        learn_report(directory, result)
    return result


def check_run(config: LearnConfig) -> None:
    """Raise what :func:`learn` would raise before it trains or writes anything.

    Args:
        config: Images, transformation, method and network.
    """
    with seeded(config.seed):
        _prepare(config)


def _result(
    config: LearnConfig, split: datasets.Split, training: Result, seconds: float
) -> LearnResult:
    """Put together what was learnt."""
    augmentation = getattr(training.model, "augmentation", None)
    n_train = len(split.x_train)
    n_samples = training.n_samples.get("", 1)
    compared = training.evidence / n_train
    if n_samples > 1:
        compared = _compared_evidence(config, split, training.model) / n_train
    rate = None
    if split.has_test:
        rate = accuracy(training.model, TensorDataset(split.x_test, split.y_test))
    true = datasets.true_ranges(config.transform, split.in_shape)
    return LearnResult(
        config,
        data=data_of(split),
        net=network_name(config.net, split),
        accuracy=rate,
        evidence=training.evidence / n_train,
        evidence_error=training.evidence_error / n_train,
        newton_decrement=training.newton_decrement / n_train,
        n_samples=n_samples,
        **_learnt(augmentation, split.in_shape),
        truth={name: value for name, value in true.items() if value > 0},
        scale_correlation=_scale_correlation(config, augmentation),
        seconds=seconds,
        evidence_compared=compared,
        search=None if training.search is None else training.search.state_dict(),
        training=training,
    )


def _compared_evidence(config: LearnConfig, split: datasets.Split, model: nn.Module) -> float:
    """Return the log evidence with as many samples as in all runs, from a few random directions.

    All directions would take as long as many epochs, and give the same within some 0.002 nats per
    image.
    """
    options = {} if config.curvature.endswith("ef") else {"stochastic": True, "num_samples": 2}
    return log_evidence(
        model,
        DataLoader(TensorDataset(split.x_train, split.y_train), N_TOGETHER // N_COMPARED),
        n_samples=N_COMPARED,
        hessian_structure=config.structure,
        backend=config.curvature,
        backend_kwargs=options,
        prior_structure=config.prior_structure,
        subset_of_weights=config.subset_of_weights,
    )


def learnt_model(result: LearnResult, out: str | Path | None) -> tuple[nn.Module, TensorDataset]:
    """Return the model of a run of :func:`learn`, and the images that it was trained on.

    Args:
        result: Result of the run, perhaps read from a file.
        out: Directory of the run, whose checkpoint has the model then.

    Raises:
        FileExistsError: If the directory has a run without its checkpoint.
    """
    config = result.config
    with RunDirectory(out, config, resume=True) as directory, seeded(config.seed):
        split, model = _prepare(config)
        if result.training is not None:
            model = result.training.model
        else:
            directory.lock()
            _train(config, split, model, directory, progress_bar=False)  # no epoch is left
    return model, TensorDataset(split.x_train, split.y_train)


def _prepare(config: LearnConfig) -> tuple[datasets.Split, nn.Module]:
    """Return transformed images, and the model as training starts with it."""
    device = chosen_device(config.device)
    split = load_transformed(config, config.transform, config.seed, needs_test=False)
    model = build_model(config, network_name(config.net, split), split.n_classes, split.x_train)
    if config.structure == "full" and config.subset_of_weights == "all":
        _check_full(model)
    return split, model.to(device)


def build_model(config: LearnConfig, net: str, n_classes: int, images: Tensor) -> nn.Module:
    """Return the model of a configuration, as training starts with it.

    Args:
        config: Augmentation, and number of samples.
        net: Network, a name in ``LEARN_NETWORKS``.
        n_classes: Number of outputs.
        images: Images ``[n, channels, height, width]`` of which the model takes mean and deviation.
    """
    augmentation = _augmentation(config)
    network = LEARN_NETWORKS[net](tuple(images.shape[1:]), n_classes)
    # One sample is an unbiased estimate of what is averaged if losses, and curvatures, are.
    n_samples = config.n_samples if config.average == "outputs" else 1
    return image_model(network, images, augmentation, n_samples)


def _check_full(model: nn.Module) -> None:
    """Raise if a matrix of all weights would not fit into memory, or take forever."""
    n = sum(weight.numel() for weight in model.parameters())
    if n > MOST_FULL:
        raise ValueError(
            f"a full curvature of {n} weights has {n} x {n} entries, and at most {MOST_FULL} "
            "weights are allowed; choose structure kron or diag, or subset_of_weights last_layer"
        )


def _augmentation(config: LearnConfig) -> AffineImage | None:
    options: dict[str, Any] = {"draws": config.draws}
    if config.method == "fixed":
        return AffineImage(init=dict(config.fixed), **options).frozen()
    options |= {"learn": config.learn, "correlated": config.correlated}
    if config.method == "evidence":
        return AffineImage(init=dict(config.init), **options)
    if config.method == "augerino":
        return AffineImage(init=dict(config.init) or START_OF_AUGERINO, **options)
    if config.method == "augerino-published":
        return AffineImage(init=dict(config.init), **options)
    return None


def _objective(config: LearnConfig) -> Objective:
    if config.method == "augerino":
        return Augerino(config.strength)
    if config.method == "augerino-published":
        return Augerino(PUBLISHED_STRENGTH, learn_priors=False)
    return Evidence()


def _train(
    config: LearnConfig,
    split: datasets.Split,
    model: nn.Module,
    directory: RunDirectory,
    progress_bar: bool,
) -> Result:
    train = TensorDataset(split.x_train, split.y_train)
    shown = None
    if split.has_test:
        test = TensorDataset(split.x_test[:N_SHOWN], split.y_test[:N_SHOWN])
        shown = DataLoader(test, TEST_BATCH)
    collate = None
    if config.method == "trivial-augment":
        collate = _trivially_augmented
    loader = DataLoader(train, BATCH, shuffle=True, collate_fn=collate)
    recipe = cosine_recipe(config.n_epochs, len(loader))
    if config.curvature.endswith("ef"):  # of gradients, whose directions are not sampled
        recipe["backend_kwargs"] = {}
    rate = config.lr_aug
    if config.method in ("augerino", "augerino-published"):
        rate = config.lr_augerino
    precision = 1.0
    if config.method == "augerino-published":
        precision = PUBLISHED_DECAY * len(train)
    evidence_loader = DataLoader(train, MARGLIK_BATCH)
    if progress_bar and directory.writes and _estimator(config) != "kernel":
        say(_planned(config, model, evidence_loader, recipe["backend_kwargs"]), progress_bar)
    return marglik_training(
        model,
        loader,
        objective=_objective(config),
        estimator=_estimator(config),
        search=_search(config),
        lr_aug=rate,
        subset_of_weights=config.subset_of_weights,
        hessian_structure=config.structure,
        prior_structure=config.prior_structure,
        prior_prec_init=precision,
        marglik_loader=evidence_loader,
        valid_loader=shown,
        checkpoint=directory.path("checkpoint.pt"),
        history=directory.path("history.jsonl"),
        resume=directory.resume,
        progress_bar=progress_bar,
        backend=config.curvature,
        **recipe,
    )


def _planned(
    config: LearnConfig, model: nn.Module, loader: DataLoader, options: dict[str, Any]
) -> str:
    """Return in one line what curvature will take."""
    found = plan(
        model,
        loader,
        hessian_structure=config.structure,
        subset_of_weights=config.subset_of_weights,
        backend=config.curvature,
        backend_kwargs=options,
    )
    return found.summary()


def _estimator(config: LearnConfig) -> str | Estimator:
    """Return the estimator; one that sees training images must not see augmented."""
    name = config.estimator
    if name is None:
        name = "refit" if config.method == "trivial-augment" else "running"
    if name == "running" and config.average == "losses":
        return Running(oversampling=1)  # outputs of several samples would be averaged
    return name


def _search(config: LearnConfig) -> bool | Search:
    """Return how starts of ranges are searched, and whether they are."""
    if config.method != "evidence" or not config.searches:
        return False
    return Search(oversampling=1) if config.average == "losses" else True


def _trivially_augmented(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate examples, each image through a transform of torchvision that takes uint8."""
    from torchvision.transforms import v2

    transform = v2.TrivialAugmentWide()
    x, y = default_collate(examples)
    images = [transform(image) for image in (x * 255).round().to(torch.uint8)]
    return torch.stack(images).to(x.dtype) / 255, y


def _learnt(augmentation: AffineImage | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the ranges of an augmentation, in words and as numbers."""
    if augmentation is None:
        return {"ranges": {}, "magnitudes": {}}
    return {"ranges": augmentation.ranges(shape), "magnitudes": augmentation.magnitudes()}


@torch.no_grad()
def _scale_correlation(config: LearnConfig, augmentation: AffineImage | None) -> float | None:
    """Return the correlation of x- and y-scale under the learnt distribution, if there is one.

    Draws are uncorrelated and of equal variance, so it is the cosine between two rows of the map
    from draws to coefficients.
    """
    if augmentation is None or not config.correlated:
        return None
    draws = torch.eye(len(augmentation.names)).to(augmentation.eta)
    columns = augmentation.coefficients(draws).unbind(1)
    x_scale, y_scale = (columns[augmentation.names.index(f"{axis}_scale")] for axis in "xy")
    return F.cosine_similarity(x_scale, y_scale, dim=0).item()
