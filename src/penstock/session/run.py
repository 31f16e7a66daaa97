"""One run, which can be stopped or observed from outside, on the caller's thread or in a pool; and
outputs that a run writes into arrays of the caller (``run(feeds, out={...})``)."""

# tests: tests/session/test_run.py tests/session/test_given_outputs.py

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol
from weakref import ref

import numpy as np

from penstock.compiler.options import RunOptions
from penstock.compiler.subgraph import ExpectedFeeds
from penstock.compiler.subgraphs import Request
from penstock.core.checkpoints import cancelled_by
from penstock.core.errors import InvalidInput, suggest
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue, RunValues, TensorType, Type, dtype_name, is_static
from penstock.executors.base import Done, Executor
from penstock.executors.control import Control, begin_run, end_run
from penstock.executors.linear import LinearExecutor
from penstock.executors.turn import Turn
from penstock.host.spans import Attributes, span
from penstock.ir.layout import address
from penstock.observers.base import ObservedRun, Observer, Observers
from penstock.session.environment import trace

if TYPE_CHECKING:
    from concurrent.futures import Future


class RunChooser(Protocol):
    """Chooses runs of a session, to observe them or to record their feeds."""

    @property
    def due(self) -> Callable[[], bool]:
        """Return a function that counts a run and says whether the run must call ``take``."""
        ...

    def take(self, options: RunOptions) -> Observer | None:
        """Count a run with these options, unless ``due`` has, and return its observer, if any."""
        ...


class Answers(Protocol):
    """Names the outputs of a run."""

    def named(self, outputs: RunValues) -> dict[str, RunValue]: ...


PreparedRun = tuple[Executor, RunValues, Answers]
"""the inputs of a run: an executor, the fed values, and an object that names its outputs"""

_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Run:
    """A run with a deadline, a token that cancels it, and observers.

    The deadline counts from the construction and covers compiling, too. A run with observers
    (``observed``) needs an executor that reports its steps to them. A given ``control`` replaces
    the deadline, token and priority of the options; ``priority`` is that of runs whose options
    have none. ``sampled`` decides itself whether it observes the run.
    """

    def __init__(
        self,
        options: RunOptions,
        control: Control | None = None,
        priority: int = 0,
        sampled: RunChooser | None = None,
    ) -> None:
        self._began = False
        self._span = span("penstock.run", {})
        # Observers that the process adds to every run come first.
        everything, some = trace(), None if sampled is None else sampled.take(options)
        given = [of for of in (everything, some) if of is not None]
        observers = (*given, *options.all_observers)
        self.observed = bool(observers)
        if control is None:
            control = begin_run(options.timeout, options.cancel)
            control.priority = priority if options.priority is None else options.priority
        self.control = control
        if observers:
            self.control.observer = Observers(observers)

    def prepare(self, prepare: Callable[[bool], PreparedRun]) -> PreparedRun:
        """Return ``prepare(observed)``, which may compile; stop compiling if the run is stopped."""
        try:
            # A plan that is compiled for this run must stop at the run's deadline.
            with self.current(), cancelled_by(self.control):
                return prepare(self.observed)
        except BaseException as error:
            self.end(error)
            raise

    def current(self) -> AbstractContextManager[None]:
        """Make spans of OpenTelemetry that begin on this thread children of the run's span."""
        return _NO_SPAN if self._span is None else self._span.current()

    def begin(self, executor: Executor) -> None:
        """Report to observers that the run begins. Raise its error if it was already stopped."""
        control = self.control
        if self._span is not None:
            self._span.add(_attributes(executor, control))
            self._span.event("begin")
        if control.stopped:
            control.stop()
        if self.observed:
            control.run = ObservedRun(executor.table, executor.name, executor.threads)
            self._began = True
            control.observer.run_begin(control.run)

    def end(self, error: BaseException | None) -> None:
        """Report to observers that the run has ended; from now on nothing can stop it."""
        end_run(self.control)
        if self._span is not None:
            self._span.end(error)
        if self._began:
            self.control.observer.run_end(self.control.run, error)

    def run_inline(self, executor: Executor, values: RunValues) -> tuple[RunValue, ...]:
        """Run on the calling thread, to the end."""
        error: BaseException | None = None
        try:
            self.begin(executor)
            with self.current():
                outputs = executor.run(values, self.control)
            # A run that ends late has missed its deadline, however few checks it passed.
            if self.control.late() is not None:
                self.control.stop()
            return outputs
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.end(error)
            del error  # the error refers to this frame, so this would be a reference cycle


