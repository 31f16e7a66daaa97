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
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from penstock import ops
from penstock.core.errors import InvalidModel
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import (
    ANY,
    STRING,
    Dim,
    MapType,
    Shape,
    TensorType,
    Type,
    dtype_name,
    dtypes,
)
from penstock.ir.graph import Graph, Model, Node, Value, sort
from penstock.ir.op import Attrs
from penstock.ops.internal import internal_operation
from penstock.ops.internal.case import CASE, expand_case
from penstock.ops.internal.fused import FUSED, fused
from penstock.textual.printer import CONSTANTS, NAME, WORDS, WRAPPERS, filled, number

Find: TypeAlias = Callable[[str, str, int | None], ops.Op | None]


def find_operation(name: str, domain: str, version: int | None) -> ops.Op | None:
    """The operation of that name in the table, or one that passes insert, or Case, of which the
    graph gets what it expands to."""
    return internal_operation(name, domain) or ops.find(name, domain, version)


def parse_graph(text: str, find: Find = find_operation) -> Graph:
    """The graph that ``text`` describes, as ``format_graph`` writes it. ``find(name, domain,
    version)`` says which operation is meant; version ``None`` is the newest. Raises
    ``InvalidModel`` with line and column. What comes back is well-formed, but not verified."""
    parser = _Parser(text, find)
    graph = parser.graph()
    parser.end()
    return parser.build(graph)


def parse_model(text: str, find: Find = find_operation) -> Model:
    """The model that ``text`` describes, as ``format_model`` writes it; else as ``parse_graph``.
    The text of a graph alone, as ``format_graph`` writes it, is a model of this graph."""
    parser = _Parser(text, find)
    if parser.sees("graph"):
        graph = parser.build(parser.graph())
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
    | (?P<odd> . )
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 400  # of a number; Python refuses to convert very long ones


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int


class _Reference(NamedTuple):
    """A name, or the position of a node, and where the text says it."""

    name: str | int
    offset: int


@dataclass(slots=True)
class _NodeText:
    op: ops.Op
    outputs: list[Value | None]
    inputs: list[_Reference | None]
    attrs: dict[str, Any]
    offset: int
    graphs: dict[str, _GraphText] = field(default_factory=dict)
    after: list[_Reference] = field(default_factory=list)
    labels: dict[str, Any] = field(default_factory=dict)  # name, device and origin


@dataclass(slots=True)
class _GraphText:
    name: str
    scope: ChainMap[str, Value]
    inputs: list[Value]
    outputs: list[_Reference]
    targets: list[_Reference] = field(default_factory=list)
    nodes: list[_NodeText] = field(default_factory=list)


T = TypeVar("T")


def _nested(item: Callable[[_Parser], T]) -> Callable[[_Parser], T]:
    """A decorator of items that may contain themselves, no deeper than graphs may nest anyway."""

    def checked(parser: _Parser) -> T:
        parser.depth += 1
        if parser.depth > DEFAULT_LIMITS.max_depth:
            parser.fail(parser.token.offset, f"this nests deeper than {DEFAULT_LIMITS.max_depth}")
        result = item(parser)
        parser.depth -= 1
        return result

    return checked


