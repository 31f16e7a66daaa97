"""Raising of TensorFlow's frames and dead values to Loop and If, and what must stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.analysis.verify import verify
from penstock.ir.graph import Graph, Model, is_framed
from penstock.passes.context import Unraised
from penstock.passes.dead_code import cut
from penstock.passes.structure.raise_control_flow import raise_control_flow
from tests.support.sweeps import sweep
from tests.support.tf_cases import Case, cases, check
from tests.support.tf_cases import feeds as feeds_of
from tests.support.tf_graphs import Builder, Func, Type
from tests.support.tf_programs import Block, evaluate, graph, programs

INT, BOOL = Type("int32"), Type("bool")


# The corpus.

ASKED = "has no value if its branch is not taken"
SIDES = "not the two sides of one condition"
STAYS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "dev_control_edges": ((1, 2), ASKED),
    "feed_switch_output": ((0, 3), ASKED),
    "loop_dead_limit": ((0, 1, 2), "may live and others be dead"),
    "loop_dead_start": ((2,), ASKED),
    "loop_fetch_inside_error": ((0, 2, 3), "fetched from inside of a loop"),
    "loop_nonconstant_enter_late": ((0, 1, 2), "in the first iteration only"),
    "prim_control_edge_from_dead_node": ((0, 1), ASKED),
    "prim_control_edge_from_dead_switch": ((0, 1), ASKED),
    "prim_control_trigger_revives": ((1, 2), ASKED),
    "prim_identity_n_dead": ((2,), ASKED),
    "prim_live_and_dead_inputs": ((0, 2, 3, 4), "branch|in common"),
    "prim_merge_all_dead": ((0, 1, 2, 3), ASKED),
    "prim_merge_dead_into_merge": ((0,), SIDES),
    "prim_merge_three": ((0, 1), SIDES),
    "prim_switch": (tuple(range(6)), ASKED),
    "prim_switchn": (tuple(range(9)), "part of no condition or loop"),
}
"""The runs of each case that need frames, and the reason: only tokens define dead fetches, dead
variables and fetches inside of loops; the other graphs are not of tf.cond's form."""

