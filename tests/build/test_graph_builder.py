"""Models that are built in Python, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder, SymbolicValue
from penstock.ir.graph import Node, all_reads

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]


TF = "tensorflow"


def run(b: GraphBuilder, *inputs: Any, **options: Any) -> Any:
    return ps.compile(b.model(), **options)(*inputs)


def node_of(value: SymbolicValue) -> Node:
    node = value.value.producer
    assert node is not None
    return node


def test_nodes_run_on_their_device_and_after_others() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    first = b.op("Neg", x)
    with b.device("cpu:1"), b.after(first, x):
        second = b.op("Relu", x)
    assert node_of(second).device == "/device:CPU:1"
    assert node_of(second).control_inputs == [node_of(first)]
    assert node_of(b.op("Abs", x)).device == ""
    with pytest.raises(ps.InvalidModel, match="no name of a device"), b.device("here"):
        pass


def test_target_runs_though_no_output_needs_it() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    b.output("y", x + 1)
    b.target(b.op("Neg", x, name="aside"))
    assert [node.name for node in b.model().graph.targets] == ["aside"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_cond_runs_one_branch(executor: str) -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    total = b.op("ReduceSum", x, keepdims=0)
    b.output("y", b.cond(total > 0, lambda: x * 2, lambda: b.op("Abs", x)))
    session = ps.compile(b.model(), executor=executor)
    np.testing.assert_array_equal(session(np.array([1, 2], np.float32)), [2, 4])
    np.testing.assert_array_equal(session(np.array([-1, -2], np.float32)), [1, 2])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("index", [-1, 0, 1, 2, 3, 9])
def test_case_runs_the_branch_of_its_number_or_the_default(executor: str, index: int) -> None:
    b = GraphBuilder()
    i, x = b.input("i", np.int32, []), b.input("x", np.float32, [2])
    branches = [lambda k=k: (x + float(k), k) for k in range(3)]
    y, chosen = b.case(i, branches, lambda: (x, -1))
    b.output("y", y)
    b.output("chosen", chosen)
    session = ps.compile(b.model(), executor=executor)
    y, chosen = session(np.int32(index), np.ones(2, np.float32))
    known = 0 <= index < 3
    np.testing.assert_array_equal(y, np.ones(2) + (index if known else 0))
    assert chosen == (index if known else -1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_loop_carries_and_collects_values(executor: str) -> None:
    b = GraphBuilder()
    n, x = b.input("n", np.int64, []), b.input("x", np.float32, [2])

    def body(i: SymbolicValue, total: SymbolicValue, power: SymbolicValue) -> Any:
        return total + power, power * 2, i.astype(np.float32)

    total, power, counted = b.loop(body, x, 1.0, times=n)
    for name, value in [("total", total), ("power", power), ("counted", counted)]:
        b.output(name, value)
    session = ps.compile(b.model(), executor=executor)
    for turns in (0, 1, 5):
        total, power, counted = session(np.int64(turns), np.array([0, 1], np.float32))
        np.testing.assert_array_equal(total, np.array([0, 1]) + 2**turns - 1)
        assert power == 2**turns
        np.testing.assert_array_equal(counted, np.arange(turns))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_loop_ends_by_its_condition(executor: str) -> None:
    b = GraphBuilder()
    x = b.input("x", np.int64, [])
    b.output("y", b.loop(lambda i, v: v * 3, x, condition=lambda v: v < 100))
    b.output("z", b.loop(lambda i, v: v * 3, x, condition=lambda v: v < 100, times=2))
    session = ps.compile(b.model(), executor=executor)
    assert [v.item() for v in session(np.int64(2))] == [162, 18]
    assert [v.item() for v in session(np.int64(200))] == [200, 200]


def test_loop_whose_value_grows_is_built_again_with_an_unknown_dim() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [1])
    shapes = []

    def body(i: SymbolicValue, grown: SymbolicValue) -> SymbolicValue:
        shapes.append(grown.shape)
        return b.op("Concat", grown, x, axis=0)

    grown = b.loop(body, x, times=3)
    assert shapes == [(1,), (None,)]
    b.output("y", grown)
    np.testing.assert_array_equal(run(b, np.array([5], np.float32)), [5] * 4)


def test_loops_and_branches_nest_and_read_values_around_them() -> None:
    b = GraphBuilder()
    x = b.input("x", np.int64, [])

    def outer(i: SymbolicValue, total: SymbolicValue) -> Any:
        def inner(j: SymbolicValue, t: SymbolicValue) -> Any:
            return b.cond((j % 2) == 0, lambda: t + x, lambda: t - i)

        return b.loop(inner, total, times=3)

    b.output("y", b.loop(outer, 0, times=4))
    want = sum(7 if j % 2 == 0 else -i for i in range(4) for j in range(3))
    assert run(b, np.int64(7)) == want


def test_graph_is_the_body_of_any_operation_that_takes_one() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    b = GraphBuilder()
    value = b.input("x", np.float32, [3, 2])
    row = (np.float32, [2])
    body = b.graph(lambda total, r: (total + r, total * r), row, row)
    total, rows = b.op("Scan", np.zeros(2, "f4"), value, body=body, num_scan_inputs=1, outputs=2)
    b.output("total", total)
    b.output("rows", rows)
    total, rows = run(b, x)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(rows, [[0, 0], [0, 3], [8, 20]])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda b, x: b.cond(x > 0, lambda: x, lambda: (x, x)), "must return the same"),
        (lambda b, x: b.cond(x > 0, lambda: x, lambda: x.astype(bool)), "must return the same"),
        (lambda b, x: b.cond(x, lambda: x, lambda: x), "must be a truth value"),
        (
            lambda b, x: b.cond(b.constant(1.0, float), lambda: x, lambda: x),
            "must be a truth value",
        ),
        (lambda b, x: b.cond([True, False], lambda: x, lambda: x), "must have one element"),
        (
            lambda b, x: b.loop(lambda i, v: v, x * [1, 2], condition=lambda v: v > 0),
            "must have one element",
        ),
        (lambda b, x: b.case(x, [], lambda: x), "branch_0"),
        (lambda b, x: b.loop(lambda i, v: None, x, times=3), "returns 0 values for 1"),
        (lambda b, x: b.loop(lambda i, v: v, x, condition=lambda v: v), "must be a truth value"),
    ],
)
def test_control_flow_that_does_not_fit_is_refused(
    build: Callable[[GraphBuilder, SymbolicValue], Any], reason: str
) -> None:
    b = GraphBuilder()
    with pytest.raises(ps.InvalidModel, match=reason):
        build(b, b.input("x", np.int64, []))


def test_loop_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="does not end"):
        GraphBuilder().loop(lambda i, v: v, 1)


def test_value_of_a_branch_is_not_read_outside_of_it() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [])
    kept = []
    b.cond(x > 0, lambda: kept.append(x + 1), lambda: None)
    with pytest.raises(ps.InvalidModel, match="of the then branch, and read outside"):
        kept[0] * 2  # the value of a node that may not have run


@pytest.mark.parametrize("executor", ["auto", "frames"])
def test_function_calls_itself(executor: str) -> None:
    b = GraphBuilder()

    def body(n: SymbolicValue) -> Any:
        return b.cond(n > 1, lambda: n * b.call("factorial", n - 1).astype(np.int64), lambda: n)

    factorial = b.function("factorial", body, (np.int64, []))
    b.output("y", factorial(b.input("n", np.int64, [])))
    assert run(b, np.int64(10), executor=executor) == 3628800


def test_function_reads_no_values_around_it() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [])
    with pytest.raises(ps.InvalidModel, match="read outside"):
        b.function("f", lambda y: x + y, np.float32)
    b.function("g", lambda y: y + 1, np.float32)
    with pytest.raises(ps.InvalidModel, match="already"):
        b.function("g", lambda y: y + 2, np.float32)


@pytest.mark.parametrize("executor", ["auto", "frames", "interpret"])
def test_back_edge_of_a_frame_is_defined_later(executor: str) -> None:
    b = GraphBuilder()
    n = b.input("n", np.int32, [])
    start = b.constant(0, np.int32)
    again = b.later(like=start)
    entered = b.op("Enter", start, frame_name="f", domain=TF)
    i, _ = b.op("Merge", entered, again, domain=TF)
    limit = b.op("Enter", n, frame_name="f", is_constant=True, domain=TF)
    left, going = b.op("Switch", i, b.op("LoopCond", i < limit, domain=TF), domain=TF)
    b.define(again, b.op("NextIteration", going + 1, domain=TF))
    b.output("i", b.op("Exit", left, domain=TF))
    assert run(b, np.int32(7), executor=executor) == 7


def test_later_value_needs_one_definition() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [])
    again = b.later(like=x)
    b.output("y", b.op("Merge", x, again, domain=TF)[0])
    with pytest.raises(ps.InvalidModel, match="has no definition"):
        b.model()
    b.define(again, x)
    with pytest.raises(ValueError, match="waits for its meaning"):
        b.define(again, x)


def test_output_may_be_an_input_a_constant_or_one_value_twice() -> None:
    b = GraphBuilder()
    x = b.input("x", np.float32, [])
    b.output("a", x)
    b.output("b", x)
    b.output("c", 3)
    assert {k: v.item() for k, v in ps.compile(b.model()).run({"x": 1.0}).items()} == {
        "a": 1,
        "b": 1,
        "c": 3,
    }


def test_model_without_outputs_is_refused() -> None:
    b = GraphBuilder()
    b.input("x", np.float32)
    with pytest.raises(ps.InvalidModel, match="no outputs"):
        b.model()


def test_builder_ends_with_its_model() -> None:
    b = GraphBuilder("net")
    x = b.input("x", np.float32, ["n"])
    b.output("y", x + 1)
    model = b.model({"author": "me"})
    assert (model.entry, model.metadata) == ("net", {"author": "me"})
    assert all(value in model.graph.inputs for value in all_reads(model.graph.nodes[0]))
    with pytest.raises(RuntimeError, match="begin another"):
        b.op("Neg", x)
    with pytest.raises(ps.InvalidInput, match="float32"):
        ps.compile(model)(np.array(["a"]))


def test_strings_are_objects() -> None:
    b = GraphBuilder()
    words = b.input("words", str, ["n"])
    b.output("y", b.op("StringConcat", words, "!"))
    assert list(run(b, np.array(["a", "b"], object))) == ["a!", "b!"]
