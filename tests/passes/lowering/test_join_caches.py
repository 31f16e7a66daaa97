"""Caches of keys and values in one tensor, to which new rows of both are joined at once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.passes.context import PassContext
from penstock.passes.lowering.join_caches import JoinCaches
from penstock.passes.pipeline import optimize
from tests.support.onnx_text import graph_from_text, model_from_text

TEXT = """g (float[1, 3, 2, 4] q, float[1, 3, 2, 4] nk, float[1, 3, 2, 4] nv, float[2, 1, 3, p, 4] past)
    => (float[1, 3, 2, 4] y, float[2, 1, 3, t, 4] present)
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] first = {{0}}, int64[1] second = {{1}},
    int64[1] last = {{-1}}, int64[1] end = {{9}}> {{
    {halves}
    {joined}
    uk = Unsqueeze (k, first) uv = Unsqueeze (v, first)
    present = Concat <axis = 0> ({order})
    s = MatMul (q, t) w = Softmax (s) y = MatMul (w, v)
}}"""
HALVES = {
    "gather": "ok = Gather (past, zero) ov = Gather (past, one)",
    "slice": """sk = Slice (past, first, second, first) ok = Squeeze (sk, first)
        sv = Slice (past, last, end, first) ov = Squeeze (sv, first)""",
    "split": """sk, sv = Split <num_outputs = 2> (past) ok = Squeeze (sk, first)
        ov = Squeeze (sv, first)""",
}
VALUES = "v = Concat <axis = 2> (ov, nv)"
PLAIN = f"k = Concat <axis = -2> (ok, nk) t = Transpose <perm = [0, 1, 3, 2]> (k) {VALUES}"
TURNED = f"""tk = Transpose <perm = [0, 1, 3, 2]> (ok) tn = Transpose <perm = [0, 1, 3, 2]> (nk)
    t = Concat <axis = 3> (tk, tn) k = Transpose <perm = [0, 1, 3, 2]> (t) {VALUES}"""


def text_of(halves: str = "gather", joined: str = PLAIN, order: str = "uk, uv") -> str:
    return TEXT.format(halves=HALVES.get(halves, halves), joined=joined, order=order)


def concats(text: str) -> int:
    graph = graph_from_text(text)
    optimize(graph)
    JoinCaches().run(graph, PassContext())
    return Counter(node.op.name for node in graph.walk())["Concat"]


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("joined", [PLAIN, TURNED])
def test_halves_of_a_past_are_joined_at_once(halves: str, joined: str) -> None:
    text = text_of(halves, joined)
    assert concats(text) == 2  # of new rows, and of these with the past
    model, rng, shared = model_from_text(text), np.random.default_rng(0), 0
    session, runtime = ps.compile(model), onnxruntime.InferenceSession(model.SerializeToString())
    past = rng.standard_normal((2, 1, 3, 0, 4)).astype(np.float32)
    for _ in range(20):
        feeds = {
            name: rng.standard_normal((1, 3, 2, 4)).astype(np.float32) for name in ("q", "nk", "nv")
        }
        feeds["past"] = past
        results = session.run(feeds)
        for result, want in zip(results.values(), runtime.run(None, feeds), strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)
        shared += np.shares_memory(past, results["present"])
        past = results["present"]
    assert shared > 10  # it grows where it lies


@pytest.mark.parametrize(
    "text",
    [
        text_of(order="uv, uk"),
        text_of(order="uk, uk"),
        text_of(HALVES["gather"].replace("one", "zero")),
        # Values that depend on keys.
        text_of(joined=PLAIN.replace("v = ", "m = ReduceMax (k) mv = Add (nv, m) v = ").replace("nv)", "mv)", 1)),
        # Another past of the values.
        text_of(HALVES["gather"].replace("(past, one)", "(other, one)").replace(
            "ok", "other = Neg (past) ok", 1)),
    ],
)  # fmt: skip
def test_other_caches_stay(text: str) -> None:
    assert concats(text) != 2
