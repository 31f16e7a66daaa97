"""Pooling with oneDNN equals that of NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import ran_on
from tests.backends.onednn.test_kernel import compile, draw, one_node
from tests.support.onnx_text import compile_text, model_from_text

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


POOLINGS = {
    "plain": ((1, 3, 8, 9), {"kernel_shape": [3, 2]}),
    "padded": ((2, 3, 8, 9), {"kernel_shape": [3, 3], "pads": [1, 0, 1, 1]}),
    "strided": ((1, 3, 9, 9), {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "with a last window kept": (
        (1, 3, 8, 8),
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1},
    ),
    "without one": ((1, 3, 8, 8), {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "dilated": ((1, 3, 9, 9), {"kernel_shape": [2, 3], "dilations": [3, 2]}),
    "same": ((1, 3, 7, 8), {"kernel_shape": [3, 3], "auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "one axis": ((2, 3, 16), {"kernel_shape": [5], "strides": [2]}),
    "three axes": ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2]}),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_max_pool_equals_numpy(name):
    shape, attrs = POOLINGS[name]
    x = draw(*shape)
    proto = one_node("MaxPool", x, **attrs)
    session = compile(proto)
    want = ps.compile(proto, backends=["numpy"])(x)
    for _ in range(2):
        np.testing.assert_allclose(session(x), want, rtol=1e-5, atol=1e-6)
    assert ran_on(session, "MaxPool") == {"numpy" if "dilations" in attrs else "onednn"}


def test_max_pool_with_indices_runs_on_numpy():
    text = """g (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y, int64[1, 1, 2, 2] i) {
        y, i = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }"""
    session = compile(model_from_text(text))
    x = draw(1, 1, 4, 4)
    for got, want in zip(session(x), compile_text(text, backends=["numpy"])(x), strict=True):
        np.testing.assert_array_equal(got, want)
    assert ran_on(session, "MaxPool") == {"numpy"}
