"""Nodes that a backend runs as one: products and convolutions with what follows them, element by
element; and chains of elementwise operations.

This pass finds the chains, and the backends say which of them they have a kernel for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from penstock.ir.graph import Graph, Node, Value
from penstock.ops.internal.fused import fused, is_fused
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.ops.registry import MICROSOFT
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.rewrite import Substitution, readers_of

FOLLOWERS = frozenset(
    """
    Abs Add Clip Div Elu Exp Gelu HardSigmoid HardSwish LeakyRelu Log Max Min Mish Mul Neg PRelu Pow
    QuickGelu Reciprocal Relu Round Selu Sigmoid Softplus Sqrt Sub Swish Tanh ZeroNaN
    """.split()  # noqa: SIM905 - names are easier to read without quotes
)
"""what may follow in a chain"""

INTEGERS = frozenset({"ConvInteger", "MatMulInteger"})
"""products and convolutions whose results are no real numbers until they are cast"""
HEAVY = INTEGERS | {"Conv", "ConvTranspose", "Gemm", "MatMul"}
OTHERS = frozenset({"AveragePool", "BatchNormalization", "GlobalAveragePool", "MaxPool", "Softmax"})
BEGINNINGS = (HEAVY, OTHERS | FOLLOWERS)
"""What chains begin with. Of two that could take in the same node, those that stand first do."""

_MOST_NODES = 16
_DOMAINS = ("", MICROSOFT, ZERO_NAN.domain)


class Fuse(Pass):
    """Replace chains of nodes by fused nodes that a backend has a kernel for (see ``fuse``)."""

    name = "fuse"
    requires = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        kernel = context.kernel
        return kernel is not None and fuse(graph, lambda node: kernel(node) is not None)


def fuse(graph: Graph, accepts: Callable[[Node], bool]) -> bool:
    """Replace chains of nodes, in ``graph`` and every nested one, by fused nodes, of each the
    longest that ``accepts`` says a backend takes; returns whether there were any."""
    changed = False
    for beginnings in BEGINNINGS:
        readers = readers_of(graph)
        # Who waits for a node waits for what it does, not for what would be fused with it.
        apart = {before for node in graph.walk() for before in node.control_inputs}
        for each in list(graph.graphs()):
            instead = _chains(each, beginnings, readers, apart, accepts)
            if instead:
                _replace(each, instead)
                changed = True
    return changed


def _chains(
    graph: Graph,
    beginnings: Collection[str],
    readers: Mapping[Value, Sequence[Node | None]],
    apart: Collection[Node],
    accepts: Callable[[Node], bool],
) -> dict[Node, Node]:
    """Fused nodes by the nodes that they take the place of: those of a chain, of which each but the
    last is mapped to itself."""
    inside = set(graph.nodes)
    instead: dict[Node, Node] = {}

    def can(node: Node, names: Collection[str]) -> bool:
        free = node not in instead and node not in apart and len(node.outputs) == 1
        return free and node.op.name in names and node.op.domain in _DOMAINS

    for node in graph.nodes:
        if not can(node, beginnings):
            continue
        chain = [node]
        while len(chain) < _MOST_NODES:
            (output,) = chain[-1].outputs
            assert output is not None
            after = readers.get(output, ())
            last = after[0] if len(after) == 1 else None
            if last is None or last not in inside or not can(last, _next(chain)):
                break
            chain.append(last)
        while len(chain) > 1:
            candidate = fused(chain)
            if accepts(candidate):
                instead.update((each, each) for each in chain)
                instead[chain[-1]] = candidate
                break
            chain.pop()
    return instead


def _next(chain: Sequence[Node]) -> Collection[str]:
    """What may follow a chain: a product may go on with its softmax, and that with a product."""
    names = [node.op.name for node in chain]
    if names[-1] in INTEGERS:
        return {"Cast"}
    if names[0] != "MatMul":
        return FOLLOWERS
    if "Softmax" not in names:
        return FOLLOWERS | {"Softmax"}
    return {"MatMul", "ZeroNaN"} if names[-1] in ("Softmax", "ZeroNaN") else ()


def _replace(graph: Graph, instead: Mapping[Node, Node]) -> None:
    substitution = Substitution()
    nodes = []
    for node in graph.nodes:
        made = instead.get(node, node)
        if made is not node:
            (old,), (new,) = node.outputs, made.outputs
            assert old is not None and new is not None
            substitution[old] = new
        if made is not node or node not in instead:
            nodes.append(made)
    graph.nodes = nodes
    for each in graph.graphs():
        for node in each.nodes:
            substitution.apply(node)
        substitution.apply_outputs(each)


def apart(graph: Graph, keeps: Callable[[Node], bool]) -> dict[Node, list[Node]]:
    """Put the nodes that a fused one is made of in its place, unless ``keeps`` says that it is to
    stay; returns what stands for which."""
    found: dict[Node, list[Node]] = {}
    for each in graph.graphs():
        nodes: list[Node] = []
        for node in each.nodes:
            if is_fused(node) and not keeps(node):
                found[node] = _unfused(node)
            nodes += found.get(node, [node])
        each.nodes = nodes
    return found


def _unfused(node: Node) -> list[Node]:
    region = node.attrs["region"]
    known: dict[Value, Value | None] = dict(zip(region.inputs, node.inputs, strict=True))
    made: list[Node] = []
    for part in region.nodes:
        inputs = [None if value is None else known[value] for value in part.inputs]
        (old,) = part.outputs
        assert old is not None
        last = part is region.nodes[-1]
        output = node.outputs[0] if last else Value(old.name, old.type)
        known[old] = output
        made.append(Node(part.op, inputs, [output], part.attrs, name=part.name, origin=part.origin))
    made[0].control_inputs = list(node.control_inputs)
    return made
