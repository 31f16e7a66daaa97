"""The frames executor: TensorFlow's, with tagged tokens, dead values and frames of iterations.

A token is a value on its way to a node, in one iteration of one frame, or the word that there will
be none. A node runs when a token has come on each of its inputs; a Merge when the first living one
has. Kernels that take long run on the pool of the process, all else on the thread that the run is
on: only that thread touches what changes during a run, so that nothing of it is locked. Who ends a
kernel when that thread has left for want of work goes on in its place. Asynchronous kernels end on
whatever thread ends them, and so do Recvs, whose values other parts of the run send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.binding import unshared
from penstock.errors import (
    Aborted,
    Cancelled,
    DeadTensor,
    LimitExceeded,
    PenstockError,
    RunError,
)
from penstock.executors.barrier import Barrier, Joined
from penstock.executors.base import Control, quiet
from penstock.ir import Value
from penstock.limits import Limits
from penstock.liveness import Layout
from penstock.ops.base import array_of
from penstock.threads import Workers, report
from penstock.tokens import FrameInfo, Item, Kind, Tokens
from penstock.types import ShapeError

DEAD: Any = type("Dead", (), {"__repr__": lambda self: "DEAD"})()
"""Stands for a value that will not come."""

# Looked up for every token: as names of this module, that takes a tenth of the time.
_ORDINARY, _SWITCH, _MERGE, _ENTER = Kind.ORDINARY, Kind.SWITCH, Kind.MERGE, Kind.ENTER
_EXIT, _NEXT_ITERATION, _TRIGGER = Kind.EXIT, Kind.NEXT_ITERATION, Kind.TRIGGER
_FETCH, _CALL, _RETURN = Kind.FETCH, Kind.CALL, Kind.RETURN
_ASYNCHRONOUS, _SEND, _RECV = Kind.ASYNCHRONOUS, Kind.SEND, Kind.RECV

Outputs = Sequence[Any]

# Seconds from which on a kernel is worth another thread, and how much of what a kernel took last
# counts for what it is taken to take. Cheap ones are measured once in so many times.
_LONG_S = 200e-6
_WEIGHT = 0.25
_SAMPLED = 16

# Tokens that one part of a run moves before another has its turn on the same thread: 1 ms or so.
_TURN = 1000


class _Iteration:
    """One iteration of a frame: its inputs, what its items wait for, how many of these inputs are
    dead, how many tokens are on their way in it, and the frames inside of it."""

    __slots__ = ("children", "dead", "inputs", "tokens", "waits")

    def __init__(self, info: FrameInfo) -> None:
        self.inputs = info.inputs.copy()
        self.waits = info.waits.copy()
        self.dead = [0] * len(info.waits)
        self.tokens = 0
        self.children: dict[str, _Frame] = {}


class _Frame:
    """A frame that was entered, in iteration ``at`` of ``parent``. ``last`` is its newest
    iteration, ``entering`` how many tokens are yet to enter; ``constants`` came to all iterations,
    ``deferred`` wait for another to begin, dead ``exits`` for the frame to end."""

    __slots__ = (
        "at",
        "constants",
        "deferred",
        "entering",
        "exits",
        "id",
        "info",
        "iterations",
        "last",
        "parent",
    )

    def __init__(self, info: FrameInfo, parent: _Frame | None, at: int) -> None:
        self.info = info
        self.parent = parent
        self.at = at
        self.iterations: dict[int, _Iteration] = {0: _Iteration(info)}
        self.last = 0
        self.entering = info.enters
        self.constants: list[tuple[Item, Any]] = []
        self.deferred: list[tuple[Item, Any]] = []
        self.exits: list[Item] = []
        self.id = ""

    def name(self) -> str:
        """What distinguishes it from all other frames of the run, in all parts of that."""
        if not self.id and self.parent is not None:
            self.id = f"{self.parent.name()}/{self.at};{self.info.name}"
        return self.id


class _Call(_Frame):
    """A graph that runs, in a frame of its own: that of the run, or what ``item`` calls in
    iteration ``at`` of ``parent``, the ``depth``-th call of a function around this one included.
    ``calling`` goes on with its ``results``."""

    __slots__ = ("calling", "depth", "item", "results", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        parent: _Frame | None = None,
        at: int = 0,
        item: Item | None = None,
        calling: Any = None,
    ) -> None:
        super().__init__(tokens.root, parent, at)
        self.tokens = tokens
        self.item = item
        self.calling = calling
        self.results: list[Any] = [None] * len(tokens.fetches)
        self.depth: int = 0 if parent is None else _caller(parent).depth + bool(tokens.function)


def _caller(frame: _Frame | None) -> _Call:
    """The call that a frame is in, or is."""
    while not isinstance(frame, _Call):
        assert frame is not None
        frame = frame.parent
    return frame


_Token = tuple[Item, _Frame, int, bool]


class _Answer:
    """What an asynchronous kernel is told to call when it has ended; forgets the run then."""

    __slots__ = ("cancel", "run", "token")

    def __init__(self, run: FramesRun, token: _Token) -> None:
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
        self.root = _Call(tokens)
        self.ready: deque[_Token] = deque()
        self.heavy: list[_Token] = []
        self.calls: list[_Token] = []
        self.error: BaseException | None = None
        # By item, what a Switch has chosen last: it may be asked why a value is dead.
        self.chosen: dict[Item, int] = {}
        self.away = 0  # kernels on other threads, asynchronous ones included
        self.asked: set[_Answer] = set()
        # What other threads have left to do for the thread of the run.
        self.lock = barrier.lock
        self.back: deque[tuple[Any, ...]] = deque([(self._start, inputs)])
        self.active = True
        self.resting = False

    def _start(self, inputs: Sequence[Any]) -> None:
        self._begin(self.root, inputs)

    def _begin(self, call: _Call, inputs: Sequence[Any]) -> None:
        """Let a graph begin with its inputs."""
        tokens = call.tokens
        call.iterations[0].tokens = len(tokens.roots)
        self.ready.extend([(item, call, 0, False) for item in tokens.roots])
        for item, value in zip(tokens.feeds, inputs, strict=True):
            self._deliver(item, call, 0, False, (value,))

    # The thread of the run.

    def go(self) -> None:
        while True:
            try:
                self._work()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    self.control.set(Cancelled("the run was interrupted"))
            if self.ready or self.heavy or self.calls:  # it is another part's turn
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
        ready, back, control = self.ready, self.back, self.control
        while True:
            for _ in range(_TURN):
                while back:
                    function, *arguments = back.popleft()
                    function(*arguments)
                if control.stopped and self.error is None:
                    self._stop()
                if ready:
                    self._token(ready.popleft())
                elif self.heavy:
                    self._share()
                elif self.calls:
                    # The latest first, so that few go on at once.
                    self._call(self.calls.pop())
                else:
                    return
            if self.barrier.waiting:
                return

    def _stop(self) -> None:
        """Somebody has stopped the run; say where it was."""
        error = self.control.error or Cancelled("the run was stopped")
        for item, *_ in [*self.ready, *self.heavy, *self.calls][:1]:
            if item.node is not None:
                error.add_note(f"The run had come to {item.node.op.name} ({item.node.label}).")
        self._fail(error)

    def _token(self, token: _Token) -> None:
        """Let a token pass its item."""
        item, frame, number, dead = token
        if dead and item.kind is not _TRIGGER:
            if item.kind is _FETCH:
                self._fetch(item, frame, DEAD)
            elif item.kind is _SEND:
                self._send(item, frame, number, None, True)
            elif item.kind is _RECV:
                self._receive(token)
                return
            self._pass(item, frame, number, True, ())
        elif item.kind is _ORDINARY:
            if item.cost > _LONG_S and self.pool is not None and not self.observe:
                self.heavy.append(token)
            else:
                self._run(token)
        elif item.kind is _CALL:
            self.calls.append(token)
        elif item.kind is _RETURN:
            assert isinstance(frame, _Call)
            self._resume(frame)
        elif item.kind is _RECV:
            self._receive(token)
        elif item.kind is _ASYNCHRONOUS:
            self._ask(token)
        else:
            inputs = frame.iterations[number].inputs
            try:
                if item.kind is _SEND:
                    self._send(item, frame, number, *inputs[item.first : item.end])
                outputs = self._primitive(item, frame, inputs[item.first : item.end])
            except Exception as error:
                self._fail(_explained(item, inputs[item.first : item.end], error))
                return
            if self.observe and item.node is not None:
                self._begun(item, inputs[item.first : item.end])
                self._ended(item, outputs)
            self._pass(item, frame, number, False, outputs)

    def _primitive(self, item: Item, frame: _Frame, inputs: list[Any]) -> Outputs:
        """What a living primitive makes of its inputs."""
        kind = item.kind
        if kind is _MERGE:
            for i, value in enumerate(inputs):
                if value is not None:
                    return value, _index(i)
            raise AssertionError("a Merge without a value")
        if kind is _SWITCH:
            value, predicate = inputs
            which = _which(predicate, item.outputs)
            self.chosen[item] = which
            outputs = [DEAD] * item.outputs
            outputs[which] = value
            return outputs
        if kind is _FETCH:
            self._fetch(item, frame, inputs[0])
            return ()
        return () if kind is _SEND else inputs

    def _run(self, token: _Token) -> None:
        """Run a kernel here."""
        item, frame, number, _ = token
        iteration = frame.iterations[number]
        inputs = iteration.inputs[item.first : item.end]
        item.left -= 1
        measured = item.left < 0
        start = perf_counter() if measured else 0.0
        if self.observe:
            self._begun(item, inputs)
        try:
            outputs = _called(item, inputs, self.control)
        except Exception as error:
            self._fail(_explained(item, inputs, error))
            return
        if measured:
            item.left = _SAMPLED
            item.cost += _WEIGHT * (perf_counter() - start - item.cost)
        if self.observe:
            self._ended(item, outputs)
        self._pass(item, frame, number, False, outputs)

    # Calls of functions, and of graphs that call them.

    def _call(self, token: _Token) -> None:
        """Begin a call; it has ended when there is nothing more to run for it."""
        item, frame, number, _ = token
        inputs = frame.iterations[number].inputs[item.first : item.end]
        if self.observe:
            self._begun(item, inputs)
        assert item.function is not None
        self._go_on(item, frame, number, item.function(*inputs), None)

    def _go_on(
        self, item: Item, frame: _Frame, number: int, calling: Any, results: Outputs | None
    ) -> None:
        """Run what a call asks for next, or pass on what it has made."""
        try:
            tokens, inputs = calling.send(results)
            call = _Call(tokens, frame, number, item, calling)
            if call.depth > self.limits.max_calls:
                raise LimitExceeded(
                    f"function {tokens.function!r} is called at the end of more calls than "
                    f"Limits.max_calls = {self.limits.max_calls}: it may call itself without an "
                    "end; raise the limit if the model should go that deep"
                )
        except StopIteration as end:
            outputs = end.value
        except Exception as error:
            self._fail(
                _explained(item, frame.iterations[number].inputs[item.first : item.end], error)
            )
            return
        else:
            self._begin(call, inputs)
            if not call.iterations[0].tokens:
                self._close(call, 0)
            return
        if self.observe:
            self._ended(item, outputs)
        self._pass(item, frame, number, False, outputs)

    def _resume(self, call: _Call) -> None:
        """A call has run all that it had to."""
        error = _missing(call, self.chosen)
        if error is not None:
            self._fail(error)
            return
        assert call.item is not None and call.parent is not None
        self._go_on(call.item, call.parent, call.at, call.calling, call.results)

    # Observers.

    def _begun(self, item: Item, inputs: Sequence[Any]) -> None:
        if item.step is not None:
            known = inputs[: len(item.step.inputs)]
            self.control.observer.step_begin(self.control.run, item.step, known)

    def _ended(self, item: Item, outputs: Outputs) -> None:
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
            item, frame, number, _ = token
            inputs = frame.iterations[number].inputs[item.first : item.end]
            if pool is not None and pool.offer(partial(self._elsewhere, token, inputs)):
                self.away += 1
            else:
                self._run(token)
        self._run(heavy[-1])

    def _elsewhere(self, token: _Token, inputs: list[Any]) -> None:
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

    def _came(
        self, token: _Token, result: Any, error: BaseException | None, seconds: float
    ) -> None:
        """A kernel has ended on another thread."""
        item, frame, number, _ = token
        self.away -= 1
        item.cost += _WEIGHT * (seconds - item.cost)
        if error is not None:
            self._fail(error)
        elif self.error is None:
            self._pass(item, frame, number, False, result)

    # Asynchronous kernels, and what comes from other parts of the run.

    def _ask(self, token: _Token) -> None:
        """Begin an asynchronous kernel."""
        item, inputs = token[0], self._inputs(token)
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
        item, frame, number, _ = answer.token
        if error is None:
            try:
                outputs = _outputs(item, result)
            except Exception as raised:
                self._fail(_explained(item, self._inputs(answer.token), raised))
                return
            if self.observe:
                self._ended(item, outputs)
            self._pass(item, frame, number, False, outputs)
        else:
            self._fail(_explained(item, self._inputs(answer.token), error))

    @staticmethod
    def _inputs(token: _Token) -> list[Any]:
        item, frame, number, _ = token
        return frame.iterations[number].inputs[item.first : item.end]

    def _send(
        self, item: Item, frame: _Frame, number: int, value: Any = None, dead: bool = False
    ) -> None:
        rendezvous = self.barrier.rendezvous
        assert rendezvous is not None
        rendezvous.send((item.key, frame.id or frame.name(), number), value, dead)

    def _receive(self, token: _Token) -> None:
        item, frame, number, _ = token
        if self.observe:
            self._begun(item, ())
        rendezvous = self.barrier.rendezvous
        assert rendezvous is not None
        key = item.key, frame.id or frame.name(), number
        try:
            found = rendezvous.recv(key, partial(self.post, self._received, token))
        except Aborted as error:
            self._fail(error)
            return
        if found is not None:
            value, dead = found
            if self.observe:
                self._ended(item, (value,))
            self._pass(item, frame, number, dead, (value,))

    def _received(self, token: _Token, value: Any, dead: bool, error: Aborted | None) -> None:
        if error is not None:
            self._fail(error)
        elif self.error is None:
            item, frame, number, _ = token
            if self.observe:
                self._ended(item, (value,))
            self._pass(item, frame, number, dead, (value,))

    def _fail(self, error: BaseException) -> None:
        """The first error ends the run: nothing that is ready will run."""
        if self.error is None:
            self.error = error
        self.ready.clear()
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
                    report()

    def _fetch(self, item: Item, frame: _Frame, value: Any) -> None:
        call = _caller(frame)
        known = call.results[item.port]
        if known is not None and known is not DEAD:
            if value is DEAD:
                return  # in another iteration
            name = call.tokens.graph.outputs[item.port].name
            raise RunError(
                f"{name!r} was made twice: it is inside of a loop. Fetch what leaves the loop"
            )
        call.results[item.port] = value

    # Tokens on their way.

    def _pass(self, item: Item, frame: _Frame, number: int, dead: bool, outputs: Outputs) -> None:
        """Send on what an item has made, and count its own token as gone."""
        kind = item.kind
        if kind is _ENTER:
            self._enter(item, frame, number, dead, outputs)
        elif kind is _EXIT:
            if not dead:
                assert frame.parent is not None
                self._deliver(item, frame.parent, frame.at, False, outputs)
            elif number == frame.last:
                frame.exits.append(item)
        elif kind is _NEXT_ITERATION:
            if not dead:
                self._next(item, frame, number, outputs)
        else:
            self._deliver(item, frame, number, dead, outputs)
        iteration = frame.iterations[number]
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(frame, number)

    def _enter(self, item: Item, frame: _Frame, number: int, dead: bool, outputs: Outputs) -> None:
        info = item.child
        assert info is not None
        children = frame.iterations[number].children
        child = children.get(info.name)
        if child is None:
            child = children[info.name] = _Frame(info, frame, number)
        child.entering -= 1
        if not item.constant:
            self._deliver(item, child, 0, dead, outputs)
        else:
            value = DEAD if dead else outputs[0]
            child.constants.append((item, value))
            for each in list(child.iterations):
                self._deliver(item, child, each, dead, outputs)
        first = child.iterations.get(0)
        if first is not None and not first.tokens and not child.entering:
            self._close(child, 0)

    def _next(self, item: Item, frame: _Frame, number: int, outputs: Outputs) -> None:
        if number == frame.last:
            if len(frame.iterations) >= frame.info.parallel:
                frame.deferred.append((item, outputs[0]))
                return
            self._advance(frame)
        self._deliver(item, frame, number + 1, False, outputs)

    def _advance(self, frame: _Frame) -> None:
        """Begin another iteration."""
        most = self.limits.max_iterations
        if most is not None and frame.last >= most:
            raise LimitExceeded(
                f"the frame {frame.info.name!r} passed the limit of {most} iterations; raise "
                "Limits.max_iterations if that is what the model should do"
            )
        frame.last += 1
        frame.iterations[frame.last] = _Iteration(frame.info)
        frame.exits.clear()
        deferred, frame.deferred = frame.deferred, []
        for item, value in deferred:
            self._deliver(item, frame, frame.last, False, (value,))
        for item, value in frame.constants:
            self._deliver(item, frame, frame.last, value is DEAD, (value,))

    def _deliver(
        self, item: Item, frame: _Frame, number: int, dead: bool, outputs: Outputs
    ) -> None:
        """Bring outputs, or the word that they are dead, to all who wait for them."""
        iteration = frame.iterations[number]
        inputs, waits, deaths = iteration.inputs, iteration.waits, iteration.dead
        ready = self.ready
        before = len(ready)
        for k, edges in enumerate(item.edges):
            value = DEAD if dead else outputs[k] if edges else None
            for reader, place in edges:
                at = reader.place
                if reader.kind is _MERGE:
                    left = waits[at]
                    if value is not DEAD:
                        # The first that lives counts: later ones find the bit gone.
                        if left & 1:
                            inputs[place] = value
                            waits[at] = left = left - 1
                            if not left:
                                ready.append((reader, frame, number, False))
                        continue
                    deaths[at] += 1
                    if left == 1 and (deaths[at] == reader.data or item.kind is _ENTER):
                        waits[at] = 0
                        ready.append((reader, frame, number, True))
                    continue
                if value is DEAD:
                    deaths[at] = 1
                else:
                    inputs[place] = value
                waits[at] = left = waits[at] - 1
                if not left:
                    ready.append((reader, frame, number, bool(deaths[at])))
        for reader in item.controls:
            at = reader.place
            if reader.kind is _MERGE:
                waits[at] = left = waits[at] - 2
                if not left:
                    ready.append((reader, frame, number, False))
                elif left == 1 and deaths[at] == reader.data:
                    waits[at] = 0
                    ready.append((reader, frame, number, True))
                continue
            if dead:
                deaths[at] = 1
            waits[at] = left = waits[at] - 1
            if not left:
                ready.append((reader, frame, number, bool(deaths[at])))
        iteration.tokens += len(ready) - before

    def _close(self, frame: _Frame, number: int) -> None:
        """End iterations, from this one on, and frames, as far as nothing goes on in them."""
        while True:
            while self._is_over(frame, number):
                del frame.iterations[number]
                number += 1
                if frame.deferred:
                    self._advance(frame)
            parent = frame.parent
            if frame.iterations or frame.entering or parent is None:
                return
            if isinstance(frame, _Call):
                self.ready.append((frame.tokens.end, frame, 0, False))
                return
            around = parent.iterations[frame.at]
            del around.children[frame.info.name]
            for item in frame.exits:
                self._deliver(item, parent, frame.at, True, ())
            if around.tokens:
                return
            frame, number = parent, frame.at

    @staticmethod
    def _is_over(frame: _Frame, number: int) -> bool:
        iteration = frame.iterations.get(number)
        if iteration is None or iteration.tokens or iteration.children:
            return False
        return not frame.entering if not number else number - 1 not in frame.iterations


def _index(i: int) -> Any:
    """What a Merge says of the input that it has taken."""
    return _INDICES[i] if i < len(_INDICES) else np.array(i, np.int32)


_INDICES = [np.array(i, np.int32) for i in range(16)]
for _each in _INDICES:
    _each.flags.writeable = False


def _which(predicate: Any, outputs: int) -> int:
    """The output that a Switch chooses; out of range, the last."""
    if predicate.size != 1:
        raise ShapeError(f"a predicate must have one element, not shape {list(predicate.shape)}")
    chosen = int(predicate.reshape(-1)[0])
    return chosen if 0 <= chosen < outputs else outputs - 1


def _called(item: Item, inputs: Sequence[Any], control: Control) -> Outputs:
    """The outputs of a kernel."""
    assert item.function is not None
    result = item.function(control, *inputs) if item.nested else item.function(*inputs)
    return _outputs(item, result)


def _outputs(item: Item, result: Any) -> Outputs:
    """What a kernel has made, one for each output."""
    if item.outputs == 1:
        return (array_of(result),)
    return () if result is None else tuple([array_of(each) for each in result])


def _explained(item: Item, inputs: Sequence[Any], error: BaseException) -> PenstockError:
    """The error of a kernel, with its node."""
    node = item.node
    if node is None:
        return error if isinstance(error, PenstockError) else RunError(f"a fetch failed: {error!r}")
    if isinstance(error, PenstockError):
        error.add_note(f"The run had come to {node.op.name} ({node.label}).")
        return error
    shapes = ", ".join(
        "none"
        if v is None
        else f"{v.name}: {getattr(x, 'dtype', '?')}{list(getattr(x, 'shape', None) or ())}"
        for v, x in zip(node.inputs, inputs, strict=True)
    )
    what = f"{error}" if isinstance(error, ShapeError | MemoryError) else f"{error!r}"
    found = RunError(f"{node.op.name} ({node.label}) with inputs ({shapes}): {what}")
    found.__cause__ = error
    return found


class FramesExecutor(Joined):
    """Runs a graph with TensorFlow's primitives of control flow, or without."""

    name = "frames"
    tasks = None
    arena_bytes = 0

    def __init__(
        self, tokens: Tokens, workers: Workers | None, limits: Limits, observed: bool = False
    ) -> None:
        self.tokens = tokens
        self._limits = limits
        self.plan = tokens.plan()
        self.layout = Layout(tuple(range(len(self.plan.steps))), {}, {}, 0, 0)
        self._workers = workers
        self._observed = observed

    @property
    def source(self) -> str:
        """The nodes, each with the frame that it is in."""
        lines = [f"{i.frame.name or '-'}: {i.node!r}" for i in self.tokens.items if i.node]
        return "\n".join(lines) + "\n"

    @property
    def plan_bytes(self) -> int:
        return _ITEM_BYTES * len(self.tokens.items)

    def observed(self) -> FramesExecutor:
        return FramesExecutor(self.tokens, self._workers, self._limits, True)

    def trim(self) -> None:
        pass

    def part(self, barrier: Barrier, inputs: Sequence[Any]) -> FramesRun:
        """A run that ends at a barrier, with others perhaps."""
        observe, limits = self._observed, self._limits
        return FramesRun(self.tokens, inputs, self._workers, observe, limits, barrier)

    @property
    def asynchronous(self) -> bool:
        """Whether its runs may wait for somebody outside."""
        return self.tokens.asynchronous

    def results(self, run: FramesRun) -> tuple[Any, ...]:
        """The outputs of a run that has ended; raises ``DeadTensor``."""
        dead = _missing(run.root, run.chosen)
        if dead is not None:
            raise dead
        return tuple([unshared(result) for result in run.root.results])

    def _begin(self, barrier: Barrier, inputs: Sequence[Any]) -> None:
        barrier.begin([self.part(barrier, inputs)], listens=self.asynchronous)

    def _outputs(self, parts: Sequence[FramesRun]) -> tuple[Any, ...]:
        return self.results(parts[0])


