"""GridSample, AffineGrid, NonMaxSuppression and ImageDecoder.

For GridSample with cubic interpolation and border padding, each tap is clamped to the image, as in
PyTorch and ONNX Runtime; ``onnx.reference`` clamps the sampling position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import product as choices
from math import prod
from typing import Any, TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import extra_needed
from penstock.core.types import INT64, STRING, Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.onnx.resize import cubic_weights
from penstock.ops.registry import operator

# Version 16 names the modes after their two-dimensional forms.
_MODES = {mode: mode for mode in ("nearest", "linear", "cubic")}
_CUBIC_A = -0.75


def sampling_modes(attrs: Attrs) -> tuple[str, str]:
    """The interpolation mode and the padding mode."""
    mode = _MODES[rules.choice(attrs, "mode", "linear", _MODES)]
    return mode, rules.choice(attrs, "padding_mode", "zeros", ("zeros", "border", "reflection"))


def _infer_grid_sample(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, grid = rules.tensor(types, 0), rules.tensor(types, 1)
    sampling_modes(attrs)
    if x.shape is None or grid.shape is None:
        return (TensorType(x.dtype),)
    rank = len(x.shape) - 2
    if rank < 1 or len(grid.shape) != rank + 2:
        raise ShapeError(f"X {x.shape} and grid {grid.shape} must have the same rank, at least 3")
    batch = rules.same_dim(x.shape[0], grid.shape[0], "batch sizes of X and grid")
    rules.same_dim(
        grid.shape[-1],
        rank,
        f"the last dim of the grid {grid.shape} and the number of spatial axes of X",
    )
    return (TensorType(x.dtype, (batch, x.shape[1], *grid.shape[1:-1])),)


def _reflected(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Positions mirrored at the borders until they lie between them."""
    extent = high - low
    if extent <= 0:
        return np.full_like(x, low)
    # A full period goes there and back.
    folded = np.mod(x - low, 2 * extent)
    return np.where((x >= low) & (x <= high), x, low + np.minimum(folded, 2 * extent - folded))


