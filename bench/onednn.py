"""Primitives of oneDNN 3.2 for graphs of one operation, such as those of ``bench.kernel_cases``.

It is called by ``ctypes``, from the library in the package ``onednn-cpu-gomp``. Convolutions,
products and recurrent layers choose the layouts of what they read and write; other operations on
images have their channels innermost. A run brings inputs and outputs from and into ONNX's layouts;
``seconds`` times the primitive alone.

Names and numbers are those of oneDNN's headers (dnnl.h, dnnl_types.h), version 3.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

_MOST_AXES = 12
_TYPES = {"float32": 3, "int32": 4, "int8": 5, "uint8": 6}
_ANY, _CPU, _IN_ORDER, _INFERENCE, _ARGUMENT = 1, 1, 1, 96, 255
# Arguments of primitives.
SRC, STATE, CELL, DST, NEW_STATE, NEW_CELL = 1, 2, 3, 17, 18, 19
WEIGHTS, RECURRENT, BIAS, MEAN, VARIANCE, SCALE, SHIFT = 33, 34, 41, 49, 50, 51, 52
_SCALES, _ZEROS = 4096, 8192
_CONVOLUTION, _DECONVOLUTION, _MAX, _PADDED_MEAN, _MEAN = 0x1, 0xA, 0x1FF, 0x2FF, 0x3FF
_ACROSS_CHANNELS, _SOFTMAX, _TANH = 0xAFF, 0x30000, 0x21
_STATISTICS, _SCALE, _SHIFT = 1, 2, 4
_DIRECTIONS = {"forward": 1, "reverse": 2, "bidirectional": 3}
# Places of ONNX's gates in oneDNN's order.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (0, 1, 2), "RNN": (0,)}


@dataclass
class Operand:
    """A tensor of a primitive: its type, its elements if it is a constant, or ``name``, an input or
    output of the graph. ``order``: its axes from the outermost to the innermost in memory; None if
    the primitive chooses a layout."""

    dims: Sequence[int]
    dtype: np.dtype
    order: Sequence[int] | None = None
    value: np.ndarray | None = None
    name: str = ""


def constant(array: np.ndarray, *, chosen: bool = False) -> Operand:
    order = None if chosen else tuple(range(array.ndim))
    return Operand(array.shape, array.dtype, order, array)


@dataclass
class Call:
    """A primitive: oneDNN's name of it, and what that is described by, where an ``Of`` stands for
    the layout of an operand."""

    kind: str
    described: Sequence[Any]
    operands: dict[int, Operand]
    scales: Mapping[int, np.ndarray] = field(default_factory=dict)
    zeros: Mapping[int, np.ndarray] = field(default_factory=dict)
    mask: int = 0
    """the axes along which the scales of weights differ, in bits"""


@dataclass(frozen=True)
class Of:
    operand: int


class Library:
    """The functions of oneDNN, its engine and its stream."""

    def __init__(self, path: Path, threads: int) -> None:
        self.lib = ctypes.CDLL(str(path))
        if threads:
            self.lib.omp_set_num_threads(threads)
        self.lib.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self.engine = self.new("engine_create", _CPU, ctypes.c_size_t(0))
        self.stream = self.new("stream_create", self.engine, _IN_ORDER)

    def do(self, name: str, *arguments: Any) -> None:
        """Call ``dnnl_<name>``; raises ``ValueError`` if oneDNN refuses."""
        status = getattr(self.lib, f"dnnl_{name}")(*arguments)
        if status:
            raise ValueError(f"dnnl_{name} returns status {status}")

    def new(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.do(name, ctypes.byref(handle), *arguments)
        return handle

    def layout(self, operand: Operand) -> ctypes.c_void_p:
        dims = _numbers(operand.dims)
        head = len(operand.dims), dims, _TYPES[operand.dtype.name]
        if operand.order is None:
            return self.new("memory_desc_create_with_tag", *head, _ANY)
        strides, step = [0] * len(operand.dims), 1
        for axis in reversed(operand.order):
            strides[axis], step = step, step * operand.dims[axis]
        return self.new("memory_desc_create_with_strides", *head, _numbers(strides))

    def plain(self, array: np.ndarray) -> ctypes.c_void_p:
        """The memory of an array, of which the caller keeps a reference."""
        return self.memory(self.layout(constant(array)), array)

    def memory(self, layout: ctypes.c_void_p, array: np.ndarray) -> ctypes.c_void_p:
        return self.new("memory_create", layout, self.engine, ctypes.c_void_p(array.ctypes.data))

    def execute(self, primitive: ctypes.c_void_p, arguments: Any) -> None:
        self.do("primitive_execute", primitive, self.stream, len(arguments), arguments)
        self.do("stream_wait", self.stream)

    def reorder(self, source: tuple[Any, Any], target: tuple[Any, Any]) -> Callable[[], None]:
        """What copies between memories with these layouts."""
        (a, from_memory), (b, to_memory) = source, target
        described = self.new("reorder_primitive_desc_create", a, self.engine, b, self.engine, None)
        primitive = self.new("primitive_create", described)
        arguments = _arguments({SRC: from_memory, DST: to_memory})
        return lambda: self.execute(primitive, arguments)


class _Argument(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("memory", ctypes.c_void_p))


def _arguments(memories: Mapping[int, ctypes.c_void_p]) -> Any:
    return (_Argument * len(memories))(*[_Argument(n, m.value) for n, m in memories.items()])


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * _MOST_AXES)(*values)


class Operation:
    """A primitive with memory for all that it reads and writes."""

    def __init__(self, library: Library, call: Call) -> None:
        self.library, self.kept, memories = library, [], {}
        self.inputs: dict[str, tuple[np.ndarray, Callable[[], None]]] = {}
        self.outputs: dict[str, tuple[np.ndarray, Callable[[], None]]] = {}
        attributes = library.new("primitive_attr_create")
        for number, scale in call.scales.items():
            mask = call.mask if scale.size > 1 else 0
            library.do("primitive_attr_set_scales_mask", attributes, number, mask)
            memories[_SCALES | number] = library.plain(self._keep(scale.reshape(-1)))
        for number, zero in call.zeros.items():
            memories[_ZEROS | number] = library.plain(self._keep(zero.reshape(-1)))
        for number in {*call.zeros, *[n ^ _ZEROS for n in call.operands if n & _ZEROS]}:
            library.do("primitive_attr_set_zero_points_mask", attributes, number, 0)
        layouts = {number: library.layout(operand) for number, operand in call.operands.items()}
        described = [layouts.get(x.operand) if isinstance(x, Of) else x for x in call.described]
        create = f"{call.kind}_primitive_desc_create"
        desc = library.new(create, library.engine, *described, attributes)
        self.primitive = library.new("primitive_create", desc)
        for number, operand in call.operands.items():
            memories[number] = self._memory(desc, number, operand)
        self.arguments = _arguments(memories)

    def _keep(self, array: np.ndarray) -> np.ndarray:
        self.kept.append(array)
        return array

    def _memory(self, desc: Any, number: int, operand: Operand) -> ctypes.c_void_p:
        """Memory in the layout of the primitive, with the elements of constants in it."""
        lib = self.library
        if number & _ZEROS:
            array = self._keep(np.zeros(operand.dims, operand.dtype))
            self.inputs[operand.name] = array, lambda: None
            return lib.plain(array)
        layout = ctypes.c_void_p(lib.lib.dnnl_primitive_desc_query_md(desc, _ARGUMENT, number))
        lib.lib.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        size = lib.lib.dnnl_memory_desc_get_size(layout)
        whole = self._keep(np.zeros(size + 64, np.uint8))
        begin = -whole.ctypes.data % 64
        own = lib.memory(layout, whole[begin:])
        array = self._keep(np.zeros(operand.dims, operand.dtype))
        outside = lib.layout(constant(array)), lib.plain(array)
        if operand.value is not None:
            array[...] = operand.value
            lib.reorder(outside, (layout, own))()
        elif number in (DST, NEW_STATE, NEW_CELL):
            self.outputs[operand.name] = array, lib.reorder((layout, own), outside)
        else:
            self.inputs[operand.name] = array, lib.reorder(outside, (layout, own))
        return own

    def __call__(self) -> None:
        self.library.execute(self.primitive, self.arguments)

    def seconds(self, within: float) -> float:
        """The least time of the primitive alone, of calls that take ``within`` seconds, on what the
        last run read."""
        least, end = math.inf, time.perf_counter() + within
        while (begin := time.perf_counter()) < end:
            self()
            least = min(least, time.perf_counter() - begin)
        return least


def load(
    library: Library, path: Path
) -> tuple[Operation, Callable[[dict[str, np.ndarray]], list[np.ndarray]]]:
    """The primitive of a model's one operation, and what runs the model. Raises ``ValueError`` for
    what oneDNN has no primitive for, or none is made of here."""
    graph = Graph(onnx.load(path))
    operation = Operation(library, graph.call())

    def run(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        for name, (array, copy) in operation.inputs.items():
            array[...] = graph.turned(name, feeds[name]).reshape(array.shape)
            copy()
        operation()
        for _, copy in operation.outputs.values():
            copy()
        found = [(name, graph.told(operation.outputs[name][0])) for name in graph.outputs]
        return [array.reshape(graph.types[name][1]).copy() for name, array in found]

    return operation, run


class Graph:
    """A graph of one operation, with conversions of codes and transpositions around it."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        self.types = {
            value.name: (
                helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                tuple(d.dim_value for d in value.type.tensor_type.shape.dim),
            )
            for value in (*graph.input, *graph.output)
        } | {name: (array.dtype, array.shape) for name, array in self.held.items()}
        self.outputs = [value.name for value in graph.output]
        self.conversions = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
        self.rounding = {n.input[0]: n for n in graph.node if n.op_type == "QuantizeLinear"}
        moves = [n for n in graph.node if n.op_type == "Transpose"]
        self.transposed = {n.output[0]: n for n in moves}
        self.orders = {n.input[0]: n.attribute[0].ints for n in moves}
        others = {"DequantizeLinear", "QuantizeLinear", "Transpose"}
        nodes = [node for node in graph.node if node.op_type not in others]
        if len(nodes) != 1 or nodes[0].op_type not in _CALLS:
            raise ValueError(f"no primitive is made of {[node.op_type for node in nodes]}")
        (self.node,) = nodes
        self.attrs = {a.name: helper.get_attribute_value(a) for a in self.node.attribute}
        self.told: Callable[[np.ndarray], np.ndarray] = lambda array: array

    def call(self) -> Call:
        return _CALLS[self.node.op_type](self)

    def name(self, place: int) -> str:
        names = self.node.input
        return names[place] if place < len(names) else ""

    def source(self, place: int) -> str:
        """What an input is converted from or transposed, or the input."""
        name = self.name(place)
        before = self.conversions.get(name) or self.transposed.get(name)
        return before.input[0] if before else name

    def turned(self, name: str, array: np.ndarray) -> np.ndarray:
        """An input as the operation reads it."""
        return np.transpose(array, self.orders[name]) if name in self.orders else array

    def value(self, place: int) -> np.ndarray | None:
        return self.held.get(self.source(place))

    def operand(self, place: int, *, chosen: bool = False, innermost: bool = False) -> Operand:
        """An input, in a layout that the primitive chooses, or with its channels innermost."""
        name = self.source(place)
        dtype, dims = self.types[name]
        if name in self.orders:  # which the operation reads where it lies
            dims = [dims[axis] for axis in self.orders[name]]
            return Operand(dims, dtype, np.argsort(self.orders[name]).tolist(), name=name)
        return _laid(Operand(dims, dtype, None, self.held.get(name), name), chosen, innermost)

    def result(self, *, chosen: bool = False, innermost: bool = False) -> Operand:
        (name,) = self.outputs
        dtype, dims = self.types[name]
        return _laid(Operand(dims, dtype, None, None, name), chosen, innermost)

    def windows(self, kernel: Sequence[int]) -> list[Any]:
        """Strides, what lies between elements of a kernel, and padding before and behind."""
        axes = len(kernel)
        if self.attrs.get("auto_pad", b"NOTSET") != b"NOTSET":
            raise ValueError("auto_pad is not made here")
        strides = self.attrs.get("strides", [1] * axes)
        between = [d - 1 for d in self.attrs.get("dilations", [1] * axes)]
        pads = self.attrs.get("pads", [0] * 2 * axes)
        return [*map(_numbers, (strides, between, pads[:axes], pads[axes:]))]


