"""Tiles of elementwise programs: the dims of a result, merged where its operands allow, how many
elements are computed at a time, and how operands are loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from penstock.backends.native.kernel import UnsupportedError
from penstock.core.traced import TRACED, computed
from penstock.ir.layout import packed_strides

# As in c/core/elementwise.c.
REGISTER_BYTES, MOST_RANK = 2048, 8
DIRECT, GATHERED, ONCE = range(3)
"""how operands are loaded into registers: as they are in memory, by strides, once for all tiles"""

# Least row size, in bytes per instruction plus one, for which tiles end at row ends, so that
# operands are read in place instead of gathered from parts of several rows.
_LEAST_ROW = 256
_MOST_STRIDED = 2048  # most elements of a result with non-contiguous operands


def dense_steps(dims: Sequence[int]) -> list[int]:
    """Return contiguous (row-major) strides, in elements."""
    strides = packed_strides if TRACED.isdisjoint(map(type, dims)) else packed_strides.__wrapped__
    return list(strides(tuple(dims), 1))


def merged_dims(
    dims: Sequence[int], operands: Sequence[Sequence[int]], result: Sequence[int]
) -> tuple[list[int], list[list[int]]]:
    """Return ``dims`` in memory order, merged where the strides of all ``operands`` allow, and the
    strides of each operand along them. Raises ``UnsupportedError`` unless ``result``, the strides
    of what is written, are contiguous.
    """
    axes = [axis for axis in range(len(dims)) if dims[axis] != 1]
    axes.sort(key=lambda axis: -result[axis])
    ordered = [dims[axis] for axis in axes]
    # Programs write a dense result, without strides.
    if [result[axis] for axis in axes] != dense_steps(ordered):
        raise UnsupportedError
    lengths: list[int] = []
    columns: list[tuple[int, ...]] = []
    for axis, dim in zip(axes, ordered, strict=True):
        column = tuple([row[axis] for row in operands])
        if lengths and columns[-1] == tuple([step * dim for step in column]):
            lengths[-1] *= dim
            columns[-1] = column
        else:
            lengths.append(dim)
            columns.append(column)
    if not lengths:
        lengths, columns = [1], [(0,) * len(operands)]
    if len(lengths) > MOST_RANK:
        raise UnsupportedError
    return lengths, [[column[k] for column in columns] for k in range(len(operands))]


def check_strides(steps: Sequence[Sequence[int]], size: int) -> None:
    """Raise ``UnsupportedError`` where blocked copies are faster than strided reads."""
    if size > _MOST_STRIDED and any(own[-1] > 1 for own in steps):
        raise UnsupportedError


def tiles_of(
    dims: Sequence[int], strides: Sequence[Sequence[int]], most: int, instructions: int
) -> tuple[int, list[int], int, int]:
    """As ``_tile``, then the elements of a row if tiles end with rows, else 0; and the tiles."""
    tile, modes = _tile(dims, strides, most)
    row, size = dims[-1], math.prod(dims)
    pairs = list(zip(modes, strides, strict=True))
    least = 0 if row > most else 1  # parts of a row share copies of per-row operands
    in_place = any(mode == GATHERED and least <= own[-1] <= 1 for mode, own in pairs)
    if not in_place or row * (REGISTER_BYTES // most) < _LEAST_ROW * (1 + instructions):
        return tile, modes, 0, -(-size // tile)
    parts = -(-row // most)
    return -(-row // parts), modes_of_rows(dims, strides), row, size // row * parts


def modes_of_rows(dims: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return how to load each operand into a register where tiles end with rows."""
    dense = dense_steps(dims)
    return [DIRECT if list(own) == dense else GATHERED if any(own) else ONCE for own in strides]


def with_rows(
    dims: list[int], strides: Sequence[list[int]], row: int
) -> tuple[list[int], list[list[int]]]:
    """Return ``dims`` and ``strides`` with ``row`` as the last dim, unless rows can stay merged."""
    if dims[-1] == row or (len(dims) == 1 and dims[0] % row == 0):
        return dims, list(strides)
    if len(dims) == MOST_RANK or dims[-1] % row:
        raise UnsupportedError
    apart = [[*own[:-1], own[-1] * row, own[-1]] for own in strides]
    return [*dims[:-1], dims[-1] // row, row], apart


def _tile(
    dims: Sequence[int], strides: Sequence[Sequence[int]], most: int
) -> tuple[int, list[int]]:
    """Return the elements of a tile, and the load mode of each operand. Operands that repeat within
    a tile are equal for all tiles."""
    own = dense_steps(dims)
    periods = []
    for steps in strides:
        outer = 0
        while outer < len(steps) and steps[outer] == 0:
            outer += 1
        dense = list(steps[outer:]) == own[outer:]
        periods.append(math.prod(dims[outer:]) if dense else 0)
    size = math.prod(dims)
    tile = most
    lcm = math.lcm if TRACED.isdisjoint(map(type, periods)) else partial(computed, math.lcm)
    common = 1
    for period in periods:
        if 0 < period <= most and period < size:
            common = lcm(common, period)
    if 1 < common <= most:
        tile = most // common * common
    modes = []
    for period in periods:
        if period == size and size > 1:
            modes.append(DIRECT)
        else:
            modes.append(ONCE if period and tile % period == 0 else GATHERED)
    return tile, modes
