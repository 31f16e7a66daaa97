"""Attention over pages in the place of attention over caches that are fed and returned.

Exporters write it in three forms: in single operations, which ``RecognizeAttention`` has made one
node, as ONNX's Attention with a past, and as GroupQueryAttention::

    present = Concat(past, k)                   (k, past) and (v, past_v) are cached
    y = penstock.Attention(q, Expand(present), Expand(present_v), bias)

    y, present, present_v = Attention(q, k, v, mask, past, past_v)

    y, present, present_v = GroupQueryAttention(q, k, v, past, past_v, lengths, total, cos, sin)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.core.errors import RowsStay
from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.op import Attrs, Op
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.pages import PAGED_ATTENTION, RUN
from penstock.ops.registry import MICROSOFT, standard
from penstock.passes.lowering.distance_bias import NoDistances, numbers_by_distance
from penstock.passes.lowering.row_rules import static_dims
from penstock.passes.lowering.step_probes import Probe, Probes, Roles

WRITTEN = "penstock/"
"""begins the names of values that are written here"""
POSITIONS, POOL, RUNS, PAGES = (
    f"{WRITTEN}{name}" for name in ("positions", "pool", "runs", "pages")
)
"""inputs of a graph of joined steps, beside those of rows"""

PAGE = 32
"""positions of a page"""


class PagedCache(NamedTuple):
    """Keys or values of a layer: the names of the ``past`` and the ``present``, and where its
    [groups, positions, size] begin in a page."""

    past: str
    present: str
    groups: int
    size: int
    begins: int


class _Operand(NamedTuple):
    """Keys or values of attention: the ``past`` and the ``new`` rows that they come of, the
    ``present`` that these are, and their factor ``scale``."""

    past: Value
    new: Value
    present: Value
    scale: float = 1.0


class _Seen(NamedTuple):
    """Which positions a row sees: the last ``window``, or 0 for all up to its own; and what is
    added to scores ``by_distance``, if anything."""

    window: int = 0
    by_distance: Value | None = None

    def within(self, window: int) -> _Seen:
        """The same within a window; 0 or less for none."""
        return self._replace(window=min(self.window or window, window)) if window > 0 else self


class _Scores(NamedTuple):
    """The factor of scores, their highest number or 0, and what a row sees."""

    scale: float
    softcap: float
    seen: _Seen


class PageAttention:
    """The search for attention over caches in ``graph``, a copy of a decoder for some rows.
    ``names`` are those of its outputs."""

    def __init__(self, graph: Graph, names: Sequence[str], roles: Roles, probes: Probes) -> None:
        self.graph, self.roles, self._probes = graph, roles, probes
        self.caches: list[PagedCache] = []
        self.page_size = 0
        self._past = {v.name: v for v in graph.inputs if v.name in roles.caches}
        self._outputs = dict(zip(graph.outputs, names, strict=True))
        self._biases: dict[tuple[Value, ...], _Seen] = {}
        self.pool = Value(POOL, TensorType(FLOAT32, ("pages", "page_size")))
        self.runs = Value(RUNS, TensorType(INT64, ("requests", RUN)))
        self.pages = Value(PAGES, TensorType(INT64, ("used_pages",)))

    def replace_attention(self) -> None:
        """Let attention read pages in the place of caches."""
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

    # Attention in its forms.

    def _paged(self, node: Node) -> Node:
        """Of penstock.Attention, whose keys and values are, or repeat, the past and new rows."""
        q, k, v = node.inputs[:3]
        assert q is not None
        heads = static_dims(q)[1]
        keys = self._operand(node, k, heads, bool(node.attrs.get("keys_last", 0)))
        values = self._operand(node, v, heads, False)
        seen = self._seen(node, node.inputs[3:], heads)
        scores = _Scores(node.attrs["scale"] * keys.scale, node.attrs.get("softcap", 0.0), seen)
        if values.scale != 1:
            raise stays(node, "has values times a number")
        return self._attention(node, q, keys, values, scores, node.outputs[0])

    def _attention(
        self,
        node: Node,
        q: Value,
        keys: _Operand,
        values: _Operand,
        scores: _Scores,
        y: Value | None,
    ) -> Node:
        """Attention over pages."""
        for operand in (keys, values):
            if any(cache.past == operand.past.name for cache in self.caches):
                raise stays(node, f"reads {operand.past.name!r} as a layer before does")
        attrs: dict[str, Any] = {"scale": scores.scale, "softcap": scores.softcap}
        attrs |= {"window": scores.seen.window, "positions": PAGE}
        attrs["keys_at"] = attrs["values_at"] = self._placed(keys)
        if values.present is not keys.present:
            attrs["values_at"] = self._placed(values)
        inputs = [q, keys.new, values.new, self.pool, self.runs, self.pages]
        if scores.seen.by_distance is not None:
            inputs.append(scores.seen.by_distance)
        return node.derived(inputs, [y], attrs, op=PAGED_ATTENTION)

    def _placed(self, operand: _Operand) -> int:
        """Where a cache lies in a page."""
        _, groups, _, size = static_dims(operand.past)
        begins = self.page_size
        self.page_size += groups * PAGE * size
        present = self._outputs.get(operand.present)
        if present is None:
            raise RowsStay(f"what {operand.past.name!r} becomes is no output")
        self.caches.append(PagedCache(operand.past.name, present, groups, size, begins))
        return begins

    def _operand(self, node: Node, value: Value | None, heads: int, last: bool) -> _Operand:
        """What keys or values are made of."""
        moves: list[Node] = []
        scale, present = 1.0, value
        while present is not None and (source := present.producer) is not None:
            if source.op.full_name == "Concat":
                break
            if source.op.full_name == "Mul" and (factor := _factor(source)) is not None:
                present, number = factor
                scale *= number
                continue
            if not (source.op.view or source.op.full_name in ("Expand", "Transpose")):
                raise stays(node, f"reads what {source.label} makes of caches")
            moves.append(source)
            present = source.inputs[0]
        concat = None if present is None else present.producer
        if concat is None or present is None or len(concat.inputs) != 2:
            raise stays(node, "reads keys or values that are no past with rows behind it")
        past, new = concat.inputs
        if past is None or new is None or past.name not in self._past:
            raise stays(node, "reads keys or values that are no past with rows behind it")
        if concat.attrs.get("axis", 0) not in (2, -2):
            raise stays(node, "adds rows to caches along another axis")
        if not _repeats(present, moves[::-1], heads, last):
            raise stays(node, "has keys or values that are no caches, each for some heads")
        return _Operand(past, new, present, scale)

    def _paged_onnx(self, node: Node) -> list[Node]:
        """Of ONNX's Attention with a past."""
        inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
        outputs, attrs = [*node.outputs, *[None] * 3], node.attrs
        if inputs[6] or outputs[3]:
            raise stays(node, "has lengths, or returns scores")
        if attrs.get("right_window_size", -1) > 0 or attrs.get("softmax_precision") not in (
            None,
            1,
        ):
            raise stays(node, "has a window behind its rows, or another precision")
        q, k, v, past_k, past_v = _all(node, [*inputs[:3], *inputs[4:6]])
        present_k, present_v = _all(node, outputs[1:3])
        masks = [mask for mask in inputs[3:4] if mask is not None]
        writer = _HeadsWriter(node)
        if merged := len(static_dims(q)) == 3:
            q, *others = [writer.split(q, attrs["q_num_heads"])] + [
                writer.split(x, attrs["kv_num_heads"]) for x in (k, v)
            ]
            k, v = others
        keys, values = _Operand(past_k, k, present_k), _Operand(past_v, v, present_v)
        result = writer.result(q, v, None if merged else outputs[0])
        seen = self._seen(node, masks, static_dims(q)[1], bool(attrs.get("is_causal")))
        seen = seen.within(attrs.get("left_window_size", -1) + 1)
        scores = _Scores(self._scale(attrs, q), attrs.get("softcap", 0.0), seen)
        writer.nodes.append(self._attention(node, q, keys, values, scores, result))
        return writer.merged(result, outputs[0]) if merged else writer.nodes

    def _paged_groups(self, node: Node) -> list[Node]:
        """Of GroupQueryAttention."""
        inputs, attrs = [*node.inputs, *[None] * (16 - len(node.inputs))], node.attrs
        if any(inputs[11:]):
            raise stays(node, "has sinks or scales")
        modes = {attrs.get(f"{name}_quant_type", "NONE") for name in "kv"}
        if modes != {"NONE"} or attrs.get("smooth_softmax", -1) == 1:
            raise stays(node, "has codes in its caches, or a smooth softmax")
        if attrs.get("sliding_window_cache") or not attrs.get("causal", 1):
            raise stays(node, "has a cache of a window, or sees what comes behind a row")
        past_k, past_v = _all(node, inputs[3:5])
        present_k, present_v = _all(node, node.outputs[1:3])
        writer, heads, groups = _HeadsWriter(node), attrs["num_heads"], attrs["kv_num_heads"]
        packed = inputs[1] is None
        q, k, v = writer.parts(inputs[0], heads, groups) if packed else _all(node, inputs[:3])
        if attrs.get("do_rotary"):
            turned = {"interleaved": attrs.get("rotary_interleaved", 0)}
            place = next(v for v in self.graph.inputs if v.name == POSITIONS)
            rotary = standard("RotaryEmbedding", MICROSOFT)
            q, k = [
                writer.add(rotary, [x, place, *inputs[7:9]], turned | {"num_heads": n})
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
        """The factor of scores, by default that of the size of a head."""
        return float(attrs.get("scale") or static_dims(q)[-1] ** -0.5)

    # Masks, and what else is added to scores.

    def _seen(
        self, node: Node, given: Sequence[Value | None], heads: int, causal: bool = False
    ) -> _Seen:
        """What rows see of attention whose scores have these biases added."""
        biases = tuple([bias for bias in given if bias is not None])
        if not biases:
            if causal:
                return _Seen()
            raise stays(node, "lets a row see those behind it")
        if biases not in self._biases:
            self._biases[biases] = self._seen_by(node, biases, heads, causal)
        return self._biases[biases]

    def _seen_by(self, node: Node, biases: Sequence[Value], heads: int, causal: bool) -> _Seen:
        name, total = biases[0].name, None
        for far in self._probes.far:
            if (total := _hidden(biases, far, causal)) is not None:
                break
        else:
            raise stays(node, f"has a mask that cannot be computed, {name!r}")
        cases = [(probe, _hidden(biases, probe, causal)) for probe in self._probes.near]
        known = [(p, bias) for p, bias in (*cases, (far, total)) if bias is not None]
        windows = [probe.window(bias) for probe, bias in known]
        if None in windows or len(known) <= len(cases):
            raise stays(node, f"hides other positions than those behind a row, by {name!r}")
        window = windows[-1] or 0
        # A window that is longer than a probe shows in a longer one alone.
        ends = [probe.past + probe.rows for probe, _ in cases]
        if windows[:-1] != [0 if window >= end else window for end in ends]:
            raise stays(node, f"has a window that grows, by {name!r}")
        try:
            numbers = numbers_by_distance(known, window)
        except NoDistances:
            text = "adds numbers to scores that depend on more than distances, by"
            raise stays(node, f"{text} {name!r}") from None
        if numbers is None:
            return _Seen(window)
        if len(numbers) not in (1, heads):
            raise stays(node, f"adds numbers of {len(numbers)} heads to scores of {heads}")
        table = np.ascontiguousarray(np.broadcast_to(numbers, (heads, numbers.shape[1])))
        return _Seen(window, Value(f"{WRITTEN}by_distance", const=table))


def stays(node: Node, reason: str) -> RowsStay:
    return RowsStay(f"{node.label} {reason}")


def _factor(node: Node) -> tuple[Value | None, float] | None:
    """What a Mul multiplies by a number, and the number; None if it does not."""
    for i in (0, 1):
        number = node.const(i)
        if number is not None and number.size == 1:
            return node.inputs[1 - i], float(number.reshape(()))
    return None


def _hidden(biases: Sequence[Value], probe: Probe, causal: bool) -> np.ndarray | None:
    """What is added to scores by all biases together; None if it is not known."""
    total: np.ndarray = np.zeros((), np.float32)
    try:
        arrays = [_computed(bias, probe) for bias in biases]
        if causal:
            before = np.arange(probe.past + probe.rows)
            arrays.append(before <= probe.positions[:, None])
        for array in arrays:
            if array is None:
                return None
            hides = array.dtype == np.bool_
            own = np.where(array, np.float32(0), np.float32(-np.inf)) if hides else array
            with np.errstate(over="ignore"):  # lowest numbers become minus infinity
                total = total + own
    except ValueError:  # a table of numbers may have fewer positions than the probe
        return None
    return total


def _computed(value: Value | None, probe: Probe) -> np.ndarray | None:
    """The value of a bias: the model's, or what ``RecognizeAttention`` computes of several."""
    if value is None:
        return None
    if value.name in probe.values:
        return probe.values[value.name]
    if value.const is not None and (value.const.size == 1 or value.name == "axes"):
        return value.const
    node = value.producer
    operands = [] if node is None else [_computed(x, probe) for x in node.inputs]
    if node is None or any(x is None for x in operands):
        return None
    known = [x for x in operands if x is not None]
    if node.op.name == "Unsqueeze":
        return np.expand_dims(known[0], tuple(known[1].tolist()))
    if node.op.name == "Where":
        return np.where(*known)
    with np.errstate(over="ignore"):
        return known[0] + known[1] if node.op.name == "Add" else None


def _all(node: Node, values: Sequence[Value | None]) -> list[Value]:
    """``values``, none of which is left out."""
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        raise stays(node, "has no past, or does not return it")
    return given


def _repeats(present: Value, moves: Iterable[Node], heads: int, last: bool) -> bool:
    """Whether ``moves`` do no more to a cache than repeating it for the heads that share it, and
    turning its rows to columns if these are ``last``: tried with numbers for its elements."""
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


class _HeadsWriter:
    """Writes the ``nodes`` around attention whose inputs have all heads side by side."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []

    def add(self, op: Op, inputs: Sequence[Value | None], attrs: Attrs | None = None) -> Value:
        """The result of a new node."""
        y = Value(f"{self.node.label}/joined{len(self.nodes)}")
        node = self.node.derived(inputs, [y], attrs or {}, op=op)
        (y.type,) = node_types(node)[:1]
        self.nodes.append(node)
        return y

    def split(self, x: Value | None, heads: int) -> Value:
        """[1, rows, heads * size] as [1, heads, rows, size]."""
        one, rows, width = static_dims(x)
        dims = Value(f"{WRITTEN}dims", const=np.array([one, rows, heads, width // heads]))
        four = self.add(standard("Reshape"), [x, dims])
        return self.add(standard("Transpose"), [four], {"perm": [0, 2, 1, 3]})

    def parts(self, packed: Value | None, heads: int, groups: int) -> list[Value]:
        """Queries, keys and values that lie one behind another in each row."""
        width = static_dims(packed)[-1]
        size = width // (heads + 2 * groups)
        ends = np.cumsum([0, heads * size, groups * size, groups * size])
        axis = Value(f"{WRITTEN}axis", const=np.array([2]))
        return [
            self.add(
                standard("Slice"),
                [
                    packed,
                    *[Value(f"{WRITTEN}end", const=np.array([n])) for n in ends[i : i + 2]],
                    axis,
                ],
            )
            for i in range(3)
        ]

    def result(self, q: Value, v: Value, y: Value | None) -> Value:
        """``y``, or a new value for the result of attention."""
        dims = (*static_dims(q)[:3], static_dims(v)[3])
        return y or Value(f"{self.node.label}/joined", TensorType(FLOAT32, dims))

    def merged(self, result: Value, y: Value | None) -> list[Node]:
        """All nodes, which write [1, heads, rows, size] to ``y`` in the end, heads side by side."""
        one, heads, rows, size = static_dims(result)
        turned = self.add(standard("Transpose"), [result], {"perm": [0, 2, 1, 3]})
        wide = Value(f"{WRITTEN}dims", const=np.array([one, rows, heads * size]))
        self.nodes.append(self.node.derived([turned, wide], [y], {}, op=standard("Reshape")))
        return self.nodes
