"""Common parts of executors: their protocol, kernel threads, and NumPy's warnings."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from sys import maxsize
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from penstock.backends.base import Backend
from penstock.codegen.writer import Program
from penstock.core.checkpoints import with_checkpoints
from penstock.core.limits import Limits
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.executors.arenas import Arenas
from penstock.executors.control import Control
from penstock.host.current_run import Budget, working_for
from penstock.host.thread_share import ThreadShare
from penstock.ir.graph import Node
from penstock.ops.common.products import product_work
from penstock.ops.work_estimate import WORTH_THREADS, flops
from penstock.plan.arena_layout import ArenaPlan
from penstock.plan.plan import Plan, Step, StepTable
from penstock.plan.tasks import Tasks

if TYPE_CHECKING:
    from penstock.executors.session_memory import SessionMemory
    from penstock.host.thread_tuner import ThreadTuner
    from penstock.observers.profile import Profile

T = TypeVar("T")


class OnWorkers(Protocol):
    """An executor whose steps run on the workers of a cluster, which plan and measure them."""

    @property
    def backends(self) -> Collection[str]:
        """The names of the backends that steps run on."""

    def profile(self, inputs: RunValues, runs: int) -> Profile:
        """Return a profile of ``runs`` runs: the time of each step."""


class Executor(Protocol):
    """Runs a plan. One executor serves any number of concurrent runs of its plan."""

    name: str
    hands_over: bool
    """whether a run waits for the events in ``Turn.behind``, and may hand over its turn
    (``Control.turn``) to the next run before it ends"""

    @property
    def table(self) -> StepTable:
        """The steps of the executor: a ``Plan``, unless it plans neither order nor memory."""

    @property
    def tasks(self) -> Tasks | None:
        """The tasks of the plan, or None if the executor runs the plan as a whole."""

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        """Run the plan and return its outputs, which share no memory with later runs. Raises
        ``RunError``, and the error of ``control`` if the run is stopped."""

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        """Begin a run on the calling thread, and return when this thread has no more work. ``done``
        is called with the outputs or the error, perhaps later and on another thread."""

    def observed(self) -> Executor:
        """Return an executor of the same plan that reports events to ``control.observer``."""

    def trim(self) -> None:
        """Release the arenas that no run holds."""

    @property
    def source(self) -> str:
        """The generated program."""

    @property
    def threads(self) -> int:
        """The largest number of threads that a kernel of a run uses."""

    @property
    def arena_plan(self) -> ArenaPlan | None:
        """The offsets of values in the arena; None if the executor has no arenas of its own."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas, including the workspaces of their device streams."""

    @property
    def run_bytes(self) -> int:
        """Bytes of the arena of one run, including the workspaces of its device streams."""

    @property
    def plan_bytes(self) -> int:
        """Estimated bytes of the plan and the program."""


Done = Callable[[tuple[Any, ...] | None, BaseException | None], None]
"""A callback that takes the outputs of a run and None, or None and the run's error."""


class InlineExecutor:
    """An executor whose runs take place entirely on the calling thread."""

    hands_over = False

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        raise NotImplementedError

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        try:
            outputs = self.run(inputs, control)
        except BaseException as error:
            done(None, error)
        else:
            done(outputs, None)


class Sampler(Protocol):
    """Controls the runs of an executor for as long as it is the executor's ``sampler``."""

    owner: Callable[[], Any]
    """returns the session to report to, which owns the executor; None if it was deleted"""

    def run(
        self, executor: Executor, inputs: RunValues, control: Control
    ) -> tuple[RunValue, ...]: ...


