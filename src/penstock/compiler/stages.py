"""The stages of the compile line: each is a function from one frozen record to the next.

::

    Feeds -> specialize -> optimize -> lower -> plan -> schedule -> generate_program -> bind

    Feeds         a graph and the values of its inputs
    Feeds         the graph copied, with the shapes of the values; then optimized for them
    Lowered       the graph with fused nodes and transfers, and the backend of each node
    Planned       steps and slots
    Scheduled     tasks, and the offsets of slots in the arena
    Programmed    Python source
    Executor      the program, bound to memory

A stage reads its record and the ``CompileContext``. The graph is copied once, by ``specialize``;
passes then change that copy in place. No stage calls an earlier
one: if two plans are to be compared, both pass through the rest of the line side by side
(``Scheduled.rival``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.analysis.sizes import check_sizes
from penstock.backends.base import Backend, BoundsThreads, Device
from penstock.backends.kernels import KernelTable
from penstock.backends.numpy import NumpyBackend
from penstock.backends.specializing import plausible
from penstock.codegen.steps import ProgramForm
from penstock.codegen.writer import Program, write_program
from penstock.compiler.options import CompileOptions
from penstock.core import capability
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import cached_property, dataclass, field, replace
from penstock.core.types import OptionalType, RunValues, TensorType, Type
from penstock.executors.base import Executor
from penstock.executors.linear import LinearExecutor
from penstock.host.threads import OVERHEADS, Workers, core_budget, pool
from penstock.ir.graph import ConvertedWeights, Graph, Node, clone
from penstock.ops.internal.transfer import HOST, Ports
from penstock.ops.work_estimate import worth_threads
from penstock.plan.arena_layout import (
    ArenaPlan,
    SavedArena,
    plan_arena,
    plan_arena_for_tasks,
    restored_arena,
)
from penstock.plan.builder import compile_plan
from penstock.plan.plan import Plan
from penstock.plan.tasks import Tasks, are_asynchronous, in_one_function

if TYPE_CHECKING:
    from penstock.analysis.value_memory import ValueMemory
    from penstock.compiler.varying_shapes import OpenTypes
    from penstock.executors.task_loop import Queue
    from penstock.passes.context import Pass, Unraised
    from penstock.plan.grouping import ClusteredGrouping, Seconds
    from penstock.tuning.measure import CostModel, GraphProfiler


@dataclass(frozen=True)
class NamedWorkers:
    """The entries of ``place=`` that name workers of a cluster, by their keys. ``used``: whether an
    entry or a node of the model names a worker. ``devices``: those of each worker by their full
    names, with the backends that ``devices=`` gives them; by default one device of each worker."""

    by_key: Mapping[str, str] = field(default_factory=dict)
    used: bool = False
    devices: Sequence[Mapping[str, str | Backend | None]] = ()


@dataclass(frozen=True)
class CompileContext:
    """The context of all stages: the session's options, backends, limits and functions."""

    options: CompileOptions
    backends: tuple[Backend, ...]
    functions: Mapping[str, Graph] = field(default_factory=dict)
    weights: ConvertedWeights = field(default_factory=ConvertedWeights)
    long: Collection[str] = frozenset()
    """names of nodes that took long in runs although their estimates were short"""
    named_workers: NamedWorkers = NamedWorkers()

    @property
    def limits(self) -> Limits:
        """The limits of the options, or the default limits."""
        return self.options.limits or DEFAULT_LIMITS

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Full names of the virtual devices of this process, if any."""
        options = self.options
        if options.devices is None or options.cuda_devices or options.cluster is not None:
            return ()
        from penstock.ir.device_name import local

        return tuple(local(options.devices))

    @property
    def executor(self) -> str:
        """The name of the requested executor."""
        if self.options.cluster is not None:
            return "frames" if self.named_workers.used else "cluster"
        return "frames" if self.devices else self.options.executor

    @cached_property
    def hosts(self) -> list[Backend]:
        """The backends of the host's memory."""
        # Arenas are allocated by a host backend, even if the user chose none.
        return [b for b in self.backends if b.memory == HOST] or [NumpyBackend()]

    @cached_property
    def by_name(self) -> dict[str, Backend]:
        """The backends by name."""
        return {backend.name: backend for backend in self.backends}

    @cached_property
    def one_memory(self) -> bool:
        """Whether all backends work on the host's memory."""
        return {backend.memory for backend in self.backends} <= {HOST}

    @property
    def accelerators(self) -> dict[str, Device]:
        """The devices of backends that have one, by the name of the backend."""
        return {b.name: b.device for b in self.backends if b.device is not None}

    @property
    def workers(self) -> int:
        """The number of tasks of one run that may run at the same time on the host."""
        workers = self.pool.size
        # More tasks than a backend can run at the same time would only wait. A pool that the
        # caller gives determines the number itself.
        if self.options.expert.pool is None:
            workers = min(max([backend.workers for backend in self.hosts]), workers)
        return min(workers, self.options.threads or workers)

    @property
    def pool(self) -> Workers:
        """The pool whose threads run tasks on the host."""
        return self.options.expert.pool or pool()

    @property
    def grouping(self) -> type[ClusteredGrouping]:
        """How steps form tasks."""
        from penstock.plan.grouping import ClusteredGrouping

        return self.options.expert.grouping or ClusteredGrouping

    @property
    def costs(self) -> CostModel:
        """The costs that are known without measuring."""
        from penstock.tuning.measure import costs_of

        return costs_of(self.options.expert.cost_model, self.backends)

    @property
    def placing_costs(self) -> CostModel:
        """The costs that decide placement and fusion, both of which may change rounding."""
        if not self.options.reproducible:
            return self.costs
        from penstock.tuning.fixed_costs import FixedCosts
        from penstock.tuning.measure import costs_of

        return costs_of(FixedCosts(self.backends), self.backends)

    @property
    def measures(self) -> bool:
        """Whether costs may be measured."""
        return self.options.expert.cost_model is None and not self.options.reproducible

    def seconds(self, costs: CostModel | None, threads: int | None) -> Seconds:
        """Return the cost of a step whose kernel has ``threads`` threads, by default all."""
        from penstock.tuning.measure import step_seconds

        assert costs is not None  # a saved order is not chosen again
        return lambda step: step_seconds(costs, step, self.by_name, threads)

    @cached_property
    def fuses(self) -> bool:
        """Whether a backend fuses nodes."""
        return any(backend.fuses for backend in self.backends)


