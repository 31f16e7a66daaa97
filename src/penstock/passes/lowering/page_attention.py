"""Conversion of attention over fed and returned caches to paged attention.

Exporters write it in three forms: as elementary operations, which ``RecognizeAttention`` has fused,
as ONNX's Attention with a past, and as GroupQueryAttention::

    present = Concat(past, k)                   (k, past) and (v, past_v) are cached
    y = penstock.Attention(q, Expand(present), Expand(present_v), bias)

    y, present, present_v = Attention(q, k, v, mask, past, past_v)

    y, present, present_v = GroupQueryAttention(q, k, v, past, past_v, lengths, total, cos, sin)

In cross attention, keys and values of encoder outputs are fed and do not change. They are stored in
separate pages of the same pool, which all rows of a sequence see::

    y = penstock.Attention(q, Expand(keys), Expand(values), bias)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import RowsStay
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ir.op import Attrs
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.joined_steps import (
    FIXED_PAGES,
    FIXED_RUNS,
    PAGE,
    PAGES,
    POOL,
    POSITIONS,
    RUNS,
    WRITTEN,
    PagedCache,
)
from penstock.ops.internal.pages import PAGED_ATTENTION, RUN
from penstock.ops.registry import MICROSOFT, standard
from penstock.passes.lowering.row_rules import Stays, static_dims
from penstock.passes.lowering.score_biases import ScoreBiases, Seen
from penstock.passes.lowering.step_probes import Probes, Roles, is_mask
from penstock.passes.rewrite import Expansion

_OF_HEADS = 4
"""number of axes of keys or values"""


class _Source(NamedTuple):
    """The ``value`` that data-movement nodes, ``moves``, turn into keys or values; their factor."""

    value: Value | None
    moves: Sequence[Node]
    scale: float


class _Operand(NamedTuple):
    """Keys or values of attention: the ``past`` and the ``new`` rows, their concatenation
    ``present``, and the factor ``scale``."""

    past: Value
    new: Value
    present: Value
    scale: float = 1.0


class _Scores(NamedTuple):
    """The factor of scores, their softcap (0 for none), and the positions that a row sees."""

    scale: float
    softcap: float
    seen: Seen


class PageAttention:
    """Search for attention over caches in ``graph``, a copy of a decoder for a fixed number of
    rows. ``names`` are its output names."""

    def __init__(self, graph: Graph, names: Sequence[str], roles: Roles, probes: Probes) -> None:
        self.graph, self.roles, self._biases = graph, roles, ScoreBiases(probes)
        self.caches: list[PagedCache] = []
        self.fixed: dict[tuple[str, bool], PagedCache] = {}
        self.page_size = self.fixed_size = 0
        self.masked: set[bool] = set()
        """whether cross attention applies the mask of the encoder's output, by layer"""
        self._past = {v.name: v for v in graph.inputs if v.name in roles.caches}
        self._outputs = dict(zip(graph.outputs, names, strict=True))
        self.pool = Value(POOL, TensorType(FLOAT32, ("pages", "page_size")))
        self.runs = Value(RUNS, TensorType(INT64, ("requests", RUN)))
        self.pages = Value(PAGES, TensorType(INT64, ("used_pages",)))
        self.fixed_runs = Value(FIXED_RUNS, TensorType(INT64, ("requests", RUN)))
        self.fixed_pages = Value(FIXED_PAGES, TensorType(INT64, ("used_fixed_pages",)))

    def replace_attention(self) -> None:
        """Replace attention over caches by attention over pages."""
        for value in self._past.values():
            if value.dtype != FLOAT32:
                raise RowsStay(f"cache {value.name!r} is {value.dtype}, but pages are float32")
        self._check_fixed()
        nodes: list[Node] = []
        for node in self.graph.nodes:
            if node.op is ATTENTION:
                nodes.append(self._paged(node))
            elif node.op.full_name == "Attention":
                nodes += self._paged_onnx(node)
            elif node.op.full_name == "com.microsoft.GroupQueryAttention":
                nodes += self._paged_groups(node)
            else:
                nodes.append(node)
        left = [name for name in self.roles.caches if name not in {c.past for c in self.caches}]
        if left or not self.caches:
            raise RowsStay(f"no attention reads {left[0] if left else 'a cache'!r}")
        self.graph.nodes = nodes
        self.graph.inputs += [self.pool, self.runs, self.pages]
        if self.fixed:
            self.graph.inputs += [self.fixed_runs, self.fixed_pages]
        if len(self.masked) > 1:
            raise RowsStay("some layers apply the mask of the encoder's output, and others do not")

    def _check_fixed(self) -> None:
        """Raise ``RowsStay`` unless the fixed inputs that are read are keys, values and masks."""
        readers = readers_of(self.graph)
        # Lengths are folded: hidden states used for their length alone have no readers.
        for value in self.graph.inputs:
            if value.name not in self.roles.fixed or not readers.get(value) or is_mask(value):
                continue
            if value.dtype != FLOAT32 or len(value.shape or ()) != _OF_HEADS:
                raise RowsStay(
                    f"keys and values of cross attention are computed from {value.name!r} in "
                    "each step; export a decoder with cached keys and values as inputs"
                )

    # The forms of attention.

    def _paged(self, node: Node) -> Node:
        """Convert penstock.Attention whose keys and values are, or repeat, past and new rows."""
        q, k, v = node.inputs[:3]
        assert q is not None
        heads, last = static_dims(q)[1], bool(node.attrs.get("keys_last", 0))
        of_keys, of_values = _source_of(node, k), _source_of(node, v)
        fed = {source.value.name for source in (of_keys, of_values) if source.value is not None}
        if not fed.isdisjoint(self.roles.fixed):
            return self._cross(node, q, of_keys, of_values)
        keys = self._operand(node, of_keys, heads, last)
        values = self._operand(node, of_values, heads, False)
        seen = self._seen(node, node.inputs[3:], heads)
        scores = _Scores(node.attrs["scale"] * keys.scale, node.attrs.get("softcap", 0.0), seen)
        if values.scale != 1:
            raise stays(node, "scales its values by a constant")
        return self._attention(node, q, keys, values, scores, node.outputs[0])

    def _cross(self, node: Node, q: Value, keys: _Source, values: _Source) -> Node:
        """Convert penstock.Attention over the outputs of an encoder."""
        attrs: dict[str, Any] = {"positions": PAGE, "softcap": node.attrs.get("softcap", 0.0)}
        attrs["scale"] = node.attrs["scale"] * keys.scale
        last = bool(node.attrs.get("keys_last", 0))
        for name, source in (("keys_at", keys), ("values_at", values)):
            fed = source.value
            if fed is None or fed.name not in self.roles.fixed:
                raise stays(
                    node, "combines cached keys or values of the encoder with computed ones"
                )
            if not _repeats(fed, source.moves, static_dims(q)[1], last and source is keys):
                raise stays(
                    node,
                    "has keys or values that are not cached inputs repeated for groups of heads",
                )
            # Layers may share fixed keys and values, which are never written.
            place = fed.name, source is keys
            cache = self.fixed.get(place) or self._placed_fixed(fed, source is keys)
            attrs |= {name: cache.begins, "groups": cache.groups, "value_size": cache.size}
        if values.scale != 1:
            raise stays(node, "scales its values by a constant")
        try:
            self.masked.add(self._biases.hides_absent(_given(node.inputs[3:])))
        except Stays as reason:
            raise stays(node, str(reason)) from None
        inputs = [q, None, None, self.pool, self.fixed_runs, self.fixed_pages]
        return node.derived(inputs, node.outputs, attrs, op=PAGED_ATTENTION)

    def _placed_fixed(self, fed: Value, keys: bool) -> PagedCache:
        """Return the position of fed keys or values in a page."""
        _, groups, _, size = static_dims(fed)
        cache = PagedCache(fed.name, None, groups, size, self.fixed_size, keys)
        self.fixed_size += groups * PAGE * size
        self.fixed[fed.name, keys] = cache
        return cache

    def _attention(
        self,
        node: Node,
        q: Value,
        keys: _Operand,
        values: _Operand,
        scores: _Scores,
        y: Value | None,
    ) -> Node:
        """Return a PagedAttention node."""
        for operand in (keys, values):
            if any(cache.past == operand.past.name for cache in self.caches):
                raise stays(node, f"reads {operand.past.name!r}, which an earlier layer reads too")
        attrs: dict[str, Any] = {"scale": scores.scale, "softcap": scores.softcap}
        attrs |= {"window": scores.seen.window, "positions": PAGE}
        attrs["keys_at"], attrs["values_at"] = self._placed(keys, True), self._placed(values, False)
        inputs = [q, keys.new, values.new, self.pool, self.runs, self.pages]
        numbers = scores.seen.by_distance
        if numbers is not None:
            table = np.broadcast_to(numbers, (static_dims(q)[1], numbers.shape[1]))
            inputs.append(Value(f"{WRITTEN}by_distance", const=np.ascontiguousarray(table)))
        return node.derived(inputs, [y], attrs, op=PAGED_ATTENTION)

    def _placed(self, operand: _Operand, keys: bool) -> int:
        """Return the position of a cache in a page."""
        _, groups, _, size = static_dims(operand.past)
        begins = self.page_size
        self.page_size += groups * PAGE * size
        present = self._outputs.get(operand.present)
        if present is None:
            raise RowsStay(f"no output returns the updated cache {operand.past.name!r}")
        self.caches.append(PagedCache(operand.past.name, present, groups, size, begins, keys))
        return begins

    def _operand(self, node: Node, source: _Source, heads: int, last: bool) -> _Operand:
        """Return the cache, the new rows and the scale from which keys or values are computed."""
        present, moves, scale = source
        concat = None if present is None else present.producer
        if concat is None or present is None or len(concat.inputs) != 2:
            raise stays(node, "reads keys or values that are not a cache with new rows appended")
        past, new = concat.inputs
        if past is None or new is None or past.name not in self._past:
            raise stays(node, "reads keys or values that are not a cache with new rows appended")
        if concat.attrs.get("axis", 0) not in (2, -2):
            raise stays(node, "appends rows to caches along an axis other than 2")
        if not _repeats(present, moves, heads, last):
            raise stays(node, "has keys or values that are not caches repeated for groups of heads")
        return _Operand(past, new, present, scale)

    def _paged_onnx(self, node: Node) -> list[Node]:
        """Convert ONNX's Attention with a past."""
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        outputs, attrs = [*node.outputs, *[None] * 3], node.attrs
        if inputs[6] or outputs[3]:
            raise stays(node, "has the input nonpad_kv_seqlen, or outputs its scores")
        if attrs.get("right_window_size", -1) > 0 or attrs.get("softmax_precision") not in (
            None,
            1,
        ):
            raise stays(node, "has right_window_size, or softmax_precision other than float32")
        q, k, v, past_k, past_v = _all(node, [*inputs[:3], *inputs[4:6]])
        present_k, present_v = _all(node, outputs[1:3])
        writer = _HeadsWriter(node)
        if merged := len(static_dims(q)) == 3:
            q, *others = [writer.split(q, attrs["q_num_heads"])] + [
                writer.split(x, attrs["kv_num_heads"]) for x in (k, v)
            ]
            k, v = others
        keys, values = _Operand(past_k, k, present_k), _Operand(past_v, v, present_v)
        result = writer.result(q, v, None if merged else outputs[0])
        seen = self._seen(node, inputs[3:4], static_dims(q)[1], bool(attrs.get("is_causal")))
        seen = seen.within(attrs.get("left_window_size", -1) + 1)
        scores = _Scores(self._scale(attrs, q), attrs.get("softcap", 0.0), seen)
        writer.nodes.append(self._attention(node, q, keys, values, scores, result))
        return writer.merged(result, outputs[0]) if merged else writer.nodes

    def _paged_groups(self, node: Node) -> list[Node]:
        """Convert GroupQueryAttention."""
        inputs, attrs = [*node.inputs, *[None] * (16 - len(node.inputs))], node.attrs
        if any(inputs[11:]):
            raise stays(node, "has a head_sink, cache scales or normalization weights")
        modes = {attrs.get(f"{name}_quant_type", "NONE") for name in "kv"}
        if modes != {"NONE"} or attrs.get("smooth_softmax", -1) == 1:
            raise stays(node, "has quantized caches, or smooth_softmax")
        if attrs.get("sliding_window_cache") or not attrs.get("causal", 1):
            raise stays(node, "has sliding_window_cache, or is not causal")
        past_k, past_v = _all(node, inputs[3:5])
        present_k, present_v = _all(node, node.outputs[1:3])
        writer, heads, groups = _HeadsWriter(node), attrs["num_heads"], attrs["kv_num_heads"]
        packed = inputs[1] is None
        q, k, v = writer.parts(inputs[0], heads, groups) if packed else _all(node, inputs[:3])
        if attrs.get("do_rotary"):
            # As in ONNX Runtime, the tables have as many columns as pairs of features that turn.
            turned = {
                "interleaved": attrs.get("rotary_interleaved", 0),
                "rotary_embedding_dim": 2 * static_dims(inputs[7])[1],
            }
            place = next(v for v in self.graph.inputs if v.name == POSITIONS)
            rotary = standard("RotaryEmbedding", MICROSOFT)
            q, k = [
                writer.add(rotary, [x, place, *inputs[7:9]], **turned, num_heads=n)
                for x, n in ((q, heads), (k, groups))
            ]
        q, k, v = writer.split(q, heads), writer.split(k, groups), writer.split(v, groups)
        keys, values = _Operand(past_k, k, present_k), _Operand(past_v, v, present_v)
        result = writer.result(q, v, None)
        seen = self._seen(node, inputs[10:11], heads, causal=True)
        seen = seen.within(attrs.get("local_window_size", -1))
        scores = _Scores(self._scale(attrs, q), attrs.get("softcap", 0.0), seen)
        writer.nodes.append(self._attention(node, q, keys, values, scores, result))
        return writer.merged(result, node.outputs[0])

    @staticmethod
    def _scale(attrs: Attrs, q: Value) -> float:
        """Return the factor of scores, by default 1 / sqrt(head size)."""
        return float(attrs.get("scale") or static_dims(q)[-1] ** -0.5)

    # Biases.

    def _seen(
        self, node: Node, given: Sequence[Value | None], heads: int, causal: bool = False
    ) -> Seen:
        """Return the positions that rows see in attention whose scores have these biases added."""
        # Steps of encoder-decoders are mostly traced with one row, which needs no causal mask: such
        # a graph is correct for single rows only.
        one_by_one = bool(self.roles.fixed)
        try:
            seen = self._biases.seen_before(_given(given), causal or one_by_one)
        except Stays as reason:
            raise stays(node, str(reason)) from None
        if seen.by_distance is not None and len(seen.by_distance) not in (1, heads):
            own = len(seen.by_distance)
            raise stays(node, f"adds a bias of {own} heads to scores of {heads} heads")
        return seen


