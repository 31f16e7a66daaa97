"""Ragged tensors, converted to dense tensors, n-grams and characters. A ragged tensor is a vector
of values, and row splits: the offset of each row and the end of the last one."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.types import INT64, STRING, ShapeError, TensorType, Type
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import INT32
from penstock.ops.onnx.text import strings
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.text import array_operator, decoded, encoded, operator, texts


def _checked_splits(splits: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The begin and end of each row. Raises ``ShapeError`` unless ``splits`` ascend from 0 to
    ``count``."""
    if splits.ndim != 1 or not splits.size or splits[0] != 0 or splits[-1] != count:
        raise ShapeError(f"splits {splits.tolist()} must start at 0 and end at {count}")
    if (splits[1:] < splits[:-1]).any():
        raise ShapeError(f"splits {splits.tolist()} must not decrease")
    return list(pairwise(splits.tolist()))


# RaggedRange


def _infer_range(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits = common.named_dtype(attrs, "Tsplits", "int64")
    return TensorType(splits, (None,)), TensorType(rules.tensor(types, 0).dtype, (None,))


@common.operator("RaggedRange", infer=_infer_range)
def ragged_range(node: Node, types: Types) -> Kernel:
    """Row splits and values of ranges; inputs are vectors of one length, or scalars."""
    dtype = common.named_dtype(node.attrs, "Tsplits", "int64")

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        counts = {len(x) for x in inputs if x.ndim}
        if any(x.ndim > 1 for x in inputs) or len(counts) > 1:
            shapes = [x.shape for x in inputs]
            raise ShapeError(f"ranges need scalars or vectors of one length, not {shapes}")
        starts, limits, steps = [np.broadcast_to(x, [*counts] or [1]) for x in inputs]
        if not steps.all():
            raise ShapeError("the step of a range is 0")
        lengths = np.maximum(np.ceil((limits - starts) / steps), 0)
        total = float(lengths.sum())
        if not total < 2**48:
            raise ShapeError(f"ranges of {total:g} elements are too long")
        reserve(int(total) * (starts.itemsize + 16))
        splits = np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)
        places = np.arange(int(total)) - np.repeat(splits[:-1], lengths.astype(np.int64))
        sizes = lengths.astype(np.int64)
        values = np.repeat(starts, sizes) + places * np.repeat(steps, sizes)
        return splits, values.astype(starts.dtype)

    return Kernel(run)


# RaggedGather, RaggedTensorToSparse


def _checked_nested(splits: Sequence[np.ndarray], count: int) -> None:
    for outer, inner in pairwise([*splits, None]):
        assert outer is not None
        _checked_splits(outer, count if inner is None else len(inner) - 1)


