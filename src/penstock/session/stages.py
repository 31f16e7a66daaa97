"""The stages of the compile line: each is a function from one frozen record to the next.

::

    Feeds -> specialise -> optimise -> lower -> plan -> schedule -> generate_program -> bind

    Feeds         a graph and the values of its inputs
    Feeds         the graph copied, with the shapes of the values; then optimised for them
    Lowered       the graph with fused nodes and transfers, and the backend of each node
    Planned       steps and slots
    Scheduled     tasks, and the offsets of slots in the arena
    Programmed    Python source
    Executor      the program, bound to memory

A stage reads the record that it is given and the ``CompileContext``. The one copy of the graph is
made by ``specialise``; passes then change that copy in place. No stage calls another one, but to
compile a second plan: in one order, to compare with, or of a graph between frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.algorithms.dag import on_cycles
from penstock.algorithms.records import dataclass
from penstock.analysis.sizes import check_sizes
from penstock.analysis.type_inference import infer_types
from penstock.backends.base import Backend, Device, copier
from penstock.backends.dynamic_shapes import plausible
from penstock.backends.kernels import KernelTable, placed_kernels
from penstock.backends.numpy import NumpyBackend
from penstock.codegen.writer import Program, write_program
from penstock.executors.base import Executor
from penstock.executors.linear import LinearExecutor
from penstock.host.threads import Workers, core_budget, pool
from penstock.ir.contract import contract_of
from penstock.ir.graph import Graph, Node, Value, clone
from penstock.limits import Limits
from penstock.ops.internal.transfer import HOST
from penstock.ops.work_estimate import worth_threads
from penstock.plan.arena_layout import (
    ArenaPlan,
    SavedArena,
    plan_arena,
    plan_arena_for_tasks,
    restored_arena,
)
from penstock.plan.builder import compile_plan
from penstock.plan.grouping import (
    HAND_OVER_S,
    ClusteredGrouping,
    OrderedGrouping,
    Seconds,
    is_chain,
)
from penstock.plan.plan import Plan
from penstock.plan.tasks import Grouping, Tasks, are_asynchronous, arrange
from penstock.session.options import CompileOptions
from penstock.tuning.measure import CostModel
from penstock.types import OptionalType, TensorType, Type

if TYPE_CHECKING:
    from penstock.executors.task_loop import Queue
    from penstock.passes.context import FusionPolicy, PassContext, Place, Unraised
    from penstock.plan.streams import StreamSchedules
    from penstock.tuning.run_sampler import Adopt, RunSampler


def _no_adoption() -> None:
    """For sessions that keep no executor."""


@dataclass(frozen=True)
class CompileContext:
    """What all stages may read: the session's options, backends, limits and functions."""

    options: CompileOptions
    backends: tuple[Backend, ...]
    limits: Limits
    functions: Mapping[str, Graph] = field(default_factory=dict)
    widened: dict[Value, Value] = field(default_factory=dict)
    halves: dict[tuple[Value, Value | None], Value | None] = field(default_factory=dict)
    adopt: Adopt = _no_adoption

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Full names of the virtual devices, if any."""
        if self.options.devices is None:
            return ()
        from penstock.ir.device_name import local

        return tuple(local(self.options.devices))

    @property
    def executor(self) -> str:
        """The name of the executor that was asked for."""
        return "frames" if self.devices else self.options.executor

    @cached_property
    def hosts(self) -> list[Backend]:
        """The backends of the host's memory."""
        return [b for b in self.backends if b.memory == HOST] or [NumpyBackend()]

    @cached_property
    def by_name(self) -> dict[str, Backend]:
        """The backends by name."""
        return {backend.name: backend for backend in self.backends}

    @property
    def one_memory(self) -> bool:
        """Whether all backends work on the host's memory."""
        return all(backend.memory == HOST for backend in self.backends)

    def direct(self, source: str, target: str) -> bool:
        """Whether values are copied straight from one backend's memory to another's, by name."""
        return copier(self.by_name[source], self.by_name[target]) is not None

    @property
    def accelerators(self) -> dict[str, Device]:
        """The devices of backends that have one, by the name of the backend."""
        return {b.name: b.device for b in self.backends if b.device is not None}

    @property
    def workers(self) -> int:
        """The number of tasks of one run that may run at the same time on the host."""
        workers = self.pool.size
        if self.options.pool is None:
            workers = min(max(backend.workers for backend in self.hosts), workers)
        return min(workers, self.options.threads or workers)

    @property
    def pool(self) -> Workers:
        """The pool whose threads run tasks on the host."""
        return self.options.pool or pool()

    @property
    def costs(self) -> CostModel:
        """The costs known without measuring."""
        return self.options.cost_model or CostModel(self.backends)

    def seconds(self, costs: CostModel, *, single_threaded: bool) -> Seconds:
        """The cost of a step, as a function."""
        return lambda step: costs.of_step(step, self.by_name, single_threaded)

    def passes(
        self,
        fusion: FusionPolicy | None = None,
        choose_places: Callable[[Graph], Mapping[Node, Place]] | None = None,
        kernels: KernelTable | None = None,
    ) -> PassContext:
        """The context of passes; with ``kernels``, these decide the layouts of values."""
        from penstock.passes.context import PassContext

        placement: dict[Node, Place] = {}
        compiled = None if kernels is None else placed_kernels(kernels, self.backends, placement)
        fuses = any(backend.fuses for backend in self.backends)
        return PassContext(
            limits=self.limits,
            fusion=fusion if fuses else None,
            fold_quantized_weights=not fuses,
            strict=self.options.precision == "strict",
            widened=self.widened,
            halves=self.halves,
            choose_places=choose_places,
            must_stay=partial(_overlapping, self) if self.executor == "auto" else None,
            direct=self.direct,
            after_pass=self.options.after_pass,
            placement=placement,
            compiled=compiled,
        )


