"""Variants: tensor lists and optionals.

They are immutable: each operation returns a new one. Elements may be variants themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, replace
from penstock.core.types import (
    ANY,
    BOOL,
    STRING,
    RunValue,
    Shape,
    ShapeError,
    TensorType,
    Type,
    accepts,
    find_dtype,
    type_of,
)
from penstock.host.current_run import copy_within_budget, keep, reserve
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import all_known, always, fits, ints, tensor
from penstock.ops.registry import Prepared
from penstock.ops.tensorflow import common, tensor_arrays

# Bytes of a list entry.
_PLACE_BYTES = 8


@dataclass(frozen=True, slots=True)
class _TensorList:
    """Tensors of one dtype (None: variants); items that are not set are None. ``limit`` is the
    maximum length if not negative."""

    dtype: np.dtype | None
    shape: Shape | None
    items: tuple[RunValue, ...]
    limit: int = -1

    def checked(self, value: RunValue) -> RunValue:
        """Check that ``value`` may be an element of the list, and return it."""
        tensor = isinstance(value, np.ndarray)
        dtype, shape = (value.dtype, value.shape) if tensor else (None, ())
        if dtype != self.dtype:
            raise ShapeError(f"the list elements have type {_name(self.dtype)}, not {_name(dtype)}")
        if not fits(shape, self.shape):
            raise ShapeError(f"the list has elements of shape {self.shape}, not {shape}")
        # Lists are immutable: each write copies all entries.
        reserve(_PLACE_BYTES * len(self.items))
        return keep(value)

    def mapped(self, function: Callable[[RunValue], RunValue]) -> _TensorList:
        """Apply ``function`` to each element that is set."""
        reserve(_PLACE_BYTES * len(self.items))
        items = [x if x is None else function(x) for x in with_checkpoints(self.items)]
        return replace(self, items=tuple(items))

    def combined(
        self, other: _TensorList, function: Callable[[RunValue, RunValue], RunValue]
    ) -> _TensorList:
        """Apply ``function`` to the elements of two lists at each index; an element that is set in
        only one of them is kept."""
        if self.dtype != other.dtype or len(self.items) != len(other.items):
            raise ShapeError(f"{self} and {other} cannot be added: types and lengths differ")
        reserve(_PLACE_BYTES * len(self.items))
        pairs = with_checkpoints(zip(self.items, other.items, strict=True))
        items = [y if x is None else x if y is None else function(x, y) for x, y in pairs]
        shape = tensor_arrays.merged(self.shape, other.shape)
        return replace(self, shape=shape, items=tuple(items))

    def item(self, index: int, shape: Shape | None) -> RunValue:
        """Element ``index``, of shape ``shape``; zeros if it is not set but its shape is known."""
        element = self.items[index]
        if self.dtype is None:
            if element is None:
                raise ShapeError(f"element {index}, a variant, has not been written")
            return element
        if element is not None:
            if not fits(element.shape, shape):
                raise ShapeError(f"element {index} has shape {element.shape}, not {shape}")
            return element
        shape = tensor_arrays.merged(self.shape, shape)
        dims = all_known(tensor_arrays.merged(shape, self._common()))
        if dims is None:
            raise ShapeError(f"element {index} has not been written, and its shape is unknown")
        reserve(math.prod(dims) * self.dtype.itemsize)
        return keep(np.zeros(dims, self.dtype))

    def tensor_dtype(self) -> np.dtype:
        """The dtype of a stack of the elements. Raises ``ShapeError`` for variants."""
        if self.dtype is None:
            raise ShapeError("a list of variants cannot be converted to a tensor")
        return self.dtype

    def _common(self) -> Shape | None:
        """The common shape of all elements that are set."""
        shapes = {x.shape for x in self.items if x is not None}
        return shapes.pop() if len(shapes) == 1 else None

    def __repr__(self) -> str:
        return f"TensorList({_name(self.dtype)}, {len(self.items)} elements)"


def _name(dtype: np.dtype | None) -> str:
    return "variant" if dtype is None else dtype.name


_list = common.handle(_TensorList, "list of tensors")


def _shape(value: np.ndarray) -> Shape | None:
    """Convert a tensor to a shape; the scalar -1 means unknown rank."""
    if value.ndim == 0:
        if value != -1:
            raise ShapeError(f"a shape must be a vector or the scalar -1 (unknown), not {value}")
        return None
    return common.dims_of(value.tolist())


def _elements(index: int, before: int = 0) -> Infer:
    """``infer`` for ``before`` unknown dims followed by the shape in input ``index``."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = find_dtype(attrs.get("element_dtype", ""))
        if dtype is None:
            return (ANY,)
        const, type_ = consts[index], types[index]
        dims = ints(types, consts, index, None)
        rank = const.ndim if const is not None else tensor((type_,), 0).rank
        if dims is None or rank != 1:
            return (TensorType(dtype),)
        shape = [dim if isinstance(dim, int) and dim >= 0 else None for dim in dims]
        return (TensorType(dtype, (*(None,) * before, *shape)),)

    return infer


