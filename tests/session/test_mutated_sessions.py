"""Saved sessions and schedules with a random change: each is refused, or does no harm. ``make
test-full`` tries 100,000 of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = 300
PIECE = 10_000  # takes less than a test's five minutes, under sanitizers too


def summary(*options: object) -> str:
    """Return the mutator's report on cases that it has tried in a separate process: it forks."""
    command = [sys.executable, "-m", "tools.mutate_plans", *map(str, options), "--jobs", "1"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["saved", "schedule"])
def test_some_mutants_do_no_harm(kind: str) -> None:
    text = summary("--seed", "some", "--cases", CASES, "--kind", kind, "--step", 9)
    assert f"{CASES} cases" in text and ", 0 findings" in text


@pytest.mark.full
@pytest.mark.parametrize("piece", range(100_000 // PIECE))
def test_many_mutants_do_no_harm(piece: int) -> None:
    assert ", 0 findings" in summary("--seed", f"piece {piece}", "--cases", PIECE)
