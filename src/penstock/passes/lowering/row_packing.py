"""Analysis for ``pack_rows``: which nodes may be computed for packed rows alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from math import prod

from penstock.core.errors import RowsStay
from penstock.core.records import cached_property
from penstock.core.types import is_static
from penstock.ir.graph import Graph, Node, Readers, Value, all_reads, readers_of
from penstock.ops.common.shape_rules import normalize_axes
from penstock.ops.internal.attention import ATTENTION
from penstock.ops.internal.packed import INDEX, LOWEST, PAIRS
from penstock.passes.lowering.known_rows import KnownRows, known_result
from penstock.passes.lowering.padded_attention import Padded, given_terms, has_rows, padded_form
from penstock.passes.lowering.recognize_attention import BiasSum, ScoreTerm
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Axes,
    Axis,
    Packed,
    Stays,
    are_features,
    axis_names,
    features,
    packed_form,
    place_of_rows,
    repeats,
    static_dims,
    without_samples,
)
from penstock.passes.rewrite import nodes_before


def _may_hide(bias: Value) -> bool:
    """Whether a bias may be a padding mask: a constant mostly encodes relative positions."""
    return bias.const is None or not bool((bias.const > LOWEST).all())


def _sizes(node: Node) -> tuple[int, int] | None:
    """Return the numbers of samples and rows of attention, or of a Softmax of its scores [samples,
    heads, rows, rows]; None for other nodes, and for attention to other rows than the queries'."""
    if node.op is not ATTENTION and node.op.full_name != "Softmax":
        return None
    x, values = node.inputs[0], node.input(2)
    dims = x.dims if x is not None and is_static(x.type) else ()
    if node.op is ATTENTION:
        known = values is not None and is_static(values.type)
        rows = values.dims[2:3] if values is not None and known else ()
        dims = (*dims[:3], *rows) if len(dims) == 4 else ()
    return (dims[0], dims[2]) if len(dims) == 4 and dims[2] == dims[3] > 1 else None


def row_sizes(graph: Graph) -> list[tuple[int, int]]:
    """Return the numbers of samples and rows of all attention of a graph, the largest first. Raises
    ``RowsStay`` if it has none."""
    nodes = [] if any(inner is not graph for inner in graph.graphs()) else graph.nodes
    sizes = {_sizes(node) for node in nodes} - {None}
    if not sizes:
        odd = next((node for node in nodes if node.op is ATTENTION), None)
        raise _stay(
            odd,
            "has queries that are not [batch, heads, rows, size] with the rows of its keys"
            if odd is not None
            else "the graph has no attention, or has control flow",
        )
    return sorted([own for own in sizes if own is not None], key=prod, reverse=True)


def _adds(node: Node) -> bool:
    """Whether a node may apply a mask to scores."""
    return node.op.full_name in ("Add", "Where")


def _multiplies(node: Node) -> bool:
    """Whether a node is a matrix product."""
    return "MatMul" in node.op.name or node.op.name in ("Einsum", "Gemm")


def _stay(node: Node | None, reason: object) -> RowsStay:
    return RowsStay(str(reason) if node is None else f"{node.label} {reason}")


