"""com.microsoft Attention, MultiHeadAttention and its decoder, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from penstock.core.errors import InvalidModel
from penstock.core.types import ShapeError, TensorType
from penstock.ops.registry import standard
from tests.ops.harness import check_node, node_model, run_ort

rng = np.random.default_rng(4)
FLOAT = np.dtype(np.float32)
BATCH, LENGTH, HEADS, SIZE = 2, 5, 4, 8
HIDDEN = HEADS * SIZE


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=shape).astype(dtype)


def check(name: str, values: list[Any], attrs: dict[str, Any], **more: Any) -> list[np.ndarray]:
    while values[-1] is None:
        values = values[:-1]
    attrs = {"num_heads": HEADS, **attrs}
    if "expected" not in more:
        outputs = more.get("outputs", 1)
        model = node_model(name, values, attrs, outputs=outputs, opset=1, domain="com.microsoft")
        for info in model.graph.output:  # ONNX Runtime cannot infer the type of scores
            code = onnx.TensorProto.FLOAT
            info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, code, None))
        more["expected"] = run_ort(model, values)
    return check_node(
        name, values, attrs, domain="com.microsoft", opset=1, rtol=1e-4, atol=2e-5, **more
    )


def mask_of(form: str, keys: int) -> np.ndarray | None:
    if form == "none":
        return None
    if form == "ends":
        return np.array([3, keys], np.int32)
    if form == "ends and starts":
        return np.array([keys - 1, keys, 1, 2], np.int32)
    shape = {"keys": (BATCH, keys), "queries": (BATCH, LENGTH, keys)}[form]
    return (rng.random(shape) < 0.7).astype(np.int32)


MASKS = ["none", "ends", "ends and starts", "keys", "queries"]


def attention_inputs(past: int = 0, v_size: int = HIDDEN) -> list[Any]:
    total = 2 * HIDDEN + v_size
    x, w = normal(BATCH, LENGTH, 12), normal(12, total) * np.float32(0.3)
    return [x, w, normal(total), None, normal(2, BATCH, HEADS, past, SIZE) if past else None, None]


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_matches_ort(form: str, past: int, unidirectional: int, biased: bool) -> None:
    values = attention_inputs(past)
    values[3] = mask_of(form, LENGTH + past)
    attrs, outputs, more = {"unidirectional": unidirectional}, 2 if past else 1, {}
    if biased:
        values[5] = normal(1, HEADS, LENGTH, LENGTH + past)
    if biased and past:  # ONNX Runtime has both in MultiHeadAttention only, and there one mask less
        if form == "ends and starts":
            return
        x, w, b, mask, old, added = values
        parts = np.split(x @ w + b, 3, -1)
        other = [*parts, None, mask, added, *old]
        (y, k, v) = check("MultiHeadAttention", other, attrs, outputs=3)
        more["expected"] = [y, np.stack([k, v])]
    check("Attention", values, attrs, outputs=outputs, **more)


def test_attention_without_bias_matches_ort() -> None:
    values = attention_inputs()
    values[2] = None
    want = check("Attention", [*values[:2], np.zeros(3 * HIDDEN, np.float32)], {})
    check("Attention", values, {}, expected=want)


def test_attention_with_attributes_matches_ort() -> None:
    check("Attention", attention_inputs(), {"scale": 0.3})
    sizes = {"qkv_hidden_sizes": [HIDDEN, HIDDEN, 12]}
    check("Attention", attention_inputs(v_size=12), sizes)
    values = attention_inputs()
    values[3] = np.ones((BATCH, LENGTH), np.int32)
    values[3][:, 2:] = 0
    check("Attention", values, {"mask_filter_value": -2.0})


def test_attention_present_without_past() -> None:
    check("Attention", attention_inputs(), {}, outputs=2)
    values = attention_inputs(past=3)
    (want, _) = check("Attention", values, {}, outputs=2)
    check("Attention", values, {}, expected=[want])


def test_attention_half_matches_the_reference() -> None:
    values = attention_inputs(past=3)
    want = [x.astype(np.float16) for x in check("Attention", values, {}, outputs=2)]
    narrow = [None if x is None else x.astype(np.float16) for x in values]
    check_node(
        "Attention",
        [*narrow[:3], None, narrow[4]],
        {"num_heads": HEADS},
        domain="com.microsoft",
        opset=1,
        expected=want,
        outputs=2,
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize(
    ("index", "value", "attrs"),
    [
        (0, normal(BATCH, 12), {}),
        (1, normal(12, 97), {}),
        (1, normal(13, 96), {}),
        (2, normal(95), {}),
        (3, np.ones(5, np.int32), {}),
        (3, np.ones((3 * BATCH + 2,), np.int32), {}),
        (3, np.ones((BATCH, 1, 9, 9), np.int32), {}),
        (4, normal(2, BATCH, HEADS, 3, SIZE + 1), {}),
        (5, normal(1, HEADS, LENGTH, LENGTH + 1), {}),
        (0, normal(BATCH, LENGTH, 12), {"num_heads": 5}),
        (0, normal(BATCH, LENGTH, 12), {"do_rotary": 1}),
        (0, normal(BATCH, LENGTH, 12), {"qkv_hidden_sizes": [32, 32, 33]}),
        (0, normal(BATCH, LENGTH, 12), {"qkv_hidden_sizes": [32, 16, 48]}),
    ],
)
def test_attention_with_bad_inputs_is_refused(
    index: int, value: np.ndarray, attrs: dict[str, Any]
) -> None:
    values = attention_inputs()
    values[index] = value
    with pytest.raises((ShapeError, InvalidModel)):
        check("Attention", values, attrs, expected=[None])


def mha_inputs(packing: str, keys: int = LENGTH, bias: bool = False) -> list[Any]:
    q, k, v = (normal(BATCH, n, HIDDEN) for n in (LENGTH, keys, keys))
    if packing == "all":
        values = [normal(BATCH, LENGTH, HEADS, 3, SIZE), None, None]
    elif packing == "keys and values":
        values = [q, normal(BATCH, keys, HEADS, 2, SIZE), None]
    elif packing == "cache":
        values = [q, *[normal(BATCH, HEADS, keys, SIZE) for _ in range(2)]]
    else:
        values = [q, k, v]
    return [*values, normal(3 * HIDDEN) if bias else None, None, None, None, None]


@pytest.mark.parametrize("packing", ["none", "all", "keys and values", "cache"])
def test_multi_head_attention_with_packed_inputs_matches_onnx_runtime(packing: str) -> None:
    values = mha_inputs(packing, LENGTH if packing == "all" else 7)
    if packing in ("none", "cache"):
        check("MultiHeadAttention", values, {})
        return
    # ONNX Runtime takes packed inputs on other processors only.
    q, kv = values[:2] if packing != "all" else (values[0][..., 0, :], values[0][..., 1:, :])
    flat = [x.reshape(*x.shape[:2], HIDDEN) for x in (q, kv[..., 0, :], kv[..., 1, :])]
    want = check("MultiHeadAttention", flat, {})
    check("MultiHeadAttention", values, {}, expected=want)


@pytest.mark.parametrize("keys", [LENGTH, 7])
@pytest.mark.parametrize("form", ["none", "ends", "keys", "queries"])
@pytest.mark.parametrize("added", [None, 1, BATCH])
def test_multi_head_attention_with_masks_matches_onnx_runtime(
    keys: int, form: str, added: int | None
) -> None:
    values = mha_inputs("none", keys)
    values[4] = mask_of(form, keys)
    if added is not None:
        values[5] = normal(added, HEADS, LENGTH, keys)
    check("MultiHeadAttention", values, {})


@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_multi_head_attention_with_a_past_matches_onnx_runtime(
    past: int, bias: bool, unidirectional: int
) -> None:
    values = mha_inputs("none", bias=bias)
    values[6:] = [normal(BATCH, HEADS, past, SIZE) for _ in range(2)] if past else [None, None]
    attrs = {"unidirectional": unidirectional, "scale": 0.4}
    check("MultiHeadAttention", values, attrs, outputs=3 if past else 1)


def test_mha_present_without_past() -> None:
    values = mha_inputs("none", bias=True)
    check("MultiHeadAttention", values, {}, outputs=3)
    values[6:] = [normal(BATCH, HEADS, 2, SIZE) for _ in range(2)]
    (y, *_) = check("MultiHeadAttention", values, {}, outputs=3)
    check("MultiHeadAttention", values, {}, expected=[y])


def test_mha_other_value_size() -> None:
    values = mha_inputs("none", 7)
    values[2] = normal(BATCH, 7, HEADS * 3)
    check("MultiHeadAttention", values, {})


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, normal(BATCH, HIDDEN)),
        (0, normal(BATCH, LENGTH, HIDDEN + 1)),
        (1, normal(BATCH + 1, LENGTH, HIDDEN)),
        (1, normal(BATCH, LENGTH, HIDDEN + HEADS)),
        (1, normal(BATCH, LENGTH, HEADS, 2, SIZE)),
        (2, normal(BATCH, LENGTH + 1, HIDDEN)),
        (3, normal(3 * HIDDEN + 1)),
        (4, np.ones((BATCH, 3), np.int32)),
        (5, normal(3, HEADS, LENGTH, LENGTH)),
        (6, normal(BATCH, HEADS, 3, SIZE)),
    ],
)
def test_multi_head_attention_with_misfit_inputs_is_refused(index: int, value: np.ndarray) -> None:
    values = mha_inputs("none")
    values[index] = value
    with pytest.raises((ShapeError, InvalidModel)):
        check("MultiHeadAttention", values, {}, expected=[None])


ROOM, PAST = 6, 3
DECODER = "DecoderMaskedMultiHeadAttention"


def buffered(name: str, queries: int = 1, **more: Any) -> list[Any]:
    """Inputs with a past of PAST positions in a buffer of ROOM; ``more`` by name."""
    q, k, v = (normal(BATCH, queries, HIDDEN) for _ in range(3))
    past = [normal(BATCH, HEADS, ROOM, SIZE) for _ in range(2)]
    length, width = np.array([PAST], np.int32), None
    bias, mask, added, beams = (more.get(key) for key in ("bias", "mask", "added", "beams"))
    if name == "MultiHeadAttention":
        return [q, k, v, bias, mask, added, *past, length, beams]
    return [q, k, v, mask, added, *past, length, width, beams, bias]


@pytest.mark.parametrize("name", ["MultiHeadAttention", DECODER])
@pytest.mark.parametrize("mask", [False, True])
# With beams, ONNX Runtime reads another bias than that of the sample, unless all have the same.
@pytest.mark.parametrize(("added", "beams"), [(0, 0), (1, 0), (BATCH, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_attention_over_a_shared_buffer_matches_onnx_runtime(
    name: str, mask: bool, added: int, bias: bool, beams: bool, shown: bool
) -> None:
    values = buffered(
        name,
        mask=(rng.random((BATCH, PAST + 1)) < 0.7).astype(np.int32) if mask else None,
        added=normal(added, HEADS, 1, PAST + 1) if added else None,
        bias=normal(3 * HIDDEN) if bias else None,
        beams=rng.integers(0, BATCH, (1, BATCH, ROOM)).astype(np.int32) if beams else None,
    )
    place = 8 if name == "MultiHeadAttention" else 7
    attrs = {} if name == "MultiHeadAttention" else {"past_present_share_buffer": 1}
    if shown and name == DECODER:
        attrs["output_qk"] = 1
    check(name, values, attrs, outputs=4 if shown else 3, constants=(place,) if shown else ())


@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("form", ["none", "ends", "keys", "queries"])
def test_attention_over_a_shared_buffer_of_several_queries_matches_onnx_runtime(
    unidirectional: int, form: str
) -> None:
    values = buffered("MultiHeadAttention", 3)
    if form != "none":
        end = PAST + 3
        masks = {
            "ends": np.array([4, 5], np.int32),
            "keys": rng.random((BATCH, end)) < 0.7,
            "queries": rng.random((BATCH, 3, end)) < 0.7,
        }
        values[4] = masks[form].astype(np.int32)
    check("MultiHeadAttention", values, {"unidirectional": unidirectional}, outputs=3)


def test_attention_over_a_shared_buffer_without_presents_sees_the_past() -> None:
    values = buffered("MultiHeadAttention")
    (y, *_) = check("MultiHeadAttention", values, {}, outputs=3)
    check("MultiHeadAttention", values, {}, expected=[y])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_decoder_cross_attention_matches_onnx_runtime(bias: bool, mask: bool) -> None:
    values = [normal(BATCH, 1, HIDDEN), *(normal(BATCH, HEADS, ROOM, SIZE) for _ in range(2))]
    hidden = (rng.random((BATCH, ROOM)) < 0.7).astype(np.int32) if mask else None
    values += [hidden, *[None] * 6, normal(3 * HIDDEN) if bias else None]
    check(DECODER, values, {"output_qk": 1}, outputs=[True, False, False, True])


@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (3, 5), (1, 4), (4, 4)])
def test_queries_see_keys_up_to_their_own_place(queries: int, keys: int) -> None:
    q, k, v = (normal(BATCH, length, HIDDEN) for length in (queries, keys, keys))
    wide = [x.reshape(BATCH, -1, HEADS, SIZE).swapaxes(1, 2) for x in (q, k, v)]
    scores = wide[0] @ wide[1].swapaxes(2, 3) / np.sqrt(SIZE)
    powers = np.exp(scores) * np.tri(queries, keys)
    expected = powers / powers.sum(3, keepdims=True) @ wide[2]
    expected = expected.swapaxes(1, 2).reshape(q.shape).astype(np.float32)
    check("MultiHeadAttention", [q, k, v], {"unidirectional": 1}, expected=[expected])
    if queries >= keys:  # with more keys than queries, ONNX Runtime sees others
        check("MultiHeadAttention", [q, k, v], {"unidirectional": 1})


@pytest.mark.parametrize("unidirectional", [0, 1])
def test_multi_head_attention_shows_its_biased_scores(unidirectional: int) -> None:
    values = mha_inputs("none")
    values[4], values[5] = mask_of("keys", 8), normal(1, HEADS, LENGTH, 8)
    values[6:] = [normal(BATCH, HEADS, 3, SIZE) for _ in range(2)]
    check("MultiHeadAttention", values, {"unidirectional": unidirectional}, outputs=4)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, normal(BATCH, 2, HIDDEN)),
        (5, None),
        (7, np.array([6], np.int32)),
        (7, np.array([-1], np.int32)),
        (7, np.array([1, 1], np.int32)),
        (9, np.zeros((1, BATCH, ROOM - 1), np.int32)),
    ],
)
def test_decoder_attention_with_misfit_inputs_is_refused(index: int, value: Any) -> None:
    values = buffered(DECODER)
    values[index] = value
    with pytest.raises(ShapeError):
        check(DECODER, values, {}, outputs=3, expected=[None] * 3)


def test_attention_with_symbolic_dims_infers_symbolic_shapes() -> None:
    op = standard("MultiHeadAttention", "com.microsoft")
    q, k = TensorType(FLOAT, ("b", "s", 32)), TensorType(FLOAT, ("b", "t", 32))
    types = op.infer([q, k, k], {"num_heads": 4}, [None] * 3)
    cache, scores = ("b", 4, "t", 8), ("b", 4, "s", "t")
    assert [type_.shape for type_ in types] == [("b", "s", 32), cache, cache, scores]
    op = standard("Attention", "com.microsoft")
    types = op.infer([q, TensorType(FLOAT, (32, 96))], {"num_heads": 4}, [None] * 2)
    assert [type_.shape for type_ in types] == [("b", "s", 32), (2, "b", 4, "s", 8)]