def _laid(operand: Operand, chosen: bool, innermost: bool) -> Operand:
    axes = range(len(operand.dims))
    if not chosen:
        operand.order = (0, *axes[2:], 1) if innermost and len(axes) > 2 else tuple(axes)
    return operand


def _quantized(graph: Graph, call: Call, scale: float = 1.0) -> Call:
    """The same call with the scales and zero points of what conversions say of its operands."""
    node = graph.node
    if node.op_type == "QLinearConv":
        held = [graph.value(i) for i in (1, 2, 4, 5, 6, 7)]
        x_scale, x_zero, w_scale, w_zero, y_scale, y_zero = held
    elif node.op_type in ("MatMulInteger", "ConvInteger"):
        x_zero, w_zero = graph.value(2), graph.value(3)
        x_scale = w_scale = y_scale = y_zero = None
        if x_zero is None and graph.name(2):
            call.operands[_ZEROS | SRC] = Operand(
                (1,), np.dtype(np.int32), (0,), name=graph.name(2)
            )
    elif graph.conversions:
        x_scale, x_zero = _of_codes(graph, graph.conversions[node.input[0]])
        w_scale, w_zero = _of_codes(graph, graph.conversions[node.input[1]])
        back = graph.rounding.get(node.output[0])
        y_scale, y_zero = (None, None) if back is None else _of_codes(graph, back)
    else:
        return call
    scales, zeros = {SRC: x_scale, WEIGHTS: w_scale, DST: y_scale}, {SRC: x_zero, DST: y_zero}
    if w_zero is not None and np.any(w_zero):
        zeros[WEIGHTS] = w_zero
    call.scales = {n: s.astype(np.float32) for n, s in scales.items() if s is not None}
    call.zeros = {n: z.astype(np.int32) for n, z in zeros.items() if z is not None and np.any(z)}
    return call


