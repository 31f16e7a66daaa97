"""Weights as codes: of 8 bits for each channel, or of 8 and 4 bits in blocks."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from penstock.core.records import NamedTuple
from penstock.quantizing.array_store import ArrayStore
from penstock.quantizing.layers import BLOCK, LayerType, QuantizableLayer
from penstock.quantizing.rounding import Ends, learned_codes

_AT_ONCE = 1 << 18  # elements for which scales are tried at a time
_TRIED = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of the largest weight that scales may end at


class StoredCodes(NamedTuple):
    """Weights as codes, and their scales: int8 with a scale for each channel, or blocks as
    MatMulNBits takes them. ``zeros``: the codes of 0 by channel; None if they are 0."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class CodeStore:
    """Codes of weights by keys, in a temporary file: only those of a candidate are in memory."""

    def __init__(self) -> None:
        self._arrays = ArrayStore()
        self._place: dict[Hashable, int] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._place

    def __setitem__(self, key: Hashable, codes: StoredCodes) -> None:
        self._place[key] = len(self._arrays)
        held = {"codes": codes.codes, "scales": codes.scales, "zeros": codes.zeros}
        self._arrays.append({name: array for name, array in held.items() if array is not None})

    def __getitem__(self, key: Hashable) -> StoredCodes:
        return StoredCodes(**self._arrays[self._place[key]])


def channel_codes(weights: np.ndarray, axis: int, shifted: bool = False) -> StoredCodes:
    """Weights as int8 with one scale for each index of ``axis``: between -127 and 127, or
    ``shifted`` so that the range of each channel has all 256 codes. Of a few scales that with the
    least squared error is taken."""
    moved = np.moveaxis(weights, axis, 0)
    rows = moved.reshape(len(moved), -1)
    ends = _ends(rows, shifted)
    scales = _least_error(rows, ends)
    codes = np.empty(rows.shape, np.int8)
    for part in _parts(rows):
        numbers, own = rows[part] / scales[part, None], _ends_of(part, ends)
        np.clip(np.rint(numbers, out=numbers), *own, out=numbers)
        codes[part] = numbers - own[0] - 128 if shifted else numbers
    return _channels(codes.reshape(moved.shape), axis, scales, ends, shifted)


def _channels(
    codes: np.ndarray, axis: int, scales: np.ndarray, ends: Ends, shifted: bool
) -> StoredCodes:
    """The codes with the axis of scales in its place, instead of in front."""
    zeros = (-128 - ends[0]).reshape(-1).astype(np.int8) if shifted else None
    return StoredCodes(np.ascontiguousarray(np.moveaxis(codes, 0, axis)), scales, zeros)


