"""Weights of recurrent layers are held in the order of compiled code alone, and given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import penstock as ps
from penstock.backends.registry import available
from penstock.core.errors import PenstockError

RNG = np.random.default_rng(0)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
WIDTH, HIDDEN = 70, 65


def layer(cell: str, directions: int, dtype: Any = np.float32) -> onnx.ModelProto:
    rows = GATES[cell] * HIDDEN
    bits = {
        name: RNG.integers(0, 2**32, (directions, rows, columns), np.uint32).view(dtype)
        for name, columns in (("w", WIDTH), ("r", HIDDEN))
    }
    direction = "bidirectional" if directions == 2 else "reverse"
    attrs = {"hidden_size": HIDDEN, "direction": direction}
    node = helper.make_node(cell, ["x", "w", "r"], ["y"], **attrs)
    code = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", code, ["steps", 1, WIDTH])],
        [helper.make_tensor_value_info("y", code, None)],
        [numpy_helper.from_array(array, name) for name, array in bits.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_weights_are_given_back_bit_by_bit(cell: str, directions: int) -> None:
    if "native" not in available():
        pytest.skip("needs native")
    proto = layer(cell, directions)
    model = ps.load(proto)
    session = ps.compile(model, backends=["native", "numpy"], threads=1)
    session.run({"x": np.zeros((3, 1, WIDTH), np.float32)})
    values = {v.name: v for node in model.graph.nodes for v in node.inputs if v is not None}
    for name, array in weights(proto).items():
        value = values[name]
        assert value.held is None
        assert np.array_equal(value.const.view(np.uint32), array.view(np.uint32))
        assert value.const is value.const
        assert not value.const.flags.writeable


@pytest.mark.parametrize("cell", GATES)
def test_recurrent_plans_for_more_lengths_share_weights_that_were_let_go(cell: str) -> None:
    if "native" not in available():
        pytest.skip("needs native")
    proto = layer(cell, 1)
    for tensor in proto.graph.initializer:
        shape = tuple(tensor.dims)
        small = (RNG.standard_normal(shape) / 8).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(small, tensor.name))
    model = ps.load(proto)
    session = ps.compile(model, backends=["native", "numpy"])
    reference = ps.compile(proto, backends=["numpy"])
    (value,) = {v for n in model.graph.nodes for v in n.inputs if v is not None and v.name == "w"}
    holders = set()
    for steps in (3, 4, 3, 5):
        x = RNG.standard_normal((steps, 1, WIDTH)).astype(np.float32)
        expected = reference.run({"x": x})["y"]
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
        session.trim()
        assert value.held is None
        holders.add(value._rematerialize.__self__)
    assert len(holders) == 1, "one copy for all plans"


def test_lengths_that_compiled_code_refuses_are_explained_after_weights_were_let_go() -> None:
    if "native" not in available():
        pytest.skip("needs native")
    proto = layer("GRU", 1)
    proto.graph.node[0].input.extend(["", "lengths"])
    lengths = helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, [1])
    proto.graph.input.append(lengths)
    session = ps.compile(ps.load(proto), backends=["native", "numpy"])
    x = np.zeros((3, 1, WIDTH), np.float32)
    session.run({"x": x, "lengths": np.array([2], np.int32)})
    with pytest.raises(PenstockError, match="sequence_lens"):
        session.run({"x": x, "lengths": np.array([9], np.int32)})