@dataclass(frozen=True)
class Feeds:
    """A graph and the values of its inputs. Values whose contents do not matter may be placeholders
    of the right shape."""

    graph: Graph
    values: RunValues
    unraised: Sequence[Unraised] = ()
    """TensorFlow's primitives that structured control flow could not replace."""
    refined: bool = False
    """whether the values have added shapes or dtypes to the graph"""
    open_types: OpenTypes | None = None
    """the types of the inputs, if they differ from those of the values"""
    ports: Ports | None = None
    """where inputs and outputs are, if on devices"""
    packs: str = ""
    """which rows that a mask hides are left out, as ``PackRows`` says; empty for none"""

    @property
    def types(self) -> list[Type]:
        """The types of the inputs for these values."""
        if self.open_types is not None:
            return [*self.open_types.types]
        return [
            TensorType(x.dtype, x.shape)
            if isinstance(x, np.ndarray) and not isinstance(v.type, OptionalType)
            else v.type
            for v, x in zip(self.graph.inputs, self.values, strict=True)
        ]

    @property
    def add_shapes(self) -> bool:
        """Whether the values have shapes or dtypes that the graph leaves open."""
        return self.types != [value.type for value in self.graph.inputs]


def specialize(feeds: Feeds, context: CompileContext) -> Feeds:
    """Copy the graph, and give the inputs of the copy the types of the values."""
    # Other shapes need the subgraph's own graph: all later stages change only this copy.
    graph = clone(feeds.graph)
    for value, input_type in zip(graph.inputs, feeds.types, strict=True):
        value.type = input_type
    if feeds.open_types is not None and feeds.open_types.later:
        from penstock.passes.optimize.expect_dims import ExpectDims

        _run_pass(ExpectDims(feeds.open_types.later), graph, context)
    return replace(feeds, graph=graph, refined=feeds.add_shapes)


def infer(feeds: Feeds, context: CompileContext) -> Feeds:
    """Infer types, for graphs whose nodes must run unchanged."""
    from penstock.passes.optimize.fold_constants import InferTypes

    _run_pass(InferTypes(), feeds.graph, context)
    check_sizes(feeds.graph, context.limits)
    return feeds


def _run_pass(one: Pass, graph: Graph, context: CompileContext) -> None:
    """Run a pass that does not depend on backends."""
    from penstock.passes.context import PassContext
    from penstock.passes.pipeline import run_passes

    run_passes((one,), graph, PassContext(after_pass=context.options.expert.after_pass))


@dataclass(frozen=True)
class SavedPlan:
    """A plan as a file contains it: the graph after all passes, the backend of each node by name,
    and the offsets in the arena if its steps run in one order."""

    graph: Graph
    placement: Mapping[Node, str]
    arena: SavedArena | None
    copies: Sequence[object]
    """constants that are stored packed for backends, for kernels to use"""


