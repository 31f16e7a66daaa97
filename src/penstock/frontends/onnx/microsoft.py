"""Operations of ONNX Runtime, written as operations of ONNX.

ONNX Runtime's optimizer fuses nodes into operations of its own domain. Decomposed again, they form
the original graph, which Penstock's own passes and backends handle. ``RULES`` has a rule for each;
a rule that emits no final node leaves the node unchanged, since its operation has a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.core.types import BOOL, FLOAT32
from penstock.frontends.common.diagnostics import InexpressibleError
from penstock.frontends.onnx.microsoft_rules import (
    Rule,
    as_scalar,
    rewrites,
    scaled_product,
    sum_of,
)
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Value
from penstock.ops.common.shape_rules import all_known, element_number
from penstock.ops.common.windows import behind, windows
from penstock.ops.registry import MICROSOFT

_INT32 = np.dtype(np.int32)
_MOST_TAPS = 16  # of a row of a window that is written out


def _same_as(name: str, least: int = 1, **renamed: Mapping[str, str]) -> Rule:
    """Return the rule of an operation that equals one of ONNX with these inputs, ``least`` of which
    must be given; ``renamed`` maps attributes to values that have other names there."""

    def same(b: NodeUpgrade) -> None:
        inputs = [b.input(i) for i in range(least)]
        attrs = {key: renamed.get(key, {}).get(v, v) for key, v in b.attrs.items()}
        b.become(name, [*inputs, *b.inputs[least:]], attrs)

    return same


rewrites("Gelu")(_same_as("Gelu"))
rewrites("SampleOp")(_same_as("Identity"))
rewrites("Trilu")(_same_as("Trilu"))
rewrites("GridSample")(_same_as("GridSample", 2, mode={"bilinear": "linear", "bicubic": "cubic"}))


@rewrites("GatherND")
def gather_nd(b: NodeUpgrade) -> None:
    # ONNX Runtime's operation also accepts int32 indices, ONNX's only int64.
    b.become("GatherND", [b.input(0), b.cast(b.input(1), "int64")])


@rewrites("ExpandDims")
def expand_dims(b: NodeUpgrade) -> None:
    # The axis is a scalar, where Unsqueeze takes a vector of int64.
    axis = b.emit("Reshape", [b.cast(b.input(1), "int64"), [-1]])
    b.become("Unsqueeze", [b.input(0), axis])


@rewrites("Range")
def range_(b: NodeUpgrade) -> None:
    bounds = [as_scalar(b, b.input(i)) for i in (0, 1)]
    delta = b.optional(2)
    # In ONNX Runtime delta may be left out, and is then 1.
    b.become("Range", [*bounds, b.like(1, bounds[0]) if delta is None else as_scalar(b, delta)])


@rewrites("Unique")
def unique(b: NodeUpgrade) -> None:
    y, *others = b.outputs
    # This operation lacks ONNX's second output, the first places of elements.
    b.become("Unique", [b.input(0)], {"sorted": 0}, [y, None, *others])


@rewrites("Pad")
def pad(b: NodeUpgrade) -> None:
    value = b.optional(2)
    # The amounts may be a matrix of one row.
    borders = b.emit("Reshape", [b.input(1), [-1]])
    b.become("Pad", [b.input(0), borders, None if value is None else as_scalar(b, value)], b.attrs)


@rewrites("MatMulInteger16")
def matmul_integer_16(b: NodeUpgrade) -> None:
    b.become("MatMul", [b.cast(b.input(i), "int32") for i in (0, 1)])


# Experimental operations in ONNX's own domain, which converters of its first years wrote.


@rewrites("Affine", "Scale", "ScaledTanh", "ParametricSoftplus", domain="")
def affine(b: NodeUpgrade) -> None:
    """alpha x + beta, or alpha f(beta x)."""
    x = b.input(0)
    alpha = b.like(b.attrs.get("scale" if b.op == "Scale" else "alpha", 1.0), x)
    if b.op == "Scale":
        b.become("Mul", [x, alpha])
    elif b.op == "Affine":
        b.become("Add", [b.emit("Mul", [x, alpha]), b.like(b.attrs.get("beta", 0.0), x)])
    else:
        inner = b.emit("Mul", [x, b.like(b.attrs["beta"], x)])
        function = "Tanh" if b.op == "ScaledTanh" else "Softplus"
        b.become("Mul", [b.emit(function, [inner]), alpha])


@rewrites("ImageScaler", domain="")
def image_scaler(b: NodeUpgrade) -> None:
    x = b.emit("Mul", [b.input(0), b.like(b.attrs.get("scale", 1.0), b.input(0))])
    bias = np.asarray(b.attrs["bias"]).reshape(-1, 1, 1)
    b.become("Add", [x, b.emit("CastLike", [b.constant(bias, FLOAT32), x])])


@rewrites("Crop", "DynamicSlice", domain="")
def crop(b: NodeUpgrade) -> None:
    if b.op == "DynamicSlice":
        b.become("Slice", [b.input(0), b.input(1), b.input(2), b.optional(3)])
        return
    left, top, right, bottom = b.attrs["border"]
    starts = b.constant([top, left])
    if b.attrs.get("scale"):
        # Despite its name, ``scale`` is the height and width of the result.
        ends = b.emit("Add", [starts, b.attrs["scale"]])
    else:
        size = b.emit("Shape", [b.input(0)], start=2)
        ends = b.emit("Sub", [size, [bottom, right]])
    b.become("Slice", [b.input(0), starts, ends, [2, 3]])


# Activations.


@rewrites("BiasGelu", "FastGelu")
def biased_gelu(b: NodeUpgrade) -> None:
    is_fast = b.op == "FastGelu"  # its bias may be left out
    x = sum_of(b, b.input(0), b.optional(1) if is_fast else b.input(1))
    b.become("Gelu", [x], {"approximate": "tanh" if is_fast else "none"})


@rewrites("QuickGelu")
def quick_gelu(b: NodeUpgrade) -> None:
    b.become("Swish", [b.input(0)], {"alpha": b.attrs.get("alpha", 1.702)})


_ACTIVATIONS = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Softplus", "Softsign", "HardSwish"), ()),
    **dict.fromkeys(("LeakyRelu", "Elu", "Celu", "ThresholdedRelu"), ("alpha",)),
    "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
    "Clip": ("alpha", "beta"),
}
"""functions that are fused after others, with the names of their parameters"""


def _become_with_activation(
    b: NodeUpgrade, op: str, inputs: Sequence[Value | None], parameters: Sequence[float]
) -> None:
    """Become ``op`` followed by the node's activation."""
    name = b.attrs.get("activation")
    if not name:
        b.become(op, inputs, b.attrs)
        return
    if name not in _ACTIVATIONS:
        raise InexpressibleError(f"activation {name!r} is not supported")
    x = b.emit(op, inputs, b.kept(op, b.attrs))
    if name == "Clip":
        b.become(name, [x, *(b.like(bound, x) for bound in parameters)])
    else:
        b.become(name, [x], dict(zip(_ACTIVATIONS[name], parameters, strict=False)))