_Tap: TypeAlias = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""index, weight (None: 1) and inside flag (None: all inside) of each sampling position"""


class _Sampling:
    """Sampling along one axis: ``taps`` are the indices, weights and inside flags of positions."""

    def __init__(self, size: int, mode: str, padding: str, align_corners: bool) -> None:
        self.size, self.mode, self.padding = size, mode, padding
        self.corners = align_corners
        self.border = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)

    def positions(self, grid: np.ndarray) -> np.ndarray:
        """Convert grid coordinates in [-1, 1] to pixel coordinates."""
        if self.corners:
            x = (grid + 1) / 2 * (self.size - 1)
        else:
            x = ((grid + 1) * self.size - 1) / 2
        if self.mode == "nearest":
            x = np.rint(x)
        low, high = self.border
        # Each cubic tap is clamped separately, as in PyTorch and ONNX Runtime.
        if self.padding == "border" and self.mode != "cubic":
            x = np.where((x < low) | (x > high), np.clip(x, 0, self.size - 1), x)
        elif self.padding == "reflection":
            x = _reflected(x, low, high)
        # Bound the positions to the range of integers; NaN lies outside the image.
        return np.clip(np.where(np.isnan(x), -4, x), -4, self.size + 4)

    def taps(self, grid: np.ndarray) -> Iterator[_Tap]:
        x = self.positions(grid)
        left = x if self.mode == "nearest" else np.floor(x)
        first = 0
        weights: Sequence[np.ndarray | None] = (None,)
        if self.mode == "linear":
            t = x - left
            weights = (1 - t, t)
        elif self.mode == "cubic":
            t = x - left
            first, weights = -1, cubic_weights(t, _CUBIC_A)
        for k, weight in enumerate(weights, first):
            place = left + k
            if self.padding == "reflection":
                place = _reflected(place, *self.border)
            pixel = np.clip(place, 0, self.size - 1).astype(np.intp)
            yield pixel, weight, pixel == place if self.padding == "zeros" else None


_BLOCK = 2**20  # elements that are computed at once


@operator("GridSample", since=16, infer=_infer_grid_sample, strings=True)
@by_shape(widen=lambda node: sampling_modes(node.attrs)[0] != "nearest")
def grid_sample(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    mode, padding = sampling_modes(node.attrs)
    align_corners = bool(node.attrs.get("align_corners", 0))
    dims, dtype = static_type(inputs, 0)
    _, channels, *sizes = dims
    (rows, *others), pixels = rules.tensor(outputs, 0).dims[2:], prod(sizes)
    # Rows of the output per block, so that a run can be cancelled between blocks.
    step = min(rows, 1 + _BLOCK // max(channels * prod(others), 1))
    block = channels * step * prod(others)
    axes = [_Sampling(size, mode, padding, align_corners) for size in sizes]
    wide = dtype if mode == "nearest" or dtype.kind in "fc" else FLOAT64
    if dtype == STRING and mode != "nearest":
        raise ShapeError(f"mode {mode!r} cannot interpolate strings: use mode 'nearest'")
    if not pixels and rows * prod(others):
        raise ShapeError(f"X of shape {dims} has no elements to sample")
    zero: Any = "" if dtype == STRING else 0
    layout = Scratch()
    # The workspace is raw memory, which cannot hold object references.
    fields = None if wide == STRING else [layout.field((block,), wide) for _ in range(2)]

    def sample(image: np.ndarray, grid: np.ndarray, total: np.ndarray, value: RunValue) -> None:
        # Grid coordinates are in the order x, y, z: the last axis first.
        taps = [list(axis.taps(grid[:, -1 - i])) for i, axis in enumerate(axes)]
        for number, corner in enumerate(choices(*taps)):
            index: Any = 0
            weight: Any = None
            inside: Any = None
            for size, (pixel, share, within) in zip(sizes, corner, strict=True):
                index = index * size + pixel
                weight = share if weight is None else weight * share
                if within is not None:
                    inside = within if inside is None else inside & within
            target = value if number else total
            # All indices are in range; to raise for others NumPy would buffer the target.
            np.take(image, index, 1, target, "clip")
            if inside is not None and not inside.all():
                np.copyto(target, zero, where=~inside)
            if weight is not None:
                np.multiply(target, weight.astype(wide.type), target)
            if number:
                np.add(total, value, total)

    def into(x: np.ndarray, grid: np.ndarray, y: np.ndarray, *scratch: np.ndarray) -> None:
        if fields is None:
            total, value = (np.empty(block, wide) for _ in range(2))
        else:
            total, value = (field(scratch[0]) for field in fields)
        for image, where, out in zip(x, grid, y, strict=True):
            flat = image.reshape(channels, pixels).astype(wide, copy=False)
            for begin in range(0, rows, max(step, 1)):
                checkpoint()
                points = where[begin : begin + step].reshape(-1, len(sizes))
                size = channels * len(points)
                part = total[:size].reshape(channels, -1)
                sample(flat, points, part, value[:size].reshape(part.shape))
                target = out[:, begin : begin + step]
                np.copyto(target, part.reshape(target.shape), casting="unsafe")

    return Routine(into, layout.size)


def _infer_affine_grid(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    theta, size = rules.tensor(types, 0), rules.ints(types, consts, 1)
    rank: Dim = None if size is None else len(size) - 2
    if theta.shape is not None:
        if len(theta.shape) != 3:
            raise ShapeError(f"theta must have shape [N, 2, 3] or [N, 3, 4], not {theta.shape}")
        for dim, more in ((theta.shape[1], 0), (theta.shape[2], 1)):
            if isinstance(dim, int):
                rank = dim - more if rank is None else rank
                if rank not in (2, 3) or dim - more != rank:
                    raise ShapeError(
                        f"theta does not fit size {size}: it must be [N, 2, 3] and size "
                        "[N, C, H, W], or [N, 3, 4] and [N, C, D, H, W]"
                    )
    if rank is not None and rank not in (2, 3):
        raise ShapeError(
            f"size has {len(size or ())} elements: it must be [N, C, H, W] or [N, C, D, H, W]"
        )
    batch: Dim = None if theta.shape is None else theta.shape[0]
    if size is None:
        dims = None if rank is None else (batch, *[None] * int(rank), rank)
        return (TensorType(theta.dtype, dims),)
    batch = rules.same_dim(batch, size[0], "the batch sizes of theta and size")
    if any(isinstance(dim, int) and dim < 0 for dim in size):
        raise ShapeError(f"size must not be negative: {size}")
    return (TensorType(theta.dtype, (batch, *size[2:], rank)),)


def pixel_centres(size: int, align_corners: bool) -> np.ndarray:
    """Pixel coordinates in [-1, 1], whose ends are the centres of the outermost pixels
    (``align_corners``) or their outer edges."""
    if align_corners:
        return np.linspace(-1, 1, size) if size > 1 else np.zeros(size)
    return (2 * np.arange(size) + 1) / max(size, 1) - 1


@operator("AffineGrid", since=20, infer=_infer_affine_grid)
@by_shape(contiguous=True, values=(1,))
def affine_grid(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    align_corners = bool(node.attrs.get("align_corners", 0))

    (batch, *sizes, rank), dtype = static_type(outputs, 0)
    mesh = np.meshgrid(*[pixel_centres(size, align_corners) for size in sizes], indexing="ij")
    # Coordinates are in the order x, y, z: the last axis first.
    points = np.stack([*mesh[::-1], np.ones(sizes)], -1).reshape(-1, rank + 1).astype(dtype)

    def into(theta: np.ndarray, size: np.ndarray, y: np.ndarray) -> None:
        np.matmul(points, theta.swapaxes(1, 2), y.reshape(batch, len(points), rank))

    return Routine(into, prepared=(1,))


def _infer_nms(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    boxes, scores = rules.tensor(types, 0).shape, rules.tensor(types, 1).shape
    rules.check_shape("boxes", boxes, (None, None, 4))
    batches, count, _ = boxes or (None, None, None)
    rules.check_shape("scores", scores, (batches, None, count))
    return (TensorType(INT64, (None, 3)),)


def box_edges(boxes: np.ndarray, center_point_box: bool = False) -> np.ndarray:
    """Convert boxes [n, 4] to rows: minimum and maximum along each axis, and the area."""
    a, b, c, d = boxes.T
    if center_point_box:
        edges = (a - c / 2, a + c / 2, b - d / 2, b + d / 2)
    else:  # any two opposite corners
        edges = (np.minimum(b, d), np.maximum(b, d), np.minimum(a, c), np.maximum(a, c))
    left, right, top, bottom = edges
    return np.stack([*edges, (right - left) * (bottom - top)])


def shares(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the intersection over union of pairs of boxes, from ``box_edges``."""
    x0, x1, y0, y1, area = rows[:, :, None]
    width = np.minimum(x1, columns[1]) - np.maximum(x0, columns[0])
    height = np.minimum(y1, columns[3]) - np.maximum(y0, columns[2])
    both = np.maximum(width, 0) * np.maximum(height, 0)
    # The IoU of two empty boxes would be 0 / 0.
    return np.where((area > 0) & (columns[4] > 0), both / (area + columns[4] - both), 0)


