"""Projections of locality-sensitive hashes, beside LiteRT's."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import RNG, Op, by_litert, f


@pytest.mark.parametrize("size", [1, 3, 4, 11, 12, 13, 28, 29, 60, 61, 124, 125, 300])
def test_projections_of_keys_of_any_length_are_those_of_litert(size: int) -> None:
    items = RNG.integers(0, 256, (5, size)).astype(np.uint8)
    weights = [f(5)] if size % 2 else []
    for kind in (1, 2):  # sparse and dense
        options = {"type": kind}
        op = Op("LSH_PROJECTION", (f(4, 6), items, *weights), options, outputs=("int32",))
        (want,) = by_litert(op.file, op.feeds)
        (got,) = ps.compile(op.file).run(op.feeds).values()
        assert got.dtype == want.dtype and got.tolist() == want.tolist()
