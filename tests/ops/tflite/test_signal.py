"""Spectrograms of sound, their cepstral coefficients, and rotations by Hadamard's matrix: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import Op, check_operator, f, scalar, spoken

OPS = [
    *(
        spoken("AudioSpectrogram", f(n, 2), window_size=50, stride=20, magnitude_squared=squared)
        for n, squared in ((200, True), (219, False), (50, False))
    ),
    *(
        spoken(
            "Mfcc",
            np.abs(f(2, 5, 65)),
            [scalar(8000)],
            upper_frequency_limit=upper,
            lower_frequency_limit=lower,
            filterbank_channel_count=channels,
            dct_coefficient_count=10,
        )
        for channels, lower, upper in ((12, 20.0, 4000.0), (40, 20.0, 4000.0), (10, 300.0, 2000.0))
    ),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)


@pytest.mark.parametrize("size", [1, 8, 32])
def test_rotation_is_a_product_with_hadamards_matrix(size: int) -> None:
    """LiteRT has it, but does not give its result a shape."""
    x = f(2, 3, 32)
    op = spoken("aeq.hadamard_rotation", x, hadamard_size=size, random_binary_vector=[1, -1])
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    wanted = x.reshape(-1, size) @ matrix / np.sqrt(size)
    got = ps.compile(op.file)(x)
    np.testing.assert_allclose(got.reshape(-1, size), wanted, rtol=1e-5, atol=1e-6)