class LateSampler:
    """Installs the sampler that ``make`` returns, if any, at the second run, so that a process
    with a single run does not import the sampler's modules."""

    def __init__(self, make: Callable[[], Sampler | None]) -> None:
        self.owner: Callable[[], Any] = lambda: None
        self._left = iter([None, make])  # ``next`` is atomic: the first runs may be concurrent

    def run(self, executor: Executor, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        make = next(self._left, None)
        if make is not None and isinstance(executor, CompiledExecutor):
            executor.sampler = sampler = make()
            if sampler is not None:
                sampler.owner = self.owner
                return sampler.run(executor, inputs, control)
        return working_for(control, executor.run, inputs, control)


class CompiledExecutor:
    """An executor of a generated program, bound to the arenas of a pool.

    Each run has ``workers`` workers; all runs share the kernel threads of the backends ``hosts``.
    The session uses ``threads`` of them with ``fixed_threads``, else the fastest number up to that.
    """

    _arenas: Arenas[Any]
    _arguments: tuple[RunValue, ...]
    """the arguments of the constructor after ``program``"""
    _memory: SessionMemory | None = None
    sampler: Sampler | None = None
    """controls, measures or watches the executor's runs, unless None"""

    def __init__(
        self,
        program: Program,
        name: str,
        hosts: Sequence[Backend],
        threads: int | None,
        workers: int = 1,
        fixed_threads: bool = False,
    ) -> None:
        self.name = name
        self.plan = self.table = program.plan
        self.tasks = program.tasks
        self.arena_plan = program.arena_plan
        self.sequences = {name: s.steps for name, s in program.sequences.items()}
        self.captures = program.captures
        kernels = [step.kernel for step in program.plan.walk() if step.kernel is not None]
        self._cached_bytes = [
            cached for k in kernels if (cached := k.shapes.cached_bytes) is not None
        ]
        self._program = program
        self._share = share_of(program.plan, hosts, workers, threads, fixed_threads)
        self._counts = program.allocations.counts

    def recipe(self) -> Callable[[], Executor]:
        """Return a function that creates another executor of the same program. The function does
        not keep this executor, its arenas, or the kernels bound to them alive."""
        return partial(_rebuild, type(self), self._program, self._arguments, self._share.tuner)

    @property
    def source(self) -> str:
        """The generated program, with comments on the values that each call reads and writes."""
        from penstock.codegen.readable import readable_source

        return readable_source(self._program)

    @property
    def threads(self) -> int:
        """The largest number of threads that a kernel of a run uses."""
        return self._share.threads

    @property
    def plan_bytes(self) -> int:
        """Estimated bytes of the plan, the program and the kernels' caches."""
        return self._program.nbytes + sum([nbytes() for nbytes in self._cached_bytes])

    def _allocate(
        self,
        host: Backend,
        limits: Limits,
        bind: Callable[[np.ndarray], Callable[[], T]],
        shared: bool = False,
        remote: Mapping[str, int] | None = None,
    ) -> Arenas[PerThreadCount[T]]:
        """Return the pool of arenas, with one arena already bound, so that errors are raised during
        compilation. ``bind(memory)()`` binds the program to an arena. ``shared``: whether the
        program uses no arena, so that all runs share its functions. ``remote``: the bytes that
        ``bind`` allocates in device memories for each arena, by name."""
        bound = PerThreadCount(bind, np.empty(0, np.uint8)) if shared else None
        bind_arena: Any = (lambda memory: bound) if shared else partial(PerThreadCount, bind)
        arenas = Arenas(self.arena_plan.size, host, limits, bind_arena, remote)
        arena = arenas.make()  # before the first runs, which may be concurrent
        with self._share as threads:
            arena[threads]
        arenas.give(arena)
        return arenas

    def _counting(self, control: Control) -> Control:
        """Return the control of a run, with a budget if the run must count its allocations."""
        if self._counts and control.budget is None:
            control, limits = control.own(), self._program.limits
            taken, memory = self._program.allocations.taken, self._memory
            if memory is None:
                control.budget = budget_of(limits, taken)
            else:
                name = "memory= less weights and plans"
                control.budget = Budget(memory.left, taken, limits.max_dims, name)
        return control

    @property
    def arena_bytes(self) -> int:
        return self._arenas.nbytes

    @property
    def run_bytes(self) -> int:
        return self._arenas.bytes_each

    def trim(self) -> None:
        self._arenas.trim()

    @property
    def needs_bytes(self) -> int:
        """Bytes of the session's memory that a run reserves, if known before the run."""
        return self._arenas.needs

    def expect(self, nbytes: int) -> None:
        """Raise ``needs_bytes`` to at least ``nbytes``."""
        self._arenas.needs = max(self._arenas.needs, nbytes)

    def share_memory(self, memory: SessionMemory) -> None:
        """Allocate the memory of runs from the memory of a session."""
        self._memory, allocations = memory, self._program.allocations
        # Values outside of the arena are not all live at once.
        complete = allocations.complete and (self.name != "dataflow" or not allocations.counts)
        nbytes = allocations.known if complete else allocations.taken
        self._arenas.share(memory, nbytes, not complete)


def _rebuild(
    executor_type: Callable[..., CompiledExecutor],
    program: Program,
    arguments: Sequence[object],
    tuner: ThreadTuner | None,
) -> Executor:
    executor = executor_type(program, *arguments)
    executor._share.tuner = tuner  # keeps the chosen number of threads
    return cast(Executor, executor)


def budget_of(limits: Limits, taken: int = 0) -> Budget:
    """Return the budget of a run that has already allocated ``taken`` bytes."""
    return Budget(maxsize if limits.max_bytes is None else limits.max_bytes, taken, limits.max_dims)


def outputs_of(
    results: Callable[[list[RunValue]], tuple[RunValue, ...]], V: RunValue, control: Control
) -> RunValue:
    """Return the outputs of a run of tasks. Copies are charged to the run's budget, if any."""
    return results(V) if control.budget is None else working_for(control, results, V)


# Kernel threads.

# Floating-point operations above which NumPy's BLAS library uses several threads: for a product of
# two matrices, and of a matrix with a vector.
_MANY_FOR_BLAS, _MANY_WITH_VECTOR = 500_000, 18_000


def may_use_threads(node: Node) -> bool:
    """Whether the NumPy kernel of a node may use threads of NumPy's BLAS library."""
    output = node.outputs[0].type if node.outputs and node.outputs[0] else None
    if node.op.work is product_work and not (isinstance(output, TensorType) and output.static):
        return True
    if node.op.elementwise or flops(node) < _MANY_WITH_VECTOR:
        return False
    if node.op.work is not product_work or not isinstance(output, TensorType) or not output.static:
        return True
    of_vector = len(output.dims) < 2 or min(output.dims[-2:]) < 2
    # BLAS has no products of integers.
    of_integers = output.dtype is not None and output.dtype.kind in "iu"
    return not of_integers and (of_vector or flops(node) >= _MANY_FOR_BLAS)


# Operations that a second of a call counts as: a call of 15 us is worth sharing the threads with
# other runs, as WORTH_THREADS operations are.
_OPERATIONS = WORTH_THREADS / 15e-6
# To count the runs of a session with one thread only informs others, and takes 2 us.
_WORTH_COUNTING = 100e-6 * _OPERATIONS


def _operations(step: Step, plan: Plan, of_one: bool) -> float:
    """Return the work of a step, in operations: of one thread, or as far as threads divide it."""
    if step.kernel is None:
        return plan.flops_of[step]
    binder = step.kernel.binder
    if of_one and binder is not None and binder.estimated_s:
        return binder.estimated_s * _OPERATIONS
    divided = 0.0 if binder is None else binder.divided_s * _OPERATIONS
    # Kernels bound to the shapes of a run state an estimate of their work.
    return max(plan.flops_of[step], step.kernel.shapes.flops, divided)


def share_of(
    plan: Plan,
    hosts: Sequence[Backend],
    streams: int = 1,
    threads: int | None = None,
    fixed: bool = False,
) -> ThreadShare:
    """Return the share of the kernel threads for runs of ``plan`` on ``streams`` workers. The
    session uses at most ``threads`` of them, or exactly that many if ``fixed``."""
    # The work of all steps of a backend, or of its largest step if steps may use several threads.
    work: dict[str, float] = {}
    of_one = threads == 1
    least = _WORTH_COUNTING if of_one else WORTH_THREADS
    threaded = {b.name for b in hosts if b.threads_of_caller}  # regardless of their steps
    for step in with_checkpoints(plan.walk()):
        known = work.setdefault(step.backend, 0.0)
        if known < least and not step.node.op.view:
            own_work = _operations(step, plan, of_one)
            work[step.backend] = known + own_work if of_one else max(known, own_work)
        moves = step.node.op.moves
        # NumPy computes those shapes of a run for which the backend has no kernel.
        runs = {step.backend}
        if step.kernel is not None and step.kernel.shapes.cached_bytes is not None:
            runs.add("numpy")
        # Skip estimates that cannot change the result.
        if not moves and not runs <= threaded and may_use_threads(step.node):
            threaded |= runs
    own = [b for b in hosts if b.threads_of_caller and b.name in work]
    shared = [b for b in hosts if not b.threads_of_caller and b.name in threaded]
    worth = any(work[b.name] >= least for b in own)
    # For shorter kernels, waking threads costs more than the threads save.
    limit = threads if worth or not own else 1
    return ThreadShare([*own, *shared], streams if worth or shared else 0, limit, not fixed)


class PerThreadCount(dict[int, T]):
    """A program bound to one arena: the result of ``bind(memory)()`` for each number of threads."""

    def __init__(self, bind: Callable[[np.ndarray], Callable[[], T]], memory: np.ndarray) -> None:
        super().__init__()
        self._bind = bind(memory)

    def __missing__(self, threads: int) -> T:
        bound = self[threads] = self._bind()
        return bound


# NumPy's floating-point warnings.

_QUIET: list[contextvars.Context] = []


def quiet(function: Callable[..., RunValue], *arguments: object) -> Any:
    """Call ``function`` with NumPy's floating-point warnings off.

    NumPy stores this setting in a context variable. To enter a prepared context takes a twentieth
    of the time of ``np.errstate``, and does not change the caller's setting.
    """
    try:
        # ``pop`` is atomic, so no lock is needed: two threads never get the same context.
        context = _QUIET.pop()
    except IndexError:
        context = silent()
    try:
        return context.run(function, *arguments)
    finally:
        _QUIET.append(context)


_SILENT = contextvars.Context()
_SILENT.run(np.seterr, all="ignore")


def silent() -> contextvars.Context:
    """Return a new context in which NumPy's floating-point warnings are off."""
    return _SILENT.copy()
