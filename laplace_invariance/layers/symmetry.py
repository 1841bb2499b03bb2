"""Finite groups that permute positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["NAMED", "Group", "check_features"]

# name -> (number of turns, whether there is a flip)
NAMED = {"p1": (1, False), "p2": (2, False), "p4": (4, False), "pm": (1, True), "p4m": (4, True)}


@dataclass(frozen=True, eq=False)
class Group:
    """A finite group that permutes positions: symmetries of the square by name, or any other by its multiplication table.

    Named groups are ``"p1"`` (the identity alone), ``"p2"`` (half turns), ``"p4"`` (quarter turns, counter-clockwise),
    ``"pm"`` (the flip of left and right) and ``"p4m"`` (quarter turns and flips). Without ``matrices`` and ``permutations``
    positions stay where they are, as for a cyclic group of three colours, ``Group("hue", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])``.

    Args:
        name: for messages.
        table: ``[order, order]``, the element ``g h`` in row ``g`` and column ``h``; element 0 is the identity.
        matrices: ``[order, 2, 2]``, how elements move (row, column), counted from the centre: signed permutations.
        permutations: instead, where elements move the positions of grids of given sizes: ``{(height, width): [order, height *
            width]}``; other sizes are refused. Such a layer is equivariant where its kernel covers all of its input.
    """

    name: str
    table: Tensor
    matrices: Tensor | None = None
    permutations: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _integers(self.table))
        self._check_table(self.table)
        if self.matrices is not None and self.permutations:
            raise ValueError(
                f"group {self.name!r} was given matrices and permutations; either says how positions move"
            )
        if self.matrices is not None:
            object.__setattr__(self, "matrices", _integers(self.matrices))
            self._check_matrices(self.matrices)
        permutations = {size: _integers(moves) for size, moves in self.permutations.items()}
        object.__setattr__(self, "permutations", permutations)
        for size, moves in permutations.items():
            self._check_permutations(size, moves)

    def _check_table(self, table: Tensor) -> None:
        if (
            table.ndim != 2
            or table.shape[0] != table.shape[1]
            or not len(table)
            or table.dtype != torch.long
        ):
            raise ValueError(
                f"the table of group {self.name!r} must be square and hold integers, got {table.dtype} {list(table.shape)}"
            )
        elements = torch.arange(len(table))
        if not (torch.equal(table[0], elements) and torch.equal(table[:, 0], elements)):
            raise ValueError(
                f"element 0 of group {self.name!r} is not the identity: see row and column 0 of its table"
            )
        for axis, what in enumerate(("column", "row")):
            # hence every row has a 0, which is the inverse
            if not torch.equal(table.sort(axis)[0], elements.unsqueeze(1 - axis).expand_as(table)):
                raise ValueError(
                    f"a {what} of the table of group {self.name!r} does not hold every element once"
                )
        if not torch.equal(table[table], table[:, table]):
            raise ValueError(f"the table of group {self.name!r} is not associative")

    def _check_matrices(self, matrices: Tensor) -> None:
        shape = (self.order, 2, 2)
        sizes = matrices.abs()
        if tuple(matrices.shape) != shape or matrices.dtype != torch.long or not (
            (sizes.sum(1) == 1).all() and (sizes.sum(2) == 1).all()
        ):  # fmt: skip
            raise ValueError(
                f"group {self.name!r} needs signed permutation matrices of integers {list(shape)}, got {matrices.tolist()}"
            )
        if not torch.equal(matrices.unsqueeze(1) @ matrices, matrices[self.table]):
            raise ValueError(
                f"the matrices of group {self.name!r} do not multiply as its table says"
            )

    def _check_permutations(self, size: tuple[int, int], moves: Tensor) -> None:
        shape = (self.order, math.prod(size))
        if tuple(moves.shape) != shape or moves.dtype != torch.long:
            raise ValueError(
                f"group {self.name!r} needs permutations {list(shape)} of integers for size {size}, got {moves.dtype} "
                f"{list(moves.shape)}"
            )
        if not torch.equal(moves.sort(1)[0], torch.arange(shape[1]).expand(shape)):
            raise ValueError(f"group {self.name!r} does not permute the positions of size {size}")
        if not torch.equal(moves[:, moves], moves[self.table]):  # first h, then g, is g h
            raise ValueError(
                f"the permutations of group {self.name!r} for size {size} do not multiply as its table says"
            )

    @classmethod
    def of(cls, group: str | Group) -> Group:
        """Return the group of that name, or the group that was given."""
        if isinstance(group, Group):
            return group
        if group not in NAMED:
            raise ValueError(
                f"there is no group {group!r}; choose from {', '.join(NAMED)}, or give a Group"
            )
        n_turns, flip = NAMED[group]
        turn, mirror = torch.tensor([[0, -1], [1, 0]]), torch.tensor([[1, 0], [0, -1]])
        turns = [
            torch.linalg.matrix_power(turn.double(), 4 // n_turns * i).long()
            for i in range(n_turns)
        ]
        return cls.from_matrices(
            group, turns + [matrix @ mirror for matrix in turns] if flip else turns
        )

    @classmethod
    def from_matrices(cls, name: str, matrices: Sequence[Tensor]) -> Group:
        """Return the group of the given signed permutation matrices of (row, column), the identity first."""
        stacked = torch.stack([_integers(matrix) for matrix in matrices])
        equal = (
            ((stacked.unsqueeze(1) @ stacked).unsqueeze(2) == stacked).all(-1).all(-1)
        )  # [g, h, is it this one]
        if not (equal.sum(-1) == 1).all():
            raise ValueError(
                f"the matrices of group {name!r} are not all different, or a product of two is missing"
            )
        return cls(name, equal.long().argmax(-1), stacked)

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)

    @property
    def inverse(self) -> Tensor:
        """Inverse of each element, ``[order]``."""
        return (self.table == 0).long().argmax(1)

    @property
    def turns(self) -> bool:
        """Whether an element exchanges height and width."""
        return self.matrices is not None and bool(self.matrices[:, 0, 1].any())

    def taps(self, height: int, width: int) -> Tensor:
        """Return where elements move the positions of a grid, ``[order, height * width]``."""
        if self.permutations and height * width > 1:
            if (height, width) not in self.permutations:
                raise ValueError(
                    f"group {self.name!r} has no permutations of {height} x {width} positions, only of "
                    f"{', '.join(f'{h} x {w}' for h, w in self.permutations)}"
                )
            return self.permutations[height, width]
        if self.matrices is None:
            return torch.arange(height * width).expand(self.order, -1)
        if self.turns and height != width:
            raise ValueError(
                f"group {self.name!r} has quarter turns, so height and width must agree, got {height} x {width}"
            )
        positions = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        far = torch.tensor([height - 1, width - 1])
        rows, columns = ((((2 * positions - far) @ self.matrices.mT) + far) // 2).unbind(-1)
        return rows * width + columns

    def transform(self, x: Tensor, element: int) -> Tensor:
        """Return the images ``x`` ``[..., height, width]``, moved by an element: ``X(g^-1 x)``."""
        height, width = x.shape[-2:]
        index = self.taps(height, width)[self.inverse[element]].to(x.device)
        return x.flatten(-2).index_select(-1, index).unflatten(-1, (height, width))

    def transform_features(self, x: Tensor, element: int) -> Tensor:
        """Return the features ``x`` ``[n, channels, order, height, width]``, moved by an element: ``X(g^-1 r, g^-1 x)``."""
        check_features(f"group {self.name!r}", x, self.order)
        return self.transform(
            x.index_select(2, self.table[self.inverse[element]].to(x.device)), element
        )


def _integers(values: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(values).cpu()
    return tensor if tensor.is_floating_point() else tensor.long()


def check_features(who: str, x: Tensor, order: int, channels: int | None = None) -> None:
    """Refuse what is not ``[n, channels, order, height, width]``, in the name of ``who``."""
    if x.ndim != 5 or x.shape[2] != order or channels not in (None, x.shape[1]):
        expected = "channels" if channels is None else channels
        raise ValueError(
            f"{who} needs features on the group, [n, {expected}, {order}, height, width], got shape {list(x.shape)}"
        )
