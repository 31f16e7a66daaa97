"""The oneDNN backend against the NumPy backend, which is the definition."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests

import penstock as ps
from penstock.backends.onednn.backend import FAMILIES
from penstock.backends.onednn.library import library
from penstock.ops import find
from tests.backends.onednn.forced import compile_on_onednn, ran_on
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.sweeps import sweep

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


rng = np.random.default_rng(0)


def compile(source, executor="linear", **options) -> ps.Session:
    return compile_on_onednn(source, executor=executor, **options)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def one_node(op: str, x: np.ndarray, *constants: np.ndarray, **attrs) -> onnx.ModelProto:
    """The node between two others, so that what it reads and makes is planned."""
    names = [f"k{i}" for i in range(len(constants))]
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node(op, ["a", *names], ["b"], **attrs),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info("x", TensorProto.FLOAT, x.shape)],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(k, n) for k, n in zip(constants, names, strict=True)],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=9)


CONVOLUTIONS = {
    "plain": ((1, 3, 8, 9), (4, 3, 3, 3), {}),
    "padded": ((2, 3, 8, 9), (4, 3, 3, 3), {"pads": [1, 0, 2, 1]}),
    "strided": ((1, 3, 9, 9), (4, 3, 3, 3), {"strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "a last window that does not come to the end": (
        (1, 2, 8, 8),
        (3, 2, 3, 3),
        {"strides": [2, 2]},
    ),
    "dilated": ((1, 3, 11, 11), (4, 3, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "grouped": ((1, 6, 7, 7), (4, 3, 3, 3), {"group": 2}),
    "depthwise": ((2, 6, 7, 7), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1]}),
    "pointwise": ((1, 16, 5, 5), (8, 16, 1, 1), {}),
    "same": ((1, 3, 7, 8), (4, 3, 4, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "one axis": ((2, 3, 16), (4, 3, 5), {"pads": [2, 2]}),
    "three axes": ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), {"pads": [1, 1, 0, 0, 1, 1]}),
}


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_equal_numpy(name, bias, executor):
    shape, weights, attrs = CONVOLUTIONS[name]
    x, w = draw(*shape), draw(*weights)
    constants = (w, draw(weights[0])) if bias else (w,)
    proto = one_node("Conv", x, *constants, **attrs)
    session = compile(proto, executor)
    want = ps.compile(proto, backends=["numpy"])(x)
    for _ in range(2):
        np.testing.assert_allclose(session(x), want, rtol=1e-4, atol=1e-4)
    assert ran_on(session, "Conv") == {"onednn"}


PRODUCTS = [
    ((5, 7), (7, 3)),
    ((1, 7), (7, 1)),
    ((2, 3, 5, 7), (2, 3, 7, 4)),
    ((2, 3, 5, 7), (1, 3, 7, 4)),
    ((1, 5, 7), (6, 7, 4)),
]


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("a", "b"), PRODUCTS)
def test_products_equal_numpy(a, b, constant, executor):
    x, y = draw(*a), draw(*b)
    if constant:
        proto = one_node("MatMul", x, y)
        feeds = {"x": x}
    else:
        proto = model_from_text(
            f"""g (float{list(a)} x, float{list(b)} k) => (float[M] y) {{
            p = Neg(x) q = Neg(k) r = MatMul(p, q) y = Neg(r) }}""".replace("float[M] y", "float y")
        )
        del proto.graph.output[0].type.tensor_type.shape.dim[:]
        proto.graph.output[0].type.tensor_type.ClearField("shape")
        feeds = {"x": x, "k": y}
    session = compile(proto, executor)
    want = ps.compile(proto, backends=["numpy"]).run(feeds)["y"]
    for _ in range(2):
        np.testing.assert_allclose(session.run(feeds)["y"], want, rtol=1e-4, atol=1e-5)
    assert ran_on(session, "MatMul") == {"onednn"}


def test_primitives_read_views_without_copies():
    #  transposed operands are strides, not copies
    text = """g (float[5, 7] x, float[3, 7] k) => (float[5, 3] y) {
        a = Neg(x) b = Neg(k) t = Transpose(b) c = MatMul(a, t) y = Neg(c) }"""
    session = compile(model_from_text(text), shapes={})
    assert [step.node.op.name for step in session.inspect.plan.steps].count("Transpose") == 0
    x, k = draw(5, 7), draw(3, 7)
    np.testing.assert_allclose(session(x, k), -(x @ k.T), rtol=1e-4, atol=1e-5)


def test_fed_values_with_gaps_are_copied():
    text = "g (float[5, 7] x, float[7, 3] k) => (float[5, 3] y) { c = MatMul(x, k) y = Neg(c) }"
    session = compile(model_from_text(text))
    x, k = draw(7, 5).T, draw(14, 6)[::2, ::2]
    np.testing.assert_allclose(session(x, k), -(x @ k), rtol=1e-4, atol=1e-5)
    with pytest.raises(ps.InvalidInput):
        session(x.T, k)


def test_value_is_reordered_once():
    #   x -- Neg -- a -+- Conv -- Relu -- p -+- Add -- Conv -- y
    #                  +- Conv -- Relu -- q -+
    weights = [numpy_helper.from_array(draw(4, 4, 3, 3), f"w{i}") for i in range(3)]
    make, info = helper.make_node, helper.make_tensor_value_info
    nodes = [make("Neg", ["x"], ["a"])]
    for i in range(2):
        nodes.append(make("Conv", ["a", f"w{i}"], [f"c{i}"], pads=[1] * 4))
        nodes.append(make("Relu", [f"c{i}"], [f"r{i}"]))
    nodes.append(make("Add", ["r0", "r1"], ["s"]))
    nodes.append(make("Conv", ["s", "w2"], ["c"], pads=[1] * 4))
    nodes.append(make("Neg", ["c"], ["y"]))
    shape = [1, 4, 6, 6]
    ports = [info("x", 1, shape)], [info("y", 1, shape)]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", *ports, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=9,
    )
    session = compile(proto, shapes={})
    names = [step.node.op.name for step in session.inspect.plan.steps]
    assert names.count("Reorder") == 1
    x = draw(*shape)
    y = session(x)
    np.testing.assert_allclose(y, ps.compile(proto, backends=["numpy"])(x), rtol=1e-4, atol=1e-4)
    assert y.flags.c_contiguous


def test_outputs_of_primitives_enter_loops_and_branches():
    text = """g (float[1, 2, 4, 4] x, int64 n, bool c) => (float[1, 2, 4, 4] y, float[K, 1, 2, 4, 4] z)
        <float[2, 2, 1, 1] w = {0.5, 0.25, -0.5, 1}> {
        a = Conv(x, w)
        b, z = Loop (n, , a) <body = l (int64 i, bool d, float[1, 2, 4, 4] v)
            => (bool e, float[1, 2, 4, 4] u, float[1, 2, 4, 4] r)
            { e = Identity(d) t = Conv(v, w) u = Relu(t) r = Conv(u, w) }>
        y = If (c) <then_branch = p () => (float[1, 2, 4, 4] q) { q = Conv(b, w) },
                    else_branch = s () => (float[1, 2, 4, 4] f) { f = Add(a, b) }>
    }"""
    x = draw(1, 2, 4, 4)
    plain = compile_text(text, backends=["numpy"])
    for executor in ("linear", "dataflow", "parallel"):
        session = compile(model_from_text(text), executor)
        for n in range(4):
            for c in (True, False):
                feeds = {"x": x, "n": np.array(n), "c": np.array(c)}
                want = plain.run(feeds)
                for name, got in session.run(feeds).items():
                    np.testing.assert_allclose(got, want[name], rtol=1e-4, atol=1e-5)


def test_operations_without_primitive_run_on_numpy():
    text = """g (float[3, N] x, float[N, 2] k, double[2, 2] m) => (float[3, 2] y, double[2, 2] z) {
        y = MatMul(x, k) z = MatMul(m, m) }"""
    session = compile(model_from_text(text))
    y, z = session(np.ones((3, 0), np.float32), np.ones((0, 2), np.float32), np.eye(2))
    assert not y.any()
    assert z.tolist() == [[1, 0], [0, 1]]
    assert ran_on(session, "MatMul") == {"numpy"}
    with pytest.raises(ps.Unsupported, match="MatMul: no kernel is available for it on onednn"):
        compile_text(text, backends=["onednn"], shapes={"x": (3, 1), "k": (1, 2), "m": (2, 2)})


@cache
def official_cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader computes with values that overflow
        return load_model_tests(kind="node")


@pytest.mark.parametrize("op", sweep([op for op in sorted(FAMILIES) if find(op) is not None], 4))
def test_official_onnx_cases_pass(op):
    ran = 0
    for case in official_cases():
        if not any(node.op_type == op for node in case.model.graph.node):
            continue
        try:
            session = compile(case.model)
        except ps.PenstockError:
            continue
        plain = ps.compile(case.model, backends=["numpy"])
        for inputs, _ in case.data_sets:
            names = [port.name for port in session.inputs]
            feeds = dict(zip(names, inputs, strict=True))
            wanted = plain.run(feeds).values()
            for got, want in zip(session.run(feeds).values(), wanted, strict=True):
                got, want = (np.asarray(each, np.float64) for each in (got, want))
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
            ran += 1
    assert ran
