"""Finite groups that permute positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace_invariance.layers.shapes import check_features

__all__ = ["NAMED", "Group"]

# name -> (number of rotations, whether there is a flip)
NAMED = {"p1": (1, False), "p2": (2, False), "p4": (4, False), "pm": (1, True), "p4m": (4, True)}


@dataclass(eq=False)
class Group:
    """A finite group that permutes positions.

    Symmetries of the square have names: ``"p1"`` (the identity alone), ``"p2"`` (half turns),
    ``"p4"`` (quarter turns, counter-clockwise), ``"pm"`` (the flip of left and right) and
    ``"p4m"`` (quarter turns and flips), see :meth:`of`. Any other group is given by its
    multiplication table. Without ``matrices`` and ``permutations`` positions stay where they
    are, as for a cyclic group of three colours, ``Group("hue", [[0, 1, 2], [1, 2, 0], [2, 0,
    1]])``.

    Args:
        name: Name for messages.
        table: Multiplication table ``[order, order]``, the element ``g h`` in row ``g`` and
            column ``h``; element 0 is the identity.
        matrices: Signed permutations ``[order, 2, 2]``, by which elements transform (row,
            column), counted from the centre.
        permutations: Instead of matrices, where elements take the positions of grids of given
            sizes, ``{(height, width): [order, height * width]}``; other sizes raise. A layer of
            such a group is equivariant where its kernel covers all of its input.

    Raises:
        ValueError: If these are not a group, or matrices or permutations do not multiply as the
            table says.
    """

    name: str
    table: Tensor
    matrices: Tensor | None = None
    permutations: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = _integers(self.table)
        self._check_table()
        if self.matrices is not None and self.permutations:
            raise ValueError(
                f"group {self.name!r} was given matrices and permutations; "
                "either says how positions move"
            )
        if self.matrices is not None:
            self.matrices = _integers(self.matrices)
            self._check_matrices(self.matrices)
        self.permutations = {size: _integers(to) for size, to in self.permutations.items()}
        for size, to in self.permutations.items():
            self._check_permutations(size, to)

    def _check_table(self) -> None:
        table = self.table
        square = table.ndim == 2 and table.shape[0] == table.shape[1]
        if not square or not len(table) or table.dtype != torch.long:
            raise ValueError(
                f"the table of group {self.name!r} must be square and hold integers, "
                f"got {table.dtype} {list(table.shape)}"
            )
        elements = torch.arange(len(table))
        if not (torch.equal(table[0], elements) and torch.equal(table[:, 0], elements)):
            raise ValueError(
                f"element 0 of group {self.name!r} is not the identity: "
                "see row and column 0 of its table"
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
        well_formed = tuple(matrices.shape) == shape and matrices.dtype == torch.long
        if not (well_formed and (sizes.sum(1) == 1).all() and (sizes.sum(2) == 1).all()):
            raise ValueError(
                f"group {self.name!r} needs signed permutation matrices of integers {list(shape)}, "
                f"got {matrices.tolist()}"
            )
        if not torch.equal(matrices.unsqueeze(1) @ matrices, matrices[self.table]):
            raise ValueError(
                f"the matrices of group {self.name!r} do not multiply as its table says"
            )

    def _check_permutations(self, size: tuple[int, int], to: Tensor) -> None:
        shape = (self.order, math.prod(size))
        if tuple(to.shape) != shape or to.dtype != torch.long:
            raise ValueError(
                f"group {self.name!r} needs permutations {list(shape)} of integers "
                f"for size {size}, got {to.dtype} {list(to.shape)}"
            )
        if not torch.equal(to.sort(1)[0], torch.arange(shape[1]).expand(shape)):
            raise ValueError(f"group {self.name!r} does not permute the positions of size {size}")
        if not torch.equal(to[:, to], to[self.table]):  # first h, then g, is g h
            raise ValueError(
                f"the permutations of group {self.name!r} for size {size} do not multiply as its "
                "table says"
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
        n_rotations, flip = NAMED[group]
        quarter = torch.tensor([[0, -1], [1, 0]], dtype=torch.double)
        mirror = torch.tensor([[1, 0], [0, -1]])
        step = 4 // n_rotations
        matrices = [torch.linalg.matrix_power(quarter, step * i).long() for i in range(n_rotations)]
        if flip:
            matrices += [matrix @ mirror for matrix in matrices]
        return cls.from_matrices(group, matrices)

    @classmethod
    def from_matrices(cls, name: str, matrices: Sequence[Tensor]) -> Group:
        """Return the group of signed permutations ``[2, 2]``, the first of them the identity."""
        stacked = torch.stack([_integers(matrix) for matrix in matrices])
        products = stacked.unsqueeze(1) @ stacked
        equal = (products.unsqueeze(2) == stacked).all(-1).all(-1)  # [g, h, is it this one]
        if not (equal.sum(-1) == 1).all():
            raise ValueError(
                f"the matrices of group {name!r} are not all different, "
                "or a product of two is missing"
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
    def embedding(self) -> Tensor:
        """Points ``[order, coordinates]`` whose distances no element changes.

        They are its matrices or, without such, those that permute elements. The nearest two are at
        distance 1.
        """
        points = torch.eye(self.order, dtype=torch.float64)
        if self.matrices is not None:
            points = self.matrices.flatten(1).double()
        if self.order == 1:
            return points
        return points / torch.pdist(points).min()

    @property
    def moves_positions(self) -> bool:
        """Whether elements permute positions at all."""
        return self.matrices is not None or bool(self.permutations)

    @property
    def swaps_axes(self) -> bool:
        """Whether an element exchanges height and width."""
        return self.matrices is not None and bool(self.matrices[:, 0, 1].any())

    def taps(self, height: int, width: int) -> Tensor:
        """Return where elements take the positions of a grid, ``[order, height * width]``."""
        if self.permutations and height * width > 1:
            if (height, width) not in self.permutations:
                sizes = ", ".join(f"{h} x {w}" for h, w in self.permutations)
                raise ValueError(
                    f"group {self.name!r} has no permutations of {height} x {width} positions, "
                    f"only of {sizes}"
                )
            return self.permutations[height, width]
        if self.matrices is None:
            return torch.arange(height * width).expand(self.order, -1)
        if self.swaps_axes and height != width:
            raise ValueError(
                f"group {self.name!r} has quarter turns, so height and width must agree, "
                f"got {height} x {width}"
            )
        positions = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        far = torch.tensor([height - 1, width - 1])
        # Twice the position, counted from the centre, is an integer for even sizes, too.
        rows, columns = ((((2 * positions - far) @ self.matrices.mT) + far) // 2).unbind(-1)
        return rows * width + columns

    def transform(self, x: Tensor, element: int) -> Tensor:
        """Return images ``x`` ``[..., height, width]`` under an element ``g``, ``X(g^-1 x)``."""
        height, width = x.shape[-2:]
        index = self.taps(height, width)[self.inverse[element]].to(x.device)
        return x.flatten(-2).index_select(-1, index).unflatten(-1, (height, width))

    def transform_features(self, x: Tensor, element: int) -> Tensor:
        """Return features ``[n, channels, order, height, width]`` as ``X(g^-1 r, g^-1 x)``."""
        check_features(f"group {self.name!r}", x, self.order)
        elements = self.table[self.inverse[element]].to(x.device)
        return self.transform(x.index_select(2, elements), element)


def _integers(values: Tensor | Sequence[int]) -> Tensor:
    tensor = torch.as_tensor(values).cpu()
    return tensor if tensor.is_floating_point() else tensor.long()