@dataclass(frozen=True)
class Lowered:
    """A graph with fused nodes and transfers, the backend of each node, and its kernels."""

    graph: Graph
    placement: Mapping[Node, Backend]
    kernels: KernelTable
    costs: CostModel | None
    """None if nothing is left to choose by costs, as the graph was saved with ``arena``"""
    profiler: GraphProfiler | None = None
    """measures costs that ``costs`` lacks, unless the user has given these"""
    arena: SavedArena | None = None
    """the order of steps and their offsets in the arena, if the graph was saved with them"""
    memory: ValueMemory | None = None
    """the layouts of values, if passes had to decide them"""


def set_threads(
    graph: Graph, context: CompileContext, among: Collection[str] | None = None
) -> None:
    """Create kernels for the number of threads that runs will most likely have, only those of the
    backends ``among`` these if given."""
    threads = context.options.threads or core_budget()
    # Waking threads takes longer than the kernels of a small graph.
    if threads > 1 and not worth_threads(map(plausible, graph.walk())):
        threads = 1
    for backend in context.hosts:
        if backend.threads_of_caller and (among is None or backend.name in among):
            backend.set_threads(threads)


def restore_lowered(saved: SavedPlan, context: CompileContext) -> Lowered:
    """Return the graph of a saved plan, with the backends on which it was placed."""
    # Other backends are not even loaded, since the plan has no step on them.
    set_threads(saved.graph, context, {*saved.placement.values()})
    placed = {n: context.by_name[name] for n, name in saved.placement.items()}
    costs = context.costs if saved.arena is None else None
    return Lowered(saved.graph, placed, KernelTable(), costs, arena=saved.arena)


@dataclass(frozen=True)
class Planned:
    """A plan and the costs of its steps, with order and offsets in the arena if it was saved."""

    plan: Plan
    costs: CostModel | None
    profiler: GraphProfiler | None = None
    arena: SavedArena | None = None


def plan_slots(
    lowered: Lowered, context: CompileContext, *, planned: bool = True, inner: bool = False
) -> Planned:
    """Compile a plan. If ``planned``, values of known sizes live in an arena, else all values are
    allocated during the run. An ``inner`` plan is part of another and may never run."""
    graph, placement, kernels = lowered.graph, lowered.placement, lowered.kernels
    options: Any = {"planned": planned and (lowered.memory or True), "inner": inner}
    plan = compile_plan(graph, context.backends, placement, kernels=kernels, **options)
    # Libraries with their own threads do not read the option: a scope around each run limits them
    # to it.
    if (threads := context.options.threads) is not None:
        bounds = [capability(backend, BoundsThreads) for backend in context.backends]
        scopes = [partial(bound.bounded, threads) for bound in bounds if bound is not None]
        plan = replace(plan, scopes=(*plan.scopes, *scopes)) if scopes else plan
    return Planned(plan, lowered.costs, lowered.profiler, lowered.arena)


@dataclass(frozen=True)
class Scheduled:
    """When the steps of a plan run, and where its values are in the arena.

    Without ``tasks`` all steps run in the order of the arena plan. Otherwise ``queues`` gives the
    workers of the tasks, and another worker is requested for a task of at least ``worthwhile``
    seconds; ``devices`` has the streams of tasks, by name. ``rival`` is the plan in one order; it
    replaces the tasks unless a run of these takes at most the part ``margin`` of its time.
    ``unmeasured``: only estimates support this order, and runs are to show whether tasks are
    faster.
    """

    plan: Plan
    arena_plan: ArenaPlan
    profiler: GraphProfiler | None
    name: str
    tasks: Tasks | None = None
    queues: Sequence[Queue] = ()
    worthwhile: float = 0.0
    devices: Mapping[str, Device] = field(default_factory=dict)
    margin: float = inf
    rival: Scheduled | None = None
    unmeasured: bool = False


def schedule_in_order(planned: Planned, context: CompileContext) -> Scheduled:
    """Run all steps in one order that keeps few bytes alive, as tasks if one function cannot run
    them all (``in_one_function``)."""
    plan, planner = planned.plan, context.options.expert.memory_planner
    parallel = context.executor == "parallel" and are_asynchronous(plan.steps)
    if in_one_function(plan):
        arena = None if planned.arena is None else restored_arena(plan, planned.arena)
        return Scheduled(plan, arena or plan_arena(plan, planner), planned.profiler, "linear")
    # One function would block its thread while it waits for an asynchronous kernel, and CPython
    # compiles no block nested this deep.
    from penstock.plan.grouping import OrderedGrouping

    all_queues = queues_of(context, context.workers) if parallel else queues_of(context, 1, [])
    queues, queue_of = all_queues
    from penstock.plan.arrangement import arrange

    tasks = arrange(plan, OrderedGrouping(plan, queue_of))
    arena_plan = plan_arena_for_tasks(plan, tasks, planner)
    name, worthwhile = ("parallel", OVERHEADS.hand_over_s) if parallel else ("linear", inf)
    return Scheduled(plan, arena_plan, planned.profiler, name, tasks, queues, worthwhile)


