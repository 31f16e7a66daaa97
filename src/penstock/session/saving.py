"""Saving a session: the documents of its model and of its plans (``session.artifact``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.artifact.encode import encode_graphs, encode_stores, encode_type
from penstock.artifact.writer import ArtifactWriter
from penstock.backends.base import PacksConstants
from penstock.backends.numpy import NumpyBackend
from penstock.compiler.compiler import AFTER_LOWERING
from penstock.compiler.options import DEFAULTS
from penstock.compiler.stages import CompileContext
from penstock.compiler.subgraph import Subgraph
from penstock.core import capability
from penstock.core.types import RunValue
from penstock.executors.base import Executor
from penstock.frontends.artifact.importer import FUNCTION, GRAPH
from penstock.ir.graph import Graph, Model
from penstock.plan.plan import Plan
from penstock.session.artifact import SAVED_OPTIONS, basis, encode_key, library_name


def save_session(
    model: Model,
    context: CompileContext,
    main: Subgraph,
    plans: Mapping[tuple[Any, ...], Executor],
    writer: ArtifactWriter,
    keys: Sequence[object] = (),
) -> None:
    """Write a session to a file: its model, and the ``plans`` of its main subgraph, by key, as many
    as the file may have. The file names the executors whose plans cannot be saved. ``keys``: those
    of plans that the file already has, together with the model."""
    if not keys:
        graphs = {GRAPH + name: graph for name, graph in model.graphs.items()}
        graphs |= {FUNCTION + name: graph for name, graph in model.functions.items()}
        writer.document("model", encode_graphs(graphs, writer))
        writer.document("main", encode_graphs({"main": main.graph}, writer))
    keys = [*keys]
    saved = {*map(str, keys)}
    unsaved: set[str] = set()
    for key, executor in plans.items():
        # Keys of plans hold shapes; a plan for values that are not tensors has none.
        is_restorable = context.executor in AFTER_LOWERING and None not in key
        if is_restorable and (len(keys) == writer.most_plans or str(encode_key(key)) in saved):
            continue
        if is_restorable and (document := _plan_document(executor, context, writer)):
            writer.document(f"plan {len(keys)}", document)
            keys.append(encode_key(key))
        else:
            unsaved.add(executor.name)
    # There are none if the file begins as a copy of another (``Artifact.copy_into``).
    writer.document("stores", encode_stores(writer))
    options = {name: context.options.get(name) for name in SAVED_OPTIONS}
    # Objects of this process cannot be represented in a file.
    if not all(type(name) is str for name in options["backends"] or ()):
        options["backends"] = None
    head = {
        "entry": model.entry,
        "graphs": list(model.graphs),
        "functions": list(model.functions),
        "metadata": model.metadata,
        "about": model.about,
        "aliases": dict(model.aliases),
        "overridable": [[name, encode_type(type_)] for name, type_ in model.overridable.items()],
        "resizable": model.resizable,
        "signatures": list(model.signatures),
        "checked": model.check_types is not None,
        "options": {name: x for name, x in options.items() if x != DEFAULTS.get(name)},
        "basis": basis(context),
        "libraries": {backend.name: library_name(backend.name) for backend in context.backends},
        "inputs": [[value.name, encode_type(value.type)] for value in main.inputs],
        "outputs": [
            [name, encode_type(value.type)]
            for name, value in zip(main.outputs, main.results, strict=True)
        ],
        "masks": list(main.masks),
        "plans": keys,
        "unsaved": sorted(unsaved),
    }
    writer.document("head", head)


def _plan_document(
    executor: Executor, context: CompileContext, writer: ArtifactWriter
) -> dict[str, RunValue] | None:
    """Return the document of a plan, or None if the plan does not know its source graph."""
    plan, arena = executor.table, executor.arena_plan
    if not isinstance(plan, Plan) or plan.graph is None:
        return None
    document = encode_graphs({"main": plan.graph}, writer)
    # Packing weights in the order of a kernel takes most of the time of opening a plan.
    copies = _copies(plan.graph, context, writer)
    document["copies"] = [[i, name, indices] for (i, name), indices in copies.items()]
    backends = {step.node: step.backend for step in plan.walk()}
    # Nodes without steps are views, whose kernels are NumPy's: no other backend need be asked.
    views = NumpyBackend.name if NumpyBackend.name in context.by_name else ""
    document["placement"] = [backends.get(node, views) for node in plan.graph.walk()]
    # Tasks depend on costs and workers, and are scheduled again where the file is opened.
    if arena is not None and executor.tasks is None:
        owners = [slot for slot, buffer in arena.buffer_of.items() if slot == buffer]
        offsets = [(slot, arena.offsets[slot]) for slot in owners]
        document["arena"] = [list(arena.order), offsets, arena.planner]
    return document


def has_state(model: Model) -> bool:
    """Whether a model has variables."""
    from penstock.ops.tensorflow.state import Store

    graphs = (*model.graphs.values(), *model.functions.values())
    nodes = (node for graph in graphs for node in graph.walk())
    return any(isinstance(node.attrs.get("store"), Store) for node in nodes)


def _copies(
    graph: Graph, context: CompileContext, writer: ArtifactWriter
) -> dict[tuple[int, str], dict[str, int]]:
    """Return the copies of constants that backends hold in packed orders: by constant and backend
    name, and all of them as indices of arrays."""
    inputs = dict.fromkeys(v for node in graph.walk() for v in node.inputs if v is not None)
    constants = [value for value in inputs if value.is_constant]
    indices: dict[tuple[int, str], dict[str, int]] = {}
    for backend in context.backends:
        packing = capability(backend, PacksConstants)
        packed = () if packing is None else packing.copies_of(constants)
        if not writer.fits(sum(copy.nbytes for copies in packed for copy in copies.values())):
            continue
        for value, copies in zip(constants if packed else (), packed, strict=True):
            if copies:
                index = {text: writer.array(copy) for text, copy in copies.items()}
                indices[writer.constant(value), backend.name] = index
    return indices
