"""The inputs and outputs of a graph of joined steps: all that its callers need to know.

A session that is restored runs plans without any of the passes that have made the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.records import NamedTuple
from penstock.core.types import Type

WRITTEN = "penstock/"
"""begins the names of values that passes write"""
POSITIONS, POOL, RUNS, PAGES, FIXED_RUNS, FIXED_PAGES = (
    f"{WRITTEN}{name}"
    for name in ("positions", "pool", "runs", "pages", "fixed_runs", "fixed_pages")
)
"""inputs of a graph of joined steps, beside those of rows"""
READ = f"{WRITTEN}read"
"""the input that says which rows are read"""

PAGE = 32
"""positions of a page"""


class PagedCache(NamedTuple):
    """Keys or values of a layer: the names of the ``past`` and the ``present``, if it grows, and
    where it ``begins`` in a page, [groups, positions, size], or [groups, size, positions] if these
    are ``keys``."""

    past: str
    present: str | None
    groups: int
    size: int
    begins: int
    keys: bool


class JoinedSteps(NamedTuple):
    """The inputs of a decoder that have ``rows`` for each token, with their types, the axes of rows
    of its ``outputs``, and the ``caches`` in a page of ``page_size`` elements.

    Of the decoder of an encoder-decoder, ``fed`` are the inputs that stay as they are in all steps
    of a sequence, with their types; ``fixed`` those that lie in pages, keys and values of cross
    attention, without the positions that are absent in the ``mask`` of that name, if there is
    one.

    A sequence has ``most`` rows, which the ``table`` of that name has positions for."""

    rows: Mapping[str, Type]
    outputs: Mapping[str, int]
    caches: Sequence[PagedCache]
    page_size: int
    fed: Mapping[str, Type]
    fixed: Sequence[PagedCache] = ()
    mask: str | None = None
    most: int | None = None
    table: str = ""
