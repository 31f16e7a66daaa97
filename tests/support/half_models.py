"""Networks in float16 or another type, as exporters write them: weights and activations in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support.onnx_text import model_from_text

_ATTENTION = """
    qm = MatMul(n, wq) qb = Add(qm, bq) q4 = Reshape(qb, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q4)
    km = MatMul(n, wk) k4 = Reshape(km, heads) k = Transpose <perm = [0, 2, 3, 1]> (k4)
    vm = MatMul(n, wv) v4 = Reshape(vm, heads) v = Transpose <perm = [0, 2, 1, 3]> (v4)
    s = MatMul(q, k) c = Div(s, scale) m = Add(c, mask) p = Softmax <axis = -1> (m)
    o = MatMul(p, v) ot = Transpose <perm = [0, 2, 1, 3]> (o) oc = Reshape(ot, joined)
    a = MatMul(oc, wo)
"""


@dataclass(frozen=True)
class Network:
    """A graph in ONNX's text form: its inputs and outputs, the shapes of its weights or the number
    that a weight is, its nodes. T is the element type."""

    inputs: str
    outputs: str
    weights: Mapping[str, tuple[int, ...] | float]
    nodes: str
    constants: str = ""

    def model(self, dtype: str = "float16", seed: int = 0) -> onnx.ModelProto:
        """The model with random weights."""
        constants = f"<{self.constants}>" if self.constants else ""
        text = f"net ({self.inputs}) => ({self.outputs}) {constants} {{ {self.nodes} }}"
        model = model_from_text(text.replace("T[", f"{dtype}["))
        rng = np.random.default_rng(seed)
        element = getattr(onnx.TensorProto, dtype.replace("float", "FLOAT", 1).upper())
        for name, dims in self.weights.items():
            if isinstance(dims, float):
                values = np.array(dims)
            else:
                fan_in = np.prod(dims[1:] if len(dims) == 4 else dims[:-1])
                values = rng.standard_normal(dims) * np.sqrt(2 / max(1, fan_in))
                values = np.abs(values) if len(dims) == 1 else values  # a variance, perhaps
            array = values.astype(helper.tensor_dtype_to_np_dtype(element))
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model

    def feeds(self, model: onnx.ModelProto, seed: int = 1) -> dict[str, np.ndarray]:
        """Random values of the inputs."""
        rng = np.random.default_rng(seed)
        feeds = {}
        for value in model.graph.input:
            tensor = value.type.tensor_type
            dims = [dim.dim_value for dim in tensor.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            whole = dtype.kind == "i"
            drawn = rng.integers(0, 9, dims) if whole else rng.standard_normal(dims)
            feeds[value.name] = np.asarray(drawn).astype(dtype)
        return feeds


def mlp(batch: int, width: int) -> Network:
    """Gemm with ReLU, MatMul with GELU's formula, Gemm."""
    w, c = width, 4 * width
    weights = {"w1": (w, c), "b1": (c,), "w2": (c, c), "w3": (c, w), "b3": (w,)}
    return Network(
        f"T[{batch}, {w}] x",
        f"T[{batch}, {w}] y",
        weights,
        "a = Gemm(x, w1, b1) b = Relu(a) c = MatMul(b, w2) d = Gelu(c) y = Gemm(d, w3, b3)",
    )


def conv_net(batch: int, size: int, channels: int) -> Network:
    """Convolutions, BatchNormalization, a residual sum, pooling, Resize, a mean and a Gemm."""
    c = channels
    bn = dict.fromkeys(("s", "t", "m"), (c,))
    return Network(
        f"T[{batch}, 3, {size}, {size}] x",
        f"T[{batch}, 10] y",
        {"w1": (c, 3, 3, 3), **bn, "w2": (c, c, 3, 3), "b2": (c,), "w3": (c, 10), "b3": (10,)},
        """a = Conv <pads = [1, 1, 1, 1]> (x, w1)
           n = BatchNormalization(a, s, t, m, s)
           r = Relu(n) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
           c = Conv <pads = [1, 1, 1, 1]> (p, w2, b2) g = Sigmoid(c) h = Mul(c, g) e = Add(h, p)
           u = Resize <mode = "nearest"> (e, , scales)
           k = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (u)
           q = GlobalAveragePool(k) f = Flatten(q) y = Gemm(f, w3, b3)""",
        "float[4] scales = {1, 1, 2, 2}",
    )


def transformer(batch: int, length: int, width: int, heads: int) -> Network:
    """A block of a transformer, behind an embedding."""
    d, c = width, 4 * width
    square = dict.fromkeys(("wq", "wk", "wv", "wo"), (d, d))
    vectors = dict.fromkeys(("g1", "h1", "g2", "h2", "bq"), (d,))
    return Network(
        f"int64[{batch}, {length}] ids, T[{batch}, 1, 1, {length}] mask",
        f"T[{batch}, {length}, {d}] y",
        {
            "table": (64, d),
            **square,
            **vectors,
            "wu": (d, c),
            "bu": (c,),
            "wd": (c, d),
            "scale": (d // heads) ** 0.5,
            "root": 2**0.5,
            "one": 1.0,
            "half": 0.5,
        },
        f"""x = Gather(table, ids) n = LayerNormalization(x, g1, h1)
            {_ATTENTION}
            r = Add(x, a) n2 = LayerNormalization(r, g2, h2)
            u = MatMul(n2, wu) ub = Add(u, bu) e = Div(ub, root) f = Erf(e) i = Add(f, one)
            j = Mul(ub, i) k2 = Mul(j, half) z = MatMul(k2, wd) y = Add(r, z)""",
        f"int64[4] heads = {{0, 0, {heads}, {d // heads}}}, int64[3] joined = {{0, 0, {d}}}",
    )


def recurrence(steps: int, width: int) -> Network:
    """A Loop that carries a state, and an If behind it."""
    w = width
    return Network(
        f"T[1, {w}] x",
        f"T[1, {w}] y, T[{steps}, 1, {w}] states",
        {"w": (w, w), "b": (w,), "zero": 0.0},
        f"""h, states = Loop <body = body (int64 i, bool c, T[1, {w}] s)
                => (bool again, T[1, {w}] t, T[1, {w}] t2)
                {{ again = Identity(c) a = MatMul(s, w) d = Add(a, b) g = Add(d, x) t = Tanh(g)
                   t2 = Identity(t) }}> (count, true, x)
            total = ReduceSum <keepdims = 0> (h) positive = Greater(total, zero)
            y = If (positive) <then_branch = yes () => (T[1, {w}] u) {{ e = MatMul(h, w)
                u = Softmax(e) }}, else_branch = no () => (T[1, {w}] q)
                {{ f = MatMul(h, w) q = Sigmoid(f) }}>""",
        f"int64 count = {{{steps}}}, bool true = {{1}}",
    )


def array_of(tensor: onnx.TensorProto) -> np.ndarray:
    """The contents of an initializer."""
    return numpy_helper.to_array(tensor)
