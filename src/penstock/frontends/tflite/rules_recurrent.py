"""Rules of recurrent layers, whose states are variables: they carry over from run to run.

A *layer* is a function of x [time, batch, features], a flag to read it from its end, and a flag for
time first rather than batch first, to outputs [time, batch, units] in the same order. Operators of
sequences and of single steps emit it around their input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.frontends.tflite.rules_control import State
from penstock.ir.graph import Value
from penstock.ops.common.dtypes import INT8, INT16, INT32
from penstock.ops.registry import TFLITE

Layer: TypeAlias = Callable[[Value, bool, bool], Value]
_Given: TypeAlias = Sequence[Value | None]

_TANH = 4
_ACTIVATIONS = {0: "Affine", 1: "Relu", _TANH: "Tanh"}
_OUTPUT_STATE, _LSTM_INPUTS = 18, 24


def _emit_sequences(c: OperatorConversion, x: Value, *layers: Layer) -> None:
    """Emit layers that read the sequence ``x``, the second layer from its end."""
    results = [layer(x, i > 0, bool(c.option("time_major"))) for i, layer in enumerate(layers)]
    if len(layers) == 1:
        c.emit_final("Identity", results)
    elif c.option("merge_outputs"):
        c.emit_final("Concat", results, {"axis": 2})
    else:
        for result, output in zip(results, c.outputs, strict=True):
            c.append("Identity", "", [result], [output], None, c.fresh("result"))


def _emit_step(c: OperatorConversion, x: Value, layer: Layer) -> None:
    """Emit a layer that reads one step of a sequence, ``x`` [batch, features]."""
    y = layer(c.emit("Unsqueeze", [x, [0]]), False, True)
    c.emit_final("Squeeze", [y, [0]], outputs=c.outputs[-1:])


def _rows(c: OperatorConversion, weights: Value) -> int:
    shape = c.types.tensor(weights).shape if weights.const is None else weights.const.shape
    if not shape or not isinstance(shape[0], int):
        raise InexpressibleError("the number of its units is not known before a run")
    return shape[0]


def _with_zeros(c: OperatorConversion, biases: Value, axis: int) -> Value:
    """Return ONNX's biases of the inputs and of the state; TFLite only has the former."""
    none = c.emit("Mul", [biases, c.like(0, biases)])
    return c.emit("Concat", [biases, none], axis=axis)


# Layers with gates.


def _lstm(
    c: OperatorConversion, given: _Given, state: int, x: Value, reverse: bool, time_first: bool
) -> Value:
    """An LSTM. ``given`` are the inputs of UNIDIRECTIONAL_SEQUENCE_LSTM, in its order; its states
    are the operator's inputs from ``state`` on."""
    # The gates are i, f, g, o in TFLite, and i, o, f, g in ONNX. Without weights for i it is 1 - f.
    gates = [gate for gate in (0, 3, 1, 2) if gate or given[1] is not None]

    def stacked(first: int) -> Value | None:
        """Return the tensors of all gates, concatenated."""
        parts = [given[first + gate] for gate in gates]
        return None if None in parts else c.emit("Concat", parts, axis=0)

    w, r, bias, scales = (stacked(first) for first in (1, 5, 12, 20))
    if w is None or r is None or bias is None or given[2] is None:
        raise NodeError("leaves out weights or biases that each LSTM has")
    # TFLite has peepholes for i, f, o; ONNX for i, o, f.
    peepholes = [given[9 + gate] for gate in (0, 2, 1) if gate in gates]
    joined = None if None in peepholes else c.emit("Concat", peepholes, axis=0)
    states = [State(c, state), State(c, state + 1)]
    weights = [
        None if value is None else c.emit("Unsqueeze", [value, [0]])
        for value in (w, r, _with_zeros(c, bias, 0), joined)
    ]
    first = [c.emit("Unsqueeze", [each.value, [1 - time_first]]) for each in states]
    inputs = [x, *weights[:3], None, *first, weights[3]]
    clips = {name: float(c.option(name)) for name in ("cell_clip", "proj_clip")}
    activation, extras = c.option("fused_activation_function"), [*given[16:18], scales]
    attrs = {
        "hidden_size": _rows(c, given[2]),
        "direction": "reverse" if reverse else "forward",
        "layout": 1 - time_first,
    }
    # ONNX's LSTM has no projection, no scales of gates, and cannot clip only cells.
    if len(gates) == 4 and activation == _TANH and not any(clips.values()) and extras == [None] * 3:
        y, *ends = c.emit_several("LSTM", inputs, attrs, count=3)
    else:
        own = {**attrs, **clips, "activation": activation}
        y, *ends = c.emit_several("Lstm", [*inputs, *extras], own, count=3, domain=TFLITE)
    for each, end in zip(states, ends, strict=True):
        each.write(c.emit("Squeeze", [end, [1 - time_first]]))
    return c.emit("Squeeze", [y, [2 - time_first]])


