"""Products of slices are done for all slices before a loop, and answers are those of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.ir.graph import Graph
from penstock.ir.op import Role
from penstock.ops.internal.fused import parts
from penstock.passes.pipeline import CHECK_PASSES, optimize
from tests.support.onnx_text import model_from_text

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")
STEPS, BATCH, WIDTH, UNITS = 5, 2, 3, 4
_KINDS = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}


def info(name: str, kind: str, dims=()):
    return helper.make_tensor_value_info(name, _KINDS[kind], dims)


def nodes_of(text: str) -> list[onnx.NodeProto]:
    """Nodes from lines such as ``y = Concat(a, b) axis=1``."""
    nodes = []
    for line in filter(None, map(str.strip, text.splitlines())):
        call, *attrs = line.split(" | ")
        results, _, rest = call.partition(" = ")
        op, _, operands = rest.rstrip(")").partition("(")
        values = {k: float(v) if "." in v else int(v) for k, v in (a.split("=") for a in attrs)}
        nodes.append(helper.make_node(op, operands.split(", "), results.split(", "), **values))
    return nodes


def weights() -> list[onnx.TensorProto]:
    rng = np.random.default_rng(1)
    shapes = {"w": (WIDTH, UNITS), "wt": (UNITS, WIDTH), "u": (UNITS, UNITS), "b": (UNITS,)}
    shapes |= {"b2": (1, UNITS), "rows": (BATCH, UNITS), "both": (WIDTH + UNITS, UNITS)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    constants = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    integers = {
        "steps": np.array(STEPS),
        "few": np.array(1),
        "zero": np.array(0),
        "one": np.array(1),
    }
    integers |= {"ones": np.array([1]), "firsts": np.array([0]), "flat": np.array([BATCH, WIDTH])}
    constants += [numpy_helper.from_array(a, n) for n, a in integers.items()]
    return [*constants, numpy_helper.from_array(np.array(True), "true")]


def model_of(outside: str, body: list, outputs: list, lines: str) -> onnx.ModelProto:
    lines = nodes_of(lines)
    inner = helper.make_graph(lines, "body", body, outputs)
    (loop,) = nodes_of(outside)
    loop.attribute.append(helper.make_attribute("body", inner))
    x = [info("x", "f", (STEPS, BATCH, WIDTH))]
    y = [info(name, "f", None) for name in ("y", "ys")]
    graph = helper.make_graph([loop], "g", [*x, info("h0", "f", (BATCH, UNITS))], y, weights())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def loop_of(lines: str, *, limit: str = "steps", go: str = "c = Identity(go)") -> onnx.ModelProto:
    body = [info("i", "i"), info("go", "b"), info("h", "f", (BATCH, UNITS))]
    outputs = [info("c", "b"), info("k", "f", (BATCH, UNITS)), info("r", "f", (BATCH, UNITS))]
    lines = f"{lines}\n{go}\ns = Add(p, q)\nk = Softsign(s)\nr = Identity(k)"
    if "q =" not in lines:
        lines = f"q = MatMul(h, u)\n{lines}"
    return model_of(f"y, ys = Loop({limit}, true, h0)", body, outputs, lines)


def scan_of(lines: str, attrs: str = "") -> onnx.ModelProto:
    body = [info("h", "f", (BATCH, UNITS)), info("e", "f", (BATCH, WIDTH))]
    outputs = [info("k", "f", (BATCH, UNITS)), info("r", "f", (BATCH, UNITS))]
    lines = f"{lines}\ns = Add(p, h)\nk = Tanh(s)\nr = Identity(k)"
    model = model_of("y, ys = Scan(h0, x) | num_scan_inputs=1", body, outputs, lines)
    if attrs:
        name, _, value = attrs.partition("=")
        model.graph.node[0].attribute.append(helper.make_attribute(name, [int(value)]))
    return model


MODELS = {
    "matmul": loop_of("e = Gather(x, i)\np = MatMul(e, w)"),
    "last index": loop_of("e = Gather(x, j)\np = MatMul(e, w)\nj = Sub(zero, i)"),
    "gemm": loop_of("e = Gather(x, i)\np = Gemm(e, wt, b) | transB=1"),
    "gemm of a row": loop_of("e = Gather(x, i)\np = Gemm(e, w, b2)"),
    "view": loop_of("j = Unsqueeze(i, firsts)\ng = Gather(x, j)\ne = Squeeze(g, firsts)\np = MatMul(e, w)"),
    "view and bias": loop_of(
        "j = Unsqueeze(i, firsts)\ng = Gather(x, j)\ne = Reshape(g, flat)\np = Gemm(e, w, b)"
    ),
    "concat": loop_of(
        "e = Gather(x, i)\nz = Concat(e, h) | axis=1\np = MatMul(z, both)\nq = Add(h, b)"
    ),
    "concat and bias": loop_of(
        "e = Gather(x, i)\nz = Concat(e, h) | axis=-1\np = Gemm(z, both, b)\nq = Add(h, b)"
    ),
    "twice": loop_of(
        "e = Gather(x, i)\np0 = MatMul(e, w)\np1 = Gemm(e, wt) | transB=1\np = Mul(p0, p1)"
    ),
    "scan": scan_of("p = MatMul(e, w)"),
    "scan backwards": scan_of("p = MatMul(e, w)", "scan_input_directions=1"),
    "scan that reads on": scan_of("p0 = MatMul(e, w)\nm = ReduceMax(e) | keepdims=1\np = Add(p0, m)"),
    "scan of a concat": scan_of("z = Concat(e, h) | axis=1\np = Gemm(z, both, b)"),
}  # fmt: skip
BIASED = {
    "loop": loop_of("e = Gather(x, i)\np0 = MatMul(e, w)\np = Add(p0, b)"),
    "row": loop_of("e = Gather(x, i)\np0 = MatMul(e, w)\np = Add(b2, p0)"),
    "scan": scan_of("p0 = MatMul(e, w)\np = Add(p0, b)"),
    "scan backwards": scan_of("p0 = MatMul(e, w)\np = Add(p0, b)", "scan_input_directions=1"),
}
OTHERS = {
    "weights that change": loop_of(
        "e = Gather(x, i)\nm = ReduceMax(h) | keepdims=0\nv = Mul(w, m)\np = MatMul(e, v)"
    ),
    "a bias for each sample": loop_of("e = Gather(x, i)\np = Gemm(e, w, rows)"),
    "a factor": loop_of("e = Gather(x, i)\np = Gemm(e, w, b) | alpha=0.5"),
    "few iterations": loop_of("e = Gather(x, i)\np = MatMul(e, w)", limit="few"),
    "any number of iterations": loop_of(
        "e = Gather(x, i)\np = MatMul(e, w)",
        go="m = ReduceMax(h) | keepdims=0\nc = Less(m, big)\nbig = ReduceSum(b) | keepdims=0",
    ),
    "another function between": loop_of("g = Gather(x, i)\ne = Exp(g)\np = MatMul(e, w)"),
}  # fmt: skip


def loop_in(graph: Graph):
    (loop,) = [node for node in graph.nodes if node.op.role in (Role.LOOP, Role.SCAN)]
    return loop


def products(model: onnx.ModelProto) -> tuple[int, int]:
    """How many products are in front of the loop, and in it."""
    graph = ps.load(model).graph
    optimize(graph)
    counts = [
        sum(node.op.name in ("Gemm", "MatMul") for node in nodes)
        for nodes in (graph.nodes, loop_in(graph).attrs["body"].nodes)
    ]
    return counts[0], counts[1]


def ordered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its body's nodes in an order of their dependences."""
    body = next(a.g for a in model.graph.node[0].attribute if a.name == "body")
    known = {i.name for i in (*body.input, *model.graph.initializer)} | {"x", "h0"}
    left, nodes = list(body.node), []
    while left:
        node = next(n for n in left if known.issuperset(n.input))
        left.remove(node)
        known.update(node.output)
        nodes.append(node)
    del body.node[:]
    body.node.extend(nodes)
    return model


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = {"x": (STEPS, BATCH, WIDTH), "h0": (BATCH, UNITS)}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def check(model: onnx.ModelProto, executor: str = "linear") -> None:
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds())
    outputs = ps.compile(model, executor=executor).run(feeds())
    for y, want in zip(outputs.values(), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_products_of_slices_stand_in_front_of_the_loop(name):
    hoisted = 2 if name == "twice" else 1
    own = int("concat" in name or not name.startswith("scan"))
    assert products(ordered(MODELS[name])) == (hoisted, own)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", MODELS)
def test_hoisted_products_give_the_answers_of_onnx_runtime(name, executor):
    check(ordered(MODELS[name]), executor)


@pytest.mark.parametrize("name", BIASED)
def test_bias_behind_a_product_is_added_before_the_loop(name):
    graph = ps.load(ordered(BIASED[name])).graph
    optimize(graph)
    adds = [sum(n.op.name == "Add" for n in inner.nodes) for inner in graph.graphs()]
    assert adds == [1, 1]
    check(BIASED[name])


def test_bias_of_a_product_that_others_read_stays_in_the_loop():
    model = ordered(loop_of("e = Gather(x, i)\nq = MatMul(e, w)\np = Add(q, b)"))
    graph = ps.load(model).graph
    optimize(graph)
    assert sum(node.op.name == "Add" for node in loop_in(graph).attrs["body"].nodes) == 2
    check(model)


@pytest.mark.parametrize("name", OTHERS)
def test_other_products_stay_in_the_loop(name):
    before, inside = products(ordered(OTHERS[name]))
    assert before == 0
    assert inside == 2
    check(OTHERS[name])


def test_scan_does_not_read_what_only_products_read():
    for name, count in (("scan", 1), ("scan that reads on", 2)):
        graph = ps.load(MODELS[name]).graph
        optimize(graph)
        assert loop_in(graph).attrs["num_scan_inputs"] == count


def test_loops_whose_values_have_the_same_names_give_a_valid_graph(monkeypatch):
    monkeypatch.setenv(CHECK_PASSES, "1")
    loop = """Loop (n, , {h}) <body = b{k} (int64 i, bool c, float[2, 4] v)
        => (bool d, float[2, 4] t) {{ d = Identity(c) x = Gather(xs, i) p = Gemm(x, w, e)
        s = Add(v, p) t = Tanh(s) }}>"""
    both = f"a = {loop.format(h='h', k=0)} y = {loop.format(h='a', k=1)}"
    constants = "<int64 n = {3}, float[4] e = {1, 2, 3, 4}>"
    text = f"""g (float[3, 2, 4] xs, float[2, 4] h) => (float[2, 4] y)
        {constants} {{ w = ConstantOfShape <value = float[1] {{0.5}}> (m) {both} }}"""
    text = text.replace("<int64 n", "<int64[2] m = {4, 4}, int64 n")
    model, rng = model_from_text(text), np.random.default_rng(3)
    feeds = {"xs": (3, 2, 4), "h": (2, 4)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in feeds.items()}
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    session = ps.compile(model)
    np.testing.assert_allclose(session.run(feeds)["y"], wanted, rtol=1e-5)
    # Both loops read the same slices: their products are one.
    computed = [part.op.name for step in session.inspect.plan.steps for part in parts(step.node)]
    assert computed.count("MatMul") == 1


def test_products_that_take_too_much_memory_stay(monkeypatch):
    monkeypatch.setattr("penstock.passes.loops.hoist_products.MOST_BYTES", 4 * 40 - 1)
    assert products(MODELS["matmul"]) == (0, 2)
    monkeypatch.setattr("penstock.passes.loops.hoist_products.MOST_BYTES", 4 * 40)
    assert products(MODELS["matmul"]) == (1, 1)


@given(
    axis=st.integers(0, 1),
    dims=st.tuples(*[st.integers(1, 6)] * 3),
    units=st.integers(1, 9),
    parts=st.permutations(["x", "h"]),
    form=st.sampled_from(["scan", "loop"]),
    backward=st.booleans(),
)
def test_random_cells_equal_those_of_onnx_runtime(axis, dims, units, parts, form, backward):
    """Cells that multiply what they read and what they carry by one matrix."""
    rng = np.random.default_rng(sum(dims))
    batch, width = dims[1 - axis], dims[2]
    matrix = rng.standard_normal((width + units, units)).astype(np.float32)
    state, row = info("h", "f", (batch, units)), info("x", "f", (batch, width))
    lines = nodes_of(f"z = Concat({', '.join(parts)}) | axis=1\np = MatMul(z, w)\nk = Tanh(p)")
    lines.append(helper.make_node("Identity", ["k"], ["r"]))
    outputs = [info(name, "f", (batch, units)) for name in ("k", "r")]
    constants = [
        numpy_helper.from_array(matrix, "w"),
        numpy_helper.from_array(np.array(dims[axis]), "n"),
    ]
    if form == "scan":
        body = helper.make_graph(lines, "b", [state, row], outputs)
        attrs = {"scan_input_axes": [axis], "scan_input_directions": [int(backward)]}
        loop = helper.make_node(
            "Scan", ["h0", "xs"], ["y", "ys"], body=body, num_scan_inputs=1, **attrs
        )
    else:
        lines = [
            helper.make_node("Gather", ["xs", "i"], ["x"], axis=axis),
            *lines,
            helper.make_node("Identity", ["go"], ["c"]),
        ]
        body = helper.make_graph(
            lines, "b", [info("i", "i"), info("go", "b"), state], [info("c", "b"), *outputs]
        )
        loop = helper.make_node("Loop", ["n", "", "h0"], ["y", "ys"], body=body)
    ports = [info("xs", "f", dims), info("h0", "f", (batch, units))]
    graph = helper.make_graph(
        [loop], "g", ports, [info(n, "f", None) for n in ("y", "ys")], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    shapes = {"xs": dims, "h0": (batch, units)}
    inputs = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs)
    for y, want in zip(ps.compile(model).run(inputs).values(), wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
