"""``session.inspect``: how the plans of a session run, without changing what runs do."""

# tests: tests/session/test_inspection.py tests/session/test_hints.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.compiler.compiler import Compiler
from penstock.compiler.options import CompileOptions, InputShapes
from penstock.compiler.subgraphs import Subgraphs
from penstock.core import capability
from penstock.core.errors import PenstockError, check_count, wrong_type
from penstock.core.records import NamedTuple
from penstock.core.types import Feeds, JsonObject, RunValues, TensorType
from penstock.executors.base import Executor, OnWorkers
from penstock.host.threads import Places
from penstock.ir.describe import format_bytes
from penstock.ir.graph import Model
from penstock.plan.plan import Step, StepTable
from penstock.session.executors import Executors
from penstock.session.facts import EffectiveOptions, Memory, Stats, effective_options
from penstock.session.plan_cache import PlanCache, counter_value

if TYPE_CHECKING:
    from penstock.backends.base import Backend
    from penstock.inspect.forecast import Forecast
    from penstock.inspect.gantt import Schedule
    from penstock.inspect.report_page import Report
    from penstock.observers.profile import Profile
    from penstock.tuning.reasons import Reasons
    from penstock.tuning.worker_placement import ClusterForecast


class SessionParts(NamedTuple):
    """The parts of a session that inspection uses. ``runs`` counts its runs."""

    model: Model
    options: CompileOptions
    compiler: Compiler
    subgraphs: Subgraphs
    plans: PlanCache
    executors: Executors
    places: Places

    @property
    def effective(self) -> EffectiveOptions:
        """The options in effect for the plan that was used last."""
        return effective_options(self.compiler.context, self.executors.latest)

    @property
    def reasons(self) -> Reasons:
        """Return why steps run on their backends, by the costs that are known now."""
        from penstock.tuning.reasons import Reasons

        context = self.compiler.context
        return Reasons(context.backends, context.options.place or {}, context.costs)

    @property
    def rows_text(self) -> str:
        """Return whether hidden rows are left out, or why they are not."""
        from penstock.compiler.padding import rows_text

        main, plan = self.subgraphs.main, self.executors.latest.table
        types = [plan.slots[i].type for i in plan.inputs]
        static = [t for t in types if isinstance(t, TensorType) and t.static]
        values = [np.broadcast_to(np.zeros((), t.dtype), t.dims) for t in static]
        packs = self.subgraphs.packs if len(static) == len(main.names) else ""
        return rows_text(self.compiler, main, values, packs)

    def memory_text(self, executor: Executor) -> str:
        """Return a text on the session's memory bound (``memory=``) and the part of it that a run
        of a plan needs."""
        assert self.plans.memory is not None
        limit, held = self.plans.memory.limit, self.plans.memory.held
        needs: int = getattr(executor, "needs_bytes", executor.run_bytes)
        allowed = f"memory= {format_bytes(limit)}: {format_bytes(held)} for weights and plans, "
        rows = getattr(executor, "rows", 0)
        return (
            f"{allowed}{format_bytes(needs)} for a run{f' of {rows} rows at a time' * bool(rows)}"
        )

    def watched(self, feeds: Feeds | None) -> tuple[Executor, Executor, RunValues]:
        """Return the executor for these feeds, an executor of the same plan with observers, and
        the values that both take."""
        executor, observe, values = self._chosen(feeds)
        return executor, observe(), values

    def profile(self, feeds: Feeds | None, runs: int) -> Profile:
        """Profile the plan for these feeds: where its time goes."""
        from penstock.tuning.measure import profile_plan

        executor, observe, values = self._chosen(feeds)
        if (on_workers := capability(executor, OnWorkers)) is not None:
            return on_workers.profile(values, runs)
        return profile_plan(executor, observe(), values, runs, self.compiler.context.backends)

    def _chosen(self, feeds: Feeds | None) -> tuple[Executor, Callable[[], Executor], RunValues]:
        """Return the executor for these feeds, a function that compiles the same plan with
        observers, and the values."""
        if self.plans.closed:
            raise PenstockError("the session is closed")
        request, key, values = self.subgraphs.resolve(feeds, None, None)
        executor = self.executors.get(request.subgraph, key, values, exact=True)
        observe = partial(self.plans.get, request.subgraph, key, True, executor.observed)
        return executor, observe, values


class Inspectable(Protocol):
    """A ``penstock.Session``."""

    @property
    def inspect(self) -> Inspection: ...


