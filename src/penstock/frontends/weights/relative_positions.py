"""Scores of an encoder's attention that depend on how far a key is from its query.

::

    query - key  ──>  bucket  ──>  MPNet: a number for each head
                                   DeBERTa: a vector, which keys and queries are multiplied by

Near positions have a bucket each, farther ones share buckets whose sizes grow. A table has the
buckets of all distances up to one from which they are the same.
"""

from __future__ import annotations

import math

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, INT64
from penstock.frontends.weights.writer import ModelWriter
from penstock.ir.graph import Value

_MPNET_BUCKETS, _MPNET_DISTANCE = 32, 128
"""whatever relative_attention_num_buckets says, as in transformers"""
_MOST_DISTANCE = 1 << 16


class Disentangled(NamedTuple):
    """How DeBERTa's attention reads positions: ``span`` vectors for keys before the query, and as
    many behind it; with ``buckets``, those of distances up to ``longest``; whether queries are
    multiplied by keys of positions, ``of_keys``, and keys by queries of positions, ``of_queries``;
    whether the layers' products are ``shared`` with positions; and whether vectors are
    ``normed``."""

    span: int
    buckets: int
    longest: int
    of_keys: bool
    of_queries: bool
    shared: bool
    normed: bool

    @property
    def parts(self) -> int:
        """The number of products in a score."""
        return 1 + self.of_keys + self.of_queries

    def indices(self, b: ModelWriter, ids: Value) -> Value:
        """Return the rows of the table of vectors [1, 1, queries, keys]."""
        span, mid = self.span, self.buckets // 2
        last = span
        if self.buckets:  # from where the last bucket begins
            ratio = (self.longest - 1) / mid
            last = math.ceil(mid * ratio ** (mid / max(mid - 1, 1))) + 1
        last = min(last, _MOST_DISTANCE)
        distances = np.arange(-last, last + 1)
        if self.buckets:
            # In float32, as torch computes them: rounding decides on the border of buckets.
            far = np.abs(np.where(np.abs(distances) < mid, mid - 1, distances)).astype(FLOAT32)
            step = np.log(np.float32((self.longest - 1) / mid), dtype=FLOAT32)
            logs = np.log(far / np.float32(mid)) / step * np.float32(mid - 1)
            buckets = (np.ceil(logs) + mid) * np.sign(distances)
            distances = np.where(far <= mid, distances, buckets).astype(np.int64)
        # Positive distances are those of keys before the query.
        table = b.constant(np.clip(distances + span, 0, 2 * span - 1), INT64)
        places = b.op("Neg", _distances(b, ids, last))
        return b.op("Unsqueeze", b.op("Gather", table, b.op("Add", places, last), axis=0), (0, 1))

    def vectors(self, b: ModelWriter, width: int, epsilon: float) -> Value:
        """Return the vectors of positions [2 * span, width]."""
        tensor = b.store.get("relative_positions.weight", (2 * self.span, width))
        x = b.real(tensor.name, tensor.array())
        return b.layer_norm(x, "relative_norm", width, epsilon) if self.normed else x

    def scores(
        self,
        b: ModelWriter,
        heads: tuple[Value, Value],
        positions: tuple[Value, Value],
        name: str,
        width: int,
        size: int,
    ) -> Value:
        """Return the scores [batch, heads, queries, keys] of a layer, before they are scaled.

        Args:
            b: The graph.
            heads: Queries [batch, heads, queries, size] and keys [batch, heads, size, keys].
            positions: The vectors of positions, and the rows of them for each query and key.
            name: The layer.
            width: The features of all heads.
            size: The features of a head.
        """
        (q, k), (vectors, rows) = heads, positions

        def of_positions(role: str, axes: tuple[int, ...]) -> Value:
            own = f"attn_{role}" if self.shared else f"positions_{role}"
            y = b.linear(vectors, f"{name}.{own}", width, width)
            return b.op("Transpose", b.op("Reshape", y, (0, -1, size)), perm=axes)

        scores = b.op("MatMul", q, k)
        # GatherElements does not broadcast.
        every = b.op("Expand", rows, b.op("Shape", scores))
        # The same rows serve both, since keys are as far from queries as these from keys.
        if self.of_keys:
            products = b.op("MatMul", q, of_positions("k", (1, 2, 0)))
            scores = b.op("Add", scores, b.op("GatherElements", products, every, axis=-1))
        if self.of_queries:
            products = b.op("MatMul", of_positions("q", (1, 0, 2)), k)
            scores = b.op("Add", scores, b.op("GatherElements", products, every, axis=2))
        return scores


def mpnet_bias(b: ModelWriter, ids: Value, heads: int) -> Value:
    """Return what MPNet adds to the scores of all layers [1, heads, queries, keys]."""
    last = _MPNET_DISTANCE
    # Half of the buckets are those of keys behind the query.
    distances = np.arange(-last, last + 1)
    half, near = _MPNET_BUCKETS // 2, _MPNET_BUCKETS // 4
    far = np.maximum(np.abs(distances), near).astype(FLOAT32)
    logs = np.log(far / np.float32(near)) / np.float32(math.log(last / near))
    growing = near + (logs * np.float32(half - near)).astype(np.int64)
    sizes = np.where(np.abs(distances) < near, np.abs(distances), np.minimum(growing, half - 1))
    tensor = b.store.get("relative_positions.weight", (_MPNET_BUCKETS, heads))
    table = b.constant(tensor.real()[sizes + half * (distances > 0)])
    numbers = b.op("Gather", table, b.op("Add", _distances(b, ids, last), last), axis=0)
    return b.op("Unsqueeze", b.op("Transpose", numbers, perm=(2, 0, 1)), (0,))


def _distances(b: ModelWriter, ids: Value, last: int) -> Value:
    """Return how far keys are behind queries [queries, keys], at most ``last`` either way."""
    places = positions_of(b, ids)
    distances = b.op("Sub", b.op("Unsqueeze", places, (0,)), b.op("Unsqueeze", places, (1,)))
    bounds = [b.constant(np.array(n, np.int64), INT64) for n in (-last, last)]
    return b.op("Clip", distances, *bounds)


def positions_of(b: ModelWriter, ids: Value) -> Value:
    """Return the positions of tokens [rows], from 0 on."""
    length = b.op("Gather", b.op("Shape", ids), 1, axis=0)
    zero, one = (b.constant(np.array(n, np.int64), INT64) for n in (0, 1))
    return b.op("Range", zero, length, one)
