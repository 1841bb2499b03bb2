"""Show how far a pass through the data is, if it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tqdm

__all__ = ["Shown"]

DELAY = 5  # seconds until a progress bar appears


class Shown:
    """A loader whose batches are counted by a progress bar, from some seconds on.

    Args:
        loader: Loader, or any iterable; its attributes are those of this object, too.
        description: What the pass is for.
        progress_bar: Whether a progress bar is shown at all.
    """

    def __init__(self, loader: Any, description: str, progress_bar: bool) -> None:
        self._loader = loader
        self._options = {"desc": description, "disable": not progress_bar}

    def __iter__(self) -> Iterator[Any]:
        yield from tqdm.tqdm(self._loader, unit="batch", delay=DELAY, leave=False, **self._options)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
