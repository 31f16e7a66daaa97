"""Operations of ONNX Runtime, written as those of ONNX.

ONNX Runtime's optimizer fuses nodes into operations of its own domain. Taken apart again, they are
the plain graph, which Penstock's own passes and backends know. ``RULES`` has a rule for each; a
rule that emits no final node leaves the node unchanged: its operation has a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import numpy as np

from penstock.core.types import BOOL, FLOAT32, Shape
from penstock.frontends.common.diagnostics import ConversionError, InexpressibleError, NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade, current
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.common.shape_rules import all_known, element_number
from penstock.ops.common.windows import behind, windows
from penstock.ops.registry import MICROSOFT

_INT32 = np.dtype(np.int32)
_MOST_TAPS = 16  # of a row of a window that is written out

Rule = Callable[[NodeUpgrade], None]

RULES: dict[tuple[str, str], Rule] = {}
"""By domain and name."""


def checked_rule(write: Callable[..., None]) -> Callable[..., None]:
    """``write(b, ...)`` for operations of which the onnx package has no schemas: inputs and
    attributes may be missing or of a wrong type, and outputs too many, which is a ``NodeError``."""

    @wraps(write)
    def checked(b: NodeUpgrade, *arguments: Any) -> None:
        try:
            write(b, *arguments)
            for node in b.nodes:  # inputs, outputs and attributes are those of the file
                schema = None if node.op.domain else current(node.op.name)[1]
                for fault in schema.node_faults(node, node.attrs) if schema else ():
                    raise ValueError(fault)
            if b.nodes and not set(b.outputs) <= {None, *(v for n in b.nodes for v in n.outputs)}:
                raise ValueError(f"{len(b.outputs)} outputs")
        except ConversionError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise NodeError(
                f"has inputs, outputs or attributes that are not those of {b.op}: {error!r}"
            ) from error

    return checked


def rewrites(*names: str, domain: str = MICROSOFT) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule."""

    def register(write: Rule) -> Rule:
        RULES.update(((domain, name), checked_rule(write)) for name in names)
        return write

    return register


def _same_as(name: str, least: int = 1, **renamed: Mapping[str, str]) -> Rule:
    """The same as an operation of ONNX with these inputs, ``least`` of which must be given;
    ``renamed`` are values of attributes that have other names there."""

    def same(b: NodeUpgrade) -> None:
        inputs = [b.input(i) for i in range(least)]
        attrs = {key: renamed.get(key, {}).get(v, v) for key, v in b.attrs.items()}
        b.become(name, [*inputs, *b.inputs[least:]], attrs)

    return same


rewrites("Gelu")(_same_as("Gelu"))
rewrites("SampleOp")(_same_as("Identity"))
rewrites("Trilu")(_same_as("Trilu"))
rewrites("GridSample")(_same_as("GridSample", 2, mode={"bilinear": "linear", "bicubic": "cubic"}))


def _scalar(b: NodeUpgrade, value: Value) -> Value:
    """The element of a tensor of one."""
    return b.emit("Reshape", [value, []])


def _sum(b: NodeUpgrade, *terms: Value | None) -> Value:
    """The sum of the terms that are given."""
    total, *rest = [term for term in terms if term is not None]
    for term in rest:
        total = b.emit("Add", [total, term])
    return total


@rewrites("GatherND")
def gather_nd(b: NodeUpgrade) -> None:
    # ONNX Runtime's operation takes int32 indices as well, ONNX's takes int64 alone.
    b.become("GatherND", [b.input(0), b.cast(b.input(1), "int64")])


@rewrites("ExpandDims")
def expand_dims(b: NodeUpgrade) -> None:
    # The axis is a scalar, where Unsqueeze takes a vector of int64.
    axis = b.emit("Reshape", [b.cast(b.input(1), "int64"), [-1]])
    b.become("Unsqueeze", [b.input(0), axis])


@rewrites("Range")
def range_(b: NodeUpgrade) -> None:
    bounds = [_scalar(b, b.input(i)) for i in (0, 1)]
    delta = b.optional(2)
    # ONNX Runtime lets delta be left out, which is 1.
    b.become("Range", [*bounds, b.like(1, bounds[0]) if delta is None else _scalar(b, delta)])


