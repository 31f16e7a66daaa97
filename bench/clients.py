"""Throughput: several client threads, one session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def throughput(run: Callable[[], Any], clients: int, seconds: float) -> float:
    """Runs a second of ``clients`` threads together, each of which calls ``run`` in turn.

    All begin together; each stops counting with the first run that ends after ``seconds``.
    """
    together = threading.Barrier(clients)

    def client() -> float:
        together.wait()
        begin = now = time.perf_counter()
        runs = 0
        while now - begin < seconds:
            run()
            runs += 1
            now = time.perf_counter()
        return runs / (now - begin)

    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(lambda _: client(), range(clients)))
