"""RNN, GRU and LSTM in all forms, with constant float or 8-bit quantized weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.native import family, part_ns
from penstock.backends.native.integer_panels import integer_panels
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.records import NamedTuple
from penstock.core.types import BOOL, FLOAT32, TensorType
from penstock.ir.graph import Node
from penstock.ir.layout import line_aligned
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import ConstantRef, Reordered, Shared, reordered, shared
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.onnx.activation import ACTIVATIONS
from penstock.ops.onnx.recurrent import CELLS, Layer, parse_layer, steps_and_rows
from penstock.ops.registry import TFLITE
from penstock.ops.work_estimate import Workload, flops

# As in c/recurrent/recurrent.c: units per block.
_UNITS = 16
# Units per block of codes, in whole panels: as in c/products/integers.h.
_CODE_UNITS = 32
_CELLS = ("RNN", "GRU", "LSTM")
_QUANTIZED = "DynamicQuantizeLSTM"
_ACTIVATIONS = (
    *("tanh", "sigmoid", "relu", "affine", "leakyrelu", "thresholdedrelu", "scaledtanh"),
    *("hardsigmoid", "elu", "softsign", "softplus"),
)
_ACTIVATION = np.dtype([("kind", "i8"), ("alpha", "f8"), ("beta", "f8")])

# Rows of the batch of an item, if weights stay near the core and if they do not, and the bytes that
# do; about the floats of X W^T that it computes at once, and rows, which should be enough for a
# product at full speed.
_ROWS, _MANY_ROWS, _NEAR_BYTES, _CHUNK, _CHUNK_ROWS = 8, 48, 1 << 19, 1 << 14, 24
# Bytes of weights that caches may not hold, as in gates.h: each chunk reads them anew; and
# rows that are worth it.
_FAR_BYTES, _MANY_CHUNK_ROWS = 1 << 23, 256
# Of the ranges of codes.
_RANGE_BYTES = 64

# Rows whose computation takes as long as loading the weights; measured for layers of 64 to 1024
# units with 1 to 64 rows.
_WAIT_ROWS = 1.2

# The number of an activation in TFLite's files.
_TANH = 4

# Of gates in ready products, in the layers that have none.
_NO_PLACES = (0, 0, 0, 0)


class _CodeMatrix(NamedTuple):
    panels: np.ndarray
    sums: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


_NOT_QUANTIZED = [None] * len(_CodeMatrix._fields)


class _Weights(NamedTuple):
    w_codes: Sequence[np.ndarray | None]
    r_codes: Sequence[np.ndarray | None]
    bias: np.ndarray
    hidden: int
    w: np.ndarray | None = None
    r: np.ndarray | None = None
    r_new: np.ndarray | None = None
    new_bias: np.ndarray | None = None
    peepholes: np.ndarray | None = None


class _Held(NamedTuple):
    """The weights of a layer: quantized ones are kept, others are held in panels."""

    weights: _Weights
    keep: Shared[_Weights] | None
    reordered: Mapping[int, Reordered]


def recurrence_workload(node: Node) -> Workload:
    """Return the workload of a Recurrence."""
    x = node.inputs[0]
    shape = None if x is None else x.shape
    steps, rows = (d if isinstance(d, int) else 1 for d in (shape or (1, 1))[:2])
    return _work(node, steps, rows)


@family("penstock.Recurrence", work=recurrence_workload)
def recurrence_call(site: Site) -> NativeCall | None:
    """Recurrence with constant weights: as a recurrent layer, with products instead of X."""
    products, weights, mask = site.tensor(0), site.weights(1), site.input(3)
    bias = site.constant(2)
    if weights is None or (bias is None and site.input(2) is not None):
        return None
    cell, places = site.attr("cell", ""), site.attr("places", ())
    if products.dtype != FLOAT32 or weights.dtype != FLOAT32 or not products.elements:
        return None
    layer = parse_layer(cell, site.node.attrs)
    activations = _activations(cell, site.node.attrs, 1)
    if activations is None:
        return None
    (steps, batch, _), hidden, gates = products.dims, weights.shape[2], layer.gates
    matrix = _reordered(weights, hidden, _parts(layer))
    r, *new = matrix.arrays
    total, new_bias = _biases(layer, 1, hidden, bias)
    sizes = _sizes(layer, steps, batch, hidden, 0)
    live = share = None
    if mask is not None:
        live, share = (Tensor(3), None) if mask.dtype == BOOL else (None, Tensor(3))
    states = [None if site.input(i) is None else Tensor(i) for i in (4, 5)]
    last = [site.result(i) if _has_result(site, i) else None for i in range(3)]
    multiplied = 2 * steps * sizes.rows * gates * hidden * hidden
    return NativeCall(
        "recurrent",
        (
            *(Tensor(0), *states, None, live, share),
            *(*_NOT_QUANTIZED, *_NOT_QUANTIZED, None, r, new[0] if new else None),
            *(total, new_bias, None),
            activations.view(np.uint8),
            *(*last, WORKSPACE),
            *(_CELLS.index(cell), 1, 0, 0, layer.linear_before_reset, 0),
            *(steps, batch, hidden, hidden, sizes.padded, gates),
            *(sizes.rows, sizes.chunk, sizes.item_bytes, 0.0, 0.0),
            *(*places, *_NO_PLACES[len(places) :]),
        ),
        items=sizes.items,
        item_ns=part_ns(Workload("recurrent, a part", flops=multiplied)),
        stages=(sizes.stages, sizes.padded // _UNITS),
        workspace=sizes.items * sizes.item_bytes,
        reordered={1: matrix},
    )


def recurrent_workload(node: Node) -> Workload:
    """Return the workload of a recurrent layer."""
    return _work(node, *steps_and_rows(node))


@family("GRU", "LSTM", "RNN", work=recurrent_workload)
@family("com.microsoft.DynamicQuantizeLSTM")
@family("tflite.Lstm", work=recurrent_workload)
def recurrent_call(site: Site) -> NativeCall | None:
    """A recurrent layer over float32 with constant weights."""
    x, is_quantized = site.tensor(0), site.node.op.name == _QUANTIZED
    cell = site.node.op.name.upper().removeprefix("DYNAMICQUANTIZE")
    if site.node.op.domain == TFLITE and not _is_clipped_alone(site):
        return None
    held = _held_weights(site, cell, is_quantized)
    if held is None or 0 in x.dims:
        return None
    wanted = {0: FLOAT32, 4: INT32, 5: FLOAT32, 6: FLOAT32, 7: FLOAT32}
    if any((t := site.input(i)) is not None and t.dtype != dtype for i, dtype in wanted.items()):
        return None
    layer = parse_layer(cell, site.node.attrs, peepholes=site.input(7) is not None)
    first, second, width = x.dims
    batch, steps = (first, second) if layer.batch_first else (second, first)
    packed = held.weights
    directions, gates, padded = packed.bias.shape
    activations = _activations(cell, site.node.attrs, directions)
    if activations is None:
        return None
    hidden = packed.hidden
    sizes = _sizes(layer, steps, batch, hidden, width, is_quantized)
    rows, chunk, item_bytes, items = sizes.rows, sizes.chunk, sizes.item_bytes, sizes.items
    if is_quantized:
        lines = [math.ceil(count / 64) * 64 for count in (width, hidden)]
        item_bytes += batch * (steps * lines[0] + lines[1]) + _RANGE_BYTES

    products = 2 * steps * rows * layer.gates * hidden * (width + hidden)

    def given(i: int) -> Tensor | None:
        return None if site.input(i) is None else Tensor(i)

    def result(i: int) -> Tensor | None:
        return site.result(i) if _has_result(site, i) else None

    return NativeCall(
        "recurrent",
        (
            *(Tensor(0), given(5), given(6), given(4), None, None),
            *(*packed.w_codes, *packed.r_codes, packed.w, packed.r, packed.r_new),
            *(packed.bias, packed.new_bias, packed.peepholes),
            activations.view(np.uint8),
            *(result(0), result(1), result(2), WORKSPACE),
            *(_CELLS.index(layer.cell), directions, layer.reverse[0], layer.batch_first),
            *(layer.linear_before_reset, layer.input_forget),
            *(steps, batch, width, hidden, padded, gates),
            *(rows, chunk, item_bytes, float(layer.clip or 0.0)),
            *(site.attr("cell_clip", 0.0), *_NO_PLACES),
        ),
        items=items,
        item_ns=part_ns(Workload("recurrent, a part", flops=products)),
        stages=(sizes.stages, padded // (_CODE_UNITS if is_quantized else _UNITS)),
        workspace=items * item_bytes,
        can_fail=site.input(4) is not None,
        keep=held.keep,
        reordered=held.reordered,
    )


def _is_clipped_alone(site: Site) -> bool:
    """Whether a TFLite LSTM differs from ONNX's only in the clipping of its cells."""
    w, hidden = site.weights(1), site.attr("hidden_size", 0)
    usual = w is not None and w.shape[1] == 4 * hidden and site.attr("activation", 0) == _TANH
    return usual and all(site.input(i) is None for i in (8, 9, 10))


