"""Inputs and outputs in place, beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compat.ai_edge_litert.test_interpreter import BOTH, doubling


@BOTH
def test_inputs_are_resized_and_written_in_place(runtime):
    interpreter = runtime.Interpreter(model_content=doubling())
    (x,) = interpreter.get_input_details()
    (y,) = interpreter.get_output_details()
    interpreter.resize_tensor_input(x["index"], [4, 3])
    interpreter.allocate_tensors()
    assert interpreter.get_input_details()[0]["shape"].tolist() == [4, 3]
    interpreter.tensor(x["index"])().fill(2)
    interpreter.invoke()
    np.testing.assert_array_equal(
        interpreter.get_tensor(y["index"]), np.full((4, 3), 4, np.float32)
    )
    assert interpreter.get_output_details()[0]["shape"].tolist() == [4, 3]
    with pytest.raises(RuntimeError, match="ResizeInputTensorStrict only allows"):
        interpreter.resize_tensor_input(x["index"], [5, 3], strict=True)
