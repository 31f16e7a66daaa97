"""Rules that hold for the files of the suite."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).parent
FILES = sorted(str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py"))


def calls(file: str, *words: str) -> Iterator[ast.Call]:
    """The calls in a file. It is only parsed if it has one of these words."""
    text = Path(TESTS, file).read_text()
    if any(word in text for word in words):
        yield from (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def sleeps(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    return function.split(".")[-1] == "sleep" or function.endswith("Event().wait")


def test_files_do_not_sleep() -> None:
    files = [file for file in FILES if file != "support/timing.py"]
    found = [(file, call) for file in files for call in calls(file, "sleep", "wait")]
    assert [f"tests/{file}, line {call.lineno}" for file, call in found if sleeps(call)] == [], (
        "these sleep. Wait for an event, a barrier or wait_until(condition) of "
        "tests.support.timing; a double that takes time to be measured calls slow(seconds)"
    )


def test_files_suppress_health_checks_one_by_one() -> None:
    found = [(file, call) for file in FILES for call in calls(file, "HealthCheck")]
    whole = [pair for pair in found if ast.unparse(pair[1]) == "list(HealthCheck)"]
    assert [f"tests/{file}, line {call.lineno}" for file, call in whole] == [], (
        "these suppress all health checks of Hypothesis. Draw smarter, or name the one check and "
        "say beside it why it does not apply"
    )


def test_hypothesis_draws_anew_and_checks_health_wherever_the_suite_runs() -> None:
    assert not settings.default.derandomize
    assert not settings.default.suppress_health_check
