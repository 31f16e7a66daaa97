"""Executors on oneDNN, with NumPy beside it for what that has no kernels for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock import compiling
from penstock.backends.onednn.library import library
from penstock.measuring import Costs
from tests.executors.conformance import ExecutorConformance, assert_equal

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")


def assert_close(got, want) -> None:
    """As ``assert_equal``, but floats as near as two libraries come to each other."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        for name in want:
            assert_close(got[name], want[name])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)
    elif isinstance(want, np.ndarray) and want.dtype.kind == "f":
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    else:
        assert_equal(got, want)


class OnOneDnn(ExecutorConformance):
    """What is small runs on NumPy, where that takes less."""

    backends = ("onednn", "numpy")

    def assert_same(self, got, want) -> None:
        assert_close(got, want)


class TestLinear(OnOneDnn):
    executor = "linear"


class TestDataflow(OnOneDnn):
    executor = "dataflow"


class TestParallel(OnOneDnn):
    executor = "parallel"


class First(Costs):
    """The backend named first takes the least."""

    def expected(self, node, among, backend):
        return among.index(backend)


class WhereverItCan(OnOneDnn):
    """All that oneDNN has kernels for runs on it."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def first(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "Costs", First)
            yield


class TestLinearWhereverItCan(WhereverItCan):
    executor = "linear"


class TestDataflowWhereverItCan(WhereverItCan):
    executor = "dataflow"
