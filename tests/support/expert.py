"""Expert options of ``penstock.compile`` by their own names, among the other options of a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import penstock as ps
from penstock.compiler.options import EXPERT


def with_expert(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for ``penstock.compile``, the expert ones as ``expert=``."""
    others = {name: value for name, value in options.items() if name not in EXPERT}
    expert = {name: value for name, value in options.items() if name in EXPERT}
    if not expert:
        return others
    return {**others, "expert": others.get("expert", ps.ExpertOptions()).changed(**expert)}
