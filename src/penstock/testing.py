"""Checks of operations: each form of a kernel, and ``infer``, against known results.

``check_node`` runs one node in every way in which a plan may run it. It checks that

* the kernel's allocating form gives the expected results, to the last bit for whole numbers;
* its writing form (``into``) gives the same, from and into contiguous and strided memory full of
  garbage, with every input that ``inplace`` names as the output too, and leaves inputs as they
  were;
* the types of ``infer`` agree with the results, with shapes known and with dims unknown;
* no output shares memory with an input, unless the kernel is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np

from penstock.analysis.interpreter import evaluate
from penstock.core.types import RunValue, RunValues, TensorType, accepts, constant_type, type_of
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.registry import find

__all__ = ["check_node"]


def check_node(
    name: str,
    inputs: RunValues,
    attrs: Mapping[str, Any] | None = None,
    *,
    expected: RunValues,
    domain: str = "",
    version: int | None = None,
    outputs: int | Sequence[bool] = 1,
    constants: Sequence[int] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> list[Any]:
    """Check one node of the operation ``name`` in every form; return its outputs.

    Raises ``AssertionError`` for what is wrong, ``LookupError`` if no such operation is registered.

    Args:
        name: The operation.
        inputs: Arrays, None for an optional one that is left out.
        attrs: The attributes of the node.
        expected: Arrays: the value of each output that is present.
        domain: The domain of the operation.
        version: That of the operation's schema, by default the newest.
        outputs: Their number, or whether each is present.
        constants: The positions of inputs that are constants of the node.
        rtol: How far elements may differ, relative to what is expected; whole numbers and strings
            are compared exactly.
        atol: How far they may differ besides.
    """
    op = find(name, domain, version)
    if op is None:
        raise LookupError(f"no operation {name!r} is registered in the domain {domain!r}")
    values = [
        None if x is None else Value(f"x{i}", type_of(x), const=x if i in constants else None)
        for i, x in enumerate(inputs)
    ]
    for i in constants:
        value = values[i]
        assert value is not None, f"input {i} is left out, and can be no constant"
        value.type = constant_type(inputs[i])
    flags = [True] * outputs if isinstance(outputs, int) else list(outputs)
    results = [Value(f"y{i}") if flag else None for i, flag in enumerate(flags)]
    node = Node(op, values, results, dict(attrs or {}), name="node")
    return check_results(node, list(inputs), expected, rtol, atol)


def check_results(
    node: Node, values: RunValues, expected: RunValues, rtol: float, atol: float
) -> list[Any]:
    """Check a node that is fed ``values``; return its outputs."""
    copies = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
    results = list(evaluate(node, values))
    present = [r for r, v in zip(results, node.outputs, strict=False) if v is not None]
    assert len(present) == len(expected), f"{len(present)} outputs, of {len(expected)} expected"
    for got, want in zip(present, expected, strict=True):
        assert_same(got, want, rtol, atol)
    check_infer(node, values, results)
    check_into(node, values, results)
    for value, copy in zip(values, copies, strict=True):
        if isinstance(value, np.ndarray):
            _assert_equal(value, copy, "the kernel wrote to its input")
    return present


def assert_same(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Compare values, whole numbers and strings exactly."""
    if isinstance(want, list):
        assert isinstance(got, list)
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            assert_same(g, w, rtol, atol)
        return
    if want is None:
        assert got is None
        return
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype == want.dtype or want.dtype.kind in "UO"
    if _same_bytes(got, want):
        return
    if want.dtype.kind in "biuUO" and atol < 1:
        np.testing.assert_array_equal(got, want)
    else:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=rtol, atol=atol)


