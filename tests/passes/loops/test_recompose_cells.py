"""Cells of recurrent layers become one node where that computes the same, and only there."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.ir.graph import Graph
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text, model_from_text

STATES = "float[2, 20] g, float[2, 5] c"
CONSTANTS = (
    "<float one = {1}, int64[4] uneven = {5, 5, 4, 6}, int64[1] axis = {-1}, int64[1] step = {1}>"
)
LSTM_END = """m = Mul (si, tn) d = Add (k, m) td = Tanh (d) so = Sigmoid (o) h = Mul (so, td) }"""
LSTM = "si = Sigmoid (i) tn = Tanh (n) sf = Sigmoid (f) k = Mul (sf, c) " + LSTM_END
SPLIT = "{ i, f, n, o = Split <axis = 1, num_outputs = 4> (g) "
GRU_STATES = "float[2, 15] x, float[2, 15] y, float[2, 5] c"
GRU_SPLIT = """{ xz, xr, xn = Split <axis = -1, num_outputs = 3> (x)
    yz, yr, yn = Split <axis = -1, num_outputs = 3> (y) """


def sliced(x: str, parts: str, ends: list[int]) -> str:
    """Parts of the last axis, cut by a Slice each."""
    cuts = zip(parts.split(), ends, ends[1:], strict=False)
    return " ".join(
        f"{p}b = Constant <value_ints = [{begin}]> () {p}e = Constant <value_ints = [{end}]> () "
        f"{p} = Slice ({x}, {p}b, {p}e, axis, step)"
        for p, begin, end in cuts
    )


GRU_GATES = "az = Add (xz, yz) z = Sigmoid (az) ar = Add (yr, xr) r = Sigmoid (ar) "
GRU_NEW = "m = Mul (yn, r) an = Add (m, xn) n = Tanh (an) "
GRU_SUM = "d = Sub (c, n) zd = Mul (z, d) h = Add (n, zd) }"


def text_of(body: str, states: str = STATES, outputs: str = "float[2, 5] h, float[2, 5] d") -> str:
    return f"t ({states}) => ({outputs}) {CONSTANTS} {body}"


def gru(body: str) -> str:
    return text_of(body, GRU_STATES, "float[2, 5] h")


def cells(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.walk() if node.op.name.endswith("Cell")]


FORMS = {
    "lstm": text_of(SPLIT + LSTM),
    "lstm of other order": text_of(SPLIT.replace("i, f, n, o", "o, n, i, f") + LSTM),
    "lstm with a forget bias": text_of(
        SPLIT + LSTM.replace("sf = Sigmoid (f)", "fb = Add (one, f) sf = Sigmoid (fb)")
    ),
    "lstm of swapped operands": text_of(
        SPLIT
        + LSTM.replace("(si, tn)", "(tn, si)")
        .replace("(k, m)", "(m, k)")
        .replace("(so, td)", "(td, so)")
    ),
    "lstm with a reader of a gate": text_of(
        SPLIT + LSTM, outputs="float[2, 5] h, float[2, 5] d, float[2, 5] si"
    ),
    "lstm of slices": text_of("{" + sliced("g", "i f n o", [0, 5, 10, 15, 20]) + LSTM),
    "lstm of slices from behind": text_of(
        "{" + sliced("g", "i f n o", [-20, -15, -10, -5, 20]) + LSTM
    ),
    "gru of slices": gru(
        "{"
        + sliced("x", "xz xr xn", [0, 5, 10, 15])
        + sliced("y", "yz yr yn", [0, 5, 10, 99])
        + GRU_GATES
        + GRU_NEW
        + GRU_SUM
    ),
    "gru": gru(GRU_SPLIT + GRU_GATES + GRU_NEW + GRU_SUM),
    "gru of two products": gru(
        GRU_SPLIT
        + GRU_GATES
        + GRU_NEW
        + "u = Sub (one, z) a = Mul (u, n) b = Mul (z, c) h = Add (b, a) }"
    ),
}
OTHERS = {
    "parts of two tensors": text_of(
        SPLIT
        + "sw = Neg (g) i2, f2, n2, o2 = Split <axis = 1, num_outputs = 4> (sw) "
        + LSTM.replace("Sigmoid (f)", "Sigmoid (f2)")
    ),
    "slices of other widths": text_of(
        "{" + sliced("g", "i f n o", [0, 5, 10, 15, 20]) + LSTM, "float[2, 25] g, float[2, 5] c"
    ),
    "slices that overlap": text_of(
        "{ " + sliced("g", "i f", [0, 5, 10]) + sliced("g", "n o", [9, 14, 19]) + LSTM
    ),
    "a gate twice": text_of(SPLIT + LSTM.replace("Sigmoid (f)", "Sigmoid (i)")),
    "another function": text_of(SPLIT + LSTM.replace("Tanh (n)", "Relu (n)")),
    "a cell that broadcasts": text_of(SPLIT + LSTM, "float[2, 20] g, float[1, 5] c"),
    "another state": gru(GRU_SPLIT + GRU_GATES + GRU_NEW + GRU_SUM.replace("(c, n)", "(n, c)")),
    "gates in another order": gru(
        GRU_SPLIT.replace("yz, yr", "yr, yz") + GRU_GATES + GRU_NEW + GRU_SUM
    ),
}


BEFORE_STATES = "float[2, 15] x, float[2, 10] y, float[2, 10] v, float[2, 5] c, float[5, 5] w"
BEFORE_SPLIT = """{ xz, xr, xn = Split <axis = -1, num_outputs = 3> (x)
    yz, yr = Split <axis = -1, num_outputs = 2> (y) """
BEFORE_NEW = "q = Mul (r, c) p = MatMul (q, w) an = Add (p, xn) n = Tanh (an) "
TWO_PRODUCTS = "u = Sub (one, z) a = Mul (u, n) b = Mul (z, c) h = Add (b, a) }"
SUMS = BEFORE_SPLIT.replace("yz, yr", "j, k") + "yv = Add (y, v) "


def before(body: str, outputs: str = "float[2, 5] h") -> str:
    return text_of(body, BEFORE_STATES, outputs)


BEFORE = {
    "keras": before(BEFORE_SPLIT + GRU_GATES + BEFORE_NEW + TWO_PRODUCTS),
    "difference": before(BEFORE_SPLIT + GRU_GATES + BEFORE_NEW + GRU_SUM),
    "slices": before(
        "{"
        + sliced("x", "xz xr xn", [0, 5, 10, 15])
        + sliced("y", "yr yz", [0, 5, 10])
        + GRU_GATES
        + BEFORE_NEW
        + TWO_PRODUCTS
    ),
    "sigmoid of both gates": before(
        SUMS
        + "s = Sigmoid (yv) r, z = Split <axis = 1, num_outputs = 2> (s) "
        + BEFORE_NEW
        + TWO_PRODUCTS
    ),
    "sum of both gates": before(
        SUMS
        + "yz, yr = Split <axis = 1, num_outputs = 2> (yv) z = Sigmoid (yz) r = Sigmoid (yr) "
        + BEFORE_NEW
        + GRU_SUM
    ),
    "readers of both gates": before(
        BEFORE_SPLIT + GRU_GATES + BEFORE_NEW + TWO_PRODUCTS,
        "float[2, 5] h, float[2, 5] z, float[2, 5] r, float[2, 5] q",
    ),
    "blend before the product": before(
        BEFORE_SPLIT
        + GRU_GATES
        + "n = Tanh (xn) "
        + GRU_SUM.removesuffix("}")
        + "q = Mul (r, c) }",
        "float[2, 5] h, float[2, 5] q",
    ),
    "gates of their own": before(
        "{ xz, xr, xn = Split <axis = -1, num_outputs = 3> (x) zc = MatMul (c, w) "
        "az = Add (xz, zc) z = Sigmoid (az) r = Sigmoid (xr) " + BEFORE_NEW + GRU_SUM
    ),
    "a product of another state": before(
        BEFORE_SPLIT + GRU_GATES + BEFORE_NEW.replace("(r, c)", "(r, xn)") + GRU_SUM
    ),
}
WITHOUT_GATES = {"blend before the product", "gates of their own", "a product of another state"}


def check(text: str, wanted: int) -> None:
    graph = graph_from_text(text)
    optimize(graph)
    assert len(cells(graph)) == wanted
    compare(text)


def compare(text: str) -> None:
    model, rng = model_from_text(text), np.random.default_rng(3)
    session = ps.compile(model)
    feeds = {v.name: rng.standard_normal(v.shape).astype(np.float32) for v in session.inputs}
    runtime = onnxruntime.InferenceSession(model.SerializeToString())
    got = list(session.run(feeds).values())
    for y, want in zip(got, runtime.run(None, feeds), strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_cell_is_recognized_in_any_spelling(text):
    check(text, 1)


@pytest.mark.parametrize("form", BEFORE)
def test_gru_that_resets_before_the_product_has_a_node_on_either_side_of_it(form):
    graph = graph_from_text(BEFORE[form])
    optimize(graph)
    names = [node.op.name for node in graph.walk()]
    assert names.count("GruState") == 1
    assert names.count("GruGates") == (form not in WITHOUT_GATES)
    compare(BEFORE[form])


def test_tanh_that_is_blended_by_another_gate_stays_as_it_is():
    body = GRU_GATES + BEFORE_NEW + TWO_PRODUCTS.replace("Sub (one, z)", "Sub (one, r)")
    text = before(BEFORE_SPLIT + body)
    graph = graph_from_text(text)
    optimize(graph)
    assert not [node for node in graph.walk() if node.op.name.startswith("Gru")]
    compare(text)


def test_gru_that_resets_before_the_product_in_a_loop_is_four_steps_beside_its_gather():
    text = """t (float[7, 2, 15] xs, float[2, 5] c0, float[5, 5] w)
        => (float[2, 5] c_end, float[7, 2, 5] ys) <int64 trips = {7}, bool yes = {1}, float one = {1}> {
        v = Concat <axis = 1> (w, w)
        c_end, ys = Loop (trips, yes, c0) <body = b (int64 j, bool on, float[2, 5] c)
            => (bool still, float[2, 5] h, float[2, 5] out) {
            still = Identity (on) x = Gather <axis = 0> (xs, j) y = MatMul (c, v) """
    body = BEFORE_SPLIT.removeprefix("{ ") + GRU_GATES + BEFORE_NEW
    text += body + TWO_PRODUCTS.removesuffix("}") + "out = Identity (h) }> }"
    graph = graph_from_text(text)
    optimize(graph)
    (loop,) = [node for node in graph.nodes if node.op.name == "Loop"]
    (inner,) = [inner for _, inner in loop.graphs]
    names = [node.op.name for node in inner.nodes]
    assert sorted(names) == ["Gather", "GruGates", "GruState", "MatMul", "MatMul"]
    compare(text)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_what_is_no_cell_stays_as_it_is(text):
    check(text, 0)


def test_cell_in_a_loop_is_one_step_of_its_body():
    loop = """t (float[7, 2, 20] x, float[2, 5] c0) => (float[2, 5] c_end, float[7, 2, 5] ys)
    <int64 trips = {7}, bool yes = {1}> {
        c_end, ys = Loop (trips, yes, c0) <body = b (int64 j, bool on, float[2, 5] c)
            => (bool still, float[2, 5] d, float[2, 5] h) {
            still = Identity (on) g = Gather <axis = 0> (x, j) """
    text = loop + SPLIT.removeprefix("{ ") + LSTM + "> }"
    check(text, 1)


def test_optimized_graph_with_a_cell_is_read_back_from_its_text():
    from penstock.textual.parser import parse_graph
    from penstock.textual.printer import format_graph

    for form in (FORMS["lstm"], FORMS["gru"], BEFORE["keras"]):
        graph = graph_from_text(form)
        optimize(graph)
        text = format_graph(graph)
        assert format_graph(parse_graph(text)) == text
