"""Einsum becomes the operations that it consists of."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Model
from penstock.passes.pipeline import optimize
from penstock.textual.parser import parse_graph
from tests.ops.onnx.test_einsum import CASES

rng = np.random.default_rng(8)


def graph_of(equation: str, shapes: list, dtype: str = "float32") -> str:
    names = [f"x{i}" for i in range(len(shapes))]
    inputs = [
        f"{name}: {dtype}[{', '.join(map(str, shape))}]"
        for name, shape in zip(names, shapes, strict=True)
    ]
    call = f'Einsum{{equation="{equation}"}}({", ".join(names)})'
    return f"graph main({', '.join(inputs)}) -> (y) {{\n  y = {call}\n}}\n"


def has_diagonal(equation: str) -> bool:
    terms = equation.replace(" ", "").partition("->")[0].replace("...", "").split(",")
    return any(len(set(term)) < len(term) for term in terms)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize(("equation", "shapes"), CASES)
def test_einsum_of_known_shapes_is_decomposed_and_equals_numpy(equation, shapes, dtype):
    graph = parse_graph(graph_of(equation, shapes, dtype))
    optimize(graph)
    kept = has_diagonal(equation) or any(0 in shape for shape in shapes)
    assert ("Einsum" in [node.op.name for node in graph.nodes]) == kept
    operands = [(rng.standard_normal(shape) * 5).astype(dtype) for shape in shapes]
    wanted = np.asarray(np.einsum(equation.replace(" ", ""), *operands))
    feeds = {f"x{i}": x for i, x in enumerate(operands)}
    model = Model({"main": parse_graph(graph_of(equation, shapes, dtype))}, "main")
    for executor in ("linear", "interpret"):
        y = ps.compile(model, executor=executor).run(feeds)["y"]
        assert y.shape == wanted.shape and y.dtype == wanted.dtype
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("equation", "shapes", "operations"),
    [
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)], ["Transpose", "MatMul"]),
        ("nctv,vw->nctw", [(2, 3, 4, 5), (5, 6)], ["Reshape", "MatMul", "Reshape"]),
        ("nctv,cd->ndtv", [(2, 3, 4, 5), (3, 6)], ["Reshape", "Transpose", "MatMul", "Reshape"]),
        (
            "bnd,bnd->bn",
            [(2, 3, 4), (2, 3, 4)],
            ["Reshape", "Reshape", "Mul", "ReduceSum", "Reshape"],
        ),
        ("bij->bj", [(2, 3, 4)], ["ReduceSum"]),
        ("bij->jbi", [(2, 3, 4)], ["Transpose"]),
    ],
)
def test_parts_of_an_einsum_are_as_few_as_its_order_allows(equation, shapes, operations):
    graph = parse_graph(graph_of(equation, shapes))
    optimize(graph)
    assert sorted(node.op.name for node in graph.nodes) == sorted(operations)


def test_einsum_of_unknown_dims_is_decomposed_for_the_shapes_of_a_run():
    graph = parse_graph(graph_of("bij,bjk->bik", [("N", 3, 4), ("N", 4, 5)]))
    session = ps.compile(Model({"main": graph}, "main"), executor="linear")
    a, b = (rng.standard_normal(s).astype(np.float32) for s in [(2, 3, 4), (2, 4, 5)])
    np.testing.assert_allclose(session.run({"x0": a, "x1": b})["y"], a @ b, rtol=1e-5)
    assert [step.node.op.name for step in session.inspect.plan.walk()] == ["MatMul"]
