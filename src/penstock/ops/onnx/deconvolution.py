"""ConvTranspose and Col2Im: the transposes of unfolding, which sum overlapping windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import STRING, Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.products import deconvolution_work
from penstock.ops.common.shape_rules import check_shape, dim_product, ints, same_dtype, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.common.windows import Axis, Window, ints_of, parse_axes, window_counts, windows
from penstock.ops.onnx.convolution import BLOCK_BYTES, MIN_BLOCK, boxes, convolution_dims
from penstock.ops.registry import operator

Moves: TypeAlias = list[tuple[tuple[Any, ...], tuple[Any, ...]]]
"""for each kernel position, its index in (..., kernel, windows) and in (..., elements)"""


def _moves(axes: Sequence[Window], box: Sequence[tuple[int, int]] | None = None) -> Moves:
    """The moves that add windows (those of ``box``) to the elements that they cover."""
    if box is None:
        box = [(0, axis.count) for axis in axes]
    taps = [axis.taps(*span) for axis, span in zip(axes, box, strict=True)]
    return [
        (
            (..., *(k for k, _, _ in position), *(seen for _, seen, _ in position)),
            (..., *(elements for _, _, elements in position)),
        )
        for position in product(*taps)
    ]


def _add_windows(source: np.ndarray, target: np.ndarray, moves: Moves) -> None:
    """Add (..., kernel, windows) to (..., elements)."""
    for seen, elements in moves:
        part = target[elements]
        np.add(part, source[seen], part)


def _transposed(axis: Axis, auto_pad: str, kernel: int, size: int, extra: int, want: Any) -> Window:
    """The ``size`` windows of the convolution that maps the output back to the input."""
    full = axis.stride * (size - 1) + extra + (kernel - 1) * axis.dilation + 1
    begin, end = axis.begin, axis.end
    # With auto_pad SAME_*, the output dim is the input dim times the stride.
    if want is None and auto_pad.startswith("SAME"):
        want = size * axis.stride
    if want is not None:
        total = max(full - want, 0)
        # An odd total pads one more element at the beginning, unless auto_pad is SAME_UPPER.
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end = total - begin
    else:
        want = full - begin - end
    if want < 1 or size < 1:
        raise ShapeError(
            f"the output dim would be {want} for an input dim of {size}: both must be positive; "
            "check pads"
        )
    return Window(want, size, kernel, axis.stride, axis.dilation, begin, end)


def transposed_windows(
    attrs: Attrs, kernel: Sequence[Dim], sizes: Sequence[Dim]
) -> list[Window | Dim]:
    """The windows along each axis; for an unknown dim, the output dim if it is known."""
    rank = len(sizes)
    axes, auto_pad = parse_axes(attrs, rank)
    extras = ints_of(attrs, "output_padding", rank, 0, low=0)
    wanted: Sequence[int | None] = attrs.get("output_shape") or [None] * rank
    if len(wanted) == rank + 2:
        wanted = wanted[2:]  # some exporters include batch and channels
    if len(wanted) != rank:
        raise ShapeError(f"output_shape {list(wanted)} must have {rank} entries, one per dim")
    result: list[Window | Dim] = []
    for axis, k, size, extra, want in zip(axes, kernel, sizes, extras, wanted, strict=True):
        if isinstance(k, int) and isinstance(size, int):
            result.append(_transposed(axis, auto_pad, k, size, extra, want))
        elif want is not None:
            result.append(want)
        elif auto_pad.startswith("SAME"):
            result.append(dim_product((size, axis.stride)))
        elif axis.stride == 1 and isinstance(k, int):
            keeps = (k - 1) * axis.dilation + extra == axis.begin + axis.end
            result.append(size if keeps else None)
        else:
            result.append(None)
    return result


def _infer_conv_transpose(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = same_dtype(types, range(len(types)))
    image, weights = tensor(types, 0).shape, tensor(types, 1).shape
    dims = convolution_dims(image, weights, attrs, filters_first=False)
    if dims is None:
        return (TensorType(dtype),)
    x, w, group, kernel = dims
    filters = dim_product((w[1], group))
    check_shape("bias", tensor(types, 2).shape, (filters,))
    axes = transposed_windows(attrs, kernel, x[2:])
    sizes = [axis.size if isinstance(axis, Window) else axis for axis in axes]
    return (TensorType(dtype, (x[0], filters, *sizes)),)


@operator("ConvTranspose", infer=_infer_conv_transpose, work=deconvolution_work, traits={"heavy"})
@by_shape(arity=(3, 1))
def conv_transpose(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    group = node.attrs.get("group", 1)
    (n, channels, *sizes), dtype = static_type(inputs, 0)
    _, m, *kernel = tensor(inputs, 1).dims
    transposed = transposed_windows(node.attrs, kernel, sizes)
    axes = [axis for axis in transposed if isinstance(axis, Window)]
    depth, rows = channels // group, m * prod(kernel)
    limit = max(BLOCK_BYTES // max(group * rows * dtype.itemsize, 1), MIN_BLOCK)
    blocks, start = [], 0
    for box in boxes(sizes, limit):
        counts = [high - low for low, high in box]
        size = prod(counts)
        shape = (group * m, *kernel, *counts)
        blocks.append((slice(start, start + size), size, shape, _moves(axes, box)))
        start += size
    layout = Scratch()
    widest = max((size for _, size, _, _ in blocks), default=0)
    columns = layout.field((group * rows * widest,), dtype)
    shape_x, column = (n, group, depth, prod(sizes)), (-1, *(1,) * len(sizes))
    # A product of matrices of depth 1 is an outer product, for which BLAS is slow.
    multiply = np.multiply if depth == 1 else np.matmul

    def matrices(w: np.ndarray) -> np.ndarray:
        return w.reshape(group, depth, rows).transpose(0, 2, 1)

    ready = None if consts[1] is None else matrices(consts[1])

    def into(x: np.ndarray, *arguments: RunValue) -> None:
        w, bias, out, workspace = arguments
        matrix = matrices(w) if ready is None else ready
        # Overlapping windows are accumulated into the output, which starts out as the bias.
        out[...] = 0 if bias is None else bias.reshape(column)
        for image, result in zip(x.reshape(shape_x), out, strict=True):
            for where, size, shape, moves in blocks:
                checkpoint()
                product = columns.reshaped(group, rows, size)(workspace)
                multiply(matrix, image[..., where], product)
                _add_windows(product.reshape(shape), result, moves)

    return Routine(into, layout.size, () if ready is None else (1,))


def _infer_col2im(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    check_shape("input", x.shape, (None, None, None))
    check_shape("image_shape", tensor(types, 1).shape, (None,))
    check_shape("block_shape", tensor(types, 2).shape, (None,))
    n, rows, columns = x.shape or (None, None, None)
    image, block = ints(types, consts, 1), ints(types, consts, 2)
    if image is None or block is None:
        return (TensorType(x.dtype, None if image is None else (n, None, *image)),)
    if len(image) != len(block):
        raise ShapeError(f"image_shape {image} and block_shape {block} differ in length")
    if any(isinstance(k, int) and k < 1 for k in (*image, *block)):
        raise ShapeError(f"image_shape {image} and block_shape {block} must be positive")
    count = dim_product(window_counts(attrs, block, image))
    if isinstance(columns, int) and isinstance(count, int) and columns != count:
        raise ShapeError(f"the input has {columns} blocks; image_shape {image} requires {count}")
    size, channels = dim_product(block), None
    if isinstance(rows, int) and isinstance(size, int):
        if rows % size:
            raise ShapeError(f"dim 1 is {rows}: it must be a multiple of the block size {size}")
        channels = rows // size
    return (TensorType(x.dtype, (n, channels, *image)),)


@operator("Col2Im", since=18, infer=_infer_col2im, strings=True)
@by_shape(values=(1, 2))
def col2im(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    (n, channels, *image), dtype = static_type(outputs, 0)
    assert consts[2] is not None
    if dtype == STRING:
        raise ShapeError("Col2Im adds elements, which is not defined for strings")
    block = [int(k) for k in consts[2]]
    axes = windows(node.attrs, block, image)
    moves = _moves(axes)
    shape = (n, channels, *block, *(axis.count for axis in axes))

    def into(
        x: np.ndarray, image_shape: np.ndarray, block_shape: np.ndarray, out: np.ndarray
    ) -> None:
        out.fill(0)
        _add_windows(x.reshape(shape), out, moves)

    return Routine(into)