class Inspection:
    """Inspection of the plans of a session: its attribute ``inspect``.

    The last plan is the one that was used last for the outputs of the model or, if there is none,
    for other values. It is compiled now if the session has none and all input dims are known;
    otherwise ``InvalidInput`` is raised.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts

    @property
    def executor(self) -> Executor:
        """The executor of the last plan."""
        return self._parts.executors.latest

    @property
    def source(self) -> str:
        """The generated program of the last plan."""
        return self.executor.source

    @property
    def plan(self) -> StepTable:
        """The last plan; for executor "frames", which plans nothing, its steps."""
        return self.executor.table

    @property
    def backends(self) -> Sequence[Backend]:
        """The backends that nodes may run on."""
        return self._parts.compiler.context.backends

    @property
    def effective(self) -> EffectiveOptions:
        """The executor, precision, threads and backends that the last plan really uses."""
        return self._parts.effective

    @property
    def reasons(self) -> Reasons:
        """Why steps run on their backends, by the costs that are known now."""
        return self._parts.reasons

    @property
    def stale(self) -> Sequence[str]:
        """Why saved plans of the session are not used. Libraries that take long to load are
        compared with those of the plans only when a plan needs them."""
        return self._parts.executors.stale

    @property
    def memory(self) -> Memory:
        """Bytes held."""
        executors = self._parts.plans.executors()
        return Memory(
            max((e.table.constant_bytes for e in executors), default=0),
            sum(e.arena_bytes for e in executors),
            sum(e.plan_bytes for e in executors),
            len(executors),
            sum(e.table.capacity_bytes for e in executors),
        )

    @property
    def stats(self) -> Stats:
        """Counters of the session."""
        plans, opened = self._parts.plans, self._parts.executors.opened
        kept, runs = len(plans.executors()), counter_value(plans.runs)
        compiled = max(0, plans.made - opened)  # may be less for a moment while a plan is opened
        pending = self._parts.places.taken
        return Stats(compiled, opened, plans.hits, plans.evicted, kept, runs, pending)

    def explain(self, *, reasons: bool = False) -> str:
        """Describe how the last plan will run: its executor, memory, and steps with their backends.

        Args:
            reasons: Say also why each step is on its backend, by the costs that are known now, and
                whether rows are left out that a mask hides, or which node stands in the way.
        """
        from penstock.inspect.explain import format_plan

        executor = self.executor
        sequences = {**getattr(executor, "sequences", {})}  # of executors with a program
        about = self.effective.line(self._parts.options)
        for name, graph in getattr(executor, "captures", {}).items():
            sequences[name] = graph.steps
            about += f"\n{name}: {len(graph.steps)} steps, {graph.told}"
        if self._parts.plans.memory is not None:
            about += f"\n{self._parts.memory_text(executor)}"
        reason = self.reasons.of if reasons else None
        if reasons:
            about += f"\n{self._parts.rows_text}"
        table, arena_plan, tasks = executor.table, executor.arena_plan, executor.tasks
        return format_plan(table, arena_plan, tasks, sequences, about, reason)

    def describe(self) -> JsonObject:
        """Return the last plan as plain data: the requested options and those in effect, its
        memory, the device graphs into which it is captured or why it is not, and its steps. Each
        step has the ``nodes`` of the model that it computes, its backend and the reason for it,
        types, operations and bytes. ``nodes_without_step`` are nodes whose results are constants,
        views, or not needed, or that other nodes replace."""
        from dataclasses import asdict

        from penstock.inspect.plan_document import plan_document

        executor, options = self.executor, self._parts.options
        asked: dict[str, Any] = {"executor": options.executor, "precision": options.precision}
        asked |= {"threads": options.threads, "devices": options.devices}
        effective = asdict(self.effective)
        document = plan_document(executor.table, executor.arena_plan, self.reasons.of)
        graphs = [
            {"name": name, "steps": len(graph.steps), "state": graph.state, "reason": graph.reason}
            for name, graph in getattr(executor, "captures", {}).items()
        ]
        # A step has the names of all nodes that were fused into it.
        computed = {name for step in document["steps"] for name in step["nodes"]}
        names = [node.name or node.label for node in self._parts.model.graph.walk()]
        gone = [name for name in names if name not in computed]
        about = {"asked": asked, "effective": effective, "graphs": graphs}
        return {**about, **document, "nodes_without_step": gone}

    def report(
        self, feeds: Feeds | None = None, *, runs: int = 5, against: Inspectable | None = None
    ) -> Report:
        """Run the model a few times and return a page about it (``Report.save``): its graph, time
        line, arena, steps and roofline, linked to one another, in one HTML file.

        Nothing is kept in the table of costs. Raises as ``Session.run`` does.

        Args:
            feeds: Inputs by name, as ``run`` takes them.
            runs: Runs in which steps are measured.
            against: Another session of the same model, made with other options. Its runs are
                measured too, and the values of both are compared: where they differ most, and what
                each took.
        """
        from penstock.session.report import make_report

        check_count("runs", runs)
        other = None if against is None else getattr(against, "inspect", None)
        if against is not None and not isinstance(other, Inspection):
            raise wrong_type("against", against, "a Session")
        return make_report(self._parts, feeds, runs, other and other._parts)

    def forecast(self, workers: int) -> Forecast:
        """The simulated time of the last plan on several workers, by measured costs
        (``Session.profile``), or else estimated ones.

        Args:
            workers: Their number; each has one thread.
        """
        from penstock.inspect.forecast import forecast

        check_count("workers", workers)
        context = self._parts.compiler.context
        costs, by_name = context.costs, context.by_name

        def is_measured(step: Step) -> bool:
            backend = by_name.get(step.backend)
            return backend is not None and costs.is_measured(step.node, backend, 1)

        return forecast(self._own_plan, context.seconds(costs, 1), workers, is_measured)

    def forecast_on_cluster(self, shapes: InputShapes | None = None) -> ClusterForecast:
        """Forecast the time of a run on the workers of ``cluster=``: nodes as they are placed now,
        by measured costs, or else estimated ones. Nothing is run or sent. Raises ``InvalidInput``
        for shapes that the model cannot have, ``Unsupported`` for graphs with loops of TensorFlow's
        frames.

        Args:
            shapes: The dims of inputs by name; those that are not given are as the model has them.
        """
        parts = self._parts
        if parts.options.cluster is None:
            raise PenstockError("the session has no cluster: compile it with cluster=")
        values = parts.executors.values_of(shapes or {})
        return parts.compiler.forecast_on_cluster(parts.subgraphs.main, values)

    def schedule(self, max_streams: int | None = None) -> Schedule:
        """The static schedule of the last plan on streams, and of its blocks with streams of their
        own, by measured costs (``Session.profile``), or else estimated ones. Its title says if
        another executor runs the plan, as one order does where streams gain nothing.

        ``to_svg`` and ``to_html`` of the schedule draw it.

        Args:
            max_streams: Streams that may be used whether they pay off or not; by default those of
                the expert option ``max_streams``, or else as many as pay off.
        """
        from penstock.compiler.scheduling import stream_schedules
        from penstock.inspect.forecast import check_static
        from penstock.inspect.gantt import charts

        if max_streams is None:
            max_streams = self._parts.options.expert.max_streams
        else:
            check_count("max_streams", max_streams)
        plan = self._own_plan
        check_static(plan)
        context = self._parts.compiler.context
        seconds = context.seconds(context.costs, 1)
        streams = stream_schedules(plan, seconds, max_streams, context)
        return charts(plan, streams, self.executor.name)

    @property
    def _own_plan(self) -> StepTable:
        if capability(self.executor, OnWorkers) is not None:
            raise PenstockError(
                "the workers of a cluster plan its steps: inspect.forecast_on_cluster() simulates "
                "them, and profile() measures them"
            )
        return self.plan

    def __repr__(self) -> str:
        return f"<inspection of {self._parts.model.entry!r}>"


# Hints for attributes that a session lacks: members that moved, and those of other runtimes.

_RENAMED = {"granted": "session.effective", "latest": "session.inspect.executor"}

# Methods of ONNX Runtime's sessions, and what replaces them here.
_ELSEWHERE = {
    "get_inputs": "session.inputs",
    "get_outputs": "session.outputs",
    "get_modelmeta": "session.model.metadata and session.model.about",
    "get_providers": "session.effective.backends",
    "io_binding": "session.run(feeds, out=...)",
    "run_with_iobinding": "session.run(feeds, out=...)",
    "end_profiling": "session.run(feeds, trace=penstock.Trace())",
}


def hint_for(name: str) -> str:
    """Return the end of the message that a session has no attribute ``name``."""
    if not name.startswith("_") and hasattr(Inspection, name):
        return f"; it is session.inspect.{name}"
    if name in _RENAMED:
        return f"; it is {_RENAMED[name]}"
    if name in _ELSEWHERE:
        return (
            f"; that is {_ELSEWHERE[name]} here, and penstock.compat.onnxruntime has ONNX "
            "Runtime's interface"
        )
    return ""
