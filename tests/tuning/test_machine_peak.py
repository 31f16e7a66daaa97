"""The peak of a machine: of float32, and never below what a step reached."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from penstock.cli.commands import main
from penstock.observers.profile import Profile, StepRow
from penstock.tuning import machine_peak as module
from penstock.tuning.machine_peak import MachinePeak, machine_peak
from tests.support.onnx_text import compile_text, model_from_text

TEXT = "g (float[64, 64] x) => (float[64, 64] y) { y = MatMul(x, x) }"
X = np.ones((64, 64), np.float32)


def row(flops_per_s: float, precision: str = "float32") -> StepRow:
    """A row of a product that runs once, at this speed."""
    profile = Profile()
    compile_text(TEXT, backends=["numpy"]).run({"x": X}, observers=[profile])
    (measured,) = profile.steps()
    facts = replace(measured.facts, precision=precision)
    return replace(measured, facts=facts, seconds=facts.flops / flops_per_s)


def test_peak_is_that_of_one_core_times_the_threads(monkeypatch):
    monkeypatch.setattr(module, "_flops_of_core", lambda: 7e9)
    machine_peak.cache_clear()
    assert [machine_peak(n).flops_per_s for n in (1, 3)] == [7e9, 21e9]
    machine_peak.cache_clear()


def test_peak_is_no_lower_than_the_fastest_step_in_float32():
    peak = MachinePeak(1, 10e9, 1e9)
    rows = [row(5e9), row(12e9), row(90e9, "int8")]
    raised = peak.with_steps(rows)
    assert raised.flops_per_s == pytest.approx(12e9)
    assert raised.share(rows[0]) == pytest.approx(5 / 12)
    assert raised.share(rows[1]) == pytest.approx(1)
    assert raised.share(rows[2]) is None
    assert peak.with_steps([row(1e9)]) == peak


def test_profile_shows_no_step_above_the_peak(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    slow = MachinePeak(1, 1.0, 1.0)  # which any step surpasses
    monkeypatch.setattr("penstock.cli.profile.machine_peak", lambda threads: slow)
    model = tmp_path / "model.onnx"
    onnx.save(model_from_text(TEXT), model)
    result = CliRunner().invoke(
        main, ["profile", str(model), "--no-trace", "--runs", "1", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert max(step["share_of_peak"] for step in found["steps"]) == pytest.approx(1)
    assert found["peak"]["gflops_per_s"] > 1e-9


def test_report_has_no_step_above_the_roof(monkeypatch):
    slow = MachinePeak(1, 1.0, 1.0)
    monkeypatch.setattr("penstock.session.report.machine_peak", lambda threads: slow)
    document = compile_text(TEXT).inspect.report({"x": X}, runs=1).document
    steps = document["steps"]
    assert document["peak"]["flops_per_s"] >= steps["flops"][0] / (steps["seconds"][0] or 1)
