"""What sessions read again of constants that they had released."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.ir.graph import Value


def constants_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of constants that are read again from now on."""
    names: list[str] = []
    plain = Value.__getattr__

    def read(self: Value, name: str) -> Any:
        names.append(self.name)
        return plain(self, name)

    monkeypatch.setattr(Value, "__getattr__", read)
    return names
