"""Names that many nodes share are not copied into each of them, nor into the texts of errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import penstock as ps
from tests.support.processes import load_in_child
from tests.support.tf_graphs import Builder, Func, Type

LONG = "N" * 500_000
MIB = 2**20
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]


def info(name: str, code: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, code, [])


def chain(count: int, op: str, x: str, y: str, domain: str = "") -> list[onnx.NodeProto]:
    names = [x, *(f"v{i}" for i in range(count - 1)), y]
    return [helper.make_node(op, [names[i]], [names[i + 1]], domain=domain) for i in range(count)]


def onnx_model(
    nodes: list[onnx.NodeProto], body: list[onnx.NodeProto] | None = None, x: str = "x"
) -> bytes:
    """A model from ``x`` and the condition ``c`` to y; ``body`` is that of a function f(a) -> b."""
    functions = [helper.make_function("own", "f", ["a"], ["b"], body, OPSETS)] if body else []
    inputs = [info(x), info("c", TensorProto.BOOL)]
    graph = helper.make_graph(nodes, "g", inputs, [info("y")])
    model = helper.make_model(graph, functions=functions, opset_imports=OPSETS)
    return model.SerializeToString()


def branches(count: int, op: str, domain: str = "", depth: int = 1) -> onnx.NodeProto:
    """An If with a long name and the given number of nodes, below ``depth`` - 1 others."""
    node = None
    for level in reversed(range(depth)):
        y, t, e = (f"{name}{level}" if level else name for name in "yte")
        inner = chain(count, op, "x", t, domain)
        if node is not None:
            inner = [node, helper.make_node("Neg", node.output, [t])]
        then = helper.make_graph(inner, "then", [], [onnx.ValueInfoProto(name=t)])
        other = helper.make_graph(
            chain(1, "Neg", "x", e), "else", [], [onnx.ValueInfoProto(name=e)]
        )
        name = LONG[: -1 if node is None else 100]
        node = helper.make_node("If", ["c"], [y], name=name, then_branch=then, else_branch=other)
    assert node is not None
    return node


def call(**more: Any) -> onnx.NodeProto:
    return helper.make_node("f", ["x"], ["y"], domain="own", **more)


def long_attributes() -> list[onnx.NodeProto]:
    node = helper.make_node("Relu", ["x"], ["y"], name=LONG)
    node.attribute.extend(helper.make_attribute(f"a{i}", 1) for i in range(2000))
    return [node]


ONNX: dict[str, Callable[[], bytes]] = {
    "nested graph": lambda: onnx_model([branches(4000, "Relu")]),
    "nested graphs": lambda: onnx_model([branches(4000, "Relu", depth=30)]),
    "function call": lambda: onnx_model([call(name=LONG)], chain(1500, "Relu", "a", "b")),
    "name in a function": lambda: onnx_model(
        chain(500, "f", "x", "y", "own"),
        [helper.make_node("Relu", ["a"], [LONG], name=LONG), *chain(1, "Neg", LONG, "b")],
    ),
}
REFUSED: dict[str, Callable[[], bytes]] = {
    "nested graph": lambda: onnx_model([branches(4000, "Odd", "own")]),
    "call": lambda: onnx_model([call(name=LONG)], chain(1500, "Odd", "a", "b", "own")),
    "operation": lambda: onnx_model(chain(3, LONG, "x", "y", "own")),
    "operations": lambda: onnx_model(
        [helper.make_node(f"Odd{i}", ["x"], [f"v{i}"], domain="own") for i in range(3000)]
    ),
    "attributes": lambda: onnx_model(long_attributes()),
    "undeclared domain": lambda: onnx_model([branches(4000, "Relu", "other")]),
    "undefined input": lambda: onnx_model(chain(3, "Relu", LONG, "y")),
}


def graph_def(name: str, calls: int, function: Callable[[Builder], None]) -> bytes:
    """A GraphDef that calls a function of ``in`` as often, by nodes of that name."""
    g = Builder()
    g.placeholder("in", "float32")
    g.function("f", {"x": "float32"}, {"y": "float32"}, {"y": "last:y:0"})
    function(g)
    g.main()
    types = [Type("float32")]
    for i in range(calls):
        g.node("PartitionedCall", "in", name=f"{name}{i}", Tin=types, Tout=types, f=Func("f"))
    return g.bytes()


def body(g: Builder, name: str, count: int, op: str = "Neg") -> None:
    last = "x"
    for i in range(count):
        last = g.node(op, last, name=f"{name}{i}", T=Type("float32")) + ":y:0"
    g.node("Neg", last, name="last", T=Type("float32"))


def split(count: int) -> bytes:
    g = Builder()
    g.placeholder("in", "float32")
    axis = g.const(np.int32(0))
    g.node("Split", axis, "in", name=LONG, T=Type("float32"), num_split=count)
    return g.bytes()


GRAPH_DEFS: dict[str, Callable[[], bytes]] = {
    "call": lambda: graph_def(LONG, 1, lambda g: body(g, "n", 1500)),
    "name in a function": lambda: graph_def("c", 300, lambda g: body(g, LONG, 1)),
    "outputs": lambda: split(4000),
}


def peak(folder: Path, name: str, data: bytes) -> tuple[float, str]:
    """The memory that loading takes, in bytes of the file and beyond 64 MiB, and what it says."""
    small = onnx_model(chain(1, "Relu", "x", "y"))
    if name.endswith(".pb"):
        small = graph_def("c", 1, lambda g: body(g, "n", 1))
    (folder / f"small_{name}").write_bytes(small)
    (folder / name).write_bytes(data)
    size, text = load_in_child(folder / name, folder / f"small_{name}")
    return max(0, size - 64 * MIB) / len(data), text


@pytest.mark.costly
@pytest.mark.parametrize("case", ONNX)
def test_long_name_in_an_onnx_model_takes_memory_once(tmp_path: Path, case: str) -> None:
    times, text = peak(tmp_path, "model.onnx", ONNX[case]())
    assert text == "loaded"
    assert times < 20


@pytest.mark.costly
@pytest.mark.parametrize("case", GRAPH_DEFS)
def test_long_name_in_a_graph_def_takes_memory_once(tmp_path: Path, case: str) -> None:
    times, text = peak(tmp_path, "model.pb", GRAPH_DEFS[case]())
    assert text == "loaded"
    assert times < 20


@pytest.mark.costly
@pytest.mark.parametrize("case", REFUSED)
def test_long_name_is_shortened_in_errors(tmp_path: Path, case: str) -> None:
    times, text = peak(tmp_path, "model.onnx", REFUSED[case]())
    assert text.startswith(("InvalidModel", "Unsupported"))
    assert len(text) < 20 * 3000
    assert times < 20


def test_names_shortened_in_errors_of_a_graph_def(tmp_path: Path) -> None:
    data = graph_def(LONG, 1, lambda g: body(g, "n", 1500, "Odd"))
    times, text = peak(tmp_path, "model.pb", data)
    assert text.startswith("Unsupported")
    assert len(text) < 5000
    assert times < 20


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
def test_long_names_of_inputs_and_outputs_feed_and_fetch(executor: str) -> None:
    nodes = [
        helper.make_node("Relu", [LONG], [LONG + "r"], name=LONG),
        *chain(1, "Neg", LONG + "r", "y"),
    ]
    session = ps.compile(onnx_model(nodes, x=LONG), executor=executor)
    x = np.float32(2)
    assert session.run({LONG: x, "c": True})["y"] == -2
    assert session.run({LONG: x}, [LONG + "r"])[LONG + "r"] == 2
    with pytest.raises(ps.InvalidInput) as caught:
        session.run({LONG: x}, [LONG + "s"])
    assert len(str(caught.value)) < 5000