@rewrites("Unique")
def unique(b: NodeUpgrade) -> None:
    y, *others = b.outputs
    # ONNX's second output, the first places of elements, is the one that this operation lacks.
    b.become("Unique", [b.input(0)], {"sorted": 0}, [y, None, *others])


@rewrites("Pad")
def pad(b: NodeUpgrade) -> None:
    value = b.optional(2)
    # The amounts may be a matrix of one row.
    borders = b.emit("Reshape", [b.input(1), [-1]])
    b.become("Pad", [b.input(0), borders, None if value is None else _scalar(b, value)], b.attrs)


@rewrites("MatMulInteger16")
def matmul_integer_16(b: NodeUpgrade) -> None:
    b.become("MatMul", [b.cast(b.input(i), "int32") for i in (0, 1)])


# Experiments in ONNX's own domain, which converters of its first years wrote.


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
    is_fast = b.op == "FastGelu"  # whose bias may be left out
    x = _sum(b, b.input(0), b.optional(1) if is_fast else b.input(1))
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
"""Functions that are fused behind others, with the names of their parameters."""


def _become_with_activation(
    b: NodeUpgrade, op: str, inputs: Sequence[Value | None], parameters: Sequence[float]
) -> None:
    """Become ``op`` with the node's activation behind it."""
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
    taken tap by tap, from the last one on, and those of rows by MaxPool. Left as it is where
    shapes are not known, masks are shared, or rows are long."""
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
    """Padding cuts off the borders of what ConvTranspose without padding gives."""
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
    # Slice takes an end behind the last element as the last one.
    ends = b.emit("Slice", [pads, spatial, [2**31], [0]])
    axes = b.emit("Range", [2, _scalar(b, rank), 1])
    b.become("Slice", [y, starts, b.emit("Sub", [shape, ends]), axes])


# Matrix products.


@rewrites("FusedMatMul", "TransposeMatMul", "SparseToDenseMatMul")
def fused_matmul(b: NodeUpgrade) -> None:
    operands = [_transposed(b, i, name) for i, name in enumerate("AB")]
    alpha = b.attrs.get("alpha", 1.0)
    if alpha == 1.0:  # which later passes then see as a plain product
        b.become("MatMul", operands)
    else:
        y = b.emit("MatMul", operands)
        b.become("Mul", [y, b.like(alpha, y)])


def _transposed(b: NodeUpgrade, index: int, name: str) -> Value:
    """An operand with its axes in the order of a matrix product: the last two, or the batch and
    the axis behind it, may change places. Vectors have one order only."""
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
    # Rounding may make the difference of equal points a little negative, of which Sqrt is NaN.
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
    _become_sum(b, _scaled_product(b, operands, [scale, b.input(2)]), b.optional(4))


@rewrites("MatMulIntegerToFloat")
def matmul_integer_to_float(b: NodeUpgrade) -> None:
    operands = [b.input(0), b.input(1), b.optional(4), b.optional(5)]
    _become_sum(b, _scaled_product(b, operands, [b.input(2), b.input(3)]), b.optional(6))


def _become_sum(b: NodeUpgrade, y: Value, bias: Value | None) -> None:
    b.become(*("Identity", [y]) if bias is None else ("Add", [y, bias]))


def _scaled_product(
    b: NodeUpgrade, operands: Sequence[Value | None], scales: Sequence[Value | None]
) -> Value:
    """A product of integers, as real numbers."""
    product = b.cast(b.emit("MatMulInteger", operands), "float32")
    return b.emit("Mul", [product, b.emit("Mul", scales)])


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
"""The numbers of FP4 and NF4 codes, of bitsandbytes."""


@rewrites("MatMulBnb4")
def matmul_bnb4(b: NodeUpgrade) -> None:
    """Weights [N, K] of two codes a byte, the first in the upper half; blocks have a scale each."""
    n, k, block = (b.attrs[key] for key in ("N", "K", "block_size"))
    numbers = _FOUR_BITS[b.attrs["quant_type"]]
    pairs = b.constant([[high, low] for high in numbers for low in numbers], FLOAT32)
    codes = b.emit("Gather", [pairs, b.cast(b.input(1), "int32")])
    codes = b.emit("Reshape", [codes, [-1]])
    places = b.emit("Range", [0, n * k, 1])
    # Of integers Div gives the number of the block.
    scales = b.emit("Gather", [b.input(2), b.emit("Div", [places, block])])
    codes = b.emit("Slice", [codes, [0], [n * k], [0]])
    weights = b.emit("Reshape", [b.emit("Mul", [codes, scales]), [n, k]])
    b.become("MatMul", [b.input(0), b.emit("Transpose", [weights], perm=[1, 0])])


@rewrites("MatMulFpQ4")
def matmul_fp_q4(b: NodeUpgrade) -> None:
    """Each column in blocks of 32 weights: a scale, perhaps a zero point, and 16 bytes of which the
    lower halves are the first 16 codes."""
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
    # Codes without a zero point stand for -8 to 7.
    zero = b.cast(part(blocks, 4, 5), "float32") if zeros else b.constant(8, FLOAT32)
    codes, four = part(blocks, 4 + zeros, 20 + zeros), b.constant(4, byte)
    high = b.emit("BitShift", [codes, four], direction="RIGHT")
    low = b.emit("BitwiseAnd", [codes, b.constant(15, byte)])
    codes = b.emit("Concat", [low, high], axis=2)
    known = b.integers(2)
    if known and len(known) == 2:  # then there are kernels, for codes beside the next in a byte
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
    """Experimental in ONNX's own domain; left as it is where its second output is wanted."""
    if not any(b.outputs[1:]):
        b.become("RMSNormalization", [b.input(0), b.input(1)], b.attrs, b.outputs[:1])


