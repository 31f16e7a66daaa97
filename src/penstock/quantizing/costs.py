"""The costs by which types are chosen, from runs of the model with each type wherever it can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from penstock.core.records import NamedTuple, dataclass
from penstock.ir.graph import Graph, Node, Value
from penstock.quantizing.choosing import Between, Costs, LayerCost, SharedWeights
from penstock.quantizing.layers import LayerType, QuantizableLayer, works_on_codes
from penstock.quantizing.rewriting import Rewritten

_SAME = 1.1  # times as long as another may a step take that does the same
# Elements that are converted in a second, where no conversion of the value was measured.
_ELEMENT_RATE = 1e10

StepSeconds: TypeAlias = Mapping[tuple[str, ...], float]
"""seconds of each step by the names of the nodes in it"""


class NodeSeconds(NamedTuple):
    """The seconds of one form of a model, by the names of layers, of other nodes of the float
    graph, and of values that are converted to codes in steps of their own."""

    layers: Mapping[str, float]
    others: Mapping[str, float]
    conversions: Mapping[str, float]


def by_node(
    graph: Graph, layers: Iterable[QuantizableLayer], form: Rewritten | None, steps: StepSeconds
) -> NodeSeconds:
    """Attribute the seconds of steps: to the layer in a step, else to its first node in the float
    graph, or to the value if the step has only conversions."""
    of_layers, of_others, conversions = (defaultdict[str, float](float) for _ in range(3))
    own = {layer.name for layer in layers}
    known: Mapping[str, str] = {node.name: node.name for node in graph.walk()}
    layer_of = {} if form is None else form.layer_of
    value_of = {} if form is None else form.value_of
    if form is not None and form.node_of is not None:
        own, known = set(), form.node_of
    for names, seconds in steps.items():
        # Nodes that are fused with a layer are part of its time.
        layer = next((n for n in names if n in own), None)
        layer = layer or next((layer_of[n] for n in names if n in layer_of), None)
        other = next((known[n] for n in names if n in known), None)
        value = next((value_of[n] for n in names if n in value_of), None)
        if layer is not None:
            of_layers[layer] += seconds
        elif other is not None:
            of_others[other] += seconds
        elif value is not None:
            conversions[value] += seconds
    return NodeSeconds(of_layers, of_others, conversions)


class Conversions(NamedTuple):
    """Costs of converting values to codes: ``sizes`` are the numbers of their elements by name; a
    ``scale`` multiplies the times that were measured or guessed."""

    sizes: Mapping[str, int]
    scale: float

    def seconds(self, value: Value, coded: NodeSeconds) -> float:
        """Seconds to convert a value to codes, or back."""
        guess = self.sizes.get(value.name, 0) / _ELEMENT_RATE
        return self.scale * coded.conversions.get(value.name, guess)


@dataclass(frozen=True, eq=False)
class _Way:
    """The nodes between two layers, by their places."""

    first: int
    second: int
    nodes: Sequence[Node]


def _ways(layers: Sequence[QuantizableLayer]) -> list[_Way]:
    """For each pair of layers with nothing but nodes that work on codes between them, these."""
    place = {layer.node: i for i, layer in enumerate(layers)}
    ways: dict[tuple[int, int], dict[Node, None]] = {}
    for j, layer in enumerate(layers):
        # A node may be on several ways: all that are behind it from the layer on are taken.
        stack: list[tuple[Value, tuple[Node, ...]]] = [] if layer.x is None else [(layer.x, ())]
        seen: set[Value] = set()
        while stack:
            value, behind = stack.pop()
            node = value.producer
            if node is None:
                continue
            i = place.get(node)
            if i is not None and "static" in layers[i].types:
                if i != j:
                    ways.setdefault((i, j), {}).update(dict.fromkeys(behind))
            elif value not in seen and works_on_codes(node):
                seen.add(value)
                stack += [(v, (*behind, node)) for v in node.inputs if v is not None]
    return [_Way(i, j, list(nodes)) for (i, j), nodes in ways.items()]


def layer_costs(
    layers: Sequence[QuantizableLayer],
    seconds: Mapping[LayerType, NodeSeconds],
    errors: Mapping[str, Mapping[LayerType, float]],
    conversions: Conversions,
) -> Costs:
    """The costs of all types that were measured; errors that were not are 0."""
    ways = _ways(layers)
    real, coded = seconds["float32"], seconds.get("static", seconds["float32"])
    shares: dict[str, int] = defaultdict(int)
    behind: dict[int, set[str]] = defaultdict(set)
    for way in ways:
        for node in way.nodes:
            shares[node.name] += 1
            behind[way.first].add(node.name)
    between = []
    for way in ways:
        names = [node.name for node in way.nodes]
        # A conversion that several layers wait for is shared among them.
        x = layers[way.second].x
        assert x is not None
        between.append(
            Between(
                way.first,
                way.second,
                sum(coded.others.get(name, 0.0) / shares[name] for name in names),
                sum(real.others.get(name, 0.0) / shares[name] for name in names),
                conversions.seconds(x, coded) / sum(1 for w in ways if w.second == way.second),
            )
        )
    table, entered, shared = [], {way.second for way in ways}, _shared(layers)
    stored_by_first = {own.second for own in shared}
    for i, layer in enumerate(layers):
        own: dict[LayerType, LayerCost] = {}
        for type_ in layer.types:
            measured = seconds.get(type_)
            if measured is None:
                continue
            taken = measured.layers.get(layer.name, 0.0)
            before = own["float32"].seconds if type_ == "weights8" else 0.0
            if type_ == "weights8" and (layer.x is not None or taken <= _SAME * before):
                taken = before  # it is the same once it is loaded
            # Inputs of the model are converted whatever the types of other layers.
            if type_ == "static" and layer.x is not None and i not in entered:
                taken += conversions.seconds(layer.x, coded)
            if type_ in ("dynamic", "bfloat16", "blocks8", "blocks4"):
                # Nodes that are part of a step of the float layer may be steps behind this one.
                for name in behind[i]:
                    more = measured.others.get(name, 0.0) - real.others.get(name, 0.0)
                    taken += more / shares[name]
            error = errors.get(layer.name, {}).get(type_, 0.0)
            nbytes = 0.0 if i in stored_by_first else layer.nbytes(type_, alone=True)
            own[type_] = LayerCost(taken, error, nbytes)
        table.append(own)
    return Costs(layers, table, between, shared)


def _shared(layers: Sequence[QuantizableLayer]) -> list[SharedWeights]:
    """Each layer that shares its weights with one before, with the last such one."""
    last: dict[Value, int] = {}
    shared = []
    for i, layer in enumerate(layers):
        origin = layer.stored[0].origin
        if origin is None or len(layer.stored) > 1:
            continue
        if origin in last:
            nbytes = {type_: layer.nbytes(type_, alone=True) for type_ in layer.types}
            shared.append(SharedWeights(last[origin], i, nbytes))
        last[origin] = i
    return shared
