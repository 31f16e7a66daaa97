"""What a call of a compiled kernel costs: ``python -m bench.native_calls``.

Nanoseconds of CumSum over [2, 2], the least of 15 turns of 100,000 calls: with all arrays bound,
with two given late, and with a new result; beside a ufunc of NumPy's into a given array.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tests.support.native_kernels import LIBRARIES, kernel_of, node_of

CALLS, TURNS = 100_000, 15


def nanoseconds(function: Callable[..., Any], *arguments: Any) -> float:
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for _ in range(CALLS):
            function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times) / CALLS * 1e9


def main() -> None:
    x, axis = np.ones((2, 2), np.float32), np.array(1)
    y = np.empty_like(x)
    kernel = kernel_of(node_of("CumSum", [x, axis], [1]), LIBRARIES[0])
    assert kernel is not None
    bound, none = kernel.bind([x, axis], [y], None)
    late, _ = kernel.bind(["x", axis], ["y"], None)
    assert none == ()
    print(f"{LIBRARIES[0].level}, numpy {np.__version__}")
    print(f"all arrays bound   {nanoseconds(bound):6.0f} ns")
    print(f"two arrays late    {nanoseconds(late, x, y):6.0f} ns")
    print(f"a new result       {nanoseconds(kernel.function, x, axis):6.0f} ns")
    print(f"np.add(x, x, y)    {nanoseconds(np.add, x, x, y):6.0f} ns")


if __name__ == "__main__":
    main()
