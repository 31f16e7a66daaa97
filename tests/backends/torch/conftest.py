"""Where a machine has CUDA, only ``test_cuda.py`` uses it; the others are of torch's CPU device."""

from __future__ import annotations

import pytest

from penstock.backends.registry import missing


@pytest.fixture(autouse=True)
def _cpu_by_default(request, monkeypatch):
    if request.path.name != "test_cuda.py" and missing("torch") is None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
