"""Rewrites a TFLite file for a choice of layer types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import replace
from penstock.frontends.tflite.file import opened_model
from penstock.frontends.tflite.importer import SubgraphImporter, importing
from penstock.frontends.tflite.writer import fields_of, serialized
from penstock.ir.graph import Graph, Model, Node, Value, clone
from penstock.passes.context import PassContext
from penstock.passes.pipeline import PASSES, run_passes
from penstock.quantizing.layers import STORING, Choice, LayerType, QuantizableLayer, layers_of
from penstock.quantizing.rewriting import Biases, Rewritten, ValueRanges
from penstock.quantizing.tflite_edit import TfliteEdit
from penstock.quantizing.tflite_graph import BIAS, WEIGHT_AXES, WEIGHTS, Operator, TfliteGraph
from penstock.quantizing.weights import CodeStore, StoredCodes

_ORDERS = {"CONV_2D": (0, 2, 3, 1), "DEPTHWISE_CONV_2D": (1, 2, 3, 0)}
"""the permutation from the axes of convolution weights in a graph to those in a file"""


class TfliteRewriter:
    """The rewriter of a TFLite file. ``entry`` is the signature whose subgraph is quantized;
    without such a signature it is the first subgraph. Raises ``InvalidModel`` and ``Unsupported``
    like ``penstock.load``, and ``PenstockError`` for files that cannot be written again.
    """

    shifts = False  # TFLite has one zero point, 0, for weights with scales by channel

    def __init__(self, data: bytes, entry: str, limits: Limits = DEFAULT_LIMITS) -> None:
        with opened_model(data, "the model", wanted="tflite") as (table, weights):
            fields = fields_of(table, weights)
        self.data, self._entry, self._limits = data, entry, limits
        model, importer = self._imported(data)
        # Ranges and layers are keyed by value names, edits by tensor indices.
        self.names = {index: value.name for index, value in importer.entry.values.items()}
        self.graph = TfliteGraph(fields, importer.entry.index)
        graph = _folded(model.graph)
        self.model = replace(model, graphs={model.entry: graph})
        # The range of a folded tensor cannot be observed, as it cannot be fetched.
        kept = _names(graph)
        self.graph.folded = frozenset(
            tensor
            for tensor in self.graph.producers
            if self.names[tensor] not in kept and self.graph.stored(tensor) is None
        )
        self._name_nodes(graph, importer.entry.where)
        self.layers = self._layers(graph)
        self._places = {own.key: own.position for own in self.graph.operators}
        self._codes = CodeStore()
        self._learned = CodeStore()

    def _imported(self, data: bytes) -> tuple[Model, SubgraphImporter]:
        with importing(data, "the model", self._limits, False, wanted="tflite") as importer:
            return importer.model(None, self._entry), importer

    def _name_nodes(self, graph: Graph, where: str) -> None:
        """Name nodes after their operators: the convolution or product of an operator, or else its
        last node, takes the operator's name."""
        # Operators are identified by origins, which passes keep; value names are arbitrary.
        by_origin: dict[str, list[Node]] = {}
        for node in graph.nodes:
            by_origin.setdefault(node.origin, []).append(node)
        layers = {layer.node for layer in layers_of(graph)}
        for own in self.graph.operators:
            nodes = by_origin.get(f"{own.key} in {where}", [])
            if not nodes:
                continue
            main = next((node for node in nodes if node in layers), nodes[-1])
            for i, node in enumerate(nodes):
                node.name = own.key if node is main else f"{own.key}/{i}"

    def _layers(self, graph: Graph) -> list[QuantizableLayer]:
        """The layers, with the types that their operators support; only float32 for others."""
        values = {value.name: value for node in graph.nodes for value in node.outputs if value}
        values |= {value.name: value for value in graph.inputs}
        operators = {own.key: own for own in self.graph.operators if own.name in WEIGHT_AXES}
        layers = []
        for layer in layers_of(graph):
            own = operators.get(layer.name)
            types: list[LayerType] = ["float32"]
            if own is not None and self._has_weights_of(own, layer):
                types += [type_ for type_ in layer.types if self._may_have(own, layer, type_)]
                x = values.get(self.names[own.inputs[0]])
                if layer.x is not None and x is not None:
                    # The file is channels-last.
                    layer = layer._replace(x=x, channels=-1)
            layers.append(layer._replace(types=types))
        return layers

    def _has_weights_of(self, own: Operator, layer: QuantizableLayer) -> bool:
        """Whether an operator has the weights of a layer and no other constant to store."""
        weights = self.graph.constant(own.inputs[WEIGHTS])
        alone = len(layer.stored) == 1 and layer.stored[0].place == WEIGHTS
        return alone and weights is not None and weights.size == math.prod(layer.dims)

    def _may_have(self, own: Operator, layer: QuantizableLayer, type_: LayerType) -> bool:
        """Whether an operator supports ``type_``, which is not float32."""
        if type_ in STORING:
            return True
        kernel = own.int8
        if kernel is None or layer.x is None:
            return False
        if type_ == "static":
            bias = own.inputs[BIAS] if len(own.inputs) > BIAS else -1
            is_known = bias < 0 or self.graph.constant(bias) is not None
            return is_known and len(self.graph.real_values((own.inputs[0], *own.outputs))) == 2
        # XNNPACK rejects inputs of dynamic shape. Dynamic ranges of convolutions cover the whole
        # input in Penstock, but one image in LiteRT.
        shape = self.graph.tensors[own.inputs[0]].get("shape", [])
        weights = self.graph.tensors[own.inputs[WEIGHTS]].get("shape", [])
        is_one = len(shape) == 4 and shape[0] == 1 and shape[-1] == weights[-1]
        fits = is_one or (len(weights) == 2 and len(shape) > 0)
        return type_ == "dynamic" and bool(kernel.dynamic) and fits

    def places(self, choice: Choice, type_: LayerType) -> frozenset[int]:
        """The positions of operators whose layers have a type."""
        return frozenset(self._places[name] for name, own in choice.items() if own == type_)

    def coded(self, choice: Choice) -> Sequence[str]:
        codes = self.graph.codes(self.places(choice, "static"))
        return [self.names[tensor] for tensor in codes.group_of]

    def learn(self, layer: QuantizableLayer, type_: LayerType, codes: StoredCodes) -> None:
        place = self._places[layer.name]
        own = self.graph.operators[place]
        weights, order = self.graph.constant(own.inputs[WEIGHTS]), _ORDERS.get(own.name, (1, 0))
        # Products may have the weights as in the file, or transposed.
        if weights is not None and len(layer.dims) == 2 and layer.axis == WEIGHT_AXES[own.name]:
            order = (0, 1)
        if weights is not None and weights.ndim == len(order):
            moved = codes.codes.transpose(order)
            if np.array_equal(layer.weights.transpose(order), weights):
                self._learned[place] = StoredCodes(np.ascontiguousarray(moved), codes.scales)

    def rewritten(self, choice: Choice, ranges: ValueRanges, biases: Biases) -> Rewritten:
        static = self.graph.codes(self.places(choice, "static"))
        edit = TfliteEdit(
            self.graph,
            {self._places[name]: type_ for name, type_ in choice.items()},
            static.operators,
            self.graph.scales(static, self.names, ranges),
            {self._places[name]: own for name, own in biases.items()},
            self._codes,
            self._learned,
        )
        data = serialized(edit.run())
        model, importer = self._imported(data)
        layer_of: dict[str, str] = {}
        value_of: dict[str, str] = {}
        node_of: dict[str, str] = {}
        # Inserted conversions shift the positions of operators.
        names, where = importer.operations, importer.entry.where
        sources = {
            f"{names[own.get('opcode_index', 0)]}_{position} in {where}": source
            for position, (source, own) in enumerate(edit.emitted)
        }
        layers = {layer.name for layer in self.layers}
        for node in model.graph.nodes:
            source = sources.get(node.origin)
            if isinstance(source, Operator):
                (layer_of if source.key in layers else node_of)[node.name] = source.key
            elif source is not None:
                value_of[node.name] = self.names[source]
        return Rewritten(model.graph, layer_of, value_of, node_of, data)


def _folded(graph: Graph) -> Graph:
    """A copy of a graph with constant weights, in which all values keep their names."""
    # No other passes: these fold normalizations into weights, and remove values of the file.
    graph = clone(graph)
    outputs, context = len(graph.outputs), PassContext(fold_quantized_weights=False)
    # Making them outputs keeps the values of tensors whose sources other operators read.
    graph.outputs += [value for node in graph.nodes for value in node.outputs if value is not None]
    run_passes((PASSES["fold_constants"],), graph, context)
    del graph.outputs[outputs:]
    return graph


def _names(graph: Graph) -> set[str]:
    values: Iterable[Value | None] = [*graph.inputs, *(v for n in graph.nodes for v in n.outputs)]
    return {value.name for value in values if value is not None}
