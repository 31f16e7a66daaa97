"""Cost models for ``ExpertOptions(cost_model=...)``, with which tests decide where and how nodes run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from penstock.backends.base import Backend
from penstock.ir.graph import Node
from penstock.tuning.measure import CostModel


class PreferredBackendCosts(CostModel):
    """Every node is a thousand times cheaper on one backend: it runs there if it can."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def expected(self, node: Node, among: Sequence[Backend]) -> list[float]:
        return [self.seconds(node, backend, single_threaded=False) for backend in among]

    def seconds(self, node: Node, backend: Backend, *, single_threaded: bool) -> float:
        return 1e-6 if backend.name == self.name else 1e-3


class EqualCosts(CostModel):
    """Every node takes a millisecond on every backend, and so is worth a worker."""

    def estimate(self, node: Node) -> float:
        return 1e-3

    def seconds(self, node: Node, backend: Backend, *, single_threaded: bool) -> float:
        return 1e-3


class ScatteredCosts(CostModel):
    """Costs that follow from the names of nodes and backends, and spread nodes over backends."""

    def seconds(self, node: Node, backend: Backend, *, single_threaded: bool) -> float:
        return 1e-6 * (1 + zlib.crc32(f"{node.label} {backend.name}".encode()) % 100)

    def transfer(self, source: str, target: str, nbytes: int) -> float:
        return 1e-6
