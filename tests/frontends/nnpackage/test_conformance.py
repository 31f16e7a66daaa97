"""The corpus of packages: runs that must match, and packages that must be refused."""

from __future__ import annotations

from functools import partial

import pytest

import penstock as ps
from tests.support.tflite_cases import Case, cases, follow

CASES = list(cases("nnpkg"))
RUNS = [case for case in CASES if "runs" in case.data]
REFUSED = [case for case in CASES if "error" in case.data]


def name_of(case: Case) -> str:
    return case.name


def test_corpus_is_complete() -> None:
    assert (len(RUNS), len(REFUSED)) == (13, 8)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*SOMETHING_ELSE")
@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "streams", "frames", "interpret"]
)
@pytest.mark.parametrize("case", RUNS, ids=name_of)
def test_package_gives_what_litert_gives(case: Case, executor: str) -> None:
    follow(case, partial(ps.compile, executor=executor))


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_package_that_is_at_fault_is_refused(case: Case) -> None:
    with pytest.raises(ps.InvalidModel):
        ps.compile(case.path)
