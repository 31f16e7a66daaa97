"""Recurrences as nodes: in files and as text."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import ShapeError, TensorType
from penstock.ops.internal.recurrence import RECURRENCE
from penstock.passes.pipeline import optimize
from tests.passes.loops.test_hoist_recurrences import Form


def test_recurrence_is_saved_and_read_back(tmp_path):
    model = Form("lstm", "loop", "where", 5, 2, 3, 20).model()
    session, rng = ps.compile(model), np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((5, 2, 3)).astype(np.float32), "m": rng.random((5, 2)) > 0.5}
    wanted = session.run(feeds)
    session.save(tmp_path / "model.penstock")
    opened = ps.open(tmp_path / "model.penstock")
    for got, want in zip(opened.run(feeds).values(), wanted.values(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_recurrence_is_read_back_from_its_text():
    from penstock.textual.parser import parse_graph
    from penstock.textual.printer import format_graph

    graph = ps.load(Form("gru before", "loop", "shares", 5, 2, 3, 4).model()).graph
    optimize(graph)
    text = format_graph(graph)
    assert "Recurrence" in text
    assert format_graph(parse_graph(text)) == text


RECURRENT = {
    "products": (5, 2, 9),
    "weights": (1, 9, 3),
    "bias": (1, 18),
    "mask": (5, 2),
    "state": (2, 3),
}
UNFIT = {
    "products": (5, 2, 6),
    "weights": (1, 6, 3),
    "bias": (1, 9),
    "mask": (5, 1),
    "state": (2, 4),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_operands_whose_dims_do_not_fit_are_refused(unfit):
    def infer(shapes, **attrs):
        types = [TensorType(np.dtype("float32"), shape) for shape in shapes.values()]
        given = {"cell": "GRU", "hidden_size": 3, "places": (0, 1, 2), **attrs}
        return [type_.shape for type_ in RECURRENCE.infer(types, given, [None] * len(types))]

    assert infer(RECURRENT) == [(5, 2, 3), (2, 3)]
    with pytest.raises(ShapeError):
        infer({**RECURRENT, unfit: UNFIT[unfit]})
    for attrs in ({"hidden_size": 4}, {"places": (0, 1, 3)}, {"places": (0, 1)}, {"cell": "LSTM"}):
        with pytest.raises(ShapeError):
            infer(RECURRENT, **attrs)
