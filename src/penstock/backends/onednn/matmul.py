"""MatMul and Gemm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from penstock.backends.onednn import parts
from penstock.backends.onednn.eltwise_algorithms import Eltwise
from penstock.backends.onednn.layouts import padded
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.spec import (
    BoundPrimitive,
    Constants,
    PrimitiveSpec,
    SpecContext,
    absorb,
)
from penstock.backends.onednn.weights import Seen, Weights, weights_of
from penstock.core.types import FLOAT32


def matmul(desc: OpDesc) -> PrimitiveSpec | None:
    """MatMul of tensors of rank 2 or more, whose leading dims broadcast."""
    a, b = desc.input(0), desc.input(1)
    if a is None or b is None or not 2 <= len(a.dims) <= 6 or not 2 <= len(b.dims) <= 6:
        return None
    if _is_too_long(desc, a.dims[-1]):
        return None
    if len(b.dims) == 2:
        constant = desc.constant(1)
        weights = None if constant is None else weights_of(constant)
        return product(desc, weights, math.prod(a.dims[:-1]), a.dims[-1])
    return batched(desc, max(len(a.dims), len(b.dims)))


def gemm(desc: OpDesc) -> PrimitiveSpec | None:
    """Gemm: a product of two matrices times alpha, plus a third matrix times beta."""
    a, b, c = desc.input(0), desc.input(1), desc.input(2)
    if a is None or b is None:
        return None
    attrs = desc.node.attrs
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    flipped = bool(attrs.get("transA", 0)), bool(attrs.get("transB", 0))
    rows, inner = a.dims[::-1] if flipped[0] else a.dims
    if _is_too_long(desc, inner):
        return None
    first: list[PostOp] = []
    terms: list[np.ndarray] = []
    weights, matrix = None, desc.constant(1)
    if matrix is not None:
        # A factor of constant weights is multiplied once, when they are brought into their layout.
        form = partial(_factor, flipped[1], alpha)
        seen = Seen(("gemm", flipped[1], alpha), form, exact=alpha == 1)
        shape = matrix.shape[::-1] if flipped[1] else matrix.shape
        weights = weights_of(matrix, shape, seen)
    # Ahead of all other post-ops: alpha is no factor of the third matrix.
    elif alpha != 1:
        first.append(PostOp(Eltwise("linear", alpha)))
    if c is not None and beta != 0:
        term = desc.constant(2)
        if term is not None and beta != 1:
            terms.append(np.multiply(term, beta, dtype=FLOAT32))
            first.append(PostOp(binary="add", tensor=len(desc.constants)))
        elif beta == 1:
            first.append(PostOp(binary="add", tensor=desc.inputs[2]))
        else:
            return None
    return product(desc.behind(first, *terms), weights, rows, inner, flipped)


def _is_too_long(desc: OpDesc, inner: int) -> bool:
    """Whether a product takes long and cannot be divided by rows. NumPy divides columns, too."""
    flops = 2 * desc.output.elements * inner
    return flops > parts.MOST_FLOPS and parts.divided_axis(desc) is None


def _factor(flipped: bool, alpha: float, matrix: np.ndarray) -> np.ndarray:
    matrix = matrix.T if flipped else matrix
    return matrix if alpha == 1 else np.multiply(matrix, alpha, dtype=FLOAT32)


def product(
    desc: OpDesc,
    weights: Weights | None,
    rows: int,
    inner: int,
    flipped: tuple[bool, bool] = (False, False),
) -> PrimitiveSpec:
    """A product of two matrices. The first one, and the result, may have more than two dims, which
    are joined. ``weights`` is the second matrix if it is a constant. Those of the two that are
    ``flipped`` and no constants are read transposed."""
    width = desc.output.dims[-1]
    bias, desc = desc.without_bias(-1)
    first, second, target = *desc.inputs[:2], desc.outputs[0]
    axes = [(1, 0) if flip else () for flip in flipped]
    tensors = {SRC: first, DST: target}
    constants: Constants = {}
    if weights is not None:
        constants[WEIGHTS] = weights
    else:
        tensors[WEIGHTS] = second
    if bias is not None:
        constants[BIAS] = weights_of(bias, (1, width))
    desc, absorbed = absorb(desc, {1: weights})

    def create(context: SpecContext) -> BoundPrimitive:
        if weights is None or flipped[0]:
            source = context.descriptor(first, (rows, inner), axes[0])
        else:
            source = context.operand(first, (rows, inner))
        if weights is None:
            other = context.descriptor(second, axes=axes[1])
        else:
            other = context.any(weights.shape) if flipped[0] else context.weights(weights.shape)
        term = context.of(None if bias is None else bias.reshape(1, -1))
        arguments = [source, other, term, context.descriptor(target, (rows, width))]
        return context.primitive("matmul", arguments, tensors, constants, view=_as_matrix)

    order = tuple(range(len(desc.output.dims)))
    inputs = first, *desc.operands
    return PrimitiveSpec(desc, create, order, inputs, summed=desc.summed, weights=absorbed)


def _as_matrix(dims: Sequence[int]) -> Sequence[int]:
    return math.prod(dims[:-1]), dims[-1]


def batched(desc: OpDesc, rank: int) -> PrimitiveSpec:
    """A batch of products of matrices, with all tensors viewed with ``rank`` dims."""
    tensors = {SRC: desc.inputs[0], WEIGHTS: desc.inputs[1], DST: desc.outputs[0]}

    def create(context: SpecContext) -> BoundPrimitive:
        source, other, target = [
            context.descriptor(i, padded(desc.dims(i), rank)) for i in tensors.values()
        ]
        return context.primitive("matmul", [source, other, None, target], tensors)

    # Broadcast operands are read right in usual layouts alone (`SpecContext._operand`).
    any_layout = not any(desc.repeats(op.tensor) for op in desc.post_ops if op.binary)
    order = tuple(range(rank))
    return PrimitiveSpec(desc, create, order, desc.operands, any_layout=any_layout)
