"""Costs for ``reproducible=True``: the same for all shapes and on all machines."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from penstock.backends.base import Backend
from penstock.backends.specializing import estimates
from penstock.ir.graph import Node
from penstock.tuning.measure import Cost

_SECONDS = 1e-6


class FixedCosts:
    """Each backend is slower than those before it, and all nodes take the same on it, so that where
    nodes run, and what is fused, depends on neither shapes nor measurements."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._seconds = {backend.name: _SECONDS * 1000**i for i, backend in enumerate(backends)}

    def cost(self, node: Node, backend: Backend, threads: int | None = None) -> Cost:
        """The seconds of a node, infinite where there is no kernel."""
        (estimate,) = estimates([backend], node)
        return Cost(self._seconds[backend.name] if estimate < inf else inf)
