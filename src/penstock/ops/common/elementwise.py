"""Elementwise kernels: single NumPy ufuncs, and formulas of several ufuncs.

A formula runs block by block, so that its intermediate results stay in the cache, its scratch
memory is bounded, and 16-bit floats are widened to float32 once and rounded once.

Constants of formulas are arrays of rank 0, which ufuncs accept faster than scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np

from penstock.core.types import MAX_DATA, Dim, RunValue, TensorType, Type
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common.dtypes import is_float, is_small, wide
from penstock.ops.common.shape_rules import broadcast_shapes, ints, same_type, tensor, with_data
from penstock.ops.registry import ArrayFunction, Compile


def _clip_function() -> ArrayFunction:
    try:
        from numpy._core import umath

        return umath.clip  # type: ignore[attr-defined]
    except (ImportError, AttributeError):  # a NumPy that has it elsewhere
        return lambda x, low, high, out=None: np.clip(x, low, high, out=out)


clip = _clip_function()
"""The ufunc behind ``np.clip``, without the overhead of the Python function; with constant bounds
it is several times faster than ``np.maximum`` and ``np.minimum`` with scalars."""

BLOCK = 32768  # elements of a block: a formula's five float32 arrays of it take 640 KiB

Body: TypeAlias = Callable[..., RunValue]
"""``body(*inputs, out, *scratch)``, all of one dtype. ``out`` may be one of the inputs: once the
body has written to it, it reads no input, except elementwise while writing."""


def maximum(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """``np.maximum`` with a positional ``out``, which NumPy deprecates for this ufunc."""
    return np.maximum(a, b, out=out)


def minimum(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    return np.minimum(a, b, out=out)


def plain_sigmoid(x: np.ndarray) -> np.ndarray:
    """``1 / (1 + exp(-x))``, computed as it stands: exp may overflow."""
    return 1 / (1 + np.exp(-x))


def typed_scalar(value: RunValue, dtype: np.dtype) -> np.ndarray:
    """A constant of a formula."""
    return np.array(value, dtype)


def largest(dtype: np.dtype) -> np.ndarray:
    """The largest value of ``dtype``, as a constant; infinity for floats."""
    return typed_scalar(np.inf if is_float(dtype) else np.iinfo(dtype).max, dtype)


def smallest(dtype: np.dtype) -> np.ndarray:
    return typed_scalar(-np.inf if is_float(dtype) else np.iinfo(dtype).min, dtype)


def ufunc(function: ArrayFunction, inputs: int) -> Kernel:
    """The kernel of a NumPy ufunc, whose last positional argument is its output."""
    return Kernel(function, function, inplace=tuple(range(inputs)))


def elementwise(function: ArrayFunction, types: Types, inputs: int = 1) -> Kernel:
    """The kernel of a ufunc; in blocks of float32 for large bfloat16 tensors, which is faster."""
    input_types = [tensor(types, i) for i in range(inputs)]
    if all(t.static for t in input_types) and max(t.elements for t in input_types) > 4096:
        dtype = input_types[0].dtype
        assert dtype is not None
        # The kind of the types that ml_dtypes adds.
        if is_small(dtype) and dtype.kind == "V":
            return formula(lambda _: function, types, inputs=inputs)
    return ufunc(function, inputs)


def compile_elementwise(function: ArrayFunction, inputs: int = 1) -> Compile:
    """The compile function of an operation that is a single ufunc."""
    return lambda node, types: elementwise(function, types, inputs)


def first_only(kernel: Kernel) -> Kernel:
    """``kernel`` with a second input, which is ignored."""
    inner = kernel.into
    assert inner is not None

    def function(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        return kernel.function(x)

    def into(x: np.ndarray, _: np.ndarray, *rest: np.ndarray) -> None:
        inner(x, *rest)

    return Kernel(function, into, inplace=(0,), workspace=kernel.workspace)


def formula(
    make: Callable[[np.dtype], Body], types: Types, *, inputs: int = 1, scratch: int = 0
) -> Kernel:
    """The kernel of a formula over floats, with ``inputs`` broadcast against one another.

    ``make(dtype)`` returns its ``Body`` for float32 or float64, which takes ``scratch`` scratch
    arrays. The output has the dtype of input 0.
    """
    bodies = cache(make)

    def run(*arguments: np.ndarray) -> np.ndarray:
        values = arguments[:inputs]
        out, work = (*arguments[inputs:], None, None)[:2]
        dtype = values[0].dtype
        if out is None:
            shape = values[0].shape if inputs == 1 else np.broadcast(*values).shape
            out = np.empty(shape, dtype)
        computed = wide(dtype)
        body = bodies(computed)
        if out.size > BLOCK or any(v.dtype != computed for v in values):
            in_blocks(body, values, out, computed, scratch, work)
        elif not scratch:
            body(*values, out)
        elif out.ndim == 0:  # rows of scratch would be no arrays
            body(*values, out.reshape(1), *_rows(scratch, (1,), computed, work))
        else:
            body(*values, out, *_rows(scratch, out.shape, computed, work))
        return out

    into: Callable[..., RunValue] = run
    workspace = 0
    input_types = [tensor(types, i) for i in range(inputs)]
    shape = broadcast_shapes([type_.shape for type_ in input_types])
    result = TensorType(input_types[0].dtype, shape)
    if all(type_.static for type_ in input_types):
        assert result.dtype is not None
        computed = wide(result.dtype)
        size = math.prod(result.dims)
        workspace = scratch * min(size, BLOCK) * computed.itemsize
        if size <= BLOCK and all(type_.dtype == computed for type_ in input_types):
            into = _bound(bodies(computed), result.dims, computed, inputs, scratch) or run
    return Kernel(run, into, inplace=tuple(range(inputs)), workspace=workspace)


def _bound(
    body: Body, dims: tuple[int, ...], dtype: np.dtype, inputs: int, scratch: int
) -> Body | None:
    """A formula over arrays of one block without conversion: the body, with scratch memory."""
    if not scratch:
        return body
    if not dims or 0 in dims:
        return None
    rows = (scratch, *dims)

    def into(*arguments: np.ndarray) -> None:
        body(*arguments[:-1], *arguments[-1].view(dtype).reshape(rows))

    def unary(x: np.ndarray, out: np.ndarray, work: np.ndarray) -> None:
        body(x, out, work.view(dtype).reshape(dims))

    return unary if scratch == 1 and inputs == 1 else into


def _rows(
    count: int, shape: tuple[int, ...], dtype: np.dtype, work: np.ndarray | None
) -> np.ndarray:
    """``count`` scratch arrays as the rows of one, in the workspace if given."""
    rows = (count, *shape)
    return np.empty(rows, dtype) if work is None else work.view(dtype).reshape(rows)


def in_blocks(
    body: Body,
    values: Sequence[np.ndarray],
    out: np.ndarray,
    dtype: np.dtype,
    scratch: int,
    work: np.ndarray | None = None,
) -> None:
    """Run ``body`` on one-dimensional blocks of ``dtype``. NumPy's iterator broadcasts, follows
    strides, and converts dtypes block by block."""
    # Scratch memory is shared by all blocks; only the last one is shorter.
    rows = _rows(scratch, (min(out.size, BLOCK),), dtype, work) if scratch else ()
    access: Any = [["readonly"]] * len(values) + [["writeonly"]]
    with np.nditer(
        [*values, out],
        ["external_loop", "buffered", "zerosize_ok"],
        access,
        [dtype] * len(access),
        casting="unsafe",
        buffersize=BLOCK,
    ) as blocks:
        for arrays in blocks:
            n = arrays[-1].size
            body(*arrays, *(rows if n == BLOCK else [row[:n] for row in rows]))


def in_range(cell: Dim, dtype: np.dtype | None) -> Dim:
    """An element, or None if it overflows, as nothing can be planned by its wrapped value."""
    if dtype is None or dtype.kind not in "iu" or not isinstance(cell, int):
        return cell
    info = np.iinfo(dtype)
    return cell if info.min <= cell <= info.max else None


def infer_unary(compute: Callable[[int], int]) -> Infer:
    """``infer`` of an operation with one input that computes known integer contents."""
    return carrying(same_type, lambda a: compute(a) if isinstance(a, int) else None)


def carrying(
    infer: Callable[[Types, Attrs, Consts], tuple[TensorType]], compute: Callable[..., Dim]
) -> Infer:
    """``infer`` with contents computed from those of the inputs: shape arithmetic.

    ``compute`` takes an element of each input, and returns ``None`` if the result is unknown. A
    name among the elements is that of a dim, which is never negative.
    """

    def inferred(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        (type_,) = infer(types, attrs, consts)
        if type_.dtype is None or type_.dtype.kind not in "biu":
            return (type_,)

        def contents() -> tuple[Dim, ...] | None:
            columns = []
            for i in range(len(types)):
                dtype = tensor(types, i).dtype
                column = ints(types, consts, i, None)
                if column is None or dtype is None or dtype.kind not in "biu":
                    return None
                columns.append(column)
            n = max(map(len, columns)) if all(columns) else 0
            if n > MAX_DATA or any(len(column) not in (1, n) for column in columns if n):
                return None
            cells = (compute(*[c[i % len(c)] for c in columns]) for i in range(n))
            return tuple([in_range(cell, type_.dtype) for cell in cells])

        return (with_data(type_, contents),)

    return inferred
