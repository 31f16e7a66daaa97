"""Errors of runs: their cause, their node, and what they keep alive."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.executors.test_run_ends import TWO, each_executor, feeds, session
from tests.support.onnx_text import compile_text


@each_executor
def test_failed_run_raises_run_error_with_its_cause(workers, executor):
    with pytest.raises(ps.RunError, match="Gather") as caught:
        session(TWO, executor, workers).run(feeds(7))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("executor", ["linear", "parallel", "interpret"])
def test_frames_of_a_failed_run_have_their_arguments(executor):
    """Which IPython's tracebacks show."""
    text = (
        """g (float[4] x, int64[1] i) => (float[1] y) { a = Sin(x) y = Gather<axis = 0>(a, i) }"""
    )
    session = compile_text(text, executor=executor, backends=["numpy"])
    with pytest.raises(ps.RunError) as raised:
        session.run({"x": np.ones(4, np.float32), "i": np.array([9])})
    for entry in raised.traceback:
        code = entry.frame.code.raw
        assert {*code.co_varnames[: code.co_argcount]} <= {*entry.frame.f_locals}, entry
