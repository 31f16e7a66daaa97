"""Select: conditions and choices of shapes that fit."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.tf_graphs import Builder, Type

EXECUTORS = ("linear", "dataflow", "parallel", "streams", "frames", "interpret")


def select(executor: str) -> ps.Session:
    """A model of one Select, whose inputs may have any shapes."""
    builder = Builder()
    for name, dtype in {"condition": "bool", "a": "float32", "b": "float32"}.items():
        builder.node("Placeholder", name=name, dtype=Type(dtype))
    builder.node("Select", "condition", "a", "b", name="y", T=Type("float32"))
    return ps.compile(builder.bytes(), executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("condition", "a", "b"),
    [((3,), (), ()), ((3, 1), (3,), (3,)), ((2,), (3, 2), (3, 2)), ((), (3,), (1,))],
)
def test_shapes_that_do_not_fit_are_refused(executor, condition, a, b):
    feeds = {"condition": np.ones(condition, bool)}
    feeds |= {"a": np.ones(a, np.float32), "b": np.ones(b, np.float32)}
    with pytest.raises((ps.InvalidInput, ps.RunError), match="Select"):
        select(executor).run(feeds, ["y"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_conditions_are_one_or_for_each_row_or_element(executor):
    session = select(executor)
    a = np.arange(6, dtype=np.float32).reshape(3, 2)
    for condition in (np.True_, np.array([True, False, True]), a % 3 == 0):
        feeds = {"condition": np.asarray(condition), "a": a, "b": -a}
        rows = feeds["condition"][:, None] if feeds["condition"].ndim == 1 else condition
        np.testing.assert_array_equal(session.run(feeds, ["y"])["y"], np.where(rows, a, -a))
