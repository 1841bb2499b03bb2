"""How a parameter enters the output of its layer: as a matrix, or elementwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from laplace_invariance.curvature import kfac

__all__ = ["AnyBlock", "ElementwiseBlock", "Map", "MatrixBlock", "no_factors"]

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MatrixBlock:
    """How a parameter enters a layer's output as a matrix: ``sum_r g_r (x) a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"weight"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d_in]``.
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d_out]``;
            always linear.
        linear: Whether ``a`` is linear in the input, so that samples may be averaged before it
            instead of after.
        slots: Number of slots. Positions then have a further axis, ``[rows, shared, slots, d]``,
            and slot ``q`` meets only the ``q``-th part of the parameter's rows (groups of a
            convolution).
        slotted_columns: Whether slots split the columns of the parameter instead of its rows;
            the axis is then there even for one slot.
        transposed: Whether the parameter is stored as ``[d_in, d_out]``.
        counts: For an ``a`` that is one-hot, or zero, maps the input to how often each of its
            entries is one, ``[d_in]``: the diagonal of ``A`` if there is one sample.
    """

    parameter: str
    a: Map
    g: Map
    linear: bool = True
    slots: int = 1
    slotted_columns: bool = False
    transposed: bool = False
    counts: Map | None = None

    def gradient_map(self, x: Tensor, batch: int) -> Map:
        """Return the map from gradients of the module's output to those of the parameter.

        Args:
            x: The module's input ``[rows, ...]``.
            batch: Number of inputs; samples and positions are summed over.

        Returns:
            A function from ``[rows, ...]`` to ``[batch, numel]``, exact for each input.
        """
        a = self.a(x)
        return lambda g: kfac.jacobian(
            a, self.g(g), batch, slotted_columns=self.slotted_columns, transposed=self.transposed
        )

    def factors(
        self, a: Tensor, g: Tensor, weights: Tensor | None, N: int, approx: str, per_slot: bool
    ) -> list[Tensor]:
        """Return :func:`kfac.factors`, in the order in which the parameter is stored."""
        slots = {"slotted_columns": self.slotted_columns, "per_slot": per_slot}
        outer, inner = kfac.factors(a, g, weights, N, approx, **slots)
        return [inner, outer] if self.transposed else [outer, inner]


@dataclass(frozen=True)
class ElementwiseBlock:
    """How a parameter enters a layer's output elementwise: ``sum_r g_r * a_r`` is its gradient.

    Attributes:
        parameter: Name of the parameter in the module, e.g. ``"bias"``.
        a: Maps the module's input ``[rows, ...]`` to ``[rows, shared, d]``; None stands for ones
            (a bias).
        g: Maps gradients of the module's output ``[rows, ...]`` to ``[rows, shared, d]``; always
            linear.
    """

    parameter: str
    a: Map | None
    g: Map

    def gradient_map(self, x: Tensor, batch: int) -> Map:
        """Return the map of gradients, as :meth:`MatrixBlock.gradient_map`."""
        a = None if self.a is None else self.a(x)
        return lambda g: kfac.elementwise_jacobian(a, self.g(g), batch)


AnyBlock = MatrixBlock | ElementwiseBlock


def no_factors(
    block: AnyBlock | None, parameter: Tensor, per_slot: bool, counts: bool
) -> list[Tensor]:
    """Return Kronecker factors of no curvature, in the shapes that others would have.

    Args:
        block: Block of the parameter, None for one without a rule.
        parameter: The parameter.
        per_slot: Whether matrices have a gradient factor for each slot of their columns.
        counts: Whether one-hot inputs are counted, which makes their factor a diagonal.
    """
    if block is None:
        return [parameter.new_zeros(parameter.numel())]
    if isinstance(block, ElementwiseBlock):
        return [parameter.new_zeros(parameter.numel(), parameter.numel())]
    rows, columns = len(parameter), parameter[0].numel()
    if counts and block.counts is not None:
        if block.transposed:
            return [parameter.new_zeros(rows), parameter.new_zeros(columns, columns)]
        return [parameter.new_zeros(rows, rows), parameter.new_zeros(columns)]
    slots = block.slots
    outer: tuple[int, ...] = (rows, rows)
    if block.slotted_columns:
        columns //= slots
        if per_slot:
            outer = (slots, rows, rows)
        return [parameter.new_zeros(outer), parameter.new_zeros(slots, columns, columns)]
    if slots == rows > 1:
        outer = (slots,)
    elif slots > 1:
        outer = (slots, rows // slots, rows // slots)
    return [parameter.new_zeros(outer), parameter.new_zeros(columns, columns)]
