"""Edits the tables of a TFLite file to change the types of its layers.

Everything else is kept: operators and their options, names, signatures, metadata and other
subgraphs. Layers take the forms that TFLite's kernels support:

========= =================================================================================
static    int8 inputs and outputs, between QUANTIZE and DEQUANTIZE next to float32
dynamic   float32 inputs and outputs, int8 weights: kernels quantize the input in each run
weights8  int8 weights with a DEQUANTIZE, which runtimes compute once
weights16 the same with float16 weights
========= =================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from penstock.core.records import dataclass, field
from penstock.core.types import FLOAT32
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.writer import Fields
from penstock.quantizing.layers import LayerType
from penstock.quantizing.rewriting import ValueRange
from penstock.quantizing.tflite_graph import (
    BIAS,
    FLOAT16_TYPE,
    FLOAT32_TYPE,
    INT8_TYPE,
    INT32_TYPE,
    WEIGHT_AXES,
    WEIGHTS,
    CodeScale,
    Operator,
    TfliteGraph,
)
from penstock.quantizing.weights import CodeStore, StoredCodes, channel_codes

_CONVERSIONS = {"QUANTIZE": 1, "DEQUANTIZE": 5}
"""operator versions of conversions; DEQUANTIZE needs the one with per-channel scales"""
_MOST_BYTE = 127  # the largest operator code in old files
_DENSE_OPTIONS = "FullyConnectedOptions"


@dataclass(eq=False)
class TfliteEdit:
    """A copy of the tables of a file during an edit.

    ``types`` are the types of layers, ``int8`` the operators that compute with int8, ``scales`` the
    scales of int8 tensors, ``biases`` the corrections of biases; operators are keyed by position.
    ``store`` has quantized weights shared by edits, ``learned`` the learned weights8 by position.
    ``emitted`` are the operators written so far, each with the operator or tensor that it
    replaces; ``coded`` maps tensors to int8 tensors that replace them, ``weights`` and ``halves``
    map weights to int8 and float16 tensors."""

    graph: TfliteGraph
    types: Mapping[int, LayerType]
    int8: Collection[int]
    scales: Mapping[int, CodeScale]
    biases: Mapping[int, np.ndarray]
    store: CodeStore
    learned: CodeStore = field(default_factory=CodeStore)
    emitted: list[tuple[Operator | int, Fields]] = field(default_factory=list)
    coded: dict[int, int] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)
    halves: dict[int, int] = field(default_factory=dict)

    def run(self) -> Fields:
        """Edit the file, and return its fields."""
        graph = self.graph
        self.tensors = [dict(own) for own in graph.tensors]
        self.buffers: list[Fields] = [*graph.fields.get("buffers", [])] or [{}]
        self.opcodes: list[Fields] = [*graph.fields["operator_codes"]]
        for own in graph.operators:
            if own.position in self.int8:
                self.emit_int8(own)
            elif self.types.get(own.position, "float32") == "float32" or self.has_halves(own):
                self.emitted.append((own, own.fields))
            else:
                self.emit_stored(own)
        self.drop_unread_weights()
        return self.finished()

    def has_halves(self, own: Operator) -> bool:
        """Whether an operator has float16 weights in the file already, as its type requires."""
        if self.types.get(own.position) != "weights16":
            return False
        stored = self.graph.stored(own.inputs[WEIGHTS])
        return stored is not None and self.graph.type(stored) == FLOAT16_TYPE

    # Operators.

    def emit(self, source: Operator | int, fields: Fields, name: str, version: int) -> None:
        """Add an operator with at least the given operator version."""
        self.emitted.append(
            (source, {**fields, "opcode_index": self.opcode(fields, name, version)})
        )

    def opcode(self, fields: Fields, name: str, version: int) -> int:
        """The index of an operator name and version in the operator codes of the file."""
        index = fields.get("opcode_index")
        if index is None:
            number = next(i for i, own in schema().operators.items() if own == name)
            wanted = {"deprecated_builtin_code": min(number, _MOST_BYTE), "builtin_code": number}
        else:
            wanted = self.opcodes[index]
            version = max(version, wanted.get("version", 1))
        # Runtimes reject unknown versions instead of computing something else.
        wanted = {**wanted, "version": version}
        if wanted not in self.opcodes:
            self.opcodes.append(wanted)
        return self.opcodes.index(wanted)

    def emit_conversion(self, name: str, source: Operator | int, input_: int, output: int) -> None:
        self.emit(source, {"inputs": [input_], "outputs": [output]}, name, _CONVERSIONS[name])

    def emit_int8(self, own: Operator) -> None:
        """Add an int8 operator, and dequantize its result for float32 readers."""
        kernel = own.int8
        assert kernel is not None
        if kernel.dynamic is not None:
            inputs = [self.codes_of(own.inputs[0]), self.weight_codes(own)]
            inputs += self.bias(own, self.scales[own.inputs[0]])
        else:
            scale = self.scales[own.outputs[0]] if kernel.same else None
            inputs = [self.operand(tensor, scale) for tensor in own.inputs]
        for tensor in own.outputs:
            self.coded[tensor] = self.code_tensor(tensor)
        outputs = [self.coded[tensor] for tensor in own.outputs]
        fields = {"opcode_index": 0, **own.fields, "inputs": inputs, "outputs": outputs}
        self.emit(own, fields, own.name, kernel.version)
        # Here, so that the conversion precedes all readers of the tensor.
        for tensor in own.outputs:
            readers = [reader.position for reader in self.graph.readers[tensor]]
            if tensor in self.graph.results or not all(place in self.int8 for place in readers):
                self.emit_conversion("DEQUANTIZE", tensor, self.coded[tensor], tensor)

    def emit_stored(self, own: Operator) -> None:
        """Add a float32 operator with int8 or float16 weights."""
        type_, version, fields = self.types[own.position], 1, {"opcode_index": 0, **own.fields}
        weights = self.weight_halves(own) if type_ == "weights16" else self.weight_codes(own)
        if type_ == "dynamic":
            assert own.int8 is not None and own.int8.dynamic
            version = own.int8.dynamic
            # Symmetric codes would waste half of their range on inputs of one sign, as after Relu.
            if own.name == "FULLY_CONNECTED":
                _, options = own.fields.get("builtin_options", ("", {}))
                options = {**options, "asymmetric_quantize_inputs": True}
                kinds = {kind: i for i, kind in schema().unions["BuiltinOptions"].items()}
                fields["builtin_options_type"] = kinds[_DENSE_OPTIONS]
                fields["builtin_options"] = _DENSE_OPTIONS, options
        else:
            # The time of the conversion is attributed to the layer.
            real = {**self.tensors[own.inputs[WEIGHTS]], "buffer": 0}
            stored, weights = weights, self.add_tensor(real, f"{real.get('name', '')}/real")
            self.emit_conversion("DEQUANTIZE", own, stored, weights)
        inputs = [*own.inputs]
        inputs[WEIGHTS] = weights
        # Bias corrections apply to codes rounded to nearest only.
        if own.position in self.biases and type_ != "weights16" and not self.has_learned(own):
            inputs[BIAS:] = self.bias(own, None)
        self.emit(own, {**fields, "inputs": inputs}, own.name, version)

    def drop_unread_weights(self) -> None:
        """Remove operators that convert float16 weights without remaining readers."""
        read = {tensor for _, own in self.emitted for tensor in own.get("inputs", ())}
        self.emitted = [
            (source, own)
            for source, own in self.emitted
            if not isinstance(source, Operator)
            or source.name != "DEQUANTIZE"
            or self.graph.stored(source.inputs[0]) is None
            or not read.isdisjoint(source.outputs)
            or not self.graph.results.isdisjoint(source.outputs)
        ]

    # Tensors.

    def add_tensor(self, fields: Fields, name: str, content: np.ndarray | None = None) -> int:
        """Add a tensor, with its own buffer if it is constant, and return its index."""
        fields = {**fields, "name": name}
        if content is not None:
            fields |= {"shape": list(content.shape), "buffer": len(self.buffers)}
            self.buffers.append({"data": content.tobytes()})
        self.tensors.append(fields)
        return len(self.tensors) - 1

    def code_tensor(self, tensor: int) -> int:
        """Add an int8 tensor for the codes of another tensor."""
        own, (scale, zero) = self.tensors[tensor], self.scales[tensor]
        quantization = {"scale": [scale], "zero_point": [zero]}
        codes = {**own, "type": INT8_TYPE, "quantization": quantization}
        return self.add_tensor(codes, f"{own.get('name', '')}/codes")

    def codes_of(self, tensor: int) -> int:
        """The int8 tensor of a tensor; a float32 one is quantized."""
        if tensor not in self.coded:
            self.coded[tensor] = self.code_tensor(tensor)
            self.emit_conversion("QUANTIZE", tensor, tensor, self.coded[tensor])
        return self.coded[tensor]

    def operand(self, tensor: int, scale: CodeScale | None) -> int:
        """The int8 form of an input of an operator without weights. Constants take the ``scale`` of
        the output, if given, or their own."""
        if tensor in self.scales:
            return self.codes_of(tensor)
        array = None if tensor < 0 else self.graph.constant(tensor)
        if array is None:
            return tensor
        if scale is None:
            ends = [float(array.min()), float(array.max())] if array.size else [0.0, 0.0]
            scale = CodeScale.of(ValueRange.of(*ends))
        own = self.tensors[tensor]
        quantization = {"scale": [scale.scale], "zero_point": [scale.zero]}
        codes = {"type": INT8_TYPE, "quantization": quantization}
        return self.add_tensor(codes, own.get("name", ""), scale.codes(array))

    def weight_codes(self, own: Operator) -> int:
        """The int8 tensor of an operator's weights."""
        tensor = own.inputs[WEIGHTS]
        if self.has_learned(own):
            return self.add_codes(own, self.learned[own.position])
        # Layers that share weights share the quantized weights.
        if tensor not in self.weights:
            self.weights[tensor] = self.add_codes(own, self.channel_codes(own))
        return self.weights[tensor]

    def add_codes(self, own: Operator, codes: StoredCodes) -> int:
        quantization = _by_channel(codes.scales, WEIGHT_AXES[own.name])
        name = self.tensors[own.inputs[WEIGHTS]].get("name", "")
        fields = {"type": INT8_TYPE, "quantization": quantization}
        return self.add_tensor(fields, name, codes.codes)

    def has_learned(self, own: Operator) -> bool:
        """Whether an operator has learned weights8."""
        return self.types.get(own.position) == "weights8" and own.position in self.learned

    def weight_halves(self, own: Operator) -> int:
        """The float16 tensor of an operator's weights."""
        tensor = own.inputs[WEIGHTS]
        if tensor not in self.halves:
            weights = self.graph.constant(tensor)
            assert weights is not None
            name = self.tensors[tensor].get("name", "")
            fields = {"type": FLOAT16_TYPE}
            self.halves[tensor] = self.add_tensor(fields, name, weights.astype(np.float16))
        return self.halves[tensor]

    def channel_codes(self, own: Operator) -> StoredCodes:
        tensor = own.inputs[WEIGHTS]
        if tensor not in self.store:
            weights = self.graph.constant(tensor)
            assert weights is not None
            self.store[tensor] = channel_codes(weights, WEIGHT_AXES[own.name])
        return self.store[tensor]

    def bias(self, own: Operator, x: CodeScale | None) -> list[int]:
        """The bias of an operator plus its correction, if either exists; as int32 with the scale of
        products if ``x``, the scale of the input, is given."""
        tensor = own.inputs[BIAS] if len(own.inputs) > BIAS else -1
        extra = self.biases.get(own.position)
        array = None if tensor < 0 else self.graph.constant(tensor)
        if array is None and (extra is None or tensor >= 0):
            return [tensor] if tensor >= 0 else []
        # Without a bias, the correction becomes the bias.
        scales = self.channel_codes(own).scales
        array = np.zeros(scales.shape, FLOAT32) if array is None else array.reshape(-1)
        array = array if extra is None else (array + extra).astype(FLOAT32)
        name = self.tensors[tensor if tensor >= 0 else own.inputs[WEIGHTS]].get("name", "")
        name = name if tensor >= 0 else f"{name}/bias"
        if x is None:
            return [self.add_tensor({"type": FLOAT32_TYPE}, name, array)]
        steps = (np.float32(x.scale) * scales).astype(FLOAT32)
        numbers = np.rint(array.astype(np.float64) / steps).clip(-(2**31), 2**31 - 1)
        fields = {"type": INT32_TYPE, "quantization": _by_channel(steps, 0)}
        return [self.add_tensor(fields, name, numbers.astype(np.int32))]

    # The file.

    def finished(self) -> Fields:
        """The fields of the file, without unread tensors and their contents."""
        graph, operators = self.graph, [fields for _, fields in self.emitted]
        before = _used(own.fields for own in graph.operators)
        gone = before - _used(operators) - {*graph.subgraph.get("inputs", ()), *graph.results}
        gone -= {-1}
        # Int8 tensors take the names of those they replace, by which programs look up values.
        for tensor, codes in self.coded.items():
            if tensor in gone:
                self.tensors[codes]["name"] = self.tensors[tensor].get("name", "")
        kept = [index for index in range(len(self.tensors)) if index not in gone]
        place = {-1: -1, **{index: i for i, index in enumerate(kept)}}
        subgraph = {
            **graph.subgraph,
            "tensors": [_renumbered_blocks(self.tensors[index], place) for index in kept],
            "operators": [_renumbered(own, _TENSOR_FIELDS, place) for own in operators],
        }
        subgraph = _renumbered(subgraph, ("inputs", "outputs"), place)
        subgraphs = [*graph.fields["subgraphs"]]
        subgraphs[graph.index] = subgraph
        fields = {**graph.fields, "operator_codes": self.opcodes, "subgraphs": subgraphs}
        if "signature_defs" in fields:
            fields["signature_defs"] = [
                self.signature(own, place) for own in fields["signature_defs"]
            ]
        fields["buffers"] = self.emptied(gone, subgraphs)
        return fields

    def signature(self, own: Fields, place: Mapping[int, int]) -> Fields:
        """A signature with renumbered tensors."""
        if own.get("subgraph_index", 0) != self.graph.index:
            return own
        sides: Fields = {
            side: [
                {**port, "tensor_index": place.get(index := port.get("tensor_index", 0), index)}
                for port in own[side]
            ]
            for side in ("inputs", "outputs")
            if side in own
        }
        return {**own, **sides}

    def emptied(self, gone: Iterable[int], subgraphs: Iterable[Fields]) -> list[Fields]:
        """The buffers, without the contents of removed tensors."""
        unread = {
            self.graph.tensors[t].get("buffer", 0) for t in gone if t < len(self.graph.tensors)
        }
        unread -= {t.get("buffer", 0) for own in subgraphs for t in own.get("tensors", ())}
        # Tensors may share buffers, and metadata use buffers too.
        unread -= {own.get("buffer", 0) for own in self.graph.fields.get("metadata", ())}
        unread -= {*self.graph.fields.get("metadata_buffer", ())}
        return [{} if i in unread else own for i, own in enumerate(self.buffers)]


