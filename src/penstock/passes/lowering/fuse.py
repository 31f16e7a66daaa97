"""Fusion of matrix products and convolutions with an elementwise epilogue, and of elementwise
chains.

    x -> Conv -> Add -> Relu -> y      becomes      x -> Fused(Conv Add Relu) -> y
                  z -'                              z -'

Elementwise operations on the result of a DequantizeLinear read the quantized codes instead, each
with a conversion of its own in its fused node.
This pass proposes chains. A ``FusionPolicy`` decides whether a backend has a kernel for a chain,
and whether that kernel is expected to be faster than separate nodes. Other chains stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from penstock.analysis.quantized_weights import producer
from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import dataclass, field
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ops.internal.fused import FUSED, fused, fused_copies, parts, rounds_operand
from penstock.ops.registry import MICROSOFT
from penstock.passes.context import FusionPolicy, Pass, PassContext
from penstock.passes.dead_code import prune
from penstock.passes.rewrite import Substitution

_INTEGERS = frozenset({"ConvInteger", "MatMulInteger"})
"""products and convolutions whose integer accumulators must be cast first"""

_LIGHT = frozenset({"begins", "links"})
"""traits of non-elementwise operations that may begin a light chain"""

_MOST_NODES, _MOST_REPEATED = 16, 4096
_DOMAINS = ("", MICROSOFT, FUSED.domain)
"""domains of operations in chains: ONNX's, and those of operations that passes write"""


class Fuse(Pass):
    """Replace chains of nodes by fused nodes.

    From each node that can begin a chain, the longest chain that has a kernel is taken, if it is
    faster than its nodes. A chain of n elementwise nodes takes at most 3 n kernel queries; a chain
    that begins with a heavy operation, of at most 16 nodes, takes one per node.
    """

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fusion is None:
            return False
        changed, readers = False, readers_of(graph)
        # A node with outgoing control edges must remain a separate node.
        awaited = {before for node in graph.walk() for before in node.control_inputs}
        # Chains with heavy beginnings go first; light chains would take their nodes otherwise.
        for heavy in (True, False):
            if not heavy and changed:
                readers = readers_of(graph)
            for subgraph in graph.graphs():
                search = _ChainSearch(subgraph.nodes, readers, awaited, context.fusion)
                search.run(heavy)
                if search.replacements:
                    _replace(subgraph, search.replacements)
                    changed = True
        absorbed = [_absorb(subgraph, context.fusion) for subgraph in graph.graphs()]
        if any(absorbed):
            prune(graph)
        return changed or any(absorbed)


