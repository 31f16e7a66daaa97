"""Serialized examples as TensorFlow parses them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Shape, Type
from tests.support.tf_operations import operation_tests

test_operation_matches_tensorflow, test_reversed_nodes_match_tensorflow = operation_tests(
    "ops.tensorflow.examples"
)


def parser(shape: list[int], default: list[float]) -> ps.Session:
    """Parses one dense feature "f"."""
    g = Builder()
    keys = [np.array(names, object) for names in ([], [], ["f"], [])]
    inputs = [g.placeholder("x", "object", -1), *map(g.const, keys)]
    inputs.append(g.const(np.array(default, np.float32)))
    empty = ("sparse_types", "ragged_value_types", "ragged_split_types")
    attrs = {key: [] for key in empty} | {"num_sparse": 0, "Tdense": [Type("float32")]}
    g.node("ParseExampleV2", *inputs, name="y", **attrs, dense_shapes=[Shape(shape)])
    return ps.compile(g.bytes())


@pytest.mark.parametrize(
    ("text", "shape", "default", "match"),
    [
        (b"\n\x05ab", [2], [], "string 0 is no serialized tf.train.Example"),
        (b"", [2], [], "example 0 has no feature 'f', which has no default"),
        (b"\n\x0d\n\x0b\n\x01f\x12\x06\n\x04\n\x02ab", [2], [0, 0], "is a bytes_list"),
        (b"\n\x0f\n\r\n\x01f\x12\x08\x12\x06\n\x04\0\0\x40?", [2], [0, 0], "has 1 values, not 2"),
        (b"", [-1], [], "no single default"),
    ],
)
def test_examples_that_do_not_fit_are_refused(text, shape, default, match) -> None:
    with pytest.raises(ps.RunError, match=match):
        parser(shape, default).run({"x": np.array([text.decode("latin-1")], object)})


def test_keys_that_are_no_constants_are_refused() -> None:
    g = Builder()
    inputs = [g.placeholder(name, "object", -1) for name in ("x", "a", "b", "c", "d")]
    empty = ("sparse_types", "ragged_value_types", "ragged_split_types", "Tdense", "dense_shapes")
    g.node("ParseExampleV2", *inputs, name="y", **{key: [] for key in empty}, num_sparse=0)
    with pytest.raises(ps.Unsupported, match="keys are not constants"):
        ps.compile(g.bytes())
