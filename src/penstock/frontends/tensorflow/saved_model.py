"""SavedModels: folders with graphs, their signatures, and the values of their variables.

Each signature becomes a graph of the model, with the signature's own names for what goes in and
comes out; the entry is "serving_default", or else the first. A signature that needs what there is
no kernel for is left out, unless it is the entry, and told of in the metadata. Variables that no
signature assigns to are constants. Which tensor of the checkpoint is whose value, the graph itself
says where it restores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.errors import InvalidModel, Unsupported
from penstock.frontends.tensorflow.conversion import Scope
from penstock.frontends.tensorflow.file import read_saved_model
from penstock.frontends.tensorflow.function_library import calls
from penstock.frontends.tensorflow.importer import PLACEHOLDERS, Importer
from penstock.frontends.tensorflow.proto.graphdef_pb2 import (
    FunctionDef,
    GraphDef,
    MetaGraphDef,
    NodeDef,
    SavedModel,
    SignatureDef,
    TensorInfo,
)
from penstock.frontends.tensorflow.tensors import array_of, text
from penstock.host import gc_pause
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.ops.registry import find
from penstock.ops.tensorflow.state import Store

DEFAULT = "serving_default"
_ASSIGN = frozenset({"Assign", "AssignVariableOp"})
_CHANGES = frozenset(
    {*_ASSIGN, "AssignAdd", "AssignSub", "AssignAddVariableOp", "AssignSubVariableOp"}
)
_HANDLES = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_INTERNAL = frozenset({"__saved_model_init_op", "__saved_model_train_op"})


def load(folder: Path, limits: Limits | None = None) -> Model:
    """Read a SavedModel, with a graph for each signature.

    Raises ``InvalidModel`` for what breaks the rules of the format or ``limits``, ``Unsupported``
    for operations without a kernel.
    """
    proto = _serving(read_saved_model(folder), folder)
    with gc_pause.paused():
        return _Reader(proto, folder, limits or DEFAULT_LIMITS).model()


def _serving(proto: SavedModel, folder: Path) -> MetaGraphDef:
    """The graphs that are to be served, if there are others too."""
    found: Sequence[MetaGraphDef] = proto.meta_graphs
    serving = [each for each in found if "serve" in each.meta_info_def.tags]
    if not found:
        raise InvalidModel(f"{folder.name} has no graphs: it is no SavedModel, or an empty one")
    return (serving or found)[0]


class _Reader:
    def __init__(self, proto: MetaGraphDef, folder: Path, limits: Limits) -> None:
        self.proto = proto
        self.folder = folder
        self.limits = limits
        self.nodes = {node.name: node for node in proto.graph_def.node}
        self.library = {f.signature.name: f for f in proto.graph_def.library.function}

    def model(self) -> Model:
        signatures = {
            name: each for name, each in self.proto.signature_def.items() if name not in _INTERNAL
        }
        if not signatures:
            raise InvalidModel(f"{self.folder.name} has no signatures: save it with some")
        entry = DEFAULT if DEFAULT in signatures else min(signatures)
        parts = {name: self.part(name, each) for name, each in sorted(signatures.items())}
        values = self.values()
        changes = any(_changes(part, self.library) for part in parts.values())
        store = Store({self.shared_name(name): x for name, x in values.items()})
        frozen = {} if changes else values
        graphs: dict[str, Graph] = {}
        functions: dict[str, Graph] = {}
        aliases: dict[str, str] = {}
        metadata = {"tensorflow_version": self.proto.meta_info_def.tensorflow_version}
        for name in sorted(signatures, key=lambda each: each != entry):
            importer = Importer(parts[name], self.folder, self.limits, frozen)
            importer.store = store
            try:
                graphs[name] = self.graph(importer, name, signatures[name], aliases)
            except Unsupported as error:
                if name == entry:
                    raise
                metadata[f"left out: {name}"] = str(error)
            functions.update(importer.functions)
        return Model(graphs, entry, functions, metadata, str(self.folder), aliases)

    # Signatures.

    def part(self, name: str, signature: SignatureDef) -> GraphDef:
        """The nodes that a signature needs. What it feeds is a placeholder, whatever it was."""
        part = GraphDef(versions=self.proto.graph_def.versions)
        part.library.CopyFrom(self.proto.graph_def.library)
        fed = {_node(info.name): info for info in signature.inputs.values()}
        left = [_node(info.name) for info in signature.outputs.values()]
        seen: set[str] = set(fed)
        for each, info in fed.items():
            part.node.append(self.placeholder(each, info, name))
        while left:
            each = left.pop()
            if each in seen:
                continue
            seen.add(each)
            if each in self.nodes:  # else the importer says who reads what is not there
                left += [_node(source.removeprefix("^")) for source in self.nodes[each].input]
        needed = (node for name, node in self.nodes.items() if name in seen and name not in fed)
        part.node.extend(needed)
        return part

    def placeholder(self, name: str, info: TensorInfo, signature: str) -> NodeDef:
        known = self.nodes.get(name)
        if known is None:
            raise InvalidModel(
                f"signature {signature!r} of {self.folder.name} feeds {info.name!r}, which is no "
                "tensor of the graph"
            )
        if known.op in PLACEHOLDERS:
            return known
        made = NodeDef(name=name, op="Placeholder")
        made.attr["dtype"].type = info.dtype
        made.attr["shape"].shape.CopyFrom(info.tensor_shape)
        return made

    def graph(
        self, importer: Importer, name: str, signature: SignatureDef, aliases: dict[str, str]
    ) -> Graph:
        """The graph of a signature, and in ``aliases`` what TensorFlow calls its values."""
        scope = importer.main()
        importer.report()
        inputs, outputs = [], []
        for key, info in sorted(signature.inputs.items()):
            value = self.found(scope, info, f"signature {name!r}")
            for alias in (value.name, _node(info.name)):
                aliases.setdefault(alias, key)
            value.name = key
            inputs.append(value)
        aliases.update(
            (node, values[0].name)
            for node, values in scope.values.items()
            if values and node not in aliases
        )
        for key, info in sorted(signature.outputs.items()):
            value = self.found(scope, info, f"signature {name!r}")
            outputs.append(value if key in signature.inputs else _named(value, key, scope))
        return Graph(inputs, outputs, scope.nodes, name)

    def found(self, scope: Scope, info: TensorInfo, what: str) -> Value:
        try:
            reference = scope.find(info.name) if info.WhichOneof("encoding") == "name" else None
        except KeyError as error:
            raise InvalidModel(f"{what}: tensor {info.name!r}, {error.args[0]}") from error
        if reference is None:
            raise InvalidModel(f"{what} has a tensor that is not a dense one of the graph")
        return reference.value

    # Variables.

    def values(self) -> dict[str, np.ndarray]:
        """What the checkpoint has for the variables, by the names of the nodes that make their
        handles."""
        prefix = self.folder / "variables" / "variables"
        if not Path(f"{prefix}.index").is_file():
            return {}
        from penstock.frontends.tensorflow.checkpoint import Bundle  # imports google_crc32c, 20 ms

        bundle = Bundle(prefix, self.limits)
        return {name: bundle.read(key) for name, key in self.restored()}

    def restored(self) -> Iterator[tuple[str, str]]:
        """Which variable is restored from which key."""
        yield from self.assigned(self.nodes, {})
        restore = self.nodes.get(_node(self.proto.saver_def.restore_op_name))
        if restore is None or "f" not in restore.attr:
            return
        function = self.library.get(restore.attr["f"].func.name)
        if function is None:
            return
        named = [argument.name for argument in function.signature.input_arg]
        arguments = {n: _node(i) for n, i in zip(named, restore.input, strict=False)}
        yield from self.assigned({node.name: node for node in function.node_def}, arguments)

    def assigned(
        self, nodes: Mapping[str, NodeDef], arguments: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Where ``nodes`` assign what they restore to a variable."""
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
            names = array_of(keys.attr["value"].tensor, self.limits).reshape(-1)
            if index < names.size:
                yield variable.name, str(names[index])

    def shared_name(self, name: str) -> str:
        """The name by which the store knows the variable of a node."""
        attrs = self.nodes[name].attr
        shared = text(attrs["shared_name"].s) if "shared_name" in attrs else ""
        container = text(attrs["container"].s) if "container" in attrs else ""
        return "/".join(filter(None, (container, shared or name)))


