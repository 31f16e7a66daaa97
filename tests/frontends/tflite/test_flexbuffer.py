"""Options of custom operators as FlexBuffers."""

from __future__ import annotations

import pytest
from flatbuffers import flexbuffers

from penstock.frontends.tflite.rules_custom import decode

OPTIONS = {"scale": 2.5, "names": ["a", "b"], "deep": {"n": -3}, "on": True, "none": None}


def test_flexbuffer_is_decoded() -> None:
    assert decode(bytes(flexbuffers.Dumps(OPTIONS))) == OPTIONS


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_damaged_flexbuffer_is_a_value_error_or_a_value(at: int) -> None:
    data = bytearray(flexbuffers.Dumps(OPTIONS))
    for number in (0, 1, 127, 255):
        data[at] = number
        try:
            value = decode(bytes(data))
        except ValueError:
            continue
        assert isinstance(value, dict | list | str | bytes | int | float | None)
