"""A model whose run takes as long as its feeds say."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.support.onnx_text import compile_text

LOOP = """g (float[4] x, int64 n) => (float[4] y) {
    y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
        d = Identity (c) w = Add (v, v) }>
}"""


def loop() -> ps.Session:
    return compile_text(LOOP)


def feeds(n: int) -> dict[str, np.ndarray]:
    """Feeds of a run of ``n`` iterations."""
    return {"x": np.ones(4, np.float32), "n": np.array(n)}
