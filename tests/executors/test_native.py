"""Executors on compiled kernels, with NumPy for operations that have none."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from tests.executors.conformance import ExecutorConformance, assert_equal
from tests.support.cost_models import PreferredBackendCosts
from tests.support.onnx_text import compile_text
from tests.support.processes import in_child
from tests.support.timing import uncollected

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


def assert_close(got, want) -> None:
    """``assert_equal``, but floats may differ as much as two libraries do."""
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


class OnNative(ExecutorConformance):
    """Small nodes run on NumPy, where they take less time."""

    backends = ("native", "numpy")

    def assert_same(self, got, want) -> None:
        assert_close(got, want)


class TestLinear(OnNative):
    executor = "linear"


class TestDataflow(OnNative):
    executor = "dataflow"


class TestParallel(OnNative):
    executor = "parallel"


class WhereverItCan(OnNative):
    """All nodes with compiled kernels run on these."""

    sampled = True

    def compile(self, source, **options) -> ps.Session:
        options.setdefault("cost_model", PreferredBackendCosts("native"))
        return super().compile(source, **options)


class TestLinearWhereverItCan(WhereverItCan):
    executor = "linear"


class TestDataflowWhereverItCan(WhereverItCan):
    executor = "dataflow"


# Threads of kernels.


HEAVY = (
    """g (float[N, 256] x) => (float[N, 256] y) { a = MatMul(x, x) b = Relu(a) y = MatMul(b, x) }"""
)
X = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32) / 16
WANT = np.maximum(X @ X, 0) @ X


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_concurrent_runs_on_native_equal_runs_alone(executor):
    session = compile_text(HEAVY, executor=executor)

    def client(_) -> None:
        for _ in range(30):
            assert_close(session(X), WANT)

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(client, range(8)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_forked_child_does_not_wait_for_native_threads_of_its_parent(executor):
    session = compile_text(HEAVY, executor=executor)
    session(X)  # with all threads

    def child() -> None:
        for _ in range(3):
            assert_close(session(X), WANT)
        assert_close(compile_text(HEAVY, executor=executor)(X), WANT)

    assert in_child(child)


def test_trim_frees_the_arena_of_a_plan_on_library():
    session = compile_text(HEAVY, executor="linear")
    session(X)
    with uncollected():
        (bound,) = session.inspect.executor._arenas.free[0].values()
        gone = weakref.ref(bound.args[0])
        del bound
        assert gone() is not None
        session.trim()
        assert gone() is None
