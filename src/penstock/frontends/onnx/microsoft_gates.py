"""Gates and normalizations of ONNX Runtime's newer language models, written as ONNX's operations.

They are computed in float32, whatever the dtype of the tensors, and rounded once. ``branches`` of
features are an axis of their own, [..., branches, features], or concatenated in the last axis.
"""

from __future__ import annotations

from penstock.core.types import FLOAT32
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.onnx.microsoft_rules import rewrites
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value


def _dims(b: NodeUpgrade, x: Value, start: int, end: int | None = None) -> Value:
    return b.emit("Shape", [x], {"start": start} | ({} if end is None else {"end": end}))


def _joined(b: NodeUpgrade, *dims: Value) -> Value:
    return b.emit("Concat", dims, axis=0)


def _in_branches(b: NodeUpgrade, x: Value) -> Value:
    """Return ``x`` in float32 with an axis of branches."""
    x, count = b.cast(x, "float32"), b.attrs.get("num_branches", 0)
    if not count:
        return x
    dims = _joined(b, _dims(b, x, 0, -1), b.constant([count, -1]))
    return b.emit("Reshape", [x, dims])


def _like_branches(b: NodeUpgrade, gates: Value, x: Value) -> Value:
    """Return one gate for each branch of ``x``, or for each of their features."""
    dims = _joined(b, _dims(b, x, 0, -1), b.constant([-1]))
    return b.emit("Reshape", [b.cast(gates, "float32"), dims])


def _normal(b: NodeUpgrade, x: Value) -> Value:
    """Return x / sqrt(mean of x^2 + epsilon)."""
    epsilon = b.constant(b.attrs.get("epsilon", 1e-5), FLOAT32)
    mean = b.emit("ReduceMean", [b.emit("Mul", [x, x]), [-1]])
    return b.emit("Div", [x, b.emit("Sqrt", [b.emit("Add", [mean, epsilon])])])


def _become_like(b: NodeUpgrade, y: Value, x: Value) -> None:
    """Become ``y`` in the shape and dtype of ``x``."""
    b.become("CastLike", [b.emit("Reshape", [y, b.emit("Shape", [x])]), x], outputs=b.outputs[:1])


@rewrites("GatedAdd")
def gated_add(b: NodeUpgrade) -> None:
    b.become("Add", [b.input(0), b.emit("Mul", [b.input(1), b.input(2)])])


@rewrites("ScaledSiLU")
def scaled_silu(b: NodeUpgrade) -> None:
    x, scale = b.input(0), b.optional(1)
    if scale is None:
        factor = b.constant(b.attrs.get("alpha", 1.0), FLOAT32)
    else:
        factor = b.emit("Reshape", [b.cast(scale, "float32"), []])
    z = b.emit("CastLike", [b.emit("Mul", [b.cast(x, "float32"), factor]), x])
    b.become("Mul", [z, b.emit("Sigmoid", [z])])


@rewrites("BranchwiseRMSNorm")
def branchwise_rms_norm(b: NodeUpgrade) -> None:
    x, scale = b.input(0), b.optional(1)
    branches = _in_branches(b, x)
    y = _normal(b, branches)
    if scale is not None:
        dims = _joined(b, b.constant([-1]), _dims(b, branches, -1))
        y = b.emit("Mul", [y, b.emit("Reshape", [b.cast(scale, "float32"), dims])])
    _become_like(b, y, x)


@rewrites("GatedRMSNorm")
def gated_rms_norm(b: NodeUpgrade) -> None:
    """Each row is normalized in groups of the length of the scale."""
    x, scale, gate = b.input(0), b.input(1), b.cast(b.input(2), "float32")
    activation = b.attrs.get("activation", "silu")
    if activation not in ("silu", "swish", "sigmoid"):
        raise InexpressibleError(f"activation {activation!r} is not supported")
    dims = _joined(b, _dims(b, x, 0, -1), b.constant([-1]), b.emit("Shape", [scale]))
    y = _normal(b, b.emit("Reshape", [b.cast(x, "float32"), dims]))
    y = b.emit("Mul", [y, b.cast(scale, "float32")])
    y = b.emit("Reshape", [y, b.emit("Shape", [x])])
    factor = b.emit("Sigmoid" if activation == "sigmoid" else "Swish", [gate])
    b.become("CastLike", [b.emit("Mul", [y, factor]), x])


@rewrites("HyperConnectionPreMix")
def hyper_connection_pre_mix(b: NodeUpgrade) -> None:
    """The gated sum of branches."""
    x = _in_branches(b, b.input(0))
    products = b.emit("Mul", [x, _like_branches(b, b.input(1), x)])
    total = b.emit("ReduceSum", [products, [-2]], keepdims=0)
    scale = b.constant(b.attrs.get("reduction_scale", 1.0), FLOAT32)
    b.become("CastLike", [b.emit("Mul", [total, scale]), b.input(0)])


@rewrites("HyperConnectionPostMix")
def hyper_connection_post_mix(b: NodeUpgrade) -> None:
    """Branches, mixed by matrices, plus features that each of them gates."""
    x, matrices = _in_branches(b, b.input(0)), b.optional(3)
    features = b.emit("Unsqueeze", [b.cast(b.input(1), "float32"), [-2]])
    added = b.emit("Mul", [_like_branches(b, b.input(2), x), features])
    if matrices is not None:
        operands = [b.cast(matrices, "float32"), x]
        x = b.emit("Einsum", operands, equation="...ck,...ch->...kh")
    _become_like(b, b.emit("Add", [x, added]), b.input(0))