class RowPacking:
    """The part of a graph that is computed for packed rows. ``axes``: those of packed values."""

    def __init__(self, graph: Graph, sizes: tuple[int, int], *, reproducible: bool = False) -> None:
        self.graph, self.reproducible = graph, reproducible
        self.batch, self.rows = sizes
        self.axes: dict[Value, Axes] = {}
        self.packed: dict[Node, Packed] = {}
        self.padded: dict[Value, Padded] = {}
        """values of attention computed for all rows, unpacked"""
        self.repacked: set[Value] = set()
        """results of such attention that are packed again"""
        self.in_place: set[Node] = set()
        """the nodes of such attention"""
        self.guards: dict[tuple[Value, int], None] = {}
        """values that determine the live rows, each with its index in the ``groups`` of LiveRows"""
        self.first = False
        self.known: dict[Value, KnownRows] = {}
        """packed values whose elements in padding rows are known"""
        self._why: dict[Node, Stays] = {}
        self._hiding: dict[Node, Sequence[ScoreTerm]] = {}  # the masks of unpacked attention
        self.bias_nodes: list[Node] = []
        """nodes that sum the biases of such attention"""
        own = [node for node in graph.nodes if _sizes(node) == sizes]
        self.attention = [node for node in own if node.op is ATTENTION]
        self.scores = [node for node in own if node.op is not ATTENTION]
        """each Softmax of masked scores in unfused attention"""
        self.terms: set[Value] = set()
        """masks: biases of scores, and conditions"""
        self.masks: set[Node] = set()
        """the nodes that compute these"""
        self.sums_scores = False
        """whether some attention is unfused, or adds row-dependent terms to its scores"""

    @cached_property
    def readers(self) -> Readers:
        """The nodes that read each value; None for an output of the graph."""
        return readers_of(self.graph)

    @property
    def samples(self) -> Axis:
        """The axis of all samples."""
        return ((SAMPLES, self.batch),) if self.batch > 1 else ()

    @property
    def row(self) -> Axis:
        """The axis of all rows of a sample."""
        return ((ROWS, self.rows),)

    def find(self, anything: bool) -> None:
        """Find the nodes that are computed for packed rows. Raise ``RowsStay`` if anything reads
        their padding rows, except outputs if these may be ``anything``."""
        self.masks = self._find_masks()
        for node in self.attention:
            if not any(v is not None and _may_hide(v) for v in node.inputs[3:]):
                raise _stay(node, "has no mask: its rows see all rows")
        read = [node.inputs[:3] for node in self.attention] + [n.inputs for n in self.scores]
        wanted = nodes_before([v for inputs in read for v in inputs if v is not None])
        whole = self.masks | self._conditions()
        while early := self._find_among(wanted, whole):
            whole |= early
        if not self.attention and not self._hiding:
            raise _stay(self.scores[0], "does not depend on rows that can be packed")
        self._guard_attention()
        for reader in self.graph.nodes:
            if reader not in self.packed and reader not in self.in_place:
                for value in dict.fromkeys(all_reads(reader)):
                    if value in self.axes or value in self.padded:
                        self._check_reader(value, reader, anything)
        for value in self.graph.outputs:
            if value in self.axes or value in self.padded:
                self._check_reader(value, None, anything)
        # The live rows must be known before anything is packed.
        late = self._behind(lambda node: node in self.packed or node in self.in_place)
        for guard, _ in self.guards:
            if guard in late:
                raise _stay(guard.producer, "computes the mask from the rows that it hides")

    def refuse_all_rows(self) -> None:
        """Raise ``RowsStay`` if attention is computed for all rows: its rounding depends on their
        number, and on packing."""
        for node in self.graph.nodes:
            if node in self.in_place:
                raise _stay(
                    node,
                    "belongs to attention that was not fused into one node (reproducible=True)",
                )

    def _find_masks(self) -> set[Node]:
        """Return the nodes that compute masks."""
        biases = [v for node in self.attention for v in node.inputs[3:] if v is not None]
        late = self._behind(lambda node: node.op is ATTENTION or node in self.scores)
        products = late | self._behind(_multiplies)
        # A mask may also be a product of masks; other additive terms are computed from the sources
        # of queries and keys, or from earlier attention.
        before = nodes_before([v for n in self.attention for v in n.inputs[:3] if v is not None])
        shared = self._behind(lambda node: node in before and _multiplies(node))
        self.sums_scores = not (late | shared).isdisjoint(biases)
        if self.sums_scores:  # additive terms depend on rows
            biases = [term for bias in biases for term in given_terms(bias, products)]
        own = {node: given_terms(node.inputs[0], products) for node in self.scores}
        self.scores = [node for node in own if any(not v.is_constant for v in own[node])]
        biases += [v for node in self.scores for v in own[node]]
        self.sums_scores |= bool(self.scores)
        self.terms = {v for v in biases if not v.is_constant}
        if not self.terms:
            raise _stay(
                next(iter([*self.attention, *own])),
                "has only constant masks, so that a run cannot hide rows",
            )
        return nodes_before(self.terms)

    def _behind(self, starts: Callable[[Node], bool]) -> set[Value]:
        """Return the values that depend on the outputs of some nodes."""
        values: set[Value] = set()
        for node in self.graph.nodes:
            if starts(node) or not values.isdisjoint(all_reads(node)):
                values.update([value for value in node.outputs if value is not None])
        return values

    def _conditions(self) -> set[Node]:
        """Return the nodes that compute conditions before any product: these may replace padding
        rows, so they are computed for all rows."""
        behind = self._behind(lambda node: _multiplies(node) or node.op is ATTENTION)
        chosen = [n.inputs[0] for n in self.graph.nodes if n.op.full_name == "Where"]
        return nodes_before([v for v in chosen if v is not None and v not in behind])

    def _guard_attention(self) -> None:
        """Let the biases of each attention, which layers mostly share, determine the live rows."""
        groups = {tuple(n.inputs[3:]): None for n in self.attention if n not in self._hiding}
        sums: dict[tuple[object, ...], Value] = {}
        for node, terms in self._hiding.items():
            groups[BiasSum(node, sums, self.bias_nodes, "mask").total(terms),] = None
        for number, own in enumerate(groups):
            for bias in own:
                if bias is not None and _may_hide(bias):
                    self.guards[bias, number] = None

    def _find_among(self, wanted: Container[Node], whole: Container[Node]) -> set[Node]:
        """Find nodes to pack: those after attention, and ``wanted`` ones before it, except those
        computed ``whole``. Return the nodes before attention that others read unpacked."""
        state = self.axes, self.padded, self.repacked, self.packed, self.in_place
        for found in (*state, self.known, self._why, self._hiding):
            found.clear()
        behind: set[Value] = set()
        for node in self.graph.nodes:
            reads = all_reads(node)
            late = node.op is ATTENTION or node in self.scores or not behind.isdisjoint(reads)
            behind.update([v for v in node.outputs if v is not None and late])
            known = any(v in self.axes or v in self.padded for v in reads)
            if node in whole or not (node in wanted or known):
                continue
            try:
                self._find_form(node)
            except Stays as reason:
                self._why[node] = reason
                if node.op is ATTENTION:
                    raise self._reason(node) from None
        proven = {*self.packed, *self.in_place}
        early = [(node, node.outputs[0]) for node in proven]
        return {
            node
            for node, y in early
            if y is not None and y not in behind
            if any(reader not in proven for reader in self.readers.get(y, ()))
        }

    def _find_form(self, node: Node) -> None:
        """Record the form of a node: packed, or as part of unpacked attention. Raises ``Stays``."""
        known = [v for v in node.inputs if v in self.axes or v in self.padded]
        added = node.inputs[3:] if node.op is ATTENTION else ()
        in_place = any(v in self.padded for v in known) or any(v in known for v in added)
        # Unpacking zeros padding rows, which would drop the bias that masks them.
        in_place |= _adds(node) and bool(known) and not self.terms.isdisjoint(all_reads(node))
        if in_place and self.sums_scores:
            self._keep_in_place(node)
            return
        try:
            self._pack(node)
        except Stays as reason:
            # A reader of known padding rows needs no proof: its input is unchanged.
            if not self.sums_scores or all(v in self.known for v in known):
                raise
            try:
                self._keep_in_place(node)
            except Stays:
                raise reason from None

    def _pack(self, node: Node) -> None:
        """Record a node's packed form. Raises ``Stays``."""
        inputs = [None if v is None else self.axes.get(v) for v in node.inputs]
        if not any(inputs):
            inputs = [self._seed(value) for value in node.inputs]
        if not any(inputs):
            return
        form = packed_form(node, inputs)
        if any(node.outputs[len(form.outputs) :]):
            raise Stays("has several outputs that are read")
        for value, axes in zip(node.inputs, form.inputs, strict=False):
            if value is not None and axes is not None and value not in self.axes:
                self._check_gathered(value, axes)
        self.packed[node] = form
        for value, axes in zip(node.outputs, form.outputs, strict=False):
            if value is not None:
                self.axes[value] = axes
        y = node.outputs[0]
        if y is not None:
            axes = self.axes[y]
            found = known_result(
                node,
                self.axes,
                self.known,
                lambda x: self._is_mask(x, axes),
                exact=self.reproducible,
            )
            if found is not None:
                self.known.update({value: found for value in node.outputs if value is not None})

    def _check_gathered(self, value: Value, axes: Axes) -> None:
        """Raise ``Stays`` for a value whose rows cannot be gathered by index."""
        if not self.are_gathered(value, axes) and not self.are_repeated(value, axes):
            raise Stays("combines rows with a value that cannot be gathered by row")

    def are_gathered(self, value: Value, axes: Axes) -> bool:
        """Whether rows are gathered by index in the batch, or by position if samples share them."""
        names = axis_names(axes)
        at = place_of_rows(axes) if ROWS in names else None
        if at is None or SAMPLES not in names:  # shared by all samples, or a single one
            return at is not None and axes[at] == self.row
        if axes[at] == self.samples + self.row:
            return True
        first = axes.index(self.samples) if self.samples in axes else at
        between = static_dims(value)[first + 1 : at]
        return axes[at] == self.row and first < at and prod(between) == 1

    def are_repeated(self, value: Value, axes: Axes) -> bool:
        """Whether a value is equal for all samples, which come first along its first axis."""
        one = without_samples(axes)
        if self.batch == 1 or axes[0][:1] != self.samples or not repeats(value, self.batch):
            return False
        return ROWS not in axis_names(one) or self.are_gathered(value, one)

    def _keep_in_place(self, node: Node) -> None:
        """Record a node's form for unpacked rows. Raises ``Stays``."""
        inputs = [
            Padded(self.axes[v]) if v in self.axes else self.padded.get(v) if v else None
            for v in node.inputs
        ]
        result, terms = padded_form(node, inputs, self.samples, self.row)
        if not nodes_before([term.operand for term in terms]) <= self.masks:
            raise Stays("uses a mask that is computed from the rows")
        self.in_place.add(node)
        if terms:
            self._hiding[node] = terms
        axes, y = result.axes, node.outputs[0]
        plain = are_features(axes[2:])
        # A value per sample depends on live rows only, and is unchanged.
        if y is None or not has_rows(axes):
            return
        # Nothing is packed again before a Softmax, which reads it unpacked.
        if result.weighed and plain and axes[:2] == (self.samples, self.row):
            self.axes[y] = axes
            self.repacked.add(y)
        else:
            self.padded[y] = result

    def _seed(self, value: Value | None) -> Axes | None:
        """Return the axes of a padded value with the batch's numbers of samples and rows. Its
        origin is irrelevant: element [i, j] is read as row j of sample i."""
        dims = (value.shape if value is not None and not value.is_constant else None) or ()
        rest = [features(n) for n in dims[2:] if isinstance(n, int)]
        if dims[:2] != (self.batch, self.rows) or len(rest) < len(dims) - 2:
            return None
        return (self.samples, self.row, *rest)

    def _reason(self, node: Node) -> RowsStay:
        """Return the reason why attention cannot be packed: that of an earlier node, if any."""
        before = nodes_before([v for v in node.inputs[:3] if v is not None])
        first = next((n for n in self.graph.nodes if n in before and n in self._why), node)
        return _stay(first, self._why[first])

    # Nodes that may read padded rows.

    def _is_mask(self, factor: Value, axes: Axes) -> bool:
        """Whether a factor is computed at run time, with an element per row at least."""
        dims = factor.shape or ()
        is_given = factor not in self.axes and not factor.is_constant
        fits = len(dims) == len(axes) and dims[1:2] == (self.rows,) and axes[1] == self.row
        return is_given and fits

    def _check_reader(self, value: Value, reader: Node | None, anything: bool) -> None:
        """Raise ``RowsStay`` if a reader of a packed value uses its padding rows."""
        index = None if reader is None or value in self.padded else self._index(reader, value)
        if value in self.known:
            self.guards.update(dict.fromkeys(self.known[value].guards))
        elif index is not None and reader is not None:
            self.guards[index, PAIRS if reader.op.full_name == "GatherND" else INDEX] = None
        elif value in self.padded and reader is None:
            raise _stay(
                value.producer,
                f"computes output {value.name!r}, attention scores or weights that include "
                "padding rows",
            )
        elif reader is not None and value in self.axes and self._reads_first(reader, value):
            self.first = True
        elif reader is not None:
            why = self._why.get(reader, "reads it")
            raise _stay(reader, f"{why}, and {value.name!r} has padding rows")
        elif not anything:
            text = f"computes output {value.name!r}, which includes padding rows"
            raise _stay(value.producer, f"{text}; dead_rows='any' allows these to be 0")

    def _reads_first(self, node: Node, value: Value) -> bool:
        """Whether a node reads only the first row of each sample."""
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
        """Return the index of the rows that a node gathers: flat indices in the batch, or pairs of
        sample and row; None for other nodes."""
        axes, index = self.axes[value], node.inputs[1] if len(node.inputs) > 1 else None
        if node.inputs[0] is not value or index is None or index in self.axes or index.is_constant:
            return None
        if node.op.full_name == "Gather" and self.batch > 1 and axes[0] == self.samples + self.row:
            return index if node.attrs.get("axis", 0) in (0, -len(axes)) else None
        by_pairs = node.op.full_name == "GatherND" and not node.attrs.get("batch_dims", 0)
        pairs = by_pairs and axes[:2] == (self.samples, self.row)
        return index if pairs and (index.shape or ())[-1:] == (2,) else None
