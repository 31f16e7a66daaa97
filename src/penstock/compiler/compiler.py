"""The compile line: from a graph and the values of its inputs to an executor, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.compiler import stages
from penstock.compiler.stages import CompileContext, Feeds, SavedPlan
from penstock.compiler.subgraph import Subgraph, compile_guard
from penstock.core.checkpoints import THREAD, Progress, checkpoint, report_progress, reporting
from penstock.core.errors import InvalidInput, InvalidModel, wrong_type
from penstock.core.records import replace
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import Executor, LateSampler, Sampler
from penstock.executors.linear import LinearExecutor
from penstock.host.on_demand import imported
from penstock.ir.graph import Graph, is_framed

if TYPE_CHECKING:
    from penstock.compiler.varying_shapes import OpenTypes
    from penstock.passes.context import Unraised
    from penstock.tuning.run_sampler import MeasuredRuns
    from penstock.tuning.worker_placement import ClusterForecast

Stage = Callable[[Any, CompileContext], Any]

# Stages that a saved plan does not need are imported where they run.
_optimize: Stage = imported("penstock.compiler.lowering.optimize_for_shapes")
_lower_graph: Callable[..., RunValue] = imported("penstock.compiler.lowering.lower_graph")
_schedule_step_by_step: Stage = imported("penstock.compiler.scheduling.schedule_step_by_step")
_schedule_tasks: Stage = imported("penstock.compiler.scheduling.schedule_tasks")
_schedule_streams: Stage = imported("penstock.compiler.scheduling.schedule_streams")
_bind_sampled: Stage = imported("penstock.compiler.scheduling.bind_sampled")
_structure_frames: Stage = imported("penstock.compiler.frames.structure_frames")
_build_frames: Stage = imported("penstock.compiler.frames.build_frames")
_structure_for_workers: Stage = imported("penstock.compiler.cluster.structure_for_workers")
_build_on_cluster: Stage = imported("penstock.compiler.cluster.build_on_cluster")

_FOR_SHAPES: tuple[Stage, ...] = (stages.specialize, _optimize)
_PLANNED: tuple[Stage, ...] = (*_FOR_SHAPES, _lower_graph, stages.plan_slots)
_BOUND: tuple[Stage, ...] = (stages.generate_program, stages.bind)
_SAMPLED: tuple[Stage, ...] = (stages.generate_program, _bind_sampled)
_SPREAD: tuple[Stage, ...] = (_structure_for_workers, _build_on_cluster)

LINES: Mapping[str, tuple[Stage, ...]] = {
    "linear": (*_PLANNED, stages.schedule_in_order, *_BOUND),
    "dataflow": (
        *_FOR_SHAPES,
        partial(_lower_graph, layouts=False),
        partial(stages.plan_slots, planned=False),
        _schedule_step_by_step,
        *_BOUND,
    ),
    "parallel": (*_PLANNED, _schedule_tasks, *_SAMPLED),
    "auto": (*_PLANNED, _schedule_tasks, *_SAMPLED),
    "streams": (*_PLANNED, _schedule_streams, *_SAMPLED),
    # Only the passes of ``SPLIT`` handle frames: the others see graphs between tokens.
    "frames": (stages.specialize, _structure_frames, _build_frames),
    "cluster": (*_FOR_SHAPES, *_SPREAD),
    "interpret": (stages.specialize, stages.infer, stages.bind_interpreter),
}
"""The stages of each executor, from ``Feeds`` to the executor. "cluster" is for ``cluster=``.
"auto" is "parallel" with a margin: the plan is one task, in order, unless several tasks are
clearly faster. With one worker "auto" is "linear"."""


AFTER_LOWERING: Mapping[str, tuple[Stage, ...]] = {
    name: line[i + 1 :]
    for name, line in LINES.items()
    for i, stage in enumerate(line)
    if getattr(stage, "func", stage) is _lower_graph
}
"""The stages after the last pass, from ``Lowered`` on, of the executors that have passes."""


def _bind_saved(programmed: stages.Programmed, context: CompileContext) -> Executor:
    """``bind``; if the order was left to costs, runs show whether tasks are faster."""
    executor = stages.bind(programmed, context)
    unmeasured = programmed.schedule.unmeasured and context.workers > 1
    if unmeasured and isinstance(executor, LinearExecutor):
        executor.sampler = LateSampler(partial(_run_sampler, programmed, context))
    return executor


def _run_sampler(programmed: stages.Programmed, context: CompileContext) -> Sampler | None:
    from penstock.compiler.scheduling import run_sampler

    return run_sampler(programmed, context)


def progress_of(option: bool | Progress) -> Progress | None:
    """Return the callback for the option ``progress``; True means a line on stderr."""
    if option is False or (option is not True and callable(option)):
        return option or None
    if option is not True:
        raise wrong_type("progress", option, "True, False or a function")
    from penstock.host.progress_line import ProgressLine

    return ProgressLine()


def _name(stage: Stage) -> str:
    """Return the name of a stage as progress reports show it."""
    name: str = getattr(getattr(stage, "func", stage), "__name__", "compile")
    return name.strip("_").replace("_", " ")


class Compiler:
    """Compiles graphs for one session, with its options, backends, limits and functions."""

    def __init__(self, context: CompileContext) -> None:
        self.context = context
        self._progress = progress_of(context.options.progress)

    @property
    def _executor(self) -> str:
        """The executor that selects the line of stages for graphs without frames."""
        name = self.context.executor
        return "linear" if name == "auto" and self.context.workers == 1 else name

    def structure(self, graph: Graph) -> Sequence[Unraised]:
        """Simplify a sorted graph in place as far as possible without shapes.

        TensorFlow's frames become If and Loop where that is exact. Return the primitives that
        structured control flow could not replace.
        """
        from penstock.compiler.lowering import pass_context
        from penstock.passes import pipeline
        from penstock.passes.dead_code import DeadCode
        from penstock.passes.optimize.flush_subnormals import FlushSubnormals
        from penstock.passes.optimize.fold_constants import InferTypes

        context, frames, framed = self.context, None, is_framed(graph)
        # Raised loops run their iterations in sequence, which is faster unless nodes are slow
        # enough to overlap.
        if context.executor == "auto" and framed:
            from penstock.tuning.overlap import OverlapPolicy

            frames = OverlapPolicy(context.hosts, context.costs, context.workers, context.long)
        passes = pass_context(context, frames=frames)
        keeps_frames, interprets = [context.executor == name for name in ("frames", "interpret")]
        pipeline.run_passes(pipeline.ORDER if keeps_frames else pipeline.STRUCTURE, graph, passes)
        framed = framed and is_framed(graph)  # no pass adds frames
        if interprets and not framed:
            # Nodes that were only kept alive by control edges of pure nodes are dead code.
            pipeline.run_passes((DeadCode(), InferTypes()), graph, passes)
        elif not keeps_frames and not framed:
            pipeline.optimize(graph, passes)
        if not interprets and not passes.numerics.strict:
            # Done once, not for each set of shapes, since it reads all weights.
            pipeline.run_passes((FlushSubnormals(),), graph, passes)
        return passes.frames.unraised

    def infer(self, graph: Graph) -> None:
        """Infer the types of the values of a graph, as far as its input types determine them."""
        from penstock.passes.context import PassContext
        from penstock.passes.optimize.fold_constants import InferTypes
        from penstock.passes.pipeline import run_passes

        run_passes((InferTypes(),), graph, PassContext())

    def compile(
        self, subgraph: Subgraph, values: RunValues = (), open_types: OpenTypes | None = None
    ) -> Executor:
        """Return the executor of ``subgraph`` for values of these shapes, or for ``open_types``.
        Raises ``InvalidInput`` if it cannot run for them, ``Unsupported`` with all operations for
        which no kernel is available."""
        context = self.context
        framed = context.executor == "frames" or subgraph.framed
        line = LINES["frames" if framed else self._executor]
        if framed and context.options.cluster is not None:
            line = (stages.specialize, *_SPREAD)
        return self._run(line, subgraph, values, open_types)

    def specialized(self, subgraph: Subgraph, values: RunValues) -> Graph:
        """Return the graph of ``subgraph`` for values of these shapes, before placement."""
        feeds: Feeds = self._run(_FOR_SHAPES, subgraph, values)
        return feeds.graph

    def reschedule(self, measured: MeasuredRuns) -> Executor | None:
        """Return the executor of a plan on tasks or streams if it should be faster than the order
        that was measured in runs, else None."""
        from penstock.compiler.scheduling import reschedule

        schedule = reschedule(measured, self.context)
        if schedule is None:
            return None
        return stages.bind(stages.generate_program(schedule, self.context), self.context)

    def knowing(self, long: Collection[str]) -> Compiler:
        """Return a compiler that treats these nodes as slow, whatever their estimates."""
        return Compiler(replace(self.context, long=long))

    def folding(self, most: int) -> Compiler:
        """Return a compiler for graphs that do not run; it folds constants of up to ``most``."""
        options = self.context.options
        limits = replace(self.context.limits, max_folded_bytes=most, max_bytes=None)
        return Compiler(replace(self.context, options=replace(options, limits=limits)))

    def forecast_on_cluster(self, subgraph: Subgraph, values: RunValues) -> ClusterForecast:
        """Return the expected time of runs of ``subgraph`` on the workers of ``cluster=``."""
        from penstock.compiler.cluster import forecast_on_cluster

        framed = self.context.executor == "frames" or subgraph.framed
        line = (stages.specialize,) if framed else _FOR_SHAPES
        return self._run((*line, _structure_for_workers, forecast_on_cluster), subgraph, values)

    def restore(self, saved: SavedPlan, values: RunValues) -> Executor:
        """Return the executor of a saved plan, for values of the plan's shapes."""
        line = AFTER_LOWERING[self._executor]
        # The saved plan has an order, so nothing is scheduled. If the order rests on estimates,
        # runs of this process still check it.
        if saved.arena is not None:
            line = (stages.plan_slots, stages.schedule_saved, stages.generate_program, _bind_saved)
        at = line.index(stages.generate_program)
        line = (*line[:at], stages.generate_saved, *line[at + 1 :])
        return self._through((stages.restore_lowered, *line), saved, Feeds(saved.graph, values))

    def _run(
        self,
        line: Sequence[Stage],
        subgraph: Subgraph,
        values: RunValues,
        open_types: OpenTypes | None = None,
    ) -> Any:
        """Return the record at the end of a line of stages."""
        if open_types is None or values:
            from penstock.executors.feeds import check_dims

            check_dims(subgraph.graph.inputs, values)
        how: dict[str, Any] = {"ports": subgraph.ports, "packs": subgraph.packs}
        feeds = Feeds(subgraph.graph, values, subgraph.unraised, open_types=open_types, **how)
        return self._through(line, feeds, feeds)

    def _through(self, line: Sequence[Stage], record: Any, feeds: Feeds) -> Any:
        """Pass a record through a line of stages, for these ``feeds``."""
        with compile_guard(), reporting(self._progress):
            try:
                for i, stage in enumerate(line):
                    checkpoint()
                    # Names of stages are formatted only if something listens.
                    if THREAD.progress is not None:
                        report_progress(_name(stage), i, len(line))
                    record = stage(record, self.context)
            # The graph is valid for other shapes and breaks a rule for these: the feeds are at
            # fault.
            except InvalidModel as error:
                if not feeds.add_shapes or is_framed(feeds.graph):
                    raise
                # The model is valid for other shapes.
                ports = zip(feeds.graph.inputs, feeds.types, strict=True)
                fed = ", ".join(f"{value.name}: {input_type}" for value, input_type in ports)
                raise InvalidInput(f"the model cannot run with ({fed}): {error}") from error
            checkpoint()  # a stopped attempt may have been mistaken for a failed one
            report_progress("compiled", len(line), len(line))
        return record

    def measure(self, subgraph: Subgraph, values: RunValues, runs: int) -> None:
        """Measure the nodes of ``subgraph`` on each backend in ``runs`` runs and keep the costs:
        first unfused, then with chains fused, as plans have them."""
        from penstock.backends.kernels import KernelTable
        from penstock.compiler.lowering import with_chains_fused
        from penstock.compiler.scheduling import observed_executor
        from penstock.ops.internal.fused import is_fused
        from penstock.tuning.measure import CostModel, GraphProfiler
        from penstock.tuning.placement import Placement

        context = self.context
        feeds: Feeds = self._run(_FOR_SHAPES, subgraph, values)
        kernels = KernelTable()
        observed = partial(observed_executor, context)
        costs = CostModel(context.backends)
        profiler = GraphProfiler(feeds.graph, costs, values, kernels, observed)
        placement = Placement(context.backends, context.options.place or {}, kernels, costs)
        profiler.allowed = placement.candidates(feeds.graph)
        profiler.measure_all(runs)
        fused = with_chains_fused(feeds.graph, placement, context)
        # Fused chains are single nodes, whose costs are not the sums of their parts' costs.
        if any(map(is_fused, fused.walk())):
            profiler.graph, profiler.allowed = fused, placement.candidates(fused)
            profiler.measure_all(runs)
