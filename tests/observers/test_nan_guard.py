"""The observer that ends a run at the first NaN."""

from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import RunError
from penstock.core.types import dtypes
from penstock.observers.base import ObservedRun
from penstock.observers.nan_guard import NanGuard
from penstock.ops.internal.fused import fused
from penstock.plan.plan import Plan
from tests.observers.test_trace import drive, planned
from tests.support.onnx_text import compile_text
from tests.support.traces import ROOTS, SQUARES, observe


def guarded(plan: Plan, *feeds: object, infinities: bool = False) -> str:
    """The message that the guard ends a run with."""
    guard = NanGuard(infinities=infinities)
    with pytest.raises(RunError) as caught:
        drive(plan, guard, *feeds)
    assert not guard._runs
    return str(caught.value)


def test_nan_guard_names_step_that_computes_nan():
    #  x -> Neg -> Sqrt -> Add: Sqrt of negative numbers
    plan = planned("g (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) b = Sqrt(a) y = Add(b, x) }")
    drive(plan, NanGuard(), -SQUARES)
    (sqrt,) = [step for step in plan.steps if step.node.op.name == "Sqrt"]
    assert guarded(plan, SQUARES) == (
        f"Sqrt ({sqrt.node.label}) makes NaN: output 'b', float32[2, 3] from 0 to 0, holds NaN in "
        "5 of its 6 elements, first at [0, 1], while its inputs hold none: "
        "'a', float32[2, 3] from -25 to 0"
    )


def test_nan_guard_reports_index_of_scalar():
    message = guarded(planned("g (float x) => (float y) { y = Log(x) }"), np.float32(-1))
    assert "1 of its 1 elements, first at []" in message


def test_nan_guard_ignores_infinity_by_default():
    plan = planned("g (float[2] x) => (float[2] y) { a = Reciprocal(x) y = Neg(a) }")
    zeros = np.array([1, 0], np.float32)
    drive(plan, NanGuard(), zeros)
    message = guarded(plan, zeros, infinities=True)
    assert "makes NaN or infinity: output 'a'" in message
    assert "first at [1]" in message
    assert repr(NanGuard(infinities=True)) == "NanGuard(infinities=True)"


def test_nan_guard_names_nan_from_infinities():
    plan = planned("g (float[2] x) => (float[2] y) { a = Reciprocal(x) y = Sub(a, a) }")
    message = guarded(plan, np.array([1, 0], np.float32))
    assert message.startswith("Sub (")
    assert "while its inputs hold none: 'a', float32[2] from 1 to 1 with 1 infinite" in message


def test_nan_guard_names_fed_input_as_source():
    plan = planned(ROOTS)
    x = SQUARES.copy()
    x[1, 2] = np.nan
    message = guarded(plan, x)
    assert message.startswith(
        "input 'x' of the model holds NaN in 1 of its 6 elements, first at [1, 2]: Abs ("
    )
    assert "hands it on, and output 'a'" in message


def test_nan_guard_names_constant_as_source():
    plan = planned(
        "g (float[2] x) => (float[2] y) <float[2] k = {1, 2}> { a = Exp(x) y = Mul(a, k) }"
    )
    (k,) = [slot for slot in plan.slots if slot.name == "k"]
    broken = k.const.copy()
    broken[1] = np.nan
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    guard.run_begin(run)
    mul = plan.steps[-1]
    ones = np.ones(2, np.float32)
    guard.step_begin(run, mul, [broken if plan.slots[i].name == "k" else ones for i in mul.inputs])
    with pytest.raises(RunError, match=r"^constant 'k' holds NaN in 1 of its 2 elements"):
        guard.step_end(run, mul, [broken])


def test_nan_guard_accepts_nan_that_is_not_passed_on():
    plan = planned(
        "g (float[2] x) => (float[2] y) <float z = {0}> { m = IsNaN(x) y = Where(m, z, x) }"
    )
    drive(plan, NanGuard(), np.array([1, np.nan], np.float32))


def test_nan_guard_traces_nan_in_loop_to_fed_input():
    plan = planned(
        """g (float[2] x, int64 n) => (float[2] y) {
            y = Loop (n, , x) <body = b (int64 i, bool g, float[2] v) => (bool d, float[2] w)
                { d = Identity(g) w = Neg(v) }> }"""
    )
    message = guarded(plan, np.array([np.nan, 1], np.float32), np.array(2))
    assert message.startswith("input 'x' of the model holds NaN")
    assert "output 'w'" in message


def test_nan_guard_names_value_of_unknown_source():
    plan = planned(ROOTS)
    sqrt = plan.steps[1]
    bad = np.array([np.nan], np.float32)
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    guard.run_begin(run)
    guard.step_begin(run, sqrt, [bad])
    with pytest.raises(RunError, match=r"^value 'a' holds NaN in 1 of its 1 elements"):
        guard.step_end(run, sqrt, [bad])


