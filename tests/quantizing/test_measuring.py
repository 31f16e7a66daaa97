"""Errors and times of candidates."""

import math

import numpy as np
import pytest

import penstock as ps
from penstock.quantizing.measuring import FloatReference, seconds_in_turns, step_seconds_of
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
    own = reference.errors(ps.compile(model_from_text(OTHER)))["y"]
    assert own.rms == pytest.approx(0.05)
    assert own.largest == pytest.approx(0.05)
    assert reference.error(ps.compile(model_from_text(OTHER)), None) == pytest.approx(0.05)


def test_error_is_that_of_the_worst_sample(reference):
    text = "g (float[4] x) => (float[4] y) <float f = {1.1}> { y = Mul(x, f) }"
    own = reference.errors(ps.compile(model_from_text(text)))["y"]
    assert own.rms == pytest.approx(0.1 * np.sqrt(np.mean(np.square(DATA[1]))) / 10)
    mean = reference.mean_square(ps.compile(model_from_text(text)))
    assert mean == pytest.approx(np.mean([np.mean((0.1 * x / 10) ** 2) for x in DATA]))


def test_nan_is_an_infinite_error(reference):
    text = "g (float[4] x) => (float[4] y) { a = Neg(x) y = Log(a) }"
    assert reference.error(ps.compile(model_from_text(text)), None) == math.inf


def test_metric_takes_the_outputs_of_all_samples(reference):
    def metric(wanted, outputs):
        return max(
            float(np.abs(a["y"] - b["y"]).max()) for a, b in zip(wanted, outputs, strict=True)
        )

    assert reference.error(ps.compile(model_from_text(OTHER)), metric) == 0.5
    with pytest.raises(ps.InvalidInput, match="not a number"):
        reference.error(ps.compile(model_from_text(OTHER)), lambda a, b: math.nan)
    with pytest.raises(ps.InvalidInput, match="not a number but None"):
        reference.error(ps.compile(model_from_text(OTHER)), lambda a, b: None)


def test_model_without_real_outputs_is_refused():
    text = "g (float[4] x) => (bool[4] y) { y = IsNaN(x) }"
    with pytest.raises(ps.InvalidInput, match="metric="):
        FloatReference.of(ps.compile(model_from_text(text)), samples_of(DATA, ["x"]))


def test_output_without_elements_in_some_samples_has_errors_in_others():
    data = samples_of([np.zeros((0, 2), np.float32), np.float32([[0, 1], [2, 4]])], ["x"])
    text = "g (float[n,2] x) => (float[n,2] y) { y = Identity(x) }"
    reference = FloatReference.of(ps.compile(model_from_text(text)), data)
    text = "g (float[n,2] x) => (float[n,2] y) <float a = {0.5}> { y = Add(x, a) }"
    error = reference.error(ps.compile(model_from_text(text)), None)
    assert error == pytest.approx(0.5 / 4)


def test_infinite_elements_must_stay_and_others_are_compared():
    text = "g (float[4] x) => (float[4] y) { y = Log(x) }"
    data = samples_of([np.float32([0, 1, math.e, -1])], ["x"])
    reference = FloatReference.of(ps.compile(model_from_text(text)), data)
    text = "g (float[4] x) => (float[4] y) <float a = {0.1}> { z = Log(x) y = Add(z, a) }"
    error = reference.error(ps.compile(model_from_text(text)), None)
    assert error == pytest.approx(0.1)
    assert reference.error(ps.compile(model_from_text(FLOAT)), None) == math.inf


def test_seconds_are_of_each_session_and_step():
    sessions = [ps.compile(model_from_text(text)) for text in (FLOAT, OTHER)]
    assert all(s > 0 for s in seconds_in_turns(sessions, {"x": DATA[0]}, 0.01))
    steps = step_seconds_of(ps.compile(model_from_text(OTHER)), {"x": DATA[0]})
    assert [*steps] == [("Add_0",)] and steps["Add_0",] > 0
