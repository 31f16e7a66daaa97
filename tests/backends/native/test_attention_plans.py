"""Attention in plans: which nodes become one step, which arrays it reads, and how it stops."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.host.current_run import working_for
from penstock.ops.internal.fused import parts
from tests.backends.native.test_attention import attention, draw, heads_of, rng
from tests.support.counting_run import CountingRun
from tests.support.native_kernels import LIBRARIES, kernel_of, pytestmark, threads_of  # noqa: F401
from tests.support.onnx_text import compile_text, graph_from_text, model_from_text


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, **{"executor": "linear", **options})


def steps(session: ps.Session) -> list[str]:
    return [
        " ".join(part.op.name for part in parts(step.node)) for step in session.inspect.plan.walk()
    ]


def close(text: str, feeds: dict[str, np.ndarray], **options) -> ps.Session:
    """The session of a model, whose outputs are those of NumPy."""
    session = compiled(text, **options)
    expected = compiled(text, backends=["numpy"]).run(feeds)
    for _ in range(2):  # nothing of the first run is left to be seen
        found = session.run(feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-5)
    return session


MASKS = {
    "none": "",
    "whole": "float[2, 3, 50, 40] mask",
    "rows": "float[1, 1, 50, 40] mask",
    "keys": "float[2, 1, 1, 40] mask",
    "queries": "float[50, 1] mask",
    "number": "float[1] mask",
}


def attention_text(mask: str, guarded: bool, head: str = "[2, 3, 50, 16]") -> str:
    scores = "b = Add(a, mask)" if mask else "b = Identity(a)"
    guard = "n = IsNaN(p) g = Where(n, zero, p)" if guarded else "g = Identity(p)"
    return f"""g (float{head} q, float[2, 3, 40, 16] k, float[2, 3, 40, 24] v{", " + mask if mask else ""})
        => (float[2, 3, 50, 24] y) <float c = {{0.25}}, float zero = {{0}}> {{
            q1 = Abs(q) v1 = Neg(v)
            t = Transpose <perm = [0, 1, 3, 2]> (k)
            s = Mul(q1, c) a = MatMul(s, t) {scores}
            p = Softmax <axis = -1> (b) {guard}
            z = MatMul(g, v1) y = Neg(z)
        }}"""


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_with_masks_equals_numpy(mask, guarded):
    feeds = {"q": draw(2, 3, 50, 16), "k": draw(2, 3, 40, 16), "v": draw(2, 3, 40, 24)}
    declared = MASKS[mask]
    if declared:
        shape = [int(n) for n in declared[len("float[") : declared.index("]")].split(",")]
        feeds["mask"] = np.where(rng.random(shape) < 0.2, -np.inf, draw(*shape)).astype(np.float32)
        if mask == "number":
            feeds["mask"] = draw(1)
        if guarded and mask in ("whole", "rows"):
            feeds["mask"][..., 7, :] = -np.inf  # a row of which nothing is left
        elif mask == "queries":
            feeds["mask"] = draw(50, 1)
        elif not guarded:
            feeds["mask"] = np.where(np.isinf(feeds["mask"]), -30, feeds["mask"])
    session = close(attention_text(declared, guarded), feeds)
    names = steps(session)
    assert names.count("Attention") == 1
    assert not any("MatMul" in name or "Softmax" in name for name in names)


@pytest.mark.parametrize("n", [5, 200])  # results in the arena, and those that the run allocates
def test_attention_of_fed_values_equals_numpy(n):
    feeds = {"q": draw(3, 97, 32), "k": draw(3, 32, 65), "v": draw(3, 65, n)}
    text = f"""g (float[3, 97, 32] q, float[3, 32, 65] k, float[3, 65, {n}] v) => (float[3, 97, {n}] y)
        {{ a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }}"""
    session = close(text, feeds)
    assert steps(session) == ["Attention"]
    strided = {name: np.asfortranarray(x) for name, x in feeds.items()}
    np.testing.assert_array_equal(session.run(strided)["y"], session.run(feeds)["y"])


def test_attention_reads_and_writes_given_arrays_where_they_are(monkeypatch):
    text = """g (float[3, 33, 8] q, float[3, 8, 21] k, float[3, 21, 8] v) => (float[3, 33, 8] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }"""
    fed = [{"q": draw(3, 33, 8), "k": draw(3, 8, 21), "v": draw(3, 21, 8)} for _ in range(3)]
    session, reference = compiled(text), compiled(text, backends=["numpy"])
    assert steps(session) == ["Attention"]
    session.run(fed[0])
    copies = []
    monkeypatch.setattr(np, "copyto", lambda *arrays: copies.append(arrays))
    results = [session.run(feeds)["y"] for feeds in fed]
    assert not copies
    for feeds, y in zip(fed, results, strict=True):
        np.testing.assert_allclose(y, reference.run(feeds)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [8, 16])
def test_attention_over_few_transposed_keys_is_one_step(n):
    text = f"""g (float[{n}, 12, 64] q, float[{n}, 12, 64] k, float[{n}, 12, 64] v)
        => (float[12, {n}, 64] y) <float c = {{8}}> {{
            q1 = Transpose <perm = [1, 0, 2]> (q) k1 = Transpose <perm = [1, 2, 0]> (k)
            v1 = Transpose <perm = [1, 0, 2]> (v) a = MatMul(q1, k1) b = Div(a, c)
            p = Softmax <axis = -1> (b) z = MatMul(p, v1) y = Neg(z) }}"""
    session = close(text, {name: draw(n, 12, 64) for name in "qkv"})
    assert "Attention" in steps(session)
    assert "Reorder" not in steps(session)


@pytest.mark.parametrize("where", ["<float[40, 50] m>", ", float[40, 50] m"])
def test_attention_with_a_transposed_mask_equals_numpy(where):
    fed, constant = ("", where) if where[0] == "<" else (where, "")
    text = f"""g (float[3, 50, 8] q, float[3, 8, 40] k, float[3, 40, 5] v{fed})
        => (float[3, 50, 5] y) {constant} {{
            t = Transpose <perm = [1, 0]> (m) a = MatMul(q, k) b = Add(a, t)
            p = Softmax <axis = -1> (b) y = MatMul(p, v) }}"""
    model = model_from_text(text)
    feeds = {"q": draw(3, 50, 8), "k": draw(3, 8, 40), "v": draw(3, 40, 5), "m": draw(40, 50)}
    if constant:
        model.graph.initializer.append(numpy_helper.from_array(feeds.pop("m"), "m"))
    session = ps.compile(model, executor="linear")
    expected = ps.compile(model, backends=["numpy"])
    for _ in range(2):
        y, wanted = session.run(feeds)["y"], expected.run(feeds)["y"]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
        if fed:
            feeds["m"] = draw(40, 50)
    assert "Attention" in steps(session)


@pytest.mark.parametrize(
    "text",
    [
        # The softmax is along another axis.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 5] v) => (float[2, 9, 5] y)
        { a = MatMul(q, k) p = Softmax <axis = 1> (a) y = MatMul(p, v) }""",
        # What is made of the scores is the second operand.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 9] v) => (float[2, 9, 9] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(v, p) }""",
        # The scores are read by somebody else.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 5] v)
            => (float[2, 9, 5] y, float[2, 9, 9] p)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }""",
        # Values are the same for all heads.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[9, 5] v) => (float[2, 9, 5] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }""",
    ],
)
def test_chain_that_only_resembles_attention_is_split(text):
    model = graph_from_text(text)
    feeds = {value.name: draw(*value.type.dims) for value in model.inputs}
    session = close(text, feeds)
    assert "Attention" not in steps(session)


@pytest.mark.parametrize("threads", [1, 2])
def test_long_attention_ends_when_its_run_is_stopped(threads):
    node, arrays = attention(*heads_of((200,), 600, 32, 600, 32))
    kernel = kernel_of(node, LIBRARIES[0])
    assert kernel is not None
    with threads_of(LIBRARIES[0], threads):
        whole = CountingRun()
        working_for(whole, kernel.function, *arrays)
        assert whole.looks
        stopped = CountingRun(last=whole.looks)
        with pytest.raises(ps.Cancelled):
            working_for(stopped, kernel.function, *arrays)
