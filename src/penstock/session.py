"""What users hold: a compiled model, with its plans by input shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from penstock import garbage
from penstock.backends.base import Backend
from penstock.backends.numpy import NumpyBackend
from penstock.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.executors.base import NEVER, CancelToken, Control, begin, end
from penstock.executors.linear import LinearExecutor
from penstock.explain import format_plan
from penstock.ir import Graph, Model, Value, clone
from penstock.limits import DEFAULT_LIMITS, Limits
from penstock.loading import load
from penstock.passes.pipeline import optimize
from penstock.passes.prune import cut, unfed
from penstock.plan import Plan, compile_plan
from penstock.threads import pool
from penstock.types import (
    STRING,
    AnyType,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_name,
)

EXECUTORS = ("auto", "linear")
BACKENDS = ("numpy",)

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
    """Bytes that a session holds: constants shared by its plans, arenas, and plans by count."""

    constants: int
    arenas: int
    plans: int


class Signature:
    """The part of a model that one set of feeds and fetches needs, and its plans by shapes."""

    def __init__(self, graph: Graph, outputs: Sequence[str], session: Session) -> None:
        self.graph = graph
        self.session = session
        self.names = tuple(value.name for value in graph.inputs)
        self.types = tuple(value.type for value in graph.inputs)
        self.dtypes = tuple(
            kind.dtype if isinstance(kind, TensorType) else None for kind in self.types
        )
        self.outputs = tuple(outputs)
        self.plans: OrderedDict[tuple[Any, ...], LinearExecutor] = OrderedDict()
        self.lock = threading.Lock()
        # The executor of the last run: most sessions see the same shapes again and again.
        self.last: tuple[tuple[Any, ...], LinearExecutor | None] = ((), None)

    def executor(self, values: Sequence[Any]) -> LinearExecutor:
        """The executor for the shapes of ``values``, compiled if they are new."""
        key = tuple([x.shape if x.__class__ is _ndarray else _key(x) for x in values])
        last, found = self.last
        if found is not None and key == last:
            return found
        with self.lock:
            found = self.plans.get(key)
            if found is None:
                found = self.session._compile(self.graph, values)
                self.plans[key] = found
                self.session._evict(self)
            self.plans.move_to_end(key)
            self.last = (key, found)
        return found

    def values(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The fed values in order, checked and converted."""
        values = []
        for name, kind, dtype in zip(self.names, self.types, self.dtypes, strict=True):
            try:
                value = feeds[name]
            except KeyError:
                raise self.session._unknown_feeds(feeds, self.names) from None
            if value.__class__ is not _ndarray or value.dtype != dtype:
                value = convert(name, value, kind)
            values.append(value)
        if len(values) != len(feeds):
            raise self.session._unknown_feeds(feeds, self.names)
        return values


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
        backends: Sequence[str] | None = None,
        threads: int | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        if executor not in EXECUTORS:
            raise ValueError(f"executor {executor!r} is not one of {', '.join(EXECUTORS)}")
        if threads is not None:
            raise ValueError(
                "threads= needs a backend with threads of its own, and there is none yet; NumPy's "
                "matrix products take theirs from OMP_NUM_THREADS when Python starts"
            )
        names = tuple(backends or BACKENDS)
        for name in names:
            if name not in BACKENDS:
                raise ValueError(f"backend {name!r} is not one of {', '.join(BACKENDS)}")
        self._options = {
            "executor": executor,
            "backends": backends,
            "threads": threads,
            "shapes": shapes,
            "limits": limits,
        }
        self.limits = limits or DEFAULT_LIMITS
        self.model = model if isinstance(model, Model) else load(model, limits=self.limits)
        self._backends: list[Backend] = [NumpyBackend() for _ in names]
        self._closed = False
        self._lock = threading.Lock()
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        graph = self.model.graph
        self._values = _values_by_name(graph)
        self._main = self._signature(
            [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        )
        if shapes is not None:
            self._prepare(shapes)

    # Running.

    def run(
        self,
        feeds: Mapping[str, Any] | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
    ) -> dict[str, Any]:
        """Run the model and return what was fetched, by name.

        ``feeds`` maps names to arrays (anything with ``__array__`` or ``__dlpack__``, lists and
        numbers) of the input's dtype and shape. Any value of the model may be fed or fetched by
        name; only what the fetches need is run. ``targets`` are values to compute without fetching
        them. After ``timeout`` seconds the run ends with ``DeadlineExceeded``, after
        ``cancel.cancel()`` with ``Cancelled``.

        Raises ``InvalidInput`` for wrong names, dtypes and shapes, ``RunError`` for what goes wrong
        on the way.
        """
        if feeds is None:
            feeds = {}
        signature = self._main
        if fetches is not None or targets is not None or len(feeds) != len(signature.names):
            signature = self._signature_for(feeds, fetches, targets)
        elif self._closed:
            raise PenstockError("the session is closed")
        try:
            values = signature.values(feeds)
        except _OtherSignature:
            signature = self._signature_for(feeds, fetches, targets)
            values = signature.values(feeds)
        executor = signature.executor(values)
        if timeout is None and cancel is None:
            outputs = executor.run(values, NEVER)
        else:
            outputs = self._controlled(executor, values, timeout, cancel)
        return dict(zip(signature.outputs, outputs, strict=False))

    def __call__(self, *inputs: Any) -> Any:
        """Run with inputs by position: the array of one output, a tuple of several."""
        signature = self._main
        if len(inputs) != len(signature.names):
            wanted = ", ".join(map(str, self.inputs))
            raise InvalidInput(f"{len(inputs)} inputs given, the model takes ({wanted})")
        outputs = tuple(self.run(dict(zip(signature.names, inputs, strict=True))).values())
        return outputs[0] if len(outputs) == 1 else outputs

    def submit(
        self, feeds: Mapping[str, Any] | None = None, *arguments: Any, **options: Any
    ) -> Future[dict[str, Any]]:
        """``run`` on a thread of the process-wide pool."""
        return pool().submit(self.run, feeds, *arguments, **options)

    async def arun(
        self, feeds: Mapping[str, Any] | None = None, *arguments: Any, **options: Any
    ) -> dict[str, Any]:
        """``run`` for asyncio: the event loop goes on meanwhile; cancelling it cancels the run."""
        import asyncio

        token = options.setdefault("cancel", CancelToken())
        future = self.submit(feeds, *arguments, **options)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if token is not None:
                token.cancel()
            raise

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
        executors = [e for s in list(self._signatures.values()) for e in list(s.plans.values())]
        constants = max((e.plan.constant_bytes for e in executors), default=0)
        return Memory(constants, sum(e.nbytes for e in executors), len(executors))

    def explain(self) -> str:
        """How the last plan will run: its steps, its memory, what was simplified away."""
        executor = self.latest
        return format_plan(executor.plan, executor.layout)

    def trim(self) -> None:
        """Give back the arenas that no run holds."""
        for signature in list(self._signatures.values()):
            for executor in list(signature.plans.values()):
                executor.trim()

    # Lifetime.

    def close(self) -> None:
        """Refuse further runs and give up plans and arenas; runs in flight finish."""
        with self._lock:
            self._closed = True
            self._signatures.clear()

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

    def _controlled(
        self,
        executor: LinearExecutor,
        values: Sequence[Any],
        timeout: float | None,
        cancel: CancelToken | None,
    ) -> tuple[Any, ...]:
        control: Control = begin(timeout, cancel)
        try:
            if control.stopped:
                control.stop()
            outputs = executor.run(values, control)
            # A run that ends late has not met its deadline, however few checks it passed.
            if control.stopped:
                control.stop()
            return outputs
        finally:
            end(control, timeout, cancel)

    @property
    def latest(self) -> LinearExecutor:
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
        unknown = set(shapes) - set(self._main.names)
        if unknown:
            raise self._unknown_feeds(dict.fromkeys(shapes), self._main.names)
        values = []
        for name, kind in zip(self._main.names, self._main.types, strict=True):
            if not isinstance(kind, TensorType) or kind.dtype is None:
                raise InvalidInput(f"input {name!r}: shapes= needs a tensor, not {kind}")
            shape = tuple(shapes.get(name, kind.shape or ()))
            if not all(isinstance(dim, int) for dim in shape):
                raise InvalidInput(f"input {name!r} of type {kind}: shapes= must say every dim")
            values.append(np.broadcast_to(np.zeros((), kind.dtype), shape))  # type: ignore[arg-type]
        self._main.executor(values)

    def _compile(self, graph: Graph, values: Sequence[Any]) -> LinearExecutor:
        """The executor of ``graph`` for values of these shapes."""
        check_dims(graph.inputs, values)
        with garbage.paused():
            copy = clone(graph)
            for value, given in zip(copy.inputs, values, strict=True):
                value.type = _concrete(value.type, given)
            optimize(copy, self.limits)
            plan = compile_plan(copy, self._backends)
            executor = LinearExecutor(plan, self._backends[0], self.limits)
        most = self.limits.max_bytes
        if most is not None and executor.arena_bytes > most:
            raise LimitExceeded(
                f"the plan needs an arena of {executor.arena_bytes} bytes, above the limit of "
                f"{most} (Limits.max_bytes)"
            )
        return executor

    def _evict(self, signature: Signature) -> None:
        """Drop the plans that were not used for longest, down to the limit on their bytes."""
        held = sum(executor.nbytes for executor in signature.plans.values())
        while held > self.limits.max_plans_bytes and len(signature.plans) > 1:
            _, dropped = signature.plans.popitem(last=False)
            held -= dropped.nbytes

    def _signature(
        self, feeds: Sequence[str], fetches: Sequence[str], targets: Sequence[str] = ()
    ) -> Signature:
        key = (frozenset(feeds), tuple(fetches), tuple(targets))
        found = self._signatures.get(key)
        if found is None:
            with self._lock, garbage.paused():
                graph = cut(
                    self.model.graph,
                    [self._value(name, "feed") for name in feeds],
                    [self._value(name, "fetch") for name in (*fetches, *targets)],
                )
                missing = unfed(graph)
                if missing:
                    names = ", ".join(f"{v.name!r} ({v.type})" for v in missing)
                    raise InvalidInput(f"the fetches need inputs that were not fed: {names}")
                optimize(graph, self.limits)
                found = self._signatures[key] = Signature(graph, fetches, self)
        return found

    def _signature_for(
        self,
        feeds: Mapping[str, Any],
        fetches: Sequence[str] | None,
        targets: Sequence[str] | None,
    ) -> Signature:
        if self._closed:
            raise PenstockError("the session is closed")
        if isinstance(fetches, str):
            raise InvalidInput(f"fetches must be a list of names; did you mean [{fetches!r}]?")
        names = list(fetches) if fetches is not None else [v.name for v in self.model.graph.outputs]
        return self._signature(list(feeds), names, targets or ())

    def _value(self, name: str, role: str) -> Value:
        found = self._values.get(name)
        if found is None:
            raise InvalidInput(f"cannot {role} {name!r}: {_suggest(name, self._values)}")
        return found

    def _unknown_feeds(self, feeds: Mapping[str, Any], names: Sequence[str]) -> Exception:
        """What is wrong with the names of ``feeds``; another signature if they are all known."""
        for name in feeds:
            if name not in self._values:
                raise InvalidInput(f"cannot feed {name!r}: {_suggest(name, self._values)}")
        return _OtherSignature()


class _OtherSignature(Exception):  # noqa: N818
    """The feeds are not the model's inputs but other values of it."""


def compile(
    model: Model | str | Path | Any,
    executor: str = "auto",
    backends: Sequence[str] | None = None,
    threads: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    limits: Limits | None = None,
) -> Session:
    """Compile a model, or the file at a path, into a session.

    ``executor``: how plans run ("auto" chooses). ``shapes``: dims of inputs, to compile the plan
    for them now rather than at the first run. ``limits``: bounds on what the model may ask for.

    Raises ``InvalidModel`` for a file or model that breaks the rules, ``Unsupported`` with all
    operations that there are no kernels for.
    """
    return Session(
        model,
        executor=executor,
        backends=backends,
        threads=threads,
        shapes=shapes,
        limits=limits,
    )


def _restore(path: str, options: dict[str, Any]) -> Session:
    return compile(path, **options)


def _values_by_name(graph: Graph) -> dict[str, Value]:
    """Every value of the outermost graph that can be fed or fetched."""
    found = {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                found.setdefault(value.name, value)
    for value in graph.outputs:
        found.setdefault(value.name, value)
    return found


def _suggest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=3, cutoff=0.6)
    if close:
        return "the model has no such value; did you mean " + " or ".join(map(repr, close)) + "?"
    shown = list(names)[:8]
    return f"the model has no such value; it has {', '.join(map(repr, shown))}" + (
        ", ..." if len(shown) == 8 else ""
    )


def convert(name: str, value: Any, kind: Type) -> Any:
    """``value`` as input ``name`` of type ``kind``; raises ``InvalidInput`` if it cannot be."""
    if isinstance(kind, AnyType):
        return value
    if isinstance(kind, OptionalType):
        return None if value is None else convert(name, value, kind.element)
    if isinstance(kind, SequenceType):
        if not isinstance(value, list | tuple):
            raise InvalidInput(f"input {name!r} is a sequence, give a list, not {_what(value)}")
        return [convert(f"{name}[{i}]", x, kind.element) for i, x in enumerate(value)]
    if isinstance(kind, MapType):
        if not isinstance(value, dict):
            raise InvalidInput(f"input {name!r} is a map, give a dict, not {_what(value)}")
        return value
    own_dtype = getattr(value, "dtype", None)
    try:
        if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
            array = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            array = np.from_dlpack(value)
        elif kind.dtype is not None and own_dtype is None:
            # Lists and numbers have no dtype of their own, and take the input's.
            array = _from_python(value, kind.dtype)
        else:
            array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, BufferError) as error:
        raise InvalidInput(
            f"input {name!r} of type {kind} cannot be made of {_what(value)}: {error}"
        ) from error
    if kind.dtype == STRING and array.dtype.kind in "UST":
        array = array.astype(object)
    if kind.dtype is not None and array.dtype != kind.dtype:
        raise InvalidInput(
            f"input {name!r} must be {dtype_name(kind.dtype)}, not {dtype_name(array.dtype)}; "
            f"convert it with .astype({dtype_name(kind.dtype)!r})"
        )
    return array


