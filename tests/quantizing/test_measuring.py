"""Errors and times of candidates."""

import math
from dataclasses import replace

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.measuring import (
    FloatReference,
    error_limit,
    seconds_in_turns,
    step_seconds_of,
)
from penstock.quantizing.samples import samples_of
from tests.support.onnx_text import model_from_text

FLOAT = "g (float[4] x) => (float[4] y) { y = Identity(x) }"
OTHER = "g (float[4] x) => (float[4] y) <float a = {0.5}> { y = Add(x, a) }"
DATA = [np.float32([0, 1, 2, 3]), np.float32([4, 5, 6, 10])]


@pytest.fixture
def reference():
    return FloatReference.of(ps.compile(model_from_text(FLOAT)), samples_of(DATA, ["x"]))


def test_error_is_a_share_of_the_spread_over_all_samples(reference):
    assert reference.spreads == {"y": 10.0}
    session = ps.compile(model_from_text(OTHER))
    own = reference.largest_errors(session)["y"]
    assert own.rms == pytest.approx(0.05)
    assert own.largest == pytest.approx(0.05)
    assert reference.rms(session) == pytest.approx([0.05, 0.05])


def test_error_is_that_of_the_worst_sample(reference):
    text = "g (float[4] x) => (float[4] y) <float f = {1.1}> { y = Mul(x, f) }"
    own = reference.largest_errors(ps.compile(model_from_text(text)))["y"]
    assert own.rms == pytest.approx(0.1 * np.sqrt(np.mean(np.square(DATA[1]))) / 10)
    mean = reference.mean_square(ps.compile(model_from_text(text)))
    assert mean == pytest.approx(np.mean([np.mean((0.1 * x / 10) ** 2) for x in DATA]))


def test_nan_is_an_infinite_error(reference):
    text = "g (float[4] x) => (float[4] y) { a = Neg(x) y = Log(a) }"
    assert reference.rms(ps.compile(model_from_text(text))) == [math.inf] * 2


def test_metric_takes_the_outputs_of_all_samples(reference):
    def metric(wanted, outputs):
        assert len(wanted) == len(outputs) == 2
        return max(
            float(np.abs(a["y"] - b["y"]).max()) for a, b in zip(wanted, outputs, strict=True)
        )

    def measured(metric):
        return replace(reference, metric=metric).measured(ps.compile(model_from_text(OTHER)))

    assert measured(metric) == 0.5
    with pytest.raises(ps.InvalidInput, match="not a number"):
        measured(lambda a, b: math.nan)
    with pytest.raises(ps.InvalidInput, match="not a number but None"):
        measured(lambda a, b: None)


def test_error_limit_is_exceeded_by_one_in_a_hundred_further_errors():
    rng = np.random.default_rng(0)
    # Of exponential tails it is exact; those of the others are lighter, so that it is more.
    draws = {
        "exponential": lambda shape: rng.exponential(size=shape),
        "normal": lambda shape: np.maximum(10 + rng.standard_normal(shape), 0),
        "uniform": lambda shape: rng.random(shape),
    }
    shares = {}
    for name, draw in draws.items():
        known, further = draw((4000, 24)), draw((4000, 50))
        limits = np.array([error_limit(own, 0.01) for own in known])
        assert (limits >= known.max(axis=1)).all()
        shares[name] = np.mean(further > limits[:, None])
    assert 0.005 < shares["exponential"] < 0.012
    assert 0 < shares["normal"] < 0.01 and shares["uniform"] < 0.005


def test_error_limit_of_few_equal_or_infinite_errors():
    assert error_limit([0.1, 0.3, 0.2]) == 0.3
    assert error_limit([0.2] * 24) == pytest.approx(0.2)
    assert error_limit([0.1] * 24 + [math.inf]) == math.inf


def test_model_without_real_outputs_is_refused():
    text = "g (float[4] x) => (bool[4] y) { y = IsNaN(x) }"
    session, samples = ps.compile(model_from_text(text)), samples_of(DATA, ["x"])
    with pytest.raises(ps.InvalidInput, match="metric="):
        FloatReference.of(session, samples)
    # A metric compares whatever there is.
    own = FloatReference.of(session, samples, lambda wanted, outputs: 0.5)
    assert own.measured(session) == 0.5 and own.mean_square(session) == 0.25


def test_sample_that_does_not_fit_is_named():
    samples = samples_of([DATA[0], DATA[1].astype(np.float64)], ["x"])
    with pytest.raises(ps.InvalidInput, match="sample 1: input 'x' must be float32"):
        FloatReference.of(ps.compile(model_from_text(FLOAT)), samples)


def test_output_without_elements_in_some_samples_has_errors_in_others():
    data = samples_of([np.zeros((0, 2), np.float32), np.float32([[0, 1], [2, 4]])], ["x"])
    text = "g (float[n,2] x) => (float[n,2] y) { y = Identity(x) }"
    reference = FloatReference.of(ps.compile(model_from_text(text)), data)
    text = "g (float[n,2] x) => (float[n,2] y) <float a = {0.5}> { y = Add(x, a) }"
    assert max(reference.rms(ps.compile(model_from_text(text)))) == pytest.approx(0.5 / 4)


def test_infinite_elements_must_stay_and_others_are_compared():
    text = "g (float[4] x) => (float[4] y) { y = Log(x) }"
    data = samples_of([np.float32([0, 1, math.e, -1])], ["x"])
    reference = FloatReference.of(ps.compile(model_from_text(text)), data)
    text = "g (float[4] x) => (float[4] y) <float a = {0.1}> { z = Log(x) y = Add(z, a) }"
    assert max(reference.rms(ps.compile(model_from_text(text)))) == pytest.approx(0.1)
    assert reference.rms(ps.compile(model_from_text(FLOAT))) == [math.inf]


def test_seconds_are_of_each_session_and_step():
    sessions = [ps.compile(model_from_text(text)) for text in (FLOAT, OTHER)]
    assert all(s > 0 for s in seconds_in_turns(sessions, {"x": DATA[0]}, 0.01))
    steps = step_seconds_of(ps.compile(model_from_text(OTHER)), {"x": DATA[0]})
    assert [*steps] == [("Add_0",)] and steps["Add_0",] > 0
