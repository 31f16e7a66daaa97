"""Recurrent networks: RNN, GRU and LSTM.

The three share everything but the step of their cell. For each direction, ``X @ W^T + bias`` is one
product for all steps; then each step adds ``H @ R^T`` and applies the gates. A step writes ``H``
directly into ``Y`` where possible, and allocates nothing.

Sigmoid is computed as ``(1 + tanh(x / 2)) / 2``; the factor 1/2 of the argument is folded into the
weights, so that one ``tanh`` computes all gates of an LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.types import (
    FLOAT32,
    Dim,
    RunValue,
    RunValues,
    Shape,
    ShapeError,
    TensorType,
    Type,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import FLOAT64, is_half
from penstock.ops.common.products import is_long, product_in_parts, recurrent_work
from penstock.ops.common.specialize import Routine, Scratch, Tensors, specialized
from penstock.ops.onnx.activation import ACTIVATIONS, applied
from penstock.ops.registry import operator

# Scalars as 0-d arrays, which ufuncs convert fastest.
_HALF = {dtype: np.array(0.5, dtype) for dtype in (FLOAT32, FLOAT64)}

Activation: TypeAlias = Callable[[np.ndarray, np.ndarray], Any]
"""``f(x, out)``, where ``out`` may be ``x``, as for ufuncs"""

Step: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""``step(x, h, out)`` computes the next ``H`` from the previous ``h`` and this step's
``x = X @ W^T + bias``"""


def _activations(names: Sequence[str], attrs: Attrs) -> list[Activation]:
    """The named functions; each that has parameters takes the next alpha and beta of the lists."""
    values = {key: iter(attrs.get(f"activation_{key}") or ()) for key in ("alpha", "beta")}
    activations: list[Activation] = []
    for name in names:
        if name.lower() not in ACTIVATIONS:
            raise ShapeError(f"unknown activation {name!r}; supported are {', '.join(ACTIVATIONS)}")
        make, scratch, defaults = ACTIVATIONS[name.lower()]
        parameters = {key: next(values[key], value) for key, value in defaults.items()}
        activations.append(applied(make, scratch, parameters))
    return activations


class Layer(NamedTuple):
    """A recurrent layer, from the attributes of its node."""

    cell: str
    gates: int
    reverse: tuple[bool, ...]  # by direction
    activations: tuple[tuple[Activation, ...], ...]  # by direction
    plain: bool  # whether the activations are the default ones
    batch_first: bool
    hidden: int | None
    clip: float | None
    input_forget: bool
    linear_before_reset: bool

    @property
    def halved(self) -> int:
        """The number of leading gates whose weights are halved for the sigmoid."""
        return self.gates - 1 if self.plain else 0


class Cell(NamedTuple):
    """The number of gates, and the default activations of one direction."""

    gates: int
    activations: tuple[str, ...]


CELLS = {
    "RNN": Cell(1, ("Tanh",)),
    "GRU": Cell(3, ("Sigmoid", "Tanh")),
    "LSTM": Cell(4, ("Sigmoid", "Tanh", "Tanh")),
}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def parse_layer(cell: str, attrs: Attrs, peepholes: bool = False) -> Layer:
    reverse = _DIRECTIONS[rules.choice(attrs, "direction", "forward", _DIRECTIONS)]
    (gates, default), directions = CELLS[cell], len(reverse)
    usual = default * directions
    names = tuple(attrs.get("activations") or usual)
    if len(names) < len(usual):
        raise ShapeError(
            f"activations has {len(names)} entries, but {cell} with {directions} directions "
            f"needs {len(usual)}"
        )
    # The schema's default for RNN has two entries even for one direction.
    names = names[: len(usual)]
    functions, n = _activations(names, attrs), len(default)
    clip, input_forget = attrs.get("clip") or None, bool(attrs.get("input_forget", 0))
    plain = [name.lower() for name in names] == [name.lower() for name in usual]
    return Layer(
        cell=cell,
        gates=gates,
        reverse=reverse,
        activations=tuple(tuple(functions[i * n : i * n + n]) for i in range(directions)),
        plain=plain and not (clip or input_forget or peepholes),
        batch_first=bool(attrs.get("layout", 0)),
        hidden=attrs.get("hidden_size"),
        clip=clip,
        input_forget=input_forget,
        linear_before_reset=bool(attrs.get("linear_before_reset", 0)),
    )


