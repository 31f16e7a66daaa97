"""The observer that records ranges of values, and its files."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.core.types import dtypes
from penstock.observers.base import ObservedRun, Observers
from penstock.observers.nan_guard import NanGuard
from penstock.observers.ranges import Range, Ranges
from tests.observers.test_trace import drive, planned
from tests.support.sweeps import examples
from tests.support.traces import ROOTS, SQUARES, observe


def seen(*outputs: object) -> Range | None:
    ranges = Ranges()
    observe(ranges, *outputs)
    return ranges.ranges.get("y")


# Ranges.


def test_ranges_cover_every_value():
    ranges = Ranges()
    drive(planned(ROOTS), ranges, -SQUARES)
    assert ranges.ranges == {
        "x": Range(-25, 0, 1),
        "a": Range(0, 25, 1),
        "b": Range(0, 5, 1),
        "y": Range(-5, 0, 1),
    }
    assert list(ranges.ranges) == ["x", "a", "b", "y"]
    drive(planned(ROOTS), ranges, 4 * SQUARES)
    assert ranges.ranges["x"] == Range(-25, 100, 2)
    assert ranges.ranges["y"] == Range(-10, 0, 2)
    assert repr(ranges) == "Ranges(4 values)"


def test_ranges_count_an_input_once_per_run():
    ranges = Ranges()
    plan = planned(
        "g (float[2] x) => (float[2] y) { a = Exp(x) b = Sin(x) c = Add(x, b) y = Mul(a, c) }"
    )
    drive(plan, ranges, np.ones(2, np.float32))
    assert ranges.ranges["x"].count == 1


def test_ranges_count_values_in_loops_per_iteration():
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
def test_ranges_support_every_dtype(dtype):
    kind = dtypes()[dtype]
    if dtype == "string":
        values = np.array(["0", "1"], object)
    else:
        values = np.array([1, 0, 1]).astype(kind)
    result = seen(values)
    if dtype in ("string", "bool", "complex64", "complex128"):
        assert result is None
    elif dtype == "float8_e8m0fnu":  # which has no zero
        assert result == Range(1, 1, 1, nonfinite=1)
    else:
        assert result == Range(0, 1, 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_ranges_count_nonfinite_elements_apart(dtype):
    values = np.array([[np.nan, 2, -np.inf], [-1, np.inf, np.nan]]).astype(dtypes()[dtype])
    assert seen(values) == Range(-1, 2, 1, nonfinite=4)
    assert seen(values, values) == Range(-1, 2, 2, nonfinite=8)
    assert seen(values[:, :1].T[:, :1]) == Range(math.inf, -math.inf, 1, nonfinite=1)


def test_range_of_empty_tensor_is_empty():
    assert seen(np.empty((0, 3), np.float32)) == Range(count=1)
    assert seen(np.empty((0,), np.int8), np.array([3], np.int8)) == Range(3, 3, 2)


def test_sequences_and_none_have_no_range():
    assert seen([np.ones(2)], None) is None


def test_range_of_int4_is_that_of_its_values():
    values = np.array([-8, 7, 3]).astype(dtypes()["int4"])
    assert seen(values) == Range(-8, 7, 1)


@examples(3)
@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        arrays.array_shapes(min_dims=0, min_side=0, max_side=4),
    )
)
def test_range_is_that_of_finite_elements(values):
    finite = values[np.isfinite(values)]
    want = Range(count=1, nonfinite=values.size - finite.size)
    if finite.size:
        want |= Range(float(finite.min()), float(finite.max()))
    assert seen(values) == want


def test_ranges_count_concurrent_runs():
    plan = planned(ROOTS)
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
    assert {result.count for result in ranges.ranges.values()} == {80}


def test_ranges_update_merges():
    a, b = Ranges(), Ranges()
    observe(a, np.array([1.0, np.nan]))
    observe(b, np.array([-3.0]), np.array([2.0]))
    a.update(b)
    a.update({"y": Range(0, 9, 1), "z": Range(0, 1, 5)})
    assert a.ranges["y"] == Range(-3, 9, 4, nonfinite=1)
    assert a.ranges["z"] == Range(0, 1, 5)
    assert b.ranges["y"] == Range(-3, 2, 2)


def test_ranges_keep_no_array():
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
def test_saved_ranges_are_loaded(tmp_path, suffix):
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


def test_ranges_json_has_no_infinity(tmp_path):
    ranges = Ranges()
    observe(ranges, np.array([np.nan]))
    ranges.save(tmp_path / "ranges.json")
    content = json.loads((tmp_path / "ranges.json").read_text(), parse_constant=pytest.fail)
    assert content["ranges"]["y"] == {"min": None, "max": None, "count": 1, "nonfinite": 1}


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_empty_ranges_are_saved_and_loaded(tmp_path, suffix):
    Ranges().save(tmp_path / f"none{suffix}")
    assert Ranges.load(tmp_path / f"none{suffix}").ranges == {}


@pytest.mark.parametrize("name", ["ranges", "ranges.txt", "ranges.json.gz"])
def test_ranges_with_other_suffix_are_refused(tmp_path, name):
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
def test_ranges_file_of_other_format_is_refused(tmp_path, suffix, content):
    path = tmp_path / f"bad{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="does not hold ranges"):
        Ranges.load(path)


def test_truncated_ranges_file_is_refused(tmp_path):
    ranges = Ranges()
    observe(ranges, np.array([1.0]))
    path = tmp_path / "ranges.npz"
    ranges.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="does not hold ranges"):
            Ranges.load(path)


def test_ranges_file_with_object_arrays_is_refused(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, names=np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="does not hold ranges"):
        Ranges.load(path)


def test_missing_ranges_file_raises_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Ranges.load(tmp_path / "none.npz")
