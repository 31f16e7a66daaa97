"""Graphs with frames that are refused, or accepted, when they are compiled."""

from __future__ import annotations

import pytest

import penstock as ps
from tests.support.frame_runs import inputs, loop_counts, ran, refused


def test_two_loop_conds_in_one_frame_are_refused() -> None:
    """
    [ while i < n ]  and  [ while i < n ]  both in frame "shared"
    """
    g = inputs(x="int32", n="int32")
    for name in ("one", "two"):
        g.op("Neg", g.loop(name, "x", "n", frame="shared"), name=f"after_{name}")
    feeds = {"x": 0, "n": 2}
    refused(g, feeds, "after_one", "after_two", error=ps.InvalidModel, match="two LoopConds")
    values, counts = ran(g, feeds, "after_one")  # only the part that a run needs must be valid
    assert values == [-2]
    assert counts == {"after_one": 1, **loop_counts("one", 2)}


def test_loops_with_one_loop_cond_may_share_a_frame() -> None:
    """The same as in the counter of a gradient's loop.

    in frame "shared":  [ while i < n, LoopCond ]  [ while i < n, Less alone ]
    """
    g = inputs(x="int32", n="int32")
    g.loop("one", "x", "n", frame="shared")
    g.loop("two", "x", "n", frame="shared", loop_cond=False)
    values, counts = ran(g, {"x": 0, "n": 2}, "one/i/exit", "two/i/exit")
    assert values == [2, 2]
    two = loop_counts("two", 2)
    del two["two/cond"]
    assert counts == {**loop_counts("one", 2), **two}


def test_one_frame_name_under_two_parents_is_refused() -> None:
    """
    x ─> Enter a ─> Enter inner ─> Exit ─> Exit ─> after_a
    x ─> Enter b ─> Enter inner ─> Exit ─> Exit ─> after_b
    """
    g = inputs(x="int32")
    for name in "ab":
        inner = g.enter(g.enter("x", frame=name, name=f"in_{name}"), frame="inner")
        g.op("Exit", g.op("Exit", inner), name=f"after_{name}")
    refused(g, {"x": 1}, "after_a", "after_b", error=ps.InvalidModel, match="entered from frame")
    assert ran(g, {"x": 1}, "after_b")[0] == [1]


@pytest.mark.parametrize("edge", ["in_a", "^in_a"])
def test_inputs_from_different_frames_are_refused(edge: str) -> None:
    """
    x ─> Enter a ─> mixed <── y        ..> makes no difference
    """
    g = inputs(x="int32", y="int32")
    g.enter("x", frame="a", name="in_a")
    other = "y" if edge == "in_a" else "in_b"
    g.enter("y", frame="b", name="in_b")
    g.op("AddN", other, edge, name="mixed", N=1 + (edge == "in_a"))
    g.op("Exit", "mixed", name="after")
    feeds = {"x": 1, "y": 2}
    refused(g, feeds, "after", error=ps.InvalidModel, match="different frames")
    g.op("Exit", "in_a", name="fine")
    assert ran(g, feeds, "fine")[0] == [1]


def test_exit_without_an_enter_is_refused() -> None:
    """
    x ─> Exit
    """
    g = inputs(x="int32")
    g.op("Neg", g.op("Exit", "x", name="lost"), name="after")
    refused(g, {"x": 1}, "after", error=ps.InvalidModel, match="lost.*Exit of no frame")


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("dead", [False, True])
def test_frame_without_a_loop_passes_values_on(constant: bool, dead: bool) -> None:
    """
    x ─> switch ─F─> Enter ─> negated ─> Exit ─> merge
    p ──────┘ └─T──────────────────────────────> ┘
    """
    g = inputs(x="int32", p="bool")
    switch = g.switch("x", "p", "switch")
    entered = g.enter(switch, frame="frame", constant=constant, name="enter")
    left = g.op("Exit", g.op("Neg", entered, name="negated"), name="exit")
    g.merge(left, f"{switch}:1", name="merge")
    values, counts = ran(g, {"x": 3, "p": dead}, "merge", "merge:1")
    assert values == ([3, 1] if dead else [-3, 0])
    inside = {} if dead else {"enter": 1, "negated": 1, "exit": 1}
    assert counts == {"switch": 1, "merge": 1, **inside}


@pytest.mark.parametrize("parallel", [0, -1, -(2**40)])
def test_parallel_iterations_below_one_are_refused(parallel: int) -> None:
    """
    x ─> Enter (parallel_iterations = 0) ─> Exit
    """
    g = inputs(x="int32")
    g.op("Exit", g.enter("x", frame="frame", parallel=parallel), name="after")
    refused(g, {"x": 1}, "after", error=ps.InvalidModel, match="parallel_iterations")