@rewrites("EngramGate")
def engram_gate(b: NodeUpgrade) -> None:
    """sigmoid(sign(d) sqrt(max(|d|, 1e-6))) value, with d = normal(key) normal(query) / sqrt(h)."""
    real = [b.cast(b.input(i), "float32") for i in range(5)]
    key, query = (b.emit("Mul", [_normal(b, real[i]), real[i + 3]]) for i in (0, 1))
    size = b.cast(_dims(b, key, -1), "float32")
    products = b.emit("ReduceSum", [b.emit("Mul", [key, query]), [-1]])
    d = b.emit("Div", [products, b.emit("Sqrt", [size])])
    least = b.constant(1e-6, FLOAT32)
    root = b.emit("Sqrt", [b.emit("Max", [b.emit("Abs", [d]), least])])
    gate = b.emit("Sigmoid", [b.emit("Mul", [b.emit("Sign", [d]), root])])
    value = b.emit("Unsqueeze", [real[2], [2]])
    y = b.emit("Mul", [gate, value])
    if len(b.outputs) > 1 and b.outputs[1] is not None:
        normed = b.emit("Mul", [_normal(b, y), b.cast(b.input(5), "float32")])
        b.give([b.outputs[1]], "CastLike", [normed, b.input(0)])
    b.become("CastLike", [y, b.input(0)], outputs=b.outputs[:1])


@rewrites("CausalConvWithState")
def causal_conv_with_state(b: NodeUpgrade) -> None:
    """ONNX's operation, with zeros inserted between the weights for a dilation, and the channels of
    one or more last axes moved before the sequence."""
    attrs = {"ndim": 1, "dilation": 1, "state_window": 0, **b.attrs}
    dilation = attrs["dilation"]
    if (attrs["ndim"], attrs["state_window"]) != (1, 0) or dilation < 1:
        raise InexpressibleError("several spatial axes or state_window")
    x, w, bias, past = b.input(0), b.input(1), b.optional(2), b.optional(3)
    if dilation > 1:
        single = b.emit("Unsqueeze", [w, [-1]])
        spaced = b.emit("Pad", [single, [0] * 7 + [dilation - 1]])
        taps = b.emit("Reshape", [spaced, [0, 0, -1]])
        # The zeros after the last weight are cut off again.
        bounds = ([0], [1 - dilation], [2])
        w = b.emit("Slice", [taps, *map(b.constant, bounds)])
    if not attrs.get("channels_last"):
        b.become("CausalConvWithState", [x, w, bias, past], b.attrs)
        return
    turned, several = {"perm": [0, 2, 1]}, b.rank(0) != 3
    joined = b.constant([0, 0, -1])
    apart = b.emit("Concat", [[0, 0], b.emit("Shape", [x], start=2)], axis=0)

    def first(value: Value) -> Value:
        flat = b.emit("Reshape", [value, joined]) if several else value
        return b.emit("Transpose", [flat], turned)

    def last(value: Value) -> Value:
        flat = b.emit("Transpose", [value], turned)
        return b.emit("Reshape", [flat, apart]) if several else flat

    y, state = (Value(b.fresh(name)) for name in ("output", "state"))
    inputs = [first(x), w, bias, None if past is None else first(past)]
    b.give([y, state], "CausalConvWithState", inputs, b.kept("CausalConvWithState", b.attrs))
    if len(b.outputs) > 1 and b.outputs[1] is not None:
        b.give([b.outputs[1]], "Identity", [last(state)])
    b.become("Identity", [last(y)], outputs=b.outputs[:1])


@rewrites("LinearAttention")
def linear_attention(b: NodeUpgrade) -> None:
    """ONNX's operation, except that keys may also have more heads than queries."""
    if b.attrs.get("state_window", 0):
        raise InexpressibleError("a window of states")
    heads, kv_heads = b.attrs["q_num_heads"], b.attrs["kv_num_heads"]
    q, k, v = (b.input(i) for i in range(3))
    if 0 < heads < kv_heads and kv_heads % heads == 0:
        apart = b.emit("Reshape", [q, [0, 0, heads, 1, -1]])
        copies = b.emit("Expand", [apart, [1, 1, 1, kv_heads // heads, 1]])
        q, heads = b.emit("Reshape", [copies, [0, 0, -1]]), kv_heads
    rest = [b.optional(i) for i in range(3, 6)]
    b.become("LinearAttention", [q, k, v, *rest], {**b.attrs, "q_num_heads": heads})


@rewrites("LinearAttentionGate")
def linear_attention_gate(b: NodeUpgrade) -> None:
    """``scale * softplus(a + bias)``, and the sigmoid of the fourth input."""
    a = b.input(0)
    soft = b.emit("Softplus", [b.emit("Add", [b.cast(a, "float32"), b.input(1)])])
    decay = b.emit("Mul", [soft, b.input(2)])
    if len(b.outputs) > 1 and b.outputs[1] is not None:
        b.give([b.outputs[1]], "Sigmoid", [b.input(3)])
    b.become("CastLike", [decay, a], outputs=b.outputs[:1])
