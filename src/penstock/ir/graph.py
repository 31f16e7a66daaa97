"""Graphs: nodes that consume and produce values, in SSA form.

A value refers to its producer, if it has one; its readers are found by walking the nodes
(``readers_of``). A node may have graphs among its attributes, such as the branches of an If or the
body of a Loop. A nested graph refers to a value of an enclosing graph by the same ``Value``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, TypeAlias, overload
from weakref import ref

import numpy as np

from penstock.algorithms.dag import CycleError, Dag
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.records import dataclass, field
from penstock.core.types import ANY, Shape, TensorType, Type, array_type, constant_type
from penstock.ir.op import FRAMED, Attrs, Op, Role


class Value:
    """A named result of a node, an input of a graph (no producer), or a constant (``const``). Nodes
    own their values, not the reverse: a graph that is dropped is freed at once, with its constants,
    without waiting for the garbage collector. A constant that also exists in another form may be
    held only there (``release``), and is restored when it is read. ``is_constant`` says whether the
    value has contents, ``is_held`` whether they are held here."""

    __slots__ = ("_producer", "_rematerialize", "const", "is_constant", "is_held", "name", "type")

    def __init__(
        self,
        name: str,
        type: Type = ANY,
        producer: Node | None = None,
        const: np.ndarray | None = None,
    ) -> None:
        self.name = name
        if const is not None and type is ANY:
            is_plain = const.ndim > 1 or const.dtype.kind not in "iu"  # without known contents
            type = array_type(const.dtype, const.shape) if is_plain else constant_type(const)
        self.type = type
        # A strong reference would be a cycle.
        self._producer = _NO_PRODUCER if producer is None else ref(producer)
        self.const = const
        self.is_constant = const is not None
        self.is_held = True

    def set_constant(self, const: np.ndarray) -> None:
        """Become a constant with these contents."""
        self.const, self.type = const, constant_type(const)
        self.is_constant = self.is_held = True

    def release(self, rematerialize: Callable[[], np.ndarray]) -> None:
        """Drop the contents of a constant; ``rematerialize`` returns equal contents on demand."""
        self._rematerialize = rematerialize
        self.is_held = False
        with suppress(AttributeError):  # the contents are not held here
            del self.const

    def __getattr__(self, name: str) -> Any:
        if name != "const":
            raise AttributeError(f"a Value has no attribute {name!r}")
        self.const = const = self._rematerialize()  # later reads do not call this method
        self.is_held = True
        return const

    @property
    def resident_in(self) -> object | None:
        """The object whose method restores the contents of a constant that are not held here."""
        return None if self.is_held else getattr(self._rematerialize, "__self__", None)

    @property
    def held(self) -> np.ndarray | None:
        """The contents of a constant if they are held here, else None."""
        return self.const if self.is_held else None

    @property
    def peek(self) -> np.ndarray | None:
        """Return the contents of a constant. Contents that were not held here before are not held
        afterwards either."""
        return self.const if self.is_held else self._rematerialize()

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype of a tensor, or None if it is unknown."""
        return self.type.dtype if isinstance(self.type, TensorType) else None

    @property
    def shape(self) -> Shape | None:
        """The shape of a tensor, or None if its rank is unknown."""
        return self.type.shape if isinstance(self.type, TensorType) else None

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of a static tensor."""
        assert isinstance(self.type, TensorType)
        return self.type.dims

    @property
    def rank(self) -> int | None:
        shape = self.type.shape if isinstance(self.type, TensorType) else None
        return None if shape is None else len(shape)

    def _set_producer(self, node: Node | None) -> None:
        self._producer = _NO_PRODUCER if node is None else ref(node)

    if TYPE_CHECKING:

        @property
        def producer(self) -> Node | None:
            """The node that has this value among its outputs, as long as that exists."""

        @producer.setter
        def producer(self, node: Node | None) -> None: ...

    else:
        # Asked for every value in most passes: without a function of Python.
        producer = property(methodcaller("_producer"), _set_producer)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


class _Nothing:
    """An object that is dropped at once."""


_NO_PRODUCER: ref[Any] = ref(_Nothing())  # gives None


@dataclass(frozen=True)
class ConvertedWeights:
    """Values that passes compute from weights, by these, cached for all graphs of a session."""

    widened: dict[Value, Value] = field(default_factory=dict)
    """weights converted to float32, by those in float16 and bfloat16"""


class Contents(Sequence["np.ndarray | None"]):
    """The contents of the constants among ``values``, None for others. Contents that a value does
    not hold are restored only when they are accessed."""

    __slots__ = ("_values",)

    def __init__(self, values: Sequence[Value | None]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, place: int) -> np.ndarray | None: ...
    @overload
    def __getitem__(self, place: slice) -> Contents: ...
    def __getitem__(self, place: int | slice) -> np.ndarray | Contents | None:
        if isinstance(place, slice):
            return Contents(self._values[place])
        value = self._values[place]
        return None if value is None else value.const


class Node:
    """One application of an operation. The constructor's arguments are its attributes.

    Args:
        op: The operation.
        inputs: By position, None for an optional input that is left out.
        outputs: By position, None for one that is left out; the node becomes their producer.
        attrs: The attributes by name; graphs are allowed as values.
        name: Its name in the file, or "".
        control_inputs: Nodes that must have run before.
        device: A full name of a device, or "".
        origin: Where the node came from, for every message about it.
    """

    __slots__ = (
        *("__weakref__", "attrs", "control_inputs", "device", "inputs", "name"),
        *("nests", "op", "origin", "outputs"),
    )

    def __init__(
        self,
        op: Op,
        inputs: Iterable[Value | None],
        outputs: Iterable[Value | None],
        attrs: Attrs | None = None,
        *,
        name: str = "",
        control_inputs: Sequence[Node] = (),
        device: str = "",
        origin: str = "",
    ) -> None:
        self.op = op
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.attrs: dict[str, Any] = dict(attrs) if attrs else {}
        # Whether it may have graphs: asked many times for every node, and false for most.
        self.nests = bool(attrs) and Graph in map(type, self.attrs.values())
        self.name = name
        self.control_inputs = list(control_inputs)
        self.device = device
        self.origin = origin
        reference = ref(self)
        for output in self.outputs:
            if output is not None:
                output._producer = reference

    def derived(
        self,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Attrs | None = None,
        *,
        op: Op | None = None,
        name: str | None = None,
        control_inputs: Sequence[Node] = (),
    ) -> Node:
        """Return a new node with the device and the origin of this one.

        Args:
            inputs: The inputs of the new node.
            outputs: The outputs of the new node.
            attrs: Its attributes, by default those of this node.
            op: Its operation, by default that of this node.
            name: Its name, by default that of this node.
            control_inputs: The control inputs of the new node.
        """
        attrs, name = self.attrs if attrs is None else attrs, self.name if name is None else name
        node = Node(op or self.op, inputs, outputs, attrs, name=name, control_inputs=control_inputs)
        node.device, node.origin = self.device, self.origin
        return node

    def input(self, index: int) -> Value | None:
        """Return an input, or None if it is left out.

        Args:
            index: Its position.
        """
        return self.inputs[index] if index < len(self.inputs) else None

    def const(self, index: int) -> np.ndarray | None:
        """Return the contents of an input, or None if it is left out or not a constant.

        Args:
            index: The position of the input.
        """
        value = self.inputs[index] if index < len(self.inputs) else None
        return None if value is None else value.const

    @property
    def graphs(self) -> Sequence[tuple[str, Graph]]:
        """The graphs among the attributes, by attribute name, in a fixed order. The graphs may be
        replaced, but a node created without any never gets one."""
        if not self.nests:
            return ()
        graphs = []
        for name, attribute in self.attrs.items():
            if isinstance(attribute, Graph):
                graphs.append((name, attribute))
        return graphs

    @property
    def inner(self) -> list[Node]:
        """The nodes of its graphs, and of their nested graphs."""
        return [node for _, graph in self.graphs for node in graph.walk()]

    @property
    def label(self) -> str:
        """The name of the node in messages: its origin, else its name, else its first output."""
        output = next((v.name for v in self.outputs if v is not None), None)
        unnamed = self.op.name if output is None else f"{self.op.name} that makes {output!r}"
        return self.origin or self.name or unnamed

    def __repr__(self) -> str:
        outputs = ", ".join(v.name if v is not None else "_" for v in self.outputs)
        inputs = ", ".join(v.name if v is not None else "_" for v in self.inputs)
        return f"{outputs} = {self.op.name}({inputs})"


_NESTS, _OP, _PRODUCER, _ROLE = map(attrgetter, ("nests", "op", "producer", "role"))


class Graph:
    """Nodes in any order (``sort`` puts them in a valid one), with the graph's inputs and outputs.
    ``targets`` are nodes that run even if no output needs them."""

    __slots__ = ("inputs", "name", "nodes", "outputs", "targets")

    def __init__(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        nodes: Sequence[Node],
        name: str = "",
        targets: Sequence[Node] = (),
    ) -> None:
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.nodes = list(nodes)
        self.name = name
        self.targets = list(targets)

    def walk(self) -> Iterator[Node]:
        """Yield every node; those of nested graphs follow the node that contains the graph."""
        flat = True not in map(_NESTS, self.nodes)
        return with_checkpoints(self.nodes if flat else self._nested_nodes())

    def _nested_nodes(self) -> list[Node]:
        nodes: list[Node] = []
        stack = [iter(self.nodes)]  # graphs may nest deeper than Python recurses
        while stack:
            for node in stack[-1]:
                nodes.append(node)
                if node.nests:
                    for _, graph in reversed(node.graphs):
                        stack.append(iter(graph.nodes))
                    break
            else:
                stack.pop()
        return nodes

    def graphs(self) -> list[Graph]:
        """Return this graph and every nested one, each after the graphs that contain it."""
        graphs = [self]
        for node in self._nested_nodes() if True in map(_NESTS, self.nodes) else ():
            for _, graph in node.graphs if node.nests else ():
                graphs.append(graph)
        return graphs

    @property
    def ops(self) -> set[Op]:
        """The operations of the nodes, including those of nested graphs."""
        flat = True not in map(_NESTS, self.nodes)
        return set(map(_OP, self.nodes if flat else self._nested_nodes()))

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.nodes)} nodes)"


LONG_FROM = "penstock.long_from"
"""the metadata of a decoder that reads texts above this number of positions in another way, so that
values cached for a shorter beginning do not fit"""


@dataclass(slots=True, eq=False)
class Model:
    """Graphs, of which ``graphs[entry]`` runs; the ``functions`` that nodes call; metadata.

    ``aliases`` are further names by which values of the entry can be fed and fetched; an output's
    alias may be the name of an input, and then means the output when values are fetched.
    ``check_types`` is the format's own check of types, if it has one, for the entry and the types
    of fed values by name; it raises ``InvalidModel``. ``signatures`` are names of
    entries that the file has; ``structure`` has lines about its parts, by title; ``options`` are
    the compile options that it requests; ``about`` what the file says of its producer and of the
    versions that it uses, as texts by name. ``scopes``: the modules that contain nodes, by the
    nodes' names, separated by slashes, if the file records them separately. ``output_dims``: the
    declared dims of outputs, only for display, since they are not checked. ``overridable``: the
    types of constants that the file declares as inputs, by name. ``artifact``: the file of a saved
    session, which has plans for the model.
    """

    graphs: Mapping[str, Graph]
    entry: str
    functions: Mapping[str, Graph] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    path: str | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    check_types: Callable[[Graph, Mapping[str, Type]], None] | None = None
    resizable: bool = False
    signatures: Sequence[str] = ()
    structure: dict[str, list[str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    scopes: dict[str, str] = field(default_factory=dict)
    output_dims: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    overridable: dict[str, Type] = field(default_factory=dict)
    artifact: Any = None

    def __repr__(self) -> str:
        file = "" if self.path is None else f", path={str(self.path)!r}"
        return f"Model({self.graph}{file})"

    @property
    def graph(self) -> Graph:
        """The graph that a run starts with."""
        return self.graphs[self.entry]


FramePath: TypeAlias = tuple[str, ...]
"""the names of the frames around a node, outermost first"""


@dataclass(frozen=True, eq=False)
class GraphPart:
    """The part of a graph that one device runs (``passes.lowering.partition``). ``inputs`` and
    ``outputs``: the indices of its own among those of the whole graph. ``paths``: the frame in
    which each of its nodes runs. ``originals``: the nodes of the whole graph by their copies."""

    device: str
    graph: Graph
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    paths: Mapping[Node, FramePath]
    originals: Mapping[Node, Node] = field(default_factory=dict)


Readers = dict[Value, list[Node | None]]


def readers_of(graph: Graph) -> Readers:
    """Return the nodes that read each value, including those of nested graphs, once for each use.
    None means that an output of a graph reads the value."""
    readers: Readers = {}
    for node in graph.walk():
        for value in filter(None, node.inputs):
            readers.setdefault(value, []).append(node)
    for inner in graph.graphs():
        for value in inner.outputs:
            readers.setdefault(value, []).append(None)
    return readers


def is_framed(graph: Graph) -> bool:
    """Whether some node, in nested graphs too, can only run on the frames executor."""
    return not FRAMED.isdisjoint(map(_ROLE, graph.ops))


def captures(graph: Graph) -> list[Value]:
    """Return the values of outer graphs that a nested graph refers to, in order of first use.
    Constants are not included, since they belong to no graph."""
    defined: set[Value | None] = {None, *graph.inputs}
    reads: list[Value | None] = []
    for node in graph.walk():
        defined.update(node.outputs)
        reads += node.inputs
        for _, inner in node.graphs if node.nests else ():
            defined.update(inner.inputs)
    for inner in graph.graphs():
        reads += inner.outputs
    beyond = [v for v in reads if v not in defined]
    return list(dict.fromkeys([v for v in beyond if v is not None and not v.is_constant]))


def all_reads(node: Node) -> list[Value]:
    """Return the values that a node or its graphs read, except constants."""
    reads = [value for value in node.inputs if value is not None and not value.is_constant]
    for _, inner in node.graphs:
        reads += captures(inner)
    return reads


def dependencies(graph: Graph) -> Iterator[tuple[Graph, list[tuple[int, int]]]]:
    """Yield for ``graph`` and every nested one, innermost first, the pairs (a, b) for which
    ``nodes[b]`` cannot run before ``nodes[a]``.

    A node depends on the producers of its inputs, on its control inputs, and on the producers of
    the values that its graphs capture; but a Merge does not depend on a NextIteration, which
    follows it in one iteration and precedes it in the next. Pairs may repeat.
    """
    reads: dict[Graph, set[Node]] = {}  # producers outside of each graph, inner graphs first
    for subgraph in reversed(graph.graphs()):
        position = {node: i for i, node in enumerate(subgraph.nodes)}
        edges: list[tuple[int, int]] = []
        # Producers in enclosing graphs: the node that contains the graph waits for them.
        beyond: set[Node] = set()
        for b, node in enumerate(with_checkpoints(subgraph.nodes)):
            needed = [*map(_PRODUCER, filter(None, node.inputs))]
            if node.op.role is Role.MERGE:
                needed = [p for p in needed if p and p.op.role is not Role.NEXT_ITERATION]
            needed += node.control_inputs
            for _, inner in node.graphs if node.nests else ():
                needed.extend(reads[inner])
            for source in filter(None, needed):
                a = position.get(source)
                if a is None:
                    beyond.add(source)
                else:
                    edges.append((a, b))
        for source in filter(None, map(_PRODUCER, subgraph.outputs)):
            if source not in position:
                beyond.add(source)
        reads[subgraph] = beyond
        yield subgraph, edges


def sort(graph: Graph) -> None:
    """Sort the nodes of ``graph`` and of every nested graph (see ``ordered``)."""
    for subgraph, edges in dependencies(graph):
        subgraph.nodes[:] = ordered(subgraph, edges)


def ordered(graph: Graph, edges: Sequence[tuple[int, int]]) -> list[Node]:
    """Return the nodes of ``graph``, each after all of its ``dependencies``, the ``edges``.

    The order is kept if it is valid; otherwise the first listed of the nodes that are ready comes
    first. Raises ``InvalidModel``, which names a cycle, if there is one."""
    if False not in [a < b for a, b in edges]:
        return list(graph.nodes)
    from penstock.algorithms.ordering import topological_order

    try:
        return [graph.nodes[i] for i in topological_order(Dag(len(graph.nodes), edges))]
    except CycleError as error:
        cycle = [graph.nodes[i].label for i in (*error.cycle, error.cycle[0])]
    if len(cycle) > 16:
        cycle[8:-8] = [f"... {len(cycle) - 16} more ..."]
    raise InvalidModel(
        f"graph {graph.name!r}: each of these nodes waits for the one before it, so that none "
        f"can run first: {' -> '.join(cycle)}. Remove one of these dependencies"
    )


def circular(graph: Graph, edges: Sequence[tuple[int, int]]) -> set[Node]:
    """Return the nodes of ``graph`` that depend on themselves, given the ``edges``."""
    from penstock.algorithms.dag import on_cycles

    readers: list[list[int]] = [[] for _ in graph.nodes]
    for source, reader in edges:
        readers[source].append(reader)
    return {graph.nodes[i] for i in on_cycles(readers)}


def clone(
    graph: Graph,
    inputs: Sequence[Value] | None = None,
    outputs: Sequence[Value] | None = None,
    targets: Sequence[Node] | None = None,
) -> Graph:
    """Return a copy with its own nodes and values; constants, operations, attributes are shared.

    ``inputs``, ``outputs`` and ``targets`` may be any values and nodes of the outermost graph, by
    default its own. An input that a node produces is detached from it: consumers and outputs read
    the input.
    """
    return _Cloner().clone(graph, inputs, outputs, targets)


def embed(graph: Graph, inputs: Sequence[Value], suffix: str) -> tuple[list[Node], list[Value]]:
    """Return a copy of the nodes of ``graph`` that reads ``inputs``, and the copies of its outputs.
    Captured values stay the same. Names of copied values end in ``suffix``."""
    cloner = _Cloner(suffix)
    cloner.update((value, value) for value in captures(graph))
    cloner.update(zip(graph.inputs, inputs, strict=True))
    nodes = cloner.copied(graph.nodes)
    for node, copy in zip(graph.nodes, nodes, strict=True):
        copy.control_inputs = [cloner.nodes.get(source, source) for source in node.control_inputs]
    return nodes, [cloner[value] for value in graph.outputs]


class _Cloner(dict["Value | None", Any]):
    """Copies nodes and values; names of copied values end in ``suffix``. A mapping from values to
    their copies, which are created when they are first looked up; None maps to None."""

    def __init__(self, suffix: str = "") -> None:
        super().__init__({None: None})
        self.suffix = suffix
        self.nodes: dict[Node, Node] = {}
        self.fed: set[Value | None] = set()

    def __missing__(self, value: Value) -> Value:
        # Constants are never changed, and belong to no graph.
        copy = value if value.is_constant else Value(value.name + self.suffix, value.type)
        self[value] = copy
        return copy

    def clone(
        self,
        graph: Graph,
        inputs: Sequence[Value] | None = None,
        outputs: Sequence[Value] | None = None,
        targets: Sequence[Node] | None = None,
    ) -> Graph:
        inputs = graph.inputs if inputs is None else inputs
        outputs = graph.outputs if outputs is None else outputs
        targets = graph.targets if targets is None else targets
        fed = [Value(value.name + self.suffix, value.type) for value in inputs]
        self.fed.update(inputs)
        self.update(zip(inputs, fed, strict=True))
        nodes = self.copied(graph.nodes)
        for node, copy in zip(graph.nodes, nodes, strict=True):
            if node.control_inputs:
                # In loops, some of these are copied later.
                before = [self.nodes.get(source) for source in node.control_inputs]
                copy.control_inputs = [source for source in before if source is not None]
        outputs_ = [self[value] for value in outputs]
        return Graph(fed, outputs_, nodes, graph.name, [self.nodes[node] for node in targets])

    def copied(self, nodes: list[Node]) -> list[Node]:
        """Return copies of nodes, without their control inputs."""
        copy_of, copies, suffix = self.__getitem__, [], self.suffix
        for node in with_checkpoints(nodes):
            attrs, outputs = node.attrs, node.outputs
            if node.nests:
                attrs = attrs | {key: self.clone(inner) for key, inner in node.graphs}
            if not self.fed.isdisjoint(outputs):
                # Readers see the fed value instead: these become outputs without any reader.
                outputs = [
                    Value(f"{v.name}/unfed", v.type) if v is not None and v in self.fed else v
                    for v in outputs
                ]
            for value in node.inputs:
                # As ``__missing__``, which is called for the values of all nodes otherwise.
                if value is not None and value.is_constant and value not in self:
                    self[value] = value
            for value in outputs:
                if value is not None and value not in self:
                    self[value] = Value(value.name + suffix, value.type)
            inputs = map(copy_of, node.inputs)
            copy = Node(node.op, inputs, map(copy_of, outputs), attrs, name=node.name)
            copy.device, copy.origin = node.device, node.origin
            self.nodes[node] = copy
            copies.append(copy)
        return copies
