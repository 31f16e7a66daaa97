"""The benchmark of TFLite's operators: all are in its table, and its models run."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench.operator_rows import slow_rows
from bench.peers import LiteRt
from bench.tables import OURS
from bench.tflite_operator_cases import SIZES, OperatorCase
from bench.tflite_operators import (
    COLUMNS,
    MOST,
    REFERENCE,
    SHORT,
    WITH_OTHERS,
    Row,
    cases,
    differences,
    page,
    parse,
    without_cases,
)
from bench.trial import ROOT

import penstock as ps
from tests.support.sweeps import sweep
from tests.support.tflite_operators import LITERT_LACKS, names

CASES = cases()
SMALL = [case for case in CASES if case.size == "small"]


def name_of(case: OperatorCase) -> str:
    return f"{case.title} {case.type}"


def test_every_operator_with_a_kernel_in_litert_has_cases() -> None:
    operators = {case.operator for case in CASES}
    assert operators | WITH_OTHERS.keys() == {*names(circle=False)} - LITERT_LACKS
    assert not operators & WITH_OTHERS.keys()


def test_every_operator_of_the_schemas_has_rows_or_a_reason() -> None:
    reasons = dict(without_cases())
    operators = {case.operator for case in CASES}
    assert operators | reasons.keys() == {*names(circle=False), *names(circle=True)}
    assert reasons["STABLEHLO_SORT"] == "LiteRT has no kernel"
    assert dict(without_cases(["VAR_H"])) == {"VAR_HANDLE": WITH_OTHERS["VAR_HANDLE"]}


def test_every_case_has_two_sizes_and_a_title_of_its_own() -> None:
    keys = {(case.title, case.type, case.size) for case in CASES}
    assert len(keys) == len(CASES)
    assert keys == {(case.title, case.type, size) for case in SMALL for size in SIZES}


@pytest.mark.parametrize("case", sweep(SMALL, 120), ids=name_of)
def test_small_case_is_run_by_both_engines(case: OperatorCase, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    model, path = case.model(), tmp_path / "case.tflite"
    path.write_bytes(model.file)
    want = LiteRt(1).load(path)(model.feeds)
    got = list(ps.compile(path, threads=1).run(model.feeds).values())
    assert [y.dtype for y in got] == [y.dtype for y in want]


@pytest.mark.parametrize("title", ["CONV_2D", "SOFTMAX", "PAD", "UNIDIRECTIONAL_SEQUENCE_LSTM"])
def test_small_case_of_reals_and_codes_gives_the_answers_of_litert(
    title: str, tmp_path: Path
) -> None:
    pytest.importorskip("ai_edge_litert")
    path = tmp_path / "case.tflite"
    for case in SMALL:
        if case.title == title and case.type in ("float32", "int8"):
            model = case.model()
            path.write_bytes(model.file)
            want = LiteRt(1).load(path)(model.feeds)
            got = list(ps.compile(path, threads=1).run(model.feeds).values())
            assert differences(got, want) is None


def test_differences_tell_rounding_from_other_answers() -> None:
    reals, codes = np.array([1, 2], np.float32), np.array([10, 120], np.int8)
    whole, pairs = np.array([1, 2], np.int32), np.array([1, 2j], np.complex64)
    every = [reals, codes, whole, pairs]
    assert differences(every, every) is None
    assert differences([reals * np.float32(1.0001), codes + 1], [reals, codes]) is None
    assert differences([reals * np.float32(1.01)], [reals]) == "differs by 1.0e-02"
    assert differences([pairs * np.float32(1.01)], [pairs]) == "differs by 1.0e-02"
    steps = differences([codes - np.array([3, 0], np.int8)], [codes])
    assert steps == "differs by up to 3 steps, 1 of 2 by more than one"
    assert differences([whole[::-1]], [whole]) == "differs in 2 of 2 elements"
    assert differences([reals[None]], [reals]) == "differs: float32[1, 2], not float32[2]"


def test_row_names_the_steps_that_run_it() -> None:
    conv = next(case for case in SMALL if case.title == "CONV_2D" and case.type == "int8")
    steps = [("native", "QLinearConv"), ("native", "Relu"), ("native", "Relu"), ("numpy", "Add")]
    row = Row(conv, {REFERENCE: 40e-6, OURS: 80e-6}, steps=steps)
    assert row.runs == "native: QLinearConv, 2 Relu; numpy: Add"
    assert row.line.startswith("| CONV_2D | int8 | small: 8, 8, 8, 3 | 40 | 80 | 2.00 | native: ")
    assert row.line.endswith("| 4 |  |")
    assert Row(conv, {OURS: 1e-6}).runs == "views"
    assert Row(conv, {}, steps=[]).runs == "-"
    assert Row(conv, {OURS: 1e-6}, steps=[("", "If")]).runs == "control flow: If"


def test_page_lists_slow_rows_and_means_of_the_types() -> None:
    first, second, third = [case for case in SMALL if case.type == "float32"][:3]
    rows = [
        Row(first, {REFERENCE: 1e-6, OURS: 8e-6}),  # which is too short to be listed
        Row(second, {REFERENCE: 40e-6, OURS: 80e-6}, steps=[("native", "Add")]),
        Row(third, {REFERENCE: 40e-6}, ["penstock refuses it: a|b"]),
    ]
    assert [row.is_slow for row in rows] == [False, True, False]
    options = parse(["--turns", "2"])
    lines = page(rows, options, busy=0.5)
    assert "| float32 | 3 | 2 | 0 | 4.000 |" in lines
    assert f"{SHORT * 1e6:g} us: 1 row." in "\n".join(lines)
    assert lines.count(rows[1].line) == 2
    assert lines.count(rows[0].line) == 1
    assert rows[2].line.endswith("| - | - | penstock refuses it: a/b |")
    assert slow_rows(rows[:1], "LiteRT", COLUMNS, MOST, SHORT)[-1] == "|" + "---|" * len(COLUMNS)


def test_command_prints_rows_of_what_is_asked_for() -> None:
    pytest.importorskip("ai_edge_litert")
    command = [sys.executable, "-m", "bench.tflite", "--operators", "--turns", "1", "--only"]
    done = subprocess.run(
        [*command, "FAKE_QUANT", "CALL_ONCE"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| FAKE")]
    assert [row[2].partition(":")[0] for row in rows[:2]] == [*SIZES]
    assert all(math.isfinite(float(cell)) for row in rows for cell in row[3:6])
    assert "| float32 | 2 | 2 |" in done.stdout
    assert f"| CALL_ONCE | {WITH_OTHERS['CALL_ONCE']} |" in done.stdout


def test_command_names_the_operators_that_there_are() -> None:
    command = [sys.executable, "-m", "bench.tflite", "--operators", "--only", "NO_SUCH_OPERATOR"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "ZEROS_LIKE" in done.stderr
