"""Sweeps: a sample of their cases runs with every ``make test``, the others with ``make test-full``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sweep(cases: Iterable[Any], sample: int) -> list[Any]:
    """Parameters for ``cases``: ``sample`` of them, evenly spread, run always, the others are marked
    ``full``."""
    cases = list(cases)
    step = len(cases) // sample
    return [
        case if i % step == step // 2 else pytest.param(case, marks=pytest.mark.full)
        for i, case in enumerate(cases)
    ]


def scaled(small: int, large: int) -> list[Any]:
    """A parameter for a small size, which runs always, and for a large one, marked ``full``."""
    return [small, pytest.param(large, marks=pytest.mark.full)]
