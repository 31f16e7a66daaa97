"""Compute no rows that a mask hides: a padded batch becomes one sample of the rows that matter.

A batch of texts [batch, rows] is padded to the longest one. Its attention adds a bias to scores,
by which no row sees those that pad; what these are computed to is not read, if outputs are sums
that a mask multiplies, or the first row of each text. Then all that works row by row is computed
for the rows that matter, one behind another, and attention within each text
(``ops.internal.packed``)::

    x = Gather(table, ids)                 x = Gather(table, Gather(ids, rows))      [1, T, width]
    y = Attention(x w, x u, x v, bias)     y = PackedAttention(x w, x u, x v, ranges, bias)
    z = ReduceSum(y * mask)                z = ReduceSum(UnpackRows(y * mask, ranges))

Which rows matter is told in each run by the values of bias and mask, however they were computed.
What is proven here, node by node, is that a row acts on other rows by attention alone
(``row_rules``), and on outputs in these ways alone. ``penstock plan --reasons`` tells which node
stood in the way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import zip_longest
from math import prod

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.core.errors import RowsStay
from penstock.core.records import cached_property, dataclass, field
from penstock.ir.graph import Graph, Node, Readers, Value, all_reads, readers_of
from penstock.ir.op import Attrs, Op
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.packed import (
    FACTOR,
    INDEX,
    LIVE_ROWS,
    LOWEST,
    PACKED_ATTENTION,
    PAIRS,
    UNPACK_ROWS,
)
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.lowering.recognize_attention import RecognizeAttention
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Axes,
    Axis,
    Packed,
    Stays,
    features,
    packed_form,
    place_of_rows,
    static_dims,
)


class PackRows(Pass):
    """Leave out rows that a mask hides: where nothing reads them ("proven"), or also where outputs
    have them, which are 0 there ("any"). Raises ``RowsStay`` if a node stands in the way."""

    invalidates = frozenset({Property.TYPED})

    def __init__(self, which: str = "proven") -> None:
        self.which = which

    def run(self, graph: Graph, context: PassContext) -> bool:
        # Whatever attention as one node costs: rows that are left out save more.
        RecognizeAttention(always=True).run(graph, context)
        packing = _Packing(graph)
        packing.find(self.which == "any")
        _Writer(packing).write()
        return True


def _may_hide(bias: Value) -> bool:
    """Whether a bias may hide rows: a constant mostly tells how far away they are."""
    return bias.const is None or not bool((bias.const > LOWEST).all())


def _stay(node: Node | None, reason: object) -> RowsStay:
    return RowsStay(str(reason) if node is None else f"{node.label} {reason}")


class _Packing:
    """What of a graph is computed for packed rows. ``axes``: those of values that are packed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.axes: dict[Value, Axes] = {}
        self.packed: dict[Node, Packed] = {}
        self.guards: dict[tuple[Value, int], None] = {}
        """what tells which rows matter, each with its number in the ``groups`` of LiveRows"""
        self.first = False
        self._factors: dict[Value, Sequence[Value]] = {}  # that make padded rows 0
        self._why: dict[Node, Stays] = {}
        self.attention = [node for node in graph.nodes if node.op is ATTENTION]
        if not self.attention or any(inner is not graph for inner in graph.graphs()):
            raise _stay(None, "the graph has no attention that is one node, or has loops")
        self.batch, self.rows = self._sizes()

    @cached_property
    def readers(self) -> Readers:
        """The nodes that read each value; None for an output of the graph."""
        return readers_of(self.graph)

    @property
    def samples(self) -> Axis:
        """An axis of all samples."""
        return ((SAMPLES, self.batch),) if self.batch > 1 else ()

    @property
    def row(self) -> Axis:
        """An axis of all rows of a sample."""
        return ((ROWS, self.rows),)

    def _sizes(self) -> tuple[int, int]:
        """The numbers of samples and of rows."""
        sizes = set()
        for node in self.attention:
            q, v = static_dims(node.inputs[0]), static_dims(node.inputs[2])
            if len(q) != 4 or q[2] != v[2] or q[2] < 2:
                raise _stay(node, "has queries that are no rows [batch, heads, rows, size]")
            sizes.add((q[0], q[2]))
        if len(sizes) > 1:
            raise _stay(self.attention[-1], "has other numbers of rows than those before")
        return sizes.pop()

    def find(self, anything: bool) -> None:
        """Find the nodes that are computed for packed rows, and see that nothing reads others of
        their rows, but outputs, of which padded rows may be ``anything``."""
        biases = [v for node in self.attention for v in node.inputs[3:] if v is not None]
        masks = self._before([v for v in biases if not v.is_constant])
        if not masks:
            raise _stay(self.attention[0], "has no mask that a run gives")
        for node in self.attention:
            if not any(v is not None and _may_hide(v) for v in node.inputs[3:]):
                raise _stay(node, "sees all rows")
        wanted = self._before([v for n in self.attention for v in n.inputs[:3] if v is not None])
        padded = {*masks}
        while early := self._find_among(wanted, padded, masks):
            padded |= early
        self._guard_attention()
        for value in [v for node in self.packed for v in node.outputs if v is not None]:
            for reader in self.readers.get(value, ()):
                if reader not in self.packed:
                    self._check_reader(value, reader, anything)

    def _guard_attention(self) -> None:
        """Let the biases of attention tell which rows matter: those of each, which layers mostly
        share."""
        for number, own in enumerate({tuple(node.inputs[3:]): None for node in self.attention}):
            for bias in own:
                if bias is not None and _may_hide(bias):
                    self.guards[bias, number] = None

    def _find_among(
        self, wanted: Container[Node], padded: Container[Node], masks: Container[Node]
    ) -> set[Node]:
        """Find nodes to pack, behind attention or ``wanted`` before it, and not to stay ``padded``.
        Returns those before attention that others read as they are."""
        for found in (self.axes, self.packed, self._factors, self._why):
            found.clear()
        behind: set[Value] = set()
        for node in self.graph.nodes:
            reads = all_reads(node)
            late = node.op is ATTENTION or not behind.isdisjoint(reads)
            behind.update([v for v in node.outputs if v is not None and late])
            if node in masks and late:
                raise _stay(node, "computes a mask of what attention has made")
            if node in padded or not (node in wanted or any(v in self.axes for v in reads)):
                continue
            try:
                self._pack(node)
            except Stays as reason:
                self._why[node] = reason
                if node.op is ATTENTION:
                    raise self._reason(node) from None
        early = [(node, node.outputs[0]) for node in self.packed]
        return {
            node
            for node, y in early
            if y is not None and y not in behind
            if any(reader not in self.packed for reader in self.readers.get(y, ()))
        }

    def _pack(self, node: Node) -> None:
        """Note how a node is computed for packed rows. Raises ``Stays``."""
        inputs = [None if v is None else self.axes.get(v) for v in node.inputs]
        if not any(inputs):
            inputs = [self._seed(value) for value in node.inputs]
        if not any(inputs):
            return
        found = packed_form(node, inputs)
        if any(node.outputs[len(found.outputs) :]):
            raise Stays("has other outputs")
        self.packed[node] = found
        for value, axes in zip(node.outputs, found.outputs, strict=False):
            if value is not None:
                self.axes[value] = axes
        self._note_factors(node)

    def _seed(self, value: Value | None) -> Axes | None:
        """The axes of a padded value with as many samples and rows. What it is need not be known:
        row j of sample i is what is read as that."""
        dims = (value.shape if value is not None and not value.is_constant else None) or ()
        rest = [features(n) for n in dims[2:] if isinstance(n, int)]
        if dims[:2] != (self.batch, self.rows) or len(rest) < len(dims) - 2:
            return None
        return (self.samples, self.row, *rest)

    def _reason(self, node: Node) -> RowsStay:
        """Why attention cannot be packed: what is in the way before it, if anything."""
        before = self._before([v for v in node.inputs[:3] if v is not None])
        first = next((n for n in self.graph.nodes if n in before and n in self._why), node)
        return _stay(first, self._why[first])

    @staticmethod
    def _before(values: Iterable[Value]) -> set[Node]:
        """The nodes that compute ``values``."""
        found: set[Node] = set()
        stack = [value.producer for value in values]
        while stack:
            node = stack.pop()
            if node is not None and node not in found:
                found.add(node)
                stack += [value.producer for value in all_reads(node)]
        return found

    # What padded rows may be read by.

    def _note_factors(self, node: Node) -> None:
        """Note what makes padded rows of the results of ``node`` 0."""
        y, inputs = node.outputs[0], [v for v in node.inputs if v is not None]
        known = [self._factors[v] for v in inputs if v in self._factors]
        name = node.op.full_name
        if name == "Mul" and y is not None:
            masks = [x for x in inputs if self._is_mask(x, self.axes[y])]
            known = [masks[:1]] if masks else known
        if y is None or not known:
            return
        if name == "Mul" or node.op.view or name in ("Cast", "Neg"):
            self._factors[y] = known[0]
        elif name in ("Add", "Sub") and len(known) == len(inputs):
            self._factors[y] = [factor for own in known for factor in own]

    def _is_mask(self, factor: Value, axes: Axes) -> bool:
        """Whether a run gives a factor of rows along these axes, one for each row at least."""
        dims = factor.shape or ()
        is_given = factor not in self.axes and not factor.is_constant
        fits = len(dims) == len(axes) and dims[1:2] == (self.rows,) and axes[1] == self.row
        return is_given and fits

    def _check_reader(self, value: Value, reader: Node | None, anything: bool) -> None:
        """See that padded rows of a packed value matter to none of its readers."""
        index = None if reader is None else self._index(reader, value)
        if value in self._factors:
            self.guards.update({(factor, FACTOR): None for factor in self._factors[value]})
        elif index is not None and reader is not None:
            self.guards[index, PAIRS if reader.op.full_name == "GatherND" else INDEX] = None
        elif reader is not None and self._reads_first(reader, value):
            self.first = True
        elif reader is not None:
            why = self._why.get(reader, "reads it")
            raise _stay(reader, f"{why}, and {value.name!r} has rows that pad")
        elif not anything:
            text = f"is output {value.name!r}, with rows that pad"
            raise _stay(value.producer, f"{text}, which dead_rows='any' leaves out")

    def _reads_first(self, node: Node, value: Value) -> bool:
        """Whether a node reads but the first row of each sample."""
        axes, operands = self.axes[value], [v and v.const for v in node.inputs[1:]]
        if node.inputs[0] is not value or self.row not in axes:
            return False
        at = axes.index(self.row)
        if node.op.full_name == "Gather":
            axis = normalize_axes([node.attrs.get("axis", 0)], len(axes))[0]
            return axis == at and operands[0] is not None and not operands[0].any()
        known = [x.reshape(-1).tolist() for x in operands[:3] if x is not None]
        if node.op.full_name != "Slice" or len(known) < 3:
            return False
        starts, ends, named = known
        bounds = zip(normalize_axes(named, len(axes)), starts, ends, strict=True)
        return any(axis == at and end - start == 1 for axis, start, end in bounds if not start)

    def _index(self, node: Node, value: Value) -> Value | None:
        """What tells which rows a node reads, one by one: their numbers in the batch, or pairs of
        samples and rows; None if it reads others."""
        axes, index = self.axes[value], node.inputs[1] if len(node.inputs) > 1 else None
        if node.inputs[0] is not value or index is None or index in self.axes or index.is_constant:
            return None
        if node.op.full_name == "Gather" and self.batch > 1 and axes[0] == self.samples + self.row:
            return index if node.attrs.get("axis", 0) in (0, -len(axes)) else None
        by_pairs = node.op.full_name == "GatherND" and not node.attrs.get("batch_dims", 0)
        pairs = by_pairs and axes[:2] == (self.samples, self.row)
        return index if pairs and static_dims(index)[-1:] == (2,) else None


