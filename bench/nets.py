"""Networks for sequences with random weights, in the operations that exporters write.

Each function returns an ONNX model, the same each time: encoders and windows as torch exports
them, steps of decoders over a cache of keys and values, and loops of recurrent cells as tf2onnx and
torch's scripts write them. Caches are inputs ``past_*`` and outputs ``present_*``, in one order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
BLOCK = 32  # weights that share a scale
LONGEST = 4096  # positions that there are tables for
LOWEST = np.float32(-3.4e38)
info = helper.make_tensor_value_info


class Net:
    """An ONNX graph that grows: ``net.MatMul(x, w)`` adds a node and returns its output's name.
    Arrays among the operands become constants."""

    def __init__(self, seed: int = 0, prefix: str = "v") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.rng = np.random.default_rng(seed)
        self._prefix = prefix
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    def const(self, array: Any) -> str:
        name = self._name()
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.const(np.array(numbers, np.int64))

    def number(self, value: float) -> str:
        return self.const(np.array(value, np.float32))

    def weight(self, *shape: int, scale: float | None = None) -> np.ndarray:
        scale = shape[0] ** -0.5 if scale is None else scale
        return (self.rng.standard_normal(shape) * scale).astype(np.float32)

    def __getattr__(self, op: str) -> Any:
        if not op[:1].isupper():
            raise AttributeError(op)

        def add(*operands: Any, outputs: int = 1, domain: str = "", **attrs: Any) -> Any:
            names = [x if isinstance(x, str) else self.const(x) for x in operands]
            results = [self._name() for _ in range(outputs)]
            self.nodes.append(helper.make_node(op, names, results, domain=domain, **attrs))
            return results[0] if outputs == 1 else results

        return add

    def input(self, name: str, dims: list[Any], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(info(name, dtype, dims))
        return name

    def output(self, value: str, name: str, dims: list[Any], dtype: int = TensorProto.FLOAT) -> str:
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(info(name, dtype, dims))
        return name

    def graph(self, name: str = "g") -> onnx.GraphProto:
        return helper.make_graph(self.nodes, name, self.inputs, self.outputs, self.constants)

    def model(self) -> onnx.ModelProto:
        return helper.make_model(self.graph(), opset_imports=OPSETS, ir_version=9)


# Layers.


def linear(net: Net, x: str, inner: int, width: int, weights: str, *, bias: bool = True) -> str:
    """A product with ``weights``: "float32", "int4" or "int8" in blocks, or "dynamic", which rounds
    its input to 8 bits as well."""
    if weights == "float32":
        y = net.MatMul(x, net.weight(inner, width))
    elif weights == "dynamic":
        codes, scale, zero = net.DynamicQuantizeLinear(x, outputs=3)
        w = net.weight(inner, width)
        step = np.abs(w).max() / np.float32(127)
        sums = net.MatMulInteger(codes, np.round(w / step).astype(np.int8), zero, np.int8(0))
        y = net.Mul(net.Cast(sums, to=TensorProto.FLOAT), net.Mul(scale, step))
    else:
        bits, blocks = int(weights.removeprefix("int")), inner // BLOCK
        codes = net.rng.integers(0, 1 << bits, (width, blocks, BLOCK), np.uint8)
        packed = codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4
        scales = np.full(width * blocks, 3 * inner**-0.5 / (1 << bits), np.float32)
        attrs = {"K": inner, "N": width, "bits": bits, "block_size": BLOCK, "accuracy_level": 4}
        y = net.MatMulNBits(x, packed.astype(np.uint8), scales, domain="com.microsoft", **attrs)
    return net.Add(y, net.weight(width, scale=0.02)) if bias else y


def layer_norm(net: Net, x: str, width: int) -> str:
    scale, bias = 1 + net.weight(width, scale=0.1), net.weight(width, scale=0.1)
    return net.LayerNormalization(x, scale, bias, axis=-1, epsilon=1e-5)


def rms_norm(net: Net, x: str, width: int) -> str:
    mean = net.ReduceMean(net.Pow(x, net.number(2)), axes=[-1], keepdims=1)
    root = net.Sqrt(net.Add(mean, net.number(1e-6)))
    return net.Mul(1 + net.weight(width, scale=0.1), net.Mul(x, net.Div(net.number(1), root)))


def gelu(net: Net, x: str) -> str:
    error = net.Erf(net.Div(x, net.number(2**0.5)))
    return net.Mul(net.Mul(x, net.Add(error, net.number(1))), net.number(0.5))


def heads_first(net: Net, x: str, heads: int, size: int) -> str:
    return net.Transpose(net.Reshape(x, net.ints(0, 0, heads, size)), perm=[0, 2, 1, 3])


def heads_last(net: Net, x: str, width: int) -> str:
    return net.Reshape(net.Transpose(x, perm=[0, 2, 1, 3]), net.ints(0, 0, width))


# Encoders.


def encoder(
    positions: int, width: int, heads: int, layers: int, *, masked: bool, batch: int = 1
) -> onnx.ModelProto:
    """BERT's, ``masked``; else that of Whisper, which normalizes before each layer and scales both
    queries and keys."""
    net, size = Net(), width // heads
    x, mask = net.input("x", [batch, positions, width]), ""
    if masked:
        given = net.input("mask", [batch, positions], TensorProto.INT64)
        seen = net.Cast(net.Unsqueeze(given, net.ints(1, 2)), to=TensorProto.FLOAT)
        mask = net.Mul(net.Sub(net.number(1), seen), net.const(LOWEST))
    for _ in range(layers):
        y = x if masked else layer_norm(net, x, width)
        q, k, v = (linear(net, y, width, width, "float32") for _ in range(3))
        q, v = heads_first(net, q, heads, size), heads_first(net, v, heads, size)
        k = net.Transpose(net.Reshape(k, net.ints(0, 0, heads, size)), perm=[0, 2, 3, 1])
        if masked:
            scores = net.Add(net.Div(net.MatMul(q, k), net.number(size**0.5)), mask)
        else:
            root = net.number(size**-0.25)
            scores = net.MatMul(net.Mul(q, root), net.Mul(k, root))
        y = heads_last(net, net.MatMul(net.Softmax(scores, axis=-1), v), width)
        x = net.Add(linear(net, y, width, width, "float32"), x)
        x = layer_norm(net, x, width) if masked else x
        y = x if masked else layer_norm(net, x, width)
        y = gelu(net, linear(net, y, width, 4 * width, "float32"))
        x = net.Add(linear(net, y, 4 * width, width, "float32"), x)
        x = layer_norm(net, x, width) if masked else x
    net.output(x, "y", [batch, positions, width])
    return net.model()


def windows(batch: int, size: int = 56, width: int = 96, heads: int = 3) -> onnx.ModelProto:
    """Two blocks of the first stages of Swin, the second one of each with shifted windows."""
    net, side = Net(), 7
    x = net.input("x", [batch, size * size, width])
    for stage in range(3):
        for shift in (0, 3):
            y = net.Reshape(layer_norm(net, x, width), net.ints(batch, size, size, width))
            y = _windowed(net, _rolled(net, y, shift, size), batch, size, side, width)
            y = _window_attention(net, y, batch, size // side, side, width, heads, bool(shift))
            y = net.Reshape(y, net.ints(batch, size // side, size // side, side, side, width))
            y = net.Transpose(y, perm=[0, 1, 3, 2, 4, 5])
            y = net.Reshape(y, net.ints(batch, size, size, width))
            y = _rolled(net, y, size - shift if shift else 0, size)
            x = net.Add(x, net.Reshape(y, net.ints(batch, size * size, width)))
            y = gelu(net, linear(net, layer_norm(net, x, width), width, 4 * width, "float32"))
            x = net.Add(x, linear(net, y, 4 * width, width, "float32"))
        if stage < 2:
            y, ends = net.Reshape(x, net.ints(batch, size, size, width)), net.ints(size, size)
            corners = [net.ints(i, j) for j in (0, 1) for i in (0, 1)]
            steps = net.ints(1, 2), net.ints(2, 2)
            y = net.Concat(*[net.Slice(y, corner, ends, *steps) for corner in corners], axis=-1)
            size, width, heads = size // 2, 2 * width, 2 * heads
            y = layer_norm(net, net.Reshape(y, net.ints(batch, size * size, 2 * width)), 2 * width)
            x = linear(net, y, 2 * width, width, "float32", bias=False)
    net.output(x, "y", [batch, size * size, width])
    return net.model()


def _rolled(net: Net, x: str, shift: int, size: int) -> str:
    for axis in (1, 2) if shift else ():
        ends = (shift, size), (0, shift)
        x = net.Concat(
            *[net.Slice(x, net.ints(a), net.ints(b), net.ints(axis)) for a, b in ends], axis=axis
        )
    return x


def _windowed(net: Net, x: str, batch: int, size: int, side: int, width: int) -> str:
    count = size // side
    x = net.Reshape(x, net.ints(batch, count, side, count, side, width))
    return net.Reshape(net.Transpose(x, perm=[0, 1, 3, 2, 4, 5]), net.ints(-1, side**2, width))


def _window_attention(
    net: Net, x: str, batch: int, count: int, side: int, width: int, heads: int, masked: bool
) -> str:
    tokens, size = side**2, width // heads
    q, k, v = (
        heads_first(net, linear(net, x, width, width, "float32"), heads, size) for _ in range(3)
    )
    scores = net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2]))
    table = net.weight((2 * side - 1) ** 2, heads, scale=0.02)
    bias = net.Gather(table, net.rng.integers(0, len(table), tokens**2), axis=0)
    bias = net.Transpose(net.Reshape(bias, net.ints(tokens, tokens, heads)), perm=[2, 0, 1])
    scores = net.Div(scores, net.number(size**0.5))
    scores = net.Add(scores, net.Unsqueeze(bias, net.ints(0)))
    if masked:
        hidden = net.rng.random((1, count**2, 1, tokens, tokens)) < 0.3
        scores = net.Reshape(scores, net.ints(batch, count**2, heads, tokens, tokens))
        scores = net.Add(scores, np.where(hidden, np.float32(-100), np.float32(0)))
        scores = net.Reshape(scores, net.ints(-1, heads, tokens, tokens))
    y = heads_last(net, net.MatMul(net.Softmax(scores, axis=-1), v), width)
    return linear(net, y, width, width, "float32")


# Decoders: one step.


def gpt2(weights: str, layers: int = 12, width: int = 768, heads: int = 12) -> onnx.ModelProto:
    """With learned positions, a causal mask cut out of a table, and Concat for its cache."""
    net, size, vocabulary = Net(), width // heads, 50257
    ids = net.input("input_ids", ["b", "s"], TensorProto.INT64)
    words = net.const(net.weight(vocabulary, width, scale=0.1))
    places = net.const(net.weight(LONGEST, width, scale=0.1))
    table = net.const(np.tril(np.ones((LONGEST, LONGEST), bool))[None, None])
    x = ""
    for layer in range(layers):
        past = [_past(net, f"{layer}_{name}", heads, size) for name in ("key", "value")]
        if not layer:
            first = _length(net, past[0])
            last = net.Add(first, _dim(net, ids, 1))
            scalars = [net.Squeeze(bound) for bound in (first, last)]
            positions = net.Range(*scalars, net.const(np.array(1)))
            x = net.Add(net.Gather(words, ids), net.Gather(places, positions))
        y = linear(net, layer_norm(net, x, width), width, 3 * width, weights)
        q, k, v = (heads_first(net, t, heads, size) for t in net.Split(y, axis=2, outputs=3))
        k, v = _present(net, past, (k, v), f"{layer}", heads, size)
        scores = net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2]))
        scores = net.Div(scores, net.number(size**0.5))
        total = _length(net, k)
        begin = net.Sub(total, _length(net, q))
        seen = net.Slice(table, begin, total, net.ints(2))
        seen = net.Slice(seen, net.ints(0), total, net.ints(3))
        parts = net.Softmax(net.Where(seen, scores, net.const(LOWEST)), axis=-1)
        y = heads_last(net, net.MatMul(parts, v), width)
        x = net.Add(linear(net, y, width, width, weights), x)
        y = linear(net, layer_norm(net, x, width), width, 4 * width, weights)
        x = net.Add(x, linear(net, gelu(net, y), 4 * width, width, weights))
    x = layer_norm(net, x, width)
    if weights == "float32":
        y = net.MatMul(x, net.Transpose(words, perm=[1, 0]))
    else:
        y = linear(net, x, width, vocabulary, weights, bias=False)
    net.output(y, "logits", ["b", "s", vocabulary])
    return net.model()


def llama(
    weights: str,
    grouped: bool,
    *,
    layers: int = 12,
    width: int = 1024,
    heads: int = 16,
    groups: int = 4,
    inner: int = 2816,
    bias: bool = False,
) -> onnx.ModelProto:
    """With rotated positions and keys that heads share: GroupQueryAttention if ``grouped``, else
    spelled out. Qwen's has a ``bias`` for queries, keys and values."""
    net, size, vocabulary = Net(1), width // heads, 32000
    ids = net.input("input_ids", ["b", "s"], TensorProto.INT64)
    x = net.Gather(net.weight(vocabulary, width, scale=0.1), ids)
    angles = np.arange(LONGEST)[:, None] / 10000 ** (np.arange(0, size, 2) / size)
    tables = [net.const(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    rotations: list[str] = []
    mask = last = total = ""
    for layer in range(layers):
        past = [_past(net, f"{layer}_{name}", groups, size) for name in ("key", "value")]
        if not layer:
            first = _length(net, past[0])
            end = net.Add(first, _dim(net, ids, 1))
            total = net.Cast(end, to=TensorProto.INT32)
            row = net.Sub(total, net.const(np.array([1], np.int32)))
            last = net.Expand(net.Unsqueeze(row, net.ints(1)), net.ints(1, 1))
            if not grouped:
                one = net.const(np.array(1))
                rows = net.Range(net.Squeeze(first), net.Squeeze(end), one)
                columns = net.Range(net.const(np.array(0)), net.Squeeze(end), one)
                rotations = [_both(net, net.Gather(table, rows)) for table in tables]
                seen = net.LessOrEqual(
                    net.Unsqueeze(columns, net.ints(0)), net.Unsqueeze(rows, net.ints(1))
                )
                mask = net.Where(seen, net.number(0), net.const(LOWEST))
        y = rms_norm(net, x, width)
        widths = width, groups * size, groups * size
        q, k, v = (linear(net, y, width, wide, weights, bias=bias) for wide in widths)
        if grouped:
            attrs = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": 1}
            operands = (q, k, v, *past, last, total, *tables)
            y, *present = net.GroupQueryAttention(
                *operands, outputs=3, domain="com.microsoft", **attrs
            )
            for name, value in zip(("key", "value"), present, strict=True):
                net.output(value, f"present_{layer}_{name}", ["b", groups, "t", size])
        else:
            q, k, v = (
                heads_first(net, t, n, size)
                for t, n in zip((q, k, v), (heads, groups, groups), strict=True)
            )
            q, k = (_rotated(net, t, rotations, size) for t in (q, k))
            k, v = _present(net, past, (k, v), f"{layer}", groups, size)
            k, v = (_repeated(net, t, groups, heads, size) for t in (k, v))
            scores = net.MatMul(q, net.Transpose(k, perm=[0, 1, 3, 2]))
            scores = net.Add(net.Mul(scores, net.number(size**-0.5)), mask)
            y = heads_last(net, net.MatMul(net.Softmax(scores, axis=-1), v), width)
        x = net.Add(x, linear(net, y, width, width, weights, bias=False))
        y = rms_norm(net, x, width)
        gate = linear(net, y, width, inner, weights, bias=False)
        y = net.Mul(
            net.Mul(gate, net.Sigmoid(gate)), linear(net, y, width, inner, weights, bias=False)
        )
        x = net.Add(x, linear(net, y, inner, width, weights, bias=False))
    y = linear(net, rms_norm(net, x, width), width, vocabulary, weights, bias=False)
    net.output(y, "logits", ["b", "s", vocabulary])
    return net.model()


def qwen(weights: str) -> onnx.ModelProto:
    return llama(weights, True, width=896, heads=14, groups=2, inner=4864, bias=True)


def _dim(net: Net, x: str, axis: int) -> str:
    return net.Gather(net.Shape(x), net.ints(axis), axis=0)


def _length(net: Net, x: str) -> str:
    return _dim(net, x, 2)


def _past(net: Net, name: str, heads: int, size: int) -> str:
    return net.input(f"past_{name}", ["b", heads, "p", size])


def _present(
    net: Net, past: list[str], new: tuple[str, str], name: str, heads: int, size: int
) -> list[str]:
    joined = [net.Concat(old, row, axis=2) for old, row in zip(past, new, strict=True)]
    dims = ["b", heads, "t", size]
    return [
        net.output(value, f"present_{name}_{kind}", dims)
        for kind, value in zip(("key", "value"), joined, strict=True)
    ]


def _both(net: Net, half: str) -> str:
    return net.Unsqueeze(net.Concat(half, half, axis=-1), net.ints(0, 1))


def _rotated(net: Net, x: str, rotations: list[str], size: int) -> str:
    half, axes = size // 2, net.ints(3)
    left = net.Slice(x, net.ints(0), net.ints(half), axes)
    right = net.Slice(x, net.ints(half), net.ints(size), axes)
    turned = net.Concat(net.Neg(right), left, axis=-1)
    return net.Add(net.Mul(x, rotations[0]), net.Mul(turned, rotations[1]))


def _repeated(net: Net, x: str, groups: int, heads: int, size: int) -> str:
    batch, length = _dim(net, x, 0), _length(net, x)
    wide = net.Concat(batch, net.ints(groups, heads // groups), length, net.ints(size), axis=0)
    flat = net.Concat(batch, net.ints(heads), length, net.ints(size), axis=0)
    return net.Reshape(net.Expand(net.Unsqueeze(x, net.ints(2)), wide), flat)


# Loops of recurrent cells.


def keras_loop(cell: str, steps: int, batch: int, width: int, units: int) -> onnx.ModelProto:
    """As tf2onnx writes a Keras layer, "LSTM", "GRU" or "GRU before", which resets its state before
    the product: a Loop that gathers a step of its input."""
    net, body = Net(2), Net(3, "b")
    x = net.Transpose(net.input("x", [batch, steps, width]), perm=[1, 0, 2])
    gates = 4 if cell == "LSTM" else 3
    shapes = (width, gates * units), (units, gates * units), (gates * units,), (gates * units,)
    w, u, b, c = (net.const(net.weight(*shape, scale=0.1)) for shape in shapes)
    row = body.Gather(x, "i", axis=0)
    if cell == "LSTM":
        both = body.Add(body.Add(body.MatMul(row, w), body.MatMul("h", u)), b)
        state = _lstm(body, both, 1)
    elif cell == "GRU before":
        z, r, n = body.Split(body.Add(body.MatMul(row, w), b), axis=-1, outputs=3)
        both, last = (net.weight(units, count * units, scale=0.1) for count in (2, 1))
        hz, hr = body.Split(body.MatMul("h", net.const(both)), axis=-1, outputs=2)
        z, r = body.Sigmoid(body.Add(z, hz)), body.Sigmoid(body.Add(r, hr))
        n = body.Tanh(body.Add(n, body.MatMul(body.Mul(r, "h"), net.const(last))))
        kept = body.Mul(body.Sub(body.number(1), z), n)
        state = {"h": body.Add(body.Mul(z, "h"), kept)}
    else:
        left, right = body.Add(body.MatMul(row, w), b), body.Add(body.MatMul("h", u), c)
        (z, r, n), (hz, hr, hn) = (body.Split(t, axis=-1, outputs=3) for t in (left, right))
        z, r = body.Sigmoid(body.Add(z, hz)), body.Sigmoid(body.Add(r, hr))
        n = body.Tanh(body.Add(n, body.Mul(r, hn)))
        kept = body.Mul(body.Sub(body.number(1), z), n)
        state = {"h": body.Add(body.Mul(z, "h"), kept)}
    zeros = net.const(np.zeros((batch, units), np.float32))
    results = net.Loop(
        net.const(np.array(steps)),
        net.const(np.array(True)),
        *[zeros for _ in state],
        outputs=len(state) + 1,
        body=_body(body, state, batch, units),
    )
    net.output(net.Transpose(results[-1], perm=[1, 0, 2]), "y", [batch, steps, units])
    return net.model()


def script_loop(batch: int, width: int, units: int) -> onnx.ModelProto:
    """As torch exports a script that calls a GRUCell for each row of its input."""
    net, body = Net(4), Net(5, "b")
    x = net.input("x", ["steps", batch, width])
    shapes = (3 * units, width), (3 * units, units), (3 * units,), (3 * units,)
    w, u, b, c = (net.const(net.weight(*shape, scale=0.1)) for shape in shapes)
    left = body.Gemm(body.Gather(x, "i", axis=0), w, b, transB=1)
    right = body.Gemm("h", u, c, transB=1)
    (r, z, n), (hr, hz, hn) = (body.Split(t, axis=1, outputs=3) for t in (left, right))
    r, z = body.Sigmoid(body.Add(r, hr)), body.Sigmoid(body.Add(z, hz))
    n = body.Tanh(body.Add(n, body.Mul(r, hn)))
    state = {"h": body.Add(n, body.Mul(z, body.Sub("h", n)))}
    trips = net.Squeeze(_dim(net, x, 0))
    zeros = net.const(np.zeros((batch, units), np.float32))
    inner = _body(body, state, batch, units)
    _, y = net.Loop(trips, net.const(np.array(True)), zeros, outputs=2, body=inner)
    net.output(y, "y", ["steps", batch, units])
    return net.model()


def scan(steps: int, batch: int, width: int, units: int) -> onnx.ModelProto:
    """A Scan of TensorFlow's LSTM cell: one matrix for what it reads and what it carries."""
    net, body = Net(6), Net(7, "b")
    x = net.input("x", [steps, batch, width])
    w, b = net.const(net.weight(width + units, 4 * units)), net.const(net.weight(4 * units))
    both = body.Add(body.MatMul(body.Concat("row", "h", axis=1), w), b)
    state = _lstm(body, both, 2)
    inner = _body(body, state, batch, units, row=width)
    zeros = net.const(np.zeros((batch, units), np.float32))
    *_, y = net.Scan(zeros, zeros, x, outputs=3, body=inner, num_scan_inputs=1)
    net.output(y, "y", [steps, batch, units])
    return net.model()


def counting_loop() -> onnx.ModelProto:
    """A counter, a number and a condition, ``n`` times."""
    net, body = Net(8), Net(9, "b")
    limit = net.input("n", [], TensorProto.INT64)
    for name, dtype in (
        ("i", TensorProto.INT64),
        ("go", TensorProto.BOOL),
        ("k", TensorProto.INT64),
    ):
        body.input(name, [], dtype)
    body.input("s", [])
    k = body.Add("k", body.const(np.array(1)))
    s = body.Add(body.Mul("s", body.number(1.0001)), body.number(0.5))
    body.output(body.Less(k, limit), "on", [], TensorProto.BOOL)
    body.output(k, "k_next", [], TensorProto.INT64)
    body.output(s, "s_next", [])
    begin = net.const(np.array(10**9)), net.const(np.array(True)), net.const(np.array(0))
    _, total = net.Loop(*begin, net.number(0), outputs=2, body=body.graph("body"))
    net.output(total, "total", [])
    return net.model()


def _lstm(body: Net, both: str, order: int) -> dict[str, str]:
    """The next states of an LSTM; gates are i f g o (1) or i g f o (2)."""
    i, second, third, o = body.Split(both, axis=-1, outputs=4)
    f, g = (second, third) if order == 1 else (third, second)
    c = body.Add(body.Mul(body.Sigmoid(f), "c"), body.Mul(body.Sigmoid(i), body.Tanh(g)))
    return {"h": body.Mul(body.Sigmoid(o), body.Tanh(c)), "c": c}


def _body(
    body: Net, state: dict[str, str], batch: int, units: int, row: int = 0
) -> onnx.GraphProto:
    """The body of a Loop, or of a Scan whose rows have ``row`` features, which collects h."""
    if not row:
        body.input("i", [], TensorProto.INT64)
        body.input("go", [], TensorProto.BOOL)
        body.output("go", "on", [], TensorProto.BOOL)
    for name, value in state.items():
        body.input(name, [batch, units])
        body.output(value, f"{name}_next", [batch, units])
    if row:
        body.input("row", [batch, row])
    body.output(state["h"], "y_row", [batch, units])
    return body.graph("body")
