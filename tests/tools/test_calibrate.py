"""Calibration, with a clock that goes on only when a call takes its time."""

from __future__ import annotations

from math import inf

import pytest

from penstock.backends.numpy import NumpyBackend
from penstock.backends.registry import available, backend_of
from penstock.ops.work_estimate import Rates, part_seconds
from tools import calibrate
from tools.calibrate import CASES, Scale, Times, call_of, fastest, node_of, scale_of, scaled


class FakeTime:
    """A clock, and a call that takes some seconds of it."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += self.seconds


@pytest.mark.parametrize("seconds", [1e-7, 3e-5, 2.0])
def test_fastest_is_the_time_of_one_call(seconds):
    time = FakeTime(seconds)
    assert fastest(time.call, time) == pytest.approx(seconds)


def test_fastest_leaves_disturbances_out():
    time = FakeTime(1e-3)

    def call():
        time.call()
        time.seconds = 1e-3 if time.now > 5e-3 else time.seconds * 2

    assert fastest(call, time) == pytest.approx(1e-3)


def test_scales_tell_calls_from_work():
    """A call takes twice as long as the table says, and work three times."""
    small = Times(2 * 1e-6 + 3 * 1e-7, call=1e-6, work=1e-7)
    large = Times(2 * 1e-6 + 3 * 1e-2, call=1e-6, work=1e-2)
    assert scale_of(small, large) == pytest.approx(Scale(2.0, 3.0), rel=1e-3)


def test_scales_of_disturbed_times_are_bounded():
    large = Times(1e-2, call=1e-6, work=1e-2)
    assert scale_of(Times(10.0, 1e-6, 1e-7), large).call == calibrate.MOST
    assert scale_of(Times(0.0, 1e-6, 1e-7), large).call == calibrate.LEAST


def test_families_without_times_have_the_median_scale():
    rates = Rates(1.0, 8.0, 16.0, 32.0, 2.0, 4.0)
    table = {"": rates, "a": rates, "b": rates, "c": rates}
    scales = {"a": Scale(1.0, 2.0), "b": Scale(2.0, 4.0), "c": Scale(3.0, 8.0)}
    fresh = scaled(table, scales)
    assert fresh["a"] == (1.0, 4.0, 8.0, 16.0, 4.0, 8.0)
    assert fresh[""] == fresh["b"] == (2.0, 2.0, 4.0, 8.0, 8.0, 16.0)


def test_infinite_rates_stay_infinite():
    assert scaled({"": Rates(1.0)}, {"": Scale(1.0, 2.0)})[""].bytes_per_s == inf


@pytest.mark.parametrize("name", sorted({"native", "numpy"} & set(available())))
def test_each_case_is_of_its_family_and_has_a_kernel(name):
    backend = backend_of(name)
    for family, case in CASES[name].items():
        for size in (calibrate.SMALL, calibrate.LARGE):
            node = node_of(case, size)
            assert backend.work(node).family == family
            call = call_of(backend, node)
            assert call is not None
            call()


def test_calibrated_rates_predict_the_clock(monkeypatch):
    """With a clock of half of what the table says, calls and work take half as long."""
    backend = NumpyBackend()

    def timed(backend, case, size, clock):
        node = node_of(case, size)
        work = backend.work(node)
        call, busy = backend.rates[work.family].call_s, part_seconds(backend.rates, work)
        return Times((call + busy) / 2, call, busy)

    monkeypatch.setattr(calibrate, "timed", timed)
    costs = calibrate.calibrate(["numpy"])
    for case in CASES["numpy"].values():
        node = node_of(case, 64)
        assert costs.cost(node, backend).seconds == pytest.approx(backend.seconds(node) / 2)
