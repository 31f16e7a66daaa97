"""SavedModels: folders with graphs, their signatures, and the values of their variables.

Each signature becomes a graph of the model, with the signature's own names for inputs and outputs;
the entry is the requested one, "serving_default", or else the first. A signature that needs an
operation without a kernel is left out, unless it is the entry, and recorded in the metadata.
Variables that no signature assigns to are constants. The graph itself names the checkpoint's tensor
for each variable that it restores; for others, the objects that the model was saved from do.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.core.errors import InvalidModel, Unsupported, shortened
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.frontends.common.diagnostics import Diagnostics, TensorError
from penstock.frontends.common.encoding import decode_text
from penstock.frontends.tensorflow.file import open_part, read_saved_model
from penstock.frontends.tensorflow.function_library import FunctionLibrary, called_functions
from penstock.frontends.tensorflow.importer import PLACEHOLDERS, Importer
from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    FunctionDef,
    MetaGraphDef,
    NodeDef,
    SavedObjectGraph,
    SignatureDef,
    TensorInfo,
)
from penstock.frontends.tensorflow.rules_arrays import SCATTERING
from penstock.frontends.tensorflow.scope import GraphScope, VariableFacts
from penstock.frontends.tensorflow.tables import Tables, node_of, table_contents
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops.registry import standard
from penstock.ops.tensorflow.state import Store, variable_name

DEFAULT = "serving_default"
_ASSIGN = frozenset({"Assign", "AssignVariableOp"})
_CHANGES = frozenset(
    {
        *(*_ASSIGN, "AssignAdd", "AssignSub", "AssignAddVariableOp", "AssignSubVariableOp"),
        *(f"ResourceApply{name}" for name in ("Adam", "GradientDescent", "Momentum", "RMSProp")),
        *("ResourceApplyKerasMomentum", "RngReadAndSkip"),
        *SCATTERING,
    }
)
_HANDLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
# The most nodes of all signatures together: this number, and this many for each node of the file.
_FREE_NODES = 100_000
_MAX_USES = 16
_NAMES = ("container", "shared_name")
_INTERNAL = frozenset({"__saved_model_init_op", "__saved_model_train_op"})


def load_saved_model(
    folder: Path,
    limits: Limits = DEFAULT_LIMITS,
    map_weights: bool = False,
    signature: str | None = None,
) -> Model:
    """Read a SavedModel, with a graph for each signature, from the graph with the tag "serve" or
    else the first. ``signature`` is the entry, if there is one of that name.

    Raises ``InvalidModel`` for violations of the format or of ``limits``, ``Unsupported`` for
    operations without a kernel. Variables are read, or mapped into memory if ``map_weights``.
    """
    graphs: Sequence[MetaGraphDef] = read_saved_model(folder).meta_graphs
    serving = [graph for graph in graphs if "serve" in graph.meta_info_def.tags]
    if not graphs:
        raise InvalidModel(
            f"{folder.name} has no graphs: it is no SavedModel, or an empty one; export it again"
        )
    return _Reader((serving or graphs)[0], folder, limits, map_weights).model(signature)


class _Reader:
    def __init__(
        self, proto: MetaGraphDef, folder: Path, limits: Limits, map_weights: bool
    ) -> None:
        self.proto = proto
        self.folder = folder
        self.limits = limits
        self.map_weights = map_weights
        self.nodes = {node.name: node for node in proto.graph_def.node}
        self.library = FunctionLibrary(proto.graph_def.library, folder.name, limits)

    def model(self, wanted: str | None) -> Model:
        signatures = {
            name: signature
            for name, signature in self.proto.signature_def.items()
            if name not in _INTERNAL
        }
        if not signatures:
            raise InvalidModel(f"{self.folder.name} has no signatures: save it with some")
        entry = next((n for n in (wanted, DEFAULT) if n in signatures), None) or min(signatures)
        parts = self.parts(signatures)
        values, tables = self.contents()
        changes = any(_assigns(part, self.library.functions) for part in parts.values())
        initial = {self.shared_name(name): value for name, value in values.items()}
        store = Store(initial, constant=not changes)
        # Constants are folded, but later runs must see an assignment.
        frozen = {} if changes else values
        graphs: dict[str, Graph] = {}
        functions: dict[str, Graph] = {}
        aliases: dict[str, str] = {}
        nodes = 0
        uses = min(len(signatures), _MAX_USES)
        metadata = {"tensorflow_version": self.proto.meta_info_def.tensorflow_version}
        # The entry comes first: if it cannot be imported, no other signature is imported in vain.
        for name in sorted(signatures, key=lambda name: name != entry):
            diagnostics = Diagnostics(
                self.folder.name, self.limits, lambda: uses * self.proto.ByteSize(), nodes
            )
            producer = self.proto.graph_def.versions.producer
            library = self.library.uncalled()  # each signature has its own copies of functions
            variables = VariableFacts(store, frozen)
            importer = Importer(parts[name], producer, library, diagnostics, variables, tables)
            try:
                graphs[name] = self.graph(importer, name, signatures[name], aliases)
            except Unsupported as error:
                if name == entry:
                    raise
                metadata[f"left out: {name}"] = str(error)
            finally:
                # Limits count all signatures together, failed ones included.
                nodes = diagnostics.nodes
            functions.update(importer.functions)
        names = sorted(graphs)
        return Model(
            graphs,
            entry,
            functions,
            metadata,
            str(self.folder),
            aliases,
            signatures=names,
            structure={"signatures": [_listed(graphs[name]) for name in names]},
        )

    # Signatures.

    def parts(self, signatures: Mapping[str, SignatureDef]) -> dict[str, list[NodeDef]]:
        """Return the nodes that each signature needs. Raises ``InvalidModel`` if they are many
        times the nodes of the file, since each signature has a graph of its own."""
        parts: dict[str, list[NodeDef]] = {}
        most = _FREE_NODES + _MAX_USES * len(self.nodes)
        for name in sorted(signatures):
            parts[name] = self.part(name, signatures[name])
            most -= len(parts[name])
            if most < 0:
                raise InvalidModel(
                    f"{self.folder.name} has {len(signatures)} signatures, which share nodes more "
                    f"than {_MAX_USES} times; save it with fewer"
                )
        return parts

    def part(self, name: str, signature: SignatureDef) -> list[NodeDef]:
        """Return the nodes that a signature needs. Nodes that it feeds become placeholders."""
        fed = {node_of(info.name): info for info in signature.inputs.values()}
        needed: set[str] = set(fed)
        part = [self.placeholder(node, info, name) for node, info in fed.items()]
        stack = [node_of(info.name) for info in signature.outputs.values()]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                if node in self.nodes:  # otherwise the importer reports the nodes that read it
                    stack += [node_of(text.removeprefix("^")) for text in self.nodes[node].input]
        part += [node for name, node in self.nodes.items() if name in needed and name not in fed]
        return part

    def placeholder(self, name: str, info: TensorInfo, signature: str) -> NodeDef:
        node = self.nodes.get(name)
        if node is None:
            raise InvalidModel(
                f"signature {signature!r} of {self.folder.name} feeds {info.name!r}, which is no "
                "tensor of the graph; export the model again"
            )
        if node.op in PLACEHOLDERS:
            return node
        placeholder = NodeDef(name=name, op="Placeholder")
        placeholder.attr["dtype"].type = info.dtype
        placeholder.attr["shape"].shape.CopyFrom(info.tensor_shape)
        return placeholder

    def graph(
        self, importer: Importer, name: str, signature: SignatureDef, aliases: dict[str, str]
    ) -> Graph:
        """Return the graph of a signature. Add TensorFlow's names of its values to ``aliases``."""
        scope = importer.main()
        importer.diagnostics.raise_collected()
        inputs, outputs = [], []
        for key, info in sorted(signature.inputs.items()):
            value = self.value(scope, info, f"signature {name!r}")
            for alias in (value.name, node_of(info.name)):
                aliases.setdefault(alias, key)
            value.name = key
            inputs.append(value)
        aliases.update(
            (node, declared.values[0].name)
            for node, declared in scope.declared.items()
            if declared.values and node not in aliases
        )
        for key, info in sorted(signature.outputs.items()):
            value = self.value(scope, info, f"signature {name!r}")
            own = key
            if key in signature.inputs and value.name != key:
                own = aliases[key] = f"{key}#fetched"
            # An output that is an input of the same name needs no second name.
            outputs.append(value if value.name == own else _named(value, own, scope))
        return Graph(inputs, outputs, scope.nodes, name)

    def value(self, scope: GraphScope, info: TensorInfo, where: str) -> Value:
        """Return the value that a signature names. Raises ``InvalidModel``."""
        try:
            reference = scope.find(info.name) if info.WhichOneof("encoding") == "name" else None
        except KeyError as error:
            raise InvalidModel(f"{where}: tensor {info.name!r}, {error.args[0]}") from error
        if reference is None:
            raise InvalidModel(
                f"{where} has a tensor that is not a dense one of the graph; only dense tensors "
                "are supported"
            )
        return reference.value

    # Tables.

    def tables(self, checkpoint: Callable[[str], np.ndarray | None] = lambda key: None) -> Tables:
        """The tables, filled by nodes that no signature needs, perhaps with tensors of the
        ``checkpoint``. Raises ``InvalidModel``."""
        files = {
            node_of(file.tensor_info.name): file.filename for file in self.proto.asset_file_def
        }

        def asset(node: str) -> bytes | None:
            return self.asset(files[node]) if node in files else None

        where = self.folder.name
        return table_contents(self.nodes.values(), self.library, where, asset, checkpoint)

    def asset(self, name: str) -> bytes:
        """Return the content of a file in the folder of assets. Raises ``InvalidModel``."""
        location = f"assets/{name}"
        with open_part(self.folder, location) as file:
            size = os.fstat(file.fileno()).st_size
            if excess := self.limits.beyond("max_bytes", size):
                raise InvalidModel(f"{location} of {self.folder.name} has more bytes {excess}")
            return file.read()

    # Variables.

    def contents(self) -> tuple[dict[str, np.ndarray], Tables]:
        """Return the values of variables in the checkpoint, by the names of the nodes that create
        their handles, and the tables. Raises ``InvalidModel``."""
        prefix = "variables/variables"
        if not os.path.lexists(self.folder / f"{prefix}.index"):
            return {}, self.tables()
        from penstock.frontends.tensorflow.checkpoint import Bundle

        bundle = Bundle(self.folder, prefix, self.limits, self.map_weights)
        keys = dict(self.restored())
        for name, key in self.captured(bundle.entries):
            keys.setdefault(name, key)  # if both give a key, the graph's restoring nodes are right
        with bundle.opened:
            values = {name: bundle.read(key) for name, key in keys.items()}
            read = lambda key: bundle.read(key) if key in bundle.entries else None  # noqa: E731
            return values, self.tables(read)

    def restored(self) -> Iterator[tuple[str, str]]:
        """Yield variables, by node, and the keys from which they are restored."""
        yield from self.assigned(self.folder.name, self.nodes, {})
        restore = self.nodes.get(node_of(self.proto.saver_def.restore_op_name))
        if restore is None or "f" not in restore.attr:
            return
        function = self.library.functions.get(restore.attr["f"].func.name)
        if function is None:
            return
        names = [argument.name for argument in function.signature.input_arg]
        arguments = {n: node_of(text) for n, text in zip(names, restore.input, strict=False)}
        where = f"function {function.signature.name!r} of {self.folder.name}"
        nodes = {node.name: node for node in function.node_def}
        yield from self.assigned(where, nodes, arguments)

    def captured(self, entries: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield variables, by node, that functions capture, and their keys among the ``entries`` of
        the checkpoint."""
        objects = ObjectGraph(self.proto.object_graph_def)
        most = max(map(len, entries), default=0)
        for text, number in dict(objects.captured(self.nodes.values())).items():
            node = self.nodes.get(node_of(text))
            key = objects.key(number, most)
            if node is not None and node.op in _HANDLES and key in entries:
                yield node.name, key

    def assigned(
        self, where: str, nodes: Mapping[str, NodeDef], arguments: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Yield variables and keys where ``nodes`` (of ``where``) assign a restored tensor to
        a variable."""
        for node in nodes.values():
            if node.op not in _ASSIGN or len(node.input) < 2:
                continue
            name, _ = _source(node.input[0], nodes)
            variable = self.nodes.get(arguments.get(name, name))
            source, index = _source(node.input[1], nodes)
            restore = nodes.get(source)
            if restore is None or restore.op != "RestoreV2" or len(restore.input) < 2:
                continue
            keys = nodes.get(_source(restore.input[1], nodes)[0])
            if variable is None or variable.op not in _HANDLES or keys is None:
                continue
            value = keys.attr["value"]
            try:
                names = self.library.constants.read(where, keys.name, value, value.tensor)
            except TensorError as error:
                raise InvalidModel(f"{keys.name} in {where} {error}") from error
            if index < names.size:
                yield variable.name, str(names.flat[index])

    def shared_name(self, name: str) -> str:
        """Return the name of a node's variable in the store."""
        attrs = self.nodes[name].attr
        names = {key: decode_text(attrs[key].s) for key in _NAMES if key in attrs}
        return variable_name(names, name)


def _source(name: str, nodes: Mapping[str, NodeDef]) -> tuple[str, int]:
    """Return the node that produces a tensor, before Identity nodes, and its output's index."""
    for _ in range(16):
        name, *rest = name.split(":")
        node = nodes.get(name)
        if node is None or node.op != "Identity" or not node.input:
            last = rest[-1] if rest else "0"
            return name, int(last) if last.isascii() and last.isdigit() and len(last) < 9 else 0
        name = node.input[0]
    return name, 0


def _named(value: Value, key: str, scope: GraphScope) -> Value:
    """Return a copy of ``value`` with the name that a signature gives it."""
    output = Value(key, value.type)
    origin = f"output {key!r} of {scope.where}"
    name = f"{key}#output"
    scope.nodes.append(Node(standard("Identity"), [value], [output], name=name, origin=origin))
    return output


def _assigns(part: Sequence[NodeDef], library: Mapping[str, FunctionDef]) -> bool:
    """Whether a graph, or a function that it may call, assigns to a variable."""
    bodies: list[Iterable[NodeDef]] = [part]
    seen: set[str] = set()
    while bodies:
        for node in bodies.pop():
            if node.op in _CHANGES:
                return True
            for name in called_functions(node):
                if name in library and name not in seen:
                    seen.add(name)
                    bodies.append(library[name].node_def)
    return False


def _listed(graph: Graph) -> str:
    """Return the name of a signature with those of its inputs and outputs."""
    sides = (shortened(", ".join(v.name for v in side)) for side in (graph.inputs, graph.outputs))
    return f"{shortened(repr(graph.name))} {' -> '.join(f'({side})' for side in sides)}"


# The objects that a SavedModel was saved from, and the keys of their variables in the checkpoint.
#
# A SavedModel contains, beside the graph, the tree of Python objects from which it was saved. A
# function that captures variables takes their handles after its arguments, and names the objects to
# which they belong; the key of a variable in the checkpoint is the path to its object. This locates
# values of variables that no node of the graph restores: TensorFlow saves some twice, such as those
# of Keras layers inside a ``tf.Module``, and restores only the copies by nodes.


# Escapes in checkpoints for characters of a name that are special in a key.
_ESCAPED = str.maketrans({".": "..", "/": ".S"})
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
# The most objects in one key, so that a file cannot request keys of unlimited length.
_MAX_DEPTH = 100


class ObjectGraph:
    """The objects of a SavedModel by number, as in ``proto``."""

    def __init__(self, proto: SavedObjectGraph) -> None:
        self._proto = proto
        self._parents = _parents(proto)

    def captured(self, nodes: Iterable[NodeDef]) -> Iterator[tuple[str, int]]:
        """Yield the inputs of ``nodes`` that their functions capture: names of inputs, each with
        the number of its object."""
        for node in nodes:
            called = node.attr["f"].func.name if "f" in node.attr else ""
            if called in self._proto.concrete_functions:
                bound = self._proto.concrete_functions[called].bound_inputs
                inputs = [text for text in node.input if not text.startswith("^")]
                # The captures of a function are the last of its arguments.
                yield from zip(reversed(inputs), reversed(bound), strict=False)

    def key(self, number: int, most: int) -> str:
        """Return the key of an object's value in a checkpoint whose keys have up to ``most``
        characters; "" if it cannot be one of these."""
        names: list[str] = []
        while number in self._parents and len(names) < _MAX_DEPTH and most >= 0:
            number, name = self._parents[number]
            names.append(name.translate(_ESCAPED))
            most -= len(names[-1])
        return "" if number or most < 0 else "/".join(reversed(names)) + _VALUE


def _parents(proto: SavedObjectGraph) -> dict[int, tuple[int, str]]:
    """Return for each object except the first the object from which it is reached in the fewest
    steps, and under which name."""
    parents: dict[int, tuple[int, str]] = {}
    reached = deque([0] if proto.nodes else [])
    while reached:
        number = reached.popleft()
        for child in proto.nodes[number].children:
            if 0 < child.node_id < len(proto.nodes) and child.node_id not in parents:
                parents[child.node_id] = number, child.local_name
                reached.append(child.node_id)
    return parents
