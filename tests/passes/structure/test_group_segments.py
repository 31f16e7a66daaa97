"""Which nodes of a graph with frames form a segment.

In the drawings ``─>`` is a value and ``..>`` a control edge, T and F are the outputs of a Switch.
"""

from __future__ import annotations

import numpy as np

import penstock as ps
from penstock.analysis.frames import Frames
from penstock.ir.graph import Graph, sort
from penstock.ops.internal.segment import is_segment
from penstock.passes.lowering.partition import partition
from penstock.passes.structure.group_segments import group_segments
from tests.support.tf_graphs import Flow


def segments(g: Flow, *slow: str) -> list[set[str]]:
    """The names of the nodes in each segment."""
    graph: Graph = ps.load(g.bytes()).graph
    sort(graph)
    group_segments(graph, Frames(graph), lambda n: n.op.role is None, lambda n: n.name in slow)
    bodies = [node.attrs["body"] for node in graph.nodes if is_segment(node)]
    return [{node.name for node in body.nodes} for body in bodies]


def ports(**dtypes: str) -> Flow:
    g = Flow()
    for name, dtype in dtypes.items():
        g.placeholder(name, dtype)
    return g


def test_nodes_behind_one_output_of_a_switch_form_a_segment() -> None:
    """
    x ─> before ─> also ─> switch ─T─> on ─> after
                   p ──────┘    └──F─> off ─> later
    """
    g = ports(x="int32", p="bool")
    switch = g.switch(g.op("Neg", g.op("Neg", "x", name="before"), name="also"), "p", "switch")
    g.op("Neg", g.op("Neg", f"{switch}:1", name="on"), name="after")
    g.op("Neg", g.op("Neg", switch, name="off"), name="later")
    groups = segments(g)
    assert sorted(map(sorted, groups)) == [["after", "on"], ["also", "before"], ["later", "off"]]


def test_segment_is_convex() -> None:
    """``first`` and ``last`` run together, but what is between them runs in a branch.

    x ─> first ─> switch ─T─> on ─> merge ─> last ─> end
           └──────────────────F─────┘         ^
           └──────────────────────────────────┘
    """
    g = ports(x="int32", p="bool")
    first = g.op("Neg", "x", name="first")
    switch = g.switch(first, "p", "switch")
    merge = g.merge(g.op("Neg", f"{switch}:1", name="on"), switch, name="merge")
    g.op("Neg", g.op("AddV2", merge, first, name="last"), name="end")
    assert segments(g) == [{"last", "end"}]


def test_nodes_wait_for_the_same_slow_nodes() -> None:
    """
    x ─> slow ─> behind ─> further
    └──> beside ─> also
    """
    g = ports(x="int32")
    g.op("Neg", g.op("Neg", g.op("Neg", "x", name="slow"), name="behind"), name="further")
    g.op("Abs", g.op("Abs", "x", name="beside"), name="also")
    assert segments(g) == [{"slow", "behind", "further", "beside", "also"}]
    groups = segments(g, "slow")
    assert sorted(map(sorted, groups)) == [["also", "beside"], ["behind", "further"]]


def test_value_that_is_sent_does_not_wait_for_other_nodes() -> None:
    """
    x ─> early ─> sent ─> on ─> after        (another device reads what is sent)
                    └───> other ─> far
    """
    g = ports(x="int32")
    sent = g.op("Neg", g.op("Neg", "x", name="early"), name="sent")
    g.op("Neg", g.op("Neg", sent, name="on"), name="after")
    g.op("Neg", g.op("Neg", sent, name="other"), name="far")
    graph: Graph = ps.load(g.bytes()).graph
    sort(graph)
    names = {"other": "/device:CPU:1", "far": "/device:CPU:1"}
    devices = {node: names.get(node.name, "/device:CPU:0") for node in graph.nodes}
    here, _ = partition(graph, Frames(graph), devices)
    group_segments(here.graph, Frames(here.graph), lambda n: n.op.role is None, lambda n: False)
    bodies = [node.attrs["body"] for node in here.graph.nodes if is_segment(node)]
    assert [{node.name for node in body.nodes} for body in bodies] == [
        {"early", "sent"},
        {"on", "after"},
    ]


def test_iteration_does_not_wait_for_slow_nodes_of_the_one_before() -> None:
    """The total of slow values comes late; the counter of the loop, and the next value, do not.

    while i < n: i += 1; total += slow(i)
    """
    g = ports(n="int32")
    zero = g.const(np.int32(0), "zero")
    g.loop("f", zero, "n")

    def step(total: str) -> str:
        slow = g.op("Neg", "f/i/body", name="slow")
        return g.op("AddV2", total, g.op("Abs", slow, name="size"), name="sum")

    g.carry("f", "total", zero, step)
    for group in segments(g, "slow"):
        late = {"size", "sum", "f/total/body"}
        assert group <= late or group.isdisjoint(late), group


def test_token_of_the_first_iteration_alone_is_waited_for_by_nothing_else() -> None:
    """``once`` reads an Enter that is not constant: in later iterations it never runs.

    while i < n: i += 1        start ─> Enter ─> once ─> twice
    """
    g = ports(n="int32", start="int32")
    g.loop("f", g.const(np.int32(0), "zero"), "n")
    entered = g.enter("start", frame="f")
    once = g.op("AddV2", entered, "f/i/body", name="once")
    g.op("Neg", once, name="twice")
    groups = segments(g)
    assert {"once", "twice"} in groups
    assert all("f/add" not in group for group in groups if "once" in group)
