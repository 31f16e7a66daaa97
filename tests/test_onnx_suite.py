"""The official ONNX suite: a test for each case, and one for the page about them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.backend.test.loader import load_model_tests

from penstock.backends.onednn.library import library
from penstock.onnx_backend import PenstockBackend
from penstock.session import compiler, session
from penstock.tuning.measure import GraphProfiler
from tests.support import onnx_suite

pytestmark = pytest.mark.suite


@pytest.fixture(autouse=True, scope="module")
def _scratch(tmp_path_factory):
    with onnx_suite.scratch(tmp_path_factory.mktemp("onnx")):
        yield


class First(GraphProfiler):
    """The backend named first takes the least: oneDNN gets all that it has kernels for."""

    def expected(self, node, among, backend):
        return among.index(backend)


@pytest.mark.parametrize("backends", ["numpy", "onednn,numpy"])
@pytest.mark.parametrize("name", onnx_suite.cases())
def test_case(name, backends, monkeypatch):
    chosen = backends.split(",")
    if "onednn" in chosen and library() is None:
        pytest.skip("needs libdnnl.so.3")
    monkeypatch.setattr(session, "_default", lambda: chosen)
    monkeypatch.setattr(compiler, "GraphProfiler", First)
    assert onnx_suite.outcome(name) is None
    if name in onnx_suite.EXCEPTIONS:
        pytest.xfail(onnx_suite.EXCEPTIONS[name][1])


def test_results_that_the_suite_cannot_compare():
    (case,) = [c for c in load_model_tests(kind="node") if c.name == "test_loop16_seq_none"]
    ((inputs, (wanted,)),) = case.data_sets
    (got,) = PenstockBackend.run_model(case.model, inputs)
    assert len(got) == len(wanted) == 6
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_exceptions_are_cases():
    assert onnx_suite.EXCEPTIONS.keys() <= onnx_suite.cases().keys()


def test_the_page_is_current():
    """What the page says of cases holds because the tests above do."""
    assert onnx_suite.PAGE.read_text() == onnx_suite.page(), (
        f"{onnx_suite.PAGE} is not what the suite says: run 'python -m tests.support.onnx_suite'"
    )
