"""The same model compiled twice gives the same program, byte for byte, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import penstock as ps
from penstock.core.types import SequenceType, TensorType, Type
from penstock.host.native import library
from penstock.ir.graph import Model
from penstock.tuning.measure import Cost
from tests.support.expert import with_expert
from tests.support.random_graphs import feeds_for, seeded
from tests.support.sweeps import drawn

HEADER = '<ir_version: 9, opset_import: ["" : 20]>\n'

TEXTS = {
    "branches": """g (float[8, 8] x, bool c) => (float[8, 8] y, int64[2, N] z) {
        a = Exp(x) b = MatMul(a, a) d = Softmax(b) z = NonZero(d)
        y = If (c) <then_branch = t () => (float[8, 8] p) { q = Sin(a) p = MatMul(q, d) },
                    else_branch = e () => (float[8, 8] r) { r = Gelu(b) }> }""",
    "loop": """g (float[4] x, int64 n, bool z) => (float[4] y, float[K, 4] rows)
            <int64 most = {3}> {
        y, rows = Loop (n, z, x) <body = b (int64 i, bool c, float[4] v)
            => (bool d, float[4] w, float[4] v) { w = Softmax(v) d = Less(i, most) }> }""",
    "scan": """g (float[3, 4] x, float[4] s) => (float[4] t, float[4, 3] rows) {
        t, rows = Scan <num_scan_inputs = 1, scan_output_axes = [1],
            body = b (float[4] a, float[4] row) => (float[4] m, float[4] a) { m = Max(a, row) }>
            (s, x) }""",
    "sequence": """g (seq(float[4]) s, float[4] k) => (seq(float[4]) y) {
        y = SequenceMap (s, k) <body = b (float[4] e, float[4] f) => (float[4] r) {
            r = Add(e, f) }> }""",
    "convolutions": """g (float[1, 8, 16, 16] x) => (float[1, 16, 14, 8] y, float[1, 8, 16, 16] z)
            <float[8, 8, 3, 3] w = {WEIGHTS}> {
        a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Relu(a) c = Conv (b, w)
        d = Conv <pads = [1, 1, 1, 1]> (b, w) e = Sigmoid(d) z = Add(d, e)
        f = Concat <axis = 1> (c, c) y = MaxPool <kernel_shape = [1, 7]> (f) }""".replace("WEIGHTS", ", ".join(["0.5"] * 576)),
    "columns": "g (float[200, 200] x) => (float[200, 200] y) <"
    + ", ".join(f"float k{i} = {{{i}}}" for i in range(6))
    + "> {"
    + " ".join(
        f"m{i} = Add(x, k{i}) a{i} = MatMul(m{i}, x) b{i} = Exp(a{i}) c{i} = MatMul(b{i}, a{i})"
        for i in range(6)
    )
    + " y = Sum(c0, c1, c2, c3, c4, c5) }",
}  # fmt: skip

EXECUTORS: Mapping[str, Mapping[str, object]] = {
    "linear": {"executor": "linear"},
    "dataflow": {"executor": "dataflow"},
    "parallel": {"executor": "parallel", "threads": 2},
    "streams": {"executor": "streams", "max_streams": 3},
}
SEEDS = range(6)
BACKENDS = [["numpy"], *([["native", "numpy"]] if library() is not None else [])]
CASES = list(product(EXECUTORS, BACKENDS))


class FixedCosts:
    """Every step takes a millisecond, so that nothing is measured and several workers pay."""

    def cost(self, node, backend, threads):
        return Cost(1e-3)


def programs(executor: str, backends: list[str]) -> list[str]:
    """The sources of all models for one executor and the backends."""
    models: list[object] = [parser.parse_model(HEADER + text) for text in TEXTS.values()]
    models += [Model({"main": seeded(seed, 25)}, "main") for seed in SEEDS]
    options = {"backends": backends, "cost_model": FixedCosts(), **EXECUTORS[executor]}
    sources = []
    for i, model in enumerate(models):
        session = ps.compile(model, **with_expert(options))
        drawn = feeds_for(SEEDS[i - len(TEXTS)] % 4) if i >= len(TEXTS) else {}
        session.run({port.name: drawn.get(port.name, zeros(port.type)) for port in session.inputs})
        sources.append(session.source)
    return sources


def zeros(type_: Type) -> object:
    if isinstance(type_, SequenceType):
        return [zeros(type_.element)] * 2
    assert isinstance(type_, TensorType)
    return np.zeros([d if isinstance(d, int) else 1 for d in type_.shape or ()], type_.dtype)


@cache
def programs_of_another_process() -> list[list[str]]:
    """``programs`` for all of ``CASES``, made where names have other hashes."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.costly
@pytest.mark.parametrize("case", drawn(range(len(CASES)), 3), ids=lambda i: f"{CASES[i]}")
def test_program_is_the_same_in_every_compilation_and_process(case):
    first = programs(*CASES[case])
    assert programs(*CASES[case]) == first
    assert programs_of_another_process()[case] == first


@pytest.mark.parametrize("executor", ["parallel", "streams"])
def test_models_of_this_file_run_as_several_tasks(executor):
    assert any("def t1(" in source for source in programs(executor, ["numpy"]))


if __name__ == "__main__":
    print(json.dumps([programs(*case) for case in CASES]))