# What an item takes, with its node, about.
_ITEM_BYTES = 2000


def _missing(call: _Call, chosen: Mapping[Item, int]) -> DeadTensor | None:
    """The error of a graph that has ended without one of its results, if one is missing."""
    for value, result in zip(call.tokens.graph.outputs, call.results, strict=True):
        if result is None or result is DEAD:
            return _dead(value, result is DEAD, chosen)
    return None


def _dead(value: Value, dead: bool, chosen: Mapping[Item, int]) -> DeadTensor:
    """The error of a fetch without a value, with what has killed it, if that was a Switch."""
    if not dead:
        return DeadTensor(
            f"{value.name!r} was never made: what it waits for did not come. It may be inside of a "
            "loop, or wait for a value that only the first iteration has"
        )
    by_node = {item.node: item for item in chosen}
    seen: set[Value] = {value}
    queue = deque([value])
    while queue:
        node = queue.popleft().producer
        if node is None:
            continue
        item = by_node.get(node)
        if item is not None:
            return DeadTensor(
                f"{value.name!r} has no value: it is in a branch that was not taken. {node.label} "
                f"chose its output {chosen[item]}"
            )
        for each in node.inputs:
            if each is not None and each not in seen:
                seen.add(each)
                queue.append(each)
    return DeadTensor(f"{value.name!r} has no value: it is in a branch that was not taken")
