"""The file of measured costs, read without the class that writes it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

Rows = dict[tuple[str, str, str, str, str], tuple[int, float, int]]


def cost_rows(path: Path) -> Rows:
    """By machine, backend, operation, variant and exact: bytes, seconds, times."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT * FROM costs ORDER BY measured_at")
        return {row[:5]: row[5:8] for row in rows}


def measured_variants(path: Path) -> dict[str, dict[str, set[str]]]:
    """By backend and operation, the variants that were measured."""
    variants: dict[str, dict[str, set[str]]] = {}
    for _, backend, operation, variant, _ in cost_rows(path):
        variants.setdefault(backend, {}).setdefault(operation, set()).add(variant)
    return variants
