"""Stacks and TensorArrays: mutable objects of a run.

Their creating node makes a new one each time it runs; they live until the run ends. Writes copy,
because the run may reuse the memory of the written value. Values called ``flow`` order reads and
writes in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, field
from penstock.core.types import (
    ANY,
    FLOAT32,
    INT64,
    RunValue,
    Shape,
    ShapeError,
    TensorType,
    Type,
    find_dtype,
    type_of,
)
from penstock.host.current_run import copy_within_budget, keep, reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import all_known, always, fits
from penstock.ops.tensorflow.common import (
    array_operator,
    dims_of,
    handle,
    integer,
    named_dtype,
    of_type,
    operator,
)

ELEMENT_BYTES = 200
"""the overhead of an element in bytes, apart from its data"""

FLOW = np.zeros((), np.float32)
FLOW.flags.writeable = False
_FLOW_TYPE = TensorType(FLOAT32, ())


# Stacks.


@dataclass(slots=True, eq=False)
class _Stack:
    """A LIFO stack of values of one dtype (None: handles), with at most ``limit`` values if not
    negative."""

    dtype: np.dtype | None
    limit: int
    values: list[RunValue] = field(default_factory=list)


_stack = handle(_Stack, "stack")


@array_operator("StackV2", pure=False, traits={"makes handle"})
def stack(limit: np.ndarray, *, elem_type: str = "") -> _Stack:
    return _Stack(find_dtype(elem_type), integer(limit, "the limit of a stack"))


def _infer_second(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = types[1]
    return (type_.without_data() if isinstance(type_, TensorType) else ANY,)


@array_operator("StackPushV2", infer=_infer_second, pure=False, strings=True)
def stack_push(handle: object, value: object) -> object:
    stack = _stack(handle)
    if 0 <= stack.limit <= len(stack.values):
        raise ShapeError(f"the stack is full: max_size is {stack.limit}")
    # The dtype attribute of a handle is that of its elements.
    if (value.dtype if isinstance(value, np.ndarray) else None) != stack.dtype:
        raise ShapeError(f"the stack has elements of type {stack.dtype}, not {type_of(value)}")
    if not isinstance(value, np.ndarray):
        stack.values.append(value)
        return value
    stack.values.append(copy_within_budget(value))
    # Like any kernel that is not a view, return memory not shared with the input.
    return np.array(value)


@array_operator("StackPopV2", infer=of_type("elem_type"), pure=False, strings=True)
def stack_pop(handle: object, *, elem_type: str = "") -> object:
    values = _stack(handle, elem_type).values
    if not values:
        raise ShapeError("the stack is empty")
    return values.pop()


@array_operator("StackCloseV2", pure=False)
def stack_close(handle: object) -> None:
    _stack(handle).values.clear()


# Tensor arrays.


@dataclass(slots=True, eq=False)
class _Element:
    """One element of a TensorArray. ``shape`` is the shape of its value, even after it is cleared,
    or, for gradients, of the value that they belong to."""

    value: np.ndarray | None = None
    shape: tuple[int, ...] | None = None
    read: bool = False


class _TensorArray:
    """Tensors of one dtype, each written once. ``adds``: it holds gradients, and several writes to
    one element are summed."""

    def __init__(self, name: str, dtype: np.dtype, count: int, attrs: Attrs, *, adds: bool) -> None:
        if count < 0:
            raise ShapeError(f"the size of a TensorArray must not be negative, but is {count}")
        self.name = name
        self.dtype = dtype
        self.shape = dims_of(attrs.get("element_shape"))
        self.dynamic = bool(attrs.get("dynamic_size"))
        self.clears = bool(attrs.get("clear_after_read", True))
        self.identical = bool(attrs.get("identical_element_shapes"))
        self.adds = adds
        self.count = count
        self.elements: dict[int, _Element] = {}  # elements that were written or read
        self.gradients: dict[str, _TensorArray] = {}

    def gradient(self, source: str) -> _TensorArray:
        """The TensorArray of gradients for ``source``; elements that are not written are zeros."""
        array = self.gradients.get(source)
        if array is None:
            name, attrs = f"{self.name}@{source}", {"clear_after_read": self.clears}
            array = _TensorArray(name, self.dtype, self.count, attrs, adds=True)
            array.shape = self.shape
            array.elements = {i: _Element(shape=x.shape) for i, x in self.elements.items()}
            # The sizes of both are fixed from now on.
            self.dynamic = False
            self.gradients[source] = array
        return array

    def fault(self, text: str) -> ShapeError:
        return ShapeError(f"TensorArray {self.name}: {text}")

    def write(self, index: int, value: np.ndarray) -> None:
        if index < 0 or (index >= self.count and not self.dynamic):
            raise self.fault(
                f"Tried to write to index {index} but array is not resizeable and size is: "
                f"{self.count}"
            )
        if value.dtype != self.dtype:
            raise self.fault(f"the elements have dtype {self.dtype}, not {value.dtype}")
        if not fits(value.shape, self.shape):
            raise self.fault(f"the elements have shape {self.shape}, not {value.shape}")
        self.count = max(self.count, index + 1)
        element = self.elements.setdefault(index, _Element())
        if element.read:
            raise self.fault(f"Could not write index {index} twice because it was already read.")
        if element.value is not None:
            if not self.adds:
                raise self.fault(
                    f"Could not write to index {index} because it has already been written to."
                )
            if element.value.shape != value.shape:
                raise self.fault(
                    f"a gradient of shape {value.shape} cannot be added to one of shape "
                    f"{element.value.shape}"
                )
            element.value = keep(np.asarray(element.value + value))
            return
        if self.identical and self.shape is None:
            self.shape = value.shape
        element.value = copy_within_budget(value)
        element.shape = value.shape

    def read(self, index: int) -> np.ndarray:
        if not 0 <= index < self.count:
            raise self.fault(f"Tried to read from index {index} but array size is: {self.count}")
        element = self.elements.setdefault(index, _Element())
        if element.value is None and element.read and self.clears:
            raise self.fault(
                f"Could not read index {index} twice because it was cleared after a previous read "
                "(perhaps try setting clear_after_read = false?)."
            )
        value = element.value
        if value is None:
            shape = element.shape if element.shape is not None else all_known(self.shape)
            if shape is None:
                raise self.fault(f"element {index} has not been written, and its shape is unknown")
            reserve(math.prod(shape) * self.dtype.itemsize)
            value = keep(np.zeros(shape, self.dtype))
            element.shape = shape
        element.read = True
        element.value = None if self.clears else value
        return value


_array = handle(_TensorArray, "tensor array")


# Elements and shapes, for TensorArrays and tensor lists.


def merged(a: Shape | None, b: Shape | None) -> Shape | None:
    """Merge two partially known shapes of the same tensor."""
    if a is None or b is None:
        return a if b is None else b
    if not fits(a, b):
        raise ShapeError(f"shapes {a} and {b} are incompatible")
    return tuple([y if x is None else x for x, y in zip(a, b, strict=True)])


def _empty(shape: Shape | None, dtype: np.dtype) -> np.ndarray:
    dims = all_known(shape)
    if dims is None:
        raise ShapeError("there are no elements, and their shape is unknown")
    return np.zeros((0, *dims), dtype)


def stacked(rows: Sequence[np.ndarray], shape: Shape | None, dtype: np.dtype) -> np.ndarray:
    """Stack elements along a new first axis; ``shape`` and ``dtype`` apply if there are none."""
    if not rows:
        return _empty(shape, dtype)
    reserve(sum([row.nbytes for row in rows]))
    return np.stack(rows)


def concatenated(
    parts: Sequence[np.ndarray], rest: Shape | None, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate elements along the first axis; return their lengths too. ``rest`` are the other
    dims if there are no elements."""
    lengths = np.array([len(part) for part in parts if part.ndim], np.int64)
    if not parts:
        return _empty(rest, dtype), lengths
    reserve(sum([part.nbytes for part in parts]))
    return np.concatenate(parts), lengths


