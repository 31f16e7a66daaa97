"""The verifier: valid graphs pass; each rule, broken on purpose, gives its own message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.analysis.verify import verify
from penstock.core.errors import MAX_PROBLEMS, InvalidModel
from penstock.core.limits import Limits
from penstock.core.types import (
    ANY,
    FLOAT32,
    INT64,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
)
from penstock.ir.graph import Graph, Model, Node, Value
from tests.support.graphs import any_op, chain, model, nest, node_named, value_named

VALID = """
graph main(x: float32[N, 3], n: int64[], b: bool[]) -> (y, all) {
  one: float32[3] = const [1.0, 1.0, 1.0]
  h: float32[N, 3] = Add(x, one) as add in m.onnx
  y: float32[N, 3] = If(b) as choice in m.onnx {
    then_branch: graph() -> (p) { p = Neg(h) as minus in m.onnx }
    else_branch: graph() -> (q) { q = Mul(h, one) as times in m.onnx  unused = Neg(q) as unused }
  }
  last, all = Loop(n, b, h) as loop in m.onnx after(choice) {
    body: graph(i, c, s) -> (c, t, t) { t = Add(s, x) as step in m.onnx }
  }
}
"""


def valid() -> Model:
    return model(VALID)


def problems(model: Model, limits: Limits | None = None) -> Sequence[str]:
    """What verify has to say; nothing for a valid model."""
    try:
        verify(model, limits or Limits())
    except InvalidModel as error:
        return error.problems
    return ()


def problem(model: Model, limits: Limits | None = None) -> str:
    """The one thing that verify has to say."""
    (found,) = problems(model, limits)
    return found


def nodes(model: Model, *names: str) -> list[Node]:
    return [node_named(model.graph, name) for name in names]


def test_verify_accepts_a_valid_model() -> None:
    verify(valid())


def test_verify_reports_all_problems_at_once() -> None:
    broken = valid()
    (add, step) = nodes(broken, "add", "step")
    add.inputs[1] = Value("nowhere")
    step.inputs[0] = Value("no one")
    value_named(broken.graph, "q").type = TensorType(FLOAT32, (-1,))
    assert len(problems(broken)) == 3


def test_verify_bounds_the_list_of_problems() -> None:
    broken = chain(1000)
    for node in broken.nodes:
        node.inputs[1] = Value("nowhere")
    found = problems(Model({"main": broken}, "main"))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == f"and {1000 - MAX_PROBLEMS} more"


def test_verify_checks_every_graph_and_function() -> None:
    broken = valid()
    for name, graphs in (("second", broken.graphs), ("function", broken.functions)):
        graphs[name] = Graph([], [Value("nowhere")], [], name)
    assert [p.split(" gives")[0] for p in problems(broken)] == [
        "graph 'second'",
        "graph 'function'",
    ]


def test_verify_refuses_an_entry_without_a_graph() -> None:
    broken = valid()
    broken.entry = "other"
    assert problem(broken) == (
        "the model starts with graph 'other', but its graphs are: 'main'; name one of them as "
        "its entry"
    )


# Nodes, their inputs and outputs


def test_verify_refuses_a_node_listed_twice() -> None:
    broken = valid()
    broken.graph.nodes.append(broken.graph.nodes[0])
    assert problem(broken) == (
        "add in m.onnx is listed again in graph 'main'; a node runs once: make a copy of it"
    )


def test_verify_refuses_graphs_in_a_list() -> None:
    broken = valid()
    nodes(broken, "add")[0].attrs["branches"] = [Graph([], [], [])]
    assert problem(broken) == (
        "attribute 'branches' of add in m.onnx is a list with graphs in it; give each graph an "
        "attribute of its own"
    )


def test_verify_refuses_an_unknown_input() -> None:
    broken = valid()
    nodes(broken, "add")[0].inputs[0] = Value("z")
    assert problem(broken) == (
        "add in m.onnx reads 'z', which nothing makes: it is neither a constant nor an input or "
        "a node's output of graph 'main'; add what makes it, or correct the name"
    )


def test_verify_refuses_an_unknown_output_of_a_graph() -> None:
    broken = valid()
    broken.graph.outputs.append(Value("z"))
    assert problem(broken).startswith("graph 'main' gives 'z' as an output, which nothing makes")


def test_verify_refuses_an_unknown_capture_of_a_nested_graph() -> None:
    broken = valid()
    nodes(broken, "minus")[0].inputs[0] = Value("outer")
    assert problem(broken) == (
        "minus in m.onnx reads 'outer', which nothing makes: it is neither a constant nor an "
        "input or a node's output of the then_branch of choice in m.onnx or of a graph around "
        "it; add what makes it, or correct the name"
    )


def test_verify_refuses_a_read_of_a_value_of_a_sibling_graph() -> None:
    broken = valid()
    nodes(broken, "minus")[0].inputs[0] = value_named(broken.graph, "q")
    assert problem(broken) == (
        "minus in m.onnx reads 'q', which belongs to the else_branch of choice in m.onnx and is "
        "not known outside of it; make it an output there, or an input here"
    )


def test_verify_refuses_a_read_of_a_value_of_a_nested_graph() -> None:
    broken = valid()
    broken.graph.outputs[0] = value_named(broken.graph, "t")
    assert "gives 't' as an output, which belongs to the body of loop" in problem(broken)


def test_verify_refuses_a_value_with_a_producer_outside_of_the_graph() -> None:
    broken = valid()
    (add,) = nodes(broken, "add")
    broken.graph.nodes.remove(add)
    found = problems(broken)
    assert len(found) == 3, "h is used three times"
    assert found[0] == (
        "loop in m.onnx reads 'h', but add in m.onnx, which makes it, is not in the model; add "
        "that node"
    )


def test_verify_refuses_a_value_that_its_producer_does_not_list() -> None:
    broken = valid()
    (add,) = nodes(broken, "add")
    broken.graph.outputs[0] = Value("extra", producer=add)
    assert problem(broken) == (
        "graph 'main' gives 'extra' as an output, but add in m.onnx, its producer, does not list "
        "it among its outputs"
    )


def test_verify_refuses_a_value_with_two_producers() -> None:
    broken = valid()
    unused = nodes(broken, "unused")[0]
    unused.outputs[0] = value_named(broken.graph, "q")
    assert problem(broken) == (
        "'q' is an output of unused, but names times in m.onnx as its producer; a value has one "
        "producer, and names it"
    )


def test_verify_refuses_an_output_without_producer() -> None:
    broken = valid()
    value_named(broken.graph, "q").producer = None
    assert "is an output of times in m.onnx, but names no node as its producer" in problem(broken)


def test_verify_refuses_an_output_listed_twice_by_one_node() -> None:
    broken = valid()
    (loop,) = nodes(broken, "loop")
    loop.outputs[1] = loop.outputs[0]
    assert problems(broken)[0] == (
        "loop in m.onnx lists one value twice among its outputs; make two values"
    )


def test_verify_refuses_a_pure_node_without_outputs() -> None:
    broken = valid()
    nodes(broken, "unused")[0].outputs.clear()
    assert problem(broken) == "unused (Neg) has no outputs; give it one, or remove it"
    verify(model("graph main() -> () { NoOp() }"))


def test_verify_refuses_an_input_with_a_producer() -> None:
    broken = valid()
    broken.graph.inputs.append(value_named(broken.graph, "h"))
    assert problem(broken) == (
        "input 'h' of graph 'main' is also made by add in m.onnx; it can be one of these only"
    )


def test_verify_refuses_an_input_that_is_a_constant() -> None:
    broken = valid()
    broken.graph.inputs.append(value_named(broken.graph, "one"))
    assert problem(broken) == ("input 'one' of graph 'main' is a constant; take it off the inputs")


@pytest.mark.parametrize("nested", [False, True])
def test_verify_refuses_an_input_listed_twice(nested: bool) -> None:
    broken = valid()
    x = value_named(broken.graph, "x")
    if nested:
        body = nodes(broken, "loop")[0].attrs["body"]
        body.inputs[2] = nodes(broken, "step")[0].inputs[0] = x
        assert problem(broken) == (
            "input 'x' of the body of loop in m.onnx is an input twice; list it once"
        )
    else:
        broken.graph.inputs.append(x)
        assert problem(broken) == "input 'x' of graph 'main' is an input twice; list it once"


def test_verify_refuses_a_constant_with_a_producer() -> None:
    broken = valid()
    (add,) = nodes(broken, "add")
    h = value_named(broken.graph, "h")
    h.const = np.zeros((2, 3), np.float32)
    found = problems(broken)
    assert found[0] == (
        "'h' is a constant and an output of add in m.onnx; use a new value for the constant"
    )
    broken.graph.nodes.remove(add)
    assert problems(broken)[0] == (
        "loop in m.onnx reads 'h', a constant with a producer (add in m.onnx); set its producer "
        "to None, or do not make it a constant"
    )


# Names


def test_verify_refuses_two_values_of_one_name() -> None:
    broken = valid()
    value_named(broken.graph, "h").name = "x"
    assert problem(broken) == (
        "two values of graph 'main' are named 'x' (input 'x', and 'x', made by add in m.onnx); "
        "rename one"
    )


def test_verify_refuses_a_name_that_hides_an_outer_one() -> None:
    broken = valid()
    value_named(broken.graph, "q").name = "last"
    assert problem(broken) == (
        "'last', made by times in m.onnx, in the else_branch of choice in m.onnx has the name of "
        "a value of graph 'main', and hides it; rename one"
    )


def test_verify_accepts_one_name_in_sibling_graphs() -> None:
    fine = valid()
    value_named(fine.graph, "q").name = "p"
    value_named(fine.graph, "t").name = "p"
    verify(fine)


def test_verify_refuses_a_value_without_a_name() -> None:
    broken = valid()
    value_named(broken.graph, "q").name = ""
    assert problem(broken) == (
        "a value of the else_branch of choice in m.onnx ('', made by times in m.onnx) has no "
        "name; name it"
    )


# Control inputs, control flow


def test_verify_refuses_a_control_input_outside_of_the_model() -> None:
    broken = valid()
    stray = Node(any_op("NoOp"), [], [], name="stray")
    nodes(broken, "add")[0].control_inputs.append(stray)
    assert problem(broken) == (
        "add in m.onnx has stray as a control input, which is not a node of graph 'main'; it can "
        "only wait for nodes of its own graph"
    )


def test_verify_refuses_a_control_input_in_another_graph() -> None:
    broken = valid()
    add, minus = nodes(broken, "add", "minus")
    minus.control_inputs.append(add)
    assert "is not a node of the then_branch of choice" in problem(broken)


def control_flow_problem(text: str) -> str:
    return problem(model(f"graph main(a, b, c) -> () {{ {text} }}"))


def test_verify_refuses_branches_that_do_not_fit_their_if() -> None:
    broken = valid()
    branch = nodes(broken, "choice")[0].attrs["then_branch"]
    branch.outputs.append(branch.outputs[0])
    assert problem(broken) == (
        "the then_branch of choice in m.onnx has 0 inputs and 2 outputs instead of 0 and 1: a "
        "branch takes nothing and gives one value for each output of its If"
    )


def test_verify_refuses_an_if_without_a_branch() -> None:
    broken = valid()
    del nodes(broken, "choice")[0].attrs["else_branch"]
    assert problem(broken) == "choice in m.onnx needs a graph as its attribute 'else_branch'"


def test_verify_refuses_an_if_with_two_inputs() -> None:
    text = "y = If(a, b) as i { then_branch: graph() -> (a) {} else_branch: graph() -> (b) {} }"
    assert control_flow_problem(text) == (
        "i has 2 inputs and 1 outputs: an If has one input, the condition"
    )


def test_verify_refuses_a_body_that_does_not_fit_its_loop() -> None:
    broken = valid()
    nodes(broken, "loop")[0].attrs["body"].outputs.pop()
    assert problem(broken) == (
        "the body of loop in m.onnx has 3 inputs and 2 outputs instead of 3 and 3: the body of a "
        "Loop takes the iteration, the condition and the carried values, and gives the condition "
        "and one value for each output of the node"
    )


def test_verify_refuses_a_loop_without_outputs_for_carried_values() -> None:
    text = "y = Loop(a, b, c, c) as l { body: graph(i, d, s, t) -> (d, s) { } }"
    assert control_flow_problem(text) == (
        "l has 4 inputs and 1 outputs: a Loop has an output for each carried value, then one for "
        "each that it collects"
    )


def test_verify_refuses_a_body_that_does_not_fit_its_scan() -> None:
    text = "y, z = Scan{num_scan_inputs=%s}(a, b) as s { body: graph(p, q) -> (p, q%s) { } }"
    verify(model(f"graph main(a, b) -> () {{ {text % ('1', '')} }}"))
    assert control_flow_problem(text % ("1", ", q")).startswith(
        "the body of s has 2 inputs and 3 outputs instead of 2 and 2: the body of a Scan takes"
    )
    assert control_flow_problem(text % ("3", "")).startswith(
        "s has 2 inputs and 2 outputs: num_scan_inputs of the inputs of a Scan are sequences"
    )
    assert "num_scan_inputs" in control_flow_problem(text % ('"?"', ""))


def test_verify_refuses_scan_axes_and_directions_that_are_no_integers() -> None:
    text = "y, z = Scan{num_scan_inputs=1, %s}(a, b) as s { body: graph(p, q) -> (p, q) { } }"
    for name in ("scan_input_axes", "scan_output_directions"):
        fault = control_flow_problem(text % f"{name}=[1e999]")
        assert f"s has {name} [inf], which must be integers" in fault
        fault = control_flow_problem(text % f"{name}=7")
        assert f"s has {name} 7, which must be a list" in fault


def test_verify_accepts_the_sequence_lengths_of_scan_8() -> None:
    text = "y, z = Scan-8{num_scan_inputs=1}(_, a, b) { body: graph(p, q) -> (p, q) { } }"
    verify(model(f"graph main(a, b) -> () {{ {text} }}"))


def test_verify_refuses_a_body_that_does_not_fit_its_sequence_map() -> None:
    text = "y = SequenceMap(a, b) as s { body: graph(p, q) -> (p, q) { } }"
    assert control_flow_problem(text) == (
        "the body of s has 2 inputs and 2 outputs instead of 2 and 1: the body of a SequenceMap "
        "takes an element for each input and gives one for each output"
    )


def test_verify_accepts_an_if_of_another_domain_without_branches() -> None:
    verify(model("graph main() -> () { y = com.example.If() }"))


# Types and constants


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (TensorType(FLOAT32, (3, -1)), "dim -1 is not between 0 and 2**63 - 1"),
        (TensorType(FLOAT32, (2**63,)), f"dim {2**63} is not between 0 and 2**63 - 1"),
        (
            TensorType(FLOAT32, (2**40, 2**40)),
            f"its dims {[2**40, 2**40]} multiply to more than Limits.max_elements = {2**62}",
        ),
        (TensorType(FLOAT32, (2**40, "N", 2**40)), "multiply to more than"),
        (TensorType(FLOAT32, (0, 2**40, 2**40)), "multiply to more than"),
        (TensorType(FLOAT32, (1,) * 65), "it has 65 dims, more than Limits.max_dims = 64"),
        (TensorType(FLOAT32, (1.5,)), "dim 1.5 is neither an int, nor a name, nor None (unknown)"),  # type: ignore[arg-type]
        (TensorType(FLOAT32, (np.int64(3),)), "is neither an int, nor a name"),  # type: ignore[arg-type]
        (TensorType(np.dtype(">f4"), (3,)), "no tensor has dtype dtype('>f4'); use one of bool,"),
        (TensorType(np.dtype("U3"), (3,)), "no tensor has dtype dtype('<U3')"),
        (TensorType(INT64, (2,), (1,)), "its known contents, 1 elements, do not fit int64[2]"),
        (TensorType(INT64, (1, 2), (1, 2)), "its known contents, 2 elements, do not fit"),
        (SequenceType(OptionalType(TensorType(FLOAT32, (-5,)))), "dim -5 is not between"),
        (MapType(INT64, TensorType(FLOAT32, (-5,))), "dim -5 is not between"),
        (MapType(np.dtype("U3"), ANY), "no map has keys of dtype dtype('<U3')"),
    ],
)
def test_verify_refuses_invalid_types(kind: Type, fault: str) -> None:
    broken = valid()
    value_named(broken.graph, "q").type = kind
    found = problem(broken)
    assert found.startswith("'q', made by times in m.onnx: ")
    assert fault in found


def test_verify_refuses_invalid_types_of_inputs_and_constants() -> None:
    broken = valid()
    value_named(broken.graph, "n").type = TensorType(INT64, (-7,))
    value_named(broken.graph, "one").type = TensorType(FLOAT32, (-8,))
    found = problems(broken)
    assert found[0] == "input 'n': dim -7 is not between 0 and 2**63 - 1"
    assert found[1] == "constant 'one': dim -8 is not between 0 and 2**63 - 1"


def test_verify_refuses_types_that_nest_too_deep() -> None:
    kind: Type = ANY
    for _ in range(10_000):
        kind = SequenceType(kind)
    broken = valid()
    value_named(broken.graph, "q").type = kind
    assert problem(broken).endswith("its type nests deeper than Limits.max_depth = 64")


@pytest.mark.parametrize(
    "kind",
    [
        ANY,
        TensorType(),
        TensorType(FLOAT32, ("N", None, 0)),
        TensorType(INT64, (3,), (1, "N", None)),
        TensorType(INT64, ("M",), (1, 2)),
        TensorType(INT64, (), (1,)),
    ],
)
def test_verify_accepts_valid_types(kind: Type) -> None:
    fine = valid()
    value_named(fine.graph, "q").type = kind
    verify(fine)


@pytest.mark.parametrize(
    ("array", "kind", "fault"),
    [
        (
            np.zeros(12, np.float32),
            TensorType(FLOAT32, (3, 4)),
            "is declared float32[3, 4] but holds float32[12]",
        ),
        (
            np.zeros(3, np.float64),
            TensorType(FLOAT32, (3,)),
            "is declared float32[3] but holds float64[3]",
        ),
        (np.zeros(3), SequenceType(ANY), "is declared seq(any) but holds float64[3]"),
        (
            np.array([1, 2]),
            TensorType(INT64, (2,), (1, 3)),
            "holds [1, 2], but its type says [1, 3]",
        ),
        (
            np.array(["a", 1], object),
            TensorType(np.dtype(object), (2,)),
            "has elements that are not strings; decode them to str",
        ),
        ([1.0], TensorType(), "is a list; make it a NumPy array"),
    ],
)
def test_verify_refuses_constants_that_do_not_fit_their_type(
    array: Any, kind: Type, fault: str
) -> None:
    broken = valid()
    one = value_named(broken.graph, "one")
    one.const, one.type = array, kind
    found = problem(broken)
    assert found.startswith("constant 'one' ") and fault in found


def test_verify_accepts_a_constant_with_a_less_precise_type() -> None:
    fine = valid()
    value_named(fine.graph, "one").type = TensorType(None, ("M",))
    verify(fine)


# Cycles


def test_verify_refuses_a_cycle() -> None:
    broken = model("""graph main(x) -> (p) {
      p = Add(x, r) as a in m.onnx   q = Neg(p) as b in m.onnx   r = Neg(q) as c in m.onnx
    }""")
    assert problem(broken) == (
        "graph 'main': each of these nodes waits for the one before it, so that none can run "
        "first: a in m.onnx -> b in m.onnx -> c in m.onnx -> a in m.onnx. Remove one of these "
        "dependencies"
    )


def test_verify_refuses_a_cycle_of_control_inputs() -> None:
    broken = valid()
    add, choice = nodes(broken, "add", "choice")
    add.control_inputs.append(choice)
    assert "add in m.onnx -> choice in m.onnx -> add in m.onnx" in problem(broken)


def test_verify_refuses_a_cycle_through_captures_of_a_nested_graph() -> None:
    broken = valid()
    nodes(broken, "minus")[0].inputs[0] = value_named(broken.graph, "all")
    assert "first: choice in m.onnx -> loop in m.onnx -> choice in m.onnx" in problem(broken)


def test_verify_refuses_a_cycle_inside_a_nested_graph() -> None:
    broken = valid()
    nodes(broken, "times")[0].inputs[1] = value_named(broken.graph, "unused")
    assert "first: times in m.onnx -> unused -> times in m.onnx" in problem(broken)


# Limits, and what only a hostile file does


def test_verify_refuses_too_many_nodes() -> None:
    assert problem(valid(), Limits(max_nodes=4)) == (
        "the model has more nodes than Limits.max_nodes = 4; raise the limit if you trust the model"
    )
    verify(valid(), Limits(max_nodes=7))


def test_verify_refuses_graphs_that_nest_too_deep() -> None:
    deep = Model({"nest": nest(3000)}, "nest")
    assert problem(deep).startswith("the body of Call that makes 'y2935' nests deeper than Limits")
    verify(deep, Limits(max_depth=3000))


def test_verify_refuses_too_many_bytes_of_constants() -> None:
    assert problem(valid(), Limits(max_constant_bytes=11)) == (
        "the model's constants have 12 bytes, more than Limits.max_constant_bytes = 11; raise "
        "the limit if you trust the model"
    )
    verify(valid(), Limits(max_constant_bytes=12))


def test_verify_refuses_a_graph_inside_itself() -> None:
    broken = valid()
    (loop,) = nodes(broken, "loop")
    loop.attrs["body"].nodes.append(loop)
    assert problem(broken) == (
        "the body of loop in m.onnx is a graph that also stands elsewhere, or around itself; "
        "give each place a copy of its own"
    )


def test_verify_refuses_a_graph_in_two_places() -> None:
    broken = valid()
    (choice,) = nodes(broken, "choice")
    choice.attrs["else_branch"] = choice.attrs["then_branch"]
    assert "the else_branch of choice in m.onnx is a graph that also stands" in problem(broken)


@pytest.mark.full
def test_verify_accepts_a_long_chain_of_nodes_in_any_order() -> None:
    long = chain(100_000)
    verify(Model({"chain": long}, "chain"))
    long.nodes.reverse()
    verify(Model({"chain": long}, "chain"))


def test_verify_accepts_many_graphs_side_by_side() -> None:
    branch = (
        "z%d = If(x) { then_branch: graph() -> (v) { v = Neg(x) } else_branch: graph() -> (x) { } }"
    )
    verify(model(f"graph main(x) -> () {{ {' '.join(branch % i for i in range(3000))} }}"))
