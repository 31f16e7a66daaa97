"""Recurrences as nodes: in files and as text."""

from __future__ import annotations

import numpy as np

import penstock as ps
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
