"""Fusion of the operations of scaled dot-product attention into one node.

::

    t = Transpose(Expand(keys))                becomes     y = Attention(q, keys, values, bias)
    s = MatMul(q, t) * scale + bias
    y = MatMul(Softmax(s), Expand(values))

As separate steps, the scores would be written and read several times, and keys that heads share
would be copied for each head. ONNX's Attention becomes the same node (``onnx_attention``).

With static shapes, the pass fuses if a backend has a kernel and the cost model favors it. With an
unknown number of keys, as in a decoder's step over its cache, attention of few queries is fused on
any backend. There the bias may be a sum of masks, or a Where that replaces a score by at most
-1e30: anything added to that vanishes in float32. Other forms are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import NamedTuple, dataclass, field, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ops.common.dtypes import is_float
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.onnx.softmax import SINGLE_AXIS
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import number_of

_MOST_QUERIES = 32
_MOST_TERMS = 8
_LOWEST = -1e30
"""float32 numbers at or below it absorb any score that is added"""
_LOWEST_FINITE = float(np.finfo(FLOAT32).min)
_LEAST = 1e-18
"""the least factor of scores: with smaller ones, only separate steps may overflow"""


class ScoreTerm(NamedTuple):
    """An additive bias, ``operand`` times ``scale``; or the condition of a Where, the number that
    replaces scores, and whether it does so where the condition ``holds``."""

    operand: Value
    number: float | None = None
    holds: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class _Scores:
    """The product of queries and keys, times ``scale``, the terms added to it, and their nodes."""

    nodes: tuple[Node, ...]
    scale: float = 1.0
    softcap: float = 0.0
    terms: tuple[ScoreTerm, ...] = ()

    @property
    def product(self) -> Node:
        return self.nodes[0]


@dataclass(frozen=True)
class _Operands:
    """Queries, keys and values; ``keys_last``: keys are [..., size, positions]."""

    q: Value
    k: Value
    v: Value
    keys_last: bool

    def shapes(self) -> list[tuple[int | None, ...]]:
        """Return their dims, None for unknown ones, of keys as [..., positions, size]; empty unless
        all have one float dtype and one rank."""
        values = self.q, self.k, self.v
        types = [value.type for value in values]
        dtypes = {t.dtype if isinstance(t, TensorType) else None for t in types}
        shapes = [_dims(value) for value in values]
        dtype = next(iter(dtypes))
        if len(dtypes) > 1 or dtype is None or not is_float(dtype):
            return []
        if len({len(shape) for shape in shapes}) > 1 or len(shapes[0]) < 3:
            return []
        if self.keys_last:
            shapes[1] = (*shapes[1][:-2], shapes[1][-1], shapes[1][-2])
        return shapes


class RecognizeAttention(Pass):
    """Replace attention by Penstock's Attention: for static shapes, if that is faster, or
    ``always``: for reproducible results too, as the choice depends on sizes and padding rows are
    removed from fused attention only."""

    def __init__(self, always: bool = False) -> None:
        self.always = always

    def run(self, graph: Graph, context: PassContext) -> bool:
        always = self.always or context.numerics.reproducible
        changed = False
        readers = readers_of(graph)
        awaited = {before for node in graph.walk() for before in node.control_inputs}
        for inner in graph.graphs():
            search = _Search(context, readers, awaited, set(inner.nodes), always)
            nodes: list[Node] = []
            for node in with_checkpoints(inner.nodes):
                replacement = search.replacement(node)
                changed |= replacement is not None
                nodes += replacement or (node,)
            inner.nodes = nodes
        if changed:
            prune(graph)
        return changed


@dataclass
class _Search:
    """Search for attention among the nodes ``inside`` a graph. ``awaited`` nodes are control inputs
    and must stay. ``biases`` are the values computed for biases so far, by operation and inputs:
    layers share them."""

    context: PassContext
    readers: Readers
    awaited: Set[Node]
    inside: Set[Node]
    always: bool = False
    biases: dict[tuple[object, ...], Value] = field(default_factory=dict)

    def replacement(self, node: Node) -> Sequence[Node] | None:
        """Return the replacement of ``node``, the second product or ONNX's Attention."""
        if node.op.name not in ("Attention", "MatMul") or node.control_inputs:
            return None
        if node.outputs[0] is None:
            return None
        if node.op.full_name == "Attention":
            from penstock.passes.lowering.onnx_attention import attention_nodes

            return attention_nodes(node, self.context.fusion, self.biases)
        softmax, guard = _softmax(node)
        if softmax is None or softmax.inputs[0] is None:
            return None
        behind = [softmax, guard, node] if guard is not None else [softmax, node]
        for before, reader in pairwise(behind):
            # An intermediate value with another reader must exist as a tensor, which a fused node
            # does not write.
            output = before.outputs[0]
            if output is None or self.readers.get(output) != [reader]:
                return None
        scores = _chain(softmax.inputs[0], self.readers)
        if scores is None:
            return None
        pieces = [*scores.nodes, *behind]
        # Nodes of an outer graph run once for all iterations, and may not move into a body.
        if not self.inside >= set(pieces) or not self.awaited.isdisjoint(pieces):
            return None
        return self._attention(node, scores, pieces)

    def _attention(
        self, node: Node, scores: _Scores, pieces: Sequence[Node]
    ) -> Sequence[Node] | None:
        """Return an Attention that replaces the product ``node``, after the nodes that sum its
        bias; None if the operands do not fit."""
        q, b = scores.product.inputs
        keys, factor = _transposed(b)
        keys_last = keys is None
        k, v = b if keys is None else keys, node.inputs[1]
        if q is None or k is None or v is None:
            return None
        # The factor is taken out of the keys only after a Transpose; here ``b`` still has it.
        if keys_last:
            factor = 1.0
        else:
            k, v = _repeated(k), _repeated(v)
            # Attention needs as many key heads as value heads; otherwise both stay repeated.
            if len(k.shape or ()) == 4 and _dims(k)[1] != _dims(v)[1]:
                k, v = keys, node.inputs[1]
        assert k is not None and v is not None
        operands = _Operands(q, k, v, keys_last)
        attrs = {
            "scale": factor * scores.scale,
            "zeros": "nan" if len(pieces) > len(scores.nodes) + 2 else "",
            "keys_last": int(keys_last),
            **({"softcap": scores.softcap} if scores.softcap else {}),
        }
        (y,) = node.outputs
        nodes: list[Node] = []
        if _is_open(operands, scores) and not self.context.framed:
            bias = BiasSum(node, self.biases, nodes).total(scores.terms)
            nodes.append(node.derived([q, k, v, bias], [y], attrs, op=ATTENTION))
            return nodes
        policy = self.context.fusion
        if not _is_known(operands, scores, self.always):
            return None
        inputs = [q, k, v, *[term.operand for term in scores.terms]]
        assert y is not None
        if self.always:
            if not all(map(_is_added, scores.terms)):
                bias = BiasSum(node, self.biases, nodes).total(scores.terms)
                inputs[3:] = [bias] if bias is not None else []
            return [*nodes, node.derived(inputs, [y], attrs, op=ATTENTION)]
        if policy is None:
            return None
        # Query the kernel with a separate output: if there is none, ``y`` keeps its producer.
        candidate = node.derived(inputs, [Value(y.name, y.type)], attrs, op=ATTENTION)
        if not policy.is_faster(candidate, pieces) or not policy.has_kernel(candidate):
            return None
        return [node.derived(inputs, [y], attrs, op=ATTENTION)]


