"""Recurrence: the steps of a recurrent layer, given the products of its inputs and weights.

It is not in the table of operations: the pass ``hoist_recurrences`` creates it for loops over a
cell. The attribute ``cell`` is RNN, GRU or LSTM; ``hidden_size``, ``linear_before_reset`` and
``activations`` are those of ONNX's layers. Inputs:

0. products [steps, batch, gates * units], with gate i of ONNX's order at index ``places[i]``;
1. recurrent weights [1, gates * units, units], and
2. biases [1, 2 * gates * units] or none, both in ONNX's layout;
3. a mask [steps, batch] or none, which keeps the states of a row where it is 0. A bool mask
   selects, a numeric one interpolates: mask * new + (1 - mask) * old;
4. the state [batch, units] and
5. the cell [batch, units] of an LSTM before the first step, zeros if there are none.

Outputs are the states of all steps [steps, batch, units], the last state and the last cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.types import BOOL, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Dims, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.internal.cells import check_places, logistic
from penstock.ops.onnx.recurrent import parse_layer

Arrays: TypeAlias = Sequence[np.ndarray]
Advance: TypeAlias = Callable[[Arrays, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""``advance(products, state, cell)`` returns the next state and cell, given a product per gate"""


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    products = rules.tensor(types, 0)
    gates, units, has_cell = len(attrs["places"]), attrs["hidden_size"], attrs["cell"] == "LSTM"
    rules.same_dtype(types, [i for i in (0, 1, 2, 4, 5) if i < len(types)])
    check_places(attrs["places"], {"RNN": 1, "GRU": 3, "LSTM": 4}[attrs["cell"]], gates)
    if products.shape is None:
        return [TensorType(products.dtype)] * (3 if has_cell else 2)
    rules.check_shape("products", products.shape, (None, None, gates * units))
    steps, batch, _ = products.shape
    wanted = [(1, gates * units, units), (1, 2 * gates * units), (steps, batch)]
    wanted += [(batch, units)] * 2
    for i, shape in enumerate(wanted[: len(types) - 1], 1):
        if rules.given(types, i):
            rules.check_shape(f"input {i}", rules.tensor(types, i).shape, shape)
    state = TensorType(products.dtype, (batch, units))
    states = [state] * (2 if has_cell else 1)
    return TensorType(products.dtype, (steps, batch, units)), *states


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    products = inputs[0]
    return 2 * products[0] * products[1] * products[2] * attrs["hidden_size"] if products else 0


def _rnn(node: Node, weights: Arrays, biases: Arrays) -> Advance:
    (function,) = parse_layer("RNN", node.attrs).activations[0]
    ((r,), (w_bias, r_bias)) = weights, biases

    def advance(x: Arrays, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        new = x[0] + w_bias + (h @ r + r_bias)
        function(new, new)
        return new, c

    return advance


def _gru(node: Node, weights: Arrays, biases: Arrays) -> Advance:
    linear = bool(node.attrs.get("linear_before_reset"))

    def advance(x: Arrays, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        update, reset = (
            logistic(x[i] + biases[i] + (h @ weights[i] + biases[3 + i])) for i in range(2)
        )
        if linear:
            added = reset * (h @ weights[2] + biases[5])
        else:
            added = (reset * h) @ weights[2] + biases[5]
        new = np.tanh(x[2] + biases[2] + added)
        return new + update * (h - new), c

    return advance


def _lstm(node: Node, weights: Arrays, biases: Arrays) -> Advance:
    def advance(x: Arrays, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        into, output, forget, new = (
            x[i] + biases[i] + (h @ weights[i] + biases[4 + i]) for i in range(4)
        )
        following = logistic(forget) * c + logistic(into) * np.tanh(new)
        return logistic(output) * np.tanh(following), following

    return advance


_CELLS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


def _compile(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    places = attrs["places"]

    def function(
        products: np.ndarray,
        weights: np.ndarray,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        h: np.ndarray | None = None,
        c: np.ndarray | None = None,
    ) -> tuple[np.ndarray, ...]:
        steps, batch, width = products.shape
        units, dtype = width // len(places), products.dtype
        zeros = np.zeros((batch, units), dtype)
        h, c = (zeros if state is None else state for state in (h, c))
        if bias is None:
            bias = np.zeros(2 * width, dtype)
        by_gate = [matrix.T for matrix in weights[0].reshape(-1, units, units)]
        advance = _CELLS[attrs["cell"]](node, by_gate, [*bias.reshape(-1, units)])
        y = np.empty((steps, batch, units), dtype)
        for t in range(steps):
            checkpoint()
            parts = np.split(products[t], len(places), axis=-1)
            following = advance([parts[place] for place in places], h, c)
            if mask is not None:
                following = _masked(mask[t][:, None], following, (h, c))
            y[t], c = following
            h = y[t]
        # Both are views of y, with which other outputs must not share memory.
        return (y, h.copy(), c.copy()) if attrs["cell"] == "LSTM" else (y, h.copy())

    return Kernel(function)


def _masked(
    mask: np.ndarray, new: tuple[np.ndarray, np.ndarray], old: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The states after a step: ``new`` where the mask is 1, ``old`` where it is 0."""
    pairs = zip(new, old, strict=True)
    if mask.dtype == BOOL:
        state, cell = (np.where(mask, after, before) for after, before in pairs)
    else:
        state, cell = (mask * after + (1 - mask) * before for after, before in pairs)
    return state, cell


RECURRENCE = Op("Recurrence", "penstock", 1, 1, _infer, _compile, work=_work)
