"""ZeroNaN is Where(IsNaN(x), 0, x)."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.zero_nan import ZERO_NAN


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_no_number_becomes_0_and_all_else_stays(dtype):
    type_ = TensorType(np.dtype(dtype), (5,))
    node = Node(ZERO_NAN, [Value("x", type_)], [Value("y", type_)])
    kernel = ZERO_NAN.compile(node, [type_])
    x = np.array([np.nan, -0.0, np.inf, -np.inf, 3], dtype)
    wanted = np.array([0, -0.0, np.inf, -np.inf, 3], dtype)
    y, out = kernel.function(x), np.ones(5, dtype)
    kernel.into(x, out)
    for result in (y, out):
        assert (result.dtype, result.tobytes()) == (wanted.dtype, wanted.tobytes())
    assert np.isnan(x[0])
    kernel.into(x, x)
    assert x.tobytes() == wanted.tobytes()