# From what a kernel takes on it is worth that iterations overlap in it.
_LONG_S = 200e-6


def _overlapping(context: CompileContext, nodes: Sequence[Node], loop: bool) -> Node | None:
    """The node of a frame for which it is worth that iterations overlap, if they may: one that does
    not wait for itself in the iteration before."""
    readers: list[list[int]] = [[] for _ in nodes]
    place = {node: i for i, node in enumerate(nodes)}
    for node, i in place.items():
        sources = [value.producer for value in node.inputs if value is not None]
        for source in (*sources, *node.control_inputs):
            if source in place:
                readers[place[source]].append(i)
    circular = set(on_cycles(readers)) if loop else place.values()
    return next((n for n in nodes if place[n] not in circular and _overlaps(context, n)), None)


def _overlaps(context: CompileContext, node: Node) -> bool:
    """Whether the kernel of a node is asynchronous, or takes long by its backend's estimate. Those
    of Penstock are not, and share their work among threads where it is much."""
    types = [None if value is None else value.type for value in node.inputs]
    for backend in context.hosts:
        if contract_of(node, backend) is None:
            continue
        try:
            kernel = backend.kernel(node, types)
            seconds = backend.seconds(node)
        except Exception:  # the plan raises it, unless the node may never run
            return False
        if kernel is not None:
            alone = context.workers == 1 or backend.threads_of_caller
            return kernel.begin is not None or (not alone and _LONG_S <= seconds < inf)
    return False


@dataclass(frozen=True)
class Feeds:
    """A graph, and the values of its inputs; without their contents, these may be placeholders of
    the right shape."""

    graph: Graph
    values: Sequence[Any]
    unraised: Sequence[Unraised] = ()
    """TensorFlow's primitives that structured control flow could not replace."""
    refined: bool = False
    """Whether the values have added shapes or dtypes to the graph."""

    @property
    def types(self) -> list[Type]:
        """The types of the inputs for these values."""
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


def specialise(feeds: Feeds, context: CompileContext) -> Feeds:
    """Copy the graph, and give the inputs of the copy the types of the values."""
    graph = clone(feeds.graph)
    for value, input_type in zip(graph.inputs, feeds.types, strict=True):
        value.type = input_type
    return replace(feeds, graph=graph, refined=feeds.add_shapes)


def infer(feeds: Feeds, context: CompileContext) -> Feeds:
    """Infer types, for graphs whose nodes must run as they are."""
    infer_types(feeds.graph)
    check_sizes(feeds.graph, context.limits)
    return feeds


@dataclass(frozen=True)
class SavedPlan:
    """What a file has of a plan: the graph after all passes, the backend of each node by name, and
    places in the arena, if its steps run in one order."""

    graph: Graph
    placement: Mapping[Node, str]
    arena: SavedArena | None
    copies: Sequence[object]
    """of constants in orders of backends, which kernels are to use"""


@dataclass(frozen=True)
class Lowered:
    """A graph with fused nodes and transfers, the backend of each node, and its kernels."""

    graph: Graph
    placement: Mapping[Node, Backend]
    kernels: KernelTable
    costs: CostModel
    arena: SavedArena | None = None
    """the order of steps and their places in the arena, if the graph was saved with them"""


