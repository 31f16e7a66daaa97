"""FlexBuffers, the form of the options of custom operators: values that say their own types.

The root is at the end: ``[...] [root] [type of the root] [bytes of the root]``. A type is a number
whose two lowest bits are the width of elements; offsets count backwards from where they stand.
"""

from __future__ import annotations

import struct
from typing import Any

_NULL, _INT, _UINT, _FLOAT, _KEY, _STRING = range(6)
_MAP, _VECTOR, _BLOB, _BOOL = 9, 10, 25, 26
_TYPED = {11: _INT, 12: _UINT, 13: _FLOAT, 14: _KEY, 15: _STRING, 36: _BOOL}
_INDIRECT = {6: _INT, 7: _UINT, 8: _FLOAT}
# Of all vectors together: they are referred to by offsets, so that a few bytes could name one
# vector again and again.
_MAX_VALUES = 100_000
_MAX_DEPTH = 32


def decode(data: bytes) -> Any:
    """The value of a FlexBuffer: numbers, texts, lists and dicts. Raises ``ValueError``."""
    if len(data) < 3:
        raise ValueError("they are too short")
    width = data[-1]
    return _Decoder(data).value(len(data) - 2 - width, width, data[-2], 0)


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.left = _MAX_VALUES

    def number(self, at: int, width: int, kind: int = _UINT) -> Any:
        codes = {_INT: "bhiq", _FLOAT: "?efd"}.get(kind, "BHIQ")
        if width not in (1, 2, 4, 8) or at < 0 or at + width > len(self.data):
            raise ValueError("an offset leads out of them")
        return struct.unpack_from(f"<{codes[width.bit_length() - 1]}", self.data, at)[0]

    def target(self, at: int, width: int) -> int:
        return at - int(self.number(at, width))

    def text(self, at: int, size: int | None = None) -> str:
        end = self.data.find(b"\0", max(at, 0)) if size is None else at + size
        if at < 0 or not at <= end <= len(self.data):
            raise ValueError("a text has no end")
        return self.data[at:end].decode("utf-8", "replace")

    def value(self, at: int, width: int, packed: int, depth: int) -> Any:
        """The value at ``at``, of a type and with elements of a width that ``packed`` says."""
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            raise ValueError("they nest too deep, or are too large")
        kind, inner = packed >> 2, 1 << (packed & 3)
        if kind in (_NULL, _BOOL):
            return None if kind == _NULL else bool(self.number(at, width))
        if kind in (_INT, _UINT, _FLOAT):
            return self.number(at, width, kind)
        at = self.target(at, width)
        if kind in _INDIRECT:
            return self.number(at, inner, _INDIRECT[kind])
        if kind == _KEY:
            return self.text(at)
        size = int(self.number(at - inner, inner))
        if kind in (_STRING, _BLOB):
            return self.text(at, size)
        if size * inner > len(self.data):
            raise ValueError("a vector leads out of them")
        if kind in _TYPED:
            packed = _TYPED[kind] << 2 | 0
            return [self.value(at + i * inner, inner, packed, depth + 1) for i in range(size)]
        if kind not in (_MAP, _VECTOR):
            raise ValueError(f"type {kind} is not supported")
        types = at + size * inner
        values = [
            self.value(at + i * inner, inner, self.number(types + i, 1), depth + 1)
            for i in range(size)
        ]
        if kind == _VECTOR:
            return values
        # In front of a map stand the offset of its keys, their width, and its size.
        keys = self.target(at - 3 * inner, inner)
        key_width = int(self.number(at - 2 * inner, inner))
        texts = [self.text(self.target(keys + i * key_width, key_width)) for i in range(size)]
        return dict(zip(texts, values, strict=True))