def _parts(rows: np.ndarray) -> list[slice]:
    """Parts of the rows: intermediate results have several times the memory of these."""
    step = max(_AT_ONCE // max(rows[:1].size, 1), 1)
    return [slice(i, i + step) for i in range(0, len(rows), step)]


def _ends_of(part: slice, ends: Ends) -> Ends:
    first, last = (end[part] if end.ndim > 1 else end for end in ends)
    return first, last


def _ends(rows: np.ndarray, shifted: bool) -> Ends:
    """The least and the largest multiple of its scale that codes of a row have: symmetric, or those
    that divide the range of the row and 0 into 255 steps."""
    if not shifted:
        return _symmetric(127)
    low = np.minimum(rows.min(axis=-1, keepdims=True), 0).astype(np.float64)
    span = np.maximum(rows.max(axis=-1, keepdims=True), 0) - low
    least = np.rint(255 * low / np.where(span > 0, span, 1)).astype(np.float32)
    return least, least + np.float32(255)


def _symmetric(most: int) -> Ends:
    """As many codes below 0 as above it, for all rows."""
    return np.array([-most], np.float32), np.array([most], np.float32)


def _least_error(rows: np.ndarray, ends: Ends) -> np.ndarray:
    """For each row, the one of a few scales for which codes between ``ends`` have the least
    error."""
    parts = _parts(rows)
    if len(parts) > 1:
        return np.concatenate([_least_error(rows[own], _ends_of(own, ends)) for own in parts])
    low, high = ends
    top = np.maximum(
        rows.max(axis=-1, keepdims=True) / np.where(high > 0, high, np.float32(np.inf)),
        rows.min(axis=-1, keepdims=True) / np.where(low < 0, low, np.float32(-np.inf)),
    )
    # Rows of zeros and of subnormal numbers, whose quotients may not be finite.
    top = np.where(top > np.float32(1e-30), top, np.float32(1))
    best, least = top, np.full(top.shape, np.inf, np.float32)
    # A scale that leaves out the largest weights has smaller steps for all others.
    for share in _TRIED:
        scale = top * np.float32(share)
        codes = np.rint(rows / scale).clip(low, high)
        # Masks have the largest number of float32 in them.
        with np.errstate(over="ignore"):
            error = np.square(codes * scale - rows).sum(axis=-1, keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best[..., 0].astype(np.float32)


def bias_correction(
    weights: np.ndarray, axis: int, groups: int, means: np.ndarray
) -> np.ndarray | None:
    """Return the bias correction for quantized weights, for each index of ``axis``: the product of
    the means of the input, one for each channel, with the errors of the weights (Nagel et al. 2019,
    "Data-free quantization"). None if sizes do not fit."""
    codes, scales, _ = channel_codes(weights, axis)
    rows = np.moveaxis(weights, axis, 0)
    errors = rows - np.moveaxis(codes, axis, 0) * scales.reshape(-1, *[1] * (weights.ndim - 1))
    sums = errors.reshape(*errors.shape[:2], -1).sum(axis=-1)
    count, inner = sums.shape
    if means.size != inner * groups or count % groups:
        return None
    by_group = sums.reshape(groups, count // groups, inner)
    result: np.ndarray = np.einsum("goi,gi->go", by_group, means.reshape(groups, inner))
    return result.reshape(-1).astype(np.float32)


def block_codes(rows: np.ndarray, bits: int) -> StoredCodes:
    """Quantize weights [columns, inner] to unsigned codes of ``bits`` bits, with a scale for each
    ``BLOCK`` of the inner dim. The middle code represents 0."""
    columns, inner = rows.shape
    blocks = rows.reshape(columns, inner // BLOCK, BLOCK)
    # As many codes on either side of the middle: zero points would be one more array to read.
    half = 1 << (bits - 1)
    scales = _least_error(blocks, _symmetric(half - 1))
    codes = np.empty(blocks.shape, np.uint8)
    for part in _parts(blocks):
        numbers = np.rint(blocks[part] / scales[part][..., None])
        codes[part] = numbers.clip(1 - half, half - 1) + half
    return StoredCodes(packed_blocks(codes, bits), scales)


def packed_blocks(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [columns, blocks, BLOCK] in bytes, the first in the lowest bits."""
    if bits == 8:
        return codes
    packed: np.ndarray = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def learned(
    layer: QuantizableLayer, type_: LayerType, gram: np.ndarray, shifted: bool = False
) -> StoredCodes:
    """The codes of a layer's weights as ``weights8``, which may be ``shifted``, or in blocks, with
    the scales that the nearest codes have, and rounded by the Gram matrix of its inputs [groups,
    inner, inner]."""
    weights, axis = layer.weights, layer.axis
    moved = np.moveaxis(weights, axis, 0)
    rows = moved.reshape(len(moved), -1)
    by_group = (len(gram), len(rows) // len(gram), rows.shape[1])
    if type_ == "weights8":
        ends = _ends(rows, shifted)
        scales = _least_error(rows, ends)
        steps = np.broadcast_to(scales[:, None], rows.shape).reshape(by_group)
        own = [np.broadcast_to(end, (len(rows), 1)).reshape(*by_group[:2], 1) for end in ends]
        codes = learned_codes(rows.reshape(by_group), steps, gram, (own[0], own[1]))
        codes = (codes.reshape(rows.shape) - (ends[0] + 128 if shifted else 0)).astype(np.int8)
        return _channels(codes.reshape(moved.shape), axis, scales, ends, shifted)
    bits = int(type_.removeprefix("blocks"))
    half = 1 << (bits - 1)
    ends = _symmetric(half - 1)
    scales = _least_error(rows.reshape(len(rows), -1, BLOCK), ends)
    steps = np.repeat(scales, BLOCK, axis=1).reshape(by_group)
    codes = learned_codes(rows.reshape(by_group), steps, gram, ends) + half
    return StoredCodes(
        packed_blocks(codes.reshape(*scales.shape, BLOCK).astype(np.uint8), bits), scales
    )
