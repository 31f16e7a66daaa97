"""The compiled SVDF of 8-bit codes against NumPy's, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

RNG = np.random.default_rng(6)
CONSTANTS = [1, 2, 3, 4]


def layer(
    batch: int = 3,
    features: int = 9,
    units: int = 20,
    rank: int = 2,
    steps: int = 7,
    constants: Any = CONSTANTS,
    scales: Any = (0.05, 2.0**-22),
) -> tuple[Any, list[np.ndarray]]:
    filters = rank * units
    drawn = lambda dtype, *dims: RNG.integers(  # noqa: E731
        np.iinfo(dtype).min, np.iinfo(dtype).max, dims, dtype, True
    )
    inputs = [drawn(np.int8, batch, features), drawn(np.int8, filters, features)]
    inputs += [drawn(np.int16, filters, steps)]
    inputs += [RNG.integers(-20000, 20000, n, np.int32) for n in (filters, units)]
    inputs += [drawn(np.int16, batch, filters * steps)]
    attrs = {"scales": [*scales], "zero": -7}
    return node_of("IntegerSvdf", inputs, constants, 2, "tflite", 1, **attrs), inputs


@pytest.mark.parametrize("batch", [1, 2, 8, 9, 20])
@pytest.mark.parametrize(("features", "units"), [(1, 1), (28, 20), (65, 64), (257, 150)])
def test_rows_and_units_of_any_number(batch: int, features: int, units: int) -> None:
    check(*layer(batch, features, units))


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 16, 33])
def test_memories_of_any_length(rank: int, steps: int) -> None:
    check(*layer(rank=rank, steps=steps))


@pytest.mark.parametrize("first", [2.0**-32, 1e-9, 0.7, 3.0, 2.0**29])
@pytest.mark.parametrize("second", [2.0**-32, 1.1e-9, 2.0**-20, 0.9, 7.0])
def test_scales_of_small_and_of_large_sums(first: float, second: float) -> None:
    check(*layer(scales=(first, second)))


def test_rows_that_do_not_fit_together_are_computed_in_parts() -> None:
    check(*layer(batch=5, features=12000, units=3, scales=(1e-4, 2.0**-22)))


def test_weights_that_are_fed_and_rows_beyond_the_stack_have_no_kernel() -> None:
    node, _ = layer(constants=[2, 3, 4])
    long, _ = layer(batch=1, features=33000, units=1)
    assert all(kernel_of(each, library) is None for library in LIBRARIES for each in (node, long))
