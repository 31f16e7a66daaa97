"""Gemm, and products whose results lie in another order: oneDNN against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from penstock.backends.onednn.library import library
from penstock.ops.common.constant_cache import held
from tests.backends.onednn.forced import check, compile_on_onednn, one_node, proto_of, refused

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def gemm(rows, inner, columns, c, *, flips=(0, 0), known="b", tail="Neg", **attrs):
    """A model and what to feed it; ``known`` names the inputs that are constants."""
    shapes = {"a": [rows, inner][:: -1 if flips[0] else 1]}
    shapes["b"] = [inner, columns][:: -1 if flips[1] else 1]
    if c is not None:
        shapes["c"] = c
    drawn = {name: draw(*shape) for name, shape in shapes.items()}
    feeds = {name: x for name, x in drawn.items() if name not in known}
    constants = {name: x for name, x in drawn.items() if name in known}
    attrs = {"transA": flips[0], "transB": flips[1], **attrs}
    proto = one_node("Gemm", feeds, constants, inputs=list(drawn), **attrs)
    proto.graph.node[-1].op_type = tail
    return proto, feeds


@pytest.mark.parametrize("known", ["", "b", "bc", "c"])
@pytest.mark.parametrize("c", [None, (4,), (1, 4), (5, 4), (1,), ()])
@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm_equals_numpy(flips, c, known):
    proto, feeds = gemm(5, 7, 4, c, flips=flips, known=known)
    check(proto, feeds, "Gemm")


@pytest.mark.parametrize("known", ["b", "bc", "c"])
@pytest.mark.parametrize("beta", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("c", [None, (4,), (5, 4)])
def test_gemm_with_factors_equals_numpy(c, beta, known):
    proto, feeds = gemm(5, 7, 4, c, known=known, alpha=0.5, beta=beta, tail="Relu")
    if c is not None and "c" not in known and beta == 2:
        refused(proto, feeds, "Gemm")
    else:
        check(proto, feeds, "Gemm")


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (1, 64, 1), (1, 300, 33)])
@pytest.mark.parametrize("flip", [0, 1])
def test_gemm_of_vectors_equals_numpy(rows, inner, columns, flip):
    check(*gemm(rows, inner, columns, (columns,), flips=(0, flip), known="bc"), "Gemm", atol=1e-4)


def test_gemm_of_views_equals_numpy():
    feeds = {"x": draw(7, 5), "b": draw(7, 4)}
    check(one_node("Gemm", feeds, perm=(1, 0)), feeds, "Gemm")
    check(one_node("Gemm", feeds, {"c": draw(4)}, perm=(1, 0)), feeds, "Gemm")


def test_gemm_with_a_term_for_each_row_runs_on_numpy():
    refused(*gemm(5, 7, 4, (5, 1), known="bc"), "Gemm")


def test_gemm_of_empty_matrices_runs_on_numpy():
    refused(*gemm(5, 0, 4, (4,), known="c"), "Gemm")
    refused(*gemm(0, 3, 4, (4,), known="bc"), "Gemm")


@pytest.mark.parametrize("op", ["Add", "Mul", "Max", "PRelu"])
@pytest.mark.parametrize(
    "shape", [(7,), (1,), (5, 1), (3, 1, 1), (2, 1, 1, 1), (1, 3, 5, 7), (2, 3, 5, 7)]
)
def test_matmul_writes_transposed_results(shape, op):
    feeds = {"a": draw(2, 3, 5, 4), "b": draw(2, 3, 4, 7)}
    nodes = [
        helper.make_node("Neg", ["a"], ["p"]),
        helper.make_node("Neg", ["b"], ["q"]),
        helper.make_node("MatMul", ["p", "q"], ["m"]),
        helper.make_node(op, ["m", "k"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Neg", ["t"], ["y"]),
    ]
    check(proto_of(nodes, feeds, ["y"], {"k": draw(*shape)}), feeds, "MatMul")


def test_plans_for_other_shapes_share_reordered_weights():
    proto, feeds = gemm(5, 7, 4, None, flips=(0, 1), known="b")
    del proto.graph.input[0].type.tensor_type.shape.dim[:]
    dims = proto.graph.input[0].type.tensor_type.shape.dim
    dims.add().dim_param, dims.add().dim_value = "n", 7
    session = compile_on_onednn(proto, executor="linear")
    session.run(feeds)
    before = held()
    for rows in range(6, 12):
        session.run({"a": draw(rows, 7)})
    assert held() == before


@pytest.mark.parametrize("slopes", [(1, 1, 2, 1), (1, 2, 1, 1)])
def test_slopes_of_one_of_several_axes_of_rows_are_no_post_op(slopes):
    """A product sees the rows of all matrices as one axis, along which these slopes repeat."""
    feeds = {"x": draw(1, 2, 2, 3)}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("PRelu", ["a", "k"], ["y"]),
    ]
    constants = {"w": draw(3, 4), "k": draw(*slopes)}
    check(proto_of(nodes, feeds, ["y"], constants), feeds, "MatMul")
