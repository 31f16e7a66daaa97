"""Observers of values: the ranges they record, and the NaN they stop at."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.errors import RunError
from penstock.observers.base import ObservedRun, Observer, Observers
from penstock.observers.values import NanGuard, Range, Ranges
from penstock.plan.plan import Plan
from penstock.types import dtypes
from tests.observers.test_trace import drive, planned

CHAIN = "g (float[2, 3] x) => (float[2, 3] y) { a = Abs(x) b = Sqrt(a) y = Neg(b) }"
SQUARES = np.array([[0, 1, 4], [9, 16, 25]], np.float32)


def observe(observer: Observer, *outputs: object) -> None:
    """Let ``observer`` see ``outputs`` as values of y, one run after the other."""
    plan = planned("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    (step,) = plan.steps
    for output in outputs:
        run = ObservedRun(plan, "driven")
        observer.run_begin(run)
        observer.step_begin(run, step, [np.zeros(1, np.float32)])
        observer.step_end(run, step, [output])
        observer.run_end(run, None)


def seen(*outputs: object) -> Range | None:
    ranges = Ranges()
    observe(ranges, *outputs)
    return ranges.ranges.get("y")


# Ranges.


def test_every_value_has_a_range():
    ranges = Ranges()
    drive(planned(CHAIN), ranges, -SQUARES)
    assert ranges.ranges == {
        "x": Range(-25, 0, 1),
        "a": Range(0, 25, 1),
        "b": Range(0, 5, 1),
        "y": Range(-5, 0, 1),
    }
    assert list(ranges.ranges) == ["x", "a", "b", "y"]
    drive(planned(CHAIN), ranges, 4 * SQUARES)
    assert ranges.ranges["x"] == Range(-25, 100, 2)
    assert ranges.ranges["y"] == Range(-10, 0, 2)
    assert repr(ranges) == "Ranges(4 values)"


def test_an_input_counts_once_a_run_whoever_reads_it():
    ranges = Ranges()
    plan = planned(
        "g (float[2] x) => (float[2] y) { a = Exp(x) b = Sin(x) c = Add(x, b) y = Mul(a, c) }"
    )
    drive(plan, ranges, np.ones(2, np.float32))
    assert ranges.ranges["x"].count == 1


def test_values_in_loops_are_observed_in_each_iteration():
    plan = planned(
        """g (float[1] x, int64 n) => (float[1] y) {
            y = Loop (n, , x) <body = b (int64 i, bool g, float[1] v) => (bool d, float[1] w)
                { d = Identity(g) w = Add(v, x) }> }"""
    )
    ranges = Ranges()
    drive(plan, ranges, np.ones(1, np.float32), np.array(4))
    assert ranges.ranges["w"] == Range(2, 5, 4)
    assert ranges.ranges["x"] == Range(1, 1, 1)
    assert ranges.ranges["n"] == Range(4, 4, 1)
    assert ranges.ranges["y"] == Range(5, 5, 1)


@pytest.mark.parametrize("dtype", sorted(dtypes()))
def test_ranges_of_every_dtype(dtype):
    kind = dtypes()[dtype]
    if dtype == "string":
        values = np.array(["0", "1"], object)
    else:
        values = np.array([1, 0, 1]).astype(kind)
    found = seen(values)
    if dtype in ("string", "bool", "complex64", "complex128"):
        assert found is None
    elif dtype == "float8_e8m0fnu":  # which has no zero
        assert found == Range(1, 1, 1, nonfinite=1)
    else:
        assert found == Range(0, 1, 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_what_is_not_finite_is_counted_and_left_out(dtype):
    values = np.array([[np.nan, 2, -np.inf], [-1, np.inf, np.nan]]).astype(dtypes()[dtype])
    assert seen(values) == Range(-1, 2, 1, nonfinite=4)
    assert seen(values, values) == Range(-1, 2, 2, nonfinite=8)
    assert seen(values[:, :1].T[:, :1]) == Range(math.inf, -math.inf, 1, nonfinite=1)


def test_empty_tensors_have_ranges_of_nothing():
    assert seen(np.empty((0, 3), np.float32)) == Range(count=1)
    assert seen(np.empty((0,), np.int8), np.array([3], np.int8)) == Range(3, 3, 2)


def test_sequences_and_nothing_have_no_ranges():
    assert seen([np.ones(2)], None) is None


def test_int4_ranges_are_those_of_its_values():
    values = np.array([-8, 7, 3]).astype(dtypes()["int4"])
    assert seen(values) == Range(-8, 7, 1)


@settings(max_examples=200)
@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        arrays.array_shapes(min_dims=0, min_side=0, max_side=4),
    )
)
def test_ranges_are_those_of_the_finite_elements(values):
    finite = values[np.isfinite(values)]
    want = Range(count=1, nonfinite=values.size - finite.size)
    if finite.size:
        want |= Range(float(finite.min()), float(finite.max()))
    assert seen(values) == want


def test_runs_at_once_are_all_counted():
    plan = planned(CHAIN)
    ranges = Ranges()
    start = threading.Barrier(4)

    def work(scale: int) -> None:
        start.wait()
        for _ in range(20):
            drive(plan, ranges, scale * SQUARES)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert ranges.ranges["x"] == Range(0, 75, 80)
    assert {found.count for found in ranges.ranges.values()} == {80}


def test_ranges_are_merged():
    a, b = Ranges(), Ranges()
    observe(a, np.array([1.0, np.nan]))
    observe(b, np.array([-3.0]), np.array([2.0]))
    a.update(b)
    a.update({"y": Range(0, 9, 1), "z": Range(0, 1, 5)})
    assert a.ranges["y"] == Range(-3, 9, 4, nonfinite=1)
    assert a.ranges["z"] == Range(0, 1, 5)
    assert b.ranges["y"] == Range(-3, 2, 2)


def test_no_array_is_kept():
    values = np.ones(4, np.float32)
    ranges, guard = Ranges(), NanGuard()
    plan = planned("g (float[4] x) => (float[4] y) { y = Neg(x) }")
    run = ObservedRun(plan, "driven")
    both = Observers([ranges, guard])
    both.run_begin(run)
    both.step_begin(run, plan.steps[0], [values])
    both.step_end(run, plan.steps[0], [values])
    values[:] = np.nan
    both.run_end(run, None)
    assert ranges.ranges == {"x": Range(1, 1, 1), "y": Range(1, 1, 1)}
    assert not ranges._unread
    assert not guard._runs


# Files of ranges.


@pytest.mark.parametrize("suffix", [".json", ".npz", ".JSON", ".NPZ"])
def test_what_is_saved_is_loaded(tmp_path, suffix):
    ranges = Ranges()
    wanted = {
        "x": Range(-1.5, 1e300, 3, 7),
        "nothing": Range(count=2, nonfinite=8),
        'é "\n\0': Range(0, 0.1, 1),
        "": Range(-5, -5, 2**40),
    }
    ranges.update(wanted)
    path = tmp_path / f"ranges{suffix}"
    ranges.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [f"ranges{suffix}"]
    loaded = Ranges.load(str(path))
    assert loaded.ranges == wanted
    observe(loaded, np.array([2.0]))
    assert loaded.ranges["y"] == Range(2, 2, 1)
    loaded.update(ranges)
    assert loaded.ranges["nothing"] == Range(count=4, nonfinite=16)


def test_json_of_ranges_is_json(tmp_path):
    ranges = Ranges()
    observe(ranges, np.array([np.nan]))
    ranges.save(tmp_path / "ranges.json")
    content = json.loads((tmp_path / "ranges.json").read_text(), parse_constant=pytest.fail)
    assert content["ranges"]["y"] == {"min": None, "max": None, "count": 1, "nonfinite": 1}


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_no_ranges_are_saved_and_loaded(tmp_path, suffix):
    Ranges().save(tmp_path / f"none{suffix}")
    assert Ranges.load(tmp_path / f"none{suffix}").ranges == {}


@pytest.mark.parametrize("name", ["ranges", "ranges.txt", "ranges.json.gz"])
def test_other_files_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"ends in \.json or \.npz"):
        Ranges().save(tmp_path / name)
    with pytest.raises(ValueError, match=r"ends in \.json or \.npz"):
        Ranges.load(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "other", "ranges": {}}',
        b'{"format": "penstock ranges 1", "ranges": []}',
        b'{"format": "penstock ranges 1", "ranges": {"x": 1}}',
        b'{"format": "penstock ranges 1", "ranges": {"x": {"min": 1, "max": 2, "count": 1}}}',
        b'{"format": "penstock ranges 1", "ranges": {"x": {"min": "a", "max": 2, "count": 1, "nonfinite": 0}}}',
        b'{"format": "penstock ranges 1", "ranges": {"x": {"min": NaN, "max": 2, "count": 1, "nonfinite": 0}}}',
        b'{"format": "penstock ranges 1", "ranges": {"x": {"min": 0, "max": 1'
        + b"0" * 400
        + b', "count": 1, "nonfinite": 0}}}',
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_files_of_other_kinds_are_refused(tmp_path, suffix, content):
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not hold ranges"):
        Ranges.load(path)


def test_half_a_file_is_refused(tmp_path):
    ranges = Ranges()
    observe(ranges, np.array([1.0]))
    path = tmp_path / "ranges.npz"
    ranges.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="does not hold ranges"):
            Ranges.load(path)


def test_arrays_of_objects_are_not_read(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, names=np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="does not hold ranges"):
        Ranges.load(path)


def test_a_file_that_is_not_there_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        Ranges.load(tmp_path / "none.npz")


# The guard.


def guarded(plan: Plan, *feeds: object, infinities: bool = False) -> str:
    """The message that the guard ends a run with."""
    guard = NanGuard(infinities=infinities)
    with pytest.raises(RunError) as caught:
        drive(plan, guard, *feeds)
    assert not guard._runs
    return str(caught.value)


def test_the_step_that_makes_nan_is_named():
    #  x -> Neg -> Sqrt -> Add: Sqrt of negative numbers
    plan = planned("g (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) b = Sqrt(a) y = Add(b, x) }")
    drive(plan, NanGuard(), -SQUARES)
    (sqrt,) = [step for step in plan.steps if step.node.op.name == "Sqrt"]
    assert guarded(plan, SQUARES) == (
        f"Sqrt ({sqrt.node.label}) makes NaN: output 'b', float32[2, 3] from 0 to 0, holds NaN in "
        "5 of its 6 elements, first at [0, 1], while its inputs hold none: "
        "'a', float32[2, 3] from -25 to 0"
    )


def test_scalars_have_a_place_too():
    message = guarded(planned("g (float x) => (float y) { y = Log(x) }"), np.float32(-1))
    assert "1 of its 1 elements, first at []" in message


def test_infinities_are_of_interest_only_if_asked_for():
    plan = planned("g (float[2] x) => (float[2] y) { a = Reciprocal(x) y = Neg(a) }")
    zeros = np.array([1, 0], np.float32)
    drive(plan, NanGuard(), zeros)
    message = guarded(plan, zeros, infinities=True)
    assert "makes NaN or infinity: output 'a'" in message
    assert "first at [1]" in message
    assert repr(NanGuard(infinities=True)) == "NanGuard(infinities=True)"


def test_infinity_minus_infinity_is_named_although_infinity_was_there():
    plan = planned("g (float[2] x) => (float[2] y) { a = Reciprocal(x) y = Sub(a, a) }")
    message = guarded(plan, np.array([1, 0], np.float32))
    assert message.startswith("Sub (")
    assert "while its inputs hold none: 'a', float32[2] from 1 to 1 with 1 infinite" in message


def test_nan_that_was_fed_is_said_to_have_been_fed():
    plan = planned(CHAIN)
    x = SQUARES.copy()
    x[1, 2] = np.nan
    message = guarded(plan, x)
    assert message.startswith(
        "input 'x' of the model holds NaN in 1 of its 6 elements, first at [1, 2]: Abs ("
    )
    assert "hands it on, and output 'a'" in message


def test_nan_in_constants_is_named():
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


def test_nan_that_goes_no_further_is_no_error():
    plan = planned(
        "g (float[2] x) => (float[2] y) <float z = {0}> { m = IsNaN(x) y = Where(m, z, x) }"
    )
    drive(plan, NanGuard(), np.array([1, np.nan], np.float32))


def test_nan_that_reaches_a_loop_is_traced_to_what_was_fed():
    plan = planned(
        """g (float[2] x, int64 n) => (float[2] y) {
            y = Loop (n, , x) <body = b (int64 i, bool g, float[2] v) => (bool d, float[2] w)
                { d = Identity(g) w = Neg(v) }> }"""
    )
    message = guarded(plan, np.array([np.nan, 1], np.float32), np.array(2))
    assert message.startswith("input 'x' of the model holds NaN")
    assert "output 'w'" in message


def test_nan_of_unknown_source_is_said_to_have_been_there():
    plan = planned(CHAIN)
    sqrt = plan.steps[1]
    bad = np.array([np.nan], np.float32)
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    guard.run_begin(run)
    guard.step_begin(run, sqrt, [bad])
    with pytest.raises(RunError, match=r"^value 'a' holds NaN in 1 of its 1 elements"):
        guard.step_end(run, sqrt, [bad])


def test_nan_in_a_sequence_is_found():
    plan = planned("g (seq(float[2]) s) => (float[2] y) <int64 i = {1}> { y = SequenceAt(s, i) }")
    run = ObservedRun(plan, "driven")
    guard = NanGuard()
    guard.run_begin(run)
    (step,) = plan.steps
    bad = np.array([0, np.nan], np.float32)
    guard.step_begin(run, step, [[np.zeros(2, np.float32), bad], np.array(1)])
    with pytest.raises(RunError, match=r"^input 's' of the model holds NaN in 1 of its 4 elements"):
        guard.step_end(run, step, [bad])


def test_an_input_that_its_step_overwrites_was_looked_at_before():
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
def test_nan_of_every_kind_is_found(dtype):
    values = np.array([1, np.nan, 1]).astype(dtypes()[dtype])
    with pytest.raises(RunError, match=r"first at \[1\]"):
        observe(NanGuard(), values)


@pytest.mark.parametrize("dtype", sorted(dtypes()))
def test_what_holds_no_nan_passes(dtype):
    values = np.array(["a"], object) if dtype == "string" else np.ones(3).astype(dtypes()[dtype])
    observe(NanGuard(infinities=True), values, values[:0], None, [values])


def test_runs_at_once_are_guarded_apart():
    plan = planned(CHAIN)
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
