"""Graphs out of the documents of an artifact (``encode``).

A document may hold anything: every index, name and type is looked at before it is used, and values
that nodes make get their types by inference (``analysis.type_inference``), not from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.analysis.plan_rules import check_node_types, check_nodes
from penstock.analysis.sizes import check_sizes
from penstock.analysis.type_inference import infer_types
from penstock.analysis.verify import verify
from penstock.artifact.container import ArtifactFile
from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import Unsupported
from penstock.core.limits import Limits
from penstock.core.types import (
    ANY,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_named,
)
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.op import Op
from penstock.ops.internal import internal_operation
from penstock.ops.internal.fused import FUSED, Region
from penstock.ops.internal.transfer import RECV, REORDER, SEND
from penstock.ops.registry import find

if TYPE_CHECKING:
    from penstock.ops.tensorflow.state import Store

T = TypeVar("T")

_TRANSFERS = {"_Recv": RECV, "_Send": SEND}
_MOST_NESTED = 100
_NESTED = frozenset([list, dict])  # the types in JSON of what is decoded
_PLACES = frozenset([int, type(None)])


def decode_graph(
    document: object,
    file: ArtifactFile,
    name: str,
    limits: Limits,
    types: Sequence[Type] | None = None,
) -> Graph:
    """The graph of a document that has one, of this ``name``, verified. If it is for inputs of
    these ``types``, the types of its other values follow from them. Nodes are checked as those of
    models are. Raises ``InvalidModel`` if it is damaged, ``ValueError`` for other inputs."""
    graphs = decode_graphs(document, file)
    if [*graphs] != [name]:
        raise file.damaged(f"it has other graphs than {name!r}")
    orders = verify(Model(graphs, name), limits, partial=True)
    for graph, nodes in orders.items():
        graph.nodes[:] = nodes
    graph = graphs[name]
    if types is None:
        from penstock.analysis.schemas import check_schemas

        check_schemas(graph.walk())
    else:
        if [value.type for value in graph.inputs] != [*types]:
            raise ValueError("it is for other inputs")
        parts = check_nodes([node for nodes in orders.values() for node in nodes])
        infer_types(graph)
        check_node_types([graph, parts])
        check_sizes(graph, limits)
    return graph


def decode_graphs(document: object, file: ArtifactFile, *, parts: bool = False) -> dict[str, Graph]:
    """The graphs of a document, by name; of ``parts`` of a graph, which may have Sends and Recvs.
    Raises ``InvalidModel`` if it is damaged, ``Unsupported`` for operations that there are not."""
    try:
        return _Decoder(document, file, parts).graphs()
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise file.damaged(f"a graph is none: {error!r}") from error


def decode_type(entry: object, depth: int = 0) -> Type:
    """A type, inside of ``depth`` others. Raises ``ValueError``, ``TypeError`` or ``LookupError``
    for what is none."""
    if depth > _MOST_NESTED:
        raise ValueError("types nest too deep")
    match entry:
        case None:
            return ANY
        case [name, dims, *data]:
            shape = None if dims is None else _dims(dims)
            dtype = None if name is None else dtype_named(_typed(name, str))
            if not data:
                return TensorType(dtype, shape)
            # The contents, where they may take part in the arithmetic of shapes.
            (numbers,) = data
            contents = _dims(numbers, least=-(2**63))
            if shape is None or len(shape) > 1 or dtype is None or dtype.kind not in "iub":
                raise ValueError(f"{entry!r:.80} cannot have contents")
            # A scalar has one number.
            _expect([len(contents)] == [*shape, 1][:1], f"{entry!r:.80} has other contents")
            return TensorType(dtype, shape, contents)
        case {"sequence": element}:
            return SequenceType(decode_type(element, depth + 1))
        case {"optional": element}:
            return OptionalType(decode_type(element, depth + 1))
        case {"map": [key, value]}:
            return MapType(dtype_named(_typed(key, str)), decode_type(value, depth + 1))
    raise ValueError(f"{entry!r:.80} is no type")


def _dims(entry: object, least: int = 0) -> tuple[int | str | None, ...]:
    dims = _typed(entry, list)
    _expect(len(dims) <= 128, "a shape has more than 128 dims")
    for dim in dims:
        if not (dim is None or type(dim) is str or (type(dim) is int and least <= dim < 2**63)):
            raise ValueError(f"{dim!r:.80} is no dim")
    return tuple(dims)


def _expect(holds: bool, reason: str) -> None:
    # No assertion, which ``python -O`` leaves out: the file may be made to do harm.
    if not holds:
        raise ValueError(reason)


def _typed(x: object, type_: type[T]) -> T:
    if type(x) is not type_:
        raise TypeError(f"{x!r:.80} is no {type_.__name__}")
    return x


def _is_same(one: Value, other: Value) -> bool:
    """Whether two constants are one array."""
    if one.resident_in is None:
        return other.is_held and one.const is other.const
    return one.resident_in is other.resident_in


def decode_stores(file: ArtifactFile) -> list[Store]:
    """The stores of variables of a model, the same ones each time."""
    if file.stores is None:
        document = file.document("stores")
        try:
            file.stores = [_store(file, _typed(store, dict)) for store in _typed(document, list)]
        except (AttributeError, LookupError, TypeError) as error:
            raise file.damaged(f"its variables are none: {error!r}") from error
    return file.stores


def _store(file: ArtifactFile, document: dict[str, Any]) -> Store:
    from penstock.ops.tensorflow.state import Store

    arrays, constant = document["initial"].items(), _typed(document["constant"], bool)
    return Store({_typed(name, str): file.array(i) for name, i in arrays}, constant=constant)


class _Decoder:
    """The lists of one document."""

    def __init__(self, document: object, file: ArtifactFile, parts: bool) -> None:
        self.file = file
        self.parts = parts
        self.document = fields = _typed(document, dict)
        self.ops = list(map(self.op, with_checkpoints(_typed(fields["ops"], list))))
        self.values = list(map(self.value, with_checkpoints(_typed(fields["values"], list))))
        # By their places, with None for what is left out.
        self.at: dict[int | None, Value | None] = {None: None, **dict(enumerate(self.values))}
        self.depth = 0
        self.room = file.nbytes  # bytes left for lists: a few arrays could be named without end

    def graphs(self) -> dict[str, Graph]:
        graphs = _typed(self.document["graphs"], dict)
        return {name: self.graph(_typed(graph, dict)) for name, graph in graphs.items()}

    def op(self, entry: object) -> Op:
        domain, name, version = _typed(entry, list)
        if self.parts and domain == SEND.domain and name in _TRANSFERS:
            return _TRANSFERS[name]
        op = internal_operation(name, domain) or find(name, domain, _typed(version, int))
        if op is None:
            full_name = f"{domain}.{name}" if domain else name
            reason = f"there is no such operation in version {version}"
            raise Unsupported.of([(full_name, reason, self.file.name)])
        return op

    def value(self, entry: object) -> Value:
        if type(entry) is str:
            return Value(entry)
        if type(entry) is not list or type(entry[0]) is not str:
            raise TypeError(f"{entry!r:.80} is no value")
        name, type_, *array = entry
        if not array:
            return Value(name, decode_type(type_))
        (index,) = array
        if (held := self.file.reordered(index)) is None:
            return Value(name, const=self.file.array(index))
        # Given back only where a kernel wants another order.
        type_, home = held
        value = Value(name, type_)
        value.is_constant = True
        value.release(home.array)
        return value

    def graph(self, entry: dict[str, Any]) -> Graph:
        self.depth += 1
        _expect(self.depth <= _MOST_NESTED, "graphs nest too deep")
        inputs, outputs = self.all_of(entry["inputs"]), self.all_of(entry["outputs"])
        entries = _typed(entry["nodes"], list)
        nodes = [self.node(node) for node in with_checkpoints(entries)]
        for node, node_entry in zip(nodes, entries, strict=True):
            # Nodes that may come later in the list.
            if len(node_entry) > 5 and node_entry[5]:
                node.control_inputs = [nodes[self.index(i, nodes)] for i in node_entry[5]]
        targets = [nodes[self.index(i, nodes)] for i in entry["targets"]]
        self.depth -= 1
        return Graph(inputs, outputs, nodes, _typed(entry["name"], str), targets)

    def node(self, entry: object) -> Node:
        if entry.__class__ is not list:
            raise TypeError(f"{entry!r:.80} is no node")
        fields: Any = entry
        left_out: list[Any] = [{}, "", (), "", ""]  # an entry may end before these
        place, inputs, outputs, *_ = fields
        attributes, name, _, device, origin = fields[3:] + left_out[len(fields) - 3 :]
        if place.__class__ is not int or place < 0 or attributes.__class__ is not dict:
            raise TypeError(f"{entry!r:.80} has no operation, or other attributes than an object")
        # Scalars stay as JSON has them; lists and objects are decoded. All keys are text.
        attrs = dict(attributes)
        for key, x in attributes.items():
            if x.__class__ is list or x.__class__ is dict:
                attrs[key] = self.attribute(x)
        op = self.ops[place]
        node = Node(op, self.optional(inputs), self.optional(outputs), attrs)
        for text in (name, device, origin):
            if text.__class__ is not str:
                raise TypeError(f"{text!r:.80} is no text of a node")
        node.name, node.device, node.origin = name, device, origin
        if op is REORDER:
            order = _typed(attrs["order"], tuple)
            _expect(sorted(order) == list(range(len(order))), "an order of dims has gaps")
        region = attrs.get("region")
        if (op is FUSED) != isinstance(region, Region):
            raise ValueError("a region is of a fused node")
        if isinstance(region, Region):  # of constants, kernels look at those inside
            for v, w in zip(region.inputs, node.inputs, strict=True):
                # Most are one value in both.
                if v.is_constant and v is not w and (w is None or not _is_same(v, w)):
                    raise ValueError("a region has other constants than its node")
        return node

    @staticmethod
    def index(i: object, entries: Sized) -> int:
        if type(i) is not int or not 0 <= i < len(entries):
            raise IndexError(f"{i!r:.80} is no place in a list of {len(entries)}")
        return i

    def all_of(self, indices: object) -> list[Value]:
        values = [value for value in self.optional(indices) if value is not None]
        _expect(len(values) == len(indices), "a value is left out")  # type: ignore[arg-type]
        return values

    def optional(self, indices: object) -> list[Value | None]:
        if indices.__class__ is not list or not _PLACES.issuperset(map(type, indices)):
            raise TypeError(f"{indices!r:.80} is no list of places")
        return [*map(self.at.__getitem__, indices)]

    def attribute(self, x: object, depth: int = 0) -> object:
        """An attribute, or an element of a list, inside of ``depth`` lists."""
        if type(x) is list:
            _expect(depth < _MOST_NESTED, "lists nest too deep")
            if _NESTED.isdisjoint(map(type, x)):
                return list(x)
            return [self.attribute(element, depth + 1) for element in x]
        if type(x) is not dict:
            return x
        ((kind, content),) = x.items()
        if kind == "tuple":
            # A list like others, which is not nested any deeper.
            elements: Any = self.attribute(_typed(content, list), depth)
            return tuple(elements)
        return self.kinds[kind](self, content)

    def region(self, entry: dict[str, Any]) -> Region:
        self.depth += 1
        _expect(self.depth <= _MOST_NESTED, "graphs nest too deep")
        nodes = tuple([self.node(node) for node in _typed(entry["nodes"], list)])
        listed = self.all_of(entry["inputs"])
        # Values of its own: what is inferred in a region must not change types outside of it.
        own: dict[Value | None, Value] = {v: v if v.is_constant else Value(v.name) for v in listed}
        _expect(bool(nodes) and len(own) == len(listed), "a region has other inputs than values")
        inputs = tuple(own.values())
        for node in nodes:
            # Nothing recurses into them.
            if node.nests or node.op is FUSED:
                raise ValueError("regions nest")
            for i, v in enumerate(node.inputs):
                if v in own:
                    node.inputs[i] = own[v]
                elif v is not None and not v.is_constant:
                    raise ValueError("a region reads a value from outside")
            (output,) = node.outputs
            if output is None or output.is_constant or output in own:
                raise ValueError("a region makes a value twice")
            own[output] = Value(output.name, producer=node)
            node.outputs = [own[output]]
        self.depth -= 1
        return Region(nodes, inputs)

    def store(self, i: object) -> Store:
        stores = decode_stores(self.file)
        return stores[self.index(i, stores)]

    def numbers(self, array: np.ndarray) -> list[float]:
        """A list of numbers; all together take no more bytes in the file than that has."""
        _expect(array.ndim == 1 and array.dtype.kind in "if", "a list is of no numbers")
        self.room -= array.nbytes
        _expect(self.room >= 0, "lists share their numbers")
        return list(array.tolist())

    kinds: Mapping[str, Callable[[_Decoder, Any], Any]] = {
        "array": lambda self, i: self.file.array(i),
        "type": lambda self, entry: decode_type(entry),
        "list": lambda self, i: self.numbers(self.file.array(i)),
        "bytes": lambda self, x: bytes.fromhex(x),
        "dtype": lambda self, name: dtype_named(name),
        "graph": lambda self, entry: self.graph(_typed(entry, dict)),
        "store": lambda self, i: self.store(i),
        "region": lambda self, entry: self.region(_typed(entry, dict)),
    }
