"""How far the host may be ahead of a device."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.codegen.names import MOST_AHEAD
from tests.support.device_backend import DelayedBackend, Later
from tests.support.expert import with_expert

STEPS = 4 * MOST_AHEAD


class CountingBackend(DelayedBackend):
    """``ahead``: kernels enqueued on the device since the host last waited for one; ``most``: the
    largest such number."""

    def __init__(self) -> None:
        super().__init__(operations=["Neg"], most=0)
        self.ahead = self.furthest = 0

    def kernel(self, node, types):
        kernel = super().kernel(node, types)
        if kernel is None:
            return None

        def run(*inputs, **options):
            self.ahead += 1
            self.furthest = max(self.furthest, self.ahead)
            return kernel.function(*inputs, **options)

        return type(kernel)(run)

    def to_host(self, value: Later) -> np.ndarray:
        self.ahead = 0
        return super().to_host(value)


def looping(n: int, size: int) -> ps.Model:
    b = GraphBuilder()
    b.output("y", b.loop(lambda i, x: b.op("Neg", x), b.input("x", np.float32, [size]), times=n))
    return b.model()


def chain(n: int) -> ps.Model:
    b = GraphBuilder()
    x = b.input("x", np.float32, [2])
    for _ in range(n):
        x = b.op("Neg", x)
    b.output("y", x)
    return b.model()


@pytest.mark.parametrize("size", [2, 1 << 15])
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "auto", "frames"])
def test_host_waits_for_a_device_that_it_is_far_ahead_of(executor, size):
    backend = CountingBackend()
    options = {"backends": [backend, "numpy"], "place": {"Neg": "late"}}
    session = ps.compile(looping(STEPS, size), executor=executor, **with_expert(options))
    x = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(session(x), x)
    assert MOST_AHEAD <= backend.furthest <= (1 + (size > 2)) * MOST_AHEAD


def test_stream_waits_for_a_device_that_it_is_far_ahead_of():
    backend = CountingBackend()
    options = {"backends": [backend, "numpy"], "place": {"Neg": "late"}, "max_streams": 2}
    session = ps.compile(chain(STEPS), executor="streams", **with_expert(options))
    x = np.arange(2, dtype=np.float32)
    np.testing.assert_array_equal(session(x), x)
    assert session.source.count("if not e.query(): yield e") >= STEPS // MOST_AHEAD
