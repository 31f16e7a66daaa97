"""The number of nodes of a model with all calls of its functions expanded, computed in advance.

A *census* of a body counts its nodes, under the key ``None``, and its calls of each function. Names
without a size are not expanded::

    >>> sizes = expanded_sizes({"f": {None: 3}, "g": {None: 2, "f": 4}})
    >>> expanded_size({None: 5, "g": 2, "h": 1}, sizes)
    33
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Census = Mapping[Any, int]


def expanded_size(census: Census, sizes: Mapping[Any, int]) -> int:
    """Return the number of nodes of a body with all calls expanded, given functions' ``sizes``."""
    return sum(count * sizes.get(name, 0) for name, count in census.items())


def expanded_sizes(functions: Mapping[Any, Census]) -> Mapping[Any, int]:
    """Return the size of each function with all calls expanded. Raises ``graphlib.CycleError`` for
    functions that call themselves."""
    from graphlib import TopologicalSorter

    sizes: dict[Any, int] = {None: 1}
    for name in TopologicalSorter(functions).static_order():
        if name in functions:
            sizes[name] = expanded_size(functions[name], sizes)
    return sizes
