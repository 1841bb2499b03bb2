"""Count the memory and the work of code that runs on shapes alone.

Tensors inside :func:`on_shapes` have shape, type and device, but no numbers: torch's fake tensors.
Whatever runs on them allocates nothing. Every operation passes a :class:`Meter`, which sees the
storages that come and go, and adds up the work. So the code that is measured is that which will
run, and no formula has to follow it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

__all__ = ["Meter", "Spent", "eigh_work", "on_shapes"]

# An element that another operation than a product writes takes about as long as so many
# operations of a product of matrices.
WORK_OF_ELEMENT = 20

# Work of eigenvalues of a [d, d] matrix, with and without eigenvectors, over d^3: time measured,
# as that of a product of matrices.
WORK_OF_EIGENVECTORS = 13
WORK_OF_EIGENVALUES = 5

aten = torch.ops.aten

Result = TypeVar("Result")


@dataclass(frozen=True)
class Spent(Generic[Result]):
    """What a function returned, and what it took.

    Attributes:
        result: What it returned.
        peak: Most bytes that it held at once, its result included.
        kept: Bytes that its result holds.
        work: Number of floating-point operations that take about as long.
    """

    result: Result
    peak: int
    kept: int
    work: float


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, their peak, and the work of operations.

    Args:
        free: Tensors whose storage does not count, because it is there anyway.
    """

    def __init__(self, free: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known: set[int] = set()
        self._free: list[Tensor] = []  # kept, as the address of one that is gone is used again
        self._now = 0
        self._peak = 0
        self._work = 0.0
        for tensor in free:
            self.ignore(tensor)

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor."""
        self._free.append(tensor)
        self._known.add(tensor.untyped_storage()._cdata)

    def spent(self, function: Callable[[], Result]) -> Spent[Result]:
        """Call a function, and return what it took beyond what was there before."""
        start, work = self._now, self._work
        self._peak = start
        result = function()
        return Spent(result, self._peak - start, self._now - start, self._work - work)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # most calls are of this kind
        kwargs = kwargs or {}
        known, answer = _answer(func, args, kwargs)
        if known:
            return answer
        output = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            self._see(tensor)
        self._peak = max(self._peak, self._now + _workspace(func, args, kwargs, tensors))
        self._work += _work(func, args, kwargs, output, tensors)
        return output

    def _see(self, tensor: Tensor) -> None:
        """Count a storage that was not there before, until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += size
        self._peak = max(self._peak, self._now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


@contextmanager
def on_shapes(free: Iterable[Tensor] = ()) -> Iterator[tuple[Meter, Callable[[Tensor], Tensor]]]:
    """Run operations on shapes alone inside the context.

    Args:
        free: Real tensors, such as parameters, whose memory does not count.

    Yields:
        The meter of what runs, and a function that returns the shape of a real tensor as a tensor.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter([mode.from_tensor(tensor) for tensor in free])

    def shape_of(tensor: Tensor) -> Tensor:
        shape = mode.from_tensor(tensor)
        meter.ignore(shape)
        return shape

    # what only the garbage collector frees would be there or not by chance
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with mode, meter:
            yield meter, shape_of
    finally:
        if was_enabled:
            gc.enable()


def _answer(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[bool, Any]:
    """Return whether an operation asks for numbers that there are not, and a harmless answer.

    Numbers are finite, matrices differ, and counts have as many bins as they must have.
    """
    if func is aten._local_scalar_dense.default:
        return True, 1
    if func is aten.equal.default:
        return True, False
    if func is aten.bincount.default:
        n_bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        return True, torch.empty(n_bins, dtype=torch.long, device=args[0].device)
    return False, None


def _workspace(func: Any, args: Sequence[Any], kwargs: Any, outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operation needs besides its inputs and outputs, as measured."""
    if func is aten._linalg_eigh.default and _with_vectors(args, kwargs):
        d = args[0].shape[-1]
        return (2 * d * d + 6 * d + 1) * args[0].element_size()  # of LAPACK's syevd
    # convolutions of oneDNN copy what they write, and read backwards, to a layout of their own
    if func is aten.convolution.default:
        return outputs[0].nbytes
    if func is aten.convolution_backward.default:
        return args[0].nbytes + args[1].nbytes
    return 0


def _with_vectors(args: Sequence[Any], kwargs: Any) -> bool:
    return kwargs.get("compute_v", args[2] if len(args) > 2 else True)


def _work(
    func: Any, args: Sequence[Any], kwargs: Any, output: Any, tensors: Sequence[Tensor]
) -> float:
    """Return the work of an operation."""
    if func is aten._linalg_eigh.default:
        *blocks, d, _ = args[0].shape
        return torch.Size(blocks).numel() * eigh_work(d, _with_vectors(args, kwargs))
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return count(*args, **kwargs, out_val=output)
    if func.is_view:
        return 0.0
    return WORK_OF_ELEMENT * sum(tensor.numel() for tensor in tensors)


def eigh_work(d: int, vectors: bool = True) -> float:
    """Return the work of decomposing a symmetric matrix.

    Args:
        d: Number of its rows.
        vectors: Whether eigenvectors are wanted.
    """
    return (WORK_OF_EIGENVECTORS if vectors else WORK_OF_EIGENVALUES) * float(d) ** 3