@rewrites("FusedGemm")
def fused_gemm(b: NodeUpgrade) -> None:
    keys = _ACTIVATIONS.get(b.attrs.get("activation", ""), ())
    parameters = [b.attrs[f"activation_{key}"] for key in keys]
    _become_with_activation(b, "Gemm", [b.input(0), b.input(1), b.optional(2)], parameters)


@rewrites("FusedConv")
def fused_conv(b: NodeUpgrade) -> None:
    """Conv(x, w, bias) + z, and an activation."""
    parameters = b.attrs.get("activation_params", ())
    inputs, z = [b.input(0), b.input(1), b.optional(2)], b.optional(3)
    if z is None:
        _become_with_activation(b, "Conv", inputs, parameters)
    else:
        y = b.emit("Conv", inputs, b.kept("Conv", b.attrs))
        _become_with_activation(b, "Add", [y, z], parameters)


@rewrites("NhwcMaxPool")
def nhwc_max_pool(b: NodeUpgrade) -> None:
    _become_channels_last(b, "MaxPool", len(b.attrs["kernel_shape"]))


@rewrites("MaxpoolWithMask")
def max_pool_with_mask(b: NodeUpgrade) -> None:
    """Each row of a window ends before the first element that the mask hides: these maxima are
    computed tap by tap, from the last one on, and maxima over rows by MaxPool. The node is left
    unchanged if shapes are not known, masks are shared, or rows are long."""
    kernel, dims = b.attrs["kernel_shape"], all_known(b.shape(0) or (None,))
    is_plain = len(kernel) > 1 and kernel[-1] <= _MOST_TAPS
    if not is_plain or dims is None or 0 in dims or b.shape(1) != dims:
        return
    axes, never_hidden = windows(b.attrs, kernel, dims[2:]), np.zeros(dims[2:], bool)
    never_hidden.flat[0] = True  # as in ONNX Runtime
    ends = [max(n, 0) for n in behind(axes)]
    beside, low = [axes[-1].begin, ends[-1]], b.like(float(np.finfo(FLOAT32).min), b.input(0))
    shown = b.emit("Or", [b.cast(b.input(1), "bool"), b.constant(never_hidden, BOOL)])
    shown = b.emit("Pad", [shown, beside, b.constant(True, BOOL), [-1]])
    x = b.emit("Pad", [b.input(0), beside, low, [-1]])
    best = b.emit("Where", [shown, b.emit("Max", [x, low]), low])
    for _ in range(1, kernel[-1]):
        x, shown = (b.emit("Slice", [v, [0], [-1], [-1]]) for v in (x, shown))
        after = b.emit("Slice", [best, [1], [2**31], [-1]])
        best = b.emit("Where", [shown, b.emit("Max", [x, after]), low])
    pads = [*(axis.begin for axis in axes[:-1]), 0, *ends[:-1], 0]
    sizes = {"kernel_shape": [*kernel[:-1], 1], "strides": [axis.stride for axis in axes]}
    b.become("MaxPool", [best], {**sizes, "pads": pads})


