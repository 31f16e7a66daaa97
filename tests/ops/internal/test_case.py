"""One of several branches by a number."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops import find
from penstock.ops.internal.case import case_of
from penstock.types import BOOL, FLOAT32, INT64, TensorType

NAMES = ["Sin", "Cos", "Neg", "Abs", "Exp", "Tanh", "Floor"]
FUNCTIONS = [np.sin, np.cos, np.negative, np.abs, np.exp, np.tanh, np.floor]
KIND, NUMBER = TensorType(FLOAT32, (4,)), TensorType(INT64, ())
X = np.linspace(-2, 2, 4, dtype=np.float32)
EXECUTORS = ["linear", "dataflow", "parallel", "streams"]


def branch(x: Value, name: str, b: int) -> Graph:
    """name(x) * |x|, on two streams if there are."""
    one, other, both = (Value(f"{name}{b}_{k}", KIND) for k in range(3))
    nodes = [
        Node(find(name), [x], [one]),
        Node(find("Abs"), [x], [other]),
        Node(find("Mul"), [one, other], [both]),
    ]
    return Graph([], [both], nodes, f"branch{b}")


def cases(count: int) -> Model:
    index, x = Value("i", NUMBER), Value("x", KIND)
    nodes = case_of(index, [branch(x, NAMES[b], b) for b in range(count)], [x])
    return Model({"g": Graph([index, x], nodes[-1].outputs, nodes, "g")}, "g")


def compiled(model: Model, executor: str) -> ps.Session:
    streams = {"max_streams": 2} if executor == "streams" else {}
    return ps.compile(model, executor=executor, backends=["numpy"], **streams)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_branch_of_that_number_or_none(count, executor):
    session = compiled(cases(count), executor)
    for i in (-(2**40), -1, *range(count), count, 2**40):
        (found,) = session.run({"i": np.int64(i), "x": X}).values()
        wanted = FUNCTIONS[i](X) * np.abs(X) if 0 <= i < count else X
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_another_branch_in_each_turn_of_a_loop(executor):
    #  while i < n: case i - 1 of sin, cos, neg; before and behind these, what there was
    n, x = Value("n", NUMBER), Value("x", KIND)
    i, go, v = Value("t", NUMBER), Value("c", TensorType(BOOL, ())), Value("v", KIND)
    k = Value("k", NUMBER)
    one = Value("one", const=np.array(1, np.int64))
    nodes = [Node(find("Sub"), [i, one], [k])]
    nodes += case_of(k, [branch(v, NAMES[b], b) for b in range(3)], [v])
    body = Graph([i, go, v], [go, nodes[-1].outputs[0]], nodes, "body")
    y = Value("y", KIND)
    loop = Node(find("Loop"), [n, None, x], [y], {"body": body})
    session = compiled(Model({"g": Graph([n, x], [y], [loop], "g")}, "g"), executor)
    wanted = X
    for turns in range(6):
        found = session.run({"n": np.int64(turns), "x": X})["y"]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
        if 1 <= turns <= 3:
            wanted = FUNCTIONS[turns - 1](wanted) * np.abs(wanted)


def test_senseless_cases_are_refused():
    x = Value("x", KIND)
    with pytest.raises(ValueError, match="no branch"):
        case_of(Value("i", NUMBER), [], [x])
    with pytest.raises(ValueError, match="as many values"):
        case_of(Value("i", NUMBER), [branch(x, "Sin", 0)], [])


def test_many_branches_nest_little():
    count = 1000
    index, x = Value("i", NUMBER), Value("x", KIND)
    constants = [
        Graph([], [Value(f"c{b}", const=np.full(4, b, np.float32))], [], f"b{b}")
        for b in range(count)
    ]
    nodes = case_of(index, constants, [x])
    session = compiled(
        Model({"g": Graph([index, x], nodes[-1].outputs, nodes, "g")}, "g"), "linear"
    )
    for i in (0, 1, 499, 500, 998, 999):
        (found,) = session.run({"i": np.int64(i), "x": X}).values()
        assert found.tolist() == [i] * 4
