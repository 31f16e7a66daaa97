"""Fuse chains of nodes: a product or convolution with the elementwise operations behind it, and
chains of elementwise operations.

    x -> Conv -> Add -> Relu -> y      becomes      x -> Fused(Conv Add Relu) -> y
                  z -'                              z -'

Elementwise operations that read what DequantizeLinear computes read the codes instead, each with
the conversion in its own fused node.

This pass proposes chains. A ``FusionPolicy`` decides whether a backend has a kernel for a chain,
and whether that kernel is expected to be faster than the nodes one by one. Other chains stay.
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
"""products and convolutions whose integer results must be cast before anything else"""

_LIGHT = frozenset({"begins", "links"})
"""traits of operations that are not elementwise, with which a light chain may begin"""

_MOST_NODES, _MOST_REPEATED = 16, 4096
_DOMAINS = ("", MICROSOFT, FUSED.domain)
"""of operations of chains: ONNX's, and those that passes write"""


class Fuse(Pass):
    """Replace chains of nodes by fused nodes.

    From each node that can begin a chain, the longest chain for which there is a kernel is taken,
    if it is faster than its nodes. A chain of n elementwise nodes leads to at most 3 n questions
    for kernels; a chain behind a heavy operation, which has at most 16 nodes, to one for each node.
    """

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fusion is None:
            return False
        changed, readers = False, readers_of(graph)
        # A node with outgoing control edges must run at its own time.
        awaited = {before for node in graph.walk() for before in node.control_inputs}
        # Heavy beginnings get the nodes that light chains would take otherwise.
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
    # Nodes not worth fusing: neither their chain nor any prefix of it pays.
    left: set[Node] = field(default_factory=set)
    # Whether there was no kernel for the first two nodes of the last chain: probably, there is none
    # for those of the next chain, which is the same chain without its first node.
    doubtful: bool = False
    join: Callable[[Sequence[Node]], Node] = fused

    def run(self, heavy: bool) -> None:
        # Of each node its traits are enough, but for products that round their operands.
        if heavy:
            starts = [n for n in self.nodes if "heavy" in n.op.traits or "region" in n.attrs]
            starts = list(filter(_is_heavy, starts))
        else:
            starts = [
                n for n in self.nodes if n.op.elementwise or not _LIGHT.isdisjoint(n.op.traits)
            ]
        self.inside = set(self.nodes) if starts else set()
        for node in with_checkpoints(starts):
            if self._is_free(node):
                self._begin(node, heavy)

    def _begin(self, node: Node, heavy: bool) -> None:
        """Look for a chain that begins with ``node``."""
        pair: Node | None = None
        # The parts of a node that rounds its operand become parts of the new one.
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
        # The nodes of a chain behind a heavy node may still be in a chain of light ones.
        if not heavy:
            self.left.update(chain)

    def _is_free(self, node: Node) -> bool:
        return (
            (node.op.domain in _DOMAINS or ("region" in node.attrs and rounds_operand(node)))
            and node not in self.replacements
            and node not in self.left
            and node not in self.awaited
            and len(node.outputs) == 1
        )

    def _chain(self, first: Node, most: int) -> list[Node]:
        """The longest chain of at most ``most`` nodes, each the only reader of the one before."""
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
            # No kernel of a product or convolution has a result of other dims than its sums.
            if _grows(output, reader.outputs[0], 0 if is_heavy else _MOST_REPEATED):
                break
            if reader.op.name == "DequantizeLinear" and self._are_read(reader):
                break
            chain.append(reader)
        return chain

    def _are_read(self, node: Node) -> bool:
        """Whether the codes of a DequantizeLinear are what others read in place of its result: it
        is large, and one of several readers is elementwise."""
        readers = self.readers.get(node.outputs[0], ()) if node.outputs[0] else ()
        if len(readers) < 2 or not _exceed(node.outputs[0], _MOST_REPEATED):
            return False
        return any(reader is not None and _links(reader) for reader in readers)

    def _by_scan(self, chain: Sequence[Node], whole: Node) -> tuple[Node | None, int]:
        """The longest beginning of ``chain`` that has a kernel, and its length; ``whole`` is the
        fused node of all. A beginning may have a kernel where shorter ones have none: an integer
        product must end in a Cast."""
        for length in range(len(chain), 1, -1):
            candidate = whole if length == len(chain) else self.join(chain[:length])
            if self.policy.has_kernel(candidate):
                return candidate, length
        return None, 0

    def _by_bisection(
        self, chain: Sequence[Node], whole: Node, pair: Node | None
    ) -> tuple[Node | None, int]:
        """As ``_by_scan``, for chains of which every beginning has a kernel if the whole has one;
        ``pair`` is the fused node of the first two nodes, if a kernel for it is known.

        Asks at most six questions for a chain of two nodes or more. Where no chain begins, it asks
        two; and ``_begin`` one for each node that follows, until a chain begins.
        """
        low, best = (1, None) if pair is None else (2, pair)  # the longest with a kernel
        high = len(chain) + 1  # the shortest without
        # The ends come first, the whole chain before its first two nodes: most chains have a kernel
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
    """Whether ``value`` is broadcast to more elements than it pays to compute it for, instead of in
    a step of its own: more than its own and than ``most``."""
    type_ = None if value is None else value.type
    if not isinstance(type_, TensorType) or not type_.static:
        return False
    return _exceed(result, max(type_.elements, most))


def _exceed(value: Value | None, elements: int) -> bool:
    """Whether ``value`` has more than ``elements``, as far as is known."""
    type_ = None if value is None else value.type
    return isinstance(type_, TensorType) and type_.static and type_.elements > elements


def _links(node: Node) -> bool:
    """Whether a node may follow in a chain."""
    return node.op.elementwise or "links" in node.op.traits


def _is_heavy(node: Node) -> bool:
    """Whether a chain may begin with a node that is most of its work. Where two chains compete for
    a node, one with such a beginning wins."""
    return "heavy" in node.op.traits or ("region" in node.attrs and rounds_operand(node))


def _may_follow(chain: Sequence[Node], is_heavy: bool, node: Node) -> bool:
    if chain[-1].op.name in _INTEGERS:
        return node.op.name == "Cast"
    # Conversions to codes stay apart from products and convolutions of real numbers.
    return _links(node) and not (is_heavy and "links" in node.op.traits)


def became(node: Node, candidate: Node, policy: FusionPolicy) -> bool:
    """Turn ``node`` into a fused node, if ``policy`` accepts that; return whether it does."""
    before = node.op, node.inputs, node.attrs
    # The policy is asked about the node itself, which then has its kernel already.
    node.op, node.inputs, node.attrs = candidate.op, candidate.inputs, candidate.attrs
    if not (policy.is_faster(node) and policy.has_kernel(node)):
        node.op, node.inputs, node.attrs = before
        return False
    node.name, node.origin = candidate.name, candidate.origin
    return True


def _absorb(graph: Graph, policy: FusionPolicy) -> bool:
    """Fuse elementwise nodes with copies of the DequantizeLinear nodes before them."""
    inside = {node for node in graph.nodes if node.op.name == "DequantizeLinear"}
    changed = False
    for node in with_checkpoints(graph.nodes if inside else ()):
        if not all(_links(part) and part.op.domain in _DOMAINS for part in parts(node)):
            continue
        sources = dict.fromkeys([producer(value, "DequantizeLinear") for value in node.inputs])
        # To convert codes anew for each element they are broadcast to costs more than to do it
        # once.
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