@dataclass
class _ChainSearch:
    """The search for chains in one graph. ``replacements`` maps the last node of each chosen chain
    to the fused node, and its other nodes to themselves."""

    nodes: Sequence[Node]
    readers: Mapping[Value, Sequence[Node | None]]
    awaited: Collection[Node]
    policy: FusionPolicy
    replacements: dict[Node, Node] = field(default_factory=dict)
    # Nodes not worth fusing: neither their chain nor any prefix of it is faster.
    left: set[Node] = field(default_factory=set)
    # Whether the first two nodes of the last chain had no kernel. If so, the next chain, which is
    # the same one without its first node, probably has none either.
    doubtful: bool = False
    join: Callable[[Sequence[Node]], Node] = fused

    def run(self, heavy: bool) -> None:
        # The traits of a node decide, except for products that round their operands.
        if heavy:
            starts = [n for n in self.nodes if "heavy" in n.op.traits or "region" in n.attrs]
            starts = list(filter(_is_heavy, starts))
        else:
            starts = [
                n for n in self.nodes if n.op.elementwise or not _LIGHT.isdisjoint(n.op.traits)
            ]
        self.inside = set(self.nodes) if starts else set()
        for node in with_checkpoints(starts):
            rounds = "region" in node.attrs and rounds_operand(node)
            if (node.op.domain in _DOMAINS or rounds) and self._is_free(node):
                self._begin(node, heavy)

    def _begin(self, node: Node, heavy: bool) -> None:
        """Search for a chain that begins with ``node``."""
        pair: Node | None = None
        # The parts of a fused node that rounds its operand become parts of the new fused node.
        rounds = "region" in node.attrs and rounds_operand(node)
        self.join = fused_copies if rounds else fused
        if self.doubtful:
            beginning = self._chain(node, 2)
            pair = self.join(beginning) if len(beginning) > 1 else None
            if pair is None or not self.policy.has_kernel(pair):
                return
            self.doubtful = False
        chain = self._chain(node, _MOST_NODES)
        if len(chain) == 1:
            return
        whole = self.join(chain)
        if self.policy.is_faster(whole):
            scan = self._by_scan if heavy else partial(self._by_bisection, pair=pair)
            candidate, length = scan(chain, whole)
            if candidate is None:
                return
            if length == len(chain) or self.policy.is_faster(candidate):
                self.replacements.update(zip(chain[:length], chain, strict=False))
                self.replacements[chain[length - 1]] = candidate
                return
            chain = chain[:length]
        # The elementwise nodes after a heavy node may still form a light chain.
        if not heavy:
            self.left.update(chain)

    def _is_free(self, node: Node) -> bool:
        return (
            node not in self.replacements
            and node not in self.left
            and node not in self.awaited
            and len(node.outputs) == 1
        )

    def _chain(self, first: Node, most: int) -> list[Node]:
        """Return the longest chain of at most ``most`` nodes, each the only reader of the last."""
        chain, is_heavy = [first], _is_heavy(first)
        while len(chain) < most:
            (output,) = chain[-1].outputs
            assert output is not None
            readers = self.readers.get(output, ())
            reader = readers[0] if len(readers) == 1 else None
            if reader not in self.inside or not reader or not self._is_free(reader):
                break
            if not _may_follow(chain, is_heavy, reader):
                break
            if reader.op.domain not in _DOMAINS and not _is_of_one(chain[0], output, reader):
                break
            # The epilogue of a product or convolution is applied to its result in place, tile by
            # tile, so it cannot broadcast it to more elements.
            if _grows(output, reader.outputs[0], 0 if is_heavy else _MOST_REPEATED):
                break
            if reader.op.name == "DequantizeLinear" and self._are_read(reader):
                break
            chain.append(reader)
        return chain

    def _are_read(self, node: Node) -> bool:
        """Whether readers of a DequantizeLinear read its codes instead of its result: the result is
        large and has several readers, at least one of them elementwise."""
        readers = self.readers.get(node.outputs[0], ()) if node.outputs[0] else ()
        if len(readers) < 2 or not _exceed(node.outputs[0], _MOST_REPEATED):
            return False
        return any(reader is not None and _links(reader) for reader in readers)

    def _by_scan(self, chain: Sequence[Node], whole: Node) -> tuple[Node | None, int]:
        """Return the longest prefix of ``chain`` that has a kernel, and its length; ``whole`` is
        the fused node of the whole chain. A prefix may have a kernel where shorter ones have none:
        an integer product must end in a Cast."""
        for length in range(len(chain), 1, -1):
            candidate = whole if length == len(chain) else self.join(chain[:length])
            if self.policy.has_kernel(candidate):
                return candidate, length
        return None, 0

    def _by_bisection(
        self, chain: Sequence[Node], whole: Node, pair: Node | None
    ) -> tuple[Node | None, int]:
        """``_by_scan``, for chains whose every prefix has a kernel if the whole has one;
        ``pair`` is the fused node of the first two nodes, if it is known to have a kernel.

        Makes at most six kernel queries for a chain of two or more nodes, and two where no chain
        begins; ``_begin`` then makes one for each following node until a chain begins.
        """
        low, best = (1, None) if pair is None else (2, pair)  # the longest with a kernel
        high = len(chain) + 1  # the shortest known to have none
        # Try the ends first, the whole chain before its first two nodes: most chains have a kernel
        # as a whole or not at all.
        likely = [2, len(chain)]
        while high - low > 1:
            length = likely.pop() if likely else (low + high) // 2
            if low < length < high:
                candidate = whole if length == len(chain) else fused(chain[:length])
                if self.policy.has_kernel(candidate):
                    low, best = length, candidate
                else:
                    high = length
        self.doubtful = best is None
        return best, low