def _of_codes(graph: Graph, node: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray | None]:
    zero = graph.held.get(node.input[2]) if len(node.input) > 2 else None
    return graph.held[node.input[1]], zero


def _bias(graph: Graph, place: int) -> np.ndarray | None:
    """The bias in float32."""
    value, name = graph.value(place), graph.name(place)
    if value is None or value.dtype == np.float32:
        return value
    if name in graph.conversions:
        scale, _ = _of_codes(graph, graph.conversions[name])
    else:
        scale = np.float32(graph.held[graph.node.input[1]] * graph.held[graph.node.input[4]])
    return (value * scale).astype(np.float32)


def convolution(graph: Graph) -> Call:
    qlinear = graph.node.op_type == "QLinearConv"
    w = graph.value(3 if qlinear else 1)
    if w is None:
        raise ValueError("weights that are fed are not made here")
    bias, group = _bias(graph, 8 if qlinear else 2), graph.attrs.get("group", 1)
    transposed, kernel = graph.node.op_type == "ConvTranspose", w.shape[2:]
    if transposed:
        w = np.swapaxes(w.reshape(group, -1, *w.shape[1:]), 1, 2)
        w = w if group > 1 else w[0]
        if any(graph.attrs.get("output_padding", ())) or "output_shape" in graph.attrs:
            raise ValueError("output_padding is not made here")
    elif group > 1:
        w = w.reshape(group, -1, *w.shape[1:])
    operands = {
        SRC: graph.operand(0, chosen=True),
        WEIGHTS: constant(np.ascontiguousarray(w), chosen=True),
        DST: graph.result(chosen=True),
    }
    if bias is not None:
        operands[BIAS] = constant(bias)
    kind, way = ("de" * transposed) + "convolution_forward", (_CONVOLUTION, _DECONVOLUTION)
    described = [_INFERENCE, way[transposed], *map(Of, (SRC, WEIGHTS, BIAS, DST))]
    call = Call(kind, [*described, *graph.windows(kernel)], operands)
    call.mask = 0b11 if group > 1 else 0b1
    return _quantized(graph, call)


