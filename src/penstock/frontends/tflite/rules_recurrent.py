"""Rules of recurrent layers, whose states are variables: they carry over from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.frontends.tflite.rules_control import State
from penstock.ir.graph import Value
from penstock.ops.registry import TFLITE

_TANH = 4
_ACTIVATIONS = {0: "Affine", 1: "Relu", _TANH: "Tanh"}
_OUTPUT_STATE, _CELL_STATE, _LSTM_INPUTS = 18, 19, 24


def _time_major(c: OperatorConversion, x: Value, is_time_major: bool) -> Value:
    return x if is_time_major else c.transposed(x, [1, 0, 2])


def _lstm(
    c: OperatorConversion,
    x: Value,
    given: Sequence[Any],
    states: tuple[State, State],
    reverse: bool,
) -> Value:
    """The outputs [time, batch, units] of an LSTM for x [time, batch, features]. ``given`` are the
    inputs of UNIDIRECTIONAL_SEQUENCE_LSTM, in its order."""
    options = [c.option(name) for name in ("cell_clip", "proj_clip")]
    activation = c.option("fused_activation_function")
    plain = not any(options) and activation == _TANH and None not in (*given[1:9], *given[12:16])
    h, cell = states
    if plain and all(value is None for value in (*given[16:18], *given[20:24])):
        y, y_h, y_c = _onnx_lstm(c, x, given, (h.value, cell.value), reverse)
    else:
        inputs = [x, *given[1:18], h.value, cell.value, *given[20:24]]
        if None in inputs[2:5] or None in inputs[6:9] or None in inputs[13:16]:
            raise NodeError("leaves out weights or biases that each LSTM has")
        y, y_h, y_c = (Value(c.fresh(hint)) for hint in ("y", "h", "c"))
        attrs = dict(zip(("cell_clip", "proj_clip"), options, strict=True))
        attrs |= {"reverse": int(reverse), "activation": activation}
        c.append("Lstm", TFLITE, inputs, [y, y_h, y_c], attrs, y.name)
    h.write(y_h)
    cell.write(y_c)
    return y


def _onnx_lstm(
    c: OperatorConversion,
    x: Value,
    given: Sequence[Any],
    states: tuple[Value, Value],
    reverse: bool,
) -> tuple[Value, Value, Value]:
    """The gates are i, f, g, o in TFLite, and i, o, f, g in ONNX."""
    order = (0, 3, 1, 2)
    axis = c.constant([0])

    def stacked(first: int) -> Value:
        parts = [given[first + gate] for gate in order]
        return c.emit("Unsqueeze", [c.emit("Concat", parts, axis=0), axis])

    w, r, biases = stacked(1), stacked(5), stacked(12)
    none = c.emit("Mul", [biases, c.like(0, biases)])
    peepholes = None
    if given[9] is not None and given[10] is not None and given[11] is not None:
        joined = c.emit("Concat", [given[9], given[11], given[10]], axis=0)
        peepholes = c.emit("Unsqueeze", [joined, axis])
    first = [c.emit("Unsqueeze", [state, axis]) for state in states]
    attrs: dict[str, Any] = {"hidden_size": _rows(c, given[8])}
    attrs["direction"] = "reverse" if reverse else "forward"
    y, y_h, y_c = (Value(c.fresh(hint)) for hint in ("y", "h", "c"))
    inputs = [x, w, r, c.emit("Concat", [biases, none], axis=1), None, *first, peepholes]
    c.append("LSTM", "", inputs, [y, y_h, y_c], attrs, y.name)
    one = c.constant([1])
    return (
        c.emit("Squeeze", [y, one]),
        c.emit("Squeeze", [y_h, axis]),
        c.emit("Squeeze", [y_c, axis]),
    )


def _rows(c: OperatorConversion, weights: Value) -> int:
    shape = c.types.tensor(weights).shape if weights.const is None else weights.const.shape
    if not shape or not isinstance(shape[0], int):
        raise InexpressibleError("the number of its units is not known before a run")
    return shape[0]


@operator_rule("UNIDIRECTIONAL_SEQUENCE_LSTM")
def unidirectional_lstm(c: OperatorConversion) -> None:
    given = c.take(1, _LSTM_INPUTS)
    time_major = c.option("time_major")
    x = _time_major(c, given[0], time_major)
    states = State(c, _OUTPUT_STATE), State(c, _CELL_STATE)
    c.emit_final("Identity", [_time_major(c, _lstm(c, x, given, states, False), time_major)])


@operator_rule("LSTM", outputs=None)
def lstm_step(c: OperatorConversion) -> None:
    """One step of a sequence, for x [batch, features]."""
    if c.option("kernel_type"):
        _basic_step(c)
        return
    given = c.take(1, _LSTM_INPUTS)
    axis = c.constant([0])
    x = c.emit("Unsqueeze", [given[0], axis])
    y = _lstm(c, x, given, (State(c, _OUTPUT_STATE), State(c, _CELL_STATE)), False)
    c.emit_final("Squeeze", [y, axis], outputs=c.outputs[-1:])


def _basic_step(c: OperatorConversion) -> None:
    """The kind of old files: gates i, g, f, o of one matrix, and states that are fed and given."""
    x, h, weights, bias, cell = c.take(5)
    if len(c.outputs) != 4:
        raise NodeError(f"has {len(c.outputs)} outputs, not 4")
    y, new_cell, joined, gates = c.outputs
    c.append("Concat", "", [x, h], [joined], {"axis": 1}, f"{c.name}/joined")
    c.append("Gemm", "", [joined, weights, bias], [gates], {"transB": 1}, f"{c.name}/gates")
    parts = [Value(c.fresh("gate")) for _ in range(4)]
    c.append("Split", "", [gates], parts, {"axis": 1, "num_outputs": 4}, f"{c.name}/split")
    i, f, o = (c.emit("Sigmoid", [parts[gate]]) for gate in (0, 2, 3))
    added = c.emit("Mul", [i, c.emit("Tanh", [parts[1]])])
    c.append("Add", "", [added, c.emit("Mul", [f, cell])], [new_cell], None, f"{c.name}/cell")
    c.emit_final("Mul", [o, c.emit("Tanh", [new_cell])], outputs=[y])


@operator_rule("BIDIRECTIONAL_SEQUENCE_LSTM", outputs=None)
def bidirectional_lstm(c: OperatorConversion) -> None:
    """Two layers, one of which reads the sequence from its end."""
    given = c.take(1, 48)
    if given[39] is not None:
        raise InexpressibleError("it has an auxiliary input")
    time_major = c.option("time_major")
    x = _time_major(c, given[0], time_major)
    results = []
    for first, state in ((1, 35), (18, 37)):
        layer = [given[0], *given[first : first + 17], *[None] * 6]
        states = State(c, state), State(c, state + 1)
        results.append(_time_major(c, _lstm(c, x, layer, states, first > 1), time_major))
    if c.option("merge_outputs"):
        c.emit_final("Concat", results, {"axis": 2})
    else:
        for result, output in zip(results, c.outputs, strict=True):
            c.append("Identity", "", [result], [output], None, c.fresh("result"))


# Layers without gates.


def _rnn(
    c: OperatorConversion, x: Value, weights: Sequence[Any], state: State, reverse: bool = False
) -> Value:
    """The outputs [time, batch, units] for x [time, batch, features]."""
    if None in weights:
        raise NodeError("leaves out weights or biases")
    w, r, bias = weights
    activation = _ACTIVATIONS.get(c.option("fused_activation_function"))
    if activation is None:
        raise InexpressibleError("its activation is none of ONNX's for recurrent layers")
    axis = c.constant([0])
    biases = c.emit("Concat", [bias, c.emit("Mul", [bias, c.like(0, bias)])], axis=0)
    inputs = [c.emit("Unsqueeze", [value, axis]) for value in (w, r, biases, state.value)]
    attrs: dict[str, Any] = {"hidden_size": _rows(c, r), "activations": [activation]}
    if activation == "Affine":
        attrs |= {"activation_alpha": [1.0], "activation_beta": [0.0]}
    attrs["direction"] = "reverse" if reverse else "forward"
    y, y_h = Value(c.fresh("y")), Value(c.fresh("h"))
    c.append("RNN", "", [x, *inputs[:3], None, inputs[3]], [y, y_h], attrs, y.name)
    state.write(c.emit("Squeeze", [y_h, axis]))
    return c.emit("Squeeze", [y, c.constant([1])])


@operator_rule("UNIDIRECTIONAL_SEQUENCE_RNN")
def unidirectional_rnn(c: OperatorConversion) -> None:
    x, *weights = c.take(4, 5)[:4]
    time_major = c.option("time_major")
    y = _rnn(c, _time_major(c, x, time_major), weights, State(c, 4))
    c.emit_final("Identity", [_time_major(c, y, time_major)])


@operator_rule("RNN")
def rnn_step(c: OperatorConversion) -> None:
    x, *weights = c.take(4, 5)[:4]
    axis = c.constant([0])
    y = _rnn(c, c.emit("Unsqueeze", [x, axis]), weights, State(c, 4))
    c.emit_final("Squeeze", [y, axis])


@operator_rule("BIDIRECTIONAL_SEQUENCE_RNN", outputs=None)
def bidirectional_rnn(c: OperatorConversion) -> None:
    given = c.take(1, 12)
    if given[9] is not None:
        raise InexpressibleError("it has an auxiliary input")
    time_major = c.option("time_major")
    x = _time_major(c, given[0], time_major)
    results = [
        _time_major(c, _rnn(c, x, given[i : i + 3], State(c, i + 3), i > 1), time_major)
        for i in (1, 5)
    ]
    if c.option("merge_outputs"):
        c.emit_final("Concat", results, {"axis": 2})
    else:
        for result, output in zip(results, c.outputs, strict=True):
            c.append("Identity", "", [result], [output], None, c.fresh("result"))


@operator_rule("SVDF")
def svdf(c: OperatorConversion) -> None:
    """Each filter has a weight for each feature and one for each of the last steps: the state holds
    what the features gave then. The filters of a unit, ``rank`` of them, add up."""
    x, features, times, bias = c.take(3, 5)[:4]
    state = State(c, 4)
    filters, steps = c.static_shape(2, "the weights of time")
    rank = c.option("rank")
    if rank < 1 or filters % rank:
        raise NodeError(f"has {filters} filters of rank {rank}")
    now = c.emit("Gemm", [x, features, None], transB=1)
    columns = c.emit("Reshape", [now, c.constant([-1, filters, 1])])
    past = c.emit("Reshape", [state.value, c.constant([-1, filters, steps])])
    rest = c.emit("Slice", [past, c.constant([1]), c.constant([steps]), c.constant([2])])
    memory = c.emit("Concat", [rest, columns], axis=2)
    state.write(c.emit("Reshape", [memory, c.constant([-1, filters * steps])]))
    weighted = c.emit("ReduceSum", [c.emit("Mul", [memory, times]), c.constant([2])], keepdims=0)
    grouped = c.emit("Reshape", [weighted, c.constant([-1, filters // rank, rank])])
    units = c.emit("ReduceSum", [grouped, c.constant([2])], keepdims=0)
    if bias is not None:
        units = c.emit("Add", [units, bias])
    c.emit_activated("Identity", [units], kind="SVDFOptions")
