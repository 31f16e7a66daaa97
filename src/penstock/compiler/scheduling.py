"""The stages of the compile line that decide by costs when steps run. Plans that were saved in one
order do not need them and do not import this module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from penstock.backends.base import Backend
from penstock.backends.kernels import KernelTable
from penstock.compiler.stages import (
    TRIED,
    CompileContext,
    Planned,
    Programmed,
    Scheduled,
    bind,
    generate_program,
    queues_of,
    schedule_in_order,
)
from penstock.core.records import replace
from penstock.executors.base import CompiledExecutor, Executor
from penstock.executors.linear import LinearExecutor
from penstock.executors.task_loop import Queue
from penstock.host.threads import OVERHEADS
from penstock.ir.contract import contract_of
from penstock.ir.graph import Graph, Node
from penstock.ir.op import Role
from penstock.ops.internal.transfer import is_transfer
from penstock.plan.arena_layout import ArenaPlan, plan_arena_for_tasks
from penstock.plan.arrangement import arrange
from penstock.plan.builder import compile_plan
from penstock.plan.grouping import ClusteredGrouping, Seconds, is_chain, least_makespan
from penstock.plan.tasks import Grouping, Tasks, are_asynchronous
from penstock.tuning.measure import CostModel

if TYPE_CHECKING:
    from penstock.observers.profile import Profile
    from penstock.plan.plan import StepTable
    from penstock.plan.streams import StreamSchedules
    from penstock.tuning.run_sampler import MeasuredRuns, RunSampler


def schedule_step_by_step(planned: Planned, context: CompileContext) -> Scheduled:
    """Make each step a task of its own, without an arena: each step allocates its results, which
    are freed after their last reader."""
    plan = planned.plan
    order = ArenaPlan(tuple(range(len(plan.steps))), {}, {}, 0, 0)
    tasks = arrange(plan, Grouping())
    # A run whose caller does not wait continues there when an asynchronous kernel has ended.
    workers = context.pool if are_asynchronous(plan.steps) else None
    return Scheduled(plan, order, planned.profiler, "dataflow", tasks, [Queue(1, workers)], inf)


# A parallel schedule must beat the serial one in simulation, for "auto" by a tenth. Then its
# measured time may be at most this part of the serial one.
_SIMULATED = {"auto": 0.9, "parallel": 1.0, "streams": 1.0}
# "auto" uses streams if they take at most this part of the time of tasks.
_CLEARLY = 0.95


def schedule_tasks(planned: Planned, context: CompileContext) -> Scheduled:
    """Group steps into tasks for several workers, or keep one order if that is as fast."""
    return _with_rival(_as_tasks(planned, context), planned, context)


def _as_tasks(planned: Planned, context: CompileContext) -> Scheduled:
    plan, costs = planned.plan, planned.costs
    in_order = partial(schedule_in_order, planned, context)
    if are_asynchronous(plan.steps):
        return in_order()
    # If kernels have threads of their own, workers seldom gain: measure only on request. Most
    # models return here, since some of their nodes have not been measured.
    is_requested = context.executor == "parallel" or context.options.autotune
    threaded = any(backend.threads_of_caller for backend in context.hosts)
    profiler = planned.profiler
    if threaded and not is_requested and profiler is not None and not profiler.complete_already():
        return replace(in_order(), unmeasured=True)
    if not _grouping(plan, context.seconds(costs, 1), context).promising:
        return replace(in_order(), unmeasured=True)
    return _schedule_measured(planned, context) or in_order()


def schedule_streams(planned: Planned, context: CompileContext) -> Scheduled:
    """Assign steps to as many streams as pay off or ``max_streams``, or keep one order."""
    return _with_rival(_as_streams(planned, context), planned, context)


def _with_rival(schedule: Scheduled, planned: Planned, context: CompileContext) -> Scheduled:
    """Return a schedule of tasks with the plan in one order as its rival, if there are costs to
    compare. The rival has no profiler, which would hold the values that it measures on."""
    if schedule.margin == inf or planned.profiler is None:
        return schedule
    alone = Planned(planned.plan, planned.costs)
    return replace(schedule, rival=schedule_in_order(alone, context))


def _as_streams(planned: Planned, context: CompileContext) -> Scheduled:
    plan, costs = planned.plan, planned.costs
    in_order = partial(schedule_in_order, planned, context)
    one, most = context.seconds(costs, 1), context.options.expert.max_streams
    streams, forced = stream_schedules(plan, one, most, context), most is not None
    # The user has chosen this schedule, so it needs no rival.
    if forced and not streams.one:
        return _on_streams(planned, context, streams)
    if are_asynchronous(plan.steps):
        return in_order()
    if streams.one:
        return replace(in_order(), unmeasured=not forced)
    return _schedule_measured(planned, context) or in_order()


def _grouping(plan: StepTable, seconds: Seconds, context: CompileContext) -> ClusteredGrouping:
    """Return how the steps of a plan form tasks for the workers of the session."""
    queues, queue_of = queues_of(context, context.workers)
    return context.grouping(plan, seconds, [queue.workers for queue in queues], queue_of)


def _schedule_measured(planned: Planned, context: CompileContext) -> Scheduled | None:
    """``schedule_by_costs`` after measuring missing costs, for as many trials as the user asks for
    or else for a few runs' time. Steps run in order if that is too short to obtain costs."""
    profiler = planned.profiler
    if profiler is None or profiler.complete_already():
        return schedule_by_costs(planned, context)
    if context.options.autotune or not context.one_memory:
        # With several memories, placement has measured all permitted costs with one thread.
        runs = None if context.options.autotune else 1
        profiler.complete(single_threaded=True, brief_runs=runs)
        profiler.complete(single_threaded=False, brief_runs=runs)
        return schedule_by_costs(planned, context)
    serial = profiler.measure_briefly()
    if serial is None:
        return replace(schedule_in_order(planned, context), unmeasured=True)
    return schedule_by_costs(planned, context, serial)