def _from_python(value: Any, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(value)
    if dtype == STRING:
        return array.astype(object)
    # A number may become a wider kind, never a narrower one: 1.5 is no integer.
    ranks = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if array.size and ranks.get(array.dtype.kind, 0) > ranks.get(dtype.kind, 2):
        raise TypeError(f"{array.dtype} does not fit {dtype}")
    return np.asarray(value, dtype)


def _what(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {dtype_name(value.dtype)} and shape {value.shape}"
    return f"a {type(value).__name__}"


def check_dims(inputs: Sequence[Value], values: Sequence[Any]) -> None:
    """Ranks and dims fit the declared ones, and dims of one name are equal."""
    bound: dict[str, tuple[int, str]] = {}
    for declared, value in zip(inputs, values, strict=True):
        kind = declared.type
        if not isinstance(kind, TensorType) or kind.shape is None:
            continue
        if len(kind.shape) != value.ndim:
            raise InvalidInput(
                f"input {declared.name!r} has rank {len(kind.shape)} ({kind}), "
                f"an array of shape {value.shape} was given"
            )
        for axis, (dim, given) in enumerate(zip(kind.shape, value.shape, strict=True)):
            if isinstance(dim, int) and dim != given:
                raise InvalidInput(
                    f"input {declared.name!r} must have {dim} at axis {axis} ({kind}), "
                    f"an array of shape {value.shape} was given"
                )
            if isinstance(dim, str):
                first, where = bound.setdefault(dim, (given, f"{declared.name!r} axis {axis}"))
                if first != given:
                    raise InvalidInput(
                        f"input {declared.name!r}: dim {dim!r} at axis {axis} is {given}, "
                        f"but {first} at {where}"
                    )


def _key(value: Any) -> Any:
    """What of a value that is no tensor a plan depends on: nothing."""
    return value.shape if isinstance(value, np.ndarray) else None


def _concrete(kind: Type, value: Any) -> Type:
    if isinstance(value, np.ndarray) and not isinstance(kind, OptionalType):
        return TensorType(value.dtype, value.shape)
    return kind
