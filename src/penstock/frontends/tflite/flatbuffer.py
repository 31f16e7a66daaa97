"""FlatBuffers, read by a schema and checked while they are read.

A table's fields are read when they are first asked for. Every offset, length and number of a union
is checked before it is used, so that any bytes give values or ``InvalidModel``. Together, vectors
may take no more than a few times the bytes of the file, though a file can name one many times.

    table: [offset of its vtable] [fields, in any order]
    vtable: [bytes] [bytes of the table] [where field 0 is] [where field 1 is] ...   0: left out
    vector: [length] [elements, or offsets of them]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from struct import Struct, unpack
from typing import Any, NoReturn

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple
from penstock.frontends.common.encoding import decode_text

FILE = os.path.join(os.path.dirname(__file__), "schema.txt")
Read = Callable[[int, int], bytes | memoryview]

_U16_U16, _U32, _I32 = Struct("<HH"), Struct("<I"), Struct("<i")
_NAMES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64"
_CODES = dict(zip(_NAMES.split(), "?bBhHiIqQfd", strict=True))
_SCALARS = {name: Struct(f"<{code}") for name, code in _CODES.items()}
_PAGE = 2**12  # bytes that are read at a time
_OVERHANG = 256  # bytes of what may begin at the end of a page; longer parts are read alone
_MAX_OVERLAP = 16
_MAX_DEPTH = 16  # of tables in tables
_FREE_BYTES = 2**16


class TableField(NamedTuple):
    """``vector``: whether it is a vector of this ``type``. ``slot``: its place in vtables."""

    type: str
    vector: bool
    slot: int
    default: int | float


class Schema(NamedTuple):
    """The fields of tables by name, the tables of unions by number, the operators by number."""

    tables: Mapping[str, Mapping[str, TableField]]
    unions: Mapping[str, Mapping[int, str]]
    operators: Mapping[int, str]


@cache
def schema() -> Schema:
    """The schema of ``schema.txt``."""
    tables: dict[str, dict[str, TableField]] = {}
    unions: dict[str, dict[int, str]] = {}
    with open(FILE, encoding="ascii") as file:
        for line in file:
            role, name, *entries = line.split() or ["#", ""]
            if role == "table":
                table = tables[name] = {}
                for slot, entry in enumerate(entries):
                    key, _, rest = entry.partition(":")
                    type_, _, default = rest.partition("=")
                    vector = type_.startswith("[")
                    number = float(default or 0) if type_.startswith("float") else int(default or 0)
                    if type_:
                        table[key] = TableField(type_.strip("[]"), vector, slot, number)
            elif role != "#":
                number = 0
                names = unions[name] = {}
                for entry in entries:
                    key, _, given = entry.partition("=")
                    number = int(given) if given else number
                    names[number] = key
                    number += 1
    return Schema(tables, unions, unions.pop("BuiltinOperator"))


@cache
def _slots(kind: str) -> int:
    """The number of fields that tables of a kind may have."""
    return max((field.slot + 1 for field in schema().tables[kind].values()), default=0)


class Bytes(NamedTuple):
    """A vector of bytes that has not been read: where it is in the file."""

    offset: int
    size: int


class FlatTable:
    """A table of the file: its fields are attributes. A text or vector that was left out is empty,
    a table ``None``, a number its default. Vectors of bytes are places (``Bytes``)."""

    def __init__(self, buffer: FlatBuffer, kind: str, at: int, depth: int) -> None:
        self._buffer = buffer
        self._at = at
        self._depth = depth
        self.kind = kind
        if depth > _MAX_DEPTH:
            buffer.damaged("tables that nest too deep")
        vtable = at - buffer.numbers(_I32, at)[0]
        size, self._size = buffer.numbers(_U16_U16, vtable)
        slots = max((size - 4) // 2, 0)
        buffer.check(vtable, 4 + 2 * slots, "the fields of a table")
        buffer.check(at, self._size, "a table")
        slots = min(slots, _slots(kind))  # newer files may have fields that this schema lacks
        self._offsets = unpack(f"<{slots}H", buffer.part(vtable + 4, 2 * slots))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # Once a field.
        value = self.__dict__[name] = self._read(name, schema().tables[self.kind][name])
        return value

    def content(self, name: str) -> bytes:
        """The bytes of a field that is a vector of them."""
        return self._buffer.content(getattr(self, name))

    def _read(self, name: str, field: TableField) -> Any:
        buffer = self._buffer
        scalar = _SCALARS.get(field.type)
        offset = self._offsets[field.slot] if field.slot < len(self._offsets) else 0
        if scalar is not None and not field.vector:
            if not offset:
                return field.default
            self._check(offset, scalar.size)
            return buffer.numbers(scalar, self._at + offset)[0]
        if not offset:
            empty = Bytes(0, 0) if field.type == "uint8" else []
            return empty if field.vector else "" if field.type == "text" else None
        self._check(offset, 4)
        at = buffer.target(self._at + offset)
        if field.vector:
            return buffer.vector(field.type, at, self._depth)
        if field.type in schema().unions:
            number = getattr(self, f"{name}_type")
            if field.type == "QuantizationDetails" and buffer.is_tflite:
                number += number > 1  # Circle has one kind more, in second place
            kind = schema().unions[field.type].get(number)
            return None if kind is None else FlatTable(buffer, kind, at, self._depth + 1)
        return buffer.value(field.type, at, self._depth)

    def _check(self, offset: int, size: int) -> None:
        # The first four bytes of a table are the offset of its vtable.
        if offset < 4 or offset + size > self._size:
            self._buffer.damaged("a field outside of its table")


class FlatBuffer:
    """The bytes of a file, of which ``read(offset, size)`` gives those asked for. ``name`` is that
    of the file in messages; ``is_tflite``: it is numbered as TFLite's schema has it."""

    def __init__(self, name: str, size: int, read: Read, is_tflite: bool = False) -> None:
        self.name = name
        self.is_tflite = is_tflite
        self.size = size
        self._read = read
        self._pages: dict[int, bytes | memoryview] = {}
        self._left = _FREE_BYTES + _MAX_OVERLAP * size

    def root(self, kind: str) -> FlatTable:
        """The table that the file consists of."""
        return FlatTable(self, kind, self.target(0), 0)

    def damaged(self, what: str) -> NoReturn:
        raise InvalidModel(
            f"{self.name} is cut short or damaged: it has {what}; compare its size with the "
            "original's, or export it again"
        )

    def check(self, at: int, size: int, what: str) -> None:
        """Raise ``InvalidModel`` if ``what``, these bytes, is not in the file."""
        if at < 0 or at + size > self.size:
            self.damaged(f"{what} beyond its end")

    def numbers(self, scalars: Struct, at: int) -> tuple[Any, ...]:
        start = at % _PAGE
        data = self._pages.get(at // _PAGE)
        if data is None or start + scalars.size > len(data):
            self.check(at, scalars.size, "a number")
            data = self._page(at)
        return scalars.unpack_from(data, start)

    def part(self, at: int, size: int) -> bytes | memoryview:
        """These bytes, which are in the file."""
        if size > _OVERHANG:
            return self._read(at, size)
        start = at % _PAGE
        return self._page(at)[start : start + size] if size else b""

    def _page(self, at: int) -> bytes | memoryview:
        page = at // _PAGE
        data = self._pages.get(page)
        if data is None:
            checkpoint()
            size = min(_PAGE + _OVERHANG, self.size - page * _PAGE)
            # Kept: tables are small beside the weights.
            data = self._pages[page] = self._read(page * _PAGE, size)
            if len(data) < size:
                self.damaged("been cut while it was read")
        return data

    def target(self, at: int) -> int:
        """The place that the offset at ``at`` leads to."""
        offset: int = self.numbers(_U32, at)[0]
        return at + offset

    def value(self, kind: str, at: int, depth: int) -> Any:
        """The text or the table at ``at``."""
        if kind != "text":
            return FlatTable(self, kind, at, depth + 1)
        return decode_text(self.content(self.vector("uint8", at, depth)))

    def content(self, place: Bytes) -> bytes:
        self._spend(place.size)
        return bytes(self.part(*place))

    def vector(self, kind: str, at: int, depth: int) -> Any:
        """The elements of the vector at ``at``."""
        (length,) = self.numbers(_U32, at)
        scalar = _SCALARS.get(kind)
        width = 4 if scalar is None else scalar.size
        at += 4
        self.check(at, length * width, "a vector")
        # Weights are such vectors, too large to be read before they are asked for.
        if kind == "uint8":
            return Bytes(at, length)
        self._spend(length * width)
        if scalar is not None:
            return [*unpack(f"<{length}{_CODES[kind]}", self.part(at, length * width))]
        places: Sequence[int] = range(at, at + 4 * length, 4)
        return [self.value(kind, self.target(place), depth) for place in places]

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            self.damaged(f"vectors that overlap, of more than {_MAX_OVERLAP} times its bytes")
