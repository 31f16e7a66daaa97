"""The inputs and outputs of a graph of joined steps.

A restored session needs them to run its plans, without the passes that created the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.records import NamedTuple
from penstock.core.types import Type

WRITTEN = "penstock/"
"""prefix of the names of values that passes create"""
POSITIONS, POOL, RUNS, PAGES, FIXED_RUNS, FIXED_PAGES = (
    f"{WRITTEN}{name}"
    for name in ("positions", "pool", "runs", "pages", "fixed_runs", "fixed_pages")
)
"""inputs of a graph of joined steps, in addition to those with rows"""
READ = f"{WRITTEN}read"
"""the input with the indices of the rows whose outputs are read"""

PAGE = 32
"""number of positions in a page"""


class PagedCache(NamedTuple):
    """Keys or values of a layer: the names of the ``past`` and, if it grows, of the ``present``,
    and the element of a page at which it ``begins``, as [groups, positions, size], or [groups,
    size, positions] for ``keys``.
    """

    past: str
    present: str | None
    groups: int
    size: int
    begins: int
    keys: bool


class JoinedSteps(NamedTuple):
    """The inputs ``rows`` of a decoder with one row per token, with their types, the row axes of
    its ``outputs``, and the ``caches`` in a page of ``page_size`` elements.

    For the decoder of an encoder-decoder, ``fed`` are the inputs that are constant over all steps
    of a sequence, with their types; ``fixed`` are the keys and values of cross attention, which are
    stored in pages without the positions that the input ``mask`` hides, if there is one.

    A sequence has at most ``most`` rows, the number of positions in the constant named
    ``table``."""

    rows: Mapping[str, Type]
    outputs: Mapping[str, int]
    caches: Sequence[PagedCache]
    page_size: int
    fed: Mapping[str, Type]
    fixed: Sequence[PagedCache] = ()
    mask: str | None = None
    most: int | None = None
    table: str = ""
