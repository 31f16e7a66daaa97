"""Resize by index and weight tables of each axis, as copies or weighted sums; and Pad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.backends.native import LANES, by_memory, family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, UnsupportedError
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.layout import strides_of
from penstock.ops.onnx.pad import pad_widths, padded_places
from penstock.ops.onnx.resize import Table, resize_tables

_MOST_ROWS, _SPAN = 256, 4096  # as in c/windows/resize.c
# Most elements of a row whose sums are computed at once, numbers of one, and of all.
_CHUNK, _WIDEST, _TOGETHER = 512, 512, 2048
_MOST_INDEX = 2**31
_REALS = {
    "float64": "float64",
    "int32": "float64",
    **dict.fromkeys(("float32", "uint8", "int8", "uint16", "int16"), "float32"),
}
"""accumulator types, by element"""
_REALS_OF_CODES = {"uint8": "float32", "int8": "int32", "int16": "float64"}
_IN_INTEGERS, _MOST_BITS = "resize_codes_int8", 20  # bits behind the point of sums

_Strides = Sequence[tuple[int, ...] | None]


@family("Resize", "tflite.IntegerResize", work=by_memory)
def resize(site: Site) -> NativeCall | None:
    """Resize with constant scales or sizes, except positions outside of the input."""
    x, inputs = site.tensor(0), range(1, len(site.node.inputs))
    if any(site.input(i) and site.constant(i) is None for i in inputs):
        return None
    nearest = site.attr("mode", "nearest") == "nearest"
    of_codes = site.node.op.name == "IntegerResize"
    size = 0 if x.dtype is None else x.dtype.itemsize
    reals = _REALS_OF_CODES if of_codes else _REALS
    if size not in (1, 2, 4, 8) if nearest else str_(x.dtype) not in reals:
        return None
    if 0 in (*x.dims, *site.output().dims) or max(x.dims, default=0) >= _MOST_INDEX:
        return None
    tables = resize_tables(site.tensors[: len(site.node.inputs)], site.node.attrs, site.constants)
    if not tables:
        return None
    if any(table.outside is not None for table in tables):
        return None
    if of_codes:
        name, bits = f"resize_codes_{x.dtype}", site.attr("fraction_bits", 0)
        if name == _IN_INTEGERS:
            if not 0 < bits * len(tables) <= _MOST_BITS or len(tables) > 2:
                return None
            if any(len(table.indices) != 2 for table in tables):
                return None
            tables = [table._replace(weights=table.weights * 2.0**bits) for table in tables]
        return _by_tables(site, name, tables)
    return _by_tables(site, f"resize_nearest_{size}" if nearest else f"resize_{x.dtype}", tables)


class _Padding(NamedTuple):
    """Padding before and after the elements of each axis, which are ``steps`` apart; negative
    widths crop."""

    widths: Sequence[tuple[int, int]]
    steps: Sequence[int]
    value: np.ndarray


@family("Pad", "tflite.Spread", work=by_memory)
def pad(site: Site) -> NativeCall | None:
    """Pad of constant widths, in all modes; Spread."""
    x, y, inputs = site.tensor(0), site.output(), range(1, len(site.node.inputs))
    if any(site.input(i) and site.constant(i) is None for i in inputs):
        return None
    size = 0 if x.dtype is None else x.dtype.itemsize
    if size not in (1, 2, 4, 8) or 0 in (*x.dims, *y.dims):
        return None
    if max(x.dims, default=0) >= _MOST_INDEX:
        return None
    if site.attr("mode", "constant") == "constant":
        value, steps = site.constant(2), site.constant(1)
        value = np.zeros(1, x.dtype) if value is None else np.reshape(value, -1)
        if site.node.op.name == "Spread" and steps is not None:
            ends = [site.attr(name, ()) or [0] * len(x.dims) for name in ("low", "high")]
            padding = _Padding([*zip(*ends, strict=False)], steps.reshape(-1).tolist(), value)
        else:
            widths = pad_widths(x.dims, site.constants)
            padding = _Padding(widths, [1] * len(x.dims), value)
        fits = len(padding.widths) == len(padding.steps) == len(x.dims)
        if value.size != 1 or value.dtype != x.dtype or not fits:
            return None
        if min(padding.steps, default=1) < 1:
            return None
        return _pad_call(site, padding, (None,) * len(site.tensors))
    tables = []
    for axis, places in enumerate(padded_places(x.dims, site.node.attrs, site.constants)):
        if not np.array_equal(places, np.arange(x.dims[axis])):
            ones = np.ones((1, len(places)))
            tables.append(Table(axis, x.dims[axis], len(places), places[None], ones, None))
    return _by_tables(site, f"resize_nearest_{size}", tables) if tables else None


def _pad_call(site: Site, padding: _Padding, strides: _Strides) -> NativeCall:
    """The call of a Pad with a constant, for tensors of these strides. Raises
    ``UnsupportedError``."""
    x, y, (widths, steps, value) = site.tensor(0), site.output(), padding
    assert x.dtype is not None
    x_strides = strides[0] or strides_of(x.dims, 1)
    y_strides = strides[len(site.node.inputs)] or strides_of(y.dims, 1)
    axes = [i for i, n in enumerate(y.dims) if n > 1 or x.dims[i] > 1 or any(widths[i])]
    # In memory order: images may be channels last.
    axes.sort(key=lambda axis: -y_strides[axis])
    before, length, width, step = 0, 1, 1, 1
    # Merge axes into rows as long as elements are contiguous in both.
    while axes and before == 0 and length == width:
        axis = axes[-1]
        if y_strides[axis] != width or (x.dims[axis] > 1 and x_strides[axis] != length):
            break
        if steps[axis] > 1 and width > 1:
            break
        step = steps[axis] if width == 1 else 1
        before, length, width = (n * width for n in (widths[axis][0], x.dims[axis], y.dims[axis]))
        axes.pop()
    rows = _padded_rows(padding, axes, (x, y), (x_strides, y_strides))
    return NativeCall(
        f"pad_{x.dtype.itemsize}",
        (
            *(Tensor(0), site.result(), value),
            np.array(rows, np.int64).reshape(-1, 6),
            *(len(rows), before, length, width, step),
        ),
        items=math.prod(y.dims[axis] for axis in axes),
        item_ns=rows_ns(width, rows=1),
        restrided=partial(_pad_call, site, padding),
    )


def _padded_rows(
    padding: _Padding,
    axes: Sequence[int],
    types: Sequence[TensorType],
    strides: Sequence[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """The axes outside of rows as c/windows/resize.c has them, merged where they follow each other:
    elements of the result, padding before those of the input, and the steps and strides of both."""
    (x, y), (x_strides, y_strides) = types, strides
    rows: list[tuple[int, ...]] = []
    for i in axes:
        count, pitches = y.dims[i], (1, x_strides[i], y_strides[i])
        outer = rows[-1] if rows else ()
        around = (1, *[count * pitch for pitch in pitches[1:]])
        if outer and x.dims[i] == count and not any(padding.widths[i]) and outer[3:] == around:
            # All of the axis: those of the one around it follow each other.
            rows[-1] = tuple([n * count for n in outer[:3]]) + pitches
        else:
            step = padding.steps[i]
            rows.append((count, padding.widths[i][0], x.dims[i], step, *pitches[1:]))
    return rows


def _by_tables(site: Site, name: str, tables: Sequence[Table]) -> NativeCall:
    return _call(site, name, {table.axis: table for table in tables}, (None,) * len(site.tensors))


def _call(site: Site, name: str, tables: dict[int, Table], strides: _Strides) -> NativeCall:
    """The call for tensors of these strides. Raises ``UnsupportedError``."""
    x, y = site.tensor(0), site.output()
    x_strides = strides[0] or strides_of(x.dims, 1)
    y_strides = strides[len(site.node.inputs)] or strides_of(y.dims, 1)
    axes, inner = _rows(tables, (x, y), (x_strides, y_strides))
    row = axes[-1]
    entries: list[list[int]] = []
    reads: list[tuple[np.ndarray, np.ndarray]] = []
    same = False  # the previous axis is not resized
    for axis in axes:
        count, steps = y.dims[axis], [x_strides[axis], y_strides[axis]]
        if same and axis not in tables and entries[-1][1:3] == [count * step for step in steps]:
            count *= entries.pop()[0]
            reads.pop()
        same = axis not in tables
        indices, weights = _read(tables.get(axis), count)
        entries.append([count, *steps, len(indices), sum(own.size for own, _ in reads)])
        reads.append((indices, weights))
    taps, items = [entry[3] for entry in entries], math.prod(y.dims[axis] for axis in axes[:-1])
    if math.prod(taps[:-1]) > _MOST_ROWS or items >= _MOST_INDEX:
        raise UnsupportedError
    nearest, indices, run = "nearest" in name, reads[-1][0], (0, 0)
    if nearest:
        chunk, wide, spans = int(inner == 1 and _doubles(tables[row])), 0, None
        run = _longest_run(indices[0]) if inner == 1 else run
    else:
        # Vectors of the result are permuted from two of the rows where they see no more of them.
        lanes = LANES.get(site.library.level, 0) if name == "resize_float32" and inner == 1 else 0
        chunk, wide, spans = _chunks(indices, inner, lanes)
    length = y.dims[row] * inner
    additions = 4 * length
    if not nearest:
        # Elements of many numbers are added in vectors.
        additions = 2 * (3 if inner == 1 else 1) * length * taps[-1]
        additions += math.prod(taps[:-1]) * 2 * x.dims[row] * inner
    weights = np.concatenate([part.reshape(-1) for _, part in reads])
    reals, bits = _arithmetic(site, name, len(tables))
    return NativeCall(
        name,
        (
            *(Tensor(0), site.result(), np.array(entries, np.int64)),
            np.concatenate([part.reshape(-1) for part, _ in reads]).astype(np.int32),
            None if nearest else weights.astype(reals),
            spans,
            *(len(entries), inner, chunk, wide, *run, bits),
        ),
        items=items,
        item_ns=rows_ns(additions, rows=1),
        restrided=partial(_call, site, name, tables),
    )


def _arithmetic(site: Site, name: str, axes: int) -> tuple[str, int]:
    """The type of weights and sums, and the bits behind the point of sums over ``axes``."""
    reals = _REALS_OF_CODES if site.node.op.name == "IntegerResize" else _REALS
    bits = site.attr("fraction_bits", 0) * axes if name == _IN_INTEGERS else 0
    return reals.get(str_(site.output().dtype), ""), bits


def _rows(
    tables: dict[int, Table], types: Sequence[TensorType], strides: Sequence[tuple[int, ...]]
) -> tuple[list[int], int]:
    """The axes of input and result that matter, the outermost first in memory, up to that of the
    rows, and the length of a row's elements. Raises ``UnsupportedError``."""
    (_, y), (x_strides, y_strides) = types, strides
    axes = [axis for axis in range(len(y.dims)) if axis in tables or y.dims[axis] > 1]
    axes.sort(key=lambda axis: -y_strides[axis])
    inner = 1
    while axes[-1] not in tables:
        axis = axes.pop()
        if not x_strides[axis] == y_strides[axis] == inner:
            raise UnsupportedError
        inner *= y.dims[axis]
    row = axes[-1]
    if any(t.dims[row] > 1 and own[row] != inner for t, own in zip(types, strides, strict=True)):
        raise UnsupportedError
    return axes, inner


