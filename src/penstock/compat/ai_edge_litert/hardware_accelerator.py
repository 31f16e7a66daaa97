"""Kinds of devices, as flags."""

from __future__ import annotations

import enum


class HardwareAccelerator(enum.IntFlag):
    """Devices that a model may run on; here it is the processor."""

    CPU = 1
    GPU = 2
    NPU = 4
