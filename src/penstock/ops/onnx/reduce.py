"""Reductions along axes, and cumulative sums and products.

Sums of 16-bit floats accumulate in float32. Sums of contiguous float32 and float64 tensors over
adjacent axes are products with a vector of ones: BLAS is several times faster than NumPy there, and
as accurate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, Dim, RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common import row_reduce
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_float, is_small, wide
from penstock.ops.common.elementwise import in_range, largest, smallest
from penstock.ops.registry import ArrayFunction, operator


class _Form(NamedTuple):
    """The reduction of a shape along axes."""

    axes: tuple[int, ...]  # not negative
    kept: tuple[int, ...]  # the result's shape with keepdims
    final: tuple[int, ...]  # the result's shape as the node declares it
    terms: int  # elements reduced to one
    group: tuple[int, int, int] | None = None
    """the shape (outer, reduced, inner), if the reduction axes are adjacent and the dtype is
    float
    """
    ones: np.ndarray | None = None
    """the vector of ones to sum ``group`` with, unless the reduction is long"""


LONG = 65536  # reduced elements from which on NumPy's pairwise summation is clearly more accurate


def reduction_form(
    shape: tuple[int, ...], dtype: np.dtype, axes: Sequence[int] | None, keepdims: bool
) -> _Form:
    """The form of a reduction over ``axes``; None: all axes. A scalar is treated as rank 1."""
    rank = len(shape)
    taken = tuple(range(rank)) if axes is None else tuple(sorted(rules.normalize_axes(axes, rank)))
    kept = tuple(1 if i in taken else dim for i, dim in enumerate(shape))
    final = kept if keepdims else tuple(d for i, d in enumerate(shape) if i not in taken)
    count = math.prod(shape[i] for i in taken)
    if not rank:
        return _Form((0,), (1,), (), 1)
    # NumPy uses BLAS only for float32 and float64.
    if dtype.kind != "f" or not taken or taken[-1] - taken[0] != len(taken) - 1 or not count:
        return _Form(taken, kept, final, count)
    group = math.prod(shape[: taken[0]]), count, math.prod(shape[taken[-1] + 1 :])
    ones = np.ones(count, dtype) if count <= LONG else None
    return _Form(taken, kept, final, count, group, ones)


Reduce: TypeAlias = Callable[[np.ndarray, _Form, np.ndarray | None], Any]
"""``reduce(x, form, out)`` returns an array of shape ``form.kept``, which is ``out`` if given"""

# Called as (x, axes, dtype, out, keepdims, initial).
_add: Callable[..., RunValue] = np.add.reduce
_multiply: Callable[..., RunValue] = np.multiply.reduce
_maximum: Callable[..., RunValue] = np.maximum.reduce
_minimum: Callable[..., RunValue] = np.minimum.reduce


def _total(x: np.ndarray, form: _Form, out: np.ndarray | None = None) -> np.ndarray:
    """The sum in the dtype of ``x``."""
    if form.group is not None and form.ones is not None and x.flags.c_contiguous:
        before, count, after = form.group
        if after == 1 and before >= row_reduce.MANY:
            return _into(np.matmul(x.reshape(before, count), form.ones).reshape(form.kept), out)
        # For fewer elements, the BLAS call costs more than NumPy's loop.
        if after > 1 and count * after >= 1024:
            sums = np.matmul(form.ones, x.reshape(before, count, after))
            return _into(sums.reshape(form.kept), out)
    return _add(x, form.axes, x.dtype, out, True)


def _into(result: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return result
    np.copyto(out, result, casting="unsafe")
    return out


def _mean(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    result = _total(x, form, out)
    return np.divide(result, x.dtype.type(form.terms), result)


def _integer_mean(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    """The mean of integers, rounded towards zero as integer division; 0 for no elements."""
    # The sum may overflow the dtype though the mean does not.
    dtype = np.dtype(np.uint64 if x.dtype.kind == "u" else np.int64)
    sums = _add(x, form.axes, dtype, None, True)
    count = np.array(form.terms, dtype)
    sums = np.floor_divide(np.subtract(sums, np.fmod(sums, count)), count)
    return sums.astype(x.dtype) if out is None else _into(sums, out)


def _highest(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    if form.group is not None and x.flags.c_contiguous:
        before, count, after = form.group
        if after == 1 and before >= row_reduce.MANY and 1 < count <= row_reduce.SHORT:
            return _into(row_reduce.maxima(x.reshape(before, count)).reshape(form.kept), out)
    least = False if x.dtype.kind == "b" else smallest(x.dtype)
    return _maximum(x, form.axes, None, out, True, least)


def _lowest(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    most = True if x.dtype.kind == "b" else largest(x.dtype)
    return _minimum(x, form.axes, None, out, True, most)


def _multiplied(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    return _multiply(x, form.axes, x.dtype, out, True)


def _absolute_sum(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    return _total(np.absolute(x), form, out)


def _square_sum(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    if form.ones is not None and form.group and form.group[2] == 1 and x.flags.c_contiguous:
        matrix = x.reshape(form.group[:2])
        return _into(np.vecdot(matrix, matrix).reshape(form.kept), out)
    return _total(np.square(x), form, out)


def _then(reduce: Reduce, ufunc: ArrayFunction) -> Reduce:
    """Apply ``ufunc`` to the result of a reduction."""

    def function(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
        result = reduce(x, form, out)
        return ufunc(result, result)

    return function


def _log_sum_exp(x: np.ndarray, form: _Form, out: np.ndarray | None) -> np.ndarray:
    """log(sum(exp(x))), computed relative to the maximum to avoid overflow."""
    peak = _highest(x, form, None)
    # inf - inf would be NaN: infinite maxima are replaced by 0.
    np.copyto(peak, 0, where=np.logical_not(np.isfinite(peak)))
    terms = np.subtract(x, peak)
    result = _total(np.exp(terms, terms), form, out)
    np.log(result, result)
    return np.add(result, peak, result)


class _Reduction(NamedTuple):
    """A reduction of float32 and float64, with variants for other dtypes.

    Without a variant for integers, these are converted to float64 and back. ``native`` reductions
    accept any dtype. ``combine`` computes an integer result of one element from the known elements
    of the input.
    """

    floats: Reduce
    integers: Reduce | None = None
    native: bool = False
    combine: Callable[[tuple[Dim, ...]], Dim] | None = None

    def on(self, dtype: np.dtype) -> tuple[Reduce, np.dtype]:
        """The function for ``dtype``, and the dtype to convert to first."""
        if not self.native and self.integers is not None and not is_float(dtype):
            return self.integers, dtype
        return self.floats, dtype if self.native else wide(dtype)


def _of_known(function: Callable[[tuple[int, ...]], int]) -> Callable[[tuple[Dim, ...]], Dim]:
    def combine(data: tuple[Dim, ...]) -> Dim:
        numbers = rules.all_known(data)
        return function(numbers) if numbers else None

    return combine


_REDUCTIONS = {
    "ReduceSum": _Reduction(_total, _total, combine=_of_known(sum)),
    "ReduceMean": _Reduction(_mean, _integer_mean),
    "ReduceMax": _Reduction(_highest, native=True, combine=_of_known(max)),
    "ReduceMin": _Reduction(_lowest, native=True, combine=_of_known(min)),
    "ReduceProd": _Reduction(_multiplied, _multiplied, combine=rules.dim_product),
    "ReduceL1": _Reduction(_absolute_sum, _absolute_sum),
    "ReduceL2": _Reduction(_then(_square_sum, np.sqrt)),
    "ReduceLogSum": _Reduction(_then(_total, np.log)),
    "ReduceLogSumExp": _Reduction(_log_sum_exp),
    "ReduceSumSquare": _Reduction(_square_sum, _square_sum),
}


def _known_axes(axes: Sequence[int], attrs: Attrs) -> tuple[int, ...] | None:
    """The axes for ``reduction_form``: None for all axes, as an empty list may mean."""
    return tuple(axes) if len(axes) or attrs.get("noop_with_empty_axes") else None


def compile_reduction(node: Node, types: Types) -> Kernel:
    """The NumPy kernel of the reduction that the operation is named after."""
    reduction = _REDUCTIONS[node.op.name]
    keepdims = bool(node.attrs.get("keepdims", 1))
    count = len(node.inputs)
    spelled = rules.known_ints(node, (), 1) if rules.given(node.inputs, 1) else ()
    fixed = None if spelled is None else _known_axes(spelled, node.attrs)
    # Runs mostly repeat shapes, and each form has a vector of ones.
    forms = lru_cache(maxsize=16)(reduction_form)

    def run(*arguments: np.ndarray) -> np.ndarray:
        x = arguments[0]
        out = arguments[count] if len(arguments) > count else None
        axes = fixed
        if spelled is None:
            axes = _known_axes(arguments[1].reshape(-1).tolist(), node.attrs)
        reduce, dtype = reduction.on(x.dtype)
        form = forms(x.shape, dtype, axes, keepdims)
        if not x.ndim:
            x = x.reshape(1)
        target = None if out is None else out.reshape(form.kept)
        if x.dtype == dtype:
            result = reduce(x, form, target)
        else:
            result = reduce(x.astype(dtype), form, None)
            result = _into(result, target) if out is not None else result.astype(x.dtype)
        return out if out is not None else result.reshape(form.final)

    into: ArrayFunction = run
    type_ = rules.tensor(types, 0)
    # With keepdims, reductions can write to the output directly.
    if spelled is not None and type_.static and type_.rank and keepdims:
        assert type_.dtype is not None
        reduce, dtype = reduction.on(type_.dtype)
        if dtype == type_.dtype:
            form = reduction_form(type_.dims, dtype, fixed, keepdims)

            def reduce_into(*arguments: np.ndarray) -> None:
                reduce(arguments[0], form, arguments[-1])

            into = reduce_into

    return Kernel(run, into)


def reduced_type(type_: TensorType, axes: Sequence[int] | None, keepdims: bool) -> TensorType:
    """The type of a reduction over ``axes``; over all if ``None``."""
    if type_.shape is None:
        return TensorType(type_.dtype, () if axes is None and not keepdims else None)
    axes = range(len(type_.shape)) if axes is None else axes
    return TensorType(type_.dtype, rules.reduced_shape(type_.shape, axes, keepdims))


def _any_axes(type_: TensorType, axes: TensorType, attrs: Attrs) -> TensorType:
    """The type of a reduction over unknown axes, whose number may be known."""
    if type_.shape is None:
        return TensorType(type_.dtype)
    if attrs.get("keepdims", 1):
        return TensorType(type_.dtype, tuple(1 if d == 1 else None for d in type_.shape))
    count = axes.shape[0] if axes.shape is not None and len(axes.shape) == 1 else None
    if not isinstance(count, int) or count == 0:
        return TensorType(type_.dtype)
    if count > len(type_.shape):
        raise ShapeError(f"axes has {count} entries, more than the input's rank {len(type_.shape)}")
    return TensorType(type_.dtype, (None,) * (len(type_.shape) - count))


def infer_reduction(combine: Callable[[tuple[Dim, ...]], Dim] | None) -> Infer:
    """Type inference of a reduction, whose results are ``combine`` of elements that are known."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        type_ = rules.tensor(types, 0)
        axes = rules.all_known(rules.ints(types, consts, 1) if rules.given(types, 1) else ())
        if axes is None:
            return (_any_axes(type_, rules.tensor(types, 1), attrs),)
        taken = _known_axes(axes, attrs)
        result = reduced_type(type_, taken, bool(attrs.get("keepdims", 1)))
        data = rules.ints(types, consts, 0, None)
        if combine is None or type_.rank != 1 or taken == () or data is None:
            return (result,)
        cell = in_range(combine(data), type_.dtype)
        return (rules.with_data(result, lambda: (cell,)),)

    return infer


