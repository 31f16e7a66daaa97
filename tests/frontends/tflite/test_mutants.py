"""Mutants of TFLite files run or are refused, and never hang."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InternalError
from tests.support import mutants
from tests.support.sweeps import sweep
from tests.support.tflite_cases import cases
from tools.mutations import changed_bytes, changed_numbers

CASES = list(cases("op", "control", "dynamic", "net", "circle"))
PER_CASE = 12  # seeded; more with another seed
LIMITS = ps.Limits(max_bytes=2**26, max_constant_bytes=2**26, max_iterations=1000, max_nodes=10_000)


@pytest.mark.parametrize("case", sweep(CASES, 60), ids=lambda case: case.name)
def test_mutant_runs_or_is_refused(case) -> None:
    data = case.path.read_bytes()
    outcomes: Counter[str] = Counter()
    for seed in range(PER_CASE):
        draw = random.Random(f"{case.name} {seed}")
        change = draw.choice([changed_bytes, changed_numbers, changed_numbers])
        outcomes[outcome(change(data, draw))] += 1
    assert set(outcomes) <= {"ran", "refused"}


def outcome(data: bytes) -> str:
    try:
        session = ps.compile(data, limits=LIMITS)
        rng = np.random.default_rng(0)
        feeds = {port.name: mutants.feed(port.type, rng) for port in session.inputs}
        session.run(feeds, timeout=2.0)
    except InternalError:
        raise
    except ps.PenstockError:
        return "refused"
    return "ran"


@pytest.mark.parametrize("step", [1, 7])
def test_file_cut_short_is_refused(step: int) -> None:
    data = next(case for case in CASES if case.name == "if_nested").path.read_bytes()
    # The last bytes only fill the file up, or end the table that stands last.
    for size in range(0, len(data) * 3 // 4, step * 13):
        with pytest.raises(ps.InvalidModel):
            ps.load(data[:size] if size >= 8 else data[:size].ljust(8, b"\0")[:4] + b"TFL3")
