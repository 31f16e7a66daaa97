"""The benchmark of operations: all are in its table, and both runtimes give the same answers."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from bench.operator_cases import MICROSOFT, ML, SIZES, OperatorCase
from bench.operators import REFERENCE, TOLERANCE, Fed, FedOnnxRuntime, Row, cases, difference, page
from bench.tables import OURS
from bench.trial import ROOT
from bench.zoo.store import flat
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

import penstock as ps

CASES = cases()
SMALL = [case for case in CASES if case.size == "small"]


@pytest.mark.parametrize("domain", [MICROSOFT, ML])
def test_every_operation_with_a_kernel_in_onnx_runtime_has_cases(domain: str) -> None:
    kernels = {
        kernel.op_name
        for kernel in runtime.get_all_opkernel_def()
        if kernel.domain == domain and kernel.provider == "CPUExecutionProvider"
    }
    assert {case.operation for case in CASES if case.domain == domain} == kernels


def test_every_case_has_three_sizes_and_a_title_of_its_own() -> None:
    keys = [(case.title, case.size) for case in CASES]
    assert len({*keys}) == len(keys)
    assert keys == [(case.title, size) for case in SMALL for size in SIZES]


def saved(case: OperatorCase, folder: Path) -> Path:
    """The file of a case, with its feeds beside it."""
    node, path = case.node(), folder / "case.onnx"
    onnx.save(case.model(node), path)
    Fed.of(node).write_beside(path)
    return path


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.title)
def test_smallest_case_gives_the_answers_of_onnx_runtime(
    case: OperatorCase, tmp_path: Path
) -> None:
    path = saved(case, tmp_path)
    session = ps.compile(path, threads=1)
    got = flat(Fed.beside(path).job(lambda feeds: list(session.run(feeds).values()))({}))
    try:
        want = flat(FedOnnxRuntime(1).load(path)({}))
    except runtime.Fail as error:
        assert "not yet supported on this hardware platform" in str(error)
        pytest.skip("ONNX Runtime has it only for processors with AVX-512")
    assert difference(got[: len(want)], want) <= TOLERANCE


def test_difference_tells_rounding_from_other_answers() -> None:
    reals, codes = np.array([1, 2], np.float32), np.array([10, 200], np.uint8)
    words = np.array(["a", "b"])
    assert difference([reals, codes, words], [reals, codes, words]) == 0
    assert difference([reals * np.float32(1.01)], [reals]) == pytest.approx(0.01, rel=1e-3)
    assert difference([codes - 1], [codes]) == 0
    assert difference([codes - 3], [codes]) == 2 / 256
    assert difference([words[::-1]], [words]) == math.inf
    assert difference([reals], [reals.astype(np.int64)]) == math.inf
    assert difference([reals[None]], [reals]) == math.inf


def test_page_lists_slow_rows_and_means_of_the_domains() -> None:
    first, second, third = SMALL[0], SMALL[1], next(c for c in SMALL if c.domain == MICROSOFT)
    rows = [
        Row(first, {REFERENCE: 1e-6, OURS: 8e-6}),  # which is too short to be listed
        Row(second, {REFERENCE: 40e-6, OURS: 80e-6}),
        Row(third, {REFERENCE: 40e-6}, ["penstock refuses it: a|b"]),
    ]
    lines = page(rows, threads=1, turns=2, busy=0.5)
    text = "\n".join(lines)
    assert "| ai.onnx.ml | 2 | 2 | 0 | 4.000 |" in lines
    assert "| com.microsoft | 1 | 0 | 0 | - |" in lines
    assert "20 us: 1 row." in text
    assert lines.count(rows[1].line) == 2
    assert lines.count(rows[0].line) == 1
    assert "| 40 | - | - | penstock refuses it: a/b |" in rows[2].line


@pytest.mark.costly
def test_command_prints_rows_of_what_is_asked_for() -> None:
    command = [sys.executable, "-m", "bench.operators", "--only", "ExpandDims", "--turns", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| Expand")]
    assert [row[1].partition(":")[0] for row in rows[:3]] == [*SIZES]
    assert all(float(cell) > 0 for row in rows for cell in row[2:5])
    assert "| com.microsoft | 3 | 3 |" in done.stdout


def test_command_names_the_operations_that_there_are() -> None:
    command = [sys.executable, "-m", "bench.operators", "--only", "NoSuchOperation"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "ZipMap" in done.stderr