def stays(node: Node, reason: str) -> RowsStay:
    return RowsStay(f"{node.label} {reason}")


def _source_of(node: Node, value: Value | None) -> _Source:
    """Return the source of attention's keys or values."""
    moves: list[Node] = []
    scale = 1.0
    while value is not None and (source := value.producer) is not None:
        if source.op.full_name == "Concat":
            break
        if source.op.full_name == "Mul" and (factor := _factor(source)) is not None:
            value, number = factor
            scale *= number
            continue
        if not (source.op.view or source.op.full_name in ("Expand", "Transpose")):
            raise stays(
                node,
                f"reads caches through {source.label}, which is not a view, Expand or Transpose",
            )
        moves.append(source)
        value = source.inputs[0]
    return _Source(value, moves[::-1], scale)


def _factor(node: Node) -> tuple[Value | None, float] | None:
    """Return the value and the number that a Mul multiplies; None for other nodes."""
    for i in (0, 1):
        number = node.const(i)
        if number is not None and number.size == 1:
            return node.inputs[1 - i], float(number.reshape(()))
    return None


def _given(values: Sequence[Value | None]) -> list[Value]:
    """Return the values that are not None."""
    return [value for value in values if value is not None]


def _all(node: Node, values: Sequence[Value | None]) -> list[Value]:
    """Return ``values``, none of which may be omitted. Raises ``RowsStay``."""
    given = _given(values)
    if len(given) < len(values):
        raise stays(node, "lacks query, key, value or past inputs, or present outputs")
    return given


