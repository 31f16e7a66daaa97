"""Helpers of local passes: an in-order walk over nodes with replacement of values, pattern
matching, and a builder of the nodes that replace a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.ir.op import Op
from penstock.ops.registry import standard

Replacement = Sequence[Value | None] | None
Visit = Callable[[Node, Value, Value], Replacement | bool]
Parts = Callable[[Node], Sequence[Node] | None]


def forward(graph: Graph, visits: Mapping[str, Visit], outer: Substitution | None = None) -> bool:
    """Call the visitor of its operation, by full name, for each node that has one and has no
    control inputs, nested graphs first, with its first input and its first output; a node that
    leaves one of these out stays. Return whether anything changed.

    A visitor returns a value for each of the node's outputs, which replaces every later use of that
    output, and the node is dropped; or ``None`` or ``False`` to keep the node; or ``True`` if it
    changed the node in place. When a node is visited, replacements have already been applied to its
    inputs. ``outer`` is the substitution of the graph around this one.
    """
    substitution = Substitution() if outer is None else outer
    changed, kept = False, []
    for node in with_checkpoints(graph.nodes):
        if node.control_inputs or not substitution.replaced.isdisjoint(node.inputs):
            substitution.apply(node)
        for _, inner in node.graphs if node.nests else ():
            changed |= forward(inner, visits, substitution)
        visit = visits.get(node.op.full_name)
        values: Replacement | bool = None
        if visit is not None and not node.control_inputs and node.inputs and node.outputs:
            first, output = node.inputs[0], node.outputs[0]
            if first is not None and output is not None:
                values = visit(node, first, output)
        if values is None or isinstance(values, bool):
            kept.append(node)
            changed |= bool(values)
            continue
        changed = True
        substitution.drop(node)
        substitution.replace(node.outputs, values)
    graph.nodes = kept
    substitution.apply_outputs(graph)
    return changed


def replace_nodes(graph: Graph, parts: Mapping[str, Parts]) -> bool:
    """Replace each node, also in nested graphs, by the nodes that the function of its operation, by
    full name, returns, unless that is None or the node has control edges; return whether anything
    changed. The new nodes write the same outputs."""
    changed = False
    for inner in graph.graphs():
        nodes: list[Node] = []
        awaited = {source for node in inner.nodes for source in node.control_inputs}
        for node in with_checkpoints(inner.nodes):
            split = parts.get(node.op.full_name)
            waits = node.control_inputs or node in awaited
            replacement = None if split is None or waits else split(node)
            changed |= replacement is not None
            nodes += replacement or (node,)
        inner.nodes = nodes
    return changed


class Expansion:
    """Builder of the ``nodes`` that replace or precede a node, in order; ``add`` adds one."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []
        self._name = "".join([value.name for value in node.outputs if value is not None])
        self._numbers = count()

    def constant(self, array: Any) -> Value:
        """Return a new constant."""
        return Value(f"{self._name}/constant{next(self._numbers)}", const=np.asarray(array))

    def value(self, name: str, dims: Sequence[int], dtype: np.dtype) -> Value:
        """Return a new value of this type; ``name``, its operation, is for subclasses."""
        return Value(f"{self._name}/part{next(self._numbers)}", TensorType(dtype, tuple(dims)))

    def add(self, op: str | Op, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        """Add a node of an operation, a standard one by its name; return its only result, with the
        type that follows from the inputs."""
        return self.several(op, inputs, 1, **attrs)[0]

    def several(
        self, op: str | Op, inputs: Sequence[Value | None], count: int, **attrs: Any
    ) -> list[Value]:
        """``add`` for an operation with ``count`` results."""
        op = standard(op) if isinstance(op, str) else op
        results = [Value(f"{self._name}/part{next(self._numbers)}") for _ in range(count)]
        node = self.node.derived(inputs, results, attrs, op=op, name=results[0].name)
        for value, type_ in zip(results, node_types(node), strict=False):
            value.type = type_
        self.nodes.append(node)
        return results

    def emit(
        self,
        name: str,
        inputs: Sequence[Value | None],
        dims: Sequence[int],
        dtype: np.dtype,
        **attrs: Any,
    ) -> Value:
        """``add`` for a standard operation whose result has a type that is known."""
        value = self.value(name, dims, dtype)
        self.finish(name, inputs, value, **attrs)
        return value

    def finish(
        self, name: str, inputs: Sequence[Value | None], output: Value, **attrs: Any
    ) -> None:
        """Add a node that writes an existing value, such as an output of the old node."""
        op = standard(name)
        self.nodes.append(self.node.derived(inputs, [output], attrs, op=op, name=output.name))

    def transposed(self, value: Value, axes: Sequence[int]) -> Value:
        """Return a value transposed to this order of axes."""
        dims, dtype = dims_and_dtype(value)
        if list(axes) == list(range(len(dims))):
            return value
        moved = [dims[axis] for axis in axes]
        return self.emit("Transpose", [value], moved, dtype, perm=list(axes))

    def reshaped(self, value: Value, dims: Sequence[int]) -> Value:
        """Return a value reshaped to ``dims``."""
        known, dtype = dims_and_dtype(value)
        if known == tuple(dims):
            return value
        shape = self.constant(np.array(dims, np.int64))
        # Without allowzero, a 0 in the shape copies the input's dim.
        return self.emit("Reshape", [value, shape], dims, dtype, allowzero=1)


def dims_and_dtype(value: Value) -> tuple[tuple[int, ...], np.dtype]:
    """Return the dims and dtype of a value, which must be known."""
    assert isinstance(value.type, TensorType) and value.type.dtype is not None
    return value.type.dims, value.type.dtype


def nodes_before(values: Iterable[Value], controls: bool = False) -> set[Node]:
    """Return the nodes that compute ``values``; with ``controls``, also those they wait for."""
    nodes: set[Node] = set()
    stack = [value.producer for value in values]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [value.producer for value in all_reads(node)]
            stack += node.control_inputs if controls else ()
    return nodes


class Substitution:
    """Replacements of values and removals of nodes, applied to each node when a walk reaches it. A
    removed control input (``Node.control_inputs``) is replaced by the nodes that it depended on."""

    __slots__ = ("_removed", "_values", "_waiting", "pending", "replaced", "used")

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self.replaced = self._values.keys()  # tested for each node before ``apply``
        self._removed: dict[Node, Sequence[Node]] = {}
        self._waiting: set[Node] = set()
        self.used = False
        """whether any value was replaced"""
        self.pending = False
        """whether there is anything to apply, as ``bool()`` of the substitution"""

    def __bool__(self) -> bool:
        return self.pending

    def __setitem__(self, old: Value, new: Value) -> None:
        self._values[old] = new
        self.pending = True

    def replace(self, old: Sequence[Value | None], new: Sequence[Value | None]) -> None:
        """Replace each value of ``old`` by the corresponding one of ``new``, if neither is None."""
        pairs = zip(old, new, strict=False)
        self._values.update([(a, b) for a, b in pairs if a is not None and b is not None])
        self.pending = self.pending or bool(self._values)

    def of(self, value: Value) -> Value:
        """Return the replacement of ``value``, or ``value`` itself."""
        return self._values.get(value, value)

    def drop(self, node: Node, instead: Sequence[Node] = ()) -> None:
        """Remove ``node``; the nodes ``instead`` run in its place."""
        self.pending = True
        self._removed[node] = instead

    def apply(self, node: Node) -> None:
        """Replace the inputs and the control inputs of ``node``."""
        values = self._values
        for i, value in enumerate(node.inputs):
            if value is not None and value in values:
                node.inputs[i] = values[value]
                self.used = True
        if node.control_inputs and not self._removed.keys().isdisjoint(node.control_inputs):
            node.control_inputs = self._without_removed(node.control_inputs)
            self._waiting.add(node)

    def apply_outputs(self, graph: Graph) -> None:
        """Replace the outputs and the targets of ``graph``, whose nodes are final."""
        if self._waiting or not self._removed.keys().isdisjoint(graph.targets):
            # A replacement outside this graph cannot be its target; the node that owns this graph
            # depends on it already.
            own = set(graph.nodes)
            graph.targets = [node for node in self._without_removed(graph.targets) if node in own]
            for node in self._waiting & own:
                node.control_inputs = [before for before in node.control_inputs if before in own]
            self._waiting -= own
        if not self._values.keys().isdisjoint(graph.outputs):
            graph.outputs = [self.of(value) for value in graph.outputs]
            self.used = True

    def apply_throughout(self, graph: Graph) -> None:
        """Apply the replacements to ``graph`` and all graphs nested in it."""
        for inner in graph.graphs() if self else ():
            for node in with_checkpoints(inner.nodes):
                if node.control_inputs or not self.replaced.isdisjoint(node.inputs):
                    self.apply(node)
            self.apply_outputs(inner)

    def _without_removed(self, nodes: Sequence[Node]) -> list[Node]:
        """Return ``nodes``, with each removed node replaced by the nodes that it depended on."""
        # A dict, since the order of a set differs between processes.
        remaining: dict[Node, None] = {}
        seen: set[Node] = set()
        stack = list(reversed(nodes))
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._removed:
                # Nodes that waited for the removed one also waited for its producers.
                sources = [p for v in node.inputs if v is not None and (p := v.producer)]
                instead = self._removed[node]
                stack += [*instead[::-1], *sources[::-1], *node.control_inputs[::-1]]
            else:
                remaining[node] = None
        return list(remaining)


# Value names.


def names_of(graph: Graph) -> Counter[str]:
    """Return the names of all values of a graph and those nested in it, with their counts."""
    values = [value for inner in graph.graphs() for value in inner.inputs]
    values += [v for node in graph.walk() for v in node.outputs if v is not None]
    return Counter([value.name for value in values])


def new_name(name: str, taken: Counter[str]) -> str:
    """Return ``name``, with a numeric suffix if it is ``taken``, and record it as taken."""
    number, own = 1, name
    while taken[own]:
        number += 1
        own = f"{name}{number}"
    taken[own] = 1
    return own


# Pattern matching.


def produced_by(value: Value | None, *names: str) -> Node | None:
    """Return the producer of ``value``, if it is one of these operations and has one output."""
    node = None if value is None else value.producer
    # A node with control inputs must not be merged into a node without.
    if node is None or node.op.full_name not in names or node.control_inputs:
        return None
    return node if len(node.outputs) == 1 else None


def argument(value: Value | None, name: str) -> Value | None:
    """Return x, if ``value`` is the unary operation ``name`` of x."""
    node = produced_by(value, name)
    return None if node is None else node.inputs[0]


def swapped(node: Node | None, name: str = "") -> Sequence[tuple[Value | None, Value | None]]:
    """Return the operands of a binary node in both orders; with a ``name``, only for this operation
    without control inputs."""
    if node is None or len(node.inputs) != 2:
        return ()
    if name and (node.op.full_name != name or node.control_inputs):
        return ()
    a, b = node.inputs
    return (a, b), (b, a)


def number_of(value: Value | None) -> float | None:
    """Return the value of a constant with one element."""
    if value is None or value.const is None or value.const.size != 1:
        return None
    return float(value.const.reshape(()))