@rewrites("SkipLayerNormalization")
def skip_layer_normalization(b: NodeUpgrade) -> None:
    inputs = [b.input(0), b.input(1), b.optional(4)]
    _become_normalized(b, "LayerNormalization", inputs, [b.input(2), b.optional(3)], 3)


@rewrites("SkipSimplifiedLayerNormalization")
def skip_simplified_layer_normalization(b: NodeUpgrade) -> None:
    """Exporters name the outputs for training, though nothing reads them: the mean, which is 0
    since none is subtracted, and the inverse deviation."""
    inputs = [b.input(0), b.input(1), b.optional(3)]
    if any(b.outputs[1:3]):
        total = _sum(b, *inputs)
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
    total = _sum(b, *terms)
    # ONNX's LayerNormalization has the mean and the inverse deviation as outputs as well, in the
    # same places; EmbedLayerNormalization has others there.
    outputs = b.outputs[:1] if op == "RMSNormalization" or place < 3 else b.outputs[:3]
    if len(b.outputs) > place and b.outputs[place] is not None:
        b.give([b.outputs[place]], "Identity", [total])
    attrs = {"epsilon": b.attrs.get("epsilon", 1e-12)}
    b.become(op, [total, *parameters], attrs, outputs)


@rewrites("EmbedLayerNormalization", "QEmbedLayerNormalization")
def embed_layer_normalization(b: NodeUpgrade) -> None:
    """The sum of rows of up to three tables, normalized; and how many elements of each row of a
    mask are set. Tables and parameters may be quantized: their scales and zero points follow."""
    ids, segments, mask = b.input(0), b.optional(1), b.optional(7)
    is_quantized = b.op.startswith("Q")

    def real(value: Value, index: int) -> Value:
        if not is_quantized:
            return value
        parameters = [_scalar(b, b.input(index + offset)) for offset in (6, 11)]
        return b.emit("DequantizeLinear", [value, *parameters])

    def rows(index: int, places: Value) -> Value:
        return real(b.emit("Gather", [b.input(index), places]), index)

    places = None if is_quantized else b.optional(8)
    if places is None:
        length = _scalar(b, b.emit("Shape", [ids], start=1, end=2))
        places = b.emit("Range", [0, length, 1])
    terms = [rows(2, ids), rows(3, places)]
    if segments is not None and b.optional(4) is not None:
        terms.append(rows(4, segments))
    if len(b.outputs) > 1 and b.outputs[1] is not None:
        if mask is None:
            rows_of_ids = b.emit("Shape", [ids], start=0, end=1)
            count = b.emit("Expand", [b.constant(0, _INT32), rows_of_ids])
        else:
            ones = b.cast(b.emit("Equal", [mask, b.like(1, mask)]), "int32")
            count = b.emit("ReduceSum", [ones, [1]], keepdims=0)
        b.give([b.outputs[1]], "Identity", [count])
    parameters = [real(b.input(i), i) for i in (5, 6)]
    _become_normalized(b, "LayerNormalization", terms, parameters, 2)