def product(graph: Graph) -> Call:
    x, w, y = graph.operand(0, chosen=True), graph.operand(1, chosen=True), graph.result()
    bias = _bias(graph, 2) if graph.node.op_type == "Gemm" else None
    if graph.attrs.get("alpha", 1) != 1 or graph.attrs.get("beta", 1) != 1:
        raise ValueError("factors are not made here")
    if graph.attrs.get("transA") or (graph.attrs.get("transB") and w.value is None):
        raise ValueError("transposed operands are not made here")
    if graph.attrs.get("transB"):
        w = constant(np.ascontiguousarray(w.value.T), chosen=True)
    if len(w.dims) == 2 < len(x.dims) and x.order is None:
        x.dims, y.dims = [(math.prod(each.dims[:-1]), each.dims[-1]) for each in (x, y)]
        y.order = range(2)
    for each in (x, w, y):
        more = len(y.dims) - len(each.dims)
        each.dims = (1,) * more + tuple(each.dims)
        if each.order is not None:
            each.order = *range(more), *[more + axis for axis in each.order]
    if w.value is not None:
        w.value = w.value.reshape(w.dims)
    operands = {SRC: x, WEIGHTS: w, DST: y}
    if bias is not None:
        operands[BIAS] = constant(bias.reshape((1,) * (len(y.dims) - bias.ndim) + bias.shape))
    call = Call("matmul", [*map(Of, (SRC, WEIGHTS, BIAS, DST))], operands)
    call.mask = 1 << (len(y.dims) - 1)
    return _quantized(graph, call)