def set_threads(graph: Graph, context: CompileContext) -> None:
    """Let kernels be created for the number of threads that runs will most likely have."""
    threads = context.options.threads or core_budget()
    if threads > 1 and not worth_threads(map(plausible, graph.walk())):
        threads = 1
    for backend in context.hosts:
        if backend.threads_of_caller:
            backend.set_threads(threads)


def restore_lowered(saved: SavedPlan, context: CompileContext) -> Lowered:
    """The graph of a plan that was saved, with the backends that it was placed on."""
    set_threads(saved.graph, context)
    placed = {n: context.by_name[name] for n, name in saved.placement.items()}
    return Lowered(saved.graph, placed, KernelTable(), context.costs, saved.arena)


@dataclass(frozen=True)
class Planned:
    """A plan, and the costs of its steps; and an order and places in the arena, if it was saved."""

    plan: Plan
    costs: CostModel
    arena: SavedArena | None = None


def plan_slots(
    lowered: Lowered, context: CompileContext, *, planned: bool = True, inner: bool = False
) -> Planned:
    """Compile a plan; if ``planned``, values of known sizes live in an arena, else all values are
    allocated during the run. An ``inner`` plan is part of another, and may never run."""
    graph, placement, kernels = lowered.graph, lowered.placement, lowered.kernels
    options = {"planned": planned, "inner": inner}
    plan = compile_plan(graph, context.backends, placement, kernels=kernels, **options)
    return Planned(plan, lowered.costs, lowered.arena)


@dataclass(frozen=True)
class Scheduled:
    """When the steps of a plan run, and where its values are in the arena.

    Without ``tasks`` all steps run in the order of the arena plan. Else ``queues`` has the workers
    of the tasks, of which another one is asked for if a task takes at least ``worthwhile`` seconds;
    ``devices`` have the streams of tasks, by name. With ``trial`` the executor is used only if a
    run of it takes at most this part of the time of the plan in one order. ``undecided``: only
    estimates speak for this order, and runs are to show whether tasks are faster.
    """

    plan: Plan
    arena_plan: ArenaPlan
    costs: CostModel
    name: str
    tasks: Tasks | None = None
    queues: Sequence[Queue] = ()
    worthwhile: float = 0.0
    devices: Mapping[str, Device] = field(default_factory=dict)
    trial: float | None = None
    undecided: bool = False


def schedule_in_order(planned: Planned, context: CompileContext, name: str = "linear") -> Scheduled:
    """All steps in one order that keeps few bytes alive; as tasks, if one function cannot run them
    all (``OrderedGrouping``)."""
    plan, planner = planned.plan, context.options.memory_planner
    parallel = context.executor == "parallel" and are_asynchronous(plan.steps)
    if OrderedGrouping(plan).one:
        arena = None if planned.arena is None else restored_arena(plan, planned.arena)
        return Scheduled(plan, arena or plan_arena(plan, planner), planned.costs, name)
    queues, queue_of = _queues(context, context.workers) if parallel else _queues(context, 1, [])
    tasks = arrange(plan, OrderedGrouping(plan, queue_of))
    arena_plan = plan_arena_for_tasks(plan, tasks, planner)
    name, worthwhile = ("parallel", HAND_OVER_S) if parallel else (name, inf)
    return Scheduled(plan, arena_plan, planned.costs, name, tasks, queues, worthwhile)


def _queues(
    context: CompileContext, workers: int, backends: Sequence[Backend] | None = None
) -> tuple[list[Queue], dict[str, int]]:
    """A queue with up to ``workers`` for the host and one for each of ``backends``, by default all,
    that has a memory of its own; and the numbers of the latter by name."""
    from penstock.executors.task_loop import Queue

    away = [b for b in (context.backends if backends is None else backends) if b.memory != HOST]
    queues = [Queue(b.workers, pool(b.name, b.workers)) for b in away]
    return [Queue(workers, context.pool), *queues], {b.name: i for i, b in enumerate(away, 1)}


def schedule_step_by_step(planned: Planned, context: CompileContext) -> Scheduled:
    """Each step as a task of its own, with nothing planned: each value is allocated by its step and
    goes with its last reader."""
    from penstock.executors.task_loop import Queue

    plan = planned.plan
    order = ArenaPlan(tuple(range(len(plan.steps))), {}, {}, 0, 0)
    tasks = arrange(plan, Grouping())
    # A run whose caller does not wait goes on there when an asynchronous kernel has ended.
    workers = context.pool if are_asynchronous(plan.steps) else None
    return Scheduled(plan, order, planned.costs, "dataflow", tasks, [Queue(1, workers)], inf)


