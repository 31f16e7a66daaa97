"""Run one node in every way a kernel can run, and compare with other runtimes.

``check_node`` builds a one-node model, and checks that

* the kernel's allocating form gives what ``expected`` says (an array each, or "reference" for
  ``onnx.reference``, "ort" for ONNX Runtime, both of them other people's work),
* its writing form (``into``) gives the same, from and into contiguous and strided memory full of
  garbage, with every input that ``inplace`` names as the output too, and leaves inputs as they were,
* ``infer`` says nothing that the results contradict, with shapes known and with dims unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import helper

from penstock.analysis.interpreter import evaluate
from penstock.frontends.onnx.importer import load_onnx
from penstock.frontends.onnx.upgrades import meaning, microsoft_rules
from penstock.ir.graph import Node
from penstock.types import TensorType, accepts, constant_type, type_of


def node_model(
    op_type: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    outputs: int | Sequence[bool] = 1,
    opset: int | None = None,
    domain: str = "",
) -> onnx.ModelProto:
    """A model of one node; ``None`` among ``inputs`` is an input left out."""
    opset = onnx.defs.onnx_opset_version() if opset is None else opset
    flags = [True] * outputs if isinstance(outputs, int) else list(outputs)
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    results = [f"y{i}" if flag else "" for i, flag in enumerate(flags)]
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **(attrs or {}))
    infos = [value_info(n, x) for n, x in zip(names, inputs, strict=True) if x is not None]
    outs = [onnx.ValueInfoProto(name=n) for n in results if n]
    graph = helper.make_graph([node], "g", infos, outs)
    imports = [helper.make_opsetid("", opset if not domain else 21)]
    if domain:
        imports.append(helper.make_opsetid(domain, opset))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def value_info(name: str, value: Any) -> onnx.ValueInfoProto:
    if isinstance(value, list):
        element = value_info("", value[0]).type
        return helper.make_value_info(name, helper.make_sequence_type_proto(element))
    if isinstance(value, dict):
        key, item = next(iter(value.items()))
        code = onnx.TensorProto.STRING if isinstance(key, str) else onnx.TensorProto.INT64
        element = value_info("", np.asarray(item, object if isinstance(item, str) else None)).type
        return helper.make_value_info(name, helper.make_map_type_proto(code, element))
    code = helper.np_dtype_to_tensor_dtype(value.dtype)
    return helper.make_tensor_value_info(name, code, value.shape)


def run_reference(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    from onnx.reference import ReferenceEvaluator

    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    return list(ReferenceEvaluator(model).run(None, feeds))


def run_ort(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    return list(session.run(None, feeds))


def check_node(
    op_type: str,
    inputs: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    *,
    expected: str | Sequence[Any] = "reference",
    outputs: int | Sequence[bool] = 1,
    opset: int | None = None,
    domain: str = "",
    constants: Sequence[int] = (),
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> list[Any]:
    """Check one node in every form; returns its outputs. ``constants`` are inputs made constant."""
    model = node_model(op_type, inputs, attrs, outputs=outputs, opset=opset, domain=domain)
    if expected == "reference":
        wanted = run_reference(model, inputs)
    elif expected == "ort":
        wanted = run_ort(model, inputs)
    else:
        wanted = list(expected)
    node = _loaded(model)
    by_name = {f"x{i}": x for i, x in enumerate(inputs)}
    for i in constants:
        value = node.inputs[i]
        assert value is not None
        value.const, value.type = inputs[i], constant_type(inputs[i])
    values = [None if v is None else by_name.get(v.name, v.const) for v in node.inputs]
    copies = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
    results = list(evaluate(node, values))
    present = [r for r, v in zip(results, node.outputs, strict=False) if v is not None]
    assert len(present) == len(wanted)
    for got, want in zip(present, wanted, strict=True):
        assert_same(got, want, rtol, atol)
    check_infer(node, values, results)
    check_into(node, values, results)
    for value, copy in zip(values, copies, strict=True):
        if isinstance(value, np.ndarray):
            message = "the kernel wrote to its input"
            np.testing.assert_array_equal(_native(value), _native(copy), err_msg=message)
    return present


def _loaded(model: onnx.ModelProto) -> Node:
    """The node of a model, as one of its own operation: those of ONNX Runtime are not taken apart,
    where that would make several nodes of them."""
    nodes = load_onnx(model).graph.nodes
    if len(nodes) == 1:
        return nodes[0]
    with mock.patch.dict(microsoft_rules(), clear=True):
        meaning.cache_clear()
        (node,) = load_onnx(model).graph.nodes
    meaning.cache_clear()
    return node


def convolve(x: np.ndarray, w: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """The convolution of two arrays by the kernel of Conv."""
    (node,) = load_onnx(node_model("Conv", [x, w], attrs)).graph.nodes
    (y,) = evaluate(node, [x, w])
    return np.asarray(y)


def assert_same(got: Any, want: Any, rtol: float, atol: float) -> None:
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
    if want.dtype.kind in "biuUO" and atol < 1:
        np.testing.assert_array_equal(got, want)
    else:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(got.astype(wide), want.astype(wide), rtol=rtol, atol=atol)


def check_infer(node: Node, values: Sequence[Any], results: Sequence[Any]) -> None:
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


def check_into(node: Node, values: Sequence[Any], results: Sequence[Any]) -> None:
    """Check the writing form of a node's kernel against what its allocating form gave.

    Outputs and workspace hold garbage before, of two kinds; outputs are strided in several ways
    where that is allowed, and inputs are read-only, as constants are.
    """
    types = [None if x is None else type_of(x) for x in values]
    kernel = node.op.compile(node, types)
    if kernel.view:
        assert not isinstance(values[0], np.ndarray) or (
            np.shares_memory(results[0], values[0])
            or np.asarray(results[0]).size == 0
            or (not np.asarray(values[0]).flags.c_contiguous)
        )
    else:
        for result in results:
            for value in values:
                if isinstance(result, np.ndarray) and isinstance(value, np.ndarray):
                    assert not np.shares_memory(result, value), "an output aliases an input"
    if kernel.into is None:
        return
    arrays = [
        None if v is None else np.asarray(r) for r, v in zip(results, node.outputs, strict=False)
    ]

    def run(inputs: Sequence[Any], outs: Sequence[Any], byte: int, exact: bool = True) -> None:
        workspace = _workspace(kernel.workspace, byte) if kernel.workspace else None
        function, arguments = kernel.bind(inputs, outs, workspace)
        function(*arguments)
        for out, want in zip(outs, arrays, strict=True):
            if want is None:
                continue
            if exact:
                np.testing.assert_array_equal(_native(out), _native(want))
            else:
                tolerance = epsilon(want.dtype)
                assert_same(out, want, tolerance, tolerance)

    constants = [_read_only(x) for x in values]
    held = [(array, array.copy()) for array in _captured(kernel.function, kernel.into)]
    for byte in GARBAGE:
        for layout in LAYOUTS[:1] if kernel.contiguous else LAYOUTS:
            outs = [None if a is None else _fill(layout(a), byte) for a in arrays]
            run(constants, outs, byte)
        for layout in LAYOUTS[1:]:  # sums over other strides may be rounded otherwise
            strided = [_read_only(_copied(layout, x)) for x in values]
            outs = [None if a is None else _fill(np.empty_like(a, order="C"), byte) for a in arrays]
            run(strided, outs, byte, exact=False)
        for index in kernel.inplace:
            value, want = values[index] if index < len(values) else None, arrays[0]
            if value is None or want is None:
                continue
            if value.shape == want.shape and value.dtype == want.dtype:
                taken = value.copy()
                inputs = [taken if i == index else v for i, v in enumerate(constants)]
                others = [None if a is None else _fill(np.empty_like(a), byte) for a in arrays[1:]]
                run(inputs, [taken, *others], byte)
    for array, before in held:
        message = "the kernel wrote to an array that it holds, and that all threads share"
        np.testing.assert_array_equal(_native(array), _native(before), err_msg=message)


def _captured(*functions: Any) -> list[np.ndarray]:
    """The arrays that functions hold, in their closures and in what these hold."""
    seen: dict[int, Any] = {}
    stack = list(functions)
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
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
    return whole[(*[slice(1, d + 1) for d in array.shape], ...)]


def _transposed(array: np.ndarray) -> np.ndarray:
    """An array of the same shape, with the first axis varying fastest in memory."""
    return np.empty_like(array, order="F")


LAYOUTS: Sequence[Callable[[np.ndarray], np.ndarray]] = (
    lambda array: np.empty_like(array, order="C"),
    _every_other,
    _part,
    _transposed,
)


def _copied(layout: Callable[[np.ndarray], np.ndarray], value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    found = layout(value)
    found[...] = value
    return found


def _read_only(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
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
    raw = np.full(size + 64, byte, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def epsilon(dtype: np.dtype) -> float:
    """By how much results may differ where sums are taken in another order."""
    if dtype.kind not in "fcV" or "int" in dtype.name:
        return 0
    size = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    return {2: 1e-2, 4: 2e-5, 8: 1e-10}.get(size, 0)


def _native(array: np.ndarray) -> np.ndarray:
    """An array as NumPy compares it: it does not know the NaNs of ml_dtypes."""
    return array.astype(np.float32) if array.dtype.isbuiltin == 2 else array