for _name, _reduction in _REDUCTIONS.items():
    _since = 13 if _name == "ReduceSum" else 18
    _infer = infer_reduction(_reduction.combine)
    operator(_name, since=_since, infer=_infer, traits={"total by parameters"})(compile_reduction)


def _infer_cumulative(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = rules.tensor(types, 0)
    axis = rules.ints(types, consts, 1)
    if type_.rank is not None and axis is not None:
        _axis(axis, type_.rank)
    return (TensorType(type_.dtype, type_.shape),)


def _axis(values: Sequence[Dim], rank: int) -> int:
    if len(values) != 1:
        raise ShapeError(f"axis must have exactly one element, not {list(values)}")
    axis = values[0]
    return rules.normalize_axis(axis, rank) if isinstance(axis, int) else 0


@operator("CumSum", since=11, infer=_infer_cumulative, traits={"exact"})
@operator("CumProd", since=26, infer=_infer_cumulative, traits={"exact"})
def cumulative(node: Node, types: Types) -> Kernel:
    function = np.add if node.op.name == "CumSum" else np.multiply
    exclusive, reverse = node.attrs.get("exclusive", 0), node.attrs.get("reverse", 0)

    def run(x: np.ndarray, axis: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        place = _axis(axis.reshape(-1).tolist(), x.ndim)
        out = np.empty(x.shape, x.dtype) if out is None else out
        source, target = np.moveaxis(x, place, 0), np.moveaxis(out, place, 0)
        if reverse:
            source, target = source[::-1], target[::-1]
        if exclusive:
            target[:1] = function.identity
            source, target = source[:-1], target[1:]
        # A 16-bit running sum stops growing once its terms are below half a unit in the last place.
        if is_small(x.dtype):
            np.copyto(target, function.accumulate(source, 0, FLOAT32), casting="unsafe")
        else:
            function.accumulate(source, 0, x.dtype, target)
        return out

    return Kernel(run, run)
