"""Compiled attention against NumPy's kernels of its parts."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.attention import ATTENTION
from tests.support.native_kernels import (
    LIBRARIES,
    check,
    expected,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
    threads_of,
)
from tests.support.onnx_text import compile_text

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
rng = np.random.default_rng(5)

# Heads, queries, the width of a query, keys, and the width of a value.
SIZES = [
    ((1,), 1, 1, 1, 1),
    ((3,), 7, 5, 3, 2),
    ((2, 3), 49, 32, 49, 32),
    ((2, 2, 1), 13, 8, 17, 24),
    ((4,), 6, 64, 16, 16),
    ((2,), 12, 64, 256, 64),
    ((1, 2), 5, 33, 100, 90),
    ((2,), 30, 40, 31, 3),
    ((1,), 300, 8, 20, 16),
    ((3,), 97, 8, 20, 9),
    # Several blocks of keys, and of queries.
    ((2,), 12, 64, 257, 64),
    ((1, 2), 400, 8, 600, 16),
    ((1,), 800, 4, 520, 3),
    ((2,), 7, 700, 50, 24),
    ((1,), 3, 2048, 17, 16),
    ((1,), 5, 16, 130, 256),
]


def draw(*dims: int) -> np.ndarray:
    return rng.normal(size=dims).astype(np.float32)


def attention(q, k, v, *between, **attrs) -> tuple[Node, list[np.ndarray]]:
    """An Attention of keys [..., size, positions], and its inputs. ``between`` are biases, and
    whether these are constant."""
    arrays = [q, k, v, *[bias for bias, _ in between]]
    constants = [3 + i for i, (_, constant) in enumerate(between) if constant]
    attrs = {"scale": 1.0, "keys_last": 1, **attrs}
    return node_of(ATTENTION, arrays, constants=constants, **attrs), arrays


def heads_of(lead, queries, width, keys, out):
    """Queries, keys and values, whose scores are about as far apart for any width."""
    q = draw(*lead, queries, width) / np.float32(width**0.5)
    return q, draw(*lead, width, keys), draw(*lead, keys, out)


@pytest.mark.parametrize("sizes", SIZES)
def test_attention_of_any_sizes_equals_numpy(sizes):
    check(*attention(*heads_of(*sizes)), CLOSE)


@pytest.mark.parametrize("scale", [0.25, -0.3])
def test_scores_are_scaled_before_terms_are_added(scale):
    q, k, v = heads_of((2, 3), 20, 8, 49, 16)
    terms = [(draw(1, 3, 20, 49), True), (draw(2, 1, 1, 49), False)]
    check(*attention(q, k, v, *terms, scale=scale), CLOSE)


@pytest.mark.parametrize("keys", [49, 300])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_scores_are_bounded_before_terms_are_added(cap, keys):
    q, k, v = heads_of((2, 3), 20, 8, keys, 16)
    check(*attention(q, k, v, (draw(20, keys), False), scale=0.7, softcap=cap), CLOSE)


@pytest.mark.parametrize("keys_last", [0, 1])
@pytest.mark.parametrize("lead, groups", [((4,), 2), ((2, 6), 2), ((2, 3, 4), 1)])
def test_heads_share_keys_in_groups(lead, groups, keys_last):
    q, *_ = heads_of(lead, 20, 8, 49, 16)
    shared = (*lead[:-1], groups)
    k = draw(*shared, *((8, 49) if keys_last else (49, 8)))
    terms = [(draw(*lead, 20, 49), False), (draw(20, 49), True)]
    for count in (0, 1, 2):
        check(*attention(q, k, draw(*shared, 49, 16), *terms[:count], keys_last=keys_last), CLOSE)


@pytest.mark.parametrize("keys", [3, 16, 49, 300])
@pytest.mark.parametrize("dims", [(), (1,), (20, 1), (1, "keys"), (3, 20, "keys"), (2, 1, 20, 1)])
def test_terms_broadcast(dims, keys):
    q, k, v = heads_of((2, 3), 20, 8, keys, 16)
    term = draw(*[keys if n == "keys" else n for n in dims])
    check(*attention(q, k, v, (term, False)), CLOSE)


@pytest.mark.parametrize("places", [(0, 2), (0, 1, 2), (0, 3), (2, 3)])
def test_a_tensor_may_be_several_operands(places):
    node, arrays = attention(*[draw(3, 16, 16) for _ in range(3)], (draw(3, 16, 16), False))
    for i in places[1:]:
        node.inputs[i], arrays[i] = node.inputs[places[0]], arrays[places[0]]
    check(node, arrays, CLOSE)


@pytest.mark.parametrize("keys", [49, 300])
@pytest.mark.parametrize("layout", ["heads inside", "keys outside", "rows apart"])
def test_memory_in_any_order_is_read_and_written_where_it_is(layout, keys):
    q, k, v = heads_of((2, 3), 20, 16, keys, 16)
    term = draw(1, 3, 20, keys)
    node, arrays = attention(q, k, v, (term, False))
    (wanted,) = expected(node, arrays)

    def laid(x):
        if layout == "heads inside":  # as transposed from [batch, positions, heads, width]
            return np.moveaxis(np.moveaxis(x, -3, -2).copy(), -2, -3)
        if layout == "keys outside":
            return x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 5), x.dtype)
        wide[..., :-5] = x
        return wide[..., :-5]

    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        y = laid(np.zeros_like(wanted))
        function, arguments = kernel.bind([laid(x) for x in arrays], [y], None)
        assert not arguments
        function()
        np.testing.assert_allclose(y, wanted, **CLOSE, err_msg=library.level)


@pytest.mark.parametrize("zeros", ["", "nan", "unseen"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_numbers_are_those_of_numpy(special, zeros):
    q, k, v = heads_of((2,), 20, 8, 35, 16)
    term = draw(2, 20, 35)
    term[0, 3, [2, 33]] = term[1, [1, 19], 7] = term[1, 11] = special
    check(*attention(q, k, v, (term, False), zeros=zeros), CLOSE)


# Of 600 keys, in three blocks of 200.
BLOCKS = {
    "first": slice(0, 200),
    "middle": slice(200, 400),
    "last": slice(400, 600),
    "all but the first": slice(200, 600),
    "all but the last": slice(0, 400),
    "all": slice(0, 600),
}


@pytest.mark.parametrize("zeros", ["", "nan", "unseen"])
@pytest.mark.parametrize("where", BLOCKS)
@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
def test_blocks_of_keys_may_be_masked(where, lowest, zeros):
    q, k, v = heads_of((2,), 20, 8, 600, 16)
    term = draw(20, 600)
    term[1:17, BLOCKS[where]] = lowest
    check(*attention(q, k, v, (term, False), zeros=zeros), CLOSE)


@pytest.mark.parametrize("zeros", ["", "nan", "unseen"])
@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("key", [7, 207, 599])
def test_a_special_number_in_a_block_is_that_of_numpy(special, key, zeros):
    q, k, v = heads_of((2,), 20, 8, 600, 16)
    term = draw(20, 600)
    term[3, key] = term[11] = special
    term[12, :200], term[13, :400] = -np.inf, -np.inf
    check(*attention(q, k, v, (term, False), zeros=zeros), CLOSE)


def test_causal_masks_hide_later_blocks():
    q, k, v = heads_of((2,), 600, 8, 600, 16)
    mask = np.triu(np.full((600, 600), -np.inf, np.float32), 1)
    check(*attention(q, k, v, (mask, True)), CLOSE)


def test_rising_scores_change_the_weights_of_blocks_before():
    q, k, v = heads_of((2,), 20, 8, 600, 16)
    rising = np.linspace(-200, 200, 600, dtype=np.float32)
    for term in (rising, rising[::-1].copy()):  # scores of 200 are rounded by up to 8e-6
        check(*attention(q, k, v, (term, True)), {"rtol": 2e-5, "atol": 2e-5})


def test_large_values_do_not_overflow():
    q, k, v = heads_of((2,), 20, 8, 600, 16)
    check(*attention(q, k, np.full_like(v, 3e38)), {"rtol": 2e-5})


def test_masked_keys_have_no_weight():
    q, k, v = heads_of((2,), 20, 8, 35, 16)
    term = np.where(rng.random((2, 20, 35)) < 0.5, -np.inf, draw(2, 20, 35)).astype(np.float32)
    node, arrays = attention(q, k, v, (term, False))
    check(node, arrays, CLOSE)
    v[...] = np.where(np.isneginf(term).all(1)[..., None], np.float32(1e38), v)
    check(node, arrays, CLOSE)


@pytest.mark.parametrize(
    "lead, queries, keys", [((64, 3), 49, 49), ((1,), 5000, 49), ((3,), 800, 600)]
)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads, lead, queries, keys):
    node, arrays = attention(*heads_of(lead, queries, 32, keys, 32))
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        alone = kernel.function(*arrays)
        with threads_of(library, threads):
            np.testing.assert_array_equal(kernel.function(*arrays), alone)


TOO_WIDE = {"queries": ((2,), 4, 2049, 8, 8), "values": ((2,), 4, 8, 8, 257)}


@pytest.mark.parametrize("what", TOO_WIDE)
def test_wider_heads_are_left_to_others(what):
    node, _ = attention(*heads_of(*TOO_WIDE[what]))
    assert not NativeBackend(LIBRARIES[0]).supports(node)


OTHERS = {"a scale out of range": {"scale": 1e20}, "no scale": {"scale": 0.0}}


@pytest.mark.parametrize("what", OTHERS)
def test_other_scales_are_left_to_others(what):
    node, _ = attention(*heads_of((2,), 20, 8, 49, 16), **OTHERS[what])
    assert not NativeBackend(LIBRARIES[0]).supports(node)


def test_three_terms_are_left_to_others():
    node, _ = attention(*heads_of((2,), 20, 8, 49, 16), *[(draw(49), False)] * 3)
    assert not NativeBackend(LIBRARIES[0]).supports(node)


def test_float64_is_left_to_others():
    q, k, v = [x.astype(float) for x in heads_of((2,), 20, 8, 49, 16)]
    node, _ = attention(q, k, v)
    assert not NativeBackend(LIBRARIES[0]).supports(node)


def test_sessions_run_it():
    text = """g (float[8, 3, 49, 32] q, float[8, 3, 49, 32] k, float[8, 3, 49, 32] v, float[49, 49] m)
        => (float[8, 49, 3, 32] y) <float c = {0.2}> {
            t = Transpose <perm = [0, 1, 3, 2]> (k) s = Mul(q, c) a = MatMul(s, t) b = Add(a, m)
            p = Softmax <axis = -1> (b) z = MatMul(p, v) y = Transpose <perm = [0, 2, 1, 3]> (z) }"""
    session = compile_text(text)
    feeds = {name: draw(8, 3, 49, 32) for name in "qkv"} | {"m": draw(49, 49)}
    numpy = compile_text(text, backends=["numpy"]).run(feeds)
    np.testing.assert_allclose(session.run(feeds)["y"], numpy["y"], **CLOSE)
    (step,) = [e.step for e in session.profile(feeds, runs=1) if e.step.node.op is ATTENTION]
    assert step.backend == "native"


def test_unknown_types_have_no_kernel():
    node, _ = attention(*heads_of((2,), 4, 8, 8, 8))
    q = node.inputs[0]
    node.inputs = (Value("q", TensorType(q.type.dtype, (2, None, 8))), *node.inputs[1:])
    assert not NativeBackend(LIBRARIES[0]).supports(node)