def _dims(value: Value | None) -> tuple[int | None, ...]:
    """Return the dims of a tensor, None for unknown ones; empty for unknown rank."""
    shape = None if value is None else value.shape
    return tuple([dim if isinstance(dim, int) else None for dim in shape or ()])


def _is_open(operands: _Operands, scores: _Scores) -> bool:
    """Whether only the number of keys is unknown, and there are few queries."""
    shapes = operands.shapes()
    if not shapes or len(shapes[0]) != 4 or operands.keys_last or None in shapes[0]:
        return False
    (batch, heads, rows, size), of_k, of_v = shapes
    assert heads is not None and rows is not None
    groups = of_k[1]
    if operands.q.dtype != FLOAT32 or not groups or heads % groups or scores.softcap:
        return False
    if not 0 < rows <= _MOST_QUERIES or of_k != (batch, groups, None, size):
        return False
    if of_v[:3] != (batch, groups, None) or not of_v[3]:
        return False
    # A bias with larger dims than the product of queries and keys would broadcast the result, which
    # a fused node does not support.
    if any(_dims(node.outputs[0])[:3] != (batch, heads, rows) for node in scores.nodes):
        return False
    return all(_is_bias(term.operand) for term in scores.terms)


def _is_known(operands: _Operands, scores: _Scores, replaced: bool = False) -> bool:
    """Whether shapes are static, scores have the dims of the product of queries and keys, and,
    unless scores may be ``replaced``, all biases are additive."""
    shapes = operands.shapes()
    if not shapes or any(not dim for shape in shapes for dim in shape):
        return False
    of_q, of_k, of_v = shapes
    if of_q[-1] != of_k[-1] or of_k[:-1] != of_v[:-1] or of_q[:-3] != of_k[:-3]:
        return False
    heads, groups = of_q[-3], of_k[-3]
    assert heads is not None and groups is not None
    if heads % groups or not (replaced or all(map(_is_added, scores.terms))):
        return False
    whole = (*of_q[:-1], of_k[-2])
    return all(_dims(node.outputs[0]) == whole for node in scores.nodes)


