"""Products with weights that a model stores as codes, mostly of 4 bits, behind a DequantizeLinear.

::

    MatMul(x, DequantizeLinear(codes, scales, zeros))               becomes
    MatMul(x, Transpose(DequantizeLinear(codes, scales, zeros)))    MatMulNBits(x, packed, scales,
    Gemm(x, DequantizeLinear(codes, scales, zeros), bias)           zeros, None, bias)

Constant folding would expand the codes to float32, up to eight times their memory, which a product
of few rows reads in each run. Weights that are multiplied with quantized activations are left to
``quantize``, and 8-bit codes of whole columns to constant folding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.analysis.quantized_weights import producer
from penstock.core.types import FLOAT32, dtype_name
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.dtypes import SUB_BYTE, UINT8
from penstock.ops.common.shape_rules import dtype_attribute
from penstock.ops.registry import MICROSOFT, find
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import Expansion, argument, replace_nodes

_BITS = {"int8": 8, "uint8": 8} | {name: n for name, n in SUB_BYTE.items() if "int" in name}
_TOGETHER = 8
"""Kernels multiply this many weights along K at a time."""


class PackWeights(Pass):
    """Multiply by quantized weights in blocks without expanding them first."""

    requires = frozenset()

    def run(self, graph: Graph, context: PassContext) -> bool:
        return replace_nodes(graph, {"MatMul": _matmul, "Gemm": _gemm})


def _matmul(node: Node) -> Sequence[Node] | None:
    return _product(node, False, None)


def _gemm(node: Node) -> Sequence[Node] | None:
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    bias = node.input(2)
    if alpha != 1 or node.attrs.get("transA", 0) or (bias is not None and beta != 1):
        return None
    return _product(node, bool(node.attrs.get("transB", 0)), bias)


def _product(node: Node, turned: bool, bias: Value | None) -> Sequence[Node] | None:
    x, weights = node.inputs[:2]
    source = argument(weights, "Transpose")
    if source is not None:
        weights, turned = source, not turned
    codes = producer(weights, "DequantizeLinear")
    if codes is None or x is None or x.const is not None or producer(x, "DequantizeLinear"):
        return None
    packed = _packed(codes, turned)
    if packed is None or (bias is not None and bias.shape != (packed[1]["N"],)):
        return None
    parts, (arrays, attrs) = Expansion(node), packed
    constants = [None if array is None else parts.constant(array) for array in arrays]
    operands = [x, *constants, *([] if bias is None else [None, bias])]
    return (node.derived(operands, node.outputs, attrs, op=find("MatMulNBits", MICROSOFT)),)


def _packed(
    node: Node, turned: bool
) -> tuple[Sequence[np.ndarray | None], Mapping[str, int]] | None:
    """Return the weights that ``node`` dequantizes, [K, N] or, if ``turned``, [N, K], as packed
    codes, scales and zero points of a MatMulNBits, and its attributes."""
    arrays = [None if value is None else value.const for value in node.inputs]
    codes, scales, zeros = (*arrays, None)[:3]
    if codes is None or scales is None or (zeros is None and node.input(2) is not None):
        return None
    bits, block = _BITS.get(dtype_name(codes.dtype)), node.attrs.get("block_size", 0)
    if bits is None or codes.ndim != 2 or not codes.size or scales.dtype != FLOAT32 or block < 0:
        return None
    if dtype_attribute(node.attrs, "output_dtype") not in (None, FLOAT32):
        return None
    rows = codes if turned else codes.T
    n, k = rows.shape
    along_k = node.attrs.get("axis", 1) % 2 == int(turned)
    parameters = [a for a in (scales, zeros) if a is not None]
    if block:
        fits = along_k and scales.ndim == 2
        parameters = parameters if turned else [a.T for a in parameters]
    else:
        fits = bits < 8 and (scales.size == 1 or (scales.shape == (n,) and not along_k))
        parameters = [np.resize(a, (n, 1)) for a in parameters]
    block = block or k
    blocks, signed = -(-k // block), dtype_name(codes.dtype).startswith("int")
    fits &= zeros is None or (zeros.shape == scales.shape and zeros.dtype == codes.dtype)
    if not fits or k % _TOGETHER or block % _TOGETHER or parameters[0].shape != (n, blocks):
        return None
    packed = _joined(np.pad(_unsigned(rows, bits, signed), ((0, 0), (0, blocks * block - k))), bits)
    points = None
    # Without zero points, the middle code represents 0.
    if len(parameters) > 1 or not signed:
        last = parameters[1] if len(parameters) > 1 else np.zeros((n, blocks), codes.dtype)
        points = _joined(_unsigned(last, bits, signed), bits)
    scales = np.ascontiguousarray(parameters[0])
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    return (packed.reshape(n, blocks, -1), scales, points), attrs


def _unsigned(codes: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """Return codes of 0 and more, of which the middle one represents 0 if they are ``signed``."""
    raw = np.ascontiguousarray(codes).view(UINT8) & np.uint8((1 << bits) - 1)
    return raw ^ np.uint8(1 << (bits - 1)) if signed else raw


def _joined(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes along the last axis in bytes, the first in the lowest bits."""
    count = 8 // bits
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count)))
    joined = np.zeros((len(codes), codes.shape[1] // count), UINT8)
    for i in range(count):
        joined |= codes[:, i::count] << np.uint8(bits * i)
    return joined
