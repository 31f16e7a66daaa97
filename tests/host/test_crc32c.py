"""CRC-32C: the examples of RFC 3720, and google-crc32c."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from penstock.host.crc32c import crc32c, plain_crc32c
from penstock.host.native import load_level, supported_levels

FUNCTIONS = {
    level: load_level(level).functions.crc32c for level in supported_levels() if level != "off"
}
FUNCTIONS["off"] = plain_crc32c

# RFC 3720, B.4; and the check value of catalogues of such sums.
VECTORS = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018"
            "28000000 00000000 02000000 00000000"
        ),
        0xD9963A56,
    ),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.parametrize("level", FUNCTIONS)
@pytest.mark.parametrize(("data", "wanted"), VECTORS)
def test_checksum_of_the_examples_is_that_of_the_specification(
    level: str, data: bytes, wanted: int
) -> None:
    assert FUNCTIONS[level](data, 0) == wanted


@pytest.mark.parametrize("level", FUNCTIONS)
@pytest.mark.parametrize("start", [0, 1, 5])
def test_checksum_is_that_of_google_crc32c(level: str, start: int) -> None:
    content = np.random.default_rng(1).integers(0, 256, 20_000, np.uint8).tobytes()[start:]
    for size in (*range(40), 4095, 4096, 4097, 8192, 19_990):
        assert FUNCTIONS[level](content[:size], 0) == google_crc32c.value(content[:size])


@pytest.mark.parametrize("level", FUNCTIONS)
def test_checksum_goes_on_from_that_of_the_bytes_before(level: str) -> None:
    content = np.random.default_rng(2).integers(0, 256, 9_000, np.uint8)
    for cut in (0, 1, 100, 8999, 9000):
        first = FUNCTIONS[level](content[:cut], 0)
        assert FUNCTIONS[level](content[cut:], first) == google_crc32c.value(content.tobytes())


def test_checksum_takes_what_has_contiguous_bytes() -> None:
    wanted = VECTORS[2][1]
    data = bytearray(range(32))
    for given in (data, memoryview(data), np.array(data), np.array(data).view(np.int64)):
        assert crc32c(given) == wanted


def test_checksum_of_other_things_is_refused() -> None:
    for data in ("text", np.zeros((4, 4), np.uint8)[:, 0]):
        with pytest.raises((TypeError, ValueError, BufferError)):
            crc32c(data)
    with pytest.raises((OverflowError, TypeError)):
        crc32c(b"x", -1)
