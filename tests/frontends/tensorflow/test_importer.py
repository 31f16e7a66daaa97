"""GraphDefs: the corpus of control flow, names, functions, variables, and refusals."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

import penstock as ps
from penstock.analysis.frames import Frames
from penstock.core.errors import InvalidInput, InvalidModel, PenstockError, RunError, Unsupported
from penstock.frontends.common.diagnostics import Diagnostics
from penstock.frontends.tensorflow.function_library import FunctionLibrary
from penstock.frontends.tensorflow.importer import Importer
from penstock.ops.tensorflow.state import Store
from penstock.passes.dead_code import cut
from tests.support.tf_cases import Case, array, cases, check, feeds
from tests.support.tf_graphs import Builder, Func, Shape, Type

CASES = list(cases())


def named(corpus: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", corpus, ids=[case.name for case in corpus])


# The corpus.


@named(CASES)
def test_corpus_case_loads(case: Case) -> None:
    model = ps.load(case.path)
    names = {node.name for node in model.graph.nodes} | {v.name for v in model.graph.inputs}
    counted = {n for run in case.runs for n in run["expect"].get("live_exec", ())}
    assert counted <= names


@named([case for case in CASES if case.structured])
@pytest.mark.parametrize("executor", ["linear", "dataflow"])
def test_corpus_case_without_frames_runs(case: Case, executor: str) -> None:
    session = ps.compile(case.path, executor=executor, backends=["numpy"])
    for run in case.runs:
        if "error" in run["expect"]:
            with pytest.raises((RunError, InvalidInput)):
                session.run(feeds(run), run["fetches"], run["targets"])
        else:
            check(case, run, session.run(feeds(run), run["fetches"], run["targets"]))


@named(CASES)
def test_corpus_case_has_the_frames_of_tensorflow(case: Case) -> None:
    model = ps.load(case.path)
    graph = model.graph
    values = {v.name: v for node in graph.nodes for v in node.outputs if v is not None}
    values.update((v.name, v) for v in graph.inputs)
    nodes = {node.name: node for node in graph.nodes}
    for run in case.runs:
        fed = [values[name] for name in run["feeds"]]
        fetched = [values[model.aliases.get(name, name)] for name in run["fetches"]]
        part = cut(graph, fed, fetched, [nodes[name] for name in run["targets"]])
        message = run["expect"].get("message", "")
        if "different frames" in message or "LoopCond" in message:
            with pytest.raises(InvalidModel, match=r"different frames|two LoopConds"):
                Frames(part)
        else:
            frames = Frames(part).of
            counted = set(run["expect"].get("live_exec", ()))
            assert counted <= {node.name for node in frames}


# Names.


def sum_of_two() -> Builder:
    g = Builder()
    g.placeholder("a", "float32", -1)
    g.placeholder("b", "float32", -1)
    g.node("AddV2", "a", "b", name="sum", T=Type("float32"))
    g.node("Neg", "sum:0", name="scope/neg", T=Type("float32"))
    return g


def test_node_name_stands_for_its_first_output() -> None:
    session = ps.compile(sum_of_two().bytes())
    a, b = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    for feeds_ in ({"a": a, "b:0": b}, {"a:0": a, "b:0": b}, {"a": a, "b": b}):
        out = session.run(feeds_, ["scope/neg", "sum:0", "sum"])
        assert list(out) == ["scope/neg", "sum:0", "sum"]
        np.testing.assert_array_equal(out["scope/neg"], [-4, -6])
        np.testing.assert_array_equal(out["sum"], out["sum:0"])
    assert [port.name for port in session.inputs] == ["a:0", "b:0"]
    assert [port.name for port in session.outputs] == ["scope/neg:0"]
    np.testing.assert_array_equal(session.run({"sum": a}, ["scope/neg"])["scope/neg"], -a)
    np.testing.assert_array_equal(session(a, b), [-4, -6])


def test_value_fed_by_two_names_is_refused() -> None:
    session = ps.compile(sum_of_two().bytes())
    one = np.ones(1, np.float32)
    with pytest.raises(InvalidInput, match="fed twice"):
        session.run({"a": one, "a:0": one, "b": one})
    with pytest.raises(InvalidInput, match="no such value"):
        session.run({"a": one, "c": one})
    with pytest.raises(InvalidInput, match="not fed"):
        session.run({"a": one}, ["sum"])


def test_text_and_binary_files_give_the_same_graph(tmp_path: Path) -> None:
    g = sum_of_two()
    text = tmp_path / "graph.pbtxt"
    text.write_text(text_format.MessageToString(g.proto) + "\nunknown_field: 3\n")
    binary = tmp_path / "graph.pb"
    binary.write_bytes(g.bytes())
    feeds_ = {"a": [1.0], "b": [2.0]}
    for source in (text, binary, g.bytes()):
        (out,) = ps.compile(source).run(feeds_).values()
        assert out == [-3]
    text.write_text("node { name: 3 }")
    with pytest.raises(InvalidModel, match=r"graph\.pbtxt is no GraphDef"):
        ps.load(text)
    text.write_text('node { name: "c" attr { key: "a" value { type: 9223372036854775808 } } }')
    with pytest.raises(
        InvalidModel, match=r"is no GraphDef: line 1, column 42: .*type: Value out of range"
    ):
        ps.load(text)


def test_nodes_in_any_order_are_connected() -> None:
    g = sum_of_two()
    nodes = list(g.proto.node)[::-1]
    del g.proto.node[:]
    g.proto.node.extend(nodes)
    (out,) = ps.compile(g.bytes()).run({"a": [1.0], "b": [2.0]}).values()
    assert out == [-3]


# Targets and effects.


def test_target_runs_without_being_fetched() -> None:
    g = Builder()
    g.placeholder("x", "int32")
    g.node("Greater", "x", g.const(np.int32(0), "zero"), name="positive", T=Type("int32"))
    g.node("Assert", "positive", "x", name="check", T=[Type("int32")])
    g.node("NoOp", "^check", name="all")
    session = ps.compile(g.bytes())
    assert session.run({"x": 1}, [], ["all"]) == {}
    for target in ("check", "all"):
        with pytest.raises(RunError, match="assertion failed: \\[-1\\]"):
            session.run({"x": -1}, [], [target])
    with pytest.raises(InvalidInput, match=r"no target is 'al'"):
        session.run({"x": 1}, [], ["al"])


def test_control_input_on_an_assert_orders_the_node() -> None:
    g = Builder()
    g.placeholder("x", "int32")
    g.node("Greater", "x", g.const(np.int32(0), "zero"), name="positive", T=Type("int32"))
    g.node("Assert", "positive", "x", name="check", T=[Type("int32")])
    g.node("Identity", "x", "^check", name="y", T=Type("int32"))
    for executor in ("linear", "dataflow", "parallel"):
        session = ps.compile(g.bytes(), executor=executor)
        assert session.run({"x": 2}, ["y"])["y"] == 2
        with pytest.raises(RunError, match="assertion failed"):
            session.run({"x": -2}, ["y"])


# What is refused.


def refused(g: Builder, match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        ps.load(g.bytes())


def test_importer_reports_all_unsupported_operations_at_once() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Frobnicate", "x", name="a")
    g.node("DecodeJpeg", "a", name="b")
    g.node("Frobnicate", "b", name="c")
    with pytest.raises(Unsupported) as caught:
        ps.load(g.bytes())
    nodes = {operation.operation: operation.nodes for operation in caught.value.operations}
    assert set(nodes) == {"tensorflow.Frobnicate", "tensorflow.DecodeJpeg"}
    assert nodes["tensorflow.Frobnicate"] == ("a in the model", "c in the model")


def test_missing_inputs_are_refused() -> None:
    g = Builder()
    g.node("Neg", "missing", name="a", T=Type("float32"))
    g.node("Neg", "a:1", name="b", T=Type("float32"))
    g.node("Neg", "a", "^nowhere", name="c", T=Type("float32"))
    with pytest.raises(InvalidModel) as caught:
        ps.load(g.bytes())
    message = str(caught.value)
    assert "a in the model (Neg) reads 'missing', which is no node" in message
    assert "b in the model (Neg) reads 'a:1', but 'a' has 1 outputs" in message
    assert "c in the model (Neg) waits for 'nowhere'" in message


def test_duplicate_and_empty_names_are_refused() -> None:
    g = sum_of_two()
    g.placeholder("a", "float32")
    refused(g, "has a node 'a' .* twice")
    g = sum_of_two()
    g.proto.node.add(op="NoOp")
    refused(g, "without a name")


def test_wrong_arity_is_refused() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("AddV2", "x", name="sum", T=Type("float32"))
    refused(g, r"sum in the model \(AddV2\) has 1 inputs, but AddV2 takes 2")
    g = Builder()
    g.node("Pack", name="p", N=10**12, T=Type("float32"))
    refused(g, "attribute 'N'")
    g = Builder()
    g.node("Merge", name="m", N=0, T=Type("float32"))
    refused(g, "Merge has 0 inputs")


def test_input_of_another_dtype_is_refused() -> None:
    g = Builder()
    x, y = g.placeholder("x", "float32"), g.const(np.float64(1))
    g.node("AddV2", x, y, name="sum", T=Type("float32"))
    refused(g, r"sum in the model \(AddV2\): its input 1 must be float32, but is float64")


def test_dtype_that_the_operation_does_not_take_is_refused() -> None:
    g = Builder()
    x = g.placeholder("x", "object")
    g.node("FloorDiv", x, x, name="quotient", T=Type("object"))
    refused(g, "its attribute 'T' is 'string', not one of bfloat16, ")


def test_attribute_without_a_value_has_its_default() -> None:
    g = Builder()
    x = g.placeholder("x", "float32", 1, 2, 2, 1)
    one, zero = g.const(np.ones(1, np.float32)), g.const(np.zeros(1, np.float32))
    types = {"T": Type("float32"), "U": Type("float32"), "is_training": False}
    g.node("FusedBatchNormV3", x, one, zero, zero, one, name="y", **types)
    g.proto.node[-1].attr["epsilon"].SetInParent()
    (y,) = ps.compile(g.bytes()).run({"x": np.ones((1, 2, 2, 1), np.float32)}, ["y:0"]).values()
    np.testing.assert_allclose(y, 1 / np.sqrt(np.full((1, 2, 2, 1), 1.0001)), rtol=1e-6)


def test_strided_slice_by_other_than_vectors_is_refused() -> None:
    g = Builder()
    x, one = g.placeholder("x", "int32", 3), g.const(np.int32([1]))
    types = {"T": Type("int32"), "Index": Type("int32")}
    g.node("StridedSlice", x, g.const(np.int32([[0]])), one, one, name="y", **types)
    for executor in ("linear", "frames"):
        with pytest.raises(ps.PenstockError, match="must have one dim each"):
            ps.compile(g.bytes(), executor=executor).run({"x": np.int32([1, 2, 3])}, ["y"])


def test_missing_dtype_is_refused() -> None:
    g = Builder()
    g.node("Neg", g.placeholder("x", "float32"), name="n")
    refused(g, r"n in the model \(Neg\): it has no attribute T")


def test_constant_of_another_dtype_than_declared_is_refused() -> None:
    g = Builder()
    g.node("Const", name="c", dtype=Type("int32"), value=np.float32(1))
    refused(g, "declares int32, but its value is float32")


def test_data_input_after_control_inputs_is_refused() -> None:
    g = sum_of_two()
    g.node("AddV2", "a", "^sum", "b", name="late", T=Type("float32"))
    refused(g, "behind its control inputs")


def test_cycle_without_next_iteration_is_refused() -> None:
    g = Builder()
    g.node("Neg", "b", name="a", T=Type("float32"))
    g.node("Neg", "a", name="b", T=Type("float32"))
    refused(g, "each of these nodes waits for the one before it")
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Merge", "x", "n", name="m", N=2, T=Type("float32"))
    g.node("Neg", "m", name="n", T=Type("float32"))
    refused(g, "each of these nodes waits")


def loop(**attrs: object) -> Builder:
    g = Builder()
    g.placeholder("x", "float32")
    given = {"frame_name": "f", "parallel_iterations": 10, **attrs}
    g.node("Enter", "x", name="e", T=Type("float32"), **given)
    g.node("Merge", "e", "next", name="m", N=2, T=Type("float32"))
    g.node("Less", "m", "m", name="less", T=Type("float32"))
    g.node("LoopCond", "less", name="cond")
    g.node("Switch", "m", "cond", name="s", T=Type("float32"))
    g.node("NextIteration", "s:1", name="next", T=Type("float32"))
    g.node("Exit", "s:0", name="out", T=Type("float32"))
    return g


def test_loop_with_next_iteration_loads() -> None:
    model = ps.load(loop().bytes())
    frames = Frames(model.graph).of
    names = {node.name: frame.name for node, frame in frames.items()}
    assert names["e"] == ""
    assert {names[node] for node in ("m", "less", "cond", "s", "next", "out")} == {"f"}
    session = ps.compile(model, executor="frames", backends=["numpy"])
    assert session.run({"x": 1.0}, ["out"])["out"] == 1.0


def test_enter_without_frame_name_or_iterations_is_refused() -> None:
    refused(loop(parallel_iterations=0), "e in the model allows 0 parallel_iterations")
    refused(
        loop(frame_name=""), "e in the model enters a frame without a name; give it a frame_name"
    )


def test_leaving_a_frame_outside_of_one_is_refused() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Exit", "x", name="y", T=Type("float32"))
    with pytest.raises(InvalidModel, match="y in the model is an Exit of no frame"):
        Frames(ps.load(g.bytes()).graph)


def test_frame_with_two_parents_is_refused() -> None:
    g = loop()
    g.node("Enter", "e", name="inner", T=Type("float32"), frame_name="g")
    g.node("Enter", "x", name="other", T=Type("float32"), frame_name="g")
    with pytest.raises(InvalidModel, match="frame 'g' is entered from"):
        Frames(ps.load(g.bytes()).graph)


@pytest.mark.parametrize("keep", [0, 1, 7, 40, -1])
def test_truncated_file_is_refused(keep: int) -> None:
    data = sum_of_two().bytes()
    with pytest.raises(PenstockError):
        ps.load(data[:keep] if keep >= 0 else data + b"\x0a\xff")


def test_damaged_file_never_crashes() -> None:
    data = (Path(__file__).parents[2] / "models" / "tf" / "func_v2_while.pb").read_bytes()
    rng = np.random.default_rng(7)
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            broken[place] = rng.integers(0, 256)
        with suppress(PenstockError):
            ps.load(b"\x0a" + bytes(broken[1:]))


def test_tensor_that_does_not_fit_its_shape_is_refused() -> None:
    g = Builder()
    g.const(np.zeros(4, np.float32), "c")
    g.proto.node[0].attr["value"].tensor.tensor_shape.dim[0].size = 5
    refused(g, "has 16 bytes, but takes 20")
    g.proto.node[0].attr["value"].tensor.tensor_shape.dim[0].size = 2**62
    refused(g, "c in the model")
    g.proto.node[0].attr["value"].tensor.dtype = 20
    refused(g, "element type 20")


def test_repeated_element_takes_no_memory() -> None:
    g = Builder()
    g.const(np.zeros((), np.float32), "c")
    value = g.proto.node[0].attr["value"].tensor
    value.tensor_content = b""
    value.float_val.append(2.5)
    value.tensor_shape.dim.add(size=2**26)
    g.node(
        "StridedSlice",
        "c",
        *(g.const(np.array([i], np.int32)) for i in (5, 8, 1)),
        name="s",
        T=Type("float32"),
        Index=Type("int32"),
    )
    (out,) = ps.compile(g.bytes(), backends=["numpy"]).run({}, ["s"]).values()
    np.testing.assert_array_equal(out, np.full(3, 2.5, np.float32))


def test_repeated_element_beyond_max_bytes_is_refused() -> None:
    g = Builder()
    g.const(np.zeros((), np.int32), "c")
    value = g.proto.node[0].attr["value"].tensor
    value.tensor_content = b""
    value.tensor_shape.dim.add(size=2**31 - 1)
    with pytest.raises(InvalidModel, match="repeats an element to 8589934588 bytes, more than"):
        ps.load(g.bytes(), limits=ps.Limits(max_bytes=2**26))


def test_constants_beyond_the_limit_are_refused() -> None:
    g = Builder()
    g.const(np.zeros(1000, np.float32), "c")
    ps.load(g.bytes(), limits=ps.Limits(max_constant_bytes=4000))
    with pytest.raises(InvalidModel, match="constants have 4000 bytes"):
        ps.load(g.bytes(), limits=ps.Limits(max_constant_bytes=3999))


def test_string_tensors_pass_through() -> None:
    g = Builder()
    g.const(np.array(["cat", "dog", "mouse"]), "labels")
    g.placeholder("best", "int32", -1)
    zero = g.const(np.int32(0), "axis")
    types = {"Tparams": Type("object"), "Tindices": Type("int32"), "Taxis": Type("int32")}
    g.node("GatherV2", "labels", "best", zero, name="named", **types)
    g.node("Pack", "named", "named", name="twice", N=2, T=Type("object"))
    g.node("Equal", "named", "named", name="same", T=Type("object"))
    for executor in ("linear", "dataflow", "frames"):
        session = ps.compile(g.bytes(), executor=executor)
        out = session.run({"best": [2, 0]}, ["twice", "same"])
        assert out["twice"].tolist() == [["mouse", "cat"]] * 2
        assert out["same"].tolist() == [True, True]


# Functions.


def calling(op: str, **attrs: object) -> Builder:
    g = Builder()
    g.function("F", {"x": "int32"}, {"y": "int32"}, {"y": "z:z:0"})
    g.const(np.int32(1), "one")
    g.node("AddV2", "x", "one:output:0", name="z", T=Type("int32"))
    g.main()
    g.placeholder("x", "int32")
    g.node(op, "x", name="call", **attrs)
    return g


INT32S = {"Tin": [Type("int32")], "Tout": [Type("int32")]}


def test_function_call_becomes_the_body() -> None:
    session = ps.compile(calling("PartitionedCall", f=Func("F"), **INT32S).bytes())
    assert session.run({"x": 4}, ["call"])["call"] == 5
    assert ps.compile(calling("F").bytes()).run({"x": 4}, ["call"])["call"] == 5


def test_call_of_a_missing_function_is_refused() -> None:
    refused(calling("PartitionedCall", f=Func("G"), **INT32S), "names a function 'G'")
    refused(calling("PartitionedCall", **INT32S), "has no function as its attribute 'f'")
    two = {"Tin": [Type("int32")], "Tout": [Type("int32"), Type("int32")]}
    refused(calling("PartitionedCall", f=Func("F"), **two), "2 outputs, but its function gives 1")


def test_recursive_function_stays_a_function() -> None:
    g = calling("PartitionedCall", f=Func("F"), **INT32S)
    g.into = g.proto.library.function[0].node_def
    g.node("PartitionedCall", "z:z:0", name="again", f=Func("F"), **INT32S)
    g.proto.library.function[0].ret["y"] = "again:output:0"
    model = ps.load(g.bytes())
    assert set(model.functions) == {"F"}
    calls = [node for node in model.functions["F"].nodes if node.op.name == "Call"]
    assert [node.attrs["function"] for node in calls] == ["F"]
    with pytest.raises(Unsupported, match=r"tensorflow\.Call"):
        ps.compile(model, executor="linear").run({"x": 1}, ["call"])


def test_exponential_expansion_is_refused() -> None:
    g = Builder()
    for i in range(60):
        g.function(f"F{i}", {"x": "int32"}, {"y": "int32"}, {"y": "b:output:0"})
        for name, source in (("a", "x"), ("b", "a:output:0")):
            if i:
                g.node("PartitionedCall", source, name=name, f=Func(f"F{i - 1}"), **INT32S)
            else:
                g.node("Identity", source, name=name, T=Type("int32"))
    g.main()
    g.placeholder("x", "int32")
    g.node("PartitionedCall", "x", name="call", f=Func("F59"), **INT32S)
    with pytest.raises(InvalidModel, match="max_nodes"):
        ps.load(g.bytes(), limits=ps.Limits(max_nodes=1000))


def test_effects_in_branches_and_bodies_happen() -> None:
    """An Assert in the body of a While runs in each iteration, although it has no readers."""
    g = Builder()
    more = {"i": "int32", "n": "int32"}
    g.function("Cond", more, {"go": "bool"}, {"go": "less:z:0"})
    g.node("Less", "i", "n", name="less", T=Type("int32"))
    body = g.function("Body", more, {"i2": "int32", "n2": "int32"}, {"i2": "inc:z:0", "n2": "n"})
    g.const(np.int32(1), "one")
    g.const(np.int32(3), "three")
    g.node("AddV2", "i", "one:output:0", name="inc", T=Type("int32"))
    g.node("NotEqual", "i", "three:output:0", name="fine", T=Type("int32"))
    g.node("Assert", "fine:z:0", "i", name="check", T=[Type("int32")])
    body.control_ret["check"] = "check"
    g.main()
    g.placeholder("n", "int32")
    given = {"cond": Func("Cond"), "body": Func("Body"), "T": [Type("int32"), Type("int32")]}
    g.node("While", g.const(np.int32(0), "zero"), "n", name="while", **given)
    interpreted = ps.compile(g.bytes(), executor="interpret")
    assert interpreted.run({"n": 3}, ["while"])["while"] == 3
    session = ps.compile(g.bytes(), backends=["numpy"])
    assert session.run({"n": 3}, ["while"])["while"] == 3
    with pytest.raises(RunError, match="assertion failed: \\[3\\]"):
        session.run({"n": 4}, ["while"])
    with pytest.raises(RunError, match="assertion failed: \\[3\\]"):
        session.run({"n": 4}, [], ["while"])


# Variables.


def counter() -> Builder:
    g = Builder()
    handle = {"dtype": Type("int32"), "shape": Shape(()), "shared_name": "v"}
    g.node("VarHandleOp", name="v", **handle)
    g.node("AssignVariableOp", "v", g.const(np.int32(10), "ten"), name="init", dtype=Type("int32"))
    g.node(
        "AssignAddVariableOp", "v", g.const(np.int32(1), "one"), name="bump", dtype=Type("int32")
    )
    g.node("ReadVariableOp", "v", "^bump", name="next", dtype=Type("int32"))
    g.node("ReadVariableOp", "v", name="now", dtype=Type("int32"))
    return g


def test_variables_belong_to_the_session() -> None:
    model = ps.load(counter().bytes())
    first, second = ps.compile(model), ps.compile(model)
    with pytest.raises(RunError, match="variable 'v' is read before anything was assigned"):
        first.run({}, ["now"])
    for session in (first, second):
        session.run({}, [], ["init"])
    for want in (11, 12, 13):
        assert first.run({}, ["next"])["next"] == want
    assert (first.run({}, ["now"])["now"], second.run({}, ["now"])["now"]) == (13, 10)
    read = first.run({}, ["now"])["now"]
    read[...] = 99
    assert first.run({}, ["now"])["now"] == 13


def test_references_to_variables_are_dereferenced() -> None:
    g = Builder()
    g.node("VariableV2", name="v", dtype=Type("float32"), shape=Shape((2,)))
    g.node(
        "Assign", "v", g.const(np.array([1, 2], np.float32), "c"), name="init", T=Type("float32")
    )
    g.node("AssignAdd", "v", g.const(np.ones(2, np.float32), "d"), name="more", T=Type("float32"))
    g.node("Identity", "v", name="read", T=Type("float32"))
    g.node("Mul", "v", "more", name="product", T=Type("float32"))
    session = ps.compile(g.bytes())
    np.testing.assert_array_equal(session.run({}, ["init"])["init"], [1, 2])
    np.testing.assert_array_equal(session.run({}, ["more"])["more"], [2, 3])
    np.testing.assert_array_equal(session.run({}, ["v", "read"])["v"], [2, 3])
    with pytest.raises(RunError, match="is float32"):
        session.run({"c": np.zeros(3, np.float32)}, [], ["init"])
    g.node("Assign", "read", "c", name="odd", T=Type("float32"))
    refused(g, "its input 0 must refer to a variable")


def test_corpus_arrays_are_decoded() -> None:
    tensor = {"dtype": "float32", "shape": [2], "values": ["NaN", "-Infinity"]}
    np.testing.assert_array_equal(array(tensor), [np.nan, -np.inf])


def test_unknown_name_suggests_close_names() -> None:
    g = Builder()
    x = g.placeholder("image", "float32", 2)
    hidden = g.node("Neg", x, name="hidden", T=Type("float32"))
    g.node("Neg", hidden, name="result", T=Type("float32"))
    session = ps.compile(g.bytes())
    value = np.ones(2, np.float32)
    with pytest.raises(ps.InvalidInput, match=r"'Image'.* did you mean 'image'"):
        session.run({"Image": value})
    with pytest.raises(ps.InvalidInput, match=r"'qqq'.* it has 'image:0'$"):
        session.run({"qqq": value})
    with pytest.raises(ps.InvalidInput, match=r"'qqq'.* it has 'result:0'$"):
        session.run({"image": value}, ["qqq"])
    with pytest.raises(ps.InvalidInput, match=r"no target is 'hiden'.* did you mean 'hidden'"):
        session.run({"image": value}, targets=["hiden"])


def doubling(op: str, times: int = 40) -> Builder:
    """A graph of functions that use the one before twice each, by nodes of operation ``op``."""
    g = Builder()
    for i in range(times):
        g.function(f"F{i}", {"x": "int32"}, {"y": "int32"}, {"y": "b:output:0"})
        for name, source in (("a", "x"), ("b", "a:output:0")):
            if not i:
                g.node("Identity", source, name=name, T=Type("int32"))
            elif op == "If":
                branches = {"then_branch": Func(f"F{i - 1}"), "else_branch": Func(f"F{i - 1}")}
                types = {"Tcond": Type("int32"), "Tin": [Type("int32")], "Tout": [Type("int32")]}
                g.node("If", source, source, name=name, **branches, **types)
            else:
                g.node(op, source, name=name, f=Func(f"F{i - 1}"), **INT32S)
    g.main()
    g.placeholder("x", "int32")
    g.node("PartitionedCall", "x", name="call", f=Func(f"F{times - 1}"), **INT32S)
    return g


@pytest.mark.parametrize("op", ["PartitionedCall", "If"])
def test_expansion_out_of_proportion_to_the_file_is_refused_before_it_happens(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Importer, "import_nodes", lambda *_: pytest.fail("nodes are imported"))
    for limits in (ps.Limits(max_nodes=None), ps.Limits(max_nodes_per_byte=None)):
        with pytest.raises(InvalidModel, match="function bodies expanded"):
            ps.load(doubling(op).bytes(), limits=limits)


def test_nodes_are_counted_before_expansion_as_they_are_imported() -> None:
    g = doubling("PartitionedCall", 4)
    g.function("C", {"x": "int32"}, {"t": "bool"}, {"t": "l:z:0"})
    g.const(np.int32(3), "three")
    g.node("Less", "x", "three:output:0", name="l", T=Type("int32"))
    g.main()
    g.node("While", "x", name="loop", cond=Func("C"), body=Func("F2"), T=[Type("int32")])
    proto = g.proto
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(proto.library, diagnostics.where, diagnostics.limits)
    Importer(proto.node, 0, library, diagnostics).model(None)
    assert diagnostics.nodes == library.expanded_nodes(proto.node)


def test_frozen_variable_of_another_type_than_its_saved_value_is_refused() -> None:
    g = Builder()
    attrs = {"dtype": Type("float32"), "shape": Shape([3])}
    g.node("VarHandleOp", name="v", shared_name="v", **attrs)
    g.node("ReadVariableOp", "v", name="read", dtype=Type("float32"))
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(g.proto.library, diagnostics.where, diagnostics.limits)
    frozen = {"v": np.zeros(2, np.float32)}
    with pytest.raises(InvalidModel, match=r"float32\[3\], but float32\[2\] in the checkpoint"):
        Importer(g.proto.node, 0, library, diagnostics, frozen).model(None)


def test_variable_of_another_type_than_its_saved_value_is_refused_when_it_is_imported() -> None:
    g = Builder()
    g.node("VarHandleOp", name="v", shared_name="w", dtype=Type("float32"), shape=Shape([3]))
    diagnostics = Diagnostics("the model", ps.Limits())
    library = FunctionLibrary(g.proto.library, diagnostics.where, diagnostics.limits)
    store = Store({"w": np.zeros(3, np.int64)})
    with pytest.raises(InvalidModel, match=r"'w' is float32\[3\], but int64\[3\] in the checkp"):
        Importer(g.proto.node, 0, library, diagnostics, store=store).model(None)
