"""Tile, Concat, Split, DepthToSpace and SpaceToDepth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import MAX_DATA, Dim, RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.specialize import Routine, Tensors, by_shape
from penstock.ops.onnx.shape import repeated, unknown_shape
from penstock.ops.registry import Prepared, array_operator, operator


def _infer_tile(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    rules.check_shape("repeats", rules.tensor(types, 1).shape, (x.rank,))
    return (_tiled(x, rules.ints(types, consts, 1)),)


def _tiled(x: TensorType, repeats: Sequence[Dim] | None) -> TensorType:
    if x.shape is None:
        return TensorType(x.dtype, None if repeats is None else (None,) * len(repeats))
    if repeats is None:
        return TensorType(x.dtype, (None,) * len(x.shape))
    if len(repeats) != len(x.shape):
        raise ShapeError(
            f"repeats has {len(repeats)} entries for an input of rank {len(x.shape)}: it needs "
            "one per axis"
        )
    if any(isinstance(r, int) and r < 0 for r in repeats):
        raise ShapeError(f"repeats {list(repeats)} must not be negative")
    dims = tuple(map(rules.dim_product, zip(x.shape, repeats, strict=True)))
    type_ = TensorType(x.dtype, dims)
    return rules.with_data(type_, lambda: repeated(x, type_))


@operator("Tile", since=6, infer=_infer_tile, moves=True, strings=True, traits={"selects"})
@by_shape(values=(1,), widen=False)
def tile(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    dims, tiled = rules.tensor(inputs, 0).dims, rules.tensor(outputs, 0).dims
    counts = [0 if not d else n // d for n, d in zip(tiled, dims, strict=True)]
    # Splitting an axis (r * d) into (r, d) is a view for any strides; x broadcasts along r.
    split = [n for pair in zip(counts, dims, strict=True) for n in pair]
    once = [n for d in dims for n in (1, d)]

    def into(x: np.ndarray, repeats: np.ndarray, out: np.ndarray) -> None:
        out.reshape(split)[...] = x.reshape(once)

    return Routine(into)


def _infer_concat(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    input_types = [rules.tensor(types, i) for i in range(len(types))]
    dtype = rules.same_dtype(types, range(len(types)))
    shapes = [type_.shape for type_ in input_types if type_.shape is not None]
    if not shapes:
        return (TensorType(dtype),)
    rank = len(shapes[0])
    where = rules.normalize_axis(attrs.get("axis", 1), rank)
    if rank == 0 or {*map(len, shapes)} != {rank}:
        raise ShapeError(
            "the inputs must have the same rank, which must not be 0; their shapes are "
            f"{[*map(list, shapes)]}"
        )
    result: list[Dim] = []
    for i, dims in enumerate(zip(*shapes, strict=True)):
        sizes = {d for d in dims if isinstance(d, int)}
        if i == where:
            result.append(rules.dim_sum(dims) if len(shapes) == len(types) else None)
        elif len(sizes) > 1:
            raise ShapeError(f"cannot be concatenated along axis {where}: axis {i} differs")
        else:
            result.append(sizes.pop() if sizes else dims[0])

    def contents() -> tuple[Dim, ...] | None:
        data: list[Dim] = []
        for type_ in input_types:
            if type_.data is not None:
                data += type_.data
            elif type_.shape is not None and isinstance(type_.shape[0], int):
                data += [None] * min(type_.shape[0], MAX_DATA + 1)
            else:
                return None
        return tuple(data) if len(data) <= MAX_DATA else None

    type_ = TensorType(dtype, tuple(result))
    known = True in [bool(type_.data) for type_ in input_types]
    return (rules.with_data(type_, contents) if known else type_,)


@operator(
    "Concat", infer=_infer_concat, moves=True, strings=True, traits={"total once static", "selects"}
)
def concat(node: Node, types: Types) -> Kernel:
    axis = node.attrs.get("axis", 1)  # the attribute has a default only in version 1

    def run(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate(arrays, axis)

    shapes = [rules.all_known(rules.tensor(types, i).shape) for i in range(len(types))]
    full = [dims for dims in shapes if dims]
    if not full or len(full) < len(shapes):
        return Kernel(run)
    # For a few arrays, assigning to precomputed slices takes half the time of np.concatenate.
    where = rules.normalize_axis(axis, len(full[0]))
    parts = cuts(where, [dims[where] for dims in full])
    if len(parts) == 2:
        first, second = parts

        def into_two(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            out[first] = a
            out[second] = b

        return Kernel(run, into_two)

    def into(*arrays: np.ndarray) -> None:
        for part, array in zip(parts, arrays, strict=False):
            arrays[-1][part] = array

    return Kernel(run, into)


def cuts(axis: int, sizes: Sequence[int]) -> list[tuple[slice, ...]]:
    """The indices of consecutive parts of the given sizes along ``axis``."""
    ends = list(accumulate(sizes))
    before = (slice(None),) * axis
    pairs = with_checkpoints([*zip(sizes, ends, strict=True)])
    return [(*before, slice(end - size, end)) for size, end in pairs]


def _infer_split(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    axis, count = attrs.get("axis", 0), attrs.get("num_outputs")
    where = 0 if x.shape is None else rules.normalize_axis(axis, len(x.shape))
    dim = None if x.shape is None else x.shape[where]
    sizes: Sequence[Dim] | None = None
    if rules.given(types, 1):
        sizes = rules.ints(types, consts, 1)
        if sizes is None:
            sizes = unknown_shape(types, 1)
    elif count is not None:
        if count < 1:
            raise ShapeError(f"cannot split into {count} parts: it must be a positive number")
        sizes = _even_parts(dim, count)
    if sizes is None:
        return ()
    if x.shape is None:
        return [TensorType(x.dtype)] * len(sizes)
    _check_split(dim, sizes)
    shapes = [(*x.shape[:where], n, *x.shape[where + 1 :]) for n in sizes]
    lengths = rules.all_known(sizes)
    if x.data is None or lengths is None:
        return [TensorType(x.dtype, shape) for shape in shapes]
    data = [x.data[part] for (part,) in cuts(0, lengths)]
    return [TensorType(x.dtype, shape, part) for shape, part in zip(shapes, data, strict=True)]


def _even_parts(dim: Dim, count: int) -> Sequence[Dim]:
    """The sizes of ``count`` equal parts; only the last one may be smaller."""
    if not isinstance(dim, int):
        return (dim,) if count == 1 else (None,) * count
    length = -(-dim // count)
    last = dim - length * (count - 1)
    if last < 0:
        raise ShapeError(f"dim {dim} cannot be split into {count} parts with only the last smaller")
    return (*[length] * (count - 1), last)


def _check_split(dim: Dim, sizes: Sequence[Dim]) -> None:
    lengths = [size for size in sizes if isinstance(size, int)]
    if any(size < 0 for size in lengths):
        raise ShapeError(f"split {list(sizes)} must not be negative")
    if isinstance(dim, int) and len(lengths) == len(sizes) and sum(lengths) != dim:
        raise ShapeError(f"split {list(sizes)} must add up to {dim}, the dim along the axis")


@operator(
    "Split", since=13, infer=_infer_split, moves=True, strings=True, traits={"total by parameters"}
)
def split(node: Node, types: Types) -> Kernel:
    axis, count = node.attrs.get("axis", 0), len(node.outputs)
    by_input = rules.given(node.inputs, 1)
    fixed_sizes = rules.known_ints(node, types, 1) if by_input else None

    def parts(dims: Sequence[int], sizes: Sequence[int] | None) -> list[tuple[slice, ...]]:
        where = rules.normalize_axis(axis, len(dims))
        if sizes is None:
            whole = _even_parts(dims[where], node.attrs.get("num_outputs") or count)
            sizes = rules.all_known(whole) or ()
        _check_split(dims[where], sizes)
        if len(sizes) != count:
            raise ShapeError(f"split {list(sizes)} has {len(sizes)} entries for {count} outputs")
        return cuts(where, sizes)

    dims = rules.all_known(rules.tensor(types, 0).shape)
    fixed = parts(dims, fixed_sizes) if dims is not None and (fixed_sizes or not by_input) else None

    def run(x: np.ndarray, sizes: np.ndarray | None = None) -> Any:
        pieces = fixed
        if pieces is None:
            pieces = parts(x.shape, fixed_sizes if sizes is None or fixed_sizes else sizes.tolist())
        return tuple([x[part] for part in pieces]) if count != 1 else x[pieces[0]]

    def into(*arrays: RunValue) -> None:
        views = run(*arrays[:-count])
        for out, part in zip(arrays[-count:], views if count != 1 else (views,), strict=True):
            if out is not None:
                out[...] = part

    return Kernel(run, into, view=True)


# DepthToSpace and SpaceToDepth split axes, permute them and merge them in one copy. Splitting an
# axis is a view for any strides.

_CACHED = 2**18  # bytes of images that stay in the cache while each position in a block is read


def _block(attrs: Attrs) -> int:
    block: int = attrs["blocksize"]
    if block < 1:
        raise ShapeError(f"blocksize {block} must be positive")
    return block


def _divided(dim: Dim, factor: int) -> Dim:
    if isinstance(dim, int) and dim % factor:
        raise ShapeError(f"dim {dim} is not divisible by {factor}")
    return dim // factor if isinstance(dim, int) else dim if factor == 1 else None


def block_dims(dims: Shape | None, b: int, to_space: bool) -> Shape:
    """The output shape of DepthToSpace or SpaceToDepth."""
    if dims is not None and len(dims) != 4:
        raise ShapeError(f"the input must have rank 4 [N, C, H, W], but has shape {list(dims)}")
    n, c, h, w = dims or (None,) * 4
    if to_space:
        return (n, _divided(c, b * b), rules.dim_product((h, b)), rules.dim_product((w, b)))
    return (n, rules.dim_product((c, b * b)), _divided(h, b), _divided(w, b))


def _infer_blocks(to_space: bool) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        x = rules.tensor(types, 0)
        return (TensorType(x.dtype, block_dims(x.shape, _block(attrs), to_space)),)

    return infer


_PREPARED: Prepared = {
    "b": lambda node: _block(node.attrs),
    "to_space": lambda node: node.op.name == "DepthToSpace",
    "mode": lambda node: rules.choice(node.attrs, "mode", "DCR", ("DCR", "CRD")),
}
_block_operator = partial(array_operator, moves=True, strings=True, fills=True, prepared=_PREPARED)


@_block_operator("DepthToSpace", infer=_infer_blocks(True), traits={"selects"})
@_block_operator("SpaceToDepth", infer=_infer_blocks(False), traits={"selects"})
def rearrange_blocks(
    x: np.ndarray, out: np.ndarray | None = None, *, b: int, to_space: bool, mode: str = "DCR"
) -> np.ndarray:
    """Move blocks of ``b`` rows and columns of [N, C, H, W] from the channels into height and
    width, or back. In ``mode`` CRD, the columns of a block lie together, rather than its depths."""
    dims: Any = block_dims(x.shape, b, to_space)
    if out is None:
        out = np.empty(dims, x.dtype)
    deep, flat = (x, out) if to_space else (out, x)
    n, c, height, width = flat.shape
    h, w = height // b, width // b
    # Both with axes n, c, row and column in the block, h, w.
    flat = flat.reshape(n, c, h, b, w, b).transpose(0, 1, 3, 5, 2, 4)
    if mode == "CRD":
        deep = deep.reshape(n, c, b, b, h, w)
    else:
        deep = deep.reshape(n, b, b, c, h, w).transpose(0, 3, 1, 2, 4, 5)
    to, source = (flat, deep) if to_space else (deep, flat)
    if not to_space or x.size < 2048:
        to[...] = source
        return out
    # Copy one position in the blocks at a time: in a single copy, NumPy's innermost loop would
    # cover only the few columns of a block. The images stay in the cache in between.
    step = max(1, _CACHED // max(1, x[:1].nbytes))
    for image, i, j in np.ndindex(-(-n // step), b, b):
        images = slice(image * step, (image + 1) * step)
        to[images, :, i, j] = source[images, :, i, j]
    return out
