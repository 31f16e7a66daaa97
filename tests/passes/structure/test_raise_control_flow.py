"""Raising of TensorFlow's frames and dead values to Loop and If, and what must stay."""

from __future__ import annotations

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


ASKED = "has no value if its branch is not taken"


SIDES = "not the two sides of one condition"


STAYS: Mapping[str, tuple[tuple[int, ...], str]] = {
    "dev_control_edges": ((1, 2), ASKED),
    "feed_switch_output": ((0, 3), ASKED),
    "loop_dead_limit": ((2,), ASKED),
    "loop_dead_start": ((2,), ASKED),
    "loop_fetch_inside_error": ((0, 2, 3), "fetched from inside a loop"),
    "loop_nonconstant_enter_late": ((0, 1, 2), "in the first iteration only"),
    "prim_control_edge_from_dead_node": ((0, 1), ASKED),
    "prim_control_edge_from_dead_switch": ((0, 1), ASKED),
    "prim_control_trigger_revives": ((1, 2), ASKED),
    "prim_identity_n_dead": ((2,), ASKED),
    "prim_live_and_dead_inputs": ((0, 2, 3, 4), "branch|in sequence share it"),
    "prim_merge_all_dead": ((0, 1, 2, 3), ASKED),
    "prim_merge_dead_into_merge": ((0,), SIDES),
    "prim_merge_three": ((0, 1), SIDES),
    "prim_switch": (tuple(range(6)), ASKED),
    "prim_switchn": (tuple(range(9)), "belongs to no condition or loop"),
}
"""The runs of each case that need frames, and the reason: only tokens define dead fetches, dead
variables and fetches inside of loops; the other graphs are not of tf.cond's form."""


FRAMED = [case for case in cases() if not case.structured]


EXECUTORS = ["linear", "dataflow", "parallel", "streams"]


PAIRS = sweep(product(FRAMED, EXECUTORS), len(FRAMED))


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


@pytest.mark.costly
@given(programs(), st.tuples(st.integers(-4, 4), st.integers(-4, 4)))
def test_raising_of_random_programs_leaves_no_primitive(
    program: Block, numbers: tuple[int, int]
) -> None:
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


def test_trace_of_a_raised_loop_counts_every_iteration() -> None:
    g = loops()
    out = g.loop("x", "most", inside=Loops.again)
    session = ps.compile(g.bytes(), executor="linear", backends=["numpy"])
    trace = ps.Trace()
    session.run({"x": np.int32(0), "most": np.int32(3)}, [out], trace=trace)
    assert trace.counts == {"f": 1, "f/less": 3, "f/add": 2, "f/again": 2}


def test_fetch_from_inside_of_a_loop_is_left_to_frames() -> None:
    g = loops()
    g.loop("x", "most")
    assert "is fetched from inside a loop" in reasons(g, ["f/add"])
    assert answers(g, ["f/add"], fed(most=1)) == [1]
    session = ps.compile(g.bytes(), executor="auto", backends=["numpy"])
    with pytest.raises(ps.RunError, match="computed twice"):
        session.run({"x": np.int32(0), "most": np.int32(2)}, ["f/add"])


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