def _is_added(term: ScoreTerm) -> bool:
    """Whether a bias is added to scores unscaled."""
    return term.number is None and term.scale == 1


def _is_bias(operand: Value) -> bool:
    """Whether a bias or a condition has one element per key."""
    shape = operand.shape
    return shape is not None and 0 < len(shape) <= 4 and shape[-1] != 1


# The parts.


def _producer(value: Value | None, *names: str) -> Node | None:
    """Return the producer of ``value``, if it is one of these operations."""
    node = None if value is None else value.producer
    fits = node is not None and node.op.full_name in names and not node.control_inputs
    return node if fits else None


def _softmax(node: Node) -> tuple[Node | None, Node | None]:
    """Return the Softmax along the last axis whose result, possibly with NaN replaced, a product
    reads; and the node that replaces NaN."""
    if node.op.full_name != "MatMul":
        return None, None
    value = node.inputs[0]
    guard = None if value is None else value.producer
    if guard is not None and guard.op is ZERO_NAN and not guard.control_inputs:
        value = guard.inputs[0]
    else:
        guard = None
    softmax = _producer(value, "Softmax")
    # Up to opset 12, ONNX's Softmax flattens all axes from ``axis`` on.
    if softmax is None or softmax.op.since < SINGLE_AXIS or value is None:
        return None, None
    last = softmax.attrs.get("axis", -1) in (-1, len(value.shape or ()) - 1)
    return (softmax, guard) if last else (None, None)


def _factor(node: Node, i: int) -> float | None:
    """Return the factor by which input ``i`` of a Mul or a Div scales the other one."""
    number = number_of(node.inputs[i])
    if number is None or not _LEAST < abs(number) < 1 / _LEAST:
        return None
    return number if node.op.name == "Mul" else 1 / number


def _chain(value: Value | None, readers: Readers, depth: int = 0) -> _Scores | None:
    """Return the scores from a product to ``value``; no other node may read intermediate values."""
    if value is None or depth > _MOST_TERMS or len(readers.get(value, ())) != 1:
        return None
    node = _producer(value, "MatMul", "Mul", "Div", "Add", "Where")
    if node is None:
        return None
    if node.op.name == "MatMul":
        return _Scores((node,))
    if node.op.name == "Where":
        return _where(node, readers, depth)
    # A number divided by scores does not scale them.
    for i in (0, 1) if node.op.name != "Div" else (0,):
        x, other = node.inputs[i], node.inputs[1 - i]
        factor = None if node.op.name == "Add" else _factor(node, 1 - i)
        if node.op.name != "Add" and factor is None:
            continue
        if factor is not None and (capped := _capped(node, x, factor, readers)) is not None:
            return capped
        chain = _chain(x, readers, depth + 1)
        if chain is None or other is None:
            continue
        chain = replace(chain, nodes=(*chain.nodes, node))
        if factor is None:
            return replace(chain, terms=(*chain.terms, ScoreTerm(other)))
        return None if chain.softcap else _scaled(chain, factor)
    return None


def _scaled(scores: _Scores, factor: float) -> _Scores | None:
    """Return scores times a number, with scaled biases; None if the replacement of a Where would no
    longer be low enough."""
    terms = []
    for term in scores.terms:
        if term.number is None:
            terms.append(term._replace(scale=term.scale * factor))
            continue
        number = term.number * factor
        if not number <= _LOWEST:
            return None
        # As float32 represents it.
        terms.append(term._replace(number=number if number >= _LOWEST_FINITE else -np.inf))
    return replace(scores, scale=scores.scale * factor, terms=tuple(terms))


def _capped(node: Node, x: Value | None, highest: float, readers: Readers) -> _Scores | None:
    """Return the scores of ``node``, ``tanh(scores / highest) * highest``."""
    tanh = _producer(x, "Tanh")
    if tanh is None or x is None or len(readers.get(x, ())) != 1:
        return None
    chain = _chain(tanh.inputs[0], readers, 1)
    if chain is None or chain.terms or chain.softcap:
        return None
    nodes = (*chain.nodes, tanh, node)
    return replace(chain, nodes=nodes, scale=chain.scale * highest, softcap=highest)


