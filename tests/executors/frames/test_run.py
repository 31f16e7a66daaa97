"""Runs of graphs with frames: recursion, iterations in flight, feeds, fetches and choices.

In the drawings ``─>`` is a value and ``..>`` a control edge, T and F are the outputs of a Switch. An
``Enter*`` is a constant one. Counts are of living executions; what is not listed did not run.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.backends.numpy import NumpyBackend
from penstock.build import GraphBuilder
from penstock.executors.frames import run
from penstock.executors.frames.frame_graph import FrameNode, StaticFrame, TokenRule
from penstock.host.threads import core_budget
from tests.support.frame_runs import EXECUTORS, inputs, loop_counts, ran, refused
from tests.support.meeting_backend import MeetingBackend
from tests.support.tf_graphs import Flow, Func, Shape, Type


def factorial() -> Flow:
    """
    F(n):  n ─> positive ─> If ─T─> n * F(n - 1)
                             └─F─> 1
    """
    g = inputs(n="int32")
    both = {"n": "int32"}, {"out": "int32"}
    kinds = {"Tin": [Type("int32")], "Tout": [Type("int32")]}
    g.function("F", *both, {"out": "choice:output:0"})
    g.const(np.int32(0), "zero")
    g.op("Greater", "n", "zero:output:0", name="positive")
    branches = {"then_branch": Func("Times"), "else_branch": Func("One")}
    kind = {"Tcond": Type("bool")}
    g.node("StatelessIf", "positive:z:0", "n", name="choice", **branches, **kinds, **kind)
    g.function("Times", *both, {"out": "product:z:0"})
    g.const(np.int32(1), "one")
    g.op("Sub", "n", "one:output:0", name="less")
    g.node("PartitionedCall", "less:z:0", name="again", f=Func("F"), **kinds)
    g.op("Mul", "n", "again:output:0", name="product")
    g.function("One", *both, {"out": "one:output:0"})
    g.const(np.int32(1), "one")
    g.main()
    g.node("PartitionedCall", "n", name="call", f=Func("F"), **kinds)
    return g


def test_function_that_calls_itself_under_a_condition_ends() -> None:
    values, counts = ran(factorial(), {"n": 6}, "call")
    assert values == [720]
    assert counts["call"] == 1
    assert ran(factorial(), {"n": 0}, "call")[0] == [1]


def test_recursion_without_end_meets_the_limit() -> None:
    """
    F(n):  n ─> F ─> negated
    """
    g = inputs(n="int32")
    g.function("F", {"n": "int32"}, {"out": "int32"}, {"out": "negated:y:0"})
    kinds = {"Tin": [Type("int32")], "Tout": [Type("int32")]}
    g.node("PartitionedCall", "n", name="again", f=Func("F"), **kinds)
    g.op("Neg", "again:output:0", name="negated")
    g.main()
    g.node("PartitionedCall", "n", name="call", f=Func("F"), **kinds)
    message = r"'F' .*Limits\.max_calls"
    refused(g, {"n": 6}, "call", error=ps.LimitExceeded, match=message)


class Order(ps.Observer):
    """Records the order in which some nodes begin."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.begun: list[str] = []

    def step_begin(self, run: Any, step: Any, inputs: Any) -> None:
        if step.node.name in self.names:
            self.begun.append(step.node.name)


@pytest.mark.parametrize(("parallel", "ahead"), [(1, 1), (2, 2), (5, 5), (64, 8)])
def test_iterations_in_flight_reach_parallel_iterations(parallel: int, ahead: int) -> None:
    """Besides the counter, each iteration has a long chain that no node waits for. An iteration may
    begin when the one ``parallel_iterations`` before it has ended, including its chain.

        while/i/body ─> c0 ─> c1 ─> ... ─> c99
    """
    g = inputs(zero="int32", n="int32")
    left = g.loop("while", "zero", "n", parallel=parallel)
    last = "while/i/body"
    for i in range(100):
        last = g.op("Identity", last, name=f"c{i}")
    session = ps.compile(g.bytes(), executor="frames", backends=["numpy"])
    order = Order("c0", "c99")
    outputs = session.run({"zero": 0, "n": 8}, [left], [last], observers=[order])
    assert outputs[left] == 8
    # the largest number of iterations that had begun and not ended at one time
    going, most = 0, 0
    for name in order.begun:
        going += 1 if name == "c0" else -1
        most = max(most, going)
    assert most == ahead
    assert Counter(order.begun) == {"c0": 8, "c99": 8}


