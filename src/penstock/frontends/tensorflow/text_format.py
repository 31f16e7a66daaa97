"""Protobuf's text format, read statement by statement into messages of generated classes.

::

    node { name: "a" input: ["b", "c"] }   # three statements: `node {`, two fields, and `}`

One regular expression matches a statement with the following blanks and comments. It never
backtracks, so that every character is examined a bounded number of times. Fields that a message
does not declare are skipped: their values must be tokens, without further checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import repeat
from typing import Any, NoReturn

from google.protobuf.descriptor import Descriptor, FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import Message  # type: ignore[import-untyped]

from penstock.core.checkpoints import checkpoint, with_checkpoints
from penstock.core.errors import shortened
from penstock.core.records import NamedTuple

_BLANK = r"(?:\s++|\#[^\n]*+)*+"
_STRING = r""" (?: "[^"\\\n]*+(?:\\.[^"\\\n]*+)*+" | '[^'\\\n]*+(?:\\.[^'\\\n]*+)*+' ) """
_WORD = r"[a-zA-Z_][0-9a-zA-Z_+-]*+"
_VALUE = rf"""(?: {_STRING} (?: {_BLANK} {_STRING} )*+ | {_WORD}
    | (?: [0-9+-] | \.[0-9] ) [0-9a-zA-Z_.+-]*+ )"""
_ITEM = rf"{_VALUE} {_BLANK}"
_END = rf"{_BLANK} [,;]?+ {_BLANK}"  # of a field
# Possessive throughout: protobuf's own reader searches again from each of many backslashes, and
# takes 22 s for 80 kB of them (decision 48).
_STATEMENT = re.compile(
    rf"""(?P<close> [}}>] ) {_BLANK}
      (?: , {_BLANK} (?P<again> [{{<] ) {_BLANK} | (?P<last> \] ) {_END} | [,;]?+ {_BLANK} )
    | (?P<name> {_WORD} | [0-9][0-9a-zA-Z_.+-]*+ | \[ [\w.+/-]++ \] ) {_BLANK}
      (?: (?P<open> (?: : {_BLANK} )?+ (?: (?P<listed> \[ ) {_BLANK} )? [{{<] ) {_BLANK}
        | : {_BLANK} (?: (?P<value> {_VALUE} ) {_END}
          | (?P<list> \[ {_BLANK} (?: {_ITEM} (?: , {_BLANK} {_ITEM} )*+ )?+ \] ) {_END} ) )""",
    re.VERBOSE,
)
_BLANKS = re.compile(_BLANK)
_VALUES = re.compile(rf"( {_VALUE} ) | \#[^\n]*+", re.VERBOSE)
_PIECE = re.compile(rf"{_STRING} | \#[^\n]*+", re.VERBOSE)
_OCTAL = re.compile(r"-?0[0-9]+")
_ESCAPE = re.compile(
    rb"\n|\\(?:[0-7]{1,3}|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL
)
_LETTERS = zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)
_ESCAPES = {letter.encode(): sign.encode() for letter, sign in _LETTERS}
_ESCAPES |= {sign: sign for sign in (b"?", b"\\", b"'", b'"')}
_BOOLS = dict.fromkeys(("true", "t", "1", "True"), True)
_BOOLS |= dict.fromkeys(("false", "f", "0", "False"), False)
_MAX_DEPTH = 100  # of messages in messages, as in the binary form


class _Field(NamedTuple):
    name: str
    read: Callable[[str], Any]  # of a value
    repeated: bool
    is_map: bool
    oneof: str
    type: Descriptor | None  # of messages


class _Frame(NamedTuple):
    """A message that is open; None in a field that is skipped."""

    message: Any
    fields: dict[str, _Field]
    close: str
    field: _Field | None = None
    listed: bool = False


def parse_text(text: str, message: Message) -> None:
    """Read ``text`` into ``message``, which is empty. Raises ``ValueError`` with line and column.
    Between two checkpoints are at most 128 statements or values of a list, and one escape."""
    stack = [_Frame(message, _fields(message.DESCRIPTOR), "", None, False)]
    position = _BLANKS.match(text).end()  # type: ignore[union-attr]
    try:
        for _ in with_checkpoints(repeat(None)):
            match = _STATEMENT.match(text, position)
            if match is None:
                break
            top, sort = stack[-1], match.lastgroup or ""
            if match["close"]:
                if match["close"] != top.close:
                    break
                if top.listed != (sort != "close"):
                    must = "a comma and a message, or ']'," if top.listed else "a field"
                    raise ValueError(f"{must} must follow")
                _close(stack)
                if sort == "again":
                    _open(stack, top.field, match["again"], listed=True)
            elif match["name"][0] == "[" and top.message is not None:
                raise ValueError(f"write the file without the extension {_excerpt(match['name'])}")
            elif sort == "open":
                field = top.fields.get(match["name"])
                _open(stack, field, match["open"], listed=match["listed"] is not None)
            elif field := top.fields.get(match["name"]):
                _assign(top.message, field, match[sort], sort == "list")
            position = match.end()
        close = stack[-1].close
        if position < len(text):
            excerpt = _excerpt(text[position : position + 80].partition("\n")[0])
            other = f" or {close!r}" if close else ""
            raise ValueError(
                f"{excerpt} is no field{other}; look for a missing quote, colon, bracket or comma"
            )
        if close:
            raise ValueError(f"the text ends, but {close!r} must follow")
    except ValueError as error:
        line = text.count("\n", 0, position) + 1
        column = position - text.rfind("\n", 0, position)
        raise ValueError(f"line {line}, column {column}: {error}") from error


def _open(stack: list[_Frame], field: _Field | None, opening: str, *, listed: bool) -> None:
    close = "}" if opening[-1] == "{" else ">"
    if len(stack) > _MAX_DEPTH:
        raise ValueError(f"messages are nested in more than {_MAX_DEPTH} others")
    if field is None:
        if opening[0] == "[":
            raise ValueError("a colon must precede the list of a field that is not declared")
        stack.append(_Frame(None, {}, close, None, listed))
        return
    if field.type is None or (listed and not field.repeated):
        raise ValueError(f"{field.name} must be one {'value' if field.type is None else 'message'}")
    message = getattr(stack[-1].message, field.name)
    if field.is_map:
        message = message.GetEntryClass()()
    elif field.repeated:
        message = message.add()
    else:
        _check_unset(stack[-1].message, field)
        message.SetInParent()
    stack.append(_Frame(message, _fields(field.type), close, field, listed))


def _close(stack: list[_Frame]) -> None:
    entry, _, _, field, _ = stack.pop()
    if field is not None and field.is_map:
        # Done last, since the key may follow the value.
        entries = getattr(stack[-1].message, field.name)
        if isinstance(entry.value, Message):
            entries[entry.key].CopyFrom(entry.value)
        else:
            entries[entry.key] = entry.value


def _assign(message: Message, field: _Field, text: str, is_list: bool) -> None:
    """Set a field to one value, or append one or a list to it."""
    if is_list and not field.repeated:
        raise ValueError(f"{field.name} must be one value, not a list")
    try:
        if is_list:
            values = [field.read(item) for item in with_checkpoints(_VALUES.findall(text)) if item]
        else:
            values = [field.read(text)]
        if not field.repeated:
            _check_unset(message, field)
            setattr(message, field.name, values[0])
        elif values:
            getattr(message, field.name).extend(values)
    except ValueError as error:
        reason = shortened(str(error), 80)
        raise ValueError(f"{_excerpt(text)} is no value of {field.name}: {reason}") from error


def _check_unset(message: Message, field: _Field) -> None:
    if field.oneof:
        other = message.WhichOneof(field.oneof)
    elif field.type is not None:
        other = message.HasField(field.name) and field.name
    else:
        other = getattr(message, field.name) and field.name
    if other:
        raise ValueError(f"{field.name} is given, but the message has {other} already")


@cache
def _fields(message: Descriptor) -> dict[str, _Field]:
    return {
        field.name: _Field(
            field.name,
            _reader(field),
            field.is_repeated,
            field.message_type is not None and field.message_type.GetOptions().map_entry,
            field.containing_oneof.name if field.containing_oneof else "",
            field.message_type,
        )
        for field in message.fields
    }


def _reader(field: FieldDescriptor) -> Callable[[str], Any]:
    if field.enum_type is not None:
        numbers = {name: value.number for name, value in field.enum_type.values_by_name.items()}
        return lambda text: numbers[text] if text in numbers else int(text, 0)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes
    return _READERS[field.cpp_type]


def _integer(text: str) -> int:
    # As in C, a leading zero makes the number octal.
    return int(text, 8 if _OCTAL.fullmatch(text) else 0)


def _float(text: str) -> float:
    if _OCTAL.match(text):
        raise ValueError("a number must not begin with 0")
    text = text.lower()
    # The suffix f of a number in C is dropped, except in inf.
    return float(text if text.endswith("inf") else text.removesuffix("f"))


def _message(_: str) -> NoReturn:
    raise ValueError("it has fields, as in { ... }")


def _bool(text: str) -> bool:
    if text not in _BOOLS:
        raise ValueError("neither true nor false")
    return _BOOLS[text]


def _bytes(text: str) -> bytes:
    quote = text[0]
    if quote not in "'\"":
        raise ValueError("it must be in quotes")
    if text[-1] == quote and text.count(quote) == 2:
        data = text[1:-1].encode()
    else:  # a string cannot contain a line break: between two, it ends an escape and is dropped
        matches = with_checkpoints(_PIECE.finditer(text))
        data = "\n".join([match[0][1:-1] for match in matches if match[0][0] != "#"]).encode()
    return _ESCAPE.sub(_unescaped, data) if b"\\" in data else data.replace(b"\n", b"")


def _unescaped(match: re.Match[bytes]) -> bytes:
    checkpoint()  # one string may be the whole file
    return _character(match[0])


@lru_cache(1024)
def _character(escape: bytes) -> bytes:
    """Return the bytes that an escape stands for, b"" for a line break."""
    letter, digits = escape[1:2], escape[2:]
    if letter.isdigit():
        return bytes([int(escape[1:], 8)])
    if digits:
        code = int(digits, 16)
        return bytes([code]) if letter == b"x" else chr(code).encode()
    if letter and letter not in _ESCAPES:
        raise ValueError(f"\\{letter.decode(errors='replace')} is no escape")
    return _ESCAPES[letter] if letter else b""


def _excerpt(text: str) -> str:
    return repr(shortened(text, 40))


_READERS: dict[int, Callable[[str], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integer,
    FieldDescriptor.CPPTYPE_INT64: _integer,
    FieldDescriptor.CPPTYPE_UINT32: _integer,
    FieldDescriptor.CPPTYPE_UINT64: _integer,
    FieldDescriptor.CPPTYPE_FLOAT: _float,
    FieldDescriptor.CPPTYPE_DOUBLE: _float,
    FieldDescriptor.CPPTYPE_BOOL: _bool,
    FieldDescriptor.CPPTYPE_MESSAGE: _message,
    FieldDescriptor.CPPTYPE_STRING: lambda text: _bytes(text).decode(),
}