_TENSOR_FIELDS = ("inputs", "outputs", "intermediates")
"""the fields of operators that contain tensor indices"""


def _by_channel(scales: np.ndarray, axis: int) -> Fields:
    zeros = [0] * len(scales)
    return {"scale": scales.tolist(), "zero_point": zeros, "quantized_dimension": axis}


def _used(operators: Iterable[Fields]) -> set[int]:
    return {t for own in operators for name in _TENSOR_FIELDS for t in own.get(name, ())}


def _renumbered(fields: Fields, names: Iterable[str], place: Mapping[int, int]) -> Fields:
    """Fields with renumbered tensors."""
    # Invalid indices are kept where the importer does not read them.
    changed = {name: [place.get(t, t) for t in fields[name]] for name in names if name in fields}
    return {**fields, **changed}


def _renumbered_blocks(tensor: Fields, place: Mapping[int, int]) -> Fields:
    """A tensor with renumbered tensors of blockwise scales."""
    quantization = tensor.get("quantization", {})
    kind, details = quantization.get("details", ("", {}))
    if kind != "BlockwiseQuantization":
        return tensor
    names = [name for name in ("scales", "zero_points") if name in details]
    details = {**details, **{name: place[details[name]] for name in names}}
    return {**tensor, "quantization": {**quantization, "details": (kind, details)}}
