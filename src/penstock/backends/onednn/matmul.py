"""MatMul and Gemm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.backends.onednn.kernel import Made, Maker, Recipe
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS
from penstock.backends.onednn.strides import padded
from penstock.backends.onednn.work import Work


def matmul(work: Work) -> Recipe | None:
    """MatMul of tensors of rank 2 or more; dims of 1 are repeated."""
    a, b = work.input(0), work.input(1)
    if a is None or b is None or not 2 <= len(a.dims) <= 6 or not 2 <= len(b.dims) <= 6:
        return None
    weights = work.constant(1)
    if len(b.dims) == 2:
        return product(work, weights, math.prod(a.dims[:-1]))
    return _batched(work, max(len(a.dims), len(b.dims)))


def product(work: Work, weights: np.ndarray | None, rows: int) -> Recipe:
    """A product of two matrices, of which the first, and the result, may be seen as having more
    dims than two. ``weights`` is the second, where it is known."""
    y = work.output
    width = y.dims[-1]
    bias, posts = work.posts.without_bias(-1)
    work = replace(work, posts=posts)
    first, second = work.inputs[:2]
    a = work.tensors[first]
    assert a is not None
    inner = a.dims[-1]

    def flat(dims: Sequence[int]) -> Sequence[int]:
        return math.prod(dims[:-1]), dims[-1]

    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {}
    tensors = {SRC: first, DST: work.outputs[0]}
    if weights is not None:
        constants[WEIGHTS] = (weights, weights.shape)
    else:
        tensors[WEIGHTS] = second
    if bias is not None:
        constants[BIAS] = (bias, (1, width))

    def make(maker: Maker) -> Made:
        return maker.primitive(
            maker.lib.dnnl_matmul_primitive_desc_create,
            [
                maker.descriptor(first, (rows, inner)),
                maker.descriptor(second) if weights is None else maker.any(weights.shape),
                maker.of(None if bias is None else bias.reshape(1, -1)),
                maker.descriptor(work.outputs[0], (rows, width)),
            ],
            tensors,
            constants,
            view=flat,
        )

    order = tuple(range(len(y.dims)))
    return Recipe(work, make, order, (first, *posts.tensors), summed=posts.summed)


def _batched(work: Work, rank: int) -> Recipe:
    first, second = work.inputs[:2]

    def make(maker: Maker) -> Made:
        found = []
        for index in (first, second, work.outputs[0]):
            kind = work.tensors[index]
            assert kind is not None
            found.append(maker.descriptor(index, padded(kind.dims, rank)))
        source, other, target = found
        return maker.primitive(
            maker.lib.dnnl_matmul_primitive_desc_create,
            [source, other, maker.ffi.NULL, target],
            {SRC: first, WEIGHTS: second, DST: work.outputs[0]},
        )

    return Recipe(work, make, tuple(range(rank)), work.posts.tensors, free=True)
