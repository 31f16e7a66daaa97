"""Quantizable parts of a graph: layers, and the operations between them that work on codes.

A *layer* is a node with large constant weights: a convolution or a product, or another operation
whose weights can only be stored as codes. It has one of these types:

========== =================================================================================
float32    unchanged
static     input and weights are 8-bit codes; the range of the input is from the samples
dynamic    input and weights are 8-bit codes; the range of the input is from each run
blocks8    weights are codes of 8 bits in blocks along the inner dim, and so is the input
blocks4    the same with weights of 4 bits
bfloat16   input and weights are rounded to bfloat16, and products summed in float32
bfloat16x8 the same with weights that are stored as codes of 8 bits
weights8   weights are stored as codes of 8 bits, and are float32 when the model is loaded
weights16  weights are stored as float16, and are float32 when the model is loaded
========== =================================================================================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value, readers_of

LayerType: TypeAlias = Literal[
    "float32",
    "static",
    "dynamic",
    "bfloat16",
    "bfloat16x8",
    "blocks8",
    "blocks4",
    "weights8",
    "weights16",
]
Choice: TypeAlias = Mapping[str, LayerType]
"""The type of each layer by the name of its node; layers that are missing are float32"""

STORING: tuple[LayerType, ...] = ("weights8", "weights16")
"""types that only change the storage of weights, not the computation in a run"""

ROUNDING: tuple[LayerType, ...] = ("bfloat16", "bfloat16x8")
"""types whose products are of bfloat16"""

BLOCK = 32  # weights that share a scale
_LEAST_WEIGHTS = 64  # of a layer that is worth a look
_LEAST_STORED = 1024  # of another node
_MOST_HALF, _LEAST_HALF = 65504.0, 2.0**-14  # the largest float16, and the least normal one
_DIRECTIONS = 2


class Stored(NamedTuple):
    """Constant weights that may be stored as codes: the input index ``place`` of a node, the value,
    and the axis of scales. ``origin``: the first value of any layer with the same matrix, perhaps
    transposed, which a file contains once; ``readers``: the number of inputs of layers with that
    matrix."""

    place: int
    value: Value
    axis: int
    origin: Value | None = None
    readers: int = 1

    @property
    def weights(self) -> np.ndarray:
        """The weights, in new memory if only kernels hold them, in an order of their own."""
        weights = self.value.peek
        assert weights is not None
        return weights

    @property
    def dims(self) -> tuple[int, ...]:
        type_ = self.value.type
        assert isinstance(type_, TensorType)
        return type_.dims


class QuantizableLayer(NamedTuple):
    """A node with its possible ``types`` and its weights. For a convolution or product, ``x`` is
    the input and ``channels`` its axis of channels; ``axis`` is the axis of the ``weights`` for
    output channels; ``bias`` is a constant, or None."""

    node: Node
    stored: Sequence[Stored]
    types: Sequence[LayerType]
    x: Value | None = None
    bias: np.ndarray | None = None
    channels: int = -1

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def weights(self) -> np.ndarray:
        return self.stored[0].weights

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims of the weights."""
        return self.stored[0].dims

    @property
    def axis(self) -> int:
        return self.stored[0].axis

    @property
    def learns(self) -> bool:
        """Whether its input can be observed, to learn from it how its weights are rounded. Those
        that others read as well have codes in common."""
        return self.x is not None and "static" in self.types and self.stored[0].readers == 1

    @property
    def output(self) -> Value:
        value = self.node.outputs[0]
        assert value is not None
        return value

    def nbytes(self, type_: LayerType, alone: bool = False) -> float:
        """Bytes of the weights as a type, with their scales. Shared weights are divided among their
        readers, unless the layer stores them ``alone``."""
        return sum(_nbytes(own, type_) / (1 if alone else own.readers) for own in self.stored)


