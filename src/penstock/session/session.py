"""The compiled model that users hold, with its plans by input shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.backends.base import TakesTensors
from penstock.compiler.compiler import AFTER_LOWERING, Compiler, progress_of
from penstock.compiler.options import (
    DEFAULTS,
    EXPERT,
    PACKS,
    CompileOptions,
    RunOptions,
    make,
    with_given,
)
from penstock.compiler.stages import CompileContext
from penstock.compiler.subgraphs import Subgraphs
from penstock.core import Closeable, capability
from penstock.core.checkpoints import Progress, cancelled_by, report_progress, reporting
from penstock.core.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvalidModel,
    PenstockError,
    check_count,
    warn,
    wrong_type,
)
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.option_records import takes
from penstock.core.records import fields, replace
from penstock.core.types import Feeds, RunValue, RunValues
from penstock.executors.control import NEVER, CancelToken, Control, begin_run, end_run
from penstock.executors.linear import LinearExecutor
from penstock.frontends.load import is_artifact
from penstock.host import gc_pause
from penstock.host.fork import renewed
from penstock.host.log import is_traced
from penstock.host.malloc import keep_memory
from penstock.host.native import library
from penstock.host.on_demand import imported
from penstock.host.stop_condition import StopCondition
from penstock.host.threads import Places, Workers, on_worker, pool
from penstock.ir.graph import Model
from penstock.session.environment import sampled_profile, save_recording, trace
from penstock.session.executors import Executors
from penstock.session.opening import open_model
from penstock.session.plan_cache import PlanCache

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from penstock.executors.base import Executor
    from penstock.executors.session_memory import SessionMemory
    from penstock.executors.variables import Variables
    from penstock.ir.tables import DisplayTable
    from penstock.observers.profile import Profile
    from penstock.session.device_ports import DeviceOrder, DevicePorts
    from penstock.session.facts import EffectiveOptions, Memory, Port, Stats
    from penstock.session.inspection import Inspection, SessionParts
    from penstock.session.quantize_after import BackgroundQuantization
    from penstock.session.run import Answers, GivenPlan, Job, PreparedRun, RunChooser
    from penstock.session.value_stream import ValueStream

RunDone = Callable[[dict[str, Any] | None, BaseException | None], object]
"""Takes the outputs of a run by name, or else the error that it ended with."""


def _device_ports(context: CompileContext) -> DevicePorts | None:
    """Return the finder of feeds on devices, or None if no backend of the session takes these."""
    if all(capability(backend, TakesTensors) is None for backend in context.backends):
        return None
    from penstock.session.device_ports import DevicePorts, adopting

    return DevicePorts(adopting(context.backends), context.executor in AFTER_LOWERING)


def _always() -> bool:
    return True


def _memory_of(options: CompileOptions) -> SessionMemory | None:
    """Return the account of the session's memory, or None if ``memory_bytes`` does not limit it."""
    if options.memory_bytes is None:
        return None
    from penstock.executors.session_memory import SessionMemory

    return SessionMemory(options.memory_bytes)


