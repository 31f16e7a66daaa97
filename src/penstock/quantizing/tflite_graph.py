"""The operators of a subgraph of a TFLite file, and which of them compute with int8.

TFLite's int8 kernels have int8 inputs and outputs; some require equal scales of inputs and outputs,
or a fixed scale (``tflite_operators.txt``). An operator between layers therefore becomes int8 if
all of its inputs are int8 and an int8 operator reads its output::

    x -> CONV_2D -> ADD -> CONV_2D -> SOFTMAX -> y                                     becomes
    x -> QUANTIZE -> CONV_2D -> ADD -> CONV_2D -> DEQUANTIZE -> SOFTMAX -> y
                     '------ int8 ------------'
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np

from penstock.core.records import NamedTuple, cached_property, dataclass
from penstock.core.types import FLOAT32
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.writer import OUTSIDE, Fields
from penstock.quantizing.rewriting import ValueRange, ValueRanges

FLOAT32_TYPE, FLOAT16_TYPE, INT32_TYPE, INT8_TYPE = 0, 1, 2, 9
"""element types in the schema's numbering"""
WEIGHTS, BIAS = 1, 2
"""input indices of operators with weights"""
WEIGHT_AXES = {"CONV_2D": 0, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 0, "TRANSPOSE_CONV": 0}
"""the quantization axis of weights, by operator"""
_WIDENED: Mapping[int, np.dtype] = {FLOAT32_TYPE: FLOAT32, FLOAT16_TYPE: np.dtype(np.float16)}
# LiteRT's HARD_SWISH requires an output scale of at least this share of its input scale.
_MOST_FINER = 100


class CodeScale(NamedTuple):
    """Quantization parameters of int8: ``real = (code - zero) * scale``."""

    scale: float
    zero: int

    @classmethod
    def of(cls, own: ValueRange) -> CodeScale:
        return cls(float(own.scale), int(own.zero) - 128)

    def codes(self, array: np.ndarray) -> np.ndarray:
        """Quantize real numbers to the nearest int8 codes."""
        steps = np.rint(array.astype(np.float64) / self.scale) + self.zero
        return steps.clip(-128, 127).astype(np.int8)


class Int8Operator(NamedTuple):
    """Requirements of TFLite's int8 kernel of an operator: see ``tflite_operators.txt``. ``fixed``:
    the required scale and zero point of its outputs; ``dynamic``: the operator version with int8
    weights and float32 inputs, None for operators without weights."""

    version: int
    same: bool = False
    fixed: CodeScale | None = None
    dynamic: int | None = None


