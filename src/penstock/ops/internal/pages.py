"""Attention over caches that lie in pages: the rows of many requests, each with its own past.

The pass ``join_steps`` creates this operation. A step computes T rows one behind another: of some
requests one row, of others a piece of their prompt. Keys and values of a request lie in pages, each
with as many positions of all caches of the model::

    pool     [pages, page_size]         one page behind another
    a page   keys of layer 0 | values of layer 0 | keys of layer 1 | ...
    keys     [groups, positions, size]  from element ``keys_at`` of a page on

``runs`` [requests, 4] says for each request its first row, its number of rows, how many positions
come before these, and where its pages begin in ``pages`` [n], the numbers of its pages in order.
New keys and values are written into their places first. A row then sees the positions up to its
own one, of these the last ``window`` if that is not 0. Rows of no request become 0.

Each such node writes to the pool, in places that no other node reads. The contents of the pool are
not part of the graph: whoever feeds ``runs`` owns the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Dims, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.internal.attention import attend

RUN = 4
"""numbers of a request in ``runs``"""


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    q, k, v, pool = [rules.tensor(types, i) for i in range(4)]
    rules.check_shape("runs", rules.tensor(types, 4).shape, (None, RUN))
    rules.check_shape("pages", rules.tensor(types, 5).shape, (None,))
    if q.shape is None or k.shape is None or v.shape is None:
        return (TensorType(q.dtype),)
    rules.check_shape("queries", q.shape, (1, None, None, None))
    _, heads, rows, size = q.shape
    rules.check_shape("keys", k.shape, (1, None, rows, size))
    rules.check_shape("values", v.shape, (1, k.shape[1], rows, None))
    groups, value_size = k.shape[1], v.shape[3]
    known = rules.all_known((heads, size, groups, value_size))
    if known is None:
        raise ShapeError("the numbers of heads and their sizes must be known")
    heads, size, groups, value_size = known
    if heads % groups:
        raise ShapeError(f"{heads} heads are no multiple of {groups} groups of keys")
    rules.check_shape("pool", pool.shape, (None, None))
    page = None if pool.shape is None else pool.shape[1]
    ends = attrs["keys_at"] + groups * attrs["positions"] * size
    ends = max(ends, attrs["values_at"] + groups * attrs["positions"] * value_size)
    if isinstance(page, int) and page < ends:
        raise ShapeError(f"a page of {page} elements has no room for keys and values up to {ends}")
    return (TensorType(q.dtype, (*q.shape[:-1], value_size)),)


def _compile(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    positions, window = attrs["positions"], attrs.get("window", 0)
    scaled = {"scale": attrs["scale"], "softcap": attrs.get("softcap", 0.0)}

    def function(
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        pool: np.ndarray,
        runs: np.ndarray,
        pages: np.ndarray,
    ) -> np.ndarray:
        groups, size, value_size = k.shape[1], k.shape[3], v.shape[3]
        y = np.zeros((*q.shape[:-1], value_size), q.dtype)
        check_runs(runs, pages, q.shape[2], len(pool), positions)
        for first, rows, past, begin in runs.tolist():
            total = past + rows
            own = pages[begin : begin - (-total // positions)]
            at = np.arange(past, total)
            caches = []
            for new, place, n in ((k, attrs["keys_at"], size), (v, attrs["values_at"], value_size)):
                cache = pool[:, place : place + groups * positions * n]
                cache = cache.reshape(-1, groups, positions, n)
                rows_of_it = new[0, :, first : first + rows].swapaxes(0, 1)
                cache[own[at // positions], :, at % positions] = rows_of_it
                read = cache[own].swapaxes(0, 1).reshape(groups, -1, n)
                caches.append(read[None, :, :total])
            seen = np.arange(total)
            hidden = seen > at[:, None]
            if window:
                hidden |= seen <= at[:, None] - window
            bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
            part = q[:, :, first : first + rows]
            y[:, :, first : first + rows] = attend(scaled, part, caches[0], caches[1], [bias])
        return y

    return Kernel(function)


def check_runs(
    runs: np.ndarray, pages: np.ndarray, rows: int, page_count: int, positions: int
) -> None:
    """Raise ``ValueError`` where requests have rows or pages that are not there."""
    first, count, past, begin = runs.T
    if (runs < 0).any() or (first + count > rows).any():
        raise ValueError("a request has rows that are not there")
    if (begin - (-(past + count) // positions) > len(pages)).any():
        raise ValueError("a request has fewer pages than positions need")
    if (pages < 0).any() or (pages >= page_count).any():
        raise ValueError(f"a page is none of the {page_count} of the pool")


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    # How long the pasts are is not known: as many positions as a page has.
    q = inputs[0]
    assert q is not None
    return 2 * output[1] * output[2] * attrs["positions"] * (q[3] + output[3])


PAGED_ATTENTION = Op("PagedAttention", "penstock", 1, 1, _infer, _compile, work=_work)
"""Attention of T rows, queries [1, heads, T, size], keys [1, groups, T, size] and values
[1, groups, T, value_size], over the positions of their requests. Attributes: ``scale``; ``softcap``
and ``window``, 0 for none; ``positions`` of a page; ``keys_at`` and ``values_at``."""
