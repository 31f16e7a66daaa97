"""Third-party TFLite models agree with LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.models.fetch import RealModel, fetch, real_models

litert = pytest.importorskip("ai_edge_litert.interpreter")
pytestmark = pytest.mark.models


@pytest.mark.parametrize("model", real_models(".tflite"), ids=lambda model: model.name)
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


def test_basic_pitch_gives_the_same_from_onnx_and_tflite() -> None:
    tflite, onnx = (
        next(model for model in real_models(suffix) if "basic-pitch" in model.name)
        for suffix in (".tflite", ".onnx")
    )
    feeds = tflite.feeds()
    one, other = (ps.compile(fetch(model)).run(feeds) for model in (tflite, onnx))
    by_number = {name.rpartition(":")[2]: value for name, value in one.items()}
    for name, want in other.items():
        np.testing.assert_allclose(by_number[name.rpartition(":")[2]], want, rtol=1e-3, atol=1e-3)
