"""ArgMax and ArgMin with results of int32."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import by_litert
from tests.support.tflite_models import TYPES, model, subgraph


@pytest.mark.parametrize("backends", [["numpy"], None])
@pytest.mark.parametrize("dims", [(5,), (200, 3), (2, 300), (3, 70, 5)])
@pytest.mark.parametrize("operator", ["ARG_MAX", "ARG_MIN"])
def test_places_of_extremes_as_int32_are_those_of_litert(operator, dims, backends):
    x = np.random.default_rng(2).integers(-9, 9, dims).astype(np.float32)
    for axis in range(len(dims)):
        options = (f"{operator.title().replace('_', '')}Options", {"output_type": 2})
        shape = [*dims[:axis], *dims[axis + 1 :]]
        graph = subgraph(
            {"x": ("float32", dims)},
            [(operator, ["x", "axis"], ["y"], options)],
            ["y"],
            {"axis": np.array(axis, np.int32)},
            y={"type": TYPES.index("int32"), "shape": shape},
        )
        file = model([graph])
        session = ps.compile(file, backends=backends)
        (got,), (wanted,) = session.run({"x": x}).values(), by_litert(file, {"x": x})
        assert (got.dtype, len(session.inspect.plan.steps)) == (np.int32, 1)
        np.testing.assert_array_equal(got, wanted)