def _is_integer(c: OperatorConversion) -> bool:
    """Whether ``IntegerLstm`` computes an LSTM: it has 8-bit codes and 16-bit gates, and no
    peepholes, projection or normalized gates."""
    given = c.inputs
    if len(given) < _OUTPUT_STATE + 2 or INT8 not in c.output_dtypes[-1:] or c.dtype(0) != INT8:
        return False
    others = *given[9:12], *given[16:18], *given[20:]
    activation = c.option("fused_activation_function")
    return others.count(None) == len(others) and activation == _TANH and _fits(c) and _scaled(c)


def _fits(c: OperatorConversion) -> bool:
    """Whether weights and biases of four gates are constants whose shapes fit."""
    values = [v for v in (*c.inputs[1:9], *c.inputs[12:16]) if v is not None]
    constants = [v.const for v in values if v.const is not None]
    if len(constants) < 12 or not constants[0].ndim == constants[4].ndim == 2:
        return False
    width, units = constants[0].shape[1], constants[4].shape[1]
    wanted = [(INT8, (units, width)), (INT8, (units, units)), (INT32, (units,))]
    kinds = [(array.dtype, array.shape) for array in constants]
    return bool(units) and kinds == [kind for kind in wanted for _ in range(4)]


def _scaled(c: OperatorConversion) -> bool:
    """Whether codes have one scale each, and that of cells is a power of two."""
    between, q = c.operator.intermediates or [], c.quantizations
    if len(between) != 5:
        return False
    hidden = c.context.declared(c.scope, between[4]).quantization
    known = [each for each in (*q[:9], *q[18:20], hidden) if each is not None]
    if len(known) < 12 or any(each.per_channel or not each.scales[0] > 0 for each in known):
        return False
    fraction, exponent = math.frexp(known[-2].scales[0])
    return fraction == 0.5 and -15 <= exponent - 1 <= -9


def _integer_lstm(c: OperatorConversion, x: Value, reverse: bool, time_first: bool) -> Value:
    """An LSTM of integers, whose sums of gates have 12 fractional bits."""
    q, states = c.quantizations, [State(c, _OUTPUT_STATE + i, codes=True) for i in range(2)]
    hidden = c.context.declared(c.scope, c.operator.intermediates[4]).quantization
    inner, outer, cell = q[0], q[18], q[19]
    assert inner is not None and outer is not None and cell is not None and hidden is not None

    def stacked(first: int) -> np.ndarray:
        """Return the concatenated constants of four gates."""
        values = c.inputs[first : first + 4]
        return np.concatenate([v.const for v in values if v is not None and v.const is not None])

    matrices, scales, biases = [stacked(1), stacked(5)], [], []
    for first, source, matrix in zip((1, 5), (inner, outer), matrices, strict=True):
        biases.append(-source.zero_points[0] * matrix.sum(axis=1, dtype=np.int64))
        own = [given.scale[0] for given in q[first : first + 4] if given is not None]
        scales += [scale * source.scale[0] / np.float32(2.0**-12) for scale in own]
    biases[0] = biases[0] + stacked(12)
    scales.append(np.float32(2.0**-30 / hidden.scale[0]))
    clip, (_, exponent) = float(c.option("cell_clip")), math.frexp(cell.scales[0])
    attrs = {
        "hidden_size": len(matrices[1]) // 4,
        "direction": "reverse" if reverse else "forward",
        "layout": 1 - time_first,
        "scales": [float(scale) for scale in scales],
        "zero": hidden.zero_points[0],
        "cell_bits": exponent + 14,
        "cell_clip": int(min(clip / cell.scale[0], 32767)) if clip > 0 else 0,
    }
    constants = [*(c.constant(m, INT8) for m in matrices), *(c.constant(b, INT32) for b in biases)]
    inputs = [x, *constants, *(state.value for state in states)]
    y, *ends = c.emit_several("IntegerLstm", inputs, attrs, count=3, domain=TFLITE)
    for state, end in zip(states, ends, strict=True):
        state.write(end)
    return y


