"""Padded batches: find the inputs that are masks, and leave out the rows that they hide.

A batch of texts of unequal lengths has rows that are only padding. If a mask hides enough of them,
a run uses another plan of the same graph, without these rows (``passes.lowering.pack_rows``)::

    ids, mask [32, 109]    1,245 of 3,488 rows matter       a plan for packed rows
    ids, mask [1, 60]      all rows matter                  the usual plan

The fed values alone decide which plan is used, so that equal feeds always use the same plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import numpy as np

from penstock.compiler.subgraph import Subgraph
from penstock.core.errors import RowsStay
from penstock.core.types import RunValues
from penstock.ops.internal.packed import LOWEST

if TYPE_CHECKING:
    from penstock.compiler.compiler import Compiler

_MOST_LIVE = 0.9
"""the largest part of rows that matter for which packing pays off, since it takes time itself"""
_TRIES = 3


class PackedSubgraph(Subgraph):
    """``base`` without the rows that a mask hides. For ``packs`` see ``Subgraph``."""

    def __init__(self, base: Subgraph, packs: str) -> None:
        super().__init__(base.graph, base.outputs, base.unraised)
        # Weak: the base holds its variants, and subgraphs are freed with their last reference.
        self._base = ref(base)
        self.packs = packs
        self.varying.fixed = True  # an unknown number of rows cannot be distinguished from samples
        self._tries = _TRIES
        self.stays: set[tuple[Hashable, ...]] = set()
        """keys of batches that are computed with all rows, for lack of memory"""
        # Keys of batches whose padded plans fit into memory, and the bytes that runs of these need.
        self._fitting: dict[tuple[Hashable, ...], int] = {}

    @property
    def base(self) -> Subgraph | None:
        return self._base()

    def fits(self, key: tuple[Hashable, ...], nbytes: int) -> None:
        """Record that the padded plan of a batch fits into the memory of the session."""
        if not self.depends_on_dtypes:
            others = self._fitting.items()
            self._fitting = {k: n for k, n in others if not _is_within(k, key)} | {key: nbytes}

    def most_bytes(self, key: tuple[Hashable, ...]) -> int:
        """Return the bytes of runs of a known padded plan for a batch that is no smaller in any
        dim, or 0 if none is known."""
        sizes = [nbytes for other, nbytes in self._fitting.items() if _is_within(key, other)]
        return min(sizes, default=0)

    def refuse(self, reason: RowsStay) -> Subgraph:
        """Return the base instead of this subgraph, which cannot run; after some tries, always."""
        base = self.base
        assert base is not None  # the executor that runs this subgraph holds it
        self._tries -= 1  # some dims, such as a single row, may fail where others succeed
        if not self._tries:
            base.not_packed = str(reason)  # its traceback would keep the graph
        return base


def unpadded(subgraph: Subgraph, values: RunValues, packs: str) -> Subgraph | None:
    """Return the variant of ``subgraph`` for these values if one of their masks hides rows."""
    if not any(_hides(values[i], subgraph.least_mask) for i in subgraph.masks):
        return None
    variant = subgraph.variants.get(packs)
    return variant or subgraph.variants.setdefault(packs, PackedSubgraph(subgraph, packs))


def rows_text(compiler: Compiler, subgraph: Subgraph, values: RunValues, packs: str) -> str:
    """Say for reports whether rows that a mask hides are left out, in batches of the shapes of
    ``values``; if not, name the node that prevents it."""
    masks = subgraph.masks
    names = " and ".join([repr(subgraph.names[i]) for i in masks])
    if not packs or not masks:
        return "no rows are left out: " + (
            "no input is a mask" if packs else "nodes run as they are"
        )
    why = subgraph.not_packed
    if not why:
        try:
            compiler.compile(PackedSubgraph(subgraph, packs), values)
        except RowsStay as reason:
            why = str(reason)
    if why:
        return f"rows that {names} hides are computed: {why}"
    return f"rows that {names} hides are left out, where these are a tenth at least"


def check_batch(compiler: Compiler, subgraph: Subgraph, values: RunValues) -> None:
    """Raise ``RowsStay`` unless it is proven, for batches of the shapes of ``values``, that hidden
    rows affect no other rows, that samples affect no other samples, and that a sample padded with
    zeros at its end gets the same results as alone."""
    from penstock.compiler.lowering import pass_context
    from penstock.passes.lowering.apart import ProveApart
    from penstock.passes.pipeline import before_attention, run_passes

    graph = compiler.specialized(subgraph, values)
    run_passes((*before_attention(), ProveApart()), graph, pass_context(compiler.context))


def _is_within(key: Sequence[Hashable], other: Sequence[Hashable]) -> bool:
    """Whether no dim of the shapes of a key is larger than the same dim of another key."""
    for a, b in zip(key, other, strict=True):
        if not isinstance(a, tuple) or not isinstance(b, tuple) or len(a) != len(b):
            return False
        if any(n > m for n, m in zip(a, b, strict=True)):
            return False
    return True


def _hides(mask: object, least: int) -> bool:
    """Whether a feed of at least ``least`` elements may be a mask that hides some rows, not all."""
    if not isinstance(mask, np.ndarray) or mask.size < least:
        return False
    most = _MOST_LIVE * mask.size if least else mask.size - 1
    if mask.dtype.kind == "f" and (hidden := int((mask <= LOWEST).sum())):  # a bias of scores
        return mask.size - hidden <= most
    return 0 < int(np.count_nonzero(mask)) <= most
