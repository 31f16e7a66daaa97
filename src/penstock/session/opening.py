"""Open a model, given as an object or a path, with options: read it, and find the options in
effect, its graphs and their compile context, and its saved plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from penstock.backends.registry import available, backends_of
from penstock.backends.specializing import SpecializingBackend
from penstock.compiler.options import CompileOptions
from penstock.compiler.stages import CompileContext, NamedWorkers
from penstock.core.limits import Limits
from penstock.core.records import NamedTuple, dataclass
from penstock.frontends.common.model_files import opened_files
from penstock.frontends.load import entered, load
from penstock.ir.graph import Graph, Model
from penstock.session.environment import with_environment

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.backends.base import Backend
    from penstock.ops.tensorflow.state import Store
    from penstock.session.artifact import Artifact
    from penstock.session.compile_cache import CacheEntry


class DerivedModel(NamedTuple):
    """A model that ``derive`` computes from the one at a ``path``; it may raise ``PenstockError``.
    ``form``: what it computes, which distinguishes sessions of one file in the compile cache."""

    path: str | Path
    form: str
    derive: Callable[[Model], Model]


@dataclass(frozen=True, slots=True)
class Opened:
    """The parts of a session.

    ``graph`` returns the main graph, and decodes it first if it was saved; ``stores`` maps the
    stores of the model to the session's variables; ``entry`` is its place in the cache.
    """

    model: Model
    context: CompileContext
    graph: Callable[[], Graph]
    stores: dict[Store, Store]
    artifact: Artifact | None
    entry: CacheEntry | None


def open_model(model: object, options: CompileOptions, limits: Limits) -> Opened:
    """Read a model, unless it is an object already, and determine its options: those given, those
    that its file requests or was saved with, and those of the environment."""
    form, derive = "", None
    if isinstance(model, DerivedModel):
        model, form, derive = model
    # Uses the options as given: what the model's file adds is part of its digest.
    entry, given = _cache_entry(model, options, form), options.expert.given
    model, entry = _loaded(model, options, limits, entry, derive)
    if model.options:
        from penstock.frontends.nnpackage.options import package_options

        options = options.filled(package_options(model, available()))
    file = model.artifact
    if file is not None:
        from penstock.session.artifact import saved_options

        options = saved_options(model, options)
    options, workers = _named_workers(with_environment(options, model), model)
    # Only now is the executor known to which the options apply.
    options.check_use(given)
    backends = _backends(options, limits)
    stores: dict[Store, Store] = {} if options.variables is None else options.variables.of(model)
    functions, graph = _graphs(model, stores)
    context = CompileContext(options, backends, functions, named_workers=workers)
    artifact = None
    if file is not None:
        from penstock.session.artifact import Artifact

        artifact = Artifact(model, context, stores)
    return Opened(model, context, graph, stores, artifact, entry)


def _graphs(
    model: Model, stores: dict[Store, Store]
) -> tuple[Mapping[str, Graph], Callable[[], Graph]]:
    """Return the functions of a model, and a function that returns its main graph."""
    if model.artifact is not None:
        from penstock.artifact.decode import decode_stores

        for store in decode_stores(model.artifact):
            stores.setdefault(store, store.own())
        # The main graph is decoded when needed, functions at once, since they may have variables.
        if not stores:
            return model.functions, partial(getattr, model, "graph")
        if not model.functions:
            return {}, lambda: _own_stores({"": model.graph}, stores)[""]
    functions = _own_stores({"": model.graph, **model.functions}, stores)
    return functions, partial(functions.pop, "")


def _cache_entry(model: object, options: CompileOptions, form: str) -> CacheEntry | None:
    """Return the place of a model in the compile cache, if it may have one."""
    # A check for os.PathLike would examine all abstract classes, for each type of model.
    is_path = isinstance(model, str) or hasattr(model, "__fspath__")
    if not options.cache and not (options.cache is None and is_path):
        return None
    from penstock.session.compile_cache import cache_entry

    return cache_entry(model, options, form)


def _loaded(
    model: object,
    options: CompileOptions,
    limits: Limits,
    entry: CacheEntry | None,
    derive: Callable[[Model], Model] | None,
) -> tuple[Model, CacheEntry | None]:
    """Return the given model, the one of a file, a model derived from it, or a cached one; and its
    place in the cache, if it may have one."""
    # A cached model was checked when it was saved, and is not read again.
    kept = None if entry is None else entry.load()
    if kept is not None:
        return kept, entry
    if isinstance(model, Model):
        return model if options.signature is None else entered(model, options.signature), None
    with opened_files() as opened:
        loaded = load(
            model, limits=limits, map_weights=options.map_weights, signature=options.signature
        )
        if derive is not None:
            loaded = derive(loaded)
    if entry is None or (entry.by_default and loaded.artifact):  # the model is a saved session
        return loaded, None
    entry.opened = opened
    return loaded, entry


def _named_workers(options: CompileOptions, model: Model) -> tuple[CompileOptions, NamedWorkers]:
    """Split the options into those without entries for workers, and these entries."""
    if options.cluster is None:
        return options, NamedWorkers()
    from penstock.compiler.cluster import worker_places

    return worker_places(options, model)


def _backends(options: CompileOptions, limits: Limits) -> tuple[Backend, ...]:
    """Return the backends that the options ask for, subject to the limits."""
    places = (options.place or {}).values()
    devices, precision = options.cuda_devices, options.precision
    chosen = options.backends
    if options.reproducible:
        from penstock.backends.native.backend import reproducible_backend

        names = chosen or ("native", "numpy")
        chosen = [reproducible_backend() if name == "native" else name for name in names]
    backends = tuple(backends_of(chosen, precision, devices, places))
    if options.precision == "bf16":
        from penstock.session.facts import warn_of_precision

        warn_of_precision(options.precision, backends)
    most = limits.max_plans_bytes
    for backend in backends:
        if isinstance(backend, SpecializingBackend) and most is not None:
            backend.most_bytes = min(backend.most_bytes, most)
    return backends


def _own_stores(graphs: dict[str, Graph], own: dict[Store, Store]) -> dict[str, Graph]:
    """Return the graphs by name, with variables of their own."""
    nodes = chain.from_iterable([graph.walk() for graph in graphs.values()])
    if True not in ["store" in node.attrs for node in nodes]:
        return graphs
    from penstock.ops.tensorflow.state import own_stores

    return own_stores(graphs, own)
