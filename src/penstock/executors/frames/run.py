"""One run of the frames executor.

A token is a value on its way to a node in one iteration of one frame, or a *dead* token, which
states that no value will come. A node runs when a token has arrived on each of its inputs; a Merge
runs on its first live token. Long kernels run on the process-wide pool, everything else on the
thread of the run: only that thread accesses the state of the run, so no lock is needed. If it has
returned because no work was left, the thread on which a kernel ends takes its place. Asynchronous
kernels may end on any thread, and so may Recvs, which receive values from other parts of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.core.errors import Aborted, Cancelled, LimitExceeded, PenstockError, RunError
from penstock.core.limits import Limits
from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues
from penstock.executors.base import quiet
from penstock.executors.control import Control
from penstock.executors.errors import explained_at
from penstock.executors.frames.barrier import Barrier
from penstock.executors.frames.frame_graph import FrameGraph, FrameNode, TokenRule
from penstock.executors.frames.rendezvous import NoValue
from penstock.executors.frames.scheduler import (
    DEAD,
    MISSING,
    CallInstance,
    IterationState,
    Token,
    TokenScheduler,
    enclosing_call,
    missing_output,
    switched_to,
)
from penstock.host.current_run import working_for
from penstock.host.thread_share import announce
from penstock.host.threads import OVERHEADS, Workers, report_thread_exception
from penstock.ir.kernel import array_of

# Attributes of an enum are slow to read.
_ORDINARY, _SWITCH, _TRIGGER = TokenRule.ORDINARY, TokenRule.SWITCH, TokenRule.CONTROL_TRIGGER
_CALL, _RETURN, _FETCH = TokenRule.CALL, TokenRule.RETURN, TokenRule.FETCH
_SEND, _RECV, _ASYNCHRONOUS = TokenRule.SEND, TokenRule.RECV, TokenRule.ASYNCHRONOUS

_ndarray = np.ndarray  # a global is faster to read than an attribute of a module

Outputs = RunValues

# Seconds above which a kernel runs on another thread. The hand-over and the return each wake a
# thread, which takes tens of us and does not pay off for shorter kernels.
_LONG_S = OVERHEADS.long_s
# Runs of a short kernel from one measurement to the next: to read the clock twice takes a large
# part of the 0.3 to 0.7 us that a token needs in addition to its kernel.
_SAMPLE_INTERVAL = 16

# Tokens that one part of a run moves before another part gets the thread: about 1 ms.
_TURN = 1000


@dataclass(slots=True, eq=False)
class _Completion:
    """The callback of an asynchronous kernel, which may keep it: it drops the run when called."""

    run: FramesRun | None
    token: Token
    cancel: Callable[[], object] | None = None

    def __call__(self, outputs: RunValue = None, error: BaseException | None = None) -> None:
        run, self.run = self.run, None
        if run is not None:
            run.post(run._completed, self, outputs, error)


# One thread at a time moves the tokens of a run, so the lock only guards ``back``, the queue of
# jobs from other threads. TensorFlow moves tokens on many threads, with a lock for each frame. That
# pays off if tokens move in parallel, which Python cannot do, and to hand a token to another thread
# would cost as much as to move dozens of tokens (decision 28).
#
# No thread waits for a kernel either. The thread of the run returns when no work is left, and
# ``post`` makes the thread that brings a result the thread of the run. A run occupies no thread
# while asynchronous kernels or other devices are busy, and waiting iterations overlap on one
# thread, up to ``parallel_iterations`` of them (decision 30).


class FramesRun:
    """One run of one part of a graph: its mutable state."""

    def __init__(
        self,
        graph: FrameGraph,
        inputs: RunValues,
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
        self.root = CallInstance(graph)
        self.scheduler = TokenScheduler(limits.max_iterations)
        # Long kernels wait here until no token is ready. Short nodes go first: they may make
        # further long ones ready, so that the number of kernels to share among threads is known.
        self.heavy: list[Token] = []
        self.calls: list[tuple[Token, Any]] = []  # with the steps of a call that has begun
        self.in_progress: set[CallInstance] = set()
        self.failed = False
        # The last output that each Switch has chosen, to explain why a value is dead.
        self.chosen: dict[FrameNode, int] = {}
        self.in_flight = 0  # kernels that run elsewhere, asynchronous ones included
        self.on_pool = 0  # the part of ``in_flight`` on threads of the pool
        self.awaiting_peers = 0  # pending values of other processes
        self.pending: set[_Completion] = set()
        # Jobs from other threads for the thread of the run. All parts share one lock: the run is
        # over when all of them rest, and exactly one part must observe this.
        self.lock = barrier.lock
        self.back: deque[tuple[Any, ...]] = deque([(self.scheduler.begin, self.root, inputs)])
        self.active = True
        self.resting = False

    # The thread of the run.

    def go(self) -> None:
        while True:
            # An error in the scheduler ends the run as an error in a kernel does: raised on a
            # thread of the pool, it would be lost, and the caller would wait forever.
            try:
                while self._turn() and not self.barrier.waiting:
                    pass
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    self.control.set(Cancelled("the run was interrupted"))
            if self.scheduler.ready or self.heavy or self.calls:  # another part gets the thread
                self.barrier.resume(self)
                return
            with self.lock:
                # The check of the queue and the leave are atomic for ``post``: it leaves the job to
                # this thread, or makes its own thread that of the run.
                if self.back:
                    continue
                self.active = False
                # With kernels on other threads the part does not rest: the run must await them.
                self.resting = not self.in_flight and not self.awaiting_peers
                ended = self.resting and self.barrier.rested()
            if ended:  # without the lock, since it calls user code
                self.barrier.end()
            return

    @property
    def waits(self) -> bool:
        """Whether the part is idle, without kernels on other threads of the process."""
        with self.lock:
            return not (self.active or self.in_flight)

    def outputs(self) -> Outputs:
        error = missing_output(self.root, self.chosen)
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback refers to this frame
        return self.root.results

    def release(self) -> None:
        """Release the values of a run that has failed."""
        for call in (self.root, *self.in_progress):
            call.release()
        self.in_progress.clear()

    # Jobs of other threads go first, since the pool's thread that left one is free for the next
    # kernel. Then come tokens in FIFO order, so that concurrent iterations progress evenly.
    # Rare cases, and those that are slow anyway (dead tokens, observers), go through ``_token``.

    def _turn(self) -> bool:
        """Process up to ``_TURN`` tokens; return False if none are left. The path of most tokens
        is inlined here: a method call for each would take a third longer."""
        back, control, ready = self.back, self.control, self.scheduler.ready
        observe, send, spent = self.observe, self.scheduler.send, self.scheduler.spent
        for _ in range(_TURN):
            while back:
                function, *arguments = back.popleft()
                function(*arguments)
            if control.stopped and not self.failed:
                self._stop()
            if not ready:
                if self.heavy:
                    self._share()
                elif self.calls:
                    # The latest first, so that few are in progress at the same time.
                    self._call(*self.calls.pop())
                else:
                    return False
                continue
            token = ready.popleft()
            node, iteration, dead = token
            if dead or observe:
                self._token(token)
                continue
            if node.forwards:
                outputs: Outputs = iteration.inputs[node.first : node.end]
            elif node.unmeasured > 0:  # a kernel known to be short
                node.unmeasured -= 1
                inputs = iteration.inputs[node.first : node.end]
                try:
                    if node.nested:
                        outputs = node.function(control, *inputs)  # type: ignore[misc]
                    else:
                        value = node.function(*inputs)  # type: ignore[misc]
                        outputs = (value,) if value.__class__ is _ndarray else _outputs(node, value)
                except Exception as error:
                    self._fail(error, node, inputs)
                    continue
            elif node.rule is _SWITCH:
                inputs = iteration.inputs[node.first : node.end]
                try:
                    outputs = self._switch(node, *inputs)
                except Exception as error:
                    self._fail(error, node, inputs)
                    continue
            else:
                self._token(token)
                continue
            only_edge = node.only_edge
            if only_edge is None:
                send(node, iteration, outputs)
                continue
            reader, at, position = only_edge
            iteration.inputs[position] = outputs[0]
            waits = iteration.waits
            waits[at] = left = waits[at] - 1
            if not left:
                ready.append((reader, iteration, False))
            else:
                spent(reader, iteration, left)
        return True

    def _stop(self) -> None:
        """End a stopped run, with a note that names the current node."""
        # Called on the thread of the run, which alone may read its queues: the thread that stops
        # the run only sets the control.
        error = self.control.error or Cancelled("the run was stopped")
        calls = [token for token, _ in self.calls]
        for node, *_ in [*self.scheduler.ready, *self.heavy, *calls][:1]:
            if node.node is not None:
                error.add_note(f"The run had reached {node.node.op.name} ({node.node.label}).")
        self._fail(error)

    def _token(self, token: Token) -> None:
        """Process a token by the rule of its node."""
        node, iteration, dead = token
        # A ControlTrigger runs even on dead inputs: it only signals that they have arrived.
        if dead and node.rule is not _TRIGGER:
            # A dead Recv must still receive, since the other part sends the value in any case, and
            # no other receiver would take it.
            if node.rule is _RECV:
                self._receive(token)
                return
            if node.rule is _FETCH:
                self._fetch(node, iteration, DEAD)
            elif node.rule is _SEND:  # the other part waits for a token
                self._send(node, iteration, None, True)
            self.scheduler.bury(node, iteration)
        elif node.rule is _ORDINARY:
            if node.cost > _LONG_S and self.pool is not None:
                self.heavy.append(token)
            else:
                self._run(token)
        elif node.rule is _CALL:
            self.calls.append((token, None))
        elif node.rule is _RETURN:
            self._resume(enclosing_call(iteration.frame))
        elif node.rule is _RECV:
            self._receive(token)
        elif node.rule is _ASYNCHRONOUS:
            self._begin_kernel(token)
        else:
            self._primitive(node, iteration, _inputs(token))

    def _primitive(
        self, node: FrameNode, iteration: IterationState, inputs: list[RunValue]
    ) -> None:
        """Process a live token of a control-flow primitive, a fetch or a Send."""
        outputs: Outputs = inputs
        try:
            if node.rule is _SWITCH:
                outputs = self._switch(node, *inputs)
            elif node.rule is _FETCH:
                self._fetch(node, iteration, *inputs)
                outputs = ()
            elif node.rule is _SEND:
                self._send(node, iteration, *inputs)
                outputs = ()
        except Exception as error:
            self._fail(error, node, inputs)
            return
        self._begun(node, inputs)
        self._send_outputs(node, iteration, outputs)

    def _switch(self, node: FrameNode, value: RunValue, predicate: RunValue) -> Outputs:
        count = node.outputs
        which = switched_to(predicate, count)
        self.chosen[node] = which
        if count == 2:
            return (DEAD, value) if which else (value, DEAD)
        outputs = [DEAD] * count
        outputs[which] = value
        return outputs

    def _run(self, token: Token) -> None:
        """Run a kernel on this thread, and measure it."""
        # For kernels that are short or not yet measured, and for a long one that this thread keeps.
        node, iteration, _ = token
        inputs = _inputs(token)
        self._begun(node, inputs)
        start = perf_counter()
        try:
            outputs = _call_kernel(node, inputs, self.control)
        except Exception as error:
            self._fail(error, node, inputs)
            return
        _record_cost(node, perf_counter() - start)
        self._send_outputs(node, iteration, outputs)

    # Calls of functions, and of the graphs of nodes. They are generators in a list, not calls on
    # Python's stack: a model's recursion may exceed that stack, and other tokens of the run proceed
    # while a call waits (decision 28).

    def _call(self, token: Token, steps: Any) -> None:
        """Begin a call, or resume a frame that has yielded to other tokens."""
        node, iteration, _ = token
        if steps is None:
            inputs = _inputs(token)
            self._begun(node, inputs)
            assert node.function is not None
            steps = node.function(self.control, *inputs) if node.nested else node.function(*inputs)
        self._go_on(node, iteration, steps, None)

    def _go_on(
        self, node: FrameNode, iteration: IterationState, steps: Any, results: Outputs | None
    ) -> None:
        """Run the next graph of a call, or deliver the outputs of its node."""
        try:
            request = steps.send(results)
            if request is None:  # a frame that is one node yields to other tokens (decision 51)
                self.calls.append(((node, iteration, False), steps))
                return
            graph, inputs = request
            call = CallInstance(graph, iteration, node, steps)
            # Recorded before it can fail, so that ``release`` reaches its values.
            self.in_progress.add(call)
            if call.depth > self.limits.max_calls:
                raise LimitExceeded(
                    f"the call of function {graph.function!r} is nested in more calls than "
                    f"Limits.max_calls = {self.limits.max_calls}: it may call itself without "
                    "end; raise the limit if the model needs calls nested that deeply"
                )
        except StopIteration as end:
            outputs = end.value
        except Exception as error:
            self._fail(error, node, iteration.inputs[node.first : node.end])
            return
        else:
            self.scheduler.begin(call, inputs)
            return
        self._send_outputs(node, iteration, outputs)

    def _resume(self, call: CallInstance) -> None:
        """Continue a call whose graph has ended."""
        self.in_progress.discard(call)
        error = missing_output(call, self.chosen)
        if error is not None:
            self._fail(error)
            return
        assert call.node is not None and call.around is not None
        self._go_on(call.node, call.around, call.steps, call.results)

    # Observers.

    def _begun(self, node: FrameNode, inputs: RunValues) -> None:
        if self.observe and node.step is not None:
            own = inputs[: len(node.step.inputs)]  # without captures
            self.control.observer.step_begin(self.control.run, node.step, own)

    def _ended(self, node: FrameNode, outputs: Outputs) -> None:
        if self.observe and node.step is not None:
            live = [None if value is DEAD else value for value in outputs]
            self.control.observer.step_end(self.control.run, node.step, live)

    def _send_outputs(self, node: FrameNode, iteration: IterationState, outputs: Outputs) -> None:
        self._ended(node, outputs)
        self.scheduler.send(node, iteration, outputs)

    def _share(self) -> None:
        """Offer long kernels to as many other threads as the run may use, and run one on this
        thread, unless it has a call to continue."""
        heavy, self.heavy = self.heavy, []
        pool = self.pool
        # This thread will be busy: let a thread of the pool take the parts that wait for a thread.
        if pool is not None:
            self.barrier.help(pool)
        most = self.root.frame_graph.workers
        free = 0 if pool is None else max(0, most - 1 - self.on_pool)
        # Keep one kernel for this thread, which would otherwise be idle, unless it has a call.
        free = min(free, len(heavy) - (not self.calls))
        others, own = heavy[:free], heavy[free:]
        # Announce all before the first begins, which would otherwise use threads on all cores.
        announce(len(others) + 1)
        for token in others:
            if pool is not None and pool.offer(partial(self._run_on_pool, token, _inputs(token))):
                # The kernel may have ended by now, but only this thread accesses the counts, and it
                # processes the end of the kernel later.
                self.in_flight += 1
                self.on_pool += 1
            else:
                announce(-1)
                own.append(token)
        announce(-1)
        # The rest waits, since a thread of the pool may be free before this thread.
        self.heavy = own[1:]
        for token in own[:1]:
            self._run(token)

    def _run_on_pool(self, token: Token, inputs: list[RunValue]) -> None:
        """Run a kernel on another thread."""
        # ``inputs`` is an argument, since only the thread of the run may access the iteration.
        announce(-1)
        node, control = token[0], self.control
        start = perf_counter()
        result: Outputs = ()
        error: BaseException | None = None
        try:
            self._begun(node, inputs)
            # NumPy's settings and the current run are per thread.
            result = quiet(working_for, control, _call_kernel, node, inputs, control)
            self._ended(node, result)
        except Exception as raised:
            error = _annotated(node, inputs, raised)
        except BaseException as raised:
            error = raised
        self.post(self._returned, token, result, error, perf_counter() - start)

    def post(self, *job: object) -> None:
        """Queue a job for the thread of the run, which this thread becomes if there is none."""
        with self.lock:
            self.back.append(job)
            # The thread of the run will see the job, or the run is over and ignores it.
            if self.active or (self.resting and not self.barrier.woke(self)):
                return
            self.active = True
            self.resting = False
        self.barrier.resume(self)

    def _returned(
        self, token: Token, result: Outputs, error: BaseException | None, seconds: float
    ) -> None:
        """Deliver the outputs of a kernel that has ended on another thread."""
        node, iteration, _ = token
        self.in_flight -= 1
        self.on_pool -= 1
        _record_cost(node, seconds)
        if error is not None:
            self._fail(error)
        elif not self.failed:
            self.scheduler.send(node, iteration, result)

    # Asynchronous kernels, and values of other parts of the run.

    def _begin_kernel(self, token: Token) -> None:
        """Begin an asynchronous kernel."""
        node, inputs = token[0], _inputs(token)
        completion = _Completion(self, token)
        # Counted before it begins: it may end on another thread before ``function`` returns.
        self.in_flight += 1
        self.pending.add(completion)
        self._begun(node, inputs)
        assert node.function is not None
        begin = partial(node.function, self.control) if node.nested else node.function
        try:
            completion.cancel = begin(completion, *inputs)
        except Exception as error:
            completion(error=error)

    def _completed(
        self, completion: _Completion, result: RunValue, error: BaseException | None
    ) -> None:
        """Deliver the outputs of an asynchronous kernel that has ended."""
        if completion not in self.pending:
            return  # the run has failed meanwhile
        self.pending.remove(completion)
        self.in_flight -= 1
        node, iteration, _ = completion.token
        if error is not None:
            self._fail(error, node, _inputs(completion.token))
            return
        try:
            outputs = result if node.nested else _outputs(node, result)
        except Exception as raised:
            self._fail(raised, node, _inputs(completion.token))
        else:
            self._send_outputs(node, iteration, outputs)

    def _send(
        self, node: FrameNode, iteration: IterationState, value: RunValue = None, dead: bool = False
    ) -> None:
        rendezvous = self.barrier.rendezvous
        assert rendezvous is not None
        rendezvous.send(_key(node, iteration), value, dead)

    def _receive(self, token: Token) -> None:
        node, iteration, _ = token
        self._begun(node, ())
        rendezvous, key = self.barrier.rendezvous, _key(node, iteration)
        assert rendezvous is not None
        remote = rendezvous.is_remote(key)
        # The receiver is called on the sending thread, and posts a job to this part's thread.
        try:
            sent = rendezvous.recv(key, partial(self.post, self._received, token, remote))
        except Aborted as error:
            self._fail(error)
            return
        self.awaiting_peers += remote
        if sent is not None:
            self._received(token, remote, *sent, None)

    def _received(
        self, token: Token, remote: bool, value: RunValue, dead: bool, error: Aborted | None
    ) -> None:
        self.awaiting_peers -= remote
        if isinstance(error, NoValue):
            return
        if error is not None:
            self._fail(error)
        elif not self.failed:
            node, iteration, _ = token
            if dead:
                self.scheduler.bury(node, iteration)
            else:
                self._send_outputs(node, iteration, (value,))

    def _fail(
        self, error: BaseException, at: FrameNode | None = None, inputs: RunValues = ()
    ) -> None:
        """End the run with ``error``, unless it has already failed; no further node runs. ``at``:
        the node whose kernel raised the error for ``inputs``, if any."""
        if at is not None:
            error = _annotated(at, inputs, error)
        self.failed = True
        self.scheduler.ready.clear()
        self.heavy.clear()
        self.calls.clear()
        # The run awaits the kernels on the pool, which read arrays of the caller. Asynchronous
        # kernels are cancelled and not awaited, since they may never end.
        self.barrier.fail(error)
        while self.pending:
            completion = self.pending.pop()
            completion.run = None
            self.in_flight -= 1
            if completion.cancel is not None:
                try:
                    completion.cancel()
                except Exception:  # the run already has an error
                    report_thread_exception()

    def _fetch(self, node: FrameNode, iteration: IterationState, value: RunValue) -> None:
        call = enclosing_call(iteration.frame)
        result = call.results[node.port]
        if result is not MISSING and result is not DEAD:
            if value is DEAD:
                return  # in another iteration
            name = call.frame_graph.graph.outputs[node.port].name
            raise RunError(
                f"{name!r} was computed twice, because it is inside a loop. Fetch a value that "
                "leaves the loop"
            )
        call.results[node.port] = value


def _key(node: FrameNode, iteration: IterationState) -> tuple[Hashable, ...]:
    """Return the rendezvous key of a value that one part sends to another."""
    frame = iteration.frame
    return node.key, frame.id or frame.name(), iteration.number


def _inputs(token: Token) -> list[RunValue]:
    node, iteration, _ = token
    return iteration.inputs[node.first : node.end]


def _record_cost(node: FrameNode, seconds: float) -> None:
    """Record the seconds of a kernel, and when to measure it again: in each run if it is long or
    may have loops. The cost is the minimum of two samples, since the system may suspend the thread
    during one."""
    node.cost, node.latest = min(seconds, node.latest), seconds
    node.unmeasured = 0 if seconds > _LONG_S or node.varies else _SAMPLE_INTERVAL


def _call_kernel(node: FrameNode, inputs: RunValues, control: Control) -> Outputs:
    """Call a node's kernel and return the outputs."""
    assert node.function is not None
    if node.nested:
        outputs: Outputs = node.function(control, *inputs)
        return outputs
    return _outputs(node, node.function(*inputs))


def _outputs(node: FrameNode, result: RunValue) -> Outputs:
    """Return the result of a kernel as a sequence with one array for each output."""
    if node.outputs == 1:
        return (array_of(result),)
    return () if result is None else tuple([array_of(output) for output in result])


def _annotated(at: FrameNode, inputs: RunValues, error: BaseException) -> PenstockError:
    """Return the error of a kernel, with its node, its origin and the types of its inputs."""
    if at.explain is not None and isinstance(error, Exception):
        return at.explain(error)
    if at.node is not None:
        return explained_at(at.node, inputs, error)
    return error if isinstance(error, PenstockError) else RunError(f"a fetch failed: {error!r}")
