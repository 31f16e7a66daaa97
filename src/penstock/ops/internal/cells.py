"""LstmCell, GruCell, GruGates and GruState: what a step of a recurrent layer does with its gates.

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

A GRU that resets its state before the product for the new values has a node on either side of it.
GruGates takes gates of the state and, if given, of the input, [..., some units] each, behind the
state [..., units] the latter; ``order`` is of the update and reset gates in the former, then in the
latter. It returns an update and a state that is reset, both [..., units]. GruState takes the
product, that update, the state and, if given, a tensor [..., some units] which has values of the
input at place ``order``; it returns the next state:

    update = sigmoid(update_h + update_x)
    old = sigmoid(reset_h + reset_x) state

    new = tanh(product + new_x)
    next = new + update (state - new)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common import shape_rules as rules


def logistic(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)), which overflows nowhere
    half = x.dtype.type(0.5)
    y: np.ndarray = half * np.tanh(half * x) + half
    return y


def _infer_lstm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    cell = rules.tensor(types, 1)
    return cell, cell


def _infer_gru(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (rules.tensor(types, 2),)  # the state


def _infer_gru_gates(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    state = rules.tensor(types, 1)
    return state, state


def _compile_lstm(node: Node, types: Types) -> Kernel:
    order, bias = node.attrs["order"], node.attrs["forget_bias"]

    def function(gates: np.ndarray, cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        parts = np.split(gates, 4, axis=-1)
        into, forget, output, new = (parts[place] for place in order)
        following = logistic(forget + gates.dtype.type(bias)) * cell
        following = following + logistic(into) * np.tanh(new)
        return logistic(output) * np.tanh(following), following

    return Kernel(function)


def _compile_gru(node: Node, types: Types) -> Kernel:
    order = node.attrs["order"]

    def function(x: np.ndarray, h: np.ndarray, state: np.ndarray) -> np.ndarray:
        of_x, of_h = np.split(x, 3, axis=-1), np.split(h, 3, axis=-1)
        update, reset, new = order
        values = np.tanh(of_x[new] + logistic(of_x[reset] + of_h[reset]) * of_h[new])
        kept: np.ndarray = logistic(of_x[update] + of_h[update]) * (state - values)
        return values + kept

    return Kernel(function)


def _part(whole: np.ndarray, place: int, units: int) -> np.ndarray:
    return whole[..., place * units : (place + 1) * units]


def _compile_gru_gates(node: Node, types: Types) -> Kernel:
    order = node.attrs["order"]

    def function(
        h: np.ndarray, state: np.ndarray, x: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        units = state.shape[-1]
        update, reset = (_part(h, place, units) for place in order[:2])
        if x is not None:
            update = update + _part(x, order[2], units)
            reset = reset + _part(x, order[3], units)
        return logistic(update), logistic(reset) * state

    return Kernel(function)


def _compile_gru_state(node: Node, types: Types) -> Kernel:
    order = node.attrs["order"]

    def function(
        product: np.ndarray, update: np.ndarray, state: np.ndarray, x: np.ndarray | None = None
    ) -> np.ndarray:
        new = np.tanh(product if x is None else product + _part(x, order[0], state.shape[-1]))
        following: np.ndarray = new + update * (state - new)
        return following

    return Kernel(function)


LSTM_CELL = Op("LstmCell", "penstock", 1, 1, _infer_lstm, _compile_lstm)
GRU_CELL = Op("GruCell", "penstock", 1, 1, _infer_gru, _compile_gru)
GRU_GATES = Op("GruGates", "penstock", 1, 1, _infer_gru_gates, _compile_gru_gates)
GRU_STATE = Op("GruState", "penstock", 1, 1, _infer_gru, _compile_gru_state)
CELLS = LSTM_CELL, GRU_CELL, GRU_GATES, GRU_STATE
