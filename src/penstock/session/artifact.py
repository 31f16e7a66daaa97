"""Sessions in files: the graphs of a model, and the plans that were compiled for them.

For each plan the file has what takes long to compute: the graph after all passes, the placement of
each node, the order of the steps, and their offsets in the arena. Kernels are compiled and programs
written when a plan is first used. Nothing in the file is trusted (``artifact.decode``). A plan for
another machine or other options is not used: the graph is then compiled as for a new session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.artifact.container import ArtifactFile
from penstock.artifact.decode import decode_graph, decode_stores, decode_type
from penstock.backends.base import PacksConstants
from penstock.backends.registry import BACKENDS, describe
from penstock.compiler.compiler import Compiler
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext, SavedPlan
from penstock.compiler.subgraph import Subgraph
from penstock.core import capability
from penstock.core.errors import InternalError
from penstock.core.types import JsonObject, Type, type_of
from penstock.executors.base import Executor
from penstock.host.threads import core_budget
from penstock.ir.graph import Graph, Model, Value
from penstock.plan.arena_layout import SavedArena

if TYPE_CHECKING:
    import mmap

    from penstock.artifact.writer import ArtifactWriter
    from penstock.ops.tensorflow.state import Store

SAVED_OPTIONS: Mapping[str, type] = {
    "executor": str,
    "backends": list,
    "place": dict,
    "threads": int,
    "fixed_threads": bool,
    "precision": str,
    "reproducible": bool,
    "memory_planner": str,
}
"""options that an opened session has again, and their types in JSON; plans depend on all but the
last one"""


def basis(context: CompileContext) -> JsonObject:
    """Return the settings that plans depend on, besides graph, input shapes and libraries."""
    options = context.options
    return {
        "backends": [backend.name for backend in context.backends],
        "executor": context.executor,
        "place": {
            key: where if isinstance(where, str) else [*where]
            for key, where in (options.place or {}).items()
        },
        "precision": options.precision,
        "reproducible": options.reproducible,
        "threads": options.threads or core_budget(),
    }


def library_name(name: str) -> str:
    """Return the library of a backend, with its version and instruction set, without its path."""
    return describe(name).rpartition(",")[0] if name in BACKENDS else name


_WRONG = (LookupError, TypeError, ValueError)
"""the errors of reading a document with malformed entries"""


def encode_key(key: Sequence[Any]) -> list[Any]:
    """Return the key of a plan (``Subgraph.key``) in JSON's types."""
    return [[list(x[0]), x[1].name] if x and isinstance(x[0], tuple) else list(x) for x in key]


