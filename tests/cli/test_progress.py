"""The progress of commands on a terminal, with rich and without."""

from __future__ import annotations

import sys

import pytest

from penstock.cli import base
from penstock.core.checkpoints import report_progress
from tests.support.timing import slow


@pytest.fixture(params=["rich", "plain"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "rich", None)
    else:
        pytest.importorskip("rich")
        # It asks these, and not stderr, what terminal there is.
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(base, "_DELAY", 0.0)
    return str(request.param)


def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **options: bool
) -> str:
    """What a command that works in three steps writes to a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with base.showing_progress("compile", **options):
        for step in range(3):
            report_progress("passes", step, 4)
            slow(0.2)  # rich draws ten times a second
    return capsys.readouterr().err


def test_progress_names_the_command_and_its_step(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, quiet=False)
    assert "compile: passes" in text
    assert ("2/4" in text) == (package == "plain")
    assert ("\x1b[" in text) == (package == "rich")


def test_plain_line_is_cleared_where_work_ends_before_its_last_step(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if package == "plain":
        assert shown(capsys, monkeypatch, quiet=False).endswith(" \r")


def test_quiet_command_shows_nothing(
    package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(capsys, monkeypatch, quiet=True) == ""
