"""Rewrites a graph for a choice of types of layers, with standard operations.

A value in codes is followed by a QuantizeLinear and a DequantizeLinear, whose result all of its
readers read::

    x -> Conv -> Relu -> y -> Conv      becomes

    x -> Quantize -> Dequantize -> Conv -> Relu -> Quantize -> Dequantize -> y -> Conv
                    codes -> Dequantize -'                    codes -> Dequantize -'

Runtimes recognize this form, and compute with the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import FLOAT32, TensorType, dtypes
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ir.op import Attrs
from penstock.ops.common.constant_cache import weights_of
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import MICROSOFT, standard
from penstock.quantizing.layers import (
    BLOCK,
    Choice,
    LayerType,
    QuantizableLayer,
    Stored,
    are_transposed,
    codes_of,
    layers_in,
    layers_of,
)
from penstock.quantizing.weights import CodeStore, StoredCodes, block_codes, channel_codes

_UINT8, _INT8, _INT32 = (np.dtype(t) for t in (np.uint8, np.int8, np.int32))
_BFLOAT16 = dtypes()["bfloat16"]
_LEAST_SHARED = 1024  # elements of a matrix that is worth a look
_LEAST_SCALE = 1e-20  # so that products of scales are normal numbers


class ValueRange(NamedTuple):
    """The range of a value that its codes cover; it holds 0."""

    low: float
    high: float

    @classmethod
    def of(cls, low: float, high: float) -> ValueRange:
        """The range, with 0, which padding has."""
        return cls(min(low, 0.0), max(high, 0.0))

    def __or__(self, other: ValueRange) -> ValueRange:
        return ValueRange(min(self.low, other.low), max(self.high, other.high))

    @property
    def scale(self) -> np.float32:
        return np.float32(max((self.high - self.low) / 255, _LEAST_SCALE))

    @property
    def zero(self) -> np.uint8:
        """The code of 0."""
        return np.uint8(np.clip(np.rint(-self.low / self.scale), 0, 255))


ValueRanges = Mapping[str, ValueRange]
"""The ranges of values by their names"""


Biases = Mapping[str, np.ndarray]
"""Corrections of biases, one number for each channel, by the names of layers"""


CodeKey: TypeAlias = "tuple[Value, int, str]"
"""weights, the axis of scales and the kind of codes: the type for blocks and for what was learned,
a dtype for numbers of 16 bits, else ``channels``, ``shifted`` or ``transposed``"""


class Rewritten(NamedTuple):
    """A graph with layers of chosen types. ``layer_of``: the layer that each new node belongs to;
    ``value_of``: the value that each conversion of one that is codes belongs to; ``node_of``: the
    node of the float graph that each other node stands for, or None if they have its names; all by
    names. ``data``: the file that the graph was read from, if it was."""

    graph: Graph
    layer_of: Mapping[str, str]
    value_of: Mapping[str, str]
    node_of: Mapping[str, str] | None = None
    data: bytes | None = None


class Rewriter(Protocol):
    """Makes the forms of one model. ``shifts``: whether weights that are only stored as codes may
    have other codes of 0 than 0."""

    shifts: bool

    @property
    def layers(self) -> Sequence[QuantizableLayer]:
        """The layers of its float graph."""

    def coded(self, choice: Choice) -> Sequence[str]:
        """The names of values for which a choice needs ranges."""

    def rewritten(self, choice: Choice, ranges: ValueRanges, biases: Biases) -> Rewritten:
        """Return the graph with the types of a choice."""

    def learn(self, layer: QuantizableLayer, type_: LayerType, codes: StoredCodes) -> None:
        """Take these codes for a layer's weights as a type."""


class GraphRewriter:
    """The rewriter of a graph of standard operations."""

    shifts = True

    def __init__(self, graph: Graph) -> None:
        self.layers = layers_of(graph)
        self._graph = graph
        self._codes = CodeStore()

    def coded(self, choice: Choice) -> Sequence[str]:
        return [value.name for value in codes_of(self._graph, self.layers, choice).values]

    def rewritten(self, choice: Choice, ranges: ValueRanges, biases: Biases) -> Rewritten:
        return rewritten(self._graph, choice, ranges, biases, self.layers, self._codes)

    def learn(self, layer: QuantizableLayer, type_: LayerType, codes: StoredCodes) -> None:
        own = layer.stored[0]
        self._codes[own.value, own.axis, type_] = codes


