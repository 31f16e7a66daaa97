"""ONNX's Attention, in all its versions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from penstock.core.types import INT64, ShapeError, TensorType
from penstock.ops import find
from penstock.ops.onnx import attention
from tests.ops.harness import check_node

rng = np.random.default_rng(1)
FLOAT = np.dtype(np.float32)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def inputs(
    rank: int = 4,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    queries: int = 5,
    keys: int = 6,
    size: int = 8,
    value_size: int = 8,
    dtype: Any = np.float32,
) -> list[Any]:
    q = normal(batch, heads, queries, size, dtype=dtype)
    k = normal(batch, kv_heads, keys, size, dtype=dtype)
    v = normal(batch, kv_heads, keys, value_size, dtype=dtype)
    if rank == 4:
        return [q, k, v]
    return [x.transpose(0, 2, 1, 3).reshape(batch, x.shape[2], -1) for x in (q, k, v)]


def attributes(rank: int, heads: int = 4, kv_heads: int = 4, **more: Any) -> dict[str, Any]:
    if rank == 3:
        more.update(q_num_heads=heads, kv_num_heads=kv_heads)
    return more


def check(values: list[Any], attrs: dict[str, Any], **more: Any) -> list[np.ndarray]:
    while values[-1] is None:
        values = values[:-1]
    return check_node("Attention", values, attrs, rtol=1e-4, atol=1e-5, **more)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("value_size", [8, 3])
@pytest.mark.parametrize("opset", [23, 24, 25])
def test_attention_of_all_layouts_equals_reference(
    rank: int, kv_heads: int, value_size: int, opset: int
) -> None:
    values = inputs(rank, kv_heads=kv_heads, value_size=value_size)
    check(values, attributes(rank, kv_heads=kv_heads), opset=opset)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_onnx_runtime(
    rank: int, kv_heads: int, causal: int, past: int, masked: bool
) -> None:
    values = [*inputs(rank, kv_heads=kv_heads, queries=6), None, None, None]
    if masked:
        values[3] = normal(2, 4, 6, 6 + past)
    if past:
        values[4:] = [normal(2, kv_heads, past, 8) for _ in range(2)]
    attrs = attributes(rank, kv_heads=kv_heads, is_causal=causal)
    check(values, attrs, outputs=3 if past else 1, expected="ort", opset=23)


MASKS = [(5, 6), (1, 6), (5, 1), (4, 5, 6), (1, 5, 6), (2, 4, 5, 6), (2, 1, 1, 6), (6,), (5, 4)]


@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("kind", [bool, np.float32])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_masks_of_all_shapes_broadcast(
    shape: tuple[int, ...], kind: Any, causal: int, kv_heads: int
) -> None:
    mask = rng.random(shape) < 0.6 if kind is bool else normal(*shape)
    values = [*inputs(kv_heads=kv_heads), mask]
    # The reference is causal only for the queries that the mask has by name.
    full = np.broadcast_to(mask, (2, 4, 5, mask.shape[-1])).copy()
    want = check([*values[:3], full], {"is_causal": causal})
    check(values, {"is_causal": causal}, expected=want)


@pytest.mark.parametrize("kind", [np.int32, np.uint8])
def test_attention_mask_of_integers_is_added(kind: Any) -> None:
    mask = rng.integers(0, 3, (5, 6)).astype(kind)
    values = inputs()
    want = check([*values, mask.astype(np.float32)], {})
    check([*values, mask], {}, expected=want)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("outputs", [1, 3, 4, [True, False, False, True], [True, True, False]])
def test_attention_with_past_extends_keys(rank: int, causal: int, outputs: Any) -> None:
    if outputs == [True, True, False]:
        outputs = [True, True]
    values = [*inputs(rank, kv_heads=2), None, normal(2, 2, 7, 8), normal(2, 2, 7, 8)]
    check(values, attributes(rank, kv_heads=2, is_causal=causal), outputs=outputs)


def test_attention_present_without_past_is_the_input() -> None:
    check(inputs(3), attributes(3), outputs=3)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("kind", [None, bool, np.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_shows_scores_of_each_stage(
    mode: int, softcap: float, kind: Any, kv_heads: int
) -> None:
    values = inputs(kv_heads=kv_heads)
    if kind is not None:
        values.append(rng.random((5, 6)) < 0.6 if kind is bool else normal(5, 6))
    attrs = {"qk_matmul_output_mode": mode, "softcap": softcap}
    if mode == 0 and softcap:  # the reference shows mode 1 here, against the schema
        raw = check(values, {"qk_matmul_output_mode": 0}, outputs=[True, *[False] * 2, True])[1]
        capped = check(values, {**attrs, "qk_matmul_output_mode": 1}, outputs=4)
        check(values, attrs, outputs=4, expected=[*capped[:3], raw])
        return
    check(values, attrs, outputs=4)


@pytest.mark.parametrize("left", [-1, 0, 2])
@pytest.mark.parametrize("right", [-1, 0, 1])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("cache", [None, "past", "external"])
def test_attention_windows_hide_distant_keys(
    left: int, right: int, causal: int, cache: str | None
) -> None:
    values = [*inputs(), None, None, None, None]
    if cache == "past":
        values[4:6] = [normal(2, 4, 3, 8) for _ in range(2)]
    elif cache == "external":
        values[6] = np.array([6, 4])
    attrs = {"left_window_size": left, "right_window_size": right, "is_causal": causal}
    check(values, attrs, opset=25)


@pytest.mark.parametrize("lengths", [[6, 3], [2, 5], [0, 6]])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kind", [None, bool, np.float32])
@pytest.mark.parametrize("rank", [3, 4])
def test_attention_external_cache_hides_padding(
    lengths: list[int], causal: int, kind: Any, rank: int
) -> None:
    mask = None
    if kind is not None:
        mask = rng.random((5, 6)) < 0.6 if kind is bool else normal(5, 6)
    values = [*inputs(rank), mask, None, None, np.array(lengths)]
    check(values, attributes(rank, is_causal=causal), opset=24)


def test_attention_rows_without_keys_are_zero() -> None:
    mask = np.ones((5, 6), bool)
    mask[2] = False
    (y, probabilities) = check(
        [*inputs(), mask], {"qk_matmul_output_mode": 3}, outputs=[True, False, False, True]
    )
    assert not y[:, :, 2].any()
    assert not probabilities[:, :, 2].any()


@pytest.mark.parametrize("scale", [0.0, 0.25, 3.0])
def test_attention_scale_replaces_default(scale: float) -> None:
    check(inputs(), {"scale": scale})


@pytest.mark.parametrize("precision", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_attention_softmax_precision_keeps_results(precision: str) -> None:
    """At least the precision asked for."""
    values = inputs()
    want = check_node("Attention", values, atol=1e-5)
    code = getattr(TensorProto, precision)
    check_node("Attention", values, {"softmax_precision": code}, expected=want)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-6), (np.float16, 5e-3), (ml_dtypes.bfloat16, 3e-2)]
)
def test_attention_dtypes_equal_reference(dtype: Any, tolerance: float) -> None:
    values = [*inputs(dtype=dtype), normal(5, 6, dtype=dtype)]
    values += [normal(2, 4, 2, 8, dtype=dtype) for _ in range(2)]
    values[3] = normal(5, 8, dtype=dtype)
    wide = [x.astype(np.float32) for x in values]
    want = [y.astype(dtype) for y in check_node("Attention", wide, outputs=3, atol=1e-5)]
    check_node("Attention", values, outputs=3, expected=want, rtol=tolerance, atol=tolerance)


def test_attention_values_may_have_another_dtype() -> None:
    values = inputs()
    want = check_node("Attention", values, atol=1e-5)
    values[2] = values[2].astype(np.float64)
    check_node("Attention", values, expected=want, atol=1e-5)


@pytest.mark.parametrize("nbytes", [1, 200, 700, 3000])
def test_attention_in_blocks_equals_whole(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few of the scores are computed at a time."""
    monkeypatch.setattr(attention, "_BLOCK_BYTES", nbytes)
    mask = rng.random((2, 1, 7, 11)) < 0.6
    for kv_heads in (4, 2, 1):
        for rank in (3, 4):
            values = [*inputs(rank, batch=2, kv_heads=kv_heads, queries=7, keys=9), mask]
            values += [normal(2, kv_heads, 2, 8), normal(2, kv_heads, 2, 8)]
            attrs = attributes(rank, kv_heads=kv_heads, is_causal=1, qk_matmul_output_mode=2)
            check(values, attrs, outputs=[True, False, False, True])


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"value_size": 0}])
def test_attention_of_empty_inputs_is_empty(sizes: dict[str, int]) -> None:
    values = inputs(**sizes)
    want = np.zeros((*values[0].shape[:3], values[2].shape[3]), np.float32)
    check(values, {}, expected=[want])


