"""What tests of backends have in common."""

from __future__ import annotations

import pytest

from penstock.session import compiler
from penstock.tuning.measure import GraphProfiler


class DnnlFirst(GraphProfiler):
    """oneDNN wherever it can."""

    def complete(self, *, single_threaded):
        pass

    def expected(self, node, among, backend):
        return self.seconds(node, backend, single_threaded=False)

    def seconds(self, node, backend, *, single_threaded):
        return 1e-3 if backend.name == "numpy" else 1e-6


@pytest.fixture
def onednn_first(monkeypatch) -> None:
    """Nodes run on oneDNN wherever that has a kernel for them."""
    monkeypatch.setattr(compiler, "GraphProfiler", DnnlFirst)