def rewritten(
    graph: Graph,
    choice: Choice,
    ranges: ValueRanges,
    biases: Biases | None = None,
    layers: Sequence[QuantizableLayer] | None = None,
    store: CodeStore | None = None,
) -> Rewritten:
    """Return a copy of ``graph`` with the types of ``choice``. ``ranges`` has the ranges of all
    values that become codes; ``biases`` is added to the biases of layers, by name. ``layers`` are
    those of the graph, and ``store`` has codes (by ``CodeKey``) that its rewritings share."""
    layers = layers_of(graph) if layers is None else layers
    store = CodeStore() if store is None else store
    return _Rewriting(clone(graph), choice, ranges, biases or {}, store).run(layers)


@dataclass
class _Rewriting:
    """The copy while it is rewritten. ``scale_of``: the ranges of the values that are codes;
    ``dequantized``: what stands for them; ``dynamic``: codes, scales and zero points of values over
    their ranges in a run; ``rounded``: values rounded to bfloat16; ``nodes``: those of the graph at
    hand, so far; ``owner``: the name of the layer at hand; ``read``: codes of weights, of the
    ``store``; ``constants`` those that the graph has, by the identities of their arrays."""

    graph: Graph
    choice: Choice
    ranges: ValueRanges
    biases: Biases
    store: CodeStore
    read: dict[CodeKey, StoredCodes] = field(default_factory=dict)
    layers: dict[Node, QuantizableLayer] = field(default_factory=dict)
    scale_of: dict[Value, ValueRange] = field(default_factory=dict)
    dequantized: dict[Value, Value] = field(default_factory=dict)
    dynamic: dict[Value, tuple[Value, Value, Value]] = field(default_factory=dict)
    rounded: dict[Value, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    owner: str = ""
    constants: dict[int, Value] = field(default_factory=dict)
    layer_of: dict[str, str] = field(default_factory=dict)
    value_of: dict[str, str] = field(default_factory=dict)

    def run(self, layers: Sequence[QuantizableLayer]) -> Rewritten:
        """Rewrite the graph, of whose original these are the layers."""
        graph, layers = self.graph, layers_in(self.graph, layers)
        codes = codes_of(graph, layers, self.choice)
        self.layers = {layer.node: layer for layer in layers}
        for value, group in codes.group_of.items():
            own = self.ranges[value.name]
            self.scale_of[group] = own | self.scale_of.get(group, own)
        self.scale_of = {v: self.scale_of[group] for v, group in codes.group_of.items()}
        # Outer graphs come first, so that nested ones read their dequantized values.
        for inner in graph.graphs():
            self.rewrite(inner)
        _share_transposed(graph, {o.value: o.origin for own in layers for o in own.stored})
        return Rewritten(graph, self.layer_of, self.value_of)

    def rewrite(self, graph: Graph) -> None:
        """Rewrite the nodes of one graph."""
        nodes, self.nodes = graph.nodes, []
        graph.nodes = self.nodes
        # Values of a graph around it are known there, but what is added here is not.
        outer = self.dynamic, self.rounded
        self.dynamic, self.rounded = {}, {}
        for value in graph.inputs:
            self.convert(value)
        for node in nodes:
            for reader in [node, *node.inner]:
                reader.inputs = [v and self.dequantized.get(v, v) for v in reader.inputs]
            self.layer(node)
            for output in node.outputs:
                if output is not None:
                    self.convert(output)
        self.dynamic, self.rounded = outer

    def layer(self, node: Node) -> None:
        """Write a node, as a layer of its type if it is one."""
        layer = self.layers.get(node)
        self.owner = "" if layer is None else layer.name
        type_ = "float32" if layer is None else self.choice.get(layer.name, "float32")
        if layer is None or type_ == "float32":
            self.nodes.append(node)
        elif type_ == "static":
            assert layer.x is not None
            self.static(layer, self.scale_of[layer.x])
        elif type_ == "dynamic":
            self.dynamic_layer(layer)
        elif type_ == "weights8":
            self.stored_as_codes(layer)
        elif type_ == "weights16":
            self.stored_as_halves(layer, np.dtype(np.float16))
        elif type_ == "bfloat16":
            node.inputs[0] = self.rounded_to_bfloat16(node.inputs[0])
            self.stored_as_halves(layer, _BFLOAT16)
        elif type_ == "bfloat16x8":
            node.inputs[0] = self.rounded_to_bfloat16(node.inputs[0])
            self.stored_as_codes(layer)
        else:
            self.blocks(layer, int(type_.removeprefix("blocks")))

    def convert(self, value: Value) -> None:
        """Add the conversions of a value that is codes."""
        self.owner = ""
        if value in self.scale_of:
            self.dequantized[value] = self.converted(value, self.scale_of[value])

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        output: Value | str,
        attrs: Attrs | None = None,
        domain: str = "",
    ) -> Value:
        """Add a node; return its ``output``, a new value if that is a name."""
        own = Value(output) if isinstance(output, str) else output
        node = Node(standard(op, domain), inputs, [own], attrs, name=f"{own.name}/{op}")
        self.append(node)
        if own is not output:
            own.type = node_types(node)[0]
        return own

    def append(self, node: Node) -> None:
        """Add a new node, which belongs to the layer or the value at hand."""
        node.origin = node.name
        if self.owner:
            self.layer_of[node.name] = self.owner
        self.nodes.append(node)

    def shared(self, name: str, array: np.ndarray) -> Value:
        """The constant for an array of codes: one for all layers that share weights."""
        if id(array) not in self.constants:
            self.constants[id(array)] = Value(name, const=array)
        return self.constants[id(array)]

    def converted(self, value: Value, range_: ValueRange) -> Value:
        """The value as codes, and from these as real numbers again."""
        name = value.name
        scale = Value(f"{name}/scale", const=np.asarray(range_.scale, FLOAT32))
        zero = Value(f"{name}/zero", const=np.asarray(range_.zero, _UINT8))
        codes = self.add("QuantizeLinear", [value, scale, zero], f"{name}/codes")
        result = self.add("DequantizeLinear", [codes, scale, zero], f"{name}/dequantized")
        # Where these are steps of their own, their seconds belong to no layer.
        self.value_of.update((node.name, name) for node in self.nodes[-2:])
        return result

    def bias(self, layer: QuantizableLayer, codes: bool = True) -> np.ndarray | None:
        """The bias of a layer, with its correction if its weights are ``codes`` of 8 bits by
        channel. A MatMul without a bias gets none: it would be a step more."""
        extra, own = self.biases.get(layer.name), layer.bias
        if extra is None or not codes or (own is None and layer.node.op.name == "MatMul"):
            return own
        return (extra if own is None else own.reshape(-1) + extra).astype(FLOAT32)

    def static(self, layer: QuantizableLayer, x: ValueRange) -> None:
        """The layer, of dequantized weights and bias."""
        node, name = layer.node, layer.name
        node.inputs[1], scales = self.stored(layer, layer.stored[0])
        bias = self.bias(layer)
        if bias is not None and node.op.name != "MatMul":
            steps = (x.scale * scales).astype(FLOAT32)
            # Of int32, with the scale of the sums: other runtimes take no other bias.
            numbers = np.rint(bias.reshape(-1).astype(np.float64) / steps)
            stored = Value(f"{name}/bias", const=numbers.clip(-(2**31), 2**31 - 1).astype(_INT32))
            scale = Value(f"{name}/bias/scale", const=steps)
            real = f"{name}/bias/dequantized"
            node.inputs[2:] = [self.add("DequantizeLinear", [stored, scale], real, {"axis": 0})]
        self.nodes.append(node)

    def codes(self, layer: QuantizableLayer, own: Stored) -> StoredCodes:
        """Weights as int8 with their scales."""
        if self.has_learned(layer):
            return self.codes_for((own.value, own.axis, "weights8"))
        # No kernel multiplies codes that are only stored, so those of 0 may be others. Corrections
        # of biases are for symmetric codes.
        alone = own.readers == 1 and layer.node.op.name != "Gather"
        shifted = alone and self.is_stored(layer) and layer.name not in self.biases
        key = own.value, own.axis, "shifted" if shifted else "channels"
        return self.codes_for(key, lambda: channel_codes(own.weights, own.axis, shifted))

    def codes_for(self, key: CodeKey, make: Callable[[], StoredCodes] | None = None) -> StoredCodes:
        """The codes of a key, which ``make`` returns where the store has none yet; the same arrays
        in the whole graph."""
        if key not in self.read:
            if make is not None and key not in self.store:
                self.store[key] = make()
            self.read[key] = self.store[key]
        return self.read[key]

    def transposed(self, layer: QuantizableLayer, own: Stored) -> StoredCodes:
        codes, scales, _ = self.codes(layer, own)
        return StoredCodes(np.ascontiguousarray(codes.T), scales)

    def is_stored(self, layer: QuantizableLayer) -> bool:
        """Whether weights are codes only in the file."""
        return self.choice.get(layer.name) in ("weights8", "bfloat16x8")

    def has_learned(self, layer: QuantizableLayer) -> bool:
        """Whether a layer only stores codes, and these were learned."""
        own = layer.stored[0]
        return self.is_stored(layer) and (own.value, own.axis, "weights8") in self.store

    def stored(self, layer: QuantizableLayer, own: Stored) -> tuple[Value, np.ndarray]:
        """Weights that are stored as codes, and their scales."""
        name = f"{layer.name}/weights" if own.place == 1 else f"{layer.name}/weights{own.place}"
        codes, scales, zeros = self.codes(layer, own)
        stored = self.shared(name, codes)
        scale = self.shared(f"{name}/scale", scales)
        zeros = np.zeros(scales.shape, _INT8) if zeros is None else zeros
        zero = Value(f"{name}/zero", const=zeros)
        inputs, attrs = [stored, scale, zero], {"axis": own.axis}
        return self.add("DequantizeLinear", inputs, f"{name}/dequantized", attrs), scales

    def stored_as_codes(self, layer: QuantizableLayer) -> None:
        """The node, with weights that are dequantized when the model is loaded; of a Gather of rows
        those that it reads are, since the whole may be large."""
        node, own = layer.node, layer.stored[0]
        if node.op.name != "Gather" or own.place or node.attrs.get("axis", 0) or own.axis:
            for stored in layer.stored:
                weights = self.stored(layer, stored)[0]
                if self.choice[layer.name] == "bfloat16x8":
                    weights = self.rounded_to_bfloat16(weights)
                node.inputs[stored.place] = weights
            # Corrections are for the nearest codes.
            bias = None if layer.x is None or self.has_learned(layer) else self.bias(layer)
            if bias is not None:
                node.inputs[2:] = [Value(f"{layer.name}/bias", const=bias)]
            self.nodes.append(node)
            return
        name, indices = layer.name, node.inputs[1]
        codes, scales, _ = self.codes(layer, own)
        by_row = scales.reshape(-1, *[1] * (len(own.dims) - 1))
        table = self.shared(f"{name}/weights", codes)
        rows = self.add("Gather", [table, indices], f"{name}/rows")
        real = self.add("Cast", [rows], f"{name}/real", {"to": 1})
        scales_of_rows = Value(f"{name}/weights/scale", const=by_row)
        scale = self.add("Gather", [scales_of_rows, indices], f"{name}/scale")
        self.add("Mul", [real, scale], layer.output)

    def rounded_to_bfloat16(self, x: Value | None) -> Value:
        """A value rounded to bfloat16, as float32; the same for all layers that read it."""
        assert x is not None
        if x not in self.rounded:
            to = element_number("bfloat16")
            narrow = self.add("Cast", [x], f"{x.name}/bfloat16", {"to": to})
            self.rounded[x] = self.add("Cast", [narrow], f"{x.name}/rounded", {"to": 1})
        return self.rounded[x]

    def stored_as_halves(self, layer: QuantizableLayer, dtype: np.dtype) -> None:
        """The node, with weights of 16 bits that are widened when the model is loaded."""
        for own in layer.stored:
            name = f"{layer.name}/weights{own.place}"
            key = own.value, own.axis, dtype.name
            made = self.codes_for(key, partial(_halves, own, dtype))
            halves = self.shared(name, made.codes)
            layer.node.inputs[own.place] = self.add("Cast", [halves], f"{name}/real", {"to": 1})
        self.nodes.append(layer.node)

    def dynamic_layer(self, layer: QuantizableLayer) -> None:
        """A convolution or product of integers, with the range of its input as it is in the run."""
        node, name, output = layer.node, layer.name, layer.output
        x, x_scale, x_zero = self.run_codes(node.inputs[0])
        own, is_conv = layer.stored[0], node.op.name == "Conv"
        if layer.axis == 0 and not is_conv:
            make = partial(self.transposed, layer, own)
            codes, scales, _ = self.codes_for((own.value, 0, "transposed"), make)
        else:
            codes, scales, _ = self.codes(layer, own)
        # Behind the channels of a convolution come the axes of images.
        channels = (-1, *[1] * (codes.ndim - 2)) if is_conv else (-1,)
        stored = self.shared(f"{name}/weights", codes)
        op, attrs = ("ConvInteger", node.attrs) if is_conv else ("MatMulInteger", None)
        sums = self.add(op, [x, stored, x_zero], f"{name}/sums", attrs)
        real = self.add("Cast", [sums], f"{name}/real", {"to": 1})
        weight_scale = Value(f"{name}/weights/scale", const=scales.reshape(channels))
        # The two scales are multiplied first: one factor for each channel is left for the sums.
        scale = self.add("Mul", [x_scale, weight_scale], f"{name}/scale")
        bias = self.bias(layer)
        if bias is None:
            self.add("Mul", [real, scale], output)
            return
        product = self.add("Mul", [real, scale], f"{name}/product")
        self.add("Add", [product, Value(f"{name}/bias", const=bias.reshape(channels))], output)

    def run_codes(self, x: Value | None) -> tuple[Value, Value, Value]:
        """The codes of a value over its range in the run; the same for all layers that read it."""
        assert x is not None
        if x not in self.dynamic:
            codes = Value(f"{x.name}/run_codes", TensorType(_UINT8, x.shape))
            scale = Value(f"{x.name}/run_scale", TensorType(FLOAT32, ()))
            zero = Value(f"{x.name}/run_zero", TensorType(_UINT8, ()))
            op = standard("DynamicQuantizeLinear")
            node = Node(op, [x], [codes, scale, zero], name=f"{x.name}/{op.name}")
            self.append(node)
            self.dynamic[x] = codes, scale, zero
        return self.dynamic[x]

    def blocks(self, layer: QuantizableLayer, bits: int) -> None:
        """A product with weights in blocks."""
        key = layer.stored[0].value, layer.axis, f"blocks{bits}"
        packed, scales, _ = self.codes_for(key, partial(_blocks, layer, bits))
        columns, inner = layer.dims if layer.axis == 0 else layer.dims[::-1]
        name = layer.name
        stored = self.shared(f"{name}/weights", packed)
        scale = Value(f"{name}/weights/scale", const=scales.reshape(-1))
        bias = self.bias(layer, codes=False)
        output = layer.output if bias is None else f"{name}/product"
        # By codes: the input becomes int8 over the range of each block.
        attrs = {"K": inner, "N": columns, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        x = layer.node.inputs[0]
        # Older versions of the operation have no input for a bias.
        product = self.add("MatMulNBits", [x, stored, scale], output, attrs, MICROSOFT)
        if bias is not None:
            value = Value(f"{name}/bias", const=bias.reshape(-1))
            self.add("Add", [product, value], layer.output)


def _halves(own: Stored, dtype: np.dtype) -> StoredCodes:
    return StoredCodes(own.weights.astype(dtype), np.empty(0))


def _blocks(layer: QuantizableLayer, bits: int) -> StoredCodes:
    return block_codes(layer.weights if layer.axis == 0 else layer.weights.T, bits)


def _share_transposed(graph: Graph, origins: Mapping[Value, Value | None]) -> None:
    """Let a matrix that is another one transposed be made of that, as where the table of embeddings
    is the last product's matrix as well: what was folded for kernels would be twice in the file.
    ``origins``: those of weights (``Stored``), which are not compared again."""

    def are_same(one: Value, other: Value) -> bool:
        if one in origins or other in origins:
            return origins.get(one, one) is origins.get(other, other)
        return are_transposed(one, other)

    by_shape: dict[tuple[object, ...], list[Value]] = {}
    made: dict[Value, Value] = {}
    nodes = []
    for node in graph.walk():
        for i, value in enumerate(node.inputs):
            weights = weights_of(value)
            if value is None or weights is None or weights.ndim != 2:
                continue
            if weights.size < _LEAST_SHARED:
                continue
            own = by_shape.setdefault((weights.dtype, *weights.shape), [])
            if value not in made and value not in own:
                others = by_shape.get((weights.dtype, *weights.shape[::-1]), [])
                other = next((v for v in others if are_same(v, value)), None)
                if other is None:
                    own.append(value)
                    continue
                result = Value(f"{value.name}/transposed", value.type)
                name = f"{value.name}/Transpose"
                nodes.append(Node(standard("Transpose"), [other], [result], name=name))
                made[value] = result
            node.inputs[i] = made.get(value, value)
    # In front, where nested graphs find them as well.
    graph.nodes[:0] = nodes
