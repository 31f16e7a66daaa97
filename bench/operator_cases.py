"""Cases of ``bench.operators``: models of one node, for each operation of ONNX Runtime's domain.

A builder gives the inputs and attributes of a node for some dims. ``operator_case`` registers it
with three tuples of dims: a small node, whose run is little more than the call; a medium one, of 20
to 100 us in ONNX Runtime; and a large one, of 0.5 to 5 ms, where the operation has such sizes.
Weights, scales and whatever else a model fixes are ``Held``, as initializers; the rest is fed.

Attention, tokens and searches are in ``bench.operator_cases_language``, the operations of
ai.onnx.ml in ``bench.operator_cases_ml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper
from tests.ops.harness import unsaturated
from tests.support.contrib import contrib_model

MICROSOFT, ML = "com.microsoft", "ai.onnx.ml"
SIZES = ("small", "medium", "large")
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """An input that is an initializer."""

    array: np.ndarray


@dataclass(frozen=True)
class Node:
    """What a node is given.

    ``fed_back``: the caches of a decoder, which are fed an output of the run before, by the indices
    of inputs and outputs, in sequences of ``steps`` runs; ``counted`` are the inputs that are one
    more in each. With ``bound``, ONNX Runtime has these outputs in the memory of their inputs.
    ``sparse`` inputs are fed to it as sparse tensors.
    """

    inputs: Sequence[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | Sequence[bool] = 1
    fed_back: Mapping[int, int] = field(default_factory=dict)
    steps: int = 1
    counted: Sequence[int] = ()
    bound: bool = False
    sparse: Sequence[int] = ()


class Draw:
    """Random arrays, the same each time."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def real(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def weights(self, *shape: int, inner: int = 1) -> Held:
        """``inner``: how many products are added up, so that their sum is about 1."""
        return Held(self.real(*shape) / np.float32(np.sqrt(inner)))

    def whole(self, end: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
        return self.rng.integers(0, end, shape).astype(dtype)

    def codes(self, *shape: int, dtype: Any = np.uint8) -> np.ndarray:
        info = np.iinfo(dtype)
        drawn = self.rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)
        return unsaturated(drawn)

    def held_codes(self, *shape: int, dtype: Any = np.int8) -> Held:
        return Held(self.codes(*shape, dtype=dtype))

    def scales(self, *shape: int, low: float = 0.01) -> Held:
        return Held(np.asarray(self.rng.uniform(low, 2 * low, shape), np.float32))

    def texts(self, count: int, words: int) -> np.ndarray:
        """Lines of ``words`` words of one to eight letters."""
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        lines = [
            " ".join("".join(self.rng.choice(letters, n)) for n in self.rng.integers(1, 9, words))
            for _ in range(count)
        ]
        return np.array(lines, object)


Builder = Callable[..., Node]


@dataclass(frozen=True)
class OperatorCase:
    """A node of one size. ``form`` tells the cases of an operation from one another; ``version``
    is that of the domain."""

    operation: str
    form: str
    size: str
    dims: Dims
    build: Builder
    domain: str
    version: int

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.operation, self.form)))

    def node(self) -> Node:
        return self.build(Draw(), *self.dims)

    def model(self, node: Node) -> onnx.ModelProto:
        model = contrib_model(
            self.operation,
            [x.array if isinstance(x, Held) else x for x in node.inputs],
            node.attrs,
            outputs=node.outputs,
            constants=[i for i, x in enumerate(node.inputs) if isinstance(x, Held)],
            domain=self.domain,
        )
        model.opset_import[1].version = self.version
        for info in model.graph.input:
            if node.steps > 1 and info.name in {f"x{i}" for i in node.fed_back}:
                info.type.tensor_type.shape.dim[-2].dim_param = "past"  # it grows
            if info.name in {f"x{i}" for i in node.sparse}:
                dense = info.type.tensor_type
                dims = [dim.dim_value for dim in dense.shape.dim]
                kind = helper.make_sparse_tensor_type_proto(dense.elem_type, dims)
                info.type.CopyFrom(kind)
        return model


