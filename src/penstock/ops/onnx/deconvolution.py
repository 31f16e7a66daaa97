"""The inverses of unfolding: ConvTranspose and Col2Im add what windows hold where they overlap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common.shape_rules import check_shape, given, ints, same_dtype, tensor
from penstock.ops.common.specialize import Routine, ScratchLayout, Tensors, specialized
from penstock.ops.common.windows import Axis, Window, ints_of, parse_axes, window_counts, windows
from penstock.ops.common.work import deconvolution_work
from penstock.ops.onnx.convolution import (
    BLOCK_BYTES,
    MIN_BLOCK,
    boxes,
    common_rank,
    divisible,
    kernel_dims,
)
from penstock.ops.registry import operator
from penstock.types import STRING, Dim, Shape, ShapeError, TensorType, Type

Moves: TypeAlias = list[tuple[tuple[Any, ...], tuple[Any, ...]]]
"""For each kernel position, where it lies in (..., kernel, windows) and in (..., elements)"""


def _moves(axes: Sequence[Window], box: Sequence[tuple[int, int]] | None = None) -> Moves:
    """How the windows (those of ``box``) are added to the elements they look at."""
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


# ConvTranspose


def _transposed(axis: Axis, auto_pad: str, kernel: int, size: int, extra: int, want: Any) -> Window:
    """The windows of a convolution whose input is our output: ``size`` of them."""
    full = axis.stride * (size - 1) + extra + (kernel - 1) * axis.dilation + 1
    begin, end = axis.begin, axis.end
    if want is None and auto_pad.startswith("SAME"):
        want = size * axis.stride
    if want is not None:
        total = max(full - want, 0)
        begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        end = total - begin
    else:
        want = full - begin - end
    if want < 1 or size < 1:
        raise ShapeError(f"a transposed convolution of {size} windows has no output, but {want}")
    return Window(want, size, kernel, axis.stride, axis.dilation, begin, end)


def transposed_windows(
    attrs: Attrs, kernel: Sequence[Dim], sizes: Sequence[Dim]
) -> list[Window | Dim]:
    """The windows along each axis, or the output dim as far as known where a dim is not."""
    rank = len(sizes)
    axes, auto_pad = parse_axes(attrs, rank)
    extras = ints_of(attrs, "output_padding", rank, 0, low=0)
    wanted: Sequence[int | None] = attrs.get("output_shape") or [None] * rank
    if len(wanted) == rank + 2:
        wanted = wanted[2:]  # some exporters give the whole shape
    if len(wanted) != rank:
        raise ShapeError(f"output_shape {list(wanted)} must have {rank} entries")
    found: list[Window | Dim] = []
    for axis, k, size, extra, want in zip(axes, kernel, sizes, extras, wanted, strict=True):
        if isinstance(k, int) and isinstance(size, int):
            found.append(_transposed(axis, auto_pad, k, size, extra, want))
        elif want is not None:
            found.append(want)
        elif auto_pad.startswith("SAME"):
            scaled = size if axis.stride == 1 else None
            found.append(size * axis.stride if isinstance(size, int) else scaled)
        elif axis.stride == 1 and isinstance(k, int):
            keeps = (k - 1) * axis.dilation + extra == axis.begin + axis.end
            found.append(size if keeps else None)
        else:
            found.append(None)
    return found


def _infer_conv_transpose(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype = same_dtype(types, range(len(types)))
    x, w = tensor(types, 0).shape, tensor(types, 1).shape
    rank = common_rank(x, w)
    if rank is None:
        return (TensorType(dtype, None),)
    unknown: Shape = (None,) * rank
    x, w, group = x or unknown, w or unknown, attrs.get("group", 1)
    if group < 1:
        raise ShapeError(f"group must be positive, not {group}")
    divisible("channels", x[1], group)
    if isinstance(x[1], int) and isinstance(w[0], int) and x[1] != w[0]:
        raise ShapeError(f"{x[1]} channels for weights of {w[0]}")
    kernel = kernel_dims(attrs, w, rank - 2)
    if 0 in kernel:
        raise ShapeError(f"an empty kernel {kernel}")
    filters = w[1] * group if isinstance(w[1], int) else w[1] if group == 1 else None
    check_shape("bias", tensor(types, 2).shape, (filters,))
    axes = transposed_windows(attrs, kernel, x[2:])
    dims = [axis.size if isinstance(axis, Window) else axis for axis in axes]
    return (TensorType(dtype, (x[0], filters, *dims)),)


@operator("ConvTranspose", infer=_infer_conv_transpose, work=deconvolution_work)
def conv_transpose(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    group = attrs.get("group", 1)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        x, w = inputs[:2]
        assert x is not None and w is not None and x.dtype is not None
        (n, channels, *sizes), (_, m, *kernel) = x.dims, w.dims
        axes = [
            axis for axis in transposed_windows(attrs, kernel, sizes) if isinstance(axis, Window)
        ]
        depth = channels // group
        rows = m * prod(kernel)
        positions = prod(sizes)
        limit = max(BLOCK_BYTES // max(group * rows * x.dtype.itemsize, 1), MIN_BLOCK)
        layout = ScratchLayout()
        blocks, start, widest = [], 0, 0
        for box in boxes(sizes, limit):
            size = prod(high - low for low, high in box)
            shape = (group * m, *kernel, *(high - low for low, high in box))
            blocks.append((slice(start, start + size), size, shape, _moves(axes, box)))
            start += size
            widest = max(widest, size)
        columns = layout.field((group * rows * widest,), x.dtype)
        shape_x = (n, group, depth, positions)
        # A product of matrices of depth 1 is an outer product, for which BLAS is slow.
        multiply = np.multiply if depth == 1 else np.matmul
        has_bias = given(inputs, 2)
        column = (-1, *(1,) * len(sizes))

        def transposed(w: np.ndarray) -> np.ndarray:
            return w.reshape(group, depth, rows).transpose(0, 2, 1)

        ready = None if consts[1] is None else transposed(consts[1])

        def into(x: np.ndarray, w: np.ndarray, *rest: Any) -> None:
            *optional, out, workspace = rest
            matrix = transposed(w) if ready is None else ready
            if has_bias:
                out[...] = optional[0].reshape(column)
            else:
                out.fill(0)
            for image, result in zip(x.reshape(shape_x), out, strict=True):
                for where, size, shape, moves in blocks:
                    product = columns.reshaped(group, rows, size)(workspace)
                    multiply(matrix, image[..., where], product)
                    _add_windows(product.reshape(shape), result, moves)

        return Routine(into, layout.size, () if ready is None else (1,))

    return specialized(node, types, make)


# Col2Im


def _infer_col2im(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    check_shape("input", x.shape, (None, None, None))
    check_shape("image_shape", tensor(types, 1).shape, (None,))
    check_shape("block_shape", tensor(types, 2).shape, (None,))
    n, rows, columns = x.shape or (None, None, None)
    image, block = ints(types, consts, 1), ints(types, consts, 2)
    if image is None or block is None:
        rank = tensor(types, 1).shape
        if image is None or rank is None:
            return (TensorType(x.dtype, None),)
        return (TensorType(x.dtype, (n, None, *image)),)
    if len(image) != len(block):
        raise ShapeError(f"image_shape {image} and block_shape {block} differ in length")
    if any(isinstance(k, int) and k < 1 for k in (*image, *block)):
        raise ShapeError(f"image_shape {image} and block_shape {block} must be positive")
    counts = window_counts(attrs, block, image)
    count = prod(counts) if all(isinstance(c, int) for c in counts) else None  # type: ignore[arg-type]
    if isinstance(columns, int) and count is not None and columns != count:
        raise ShapeError(f"{columns} blocks, but {count} fit into image_shape {image}")
    channels = None
    if isinstance(rows, int) and all(isinstance(k, int) for k in block):
        size = prod(block)  # type: ignore[arg-type]
        if rows % size:
            raise ShapeError(f"dim 1 of {rows} is no multiple of the {size} elements of a block")
        channels = rows // size
    return (TensorType(x.dtype, (n, channels, *image)),)


@operator("Col2Im", since=18, infer=_infer_col2im, strings=True)
def col2im(node: Node, types: Types) -> Kernel:
    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        type_ = outputs[0]
        assert type_ is not None and consts[2] is not None
        if type_.dtype == STRING:
            raise ShapeError("Col2Im has no meaning for strings")
        n, channels, *image = type_.dims
        block = [int(k) for k in consts[2]]
        axes = windows(node.attrs, block, image)
        moves = _moves(axes)
        shape = (n, channels, *block, *(axis.count for axis in axes))

        def into(x: np.ndarray, image_shape: Any, block_shape: Any, out: np.ndarray) -> None:
            out.fill(0)
            _add_windows(x.reshape(shape), out, moves)

        return Routine(into)

    return specialized(node, types, make, values=(1, 2))