def _count(value: np.ndarray) -> int:
    return common.integer(value, "the number of elements")


def _place(list_: _TensorList, index: np.ndarray) -> int:
    place = common.integer(index, "the index")
    if not 0 <= place < len(list_.items):
        raise ShapeError(
            f"Trying to access element {place} in a list with {len(list_.items)} elements."
        )
    return place


def _element_dtype(node: Node) -> np.dtype | None:
    if node.attrs.get("element_dtype") == "variant":
        return None
    return common.named_dtype(node.attrs, "element_dtype")


_OF_ELEMENTS: Prepared = {"dtype": _element_dtype}


@common.array_operator("EmptyTensorList", prepared=_OF_ELEMENTS)
def empty(shape: np.ndarray, limit: np.ndarray, *, dtype: np.dtype | None) -> _TensorList:
    return _TensorList(dtype, _shape(shape), (), _count(limit))


@common.array_operator("TensorListReserve", prepared=_OF_ELEMENTS)
def reserved(shape: np.ndarray, count: np.ndarray, *, dtype: np.dtype | None) -> _TensorList:
    return _TensorList(dtype, _shape(shape), (None,) * _size(count))


def _size(count: np.ndarray) -> int:
    size = _count(count)
    if size < 0:
        raise ShapeError(f"the number of elements of a list must not be negative, but is {size}")
    reserve(_PLACE_BYTES * size)
    return size


@common.array_operator("TensorListFromTensor", strings=True)
def from_tensor(value: np.ndarray | _TensorList, shape: np.ndarray) -> _TensorList:
    if isinstance(value, _TensorList):
        return value
    if value.ndim < 1:
        raise ShapeError("a scalar cannot be unstacked into a list: rank 1 or more is needed")
    if not fits(value.shape[1:], _shape(shape)):
        raise ShapeError(f"the elements have shape {value.shape[1:]}, not {shape.tolist()}")
    reserve(tensor_arrays.ELEMENT_BYTES * len(value))
    # Views of one copy: the run may reuse the memory of ``value``.
    rows = tuple(
        [np.asarray(row, value.dtype) for row in with_checkpoints(copy_within_budget(value))]
    )
    return _TensorList(value.dtype, _shape(shape), rows)


@common.array_operator("TensorListPushBack", strings=True)
def push_back(handle: object, value: np.ndarray) -> _TensorList:
    list_ = _list(handle)
    if 0 <= list_.limit <= len(list_.items):
        raise ShapeError(f"the list already has max_num_elements, {list_.limit}, elements")
    return replace(list_, items=(*list_.items, list_.checked(value)))


@common.array_operator("TensorListPopBack", infer=lambda t, a, c: (ANY, *_elements(1)(t, a, c)))
def pop_back(
    handle: object, shape: np.ndarray, *, element_dtype: str = ""
) -> tuple[_TensorList, np.ndarray]:
    list_ = _list(handle, element_dtype)
    if not list_.items:
        raise ShapeError("Trying to pop from an empty list.")
    last = list_.item(len(list_.items) - 1, _shape(shape))
    return replace(list_, items=list_.items[:-1]), last


@common.array_operator("TensorListGetItem", infer=_elements(2))
def get_item(
    handle: object, index: np.ndarray, shape: np.ndarray, *, element_dtype: str = ""
) -> np.ndarray:
    list_ = _list(handle, element_dtype)
    return list_.item(_place(list_, index), _shape(shape))


