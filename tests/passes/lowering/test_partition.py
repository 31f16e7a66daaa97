"""Partitions: what is sent, what drives loops on each device; assignments of nodes to devices."""

from __future__ import annotations

from collections import Counter
from typing import Never

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.frames import Frames
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.subgraph import Extract
from penstock.core.limits import Limits
from penstock.core.types import ANY
from penstock.executors.control import Control
from penstock.executors.frames.builder import FrameGraphBuilder, NodeCompilers
from penstock.executors.frames.executor import FramesExecutor
from penstock.ir.device_name import local
from penstock.ir.graph import Graph, GraphPart, Model, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops.registry import TENSORFLOW, find
from penstock.passes.lowering.partition import partition
from tests.support.random_frames import RandomGraph
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_loops import INT, Names, add, cond, const, counting, enter, while_loop

A, B, C = "/device:CPU:0", "/device:CPU:1", "/device:CPU:2"


def graph_of(b: Builder, *fetches: str) -> Graph:
    """The graph that some fetches need, its nodes on the devices that the builder has given."""
    model = ps.load(b.bytes())
    session = ps.compile(model, executor="frames", backends=["numpy"])
    names = [f"{name}:0" if ":" not in name else name for name in fetches]
    feeds = [value.name for value in model.graph.inputs]
    return session._subgraphs.extracted(
        Extract(tuple(feeds), tuple(names)), session._subgraphs._compiler
    ).graph


def parts_of(b: Builder, *fetches: str) -> dict[str, GraphPart]:
    graph = graph_of(b, *fetches)
    return {part.device: part for part in partition(graph, Frames(graph), by_name(graph))}


def by_name(graph: Graph) -> dict[Node, str]:
    return {node: node.device or A for node in graph.nodes}


def counts(part: GraphPart) -> Counter[str]:
    return Counter(node.op.name for node in part.graph.nodes)


def on(b: Builder, device: str, *names: str) -> None:
    for node in b.proto.node:
        if node.name in names:
            node.device = device


def transfers(parts: dict[str, GraphPart]) -> Counter[tuple[str, str, str]]:
    """What is sent, from where to where; and that exactly that is received."""
    found = []
    for op in ("_Send", "_Recv"):
        keys = ("send_device", "recv_device", "tensor_name")
        nodes = [node for part in parts.values() for node in part.graph.nodes]
        found.append(Counter(tuple(n.attrs[key] for key in keys) for n in nodes if n.op.name == op))
    assert found[0] == found[1]
    return found[0]


def test_partition_on_one_device_is_one_part():
    b = Builder()
    y = add(b, b.placeholder("x", "int32"), b.const(np.int32(1)))
    parts = parts_of(b, y)
    assert list(parts) == [A]
    assert transfers(parts) == {}
    assert (parts[A].inputs, parts[A].outputs) == ((0,), (0,))


def test_partition_sends_a_value_once_to_each_reading_device():
    #          +-> p (B) -+
    #  x -> a -+-> q (B) -+-> s (C)
    #          +----------+
    b = Builder()
    x = b.placeholder("x", "int32")
    a = add(b, x, x)
    p, q = add(b, a, a), add(b, a, a, "Sub")
    s = add(b, add(b, p, q), a)
    on(b, B, p, q)
    on(b, C, s)
    parts = parts_of(b, s)
    assert transfers(parts) == {
        (A, B, f"{a}:0"): 1,
        (A, C, f"{a}:0"): 1,
        (B, A, f"{p}:0"): 1,
        (B, A, f"{q}:0"): 1,
        (A, C, "n4:0"): 1,
    }
    assert [(part.inputs, part.outputs) for part in parts.values()] == [
        ((0,), ()),
        ((), ()),
        ((), (0,)),
    ]


def test_partition_gives_an_input_to_each_reading_device():
    b = Builder()
    x = b.placeholder("x", "int32")
    here, there = add(b, x, x), add(b, x, x, "Mul")
    on(b, B, there)
    parts = parts_of(b, there, here, x)
    assert transfers(parts) == {}
    assert {name: (part.inputs, part.outputs) for name, part in parts.items()} == {
        A: ((0,), (1, 2)),
        B: ((0,), (0,)),
    }


def test_partition_sends_a_signal_for_a_control_edge_without_a_value():
    b = Builder()
    x = b.placeholder("x", "int32")
    a = add(b, x, x)
    quiet = add(b, x, x, "Mul")
    after_both = b.const(np.int32(1), "after", f"^{a}", f"^{quiet}")
    y = add(b, a, after_both)
    on(b, B, after_both, y)
    parts = parts_of(b, y)
    assert transfers(parts) == {(A, B, f"{a}:0"): 1, (A, B, f"^{quiet}"): 1}
    (send,) = [n for n in parts[A].graph.nodes if n.op.name == "_Send" and not n.inputs]
    assert [node.name for node in send.control_inputs] == [quiet]