def _nbytes(own: Stored, type_: LayerType) -> int:
    count = math.prod(own.dims)
    if type_ == "float32":
        return 4 * count
    if type_ in ("blocks8", "blocks4"):
        return count * int(type_[-1]) // 8 + 4 * (count // BLOCK)
    if type_ in ("bfloat16", "weights16"):
        return 2 * count
    return count + 4 * own.dims[own.axis]


def layers_of(graph: Graph) -> list[QuantizableLayer]:
    """The layers among the nodes of a graph and of nested graphs. Ranges of values in nested graphs
    are unknown."""
    outer = set(graph.nodes)
    layers = []
    for node in graph.walk():
        layer = None if node.control_inputs else _layer(node)
        # Fetches can only name values of the outermost graph.
        if layer is not None and node not in outer:
            layer = layer._replace(types=[t for t in layer.types if t != "static"])
        layers += [layer] if layer is not None else []
    every = [own for layer in layers for own in layer.stored]
    origins = _origins(every)
    readers = Counter(origins[own.value] for own in every)

    def known(own: Stored) -> Stored:
        origin = origins[own.value]
        return own._replace(origin=origin, readers=readers[origin])

    return [layer._replace(stored=[*map(known, layer.stored)]) for layer in layers]


def layers_in(copy: Graph, layers: Sequence[QuantizableLayer]) -> list[QuantizableLayer]:
    """The same layers in a copy of their graph, whose nodes have the same names."""
    nodes = {node.name: node for node in copy.walk()}
    return [
        own._replace(node=nodes[own.name], x=own.x and nodes[own.name].inputs[0]) for own in layers
    ]


def _origins(every: Sequence[Stored]) -> dict[Value, Value]:
    """For each value that is stored the first one that has the same matrix."""
    origins: dict[Value, Value] = {}
    by_shape: dict[tuple[int, ...], list[Stored]] = {}
    for own in every:
        if own.value in origins:
            continue
        shape = own.dims
        # Scales are along the same dim of the matrix, so codes are equal but transposed.
        before = by_shape.get(shape[::-1], []) if len(shape) == 2 else []
        same = [
            o.value for o in before if o.axis != own.axis and are_transposed(o.value, own.value)
        ]
        origins[own.value] = same[0] if same else own.value
        by_shape.setdefault(shape, []).append(own)
    return origins


def are_transposed(one: Value, other: Value) -> bool:
    """Whether the matrix of a constant is the transpose of another."""
    a, b = one.peek, other.peek
    # A column is enough to tell most apart.
    if a is None or b is None or not np.array_equal(a[:, 0], b[0]):
        return False
    return np.array_equal(a, b.T)


_CODED = {"static": "weights8", "dynamic": "weights8", "bfloat16x8": "weights8"}


def same_storage(first: LayerType, second: LayerType) -> bool:
    """Whether weights that two layers of these types share are the same bytes in a file."""
    return _CODED.get(first, first) == _CODED.get(second, second)


def _layer(node: Node) -> QuantizableLayer | None:
    """The layer that a node is, if it is one."""
    if node.op.domain:
        return None
    if node.op.name in ("Conv", "Gemm", "MatMul"):
        layer = _computing(node)
        if layer is not None:
            return layer
    stored = []
    for i, value in enumerate(node.inputs):
        weights = None if value is None or not value.is_constant else value.peek
        if value is None or weights is None or weights.dtype != FLOAT32:
            continue
        if _is_matrix(weights):
            # Recurrent operations have their one or two directions in front.
            axis = next(a for a, size in enumerate(weights.shape) if size > _DIRECTIONS)
            stored.append(Stored(i, value, axis))
    return QuantizableLayer(node, stored, ("float32", *_stored_types(stored))) if stored else None


def _stored_types(stored: Sequence[Stored]) -> tuple[LayerType, ...]:
    """The types of layers that only store weights."""
    if all(_fits_float16(own.weights) for own in stored):
        return STORING
    return ("weights8",)


