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
from penstock.ops.common.dtypes import INT8, SUB_BYTE, UINT8
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
    arrays = _arrays(node)
    if arrays is None:
        return None
    codes, *parameters = arrays
    rows, kind = codes if turned else codes.T, dtype_name(codes.dtype)
    bits, signed = _BITS[kind], kind.startswith("int")
    n, k = rows.shape
    block = node.attrs.get("block_size", 0) or k
    if not codes.size or k % _TOGETHER or block % _TOGETHER or block < 1:
        return None
    blocks = -(-k // block)
    # Without zero points, the middle code represents 0.
    if len(parameters) == 1 and not signed:
        parameters.append(np.zeros(parameters[0].shape, codes.dtype))
    matrices = [_by_rows(parameter, node, n, turned) for parameter in parameters]
    fitting = [m for m in matrices if m is not None and m.shape == (n, blocks)]
    if len(fitting) < len(parameters):
        return None
    scales, *points = fitting
    whole = np.pad(_unsigned(rows, bits, signed), ((0, 0), (0, blocks * block - k)))
    packed = _joined(whole, bits).reshape(n, blocks, -1)
    zeros = _joined(_unsigned(points[0], bits, signed), bits) if points else None
    return (packed, scales, zeros), {"K": k, "N": n, "bits": bits, "block_size": block}


def _arrays(node: Node) -> list[np.ndarray] | None:
    """Return the codes, the scales and the zero points, if there are any, of a DequantizeLinear of
    constants that MatMulNBits may have."""
    given = [value for value in node.inputs if value is not None]
    arrays = [value.const for value in given if value.const is not None]
    if len(arrays) < max(len(given), 2):
        return None
    codes, scales, *zeros = arrays
    typed = dtype_attribute(node.attrs, "output_dtype") or FLOAT32
    fits = [zero.shape == scales.shape and zero.dtype == codes.dtype for zero in zeros]
    known = dtype_name(codes.dtype) in _BITS and codes.ndim == 2
    return arrays if known and scales.dtype == typed == FLOAT32 and all(fits) else None


def _by_rows(parameter: np.ndarray, node: Node, n: int, turned: bool) -> np.ndarray | None:
    """Return scales or zero points as [N, blocks], None if they are not of blocks along K."""
    along_k = node.attrs.get("axis", 1) % 2 == int(turned)
    if node.attrs.get("block_size", 0):
        fits, matrix = along_k and parameter.ndim == 2, parameter if turned else parameter.T
    else:
        narrow = node.inputs[0] is not None and node.inputs[0].dtype not in (INT8, UINT8)
        fits = narrow and (parameter.size == 1 or (parameter.shape == (n,) and not along_k))
        matrix = np.resize(parameter, (n, 1))
    return np.ascontiguousarray(matrix) if fits else None


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
