"""Operations that run by ``onnx.reference``."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_node_with_more_outputs_than_its_inputs_give_is_an_error(executor: str) -> None:
    """One tensor is optimized, and outputs of two are asked for."""
    text = """g (float r, int64 t, float[1] x, float[1] g, float[1] h) => (float[1] y) {
        y, z, u = ai.onnx.preview.training.Adagrad(r, t, x, g, h) }"""
    model = model_from_text(text, domains={"ai.onnx.preview.training": 1})
    one = np.ones(1, np.float32)
    feeds = {"r": np.float32(1), "t": np.int64(0), "x": one, "g": one, "h": one}
    session = ps.compile(model, executor=executor, backends=["numpy"])
    with pytest.raises(ps.RunError, match="give 2 outputs, not 3"):
        session.run(feeds)
