"""Rules that hold for the files of the suite."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
FILES = sorted(str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py"))


def calls(file: str, *words: str) -> Iterator[ast.Call]:
    """The calls in a file. It is only parsed if it has one of these words."""
    text = Path(TESTS, file).read_text()
    if any(word in text for word in words):
        yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


@pytest.mark.parametrize("file", [f for f in FILES if f != "support/timing.py"])
def test_file_does_not_sleep(file: str) -> None:
    for call in calls(file, "sleep", "wait"):
        function = ast.unparse(call.func)
        if function.split(".")[-1] == "sleep" or function.endswith("Event().wait"):
            raise AssertionError(
                f"tests/{file}, line {call.lineno}, sleeps. Wait for an event, a barrier or "
                "wait_until(condition) of tests.support.timing; a double that takes time to be "
                "measured calls slow(seconds)"
            )


@pytest.mark.parametrize("file", FILES)
def test_file_suppresses_health_checks_one_by_one(file: str) -> None:
    for call in calls(file, "HealthCheck"):
        if ast.unparse(call) == "list(HealthCheck)":
            raise AssertionError(
                f"tests/{file}, line {call.lineno}, suppresses all health checks of Hypothesis. "
                "Draw smarter, or name the one check and say beside it why it does not apply"
            )


def test_hypothesis_draws_anew_and_checks_health_wherever_the_suite_runs() -> None:
    assert not settings.default.derandomize
    assert not settings.default.suppress_health_check