def _grows(value: Value | None, result: Value | None, most: int = _MOST_REPEATED) -> bool:
    """Whether broadcasting ``value`` repeats it, to more than ``most`` elements. Computing it for
    each of them then takes longer than a step of its own."""
    type_ = None if value is None else value.type
    if not isinstance(type_, TensorType) or not type_.static:
        return False
    return _exceed(result, max(type_.elements, most))


def _exceed(value: Value | None, elements: int) -> bool:
    """Whether ``value`` is known to have more than ``elements`` elements."""
    type_ = None if value is None else value.type
    return isinstance(type_, TensorType) and type_.static and type_.elements > elements


def _links(node: Node) -> bool:
    """Whether a node may extend a chain."""
    return node.op.elementwise or "links" in node.op.traits


def _is_of_one(first: Node, output: Value, reader: Node) -> bool:
    """Whether ``reader`` rounds an operand, or reads beside ``output`` what the ``first`` node of
    the chain reads: the chain is then a function of one tensor (x * sigmoid(x), in codes)."""
    rounds = "region" in reader.attrs and rounds_operand(reader)
    return rounds or set(reader.inputs) == {output, first.inputs[0]}


def _is_heavy(node: Node) -> bool:
    """Whether a node may begin a chain and dominates its cost. Where two chains compete for a node,
    one with such a beginning wins."""
    return "heavy" in node.op.traits or ("region" in node.attrs and rounds_operand(node))


def _may_follow(chain: Sequence[Node], is_heavy: bool, node: Node) -> bool:
    if chain[-1].op.name in _INTEGERS:
        return node.op.name == "Cast"
    # Quantization is not fused into floating-point products and convolutions: ``quantize`` makes
    # fused nodes with integer arithmetic.
    return _links(node) and not (is_heavy and "links" in node.op.traits)


def became(node: Node, candidate: Node, policy: FusionPolicy) -> bool:
    """Turn ``node`` into a fused node, if ``policy`` accepts that; return whether it does."""
    before = node.op, node.inputs, node.attrs
    # Pass the node itself to the policy, so that its kernel is already cached for it.
    node.op, node.inputs, node.attrs = candidate.op, candidate.inputs, candidate.attrs
    if not (policy.is_faster(node) and policy.has_kernel(node)):
        node.op, node.inputs, node.attrs = before
        return False
    node.name, node.origin = candidate.name, candidate.origin
    return True


def _absorb(graph: Graph, policy: FusionPolicy) -> bool:
    """Fuse elementwise nodes with copies of the DequantizeLinear nodes that they read."""
    inside = {node for node in graph.nodes if node.op.name == "DequantizeLinear"}
    changed = False
    for node in with_checkpoints(graph.nodes if inside else ()):
        if not all(_links(part) and part.op.domain in _DOMAINS for part in parts(node)):
            continue
        sources = dict.fromkeys([producer(value, "DequantizeLinear") for value in node.inputs])
        # Converting broadcast codes again for each element costs more than converting them once.
        before = [s for s in sources if s in inside and not _grows(s.outputs[0], node.outputs[0])]
        if before and len(node.outputs) == 1:
            changed |= became(node, fused_copies([*before, node]), policy)
    return changed


def _replace(graph: Graph, replacements: Mapping[Node, Node]) -> None:
    substitution = Substitution()
    nodes = []
    for node in with_checkpoints(graph.nodes):
        replacement = replacements.get(node, node)
        if replacement is not node:
            substitution.replace(node.outputs, replacement.outputs)
        if replacement is not node or node not in replacements:
            nodes.append(replacement)
    graph.nodes = nodes
    substitution.apply_throughout(graph)
