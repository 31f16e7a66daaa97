"""Vectorization: add a leading samples axis to a graph, so that one run computes several samples.

::

    y = Relu(Add(x, w))     x, y [3, 4]     becomes     the same with x, y [samples, 3, 4]

Values that depend on no input with samples have no samples axis. Operations have rules
(``sample_rules``); a node without a rule becomes the body of a Scan over samples, so any graph of
tensors can be vectorized. All samples have one shape. The method is that of ``vmap`` in JAX.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count as counter

from penstock.analysis.type_inference import infer_types
from penstock.core.errors import RowsStay
from penstock.core.records import dataclass, field
from penstock.core.types import INT64, TensorType, Type
from penstock.ir.graph import Graph, Node, Value, all_reads, clone, embed, is_framed, sort
from penstock.ir.op import Role
from penstock.ops.onnx.control_flow import loop_carried
from penstock.ops.registry import standard
from penstock.passes.context import PassContext
from penstock.passes.dead_code import prune
from penstock.passes.pipeline import PASSES, STRUCTURE, run_passes
from penstock.passes.structure.sample_rules import NoRule, SampledNode, sampled_outputs

SAMPLES = "samples"
"""the symbolic name of the samples dim"""
_COUNT = "samples/count"


def add_samples(source: Graph, shared: Collection[str] = ()) -> Graph:
    """Return a copy of a graph with a first axis of samples on all inputs but ``shared`` ones, and
    on all outputs. Raises ``RowsStay`` for values other than tensors, and for side effects."""
    graph = clone(source)
    run_passes((*STRUCTURE, PASSES["fold_constants"]), graph, PassContext())
    if is_framed(graph) or graph.targets:
        raise RowsStay("the graph has TensorFlow frames, or side effects")
    sort(graph)
    infer_types(graph)
    inputs = [value for value in graph.inputs if value.name not in shared]
    if not inputs:
        raise RowsStay("no input has samples")
    adding = _Adding(Value(_COUNT, TensorType(INT64, (1,))))
    for value in inputs:
        adding.sampled[value] = Value(value.name, _with_samples(value.name, value.type))
    first = adding.sampled[inputs[0]]
    counted = Node(standard("Shape"), [first], [adding.count], {"end": 1})
    graph.inputs = [adding.sampled.get(value, value) for value in graph.inputs]
    names = [value.name for value in source.outputs]
    adding.rewrite(graph)
    graph.nodes.insert(0, counted)
    for i, (name, value) in enumerate(zip(names, graph.outputs, strict=True)):
        # An output may be an input, or another output.
        graph.outputs[i] = Value(f"{name}/out")
        graph.nodes.append(Node(standard("Identity"), [value], [graph.outputs[i]]))
    prune(graph)
    _rename(graph, names)
    infer_types(graph)
    return graph


def _rename(graph: Graph, names: Sequence[str]) -> None:
    """Give the outputs their names, which values without samples may also have."""
    taken = {value.name: value for node in graph.nodes for value in node.outputs if value}
    for name, output in zip(names, graph.outputs, strict=True):
        if name in taken:
            taken[name].name = f"{name}/one"
        output.name = name


def _with_samples(name: str, type_: Type) -> TensorType:
    if not isinstance(type_, TensorType) or type_.shape is None:
        raise RowsStay(f"{name!r} is {type_}, and only tensors of known rank have samples")
    return TensorType(type_.dtype, (SAMPLES, *type_.shape))


@dataclass(eq=False)
class _Adding:
    """State of the rewriting, in topological order. ``sampled`` maps values to their forms with
    samples; ``count`` is the number of samples."""

    count: Value
    sampled: dict[Value, Value] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=counter)

    def rewrite(self, graph: Graph, wanted: Collection[int] | None = None) -> None:
        """Rewrite a graph; outputs ``wanted``, by default all, get samples."""
        nodes: list[Node] = []
        for node in graph.nodes:
            nodes += self._rewritten(node)
        for i, output in enumerate(graph.outputs):
            if wanted is not None and i not in wanted:
                continue
            if output not in self.sampled:
                identity = Node(standard("Identity"), [output], [])
                spread = SampledNode(identity, [], [], self.count, self.numbers)
                self.sampled[output] = spread.repeated(output)
                nodes += spread.nodes
            graph.outputs[i] = self.sampled[output]
        graph.nodes = nodes

    def _rewritten(self, node: Node) -> list[Node]:
        own = [value for value in all_reads(node) if value in self.sampled]
        if not own:
            return [node]
        # Draws of random numbers per sample would differ from those of separate runs.
        if node.control_inputs or not all(inner.op.pure for inner in (node, *node.inner)):
            raise RowsStay(f"{node.label} has side effects, or draws random numbers")
        if node.op.full_name in ("Shape", "Size"):
            return self._of_one_shape(node)
        flags = [v is not None and v in self.sampled for v in node.inputs]
        if node.op.role is Role.IF and not flags[0]:
            return self._branches(node)
        if node.op.role is Role.LOOP and (carried := self._carried(node)) is not None:
            return self._loop(node, *carried)
        given = [None if v is None else self.sampled.get(v, v) for v in node.inputs]
        rewriting = SampledNode(node, given, flags, self.count, self.numbers)
        try:
            if node.graphs:
                raise NoRule("has graphs")
            outputs = sampled_outputs(rewriting)
        except NoRule:
            return [self._scan(node, list(dict.fromkeys(own)))]
        for old, new in zip(node.outputs, outputs, strict=False):
            if old is not None:
                new.name = f"{old.name}/{SAMPLES}"
                self.sampled[old] = new
        return rewriting.nodes

    def _of_one_shape(self, node: Node) -> list[Node]:
        """Return a Shape node for the shape of a sample, which all samples share."""
        (x,) = node.inputs
        assert x is not None
        # Only non-negative dim indices shift: negative ones count from the end.
        start, end = node.attrs.get("start", 0), node.attrs.get("end")
        if start < 0 or (end is not None and end < 0):
            assert x.shape is not None
            rank = len(x.shape)
            start = max(start + rank, 0) if start < 0 else start
            end = max(end + rank, 0) if end is not None and end < 0 else end
        attrs = {"start": start + 1} | ({} if end is None else {"end": end + 1})
        if node.op.name == "Shape":
            return [node.derived([self.sampled[x]], node.outputs, attrs)]
        dims = Value(f"{node.label}/dims")
        product = {"keepdims": 0}
        return [
            node.derived([self.sampled[x]], [dims], {"start": 1}, op=standard("Shape")),
            node.derived([dims], node.outputs, product, op=standard("ReduceProd")),
        ]

    def _branches(self, node: Node) -> list[Node]:
        """Return an If whose condition is shared by all samples."""
        # Each branch reads earlier values, but not those of the other branch.
        for _, branch in node.graphs:
            _Adding(self.count, {**self.sampled}, self.numbers).rewrite(branch)
        for i, old in enumerate(node.outputs):
            if old is not None:
                new = Value(f"{old.name}/{SAMPLES}")
                new.producer = node
                node.outputs[i] = self.sampled[old] = new
        return [node]

    def _carried(self, node: Node) -> tuple[set[Value], list[int]] | None:
        """Return the inputs of a Loop's body and the indices of its outputs that have samples, if
        all samples have the same trip count; else None."""
        body: Graph = node.attrs["body"]
        entering, leaving = loop_carried(node)
        if any(v in self.sampled for v in node.inputs[:2]):
            return None
        pairs = [*zip(node.inputs[entering], body.inputs[entering], strict=True)]
        inside = {own for value, own in pairs if value in self.sampled}
        while True:
            known = _behind(body.nodes, {*self.sampled, *inside})
            places = [i for i, value in enumerate(body.outputs) if value in known]
            more = {body.inputs[i + 1] for i in places if i and i < leaving.stop} - inside
            if not more:
                break
            inside |= more
        if 0 in places:
            return None
        own = {i for i, value in enumerate(body.inputs[entering], leaving.start) if value in inside}
        return inside, sorted({*places, *own})

    def _loop(self, node: Node, inside: set[Value], places: list[int]) -> list[Node]:
        """Return a Loop whose iterations compute all samples."""
        body: Graph = node.attrs["body"]
        leaving = loop_carried(node)[1]
        nodes: list[Node] = []
        for i, own in enumerate(body.inputs):
            value = node.inputs[i]
            if own in inside:
                self.sampled[own] = Value(f"{own.name}/{SAMPLES}")
                body.inputs[i] = self.sampled[own]
            if value is None or (own not in inside and value not in self.sampled):
                continue
            if value not in self.sampled:
                writer = SampledNode(node, [value], [False], self.count, self.numbers)
                node.inputs[i] = writer.spread(0)
                nodes += writer.nodes
            else:
                node.inputs[i] = self.sampled[value]
        _Adding(self.count, {**self.sampled}, self.numbers).rewrite(body, places)
        nodes.append(node)
        for place in places:
            old = node.outputs[place - 1]
            if old is None:
                continue
            new = Value(f"{old.name}/{SAMPLES}")
            new.producer, node.outputs[place - 1] = node, new
            if place >= leaving.stop:
                # Scan outputs are stacked along an axis before that of samples.
                assert old.shape is not None
                perm = [1, 0, *range(2, len(old.shape) + 1)]
                writer = SampledNode(node, [], [], self.count, self.numbers)
                new = writer.add("Transpose", [new], {"perm": perm})
                nodes += writer.nodes
            self.sampled[old] = new
        return nodes

    def _scan(self, node: Node, own: list[Value]) -> Node:
        """Return a Scan of a node over samples: ``own`` are its inputs with samples."""
        results = [value for value in node.outputs if value is not None]
        if any(not isinstance(value.type, TensorType) for value in (*own, *results)):
            raise RowsStay(f"{node.label} has inputs or outputs that are not tensors")
        for output in results:
            output.producer = node
        inside = [Value(f"{value.name}/one", value.type) for value in own]
        # A value without samples is captured.
        nodes, made = embed(Graph(own, results, [node]), inside, "/one")
        body = Graph(inside, made, nodes, f"{node.label}/{SAMPLES}")
        outputs = [Value(f"{value.name}/{SAMPLES}") for value in results]
        self.sampled |= zip(results, outputs, strict=True)
        attrs = {"body": body, "num_scan_inputs": len(own)}
        inputs = [self.sampled[value] for value in own]
        return node.derived(inputs, outputs, attrs, op=standard("Scan"))


def _behind(nodes: Sequence[Node], known: set[Value]) -> set[Value]:
    """Return ``known`` and values computed from it, except shapes, which samples share."""
    found = {*known}
    for node in nodes:
        if node.op.full_name not in ("Shape", "Size") and not found.isdisjoint(all_reads(node)):
            found.update([value for value in node.outputs if value is not None])
    return found