def schedule_saved(planned: Planned, context: CompileContext) -> Scheduled:
    """Use the order of the saved plan. If it was left to costs, runs may show that tasks are
    faster."""
    forced = context.options.expert.max_streams is not None
    chosen = context.executor == "linear" or forced  # an order that needs no evidence
    in_order = schedule_in_order(planned, context)
    return replace(in_order, unmeasured=not chosen)


_RUNS_AT_ONCE = 16  # runs that have workers of their own on a far backend


def queues_of(
    context: CompileContext, workers: int, backends: Sequence[Backend] | None = None
) -> tuple[list[Queue], dict[str, int]]:
    """Return a queue with up to ``workers`` for the host and one for each of ``backends``, by
    default all, with a memory of its own; and the indices of the latter by name."""
    from penstock.executors.task_loop import Queue

    remote = [b for b in (context.backends if backends is None else backends) if b.memory != HOST]
    # The contract allows each run this number of workers; their threads only wait for the backend.
    queues = [Queue(b.workers, pool(b.name, _RUNS_AT_ONCE * b.workers)) for b in remote]
    return [Queue(workers, context.pool), *queues], {b.name: i for i, b in enumerate(remote, 1)}


def bind_interpreter(feeds: Feeds, context: CompileContext) -> Executor:
    """Return the interpreter on NumPy for a graph whose nodes run unchanged."""
    from penstock.executors.interpret import InterpretExecutor

    # The plan is only for its table of steps and types: nodes are interpreted one by one.
    plan = compile_plan(feeds.graph, [NumpyBackend()], {}, planned=False)
    threads = context.options.threads
    return InterpretExecutor(feeds.graph, plan, context.hosts, context.limits, threads=threads)


# Tasks or streams are used if their measured time is at most this part of that of one order.
TRIED = {"auto": 0.95, "parallel": 1.02, "streams": 1.02}


@dataclass(frozen=True)
class Programmed:
    """The program of a schedule, and that of its rival."""

    schedule: Scheduled
    program: Program
    rival: Programmed | None = None


ALWAYS_CHECKED = False
"""Whether to check plans that are not from a file: an error in one is our bug."""


def generate_program(
    schedule: Scheduled, context: CompileContext, *, observed: bool = False
) -> Programmed:
    """Write the plan as Python source, with calls of observers if ``observed``."""
    if ALWAYS_CHECKED:
        from penstock.plan.check import check_schedule

        check_schedule(schedule.plan, schedule.arena_plan, schedule.tasks)
    form = ProgramForm(observed=observed, capture=context.options.expert.capture)
    limits, memory = context.limits, context.options.memory_bytes
    if memory is not None:
        limits = limits.within(memory - schedule.plan.constant_bytes)
    program = write_program(
        schedule.plan, schedule.arena_plan, limits, tasks=schedule.tasks, form=form
    )
    # Text first, memory last: a bound program holds an arena.
    rival = None if schedule.rival is None else generate_program(schedule.rival, context)
    return Programmed(schedule, program, rival)


def generate_saved(schedule: Scheduled, context: CompileContext) -> Programmed:
    """``generate_program`` for a graph from a file, which is not trusted: its plan is checked even
    if its schedule was chosen here."""
    from penstock.plan.check import check_saved

    check_saved(schedule.plan, schedule.arena_plan, schedule.tasks)
    return generate_program(schedule, context)


def bind(programmed: Programmed, context: CompileContext) -> Executor:
    """Bind a program to memory."""
    schedule, options = programmed.schedule, context.options
    if schedule.tasks is None:
        return LinearExecutor(
            programmed.program,
            context.hosts,
            context.limits,
            options.threads,
            schedule.name,
            fixed_threads=options.expert.fixed_threads,
        )
    from penstock.executors.parallel import ParallelExecutor, TaskWorkers

    workers = TaskWorkers(schedule.queues, schedule.worthwhile, schedule.devices)
    return ParallelExecutor(
        programmed.program, context.hosts, context.limits, workers, options.threads, schedule.name
    )