def test_partition_sends_a_signal_for_a_control_edge_from_a_switch():
    """One of its outputs may be dead though it ran."""
    b = Builder()
    x, p = b.placeholder("x", "int32"), b.placeholder("p", "bool")
    sw = b.node("Switch", x, p, T=INT)
    after = b.const(np.int32(1), "after", f"^{sw}")
    dead = add(b, f"{sw}:1", f"{sw}:1")
    on(b, B, after, dead)
    parts = parts_of(b, after, dead)
    assert transfers(parts) == {(A, B, f"^{sw}"): 1, (A, B, f"{sw}:1"): 1}


def loop_with(b: Builder, elsewhere: str = B) -> str:
    """A loop whose sum is computed elsewhere."""
    total = counting(b, b.placeholder("n", "int32"))
    (slow,) = [node.name for node in b.proto.node if node.op == "Neg"]
    on(b, elsewhere, slow)
    return total


def test_partition_adds_a_control_loop_on_devices_without_the_loop_cond():
    b = Builder()
    parts = parts_of(b, loop_with(b))
    loop = dict.fromkeys(("Enter", "Merge", "Switch", "NextIteration"), 1)
    assert counts(parts[B]) == {**loop, "_Recv": 2, "Neg": 1, "_Send": 1}
    assert counts(parts[A])["_Recv"] == 1
    assert counts(parts[A])["Merge"] == 2  # its own variables
    frames = Frames(parts[B].graph).of
    names = {node.op.name: frames[node].path for node in parts[B].graph.nodes}
    assert names.pop("Enter") == ()
    assert set(names.values()) == {("while",)}
    (made,) = [node for node in parts[B].graph.nodes if node.op.name == "Enter"]
    assert made.attrs["parallel_iterations"] == 10


def test_partition_adds_a_control_loop_where_the_loop_cond_depends_on_others():
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"))
    (less,) = [node.name for node in b.proto.node if node.op == "Less"]
    on(b, B, less)
    parts = parts_of(b, total)
    assert counts(parts[A])["Merge"] == 2 + 1
    assert counts(parts[B])["Merge"] == 1


def test_partition_copies_enters_and_next_iterations_to_their_readers():
    """Their values do not come once in each iteration, as all that is sent must."""
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"))
    merges = [node.name for node in b.proto.node if node.op == "Merge"]
    on(b, B, *merges)
    parts = parts_of(b, total)
    sent = [name for _, _, name in transfers(parts)]
    makers = {f"{node.name}:0" for node in b.proto.node if node.op in ("Enter", "NextIteration")}
    assert makers.isdisjoint(sent)
    assert counts(parts[A])["Enter"] >= 3  # which still run, and count
    assert counts(parts[A])["NextIteration"] >= 2


def test_partition_nests_control_loops_as_loops_nest():
    b = Builder()
    n = b.placeholder("n", "int32")
    limit = enter(b, "outer", n, 3, True)

    def inner(values: Names) -> Names:
        return [add(b, values[0], const(b, 1, values[0]))]

    def body(values: Names) -> Names:
        bound = enter(b, "inner", limit, 7, True)
        (made,) = while_loop(
            b,
            "inner",
            [const(b, 0, values[0])],
            lambda inside: b.node("Less", inside[0], bound, T=INT),
            inner,
            7,
        )
        return [add(b, values[0], const(b, 1, made))]

    (ended,) = while_loop(
        b, "outer", [b.const(np.int32(0))], lambda v: b.node("Less", v[0], limit, T=INT), body, 3
    )
    sums = [node.name for node in b.proto.node if node.op == "AddV2"]
    on(b, B, sums[0])
    parts = parts_of(b, ended)
    frames = Frames(parts[B].graph).of
    (there,) = [node for node in parts[B].graph.nodes if node.op.name == "Add"]
    assert frames[there].path == ("outer", "inner")
    entered = {
        node.attrs["frame_name"]: node.attrs["parallel_iterations"]
        for node in parts[B].graph.nodes
        if node.op.name == "Enter"
    }
    assert entered == {"outer": 3, "inner": 7}
    assert counts(parts[B])["NextIteration"] == 2


