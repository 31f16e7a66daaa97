"""Encoding of the parts of graphs for workers, and their compilation to executors there.

A part is encoded as an artifact: its graph, the functions that it calls, and the constants and
initial values of variables that these need. It is sent once; runs then refer to it by a handle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.artifact.container import ArtifactFile
from penstock.artifact.decode import decode_graphs, decode_stores
from penstock.artifact.encode import encode_graphs, encode_stores
from penstock.artifact.writer import ArtifactWriter
from penstock.backends.base import Backend, Where
from penstock.backends.group import Group
from penstock.backends.registry import backends_of
from penstock.compiler.frames import build_part
from penstock.compiler.options import CompileOptions, ExpertOptions, MemoryPlanner, Precision
from penstock.compiler.stages import CompileContext
from penstock.core.errors import Unsupported
from penstock.core.limits import Limits
from penstock.core.records import dataclass, replace
from penstock.executors.frames.executor import FramesExecutor
from penstock.ir.contract import is_own
from penstock.ir.graph import Graph, GraphPart, Node, all_reads
from penstock.ir.op import Op, Role
from penstock.ops.registry import adopt_operations
from penstock.ops.tensorflow.state import Store, variable_name

_MAIN, _FUNCTION = "main", "function:"


@dataclass(frozen=True)
class RemotePart:
    """A part of a graph that is registered with a ``worker``, under the handle of the graph.
    ``inputs`` and ``outputs``: the indices of its inputs and outputs in the graph. ``nodes``: a
    description for messages. ``passive``: it begins when a value of another part arrives.
    ``silent``: it has no outputs and no side effects that a run must wait for."""

    worker: int
    inputs: Sequence[int]
    outputs: Sequence[int]
    nodes: str
    passive: bool
    silent: bool

    @staticmethod
    def of(part: GraphPart, worker: int) -> RemotePart:
        own = [n for n in part.graph.nodes if n.op.role not in (Role.SEND, Role.RECV)]
        named = [n for n in own if n in part.originals] or own
        ends = " to ".join([node.label for node in (named[:1] + named[1:][-1:])])
        text = f"the part of {part.graph.name!r} with {len(named)} node(s), {ends}"
        roots = [node for node in part.graph.nodes if not _waits(node)]
        passive = bool(roots) and all(node.op.role is Role.RECV for node in roots)
        quiet = not part.outputs and not part.graph.targets and all(n.op.pure for n in own)
        return RemotePart(
            worker, part.inputs, part.outputs, text, passive and not part.inputs, quiet
        )


def _waits(node: Node) -> bool:
    """Whether a node depends on other nodes."""
    reads = all_reads(node)
    return bool(node.control_inputs) or any(value.producer is not None for value in reads)


def remote_parts(parts: Mapping[int, GraphPart]) -> list[RemotePart]:
    """Return the parts as the driver knows them. If all would be silent, none is."""
    remote = [RemotePart.of(part, worker) for worker, part in parts.items()]
    # Otherwise no message would report the end of the run.
    if all(part.silent for part in remote):
        remote = [replace(part, silent=False) for part in remote]
    return remote


@dataclass(frozen=True)
class PartOptions:
    """The options with which a worker compiles a part: a subset of ``CompileOptions``. ``devices``:
    the devices of all workers, by full name, with their backends. ``operations``: the operations of
    the graph that the program has registered."""

    backends: tuple[str | Backend, ...]
    precision: Precision
    memory_planner: MemoryPlanner
    place: Mapping[str, Where]
    limits: Limits
    devices: Mapping[str, str | Backend | None]
    operations: tuple[Op, ...] = ()

    @staticmethod
    def of(context: CompileContext, graphs: Iterable[Graph]) -> PartOptions:
        """Return the options for ``graphs``, the parts of a session."""
        options = context.options
        given = {b.name: b for b in options.backends or () if not isinstance(b, str)}
        # By name where possible, so that sessions share the worker's backend.
        named = [b.name for b in context.backends if not isinstance(b, Group)]
        backends = tuple([given.get(name, name) for name in named])
        place = dict(options.place or {})
        planner = options.expert.memory_planner
        own = context.named_workers.devices
        devices = {name: backend for each in own for name, backend in each.items()}
        ops = {node.op: None for graph in graphs for node in graph.walk()}
        registered = tuple([op for op in ops if not (is_own(op.compile) and is_own(op.infer))])
        return PartOptions(
            backends, options.precision, planner, place, context.limits, devices, registered
        )

    def encode(self) -> bytes:
        """Return the pickled options. Raises ``Unsupported`` if a backend or an operation of the
        program has an attribute that cannot be pickled, such as a lock or an open file."""
        from ray import cloudpickle

        # Each is pickled separately first, so that the error names the one at fault.
        own: list[tuple[object, str]] = [
            (backend, f"backend {backend.name!r}")
            for backend in (*self.backends, *self.devices.values())
            if backend is not None and not isinstance(backend, str)
        ]
        own += [(op, f"operation {op.full_name}") for op in self.operations]
        for part, name in own:
            try:
                cloudpickle.dumps(part)
            except Exception as error:
                reason = f"it cannot be sent to the workers of a cluster: {error}"
                raise Unsupported.of([(name, reason, "cluster=")]) from error
        content: bytes = cloudpickle.dumps(self)
        return content

    @staticmethod
    @lru_cache(maxsize=100)
    def decode(content: bytes) -> PartOptions:
        """Return the options: one object for equal bytes, so that parts share backends."""
        from ray import cloudpickle

        options: PartOptions = cloudpickle.loads(content)
        return options

    def devices_of(self, graph: Graph) -> Sequence[str] | Mapping[str, str | Backend] | None:
        """Return the devices of the worker whose devices a part's nodes name, for ``compile``."""
        tasks = {_task(node.device) for node in graph.nodes}
        own = {name: which for name, which in self.devices.items() if _task(name) in tasks}
        with_backends = {name: which for name, which in own.items() if which is not None}
        return with_backends or [*own] or None


