"""The compiled LSTM of 8-bit codes against NumPy's, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

RNG = np.random.default_rng(5)
CONSTANTS = [1, 2, 3, 4]


def layer(
    steps: int, batch: int, width: int, units: int, constants: Any = CONSTANTS, **attrs: Any
) -> tuple[Any, list[np.ndarray]]:
    codes = lambda *dims: RNG.integers(-128, 128, dims, np.int8)  # noqa: E731
    dims = (batch, steps, width) if attrs.get("layout") else (steps, batch, width)
    inputs = [codes(*dims), codes(4 * units, width), codes(4 * units, units)]
    inputs += [RNG.integers(-20000, 20000, 4 * units, np.int32) for _ in range(2)]
    inputs += [codes(batch, units), RNG.integers(-(2**15), 2**15, (batch, units), np.int16)]
    attrs = {
        "hidden_size": units,
        "direction": "forward",
        "layout": 0,
        "scales": [*RNG.uniform(0.01, 0.2, 8).tolist(), 2.0**-22],
        "zero": -7,
        "cell_bits": 4,
        "cell_clip": 0,
        **attrs,
    }
    return node_of("IntegerLstm", inputs, constants, 3, "tflite", 1, **attrs), inputs


@pytest.mark.parametrize("batch", [1, 2, 8, 9, 20])
@pytest.mark.parametrize(("width", "units"), [(1, 1), (28, 20), (65, 64), (257, 128)])
def test_rows_and_units_of_any_number(batch: int, width: int, units: int) -> None:
    check(*layer(3, batch, width, units))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("layout", [0, 1])
def test_orders_of_steps_and_rows(layout: int, direction: str) -> None:
    check(*layer(6, 10, 9, 7, layout=layout, direction=direction))


@pytest.mark.parametrize("bits", range(7))
@pytest.mark.parametrize("clip", [0, 900])
def test_cells_of_any_scale_are_clipped(bits: int, clip: int) -> None:
    check(*layer(4, 3, 16, 33, cell_bits=bits, cell_clip=clip))


@pytest.mark.parametrize("scale", [1e-9, 0.5, 3.0])
def test_gates_of_small_and_of_large_scales(scale: float) -> None:
    check(*layer(3, 2, 5, 40, scales=[scale] * 8 + [2.0**-23]))


def test_weights_that_are_fed_have_no_kernel() -> None:
    node, _ = layer(3, 2, 5, 4, constants=[2, 3, 4])
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
