"""Write TFLite files from Python values, according to the schema.

A table is a dict of fields by name, and only fields in the dict are written; a union's table is a
pair of its name and a dict. So a file that was read, changed and written again keeps
what was not changed::

    with opened_model(data, "m.tflite", wanted="tflite") as (model, weights):
        fields = fields_of(model, weights)
    fields["description"] = "changed"
    data = serialized(fields)

Contents of buffers and options of custom operators that lie after the flatbuffer, referred to by
offsets, are kept in a field of their own until they are written (``OUTSIDE``), again at the end.
Fields that the schema calls obsolete are left out.
"""

from __future__ import annotations

from struct import Struct, pack, pack_into
from typing import Any, TypeAlias

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, PenstockError
from penstock.frontends.common.weight_file import WeightFile
from penstock.frontends.tflite.flatbuffer import CODES, FlatTable, TableField, schema

Fields: TypeAlias = dict[str, Any]
"""a table: its fields by name"""
Content: TypeAlias = Any
"""a field: a text, bytes, a table, a union's table with its name, or a list of these"""

OUTSIDE = " outside"  # no field of the schema has a blank in its name
_PLACES = {
    "Buffer": ("offset", "size"),
    "Operator": ("large_custom_options_offset", "large_custom_options_size"),
}
"""the fields with the offset and size of bytes after the flatbuffer, by table"""
_ALIGNMENT = 16  # bytes, of contents that kernels read
_MAX_SIZE = 2**31  # bytes of a flatbuffer, some of whose offsets are signed
_OFFSET = Struct("<I")
_STRUCTS = {name: Struct(f"<{code}") for name, code in CODES.items()}
_FIRST_PLACE = 1  # TFLite only accepts larger offsets for places after the flatbuffer


def fields_of(table: FlatTable, weights: WeightFile) -> Fields:
    """Return all fields of a table and of its nested tables. Raises ``InvalidModel`` if the file is
    damaged, ``PenstockError`` for fields that the schema does not have, which would be lost."""
    fields: Fields = {}
    if table.is_newer:
        raise _unknown(table.kind, "fields")
    for name, field in schema().tables[table.kind].items():
        if getattr(table, name) != field.default if field.is_number else table.has(name):
            fields[name] = _plain(table, name, field, weights)
    # Offsets are only known when all else is written.
    places = _PLACES.get(table.kind, ("", ""))
    place, size = [fields.get(name, 0) for name in places]
    if place > _FIRST_PLACE:
        end = place + size
        if end > weights.size:
            raise InvalidModel(
                f"a {table.kind} needs bytes {place} to {end} of a file of {weights.size}, which "
                "was cut short"
            )
        fields = {name: value for name, value in fields.items() if name not in places}
        try:
            fields[OUTSIDE] = weights.read(place, size).tobytes()
        except ValueError as error:
            raise InvalidModel(f"a {table.kind} cannot be read: {error}") from error
    return fields


def _plain(table: FlatTable, name: str, field: TableField, weights: WeightFile) -> object:
    """Return a field as ``serialized`` takes it."""
    if field.vector and field.type == "uint8":
        return table.content(name)
    value = getattr(table, name)
    if field.type in schema().unions:
        if value is None:
            raise _unknown(table.kind, f"a {name}")
        return value.kind, fields_of(value, weights)
    if field.type in schema().tables.entries:
        if field.vector:
            return [fields_of(element, weights) for element in value]
        return fields_of(value, weights)
    return value


def _unknown(kind: str, what: str) -> PenstockError:
    return PenstockError(
        f"a {kind} has {what} of a newer schema of TFLite, which would be lost: write ONNX instead"
    )


def serialized(fields: Fields, identifier: bytes = b"TFL3") -> bytes:
    """Return the file of a ``Model`` table. Raises ``PenstockError`` if it would be too large."""
    writer = _Writer()
    writer.data[4:8] = identifier
    writer.point(0, writer.table("Model", fields))
    if len(writer.data) >= _MAX_SIZE:
        raise PenstockError(
            f"a TFLite file of {len(writer.data)} bytes is more than a flatbuffer can have "
            f"({_MAX_SIZE}): write ONNX instead"
        )
    return writer.finished()


