"""What the steps of a plan allocate during a run, outside of its arena."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import NumpyBackend
from penstock.codegen.lifetimes import Allocations, allocations
from penstock.core.errors import LimitExceeded
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.load import load
from penstock.plan.builder import compile_plan
from tests.support.onnx_text import compile_text, model_from_text

STATIC = "g (float[8] x) => (float[8] y) { a = Neg(x) y = Abs(a) }"
DYNAMIC = "g (float[8] x) => (int64[A, B] y, float[8] z) { y = NonZero(x) z = Neg(x) }"


def allocations_of(text: str, limits: Limits, **options: bool) -> tuple[bool, int, list[str]]:
    graph = load(model_from_text(text)).graph
    infer_types(graph)
    plan = compile_plan(graph, [NumpyBackend()], **options)
    found = allocations(plan, 100, limits)
    return found.counts, found.taken, sorted(step.node.op.name for step in found.steps)


@pytest.mark.parametrize("text", [STATIC, DYNAMIC])
def test_allocations_by_default_limits_are_not_counted(text):
    assert allocations_of(text, DEFAULT_LIMITS) == (False, 0, [])
    assert Allocations() == (False, 0, frozenset(), 0, True)


def test_allocations_of_known_size_are_added_up_before_the_run():
    assert allocations_of(STATIC, Limits(max_bytes=1000)) == (False, 0, [])
    assert allocations_of(DYNAMIC, Limits(max_bytes=1000)) == (True, 132, ["NonZero"])


def test_allocations_are_all_counted_if_their_sum_is_too_much():
    limits = Limits(max_bytes=150)
    assert allocations_of(STATIC, limits, planned=False) == (True, 100, ["Abs", "Neg"])
    assert allocations_of(DYNAMIC, Limits(max_bytes=120)) == (True, 100, ["Neg", "NonZero"])


def test_allocations_without_max_bytes_are_counted_for_max_dims():
    limits = Limits(max_bytes=None, max_dims=2)
    assert allocations_of(DYNAMIC, limits) == (True, 132, ["NonZero"])


LARGE = "g (float[25000] x) => (float[25000] y, float[25000] z) { y = Neg(x) z = Abs(x) }"


def test_large_results_are_allocations_though_kernels_write_into_them():
    assert allocations_of(LARGE, Limits(max_bytes=10**6)) == (False, 0, [])
    assert allocations_of(LARGE, Limits(max_bytes=150_000)) == (True, 100, ["Abs", "Neg"])
    session = compile_text(LARGE, limits=Limits(max_bytes=150_000))
    with pytest.raises(LimitExceeded, match="max_bytes"):
        session.run({"x": np.zeros(25000, np.float32)})
    one = session.run({"x": np.zeros(25000, np.float32)}, ["z"])
    assert one["z"].shape == (25000,)


def test_copies_of_views_of_unknown_size_are_counted():
    text = """g (float[25000] x, int64[1] n) => (float[A] y, float[B] z) <int64[1] zero = {0}> {
        y = Slice(x, zero, n) z = Slice(x, zero, n) }"""
    assert allocations_of(text, Limits(max_bytes=150_000)) == (True, 100, [])
    session = compile_text(text, limits=Limits(max_bytes=150_000))
    feeds = {"x": np.zeros(25000, np.float32), "n": np.array([25000])}
    with pytest.raises(LimitExceeded, match="max_bytes"):
        session.run(feeds)
    assert session.run(feeds, ["z"])["z"].shape == (25000,)


def test_repeated_elements_of_unknown_number_are_counted():
    text = "g (float x, int64[1] n) => (float y) { r = Expand(x, n) y = ReduceMax<keepdims=0>(r) }"
    assert allocations_of(text, Limits(max_bytes=1000)) == (True, 104, ["Expand"])
