"""Sums in one order: kernels of ``reproducible=True`` give a row the same bits among any others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder, SymbolicValue
from tests.support.native_kernels import needs_reproducible

pytestmark = needs_reproducible

Make: TypeAlias = "Callable[[GraphBuilder, SymbolicValue], SymbolicValue]"
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)


def numbers(*dims: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(dims).standard_normal(dims).astype(dtype)


def check(
    make: Make, dims: tuple[int, ...], dtype: str = "float32", axis: int = 0, out: int = 0
) -> None:
    """The last row of a batch is the same in batches of all sizes."""
    builder = GraphBuilder()
    shape: list[Any] = [*dims]
    shape.insert(axis, "N")
    builder.output("y", make(builder, builder.input("x", dtype, shape)))
    session = ps.compile(builder.model(), cache=False, reproducible=True)
    shape[axis] = max(SIZES)
    x = numbers(*shape, dtype=dtype)
    wanted = None
    for size in SIZES:
        some = x.take(range(max(SIZES) - size, max(SIZES)), axis)
        found = session.run({"x": some})["y"].take(-1, out).tobytes()
        wanted = wanted or found
        assert found == wanted, size


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("inner", [1, 7, 64, 300])
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 16, 20, 100])
def test_product_with_a_constant(dtype, inner, columns):
    w = numbers(inner, columns, dtype=dtype)
    check(lambda b, x: x @ w, (inner,), dtype)
    transposed, bias = w.T.copy(), numbers(columns, dtype=dtype)
    check(lambda b, x: b.op("Gemm", x, transposed, bias, transB=1), (inner,), dtype)


@pytest.mark.parametrize("rows", [1, 5, 24])
@pytest.mark.parametrize("width", [4, 37])
def test_product_of_two_inputs(rows, width):
    check(lambda b, x: x @ b.op("Transpose", x, perm=[0, 2, 1]), (rows, width))

    def attention(b: GraphBuilder, x: SymbolicValue) -> SymbolicValue:
        return b.op("Softmax", x @ b.op("Transpose", x, perm=[0, 2, 1]), axis=-1) @ x

    check(attention, (rows, width))


@pytest.mark.parametrize(("name", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("hidden", [8, 32])
def test_recurrent_layer(name, gates, hidden):
    w, r = numbers(1, gates * hidden, 10), numbers(1, gates * hidden, hidden)
    outputs = 3 if name == "LSTM" else 2
    layer = {"hidden_size": hidden, "outputs": outputs}
    check(lambda b, x: b.op(name, x, w, r, **layer)[0], (6, 10), axis=1, out=2)


IMAGES = [(3, 8, (16, 16)), (16, 20, (9, 7)), (4, 4, (30,)), (2, 3, (5, 6, 7)), (32, 1, (8, 8))]
IMAGES += [(24, 1, (60, 60)), (1, 16, (40, 40)), (12, 12, (33, 50))]


@pytest.mark.parametrize(("channels", "filters", "sizes"), IMAGES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_windows(channels, filters, sizes, stride):
    n = len(sizes)
    steps, around = [stride] * n, [1] * 2 * n
    weights = [numbers(filters, channels, *[k] * n) for k in (1, 3)]
    back, own = numbers(channels, filters, *[3] * n), numbers(channels, 1, *[3] * n)
    image = (channels, *sizes)
    check(lambda b, x: b.op("Conv", x, weights[0], strides=steps), image)
    check(lambda b, x: b.op("Conv", x, weights[1], strides=steps, pads=around), image)
    check(lambda b, x: b.op("Conv", x, own, strides=steps, group=channels), image)
    check(lambda b, x: b.op("ConvTranspose", x, back, strides=steps), image)
    for pool in ("AveragePool", "LpPool"):
        check(lambda b, x, p=pool: b.op(p, x, kernel_shape=[3] * n, strides=steps), image)


@pytest.mark.parametrize("channels", [64, 300])
@pytest.mark.parametrize("size", [7, 12, 33])
@pytest.mark.parametrize("dilation", [1, 5])
def test_bias_of_taps_that_see_only_padding(channels, size, dilation):
    """Which taps these are for all rows of an item depends on the other rows."""
    w, bias = numbers(16, channels, 3, 3), numbers(16)
    attrs = {"dilations": [dilation] * 2, "pads": [dilation] * 4}
    check(lambda b, x: b.op("Conv", x, w, bias, **attrs), (channels, size, size))


@pytest.mark.parametrize("channels", [9, 40])
@pytest.mark.parametrize("size", [3, 30, 130])
@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("dilation", [1, 2])
def test_taps_of_depthwise_convolutions(channels, size, kernel, dilation):
    w = numbers(channels, 1, kernel, kernel)
    attrs = {"dilations": [dilation] * 2, "pads": [dilation * (kernel // 2)] * 4}
    check(lambda b, x: b.op("Conv", x, w, group=channels, **attrs), (channels, 5, size))


@pytest.mark.parametrize("sizes", [(7,), (24, 24)], ids=str)
def test_narrow_groups_have_the_same_bits_in_any_layout(sizes):
    n = len(sizes)
    x = numbers(2, 8, *sizes)
    for kernel in (1, 3):
        b = GraphBuilder()
        image = b.input("x", "float32", ["N", 8, *sizes])
        b.output("y", b.op("Conv", image, numbers(16, 2, *[kernel] * n), numbers(16), group=4))
        # Of these, some copy the image with its channels innermost, and others read it as it is.
        model, executors = b.model(), ("linear", "dataflow", "parallel", "streams")
        sessions = [ps.compile(model, executor=e, reproducible=True) for e in executors]
        rows = [session(x[i:])[-1].tobytes() for session in sessions for i in range(2)]
        assert len({*rows}) == 1, kernel


@pytest.mark.parametrize(("dims", "axis"), [((24, 64), 1), ((24, 64), 2), ((3, 1000), 2)], ids=str)
def test_sums_along_an_axis(dims, axis):
    axes = np.array([axis])
    for name in ("ReduceMean", "ReduceL2", "ReduceLogSumExp", "ReduceProd", "ReduceSumSquare"):
        check(lambda b, x, n=name: b.op(n, x, axes, keepdims=0), dims)
    check(lambda b, x: b.op("Softmax", x, axis=axis), dims)
    scale = numbers(dims[-1])
    check(lambda b, x: b.op("LayerNormalization", x, scale, axis=-1), dims)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [32, 40])
@pytest.mark.parametrize("zeros", [False, True])
def test_product_with_weights_in_blocks(bits, columns, zeros):
    rng = np.random.default_rng(0)
    blocks, block = 4, 32
    codes = rng.integers(0, 256, (columns, blocks, block * bits // 8), dtype=np.uint8)
    given = [codes, np.abs(numbers(columns * blocks))]
    if zeros:
        given.append(rng.integers(0, 256, columns * (blocks * bits // 8), dtype=np.uint8))
    attrs = {"K": blocks * block, "N": columns, "bits": bits, "block_size": block}
    check(
        lambda b, x: b.op("MatMulNBits", x, *given, domain="com.microsoft", **attrs),
        (blocks * block,),
    )
