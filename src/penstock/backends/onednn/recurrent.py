"""LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.layouts import ITEM
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.spec import (
    BoundPrimitive,
    Constants,
    PrimitiveSpec,
    SpecContext,
    absorb,
)
from penstock.backends.onednn.weights import Weights, weights_of
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import FLOAT32
from penstock.ir.layout import packed_strides
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import shared
from penstock.ops.onnx.recurrent import Layer, parse_layer

# Arguments of primitives (DNNL_ARG_*): the states (SRC_ITER, SRC_ITER_C) before the first step and
# (DST_ITER, DST_ITER_C) after the last, and the weights of the state.
_INITIAL, _FINAL, _WEIGHTS_ITER = (2, 3), (18, 19), 34

# The gates of ONNX (i o f c; z r h) in the order of oneDNN (i f c o; u r o).
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2), "RNN": (0,)}

_PRIMITIVES = {"LSTM": "lstm", "GRU": "gru", "RNN": "vanilla_rnn"}

_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "sigmoid": "logistic"}

_DIRECTIONS = {
    (False,): "unidirectional_left2right",
    (True,): "unidirectional_right2left",
    (False, True): "bidirectional_concat",
}


class _Constants(NamedTuple):
    """Weights of shape [1, directions, inputs, gates, hidden]; the bias lacks ``inputs``."""

    w: Weights
    r: Weights
    bias: np.ndarray


def recurrent(desc: OpDesc) -> PrimitiveSpec | None:
    """LSTM, GRU and RNN with constant weights and their default activations, for sequences of equal
    lengths; None for other nodes."""
    x = desc.input(0)
    w, r, bias = (desc.constant(i) for i in (1, 2, 3))
    if x is None or w is None or r is None or w.dtype != FLOAT32 or r.dtype != FLOAT32:
        return None
    if (bias is None) != (desc.input(3) is None) or desc.input(7) is not None:
        return None
    layer = parse_layer(desc.node.op.name, desc.node.attrs)
    steps, batch = x.dims[:2][::-1] if layer.batch_first else x.dims[:2]
    activation, lengths = _activation(layer, desc.node.attrs), desc.node.input(4)
    if activation is None or (
        lengths is not None and (lengths.const is None or np.any(lengths.const != steps))
    ):
        return None
    # oneDNN has the results of two directions side by side. So does ONNX for a batch of one, or
    # with the batch first.
    if len(layer.reverse) > 1 and batch > 1 and not layer.batch_first:
        return None
    name = "onednn recurrent", layer.cell, layer.linear_before_reset, r.shape
    held = shared(name, lambda: _biases(layer, r.shape, bias), bias)
    constants = _Constants(_by_gate(layer, w), _by_gate(layer, r), held.value)
    desc, absorbed = absorb(desc, {1: constants.w, 2: constants.r})
    recurrence = _Recurrence(desc, layer, steps, batch, r.shape[2], activation, constants)
    return PrimitiveSpec(
        desc,
        recurrence.create,
        (0, 1, 2, 3),
        contiguous_inputs=tuple(recurrence.inputs.values()),
        # oneDNN's "ref" of a recurrent layer consists of products and generated code, both fast.
        accept_reference=True,
        weights=absorbed,
        held=held,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Recurrence:
    """A node that oneDNN can run."""

    desc: OpDesc
    layer: Layer
    steps: int
    batch: int
    hidden: int
    activation: str
    weights: _Constants

    def states(self, arguments: Sequence[int]) -> Sequence[int]:
        """The arguments of states: two for an LSTM, else one."""
        return arguments[: 2 if self.layer.cell == "LSTM" else 1]

    @property
    def inputs(self) -> dict[int, int]:
        """The inputs that are no constants, by argument."""
        desc = self.desc
        pairs = zip((SRC, *self.states(_INITIAL)), (0, 5, 6), strict=False)
        return {argument: desc.inputs[i] for argument, i in pairs if desc.input(i) is not None}

    def create(self, context: SpecContext) -> BoundPrimitive:
        desc, layer, weights = self.desc, self.layer, self.weights
        tensors = self.inputs
        for i in tensors.values():
            # For a sequence with gaps between its steps, oneDNN 3.2 calls code that is not there.
            if context.strides[i] != packed_strides(desc.dims(i), ITEM):
                raise DnnlError(UNIMPLEMENTED)
        before, after = self.states(_INITIAL), self.states(_FINAL)
        results = zip((DST, *after), desc.outputs, strict=False)
        tensors |= {argument: i for argument, i in results if desc.tensors[i] is not None}
        constants: Constants = {
            WEIGHTS: weights.w,
            _WEIGHTS_ITER: weights.r,
            BIAS: weights_of(weights.bias),
        }
        dropped = [] if DST in tensors else [DST]
        state = 1, len(layer.reverse), self.batch, self.hidden  # layers, directions and so on
        order = (1, 0, 2, 3) if layer.batch_first else ()
        # Of the two states of an LSTM, oneDNN takes and returns both or none.
        if not tensors.keys().isdisjoint(before):
            zeros = np.zeros(state, FLOAT32)
            constants |= {i: weights_of(zeros) for i in before if i not in tensors}
        if not tensors.keys().isdisjoint(after):
            dropped += [argument for argument in after if argument not in tensors]

        def tensor(argument: int, dims: tuple[int, ...], rank: int) -> Any:
            if argument in tensors:
                return context.descriptor(tensors[argument], dims, order[:rank])
            return context.packed(dims)

        def states(arguments: Sequence[int]) -> list[Any]:
            absent = tensors.keys().isdisjoint(arguments)
            return [None if absent else tensor(i, state, 3) for i in arguments]

        name, is_rnn = _PRIMITIVES[layer.cell], layer.cell == "RNN"
        if layer.cell == "GRU" and layer.linear_before_reset:
            name = "lbr_gru"
        arguments = [
            *([f"eltwise_{self.activation}"] if is_rnn else ()),
            _DIRECTIONS[layer.reverse],
            tensor(SRC, (self.steps, self.batch, weights.w.shape[2]), 3),
            *states(before),
            context.any(weights.w.shape),
            context.any(weights.r.shape),
            *([None, None] if layer.cell == "LSTM" else ()),  # peepholes and a projection
            context.of(weights.bias),
            tensor(DST, (self.steps, self.batch, state[1] * self.hidden), 4),
            *states(after),
            0,
            *([0.0, 0.0] if is_rnn else ()),
        ]
        return context.primitive(f"{name}_forward", arguments, tensors, constants, dropped=dropped)


def _activation(layer: Layer, attrs: Attrs) -> str | None:
    """oneDNN's name of the activation of an RNN; of others any name, if theirs are the defaults."""
    if layer.cell != "RNN":
        return "tanh" if layer.plain else None
    names = (attrs.get("activations") or ["Tanh"])[: len(layer.reverse)]
    distinct = {name.lower() for name in names}
    if layer.clip is not None or len(distinct) > 1:
        return None
    return _ACTIVATIONS.get(distinct.pop())


