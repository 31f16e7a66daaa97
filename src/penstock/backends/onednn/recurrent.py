"""LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.backends.onednn.layouts import ITEM
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import packed_strides
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import shared
from penstock.ops.onnx.recurrent import Layer, parse_layer
from penstock.types import FLOAT32

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


class _Sizes(NamedTuple):
    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int


class _Weights(NamedTuple):
    """Weights of shape [1, directions, inputs, gates, hidden]; the bias lacks ``inputs``."""

    w: np.ndarray
    r: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class _Recurrence:
    """A node that oneDNN can run, as its attributes and inputs describe it."""

    layer: Layer
    sizes: _Sizes
    activation: str

    @property
    def state_dims(self) -> tuple[int, int, int, int]:
        """The dims of a state, as oneDNN sees them: layers, directions, batch, hidden."""
        return 1, self.sizes.directions, self.sizes.batch, self.sizes.hidden


class _Arguments(NamedTuple):
    """The arguments of the primitive, as ``BoundPrimitive`` has them."""

    tensors: dict[int, int]
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]]
    dropped: tuple[int, ...]
    contiguous: tuple[int, ...]


def recurrent(desc: OpDesc) -> PrimitiveSpec | None:
    """LSTM, GRU and RNN with constant weights and their default activations, for sequences of equal
    lengths. Raises nothing; None for other nodes."""
    recurrence = _parse(desc)
    if recurrence is None:
        return None
    layer = recurrence.layer
    w, r, bias = (desc.constant(i) for i in (1, 2, 3))
    assert w is not None and r is not None
    name = "onednn recurrent", layer.kind, layer.linear_before_reset
    weights = shared(name, lambda: _weights(layer, w, r, bias), w, r, bias).value
    arguments = _arguments(desc, recurrence, weights)
    create = partial(_create, desc, recurrence, weights, arguments)
    # oneDNN's "ref" of a recurrent layer is made of products and generated code, which are fast.
    return PrimitiveSpec(desc, create, (0, 1, 2, 3), arguments.contiguous, accept_reference=True)


def _parse(desc: OpDesc) -> _Recurrence | None:
    """The layer of the node; None if oneDNN cannot run it."""
    node, x = desc.node, desc.input(0)
    w, r, bias = (desc.constant(i) for i in (1, 2, 3))
    if x is None or w is None or r is None or w.dtype != FLOAT32 or r.dtype != FLOAT32:
        return None
    if (bias is None) != (desc.input(3) is None) or desc.input(7) is not None:
        return None
    layer = parse_layer(node.op.name, node.attrs)
    steps, batch = x.dims[:2][::-1] if layer.batch_first else x.dims[:2]
    sizes = _Sizes(steps, batch, x.dims[2], r.shape[2], len(layer.reverse))
    activation = _activation(layer, node.attrs)
    if activation is None or not _all_full(desc, steps):
        return None
    # oneDNN has the results of two directions side by side. So does ONNX for a batch of one, or
    # with the batch first.
    if sizes.directions > 1 and batch > 1 and not layer.batch_first:
        return None
    return _Recurrence(layer, sizes, activation)


def _states(layer: Layer, arguments: Sequence[int]) -> Sequence[int]:
    """The arguments of states: two for an LSTM, else one."""
    return arguments[: 2 if layer.kind == "LSTM" else 1]


def _arguments(desc: OpDesc, recurrence: _Recurrence, weights: _Weights) -> _Arguments:
    layer, state = recurrence.layer, recurrence.state_dims
    before, after = _states(layer, _INITIAL), _states(layer, _FINAL)
    tensors = {SRC: desc.inputs[0]}
    for argument, i in zip(before, (5, 6), strict=False):
        if desc.input(i) is not None:
            tensors[argument] = desc.inputs[i]
    contiguous = tuple(tensors.values())
    results = zip((DST, *after), desc.outputs, strict=False)
    tensors |= {argument: i for argument, i in results if desc.tensors[i] is not None}
    constants = {
        WEIGHTS: (weights.w, weights.w.shape),
        _WEIGHTS_ITER: (weights.r, weights.r.shape),
        BIAS: (weights.bias, weights.bias.shape),
    }
    dropped = [] if DST in tensors else [DST]
    # Of the two states of an LSTM, oneDNN takes and returns both or none.
    if not tensors.keys().isdisjoint(before):
        zeros = np.zeros(state, FLOAT32)
        constants |= {argument: (zeros, state) for argument in before if argument not in tensors}
    if not tensors.keys().isdisjoint(after):
        dropped += [argument for argument in after if argument not in tensors]
    return _Arguments(tensors, constants, tuple(dropped), contiguous)


def _create(
    desc: OpDesc,
    recurrence: _Recurrence,
    weights: _Weights,
    arguments: _Arguments,
    context: SpecContext,
) -> BoundPrimitive:
    layer, sizes, tensors = recurrence.layer, recurrence.sizes, arguments.tensors
    for i in arguments.contiguous:
        # For a sequence with gaps between its steps, oneDNN 3.2 calls code that is not there.
        type_ = desc.tensors[i]
        if type_ is not None and context.strides[i] != packed_strides(type_.dims, ITEM):
            raise DnnlError(UNIMPLEMENTED)

    def sequence(argument: int, width: int) -> Any:
        dims = sizes.steps, sizes.batch, width
        if argument not in tensors:
            return context.packed(dims)
        order = (1, 0, 2, 3)[: 3 + (argument == DST)] if layer.batch_first else ()
        return context.descriptor(tensors[argument], dims, order)

    def states(candidates: Sequence[int]) -> list[Any]:
        used = _states(layer, candidates)
        if tensors.keys().isdisjoint(used):
            return [None for _ in used]
        order = (1, 0, 2) if layer.batch_first else ()
        dims = recurrence.state_dims
        return [
            context.descriptor(tensors[a], dims, order) if a in tensors else context.packed(dims)
            for a in used
        ]

    name, is_rnn = _PRIMITIVES[layer.kind], layer.kind == "RNN"
    if layer.kind == "GRU" and layer.linear_before_reset:
        name = "lbr_gru"
    return context.primitive(
        f"{name}_forward",
        [
            *([f"eltwise_{recurrence.activation}"] if is_rnn else ()),
            _DIRECTIONS[layer.reverse],
            sequence(SRC, sizes.inputs),
            *states(_INITIAL),
            context.any(weights.w.shape),
            context.any(weights.r.shape),
            *([None, None] if layer.kind == "LSTM" else ()),  # peepholes and a projection
            context.of(weights.bias),
            sequence(DST, sizes.directions * sizes.hidden),
            *states(_FINAL),
            0,
            *([0.0, 0.0] if is_rnn else ()),
        ],
        tensors,
        arguments.constants,
        dropped=arguments.dropped,
    )


def _activation(layer: Layer, attrs: Attrs) -> str | None:
    """oneDNN's name of the activation of an RNN; of others any name, if theirs are the defaults."""
    if layer.kind != "RNN":
        return "tanh" if layer.plain else None
    names = (attrs.get("activations") or ["Tanh"])[: len(layer.reverse)]
    distinct = {name.lower() for name in names}
    if layer.clip is not None or len(distinct) > 1:
        return None
    return _ACTIVATIONS.get(distinct.pop())


def _all_full(desc: OpDesc, steps: int) -> bool:
    """Whether all sequences have the full length."""
    inputs = desc.node.inputs
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
            # The bias of the product that the reset gate is applied to stays separate.
            biases[0, :, : count - 1] += of_r[:, :-1]
            biases[0, :, count] = of_r[:, -1]
        else:
            biases[0] += of_r
    return _Weights(by_gate(w), by_gate(r), biases)
