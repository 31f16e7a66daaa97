"""Unrolling of AttnLSTM with constant weights into operations with compiled kernels::

    gates = X W + b + h R + mean S              the products of X are one for all steps
    h, c = LstmCell(gates, c)
    scores = Tanh(keys + h Q) v + behind        keys = memory K
    mean = Softmax(scores) memory               what the gates of the next step read

An attention layer reads [h, mean]: its weights for h are added to R, and those for the mean are S.
The first step has no mean and uses R alone. Nodes with other activations, peepholes or
sequence_lens run on the NumPy kernel, as do those with more than 64 steps, which would compile
slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import AttrDict, Op
from penstock.ops.internal.attention import POSITIONS_BEHIND
from penstock.ops.internal.cells import LSTM_CELL
from penstock.ops.onnx.recurrent import Layer, parse_layer
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Expansion, dims_and_dtype, replace_nodes

_MOST_STEPS = 64  # of all directions
_ORDER = (0, 2, 1, 3)  # gate order in W: LstmCell's gates by ONNX's order
# Inputs.
_X, _W, _R, _B, _ROWS, _H, _C, _P, _QUERY, _KEY, _V, _MEMORY, _LENGTHS, _LAYER = range(14)


class DecomposeAttentionLstm(Pass):
    """Replace nodes of static shapes whose weights are constants."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, {"com.microsoft.AttnLSTM": _nodes})


def _nodes(node: Node) -> Sequence[Node] | None:
    layer, inputs = parse_layer("LSTM", node.attrs), [*node.inputs, *[None] * 14][:14]
    weights = [inputs[i] for i in (_W, _R, _QUERY, _KEY, _V)]
    given = [v for v in (*weights, inputs[_B], inputs[_LAYER]) if v is not None]
    if not layer.plain or layer.batch_first or inputs[_ROWS] or inputs[_P]:
        return None
    if None in weights or any(v.const is None for v in given):
        return None
    tensors = [inputs[i] for i in (_X, _MEMORY, _LENGTHS, _H, _C)]
    types = [value.type for value in tensors if value is not None]
    if not all(isinstance(type_, TensorType) and type_.static for type_ in types):
        return None
    x = inputs[_X]
    if x is None or inputs[_MEMORY] is None:
        return None
    steps, batch, _ = dims_and_dtype(x)[0]
    if not 0 < steps * len(layer.reverse) <= _MOST_STEPS or not batch:
        return None
    parts = _Steps(node, inputs, layer)
    parts.write()
    return parts.nodes