def feeds_of(node: Node) -> dict[str, Any]:
    """What is fed, by the names of the model's inputs."""
    fed = {f"x{i}": x for i, x in enumerate(node.inputs)}
    return {name: x for name, x in fed.items() if x is not None and not isinstance(x, Held)}


CASES: list[OperatorCase] = []
"""All that are registered."""


def operator_case(
    operation: str, *sizes: Dims, form: str = "", domain: str = MICROSOFT, version: int = 1
) -> Callable[[Builder], Builder]:
    """A decorator that registers a builder with the dims of each size."""

    def register(build: Builder) -> Builder:
        CASES.extend(
            OperatorCase(operation, form, size, dims, build, domain, version)
            for size, dims in zip(SIZES, sizes, strict=True)
        )
        return build

    return register


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# Activations and gates.

ROWS = (1, 64), (48, 768), (512, 3072)


@operator_case("Gelu", *ROWS)
@operator_case("QuickGelu", *ROWS)
@operator_case("ScaledSiLU", (1, 64), (16, 768), (128, 2048))
@operator_case("SampleOp", (1, 64), (160, 768), (2048, 3072))
def activation(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape)])


@operator_case("BiasGelu", *ROWS)
@operator_case("FastGelu", *ROWS)
def biased_activation(draw: Draw, rows: int, width: int) -> Node:
    return Node([draw.real(1, rows, width), draw.weights(width)])


@operator_case("GatedAdd", (1, 64), (128, 768), (1024, 3072))
def gated_add(draw: Draw, rows: int, width: int) -> Node:
    return Node([draw.real(1, rows, width), draw.real(1, rows, width), draw.real(1, rows, 1)])


@operator_case("EngramGate", (1, 2, 32), (8, 4, 256), (128, 4, 1024))
def engram_gate(draw: Draw, rows: int, groups: int, width: int) -> Node:
    keys = [draw.real(1, rows, groups, width) for _ in range(2)]
    scales = [draw.weights(groups, width) for _ in range(2)]
    return Node([*keys, draw.real(1, rows, width), *scales])


@operator_case("LinearAttentionGate", (1, 4), (64, 16), (4096, 32))
def linear_attention_gate(draw: Draw, rows: int, heads: int) -> Node:
    a, b = (draw.real(1, rows, heads) for _ in range(2))
    return Node([a, draw.weights(heads), draw.weights(heads), b], outputs=2)


# Normalization and embedding.

HIDDEN = (1, 64), (24, 768), (512, 768)


@operator_case("SkipLayerNormalization", *HIDDEN)
def skip_layer_normalization(draw: Draw, rows: int, width: int) -> Node:
    pair = [draw.real(1, rows, width) for _ in range(2)]
    return Node([*pair, *(draw.weights(width) for _ in range(3))])


@operator_case("SkipSimplifiedLayerNormalization", *HIDDEN)
def skip_rms_normalization(draw: Draw, rows: int, width: int) -> Node:
    pair = [draw.real(1, rows, width) for _ in range(2)]
    return Node([*pair, draw.weights(width)], {"epsilon": 1e-6}, [True, False, False, True])


@operator_case("BranchwiseRMSNorm", (1, 2, 32), (8, 4, 256), (64, 4, 1024))
def branchwise_rms_norm(draw: Draw, rows: int, branches: int, width: int) -> Node:
    x, scale = draw.real(1, rows, branches * width), draw.weights(branches, width)
    return Node([x, scale], {"num_branches": branches})


@operator_case("GatedRMSNorm", (1, 64), (6, 512), (64, 2048))
def gated_rms_norm(draw: Draw, rows: int, width: int) -> Node:
    x, gate = (draw.real(1, rows, width) for _ in range(2))
    return Node([x, draw.weights(width), gate], {"activation": "silu"})


