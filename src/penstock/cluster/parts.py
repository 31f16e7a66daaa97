"""Parts of graphs on their way to workers: as bytes, and from these to executors.

The bytes are those of an artifact: the graph of the part, the functions that it calls, and the
constants and initial values of variables that these need. They are sent once; runs then name the
part by its handle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from penstock.artifact.container import ArtifactFile, ArtifactWriter
from penstock.artifact.decode import decode_graphs, decode_stores
from penstock.artifact.encode import encode_graphs, encode_stores
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
    """A part of a graph that is registered with a ``worker`` under the ``handle`` of the graph.
    ``inputs`` and ``outputs``: which ones of the graph are its own; ``nodes`` describes it.
    ``passive``: it begins when a value of another part comes. ``silent``: it has nothing to answer,
    and no effects that a run must wait for."""

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
    """Whether a node waits for others."""
    reads = all_reads(node)
    return bool(node.control_inputs) or any(value.producer is not None for value in reads)


def remote_parts(parts: Mapping[int, GraphPart]) -> list[RemotePart]:
    """The parts as the driver knows them, by worker; if none of them has outputs, all answer."""
    remote = [RemotePart.of(part, worker) for worker, part in parts.items()]
    # Else no message would say that the run has ended.
    if all(part.silent for part in remote):
        remote = [replace(part, silent=False) for part in remote]
    return remote


@dataclass(frozen=True)
class PartOptions:
    """The options with which a worker compiles a part, those of ``CompileOptions`` that matter.
    ``devices``: those of all workers by their full names, with the backends that they stand for.
    ``operations``: those that the program registered and the graph has."""

    backends: tuple[str | Backend, ...]
    precision: Precision
    memory_planner: MemoryPlanner
    place: Mapping[str, Where]
    limits: Limits
    devices: Mapping[str, str | Backend | None]
    operations: tuple[Op, ...] = ()

    @staticmethod
    def of(context: CompileContext, graphs: Iterable[Graph]) -> PartOptions:
        """The options for the parts of a session, which these ``graphs`` are."""
        options = context.options
        given = {b.name: b for b in options.backends or () if not isinstance(b, str)}
        # By name where that will do: a worker may then share it among sessions.
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
        """The options as bytes. Raises ``Unsupported`` where a backend or an operation of the
        program's holds what only this process has, such as a lock or an open file."""
        from ray import cloudpickle

        # Each by itself: the error is to name the one at fault.
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
        """The options of bytes: for equal bytes the same, so that parts share backends."""
        from ray import cloudpickle

        options: PartOptions = cloudpickle.loads(content)
        return options

    def devices_of(self, graph: Graph) -> Sequence[str] | Mapping[str, str | Backend] | None:
        """The devices of the worker that the nodes of a part name, as ``compile`` takes them."""
        tasks = {_task(node.device) for node in graph.nodes}
        own = {name: which for name, which in self.devices.items() if _task(name) in tasks}
        with_backends = {name: which for name, which in own.items() if which is not None}
        return with_backends or [*own] or None


def _task(device: str) -> str:
    """The name of a device without its last part, the number of the device in its task."""
    return device.rpartition("/")[0]


def encode_part(part: GraphPart, functions: Mapping[str, Graph]) -> tuple[bytes, list[Store]]:
    """The bytes of a part, and the session's stores of variables that it refers to. Raises
    ``PenstockError`` for attributes that are no data."""
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
    """The names of the functions that a graph calls, and those that these call."""
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
    """The executor of a part. ``stores`` has the variables of this worker, by the ``numbers`` that
    the parts of a session have for them, and gets those that are new."""
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
    """The variables that a graph and its functions name: their stores and names."""
    graphs = [graph, *[functions[name] for name in called(graph, functions)]]
    nodes = [node for each in graphs for node in each.walk() if "store" in node.attrs]
    return [(node.attrs["store"], variable_name(node.attrs, node.name)) for node in nodes]