def infer_concatenated(name: str) -> Infer:
    """``infer`` for ``concatenated``, with the dtype in attribute ``name``."""
    first = of_type(name)
    return lambda *arguments: (*first(*arguments), TensorType(INT64, (None,)))


def checked_lengths(lengths: np.ndarray, value: np.ndarray) -> list[int]:
    """Check and return the lengths into which the first axis of a value is split."""
    counts: list[int] = lengths.reshape(-1).tolist()
    if value.ndim < 1 or sum(counts) != len(value) or min(counts, default=0) < 0:
        raise ShapeError(f"Expected sum of lengths {counts} to be equal to {value.shape[:1]}")
    return counts


# Operations.


_infer_array = always(ANY, _FLOW_TYPE)


@operator("TensorArrayV3", infer=_infer_array, pure=False, traits={"makes handle"})
def tensor_array(node: Node, types: Types) -> Kernel:
    attrs, dtype = node.attrs, named_dtype(node.attrs, "dtype")
    name = attrs.get("tensor_array_name") or node.name

    def function(size: np.ndarray) -> tuple[Any, np.ndarray]:
        return _TensorArray(name, dtype, integer(size, "the size"), attrs, adds=False), FLOW

    return Kernel(function)


@array_operator("TensorArrayGradV3", infer=_infer_array, pure=False, traits={"makes handle"})
def tensor_array_grad(
    handle: object, flow: np.ndarray, *, source: str = ""
) -> tuple[Any, np.ndarray]:
    return _array(handle).gradient(source), FLOW


