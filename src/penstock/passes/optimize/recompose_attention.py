"""Attention of few queries over keys whose number only the run knows, as one node.

::

    t = Transpose(Expand(keys))                becomes     y = Attention(q, keys, values, bias)
    s = MatMul(q, t) * scale + bias
    y = MatMul(Softmax(s), Expand(values))

A step of a decoder spells this out over its cache of keys and values. In steps of their own the
cache would be copied for each group of heads that shares it, and the scores would be written and
read several times. The bias may be a sum of masks, or a Where that puts a number of at most -1e30,
or minus infinity, in the place of a score: what is added to that vanishes in float32. Of other
forms, of more than a few queries, and where the number of keys is known, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import prune

_MOST_QUERIES = 32
_MOST_TERMS = 8
_LOWEST = -1e30
"""numbers from which on downwards float32 has no digits for scores"""

_Term: TypeAlias = "tuple[Value, Value | None, bool]"
"""a bias, or the condition, the number and whether that is for what holds, of a Where"""


@dataclass(frozen=True)
class _Scores:
    """The product of queries and keys, times ``scale``, and what is done to it then."""

    product: Node
    scale: float = 1.0
    terms: tuple[_Term, ...] = ()


class RecomposeAttention(Pass):
    """Replace the second product of such an attention by an Attention."""

    name = "recompose_attention"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        readers: Readers = {}
        changed = False
        for inner in list(graph.graphs()):
            nodes: list[Node] = []
            for node in with_checkpoints(inner.nodes):
                if node.op.full_name == "MatMul" and _softmax(node) is not None:
                    readers = readers or readers_of(graph)
                    replacement = _attend(node, readers)
                    changed |= replacement is not None
                    nodes += replacement or (node,)
                else:
                    nodes.append(node)
            inner.nodes = nodes
        if changed:
            prune(graph)
        return changed


def _attend(node: Node, readers: Readers) -> Sequence[Node] | None:
    """An Attention in the place of the product ``node``, behind the nodes that add up its bias."""
    softmax, (y,) = _softmax(node), node.outputs
    weights, scores = (None, None) if softmax is None else (softmax.outputs[0], softmax.inputs[0])
    if weights is None or scores is None or y is None or node.control_inputs:
        return None
    chain = _chain(scores, readers)
    guarded = node.inputs[0] is not weights
    if chain is None or readers.get(weights) != [node.inputs[0].producer if guarded else node]:  # type: ignore[union-attr]
        return None
    if guarded and readers.get(node.inputs[0]) != [node]:  # type: ignore[arg-type]
        return None
    q, transposed = chain.product.inputs
    keys, scale = _transposed(transposed)
    k, v = _repeated(keys), _repeated(node.inputs[1])
    if q is None or k is None or v is None or not _fit(q, k, v, scores, chain):
        return None
    nodes: list[Node] = []
    bias = _bias(chain.terms, node, nodes)
    attrs = {"scale": scale * chain.scale, "guarded": int(guarded)}
    nodes.append(node.derived([q, k, v, bias], [y], attrs, op=ATTENTION))
    return nodes


def _dims(value: Value) -> tuple[int | None, ...]:
    """The dims of a float32 tensor of rank 4, None for unknown ones; nothing for another."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.dtype != FLOAT32 or type_.shape is None:
        return ()
    known = [dim if isinstance(dim, int) else None for dim in type_.shape]
    return tuple(known) if len(known) == 4 else ()


def _fit(q: Value, k: Value, v: Value, scores: Value, chain: _Scores) -> bool:
    """Whether all is as Attention takes it, and only the number of keys is unknown."""
    of_q, of_k, of_v = _dims(q), _dims(k), _dims(v)
    if not of_q or not of_k or not of_v or None in of_q:
        return False
    batch, heads, rows, size = of_q
    assert heads is not None and rows is not None
    groups = of_k[1]
    if not groups or heads % groups or not 0 < rows <= _MOST_QUERIES:
        return False
    if of_k != (batch, groups, None, size) or of_v[:3] != (batch, groups, None) or not of_v[3]:
        return False
    (product,) = chain.product.outputs
    shapes = [_dims(x)[:3] for x in (scores, product) if x is not None]
    if shapes != [(batch, heads, rows)] * 2:
        return False
    return all(_is_bias(operand) for operand, _, _ in chain.terms)


def _is_bias(operand: Value) -> bool:
    """Whether a bias or a condition has an element for each key."""
    shape = operand.shape
    return shape is not None and 0 < len(shape) <= 4 and shape[-1] != 1


# The parts.


def _producer(value: Value | None, *names: str) -> Node | None:
    """The producer of ``value``, if it is one of these operations."""
    node = None if value is None else value.producer
    fits = node is not None and node.op.full_name in names and not node.control_inputs
    return node if fits else None


def _softmax(node: Node) -> Node | None:
    """The Softmax along the last axis whose result, or that without NaN, a product reads."""
    value = node.inputs[0]
    guard = None if value is None else value.producer
    if guard is not None and guard.op is ZERO_NAN and not guard.control_inputs:
        value = guard.inputs[0]
    softmax = _producer(value, "Softmax")
    if softmax is None or softmax.op.since < SINGLE_AXIS:
        return None
    return softmax if softmax.attrs.get("axis", -1) in (-1, 3) else None


