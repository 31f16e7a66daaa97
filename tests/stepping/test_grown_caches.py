"""Steps of decoders whose GroupQueryAttention has options of ONNX Runtime's model builder."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.stepping.grown_caches import with_grown_caches
from tests.support.onnx_text import model_from_text

RNG = np.random.default_rng(11)
HEADS, GROUPS, SIZE, TURNING, PLACES = 2, 1, 32, 16, 60
WINDOW = ", local_window_size = 5"
SLIDING = f"{WINDOW}, sliding_window_cache = 1"


def model_of(options: str) -> bytes:
    """A layer whose head turns half of its features, as Nemotron's do."""
    text = f"""g (float[b, s, {(HEADS + 2 * GROUPS) * SIZE}] x, int64[b, t] mask, float[b, {GROUPS}, p, {SIZE}] past_k,
            float[b, {GROUPS}, p, {SIZE}] past_v)
        => (float[b, s, {HEADS * SIZE}] y, float[b, {GROUPS}, t, {SIZE}] present_k, float[b, {GROUPS}, t, {SIZE}] present_v)
        <int64[1] last = {{-1}}, int64 one = {{1}}> {{
        counted = ReduceSum <keepdims = 0> (mask, last) less = Sub (counted, one)
        lengths = Cast <to = 6> (less) shape = Shape (mask) all = Gather <axis = 0> (shape, one)
        longest = Cast <to = 6> (all)
        y, present_k, present_v = com.microsoft.GroupQueryAttention
            <num_heads = {HEADS}, kv_num_heads = {GROUPS}, do_rotary = 1{options}>
            (x, , , past_k, past_v, lengths, longest, cos, sin) }}"""
    model = model_from_text(text, domains={"com.microsoft": 1})
    angles = np.arange(PLACES)[:, None] * 0.6 ** np.arange(TURNING // 2)
    for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
        model.graph.initializer.add(
            name=name, dims=table.shape, data_type=1, raw_data=table.astype(np.float32).tobytes()
        )
    return model.SerializeToString()


@pytest.mark.parametrize("options", ["", WINDOW, SLIDING])
def test_rows_of_attention_that_turns_a_part_of_each_head_are_onnxruntimes(options: str) -> None:
    x = RNG.standard_normal((1, 40, (HEADS + 2 * GROUPS) * SIZE)).astype(np.float32)
    feeds = {"x": x, "mask": np.ones((1, 40), np.int64)}
    feeds |= {f"past_{c}": np.zeros((1, GROUPS, 0, SIZE), np.float32) for c in "kv"}
    # A sliding cache changes what is stored, not what is computed.
    plain = model_of(options.replace(SLIDING, WINDOW))
    (want,) = onnxruntime.InferenceSession(plain).run(["y"], feeds)
    with ps.Stepper(ps.load(model_of(options))) as stepper:
        assert stepper.reason is None
        sequence, at = stepper.sequence(), 0
        for size in (7, 1, 1, 20, 11):
            got = sequence.step({"x": x[:, at : at + size]}, wanted=size)["y"]
            np.testing.assert_allclose(got, want[:, at : at + size], rtol=0, atol=2e-5)
            at += size


def test_models_without_sliding_caches_are_not_copied() -> None:
    model = ps.load(model_of(WINDOW))
    assert with_grown_caches(model) is model


def test_model_itself_keeps_its_sliding_caches() -> None:
    model = ps.load(model_of(SLIDING))
    (node,) = (node for node in with_grown_caches(model).graph.nodes if len(node.outputs) == 3)
    assert "sliding_window_cache" not in node.attrs
    assert any(node.attrs.get("sliding_window_cache") for node in model.graph.nodes)
