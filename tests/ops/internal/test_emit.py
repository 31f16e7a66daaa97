"""Emit tells the run of a value, and has no result."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from penstock.core.types import FLOAT32, TensorType
from penstock.host.current_run import working_for
from penstock.ir.graph import Node, Value
from penstock.ops.internal.emit import EMIT


def test_emit_tells_the_run_that_works():
    type_ = TensorType(FLOAT32, (2,))
    node = Node(EMIT, [Value("x", type_)], [], {"name": "mine"})
    kernel, told = EMIT.compile(node, [type_]), []
    x = np.ones(2, np.float32)
    run = SimpleNamespace(sink=lambda *given: told.append(given), budget=None)
    assert working_for(run, kernel.function, x) is None
    assert told == [("mine", x)]
    assert kernel.function(x) is None  # without a run, as where plans are tried out
    assert EMIT.infer([type_], node.attrs, [None]) == () and not EMIT.pure
