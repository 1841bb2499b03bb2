"""Our layers inside of other packages, for backends of laplace-torch that these compute.

Nothing of BackPACK or ASDL is changed before :func:`.backpack.register_backpack` or
:func:`.asdl.register_asdl` is called, and all is put back when what they return is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["Registration", "dense"]


class Registration:
    """Handle of what was registered; ``with`` or :meth:`remove` undoes it.

    Args:
        undo: Called once, when the registration is removed.
    """

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Put everything back; a second call has no effect."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def dense(factor: Tensor) -> Tensor:
    """Return a Kronecker factor ``[d, d]``, given as such, as its blocks or as its diagonal.

    Other packages, and laplace's own matrix class, know no others.
    """
    if factor.ndim == 3:
        return torch.block_diag(*factor)
    return factor.diag() if factor.ndim == 1 else factor
