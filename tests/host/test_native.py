"""The extension modules of compiled kernels."""

from __future__ import annotations

import pytest

from penstock.core.errors import PenstockError
from penstock.host import native as library


def test_library_compiled_from_other_sources_says_how_to_compile_it_again(monkeypatch):
    level, *_ = library.supported_levels()
    if level == "off":
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(library, "_checksum", lambda: "0")
    monkeypatch.setattr(library, "_newest", lambda: 2**63)
    with pytest.raises(PenstockError, match=r"another version of Penstock: run 'make kernels'"):
        library.load_level.__wrapped__(level)


def test_library_newer_than_its_sources_is_not_compared_with_them(monkeypatch):
    level, *_ = library.supported_levels()
    if level == "off":
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(library, "_checksum", lambda: "0")
    monkeypatch.setattr(library, "_newest", lambda: 0)
    assert library.load_level.__wrapped__(level) is not None
