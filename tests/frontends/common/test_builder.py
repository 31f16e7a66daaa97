"""A node of a file for its conversion rule, and the nodes that the rule emits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.types import FLOAT32, TensorType
from penstock.frontends.common.builder import NodeBuilder, UniqueNames
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.common.inferred_types import InferredTypes, constant_of
from penstock.ir.graph import Value


def builder(*inputs: Value | None, types: InferredTypes | None = None, **more: Any) -> NodeBuilder:
    return NodeBuilder(
        "n", inputs, [Value("y")], {}, types=types or InferredTypes(), origin="n in a file", **more
    )


def constant(data: Any, dtype: Any = np.int64) -> Value:
    return Value("c", const=np.array(data, dtype))


def test_emitted_nodes_have_the_origin_and_derived_names() -> None:
    b = builder(Value("x"))
    hidden = b.emit("Neg", b.inputs)
    b.emit_final("LeakyRelu", [hidden], {"alpha": 0.5})
    assert [(n.name, n.op.name, n.origin) for n in b.nodes] == [
        ("y/neg", "Neg", "n in a file"),
        ("n", "LeakyRelu", "n in a file"),
    ]
    assert b.nodes[1].outputs == b.outputs
    assert b.nodes[1].attrs == {"alpha": 0.5}
    assert hidden.name == "y/neg"


def test_emit_of_an_unknown_operation_is_inexpressible() -> None:
    with pytest.raises(InexpressibleError, match="no kernel is available for it"):
        builder().emit("Frobnicate", [])


def test_integers_among_the_inputs_of_an_emitted_node_become_constants() -> None:
    b = builder(Value("x"))
    b.emit("Reshape", [b.inputs[0], [0, -1]])
    shape = b.nodes[0].inputs[1]
    assert shape is not None
    assert shape.const is not None
    assert (shape.const.dtype, shape.const.tolist()) == (np.int64, [0, -1])


@pytest.mark.parametrize(("domain", "count"), [("", 1), ("tensorflow", 2)])
def test_inputs_left_out_at_the_end_are_dropped_from_nodes_of_onnx(domain: str, count: int) -> None:
    b = builder(Value("x"))
    b.emit("Identity" if not domain else "FloorDiv", [b.inputs[0], None], domain=domain)
    assert len(b.nodes[0].inputs) == count


def test_emit_several_gives_each_output_of_a_node_a_name() -> None:
    b = builder(Value("x"), unique=UniqueNames(list).unique)
    outputs = b.emit_several("Split", b.inputs, {"num_outputs": 2}, count=2)
    assert [value.name for value in outputs] == ["y/split", "y/split_1"]
    assert b.nodes[0].outputs == outputs


def test_cast_has_the_number_of_the_dtype() -> None:
    b = builder(Value("x"))
    b.cast(b.inputs[0], "float64")
    assert (b.nodes[0].op.name, b.nodes[0].attrs["to"]) == ("Cast", 11)


def test_like_without_a_dtype_casts_during_the_run() -> None:
    b = builder(Value("x"), Value("z", TensorType(np.dtype(np.float64), None)))
    x, z = b.inputs
    assert x is not None
    assert z is not None
    assert b.like(2, z).const == np.float64(2)
    assert b.nodes == []
    b.like(2, x)
    assert [node.op.name for node in b.nodes] == ["CastLike"]


def test_constant_beyond_the_range_of_its_dtype_is_infinite() -> None:
    assert builder().constant(1e60, FLOAT32).const == np.inf


def test_input_queries_read_constants() -> None:
    b = builder(constant([[1, 2]]), constant(3), constant([0.5], np.float32), None)
    assert (b.integers(0), b.shape(0), b.rank(0)) == ([1, 2], (1, 2), 2)
    assert (b.integer(0), b.integer(1)) == (None, 3)
    assert (b.integers(2), b.dtype(2)) == (None, FLOAT32)
    assert (b.input_constant(3), b.shape(3), b.dtype(3)) == (None, None, None)


def test_constant_of_looks_through_identities() -> None:
    value = constant([1, 2])
    b = builder()  # owns the nodes
    assert constant_of(b.emit("Identity", [value])) is value.const
    assert constant_of(b.emit("Neg", [value])) is None


def test_unique_names_skip_those_of_the_file() -> None:
    names = UniqueNames(lambda: ["a", "a_1"])
    assert [names.unique("a"), names.unique("a"), names.unique("b"), names.unique("b")] == [
        "a_2",
        "a_3",
        "b",
        "b_1",
    ]
