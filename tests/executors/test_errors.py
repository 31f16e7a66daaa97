"""Errors of runs: their cause, their node, and what they keep alive."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.extend import Kernel, operator, same_type
from tests.executors.test_run_ends import TWO, each_executor, feeds, session
from tests.support.onnx_text import compile_text


@each_executor
def test_failed_run_raises_run_error_with_its_cause(workers, executor):
    with pytest.raises(ps.RunError, match="Gather") as caught:
        session(TWO, executor, workers).run(feeds(7))
    assert caught.value.__cause__ is not None


@each_executor
def test_error_tells_whether_other_feeds_may_do(workers, executor):
    with pytest.raises(ps.RunError, match="out of") as caught:
        session(TWO, executor, workers).run(feeds(7))
    assert caught.value.by_feeds
    with pytest.raises(ps.DeadlineExceeded) as late:
        session(TWO, executor, workers).run(feeds(1), timeout=0)
    assert not late.value.by_feeds


@pytest.mark.parametrize("executor", ["linear", "parallel", "interpret"])
def test_frames_of_a_failed_run_have_their_arguments(executor):
    """IPython's tracebacks show these attributes."""
    text = (
        """g (float[4] x, int64[1] i) => (float[1] y) { a = Sin(x) y = Gather<axis = 0>(a, i) }"""
    )
    session = compile_text(text, executor=executor, backends=["numpy"])
    with pytest.raises(ps.RunError) as raised:
        session.run({"x": np.ones(4, np.float32), "i": np.array([9])})
    for entry in raised.traceback:
        code = entry.frame.code.raw
        assert {*code.co_varnames[: code.co_argcount]} <= {*entry.frame.f_locals}, entry


@pytest.mark.parametrize("executor", ["linear", "parallel", "frames", "interpret"])
@pytest.mark.parametrize("error", [AssertionError("rows"), NameError("rows")])
def test_error_of_kernel_of_user_is_a_run_error_that_is_not_to_be_reported(executor, error):
    """In Penstock's own kernels only bugs raise these, so they are ``InternalError`` there."""

    @operator("Raises", domain="test.errors", infer=same_type, replace=True)
    def compile_raising(node, types):
        def function(x):
            raise error

        return Kernel(function)

    text = "g (float[2] x) => (float[2] y) { y = test.errors.Raises(x) }"
    session = compile_text(text, domains={"test.errors": 1}, executor=executor, backends=["numpy"])
    with pytest.raises(ps.RunError, match=r"^Raises \(.*rows") as caught:
        session.run({"x": np.ones(2, np.float32)})
    assert "report" not in str(caught.value)
