"""What servers and steppers do with a session before requests come."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.session.ahead import compile_ahead, freeze, run_ahead, values_of
from tests.support.onnx_text import compile_text

DOUBLE = "double (float[N, 3] x) => (float[N, 3] y) { y = Add(x, x) }"


def rows(count: int) -> dict[str, np.ndarray]:
    return {"x": np.arange(3 * count, dtype=np.float32).reshape(count, 3)}


@pytest.fixture
def session() -> ps.Session:
    return compile_text(DOUBLE, cache=False)


def test_run_ahead_compiles_a_plan_though_runs_do_not(session):
    freeze(session)
    before = session.stats.plans_made
    np.testing.assert_array_equal(run_ahead(session, rows(2))["y"], 2 * rows(2)["x"])
    assert session.stats.plans_made == before + 1


def test_compile_ahead_compiles_for_known_shapes_only(session):
    compile_ahead(session)
    assert session.stats.plans_made == 0
    fixed = compile_text(DOUBLE.replace("N", "2"), cache=False)
    compile_ahead(fixed)
    assert fixed.stats.plans_made == 1


def test_fixed_shapes_have_a_plan_each(session):
    session._subgraphs.fix_shapes()
    for count in range(1, 7):
        session.run(rows(count))
    assert session.stats.plans_made == 6


def test_values_of_shapes_have_names_and_dims(session):
    (x,) = values_of(session, {"x": (4, 3)}).values()
    assert (x.shape, x.dtype) == ((4, 3), np.float32)
