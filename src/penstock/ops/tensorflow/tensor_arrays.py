"""Stacks and tensor arrays: objects that a run makes, writes and reads.

They are made by the node of their name each time it runs, and gone when the run is. A write keeps a
copy, because the run may use the memory of what it has written for something else. The order of
reads and writes is that of the graph: values called ``flow`` carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.registry import TENSORFLOW, operator
from penstock.types import ANY, FLOAT32, INT64, ShapeError, TensorType, Type, dtypes

Dims = tuple[int | None, ...]

FLOW = np.zeros((), np.float32)
FLOW.flags.writeable = False
_FLOW_TYPE = TensorType(FLOAT32, ())


# Stacks.


class _Stack:
    """Values, of which the last one in is the first one out; ``limit`` of them, if not negative."""

    __slots__ = ("limit", "values")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.values: list[Any] = []


def _stack(value: Any) -> _Stack:
    if not isinstance(value, _Stack):
        raise ShapeError(f"a handle of a stack is needed, not a {type(value).__name__}")
    return value


@operator("StackV2", domain=TENSORFLOW, pure=False)
def stack(node: Node, types: Types) -> Kernel:
    return Kernel(lambda limit: _Stack(_scalar(limit)))


def _scalar(value: np.ndarray) -> int:
    if value.size != 1 or value.dtype.kind not in "iu":
        raise ShapeError(f"one integer is needed, not {value.dtype}{list(value.shape)}")
    return int(value.reshape(())[()])


def _infer_second(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = types[1]
    return (type_.without_data() if isinstance(type_, TensorType) else ANY,)


@operator("StackPushV2", domain=TENSORFLOW, infer=_infer_second, pure=False, strings=True)
def stack_push(node: Node, types: Types) -> Kernel:
    def function(handle: Any, value: Any) -> Any:
        stack = _stack(handle)
        if 0 <= stack.limit <= len(stack.values):
            raise ShapeError(f"the stack overflowed its maximum size {stack.limit}")
        kept = np.array(value) if isinstance(value, np.ndarray) else value
        stack.values.append(kept)
        return np.array(value) if isinstance(value, np.ndarray) else value

    return Kernel(function)


def of_type(name: str) -> Infer:
    """One output of the element type that attribute ``name`` says."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = dtypes().get(attrs.get(name, ""))
        return (ANY if dtype is None else TensorType(dtype),)

    return infer


@operator("StackPopV2", domain=TENSORFLOW, infer=of_type("elem_type"), pure=False, strings=True)
def stack_pop(node: Node, types: Types) -> Kernel:
    def function(handle: Any) -> Any:
        stack = _stack(handle)
        if not stack.values:
            raise ShapeError("the stack is empty")
        return stack.values.pop()

    return Kernel(function)


@operator("StackCloseV2", domain=TENSORFLOW, pure=False)
def stack_close(node: Node, types: Types) -> Kernel:
    return Kernel(lambda handle: _stack(handle).values.clear())


# Tensor arrays.


class _Element:
    """One place of a tensor array. ``shape`` is that of what was written, even after it is gone, or
    of what a gradient is to have here."""

    __slots__ = ("read", "shape", "value")

    def __init__(self) -> None:
        self.value: np.ndarray | None = None
        self.shape: tuple[int, ...] | None = None
        self.read = False


