"""LstmCell and GruCell: what a step of a recurrent layer does with its gates.

They are not in the table of operations: the pass ``recompose_cells`` creates them where models
spell them out. ``order`` has the place of each gate among those side by side in the last axis.

LstmCell takes gates [..., 4 units] and a cell [..., units], and returns the state and the next
cell, both [..., units]; ``order`` is of the input, forget and output gates and the new values:

    next = sigmoid(forget + forget_bias) cell + sigmoid(input) tanh(new)
    state = sigmoid(output) tanh(next)

GruCell takes gates of the input and of the state, [..., 3 units] each, and the state
[..., units], and returns the next state; ``order`` is of the update and reset gates and the new
values:

    new = tanh(new_x + sigmoid(reset_x + reset_h) new_h)
    next = new + sigmoid(update_x + update_h) (state - new)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.types import Type


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)), which overflows nowhere
    half = x.dtype.type(0.5)
    y: np.ndarray = half * np.tanh(half * x) + half
    return y


def _infer_lstm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    cell = rules.tensor(types, 1)
    return cell, cell


def _infer_gru(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (rules.tensor(types, 2),)


def _compile_lstm(node: Node, types: Types) -> Kernel:
    order, bias = node.attrs["order"], node.attrs["forget_bias"]

    def function(gates: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = np.split(gates, 4, axis=-1)
        into, forget, output, new = (parts[place] for place in order)
        following = _sigmoid(forget + gates.dtype.type(bias)) * cell
        following = following + _sigmoid(into) * np.tanh(new)
        return _sigmoid(output) * np.tanh(following), following

    return Kernel(function)


def _compile_gru(node: Node, types: Types) -> Kernel:
    order = node.attrs["order"]

    def function(x: np.ndarray, h: np.ndarray, state: np.ndarray) -> np.ndarray:
        of_x, of_h = np.split(x, 3, axis=-1), np.split(h, 3, axis=-1)
        update, reset, new = order
        values = np.tanh(of_x[new] + _sigmoid(of_x[reset] + of_h[reset]) * of_h[new])
        kept: np.ndarray = _sigmoid(of_x[update] + of_h[update]) * (state - values)
        return values + kept

    return Kernel(function)


LSTM_CELL = Op("LstmCell", "penstock", 1, 1, _infer_lstm, _compile_lstm)
GRU_CELL = Op("GruCell", "penstock", 1, 1, _infer_gru, _compile_gru)
