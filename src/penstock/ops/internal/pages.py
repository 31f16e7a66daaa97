"""Attention over paged caches: the rows of many requests, each with its own past.

The pass ``join_steps`` creates this operation. A step computes T concatenated rows: one row each of
some requests, part of the prompt of others. Keys and values of a request are stored in pages, each
with the same number of positions of all caches of the model::

    pool     [pages, page_size]         all pages in order
    a page   keys of layer 0 | values of layer 0 | keys of layer 1 | ...
    keys     [groups, size, positions]  from element ``keys_at`` of a page on
    values   [groups, positions, size]  from ``values_at`` on

Each feature of the keys of a page is contiguous over its positions, so that scores are computed as
vectors.

``runs`` [requests, 4] has for each request its first row, its number of rows, its number of past
positions, and the index of its first page in ``pages`` [n], which lists the pages of each request
in order. New keys and values are written to the pages first. A row then attends to the positions up
to its own, or to the last ``window`` of these if that is not 0. Rows of no request become 0.

Without new keys and values, as in cross attention, a row attends to all past positions, and nothing
is written.

Models may add biases to the scores of a head that depend only on the distance. ``by_distance``
[heads, n + 1] has them for distances 0 to n - 1, and in its last column the increment for each
further position::

    slopes of ALiBi            [[0, -0.25], [0, -0.0625], ...]
    buckets of distances       [[b0, b1, ..., b127, 0], ...]

Each node writes to parts of the pool that no other node reads. The contents of the pool are not
part of the graph: the caller that feeds ``runs`` owns the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import Dim, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Dims, Op, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.internal.attention import attend

RUN = 4
"""columns of ``runs``"""
BY_DISTANCE = 6
"""the index of the input ``by_distance``"""


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    q, pool = rules.tensor(types, 0), rules.tensor(types, 3)
    if attrs["positions"] < 1 or min(attrs["keys_at"], attrs["values_at"]) < 0:
        raise ShapeError("positions must be at least 1, and keys_at and values_at not negative")
    rules.check_shape("runs", rules.tensor(types, 4).shape, (None, RUN))
    rules.check_shape("pages", rules.tensor(types, 5).shape, (None,))
    if q.shape is None:
        return (TensorType(q.dtype),)
    rules.check_shape("queries", q.shape, (1, None, None, None))
    sizes = _sizes(types, q.shape, attrs)
    if sizes is None:
        return (TensorType(q.dtype),)
    groups, value_size = sizes
    _, heads, _, size = q.shape
    known = rules.all_known((heads, size, groups, value_size))
    if known is None:
        raise ShapeError("the numbers of heads and the head sizes must be known")
    heads, size, groups, value_size = known
    if not groups or heads % groups:
        raise ShapeError(f"{heads} query heads must be a multiple of {groups} key/value heads")
    rules.check_shape("pool", pool.shape, (None, None))
    page = None if pool.shape is None else pool.shape[1]
    ends = attrs["keys_at"] + groups * attrs["positions"] * size
    ends = max(ends, attrs["values_at"] + groups * attrs["positions"] * value_size)
    if isinstance(page, int) and page < ends:
        raise ShapeError(f"pages have {page} elements, but keys and values end at element {ends}")
    if len(types) > BY_DISTANCE and types[BY_DISTANCE] is not None:
        _check_distances(rules.tensor(types, BY_DISTANCE).shape, heads)
        if types[1] is None:
            raise ShapeError("by_distance requires new keys")
    return (TensorType(q.dtype, (*q.shape[:-1], value_size)),)


def _sizes(types: Types, q: Shape, attrs: Attrs) -> tuple[Dim, Dim] | None:
    """The number of key/value heads and the head size of values; None if unknown."""
    if types[1] is None and types[2] is None:
        return attrs["groups"], attrs["value_size"]
    k, v = rules.tensor(types, 1), rules.tensor(types, 2)
    if k.shape is None or v.shape is None:
        return None
    rules.check_shape("keys", k.shape, (1, None, q[2], q[3]))
    rules.check_shape("values", v.shape, (1, k.shape[1], q[2], None))
    return k.shape[1], v.shape[3]


def _check_distances(shape: Shape | None, heads: int) -> None:
    rules.check_shape("by_distance", shape, (heads, None))
    columns = None if shape is None else shape[1]
    if isinstance(columns, int) and columns < 2:
        raise ShapeError(f"by_distance must have at least two columns, not {columns}")


def _compile(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    positions, window = attrs["positions"], attrs.get("window", 0)
    scaled = {"scale": attrs["scale"], "softcap": attrs.get("softcap", 0.0)}

    def function(
        q: np.ndarray,
        k: np.ndarray | None,
        v: np.ndarray | None,
        pool: np.ndarray,
        *tables: np.ndarray,
    ) -> np.ndarray:
        runs, pages, *more = tables
        by_distance = more[0] if more else None
        if k is None or v is None:
            groups, size, value_size = attrs["groups"], q.shape[3], attrs["value_size"]
        else:
            groups, size, value_size = k.shape[1], k.shape[3], v.shape[3]
        y = np.zeros((*q.shape[:-1], value_size), q.dtype)
        check_runs(runs, pages, q.shape[2], len(pool), positions, adds=k is not None)
        for first, rows, past, begin in runs.tolist():
            total = past if k is None else past + rows
            own = pages[begin : begin - (-total // positions)]
            at = np.arange(past, past + rows)
            caches = []
            for new, kind, n in ((k, "keys", size), (v, "values", value_size)):
                place = attrs[f"{kind}_at"]
                cache = pool[:, place : place + groups * positions * n]
                if kind == "keys":
                    cache = cache.reshape(-1, groups, n, positions).swapaxes(2, 3)
                else:
                    cache = cache.reshape(-1, groups, positions, n)
                if new is not None:
                    rows_of_it = new[0, :, first : first + rows].swapaxes(0, 1)
                    cache[own[at // positions], :, at % positions] = rows_of_it
                read = cache[own].swapaxes(0, 1).reshape(groups, -1, n)
                caches.append(read[None, :, :total])
            # Without new rows, all positions are visible.
            biases = [] if k is None else [_bias(at, total, window, by_distance)]
            part = q[:, :, first : first + rows]
            y[:, :, first : first + rows] = attend(scaled, part, caches[0], caches[1], biases)
        return y

    return Kernel(function)


def _bias(at: np.ndarray, total: int, window: int, by_distance: np.ndarray | None) -> np.ndarray:
    """Return the bias [..., rows, total] of the scores of rows at positions ``at``."""
    distance = at[:, None] - np.arange(total)
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    numbers: np.ndarray = np.zeros((), np.float32)
    if by_distance is not None:
        last = by_distance.shape[1] - 2
        further = np.maximum(distance - last, 0).astype(np.float32)
        numbers = by_distance[:, np.clip(distance, 0, last)] + by_distance[:, -1:, None] * further
    return np.where(hidden, np.float32(-np.inf), numbers)


def check_runs(
    runs: np.ndarray,
    pages: np.ndarray,
    rows: int,
    page_count: int,
    positions: int,
    adds: bool = True,
) -> None:
    """Raise ``ValueError`` if requests refer to rows or pages that do not exist. ``adds``: whether
    pages must have room for the new rows too."""
    first, count, past, begin = runs.T
    if (runs < 0).any() or (first + count > rows).any():
        raise ValueError("runs refers to rows that do not exist")
    if (begin - (-(past + adds * count) // positions) > len(pages)).any():
        raise ValueError("a request in runs has fewer pages than its positions need")
    if (pages < 0).any() or (pages >= page_count).any():
        raise ValueError(f"pages must be in [0, {page_count}), the pages of the pool")


def _work(attrs: Attrs, inputs: Dims, output: tuple[int, ...]) -> int:
    # Past lengths are unknown: assume the positions of one page.
    q = inputs[0]
    assert q is not None
    return 2 * output[1] * output[2] * attrs["positions"] * (q[3] + output[3])


PAGED_ATTENTION = Op("PagedAttention", "penstock", 1, 1, _infer, _compile, work=_work)
"""Attention of T rows, with queries [1, heads, T, size], keys [1, groups, T, size], values
[1, groups, T, value_size] and biases by distance [heads, n + 1], over the positions of their
requests. Attributes: ``scale``; ``softcap`` and ``window``, 0 for none; ``positions`` per page;
``keys_at`` and ``values_at``; and, without keys and values, ``groups`` and ``value_size``."""
