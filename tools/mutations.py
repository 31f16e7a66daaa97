"""Random changes of files: of bytes, of tokens of a text, of the values of JSON, and of the fields
of protobuf messages and saved sessions.

All is drawn from the generator that is passed in, so that a seed says which change it was.
"""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import google_crc32c
from google.protobuf.message import Message

from penstock.artifact.container import HEADER, MAGIC, VERSION
from penstock.ops.internal import DOMAIN, INTERNAL
from penstock.ops.registry import registered

# Values at which bounds, signs and sizes of numbers change.
_INTS = [0, 1, -1, 2, -2, 3, 5, -9, 64, 255, 1000, 2**20, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40]
_INTS += [2**62, 2**63 - 1, -(2**63)]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 3.7, 1e30, -1e30, 1e-40, float("nan"), float("inf")]
_TEXTS = [
    "",
    "x",
    "^x",
    ":0",
    "x:1",
    "reflect",
    "linear",
    "SAME_LOWER",
    "\u00e9\U0001f600",
    "n" * 999,
]
_BYTES = [b"", b"\0", b"x", b"\xff" * 8, b"\0" * 64]
_TOKEN = re.compile(r'"[^"\n]*"|\w+|\s+|.', re.DOTALL)
_WORDS = ["{", "}", "[", "]", "(", ")", "<", ">", ":", ",", '"', "0", "-1", "1e999", "nan", "\0"]
_WORDS += [str(2**63), "0x7fffffff", "node", "attr", "if", "float", "é"]


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """One to four changes of bytes; sometimes a part is cut out, repeated, or from elsewhere."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4])):
        if not changed:
            break
        at = draw.randrange(len(changed))
        flipped = changed[at] ^ 1 << draw.randrange(8)
        end, other = at + draw.randrange(1, 64), draw.randrange(len(changed))
        chance = draw.random()
        if chance < 0.7:
            changed[at] = draw.choice([flipped, flipped, draw.randrange(256), 0, 0x7F, 0x80, 0xFF])
        elif chance < 0.8:
            del changed[at:end]
        elif chance < 0.9:
            changed[at:at] = changed[other : other + draw.randrange(1, 64)]
        else:
            changed[at:at] = changed[at:end] * draw.choice([1, 2, 50])
    return bytes(changed)


def changed_numbers(data: bytes, draw: random.Random) -> bytes:
    """One to three changes of aligned numbers of 32 bits, of which a FlatBuffer mostly consists."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = 4 * draw.randrange(max(len(changed) // 4, 1))
        (old,) = struct.unpack("<I", changed[at : at + 4].ljust(4, b"\0"))
        near = old + draw.choice([-8, -4, -2, -1, 1, 2, 4, 8])
        new = draw.choice([near, near, *_INTS]) % 2**32
        changed[at : at + 4] = struct.pack("<I", new)
    return bytes(changed)


def changed_text(text: str, draw: random.Random) -> str:
    """One to four changes of tokens."""
    tokens = _TOKEN.findall(text) or [""]
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, other = draw.randrange(len(tokens)), draw.randrange(len(tokens))
        token = draw.choice([tokens[other], tokens[other], *draw.choices(_WORDS, k=2)])
        tokens[at : at + draw.randrange(2)] = [token] * draw.choice([0, 1, 1, 1, 1, 40])
        tokens = tokens or [""]
    return "".join(tokens)


def changed_json(data: bytes, draw: random.Random, words: Sequence[Any]) -> bytes:
    """One to four changes of values: replaced by others of the file or by ``words``, repeated, or
    taken away."""
    tree = [json.loads(data)]
    for _ in range(draw.choice([1, 1, 2, 4])):
        places = list(_json_places(tree))
        container, key = draw.choice(places)
        holder, other = draw.choice(places)
        value = copy.deepcopy(holder[other])
        chance = draw.random()
        if chance < 0.15 and container is not tree:
            del container[key]
        elif chance < 0.35 and isinstance(container, list) and container is not tree:
            container.insert(key, value)
        else:
            word = copy.deepcopy(draw.choice(words or _TEXTS))
            container[key] = draw.choice([value, word, draw.choice(_INTS + _TEXTS)])
    return json.dumps(tree[0]).encode()