def schedule_by_costs(
    planned: Planned, context: CompileContext, serial: float | None = None
) -> Scheduled | None:
    """Return a schedule on tasks or streams, as the requested executor allows, whose simulation
    beats one order. That order takes ``serial`` seconds, by default the sum of its steps. Return
    None if no schedule beats it."""
    plan, costs, executor = planned.plan, planned.costs, context.executor
    one = context.seconds(costs, 1)
    if serial is None:
        # Kernels have all threads in one order but not in tasks: each schedule is judged by the
        # costs for its own number of threads.
        serial = _grouping(plan, context.seconds(costs, None), context).serial
    most = _SIMULATED[executor] * serial
    grouping = _grouping(plan, one, context)
    streams = stream_schedules(plan, one, context.options.expert.max_streams, context)
    on_streams = streams.of(plan.steps).makespan
    # Tasks are about as fast as streams, and more robust to wrong costs.
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
        plan_arena_for_tasks(plan, tasks, context.options.expert.memory_planner),
        planned.profiler,
        "parallel",
        tasks,
        queues_of(context, context.workers)[0],
        grouping.hand_over_s,
        margin=TRIED[context.executor],
    )


def stream_schedules(
    plan: StepTable, seconds: Seconds, most: int | None, context: CompileContext
) -> StreamSchedules:
    """Return schedules of a plan on as many streams as pay off, or on up to ``most``."""
    from penstock.plan.streams import StreamSchedules

    queues, queue_of = _stream_queues(context)
    # On a far backend, streams beyond the number of its workers would only wait.
    of_each = {q: queue.workers for q, queue in enumerate(queues)} if queue_of else context.workers
    return StreamSchedules(
        plan,
        seconds,
        most or of_each,
        forced=most is not None,
        devices=context.accelerators,
        queues=queue_of,
    )


def _stream_queues(context: CompileContext) -> tuple[list[Queue], dict[str, int]]:
    """Return the queues of streams for the host and for far backends without a device, whose
    kernels occupy a thread until they end, and the queue's index by the backend's name."""
    far = [backend for backend in context.backends if backend.device is None]
    return queues_of(context, context.workers, far)


def _on_streams(planned: Planned, context: CompileContext, streams: StreamSchedules) -> Scheduled:
    from penstock.plan.streams import stream_programs, stream_segments

    plan, planner = planned.plan, context.options.expert.memory_planner
    return Scheduled(
        plan,
        plan_arena_for_tasks(plan, stream_segments(plan, streams), planner),
        planned.profiler,
        "streams",
        stream_programs(plan, streams),
        _stream_queues(context)[0],
        0.0 if streams.forced else OVERHEADS.hand_over_s,
        streams.devices,
        inf if streams.forced or streams.devices else TRIED[context.executor],
    )


def observed_executor(
    context: CompileContext,
    graph: Graph,
    placed: Mapping[Node, Backend],
    kernels: KernelTable,
    threads: int,
) -> Executor:
    """Return the executor that measures the nodes of a graph: the dataflow executor for a session
    with that option, else one order in planned memory, as in most plans."""
    # Costs are for a given number of threads, not for that of the session's runs.
    context = replace(context, options=replace(context.options, threads=threads))
    step_by_step = context.executor == "dataflow"
    backends = context.backends
    plan = compile_plan(graph, backends, placed, planned=not step_by_step, kernels=kernels)
    schedule = schedule_step_by_step if step_by_step else schedule_in_order
    scheduled = schedule(Planned(plan, context.costs), context)
    return bind(generate_program(scheduled, context, observed=True), context)