def _node(name: str) -> str:
    """The node that makes a tensor of this name."""
    return name.split(":")[0]


def _source(name: str, nodes: Mapping[str, NodeDef]) -> tuple[str, int]:
    """The node that a value comes from, past those that hand it on, and which of its outputs."""
    for _ in range(16):
        name, *rest = name.split(":")
        node = nodes.get(name)
        if node is None or node.op != "Identity" or not node.input:
            last = rest[-1] if rest else "0"
            return name, int(last) if last.isascii() and last.isdigit() and len(last) < 9 else 0
        name = node.input[0]
    return name, 0


def _named(value: Value, key: str, scope: Scope) -> Value:
    """``value`` under the name that a signature gives it."""
    op = find("Identity")
    assert op is not None
    made = Value(key, value.type)
    origin = f"output {key!r} of {scope.where}"
    scope.nodes.append(Node(op, [value], [made], name=f"{key}#output", origin=origin))
    return made


def _changes(part: GraphDef, library: Mapping[str, FunctionDef]) -> bool:
    """Whether a graph, or a function that it may call, assigns to a variable."""
    left: list[str] = []
    for node in part.node:
        if node.op in _CHANGES:
            return True
        left += calls(node)
    seen: set[str] = set()
    while left:
        name = left.pop()
        function = library.get(name)
        if name in seen or function is None:
            continue
        seen.add(name)
        for node in function.node_def:
            if node.op in _CHANGES:
                return True
            left += calls(node)
    return False
