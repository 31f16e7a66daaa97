"""AttnLSTM of com.microsoft: an LSTM that attends to a memory.

After each step, the state is the query, and the positions of the memory are averaged with weights
``softmax(v . tanh(keys + query))``: Bahdanau et al., "Neural Machine Translation by Jointly
Learning to Align and Translate", 2015. The gates of the next step read this context (with an
attention layer, its product with [state, context]) in addition to X. The first step has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, Dim, RunValues, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.products import recurrent_work
from penstock.ops.common.specialize import Routine, Tensors, specialized
from penstock.ops.onnx import recurrent
from penstock.ops.onnx.recurrent import CellWeights, Layer, Step
from penstock.ops.registry import MICROSOFT, operator

# Inputs after those of an LSTM. The last columns of W multiply the attention context.
_QUERY, _KEY, _V, _MEMORY, _LENGTHS, _LAYER = range(8, 14)
_WEIGHTS = (1, 2, 3, 7, _QUERY, _KEY, _V, _LAYER)


def _sizes(layer: Layer, shapes: Sequence[Shape | None]) -> dict[str, Dim]:
    """Check the shapes of all inputs for consistency, and return the sizes."""
    first, others = list(shapes[:8]), [*shapes[8:], *[None] * 14]
    width, first[1] = first[1], None
    n, mixed = len(layer.reverse), others[_LAYER - 8]
    if mixed is not None and len(mixed) != 3:
        raise ShapeError(f"the attention layer's weights must have rank 3, not shape {mixed}")
    patterns: dict[str, tuple[Any, ...]] = {
        "the weights of the query": (n, "H", "D"),
        "the weights of the memory": (n, "M", "D"),
        "v": (n, "D"),
        "the memory": ("B", "P", "M"),
        "the lengths of the memory": ("B",),
    }
    sizes = rules.match_dims(patterns, others, recurrent.sizes_of(layer, first))
    hidden, depth, own = sizes.get("H"), sizes.get("M"), sizes.get("I")
    attended = depth if mixed is None else mixed[2]
    known = isinstance(hidden, int) and isinstance(depth, int)
    if mixed is not None and known:
        wanted = (n, hidden + depth, mixed[2])  # type: ignore[operator]
        rules.check_shape("the weights of the attention layer", mixed, wanted)
    if isinstance(hidden, int) and isinstance(own, int) and isinstance(attended, int):
        rules.check_shape("W", width, (n, 4 * hidden, own + attended))
    return sizes


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    layer = recurrent.parse_layer("LSTM", attrs)
    sizes = _sizes(layer, [rules.tensor(types, i).shape for i in range(len(types))])
    shapes = recurrent.output_shapes(layer, *(sizes.get(name) for name in "TBH"))
    return [TensorType(FLOAT32, shape) for shape in shapes]


class _Direction(NamedTuple):
    """The weights of a direction: of the LSTM, of query and keys, v, and of the gates for the
    context. With an attention layer, the recurrent weights include the part ``mixed``, by which
    gates read the state through that layer; it does not apply to the first step.
    """

    cell: CellWeights
    query: np.ndarray  # [hidden, inner]
    key: np.ndarray  # [depth, inner]
    v: np.ndarray  # [inner]
    seen: np.ndarray  # [depth, 4 * hidden]
    mixed: np.ndarray | None  # [hidden, 4 * hidden]


class _Attention(NamedTuple):
    """The attention to the memory in one call, which wraps the steps of a direction."""

    weights: _Direction
    memory: np.ndarray  # [batch, positions, depth]
    keys: np.ndarray  # [batch, positions, inner]
    behind: np.ndarray | None  # [batch, positions]: true for padding
    idle: np.ndarray  # [batch]: for the reverse direction, the steps before a sequence begins

    def around(self, step: Step, gates: np.ndarray) -> Step:
        """Wrap ``step`` so that the attention context is added to ``gates`` before it."""
        weights, memory, keys, behind, idle = self
        batch, most = gates.shape[1], idle.max()
        mean, given = np.zeros((batch, len(weights.seen)), FLOAT32), np.empty_like(gates)
        mixed, inner, steps = np.empty_like(gates), np.empty_like(keys), count()
        multiply, matrix, target = recurrent.gatewise(weights.seen, given, batch)

        def begin(h: np.ndarray, begins: np.ndarray) -> None:
            mean[begins] = 0
            multiply(mean, matrix, target)
            if weights.mixed is not None:
                product, own, into = recurrent.gatewise(weights.mixed, mixed, batch)
                product(h, own, into)
                given[:, begins] -= mixed[:, begins]

        def attending(x: np.ndarray, h: np.ndarray, out: np.ndarray) -> None:
            s = next(steps)
            if s <= most:
                begin(h, s <= idle)
            else:
                multiply(mean, matrix, target)
            np.add(given, x, given)
            step(given, h, out)
            np.add(keys, np.dot(out, weights.query)[:, None], inner)
            np.tanh(inner, inner)
            scores = np.dot(inner, weights.v)
            if behind is not None:
                scores[behind] = -np.inf
            np.subtract(scores, scores.max(1, keepdims=True), scores)
            np.exp(scores, scores)
            np.divide(scores, scores.sum(1, keepdims=True), scores)
            np.matmul(scores[:, None], memory, mean[:, None])

        return attending


def _weights(layer: Layer, inputs: RunValues, single: bool) -> list[_Direction]:
    """The weights of each direction."""
    depth = inputs[_KEY].shape[1]
    attended = depth if inputs[_LAYER] is None else inputs[_LAYER].shape[2]
    directions = []
    for d, cell in enumerate(recurrent.cell_weights(layer, inputs, single)):
        own, seen = np.split(cell.w, [len(cell.w) - attended])
        cell, mixed = cell._replace(w=own), None
        if inputs[_LAYER] is not None:
            mixed, seen = np.split(np.dot(inputs[_LAYER][d], seen), [len(cell.r)])
            cell = cell._replace(r=cell.r + mixed)
        query, key, v = (np.ascontiguousarray(inputs[i][d]) for i in (_QUERY, _KEY, _V))
        directions.append(_Direction(cell, query, key, v, seen, mixed))
    return directions


def _attended(weights: _Direction, inputs: RunValues, reverse: bool) -> CellWeights:
    """The weights of a direction for one call, bound to the memory in the inputs."""
    memory, lengths, behind = inputs[_MEMORY], inputs[_LENGTHS], None
    if lengths is not None:
        rules.check_lengths("the memory", lengths, memory.shape[1])
        behind = np.arange(memory.shape[1]) >= lengths[:, None]
    idle = np.zeros(len(memory), np.int32)
    if reverse and inputs[4] is not None:
        idle = len(inputs[0]) - inputs[4]
    attention = _Attention(weights, memory, np.matmul(memory, weights.key), behind, idle)
    return weights.cell._replace(around=attention.around)


@operator("AttnLSTM", domain=MICROSOFT, infer=_infer, work=recurrent_work)
def attention_lstm(node: Node, types: Types) -> Kernel:
    layer = recurrent.parse_layer("LSTM", node.attrs, peepholes=rules.given(node.inputs, 7))
    name = "AttnLSTM", layer.halved
    directions, fixed = recurrent.prepared_weights(node, _WEIGHTS, name, partial(_weights, layer))

    def weigh(inputs: RunValues, single: bool) -> list[CellWeights]:
        pairs = zip(directions(inputs, single), layer.reverse, strict=True)
        return [_attended(weights, inputs, reverse) for weights, reverse in pairs]

    def make(inputs: Tensors, outputs: Tensors, _: Consts) -> Routine:
        return recurrent.layer_routine(layer, inputs, outputs, weigh, fixed)

    return specialized(node, types, make, arity=(14, 3))
