"""LSTM, GRU and RNN."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.backends.onednn.layouts import steps_of
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import shared
from penstock.ops.onnx.recurrent import Layer, parse_layer
from penstock.types import FLOAT32

# Arguments of primitives (DNNL_ARG_*), beside those for what comes and goes with each step.
_SRC_ITER, _SRC_ITER_C, _DST_ITER, _DST_ITER_C, _WEIGHTS_ITER = 2, 3, 18, 19, 34

# The gates of ONNX (i o f c; z r h) in the order of oneDNN (i f c o; u r o).
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2), "RNN": (0,)}

_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "sigmoid": "logistic"}

_DIRECTIONS = {
    (False,): "unidirectional_left2right",
    (True,): "unidirectional_right2left",
    (False, True): "bidirectional_concat",
}


class _Sizes(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int


class _Weights(NamedTuple):
    """[1, directions, inputs, gates, hidden], and the bias without inputs."""

    w: np.ndarray
    r: np.ndarray
    bias: np.ndarray


def recurrent(work: OpDesc) -> PrimitiveSpec | None:
    """With constant weights and the activations that are usual, for sequences of equal lengths.

    Of two directions, oneDNN has the results side by side: so does ONNX for a batch of one, or with
    the batch first.
    """
    node, x = work.node, work.input(0)
    w, r, bias = (work.constant(i) for i in (1, 2, 3))
    if x is None or w is None or r is None or w.dtype != FLOAT32 or r.dtype != FLOAT32:
        return None
    if (bias is None) != (work.input(3) is None) or work.input(7) is not None:
        return None
    layer = parse_layer(node.op.name, node.attrs)
    steps, batch = x.dims[:2][::-1] if layer.batch_first else x.dims[:2]
    size = _Sizes(steps, batch, x.dims[2], r.shape[2], len(layer.reverse))
    activation = _activation(layer, node.attrs)
    if activation is None or not _all_full(work, steps):
        return None
    if size.directions > 1 and batch > 1 and not layer.batch_first:
        return None
    name = "onednn recurrent", layer.kind, layer.linear_before_reset
    weights = shared(name, lambda: _weights(layer, w, r, bias), w, r, bias)
    lstm = layer.kind == "LSTM"
    # Of the two states of an LSTM, oneDNN takes and gives both or none.
    before = [_SRC_ITER, _SRC_ITER_C][: 1 + lstm]
    after = [_DST_ITER, _DST_ITER_C][: 1 + lstm]
    tensors = {SRC: work.inputs[0]}
    for argument, i in zip(before, (5, 6), strict=False):
        if work.input(i) is not None:
            tensors[argument] = work.inputs[i]
    dense = tuple(tensors.values())
    results = zip((DST, *after), work.outputs, strict=False)
    tensors |= {argument: i for argument, i in results if work.tensors[i] is not None}
    state = 1, size.directions, batch, size.hidden
    constants = {
        WEIGHTS: (weights.value.w, weights.value.w.shape),
        _WEIGHTS_ITER: (weights.value.r, weights.value.r.shape),
        BIAS: (weights.value.bias, weights.value.bias.shape),
    }
    begun = not tensors.keys().isdisjoint(before)
    kept = not tensors.keys().isdisjoint(after)
    dropped = [] if DST in tensors else [DST]
    for argument in before if begun else ():
        if argument not in tensors:
            constants[argument] = np.zeros(state, FLOAT32), state
    if kept:
        dropped += [argument for argument in after if argument not in tensors]

    def make(maker: SpecContext) -> BoundPrimitive:
        lib, null = maker.lib, maker.ffi.NULL
        for i in dense:
            # Of a sequence with gaps between its steps, oneDNN 3.2 calls code that is not there.
            kind = work.tensors[i]
            if kind is not None and maker.strides[i] != steps_of(kind.dims):
                raise DnnlError(UNIMPLEMENTED)

        def sequence(argument: int, width: int) -> Any:
            dims = size.steps, size.batch, width
            if argument not in tensors:
                return maker.packed(dims)
            order = (1, 0, 2, 3)[: 3 + (argument == DST)] if layer.batch_first else ()
            return maker.descriptor(tensors[argument], dims, order)

        def states(arguments: list[int], are: bool) -> list[Any]:
            order = (1, 0, 2) if layer.batch_first else ()
            return [
                null
                if not are
                else maker.descriptor(tensors[a], state, order)
                if a in tensors
                else maker.packed(state)
                for a in arguments
            ]

        create = {
            "LSTM": lib.dnnl_lstm_forward_primitive_desc_create,
            "GRU": lib.dnnl_lbr_gru_forward_primitive_desc_create
            if layer.linear_before_reset
            else lib.dnnl_gru_forward_primitive_desc_create,
            "RNN": lib.dnnl_vanilla_rnn_forward_primitive_desc_create,
        }[layer.kind]
        rnn = layer.kind == "RNN"
        return maker.primitive(
            create,
            [
                lib.dnnl_forward_inference,
                *([getattr(lib, f"dnnl_eltwise_{activation}")] if rnn else ()),
                getattr(lib, f"dnnl_{_DIRECTIONS[layer.reverse]}"),
                sequence(SRC, size.inputs),
                *states(before, begun),
                maker.any(weights.value.w.shape),
                maker.any(weights.value.r.shape),
                *([null, null] if lstm else ()),  # peepholes and a projection
                maker.of(weights.value.bias),
                sequence(DST, size.directions * size.hidden),
                *states(after, kept),
                0,
                *([0.0, 0.0] if rnn else ()),
            ],
            tensors,
            constants,
            dropped=tuple(dropped),
        )

    # What oneDNN calls "ref" here are products, with generated code between them.
    return PrimitiveSpec(work, make, (0, 1, 2, 3), dense, reference=True)


def _activation(layer: Layer, attrs: Attrs) -> str | None:
    """What oneDNN calls the one function of an RNN; of others, anything if theirs are usual."""
    if layer.kind != "RNN":
        return "tanh" if layer.plain else None
    names = (attrs.get("activations") or ["Tanh"])[: len(layer.reverse)]
    found = {name.lower() for name in names}
    return None if layer.clip is not None or len(found) > 1 else _ACTIVATIONS.get(found.pop())


def _all_full(work: OpDesc, steps: int) -> bool:
    """Whether no sequence ends before the last step."""
    inputs = work.node.inputs
    lengths = inputs[4] if len(inputs) > 4 else None
    return lengths is None or (lengths.const is not None and bool((lengths.const == steps).all()))


def _weights(layer: Layer, w: np.ndarray, r: np.ndarray, bias: np.ndarray | None) -> _Weights:
    gates = list(_GATES[layer.kind])
    directions, _, hidden = r.shape

    def by_gate(matrix: np.ndarray) -> np.ndarray:
        split = matrix.reshape(directions, len(gates), hidden, -1)[:, gates]
        return np.ascontiguousarray(split.transpose(0, 3, 1, 2)[None])

    count = len(gates)
    linear = layer.kind == "GRU" and layer.linear_before_reset
    biases = np.zeros((1, directions, count + linear, hidden), FLOAT32)
    if bias is not None:
        of_w, of_r = bias.reshape(directions, 2, count, hidden)[:, :, gates].swapaxes(0, 1)
        biases[0, :, :count] = of_w
        if linear:
            # That of the product which the reset gate acts on stays by itself.
            biases[0, :, : count - 1] += of_r[:, :-1]
            biases[0, :, count] = of_r[:, -1]
        else:
            biases[0] += of_r
    return _Weights(by_gate(w), by_gate(r), biases)
