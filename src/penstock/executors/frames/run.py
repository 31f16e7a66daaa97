"""One run of the frames executor.

A token is a value on its way to a node, in one iteration of one frame, or the word that there will
be none. A node runs when a token has come on each of its inputs; a Merge when the first living one
has. Kernels that take long run on the pool of the process, all else on the thread that the run is
on: only that thread touches what changes during a run, so that nothing of it is locked. Who ends a
kernel when that thread has left for want of work goes on in its place. Asynchronous kernels end on
whatever thread ends them, and so do Recvs, whose values other parts of the run send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.errors import Aborted, Cancelled, LimitExceeded, PenstockError, RunError
from penstock.executors.base import quiet
from penstock.executors.control import Control
from penstock.executors.frames.barrier import Barrier
from penstock.executors.frames.scheduler import DEAD, Call, Flow, Iteration, Token, caller, missing
from penstock.executors.frames.tokens import FrameNode, Kind, Tokens
from penstock.host.threads import Workers, report_thread_exception
from penstock.ir.describe import describe_node
from penstock.ir.op import array_of
from penstock.limits import Limits
from penstock.types import ShapeError

_ORDINARY, _SWITCH, _TRIGGER, _FETCH = Kind.ORDINARY, Kind.SWITCH, Kind.TRIGGER, Kind.FETCH
_CALL, _RETURN, _ASYNCHRONOUS = Kind.CALL, Kind.RETURN, Kind.ASYNCHRONOUS
_SEND, _RECV = Kind.SEND, Kind.RECV

_ndarray = np.ndarray

Outputs = Sequence[Any]

# Seconds from which on a kernel is worth another thread, and how much of what a kernel took last
# counts for what it is taken to take. Cheap ones are measured once in so many times.
_LONG_S = 200e-6
_WEIGHT = 0.25
_SAMPLED = 16

# Tokens that one part of a run moves before another has its turn on the same thread: 1 ms or so.
_TURN = 1000


class _Answer:
    """What an asynchronous kernel is told to call when it has ended; forgets the run then."""

    __slots__ = ("cancel", "run", "token")

    def __init__(self, run: FramesRun, token: Token) -> None:
        self.run: FramesRun | None = run
        self.token = token
        self.cancel: Callable[[], object] | None = None

    def __call__(self, outputs: Any = None, error: BaseException | None = None) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.post(run._answered, self, outputs, error)


class FramesRun:
    """One run of one part of a graph: all that changes while it goes on."""

    def __init__(
        self,
        tokens: Tokens,
        inputs: Sequence[Any],
        pool: Workers | None,
        observe: bool,
        limits: Limits,
        barrier: Barrier,
    ) -> None:
        self.limits = limits
        self.control = barrier.control
        self.pool = pool
        self.observe = observe
        self.barrier = barrier
        self.root = Call(tokens)
        self.flow = Flow(limits.max_iterations)
        self.heavy: list[Token] = []
        self.calls: list[Token] = []
        self.error: BaseException | None = None
        # By item, what a Switch has chosen last: it may be asked why a value is dead.
        self.chosen: dict[FrameNode, int] = {}
        self.away = 0  # kernels on other threads, asynchronous ones included
        self.asked: set[_Answer] = set()
        # What other threads have left to do for the thread of the run.
        self.lock = barrier.lock
        self.back: deque[tuple[Any, ...]] = deque([(self.flow.begin, self.root, inputs)])
        self.active = True
        self.resting = False

    # The thread of the run.

    def go(self) -> None:
        while True:
            try:
                self._work()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    self.control.set(Cancelled("the run was interrupted"))
            if self.flow.ready or self.heavy or self.calls:  # it is another part's turn
                self.barrier.resume(self)
                return
            with self.lock:
                if self.back:
                    continue
                self.active = False
                self.resting = not self.away
                ended = self.resting and self.barrier.rested()
            if ended:
                self.barrier.end()
            return

    def check(self) -> None:
        """Nothing to do but to look at the control, as the thread of the run does all the time."""

    def _work(self) -> None:
        """Go on until nothing is left to do, or another part has its turn."""
        while self._turn():
            if self.barrier.waiting:
                return

    def _turn(self) -> bool:
        """Let so many tokens pass their items as one turn has; False if no more are left.

        The way of most tokens is written out here: to call a method for each takes a third longer.
        """
        back, control, ready, send = self.back, self.control, self.flow.ready, self.flow.send
        observe, spent = self.observe, self.flow.spent
        for _ in range(_TURN):
            while back:
                function, *arguments = back.popleft()
                function(*arguments)
            if control.stopped and self.error is None:
                self._stop()
            if not ready:
                if self.heavy:
                    self._share()
                elif self.calls:
                    # The latest first, so that few go on at once.
                    self._call(self.calls.pop())
                else:
                    return False
                continue
            token = ready.popleft()
            item, iteration, dead = token
            if dead or observe:
                self._token(token)
                continue
            if item.passes:
                outputs: Outputs = iteration.inputs[item.first : item.end]
            elif item.left:
                item.left -= 1
                inputs = iteration.inputs[item.first : item.end]
                try:
                    result = item.function(*inputs)  # type: ignore[misc]
                    if item.outputs == 1:
                        outputs = (result if result.__class__ is _ndarray else array_of(result),)
                    else:
                        outputs = _outputs(item, result)
                except Exception as error:
                    self._fail(_explained(item, inputs, error))
                    continue
            elif item.kind is _SWITCH:
                inputs = iteration.inputs[item.first : item.end]
                try:
                    outputs = self._switch(item, *inputs)
                except Exception as error:
                    self._fail(_explained(item, inputs, error))
                    continue
            else:
                self._token(token)
                continue
            single = item.single
            if single is None:
                send(item, iteration, outputs)
                continue
            reader, at, place = single
            iteration.inputs[place] = outputs[0]
            waits = iteration.waits
            waits[at] = left = waits[at] - 1
            if not left:
                # One token for another.
                ready.append((reader, iteration, False))
            else:
                spent(reader, iteration, left)
        return True

    def _stop(self) -> None:
        """Somebody has stopped the run; say where it was."""
        error = self.control.error or Cancelled("the run was stopped")
        for item, *_ in [*self.flow.ready, *self.heavy, *self.calls][:1]:
            if item.node is not None:
                error.add_note(f"The run had come to {item.node.op.name} ({item.node.label}).")
        self._fail(error)

    def _token(self, token: Token) -> None:
        """Let a token pass its item, of whatever kind that is."""
        item, iteration, dead = token
        if dead and item.kind is not _TRIGGER:
            if item.kind is _RECV:
                self._receive(token)
                return
            if item.kind is _FETCH:
                self._fetch(item, iteration, DEAD)
            elif item.kind is _SEND:
                self._send(item, iteration, None, True)
            self.flow.bury(item, iteration)
        elif item.kind is _ORDINARY:
            if item.cost > _LONG_S and self.pool is not None and not self.observe:
                self.heavy.append(token)
            else:
                self._run(token)
        elif item.kind is _CALL:
            self.calls.append(token)
        elif item.kind is _RETURN:
            self._resume(caller(iteration.frame))
        elif item.kind is _RECV:
            self._receive(token)
        elif item.kind is _ASYNCHRONOUS:
            self._ask(token)
        else:
            inputs = _inputs(token)
            try:
                outputs = self._primitive(item, iteration, inputs)
            except Exception as error:
                self._fail(_explained(item, inputs, error))
                return
            if self.observe and item.node is not None:
                self._begun(item, inputs)
                self._ended(item, outputs)
            self.flow.send(item, iteration, outputs)

    def _primitive(self, item: FrameNode, iteration: Iteration, inputs: list[Any]) -> Outputs:
        """What a living primitive makes of its inputs."""
        kind = item.kind
        if kind is _SWITCH:
            return self._switch(item, *inputs)
        if kind is _FETCH:
            self._fetch(item, iteration, inputs[0])
            return ()
        if kind is _SEND:
            self._send(item, iteration, *inputs)
            return ()
        return inputs

    def _switch(self, item: FrameNode, value: Any, predicate: Any) -> Outputs:
        if predicate.size != 1:
            shape = list(predicate.shape)
            raise ShapeError(f"a predicate must have one element, not shape {shape}")
        which, count = int(predicate.item()), item.outputs
        if not 0 <= which < count:
            which = count - 1
        self.chosen[item] = which
        if count == 2:
            return (DEAD, value) if which else (value, DEAD)
        outputs = [DEAD] * count
        outputs[which] = value
        return outputs

    def _run(self, token: Token) -> None:
        """Run a kernel here, and measure it."""
        item, iteration, _ = token
        inputs = _inputs(token)
        if self.observe:
            self._begun(item, inputs)
        start = perf_counter()
        try:
            outputs = _called(item, inputs, self.control)
        except Exception as error:
            self._fail(_explained(item, inputs, error))
            return
        _took(item, perf_counter() - start)
        if self.observe:
            self._ended(item, outputs)
        self.flow.send(item, iteration, outputs)

    # Calls of functions, and of graphs that call them.

    def _call(self, token: Token) -> None:
        """Begin a call; it has ended when there is nothing more to run for it."""
        item, iteration, _ = token
        inputs = _inputs(token)
        if self.observe:
            self._begun(item, inputs)
        assert item.function is not None
        self._go_on(item, iteration, item.function(*inputs), None)

    def _go_on(
        self, item: FrameNode, iteration: Iteration, calling: Any, results: Outputs | None
    ) -> None:
        """Run what a call asks for next, or pass on what it has made."""
        try:
            tokens, inputs = calling.send(results)
            call = Call(tokens, iteration, item, calling)
            if call.depth > self.limits.max_calls:
                raise LimitExceeded(
                    f"function {tokens.function!r} is called at the end of more calls than "
                    f"Limits.max_calls = {self.limits.max_calls}: it may call itself without an "
                    "end; raise the limit if the model should go that deep"
                )
        except StopIteration as end:
            outputs = end.value
        except Exception as error:
            self._fail(_explained(item, iteration.inputs[item.first : item.end], error))
            return
        else:
            self.flow.begin(call, inputs)
            return
        if self.observe:
            self._ended(item, outputs)
        self.flow.send(item, iteration, outputs)

    def _resume(self, call: Call) -> None:
        """A call has run all that it had to."""
        error = missing(call, self.chosen)
        if error is not None:
            self._fail(error)
            return
        assert call.item is not None and call.around is not None
        self._go_on(call.item, call.around, call.calling, call.results)

    # Observers.

    def _begun(self, item: FrameNode, inputs: Sequence[Any]) -> None:
        if item.step is not None:
            known = inputs[: len(item.step.inputs)]
            self.control.observer.step_begin(self.control.run, item.step, known)

    def _ended(self, item: FrameNode, outputs: Outputs) -> None:
        if item.step is not None:
            made = [None if value is DEAD else value for value in outputs]
            self.control.observer.step_end(self.control.run, item.step, made)

    def _share(self) -> None:
        """Hand long kernels to other threads, but for one, which this thread runs."""
        heavy, self.heavy = self.heavy, []
        pool = self.pool
        if pool is not None:
            self.barrier.help(pool)
        for token in heavy[:-1]:
            if pool is not None and pool.offer(partial(self._elsewhere, token, _inputs(token))):
                self.away += 1
            else:
                self._run(token)
        self._run(heavy[-1])

    def _elsewhere(self, token: Token, inputs: list[Any]) -> None:
        """Run a kernel on another thread."""
        start = perf_counter()
        result, error = None, None
        try:
            result = quiet(_called, token[0], inputs, self.control)
        except BaseException as raised:
            error = (
                _explained(token[0], inputs, raised) if isinstance(raised, Exception) else raised
            )
        self.post(self._came, token, result, error, perf_counter() - start)

    def post(self, *job: Any) -> None:
        """Leave something to do for the thread of the run, which is this one if there is none."""
        with self.lock:
            self.back.append(job)
            if self.active or (self.resting and not self.barrier.woke(self)):
                return
            self.active = True
            self.resting = False
        self.barrier.resume(self)

    def _came(self, token: Token, result: Any, error: BaseException | None, seconds: float) -> None:
        """A kernel has ended on another thread."""
        item, iteration, _ = token
        self.away -= 1
        _took(item, seconds)
        if error is not None:
            self._fail(error)
        elif self.error is None:
            self.flow.send(item, iteration, result)

    # Asynchronous kernels, and what comes from other parts of the run.

    def _ask(self, token: Token) -> None:
        """Begin an asynchronous kernel."""
        item, inputs = token[0], _inputs(token)
        answer = _Answer(self, token)
        self.away += 1
        self.asked.add(answer)
        if self.observe:
            self._begun(item, inputs)
        assert item.function is not None
        try:
            answer.cancel = item.function(answer, *inputs)
        except Exception as error:
            answer(error=error)

    def _answered(self, answer: _Answer, result: Any, error: BaseException | None) -> None:
        """An asynchronous kernel has ended."""
        if answer not in self.asked:
            return  # nobody waits for it any more
        self.asked.remove(answer)
        self.away -= 1
        item, iteration, _ = answer.token
        inputs = _inputs(answer.token)
        if error is None:
            try:
                outputs = _outputs(item, result)
            except Exception as raised:
                self._fail(_explained(item, inputs, raised))
                return
            if self.observe:
                self._ended(item, outputs)
            self.flow.send(item, iteration, outputs)
        else:
            self._fail(_explained(item, inputs, error))

    def _send(
        self, item: FrameNode, iteration: Iteration, value: Any = None, dead: bool = False
    ) -> None:
        rendezvous = self.barrier.rendezvous
        assert rendezvous is not None
        rendezvous.send(_key(item, iteration), value, dead)

    def _receive(self, token: Token) -> None:
        item, iteration, _ = token
        if self.observe:
            self._begun(item, ())
        rendezvous = self.barrier.rendezvous
        assert rendezvous is not None
        try:
            found = rendezvous.recv(
                _key(item, iteration), partial(self.post, self._received, token)
            )
        except Aborted as error:
            self._fail(error)
            return
        if found is not None:
            self._received(token, *found, None)

    def _received(self, token: Token, value: Any, dead: bool, error: Aborted | None) -> None:
        if error is not None:
            self._fail(error)
        elif self.error is None:
            item, iteration, _ = token
            if dead:
                self.flow.bury(item, iteration)
                return
            if self.observe:
                self._ended(item, (value,))
            self.flow.send(item, iteration, (value,))

    def _fail(self, error: BaseException) -> None:
        """The first error ends the run: nothing that is ready will run."""
        if self.error is None:
            self.error = error
        self.flow.ready.clear()
        self.heavy.clear()
        self.calls.clear()
        self.barrier.fail(error)
        while self.asked:
            answer = self.asked.pop()
            answer.run = None
            self.away -= 1
            if answer.cancel is not None:
                try:
                    answer.cancel()
                except Exception:  # the run has its error already
                    report_thread_exception()

    def _fetch(self, item: FrameNode, iteration: Iteration, value: Any) -> None:
        call = caller(iteration.frame)
        known = call.results[item.port]
        if known is not None and known is not DEAD:
            if value is DEAD:
                return  # in another iteration
            name = call.tokens.graph.outputs[item.port].name
            raise RunError(
                f"{name!r} was made twice: it is inside of a loop. Fetch what leaves the loop"
            )
        call.results[item.port] = value


def _key(item: FrameNode, iteration: Iteration) -> tuple[Any, ...]:
    """The key of a value on its way between parts."""
    frame = iteration.frame
    return item.key, frame.id or frame.name(), iteration.number


def _inputs(token: Token) -> list[Any]:
    item, iteration, _ = token
    return iteration.inputs[item.first : item.end]


def _took(item: FrameNode, seconds: float) -> None:
    """Note what a kernel took, and how often it runs before it is measured again: long ones, and
    those with graphs, are measured each time."""
    item.cost += _WEIGHT * (seconds - item.cost)
    item.left = 0 if item.cost > _LONG_S or item.nested else _SAMPLED


def _called(item: FrameNode, inputs: Sequence[Any], control: Control) -> Outputs:
    """The outputs of a kernel."""
    assert item.function is not None
    result = item.function(control, *inputs) if item.nested else item.function(*inputs)
    return _outputs(item, result)


def _outputs(item: FrameNode, result: Any) -> Outputs:
    """What a kernel has made, one for each output."""
    if item.outputs == 1:
        return (array_of(result),)
    return () if result is None else tuple([array_of(each) for each in result])


def _explained(item: FrameNode, inputs: Sequence[Any], error: BaseException) -> PenstockError:
    """The error of a kernel, with its node."""
    node = item.node
    if node is None:
        return error if isinstance(error, PenstockError) else RunError(f"a fetch failed: {error!r}")
    if isinstance(error, PenstockError):
        error.add_note(f"The run had come to {node.op.name} ({node.label}).")
        return error
    shapes = [
        "none"
        if v is None
        else f"{v.name}: {getattr(x, 'dtype', '?')}{list(getattr(x, 'shape', None) or ())}"
        for v, x in zip(node.inputs, inputs, strict=True)
    ]
    what = f"{error}" if isinstance(error, ShapeError | MemoryError) else f"{error!r}"
    found = RunError(f"{describe_node(node, shapes)}: {what}")
    found.__cause__ = error
    return found
