"""Attention over keys of unknown number becomes one node where that computes the same, and only
there."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.graph import Graph
from penstock.passes.context import PassContext
from penstock.passes.lowering.recognize_attention import RecognizeAttention
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text, model_from_text
from tests.support.passes import count_operations as ops

INPUTS = "float[1, 4, 2, 8] q, float[1, 4, t, 8] k, float[1, 4, t, 8] v, float[1, 1, 2, t] m"
SHARED = "float[1, 4, 2, 8] q, float[1, 2, t, 8] k, float[1, 2, t, 8] v, float[1, 1, 2, t] m"
CONSTANTS = """<float half = {0.5}, float zero = {0}, float low = {-3.0e38}, float least = {-10000}, float tiny = {1e-9},
    int64[1] two = {2}, int64[2] both = {0, 1},
    int64[5] wide = {1, 1, 2, 1, 1}, int64[4] heads = {0, 4, -1, 8}>"""
PLAIN = "{ t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, t) p = Softmax (s) y = MatMul (p, v) }"
REPEAT = """ke = Unsqueeze (k, two) kw = Expand (ke, wide) kk = Reshape (kw, heads)
    ve = Unsqueeze (v, two) vw = Expand (ve, wide) vv = Reshape (vw, heads)"""
BEHIND = "p = Softmax (a) y = MatMul (p, v)"
SCORES = "t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, t)"


def text_of(body: str, inputs: str = INPUTS, outputs: str = "float[1, 4, 2, 8] y") -> str:
    return f"g ({inputs}) => ({outputs}) {CONSTANTS} {body}"


def optimized(text: str) -> Graph:
    graph = graph_from_text(text)
    optimize(graph)
    RecognizeAttention().run(graph, PassContext())
    return graph


FORMS = {
    "plain": PLAIN,
    "scaled": f"{{ {SCORES} a = Mul (s, half) {BEHIND} }}",
    "divided": f"{{ {SCORES} a = Div (s, half) {BEHIND} }}",
    "masked": f"{{ {SCORES} b = Mul (half, s) a = Add (m, b) {BEHIND} }}",
    "masked twice": f"{{ {SCORES} b = Add (s, m) a = Add (b, m) {BEHIND} }}",
    "scaled with the mask": f"""{{ {SCORES} b = Mul (s, half) c = Add (b, m) a = Div (c, half)
        {BEHIND} }}""",
    "scaled with a lowest number": f"""{{ {SCORES} c = Less (m, zero) b = Where (c, low, s)
        d = Add (m, b) a = Div (d, half) {BEHIND} }}""",
    "mask of rank 2": f"""{{ {SCORES} r = Squeeze (m, both) a = Add (s, r) {BEHIND} }}""",
    "where": f"{{ {SCORES} c = Less (m, zero) b = Mul (s, half) a = Where (c, low, b) {BEHIND} }}",
    "where not": f"""{{ {SCORES} c = Less (m, zero) w = Where (c, s, low) a = Add (w, m)
        {BEHIND} }}""",
    "where last": f"""{{ {SCORES} c = Less (m, zero) w = Add (s, m) a = Where (c, w, low)
        {BEHIND} }}""",
    "scaled operands": f"""{{ t = Transpose <perm = [0, 1, 3, 2]> (k) ts = Mul (t, half)
        qs = Mul (q, half) s = MatMul (qs, ts) a = Add (s, m) {BEHIND} }}""",
    "scaled keys": f"""{{ ks = Mul (k, half) t = Transpose <perm = [0, 1, 3, 2]> (ks)
        s = MatMul (q, t) a = Add (s, m) {BEHIND} }}""",
    "guarded": f"""{{ {SCORES} a = Add (s, m) pp = Softmax (a) n = IsNaN (pp)
        p = Where (n, zero, pp) y = MatMul (p, v) }}""",
}


def feeds_of(rng: np.random.Generator, groups: int = 4, keys: int = 9) -> dict[str, np.ndarray]:
    shapes = {"q": (1, 4, 2, 8), "k": (1, groups, keys, 8), "v": (1, groups, keys, 8)}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    feeds["m"] = rng.standard_normal((1, 1, 2, keys))
    feeds["m"][..., 0], feeds["m"][..., 1] = -1, 1
    return {name: x.astype(np.float32) for name, x in feeds.items()}


def check(text: str, *feeds: dict[str, np.ndarray], scale: float = 0.0) -> None:
    """Compare each answer with ONNX Runtime's, within what its scores, which are products of
    queries and keys times ``scale``, lose by rounding a few times in either."""
    model = model_from_text(text)
    runtime = onnxruntime.InferenceSession(model.SerializeToString())
    session = ps.compile(model)
    for each in feeds:
        each = {x.name: each[x.name] for x in runtime.get_inputs()}
        # A probability is off by its score's error, relatively, and so are sums of values.
        score = scale * np.prod([np.linalg.norm(each[name], axis=-1).max() for name in "qk"])
        lost = 4 * np.finfo(np.float32).eps / 2 * score * np.abs(each["v"]).max()
        for y, wanted in zip(session.run(each).values(), runtime.run(None, each), strict=True):
            np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=max(1e-5, lost))


@pytest.mark.parametrize("form", FORMS)
def test_attention_of_any_form_becomes_one_node(form):
    text = text_of(FORMS[form])
    counts = ops(optimized(text))
    assert counts["Attention"] == 1
    assert not counts["MatMul"] + counts["Softmax"] + counts["Transpose"] + counts["ZeroNaN"]
    rng = np.random.default_rng(3)
    check(text, *[feeds_of(rng, keys=keys) for keys in (2, 9, 300)])


def test_keys_that_groups_of_heads_share_are_not_repeated():
    body = f"""{{ {REPEAT} t = Transpose <perm = [0, 1, 3, 2]> (kk) s = MatMul (q, t) a = Add (s, m)
        p = Softmax (a) y = MatMul (p, vv) }}"""
    counts = ops(optimized(text_of(body, SHARED)))
    assert counts == {"Attention": 1}
    rng = np.random.default_rng(4)
    check(text_of(body, SHARED), *[feeds_of(rng, 2, keys) for keys in (2, 9, 70)])


def test_rows_that_see_no_key_are_as_before():
    rng = np.random.default_rng(5)
    for form in ("masked", "guarded"):
        feeds = feeds_of(rng)
        feeds["m"][0, 0, 1] = -np.inf
        check(text_of(FORMS[form]), feeds)


OTHERS = {
    "softmax along keys of others": PLAIN.replace("Softmax", "Softmax <axis = 2>"),
    "weights that are returned": PLAIN,
    "scores that are read elsewhere": f"{{ {SCORES} a = Add (s, m) {BEHIND} z = Neg (s) }}",
    "a number that scores may reach": f"""{{ {SCORES} c = Less (m, zero) a = Where (c, s, least)
        {BEHIND} }}""",
    "a number that is scaled to no lowest one": f"""{{ {SCORES} c = Less (m, zero)
        b = Where (c, low, s) a = Mul (b, tiny) {BEHIND} }}""",
    "a factor for each query": f"{{ {SCORES} a = Mul (s, m) {BEHIND} }}",
    "keys in another order": "{ s = MatMul (q, k) p = Softmax (s) y = MatMul (p, v) }",
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_not_quite_attention_is_left_as_it_is(form):
    inputs, outputs = INPUTS, "float[1, 4, 2, 8] y"
    if form == "weights that are returned":
        outputs += ", float[1, 4, 2, t] p"
    if form == "scores that are read elsewhere":
        outputs += ", float[1, 4, 2, t] z"
    if form == "keys in another order":
        inputs = inputs.replace("float[1, 4, t, 8] k", "float[1, 4, 8, t] k")
    assert not ops(optimized(text_of(OTHERS[form], inputs, outputs)))["Attention"]


@pytest.mark.parametrize(
    "inputs",
    [
        INPUTS.replace(", t", ", 9"),  # known keys
        INPUTS.replace("1, 4, 2, 8] q", "1, 4, n, 8] q"),  # any number of queries
        INPUTS.replace("1, 4, 2, 8] q", "1, 4, 40, 8] q").replace("2, t] m", "40, t] m"),
        INPUTS.replace("[1, 4", "[b, 4"),
        INPUTS.replace("[1, 1, 2, t] m", "[3, 1, 2, t] m"),  # more samples than queries have
        INPUTS.replace("[1, 1, 2, t] m", "[1, 1, 2, 1] m"),
        INPUTS.replace("float", "double"),
    ],
)
def test_attention_of_other_shapes_is_left_as_it_is(inputs):
    body, outputs = f"{{ {SCORES} a = Add (s, m) {BEHIND} }}", "float[a, b, c, d] y"
    dtype = "double" if "double" in inputs else "float"
    text = text_of(body, inputs, outputs.replace("float", dtype))
    assert not ops(optimized(text))["Attention"]


@pytest.mark.costly
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 1), (6, 2), (6, 3)]),
    rows=st.integers(1, 4),
    size=st.integers(1, 40),
    keys=st.lists(st.integers(1, 80), min_size=2, max_size=3),
    scales=st.lists(st.sampled_from([0.25, 1.0, 1.5]), min_size=3, max_size=3),
    terms=st.lists(st.sampled_from(["add", "where", "not", "scale"]), max_size=4),
    seed=st.integers(0, 99),
)
def test_attention_of_random_forms_equals_that_of_onnx_runtime(
    heads, rows, size, keys, scales, terms, seed
):
    """The first key is never masked: else all are, and what ``low`` stands for is rounding."""
    many, groups = heads
    times = many // groups
    lines = ["kf = Mul (k, s0) qf = Mul (q, s1)"]
    for name, source in (("kk", "kf"), ("vv", "v")):
        if times > 1:
            lines.append(f"{name}e = Unsqueeze ({source}, two) {name}w = Expand ({name}e, wide)")
            lines.append(f"{name} = Reshape ({name}w, heads)")
        else:
            lines.append(f"{name} = Identity ({source})")
    lines.append("t = Transpose <perm = [0, 1, 3, 2]> (kk) d = MatMul (qf, t) a0 = Mul (d, s2)")
    for i, term in enumerate(terms):
        step = {"add": "Add (m, a{})", "where": "Where (c, a{}, low)", "not": "Where (n, low, a{})"}
        step["scale"] = "Mul (s2, a{})"
        lines.append(f"a{i + 1} = {step[term].format(i)}")
    lines.append(f"p = Softmax <axis = -1> (a{len(terms)}) y = MatMul (p, vv)")
    text = f"""g (float[1, {many}, {rows}, {size}] q, float[1, {groups}, t, {size}] k,
        float[1, {groups}, t, {size}] v, float[1, 1, {rows}, t] m) => (float[1, {many}, {rows}, {size}] y)
        <float s0 = {{{scales[0]}}}, float s1 = {{{scales[1]}}}, float s2 = {{{scales[2]}}},
        float zero = {{0}}, float low = {{-3.0e38}}, int64[1] two = {{2}},
        int64[5] wide = {{1, 1, {times}, 1, 1}}, int64[4] heads = {{1, {many}, -1, {size}}}>
        {{ c = Less (m, zero) n = Not (c) {" ".join(lines)} }}"""
    assert ops(optimized(text))["Attention"] == 1
    rng = np.random.default_rng(seed)
    shapes = [
        {"q": (1, many, rows, size), "k": (1, groups, n, size), "v": (1, groups, n, size)}
        | {"m": (1, 1, rows, n)}
        for n in keys
    ]
    every = [
        {name: rng.standard_normal(dims).astype(np.float32) for name, dims in each.items()}
        for each in shapes
    ]
    for feeds in every:
        feeds["m"][..., 0] = -1
    check(text, *every, scale=float(np.prod(scales)) * max(1, scales[2]) ** terms.count("scale"))


CAPPED = f"""{{ {SCORES} a0 = Mul (s, half) a1 = Div (a0, cap) a2 = Tanh (a1) a3 = Mul (a2, cap)
    a = Add (a3, m) {BEHIND} }}"""


def _capped(body: str, keys: int = 9) -> str:
    text = text_of(body).replace("float half", "float cap = {3}, float half")
    return text.replace("t, 8]", f"{keys}, 8]").replace("2, t]", f"2, {keys}]")


def test_scores_with_a_highest_number_become_one_node():
    graph = graph_from_text(_capped(CAPPED))
    optimize(graph)
    RecognizeAttention(always=True).run(graph, PassContext())
    (node,) = [node for node in graph.nodes if node.op.name == "Attention"]
    assert abs(node.attrs["scale"] - 0.5) < 1e-6
    assert node.attrs["softcap"] == 3.0
    assert ops(graph)["Tanh"] == 0


@pytest.mark.parametrize("last", ["Mul (a4, half)", "Add (a4, m)"])
def test_scores_that_change_around_their_highest_number_equal_those_of_onnx_runtime(last):
    body = CAPPED.replace("a = Add (a3, m)", f"a4 = Add (a3, m) a = {last}")
    model = model_from_text(_capped(body))
    rng = np.random.default_rng(0)
    feeds = {
        "q": rng.standard_normal((1, 4, 2, 8)).astype(np.float32) * 3,
        **{n: rng.standard_normal((1, 4, 9, 8)).astype(np.float32) for n in "kv"},
        "m": rng.standard_normal((1, 1, 2, 9)).astype(np.float32),
    }
    runtime = onnxruntime.InferenceSession(model.SerializeToString())
    (want,) = runtime.run(None, feeds)
    np.testing.assert_allclose(ps.compile(model).run(feeds)["y"], want, rtol=1e-5, atol=1e-6)
