"""docs/coming-from.md: each row has a verdict, and the names that it gives exist."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.compiler.options import CompileOptions, RunOptions
from penstock.ir.graph import Model

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
ROWS = [
    [cell.strip() for cell in line.strip()[1:-1].split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not re.match(r"\| [\w ]+\| \|", line)
]
CLASSES = {"CompileOptions": CompileOptions, "RunOptions": RunOptions, "Model": Model}


def names(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", cell)


def found(name: str) -> bool:
    """Whether there is an attribute, a field or a module of this name."""
    parts = name.split(".")
    if parts[0] == "penstock":
        thing: Any = ps
        for i, part in enumerate(parts[1:], 2):
            if not hasattr(thing, part):
                import_module(".".join(parts[:i]))
            thing = getattr(thing, part)
        return True
    owner = CLASSES.get(parts[0]) or getattr(ps, parts[0])
    own = {field.name for field in fields(owner)} if is_dataclass(owner) else set()
    return parts[1] in own or hasattr(owner, parts[1])


def test_options_of_migration_pages_exist():
    """Those that pages write as ``compile(threads=2)`` and ``run(timeout=1.0)``."""
    records = {"compile": CompileOptions, "run": RunOptions}
    pages = sorted(PAGE.parent.glob("how-to/migrate-*.md"))
    calls = [
        match for page in pages for match in re.findall(r"`(compile|run)\((\w+)=", page.read_text())
    ]
    assert len(calls) > 30
    for function, name in calls:
        assert name in {field.name for field in fields(records[function])}, f"{function}({name}=)"


def test_page_has_rows_for_each_runtime():
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_row_has_a_verdict_and_names_that_exist(row):
    _, verdict, here, *_ = row
    assert verdict in ("yes", "no", "differs")
    assert verdict != "no" or not here
    for name in names(here):
        assert found(name), name
