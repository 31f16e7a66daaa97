"""The command report: pages, and what they compare with."""

from __future__ import annotations

import pytest

from tests.support.command_line import call


def test_report_writes_a_page_and_says_what_differs(model, tmp_path):
    path = tmp_path / "r.html"
    result = call(
        "report",
        model,
        "-o",
        str(path),
        "--shape",
        "x=2x3",
        "--runs",
        "1",
        "--against",
        "backends=numpy",
    )
    assert result.exit_code == 0, result.output
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "largest relative difference" in result.output


@pytest.mark.parametrize("against", ["backends", "colour=red", "executor=slow", "threads=0"])
def test_report_refuses_what_it_cannot_compare_with(model, tmp_path, against):
    result = call("report", model, "-o", str(tmp_path / "r.html"), "--against", against)
    assert result.exit_code == 2
    assert not (tmp_path / "r.html").exists()
