"""Large matrix products, in parts."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.executors.control import CancelToken, begin_run
from penstock.host.current_run import working_for
from penstock.ops.common import products
from penstock.ops.common.products import product_in_parts
from tests.support.onnx_text import compile_text

SHAPES = [
    ((7, 5), (5, 9)),
    ((1, 5), (5, 1)),
    ((3, 7, 5), (5, 9)),
    ((5, 1, 2, 3), (4, 3, 2)),
    ((2, 3), (11, 3, 2)),
]


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_product_in_parts_equals_matmul(a, b, monkeypatch):
    monkeypatch.setattr(products, "MOST_FLOPS", 20)
    rng = np.random.default_rng(0)
    x, y = rng.integers(-9, 9, a), rng.integers(-9, 9, b)
    out = np.empty((x @ y).shape, np.int64)
    product_in_parts(x, y, out)
    np.testing.assert_array_equal(out, x @ y)


@pytest.mark.parametrize("node", ["MatMul(x, w)", "Gemm(x, w)", "Gemm<transB=1>(x, w)"])
@pytest.mark.parametrize("dim", ["64", "N"])
def test_large_product_is_computed_in_parts(node, dim, monkeypatch):
    parts = []
    monkeypatch.setattr(products, "MOST_FLOPS", 1000)
    monkeypatch.setattr(products, "checkpoint", lambda: parts.append(1))
    text = f"g (float[{dim}, 16] x, float[16, 16] w) => (float[A, B] y) {{ y = {node} }}"
    x, w = np.arange(1024, dtype=np.float32).reshape(64, 16), np.eye(16, dtype=np.float32)
    result = compile_text(text, backends=["numpy"]).run({"x": x, "w": w})["y"]
    np.testing.assert_array_equal(result, x)
    assert len(parts) >= 32


def test_product_in_parts_stops_with_its_run():
    token = CancelToken()
    control = begin_run(None, token)
    token.cancel()
    x = np.ones((4, 4))
    with pytest.raises(ps.Cancelled):
        working_for(control, product_in_parts, x, x, x.copy())