class _TensorArray:
    """Tensors of one dtype, each written once. ``adds``: it is one of gradients, to which several
    writes to one place add up."""

    def __init__(self, name: str, dtype: np.dtype, count: int, attrs: Attrs, *, adds: bool) -> None:
        if count < 0:
            raise ShapeError(f"the size of a tensor array must not be negative: {count}")
        self.name = name
        self.dtype = dtype
        self.shape = dims_of(attrs.get("element_shape"))
        self.dynamic = bool(attrs.get("dynamic_size"))
        self.clears = bool(attrs.get("clear_after_read", True))
        self.identical = bool(attrs.get("identical_element_shapes"))
        self.adds = adds
        self.elements = [_Element() for _ in range(count)]
        self.gradients: dict[str, _TensorArray] = {}

    def gradient(self, source: str) -> _TensorArray:
        """The array of gradients of that name, with zeros for what nobody writes."""
        array = self.gradients.get(source)
        if array is None:
            name, attrs = f"{self.name}@{source}", {"clear_after_read": self.clears}
            array = _TensorArray(name, self.dtype, len(self.elements), attrs, adds=True)
            array.shape = self.shape
            for mine, its in zip(self.elements, array.elements, strict=True):
                its.shape = mine.shape
            # Its size is that of this one now, and for good.
            self.dynamic = False
            self.gradients[source] = array
        return array

    def fault(self, text: str) -> ShapeError:
        return ShapeError(f"TensorArray {self.name}: {text}")

    def write(self, index: int, value: np.ndarray) -> None:
        if index < 0 or (index >= len(self.elements) and not self.dynamic):
            raise self.fault(
                f"Tried to write to index {index} but array is not resizeable and size is: "
                f"{len(self.elements)}"
            )
        if value.dtype != self.dtype:
            raise self.fault(f"its elements are {self.dtype}, not {value.dtype}")
        if not matches(value.shape, self.shape):
            raise self.fault(f"elements of shape {self.shape} are expected, not {value.shape}")
        while index >= len(self.elements):
            self.elements.append(_Element())
        element = self.elements[index]
        if element.read:
            raise self.fault(f"Could not write index {index} twice because it was already read.")
        if element.value is not None and not self.adds:
            raise self.fault(
                f"Could not write to TensorArray index {index} because it has already been written "
                "to."
            )
        if element.value is not None:
            if element.value.shape != value.shape:
                raise self.fault(f"shapes {element.value.shape} and {value.shape} do not add up")
            element.value = np.asarray(element.value + value)
            return
        if self.identical and self.shape is None:
            self.shape = value.shape
        element.value = np.array(value)
        element.shape = value.shape

    def read(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self.elements):
            raise self.fault(
                f"Tried to read from index {index} but array size is: {len(self.elements)}"
            )
        element = self.elements[index]
        if element.value is None and element.read and self.clears:
            raise self.fault(
                f"Could not read index {index} twice because it was cleared after a previous read "
                "(perhaps try setting clear_after_read = false?)."
            )
        value = element.value
        if value is None:
            shape = element.shape if element.shape is not None else static_shape(self.shape)
            if shape is None:
                raise self.fault(
                    f"Could not read from TensorArray index {index}: nobody has written it, and "
                    "the element shape is not fully defined"
                )
            value = np.zeros(shape, self.dtype)
            element.shape = shape
        element.read = True
        element.value = None if self.clears else value
        return value

    def __repr__(self) -> str:
        return f"TensorArray({self.name!r}, {len(self.elements)} elements)"


def dims_of(shape: Sequence[int] | None) -> Dims | None:
    """A shape out of attributes, where -1 stands for what is not known."""
    return None if shape is None else tuple([None if d is None or d < 0 else d for d in shape])


def static_shape(shape: Dims | None) -> tuple[int, ...] | None:
    """A shape of which every dim is known."""
    if shape is None or None in shape:
        return None
    return shape  # type: ignore[return-value]


def matches(shape: tuple[int, ...], wanted: Dims | None) -> bool:
    """Whether a tensor of this shape may stand where one of the wanted shape should."""
    if wanted is None:
        return True
    return len(shape) == len(wanted) and all(
        b is None or a == b for a, b in zip(shape, wanted, strict=True)
    )


def merged(a: Dims | None, b: Dims | None) -> Dims | None:
    """What two shapes say together of one tensor."""
    if a is None or b is None:
        return a if b is None else b
    if len(a) != len(b) or any(
        x != y and x is not None and y is not None for x, y in zip(a, b, strict=True)
    ):
        raise ShapeError(f"shapes {a} and {b} are not those of one tensor")
    return tuple([y if x is None else x for x, y in zip(a, b, strict=True)])


def _array(value: Any) -> _TensorArray:
    if not isinstance(value, _TensorArray):
        raise ShapeError(f"a handle of a tensor array is needed, not a {type(value).__name__}")
    return value


