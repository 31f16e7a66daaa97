"""Compiled products with weights of a few bits in blocks against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.registry import MICROSOFT
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
)

TOLERANCE = {"rtol": 2e-5, "atol": 2e-4}


def _product(rows, k, n, bits, block, zeros="none", bias=False):
    rng = np.random.default_rng(5)
    blocks = -(-k // block)
    inputs = [
        rng.standard_normal((*rows, k), np.float32),
        rng.integers(0, 256, (n, blocks, block * bits // 8), np.uint8),
        rng.random((n, blocks), np.float32) / 2**bits,
        None,
        None,
        rng.standard_normal(n, np.float32) if bias else None,
    ]
    if zeros == "packed":
        inputs[3] = rng.integers(0, 256, (n, -(-blocks * bits // 8)), np.uint8)
    elif zeros == "float":
        inputs[3] = rng.random((n, blocks), np.float32) * 15
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    return node_of("MatMulNBits", inputs, [1, 2, 3], domain=MICROSOFT, **attrs), inputs


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 9)])
@pytest.mark.parametrize(
    ("k", "n", "block"), [(32, 32, 16), (64, 5, 32), (40, 33, 16), (528, 70, 256)]
)
def test_block_product_equals_numpy(rows, k, n, block, bits, zeros):
    check(*_product(rows, k, n, bits, block, zeros), TOLERANCE)


@pytest.mark.parametrize("rows", [(4,), (30,)])
def test_block_product_adds_a_bias(rows):
    check(*_product(rows, 64, 48, 4, 32, bias=True), TOLERANCE)


def test_block_product_of_odd_depth_is_left_to_numpy():
    node, _ = _product((2,), 36, 32, 4, 16)
    assert kernel_of(node, LIBRARIES[0]) is None