def _fits_float16(weights: np.ndarray) -> bool:
    """Whether weights do not overflow in float16, and most have enough bits."""
    if weights.max() > _MOST_HALF or weights.min() < -_MOST_HALF:
        return False
    # Denormal numbers are off by 2**-25 at most: 2**-11 of a mean weight that is a normal number.
    flat = weights.reshape(-1)
    return float(np.dot(flat, flat)) >= flat.size * _LEAST_HALF**2


def _is_matrix(weights: np.ndarray) -> bool:
    """Whether an array is large, finite, and no vector."""
    if weights.ndim < 2 or weights.size < _LEAST_STORED or weights.size == max(weights.shape):
        return False
    return bool(np.isfinite(weights).all())


def _computing(node: Node) -> QuantizableLayer | None:
    """The layer of a convolution or product of integers."""
    x, value, third = node.inputs[0], node.inputs[1], node.input(2)
    weights = None if value is None else value.peek
    if x is None or x.is_constant or value is None or weights is None or weights.dtype != FLOAT32:
        return None
    # Halves are widened when a model is compiled: they would be conversions around each layer.
    if not isinstance(x.type, TensorType) or x.type.dtype != FLOAT32:
        return None
    bias = None if third is None else third.const
    if (third is not None and bias is None) or weights.size < _LEAST_WEIGHTS:
        return None
    if not np.isfinite(weights).all():
        return None
    if node.op.name == "Conv":
        if weights.ndim < 3:
            return None
        stored = [Stored(1, value, 0)]
        types: list[LayerType] = ["float32", "static", "dynamic"]
        # Kernels multiply pairs of channels.
        types += ROUNDING if weights.shape[1] % 2 == 0 else []
        types += _stored_types(stored)
        return QuantizableLayer(node, stored, types, x, bias, channels=1)
    attrs = node.attrs
    if weights.ndim != 2 or attrs.get("transA", 0) or attrs.get("alpha", 1.0) != 1:
        return None
    axis = 0 if attrs.get("transB", 0) else 1
    columns, inner = weights.shape[axis], weights.shape[1 - axis]
    if bias is not None and (attrs.get("beta", 1.0) != 1 or bias.size != columns):
        return None
    stored = [Stored(1, value, axis)]
    types = ["float32", "static", "dynamic", *ROUNDING, *_stored_types(stored)]
    # The last block of a row would be padded, for which kernels have no room.
    if inner % BLOCK == 0:
        types += ["blocks8", "blocks4"]
    return QuantizableLayer(node, stored, types, x, bias)


# Values that are codes.

_BOUNDING = ("Clip", "Relu")


def moves_elements(node: Node) -> bool:
    """Whether the results of a node are elements of its inputs, so that codes stay as they are."""
    return not node.op.domain and not node.op.traits.isdisjoint(("selects", "reshapes"))


def moved_inputs(node: Node) -> list[Value]:
    """The inputs whose elements a node with ``moves_elements`` moves."""
    count = len(node.inputs) if node.op.name == "Concat" else 1
    return [value for value in node.inputs[:count] if value is not None]


def works_on_codes(node: Node) -> bool:
    """Whether a node may read and write codes: it moves elements, or is elementwise, computed in
    float32 in registers."""
    if node.op.domain or len(node.outputs) != 1 or node.control_inputs:
        return False
    return moves_elements(node) or node.op.elementwise


def is_bound(node: Node) -> bool:
    """Whether a node limits its input to constants, which conversions to codes do anyway."""
    if node.op.domain or node.op.name not in _BOUNDING:
        return False
    return all(value is None or value.is_constant for value in node.inputs[1:])


class Codes(NamedTuple):
    """The values of a graph that are codes. ``group_of``: the representative of each value in a
    group that must share one scale, since operations between them only move elements."""

    values: Mapping[Value, None]
    group_of: Mapping[Value, Value]


