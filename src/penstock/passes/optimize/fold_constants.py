"""Types and constants: what can be known before the run is computed now.

One walk in order infers the types of each node's outputs and replaces by a constant what is one: a
pure operation of constants, or shape arithmetic whose result is known though its inputs are not. An
If whose condition is known becomes its branch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.analysis.interpreter import evaluate
from penstock.analysis.type_inference import node_types
from penstock.ir.describe import compile_error
from penstock.ir.graph import Graph, Node, Value
from penstock.limits import Limits
from penstock.ops.onnx.control_flow import is_control, truth
from penstock.ops.registry import unknown_types
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.quantized_weights import quantized_weights
from penstock.passes.rewrite import Substitution
from penstock.types import ANY, ShapeError, TensorType, Type


class FoldConstants(Pass):
    """Infer types and fold constants. The types of the graph's inputs must be set."""

    name = "fold_constants"
    establishes = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        kept = () if context.fold_quantized_weights else quantized_weights(graph)
        folder = _Folder(graph, context.limits, kept)
        with np.errstate(all="ignore"):
            folder.run(graph, certain=True)
        return folder.changed or folder.substitution.used


class _Folder:
    def __init__(self, graph: Graph, limits: Limits, kept: Collection[Node]) -> None:
        self.graph = graph
        self.kept = kept
        self.limits = limits
        # How many nodes read each value; counted when large constants ask for it.
        self.readers: Counter[Value | None] | None = None
        self.substitution = Substitution()
        self.changed = False

    def run(self, graph: Graph, *, certain: bool) -> None:
        kept: list[Node] = []
        # A stack of iterators instead of a recursion: branches are spliced in where they stand.
        stack = [iter(graph.nodes)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            if self.substitution:
                self.substitution.apply(node)
            branch = self.taken(node, certain)
            if branch is not None:
                self.changed = True
                stack.append(self.splice(node, branch))
                continue
            if self.node(node, certain=certain):
                kept.append(node)
            else:
                self.changed = True
                self.substitution.drop(node)
        graph.nodes = kept
        self.substitution.apply_outputs(graph)

    def splice(self, node: Node, branch: Graph) -> Iterator[Node]:
        """The nodes of ``branch`` instead of ``node``."""
        made = [value.producer for value in branch.outputs if value.producer is not None]
        self.substitution.drop(node, [*branch.nodes, *made])
        yield from branch.nodes
        # What the outputs have become is known only after the branch has been walked.
        for old, new in zip(node.outputs, branch.outputs, strict=False):
            if old is not None:
                self.substitution[old] = self.substitution.of(new)

    def taken(self, node: Node, certain: bool) -> Graph | None:
        """The branch of an If whose condition is known."""
        condition = node.inputs[0] if node.op.name == "If" and is_control(node) else None
        if condition is None or condition.const is None or node.control_inputs:
            return None
        try:
            chosen = truth(condition.const)
        except ShapeError as error:
            if not certain:
                return None
            raise compile_error(node, error) from error
        branch: Graph = node.attrs["then_branch" if chosen else "else_branch"]
        # Nobody outside would know that a branch's targets have to run.
        return None if branch.targets else branch

    def node(self, node: Node, *, certain: bool) -> bool:
        """Infer and fold one node; whether it stays."""
        types = node_types(node, certain=certain)
        results: Sequence[Any] | None = None
        if is_control(node):
            for _, inner in node.graphs:
                self.run(inner, certain=False)
        else:
            results = self.evaluate(node, types)
        stays = bool(node.control_inputs) or not node.outputs
        for i, value in enumerate(node.outputs):
            if value is None:
                continue
            kind = types[i] if i < len(types) else ANY
            const = results[i] if results is not None else _contents(kind)
            if const is None or node.control_inputs:
                value.type = kind
                stays = True
            else:
                folded = self.substitution[value] = Value(value.name, const=const)
                if self.readers is not None:
                    self.readers[folded] = self.readers[value]
        return stays

    def evaluate(self, node: Node, types: Sequence[Type]) -> Sequence[Any] | None:
        """The outputs of a pure operation of constants, unless they are too large to keep."""
        op = node.op
        if node in self.kept:
            return None
        if not op.pure or node.control_inputs or (not node.inputs and op.infer is unknown_types):
            return None
        for value in node.inputs:
            if value is not None and value.const is None:
                return None
        given = [v.type if v is not None else None for v in node.inputs]
        consts = [v.const if v is not None else None for v in node.inputs]
        held = sum(owned_bytes(c) for c in consts if c is not None)
        most = max(self.limits.max_folded_bytes, self.replaced(node, held))
        known = [t for t in types if isinstance(t, TensorType) and t.static]
        # Sizes that depend on contents are bounded by those of the inputs for all operations that
        # infer anything; of the others nothing is known.
        unbounded = op.infer is unknown_types or held > self.limits.max_folded_bytes
        if unbounded and len(known) < len([v for v in node.outputs if v is not None]):
            return None
        try:
            if op.name == "ConstantOfShape" and known:
                return (_filled(node, known[0]),)
            made = sum(t.nbytes for t in known)
            read = sum(c.nbytes for c in consts if c is not None)
            # Compiling may take as much as running. Only views give more than is kept for nothing,
            # and of these, all but Expand no more than they are given.
            if made > most and made > read and op.name != "Expand":
                return None
            kernel = op.compile(node, given)
            # Elements that a stride of 0 repeats take no memory, but time.
            if not kernel.view and max(made, read - held) > most:
                return None
            arrays = evaluate(node, consts, kernel)
        except Exception:
            return None  # it fails when it runs, if it ever runs, with everything at hand
        return arrays if all(isinstance(x, np.ndarray) for x in arrays) else None

    def replaced(self, node: Node, held: int) -> int:
        """How many of the ``held`` bytes of constants that ``node`` reads go when it is folded.

        Those that others read too stay: a large one with many readers would be there many times.
        """
        if held <= self.limits.max_folded_bytes:
            return held
        if self.readers is None:
            self.readers = Counter(v for n in self.graph.walk() for v in {*n.inputs} - {None})
            self.readers.update(v for each in self.graph.graphs() for v in {*each.outputs})
        return sum(
            owned_bytes(v.const)
            for v in {*node.inputs}
            if v is not None and v.const is not None and self.readers[v] == 1
        )


def _contents(kind: Type) -> np.ndarray | None:
    """The constant that shape arithmetic has found, if every element is known."""
    if not isinstance(kind, TensorType) or kind.data is None or not kind.static:
        return None
    if not all(isinstance(x, int) for x in kind.data):
        return None
    assert kind.dtype is not None
    if kind.dtype.kind != "b":
        info = np.iinfo(kind.dtype)
        if any(not info.min <= x <= info.max for x in kind.data):  # type: ignore[operator]
            return None
    return np.array(kind.data, kind.dtype).reshape(kind.dims)


def _filled(node: Node, kind: TensorType) -> np.ndarray:
    """ConstantOfShape without its bytes: one element seen through strides of zero."""
    fill = node.attrs.get("value")
    element = np.zeros((), np.float32) if fill is None else np.asarray(fill).reshape(())
    array = np.broadcast_to(element, kind.dims)
    return array.copy() if math.prod(kind.dims) <= 1024 else array


def owned_bytes(array: np.ndarray) -> int:
    """Bytes of memory behind an array, counting an element seen many times once."""
    counted = [d for d, s in zip(array.shape, array.strides, strict=True) if s != 0]
    return math.prod(counted) * array.itemsize if array.size else 0
