"""Continuous batching: one decoder graph with paged caches for the rows of many requests.

A decoder computes the next rows of each sample of a batch, and returns caches that are longer by
these rows. All samples of a batch have the same number of rows and of past positions. But rows
depend on each other only in attention (``row_rules``), and there only on rows of the same request.
So rows of any requests, of prompts or single tokens, can be computed together::

    x = Gather(table, ids)               [1, rows]     rows of all requests
    q, k, v = x u, x v, x w
    y = Attention(q, Concat(past, k), Concat(past_v, v), causal)
                                         becomes  y = PagedAttention(q, k, v, pool, runs, pages)
    logits = Gather(y, read) h           for the rows that are read

Masks and positions are recognized by their values in trial runs (``step_probes``), independently of
how an exporter writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.core.errors import PenstockError, RowsStay
from penstock.core.records import dataclass, field
from penstock.core.types import INT64, Shape, TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.joined_steps import POSITIONS, READ, WRITTEN, JoinedSteps
from penstock.ops.internal.pages import PAGED_ATTENTION
from penstock.ops.registry import standard
from penstock.passes.context import PassContext
from penstock.passes.dead_code import prune
from penstock.passes.lowering.lift_heads import lift_heads
from penstock.passes.lowering.page_attention import PageAttention, stays
from penstock.passes.lowering.position_limit import position_limit
from penstock.passes.lowering.recognize_attention import RecognizeAttention
from penstock.passes.lowering.row_rules import ROWS as ROW_AXIS
from penstock.passes.lowering.row_rules import (
    Axes,
    Packed,
    Stays,
    features,
    packed_form,
    place_of_rows,
    static_dims,
)
from penstock.passes.lowering.step_probes import (
    PAST,
    ROWS,
    Probe,
    Probes,
    Roles,
    is_mask,
    one_by_one,
    prepared,
    roles_of,
    sample_graph,
    with_sizes_of_heads,
)
from penstock.passes.pipeline import PASSES, optimize, run_passes

_COMPARED = 3
"""numbers of rows and past positions for which constants are compared: two small and one large"""


def join_steps(source: Graph) -> tuple[Graph, JoinedSteps]:
    """Return the graph of a decoder's joined steps, and its interface. Raises ``RowsStay`` with the
    reason if the steps cannot be joined."""
    graph = with_sizes_of_heads(source)
    roles = roles_of(graph)
    if not roles.caches:
        raise RowsStay("the graph has no inputs for caches")
    graph = prepared(graph)
    try:
        return _joined(source, graph, roles, Probes(graph, roles, whole=False))
    except RowsStay:
        return _joined(source, graph, roles, Probes(graph, roles, whole=True))


def _joined(
    original: Graph, source: Graph, roles: Roles, probes: Probes
) -> tuple[Graph, JoinedSteps]:
    names = [value.name for value in original.outputs]
    types = {value.name: value.type for value in original.inputs}
    graph = _with_free_positions(source, roles, probes.near)
    try:
        run_passes((PASSES["fold_constants"],), graph, PassContext())
        infer_types(graph)
    except PenstockError as error:
        raise one_by_one(error) from error
    lift_heads(graph)  # before reshapes are moved into biases, which renames them
    optimize(graph)
    RecognizeAttention(always=True).run(graph, PassContext(fusion=_Everything()))
    joining = PageAttention(graph, names, roles, probes)
    joining.replace_attention()
    mask = _mask_of(graph, roles) if True in joining.masked else None
    presents = {cache.present for cache in joining.caches}
    kept = [(v, name) for v, name in zip(graph.outputs, names, strict=True) if name not in presents]
    graph.outputs, names = [v for v, _ in kept], [name for _, name in kept]
    prune(graph)
    rows = [v for v in graph.inputs if v.name in (*roles.rows, POSITIONS)]
    axes = _Opening(graph, rows).run()
    _check_constants(graph, source, probes)
    for name, value in zip(names, graph.outputs, strict=True):
        value.name = name
    _check_fixed(graph, roles)
    left = (*roles.caches, *roles.fixed)
    graph.inputs = [v for v in graph.inputs if v.name not in left]
    steps = JoinedSteps(
        {name: types[name] for name in roles.rows},
        dict(zip(names, axes, strict=True)),
        joining.caches,
        max(joining.page_size, joining.fixed_size),
        {name: types[name] for name in roles.fixed},
        [*joining.fixed.values()],
        mask,
        *(position_limit(graph) or (None, "")),
    )
    return graph, steps


def _mask_of(graph: Graph, roles: Roles) -> str:
    """Return the name of the encoder output's mask. Raises ``RowsStay`` if there are several."""
    masks = [v.name for v in graph.inputs if v.name in roles.fixed and is_mask(v)]
    if len(masks) != 1:
        raise RowsStay(f"one input must be the mask of cross attention; candidates are {masks}")
    return masks[0]


