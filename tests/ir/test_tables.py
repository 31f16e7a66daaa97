"""Tables in notebooks."""

from __future__ import annotations

from typing import Any

import pytest

import penstock as ps
from penstock.ir.tables import MOST_ROWS, DisplayTable
from tests.inspect.test_notebooks import Cells, in_terminal


@pytest.mark.parametrize("empty", [ps.Profile, ps.Ranges, ps.Trace])
def test_what_has_seen_nothing_is_shown(empty: Any) -> None:
    assert "<table>" in empty()._repr_html_()
    assert in_terminal(empty())


def test_names_are_no_tags() -> None:
    page = DisplayTable("<script>", ("<b>",), [("<i>",)]).html()
    assert "<script>" not in page and "<i>" not in page
    assert {"<script>", "<b>", "<i>"} <= set(Cells(page).cells)


def test_long_tables_are_cut() -> None:
    table = DisplayTable("t", ("n",), [(i,) for i in range(MOST_ROWS + 5)])
    assert table.text().endswith("and 5 more")
    assert table.html().count("<tr>") == MOST_ROWS + 1
    assert "and 5 more" in table.html()
