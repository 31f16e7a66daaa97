"""Recurrent cells whose gates are one product: LSTMBlockCell, BlockLSTM and GRUBlockCell.

::

    [x, h] @ w + b  ->  gates i, ci, f, o (BlockLSTMV2: i, f, ci, o), each [batch, cells]
    cs = tanh(ci) * sigmoid(i) + cs * sigmoid(f + forget_bias)
    h  = tanh(cs) * sigmoid(o)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import Prepared
from penstock.ops.tensorflow import common
from penstock.ops.tensorflow.common import array_operator

_Options = tuple[float, float, bool]
"""forget_bias, cell_clip and use_peephole"""


def _sigmoid(x: np.ndarray) -> np.ndarray:
    # Unlike 1 / (1 + exp(-x)), this cannot overflow.
    return 0.5 * np.tanh(0.5 * x) + 0.5


def _check(x: np.ndarray, h: np.ndarray, *weights: tuple[np.ndarray, int]) -> None:
    """Raise ``ShapeError`` unless weights are [inputs + cells, gates * cells] for x and h."""
    batches = x.ndim > 1 and h.ndim == 2 and x.shape[-2] == len(h)
    for w, gates in weights:
        if not batches or w.shape != (x.shape[-1] + h.shape[1], gates * h.shape[1]):
            raise ShapeError(f"weights {w.shape} do not fit inputs {x.shape} and states {h.shape}")


def _step(
    x: np.ndarray,
    state: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    order: str,
    options: _Options,
) -> tuple[np.ndarray, ...]:
    """One time step: i, cs, f, o, ci, co and h."""
    (before, h), (w, wci, wcf, wco, b) = state, weights
    if before.shape != h.shape:
        raise ShapeError(f"the states cs_prev {before.shape} and h_prev {h.shape} differ")
    forget_bias, cell_clip, use_peephole = options
    parts = np.split(np.concatenate([x, h], 1) @ w + b, 4, 1)
    gates = dict(zip(order, parts, strict=True))
    i, f, o = gates["i"], gates["f"] + x.dtype.type(forget_bias), gates["o"]
    if use_peephole:
        i, f = i + before * wci, f + before * wcf
    i, f, ci = _sigmoid(i), _sigmoid(f), np.tanh(gates["c"])
    cs = ci * i + before * f
    if cell_clip > 0:
        cs = np.clip(cs, -cell_clip, cell_clip).astype(x.dtype, copy=False)
    o, co = _sigmoid(o + cs * wco if use_peephole else o), np.tanh(cs)
    return i, cs, f, o, ci, co, co * o


def _like_state(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return [rules.tensor(types, 2).without_data()] * 7


_OPTIONS: Prepared = {
    "options": lambda node: tuple(
        node.attrs[name] for name in ("forget_bias", "cell_clip", "use_peephole")
    )
}


@array_operator("LSTMBlockCell", infer=_like_state, prepared=_OPTIONS)
def lstm_block_cell(
    x: np.ndarray, before: np.ndarray, h: np.ndarray, *weights: np.ndarray, options: _Options
) -> tuple[np.ndarray, ...]:
    _check(x, h, (weights[0], 4))
    return _step(x, (before, h), weights, "icfo", options)


def _infer_steps(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, h = rules.tensor(types, 1), rules.tensor(types, 3)
    rules.check_shape("the input", x.shape, (None, None, None))
    known = x.shape is not None and h.shape is not None and len(h.shape) == 2
    return [TensorType(x.dtype, (*x.shape[:2], h.shape[1]) if known else None)] * 7  # type: ignore[index]


@array_operator("BlockLSTM", infer=_infer_steps, prepared=_OPTIONS)
def block_lstm(
    length: np.ndarray, x: np.ndarray, *states: np.ndarray, order: str, options: _Options
) -> tuple[np.ndarray, ...]:
    """The outputs of ``length`` time steps, and zeros for those after them."""
    before, h, *weights = states
    _check(x, h, (weights[0], 4))
    steps = common.count(length, "seq_len_max")
    if x.ndim != 3 or steps > len(x):
        raise ShapeError(f"{steps} time steps of an input of shape {x.shape}")
    results = tuple(np.zeros((*x.shape[:2], h.shape[1]), x.dtype) for _ in range(7))
    for t in with_checkpoints(range(steps)):
        outputs = _step(x[t], (before, h), weights, order, options)
        for whole, part in zip(results, outputs, strict=True):
            whole[t] = part
        before, h = outputs[1], outputs[6]
    return results


@array_operator("GRUBlockCell", infer=lambda types, attrs, consts: [rules.tensor(types, 1)] * 4)
def gru_block_cell(
    x: np.ndarray,
    h: np.ndarray,
    w_ru: np.ndarray,
    w_c: np.ndarray,
    b_ru: np.ndarray,
    b_c: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """r, u, c and h."""
    _check(x, h, (w_ru, 2), (w_c, 1))
    r, u = np.split(_sigmoid(np.concatenate([x, h], 1) @ w_ru + b_ru), 2, 1)
    c = np.tanh(np.concatenate([x, r * h], 1) @ w_c + b_c)
    return r, u, c, u * h + (1 - u) * c