class Artifact:
    """The plans of an artifact, for a session with this context. ``own`` maps the stores of the
    model to the session's variables."""

    def __init__(self, model: Model, context: CompileContext, own: dict[Store, Store]) -> None:
        self._file: ArtifactFile = model.artifact
        self._context = context
        self._own = own
        self._head = self._file.head
        saved, libraries = self._head.get("basis"), self._head.get("libraries")
        if not isinstance(saved, dict) or not isinstance(libraries, dict):
            raise self._file.damaged("it does not say what its plans depend on")
        plans = self._head.get("plans")
        if not isinstance(plans, list):
            raise self._file.damaged("it has no list of plans")
        # JSON turns tuples into lists, which cannot be looked up in a dict.
        self._plans = {str(key): i for i, key in enumerate(plans)}
        self.differences: list[str] = []
        """why its plans are not used"""
        unsaved = self._head.get("unsaved", [])
        if not isinstance(unsaved, list) or {*map(type, unsaved)} - {str}:
            raise self._file.damaged("it does not say which plans it lacks")
        self.missing = [
            f"those of executor {name!r:.80} are compiled when they are needed" for name in unsaved
        ]
        """which of its plans are not in the file, and why"""
        self._differ(saved, basis(context))
        self._differ(libraries, {name: library_name(name) for name in sorted(context.by_name)})

    def _differ(self, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        different = [
            f"{name} {saved.get(name)!r:.200}, here {x!r:.200}"
            for name, x in own.items()
            if saved.get(name) != x
        ]
        if different:
            self.differences += different
            self._plans = {}

    def main(self, compiler: Compiler) -> Subgraph:
        """Return the main subgraph, whose graph is decoded when it is needed."""

        def graph() -> Graph:
            graph = self._graph(self._file.document("main"))
            for value, port in zip(graph.inputs, inputs, strict=True):
                value.type = port.type
            compiler.infer(graph)  # later stages assume types as precise as possible
            return graph

        inputs, outputs = self._ports("inputs"), self._ports("outputs")
        subgraph = Subgraph(graph, [v.name for v in outputs], inputs=inputs, results=outputs)
        masks = self._head.get("masks")
        if not isinstance(masks, list) or {*map(type, masks)} - {int}:
            raise self._file.damaged("it does not say which inputs are masks")
        if not {*masks} <= {*range(len(inputs))}:
            raise self._file.damaged("it has masks that are no inputs")
        subgraph.masks = tuple(masks)  # which finding in the graph would take reading it
        return subgraph

    def _ports(self, key: str) -> list[Value]:
        try:
            ports = [(name, decode_type(type_)) for name, type_ in self._head[key]]
            names = [name for name, _ in ports]
            if {*map(type, names)} - {str} or len({*names}) < len(names):
                raise TypeError(f"its {key} have no names, or two have one")
        except (AssertionError, *_WRONG) as error:
            raise self._file.damaged(error) from error
        return [Value(name, type_) for name, type_ in ports]

    def copy_into(self, writer: ArtifactWriter) -> Sequence[object]:
        """Copy the whole file into an empty writer, unless it has variables. Return the keys of the
        plans that were copied."""
        if not self._plans or decode_stores(self._file):
            return ()
        writer.extend(self._file)
        keys: Sequence[object] = self._head["plans"]
        return keys

    def release(self) -> None:
        """Release weights that are also in the model's files."""
        self._file.release()

    @property
    def mapping(self) -> mmap.mmap | None:
        """The mapped file, if its pages are read on demand, else None."""
        return self._file.mapping

    @property
    def has_plans(self) -> bool:
        """Whether there are plans that can be used on this machine."""
        return bool(self._plans)

    def has(self, key: Sequence[Any]) -> bool:
        """Whether a plan with this key was saved."""
        return None not in key and str(encode_key(key)) in self._plans

    def restored(
        self, compiler: Compiler, key: Sequence[Any], values: Sequence[Any]
    ) -> Executor | None:
        """Return the executor of the plan with this key for these values, or None if not saved."""
        if not self.has(key):
            return None
        number = self._plans[str(encode_key(key))]
        try:
            document = self._file.document(f"plan {number}")
            saved = self._plan(document, list(map(type_of, values)))
            return compiler.restore(saved, values)
        # Includes our own assertions, since a changed file may contain what we never generate.
        except (InternalError, AssertionError, AttributeError, *_WRONG) as error:
            raise self._file.damaged(f"its plan {number}: {error!r}") from error

    def _plan(self, document: Any, types: Sequence[Type]) -> SavedPlan:
        """Return the plan of a document, whose inputs must have these types."""
        graph = self._graph(document, types)
        placement = dict(zip(graph.walk(), document["placement"], strict=True))
        # The file may name any backend.
        if not {*placement.values()} <= {*self._context.by_name, ""}:
            raise ValueError("it has nodes on other backends")
        arena = document.get("arena")
        saved = None if arena is None else SavedArena(*arena)
        copies = []
        for constant, name, indices in document["copies"]:
            if self._file.reordered(constant) is not None:
                continue  # an earlier plan has taken them
            packing = capability(self._context.by_name[name], PacksConstants)
            if packing is None:
                raise ValueError(f"it has constants in the order of {name}")
            of_constant = {text: self._file.array(i) for text, i in indices.items()}
            copies.append(packing.saved_copies(self._file.array(constant), of_constant))
        named = {node: name for node, name in placement.items() if name}
        return SavedPlan(graph, named, saved, copies)

    def _graph(self, document: Any, types: Sequence[Type] | None = None) -> Graph:
        """Return the graph of a document, for inputs of ``types``, with the session's variables."""
        graph = decode_graph(document, self._file, "main", self._context.limits, types)
        ports = [len(self._head[key]) for key in ("inputs", "outputs")]
        if [len(graph.inputs), len(graph.outputs)] != ports:
            raise self._file.damaged("'main' has other inputs and outputs than its head says")
        if not self._own:
            return graph
        from penstock.ops.tensorflow.state import own_stores

        return own_stores({"main": graph}, self._own)["main"]


def saved_options(model: Model, options: CompileOptions) -> CompileOptions:
    """Return ``options`` completed by those with which the session of an artifact was saved."""
    if model.artifact is None:
        return options
    saved = model.artifact.head.get("options", {})
    if not isinstance(saved, dict) or not saved.keys() <= {*SAVED_OPTIONS}:
        raise model.artifact.damaged("it has options that there are not")
    try:
        for name, x in saved.items():
            texts = list(x) if isinstance(x, list | dict) else []
            for where in x.values() if isinstance(x, dict) else ():
                texts += where if isinstance(where, list) else [where]
            # The exact type is required, since in Python true is an int.
            if type(x) is not SAVED_OPTIONS[name] or {*map(type, texts)} - {str}:
                raise TypeError(f"{name} is {x!r:.80}")
        names = saved.get("backends", ())
        if not {*names} <= BACKENDS.keys() or len({*names}) < len(names):
            raise ValueError("it names backends that there are not, or one twice")
        return options.filled(saved)
    except _WRONG as error:
        raise model.artifact.damaged(f"its options: {error}") from error
