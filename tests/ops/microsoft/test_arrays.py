"""Operations of com.microsoft on arrays, like ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import PenstockError
from penstock.frontends.onnx.importer import load_onnx
from tests.ops.harness import run_ort
from tests.support.contrib import check_contrib, contrib_model
from tests.support.random_arrays import normal

F32 = np.float32
rng = np.random.default_rng(0)
draw = partial(normal, rng)


def refused(op: str, inputs: Any, attrs: Mapping[str, Any] | None = None) -> None:
    model = contrib_model(op, inputs, attrs)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    with pytest.raises(PenstockError):
        ps.compile(model).run(feeds)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3, 3), (1, 1), (0, 0), (2, 0, 0), (0, 3, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_inverse_matches_onnx_runtime(shape: Any, dtype: Any) -> None:
    x = draw(*shape, dtype=dtype) + 3 * np.eye(shape[-1], dtype=dtype)
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype == np.float16 else {}
    check_contrib("Inverse", [x], **loose)  # type: ignore[arg-type]


def test_inverse_of_a_singular_matrix_is_nan_and_that_of_others_is_not() -> None:
    x = np.stack([np.ones((2, 2), F32), 2 * np.eye(2, dtype=F32)])
    want = np.stack([np.full((2, 2), np.nan, F32), np.eye(2, dtype=F32) / 2])
    check_contrib("Inverse", [x], expected=[want])
    check_contrib("Inverse", [x[0]], expected=[want[0]])
    refused("Inverse", [draw(2, 3)])


@pytest.mark.parametrize(
    "attrs",
    [{"size": 2}, {"size": 2, "step": 2, "dim": 1}, {"size": 2, "dim": -2}, {"size": 4, "step": 7}],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_unfold_tensor_matches_onnx_runtime(attrs: Mapping[str, int], dtype: Any) -> None:
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    check_contrib("UnfoldTensor", [x], attrs)


@pytest.mark.parametrize(
    "attrs", [{"size": 5}, {"size": 0}, {"size": 2, "step": 0}, {"size": 1, "dim": 3}, {}]
)
def test_unfold_tensor_of_misfit_slices_is_refused(attrs: Mapping[str, int]) -> None:
    refused("UnfoldTensor", [draw(2, 3, 4)], attrs)


@pytest.mark.parametrize("shape", [(1, 1, 9), (1, 1, 7, 6), (1, 1, 4, 5, 4)])
@pytest.mark.parametrize("attrs", [{}, {"strides": 2}, {"pads": 1}, {"auto_pad": "SAME_UPPER"}])
def test_maxpool_with_mask_matches_onnx_runtime(shape: Any, attrs: Mapping[str, Any]) -> None:
    spatial = len(shape) - 2
    lists: dict[str, Any] = {
        key: value if key == "auto_pad" else [value] * spatial * (1 + (key == "pads"))
        for key, value in attrs.items()
    }
    mask = (rng.random(shape) < 0.7).astype(np.int32)
    inputs = [draw(*shape), mask]
    check_contrib("MaxpoolWithMask", inputs, {"kernel_shape": [3] * spatial, **lists})
    refused("MaxpoolWithMask", [draw(*shape), mask[..., 1:]], {"kernel_shape": [3] * spatial})


def test_maxpool_with_mask_gives_each_channel_its_own_mask() -> None:
    """ONNX Runtime begins to read the mask of later channels at other places."""
    x, mask = draw(2, 3, 6, 5), (rng.random((2, 3, 6, 5)) < 0.7).astype(np.int32)
    attrs = {"kernel_shape": [2, 2]}
    pool = ps.compile(contrib_model("MaxpoolWithMask", [x, mask], attrs))
    parts = [[run_one(x[i, j], mask[i, j], attrs) for j in range(3)] for i in range(2)]
    np.testing.assert_array_equal(pool(x, mask), parts)


@pytest.mark.parametrize("taps, typed", [(3, True), (3, False), (17, True)])
def test_maxpool_with_mask_is_written_out_for_known_shapes_and_short_rows(
    taps: int, typed: bool
) -> None:
    inputs = [draw(1, 1, 5, 20), (rng.random((1, 1, 5, 20)) < 0.9).astype(np.int32)]
    inputs[0][rng.random((1, 1, 5, 20)) < 0.2] = -np.inf
    attrs = {"kernel_shape": [2, taps], "pads": [1, 2, 0, 1]}
    model = contrib_model("MaxpoolWithMask", inputs, attrs, typed=typed)
    names = {node.op.name for node in load_onnx(model).graph.nodes}
    assert ("MaxPool" in names) == (typed and taps == 3)
    check_contrib("MaxpoolWithMask", inputs, attrs)


@pytest.mark.parametrize("masks", [(1, 1), (2, 1), (1, 3)])
def test_maxpool_with_mask_broadcasts_masks_of_one_image_or_channel(masks: Any) -> None:
    x, mask = draw(2, 3, 6, 5), (rng.random((*masks, 6, 5)) < 0.7).astype(np.int32)
    attrs = {"kernel_shape": [2, 2]}
    every = np.broadcast_to(mask, x.shape)
    parts = [[run_one(x[i, j], every[i, j], attrs) for j in range(3)] for i in range(2)]
    for typed in (True, False):
        pool = ps.compile(contrib_model("MaxpoolWithMask", [x, mask], attrs, typed=typed))
        np.testing.assert_array_equal(pool(x, mask), parts)
    refused("MaxpoolWithMask", [x, np.ones((2, 2, 6, 5), np.int32)], attrs)


def run_one(x: np.ndarray, mask: np.ndarray, attrs: Mapping[str, Any]) -> np.ndarray:
    inputs = [x[None, None], mask[None, None]]
    (y,) = run_ort(contrib_model("MaxpoolWithMask", inputs, attrs), inputs)
    return np.asarray(y)[0, 0]


BOXES = np.array([[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.6], [-0.5, 0, 1.5, 0.5], [1, 1, 0, 0]], F32)


@pytest.mark.parametrize("size", [(3, 4), (1, 1), (7, 2)])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("height, width", [(5, 6), (1, 3), (11, 7)])
def test_crop_and_resize_matches_onnx_runtime(
    size: Any, mode: str, height: int, width: int
) -> None:
    inputs = [draw(2, 3, height, width), BOXES, np.array([0, 1, 1, 0], np.int32)]
    attrs = {"mode": mode, "extrapolation_value": -1.5}
    check_contrib("CropAndResize", [*inputs, np.array(size, np.int32)], attrs, constants=[3])
    single = [inputs[0][:1], BOXES, np.zeros(4, np.int32), np.array(size, np.int32)]
    check_contrib("CropAndResize", single, attrs)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_crop_and_resize_of_float16_matches_onnx_runtime(mode: str) -> None:
    inputs = [draw(2, 3, 5, 6).astype(np.float16), BOXES.astype(np.float16)]
    inputs += [np.array([0, 1, 1, 0], np.int32), np.array([3, 4], np.int32)]
    check_contrib("CropAndResize", inputs, {"mode": mode}, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "change",
    [{2: np.array([0, 1, 2, 0], np.int32)}, {2: np.zeros(3, np.int32)}, {3: np.array([0, 2], np.int32)},
     {0: draw(3, 4, 5)}, {1: BOXES[:, :3]}, {3: np.array([2], np.int32)}],
)  # fmt: skip
def test_crop_and_resize_of_misfit_boxes_is_refused(change: Any) -> None:
    inputs = [draw(2, 3, 5, 6), BOXES, np.zeros(4, np.int32), np.array([2, 2], np.int32)]
    for i, value in change.items():
        inputs[i] = value
    refused("CropAndResize", inputs)


def test_crop_and_resize_of_boxes_that_are_nan_is_outside() -> None:
    inputs = [draw(1, 1, 3, 3), np.full((1, 4), np.nan, F32), np.zeros(1, np.int32)]
    want = np.zeros((1, 1, 2, 2), F32)
    check_contrib("CropAndResize", [*inputs, np.array([2, 2], np.int32)], expected=[want])


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (1, 9, 4), (6, 1), (1, 6), (30, 40), (40, 9)])
@pytest.mark.parametrize("kind", ["real", "equal", "few", "infinite", "nan"])
def test_dynamic_time_warping_matches_onnx_runtime(shape: Any, kind: str) -> None:
    costs = draw(*shape)
    if kind in ("equal", "few"):
        costs = np.zeros(shape, F32) if kind == "equal" else np.round(np.abs(costs))
    if kind in ("infinite", "nan"):
        costs[rng.random(shape) < 0.2] = np.inf
        costs[rng.random(shape) < 0.1] = -np.inf if kind == "infinite" else np.nan
    check_contrib("DynamicTimeWarping", [costs])


@pytest.mark.parametrize("size", [1, 2, 3, 12, 13, 14])
def test_ngram_repeat_block_matches_onnx_runtime(size: int) -> None:
    ids, scores = rng.integers(0, 3, (4, 12)), draw(4, 5)
    check_contrib("NGramRepeatBlock", [ids, scores], {"ngram_size": size})


@pytest.mark.parametrize(
    "ids", [np.full((4, 3), 5), np.full((4, 3), -1), np.zeros((3, 3), np.int64)]
)
def test_ngram_repeat_block_of_tokens_without_scores_is_refused(ids: np.ndarray) -> None:
    refused("NGramRepeatBlock", [ids, draw(4, 5)], {"ngram_size": 2})
    refused("NGramRepeatBlock", [ids % 5, draw(4, 5)], {"ngram_size": 0})


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("attrs", [{}, {"min_ngram_size": 2, "max_ngram_size": 4}])
def test_bifurcation_detector_matches_onnx_runtime(seed: int, attrs: Mapping[str, int]) -> None:
    draws = np.random.default_rng(seed)
    source, current = draws.integers(0, 3, 8), draws.integers(0, 3, draws.integers(0, 4))
    start = np.array([draws.integers(0, 9)])
    predicted = np.append(source[start[0] :], 1)
    predicted[draws.integers(0, len(predicted)) :] = 2
    check_contrib("BifurcationDetector", [source, current, start, predicted], attrs, outputs=2)
    check_contrib("BifurcationDetector", [source, current, start], attrs, outputs=2)
    refused("BifurcationDetector", [source, current, start, predicted[:-1]], attrs)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_word_conv_embedding_matches_onnx_runtime(window: int) -> None:
    words = rng.integers(1, 9, (6, 5)).astype(np.int32)
    for row, length in enumerate((5, 4, 3, 2, 1)):
        words[row, length:] = 0
    inputs = [words, draw(4, 1, window, 3), draw(4), draw(9, 3)]
    attrs = {"embedding_size": 4, "conv_window_size": window, "char_embedding_size": 3}
    check_contrib("WordConvEmbedding", inputs, attrs)
    check_contrib("WordConvEmbedding", inputs, constants=[1, 2, 3])
    # More embeddings than there are characters.
    check_contrib("WordConvEmbedding", [*inputs[:3], np.tile(draw(9, 3), (5, 1))], attrs)


def test_word_conv_embedding_of_a_word_without_characters_is_zero() -> None:
    words = np.array([[0, 0, 0], [0, 1, 2]], np.int32)
    inputs = [words, draw(4, 1, 2, 3), draw(4), draw(9, 3)]
    check_contrib("WordConvEmbedding", inputs, expected=[np.zeros((2, 4), F32)])
    refused("WordConvEmbedding", [words + 9, *inputs[1:]])
    refused("WordConvEmbedding", [words[:, :1], *inputs[1:]])


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cdist_matches_onnx_runtime(metric: str, dtype: Any) -> None:
    inputs = [draw(5, 4, dtype=dtype), draw(3, 4, dtype=dtype)]
    check_contrib("CDist", inputs, {"metric": metric}, constants=[1])
    check_contrib("CDist", [inputs[0][:0], inputs[1]], {"metric": metric})
    refused("CDist", inputs, {"metric": "cosine"})
    refused("CDist", [inputs[0], inputs[1][:, :3]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("eos", [None, 0, 2])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"reset_on_eos": 1}, {"max_ngram_size": 2}])
def test_ngram_hash_mapping_matches_onnx_runtime(
    dtype: Any, past: bool, eos: Any, segments: bool, attrs: Mapping[str, int]
) -> None:
    attrs = {"pad_id": 3, "max_ngram_size": 4, "n_head_per_ngram": 2, **attrs}
    most = attrs["max_ngram_size"]
    heads = 2 * (most - 1)
    inputs = [
        rng.integers(-1, 4, (2, 9)).astype(dtype),
        rng.integers(-(2**31), 2**31, most).astype(dtype),
        rng.integers(5, 99, heads).astype(dtype),
        rng.integers(0, 4, (2, most - 1)).astype(dtype) if past else None,
        rng.integers(0, 99, heads).astype(dtype) if past else None,
        None if eos is None else np.array(eos, dtype),
        np.sort(rng.integers(0, 3, (2, 9)).astype(np.int32)) if segments else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    check_contrib("NGramHashMapping", inputs, attrs, outputs=2)
    check_contrib("NGramHashMapping", inputs, attrs, outputs=1)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("eos", [None, 0, 2])
@pytest.mark.parametrize("segments", [0, 1, 2])
@pytest.mark.parametrize(
    "attrs", [{}, {"reset_on_eos": 1}, {"max_ngram_size": 2}, {"state_update_capacity": 3}]
)
def test_varlen_ngram_hash_mapping_matches_onnx_runtime(
    past: bool, eos: Any, segments: int, attrs: Mapping[str, int]
) -> None:
    attrs = {"pad_id": 3, "max_ngram_size": 4, "n_head_per_ngram": 2, **attrs}
    most, dtype = attrs["max_ngram_size"], np.int32 if past else np.int64
    heads, captured = 2 * (most - 1), "state_update_capacity" in attrs
    inputs = [
        rng.integers(-1, 4, 11).astype(dtype),
        rng.integers(-(2**31), 2**31, most).astype(dtype),
        rng.integers(5, 99, heads).astype(dtype),
        np.array([0, 1, 3, 11], np.int32),
        rng.integers(0, 4, (3, most - 1)).astype(dtype) if past else None,
        rng.integers(0, 99, heads).astype(dtype) if past else None,
        None if eos is None else np.array(eos, dtype),
        np.sort(rng.integers(0, 3, 11).astype(np.int32)) if segments else None,
        rng.integers(0, 3, (3, most - 1)).astype(np.int32) if segments > 1 else None,
        np.array([2, 0, 9], np.int32) if captured else None,
    ]
    while inputs[-1] is None:
        inputs.pop()
    check_contrib(
        "VarlenNGramHashMapping", inputs, attrs, outputs=[True, True, segments > 0, captured]
    )
    check_contrib("VarlenNGramHashMapping", inputs, attrs, outputs=1)


@pytest.mark.parametrize("reset", [0, 1])
def test_ngram_hash_mapping_of_empty_texts_matches_onnx_runtime(reset: int) -> None:
    attrs = {"pad_id": 3, "max_ngram_size": 4, "n_head_per_ngram": 2, "reset_on_eos": reset}
    ids, segments = np.zeros((2, 0), np.int64), np.zeros((2, 0), np.int32)
    inputs = [ids, np.arange(1, 5), np.full(6, 7), None, None, np.array(1), segments]
    check_contrib("NGramHashMapping", inputs, attrs, outputs=2)
    refused("NGramHashMapping", [ids, np.arange(1, 5), np.full(5, 7)], attrs)
    refused("NGramHashMapping", [ids, np.ones((4, 0), np.int64), np.full(6, 7)], attrs)


@pytest.mark.parametrize("bounds", [[0, 11], [1, 10], [0, 4, 4, 10], [0]])
def test_varlen_ngram_hash_mapping_with_wrong_bounds_is_refused(bounds: list[int]) -> None:
    ids, ones = np.zeros(10, np.int64), np.ones(2, np.int64)
    attrs = {"pad_id": 3, "max_ngram_size": 2, "n_head_per_ngram": 2}
    refused("VarlenNGramHashMapping", [ids, ones, ones, np.array(bounds, np.int32)], attrs)


def test_node_with_too_many_outputs_is_refused() -> None:
    ids = np.zeros((2, 3), np.int64)
    for op, inputs, attrs, count in (
        ("Inverse", [np.eye(2, dtype=F32)], {}, 2),
        ("NGramRepeatBlock", [ids, draw(2, 5)], {"ngram_size": 2}, 2),
        ("BifurcationDetector", [ids[0], ids[0], ids[0, :1]], {}, 3),
    ):
        model = contrib_model(op, inputs, attrs, outputs=count)
        with pytest.raises(PenstockError) as caught:
            ps.compile(model).run({f"x{i}": x for i, x in enumerate(inputs)})
        assert not isinstance(caught.value, ps.InternalError)