# Attention.


@rewrites("MRotaryEmbedding")
def rotary_embedding_of_images(b: NodeUpgrade) -> None:
    """Each angle belongs to one of three positions of a token: in time, height or width."""
    section, width = [*b.attrs["mrope_section"]], (b.shape(2) or (None,))[-1]
    if len(section) != 3 or min(section) < 0 or (isinstance(width, int) and width != sum(section)):
        raise NodeError(f"has mrope_section {section}, not three sizes with the caches' sum")
    half, streams = sum(section), np.repeat(np.arange(3), section)
    if b.attrs.get("mrope_layout", 0):
        streams[:] = 0
        for i in (1, 2):
            streams[i : 3 * section[i] : 3] = i
    # A negative position is none, where GatherElements would count from the end of the caches.
    positions = b.emit("BitwiseAnd", [b.emit("Reshape", [b.input(1), [3, 0, 0]]), [2**63 - 1]])
    places = b.emit("Gather", [positions, b.constant(streams)], axis=0)
    places = b.emit("Transpose", [places], perm=[1, 2, 0])
    rows, dims = b.emit("Flatten", [places], axis=2), b.emit("Shape", [places])
    caches = [b.emit("Reshape", [b.input(i), [0, half]]) for i in (2, 3)]
    caches = [b.emit("GatherElements", [cache, rows], axis=0) for cache in caches]
    angles = [b.emit("Reshape", [cache, dims], allowzero=1) for cache in caches]
    b.become("RotaryEmbedding", [b.input(0), *angles], b.attrs)


