"""Compiled attention over a cache, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.attention import cached_attention
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.attention import STACKED_ATTENTION
from penstock.ops.registry import MICROSOFT, find
from tests.support.native_kernels import LIBRARIES, pytestmark  # noqa: F401

rng = np.random.default_rng(6)


def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)


def node_of(name, domain, inputs, **attrs):
    op = STACKED_ATTENTION if domain == "penstock" else find(name, domain, 24 if not domain else 1)
    types = [None if x is None else TensorType(x.dtype, (None,) * x.ndim) for x in inputs]
    values = [None if t is None else Value(f"x{i}", t) for i, t in enumerate(types)]
    results = op.infer(types, attrs, [None] * len(types))
    return Node(op, values, [Value(f"y{i}", t) for i, t in enumerate(results[:3])], attrs)


def check(node, inputs, atol=2e-6):
    """Compare results with those of NumPy's kernel, which must not be called."""
    types = [None if value is None else value.type for value in node.inputs]
    wanted = node.op.compile(node, types).function(*inputs)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, types)
        assert kernel is not None
        function, (_, *others) = kernel.function.func, kernel.function.args
        results = function(refused, *others, *inputs)
        for result, want in zip(results, wanted, strict=False):
            np.testing.assert_allclose(result, want, rtol=2e-5, atol=atol)


def refused(*inputs):
    raise AssertionError("there is no kernel for these")


def groups(batch, queries, room, lengths, heads=6, kv_heads=2, size=24, half=0):
    """Inputs of GroupQueryAttention. ``room``: positions of the past."""
    total = max(lengths) + 1
    caches = [draw(batch, kv_heads, room, size) for _ in range(2)]
    angles = [draw(total + 3, half) for _ in range(2)] if half else [None, None]
    numbers = np.array(lengths, np.int32)[:, None], np.array(total, np.int32)
    widths = heads * size, kv_heads * size, kv_heads * size
    return [*[draw(batch, queries, width) for width in widths], *caches, *numbers, *angles]


FORMS = [
    ({}, {}),
    ({"do_rotary": 1}, {"half": 12}),
    ({"do_rotary": 1, "rotary_interleaved": 1}, {"half": 8}),
    ({"local_window_size": 5, "scale": 0.3}, {}),
    ({"softcap": 2.5}, {"size": 33}),
]


@pytest.mark.parametrize("attrs, sizes", FORMS)
def test_steps_over_a_growing_cache_are_close_to_numpy(attrs, sizes):
    for queries, past in ((1, 7), (1, 600), (3, 40), (1, 1)):
        inputs = groups(2, queries, past, [past + queries - 1] * 2, **sizes)
        attrs = {"num_heads": 6, "kv_num_heads": 2, **attrs}
        check(node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs), inputs)


def test_steps_without_angles_may_leave_them_out():
    inputs = groups(1, 1, 5, [5])[:7]
    attrs = {"num_heads": 6, "kv_num_heads": 2}
    check(node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs), inputs)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (2, 1), (6, 2), (7, 1), (20, 4)])
@pytest.mark.parametrize("size", [1, 3, 8, 15, 16, 17, 64, 72, 130])
def test_groups_of_any_number_of_heads_are_close_to_numpy(heads, kv_heads, size):
    attrs = {"num_heads": heads, "kv_num_heads": kv_heads}
    for queries, past in ((1, 1), (1, 15), (1, 300), (2, 256)):
        lengths = [past + queries - 1] * 2
        inputs = groups(2, queries, past, lengths, heads, kv_heads, size)
        check(node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs), inputs)


@pytest.mark.parametrize("attrs, sizes", FORMS)
def test_samples_of_different_lengths_share_a_buffer_with_room(attrs, sizes):
    inputs = groups(3, 1, 32, [4, 31, 17], **sizes)
    attrs = {"num_heads": 6, "kv_num_heads": 2, **attrs}
    check(node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs), inputs)


@pytest.mark.parametrize("attrs, sizes", FORMS)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_prompts_without_a_past_are_close_to_numpy(packed, heads, kv_heads, attrs, sizes):
    attrs = {"num_heads": heads, "kv_num_heads": kv_heads, **attrs}
    # A window would leave nothing to see behind the end of a sample.
    shorter = 8 if "local_window_size" in attrs else 3
    for queries, lengths in ((1, [0, 0]), (7, [6, 6]), (9, [8, shorter]), (300, [299, 299])):
        inputs = groups(2, queries, 0, lengths, heads, kv_heads, **sizes)
        inputs[3:5] = None, None
        if packed:
            inputs[:3] = np.concatenate(inputs[:3], axis=2), None, None
        # NumPy's sums of 300 weights are rounded as often.
        check(node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs), inputs, 1e-5)


