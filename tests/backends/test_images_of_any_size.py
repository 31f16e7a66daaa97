"""Networks of images whose sizes are known only during a run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.build import GraphBuilder
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.registry import standard

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


def images_of(sizes: list[tuple[int, int]], channels: int = 16) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for height, width in sizes:
        yield rng.standard_normal((1, channels, height, width)).astype(np.float32)


def gated_network() -> ps.Model:
    """Depthwise and other convolutions, a gate of each channel, a sum, and a result of each."""
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    x = b.input("x", np.float32, [1, 16, "height", "width"])
    wide, narrow, deep = (
        rng.standard_normal(dims).astype(np.float32) / 8
        for dims in ((32, 16, 1, 1), (16, 32, 3, 3), (32, 1, 3, 3))
    )
    y = b.op("Relu", b.op("Conv", x, wide))
    y = b.op("HardSwish", b.op("Conv", y, deep, group=32, pads=[1] * 4))
    b.output("gated", b.op("Mul", y, b.op("Sigmoid", b.op("GlobalAveragePool", y))))
    z = b.op("Conv", b.op("Mul", y, np.float32(0.5)), narrow, pads=[1] * 4, strides=[2, 2])
    b.output("halved", z)
    b.output("sum", b.op("Add", b.op("Resize", z, None, np.array([1, 1, 2, 2], np.float32)), x))
    b.output("turned", b.op("Transpose", z, perm=[0, 2, 3, 1]))
    return b.model()


@pytest.mark.parametrize("threads", [1, 2])
def test_images_of_many_sizes_stay_in_the_order_that_convolutions_write(threads):
    model = gated_network()
    sizes = [(24 + 2 * i, 40 - 2 * (i % 7)) for i in range(20)]
    with ps.compile(model, threads=threads, cache=False) as session:
        plain = ps.compile(model, backends=["numpy"], cache=False)
        for x in images_of(sizes):
            for name, wanted in plain.run({"x": x}).items():
                found = session.run({"x": x})[name]
                np.testing.assert_allclose(found, wanted, atol=1e-4)
                assert found.flags.c_contiguous, name  # as of all plans


@pytest.mark.parametrize("dims", [(2, 3, 5, 7), (1, 16, 1, 9), (2, 4, 6), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("name", ["Relu", "Add"])
def test_elementwise_results_have_the_order_of_images_with_channels_last(name, dims):
    rank = len(dims)
    open_type = TensorType(FLOAT32, (None,) * rank)
    values = [Value("x", open_type), Value("gate", open_type)][: 1 if name == "Relu" else 2]
    node = Node(standard(name), values, [Value("y", open_type)])
    kernel = NativeBackend().kernel(node, [value.type for value in values])
    rng = np.random.default_rng(1)
    inside = rng.standard_normal((dims[0], *dims[2:], dims[1])).astype(np.float32)
    x = np.moveaxis(inside, -1, 1)
    gate = rng.standard_normal((dims[0], dims[1], *[1] * (rank - 2))).astype(np.float32)
    found = kernel.function(*[x, gate][: len(values)])
    np.testing.assert_array_equal(found, np.maximum(x, 0) if name == "Relu" else x + gate)
    assert np.moveaxis(found, 1, -1).flags.c_contiguous