@operator_case("HyperConnectionPreMix", (1, 2, 32), (8, 4, 256), (64, 4, 1024))
def hyper_connection_pre_mix(draw: Draw, rows: int, branches: int, width: int) -> Node:
    inputs = [draw.real(1, rows, branches * width), draw.real(1, rows, branches)]
    return Node(inputs, {"num_branches": branches})


@operator_case("HyperConnectionPostMix", (1, 2, 32), (4, 4, 128), (32, 4, 1024))
def hyper_connection_post_mix(draw: Draw, rows: int, branches: int, width: int) -> Node:
    streams, block = draw.real(1, rows, branches * width), draw.real(1, rows, width)
    gates = [draw.real(1, rows, branches), draw.real(1, rows, branches, branches)]
    return Node([streams, block, *gates], {"num_branches": branches})


EMBEDDED = (4, 64), (32, 768), (512, 768)


@operator_case("EmbedLayerNormalization", *EMBEDDED)
def embed_layer_normalization(draw: Draw, length: int, width: int) -> Node:
    ids, segments = (draw.whole(n, 1, length, dtype=np.int32) for n in (1000, 2))
    tables = [draw.weights(n, width) for n in (1000, 512, 2)]
    rest = [draw.weights(width), draw.weights(width), np.ones((1, length), np.int32)]
    return Node([ids, segments, *tables, *rest], {"mask_index_type": 1}, 2)


@operator_case("QEmbedLayerNormalization", *EMBEDDED)
def quantized_embed_layer_normalization(draw: Draw, length: int, width: int) -> Node:
    ids, segments = (draw.whole(n, 1, length, dtype=np.int32) for n in (1000, 2))
    shapes = (1000, width), (512, width), (2, width), (width,), (width,)
    tables = [draw.held_codes(*shape, dtype=np.uint8) for shape in shapes]
    factors = [draw.scales() for _ in shapes]
    zeros = [Held(np.array(128, np.uint8))] * 5
    mask = np.ones((1, length), np.int32)
    return Node([ids, segments, *tables, mask, *factors, *zeros], outputs=2)


# Products of matrices: rows, inner size, columns.

PRODUCTS = (1, 32, 32), (48, 256, 256), (128, 768, 768)


