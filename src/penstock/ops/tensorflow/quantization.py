"""Quantization, also such that is undone at once, as in training for integers, and CTC's greedy
decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import Prepared
from penstock.ops.tensorflow.common import array_operator, integer, named_dtype

_OPTIONS: Prepared = {"options": lambda node: dict(node.attrs)}


@array_operator("QuantizeAndDequantize", infer=rules.same_type, prepared=_OPTIONS)
def quantize_and_dequantize(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, *bits: np.ndarray, options: Attrs
) -> np.ndarray:
    """Round to the codes of a symmetric scale that hold the given range, or that of the elements;
    with an axis, of each slice. The fourth input is the number of bits, or an attribute."""
    axis, count = options["axis"], integer(bits[0], "num_bits") if bits else options["num_bits"]
    signed, given = options["signed_input"], options["range_given"]
    if not 1 <= count <= 63 - signed:
        raise ShapeError(f"num_bits {count} is out of range")
    if axis >= x.ndim:
        raise ShapeError(f"axis {axis} is out of range for {x.shape}")
    shape = tuple([-1 if i == axis else 1 for i in range(x.ndim)])
    if not given:
        others = tuple([i for i in range(x.ndim) if i != axis]) if axis >= 0 else None
        # A range without 0 is extended to it: codes must hold 0.
        low, high = x.min(axis=others, initial=0), x.max(axis=others, initial=0)
    wanted = x.shape[axis] if axis >= 0 else 1
    if low.size != wanted or high.size != wanted or (low > high).any():
        raise ShapeError(f"a range of {low.tolist()} to {high.tolist()} does not fit {x.shape}")
    low, high = low.reshape(shape), high.reshape(shape)
    least = x.dtype.type(-(2 ** (count - 1)) + options["narrow_range"] if signed else 0)
    most = x.dtype.type(2 ** (count - signed) - 1)
    # The larger of both scales keeps the range within the codes; a side of 0 has none.
    far = np.finfo(x.dtype).max
    below = np.divide(least, low, out=np.full_like(low, far), where=least * low > 0)
    above = np.divide(most, high, out=np.full_like(high, far), where=most * high > 0)
    by_low = below < above
    scale = np.where(by_low, below, above)
    step = np.divide(np.where(by_low, low, high), np.where(by_low, least, most))
    # A range of the elements' own cuts off none of them.
    if given:
        x = np.clip(x, np.where(by_low, low, least * step), np.where(by_low, most * step, high))
    codes = x * scale
    codes = (
        np.floor(codes + x.dtype.type(0.5))
        if options["round_mode"] == "HALF_UP"
        else np.rint(codes)
    )
    return (codes * step).astype(x.dtype, copy=False)


# Codes of a range.


def _ranges(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, axis: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the range, or those of each slice along the axis, as they broadcast to ``x``."""
    wanted = x.shape[axis] if 0 <= axis < x.ndim else 1
    if not -1 <= axis < x.ndim or low.size != wanted or high.size != wanted:
        raise ShapeError(
            f"ranges {low.tolist()} to {high.tolist()} along axis {axis} do not fit {x.shape}"
        )
    shape = tuple([-1 if i == axis else 1 for i in range(x.ndim)])
    return low.reshape(shape), high.reshape(shape)