def test_attention_reads_strided_inputs() -> None:
    q, k, v = inputs(queries=6)
    packed = np.stack([q, k, v], -1)
    check([packed[..., i] for i in range(3)], {})


@pytest.mark.parametrize(
    ("change", "attrs"),
    [
        ({0: (2, 4, 5, 7)}, {}),
        ({0: (3, 4, 5, 8)}, {}),
        ({0: (2, 3, 5, 8)}, {}),
        ({0: (5, 8)}, {}),
        ({0: (2, 5, 32)}, {}),
        ({0: (2, 5, 31)}, {"q_num_heads": 4, "kv_num_heads": 4}),
        ({2: (2, 4, 7, 8)}, {}),
        ({2: (2, 2, 6, 8)}, {}),
        ({3: (5, 7)}, {}),
        ({3: (4, 6)}, {}),
        ({3: (3, 5, 6)}, {}),
        ({4: (2, 4, 3, 8)}, {}),
        ({4: (2, 4, 3, 8), 5: (2, 4, 2, 8)}, {}),
        ({4: (2, 4, 3, 9), 5: (2, 4, 3, 8)}, {}),
        ({}, {"left_window_size": -2}),
    ],
)
def test_attention_of_wrong_shapes_raises(
    change: dict[int, tuple[int, ...]], attrs: dict[str, Any]
) -> None:
    values: list[Any] = [*inputs(), None, None, None]
    for index, shape in change.items():
        values[index] = normal(*shape)
    while values[-1] is None:
        values.pop()
    with pytest.raises(ShapeError):
        check_node("Attention", values, attrs, expected=[None])