@rewrites("QLinearConv")
def qlinear_conv(b: NodeUpgrade) -> None:
    rank = b.rank(3)
    if rank is not None and b.attrs.get("channels_last"):
        _become_channels_last(b, "QLinearConv", rank - 2)


def _become_channels_last(b: NodeUpgrade, op: str, spatial: int) -> None:
    """Become ``op`` of the first input with its channels moved to axis 1, and back."""
    x = b.emit("Transpose", [b.input(0)], perm=[0, spatial + 1, *range(1, spatial + 1)])
    y = b.emit(op, [x, *b.inputs[1:]], b.kept(op, b.attrs))
    b.become("Transpose", [y], {"perm": [0, *range(2, spatial + 2), 1]})


@rewrites("ConvTransposeWithDynamicPads")
def conv_transpose(b: NodeUpgrade) -> None:
    """Padding removes the borders from the result of ConvTranspose without padding."""
    inputs, pads = [b.input(0), b.input(1), b.optional(3)], b.optional(2)
    if pads is None:
        b.become("ConvTranspose", inputs, b.attrs)
        return
    y = b.emit("ConvTranspose", inputs, b.kept("ConvTranspose", b.attrs))
    shape = b.emit("Shape", [y], start=2)
    pads = b.emit("Reshape", [pads, [-1]])
    rank = b.emit("Shape", [b.emit("Shape", [y])])
    spatial = b.emit("Sub", [rank, [2]])
    starts = b.emit("Slice", [pads, [0], spatial, [0]])
    # Slice clamps an end beyond the last element.
    ends = b.emit("Slice", [pads, spatial, [2**31], [0]])
    axes = b.emit("Range", [2, as_scalar(b, rank), 1])
    b.become("Slice", [y, starts, b.emit("Sub", [shape, ends]), axes])


