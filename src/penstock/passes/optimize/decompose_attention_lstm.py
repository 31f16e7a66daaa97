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

from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.attention import POSITIONS_BEHIND
from penstock.ops.internal.cells import LSTM_CELL
from penstock.ops.onnx.recurrent import Layer, parse_layer
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Expansion, replace_nodes

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
    steps, batch, _ = x.dims
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
        (steps, batch, width), (_, positions, _) = x.dims, memory.dims
        behind = None
        if lengths is not None:
            behind = self.add(POSITIONS_BEHIND, [lengths], positions=positions)
        rows = self.reshaped(x, [steps * batch, width])
        sides = [
            self._direction(d, reverse, rows, memory, behind, (steps, batch))
            for d, reverse in enumerate(self.layer.reverse)
        ]
        states, cells = zip(*sides, strict=True)
        hidden = cells[0].dims[1]
        every, *last = [*self.node.outputs, None, None][:3]
        if every is not None:
            order = [side[t] for t in range(steps) for side in states]
            order = [self.reshaped(state, [1, batch, hidden]) for state in order]
            joined = self.add("Concat", order, axis=0)
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
        width, r = rows.dims[1], self.constant_of(_R, d)
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
            slices = self.several("Split", [of_x], steps, axis=0, num_outputs=steps)
        at_first, behind_first, of_mean = map(self._constant, (first, later, seen))
        attend = self._attention(d, memory, behind)
        state, cell = (self._given(i, d) for i in (_H, _C))
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
            state, cell = self.several(LSTM_CELL, [total, cell], 2, order=_ORDER)
            states[t] = state
            if t != (0 if reverse else steps - 1):
                mean = attend(state)
        return states, cell

    def _attention(self, d: int, memory: Value, behind: Value | None) -> Callable[[Value], Value]:
        """Return a function from a direction's state to its attention mean [batch, depth]."""
        batch, positions, depth = memory.dims
        key, v = self.constant_of(_KEY, d), self._constant(self.constant_of(_V, d)[:, None])
        query, inner = self._constant(self.constant_of(_QUERY, d)), key.shape[1]
        keys = self.add("MatMul", [memory, self._constant(key)])

        def attend(state: Value) -> Value:
            asked = self.reshaped(self.add("MatMul", [state, query]), [batch, 1, inner])
            near = self.add("Tanh", [self.add("Add", [keys, asked])])
            scores = self.reshaped(self.add("MatMul", [near, v]), [batch, 1, positions])
            if behind is not None:
                scores = self.add("Add", [scores, behind])
            shares = self.add("Softmax", [scores], axis=-1)
            return self.reshaped(self.add("MatMul", [shares, memory]), [batch, depth])

        return attend

    def _constant(self, matrix: np.ndarray) -> Value:
        return self.constant(np.ascontiguousarray(matrix))

    def _given(self, index: int, d: int) -> Value | None:
        """Return the part of a direction of the initial hidden or cell state."""
        value = self.inputs[index]
        if value is None:
            return None
        return self.add("Gather", [value, self.constant(np.array(d, np.int64))], axis=0)

    def _gemm(self, x: Value, w: Value | np.ndarray, total: Value) -> Value:
        return self.add("Gemm", [x, w if isinstance(w, Value) else self._constant(w), total])
