"""The tuples of passes, how they are run, and the check of a graph after each of them."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

import penstock as ps
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops import find
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.optimize import fold_constants
from penstock.passes.pipeline import (
    CHECK_PASSES,
    DEVICES,
    LOWER,
    OPTIMIZE,
    PASSES,
    SPLIT,
    STRUCTURE,
    LazyPass,
    optimize,
    run_passes,
)
from tests.support.onnx_text import graph_from_text
from tests.support.random_graphs import seeded

ALL = [getattr(step, "implementation", step) for step in (*STRUCTURE, *OPTIMIZE, *LOWER)]
FRAMES = [getattr(step, "implementation", step) for step in (*DEVICES, *SPLIT)]


def add_chain(length: int) -> Graph:
    op = find("Add")
    x = Value("x", TensorType(FLOAT32, (2,)))
    values, nodes = [x], []
    for i in range(length):
        values.append(Value(f"v{i}", TensorType(FLOAT32, (2,))))
        nodes.append(Node(op, [values[-2], x], [values[-1]], name=f"n{i}"))
    return Graph([x], [values[-1]], nodes, "chain")


def test_pass_names_are_unique():
    classes = {each.name: type(each) for each in (*ALL, *FRAMES)}
    assert PASSES.keys() == classes.keys()
    assert all(type(each) is classes[each.name] for each in (*ALL, *FRAMES))
    assert len(ALL) == len({each.name for each in ALL})


@pytest.mark.parametrize("each", [*ALL, *FRAMES], ids=lambda each: each.name)
def test_pass_class_is_the_name_of_the_pass_in_camel_case(each):
    assert type(each).__name__ == each.name.title().replace("_", "")


@pytest.mark.parametrize("each", [*ALL, *FRAMES], ids=lambda each: each.name)
def test_pass_has_a_docstring(each):
    assert sys.modules[type(each).__module__].__doc__
    assert type(each).__doc__ != Pass.__doc__


@pytest.mark.parametrize("passes", [ALL, FRAMES], ids=["blocks", "frames"])
def test_required_properties_are_established_by_earlier_passes(passes):
    established: set[Property] = set()
    for each in passes:
        assert each.requires <= established, each.name
        established |= each.establishes


def test_run_passes_calls_after_pass_with_each_pass_in_order():
    calls: list[str] = []
    context = PassContext(after_pass=lambda each, graph: calls.append(each.name))
    run_passes(STRUCTURE, add_chain(2), context)
    assert calls == [each.name for each in STRUCTURE]


def test_passes_for_operations_that_a_graph_lacks_are_not_imported(monkeypatch):
    monkeypatch.delenv(CHECK_PASSES)
    imported = [step for step in OPTIMIZE if isinstance(step, LazyPass)]
    for step in imported:
        vars(step).pop("implementation", None)
    graph = add_chain(3)
    optimize(graph)
    assert [step.name for step in imported if "implementation" in vars(step)] == []


def test_optimize_of_an_optimized_graph_runs_each_pass_once_and_changes_nothing():
    calls: list[str] = []
    graph = add_chain(3)
    optimize(graph)
    assert not optimize(graph, PassContext(after_pass=lambda each, graph: calls.append(each.name)))
    assert calls == [each.name for each in OPTIMIZE]


def test_compile_calls_after_pass_with_passes_of_all_three_tuples():
    calls: dict[str, None] = {}
    ps.compile(
        Model({"chain": add_chain(3)}, "chain"),
        shapes={"x": (2,)},
        expert=ps.ExpertOptions(after_pass=lambda each, graph: calls.setdefault(each.name)),
    )
    assert {each.name for each in ALL} <= {*calls, "fold_quantized_weights"}


def test_compile_for_several_shapes_leaves_the_graph_of_the_model_as_it_was():
    x = Value("x", TensorType(FLOAT32, ("N",)))
    y = Value("y")
    model = Model({"g": Graph([x], [y], [Node(find("Relu"), [x], [y], name="r")], "g")}, "g")
    session = ps.compile(model, shapes={"x": (2,)})
    session.run({"x": [1.0, -1.0, 2.0]})
    assert [repr(node) for node in model.graph.nodes] == ["y = Relu(x)"]
    assert str(x.type) == "float32[N]"


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_are_valid_after_every_pass_of_a_compilation(seed):
    graph = seeded(random.Random(seed).randrange(10**6), 25)
    model = Model({graph.name: graph}, graph.name)
    ps.compile(model, shapes={v.name: v.type.dims for v in graph.inputs})


@pytest.mark.parametrize("operation", ["Identity", "Neg"])
def test_types_are_inferred_anew_only_behind_what_a_pass_has_changed(monkeypatch, operation):
    # An Identity is taken away, whose value another of the same type replaces. Two Transposes are
    # merged: the new one is asked for its type, and not the thousand nodes behind it.
    monkeypatch.delenv(CHECK_PASSES)
    graph = graph_from_text(
        f"""g (float[2, 2] x) => (float[2, 2] y) {{
            a = {operation}(x) b = Transpose<perm = [1, 0]>(a) c = Transpose<perm = [0, 1]>(b)
            d = Transpose<perm = [1, 0]>(c) v0 = Neg(d) {
            " ".join(f"v{i} = {'Abs' if i % 2 else 'Neg'}(v{i - 1})" for i in range(1, 1000))
        } y = Sqrt(v999) }}"""
    )
    infer, asked = fold_constants.node_types, Counter()
    monkeypatch.setattr(
        fold_constants,
        "node_types",
        lambda node, **options: asked.update([node.op.name]) or infer(node, **options),
    )
    optimize(graph, PassContext())
    assert asked["Sqrt"] == 1
    assert asked["Neg"] + asked["Abs"] <= 1003
