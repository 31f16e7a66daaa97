"""Values of a graph that is being built, with Python's operators.

An operator adds a node. ``+ - * / // % ** @``, comparisons, ``& | ^ ~`` and ``abs`` broadcast as
NumPy's do; ``/`` is of floating-point numbers, ``//`` and ``%`` round towards negative infinity.
The other operand may be a value, an array, or a number, which takes the dtype of the value.
``x[1:, None, ..., i]`` takes integers, slices, ``None``, an ellipsis, and values: integer tensors,
whose dims take the place of the axis that they index.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from penstock.core.types import BOOL, INT64, Shape, Type
from penstock.ir.graph import Value
from penstock.ops.registry import TENSORFLOW

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

_FARTHEST = 2**63 - 1

Operand: TypeAlias = "SymbolicValue | ArrayLike"
"""The other operand of an operator: a value, an array, or numbers"""
Index: TypeAlias = "slice | EllipsisType | SymbolicValue | ArrayLike | None"
"""An index of one axis, in the brackets behind a value"""
BinaryOperator = Callable[["SymbolicValue", Operand], "SymbolicValue"]


def _operator(op: str, domain: str = "", *, swapped: bool = False) -> BinaryOperator:
    def apply(self: SymbolicValue, other: Operand) -> SymbolicValue:
        operands = [self, self.builder.as_value(other, like=self)]
        return self.builder.single(op, *operands[:: -1 if swapped else 1], domain=domain)

    return apply


def _division(*, swapped: bool = False) -> BinaryOperator:
    divide = _operator("Div", swapped=swapped)

    def apply(self: SymbolicValue, other: Operand) -> SymbolicValue:
        if self.dtype is not None and self.dtype.kind in "iub":
            raise TypeError(
                f"{self.name!r} is {self.dtype}, and / divides floating-point numbers: use //, or "
                "astype first"
            )
        return divide(self, other)

    return apply


def _logical(op: str) -> BinaryOperator:
    """``op`` of truth values, of integers its bitwise form."""

    def apply(self: SymbolicValue, other: Operand) -> SymbolicValue:
        name = op if self.dtype == BOOL else f"Bitwise{op}"
        return self.builder.single(name, self, self.builder.as_value(other, like=self))

    return apply


class NodeAdder(Protocol):
    """A ``GraphBuilder`` as its values see it."""

    def constant(self, data: ArrayLike, dtype: DTypeLike | None = None) -> SymbolicValue: ...

    def as_value(self, x: Operand, *, like: SymbolicValue | None = None) -> SymbolicValue: ...

    def single(
        self, op: str, *inputs: Operand, domain: str = "", **attrs: object
    ) -> SymbolicValue: ...


class SymbolicValue:
    """A value of a graph that a ``GraphBuilder`` builds; ``type``, ``dtype`` and ``shape`` are what
    is known of it.

    Args:
        builder: The builder of the graph. Callers get values from it and need not construct any.
        value: The value in the graph.
    """

    __slots__ = ("builder", "value")
    __array_ufunc__ = None  # an array on the left leaves the operator to the value
    __hash__ = object.__hash__  # which __eq__, that adds a node, would remove
    __iter__ = None  # else Python would try __getitem__ with 0, 1, ... without end

    def __init__(self, builder: NodeAdder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def name(self) -> str:
        return self.value.name

    @property
    def type(self) -> Type:
        return self.value.type

    @property
    def dtype(self) -> np.dtype | None:
        """The element type of a tensor, None if it is unknown."""
        return self.value.dtype

    @property
    def shape(self) -> Shape | None:
        """The dims of a tensor: ints, names, or None where unknown. None if the rank is unknown."""
        return self.value.shape

    def __repr__(self) -> str:
        return f"<{self.value}>"

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self.name!r} is true or false only in a run; choose by it with GraphBuilder.cond"
        )

    def astype(self, dtype: DTypeLike) -> SymbolicValue:
        """The elements converted to another dtype, as ONNX's Cast does.

        Args:
            dtype: What NumPy takes for one.
        """
        return self.builder.single("Cast", self, to=np.dtype(dtype))

    def reshape(self, *dims: int) -> SymbolicValue:
        """The elements in another shape.

        Args:
            dims: The new dims; one may be -1, and follows from the others.
        """
        # Else ONNX takes a dim of 0 for that of the input.
        return self.builder.single("Reshape", self, self.builder.constant(dims, INT64), allowzero=1)

    def transpose(self, *axes: int) -> SymbolicValue:
        """The axes in another order.

        Args:
            axes: The old axes in their new order, by default the reverse one.
        """
        attrs: dict[str, Any] = {"perm": axes} if axes else {}
        return self.builder.single("Transpose", self, **attrs)

    __add__ = _operator("Add")
    __radd__ = _operator("Add", swapped=True)
    __sub__ = _operator("Sub")
    __rsub__ = _operator("Sub", swapped=True)
    __mul__ = _operator("Mul")
    __rmul__ = _operator("Mul", swapped=True)
    __truediv__ = _division()
    __rtruediv__ = _division(swapped=True)
    __floordiv__ = _operator("FloorDiv", TENSORFLOW)
    __rfloordiv__ = _operator("FloorDiv", TENSORFLOW, swapped=True)
    __mod__ = _operator("FloorMod", TENSORFLOW)
    __rmod__ = _operator("FloorMod", TENSORFLOW, swapped=True)
    __pow__ = _operator("Pow")
    __rpow__ = _operator("Pow", swapped=True)
    __matmul__ = _operator("MatMul")
    __rmatmul__ = _operator("MatMul", swapped=True)
    __lt__ = _operator("Less")
    __le__ = _operator("LessOrEqual")
    __gt__ = _operator("Greater")
    __ge__ = _operator("GreaterOrEqual")
    __eq__ = _operator("Equal")  # type: ignore[assignment]
    __and__ = __rand__ = _logical("And")
    __or__ = __ror__ = _logical("Or")
    __xor__ = __rxor__ = _logical("Xor")

    def __ne__(self, other: Operand) -> SymbolicValue:  # type: ignore[override]
        # ONNX has no operation for it.
        return self.builder.single("Not", self == other)

    def __neg__(self) -> SymbolicValue:
        return self.builder.single("Neg", self)

    def __abs__(self) -> SymbolicValue:
        return self.builder.single("Abs", self)

    def __invert__(self) -> SymbolicValue:
        return self.builder.single("Not" if self.dtype == BOOL else "BitwiseNot", self)

    def __getitem__(self, key: Index | tuple[Index, ...]) -> SymbolicValue:
        return _indexed(self, key if isinstance(key, tuple) else (key,))


def _indexed(x: SymbolicValue, keys: Sequence[Index]) -> SymbolicValue:
    """``x[keys]``: all slices at once, then each index, then the new axes."""
    # Axes of x that have a key.
    taken = sum(key is not None and key is not Ellipsis for key in keys)
    rank = None if x.shape is None else len(x.shape)
    if rank is None and any(key is Ellipsis for key in keys):
        raise TypeError(f"{x.name!r} has an unknown rank, so that ... is an unknown number of axes")
    if rank is not None and taken > rank:
        raise IndexError(f"{x.name!r} is {x.type} and has {rank} axes, but {taken} are indexed")
    b = x.builder
    axis = kept = 0  # of x, and of the result
    slices, indices, new = [], [], []
    for key in keys:
        if key is None:
            new.append(kept)
            kept += 1
        elif key is Ellipsis:
            axis, kept = axis + (rank or 0) - taken, kept + (rank or 0) - taken
        elif isinstance(key, slice):
            slices += [] if key == slice(None) else [(axis, *_bounds(key))]
            axis, kept = axis + 1, kept + 1
        else:
            index = b.as_value(key)
            if index.dtype is not None and index.dtype.kind not in "iu":
                raise TypeError(f"an index must be of integers, not {index.type}")
            indices.append((axis, index))
            axis, kept = axis + 1, kept + len(index.shape or ())
    if slices:
        axes, starts, ends, steps = (
            b.constant(column, INT64) for column in zip(*slices, strict=True)
        )
        x = b.single("Slice", x, starts, ends, axes, steps)
    for axis, index in reversed(indices):  # the last first: an index changes the axes behind it
        x = b.single("Gather", x, index, axis=axis)
    return b.single("Unsqueeze", x, b.constant(new, INT64)) if new else x


def _bounds(part: slice) -> tuple[int, int, int]:
    """Start, end and step of a slice as ONNX's Slice takes them."""
    step = 1 if part.step is None else operator.index(part.step)
    first, last = (0, _FARTHEST) if step > 0 else (_FARTHEST, -_FARTHEST - 1)
    start = first if part.start is None else operator.index(part.start)
    return start, last if part.stop is None else operator.index(part.stop), step
