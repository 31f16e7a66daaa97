"""Recursive functions: under every kind of condition, to any depth, and without end."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.executors.frames import run, scheduler
from tests.support.tf_graphs import Flow, Func, Shape, Type
from tests.support.timing import SOON

INT32 = Type("int32")
KINDS: dict[str, Any] = {"Tin": [INT32], "Tout": [INT32]}
ONE_TO_ONE = {"n": "int32"}, {"out": "int32"}
EXECUTORS = pytest.mark.parametrize("executor", ["frames", "auto"])


class Functions(Flow):
    """A graph that calls functions of one number; ``F`` is called first."""

    def __init__(self) -> None:
        super().__init__()
        self.placeholder("n", "int32")
        self.call("n", "F", name="call")

    def define(self, name: str, result: str) -> None:
        self.function(name, *ONE_TO_ONE, {"out": result})

    def call(self, value: str, function: str, name: str = "") -> str:
        return self.node("PartitionedCall", value, name=name, f=Func(function), **KINDS)

    def positive(self) -> str:
        """Return whether n is positive."""
        self.const(np.int32(0), "zero")
        self.op("Greater", "n", "zero:output:0", name="positive")
        return "positive:z:0"

    def less(self, by: int = 1) -> str:
        """Return n minus ``by``."""
        self.const(np.int32(by), f"by_{by}")
        self.op("Sub", "n", f"by_{by}:output:0", name=f"less_{by}")
        return f"less_{by}:z:0"

    def if_(self, condition: str, value: str, then: str, other: str, name: str = "if") -> str:
        branches = {"then_branch": Func(then), "else_branch": Func(other)}
        self.node("If", condition, value, name=name, Tcond=Type("bool"), **branches, **KINDS)
        return f"{name}:output:0"

    def constant(self, name: str, value: int) -> None:
        self.define(name, "value:output:0")
        self.const(np.int32(value), "value")

    def session(self, executor: str = "frames", **limits: Any) -> ps.Session:
        self.main()
        bounds = ps.Limits(**limits)
        return ps.compile(self.bytes(), executor=executor, backends=["numpy"], limits=bounds)

    def value(self, n: int, executor: str = "frames", **limits: Any) -> int:
        session = self.session(executor, **limits)
        return int(session.run({"n": n}, ["call"], timeout=SOON)["call"])


def triangle() -> Functions:
    """
    F(n):  n ─> positive ─> If ─T─> n + F(n - 1)
                             └─F─> 0
    """
    g = Functions()
    g.define("F", "if:output:0")
    g.if_(g.positive(), "n", "More", "Zero")
    g.define("More", "sum:z:0")
    g.call(g.less(), "F", "again")
    g.op("AddV2", "n", "again:output:0", name="sum")
    g.constant("Zero", 0)
    return g


def fibonacci() -> Functions:
    """
    F(n):  If(n - 1 > 0) ─T─> F(n - 1) + F(n - 2)
                          └─F─> n
    """
    g = Functions()
    g.define("F", "if:output:0")
    g.const(np.int32(1), "one")
    g.op("Greater", "n", "one:output:0", name="large")
    g.if_("large:z:0", "n", "Both", "Itself")
    g.define("Both", "sum:z:0")
    for by in (1, 2):
        g.call(g.less(by), "F", f"again_{by}")
    g.op("AddV2", "again_1:output:0", "again_2:output:0", name="sum")
    g.define("Itself", "n")
    return g


@EXECUTORS
def test_recursion_is_deeper_than_the_stack_of_python(executor: str) -> None:
    assert triangle().value(3000, executor) == 3000 * 3001 // 2


@EXECUTORS
def test_branching_recursion_counts_one_path_of_calls(executor: str) -> None:
    """Only one path through the tree of calls waits, not a whole level of it."""
    depth = 13 * len(("F", "Both")) + 1
    assert fibonacci().value(14, executor, max_calls=depth) == 377
    with pytest.raises(ps.LimitExceeded, match=r"'F'.*max_calls = 26"):
        fibonacci().value(14, executor, max_calls=depth - 1)


@pytest.mark.parametrize(
    ("long", "paths"), [(math.inf, 1), (0.0, 4)], ids=["short kernels", "long kernels"]
)
def test_branching_recursion_holds_few_paths_of_calls(
    long: float, paths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One path through the tree of calls is in progress. If kernels run elsewhere, others begin
    meanwhile, but far fewer than there are."""
    monkeypatch.setattr(run, "_LONG_S", long)
    alive, most = 0, 0
    begin, resume = scheduler.TokenScheduler.begin, run.FramesRun._resume

    def begun(*arguments: Any) -> None:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        begin(*arguments)

    def resumed(*arguments: Any) -> None:
        nonlocal alive
        alive -= 1
        resume(*arguments)

    monkeypatch.setattr(scheduler.TokenScheduler, "begin", begun)
    monkeypatch.setattr(run.FramesRun, "_resume", resumed)
    assert fibonacci().value(14) == 377
    assert alive == 1  # the run's own graph
    assert most <= paths * 14 * len(("F", "the branch", "Both"))  # of 2,438 and more


