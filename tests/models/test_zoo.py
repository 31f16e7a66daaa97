"""Small models of the zoo, as exporters wrote them: Penstock answers as ONNX Runtime does.

``python -m bench.zoo sample`` makes the archive, from what ``make bench-zoo`` generated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from bench.zoo.check import difference
from bench.zoo.sample import FILE, QUOTAS, Sample, samples
from bench.zoo.store import flat

import penstock as ps
from tests.support.exact_runtime import exact_session

ZOO = list(samples())


def answers(model: bytes, feeds: dict[str, np.ndarray], exact: bool = False) -> list[Any]:
    """Of ONNX Runtime; ``exact``: with sums of products of int8 that do not saturate."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    make = exact_session if exact else onnxruntime.InferenceSession
    session = make(model, options)
    return session.run(None, feeds)


def test_sample_has_models_of_many_groups_and_is_small():
    groups = {sample.name.split("/")[0] for sample, _, _ in ZOO}
    assert groups == {group for group, quota in QUOTAS.items() if quota}
    assert len(ZOO) >= 150
    assert FILE.stat().st_size < 3e6


@pytest.mark.parametrize(("sample", "model", "feeds"), ZOO, ids=[s.name for s, _, _ in ZOO])
def test_zoo_model_answers_as_onnx_runtime(sample: Sample, model: bytes, feeds: dict):
    session = ps.compile(model)
    wanted = flat(answers(model, feeds, exact="__qdq_s8s8" in sample.name))
    for _ in range(2):  # the second run uses the memory of the first
        got = flat(session.run(feeds).values())
        assert difference(got, wanted, same_types=True) <= sample.tolerance