FRAMED = [case for case in cases() if not case.structured]
EXECUTORS = ["linear", "dataflow", "parallel", "streams"]
PAIRS = sweep(product(FRAMED, EXECUTORS), len(FRAMED) * len(EXECUTORS) // 3)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1]}")
def test_raised_corpus_matches_the_recorded_runs_of_tensorflow(pair: tuple[Case, str]) -> None:
    case, executor = pair
    session = None
    staying, reason = STAYS.get(case.name, ((), ""))
    for number, run in enumerate(case.runs):
        expected = run["expect"]
        timeout = run.get("timeout_ms")
        options = {"timeout": timeout / 1000} if timeout else {}

        def made(run=run, options=options):
            nonlocal session
            session = session or ps.compile(case.path, executor=executor, backends=["numpy"])
            return session.run(feeds_of(run), run["fetches"], run["targets"], **options)

        if number in staying:
            with pytest.raises(ps.Unsupported, match=reason):
                made()
        elif "error" in expected:
            with pytest.raises(ps.PenstockError) as caught:
                made()
            assert not isinstance(caught.value, ps.Unsupported)
        else:
            check(case, run, made())


def test_raising_of_structured_tensorflow_cases_leaves_no_primitive() -> None:
    """Only cases of single primitives, and of errors, stay."""
    assert len(FRAMED) == 112
    assert not any(name.startswith(("cond", "func", "grad", "rnn", "ta", "tl")) for name in STAYS)


# Random programs.


def raised(
    source: bytes, fetches: Sequence[str], targets: Sequence[str] = ()
) -> tuple[Graph, list[Unraised]]:
    """The part of a graph that fetches need, raised; it must be valid."""
    session = ps.compile(source, executor="frames", backends=["numpy"])
    main = ps.load(source).graph
    values = {v.name: v for node in main.nodes for v in node.outputs if v is not None}
    values.update((v.name, v) for v in main.inputs)
    nodes = [node for node in main.nodes if node.name in targets]
    fetched = [values[name if ":" in name else f"{name}:0"] for name in fetches]
    made, stays = raise_control_flow(cut(main, main.inputs, fetched, nodes))
    verify(Model({"main": made}, "main"))
    session.close()
    return made, stays


def test_raising_of_random_programs_leaves_no_primitive() -> None:
    @given(programs(), st.tuples(st.integers(-4, 4), st.integers(-4, 4)))
    def agrees(program: Block, numbers: tuple[int, int]) -> None:
        with np.errstate(over="ignore"):
            wanted = evaluate(program, [np.int32(x) for x in numbers])
        source, names = graph(program, 2)
        made, stays = raised(source, names)
        assert not stays
        assert not is_framed(made)
        inputs = {f"x{i}": np.int32(x) for i, x in enumerate(numbers)}
        for executor in ("frames", "linear", "dataflow"):
            session = ps.compile(source, executor=executor, backends=["numpy"])
            outputs = session.run(inputs, names)
            assert [int(outputs[name]) for name in names] == [int(x) for x in wanted], executor

    agrees()


# Graphs by hand.


class Loops(Builder):
    """Counts from 0 as long as ``x`` is less than ``most``, unless a test has it otherwise."""

    def enter(self, value: str, name: str, frame: str = "f", *, constant: bool = False) -> str:
        attrs = {"frame_name": frame, "is_constant": constant, "parallel_iterations": 10}
        return self.node("Enter", value, name=name, T=INT, **attrs)

    def loop(self, start: str, most: str, frame: str = "f", inside: Any = None) -> str:
        """Adds 1, or what ``inside(graph, value)`` makes of the value instead."""
        f = frame
        self.enter(start, f"{f}/enter", f)
        self.enter(most, f"{f}/most", f, constant=True)
        self.node("Merge", f"{f}/enter", f"{f}/next", name=f"{f}/merge", T=INT, N=2)
        self.node("Less", f"{f}/merge", f"{f}/most", name=f"{f}/less", T=INT)
        self.node("LoopCond", f"{f}/less", name=f"{f}/cond")
        self.node("Switch", f"{f}/merge", f"{f}/cond", name=f"{f}/switch", T=INT)
        self.node("Identity", f"{f}/switch:1", name=f"{f}/value", T=INT)
        self.const(np.int32(1), f"{f}/one", f"^{f}/value")
        self.node("AddV2", f"{f}/value", f"{f}/one", name=f"{f}/add", T=INT)
        made = f"{f}/add" if inside is None else inside(self, f"{f}/add")
        self.node("NextIteration", made, name=f"{f}/next", T=INT)
        return self.node("Exit", f"{f}/switch", name=f"{f}/exit", T=INT)

    def again(self, value: str) -> str:
        """Adds 1 once more."""
        return self.node("AddV2", value, "f/one", name="f/again", T=INT)


def loops() -> Loops:
    g = Loops()
    g.placeholder("x", "int32")
    g.placeholder("most", "int32")
    g.placeholder("p", "bool")
    return g


def reasons(g: Builder, fetches: Sequence[str], targets: Sequence[str] = ()) -> str:
    return "; ".join(each.reason for each in raised(g.bytes(), fetches, targets)[1])


def answers(g: Builder, fetches: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
    """The outputs of each executor that can run the graph; they must agree."""
    found = []
    for executor in ("frames", "auto", "linear"):
        try:
            session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
            needed = {
                k: v for k, v in feeds.items() if any(k == n.name[:-2] for n in session.inputs)
            }
            found.append([int(x) for x in session.run(needed, fetches).values()])
        except ps.Unsupported:
            assert executor == "linear"
    assert all(each == found[0] for each in found)
    return found[0]


def fed(x: int = 0, most: int = 3, p: bool = True) -> dict[str, Any]:
    return {"x": np.int32(x), "most": np.int32(most), "p": np.array(p)}


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


def test_trace_of_a_raised_loop_counts_every_iteration() -> None:
    g = loops()
    out = g.loop("x", "most", inside=Loops.again)
    session = ps.compile(g.bytes(), executor="linear", backends=["numpy"])
    trace = ps.Trace()
    session.run({"x": np.int32(0), "most": np.int32(3)}, [out], trace=trace)
    assert trace.counts == {"f": 1, "f/less": 3, "f/add": 2, "f/again": 2}


def test_raised_loop_obeys_the_limit_on_iterations() -> None:
    g = loops()
    out = g.loop("x", "most", inside=Loops.again)
    limits = ps.Limits(max_iterations=10)
    session = ps.compile(g.bytes(), executor="linear", backends=["numpy"], limits=limits)
    assert session.run({"x": np.int32(0), "most": np.int32(20)}, [out])[out] == 20
    with pytest.raises(ps.LimitExceeded, match="f/merge"):
        session.run({"x": np.int32(0), "most": np.int32(21)}, [out])


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
    assert "two conditions, one behind the other" in reasons(g, ["b"])
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


# What stays, each with its reason; the frames executor runs it.


def test_fetch_from_inside_of_a_loop_is_left_to_frames() -> None:
    g = loops()
    g.loop("x", "most")
    assert "is fetched from inside of a loop" in reasons(g, ["f/add"])
    assert answers(g, ["f/add"], fed(most=1)) == [1]
    session = ps.compile(g.bytes(), executor="auto", backends=["numpy"])
    with pytest.raises(ps.RunError, match="computed twice"):
        session.run({"x": np.int32(0), "most": np.int32(2)}, ["f/add"])


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
    assert "no one predicate decides" in reasons(g, ["f/exit", "out"])


def test_loop_with_a_side_effect_in_its_condition_stays() -> None:
    g = loops()
    out = g.loop("x", "most")
    g.node("Assert", "f/less", "f/merge", name="assert", T=[INT])
    (node,) = (each for each in g.proto.node if each.name == "f/cond")
    node.input.append("^assert")
    assert "an effect in the condition" in reasons(g, [out])


def test_loop_with_an_exit_of_no_variable_stays() -> None:
    g = loops()
    g.loop("x", "most")
    g.node("Neg", "f/switch", name="minus", T=INT)
    g.node("Exit", "minus", name="out", T=INT)
    assert "is none of its variables" in reasons(g, ["out"])
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
    assert "may live and others be dead" in reasons(g, [out, "merged"])
    assert answers(g, [out, "merged"], fed(p=False)) == [3, 0]


def test_frame_without_a_loop_with_a_merge_of_enters_stays() -> None:
    g = loops()
    g.node("Switch", "x", "p", name="switch", T=INT)
    g.enter("switch:1", "a")
    g.enter("most", "b")
    g.node("Merge", "a", "b", name="m", T=INT, N=2)
    g.node("Exit", "m", name="out", T=INT)
    assert "dead as soon as an Enter before it is" in reasons(g, ["out"])


def test_merge_of_sides_of_two_conditions_stays() -> None:
    g = loops()
    g.placeholder("q", "bool")
    g.node("Switch", "x", "p", name="by_p", T=INT)
    g.node("Switch", "most", "q", name="by_q", T=INT)
    g.node("AddV2", "by_p:1", "by_q:1", name="both", T=INT)
    g.node("Merge", "both", "by_p", name="out", T=INT, N=2)
    assert SIDES in reasons(g, ["out"])


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


# Graphs of which some is raised.


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
    assert [each.reason for each in stays] == ["'f/value:0' is fetched from inside of a loop"]
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


def test_executor_frames_raises_nothing() -> None:
    g = loops()
    out = g.loop("x", "most")
    session = ps.compile(g.bytes(), executor="frames", backends=["numpy"])
    trace = ps.Trace()
    session.run({"x": np.int32(0), "most": np.int32(3)}, [out], trace=trace)
    assert trace.counts["f/merge"] == 4
    assert trace.counts["f/exit"] == 1


def test_primitives_in_a_function_are_raised() -> None:
    g = loops()
    g.function("choose", {"a": "int32", "q": "bool"}, {"r": "int32"}, {"r": "m:output:0"})
    g.node("Switch", "a", "q", name="s", T=INT)
    g.node("Neg", "s:output_true:0", name="minus", T=INT)
    g.node("Merge", "s:output_false:0", "minus:y:0", name="m", T=INT, N=2)
    g.main()
    types = {"Tin": [INT, BOOL], "Tout": [INT], "Tcond": BOOL}
    both = {"then_branch": Func("choose"), "else_branch": Func("choose")}
    out = g.node("If", "p", "x", "p", name="out", **types, **both)
    for executor in ("linear", "auto"):
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        for p in (True, False):
            outputs = session.run({"x": np.int32(5), "p": np.array(p)}, [out])
            assert outputs[out] == (-5 if p else 5)
