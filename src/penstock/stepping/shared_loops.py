"""Shared loops: all runs in the same loop compute their next iteration together.

::

    run a    i = 0   1   2   3                 4 iterations
    run b            0   1   2   3   4   5     joins at a's second one
    run c                    0   1             and leaves behind two
    steps        a  ab  ab  abc abc  b   b

The method is cellular batching: Pin Gao et al., Low Latency RNN Inference with Cellular Batching,
EuroSys 2018. A run is a sequence of a step engine; its state is the loop-carried values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.compiler.options import CompileOptions, make
from penstock.core.errors import InvalidInput, LimitExceeded, check_count, quoted
from penstock.core.limits import parse_bytes
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue
from penstock.executors.feeds import check_names, convert
from penstock.frontends.load import load
from penstock.host.stop_condition import StopCondition
from penstock.ir.graph import Model
from penstock.session.session import Session
from penstock.stepping.batched import BatchedRunner
from penstock.stepping.engine import StepEngine
from penstock.stepping.fed_state import FedState
from penstock.stepping.loop_parts import CONDITION, GOES_ON, ITERATION, LoopBody, loop_parts
from penstock.stepping.sequence import Rows, SequenceState

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import ArrayLike

    from penstock.executors.control import CancelToken


class LoopStats(NamedTuple):
    """Counters of loops: ``steps``, and the ``iterations`` of runs that these computed."""

    steps: int
    iterations: int


class SharedLoops:
    """Runs a model with loops (Loop of ONNX, While of TensorFlow and TFLite) for many callers at
    once: all runs that are in the same loop compute their next iteration together.

    The body of a loop gets a batch axis with one sample for each run. Runs join and leave at every
    iteration. Runs whose loop-carried values have other shapes form a batch of their own. Nodes
    outside of loops, and loops that carry sequences, are computed for each run separately.
    ``reasons`` says which loops compute runs one after another.

    Args:
        model: As ``penstock.compile`` takes it.
        max_runs: The most runs in a step.
        cache_bytes: The most memory of loop-carried values, such as 2**30 or "1GB".
        options: Options of ``penstock.compile``.
    """

    def __init__(
        self,
        model: Model | str | Path,
        *,
        max_runs: int = 64,
        cache_bytes: int | str = 1 << 30,
        **options: object,
    ) -> None:
        check_count("max_runs", max_runs)
        nbytes = parse_bytes(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes
        check_count("cache_bytes", nbytes)
        settings = make(CompileOptions, "penstock.SharedLoops", **options)
        if not isinstance(model, Model):
            model = load(model, limits=settings.limits, map_weights=settings.map_weights)
        # The whole model is compiled only when a run needs it, as few do.
        split = loop_parts(model)
        self._outputs = split.outputs
        self.session = Session(model, settings)
        self._parts = [
            (
                None if part is None else Session(part, settings),
                [_SharedLoop(body, settings, max_runs, nbytes) for body in bodies],
            )
            for part, bodies in split.parts
        ]
        self.inputs, self.outputs = self.session.inputs, self.session.outputs

    @property
    def reasons(self) -> dict[str, str]:
        """Why loops compute runs one after another, by the label of the loop. It may be known only
        after the first run."""
        loops = [loop for _, own in self._parts for loop in own]
        return {x.body.label: x.runner.reason for x in loops if x.runner.reason is not None}

    @property
    def stats(self) -> LoopStats:
        """Counters since the object was made."""
        engines = [loop.engine for _, own in self._parts for loop in own]
        return LoopStats(sum(e.steps for e in engines), sum(e.rows for e in engines))

    def run(
        self,
        feeds: Mapping[str, ArrayLike],
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
    ) -> dict[str, RunValue]:
        """Run the model, and return its outputs by name.

        Args:
            feeds: The inputs by name.
            fetches: Names of the outputs to return; by default all.
            timeout: Seconds after which the call ends with ``DeadlineExceeded``.
            cancel: A ``CancelToken`` that ends the call with ``Cancelled``.
        """
        stop = StopCondition(timeout, cancel)
        names = [*self._outputs] if fetches is None else [*fetches]
        if absent := [name for name in names if name not in self._outputs]:
            raise InvalidInput(
                f"cannot fetch {quoted(absent[0])}: runs that share loops return outputs of the "
                f"model alone, which are {', '.join(map(quoted, self._outputs))}"
            )
        check_names("feed", feeds, {port.name: port.type for port in self.inputs})
        values: dict[str, RunValue] = {
            port.name: convert(port.name, feeds[port.name], port.type) for port in self.inputs
        }
        for session, loops in self._parts:
            if session is not None:
                own = {name: values[name] for name in session._subgraphs.main.names}
                values |= session.run(own, timeout=stop.seconds_left, cancel=cancel)
            for loop in loops:
                if not loop.begins(values):
                    # Without iterations, only a plan of the whole model knows the dims of rows.
                    return self.session.run(feeds, names, timeout=stop.seconds_left, cancel=cancel)
                values |= loop.results(values, stop)
        return {name: values[self._outputs[name]] for name in names}

    async def arun(
        self,
        feeds: Mapping[str, ArrayLike],
        fetches: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        cancel: CancelToken | None = None,
    ) -> dict[str, RunValue]:
        """``run`` for asyncio, with the same arguments, on a thread of asyncio's pool. Cancelling
        the task ends the run."""
        import asyncio

        from penstock.executors.control import CancelToken

        token = CancelToken(cancel)
        try:
            return await asyncio.to_thread(self.run, feeds, fetches, timeout=timeout, cancel=token)
        except asyncio.CancelledError:
            token.cancel()
            raise


class _SharedLoop:
    """Runs the iterations of one loop."""

    def __init__(
        self, body: LoopBody, options: CompileOptions, most_runs: int, most_bytes: int
    ) -> None:
        self.body = body
        fed = FedState(body.model, body.state, grows=True)
        self.runner = BatchedRunner(fed, options, most_bytes, most_runs)
        self.engine = StepEngine(self.runner, most_runs, self.runner.history)
        self._most = self.runner.session.limits.max_iterations

    def begins(self, values: Mapping[str, RunValue]) -> bool:
        """Whether the loop has an iteration for these values."""
        goes_on = _value(self.body.goes_on, values)
        return self._trips(values) != 0 and (goes_on is None or bool(np.all(goes_on)))

    def _trips(self, values: Mapping[str, RunValue]) -> int | None:
        trips = _value(self.body.trips, values)
        return None if trips is None else max(int(np.asarray(trips).reshape(())), 0)

    def results(self, values: Mapping[str, RunValue], stop: StopCondition) -> dict[str, RunValue]:
        """Return the results of the loop, by the names of values."""
        body = self.body
        state = self.engine.sequence(0)
        run = _LoopRun(self, state, self._trips(values), self._most)
        first = {name: _value(source, values) for name, source in body.first.items()}
        run.outside = {name: np.asarray(values[source]) for name, source in body.outside.items()}
        state.arrays = self.runner.initial({n: x for n, x in first.items() if x is not None})
        state.stop = stop if stop.limited else None
        state.returns = True
        # A waiting thread runs the steps of all runs, so that a single run needs no other thread.
        try:
            run.feed()
            self.engine.drive(lambda: run.ended)
        finally:
            self.engine.close(state)
        if run.error is not None:
            raise run.error
        rows = [np.stack(run.rows[name]) for name in body.rows]
        # A sample of a batch of scalars is a NumPy scalar, not an array.
        results = [*map(np.asarray, run.final.values()), *rows]
        return {n: x for n, x in zip(body.results, results, strict=True) if n is not None}


class _LoopRun:
    """A run in a loop: the results of each iteration enqueue the next one."""

    def __init__(
        self, loop: _SharedLoop, state: SequenceState, trips: int | None, most: int | None
    ) -> None:
        self._loop, self._state, self._trips, self._most = loop, state, trips, most
        self._count = 0
        self.outside: dict[str, np.ndarray] = {}
        self.rows: dict[str, list[np.ndarray]] = {name: [] for name in loop.body.rows}
        self.final: dict[str, np.ndarray] = {}
        self.error: BaseException | None = None
        self.ended = False

    def feed(self) -> None:
        """Enqueue the next iteration."""
        names = self._loop.runner.rows
        given = {ITERATION: np.array(self._count), CONDITION: np.array(True), **self.outside}
        rows = {name: given[name] for name in names}
        self._loop.engine.feed(self._state, rows, 1, self._done)

    def _done(self, outputs: Rows | None, error: BaseException | None) -> None:
        if outputs is None:
            self.error, self.ended = error or InvalidInput("the run was ended"), True
            return
        try:
            self._take(outputs)
        except Exception as own:
            self.error, self.ended = own, True

    def _take(self, outputs: Rows) -> None:
        self._count += 1
        for name, rows in self.rows.items():
            rows.append(outputs[name])
        if self._count != self._trips and bool(np.all(outputs[GOES_ON])):
            if self._most is not None and self._count >= self._most:
                raise LimitExceeded(
                    f"{self._loop.body.label} passed the limit of {self._most} iterations; raise "
                    "Limits.max_iterations if it is meant to take as many"
                )
            self.feed()
            return
        self.final = self._loop.runner.state_of(self._state)
        self.ended = True


def _value(source: str | np.ndarray | None, values: Mapping[str, RunValue]) -> RunValue | None:
    return values[source] if isinstance(source, str) else source
