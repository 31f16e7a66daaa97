"""Pad and CenterCropPad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import MAX_DATA, STRING, Dim, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.specialize import Routine, Tensors, by_shape
from penstock.ops.registry import operator


def zero(dtype: np.dtype | None) -> np.ndarray:
    """0, False or the empty string, as a tensor without dims."""
    return np.array("", object) if dtype == STRING else np.zeros((), dtype)


class _Borders(NamedTuple):
    """The sources of the parts of a padded tensor, for one shape of the input."""

    shape: tuple[int, ...]
    source: rules.Index  # the kept part of the input
    center: rules.Index  # its place in the output
    borders: Sequence[tuple[rules.Index, rules.Index | None]]
    """the other parts of the output in the order in which they are filled, each with the part of
    the output to copy, or None for the constant
    """


def _borders(dims: Sequence[int], pads: Sequence[tuple[int, int]], mode: str) -> _Borders:
    shape = tuple(d + before + after for d, (before, after) in zip(dims, pads, strict=True))
    if any(d < 0 for d in shape):
        raise ShapeError(f"negative pads remove more elements than shape {list(dims)} has")
    source, center = [], []
    for d, (before, after) in zip(dims, pads, strict=True):
        first, start = max(-before, 0), max(before, 0)
        kept = max(d - first - max(-after, 0), 0)
        source.append(slice(first, first + kept))
        center.append(slice(start, start + kept))
    borders: list[tuple[rules.Index, rules.Index | None]] = []
    for i, (inner, size) in enumerate(zip(center, shape, strict=True)):
        # Constant borders are each filled once. Other modes copy borders axis by axis, so that
        # corners are copied from the borders of earlier axes.
        earlier = center[:i] if mode == "constant" else [slice(None)] * i
        later = [slice(None)] * (len(dims) - i - 1) if mode == "constant" else center[i + 1 :]
        for part in (slice(0, min(inner.start, size)), slice(inner.stop, size)):
            if part.start >= part.stop:
                continue
            mirror = None if mode == "constant" else _mirrored(part, inner, mode)
            origin = None if mirror is None else (*earlier, mirror, *later)
            borders.append(((*earlier, part, *later), origin))
    return _Borders(shape, tuple(source), tuple(center), borders)


def _mirrored(part: slice, inner: slice, mode: str) -> slice | np.ndarray:
    """The positions along one axis that are copied to ``part``, which lies outside ``inner``."""
    n = inner.stop - inner.start
    if n == 0:
        raise ShapeError(f"mode {mode!r} cannot pad an axis of dim 0")
    if mode == "edge":
        nearest = inner.start if part.start < inner.start else inner.stop - 1
        return slice(nearest, nearest + 1)
    offset = np.arange(part.start, part.stop) - inner.start
    if mode == "wrap":
        return inner.start + offset % n
    # Reflection does not repeat the border element: its period is 2 (n - 1).
    period = max(2 * (n - 1), 1)
    offset %= period
    return inner.start + np.minimum(offset, period - offset) if n > 1 else inner.start + offset


def _fill(x: np.ndarray, parts: _Borders, value: np.ndarray | None, out: np.ndarray) -> None:
    filling = zero(x.dtype) if value is None else rules.one_element(value, "constant_value")
    out[parts.center] = x[parts.source]
    for part, source in parts.borders:
        out[part] = filling if source is None else out[source]


def _mode(attrs: Attrs) -> str:
    return rules.choice(attrs, "mode", "constant", ("constant", "reflect", "edge", "wrap"))


def _by_axis(rank: int, pads: Sequence[Dim], axes: Sequence[int] | None) -> list[tuple[Dim, Dim]]:
    """The pads before and after each axis."""
    axes = range(rank) if axes is None else axes
    if len(pads) != 2 * len(axes):
        raise ShapeError(
            f"pads has {len(pads)} entries for {len(axes)} axes: it needs two per axis"
        )
    result: list[tuple[Dim, Dim]] = [(0, 0)] * rank
    for i, axis in enumerate(axes):
        result[rules.normalize_axis(axis, rank)] = (pads[i], pads[len(axes) + i])
    return result


def _infer_pad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    mode = _mode(attrs)
    if x.shape is None:
        return (TensorType(x.dtype),)
    rank = len(x.shape)
    axes: Sequence[int] | None = None
    if rules.given(types, 3):
        axes = rules.all_known(rules.ints(types, consts, 3))
        if axes is None:
            return (TensorType(x.dtype, (None,) * rank),)
    pads = rules.ints(types, consts, 1, 2)
    by_axis = _by_axis(rank, pads or (None,) * (2 * (rank if axes is None else len(axes))), axes)
    dims: list[Dim] = []
    for dim, (before, after) in zip(x.shape, by_axis, strict=True):
        if before == 0 and after == 0:
            dims.append(dim)
            continue
        numbers = rules.all_known((dim, before, after))
        dims.append(None if numbers is None else sum(numbers))
    if True in [isinstance(d, int) and d < 0 for d in dims]:
        raise ShapeError(f"pads {list(pads or ())} remove more than shape {list(x.shape)} has")
    type_ = TensorType(x.dtype, tuple(dims))
    if not rank:
        return (type_,)
    return (rules.with_data(type_, lambda: _padded_data(x, by_axis[0], mode, consts)),)


def _padded_data(x: TensorType, pads: tuple[Dim, Dim], mode: str, consts: Consts) -> Shape | None:
    widths = rules.all_known(pads)
    if x.data is None or widths is None or mode != "constant":
        return None
    before, after = widths
    if before < 0 or after < 0 or len(x.data) + before + after > MAX_DATA:
        return None
    value: Dim = 0
    if len(consts) > 2:
        value = None if consts[2] is None else int(rules.one_element(consts[2], "constant_value"))
    return (*[value] * before, *x.data, *[value] * after)


def pad_widths(dims: Sequence[int], consts: Consts) -> list[tuple[int, int]]:
    """The constant widths of a Pad, before and after each axis."""
    _, widths, _, axes = rules.pad_with_none(consts, 4)
    by_axis: Any = _by_axis(
        len(dims), widths.reshape(-1).tolist(), None if axes is None else axes.reshape(-1).tolist()
    )
    return by_axis


def padded_places(dims: Sequence[int], attrs: Attrs, consts: Consts) -> list[np.ndarray]:
    """For each axis of a Pad with constant pads, the input positions that the output copies."""
    by_axis = pad_widths(dims, consts)
    return [
        _padded(np.arange(n), pads, _mode(attrs)) for n, pads in zip(dims, by_axis, strict=True)
    ]


def _padded(x: np.ndarray, pads: tuple[int, int], mode: str) -> np.ndarray:
    parts = _borders(x.shape, [pads], mode)
    out = np.empty(parts.shape, x.dtype)
    _fill(x, parts, None, out)
    return out


@operator(
    "Pad", since=11, infer=_infer_pad, moves=True, strings=True, traits={"total by parameters"}
)
@by_shape(arity=(4, 1), values=(1, 3), widen=False)
def pad(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    dims = rules.tensor(inputs, 0).dims
    parts = _borders(dims, pad_widths(dims, consts), _mode(node.attrs))
    return Routine(lambda x, widths, value, axes, out: _fill(x, parts, value, out))


def _infer_center_crop_pad(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype),)
    dims, axes = list(x.shape), attrs.get("axes")
    axes = range(len(dims)) if axes is None else rules.normalize_axes(axes, len(dims))
    target = rules.ints(types, consts, 1) or (None,) * len(axes)
    if len(target) != len(axes) or any(isinstance(d, int) and d < 0 for d in target):
        raise ShapeError(
            f"shape {list(target)} must have {len(axes)} entries, none of them negative"
        )
    for axis, size in zip(axes, target, strict=True):
        dims[axis] = size
    return (TensorType(x.dtype, tuple(dims)),)


@operator("CenterCropPad", since=18, infer=_infer_center_crop_pad, strings=True, traits={"exact"})
@by_shape(values=(1,), widen=False)
def center_crop_pad(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    dims = rules.tensor(inputs, 0).dims
    missing = [b - a for a, b in zip(dims, rules.tensor(outputs, 0).dims, strict=True)]
    # Half of the difference, rounded towards zero, is padded or cropped at the beginning.
    pads = [(int(n / 2), n - int(n / 2)) for n in missing]
    parts = _borders(dims, pads, "constant")
    return Routine(lambda x, target, out: _fill(x, parts, None, out))
