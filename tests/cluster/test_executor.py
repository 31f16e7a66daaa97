"""Runs of graphs with frames on workers end with their values."""

from __future__ import annotations

import numpy as np

import penstock as ps
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import INT, Names, add, const, enter, while_loop
from tests.support.timing import SOON


def test_value_that_is_never_sent_does_not_hold_the_run(cluster):
    """A value that only the first iteration has, on another worker than its reader."""
    b = Builder()
    n = b.placeholder("n", "int32")
    once = enter(b, "loop", n, 10)
    limit = enter(b, "loop", n, 10, True)

    def body(values: Names) -> Names:
        add(b, add(b, once, once), values[0])
        return [add(b, values[0], const(b, 1, values[0]))]

    (ended,) = while_loop(
        b, "loop", [b.const(np.int32(0))], lambda v: b.node("Less", v[0], limit, T=INT), body
    )
    reader = b.proto.node[[node.name for node in b.proto.node].index("loop/next0") - 3]
    for node in b.proto.node:
        node.device = f"/job:worker/task:{int(node is reader)}"
    session = ps.compile(b.bytes(), cluster=cluster)
    outputs = session.run({"n": np.int32(4)}, [ended], [reader.name], timeout=SOON)
    assert outputs[ended] == 4
    assert len(session.inspect.executor.parts) == 2
