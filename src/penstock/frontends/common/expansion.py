"""The nodes of a model once the calls of its functions are expanded, counted before any are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Census(Generic[Name]):
    """The number of nodes of a body, and how often they call each function."""

    nodes: int
    calls: Mapping[Name, int]

    def expanded(self, sizes: Mapping[Name, int]) -> int:
        """The number of nodes with all calls expanded, for functions of these ``sizes``; functions
        without a size are not expanded."""
        return self.nodes + sum(n * sizes.get(name, 0) for name, n in self.calls.items())


def expanded_sizes(functions: Mapping[Name, Census[Name]]) -> dict[Name, int]:
    """The size of each function with all calls expanded; none may call itself."""
    sizes: dict[Name, int] = {}
    for name in TopologicalSorter({k: c.calls for k, c in functions.items()}).static_order():
        if name in functions:
            sizes[name] = functions[name].expanded(sizes)
    return sizes