def test_partition_refuses_a_loop_across_devices_without_a_loop_cond():
    b = Builder()
    x, p = b.placeholder("x", "int32"), b.placeholder("p", "bool")
    merged = b.node("Merge", enter(b, "loop", x, 10), "next", T=INT, N=2)
    often = b.node("Enter", p, T=Type("bool"), frame_name="loop", is_constant=True)
    sw = b.node("Switch", merged, often, T=INT)
    more = add(b, f"{sw}:1", f"{sw}:1")
    b.node("NextIteration", more, name="next", T=INT)
    left = b.node("Exit", sw, T=INT)
    assert len(parts_of(b, left)) == 1
    on(b, B, more)
    with pytest.raises(ps.InvalidModel, match=r"'loop' spans devices .*CPU:0.*CPU:1.*LoopCond"):
        parts_of(b, left)


def test_partition_does_not_change_the_graph():
    b = Builder()
    graph = graph_of(b, loop_with(b))
    before = [(node.name, node.device, list(node.inputs)) for node in graph.nodes]
    partition(graph, Frames(graph), by_name(graph))
    assert [(node.name, node.device, list(node.inputs)) for node in graph.nodes] == before


def executor_of(graph: Graph, parts: list[GraphPart]) -> FramesExecutor:
    """The executor of parts, all of them in this process."""

    def kernel(node: Node) -> tuple[Kernel, str]:
        types = [None if v is None else v.type for v in node.inputs]
        return backend.kernel(node, types), backend.name

    def unused(*_: object) -> Never:
        raise AssertionError

    backend = NumpyBackend()
    builder = FrameGraphBuilder(
        NodeCompilers(kernel, unused, unused, unused, unused), Limits(), workers=2
    )
    return builder.build(graph, parts, len(parts))


def twice(graph: Graph) -> list[GraphPart]:
    """By worker, then by device."""
    workers = {node: node.device.rpartition("/device:")[0] for node in graph.nodes}
    found = []
    for outer in partition(graph, Frames(graph), workers):
        own = {node: node.device for node in outer.graph.nodes}
        assert {device.rpartition("/device:")[0] for device in own.values()} <= {outer.device}
        for inner in partition(outer.graph, Frames(outer.graph), own):
            inputs = tuple(outer.inputs[i] for i in inner.inputs)
            outputs = tuple(outer.outputs[i] for i in inner.outputs)
            found.append(GraphPart(inner.device, inner.graph, inputs, outputs, inner.paths))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_partitions_of_partitions_compute_the_same(seed):
    made = RandomGraph(seed)
    for i, node in enumerate(made.b.proto.node):
        node.device = f"/job:w/task:{i * 7 % 2}/device:CPU:{i * 5 % 3 % 2}"
    graph = graph_of(made.b, *made.fetches)
    for node in graph.nodes:
        node.device = node.device or "/job:w/task:0/device:CPU:0"
    parts = twice(graph)
    assert len(parts) == len({node.device for node in graph.nodes})
    for part in parts:
        assert part.paths == Frames(part.graph).paths()
    for part in parts:
        assert part.paths == Frames(part.graph).paths()
    frames = Frames(graph)
    whole = executor_of(graph, partition(graph, frames, dict.fromkeys(graph.nodes, "")))
    x = [np.int32(seed % 5)] if graph.inputs else []
    assert executor_of(graph, parts).run(x, Control()) == whole.run(x, Control())


def node(
    name: str, inputs: list[Value], device: str, op: str = "Identity", outputs: int = 1
) -> Node:
    found = find(op, TENSORFLOW) or find(op)
    assert found is not None
    made = [Value(f"{name}:{i}", ANY) for i in range(outputs)]
    return Node(found, inputs, made, {}, name=name, device=device)


def test_session_with_devices_pickles_them(tmp_path):
    import pickle

    b = Builder()
    y = add(b, b.placeholder("x", "int32"), b.const(np.int32(1)))
    on(b, B, y)
    path = tmp_path / "two.pb"
    path.write_bytes(b.bytes())
    session = pickle.loads(pickle.dumps(ps.compile(path, devices=2)))
    assert session.run({"x": np.int32(2)}, [y])[y] == 3
    assert session._compiler.context.devices == local(2)


def test_condition_across_devices_computes_the_same():
    b = Builder()
    x, p = b.placeholder("x", "int32"), b.placeholder("p", "bool")
    y = cond(b, p, [x], lambda v: add(b, v[0], v[0]), lambda v: add(b, v[0], v[0], "Mul"))
    for i, each in enumerate(b.proto.node):
        each.device = (A, B)[i % 2]
    session = ps.compile(Model({"g": ps.load(b.bytes()).graph}, "g"), devices=2)
    for taken, wanted in ((True, 10), (False, 25)):
        outputs = session.run({"x:0": np.int32(5), "p:0": np.array(taken)}, [f"{y}:0"])
        assert outputs == {f"{y}:0": wanted}