class SavedDocuments:
    """The documents of a saved session, parsed and by name, to be changed; "arrays" is the list of
    arrays, ``content`` the bytes that these refer to. Bytes may take the place of a document."""

    def __init__(self, data: bytes) -> None:
        *_, offset, count = HEADER.unpack_from(data)
        self._table = json.loads(data[offset : offset + count])
        places = self._table["documents"]
        self.by_name = {name: json.loads(data[o : o + n]) for name, (o, n, _) in places.items()}
        self.by_name["arrays"] = self._table["arrays"]
        self.content = bytearray(data[:offset])

    def to_bytes(self) -> bytes:
        """The saved session of the documents as they are now, with checksums that fit."""
        documents = dict(self.by_name)
        table = {**self._table, "arrays": documents.pop("arrays")}
        content = bytearray(self.content)

        def added(document: Any) -> list[int]:
            text = document if isinstance(document, bytes) else json.dumps(document).encode()
            content.extend(bytes(-len(content) % 64))
            content.extend(text)
            return [len(content) - len(text), len(text), google_crc32c.value(text)]

        table["documents"] = {name: added(document) for name, document in documents.items()}
        offset, count, checksum = added(table)
        HEADER.pack_into(content, 0, MAGIC, VERSION, checksum, offset, count)
        return bytes(content)


def changed_artifact(data: bytes, draw: random.Random) -> bytes:
    """A change of one document of a saved session, or of its list of arrays."""
    saved = SavedDocuments(data)
    names = [*saved.by_name]
    name = draw.choice(names + [name for name in names if "plan" in name] * 2)
    words = () if name == "arrays" else _INTS
    changed = changed_json(json.dumps(saved.by_name[name]).encode(), draw, words)
    saved.by_name[name] = json.loads(changed)
    return saved.to_bytes()


def changed_plan(data: bytes, draw: random.Random) -> tuple[bytes, bool]:
    """One or two changes of what a saved session says of one of its plans; and whether the answers
    must stay, since only the order of steps or their places in the arena have changed."""
    saved = SavedDocuments(data)
    plans = [content for name, content in saved.by_name.items() if name.startswith("plan ")]
    if not plans:
        return changed_artifact(data, draw), False
    plan = draw.choice(plans)
    of_schedule = "arena" in plan and draw.random() < 0.3
    changes = [_change_arena] if of_schedule else [_change_node] * 4 + [_change_array] * 2
    changes += [] if of_schedule else [_change_placement, _change_copies, _change_input]
    for _ in range(draw.choice([1, 1, 2])):
        draw.choice(changes)(saved, plan, draw)
    return saved.to_bytes(), of_schedule


