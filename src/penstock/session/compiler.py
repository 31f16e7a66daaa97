"""From a graph and the shapes of what is fed to an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from penstock.analysis.frames import find_frames
from penstock.analysis.sizes import check_sizes
from penstock.analysis.type_inference import infer_types
from penstock.backends.base import Backend, Device
from penstock.backends.kernels import KernelTable, placed_kernels
from penstock.backends.numpy import NumpyBackend
from penstock.errors import (
    InvalidInput,
    InvalidModel,
    PenstockError,
    Unsupported,
    UnsupportedOperation,
)
from penstock.executors.base import Executor
from penstock.executors.dataflow import DataflowExecutor
from penstock.executors.frames.builder import FrameGraphBuilder
from penstock.executors.interpret import InterpretExecutor
from penstock.executors.linear import LinearExecutor
from penstock.executors.parallel import ParallelExecutor
from penstock.executors.task_loop import Queue
from penstock.host.threads import core_budget, pool
from penstock.inspect.forecast import Forecast, check_static, forecast
from penstock.ir.describe import compile_error
from penstock.ir.device_name import local
from penstock.ir.graph import Graph, Node, clone
from penstock.ir.op import Kernel
from penstock.limits import Limits
from penstock.observers.profile import Profile
from penstock.ops.internal.transfer import HOST
from penstock.ops.tensorflow.control_flow import is_framed
from penstock.passes.context import FusionPolicy, PassContext, Place
from penstock.passes.dead_code import prune
from penstock.passes.lowering.assign_devices import assign
from penstock.passes.lowering.partition import partition
from penstock.passes.pipeline import LOWER, STRUCTURE, optimize, run_passes
from penstock.passes.structure.raise_control_flow import Unraised
from penstock.passes.structure.relax_control_edges import release
from penstock.plan.arena_layout import plan_arena, plan_arena_for_tasks
from penstock.plan.builder import compile_plan
from penstock.plan.grouping import HAND_OVER_S, ClusteredGrouping, Seconds
from penstock.plan.plan import Plan, Step, StepTable
from penstock.plan.streams import StreamSchedules, stream_programs, stream_segments
from penstock.plan.tasks import arrange
from penstock.session.compile_guard import compile_guard
from penstock.session.feeds import check_dims
from penstock.session.options import CompileOptions
from penstock.tuning.measure import CostModel, GraphProfiler, profile_runs
from penstock.tuning.placement import Placement, choose
from penstock.types import OptionalType, TensorType, Type


class Compiler:
    """Compiles graphs for one session: with its options, its backends and its limits.

    ``functions`` are those that nodes may call.
    """

    def __init__(
        self,
        options: CompileOptions,
        backends: Sequence[Backend],
        limits: Limits,
        functions: Mapping[str, Graph],
    ) -> None:
        self.options = options
        self.devices = () if options.devices is None else local(options.devices)
        self.functions = functions
        self.threads = options.threads
        self.max_streams = options.max_streams
        self.executor = "frames" if self.devices else options.executor
        self.backends = tuple(backends)
        self.limits = limits
        self.overrides = dict(options.place or {})
        self.hosts = [backend for backend in backends if backend.memory == HOST] or [NumpyBackend()]
        self.fusing = [backend for backend in backends if backend.fuses]

    def keeps(self, graph: Graph) -> bool:
        """Whether all nodes of ``graph`` are run as they are: passes know nothing of frames, and
        who asks for these wants to know how often each node runs."""
        return self.executor == "frames" or is_framed(graph)

    def prepare(self, graph: Graph) -> tuple[Graph, Sequence[Unraised]]:
        """``graph``, which must be sorted, as simple as it can be without shapes: with structured
        control flow where it has TensorFlow's; and the primitives that could not be raised."""
        context = self._context()
        if self.executor != "frames":
            run_passes(STRUCTURE, graph, context)
            if not is_framed(graph) and self.executor == "interpret":
                infer_types(graph)
            elif not is_framed(graph):
                optimize(graph, context)
        return graph, context.unraised

    def _context(
        self,
        fusion: FusionPolicy | None = None,
        choose_places: Callable[[Graph], Mapping[Node, Place]] | None = None,
        kernels: KernelTable | None = None,
    ) -> PassContext:
        placement: dict[Node, Place] = {}
        compiled = None if kernels is None else placed_kernels(kernels, self.backends, placement)
        return PassContext(
            limits=self.limits,
            fusion=fusion if self.fusing else None,
            fold_quantized_weights=not self.fusing,
            choose_places=choose_places,
            after_pass=self.options.after_pass,
            placement=placement,
            compiled=compiled,
        )

    def compile(
        self, graph: Graph, values: Sequence[Any], unraised: Sequence[Unraised] = ()
    ) -> Executor:
        """The executor of a prepared ``graph`` for values of these shapes."""
        if self.keeps(graph):
            check_dims(graph.inputs, values)
            with compile_guard():
                graph = clone(graph)
                for value, given in zip(graph.inputs, values, strict=True):
                    value.type = _concrete(value.type, given)
                if not is_framed(graph):
                    infer_types(graph)
                return self._frames(graph, unraised)
        with self._specialised(graph, values) as special:
            return self._executor(special, values)

    def profile(self, graph: Graph, values: Sequence[Any], runs: int) -> Profile:
        """What the nodes of ``graph`` take, measured in ``runs`` runs: on each backend, or of one
        that only frames can run, by the frames executor."""
        if is_framed(graph):
            return profile_runs(self.compile(graph, values).observed(), values, runs)
        with self._specialised(graph, values) as special:
            kernels = KernelTable()
            profiler = GraphProfiler(special, {}, self.backends, values, self.limits, kernels)
            placement = Placement(self.backends, self.overrides, kernels, profiler)
            profiler.allowed = placement.candidates(special)
            return profiler.profile(runs)

    def forecast(self, plan: StepTable, workers: int) -> Forecast:
        """What ``plan`` would take with so many workers of one thread each."""
        by_name = {backend.name: backend for backend in self.backends}
        costs = self.options.cost_model or CostModel(self.backends)
        return forecast(plan, lambda step: costs.of_step(step, by_name, True), workers)

    def streaming(self, plan: StepTable, max_streams: int | None) -> StreamSchedules:
        """``plan`` on streams, by what is known of costs: on as many as pay, or as ``max_streams``
        says."""
        check_static(plan)
        most = self._workers() if max_streams is None else max_streams
        by_name = {backend.name: backend for backend in self.backends}
        costs = self.options.cost_model or CostModel(self.backends)
        return StreamSchedules(
            plan,
            lambda step: costs.of_step(step, by_name, True),
            most,
            forced=max_streams is not None,
            devices=self._devices(),
        )

    def _devices(self) -> dict[str, Device]:
        return {b.name: b.device for b in self.backends if b.device is not None}

    @contextmanager
    def _specialised(self, graph: Graph, values: Sequence[Any]) -> Iterator[Graph]:
        """``graph`` for values of these shapes, and errors in their terms."""
        check_dims(graph.inputs, values)
        declared = [value.type for value in graph.inputs]
        types = [_concrete(kind, given) for kind, given in zip(declared, values, strict=True)]
        with compile_guard():
            # Where the model itself says all shapes, the graph is as simple as it can be.
            special = types != declared
            graph = clone(graph)
            for value, kind in zip(graph.inputs, types, strict=True):
                value.type = kind
            try:
                if self.executor == "interpret":
                    infer_types(graph)
                elif special:
                    optimize(graph, self._context())
                check_sizes(graph, self.limits)
                yield graph
            except InvalidModel as error:
                if not special:
                    raise
                # What is valid in general is not for these shapes.
                fed = ", ".join(map(repr, graph.inputs))
                raise InvalidInput(f"the model cannot run with ({fed}): {error}") from error

    def _executor(self, graph: Graph, values: Sequence[Any]) -> Executor:
        for backend in self.hosts:
            if backend.threads_of_caller:
                backend.set_threads(self.threads or core_budget())
        if self.executor == "interpret":
            plan = compile_plan(graph, [NumpyBackend()], {}, planned=False)
            return InterpretExecutor(graph, plan, self.hosts, self.limits, threads=self.threads)
        kernels = KernelTable()
        costs: CostModel = self.options.cost_model or GraphProfiler(
            graph, {}, self.backends, values, self.limits, kernels
        )
        placement = Placement(self.backends, self.overrides, kernels, costs)
        if self._one_memory and self.options.autotune:
            self._measure_fused(graph, placement)
        planned = self.executor != "dataflow"
        places = partial(self._places, placement)
        context = self._context(placement, places, kernels if planned else None)
        run_passes(LOWER, graph, context)
        by_name = {backend.name: backend for backend in self.backends}
        placed = {node: by_name[place.backend] for node, place in context.placement.items()}
        plan = compile_plan(graph, self.backends, placed, planned=planned, kernels=kernels)
        if self.executor == "dataflow":
            return DataflowExecutor(plan, self.hosts, self.limits, threads=self.threads)
        if self.executor == "streams":
            return self._streams(plan, costs)
        linear = self._linear(plan)
        parallel = self.executor in ("parallel", "auto")
        return self._parallel(plan, costs, linear) if parallel else linear

    def _linear(self, plan: Plan, name: str = "linear") -> LinearExecutor:
        return LinearExecutor(
            plan,
            self.hosts,
            self.limits,
            threads=self.threads,
            arena_plan=plan_arena(plan, self.options.memory_planner),
            name=name,
        )

    @property
    def _one_memory(self) -> bool:
        return all(backend.memory == HOST for backend in self.backends)

    def _measure_fused(self, graph: Graph, placement: Placement) -> None:
        """Measure the nodes of ``graph`` on all backends, with every chain fused that a backend has
        a kernel for, so that measured costs decide which chains are."""
        copy, costs = clone(graph), placement.costs
        placement.measured_only = True
        run_passes(LOWER, copy, self._context(placement))
        if isinstance(costs, GraphProfiler):
            costs.graph, costs.allowed = copy, placement.candidates(copy)
        costs.complete(single_threaded=False)
        if isinstance(costs, GraphProfiler):
            costs.graph = graph

    def _places(self, placement: Placement, graph: Graph) -> dict[Node, Place]:
        """Where each node of ``graph`` runs."""
        costs = placement.costs
        if self._one_memory:
            # Values stay where they are, so that each node may go where it is fastest.
            placed = placement.fastest(graph)
            if isinstance(costs, GraphProfiler):
                costs.allowed = {node: [backend] for node, backend in placed.items()}
        else:
            parallel = self.executor in ("parallel", "streams", "auto")
            allowed = placement.candidates(graph)
            if isinstance(costs, GraphProfiler):
                costs.allowed = allowed
                costs.copy_graph()  # later measurements must not see the transfers of this one
            costs.complete(single_threaded=parallel)

            def seconds(node: Node, backend: Backend) -> float:
                return costs.seconds(node, backend, single_threaded=parallel)

            placed = choose(
                graph, allowed, self.backends, seconds, costs.transfer, parallel=parallel
            )
        return {node: Place(backend.name, backend.memory) for node, backend in placed.items()}

    def _frames(self, graph: Graph, unraised: Sequence[Unraised]) -> Executor:
        """The executor of frames, on the host."""
        if self.executor not in ("auto", "frames"):
            find_frames(graph)  # InvalidModel comes before Unsupported
            raise Unsupported(
                [
                    UnsupportedOperation(
                        primitive.node.op.full_name,
                        f'{primitive.reason}, so that only executor="frames" or "auto" runs it',
                        (primitive.node.label,),
                    )
                    for primitive in unraised
                ]
            )
        builder = FrameGraphBuilder(
            self._host_kernel, self._inner, self._body, self.limits, self.hosts[-1].name
        )
        if not self.devices:
            return builder.build(graph)
        assign(graph, self.devices)
        frames = find_frames(graph)
        parts = partition(graph, frames, {node: node.device for node in graph.nodes})
        if len(parts) > 1:
            return builder.build_parts(graph, parts, len(self.devices))
        return builder.build(graph, frames)

    def _body(self, name: str) -> Graph:
        """A copy of a function's graph, without dead code."""
        graph = clone(self.functions[name])
        prune(graph)
        return graph

    def _host_kernel(self, node: Node) -> Kernel:
        """The kernel of a node whose shapes are known only in runs."""
        types = [None if value is None else value.type for value in node.inputs]
        backend = self.hosts[-1]
        try:
            kernel = backend.kernel(node, types)
        except Exception as error:
            if isinstance(error, PenstockError):
                raise
            raise compile_error(node, error) from error
        if kernel is None:
            reason = f"no kernel for it on {backend.name}"
            raise Unsupported([UnsupportedOperation(node.op.full_name, reason, (node.label,))])
        return kernel

    def _inner(self, graph: Graph) -> Executor:
        """The executor of a graph without frames inside of one with frames."""
        if self.executor == "frames":
            infer_types(graph)
        else:
            release(graph)
            optimize(graph, replace(self._context(), fold_quantized_weights=True))
        plan = compile_plan(graph, self.hosts, {}, planned=False)
        return self._linear(plan)

    def _streams(self, plan: Plan, costs: CostModel) -> Executor:
        """The executor of streams; a plan on one stream is run as the linear one runs it."""
        linear = self._linear(plan, "streams")
        workers = self._workers()
        forced = self.max_streams is not None
        most = self.max_streams if self.max_streams is not None else workers
        devices = self._devices()

        def streaming(seconds: Seconds) -> StreamSchedules:
            return StreamSchedules(plan, seconds, most, forced=forced, devices=devices)

        found = streaming(lambda step: costs.estimate(step.node))
        if found.one:
            return linear
        by_name = {backend.name: backend for backend in self.backends}
        if not forced:
            costs.complete(single_threaded=True)
            costs.complete(single_threaded=False)
            found = streaming(lambda step: costs.of_step(step, by_name, True))
            serial = StreamSchedules(plan, lambda step: costs.of_step(step, by_name, False), 1)
            slower = found.of(plan.steps).makespan > serial.of(plan.steps).makespan
            if found.one or (slower and not devices):
                return linear
        made = ParallelExecutor(
            plan,
            stream_programs(plan, found),
            self.hosts,
            self.limits,
            [Queue(workers, pool())],
            0.0 if forced else HAND_OVER_S,
            arena_plan=plan_arena_for_tasks(
                plan, stream_segments(plan, found), self.options.memory_planner
            ),
            devices=devices,
            threads=self.threads,
            name="streams",
        )
        return made if forced or devices else costs.faster(made, linear, _TRIED["streams"])

    def _workers(self) -> int:
        """How many tasks of one run may go on at once on the host."""
        workers = min(max(backend.workers for backend in self.hosts), pool().size)
        return min(workers, self.threads or workers)

    def _parallel(self, plan: Plan, costs: CostModel, linear: Executor) -> Executor:
        """The parallel executor; ``linear`` if that is as fast."""
        by_name = {backend.name: backend for backend in self.backends}
        names = dict.fromkeys(b.name for b in self.backends if b.memory != HOST)
        queues = {name: i for i, name in enumerate(names, 1)}
        workers = self._workers()

        def grouped(seconds: Seconds) -> ClusteredGrouping:
            return ClusteredGrouping(plan, seconds, workers, queues)

        if not grouped(lambda step: costs.estimate(step.node)).promising:
            return linear
        # Where kernels have threads of their own, workers seldom bring more: nobody who has not
        # asked waits for measurements.
        asked = self.executor == "parallel" or self.options.autotune
        threaded = any(backend.threads_of_caller for backend in self.hosts)
        if threaded and not asked and not costs.complete_already():
            return linear
        costs.complete(single_threaded=True)
        costs.complete(single_threaded=False)

        def one(step: Step) -> float:
            return costs.of_step(step, by_name, True)

        def several(step: Step) -> float:
            return costs.of_step(step, by_name, False)

        grouping = grouped(one)
        tasks = arrange(plan, grouping)
        serial = ClusteredGrouping(plan, several, 1, queues).serial
        margin = _MARGIN if self.executor == "auto" else 1.0
        if len(tasks.tasks) <= 1 or grouping.makespan > margin * serial:
            return linear
        away = [Queue(by_name[name].workers, pool(name, by_name[name].workers)) for name in names]
        all_queues = [Queue(workers, pool()), *away]
        made = ParallelExecutor(
            plan,
            tasks,
            self.hosts,
            self.limits,
            all_queues,
            HAND_OVER_S,
            threads=self.threads,
            arena_plan=plan_arena_for_tasks(plan, tasks, self.options.memory_planner),
        )
        return costs.faster(made, linear, _TRIED[self.executor])


# What the parallel executor is taken for: simulated, it must take less than this part of the time
# that one step after the other takes, if nobody asked for it; and tried, less than this part.
_MARGIN = 0.9
_TRIED = {"auto": 0.95, "parallel": 1.02, "streams": 1.02}


def _concrete(kind: Type, value: Any) -> Type:
    if isinstance(value, np.ndarray) and not isinstance(kind, OptionalType):
        return TensorType(value.dtype, value.shape)
    return kind
