"""Rules of operations on text, and of tables."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "frontends.tensorflow.rules_text"
)


X = np.array([1.5, 2.0, 3.0, 4.0], np.float32)


def printing(op: str, **attrs: object) -> Builder:
    g = Builder()
    g.node("Placeholder", name="x", dtype=Type("float32"))
    if op == "Print":
        types = {"T": Type("float32"), "U": [Type("float32"), Type("float32")]}
        g.node("Print", "x", "x", "x", name="y", **types, **attrs)
    else:
        text = g.node("AsString", "x", name="text", T=Type("float32"), precision=1)
        joined = g.node("ReduceJoin", text, g.const(np.array([0], np.int32)), name="joined")
        g.node("PrintV2", joined, name="printed", **attrs)
        g.node("Identity", "x", "^printed", name="y", T=Type("float32"))
    return g


@pytest.mark.parametrize("executor", ["linear", "frames"])
def test_print_of_either_version_writes_to_stderr(executor, capfd) -> None:
    first = printing("Print", message="x: ", first_n=1, summarize=1)
    session = ps.compile(first.bytes(), executor=executor)
    for _ in range(2):
        (y,) = session.run({"x": X}, ["y"]).values()
        np.testing.assert_array_equal(y, X)
    ps.compile(printing("PrintV2", end="|").bytes(), executor=executor).run({"x": X}, ["y"])
    assert capfd.readouterr().err == "x: [1.5 ... 4][1.5 ... 4]\n1.52.03.04.0|"


def test_print_to_a_file_is_refused() -> None:
    with pytest.raises(ps.PenstockError, match="output_stream 'file:///tmp/x' is not one of"):
        session = ps.compile(printing("PrintV2", output_stream="file:///tmp/x").bytes())
        session.run({"x": X}, ["y"])
