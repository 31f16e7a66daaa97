"""Graphs and models as text: complete, readable, and read back to equal ones.

::

    graph main(x: float32[N, 3], w: float32[3, 4]) -> (y) {
      c: int64[2] = const [1, 12]
      h: float32[N, 4] = MatMul(x, w) as MatMul_0 in model.onnx
      s, _ = com.example.Top{k=2, largest=true}(h, _, c) after(MatMul_0) on "/device:CPU:0"
      y = If(cond) {
        then_branch: graph() -> (a) {
          a = Relu-6(h)
        }
        else_branch: graph() -> (h) {
        }
      }
    }

What the marks mean, where it is not plain:

* A name that is no identifier (dots and slashes may stand in one), or is a word of this language,
  is written as a JSON string. ``_`` is an input or output left out, ``?`` an unknown dim or dtype.
* ``x: type``: nothing is known of a value without one. ``int64[2]{N, 1}`` is a tensor whose
  contents are known for shape arithmetic; a constant's type has them without being written.
* ``Relu-6``: an operation other than the newest of that name. ``"a"::"b.c"``: domain and name,
  where the name has a dot in it.
* ``targets (node)`` behind a graph's outputs are the nodes that run though no output may need them.
* ``after(node)`` are control inputs, by name, or by position where a name would not do;
  ``on`` a device; ``as`` the node's name; ``in model.onnx`` its origin if that is "name in
  model.onnx", and ``from`` any other origin.
* ``uses (x: type)`` after the inputs: what a graph that is printed alone takes from around it.
* Arrays up to 16 elements are written out, others as base64 of their bytes, little-endian.

A constant stands in the innermost graph around all that use it. Where a value and a constant, or
two constants, or in an invalid graph two values have one name, a suffix tells them apart. Comments
begin with ``#``. ``penstock.textual.parser`` reads all this back, and ``penstock.Case(i)`` with
graphs ``branch_0``, ``branch_1`` ... and ``default``, which becomes a tree of If nodes.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from penstock import ops
from penstock.core.types import (
    ANY,
    STRING,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    constant_type,
    dtype_name,
)
from penstock.ir.graph import Graph, Model, Node, Value, captures
from penstock.ops.internal.fused import is_fused
from penstock.ops.registry import NEWEST

INLINE = 16  # elements of an array that are written out
INDENT = "  "

NAME = r"[A-Za-z_/][A-Za-z0-9_./]*"
_BARE = re.compile(NAME)
WORDS = frozenset(
    [
        *("_", "const", "graph", "uses", "after", "on", "as", "in", "from", "model", "metadata"),
        *("function", "path", "true", "false", "none", "inf", "nan", "type", "dtype", "bytes"),
        *("base64", "any", "seq", "optional", "map"),
    ]
)  # names that must be quoted


WRAPPERS: Mapping[str, type[SequenceType | OptionalType]] = {
    "seq": SequenceType,
    "optional": OptionalType,
}


def format_graph(graph: Graph, max_elements: int | None = None) -> str:
    """``graph`` as text. With ``max_elements``, arrays with more elements than that are cut short:
    good to look at, and refused by ``parse_graph``."""
    return "\n".join(_unnested(_Printer(graph, max_elements).lines(graph, "", "")))


def format_model(model: Model, max_elements: int | None = None) -> str:
    """``model`` as text: metadata, graphs, functions. ``max_elements`` as in ``format_graph``."""
    path = "" if model.path is None else f" path {json.dumps(model.path)}"
    lines = [f"model {_quoted(model.entry)}{path} {{"]
    for key, text in model.metadata.items():
        lines.append(f"{INDENT}metadata {_quoted(key)} = {json.dumps(text)}")
    for word, graphs in (("", model.graphs), ("function ", model.functions)):
        for key, graph in graphs.items():
            prefix = word if key == graph.name else f"{word}{_quoted(key)}: "
            lines += _unnested(_Printer(graph, max_elements).lines(graph, INDENT, prefix))
    lines.append("}")
    return "\n".join(lines)


def format_type(type_: Type) -> str:
    """``type_`` as it stands in the text of a graph."""
    if isinstance(type_, TensorType):
        dtype = "?" if type_.dtype is None else dtype_name(type_.dtype)
        shape = "..." if type_.shape is None else ", ".join(map(_dim, type_.shape))
        data = "" if type_.data is None else f"{{{', '.join(map(_dim, type_.data))}}}"
        return f"{dtype}[{shape}]{data}"
    if isinstance(type_, MapType):
        return f"map({dtype_name(type_.key)}, {format_type(type_.value)})"
    for word, wrapper in WRAPPERS.items():
        if isinstance(type_, wrapper):
            return f"{word}({format_type(type_.element)})"
    return "any"


Lines: TypeAlias = "Iterator[str | Lines]"


def _unnested(lines: Lines) -> Iterator[str]:
    """The lines of nested generators, without recursion: graphs nest as deep as they like."""
    stack = [lines]
    while stack:
        for line in stack[-1]:
            if not isinstance(line, str):
                stack.append(line)
                break
            yield line
        else:
            stack.pop()


def _quoted(name: str) -> str:
    return name if _BARE.fullmatch(name) and name not in WORDS else json.dumps(name)


def _dim(dim: Dim) -> str:
    return "?" if dim is None else _quoted(dim) if isinstance(dim, str) else str(dim)


class _Printer:
    def __init__(self, root: Graph, max_elements: int | None) -> None:
        self.root = root
        self.max_elements = max_elements
        self.constants = _constants_by_graph(root)
        self.labels: dict[Value, str] = {}
        self.visible: Counter[str] = Counter()  # labels in use here and around here
        self.suffixes: Counter[str] = Counter()
        # Users fetch values by name: where a constant has the name of one, the constant gives way.
        self.value_names = {value.name for graph in root.graphs() for value in _own_values(graph)}

    def lines(self, graph: Graph, indent: str, prefix: str) -> Lines:
        uses = captures(graph) if graph is self.root else []
        constants = self.constants.get(graph, [])
        own = self.introduce([*uses, *_own_values(graph), *constants])
        name = f" {_quoted(graph.name)}" if graph.name else ""
        inputs = ", ".join(map(self.declared, graph.inputs))
        around = f" uses ({', '.join(map(self.declared, uses))})" if uses else ""
        outputs = ", ".join(map(self.label, graph.outputs))
        references = _node_references(graph)
        targets = [references.get(node, _quoted(node.name)) for node in graph.targets]
        also = f" targets ({', '.join(targets)})" if targets else ""
        yield f"{indent}{prefix}graph{name}({inputs}){around} -> ({outputs}){also} {{"
        for value in constants:
            yield f"{indent}{INDENT}{self.constant(value)}"
        for node in graph.nodes:
            graphs = _printed_graphs(node)
            yield f"{indent}{INDENT}{self.node(node, references)}{' {' if graphs else ''}"
            for key, inner in graphs:
                yield self.lines(inner, indent + INDENT * 2, f"{_quoted(key)}: ")
            if graphs:
                yield f"{indent}{INDENT}}}"
        yield f"{indent}}}"
        self.visible.subtract(own)  # a graph beside this one may use the names again

    def introduce(self, values: Sequence[Value]) -> list[str]:
        """Give each value that has none a label that nothing visible has; returns these."""
        added = []
        for value in values:
            if value in self.labels:
                continue
            label, kept = value.name, value.const is not None and value.name in self.value_names
            while kept or self.visible[label] > 0:
                self.suffixes[value.name] += 1
                label = f"{value.name}.{self.suffixes[value.name]}"
                kept = label in self.value_names
            self.visible[label] += 1
            self.labels[value] = label
            added.append(label)
        return added

    def label(self, value: Value | None) -> str:
        return "_" if value is None else _quoted(self.labels.get(value, value.name))

    def declared(self, value: Value | None) -> str:
        if value is None or value.type == ANY:
            return self.label(value)
        return f"{self.label(value)}: {format_type(value.type)}"

    def constant(self, value: Value) -> str:
        array = value.const
        assert array is not None
        own = constant_type(array)
        held = format_type(own.without_data())
        declared = held if value.type == own else format_type(value.type)
        content = f"{'' if value.type == own else f'{held} '}{self.array(array)}"
        return f"{self.label(value)}: {declared} = const {content}"

    def node(self, node: Node, references: dict[Node, str]) -> str:
        outputs = ", ".join(map(self.declared, node.outputs))
        inputs = ", ".join(map(self.label, node.inputs))
        graphs = dict(_printed_graphs(node))
        plain = ((key, attribute) for key, attribute in node.attrs.items() if key not in graphs)
        attrs = ", ".join(f"{_quoted(key)}={self.literal(attribute)}" for key, attribute in plain)
        text = f"{outputs} = " if node.outputs else ""
        text += _operation(node.op) + (f"{{{attrs}}}" if attrs else "") + f"({inputs})"
        if node.control_inputs:
            waits = [references.get(other, _quoted(other.name)) for other in node.control_inputs]
            text += f" after({', '.join(waits)})"
        if node.device:
            text += f" on {_quoted(node.device)}"
        if node.name:
            text += f" as {_quoted(node.name)}"
        if node.name and node.origin.startswith(f"{node.name} in "):
            text += f" in {_quoted(node.origin.removeprefix(f'{node.name} in '))}"
        elif node.origin:
            text += f" from {_quoted(node.origin)}"
        return text

    def literal(self, attribute: object) -> str:
        if attribute is None or isinstance(attribute, bool):
            return str(attribute).lower()
        if isinstance(attribute, np.ndarray):
            type_ = format_type(TensorType(attribute.dtype, attribute.shape))
            return f"{type_} {self.array(attribute)}"
        if isinstance(attribute, np.generic):
            return self.literal(attribute.item())
        if isinstance(attribute, int | float):
            return repr(attribute)
        if isinstance(attribute, str):
            return json.dumps(attribute)
        if isinstance(attribute, bytes):
            return f"bytes {_base64(attribute)}"
        if isinstance(attribute, list):
            return f"[{', '.join(map(self.literal, attribute))}]"
        if isinstance(attribute, tuple):
            return f"({', '.join(map(self.literal, attribute))})"
        if isinstance(attribute, np.dtype):
            return f"dtype {dtype_name(attribute)}"
        if isinstance(attribute, Type):
            return f"type {format_type(attribute)}"
        return f"... {json.dumps(repr(attribute))}"

    def array(self, array: np.ndarray) -> str:
        flat = array.reshape(-1)
        if self.max_elements is not None and array.size > self.max_elements:
            shown = [_element(x) for x in flat[: self.max_elements]]
            return f"[{', '.join([*shown, '...'])}]"
        if array.dtype == STRING or array.size == 0:
            return _nested([_element(x) for x in flat], array.shape)
        if array.size <= INLINE and array.dtype.kind != "c":
            elements = [_element(x) for x in flat]
            # Not so for NaNs other than the usual one.
            values = [number(x) for x in elements]
            if filled(array.dtype, values).tobytes() == array.tobytes():
                return _nested(elements, array.shape)
        return f"base64 {_base64(array.astype(array.dtype.newbyteorder('<')).tobytes())}"


def _printed_graphs(node: Node) -> Sequence[tuple[str, Graph]]:
    """The graphs of ``node`` by attribute; of a fused node, the nodes that it is made of."""
    if not is_fused(node):
        return node.graphs
    region = node.attrs["region"]
    return [("region", Graph(region.inputs, [region.output], region.nodes))]


def _own_values(graph: Graph) -> list[Value]:
    """The inputs of ``graph`` and what its nodes make."""
    return [*graph.inputs, *(v for node in graph.nodes for v in node.outputs if v is not None)]


def _constants_by_graph(root: Graph) -> dict[Graph, list[Value]]:
    """The constants of ``root`` and all in it, by the innermost graph around their uses."""
    around: dict[Graph, Graph] = {}
    depth = {root: 0}
    home: dict[Value, Graph] = {}
    for graph in root.graphs():
        for node in graph.nodes:
            for _, inner in node.graphs:
                around[inner] = graph
                depth[inner] = depth[graph] + 1
        for value in chain(*(node.inputs for node in graph.nodes), graph.outputs):
            if value is None or value.const is None:
                continue
            # The innermost graph around both uses: of two graphs, the deeper one is left.
            a, b = home.get(value, graph), graph
            while a is not b:
                if depth[a] < depth[b]:
                    a, b = b, a
                a = around[a]
            home[value] = a
    by_graph: dict[Graph, list[Value]] = {}
    for value, graph in home.items():
        by_graph.setdefault(graph, []).append(value)
    return by_graph


def _node_references(graph: Graph) -> dict[Node, str]:
    """The nodes as ``after`` and ``targets`` refer to them: by name if unique, else position."""
    if not graph.targets and not any(node.control_inputs for node in graph.nodes):
        return {}
    count = Counter(node.name for node in graph.nodes)
    return {
        node: _quoted(node.name) if node.name and count[node.name] == 1 else str(i)
        for i, node in enumerate(graph.nodes)
    }


def _operation(op: ops.Op) -> str:
    newest = op.version == NEWEST or ops.find(op.name, op.domain) is op
    version = "" if newest else f"-{op.version}"
    if "." in op.name:
        return f"{json.dumps(op.domain)}::{json.dumps(op.name)}{version}"
    return f"{_quoted(op.full_name)}{version}"


def _base64(data: bytes) -> str:
    return f'"{base64.b64encode(data).decode()}"'


def _element(element: object) -> str:
    """One element of an array, with as many digits as its dtype needs."""
    if not isinstance(element, np.generic):
        return json.dumps(element if isinstance(element, str) else repr(element))
    if isinstance(element, np.bool_):
        return "true" if element else "false"
    if isinstance(element, np.floating | np.integer | np.complexfloating):
        return str(element)
    name = np.asarray(element).dtype.name
    return str(int(element)) if "int" in name else repr(float(element))


def _nested(elements: Sequence[str], shape: Sequence[int]) -> str:
    """Row-major elements in brackets, a level for each dim."""
    if not shape:
        return elements[0]
    if not elements:
        return "[]"
    step = len(elements) // shape[0]
    rows = (elements[i : i + step] for i in range(0, len(elements), step))
    return f"[{', '.join(_nested(row, shape[1:]) for row in rows)}]"


CONSTANTS = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}


def number(text: str) -> Any:
    """The value of a number, or of another element without parts, from its text."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    return float(text) if any(c in text for c in ".eEn") else int(text)


def filled(dtype: np.dtype, elements: Sequence[Any]) -> np.ndarray:
    """A 1-D array of these elements. Raises ``ValueError`` for integers that ``dtype`` lacks."""
    if dtype == STRING:
        return np.array([*elements, None], object)[:-1]
    if "int" not in dtype.name:
        with np.errstate(all="ignore"):
            return np.array([float(x) for x in elements], np.float64).astype(dtype)
    wide = np.array([int(x) for x in elements], np.uint64 if dtype == np.uint64 else np.int64)
    array = wide.astype(dtype)
    if any(int(x) != y for x, y in zip(array, elements, strict=True)):
        raise ValueError("out of range")
    return array
