"""The corpus of TFLite and Circle models, with LiteRT's results.

Its packages have tests of their own, in ``tests/frontends/nnpackage``.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import InternalError
from tests.support.sweeps import drawn
from tests.support.tflite_cases import Case, cases, follow

RUNS = list(cases("op", "quant", "dynamic", "net", "circle"))
REFUSED = list(cases("error"))
SAMPLE = [case for case in RUNS if case.file.parent.name != "op"] + RUNS[:300:7]


def name_of(case: Case) -> str:
    return case.name


def test_corpus_is_complete() -> None:
    assert len(RUNS) + len(list(cases("control"))) == 417
    assert len(REFUSED) == 8


@pytest.mark.whole
@pytest.mark.parametrize("case", RUNS, ids=name_of)
def test_case_gives_what_litert_gives(case: Case) -> None:
    follow(case, ps.compile)


EXECUTORS = ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]


@pytest.mark.parametrize(
    ("case", "executor"),
    drawn(product(SAMPLE, EXECUTORS), 250),
    ids=lambda part: part.name if isinstance(part, Case) else part,
)
def test_case_in_numpy_gives_what_litert_gives(case: Case, executor: str) -> None:
    follow(case, partial(ps.compile, executor=executor, backends=["numpy"]))


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_case_given_as_bytes_or_mapped_gives_what_litert_gives(case: Case) -> None:
    follow(case, lambda path: ps.compile(path.read_bytes()))
    follow(case, partial(ps.compile, map_weights=True))


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_case_that_is_at_fault_is_refused(case: Case) -> None:
    with pytest.raises(ps.PenstockError) as caught:
        session = ps.compile(case.path)
        feeds = {port.name: np.zeros(port.type.dims, port.type.dtype) for port in session.inputs}
        session.run(feeds)
    assert not isinstance(caught.value, InternalError)
