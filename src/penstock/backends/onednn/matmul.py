"""MatMul and Gemm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.backends.onednn.eltwise_algorithms import Eltwise
from penstock.backends.onednn.layouts import padded
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ops.common.constant_cache import shared
from penstock.types import FLOAT32


def matmul(desc: OpDesc) -> PrimitiveSpec | None:
    """MatMul of tensors of rank 2 or more, whose leading dims broadcast."""
    a, b = desc.input(0), desc.input(1)
    if a is None or b is None or not 2 <= len(a.dims) <= 6 or not 2 <= len(b.dims) <= 6:
        return None
    weights = desc.constant(1)
    if len(b.dims) == 2:
        return product(desc, weights, math.prod(a.dims[:-1]), a.dims[-1])
    return batched(desc, max(len(a.dims), len(b.dims)))


def gemm(desc: OpDesc) -> PrimitiveSpec | None:
    """Gemm: a product of two matrices times alpha, plus a third matrix times beta."""
    a, b, c = desc.input(0), desc.input(1), desc.input(2)
    if a is None or b is None:
        return None
    attrs, y = desc.node.attrs, desc.output
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    flipped = bool(attrs.get("transA", 0)), bool(attrs.get("transB", 0))
    rows, inner = a.dims[::-1] if flipped[0] else a.dims
    first: list[PostOp] = []
    constants = desc.constants
    held, known = None, desc.constant(1)
    if known is not None:
        # Shared by all plans, and with it the copies in oneDNN's layouts.
        name = "onednn gemm", flipped[1], alpha
        held = shared(name, lambda: _factor(known, flipped[1], alpha), known)
    elif alpha != 1:
        first.append(PostOp(Eltwise("linear", alpha)))
    if c is not None and beta != 0:
        term = desc.constant(2)
        if term is not None and beta != 1:
            constants = (*constants, np.multiply(term, beta, dtype=FLOAT32))
            first.append(PostOp(binary="add", tensor=len(constants) - 1))
        elif beta == 1:
            first.append(PostOp(binary="add", tensor=desc.inputs[2]))
        else:
            return None
    desc = replace(desc, post_ops=desc.post_ops.behind(first, y.dims, constants))
    weights = None if held is None else held.value
    return replace(product(desc, weights, rows, inner, flipped), held=held)


def _factor(matrix: np.ndarray, flipped: bool, alpha: float) -> np.ndarray:
    matrix = matrix.T if flipped else matrix
    return matrix if alpha == 1 else np.multiply(matrix, alpha, dtype=FLOAT32)


def product(
    desc: OpDesc,
    weights: np.ndarray | None,
    rows: int,
    inner: int,
    flipped: tuple[bool, bool] = (False, False),
) -> PrimitiveSpec:
    """A product of two matrices. The first one, and the result, may have more than two dims, which
    are joined.

    ``weights`` is the second matrix if it is a constant. Those of the two that are ``flipped`` and
    no constants are read transposed.
    """
    y = desc.output
    width = y.dims[-1]
    bias, posts = desc.post_ops.without_bias(-1)
    desc = replace(desc, post_ops=posts)
    first, second = desc.inputs[:2]
    axes = [(1, 0) if each else () for each in flipped]

    def flat(dims: Sequence[int]) -> Sequence[int]:
        return math.prod(dims[:-1]), dims[-1]

    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {}
    tensors = {SRC: first, DST: desc.outputs[0]}
    if weights is not None:
        constants[WEIGHTS] = (weights, weights.shape)
    else:
        tensors[WEIGHTS] = second
    if bias is not None:
        constants[BIAS] = (bias, (1, width))

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        if weights is None or flipped[0]:
            source = context.descriptor(first, (rows, inner), axes[0])
        else:
            source = context.operand(first, (rows, inner))
        if weights is None:
            other = context.descriptor(second, axes=axes[1])
        else:
            other = context.any(weights.shape) if flipped[0] else context.weights(weights.shape)
        return context.primitive(
            context.lib.dnnl_matmul_primitive_desc_create,
            [
                source,
                other,
                context.of(None if bias is None else bias.reshape(1, -1)),
                context.descriptor(desc.outputs[0], (rows, width)),
            ],
            tensors,
            constants,
            view=flat,
        )

    order = tuple(range(len(y.dims)))
    return PrimitiveSpec(desc, create_primitive, order, (first, *posts.tensors), summed=desc.summed)


def batched(desc: OpDesc, rank: int) -> PrimitiveSpec:
    """A batch of products of matrices, with all tensors viewed with ``rank`` dims."""
    first, second = desc.inputs[:2]

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        found = []
        for index in (first, second, desc.outputs[0]):
            type_ = desc.tensors[index]
            assert type_ is not None
            found.append(context.descriptor(index, padded(type_.dims, rank)))
        source, other, target = found
        return context.primitive(
            context.lib.dnnl_matmul_primitive_desc_create,
            [source, other, context.ffi.NULL, target],
            {SRC: first, WEIGHTS: second, DST: desc.outputs[0]},
        )

    any_layout = not desc.post_ops.repeats(desc.tensors)
    return PrimitiveSpec(
        desc, create_primitive, tuple(range(rank)), desc.post_ops.tensors, any_layout=any_layout
    )
