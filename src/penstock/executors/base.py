"""Common parts of executors: the protocol, the threads of kernels, and NumPy's warnings."""

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
from penstock.plan.plan import Plan, StepTable
from penstock.plan.tasks import Tasks

if TYPE_CHECKING:
    from penstock.executors.session_memory import SessionMemory
    from penstock.host.thread_tuner import ThreadTuner
    from penstock.observers.profile import Profile

T = TypeVar("T")


class OnWorkers(Protocol):
    """An executor whose steps run on workers, which plan and measure them."""

    @property
    def backends(self) -> Collection[str]:
        """The names of the backends that steps run on."""

    def profile(self, inputs: RunValues, runs: int) -> Profile:
        """Measure ``runs`` runs: where their time goes, by step."""


class Executor(Protocol):
    """Runs a plan: built from a plan once, it serves any number of runs at once."""

    name: str
    hands_over: bool
    """whether a run waits for the events in ``Turn.behind``, and may hand over its turn
    (``Control.turn``) to the next run before it ends"""

    @property
    def table(self) -> StepTable:
        """The steps that it runs: a ``Plan``, unless the executor plans nothing."""

    @property
    def tasks(self) -> Tasks | None:
        """The tasks that it runs, None if all of the plan is one."""

    def run(self, inputs: RunValues, control: Control) -> tuple[RunValue, ...]:
        """The outputs of one run, in memory of the caller's own."""

    def run_async(self, inputs: RunValues, control: Control, done: Done) -> None:
        """As ``run``, on the calling thread as long as that has something to do; call ``done`` with
        the result, perhaps later and on another thread."""

    def observed(self) -> Executor:
        """Return an executor of the same plan that reports its events to ``control.observer``."""

    def trim(self) -> None:
        """Give up the arenas that no run holds."""

    @property
    def source(self) -> str:
        """The generated program."""

    @property
    def threads(self) -> int:
        """The most threads that a kernel of a run uses."""

    @property
    def arena_plan(self) -> ArenaPlan | None:
        """The offsets of values in the arena."""

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas, with the workspaces of their streams on devices."""

    @property
    def run_bytes(self) -> int:
        """Bytes of one arena, which a run has to itself, with these workspaces."""

    @property
    def plan_bytes(self) -> int:
        """Estimated bytes of the plan and the program."""


Done = Callable[[tuple[Any, ...] | None, BaseException | None], None]
"""Takes the outputs of a run, or else the error that it ended with."""


class InlineExecutor:
    """An executor that does the whole run on the calling thread."""

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
        self._left = iter([None, make])  # for the next runs, which may be concurrent

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

    Runs of ``workers`` workers each share the kernel threads of the backends ``hosts``. The session
    uses at most ``threads`` of them: with ``fixed_threads`` all, else the fastest number measured.
    """

    _arenas: Arenas[Any]
    _arguments: tuple[RunValue, ...]
    """the arguments of the constructor after ``program``"""
    _memory: SessionMemory | None = None
    sampler: Sampler | None = None
    """measures or watches its runs, if not None"""

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
        """Return a function that makes another executor of the same program. It keeps alive neither
        this executor nor its arenas and the kernels bound to them."""
        return partial(_made_again, type(self), self._program, self._arguments, self._share.tuner)

    @property
    def source(self) -> str:
        """The generated program; comments say which values each call reads and writes."""
        from penstock.codegen.readable import readable_source

        return readable_source(self._program)

    @property
    def threads(self) -> int:
        """The most threads that a kernel of a run uses."""
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
        """Return the pool of arenas. One arena is bound now, so that errors are raised when the
        plan is compiled. ``bind(memory)()`` binds the program to an arena. ``shared``: the program
        does not use the arena, so all runs share its functions. ``remote``: the bytes that
        ``bind`` allocates for each arena in device memories, by name."""
        bound = PerThreadCount(bind, np.empty(0, np.uint8)) if shared else None
        bind_arena: Any = (lambda memory: bound) if shared else partial(PerThreadCount, bind)
        arenas = Arenas(self.arena_plan.size, host, limits, bind_arena, remote)
        arena = arenas.make()  # before the first run, which may be one of many at once
        with self._share as threads:
            arena[threads]
        arenas.give(arena)
        return arenas

    def _counting(self, control: Control) -> Control:
        """The control of a run, with a budget if the run must count what it allocates."""
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
        return self._arenas.each

    def trim(self) -> None:
        self._arenas.trim()

    @property
    def needs_bytes(self) -> int:
        """Bytes of the session's memory that a run takes, if known before the run."""
        return self._arenas.needs

    def expect(self, nbytes: int) -> None:
        """Raise ``needs_bytes`` to at least ``nbytes``."""
        self._arenas.needs = max(self._arenas.needs, nbytes)

    def share_memory(self, memory: SessionMemory) -> None:
        """Allocate the memory of runs from the memory of a session."""
        self._memory, found = memory, self._program.allocations
        # Values outside of the arena are not all live at once.
        complete = found.complete and (self.name != "dataflow" or not found.counts)
        self._arenas.share(memory, found.known if complete else found.taken, not complete)