def test_nan_guard_finds_nan_in_sequence():
    plan = planned("g (seq(float[2]) s) => (float[2] y) <int64 i = {1}> { y = SequenceAt(s, i) }")
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    guard.run_begin(run)
    (step,) = plan.steps
    bad = np.array([0, np.nan], np.float32)
    guard.step_begin(run, step, [[np.zeros(2, np.float32), bad], np.array(1)])
    with pytest.raises(RunError, match=r"^input 's' of the model holds NaN in 1 of its 4 elements"):
        guard.step_end(run, step, [bad])


def test_nan_guard_inspects_inputs_before_in_place_step():
    plan = planned("g (float[2] x) => (float[2] y) { a = Neg(x) b = Sqrt(a) y = Neg(b) }")
    sqrt = plan.steps[1]
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    memory = np.array([-4, 4], np.float32)
    guard.run_begin(run)
    guard.step_begin(run, sqrt, [memory])
    with np.errstate(invalid="ignore"):
        np.sqrt(memory, memory)
    with pytest.raises(RunError, match=r"inputs hold none: 'a', float32\[2\] from -4 to 4$"):
        guard.step_end(run, sqrt, [memory])


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "float8_e4m3fn", "complex64"])
def test_nan_guard_finds_nan_of_every_dtype(dtype):
    values = np.array([1, np.nan, 1]).astype(dtypes()[dtype])
    with pytest.raises(RunError, match=r"first at \[1\]"):
        observe(NanGuard(), values)


@pytest.mark.parametrize("dtype", sorted(dtypes()))
def test_nan_guard_accepts_values_without_nan(dtype):
    values = np.array(["a"], object) if dtype == "string" else np.ones(3).astype(dtypes()[dtype])
    assert observe(NanGuard(infinities=True), values, values[:0], None, [values]) == 4


def test_nan_guard_keeps_concurrent_runs_apart():
    plan = planned(ROOTS)
    guard = NanGuard()
    start = threading.Barrier(4)
    failed: list[str] = []

    def work(bad: bool) -> None:
        x = np.where(bad, np.nan, SQUARES).astype(np.float32)
        start.wait()
        for _ in range(20):
            try:
                drive(plan, guard, x)
            except RunError as error:
                failed.append(str(error))

    workers = [threading.Thread(target=work, args=(i == 0,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(failed) == 20
    assert all("input 'x' of the model" in message for message in failed)
    assert not guard._runs


def fused_session() -> ps.Session:
    """x -> MatMul -> Relu -> Sub -> Sqrt, one step on the default backends."""
    session = compile_text(
        "g (float[4, 4] x) => (float[4, 4] y) <float[4, 4] w = {"
        + ", ".join(["1"] * 16)
        + "}, float one = {1}> { a = MatMul(x, w) b = Relu(a) c = Sub(b, one) y = Sqrt(c) }"
    )
    assert len(session.inspect.plan.steps) == 1
    return session


def test_nan_guard_names_operation_inside_of_fused_step():
    with pytest.raises(RunError) as caught:
        fused_session().run({"x": np.zeros((4, 4), np.float32)}, observers=[NanGuard()])
    message = str(caught.value)
    assert re.match(r"Sqrt \(\S+.*\), fused with MatMul \(.*\), Relu \(.*\), Sub \(.*\), ", message)
    assert message.endswith(
        "makes NaN: output 'y', float32[4, 4], holds NaN in 16 of its 16 elements, first at "
        "[0, 0], while its inputs hold none: 'c', float32[4, 4] from -1 to -1"
    )
    assert caught.value.operation == "Sqrt"
    assert caught.value.inputs == ("c: float32[4, 4] from -1 to -1",)


def test_nan_guard_names_all_operations_of_fused_step_that_hands_nan_on():
    x = np.ones((4, 4), np.float32)
    x[1, 2] = np.nan
    with pytest.raises(RunError, match=r"^input 'x' of the model holds NaN in 1 .*: MatMul \(.*"):
        fused_session().run({"x": x}, observers=[NanGuard()])


def test_nan_guard_names_all_operations_if_none_makes_nan_on_numpy():
    plan = planned("g (float[2] x) => (float[2] y) { a = Abs(x) y = Sqrt(a) }")
    (first, second) = [step.node for step in plan.steps]
    node = fused([first, second])
    node.outputs[0].type = first.inputs[0].type
    guard, run = NanGuard(), ObservedRun(plan, "driven")
    step = dataclasses.replace(plan.steps[1], node=node, inputs=plan.steps[0].inputs)
    guard.run_begin(run)
    guard.step_begin(run, step, [np.ones(2, np.float32)])
    with pytest.raises(RunError, match=r"^Abs \(.*\) \+ Sqrt \(.*\) makes NaN: output 'y'"):
        guard.step_end(run, step, [np.array([1, np.nan], np.float32)])
