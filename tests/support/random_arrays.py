"""Random operands of single operations, each of a generator of the test's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ops.harness import unsaturated


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Numbers of the normal distribution."""
    return rng.standard_normal(shape).astype(dtype)


def uniform_codes(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    """All integers of a type, but for those whose products ONNX Runtime saturates."""
    info = np.iinfo(dtype)
    return unsaturated(rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype))


def uniform_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scales of codes, from 0.01 to 0.1."""
    return rng.uniform(0.01, 0.1, shape).astype(np.float32)
