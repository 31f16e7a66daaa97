"""A line that tells how far long work is."""

from __future__ import annotations

import pytest

from penstock.host import progress_line
from penstock.host.progress_line import ProgressLine
from tests.compiler.test_progress import TEXT, X
from tests.support.onnx_text import compile_text


def test_line_is_written_over_from_the_second_second_on_and_cleared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.0, 0.5, 1.0, 2.0, 3.0])
    monkeypatch.setattr(progress_line, "monotonic", lambda: next(times))
    line = ProgressLine()
    for done in range(4):
        line(f"step {done}", done, 4)
    line("done", 4, 4)
    bars = [f"\r[{'#' * n}{'.' * (24 - n)}] {i}/4 step {i}" for i, n in ((2, 12), (3, 18))]
    blank = " " * (len(bars[1]) - 1)
    assert capsys.readouterr().err == "".join([*bars, "\r", blank, "\r"])


def test_progress_that_is_asked_for_writes_nothing_of_short_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_line, "monotonic", lambda: 0.0)
    compile_text(TEXT, progress=True).run(X)
    assert capsys.readouterr().err == ""