class Session(Closeable):
    """A compiled model; made by ``penstock.compile``.

    ``run`` may be called from any number of threads at once, and gives each the answers that it
    would get alone. Outputs are new arrays. Fed arrays are read, never written, and must not be
    changed by other threads during the run. A cache that is fed back to a decoder may grow in
    place: such outputs share memory with earlier ones, and are read-only.
    """

    _joined = False
    """whether requests that have nothing to do with one another are run as one batch"""

    def __init__(self, model: Model | str | Path | Any, options: CompileOptions = DEFAULTS) -> None:
        stop = StopCondition(options.timeout, options.cancel, "compiling")
        # Not of later runs, and not of a copy that is unpickled.
        if stop.limited:
            options = replace(options, timeout=None, cancel=None)
        self.limits = options.limits or DEFAULT_LIMITS
        keep_memory()
        self._closed = False
        self._quantization: BackgroundQuantization | None = None
        self._variables: Variables | None = None
        self._given: GivenPlan | None = None
        self._traced = trace() is not None or is_traced()
        self._plans = PlanCache(self.limits.max_plans_bytes, _memory_of(options))
        with cancelled_by(stop), gc_pause.paused(), reporting(progress_of(options.progress)):
            report_progress("read the model", 0, 1)
            opened = open_model(model, options, self.limits)
            self.model, self._stores = opened.model, opened.stores
            self.options = options = opened.context.options
            # Of a cluster, steps are on the workers.
            self._choose_by(None if options.cluster is not None else sampled_profile())
            self._compiler = Compiler(opened.context)
            artifact = opened.artifact
            main = None if artifact is None else artifact.main(self._compiler)
            self._subgraphs = Subgraphs(
                opened.graph, self.model.aliases, self._compiler, self._plans.drop, main
            )
            self._subgraphs.devices = _device_ports(opened.context)
            # Passes know the graphs of these executors as a whole. On devices, the number of rows
            # would have to be waited for.
            if opened.context.executor in AFTER_LOWERING and opened.context.one_memory:
                self._subgraphs.packs = PACKS[options.dead_rows]
            self._executors = Executors(
                self.model, self._compiler, self._subgraphs, self._plans, artifact, opened.entry
            )
            # Looked up here once, not in each run.
            self._main, native = self._subgraphs.main, library()
            self._functions: Any = None if native is None else native.functions
            if options.place:
                from penstock.tuning.placement import check_overrides

                check_overrides(options.place, self._subgraphs.graph, opened.context.backends)
            self._executors.compile_ahead(options.shapes)
            if not options.compile_in_run:
                self._executors.freeze(bool(options.shapes))
        self._places = Places(options.max_pending)
        self._count_run = self._plans.runs.__next__
        for part in (self._places, self._subgraphs):
            renewed(part)

    @takes(RunOptions)
    def run(
        self,
        feeds: Feeds | None = None,
        fetches: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        **options: Any,
    ) -> dict[str, RunValue]:
        """Run the model and return the fetched values by name.

        Only the part of the model that the fetches and targets need is run. Raises ``InvalidInput``
        for wrong names, dtypes and shapes, and ``RunError`` if the run fails.
        """
        self._count_run()
        # A run that can be stopped or observed. Read once: another thread may end a recording.
        if options or ((controlled := self._controlled) is not None and controlled()):
            record = make(RunOptions, "run", feeds, fetches, targets, **options)
            again = self._run_again(record)
            return self._run(record) if again is None else again
        every = fetches is None or (
            fetches.__class__ is list and tuple(fetches) == self._main.outputs
        )
        if every and targets is None:
            # One tuple, read once: other threads replace it while they compile.
            _, last, expected = self._main.last
            if expected is not None and last is not None:
                values = self._functions.taken(expected, feeds)
                if values is not None:  # as in most calls of most programs
                    outputs = last.run(values, NEVER)
                    named: dict[str, RunValue] = self._functions.named(self._main.outputs, outputs)
                    return named
        self._plans.look_up()
        if self._closed:
            raise PenstockError("the session is closed")
        request, key, values = self._subgraphs.resolve(feeds, fetches, targets)
        last_key, executor, _ = request.subgraph.last
        if executor is None or key != last_key:
            executor = self._executors.get(request.subgraph, key, values)
        else:
            self._plans.hit()
        return request.named(executor.run(values, NEVER))

    def _choose_by(self, chooser: RunChooser | None) -> None:
        """Let ``chooser`` choose runs to observe or record, if anything."""
        self._sampled = chooser
        # Tells whether a run has a control of its own, though no option of its asks for one.
        due = None if chooser is None else chooser.due
        self._controlled = _always if self._traced or self.options.priority else due

    def _adopt(self, model: Model, subgraphs: Subgraphs) -> None:
        """Run another model from now on, with the same inputs and outputs, whose plans have been
        compiled. Runs that have begun end with the plans that they have."""
        retired = self._subgraphs
        renewed(subgraphs)
        self._executors.adopt(model, subgraphs)
        self.model, self._subgraphs, self._main = model, subgraphs, subgraphs.main
        retired.retire()
        self._executors.save_memory()

    def _run_under(
        self, control: Control, feeds: Feeds, fetches: Sequence[str] | None = None
    ) -> dict[str, RunValue]:
        """``run`` under a control that the caller has begun (``begin_run``), and ends.

        Args:
            control: What stops the run: its deadline and its cancellation.
            feeds: As for ``run``.
            fetches: As for ``run``.

        Returns:
            Arrays by the name of the output.
        """
        self._count_run()
        # As in ``run``, without looking at the options that most requests have none of.
        chooser = self._sampled
        sampled = chooser is not None and chooser.due()
        if fetches is None and not self._traced and not sampled:
            _, last, expected = self._main.last
            if expected is not None and last is not None:
                values = self._functions.taken(expected, feeds)
                if values is not None:
                    return self._run_last(last, values, control)
        return self._run(RunOptions(feeds, fetches), control)

    def _run_last(
        self, executor: Executor, values: RunValues, control: Control
    ) -> dict[str, RunValue]:
        """Run all outputs of the model with the plan used last, or a form of it."""
        outputs = executor.run(values, control)
        # A run that ends late has not met its deadline, as in ``Run.run_inline``.
        if control.late() is not None:
            control.stop()
        named: dict[str, RunValue] = self._functions.named(self._main.outputs, outputs)
        return named

    def _run_again(self, options: RunOptions) -> dict[str, RunValue] | None:
        """Run with the plan used last, without looking it up; return None if it does not fit the
        feeds or the arrays of ``out``, if only some outputs are fetched, or if the run is observed.
        """
        partly = options.fetches is not None or options.targets is not None
        observed = self._traced or self._sampled is not None or options.all_observers
        _, last, expected = self._main.last
        if partly or observed or options.returns != "numpy" or last is None or expected is None:
            return None
        executor: Executor | None = last
        values = self._functions.taken(expected, options.feeds)
        if options.out is not None and values is not None and (given := self._given) is not None:
            arrays = self._functions.taken(given.expected, options.out)
            if arrays is None or not self._functions.writable(arrays, values):
                return None
            executor, values = given.of(last), (*values, *arrays)
        elif options.out is not None:
            return None
        if executor is None or values is None:
            return None
        control = begin_run(options.timeout, options.cancel)
        priority = options.priority
        control.priority = self.options.priority if priority is None else priority
        try:
            if control.stopped:
                control.stop()
            return self._run_last(executor, values, control)
        finally:
            end_run(control)

    def _run(self, options: RunOptions, control: Control | None = None) -> dict[str, RunValue]:
        """Run on the calling thread, stopped or observed as the options say."""
        self._plans.look_up()
        if self._closed:
            raise PenstockError("the session is closed")
        from penstock.session.run import Run

        run = Run(options, control, self.options.priority, self._sampled)
        executor, values, request = run.prepare(partial(self._prepare, options))
        return request.named(run.run_inline(executor, values))

    def __call__(self, *inputs: RunValue) -> RunValue:
        """Run with inputs by position: the array of one output, a tuple of several."""
        names = self._subgraphs.main.names
        if len(inputs) != len(names):
            wanted = ", ".join(map(str, self.inputs))
            raise InvalidInput(f"{len(inputs)} inputs given, the model takes ({wanted})")
        outputs = tuple(self.run(dict(zip(names, inputs, strict=True))).values())
        return outputs[0] if len(outputs) == 1 else outputs

    @takes(RunOptions)
    def submit(self, *arguments: Any, **options: Any) -> Future[dict[str, RunValue]]:
        """Queue a run for a thread of the pool, and return a future of its outputs. If
        ``max_pending`` submitted runs have not ended, first wait for one of them to end.

        The ``timeout`` counts from now, and a run that is stopped in the queue ends at once. The
        future raises the errors of the run. Closing the session does not stop the run.
        """
        from penstock.session.future import RunFuture

        future: Future[dict[str, RunValue]] = RunFuture()
        record = make(RunOptions, "submit", *arguments, **options)
        job = self._job(record, future)
        places = self._places
        # A worker that waits could be the one that is waited for.
        if not places.take(block=not on_worker(), timeout=record.timeout):
            most = self.options.max_pending
            reason = f"the queue is full: max_pending={most} submitted runs have not ended"
            job.refuse(DeadlineExceeded(reason))
            return future
        # The future ends whatever becomes of the run, also if it is cancelled in the queue.
        future.add_done_callback(lambda _: places.give())
        return self._enqueue(job, future)

    def _enqueue(
        self, job: Job, future: Future[dict[str, RunValue]], workers: Workers | None = None
    ) -> Future[dict[str, RunValue]]:
        try:
            own = workers or self.options.expert.pool
            if own is None:
                pool().submit(job, job.priority)
            else:
                own.submit(job)
        except RuntimeError as error:  # the process ends
            job.refuse(error)
            raise
        return future

    @takes(RunOptions, after=(cast(type[RunDone], object),))
    def run_async(self, done: RunDone, *arguments: Any, **options: Any) -> None:
        """Queue a run for a thread of the pool, return at once, and call ``done`` when the run has
        ended. ``max_pending`` does not apply.

        Args:
            done: Called as ``done(outputs, None)`` with the outputs by name, or as
                ``done(None, error)``, on the thread on which the run ends.
        """
        if not callable(done):
            raise wrong_type("done", done, "a function")
        self._begin(done, make(RunOptions, "run_async", *arguments, **options))

    def _begin(
        self,
        done: RunDone,
        options: RunOptions,
        workers: Workers | None = None,
        check: Callable[[], object] | None = None,
    ) -> None:
        """``run_async`` on threads of the caller's.

        Args:
            done: As ``run_async`` takes it.
            options: What the run takes.
            workers: Threads, on one of which it runs; by default those of the session.
            check: Called once the run has a plan; what it raises ends the run.
        """
        from concurrent.futures import Future

        def tell(future: Future[dict[str, RunValue]]) -> None:
            error = future.exception()
            done(None if error else future.result(), error)

        future: Future[dict[str, RunValue]] = Future()
        job = self._job(options, future, check=check)
        self._enqueue(job, future, workers).add_done_callback(tell)

    def _job(
        self,
        options: RunOptions,
        future: Future[dict[str, RunValue]],
        ordered: bool = False,
        check: Callable[[], object] | None = None,
    ) -> Job:
        """A run to be called later, on a thread that may do its work: see ``submit``. ``ordered``:
        the caller sees to it that it is in order with other work on devices; ``check`` as
        ``_begin`` has it."""
        if self._closed:
            raise PenstockError("the session is closed")
        self._plans.refuse_reentry()
        self._count_run()
        self._plans.look_up()
        from penstock.session.run import Job, Run

        devices, order = self._subgraphs.devices, None
        if devices is not None:
            order = devices.order_of(ordered)
        own = Run(options, priority=self.options.priority, sampled=self._sampled)
        prepare: Callable[[bool], PreparedRun] = partial(self._prepare, options, order=order)
        if check is not None:

            def checked(
                observed: bool, plain: Callable[[bool], PreparedRun] = prepare
            ) -> PreparedRun:
                prepared = plain(observed)
                check()
                return prepared

            prepare = checked
        return Job(own, prepare, future)

    @takes(RunOptions)
    async def arun(self, *arguments: Any, **options: Any) -> dict[str, RunValue]:
        """``run`` for asyncio. It does not block the event loop, even if ``max_pending`` submitted
        runs have not ended. Cancelling the task cancels the run."""
        import asyncio

        # Of several runs that share a token, cancelling the task stops its own only.
        token = CancelToken(options.pop("cancel", None))
        submit = partial(self.submit, *arguments, cancel=token, **options)
        try:
            job = await asyncio.to_thread(submit) if self._places.all_taken else submit()
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            token.cancel()
            raise

    def stream(
        self,
        feeds: Feeds,
        fetches: Sequence[str],
        *,
        ahead: int = 16,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
        priority: int | None = None,
    ) -> ValueStream:
        """Run the model on a thread of the pool, and return an iterator over values as they are
        computed, which is an asynchronous iterator, too. Its items are pairs of a name and a value;
        a value in the body of a loop comes in each iteration::

            with session.stream(feeds, ["token"]) as values:
                for name, token in values:
                    print(token)

        The iterator's ``result()`` returns the outputs of the run. Raises ``InvalidInput`` for
        wrong feeds, and for a name that no value, or more than one, has.

        Args:
            feeds: The inputs of the model, as ``run`` takes them.
            fetches: Names of values, including those in loops and branches.
            ahead: The most unread values; with more, the run waits until one is read.
            timeout: Seconds after which the run ends with ``DeadlineExceeded``.
            cancel: A token whose ``cancel()`` ends the run with ``Cancelled``, as ``close()`` of
                the iterator does.
            priority: By which the run is served, higher ones first.
        """
        from penstock.compiler.subgraphs import Request
        from penstock.session.future import RunFuture
        from penstock.session.run import Job, Run
        from penstock.session.value_stream import Channel, ValueStream

        check_count("ahead", ahead, 1_000_000)
        if isinstance(fetches, str):
            raise InvalidInput(f"fetches must be a list of names; did you mean [{fetches!r}]?")
        if self._closed:
            raise PenstockError("the session is closed")
        subgraph = self._subgraphs.emitting(tuple(dict.fromkeys(fetches)))
        request, _, values = self._subgraphs.resolve(feeds, None, None)
        if request.subgraph.names != subgraph.names:
            raise InvalidInput(f"a stream takes the inputs of the model, {list(subgraph.names)}")
        token, channel = CancelToken(cancel), Channel(ahead)
        options = RunOptions(timeout=timeout, cancel=token, priority=priority)
        run = Run(options, priority=self.options.priority, sampled=self._sampled)
        run.control.sink = channel.put

        def prepare(observed: bool) -> PreparedRun:
            executor = self._executors.get(subgraph, subgraph.key(values), values)
            return executor, values, Request(subgraph, subgraph.outputs)

        self._count_run()
        future: Future[dict[str, RunValue]] = RunFuture()
        return ValueStream(channel, token, self._enqueue(Job(run, prepare, future), future))

    def profile(
        self, feeds: Feeds | None = None, *, runs: int = 10, progress: bool | Progress = False
    ) -> Profile:
        """Measure every node on every backend that supports it, compile the plan again with these
        costs, and return a profile of its runs.

        The costs are saved in the table of costs (in the user's cache folder), which decides from
        then on where nodes run and what runs in parallel; plans are compiled again. A graph that
        only frames can run is not measured ahead. With ``cluster=``, each worker measures the steps
        that it runs, and no costs are saved. Variables are restored afterwards, except on a
        cluster. Raises as ``run`` does.

        Args:
            feeds: Inputs by name, as ``run`` takes them.
            runs: The number of measured runs on each backend, and then of the plan.
            progress: A callback for the progress, as ``compile`` takes it.
        """
        if self._closed:
            raise PenstockError("the session is closed")
        check_count("runs", runs)
        request, _, values = self._subgraphs.resolve(feeds, None, None)
        with reporting(progress_of(progress)):
            if self.options.cluster is not None:
                return self._parts().profile(feeds, runs)
            if not request.subgraph.framed:
                self._compiler.measure(request.subgraph, values, runs)
                if self._executors.compiles:
                    self._plans.drop(request.subgraph)
            with self.variables.unchanged():
                return self._parts().profile(feeds, runs)

    def quantize_after(
        self,
        runs: int = 1000,
        max_error: float = 0.01,
        *,
        samples: int = 100,
        timeout: float = 600.0,
    ) -> BackgroundQuantization:
        """Record feeds of the next runs, quantize the model with them in the background, and run
        the quantized model from then on. Answers change at that moment, by ``max_error`` at most on
        feeds that were held out. Return at once an object that reports the progress.

        Recording takes at most one percent of the process's CPU time. The search runs in a process
        of its own, with one thread and the lowest priority. The model is exchanged between two
        runs, if the quantized one is faster and within the error bound in this process, too;
        otherwise the session keeps its model. If ``penstock.Replicas`` join requests, types of
        layers with dependent rows are not used. From this call on, only inputs of the model can be
        fed and only its outputs fetched, unless the session keeps its model.

        Raises ``OptionError`` for options of the session that a quantized model cannot have, such
        as ``reproducible=True``, and ``Unsupported`` for a model with variables, functions or
        inputs other than tensors of numbers, and for a TFLite model that was not read from a file.

        Args:
            runs: The number of runs after which the search begins, or later if fewer than eight
                were recorded.
            max_error: The largest error of an output, as ``penstock.quantize`` measures it.
            samples: The most runs whose feeds are kept, in up to 64 MiB.
            timeout: Seconds after which the search takes the best that it has found.
        """
        from penstock.session import quantize_after

        quantize_after.check_arguments(runs, max_error, samples, timeout)
        if self._closed:
            raise PenstockError("the session is closed")
        before = self._quantization
        if before is not None and before.state != "kept":
            raise PenstockError(f"quantize_after was called before, and is {before.state}")
        quantize_after.check_model(self._parts())
        own = quantize_after.BackgroundQuantization(
            self, runs, max_error, samples, timeout, self._joined
        )
        self._quantization = own
        own.begin(self._sampled)
        return own

    def _join(self) -> None:
        """Refuse models in which rows of a batch act on one another, for servers that join
        requests."""
        if self._quantization is not None and self._quantization.state != "kept":
            raise PenstockError(
                "a session with quantize_after cannot batch requests, which may affect one another "
                "in its model: call it after Replicas were made, or leave out max_batch= and "
                "max_batch_tokens="
            )
        self._joined = True

    @property
    def inspect(self) -> Inspection:
        """Inspection of how the session's plans run."""
        from penstock.session.inspection import Inspection

        return Inspection(self._parts())

    def _parts(self) -> SessionParts:
        from penstock.session.inspection import SessionParts

        return SessionParts(
            self.model,
            self.options,
            self._compiler,
            self._subgraphs,
            self._plans,
            self._executors,
            self._places,
        )

    def explain(self, *, reasons: bool = False) -> str:
        """``inspect.explain``: how the last plan will run.

        Args:
            reasons: Say also why each step is on its backend, by the costs that are known now, and
                whether rows are left out that a mask hides, or which node stands in the way.
        """
        return self.inspect.explain(reasons=reasons)

    @property
    def source(self) -> str:
        """``inspect.source``: the generated program of the last plan."""
        return self.inspect.source

    @property
    def memory(self) -> Memory:
        """``inspect.memory``: bytes held."""
        return self.inspect.memory

    @property
    def effective(self) -> EffectiveOptions:
        """``inspect.effective``: what the last plan runs with, whatever the options ask for."""
        return self.inspect.effective

    @property
    def stats(self) -> Stats:
        """``inspect.stats``: what the session has done so far."""
        return self.inspect.stats

    @property
    def inputs(self) -> list[Port]:
        """Names and types of the model's inputs."""
        from penstock.session.facts import Port

        return [Port(v.name, v.type) for v in self._subgraphs.main.inputs]

    @property
    def outputs(self) -> list[Port]:
        """Names of the model's outputs, and their types as far as they are known before a run."""
        from penstock.session.facts import Port

        main = self._subgraphs.main
        pairs = zip(main.outputs, main.results, strict=True)
        return [Port(name, value.type) for name, value in pairs]

    @property
    def values(self) -> list[Port]:
        """Names of all values that can be fetched and fed (inputs, outputs and what lies between,
        but not those of sub-graphs), with their types as far as they are known before a run."""
        from penstock.session.facts import Port

        known = {port.name: port.type for port in (*self.outputs, *self.inputs)}
        values = self._subgraphs.values
        return [Port(name, known.get(name, value.type)) for name, value in values.items()]

    @property
    def variables(self) -> Variables:
        """The variables of the model by name: read, set, saved and restored."""
        # Made on the first look: most models have none.
        if self._variables is None and self.options.cluster is not None:
            cluster = self.options.cluster
            self._variables = cluster.variables(self.model, self._stores, self.limits)
        elif self._variables is None:
            from penstock.executors.variables import Variables

            self._variables = Variables(self.model, self._stores, self.limits)
        return self._variables

    def save(self, path: str | Path) -> None:
        """Save the session to a file for ``penstock.open``: the model, and the plans for the input
        shapes that were run so far or given as ``shapes=``.

        Variables are saved with their initial values; ``variables.save`` saves the current ones.
        Raises ``PenstockError`` for a model that cannot be saved, and ``OSError`` if the file
        cannot be written.

        Args:
            path: The file. An existing file is replaced; processes that have it open keep the old
                one.
        """
        from pathlib import Path

        if not isinstance(path, str | os.PathLike):
            raise wrong_type("path", path, "a path")
        self._executors.write(lambda writer: writer.save(Path(path)))

    def trim(self) -> None:
        """Release memory that no run uses: free arenas, caches of backends, constants that all
        plans read in a reordered copy, and memory that the process has freed."""
        self._executors.trim()

    def close(self) -> None:
        """Refuse further runs, and release plans and arenas; runs in flight finish."""
        if self._quantization is not None:
            self._quantization.cancel()
        if not self._closed:
            self._executors.keep()
        # Kept first: closing gives up the plans that are to be saved.
        self._closed = True
        self._plans.close()
        self._subgraphs.clear()
        self._executors.save_memory()
        save_recording()

    def __reduce__(self) -> tuple[object, ...]:
        """Sessions are pickled as the path of their model, or else as ``save`` writes them, with
        their options, and the values of variables that have changed."""
        model, contents = self.model, []
        if model.path is None:
            self._executors.write(lambda writer: contents.append(writer.to_bytes()))
        entry = model.entry if model.path and model.entry in model.signatures else None
        options = replace(self.options, signature=entry, variables=None, progress=False)
        # Variables of a cluster are on its workers.
        state = None if self.options.cluster else self.variables.state()
        return _unpickled, (model.path or contents[0], options, state)

    if not TYPE_CHECKING:  # type checkers would take any name for one of a session

        def __getattr__(self, name: str) -> Any:
            from penstock.session.inspection import hint_for

            message = f"a Session has no attribute {name!r}{hint_for(name)}"
            raise AttributeError(message, name=name, obj=self)

    _repr_html_ = imported("penstock.ir.tables.show_html")
    _repr_pretty_ = imported("penstock.ir.tables.show_text")

    def _as_table(self) -> DisplayTable:
        from penstock.ir.tables import DisplayTable

        held, rows = self.memory, []
        for title, ports in (("input", self.inputs), ("output", self.outputs)):
            rows += [(title, port.name, str(port.type)) for port in ports]
        caption = f"session of {self.model.path or self.model.entry!r}: {held.count} plans, "
        caption += f"{held.weights} bytes of weights, {held.arenas} of arenas"
        return DisplayTable(caption, ("", "name", "type"), rows)

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"Session({self.model.entry!r}: ({ports[0]}) -> ({ports[1]}))"

    def _prepare(
        self, options: RunOptions, observed: bool, order: DeviceOrder | None = None
    ) -> PreparedRun:
        """The executor and the values of a run; ``observed``, one that tells observers of steps.
        ``order``: where it is among the work on devices, if not that of the calling thread."""
        request, key, values = self._subgraphs.resolve(
            options.feeds, options.fetches, options.targets, options.returns != "numpy"
        )
        executor = self._executors.get(request.subgraph, key, values)
        # Names of outputs; below, what is to be done with them as well.
        answers: Answers = request
        devices = self._subgraphs.devices
        if devices is not None:
            order = order or devices.order_of_caller()
            order.begin(executor)
        if options.returns != "numpy":
            from penstock.session.device_ports import Returned, returned_by

            backend = returned_by(self._compiler.context.backends, options.returns)
            answers = Returned(request, backend, order, executor)
        if options.out is not None:
            from penstock.session.run import GivenOutputs

            answers = given = GivenOutputs(request, options.out, executor, values)
            # Kernels write straight into the arrays; the program for that is a plan of its own.
            if given.direct and not observed and isinstance(executor, LinearExecutor):
                base, compiled = executor, partial(executor.with_given, given.direct)
                place = ("given", key, given.direct)
                executor = self._plans.get(request.subgraph, place, True, compiled)
                values = [*values, *given.arrays]
                self._given = given.plan(base, executor)
        if observed:
            last = request.subgraph.last
            key = last.key if last.executor is executor else key
            executor = self._plans.get(request.subgraph, key, True, executor.observed)
        return executor, values, answers


