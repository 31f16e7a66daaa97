"""Diagonals and bands of matrices, in batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Kernel, Types
from penstock.ops.common.shape_rules import same_type
from penstock.ops.registry import TENSORFLOW, operator
from penstock.ops.tensorflow.arrays import dtype_only
from penstock.types import ShapeError


def _scalar(x: np.ndarray) -> int:
    if x.size != 1:
        raise ShapeError(f"one number is needed, not shape {x.shape}")
    return int(x.reshape(())[()])


class _Band:
    """The diagonals from ``low`` to ``high`` of matrices, 0 being the main one and positive ones
    above it, as rows of a tensor: the highest first, each of the length of the longest.

    ``align`` says, for those above and those below the main one, at which end of its row a shorter
    diagonal stands.
    """

    def __init__(self, k: np.ndarray, align: str) -> None:
        ends = k.reshape(-1).tolist()
        if len(ends) not in (1, 2) or ends[0] > ends[-1]:
            raise ShapeError(f"{ends} are no diagonals, from the lowest to the highest")
        self.low, self.high = ends[0], ends[-1]
        self.above, _, self.below = align.partition("_")

    @property
    def count(self) -> int:
        return self.high - self.low + 1

    def longest(self, rows: int, columns: int) -> int:
        return min(rows + min(self.high, 0), columns - max(self.low, 0))

    def places(self, rows: int, columns: int) -> Iterator[tuple[int, int, slice]]:
        """Of each diagonal its number, its row in the tensor, and which part of that it fills."""
        longest = self.longest(rows, columns)
        for row, d in enumerate(range(self.high, self.low - 1, -1)):
            length = min(rows + min(d, 0), columns - max(d, 0))
            if length < 0:
                raise ShapeError(f"matrices of {rows} x {columns} have no diagonal {d}")
            right = (self.above if d > 0 else self.below) == "RIGHT"
            first = longest - length if right else 0
            yield d, row, slice(first, first + length)


def _cells(d: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the cells of diagonal ``d``."""
    steps = np.arange(length)
    return steps - min(d, 0), steps + max(d, 0)


@operator("MatrixDiagV3", domain=TENSORFLOW, infer=dtype_only())
def matrix_diag(node: Node, types: Types) -> Kernel:
    align = node.attrs.get("align", "RIGHT_LEFT")

    def function(
        x: np.ndarray, k: np.ndarray, rows: np.ndarray, columns: np.ndarray, padding: np.ndarray
    ) -> np.ndarray:
        band = _Band(k, align)
        if x.ndim < 1 or (band.count > 1 and (x.ndim < 2 or x.shape[-2] != band.count)):
            raise ShapeError(f"shape {x.shape} has no {band.count} diagonals")
        least = x.shape[-1] - min(band.high, 0), x.shape[-1] + max(band.low, 0)
        height, width = _scalar(rows), _scalar(columns)
        if height == width == -1:
            height = width = max(least)
        height = least[0] if height == -1 else height
        width = least[1] if width == -1 else width
        if band.longest(height, width) != x.shape[-1]:
            raise ShapeError(f"diagonals of {x.shape[-1]} do not fit {height} x {width}")
        batch = x.shape[:-1] if band.count == 1 else x.shape[:-2]
        if band.count == 1 and k.size == 2 and x.ndim > 1 and x.shape[-2] == 1:
            batch = x.shape[:-2]  # a band of one diagonal, which has its dim
        diagonals = x.reshape(*batch, band.count, x.shape[-1])
        out = np.full((*batch, height, width), padding.reshape(())[()], x.dtype)
        for d, row, part in band.places(height, width):
            out[..., *_cells(d, part.stop - part.start)] = diagonals[..., row, part]
        return out

    return Kernel(function)


@operator("MatrixDiag", domain=TENSORFLOW, infer=dtype_only())
def matrix_diag_1(node: Node, types: Types) -> Kernel:
    def function(x: np.ndarray) -> np.ndarray:
        if x.ndim < 1:
            raise ShapeError("a scalar is no diagonal")
        out = np.zeros((*x.shape, x.shape[-1]), x.dtype)
        places = np.arange(x.shape[-1])
        out[..., places, places] = x
        return out

    return Kernel(function)


@operator("MatrixSetDiagV3", domain=TENSORFLOW, infer=same_type)
def matrix_set_diag(node: Node, types: Types) -> Kernel:
    align = node.attrs.get("align", "RIGHT_LEFT")

    def function(x: np.ndarray, diagonal: np.ndarray, k: np.ndarray) -> np.ndarray:
        band = _Band(k, align)
        _check_matrix(x)
        out = x.copy()
        longest = band.longest(*x.shape[-2:])
        diagonals = diagonal.reshape(*x.shape[:-2], band.count, longest)
        for d, row, part in band.places(*x.shape[-2:]):
            out[..., *_cells(d, part.stop - part.start)] = diagonals[..., row, part]
        return out

    return Kernel(function)


@operator("MatrixDiagPartV3", domain=TENSORFLOW, infer=dtype_only())
def matrix_diag_part(node: Node, types: Types) -> Kernel:
    align = node.attrs.get("align", "RIGHT_LEFT")

    def function(x: np.ndarray, k: np.ndarray, padding: np.ndarray) -> np.ndarray:
        band = _Band(k, align)
        _check_matrix(x)
        shape = (*x.shape[:-2], band.count, band.longest(*x.shape[-2:]))
        out = np.full(shape, padding.reshape(())[()], x.dtype)
        for d, row, part in band.places(*x.shape[-2:]):
            out[..., row, part] = x[..., *_cells(d, part.stop - part.start)]
        return out if band.count > 1 else out[..., 0, :]

    return Kernel(function)


def _check_matrix(x: np.ndarray) -> None:
    if x.ndim < 2:
        raise ShapeError(f"matrices have two dims or more, not shape {x.shape}")


@operator("MatrixBandPart", domain=TENSORFLOW, infer=same_type)
def matrix_band_part(node: Node, types: Types) -> Kernel:
    """What is at most so many diagonals below and above the main one; of negative numbers, all."""

    def function(x: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
        _check_matrix(x)
        above = np.arange(x.shape[-1]) - np.arange(x.shape[-2])[:, np.newaxis]
        low, high = _scalar(lower), _scalar(upper)
        kept = ((low < 0) | (-above <= low)) & ((high < 0) | (above <= high))
        return np.where(kept, x, np.zeros((), x.dtype))

    return Kernel(function)