@pytest.mark.parametrize("queries, past", [(1, 5), (6, 0), (7, 300)])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_of_onnx_with_an_order_is_close_to_numpy(biased, queries, past):
    parts = [draw(2, heads, queries, 16) for heads in (4, 2, 2)]
    bias = draw(2, 4, queries, past + queries) if biased else None
    inputs = [*parts, bias, draw(2, 2, past, 16), draw(2, 2, past, 16)]
    check(node_of("Attention", "", inputs, is_causal=1), inputs)


@pytest.mark.parametrize("queries, past", [(1, 5), (1, 600), (6, 0), (7, 300)])
@pytest.mark.parametrize("left", [0, 3, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_of_onnx_with_a_window_is_close_to_numpy(biased, left, queries, past):
    parts = [draw(2, heads, queries, 16) for heads in (4, 2, 2)]
    bias = draw(2, 4, queries, past + queries) if biased else None
    inputs = [*parts, bias, draw(2, 2, past, 16), draw(2, 2, past, 16)]
    attrs = {"is_causal": 1, "left_window_size": left, "softcap": 3.0}
    check(node_of("Attention", "", inputs, **attrs), inputs, 1e-5)


def test_window_without_an_order_has_no_kernel():
    inputs = [*[draw(1, 2, 3, 8) for _ in range(3)], None, *[draw(1, 2, 4, 8) for _ in range(2)]]
    node = node_of("Attention", "", inputs, left_window_size=2)
    types = [value and value.type for value in node.inputs]
    assert all(cached_attention(library, node, types) is None for library in LIBRARIES)


@pytest.mark.parametrize("mask", [None, (1, 1, 1, 9), (2, 4, 3, 9), (2, 1, 3, 9), (1, 4, 1, 9)])
@pytest.mark.parametrize("flat", [False, True])
def test_attention_of_onnx_over_a_past_is_close_to_numpy(mask, flat):
    bias = None if mask is None else draw(*mask)
    parts = [draw(2, 4, 3, 16), draw(2, 2, 3, 16), draw(2, 2, 3, 20)]
    attrs = {"q_num_heads": 4, "kv_num_heads": 2} if flat else {"softcap": 3.0}
    if flat:
        parts = [x.transpose(0, 2, 1, 3).reshape(2, 3, -1) for x in parts]
    inputs = [*parts, bias, draw(2, 2, 6, 16), draw(2, 2, 6, 20)]
    check(node_of("Attention", "", inputs, **attrs), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries, past", [(1, 5), (1, 600), (3, 40), (6, 0)])
def test_attention_over_a_stacked_past_is_close_to_numpy(masked, queries, past):
    parts = [draw(2, queries, width) for width in (4 * 24, 2 * 24, 2 * 24)]
    mask = draw(2, 1, 1, past + queries) if masked else None
    inputs = [*parts, mask, draw(2, 2, 2, past, 24)]
    attrs = {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1}
    check(node_of("StackedAttention", "penstock", inputs, **attrs), inputs)


def test_present_of_a_stacked_past_grows_where_that_is():
    for library in LIBRARIES:
        past, copies = draw(2, 2, 3, 5, 16), 0
        for _ in range(12):
            inputs = [*[draw(2, 3, 1, 16) for _ in range(3)], None, past]
            node = node_of("StackedAttention", "penstock", inputs)
            types = [value and value.type for value in node.inputs]
            before, wanted = past.copy(), node.op.compile(node, types).function(*inputs)
            results = cached_attention(library, node, types).function(*inputs)
            for result, want in zip(results, wanted, strict=True):
                np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-6)
            np.testing.assert_array_equal(past, before)
            copies += not np.shares_memory(past, results[1])
            past = results[1]
        assert copies == 1


@pytest.mark.parametrize("shape", [(1, 1, 2, 4, 8), (2, 1, 2, 4, 9), (1, 2, 4, 8), (2, 2, 2, 4, 8)])
def test_stacked_pasts_that_do_not_fit_are_left_to_numpy(shape):
    inputs = [*[draw(1, 2, 1, 8) for _ in range(3)], None, draw(2, 1, 2, 4, 8)]
    node = node_of("StackedAttention", "penstock", inputs)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, [value and value.type for value in node.inputs])
        function, (_, *others) = kernel.function.func, kernel.function.args
        assert function(lambda *x: "NumPy", *others, *inputs[:4], draw(*shape)) == "NumPy"


DECODER = "DecoderMaskedMultiHeadAttention"


def buffers(room=9, used=4, size=24, **changes):
    """Inputs of DecoderMaskedMultiHeadAttention, which has three heads."""
    parts = [draw(2, 1, 3 * size) for _ in range(3)]
    pasts = [draw(2, 3, room, size) for _ in range(2)]
    inputs = [*parts, None, None, *pasts, np.array([used], np.int32), None, None, None]
    return changed(inputs, **changes)


@pytest.mark.parametrize("room, used", [(9, 0), (9, 4), (9, 8), (600, 400), (1, 0)])
@pytest.mark.parametrize("attrs", [{}, {"scale": 0.3}, {"unidirectional": 1}])
def test_attention_over_a_buffer_is_close_to_numpy(attrs, room, used):
    inputs = buffers(room, used)
    check(node_of(DECODER, MICROSOFT, inputs, num_heads=3, **attrs), inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"x7": np.array([9], np.int32)},
        {"x7": np.array([-1], np.int32)},
        {"x7": np.array([4, 4], np.int32)},
        {"x3": np.ones((2, 5), np.int32)},
        {"x4": draw(2, 3, 1, 5)},
        {"x6": draw(2, 3, 8, 24)},
        {"x9": np.zeros((1, 2, 9), np.int32)},
        {"x10": draw(216)},
    ],
)
def test_buffers_that_do_not_fit_are_left_to_numpy(changes):
    node = node_of(DECODER, MICROSOFT, buffers(), num_heads=3)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, [value and value.type for value in node.inputs])
        function, (_, *others) = kernel.function.func, kernel.function.args
        assert function(lambda *inputs: "NumPy", *others, *buffers(**changes)) == "NumPy"