def _check_fixed(graph: Graph, roles: Roles) -> None:
    """Raise ``RowsStay`` unless inputs fixed over all steps are read by attention alone."""
    readers = readers_of(graph)
    for value in graph.inputs:
        if value.name in roles.fixed and (fixed_readers := readers.get(value)):
            label = "an output" if fixed_readers[0] is None else fixed_readers[0].label
            raise RowsStay(f"{label} reads {value.name!r}, which only cross attention may read")


def _check_constants(graph: Graph, source: Graph, probes: Probes) -> None:
    """Raise ``RowsStay`` unless constants folded from lengths are equal for any numbers of rows and
    positions: models may scale scores by a length, or change the rotary embedding beyond one."""
    given = {v for node in source.walk() for v in node.inputs if v is not None and v.is_constant}
    known = {id(value.peek) for value in given}
    computed: dict[str, Value] = {}
    for node in graph.nodes:
        for value in node.inputs:
            if value is None or value.const is None or id(value.const) in known:
                continue
            if not value.name.startswith(WRITTEN):
                computed[value.name] = value
    if not computed:
        return
    wide = (p for p in probes.far if p.values.keys() >= computed.keys())
    compared = [probe.values for probe in (*probes.near, *islice(wide, 1))]
    if len(compared) < _COMPARED:  # folding alone left some of them: optimize the graph instead
        compared = [*islice(probes.optimized(), _COMPARED - 1)]
    for name, value in computed.items():
        for values in compared:
            other, own = values.get(name), value.const
            if other is None or own is None or not np.array_equal(other, own, equal_nan=True):
                raise RowsStay(f"{name!r} may depend on the number of rows or positions")


class _Everything:
    """Policy that accepts every attention node at any cost: requests share all other nodes."""

    def has_kernel(self, node: Node) -> bool:
        return True

    def is_faster(self, node: Node, pieces: Sequence[Node] | None = None) -> bool:
        return True


def _with_free_positions(source: Graph, roles: Roles, near: Sequence[Probe]) -> Graph:
    """Return a copy of a graph traced for fixed numbers of rows and past positions, which reads the
    positions of its rows from an input."""
    graph = sample_graph(source, roles, ROWS, PAST)
    positions = Value(POSITIONS, TensorType(INT64, (1, ROWS)))
    new: dict[Value, Value] = {}
    nodes: list[Node] = []
    for fed in graph.inputs:
        if fed.name in roles.positions:
            new[fed] = _positions(positions, fed.name, fed.shape or (), fed.dtype, nodes)
    for node in graph.nodes:
        # Some exporters slice position tables to the rows, others gather from them.
        table = _slice_of_table(node, near)
        if table is not None and node.outputs[0] is not None:
            axis, offset = table
            new[node.outputs[0]] = _gathered(node, axis, offset, positions, nodes)
        for value in node.outputs:
            if value is None:
                continue
            first, *others = [probe.offset_of(value.name) for probe in near]
            if first is None or others != [first] * len(others):
                continue
            given = near[0].values[value.name]
            new[value] = _positions(positions, value.name, given.shape, given.dtype, nodes, first)
    for node in graph.nodes:
        node.inputs = [None if v is None else new.get(v, v) for v in node.inputs]
    graph.nodes[:0] = nodes
    graph.inputs = [v for v in graph.inputs if v not in new] + [positions]
    return graph


def _slice_of_table(node: Node, near: Sequence[Probe]) -> tuple[int, int] | None:
    """Return the axis of a Slice of a constant with one entry per row, and its start relative to
    the first row's position; None for other nodes."""
    table, y = (node.const(0), node.outputs[0]) if node.op.full_name == "Slice" else (None, None)
    if table is None or y is None:
        return None
    begin, offsets = node.inputs[1], set()
    for probe in near:
        known = None if begin is None else probe.values.get(begin.name)
        if known is None or known.size != 1 or y.name not in probe.values:
            return None
        offsets.add(int(known.reshape(())) - probe.past)
    offset = offsets.pop()
    # With two offsets it depends on more than positions. Its result shows which axis it slices.
    for axis in range(0 if offsets else table.ndim):
        pairs = [
            (p.values[y.name], table.take(p.positions + offset, axis, None, "clip")) for p in near
        ]
        if all(np.array_equal(own, places) for own, places in pairs):
            return axis, offset
    return None


def _gathered(node: Node, axis: int, offset: int, positions: Value, nodes: list[Node]) -> Value:
    """Return a Gather of a constant's entries for each row; its nodes are appended to ``nodes``."""
    y = node.outputs[0]
    assert y is not None
    index = _positions(positions, y.name, (ROWS,), INT64, nodes, offset)
    result = Value(f"{y.name}/gathered", y.type)
    nodes.append(
        node.derived([node.inputs[0], index], [result], {"axis": axis}, op=standard("Gather"))
    )
    return result


