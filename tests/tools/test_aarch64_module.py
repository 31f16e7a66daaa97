"""Which module for aarch64 is compiled again (``tools/aarch64.py``), without QEMU."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.host.native import library
from tools import aarch64


def test_module_of_these_sources_is_told_from_a_newer_one_of_others(tmp_path: Path) -> None:
    native = library()
    if native is None:
        pytest.skip("there are no compiled kernels")
    assert aarch64.is_of_sources(Path(native.path))
    other = tmp_path / "_plain.abi3.so"
    other.write_bytes(b"of other sources")
    assert not aarch64.is_of_sources(other)
