"""The token scheduler: the frames of a run, their iterations, and the nodes that become ready.

The outputs of a node are delivered to all of their readers; a node without further pending inputs
is then ``ready``. This module runs no nodes, and only the thread of a run uses its state.

Every iteration has a list of counts, with one element for each node, and two for a Merge. The count
of a node other than a Merge is the number of its pending non-constant and control inputs, plus
``DEATH`` once any input was dead. The count of a Merge includes ``MERGE_DATA`` until the first live
data input arrives, and ``MERGE_CONTROL`` for each pending control input; the second element is the
number of dead data inputs.

===================== ================== ====================================== ====================
token                 node               new counts                             effect
===================== ================== ====================================== ====================
live data or control  ordinary node      waits - 1                              runs if 0,
                                                                                dies if DEATH
dead data or control  ordinary node      (waits | DEATH) - 1                    dies if DEATH
live data             Merge, data bit    waits - MERGE_DATA                     runs if 0
live data             Merge, no data bit unchanged: the first one was taken     none
dead data             Merge              dead + 1; waits = 0 if it dies         dies if all data are
                                                                                dead, no control is
                                                                                left [*]_
control, dead or live Merge              waits - MERGE_CONTROL; 0 if it dies    runs if 0, dies as
                                                                                above
===================== ================== ====================================== ====================

.. [*] A dead Enter kills the Merge of its loop at once: the back edge would never come.

These transitions are inlined where tokens are delivered, here and in the loop of
``run.FramesRun``: a call for each token would take a third longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from penstock.core.errors import DeadTensor, LimitExceeded
from penstock.core.records import dataclass
from penstock.core.types import RunValue, RunValues, ShapeError
from penstock.executors.frames.frame_graph import (
    DEATH,
    FrameGraph,
    FrameNode,
    StaticFrame,
    TokenRule,
)
from penstock.ir.graph import Value

# Sentinels. They must be compared by identity, since values may be arrays, whose ``==`` is
# elementwise.
DEAD: Any = type("Dead", (), {"__repr__": lambda self: "DEAD"})()
"""A dead value: no value will arrive."""
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
"""A value that has not arrived yet."""

# Attributes of an enum are slow to read.
_ENTER, _EXIT, _NEXT_ITERATION = TokenRule.ENTER, TokenRule.EXIT, TokenRule.NEXT_ITERATION
_MERGE = TokenRule.MERGE


# An iteration has two lists for all nodes of the frame, rather than a record for each node. It
# begins with two copies, which already contain the constants of the loop (decision 28).


@dataclass(slots=True, eq=False)
class IterationState:
    """One iteration of a frame: the inputs and counts of its nodes, the number of its tokens in
    flight, and the instances of nested frames."""

    frame: FrameInstance
    number: int
    inputs: list[RunValue]
    waits: list[int]
    tokens: int = 0
    children: dict[str, FrameInstance] | None = None


class FrameInstance:
    """A frame that was entered in iteration ``around`` of another frame, or the root of a call.

    ``last``: the number of the newest iteration; ``entering``: the number of tokens that have yet
    to enter. A new iteration copies ``inputs`` and ``waits``, which include the values that are
    for all iterations; the tokens in ``begun`` are then ready. ``deferred`` values wait for another
    iteration to begin, dead ``exits`` for the frame to end.
    """

    def __init__(self, static: StaticFrame, around: IterationState | None) -> None:
        self.static = static
        self.around = around
        # Shared by all runs, until a constant Enter delivers a value of this run (``_keep``).
        self.inputs = static.inputs
        self.waits = static.waits
        self.iterations = {0: IterationState(self, 0, self.inputs.copy(), self.waits.copy())}
        self.last = 0
        self.entering = static.enters
        self.begun: list[Token] = []
        self.deferred: list[tuple[FrameNode, Any]] = []
        self.exits: list[FrameNode] = []
        self.id = ""

    def release(self) -> None:
        """Release the iterations of a failed run, which refer to their frame."""
        frames: list[FrameInstance] = [self]
        while frames:
            frame = frames.pop()
            for iteration in frame.iterations.values():
                frames += (iteration.children or {}).values()
            frame.iterations.clear()

    def name(self) -> str:
        """Return a name that is unique among the frames of a part, and equal in all parts."""
        # Computed on demand: only a run in several parts needs names, for the keys of values.
        around = self.around
        if not self.id and around is not None:
            self.id = f"{around.frame.name()}/{around.number};{self.static.name}"
        return self.id


class CallInstance(FrameInstance):
    """The root frame of a running graph: the graph of the run, or a graph called by ``node`` in
    iteration ``around``. ``depth``: the number of nested calls of functions, this one included.
    ``steps``: the call in progress, which continues with the ``results``."""

    def __init__(
        self,
        frame_graph: FrameGraph,
        around: IterationState | None = None,
        node: FrameNode | None = None,
        steps: Any = None,
    ) -> None:
        super().__init__(frame_graph.root, around)
        self.frame_graph = frame_graph
        self.node = node
        self.steps = steps
        self.results: list[RunValue] = [MISSING] * len(frame_graph.fetches)
        self.depth: int = 0
        if around is not None:
            self.depth = enclosing_call(around.frame).depth + bool(frame_graph.function)


def enclosing_call(frame: FrameInstance) -> CallInstance:
    """Return the call that a frame belongs to, or the frame itself if it is a call."""
    while not isinstance(frame, CallInstance):
        assert frame.around is not None
        frame = frame.around.frame
    return frame


# A tuple, which is the cheapest type to create, since each execution of a node needs one.
Token: TypeAlias = tuple[FrameNode, IterationState, bool]
"""A node without pending inputs, its iteration, and whether it is dead."""


# There is no lock: only the thread of a run uses the scheduler (``run.FramesRun``), and jobs of
# other threads reach it through a queue. Iterations end by this invariant: ``tokens`` counts the
# nodes of an iteration that are ready or running. A node's successors are counted before its own
# token is removed, so the count is 0 only when no further node of the iteration can become ready.


class TokenScheduler:
    """Schedules the tokens of one run. ``max_iterations``: the maximum iterations of a frame."""

    def __init__(self, max_iterations: int | None) -> None:
        self.ready: deque[Token] = deque()
        self._max_iterations = max_iterations

    def begin(self, call: CallInstance, inputs: RunValues) -> None:
        """Begin a call of a graph with its inputs."""
        graph, iteration = call.frame_graph, call.iterations[0]
        iteration.tokens = len(graph.roots)
        self.ready.extend([(node, iteration, False) for node in graph.roots])
        for feed, value in zip(graph.feeds, inputs, strict=True):
            self._deliver(feed, iteration, (value,))
        if not iteration.tokens:  # nothing is ready, so no token will close the iteration
            self._close(iteration)

    def send(self, node: FrameNode, iteration: IterationState, outputs: RunValues) -> None:
        """Deliver the outputs of a live node, and remove its token."""
        if node.leaves:
            self._leave(node, iteration, outputs[0])
        else:
            self._deliver(node, iteration, outputs)
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    def spent(self, reader: FrameNode, iteration: IterationState, left: int) -> None:
        """Remove a token whose reader still waits for inputs, or dies (``left`` is DEATH)."""
        if left == DEATH:
            before = len(self.ready)
            self._die(reader, iteration)
            iteration.tokens += len(self.ready) - before
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    def bury(self, node: FrameNode, iteration: IterationState) -> None:
        """Deliver dead tokens to the readers of a dead node, and remove its token."""
        if node.rule is _ENTER:
            self._enter(node, iteration, DEAD)
        else:
            self._kill(node, iteration)
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    # Within an iteration.

    def _deliver(self, node: FrameNode, iteration: IterationState, outputs: RunValues) -> None:
        """Deliver outputs to all of their readers in an iteration."""
        inputs, waits, ready = iteration.inputs, iteration.waits, self.ready
        before = len(ready)
        for (readers, merges), value in zip(node.edges, outputs, strict=True):
            if value is DEAD:  # the output of a Switch that was not chosen
                self._kill_readers(readers, merges, iteration, False)
                continue
            for reader, at, place in readers:
                inputs[place] = value
                waits[at] = left = waits[at] - 1
                if not left:
                    ready.append((reader, iteration, False))
                elif left == DEATH:
                    self._die(reader, iteration)
            for reader, at, index in merges:
                left = waits[at]
                # Only the first live input is taken: later ones find the bit cleared.
                if left & 1:  # MERGE_DATA
                    inputs[reader.first : reader.end] = value, index
                    waits[at] = left = left - 1
                    if not left:
                        ready.append((reader, iteration, False))
        if node.controls:
            self._signal(node, iteration, False)
        iteration.tokens += len(ready) - before

    def _kill(self, node: FrameNode, iteration: IterationState) -> None:
        """Deliver a dead token on all output and control edges of a node."""
        before = len(self.ready)
        for readers, merges in node.edges:
            self._kill_readers(readers, merges, iteration, node.rule is _ENTER)
        self._signal(node, iteration, True)
        iteration.tokens += len(self.ready) - before

    def _kill_readers(
        self,
        readers: Iterable[tuple[FrameNode, int, int]],
        merges: Iterable[tuple[FrameNode, int, Any]],
        iteration: IterationState,
        entered: bool,
    ) -> None:
        waits, ready = iteration.waits, self.ready
        for reader, at, _ in readers:
            waits[at] = left = (waits[at] | DEATH) - 1
            if left == DEATH:
                self._die(reader, iteration)
        for reader, at, _ in merges:
            waits[at + 1] += 1
            # The back edge of a loop that is not entered would deliver no token.
            if waits[at] == 1 and (entered or waits[at + 1] == reader.data_inputs):
                waits[at] = 0
                ready.append((reader, iteration, True))

    def _die(self, node: FrameNode, iteration: IterationState) -> None:
        """Process a node that has received all of its inputs, one of them dead."""
        if node.rule is _EXIT:
            # Recorded until the frame ends or another iteration begins: the Exit of a loop is dead
            # in all iterations but the last, and this may be the last one.
            if iteration.number == iteration.frame.last:
                iteration.frame.exits.append(node)
        elif node.rule is not _NEXT_ITERATION:
            # A dead NextIteration delivers nothing, or a loop that has ended would continue
            # forever with dead tokens. This is how all loops of TensorFlow end.
            self.ready.append((node, iteration, True))

    def _signal(self, node: FrameNode, iteration: IterationState, dead: bool) -> None:
        """Deliver a token on the control edges of a node."""
        waits, ready = iteration.waits, self.ready
        for reader in node.controls:
            at = reader.counter
            if reader.rule is _MERGE:
                waits[at] = left = waits[at] - 2  # MERGE_CONTROL
                if not left:
                    ready.append((reader, iteration, False))
                elif left == 1 and waits[at + 1] == reader.data_inputs:
                    waits[at] = 0
                    ready.append((reader, iteration, True))
                continue
            left = waits[at] - 1
            if dead:
                left |= DEATH
            waits[at] = left
            if not left:
                ready.append((reader, iteration, False))
            elif left == DEATH:
                self._die(reader, iteration)

    # Between frames and iterations.

    def _leave(self, node: FrameNode, iteration: IterationState, value: RunValue) -> None:
        """Deliver a live value to another iteration or frame."""
        frame = iteration.frame
        if node.rule is _NEXT_ITERATION:
            number = iteration.number
            if number == frame.last:
                # The number of concurrent iterations is limited, to bound their memory. The values
                # wait in the frame until the oldest iteration has ended.
                if len(frame.iterations) >= frame.static.parallel:
                    frame.deferred.append((node, value))
                    return
                self._advance(frame)
            self._deliver(node, frame.iterations[number + 1], (value,))
        elif node.rule is _EXIT:
            assert frame.around is not None
            self._deliver(node, frame.around, (value,))
        else:
            self._enter(node, iteration, value)

    def _enter(self, node: FrameNode, iteration: IterationState, value: RunValue) -> None:
        static = node.child
        assert static is not None
        children = iteration.children
        if children is None:
            children = iteration.children = {}
        child = children.get(static.name)
        if child is None:
            child = children[static.name] = FrameInstance(static, iteration)
        child.entering -= 1
        entered = list(child.iterations.values()) if node.constant else [child.iterations[0]]
        for reached in entered:
            self._arrive(node, reached, value)
        if node.constant:
            self._keep(node, child, value)
        # If nothing became ready, no token will close the frame.
        first = child.iterations.get(0)
        if first is not None and not first.tokens and not child.entering:
            self._close(first)

    def _arrive(self, node: FrameNode, iteration: IterationState, value: RunValue) -> None:
        if value is DEAD:
            self._kill(node, iteration)
        else:
            self._deliver(node, iteration, (value,))

    def _keep(self, node: FrameNode, frame: FrameInstance, value: RunValue) -> None:
        """Deliver a value to all future iterations, by storing it in the lists that they copy."""
        if frame.inputs is frame.static.inputs:  # shared with all other runs
            frame.inputs, frame.waits = frame.inputs.copy(), frame.waits.copy()
        # Nodes that this value makes ready are ready in each new iteration, and go to ``begun``.
        # The iteration of number -1 only carries the lists.
        ready, self.ready = self.ready, deque()
        self._arrive(node, IterationState(frame, -1, frame.inputs, frame.waits), value)
        frame.begun += self.ready
        self.ready = ready

    def _advance(self, frame: FrameInstance) -> None:
        """Begin another iteration."""
        number = frame.last
        if self._max_iterations is not None and number >= self._max_iterations:
            end_iterations(frame.static.name, self._max_iterations)
        frame.last = number = number + 1
        iteration = IterationState(frame, number, frame.inputs.copy(), frame.waits.copy())
        frame.iterations[number] = iteration
        if frame.exits:  # the loop continues, and its Exits may still be live
            frame.exits.clear()
        if frame.begun:
            iteration.tokens = len(frame.begun)
            self.ready.extend([(node, iteration, dead) for node, _, dead in frame.begun])
        if frame.deferred:
            deferred, frame.deferred = frame.deferred, []
            for node, value in deferred:
                self._deliver(node, iteration, (value,))

    def _close(self, iteration: IterationState) -> None:
        """End iterations, from this one on, and frames, if they have nothing left to run."""
        while True:
            frame, number = iteration.frame, iteration.number
            iterations = frame.iterations
            next_: IterationState | None = iterations.get(number)
            while (
                next_ is not None
                and not next_.tokens
                and not next_.children
                # No token can reach it any more, from the previous iteration or by an Enter.
                and (number - 1 not in iterations if number else not frame.entering)
            ):
                del iterations[number]
                number += 1
                if frame.deferred:  # the limit now allows another iteration
                    self._advance(frame)
                next_ = iterations.get(number)
            around = frame.around
            if iterations or frame.entering or around is None:
                return
            if isinstance(frame, CallInstance):
                self.ready.append((frame.frame_graph.end, iteration, False))
                return
            assert around.children is not None
            del around.children[frame.static.name]
            for node in frame.exits:
                self._kill(node, around)
            if around.tokens:
                return
            # The iteration around may have waited only for this frame. A loop, not a recursion,
            # since frames nest as deeply as the model's loops and calls.
            iteration = around


def end_iterations(frame: str, most: int) -> NoReturn:
    """Raise ``LimitExceeded`` for a frame that would have more than ``most`` iterations."""
    raise LimitExceeded(
        f"the frame {frame!r} passed the limit of {most} iterations; raise Limits.max_iterations "
        "if the model needs more"
    )


def switched_to(predicate: RunValue, count: int) -> int:
    """Return the index of the output, of ``count``, that a Switch chooses. Raises ``ShapeError``
    for a predicate that does not have one element."""
    if predicate.size != 1:
        shape = list(predicate.shape)
        raise ShapeError(f"a predicate must have one element, not shape {shape}")
    which = int(predicate.item())
    # As in TensorFlow's Case: the last branch is the default.
    return which if 0 <= which < count else count - 1


# Outputs that have no value at the end.


def missing_output(call: CallInstance, chosen: Mapping[FrameNode, int]) -> DeadTensor | None:
    """Return the error of a call that has ended without one of its outputs; None if it has all.
    ``chosen``: the last output that each Switch has chosen."""
    for value, result in zip(call.frame_graph.graph.outputs, call.results, strict=True):
        if result is MISSING or result is DEAD:
            return _dead(value, result is DEAD, chosen)
    return None


def _dead(value: Value, dead: bool, chosen: Mapping[FrameNode, int]) -> DeadTensor:
    """Return the error of an output without a value. It names the Switch at fault, if any."""
    if not dead:
        return DeadTensor(
            f"{value.name!r} was never computed: some of its inputs did not arrive. It may be "
            "inside a loop, or need a value that only the first iteration has; fetch a value "
            "that leaves the loop"
        )
    switches = {switch.node: output for switch, output in chosen.items()}
    seen: set[Value] = {value}
    queue = deque([value])
    while queue:
        node = queue.popleft().producer
        if node is None:
            continue
        if node in switches:
            return DeadTensor(
                f"{value.name!r} has no value: it is in a branch that was not taken. {node.label} "
                f"chose its output {switches[node]}"
            )
        for read in node.inputs:
            if read is not None and read not in seen:
                seen.add(read)
                queue.append(read)
    return DeadTensor(f"{value.name!r} has no value: it is in a branch that was not taken")