def test_attention_past_and_lengths_exclude_each_other() -> None:
    values = [*inputs(), None, normal(2, 4, 3, 8), normal(2, 4, 3, 8), np.array([1, 2])]
    with pytest.raises(ShapeError):
        check_node("Attention", values, expected=[None])


def test_attention_infers_known_dims() -> None:
    op = find("Attention")
    assert op is not None
    q, k = TensorType(FLOAT, ("b", "s", 32)), TensorType(FLOAT, (None, "t", 16))
    attrs = {"q_num_heads": 4, "kv_num_heads": 2}
    kinds = op.infer([q, k, k], attrs, [None] * 3)
    assert [kind.shape for kind in kinds] == [
        ("b", "s", 32),
        ("b", 2, "t", 8),
        ("b", 2, "t", 8),
        ("b", 4, "s", "t"),
    ]
    past = TensorType(FLOAT, ("b", 2, "p", 8))
    kinds = op.infer([q, k, k, None, past, past], attrs, [None] * 6)
    assert [kind.shape for kind in kinds[1:3]] == [("b", 2, None, 8)] * 2
    lengths = TensorType(INT64, ("b",))
    kinds = op.infer([TensorType()] * 3 + [None] * 3 + [lengths], {}, [None] * 7)
    assert kinds[0] == TensorType()
