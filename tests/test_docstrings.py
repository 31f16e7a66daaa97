"""The examples in the docstrings of modules run, and print what the docstrings say."""

from __future__ import annotations

import doctest
import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import penstock
from penstock.plan import plan as plan_module

ROOT = Path(penstock.__file__).parent
FOLDERS = ("plan", "codegen")


def modules_with_examples() -> list[str]:
    """The names of all modules in ``FOLDERS`` with a docstring that has an example."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    named = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in paths}
    return [".".join(parts) for path, parts in named.items() if ">>> " in path.read_text()]


def run_examples(module: ModuleType, globals_: dict[str, Any]) -> dict[str, Any]:
    """Run the examples of a module, and return the names that the last of them has defined."""
    runner = doctest.DocTestRunner()
    defined = dict(globals_)
    for test in doctest.DocTestFinder().find(module, extraglobs=globals_):
        output: list[str] = []
        runner.run(test, out=output.append, clear_globs=False)
        assert not runner.failures, "".join(output)
        if test.examples:
            defined = test.globs
    return defined


@cache
def example_plan() -> Any:
    """The plan that the docstring of ``penstock.plan.plan`` compiles; other examples continue it."""
    return run_examples(plan_module, {})["plan"]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings_print_what_they_show(name):
    run_examples(importlib.import_module(name), {"plan": example_plan()})