@operator_rule("UNIDIRECTIONAL_SEQUENCE_LSTM", integers=_is_integer)
def unidirectional_lstm(c: OperatorConversion) -> None:
    given = c.take(1, _LSTM_INPUTS)
    _emit_sequences(c, given[0], _layer(c, given))


def _layer(c: OperatorConversion, given: _Given) -> Layer:
    if c.dtype(0) == INT8:
        return partial(_integer_lstm, c)
    return partial(_lstm, c, given, _OUTPUT_STATE)


@operator_rule("BIDIRECTIONAL_SEQUENCE_LSTM", outputs=None)
def bidirectional_lstm(c: OperatorConversion) -> None:
    given = c.take(1, 48)
    if given[39] is not None:
        raise InexpressibleError("it has an auxiliary input")
    inputs = [[given[0], *given[first : first + 17], *[None] * 6] for first in (1, 18)]
    layers = [partial(_lstm, c, own, state) for own, state in zip(inputs, (35, 37), strict=True)]
    _emit_sequences(c, given[0], *layers)


@operator_rule("LSTM", outputs=None, integers=_is_integer)
def lstm_step(c: OperatorConversion) -> None:
    if c.option("kernel_type"):
        _basic_step(c)
    else:
        given = c.take(1, _LSTM_INPUTS)
        _emit_step(c, given[0], _layer(c, given))


def _basic_step(c: OperatorConversion) -> None:
    """The kind in old files: gates i, g, f, o of one matrix, and states as inputs and outputs."""
    x, h, weights, bias, cell = c.take(5)
    if len(c.outputs) != 4:
        raise NodeError(f"has {len(c.outputs)} outputs, not 4")
    y, new_cell, joined, gates = c.outputs
    c.append("Concat", "", [x, h], [joined], {"axis": 1}, f"{c.name}/joined")
    c.append("Gemm", "", [joined, weights, bias], [gates], {"transB": 1}, f"{c.name}/gates")
    parts = c.emit_several("Split", [gates], {"axis": 1, "num_outputs": 4}, count=4)
    i, f, o = (c.emit("Sigmoid", [parts[gate]]) for gate in (0, 2, 3))
    added = c.emit("Mul", [i, c.emit("Tanh", [parts[1]])])
    c.append("Add", "", [added, c.emit("Mul", [f, cell])], [new_cell], None, f"{c.name}/cell")
    c.emit_final("Mul", [o, c.emit("Tanh", [new_cell])], outputs=[y])


# Layers without gates.


def _rnn(
    c: OperatorConversion, weights: _Given, state: int, x: Value, reverse: bool, time_first: bool
) -> Value:
    """A layer of one activation. ``weights`` are those of the input and of the state, and the bias;
    ``state`` is the index of the input that is the state."""
    w, r, bias = weights
    if w is None or r is None or bias is None:
        raise NodeError("leaves out weights or biases")
    hidden = State(c, state)
    activation = _ACTIVATIONS.get(c.option("fused_activation_function"))
    if activation is None:
        raise InexpressibleError("its activation is none of ONNX's for recurrent layers")
    parts = (w, r, _with_zeros(c, bias, 0))
    w, r, biases = (c.emit("Unsqueeze", [value, [0]]) for value in parts)
    first = c.emit("Unsqueeze", [hidden.value, [1 - time_first]])
    attrs = {
        "hidden_size": _rows(c, parts[1]),
        "layout": 1 - time_first,
        "activations": [activation],
        "direction": "reverse" if reverse else "forward",
    }
    if activation == "Affine":
        # ONNX's RNN requires an activation; alpha x + beta with 1 and 0 is the identity.
        attrs |= {"activation_alpha": [1.0], "activation_beta": [0.0]}
    y, y_h = c.emit_several("RNN", [x, w, r, biases, None, first], attrs, count=2)
    hidden.write(c.emit("Squeeze", [y_h, [1 - time_first]]))
    return c.emit("Squeeze", [y, [2 - time_first]])


@operator_rule("UNIDIRECTIONAL_SEQUENCE_RNN")
def unidirectional_rnn(c: OperatorConversion) -> None:
    x, *weights = c.take(4, 5)[:4]
    _emit_sequences(c, x, partial(_rnn, c, weights, 4))


