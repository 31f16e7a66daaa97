"""Cases of ``bench.tflite_operators``: layers, variables and control flow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flatbuffers import flexbuffers
from tests.support.tflite_models import TYPES, model, subgraph

from bench.tflite_operator_cases import (
    ACTIVATION,
    BuiltModel,
    Family,
    SingleOperator,
    Tensor,
    held,
    operator_cases,
)

LAYER = "float32 int8 uint8 int16x8 hybrid float16"
STRIDES = {"stride_w": 1, "stride_h": 1}
POOL = {"padding": 1, "stride_w": 2, "stride_h": 2, "filter_width": 2, "filter_height": 2}
_TANH = 4
SEQUENCE = (4, 8, 8), (16, 128, 128)
"""Steps, features and units."""


def _axis(t: Family, axis: int) -> int | None:
    """That along which weights have a scale for each index; None of uint8, which has one."""
    return None if t.type == "uint8" else axis


# Convolutions, pooling, resizing.


@operator_cases({"CONV_2D": LAYER}, (8, 8, 8, 3), (28, 64, 64, 3))
@operator_cases({"CONV_2D": LAYER}, (8, 8, 8, 1), (28, 128, 128, 1), form="1x1")
def conv(t: Family, name: str, size: int, channels: int, units: int, window: int) -> SingleOperator:
    inner = window * window * channels
    weights = t.weights(units, window, window, channels, axis=_axis(t, 0), inner=inner)
    inputs = [t.x(1, size, size, channels), weights, t.bias(weights, units)]
    return SingleOperator(name, inputs, [t.y()], {**STRIDES, "padding": 0}, version=5)


@operator_cases({"DEPTHWISE_CONV_2D": LAYER}, (8, 8), (56, 128))
def depthwise(t: Family, name: str, size: int, channels: int) -> SingleOperator:
    weights = t.weights(1, 3, 3, channels, axis=_axis(t, 3), inner=9)
    inputs = [t.x(1, size, size, channels), weights, t.bias(weights, channels)]
    options = {**STRIDES, "padding": 0, "depth_multiplier": 1}
    table = "DepthwiseConv2DOptions"
    return SingleOperator(name, inputs, [t.y()], options, table, version=6)


@operator_cases({"CONV_3D": "float32 float16"}, (4, 4, 4), (16, 16, 32))
def conv_3d(t: Family, name: str, depth: int, size: int, channels: int) -> SingleOperator:
    weights = t.weights(3, 3, 3, channels, channels, inner=27 * channels)
    inputs = [t.x(1, depth, size, size, channels), weights, t.bias(weights, channels)]
    options = {**STRIDES, "stride_d": 1, "padding": 0}
    return SingleOperator(name, inputs, [t.y()], options)


@operator_cases({"CONV_3D_TRANSPOSE": "float32 float16"}, (2, 3, 4), (8, 16, 16))
def conv_3d_transpose(t: Family, name: str, depth: int, size: int, channels: int) -> SingleOperator:
    weights = t.weights(3, 3, 3, channels, channels, inner=27 * channels)
    sizes = held(1, 2 * depth, 2 * size, 2 * size, channels)
    inputs = [sizes, weights, t.x(1, depth, size, size, channels)]
    options = {"stride_w": 2, "stride_h": 2, "stride_d": 2, "padding": 0}
    return SingleOperator(name, inputs, [t.y()], options, "Conv3DOptions")


@operator_cases({"TRANSPOSE_CONV": LAYER}, (4, 8, 8), (16, 64, 32))
def transpose_conv(t: Family, name: str, size: int, channels: int, units: int) -> SingleOperator:
    weights = t.weights(units, 3, 3, channels, axis=_axis(t, 0), inner=9 * channels)
    x, sizes = t.x(1, size, size, channels), held(1, 2 * size, 2 * size, units)
    inputs = [sizes, weights, x, t.bias(weights, units)]
    options = {"padding": 0, "stride_w": 2, "stride_h": 2}
    return SingleOperator(name, inputs, [t.y()], options, version=4)


@operator_cases(
    {
        "AVERAGE_POOL_2D": "float32 int8 uint8 int16",
        "MAX_POOL_2D": "float32 int8 uint8 int16",
        "L2_POOL_2D": "float32",
    },
    (1, 8, 8, 8),
    (1, 112, 112, 64),
)
def pool(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.y()], POOL, "Pool2DOptions")


@operator_cases({"LOCAL_RESPONSE_NORMALIZATION": "float32"}, (1, 8, 8, 8), (1, 28, 28, 96))
def local_response(t: Family, name: str, *dims: int) -> SingleOperator:
    options = {"radius": 2, "bias": 1.0, "alpha": 0.5, "beta": 0.75}
    return SingleOperator(name, [t.x(*dims)], [t.y()], options)


@operator_cases(
    {
        "RESIZE_BILINEAR": "float32 int8 uint8 int16",
        "RESIZE_NEAREST_NEIGHBOR": "float32 int8 uint8 int16",
    },
    (8, 8),
    (64, 32),
)
def resize(t: Family, name: str, size: int, channels: int) -> SingleOperator:
    inputs = [t.x(1, size, size, channels), held(2 * size, 2 * size)]
    return SingleOperator(name, inputs, [t.y()], {"half_pixel_centers": True}, version=3)


# Matrices.


@operator_cases({"FULLY_CONNECTED": LAYER}, (1, 64, 16), (32, 768, 768))
@operator_cases({"FULLY_CONNECTED": LAYER}, (1, 256, 128), (1, 1024, 1024), form="one row")
def fully_connected(t: Family, name: str, rows: int, inner: int, units: int) -> SingleOperator:
    weights = t.weights(units, inner, axis=_axis(t, 0), inner=inner)
    inputs = [t.x(rows, inner), weights, t.bias(weights, units)]
    return SingleOperator(name, inputs, [t.y()], version=9)


@operator_cases({"BATCH_MATMUL": "float32 int8 int16"}, (1, 4, 8, 8), (4, 64, 256, 256))
def batch_matmul(
    t: Family, name: str, batch: int, rows: int, inner: int, width: int
) -> SingleOperator:
    size = 1 / np.sqrt(inner)
    operands = [t.x(batch, rows, inner, times=size), t.x(batch, inner, width, times=size)]
    return SingleOperator(name, operands, [t.y()])


@operator_cases(
    {"BATCH_MATMUL": "float32 int8 hybrid float16"}, (4, 8, 8), (64, 256, 256), form="of weights"
)
def batch_matmul_of_weights(
    t: Family, name: str, rows: int, inner: int, width: int
) -> SingleOperator:
    weights = t.weights(1, inner, width, inner=inner)
    return SingleOperator(name, [t.x(1, rows, inner), weights], [t.y()])


# Recurrent layers. States carry over from run to run, of both engines alike.


def _state(*dims: int) -> Tensor:
    return Tensor(np.zeros(dims, np.float32), variable=True)


def _gates(t: Family, features: int, units: int) -> list[Tensor | None]:
    """Weights of four gates, recurrent ones, no peepholes, biases, and no projection."""
    own = [t.weights(units, features, inner=features) for _ in range(4)]
    recurrent = [t.weights(units, units, inner=units) for _ in range(4)]
    biases = [t.bias(own[0], units) for _ in range(4)]
    return [*own, *recurrent, None, None, None, *biases, None, None]


@operator_cases({"UNIDIRECTIONAL_SEQUENCE_LSTM": "float32 hybrid float16"}, *SEQUENCE)
@operator_cases({"LSTM": "float32 hybrid"}, *SEQUENCE)
def lstm(t: Family, name: str, steps: int, features: int, units: int) -> SingleOperator:
    is_step = name == "LSTM"
    x = t.x(1, features) if is_step else t.x(steps, 1, features)
    states = [_state(1, units), _state(1, units)]
    options: dict[str, Any] = {"fused_activation_function": _TANH}
    options |= {} if is_step else {"time_major": True}
    inputs = [x, *_gates(t, features, units), *states, None, None, None, None]
    return SingleOperator(name, inputs, [t.y()], options, version=1)


@operator_cases({"UNIDIRECTIONAL_SEQUENCE_LSTM": "int8", "LSTM": "int8"}, *SEQUENCE)
def integer_lstm(t: Family, name: str, steps: int, features: int, units: int) -> SingleOperator:
    is_step, hidden = name == "LSTM", (1 / 120, -7)
    x = t.x(1, features) if is_step else t.x(steps, 1, features)
    x = replace(x, scale=0.015, zero=4)
    own = [replace(t.weights(units, features), scale=0.006 / np.sqrt(features / 4))] * 4
    recurrent = [replace(t.weights(units, units), scale=0.006 / np.sqrt(units / 4))] * 4
    drawn = t.rng.integers(-2000, 2000, units).astype(np.int32)
    biases = [Tensor(drawn, 0.015 * float(own[0].scale), held=True)] * 4
    states = [
        Tensor(np.zeros((1, units), np.int8), *hidden, variable=True),
        Tensor(np.zeros((1, units), np.int16), 2.0**-11, variable=True),
    ]
    inner = [Tensor(np.zeros(0, np.int16), 2.0**-12) for _ in range(4)]
    inner.append(Tensor(np.zeros(0, np.int8), *hidden))
    options: dict[str, Any] = {"fused_activation_function": _TANH}
    options |= {} if is_step else {"time_major": True}
    layer = [x, *own, *recurrent, None, None, None, *biases, None, None, *states, *[None] * 4]
    outputs = [Tensor(np.zeros(0, np.int8), *hidden)]
    return SingleOperator(name, layer, outputs, options, between=inner, version=3)


@operator_cases({"BIDIRECTIONAL_SEQUENCE_LSTM": "float32 hybrid"}, *SEQUENCE)
def bidirectional_lstm(
    t: Family, name: str, steps: int, features: int, units: int
) -> SingleOperator:
    gates = [_gates(t, features, units) for _ in range(2)]
    states = [_state(1, units) for _ in range(4)]
    options = {"fused_activation_function": _TANH, "time_major": True, "merge_outputs": False}
    inputs = [t.x(steps, 1, features), *gates[0], *gates[1], *states, *[None] * 9]
    return SingleOperator(name, inputs, [t.y(), t.y()], options)


def _simple(t: Family, features: int, units: int) -> list[Tensor]:
    own, recurrent = (
        t.weights(units, features, inner=features),
        t.weights(units, units, inner=units),
    )
    return [own, recurrent, t.bias(own, units), _state(1, units)]


@operator_cases({"RNN": "float32 hybrid"}, (8, 8), (256, 256))
def rnn(t: Family, name: str, features: int, units: int) -> SingleOperator:
    options = {"fused_activation_function": _TANH}
    inputs = [t.x(1, features), *_simple(t, features, units)]
    return SingleOperator(name, inputs, [t.y()], options, "RNNOptions")


@operator_cases({"UNIDIRECTIONAL_SEQUENCE_RNN": "float32 hybrid"}, *SEQUENCE)
def sequence_rnn(t: Family, name: str, steps: int, features: int, units: int) -> SingleOperator:
    options = {"fused_activation_function": _TANH, "time_major": True}
    inputs = [t.x(steps, 1, features), *_simple(t, features, units)]
    return SingleOperator(name, inputs, [t.y()], options, "SequenceRNNOptions")


@operator_cases({"BIDIRECTIONAL_SEQUENCE_RNN": "float32 hybrid"}, *SEQUENCE)
def bidirectional_rnn(
    t: Family, name: str, steps: int, features: int, units: int
) -> SingleOperator:
    layers = [*_simple(t, features, units), *_simple(t, features, units)]
    options = {"fused_activation_function": _TANH, "time_major": True, "merge_outputs": False}
    inputs = [t.x(steps, 1, features), *layers, None, None, None]
    return SingleOperator(name, inputs, [t.y(), t.y()], options)


@operator_cases({"SVDF": "float32 hybrid int8"}, (16, 8, 8), (256, 128, 10))
def svdf(t: Family, name: str, features: int, units: int, steps: int) -> SingleOperator:
    filters, options = 2 * units, {"rank": 2}
    if t.type == "int8":
        x = replace(t.x(1, features), scale=0.02, zero=3)
        own = replace(t.weights(filters, features), scale=0.01 / np.sqrt(features / 8))
        drawn = t.rng.integers(-25000, 25000, (filters, steps)).astype(np.int16)
        times = Tensor(drawn, 2.0**-16, held=True)
        drawn = t.rng.integers(-127, 128, units).astype(np.int32)
        bias = Tensor(drawn, 2.0**-26, held=True)
        state = Tensor(np.zeros((1, filters * steps), np.int16), 2.0**-10, variable=True)
        y, options = Tensor(np.zeros(0, np.int8), 0.02, -128), {"rank": 2, **_RELU}
        return SingleOperator(name, [x, own, times, bias, state], [y], options, version=4)
    own = t.weights(filters, features, inner=features)
    times = t.weights(filters, steps, inner=steps)
    inputs = [t.x(1, features), own, times, t.bias(own, units), _state(1, filters * steps)]
    return SingleOperator(name, inputs, [t.y()], options)


_RELU = {"fused_activation_function": 1}

# Variables and control flow.


def _plain(t: Family, operators: Sequence[Any], dims: Sequence[int]) -> dict[str, Any]:
    """A subgraph from x to y of float32."""
    return subgraph({"x": ("float32", dims)}, operators, ["y"], y={"shape": [*dims]})


@operator_cases({"ASSIGN_VARIABLE": "float32"}, (64,), (100_000,))
def variable(t: Family, name: str, count: int) -> BuiltModel:
    """A variable that CALL_ONCE fills, and to which each run adds x."""
    handle = ("VAR_HANDLE", [], ["h"], ("VarHandleOptions", {"container": "", "shared_name": "h"}))
    main = [
        ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1})),
        handle,
        ("READ_VARIABLE", ["h"], ["old"], None),
        ("ADD", ["old", "x"], ["y"], ("AddOptions", {})),
        (name, ["h", "y"], [], None),
    ]
    resource = {"type": TYPES.index("resource")}
    zeros = {"c": np.zeros(count, np.float32)}
    shapes = {each: {"shape": [count]} for each in ("old", "y")}
    graphs = [
        subgraph({"x": ("float32", [count])}, main, ["y"], h=resource, **shapes),
        subgraph({}, [handle, (name, ["h", "c"], [], None)], [], zeros, h=resource),
    ]
    return BuiltModel(model(graphs), {"x": t.array(count)})


@operator_cases({"IF": "float32"}, *ACTIVATION)
def branch(t: Family, name: str, *dims: int) -> BuiltModel:
    options = {"then_subgraph_index": 1, "else_subgraph_index": 2}
    inputs = {"c": ("bool", [1]), "x": ("float32", dims)}
    operator = (name, ["c", "x"], ["y"], ("IfOptions", options))
    main = subgraph(inputs, [operator], ["y"], y={"shape": [*dims]})
    branches = [_plain(t, [(op, ["x"], ["y"], None)], dims) for op in ("ABS", "NEG")]
    return BuiltModel(model([main, *branches]), {"c": np.array([True]), "x": t.array(*dims)})


@operator_cases({"STABLEHLO_CASE": "float32"}, *ACTIVATION)
def case(t: Family, name: str, *dims: int) -> BuiltModel:
    options = ("StablehloCaseOptions", {"branch_subgraph_indices": [1, 2]})
    inputs = {"i": ("int32", [1]), "x": ("float32", dims)}
    main = subgraph(inputs, [(name, ["i", "x"], ["y"], options)], ["y"], y={"shape": [*dims]})
    branches = [_plain(t, [(op, ["x"], ["y"], None)], dims) for op in ("ABS", "NEG")]
    return BuiltModel(model([main, *branches]), {"i": np.array([1], np.int32), "x": t.array(*dims)})


@operator_cases({"STABLEHLO_COMPOSITE": "float32"}, *ACTIVATION)
def composite(t: Family, name: str, *dims: int) -> BuiltModel:
    options = {"name": "composite", "decomposition_subgraph_index": 1}
    options |= {"composite_attributes": bytes(flexbuffers.Dumps({}))}
    operator = (name, ["x"], ["y"], ("StableHLOCompositeOptions", options))
    graphs = [_plain(t, [op], dims) for op in (operator, ("ABS", ["x"], ["y"], None))]
    return BuiltModel(model(graphs), {"x": t.array(*dims)})


@operator_cases({"WHILE": "float32"}, (8, 10), (10_000, 100))
def loop(t: Family, name: str, width: int, iterations: int) -> BuiltModel:
    """A counter, and a vector that each iteration halves."""
    inputs = {"n": ("int32", [1]), "x": ("float32", [width])}
    options = ("WhileOptions", {"cond_subgraph_index": 1, "body_subgraph_index": 2})
    results = {"m": {"type": TYPES.index("int32"), "shape": [1]}, "y": {"shape": [width]}}
    add = ("ADD", ["n", "one"], ["m"], ("AddOptions", {}))
    multiply = ("MUL", ["x", "half"], ["y"], ("MulOptions", {}))
    constants = {"one": np.array([1], np.int32), "half": np.array([0.5], np.float32)}
    end, truth = np.array([iterations], np.int32), {"type": TYPES.index("bool"), "shape": [1]}
    graphs = [
        subgraph(inputs, [(name, ["n", "x"], ["m", "y"], options)], ["m", "y"], **results),
        subgraph(inputs, [("LESS", ["n", "end"], ["c"], None)], ["c"], {"end": end}, c=truth),
        subgraph(inputs, [add, multiply], ["m", "y"], constants, **results),
    ]
    return BuiltModel(model(graphs), {"n": np.zeros(1, np.int32), "x": t.array(width)})
