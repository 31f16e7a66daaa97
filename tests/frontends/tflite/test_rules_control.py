"""Rules of If and While: the models of the corpus with control flow, with LiteRT's results."""

from __future__ import annotations

from functools import partial

import pytest

import penstock as ps
from tests.support.tflite_cases import Case, cases, follow

EXECUTORS = ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]
RUNS = list(cases("control"))


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name)
def test_control_flow_gives_what_litert_gives(case: Case) -> None:
    follow(case, ps.compile)
    follow(case, lambda path: ps.compile(path.read_bytes()))
    follow(case, partial(ps.compile, map_weights=True))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name)
def test_control_flow_in_numpy_gives_what_litert_gives(case: Case, executor: str) -> None:
    follow(case, partial(ps.compile, executor=executor, backends=["numpy"]))