def check_infer(node: Node, values: RunValues, results: RunValues) -> None:
    """Check that ``infer`` says nothing that the results contradict."""
    consts = [None if v is None else v.const for v in node.inputs]
    exact = [None if x is None else type_of(x) for x in values]
    exact = [constant_type(c) if c is not None else t for c, t in zip(consts, exact, strict=True)]
    vague = [
        TensorType(t.dtype, None if t.shape is None else (None,) * len(t.shape))
        if isinstance(t, TensorType) and c is None
        else t
        for t, c in zip(exact, consts, strict=True)
    ]
    unknown = [TensorType() if isinstance(t, TensorType) else t for t in vague]
    for types in (exact, vague, unknown):
        inferred = node.op.infer(types, node.attrs, consts)
        for kind, result, value in zip(inferred, results, node.outputs, strict=False):
            if value is not None:
                assert accepts(kind, type_of(result)), (kind, type_of(result))
                if isinstance(kind, TensorType) and kind.data is not None:
                    flat = np.asarray(result).reshape(-1).tolist()
                    assert len(flat) == len(kind.data)
                    for known, actual in zip(kind.data, flat, strict=True):
                        assert not isinstance(known, int) or known == actual


def check_into(node: Node, values: RunValues, results: RunValues) -> None:
    """Check the writing form of a node's kernel against what its allocating form gave.

    Outputs and workspace hold garbage before, of two kinds; outputs are strided in several ways
    where that is allowed, and inputs are read-only, as constants are.
    """
    types = [None if x is None else type_of(x) for x in values]
    kernel = node.op.compile(node, types)
    _check_memory(kernel, values, results)
    if kernel.into is None:
        return
    arrays = [
        None if v is None else np.asarray(r) for r, v in zip(results, node.outputs, strict=False)
    ]
    held = [(array, array.copy()) for array in _captured(kernel.function, kernel.into)]
    for byte in GARBAGE:
        _check_layouts(kernel, values, arrays, byte)
        _check_in_place(kernel, values, arrays, byte)
    for array, before in held:
        _assert_equal(array, before, "the kernel wrote to an array that all threads share")


def _check_memory(kernel: Kernel, values: RunValues, results: RunValues) -> None:
    """Check that results are views of the first input, or share no memory with any."""
    if kernel.view:
        # A view of memory in another order may need a copy, and an array without elements shares
        # nothing.
        assert not isinstance(values[0], np.ndarray) or (
            np.shares_memory(results[0], values[0])
            or np.asarray(results[0]).size == 0
            or (not np.asarray(values[0]).flags.c_contiguous)
        )
        return
    for result in results:
        for value in values:
            if isinstance(result, np.ndarray) and isinstance(value, np.ndarray):
                assert not np.shares_memory(result, value), "an output aliases an input"


_Arrays = Sequence[np.ndarray | None]


def _check_layouts(kernel: Kernel, values: RunValues, arrays: _Arrays, byte: int) -> None:
    """Write into outputs, and read inputs, of several layouts."""
    constants = [_read_only(x) for x in values]
    for layout in LAYOUTS[:1] if kernel.layout.contiguous else LAYOUTS:
        outs = [None if a is None else _fill(layout(a), byte) for a in arrays]
        _write(kernel, constants, outs, arrays, byte)
    for layout in LAYOUTS[1:]:  # sums over other strides may be rounded otherwise
        strided = [_read_only(_copied(layout, x)) for x in values]
        outs = [None if a is None else _fill(np.empty_like(a, order="C"), byte) for a in arrays]
        _write(kernel, strided, outs, arrays, byte, exact=False)


def _check_in_place(kernel: Kernel, values: RunValues, arrays: _Arrays, byte: int) -> None:
    """Write over each input that the kernel says may be the output."""
    want = arrays[0]
    for index in kernel.inplace:
        value = values[index] if index < len(values) else None
        if value is None or want is None:
            continue
        if value.shape == want.shape and value.dtype == want.dtype:
            taken = value.copy()
            inputs = [taken if i == index else _read_only(v) for i, v in enumerate(values)]
            others = [None if a is None else _fill(np.empty_like(a), byte) for a in arrays[1:]]
            _write(kernel, inputs, [taken, *others], arrays, byte)


