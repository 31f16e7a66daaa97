"""Loops on two devices, and loops that wait, on the frames executor: ``python -m bench.devices``.

What TensorFlow 2.21 takes for the same graphs, on two cores, stands beside each figure.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from tests.support.tf_graphs import Builder
from tests.support.tf_loops import INT, Names, add, const, counting, enter, while_loop

import penstock as ps
from bench.frames_trial import Clock
from penstock.backends.numpy import NumpyBackend
from penstock.ops import Kernel, asynchronous

ITERATIONS = 1000
TURNS = 7
WAITS = 64
WAIT_S = 5e-3

# What TensorFlow takes: microseconds of an iteration; milliseconds, by parallel_iterations.
TWO_DEVICES_US = 8.0
WAITING_MS = {1: 331, 2: 166, 4: 84, 8: 43, 16: 23, 32: 22}


def two_devices() -> tuple[bytes, str]:
    """``while i < n: i = i + 1``, where the sum is on another device than the rest; what to fetch.
    Its input is ``n``, an int32."""
    b = Builder()
    limit = enter(b, "while", b.placeholder("n", "int32"), 10, True)

    def body(values: Names) -> Names:
        names = [const(b, 1, values[0])]
        names.append(add(b, values[0], names[0]))
        elsewhere.update(names)
        return names[1:]

    elsewhere: set[str] = set()
    zero = b.const(np.int32(0))
    (ended,) = while_loop(
        b, "while", [zero], lambda values: b.node("Less", values[0], limit, T=INT), body
    )
    for node in b.proto.node:
        node.device = f"/device:CPU:{int(node.name in elsewhere)}"
    return b.bytes(), ended


def waiting(parallel: int) -> tuple[bytes, str]:
    """A loop of ``n`` iterations, each with one Neg that nothing in the next one waits for but a
    sum; what to fetch."""
    b = Builder()
    total = counting(b, b.placeholder("n", "int32"), parallel)
    return b.bytes(), total


def two_devices_us() -> float:
    """Microseconds of an iteration on two devices."""
    source, fetch = two_devices()
    session = ps.compile(source, executor="frames", backends=["numpy"], devices=2)
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        session.run({"n": np.int32(ITERATIONS)}, [fetch])
        times.append(time.perf_counter() - start)
    return statistics.median(times) / ITERATIONS * 1e6


def waiting_ms(parallel: int) -> float:
    """Milliseconds of a loop of 64 iterations that wait for 5 ms, ``parallel`` of them at once."""
    source, fetch = waiting(parallel)
    clock = Clock()

    class Waiting(NumpyBackend):
        def kernel(self, node, types) -> Kernel:
            if node.op.name != "Neg":
                return super().kernel(node, types)
            return asynchronous(lambda done, x: clock.call(WAIT_S, lambda: done(-x)))

    session = ps.compile(source, executor="frames", backends=[Waiting()])
    times = []
    for _ in range(3):
        start = time.perf_counter()
        outputs = session.run({"n": np.int32(WAITS)}, [fetch])
        times.append(time.perf_counter() - start)
        assert outputs[fetch] == WAITS * (WAITS - 1) // 2
    return statistics.median(times) * 1e3


def main() -> None:
    us = two_devices_us()
    ratio = us / TWO_DEVICES_US
    print(f"an iteration on two devices: {us:.1f} us, TensorFlow {TWO_DEVICES_US}: {ratio:.2f}")
    for parallel, theirs in WAITING_MS.items():
        ms = waiting_ms(parallel)
        ratio = ms / theirs
        print(f"{WAITS} waits, {parallel:2} at once: {ms:.1f} ms, TensorFlow {theirs}: {ratio:.2f}")


if __name__ == "__main__":
    main()