def _ends(dtype: np.dtype, options: Attrs) -> tuple[np.float32, np.float32]:
    """The least and the greatest code."""
    info, narrow = np.iinfo(dtype), options["narrow_range"] and options["mode"] == "SCALED"
    return np.float32(info.min + narrow), np.float32(info.max)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Halves away from 0."""
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def _infer_codes(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    ends = TensorType(np.dtype(np.float32), () if attrs["axis"] == -1 else (None,))
    return TensorType(named_dtype(attrs, "T", codes="iu"), rules.tensor(types, 0).shape), ends, ends


@array_operator("QuantizeV2", infer=_infer_codes, prepared=_OPTIONS)
def quantize(
    x: np.ndarray, low: np.ndarray, high: np.ndarray, *, options: Attrs
) -> tuple[np.ndarray, ...]:
    """Codes of a range, which is extended to 0 and to a least width, and that range."""
    axis, mode = options["axis"], options["mode"]
    low, high = _ranges(x, low, high, axis)
    if (low > high).any():
        raise ShapeError(f"the range of {low.tolist()} to {high.tolist()} is empty")
    dtype = named_dtype(options, "T", codes="iu")
    first, last = _ends(dtype, options)
    wide = np.maximum(np.float32(1), np.maximum(np.abs(low), np.abs(high)))
    low = np.minimum(low, np.float32(0))
    least = low + wide * np.float32(options["ensure_minimum_range"])
    high = np.maximum(np.maximum(high, least), np.float32(0))
    if mode == "SCALED":
        far = np.full_like(low, np.finfo(np.float32).max)
        scale = np.minimum(
            np.divide(first, low, out=far.copy(), where=first * low > 0),
            np.divide(last, high, out=far, where=last * high > 0),
        )
        low, high = first / scale, last / scale
        codes = np.clip(x, low, high) * scale
        codes = np.rint(codes) if options["round_mode"] == "HALF_TO_EVEN" else _rounded(codes)
    elif mode == "MIN_FIRST":
        # Rounded once: TensorFlow divides in float64.
        scale = ((last - first) / (high - low).astype(np.float64)).astype(np.float32)
        codes = _rounded(x * scale) - _rounded(low * scale) + first
    else:
        scale = (last - first) / (high - low)
        codes = (np.clip(x, low, high) - low) * scale
        codes = _rounded(codes + first) if first else np.floor(codes + np.float32(0.5))
    shape = () if axis == -1 else (-1,)
    return np.clip(codes, first, last).astype(dtype), low.reshape(shape), high.reshape(shape)


@array_operator("Dequantize", infer=rules.same_shape(FLOAT32), prepared=_OPTIONS)
def dequantize(x: np.ndarray, low: np.ndarray, high: np.ndarray, *, options: Attrs) -> np.ndarray:
    """The numbers of codes of a range, as QuantizeV2 returns them."""
    low, high = _ranges(x, low, high, options["axis"])
    first, last = _ends(x.dtype, options)
    codes = x.astype(np.float32)
    if options["mode"] == "SCALED":
        return codes * (np.maximum(low / first, high / last) if first < 0 else high / last)
    if options["mode"] == "MIN_FIRST":
        scale = (high - low) / (last - first)
        return _rounded(low / scale) * scale + (codes - first) * scale
    return (codes - first) * ((high - low) / (last - first)) + low


def _infer_decoded(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    rules.check_shape("the input", x.shape, (None, None, None))
    scores = TensorType(x.dtype, (x.shape[1] if x.shape else None, 1))
    return TensorType(INT64, (None, 2)), TensorType(INT64, (None,)), TensorType(INT64, (2,)), scores


@array_operator("CTCGreedyDecoder", infer=_infer_decoded)
def ctc_greedy_decoder(
    x: np.ndarray, lengths: np.ndarray, *, merge_repeated: bool, blank_index: int
) -> tuple[np.ndarray, ...]:
    """The best class of each time step, without blanks, as a sparse tensor [batch, most], and the
    negated sum of their scores."""
    if x.ndim != 3 or not x.shape[2] or lengths.shape != x.shape[1:2]:
        raise ShapeError(f"inputs {x.shape} are [time, batch, classes], and need lengths [batch]")
    steps, batch, classes = x.shape
    if not -classes <= blank_index < classes or ((lengths < 0) | (lengths > steps)).any():
        raise ShapeError(f"lengths {lengths.tolist()} or blank {blank_index} do not fit {x.shape}")
    best, blank = x.argmax(2), blank_index % classes
    rows, scores = [], np.zeros((batch, 1), x.dtype)
    for b, length in with_checkpoints(enumerate(lengths.tolist())):
        path = best[:length, b]
        kept = path != blank
        if merge_repeated:
            # A blank between two equal classes keeps both.
            kept[1:] &= path[1:] != path[:-1]
        rows.append(path[kept])
        scores[b] = -x[np.arange(length), b, path].sum()
    sizes = [len(row) for row in rows]
    places = [np.repeat(np.arange(batch), sizes), np.concatenate([*map(np.arange, sizes), []])]
    values = np.concatenate([*rows, np.empty(0, np.int64)])
    dims = np.array([batch, max(sizes, default=0)], np.int64)
    return np.stack(places, 1).astype(np.int64), values.astype(np.int64), dims, scores
