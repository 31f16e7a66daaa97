"""Sampling at computed positions: RoiAlign, MaxRoiPool, DeformConv."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as choices
from math import prod
from typing import Any

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.specialize import Routine, Tensors, by_shape, static_type
from penstock.ops.common.windows import Window, windows
from penstock.ops.onnx.convolution import BLOCK_BYTES, MIN_BLOCK, conv_shape, kernel_dims
from penstock.ops.registry import operator

MAX_SAMPLES = 2**20
"""the maximum number of samples of one region along one axis"""


def _regions(types: Types, columns: int) -> tuple[TensorType, Dim]:
    """The type of the feature map, and the number of regions; rois have ``columns`` columns."""
    x, rois = rules.tensor(types, 0), rules.tensor(types, 1)
    rules.check_shape("X", x.shape, (None,) * 4)
    rules.check_shape("rois", rois.shape, (None, columns))
    return x, None if rois.shape is None else rois.shape[0]


def _check_finite(regions: np.ndarray) -> None:
    if not np.isfinite(regions).all():
        raise ShapeError("rois must be finite")


def _check_batch(indices: np.ndarray, batch: int) -> list[int]:
    if indices.size and not (indices.min() >= 0 and indices.max() < batch):
        raise ShapeError(f"the batch indices of rois must be in [0, {batch})")
    return [int(i) for i in indices]


def _infer_roi_align(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, count = _regions(types, 4)
    batch = rules.tensor(types, 2).shape
    rules.check_shape("batch_indices", batch, (count,))
    if batch is not None and not isinstance(count, int):
        count = batch[0]
    size = attrs.get("output_height", 1), attrs.get("output_width", 1)
    if min(size) < 1:
        raise ShapeError(f"output_height and output_width {size} must be positive")
    rules.choice(attrs, "mode", "avg", ("avg", "max"))
    channels = None if x.shape is None else x.shape[1]
    return (TensorType(rules.same_dtype(types, (0, 1)), (count, channels, *size)),)


class _Samples:
    """The samples of one region along an axis: ``neighbours`` and weights, one row per bin."""

    def __init__(
        self, start: np.floating, extent: np.floating, bins: int, ratio: int, size: int
    ) -> None:
        step = extent / bins
        # sampling_ratio 0 means ceil(bin size) samples per bin.
        grid = ratio if ratio > 0 else max(int(np.ceil(step)), 0)
        if grid * bins > MAX_SAMPLES:
            raise ShapeError(
                f"a region of extent {extent} needs more than {MAX_SAMPLES} samples: check rois "
                "and sampling_ratio"
            )
        # In the dtype of rois: another rounding could change the number of samples.
        bin_ = np.arange(bins).astype(step.dtype)[:, None]
        inner = np.arange(grid).astype(step.dtype) + step.dtype.type(0.5)
        at = start + bin_ * step + inner * step / max(grid, 1)
        # Samples more than one pixel outside are 0; nearer ones are clamped to the border.
        inside = (at >= -1) & (at <= size)
        at = np.maximum(at, 0)
        low = np.minimum(at, size - 1).astype(np.int64)
        # At the last element, the first neighbour has all the weight.
        fraction = np.where(low >= size - 1, 0, at - low)
        self.samples = low.shape
        high = np.minimum(low + 1, size - 1)
        self.neighbours = ((low, (1 - fraction) * inside), (high, fraction * inside))

    def matrix(self, size: int, dtype: np.dtype) -> np.ndarray:
        """The sum over the samples of each bin, as a matrix [bins, elements]."""
        dense = np.zeros((self.samples[0], size), np.float64)
        rows = np.arange(len(dense))[:, None]
        for elements, weights in self.neighbours:
            # Samples of a bin may share a pixel, which ``+=`` would add only once.
            np.add.at(dense, (rows, elements), weights)
        return dense.astype(dtype)


@operator("RoiAlign", since=16, infer=_infer_roi_align)
@by_shape()
def roi_align(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    shifted = attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    ratio, scale = attrs.get("sampling_ratio", 0), attrs.get("spatial_scale", 1.0)
    highest = attrs.get("mode", "avg") == "max"
    bins = attrs.get("output_height", 1), attrs.get("output_width", 1)

    def samples(region: np.ndarray, sizes: Sequence[int]) -> list[_Samples]:
        """Return the samples along height and width of a region x1, y1, x2, y2."""
        one = region.dtype.type(1)
        corners = region * one.dtype.type(scale) - one.dtype.type(0.5 if shifted else 0)
        _check_finite(corners)
        x1, y1, x2, y2 = corners
        tables = []
        for start, end, count, size in ((y1, y2, bins[0], sizes[0]), (x1, x2, bins[1], sizes[1])):
            # In mode output_half_pixel, regions are at least one pixel high and wide.
            extent = end - start if shifted else np.maximum(end - start, one)
            tables.append(_Samples(start, extent, count, ratio, size))
        return tables

    (n, channels, *sizes), dtype = static_type(inputs, 0)
    if 0 in sizes:
        raise ShapeError(f"the spatial dims of X must not be 0, as in {(n, channels, *sizes)}")

    def into(x: np.ndarray, rois: np.ndarray, batch: np.ndarray, out: np.ndarray) -> None:
        images = _check_batch(batch, n)
        for image, region, result in zip(images, rois, out, strict=True):
            checkpoint()
            rows, columns = samples(region, sizes)
            if highest:
                np.copyto(result, _highest(x[image], rows, columns), casting="unsafe")
                continue
            # A bin without samples yields 0 rather than 0 / 0.
            count = max(rows.samples[1] * columns.samples[1], 1)
            # Bilinear weights are separable, so that two matrix products replace the sum over the
            # samples of each bin.
            across = np.matmul(x[image], columns.matrix(sizes[1], dtype).T)
            np.matmul(rows.matrix(sizes[0], dtype) / dtype.type(count), across, result)

    return Routine(into)


def _highest(image: np.ndarray, rows: _Samples, columns: _Samples) -> Any:
    """The maximum over all weighted neighbours of the samples of each bin, as ONNX defines mode
    max.
    """
    if 0 in rows.samples + columns.samples:
        return 0
    bins, samples = rows.samples
    maxima = np.full((image.shape[0], bins, *columns.samples), -np.inf)
    for i in range(samples):
        checkpoint()
        for (y, weight_y), (x, weight_x) in choices(rows.neighbours, columns.neighbours):
            values = image[:, y[:, i, None, None], x]
            np.maximum(maxima, values * (weight_y[:, i, None, None] * weight_x), out=maxima)
    return maxima.max(axis=3)


def _infer_max_roi_pool(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, count = _regions(types, 5)
    size = attrs["pooled_shape"]
    if len(size) != 2 or min(size) < 1:
        raise ShapeError(f"pooled_shape {list(size)} must be two positive ints")
    channels = None if x.shape is None else x.shape[1]
    return (TensorType(rules.same_dtype(types, (0, 1)), (count, channels, *size)),)


def _bins(start: float, end: float, count: int, size: int) -> list[tuple[int, int]]:
    """The slices of ``count`` bins from pixel ``start`` to ``end`` inclusive."""
    extent = np.float32(max(end - start + 1, 1)) / np.float32(count)
    edges = np.arange(count + 1, dtype=np.float32) * extent
    lows = np.clip(np.floor(edges[:-1]) + start, 0, size)
    highs = np.clip(np.ceil(edges[1:]) + start, 0, size)
    return [(int(low), int(high)) for low, high in zip(lows, highs, strict=True)]


@operator("MaxRoiPool", infer=_infer_max_roi_pool)
@by_shape(widen=False)
def max_roi_pool(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    scale = np.float32(node.attrs.get("spatial_scale", 1.0))
    bins = node.attrs["pooled_shape"]
    x = rules.tensor(inputs, 0)
    n, _, height, width = x.dims

    def into(x: np.ndarray, rois: np.ndarray, out: np.ndarray) -> None:
        scaled = rois[:, 1:] * scale
        _check_finite(scaled)
        images = _check_batch(rois[:, 0], n)
        # Halves are rounded away from zero.
        corners = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).tolist()
        out.fill(0)  # the value of an empty bin
        for image, (x1, y1, x2, y2), result in zip(images, corners, out, strict=True):
            checkpoint()
            columns = _bins(x1, x2, bins[1], width)
            for i, (top, bottom) in enumerate(_bins(y1, y2, bins[0], height)):
                if bottom <= top:
                    continue
                row = x[image, :, top:bottom].max(axis=1)
                for j, (left, right) in enumerate(columns):
                    if left < right:
                        row[:, left:right].max(axis=1, out=result[:, i, j])

    return Routine(into)


def _infer_deform_conv(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, w, offset, mask = (rules.tensor(types, i) for i in (0, 1, 2, 4))
    dtype = rules.same_dtype(types, range(len(types)))
    shape = conv_shape(x.shape, w.shape, attrs)
    groups = attrs.get("offset_group", 1)
    if groups < 1:
        raise ShapeError(f"offset_group must be positive, not {groups}")
    if shape is None:
        return (TensorType(dtype, offset.shape and (offset.shape[0], None, *offset.shape[2:])),)
    rules.check_shape("bias", rules.tensor(types, 3).shape, (shape[1],))
    if x.shape is not None and isinstance(x.shape[1], int) and x.shape[1] % groups:
        raise ShapeError(f"the {x.shape[1]} channels must be divisible by offset_group={groups}")
    kernel = kernel_dims(attrs, w.shape, len(shape) - 2)
    for name, type_, per_tap in (("offset", offset, len(shape) - 2), ("mask", mask, 1)):
        rows = rules.dim_product((groups, per_tap, *kernel))
        rules.check_shape(name, type_.shape, (shape[0], rows, *shape[2:]))
    return (TensorType(dtype, shape),)


def _window_positions(axes: Sequence[Window], dtype: np.dtype) -> np.ndarray:
    """Positions of the window elements before offsets are added: [axes, kernel elements,
    windows].
    """
    rank, kernel = len(axes), [axis.kernel for axis in axes]
    counts = [axis.count for axis in axes]
    positions = np.empty((rank, *kernel, *counts), dtype)
    for i, axis in enumerate(axes):
        first = np.arange(axis.count) * axis.stride - axis.begin
        at = np.add.outer(np.arange(axis.kernel) * axis.dilation, first)
        shape = [1] * (2 * rank)
        shape[i], shape[rank + i] = at.shape
        positions[i] = at.reshape(shape)
    return positions.reshape(rank, prod(kernel), prod(counts))


def _interpolate(
    image: np.ndarray, at: np.ndarray, sizes: Sequence[int], pitch: Sequence[int]
) -> np.ndarray:
    """Interpolate an image [channels, elements] linearly at positions [axes, ...]; 0 outside."""
    low = np.floor(at)
    fraction = at - low
    total: Any = 0
    for corner in choices((0, 1), repeat=len(sizes)):
        index: Any = 0
        weight: Any = 1
        for i, bit in enumerate(corner):
            place = low[i] + bit
            inside = (place >= 0) & (place < sizes[i])
            index = index + np.where(inside, place, 0).astype(np.int64) * pitch[i]
            # Neighbours outside are clamped to the image, with weight 0.
            weight = weight * (fraction[i] if bit else 1 - fraction[i]) * inside
        total = total + image[:, index] * weight
    return np.asarray(total)


@operator("DeformConv", since=19, infer=_infer_deform_conv)
@by_shape(arity=(5, 1), contiguous=True)
def deform_conv(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    group, groups = attrs.get("group", 1), attrs.get("offset_group", 1)
    (n, channels, *sizes), dtype = static_type(inputs, 0)
    filters, depth, *kernel = rules.tensor(inputs, 1).dims
    axes = windows(attrs, kernel, sizes)
    rank, taps = len(axes), prod(kernel)
    counts = [axis.count for axis in axes]
    positions = prod(counts)
    base = _window_positions(axes, dtype)
    pitch = [prod(sizes[i + 1 :]) for i in range(rank)]
    step = max(BLOCK_BYTES // max(channels * taps * dtype.itemsize, 1), MIN_BLOCK)

    def into(x: np.ndarray, *arguments: RunValue) -> None:
        w, offset, bias, mask, y = arguments
        out = y.reshape(n, group, filters // group, positions)
        matrix = w.reshape(group, filters // group, depth * taps)
        offset = offset.reshape(n, groups, taps, rank, positions)
        if mask is not None:
            mask = mask.reshape(n, groups, 1, taps, positions)
        images = x.reshape(n, groups, channels // groups, prod(sizes))
        for i in range(n):
            for start in range(0, positions, step):
                checkpoint()
                block = slice(start, start + step)
                columns = []
                for j in range(groups):
                    at = base[..., block] + offset[i, j, :, :, block].swapaxes(0, 1)
                    seen = _interpolate(images[i, j], at, sizes, pitch)
                    columns.append(seen if mask is None else seen * mask[i, j, ..., block])
                unfolded = np.concatenate(columns).reshape(group, depth * taps, -1)
                np.matmul(matrix, unfolded, out[i, ..., block])
        if bias is not None:
            np.add(y, bias.reshape(-1, *(1,) * rank), y)

    return Routine(into)