def _by_gate(layer: Layer, matrix: np.ndarray) -> Weights:
    """Weights [directions, gates and hidden, inputs] as oneDNN sees them."""
    gates = _GATES[layer.cell]
    directions, columns, inputs = matrix.shape
    shape = directions, len(gates), columns // len(gates), inputs
    seen_shape = 1, directions, inputs, *shape[1:3]

    def form(matrix: np.ndarray) -> np.ndarray:
        split = matrix.reshape(shape)[:, list(gates)]
        return np.ascontiguousarray(split.transpose(0, 3, 1, 2)[None])

    def back(seen: np.ndarray) -> np.ndarray:
        split = seen[0].transpose(0, 2, 3, 1)[:, np.argsort(gates)]
        return np.ascontiguousarray(split).reshape(directions, -1, inputs)

    return weights_of(matrix, seen_shape, name=("recurrent", gates), form=form, back=back)


def _biases(layer: Layer, shape: tuple[int, ...], bias: np.ndarray | None) -> np.ndarray:
    gates = list(_GATES[layer.cell])
    directions, _, hidden = shape
    count = len(gates)
    linear = layer.cell == "GRU" and layer.linear_before_reset
    biases = np.zeros((1, directions, count + linear, hidden), FLOAT32)
    if bias is not None:
        of_w, of_r = bias.reshape(directions, 2, count, hidden)[:, :, gates].swapaxes(0, 1)
        biases[0, :, :count] = of_w
        if linear:
            # The bias of the product that the reset gate is applied to stays separate.
            biases[0, :, : count - 1] += of_r[:, :-1]
            biases[0, :, count] = of_r[:, -1]
        else:
            biases[0] += of_r
    return biases
