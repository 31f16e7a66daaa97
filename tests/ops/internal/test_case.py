"""One of several branches by a number, as the text form says it."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.ir.graph import Graph, Model
from penstock.ops.internal.case import CASE
from penstock.textual.parser import parse_graph
from penstock.textual.printer import format_graph

NAMES = ["Sin", "Cos", "Neg", "Abs", "Exp", "Tanh", "Floor"]
FUNCTIONS = [np.sin, np.cos, np.negative, np.abs, np.exp, np.tanh, np.floor]
X = np.linspace(-2, 2, 4, dtype=np.float32)
EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]


def branches(count: int, x: str) -> str:
    """Graphs that compute f(x) * |x|, on two streams if there are; and x for any other number."""
    texts = [
        f"branch_{b}: graph() -> (m{b}) {{ f{b} = {NAMES[b]}({x}) a{b} = Abs({x}) "
        f"m{b} = Mul(f{b}, a{b}) }}"
        for b in range(count)
    ]
    return " ".join([*texts, f"default: graph() -> ({x}) {{ }}"])


def case_graph(count: int) -> Graph:
    return parse_graph(
        f"graph g(i: int64[], x: float32[4]) -> (y) {{ "
        f"y = penstock.Case(i) {{ {branches(count, 'x')} }} }}"
    )


def compiled(graph: Graph, executor: str) -> ps.Session:
    streams = {"expert": ps.ExpertOptions(max_streams=2)} if executor == "streams" else {}
    model = Model({graph.name: graph}, graph.name)
    return ps.compile(model, executor=executor, backends=["numpy"], **streams)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_case_runs_the_branch_of_its_number_else_the_default(count: int, executor: str) -> None:
    session = compiled(case_graph(count), executor)
    for i in (-(2**40), -1, *range(count), count, 2**40):
        result = session.run({"i": np.int64(i), "x": X})["y"]
        expected = FUNCTIONS[i](X) * np.abs(X) if 0 <= i < count else X
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_case_in_a_loop_takes_another_branch_in_each_iteration(executor: str) -> None:
    graph = parse_graph(
        f"""
        graph g(n: int64[], x: float32[4]) -> (y) {{
          one: int64[] = const 1
          y = Loop(n, _, x) {{
            body: graph body(t: int64[], c: bool[], v: float32[4]) -> (c, w) {{
              k = Sub(t, one)
              w = penstock.Case(k) {{ {branches(3, "v")} }}
            }}
          }}
        }}
        """
    )
    session = compiled(graph, executor)
    expected = X
    for trips in range(6):
        result = session.run({"n": np.int64(trips), "x": X})["y"]
        np.testing.assert_allclose(result, expected, rtol=1e-6)
        if 1 <= trips <= 3:
            expected = FUNCTIONS[trips - 1](expected) * np.abs(expected)


def depth(graph: Graph) -> int:
    """How deep Ifs nest."""
    below = [depth(inner) for node in graph.nodes for _, inner in node.graphs]
    return 1 + max(below) if below else 0


def test_case_expands_to_a_tree_with_a_logarithm_of_comparisons() -> None:
    graph = case_graph(7)
    assert not any(node.op is CASE for node in graph.walk())
    assert sum(node.op.name == "If" for node in graph.walk()) == 7  # 6 in the tree, 1 in front
    assert format_graph(graph).count("Less(") == 7
    assert depth(graph) == 4
    assert str(parse_graph(format_graph(graph))) == str(graph)


def test_case_keeps_name_device_and_control_inputs_on_the_last_node() -> None:
    graph = parse_graph(
        f"graph g(i: int64[], x: float32[4]) -> (y) {{ z = Neg(x) as before "
        f'y = penstock.Case(i) after(before) on "/device:CPU:0" as pick '
        f"{{ {branches(2, 'x')} }} }}"
    )
    node = graph.nodes[-1]
    assert (node.op.name, node.name, node.device) == ("If", "pick", "/device:CPU:0")
    assert node.control_inputs == [graph.nodes[0]]
    assert {n.device for n in graph.nodes[1:]} == {"/device:CPU:0"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("penstock.Case(i) { branch_0: graph() -> (x) { } }", "branch_0, branch_1 ... and default"),
        ("penstock.Case(i) { default: graph() -> (x) { } }", "branch_0, branch_1 ... and default"),
        (
            "penstock.Case(i) { branch_1: graph() -> (x) { } default: graph() -> (x) { } }",
            "branch_0, branch_1 ... and default",
        ),
        ("penstock.Case{k=1}(i) { " + branches(1, "x") + " }", "must have the attributes branch_0"),
        ("penstock.Case(i, x) { " + branches(1, "x") + " }", "one input"),
        ("penstock.Case(_) { " + branches(1, "x") + " }", "one input"),
        (
            "penstock.Case(i) { branch_0: graph() -> (x, x) { } default: graph() -> (x) { } }",
            "but has 0 inputs and 2 outputs",
        ),
        (
            "penstock.Case(i) { branch_0: graph(z) -> (x) { } default: graph() -> (x) { } }",
            "no inputs and 1 outputs",
        ),
    ],
)
def test_case_with_wrong_branches_is_refused_with_its_position(text: str, problem: str) -> None:
    with pytest.raises(InvalidModel, match=r"line 1, column 49") as raised:
        parse_graph(f"graph g(i: int64[], x: float32[4]) -> (y) {{ y = {text} }}")
    assert problem in str(raised.value)