def _made_again(
    executor_type: Callable[..., CompiledExecutor],
    program: Program,
    arguments: Sequence[object],
    tuner: ThreadTuner | None,
) -> Executor:
    executor = executor_type(program, *arguments)
    executor._share.tuner = tuner  # the number of threads is not chosen once more
    return cast(Executor, executor)


def budget_of(limits: Limits, taken: int = 0) -> Budget:
    """The budget of a run that must count its allocations beyond the ``taken`` bytes."""
    return Budget(maxsize if limits.max_bytes is None else limits.max_bytes, taken, limits.max_dims)


def outputs_of(
    results: Callable[[list[RunValue]], tuple[RunValue, ...]], V: RunValue, control: Control
) -> RunValue:
    """The outputs of a run of tasks; the copies among them count if the run counts."""
    return results(V) if control.budget is None else working_for(control, results, V)


# Threads of kernels.

# Operations from which on NumPy's library uses more than one thread: of a product of matrices, and
# of one with a vector.
_MANY_FOR_BLAS, _MANY_WITH_VECTOR = 500_000, 18_000


def may_use_threads(node: Node) -> bool:
    """Whether NumPy's kernel of a node may use threads of NumPy's library."""
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


def share_of(
    plan: Plan,
    hosts: Sequence[Backend],
    streams: int = 1,
    threads: int | None = None,
    fixed: bool = False,
) -> ThreadShare:
    """Return the share of the kernel threads for runs of ``plan`` on ``streams`` workers. The
    session uses at most ``threads`` of them, or exactly as many if ``fixed``."""
    most: dict[str, int] = {}
    threaded = {b.name for b in hosts if b.threads_of_caller}  # whatever they run
    for step in with_checkpoints(plan.walk()):
        work = 0 if step.node.op.view else plan.flops_of[step]
        # Kernels that depend on the shapes of a run have an estimate of their work.
        late = 0 if step.kernel is None else step.kernel.shapes.flops
        most[step.backend] = max(work, late, most.get(step.backend, 0))
        moves = step.node.op.moves
        # NumPy computes shapes for which the backend has no kernel during a run.
        runs = {step.backend}
        if step.kernel is not None and step.kernel.shapes.cached_bytes is not None:
            runs.add("numpy")
        # Skip estimates that cannot change the result.
        if not moves and not runs <= threaded and may_use_threads(step.node):
            threaded |= runs
    own = [b for b in hosts if b.threads_of_caller and b.name in most]
    shared = [b for b in hosts if not b.threads_of_caller and b.name in threaded]
    worth = any(most[b.name] >= WORTH_THREADS for b in own)
    # Kernels this short lose more to waking threads than these save.
    limit = threads if worth or not own else 1
    return ThreadShare([*own, *shared], streams if worth or shared else 0, limit, not fixed)


class PerThreadCount(dict[int, T]):
    """A program bound to one arena: ``bind(memory)()``, once for each number of threads."""

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

    NumPy stores that setting in a context variable. Entering a prepared context costs a twentieth
    of ``np.errstate``, and does not change the caller's setting.
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
    """A new context in which NumPy's floating-point warnings are off."""
    return _SILENT.copy()
