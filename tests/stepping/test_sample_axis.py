"""Sessions with an axis of samples."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import CompileOptions
from penstock.core.errors import RowsStay
from penstock.stepping.sample_axis import session_of_samples
from tests.support.onnx_text import model_from_text


def test_session_has_samples_in_front_of_all_inputs_and_outputs() -> None:
    text = "g (float[1, 3] x, float k) => (float[1, 3] y) { y = Mul (x, k) }"
    session = session_of_samples(ps.load(model_from_text(text)), CompileOptions())
    x, k = np.ones((4, 1, 3), np.float32), np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(session.run({"x": x, "k": k})["y"], x * k[:, None, None])


def test_work_that_is_done_for_one_sample_after_another_is_refused() -> None:
    text = (
        "g (float[3] x) => (uint8[3] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear (x) }"
    )
    with pytest.raises(RowsStay, match=r"DynamicQuantizeLinear.* one sample at a time"):
        session_of_samples(ps.load(model_from_text(text)), CompileOptions())
