"""Every graph is checked after every pass."""

import pytest

from penstock.passes.pipeline import CHECK_PASSES


@pytest.fixture(autouse=True)
def check_graphs_after_passes(monkeypatch) -> None:
    monkeypatch.setenv(CHECK_PASSES, "1")
