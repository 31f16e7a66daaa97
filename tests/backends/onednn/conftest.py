"""The library, for tests that call it."""

from __future__ import annotations

import pytest

from penstock.backends.onednn.library import Library, library


@pytest.fixture
def dnnl() -> Library:
    found = library()
    assert found is not None
    return found
