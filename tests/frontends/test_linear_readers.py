"""Readers and the verifier do work in proportion to the file, whatever its format."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

import penstock as ps
from penstock.frontends.load import load_text
from penstock.frontends.tensorflow.proto.graphdef_pb2 import GraphDef
from penstock.textual.printer import format_model
from tests.support import tflite_models
from tests.support.sweeps import scaled

FLOAT = 1  # DT_FLOAT


def onnx_chain(n: int) -> bytes:
    """A chain of ``n`` nodes, of which each has a name and an attribute."""
    nodes = [
        helper.make_node("LeakyRelu", [f"x{i}"], [f"x{i + 1}"], f"node{i}", alpha=0.5)
        for i in range(n)
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x0", f"x{n}"))
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bytes(model.SerializeToString())


def onnx_constants(n: int) -> bytes:
    """A node that joins ``n`` constants, each of which is an initializer and declared."""
    weights = [helper.make_tensor(f"w{i}", TensorProto.FLOAT, [1], [i]) for i in range(n)]
    declared = [helper.make_tensor_value_info(w.name, TensorProto.FLOAT, [1]) for w in weights]
    node = helper.make_node("Concat", [w.name for w in weights], ["y"], axis=0)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [n])
    graph = helper.make_graph([node], "g", [], [y], weights, value_info=declared)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return bytes(model.SerializeToString())


def onnx_undefined(n: int) -> bytes:
    """A chain whose nodes read what is written nowhere: it is refused."""
    model = onnx.ModelProto.FromString(onnx_chain(n))
    for i, node in enumerate(model.graph.node):
        node.input[0] = f"missing{i}"
    return bytes(model.SerializeToString())


def tensorflow_chain(n: int) -> GraphDef:
    graph = GraphDef()
    first = graph.node.add(name="x0", op="Placeholder")
    first.attr["dtype"].type = FLOAT
    for i in range(n):
        node = graph.node.add(name=f"x{i + 1}", op="Relu", input=[f"x{i}"])
        node.attr["T"].type = FLOAT
    return graph


def pbtxt_chain(n: int) -> bytes:
    return text_format.MessageToString(tensorflow_chain(n)).encode()


def tflite_chain(n: int) -> bytes:
    tensors = [{"name": f"x{i}", "type": 0, "shape": [2]} for i in range(n + 1)]
    operators = [{"opcode_index": 0, "inputs": [i], "outputs": [i + 1]} for i in range(n)]
    graph = {"tensors": tensors, "operators": operators, "inputs": [0], "outputs": [n], "name": "g"}
    code = {"builtin_code": 101, "deprecated_builtin_code": 101, "version": 1}  # ABS
    fields = {"version": 3, "operator_codes": [code], "subgraphs": [graph], "buffers": [{}]}
    return tflite_models.serialized(fields)


def text_chain(n: int) -> bytes:
    return format_model(ps.load(onnx_chain(n))).encode()


FORMATS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "onnx": ("m.onnx", onnx_chain),
    "onnx of constants": ("m.onnx", onnx_constants),
    "onnx refused": ("m.onnx", onnx_undefined),
    "GraphDef": ("m.pb", lambda n: tensorflow_chain(n).SerializeToString()),
    "pbtxt": ("m.pbtxt", pbtxt_chain),
    "tflite": ("m.tflite", tflite_chain),
    "text": ("m.txt", text_chain),
}


def load(path: Path) -> Any:
    return load_text(path.read_text()) if path.suffix == ".txt" else ps.load(path)


def calls_of(function: Callable[[], Any]) -> int:
    """How often functions of Python and of C are called."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    except ps.InvalidModel:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.costly
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", scaled(1_000, 20_000))
def test_loading_twice_the_nodes_takes_twice_the_calls(name: str, n: int, tmp_path: Path) -> None:
    file_name, write = FORMATS[name]
    path = tmp_path / file_name
    counts = []
    if name == "onnx of constants":
        n = n * 9 // 4  # both files are shorter than 1 MiB, or both are indexed first
    for size in (200, n, 2 * n):  # the first loads modules
        path.write_bytes(write(size))
        counts.append(calls_of(partial(load, path)))
    _, once, twice = counts
    assert once < twice <= 2.02 * once
    assert once / n < 400


@pytest.mark.full
def test_million_nodes_are_loaded(tmp_path: Path) -> None:
    """The bytes of the nodes are written without a message for each, which takes longer."""
    n = 1_000_000
    names = [b"%d" % i for i in range(n + 1)]
    nodes = [
        bytes((10, len(x) + len(y) + 10, 10, len(x)))
        + x
        + bytes((18, len(y)))
        + y
        + b"\x22\x04Relu"
        for x, y in pairwise(names)
    ]
    model = onnx.ModelProto.FromString(onnx_chain(1))
    del model.graph.node[:]
    model.graph.input[0].name, model.graph.output[0].name = "0", str(n)
    model.graph.MergeFromString(b"".join(nodes))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    assert len(ps.load(path).graph.nodes) == n