def pooling(graph: Graph) -> Call:
    x, y = graph.operand(0, innermost=True), graph.result(innermost=True)
    kernel = graph.attrs.get("kernel_shape", x.dims[2:])
    strides, between, before, behind = graph.windows(kernel)
    axes = zip(x.dims[2:], y.dims[2:], kernel, strides, between, before, strict=False)
    behind = _numbers([(n - 1) * s + (k - 1) * (b + 1) + 1 - p - d for d, n, k, s, b, p in axes])
    padded = graph.attrs.get("count_include_pad", 0)
    of_mean = _PADDED_MEAN if padded else _MEAN
    way = _MAX if "Max" in graph.node.op_type else of_mean
    tail = [strides, _numbers(kernel), between, before, behind]
    described = [_INFERENCE, way, Of(SRC), Of(DST), *tail]
    return Call("pooling_forward", described, {SRC: x, DST: y})


def batch_normalization(graph: Graph) -> Call:
    places = {SCALE: 1, SHIFT: 2, MEAN: 3, VARIANCE: 4}
    operands = {SRC: graph.operand(0, innermost=True), DST: graph.result(innermost=True)}
    operands |= {number: graph.operand(place) for number, place in places.items()}
    epsilon = ctypes.c_float(graph.attrs.get("epsilon", 1e-5))
    flags = _STATISTICS | _SCALE | _SHIFT
    described = [_INFERENCE, Of(SRC), Of(DST), epsilon, flags]
    return Call("batch_normalization_forward", described, operands)


def layer_normalization(graph: Graph) -> Call:
    x = graph.operand(0)
    if graph.attrs.get("axis", -1) not in (-1, len(x.dims) - 1):
        raise ValueError("normalization over several axes is not made here")
    operands, flags = {SRC: x, DST: graph.result(), SCALE: graph.operand(1)}, _SCALE
    if graph.name(2):
        operands[SHIFT], flags = graph.operand(2), flags | _SHIFT
    epsilon = ctypes.c_float(graph.attrs.get("epsilon", 1e-5))
    described = [_INFERENCE, Of(SRC), Of(DST), None, epsilon, flags]
    return Call("layer_normalization_forward", described, operands)


def local_response(graph: Graph) -> Call:
    factors = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    alpha, beta, k = [ctypes.c_float(graph.attrs.get(n, v)) for n, v in factors.items()]
    size = ctypes.c_int64(graph.attrs["size"])
    operands = {SRC: graph.operand(0, innermost=True), DST: graph.result(innermost=True)}
    described = [_INFERENCE, _ACROSS_CHANNELS, Of(SRC), Of(DST), size, alpha, beta, k]
    return Call("lrn_forward", described, operands)