@EXECUTORS
@pytest.mark.parametrize(("n", "even"), [(0, 1), (1, 0), (10, 1), (777, 0)])
def test_mutual_recursion_of_two_functions_ends(n: int, even: int, executor: str) -> None:
    """
    F(n):  If(n > 0) ─T─> G(n - 1), else 1        G(n):  If(n > 0) ─T─> F(n - 1), else 0
    """
    g = Functions()
    for name, other, end in (("F", "G", 1), ("G", "F", 0)):
        g.define(name, "if:output:0")
        g.if_(g.positive(), "n", f"{name}_more", f"{name}_end")
        g.define(f"{name}_more", "again:output:0")
        g.call(g.less(), other, "again")
        g.constant(f"{name}_end", end)
    assert g.value(n, executor) == even


@EXECUTORS
def test_recursion_under_a_switch_ends(executor: str) -> None:
    """
    F(n):  n ─> switch(n > 0) ─T─> less ─> F ─> sum ─> merge
                   └──────────F─────────────────────────> ┘
    """
    g = Functions()
    g.define("F", "merge:output:0")
    g.switch("n", g.positive(), "switch")
    g.const(np.int32(1), "one", "^switch")
    g.op("Sub", "switch:output_true:0", "one:output:0", name="less")
    g.call("less:z:0", "F", "again")
    g.op("AddV2", "switch:output_true:0", "again:output:0", name="sum")
    g.merge("switch:output_false:0", "sum:z:0", name="merge")
    assert g.value(100, executor) == 5050
    assert g.value(0, executor) == 0


@EXECUTORS
def test_recursion_in_the_body_of_a_while_ends(executor: str) -> None:
    """F(n) is 1 and the sum of F(0) to F(n - 1), and so 2 ** n.

    F(n):  i, sum, n = 0, 1, n; while i < n: sum += F(i); i += 1
    """
    g = Functions()
    three = {"i": "int32", "sum": "int32", "n": "int32"}
    made = {"i2": "int32", "sum2": "int32", "n2": "int32"}
    g.define("F", "while:output:1")
    for value, name in ((0, "zero"), (1, "one")):
        g.const(np.int32(value), name)
    carried = "zero:output:0", "one:output:0", "n"
    g.node("While", *carried, name="while", cond=Func("Go"), body=Func("Turn"), T=[INT32] * 3)
    g.function("Go", three, {"go": "bool"}, {"go": "less:z:0"})
    g.op("Less", "i", "n", name="less")
    g.function("Turn", three, made, {"i2": "next:z:0", "sum2": "more:z:0", "n2": "n"})
    g.const(np.int32(1), "one")
    g.op("AddV2", "i", "one:output:0", name="next")
    g.call("i", "F", "again")
    g.op("AddV2", "sum", "again:output:0", name="more")
    assert [g.value(n, executor) for n in (0, 1, 5)] == [1, 2, 32]
    with pytest.raises(ps.LimitExceeded, match=r"while.*limit of 4 iterations.*max_iterations"):
        g.value(5, executor, max_iterations=4)
    assert g.value(4, executor, max_iterations=4) == 16


