"""Inputs and outputs in place, beside LiteRT."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from penstock import compile
from penstock.compat.ai_edge_litert import interpreter as ours
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


def test_invoke_makes_hardly_more_calls_than_a_run():
    """Users of LiteRT call ``invoke`` for models that take a microsecond."""
    interpreter = ours.Interpreter(model_content=doubling())
    interpreter.allocate_tensors()
    (x,) = interpreter.get_input_details()
    interpreter.set_tensor(x["index"], np.ones((2, 3), np.float32))
    session = compile(doubling())
    feeds = {"x": np.ones((2, 3), np.float32)}

    def calls(function: Callable[[], object]) -> int:
        function()
        seen: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, argument: seen.append(event))
        try:
            function()
        finally:
            sys.setprofile(before)
        return sum(event in ("call", "c_call") for event in seen)

    assert calls(interpreter.invoke) <= calls(lambda: session.run(feeds)) + 3
