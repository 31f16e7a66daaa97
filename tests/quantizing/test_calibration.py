"""Ranges of values, and what of them codes cover."""

import numpy as np
import pytest

import penstock as ps
from penstock.observers.ranges import range_of
from penstock.quantizing.calibration import (
    CLIPPINGS,
    clipped,
    min_max,
    observe,
    reached,
    squared_error,
)
from penstock.quantizing.samples import samples_of
from tests.support.onnx_text import model_from_text

TEXT = "g (float[4] x) => (float[4] y) { a = Neg(x) y = Exp(a) }"


def test_observed_ranges_are_those_of_all_samples():
    session = ps.compile(model_from_text(TEXT))
    data = [np.float32([0, 1, 2, i]) for i in range(5)]
    found = observe(session, ["x", "a"], samples_of(data, ["x"]), {"a": 0})
    assert (found["a"].range.min, found["a"].range.max) == (-4.0, 0.0)
    assert found["x"].elements.size == 20
    assert np.mean(found["a"].means, axis=0).tolist() == [0.0, -1.0, -2.0, -2.0]
    ranges = clipped(found, "min-max")
    assert ranges["a"] == (-ranges["x"].high, 0.0)
    assert ranges["x"].high == pytest.approx(reached(4.0, [2, 2, 2, 3, 4]))


def test_end_that_few_samples_exceed_goes_where_hardly_any_does():
    rng = np.random.default_rng(0)
    for draw in (rng.standard_normal, lambda shape: rng.gamma(2.0, size=shape)):
        known, further = (draw((n, 500)).max(axis=1) for n in (24, 20_000))
        before, after = known.max(), reached(known.max(), [*known])
        assert np.mean(further > before) > 0.01 > 0.005 > np.mean(further > after)
        # An end that many samples exceed has an error that these show.
        end = float(np.median(known))
        assert reached(end, [*known]) == end
    assert reached(6.0, [6.0] * 5) == 6.0  # a bound of the model, such as that of Relu6
    assert reached(2.0, [2.0]) == 2.0 and reached(0.0, [0.0, -1.0]) == 0.0


def test_value_that_is_not_finite_is_refused():
    session = ps.compile(model_from_text(TEXT))
    data = [np.float32([0, 0, 0, -1000])]
    with pytest.raises(ps.InvalidInput, match="sample 0: value 'y' is infinite or NaN"):
        observe(session, ["y"], samples_of(data, ["x"]), {})


def quantization_error(range_, elements):
    codes = np.clip(np.rint(elements / range_.scale) + range_.zero, 0, 255)
    return np.square((codes - range_.zero) * range_.scale - elements).mean()


@pytest.mark.parametrize("name", CLIPPINGS)
def test_clippings_stay_within_the_range_and_hold_zero(name):
    elements = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    range_ = CLIPPINGS[name](range_of(elements), elements)
    assert elements.min() <= range_.low <= 0 <= range_.high <= elements.max()


def test_squared_error_leaves_out_rare_elements():
    elements = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    elements[0] = 20
    whole = range_of(elements)
    best = squared_error(whole, elements)
    assert best.high < 12
    assert quantization_error(best, elements) < 0.8 * quantization_error(
        min_max(whole, elements), elements
    )


def test_values_without_elements_have_a_range():
    empty = np.empty(0, np.float32)
    for choose in CLIPPINGS.values():
        assert choose(range_of(empty), empty) == (0.0, 0.0)
