"""Where InsertTransfers copies values between the memories of backends."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.ir.graph import Graph, Node
from penstock.ops.internal.transfer import HOST, is_transfer
from penstock.passes.context import PassContext, Place
from penstock.passes.lowering.insert_transfers import InsertTransfers
from tests.support.onnx_text import graph_from_text

NUMPY, ONE, TWO = Place("numpy", HOST), Place("one", "one"), Place("two", "two")


def moved(body: str, places: Mapping[str, Place]) -> tuple[Graph, dict[Node, Place], bool]:
    """The graph after the pass with the nodes of some operations placed, its placement, and whether
    it changed."""
    graph = graph_from_text(f"g (float[4] x, bool c) => (float[4] y) {body}")
    placement = {
        node: places.get(node.op.name, NUMPY) for node in graph.walk() if node.op.name != "If"
    }
    changed = InsertTransfers().run(graph, PassContext(placement=placement))
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
    assert steps(graph) == ["host to one", "Abs", "one to host", "If"]
    (on_host,) = graph.nodes[2].outputs
    for _, branch in graph.nodes[3].graphs:
        assert branch.nodes[0].inputs == [on_host]
