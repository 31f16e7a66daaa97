"""Sequences compute what their steps do, and name the one that fails."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from tests.codegen.test_sequences import CHAIN, calls, chain
from tests.support.onnx_text import compile_text

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


def test_a_sequence_computes_what_its_steps_do() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    (wanted,) = compile_text(CHAIN, executor="interpret").run({"x": x}).values()
    for executor in ("linear", "dataflow", "parallel", "streams", "frames"):
        (y,) = chain(executor=executor).run({"x": x}).values()
        np.testing.assert_allclose(y, wanted, rtol=1e-6)


def test_array_with_gaps_is_read_by_the_first_step_of_a_sequence() -> None:
    x = np.random.default_rng(0).normal(size=(4, 12)).astype(np.float32)[:, ::2]
    (wanted,) = compile_text(CHAIN, executor="interpret").run({"x": x}).values()
    (y,) = chain().run({"x": x}).values()
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


@pytest.mark.parametrize("place", range(2))
def test_error_in_a_sequence_names_the_step_that_has_raised_it(place: int) -> None:
    session = compile_text(
        """g (float[3] x, int64[3] i, int64[3] j) => (float[3] y) <int64 zero = {0}> {
            k = CumSum(i, zero) l = CumSum(j, zero) a = CumSum(x, zero)
            [first] b = GatherElements(a, k) [second] c = GatherElements(b, l)
            y = Softmax(c) }""",
        backends=["native", "numpy"],
    )
    indices = [np.array([0, 1, 1]), np.array([0, 1, 1])]
    x = np.ones(3, np.float32)
    assert session.run({"x": x, "i": indices[0], "j": indices[1]})["y"].shape == (3,)
    assert calls(session.source)[0] == "sequence_0"
    indices[place] = np.array([0, 1, 10])
    with pytest.raises(ps.RunError, match=("first", "second")[place]):
        session.run({"x": x, "i": indices[0], "j": indices[1]})


CONVOLUTIONS = """g (float[1,8,6,6] x, float[1,8,6,6] z) => (float[1,8,6,6] y) {
    s = Sum(x, z, x) a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(s, w)
    b = Relu(a) c = Conv(b, v) y = Softmax(c) }"""
