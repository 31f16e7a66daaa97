"""Rules that hold for the files of the suite."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
FILES = sorted(str(file.relative_to(TESTS)) for file in TESTS.rglob("*.py"))


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(Path(TESTS, file).read_text())


@pytest.mark.parametrize("file", [f for f in FILES if f != "support/timing.py"])
def test_file_does_not_sleep(file: str) -> None:
    for node in ast.walk(tree(file)):
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if function.split(".")[-1] == "sleep" or function.endswith("Event().wait"):
            raise AssertionError(
                f"tests/{file}, line {node.lineno}, sleeps. Wait for an event, a barrier or "
                "wait_until(condition) of tests.support.timing; a double that takes time to be "
                "measured calls slow(seconds)"
            )


@pytest.mark.parametrize("file", FILES)
def test_file_imports_by_absolute_names(file: str) -> None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"tests/{file}, line {node.lineno}: import from tests. instead")


@pytest.mark.parametrize("file", FILES)
def test_file_suppresses_health_checks_one_by_one(file: str) -> None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call) and ast.unparse(node) == "list(HealthCheck)":
            raise AssertionError(
                f"tests/{file}, line {node.lineno}, suppresses all health checks of Hypothesis. "
                "Draw smarter, or name the one check and say beside it why it does not apply"
            )


def test_hypothesis_draws_anew_and_checks_health_wherever_the_suite_runs() -> None:
    assert not settings.default.derandomize
    assert not settings.default.suppress_health_check