def steps_and_rows(node: Node) -> tuple[int, int]:
    """The number of steps of a layer and its batch size, at least 1; both 1 if unknown."""
    x = node.inputs[0]
    if x is None or not isinstance(x.type, TensorType) or not x.type.static:
        return 1, 1
    first, second = x.type.dims[:2]
    steps, rows = (second, first) if node.attrs.get("layout") else (first, second)
    return steps, max(rows, 1)


def sizes_of(layer: Layer, shapes: Sequence[Shape | None]) -> dict[str, Dim]:
    """The sizes T (steps), B (batch), I (input) and H (hidden), from the shapes of the inputs.
    Raises ``ShapeError`` where two inputs disagree."""
    n, gates = len(layer.reverse), layer.gates
    state = ("B", n, "H") if layer.batch_first else (n, "B", "H")
    patterns: dict[str, tuple[Any, ...]] = {
        "X": ("B", "T", "I") if layer.batch_first else ("T", "B", "I"),
        "W": (n, (gates, "H"), "I"),
        "R": (n, (gates, "H"), "H"),
        "B": (n, (2 * gates, "H")),
        "sequence_lens": ("B",),
        "initial_h": state,
        "initial_c": state,
        "P": (n, (3, "H")),
    }
    return rules.match_dims(patterns, shapes, {"H": layer.hidden})


def output_shapes(layer: Layer, steps: Dim, batch: Dim, hidden: Dim) -> list[Shape]:
    n = len(layer.reverse)
    states = 2 if layer.cell == "LSTM" else 1
    if layer.batch_first:
        return [(batch, steps, n, hidden), *[(batch, n, hidden)] * states]
    return [(steps, n, batch, hidden), *[(n, batch, hidden)] * states]


def _infer_recurrent(cell: str) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        layer = parse_layer(cell, attrs)
        sizes = sizes_of(layer, [rules.tensor(types, i).shape for i in range(len(types))])
        shapes = output_shapes(layer, *(sizes.get(name) for name in "TBH"))
        return [TensorType(rules.tensor(types, 0).dtype, shape) for shape in shapes]

    return infer


class CellWeights(NamedTuple):
    """The weights of one direction. ``w`` and ``r`` are arrays, or objects with a method
    ``gatewise(out, batch)`` equivalent to the function ``gatewise``. ``around``, if not None, takes
    the step and its gates, and returns the step to run instead."""

    w: Any  # [input, gates * hidden]
    r: Any  # [hidden, gates * hidden]
    bias: np.ndarray | None  # [gates * hidden], sum of the biases of W and R
    r_bias: np.ndarray | None  # [hidden]: bias that the reset gate scales, with linear_before_reset
    peepholes: np.ndarray | None  # [3 * hidden]
    around: Callable[[Step, np.ndarray], Step] | None = None


def cell_weights(layer: Layer, inputs: RunValues, single: bool) -> list[CellWeights]:
    """The weights of each direction; ``single`` if the batch is 1."""
    ws, rs, bs, ps = (repeat(None) if inputs[i] is None else inputs[i] for i in (1, 2, 3, 7))
    directions = []
    for w, r, b, p in zip(ws, rs, bs, ps, strict=False):
        n, hidden = r.shape
        bias = r_bias = None
        if b is not None:
            # A copy, as the operations below must not modify the model's array.
            bias = b[:n].copy()
            # Only the recurrent bias of the new gate is scaled by the reset gate; the other biases
            # are summed.
            if layer.linear_before_reset and layer.cell == "GRU":
                bias[: n - hidden] += b[n : 2 * n - hidden]
                r_bias = b[2 * n - hidden :]
            else:
                bias += b[n:]
        if layer.halved:
            # sigmoid(x) = (1 + tanh(x / 2)) / 2: with halved weights, one tanh computes all gates.
            scale = np.ones((n, 1), r.dtype)
            scale[: layer.halved * hidden] = 0.5
            w, r = w * scale, r * scale
            if bias is not None:
                bias *= scale[:, 0]
        w, r = w.T, r.T
        if single:
            w, r = np.ascontiguousarray(w), np.ascontiguousarray(r)
        directions.append(CellWeights(w, r, bias, r_bias, p))
    return directions