def _infer_gather(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits, values = rules.tensor(types, 0), rules.tensor(types, -2)
    tail = None if not values.shape else (None, *values.shape[1:])
    rank = attrs["OUTPUT_RAGGED_RANK"]
    return [TensorType(splits.dtype, (None,))] * rank + [TensorType(values.dtype, tail)]


@operator("RaggedGather", infer=_infer_gather, strings=True)
def ragged_gather(node: Node, types: Types) -> Kernel:
    """Rows of a ragged tensor, chosen by a tensor of indices: splits of each dim, and values."""

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        *splits, values, indices = inputs
        _checked_nested(splits, len(values))
        rows, places = len(splits[0]) - 1, indices.reshape(-1)
        if len(node.outputs) != len(splits) + indices.ndim:
            rank = len(node.outputs) - 1
            raise ShapeError(f"indices {indices.shape} do not give a ragged rank of {rank}")
        if ((places < 0) | (places >= rows)).any():
            raise ShapeError(
                f"indices {indices.tolist()!s:.100} must be a tensor of rows of {rows}"
            )
        dtype = splits[0].dtype
        results = [
            np.arange(math.prod(indices.shape[:axis]) + 1, dtype=dtype) * indices.shape[axis]
            for axis in range(1, indices.ndim)
        ]
        for inner in splits:
            begins, sizes = inner[places], np.diff(inner)[places]
            ends = np.concatenate([[0], np.cumsum(sizes)]).astype(dtype)
            reserve(int(ends[-1]) * 16)
            # Rows of the next dim, or of the values, are consecutive.
            places = np.arange(int(ends[-1])) + np.repeat(begins - ends[:-1], sizes)
            results.append(ends)
        return *results, values[places]

    return Kernel(run)


def _infer_sparse(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    values = rules.tensor(types, -1)
    rank = None if values.shape is None else len(types) - 1 + len(values.shape)
    indices, dims = TensorType(INT64, (None, rank)), TensorType(INT64, (rank,))
    return indices, TensorType(values.dtype, (None,)), dims


@operator("RaggedTensorToSparse", infer=_infer_sparse, strings=True)
def ragged_to_sparse(node: Node, types: Types) -> Kernel:
    """The indices of all values, the values, and the dims of the smallest tensor around them."""

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, ...]:
        *splits, values = inputs
        if not values.ndim:
            raise ShapeError("the values of a ragged tensor are no scalar")
        _checked_nested(splits, len(values))
        dims, columns = [len(splits[0]) - 1], [np.arange(len(splits[0]) - 1)]
        for inner in splits:
            sizes = np.diff(inner)
            dims.append(int(sizes.max(initial=0)))
            columns = [np.repeat(column, sizes) for column in columns]
            columns.append(np.arange(int(inner[-1])) - np.repeat(inner[:-1], sizes))
        size = math.prod(values.shape[1:])
        inside = np.indices(values.shape[1:]).reshape(values.ndim - 1, size)
        columns = [np.repeat(column, size) for column in columns]
        columns += [np.tile(column, len(values)) for column in inside]
        indices = np.stack(columns, 1).astype(np.int64)
        return indices, values.reshape(-1), np.array([*dims, *values.shape[1:]], np.int64)

    return Kernel(run)


# RaggedTensorToTensor


def _infer_dense(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype, shape = rules.tensor(types, 1).dtype, rules.tensor(types, 0).shape
    sizes = rules.ints(types, consts, 0)
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int):
        return (TensorType(dtype),)
    given = sizes if sizes is not None and len(sizes) == shape[0] else [None] * shape[0]
    dims = [dim if isinstance(dim, int) and dim >= 0 else None for dim in given]
    return (TensorType(dtype, tuple(dims)),)


def _partitions(tensors: Sequence[np.ndarray], kinds: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the number of rows, then for each ragged dim the row index of each of its elements."""
    count: int | None = None
    if kinds[:1] == ["FIRST_DIM_SIZE"]:
        count = common.count(tensors[0], "the size of the first dim")
        tensors, kinds = tensors[1:], kinds[1:]
    elif kinds[:1] == ["ROW_SPLITS"]:
        count = max(tensors[0].size - 1, 0)
    if count is None or len(kinds) != len(tensors) or not kinds:
        raise ShapeError(f"row_partition_types {list(kinds)} do not describe a ragged tensor")
    yield np.array(count)
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor.ndim != 1:
            raise ShapeError(f"a row partition must have rank 1, but has shape {tensor.shape}")
        if kind == "ROW_SPLITS":
            if tensor.size - 1 != count or (tensor[:1] != 0).any() or (np.diff(tensor) < 0).any():
                raise ShapeError(
                    f"splits {tensor.tolist()} must be {count + 1} ascending offsets from 0, for "
                    f"{count} rows"
                )
            numbers = np.repeat(np.arange(count), np.diff(tensor))
        elif kind == "VALUE_ROWIDS":
            numbers = tensor.astype(np.int64)
            if (np.diff(numbers) < 0).any() or ((numbers < 0) | (numbers >= count)).any():
                raise ShapeError(f"row ids {tensor.tolist()} must be ascending and in [0, {count})")
        else:
            raise ShapeError(f"row partition type {kind!r} is not supported")
        count = len(numbers)
        yield numbers


@array_operator("RaggedTensorToTensor", infer=_infer_dense)
def ragged_to_dense(
    dims: np.ndarray,
    values: np.ndarray,
    default: np.ndarray,
    *tensors: np.ndarray,
    row_partition_types: Sequence[str],
) -> np.ndarray:
    """Inputs: the dims, with -1 for the length of the longest row; the values; the default value
    for padding; and the partitions listed in ``row_partition_types``, the outermost first.
    """
    first, *rows = _partitions(tensors, row_partition_types)
    if not values.ndim:
        raise ShapeError("values must have rank 1 or more, but is a scalar")
    rank, inner = 1 + len(rows) + values.ndim - 1, values.shape[1:]
    wanted = [-1] * rank if not dims.ndim else dims.tolist()
    if len(wanted) != rank or any(
        dim not in (-1, size) for dim, size in zip(wanted[rank - len(inner) :], inner, strict=True)
    ):
        raise ShapeError(
            f"shape {wanted} must have {len(rows) + 1} dims followed by {list(inner)}, the shape "
            "of a value"
        )
    shape = [int(first) if wanted[0] < 0 else wanted[0]]
    places = np.arange(int(first))
    # Elements beyond the requested dims are dropped.
    places[places >= shape[0]] = -1
    for numbers, size in zip(rows, wanted[1:], strict=False):
        # Row indices ascend, so that bisection finds the first element of each row.
        starts = np.searchsorted(numbers, numbers)
        columns = np.arange(len(numbers)) - starts
        width = int(columns.max(initial=-1)) + 1 if size < 0 else size
        parents = places[numbers]
        places = np.where((parents >= 0) & (columns < width), parents * width + columns, -1)
        shape.append(width)
    reserve(int(np.prod([*shape, *inner], dtype=np.int64)) * values.itemsize)
    try:
        filled = np.broadcast_to(default, inner)
    except ValueError as error:
        raise ShapeError(
            f"a default value of shape {default.shape} does not broadcast to {inner}, the shape "
            "of a value"
        ) from error
    out = np.empty((int(np.prod(shape)), *inner), values.dtype)
    out[...] = filled
    count = min(len(places), len(values))
    kept = places[:count] >= 0
    out[places[:count][kept]] = values[:count][kept]
    return out.reshape(*shape, *inner)


# StringNGrams


def _infer_ngrams(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits = rules.tensor(types, 1)
    return TensorType(STRING, (None,)), TensorType(splits.dtype, splits.shape)


@operator("StringNGrams", infer=_infer_ngrams)
def string_ngrams(node: Node, types: Types) -> Kernel:
    """The n-grams of each row, padded at both ends by at most ``pad_width`` values; with -1, by one
    less than the n-gram width."""
    attrs = node.attrs
    widths, separator, most = attrs["ngram_widths"], attrs["separator"], attrs["pad_width"]
    left, right = attrs["left_pad"], attrs["right_pad"]
    if any(width < 1 for width in widths):
        raise ShapeError(f"ngram_widths {widths} must be positive")

    def grams(row: list[str], width: int, pads: int) -> list[str]:
        reserve((len(row) + 2 * pads - width + 1) * width * STRING.itemsize)
        padded = [left] * pads + row + [right] * pads
        return [separator.join(padded[i : i + width]) for i in range(len(padded) - width + 1)]

    def of_row(row: list[str]) -> list[str]:
        result: list[str] = []
        for width in widths:
            # More padding would yield n-grams without any value of the row.
            pads = width - 1 if most < 0 else min(most, width - 1)
            if len(row) + 2 * pads >= width:
                result += grams(row, width, pads)
        # As in TensorFlow, the whole row becomes one n-gram then.
        if not result and row and attrs["preserve_short_sequences"]:
            pads = max(most, 0)
            result = grams(row, len(row) + 2 * pads, pads)
        return result

    def run(data: np.ndarray, splits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if data.ndim != 1:
            raise ShapeError(f"the values must have rank 1, but have shape {data.shape}")
        if not splits.size and not data.size:
            return strings([], (0,)), splits.copy()
        values, result, ends = list(texts(data)), [], [0]
        for begin, end in _checked_splits(splits, len(values)):
            checkpoint()
            result += of_row(values[begin:end])
            ends.append(len(result))
        return strings(result, (len(result),)), np.array(ends, splits.dtype)

    return Kernel(run)


# Characters.

_ENCODINGS = {"UTF-8": "utf-8", "UTF-16-BE": "utf-16-be", "UTF-32-BE": "utf-32-be"}
# Marks invalid bytes, and with what is added to it their number: valid text has no surrogates.
_INVALID = 0xDFF0
_CONTROLS = frozenset(range(32))


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return chr(_INVALID + error.end - error.start), error.end


codecs.register_error("penstock.mark", _mark)


def _codec(attrs: Attrs, name: str) -> str:
    codec = _ENCODINGS.get(attrs[name].upper())
    if codec is None:
        raise ShapeError(f"{name} {attrs[name]!r} is not one of {', '.join(_ENCODINGS)}")
    return codec


def _replacing(attrs: Attrs) -> list[int] | None:
    """The code points that replace invalid ones; None if these raise an error."""
    if attrs["errors"] == "strict":
        return None
    return [attrs["replacement_char"]] if attrs["errors"] == "replace" else []


def _infer_decode(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits = common.named_dtype(attrs, "Tsplits", "int64", "iu")
    dims = rules.all_known(rules.tensor(types, 0).shape)
    count = None if dims is None else int(np.prod(dims, dtype=np.int64)) + 1
    return TensorType(splits, (count,)), TensorType(INT32, (None,))


def _reader(attrs: Attrs) -> Callable[[str], Iterator[tuple[int, int]]]:
    """Return a function that yields the code points of a string, and their offsets in bytes."""
    codec, replaced = _codec(attrs, "input_encoding"), _replacing(attrs)
    controls = _CONTROLS if attrs["replace_control_characters"] else frozenset()

    def points(text: str) -> Iterator[tuple[int, int]]:
        offset = 0
        for char in encoded(text).decode(codec, "penstock.mark"):
            point, length = ord(char), ord(char) - _INVALID
            invalid = 0 <= length < 16
            if invalid and replaced is None:
                raise ShapeError(f"{text!r:.100} is not valid {attrs['input_encoding']}")
            if invalid or point in controls:
                yield from ((other, offset) for other in replaced or ())
            else:
                yield point, offset
            offset += length if invalid else len(char.encode(codec))

    return points


@operator("UnicodeDecode", infer=_infer_decode)
@operator(
    "UnicodeDecodeWithOffsets",
    infer=lambda *given: (*_infer_decode(*given), TensorType(INT64, (None,))),
)
def unicode_decode(node: Node, types: Types) -> Kernel:
    """The splits and the code points of all strings, and perhaps their offsets."""
    points, count = _reader(node.attrs), len(node.outputs)
    dtype = common.named_dtype(node.attrs, "Tsplits", "int64", "iu")

    def run(x: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = [list(points(text)) for text in texts(x)]
        splits = np.cumsum([0, *map(len, rows)]).astype(dtype)
        pairs = np.array([pair for row in rows for pair in row], np.int64).reshape(-1, 2)
        return (splits, pairs[:, 0].astype(np.int32), pairs[:, 1].copy())[:count]

    return Kernel(run)


@operator("UnicodeTranscode", infer=rules.same_type, strings=True)
def unicode_transcode(node: Node, types: Types) -> Kernel:
    points, codec = _reader(node.attrs), _codec(node.attrs, "output_encoding")

    def run(x: np.ndarray) -> np.ndarray:
        rows = ["".join(chr(point) for point, _ in points(text)) for text in texts(x)]
        return strings([decoded(row.encode(codec)) for row in rows], x.shape)

    return Kernel(run)


def _infer_encode(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    splits = rules.tensor(types, 1).shape
    count = splits[0] - 1 if splits and isinstance(splits[0], int) else None
    return (TensorType(STRING, (count,)),)


@array_operator("UnicodeEncode", infer=_infer_encode)
def unicode_encode(
    points: np.ndarray,
    splits: np.ndarray,
    *,
    errors: str,
    output_encoding: str,
    replacement_char: int,
) -> np.ndarray:
    """Encode each row of code points as a string."""
    attrs = {"errors": errors, "replacement_char": replacement_char}
    codec = _codec({"output_encoding": output_encoding}, "output_encoding")
    replaced = _replacing(attrs)
    if points.ndim != 1:
        raise ShapeError(f"the code points must have rank 1, but have shape {points.shape}")
    values: list[list[int]] = []
    for point in with_checkpoints(points.tolist()):
        if 0 <= point <= 0x10FFFF and not 0xD800 <= point <= 0xDFFF:
            values.append([point])
        elif replaced is None:
            raise ShapeError(f"{point} is not a Unicode scalar value")
        else:
            values.append(replaced)
    rows = _checked_splits(splits, len(values))
    written = [
        decoded("".join([chr(p) for value in values[a:b] for p in value]).encode(codec))
        for a, b in with_checkpoints(rows)
    ]
    return strings(written, (len(written),))