def bind_sampled(programmed: Programmed, context: CompileContext) -> Executor:
    """``bind``, with runs as trials: those of an unmeasured plan in one order show whether tasks
    are faster, and those of tasks whether one order is."""
    schedule, executor = programmed.schedule, bind(programmed, context)
    if programmed.rival is not None:
        return _bind_tried(schedule, programmed.rival, executor, context)
    if schedule.unmeasured and context.workers > 1 and isinstance(executor, LinearExecutor):
        executor.sampler = run_sampler(programmed, context)
    return executor


def _bind_tried(
    schedule: Scheduled, rival: Programmed, executor: Executor, context: CompileContext
) -> Executor:
    """Return the executor of tasks, or the plan in one order if that is faster. Compare them ahead
    of the first run if the user asks for measurements and the plan assigns no variables, else
    alternately in the first runs."""
    from penstock.tuning.run_sampler import RunSampler
    from penstock.tuning.trial import FEWEST, Recipe, converse, faster, judged_again

    # Bound only for the duration of a trial: two executors would hold two arenas.
    recipe: Recipe = partial(bind, rival, context)
    used, first, margin = executor, 0, schedule.margin
    profiler = schedule.profiler if context.options.autotune else None
    # Additional runs would assign to the session's variables.
    if profiler and not any("store" in step.node.attrs for step in schedule.plan.walk()):
        (used, other), first = faster(executor, recipe(), profiler.values, margin), FEWEST
        assert isinstance(other, CompiledExecutor)
        recipe = other.recipe()
    assert isinstance(used, CompiledExecutor)
    if used is executor:  # the margin applies to tasks
        margin = converse(margin)
    sampler = RunSampler()
    sampler.begin(lambda switch, _: judged_again(recipe, margin, switch, first))
    used.sampler = sampler
    return used


def _may_overlap(plan: StepTable, context: CompileContext) -> bool:
    """Whether user-defined kernels are in loops whose iterations could overlap."""
    if context.executor != "auto" or context.workers == 1:
        return False
    if not any(s.node.op.role is Role.LOOP for s in plan.steps):
        return False
    # Penstock's own kernels share their work among threads. Only user-defined kernels may wait, or
    # keep one core busy while others idle.
    steps = [step for step in plan.walk() if step.backend and not is_transfer(step.node)]
    return any(contract_of(s.node, context.by_name[s.backend], types=()) for s in steps)


def run_sampler(programmed: Programmed, context: CompileContext) -> RunSampler | None:
    """Return the sampler that learns in runs whether tasks are faster, or None if they cannot."""
    plan, program = programmed.schedule.plan, programmed.program
    # Steps that wait for one another leave nothing to run in parallel unless iterations overlap.
    several = not is_chain(plan) or _may_overlap(plan, context)
    # Costs that the user gives must not be corrected by runs.
    if not several or not context.measures:
        return None
    from penstock.tuning.run_sampler import Choice, RunSampler, sampled

    def observed() -> Executor:
        timed = program.with_observers(inputs=False)
        return LinearExecutor(timed, context.hosts, context.limits, threads=1)

    def may_pay(serial: float, profile: Profile) -> bool:
        if context.accelerators or _may_overlap(plan, context):
            return True
        # The fastest execution of each node, which other threads and processes delayed least.
        best = {entry.step.node: entry.best for entry in profile}
        least = least_makespan(plan, lambda step: best.get(step.node, 0.0), context.workers)
        return least <= _SIMULATED[context.executor] * serial

    # The sampler has its own costs, without the values on which this compilation's profiler
    # measures, and its own kernels, since these hold weights that the plan does not.
    costs, margin = CostModel(context.backends), TRIED[context.executor]
    sampler = RunSampler()
    sampler.begin(partial(sampled, Choice(plan, costs, observed, may_pay, margin, context.pool)))
    return sampler


def long_nodes(measured: MeasuredRuns, context: CompileContext) -> frozenset[str]:
    """Return the names of nodes that took long in runs, if iterations of the plan's loops could
    overlap because of them."""
    long = [e.step.node.name for e in measured.profile if e.best >= OVERHEADS.long_s]
    return frozenset(long if long and _may_overlap(measured.plan, context) else ())


def reschedule(measured: MeasuredRuns, context: CompileContext) -> Scheduled | None:
    """Return a schedule on tasks or streams that should beat the measured order, or None."""
    planned = Planned(measured.plan, measured.costs)
    return schedule_by_costs(planned, context, measured.seconds)
