"""The official ONNX suite: a test for each case, and one for the page about them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import penstock as ps
from penstock.backends.registry import missing
from penstock.host.native import library
from penstock.onnx_backend import PenstockBackend
from tests.support import onnx_suite
from tests.support.cost_models import PreferredBackendCosts
from tests.support.onnx_cases import node_cases
from tests.support.sweeps import drawn

pytestmark = pytest.mark.suite


@pytest.fixture(autouse=True, scope="module")
def _scratch(tmp_path_factory):
    with onnx_suite.scratch(tmp_path_factory.mktemp("onnx")):
        yield


class OnNumpy(PenstockBackend):
    @classmethod
    def prepare(cls, model, device="CPU", **options):
        return super().prepare(model, device, backends=["numpy"], **options)


class OnNative(PenstockBackend):
    """Native kernels get all that they compute."""

    @classmethod
    def prepare(cls, model, device="CPU", **options):
        costs = PreferredBackendCosts("native")
        backends = ["native", "numpy"]
        expert = ps.ExpertOptions(cost_model=costs)
        return super().prepare(model, device, backends=backends, expert=expert, **options)


class OnTorch(PenstockBackend):
    """torch gets all that it has kernels for, on its CPU device; NumPy stands in for the rest."""

    @classmethod
    def prepare(cls, model, device="CPU", **options):
        return super().prepare(model, device, backends=["torch"], **options)


BACKENDS = {"numpy": OnNumpy, "native,numpy": OnNative, "torch": OnTorch}


# Half of the cases run on NumPy, which defines what the others compute; of these a smaller sample. The
# cases that end otherwise than others run always.
ON_NUMPY = [(name, "numpy") for name in onnx_suite.cases()]
OTHERS = list(itertools.product(onnx_suite.cases(), [b for b in BACKENDS if b != "numpy"]))


def _is_exception(case: tuple[str, str]) -> bool:
    return case[0] in onnx_suite.EXCEPTIONS


@pytest.mark.parametrize(
    ("name", "backends"),
    [
        *drawn(ON_NUMPY, len(ON_NUMPY) // 2, always=_is_exception),
        *drawn(OTHERS, len(OTHERS) // 8, always=_is_exception),
    ],
)
def test_onnx_suite_case_ends_as_expected(name, backends):
    if "native" in backends and library() is None:
        pytest.skip("there are no compiled kernels")
    if backends == "torch" and (reason := missing("torch")) is not None:
        pytest.skip(reason)
    assert onnx_suite.outcome(name, BACKENDS[backends]) is None
    if name in onnx_suite.EXCEPTIONS:
        pytest.xfail(onnx_suite.EXCEPTIONS[name][1])


def test_loop_of_optional_sequences_returns_each_array():
    (case,) = [c for c in node_cases() if c.name == "test_loop16_seq_none"]
    ((inputs, (wanted,)),) = case.data_sets
    (got,) = PenstockBackend.run_model(case.model, inputs)
    assert len(got) == len(wanted) == 6
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_every_exception_names_a_case_of_the_suite():
    assert onnx_suite.EXCEPTIONS.keys() <= onnx_suite.cases().keys()


def test_conformance_page_is_current():
    """What the page says of cases holds because the tests above do."""
    if (reason := missing("torch")) is not None:
        pytest.skip(reason)
    assert onnx_suite.PAGE.read_text() == onnx_suite.page(), (
        f"{onnx_suite.PAGE} is not what the suite says: run 'python -m tests.support.onnx_suite'"
    )
