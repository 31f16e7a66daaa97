"""Tables of relative positions end where all farther positions are alike.

``test_encoder`` compares states with those of transformers.
"""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.limits import Limits
from penstock.core.types import INT64
from penstock.frontends.common.weight_file import ConstantBudget
from penstock.frontends.weights.relative_positions import Disentangled
from penstock.frontends.weights.tensors import TensorStore
from penstock.frontends.weights.writer import ModelWriter


def _bucket(distance: int, buckets: int, longest: int) -> int:
    """The bucket of DeBERTa for a distance, in exact terms: a logarithmic one from the middle on."""
    mid = buckets // 2
    if abs(distance) <= mid:
        return distance
    log = np.log(abs(distance) / mid) / np.log((longest - 1) / mid) * (mid - 1)
    return int(np.sign(distance) * (np.ceil(log - 1e-6) + mid))


@pytest.mark.parametrize(("buckets", "longest"), [(4, 10), (16, 40), (256, 512), (8, 512)])
def test_table_of_deberta_has_the_bucket_of_each_distance(buckets: int, longest: int) -> None:
    b = ModelWriter(TensorStore("words", {}, ConstantBudget(Limits())))
    ids = b.input("ids", INT64, ("batch", "rows"))
    own = Disentangled(buckets, buckets, longest, True, True, True, False)
    b.output("indices", own.indices(b, ids), (1, 1, "rows", "rows"))
    rows = 4 * longest
    (indices,) = ps.compile(b.model(None, {})).run({"ids": np.zeros((1, rows), np.int64)}).values()
    distances = [i - j for i in (0, rows // 3, rows - 1) for j in range(rows)]
    wanted = np.clip(
        [_bucket(n, buckets, longest) + buckets for n in distances], 0, 2 * buckets - 1
    )
    np.testing.assert_array_equal(indices[0, 0, [0, rows // 3, rows - 1]].ravel(), wanted)