class _Writer:
    """Appends tables after the tables that refer to them, and fills in the offsets."""

    def __init__(self) -> None:
        self.data = bytearray(8)
        self._vtables: dict[bytes, int] = {}
        self._outside: list[tuple[int, bytes]] = []

    def finished(self) -> bytes:
        """Return the bytes, including those after the flatbuffer."""
        for place, content in self._outside:
            pack_into("<Q", self.data, place, self.align(_ALIGNMENT))
            self.data += content
        return bytes(self.data)

    def align(self, size: int, extra: int = 0) -> int:
        """Pad so that the place ``extra`` bytes further on is a multiple of ``size``."""
        self.data += bytes(-(len(self.data) + extra) % size)
        return len(self.data)

    def point(self, at: int, target: int) -> None:
        pack_into("<I", self.data, at, target - at)

    def table(self, kind: str, fields: Fields) -> int:
        """Append a table and return its place."""
        declared, content = schema().tables[kind], fields.get(OUTSIDE)
        place_field, size_field = _PLACES.get(kind, ("", ""))
        if content is not None:
            # The offset is known only at the end; an offset of 0 would be left out.
            fields = {**fields, place_field: _FIRST_PLACE + 1, size_field: len(content)}
        # The widest first, so that no padding is needed between them.
        structs = {
            name: _STRUCTS[declared[name].type] if declared[name].is_number else _OFFSET
            for name in fields
            if name != OUTSIDE
        }
        names = sorted(structs, key=lambda name: -structs[name].size)
        # The offset of the vtable has four bytes; the fields after it are aligned.
        at = self.align(max([4, *[own.size for own in structs.values()]]), 4)
        self.data += bytes(4)
        pending, slots = [], [0] * max([declared[name].slot + 1 for name in names], default=0)
        for name in names:
            field, place = declared[name], len(self.data)
            slots[field.slot] = place - at
            if field.is_number:
                self.data += structs[name].pack(fields[name])
            else:
                self.data += bytes(4)
                pending.append((place, field, fields[name]))
            if content is not None and name == place_field:
                self._outside.append((place, content))
        vtable = pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), len(self.data) - at, *slots)
        # Tables with the same fields share a vtable, as in files of other writers.
        if vtable not in self._vtables:
            self._vtables[vtable] = self.align(2)
            self.data += vtable
        pack_into("<i", self.data, at, at - self._vtables[vtable])
        # Offsets only lead forward: a table precedes what it refers to.
        for place, field, value in pending:
            self.point(place, self.content(field, value))
        return at

    def content(self, field: TableField, value: Content) -> int:
        """Append a text, a vector or a table and return its place."""
        if not field.vector:
            if field.type == "text":
                text = value.encode("utf-8", "surrogateescape")  # the inverse of decoding
                return self.vector(text, len(text), 1)
            return (
                self.table(*value)
                if field.type in schema().unions
                else self.table(field.type, value)
            )
        checkpoint()
        if field.type == "uint8":
            return self.vector(value, len(value), _ALIGNMENT)
        code = CODES.get(field.type)
        if code is not None:
            size = _STRUCTS[field.type].size
            return self.vector(pack(f"<{len(value)}{code}", *value), len(value), size)
        at = self.vector(bytes(4 * len(value)), len(value), 4)
        element = field._replace(vector=False)
        for i, part in enumerate(value):
            self.point(at + 4 + 4 * i, self.content(element, part))
        return at

    def vector(self, data: bytes, count: int, alignment: int) -> int:
        """Append a vector of ``count`` elements and return its place."""
        at = self.align(max(alignment, 4), 4)
        # A zero ends texts; it is harmless after other vectors.
        self.data += _OFFSET.pack(count) + data + b"\0"
        return at