@common.array_operator("TensorListSetItem", strings=True)
def set_item(
    handle: object,
    index: np.ndarray,
    value: np.ndarray,
    *,
    resize_if_index_out_of_bounds: bool = False,
) -> _TensorList:
    list_ = _list(handle)
    if resize_if_index_out_of_bounds:
        missing = common.integer(index, "the index") + 1 - len(list_.items)
        reserve(_PLACE_BYTES * missing)
        list_ = replace(list_, items=list_.items + (None,) * missing)
    place = _place(list_, index)
    items = (*list_.items[:place], list_.checked(value), *list_.items[place + 1 :])
    return replace(list_, items=items)


def _stacked(list_: _TensorList, places: Sequence[int], shape: Shape | None) -> np.ndarray:
    dtype = list_.tensor_dtype()
    rows = [list_.item(place, shape) for place in with_checkpoints(places)]
    shape = None if rows else tensor_arrays.merged(list_.shape, shape)
    return tensor_arrays.stacked(rows, shape, dtype)


@common.array_operator("TensorListStack", infer=_elements(1, 1))
def stack(
    handle: object,
    shape: np.ndarray,
    *,
    num_elements: int = -1,
    element_dtype: str = "",
    none_is_empty: bool = False,
) -> RunValue:
    """Stack the elements; a tensor of variants is a list of them. With ``none_is_empty``, unknown
    dims of an empty list are 0, as for scan outputs of ONNX's loops."""
    list_ = _list(handle, "" if element_dtype == "variant" else element_dtype)
    if list_.dtype is None:
        return list_
    if none_is_empty and not list_.items:
        dims = [d if isinstance(d, int) else 0 for d in list_.shape or ()]
        return np.empty((0, *dims), list_.dtype)
    if num_elements not in (-1, len(list_.items)):
        raise ShapeError(
            f"num_elements is {num_elements}, but the list has {len(list_.items)} elements"
        )
    return _stacked(list_, range(len(list_.items)), _shape(shape))


@common.array_operator("TensorListGather", infer=_elements(2, 1))
def gather(
    handle: object, indices: np.ndarray, shape: np.ndarray, *, element_dtype: str = ""
) -> np.ndarray:
    list_ = _list(handle, element_dtype)
    places = [_place(list_, np.asarray(i)) for i in indices.reshape(-1)]
    return _stacked(list_, places, _shape(shape))


@common.array_operator("TensorListScatterV2", strings=True)
def scatter(
    value: np.ndarray, indices: np.ndarray, shape: np.ndarray, count: np.ndarray
) -> _TensorList:
    places = indices.reshape(-1).tolist()
    # -1 means the length that the indices require.
    length = max([*places, -1]) + 1 if _count(count) == -1 else _count(count)
    if value.ndim < 1 or len(places) != len(value) or min(places, default=0) < 0:
        raise ShapeError(f"indices {places} must be nonnegative, one per row of {value.shape}")
    if max([*places, -1]) >= length:
        raise ShapeError(f"indices {places} are out of range for a list of {length} elements")
    reserve(_PLACE_BYTES * length + tensor_arrays.ELEMENT_BYTES * len(places))
    items: list[np.ndarray | None] = [None] * length
    for place, row in with_checkpoints(zip(places, copy_within_budget(value), strict=True)):
        items[place] = np.asarray(row, value.dtype)
    return _TensorList(value.dtype, _shape(shape), tuple(items))


@common.array_operator("TensorListScatterIntoExistingList", strings=True)
def scatter_into(handle: object, value: np.ndarray, indices: np.ndarray) -> _TensorList:
    list_, places = _list(handle), indices.reshape(-1).tolist()
    if value.ndim < 1 or len(places) != len(value) or min(places, default=0) < 0:
        raise ShapeError(f"indices {places} must be nonnegative, one per row of {value.shape}")
    reserve(_PLACE_BYTES * len(list_.items) + tensor_arrays.ELEMENT_BYTES * len(places))
    items = [*list_.items, *[None] * (max([*places, -1]) + 1 - len(list_.items))]
    for place, row in with_checkpoints(zip(places, copy_within_budget(value), strict=True)):
        items[place] = list_.checked(np.asarray(row, value.dtype))
    return replace(list_, items=tuple(items))


