"""Tables of a model and their contents: keys and values from the nodes that fill them.

A table is filled once, by nodes that TensorFlow runs before any other: those of the initializer of
a SavedModel, or of a frozen graph, and those that restore a mutable one. They are found anywhere in
the graph or in functions that it calls. Their inputs must be constants, tensors of the checkpoint,
or lines of a file among the model's assets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple
from penstock.core.types import STRING, find_dtype
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import decode_text, vector_of
from penstock.frontends.tensorflow.function_library import FunctionLibrary, called_functions
from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef
from penstock.frontends.tensorflow.scope import created_handle
from penstock.frontends.tensorflow.tensors import type_name
from penstock.ir.graph import Value

TABLES = frozenset({"HashTable", "HashTableV2", "MutableHashTableV2"})
_FROM_FILE = {"InitializeTableFromTextFile", "InitializeTableFromTextFileV2"}
FILLING = _FROM_FILE | {"InitializeTable", "InitializeTableV2", "LookupTableImportV2"}
"""operations that fill a table"""
_MOST_CALLS = 10_000
_MOST_IDENTITIES = 16
# Special indices of a line's parts: the whole line, and its number.
_WHOLE_LINE, _LINE_NUMBER = -2, -1

Contents = tuple[np.ndarray, np.ndarray]
"""keys without repetition, and their values"""


class Source(NamedTuple):
    """A node that gives a value as its ``output``, and the graph or function that contains it."""

    where: str
    node: NodeDef
    output: int = 0


class Tables:
    """The contents of tables by the name of the node that creates their handle; None where they are
    not known. ``declare`` records the handles."""

    def __init__(self, contents: Mapping[str, Contents | None]) -> None:
        self._by_node = contents
        self._names: dict[Value, str] = {}

    def declare(self, node: str, handle: Value) -> None:
        self._names[handle] = node

    def contents(self, handle: Value) -> Contents | None:
        """Return the contents of the table of a handle, or of a copy in a branch or a loop."""
        return self._by_node.get(self._names.get(created_handle(handle), ""))


def table_contents(
    nodes: Iterable[NodeDef],
    library: FunctionLibrary,
    where: str,
    asset: Callable[[str], bytes | None] = lambda node: None,
    checkpoint: Callable[[str], np.ndarray | None] = lambda key: None,
) -> Tables:
    """Return the tables of a graph and of the functions that it calls. ``asset`` returns the file
    whose path is the constant of a given name, ``checkpoint`` the tensor of a key. Raises
    ``InvalidModel``."""
    top = {node.name: node for node in nodes}
    contents: dict[str, Contents | None] = {
        node.name: None for node in top.values() if node.op in TABLES
    }
    if not contents:
        return Tables({})
    # Newer SavedModels assign the paths of their files to variables, which the initializer reads.
    assigned = {
        node_of(node.input[0]): node_of(node.input[1])
        for node in top.values()
        if node.op == "AssignVariableOp" and len(node.input) > 1
    }

    def content(source: Source) -> bytes | None:
        name = source.node.name
        if source.node.op == "ReadVariableOp" and source.node.input:
            name = assigned.get(node_of(source.node.input[0]), "")
        return asset(name) if source.where == where else None

    filling = _filling_functions(library)
    filled: set[str] = set()
    stack: list[tuple[str, Mapping[str, NodeDef], Mapping[str, Source | None]]] = [(where, top, {})]
    for _ in range(_MOST_CALLS):
        if not stack:
            return Tables(contents)
        place, inside, arguments = stack.pop()

        array = partial(_array, body=(place, inside, arguments), library=library, read=checkpoint)
        for node in inside.values():
            sources = [_source(text, place, inside, arguments) for text in node.input]
            if node.op in FILLING:
                table = sources[0] if sources else None
                if table is None or table.node.op not in TABLES or table.where != where:
                    continue
                name = table.node.name
                given = _filled(node, table.node, sources[1:], place, array, content)
                # The order of runs decides which of the two remains.
                again = name in filled and not _are_equal(contents[name], given)
                contents[name] = None if again else given
                filled.add(name)
            for callee in dict.fromkeys(called_functions(node)):
                if callee in filling:
                    function = library.functions[callee]
                    names = [argument.name for argument in function.signature.input_arg]
                    body = {inner.name: inner for inner in function.node_def}
                    bound = dict(zip(names, sources, strict=False))
                    stack.append((callee, body, bound))
    raise InvalidModel(
        f"{where} fills its tables in more than {_MOST_CALLS} calls of functions; save it with "
        "fewer"
    )


def node_of(name: str) -> str:
    """Return the node that produces the tensor of this name."""
    return name.split(":")[0]


def _filling_functions(library: FunctionLibrary) -> set[str]:
    """Return the functions that fill tables, or call one that does."""
    callers: dict[str, list[str]] = {}
    pending = []
    for name, function in library.functions.items():
        for node in function.node_def:
            if node.op in FILLING:
                pending.append(name)
            for callee in called_functions(node):
                callers.setdefault(callee, []).append(name)
    filling: set[str] = set()
    # A table that a recursive function fills cannot be evaluated.
    while pending:
        name = pending.pop()
        if name not in filling and name not in library.recursive:
            filling.add(name)
            pending += callers.get(name, ())
    return filling


def _source(
    text: str, where: str, nodes: Mapping[str, NodeDef], arguments: Mapping[str, Source | None]
) -> Source | None:
    """Return the node that produces a value, before Identity nodes and function arguments."""
    for _ in range(_MOST_IDENTITIES):
        name = node_of(text)
        if name in arguments:
            return arguments[name]
        node = nodes.get(name)
        if node is None:
            return None
        if node.op != "Identity" or not node.input:
            index = text.rpartition(":")[2]
            return Source(where, node, int(index) if index.isdecimal() and len(index) < 9 else 0)
        text = node.input[0]
    return None


def _filled(
    node: NodeDef,
    table: NodeDef,
    sources: list[Source | None],
    where: str,
    array: Callable[[Source], np.ndarray | None],
    asset: Callable[[Source], bytes | None],
) -> Contents | None:
    """Return the contents with which a node fills a table; None if they are not constant. Raises
    ``InvalidModel``."""
    subject = f"{node.name} in {where} ({node.op})"
    if node.op in _FROM_FILE:
        content = asset(sources[0]) if sources and sources[0] else None
        if content is None:
            return None
        try:
            pairs = _of_lines(content, node, table)
        except (TensorError, ValueError) as error:
            raise InvalidModel(f"{subject} reads a file that does not fit: {error}") from error
    else:
        arrays = [None if source is None else array(source) for source in sources[:2]]
        if len(arrays) < 2 or arrays[0] is None or arrays[1] is None:
            return None
        pairs = arrays[0].reshape(-1), arrays[1].reshape(-1)
    keys, values = pairs
    if len(keys) != len(values):
        raise InvalidModel(
            f"{subject} gives {len(keys)} keys and {len(values)} values; export the model again"
        )
    known: dict[Any, Any] = {}
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        if known.setdefault(key, value) != value:
            raise InvalidModel(
                f"{subject} gives the key {key!r:.100} two values, {known[key]!r:.100} and "
                f"{value!r:.100}; leave one out"
            )
    if len(known) < len(keys):
        keys = vector_of(list(known), keys.dtype)
        values = vector_of(list(known.values()), values.dtype)
    return keys, values


_Body = tuple[str, Mapping[str, NodeDef], Mapping[str, Source | None]]
"""a graph or function, with its nodes and arguments"""


def _array(
    source: Source, body: _Body, library: FunctionLibrary, read: Callable[[str], np.ndarray | None]
) -> np.ndarray | None:
    """Return a constant, or what a node of ``body`` restores from the checkpoint."""
    if source.node.op != "RestoreV2" or source.where != body[0] or len(source.node.input) < 2:
        return _constant(source, library)
    named = _source(source.node.input[1], *body)
    keys = None if named is None else _constant(named, library)
    if keys is None or source.output >= keys.size:
        return None
    return read(str(keys.flat[source.output]))


def _constant(source: Source, library: FunctionLibrary) -> np.ndarray | None:
    where, node, _ = source
    value = node.attr.get("value")
    if node.op != "Const" or value is None or not value.HasField("tensor"):
        return None
    try:
        return library.constants.read(where, node.name, value, value.tensor)
    except TensorError as error:
        raise InvalidModel(f"{node.name} in {where} {error}") from error


def _are_equal(one: Contents | None, other: Contents | None) -> bool:
    return one is not None and other is not None and all(map(np.array_equal, one, other))


# Files.


def _of_lines(content: bytes, node: NodeDef, table: NodeDef) -> Contents:
    """Return keys and values from the lines of a file. Raises ``ValueError``, ``TensorError``."""
    lines = content.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    attrs = node.attr
    lines = lines[attrs["offset"].i :] if "offset" in attrs else lines
    size = attrs["vocab_size"].i if "vocab_size" in attrs else -1
    if size >= 0:
        if size > len(lines):
            raise ValueError(f"it has {len(lines)} lines, fewer than vocab_size = {size}")
        lines = lines[:size]
    delimiter = attrs["delimiter"].s if "delimiter" in attrs else b"\t"
    sides = []
    for index, dtype in (("key_index", "key_dtype"), ("value_index", "value_dtype")):
        element_type = find_dtype(type_name(table.attr[dtype].type))
        if element_type is None:
            raise ValueError(f"its table has no elements of {dtype}")
        sides.append(_column(lines, attrs[index].i, delimiter, element_type))
    return sides[0], sides[1]


def _column(lines: list[bytes], index: int, delimiter: bytes, dtype: np.dtype) -> np.ndarray:
    if index == _LINE_NUMBER:
        return np.arange(len(lines)).astype(dtype)
    parts = lines
    if index != _WHOLE_LINE:
        rows = [line.split(delimiter) if delimiter else [line] for line in lines]
        if index < 0 or any(len(row) <= index for row in rows):
            raise ValueError(f"a line of it has no part {index}")
        parts = [row[index] for row in rows]
    # Files that were written on Windows end their lines with \r\n.
    texts = [decode_text(part.removesuffix(b"\r")) for part in parts]
    if dtype == STRING:
        return vector_of(texts, STRING)
    read = int if dtype.kind in "iu" else float
    return vector_of([read(text) for text in texts], dtype)
