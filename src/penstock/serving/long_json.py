"""Parsing of long JSON in pieces, so that the GIL is held for a piece, not for the whole body.

``json.loads`` is one call, during which no other thread runs: 5 ms for a megabyte of numbers,
150 ms for a megabyte of small objects. Only the ``data`` of tensors may be long. It is skipped at
first, and parsed when its dtype is known, as pieces that end at commas::

    {"inputs": [{"name": "x", ..., "data": [0.5, 1.5, ... , 2.5]}]}
                                            |--piece--|--piece--|

All other values must be short.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from penstock.core.errors import InvalidInput

# Bytes of a piece, which takes one to two milliseconds to parse.
_PIECE = 1 << 16
# Most bytes of a tensor element, including spaces: it is parsed in one call, at up to 10 ns per
# byte.
_MOST_ELEMENT = 1 << 22
# Bytes of a value that is no data of a tensor; inputs, or outputs, of a request; keys of an object;
# and strings and rows of a tensor, which are found one by one, on this thread, at 1 us each.
_MOST_SHORT, _MOST_TENSORS, _MOST_KEYS, _MOST_STRINGS = 1 << 16, 1 << 12, 1 << 6, 1 << 20

_SPACE = re.compile(rb"[ \t\n\r]{0,%d}" % _PIECE)
_RUN = re.compile(rb'[^\[\]{}"]{0,%d}' % _PIECE)
_DEEPER = {b"[": 1, b"]": -1}
_BLANK, _BACKSLASH = b" "[0], b"\\"[0]


class LongData:
    """The elements of a tensor in the text of a request. ``cuts``: the bounds of pieces, each
    before a comma; ``brackets``: the positions at which rows begin and end."""

    def __init__(self, text: bytes, cuts: list[int], brackets: Sequence[int]) -> None:
        self._text = text
        self._cuts = cuts
        self._brackets = brackets

    def pieces(self) -> Iterator[list[Any]]:
        """Yield the flattened elements in pieces. Raises ``InvalidInput``."""
        first = 0
        for before, end in zip(self._cuts, self._cuts[1:], strict=False):
            piece = bytearray(b"[%b]" % self._text[before + 1 : end])
            # Strings may have brackets, too: a regular expression that passes them by takes
            # seconds, in one call, where one is long.
            last = bisect_left(self._brackets, end, first)
            for bracket in self._brackets[first:last]:
                piece[bracket - before] = _BLANK
            first = last
            yield loads(piece)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(
        f'{name} is not a JSON number: send "NaN", "Infinity" or "-Infinity" as a string, or bytes'
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object with these pairs. Raises ``InvalidInput`` for a duplicate key."""
    # Parsers differ in which value of a repeated key counts: a proxy may check the other one.
    result = dict(pairs)
    if len(result) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {twice!r:.40}")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def loads(text: bytes | bytearray) -> Any:
    """Parse UTF-8 JSON by RFC 8259, without the NaN and the duplicate keys that ``json.loads``
    accepts. Raises ``InvalidInput``."""
    try:
        return _DECODER.decode(str(text, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the body is not valid JSON: {error}") from error


def read_document(text: bytes) -> Any:
    """Parse the JSON object of a request, in which the ``data`` of tensors become ``LongData``.
    Raises ``InvalidInput``, also for other values that are long."""
    reader = _Reader(text)
    document = reader.object({"inputs": reader.tensors, "outputs": reader.tensors})
    if reader.byte() is not None:
        reader.fail("unexpected data after the object")
    return document


class _Reader:
    """A parser: the text, and the position up to which it was read."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.at = 0
        self._strings = 0

    def byte(self) -> bytes | None:
        """Return the next byte that is not white space; None at the end."""
        while True:
            space = _SPACE.match(self.text, self.at)
            assert space is not None  # it matches nothing, too
            if self.at == (end := space.end()):
                return self.text[self.at : self.at + 1] or None
            self.at = end

    def take(self, *expected: bytes) -> bytes:
        """Consume one of these bytes and return it."""
        byte = self.byte()
        if byte not in expected:
            self.fail(f"expected one of {expected}, found {byte!r}")
        self.at += 1
        return byte

    def fail(self, reason: str) -> NoReturn:
        raise InvalidInput(f"the body is not valid JSON: byte {self.at}: {reason}")

    def object(self, read: Mapping[str, Callable[[], Any]]) -> Any:
        """Parse an object. ``read``: the functions that parse values that may be long, by key."""
        if self.byte() != b"{":
            return self.short()
        self.at += 1
        found: dict[Any, Any] = {}
        if self.byte() == b"}":
            self.at += 1
            return found
        while True:
            key = self.short()
            if not isinstance(key, str):
                self.fail("a key must be a string")
            self.take(b":")
            if key in found:
                self.fail(f"duplicate key {key!r:.40}")
            found[key] = read.get(key, self.short)()
            if len(found) > _MOST_KEYS:
                raise InvalidInput(f"an object has more than {_MOST_KEYS} keys")
            if self.take(b",", b"}") == b"}":
                return found

    def tensors(self) -> Any:
        """Parse a list of tensor descriptions."""
        if self.byte() != b"[":
            return self.short()
        self.at += 1
        found: list[Any] = []
        if self.byte() == b"]":
            self.at += 1
            return found
        while True:
            found.append(self.object({"data": self.data}))
            if len(found) > _MOST_TENSORS:
                raise InvalidInput(f"the request has more than {_MOST_TENSORS} inputs or outputs")
            if self.take(b",", b"]") == b"]":
                return found

    def short(self) -> Any:
        """Parse a short value."""
        self.byte()
        window = self.text[self.at : self.at + _MOST_SHORT]
        try:
            # The last character of the window may be cut off, which is no error.
            shown = getincrementaldecoder("utf-8")().decode(window)
            value, end = _DECODER.raw_decode(shown)
        except (ValueError, RecursionError) as error:
            if len(window) < _MOST_SHORT:
                self.fail(str(error))
            self.fail(f"a value is not valid JSON, or has more than {_MOST_SHORT} bytes")
        self.at += end if shown.isascii() else len(shown[:end].encode())
        return value

    def data(self) -> Any:
        """Skip the data of a tensor, recording the bounds of pieces and rows."""
        if self.byte() != b"[":
            return self.short()
        text, depth, cuts = self.text, 0, [self.at]
        depths: set[int] = set()  # nesting depths that contain elements
        brackets = array("q")
        last = b"["  # byte that is no space
        while True:
            # Bounded to a piece: a match holds Python's lock to its end.
            run = _RUN.match(text, self.at)
            assert run is not None
            begin, self.at = run.span()
            if shown := run.group().strip(b" \t\n\r"):
                if shown.strip(b" \t\n\r,"):
                    depths.add(depth)
                self._check_brackets(last, shown[:1])
                last = shown[-1:]
            self._check_element(cuts[-1])
            # A run has no quotes, so that a comma in it is between two elements.
            if self.at - cuts[-1] > _PIECE and (cut := text.rfind(b",", begin, self.at)) >= 0:
                cuts.append(cut)
            byte = text[self.at : self.at + 1]
            if byte and byte in b'[]"':
                self._check_brackets(last, byte)
                last = byte
            if byte == b'"':
                depths.add(depth)
                self._pass_string()
            elif byte in _DEEPER:
                depth += _DEEPER[byte]
                brackets.append(self.at)
            elif byte != b"" and byte in b"{}":
                self.fail("data must not contain objects")
            elif self.at == len(text):
                self.fail("data are not terminated")
            else:
                continue  # the run goes on
            self.at += 1
            self._count()
            if not depth:
                break
        if len(depths) > 1:
            raise InvalidInput("data mix rows and elements at the same level")
        if not depths:
            return []
        # The outer brackets are in no piece.
        return LongData(text, [*cuts, self.at - 1], brackets[1:-1])

    def _check_brackets(self, last: bytes, byte: bytes) -> None:
        """Refuse a misplaced bracket after ``last``, since pieces are parsed without brackets."""
        if (
            last + byte in (b"[,", b",]")
            or (last == b"]" and byte not in b",]")
            or (byte == b"[" and last not in b"[,")
        ):
            self.fail(f"unexpected {byte!r} after {last!r}")

    def _check_element(self, begin: int) -> None:
        """Refuse an element that begins at ``begin`` and is too long."""
        if self.at - begin > _MOST_ELEMENT:
            raise InvalidInput(
                f"an element of a tensor has more than {_MOST_ELEMENT} bytes as JSON: send it as "
                "bytes (binary_data_size)"
            )

    def _count(self) -> None:
        self._strings += 1
        if self._strings > _MOST_STRINGS:
            raise InvalidInput(
                f"the request has more than {_MOST_STRINGS} strings and rows as JSON: send them "
                "as bytes (binary_data_size)"
            )

    def _pass_string(self) -> None:
        """Skip to the quote that ends the current string."""
        text, begin = self.text, self.at
        while True:
            self.at = text.find(b'"', self.at + 1)
            if self.at < 0:
                self.at = len(text)
                self.fail("unterminated string")
            self._check_element(begin)
            before = self.at
            # An odd number of them escapes the quote.
            while text[before - 1] == _BACKSLASH:
                before -= 1
            if not (self.at - before) % 2:
                return
