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

from penstock.ir.op import Infer, Op
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import array_kernel


def logistic(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)), which overflows nowhere
    half = x.dtype.type(0.5)
    y: np.ndarray = half * np.tanh(half * x) + half
    return y


def _outputs(*inputs: int) -> Infer:
    """``infer``: outputs of the types of these inputs."""
    return lambda types, attrs, consts: [rules.tensor(types, i) for i in inputs]


def _lstm(
    gates: np.ndarray, cell: np.ndarray, *, order: Sequence[int], forget_bias: float
) -> tuple[np.ndarray, np.ndarray]:
    parts = np.split(gates, 4, axis=-1)
    into, forget, output, new = (parts[place] for place in order)
    following = logistic(forget + gates.dtype.type(forget_bias)) * cell
    following = following + logistic(into) * np.tanh(new)
    return logistic(output) * np.tanh(following), following


def _gru(x: np.ndarray, h: np.ndarray, state: np.ndarray, *, order: Sequence[int]) -> np.ndarray:
    of_x, of_h = np.split(x, 3, axis=-1), np.split(h, 3, axis=-1)
    update, reset, new = order
    values = np.tanh(of_x[new] + logistic(of_x[reset] + of_h[reset]) * of_h[new])
    kept: np.ndarray = logistic(of_x[update] + of_h[update]) * (state - values)
    return values + kept


def _part(whole: np.ndarray, place: int, units: int) -> np.ndarray:
    return whole[..., place * units : (place + 1) * units]


def _gru_gates(
    h: np.ndarray, state: np.ndarray, x: np.ndarray | None = None, *, order: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    units = state.shape[-1]
    update, reset = (_part(h, place, units) for place in order[:2])
    if x is not None:
        update = update + _part(x, order[2], units)
        reset = reset + _part(x, order[3], units)
    return logistic(update), logistic(reset) * state


def _gru_state(
    product: np.ndarray,
    update: np.ndarray,
    state: np.ndarray,
    x: np.ndarray | None = None,
    *,
    order: Sequence[int],
) -> np.ndarray:
    new = np.tanh(product if x is None else product + _part(x, order[0], state.shape[-1]))
    following: np.ndarray = new + update * (state - new)
    return following


LSTM_CELL = Op("LstmCell", "penstock", 1, 1, _outputs(1, 1), array_kernel(_lstm))
GRU_CELL = Op("GruCell", "penstock", 1, 1, _outputs(2), array_kernel(_gru))
GRU_GATES = Op("GruGates", "penstock", 1, 1, _outputs(1, 1), array_kernel(_gru_gates))
GRU_STATE = Op("GruState", "penstock", 1, 1, _outputs(2), array_kernel(_gru_state))
CELLS = LSTM_CELL, GRU_CELL, GRU_GATES, GRU_STATE
