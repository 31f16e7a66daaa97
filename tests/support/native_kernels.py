"""A node on compiled kernels, against the NumPy kernel of the same node: in every form of a call, for
every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend, is_reproducible
from penstock.core.types import TensorType
from penstock.host import native
from penstock.host.native import LEVELS, NativeLibrary, load_level
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.layout import RuntimeArray
from penstock.ir.op import Op
from penstock.ops.registry import find

LIBRARIES = [library for library in map(load_level, LEVELS) if library is not None]

needs_reproducible = pytest.mark.skipif(
    not is_reproducible(native.library()),
    reason="reproducible=True needs kernels for x86-64-v3 or -v4",
)

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="there are no compiled kernels")


def node_of(
    name: str | Op,
    inputs: Sequence[Any],
    constants: Sequence[int] = (),
    outputs: int = 1,
    domain: str = "",
    version: int = 26,
    **attrs: Any,
) -> Node:
    """A node of operation ``name``, or of an operation in no table. ``inputs`` are arrays, or None for those left out; those whose
    indices are in ``constants`` are constants."""
    op = find(name, domain, version) if isinstance(name, str) else name
    assert op is not None
    types = [None if x is None else TensorType(x.dtype, x.shape) for x in inputs]
    values = []
    for i, (x, type_) in enumerate(zip(inputs, types, strict=True)):
        const = x if i in constants else None
        values.append(None if type_ is None else Value(f"x{i}", type_, const=const))
    consts = [None if value is None else value.const for value in values]
    results = op.infer(types, attrs, consts)
    made = [Value(f"y{i}", type_) for i, type_ in enumerate(results[:outputs])]
    return Node(op, values, made, attrs)


def kernel_of(node: Node, library: NativeLibrary, precision: str = "float32") -> Kernel | None:
    """The compiled kernel of ``node``, None if there is none."""
    types = [None if value is None else value.type for value in node.inputs]
    return NativeBackend(library, precision=precision).kernel(node, types)


def expected(node: Node, inputs: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """What NumPy's kernel computes."""
    types = [None if value is None else value.type for value in node.inputs]
    with np.errstate(all="ignore"):
        result = node.op.compile(node, types).function(*inputs)
    return tuple(map(np.asarray, result if len(node.outputs) > 1 else (result,)))


def strided(x: Any) -> Any:
    """``x`` with gaps between its elements."""
    if not isinstance(x, np.ndarray) or not x.ndim:
        return x
    wide = np.repeat(x, 2, axis=-1)
    return wide[..., ::2]


def check(node: Node, inputs: Sequence[Any], tolerance: Mapping[str, float] | None = None) -> None:
    """Compare the results of ``node`` on compiled kernels with NumPy's: bit by bit, or within the
    ``tolerance`` of ``np.testing.assert_allclose``."""
    assert LIBRARIES
    wanted = expected(node, inputs)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None, f"no compiled kernel for {node.op.name}"
        for how, results in forms(kernel, inputs, wanted).items():
            where = f"{node.op.name}, {library.level}, {how}"
            for result, want in zip(results, wanted, strict=True):
                assert (result.dtype, result.shape) == (want.dtype, want.shape), where
                if tolerance is None or want.dtype.kind not in "fc":
                    np.testing.assert_array_equal(result, want, where)
                else:
                    np.testing.assert_allclose(result, want, **tolerance, err_msg=where)


def check_within(
    node: Node,
    inputs: Sequence[Any],
    exact: np.ndarray,
    bound: np.ndarray | float,
    libraries: Sequence[NativeLibrary] = LIBRARIES,
    precision: str = "float32",
) -> None:
    """Compare the result of ``node`` on compiled kernels, in every form of a call, with the ``exact``
    one: none may be further from it than ``bound``, and what is not finite must be equal."""
    assert libraries
    wanted = expected(node, inputs)
    finite = np.isfinite(exact)
    for library in libraries:
        kernel = kernel_of(node, library, precision)
        assert kernel is not None, f"no compiled kernel for {node.op.name}"
        for how, (result, *_) in forms(kernel, inputs, wanted).items():
            where = f"{node.op.name}, {library.level}, {how}"
            np.testing.assert_array_equal(result[~finite], exact[~finite], where)
            errors = np.abs(result[finite].astype(np.float64) - exact[finite])
            assert (errors <= np.broadcast_to(bound, exact.shape)[finite]).all(), where


