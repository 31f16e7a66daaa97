"""Functions are imported by their first call."""

from __future__ import annotations

import sys

import pytest

from penstock.host.on_demand import imported


def test_module_is_imported_by_the_first_call(monkeypatch, tmp_path):
    (tmp_path / "late_module.py").write_text("def add(a, b=1):\n    return a + b\n")
    monkeypatch.syspath_prepend(tmp_path)
    add = imported("late_module.add")
    assert "late_module" not in sys.modules
    assert add.__name__ == "add"
    try:
        assert (add(1), add(1, b=5)) == (2, 6)
        assert "late_module" in sys.modules
    finally:
        sys.modules.pop("late_module", None)


def test_name_that_is_not_there_fails_when_called():
    with pytest.raises(AttributeError, match="no_such_name"):
        imported("math.no_such_name")()
