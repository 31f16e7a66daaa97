"""Kernels that move elements: views, joins, parts, borders, and tensors made from little.

Shapes, axes and the like are inputs on the host (``DeviceWork.host_inputs``); the shape of a tensor
is an output there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.torch.site import FLOATS, INDICES, TorchSite
from penstock.core.types import RunValue, RunValues
from penstock.ir.kernel import DeviceWork, Kernel
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.onnx.index import slice_bounds
from penstock.ops.onnx.shape import flatten_axis, reshaped_dims, zeros_of


def _viewing(function: Callable[..., RunValue], *host_inputs: int) -> Kernel:
    """The kernel of a view."""
    return Kernel(function, view=True, device=DeviceWork(host_inputs=host_inputs))


def shape_of(site: TorchSite) -> Kernel | None:
    """Shape and Size, on the host: the tensor itself is not read."""
    if site.node.op.name == "Size":
        return Kernel(lambda x: np.array(x.numel(), np.int64), device=DeviceWork(host_outputs=True))
    part = slice(site.attrs.get("start") or 0, site.attrs.get("end"))
    return Kernel(lambda x: np.array(x.shape[part], np.int64), device=DeviceWork(host_outputs=True))


# Views.


def reshape_kernel(site: TorchSite) -> Kernel | None:
    """Reshape and Flatten."""
    fixed = site.result_dims() if site.dims(0) is not None else None
    if fixed is not None:
        return _viewing(lambda x, _=None: x.reshape(fixed), 1)
    if site.node.op.name == "Flatten":

        def flatten(x: Tensor) -> Tensor:
            axis = flatten_axis(site.attrs, x.dim())
            return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))

        return _viewing(flatten)
    zeros = zeros_of(site.attrs)

    def function(x: Tensor, spelled: np.ndarray) -> Tensor:
        dims: Any = reshaped_dims(tuple(x.shape), spelled.tolist(), **zeros)
        return x.reshape(dims)

    return _viewing(function, 1)


def squeeze(site: TorchSite) -> Kernel | None:
    """Squeeze of given axes, which must be 1."""
    known = site.dims(0) is not None and (site.const(1) is not None or not site.given(1))
    fixed = site.result_dims() if known else None
    if fixed is not None:
        return _viewing(lambda x, _=None: x.reshape(fixed), 1)

    def function(x: Tensor, axes: np.ndarray | None = None) -> Tensor:
        if axes is None:
            return x.squeeze()
        chosen = normalize_axes(axes.reshape(-1).tolist(), x.dim())
        if any(x.shape[axis] != 1 for axis in chosen):
            raise ValueError(f"axes {list(chosen)} of shape {list(x.shape)} are not all 1")
        return x.squeeze(chosen)

    return _viewing(function, 1)


def unsqueeze(site: TorchSite) -> Kernel | None:
    """Unsqueeze: new axes of 1."""

    def function(x: Tensor, axes: np.ndarray) -> Tensor:
        rank = x.dim() + axes.size
        for axis in sorted(normalize_axes(axes.reshape(-1).tolist(), rank)):
            x = x.unsqueeze(axis)
        return x

    axes, rank = site.ints(1), site.rank(0)
    if axes is not None and len(axes) == 1 and rank is not None:
        (axis,) = axes
        if -rank - 1 <= axis <= rank:
            return _viewing(lambda x, _: x.unsqueeze(axis), 1)
    return _viewing(function, 1)


def transpose_kernel(site: TorchSite) -> Kernel | None:
    """Transpose."""
    rank, perm = site.rank(0), site.attrs.get("perm")
    if rank is None and perm is None:
        return None
    order = tuple(range(rank or 0)[::-1] if perm is None else perm)
    return _viewing(lambda x: x.permute(order))


def expand(site: TorchSite) -> Kernel | None:
    """Expand: broadcasting to a shape, which may have fewer dims."""
    fixed = site.result_dims()
    if fixed is not None:
        return _viewing(lambda x, _: x.expand(fixed), 1)

    def function(x: Tensor, spelled: np.ndarray) -> Tensor:
        return x.expand(torch.broadcast_shapes(x.shape, spelled.tolist()))

    return _viewing(function, 1)


def slice_(site: TorchSite) -> Kernel | None:
    """Slice by numbers on the host. torch has no views with negative steps: with these, and known
    dims, elements are picked by index."""
    rank, dims = site.rank(0), site.dims(0)
    steps = site.ints(4) if site.given(4) else ()
    if rank is None or steps is None or 0 in steps:
        return None

    def index(numbers: RunValues) -> tuple[slice, ...]:
        lists: Any = [
            None if x is None else x.reshape(-1).tolist() for x in (*numbers, None, None)[:4]
        ]
        starts, ends, axes, widths = lists
        parts = [slice(None)] * rank
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            axis, step = i if axes is None else axes[i], 1 if widths is None else widths[i]
            limit = sys.maxsize if dims is None else dims[axis]
            parts[axis] = slice(*slice_bounds(start, end, step, limit))
        return tuple(parts)

    given = [site.const(i) for i in range(1, len(site.node.inputs))]
    known = all(x is not None or not site.given(i) for i, x in enumerate(given, 1))
    if known and not _in_range(given, rank):
        return None  # the error is NumPy's
    backward = min(steps, default=1) < 0
    if known:
        fixed = index(given)
        if not backward:
            return _viewing(lambda x, *_: x[fixed], 1, 2, 3, 4)
        if dims is not None:
            ranges = [range(*part.indices(n)) for part, n in zip(fixed, dims, strict=True)]
            return _picking(site, {a: r for a, r in enumerate(ranges) if r != range(dims[a])})
    if backward:
        return None
    return _viewing(lambda x, *numbers: x[index(numbers)], 1, 2, 3, 4)


def _picking(site: TorchSite, places: Mapping[int, Sequence[int] | np.ndarray]) -> Kernel:
    """The kernel that picks the elements at these ``places`` along axes."""
    indices = {a: site.tensor(np.array(found, np.int64)) for a, found in places.items()}

    def function(x: Tensor, *_: RunValue) -> Tensor:
        y = x
        for axis, index in indices.items():
            y = y.index_select(axis, index)
        return x.clone() if y is x else y

    return Kernel(function, device=DeviceWork(host_inputs=(1, 2, 3, 4)))


def _in_range(numbers: RunValues, rank: int) -> bool:
    axes = numbers[2] if len(numbers) > 2 else None
    return axes is None or all(-rank <= axis < rank for axis in axes.reshape(-1).tolist())


def split_kernel(site: TorchSite) -> Kernel | None:
    """Split into parts whose sizes are known when the plan is compiled."""
    axis, count = site.attrs.get("axis", 0), len(site.node.outputs)
    dims = [site.result_dims(i) for i in range(count)]
    if any(shape is None for shape in dims) or site.dims(0) is None:
        return None
    sizes = [shape[axis] for shape in dims if shape is not None]
    if count == 1:
        # torch.split would return a list of one.
        return _viewing(lambda x, _=None: x, 1)
    return _viewing(lambda x, _=None: torch.split(x, sizes, axis), 1)


# Copies.


def concat(site: TorchSite) -> Kernel | None:
    """Concat."""
    dtypes = {site.dtype(i) for i in range(len(site.node.inputs))}
    if len(dtypes) != 1:
        return None
    axis = site.attrs.get("axis", 1)

    def into(*tensors: Tensor) -> None:
        torch.cat(tensors[:-1], axis, out=tensors[-1])

    return Kernel(lambda *tensors: torch.cat(tensors, axis), into)


def tile(site: TorchSite) -> Kernel | None:
    """Tile: repetitions along each axis."""
    return Kernel(lambda x, times: x.repeat(times.tolist()), device=DeviceWork(host_inputs=(1,)))


def pad_kernel(site: TorchSite) -> Kernel | None:
    """Pad with a constant; or of known dims with mirrored, repeated or wrapped elements, which are
    picked by index: torch itself mirrors no more than the last three of four dims."""
    rank, mode = site.rank(0), site.text("mode", "constant")
    widths, axes = site.ints(1), site.ints(3)
    if rank is None or widths is None or (site.given(3) and axes is None):
        return None
    chosen = range(rank) if axes is None else [axis % rank for axis in axes]
    pairs = [(0, 0)] * rank
    half = len(widths) // 2
    for axis, pair in zip(chosen, zip(widths[:half], widths[half:], strict=True), strict=True):
        pairs[axis] = pair
    if mode != "constant":
        return _pad_by_elements(site, pairs, mode)
    flat = [width for pair in reversed(pairs) for width in pair]

    def function(
        x: Tensor, _: np.ndarray, value: np.ndarray | None = None, __: np.ndarray | None = None
    ) -> Tensor:
        return torch.constant_pad_nd(x, flat, 0 if value is None else value.item())

    return Kernel(function, device=DeviceWork(host_inputs=(1, 2, 3)))


def _pad_by_elements(site: TorchSite, pairs: Sequence[tuple[int, int]], mode: str) -> Kernel | None:
    dims = site.dims(0)
    if mode not in ("edge", "reflect", "wrap") or dims is None or 0 in dims:
        return None
    if min((width for pair in pairs for width in pair), default=0) < 0:
        return None
    modes: Any = mode
    padded = {a: (dims[a], pair) for a, pair in enumerate(pairs) if pair != (0, 0)}
    return _picking(site, {a: np.pad(np.arange(n), w, modes) for a, (n, w) in padded.items()})


def rearrange_blocks(site: TorchSite) -> Kernel | None:
    """DepthToSpace and SpaceToDepth."""
    if site.rank(0) != 4:
        return None
    b, column_first = site.attrs["blocksize"], site.text("mode") == "CRD"

    def to_space(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        if column_first:
            y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
        else:
            y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
        return y.reshape(n, c // (b * b), h * b, w * b)

    def to_depth(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, c, h // b, b, w // b, b)
        y = y.permute(0, 1, 3, 5, 2, 4) if column_first else y.permute(0, 3, 5, 1, 2, 4)
        return y.reshape(n, c * b * b, h // b, w // b)

    return Kernel(to_space if site.node.op.name == "DepthToSpace" else to_depth)


def triangle(site: TorchSite) -> Kernel | None:
    """Trilu: the upper or lower triangle of matrices, by a diagonal on the host."""
    if (site.rank(0) or 0) < 2:
        return None
    part = torch.triu if site.attrs.get("upper", 1) else torch.tril

    def function(x: Tensor, diagonal: np.ndarray | None = None) -> Tensor:
        return part(x, 0 if diagonal is None else int(diagonal.item()))

    return Kernel(function, device=DeviceWork(host_inputs=(1,)))


# Tensors made from little.


def constant_of_shape(site: TorchSite) -> Kernel | None:
    """ConstantOfShape: one number everywhere."""
    dtype, value = site.result_dtype(), site.attrs.get("value")
    if dtype is None:
        return None
    number = 0 if value is None else np.asarray(value).reshape(-1)[0].item()
    device = site.device

    def function(shape: np.ndarray) -> Tensor:
        return torch.full(shape.tolist(), number, dtype=dtype, device=device)

    return Kernel(function, device=DeviceWork(host_inputs=(0,)))


def range_(site: TorchSite) -> Kernel | None:
    """Range of whole numbers, by numbers on the host."""
    dtype, device = site.result_dtype(), site.device
    if dtype not in INDICES:
        return None

    def function(start: np.ndarray, limit: np.ndarray, step: np.ndarray) -> Tensor:
        first, last, width = start.item(), limit.item(), step.item()
        # In Python's integers, rounded up: no number of a step can be off by a rounding.
        count = max(-(-(last - first) // width), 0) if width else 0
        if not width:
            raise ValueError("the step of a Range must not be 0")
        return torch.arange(count, dtype=dtype, device=device).mul_(width).add_(first)

    return Kernel(function, device=DeviceWork(host_inputs=(0, 1, 2)))


def nonzero(site: TorchSite) -> Kernel | None:
    """NonZero: the places of elements that are not 0, as columns."""
    if not site.rank(0):
        return None
    return Kernel(lambda x: torch.nonzero(x).t())


def one_hot_kernel(site: TorchSite) -> Kernel | None:
    """OneHot of whole numbers; those out of range have no place."""
    dtype = site.dtype(2)
    if dtype is None or not site.rank(0):
        return None
    axis, rank = site.attrs.get("axis", -1), site.rank(0) or 0
    place = axis % (rank + 1)

    def function(indices: Tensor, depth: np.ndarray, values: Tensor) -> Tensor:
        size = int(depth.reshape(-1)[0])
        numbers = torch.arange(size, device=indices.device)
        numbers = numbers.reshape([size if i == place else 1 for i in range(rank + 1)])
        # torch's own one_hot has errors for indices out of range, where ONNX has rows of the off
        # value.
        wrapped = torch.where(indices < 0, indices + size, indices).unsqueeze(place)
        return torch.where(wrapped == numbers, values[1], values[0])

    return Kernel(function, device=DeviceWork(host_inputs=(1,)))


# Elements picked and replaced by index: gathers and scatters.
#
# Indices may be negative, which torch's own functions do not take; those out of range are an error,
# on a GPU one that comes late.


_REDUCED: Mapping[str, str] = {"mul": "prod", "max": "amax", "min": "amin", "add": "sum"}


def _wrapped(site: TorchSite, index: int) -> Callable[[Tensor, int], Tensor]:
    """The function that makes indices of an input int64, and counts negative ones from the end."""
    const = site.const(index)
    # Known at compile time, so that no run looks for negative ones.
    if const is not None and const.min(initial=0) >= 0:
        return lambda indices, size: indices.long()
    return lambda indices, size: torch.where(indices < 0, indices + size, indices).long()


def gather(site: TorchSite) -> Kernel | None:
    """Gather: slices along an axis."""
    rank = site.rank(0)
    if site.dtype(1) not in INDICES or not rank:
        return None
    axis = site.attrs.get("axis", 0)
    if not -rank <= axis < rank:
        return None  # the error is NumPy's
    axis, wrap, const = axis % rank, _wrapped(site, 1), site.const(1)
    # One slice at a place that is known is a view, which copies nothing.
    if const is not None and const.ndim == 0:
        place = int(const)
        return Kernel(
            lambda x, _: x.select(axis, place), view=True, device=DeviceWork(host_inputs=(1,))
        )

    def function(x: Tensor, indices: Tensor) -> Tensor:
        places = wrap(indices, x.shape[axis])
        if places.dim() == 1:
            return torch.index_select(x, axis, places)
        # index_select takes indices of one dim alone.
        picked = torch.index_select(x, axis, places.reshape(-1))
        return picked.reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))

    return Kernel(function)


def gather_elements(site: TorchSite) -> Kernel | None:
    """GatherElements."""
    rank = site.rank(0)
    if site.dtype(1) not in INDICES or not rank:
        return None
    axis, wrap = site.attrs.get("axis", 0) % rank, _wrapped(site, 1)
    return Kernel(lambda x, indices: torch.gather(x, axis, wrap(indices, x.shape[axis])))


def gather_nd(site: TorchSite) -> Kernel | None:
    """GatherND without dims of batches."""
    if site.dtype(1) not in INDICES or site.attrs.get("batch_dims", 0):
        return None
    return Kernel(lambda x, indices: x[indices.long().unbind(-1)])


def scatter_elements(site: TorchSite) -> Kernel | None:
    """ScatterElements: elements replaced by others, or reduced with them."""
    rank, how = site.rank(0), site.text("reduction", "none")
    if site.dtype(1) not in INDICES or not rank or site.dtype(0) is not site.dtype(2):
        return None
    if how != "none" and site.dtype(0) not in FLOATS:
        return None
    axis, wrap = site.attrs.get("axis", 0) % rank, _wrapped(site, 1)
    if how == "none":

        def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
            return torch.scatter(x, axis, wrap(indices, x.shape[axis]), updates)
    else:
        reduce = _REDUCED[how]

        def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
            places = wrap(indices, x.shape[axis])
            return torch.scatter_reduce(x, axis, places, updates, reduce)

    return Kernel(function)


def scatter_nd(site: TorchSite) -> Kernel | None:
    """ScatterND: slices replaced by others, or added to them."""
    how = site.text("reduction", "none")
    if site.dtype(1) not in INDICES or how not in ("none", "add"):
        return None
    adds = how == "add"

    def function(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        y = x.clone()
        places: Any = indices.long().unbind(-1)
        # A tuple of no indices names all of x.
        return y.index_put_(places, updates, adds) if places else y.copy_(updates)

    return Kernel(function)