@EXECUTORS
def test_recursion_in_a_frame_ends(executor: str) -> None:
    """As above, in a function that has a loop of primitives: each call has frames of its own.

    F(n):  Enter ─> merge ─> switch(i < n) ─F─> exit        sum += F(i)
    """
    g = Functions()
    g.define("F", "F/sum/exit:output:0")
    for value, name in ((0, "zero"), (1, "first")):
        g.const(np.int32(value), name)

    def enter(value: str, name: str, constant: bool = False) -> str:
        g.enter(value, frame="loop", name=name, constant=constant)
        return f"{name}:output:0"

    g.op("Less", "i:output:0", enter("n", "n_in", True), name="go")
    g.node("LoopCond", "go:z:0", name="cond")
    g.merge(enter("zero:output:0", "i_in"), "i_next:output:0", name="i")
    g.merge(enter("first:output:0", "sum_in"), "sum_next:output:0", name="sum")
    g.switch("i:output:0", "cond:output:0", "i_on")
    g.switch("sum:output:0", "cond:output:0", "sum_on")
    g.const(np.int32(1), "one", "^i_on")
    g.op("AddV2", "i_on:output_true:0", "one:output:0", name="i_more")
    g.call("i_on:output_true:0", "F", "again")
    g.op("AddV2", "sum_on:output_true:0", "again:output:0", name="sum_more")
    g.op("NextIteration", "i_more:z:0", name="i_next")
    g.op("NextIteration", "sum_more:z:0", name="sum_next")
    g.op("Exit", "sum_on:output_false:0", name="F/sum/exit")
    assert [g.value(n, executor) for n in (0, 1, 6)] == [1, 2, 64]


@EXECUTORS
def test_recursion_in_a_case_ends(executor: str) -> None:
    """
    F(n):  Case(n) ─0─> 5, ─1─> 7, ─else─> F(n - 2)
    """
    g = Functions()
    g.define("F", "case:output:0")
    branches = [Func("Five"), Func("Seven"), Func("On")]
    g.node("Case", "n", "n", name="case", branches=branches, **KINDS)
    g.constant("Five", 5)
    g.constant("Seven", 7)
    g.define("On", "again:output:0")
    g.call(g.less(2), "F", "again")
    assert [g.value(n, executor) for n in (0, 1, 40, 41)] == [5, 7, 5, 7]


@EXECUTORS
def test_recursion_from_a_branch_of_the_graph_ends(executor: str) -> None:
    """A call in a branch that is not taken does not begin.

    n ─> switch(p) ─T─> F(n), which has no end ─> merge
            └──────F────────────────────────────────> ┘
    """
    g = Functions()
    g.placeholder("p", "bool")
    g.switch("n", "p", "switch")
    g.call("switch:1", "F", "endless")
    g.merge("switch", "endless", name="merge")
    g.define("F", "again:output:0")
    g.call("n", "F", "again")
    session = g.session(executor)
    assert session.run({"n": 3, "p": False}, ["merge"])["merge"] == 3
    with pytest.raises(ps.LimitExceeded, match="'F'"):
        session.run({"n": 3, "p": True}, ["merge"])


@EXECUTORS
def test_primitives_in_a_branch_of_an_if_run(executor: str) -> None:
    """No function is recursive here, but a branch has a loop of frames.

    F(n):  If(n > 0) ─T─> switch(n > 0) ─> merge, else 9
    """
    g = Functions()
    g.define("F", "if:output:0")
    g.if_(g.positive(), "n", "Primitive", "Nine")
    g.define("Primitive", "merge:output:0")
    g.switch("n", g.positive(), "switch")
    g.op("Neg", "switch:output_true:0", name="negated")
    g.merge("negated:y:0", "switch:output_false:0", name="merge")
    g.constant("Nine", 9)
    assert g.value(4, executor) == -4
    assert g.value(-4, executor) == 9


def endless(calls: int) -> Functions:
    """A function that calls itself ``calls`` times and sums the results."""
    g = Functions()
    g.define("F", "sum:sum:0")
    for i in range(calls):
        g.call("n", "F", f"again_{i}")
    g.op("AddN", *[f"again_{i}:output:0" for i in range(calls)], name="sum", N=calls)
    return g


@EXECUTORS
@pytest.mark.parametrize("calls", [1, 2, 30])
def test_endless_recursion_is_an_error_that_names_the_function(calls: int, executor: str) -> None:
    with pytest.raises(ps.LimitExceeded, match=r"function 'F' .*Limits.max_calls = 200") as caught:
        endless(calls).value(1, executor, max_calls=200)
    assert "may call itself without end" in str(caught.value)


