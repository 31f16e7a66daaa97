"""Lists of tensors as values: no list is ever changed, each operation makes a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import ints
from penstock.ops.registry import TENSORFLOW, operator
from penstock.ops.tensorflow.tensor_arrays import (
    Dims,
    dims_of,
    matches,
    merged,
    of_type,
    static_shape,
)
from penstock.types import ANY, INT64, ShapeError, TensorType, Type, dtypes


@dataclass(frozen=True, slots=True)
class _TensorList:
    """Tensors of one dtype, ``None`` where none was put yet, at most ``limit`` if not negative."""

    dtype: np.dtype
    shape: Dims | None
    items: tuple[np.ndarray | None, ...]
    limit: int = -1

    def checked(self, value: np.ndarray) -> np.ndarray:
        """``value``, if it may stand in the list."""
        if value.dtype != self.dtype:
            raise ShapeError(f"the list has elements of {self.dtype}, not of {value.dtype}")
        if not matches(value.shape, self.shape):
            raise ShapeError(f"the list has elements of shape {self.shape}, not {value.shape}")
        return value

    def item(self, index: int, shape: Dims | None) -> np.ndarray:
        """Element ``index``, of this shape; zeros where none was put, if it is known how many."""
        element = self.items[index]
        if element is not None:
            if not matches(element.shape, shape):
                raise ShapeError(f"element {index} has shape {element.shape}, which is not {shape}")
            return element
        dims = static_shape(merged(merged(self.shape, shape), self._common()))
        if dims is None:
            raise ShapeError("an element is read that nobody has written, and has no known shape")
        return np.zeros(dims, self.dtype)

    def _common(self) -> Dims | None:
        """The shape that all elements there are have."""
        shapes = {x.shape for x in self.items if x is not None}
        return shapes.pop() if len(shapes) == 1 else None

    def __repr__(self) -> str:
        return f"TensorList({self.dtype}, {len(self.items)} elements)"


def _list(value: Any) -> _TensorList:
    if not isinstance(value, _TensorList):
        raise ShapeError(f"a list of tensors is needed, not a {type(value).__name__}")
    return value


def _shape(value: np.ndarray) -> Dims | None:
    """A shape given as a tensor; the scalar -1 says that nothing is known."""
    if value.ndim == 0:
        if value != -1:
            raise ShapeError(f"{value} is no shape")
        return None
    return dims_of(value.tolist())


def _elements(index: int, before: int = 0) -> Infer:
    """An element whose shape is what input ``index`` says, and so many unknown dims in front."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = dtypes().get(attrs.get("element_dtype", ""))
        if dtype is None:
            return (ANY,)
        given = ints(types, consts, index)
        dims = None if given is None or not _is_vector(types[index], consts[index]) else given
        if dims is None:
            return (TensorType(dtype),)
        shape = [dim if isinstance(dim, int) and dim >= 0 else None for dim in dims]
        return (TensorType(dtype, (*[None] * before, *shape)),)

    return infer


def _is_vector(type_: Type | None, const: np.ndarray | None) -> bool:
    rank = (
        const.ndim if const is not None else type_.rank if isinstance(type_, TensorType) else None
    )
    return rank == 1


def _count(value: np.ndarray) -> int:
    if value.size != 1:
        raise ShapeError(f"one number is needed, not shape {value.shape}")
    return int(value.reshape(())[()])


def _dtype(attrs: Attrs) -> np.dtype:
    dtype = dtypes().get(attrs.get("element_dtype", ""))
    if dtype is None:
        raise ShapeError(f"lists of {attrs.get('element_dtype')!r} are not supported")
    return dtype


def _place(list_: _TensorList, index: np.ndarray) -> int:
    place = _count(index)
    if not 0 <= place < len(list_.items):
        raise ShapeError(
            f"Trying to access element {place} in a list with {len(list_.items)} elements."
        )
    return place


@operator("EmptyTensorList", domain=TENSORFLOW)
def empty(node: Node, types: Types) -> Kernel:
    dtype = _dtype(node.attrs)
    return Kernel(lambda shape, limit: _TensorList(dtype, _shape(shape), (), _count(limit)))