# A parallel schedule must beat the serial one by simulation, for "auto" by a tenth; and then by
# measured times, of which it may take at most this part.
_SIMULATED = {"auto": 0.9, "parallel": 1.0, "streams": 1.0}
_TRIED = {"auto": 0.95, "parallel": 1.02, "streams": 1.02}
# "auto" takes streams if these take at most this part of the time of tasks.
_CLEARLY = 0.95


def schedule_tasks(planned: Planned, context: CompileContext) -> Scheduled:
    """Steps grouped into tasks for several workers; all in order where that is no slower."""
    plan, costs = planned.plan, planned.costs
    in_order = partial(schedule_in_order, planned, context)
    if are_asynchronous(plan.steps):
        return in_order()
    if planned.arena is not None:  # that was decided before it was saved
        return replace(in_order(), undecided=True)
    queue_of = _queues(context, 1)[1]
    guess = partial(costs.guess, context.by_name)
    if not context.options.grouping(plan, guess, context.workers, queue_of).promising:
        return replace(in_order(), undecided=True)
    # Where kernels have threads of their own, workers seldom gain: measure only if asked to.
    wanted = context.executor == "parallel" or context.options.autotune
    threaded = any(backend.threads_of_caller for backend in context.hosts)
    if threaded and not wanted and not costs.complete_already():
        return replace(in_order(), undecided=True)
    costs.complete(single_threaded=True)
    costs.complete(single_threaded=False)
    return schedule_by_costs(planned, context) or in_order()


def schedule_streams(planned: Planned, context: CompileContext) -> Scheduled:
    """Steps on streams, as many as pay off or ``max_streams``; all in order where one is best."""
    plan, costs = planned.plan, planned.costs
    forced = context.options.max_streams is not None
    in_order = partial(schedule_in_order, planned, context, "streams")
    streams = _streams(planned, context, partial(costs.guess, context.by_name))
    if forced and not streams.one:
        return _on_streams(planned, context, streams)
    if are_asynchronous(plan.steps):
        return in_order()
    if streams.one:
        return replace(in_order(), undecided=not forced)
    costs.complete(single_threaded=True)
    costs.complete(single_threaded=False)
    return schedule_by_costs(planned, context) or in_order()


def schedule_by_costs(
    planned: Planned, context: CompileContext, serial: float | None = None
) -> Scheduled | None:
    """Tasks or streams, as the executor that was asked for allows, whose simulated schedule beats
    one order, that takes ``serial`` seconds, by default as its steps add up to; None if none does.
    """
    plan, costs, executor = planned.plan, planned.costs, context.executor
    one = context.seconds(costs, single_threaded=True)
    queue_of = _queues(context, 1)[1]
    if serial is None:
        all_threads = context.seconds(costs, single_threaded=False)
        serial = context.options.grouping(plan, all_threads, 1, queue_of).serial
    most = _SIMULATED[executor] * serial
    grouping = context.options.grouping(plan, one, context.workers, queue_of)
    streams = _streams(planned, context, one)
    on_streams = streams.of(plan.steps).makespan
    # Tasks are as fast by and large, and better where costs are wrong.
    if executor != "parallel" and not streams.one:
        waits_for_device = executor == "streams" and bool(context.accelerators)
        others = grouping.makespan if executor == "auto" else inf
        if waits_for_device or on_streams <= min(most, _CLEARLY * others):
            return _on_streams(planned, context, streams)
    if executor == "streams" or grouping.makespan > most:
        return None
    tasks = arrange(plan, grouping)
    return None if len(tasks.tasks) <= 1 else _on_tasks(planned, context, grouping, tasks)


def _on_tasks(
    planned: Planned, context: CompileContext, grouping: ClusteredGrouping, tasks: Tasks
) -> Scheduled:
    plan = planned.plan
    return Scheduled(
        plan,
        plan_arena_for_tasks(plan, tasks, context.options.memory_planner),
        planned.costs,
        "parallel",
        tasks,
        _queues(context, context.workers)[0],
        grouping.hand_over_s,
        trial=_TRIED[context.executor],
    )


def _streams(planned: Planned, context: CompileContext, seconds: Seconds) -> StreamSchedules:
    from penstock.plan.streams import StreamSchedules

    most, devices = context.options.max_streams, context.accelerators
    bound = most or context.workers
    forced = most is not None
    return StreamSchedules(planned.plan, seconds, bound, forced=forced, devices=devices)


