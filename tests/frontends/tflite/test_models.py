"""Third-party TFLite models agree with LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.models.fetch import RealModel, fetch, real_models

litert = pytest.importorskip("ai_edge_litert.interpreter")
pytestmark = pytest.mark.models


MODELS = real_models(".tflite")
STREAMING = [model for model in MODELS if model.package == "pymicro-wakeword"]


@pytest.mark.parametrize(
    "model", [m for m in MODELS if m not in STREAMING], ids=lambda model: model.name
)
def test_real_model_agrees_with_litert(model: RealModel) -> None:
    path, feeds = fetch(model), model.feeds()
    interpreter = litert.Interpreter(str(path))
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    interpreter.invoke()
    session = ps.compile(path)
    for _ in range(2):
        outputs = session.run(feeds)
        for detail in interpreter.get_output_details():
            want = interpreter.get_tensor(detail["index"])
            scale = max(float(np.abs(want).max()), 1)
            np.testing.assert_allclose(outputs[detail["name"]], want, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("model", STREAMING, ids=lambda model: model.name)
def test_streaming_int8_model_gives_the_codes_of_the_reference(model: RealModel) -> None:
    """Each run takes three more frames of sound into the model's variables."""
    reference = litert.OpResolverType.BUILTIN_REF
    interpreter = litert.Interpreter(str(fetch(model)), experimental_op_resolver_type=reference)
    interpreter.allocate_tensors()
    (feed,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    session = ps.compile(fetch(model))
    rng = np.random.default_rng(3)
    for step in range(60):
        wave = 40 * np.sin(np.arange(40) / 5 + step / 7)
        frames = np.clip(rng.integers(60, 127, feed["shape"]) + wave, -128, 127).astype(np.int8)
        interpreter.set_tensor(feed["index"], frames)
        interpreter.invoke()
        want = interpreter.get_tensor(result["index"])
        got = session(frames)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_basic_pitch_gives_the_same_from_onnx_tflite_and_saved_model() -> None:
    files = [
        next(model for model in real_models(suffix) if "basic-pitch" in model.name)
        for suffix in (".tflite", ".onnx", "saved_model.pb")
    ]
    results = []
    for model in files:
        outputs = ps.compile(fetch(model)).run(model.feeds())
        # Names differ; the larger output is that of contours, the others differ in their sums.
        results.append(sorted(outputs.values(), key=lambda x: (x.shape, float(x.sum()))))
    one, *others = results
    assert [x.shape for x in one] == [(1, 172, 88), (1, 172, 88), (1, 172, 264)]
    for other in others:
        for value, want in zip(other, one, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-3, atol=1e-3)
