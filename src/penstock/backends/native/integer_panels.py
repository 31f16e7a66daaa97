"""Packing of 8-bit integer matrices into panels (``c/products/integers.h``)."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.layout import line_aligned, new_lines
from penstock.ops.common.constant_cache import ConstantRef, Reordered, reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8

# As in c/products/integers.h.
_PANEL, _QUAD, _TILE, _TILE_BYTES = 32, 4, 16, 64


class IntegerPanels(NamedTuple):
    """Weights in panels, column sums corrected by zero points, and zero points less the uint8
    offset."""

    panels: np.ndarray
    sums: np.ndarray
    zeros: np.ndarray


def integer_panels(
    weights: np.ndarray, zero: np.ndarray, parts: tuple[int, int] | None = None
) -> IntegerPanels:
    """Pack a matrix [k, n] of codes with per-column zero points. ``parts``: the size of the parts
    of k, and the multiple of 4 to which each is zero-padded."""
    k, n = weights.shape
    zeros = zero.astype(INT32)
    signed = weights
    if weights.dtype == UINT8:
        # Subtract 128, as int8, by flipping the highest bit.
        signed, zeros = (weights ^ 128).view(INT8), zeros - 128
    part, size = parts or (k, math.ceil(k / _QUAD) * _QUAD)
    quads, panels = k // part * size // _QUAD, math.ceil(n / _PANEL)
    padded = np.zeros((quads * _QUAD, panels * _PANEL), INT8)
    padded.reshape(k // part, size, -1)[:, :part, :n] = signed.reshape(-1, part, n)
    # Whole tiles are loaded, even if K ends within a tile.
    codes = new_lines((padded.size + _TILE * _PANEL * _QUAD,), INT8)
    codes[padded.size :] = 0
    packed = codes[: padded.size].reshape(panels, quads, _PANEL, _QUAD)
    packed[...] = padded.reshape(quads, _QUAD, panels, _PANEL).transpose(2, 0, 3, 1)
    return IntegerPanels(codes, signed.sum(axis=0, dtype=INT32) - k * zeros, zeros)


def panel_types(k: int, n: int) -> list[TensorType]:
    """Return the types of the results of ``integer_panels``."""
    elements = (math.ceil(k / _QUAD) * math.ceil(n / _PANEL) + _TILE) * _QUAD * _PANEL
    return [TensorType(INT8, (elements,)), *[TensorType(INT32, (n,))] * 2]


def unpacked(
    dims: tuple[int, int],
    size: int,
    dtype: np.dtype,
    flipped: bool,
    packed: np.ndarray,
    *others: np.ndarray,
) -> np.ndarray:
    """Return the matrix of these ``dims`` from panels of one part of ``size``."""
    k, n = dims
    quads, panels = size // _QUAD, math.ceil(n / _PANEL)
    tiles = packed[: quads * panels * _QUAD * _PANEL].reshape(panels, quads, _PANEL, _QUAD)
    codes = tiles.transpose(1, 3, 0, 2).reshape(quads * _QUAD, -1)[:k, :n].view(np.uint8)
    codes = (codes ^ (128 if dtype == UINT8 else 0)).view(dtype)
    return np.ascontiguousarray(codes.T if flipped else codes)


def tiles_of_row(k: int) -> tuple[int, int]:
    """Return the bytes of a row of ``k`` codes padded to whole tiles, and the quads of a tile."""
    tiles = math.ceil(k / _TILE_BYTES)
    deep = math.ceil(k / tiles / _QUAD)
    return tiles * deep * _QUAD, deep


def rows_of_codes(weights: ConstantRef) -> Reordered:
    """Return int8 weights [n, k] as panels for rows of ``tiles_of_row`` bytes."""
    columns, k = weights.shape
    size, _ = tiles_of_row(k)

    def made(matrix: np.ndarray) -> IntegerPanels:
        return integer_panels(matrix.T, np.zeros(columns, INT32), (k, size))

    back = partial(unpacked, (k, columns), size, INT8, True)
    return reordered(("native rows", size), weights, made, back, panel_types(size, columns))


def starts_of_sums(held: Reordered, bias: np.ndarray | int = 0) -> np.ndarray:
    """Return initial accumulators for ``rows_of_codes``, in whole panels: ``bias``, less the excess
    of uint8 rows, which are the codes plus 128."""
    _, sums, _ = held.arrays
    start = np.zeros(-(-sums.size // _PANEL) * _PANEL, INT32)
    start[: sums.size] = bias - 128 * sums
    return line_aligned(start)
