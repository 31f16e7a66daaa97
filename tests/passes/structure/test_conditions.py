"""Switches and merges that become Ifs, and those that stay."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from tests.passes.structure.test_raise_control_flow import (
    BOOL,
    INT,
    SIDES,
    answers,
    fed,
    loops,
    raised,
    reasons,
)
from tests.support.tf_graphs import Builder


def cond(g: Builder, name: str, value: str, side: int = 1) -> str:
    """Twice ``value`` in one branch, the value itself in the other."""
    g.node("Switch", value, "p", name=f"{name}/switch", T=INT)
    g.node("AddV2", *[f"{name}/switch:{side}"] * 2, name=f"{name}/twice", T=INT)
    inputs = (f"{name}/switch:{1 - side}", f"{name}/twice")
    return g.node("Merge", *inputs, name=name, T=INT, N=2)


def test_merges_by_one_predicate_share_an_if_where_order_allows() -> None:
    g = loops()
    cond(g, "a", "x")
    cond(g, "b", "most")
    cond(g, "c", "b", side=0)
    made, stays = raised(g.bytes(), ["a", "a:1", "c"])
    assert not stays
    assert Counter(n.op.name for n in made.nodes) == {"If": 2}
    assert answers(g, ["a", "a:1", "c"], fed(x=5)) == [10, 1, 6]
    assert answers(g, ["a", "a:1", "c"], fed(x=5, p=False)) == [5, 0, 6]


def test_node_shared_by_two_conditions_runs_in_one_of_them() -> None:
    g = loops()
    cond(g, "a", "x")
    g.node("Switch", "a", "p", name="again", T=INT)
    g.node("AddV2", "a/twice", "again:1", name="sum", T=INT)
    g.node("Merge", "again", "sum", name="b", T=INT, N=2)
    assert "two conditions that run in sequence" in reasons(g, ["b"])
    assert answers(g, ["b"], fed(x=5)) == [20]
    assert answers(g, ["b"], fed(x=5, p=False)) == [5]


def test_failing_branch_that_is_not_taken_is_not_run() -> None:
    """Not even where the predicate is constant and the branch could be folded."""
    g = loops()
    g.node("Switch", "p", "p", name="pivots", T=BOOL)
    g.node("Identity", "pivots:1", name="pivot", T=BOOL)
    g.const(np.int32(1), "one", "^pivot")
    g.const(np.int32(0), "zero", "^pivot")
    g.node("FloorDiv", "one", "zero", name="fails", T=INT)
    g.node("Switch", "x", "p", name="switch", T=INT)
    out = g.node("Merge", "switch", "fails", name="out", T=INT, N=2)
    assert not reasons(g, [out])
    assert answers(g, [out], fed(x=5, p=False)) == [5]
    for executor in ("frames", "linear"):
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        with pytest.raises(ps.RunError, match="division by zero"):
            session.run({"x": np.int32(5), "p": np.array(True)}, [out])


def test_side_effect_without_readers_runs_in_its_branch() -> None:
    g = loops()
    g.node("VarHandleOp", name="v", dtype=INT, shared_name="v")
    g.node("Switch", "x", "p", name="switch", T=INT)
    g.node("AssignVariableOp", "v", "switch:1", name="assign", dtype=INT)
    g.node("ReadVariableOp", "v", name="read", dtype=INT)
    assert not reasons(g, [], ["assign"])
    for executor in ("frames", "linear", "auto"):
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        session.run({"x": np.int32(1), "p": np.array(True)}, [], ["assign"])
        session.run({"x": np.int32(2), "p": np.array(False)}, [], ["assign"])
        assert session.run({}, ["read"])["read"] == 1


def test_merge_of_sides_of_two_conditions_stays() -> None:
    g = loops()
    g.placeholder("q", "bool")
    g.node("Switch", "x", "p", name="by_p", T=INT)
    g.node("Switch", "most", "q", name="by_q", T=INT)
    g.node("AddV2", "by_p:1", "by_q:1", name="both", T=INT)
    g.node("Merge", "both", "by_p", name="out", T=INT, N=2)
    assert SIDES in reasons(g, ["out"])
