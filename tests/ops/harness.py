"""Run one node in every way a kernel can run, and compare with other runtimes.

``check_node`` builds a one-node model, and checks that

* the kernel's allocating form gives what ``expected`` says (an array each, or "reference" for
  ``onnx.reference``, "ort" for ONNX Runtime, both of them other people's work),
* its writing form (``into``) gives the same, from and into contiguous and strided memory full of
  garbage, with every input that ``inplace`` names as the output too, and leaves inputs as they were,
* ``infer`` says nothing that the results contradict, with shapes known and with dims unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import helper

import penstock as ps
from penstock.analysis.interpreter import evaluate
from penstock.frontends.onnx.importer import load_onnx
from penstock.frontends.onnx.upgrades import meaning, microsoft_rules
from penstock.host.native import library
from penstock.ir.graph import Node
from penstock.testing import check_results


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


def unsaturated(codes: np.ndarray) -> np.ndarray:
    """Codes of weights whose products with uint8 ONNX Runtime adds up exactly on this machine. On
    x86-64 without VNNI it adds up pairs as int16, which saturate: int8 has seven bits then."""
    loaded = library()
    saturates = loaded is not None and loaded.integer_instructions not in ("AMX", "VNNI")
    return np.asarray(codes // 2) if saturates and codes.dtype == np.int8 else codes


def run_ort(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Threads and passes take longer than a node: 0.5 to 2 ms of 0.1.
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
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
    if node is None:
        return _check_model(model, inputs, wanted, rtol, atol)
    by_name = {f"x{i}": x for i, x in enumerate(inputs)}
    for i in constants:
        value = node.inputs[i]
        assert value is not None
        value.set_constant(inputs[i])
    values = [None if v is None else by_name.get(v.name, v.const) for v in node.inputs]
    return check_results(node, values, wanted, rtol, atol)


def _check_model(
    model: onnx.ModelProto, inputs: Sequence[Any], wanted: Sequence[Any], rtol: float, atol: float
) -> list[Any]:
    """Check a node that is imported as several others."""
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    outputs: list[Any] = []
    options: Any
    for options in ({"backends": ["numpy"]}, {"executor": "interpret"}, {}):
        outputs = [*ps.compile(model, **options).run(feeds).values()]
        for y, want in zip(outputs, wanted, strict=True):
            assert y.dtype == want.dtype
            wide = [np.asarray(x, np.float64) for x in (y, want)]
            np.testing.assert_allclose(*wide, rtol, atol)
    return outputs


def _loaded(model: onnx.ModelProto) -> Node | None:
    """The node of a model, as one of its own operation: those of ONNX Runtime are not taken apart,
    where that would make several nodes of them. None if ONNX's own is."""
    nodes = load_onnx(model).graph.nodes
    if len(nodes) == 1:
        return nodes[0]
    with mock.patch.dict(microsoft_rules(), clear=True):
        meaning.cache_clear()
        nodes = load_onnx(model).graph.nodes
    meaning.cache_clear()
    return nodes[0] if len(nodes) == 1 else None


def convolve(x: np.ndarray, w: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    """The convolution of two arrays by the kernel of Conv."""
    (node,) = load_onnx(node_model("Conv", [x, w], attrs)).graph.nodes
    (y,) = evaluate(node, [x, w])
    return np.asarray(y)
