"""Subgraphs: the part of a model that feeds, fetches and targets need, remembered and resolved."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from penstock.compiler import subgraphs as module
from penstock.compiler.compiler import Compiler
from penstock.compiler.options import DEFAULTS
from penstock.compiler.stages import CompileContext
from penstock.compiler.subgraph import Extract, Subgraph
from penstock.compiler.subgraphs import Subgraphs
from penstock.core.errors import InvalidInput
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.timing import SOON

#   x -- a -+- b -- y
#           +- c -- z
TREE = """g (float[N] x) => (float[N] y, float[N] z) {
    a = Exp(x) [left] b = Neg(a) c = Sin(a) y = Abs(b) z = Cos(c) }"""
X = np.ones(3, np.float32)


class AsItIs(Compiler):
    """A compiler that simplifies nothing."""

    def structure(self, graph):
        return ()


@pytest.fixture
def evicted() -> list[Subgraph]:
    return []


@pytest.fixture
def tree(evicted) -> Subgraphs:
    graph = graph_from_text(TREE)
    return Subgraphs(
        lambda: graph, {"alias": "a"}, AsItIs(CompileContext(DEFAULTS, ())), evicted.append
    )


def operations(subgraph: Subgraph) -> set[str]:
    return {node.op.name for node in subgraph.graph.nodes}


def test_subgraph_of_inputs_and_outputs_is_the_main_one(tree):
    request, key, values = tree.resolve({"x": X}, None, None)
    assert request is tree.all
    assert request.subgraph is tree.main
    assert key == ((3,),)
    assert values[0] is X


@pytest.mark.parametrize(
    ("feeds", "fetches", "targets", "expected"),
    [
        (["x"], ["y"], None, {"Exp", "Neg", "Abs"}),
        (["x"], ["a"], ["left"], {"Exp", "Neg"}),
        (["x"], [], ["b"], {"Exp", "Neg"}),
        (["a"], None, None, {"Neg", "Abs", "Sin", "Cos"}),
        (["alias"], ["z"], None, {"Sin", "Cos"}),
        (["b", "c"], ["y", "z"], None, {"Abs", "Cos"}),
        (["x", "b"], ["y"], None, {"Abs"}),
    ],
)
def test_subgraph_has_the_nodes_between_feeds_and_fetches(tree, feeds, fetches, targets, expected):
    request, _, _ = tree.resolve(dict.fromkeys(feeds, X), fetches, targets)
    assert operations(request.subgraph) == expected


def test_requests_in_another_order_share_a_subgraph_and_keep_their_order(tree):
    one, _, _ = tree.resolve({"x": X}, ["y", "b"], None)
    other, _, _ = tree.resolve({"x": X}, ["b", "y"], None)
    assert one.subgraph is other.subgraph
    outputs = dict(zip(one.subgraph.outputs, (X, 2 * X), strict=True))
    assert list(one.named(list(outputs.values()))) == ["y", "b"]
    assert list(other.named(list(outputs.values()))) == ["b", "y"]
    assert other.named(list(outputs.values()))["y"] is outputs["y"]


def test_request_that_is_repeated_is_the_same_object(tree):
    one, _, _ = tree.resolve({"x": X}, ["y"], ["left"])
    assert tree.resolve({"x": X}, ["y"], ["left"])[0] is one


@pytest.mark.parametrize(
    ("feeds", "fetches", "targets", "message"),
    [
        ({"xx": X}, None, None, r"cannot feed 'xx': .* did you mean 'x'\?"),
        ({"X": X}, None, None, r"did you mean 'x'\?"),
        ({"x": X}, ["yy"], None, r"cannot fetch 'yy': .* did you mean 'y'\?"),
        ({"x": X}, ["nothing_alike"], None, "it has 'y', 'z'"),
        ({"x": X}, None, ["lefd"], r"no target is 'lefd': .* did you mean 'left'"),
        ({"x": X}, "y", None, r"fetches must be a list of names; did you mean \['y'\]"),
        ({"x": X}, None, "left", r"targets must be a list of names; did you mean \['left'\]"),
        ({1: X}, None, None, "names, which are strings; 1 is none"),
        ({None: X}, ["y"], None, "names, which are strings; None is none"),
        ({"x": X, 1: X}, None, None, "names, which are strings; 1 is none"),
        ({"x": X}, [1], None, "names, which are strings; 1 is none"),
        ({"x": X}, [b"y"], None, "names, which are strings; b'y' is none"),
        ({"x": X}, [["y"]], None, "lists of names, which are strings: unhashable"),
        ({"x": X}, 1, None, "lists of names, which are strings: 'int' object is not iterable"),
        ({"x": X}, None, [None], "names, which are strings; None is none"),
        ({"x": X}, None, [{}], "lists of names, which are strings: unhashable"),
        (5, None, None, "feeds must map names to values, not be a int"),
        ({}, ["y"], None, r"need inputs that were not fed: 'x' \(float32\[N\]\)"),
        ([X], None, None, "feeds must map names to values, not be a list"),
        ({"a": X, "alias": X}, ["y"], None, "'a' is fed twice, once as 'alias'"),
    ],
)
def test_wrong_names_are_refused_with_a_hint(tree, feeds, fetches, targets, message):
    with pytest.raises(InvalidInput, match=message):
        tree.resolve(feeds, fetches, targets)


class Frame:
    """What DataFrames of pandas and polars have in common."""

    def __init__(self, **columns: np.ndarray) -> None:
        self._columns = columns
        self.columns = [*columns]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]


def test_table_feeds_the_columns_that_are_inputs(tree):
    request, _, values = tree.resolve(Frame(label=-X, x=X), None, None)
    assert request is tree.all
    assert values[0] is X and len(values) == 1


def test_table_without_the_columns_is_refused_with_what_is_missing(tree):
    with pytest.raises(
        InvalidInput, match=r"Frame has no columns of the names .*: 'x'. For a model"
    ):
        tree.resolve(Frame(label=X), None, None)


def test_subgraph_says_what_it_is_of_its_model(tree):
    request, _, _ = tree.resolve({"a": X}, ["y"], ["c"])
    assert request.subgraph.extract == Extract(("a",), ("y",), ("c",))
    again = tree.extracted(request.subgraph.extract, AsItIs(CompileContext(DEFAULTS, ())))
    assert again is not request.subgraph
    assert operations(again) == operations(request.subgraph) == {"Neg", "Abs", "Sin"}


def test_subgraphs_beyond_the_limit_are_evicted_least_recently_used_first(
    tree, evicted, monkeypatch
):
    monkeypatch.setattr(module, "MAX_SUBGRAPHS", 2)
    first, _, _ = tree.resolve({"x": X}, ["a"], None)
    second, _, _ = tree.resolve({"x": X}, ["b"], None)
    tree.resolve({"x": X}, ["a"], None)  # used again, but known by its request
    tree.resolve({"x": X}, ["c"], None)
    assert len(tree) == 2
    assert len(evicted) == 1
    assert evicted[0] in (first.subgraph, second.subgraph)
    again, _, _ = tree.resolve({"x": X}, [evicted[0].outputs[0]], None)
    assert again.subgraph is not evicted[0]


def test_clear_forgets_all_but_the_main_subgraph(tree):
    tree.resolve({"x": X}, ["a"], None)
    main = tree.main
    tree.clear()
    assert len(tree) == 0
    assert tree.resolve({"x": X}, None, None)[0].subgraph is main


def test_concurrent_requests_for_one_subgraph_get_the_same_one(tree):
    start = threading.Barrier(8)
    subgraphs = []

    def ask() -> None:
        start.wait(SOON)
        subgraphs.append(tree.resolve({"x": X}, ["c"], None)[0].subgraph)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(subgraphs) == 8
    assert len(set(map(id, subgraphs))) == 1


@pytest.mark.parametrize("executor", ["linear", "frames", "interpret"])
def test_constant_that_only_nested_graphs_read_can_be_fed(executor):
    """As in ONNX Runtime, an initializer that is an input of the graph as well is its default."""
    text = """g (float[2] x, bool t, bool u, float[1] w) => (float[K] y)
        <float[1] w = {7}, float[1] same = {7}> {
        y = If (t) <then_branch = a () => (float[K] p) {
                p = If (u) <then_branch = c () => (float[K] q) { q = Concat <axis = 0> (x, w) },
                            else_branch = d () => (float[K] r) { r = Identity(same) }> },
            else_branch = b () => (float[K] w) { }> }"""
    session = compile_text(text, executor=executor)
    feeds = {"x": [1, 2], "t": True, "u": True}
    assert session.run(feeds)["y"].tolist() == [1, 2, 7]
    assert session.run({**feeds, "w": [9]})["y"].tolist() == [1, 2, 9]
    assert session.run({**feeds, "w": [9], "t": False})["y"].tolist() == [9]
    assert session.run({**feeds, "w": [9], "u": False})["y"].tolist() == [7]


def test_constants_of_two_nested_graphs_with_one_name_cannot_be_fed():
    branch = """graph () => (float[K] {y}) <float[1] own = {{{value}}}> {{
        {y} = Concat <axis = 0> (x, own) }}"""
    one = branch.replace("graph", "a").format(y="p", value=1)
    other = branch.replace("graph", "b").format(y="q", value=2)
    text = f"""g (float[2] x, bool t) => (float[K] y) {{
        y = If (t) <then_branch = {one}, else_branch = {other}> }}"""
    with pytest.raises(InvalidInput, match="cannot feed 'own'"):
        compile_text(text).run({"x": [1, 2], "t": True, "own": [3]})


def test_constants_that_nested_graphs_read_are_in_the_order_of_reading():
    names = [f"c{i}" for i in range(20)]
    sums = " ".join(f"s{i} = Add(x, {name})" for i, name in enumerate(names))
    held = ", ".join(f"float {name} = {{1}}" for name in names)
    graph = graph_from_text(f"""g (bool b, float x) => (float y) <{held}> {{
        y = If(b) <then_branch = t () => (float p) {{ {sums} p = Sum({
        ", ".join(f"s{i}" for i in range(20))
    }) }}, else_branch = e () => (float q) {{ q = Neg(x) }}> }}""")
    asked = Subgraphs(lambda: graph, {}, AsItIs(CompileContext(DEFAULTS, ())), lambda _: None)
    assert [name for name in asked.values if name in names] == names