VISIBLE = np.tril(rng.random((2, 5, 5)) < 0.5) | np.eye(5, dtype=bool)


def blocks(queries, lengths, layouts=2, block=16, size=24, half=0, **changes):
    """Inputs of SparseAttention, with rows of blocks of which each sees itself."""
    total = max(lengths)
    inputs = groups(2, queries, 5 * block, [n - 1 for n in lengths], 4, 2, size, half)
    seen = VISIBLE[:layouts]
    starts = np.concatenate([np.zeros((layouts, 1)), np.cumsum(seen.sum(2), 1)], 1)
    columns = np.full((layouts, seen.sum((1, 2)).max()), -1, np.int32)
    for row, of in zip(columns, seen, strict=True):
        row[: of.sum()] = np.nonzero(of)[1]
    numbers = [np.array(total, np.int32), np.array(lengths, np.int32)]
    angles = inputs[7:] if half else []
    return changed([*inputs[:5], starts.astype(np.int32), columns, *numbers, *angles], **changes)


SPARSE = {"num_heads": 4, "kv_num_heads": 2, "sparse_block_size": 16}


@pytest.mark.parametrize("layouts", [1, 2])
@pytest.mark.parametrize("half", [0, 12])
@pytest.mark.parametrize(
    "queries, lengths", [(80, [80, 80]), (37, [37, 37]), (1, [38, 80]), (1, [5, 21]), (5, [30, 41])]
)
def test_attention_to_blocks_is_close_to_numpy(queries, lengths, half, layouts):
    inputs, attrs = blocks(queries, lengths, layouts, half=half), {"do_rotary": int(half > 0)}
    check(node_of("SparseAttention", MICROSOFT, inputs, **SPARSE, **attrs), inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"x5": np.zeros((2, 6), np.int32)},  # queries that see nothing
        {"x5": np.ones((2, 6), np.int32)},
        {"x5": np.full((2, 6), 2**31 - 1, np.int32)},
        {"x5": np.zeros((2, 1), np.int32)},
        {"x5": np.zeros((3, 6), np.int32)},
        {"x6": np.full((2, 40), 5, np.int32)},
        {"x6": np.full((2, 40), -1, np.int32)},
        {"x6": np.zeros((2, 40), np.int32)},
        {"x6": np.zeros((2, 2), np.int32)},
        {"x7": np.array(81, np.int32)},
        {"x8": np.array([81, 38], np.int32)},
        {"x8": np.array([0, 38], np.int32)},
        {"x8": np.array([-(2**31), 38], np.int32)},
    ],
)
def test_blocks_that_do_not_fit_are_left_to_numpy(changes):
    node = node_of("SparseAttention", MICROSOFT, blocks(1, [38, 80]), **SPARSE)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, [value and value.type for value in node.inputs])
        function, (_, *others) = kernel.function.func, kernel.function.args
        inputs = blocks(1, [38, 80], **changes)
        assert function(lambda *inputs: "NumPy", *others, *inputs) == "NumPy"


