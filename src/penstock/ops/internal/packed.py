"""Rows of several samples, concatenated without those that a mask hides.

The pass ``pack_rows`` creates these operations, which saved plans never contain. A batch of texts
is padded to the longest one, [batch, rows, ...], and a mask hides the rows after the end of each.
Packed, it is one sample of T rows, [1, T, ...], in which the rows of each text are adjacent::

    padded          a b c .    d e . .    f g h i
    packed          a b c d e f g h i

LiveRows computes these rows: ``ranges`` [batch, 3] has the first packed row of each sample, the
number of its packed rows, and their offset; ``rows`` [T] has the flat index of each packed row in
the batch, and ``positions`` [T] its index in the sample. T is rounded up to a multiple of a power
of two, so that few values of T occur: rows after the last range are never read. Its inputs are
guards, which determine the live rows, on which results depend:

- a bias of attention scores, [batch or 1, heads or 1, rows or 1, rows or 1]: a row is live if some
  row sees it. Biases of the same attention have the same number in ``groups``;
- a factor of rows, [batch or 1, rows, ...]: a row is live unless it is multiplied by 0. Its number
  in ``groups`` is ``FACTOR``. If it is ``REPLACED``, a row is live unless all elements are true,
  so that other numbers replace its own;
- an index of rows that are read: flat indices (``INDEX``), or pairs [..., 2] of sample and row
  (``PAIRS``).

With ``first``, the first row of each sample is live. All rows of a sample are live if a live row
sees none of them: its result then depends on the values of the mask; or if a row that a factor
multiplies by 0 is NaN, since all its biases are infinite.

UnpackRows is the inverse of packing, with one number, mostly 0, in the other rows. PackedAttention
is Attention within each sample, with the biases of the padded batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import INT64, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.internal.attention import ATTENTION, attend

LOWEST = -9e3
"""score biases up to this value mask a row: exporters use -10000 or the lowest float"""

FACTOR, INDEX, PAIRS, REPLACED = -1, -2, -3, -4  # special numbers in ``groups``
_LEAST_STEP = 3  # T is a multiple of 8, and of a power of two between T / 32 and T / 16


def _infer_live(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    batch, rows = attrs["batch"], attrs["rows"]
    for i, group in enumerate(attrs["groups"]):
        shape = rules.tensor(types, i).shape
        if group >= 0:
            rules.check_broadcasts("bias", shape, (batch, None, rows, rows))
        elif group in (FACTOR, REPLACED) and shape is not None:
            rules.check_broadcasts("factor", shape[:2], (batch, rows))
        elif group == PAIRS:
            rules.check_shape("pairs", shape and shape[-1:], (2,))
    return TensorType(INT64, (batch, 3)), TensorType(INT64, (None,)), TensorType(INT64, (None,))


def _seen(biases: Sequence[np.ndarray], lowest: float = LOWEST) -> np.ndarray:
    """Return which rows each row of a head sees, from the 4-D biases of one attention: those whose
    biases are all above ``lowest``."""
    seen: np.ndarray = np.ones((1, 1, 1, 1), np.bool_)
    for bias in biases:
        # Negated, so that NaN counts as visible: it makes the scores of its row NaN.
        seen = seen & ~(bias.reshape((1,) * (4 - bias.ndim) + bias.shape) <= lowest)
    return seen


def _compile_live(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    batch, rows, groups, first = attrs["batch"], attrs["rows"], attrs["groups"], attrs["first"]

    def function(*guards: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        live, blind = np.zeros((batch, rows), np.bool_), np.zeros((batch, rows), np.bool_)
        nan = np.zeros(batch, np.bool_)
        for group in sorted({*groups}):
            own = [x for x, of in zip(guards, groups, strict=True) if of == group]
            if group >= 0:
                seen = _seen(own)
                live |= seen.any((1, 2))
                blind |= np.any(~np.any(seen, axis=3), axis=1)
                # Results of a row with infinite biases alone are NaN, and so are those times 0.
                if FACTOR in groups and blind.any():
                    nan |= np.any(~np.any(_seen(own, -np.inf), axis=3), axis=(1, 2))
            elif group in (FACTOR, REPLACED):
                for x in own:
                    live |= ((x != 0) == (group == FACTOR)).any(tuple(range(2, x.ndim)))
            else:
                for x in own:
                    _note_read(live, x if group == PAIRS else np.divmod(x, rows))
        if first:
            live[:, 0] = True
        start, end = live.argmax(1), rows - live[:, ::-1].argmax(1)
        places = np.arange(rows)
        within = (places >= start[:, None]) & (places < end[:, None])
        whole = nan | ~live.any(1) | (blind & within).any(1)
        start[whole], end[whole] = 0, rows
        count = end - start
        before = np.cumsum(count) - count
        total = int(count.sum())
        step = 1 << max(_LEAST_STEP, total.bit_length() - 5)
        positions = np.zeros(-(-total // step) * step, np.int64)
        samples = positions.copy()
        positions[:total] = np.arange(total) - np.repeat(before - start, count)
        samples[:total] = np.repeat(np.arange(batch), count)
        return np.stack((start, count, before), 1), samples * rows + positions, positions

    return Kernel(function)


def _note_read(live: np.ndarray, index: np.ndarray | tuple[np.ndarray, ...]) -> None:
    """Mark rows that are read by index; their reader raises the error for indices out of range."""
    sample, row = index if isinstance(index, tuple) else np.moveaxis(index, -1, 0)
    batch, rows = live.shape
    # Convert negative indices, which count from the end.
    sample, row = np.where(sample < 0, sample + batch, sample), np.where(row < 0, row + rows, row)
    valid = (sample >= 0) & (sample < batch) & (row >= 0) & (row < rows)
    live[sample[valid], row[valid]] = True


LIVE_ROWS = Op("LiveRows", "penstock", 1, 1, _infer_live, _compile_live)


def _infer_unpack(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, dims = rules.tensor(types, 0), tuple(attrs["dims"])
    packed: list[int | None] = [*dims]
    packed[attrs["samples"]], packed[attrs["rows"]] = 1, None
    rules.check_shape("packed rows", x.shape, tuple(packed))
    rules.check_shape("ranges", rules.tensor(types, 1).shape, (dims[attrs["samples"]], 3))
    return (TensorType(x.dtype, dims),)


def _compile_unpack(node: Node, types: Types) -> Kernel:
    dims, axes = tuple(node.attrs["dims"]), (node.attrs["samples"], node.attrs["rows"])

    number = node.attrs.get("number", 0)

    def into(x: np.ndarray, ranges: np.ndarray, out: np.ndarray) -> None:
        out.fill(number)
        # Move the axes of samples and rows to the front; the other axes are few and short.
        to, packed = np.moveaxis(out, axes, (0, 1)), np.moveaxis(x, axes, (0, 1))[0]
        for sample, (start, count, before) in zip(to, ranges.tolist(), strict=True):
            sample[start : start + count] = packed[before : before + count]

    def function(x: np.ndarray, ranges: np.ndarray) -> np.ndarray:
        out = np.empty(dims, x.dtype)
        into(x, ranges, out)
        return out

    return Kernel(function, into)


UNPACK_ROWS = Op("UnpackRows", "penstock", 1, 1, _infer_unpack, _compile_unpack, moves=True)
"""Inputs: packed rows, and ``ranges``. Attributes: ``dims``, the unpacked shape, and its axes
``samples`` and ``rows``, whose packed dims are 1 and T; ``number``, by default 0, which the
other rows hold."""


def _infer_attention(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.check_shape("ranges", rules.tensor(types, 3).shape, (None, 3))
    return ATTENTION.infer(types[:3], attrs, consts)


def _compile_attention(node: Node, types: Types) -> Kernel:
    attrs, keys_last = node.attrs, node.attrs.get("keys_last", 0)

    def function(
        q: np.ndarray, k: np.ndarray, v: np.ndarray, ranges: np.ndarray, *biases: np.ndarray | None
    ) -> np.ndarray:
        y = np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
        wide = [None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape) for x in biases]
        for sample, (start, count, before) in enumerate(ranges.tolist()):
            packed, own = slice(before, before + count), slice(start, start + count)
            keys = k[..., packed] if keys_last else k[..., packed, :]
            cut = [None if x is None else _cut(x, sample, own) for x in wide]
            y[..., packed, :] = attend(attrs, q[..., packed, :], keys, v[..., packed, :], cut)
        return y

    return Kernel(function)


def _cut(bias: np.ndarray, sample: int, rows: slice) -> np.ndarray:
    """Slice a bias [batch or 1, heads or 1, rows or 1, rows or 1] to rows of one sample."""
    own = bias[min(sample, bias.shape[0] - 1)][None]
    own = own if own.shape[2] == 1 else own[:, :, rows]
    return own if own.shape[3] == 1 else own[..., rows]


PACKED_ATTENTION = Op(
    *("PackedAttention", "penstock", 1, 1, _infer_attention, _compile_attention),
    work=ATTENTION.work,
)
"""Attention of packed rows. Inputs: queries, keys and values [1, heads, T, size], ``ranges``, and
biases of the padded batch. The attributes are Attention's."""