class _Parser:
    """Cuts a text into tokens, reads them, and resolves the names (``build``)."""

    def __init__(self, text: str, find: Find) -> None:
        self.text = text
        self.find = find
        self.position = 0
        self.depth = 0
        self.scope: ChainMap[str, Value] = ChainMap()  # the values declared so far
        self.tokens: list[_Token] = []
        for match in _TOKEN.finditer(text):
            kind, piece, offset = match.lastgroup or "", match.group(), match.start()
            if kind == "odd":
                odd = "this string does not end" if piece == '"' else f"{piece!r} cannot stand here"
                self.fail(offset, odd)
            if kind != "blank":
                self.tokens.append(_Token(kind, piece, offset))
        self.tokens.append(_Token("end", "the end of the text", len(text)))  # never advanced over

    def fail(self, offset: int, problem: str) -> NoReturn:
        before = self.text[:offset]
        line, column = before.count("\n") + 1, offset - before.rfind("\n")
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
        token = self.tokens[min(self.position + ahead, len(self.tokens) - 1)]
        return token.text == text and token.kind in ("mark", "name")

    def sees_dtype(self) -> bool:
        return self.token.kind == "name" and self.token.text in dtypes()

    def accept(self, text: str) -> bool:
        seen = self.sees(text)
        self.position += seen
        return seen

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.unexpected(repr(text))

    def unexpected(self, wanted: str) -> NoReturn:
        token = self.token
        seen = token.text if token.kind == "end" else repr(token.text[:40])
        self.fail(token.offset, f"expected {wanted}, found {seen}")

    def end(self) -> None:
        if self.token.kind != "end":
            self.unexpected("the end of the text")

    def many(self, opening: str, item: Callable[[], T], closing: str) -> list[T]:
        """Items between marks, separated by commas."""
        self.expect(opening)
        items: list[T] = []
        while not self.accept(closing):
            if items and not self.accept(","):
                self.unexpected(f"',' or {closing!r}")
            items.append(item())
        return items

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
        if self.token.kind != "string":
            self.unexpected(f"{what}, in quotes")
        try:
            text = json.loads(self.token.text, strict=False)
        except ValueError:
            self.fail(self.token.offset, "a string must be written as in JSON")
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
        graphs: dict[str, Graph] = {}
        functions: dict[str, Graph] = {}
        model = Model(graphs, entry, functions, {}, path)
        self.expect("{")
        while not self.accept("}"):
            offset = self.token.offset
            if self.accept("metadata"):
                key = self.name("a key")
                self.expect("=")
                model.metadata[key] = self.string("a text")
                continue
            table = functions if self.accept("function") else graphs
            name = None
            if not self.sees("graph"):
                name = self.name("'metadata', 'function', a graph or '}'")
                self.expect(":")
            graph = self.build(self.graph())
            key = graph.name if name is None else name
            if key in table:
                self.fail(offset, f"there is a graph or function {key!r} already")
            table[key] = graph
        self.end()
        return model

    @_nested
    def graph(self) -> _GraphText:
        self.expect("graph")
        name = "" if self.sees("(") else self.name("a name or '('")
        self.scope = scope = self.scope.new_child()
        inputs = self.many("(", self.declaration, ")")
        if self.accept("uses"):
            self.many("(", self.declaration, ")")
        self.expect("->")
        graph = _GraphText(name, scope, inputs, self.many("(", self.reference, ")"))
        if self.accept("targets"):
            graph.targets = self.many("(", self.node_reference, ")")
        self.expect("{")
        while not self.accept("}"):
            self.statement(graph)
        self.scope = scope.parents  # names of a nested graph end with it
        return graph

    def declaration(self) -> Value:
        offset = self.token.offset
        name = self.name("the name of a value")
        if name in self.scope.maps[0]:
            self.fail(offset, f"there is a value {name!r} already")
        value = self.scope[name] = Value(name, self.type() if self.accept(":") else ANY)
        return value

    def reference(self) -> _Reference:
        return _Reference(offset=self.token.offset, name=self.name("the name of a value"))

    def optional(self, item: Callable[[], T]) -> T | None:
        return None if self.accept("_") else item()

    def statement(self, graph: _GraphText) -> None:
        outputs: list[Value | None] = []
        if any(self.sees(mark, ahead=1) for mark in (",", ":", "=")):
            outputs.append(self.optional(self.declaration))
            while self.accept(","):
                outputs.append(self.optional(self.declaration))
            self.expect("=")
        if self.sees("const"):
            self.constant(outputs)
        else:
            graph.nodes.append(self.node(outputs))

    def constant(self, outputs: Sequence[Value | None]) -> None:
        offset = self.advance().offset
        if len(outputs) != 1 or outputs[0] is None:
            self.fail(offset, "a constant is one value: 'name: type = const ...'")
        value = outputs[0]
        type_ = value.type
        if self.sees_dtype():
            type_ = self.type()
        elif isinstance(type_, TensorType) and type_.data is None:
            value.type = ANY  # that which its contents have
        self.scope[value.name] = Value(value.name, value.type, const=self.array(type_, offset))

    def node(self, outputs: list[Value | None]) -> _NodeText:
        start = self.token.offset
        op = self.operation()
        attributes = self.many("{", self.attribute, "}") if self.sees("{") else []
        inputs = self.many("(", lambda: self.optional(self.reference), ")")
        node = _NodeText(op, outputs, inputs, {}, start)
        for offset, key, attribute in attributes:
            self.check_new(key, node.attrs, offset)
            node.attrs[key] = attribute
        self.clauses(node)
        if self.accept("{"):
            while not self.accept("}"):
                offset = self.token.offset
                key = self.name("the name of an attribute or '}'")
                self.expect(":")
                self.check_new(key, {**node.attrs, **node.graphs}, offset)
                node.graphs[key] = self.graph()
        return node

    def check_new(self, key: str, attrs: Attrs, offset: int) -> None:
        if key in attrs:
            self.fail(offset, f"there is an attribute {key!r} already")

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
            registered = [o.full_name for o in ops.registered()]
            full = f"{domain}.{name}" if domain else name
            hint = "" if full in registered else _hint(full, registered)
            suffix = "" if version is None else f"-{version}"
            self.fail(offset, f"there is no operation {full}{suffix}{hint}")
        return op

    def attribute(self) -> tuple[int, str, object]:
        offset = self.token.offset
        key = self.name("the name of an attribute")
        self.expect("=")
        return offset, key, self.literal()

    def clauses(self, node: _NodeText) -> None:
        seen: set[str] = set()
        while self.token.kind == "name" and self.token.text in ("after", "on", "as", "in", "from"):
            # A clause belongs to the node before it: as a name it would be in quotes.
            _, word, offset = self.advance()
            label = {"on": "device", "as": "name", "in": "origin", "from": "origin"}.get(word, word)
            if label in seen:
                self.fail(offset, f"a node has only one {word!r}")
            seen.add(label)
            if word == "after":
                node.after = self.many("(", self.node_reference, ")")
            elif word == "in" and "name" not in seen:
                self.fail(offset, "'in' comes after 'as'; 'from' gives an origin without it")
            else:
                text = self.name(f"the {label} of the node")
                node.labels[label] = f"{node.labels['name']} in {text}" if word == "in" else text

    def node_reference(self) -> _Reference:
        offset = self.token.offset
        if self.token.kind == "number":
            return _Reference(self.integer("the position of a node"), offset)
        return _Reference(self.name("the name or the position of a node"), offset)

    # Types and literals

    @_nested
    def type(self) -> Type:
        if self.accept("any"):
            return ANY
        for word, wrapper in WRAPPERS.items():
            if self.accept(word):
                self.expect("(")
                element = self.type()
                self.expect(")")
                return wrapper(element)
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
        if not self.sees_dtype():
            self.unexpected("a type")
        return dtypes()[self.advance().text]

    def dim(self) -> Dim:
        if self.accept("?"):
            return None
        if self.token.kind == "number":
            return self.integer("a dim")
        return self.name("a dim: a number, a name or '?'")

    @_nested
    def literal(self) -> Any:
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
        if self.sees_dtype():
            return self.array(self.type(), token.offset)
        if token.kind == "name" and token.text in CONSTANTS:
            return CONSTANTS[self.advance().text]
        items = {"bytes": self.base64, "type": self.type, "dtype": self.dtype}
        if token.kind != "name" or token.text not in items:
            self.unexpected("a value")
        return items[self.advance().text]()

    def base64(self) -> bytes:
        offset = self.token.offset
        try:
            return base64.b64decode(self.string("base64"), validate=True)
        except (binascii.Error, ValueError):
            self.fail(offset, "this is not base64")

    def array(self, type_: Type, offset: int) -> np.ndarray:
        """The contents of an array of this type."""
        if not isinstance(type_, TensorType) or not type_.static or min(type_.dims, default=0) < 0:
            self.fail(offset, "an array needs its dtype and all its dims: float32[3, 4]")
        dtype, dims = type_.dtype, type_.dims
        assert dtype is not None
        if self.accept("base64"):
            data = self.base64()
            if dtype == STRING or len(data) != math.prod(dims) * dtype.itemsize:
                self.fail(offset, f"{len(data)} bytes do not fit {type_}")
            # To the machine's order.
            array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype)
            if dtype == np.bool_ and any(byte > 1 for byte in data):
                self.fail(offset, "a bool is a byte of 0 or 1")
        else:
            array = self.elements(dtype, dims, self.literal(), offset)
        try:
            return array.reshape(dims)
        except (OverflowError, ValueError):
            self.fail(offset, f"{type_} is not a shape that an array can have")

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

    def build(self, text: _GraphText, arguments: Sequence[Value] | None = None) -> Graph:
        """The graph with its names resolved. ``arguments`` are values to take for its inputs."""
        scope = text.scope

        def resolve(reference: _Reference) -> Value:
            name = str(reference.name)
            if name not in scope:
                hint = _hint(name, scope.maps[0])
                self.fail(reference.offset, f"there is no value {name!r}{hint}")
            return scope[name]

        if arguments is not None:
            # Of a region.
            scope.update(zip((value.name for value in text.inputs), arguments, strict=True))
        nodes = []
        for node in text.nodes:
            values = [r and resolve(r) for r in node.inputs]
            attrs = self.attrs(node, values)
            nodes.append(Node(node.op, values, node.outputs, attrs, **node.labels))
        targets = self.connect(text, nodes)  # before Case nodes expand: positions count them as one
        nodes = list(chain.from_iterable(map(self.expand, nodes, text.nodes)))
        return Graph(text.inputs, [resolve(r) for r in text.outputs], nodes, text.name, targets)

    def attrs(self, text: _NodeText, inputs: Sequence[Value | None]) -> Attrs:
        """The attributes of a node with its graphs. The region of a fused node reads its inputs."""
        if text.op is not FUSED:
            graphs = {key: self.build(inner) for key, inner in text.graphs.items()}
            return {**text.attrs, **graphs}
        region = text.graphs.get("region")
        values = [value for value in inputs if value is not None]
        if region is None or not len(region.inputs) == len(inputs) == len(values):
            self.fail(text.offset, "a fused node has a graph 'region' with as many inputs")
        graph = self.build(region, values)
        sort(graph)
        if not graph.nodes or any(len(node.outputs) != 1 for node in graph.nodes):
            self.fail(text.offset, "a region has nodes of one output each")
        return fused(graph.nodes).attrs

    def expand(self, node: Node, text: _NodeText) -> Sequence[Node]:
        if node.op is not CASE:
            return (node,)
        try:
            return expand_case(node)
        except ValueError as error:
            self.fail(text.offset, str(error))

    def connect(self, text: _GraphText, nodes: list[Node]) -> list[Node]:
        """Resolve the control inputs of the nodes of one graph; its targets."""
        by_name: dict[str | int, list[Node]] = {i: [node] for i, node in enumerate(nodes)}
        for node in nodes:
            by_name.setdefault(node.name, []).append(node)

        def resolve(reference: _Reference) -> Node:
            matches = by_name.get(reference.name, [])
            if len(matches) != 1:
                problem = f"{len(matches)} nodes of this graph are {reference.name!r}"
                self.fail(reference.offset, problem)
            return matches[0]

        for node, written in zip(nodes, text.nodes, strict=True):
            node.control_inputs += map(resolve, written.after)
        return [resolve(reference) for reference in text.targets]


def _hint(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, candidates, 1)
    return f"; is it {close[0]!r}?" if close else ""
