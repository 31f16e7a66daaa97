"""Primitives compute, keep their memory alive, and are missing with an error."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import penstock as ps
from penstock.backends.onednn.library import DnnlError, Library
from penstock.backends.onednn.primitive import (
    BIAS,
    DST,
    SCRATCHPAD,
    SRC,
    WEIGHTS,
    Primitive,
    descriptor,
    descriptor_of,
    memory,
    reordered,
)
from tests.backends.onednn.forced import there


def product(dnnl: Library, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, as_it_likes: bool):
    """A primitive for c = a @ b, with what its weights must be."""
    lib = dnnl.lib
    source, target = descriptor_of(dnnl, a), descriptor_of(dnnl, c)
    weights = descriptor(dnnl, b.shape, b.dtype) if as_it_likes else descriptor_of(dnnl, b)
    made = Primitive(dnnl, "matmul", [source, weights, None, target])
    if as_it_likes:
        layout = made.query(lib.dnnl_query_weights_md)
        weights_memory = memory(dnnl, layout, reordered(dnnl, b, layout))
    else:
        weights_memory = memory(dnnl, weights, b)
    scratch = np.empty(made.scratchpad, np.uint8)
    return made, {
        SRC: memory(dnnl, source, a),
        WEIGHTS: weights_memory,
        DST: memory(dnnl, target, c),
        SCRATCHPAD: memory(dnnl, made.query(lib.dnnl_query_scratchpad_md), scratch),
    }


@there
@pytest.mark.parametrize("as_it_likes", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_matmul_primitive_of_strided_matrices_is_right(dnnl, as_it_likes, transposed):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((5, 7)).astype(np.float32)
    b = rng.standard_normal((9, 7)).astype(np.float32).T
    if transposed:
        a = np.asfortranarray(a)
    c = np.full((5, 18), 7, np.float32)[:, ::2]
    made, memories = product(dnnl, a, b, c, as_it_likes=as_it_likes)
    assert made.implementation
    made.run(memories)
    np.testing.assert_allclose(c, a @ b, rtol=1e-5)
    np.testing.assert_array_equal(c.base[:, 1::2], 7)


@there
@pytest.mark.parametrize("channels_last", [True, False])
def test_convolution_primitive_in_both_layouts_is_right(dnnl, channels_last):
    lib = dnnl.lib
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 3, 6, 6)).astype(np.float32)
    w = rng.standard_normal((4, 3, 3, 3)).astype(np.float32)
    bias = rng.standard_normal(4).astype(np.float32)
    y = np.empty((1, 4, 6, 6), np.float32)
    if channels_last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        y = np.empty((1, 6, 6, 4), np.float32).transpose(0, 3, 1, 2)
    source, biases, target = (descriptor_of(dnnl, array) for array in (x, bias, y))
    tensors = [source, descriptor(dnnl, w.shape, w.dtype), biases, target]
    geometry = [[1, 1], [0, 0], [1, 1], [1, 1]]
    made = Primitive(dnnl, "convolution_forward", ["convolution_direct", *tensors, *geometry])
    scratch = np.empty(made.scratchpad, np.uint8)
    layout = made.query(lib.dnnl_query_weights_md)
    made.run(
        {
            SRC: memory(dnnl, source, x),
            WEIGHTS: memory(dnnl, layout, reordered(dnnl, w, layout)),
            BIAS: memory(dnnl, biases, bias),
            DST: memory(dnnl, target, y),
            SCRATCHPAD: memory(dnnl, made.query(lib.dnnl_query_scratchpad_md), scratch),
        }
    )
    padded = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    want = np.einsum("nchwij,ocij->nohw", windows, w) + bias[:, None, None]
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


@there
def test_call_keeps_its_memory_alive(dnnl):
    a, b = np.eye(4, dtype=np.float32), np.arange(16, dtype=np.float32).reshape(4, 4)
    c = np.empty((4, 4), np.float32)

    def call():
        made, memories = product(dnnl, a, b, c, as_it_likes=True)
        return made.call(memories)

    function, arguments = call()
    gc.collect()
    trash = [np.full(64, i, np.float32) for i in range(200)]
    for _ in range(3):
        c[:] = 0
        assert function(*arguments) == 0
        np.testing.assert_array_equal(c, b)
    assert len(trash) == 200


@there
def test_missing_primitive_raises_dnnl_error(dnnl):
    a, b, c = (np.ones(shape, np.float32) for shape in ((2, 3), (4, 5), (2, 5)))
    with pytest.raises(DnnlError, match="status 2") as caught:
        product(dnnl, a, b, c, as_it_likes=False)
    assert isinstance(caught.value, ps.PenstockError)
