"""Compiled RotaryEmbedding against NumPy's, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.errors import RunError
from tests.support.native_kernels import LIBRARIES, check, kernel_of, node_of, pytestmark  # noqa: F401

rng = np.random.default_rng(5)
ANGLES = 24


def _inputs(rank, half, positions, sizes=(2, 3, 5, 20)):
    batch, heads, sequence, size = sizes
    dims = sizes if rank == 4 else (batch, sequence, heads * size)
    of_cache = (batch, sequence) if positions is None else (ANGLES,)
    return [rng.normal(size=d).astype(np.float32) for d in (dims, *[(*of_cache, half)] * 2)]


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("half", [10, 3, 1])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [None, "each", "start"])
def test_rotary_kernel_equals_numpy(rank, half, interleaved, positions):
    x, cos, sin = _inputs(rank, half, positions)
    attrs = {"interleaved": interleaved, "rotary_embedding_dim": 2 * half, "num_heads": 3}
    ids = rng.integers(0, ANGLES, (2, 5)) if positions == "each" else np.array([ANGLES - 5])
    if positions != "start":
        inputs = [x, cos, sin] if positions is None else [x, cos, sin, ids]
        check(node_of("RotaryEmbedding", inputs, **attrs), inputs)
    if positions is not None:
        inputs = [x, ids, cos, sin]
        check(
            node_of("RotaryEmbedding", inputs, domain="com.microsoft", version=1, **attrs), inputs
        )


@pytest.mark.parametrize("position", [-1, ANGLES, 2**63 - 1, -(2**63)])
def test_position_outside_of_the_cache_is_refused(position):
    x, cos, sin = _inputs(4, 10, "each")
    ids = np.zeros((2, 5), np.int64)
    ids[1, 4] = position
    _refused([x, cos, sin, ids])
    start = np.array([position])
    _refused([x, start, cos, sin], domain="com.microsoft", version=1)
    _refused([x, np.array([ANGLES - 4]), cos, sin], domain="com.microsoft", version=1)


def _refused(inputs, **op):
    node = node_of("RotaryEmbedding", inputs, **op)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        with pytest.raises((RunError, ValueError, IndexError)):
            kernel.function(*inputs)
