"""LSTM, GRU and RNN, of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.backends.onednn.kernel import Made, Maker, Recipe
from penstock.backends.onednn.primitive import BIAS
from penstock.backends.onednn.work import Work
from penstock.ops.recurrent import Layer, parse_layer
from penstock.ops.shared import shared

# Arguments of primitives (DNNL_ARG_*).
_X, _H, _C = 1, 2, 3
_Y, _Y_H, _Y_C = 17, 18, 19
_W, _R = 33, 34

# The gates of ONNX (i o f c; z r h) in the order of oneDNN (i f c o; u r o).
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2), "RNN": (0,)}

_ACTIVATIONS = {"tanh": "tanh", "relu": "relu", "sigmoid": "logistic"}


class _Weights(NamedTuple):
    """As oneDNN sees them: [1, directions, inputs, gates, hidden]; the bias without inputs."""

    w: np.ndarray
    r: np.ndarray
    bias: np.ndarray


def recurrent(work: Work) -> Recipe | None:
    """With constant weights and the activations that are the default; all sequences as long as
    the tensor. Two directions only where their results lie side by side: in a batch of one, or with
    the batch first."""
    node, x = work.node, work.input(0)
    w, r = work.constant(1), work.constant(2)
    if x is None or w is None or r is None:
        return None
    layer = parse_layer(node.op.name, node.attrs, peepholes=work.input(7) is not None)
    activation = _activation(layer, node.attrs)
    steps, batch = x.dims[::-1][1:][::-1] if not layer.batch_first else (x.dims[1], x.dims[0])
    if activation is None or work.input(7) is not None or not _full(work, steps):
        return None
    bias = work.constant(3)
    if bias is None and work.input(3) is not None:
        return None
    name = "onednn recurrent", layer.kind, layer.linear_before_reset
    weights = shared(name, lambda: _weights(layer, w, r, bias), w, r, bias)
    ...
    return None
