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
    """whether a run may hand over its turn to the next one (``Control.turn``) before it has ended,
    and looks at ``Turn.behind``"""

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
        """An executor of the same plan that tells ``control.observer`` what it does."""

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
        """About what plan and program take."""


Done = Callable[[tuple[Any, ...] | None, BaseException | None], None]
"""Takes the outputs of a run, or else the error that it ended with."""


class InlineExecutor:
    """An executor whose runs are on the calling thread from begin to end."""

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
    """Runs an executor in its own way, as long as it is the executor's ``sampler``."""

    owner: Callable[[], Any]
    """gives the session that the executor belongs to, to which it reports; None if that is gone"""

    def run(
        self, executor: Executor, inputs: RunValues, control: Control
    ) -> tuple[RunValue, ...]: ...


class LateSampler:
    """Stands for the sampler that ``make`` gives, if it does: runs have it from the second one on,
    so that a process of one run does without its modules."""

    def __init__(self, make: Callable[[], Sampler | None]) -> None:
        self.owner: Callable[[], Any] = lambda: None
        self._left = iter([None, make])  # for the next runs, of which several may be at once

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

    The kernel threads of the backends ``hosts`` are shared by runs of ``workers`` each, of which
    the session may use ``threads``: all, if they are fixed, else as many as prove faster.
    """

    _arenas: Arenas[Any]
    _arguments: tuple[RunValue, ...]
    """what it was made with, beside the program"""
    _memory: SessionMemory | None = None
    sampler: Sampler | None = None
    """what runs it in its own way, if anything"""

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
        """The generated program, with what each call reads and writes in its comments."""
        from penstock.codegen.readable import readable_source

        return readable_source(self._program)

    @property
    def threads(self) -> int:
        """The most threads that a kernel of a run uses."""
        return self._share.threads

    @property
    def plan_bytes(self) -> int:
        """Estimated bytes of plan and program, and of what kernels have kept during runs."""
        return self._program.nbytes + sum([nbytes() for nbytes in self._cached_bytes])

    def _allocate(
        self,
        host: Backend,
        limits: Limits,
        bind: Callable[[np.ndarray], Callable[[], T]],
        shared: bool = False,
        remote: Mapping[str, int] | None = None,
    ) -> Arenas[PerThreadCount[T]]:
        """The pool of arenas, with one bound now, so that errors show when the plan is compiled.
        ``bind(memory)()`` binds the program to one of them. ``shared``: nothing is bound to the
        arenas, so that all runs can use the same functions. ``remote``: the bytes that ``bind``
        allocates for each in memories of devices, by name."""
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
        """Bytes of the memory of a session that a run takes, as far as they are known before."""
        return self._arenas.needs

    def expect(self, nbytes: int) -> None:
        """Note what a run surely does with, as far as it was not known before."""
        self._arenas.needs = max(self._arenas.needs, nbytes)

    def share_memory(self, memory: SessionMemory) -> None:
        """Take what runs need of the memory of a session."""
        self._memory, found = memory, self._program.allocations
        # Values that have no place in an arena do not all live at once.
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
    """The budget of a run that must count what it allocates, beside ``taken`` bytes."""
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
    """The share of the kernels' threads that a run of ``plan`` on ``streams`` workers enters. The
    session may use ``threads`` of them, or is to use them all if their number is ``fixed``."""
    most: dict[str, int] = {}
    threaded = {b.name for b in hosts if b.threads_of_caller}  # whatever they run
    for step in with_checkpoints(plan.walk()):
        work = 0 if step.node.op.view else plan.flops_of[step]
        # The shapes that the run will meet are guessed for kernels that look at them.
        late = 0 if step.kernel is None else step.kernel.shapes.flops
        most[step.backend] = max(work, late, most.get(step.backend, 0))
        moves = step.node.op.moves
        # NumPy's kernel computes what other backends have no kernel for in a run.
        runs = {step.backend}
        if step.kernel is not None and step.kernel.shapes.cached_bytes is not None:
            runs.add("numpy")
        # Estimates are asked for only as long as they can change the answer.
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

    NumPy keeps that setting in a context variable. Entering a prepared context costs a twentieth of
    ``np.errstate``, and leaves the caller's setting alone.
    """
    try:
        # One call of a list, so that it needs no lock: each thread has a context to itself.
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