def _has_result(site: Site, i: int) -> bool:
    place = len(site.node.inputs) + i
    return place < len(site.tensors) and site.tensors[place] is not None


def _parts(layer: Layer) -> tuple[int, ...]:
    """Return the numbers of gates with joint state weights: a GRU's candidate may read another
    state than its gates."""
    # Its product then depends on the reset gate, and is a separate stage.
    split = layer.cell == "GRU" and not layer.linear_before_reset
    return (2, 1) if split else (layer.gates,)


class _Sizes(NamedTuple):
    """Division of a layer's work into items and chunks of steps."""

    padded: int  # units in whole blocks
    rows: int  # of the batch, of an item
    chunk: int  # steps of X at once
    item_bytes: int  # of workspace
    items: int
    stages: int  # of an item


def _sizes(
    layer: Layer, steps: int, batch: int, hidden: int, width: int, is_quantized: bool = False
) -> _Sizes:
    """Return how to divide the work of a layer for an X of shape [steps, batch, width]."""
    block = _CODE_UNITS if is_quantized else _UNITS
    padded = math.ceil(hidden / block) * block
    columns = layer.gates * padded
    if is_quantized:  # whose range is that of the whole batch
        rows = batch
    else:
        # Each item reads all weights in each step. If they are not in a near cache, more rows must
        # share each read.
        rows = _even(batch, _MANY_ROWS if columns * hidden * 4 > _NEAR_BYTES else _ROWS)
    together = _CHUNK_ROWS if columns * width * 4 <= _FAR_BYTES else _MANY_CHUNK_ROWS
    chunk = min(steps, max(_CHUNK // (rows * columns), math.ceil(together / rows)))
    floats = [rows * padded] * 3 + [chunk * rows * columns, rows * columns]
    item_bytes = sum(math.ceil(count * 4 / 64) * 64 for count in floats)
    items = len(layer.reverse) * math.ceil(batch / rows)
    stages = math.ceil(steps / chunk) + steps * len(_parts(layer))
    if is_quantized:
        stages += 1 + steps
    return _Sizes(padded, rows, chunk, item_bytes, items, stages)


def _work(node: Node, steps: int, rows: int) -> Workload:
    # A step reads all weights, however few its rows.
    products = flops(node) * (rows + _WAIT_ROWS) / max(rows, 1)
    return Workload("recurrent", flops=products, items=steps)


def _held_weights(site: Site, cell: str, is_quantized: bool) -> _Held | None:
    """Return the packed weights of a layer, None unless they are constants of its dtype."""
    w, r, bias = site.weights(1), site.weights(2), site.constant(3)
    # All weights are packed when the plan is compiled.
    others = [3, 7, *range(8, 12 * is_quantized)]
    absent = [i for i in others if site.input(i) is not None and site.constant(i) is None]
    if w is None or r is None or absent or 0 in r.shape:
        return None
    if w.dtype not in ((INT8, UINT8) if is_quantized else (FLOAT32,)):
        return None
    layer, peepholes = parse_layer(cell, site.node.attrs), site.constant(7)
    if peepholes is not None:
        # Padded like gates, so that loops over units have no remainder.
        block = _CODE_UNITS if is_quantized else _UNITS
        peepholes = _padded(peepholes.reshape(r.shape[0], 3, -1), block)
    if not is_quantized:
        hidden = r.shape[2]
        matrices = {
            1: _reordered(w, hidden, (layer.gates,)),
            2: _reordered(r, hidden, _parts(layer)),
        }
        (w_blocks,), (r_blocks, *new) = matrices[1].arrays, matrices[2].arrays
        total, new_bias = _biases(layer, w.shape[0], hidden, bias)
        weights = _Weights(
            w_codes=_NOT_QUANTIZED,
            r_codes=_NOT_QUANTIZED,
            w=w_blocks,
            r=r_blocks,
            r_new=new[0] if new else None,
            bias=total,
            new_bias=new_bias,
            peepholes=peepholes,
            hidden=hidden,
        )
        return _Held(weights, None, matrices)
    if site.input(4) is not None:
        return None  # lengths
    given: list[Any] = [site.constant(i) for i in (1, 2, 3, 8, 9, 10, 11)]
    arrays = [array for array in given if array is not None]
    held = shared("native codes", lambda: _packed(layer, *given), *arrays)
    return _Held(held.value._replace(peepholes=peepholes), held, {})


def _activations(cell: str, attrs: Attrs, directions: int) -> np.ndarray | None:
    """Return the table of activations, three per direction; None for unsupported ones."""
    default = CELLS[cell].activations
    usual = default * directions
    names = tuple(attrs.get("activations") or usual)[: len(usual)]
    values = {key: iter(attrs.get(f"activation_{key}") or ()) for key in ("alpha", "beta")}
    table = np.zeros((directions, 3), _ACTIVATION)
    for i, name in enumerate(names):
        if name.lower() not in _ACTIVATIONS:
            return None
        defaults = ACTIVATIONS[name.lower()][2]
        given = {key: next(values[key], value) for key, value in defaults.items()}
        entry = table[divmod(i, len(default))]
        entry["kind"] = _ACTIVATIONS.index(name.lower())
        entry["alpha"], entry["beta"] = given.get("alpha", 0.0), given.get("beta", 0.0)
    return table


def _packed(
    layer: Layer, w: np.ndarray, r: np.ndarray, bias: np.ndarray | None, *codes: Any
) -> _Weights:
    """Return the weights of a quantized layer, [directions, k, columns]."""
    hidden = r.shape[1]
    total, _ = _biases(layer, len(w), hidden, bias, _CODE_UNITS)
    return _Weights(
        w_codes=_code_matrix(w, hidden, *codes[:2]),
        r_codes=_code_matrix(r, hidden, *codes[2:]),
        bias=total,
        hidden=hidden,
    )


def _biases(
    layer: Layer, directions: int, hidden: int, bias: np.ndarray | None, block: int = _UNITS
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the sums of both biases, [directions, gates, units], and the bias that a GRU adds
    before its reset gate, [directions, units]."""
    # Compiled code always initializes accumulators with a bias.
    if bias is None:
        bias = np.zeros((directions, 2 * layer.gates * hidden), FLOAT32)
    of_w, of_r = bias.reshape(directions, 2, layer.gates, hidden).swapaxes(0, 1)
    if layer.cell != "GRU" or not layer.linear_before_reset:
        return _padded(of_w + of_r, block), None
    # The reset gate also scales the candidate's bias of R, which cannot be added ahead.
    total = of_w.copy()
    total[:, :2] += of_r[:, :2]
    return _padded(total), _padded(of_r[:, 2])


def _padded(array: np.ndarray, block: int = _UNITS) -> np.ndarray:
    """Return ``array`` with its last axis, of units, zero-padded to whole blocks."""
    *dims, hidden = array.shape
    padded = np.zeros((*dims, math.ceil(hidden / block) * block), array.dtype)
    padded[..., :hidden] = array
    return padded


def _even(count: int, most: int) -> int:
    """Return the size of even parts of ``count``, at most ``most``."""
    return math.ceil(count / math.ceil(count / most))


def _reordered(matrix: ConstantRef, hidden: int, parts: Sequence[int]) -> Reordered:
    """Return a matrix [directions, gates * hidden, k], split into ``parts`` by numbers of gates, in
    blocks of units: [directions, block, k, gate, 16]."""
    directions, columns, k = matrix.shape
    blocks = math.ceil(hidden / _UNITS)
    types = [TensorType(FLOAT32, (directions, blocks, k, gates, _UNITS)) for gates in parts]
    ends = np.cumsum(parts)[:-1]

    def make(matrix: np.ndarray) -> tuple[np.ndarray, ...]:
        by_gate = matrix.reshape(directions, sum(parts), hidden, k)
        return tuple([_blocks(part) for part in np.split(by_gate, ends, axis=1)])

    def back(*arrays: np.ndarray) -> np.ndarray:
        by_gate = [
            array.transpose(0, 3, 1, 4, 2).reshape(directions, -1, blocks * _UNITS, k)[
                :, :, :hidden
            ]
            for array in arrays
        ]
        return np.ascontiguousarray(np.concatenate(by_gate, axis=1)).reshape(directions, columns, k)

    return reordered(("native recurrent blocks", tuple(parts)), matrix, make, back, types)


def _blocks(matrix: np.ndarray) -> np.ndarray:
    """Return [directions, gates, units, k] as [directions, block, k, gate, 16], zero-padded."""
    directions, gates, hidden, k = matrix.shape
    count = math.ceil(hidden / _UNITS)
    padded = np.zeros((directions, gates, count * _UNITS, k), FLOAT32)
    padded[:, :, :hidden] = matrix
    blocks = padded.reshape(directions, gates, count, _UNITS, k).transpose(0, 2, 4, 1, 3)
    return line_aligned(blocks)


def _code_matrix(
    codes: np.ndarray, hidden: int, scales: np.ndarray, zeros: np.ndarray | None
) -> _CodeMatrix:
    """Return codes [directions, k, columns], with a scale and zero point per direction or column,
    and the columns of each gate padded to whole blocks."""
    directions, k, columns = codes.shape
    zeros = np.zeros(directions, codes.dtype) if zeros is None else zeros
    scales, zeros = (
        _padded(
            np.broadcast_to(a.reshape(directions, -1), (directions, columns)).reshape(
                directions, -1, hidden
            ),
            _CODE_UNITS,
        ).reshape(directions, -1)
        for a in (scales.astype(FLOAT32), zeros)
    )
    codes = _padded(codes.reshape(directions, k, -1, hidden), _CODE_UNITS).reshape(
        directions, k, -1
    )
    parts = [integer_panels(codes[d], zeros[d]) for d in range(directions)]
    return _CodeMatrix(
        np.concatenate([part.panels for part in parts]),
        np.stack([part.sums for part in parts]),
        np.stack([part.zeros for part in parts]),
        scales,
    )
