"""Graphs for tests: from text, whether or not Penstock has their operations, or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.analysis.interpreter import Interpreter
from penstock.core.types import (
    ANY,
    BOOL,
    STRING,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtypes,
)
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import PRIMITIVES, Op
from penstock.ops.registry import NEWEST, TENSORFLOW, find, unknown_types
from penstock.textual.parser import parse_graph
from penstock.textual.printer import WORDS

IMPURE = {"NoOp"}


def interpret(graph: Graph, feeds: Sequence[Any]) -> list[Any]:
    """The outputs of a graph by the reference interpreter."""
    return Interpreter().run(graph, feeds, {})


def any_op(name: str, domain: str = "", version: int | None = None) -> Op:
    """An operation of that name, made up; the same one each time."""
    return _made_up(name, domain, NEWEST if version is None else version)


@cache
def _made_up(name: str, domain: str, version: int) -> Op:
    def compile(node: Node, types: Any) -> Kernel:
        raise NotImplementedError

    made_up = Op(name, domain, 1, version, unknown_types, compile, pure=name not in IMPURE)
    real = find(name, domain)
    if real is not None:
        return replace(made_up, role=real.role, arity=real.arity, elementwise=real.elementwise)
    primitive = find(name, TENSORFLOW)  # graphs in tests may leave out its domain
    if primitive is not None and primitive.role in PRIMITIVES:
        return replace(made_up, role=primitive.role)
    return made_up


def graph(text: str) -> Graph:
    """A graph from text, of operations that need not exist."""
    return parse_graph(text, any_op)


def model(text: str) -> Model:
    """A model of one graph, from text."""
    entry = graph(text)
    return Model({entry.name: entry}, entry.name)


def node_named(graph: Graph, name: str) -> Node:
    (found,) = [node for node in graph.walk() if node.name == name]
    return found


def value_named(graph: Graph, name: str) -> Value:
    known = {v for each in graph.graphs() for v in (*each.inputs, *each.outputs)}
    for node in graph.walk():
        known.update(v for v in (*node.inputs, *node.outputs) if v is not None)
    (found,) = [value for value in known if value.name == name]
    return found


def chain(length: int) -> Graph:
    """``length`` nodes in a row, each with a constant as its other input."""
    kind = TensorType(np.dtype(np.float32), (16,))
    x = value = Value("x", kind)
    one = Value("one", const=np.ones(16, np.float32))
    nodes = []
    for i in range(length):
        result = Value(f"v{i}", kind)
        nodes.append(Node(any_op("Add"), [value, one], [result], name=f"n{i}"))
        value = result
    return Graph([x], [value], nodes, "chain")


def nest(depth: int) -> Graph:
    """``depth`` graphs, each in a node of the one before it; the innermost uses the input."""
    x = Value("x")
    inner = Graph([], [x], [], "innermost")
    for i in range(depth - 1):
        y = Value(f"y{i}")
        inner = Graph([], [y], [Node(any_op("Call"), [], [y], {"body": inner})])
    return Graph([x], inner.outputs, inner.nodes, "nest")


def same_value(a: Value | None, b: Value | None) -> bool:
    if a is None or b is None:
        return a is b
    consts = (a.const is None and b.const is None) or same_attribute(a.const, b.const)
    return a.name == b.name and a.type == b.type and consts


def same_attribute(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.tolist() == b.tolist() if a.dtype == STRING else a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_attribute, a, b))
    return repr(a) == repr(b)


def assert_same(a: Graph, b: Graph, values: dict[Value, Value] | None = None) -> None:
    """The graphs have equal nodes in equal order, and values refer to each other alike."""
    values = {} if values is None else values

    def pair(x: Value | None, y: Value | None) -> None:
        assert same_value(x, y), (x, y)
        if x is not None and y is not None:
            assert values.setdefault(x, y) is y, (x, y)

    def pairs(xs: list[Any], ys: list[Any]) -> None:
        assert len(xs) == len(ys), (xs, ys)
        for x, y in zip(xs, ys, strict=True):
            pair(x, y)

    assert a.name == b.name
    pairs(a.inputs, b.inputs)
    assert len(a.nodes) == len(b.nodes)
    targets = [a.nodes.index(node) for node in a.targets]
    assert targets == [b.nodes.index(node) for node in b.targets]
    for m, n in zip(a.nodes, b.nodes, strict=True):
        pairs(m.outputs, n.outputs)
    for m, n in zip(a.nodes, b.nodes, strict=True):
        assert m.op is n.op
        assert (m.name, m.device, m.origin) == (n.name, n.device, n.origin)
        pairs(m.inputs, n.inputs)
        assert all(v is None or v.producer is n for v in n.outputs)
        waits = [a.nodes.index(c) for c in m.control_inputs]
        assert waits == [b.nodes.index(c) for c in n.control_inputs]
        assert m.attrs.keys() == n.attrs.keys()
        for key, attribute in m.attrs.items():
            if isinstance(attribute, Graph):
                assert_same(attribute, n.attrs[key], values)
            else:
                assert same_attribute(attribute, n.attrs[key]), (attribute, n.attrs[key])
    pairs(a.outputs, b.outputs)


# Random graphs

_NAMES = st.one_of(
    st.sampled_from(["x", "y", "a.b/c", "/conv/MatMul_0", "add:0", "", "1", 'say "#"\\', "é\n"]),
    st.sampled_from(sorted(WORDS)),
    st.text(max_size=5),
)
_DIMS = st.one_of(st.none(), st.integers(0, 2**40), st.just("N"), st.text(max_size=4))
_DTYPES = st.sampled_from(sorted(dtypes()))


@st.composite
def _tensor_types(draw: st.DrawFn) -> TensorType:
    dtype = draw(st.none() | _DTYPES.map(lambda name: dtypes()[name]))
    shape = draw(st.none() | st.lists(_DIMS, max_size=3).map(tuple))
    data = draw(st.none() | st.lists(_DIMS, max_size=3).map(tuple))
    return TensorType(dtype, shape, data)


TYPES: st.SearchStrategy[Type] = st.recursive(
    st.just(ANY) | _tensor_types(),
    lambda inner: st.one_of(
        inner.map(SequenceType),
        inner.map(OptionalType),
        st.builds(MapType, _DTYPES.map(lambda name: dtypes()[name]), inner),
    ),
    max_leaves=3,
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Arrays of any dtype and any contents, NaNs of all kinds included."""
    dtype = dtypes()[draw(_DTYPES)]
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    size = int(np.prod(shape))
    if dtype == STRING:
        texts = draw(st.lists(st.text(max_size=3), min_size=size, max_size=size))
        return np.array([*texts, None], object)[:-1].reshape(shape)
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    if dtype == BOOL:
        return np.array([byte & 1 for byte in raw], bool).reshape(shape)
    array = np.frombuffer(raw, dtype).reshape(shape).copy()
    if dtype.itemsize == 1 and "int" in dtype.name:
        array = array.astype(np.int64).astype(dtype)  # the bits beyond 4 mean nothing
    return array