def _attributes(executor: Executor, control: Control) -> Attributes:
    """Return the attributes of a run's span."""
    table = executor.table
    return {
        "penstock.graph": table.name,
        "penstock.executor": executor.name,
        "penstock.inputs": [f"{table.slots[i].name}: {table.slots[i].type}" for i in table.inputs],
        "penstock.priority": control.priority,
    }


class Job:
    """A run in a pool. ``future`` receives its outputs by name.

    ``prepare(observed)`` is called in the pool, since it may have to compile. A run that is stopped
    while it is queued ends at once. Its entry in the queue then does nothing and holds no
    references, since a busy pool may reach it late.
    """

    def __init__(
        self, run: Run, prepare: Callable[[bool], PreparedRun], future: Future[dict[str, RunValue]]
    ) -> None:
        self.turn: Turn | None = None  # on a user stream
        self._future = future
        self._run = run
        self._prepare = prepare
        self._claim = threading.Lock()  # held by the thread that began, or ended, the run
        self._request: Answers | None = None
        # Kept here, since a run that is stopped before it is queued is forgotten by then.
        self.priority = run.control.priority
        """the function that the pool calls"""
        run.control.add_listener(self.refuse)

    def __call__(self) -> None:
        """Run; called by the pool."""
        if not self._claim.acquire(blocking=False):
            return
        self._run.control.remove_listener(self.refuse)
        if not self._future.set_running_or_notify_cancel():
            self._run.end(None)
            return
        try:
            executor, values, self._request = self._run.prepare(self._prepare)
            self._run.begin(executor)
            control, turn, done = self._run.control, self.turn, _once(self._done)
            if turn is not None:
                control.turn, done = turn, partial(turn.ending, done)
            begin = partial(executor.run_async, values, control, done)
            with self._run.current():
                # Other executors do not observe the order of runs on a stream.
                if turn is None or executor.hands_over:
                    begin()
                else:
                    turn.begin_alone(begin)
        except BaseException as error:
            self._done(None, error)
        finally:
            del self  # an error refers to this frame

    def refuse(self, error: Exception) -> None:
        """End a run that has not begun, since it was stopped or no pool will ever call it."""
        if self._claim.acquire(blocking=False):
            run, future = self._run, self._future
            del self._run, self._future, self._prepare
            run.control.remove_listener(self.refuse)
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            run.end(error)

    def _done(self, outputs: tuple[RunValue, ...] | None, error: BaseException | None) -> None:
        control, future = self._run.control, self._future
        # A run that ends late has missed its deadline.
        error = error or control.late()
        try:
            self._run.end(error)
        except BaseException as raised:  # raised by an observer
            error = error or raised
        try:
            if error is not None:
                future.set_exception(error)
            else:
                assert outputs is not None and self._request is not None
                future.set_result(self._request.named(outputs))
        finally:
            del future, error  # an error refers to this frame


def _once(done: Done) -> Done:
    """Return a function that calls ``done`` and then drops it: the frames of an error must not
    refer to the future that holds the error."""
    pending = [done]

    def call(outputs: tuple[RunValue, ...] | None, error: BaseException | None) -> None:
        try:
            pending.pop()(outputs, error)
        finally:
            del error, outputs

    return call


_ALIGNED = 16
"""bytes; ``np.empty`` guarantees this alignment everywhere, so kernels may rely on it"""


class GivenPlan(NamedTuple):
    """The variant of the plan ``base`` that writes into given arrays of the types ``expected``,
    which it takes after the fed values. Plans may be dropped at any time."""

    base: ref[Executor]
    expected: ExpectedFeeds
    executor: ref[Executor]

    def of(self, last: Executor) -> Executor | None:
        """Return that variant of ``last``, the plan used last, or None if it has none."""
        return self.executor() if self.base() is last else None