@operator_rule("BIDIRECTIONAL_SEQUENCE_RNN", outputs=None)
def bidirectional_rnn(c: OperatorConversion) -> None:
    given = c.take(1, 12)
    if given[9] is not None:
        raise InexpressibleError("it has an auxiliary input")
    layers = [partial(_rnn, c, given[i : i + 3], i + 3) for i in (1, 5)]
    _emit_sequences(c, given[0], *layers)


@operator_rule("RNN")
def rnn_step(c: OperatorConversion) -> None:
    x, *weights = c.take(4, 5)[:4]
    _emit_step(c, x, partial(_rnn, c, weights, 4))


def _is_integer_svdf(c: OperatorConversion) -> bool:
    """Whether ``IntegerSvdf`` computes an SVDF: it has 8-bit codes, constant weights, a memory of
    16 bits, and no activation or Relu, which only bounds codes."""
    if len(c.inputs) != 5 or c.output_dtypes != [INT8] or c.dtype(0) != INT8:
        return False
    values, state = c.inputs[1:4], c.operator.inputs[4]
    w, times, bias = (None if value is None else value.const for value in values)
    if w is None or times is None or (values[2] is not None and bias is None):
        return False
    if state == -1 or c.inputs[4] is not None or c.context.zeros(c.scope, state).dtype != INT16:
        return False
    if (w.dtype, times.dtype) != (INT8, INT16) or (bias is not None and bias.dtype != INT32):
        return False
    given = *c.quantizations[:3], c.quantizations[4], *c.output_quantizations
    known = [q for q in given if q is not None]
    if len(known) < 5 or any(q.per_channel or not q.scales[0] > 0 for q in known):
        return False
    is_bounded = c.option("fused_activation_function", "SVDFOptions") in (0, 1)
    return is_bounded and not any(q.zero_points[0] for q in known[1:4])


def _integer_svdf(c: OperatorConversion, values: _Given, units: int) -> None:
    """SVDF of integers. Relu is left out, as in the reference kernel."""
    state, (x, w, times, bias) = State(c, 4, codes=True), values
    of_x, of_w, of_times, _, of_state = c.quantizations
    (of_y,) = c.output_quantizations
    assert w is not None and w.const is not None
    assert of_x and of_w and of_times and of_state and of_y
    pairs = [(of_x, of_w, of_state), (of_state, of_times, of_y)]
    # In float32, as in LiteRT.
    scales = [float(a.scale[0] * b.scale[0] / y.scale[0]) for a, b, y in pairs]
    added = -of_x.zero_points[0] * w.const.sum(axis=1, dtype=np.int64)
    bias = c.constant(np.zeros(units), INT32) if bias is None else bias
    inputs = [x, w, times, c.constant(added, INT32), bias, state.value]
    attrs = {"scales": scales, "zero": of_y.zero_points[0]}
    memory = Value(c.fresh("memory"))
    c.emit_final("IntegerSvdf", inputs, attrs, domain=TFLITE, outputs=[*c.outputs, memory])
    state.write(memory)


@operator_rule("SVDF", integers=_is_integer_svdf)
def svdf(c: OperatorConversion) -> None:
    """Each filter has a weight for each feature and one for each of the last steps: the state holds
    the features' results of these. The filters of a unit, ``rank`` of them, are summed."""
    x, features, times, bias = c.take(3, 5)[:4]
    filters, steps = c.static_shape(2, "the weights of time")
    rank = c.option("rank")
    if rank < 1 or filters % rank:
        raise NodeError(f"has {filters} filters of rank {rank}")
    if c.dtype(0) == INT8:
        _integer_svdf(c, [x, features, times, bias], filters // rank)
        return
    state = State(c, 4)
    now = c.emit("Gemm", [x, features, None], transB=1)
    columns = c.emit("Reshape", [now, [-1, filters, 1]])
    past = c.emit("Reshape", [state.value, [-1, filters, steps]])
    rest = c.emit("Slice", [past, [1], [steps], [2]])
    # The oldest step leaves the memory and the present one enters at its end.
    memory = c.emit("Concat", [rest, columns], axis=2)
    state.write(c.emit("Reshape", [memory, [-1, filters * steps]]))
    weighted = c.emit("ReduceSum", [c.emit("Mul", [memory, times]), [2]], keepdims=0)
    grouped = c.emit("Reshape", [weighted, [-1, filters // rank, rank]])
    units = c.emit("ReduceSum", [grouped, [2]], keepdims=0)
    if bias is not None:
        units = c.emit("Add", [units, bias])
    c.emit_activated("Identity", [units], kind="SVDFOptions")
