"""ArgMax, ArgMin and TopK.

NaN is the extremum for both ArgMax and ArgMin, unless the attribute ``skip_nan`` is set, and
greater than all other values for TopK.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import FLOAT32, INT64, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import is_small
from penstock.ops.common.shape_rules import normalize_axis, one_element, one_integer, tensor
from penstock.ops.onnx.reduce import reduced_type
from penstock.ops.registry import array_operator, operator


def infer_arg(types: Types, attrs: Attrs, consts: Consts) -> Sequence[TensorType]:
    """The type of the places of extremes along an axis."""
    type_ = tensor(types, 0)
    axis = attrs.get("axis", 0)
    if type_.rank == 0:
        normalize_axis(axis, 1)
        return (TensorType(INT64, ()),)
    result = reduced_type(type_, (axis,), bool(attrs.get("keepdims", 1)))
    return (TensorType(INT64, result.shape),)


@operator("ArgMax", infer=infer_arg)
@operator("ArgMin", infer=infer_arg)
def arg_extreme(node: Node, types: Types) -> Kernel:
    method = getattr(np.ndarray, node.op.name.lower())
    along = node.attrs.get("axis", 0)
    keepdims = bool(node.attrs.get("keepdims", 1))
    last = bool(node.attrs.get("select_last_index", 0))
    skips = bool(node.attrs.get("skip_nan", 0))
    infer_arg(types, node.attrs, ())

    def run(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        axis = normalize_axis(along, max(x.ndim, 1))
        if not x.ndim:
            zero = np.zeros((), INT64) if out is None else out
            zero[...] = 0
            return zero
        if not x.shape[axis]:
            raise ShapeError(f"axis {axis} of shape {x.shape} must not have dim 0")
        # NumPy returns the first of equal elements; on a reversed axis, this is the last one.
        if last:
            x = np.flip(x, axis)
        if skips and x.dtype.kind == "f":
            x = _without_nan(x, node.op.name)
        result = method(x, axis, out, keepdims=keepdims)
        return np.subtract(x.shape[axis] - 1, result, out) if last else result

    return Kernel(run, run)


def _without_nan(x: np.ndarray, name: str) -> np.ndarray:
    """Replace NaN, and infinity of the wrong sign, by the number that TensorFlow starts with."""
    info = np.finfo(x.dtype)
    result: np.ndarray = np.fmax(x, info.min) if name == "ArgMax" else np.fmin(x, info.max)
    return result


def _infer_top_k(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = tensor(types, 0)
    if type_.shape is None:
        return TensorType(type_.dtype), TensorType(INT64)
    if not type_.shape:
        raise ShapeError("the input of TopK must have rank 1 or more")
    axis = normalize_axis(attrs.get("axis", -1), len(type_.shape))
    k, size = one_integer(types, consts, 1, "K"), type_.shape[axis]
    if isinstance(k, int) and (k < 0 or (isinstance(size, int) and k > size)):
        raise ShapeError(f"K is {k}: it must be from 0 to {size}, the dim of axis {axis}")
    shape = (*type_.shape[:axis], k, *type_.shape[axis + 1 :])
    return TensorType(type_.dtype, shape), TensorType(INT64, shape)


def _top_places(x: np.ndarray, k: int, largest: bool) -> np.ndarray:
    """The indices of the ``k`` largest (or smallest) elements along the last axis, in order. Equal
    elements are ordered by index, and NaN is greater than all other values."""
    n = x.shape[-1]
    if is_small(x.dtype):
        x = x.astype(FLOAT32)
    if x.dtype.itemsize > 4 or x.size <= 64:
        # A stable descending sort is a stable ascending sort of the reversed axis, reversed.
        if largest:
            return (n - 1 - np.argsort(x[..., ::-1], -1, kind="stable")[..., ::-1])[..., :k]
        return np.argsort(x, -1, kind="stable")[..., :k]
    # Pack each element, as an integer, above its index. The keys are distinct and contain the
    # indices, so that NumPy's vectorized partition and sort can be used, which are not stable.
    keys = ordered_integers(x).astype(np.int64)
    if largest:
        np.invert(keys, keys)
    np.left_shift(keys, 32, keys)
    np.bitwise_or(keys, np.arange(n), keys)
    if k < n:
        keys = np.partition(keys, k, -1)[..., :k]
    checkpoint()
    keys.sort(-1)
    return np.bitwise_and(keys, 0xFFFFFFFF, keys)


def ordered_integers(x: np.ndarray) -> np.ndarray:
    """Map ``x`` to integers of at most 32 bits with the same order."""
    if x.dtype == np.uint32:
        # Inverting the highest bit maps unsigned to signed order.
        return np.bitwise_xor(x, np.uint32(1 << 31)).view(np.int32)
    if x.dtype != FLOAT32:
        return x
    bits = np.add(x, np.float32(0)).view(np.int32)  # -0 becomes 0
    np.copyto(bits, np.int32(0x7FFFFFFF), where=np.isnan(x))
    # The order of negative floats is that of their inverted magnitudes.
    flips = np.right_shift(bits, 31)
    np.bitwise_and(flips, np.int32(0x7FFFFFFF), flips)
    return np.bitwise_xor(bits, flips, bits)


@array_operator("TopK", since=10, infer=_infer_top_k, fills=True, traits={"jumps"})
def top_k(
    x: np.ndarray,
    k: np.ndarray,
    values: np.ndarray | None = None,
    places: np.ndarray | None = None,
    *,
    axis: int = -1,
    largest: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The result is always sorted, which is valid for ``sorted=0`` too."""
    axis = normalize_axis(axis, x.ndim)
    count = int(one_element(k, "K"))
    if not 0 <= count <= x.shape[axis]:
        raise ShapeError(
            f"K is {count}: it must be from 0 to {x.shape[axis]}, the dim of axis {axis}"
        )
    top = np.moveaxis(_top_places(np.moveaxis(x, axis, -1), count, bool(largest)), -1, axis)
    chosen = np.take_along_axis(x, top, axis)
    if values is not None:
        np.copyto(values, chosen)
    if places is not None:
        np.copyto(places, top)
    return chosen, np.ascontiguousarray(top)
