"""From a choice of types for layers to the graph that has them, of standard operations.

A value that is codes gets a QuantizeLinear and a DequantizeLinear behind it, which all of its
readers read::

    x -> Conv -> Relu -> y -> Conv      becomes

    x -> Quantize -> Dequantize -> Conv -> Relu -> Quantize -> Dequantize -> y -> Conv
                    codes -> Dequantize -'                    codes -> Dequantize -'

Runtimes recognize this form, and compute with the codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.ops.registry import MICROSOFT, standard
from penstock.quantizing.layers import BLOCK, Choice, Layer, codes_of, layers_of
from penstock.quantizing.weights import block_codes, channel_codes

_UINT8, _INT8, _INT32 = (np.dtype(t) for t in (np.uint8, np.int8, np.int32))
_LEAST_SCALE = 1e-20  # so that products of scales are normal numbers


class ValueRange(NamedTuple):
    """The range of a value that its codes cover; it holds 0."""

    low: float
    high: float

    @classmethod
    def of(cls, low: float, high: float) -> ValueRange:
        """The range, with 0, which padding has."""
        return cls(min(low, 0.0), max(high, 0.0))

    def __or__(self, other: ValueRange) -> ValueRange:  # type: ignore[override]
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


def quantized(
    graph: Graph, choice: Choice, ranges: ValueRanges, biases: Biases | None = None
) -> Graph:
    """A copy of ``graph`` whose layers have the types of ``choice``. ``ranges`` has those of all
    values that become codes; ``biases`` what is added to the biases of layers, by name."""
    return _Rewriting(clone(graph), choice, ranges, biases or {}).run()


@dataclass
class _Rewriting:
    """The copy while it is rewritten: ``added`` has new nodes by the node that they stand before,
    None for the end."""

    graph: Graph
    choice: Choice
    ranges: ValueRanges
    biases: Biases
    dynamic: dict[Value, tuple[Value, Value, Value]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)

    def run(self) -> Graph:
        graph = self.graph
        layers = layers_of(graph)
        codes = codes_of(graph, layers, self.choice)
        by_node = {layer.node: layer for layer in layers}
        scale_of: dict[Value, ValueRange] = {}
        for value, group in codes.group_of.items():
            own = self.ranges[value.name]
            scale_of[group] = own if group not in scale_of else scale_of[group] | own
        dequantized: dict[Value | None, Value] = {}

        def convert(value: Value) -> None:
            dequantized[value] = self.converted(value, scale_of[codes.group_of[value]])

        nodes = list(graph.nodes)
        for value in graph.inputs:
            if value in codes.values:
                convert(value)
        for node in nodes:
            layer = by_node.get(node)
            for inner in [node, *node.inner]:
                inner.inputs = [dequantized.get(v, v) for v in inner.inputs]  # type: ignore[misc]
            type_ = "float32" if layer is None else self.choice.get(layer.name, "float32")
            if layer is None or type_ == "float32":
                self.nodes.append(node)
            elif type_ == "static":
                self.static(layer, scale_of[codes.group_of[layer.x]])
            elif type_ == "dynamic":
                self.dynamic_product(layer)
            else:
                self.blocks(layer, int(type_.removeprefix("blocks")))
            for output in node.outputs:
                if output is not None and output in codes.values:
                    convert(output)
        graph.nodes = self.nodes
        return graph

    def add(
        self,
        op: str,
        inputs: Sequence[Value | None],
        output: Value,
        attrs: Mapping[str, Any] | None = None,
        domain: str = "",
    ) -> Value:
        node = Node(standard(op, domain), inputs, [output], attrs, name=f"{output.name}/{op}")
        node.origin = node.name
        self.nodes.append(node)
        return output

    def converted(self, value: Value, range_: ValueRange) -> Value:
        """The value as codes, and from these as real numbers again."""
        name = value.name
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        scale = Value(f"{name}/scale", const=np.asarray(range_.scale, FLOAT32))
        zero = Value(f"{name}/zero", const=np.asarray(range_.zero, _UINT8))
        codes = Value(f"{name}/codes", TensorType(_UINT8, shape))
        self.add("QuantizeLinear", [value, scale, zero], codes)
        result = Value(f"{name}/dequantized", TensorType(FLOAT32, shape))
        return self.add("DequantizeLinear", [codes, scale, zero], result)

    def bias(self, layer: Layer) -> np.ndarray | None:
        extra, own = self.biases.get(layer.name), layer.bias
        if extra is None:
            return own
        return (extra if own is None else own.reshape(-1) + extra).astype(FLOAT32)

    def static(self, layer: Layer, x: ValueRange) -> None:
        """The layer, of dequantized weights and bias."""
        node, name = layer.node, layer.name
        codes, scales = channel_codes(layer.weights, layer.axis)
        stored = Value(f"{name}/weights", const=codes)
        scale = Value(f"{name}/weights/scale", const=scales)
        zero = Value(f"{name}/weights/zero", const=np.zeros(scales.shape, _INT8))
        real = Value(f"{name}/weights/dequantized", TensorType(FLOAT32, codes.shape))
        attrs = {"axis": layer.axis}
        node.inputs[1] = self.add("DequantizeLinear", [stored, scale, zero], real, attrs)
        bias = self.bias(layer)
        if bias is not None and node.op.name != "MatMul":
            steps = (x.scale * scales).astype(FLOAT32)
            numbers = np.rint(bias.reshape(-1).astype(np.float64) / steps)
            stored = Value(f"{name}/bias", const=numbers.clip(-(2**31), 2**31 - 1).astype(_INT32))
            scale = Value(f"{name}/bias/scale", const=steps)
            real = Value(f"{name}/bias/dequantized", TensorType(FLOAT32, bias.reshape(-1).shape))
            node.inputs[2:] = [self.add("DequantizeLinear", [stored, scale], real, {"axis": 0})]
        self.nodes.append(node)

    def dynamic_product(self, layer: Layer) -> None:
        """A product of integers, with the range of its input as it is in the run."""
        node, name, output = layer.node, layer.name, layer.output
        shape = output.type.shape if isinstance(output.type, TensorType) else None
        x, x_scale, x_zero = self.run_codes(node.inputs[0])
        codes, scales = channel_codes(layer.weights, layer.axis)
        matrix = codes if layer.axis == 1 else np.ascontiguousarray(codes.T)
        stored = Value(f"{name}/weights", const=matrix)
        sums = Value(f"{name}/sums", TensorType(_INT32, shape))
        self.add("MatMulInteger", [x, stored, x_zero], sums)
        real = Value(f"{name}/real", TensorType(FLOAT32, shape))
        self.add("Cast", [sums], real, {"to": 1})
        weight_scale = Value(f"{name}/weights/scale", const=scales)
        scale = Value(f"{name}/scale", TensorType(FLOAT32, scales.shape))
        self.add("Mul", [x_scale, weight_scale], scale)
        self.scaled(layer, real, scale)

    def scaled(self, layer: Layer, real: Value, scale: Value) -> None:
        """The product with the scales, and its bias."""
        bias, name, output = self.bias(layer), layer.name, layer.output
        if bias is None:
            self.add("Mul", [real, scale], output)
            return
        product = Value(f"{name}/product", output.type)
        self.add("Mul", [real, scale], product)
        self.add("Add", [product, Value(f"{name}/bias", const=bias.reshape(-1))], output)

    def run_codes(self, x: Value | None) -> tuple[Value, Value, Value]:
        """The codes of a value over its range in the run; the same for all layers that read it."""
        assert x is not None
        if x not in self.dynamic:
            shape = x.type.shape if isinstance(x.type, TensorType) else None
            codes = Value(f"{x.name}/run_codes", TensorType(_UINT8, shape))
            scale = Value(f"{x.name}/run_scale", TensorType(FLOAT32, ()))
            zero = Value(f"{x.name}/run_zero", TensorType(_UINT8, ()))
            op = standard("DynamicQuantizeLinear")
            node = Node(op, [x], [codes, scale, zero], name=f"{x.name}/{op.name}")
            node.origin = node.name
            self.nodes.append(node)
            self.dynamic[x] = codes, scale, zero
        return self.dynamic[x]

    def blocks(self, layer: Layer, bits: int) -> None:
        """A product with weights in blocks."""
        rows = layer.weights if layer.axis == 0 else layer.weights.T
        packed, scales = block_codes(np.ascontiguousarray(rows), bits)
        columns, inner = rows.shape
        name = layer.name
        stored = Value(f"{name}/weights", const=packed)
        scale = Value(f"{name}/weights/scale", const=scales.reshape(-1))
        bias = self.bias(layer)
        product = layer.output if bias is None else Value(f"{name}/product", layer.output.type)
        # By codes: the input becomes int8 over the range of each block.
        attrs = {"K": inner, "N": columns, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        x = layer.node.inputs[0]
        self.add("MatMulNBits", [x, stored, scale], product, attrs, MICROSOFT)
        if bias is not None:
            value = Value(f"{name}/bias", const=bias.reshape(-1))
            self.add("Add", [product, value], layer.output)
