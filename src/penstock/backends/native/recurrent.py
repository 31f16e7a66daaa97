"""RNN, GRU and LSTM in all forms, with constant weights of real numbers or 8-bit codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.algorithms.records import NamedTuple
from penstock.backends.native.integers import integer_panels
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.ir.graph import Node
from penstock.ops.common.constant_cache import Reordered, Shared, reordered, shared
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.onnx.activation import ACTIVATIONS
from penstock.ops.onnx.recurrent import Layer, parse_layer, steps_and_rows
from penstock.ops.work_estimate import flops
from penstock.types import FLOAT32, TensorType

# As in c/recurrent.c.
_PANEL = 32
_CELLS = ("RNN", "GRU", "LSTM")
_OF_CODES = "DynamicQuantizeLSTM"
_ACTIVATIONS = (
    *("tanh", "sigmoid", "relu", "affine", "leakyrelu", "thresholdedrelu", "scaledtanh"),
    *("hardsigmoid", "elu", "softsign", "softplus"),
)
_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_ACTIVATION = np.dtype([("kind", "i8"), ("alpha", "f8"), ("beta", "f8")])

# Rows of the batch of an item, and about the floats of X W^T that it computes at once.
_ROWS, _CHUNK = 8, 1 << 14
# Operations of an item that take half a second: it does not look whether the run must stop.
_MOST_WORK = 5_000_000_000
_OPERATIONS_PER_NS = 20.0


# Operations a second, of many rows with weights that stay in a cache near the core, and with
# others, and their size; and rows that take as long as waiting for the weights.
_NEAR_PER_S, _FAR_PER_S, _NEAR_BYTES, _WAIT_ROWS = 125e9, 23e9, 1 << 19, 0.7
_STEP_S = 0.1e-6


class _CodeMatrix(NamedTuple):
    panels: np.ndarray
    sums: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


_NO_CODES = [None] * len(_CodeMatrix._fields)


class _Weights(NamedTuple):
    w_codes: Sequence[np.ndarray | None]
    r_codes: Sequence[np.ndarray | None]
    w: np.ndarray | None
    r: np.ndarray | None
    r_new: np.ndarray | None
    bias: np.ndarray
    new_bias: np.ndarray | None
    hidden: int


class _Held(NamedTuple):
    """The weights of a layer: those of codes are kept, others held in the order of panels."""

    weights: _Weights
    keep: Shared[_Weights] | None
    reordered: Mapping[int, Reordered]


def recurrent_call(site: Site) -> NativeCall | None:
    """A recurrent layer over float32, if its weights are constants."""
    x, has_codes = site.input(0), site.node.op.name == _OF_CODES
    cell = "LSTM" if has_codes else site.node.op.name
    held = _held_weights(site, cell, has_codes)
    if x is None or held is None or 0 in x.dims:
        return None
    wanted = {0: FLOAT32, 4: INT32, 5: FLOAT32, 6: FLOAT32, 7: FLOAT32}
    if any((t := site.input(i)) is not None and t.dtype != dtype for i, dtype in wanted.items()):
        return None
    layer = parse_layer(cell, site.node.attrs, peepholes=site.input(7) is not None)
    first, second, width = x.dims
    batch, steps = (first, second) if layer.batch_first else (second, first)
    packed = held.weights
    directions, gates = packed.bias.shape
    activations = _activations(cell, site.node.attrs, directions)
    if activations is None:
        return None
    hidden = packed.hidden
    rows = batch if has_codes else min(batch, _ROWS)
    chunk = max(1, min(steps, _CHUNK // (rows * gates)))
    floats = [rows * hidden] * 4 + [chunk * rows * gates, rows * (3 * hidden + 2 * _PANEL)]
    item_bytes = sum(math.ceil(count * 4 / 64) * 64 for count in floats)
    if has_codes:
        padded = [math.ceil(count / 64) * 64 for count in (width, hidden)]
        item_bytes += batch * (steps * padded[0] + padded[1])
    items = directions * math.ceil(batch / rows)
    work = 2 * steps * rows * layer.gates * hidden * (width + hidden)
    if work > _MOST_WORK:
        return None

    def given(i: int) -> Tensor | None:
        return None if site.input(i) is None else Tensor(i)

    def result(i: int) -> Tensor | None:
        place = len(site.constants) + i
        is_given = place < len(site.tensors) and site.tensors[place] is not None
        return site.result(i) if is_given else None

    return NativeCall(
        "recurrent",
        (
            *(Tensor(0), given(5), given(6), given(4)),
            *(*packed.w_codes, *packed.r_codes, *packed[2:7], given(7)),
            activations.view(np.uint8),
            *(result(0), result(1), result(2), WORKSPACE),
            *(_CELLS.index(layer.cell), directions, layer.reverse[0], layer.batch_first),
            *(layer.linear_before_reset, layer.input_forget),
            *(steps, batch, width, hidden, gates),
            *(rows, chunk, item_bytes, float(layer.clip or 0.0)),
        ),
        items=items,
        item_ns=work / _OPERATIONS_PER_NS,
        workspace=items * item_bytes,
        can_fail=site.input(4) is not None,
        keep=held.keep,
        reordered=held.reordered,
    )


def recurrent_seconds(node: Node) -> float:
    """An estimate of the time of a recurrent layer."""
    weights = [value.const for value in node.inputs[1:3] if value is not None]
    nbytes = sum(array.nbytes for array in weights if array is not None)
    steps, rows = steps_and_rows(node)
    near_per_s = _NEAR_PER_S * rows / (rows + _WAIT_ROWS)
    per_s = near_per_s if nbytes <= _NEAR_BYTES else _FAR_PER_S
    return 1e-6 + steps * _STEP_S + flops(node) / per_s


def _held_weights(site: Site, cell: str, has_codes: bool) -> _Held | None:
    """The packed weights of a layer, None if they are no constants of its type."""
    w, r, bias, *codes = (site.constant(i) for i in (1, 2, 3, 8, 9, 10, 11))
    given = [3, 7, *range(8, 12 * has_codes)]
    absent = [i for i in given if site.input(i) is not None and site.constant(i) is None]
    if w is None or r is None or absent or 0 in r.shape:
        return None
    if w.dtype not in ((INT8, UINT8) if has_codes else (FLOAT32,)):
        return None
    layer = parse_layer(cell, site.node.attrs)
    if not has_codes:
        columns, hidden = r.shape[1:]
        # The candidate of a GRU reads another state than its gates.
        ends = (2 * hidden, columns) if layer.cell == "GRU" else (columns,)
        matrices = {1: _reordered(w, (columns,)), 2: _reordered(r, ends)}
        (w_panels,), (r_panels, *new) = matrices[1].arrays, matrices[2].arrays
        panels = w_panels, r_panels, new[0] if new else None
        biases = _biases(layer, len(w), columns, bias)
        weights = _Weights(_NO_CODES, _NO_CODES, *panels, *biases, hidden)
        return _Held(weights, None, matrices)
    if site.input(4) is not None:
        return None  # lengths
    arrays = [a for a in (w, r, bias, *codes) if a is not None]
    held = shared("native codes", lambda: _packed(layer, w, r, bias, codes), *arrays)
    return _Held(held.value, held, {})


def _activations(cell: str, attrs: Any, directions: int) -> np.ndarray | None:
    """The table of activations, three for each direction; None for one that is not there."""
    usual = _DEFAULTS[cell] * directions
    names = tuple(attrs.get("activations") or usual)[: len(usual)]
    values = {key: iter(attrs.get(f"activation_{key}") or ()) for key in ("alpha", "beta")}
    table = np.zeros((directions, 3), _ACTIVATION)
    for i, name in enumerate(names):
        if name.lower() not in _ACTIVATIONS:
            return None
        defaults = ACTIVATIONS[name.lower()][2]
        given = {key: next(values[key], value) for key, value in defaults.items()}
        entry = table[divmod(i, len(_DEFAULTS[cell]))]
        entry["kind"] = _ACTIVATIONS.index(name.lower())
        entry["alpha"], entry["beta"] = given.get("alpha", 0.0), given.get("beta", 0.0)
    return table


def _packed(
    layer: Layer, w: np.ndarray, r: np.ndarray, bias: np.ndarray | None, codes: Sequence[Any]
) -> _Weights:
    """The weights of a layer of codes [directions, k, columns]."""
    columns, hidden = r.shape[:0:-1]
    total, _ = _biases(layer, len(w), columns, bias)
    matrices = _code_matrix(w, *codes[:2]), _code_matrix(r, *codes[2:])
    return _Weights(*matrices, None, None, None, total, None, hidden)


def _biases(
    layer: Layer, directions: int, columns: int, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The sums of both biases, padded with zeros, and what a GRU adds before its reset gate."""
    total = np.zeros((directions, math.ceil(columns / _PANEL) * _PANEL), FLOAT32)
    if bias is None:
        return total, None
    recurrent, new_bias = bias[:, columns:].copy(), None
    if layer.cell == "GRU" and layer.linear_before_reset:
        begin = columns // 3 * 2
        new_bias = recurrent[:, begin:].copy()
        recurrent[:, begin:] = 0
    total[:, :columns] = bias[:, :columns] + recurrent
    return total, new_bias


