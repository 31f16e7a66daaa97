"""Compiled dense layers whose rows become codes over their range against NumPy's, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

RNG = np.random.default_rng(6)


def layer(
    dims: tuple[int, ...], units: int, *, scales: int = 1, bias: bool = True, **attrs: Any
) -> tuple[Any, list[np.ndarray]]:
    x = RNG.normal(size=dims).astype(np.float32)
    inputs = [x, RNG.integers(-128, 128, (units, dims[-1]), np.int8)]
    inputs.append(RNG.uniform(0.01, 0.1, scales).astype(np.float32))
    inputs += [RNG.normal(size=units).astype(np.float32)] if bias else []
    constants = range(1, len(inputs))
    return node_of("DynamicRangeDense", inputs, constants, 1, "tflite", 1, **attrs), inputs


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
@pytest.mark.parametrize(("depth", "units"), [(1, 1), (63, 31), (64, 32), (65, 129), (700, 300)])
def test_rows_and_units_of_any_number(rows: int, depth: int, units: int) -> None:
    check(*layer((rows, depth), units))


@pytest.mark.parametrize("asymmetric", [0, 1])
@pytest.mark.parametrize("scales", [1, 50])
def test_ranges_and_scales(scales: int, asymmetric: int) -> None:
    node, inputs = layer((2, 3, 33), 50, scales=scales, asymmetric=asymmetric, bias=False)
    inputs[0][0, 0] = 0
    inputs[0][0, 1] = np.abs(inputs[0][0, 1])
    inputs[0][1, 0] = -np.abs(inputs[0][1, 0]) - 3
    check(node, inputs)


def test_results_are_bounded() -> None:
    check(*layer((5, 20), 9, limits=[0.0, 6.0]))


def test_rows_of_ties() -> None:
    """The largest magnitude is 127, so that numbers between integers are between codes."""
    node, inputs = layer((1, 255), 40)
    inputs[0][0] = np.arange(-127, 128) * 0.5
    inputs[0][0, :2] = 127, 0.49999997
    check(node, inputs)


@pytest.mark.parametrize("dims", [(1, 40_000), (700, 50)])
def test_rows_that_no_stack_has_room_for(dims: tuple[int, int]) -> None:
    check(*layer(dims, 2))
