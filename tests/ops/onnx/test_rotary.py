"""RotaryEmbedding of ONNX and of com.microsoft."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import PenstockError
from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node
from tests.support.contrib import check_contrib, contrib_model

rng = np.random.default_rng(6)
B, H, S, D, M = 2, 3, 4, 8, 10
FLOAT = np.dtype(np.float32)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def inputs(rank: int, positions: bool, turning: int = D, dtype: Any = np.float32) -> list[Any]:
    x = normal(B, H, S, D, dtype=dtype) if rank == 4 else normal(B, S, H * D, dtype=dtype)
    caches = (M, turning // 2) if positions else (B, S, turning // 2)
    values = [x, normal(*caches, dtype=dtype), normal(*caches, dtype=dtype)]
    return [*values, rng.integers(0, M, (B, S))] if positions else values


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("turning", [0, 2, 4])
def test_rotary_matches_the_reference(
    rank: int, positions: bool, interleaved: int, turning: int
) -> None:
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": turning}
    if rank == 3:
        attrs["num_heads"] = H
    check_node("RotaryEmbedding", inputs(rank, positions, turning or D), attrs)


def test_rotary_equals_onnx_runtime() -> None:
    check_node("RotaryEmbedding", inputs(4, True), expected="ort", opset=23)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("start", [None, 0, 5])
@pytest.mark.parametrize("turning", [0, 4])
def test_rotary_microsoft_matches_the_reference(
    rank: int, interleaved: int, start: int | None, turning: int
) -> None:
    x, cos, sin, positions = inputs(rank, True, turning or D)
    if start is not None:
        positions = np.array([start])
    attrs = {"interleaved": interleaved}
    if turning:
        attrs.update(rotary_embedding_dim=turning, num_heads=H)
    values = [x, positions, cos, sin]
    check_node("RotaryEmbedding", values, attrs, domain="com.microsoft", opset=1, expected="ort")


@pytest.mark.parametrize("attrs", [{"scale": 2.0}, {"is_packed_batching": 1}])
def test_rotary_microsoft_ignores_attributes_as_onnx_runtime_does(attrs: dict[str, Any]) -> None:
    x, cos, sin, positions = inputs(4, True)
    values = [x, positions, cos, sin]
    check_node("RotaryEmbedding", values, attrs, domain="com.microsoft", opset=1, expected="ort")


@pytest.mark.parametrize("section", [[2, 1, 1], [1, 1, 2], [4, 0, 0], [0, 2, 2], [2, 2, 0]])
@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("rank", [3, 4])
def test_rotary_of_three_positions_matches_onnx_runtime(
    section: list[int], layout: int, interleaved: int, rank: int
) -> None:
    x, cos, sin, _ = inputs(rank, True)
    values = [x, rng.integers(0, M, (3, B, S)), cos, sin]
    attrs = {"mrope_section": section, "mrope_layout": layout, "interleaved": interleaved}
    attrs["num_heads"] = H
    check_contrib("MRotaryEmbedding", values, attrs, constants=[2, 3])


@pytest.mark.parametrize(
    ("attrs", "positions"),
    [
        ({}, np.zeros((3, B, S))),
        ({"mrope_section": [2, 1, 2]}, np.zeros((3, B, S))),
        ({"mrope_section": [2, 2]}, np.zeros((3, B, S))),
        ({"mrope_section": [4, 0, 0]}, np.zeros((B, S))),
        ({"mrope_section": [2, 1, 1]}, np.zeros((2, B, S))),
        ({"mrope_section": [2, 1, 1]}, np.zeros((3, B, S + 1))),
        ({"mrope_section": [2, 1, 1]}, np.full((3, B, S), -1)),
        ({"mrope_section": [2, 1, 1]}, np.full((3, B, S), M)),
    ],
)
@pytest.mark.parametrize("typed", [False, True])
def test_rotary_of_three_positions_with_misfit_inputs_is_refused(
    attrs: dict[str, Any], positions: np.ndarray, typed: bool
) -> None:
    x, cos, sin, _ = inputs(4, True)
    values = [x, positions.astype(np.int64), cos, sin]
    with pytest.raises(PenstockError):
        model = contrib_model("MRotaryEmbedding", values, attrs, typed=typed)
        ps.compile(model).run({f"x{i}": value for i, value in enumerate(values)})


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rotary_of_gemma_matches_its_definition(dtype: Any) -> None:
    emb = normal(B, S, D)
    q, turned_q, k, turned_k = (normal(B, h, S, D, dtype=dtype) for h in (H, H, 1, 1))
    cos, sin = np.cos(emb)[:, None], np.sin(emb)[:, None]
    want = [(x * cos + y * sin).astype(dtype) for x, y in ((q, turned_q), (k, turned_k))]
    values = [emb, q, turned_q, k, turned_k]
    options: dict[str, Any] = {"domain": "com.microsoft", "opset": 1, "outputs": 2}
    check_node("GemmaRotaryEmbedding", values, expected=want, rtol=1e-3, atol=1e-3, **options)
    with pytest.raises(ShapeError):
        values[2] = turned_k
        check_node("GemmaRotaryEmbedding", values, expected=want, **options)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float16, 1e-2), (ml_dtypes.bfloat16, 5e-2)])
def test_rotary_of_every_dtype_matches_the_definition(dtype: Any, tol: float) -> None:
    values = inputs(4, True, dtype=dtype)
    wide = [x.astype(np.float32) if i < 3 else x for i, x in enumerate(values)]
    (want,) = check_node("RotaryEmbedding", wide)
    check_node("RotaryEmbedding", values, expected=[want.astype(dtype)], rtol=tol, atol=tol)


@pytest.mark.parametrize("bad", [-1, M])
def test_rotary_positions_out_of_range(bad: int) -> None:
    values = inputs(4, True)
    values[3][1, 2] = bad
    with pytest.raises(ShapeError, match="position_ids must be in"):
        check_node("RotaryEmbedding", values, expected=[None])


@pytest.mark.parametrize(
    ("index", "shape", "attrs"),
    [
        (0, (B, S), {}),
        (0, (B, S, H * D + 1), {"num_heads": H}),
        (0, (B, H, S, 7), {}),
        (1, (M, 3), {}),
        (2, (M, 4, 1), {}),
        (1, (B, S, 4), {}),
        (3, (B, S + 1), {}),
        (0, (B, H, S, D), {"rotary_embedding_dim": 12}),
        (0, (B, H, S, D), {"rotary_embedding_dim": 3}),
    ],
)
def test_rotary_of_wrong_inputs_is_refused(
    index: int, shape: tuple[int, ...], attrs: dict[str, Any]
) -> None:
    values = inputs(4, True)
    values[index] = np.zeros(shape, values[index].dtype)
    with pytest.raises(ShapeError):
        check_node("RotaryEmbedding", values, attrs, expected=[None])


def test_rotary_caches_without_positions() -> None:
    values = inputs(4, False)
    values[1] = values[2] = normal(M, D // 2)
    with pytest.raises(ShapeError, match="position_ids"):
        check_node("RotaryEmbedding", values, expected=[None])


def test_rotary_infers_its_types() -> None:
    op = find("RotaryEmbedding")
    assert op is not None
    x = TensorType(FLOAT, ("b", 4, "s", 16))
    cache = TensorType(FLOAT, ("m", 8))
    assert op.infer([x, cache, cache, TensorType()], {}, [None] * 4) == (x,)
    with pytest.raises(ShapeError):
        op.infer([x, TensorType(FLOAT, ("m", 7)), cache, TensorType()], {}, [None] * 4)