def _on_streams(planned: Planned, context: CompileContext, streams: StreamSchedules) -> Scheduled:
    from penstock.executors.task_loop import Queue
    from penstock.plan.streams import stream_programs, stream_segments

    plan, planner = planned.plan, context.options.memory_planner
    return Scheduled(
        plan,
        plan_arena_for_tasks(plan, stream_segments(plan, streams), planner),
        planned.costs,
        "streams",
        stream_programs(plan, streams),
        [Queue(context.workers, context.pool)],
        0.0 if streams.forced else HAND_OVER_S,
        streams.devices,
        None if streams.forced or streams.devices else _TRIED[context.executor],
    )


def bind_interpreter(feeds: Feeds, context: CompileContext) -> Executor:
    """The interpreter of a graph whose nodes run as they are, on NumPy."""
    from penstock.executors.interpret import InterpretExecutor

    plan = compile_plan(feeds.graph, [NumpyBackend()], {}, planned=False)
    threads = context.options.threads
    return InterpretExecutor(feeds.graph, plan, context.hosts, context.limits, threads=threads)


@dataclass(frozen=True)
class Programmed:
    """The program of a schedule."""

    schedule: Scheduled
    program: Program


def generate_program(
    schedule: Scheduled, context: CompileContext, *, observed: bool = False
) -> Programmed:
    """Write the plan as Python source; if ``observed``, with calls of observers."""
    plan, arena_plan, tasks = schedule.plan, schedule.arena_plan, schedule.tasks
    program = write_program(plan, arena_plan, context.limits, tasks=tasks, observed=observed)
    return Programmed(schedule, program)


def bind(programmed: Programmed, context: CompileContext) -> Executor:
    """Bind a program to memory; one of tasks only if it proves faster than the plan in one order,
    where the schedule asks for a trial."""
    schedule, threads = programmed.schedule, context.options.threads
    if schedule.tasks is None:
        parts = programmed.program, context.hosts, context.limits
        linear = LinearExecutor(*parts, threads=threads, name=schedule.name)
        if schedule.undecided and context.workers > 1 and not is_chain(schedule.plan):
            linear.sampler = _sampler(programmed, context)
        return linear
    from penstock.executors.parallel import ParallelExecutor

    executor = ParallelExecutor(
        programmed.program,
        context.hosts,
        context.limits,
        schedule.queues,
        schedule.worthwhile,
        threads=threads,
        name=schedule.name,
        devices=schedule.devices,
    )
    if schedule.trial is None:
        return executor
    name = "streams" if context.executor == "streams" else "linear"
    serial = executor_in_order(Planned(schedule.plan, schedule.costs), context, name)
    return schedule.costs.faster(executor, serial, schedule.trial)


def observed_executor(
    context: CompileContext,
    graph: Graph,
    placed: Mapping[Node, Backend],
    kernels: KernelTable,
    threads: int,
) -> Executor:
    """The executor that measures the nodes of a graph: the dataflow executor for a session that
    runs so, else that of one order, in planned memory, as most plans are run."""
    context = replace(context, options=replace(context.options, threads=threads))
    step_by_step = context.executor == "dataflow"
    backends = context.backends
    plan = compile_plan(graph, backends, placed, planned=not step_by_step, kernels=kernels)
    schedule = schedule_step_by_step if step_by_step else schedule_in_order
    scheduled = schedule(Planned(plan, context.costs), context)
    return bind(generate_program(scheduled, context, observed=True), context)


def _sampler(programmed: Programmed, context: CompileContext) -> RunSampler | None:
    """What learns from runs whether a plan in one order is faster as tasks."""
    from penstock.tuning.run_sampler import RunSampler

    if context.options.cost_model is not None:
        return None
    # Without the values that the profiler of this compilation measures on.
    planned = Planned(programmed.schedule.plan, CostModel(context.backends))

    def observed() -> Executor:
        program = programmed.program.with_observers()
        return LinearExecutor(program, context.hosts, context.limits, threads=1)

    def reconsidered(serial: float) -> Executor | None:
        schedule = schedule_by_costs(planned, context, serial)
        if schedule is None:
            return None
        return bind(generate_program(replace(schedule, trial=None), context), context)

    margin = _TRIED[context.executor]
    return RunSampler(planned, observed, reconsidered, margin, context.pool, context.adopt)


def executor_in_order(planned: Planned, context: CompileContext, name: str) -> Executor:
    return bind(generate_program(schedule_in_order(planned, context, name), context), context)