@operator("TensorListReserve", domain=TENSORFLOW)
def reserve(node: Node, types: Types) -> Kernel:
    dtype = _dtype(node.attrs)

    def function(shape: np.ndarray, count: np.ndarray) -> _TensorList:
        if _count(count) < 0:
            raise ShapeError(f"a list of {_count(count)} elements")
        return _TensorList(dtype, _shape(shape), (None,) * _count(count))

    return Kernel(function)


@operator("TensorListFromTensor", domain=TENSORFLOW, strings=True)
def from_tensor(node: Node, types: Types) -> Kernel:
    def function(value: np.ndarray, shape: np.ndarray) -> _TensorList:
        if value.ndim < 1:
            raise ShapeError("a scalar is no list of tensors")
        if not matches(value.shape[1:], _shape(shape)):
            raise ShapeError(f"elements of shape {value.shape[1:]} are not of {shape.tolist()}")
        rows = tuple([np.asarray(row) for row in value.copy()])
        return _TensorList(value.dtype, _shape(shape), rows)

    return Kernel(function)


@operator("TensorListPushBack", domain=TENSORFLOW, strings=True)
def push_back(node: Node, types: Types) -> Kernel:
    def function(handle: Any, value: np.ndarray) -> _TensorList:
        list_ = _list(handle)
        if 0 <= list_.limit <= len(list_.items):
            raise ShapeError(f"the list has its maximum of {list_.limit} elements")
        return replace(list_, items=(*list_.items, list_.checked(value)))

    return Kernel(function)