def gatewise(matrix: Any, out: np.ndarray, batch: int) -> tuple[Any, ...]:
    """Return function, matrix and output view that multiply rows by ``matrix`` into ``out``.

    ``out`` is [gates, rows, hidden], so that each gate is contiguous. For a batch of 1, its memory
    is also [rows, gates * hidden], which a single product writes.
    """
    if not isinstance(matrix, np.ndarray):
        own: tuple[Any, ...] = matrix.gatewise(out, batch)
        return own
    gates, rows, hidden = out.shape
    split = product_in_parts if is_long(2 * out.size * len(matrix), out.dtype) else None
    if batch == 1:
        return split or np.dot, matrix, out.reshape(rows, gates * hidden)
    return split or np.matmul, matrix.reshape(len(matrix), gates, hidden).transpose(1, 0, 2), out


# Cells: steps use gates of shape [gates, batch, hidden]


class _State(NamedTuple):
    """The cell state of an LSTM: read from ``now``, written to ``next``, often the same array."""

    now: np.ndarray
    next: np.ndarray


def _rnn(layer: Layer, d: int, weights: CellWeights, gates: np.ndarray, state: _State) -> Step:
    (f,) = layer.activations[d]
    clip = layer.clip
    (gate,) = gates
    multiply, r, product = gatewise(weights.r, gates, gates.shape[1])

    def step(x: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
        multiply(h, r, product)
        np.add(gates, x, gates)
        if clip is not None:
            np.clip(gate, -clip, clip, gate)
        f(gate, out)

    return step


def _half_sigmoid(dtype: np.dtype) -> Activation:
    """Sigmoid of twice the argument."""
    half = _HALF[dtype]

    def function(x: np.ndarray, out: np.ndarray) -> None:
        np.tanh(x, out)
        np.multiply(out, half, out)
        np.add(out, half, out)

    return function


def _gru(layer: Layer, d: int, weights: CellWeights, gates: np.ndarray, state: _State) -> Step:
    hidden = gates.shape[2]
    f, g = layer.activations[d]
    if layer.plain:
        f = _half_sigmoid(gates.dtype)
    clip, linear, r_bias = layer.clip, layer.linear_before_reset, weights.r_bias
    zr, new = gates[:2], gates[2]
    z, reset = zr
    # One product for all gates with linear_before_reset, else two.
    columns = (3 if linear else 2) * hidden
    first = gates if linear else zr
    multiply, r, product = gatewise(weights.r[:, :columns], first, gates.shape[1])
    r_new = weights.r[:, 2 * hidden :]

    def step(x: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
        multiply(h, r, product)
        np.add(zr, x[:2], zr)
        if clip is not None:
            np.clip(zr, -clip, clip, zr)
        f(zr, zr)
        if linear:
            if r_bias is not None:
                np.add(new, r_bias, new)
            np.multiply(new, reset, new)
        else:
            np.multiply(reset, h, reset)
            np.dot(reset, r_new, new)
        np.add(new, x[2], new)
        if clip is not None:
            np.clip(new, -clip, clip, new)
        g(new, new)
        # (1 - z) * new + z * h, as new + z * (h - new)
        np.subtract(h, new, out)
        np.multiply(out, z, out)
        np.add(out, new, out)

    return step


def _lstm(layer: Layer, d: int, weights: CellWeights, gates: np.ndarray, state: _State) -> Step:
    multiply, r, product = gatewise(weights.r, gates, gates.shape[1])
    i, o, f, new = gates
    sigmoids = gates[:3]
    c, c_next = state
    half = _HALF[gates.dtype]

    def plain(x: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
        multiply(h, r, product)
        np.add(gates, x, gates)
        np.tanh(gates, gates)
        np.multiply(sigmoids, half, sigmoids)
        np.add(sigmoids, half, sigmoids)
        np.multiply(f, c, c_next)
        np.multiply(i, new, new)
        np.add(c_next, new, c_next)
        np.tanh(c_next, new)
        np.multiply(o, new, out)

    if layer.plain:
        return plain

    clip, input_forget = layer.clip, layer.input_forget
    act_f, act_g, act_h = layer.activations[d]
    p = weights.peepholes
    # The peepholes are in the order i, o, f.
    p_i, p_o, p_f = (None,) * 3 if p is None else np.split(p, 3)

    def gate(x: np.ndarray, peephole: np.ndarray | None, cell: np.ndarray, act: Activation) -> None:
        if peephole is not None:
            np.add(x, peephole * cell, x)
        if clip is not None:
            np.clip(x, -clip, clip, x)
        act(x, x)

    def general(x: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
        multiply(h, r, product)
        np.add(gates, x, gates)
        gate(i, p_i, c, act_f)
        if input_forget:
            np.subtract(1, i, f)
        else:
            gate(f, p_f, c, act_f)
        gate(new, None, c, act_g)
        np.multiply(f, c, c_next)
        np.multiply(i, new, new)
        np.add(c_next, new, c_next)
        # The output gate's peephole reads the new cell state, the others read the previous one.
        gate(o, p_o, c_next, act_f)
        act_h(c_next, new)
        np.multiply(o, new, out)

    return general


_STEPS = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}


# Running


_Entries: TypeAlias = Iterable[tuple[np.ndarray, Any, Any]]
"""for each step: the product of its input, its output (or None), and a mask of the samples that
have not ended (or None)"""


def _buffered(
    step: Step, h: np.ndarray, spare: np.ndarray, state: _State, entries: _Entries
) -> np.ndarray:
    """Run all steps, alternating ``H`` between ``h`` and ``spare``; sequences that have ended keep
    their state."""
    for x, y, live in entries:
        checkpoint()
        step(x, h, spare)
        if live is None:
            h, spare = spare, h
            if y is not None:
                np.copyto(y, h)
            continue
        np.copyto(h, spare, where=live)
        np.copyto(state.now, state.next, where=live)
        if y is not None:
            # Outputs after the end of a sequence are 0.
            y[...] = 0
            np.copyto(y, spare, where=live)
    return h


Weights = TypeVar("Weights")
Weigh: TypeAlias = Callable[[RunValues, bool], Sequence[CellWeights]]
"""``weigh(inputs, single)`` returns the weights of each direction; ``single``: the batch is 1"""


def layer_routine(
    layer: Layer, inputs: Tensors, outputs: Tensors, weigh: Weigh, prepared: tuple[int, ...]
) -> Routine:
    """The routine of a recurrent layer; ``weigh`` does not read the inputs in ``prepared``."""
    run = _LayerRun(layer, inputs, outputs, weigh)
    return Routine(run, run.layout.size, prepared)


class _LayerRun:
    """A recurrent layer for inputs of known shapes, with its scratch memory."""

    def __init__(self, layer: Layer, inputs: Tensors, outputs: Tensors, weigh: Weigh) -> None:
        x, w = rules.tensor(inputs, 0), rules.tensor(inputs, 1)
        dtype, (first, second, width) = x.dtype, x.dims
        gates, hidden = layer.gates, w.dims[1] // layer.gates
        batch = first if layer.batch_first else second
        self.layer, self.weigh = layer, weigh
        self.batch, self.bias_shape = batch, (gates, 1, hidden)
        self.lstm, self.rows, self.width = layer.cell == "LSTM", first * second, width
        self.ends = rules.given(inputs, 4)
        self.direct = outputs[0] is not None and not self.ends
        self.time_first: tuple[int, ...] = (gates, first, second, hidden)
        self.order: tuple[int, ...] = (2, 0, 1, 3) if layer.batch_first else (1, 0, 2, 3)
        if batch == 1:
            self.time_first, self.order = (self.rows, gates, 1, hidden), (0, 1, 2, 3)
        self.layout = layout = Scratch()
        state = (batch, hidden)
        self.product = layout.field((gates, self.rows, hidden), dtype)
        self.gates = layout.field((gates, batch, hidden), dtype)
        self.h, self.spare = layout.field(state, dtype), layout.field(state, dtype)
        self.c = layout.field(state, dtype)
        # Ended sequences are masked in H, and in the cell state if there is one.
        self.c_next = layout.field(state if self.lstm else (batch, 0), dtype)

    def __call__(self, *arguments: RunValue) -> None:
        batch, (*values, y, y_h, y_c, workspace) = self.batch, arguments
        x, _, _, _, lengths, h0, c0, _ = values[:8]
        product = self.product(workspace)
        # Views with the time axis first.
        xs = product.reshape(self.time_first).transpose(self.order)
        if self.layer.batch_first:
            y = None if y is None else y.transpose(1, 2, 0, 3)
            h0, c0, y_h, y_c = (None if s is None else s.swapaxes(0, 1) for s in (h0, c0, y_h, y_c))
        live, steps = None, len(xs)
        if self.ends:
            if lengths.size and (lengths.min() < 0 or lengths.max() > steps):
                raise ShapeError(f"sequence_lens must be between 0 and {steps}, the steps in X")
            # A mask of the sequences that have not ended at each step: [steps, batch, 1].
            live = np.arange(steps)[:, None, None] < lengths[:, None]
        x = x.reshape(self.rows, self.width)
        for d, weights in enumerate(self.weigh(values, batch == 1)):
            multiply, w, target = gatewise(weights.w, product, batch)
            multiply(x, w, target)
            if weights.bias is not None:
                bias = weights.bias if batch == 1 else weights.bias.reshape(self.bias_shape)
                np.add(target, bias, target)
            c = c_next = self.c_next(workspace)
            if self.lstm:
                c = self.c(workspace) if y_c is None else y_c[d]
                np.copyto(c, 0 if c0 is None else c0[d])
            # Ended sequences keep their cell state, so that it needs a second buffer.
            cell = _State(c, c_next if self.ends else c)
            gates = self.gates(workspace)
            step = _STEPS[self.layer.cell](self.layer, d, weights, gates, cell)
            step = step if weights.around is None else weights.around(step, gates)
            every = slice(None, None, -1 if self.layer.reverse[d] else 1)
            ys = repeat(None) if y is None else y[every, d]
            lives = repeat(None) if live is None else live[every]
            entries = zip(xs[every], ys, lives, strict=False)
            h = self.direction(step, cell, entries, None if h0 is None else h0[d], workspace)
            if y_h is not None:
                np.copyto(y_h[d], h)

    def direction(
        self,
        step: Step,
        state: _State,
        entries: _Entries,
        h0: np.ndarray | None,
        workspace: np.ndarray,
    ) -> np.ndarray:
        """Run all steps of a direction from ``h0`` on; return the last hidden state."""
        # Steps do not modify the previous state: the first may be the caller's array.
        if self.direct and h0 is not None:
            h = h0
        else:
            h = self.h(workspace)
            np.copyto(h, 0 if h0 is None else h0)
        if not self.direct:
            return _buffered(step, h, self.spare(workspace), state, entries)
        for x, y, _ in entries:
            checkpoint()
            step(x, h, y)
            h = y
        return h


def prepared_weights(
    node: Node,
    weights: Sequence[int],
    name: Hashable,
    make: Callable[[RunValues, bool], list[Weights]],
) -> tuple[Callable[[RunValues, bool], list[Weights]], tuple[int, ...]]:
    """Return a function of inputs that returns the weights of each direction, as ``make`` does, and
    the inputs that it does not read: the given ones of ``weights``, if all of them are constant.
    ``make`` then runs once for all nodes of the same ``name`` and constants."""
    given = tuple([i for i in weights if rules.given(node.inputs, i)])
    if not rules.all_constant(node, given):
        return make, ()
    consts = rules.constants(node, max(weights) + 1)

    @cache
    def prepared(single: bool) -> Shared[list[Weights]]:
        sources = [consts[i] for i in given]
        return shared((name, single), lambda: make(consts, single), *sources)

    return lambda inputs, single: prepared(single).value, given


def _compile(node: Node, types: Types) -> Kernel:
    layer = parse_layer(node.op.name, node.attrs, peepholes=rules.given(node.inputs, 7))

    def weights(inputs: RunValues, single: bool) -> list[CellWeights]:
        # Constants may have 16 bits; other inputs are widened by now.
        wide = [x.astype(FLOAT32) if x is not None and is_half(x.dtype) else x for x in inputs[:8]]
        return cell_weights(layer, wide, single)

    name = layer.cell, layer.halved, layer.linear_before_reset
    weigh, fixed = prepared_weights(node, (1, 2, 3, 7), name, weights)

    def make(inputs: Tensors, outputs: Tensors, _: Consts) -> Routine:
        return layer_routine(layer, inputs, outputs, weigh, fixed)

    return specialized(node, types, make, arity=(8, 3))


for _name in CELLS:
    operator(_name, infer=_infer_recurrent(_name), work=recurrent_work)(_compile)
