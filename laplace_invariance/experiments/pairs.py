"""Learn a code that ignores unknown transformations, from pairs.

Data are vectors whose hidden symmetry is known to the generator alone: circular shifts of the
whole, of each of two halves, along a hidden cycle of the entries, or of a rescaled vector. Shifts
leave the moduli of the Fourier transform unchanged, and an autoencoder is told only the distances
of these, except in the task "dft", which teaches the Fourier transform itself.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from laplace_invariance import plots
from laplace_invariance.autoencoder import InvariantAutoencoder, inverse_distance_loss, network
from laplace_invariance.datasets import FOURIER_CODES, HiddenShifts, fourier_code
from laplace_invariance.experiments.base import seeded
from laplace_invariance.experiments.choices import PAIRS_TASKS
from laplace_invariance.experiments.directory import RunDirectory
from laplace_invariance.experiments.options import PairsConfig
from laplace_invariance.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PairsConfig", "PairsResult", "pairs"]


@dataclass(frozen=True)
class PairsResult:
    """Test errors and codes of all networks; prints as a table.

    Attributes:
        config: Configuration of the experiment.
        networks: By name, number of ``parameters``, ``seconds``, ``history``: one record of test
            errors per epoch, and the codes of one vector's ``orbit``, ``invariant`` and
            ``variant``, unless the encoder was not trained.
        models: Trained networks, by name, without those that were read from a file.
    """

    config: PairsConfig
    networks: dict[str, dict[str, Any]]
    models: dict[str, InvariantAutoencoder] = field(default_factory=dict, repr=False, compare=False)

    def errors(self, name: str) -> dict[str, float]:
        """Return the test errors of a network at the end of training.

        In the task "dft" these are mean squared errors of the parts of the code, of all of the
        ``code``, and of the ``reconstruction``, as far as they were trained. In all others they
        are the ``loss`` of pairs, the mean squared difference between invariant codes of a vector
        and the ``same`` vector transformed, and of ``different`` vectors, and the error of the
        ``reconstruction``.

        Args:
            name: Name of the network.
        """
        return self.networks[name]["history"][-1]

    def summary(self) -> dict[str, Any]:
        """Return configuration and networks, for JSON."""
        return {"experiment": asdict(self.config), "networks": self.networks}

    def __str__(self) -> str:
        shown = _shown(self.config)
        rows = [["network", "parameters", *shown, "seconds"]]
        for name, found in self.networks.items():
            errors = [f"{self.errors(name)[key]:.1e}" for key in shown]
            rows.append([name, str(found["parameters"]), *errors, f"{found['seconds']:.0f}"])
        return table(rows)


def pairs(
    config: PairsConfig,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    progress_bar: bool = False,
) -> PairsResult:
    """Train autoencoders on vectors with a hidden symmetry, and measure what their codes ignore.

    Args:
        config: Hidden symmetry, networks and training.
        out: Directory for ``summary.json``, written after each network, and the figure
            ``pairs.png``; None keeps nothing.
        resume: Whether to continue in ``out``: finished networks are read, the others are trained.
        progress_bar: Whether to show progress.

    Returns:
        Errors of every epoch and codes of one orbit, by network.

    Raises:
        ValueError: If the symmetry or a network cannot be built.
        FloatingPointError: If training diverges.
    """
    with seeded(config.seed):  # what cannot be built raises before anything is written
        HiddenShifts.for_task(config.task, config.n_features)
        for name in config.networks:
            _autoencoder(config, name)
    with RunDirectory(out, config, resume) as directory:
        directory.begin()
        summary = directory.finished() or {"networks": {}}
        result = PairsResult(config, summary["networks"])
        for name in config.networks:
            if name in result.networks:
                continue
            with seeded(config.seed):
                result.networks[name], result.models[name] = _train(config, name, progress_bar)
            directory.save("summary.json", result.summary())
        _draw(directory, result)
    return result


def _autoencoder(config: PairsConfig, name: str) -> InvariantAutoencoder:
    """Return a new network; one entry of its code per feature, a third of all, is invariant."""
    layer, depth = config.layer_and_depth(name)
    n_features = config.n_features
    n_code = n_features * len(FOURIER_CODES[config.code])
    width = config.width or 8 * n_features
    return InvariantAutoencoder(
        network(layer, n_features, n_code, depth, width),
        network(layer, n_code, n_features, depth, width),
        n_invariant=n_features,
    )


class _Pairs(NamedTuple):
    """Vectors ``[n, n_features]``, others, and their distances ``[n]``."""

    x: Tensor
    other: Tensor
    distance: Tensor


def _train(
    config: PairsConfig, name: str, progress_bar: bool
) -> tuple[dict[str, Any], InvariantAutoencoder]:
    """Train a network; return what ``PairsResult`` keeps of it, and the network."""
    symmetry = HiddenShifts.for_task(config.task, config.n_features)
    train = _Pairs(*symmetry.pairs(config.n_train))
    test = _Pairs(*symmetry.pairs(config.n_test))
    model = _autoencoder(config, name)
    start = time.perf_counter()
    optimizer = torch.optim.Adam(_trained(config, model), lr=_step_size(config, name))
    n_steps = config.n_epochs * math.ceil(config.n_train / config.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    history: list[dict[str, float]] = []
    bar = trange(config.n_epochs, desc=name, disable=not progress_bar)
    for _ in bar:
        for batch in torch.randperm(config.n_train).split(config.batch_size):
            loss = _loss(config, model, _Pairs(*(values[batch] for values in train)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        errors = _errors(config, model, symmetry, test)
        history.append(errors)
        if not all(math.isfinite(error) for error in errors.values()):
            raise FloatingPointError(
                f"{name} is not finite after epoch {len(history)}; a smaller lr may help"
            )
        bar.set_postfix({key: f"{errors[key]:.1e}" for key in _shown(config)})
    orbit = {}
    if config.part != "decoder":
        with torch.no_grad():
            codes = model.encode(symmetry.orbit(test.x[0]))
        orbit = {part: values.tolist() for part, values in codes._asdict().items()}
    found = {
        "parameters": sum(parameter.numel() for parameter in _trained(config, model)),
        "seconds": time.perf_counter() - start,
        "history": history,
        "orbit": orbit,
    }
    return found, model


def _trained(config: PairsConfig, model: InvariantAutoencoder) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    parts = {"both": model, "encoder": model.encoder, "decoder": model.decoder}
    return list(parts[config.part].parameters())


def _step_size(config: PairsConfig, name: str) -> float:
    """Return the configured step size, or what suits the layers."""
    if config.lr is not None:
        return config.lr
    if config.task == "dft" and name.startswith("selu"):
        return 1e-2  # better for SELU layers that are taught, and too large elsewhere
    return 3e-3


def _loss(config: PairsConfig, model: InvariantAutoencoder, pairs: _Pairs) -> Tensor:
    """Return the error of the reconstruction plus the weighted one of the code."""
    if config.task == "dft":
        code, reconstruction = _taught(config, model, pairs.x)
        taught = F.mse_loss(code, fourier_code(pairs.x, config.code))
        again = F.mse_loss(reconstruction, pairs.x)
        losses = {"both": again + config.weight * taught, "encoder": taught, "decoder": again}
        return losses[config.part]
    both = torch.cat([pairs.x, pairs.other])
    reconstruction, codes = model(both)
    code, other = codes.invariant.chunk(2)
    apart = inverse_distance_loss(code, other, pairs.distance, config.delta, config.alpha)
    return F.mse_loss(reconstruction, both) + config.weight * apart


def _taught(config: PairsConfig, model: InvariantAutoencoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes ``[n, k]`` and reconstructions ``[n, d]``; what is not trained is true."""
    true = fourier_code(x, config.code)
    if config.part == "decoder":
        return true, model.decoder(true)
    code = torch.cat(model.encode(x), 1)
    return code, x if config.part == "encoder" else model.decoder(code)