def _repeats(present: Value, moves: Iterable[Node], heads: int, last: bool) -> bool:
    """Whether ``moves`` only repeat a cache for the heads that share it, and transpose its rows to
    columns if ``last``: tested on an arange."""
    dims = static_dims(present)
    x = numbers = np.arange(np.prod(dims), dtype=np.float32).reshape(dims)
    for node in moves:
        others = [None if v is None else v.const for v in node.inputs[1:]]
        if any(v is not None and v.const is None for v in node.inputs[1:]):
            return False
        types = [None if v is None else v.type for v in node.inputs]
        x = node.op.compile(node, types).function(x, *others)
        x = np.asarray(x)
    wanted = numbers
    if x.shape[1:2] != dims[1:2]:
        wanted = np.repeat(numbers, heads // dims[1], axis=1)
    return np.array_equal(x, wanted.swapaxes(2, 3) if last else wanted)


class _HeadsWriter(Expansion):
    """Writer of the ``nodes`` around attention whose inputs have all heads concatenated."""

    def constant(self, array: Sequence[int]) -> Value:
        """Return a constant that the pass creates, which depends on no probe."""
        return Value(f"{WRITTEN}constant", const=np.array(array))

    def split(self, x: Value | None, heads: int) -> Value:
        """Reshape [1, rows, heads * size] to [1, heads, rows, size]."""
        one, rows, width = static_dims(x)
        four = self.add("Reshape", [x, self.constant([one, rows, heads, width // heads])])
        return self.add("Transpose", [four], perm=[0, 2, 1, 3])

    def parts(self, packed: Value | None, heads: int, groups: int) -> list[Value]:
        """Split queries, keys and values that are concatenated in each row."""
        width = static_dims(packed)[-1]
        size = width // (heads + 2 * groups)
        ends = np.cumsum([0, heads * size, groups * size, groups * size])
        bounds = [[self.constant([n]) for n in (*ends[i : i + 2], 2)] for i in range(3)]
        return [self.add("Slice", [packed, *own]) for own in bounds]

    def result(self, q: Value, v: Value, y: Value | None) -> Value:
        """Return ``y``, or a new value for the result of attention."""
        dims = (*static_dims(q)[:3], static_dims(v)[3])
        return y or Value(f"{self.node.label}/joined", TensorType(FLOAT32, dims))

    def merged(self, result: Value, y: Value | None) -> list[Node]:
        """Return all nodes; the last ones merge the heads of [1, heads, rows, size]."""
        one, heads, rows, size = static_dims(result)
        turned = self.add("Transpose", [result], perm=[0, 2, 1, 3])
        wide = self.constant([one, rows, heads * size])
        self.nodes.append(self.node.derived([turned, wide], [y], {}, op=standard("Reshape")))
        return self.nodes
