"""Caches that grow, in place of caches of a fixed size that keep a window.

Exporters set ``sliding_window_cache`` of GroupQueryAttention for layers that attend to a window.
The program then allocates a cache of at least the window, and the operation moves its contents when
it is full. Results are those of a cache that grows, which pages can store.
"""

from __future__ import annotations

from penstock.core.records import replace
from penstock.ir.graph import Model, clone

_ATTRIBUTE = "sliding_window_cache"


def with_grown_caches(model: Model) -> Model:
    """Return the model, or a copy whose attention over windows has caches that grow."""
    if not any(node.attrs.get(_ATTRIBUTE) for node in model.graph.walk()):
        return model
    graph = clone(model.graph)
    for node in graph.walk():
        node.attrs = {name: x for name, x in node.attrs.items() if name != _ATTRIBUTE}
    return replace(model, graphs={**model.graphs, model.entry: graph})
