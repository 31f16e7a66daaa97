"""The module that registers each operation: it is imported when one of them is first looked up.

``families.txt`` says which it is. ``tools/families.py`` writes that file, from what the modules
register.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

INDEX = os.path.join(os.path.dirname(__file__), "families.txt")


def _modules() -> Mapping[tuple[str, str], str]:
    table: dict[tuple[str, str], str] = {}
    with open(INDEX, encoding="ascii") as file:
        lines = file.read().replace("\n    ", " ").splitlines()
    for line in lines:
        head, _, names = line.partition(":")
        module, _, domain = head.partition(" ")
        module = f"penstock.ops.{module}"
        for name in names.split():
            table[domain, name] = module
    return table


MODULES = _modules()
"""The module that registers an operation, by its domain and name"""
