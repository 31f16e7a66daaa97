"""The error of outputs, as a share of their spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.tuning.output_error import output_error, spreads_of


def test_spread_is_over_all_samples_and_of_comparable_outputs_alone() -> None:
    outputs = [
        {
            "y": np.array([1.0, 2.0]),
            "same": np.array([3.0]),
            "i": np.array([1]),
            "n": np.array(-np.inf),
            "part": np.array([1.0, np.inf]),
        },
        {
            "y": np.array([-1.0, 0.0]),
            "same": np.array([3.0]),
            "i": np.array([2]),
            "n": np.array(np.nan),
            "part": np.array([np.nan, 5.0]),
        },
    ]
    assert spreads_of(outputs) == {"y": 3.0, "same": 3.0, "part": 4.0}


def test_error_is_a_share_of_the_spread() -> None:
    error = output_error(np.array([1.0, 2.0]), np.array([1.0, 2.5], np.float32), 2.0)
    assert error.rms == pytest.approx(math.sqrt(0.125) / 2)
    assert error.largest == pytest.approx(0.25)


@pytest.mark.parametrize(
    "other", [np.array([1.0]), np.array([np.nan, 2.0]), np.array([np.inf, 2.0])]
)
def test_error_of_what_cannot_be_compared_is_infinite(other: np.ndarray) -> None:
    assert output_error(np.array([1.0, 2.0]), other, 1.0) == (math.inf, math.inf)
