"""Small ONNX models, and damaged copies of them.

A mutant is drawn from a seed alone, so that a failing one can be made again. A third of them have
bytes changed, which mostly breaks the file; the others have fields changed, which mostly leaves a
file that can be read, of a model that may or may not be valid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, parser

from penstock.core.types import STRING, OptionalType, SequenceType, TensorType, Type
from tests.support.onnx_text import model_from_text

_TEXTS = {
    "dense": """g (float[N, 3] x) => (float[N, 2] y)
        <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0.5, -4}>
        { p = MatMul(x, w) s = Add(p, b) r = Relu(s) y = Softmax<axis=-1>(r) }""",
    "convolution": """g (float[1, 2, 6, 6] x, float[4, 1, 3, 3] w) => (float[A, B, C, D] y) {
        c = Conv<group=2, pads=[1, 1, 0, 1], strides=[2, 1], dilations=[1, 2]>(x, w)
        m = MaxPool<kernel_shape=[2, 2], ceil_mode=1>(c)
        y = AveragePool<kernel_shape=[1, 2], auto_pad="SAME_UPPER">(m) }""",
    "shapes": """g (float[2, 3, N] x) => (float[A] y, int64[B] z)
        <int64[1] n = {-1}, int64[1] one = {1}, int64[2] pads = {1, 2}> {
        s = Shape(x) d = Gather<axis=0>(s, one) t = Concat<axis=0>(d, n) r = Reshape(x, t)
        u = Transpose<perm=[1, 0]>(r) f = Flatten<axis=0>(u) q = Squeeze(f, axes)
        y = Pad(q, pads) axes = Constant<value_ints=[0]>() k = NonZero(x) z = Size(k) }""",
    "slices": """g (float[4, 5] x, int64[2] i) => (float[A, B] y, float[C] z)
        <int64[2] s = {3, 0}, int64[2] e = {-9, 4}, int64[2] a = {0, 1}, int64[2] t = {-1, 2}> {
        c = Slice(x, s, e, a, t) p, q = Split<axis=1, num_outputs=2>(c)
        g1 = Gather<axis=0>(x, i) h = ScatterElements<axis=0>(x, j, u)
        j = ConstantOfShape<value: tensor = int64[1] {1}>(two) u = Expand(one, two)
        two = Constant<value_ints=[2, 2]>() one = Constant<value_float=3.0>()
        v, w = TopK<axis=0>(h, k) k = Constant<value_ints=[2]>()
        y = Concat<axis=0>(p, q) z = ReduceSum<keepdims=0>(g1, a0) a0 = Constant<value_ints=[1]>()
        }""",
    "resize": """g (float[1, 1, 4, 4] x) => (float[A, B, C, D] y)
        <float[4] f = {1, 1, 1.5, 0.5}, int64[2] k = {2, 2}> {
        r = Resize<mode="linear">(x, , f) d = DepthToSpace<blocksize=1>(r)
        l = LRN<size=3>(d) n = InstanceNormalization(l, o, o) o = Constant<value_floats=[1.0]>()
        y = Tile(n, t) t = Constant<value_ints=[1, 1, 2, 1]>() }""",
    "recurrent": """g (float[3, 1, 2] x, float[1, 8, 2] w, float[1, 8, 2] r) => (float[A, B, C, D] y) {
        y, h, c = LSTM<hidden_size=2>(x, w, r) }""",
    "quantized": """g (float[2, 4] x) => (uint8[A, B] y, int32[C, D] z)
        <float s = {0.1}, uint8 p = {3}, int8[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}> {
        q = QuantizeLinear(x, s, p) z = MatMulInteger(q, w, p)
        d = DequantizeLinear(q, s, p) y, a, b = DynamicQuantizeLinear(d) }""",
    "signal": """g (float[1, 16, 1] x, int64[1] k) => (float[A, B, C, D] y, int64[E] z) {
        f = Constant<value_int=4>() l = Constant<value_int=8>() w = HannWindow(l)
        y = STFT(x, f, w, l) r = Range(a, l, f) a = Constant<value_int=0>()
        c = CumSum(r, a) h = OneHot<axis=0>(c, n, v) n = Constant<value_int=5>()
        v = Constant<value_ints=[0, 1]>() z = ReduceMax<keepdims=0>(h, k) }""",
    "strings": """g (string[2] x) => (string[A] y, int64[B] n, bool[C] b) {
        j = StringConcat(x, x) y, n = StringSplit<delimiter=" ">(j) b = Equal(x, j) }""",
    "if": """g (float[3] x, bool c) => (float[A] y) {
        y = If(c) <then_branch = t () => (float[A] a) { h = Abs(x) a = Add(h, x) },
                   else_branch = e () => (float[B] b) { i = Constant<value_ints=[0, 1]>()
                                                        b = Gather<axis=0>(x, i) }> }""",
    "loop": """g (float[2] x, int64 n, bool c) => (float[2] y, float[A, B] z) {
        y, z = Loop(n, c, x) <body = b (int64 i, bool t, float[2] v) => (bool u, float[2] w, float[2] s) {
            f = Cast<to=1>(i) w = Add(v, f) s = Mul(v, v) l = ReduceSum<keepdims=0>(s)
            m = Constant<value_float=1000.0>() u = Less(l, m) }> }""",
    "growing": """g (float[1] x, int64 n) => (float[A] y) {
        y = Loop(n, , x) <body = b (int64 i, bool t, float[M] v) => (bool u, float[K] w) {
            u = Identity(t) w = Concat<axis=0>(v, x) }> }""",
    "scan": """g (float[2] s, float[3, 2] x) => (float[2] y, float[3, 2] z) {
        y, z = Scan(s, x)
            <num_scan_inputs = 1, scan_output_directions = [1], body = b (float[2] a, float[2] r) => (float[2] o, float[2] p) {
                o = Add(a, r) p = Neg(o) }> }""",
    "sequence": """g (float[4] x) => (float[A] y) {
        q = SplitToSequence<axis=0>(x, two) two = Constant<value_int=2>()
        m = SequenceMap(q) <body = b (float[K] e) => (float[L] f) { f = Exp(e) }>
        z = Constant<value_int=0>() o = SequenceAt(m, z) i = SequenceInsert(m, o)
        y = ConcatFromSequence<axis=0>(i) }""",
}

_FUNCTION = """<domain: "own", opset_import: ["" : 21]>
twice (v) => (w) { u = Add(v, v) w = Identity(u) }"""


def _model(text: str) -> ModelProto:
    return model_from_text(text, opset=21, domains={"own": 1})


@cache
def models() -> Mapping[str, bytes]:
    """The models that mutants are made of, by name."""
    made = {name: _model(text) for name, text in _TEXTS.items()}
    calling = _model("g (float[2] x) => (float[A] y) { y = own.twice(x) }")
    calling.functions.append(parser.parse_function(_FUNCTION))
    return {
        name: proto.SerializeToString() for name, proto in {**made, "function": calling}.items()
    }


def mutant(data: bytes, seed: str) -> bytes:
    """A damaged copy of a model."""
    draw = random.Random(seed)
    if draw.random() < 0.35:
        return _bytes_changed(data, draw)
    proto = ModelProto.FromString(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        draw.choice(_CHANGES)(proto, draw)
    changed: bytes = proto.SerializeToString()
    return changed


def _bytes_changed(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(changed))
        flipped = changed[at] ^ 1 << draw.randrange(8)
        changed[at] = draw.choice([flipped, flipped, draw.randrange(256), 0, 0x7F, 0x80, 0xFF])
    return bytes(changed)


# Changes of fields. What is drawn are values at which bounds, signs and sizes of numbers change.

_INTS = [0, 1, -1, 2, -2, 3, 5, -9, 64, 255, 1000, 2**20, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40]
_INTS += [2**62, 2**63 - 1, -(2**63)]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.7, 1e30, -1e30, 1e-40, float("nan"), float("inf")]
_TEXT = [b"", b"x", b"reflect", b"linear", b"nearest", b"SAME_LOWER", b"VALID", b"reverse", b"\xff"]
_KINDS = 27  # element types, numbered from 0, of which one more is known than there are


@cache
def _operations() -> Sequence[str]:
    return sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain})


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _a_graph(proto: ModelProto, draw: random.Random) -> GraphProto:
    return draw.choice(list(_graphs(proto.graph)))


def _a_node(proto: ModelProto, draw: random.Random) -> NodeProto:
    nodes = [*_a_graph(proto, draw).node] or [*proto.graph.node]
    return draw.choice(nodes or [NodeProto()])


def _change_attribute(proto: ModelProto, draw: random.Random) -> None:
    node = _a_node(proto, draw)
    if not node.attribute:
        return _add_attribute(node, draw)
    attribute = draw.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = draw.choice(_INTS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = draw.choice(_FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = draw.choice(_TEXT)
    elif attribute.type == AttributeProto.TENSOR:
        _change_tensor(attribute.t, draw)
    elif attribute.type == AttributeProto.INTS and attribute.ints and draw.random() < 0.7:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(_INTS)
    elif attribute.type == AttributeProto.INTS and draw.random() < 0.5:
        attribute.ints.append(draw.choice(_INTS))
    else:
        node.attribute.remove(attribute)
    return None


def _add_attribute(node: NodeProto, draw: random.Random) -> None:
    try:
        known = onnx.defs.get_schema(node.op_type, node.domain).attributes
    except onnx.defs.SchemaError:
        return
    values: dict[str, Any] = {
        "INT": draw.choice(_INTS),
        "FLOAT": draw.choice(_FLOATS),
        "STRING": draw.choice(_TEXT),
        "INTS": [draw.choice(_INTS) for _ in range(draw.randrange(1, 5))],
    }
    fitting = [name for name, each in sorted(known.items()) if each.type.name in values]
    if fitting:
        name = draw.choice(fitting)
        value = values[known[name].type.name]
        node.attribute.append(onnx.helper.make_attribute(name, value))


def _change_operation(proto: ModelProto, draw: random.Random) -> None:
    _a_node(proto, draw).op_type = draw.choice(_operations())


def _change_names(proto: ModelProto, draw: random.Random) -> None:
    graph = _a_graph(proto, draw)
    if not graph.node:
        return
    node = draw.choice(graph.node)
    known = [info.name for info in graph.input] + [name for n in graph.node for name in n.output]
    names = draw.choice([node.input, node.input, node.output])
    if names and draw.random() < 0.3:
        del names[draw.randrange(len(names))]
    elif names and draw.random() < 0.7:
        names[draw.randrange(len(names))] = draw.choice([*known, ""])
    else:
        names.append(draw.choice([*known, "", "new"]))


def _change_input(proto: ModelProto, draw: random.Random) -> None:
    graph = _a_graph(proto, draw)
    if not graph.input:
        return
    kind = draw.choice(graph.input).type.tensor_type
    if draw.random() < 0.4:
        kind.elem_type = draw.randrange(_KINDS)
    elif kind.shape.dim and draw.random() < 0.8:
        draw.choice(kind.shape.dim).dim_value = draw.choice([0, 1, 2, 3, 7, 2**20, 2**40, -1])
    else:
        kind.shape.dim.add().dim_value = draw.choice([0, 1, 2])


def _change_initializer(proto: ModelProto, draw: random.Random) -> None:
    graph = _a_graph(proto, draw)
    if graph.initializer:
        _change_tensor(draw.choice(graph.initializer), draw)


def _change_tensor(tensor: TensorProto, draw: random.Random) -> None:
    numbers: list[tuple[Any, Sequence[Any]]] = [
        (tensor.int64_data, _INTS),
        (tensor.int32_data, [0, 1, -1, 127, 2**31 - 1]),
        (tensor.float_data, _FLOATS),
        (tensor.dims, _INTS),
    ]
    kept = [(field, values) for field, values in numbers if field]
    if kept and draw.random() < 0.7:
        field, values = draw.choice(kept)
        field[draw.randrange(len(field))] = draw.choice(values)
    elif draw.random() < 0.5:
        tensor.data_type = draw.randrange(_KINDS)
    else:
        tensor.dims.append(draw.choice([0, 1, 2]))


def _change_input_to_constant(proto: ModelProto, draw: random.Random) -> None:
    graph = proto.graph
    infos = [info for info in graph.input if info.type.tensor_type.elem_type == TensorProto.INT64]
    if not infos:
        return
    info = draw.choice(infos)
    dims = [max(dim.dim_value, 0) for dim in info.type.tensor_type.shape.dim]
    if np.prod(dims, dtype=float) < 100:
        values = [draw.choice(_INTS) for _ in range(int(np.prod(dims)))]
        graph.initializer.append(
            onnx.helper.make_tensor(info.name, TensorProto.INT64, dims, values)
        )
        graph.input.remove(info)


def _change_version(proto: ModelProto, draw: random.Random) -> None:
    draw.choice(proto.opset_import or [onnx.OperatorSetIdProto()]).version = draw.randrange(1, 28)


_CHANGES: Sequence[Callable[[ModelProto, random.Random], None]] = (
    *(_change_attribute,) * 4,
    *(_change_names,) * 2,
    *(_change_input,) * 2,
    *(_change_initializer,) * 2,
    _change_operation,
    _change_input_to_constant,
    _change_version,
)


def feed(kind: Type, rng: np.random.Generator, sizes: dict[str, int] | None = None) -> Any:
    """A value of a type, ``None`` if it would be large. ``sizes`` are those of dims by name, which
    most values have; new ones are added."""
    if isinstance(kind, OptionalType):
        return feed(kind.element, rng, sizes) if rng.random() < 0.7 else None
    if isinstance(kind, SequenceType):
        return [feed(kind.element, rng, sizes) for _ in range(rng.integers(3))]
    if not isinstance(kind, TensorType):
        return np.zeros(1, np.float32)
    dims = kind.shape if kind.shape is not None else (2,)
    shape = []
    for dim in dims:
        size = dim if isinstance(dim, int) else int(rng.integers(1, 4))
        if isinstance(dim, str) and sizes is not None and rng.random() < 0.95:
            size = sizes.setdefault(dim, size)
        shape.append(size)
    dtype = kind.dtype if kind.dtype is not None else np.dtype(np.float32)
    if np.prod(shape, dtype=float) > 2**14:
        return None
    if dtype == STRING:
        return np.full(shape, "ab c", object)
    if dtype.kind in "biu":
        return rng.integers(0, 2 if dtype.kind == "b" else 4, shape).astype(dtype)
    return (rng.standard_normal(shape) * 2).astype(dtype)