class GivenOutputs:
    """The request of a run whose outputs are written into given arrays.

    ``direct`` has the indices of the outputs that the program of ``executor`` writes into the
    ``arrays`` itself. Other values are copied into theirs once the run has ended (``named``): if
    the executor is not linear, or an array is strided or overlaps a feed. Raises ``InvalidInput``
    for a name that is not fetched, and for an array whose dtype or dims differ from its value's,
    as far as these are known before the run.
    """

    def __init__(
        self, request: Request, out: Mapping[str, np.ndarray], executor: Executor, values: RunValues
    ) -> None:
        self._request = request
        self._out = dict(out)
        given, table = {own: name for name, own in request.others.items()}, executor.table
        names = [given.get(name, name) for name in request.subgraph.outputs]
        for name, array in out.items():
            if name not in request.names:
                hint = suggest(name, request.names).replace("the model has", "the run fetches", 1)
                raise InvalidInput(f"out= has {name!r}: {hint}")
            if not array.flags.writeable:
                raise InvalidInput(f"out= has a read-only array for {name!r}; give a copy of it")
            _check(name, array, table.slots[table.outputs[names.index(name)]].type)
        numbers = [i for i, name in enumerate(names) if name in out]
        self.direct: tuple[int, ...] = ()
        # In other executors, several tasks refer to the arrays of outputs.
        if isinstance(executor, LinearExecutor) and executor.takes_outputs:
            self.direct = tuple(
                [
                    i
                    for i in numbers
                    if is_static(table.slots[table.outputs[i]].type)
                    and self._can_be_written(out[names[i]], names[i], values)
                ]
            )
        self.arrays = [out[names[i]] for i in self.direct]

    def plan(self, base: LinearExecutor, executor: Executor) -> GivenPlan | None:
        """Return ``executor`` as the plan for arrays of the same names and types if it takes all
        given arrays, else None; ``base`` is the plan of which it is a variant."""
        if len(self.direct) < len(self._out):
            return None
        names = [self._request.subgraph.outputs[i] for i in self.direct]
        arrays = zip(names, self.arrays, strict=True)
        expected = tuple([(name, name, array.dtype, array.shape, False) for name, array in arrays])
        return GivenPlan(ref(base), expected, ref(executor))

    def _can_be_written(self, array: np.ndarray, name: str, values: RunValues) -> bool:
        """Whether kernels can write into an array while they read the feeds and other outputs."""
        others = [*values, *(x for other, x in self._out.items() if other != name)]
        arrays = [x for x in others if isinstance(x, np.ndarray)]
        return (
            array.flags.c_contiguous
            and address(array) % _ALIGNED == 0
            and not any(np.may_share_memory(array, other) for other in arrays)
        )

    def named(self, outputs: RunValues) -> dict[str, RunValue]:
        """Return the outputs of a run by name; given arrays stand for their outputs."""
        by_name = self._request.named(outputs)
        for name, array in self._out.items():
            value = by_name[name]
            # The program has written into the array, or the value is copied now.
            if value is not array:
                if not isinstance(value, np.ndarray):
                    raise InvalidInput(f"out= has {name!r}, which is not a tensor")
                _check(name, array, TensorType(value.dtype, value.shape))
                np.copyto(array, value)
                by_name[name] = array
        return by_name


def _check(name: str, array: np.ndarray, type_: Type) -> None:
    """Raise ``InvalidInput`` for an array that cannot hold a value of this type."""
    if not isinstance(type_, TensorType):
        return
    dims = type_.shape
    fits = type_.dtype is None or array.dtype == type_.dtype
    fits &= dims is None or (
        len(dims) == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(dims, array.shape, strict=True))
    )
    if not fits:
        actual = f"{dtype_name(array.dtype)}{list(array.shape)}"
        raise InvalidInput(f"out= has an array {actual} for {name!r}, which is {type_}")