def _infer_array(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return ANY, _FLOW_TYPE


@operator("TensorArrayV3", domain=TENSORFLOW, infer=_infer_array, pure=False)
def tensor_array(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    name = attrs.get("tensor_array_name") or node.name
    dtype = dtypes().get(attrs.get("dtype", ""))
    if dtype is None:
        raise ShapeError(f"dtype {attrs.get('dtype')!r} is no element type")

    def function(size: np.ndarray) -> tuple[Any, np.ndarray]:
        return _TensorArray(name, dtype, _scalar(size), attrs, adds=False), FLOW

    return Kernel(function)


@operator("TensorArrayGradV3", domain=TENSORFLOW, infer=_infer_array, pure=False)
def tensor_array_grad(node: Node, types: Types) -> Kernel:
    source = node.attrs.get("source", "")
    return Kernel(lambda handle, flow: (_array(handle).gradient(source), FLOW))


def _infer_flow(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (_FLOW_TYPE,)


def _effect(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function of a tensor array that changes it and gives the flow."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @operator(name, domain=TENSORFLOW, infer=_infer_flow, pure=False, strings=True)
        def compile(node: Node, types: Types) -> Kernel:
            def run(handle: Any, *rest: Any) -> np.ndarray:
                function(_array(handle), *rest[:-1])  # the last one is the flow
                return FLOW

            return Kernel(run)

        return function

    return register


@_effect("TensorArrayWriteV3")
def write(array: _TensorArray, index: np.ndarray, value: np.ndarray) -> None:
    array.write(_scalar(index), value)


@_effect("TensorArrayScatterV3")
def scatter(array: _TensorArray, indices: np.ndarray, value: np.ndarray) -> None:
    if indices.ndim != 1 or value.ndim < 1 or len(indices) != len(value):
        raise array.fault(f"{indices.shape} indices do not fit a value of shape {value.shape}")
    for index, row in zip(indices.tolist(), value, strict=True):
        array.write(index, np.asarray(row))


@_effect("TensorArraySplitV3")
def split(array: _TensorArray, value: np.ndarray, lengths: np.ndarray) -> None:
    counts = lengths.reshape(-1).tolist()
    if value.ndim < 1 or sum(counts) != len(value) or min(counts, default=0) < 0:
        raise array.fault(f"Expected sum of lengths {counts} to be equal to {value.shape[:1]}")
    if len(counts) != len(array.elements) and not array.dynamic:
        raise array.fault(
            f"TensorArray's size is not equal to the size of lengths ({len(array.elements)} vs. "
            f"{len(counts)}), and the TensorArray is not marked as dynamically resizeable"
        )
    ends = np.cumsum(counts).tolist()
    for index, (end, count) in enumerate(zip(ends, counts, strict=True)):
        array.write(index, value[end - count : end])


@operator("TensorArrayReadV3", domain=TENSORFLOW, infer=of_type("dtype"), pure=False, strings=True)
def read(node: Node, types: Types) -> Kernel:
    return Kernel(lambda handle, index, flow: _array(handle).read(_scalar(index)))


def _rows(array: _TensorArray, indices: Sequence[int], shape: Dims | None) -> np.ndarray:
    """Elements of one shape, stacked."""
    if not indices:
        dims = static_shape(merged(array.shape, shape))
        if dims is None:
            raise array.fault(
                "TensorArray has zero size, but its element shape is not fully defined"
            )
        return np.zeros((0, *dims), array.dtype)
    rows = [array.read(index) for index in indices]
    if any(row.shape != rows[0].shape for row in rows):
        raise array.fault(f"elements have inconsistent shapes {[row.shape for row in rows]}")
    if not matches(rows[0].shape, shape):
        raise array.fault(f"elements of shape {shape} are expected, not {rows[0].shape}")
    return np.stack(rows)


@operator("TensorArrayGatherV3", domain=TENSORFLOW, infer=of_type("dtype"), pure=False)
def gather(node: Node, types: Types) -> Kernel:
    shape = dims_of(node.attrs.get("element_shape"))

    def function(handle: Any, indices: np.ndarray, flow: Any) -> np.ndarray:
        return _rows(_array(handle), indices.reshape(-1).tolist(), shape)

    return Kernel(function)


def _infer_concat(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return *of_type("dtype")(types, attrs, consts), TensorType(INT64, (None,))


@operator("TensorArrayConcatV3", domain=TENSORFLOW, infer=_infer_concat, pure=False)
def concat(node: Node, types: Types) -> Kernel:
    shape = dims_of(node.attrs.get("element_shape_except0"))

    def function(handle: Any, flow: Any) -> tuple[np.ndarray, np.ndarray]:
        array = _array(handle)
        parts = [array.read(i) for i in range(len(array.elements))]
        if not parts:
            dims = static_shape(shape)
            if dims is None:
                raise array.fault("it is empty, and its element shape is not fully defined")
            return np.zeros((0, *dims), array.dtype), np.zeros(0, np.int64)
        if any(part.ndim < 1 or part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise array.fault(f"elements have inconsistent shapes {[p.shape for p in parts]}")
        return np.concatenate(parts), np.array([len(part) for part in parts], np.int64)

    return Kernel(function)


@operator(
    "TensorArraySizeV3",
    domain=TENSORFLOW,
    infer=lambda types, attrs, consts: (TensorType(INT32, ()),),
    pure=False,
)
def size(node: Node, types: Types) -> Kernel:
    return Kernel(lambda handle, flow: np.array(len(_array(handle).elements), np.int32))


@operator("TensorArrayCloseV3", domain=TENSORFLOW, pure=False)
def close(node: Node, types: Types) -> Kernel:
    return Kernel(lambda handle: _array(handle).elements.clear())
