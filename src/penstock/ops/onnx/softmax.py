"""Softmax, LogSoftmax and Hardmax. 16-bit floats are computed in float32 and rounded once.

Along the last axis, blocks of rows are processed, so that float32 copies stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.types import RunValue, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Trait, Types
from penstock.ops.common import row_reduce
from penstock.ops.common.dtypes import wide
from penstock.ops.common.shape_rules import normalize_axis, tensor
from penstock.ops.onnx.shape import flatten_axis
from penstock.ops.registry import operator

BLOCK = 1 << 17  # elements, in whole rows
# Called as (x, axis, dtype, out, keepdims, initial): keywords cost as much as a short sum.
_add: Callable[..., RunValue] = np.add.reduce
_maximum: Callable[..., RunValue] = np.maximum.reduce

Normalize: TypeAlias = Callable[[np.ndarray, int, np.ndarray], None]
"""``normalize(x, axis, out)`` on float32 or float64, where ``out`` may be ``x``"""


def _highest(x: np.ndarray, axis: int) -> np.ndarray:
    """The maxima along ``axis`` with keepdims; NaN is propagated."""
    if x.ndim == 2 and axis == 1 and x.flags.c_contiguous:
        return row_reduce.maxima(x)
    return _maximum(x, axis, None, None, True, -math.inf)


def _total(x: np.ndarray, axis: int) -> np.ndarray:
    """The sums along ``axis`` with keepdims."""
    if x.ndim == 2 and axis == 1:
        return row_reduce.sums(x)
    return _add(x, axis, None, None, True)


def _softmax(x: np.ndarray, axis: int, out: np.ndarray) -> None:
    # After subtracting the maximum, exp does not overflow.
    np.subtract(x, _highest(x, axis), out)
    np.exp(out, out)
    np.divide(out, _total(out, axis), out)


def _log_softmax(x: np.ndarray, axis: int, out: np.ndarray) -> None:
    np.subtract(x, _highest(x, axis), out)
    np.subtract(out, np.log(_total(np.exp(out), axis)), out)


def _hardmax(x: np.ndarray, axis: int, out: np.ndarray) -> None:
    places = x.argmax(axis, keepdims=True)
    out[...] = 0
    np.put_along_axis(out, places, 1, axis)


def along_axis(normalize: Normalize, x: np.ndarray, axis: int, out: np.ndarray) -> None:
    """Apply ``normalize`` to floats of any dtype and layout; ``axis`` is not negative."""
    if not x.size:
        return
    dtype = wide(x.dtype)
    # Non-contiguous memory is handled the same way, so that sums do not depend on the layout.
    target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
    if axis == x.ndim - 1:
        width = x.shape[-1]
        _rows(normalize, x.reshape(-1, width), target.reshape(-1, width), dtype)
    elif x.dtype == dtype:
        normalize(x, axis, target)
    else:
        result = x.astype(dtype)
        normalize(result, axis, result)
        np.copyto(target, result, casting="unsafe")
    if target is not out:
        np.copyto(out, target)


def _rows(normalize: Normalize, x: np.ndarray, out: np.ndarray, dtype: np.dtype) -> None:
    step = max(BLOCK // x.shape[1], 1)
    if len(x) <= step and x.dtype == dtype:
        normalize(x, 1, out)
        return
    for start in range(0, len(x), step):
        block, target = x[start : start + step], out[start : start + step]
        if block.dtype == dtype:
            normalize(block, 1, target)
        else:
            block = block.astype(dtype)
            normalize(block, 1, block)
            np.copyto(target, block, casting="unsafe")


SINGLE_AXIS = 13
"""since this version, they normalize over one axis; before, over all axes from ``axis`` on"""

_NORMALIZE: Mapping[str, Normalize]
_NORMALIZE = {"Softmax": _softmax, "LogSoftmax": _log_softmax, "Hardmax": _hardmax}


def infer_along_axis(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = tensor(types, 0)
    if type_.rank is not None:
        normalize_axis(attrs.get("axis", -1), type_.rank)
    return (type_.without_data(),)


def _infer_flattened(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = tensor(types, 0)
    if type_.rank is not None:
        flatten_axis(attrs, type_.rank)
    return (type_.without_data(),)


def _compile(node: Node, types: Types) -> Kernel:
    """Before version 13, ``axis`` and all following axes are flattened."""
    normalize, attrs, flattens = _NORMALIZE[node.op.name], node.attrs, node.op.since < 13
    node.op.infer(types, attrs, ())
    axis = attrs.get("axis", -1)

    def run(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        out = np.empty(x.shape, x.dtype) if out is None else out
        if x.ndim and not flattens:
            along_axis(normalize, x, normalize_axis(axis, x.ndim), out)
        elif x.size:
            rows = math.prod(x.shape[: flatten_axis(attrs, x.ndim)]) if flattens else 1
            flat = x.reshape(rows, -1)
            target = out if out.flags.c_contiguous else np.empty(x.shape, x.dtype)
            along_axis(normalize, flat, 1, target.reshape(flat.shape))
            if target is not out:
                np.copyto(out, target)
        return out

    return Kernel(run, run, inplace=(0,))


_TOTAL: Trait = "total by parameters"
_TRAITS: Sequence[frozenset[Trait]]
_TRAITS = (frozenset({"begins", _TOTAL}), frozenset({_TOTAL}), frozenset({"jumps"}))
for _name, _traits in zip(_NORMALIZE, _TRAITS, strict=True):
    operator(_name, since=13, infer=infer_along_axis, traits=_traits)(_compile)
    operator(_name, since=1, version=12, infer=_infer_flattened, traits=_traits)(_compile)
