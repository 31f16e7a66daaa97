"""One run that can be stopped or watched from outside, on the caller's thread or on a pool's; and
outputs that it writes into arrays of the caller's (``run(feeds, out={...})``)."""

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
from penstock.core.types import RunValue, RunValues, TensorType, Type, dtype_name
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
    """Chooses runs of a session, to observe them or to record what they are fed."""

    @property
    def due(self) -> Callable[[], bool]:
        """Counts a run, and says whether it is to ask ``take``."""
        ...

    def take(self, options: RunOptions) -> Observer | None:
        """Count a run with these options, unless ``due`` has, and return what observes it."""
        ...


class Answers(Protocol):
    """Names the outputs of a run."""

    def named(self, outputs: RunValues) -> dict[str, RunValue]: ...


PreparedRun = tuple[Executor, RunValues, Answers]
"""Inputs of a run: an executor, the values fed, and the names of its outputs."""

_NO_SPAN: AbstractContextManager[None] = nullcontext()


class Run:
    """A run with a deadline, a token that cancels it, and observers.

    The deadline counts from the construction, and holds for compiling, too. A run with observers
    (``observed``) needs an executor that tells them of its steps. A ``control`` that is given has
    the deadline, the token and the priority, instead of the options; ``priority`` is that of runs
    whose options have none. ``sampled`` says itself whether it observes the run.
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
        # The observers that the process has for any run come first.
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
            # A plan that is compiled for this run must not outlast its deadline.
            with self.current(), cancelled_by(self.control):
                return prepare(self.observed)
        except BaseException as error:
            self.end(error)
            raise

    def current(self) -> AbstractContextManager[None]:
        """Make spans of OpenTelemetry that begin on this thread children of the run's span."""
        return _NO_SPAN if self._span is None else self._span.current()

    def begin(self, executor: Executor) -> None:
        """Tell observers that the run begins; raise what it was already stopped with, if so."""
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
        """Tell observers that the run has ended; from now on nothing can stop it."""
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
            # A run that ends late has not met its deadline, however few checks it passed.
            if self.control.late() is not None:
                self.control.stop()
            return outputs
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.end(error)
            del error  # it holds this frame


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
    """A run on a pool; ``future`` gets its outputs by name.

    ``prepare(observed)`` is called on the pool, since it may have to compile. A run that is stopped
    while it is queued ends at once; the entry left in the queue does nothing and refers to nothing,
    since a busy pool may reach it late.
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
        # Kept here: a run that was stopped before it is queued has been forgotten by then.
        self.priority = run.control.priority
        """by which the pool calls it"""
        run.control.add_listener(self.refuse)

    def __call__(self) -> None:
        """Run; for the pool."""
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
                # Others do not look at what the run has to come behind.
                if turn is None or executor.hands_over:
                    begin()
                else:
                    turn.begin_alone(begin)
        except BaseException as error:
            self._done(None, error)
        finally:
            del self  # an error holds this frame

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
        # A run that ends late has not met its deadline.
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
            del future, error  # an error holds this frame


def _once(done: Done) -> Done:
    """Calls ``done`` and forgets it: frames that an error holds must not lead back to the future
    that has the error."""
    pending = [done]

    def call(outputs: tuple[RunValue, ...] | None, error: BaseException | None) -> None:
        try:
            pending.pop()(outputs, error)
        finally:
            del error, outputs

    return call


_ALIGNED = 16
"""bytes; what ``np.empty`` gives everywhere, so that kernels may count on it"""


class GivenPlan(NamedTuple):
    """The form of the plan ``base`` that writes into given arrays, those of ``expected``, which it
    takes after the values fed. Plans may be dropped at any time."""

    base: ref[Executor]
    expected: ExpectedFeeds
    executor: ref[Executor]

    def of(self, last: Executor) -> Executor | None:
        """That form of ``last``, the plan used last; None if there is none."""
        return self.executor() if self.base() is last else None


class GivenOutputs:
    """The request of a run whose outputs go into given arrays.

    ``direct`` are the numbers of the outputs for which the program of ``executor`` is to be given
    the ``arrays``; into the others, values are copied once the run has ended (``named``): where
    the executor is not linear, or an array is strided or overlaps a feed. Raises ``InvalidInput``
    for a name that is not fetched, and for an array of another dtype or other dims than its value
    has, as far as these are known before the run.
    """

    def __init__(
        self, request: Request, out: Mapping[str, np.ndarray], executor: Executor, values: RunValues
    ) -> None:
        self._request = request
        self._out = dict(out)
        names, table = request.subgraph.outputs, executor.table
        for name, array in out.items():
            if name not in request.names:
                hint = suggest(name, request.names).replace("the model has", "the run fetches", 1)
                raise InvalidInput(f"out= has {name!r}: {hint}")
            if not array.flags.writeable:
                raise InvalidInput(f"out= has a read-only array for {name!r}; give a copy of it")
            _check(name, array, table.slots[table.outputs[names.index(name)]].type)
        numbers = [i for i, name in enumerate(names) if name in out]
        self.direct: tuple[int, ...] = ()
        # Other executors have their outputs in arrays that several tasks know.
        if isinstance(executor, LinearExecutor) and executor.takes_outputs:
            self.direct = tuple(
                [
                    i
                    for i in numbers
                    if _is_known(table.slots[table.outputs[i]].type)
                    and self._can_be_written(out[names[i]], names[i], values)
                ]
            )
        self.arrays = [out[names[i]] for i in self.direct]

    def plan(self, base: LinearExecutor, executor: Executor) -> GivenPlan | None:
        """``executor`` as the plan for arrays of the same names and types, if it takes all that
        are given; ``base`` is the plan that it is a form of."""
        if len(self.direct) < len(self._out):
            return None
        names = [self._request.subgraph.outputs[i] for i in self.direct]
        arrays = zip(names, self.arrays, strict=True)
        expected = tuple([(name, array.dtype, array.shape) for name, array in arrays])
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
        """The outputs of a run by name, of those given the caller's arrays."""
        by_name = self._request.named(outputs)
        for name, array in self._out.items():
            value = by_name[name]
            # Written straight into the array, or copied now.
            if value is not array:
                if not isinstance(value, np.ndarray):
                    raise InvalidInput(f"out= has {name!r}, which is no tensor")
                _check(name, array, TensorType(value.dtype, value.shape))
                np.copyto(array, value)
                by_name[name] = array
        return by_name


def _is_known(type_: Type) -> bool:
    return isinstance(type_, TensorType) and type_.dtype is not None and type_.static


def _check(name: str, array: np.ndarray, type_: Type) -> None:
    """Raise ``InvalidInput`` for an array that no value of this type fits."""
    if not isinstance(type_, TensorType):
        return
    dims = type_.shape
    fits = type_.dtype is None or array.dtype == type_.dtype
    fits &= dims is None or (
        len(dims) == array.ndim
        and all(not isinstance(d, int) or d == n for d, n in zip(dims, array.shape, strict=True))
    )
    if not fits:
        found = f"{dtype_name(array.dtype)}{list(array.shape)}"
        raise InvalidInput(f"out= has an array {found} for {name!r}, which is {type_}")