# Matrix products.


@rewrites("FusedMatMul", "TransposeMatMul", "SparseToDenseMatMul")
def fused_matmul(b: NodeUpgrade) -> None:
    operands = [_transposed(b, i, name) for i, name in enumerate("AB")]
    alpha = b.attrs.get("alpha", 1.0)
    if alpha == 1.0:  # later passes then recognize a plain product
        b.become("MatMul", operands)
    else:
        y = b.emit("MatMul", operands)
        b.become("Mul", [y, b.like(alpha, y)])


def _transposed(b: NodeUpgrade, index: int, name: str) -> Value:
    """Return an operand with its axes in the order of a matrix product: the last two, or the batch
    and the axis after it, may be swapped. Vectors have one order only."""
    x, rank = b.input(index), b.rank(index)
    turned, batch = (bool(b.attrs.get(f"{key}{name}")) for key in ("trans", "transBatch"))
    if not (turned or batch) or (rank is not None and rank < 2):
        return x
    if rank is None:
        source = "i...j" if batch else "...ij"
        target = "...ji" if turned else "...ij"
        return b.emit("Einsum", [x], equation=f"{source}->{target}")
    axes = [*range(1, rank - 1), 0, rank - 1] if batch and rank > 2 else list(range(rank))
    if turned:
        axes[-2:] = axes[:-3:-1]
    return b.emit("Transpose", [x], perm=axes)


@rewrites("CDist")
def cdist(b: NodeUpgrade) -> None:
    """|a - b|^2 is |a|^2 - 2 a b + |b|^2."""
    metric, flipped = b.attrs.get("metric", "sqeuclidean"), {"perm": [1, 0]}
    if metric not in ("euclidean", "sqeuclidean"):
        raise InexpressibleError(f"metric {metric!r} is not supported")
    x, y = b.input(0), b.input(1)
    product = b.emit("MatMul", [x, b.emit("Transpose", [y], flipped)])
    ours, theirs = (b.emit("ReduceSumSquare", [operand, [1]]) for operand in (x, y))
    total = b.emit("Add", [ours, b.emit("Transpose", [theirs], flipped)])
    # Rounding may make the difference of equal points slightly negative, for which Sqrt is NaN.
    squares = b.emit("Sub", [total, b.emit("Mul", [product, b.like(2, product)])])
    positive = [squares, b.like(0, squares)]
    if metric == "euclidean":
        b.become("Sqrt", [b.emit("Max", positive)])
    else:
        b.become("Max", positive)


@rewrites("DynamicQuantizeMatMul")
def dynamic_quantize_matmul(b: NodeUpgrade) -> None:
    codes, scale, zero = b.emit_several("DynamicQuantizeLinear", [b.input(0)], count=3)
    operands = [codes, b.input(1), zero, b.optional(3)]
    _become_sum(b, scaled_product(b, operands, [scale, b.input(2)]), b.optional(4))


@rewrites("MatMulIntegerToFloat")
def matmul_integer_to_float(b: NodeUpgrade) -> None:
    operands = [b.input(0), b.input(1), b.optional(4), b.optional(5)]
    _become_sum(b, scaled_product(b, operands, [b.input(2), b.input(3)]), b.optional(6))


def _become_sum(b: NodeUpgrade, y: Value, bias: Value | None) -> None:
    b.become(*("Identity", [y]) if bias is None else ("Add", [y, bias]))


