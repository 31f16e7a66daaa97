"""What users hold: a compiled model, with its plans by input shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from penstock.backends.base import Backend
from penstock.errors import InvalidInput, PenstockError
from penstock.executors.base import NEVER, CancelToken, Executor
from penstock.frontends.load import load
from penstock.host import gc_pause
from penstock.host.fork import renewed
from penstock.host.malloc import keep_memory
from penstock.host.threads import pool
from penstock.inspect.explain import format_plan
from penstock.inspect.forecast import Forecast
from penstock.inspect.gantt import Chart, charts
from penstock.ir.device_name import local
from penstock.ir.graph import Model
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.observers.base import Observer
from penstock.observers.profile import Profile
from penstock.ops.tensorflow.state import own_stores
from penstock.plan.plan import Plan
from penstock.session.compiler import EXECUTORS, Compiler
from penstock.session.run import Job, Named, Run
from penstock.session.subgraphs import Subgraph, Subgraphs
from penstock.tuning.placement import check_overrides
from penstock.types import TensorType, Type

BACKENDS = {
    "numpy": "penstock.backends.numpy.NumpyBackend",
    "onednn": "penstock.backends.onednn.backend.OneDnnBackend",
}
"""where the backends are that go by a name; imported when they are asked for"""
PRECISIONS = ("float32", "bf16")
_WITH_PRECISION = {"onednn"}

# Sets of feeds and fetches that a session remembers.
_MOST_SIGNATURES = 256

_ndarray = np.ndarray


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a session: its name and its type."""

    name: str
    type: Type

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a session holds: constants, which its plans share; arenas; plans, about, with
    their programs; and how many plans there are."""

    weights: int
    arenas: int
    plans: int
    count: int


class Session:
    """A compiled model; made by ``penstock.compile``.

    ``run`` may be called from any number of threads at once, and gives each the answers that it
    would get alone. Outputs are new arrays; fed arrays are read, never written, and must not be
    changed by others while the run goes on.
    """

    def __init__(
        self,
        model: Model | str | Path | Any,
        *,
        executor: str = "auto",
        backends: Sequence[str | Backend] | None = None,
        place: Mapping[str, str] | None = None,
        threads: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        limits: Limits | None = None,
        autotune: bool = False,
        precision: str = "float32",
        max_streams: int | None = None,
        devices: int | Sequence[str] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
        if executor not in EXECUTORS:
            raise ValueError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        if threads is not None and not threads >= 1:
            raise ValueError(f"threads={threads}: a run needs at least one thread")
        if max_streams is not None and not max_streams >= 1:
            raise ValueError(f"max_streams={max_streams}: a plan needs at least one stream")
        if devices is not None and executor not in ("auto", "frames"):
            raise ValueError(f'devices= are for executor="frames", not {executor!r}')
        virtual = () if devices is None else local(devices)
        chosen = [_backend(each, precision) for each in backends or _default()]
        if len({backend.name for backend in chosen}) < len(chosen):
            raise ValueError(f"backends= has two of one name: {[b.name for b in chosen]}")
        self._options = {
            "executor": executor,
            "backends": backends,
            "place": place,
            "threads": threads,
            "shapes": shapes,
            "limits": limits,
            "autotune": autotune,
            "precision": precision,
            "max_streams": max_streams,
            "devices": devices,
        }
        keep_memory()
        self.limits = limits or DEFAULT_LIMITS
        self._closed = False
        self._lock = threading.Lock()
        # In the order of their last use.
        self._plans: OrderedDict[tuple[Subgraph, Any, bool], Executor] = OrderedDict()
        with gc_pause.paused():
            self.model = model if isinstance(model, Model) else load(model, limits=self.limits)
            model = self.model
            functions = own_stores({"": model.graph, **model.functions})
            graph = functions.pop("")
            options = threads, autotune, max_streams, virtual, functions
            self._compiler = Compiler(executor, chosen, self.limits, place, *options)
            check_overrides(place or {}, graph, chosen)
            self._signatures = Subgraphs(graph, model.aliases, self._compiler.prepare)
            self._main = self._signatures.main
            self._resolve = self._signatures.resolve
            if shapes is not None:
                self._prepare(shapes)
        renewed(self)

    # Running.

    def run(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> dict[str, Any]:
        """Run the model and return what was fetched, by name.

        ``feeds`` maps names to arrays (anything with ``__array__`` or ``__dlpack__``, lists and
        numbers) of the input's dtype and shape. Any value of the model may be fed or fetched by
        name; only what the fetches need is run. ``targets`` are values to compute without fetching
        them. After ``timeout`` seconds the run ends with ``DeadlineExceeded``, after
        ``cancel.cancel()`` with ``Cancelled``. A ``trace`` records the run; it, and ``observers``
        of other kinds, are told of each step while it runs.

        Raises ``InvalidInput`` for wrong names, dtypes and shapes, ``RunError`` for what goes wrong
        on the way.
        """
        if self._closed:
            raise PenstockError("the session is closed")
        request, key, values = self._resolve(feeds, fetches, targets)
        signature = request.signature
        last, executor = signature.last
        if executor is None or key != last:
            executor = self._executor(signature, key, values)
        if timeout is None and cancel is None and trace is None and not observers:
            outputs = executor.run(values, NEVER)
        else:
            told = _told(trace, observers)
            if told:
                executor = self._observed(signature, key, values)
            outputs = Run(timeout, cancel, told).run_inline(executor, values)
        return request.named(outputs)

    def __call__(self, *inputs: Any) -> Any:
        """Run with inputs by position: the array of one output, a tuple of several."""
        signature = self._main
        if len(inputs) != len(signature.names):
            wanted = ", ".join(map(str, self.inputs))
            raise InvalidInput(f"{len(inputs)} inputs given, the model takes ({wanted})")
        outputs = tuple(self.run(dict(zip(signature.names, inputs, strict=True))).values())
        return outputs[0] if len(outputs) == 1 else outputs

    def submit(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> Future[dict[str, Any]]:
        """``run`` on the process-wide pool of threads; returns at once.

        The ``timeout`` counts from now, and a run that is stopped while it is queued ends at once.
        Errors are the future's. Closing the session does not stop the run.
        """
        job = self.job(
            feeds,
            fetches,
            targets,
            timeout=timeout,
            cancel=cancel,
            trace=trace,
            observers=observers,
        )
        try:
            pool().submit(job)
        except RuntimeError as error:  # the process ends
            job.refuse(error)
            raise
        return job.future

    def job(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        trace: Observer | None = None,
        observers: Sequence[Observer] = (),
    ) -> Job:
        """A run for somebody to call later, on a thread that may do its work: see ``submit``."""
        if self._closed:
            raise PenstockError("the session is closed")

        def resolve(watched: bool) -> tuple[Executor, Sequence[Any], Named]:
            request, key, values = self._resolve(feeds, fetches, targets)
            find = self._observed if watched else self._executor
            return find(request.signature, key, values), values, request.named

        return Job(Run(timeout, cancel, _told(trace, observers)), resolve)

    async def arun(
        self, feeds: Mapping[str, Any] | None = None, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        """``run`` for asyncio: the event loop goes on meanwhile; cancelling it cancels the run."""
        import asyncio

        # Of several runs that share a token, cancelling the task stops its own only.
        token = CancelToken(options.pop("cancel", None))
        future = self.submit(feeds, *arguments, cancel=token, **options)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            token.cancel()
            raise

    def profile(self, feeds: Mapping[str, Any] | None = None, *, runs: int = 10) -> Profile:
        """Run the model step by step, every node on every backend that supports it, and keep what
        each took in the table of costs (in the user's cache folder), which later decides where
        nodes run and what runs in parallel. Returns where the time went, of ``runs`` runs on each
        backend. Raises as ``run`` does.
        """
        if self._closed:
            raise PenstockError("the session is closed")
        request, _, values = self._resolve(feeds, None, None)
        return self._compiler.profile(request.signature.graph, values, runs)

    def forecast(self, workers: int) -> Forecast:
        """What the last plan would take with so many workers of one thread each, by a simulated
        schedule, from measured costs (``profile``), or else estimated ones.
        """
        return self._compiler.forecast(self.plan, workers)

    def schedule(self, max_streams: int | None = None) -> list[Chart]:
        """The static schedule of the last plan on streams, and of blocks inside of it that have
        streams of their own: on as many as pay, by measured costs (``profile``), or else estimated
        ones; or on up to ``max_streams``, whatever they cost.
        """
        return charts(self.plan, self._compiler.streaming(self.plan, max_streams))

    # Looking inside.

    @property
    def inputs(self) -> list[Port]:
        """Names and types of the model's inputs."""
        return [Port(v.name, v.type) for v in self.model.graph.inputs]

    @property
    def outputs(self) -> list[Port]:
        """Names and types of the model's outputs, as far as they are known before a run."""
        types = [v.type for v in self._main.graph.outputs]
        return [Port(n, t) for n, t in zip(self._main.outputs, types, strict=True)]

    @property
    def source(self) -> str:
        """The generated program of the plan that was used last."""
        return self.latest.source

    @property
    def plan(self) -> Plan:
        """The plan that was used last."""
        return self.latest.plan

    @property
    def memory(self) -> Memory:
        """Bytes held."""
        executors = self._executors()
        return Memory(
            max((e.plan.constant_bytes for e in executors), default=0),
            sum(e.arena_bytes for e in executors),
            sum(e.plan_bytes for e in executors),
            len(executors),
        )

    def explain(self) -> str:
        """How the last plan will run: its steps, its memory, what was simplified away."""
        executor = self.latest
        return format_plan(executor.plan, executor.layout, executor.tasks)

    def trim(self) -> None:
        """Give back the arenas that no run holds."""
        for executor in self._executors():
            executor.trim()

    # Lifetime.

    def close(self) -> None:
        """Refuse further runs and give up plans and arenas; runs in flight finish."""
        with self._lock:
            self._closed = True
            for signature, _, _ in self._plans:
                signature.last = (None, None)
            self._plans.clear()
        self._signatures.clear()

    def forked(self) -> None:
        """In a forked child: nobody compiles, and nobody holds a lock."""
        self._lock = threading.Lock()
        self._signatures.forked()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Sessions are pickled as the path and the options they were made with."""
        if self.model.path is None:
            raise TypeError("only a session of a model loaded from a path can be pickled")
        return _restore, (self.model.path, self._options)

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"Session({self.model.entry!r}: ({ports[0]}) -> ({ports[1]}))"

    # Inside.

    @property
    def latest(self) -> Executor:
        """The executor that was used last; compiled now if all dims are known before a run."""
        executor = self._main.last[1]
        if executor is None:
            kinds = [v.type for v in self._main.graph.inputs]
            if not all(isinstance(kind, TensorType) and kind.static for kind in kinds):
                raise InvalidInput("no plan yet: run the session, or compile it with shapes=...")
            self._prepare({})
            executor = self._main.last[1]
            assert executor is not None
        return executor

    def _prepare(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compile the plan for the given shapes of inputs ahead of the first run."""
        signature = self._main
        for name in sorted(set(shapes) - set(signature.names)):
            self._signatures.value(name, "feed")
            raise InvalidInput(f"shapes= has {name!r}, which is no input of the model")
        values = []
        for name, kind in zip(signature.names, signature.types, strict=True):
            if not isinstance(kind, TensorType) or kind.dtype is None:
                raise InvalidInput(f"input {name!r}: shapes= needs a tensor, not {kind}")
            dims = shapes.get(name, kind.shape)
            shape = () if dims is None else tuple([d for d in dims if _is_dim(d)])
            if dims is None or len(shape) < len(dims):
                raise InvalidInput(f"input {name!r} of type {kind}: shapes= must say every dim")
            try:
                values.append(np.broadcast_to(np.zeros((), kind.dtype), shape))
            except ValueError as error:
                raise InvalidInput(f"input {name!r}: no array has shape {shape}") from error
        self._executor(signature, signature.key(values), values)

    def _executors(self) -> list[Executor]:
        with self._lock:
            return list(self._plans.values())

    def _executor(self, signature: Subgraph, key: Any, values: Sequence[Any]) -> Executor:
        """The executor of a plan that was not the last one used; compiled if it is new.

        Of threads that need the same new plan one compiles it; those that have theirs go on.
        """
        found = self._known(signature, key, False)
        if found is None:
            with signature.lock:
                found = self._known(signature, key, False)
                if found is None:
                    found = self._compiler.compile(signature.graph, values)
                    self._keep(signature, key, False, found)
        signature.last = (None, None) if self._closed else (key, found)
        return found

    def _observed(self, signature: Subgraph, key: Any, values: Sequence[Any]) -> Executor:
        """As ``_executor``, one that tells observers what it does."""
        found = self._known(signature, key, True)
        if found is None:
            plain = self._executor(signature, key, values)
            with signature.lock:
                found = self._known(signature, key, True)
                if found is None:
                    found = plain.observed()
                    self._keep(signature, key, True, found)
        return found

    def _known(self, signature: Subgraph, key: Any, observed: bool) -> Executor | None:
        with self._lock:
            found = self._plans.get((signature, key, observed))
            if found is not None:
                self._plans.move_to_end((signature, key, observed))
        return found

    def _keep(self, signature: Subgraph, key: Any, observed: bool, executor: Executor) -> None:
        """Add a plan, and drop those not used for longest, down to the limit on their bytes."""
        with self._lock:
            if self._closed:
                return
            for plan in [plan for plan in self._plans if plan[0].dropped]:
                del self._plans[plan]
            self._plans[signature, key, observed] = executor
            held = sum(map(_bytes, self._plans.values()))
            while held > self.limits.max_plans_bytes and len(self._plans) > 1:
                (old, _, _), dropped = self._plans.popitem(last=False)
                held -= _bytes(dropped)
                if old.last[1] is dropped:
                    old.last = (None, None)


def compile(
    model: Model | str | Path | Any,
    executor: str = "auto",
    backends: Sequence[str | Backend] | None = None,
    place: Mapping[str, str] | None = None,
    threads: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    limits: Limits | None = None,
    autotune: bool = False,
    precision: str = "float32",
    max_streams: int | None = None,
    devices: int | Sequence[str] | None = None,
) -> Session:
    """Compile a model, or the file at a path, into a session.

    ``executor``: how plans run. "linear": in a fixed order, as one generated function; "dataflow":
    step by step, as they become ready; "parallel": on several threads, where a simulated schedule
    says that this is no slower; "streams": on streams that are scheduled when the plan is compiled,
    and wait for each other's signals, where these pay, or on exactly ``max_streams`` as far as the
    model is as wide; "frames": by tokens, as TensorFlow does, every node as it is; "auto": "frames"
    where the model needs it, else "linear", or "parallel" where it clearly wins. For all but
    "frames", TensorFlow's loops and conditions become structured ones; what cannot is run by frames
    with "auto", and refused by the others. ``backends``: names, or backends of your own, those to
    be preferred first; where several can run a node, costs decide, measured before or else
    estimated, unless ``place`` does: it maps operations ("Conv"), or nodes ("node:add_3"), to names
    of backends. With ``autotune`` they are measured when a plan is compiled, and kept for later
    ones. ``threads``: how many cores one run may keep
    busy; all that the process has, if not given. ``shapes``: dims of inputs, to compile the plan
    for them now rather than at the first run. ``limits``: bounds on what the model may ask for.
    ``precision="bf16"`` lets oneDNN round operands of large products and convolutions to bfloat16,
    where the processor has it: faster, with two to three digits. ``devices``: how many virtual
    devices of this process there are, ``cpu:0`` and so on, or their names: the frames executor then
    runs each node where it says, each device by itself. Without, all nodes run on one, whatever
    device they name.

    Raises ``InvalidModel`` for a file or model that breaks the rules, ``Unsupported`` with all
    operations that there are no kernels for.
    """
    return Session(
        model,
        executor=executor,
        backends=backends,
        place=place,
        threads=threads,
        shapes=shapes,
        limits=limits,
        autotune=autotune,
        precision=precision,
        max_streams=max_streams,
        devices=devices,
    )


def _default() -> Sequence[str]:
    """oneDNN where there is one, and NumPy for all that it has no kernels for."""
    from penstock.backends.onednn.library import library

    return ("numpy",) if library() is None else ("onednn", "numpy")


def _backend(chosen: str | Backend, precision: str) -> Backend:
    if not isinstance(chosen, str):
        return chosen
    if chosen not in BACKENDS:
        raise ValueError(f"backend {chosen!r} is not one of {', '.join(BACKENDS)}")
    module, _, name = BACKENDS[chosen].rpartition(".")
    kind = getattr(import_module(module), name)
    made: Backend = kind(precision) if chosen in _WITH_PRECISION else kind()
    return made


def _told(trace: Observer | None, observers: Sequence[Observer]) -> Sequence[Observer]:
    found = tuple(observers) if trace is None else (trace, *observers)
    for each in found:
        if not isinstance(each, Observer):
            raise TypeError(
                f"a {type(each).__name__} does not observe: trace= takes a penstock.Trace, "
                "observers= a list of these and of other penstock.Observers"
            )
    return found


def _bytes(executor: Executor) -> int:
    """What dropping a plan gives back."""
    return executor.arena_bytes + executor.plan_bytes


def _restore(path: str, options: dict[str, Any]) -> Session:
    return compile(path, **options)


def _is_dim(dim: Any) -> TypeGuard[int]:
    return isinstance(dim, int | np.integer) and int(dim) >= 0
