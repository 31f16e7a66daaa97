"""Text, as ``penstock.textual.printer`` writes it, back to graphs and models.

By recursive descent over tokens, to a tree whose names are then resolved: in two steps, because the
nodes of a graph stand in any order and may refer to what comes later. Every fault is an
``InvalidModel`` that says line and column.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from penstock import ops
from penstock.errors import InvalidModel
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.limits import DEFAULT_LIMITS
from penstock.ops.common.reference import reference_op
from penstock.ops.internal.case import CASE, expand_case
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.textual.printer import CONSTANTS, NAME, WORDS, filled, number
from penstock.types import (
    ANY,
    STRING,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    Shape,
    TensorType,
    Type,
    dtype_name,
    dtypes,
)

Find: TypeAlias = Callable[[str, str, int | None], ops.Op | None]

_INTERNAL = {(op.name, op.domain): op for op in (CASE, ZERO_NAN)}  # in no table, but read here


def find_operation(name: str, domain: str, version: int | None) -> ops.Op | None:
    """The operation of that name in the table, or among those of ``onnx.reference``; Case, of which
    the graph gets what it expands to; or ZeroNaN, which passes insert."""
    if (name, domain) in _INTERNAL:
        return _INTERNAL[name, domain]
    found = ops.find(name, domain, version)
    if found is None and version is not None:
        return reference_op(name, domain, version)
    return found


def parse_graph(text: str, find: Find = find_operation) -> Graph:
    """The graph that ``text`` describes, as ``format_graph`` writes it.

    ``find(name, domain, version)`` says which operation is meant; version ``None`` is the newest.
    Raises ``InvalidModel`` with line and column. What comes back is well-formed, but not verified.
    """
    parser = _Parser(text, find)
    graph = parser.graph()
    parser.end()
    return parser.build(graph, None)


def parse_model(text: str, find: Find = find_operation) -> Model:
    """The model that ``text`` describes, as ``format_model`` writes it; else as ``parse_graph``.

    The text of a graph alone, as ``format_graph`` writes it, is a model of this graph.
    """
    parser = _Parser(text, find)
    if parser.sees("graph"):
        graph = parser.build(parser.graph(), None)
        parser.end()
        return Model({graph.name: graph}, graph.name)
    return parser.model()


_TOKEN = re.compile(
    rf"""
      (?P<blank> (?: \s | \#[^\n]* )+ )
    | (?P<string> " (?: [^"\\\n] | \\. )* " )
    | (?P<number> -? [0-9]+ (?: \.[0-9]+ )? (?: [eE] [-+]? [0-9]+ )? )
    | (?P<name> {NAME} )
    | (?P<mark> -> | :: | \.\.\. | [-(){{}}\[\],:=?] )
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 400  # of a number; Python refuses to convert very long ones


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    offset: int


@dataclass(slots=True)
class _Reference:
    """A name, or the position of a node, and where the text says it."""

    name: str | int
    offset: int


@dataclass(slots=True)
class _Declaration:
    name: str
    type: Type
    offset: int
    const: np.ndarray | None = None

    def value(self) -> Value:
        return Value(self.name, self.type, const=self.const)


@dataclass(slots=True)
class _NodeText:
    op: ops.Op
    outputs: list[_Declaration | None]
    inputs: list[_Reference | None]
    attrs: dict[str, Any]
    graphs: dict[str, _GraphText]
    offset: int
    after: list[_Reference] = field(default_factory=list)
    device: str = ""
    name: str = ""
    origin: str = ""


@dataclass(slots=True)
class _GraphText:
    name: str
    inputs: list[_Declaration]
    uses: list[_Declaration]
    outputs: list[_Reference]
    targets: list[_Reference] = field(default_factory=list)
    constants: list[_Declaration] = field(default_factory=list)
    nodes: list[_NodeText] = field(default_factory=list)


@dataclass(slots=True)
class _Scope:
    values: dict[str, Value]
    around: _Scope | None

    def find(self, name: str) -> Value | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.around
        return None


T = TypeVar("T")


class _Parser:
    """Cuts a text into tokens, reads them, and resolves the names (``build``)."""

    def __init__(self, text: str, find: Find) -> None:
        self.text = text
        self.find = find
        self.position = 0
        self.depth = 0
        self.tokens: list[_Token] = []
        offset = 0
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                odd = text[offset]
                self.fail(
                    offset,
                    "this string does not end" if odd == '"' else f"{odd!r} cannot stand here",
                )
            kind = match.lastgroup
            assert kind is not None
            if kind != "blank":
                self.tokens.append(_Token(kind, match.group(), offset))
            offset = match.end()
        self.tokens.append(_Token("end", "the end of the text", offset))

    def fail(self, offset: int, problem: str) -> NoReturn:
        before = self.text[:offset]
        line, column = before.count("\n") + 1, offset - (before.rfind("\n") + 1) + 1
        raise InvalidModel(f"line {line}, column {column}: {problem}")

    # Tokens

    @property
    def token(self) -> _Token:
        return self.tokens[self.position]

    def advance(self) -> _Token:
        token = self.token
        self.position += token.kind != "end"
        return token

    def sees(self, text: str, ahead: int = 0) -> bool:
        position = min(self.position + ahead, len(self.tokens) - 1)
        token = self.tokens[position]
        return token.text == text and token.kind in ("mark", "name")

    def accept(self, text: str) -> bool:
        found = self.sees(text)
        self.position += found
        return found

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.unexpected(repr(text))

    def unexpected(self, wanted: str) -> NoReturn:
        found = self.token.text if self.token.kind == "end" else repr(self.token.text[:40])
        self.fail(self.token.offset, f"expected {wanted}, found {found}")

    def end(self) -> None:
        if self.token.kind != "end":
            self.unexpected("the end of the text")

    def many(self, opening: str, item: Callable[[], T], closing: str) -> list[T]:
        """Items between marks, separated by commas."""
        self.expect(opening)
        items: list[T] = []
        if self.accept(closing):
            return items
        while True:
            items.append(item())
            if self.accept(closing):
                return items
            if not self.accept(","):
                self.unexpected(f"',' or {closing!r}")

    def nested(self, item: Callable[[], T]) -> T:
        """What may contain itself, no deeper than graphs may nest anyway."""
        self.depth += 1
        if self.depth > DEFAULT_LIMITS.max_depth:
            self.fail(self.token.offset, f"this nests deeper than {DEFAULT_LIMITS.max_depth}")
        result = item()
        self.depth -= 1
        return result

    def name(self, what: str) -> str:
        token = self.token
        if token.kind == "string":
            return self.string(what)
        if token.kind != "name":
            self.unexpected(what)
        if token.text in WORDS:
            self.fail(token.offset, f"{token.text!r} is a word of its own; put quotes around it")
        return self.advance().text

    def string(self, what: str) -> str:
        token = self.token
        if token.kind != "string":
            self.unexpected(f"{what}, in quotes")
        try:
            text = json.loads(token.text, strict=False)
        except ValueError:
            self.fail(token.offset, "a string must be written as in JSON")
        self.advance()
        return str(text)

    def integer(self, what: str) -> int:
        value = self.number() if self.token.kind == "number" else None
        if not isinstance(value, int):
            self.unexpected(what)
        return value

    def number(self) -> int | float:
        token = self.advance()
        if len(token.text) > _MAX_DIGITS:
            self.fail(token.offset, f"a number has at most {_MAX_DIGITS} digits")
        return number(token.text)

    # Models and graphs

    def model(self) -> Model:
        self.expect("model")
        entry = self.name("the name of the graph that a run starts with")
        path = self.string("a path") if self.accept("path") else None
        metadata: dict[str, str] = {}
        graphs: dict[str, Graph] = {}
        functions: dict[str, Graph] = {}
        self.expect("{")
        while not self.accept("}"):
            offset = self.token.offset
            if self.accept("metadata"):
                key = self.name("a key")
                self.expect("=")
                metadata[key] = self.string("a text")
                continue
            found = functions if self.accept("function") else graphs
            named = None
            if not self.sees("graph"):
                named = self.name("'metadata', 'function', a graph or '}'")
                self.expect(":")
            graph = self.build(self.graph(), None)
            key = graph.name if named is None else named
            if key in found:
                self.fail(offset, f"there is a graph or function {key!r} already")
            found[key] = graph
        self.end()
        return Model(graphs, entry, functions, metadata, path)

    def graph(self) -> _GraphText:
        return self.nested(self.graph_text)

    def graph_text(self) -> _GraphText:
        self.expect("graph")
        name = "" if self.sees("(") else self.name("a name or '('")
        inputs = self.many("(", self.declaration, ")")
        uses = self.many("(", self.declaration, ")") if self.accept("uses") else []
        self.expect("->")
        graph = _GraphText(name, inputs, uses, self.many("(", self.reference, ")"))
        if self.accept("targets"):
            graph.targets = self.many("(", self.node_reference, ")")
        self.expect("{")
        while not self.accept("}"):
            self.statement(graph)
        return graph

    def declaration(self) -> _Declaration:
        offset = self.token.offset
        name = self.name("the name of a value")
        return _Declaration(name, self.type() if self.accept(":") else ANY, offset)

    def reference(self) -> _Reference:
        return _Reference(offset=self.token.offset, name=self.name("the name of a value"))

    def statement(self, graph: _GraphText) -> None:
        outputs: list[_Declaration | None] = []
        if any(self.sees(mark, ahead=1) for mark in (",", ":", "=")):
            outputs.append(self.output())
            while self.accept(","):
                outputs.append(self.output())
            self.expect("=")
        if self.sees("const"):
            graph.constants.append(self.constant(outputs))
        else:
            graph.nodes.append(self.node(outputs))

    def output(self) -> _Declaration | None:
        return None if self.accept("_") else self.declaration()

    def constant(self, outputs: Sequence[_Declaration | None]) -> _Declaration:
        offset = self.token.offset
        self.expect("const")
        if len(outputs) != 1 or outputs[0] is None:
            self.fail(offset, "a constant is one value: 'name: type = const ...'")
        declared = outputs[0]
        kind = declared.type
        if self.token.kind == "name" and self.token.text in dtypes():
            kind = self.type()
        elif isinstance(kind, TensorType) and kind.data is None:
            declared.type = ANY  # that which its contents have
        declared.const = self.array(kind, offset)
        return declared

    def node(self, outputs: list[_Declaration | None]) -> _NodeText:
        start = self.token.offset
        op = self.operation()
        attrs: dict[str, Any] = {}
        if self.sees("{"):
            for offset, key, attribute in self.many("{", self.attribute, "}"):
                if key in attrs:
                    self.fail(offset, f"there is an attribute {key!r} already")
                attrs[key] = attribute
        inputs = self.many("(", self.optional_reference, ")")
        node = _NodeText(op, outputs, inputs, attrs, {}, start)
        self.clauses(node)
        if self.accept("{"):
            while not self.accept("}"):
                offset = self.token.offset
                key = self.name("the name of an attribute or '}'")
                self.expect(":")
                if key in attrs or key in node.graphs:
                    self.fail(offset, f"there is an attribute {key!r} already")
                node.graphs[key] = self.graph()
        return node

    def operation(self) -> ops.Op:
        offset = self.token.offset
        name = self.name("an operation or '}'")
        if self.accept("::"):
            domain, name = name, self.name("the name of an operation")
        else:
            domain, _, name = name.rpartition(".")
        version = None
        if self.token.kind == "number" and self.token.text.startswith("-"):
            version = -self.integer("a version")
        op = self.find(name, domain, version)
        if op is None:
            known = [o.full_name for o in ops.registered()]
            full = f"{domain}.{name}" if domain else name
            close = [] if full in known else difflib.get_close_matches(full, known, 1)
            hint = f"; is it {close[0]}?" if close else ""
            which = full if version is None else f"{full}-{version}"
            self.fail(offset, f"there is no operation {which}{hint}")
        return op

    def attribute(self) -> tuple[int, str, Any]:
        offset = self.token.offset
        key = self.name("the name of an attribute")
        self.expect("=")
        return offset, key, self.literal()

    def optional_reference(self) -> _Reference | None:
        return None if self.accept("_") else self.reference()

    def clauses(self, node: _NodeText) -> None:
        seen: set[str] = set()
        while self.token.kind == "name" and self.token.text in ("after", "on", "as", "in", "from"):
            # A clause belongs to the node before it: as a name it would be in quotes.
            token = self.advance()
            word = "from" if token.text == "in" else token.text
            if word in seen:
                self.fail(token.offset, f"a node has only one {token.text!r}")
            seen.add(word)
            if word == "after":
                node.after = self.many("(", self.node_reference, ")")
            elif word == "on":
                node.device = self.name("a device")
            elif word == "as":
                node.name = self.name("the name of the node")
            elif token.text == "from":
                node.origin = self.name("an origin")
            elif "as" in seen:
                node.origin = f"{node.name} in {self.name('where the node comes from')}"
            else:
                self.fail(token.offset, "'in' comes after 'as'; 'from' gives an origin without it")

    def node_reference(self) -> _Reference:
        offset = self.token.offset
        if self.token.kind == "number":
            return _Reference(self.integer("the position of a node"), offset)
        return _Reference(self.name("the name or the position of a node"), offset)

    # Types and literals

    def type(self) -> Type:
        return self.nested(self.type_text)

    def type_text(self) -> Type:
        if self.accept("any"):
            return ANY
        for word, of in (("seq", SequenceType), ("optional", OptionalType)):
            if self.accept(word):
                self.expect("(")
                element = self.type()
                self.expect(")")
                return of(element)
        if self.accept("map"):
            self.expect("(")
            key = self.dtype()
            self.expect(",")
            value = self.type()
            self.expect(")")
            return MapType(key, value)
        dtype = None if self.accept("?") else self.dtype()
        shape: Shape | None = None
        if self.sees("...", ahead=1):
            self.expect("[")
            self.expect("...")
            self.expect("]")
        else:
            shape = tuple(self.many("[", self.dim, "]"))
        data = tuple(self.many("{", self.dim, "}")) if self.sees("{") else None
        return TensorType(dtype, shape, data)

    def dtype(self) -> np.dtype:
        token = self.token
        if token.kind != "name" or token.text not in dtypes():
            self.unexpected("a type")
        return dtypes()[self.advance().text]

    def dim(self) -> Dim:
        if self.accept("?"):
            return None
        if self.token.kind == "number":
            return self.integer("a dim")
        return self.name("a dim: a number, a name or '?'")

    def literal(self) -> Any:
        return self.nested(self.literal_text)

    def literal_text(self) -> Any:
        token = self.token
        if token.kind == "string":
            return self.string("a text")
        if token.kind == "number":
            return self.number()
        if self.sees("["):
            return self.many("[", self.literal, "]")
        if self.sees("("):
            return tuple(self.many("(", self.literal, ")"))
        if self.sees("..."):
            self.fail(token.offset, "what stands here was only shown, and cannot be read back")
        if self.accept("-"):
            self.expect("inf")
            return -math.inf
        if token.kind == "name" and token.text in CONSTANTS:
            return CONSTANTS[self.advance().text]
        if self.accept("bytes"):
            return self.base64()
        if self.accept("type"):
            return self.type()
        if self.accept("dtype"):
            return self.dtype()
        if token.kind != "name" or token.text not in dtypes():
            self.unexpected("a value")
        return self.array(self.type(), token.offset)

    def base64(self) -> bytes:
        offset = self.token.offset
        try:
            return base64.b64decode(self.string("base64"), validate=True)
        except (binascii.Error, ValueError):
            self.fail(offset, "this is not base64")

    def array(self, kind: Type, offset: int) -> np.ndarray:
        """The contents of an array of type ``kind``."""
        if not isinstance(kind, TensorType) or not kind.static or min(kind.dims, default=0) < 0:
            self.fail(offset, "an array needs its dtype and all its dims: float32[3, 4]")
        assert kind.dtype is not None
        size = math.prod(kind.dims)
        if self.accept("base64"):
            data = self.base64()
            if kind.dtype == STRING or len(data) != size * kind.dtype.itemsize:
                self.fail(offset, f"{len(data)} bytes do not fit {kind}")
            array = np.frombuffer(data, kind.dtype.newbyteorder("<")).astype(kind.dtype)
            if array.dtype == np.bool_ and any(byte > 1 for byte in data):
                self.fail(offset, "a bool is a byte of 0 or 1")
        else:
            array = self.elements(kind.dtype, kind.dims, self.literal(), offset)
        try:
            return array.reshape(kind.dims)
        except (OverflowError, ValueError):
            self.fail(offset, f"{kind} is not a shape that an array can have")

    def elements(
        self, dtype: np.dtype, shape: Sequence[int], literal: Any, offset: int
    ) -> np.ndarray:
        flat, size = [literal], math.prod(shape)
        for dim in shape if size or literal != [] else ():
            if any(not isinstance(row, list) or len(row) != dim for row in flat):
                self.fail(offset, f"these elements do not fit the shape {list(shape)}")
            flat = list(chain.from_iterable(flat))
        if not size:
            return np.empty(0, dtype)
        wanted = str if dtype == STRING else bool if dtype == np.bool_ else int | float
        for element in flat:
            # A bool is an int to Python, but no number here.
            odd = isinstance(element, bool) and wanted is not bool
            if odd or not isinstance(element, wanted):
                self.fail(offset, f"{element!r} is no element of a {dtype_name(dtype)} array")
        try:
            return filled(dtype, flat)
        except (OverflowError, ValueError):
            self.fail(offset, f"some elements are no values of {dtype_name(dtype)}")

    # Names

    def build(self, text: _GraphText, around: _Scope | None) -> Graph:
        """The graph, its names resolved to values, nested graphs included."""
        scope = _Scope({}, around)

        def declare(declared: _Declaration) -> Value:
            if declared.name in scope.values:
                self.fail(declared.offset, f"there is a value {declared.name!r} already")
            scope.values[declared.name] = value = declared.value()
            return value

        def resolve(reference: _Reference) -> Value:
            assert isinstance(reference.name, str)
            value = scope.find(reference.name)
            if value is None:
                close = difflib.get_close_matches(reference.name, scope.values, 1)
                hint = f"; is it {close[0]!r}?" if close else ""
                self.fail(reference.offset, f"there is no value {reference.name!r}{hint}")
            return value

        for declared in (*text.uses, *text.constants):
            declare(declared)
        inputs = [declare(declared) for declared in text.inputs]
        made = [[d if d is None else declare(d) for d in node.outputs] for node in text.nodes]
        nodes = []
        for node, outputs in zip(text.nodes, made, strict=True):
            graphs = {key: self.build(inner, scope) for key, inner in node.graphs.items()}
            nodes.append(
                Node(
                    node.op,
                    [r if r is None else resolve(r) for r in node.inputs],
                    outputs,
                    {**node.attrs, **graphs},
                    name=node.name,
                    device=node.device,
                    origin=node.origin,
                )
            )
        targets = self.connect(text, nodes)
        nodes = list(chain.from_iterable(map(self.expand, nodes, text.nodes)))
        return Graph(inputs, [resolve(r) for r in text.outputs], nodes, text.name, targets)

    def expand(self, node: Node, text: _NodeText) -> Sequence[Node]:
        if node.op is not CASE:
            return (node,)
        try:
            return expand_case(node)
        except ValueError as error:
            self.fail(text.offset, str(error))

    def connect(self, text: _GraphText, nodes: list[Node]) -> list[Node]:
        """Resolve the control inputs of the nodes of one graph; its targets."""
        named: dict[str | int, list[Node]] = {i: [node] for i, node in enumerate(nodes)}
        for node in nodes:
            named.setdefault(node.name, []).append(node)

        def resolve(reference: _Reference) -> Node:
            found = named.get(reference.name, [])
            if len(found) != 1:
                told = f"{len(found)} nodes of this graph are {reference.name!r}"
                self.fail(reference.offset, told)
            return found[0]

        for node, written in zip(nodes, text.nodes, strict=True):
            node.control_inputs += map(resolve, written.after)
        return [resolve(reference) for reference in text.targets]
