"""Where InsertTransfers copies values between the memories of backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from penstock.ir.graph import Graph, Node
from penstock.ops.internal.transfer import HOST, Place, is_transfer
from penstock.ops.onnx.control_flow import is_control
from penstock.passes.context import PassContext, Placing
from penstock.passes.lowering.insert_transfers import InsertTransfers
from tests.support.cost_models import PreferredBackendCosts
from tests.support.device_backend import DelayedBackend
from tests.support.far_backend import FarBackend
from tests.support.onnx_text import compile_text, graph_from_text

NUMPY, ONE, TWO = Place("numpy", HOST), Place("one", "one"), Place("two", "two")


def moved(
    body: str, places: Mapping[str, Place], **options: Any
) -> tuple[Graph, dict[Node, Place], bool]:
    """The graph after the pass with the nodes of some operations placed, its placement, and whether
    it changed."""
    graph = graph_from_text(f"g (float[4] x, bool c) => (float[4] y) {body}")
    placement = {
        node: places.get(node.op.name, NUMPY) for node in graph.walk() if not is_control(node)
    }
    placing = Placing(placement)
    vars(placing).update(options)
    changed = InsertTransfers().run(graph, PassContext(placing=placing))
    return graph, placement, changed


def steps(graph: Graph) -> list[str]:
    """Operations in order; a transfer as its source and target."""
    return [
        f"{node.attrs['source']} to {node.attrs['target']}" if is_transfer(node) else node.op.name
        for node in graph.nodes
    ]


def test_insert_transfers_all_nodes_on_the_host_changes_nothing():
    graph, _, changed = moved("{ a = Neg(x) y = Abs(a) }", {})
    assert not changed
    assert steps(graph) == ["Neg", "Abs"]


def test_insert_transfers_copies_to_a_device_and_back():
    graph, placement, changed = moved("{ a = Neg(x) b = Abs(a) y = Exp(b) }", {"Abs": ONE})
    assert changed
    assert steps(graph) == ["Neg", "numpy to one", "Abs", "one to numpy", "Exp"]
    assert [placement[node] for node in graph.nodes] == [NUMPY, ONE, ONE, ONE, NUMPY]


def test_insert_transfers_readers_in_one_memory_share_a_copy():
    graph, _, _ = moved(
        "{ a = Abs(x) b = Exp(x) d = Mul(a, b) y = Neg(d) }",
        dict.fromkeys(("Abs", "Exp", "Mul"), ONE),
    )
    assert steps(graph) == ["numpy to one", "Abs", "Exp", "Mul", "one to numpy", "Neg"]


def test_insert_transfers_from_device_to_device_goes_through_the_host():
    graph, _, _ = moved("{ a = Abs(x) b = Exp(a) y = Neg(b) }", {"Abs": ONE, "Exp": TWO})
    assert steps(graph) == [
        "numpy to one",
        "Abs",
        "one to numpy",
        "numpy to two",
        "Exp",
        "two to numpy",
        "Neg",
    ]


def test_insert_transfers_outputs_of_the_graph_end_on_the_host():
    graph, _, _ = moved("{ y = Abs(x) }", {"Abs": ONE})
    assert steps(graph) == ["host to one", "Abs", "one to host"]
    assert graph.outputs == graph.nodes[-1].outputs


def test_insert_transfers_constants_are_left_to_the_backend():
    graph, _, _ = moved("<float[4] k = {1, 2, 3, 4}> { a = Mul(x, k) y = Neg(a) }", {"Mul": ONE})
    assert steps(graph) == ["numpy to one", "Mul", "one to numpy", "Neg"]


def test_insert_transfers_captured_values_are_copied_to_the_host_before_the_branches():
    graph, _, _ = moved(
        """{ a = Abs(x) y = If (c) <
            then_branch = t () => (float[4] p) { p = Neg(a) },
            else_branch = e () => (float[4] q) { q = Identity(a) }> }""",
        {"Abs": ONE},
    )
    assert steps(graph) == ["numpy to one", "Abs", "one to numpy", "If"]
    (on_host,) = graph.nodes[2].outputs
    for _, branch in graph.nodes[3].graphs:
        assert branch.nodes[0].inputs == [on_host]


def test_insert_transfers_from_device_to_device_is_direct_where_that_is_possible():
    body, places = "{ a = Abs(x) b = Exp(a) y = Neg(b) }", {"Abs": ONE, "Exp": TWO}
    graph, placement, _ = moved(body, places, direct=lambda source, target: target == "two")
    assert steps(graph) == ["numpy to one", "Abs", "one to two", "Exp", "two to numpy", "Neg"]
    assert placement[graph.nodes[2]] == TWO


def test_insert_transfers_values_stay_on_the_device_of_both_branches():
    graph, _, _ = moved(
        """{ a = Abs(x) d = If (c) <
            then_branch = t () => (float[4] p) { p = Exp(a) },
            else_branch = e () => (float[4] q) { q = Sin(a) }> y = Neg(d) }""",
        {"Abs": ONE, "Exp": ONE, "Sin": ONE},
    )
    assert steps(graph) == ["numpy to one", "Abs", "If", "one to numpy", "Neg"]
    assert [steps(branch) for _, branch in graph.nodes[2].graphs] == [["Exp"], ["Sin"]]


LOOP = """{ k = Abs(x) y = Loop (, , x) <body = b (int64 i, bool d, float[4] v) => (bool e, float[4] w)
    { e = Identity(c) u = Exp(v) w = Mul(u, k) }> }"""


def test_insert_transfers_carried_and_captured_values_of_a_loop_stay_on_its_device():
    graph, _, _ = moved(LOOP, {"Exp": ONE, "Mul": ONE})
    assert steps(graph) == ["Abs", "numpy to one", "numpy to one", "Loop", "one to numpy"]
    ((_, body),) = graph.nodes[3].graphs
    assert steps(body) == ["Identity", "Exp", "Mul"]


def test_insert_transfers_carried_value_that_the_host_reads_enters_there():
    graph, _, _ = moved(LOOP, {"Mul": ONE})
    assert steps(graph) == ["Abs", "numpy to one", "Loop"]
    ((_, body),) = graph.nodes[2].graphs
    assert steps(body) == ["Identity", "Exp", "numpy to one", "Mul", "one to numpy"]


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_loop_on_a_device_transfers_once_whatever_its_iterations(executor, n):
    far = FarBackend("far", ["Exp", "Mul", "Tanh"])
    text = """g (float[4] x, int64 n) => (float[4] y) {
        y = Loop (n, , x) <body = b (int64 i, bool d, float[4] v) => (bool e, float[4] w)
            { e = Identity(d) u = Tanh(v) w = Mul(u, x) }> }"""
    costs = PreferredBackendCosts("far")
    options = {"executor": executor, "backends": [far, "numpy"], "cost_model": costs}
    session = compile_text(text, **options)
    x = np.array([1, 2, 3, 4], np.float32)
    wanted = x
    for _ in range(n):
        wanted = np.tanh(wanted) * x
    for _ in range(2):
        far.moved.clear()
        y = session.run({"x": x, "n": np.array(n)})["y"]
        np.testing.assert_allclose(y, wanted, rtol=1e-6)
        assert far.moved == {"from_host": 1, "to_host": 1}
        y[:] = 0  # is the caller's own


@pytest.mark.parametrize("near", [True, False])
def test_devices_that_can_copy_from_one_another(near):
    one, two = FarBackend("one", ["Exp"]), FarBackend("two", ["Tanh"])
    two.near = ["one"] if near else []
    session = compile_text(
        "g (float[4] x) => (float[4] y) { a = Exp(x) y = Tanh(a) }",
        backends=[one, two, "numpy"],
        place={"Exp": "one", "Tanh": "two"},
    )
    x = np.ones(4, np.float32)
    np.testing.assert_allclose(session(x), np.tanh(np.exp(x)))
    one.moved.clear()
    two.moved.clear()
    session(x)
    between = {"direct": 1} if near else {"from_host": 1}
    assert two.moved == {**between, "to_host": 1}
    assert one.moved["to_host"] == (0 if near else 1)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
@pytest.mark.parametrize("n", [0, 1, 4])
def test_constant_that_a_loop_carries_on_a_device_is_brought_there(executor, n):
    far = FarBackend("far", ["Add", "Mul"])
    text = """g (float[4] x, int64 n) => (float[4] y) <float[4] k = {1, 2, 3, 4}> {
        y = Loop (n, , k) <body = b (int64 i, bool d, float[4] v) => (bool e, float[4] w)
            { e = Identity(d) u = Mul(v, v) w = Add(u, x) }> }"""
    costs = PreferredBackendCosts("far")
    session = compile_text(text, executor=executor, backends=[far, "numpy"], cost_model=costs)
    x = np.full(4, 0.5, np.float32)
    wanted = np.array([1, 2, 3, 4], np.float32)
    for _ in range(n):
        wanted = wanted * wanted + x
    np.testing.assert_array_equal(session.run({"x": x, "n": np.int64(n)})["y"], wanted)
    assert far.ran["Mul"] == n


ROWS = {
    "Loop": """g (float[4] x, int64 n) => (float[4] y, float[M, 4] rows) {
        y, rows = Loop (n, , x) <body = b (int64 i, bool d, float[4] v) => (bool e, float[4] w,
            float[4] w) { e = Identity(d) u = Tanh(v) w = Mul(u, x) }> }""",
    "Scan": """g (float[4] x, float[5, 4] xs) => (float[4] y, float[4, 5] rows) {
        y, rows = Scan (x, xs) <num_scan_inputs = 1, scan_output_axes = [1],
            scan_output_directions = [1], body = b (float[4] v, float[4] s) => (float[4] w,
            float[4] r) { u = Tanh(v) w = Mul(u, s) r = Tanh(w) }> }""",
}


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
@pytest.mark.parametrize("backend", [FarBackend, DelayedBackend])
@pytest.mark.parametrize(("loop", "n"), [("Loop", 0), ("Loop", 1), ("Loop", 5), ("Scan", 5)])
def test_rows_that_a_loop_collects_on_a_device_come_to_the_host_once(executor, backend, loop, n):
    far = backend("far", ["Mul", "Tanh"])
    costs = PreferredBackendCosts("far")
    options = {"executor": executor, "backends": [far, "numpy"], "cost_model": costs}
    session = compile_text(ROWS[loop], **options)
    x = np.array([1, 2, 3, 4], np.float32)
    rows = np.arange(20, dtype=np.float32).reshape(5, 4) / 20
    feeds = {"x": x, **({"n": np.int64(n)} if loop == "Loop" else {"xs": rows})}
    expected = compile_text(ROWS[loop], executor="linear", backends=["numpy"]).run(feeds)
    for _ in range(2):
        far.moved.clear()
        outputs = session.run(feeds)
        for name, value in expected.items():
            np.testing.assert_allclose(outputs[name], value, rtol=1e-6)
        assert far.moved["to_host"] == 2
        assert far.moved["stacked"] == min(n, 1)


def test_rows_of_a_backend_that_joins_none_come_to_the_host_in_each_iteration():
    far = FarBackend("far", ["Mul", "Tanh"])
    far.stack = None
    session = compile_text(
        ROWS["Loop"], backends=[far, "numpy"], place=dict.fromkeys(("Mul", "Tanh"), "far")
    )
    x = np.ones(4, np.float32)
    session.run({"x": x, "n": np.int64(3)})
    far.moved.clear()
    assert session.run({"x": x, "n": np.int64(3)})["rows"].shape == (3, 4)
    assert far.moved == {"from_host": 1, "to_host": 4}


@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_rows_on_a_device_are_read_there_behind_the_loop(executor):
    far = DelayedBackend("far", ["Exp", "Mul", "Tanh"])
    text = ROWS["Loop"].replace("rows) {", "z) {").replace("}> }", "}> z = Exp(rows) }")
    costs = PreferredBackendCosts("far")
    options = {"executor": executor, "backends": [far, "numpy"], "cost_model": costs}
    session = compile_text(text, **options)
    feeds = {"x": np.array([1, 2, 3, 4], np.float32), "n": np.int64(4)}
    expected = compile_text(text, executor="linear", backends=["numpy"]).run(feeds)
    for _ in range(2):
        far.moved.clear()
        outputs = session.run(feeds)
        np.testing.assert_allclose(outputs["z"], expected["z"], rtol=1e-6)
        assert far.moved == {"from_host": 1, "to_host": 2, "stacked": 1}