def _write(
    kernel: Kernel, inputs: RunValues, outs: _Arrays, arrays: _Arrays, byte: int, exact: bool = True
) -> None:
    """Call the writing form, and compare what it wrote with ``arrays``."""
    workspace = _workspace(kernel.workspace, byte) if kernel.workspace else None
    function, arguments = kernel.bind(inputs, outs, workspace)
    function(*arguments)
    for out, want in zip(outs, arrays, strict=True):
        if want is None or out is None:
            continue
        if exact:
            _assert_equal(out, want)
        else:
            tolerance = epsilon(want.dtype)
            assert_same(out, want, tolerance, tolerance)


def _captured(*functions: Any) -> list[np.ndarray]:
    """The arrays that functions hold, in their closures and in what these hold."""
    seen: dict[int, Any] = {}
    stack = list(functions)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        # Kept until the end: the id of an object that was freed may be that of the next one.
        seen[id(value)] = value
        if isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, FunctionType):
            stack.extend(cell.cell_contents for cell in value.__closure__ or ())
        elif type(value).__module__.startswith("penstock.ops"):
            names = (n for n in getattr(type(value), "__slots__", ()) if n != "__weakref__")
            stack.extend(getattr(value, name, None) for name in names)
            stack.extend(getattr(value, "__dict__", {}).values())
    return [value for value in seen.values() if isinstance(value, np.ndarray)]


GARBAGE = (0xA5, 0xFF)
"""Bytes of memory that is not written yet: small numbers, and NaNs that are no truth values."""


def _every_other(array: np.ndarray) -> np.ndarray:
    """An array of the same shape: every other element of something larger along the last axis."""
    if array.ndim == 0:
        return np.empty_like(array)
    return np.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)[..., ::2]


def _part(array: np.ndarray) -> np.ndarray:
    """An array of the same shape: a part of something larger along every axis."""
    whole = np.empty([d + 2 for d in array.shape], array.dtype)
    inner: tuple[Any, ...] = (*[slice(1, d + 1) for d in array.shape], ...)
    return whole[inner]


LAYOUTS: Sequence[Callable[[np.ndarray], np.ndarray]] = (
    lambda array: np.empty_like(array, order="C"),
    _every_other,
    _part,
    lambda array: np.empty_like(array, order="F"),  # the first axis varies fastest in memory
)


def _copied(layout: Callable[[np.ndarray], np.ndarray], value: RunValue) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    found = layout(value)
    found[...] = value
    return found


def _read_only(value: RunValue) -> RunValue:
    if not isinstance(value, np.ndarray):
        return value
    # The flag is one of the view: the caller's own array stays as it is.
    view = value[...]
    view.flags.writeable = False
    return view


def _fill(array: np.ndarray, byte: int) -> np.ndarray:
    """The array, filled with what no kernel may rely on."""
    if array.dtype == object:
        array[...] = "?"
    elif array.size:
        garbage = np.full(array.dtype.itemsize, byte, np.uint8)
        array[...] = garbage.view(array.dtype).reshape(())
    return array


def _workspace(size: int, byte: int) -> np.ndarray:
    # Kernels may rely on the alignment that arenas have.
    raw = np.full(size + 64, byte, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def epsilon(dtype: np.dtype) -> float:
    """Tolerance of results whose sums are taken in another order."""
    if dtype.kind not in "fcV" or "int" in dtype.name:
        return 0
    size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return {2: 1e-2, 4: 2e-5, 8: 1e-10}.get(size, 0)


def _same_bytes(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether arrays of one shape hold the same bytes. Comparing numbers takes much longer."""
    return got.dtype == want.dtype != object and got.tobytes() == want.tobytes()


def _assert_equal(got: np.ndarray, want: np.ndarray, message: str = "") -> None:
    """Compare arrays of one shape exactly. NumPy does not know the NaNs of ml_dtypes."""
    if not _same_bytes(got, want):
        x, y = (a.astype(np.float32) if a.dtype.isbuiltin == 2 else a for a in (got, want))
        np.testing.assert_array_equal(x, y, err_msg=message)