@pytest.mark.parametrize("queries", [1, 3])
def test_present_of_a_growing_cache_is_where_the_past_is(queries):
    attrs = {"num_heads": 6, "kv_num_heads": 2, "do_rotary": 1}
    for library in LIBRARIES:
        past, copies = [draw(2, 2, 5, 24) for _ in range(2)], 0
        for step in range(12):
            length = 5 + step * queries
            inputs = groups(2, queries, length, [length + queries - 1] * 2, half=12)
            inputs[3:5] = past
            node = node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs)
            types = [None if value is None else value.type for value in node.inputs]
            before = [x.copy() for x in past]
            wanted = node.op.compile(node, types).function(*inputs)
            results = cached_attention(library, node, types).function(*inputs)
            for result, want in zip(results, wanted, strict=True):
                np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-6)
            for old, kept, new in zip(past, before, results[1:], strict=True):
                np.testing.assert_array_equal(old, kept)
                copies += not np.shares_memory(old, new)
            past = results[1:]
        assert copies == (2 if queries == 1 else 4)


def test_samples_that_end_before_the_cache_get_a_present_of_their_own():
    attrs = {"num_heads": 6, "kv_num_heads": 2}
    for library in LIBRARIES:
        inputs = groups(2, 1, 8, [8, 8])
        node = node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs)
        types = [None if value is None else value.type for value in node.inputs]
        function = cached_attention(library, node, types).function
        _, *inputs[3:5] = function(*inputs)
        shared = [x.copy() for x in inputs[3:5]]
        inputs[5:7] = np.array([[4], [9]], np.int32), np.array(10, np.int32)
        _, *present = function(*inputs)
        for old, kept, new in zip(inputs[3:5], shared, present, strict=True):
            assert not np.shares_memory(old, new)
            np.testing.assert_array_equal(old, kept)


def changed(inputs, **changes):
    return [changes.get(f"x{i}", x) for i, x in enumerate(inputs)]


@pytest.mark.parametrize(
    "changes",
    [
        {"x5": np.array([[9]], np.int32)},  # beyond the total
        {"x5": np.array([[-1]], np.int32)},
        {"x6": np.array(2**31 - 1, np.int32)},
        {"x6": np.array(-1, np.int32)},
        {"x3": draw(1, 2, 3, 24), "x4": draw(1, 2, 3, 24)},  # shorter than the past
        {"x4": draw(1, 2, 5, 24)},
        {"x7": draw(2, 12)},  # fewer angles than positions
        {"x8": draw(11, 9)},
        {"x1": draw(1, 2, 48)},
        {"x0": draw(1, 1, 145)},
        {"x0": draw(1, 1, 144) * np.nan},
    ],
)
def test_inputs_that_do_not_fit_are_left_to_numpy(changes):
    inputs = groups(1, 1, 8, [8], half=12)
    attrs = {"num_heads": 6, "kv_num_heads": 2, "do_rotary": 1}
    node = node_of("GroupQueryAttention", MICROSOFT, inputs, **attrs)
    types = [value.type for value in node.inputs]
    for library in LIBRARIES:
        kernel = cached_attention(library, node, types)
        function, (_, *others) = kernel.function.func, kernel.function.args
        assert function(lambda *inputs: "NumPy", *others, *changed(inputs, **changes)) == "NumPy"


def hidden(heads, begin, end, value=-np.inf):
    """A step over 800 positions, some of which a mask hides from one of the heads."""
    mask = np.zeros((1, heads, 1, 800), np.float32)
    mask[:, 1, :, begin:end] = value
    inputs = [draw(1, heads, 1, 8), *[draw(1, 2, 1, 8) for _ in range(2)], mask]
    return [*inputs, *[draw(1, 2, 799, 8) for _ in range(2)]]


@pytest.mark.parametrize("begin, end", [(0, 1), (0, 256), (0, 799), (255, 799), (300, 800)])
def test_masks_that_hide_whole_blocks_of_keys_are_close_to_numpy(begin, end):
    inputs = hidden(8, begin, end)
    check(node_of("Attention", "", inputs), inputs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_masks_that_are_not_finite_are_left_to_numpy(value):
    inputs = hidden(8, 0, 700)
    inputs[3][0, 1, 0, 5] = value
    node = node_of("Attention", "", inputs)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, [value.type for value in node.inputs])
        function, (_, *others) = kernel.function.func, kernel.function.args
        assert function(lambda *inputs: "NumPy", *others, *inputs) == "NumPy"


def test_masks_that_hide_all_keys_are_left_to_numpy():
    inputs = [*[draw(1, 2, 1, 8) for _ in range(3)], np.full((1, 1, 1, 4), -np.inf, np.float32)]
    inputs += [draw(1, 2, 3, 8) for _ in range(2)]
    node = node_of("Attention", "", inputs)
    for library in LIBRARIES:
        kernel = cached_attention(library, node, [value.type for value in node.inputs])
        function, (_, *others) = kernel.function.func, kernel.function.args
        assert function(lambda *inputs: "NumPy", *others, *inputs) == "NumPy"