def _reordered(matrix: np.ndarray, ends: tuple[int, ...]) -> Reordered:
    """The panels of a matrix in parts, which end at the columns ``ends``."""
    parts = list(pairwise((0, *ends)))

    directions, _, k = matrix.shape
    counts = [math.ceil((end - begin) / _PANEL) for begin, end in parts]
    types = [TensorType(FLOAT32, (directions, count, k, _PANEL)) for count in counts]

    def make(matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple([_panels(matrix[:, begin:end]) for begin, end in parts])

    def back(*panels: np.ndarray) -> np.ndarray:
        columns = [part.swapaxes(2, 3).reshape(len(part), -1, part.shape[2]) for part in panels]
        widths = [end - begin for begin, end in parts]
        return np.concatenate([c[:, :n] for c, n in zip(columns, widths, strict=True)], axis=1)

    return reordered(("native recurrent", ends), matrix, make, back, types)


def _code_matrix(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> _CodeMatrix:
    """Codes [directions, k, columns], with a scale and zero point for each direction or column."""
    directions, _, columns = codes.shape
    zeros = np.zeros(directions, codes.dtype) if zeros is None else zeros
    spread = [
        np.broadcast_to(a.reshape(directions, -1), (directions, columns)) for a in (scales, zeros)
    ]
    parts = [integer_panels(codes[d], spread[1][d]) for d in range(directions)]
    padding = (0, math.ceil(columns / _PANEL) * _PANEL - columns)

    def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(row, padding) for row in rows])

    return _CodeMatrix(
        np.concatenate([part.panels for part in parts]),
        padded([part.sums for part in parts]),
        padded([part.zeros for part in parts]),
        padded(list(spread[0].astype(FLOAT32))),
    )


def _panels(matrix: np.ndarray) -> np.ndarray:
    """[directions, columns, k] as [directions, panel, k, 32], padded with zeros."""
    directions, columns, k = matrix.shape
    count = math.ceil(columns / _PANEL)
    padded = np.zeros((directions, count * _PANEL, k), FLOAT32)
    padded[:, :columns] = matrix
    panels = padded.reshape(directions, count, _PANEL, k).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(panels)