def _read(table: Table | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices and weights [taps, count] along an axis, which may be one that is not resized."""
    if table is None:
        return np.arange(count)[None], np.ones((1, count))
    return table.indices, table.weights


def _doubles(table: Table) -> bool:
    """Whether each element is repeated twice."""
    return np.array_equal(table.indices[0], np.repeat(np.arange(table.size), 2))


def _longest_run(indices: np.ndarray) -> tuple[int, int]:
    """The first and the number of the most elements in a row that follow one another."""
    ends = np.flatnonzero(np.diff(indices) != 1) + 1
    bounds = np.concatenate([[0], ends, [len(indices)]])
    i = int(np.diff(bounds).argmax())
    return int(bounds[i]), int(bounds[i + 1] - bounds[i])


def _chunks(indices: np.ndarray, inner: int, lanes: int) -> tuple[int, int, np.ndarray]:
    """The elements of a row that are computed at once, each ``inner`` numbers, how many of these
    are, and the first and the last + 1 that each chunk reads [chunks, 2]: ``lanes``, if not 0,
    where each reads at most twice as many."""
    low, high, wide = indices.min(0), indices.max(0) + 1, min(inner, _WIDEST)
    # Buffers of fixed size hold what a chunk reads, and its sums; an axis that shrinks reads more
    # than it writes.
    most = min(_CHUNK, _TOGETHER // wide)
    sizes = [(most >> i, _SPAN // wide) for i in range(most.bit_length() - 1)]
    sizes = [*[(lanes, 2 * lanes)] * (lanes > 0), *sizes, (1, _SPAN)]
    for chunk, room in sizes:
        starts = np.arange(0, len(low), chunk)
        spans = np.stack([np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)], 1)
        longest = (spans[:, 1] - spans[:, 0]).max()
        if longest <= room:
            return chunk, min(wide, int(_SPAN // longest)), spans.astype(np.int32)
    raise UnsupportedError