def softmax(graph: Graph) -> Call:
    operands = {SRC: graph.operand(0), DST: graph.result()}
    axis = graph.attrs.get("axis", -1) % len(operands[SRC].dims)
    described = [_INFERENCE, _SOFTMAX, Of(SRC), Of(DST), axis]
    return Call("softmax_forward", described, operands)


def recurrent(graph: Graph) -> Call:
    """LSTM, GRU and RNN whose states begin as they are fed."""
    op, attrs = graph.node.op_type, graph.attrs
    if graph.name(4) or graph.name(7) or attrs.get("layout") or "clip" in attrs:
        raise ValueError("lengths, peepholes, layouts and clips are not made here")
    x, w, r = graph.operand(0), graph.value(1), graph.value(2)
    if w is None or r is None or not graph.name(5):
        raise ValueError("weights that are fed, and states that are not, are not made here")
    steps, batch, _ = x.dims
    hidden, directions, gates = attrs["hidden_size"], len(w), _GATES[op]
    linear = op == "GRU" and attrs.get("linear_before_reset", 0)
    order, many = list(gates), len(gates)

    def by_gate(array: np.ndarray) -> np.ndarray:
        split = array.reshape(directions, many, hidden, -1)[:, order]
        return np.ascontiguousarray(np.transpose(split, (0, 3, 1, 2))[None])

    both = graph.value(3)
    both = np.zeros((directions, 2 * many * hidden), np.float32) if both is None else both
    own, other = both.reshape(directions, 2, many, hidden)[:, :, order].transpose(1, 0, 2, 3)
    bias = own + other
    if linear:  # what is added to the recurrent part of the last gate is a bias of its own
        parts = [bias[:, :2], own[:, 2:], other[:, 2:]]
        bias = np.concatenate(parts, axis=1)
    state = (1, directions, batch, hidden)
    names = dict(enumerate(graph.node.output))
    operands = {
        SRC: x,
        STATE: Operand(state, x.dtype, range(4), graph.value(5), graph.name(5)),
        WEIGHTS: constant(by_gate(w), chosen=True),
        RECURRENT: constant(by_gate(r), chosen=True),
        BIAS: constant(np.ascontiguousarray(bias[None])),
        DST: Operand((steps, batch, directions * hidden), x.dtype, range(3), None, names[0]),
        NEW_STATE: Operand(state, x.dtype, range(4), None, names.get(1, "")),
    }
    direction = _DIRECTIONS[attrs.get("direction", b"forward").decode()]
    middle = [Of(SRC), Of(STATE), Of(WEIGHTS), Of(RECURRENT), Of(BIAS), Of(DST), Of(NEW_STATE)]
    described = [_INFERENCE, direction, *middle, 0]
    kind = "lbr_gru" if linear else op.lower()
    if op == "LSTM":
        operands[CELL] = Operand(state, x.dtype, range(4), graph.value(6), graph.name(6))
        operands[NEW_CELL] = Operand(state, x.dtype, range(4), None, names.get(2, ""))
        layers = [Of(SRC), Of(STATE), Of(CELL), Of(WEIGHTS), Of(RECURRENT), None, None, Of(BIAS)]
        described = [_INFERENCE, direction, *layers, Of(DST), Of(NEW_STATE), Of(NEW_CELL), 0]
    elif op == "RNN":
        kind = "vanilla_rnn"
        described = [_INFERENCE, _TANH, direction, *middle, 0, *[ctypes.c_float(0)] * 2]
    graph.told = lambda array: _by_direction(array, (steps, batch, directions, hidden))
    return Call(f"{kind}_forward", described, operands)


def _by_direction(array: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """ONNX's order of dims of a result of all steps; states have it."""
    return array.reshape(dims).swapaxes(1, 2) if array.ndim == 3 else array


_CALLS: dict[str, Callable[[Graph], Call]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "QLinearConv"), convolution),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger"), product),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"), pooling),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent),
    "BatchNormalization": batch_normalization,
    "LRN": local_response,
    "LayerNormalization": layer_normalization,
    "Softmax": softmax,
}