@operator_case("FusedMatMul", *PRODUCTS)
@operator_case("TransposeMatMul", *PRODUCTS)
def fused_matmul(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    weights = draw.weights(columns, inner, inner=inner)
    return Node([draw.real(rows, inner), weights], {"transB": 1, "alpha": 0.5})


@operator_case("FusedMatMul", (2, 8, 8), (4, 96, 32), (12, 256, 64), form="scores")
def fused_scores(draw: Draw, heads: int, length: int, size: int) -> Node:
    pair = [draw.real(1, heads, length, size) for _ in range(2)]
    return Node(pair, {"transB": 1, "alpha": 0.125})


@operator_case("FusedGemm", *PRODUCTS)
def fused_gemm(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    weights = draw.weights(inner, columns, inner=inner), draw.weights(columns)
    return Node([draw.real(rows, inner), *weights], {"activation": "Relu"})


@operator_case("SparseToDenseMatMul", (16, 32, 32), (128, 256, 64), (512, 512, 256))
def sparse_matmul(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    """One in ten elements is not zero."""
    a = draw.real(rows, inner) * (draw.rng.random((rows, inner)) < 0.1).astype(np.float32)
    return Node([a, draw.real(inner, columns)], sparse=[0])


@operator_case("MatMulInteger16", (1, 32, 32), (32, 64, 64), (64, 256, 256))
def matmul_integer_16(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    a, b = (draw.codes(*dims, dtype=np.int16) // 64 for dims in ((rows, inner), (inner, columns)))
    return Node([a, Held(b)])


@operator_case("MatMulIntegerToFloat", *PRODUCTS)
def matmul_integer_to_float(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    scales = [draw.scales(), draw.scales(columns)]
    zeros = [Held(np.array(128, np.uint8)), Held(np.zeros(columns, np.int8))]
    a, b = draw.codes(rows, inner), draw.held_codes(inner, columns)
    return Node([a, b, *scales, *zeros, draw.weights(columns)])


@operator_case("DynamicQuantizeMatMul", *PRODUCTS)
def dynamic_quantize_matmul(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    fixed = [draw.held_codes(inner, columns), draw.scales(columns)]
    zeros, bias = Held(np.zeros(columns, np.int8)), draw.weights(columns)
    return Node([draw.real(rows, inner), *fixed, zeros, bias])


@operator_case("QGemm", *PRODUCTS)
def quantized_gemm(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    zero = Held(np.array(128, np.uint8))
    b = [draw.held_codes(inner, columns), draw.scales(columns), Held(np.zeros(columns, np.int8))]
    bias = Held(draw.whole(1000, columns, dtype=np.int32))
    y = [draw.scales(low=0.02 * float(np.sqrt(inner))), zero]
    return Node([draw.codes(rows, inner), draw.scales(), zero, *b, bias, *y])


def _blocks(draw: Draw, rows: int, inner: int, block: int) -> list[Held]:
    """Weights of 4 bits, and the scales of their blocks."""
    codes = draw.held_codes(rows, inner // block, block // 2, dtype=np.uint8)
    return [codes, draw.scales(rows, inner // block)]


@operator_case("MatMulNBits", (1, 64, 32), (1, 768, 768), (1, 2048, 4096), form="1 row")
@operator_case("MatMulNBits", (4, 64, 32), (64, 256, 128), (64, 1024, 1024), form="many rows")
def matmul_nbits(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    attrs = {"N": columns, "K": inner, "bits": 4, "block_size": 32}
    return Node([draw.real(1, rows, inner), *_blocks(draw, columns, inner, 32)], attrs)


@operator_case("MatMulBnb4", (1, 64, 32), (1, 256, 256), (1, 1024, 2048), form="1 row")
@operator_case("MatMulBnb4", (4, 64, 32), (16, 128, 128), (64, 1024, 1024), form="many rows")
def matmul_bnb4(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    count = inner * columns
    fixed = draw.held_codes(count // 2, dtype=np.uint8), draw.scales(count // 64)
    attrs = {"N": columns, "K": inner, "block_size": 64, "quant_type": 1}
    return Node([draw.real(1, rows, inner), *fixed], attrs)


@operator_case("MatMulFpQ4", (1, 64, 32), (1, 768, 768), (64, 1024, 1024))
def matmul_fp_q4(draw: Draw, rows: int, inner: int, columns: int) -> Node:
    blob = draw.codes(columns, inner // 32, 20)
    blob[..., :4] = draw.scales(columns, inner // 32, 1).array.view(np.uint8)
    fixed = Held(blob.reshape(-1)), Held(np.array([inner, columns]))
    return Node([draw.real(1, rows, inner), *fixed], {"blk_quant_type": 0})


@operator_case("GatherBlockQuantized", (4, 64), (24, 768), (512, 2048))
def gather_block_quantized(draw: Draw, length: int, width: int) -> Node:
    """Rows of an embedding of 4 bits."""
    codes = draw.held_codes(1000, width // 2, dtype=np.uint8)
    attrs = {"bits": 4, "block_size": 32, "gather_axis": 0, "quantize_axis": 1}
    return Node([codes, draw.whole(1000, 1, length), draw.scales(1000, width // 32)], attrs)


EXPERTS = (1, 4, 32), (4, 8, 64), (16, 8, 256)


@operator_case("MoE", *EXPERTS)
def mixture_of_experts(draw: Draw, tokens: int, experts: int, width: int) -> Node:
    """Two experts a token, of a layer four times as wide."""
    first = draw.weights(experts, 4 * width, width, inner=width), draw.weights(experts, 4 * width)
    second = draw.weights(experts, width, 4 * width, inner=width), draw.weights(experts, width)
    attrs = {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1}
    return Node([draw.real(tokens, width), draw.real(tokens, experts), *first, *second], attrs)


@operator_case("QMoE", *EXPERTS)
def quantized_experts(draw: Draw, tokens: int, experts: int, width: int) -> Node:
    def layer(rows: int, inner: int) -> list[Held]:
        codes = draw.held_codes(experts, rows, inner // 2, dtype=np.uint8)
        return [codes, draw.scales(experts, rows, inner // 32), draw.weights(experts, rows)]

    attrs = {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1}
    attrs |= {"expert_weight_bits": 4, "block_size": 32}
    layers = [*layer(4 * width, width), *layer(width, 4 * width)]
    return Node([draw.real(tokens, width), draw.real(tokens, experts), *layers], attrs)


@operator_case("CDist", (4, 4, 8), (128, 96, 32), (1024, 512, 64))
def cdist(draw: Draw, rows: int, others: int, width: int) -> Node:
    return Node([draw.real(rows, width), draw.weights(others, width)], {"metric": "euclidean"})


# Recurrent layers: steps, width of the input, of the hidden state.

RECURRENT = (1, 16, 16), (16, 64, 64), (64, 256, 256)


@operator_case("DynamicQuantizeLSTM", *RECURRENT)
def dynamic_quantize_lstm(draw: Draw, steps: int, width: int, hidden: int) -> Node:
    weights = [draw.held_codes(1, n, 4 * hidden) for n in (width, hidden)]
    scales = [draw.scales(1, low=0.1 / hidden) for _ in range(2)]
    zero = Held(np.zeros(1, np.int8))
    bias = draw.weights(1, 8 * hidden)
    inputs = [draw.real(steps, 1, width), *weights, bias, *[None] * 4]
    return Node([*inputs, scales[0], zero, scales[1], zero], {"hidden_size": hidden}, 3)


@operator_case("AttnLSTM", *RECURRENT)
def attention_lstm(draw: Draw, steps: int, width: int, hidden: int) -> Node:
    """With a memory of 16 positions."""
    depth = hidden // 2
    first = draw.weights(1, 4 * hidden, width + depth, inner=hidden)
    recurrent = draw.weights(1, 4 * hidden, hidden, inner=hidden)
    bias = draw.weights(1, 8 * hidden)
    query = draw.weights(1, hidden, depth, inner=hidden)
    memory = draw.weights(1, depth, depth, inner=depth)
    mixed = draw.weights(1, depth + hidden, depth, inner=hidden)
    inputs = [draw.real(steps, 1, width), first, recurrent, bias, *[None] * 4]
    inputs += [query, memory, draw.weights(1, depth), draw.real(1, 16, depth), int32(16), mixed]
    return Node(inputs, {"hidden_size": hidden}, 3)


# Images and signals: channels, height and width.

IMAGES = (4, 6), (32, 14), (64, 56)


@operator_case("FusedConv", *IMAGES)
def fused_conv(draw: Draw, channels: int, side: int) -> Node:
    weights = draw.weights(channels, channels, 3, 3, inner=9 * channels), draw.weights(channels)
    images = [draw.real(1, channels, side, side) for _ in range(2)]
    attrs = {"activation": "Relu", "pads": [1] * 4, "kernel_shape": [3, 3]}
    return Node([images[0], *weights, images[1]], attrs)


@operator_case("QLinearConv", (4, 6), (32, 28), (64, 56))
def quantized_conv(draw: Draw, channels: int, side: int) -> Node:
    """Channels last, as ONNX Runtime's optimizer writes it."""
    zero = Held(np.array(128, np.uint8))
    weights = draw.held_codes(channels, channels, 3, 3), draw.scales(channels)
    y_scale = draw.scales(low=0.05 * float(np.sqrt(channels)))
    bias = Held(draw.whole(1000, channels, dtype=np.int32))
    x = draw.codes(1, side, side, channels)
    fixed = [*weights, Held(np.zeros(channels, np.int8)), y_scale, zero, bias]
    attrs = {"channels_last": 1, "pads": [1] * 4, "kernel_shape": [3, 3]}
    return Node([x, draw.scales(), zero, *fixed], attrs)


@operator_case("ConvTransposeWithDynamicPads", (4, 4), (16, 14), (64, 28))
def conv_transpose(draw: Draw, channels: int, side: int) -> Node:
    fixed = [draw.weights(channels, channels, 3, 3, inner=9 * channels), Held(np.array([1] * 4))]
    inputs = [draw.real(1, channels, side, side), *fixed, draw.weights(channels)]
    return Node(inputs, {"strides": [2, 2], "output_padding": [1, 1], "kernel_shape": [3, 3]})


@operator_case("CausalConvWithState", (16, 4), (128, 64), (2048, 256), form="prompt")
@operator_case("CausalConvWithState", (16, 1), (2048, 1), (8192, 1), form="step")
def causal_conv(draw: Draw, channels: int, length: int) -> Node:
    weights = [draw.weights(channels, 1, 4), draw.weights(channels)]
    inputs = [draw.real(1, channels, length), *weights, draw.real(1, channels, 3)]
    return Node(inputs, {"activation": "silu"}, 2)


@operator_case("NhwcMaxPool", (4, 6), (64, 112), (128, 224))
def nhwc_max_pool(draw: Draw, channels: int, side: int) -> Node:
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    return Node([draw.codes(1, side, side, channels)], attrs)


@operator_case("MaxpoolWithMask", (1, 6), (1, 112), (1, 800))
def max_pool_with_mask(draw: Draw, channels: int, side: int) -> Node:
    """One channel: ONNX Runtime begins to read the mask of later ones at other places."""
    x, mask = draw.real(1, channels, side, side), draw.whole(2, 1, channels, side, side)
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    return Node([x, mask.astype(np.int32)], attrs)


@operator_case("CropAndResize", (4, 8, 2), (16, 32, 8), (64, 64, 64))
def crop_and_resize(draw: Draw, channels: int, side: int, boxes: int) -> Node:
    corners = np.sort(draw.rng.random((boxes, 2, 2)), 1).reshape(boxes, 4).astype(np.float32)
    size = Held(int32(7, 7))
    return Node([draw.real(1, channels, side, side), corners, np.zeros(boxes, np.int32), size])


@operator_case("GridSample", (2, 6), (4, 32), (16, 128))
def grid_sample(draw: Draw, channels: int, side: int) -> Node:
    grid = draw.rng.uniform(-1, 1, (1, side, side, 2)).astype(np.float32)
    return Node([draw.real(1, channels, side, side), grid])


# Operations on codes.

PLANES = (2, 32), (96, 1024), (1024, 4096)


def _quantized(draw: Draw, *shape: int) -> list[Any]:
    return [draw.codes(*shape), draw.scales(), Held(np.array(120, np.uint8))]


def _target(draw: Draw, low: float = 0.02) -> list[Held]:
    return [draw.scales(low=low), Held(np.array(130, np.uint8))]


@operator_case("QLinearAdd", *PLANES)
@operator_case("QLinearMul", *PLANES)
def quantized_binary(draw: Draw, *shape: int) -> Node:
    return Node([*_quantized(draw, *shape), *_quantized(draw, *shape), *_target(draw)])


@operator_case("QLinearLeakyRelu", *PLANES)
@operator_case("QLinearSigmoid", *PLANES)
def quantized_unary(draw: Draw, *shape: int) -> Node:
    return Node([*_quantized(draw, *shape), *_target(draw)])


@operator_case("QLinearSoftmax", (2, 16), (24, 256), (1024, 512))
def quantized_softmax(draw: Draw, *shape: int) -> Node:
    y = [Held(np.array(1 / 256, np.float32)), Held(np.array(0, np.uint8))]
    return Node([*_quantized(draw, *shape), *y], {"axis": -1, "opset": 13})


@operator_case("QLinearConcat", (2, 8), (128, 256), (256, 4096))
def quantized_concat(draw: Draw, *shape: int) -> Node:
    inputs = [*_target(draw), *_quantized(draw, *shape), *_quantized(draw, *shape)]
    return Node(inputs, {"axis": 1})


@operator_case("QLinearWhere", (2, 32), (16, 1024), (256, 1024))
def quantized_where(draw: Draw, *shape: int) -> Node:
    condition = draw.rng.random(shape) < 0.5
    y = _target(draw)
    return Node([condition, *_quantized(draw, *shape), *_quantized(draw, *shape), *y])


@operator_case("QLinearAveragePool", (4, 6), (32, 14), (64, 56))
def quantized_average_pool(draw: Draw, channels: int, side: int) -> Node:
    inputs = [*_quantized(draw, 1, channels, side, side), *_target(draw, 0.01)]
    return Node(inputs, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4})


@operator_case("QLinearGlobalAveragePool", (4, 4), (1024, 14), (2048, 28))
def quantized_global_average_pool(draw: Draw, channels: int, side: int) -> Node:
    inputs = [*_quantized(draw, 1, channels, side, side), *_target(draw, 0.01)]
    return Node(inputs, {"channels_last": 0})


@operator_case("QuantizeLinear", (2, 32), (128, 1024), (1024, 4096))
def quantize_linear(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape), *_target(draw)])


@operator_case("DequantizeLinear", (2, 32), (128, 1024), (1024, 4096))
def dequantize_linear(draw: Draw, *shape: int) -> Node:
    return Node(_quantized(draw, *shape))


# Arrays.


@operator_case("ExpandDims", (2, 8), (512, 512), (2048, 4096))
def expand_dims(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape), Held(np.array(1, np.int32))])


@operator_case("GatherND", (16, 8, 4), (512, 256, 64), (4096, 1024, 256))
def gather_nd(draw: Draw, rows: int, width: int, places: int) -> Node:
    return Node([draw.real(rows, width), draw.whole(rows, places, 16, 1)])


@operator_case("Pad", (1, 6), (16, 64), (256, 112))
def pad(draw: Draw, channels: int, side: int) -> Node:
    borders = Held(np.array([0, 0, 1, 1, 0, 0, 1, 1]))
    return Node([draw.real(1, channels, side, side), borders])


@operator_case("Range", (16,), (100_000,), (1_000_000,))
def range_(draw: Draw, end: int) -> Node:
    return Node([np.array(value, np.float32) for value in (0, end, 1)])


@operator_case("Trilu", (1, 8), (4, 192), (12, 512))
def trilu(draw: Draw, heads: int, length: int) -> Node:
    return Node([draw.real(heads, length, length), Held(np.array(1))])


@operator_case("UnfoldTensor", (4, 16), (16, 256), (256, 512))
def unfold_tensor(draw: Draw, *shape: int) -> Node:
    return Node([draw.real(*shape)], {"size": 8, "step": 4, "dim": 1})


@operator_case("Unique", (8,), (2000,), (50_000,))
def unique(draw: Draw, count: int) -> Node:
    return Node([draw.whole(count // 2, count, dtype=np.float32)], outputs=3)


@operator_case("Inverse", (1, 4), (4, 24), (8, 128))
def inverse(draw: Draw, count: int, side: int) -> Node:
    return Node([draw.real(count, side, side) + 4 * np.eye(side, dtype=np.float32) * side**0.5])


@operator_case("DynamicTimeWarping", (8, 8), (40, 100), (200, 1500))
def dynamic_time_warping(draw: Draw, tokens: int, frames: int) -> Node:
    return Node([draw.real(tokens, frames)])


@operator_case("WordConvEmbedding", (2, 8, 8), (48, 12, 16), (512, 16, 64))
def word_conv_embedding(draw: Draw, words: int, characters: int, size: int) -> Node:
    window, width = 3, 16
    weights = [draw.weights(size, 1, window, width), draw.weights(size), draw.weights(100, width)]
    ids = 1 + draw.whole(99, words, characters, dtype=np.int32)
    attrs = {"embedding_size": size, "conv_window_size": window, "char_embedding_size": width}
    return Node([ids, *weights], attrs)
