"""What holds for every test of an operation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _as_in_a_run() -> Iterator[None]:
    """NumPy's warnings are off: infinities and NaNs are results."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _own_draws(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers from its module's ``rng`` whichever tests ran before it."""
    rng = getattr(request.module, "rng", None)
    if isinstance(rng, np.random.Generator):
        seed = zlib.crc32(request.node.name.encode())
        rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