class _Steps(Expansion):
    """Builder of the unrolled steps of all directions."""

    def __init__(self, node: Node, inputs: Sequence[Value | None], layer: Layer) -> None:
        super().__init__(node)
        self.inputs, self.layer = inputs, layer

    def constant_of(self, index: int, direction: int) -> np.ndarray:
        value = self.inputs[index]
        assert value is not None and value.const is not None
        part: np.ndarray = value.const[direction]
        return part

    def write(self) -> None:
        x, memory, lengths = (self.inputs[i] for i in (_X, _MEMORY, _LENGTHS))
        assert x is not None and memory is not None
        (steps, batch, width), (_, positions, _) = dims_and_dtype(x)[0], dims_and_dtype(memory)[0]
        behind = None
        if lengths is not None:
            behind = self.value("behind", (batch, 1, positions), FLOAT32)
            attrs = {"positions": positions}
            self._node(POSITIONS_BEHIND, [lengths], [behind], attrs)
        rows = self.reshaped(x, [steps * batch, width])
        sides = [
            self._direction(d, reverse, rows, memory, behind, (steps, batch))
            for d, reverse in enumerate(self.layer.reverse)
        ]
        states, cells = zip(*sides, strict=True)
        hidden = dims_and_dtype(cells[0])[0][1]
        every, *last = [*self.node.outputs, None, None][:3]
        if every is not None:
            order = [side[t] for t in range(steps) for side in states]
            order = [self.reshaped(state, [1, batch, hidden]) for state in order]
            joined = self.emit("Concat", order, [len(order), batch, hidden], FLOAT32, axis=0)
            shape = self.constant(np.array([steps, len(sides), batch, hidden], np.int64))
            self.finish("Reshape", [joined, shape], every, allowzero=1)
        pairs = zip(states, self.layer.reverse, strict=True)
        ends = [side[0 if reverse else -1] for side, reverse in pairs]
        for result, values in zip(last, (ends, cells), strict=True):
            if result is not None:
                wide = [self.reshaped(value, [1, batch, hidden]) for value in values]
                self.finish("Concat", wide, result, axis=0)

    def _direction(
        self,
        d: int,
        reverse: bool,
        rows: Value,
        memory: Value,
        behind: Value | None,
        sizes: tuple[int, int],
    ) -> tuple[list[Value], Value]:
        """Return the hidden states of a direction, by step, and its last cell state."""
        steps, batch = sizes
        width, r = dims_and_dtype(rows)[0][1], self.constant_of(_R, d)
        gates, hidden = r.shape
        own, seen = np.split(self.constant_of(_W, d).T, [width])
        first = r.T  # the first step has no mean
        later, bias = first, np.zeros(gates, np.float32)
        if self.inputs[_B] is not None:
            bias = self.constant_of(_B, d).reshape(2, -1).sum(0)
        if self.inputs[_LAYER] is not None:
            mixed, seen = np.split(self.constant_of(_LAYER, d) @ seen, [hidden])
            later = first + mixed
        of_x = self._gemm(rows, own, self.constant(bias))
        slices = [of_x]
        if steps > 1:
            slices = [self.value("gates", (batch, gates), FLOAT32) for _ in range(steps)]
            attrs: AttrDict = {"axis": 0, "num_outputs": steps}
            self._node(standard("Split"), [of_x], slices, attrs)
        at_first, behind_first, of_mean = map(self._constant, (first, later, seen))
        attend = self._attention(d, memory, behind)
        state, cell = (self._given(i, d, batch, hidden) for i in (_H, _C))
        mean: Value | None = None
        if cell is None:
            cell = self.constant(np.zeros((batch, hidden), np.float32))
        states: list[Value] = slices[:]
        for t in range(steps - 1, -1, -1) if reverse else range(steps):
            total = slices[t]
            if state is not None:
                total = self._gemm(state, at_first if mean is None else behind_first, total)
            if mean is not None:
                total = self._gemm(mean, of_mean, total)
            state, following = (self.value("cell", (batch, hidden), FLOAT32) for _ in range(2))
            self._node(LSTM_CELL, [total, cell], [state, following], {"order": _ORDER})
            states[t], cell = state, following
            if t != (0 if reverse else steps - 1):
                mean = attend(state)
        return states, cell

    def _attention(self, d: int, memory: Value, behind: Value | None) -> Callable[[Value], Value]:
        """Return a function from a direction's state to its attention mean [batch, depth]."""
        batch, positions, depth = dims_and_dtype(memory)[0]
        key, v = self.constant_of(_KEY, d), self._constant(self.constant_of(_V, d)[:, None])
        query, inner = self._constant(self.constant_of(_QUERY, d)), key.shape[1]
        keys = self._product(memory, self._constant(key), batch, positions, inner)

        def attend(state: Value) -> Value:
            asked = self.reshaped(self._product(state, query, batch, inner), [batch, 1, inner])
            near = self.emit("Add", [keys, asked], [batch, positions, inner], FLOAT32)
            near = self.emit("Tanh", [near], [batch, positions, inner], FLOAT32)
            scores = self._product(near, v, batch, positions, 1)
            scores = self.reshaped(scores, [batch, 1, positions])
            if behind is not None:
                scores = self.emit("Add", [scores, behind], [batch, 1, positions], FLOAT32)
            shares = self.emit("Softmax", [scores], [batch, 1, positions], FLOAT32, axis=-1)
            return self.reshaped(self._product(shares, memory, batch, 1, depth), [batch, depth])

        return attend

    def _product(self, a: Value, b: Value, *dims: int) -> Value:
        return self.emit("MatMul", [a, b], dims, FLOAT32)

    def _constant(self, matrix: np.ndarray) -> Value:
        return self.constant(np.ascontiguousarray(matrix))

    def _given(self, index: int, d: int, batch: int, hidden: int) -> Value | None:
        """Return the part of a direction of the initial hidden or cell state."""
        value = self.inputs[index]
        if value is None:
            return None
        place = self.constant(np.array(d, np.int64))
        return self.emit("Gather", [value, place], [batch, hidden], FLOAT32, axis=0)

    def _gemm(self, x: Value, w: Value | np.ndarray, total: Value) -> Value:
        matrix = w if isinstance(w, Value) else self._constant(w)
        assert matrix.const is not None
        dims = [dims_and_dtype(x)[0][0], matrix.const.shape[1]]
        return self.emit("Gemm", [x, matrix, total], dims, FLOAT32)

    def _node(
        self, op: Op, inputs: Sequence[Value], outputs: Sequence[Value], attrs: AttrDict
    ) -> None:
        """Add a node of a non-standard operation, or with several outputs."""
        self.nodes.append(self.node.derived(inputs, outputs, attrs, op=op, name=outputs[0].name))
