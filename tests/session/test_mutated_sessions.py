"""Saved sessions with a change in what they say of their plans, and checksums that fit: each is
refused, or does no harm. ``make test-full`` tries 100,000 of them."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tools.fuzz import fuzz

CASES = 250
PIECE = 2_500  # which take less than the five minutes that a test has, under sanitizers too


def findings(seed: str, cases: int) -> int:
    """Crashes, hangs, foreign errors, memory beyond the limit, executors that disagree."""
    return fuzz(seed, range(cases), None, Namespace(seconds=280, suite=False, kind="artifact"))


def test_some_mutated_sessions_do_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    assert findings("some", CASES) == 0
    assert f"{CASES} cases, 0 findings" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("piece", range(100_000 // PIECE))
def test_many_mutated_sessions_do_no_harm(piece: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(f"piece {piece}", PIECE) == 0
    assert f"{PIECE} cases, 0 findings" in capsys.readouterr().out
