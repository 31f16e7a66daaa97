"""Helpers of local passes: one walk over the nodes in order, with replacement of values; matching
of patterns; and a writer of the nodes that replace one node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import standard

Replacement = Sequence[Value | None] | None
Visit = Callable[[Node], Replacement | bool]
Parts = Callable[[Node], Sequence[Node] | None]


def forward(graph: Graph, visits: Mapping[str, Visit], outer: Substitution | None = None) -> bool:
    """Call the visit of its operation, by full name, for every node that has one and waits for no
    others, nested graphs first; return whether anything changed.

    A visit returns a value for each of the node's outputs, which then replaces every later use of
    that output, and the node is dropped; or ``None`` or ``False`` to keep the node as it is; or
    ``True`` if it changed the node in place. When a node is visited, replacements have already been
    applied to its inputs. ``outer`` is the substitution of the graph around this one.
    """
    substitution = Substitution() if outer is None else outer
    changed, kept = False, []
    for node in with_checkpoints(graph.nodes):
        if node.control_inputs or not substitution.replaced.isdisjoint(node.inputs):
            substitution.apply(node)
        for _, inner in node.graphs if node.nests else ():
            changed |= forward(inner, visits, substitution)
        visit = visits.get(node.op.full_name)
        values = None if visit is None or node.control_inputs else visit(node)
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
    """Put what the function of its operation, by full name, returns in the place of each node, also
    in nested graphs, unless that is None, or other nodes wait for the node, or it for them; return
    whether anything changed. The parts write the same outputs."""
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
    """The ``nodes`` that take the place of one, or stand before it, in order; ``emit`` adds
    another."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.nodes: list[Node] = []
        self._name = "".join([value.name for value in node.outputs if value is not None])
        self._numbers = count()

    def constant(self, array: Any) -> Value:
        """A new constant."""
        return Value(f"{self._name}/constant{next(self._numbers)}", const=np.asarray(array))

    def value(self, name: str, dims: Sequence[int], dtype: np.dtype) -> Value:
        """A new value of this type. A subclass may call it by ``name``, that of an operation."""
        return Value(f"{self._name}/part{next(self._numbers)}", TensorType(dtype, tuple(dims)))

    def emit(
        self,
        name: str,
        inputs: Sequence[Value | None],
        dims: Sequence[int],
        dtype: np.dtype,
        **attrs: Any,
    ) -> Value:
        """The result, of this type, of a new node of a standard operation."""
        value = self.value(name, dims, dtype)
        self.finish(name, inputs, value, **attrs)
        return value

    def finish(
        self, name: str, inputs: Sequence[Value | None], output: Value, **attrs: Any
    ) -> None:
        """Add a node that writes a value which is there already, as an output of the old node."""
        op = standard(name)
        self.nodes.append(self.node.derived(inputs, [output], attrs, op=op, name=output.name))

    def transposed(self, value: Value, axes: Sequence[int]) -> Value:
        """A value with its axes in this order."""
        dims, dtype = dims_and_dtype(value)
        if list(axes) == list(range(len(dims))):
            return value
        moved = [dims[axis] for axis in axes]
        return self.emit("Transpose", [value], moved, dtype, perm=list(axes))

    def reshaped(self, value: Value, dims: Sequence[int]) -> Value:
        """A value with other dims."""
        known, dtype = dims_and_dtype(value)
        if known == tuple(dims):
            return value
        shape = self.constant(np.array(dims, np.int64))
        # Without allowzero ONNX copies a dim of the input where the shape has a 0.
        return self.emit("Reshape", [value, shape], dims, dtype, allowzero=1)


def dims_and_dtype(value: Value) -> tuple[tuple[int, ...], np.dtype]:
    """The dims and dtype of a value, which are known."""
    assert isinstance(value.type, TensorType) and value.type.dtype is not None
    return value.type.dims, value.type.dtype


class Substitution:
    """Replacements of values and removals of nodes, applied to each node when a walk reaches it. A
    control input (``Node.control_inputs``) that is removed is replaced by the nodes that it
    depended on."""

    __slots__ = ("_removed", "_values", "_waiting", "pending", "replaced", "used")

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self.replaced = self._values.keys()  # asked for each node before ``apply`` is called
        self._removed: dict[Node, Sequence[Node]] = {}
        self._waiting: set[Node] = set()
        self.used = False
        """whether any value was replaced"""
        self.pending = False
        """whether there is anything to apply; so is the truth of the substitution"""

    def __bool__(self) -> bool:
        return self.pending

    def __setitem__(self, old: Value, new: Value) -> None:
        self._values[old] = new
        self.pending = True

    def replace(self, old: Sequence[Value | None], new: Sequence[Value | None]) -> None:
        """Replace each value of ``old`` by that of ``new`` in its place, if both have one."""
        pairs = zip(old, new, strict=False)
        self._values.update([(a, b) for a, b in pairs if a is not None and b is not None])
        self.pending = self.pending or bool(self._values)

    def of(self, value: Value) -> Value:
        """The value that replaces ``value``, or ``value`` itself."""
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
            # A replacement may be a node outside of this graph, which cannot be a target here, and
            # for which the node with this graph waits.
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
                self.apply(node)
            self.apply_outputs(inner)

    def _without_removed(self, nodes: Sequence[Node]) -> list[Node]:
        """``nodes``, with each removed node replaced by the nodes that it depended on."""
        # A dict and no set, whose order would be another one in each process.
        remaining: dict[Node, None] = {}
        seen: set[Node] = set()
        stack = list(reversed(nodes))
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._removed:
                # Nodes that waited for the removed one waited for its producers with it.
                sources = [p for v in node.inputs if v is not None and (p := v.producer)]
                instead = self._removed[node]
                stack += [*instead[::-1], *sources[::-1], *node.control_inputs[::-1]]
            else:
                remaining[node] = None
        return list(remaining)


# Names of values.


def names_of(graph: Graph) -> Counter[str]:
    """The names of all values of a graph and those nested in it, of which several may have one."""
    values = [value for inner in graph.graphs() for value in inner.inputs]
    values += [v for node in graph.walk() for v in node.outputs if v is not None]
    return Counter([value.name for value in values])


def new_name(name: str, taken: Counter[str]) -> str:
    """``name``, with a number behind it if it is ``taken``; it is from now on."""
    number, own = 1, name
    while taken[own]:
        number += 1
        own = f"{name}{number}"
    taken[own] = 1
    return own


# Matching of values.


def produced_by(value: Value | None, *names: str) -> Node | None:
    """The producer of ``value``, if it is one of these operations and has one output."""
    node = None if value is None else value.producer
    # A node with control inputs must not be merged into a node without.
    if node is None or node.op.full_name not in names or node.control_inputs:
        return None
    return node if len(node.outputs) == 1 else None


def argument(value: Value | None, name: str) -> Value | None:
    """x, if ``value`` is the unary operation ``name`` of x."""
    node = produced_by(value, name)
    return None if node is None else node.inputs[0]


def swapped(node: Node | None, name: str = "") -> Sequence[tuple[Value | None, Value | None]]:
    """The operands of a binary node in either order; with a ``name``, of a node of this operation
    that waits for no others."""
    if node is None or len(node.inputs) != 2:
        return ()
    if name and (node.op.full_name != name or node.control_inputs):
        return ()
    a, b = node.inputs
    return (a, b), (b, a)


def number_of(value: Value | None) -> float | None:
    """The number of a constant with one element."""
    if value is None or value.const is None or value.const.size != 1:
        return None
    return float(value.const.reshape(()))
