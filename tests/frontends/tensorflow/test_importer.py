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
from penstock.passes.dead_code import cut
from tests.support.tf_cases import Case, array, cases, check, feeds
from tests.support.tf_graphs import Builder, Func, Type

CASES = list(cases())


def named(corpus: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", corpus, ids=[case.name for case in corpus])


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


def sum_of_two() -> Builder:
    g = Builder()
    g.placeholder("a", "float32", -1)
    g.placeholder("b", "float32", -1)
    g.node("AddV2", "a", "b", name="sum", T=Type("float32"))
    g.node("Neg", "sum:0", name="scope/neg", T=Type("float32"))
    return g


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


def refused(g: Builder, match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        ps.load(g.bytes())


def test_importer_reports_all_unsupported_operations_at_once() -> None:
    g = Builder()
    g.placeholder("x", "float32")
    g.node("Frobnicate", "x", name="a")
    g.node("EncodeJpeg", "a", name="b")
    g.node("Frobnicate", "b", name="c")
    with pytest.raises(Unsupported) as caught:
        ps.load(g.bytes())
    nodes = {operation.operation: operation.nodes for operation in caught.value.operations}
    assert set(nodes) == {"tensorflow.Frobnicate", "tensorflow.EncodeJpeg"}
    assert nodes["tensorflow.Frobnicate"] == ("a in the model", "c in the model")


def test_strided_slice_by_other_than_vectors_is_refused() -> None:
    g = Builder()
    x, one = g.placeholder("x", "int32", 3), g.const(np.int32([1]))
    types = {"T": Type("int32"), "Index": Type("int32")}
    g.node("StridedSlice", x, g.const(np.int32([[0]])), one, one, name="y", **types)
    for executor in ("linear", "frames"):
        with pytest.raises(ps.PenstockError, match="end and strides must have rank"):
            ps.compile(g.bytes(), executor=executor).run({"x": np.int32([1, 2, 3])}, ["y"])


def test_data_input_after_control_inputs_is_refused() -> None:
    g = sum_of_two()
    g.node("AddV2", "a", "^sum", "b", name="late", T=Type("float32"))
    refused(g, "behind its control inputs")


@pytest.mark.parametrize("keep", [0, 1, 7, 40, -1])
def test_truncated_file_is_refused(keep: int) -> None:
    data = sum_of_two().bytes()
    with pytest.raises(PenstockError):
        ps.load(data[:keep] if keep >= 0 else data + b"\x0a\xff")


def test_damaged_file_never_crashes() -> None:
    data = (Path(__file__).parents[2] / "models" / "tf" / "func_v2_while.pb").read_bytes()
    rng, loaded = np.random.default_rng(7), 0
    for _ in range(300):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 3):
            broken[place] = rng.integers(0, 256)
        with suppress(PenstockError):
            ps.load(b"\x0a" + bytes(broken[1:]))
            loaded += 1
    assert 0 < loaded < 300


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
