"""FlatBuffers, read according to a schema and checked while they are read.

The numbers of a table are read with it; its texts, vectors and tables on first access. Every
offset, length and union number is checked before it is used, so that any bytes result in
values or ``InvalidModel``. Together, vectors may take no more than a few times the bytes of the
file, although a file can name one many times.

    table: [offset of its vtable] [fields, in any order]
    vtable: [bytes] [bytes of the table] [where field 0 is] [where field 1 is] ...   0: left out
    vector: [length] [elements, or offsets of them]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import add
from struct import Struct, unpack_from
from typing import Any, NoReturn, TypeAlias

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple
from penstock.frontends.common.encoding import decode_text

FILE = os.path.join(os.path.dirname(__file__), "schema.txt")
Read = Callable[[int, int], bytes | memoryview]
_Part: TypeAlias = tuple[bytes | memoryview, int]
"""bytes of a file, and the offset at which they begin in it"""

_U16_U16, _U32, _I32 = [Struct(code).unpack_from for code in ("<HH", "<I", "<i")]
_NAMES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float32 float64"
CODES = dict(zip(_NAMES.split(), "?bBhHiIqQfd", strict=True))
"""the types of numbers, in the codes of ``struct``"""
_SCALARS = {name: Struct(f"<{code}") for name, code in CODES.items()}
_WIDTHS = {"text": 1} | {name: scalar.size for name, scalar in _SCALARS.items()}
_WHOLE = 2**18  # bytes of a file that is read at once
_PAGE = 2**12  # bytes of a larger one that are read at a time
_OVERHANG = 256  # bytes of parts that may begin at a page's end; longer parts are read alone
_MAX_OVERLAP = 16
_MAX_DEPTH = 16  # of tables in tables
_FREE_BYTES = 2**16


class Bytes(NamedTuple):
    """A vector of bytes that has not been read: its place in the file."""

    offset: int
    size: int


class TableField(NamedTuple):
    """``vector``: whether it is a vector of this ``type``. ``slot``: its index in vtables."""

    type: str
    vector: bool
    slot: int
    default: Any

    @property
    def is_number(self) -> bool:
        return not self.vector and self.type in CODES


class LateTables(dict[str, Mapping[str, TableField]]):
    """The fields of tables by name, parsed from ``entries`` when a table is first looked up: a file
    has few of them. ``entries`` has all tables."""

    def __init__(self, entries: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.entries = entries

    def __missing__(self, name: str) -> Mapping[str, TableField]:
        table = self[name] = {}
        for slot, entry in enumerate(self.entries[name]):
            key, _, rest = entry.partition(":")
            type_, _, default = rest.partition("=")
            vector, type_ = type_.startswith("["), type_.strip("[]")
            empty: Any = "" if type_ == "text" else None
            if vector:
                empty = Bytes(0, 0) if type_ == "uint8" else ()
            elif type_ in CODES:
                empty = (float if type_.startswith("float") else int)(default or 0)
            if type_:
                table[key] = TableField(type_, vector, slot, empty)
        return table


class Schema(NamedTuple):
    """The fields of tables by name, the tables of unions by number, the operators by number."""

    tables: LateTables
    unions: Mapping[str, Mapping[int, str]]
    operators: Mapping[int, str]


@cache
def schema() -> Schema:
    """Return the schema of ``schema.txt``."""
    tables: dict[str, list[str]] = {}
    unions: dict[str, dict[int, str]] = {}
    with open(FILE, encoding="ascii") as file:
        for line in file:
            role, name, *entries = line.split() or ["#", ""]
            if role == "table":
                tables[name] = entries
            elif role != "#":
                number = 0
                names = unions[name] = {}
                for entry in entries:
                    key, _, given = entry.partition("=")
                    number = int(given) if given else number
                    names[number] = key
                    number += 1
    return Schema(LateTables(tables), unions, unions.pop("BuiltinOperator"))


class _Layout(NamedTuple):
    """The fields of tables of one kind and one vtable. ``size``: bytes of such a table; ``end``:
    those up to the end of its last field. ``left_out`` has the values of fields that it does not
    have, ``numbers`` how to read a number and where, ``others`` the offsets of other fields, 0 for
    those not within the table. ``is_newer``: it has fields beyond those of the schema."""

    size: int
    end: int
    left_out: Mapping[str, Any]
    numbers: Sequence[tuple[str, Callable[[Any, int], tuple[Any, ...]], int]]
    others: Mapping[str, tuple[int, TableField]]
    is_newer: bool


class FlatTable:
    """A table of the file, with its fields as attributes. A text or vector that is left out is
    empty, a table ``None``, a number its default. Vectors of bytes are places (``Bytes``)."""

    def __init__(
        self, buffer: FlatBuffer, kind: str, layout: _Layout, at: int, depth: int, part: _Part
    ) -> None:
        self.kind = kind
        self._buffer = buffer
        self._layout = layout
        self._at = at
        self._depth = depth
        self._part = data, base = part
        fields = self.__dict__
        fields.update(layout.left_out)
        for name, unpack, offset in layout.numbers:
            (fields[name],) = unpack(data, at - base + offset)

    def __getattr__(self, name: str) -> Any:
        """Read a text, a vector or a table on first access; a union's is None if its number is
        unknown."""
        if name.startswith("_"):
            raise AttributeError(name)
        (offset, field), buffer = self._layout.others[name], self._buffer
        if not offset:
            buffer.damaged("a field outside of its table")
        kind, depth, (data, base) = field.type, self._depth + 1, self._part
        at = self._at + offset
        at += _U32(data, at - base)[0]
        value: Any = None
        if not field.vector and kind != "text":
            if kind in schema().unions:
                number = getattr(self, f"{name}_type")
                if kind == "QuantizationDetails" and buffer.is_tflite:
                    number += number > 1  # Circle has one more kind, in second place
                kind = schema().unions[kind].get(number, "")
            if kind:
                (value,) = buffer.tables(kind, (at,), depth, self._part)
            self.__dict__[name] = value
            return value
        if at + 4 - base > len(data):
            data, base = buffer.part(at, 4, "a number")
        (length,) = _U32(data, at - base)
        at += 4
        size = length * _WIDTHS.get(kind, 4)
        if at + size > buffer.size:
            buffer.damaged("a vector beyond its end")
        # Weights are such vectors, too large to be read before they are needed.
        if kind == "uint8":
            value = self.__dict__[name] = Bytes(at, size)
            return value
        buffer.left -= size
        if buffer.left < 0 or at + size - base > len(data):
            data, base = buffer.part(at, size, "a vector")
        if kind == "text":
            value = decode_text(bytes(data[at - base : at - base + size]))
        else:
            numbers = unpack_from(f"<{length}{CODES.get(kind, 'I')}", data, at - base)
            if kind in CODES:
                value = [*numbers]
            else:  # an offset is relative to its own place
                places = [*map(add, numbers, range(at, at + size, 4))]
                value = buffer.tables(kind, with_checkpoints(places), depth, (data, base))
        self.__dict__[name] = value
        return value

    @property
    def is_newer(self) -> bool:
        """Whether it has fields that this schema lacks, from a newer schema."""
        return self._layout.is_newer

    def has(self, name: str) -> bool:
        """Whether the file has a field, a text, a vector or a table, rather than leaving it out."""
        return name in self._layout.others

    def content(self, name: str) -> bytes:
        """Return the bytes of a field that is a vector of bytes."""
        (at, size), buffer = getattr(self, name), self._buffer
        buffer.left -= size
        data, base = buffer.part(at, size, "a vector")
        return bytes(data[at - base : at - base + size])


class FlatBuffer:
    """The bytes of a file; ``read(offset, size)`` returns a part. ``name`` is the file's name in
    messages; ``is_tflite``: its unions are numbered as in TFLite's schema."""

    def __init__(self, name: str, size: int, read: Read, is_tflite: bool = False) -> None:
        self.name = name
        self.is_tflite = is_tflite
        self.size = size
        self._read = read
        self._page_size = max(_PAGE, size if size <= _WHOLE else 0)
        self._pages: dict[int, _Part] = {}
        self._layouts: dict[tuple[str, int], _Layout] = {}
        self.left = _FREE_BYTES + _MAX_OVERLAP * size

    def root(self, kind: str) -> FlatTable:
        """Return the root table of the file."""
        part = self.part(0, 4, "a number")
        return self.tables(kind, _U32(part[0], 0), 0, part)[0]

    def damaged(self, what: str) -> NoReturn:
        raise InvalidModel(
            f"{self.name} is cut short or damaged: it has {what}; compare its size with the "
            "original's, or export it again"
        )

    def tables(self, kind: str, places: Iterable[int], depth: int, part: _Part) -> list[FlatTable]:
        """Return the tables at these places, the first of which may be in ``part``."""
        if depth > _MAX_DEPTH:
            self.damaged("tables that nest too deep")
        tables, layouts = [], self._layouts
        data, base = part
        for at in places:
            if not base <= at <= base + len(data) - 4:
                data, base = part = self.part(at, 4, "a number")
            vtable = at - _I32(data, at - base)[0]
            layout = layouts.get((kind, vtable))
            if layout is None:
                layout = layouts[kind, vtable] = self._layout(kind, vtable)
            if at + layout.size > self.size:
                self.damaged("a table beyond its end")
            self.left -= layout.size
            if self.left < 0 or at + layout.end - base > len(data):
                data, base = part = self.part(at, layout.end, "a table")
            tables.append(FlatTable(self, kind, layout, at, depth, part))
        return tables

    def _layout(self, kind: str, vtable: int) -> _Layout:
        data, base = self.part(vtable, 4, "a number")
        length, size = _U16_U16(data, vtable - base)
        length = max(length, 4)
        if vtable + length > self.size:
            self.damaged("the fields of a table beyond its end")
        self.left -= length
        length = min(length, _OVERHANG)  # newer files may have fields that this schema lacks
        data, base = self.part(vtable, length, "the fields of a table")
        offsets = unpack_from(f"<{length // 2}H", data, vtable - base)[2:]
        end = 4  # the first four bytes of a table are the offset of its vtable
        left_out, numbers, others, slots = {}, [], {}, 0
        for name, field in schema().tables[kind].items():
            slots = max(slots, field.slot + 1)
            offset = offsets[field.slot] if field.slot < len(offsets) else 0
            scalar = None if field.vector else _SCALARS.get(field.type)
            if not offset:
                left_out[name] = field.default
            elif offset < 4 or offset + (width := 4 if scalar is None else scalar.size) > size:
                others[name] = 0, field
            else:
                end = max(end, offset + width)
                if scalar is None:
                    others[name] = offset, field
                else:
                    numbers.append((name, scalar.unpack_from, offset))
        return _Layout(size, end, left_out, numbers, others, any(offsets[slots:]))

    def part(self, at: int, size: int, what: str) -> _Part:
        """Return the part of the file with these bytes, which contain ``what``. Raises
        ``InvalidModel`` if they are beyond its end, or if more was read than a file can need."""
        if self.left < 0:
            self.damaged(f"vectors that overlap, of more than {_MAX_OVERLAP} times its bytes")
        if at < 0 or at + size > self.size:
            self.damaged(f"{what} beyond its end")
        first = at - at % self._page_size
        end = min(first + self._page_size + _OVERHANG, self.size)
        if at + size > end:
            first, end = at, at + size
        part = self._pages.get(first)
        if part is None or len(part[0]) < end - first:
            checkpoint()
            data = self._read(first, end - first)
            if len(data) < end - first:
                self.damaged("been cut while it was read")
            part = self._pages[first] = data, first  # tables are small compared to the weights
        return part
