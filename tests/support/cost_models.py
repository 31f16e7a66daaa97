"""Cost models for ``ExpertOptions(cost_model=...)``, with which tests decide where and how nodes run."""

from __future__ import annotations

import zlib

from penstock.backends.base import Backend
from penstock.ir.graph import Node
from penstock.tuning.measure import Cost


class PreferredBackendCosts:
    """Every node is a thousand times cheaper on one backend: it runs there if it can."""

    def __init__(self, name: str) -> None:
        self.name = name

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        return Cost(1e-6 if backend.name == self.name else 1e-3)


class EqualCosts:
    """Every node takes a millisecond on every backend, and so is worth a worker."""

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        return Cost(1e-3)


class ScatteredCosts:
    """Costs that follow from the names of nodes and backends, and spread nodes over backends."""

    def cost(self, node: Node, backend: Backend, threads: int | None) -> Cost:
        return Cost(1e-6 * (1 + zlib.crc32(f"{node.label} {backend.name}".encode()) % 100))

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        return 1e-6
