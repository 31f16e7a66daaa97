"""Diagonals and bands of matrices, in batches, and diagonals of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.types import ShapeError
from penstock.host.current_run import reserve
from penstock.ops.common.shape_rules import check_shape, same_type
from penstock.ops.tensorflow.common import array_operator, integer, sized


class _Band:
    """The diagonals from ``low`` to ``high`` of matrices (0: main diagonal, positive: above it) as
    rows of a tensor, the highest first, padded to the length of the longest.

    ``align`` is the end of the row at which shorter diagonals are placed, for those above and those
    below the main diagonal.
    """

    def __init__(self, k: np.ndarray, align: str) -> None:
        ends = k.reshape(-1).tolist()
        if len(ends) not in (1, 2) or ends[0] > ends[-1]:
            raise ShapeError(f"k must be one diagonal, or the lowest and the highest, not {ends}")
        self.low, self.high = ends[0], ends[-1]
        self.count = self.high - self.low + 1
        self.above, _, self.below = align.partition("_")

    def longest(self, rows: int, columns: int) -> int:
        return min(rows + min(self.high, 0), columns - max(self.low, 0))

    def places(
        self, rows: int, columns: int
    ) -> Iterator[tuple[tuple[int, slice], tuple[np.ndarray, np.ndarray]]]:
        """Yield for each diagonal its row and slice in the tensor, and its indices in a matrix."""
        longest = self.longest(rows, columns)
        for row, d in enumerate(range(self.high, self.low - 1, -1)):
            length = min(rows + min(d, 0), columns - max(d, 0))
            if length < 0:
                raise ShapeError(f"diagonal {d} is out of range for matrices of {rows} x {columns}")
            right = (self.above if d > 0 else self.below) == "RIGHT"
            first = longest - length if right else 0
            steps = np.arange(length)
            yield (row, slice(first, first + length)), (steps - min(d, 0), steps + max(d, 0))


def _diag_dims(
    x: Sequence[int], k: np.ndarray, rows: np.ndarray, columns: np.ndarray, padding: np.ndarray
) -> tuple[int, ...]:
    band = _Band(k, "")
    if not x or (band.count > 1 and (len(x) < 2 or x[-2] != band.count)):
        raise ShapeError(
            f"the input {tuple(x)} must be [..., {band.count}, length], a row per diagonal"
        )
    least = x[-1] - min(band.high, 0), x[-1] + max(band.low, 0)
    height, width = integer(rows, "num_rows"), integer(columns, "num_cols")
    # As in TensorFlow, the matrix is square if neither dim is given; a single missing dim is the
    # smallest possible.
    if height == width == -1:
        height = width = max(least)
    height = least[0] if height == -1 else height
    width = least[1] if width == -1 else width
    if min(height, width) < 0 or band.longest(height, width) != x[-1]:
        raise ShapeError(f"diagonals of length {x[-1]} do not match matrices of {height} x {width}")
    # A band of one diagonal has its own dim if k has two entries.
    banded = band.count > 1 or (k.size == 2 and len(x) > 1 and x[-2] == 1)
    return (*(x[:-2] if banded else x[:-1]), height, width)


@array_operator("MatrixDiagV3", infer=sized(_diag_dims, 1, 2, 3))
def matrix_diag(
    x: np.ndarray,
    k: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    padding: np.ndarray,
    *,
    align: str = "RIGHT_LEFT",
) -> np.ndarray:
    band = _Band(k, align)
    *batch, height, width = _diag_dims(x.shape, k, rows, columns, padding)
    diagonals = x.reshape(*batch, band.count, x.shape[-1])
    out = np.full((*batch, height, width), padding.reshape(())[()], x.dtype)
    for place, cells in band.places(height, width):
        out[..., *cells] = diagonals[..., *place]
    return out


@array_operator("MatrixDiag", infer=sized(lambda x: (*x, *x[-1:])))
def matrix_diag_1(x: np.ndarray) -> np.ndarray:
    main, any_size = np.array(0), np.array(-1)
    return matrix_diag(x, main, any_size, any_size, np.zeros((), x.dtype))


@array_operator("MatrixSetDiagV3", infer=same_type)
def matrix_set_diag(
    x: np.ndarray, diagonal: np.ndarray, k: np.ndarray, *, align: str = "RIGHT_LEFT"
) -> np.ndarray:
    band = _Band(k, align)
    rows, columns = _matrix_dims(x.shape)
    longest = band.longest(rows, columns)
    wanted = (*x.shape[:-2], *([band.count] if band.count > 1 else []), longest)
    check_shape("the diagonal", diagonal.shape, wanted)
    out = x.copy()
    diagonals = diagonal.reshape(*x.shape[:-2], band.count, longest)
    for place, cells in band.places(rows, columns):
        out[..., *cells] = diagonals[..., *place]
    return out


def _part_dims(x: Sequence[int], k: np.ndarray, padding: np.ndarray) -> tuple[int, ...]:
    band, (rows, columns) = _Band(k, ""), _matrix_dims(x)
    longest = band.longest(rows, columns)
    if longest < 0:
        raise ShapeError(f"diagonal {band.high} is out of range for matrices of {rows} x {columns}")
    return (*x[:-2], *([band.count] if band.count > 1 else []), longest)


@array_operator("MatrixDiagPartV3", infer=sized(_part_dims, 1))
def matrix_diag_part(
    x: np.ndarray, k: np.ndarray, padding: np.ndarray, *, align: str = "RIGHT_LEFT"
) -> np.ndarray:
    band = _Band(k, align)
    dims = _part_dims(x.shape, k, padding)
    out = np.full((*x.shape[:-2], band.count, dims[-1]), padding.reshape(())[()], x.dtype)
    for place, cells in band.places(*x.shape[-2:]):
        out[..., *place] = x[..., *cells]
    return out.reshape(dims)


def _matrix_dims(x: Sequence[int]) -> tuple[int, int]:
    if len(x) < 2:
        raise ShapeError(f"the input must have rank 2 or more, but has shape {tuple(x)}")
    return x[-2], x[-1]


@array_operator("MatrixBandPart", infer=same_type)
def matrix_band_part(x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Keep ``lower`` diagonals below and ``upper`` above the main one (negative: all); zero the
    others."""
    rows, columns = _matrix_dims(x.shape)
    above = np.arange(columns) - np.arange(rows)[:, np.newaxis]
    low, high = integer(lower, "num_lower"), integer(upper, "num_upper")
    kept = ((low < 0) | (-above <= low)) & ((high < 0) | (above <= high))
    return np.where(kept, x, np.zeros((), x.dtype))


def _diagonal_dims(x: Sequence[int]) -> tuple[int, ...]:
    half = len(x) // 2
    if not x or len(x) % 2 or x[:half] != x[half:]:
        raise ShapeError(f"the input must have each dim twice, as in [a, b, a, b], not {tuple(x)}")
    return tuple(x[:half])


@array_operator("Diag", infer=sized(lambda x: (*x, *x)))
def diag(x: np.ndarray) -> np.ndarray:
    """The tensor [a, b, a, b] with element [i, j] of the input at [i, j, i, j], and 0 elsewhere."""
    reserve(x.itemsize * x.size**2)
    out = np.zeros((x.size, x.size), x.dtype)
    np.fill_diagonal(out, x.reshape(-1))
    return out.reshape(x.shape * 2)


@array_operator("DiagPart", infer=sized(_diagonal_dims))
def diag_part(x: np.ndarray) -> np.ndarray:
    dims = _diagonal_dims(x.shape)
    count = math.prod(dims)
    return x.reshape(count, count).diagonal().reshape(dims).copy()
