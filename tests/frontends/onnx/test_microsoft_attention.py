"""Attention of ONNX Runtime, written as ONNX's operations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.frontends.onnx.importer import load_onnx
from tests.ops.harness import run_ort
from tests.support.contrib import check_contrib, contrib_model
from tests.support.onnx_text import model_from_text
from tests.support.random_arrays import normal, uniform_codes, uniform_scales

rng = np.random.default_rng(0)
draw = partial(normal, rng)
codes = partial(uniform_codes, rng)
scales = partial(uniform_scales, rng)


MASKS = {
    "none": None,
    "2d": np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], np.int32),
    "3d": rng.integers(0, 2, (2, 5, 5)).astype(np.int32) | np.eye(5, dtype=np.int32),
    "ends": np.array([3, 5], np.int32),
    "spans": np.array([3, 5, 1, 0], np.int32),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("added", [None, (2, 2, 5, 5), (1, 1, 5, 5)])
@pytest.mark.parametrize(
    "attrs", [{}, {"scale": 0.3}, {"qkv_hidden_sizes": [8, 8, 12]}, {"unidirectional": 1}]
)
def test_attention_matches_onnx_runtime(mask: str, added: Any, attrs: Mapping[str, Any]) -> None:
    total = sum(attrs.get("qkv_hidden_sizes", (24,)))
    inputs = [draw(2, 5, 6), draw(6, total), draw(total), MASKS[mask], None]
    inputs += [draw(*added)] if added else []
    while inputs[-1] is None:
        inputs.pop()
    check_contrib("Attention", inputs, {"num_heads": 2, **attrs}, constants=[1, 2], untyped=False)


@pytest.mark.parametrize("mask", [None, "keys", "queries", "ends"])
@pytest.mark.parametrize("attrs", [{}, {"unidirectional": 1, "mask_filter_value": -3.0}])
def test_attention_over_a_past_matches_onnx_runtime(mask: Any, attrs: Mapping[str, Any]) -> None:
    seen = rng.random((2, 3, 7)) < 0.7
    masks = {"keys": seen[:, 0], "queries": seen, "ends": np.array([5, 7])}
    given = None if mask is None else masks[mask].astype(np.int32)
    past, attrs = draw(2, 2, 2, 4, 4), {"num_heads": 2, **attrs}
    inputs = [draw(2, 3, 6), draw(6, 24), draw(24), given, past]
    check_contrib("Attention", inputs, attrs, constants=[1, 2], untyped=False, outputs=2)
    inputs = [*[draw(2, 3, 8) for _ in range(3)], None, given, None, *past]
    check_contrib("MultiHeadAttention", inputs, attrs, untyped=False, outputs=3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_attention_over_a_buffer_matches_onnx_runtime(mask: bool, bias: bool) -> None:
    seen = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], np.int32) if mask else None
    parts, pasts = [draw(2, 1, 8) for _ in range(3)], [draw(2, 2, 6, 4) for _ in range(2)]
    inputs = [*parts, seen, None, *pasts, np.array([3], np.int32)]
    inputs += [None, None, draw(24)] if bias else []
    attrs = {"num_heads": 2, "past_present_share_buffer": 1}
    check_contrib("DecoderMaskedMultiHeadAttention", inputs, attrs, outputs=3)


def test_attention_of_weights_that_are_fed_matches_onnx_runtime() -> None:
    check_contrib("Attention", [draw(2, 5, 6), draw(6, 24), draw(24)], {"num_heads": 2})


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("mask", ["none", "2d", "ends"])
def test_qattention_matches_onnx_runtime(per_column: bool, dtype: Any, mask: str) -> None:
    columns = (24,) if per_column else ()
    inputs = [codes(np.uint8, 2, 5, 6), codes(dtype, 6, 24), draw(24), scales(), scales(*columns)]
    zero = np.zeros(columns, dtype) + dtype(3)
    inputs += [MASKS[mask], np.array(120, np.uint8), np.asarray(zero, dtype)]
    check_contrib("QAttention", inputs, {"num_heads": 2}, constants=[1, 2, 3, 4, 6, 7],
                  untyped=False, atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_qattention_with_any_mask_and_past_matches_onnx_runtime(
    mask: str, past: bool, typed: bool
) -> None:
    """The optimizer and then the quantizer of ONNX Runtime write such nodes of a text model, with
    the ends of rows as mask and without the sizes of the batch."""
    seen = MASKS[mask]
    if past and seen is not None:  # four more keys, all of them visible
        ends = np.array([4, 4, 0, 0][: seen.size], np.int32)
        more = [(0, 0)] * (seen.ndim - 1) + [(4, 0)]
        seen = seen + ends if seen.ndim == 1 else np.pad(seen, more, constant_values=1)
    inputs = [codes(np.uint8, 2, 5, 6), codes(np.int8, 6, 24), draw(24), scales(), scales()]
    inputs += [seen, np.array(120, np.uint8), np.array(0, np.int8)]
    inputs += [draw(2, 2, 2, 4, 4)] if past else []
    attrs = {"num_heads": 2, "unidirectional": int(past)}
    wanted = run_ort(contrib_model("QAttention", inputs, attrs, outputs=1 + past), inputs)
    constants = [1, 2, 3, 4, 6, 7]
    model = contrib_model(
        "QAttention", inputs, attrs, outputs=1 + past, typed=typed, constants=constants
    )
    fed = {f"x{i}": x for i, x in enumerate(inputs) if i in (0, 5, 8) and x is not None}
    results = ps.compile(model, cache=False).run(fed)
    for got, want in zip(results.values(), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mask", ["none", "2d", "3d", "ends"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("added", [None, (2, 2, 5, 5), (1, 1, 5, 5)])
def test_multi_head_attention_matches_onnx_runtime(mask: str, bias: bool, added: Any) -> None:
    q, k, v = draw(2, 5, 8), draw(2, 5, 8), draw(2, 5, 12)
    inputs = [q, k, v, draw(28) if bias else None, MASKS[mask], draw(*added) if added else None]
    while inputs[-1] is None:
        inputs.pop()
    check_contrib("MultiHeadAttention", inputs, {"num_heads": 2}, untyped=False)


def test_attention_of_sizes_that_are_known_leaves_no_operation_of_onnx_runtime() -> None:
    x = draw(2, 5, 8)
    for op, inputs in (
        ("Attention", [x, draw(8, 24), draw(24), MASKS["ends"]]),
        ("MultiHeadAttention", [x, x, x, draw(24), MASKS["2d"]]),
    ):
        nodes = load_onnx(contrib_model(op, inputs, {"num_heads": 2})).graph.nodes
        assert all(node.op.domain == "" for node in nodes)


@pytest.mark.parametrize(
    "attrs", [{"num_heads": 5}, {"num_heads": 0}, {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 9]}]
)
def test_attention_of_heads_that_do_not_fit_is_refused(attrs: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidModel, match="which are not those of"):
        ps.load(contrib_model("Attention", [draw(2, 5, 6), draw(6, 24), draw(24)], attrs))


def test_attention_to_embedded_rows_is_written_out_where_batches_have_two_names() -> None:
    """The ends of rows, which EmbedLayerNormalization counts in its mask, have the batch of ids."""
    proto = model_from_text(
        "g (int32[A, B] x0, int32[C, B] x1) => (float[A, B, 8] y) {"
        "x, ends = com.microsoft.EmbedLayerNormalization (x0, , w, p, , s, s, x1)"
        "y = com.microsoft.Attention <num_heads = 2> (x, qkv, bias, ends) }"
    )
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    weights = {"w": (9, 8), "p": (5, 8), "s": (8,), "qkv": (8, 24), "bias": (24,)}
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(draw(*shape), name) for name, shape in weights.items()
    )
    assert all(not node.op.domain for node in load_onnx(proto).graph.nodes)
    ids = rng.integers(0, 9, (2, 5)).astype(np.int32)
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    got = ps.compile(proto, cache=False).run({"x0": ids, "x1": mask})["y"]
    np.testing.assert_allclose(got, run_ort(proto, [ids, mask])[0], rtol=1e-4, atol=1e-5)