def _change_arena(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    order, offsets, _ = plan["arena"]
    if draw.random() < 0.3 and order:
        i, j = draw.randrange(len(order)), draw.randrange(len(order))
        order[i], order[j] = order[j], order[draw.choice([i, i, j])]
    elif offsets:
        place, other = draw.choice(offsets), draw.choice(offsets)
        near = place[1] + draw.choice([-128, -64, 64, 128, 4])
        place[draw.choice([1, 1, 1, 0])] = draw.choice([other[1], near, near, *_INTS])


def _change_node(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    """Other operands, another operation, or another attribute, of a node at any depth."""
    nodes = [node for graph in plan["graphs"].values() for node in _nodes(graph)]
    if not nodes:
        return
    node, values = draw.choice(nodes), range(len(plan["values"]))
    attributes = node[3] if len(node) > 3 else {}
    chance, operands = draw.random(), node[draw.choice([1, 1, 1, 2])]
    if chance < 0.5 and operands:
        at = draw.randrange(len(operands))
        operands[at] = draw.choice([*draw.choices(values, k=4), *draw.choice(nodes)[2], None])
    elif chance < 0.55:
        operands.append(draw.choice(values))
    elif chance < 0.6 and operands:
        operands.pop()
    elif chance < 0.7:
        node[0] = draw.randrange(len(plan["ops"]))
        if draw.random() < 0.3:
            plan["ops"][node[0]] = list(draw.choice(_operations()))
    elif attributes:
        # Of one node, or of another one with attributes of this name.
        key = draw.choice(sorted(attributes))
        alike = [n[3][key] for n in nodes if len(n) > 3 and key in n[3]]
        tree = [copy.deepcopy(draw.choice([attributes[key], *alike]))]
        places = [(c, k) for c, k in _json_places(tree) if isinstance(c[k], int | float)]
        if places:
            container, k = draw.choice(places)
            near = container[k] + draw.choice([-1, 1])
            container[k] = draw.choice([near, near, 0, -container[k], *_INTS])
        attributes[key] = tree[0]


@cache
def _operations() -> Sequence[tuple[str, str, int]]:
    """Domain, name and version of all operations."""
    internal = [(DOMAIN, name, 1) for name in INTERNAL]
    return sorted([(op.domain, op.name, op.version) for op in registered()] + internal * 20)


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph or region, and those among their attributes."""
    for node in graph["nodes"]:
        yield node
        for attribute in node[3].values() if len(node) > 3 else ():
            for key in ("graph", "region"):
                if isinstance(attribute, dict) and key in attribute:
                    yield from _nodes(attribute[key])


def _change_array(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    """Other contents of an array, another type of the same bytes, or another array's place."""
    arrays = [entry for entry in saved.by_name["arrays"] if entry[0] != "string"]
    if not arrays:
        return
    entry, other = draw.choice(arrays), draw.choice(arrays)
    name, shape, offset, count, _ = entry
    chance = draw.random()
    if chance < 0.6 and count:
        size = draw.choice([1, 4, 8])
        for _ in range(draw.choice([1, 1, 4])):
            at = offset + draw.randrange(count) // size * size
            word = draw.choice([*_INTS, draw.randrange(2**63)]) % 2 ** (8 * size)
            saved.content[at : min(at + size, offset + count)] = word.to_bytes(size, "little")[
                : offset + count - at
            ]
        entry[4] = google_crc32c.value(bytes(saved.content[offset : offset + count]))
    elif chance < 0.75 and shape:
        i, j = draw.randrange(len(shape)), draw.randrange(len(shape))
        shape[i], shape[j] = shape[i] * shape[j], 1
    elif chance < 0.85:
        entry[0] = draw.choice([other[0], name.replace("float", "int"), "uint8", "float32"])
    else:
        entry[:] = other


def _change_placement(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    placement = plan["placement"]
    if placement:
        at = draw.randrange(len(placement))
        placement[at] = draw.choice([*placement, "numpy", "native", "native", ""])


def _change_copies(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    """Packed constants of one kernel are another's, or arrays of other types."""
    named = [names for _, _, names in plan["copies"] if names]
    if not named:
        return _change_array(saved, plan, draw)
    names, others = draw.choice(named), draw.choice(named)
    key, index = draw.choice(sorted(names)), draw.choice(sorted(others.values()))
    if draw.random() < 0.5:
        names[key] = draw.choice([index, draw.randrange(len(saved.by_name["arrays"]))])
    else:
        names[draw.choice([*sorted(others), ""])] = names.pop(key)
    return None


def _change_input(saved: SavedDocuments, plan: Any, draw: random.Random) -> None:
    """Another type of an input, of the plan's graph or of one in it."""
    typed = [value for value in plan["values"] if isinstance(value, list) and len(value) == 2]
    shaped = [value[1] for value in typed if isinstance(value[1], list) and value[1][1]]
    if shaped:
        entry, other = draw.choice(shaped), draw.choice(shaped)
        at = draw.randrange(len(entry[1]))
        near = (entry[1][at] if isinstance(entry[1][at], int) else 1) + draw.choice([-1, 1])
        entry[1][at] = draw.choice([near, near, None, "N", draw.choice(other[1]), 0])
        entry[0] = draw.choice([entry[0], entry[0], other[0], "float64"])


def _json_places(container: Any) -> Iterator[tuple[Any, Any]]:
    """All containers within a list or dict, itself included, with each of their keys."""
    keys = range(len(container)) if isinstance(container, list) else list(container)
    for key in keys:
        yield container, key
        if isinstance(container[key], list | dict):
            yield from _json_places(container[key])


def parts(message: Message) -> Iterator[Message]:
    """A message and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in _children(field, value):
                yield from parts(child)


def _children(field: Any, value: Any) -> Sequence[Any]:
    if field.message_type.GetOptions().map_entry:
        return [v for v in value.values() if isinstance(v, Message)]
    return list(value) if field.is_repeated else [value]


def change_message(
    message: Message, draw: random.Random, words: Mapping[str, Sequence[str]]
) -> None:
    """One to four changes of fields, in place. ``words``: values worth trying, by field name."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        inside = list(parts(message))
        values: dict[str, list[Any]] = defaultdict(list)  # by field, all that the file has
        for part in inside:
            for field, value in part.ListFields():
                single = not field.is_repeated
                values[field.full_name] += [value] if single else list(_items(field, value))
        part = draw.choice(inside)
        present = [field for field, _ in part.ListFields()]
        if present and draw.random() < 0.8:
            field = draw.choice(present)
        else:
            field = draw.choice(part.DESCRIPTOR.fields)
        try:
            _change_field(part, field, draw, values[field.full_name], words.get(field.name, ()))
        except (TypeError, ValueError):
            continue  # a value that the field cannot hold


def _items(field: Any, value: Any) -> Sequence[Any]:
    return list(value.values()) if _is_map(field) else list(value)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _change_field(
    part: Message, field: Any, draw: random.Random, alike: Sequence[Any], words: Sequence[str]
) -> None:
    value = getattr(part, field.name)
    model = copy.deepcopy(draw.choice(alike)) if alike else None  # it may contain ``part``
    if _is_map(field):
        key = draw.choice([*value] or [""])
        if isinstance(model, Message) and draw.random() < 0.5:
            value[key].CopyFrom(model)
        elif key in value:
            del value[key]
    elif field.message_type is not None and not field.is_repeated:
        if draw.random() < 0.4 or model is None:
            part.ClearField(field.name)
        else:
            value.CopyFrom(model)
    elif not field.is_repeated:
        if draw.random() < 0.1:
            part.ClearField(field.name)
        else:
            setattr(part, field.name, _scalar(field, draw, alike, words))
    elif value and draw.random() < 0.3:
        del value[draw.randrange(len(value))]
    elif field.message_type is not None:
        fresh = value[draw.randrange(len(value))] if value and draw.random() < 0.5 else value.add()
        if model is not None:
            fresh.CopyFrom(model)
    elif value and draw.random() < 0.7:
        value[draw.randrange(len(value))] = _scalar(field, draw, alike, words)
    else:
        value.append(_scalar(field, draw, alike, words))


def _scalar(field: Any, draw: random.Random, alike: Sequence[Any], words: Sequence[str]) -> Any:
    if words and draw.random() < 0.5:
        return draw.choice(words)
    if alike and draw.random() < 0.5:
        return draw.choice(alike)
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return draw.choice(_FLOATS)
    if field.cpp_type == field.CPPTYPE_STRING:
        return draw.choice(_BYTES if field.type == field.TYPE_BYTES else _TEXTS)
    if field.cpp_type == field.CPPTYPE_BOOL:
        return draw.random() < 0.5
    if field.cpp_type == field.CPPTYPE_ENUM:
        return draw.choice([v.number for v in field.enum_type.values] + [99])
    return draw.choice(_INTS if draw.random() < 0.7 else range(28))


def shrunk(message: Message, fails: Callable[[Message], bool]) -> Message:
    """A smaller message for which ``fails`` holds, as it does for ``message``: fields and elements
    are taken away one by one, until none can be spared or ``fails`` raises ``TimeoutError``."""
    best = message
    try:
        smaller = True
        while smaller:
            smaller = False
            for number, place in reversed([*enumerate(_places(best))]):
                candidate = type(best)()
                candidate.CopyFrom(best)
                if number < len(places := _places(candidate)) and places[number][1:] == place[1:]:
                    _remove(*places[number])
                    if fails(candidate):
                        best, smaller = candidate, True
    except TimeoutError:
        pass
    return best


def _places(message: Message) -> list[tuple[Message, str, Any]]:
    """What can be removed: messages, fields of theirs, and keys or indices in these."""
    places: list[tuple[Message, str, Any]] = []
    for part in parts(message):
        for field, value in part.ListFields():
            if _is_map(field):
                places += [(part, field.name, key) for key in value]
            elif field.is_repeated and len(value) <= 200:
                places += [(part, field.name, index) for index in range(len(value))]
            else:
                places.append((part, field.name, None))
    return places


def _remove(part: Message, name: str, index: Any) -> None:
    if index is None:
        part.ClearField(name)
    else:
        del getattr(part, name)[index]