_HALF_FP4 = (0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
_FOUR_BITS = (
    (*_HALF_FP4, *(-x for x in _HALF_FP4)),
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
)
"""the numbers of FP4 and NF4 codes, of bitsandbytes"""


@rewrites("MatMulBnb4")
def matmul_bnb4(b: NodeUpgrade) -> None:
    """Weights [N, K] with two codes per byte, the first in the upper half; a scale per block."""
    n, k, block = (b.attrs[key] for key in ("N", "K", "block_size"))
    numbers = _FOUR_BITS[b.attrs["quant_type"]]
    pairs = b.constant([[high, low] for high in numbers for low in numbers], FLOAT32)
    codes = b.emit("Gather", [pairs, b.cast(b.input(1), "int32")])
    codes = b.emit("Reshape", [codes, [-1]])
    places = b.emit("Range", [0, n * k, 1])
    # For integers Div gives the index of the block.
    scales = b.emit("Gather", [b.input(2), b.emit("Div", [places, block])])
    codes = b.emit("Slice", [codes, [0], [n * k], [0]])
    weights = b.emit("Reshape", [b.emit("Mul", [codes, scales]), [n, k]])
    b.become("MatMul", [b.input(0), b.emit("Transpose", [weights], perm=[1, 0])])


@rewrites("MatMulFpQ4")
def matmul_fp_q4(b: NodeUpgrade) -> None:
    """Each column in blocks of 32 weights: a scale, perhaps a zero point, and 16 bytes whose lower
    halves are the first 16 codes."""
    zeros = b.attrs.get("blk_quant_type", 1)
    if zeros not in (0, 1):
        raise InexpressibleError("weights of other types than 0 and 1")
    k, n = (b.emit("Gather", [b.input(2), [i]]) for i in range(2))
    dims = b.emit("Concat", [n, [-1, 20 + zeros]], axis=0)
    blocks, byte = b.emit("Reshape", [b.input(1), dims]), np.dtype(np.uint8)

    def part(x: Value, start: int, end: int, axis: int = 2) -> Value:
        return b.emit("Slice", [x, [start], [end], [axis]])

    # The bytes of a scale are those of a float32, lowest first.
    places = b.constant([1, 1 << 8, 1 << 16, 1 << 24], np.dtype(np.uint32))
    bits = b.emit("Mul", [b.cast(part(blocks, 0, 4), "uint32"), places])
    scales = b.emit("BitCast", [b.emit("ReduceSum", [bits, [2]])], to=element_number("float32"))
    # Codes without a zero point represent -8 to 7.
    zero = b.cast(part(blocks, 4, 5), "float32") if zeros else b.constant(8, FLOAT32)
    codes, four = part(blocks, 4 + zeros, 20 + zeros), b.constant(4, byte)
    high = b.emit("BitShift", [codes, four], direction="RIGHT")
    low = b.emit("BitwiseAnd", [codes, b.constant(15, byte)])
    codes = b.emit("Concat", [low, high], axis=2)
    known = b.integers(2)
    if known and len(known) == 2:  # there are kernels for adjacent codes in one byte
        pairs = b.emit("Reshape", [codes, [-1, 2]])
        odd = b.emit("BitShift", [part(pairs, 1, 2, 1), four], direction="LEFT")
        packed = b.emit("BitwiseOr", [part(pairs, 0, 1, 1), odd])
        packed = b.emit("Reshape", [packed, [known[1], -1, 16]])
        attrs = {"K": known[0], "N": known[1], "bits": 4, "block_size": 32}
        b.emit_final(
            "MatMulNBits", [b.input(0), packed, scales, *([zero] * zeros)], attrs, domain=MICROSOFT
        )
        return
    weights = b.emit("Mul", [b.emit("Sub", [b.cast(codes, "float32"), zero]), scales])
    weights = b.emit("Slice", [b.emit("Reshape", [weights, [0, -1]]), [0], k, [1]])
    b.become("MatMul", [b.input(0), b.emit("Transpose", [weights], perm=[1, 0])])


# Normalization and embedding.


@rewrites("SimplifiedLayerNormalization", domain="")
def simplified_layer_normalization(b: NodeUpgrade) -> None:
    """Experimental in ONNX's own domain; left unchanged if its second output is used."""
    if not any(b.outputs[1:]):
        b.become("RMSNormalization", [b.input(0), b.input(1)], b.attrs, b.outputs[:1])


@rewrites("SkipLayerNormalization")
def skip_layer_normalization(b: NodeUpgrade) -> None:
    inputs = [b.input(0), b.input(1), b.optional(4)]
    _become_normalized(b, "LayerNormalization", inputs, [b.input(2), b.optional(3)], 3)


@rewrites("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(b: NodeUpgrade) -> None:
    """Exporters name the outputs for training even if nothing reads them: the mean, which is 0
    since none is subtracted, and the inverse deviation."""
    inputs = [b.input(0), b.input(1), b.optional(3)]
    if any(b.outputs[1:3]):
        total = sum_of(b, *inputs)
        square = b.emit("ReduceMean", [b.emit("Mul", [total, total]), [-1]])
        epsilon = b.constant(b.attrs.get("epsilon", 1e-12), FLOAT32)
        deviation = b.emit("Sqrt", [b.emit("Add", [square, b.emit("CastLike", [epsilon, total])])])
        zeros = b.emit("ConstantOfShape", [b.emit("Shape", [square])])
        mean, inverse = (*b.outputs[1:3], None)[:2]
        if mean is not None:
            b.give([mean], "CastLike", [zeros, total])
        if inverse is not None:
            b.give([inverse], "Reciprocal", [deviation])
    _become_normalized(b, "RMSNormalization", inputs, [b.input(2)], 3)


def _become_normalized(
    b: NodeUpgrade,
    op: str,
    terms: Sequence[Value | None],
    parameters: Sequence[Value | None],
    place: int,
) -> None:
    """Become the normalization of a sum of terms, which is itself the output at ``place``."""
    total = sum_of(b, *terms)
    # ONNX's LayerNormalization also has the mean and the inverse deviation as outputs, in the same
    # places; EmbedLayerNormalization has other outputs there.
    outputs = b.outputs[:1] if op == "RMSNormalization" or place < 3 else b.outputs[:3]
    if len(b.outputs) > place and b.outputs[place] is not None:
        b.give([b.outputs[place]], "Identity", [total])
    attrs = {"epsilon": b.attrs.get("epsilon", 1e-12)}
    b.become(op, [total, *parameters], attrs, outputs)


@rewrites("EmbedLayerNormalization", "QEmbedLayerNormalization")
def embed_layer_normalization(b: NodeUpgrade) -> None:
    """The normalized sum of rows of up to three tables, and the number of set elements in each row
    of a mask. Tables and parameters may be quantized: their scales and zero points follow."""
    ids, segments, mask = b.input(0), b.optional(1), b.optional(7)
    is_quantized = b.op.startswith("Q")

    def real(value: Value, index: int) -> Value:
        if not is_quantized:
            return value
        parameters = [as_scalar(b, b.input(index + offset)) for offset in (6, 11)]
        return b.emit("DequantizeLinear", [value, *parameters])

    def rows(index: int, places: Value) -> Value:
        return real(b.emit("Gather", [b.input(index), places]), index)

    places = None if is_quantized else b.optional(8)
    if places is None:
        length = as_scalar(b, b.emit("Shape", [ids], start=1, end=2))
        places = b.emit("Range", [0, length, 1])
    terms = [rows(2, ids), rows(3, places)]
    if segments is not None and b.optional(4) is not None:
        terms.append(rows(4, segments))
    if len(b.outputs) > 1 and b.outputs[1] is not None:
        rows_of_ids = b.emit("Shape", [ids], start=0, end=1)
        if mask is None:
            count = b.emit("Expand", [b.constant(0, _INT32), rows_of_ids])
        else:
            ones = b.cast(b.emit("Equal", [mask, b.like(1, mask)]), "int32")
            count = b.emit("ReduceSum", [ones, [1]], keepdims=0)
            # The dim of the batch, which may have another name in the mask: rules of attention,
            # which reads this, have to recognize it.
            count = b.emit("Reshape", [count, rows_of_ids])
        b.give([b.outputs[1]], "Identity", [count])
    parameters = [real(b.input(i), i) for i in (5, 6)]
    _become_normalized(b, "LayerNormalization", terms, parameters, 2)