@torch.no_grad()
def _errors(
    config: PairsConfig, model: InvariantAutoencoder, symmetry: HiddenShifts, test: _Pairs
) -> dict[str, float]:
    """Return what ``PairsResult.errors`` explains."""
    found = {}
    if config.task == "dft":
        codes, reconstruction = _taught(config, model, test.x)
        errors = (codes - fourier_code(test.x, config.code)).square()
        parts = FOURIER_CODES[config.code]
        for part, values in zip(parts, errors.chunk(len(parts), 1), strict=True):
            found[part] = values.mean()
        found["code"] = errors.mean()
        found["reconstruction"] = F.mse_loss(reconstruction, test.x)
        found = {name: found[name] for name in _shown(config)}
    else:
        reconstruction, (code, _) = model(test.x)
        found["reconstruction"] = F.mse_loss(reconstruction, test.x)
        other = model.encode(test.other).invariant
        transformed = symmetry.transformed(test.x, torch.Generator().manual_seed(config.seed))
        found["loss"] = inverse_distance_loss(
            code, other, test.distance, config.delta, config.alpha
        )
        found["same"] = F.mse_loss(code, model.encode(transformed).invariant)
        found["different"] = F.mse_loss(code, code.roll(1, 0))
    return {name: value.item() for name, value in found.items()}


def _shown(config: PairsConfig) -> tuple[str, ...]:
    """Return the errors that the table and the progress bar show."""
    if config.task == "dft":
        of_code = (*FOURIER_CODES[config.code], "code")
        parts = {"encoder": of_code, "decoder": ("reconstruction",)}
        return parts.get(config.part, (*of_code, "reconstruction"))
    return ("loss", "same", "different", "reconstruction")


def _drawn(record: dict[str, float]) -> float:
    """Return the error that the figure shows.

    For pairs it is a ratio, since a code that is nearly constant is not an invariant one.
    """
    if "same" not in record:
        return record["code" if "code" in record else "reconstruction"]
    return record["same"] / (record["different"] or math.nan)


def _draw(directory: RunDirectory, result: PairsResult) -> None:
    config = result.config
    first = config.networks[0]
    label = "squared difference of invariant codes,\nsame over different vectors"
    if config.task == "dft":
        of = "vector" if config.part == "decoder" else "code"
        label = f"mean squared error of the {of}"
    curves = {}
    for name, found in result.networks.items():
        curves[name] = [_drawn(record) for record in found["history"]]

    def draw(figure: Figure) -> None:
        panels: list[Any] = [["errors", "invariant"], ["errors", "variant"]]
        if config.part == "decoder":
            panels = [["errors"]]
        axes = figure.subplot_mosaic(panels)
        plots.errors(curves, label, axes["errors"]).set_title("test error")
        for part, values in result.networks[first]["orbit"].items():
            plots.orbit_codes(values, axes[part]).set_title(f"{part} code of one vector, {first}")
        figure.suptitle(f"{config.task}: {PAIRS_TASKS[config.task]}")

    directory.figure("pairs.png", (12, 6), draw)
