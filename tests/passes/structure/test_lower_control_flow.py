"""Loops whose nodes run each on its own, in frames, mean what they mean as one node."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.extend import Kernel, asynchronous, operator, same_type
from penstock.ir.graph import Node
from penstock.ir.op import Types
from penstock.ops import registry
from tests.support.onnx_text import model_from_text

DOMAIN = "test.waits"
WAITS = f"{DOMAIN}.Soon"
NESTED = """g (TYPE[2] x, int64 n, int64 m) => (TYPE[2] y, TYPE[K, 2] k) {
    y, k = Loop (n, , x) <body = o (int64 j, bool e, TYPE[2] p) => (bool f, TYPE[2] AFTER, TYPE[2] row) {
        f = Identity(e) l = WAITS(j) first = Sub(l, j)
        q, rows = Loop (m, , p) <body = b (int64 i, bool c, TYPE[2] v) => (bool d, TYPE[2] w, TYPE[2] ROW)
            { d = Identity(c) w = NEXT(v) }>
        axes = Constant<value = int64[1] {0}>() own = Unsqueeze(p, axes)
        all = Concat<axis = 0>(rows, own) row = Gather<axis = 0>(all, first) }> }"""


@pytest.fixture(autouse=True)
def waiting_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._REGISTRY, (DOMAIN, "Soon"), [])  # only for a test

    @operator("Soon", domain=DOMAIN, infer=same_type)
    def soon(node: Node, types: Types) -> Kernel:
        def begin(done: Any, x: np.ndarray) -> None:
            threading.Thread(target=done, args=[x.copy()]).start()

        return asynchronous(begin)


@pytest.mark.parametrize("trips", [(1, 0), (3, 0), (0, 2), (1, 2)])
@pytest.mark.parametrize("row", ["v", "w"])
@pytest.mark.parametrize("after", ["p", "q"])
@pytest.mark.parametrize("dtype", ["bool", "float"])
def test_rows_of_an_inner_loop_have_their_type_without_iterations(
    dtype: str, after: str, row: str, trips: tuple[int, int]
) -> None:
    text = NESTED.replace("TYPE", dtype).replace("AFTER", after).replace("ROW", row)
    text = text.replace("NEXT", "Not" if dtype == "bool" else "Neg")
    x = np.array([1, 0], bool if dtype == "bool" else np.float32)
    feeds = {"x": x, "n": np.array(trips[0]), "m": np.array(trips[1])}
    model = model_from_text(text.replace("WAITS", WAITS), domains={DOMAIN: 1})
    session = ps.compile(model, executor="frames")
    got = list(session.run(feeds).values())
    assert "tensorflow.Merge" in session.explain()
    plain = model_from_text(text.replace("WAITS", "Identity")).SerializeToString()
    for ours, theirs in zip(got, onnxruntime.InferenceSession(plain).run(None, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
