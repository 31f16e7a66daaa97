"""What executors share: the protocol, and the control over a run from outside."""

from __future__ import annotations

import contextvars
import heapq
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np

from penstock.backends.base import Backend, ThreadShare
from penstock.codegen.writer import Program
from penstock.errors import Cancelled, DeadlineExceeded, InternalError, PenstockError, RunError
from penstock.executors.arenas import Arenas, Code
from penstock.host.fork import in_child
from penstock.host.threads import report
from penstock.observers.base import ObservedRun, Observer
from penstock.ops.work_estimate import flops
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, Step
from penstock.plan.tasks import Tasks
from penstock.types import ShapeError, TensorType

T = TypeVar("T")

_NOBODY = Observer()
_NO_RUN = ObservedRun(Plan("", (), (), (), ()), "")


class Control:
    """The one thing a run looks at to learn that it must stop; set from any thread.

    Generated code reads ``stopped`` at every loop back-edge and every few milliseconds of estimated
    work, and calls ``stop`` when it is set. ``observer`` is told what ``run`` does, if the executor
    is an observed one.
    """

    __slots__ = ("error", "listeners", "observer", "on_stop", "run", "stopped")

    def __init__(self) -> None:
        self.stopped = False
        self.error: Exception | None = None
        self.on_stop: Callable[[Exception], None] | None = None
        self.listeners: set[Callable[[Exception], None]] = set()
        self.observer: Observer = _NOBODY
        self.run = _NO_RUN

    def set(self, error: Exception) -> None:
        """Ask the run to stop with ``error``; the first to ask wins."""
        if not self.stopped:
            self.error = error
            self.stopped = True
            on_stop = self.on_stop
            with ExitStack() as stack:  # all are told, whatever one of them raises
                for listener in list(self.listeners):
                    stack.callback(listener, error)
                if on_stop is not None:
                    stack.callback(on_stop, error)

    def listen(self, listener: Callable[[Exception], None]) -> None:
        """Let ``set`` call ``listener`` with the error, perhaps twice; now, if it was called."""
        self.listeners.add(listener)
        if self.stopped and self.error is not None:
            listener(self.error)

    def ignore(self, listener: Callable[[Exception], None]) -> None:
        """Call it no more, but for calls that have begun."""
        self.listeners.discard(listener)

    def stop(self) -> None:
        """Raise what the run was stopped with."""
        assert self.error is not None
        raise self.error

    def own(self) -> Control:
        """This control, or for a run that nobody can stop, one that the run itself can."""
        return Control() if self is NEVER else self


NEVER = Control()
"""For runs that nobody can stop."""