def _positions(
    positions: Value,
    name: str,
    dims: Shape,
    dtype: np.dtype | None,
    nodes: list[Node],
    offset: int = 0,
) -> Value:
    """Return ``positions`` plus an offset, reshaped and cast; nodes go to ``nodes``."""
    shaped = positions
    if offset:
        shaped = Value(f"{name}/moved", positions.type)
        behind = Value(f"{WRITTEN}offset", const=np.array(offset))
        nodes.append(Node(standard("Add"), [positions, behind], [shaped]))
    if dims != positions.shape:
        wanted = Value(f"{WRITTEN}dims", const=np.array(dims, np.int64))
        reshaped = Value(f"{name}/given", TensorType(INT64, dims))
        nodes.append(Node(standard("Reshape"), [shaped, wanted], [reshaped]))
        shaped = reshaped
    if dtype in (None, INT64):
        return shaped
    result = Value(f"{name}/{dtype}", TensorType(dtype, dims))
    nodes.append(Node(standard("Cast"), [shaped], [result], {"to": element_number(str(dtype))}))
    return result


@dataclass(eq=False)
class _Opening:
    """Rewrites a ``graph`` for ``ROWS`` rows to one for any number of rows, starting from the
    ``inputs`` with rows. ``axes``: the axes of values with rows."""

    graph: Graph
    inputs: Sequence[Value]
    axes: dict[Value, Axes] = field(default_factory=dict)

    def run(self) -> list[int]:
        """Rewrite the graph; return the row axis of each output."""
        graph = self.graph
        for value in self.inputs:
            rest = [features(n) for n in static_dims(value)[2:]]
            self.axes[value] = ((), ((ROW_AXIS, ROWS),), *rest)
        graph.nodes = [self._opened(node) for node in graph.nodes]
        outputs = [*graph.outputs]
        self._read_some()
        for value in self.inputs:
            assert value.shape is not None
            value.type = TensorType(value.dtype, (1, "rows", *value.shape[2:]))
        return [place_of_rows(self.axes[output]) for output in outputs]

    def _opened(self, node: Node) -> Node:
        """Return the form of a node for any number of rows."""
        inputs = [None if v is None else self.axes.get(v) for v in node.inputs]
        if not any(inputs):
            return node
        try:
            paged = node.op is PAGED_ATTENTION
            form = _of_pages(node, inputs) if paged else packed_form(node, inputs)
        except Stays as reason:
            raise stays(node, str(reason)) from None
        for value, own, wanted in zip(node.inputs, inputs, form.inputs, strict=False):
            if wanted is not None and own is None and value is not None:
                raise stays(
                    node,
                    f"reads {value.name!r}, whose shape or contents depend on the number of rows",
                )
        if any(node.outputs[len(form.outputs) :]):
            raise stays(node, "has several outputs that are read")
        for value, axes in zip(node.outputs, form.outputs, strict=False):
            if value is not None:
                self.axes[value] = axes
        op, read = node.op, [*node.inputs]
        if form.constants:
            op = standard(form.op)
            constants = [Value(f"{WRITTEN}dims", const=const) for const in form.constants]
            read = [*node.inputs[: len(form.inputs)], *constants]
        return node.derived(read, node.outputs, form.attrs, op=op)

    def _read_some(self) -> None:
        """Compute outputs for the rows that are read, gathered as early as possible."""
        graph, readers = self.graph, readers_of(self.graph)
        read = Value(READ, TensorType(INT64, ("read",)))
        graph.inputs.append(read)
        for i, output in enumerate(graph.outputs):
            if output not in self.axes:
                raise RowsStay(f"output {output.name!r} has no axis of rows")
            value = output
            while (node := value.producer) is not None and node.op is not PAGED_ATTENTION:
                before = {v for v in node.inputs if v is not None and v in self.axes}
                if len(before) != 1 or readers.get(first := before.pop()) != [node]:
                    break
                value = first
            some = Value(f"{value.name}/read")
            gather = Node(
                standard("Gather"), [value, read], [some], {"axis": place_of_rows(self.axes[value])}
            )
            if value is output:
                graph.outputs[i] = some
                graph.nodes.append(gather)
                continue
            (reader,) = readers[value]
            assert reader is not None
            reader.inputs = [some if v is value else v for v in reader.inputs]
            graph.nodes.insert(graph.nodes.index(reader), gather)


def _of_pages(node: Node, inputs: Sequence[Axes | None]) -> Packed:
    """Return the form of a PagedAttention for any number of rows."""
    q, k, v = inputs[:3]
    if q is not None and node.inputs[1] is None and q[2] == ((ROW_AXIS, ROWS),):
        return Packed([(*q[:3], features(node.attrs["value_size"]))], inputs)
    if q is None or k is None or v is None or not q[2] == k[2] == v[2] == ((ROW_AXIS, ROWS),):
        raise Stays("has queries, keys or values whose axis of rows is unknown")
    return Packed([(*q[:3], v[3])], inputs)