def test_one_long_sample_makes_no_long_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may have been suspended, and a kernel on another thread may overtake it: of two
    samples the smaller counts, even that of the very first run."""
    monkeypatch.setattr(run, "_LONG_S", 1.0)
    node = FrameNode(None, TokenRule.ORDINARY, StaticFrame(""))
    for seconds, cost in [(9.0, 0.0), (0.1, 0.1), (9.0, 0.1), (8.0, 8.0), (0.1, 0.1)]:
        run._record_cost(node, seconds)
        assert node.cost == cost
        assert (node.unmeasured == 0) == (seconds > 1.0)


@pytest.mark.parametrize("end", ["counter", "unchanged", "size"])
def test_one_parallel_iteration_keeps_side_effects_in_order(end: str) -> None:
    """As in gradients of loops: nothing but the limit says which pop comes first. Each turn ends
    only when its slow push has, and the loop when all have: the limit of the other one is what its
    counter ends with, a variable that it leaves as it is, or the size of another.

        while/i/body ─> c0 ─> ... ─> c49 ─> push(stack)
        while/j/body ..> pop(stack) ─> digits * 10 + popped
    """
    g = inputs(zero="int32", n="int32")
    g.const(np.int32(-1), "size")
    g.node("StackV2", "size", name="stack", elem_type=Type("int32"), stack_name="digits")
    left = g.loop("while", "zero", "n", parallel=1)
    handle = g.enter("stack", frame="while", constant=True, parallel=1, T="resource")
    last = "while/i/body"
    for _ in range(50):
        last = g.op("Identity", last)
    g.op("StackPushV2", handle, last, name="push")
    if end == "unchanged":
        left = g.carry("while", "kept", "n", lambda kept: kept, parallel=1)
    elif end == "size":
        g.const(np.arange(5, dtype=np.int32), "five")
        left = g.op("Size", g.carry("while", "v", "five", lambda v: g.op("Neg", v), parallel=1))
    g.loop("back", "zero", left, parallel=1)
    held = g.enter("stack", frame="back", constant=True, parallel=1, T="resource")
    ten = g.enter(g.const(np.int32(10), "ten"), frame="back", constant=True, parallel=1)

    def step(digits: str) -> str:
        popped = g.node("StackPopV2", held, f"^{digits}", name="pop", elem_type=Type("int32"))
        return g.op("AddV2", g.op("Mul", digits, ten), popped)

    digits = g.carry("back", "digits", "zero", step, parallel=1)
    values, counts = ran(g, {"zero": 0, "n": 5}, digits, targets=["push"])
    assert values == [43210]
    assert counts["push"] == counts["pop"] == 5
    session = ps.compile(g.bytes(), executor="dataflow", backends=["numpy"])
    assert session.run({"zero": 0, "n": 5}, [digits], ["push"])[digits] == 43210


def test_node_of_a_fed_tensor_runs_for_its_control_edges() -> None:
    """
    x ─> fed ─> negated
          :....> after <── y
    """
    g = inputs(x="int32", y="int32")
    g.op("AddV2", "x", "x", name="fed")
    g.op("Neg", "fed", name="negated")
    g.op("Square", "y", "^fed", name="after")
    values, counts = ran(g, {"fed:0": 5}, "negated")
    assert values == [-5]
    assert counts == {"negated": 1}
    values, counts = ran(g, {"fed:0": 5, "x": 1, "y": 3}, "negated", "after", "fed:0")
    assert values == [-5, 9, 5]
    assert counts == {"fed": 1, "negated": 1, "after": 1}
    for executor in EXECUTORS:
        session = ps.compile(g.bytes(), executor=executor, backends=["numpy"])
        with pytest.raises(ps.InvalidInput, match="'x:0'"):
            session.run({"fed:0": 5, "y": 3}, ["negated", "after"])


def test_fed_placeholder_does_not_run() -> None:
    """
    x ..> after <── y
    """
    g = inputs(x="int32", y="int32")
    g.op("Square", "y", "^x", name="after")
    values, counts = ran(g, {"x": 5, "y": 3}, "after")
    assert values == [9]
    assert counts["x"] == 0
    assert counts["after"] == 1


def test_fed_output_of_a_switch_is_live() -> None:
    """A branch may be fed in its middle; its predicate is not computed.

    x ─> switch ─T─> on ─> merge
    p ──────┘ └─F─> off ─> ┘
    """
    g = inputs(x="int32", p="bool")
    switch = g.switch("x", "p", "switch")
    on, off = g.op("Neg", f"{switch}:1", name="on"), g.op("Square", switch, name="off")
    g.merge(off, on, name="merge")
    values, counts = ran(g, {"on:0": 5, "x": 2, "p": False}, "on")
    assert values == [5]
    assert counts == {}
    values, counts = ran(g, {"switch:1": 4}, "on")
    assert values == [-4]
    assert counts == {"on": 1}


def test_fetch_inside_a_loop_works_if_it_runs_once() -> None:
    """
    [ while i < n: i += 1 ], of which while/add is fetched
    """
    g = inputs(zero="int32", n="int32")
    g.loop("while", "zero", "n")
    values, counts = ran(g, {"zero": 0, "n": 1}, "while/add")
    assert values == [1]
    del (loop := loop_counts("while", 1))["while/i/exit"]
    assert counts == loop
    refused(g, {"zero": 0, "n": 2}, "while/add", error=ps.RunError, match="'while/add:0'.*twice")
    refused(g, {"zero": 0, "n": 0}, "while/add", error=ps.DeadTensor, match="'while/add:0'")


def test_target_inside_a_loop_runs_the_loop_without_exits() -> None:
    """
    [ while i < n: i += 1 ], of which while/add is a target
    """
    g = inputs(zero="int32", n="int32")
    g.loop("while", "zero", "n")
    values, counts = ran(g, {"zero": 0, "n": 4}, targets=["while/add"])
    assert values == []
    del (loop := loop_counts("while", 4))["while/i/exit"]
    assert counts == loop


@pytest.mark.parametrize(
    ("i", "chosen"), [(0, 0), (1, 1), (2, 2), (3, 2), (-1, 2), (2**31 - 1, 2), (-(2**31), 2)]
)
def test_switch_n_out_of_range_takes_its_last_output(i: int, chosen: int) -> None:
    """
    x ─> _SwitchN(i) ─0─> ┐
             │ └───1────> merge
             └─────2────> ┘
    """
    g = inputs(x="int32", i="int32")
    g.node("_SwitchN", "x", "i", name="switch", num_outs=3, T=Type("int32"))
    g.merge(*[g.op("Neg", f"switch:{k}", name=f"branch_{k}") for k in range(3)], name="merge")
    values, counts = ran(g, {"x": 4, "i": i}, "merge", "merge:1")
    assert values == [-4, chosen]
    assert counts == {"switch": 1, f"branch_{chosen}": 1, "merge": 1}


def choosing(op: str, kind: str, *dims: int) -> Flow:
    """A node that chooses between functions that give 10, 20, 30: the first two for an If.

    by ─> Case(by) ─> 10 | 20 | 30
    """
    g = Flow()
    g.placeholder("by", kind, *dims)
    names = []
    for value in (10, 20, 30):
        names.append(Func(f"F{value}"))
        g.function(names[-1], {}, {"out": "int32"}, {"out": "value:output:0"})
        g.const(np.int32(value), "value")
    g.main()
    shared: dict[str, Any] = {"Tin": [], "Tout": [Type("int32")], "name": "choice"}
    if op == "Case":
        g.node(op, "by", branches=names, **shared)
    else:
        chosen = {"then_branch": names[0], "else_branch": names[1], "Tcond": Type(kind)}
        g.node(op, "by", **chosen, **shared)
    return g


@pytest.mark.parametrize(("by", "value"), [(0, 10), (1, 20), (2, 30), (3, 30), (-1, 30)])
def test_case_out_of_range_takes_its_last_branch(by: int, value: int) -> None:
    values, counts = ran(choosing("Case", "int32"), {"by": by}, "choice")
    assert values == [value]
    assert counts["choice"] == 1


@pytest.mark.parametrize(
    ("by", "value"),
    [
        (True, 10),
        (False, 20),
        (np.int32(0), 20),
        (np.int32(-3), 10),
        (np.float32(0.25), 10),
        (np.float32(-0.0), 20),
        (np.float32(np.nan), 10),
        (np.zeros(0, np.float32), 20),
        (np.zeros(1, np.float32), 10),
        (np.zeros((2, 0), np.int32), 20),
        (np.zeros((2, 2), np.int32), 10),
    ],
)
def test_if_is_true_for_a_nonzero_scalar_and_a_nonempty_array(by: Any, value: int) -> None:
    array = np.asarray(by)
    g = choosing("If", array.dtype.name, *array.shape)
    values, counts = ran(g, {"by": array}, "choice")
    assert values == [value]
    assert counts["choice"] == 1


def unwritten(*dims: int, known: bool = True) -> Flow:
    """Element 0 of two is written, and element i is read; the shape of elements is known, or open.

    size ─> TensorArrayV3 ─> write(0, x) ─> read(i)
    """
    g = Flow()
    g.placeholder("i", "int32")
    g.placeholder("x", "float32", *dims)
    g.const(np.int32(2), "size")
    g.const(np.int32(0), "first")
    shape = Shape(dims if known else [-1 for _ in dims])
    g.node("TensorArrayV3", "size", name="array", dtype=Type("float32"), element_shape=shape)
    g.op("TensorArrayWriteV3", "array", "first", "x", "array:1", name="write", T="float32")
    g.node("TensorArrayReadV3", "array", "i", "write", name="read", dtype=Type("float32"))
    return g


def test_unwritten_tensor_array_element_of_known_shape_is_zeros() -> None:
    g = unwritten(2)
    x = np.array([1, 2], np.float32)
    assert ran(g, {"i": 0, "x": x}, "read")[0] == [[1, 2]]
    values, counts = ran(g, {"i": 1, "x": x}, "read")
    assert values == [[0, 0]]
    assert counts["read"] == counts["write"] == 1
    refused(g, {"i": 2, "x": x}, "read", error=ps.RunError, match="read")


def test_unwritten_tensor_array_element_of_unknown_shape_is_an_error() -> None:
    g, x = unwritten(2, known=False), np.array([1, 2], np.float32)
    assert ran(g, {"i": 0, "x": x}, "read")[0] == [[1, 2]]
    refused(g, {"i": 1, "x": x}, "read", error=ps.RunError, match="read")


@pytest.mark.parametrize("kind", ["branch", "loop"])
def test_slow_kernels_in_a_branch_or_a_loop_overlap(kind):
    """Each kernel waits until the other has begun, once they are known to be slow."""
    backend = MeetingBackend()
    b = GraphBuilder()
    x, p = b.input("x", np.float32, []), b.input("p", np.bool_, [])

    def both(value):
        return b.op("Sin", value) + b.op("Cos", value)

    if kind == "branch":
        b.output("y", b.cond(p, lambda: both(x), lambda: x))
    else:
        b.output("y", b.loop(lambda i, value: both(value), x, times=1, condition=lambda _: p))
    session = ps.compile(b.model(), executor="frames", backends=[backend])
    for _ in range(60):
        result = session.run({"x": 1, "p": True})["y"]
        np.testing.assert_allclose(result, np.sin(1) + np.cos(1), rtol=1e-6)
        if backend.met:
            break
    assert backend.met or core_budget() == 1


def test_kernel_is_measured_again_though_two_runs_counted_it_down_at_once(monkeypatch):
    monkeypatch.setattr(run, "_LONG_S", math.inf)  # a thread may be suspended while it is measured
    b = GraphBuilder()
    b.output("y", b.op("Sin", b.input("x", np.float32, [])))
    session = ps.compile(b.model(), executor="frames", backends=[NumpyBackend()])
    session.run({"x": 1})
    (executor,) = session._plans.executors()
    (node,) = [node for node in executor.parts[0].graph.nodes if node.node is not None]
    assert node.unmeasured > 0
    node.unmeasured = -1  # two threads saw 1
    for _ in range(2):
        session.run({"x": 1})
        assert node.unmeasured > 0