class CancelToken:
    """Cancels the runs it was given to, from any thread: ``session.run(feeds, cancel=token)``.

    A token with a ``parent`` is cancelled with it, but not the parent with the token.
    """

    def __init__(self, parent: CancelToken | None = None) -> None:
        self._parent = parent
        # A handler of signals may cancel a run that has just begun, or ended, on its own thread.
        self._lock = threading.RLock()
        self._controls: set[Control] = set()
        self._cancelled = False

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called, for this token or its parent."""
        return self._cancelled or (self._parent is not None and self._parent.cancelled)

    def cancel(self) -> None:
        """Stop every run that holds this token, now and later, with ``Cancelled``."""
        with self._lock:
            self._cancelled = True
            controls, self._controls = self._controls, set()
        with ExitStack() as stack:  # all are stopped, whatever comes of stopping one of them
            for control in controls:
                stack.callback(control.set, Cancelled("the run was cancelled by its caller"))

    def attach(self, control: Control) -> None:
        """Let ``cancel`` stop a run."""
        if self._parent is not None:
            self._parent.attach(control)
        with self._lock:
            if not self._cancelled:
                self._controls.add(control)
                return
        control.set(Cancelled("the run was cancelled before it began"))

    def detach(self, control: Control) -> None:
        """Forget a run that has ended."""
        if self._parent is not None:
            self._parent.detach(control)
        with self._lock:
            self._controls.discard(control)


class _Watchdog:
    """One thread that stops runs at their deadlines; it sleeps while there are none.

    ``queue`` is a heap. A run that ends early leaves its entry there, which means nothing once the
    run is gone from ``timeouts``; when most entries mean nothing, the queue is made anew.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[tuple[float, int, Control]] = []
        self.timeouts: dict[Control, float] = {}
        self.numbers = count()
        self.thread: threading.Thread | None = None

    def add(self, control: Control, timeout: float) -> None:
        entry = (time.monotonic() + timeout, next(self.numbers), control)
        with self.changed:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(
                    target=self.watch, name="penstock-deadlines", daemon=True
                )
                self.thread.start()
            self.timeouts[control] = timeout
            heapq.heappush(self.queue, entry)
            if self.queue[0] is entry:
                self.changed.notify()

    def remove(self, control: Control) -> None:
        with self.changed:
            self.timeouts.pop(control, None)
            if len(self.queue) > 2 * len(self.timeouts) + _FEW:
                self.queue = [entry for entry in self.queue if entry[2] in self.timeouts]
                heapq.heapify(self.queue)

    def watch(self) -> None:
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                when, _, control = self.queue[0]
                wait = when - time.monotonic()
                if wait > 0:
                    self.changed.wait(min(wait, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self.queue)
                timeout = self.timeouts.pop(control, None)
            if timeout is not None:
                try:
                    control.set(_late(timeout))
                except BaseException:  # out of an observer, or somebody's callback
                    report()


_FEW = 64
_WATCHDOG = _Watchdog()


@in_child
def _forget() -> None:
    """Of its parent's runs a child has none."""
    _WATCHDOG.__init__()  # type: ignore[misc]


def _late(timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"the run did not end within its timeout of {timeout} s")


def begin(timeout: float | None, cancel: CancelToken | None) -> Control:
    """The control of a new run that may take ``timeout`` seconds and be cancelled."""
    control = Control()
    if timeout is not None:
        if not timeout > 0:
            control.set(_late(timeout))
        elif timeout < math.inf:
            _WATCHDOG.add(control, timeout)
    if cancel is not None:
        cancel.attach(control)
    return control


def end(control: Control, timeout: float | None, cancel: CancelToken | None) -> None:
    """Release what ``begin`` set up."""
    if cancel is not None:
        cancel.detach(control)
    if timeout is not None:
        _WATCHDOG.remove(control)


class Executor(Protocol):
    """How a plan is run: built from a plan once, it serves any number of runs at once."""

    name: str
    plan: Plan

    @property
    def tasks(self) -> Tasks | None:
        """The tasks that it runs, None if all of the plan is one."""
        ...

    def run(self, inputs: Sequence[Any], control: Control) -> tuple[Any, ...]:
        """The outputs of one run, in memory of the caller's own."""
        ...

    def run_async(self, inputs: Sequence[Any], control: Control, done: Done) -> None:
        """As ``run``, on the calling thread as long as that has something to do; what comes out is
        handed to ``done``, perhaps later and on another thread."""
        ...

    def observed(self) -> Executor:
        """An executor of the same plan that tells ``control.observer`` what it does."""
        ...

    def trim(self) -> None:
        """Give up the arenas that no run holds."""
        ...

    @property
    def source(self) -> str:
        """The generated program."""
        ...

    @property
    def arena_plan(self) -> ArenaPlan:
        """Where values lie in the arena."""
        ...

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        ...

    @property
    def plan_bytes(self) -> int:
        """About what plan and program take."""
        ...


Done = Callable[[tuple[Any, ...] | None, BaseException | None], None]
"""Takes the outputs of a run, or else the error that it ended with."""


def run_inline(executor: Executor, inputs: Sequence[Any], control: Control, done: Done) -> None:
    """``run_async`` of an executor that has all to do itself: on the calling thread, to the end."""
    try:
        outputs = executor.run(inputs, control)
    except BaseException as error:
        done(None, error)
    else:
        done(outputs, None)


class CompiledExecutor:
    """What executors of generated code have in common: ``watched``, whether observers are told, and
    ``_arenas``, None where nothing is planned."""

    watched: bool
    _code: Code
    _arenas: Arenas[Any] | None = None

    @property
    def source(self) -> str:
        return self._code.program.source

    @property
    def plan_bytes(self) -> int:
        return self._code.program.nbytes

    @property
    def arena_bytes(self) -> int:
        return 0 if self._arenas is None else self._arenas.nbytes

    def trim(self) -> None:
        if self._arenas is not None:
            self._arenas.trim()


# Threads of kernels.

# Operations of a product with a vector from which on NumPy's library uses more than one thread.
_MANY_FOR_BLAS = 18_000
# Operations of a step that are worth more than one thread: 5 us.
_MANY = 500_000


# Operations that only move elements.
_MOVES = frozenset(
    """
    Cast Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity Pad Reorder
    Reshape Slice SpaceToDepth Split Squeeze Tile Transpose Unsqueeze Where
    """.split()  # noqa: SIM905 - names are easier to read without quotes
)


def share_of(
    plan: Plan, hosts: Sequence[Backend], streams: int = 1, threads: int | None = None
) -> ThreadShare:
    """What a run of ``plan`` on so many workers enters to share the threads of kernels, of which
    the session may use ``threads``."""
    most: dict[str, int] = {}
    for step in plan.walk():
        work = 0 if step.node.op.name in _MOVES else flops(step.node)
        most[step.backend] = max(work, most.get(step.backend, 0))
    own = [b for b in hosts if b.threads_of_caller and b.name in most]
    shared = [b for b in hosts if not b.threads_of_caller]
    shared = [b for b in shared if most.get(b.name, 0) >= _MANY_FOR_BLAS]
    worth = bool(shared) or any(most[b.name] >= _MANY for b in own)
    return ThreadShare([*own, *shared], streams if worth else 0, threads)


class PerThreadCount(dict[int, T]):
    """What ``bind`` makes of an arena, once for each number of threads that kernels may have."""

    def __init__(self, bind: Callable[[], T]) -> None:
        super().__init__()
        self._bind = bind

    def __missing__(self, threads: int) -> T:
        made = self[threads] = self._bind()
        return made


# NumPy's floating-point warnings.

_QUIET: list[contextvars.Context] = []


def quiet(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function`` with NumPy's floating-point warnings off.

    NumPy keeps that setting in a context variable. Entering a context made once costs a twentieth
    of ``np.errstate``, and leaves the caller's setting alone.
    """
    try:
        context = _QUIET.pop()
    except IndexError:
        context = silent()
    try:
        return context.run(function, *arguments)
    finally:
        _QUIET.append(context)


def silent() -> contextvars.Context:
    """A context in which NumPy's floating-point warnings are off."""
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context


# Errors.


def fail(error: Exception, program: Program, plan: Plan) -> NoReturn:
    """Raise what ``explained`` makes of the error of a run."""
    told = explained(error, program, plan)
    try:
        if told is error:
            raise told
        raise told from error
    finally:
        del told, error  # they hold this frame


def explained(error: Exception, program: Program, plan: Plan) -> PenstockError:
    """The error of a run, with the step at fault: its node, its origin, and its inputs' shapes."""
    step, names = _where(error, program)
    if isinstance(error, PenstockError):
        if step is not None:
            error.add_note(f"The run had come to {step.node.op.name} ({step.node.label}).")
        return error
    if step is None and isinstance(error, MemoryError):
        return RunError(f"there is no memory for the outputs: {error}")
    if step is None:
        return InternalError(f"the run failed outside of any node: {error!r}")
    inputs = ", ".join(
        "none" if i < 0 else f"{plan.slots[i].name}: {names.get(i, plan.slots[i].type)}"
        for i in step.inputs
    )
    what = f"{error}" if isinstance(error, ShapeError | MemoryError) else f"{error!r}"
    message = f"{step.node.op.name} ({step.node.label}) with inputs ({inputs}): {what}"
    # No values make correct code meet a name that it does not know, or fail an assertion.
    if isinstance(error, AssertionError | NameError):
        return InternalError(f"{message}. This is a bug in Penstock: please report it")
    return RunError(message)


def _where(error: Exception, program: Program) -> tuple[Step | None, dict[int, str]]:
    """The step that raised, and what its inputs were as far as they are variables."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != program.filename:
        trace = trace.tb_next
    step = None if trace is None else program.steps[trace.tb_lineno - 1]
    if step is None or trace is None:
        return None, {}
    known = trace.tb_frame.f_locals
    shared = known.get("V", ())
    names = {}
    for i in step.inputs:
        value = known.get(f"v{i}")
        if value is None and 0 <= i < len(shared):
            value = shared[i]
        if isinstance(value, np.ndarray):
            names[i] = str(TensorType(value.dtype, value.shape))
    return step, names
