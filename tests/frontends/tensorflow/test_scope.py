"""Names and frames of a GraphDef."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.frames import Frames
from penstock.core.errors import InvalidModel
from tests.frontends.tensorflow.test_importer import refused, sum_of_two
from tests.support.tf_graphs import Builder, Type


def test_node_name_stands_for_its_first_output() -> None:
    session = ps.compile(sum_of_two().bytes())
    a, b = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    for feeds_ in ({"a": a, "b:0": b}, {"a:0": a, "b:0": b}, {"a": a, "b": b}):
        out = session.run(feeds_, ["scope/neg", "sum:0", "sum"])
        assert list(out) == ["scope/neg", "sum:0", "sum"]
        np.testing.assert_array_equal(out["scope/neg"], [-4, -6])
        np.testing.assert_array_equal(out["sum"], out["sum:0"])
    assert [port.name for port in session.inputs] == ["a:0", "b:0"]
    assert [port.name for port in session.outputs] == ["scope/neg:0"]
    np.testing.assert_array_equal(session.run({"sum": a}, ["scope/neg"])["scope/neg"], -a)
    np.testing.assert_array_equal(session(a, b), [-4, -6])


def test_nodes_in_any_order_are_connected() -> None:
    g = sum_of_two()
    nodes = list(g.proto.node)[::-1]
    del g.proto.node[:]
    g.proto.node.extend(nodes)
    (out,) = ps.compile(g.bytes()).run({"a": [1.0], "b": [2.0]}).values()
    assert out == [-3]


def test_cycle_without_next_iteration_is_refused() -> None:
    g = Builder()
    g.node("Neg", "b", name="a", T=Type("float32"))
    g.node("Neg", "a", name="b", T=Type("float32"))
    refused(g, "each of these nodes waits for the one before it")
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Merge", "x", "n", name="m", N=2, T=Type("float32"))
    g.node("Neg", "m", name="n", T=Type("float32"))
    refused(g, "each of these nodes waits")


def loop(**attrs: object) -> Builder:
    g = Builder()
    g.placeholder("x", "float32")
    given = {"frame_name": "f", "parallel_iterations": 10, **attrs}
    g.node("Enter", "x", name="e", T=Type("float32"), **given)
    g.node("Merge", "e", "next", name="m", N=2, T=Type("float32"))
    g.node("Less", "m", "m", name="less", T=Type("float32"))
    g.node("LoopCond", "less", name="cond")
    g.node("Switch", "m", "cond", name="s", T=Type("float32"))
    g.node("NextIteration", "s:1", name="next", T=Type("float32"))
    g.node("Exit", "s:0", name="out", T=Type("float32"))
    return g


def test_loop_with_next_iteration_loads() -> None:
    model = ps.load(loop().bytes())
    frames = Frames(model.graph).of
    names = {node.name: frame.name for node, frame in frames.items()}
    assert names["e"] == ""
    assert {names[node] for node in ("m", "less", "cond", "s", "next", "out")} == {"f"}
    session = ps.compile(model, executor="frames", backends=["numpy"])
    assert session.run({"x": 1.0}, ["out"])["out"] == 1.0


def test_enter_without_frame_name_or_iterations_is_refused() -> None:
    refused(loop(parallel_iterations=0), "e in the model allows 0 parallel_iterations")
    refused(
        loop(frame_name=""), "e in the model enters a frame without a name; give it a frame_name"
    )


def test_leaving_a_frame_outside_of_one_is_refused() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Exit", "x", name="y", T=Type("float32"))
    with pytest.raises(InvalidModel, match="y in the model is an Exit of no frame"):
        Frames(ps.load(g.bytes()).graph)


def test_frame_with_two_parents_is_refused() -> None:
    g = loop()
    g.node("Enter", "e", name="inner", T=Type("float32"), frame_name="g")
    g.node("Enter", "x", name="other", T=Type("float32"), frame_name="g")
    with pytest.raises(InvalidModel, match="frame 'g' is entered from"):
        Frames(ps.load(g.bytes()).graph)
