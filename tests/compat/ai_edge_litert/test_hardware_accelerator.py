"""Kinds of devices."""

from __future__ import annotations

import pytest

from penstock.compat.ai_edge_litert.hardware_accelerator import HardwareAccelerator

theirs = pytest.importorskip("ai_edge_litert.hardware_accelerator")


def test_flags_are_those_of_litert() -> None:
    assert {flag.name: int(flag) for flag in HardwareAccelerator} == {
        flag.name: int(flag) for flag in theirs.HardwareAccelerator
    }