@takes(CompileOptions)
def compile(model: Model | str | Path | Any, *arguments: Any, **options: Any) -> Session:
    """Compile a model, or the file at a path, into a session.

    Raises ``InvalidModel`` for a file or model that breaks the rules, ``Unsupported`` with all
    operations that no kernel is available for. TensorFlow's loops and conditions become structured
    control flow for all executors but "frames"; what cannot is run by frames with "auto", and
    refused by the others. ``DeadlineExceeded`` or ``Cancelled`` if it is stopped.

    Args:
        model: A path of a file or a folder, the bytes of a file, an ``onnx.ModelProto``, or a model
            of ``penstock.load`` or ``penstock.build``.
    """
    return Session(model, make(CompileOptions, "compile", *arguments, **options))


@takes(CompileOptions)
def open(path: str | Path, *, strict: bool = False, **options: Any) -> Session:
    """Open a session that was saved (``Session.save``).

    It has the options that it was saved with, unless others are given, and maps the file, whose
    pages all sessions and processes share; with ``map_weights=False`` it reads the file. Plans that
    were saved on another machine, or for other options, or run by "frames" or "interpret", are
    compiled when they are needed, and ``UserWarning`` says why. Raises ``InvalidModel`` for a file
    that is no saved session, or is damaged.

    Args:
        path: The file.
        strict: Raise ``PenstockError`` for plans that cannot be used, instead of the warning.
    """
    if not isinstance(path, str | os.PathLike):
        raise wrong_type("path", path, "a path")
    record = make(CompileOptions, "open", **{"map_weights": True, "cache": False, **options})
    if os.path.isdir(path) or (os.path.exists(path) and not is_artifact(path)):
        raise InvalidModel(f"{str(path)!r} is no saved session; compile it with penstock.compile")
    session = Session(path, record)
    if stale := session._executors.stale:
        reason = f"plans in {str(path)!r} are not used: {'; '.join(stale)}"
        if strict:
            raise PenstockError(f"{reason}. Save the session here, or open it without strict=True")
        warn(reason)
    return session


def _unpickled(
    source: str | bytes, options: CompileOptions, state: Mapping[str, np.ndarray | None] | None
) -> Session:
    """The session of a model at a path, or saved as bytes, as it was when it was pickled: the
    environment does not decide on its options again."""
    names = [field.name for field in fields(options)]
    session = Session(source, with_given(options, [*names, *EXPERT]))
    if state:
        session.variables.set_state(state)
    return session
