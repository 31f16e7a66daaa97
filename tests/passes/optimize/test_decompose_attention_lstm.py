"""AttnLSTM by steps of compiled kernels, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from tests.ops.microsoft.test_attention_lstm import POSITIONS, WEIGHTS, B, H, inputs

NAMES = ("Y", "Y_h", "Y_c")


def model_of(values: list[Any], attrs: dict[str, Any], names: tuple[str, ...]) -> bytes:
    constants = {*WEIGHTS, 13}
    given = [(i, x) for i, x in enumerate(values) if x is not None]
    node = helper.make_node(
        "AttnLSTM",
        ["" if x is None else f"x{i}" for i, x in enumerate(values)],
        [name if name in names else "" for name in NAMES],
        domain="com.microsoft",
        **attrs,
    )
    types = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(f"x{i}", types[str(x.dtype)], x.shape)
            for i, x in given
            if i not in constants
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names],
        [numpy_helper.from_array(x, f"x{i}") for i, x in given if i in constants],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return model.SerializeToString()


def feeds_of(values: list[Any]) -> dict[str, np.ndarray]:
    fed = set(range(14)) - {*WEIGHTS, 13}
    return {f"x{i}": values[i] for i in fed if values[i] is not None}


def check(values: list[Any], attrs: dict[str, Any], names: tuple[str, ...] = NAMES) -> ps.Session:
    model, feeds = model_of(values, attrs, names), feeds_of(values)
    expected = onnxruntime.InferenceSession(model).run(list(names), feeds)
    session = ps.compile(model)
    for got, want in zip(session.run(feeds).values(), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return session


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_attention_lstm_by_steps_matches_onnx_runtime(direction, batch, mixed) -> None:
    directions = 2 if direction == "bidirectional" else 1
    values = inputs(batch, directions, mixed=mixed)
    session = check(values, {"hidden_size": H, "direction": direction})
    assert "attnlstm" not in session.source and "lstmcell" in session.source


@pytest.mark.parametrize("names", [("Y",), ("Y_h",), ("Y_h", "Y_c")])
def test_states_and_lengths_of_the_memory_match_onnx_runtime(names) -> None:
    values, rng = inputs(B, 2), np.random.default_rng(31)
    values[12] = np.array([4, POSITIONS, 1], np.int32)
    values[5], values[6] = rng.standard_normal((2, 2, B, H)).astype(np.float32) / 2
    session = check(values, {"hidden_size": H, "direction": "bidirectional"}, names)
    assert "attnlstm" not in session.source


@pytest.mark.parametrize("length", [0, POSITIONS + 1])
def test_length_beyond_the_memory_is_refused(length) -> None:
    values = inputs(B)
    values[12] = np.array([1, length, 2], np.int32)
    session = ps.compile(model_of(values, {"hidden_size": H}, ("Y",)))
    with pytest.raises(ps.RunError, match="lengths of the memory must lie in 1 to 9"):
        session.run(feeds_of(values))


def test_layer_of_other_activations_stays_one_node() -> None:
    attrs = {"hidden_size": H, "activations": ["Sigmoid", "Softsign", "Relu"]}
    assert "attnlstm" in check(inputs(B), attrs).source