def _where(node: Node, readers: Readers, depth: int) -> _Scores | None:
    condition, yes, no = node.inputs
    for x, other, holds in ((no, yes, True), (yes, no, False)):
        number = number_of(other)
        # The negation rejects NaN, which must not count as a replacement that hides scores from
        # softmax, since it would spread to all results of the row.
        if condition is None or number is None or not number <= _LOWEST:
            continue
        chain = _chain(x, readers, depth + 1)
        if chain is None:
            return None
        terms = (*chain.terms, ScoreTerm(condition, number, holds))
        return replace(chain, terms=terms, nodes=(*chain.nodes, node))
    return None


def _transposed(value: Value | None) -> tuple[Value | None, float]:
    """Return the keys whose scaled transpose is ``value``, or None, and the factor."""
    factor, keys = 1.0, None
    # A factor may precede or follow the Transpose.
    for _ in range(3):
        node = _producer(value, "Mul", "Div", "Transpose")
        if node is None:
            break
        if node.op.name == "Transpose":
            last = list(range(len(_dims(value))))
            last[-2:] = last[:-3:-1]
            # ONNX's default permutation reverses all axes, which differs for rank above 2.
            if keys is not None or list(node.attrs.get("perm", ())) != last:
                break
            value = keys = node.inputs[0]
            continue
        i = 1 if _factor(node, 1) is not None or node.op.name == "Div" else 0
        number = _factor(node, i)
        if number is None:
            break
        factor *= number
        value = node.inputs[1 - i]
        # Without a Transpose, the factor stays with the keys.
        keys = value if keys is not None else None
    return keys, factor


def _repeated(value: Value) -> Value:
    """Return the value that Expand and Reshape repeat for the heads of a group; else ``value``."""
    reshape = _producer(value, "Reshape")
    expand = None if reshape is None else _producer(reshape.inputs[0], "Expand")
    unsqueeze = None if expand is None else _producer(expand.inputs[0], "Unsqueeze", "Reshape")
    if unsqueeze is None or expand is None:
        return value
    x, one, many = unsqueeze.inputs[0], unsqueeze.outputs[0], expand.outputs[0]
    before, wide, after = _dims(one), _dims(many), _dims(value)
    if x is None or len(before) != 5 or len(wide) != 5 or len(after) != 4 or len(_dims(x)) != 4:
        return value
    batch, groups, keys, size = _dims(x)
    if before != (batch, groups, 1, keys, size):
        return value
    times = wide[2]
    if times is None or groups is None:
        return value
    # Expand may also broadcast axes of length 1; only the new axis may grow.
    fits = wide[:2] == (batch, groups) and wide[4] == size and wide[3] in (None, keys)
    after_fits = after[:2] == (batch, groups * times) and after[3] == size
    return x if fits and after_fits and after[2] in (None, keys) else value


# The bias.


class BiasSum:
    """Builder of the bias of attention, as ``nodes`` before the second product. ``values`` are
    those computed so far; names of new ones have ``suffix``."""

    def __init__(
        self,
        beside: Node,
        values: dict[tuple[object, ...], Value],
        nodes: list[Node],
        suffix: str = "bias",
    ) -> None:
        self._beside, self._values, self._nodes, self._suffix = beside, values, nodes, suffix

    def total(self, terms: Sequence[ScoreTerm]) -> Value | None:
        """Return the sum of all terms; None if there are none."""
        total: Value | None = None
        for operand, number, holds, scale in terms:
            term = self._of_rank_4(operand)
            if number is not None:
                # Where replaces the scores including the terms added so far, so it reads that sum.
                other = self._constant(0) if total is None else total
                low = self._constant(number)
                choices = (low, other) if holds else (other, low)
                total = self._computed("Where", [term, *choices])
            else:
                if scale != 1:
                    term = self._computed("Mul", [term, self._constant(scale)])
                total = term if total is None else self._computed("Add", [total, term])
        return total

    def _constant(self, number: float) -> Value:
        key = "constant", number
        if key not in self._values:
            self._values[key] = Value("constant", const=np.array(number, FLOAT32))
        return self._values[key]

    def _of_rank_4(self, value: Value) -> Value:
        missing = 4 - len(value.shape or ())
        if not missing:
            return value
        key = "axes", missing
        if key not in self._values:
            self._values[key] = Value("axes", const=np.arange(missing))
        return self._computed("Unsqueeze", [value, self._values[key]])

    def _computed(self, name: str, inputs: Sequence[Value]) -> Value:
        known = self._values.get((name, *inputs))
        if known is not None:
            return known
        op, beside = standard(name), self._beside
        (type_,) = op.infer([v.type for v in inputs], {}, [v.const for v in inputs])
        (y,) = beside.outputs
        assert y is not None
        output = Value(f"{y.name}/{self._suffix}{len(self._nodes)}", type_)
        node = beside.derived(inputs, [output], {}, op=op, name=f"{beside.name}/{self._suffix}")
        self._nodes.append(node)
        self._values[name, *inputs] = output
        return output