def _effect(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function that modifies a TensorArray; the node returns the flow."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @array_operator(name, infer=always(_FLOW_TYPE), pure=False, strings=True)
        def run(handle: object, *rest: Any) -> np.ndarray:
            function(_array(handle), *rest[:-1])  # the last one is the flow
            return FLOW

        return function

    return register


@_effect("TensorArrayWriteV3")
def write(array: _TensorArray, index: np.ndarray, value: np.ndarray) -> None:
    array.write(integer(index, "the index"), value)


@_effect("TensorArrayScatterV3")
def scatter(array: _TensorArray, indices: np.ndarray, value: np.ndarray) -> None:
    if indices.ndim != 1 or value.ndim < 1 or len(indices) != len(value):
        raise array.fault(
            f"indices of shape {indices.shape} must have one entry per row of a value of shape "
            f"{value.shape}"
        )
    for index, row in with_checkpoints(zip(indices.tolist(), value, strict=True)):
        array.write(index, np.asarray(row, value.dtype))


@_effect("TensorArraySplitV3")
def split(array: _TensorArray, value: np.ndarray, lengths: np.ndarray) -> None:
    counts = checked_lengths(lengths, value)
    if len(counts) != array.count and not array.dynamic:
        raise array.fault(
            f"TensorArray's size is not equal to the size of lengths ({array.count} vs. "
            f"{len(counts)}), and the TensorArray is not marked as dynamically resizeable"
        )
    for index, end in enumerate(np.cumsum(counts).tolist()):
        array.write(index, value[end - counts[index] : end])


@array_operator("TensorArrayReadV3", infer=of_type("dtype"), pure=False, strings=True)
def read(handle: object, index: np.ndarray, flow: np.ndarray, *, dtype: str = "") -> np.ndarray:
    return _array(handle, dtype).read(integer(index, "the index"))


@operator("TensorArrayGatherV3", infer=of_type("dtype"), pure=False)
def gather(node: Node, types: Types) -> Kernel:
    shape, dtype = dims_of(node.attrs.get("element_shape")), node.attrs.get("dtype", "")

    def function(handle: object, indices: np.ndarray, flow: np.ndarray) -> np.ndarray:
        array = _array(handle, dtype)
        rows = [array.read(index) for index in with_checkpoints(indices.reshape(-1).tolist())]
        if rows and not fits(rows[0].shape, shape):
            raise array.fault(f"elements of shape {shape} are expected, not {rows[0].shape}")
        return stacked(rows, None if rows else merged(array.shape, shape), array.dtype)

    return Kernel(function)


@operator("TensorArrayConcatV3", infer=infer_concatenated("dtype"), pure=False)
def concat(node: Node, types: Types) -> Kernel:
    shape, dtype = dims_of(node.attrs.get("element_shape_except0")), node.attrs.get("dtype", "")

    def function(handle: object, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        array = _array(handle, dtype)
        reserve(ELEMENT_BYTES * array.count)
        parts = [array.read(i) for i in with_checkpoints(range(array.count))]
        return concatenated(parts, shape, array.dtype)

    return Kernel(function)


@array_operator("TensorArraySizeV3", infer=always(TensorType(INT32, ())), pure=False)
def size(handle: object, flow: np.ndarray) -> np.ndarray:
    return np.array(_array(handle).count, np.int32)


@array_operator("TensorArrayCloseV3", pure=False)
def close(handle: object) -> None:
    array = _array(handle)
    array.count = 0
    array.elements.clear()
