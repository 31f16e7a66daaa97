"""Where AssignLayouts copies values into the layouts that kernels read."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.type_inference import infer_types
from penstock.analysis.value_memory import value_memory
from penstock.build import GraphBuilder
from penstock.ir.graph import Graph, Node
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ir.layout import channels_last
from penstock.ops.internal.transfer import HOST, REORDER, Place, is_transfer
from penstock.passes.context import PassContext, Placing
from penstock.passes.lowering.assign_layouts import AssignLayouts
from tests.support.onnx_text import graph_from_text

LAST = channels_last(4)
PLACE = Place("fake", HOST)

KERNELS = {
    # These want their first input with the channels innermost.
    "MaxPool": {"dims_order": LAST, "contiguous_inputs": (0,)},
    "GlobalMaxPool": {"dims_order": LAST, "contiguous_inputs": (0,)},
    # This wants both inputs with the dims in their own order.
    "MatMul": {"dims_order": (0, 1, 2, 3), "contiguous_inputs": (0, 1)},
    # These read and write C order alone.
    "Relu": {"contiguous": True, "contiguous_inputs": (0,)},
    # This does, too, and writes its output in any order.
    "LpPool": {"dims_order": LAST, "contiguous_inputs": (0,), "any_layout": True},
    "Add": {},
    "Neg": {},
}


def compiled(node: Node) -> tuple[Place, Kernel]:
    if node.op.name in ("Transpose", "Reshape"):  # views
        return PLACE, node.op.compile(node, [value.type for value in node.inputs])
    fields = KERNELS.get(node.op.name, {})
    if node.op is REORDER:
        fields = {"dims_order": node.attrs["order"]}
    return PLACE, Kernel(lambda *inputs: None, lambda *arrays: None, layout=LayoutHints(**fields))


class KernelsAtHand(Placing):
    """Kernels by ``KERNELS``."""

    plans_layouts = True

    def compiled(self, node: Node) -> tuple[Place, Kernel]:
        return compiled(node)


def assigned(body: str) -> tuple[Graph, PassContext, bool]:
    """The graph after the pass, its context, and whether it changed."""
    graph = graph_from_text(f"g (float[1, 4, 8, 8] x, bool c) => (float[1, 4, 8, 8] y) {body}")
    infer_types(graph)
    placement = {node: PLACE for node in graph.walk() if not node.graphs}
    context = PassContext(placing=KernelsAtHand(placement))
    changed = AssignLayouts().run(graph, context)
    return graph, context, changed


def names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


POOL = "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]>"


def test_assign_layouts_input_in_another_order_is_copied_before_its_reader():
    graph, _, changed = assigned(f"{{ a = {POOL} (x) y = Neg(a) }}")
    assert changed
    assert names(graph) == ["Reorder", "MaxPool", "Neg"]
    copy, pool, _ = graph.nodes
    assert copy.attrs["order"] == LAST
    assert pool.inputs == copy.outputs
    assert copy.inputs[0] is graph.inputs[0]
    assert copy.outputs[0].type == graph.inputs[0].type


def test_assign_layouts_result_in_its_own_order_has_no_copy_of_an_input_in_another():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) y = LpPool <kernel_shape = [1, 1]> (a) }}")
    assert names(graph) == ["Reorder", "MaxPool", "LpPool"]


def test_assign_layouts_chain_in_one_order_is_copied_once():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) b = {POOL} (a) d = {POOL} (b) y = Neg(d) }}")
    assert names(graph) == ["Reorder", "MaxPool", "MaxPool", "MaxPool", "Neg"]


def test_assign_layouts_readers_of_one_order_share_a_copy():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) b = {POOL} (x) y = Add(a, b) }}")
    assert names(graph) == ["Reorder", "MaxPool", "MaxPool", "Add"]
    assert graph.nodes[1].inputs == graph.nodes[2].inputs


def test_assign_layouts_returns_to_own_order_for_a_kernel_that_wants_it():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) b = MatMul(a, a) y = Neg(b) }}")
    assert names(graph) == ["Reorder", "MaxPool", "Reorder", "MatMul", "Neg"]
    back = graph.nodes[2]
    assert back.attrs["order"] == (0, 1, 2, 3)
    assert graph.nodes[3].inputs == [back.outputs[0], back.outputs[0]]


def test_assign_layouts_copy_into_c_order_has_it_in_memory():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) b = Relu(a) y = Neg(b) }}")
    assert names(graph) == ["Reorder", "MaxPool", "Reorder", "Relu", "Neg"]
    memory = value_memory(graph, {node: compiled(node)[1] for node in graph.nodes})
    assert memory.has_order(graph.nodes[2].outputs[0], ())


def test_assign_layouts_constants_are_not_copied():
    graph, _, changed = assigned(
        f"<float[1, 1, 1, 1] k = {{1}}> {{ a = {POOL} (k) b = Add(x, a) y = Neg(b) }}"
    )
    assert not changed
    assert names(graph) == ["MaxPool", "Add", "Neg"]


def test_assign_layouts_without_kernels_that_want_a_layout_changes_nothing():
    graph, _, changed = assigned("{ a = Neg(x) y = Add(a, a) }")
    assert not changed
    assert names(graph) == ["Neg", "Add"]


def test_assign_layouts_without_kernels_at_hand_changes_nothing():
    graph = graph_from_text(
        f"g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {{ a = {POOL} (x) y = Neg(a) }}"
    )
    assert not AssignLayouts().run(graph, PassContext())


def test_assign_layouts_copies_are_placed_and_named_apart():
    graph, context, _ = assigned(f"{{ a = {POOL} (x) b = MatMul(a, a) d = {POOL} (b) y = Neg(d) }}")
    copies = [node for node in graph.nodes if node.op.name == "Reorder"]
    assert len(copies) == 3
    assert len({copy.outputs[0].name for copy in copies}) == 3
    assert all(context.placing.placement[copy] == PLACE for copy in copies)
    assert not any(is_transfer(copy) for copy in copies)


BRANCHES = f"""then_branch = t () => (float[1, 4, 8, 8] p) {{ p = {POOL} (x) }},
    else_branch = e () => (float[1, 4, 8, 8] q) {{ q = GlobalMaxPool(x) }}"""


def test_assign_layouts_branches_use_the_copy_made_before_them():
    graph, _, _ = assigned(f"{{ a = {POOL} (x) b = If (c) <{BRANCHES}> y = Add(a, b) }}")
    assert names(graph) == ["Reorder", "MaxPool", "If", "Add"]
    (copied,) = graph.nodes[0].outputs
    for _, branch in graph.nodes[2].graphs:
        (pool,) = branch.nodes
        assert pool.inputs == [copied]


def test_assign_layouts_copy_of_a_branch_is_not_used_behind_it():
    graph, _, _ = assigned(f"{{ b = If (c) <{BRANCHES}> a = {POOL} (x) y = Add(a, b) }}")
    assert names(graph) == ["If", "Reorder", "MaxPool", "Add"]
    for _, branch in graph.nodes[0].graphs:
        assert names(branch)[0] == "Reorder"


LOOP = """<body = b (int64 i, bool go, float[1, 4, 8, 8] h) => (bool on, float[1, 4, 8, 8] k)
    {{ on = Identity(go) a = {pool} ({read}) k = Add(a, h) }}>"""


def test_assign_layouts_copies_what_a_loop_only_reads_in_front_of_it():
    for read, outside in (("x", ["Reorder", "Loop"]), ("h", ["Loop"])):
        loop = LOOP.format(pool=POOL, read=read)
        graph, _, changed = assigned(f"<int64 n = {{3}}> {{ y = Loop (n, c, x) {loop} }}")
        body = graph.nodes[-1].attrs["body"]
        assert changed
        assert names(graph) == outside
        assert names(body).count("Reorder") == (read == "h")


def test_assign_layouts_copies_for_nested_loops_in_front_of_the_outer_one():
    inner = LOOP.format(pool=POOL, read="x")
    outer = f"""<body = o (int64 j, bool f, float[1, 4, 8, 8] p) => (bool e, float[1, 4, 8, 8] q)
        {{ e = Identity(f) q = Loop (n, f, p) {inner} }}>"""
    graph, _, _ = assigned(f"<int64 n = {{3}}> {{ y = Loop (n, c, x) {outer} }}")
    assert names(graph) == ["Reorder", "Loop"]


def test_assign_layouts_copies_for_a_branch_in_a_loop_there():
    branch = f"""If (go) <then_branch = t () => (float[1, 4, 8, 8] r) {{ r = {POOL} (x) }},
        else_branch = e () => (float[1, 4, 8, 8] s) {{ s = Identity(h) }}>"""
    loop = f"""<body = b (int64 i, bool go, float[1, 4, 8, 8] h) => (bool on, float[1, 4, 8, 8] k)
        {{ on = Identity(go) k = {branch} }}>"""
    graph, _, _ = assigned(f"<int64 n = {{3}}> {{ y = Loop (n, c, x) {loop} }}")
    assert names(graph) == ["Loop"]


MOVED = "a = Neg(x) t = Transpose <perm = [0, 2, 3, 1]> (a)"


@pytest.mark.parametrize("source", ["x", "a"])
@pytest.mark.parametrize("last", ["r", "y"])
def test_assign_layouts_reshape_of_what_is_fed_or_to_a_result_reads_a_copy(source, last):
    after = "" if last == "y" else "y = Neg(r)"
    moved = f"a = Neg(x) t = Transpose <perm = [0, 2, 3, 1]> ({source}) b = Neg(a)"
    graph, _, changed = assigned(
        f"<int64[4] s = {{1, 4, 8, 8}}> {{ {moved} {last} = Reshape(t, s) {after} }}"
    )
    assert changed
    assert [name for name in names(graph) if name != "Neg"] == ["Transpose", "Reorder", "Reshape"]


@pytest.mark.parametrize(
    ("dims", "shape", "target", "is_copied"),
    [
        ((2, 4, 1, 3), (2, 4, 5, 3), (2, 20, 3), True),
        ((2, 1, 3), (2, 4, 3), (8, 3), True),
        ((2, 1, 3), (2, 4, 3), (2, 12), True),
        ((1, 3), (4, 3), (12,), True),
        ((1, 1, 3), (4, 5, 3), (20, 3), False),  # both repeat
        ((2, 1, 3), (2, 4, 3), (2, 2, 2, 3), False),
        ((2, 1, 3), (2, 4, 3), (2, 1, 4, 3, 1), False),
        ((6, 1), (6, 4), (2, 3, 4), False),
        ((3,), (2, 3), (6,), True),
    ],
)
def test_assign_layouts_repeats_that_a_reshape_merges_are_copied(dims, shape, target, is_copied):
    b = GraphBuilder()
    x = b.input("x", "float32", list(dims))
    repeated = b.op("Expand", b.op("Neg", x), np.array(shape))
    b.output("y", b.op("Relu", b.op("Reshape", repeated, np.array(target))))
    session = ps.compile(b.model(), cache=False)
    assert ("Reorder" in [s.node.op.name for s in session.inspect.plan.steps]) == is_copied
    x = np.random.default_rng(3).standard_normal(dims, np.float32)
    wanted = np.maximum(np.broadcast_to(-x, shape).reshape(target), 0)
    np.testing.assert_array_equal(session.run({"x": x})["y"], wanted)


def test_assign_layouts_reshape_that_is_no_view_reads_a_copy():
    graph, _, changed = assigned(
        f"<int64[4] s = {{1, 4, 8, 8}}> {{ {MOVED} r = Reshape(t, s) y = Neg(r) }}"
    )
    assert changed
    assert names(graph) == ["Neg", "Transpose", "Reorder", "Reshape", "Neg"]
    memory = value_memory(graph, {node: compiled(node)[1] for node in graph.nodes})
    _, transpose, copy, reshape, _ = graph.nodes
    assert copy.inputs == transpose.outputs
    assert memory.copied == set()
    assert memory.views[reshape.outputs[0]].base is copy.outputs[0]


def test_assign_layouts_reshape_that_is_a_view_reads_no_copy():
    split = "<int64[4] s = {1, 4, 8, 8}, int64[5] m = {1, 8, 8, 2, 2}>"
    graph, _, changed = assigned(
        f"{split} {{ {MOVED} r = Reshape(t, m) q = Neg(r) y = Reshape(q, s) }}"
    )
    assert not changed
    assert names(graph) == ["Neg", "Transpose", "Reshape", "Neg", "Reshape"]