def test_endless_recursion_without_outputs_meets_the_limit() -> None:
    """A function with side effects only: there is no result to wait for."""
    g = Flow()
    function = g.function("F", {}, {}, {})
    g.node("StatefulPartitionedCall", name="again", f=Func("F"), Tin=[], Tout=[])
    function.control_ret["again"] = "again"
    g.main()
    g.node("StatefulPartitionedCall", name="call", f=Func("F"), Tin=[], Tout=[])
    session = ps.compile(g.bytes(), limits=ps.Limits(max_calls=500), backends=["numpy"])
    with pytest.raises(ps.LimitExceeded, match="'F'"):
        session.run({}, [], ["call"], timeout=SOON)


def test_endless_recursion_obeys_deadline_and_cancellation() -> None:
    session = endless(1).session(max_calls=10**9)
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"n": 1}, ["call"], timeout=0.05)
    token = ps.CancelToken()
    threading.Timer(0.05, token.cancel).start()
    with pytest.raises(ps.Cancelled):
        session.run({"n": 1}, ["call"], cancel=token)


def test_error_in_a_called_function_names_its_node() -> None:
    """
    F(n):  12 / n + F(n - 1)
    """
    g = Functions()
    g.define("F", "sum:z:0")
    g.const(np.int32(12), "twelve")
    g.op("FloorDiv", "twelve:output:0", "n", name="quotient")
    g.call(g.less(), "F", "again")
    g.op("AddV2", "quotient:z:0", "again:output:0", name="sum")
    with pytest.raises(ps.RunError, match=r"FloorDiv \(F/quotient in function 'F'.*by zero"):
        g.value(3)


def test_dead_output_of_a_called_function_is_an_error() -> None:
    """
    F(n):  n ─> switch(n > 0) ─T─> F(n - 1) ─> out
    """
    g = Functions()
    g.define("F", "again:output:0")
    g.switch("n", g.positive(), "switch")
    g.const(np.int32(1), "one", "^switch")
    g.op("Sub", "switch:output_true:0", "one:output:0", name="less")
    g.call("less:z:0", "F", "again")
    with pytest.raises(ps.DeadTensor, match=r"F/again.*F/switch in function 'F'.*its output 0"):
        g.value(2)


def test_observers_see_a_call_as_one_step() -> None:
    session, trace = triangle().session(), ps.Trace()
    session.run({"n": 5}, ["call"], trace=trace)
    assert trace.counts["call"] == 1
    assert not [name for name in trace.counts if "F/" in name]


def test_concurrent_runs_have_calls_of_their_own() -> None:
    session = fibonacci().session()
    futures = [session.submit({"n": n % 12}, ["call"]) for n in range(60)]
    known = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    assert [int(future.result(SOON)["call"]) for future in futures] == known * 5


def test_sessions_do_not_share_variables_of_a_function() -> None:
    """
    F(n):  v = n; If(n > 0): n + F(n - 1), else 0
    """
    g = triangle()
    variable = {"shared_name": "v", "dtype": INT32, "shape": Shape(())}
    function = next(f for f in g.proto.library.function if f.signature.name == "F")
    function.control_ret["assign"] = "assign"
    g.into = function.node_def
    g.node("VarHandleOp", name="v", **variable)
    g.node("AssignVariableOp", "v:resource:0", "n", name="assign", dtype=INT32)
    g.main()
    g.node("VarHandleOp", name="v", **variable)
    g.node("ReadVariableOp", "v", name="read", dtype=INT32)
    model = ps.load(g.bytes())
    one, other = (ps.compile(model, backends=["numpy"]) for _ in range(2))
    assert one.run({"n": 3}, ["call"])["call"] == 6
    assert one.run({}, ["read"])["read"] in range(4)
    with pytest.raises(ps.RunError, match="before it is initialized"):
        other.run({}, ["read"])


def test_call_that_does_not_fit_its_function_is_refused() -> None:
    g = triangle()
    inner = next(f for f in g.proto.library.function if f.signature.name == "More").node_def
    (again,) = [node for node in inner if node.name == "again"]
    again.input.append("n")
    again.attr["Tin"].list.type.append(again.attr["Tin"].list.type[0])
    with pytest.raises(
        ps.InvalidModel, match=r"calls 'F' with 2 values for 1.*takes 1 and gives 1"
    ):
        ps.load(g.bytes())
