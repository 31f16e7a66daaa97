"""LstmCell, GruCell, GruGates and GruState: the elementwise part of a step of a recurrent layer.

They are not in the table of operations: the pass ``recompose_cells`` creates them from equivalent
subgraphs. ``order`` has the index of each gate among the gates concatenated along the last axis.

LstmCell takes gates [..., 4 units] and a cell [..., units], and returns the state and the next
cell, both [..., units]; ``order`` lists the input, forget and output gates and the candidate:

    next = sigmoid(forget + forget_bias) cell + sigmoid(input) tanh(new)
    state = sigmoid(output) tanh(next)

GruCell takes gates of the input and of the state, [..., 3 units] each, and the state
[..., units], and returns the next state; ``order`` lists the update and reset gates and the
candidate:

    new = tanh(new_x + sigmoid(reset_x + reset_h) new_h)
    next = new + sigmoid(update_x + update_h) (state - new)

A GRU that resets its state before the product for the candidate has a node before and after it.
GruGates takes gates of the state [..., n units], the state [..., units] and optional gates of the
input [..., n units]; ``order`` lists the update and reset gates in the former, then in the latter.
It returns the update gate and the reset state, both [..., units]. GruState takes the product, the
update gate, the state and an optional tensor [..., n units], whose part ``order`` holds the values
of the input; it returns the next state:

    update = sigmoid(update_h + update_x)
    old = sigmoid(reset_h + reset_x) state

    new = tanh(product + new_x)
    next = new + update (state - new)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import Shape, ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import array_kernel


def logistic(x: np.ndarray) -> np.ndarray:
    # 1 / (1 + exp(-x)) without overflow
    half = x.dtype.type(0.5)
    y: np.ndarray = half * np.tanh(half * x) + half
    return y


def check_places(places: object, count: int, parts: int) -> None:
    """Raise ``ShapeError`` unless ``places`` are ``count`` valid indices of ``parts`` parts:
    kernels do not check them.
    """
    listed = list(places) if isinstance(places, list | tuple) else []
    if len(listed) != count or not all(type(i) is int and 0 <= i < parts for i in listed):
        raise ShapeError(f"order {places!r:.80} must be {count} integers in [0, {parts})")


def _check_parts(
    name: str, types: Types, index: int, like: TensorType, places: object, count: int
) -> None:
    """Raise ``ShapeError`` unless input ``index`` is a concatenation of parts of the shape of
    ``like`` along the last axis, and ``places`` are ``count`` of them."""
    whole = rules.tensor(types, index)
    if whole.shape is None or like.shape is None:
        return
    if not like.shape:
        raise ShapeError("the state must have rank 1 or more, but is a scalar")
    rules.check_shape(name, whole.shape, (*like.shape[:-1], None))
    width, units = whole.shape[-1], like.shape[-1]
    known = isinstance(width, int) and isinstance(units, int) and units
    check_places(places, count, width // units if known else count)  # type: ignore[operator]


def _of_parts(like: TensorType, count: int) -> Shape | None:
    """The shape of ``count`` tensors of the shape of ``like``, concatenated along the last axis."""
    if like.shape is None:
        return None
    if not like.shape:
        raise ShapeError("the state must have rank 1 or more, but is a scalar")
    return (*like.shape[:-1], rules.dim_product([count, like.shape[-1]]))


def _infer_lstm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.same_dtype(types, range(2))
    cell = rules.tensor(types, 1)
    check_places(attrs["order"], 4, 4)
    rules.check_shape("gates", rules.tensor(types, 0).shape, _of_parts(cell, 4))
    return cell, cell


def _infer_gru(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.same_dtype(types, range(3))
    state = rules.tensor(types, 2)
    check_places(attrs["order"], 3, 3)
    for index, name in enumerate(("x", "h")):
        rules.check_shape(name, rules.tensor(types, index).shape, _of_parts(state, 3))
    return (state,)


def _infer_gru_gates(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.same_dtype(types, range(len(types)))
    state, order = rules.tensor(types, 1), attrs["order"]
    _check_parts("h", types, 0, state, order[:2], 2)
    if rules.given(types, 2):
        _check_parts("x", types, 2, state, order[2:], 2)
    return state, state


def _infer_gru_state(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    rules.same_dtype(types, range(len(types)))
    state = rules.tensor(types, 2)
    for index, name in enumerate(("product", "update")):
        rules.check_shape(name, rules.tensor(types, index).shape, state.shape)
    if rules.given(types, 3):
        _check_parts("x", types, 3, state, attrs["order"], 1)
    return (state,)


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


LSTM_CELL = Op("LstmCell", "penstock", 1, 1, _infer_lstm, array_kernel(_lstm))
GRU_CELL = Op("GruCell", "penstock", 1, 1, _infer_gru, array_kernel(_gru))
GRU_GATES = Op("GruGates", "penstock", 1, 1, _infer_gru_gates, array_kernel(_gru_gates))
GRU_STATE = Op("GruState", "penstock", 1, 1, _infer_gru_state, array_kernel(_gru_state))