def check_threads(
    node: Node,
    inputs: Sequence[Any],
    libraries: Sequence[NativeLibrary] = LIBRARIES,
    precision: str = "float32",
) -> None:
    """Compare, bit by bit, the results of ``node`` on compiled kernels by one thread and by three."""
    for library in libraries:
        kernel = kernel_of(node, library, precision)
        assert kernel is not None
        alone = kernel.function(*inputs)
        with threads_of(library, 3):
            np.testing.assert_array_equal(kernel.function(*inputs), alone, library.level)


def forms(
    kernel: Kernel, inputs: Sequence[Any], wanted: Sequence[np.ndarray]
) -> dict[str, list[np.ndarray]]:
    """The results of every form of a call."""
    results: dict[str, list[np.ndarray]] = {}

    def outputs(how: str) -> list[np.ndarray]:
        results[how] = [_garbage(want) for want in wanted]
        return results[how]

    allocated = kernel.function(*inputs)
    results["function"] = list(map(np.asarray, allocated if len(wanted) > 1 else (allocated,)))
    if kernel.into is None:
        return results
    scratch = [np.full(kernel.workspace, 0xA5, np.uint8)] if kernel.workspace else []
    kernel.into(*inputs, *outputs("into"), *scratch)
    kernel.into(*map(strided, inputs), *outputs("into, strided inputs"), *scratch)
    work = scratch[0] if scratch else None
    function, arguments = kernel.bind(inputs, outputs("bound"), work)
    function(*arguments)
    function, arguments = kernel.bind(list(map(strided, inputs)), outputs("bound, strided"), work)
    function(*arguments)
    if not kernel.layout.contiguous:
        given, made = [list(map(_channels_last, x)) for x in (inputs, outputs("channels last"))]
        results["channels last"] = made
        function, arguments = kernel.bind(given, made, work)
        function(*arguments)
        kernel.into(*given, *made, *scratch)
        expected = [RuntimeArray(x.strides) if isinstance(x, np.ndarray) else x for x in given]
        results["late, channels last"] = made = [_garbage(want) for want in wanted]
        function, arguments = kernel.bind(expected, made, work)
        for arrays in (inputs, given):
            function(
                *[
                    arrays[expected.index(a)] if isinstance(a, RuntimeArray) else a
                    for a in arguments
                ]
            )
    late = [f"late {i}" for i in range(len(inputs) + len(wanted))]
    function, arguments = kernel.bind(late[: len(inputs)], late[len(inputs) :], work)
    arrays = [*inputs, *outputs("late")]
    function(*[arrays[late.index(a)] if isinstance(a, str) else a for a in arguments])
    for i in kernel.inplace:
        memory = inputs[i].copy()
        given = [memory if j == i else x for j, x in enumerate(inputs)]
        rest = outputs(f"in place of input {i}")[1:]
        results[f"in place of input {i}"][0] = memory
        function, arguments = kernel.bind(given, [memory, *rest], work)
        function(*arguments)
    return results


def _channels_last(x: Any) -> Any:
    """``x`` with its channels innermost in memory."""
    if not isinstance(x, np.ndarray) or x.ndim < 3:
        return x
    return np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1)


def _garbage(like: np.ndarray) -> np.ndarray:
    """An array to be overwritten, whose bytes are unlikely results."""
    array = np.empty(like.shape, like.dtype)
    array.reshape(-1).view(np.uint8)[:] = 0x5A
    return array


@contextmanager
def threads_of(library: NativeLibrary, count: int) -> Iterator[None]:
    """Kernels of the calling thread have ``count`` threads."""
    library.functions.set_threads(count)
    try:
        yield
    finally:
        library.functions.set_threads(1)
