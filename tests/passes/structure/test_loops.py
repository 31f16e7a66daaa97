"""Frames of TensorFlow that become loops, and those that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import is_framed
from tests.passes.structure.test_raise_control_flow import (
    BOOL,
    INT,
    Loops,
    answers,
    fed,
    loops,
    raised,
    reasons,
)
from tests.support.tf_graphs import Builder, Type


def test_raised_loop_computes_its_condition_before_and_in_its_body() -> None:
    g = loops()
    out = g.loop("x", "most")
    made, stays = raised(g.bytes(), [out])
    assert not stays
    assert Counter(n.op.name for n in made.nodes) == {"Identity": 3, "Less": 1, "Loop": 1}
    (loop,) = (node for node in made.nodes if node.op.name == "Loop")
    assert loop.name == "f"
    body = Counter(node.op.name for node in loop.attrs["body"].nodes)
    assert body == {"Identity": 1, "Const": 1, "Add": 1, "Less": 1}
    assert answers(g, [out], fed()) == [3]
    assert answers(g, [out], fed(x=7)) == [7]


def test_raised_loop_obeys_the_limit_on_iterations() -> None:
    g = loops()
    out = g.loop("x", "most", inside=Loops.again)
    limits = ps.Limits(max_iterations=10)
    session = ps.compile(g.bytes(), executor="linear", backends=["numpy"], limits=limits)
    assert session.run({"x": np.int32(0), "most": np.int32(20)}, [out])[out] == 20
    with pytest.raises(ps.LimitExceeded, match="f/merge"):
        session.run({"x": np.int32(0), "most": np.int32(21)}, [out])


def test_loop_in_an_untaken_branch_computes_no_condition() -> None:
    g = loops()
    g.node("Switch", "x", "p", name="switch", T=INT)
    g.node("Switch", "most", "p", name="switched", T=INT)
    g.const(np.int32(0), "zero")
    g.node("FloorDiv", "switched:1", "zero", name="fails", T=INT)
    g.loop("switch:1", "fails")
    out = g.node("Merge", "switch", "f/exit", name="out", T=INT, N=2)
    assert not reasons(g, [out])
    assert answers(g, [out], fed(x=5, p=False)) == [5]


def test_side_effects_in_branches_and_loops_keep_their_order() -> None:
    """A variable that each iteration reads, changes and reads again."""

    def inside(g: Builder, value: str) -> str:
        g.node("ReadVariableOp", "v", "^f/value", name="before", dtype=INT)
        g.node("AssignVariableOp", "v", value, "^before", name="assign", dtype=INT)
        g.node("ReadVariableOp", "v", "^assign", name="after", dtype=INT)
        g.node("AddV2", "before", "after", name="both", T=INT)
        return "both"

    class Variables(Loops):
        def loop(self, start: str, most: str, frame: str = "f", inside: Any = None) -> str:
            handle = self.node("VarHandleOp", name="handle", dtype=INT, shared_name="v")
            attrs = {"frame_name": frame, "is_constant": True, "parallel_iterations": 1}
            self.node("Enter", handle, name="v", T=Type("resource"), **attrs)
            return super().loop(start, most, frame, inside)

    g = Variables()
    g.placeholder("x", "int32")
    g.placeholder("most", "int32")
    out = g.loop("x", "most", inside=inside)
    g.node("AssignVariableOp", "handle", "x", name="init", dtype=INT)
    g.node("ReadVariableOp", "handle", f"^{out}", name="last", dtype=INT)
    assert not reasons(g, [out, "last"])
    results = []
    for executor in ("frames", "linear", "dataflow", "parallel", "streams", "auto"):
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        session.run({"x": np.int32(0)}, [], ["init"])
        outputs = session.run({"x": np.int32(0), "most": np.int32(20)}, [out, "last"])
        results.append([int(outputs[name]) for name in (out, "last")])
    # 0: 0+1; 1: 1+2; 3: 2+4; 6: 4+7; 11: 7+12; 19: 12+20; and so 32
    assert results == [[32, 20]] * 6


def test_loop_that_reads_a_merge_index_stays() -> None:
    g = loops()
    out = g.loop(
        "x", "most", inside=lambda g, v: g.node("AddV2", v, "f/merge:1", name="late", T=INT)
    )
    assert "whether this is its first iteration" in reasons(g, [out])
    assert answers(g, [out], fed(most=4)) == [5]


def test_loop_with_a_variable_that_never_leaves_stays() -> None:
    """No predicate of the loop decides about the variable, which would continue without end."""
    g = loops()
    g.loop("x", "most")
    g.enter("x", "e")
    g.node("Merge", "e", "again", name="m", T=INT, N=2)
    g.node("NextIteration", "m", name="again", T=INT)
    g.node("Switch", "m", "f/cond", name="s", T=INT)
    g.node("Exit", "s", name="out", T=INT)
    assert "no single predicate decides" in reasons(g, ["f/exit", "out"])


def test_loop_with_a_side_effect_in_its_condition_stays() -> None:
    g = loops()
    out = g.loop("x", "most")
    g.node("Assert", "f/less", "f/merge", name="assert", T=[INT])
    (node,) = (each for each in g.proto.node if each.name == "f/cond")
    node.input.append("^assert")
    assert "a side effect in the condition" in reasons(g, [out])


def test_loop_with_an_exit_of_no_variable_stays() -> None:
    g = loops()
    g.loop("x", "most")
    g.node("Neg", "f/switch", name="minus", T=INT)
    g.node("Exit", "minus", name="out", T=INT)
    assert "is not a loop variable" in reasons(g, ["out"])
    assert answers(g, ["out"], fed()) == [-3]


def test_loop_with_an_enter_that_depends_on_its_exit_stays() -> None:
    """One variable leaves before a constant enters that the others need."""
    g = loops()
    out = g.loop("x", "most")
    g.node("AddV2", out, out, name="twice", T=INT)
    g.enter("twice", "late", constant=True)
    g.enter("x", "e")
    g.node("Merge", "e", "again", name="m", T=INT, N=2)
    g.node("Switch", "m", "f/cond", name="s", T=INT)
    g.node("AddV2", "s:1", "late", name="sum", T=INT)
    g.node("NextIteration", "sum", name="again", T=INT)
    g.node("Exit", "s", name="out", T=INT)
    assert "depends on one that leaves it" in reasons(g, ["out"])
    assert answers(g, ["out"], fed()) == [18]


def test_loop_with_variables_of_different_conditions_stays() -> None:
    g = loops()
    g.node("Switch", "x", "p", name="switch", T=INT)
    out = g.loop("x", "most")
    g.enter("switch:1", "e")
    g.node("Merge", "e", "again", name="m", T=INT, N=2)
    g.node("Switch", "m", "f/cond", name="s", T=INT)
    g.node("NextIteration", "s:1", name="again", T=INT)
    g.node("Exit", "s", name="other", T=INT)
    g.node("Merge", "switch", "other", name="merged", T=INT, N=2)
    assert "may be live while others are dead" in reasons(g, [out, "merged"])
    assert answers(g, [out, "merged"], fed(p=False)) == [3, 0]


def test_frame_without_a_loop_with_a_merge_of_enters_stays() -> None:
    g = loops()
    g.node("Switch", "x", "p", name="switch", T=INT)
    g.enter("switch:1", "a")
    g.enter("most", "b")
    g.node("Merge", "a", "b", name="m", T=INT, N=2)
    g.node("Exit", "m", name="out", T=INT)
    assert "dead as soon as an Enter before it is" in reasons(g, ["out"])


@pytest.mark.parametrize(("depth", "max_depth"), [(5, 64), (20, 64), (5, 4)])
def test_nested_loops_beyond_the_limit_of_graphs_stay(monkeypatch, depth, max_depth) -> None:
    limits = ps.Limits(max_depth=max_depth)
    monkeypatch.setattr("penstock.passes.structure.raise_control_flow.DEFAULT_LIMITS", limits)

    def nested(number: int) -> Any:
        def inside(g: Loops, value: str) -> str:
            return g.loop(value, f"f{number}/most", f"f{number + 1}", nested(number + 1))

        return inside if number < depth else None

    g = loops()
    out = g.loop("x", "most", "f1", nested(1))
    made, stays = raised(g.bytes(), [out])
    assert bool(stays) == (depth > max_depth)
    assert answers(g, [out], fed(most=2)) == [2]
    if stays:
        assert "more loops" in stays[0].reason
        # All but the outermost are one node.
        assert Counter(n.op.name for n in made.nodes)["Loop"] == 1


def outer(g: Loops) -> str:
    """A loop that counts by an inner one, and whose index is fetched."""

    def inside(g: Builder, value: str) -> str:
        assert isinstance(g, Loops)
        return g.loop(value, "f/most", "inner")

    return g.loop("x", "most", inside=inside)


def test_inner_loop_of_a_loop_that_stays_is_raised() -> None:
    g = loops()
    out = outer(g)
    fetches = [out, "f/value"]
    made, stays = raised(g.bytes(), fetches)
    assert [each.reason for each in stays] == ["'f/value:0' is fetched from inside a loop"]
    ops = Counter(node.op.name for node in made.nodes)
    assert ops["Loop"] == 1
    assert ops["Merge"] == ops["NextIteration"] == 1
    session = ps.compile(g.bytes(), executor="auto", backends=["numpy"])
    trace = ps.Trace()
    outputs = session.run({"x": np.int32(0), "most": np.int32(5)}, fetches, trace=trace)
    assert [int(outputs[name]) for name in fetches] == [5, 0]
    assert trace.counts["inner"] == 1
    assert trace.counts["f/merge"] == 2
    with pytest.raises(ps.Unsupported, match='"auto" runs it'):
        linear = ps.compile(g.bytes(), executor="linear", backends=["numpy"])
        linear.run({"x": np.int32(0), "most": np.int32(5)}, fetches)


# Loops in a branch that choose by its predicate again, as gradients do for each of their stacks.


def again_by(side: int) -> Callable[[Loops, str], str]:
    """Adds 1 to what a Switch by the predicate of the branch passes on on this side."""

    def inside(g: Loops, value: str) -> str:
        attrs = {"frame_name": "f", "is_constant": True, "parallel_iterations": 10}
        g.node("Enter", "p", name="f/p", T=BOOL, **attrs)
        g.node("Switch", value, "f/p", name="f/again_switch", T=INT)
        return g.again(f"f/again_switch:{side}")

    return inside


def in_branch(start: str, most: str, side: int = 1) -> Loops:
    """A loop from ``start`` to ``most``, which may be dead unless ``p``, or else ``x`` itself."""
    g = loops()
    g.node("Switch", "x", "p", name="start", T=INT)
    g.node("Switch", "most", "p", name="end", T=INT)
    out = g.loop(start, most, inside=again_by(side))
    g.node("Merge", "start:0", out, name="y", T=INT, N=2)
    return g


@pytest.mark.parametrize("most", ["end:1", "most"])
def test_loop_in_a_branch_that_asks_its_predicate_again_is_raised(most: str) -> None:
    g = in_branch("start:1", most)
    made, stays = raised(g.bytes(), ["y"])
    assert not stays
    assert not is_framed(made)
    assert answers(g, ["y"], fed(x=1, most=4)) == [5]
    assert answers(g, ["y"], fed(x=1, most=4, p=False)) == [1]


def test_loop_whose_limit_alone_is_dead_is_raised() -> None:
    """Its variable lives, but nothing leaves without the predicate."""
    g = in_branch("x", "end:1")
    made, stays = raised(g.bytes(), ["y"])
    assert not stays
    assert not is_framed(made)
    assert answers(g, ["y"], fed(x=1, most=4)) == [5]
    assert answers(g, ["y"], fed(x=1, most=4, p=False)) == [1]


def test_loop_that_runs_in_both_branches_asks_its_predicate_itself() -> None:
    """Only a constant of its body may be dead: the loop ends where it runs no body."""

    def inside(g: Loops, value: str) -> str:
        g.enter("end:1", "f/end", constant=True)
        g.node("AddV2", again_by(1)(g, value), "f/end", name="f/more", T=INT)
        return "f/more"

    g = loops()
    g.node("Switch", "most", "p", name="end", T=INT)
    out = g.loop("x", "most", inside=inside)
    assert "may be live while others are dead" in reasons(g, [out])
    assert answers(g, [out], fed(x=1, most=4)) == [7]
    assert answers(g, [out], fed(x=5, most=4, p=False)) == [5]


def test_loop_that_goes_on_in_the_other_branch_is_left_to_frames() -> None:
    g = in_branch("start:1", "end:1", side=0)
    assert "no single predicate decides" in reasons(g, ["y"])
    assert answers(g, ["y"], fed(x=1, most=1)) == [1]