def _task(device: str) -> str:
    """Return a device's name without its last component, the device's number in its task."""
    return device.rpartition("/")[0]


def encode_part(part: GraphPart, functions: Mapping[str, Graph]) -> tuple[bytes, list[Store]]:
    """Return the bytes of a part, and the session's stores of variables that it refers to. Raises
    ``PenstockError`` for attributes that cannot be encoded."""
    writer = ArtifactWriter()
    names = called(part.graph, functions)
    graphs = {_MAIN: part.graph, **{_FUNCTION + name: functions[name] for name in names}}
    document = encode_graphs(graphs, writer)
    writer.document("part", document)
    writer.document("stores", encode_stores(writer))
    nodes = [node for graph in graphs.values() for node in graph.walk()]
    stores = [node.attrs["store"] for node in nodes if isinstance(node.attrs.get("store"), Store)]
    own = {store.model: store for store in stores}
    return writer.to_bytes(), [own[store] for store in writer.stores]


def called(graph: Graph, functions: Mapping[str, Graph]) -> list[str]:
    """Return the names of the functions that a graph calls, directly or indirectly."""
    names: dict[str, None] = {}
    graphs = [graph]
    while graphs:
        for node in graphs.pop().walk():
            name = node.attrs["function"] if node.op.role is Role.CALL else None
            if name is not None and name not in names:
                names[name] = None
                graphs.append(functions[name])
    return list(names)


def compile_part(
    content: memoryview,
    options: PartOptions,
    threads: int,
    numbers: list[int],
    stores: dict[int, Any],
) -> FramesExecutor:
    """Compile an encoded part to an executor. ``stores`` maps ``numbers`` to the stores of this
    worker, to which the part's new stores are added."""
    adopt_operations(options.operations)
    file = ArtifactFile(content, "a part of a graph", options.limits)
    own = decode_stores(file)
    file.stores = [stores.setdefault(n, store) for n, store in zip(numbers, own, strict=True)]
    graphs = decode_graphs(file.document("part"), file, parts=True)
    functions = {
        name.removeprefix(_FUNCTION): graph for name, graph in graphs.items() if name != _MAIN
    }
    compile_options = CompileOptions(
        executor="frames",
        backends=options.backends,
        precision=options.precision,
        expert=ExpertOptions(memory_planner=options.memory_planner),
        place=options.place,
        threads=threads,
        limits=options.limits,
        devices=options.devices_of(graphs[_MAIN]),
    )
    named = options.place.values()
    backends = tuple(backends_of(options.backends, options.precision, places=named))
    context = CompileContext(compile_options, backends, functions)
    return build_part(graphs[_MAIN], context)


def variables_of(graph: Graph, functions: Mapping[str, Graph]) -> list[tuple[Store, str]]:
    """Return the stores and the names of the variables that a graph and its functions name."""
    graphs = [graph, *[functions[name] for name in called(graph, functions)]]
    nodes = [node for each in graphs for node in each.walk() if "store" in node.attrs]
    return [(node.attrs["store"], variable_name(node.attrs, node.name)) for node in nodes]
