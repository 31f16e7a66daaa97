"""Type inference and constant folding.

One in-order walk infers the types of each node's outputs, and replaces outputs by constants:
results of pure operations on constants, and of shape arithmetic whose result is known although its
inputs are not. An If with a constant condition is replaced by the branch taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter, is_

import numpy as np

from penstock.analysis.quantized_weights import quantized_weights
from penstock.analysis.type_inference import infer_types, node_types, types_of_branches
from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import ANY, Dim, ShapeError, TensorType, Type
from penstock.ir.contract import contract_of, guarded
from penstock.ir.describe import compile_error
from penstock.ir.graph import Graph, Node, Value, is_framed
from penstock.ir.op import Role
from penstock.ops.common.shape_rules import all_known
from penstock.ops.onnx.control_flow import CONTROL, truth
from penstock.ops.registry import unknown_types
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import Substitution

_TYPE, _NBYTES = attrgetter("type"), attrgetter("nbytes")
_WIDENING, _WIDENED = ("Cast", "DequantizeLinear"), 4
"""operations that widen stored weights to float32, and the factor of their bytes"""
_FEW_BYTES = 4096
"""size of a result up to which repeated elements are stored"""


class FoldConstants(Pass):
    """Infer types and fold constants. The graph's input types must be set. In a graph with frames,
    where values may be dead, only nodes whose inputs are all constants are folded."""

    requires = frozenset()
    establishes = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        folder = _Folder(graph, context)
        # As in a run, infinity and NaN are valid results and cause no warning.
        with np.errstate(all="ignore"):
            folder.run(graph, certain=not context.framed)
        return folder.changed or folder.substitution.used


class InferTypes(Pass):
    """Infer the types of all values from the graph's input types. In a graph with frames, values
    may be dead: a node that cannot run is legal, and its output types stay unknown."""

    requires = frozenset()
    establishes = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        certain = not (context.framed or is_framed(graph))
        infer_types(graph, certain=certain)
        if not certain:
            # A Merge precedes the NextIteration that it reads: the first walk does not know its
            # type, the second one does.
            infer_types(graph, certain=False)
        return False


class _Folder:
    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph = graph
        self.inferred, self.limits = context.inferred, context.limits
        self.framed, self.reproducible = context.framed, context.numerics.reproducible
        self.kept = () if context.fold_quantized_weights else quantized_weights(graph)
        # Number of readers of each value, counted only if there are large constants.
        self.readers: Counter[Value | None] | None = None
        self.substitution = Substitution()
        self.changed = False

    def run(self, graph: Graph, *, certain: bool) -> None:
        kept: list[Node] = []
        # A stack of iterators instead of recursion, because branches are spliced in place.
        stack = [with_checkpoints(graph.nodes)]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            if node.control_inputs or not self.substitution.replaced.isdisjoint(node.inputs):
                self.substitution.apply(node)
            # Most nodes are unchanged in later rounds: a comparison is cheaper than inference.
            if (known := self.inferred.get(node)) is not None:
                basis = _basis(node)
                if len(known) == len(basis) and all(map(is_, known, basis)):
                    kept.append(node)
                    continue
            branch = self.taken(node, certain) if node.op.role is Role.IF else None
            if branch is not None:
                self.changed = True
                stack.append(self.splice(node, branch))
            elif self.node(node, certain=certain):
                kept.append(node)
            else:
                self.changed = True
                self.substitution.drop(node)
        graph.nodes = kept
        self.substitution.apply_outputs(graph)

    def splice(self, node: Node, branch: Graph) -> Iterator[Node]:
        """Iterate over the nodes of ``branch``, which replace ``node``."""
        producers = [value.producer for value in branch.outputs if value.producer is not None]
        self.substitution.drop(node, [*branch.nodes, *producers])
        yield from with_checkpoints(branch.nodes)
        # Replacements of outputs are known only after the walk of the branch.
        for old, new in zip(node.outputs, branch.outputs, strict=False):
            if old is not None:
                self.substitution[old] = self.substitution.of(new)

    def taken(self, node: Node, certain: bool) -> Graph | None:
        """Return the branch that an If with a constant condition takes, else None."""
        condition = node.inputs[0]
        if condition is None or condition.const is None or node.control_inputs:
            return None
        try:
            chosen = truth(condition.const)
        except ShapeError as error:
            if not certain:
                return None
            raise compile_error(node, error) from error
        branch: Graph = node.attrs["then_branch" if chosen else "else_branch"]
        # Splicing would lose the targets of a branch.
        return None if branch.targets else branch

    def node(self, node: Node, *, certain: bool) -> bool:
        """Infer the types of a node and fold it if possible; return whether it stays."""
        is_control = node.op.role in CONTROL
        types = (self.types if is_control else node_types)(node, certain=certain)
        first = node.inputs[0] if node.inputs else None
        # The first input rules out nearly all nodes.
        is_constant = (first is None or first.is_constant) and self.is_constant(node)
        results: Sequence[np.ndarray] | None = None
        if is_constant and not is_control:
            results = self.results(node, types)
        stays = bool(node.control_inputs) or not node.outputs
        for i, value in enumerate(node.outputs):
            if value is None:
                continue
            type_ = types[i] if i < len(types) else ANY
            const = None if results is None else _repeated(results[i], node)
            if results is None and isinstance(type_, TensorType) and type_.data is not None:
                const = None if self.framed else _contents(type_, type_.data)
            # A node with control inputs stays, so that its readers wait for them, too.
            if const is None or node.control_inputs:
                # An equal type object is kept, so that readers are not inferred again.
                if value.type is not type_ and (value.type is ANY or value.type != type_):
                    value.type = type_
                stays = True
            else:
                folded = self.substitution[value] = Value(value.name, const=const)
                if self.readers is not None:
                    self.readers[folded] = self.readers[value]
        # Types of a control-flow node depend on nested graphs, which may change; a constant may be
        # folded later, once its large inputs have no other readers.
        if stays and not is_control and not is_constant:
            self.inferred[node] = _basis(node)
        return stays

    def types(self, node: Node, *, certain: bool) -> Sequence[Type]:
        """Return the types of the outputs of a node of control flow, whose graphs are walked."""
        is_if = node.op.role is Role.IF
        # The walk over the branches of an If infers their types. Those of a loop must first be
        # invariant over iterations.
        types = () if is_if else node_types(node, certain=certain)
        for _, inner in node.graphs:
            self.run(inner, certain=False)
        return types_of_branches(node) if is_if else types

    def results(self, node: Node, types: Sequence[Type]) -> Sequence[np.ndarray] | None:
        """As ``evaluate``, but contents that type inference has computed need no kernel."""
        data = getattr(types[0], "data", None) if len(types) == 1 and not self.framed else None
        const = None if data is None else _contents(types[0], data)
        return self.evaluate(node, types) if const is None else [const]

    def evaluate(self, node: Node, types: Sequence[Type]) -> Sequence[np.ndarray] | None:
        """Return the outputs of a pure operation on constants; None if they are too large."""
        if self.reproducible:
            from penstock.ops.exactness import is_exact

            if not is_exact(node, types):
                return None
        consts = [None if value is None else value.const for value in node.inputs]
        given = [const for const in consts if const is not None]
        held = sum(map(owned_bytes, given))
        static = [t for t in types if isinstance(t, TensorType) and t.static]
        if self.has_unknown_size(node, static, held):
            return None
        inputs, outputs = sum(map(_NBYTES, given)), sum(map(_NBYTES, static))
        allowed = max(self.limits.max_folded_bytes, self.replaced(node, held))
        if node.op.name in _WIDENING and not node.op.domain:
            # Otherwise each run would repeat it, with its peak memory.
            allowed = max(allowed, self.replaced(node, held) * _WIDENED)
        from penstock.analysis.interpreter import evaluate

        try:
            if node.op.name == "ConstantOfShape" and static:
                return (_filled(node, static[0]),)
            # Compilation may take as much memory as a run. Only views may exceed the limit without
            # storing elements, and all of them except Expand have no more than their inputs.
            if outputs > max(allowed, inputs) and node.op.name != "Expand":
                return None
            kernel = node.op.compile(node, [None if v is None else v.type for v in node.inputs])
            # Broadcast elements (stride 0) take no memory, but time.
            if not kernel.view and max(outputs, inputs - held) > allowed:
                return None
            contract = contract_of(node, types=types)
            if contract is not None:
                kernel = guarded(contract, kernel)
            arrays = evaluate(node, consts, kernel)
        except Exception:
            return None  # the run raises the error, with the node and its inputs in the message
        # A value cannot hold a constant sequence or optional.
        return None if False in [isinstance(x, np.ndarray) for x in arrays] else arrays

    def is_constant(self, node: Node) -> bool:
        """Whether ``node`` has the same result in every run, and may be computed now."""
        if not node.op.pure or node.control_inputs or node in self.kept:
            return False
        if True in [value is not None and not value.is_constant for value in node.inputs]:
            return False
        return bool(node.inputs) or node.op.infer is not unknown_types

    def has_unknown_size(self, node: Node, static: Sequence[TensorType], held: int) -> bool:
        """Whether the output sizes of ``node`` are unbounded; those of ``static`` types are known.
        Data-dependent sizes are bounded by the inputs' ``held`` bytes for operations with type
        inference, and unbounded for others."""
        if node.op.infer is not unknown_types and held <= self.limits.max_folded_bytes:
            return False
        return len(static) < len(node.outputs) - node.outputs.count(None)

    def replaced(self, node: Node, held: int) -> int:
        """Return how many of the ``held`` bytes of constant inputs folding ``node`` would free.
        Inputs with other readers are not freed, so a large constant with many readers could be
        stored many times."""
        if held <= self.limits.max_folded_bytes:
            return held
        if self.readers is None:
            self.readers = Counter(v for n in self.graph.walk() for v in {*n.inputs} - {None})
            self.readers.update(v for graph in self.graph.graphs() for v in {*graph.outputs})
        return sum(
            owned_bytes(value.const)
            for value in {*node.inputs}
            if value is not None and value.const is not None and self.readers[value] == 1
        )


def _basis(node: Node) -> list[object]:
    """Return the inputs and results of a node's type inference: identical objects as long as
    nothing has changed."""
    types = map(_TYPE, filter(None, (*node.inputs, *node.outputs)))
    return [node.op, *node.attrs, *node.attrs.values(), *node.inputs, *types]


def _contents(type_: Type, data: Sequence[Dim]) -> np.ndarray | None:
    """Return the constant result of shape arithmetic; None unless every element is known."""
    if not isinstance(type_, TensorType) or not type_.static or all_known(data) is None:
        return None
    try:
        return np.array(data, type_.dtype).reshape(type_.dims)
    except OverflowError:  # out of the range of the dtype
        return None


def _filled(node: Node, type_: TensorType) -> np.ndarray:
    """Return the output of ConstantOfShape; if large, one element broadcast by strides of 0."""
    fill = node.attrs.get("value")
    element = np.zeros((), np.float32) if fill is None else np.asarray(fill).reshape(())
    array = np.broadcast_to(element, type_.dims)
    return array.copy() if math.prod(type_.dims) <= 1024 else array


def _repeated(array: np.ndarray, node: Node) -> np.ndarray:
    """Return a result that is large beside the inputs of ``node`` with equal elements along an axis
    as one, broadcast by a stride of 0, such as rows that a Gather has looked up by one index."""
    if array.nbytes <= _FEW_BYTES or array.dtype.hasobject or array.itemsize > 8:
        return array
    consts = [value.const for value in node.inputs if value is not None]
    least = sum([owned_bytes(const) for const in consts if const is not None])
    if owned_bytes(array) <= max(least, _FEW_BYTES):
        return array
    few = array
    for axis, size in enumerate(array.shape):
        bits = few.view(f"u{few.itemsize}")  # as 0.0 equals -0.0
        first, second = (bits[(slice(None),) * axis + (slice(i, i + 1),)] for i in (0, 1))
        # Two of them rule out nearly all axes.
        if size > 1 and (first == second).all() and (bits == first).all():
            few = few[(slice(None),) * axis + (slice(1),)]
    return array if few is array else np.broadcast_to(few.copy(), array.shape)


def owned_bytes(array: np.ndarray) -> int:
    """Return an array's bytes of memory; broadcast elements (stride 0) count once."""
    if array.flags.c_contiguous:
        return array.nbytes
    counted = [d for d, s in zip(array.shape, array.strides, strict=True) if s != 0]
    return math.prod(counted) * array.itemsize if array.size else 0
