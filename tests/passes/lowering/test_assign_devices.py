"""Nodes get devices: those that they name, or those of their handles and readers."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.ir.device_name import DeviceName, local
from penstock.ir.graph import Graph, Value
from penstock.passes.lowering.assign_devices import assign_devices
from tests.passes.lowering.test_partition import node


def test_assign_devices_keeps_readers_with_their_handle():
    #  v -> s -+-> read           m -> push      (m: Merge of v's handle and w's)
    v = node("v", [], "/cpu:1", "VarHandleOp")
    w = node("w", [], "/cpu:0", "VarHandleOp")
    p = Value("p")
    sw = node("s", [v.outputs[0], p], "/cpu:2", "Switch", 2)
    read = node("read", [sw.outputs[1]], "/cpu:0", "ReadVariableOp")
    other = node("other", [read.outputs[0]], "/cpu:2")
    apart = node("apart", [w.outputs[0]], "/cpu:2", "ReadVariableOp")
    graph = Graph([p], [other.outputs[0], apart.outputs[0]], [v, w, sw, read, other, apart])
    devices = local(3)
    assign_devices(graph, devices)
    assert [n.device for n in graph.nodes] == [devices[i] for i in (1, 0, 1, 1, 2, 0)]


def test_assign_devices_puts_handles_with_a_common_reader_together():
    v = node("v", [], "/cpu:1", "VarHandleOp")
    w = node("w", [], "/cpu:0", "VarHandleOp")
    merge = node("m", [v.outputs[0], w.outputs[0]], "/cpu:2", "Merge", 2)
    read = node("read", [merge.outputs[0]], "/cpu:2", "ReadVariableOp")
    graph = Graph([], [read.outputs[0]], [v, w, merge, read])
    assign_devices(graph, local(3))
    assert len({n.device for n in graph.nodes}) == 1


def test_assign_devices_completes_partial_names_with_the_first_match():
    nodes = [node(f"n{i}", [], name) for i, name in enumerate(["", "/cpu:*", "/task:0", "cpu:2"])]
    graph = Graph([], [n.outputs[0] for n in nodes], nodes)
    devices = local(["cpu:5", "cpu:2"])
    assign_devices(graph, devices)
    assert [n.device for n in nodes] == [devices[0]] * 3 + [devices[1]]
    assert all(DeviceName.parse(n.device).full for n in nodes)


@pytest.mark.parametrize("name", ["/job:worker/cpu:0", "/cpu:9", "/gpu:*", "nonsense:", "/task:1"])
def test_assign_devices_refuses_unknown_devices(name):
    nodes = [node("fine", [], "/cpu:0"), node("odd", [], name), node("same", [], name)]
    with pytest.raises(ps.InvalidModel, match="odd, same") as caught:
        assign_devices(Graph([], [], nodes), local(2))
    assert repr(name) in str(caught.value)
    assert "fine" not in str(caught.value)
