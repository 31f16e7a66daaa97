"""Estimated work of nodes, against figures counted by hand."""

from __future__ import annotations

import math

import pytest

from penstock.analysis.type_inference import infer_types
from penstock.backends.numpy import RATES, NumpyBackend
from penstock.ops.work_estimate import (
    Rates,
    Workload,
    estimate,
    flops,
    host_seconds,
    moved_bytes,
    part_seconds,
)
from tests.support.onnx_text import compile_text, graph_from_text


@pytest.mark.parametrize(
    ("signature", "call", "wanted"),
    [
        ("float[2, 3] a, float[3, 5] b", "MatMul(a, b)", 2 * 2 * 5 * 3),
        ("float[7, 2, 3] a, float[3, 5] b", "MatMul(a, b)", 2 * 7 * 2 * 5 * 3),
        ("float[3, 2] a, float[3, 5] b", "Gemm <transA = 1> (a, b)", 2 * 2 * 5 * 3),
        # 8 filters of 3x3 over 4 channels, 6x6 windows
        ("float[1, 4, 8, 8] x, float[8, 4, 3, 3] w", "Conv(x, w)", 2 * 8 * 36 * 4 * 9),
        # the same in 4 groups: each filter sees one channel
        ("float[1, 4, 8, 8] x, float[8, 1, 3, 3] w", "Conv <group = 4> (x, w)", 2 * 8 * 36 * 9),
        ("float[1, 4, 8, 8] x, float[4, 2, 3, 3] w", "ConvTranspose(x, w)", 2 * 4 * 64 * 2 * 9),
        ("float[2, 3] a, float[3] b", "Add(a, b)", 6),
        ("float[2, 300] a", "ReduceMax <keepdims = 0> (a)", 600),
        ("float[N, 3] a, float[3, 5] b", "MatMul(a, b)", 0),
    ],
)
def test_flops_count_multiplications_and_additions(signature, call, wanted):
    graph = graph_from_text(f"g ({signature}) => (float[M] y) {{ y = {call} }}")
    infer_types(graph)
    (node,) = graph.nodes
    assert flops(node) == wanted


def test_seconds_add_up_what_each_kind_of_work_takes():
    rates = {"family": Rates(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)}
    work = Workload("family", nbytes=2, flops=4, weights=8, elements=1, items=1, beside_s=64)
    assert estimate(rates, Workload("family")) == 1.0
    assert estimate(rates, work) == 4 + 16 + 32 + 64
    assert part_seconds(rates, work.part(4)) == (3 + 16 + 32) / 4
    assert estimate(rates, None) == math.inf


def test_bytes_that_move_are_those_of_no_constants():
    text = "g (float[4] x) => (float[4] y) <float[4] c = {1, 2, 3, 4}> { y = Add(x, c) }"
    (step,) = compile_text(text, backends=["numpy"], shapes={}).inspect.plan.steps
    assert moved_bytes(step.node) == 2 * 4 * 4


def test_estimates_of_numpy_are_those_of_its_table():
    text = "g (float[8, 8] x) => (float[8, 8] y) { y = MatMul(x, x) }"
    (step,) = compile_text(text, backends=["numpy"], shapes={}).inspect.plan.steps
    expected = estimate(RATES, Workload("MatMul", nbytes=3 * 256, flops=2 * 8**3))
    assert NumpyBackend().seconds(step.node) == pytest.approx(expected)
    assert host_seconds(step.node) == pytest.approx(1e-6 + 768 / 5e9 + 1024 / 20e9)
