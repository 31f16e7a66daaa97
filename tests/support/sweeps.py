"""Sweeps: a sample of their cases runs with every ``make test``, the others with ``make test-full``.

A sample is fixed (``sweep``) where each case costs much or covers what no other does, and drawn anew
each day (``drawn``) where the cases are many and alike: in the course of time ``make test`` runs all
of these. Of any other test of ten or more cases in the folders of kernels, operations, front ends and the
like, an eighth of the cases is drawn (``tests/conftest.py``), and so of all tests of a class or a module
with ``sampled = True``. A third, or another ``share``, is drawn of the tests that are marked ``costly``,
which take seconds. All cases of a test that is marked ``whole`` are run: each is of its own kind. The
environment variable ``PENSTOCK_TESTS_DAY``, which is in the header of a test run, repeats the draws of a
day.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def sweep(cases: Iterable[Any], sample: int) -> list[Any]:
    """Parameters for ``cases``: ``sample`` of them, evenly spread, run always, the others are marked
    ``full``."""
    cases = list(cases)
    step = len(cases) // sample
    return [
        case if i % step == step // 2 else pytest.param(case, marks=pytest.mark.full)
        for i, case in enumerate(cases)
    ]


DAY = "PENSTOCK_TESTS_DAY"
"""the variable with the day whose samples are drawn, which ``tests/conftest.py`` sets"""


def drawn(
    cases: Iterable[Any], sample: int, always: Callable[[Any], bool] = lambda case: False
) -> list[Any]:
    """Parameters for ``cases``: ``sample`` of them, drawn by the day, and those that ``always`` is
    true of are run, the others are marked ``full``."""
    cases = list(cases)
    rng = random.Random(f"{os.environ[DAY]} {len(cases)}")
    chosen = set(rng.sample(range(len(cases)), min(sample, len(cases))))
    return [
        case
        if i in chosen or always(case)
        else pytest.param(*_arguments(case), marks=pytest.mark.full)
        for i, case in enumerate(cases)
    ]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def scaled(small: int, large: int) -> list[Any]:
    """A parameter for a small size, which runs always, and for a large one, marked ``full``."""
    return [small, pytest.param(large, marks=pytest.mark.full)]


def examples(times: float) -> settings:
    """Settings of a property that is tried on ``times`` as many examples as others are."""
    return settings(max_examples=round(times * settings.default.max_examples))
