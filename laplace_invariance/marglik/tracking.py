"""Callbacks that write the history of a run to TensorBoard and to Weights & Biases.

Neither is needed by the library. Each is imported when its callback is made::

    marglik_training(model, loader, callbacks=[TensorBoard("logs")])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["TensorBoard", "WandB", "scalars"]

LEFT_OUT = ("epoch", "prior_precision")  # the step, and precisions without their names


class TensorBoard:
    """Writes every record of a history to TensorBoard, after each epoch.

    ``close`` ends the file; what was written before can be watched meanwhile. After a resumed run
    TensorBoard shows the epochs of both calls.

    Args:
        log_dir: Directory for the files.

    Raises:
        ImportError: If tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(log_dir))

    def __call__(self, record: Mapping[str, Any], model: nn.Module) -> None:
        """Write the numbers of one epoch."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


class WandB:
    """Sends every record of a history to Weights & Biases, after each epoch.

    Args:
        **init: Arguments of ``wandb.init``, such as ``project``, ``config`` or, for a resumed run,
            ``id`` and ``resume``.

    Raises:
        ImportError: If wandb is not installed.

    Attributes:
        run: The run that ``wandb.init`` returned.
    """

    def __init__(self, **init: Any) -> None:
        self.run = _imported("wandb", "wandb").init(**init)

    def __call__(self, record: Mapping[str, Any], model: nn.Module) -> None:
        """Send the numbers of one epoch."""
        self.run.log(scalars(record), step=record["epoch"])

    def close(self) -> None:
        """End the run."""
        self.run.finish()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a record, by names such as ``ranges/augmentation/rotation``.

    Args:
        record: One record of a history. What is None or not finite is left out.
    """
    kept = {key: value for key, value in record.items() if key not in LEFT_OUT}
    return dict(_numbers(kept, ""))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _numbers(one, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _numbers(one, f"{name}/{index}")
    elif isinstance(value, int | float) and math.isfinite(value):
        yield name, float(value)


def _imported(module: str, extra: str) -> Any:
    """Import a module that comes with an extra."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{extra} is not installed: pip install 'laplace-invariance[{extra}]'"
        ) from error