def _number(value: Value | None) -> float | None:
    const = None if value is None else value.const
    return float(const.reshape(())) if const is not None and const.size == 1 else None


def _chain(value: Value | None, readers: Readers, depth: int = 0) -> _Scores | None:
    """What ``value`` is computed by, back to the product; nothing else may read what is between."""
    if value is None or depth > _MOST_TERMS or len(readers.get(value, ())) != 1:
        return None
    node = _producer(value, "MatMul", "Mul", "Div", "Add", "Where")
    if node is None:
        return None
    if node.op.name == "MatMul":
        return _Scores(node)
    if node.op.name == "Where":
        return _where(node, readers, depth)
    a, b = node.inputs
    for x, other in ((a, b), (b, a)) if node.op.name != "Div" else ((a, b),):
        number = _number(other)
        if node.op.name != "Add" and number is None:
            continue
        chain = _chain(x, readers, depth + 1)
        if chain is None or other is None:
            continue
        if node.op.name == "Add":
            return replace(chain, terms=(*chain.terms, (other, None, False)))
        if chain.terms or not number:  # of a sum, the bias would have to be scaled too
            return None
        factor = number if node.op.name == "Mul" else 1 / number
        return replace(chain, scale=chain.scale * factor)
    return None


def _where(node: Node, readers: Readers, depth: int) -> _Scores | None:
    condition, yes, no = node.inputs
    for x, other, holds in ((no, yes, True), (yes, no, False)):
        number = _number(other)
        if condition is None or number is None or not number <= _LOWEST:
            continue
        chain = _chain(x, readers, depth + 1)
        return chain and replace(chain, terms=(*chain.terms, (condition, other, holds)))
    return None


def _transposed(value: Value | None) -> tuple[Value | None, float]:
    """Keys whose transposition ``value`` is, but for a factor, and the factor; else None."""
    factor, keys = 1.0, None
    for _ in range(3):
        node = _producer(value, "Mul", "Div", "Transpose")
        if node is None:
            break
        if node.op.name == "Transpose":
            if keys is not None or list(node.attrs.get("perm", ())) != [0, 1, 3, 2]:
                return None, 1.0
            value = keys = node.inputs[0]
            continue
        a, b = node.inputs
        number = _number(b)
        if number is None and node.op.name == "Mul":
            a, number = b, _number(a)
        if not number:
            break
        factor *= number if node.op.name == "Mul" else 1 / number
        value = a
        keys = a if keys is not None else None
    return keys, factor


def _repeated(value: Value | None) -> Value | None:
    """What a Reshape of an Expand repeats for each of the heads of a group; else ``value``."""
    reshape = _producer(value, "Reshape")
    expand = None if reshape is None else _producer(reshape.inputs[0], "Expand")
    unsqueeze = None if expand is None else _producer(expand.inputs[0], "Unsqueeze", "Reshape")
    if value is None or unsqueeze is None or expand is None:
        return value
    x, one, many = unsqueeze.inputs[0], unsqueeze.outputs[0], expand.outputs[0]
    if x is None or one is None or many is None or not _dims(x):
        return value
    batch, groups, keys, size = _dims(x)
    before, wide, after = one.shape or (), many.shape or (), _dims(value)
    if len(before) != 5 or len(wide) != 5 or not after:
        return value
    if (*before[:3], before[4]) != (batch, groups, 1, size) or keys is not None:
        return value
    times = wide[2]
    if not isinstance(times, int) or not isinstance(groups, int):
        return value
    fits = wide[:2] == (batch, groups) and wide[4] == size
    return x if fits and after[:2] == (batch, groups * times) and after[3] == size else value


# The bias.


def _bias(terms: Sequence[_Term], beside: Node, nodes: list[Node]) -> Value | None:
    """The sum of all terms, by further ``nodes``; None if there are none."""
    total: Value | None = None
    for operand, number, holds in terms:
        term = _of_rank_4(operand, beside, nodes)
        if number is not None:
            other = Value("zero", const=np.zeros((), FLOAT32)) if total is None else total
            low = Value("lowest", const=np.array(_number(number), FLOAT32))
            choices = (low, other) if holds else (other, low)
            total = _computed("Where", [term, *choices], beside, nodes)
        else:
            total = term if total is None else _computed("Add", [total, term], beside, nodes)
    return total


def _of_rank_4(value: Value, beside: Node, nodes: list[Node]) -> Value:
    missing = 4 - len(value.shape or ())
    if not missing:
        return value
    axes = Value("axes", const=np.arange(missing))
    return _computed("Unsqueeze", [value, axes], beside, nodes)


def _computed(name: str, inputs: Sequence[Value], beside: Node, nodes: list[Node]) -> Value:
    op = standard(name)
    (type_,) = op.infer([v.type for v in inputs], {}, [v.const for v in inputs])
    (y,) = beside.outputs
    assert y is not None
    output = Value(f"{y.name}/bias{len(nodes)}", type_)
    nodes.append(beside.derived(inputs, [output], {}, op=op, name=f"{beside.name}/bias"))
    return output