def codes_of(graph: Graph, layers: Sequence[QuantizableLayer], choice: Choice) -> Codes:
    """Return the values that are codes if layers have these types: the inputs of static layers, and
    from there backwards the inputs of elementwise operations and moves between static layers. A
    chain of elementwise operations without other readers is one step, with no codes within it."""
    static = {layer.node for layer in layers if choice.get(layer.name) == "static"}
    search = _CodeSearch(static, readers_of(graph))
    inputs = [own.x for own in layers if own.node in static and own.x is not None]
    search.coded.update(dict.fromkeys(inputs))
    # A value may become codes because of a reader that comes before another one in the graph.
    while search.coded and sum(map(search.visit, reversed(graph.nodes))):
        pass
    return Codes(search.coded, _groups(graph, search.coded))


@dataclass
class _CodeSearch:
    """The search for values that are codes (``coded``), and for those ``within`` a step between
    them, given the nodes of ``static`` layers."""

    static: set[Node]
    readers: Mapping[Value, Sequence[object]]
    coded: dict[Value, None] = field(default_factory=dict)
    within: set[Value] = field(default_factory=set)

    def visit(self, node: Node) -> bool:
        """Go on from the result of a node to its inputs; whether anything is new."""
        output = node.outputs[0] if node.outputs else None
        if node in self.static or not (output in self.coded or output in self.within):
            return False
        if not works_on_codes(node):
            return False
        moves = moves_elements(node)
        inputs = [v for v in (moved_inputs(node) if moves else _operands(node)) if self.is_open(v)]
        # The layer before a bound applies it itself.
        if is_bound(node) and inputs and _ends_chain(inputs[0], self.static, self.readers):
            return False
        if not all(value in self.within or _is_codable(value, self.static) for value in inputs):
            return False
        new = [value for value in inputs if value not in self.within]
        for value in new:
            if not moves and _continues(value, self.readers):
                self.within.add(value)
            else:
                self.coded[value] = None
        return bool(new)

    def is_open(self, value: Value) -> bool:
        """Whether a value is neither a constant nor codes."""
        return not value.is_constant and value not in self.coded


def _continues(value: Value, readers: Mapping[Value, Sequence[object]]) -> bool:
    """Whether a value has a single reader and is produced by an elementwise node."""
    node = value.producer
    if node is None or not works_on_codes(node) or moves_elements(node):
        return False
    return len(readers.get(value, ())) == 1


def _operands(node: Node) -> list[Value]:
    return [v for v in node.inputs if v is not None and v.dtype == FLOAT32]


def _ends_chain(value: Value, static: set[Node], readers: Mapping[Value, Sequence[object]]) -> bool:
    """Whether a static layer produces a value with a single reader."""
    return value.producer in static and len(readers.get(value, ())) == 1


def _is_codable(value: Value, static: set[Node]) -> bool:
    """Whether a value can be codes without a conversion step: a static layer produces it, perhaps
    followed by operations that can write codes."""
    # Long chains of operations before a layer are rare, and most of them end at its input.
    for _ in range(8):
        node = value.producer
        if node is None or value.dtype != FLOAT32:
            return False
        if node in static:
            return True
        if not works_on_codes(node):
            return False
        inputs = [v for v in _operands(node) if not v.is_constant]
        if not inputs:
            return False
        value = inputs[0]
    return False


def _groups(graph: Graph, coded: Mapping[Value, None]) -> dict[Value, Value]:
    """Values by that which stands for all that moves connect."""
    parent = {value: value for value in coded}

    def root(value: Value) -> Value:
        while parent[value] is not value:
            value = parent[value]
        return value

    for node in graph.nodes:
        output = node.outputs[0] if node.outputs else None
        if output in parent and moves_elements(node):
            for value in moved_inputs(node):
                if value in parent:
                    parent[root(value)] = root(output)
    return {value: root(value) for value in coded}