ATTRIBUTES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64),
        st.floats(),
        st.text(max_size=5),
        st.binary(max_size=5),
        arrays(),
        TYPES,
        _DTYPES.map(lambda name: dtypes()[name]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


class _Names:
    """Names that no two values of a graph and those nested in it share."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.taken: set[str] = set()

    def new(self) -> str:
        name = base = self.draw(_NAMES)
        for suffix in count(len(self.taken)):
            if name not in self.taken:
                break
            name = f"{base}{suffix}"
        self.taken.add(name)
        return name


def _draw_graph(draw: st.DrawFn, names: _Names, outer: list[Value], depth: int) -> Graph:
    inputs = [Value(names.new(), draw(TYPES)) for _ in range(draw(st.integers(0, 2)))]
    known = [*outer, *inputs]
    if draw(st.booleans()):
        known.append(Value(names.new(), const=draw(arrays())))
    nodes: list[Node] = []
    for _ in range(draw(st.integers(0, 4))):
        read = st.sampled_from(known) if known else st.none()
        domain = draw(st.sampled_from(["", "com.example", "odd-domain"]))
        name = draw(st.sampled_from(["Add", "a.b", "const", "Big Op"]))
        attrs = draw(st.dictionaries(_NAMES, ATTRIBUTES, max_size=2))
        if depth and draw(st.integers(0, 3)) == 0:
            attrs["body"] = _draw_graph(draw, names, known, depth - 1)
        label = draw(_NAMES)
        outputs = [
            Value(names.new(), draw(TYPES)) if draw(st.booleans()) else None
            for _ in range(draw(st.integers(0, 3)))
        ]
        node = Node(
            any_op(name, domain, draw(st.none() | st.integers(1, 30))),
            draw(st.lists(read | st.none(), max_size=3)),
            outputs,
            attrs,
            name=label,
            control_inputs=draw(st.lists(st.sampled_from(nodes), max_size=2)) if nodes else [],
            device=draw(st.sampled_from(["", "/job:worker/device:CPU:0", "cpu"])),
            origin=draw(st.sampled_from(["", f"{label} in m.onnx", "elsewhere"])),
        )
        nodes.append(node)
        known = [*known, *[v for v in outputs if v is not None]]
    outputs = draw(st.lists(st.sampled_from(known), max_size=3)) if known else []
    return Graph(inputs, outputs, draw(st.permutations(nodes)), draw(_NAMES))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs with every kind of name, type, attribute and constant, nested up to three deep."""
    return _draw_graph(draw, _Names(draw), [], 2)