@dataclass(eq=False)
class _Writer:
    """Writes the packed graph: ``nodes`` so far. ``values``: packed forms of values, of padded ones
    by the axes that they were packed along."""

    packing: _Packing
    nodes: list[Node] = field(default_factory=list)
    values: dict[Value | tuple[Value, Axes], Value] = field(default_factory=dict)

    def write(self) -> None:
        """Change the graph: what needs no packed row comes first, then which rows these are."""
        packing, graph = self.packing, self.packing.graph
        late: list[Node] = []
        behind: set[Value] = set()
        for node in graph.nodes:
            if node in packing.packed or not behind.isdisjoint(all_reads(node)):
                behind.update([value for value in node.outputs if value is not None])
                late.append(node)
            else:
                self.nodes.append(node)
        names = "ranges", "rows", "positions"
        self.ranges, self.rows, self.positions = [Value(f"packed/{name}") for name in names]
        sizes = {"batch": packing.batch, "rows": packing.rows, "first": int(packing.first)}
        attrs = {**sizes, "groups": [group for _, group in packing.guards]}
        guards, found = [v for v, _ in packing.guards], [self.ranges, self.rows, self.positions]
        self._add(packing.attention[0], LIVE_ROWS, guards, found, attrs)
        for node in late:
            if (own := packing.packed.get(node)) is None:
                self.nodes.append(node)
                continue
            self._pack(node, own)
            for value in node.outputs:
                readers = () if value is None else packing.readers.get(value, ())
                if value is not None and any(r not in packing.packed for r in readers):
                    self._unpack(node, value)
        graph.nodes = self.nodes

    def _add(
        self,
        beside: Node,
        op: Op,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Attrs,
    ) -> None:
        node = beside.derived(inputs, outputs, attrs, op=op)
        for value, type_ in zip_longest(outputs, node_types(node)):
            if value is not None and type_ is not None:
                value.type = type_
        self.nodes.append(node)

    def _moved(
        self, beside: Node, x: Value, name: str, y: Value | Sequence[int], at: int = 0
    ) -> Value:
        """The result of Gather along axis ``at``, or of Reshape."""
        other = y if isinstance(y, Value) else Value("packed/dims", const=np.array(y))
        result = Value(f"{x.name}/packed{len(self.nodes)}")
        attrs = {"axis": at} if name == "Gather" else {}
        self._add(beside, standard(name), [x, other], [result], attrs)
        return result

    def _pack(self, node: Node, found: Packed) -> None:
        """Add a node for packed rows."""
        inputs = [
            value if value is None or axes is None else self._packed(node, value, axes)
            for value, axes in zip(node.inputs, found.inputs, strict=False)
        ]
        op, attrs = node.op, node.attrs if found.attrs is None else found.attrs
        if found.constants:
            op = standard(found.op)
            inputs += [Value("packed/dims", const=const) for const in found.constants]
        elif found.op:
            op, inputs = PACKED_ATTENTION, [*inputs, self.ranges, *node.inputs[3:]]
        else:
            inputs += node.inputs[len(inputs) :]
        outputs = [None if v is None else Value(f"{v.name}/packed", v.type) for v in node.outputs]
        self.values.update({v: w for v, w in zip(node.outputs, outputs, strict=True) if v and w})
        self._add(node, op, inputs, outputs, attrs)

    def _packed(self, beside: Node, value: Value, axes: Axes) -> Value:
        """The packed form of a value."""
        if value in self.values:
            return self.values[value]
        key = value, axes
        if key not in self.values:
            self.values[key] = self._gathered(beside, value, axes)
        return self.values[key]

    def _gathered(self, beside: Node, value: Value, axes: Axes) -> Value:
        """The rows of a padded value, or of one that is the same for all samples."""
        dims, at = static_dims(value), place_of_rows(axes)
        if len(axes[at]) > 1:  # samples and rows on one axis
            return self._moved(beside, value, "Gather", self.rows, at)
        if not self.packing.samples or self.packing.samples not in axes:
            return self._moved(beside, value, "Gather", self.positions, at)
        first = axes.index(self.packing.samples)
        if first > at or prod(dims[first + 1 : at]) > 1:
            raise _stay(beside, "combines rows with others that are not behind their samples")
        merged = [*dims[:first], self.packing.batch * self.packing.rows, *dims[at + 1 :]]
        flat = self._moved(beside, value, "Reshape", merged)
        some = self._moved(beside, flat, "Gather", self.rows, first)
        target = [*dims[:first], *[1] * (at - first), -1, *dims[at + 1 :]]
        return self._moved(beside, some, "Reshape", target)

    def _unpack(self, node: Node, value: Value) -> None:
        """Bring a value back to the dims that it had, for those who read it as it was."""
        packing, dims, packed = self.packing, static_dims(value), self.values[value]
        axes, at = packing.axes[value], place_of_rows(packing.axes[value])
        samples, batch, rows = packing.samples, packing.batch, packing.rows
        # Samples and rows on one axis, or an axis of rows of a single sample.
        one = axes[at] == samples + packing.row and (batch > 1 or at == 0 or dims[at - 1] > 1)
        if not one and (axes[at] != packing.row or at == 0 or axes[at - 1] != samples):
            raise _stay(node, "has rows together with features, or not behind their samples")
        first = at if one else at - 1
        if one:
            packed = self._moved(node, packed, "Reshape", [*dims[:at], 1, -1, *dims[at + 1 :]])
        result = Value(f"{value.name}/padded") if one else value
        attrs = {"dims": [*dims[:first], batch, rows, *dims[at + 1 :]], "axis": first}
        self._add(node, UNPACK_ROWS, [packed, self.ranges], [result], attrs)
        if one:
            shape = Value("packed/dims", const=np.array(dims))
            self._add(node, standard("Reshape"), [result, shape], [value], {})
