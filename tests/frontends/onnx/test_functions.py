"""Calls of functions, of a model or of ONNX's definitions, are replaced by their bodies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper

import penstock as ps
from penstock.core.errors import InvalidModel, Unsupported
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.onnx import importer
from penstock.frontends.onnx.importer import load_onnx
from penstock.ir.graph import Model
from tests.support.onnx_models import interpret_model

OPSET = 21
X = np.array([-1.5, 0.5, 3], np.float32)


def node(op: str, inputs: str, outputs: str, name: str = "", **attrs: Any) -> NodeProto:
    domain = "own" if op[0] == "F" and op != "Flatten" else ""
    return helper.make_node(
        op, inputs.split(), outputs.split(), name=name or None, domain=domain, **attrs
    )


def referring(proto: NodeProto, **references: str) -> NodeProto:
    """``proto`` with attributes that refer to those of the function around it."""
    schema = onnx.defs.get_schema(proto.op_type, OPSET, "") if not proto.domain else None
    for key, name in references.items():
        code = AttributeProto.FLOAT if schema is None else schema.attributes[key].type.value
        proto.attribute.append(AttributeProto(name=key, ref_attr_name=name, type=code))
    return proto


def function(
    name: str,
    inputs: str,
    outputs: str,
    nodes: Sequence[NodeProto],
    attributes: Sequence[str] = (),
    defaults: Sequence[AttributeProto] = (),
    overload: str = "",
    opset: int = OPSET,
) -> FunctionProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function(
        "own",
        name,
        inputs.split(),
        outputs.split(),
        nodes,
        imports,
        attributes,
        defaults,
        overload=overload or None,
    )


def model_of(
    nodes: Sequence[NodeProto],
    functions: Sequence[FunctionProto],
    outputs: Sequence[str] = ("y",),
    opset: int = OPSET,
) -> onnx.ModelProto:
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
    outs = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "g", infos, outs)
    return helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=10)


def check(proto: onnx.ModelProto) -> Model:
    """Compare with ONNX Runtime."""
    model = load_onnx(proto)
    wanted = run_ort(proto, {"x": X})
    for got, want in zip(interpret_model(model, X), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    return model


def run_ort(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def problem(proto: onnx.ModelProto, limits: Limits = DEFAULT_LIMITS) -> str:
    with pytest.raises(InvalidModel) as caught:
        load_onnx(proto, limits)
    return "\n".join(caught.value.problems)


TWICE = function("FTwice", "a", "b", [node("Add", "a a", "b", "add")])


def test_function_call_becomes_the_body() -> None:
    model = check(
        model_of([node("FTwice", "x", "h", "one"), node("FTwice", "h", "y", "two")], [TWICE])
    )
    assert [n.name for n in model.graph.nodes] == ["one/add", "two/add"]
    assert model.graph.nodes[0].origin == "one/add in function own.FTwice of the model"
    assert model.graph.nodes[0].outputs[0] is model.graph.nodes[1].inputs[0]


def test_function_calls_without_unique_names_give_unique_values() -> None:
    body = [node("Add", "a a", "t"), node("Neg", "t", "b")]
    calls = [node("FNeg", "x", "h", "same"), node("FNeg", "h", "i", "same"), node("FNeg", "i", "y")]
    model = load_onnx(model_of(calls, [function("FNeg", "a", "b", body)]))
    assert np.array_equal(interpret_model(model, X)[0], -8 * X)
    names = [v.name for n in model.graph.nodes for v in n.outputs if v is not None]
    assert len(set(names)) == len(names) == 6


def test_function_body_names_are_made_unique_in_the_model() -> None:
    body = [node("Add", "a a", "t"), node("Neg", "t", "b")]
    nodes = [node("Relu", "x", "f/t"), node("FNeg", "f/t", "y", "f")]
    check(model_of(nodes, [function("FNeg", "a", "b", body)]))


def test_function_that_calls_a_function_is_expanded_fully() -> None:
    four = function("FFour", "a", "b", [node("FTwice", "a", "t", "in"), node("FTwice", "t", "b")])
    model = check(model_of([node("FFour", "x", "y", "four")], [four, TWICE]))
    assert model.graph.nodes[0].name == "four/in/add"
    assert model.graph.nodes[0].origin == "four/in/add in function own.FTwice of the model"


def test_function_body_uses_its_own_opsets() -> None:
    # The sum over axis 0 as an attribute in opset 11, as an input in the model's.
    body = [node("ReduceSum", "a", "b", axes=[0], keepdims=0)]
    total = function("FSum", "a", "b", body, opset=11)
    model = load_onnx(model_of([node("FSum", "x", "y")], [total]))
    assert interpret_model(model, X)[0] == pytest.approx(2)


def test_function_attributes_reach_nested_calls() -> None:
    leaky = referring(node("LeakyRelu", "a", "b"), alpha="slope")
    inner = function("FLeaky", "a", "b", [leaky], ["slope"])
    call = referring(node("FLeaky", "a", "b"), slope="outer")
    outer = function("FOuter", "a", "b", [call], ["outer"])
    check(model_of([node("FOuter", "x", "y", outer=0.25)], [inner, outer]))


def test_function_attributes_left_out_take_defaults() -> None:
    leaky = referring(node("LeakyRelu", "a", "b"), alpha="slope")
    with_default = function("FOne", "a", "b", [leaky], [], [helper.make_attribute("slope", 0.5)])
    without = function("FTwo", "a", "b", [leaky], ["slope"])  # then LeakyRelu's own default holds
    model = load_onnx(
        model_of([node("FOne", "x", "y"), node("FTwo", "x", "z")], [with_default, without], "yz")
    )
    y, z = interpret_model(model, X)
    assert (y[0], z[0]) == (pytest.approx(-0.75), pytest.approx(-0.015))


def test_function_constants_are_shared_among_calls() -> None:
    fixed = node("Constant", "", "two", value_float=2.0)
    given = referring(node("Constant", "", "n"), value_float="number")
    body = [fixed, given, node("Mul", "a two", "t"), node("Add", "t n", "b")]
    f = function("FLine", "a", "b", body, ["number"])
    model = check(
        model_of(
            [node("FLine", "x", "y", number=1.0), node("FLine", "x", "z", number=3.0)], [f], "yz"
        )
    )
    mul, _, other, _ = model.graph.nodes
    assert mul.inputs[1] is not None
    assert other.inputs[1] is not None
    assert mul.inputs[1].const is other.inputs[1].const  # one array, however often it is called


def test_function_with_a_nested_graph_is_expanded() -> None:
    then = helper.make_graph(
        [referring(node("LeakyRelu", "a", "t"), alpha="slope")],
        "then",
        [],
        [onnx.ValueInfoProto(name="t")],
    )
    other = helper.make_graph([node("Neg", "a", "e")], "else", [], [onnx.ValueInfoProto(name="e")])
    body = [
        node("ReduceMax", "a", "m", keepdims=0),
        node("Constant", "", "one", value_float=1.0),
        node("Greater", "m one", "c"),
        node("If", "c", "b", "if", then_branch=then, else_branch=other),
    ]
    f = function("FIf", "a", "b", body, ["slope"])
    model = check(
        model_of([node("FIf", "x", "h", "f", slope=0.5), node("FIf", "h", "y", slope=0.25)], [f])
    )
    branch = model.graph.nodes[2].attrs["then_branch"]
    assert branch.nodes[0].origin == (
        "f/LeakyRelu_0 in then_branch of f/if in function own.FIf of the model"
    )


def test_graph_as_function_attribute_reads_values_of_the_caller() -> None:
    branch = helper.make_graph([node("Neg", "x", "t")], "b", [], [onnx.ValueInfoProto(name="t")])
    taken = node("If", "c", "b")
    for key in ("then_branch", "else_branch"):
        taken.attribute.append(
            AttributeProto(name=key, ref_attr_name="branch", type=AttributeProto.GRAPH)
        )
    body = [
        node("Constant", "", "c", value=helper.make_tensor("", TensorProto.BOOL, [], [1])),
        taken,
    ]
    f = function("FBranch", "", "b", body, ["branch"])
    model = load_onnx(model_of([node("FBranch", "", "y", branch=branch)], [f]))
    assert interpret_model(model, X)[0].tolist() == [1.5, -0.5, -3]


def test_function_inputs_and_outputs_can_be_left_out() -> None:
    body = [node("Clip", "a low high", "b"), node("Neg", "a", "c")]
    f = function("FClip", "a low high", "b c", body)
    nodes = [
        node("Constant", "", "one", value_float=1.0),
        helper.make_node("FClip", ["x", "", "one"], ["w"], domain="own"),
        helper.make_node("FClip", ["x"], ["", "y"], domain="own"),
    ]
    model = load_onnx(model_of(nodes, [f], "wy"))
    w, y = interpret_model(model, X)
    assert w.tolist() == [-1.5, 0.5, 1]
    assert np.array_equal(y, -X)
    assert [v and v.name for v in model.graph.nodes[0].inputs] == ["x", None, "one"]


def test_function_outputs_can_be_inputs_constants_or_repeated() -> None:
    body = [node("Constant", "", "k", value_floats=[1.0, 2.0]), node("Neg", "a", "b")]
    f = function("FMany", "a", "a k b b", body)
    model = load_onnx(
        model_of([node("FMany", "x", "p q r s", "many"), node("Neg", "q", "y")], [f], "pqrsy")
    )
    p, q, r, s, y = interpret_model(model, X)
    assert np.array_equal(p, X)
    assert q.tolist() == [1, 2]
    assert np.array_equal(r, -X)
    assert np.array_equal(s, -X)
    assert y.tolist() == [-1, -2]


def test_function_overload_is_selected_by_the_call() -> None:
    one = function("FPick", "a", "b", [node("Neg", "a", "b")], overload="one")
    two = function("FPick", "a", "b", [node("Abs", "a", "b")], overload="two")
    calls = [node("FPick", "x", "y"), node("FPick", "x", "z")]
    calls[0].overload, calls[1].overload = "one", "two"
    model = load_onnx(model_of(calls, [one, two], "yz"))
    assert [n.op.name for n in model.graph.nodes] == ["Neg", "Abs"]
    assert "own.FPick:one" in model.graph.nodes[0].origin
    with pytest.raises(Unsupported, match=r"own\.FPick"):
        load_onnx(model_of([node("FPick", "x", "y")], [one, two]))


def test_function_takes_precedence_over_an_operation_of_its_name() -> None:
    relu = function("Relu", "a", "b", [node("Neg", "a", "b")])
    relu.domain = ""
    model = load_onnx(model_of([helper.make_node("Relu", ["x"], ["y"])], [relu]))
    assert [n.op.name for n in model.graph.nodes] == ["Neg"]


def test_function_call_before_its_producers_is_connected() -> None:
    model = load_onnx(model_of([node("FTwice", "h", "y"), node("Neg", "x", "h")], [TWICE]))
    assert np.array_equal(interpret_model(model, X)[0], -2 * X)


# What is refused


@pytest.mark.parametrize(
    ("calls", "chain"),
    [
        ({"FA": ["FA"]}, "function own.FA -> function own.FA"),
        (
            {"FA": ["FB"], "FB": ["FC"], "FC": ["FA"]},
            "function own.FA -> function own.FB -> function own.FC -> function own.FA",
        ),
    ],
)
def test_recursive_functions_are_refused_with_the_cycle(
    calls: dict[str, list[str]], chain: str
) -> None:
    functions = [
        function(name, "a", "b", [node(callee, "a", "b") for callee in callees])
        for name, callees in calls.items()
    ]
    assert chain in problem(model_of([node("FA", "x", "y")], functions))


def test_recursion_through_a_nested_graph_is_refused() -> None:
    branch = helper.make_graph([node("FA", "a", "t")], "b", [], [onnx.ValueInfoProto(name="t")])
    f = function("FA", "a c", "b", [node("If", "c", "b", then_branch=branch, else_branch=branch)])
    assert "own.FA -> function own.FA" in problem(model_of([node("Relu", "x", "y")], [f]))


@pytest.mark.parametrize("body", ["", "Add"])
def test_exponential_expansion_is_refused_before_it_happens(body: str) -> None:
    leaf = [node("Add", "a a", "b")] if body else []
    functions = [function("F0", "a", "b" if leaf else "a", leaf)]
    for i in range(1, 60):
        calls = [node(f"F{i - 1}", "a", "t"), node(f"F{i - 1}", "t", "b")]
        functions.append(function(f"F{i}", "a", "b", calls))
    begin = time.thread_time()
    message = problem(model_of([node("F59", "x", "y")], functions))
    assert "more nodes than Limits.max_nodes = 5000000; raise" in message
    assert "(function bodies expanded)" in message
    assert time.thread_time() - begin < 1


def test_call_depth_beyond_the_limit_is_refused() -> None:
    functions = [
        function(f"F{i}", "a", "b", [node(f"F{i - 1}" if i else "Neg", "a", "b")])
        for i in range(100)
    ]
    proto = model_of([node("F99", "x", "y")], functions)
    assert "nests deeper than Limits.max_depth = 64" in problem(proto)
    load_onnx(proto, Limits(max_depth=200))


def test_calls_with_wrong_arity_or_attributes_are_refused() -> None:
    proto = model_of(
        [
            node("FTwice", "x x", "h", "inputs"),
            node("FTwice", "x", "i j", "outputs"),
            node("FTwice", "x", "y", "attribute", alpha=1.0),
        ],
        [TWICE],
    )
    assert problem(proto).splitlines() == [
        "inputs in the model has 2 inputs, but function own.FTwice has 1",
        "outputs in the model has 2 outputs, but function own.FTwice has 1",
        "attribute in the model has an attribute 'alpha', which function own.FTwice does not have",
    ]


def test_duplicate_functions_are_refused() -> None:
    assert "function own.FTwice twice" in problem(
        model_of([node("Relu", "x", "y")], [TWICE, TWICE])
    )


def test_fault_in_a_body_names_call_and_function() -> None:
    f = function("FBad", "a", "b", [node("Cast", "a", "b", "cast")])
    assert problem(model_of([node("FBad", "x", "y", "call")], [f])) == (
        "call/cast in function own.FBad of the model lacks attribute 'to', which Cast-21 requires"
    )


def test_function_body_needs_its_own_opset_imports() -> None:
    f = function("FBad", "a", "b", [helper.make_node("Op", ["a"], ["b"], domain="else")])
    proto = model_of([node("FBad", "x", "y", "call")], [f])
    proto.opset_import.append(helper.make_opsetid("else", 1))
    assert "'else' is undeclared" in problem(proto)


def test_attribute_default_that_refers_to_itself_is_refused() -> None:
    leaky = referring(node("LeakyRelu", "a", "b"), alpha="slope")
    default = AttributeProto(name="slope", ref_attr_name="slope", type=AttributeProto.FLOAT)
    f = function("FLoop", "a", "b", [leaky], [], [default])
    assert "but is in none" in problem(model_of([node("FLoop", "x", "y")], [f]))


def doubling(times: int) -> onnx.ModelProto:
    """A model of about 60 bytes for each function, which together have 2 ** times nodes."""
    functions = [function("F0", "a", "b", [node("Neg", "a", "b")])]
    for i in range(1, times):
        calls = [node(f"F{i - 1}", "a", "t"), node(f"F{i - 1}", "t", "b")]
        functions.append(function(f"F{i}", "a", "b", calls))
    return model_of([node(f"F{times - 1}", "x", "y")], functions)


def test_expansion_out_of_proportion_to_the_file_is_refused_before_it_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importer._Importer, "call", lambda *_: pytest.fail("a call is expanded"))
    message = problem(doubling(18))
    assert "Limits.max_nodes_per_byte = 0.25 for each of its" in message


def test_expansion_of_twenty_thousand_nodes_is_accepted_whatever_the_size_of_the_file() -> None:
    graph = ps.load(doubling(11)).graph
    assert len(graph.nodes) == 2**10


@pytest.mark.costly
def test_expansion_is_as_large_as_the_limit_allows() -> None:
    model = doubling(15)
    assert "max_nodes_per_byte" in problem(model)
    assert len(ps.load(model, limits=ps.Limits(max_nodes_per_byte=None)).graph.nodes) == 2**14
