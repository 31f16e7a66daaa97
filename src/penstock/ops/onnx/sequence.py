"""Sequences and optionals.

A sequence is an immutable list: operations that insert or erase return a new list of the same
arrays. Arrays are not copied here: plans copy tensors in reused memory before they are put into a
list. A tensor taken out of a list is a view of its element.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.types import (
    ANY,
    BOOL,
    FLOAT32,
    INT64,
    AnyType,
    Dim,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    Type,
    join,
    without_data,
)
from penstock.host.current_run import keep, reserve
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.onnx.arrange import cuts
from penstock.ops.registry import array_operator

# Bytes of a list entry, and of an entry with its own view object.
_PLACE_BYTES = 8
_VIEW_BYTES = 200


def _infer_sequence_construct(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    if not types:
        raise ShapeError("SequenceConstruct needs at least one input")
    rules.same_dtype(types, range(len(types)))
    joined, *others = [without_data(type_ or ANY) for type_ in types]
    for type_ in others:
        joined = join(joined, type_)
    return (SequenceType(joined),)


@array_operator(
    "SequenceConstruct", since=11, infer=_infer_sequence_construct, strings=True, traits={"exact"}
)
def sequence_construct(*tensors: np.ndarray) -> list[object]:
    return list(map(keep, tensors))


array_operator(
    "SequenceEmpty",
    since=11,
    infer=lambda types, attrs, consts: (
        SequenceType(TensorType(rules.dtype_attribute(attrs, "dtype") or FLOAT32)),
    ),
    traits={"exact"},
)(list)


def _infer_split_to_sequence(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (SequenceType(TensorType(x.dtype)),)
    axis = rules.normalize_axis(attrs.get("axis", 0), len(x.shape))
    keepdims = attrs.get("keepdims", 1)
    part: tuple[Dim, ...] = (1,) if keepdims else ()
    if rules.given(types, 1):
        split, rank = rules.all_known(rules.ints(types, consts, 1)), rules.tensor(types, 1).rank
        if split is None and not keepdims and not rank:  # a scalar of 1 would drop the axis
            return (SequenceType(TensorType(x.dtype)),)
        if keepdims or rank or split != (1,):
            part = (_part_size(x.shape[axis], split, rank),)
    return (SequenceType(TensorType(x.dtype, (*x.shape[:axis], *part, *x.shape[axis + 1 :]))),)


def _part_size(dim: Dim, split: Sequence[int] | None, rank: int | None) -> Dim:
    """The common size of all parts, if known."""
    if split is None or not split or rank is None:
        return None
    if rank == 0:
        (size,) = split
        return size if isinstance(dim, int) and size > 0 and dim % size == 0 else None
    return split[0] if len(set(split)) == 1 else None


@array_operator(
    "SplitToSequence", since=11, infer=_infer_split_to_sequence, strings=True, traits={"exact"}
)
def split_to_sequence(
    x: np.ndarray, split: np.ndarray | None = None, *, axis: int = 0, keepdims: int = 1
) -> list[np.ndarray]:
    axis = rules.normalize_axis(axis, x.ndim)
    n = x.shape[axis]
    if split is None:
        sizes = [1] * n
    elif split.ndim == 0:
        size = int(split)
        if size < 1:
            raise ShapeError(f"split is {size}: the size of the parts must be positive")
        sizes = [min(size, n - start) for start in range(0, n, size)]
    else:
        sizes = split.tolist()
        if any(size < 0 for size in sizes) or sum(sizes) != n:
            raise ShapeError(f"split {sizes} must be nonnegative and add up to dim {n}")
    reserve(_VIEW_BYTES * len(sizes))
    parts = [x[part] for part in with_checkpoints(cuts(axis, sizes))]
    # The standard ignores keepdims if split is given, but exporters write unbind with a scalar
    # split of 1, for which ONNX Runtime drops the axis.
    if keepdims or (split is not None and (split.ndim or size != 1)):
        return parts
    return [part.squeeze(axis) for part in with_checkpoints(parts)]


def _element(types: Types) -> Type:
    """The element type of input 0, a sequence."""
    type_ = types[0] if types else None
    if isinstance(type_, OptionalType):
        type_ = type_.element
    if isinstance(type_, SequenceType):
        return type_.element
    if type_ is None or isinstance(type_, AnyType):
        return ANY
    raise ShapeError(f"input 0 must be a sequence, not {type_}")


def _position(position: np.ndarray, count: int) -> int:
    """Convert a position in a sequence of ``count`` elements to a nonnegative int."""
    place = int(rules.one_element(position, "position"))
    if not -count <= place < count:
        raise ShapeError(f"position {place} is out of range for a sequence of {count} elements")
    return place % count


def _infer_sequence_insert(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    element, added = _element(types), without_data(types[1] or ANY)
    if isinstance(element, TensorType) and isinstance(added, TensorType):
        rules.same_dtype((element, added), (0, 1))
    return (SequenceType(join(element, added)),)


@array_operator(
    "SequenceInsert", since=11, infer=_infer_sequence_insert, strings=True, traits={"exact"}
)
def sequence_insert(
    sequence: list[object], x: np.ndarray, position: np.ndarray | None = None
) -> list[object]:
    n = len(sequence)
    # Positions range from -n to n; -1 inserts before the last element.
    where = n if position is None else int(rules.one_element(position, "position"))
    where += n if where < 0 else 0
    if not 0 <= where <= n:
        raise ShapeError(f"position {where} is out of range for an insertion into {n} elements")
    reserve(_PLACE_BYTES * n)
    return [*sequence[:where], keep(x), *sequence[where:]]


@array_operator(
    "SequenceErase",
    since=11,
    infer=lambda types, attrs, consts: (SequenceType(_element(types)),),
    strings=True,
    traits={"exact"},
)
def sequence_erase(sequence: list[object], position: np.ndarray | None = None) -> list[object]:
    where = _position(np.array(-1) if position is None else position, len(sequence))
    return [*sequence[:where], *sequence[where + 1 :]]


@array_operator(
    "SequenceAt",
    since=11,
    infer=lambda t, a, c: (_element(t),),
    view=True,
    strings=True,
    traits={"exact"},
)
def sequence_at(sequence: list[object], position: np.ndarray) -> object:
    return sequence[_position(position, len(sequence))]


def _infer_sequence_length(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    _element(types)
    return (TensorType(INT64, ()),)


@array_operator("SequenceLength", since=11, infer=_infer_sequence_length, strings=True)
def sequence_length(sequence: list[object]) -> np.ndarray:
    return np.array(len(sequence), np.int64)


def _infer_concat_from_sequence(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    element = _element(types)
    if not isinstance(element, TensorType):
        return (TensorType(),)
    if element.shape is None:
        return (TensorType(element.dtype),)
    stacked = bool(attrs.get("new_axis", 0))
    axis = rules.normalize_axis(attrs["axis"], len(element.shape) + stacked)
    after = axis if stacked else axis + 1
    return (TensorType(element.dtype, (*element.shape[:axis], None, *element.shape[after:])),)


_MANY = 2**16
"""sequence elements concatenated per call, which takes NumPy about 0.1 s"""


@array_operator(
    "ConcatFromSequence",
    since=11,
    infer=_infer_concat_from_sequence,
    strings=True,
    traits={"exact"},
)
def concat_from_sequence(sequence: list[np.ndarray], *, axis: int, new_axis: int = 0) -> np.ndarray:
    reserve(sum([x.nbytes for x in with_checkpoints(sequence)]))
    join = np.stack if new_axis else np.concatenate
    if len(sequence) <= _MANY:
        return join(sequence, axis)
    parts = []
    for begin in range(0, len(sequence), _MANY):
        checkpoint()
        parts.append(join(sequence[begin : begin + _MANY], axis))
    # The parts already have the new axis.
    return np.concatenate(parts, axis)


# Optionals: the value itself, or None


def _infer_optional(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    if types and types[0] is not None:
        return (OptionalType(without_data(types[0] or ANY)),)
    declared = attrs.get("type")
    return (declared if isinstance(declared, OptionalType) else OptionalType(declared or ANY),)


@array_operator("Optional", since=15, infer=_infer_optional, strings=True, traits={"exact"})
def optional(x: object = None) -> object:
    return x.copy() if isinstance(x, np.ndarray) else x


def _infer_get_element(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = types[0] if types else None
    return (type_.element if isinstance(type_, OptionalType) else type_ or ANY,)


@array_operator(
    "OptionalGetElement",
    since=15,
    infer=_infer_get_element,
    view=True,
    strings=True,
    traits={"exact"},
)
def optional_get_element(x: object) -> object:
    if x is None:
        raise ShapeError("the optional is empty: it has no element")
    return x


@array_operator(
    "OptionalHasElement", since=15, infer=rules.always(TensorType(BOOL, ())), strings=True
)
def optional_has_element(x: object = None) -> np.ndarray:
    return np.array(x is not None)
