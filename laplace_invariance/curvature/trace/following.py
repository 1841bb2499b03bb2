"""Operations on parameters that a model uses as functions do, followed until they meet data.

A class token that is concatenated, a position embedding that is added, a scale, a table of biases
that is gathered from: there is no module whose input and output would explain such a parameter. But
the operations can be seen while the model runs. Those that only rearrange a parameter (views,
gathers) are followed by a *map*, a tensor of integers that says for each element which one of the
parameter it is; operations in which a parameter, or a rearranged one, meets data become calls with
blocks, as those of layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from laplace_invariance.curvature.rules import AnyBlock
from laplace_invariance.curvature.trace.parts import ELSEWHERE, Answers, Part, whole

__all__ = ["Following"]

# Operations that rearrange the elements of a tensor, by name.
REARRANGING = {
    "__getitem__",
    "chunk",
    "expand",
    "expand_as",
    "flatten",
    "flip",
    "index_select",
    "movedim",
    "permute",
    "repeat",
    "reshape",
    "reshape_as",
    "roll",
    "select",
    "split",
    "squeeze",
    "t",
    "tile",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
}
# Those that change at most the type, the device or the layout.
COPYING = {"clone", "contiguous", "float", "double", "to", "type", "type_as"}
# Attributes that rearrange.
ATTRIBUTES = {"T", "mT", "data"}

Record = Callable[[Tensor, Tensor, list[tuple[int, AnyBlock]]], Tensor]


class Following(TorchFunctionMode):
    """Sees every operation on some parameters, and records where they meet data.

    Args:
        parameters: Parameters by index.
        buffers: Tensors that are constants of the model, not data.
        record: Called with input, output and blocks of an operation; returns the output that the
            model goes on with.
        answers: What earlier passes found out about the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[int, nn.Parameter],
        buffers: Sequence[Tensor],
        record: Record,
        answers: Answers,
    ) -> None:
        super().__init__()
        self._record = record
        self._answers = answers
        self._known: dict[int, list[Part]] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of a known one
        self._constants = {id(buffer) for buffer in buffers}
        for index, parameter in parameters.items():
            self._know(parameter, [whole(index, parameter)])

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._among(args) and not self._among(kwargs.values()):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ATTRIBUTES or name in REARRANGING or name in COPYING:
            return self._rearranged(name, func, args, kwargs)
        handle = getattr(self, f"_on_{name.strip('_')}", None)
        if handle is None:
            return func(*args, **kwargs)
        return handle(func, *args, **kwargs)

    # Following.

    def _among(self, values: Any) -> bool:
        """Return whether a known tensor is among arguments, or in a list of them."""
        for value in values:
            if id(value) in self._known and isinstance(value, Tensor):
                return True
            if isinstance(value, list | tuple) and self._among(value):
                return True
        return False

    def _know(self, tensor: Tensor, parts: list[Part]) -> None:
        self._known[id(tensor)] = parts
        self._alive.append(tensor)

    def _parts(self, tensor: Any) -> list[Part]:
        return self._known.get(id(tensor), []) if isinstance(tensor, Tensor) else []

    def _rearranged(self, name: str, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Apply an operation to a known tensor and to its maps alike."""
        output = func(*args, **kwargs)
        tensor, *rest = args
        parts = self._parts(tensor)
        if not parts or self._among(rest):
            return output
        outputs = [output] if isinstance(output, Tensor) else list(output)
        found: list[list[Part]] = [[] for _ in outputs]
        for part in parts:
            moved = part.map
            if name not in COPYING and name != "data":
                moved = func(part.map, *rest, **kwargs)
            pieces = [moved] if isinstance(moved, Tensor) else list(moved)
            given = [tuple(rest[0].shape)] if name.endswith("_as") and rest else rest
            step = (name, self._named(given), self._named(kwargs))
            for i, (piece, own) in enumerate(zip(pieces, found, strict=True)):
                own.append(part.moved(piece, *step, i))
        for one, own in zip(outputs, found, strict=True):
            self._know(one, own)
        return output

    def _named(self, value: Any) -> Any:
        """Return arguments with constants of the model by their names, for histories."""
        if isinstance(value, Tensor) and id(value) in self._constants:
            return ("constant", id(value), value._version)
        if isinstance(value, list | tuple):
            return [self._named(entry) for entry in value]
        if isinstance(value, dict):
            return {name: self._named(entry) for name, entry in value.items()}
        return value

    def _on_embedding(
        self, func: Any, places: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """A gather of rows, where an embedding is called once for all inputs."""
        output = func(places, weight, *args, **kwargs)
        step = ("embedding", self._named(places))
        self._know(output, [part.moved(part.map[places], *step) for part in self._parts(weight)])
        return output

    # Meeting data.

    def _on_add(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        if args or kwargs:
            return output
        return self._sum(output, x, y)

    _on_add_ = _on_iadd = _on_radd = _on_add

    def _on_sub(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        if args or kwargs:
            return output
        if self._parts(y):
            return output if self._parts(x) else self._meet(output, x, self._parts(y), sign=-1)
        return self._sum(output, x, y)

    _on_sub_ = _on_isub = _on_sub

    def _sum(self, output: Tensor, x: Any, y: Any) -> Tensor:
        """Record a sum, or follow it if nothing in it is data."""
        terms = (x, y)
        parts = [part for term in terms for part in self._parts(term)]
        data = [t for t in terms if not self._parts(t) and not self._is_constant(t)]
        if data:
            return self._meet(output, data[0], parts)
        shape = tuple(output.shape)
        self._know(output, [part.moved(part.map.expand(shape), "sum", shape) for part in parts])
        return output

    def _is_constant(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or id(value) in self._constants

    def _meet(
        self, output: Tensor, x: Tensor, parts: list[Part], sign: int = 1, is_factor: bool = False
    ) -> Tensor:
        """Record that parts were added to data, or multiplied with it."""
        found = [(p.index, self._answers.spread(p, output.shape, sign, is_factor)) for p in parts]
        return self._record(x, output, [(i, block) for i, block in found if block is not None])

    def _on_mul(self, func: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        output = func(x, y, *args, **kwargs)
        known = [self._parts(x), self._parts(y)]
        if all(known) or args or kwargs:
            return output
        parts, other = (known[0], y) if known[0] else (known[1], x)
        if not isinstance(other, Tensor) or self._is_constant(other):
            return output
        return self._meet(output, other.expand(output.shape), parts, is_factor=True)

    _on_mul_ = _on_imul = _on_rmul = _on_mul

    def _on_addcmul(self, func: Any, x: Tensor, y: Tensor, z: Tensor, **kwargs: Any) -> Any:
        output = func(x, y, z, **kwargs)
        if kwargs:
            return output
        known, other = (y, z) if self._parts(y) else (z, y)
        if self._parts(other):
            return output
        factor = other.expand(output.shape)
        output = self._meet(output, factor, self._parts(known), is_factor=True)
        return self._meet(output, output, self._parts(x))

    def _on_cat(self, func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
        dim = kwargs.pop("axis", kwargs.pop("dim", dim))
        output = func(tensors, dim=dim)
        dim %= output.ndim
        start, found = 0, []
        for tensor in tensors:
            size = tensor.shape[dim]
            for part in self._parts(tensor):
                place = part.map.new_full(output.shape, ELSEWHERE)
                place.narrow(dim, start, size).copy_(part.map)
                found.append(part.moved(place, "cat", dim, start, tuple(output.shape)))
            start += size
        if all(self._parts(tensor) or self._is_constant(tensor) for tensor in tensors):
            self._know(output, found)
            return output
        return self._meet(output, output, found)

    _on_concat = _on_concatenate = _on_cat