@common.array_operator("TensorListLength", infer=always(TensorType(INT32, ())))
def length(handle: object) -> np.ndarray:
    return np.array(len(_list(handle).items), np.int32)


@common.array_operator(
    "TensorListElementShape",
    prepared={"dtype": lambda node: common.named_dtype(node.attrs, "shape_type", "int32", "iu")},
)
def element_shape(handle: object, *, dtype: np.dtype) -> np.ndarray:
    shape = _list(handle).shape
    return np.array(-1 if shape is None else [-1 if d is None else d for d in shape], dtype)


@common.array_operator("TensorListResize")
def resize(handle: object, size: np.ndarray) -> _TensorList:
    list_, count = _list(handle), _size(size)
    missing = (None,) * (count - len(list_.items))
    return replace(list_, items=(*list_.items[:count], *missing))


@common.array_operator(
    "TensorListConcatV2", infer=tensor_arrays.infer_concatenated("element_dtype")
)
def concat(
    handle: object, shape: np.ndarray, dims: np.ndarray, *, element_dtype: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    list_, dims_ = _list(handle, element_dtype), _shape(shape)
    dtype = list_.tensor_dtype()
    parts = [list_.item(i, dims_) for i in with_checkpoints(range(len(list_.items)))]
    return tensor_arrays.concatenated(parts, dims_[1:] if dims_ else None, dtype)


@common.array_operator("TensorListSplit", strings=True)
def split(value: np.ndarray, shape: np.ndarray, lengths: np.ndarray) -> _TensorList:
    counts = tensor_arrays.checked_lengths(lengths, value)
    reserve(tensor_arrays.ELEMENT_BYTES * len(counts))
    parts = tuple(np.split(copy_within_budget(value), np.cumsum(counts)[:-1])) if counts else ()
    return _TensorList(value.dtype, _shape(shape), parts)


# Ragged tensors.


@dataclass(frozen=True, slots=True)
class _Ragged:
    """A ragged tensor: the splits of its ragged dims, the outermost first, and its values."""

    splits: tuple[np.ndarray, ...]
    values: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.splits[0]) - 1 if self.splits else len(self.values)

    def row(self, index: int) -> _Ragged:
        """One row, without its outermost splits; a row of the values if there are none."""
        if not self.splits:
            return _Ragged((), np.asarray(self.values[index], self.values.dtype))
        begin, end = self.splits[0][index : index + 2].tolist()
        splits = []
        for inner in self.splits[1:]:
            splits.append(inner[begin : end + 1] - inner[begin])
            begin, end = int(inner[begin]), int(inner[end])
        return _Ragged(tuple(splits), self.values[begin:end])


_ragged = common.handle(_Ragged, "ragged tensor")


@common.array_operator("RaggedTensorToVariant", strings=True)
def ragged_to_variant(*parts: np.ndarray, batched_input: bool) -> _TensorList | _Ragged:
    """The ragged tensor as one variant, or its rows as a list of variants."""
    *splits, values = map(copy_within_budget, parts)
    for outer, inner in pairwise([*splits, values]):
        count = len(inner) - (inner is not values)
        if outer.ndim != 1 or (np.diff(outer, prepend=0, append=count) < 0).any() or outer[0]:
            raise ShapeError(f"splits {outer.tolist()} must ascend from 0 to {count}")
    whole = _Ragged(tuple(splits), values)
    if not batched_input:
        return whole
    reserve(tensor_arrays.ELEMENT_BYTES * whole.rows)
    return _TensorList(None, (), tuple(map(whole.row, with_checkpoints(range(whole.rows)))))


