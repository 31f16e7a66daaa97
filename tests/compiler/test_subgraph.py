"""A part of a model: the keys of its plans, and what it is fed."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.compiler.subgraph import NO_PLAN, Subgraph, compile_guard
from penstock.core.errors import InvalidInput, LimitExceeded
from tests.support.onnx_text import graph_from_text

X = np.ones(3, np.float32)


def subgraph(text: str) -> Subgraph:
    return Subgraph(graph_from_text(text), ["y"])


def test_key_of_a_feed_with_declared_dtype_has_the_shape() -> None:
    part = subgraph("g (float[N] x) => (float[N] y) { y = Neg(x) }")
    assert not part.depends_on_dtypes
    assert part.key([X]) == ((3,),)


def test_key_of_a_feed_without_declared_dtype_has_the_dtype() -> None:
    part = subgraph("g (x) => (y) { y = Identity(x) }")
    assert part.depends_on_dtypes
    assert part.key([X]) == (((3,), np.dtype(np.float32)),)
    assert part.key([X]) != part.key([X.astype(np.int32)])


def test_values_are_in_the_order_of_the_inputs_and_converted() -> None:
    part = subgraph("g (float[N] a, int64[1] b) => (float[N] y) { y = Reshape(a, b) }")
    first, second = part.values({"b": [3], "a": X})
    assert first is X
    np.testing.assert_array_equal(second, np.array([3]))
    with pytest.raises(KeyError):
        part.values({"a": X, "b": [3], "c": X})
    with pytest.raises(InvalidInput, match="input 'a' must be float32, not int32"):
        part.values({"a": X.astype(np.int32), "b": [3]})


def test_graph_that_a_function_makes_is_made_once() -> None:
    made = []

    def make():
        made.append(graph_from_text("g (float[N] x) => (float[N] y) { y = Neg(x) }"))
        return made[-1]

    known = make()
    part = Subgraph(make, ["y"], inputs=known.inputs, results=known.outputs)
    assert part.names == ("x",) and part.last is NO_PLAN and len(made) == 1
    assert part.graph is part.graph is made[1]


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError("full")])
def test_model_that_is_too_large_exceeds_a_limit(error: Exception) -> None:
    with pytest.raises(LimitExceeded), compile_guard():
        raise error