_BOXES = 96


def suppressed(edges: np.ndarray, most: int, threshold: float) -> list[int]:
    """The columns to keep, at most ``most``, of boxes from ``box_edges``, sorted by score. A box
    is dropped if its intersection over union with a kept one exceeds ``threshold``.

    Block by block, all pairs at once: what an earlier block kept suppresses, then, as sets of bits,
    the boxes of the block suppress one another in their order.
    """
    kept: list[int] = []
    for start in range(0, edges.shape[1] if most > 0 else 0, _BOXES):
        checkpoint()
        block = edges[:, start : start + _BOXES]
        alive = np.arange(start, start + block.shape[1])
        if kept:
            alive = alive[~(shares(edges[:, kept], block) > threshold).any(0)]
            block = edges[:, alive]
        suppressed = 0
        overlaps = shares(block, block) > threshold
        for i, box in enumerate(alive.tolist()):
            if not suppressed >> i & 1:
                kept.append(box)
                if len(kept) == most:
                    return kept
                bits = np.packbits(overlaps[i], bitorder="little").tobytes()
                suppressed |= int.from_bytes(bits, "little")
    return kept


@operator("NonMaxSuppression", since=10, infer=_infer_nms)
def non_max_suppression(node: Node, types: Types) -> Kernel:
    center_point_box = bool(node.attrs.get("center_point_box", 0))
    names = "max_output_boxes_per_class", "iou_threshold", "score_threshold"

    def function(boxes: np.ndarray, scores: np.ndarray, *limits: np.ndarray | None) -> np.ndarray:
        _infer_nms([TensorType(x.dtype, x.shape) for x in (boxes, scores)], {}, ())
        most, threshold, least = (
            None if limit is None else rules.one_element(limit, name).item()
            for name, limit in zip(names, rules.pad_with_none(limits, 3), strict=True)
        )
        # ONNX selects nothing by default.
        most, threshold = most or 0, threshold or 0.0
        if not 0 <= threshold <= 1:
            raise ShapeError(f"iou_threshold is {threshold}: it must be between 0 and 1")
        # Compare in the dtype of the IoU.
        threshold = boxes.dtype.type(threshold)
        selected = [np.empty((0, 3), np.int64)]
        for batch, (batch_boxes, batch_scores) in enumerate(zip(boxes, scores, strict=True)):
            edges = box_edges(batch_boxes, center_point_box)
            for number, score in enumerate(batch_scores):
                every = np.arange(len(score)) if least is None else np.flatnonzero(score > least)
                # A stable sort: equal scores keep their order.
                best = every[np.argsort(-score[every], kind="stable")]
                kept = best[suppressed(edges[:, best], most, threshold)]
                chosen = np.empty((len(kept), 3), np.int64)
                chosen[:, 0], chosen[:, 1], chosen[:, 2] = batch, number, kept
                selected.append(chosen)
        return np.concatenate(selected)

    return Kernel(function)


_CHANNELS: Mapping[str, int] = {"RGB": 3, "BGR": 3, "Grayscale": 1}


def _infer_decoder(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    channels = _CHANNELS[rules.choice(attrs, "pixel_format", "RGB", _CHANNELS)]
    return (TensorType(np.dtype(np.uint8), (None, None, channels)),)


@operator("ImageDecoder", infer=_infer_decoder)
def image_decoder(node: Node, types: Types) -> Kernel:
    """Bytes that cannot be decoded yield an empty image, as the specification says."""
    with extra_needed("ImageDecoder needs Pillow", "image"):
        from PIL import Image
    form = rules.choice(node.attrs, "pixel_format", "RGB", _CHANNELS)
    channels = _CHANNELS[form]

    def decode(encoded: np.ndarray) -> np.ndarray:
        try:
            with Image.open(BytesIO(encoded.tobytes())) as image:
                pixels = np.array(image.convert("L" if channels == 1 else "RGB"))
        except OSError:
            return np.empty((0, 0, channels), np.uint8)
        pixels = pixels.reshape(*pixels.shape[:2], channels)
        return np.ascontiguousarray(pixels[..., ::-1]) if form == "BGR" else pixels

    return Kernel(decode)