@cache
def int8_operators() -> Mapping[str, Int8Operator]:
    """The kernels of ``tflite_operators.txt`` by name."""
    entries = {}
    path = os.path.join(os.path.dirname(__file__), "tflite_operators.txt")
    with open(path, encoding="ascii") as file:
        for line in file:
            if line[0] not in "#\n":
                name, version, scale, *rest = line.split()
                entry = Int8Operator(int(version), scale == "same")
                if scale == "free" and rest:
                    entry = entry._replace(dynamic=int(rest[0]))
                elif rest:
                    entry = entry._replace(fixed=CodeScale(float(scale), int(rest[0])))
                entries[name] = entry
    return entries


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator: its position in the subgraph, its name in the schema, its table."""

    position: int
    name: str
    fields: Fields

    @property
    def inputs(self) -> Sequence[int]:
        """The indices of input tensors; -1 for an omitted input."""
        return self.fields.get("inputs", ())

    @property
    def outputs(self) -> Sequence[int]:
        return self.fields.get("outputs", ())

    @property
    def key(self) -> str:
        """A name that is unique in the subgraph, as the importer uses it."""
        return f"{self.name}_{self.position}"

    @property
    def int8(self) -> Int8Operator | None:
        return int8_operators().get(self.name)


class Int8Part(NamedTuple):
    """The int8 part of a graph: the positions of ``operators``; ``group_of`` maps each tensor to
    the representative of the tensors that must have the same scale."""

    operators: frozenset[int]
    group_of: Mapping[int, int]


class TfliteGraph:
    """A subgraph of a parsed file (``fields``, a Model). ``folded``: tensors computed from
    constants only.
    """

    def __init__(self, fields: Fields, index: int) -> None:
        self.fields = fields
        self.index = index
        self.subgraph: Fields = fields["subgraphs"][index]
        self.tensors: list[Fields] = self.subgraph.get("tensors", [])
        names = [_operator_name(code) for code in fields.get("operator_codes", [])]
        self.operators = [
            Operator(position, names[own.get("opcode_index", 0)], own)
            for position, own in enumerate(self.subgraph.get("operators", []))
        ]
        self.folded: frozenset[int] = frozenset()
        self.producers = {t: own for own in self.operators for t in own.outputs}
        self.readers: dict[int, list[Operator]] = defaultdict(list)
        for own in self.operators:
            for tensor in own.inputs:
                self.readers[tensor].append(own)

    @cached_property
    def results(self) -> frozenset[int]:
        """The output tensors of the subgraph."""
        return frozenset(self.subgraph.get("outputs", ()))

    def contents(self, tensor: int) -> bytes | None:
        """The bytes of a constant tensor; None for other tensors."""
        buffers = self.fields.get("buffers", [])
        own = buffers[self.tensors[tensor].get("buffer", 0)]
        return own.get("data") or own.get(OUTSIDE) or None

    def stored(self, tensor: int) -> int | None:
        """The constant tensor behind a tensor: the tensor itself, or the float16 tensor from which
        it is dequantized; None for tensors that are not constant."""
        # float16 files have a DEQUANTIZE for each constant.
        producer = self.producers.get(tensor)
        if producer is not None:
            widens = producer.name == "DEQUANTIZE" and self.type(producer.inputs[0]) == FLOAT16_TYPE
            return self.stored(producer.inputs[0]) if widens else None
        return None if tensor < 0 or self.contents(tensor) is None else tensor

    def constant(self, tensor: int) -> np.ndarray | None:
        """The value of a float32 constant, or one dequantized from float16; None for others."""
        stored = self.stored(tensor)
        if stored is None or self.type(stored) not in _WIDENED:
            return None
        own, data = self.tensors[stored], self.contents(stored)
        assert data is not None
        dtype, shape = _WIDENED[self.type(stored)], own.get("shape", ())
        if "sparsity" in own or math.prod(shape) * dtype.itemsize != len(data):
            return None
        return np.frombuffer(data, dtype).reshape(shape).astype(FLOAT32)

    def type(self, tensor: int) -> int:
        return self.tensors[tensor].get("type", 0)

    def real_values(self, tensors: Iterable[int]) -> list[int]:
        """Return the float32 ``tensors`` that are not constant, without duplicates."""
        return [
            tensor
            for tensor in dict.fromkeys(tensors)
            if tensor >= 0 and self.type(tensor) == FLOAT32_TYPE and self.stored(tensor) is None
        ]

    # The int8 part of the graph.

    def codes(self, static: Iterable[int]) -> Int8Part:
        """Return the int8 part if the operators with weights at ``static`` are int8."""
        layers = frozenset(static)
        barred: set[int] = set()
        # Each iteration excludes one more operator, or ends.
        while True:
            operators = self._between(layers, barred)
            groups = self._groups(operators)
            # An operator with a fixed scale, whose output must share its scale with other tensors.
            members = defaultdict(list)
            for tensor, group in groups.items():
                members[group].append(tensor)
            new = {
                own.position
                for place in operators
                if (own := self.operators[place]).int8 is not None and own.int8.fixed
                for tensor in own.outputs
                if not all(self._has_scale(t, own.int8.fixed) for t in members[groups[tensor]])
            }
            if not new:
                return Int8Part(operators, groups)
            barred |= new

    def _has_scale(self, tensor: int, fixed: CodeScale) -> bool:
        """Whether a tensor can have a fixed scale: an operator with this scale, or one that only
        moves elements, has written it."""
        own = self.producers.get(tensor)
        return (
            own is not None and own.int8 is not None and (own.int8.same or own.int8.fixed == fixed)
        )

    def _between(self, layers: frozenset[int], barred: set[int]) -> frozenset[int]:
        """The layers, and the operators between them that can compute with int8."""
        # Forward: operators whose inputs are all int8.
        coded = {tensor for place in layers for tensor in self.operators[place].outputs}
        able = set(layers)
        for own in self.operators:
            if own.position not in layers and own.position not in barred and self._is_able(own):
                inputs = self.real_values(own.inputs)
                if inputs and coded.issuperset(inputs):
                    able.add(own.position)
                    coded.update(own.outputs)
        # Backward: of these, operators with an int8 reader; after the last layer, float32 is exact.
        kept = set(layers)
        for own in reversed(self.operators):
            if own.position in kept or not self._is_able(own) or own.position in barred:
                continue
            read = [r.position in kept for tensor in own.outputs for r in self.readers[tensor]]
            # Moving int8 elements is cheaper than moving float32, whatever wrote them.
            moves = (
                own.int8 is not None and own.int8.same and len(self.real_values(own.inputs)) == 1
            )
            moves = moves and all(read) and self.results.isdisjoint(own.outputs)
            if any(read) and (own.position in able or moves):
                kept.add(own.position)
        return frozenset(kept)

    def _is_able(self, own: Operator) -> bool:
        """Whether an operator without weights may compute with int8."""
        if own.int8 is None or own.int8.dynamic is not None:
            return False
        if not self.folded.isdisjoint((*own.inputs, *own.outputs)):
            return False
        if any(self.tensors[t].get("is_variable") for t in own.inputs if t >= 0):
            return False
        return len(self.real_values(own.outputs)) == len(own.outputs)

    def _groups(self, operators: Iterable[int]) -> dict[int, int]:
        parent: dict[int, int] = {}

        def root(tensor: int) -> int:
            parent.setdefault(tensor, tensor)
            while parent[tensor] != tensor:
                tensor = parent[tensor]
            return tensor

        for place in sorted(operators):
            own = self.operators[place]
            values = self.real_values((*own.inputs, *own.outputs))
            roots = [root(tensor) for tensor in values]
            if own.int8 is not None and own.int8.same:
                parent.update(dict.fromkeys(roots, roots[-1]))
        return {tensor: root(tensor) for tensor in parent}

    def scales(
        self, codes: Int8Part, names: Mapping[int, str], ranges: ValueRanges
    ) -> dict[int, CodeScale]:
        """The scales of int8 tensors, from ``ranges`` keyed by the ``names`` of values."""
        whole: dict[int, ValueRange] = {}
        fixed: dict[int, CodeScale] = {}

        def widen(tensor: int, own: ValueRange) -> None:
            group = codes.group_of[tensor]
            whole[group] = own | whole.get(group, own)

        for tensor in codes.group_of:
            widen(tensor, ranges[names[tensor]])
        for own in map(self.operators.__getitem__, sorted(codes.operators)):
            assert own.int8 is not None
            (output, *_) = own.outputs
            constants = [self.constant(t) for t in own.inputs] if own.int8.same else []
            for array in constants:
                if array is not None and array.size:
                    widen(output, ValueRange.of(float(array.min()), float(array.max())))
            # Operators that move outputs with a fixed scale keep it, regardless of observed ranges.
            if own.int8.fixed:
                fixed[codes.group_of[output]] = own.int8.fixed
            if own.name == "HARD_SWISH":
                x = whole[codes.group_of[own.inputs[0]]]
                widen(output, ValueRange(0.0, (x.high - x.low) / _MOST_FINER))
        return {t: fixed.get(g) or CodeScale.of(whole[g]) for t, g in codes.group_of.items()}


def _operator_name(code: Fields) -> str:
    # Old files only have the 8-bit operator code.
    number = max(code.get("builtin_code", 0), code.get("deprecated_builtin_code", 0))
    return schema().operators.get(number, f"number {number}")