def _infer_pop(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return ANY, *_elements(1)(types, attrs, consts)


@operator("TensorListPopBack", domain=TENSORFLOW, infer=_infer_pop)
def pop_back(node: Node, types: Types) -> Kernel:
    def function(handle: Any, shape: np.ndarray) -> tuple[_TensorList, np.ndarray]:
        list_ = _list(handle)
        if not list_.items:
            raise ShapeError("Trying to pop from an empty list.")
        last = list_.item(len(list_.items) - 1, _shape(shape))
        return replace(list_, items=list_.items[:-1]), last

    return Kernel(function)


@operator("TensorListGetItem", domain=TENSORFLOW, infer=_elements(2))
def get_item(node: Node, types: Types) -> Kernel:
    def function(handle: Any, index: np.ndarray, shape: np.ndarray) -> np.ndarray:
        list_ = _list(handle)
        return list_.item(_place(list_, index), _shape(shape))

    return Kernel(function)


@operator("TensorListSetItem", domain=TENSORFLOW, strings=True)
def set_item(node: Node, types: Types) -> Kernel:
    grows = bool(node.attrs.get("resize_if_index_out_of_bounds"))

    def function(handle: Any, index: np.ndarray, value: np.ndarray) -> _TensorList:
        list_ = _list(handle)
        if grows and _count(index) >= len(list_.items):
            missing = _count(index) + 1 - len(list_.items)
            list_ = replace(list_, items=list_.items + (None,) * missing)
        place = _place(list_, index)
        items = (*list_.items[:place], list_.checked(value), *list_.items[place + 1 :])
        return replace(list_, items=items)

    return Kernel(function)


def _stacked(list_: _TensorList, places: Sequence[int], shape: Dims | None) -> np.ndarray:
    if not places:
        dims = static_shape(merged(list_.shape, shape))
        if dims is None:
            raise ShapeError("an empty list is stacked whose elements have no known shape")
        return np.zeros((0, *dims), list_.dtype)
    rows = [list_.item(place, shape) for place in places]
    if any(row.shape != rows[0].shape or not matches(row.shape, shape) for row in rows):
        raise ShapeError(f"elements of shapes {[row.shape for row in rows]} cannot be stacked")
    return np.stack(rows)


@operator("TensorListStack", domain=TENSORFLOW, infer=_elements(1, 1))
def stack(node: Node, types: Types) -> Kernel:
    wanted = node.attrs.get("num_elements", -1)

    def function(handle: Any, shape: np.ndarray) -> np.ndarray:
        list_ = _list(handle)
        if wanted not in (-1, len(list_.items)):
            raise ShapeError(f"{wanted} elements are expected, the list has {len(list_.items)}")
        return _stacked(list_, range(len(list_.items)), _shape(shape))

    return Kernel(function)


@operator("TensorListGather", domain=TENSORFLOW, infer=_elements(2, 1))
def gather(node: Node, types: Types) -> Kernel:
    def function(handle: Any, indices: np.ndarray, shape: np.ndarray) -> np.ndarray:
        list_ = _list(handle)
        places = [_place(list_, np.asarray(i)) for i in indices.reshape(-1)]
        return _stacked(list_, places, _shape(shape))

    return Kernel(function)


@operator("TensorListScatterV2", domain=TENSORFLOW, strings=True)
def scatter(node: Node, types: Types) -> Kernel:
    def function(
        value: np.ndarray, indices: np.ndarray, shape: np.ndarray, count: np.ndarray
    ) -> _TensorList:
        places = indices.reshape(-1).tolist()
        length = max([*places, -1]) + 1 if _count(count) == -1 else _count(count)
        if value.ndim < 1 or len(places) != len(value) or min(places, default=0) < 0:
            raise ShapeError(f"indices {places} do not fit a value of shape {value.shape}")
        if max([*places, -1]) >= length:
            raise ShapeError(f"indices {places} are not in a list of {length} elements")
        items: list[np.ndarray | None] = [None] * length
        for place, row in zip(places, value.copy(), strict=True):
            items[place] = np.asarray(row)
        return _TensorList(value.dtype, _shape(shape), tuple(items))

    return Kernel(function)


@operator(
    "TensorListLength",
    domain=TENSORFLOW,
    infer=lambda types, attrs, consts: (TensorType(INT32, ()),),
)
def length(node: Node, types: Types) -> Kernel:
    return Kernel(lambda handle: np.array(len(_list(handle).items), np.int32))


@operator("TensorListElementShape", domain=TENSORFLOW)
def element_shape(node: Node, types: Types) -> Kernel:
    dtype = dtypes().get(node.attrs.get("shape_type", ""), INT32)

    def function(handle: Any) -> np.ndarray:
        shape = _list(handle).shape
        return np.array(-1 if shape is None else [-1 if d is None else d for d in shape], dtype)

    return Kernel(function)


@operator("TensorListResize", domain=TENSORFLOW)
def resize(node: Node, types: Types) -> Kernel:
    def function(handle: Any, size: np.ndarray) -> _TensorList:
        list_, count = _list(handle), _count(size)
        if count < 0:
            raise ShapeError(f"a list of {count} elements")
        missing = (None,) * (count - len(list_.items))
        return replace(list_, items=(*list_.items[:count], *missing))

    return Kernel(function)


def _infer_concat(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return *of_type("element_dtype")(types, attrs, consts), TensorType(INT64, (None,))


@operator("TensorListConcatV2", domain=TENSORFLOW, infer=_infer_concat)
def concat(node: Node, types: Types) -> Kernel:
    def function(handle: Any, shape: np.ndarray, dims: Any) -> tuple[np.ndarray, np.ndarray]:
        list_ = _list(handle)
        parts = [list_.item(i, _shape(shape)) for i in range(len(list_.items))]
        if not parts:
            rest = static_shape((_shape(shape) or (None, None))[1:])
            if rest is None:
                raise ShapeError("an empty list is joined whose elements have no known shape")
            return np.zeros((0, *rest), list_.dtype), np.zeros(0, np.int64)
        if any(part.ndim < 1 or part.shape[1:] != parts[0].shape[1:] for part in parts):
            raise ShapeError(f"elements of shapes {[p.shape for p in parts]} cannot be joined")
        return np.concatenate(parts), np.array([len(part) for part in parts], np.int64)

    return Kernel(function)


@operator("TensorListSplit", domain=TENSORFLOW, strings=True)
def split(node: Node, types: Types) -> Kernel:
    def function(value: np.ndarray, shape: np.ndarray, lengths: np.ndarray) -> _TensorList:
        counts = lengths.reshape(-1).tolist()
        if value.ndim < 1 or sum(counts) != len(value) or min(counts, default=0) < 0:
            raise ShapeError(f"lengths {counts} do not fit a value of shape {value.shape}")
        parts = tuple(np.split(value.copy(), np.cumsum(counts)[:-1])) if counts else ()
        return _TensorList(value.dtype, _shape(shape), parts)

    return Kernel(function)