@rewrites("Attention", "QAttention")
def attention(b: NodeUpgrade) -> None:
    """Attention of three projections of one input."""
    masked, past, added = (5, 8, 9) if b.op == "QAttention" else (3, 4, 5)
    shape, old = b.shape(1), b.optional(past)
    cached = old is not None and b.outputs[1:] and b.outputs[1] and not _is_special(b)
    if shape is None or not isinstance(shape[-1], int):
        return
    if not (_is_bias(b, masked) if cached else _is_plain(b, masked, past)):
        return
    total = shape[-1]
    sizes = b.attrs.get("qkv_hidden_sizes") or [total // 3] * 3
    if len(sizes) != 3 or sum(sizes) != total or sizes[0] != sizes[1]:
        raise NodeError(f"projects to {total} features, which are not those of {sizes}")
    projected = list(_projections(b, sizes))
    if not cached:
        _become_attention(b, projected, sizes, masked, b.optional(added))
        return
    operands = [*projected, _biases(b, masked, added, projected[0]), old]
    b.emit_final("StackedAttention", operands, _in_heads(b, sizes), domain="penstock")


@rewrites("MultiHeadAttention")
def multi_head_attention(b: NodeUpgrade) -> None:
    """Attention of queries, keys and values, all [batch, places, features]; keys and values of
    another sequence may be in heads."""
    biased, masked, added, past = (3, 4, 5, 6) if b.op == "MultiHeadAttention" else (10, 3, 4, 5)
    olds = [b.optional(i) for i in (past, past + 1)]
    cached = all(olds) and _is_bias(b, masked) and len(b.outputs) == 3 and all(b.outputs)
    if not (cached and not _is_special(b)) and not _is_plain(b, masked, past):
        return
    values = [b.optional(i) for i in range(3)]
    shapes = [b.shape(i) if x is not None else None for i, x in enumerate(values)]
    sizes, wide = [_features(s) for s in shapes], [len(s or ()) == 4 for s in shapes]
    # A buffer that the past shares, and beams, are left as they are.
    others = [b.optional(i) for i in range(past + 2, past + 5)]
    if 0 in sizes or wide[0] or (cached and any(wide)) or any(others):
        return
    parts = [None] * 3 if b.optional(biased) is None else _columns(b, biased, sizes)
    sums = [
        _sum(b, x, None if in_heads else part)
        for x, part, in_heads in zip(values, parts, wide, strict=True)
    ]
    if cached:
        biases = _biases(b, masked, added, sums[0])
        b.become("Attention", [*sums, biases, *olds], _in_heads(b, sizes))
    else:
        _become_attention(b, sums, sizes, masked, b.optional(added), wide)


@rewrites("DecoderMaskedMultiHeadAttention")
def decoder_attention(b: NodeUpgrade) -> None:
    """Attention of one query; over a buffer it stays as it is, but for a bias that is added before
    if sizes are known."""
    if b.optional(7) is None or b.optional(10) is None:
        multi_head_attention(b)
        return
    sizes = [_features(b.shape(i)) for i in range(3)]
    if 0 not in sizes and [b.rank(i) for i in range(3)] == [3, 3, 3]:
        pairs = zip(b.inputs[:3], _columns(b, 10, sizes), strict=True)
        inputs = [*[_sum(b, x, part) for x, part in pairs], *b.inputs[3:10]]
        b.emit_final(b.op, inputs, b.attrs, domain=MICROSOFT)


def _features(shape: Shape | None) -> int:
    """Those of [batch, places, features] or [batch, heads, places, size]; 0 if they are unknown."""
    dims = {3: (shape or ())[2:], 4: (shape or ())[1::2]}.get(len(shape or ()), (0,))
    return math.prod([dim if isinstance(dim, int) else 0 for dim in dims])


def _is_special(b: NodeUpgrade) -> bool:
    """Whether queries and keys are rotated, or the past and the present share a buffer."""
    return any(b.attrs.get(key) for key in ("do_rotary", "past_present_share_buffer"))


def _is_plain(b: NodeUpgrade, masked: int, past: int) -> bool:
    """Whether attention can be written out: with a past, or with masks of other kinds than
    ``_mask`` makes, nodes are left as they are."""
    kept = b.optional(past) or any(b.outputs[1:]) or _is_special(b)
    return not kept and _is_mask(b, masked)


def _is_bias(b: NodeUpgrade, masked: int) -> bool:
    """Whether ``_mask`` can write out a mask, if there is one, without scores."""
    return b.optional(masked) is None or b.rank(masked) in (2, 3)


def _biases(b: NodeUpgrade, masked: int, added: int, x: Value) -> Value | None:
    """The sum of a mask and of what is added to scores, which have the dtype of ``x``."""
    mask, bias = _mask(b, masked, x), b.optional(added)
    return _sum(b, mask, bias) if mask or bias else None


def _in_heads(b: NodeUpgrade, sizes: Sequence[int]) -> AttrDict:
    """The attributes of ONNX's Attention, of queries that see all of the past and, if they have an
    order, what is before them."""
    heads = b.attrs["num_heads"]
    if heads < 1 or any(n % heads for n in sizes):
        raise NodeError(f"has {sizes} features, which are not those of {heads} heads")
    return {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "scale": b.attrs.get("scale") or (sizes[0] // heads) ** -0.5,
        "is_causal": b.attrs.get("unidirectional", 0),
    }


def _become_attention(
    b: NodeUpgrade,
    values: Sequence[Value],
    sizes: Sequence[int],
    masked: int,
    added: Value | None,
    wide: Sequence[bool] = (False, False, False),
) -> None:
    """Become softmax(q k^T scale + masks) v in heads, which values are in already if ``wide``."""
    attrs = _in_heads(b, sizes)
    heads, scale = attrs["q_num_heads"], attrs["scale"]

    def split(x: Value, size: int, perm: Sequence[int], in_heads: bool) -> Value:
        """x in heads, with its dims [batch, places, heads, size] in that order."""
        if in_heads:
            perm = [[0, 2, 1, 3][axis] for axis in perm]
            return x if perm == [0, 1, 2, 3] else b.emit("Transpose", [x], perm=perm)
        parts = b.emit("Reshape", [x, [0, 0, heads, size // heads]])
        return b.emit("Transpose", [parts], perm=[*perm])

    orders = [0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]
    q, k, v = (split(*each) for each in zip(values, sizes, orders, wide, strict=True))
    scores = b.emit("MatMul", [q, k])
    scores = b.emit("Mul", [scores, b.like(scale, scores)])
    order = _unseen(b, scores) if attrs["is_causal"] else None
    scores = _sum(b, scores, _mask(b, masked, scores), added, order)
    y = b.emit("MatMul", [b.emit("Softmax", [scores], axis=-1), v])
    y = b.emit("Transpose", [y], perm=[0, 2, 1, 3])
    b.become("Reshape", [y, [0, 0, sizes[2]]])


def _projections(b: NodeUpgrade, sizes: Sequence[int]) -> Iterator[Value]:
    """The input times parts of the weights, plus parts of the bias."""
    x = b.input(0)
    if b.op != "QAttention":
        for w, bias in zip(*(_columns(b, i, sizes) for i in (1, 2)), strict=True):
            yield _sum(b, b.emit("MatMul", [x, w]), bias)
        return
    parts = [_columns(b, i, sizes) for i in (1, 2, 4, 7)]
    for w, bias, scale, zero in zip(*parts, strict=True):
        operands = [x, w, b.optional(6), zero]
        yield _sum(b, _scaled_product(b, operands, [b.input(3), scale]), bias)


def _columns(b: NodeUpgrade, index: int, sizes: Sequence[int]) -> Sequence[Value | None]:
    """An input in parts of some columns each; scalars serve all parts."""
    value = b.optional(index)
    if value is None or b.shape(index) in ((), (1,)):
        return [value] * len(sizes)
    if value.const is not None:
        arrays = np.split(value.const, np.cumsum(sizes)[:-1], -1)
        return [b.constant(np.ascontiguousarray(part), part.dtype) for part in arrays]
    return b.emit_several("Split", [value, sizes], {"axis": -1}, count=len(sizes))


def _places(b: NodeUpgrade, scores: Value, axis: int) -> Value:
    """The places of queries, along axis 2 of scores, or of keys, along axis 3."""
    length = b.cast(_scalar(b, b.emit("Shape", [scores], start=axis, end=axis + 1)), "int32")
    return b.emit("Range", [b.constant(0, _INT32), length, b.constant(1, _INT32)])


def _unseen(b: NodeUpgrade, scores: Value) -> Value:
    """The term that hides from each query the keys behind its own place."""
    queries = b.emit("Unsqueeze", [_places(b, scores, 2), [1]])
    behind = b.emit("Greater", [_places(b, scores, 3), queries])
    return b.emit("Where", [behind, b.like(-math.inf, scores), b.like(0, scores)])


def _is_mask(b: NodeUpgrade, index: int) -> bool:
    """Whether ``_mask`` can write out a mask: of places of the batch, or where its rows end."""
    if b.optional(index) is None:
        return True
    shape, batch = b.shape(index), (b.shape(0) or (None,))[0]
    if shape is None or len(shape) != 1:
        return shape is not None and len(shape) in (2, 3)
    return batch is not None and shape[0] == batch


def _mask(b: NodeUpgrade, index: int, scores: Value) -> Value | None:
    """The term that is added to scores: ``mask_filter_value`` for hidden keys."""
    mask = b.optional(index)
    if mask is None:
        return None
    rank = b.rank(index)
    if rank == 1:
        seen = b.emit("Less", [_places(b, scores, 3), b.emit("Unsqueeze", [mask, [1]])])
    else:
        seen = b.emit("Greater", [mask, b.constant(0, _INT32)])
    # -10000 is ONNX Runtime's default: hidden keys get a weight of almost 0, not exactly 0.
    hidden = b.like(b.attrs.get("mask_filter_value", -10000.0), scores)
    added = b.emit("Where", [seen, b.like(0, scores), hidden])
    # A mask of rank 3 has a row for each query; others serve all queries, and both all heads.
    return b.emit("Unsqueeze", [added, [1] if rank == 3 else [1, 2]])