def _infer_ragged(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits = TensorType(find_dtype(attrs["Tsplits"]), (None,))
    return [splits] * attrs["output_ragged_rank"] + [TensorType(find_dtype(attrs["Tvalues"]))]


@common.array_operator("RaggedTensorFromVariant", infer=_infer_ragged, strings=True)
def ragged_from_variant(
    value: object, *, output_ragged_rank: int, Tvalues: str, Tsplits: str
) -> common.Outputs:
    """The splits and values of a variant, or of a list of variants, which become rows."""
    dtype = find_dtype(Tsplits)
    whole = isinstance(value, _Ragged)
    rows = [_ragged(row) for row in ([value] if whole else _list(value).items)]
    inner = output_ragged_rank - (not whole)
    if any(len(row.splits) != inner for row in rows):
        ranks = sorted({len(row.splits) for row in rows})
        raise ShapeError(f"variants have ragged ranks {ranks}, but the node needs {inner}")
    if any(row.values.dtype != find_dtype(Tvalues) for row in rows):
        raise ShapeError(f"the values of variants are not {Tvalues}, as the node says")
    reserve(sum(x.nbytes for row in rows for x in (*row.splits, row.values)))
    outer = [] if whole else [np.cumsum([0, *(row.rows for row in rows)])]
    for axis in range(inner):
        parts = [row.splits[axis] for row in rows]
        ends = np.cumsum([0, *(part[-1] for part in parts)])
        moved = [part[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
        outer.append(np.concatenate([[0], *moved]))
    values = [row.values for row in rows]
    if len({part.shape[1:] for part in values}) > 1:
        raise ShapeError(f"rows have values of shapes {[part.shape for part in values]!s:.100}")
    joined = np.concatenate(values) if values else np.empty(0, find_dtype(Tvalues))
    return common.outputs([*(splits.astype(dtype) for splits in outer), joined])


# Optionals.


@dataclass(frozen=True, slots=True)
class _Optional:
    """An optional; ``components`` are tensors or variants, or None if it has no value."""

    components: tuple[RunValue, ...] | None = None


_optional = common.handle(_Optional, "list of tensors or an optional")


@common.array_operator("OptionalNone")
def optional_none() -> _Optional:
    return _Optional()


@common.array_operator("OptionalFromValue", strings=True)
def optional_from_value(*components: RunValue) -> _Optional:
    return _Optional(tuple(map(keep, components)))


@common.array_operator("OptionalHasValue", infer=always(TensorType(BOOL, ())))
def optional_has_value(value: object) -> np.ndarray:
    return np.array(_optional(value).components is not None)


@common.array_operator("OptionalGetValue", infer=lambda types, attrs, consts: attrs["types"])
def optional_get_value(value: object, *, types: Sequence[Type]) -> RunValue:
    """Return the components, which must have the given types."""
    components = _optional(value).components
    if components is None:
        raise ShapeError("the optional has no value")
    if len(components) != len(types) or not all(map(accepts, types, map(type_of, components))):
        given = ", ".join(str(type_of(component)) for component in components)
        raise ShapeError(f"the optional contains {given}, not {', '.join(map(str, types))}")
    return common.outputs(components)


# Zeros and sums of variants, for the accumulation of gradients.


def _zeros(value: object) -> RunValue:
    """Zeros of the same structure as ``value``."""
    if isinstance(value, np.ndarray):
        reserve(value.nbytes)
        return keep(np.full_like(value, "") if value.dtype == STRING else np.zeros_like(value))
    if isinstance(value, _TensorList):
        return value.mapped(_zeros)
    components = _optional(value).components
    return _Optional(components and tuple(map(_zeros, components)))


def _sum(a: object, b: object) -> RunValue:
    """The elementwise sum of two values of the same structure."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise ShapeError(
                f"{a.dtype}{a.shape} and {b.dtype}{b.shape} cannot be added: dtypes and shapes "
                "must be equal"
            )
        reserve(a.nbytes)
        return keep(np.asarray(a + b))
    if isinstance(a, _TensorList) and isinstance(b, _TensorList):
        return a.combined(b, _sum)
    x, y = _optional(a).components, _optional(b).components
    if x is None and y is None:
        return _Optional()
    if x is None or y is None or len(x) != len(y):
        raise ShapeError("optionals cannot be added: their numbers of components differ")
    return _Optional(tuple(map(_sum, x, y)))


common.array_operator("ZerosLikeVariant")(_zeros)


@common.array_operator("AddVariants")
def add_variants(*values: object) -> RunValue:
    return reduce(_sum, values)
