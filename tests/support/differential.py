"""Compiled kernels against NumPy on random nodes of ``kernel_draws``."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.backends.native import INDEX
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import is_fused
from tests.support.draws import Draw, Source
from tests.support.kernel_draws import DRAWS
from tests.support.native_kernels import LIBRARIES, expected, forms, kernel_of, threads_of

EXEMPT = {
    "Multinomial": "random numbers: tests/backends/native/test_tables.py",
    "tensorflow.AssignVariableOp": "variables: tests/ops/tensorflow",
    "tensorflow.ReadVariableOp": "variables: tests/ops/tensorflow",
}
"""operations without a draw, and where they are tested"""


def operations() -> list[str]:
    """The full names in the index of the families."""
    with open(INDEX, encoding="ascii") as file:
        return sorted({word for word in file.read().split() if not word.endswith(":")})


def drawn(operation: str, seed: int) -> Draw:
    """A node of an operation: the same for the same seed."""
    rng = Source(np.random.PCG64([zlib.crc32(operation.encode()), seed]))
    with np.errstate(all="ignore"):
        for _ in range(50):
            # Some attributes that are drawn apart do not fit together.
            with suppress(ShapeError):
                draw = DRAWS[operation](rng, operation)
                assert draw.node
                return draw
    raise AssertionError(f"no draw of {operation} is valid")


def difference(operation: str, seed: int, seen: Counter[str] | None = None) -> str | None:
    """What compiled kernels compute of that draw beyond its bound, None if nothing. ``seen`` counts
    the operations that a kernel was there for."""
    draw = drawn(operation, seed)
    with np.errstate(all="ignore"):
        try:
            inputs = [draw.inputs[int(v.name[1:])] if v else None for v in draw.node.inputs]
            wanted: Any = values_of(draw, inputs)
        except Exception as error:  # which the compiled kernel must raise as well
            wanted = error
        checks = None
        for library in LIBRARIES:
            backend, kernel = NativeBackend(library), kernel_of(draw.node, library)
            if kernel is None:
                continue
            if seen is not None:
                seen[operation] += 1
            if isinstance(wanted, Exception):
                try:
                    kernel.function(*inputs)
                except type(wanted):
                    continue
                return f"{library.level}: no {wanted!r}"
            checks = checks or [compared(draw, i, wanted) for i in range(len(wanted))]
            try:
                for how, results in every_form(draw, kernel, backend, inputs, wanted, seed):
                    for i, (check, result) in enumerate(zip(checks, results, strict=True)):
                        text = check(result)
                        if text:
                            return f"{library.level}, {how}, output {i}: {text}"
            except Exception as error:
                return f"{library.level}: {error!r:.300}, and NumPy runs"
    return None


def values_of(draw: Draw, inputs: Sequence[Any]) -> Sequence[np.ndarray]:
    if draw.name == "ZipMap":  # a list of maps
        function = draw.node.op.compile(draw.node, [v.type for v in draw.node.inputs]).function
        return [np.array(function(*inputs), object)]
    return expected(draw.node, inputs)


def every_form(
    draw: Draw,
    kernel: Any,
    backend: NativeBackend,
    inputs: Sequence[Any],
    wanted: Sequence[np.ndarray],
    seed: int,
) -> Any:
    """The results of every form of a call, with inputs in an order of memory that follows from the
    seed; by three threads; and of the kernel for shapes that are not known."""
    rng = Source(np.random.PCG64(seed))
    given = [laid_out(rng, x) for x in inputs]
    if draw.name == "ZipMap":
        yield "function", [np.array(kernel.function(*given), object)]
        return
    yield from forms(kernel, inputs, wanted).items()
    with threads_of(backend.library, 3):
        results = kernel.function(*given)
        yield "any layout, three threads", list(map(np.asarray, _listed(results, wanted)))
    if kernel.into is not None and not kernel.layout.contiguous:
        outputs = [laid_out(rng, np.full_like(y, 7), repeats=False) for y in wanted]
        work = np.full(kernel.workspace, 0xA5, np.uint8) if kernel.workspace else None
        function, arguments = kernel.bind(given, outputs, work)
        function(*arguments)
        yield "bound to any layout", outputs
    node = open_node(draw.node)
    if node is None:
        return
    unknown = backend.kernel(node, [v and v.type for v in node.inputs])
    if unknown is not None:
        for arrays in (inputs, given):
            results = unknown.function(*arrays)
            yield "unknown shapes", list(map(np.asarray, _listed(results, wanted)))


def open_node(node: Node) -> Node | None:
    """The node with inputs of unknown dims, but for constants; None for a fused one."""
    if is_fused(node):
        return None
    values = [
        v
        if v is None or v.const is not None or not isinstance(v.type, TensorType)
        else Value(v.name, TensorType(v.type.dtype, (None,) * len(v.type.dims)))
        for v in node.inputs
    ]
    types = [None if v is None else v.type for v in values]
    try:
        results = node.op.infer(types, node.attrs, [v and v.const for v in values])
    except ShapeError:  # that of gates asks for dims, since kernels read where they say
        return None
    outputs = [v and Value(v.name, t) for v, t in zip(node.outputs, results, strict=False)]
    return Node(node.op, values, outputs, node.attrs)


def _listed(results: Any, wanted: Sequence[Any]) -> Any:
    return results if len(wanted) > 1 else (results,)


def laid_out(rng: Source, x: Any, *, repeats: bool = True) -> Any:
    """``x`` in memory of another order: with gaps, backwards, of a larger array, or ``repeats``."""
    if not isinstance(x, np.ndarray) or not x.ndim or rng.chance(0.4):
        return x
    axis, order = int(rng.integers(x.ndim)), rng.permutation(x.ndim)
    backwards = (*[slice(None)] * axis, slice(None, None, -1))
    choice = rng.integers(5)
    if choice == 0:
        return x[backwards].copy()[backwards]
    if choice == 1:
        return x.transpose(order).copy().transpose(np.argsort(order))
    if choice == 2:
        wide = np.empty([n + 3 for n in x.shape], x.dtype)
        inner = wide[tuple(slice(2, 2 + n) for n in x.shape)]
        inner[...] = x
        return inner
    if choice == 3 and repeats and x.shape[axis] > 1 and (x == x[:1]).all():
        return np.broadcast_to(x[:1], x.shape)
    return np.repeat(x, 3, axis)[(*[slice(None)] * axis, slice(1, None, 3))]


def compared(draw: Draw, output: int, wanted: Sequence[np.ndarray]) -> Callable[[Any], str | None]:
    """A function that says what is wrong with a result."""
    want = wanted[output]
    bounds = [None] * len(wanted) if draw.bound is None else draw.bound(draw)
    bound = bounds[output]
    if bound is None:
        return lambda result: _unlike(result, want)
    exact = bound.value if draw.is_formula else draw.wide()[output]
    error = bound.error * (2 if draw.dtype.itemsize == 8 else 1)  # NumPy's has as much
    error = np.broadcast_to(error, want.shape)
    most = float(np.finfo(want.dtype).max) if want.dtype.kind == "f" else 3e38
    with np.errstate(all="ignore"):
        told = np.isfinite(exact) & np.isfinite(error) & (np.abs(exact) + error < most)
        apart = np.abs(bound.value - exact)[told]
        if not (apart <= error[told] + 1e-9 * np.abs(exact[told]) + 1e-12).all():
            return lambda result: f"the bound is of another formula, by {apart.max()}"

    def check(result: Any) -> str | None:
        if (result.dtype, result.shape) != (want.dtype, want.shape):
            return f"{result.dtype}{result.shape} instead of {want.dtype}{want.shape}"
        wide = result.astype(np.float64)
        with np.errstate(all="ignore"):
            wrong = told & ~(np.abs(wide - exact) <= error)
            if draw.specials:
                special = ~np.isfinite(exact)
                wrong |= special & ~((wide == exact) | (np.isnan(wide) & np.isnan(exact)))
        if not wrong.any():
            return None
        at = tuple(np.argwhere(wrong)[0].tolist())
        return f"{wide[at]!r} at {at} is not within {error[at]:.3g} of {exact[at]!r}"

    return check


def _unlike(result: Any, want: np.ndarray) -> str | None:
    if (result.dtype, result.shape) != (want.dtype, want.shape):
        return f"{result.dtype}{result.shape} instead of {want.dtype}{want.shape}"
    if want.dtype == object:
        return (
            None
            if repr(result.tolist()) == repr(want.tolist())
            else f"{result!r:.200} is not {want!r:.200}"
        )
    same = np.equal(result, want) | (np.not_equal(result, result) & np.not_equal(want, want))
    if same.all():
        return None
    at = tuple(np.argwhere(~same)[0].tolist())
    return f"{result[at]!r} at {at} instead of {want[at]!r}"
