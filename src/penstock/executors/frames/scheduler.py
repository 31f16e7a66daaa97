"""Tokens on their way: the frames of a run, their iterations, and what becomes ready in them.

What an item has made is brought to all who wait for it; whoever then has all that it waits for is
``ready``. Nothing here runs a node, and only the thread that a run is on touches any of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.errors import DeadTensor, LimitExceeded
from penstock.executors.frames.tokens import DEATH, FrameInfo, FrameNode, Kind, Tokens
from penstock.ir.graph import Value

DEAD: Any = type("Dead", (), {"__repr__": lambda self: "DEAD"})()
"""Stands for a value that will not come."""

_ENTER, _EXIT, _NEXT_ITERATION = Kind.ENTER, Kind.EXIT, Kind.NEXT_ITERATION


class Iteration:
    """One iteration of a frame: its inputs, what its items wait for, how many tokens are on their
    way in it, and the frames inside of it."""

    __slots__ = ("children", "frame", "inputs", "number", "tokens", "waits")

    def __init__(self, frame: Frame, number: int, inputs: list[Any], waits: list[int]) -> None:
        self.frame = frame
        self.number = number
        self.inputs = inputs
        self.waits = waits
        self.tokens = 0
        self.children: dict[str, Frame] | None = None


class Frame:
    """A frame that was entered, in iteration ``around`` of another one, if it is not that of a run.

    ``last`` is its newest iteration, ``entering`` how many tokens are yet to enter. What comes to
    all iterations stands in ``inputs`` and ``waits``, with which a new one begins, and ``begun``
    are the items that then have all that they wait for. ``deferred`` wait for another iteration to
    begin, dead ``exits`` for the frame to end.
    """

    __slots__ = (
        "around",
        "begun",
        "deferred",
        "entering",
        "exits",
        "id",
        "info",
        "inputs",
        "iterations",
        "last",
        "waits",
    )

    def __init__(self, info: FrameInfo, around: Iteration | None) -> None:
        self.info = info
        self.around = around
        self.inputs = info.inputs
        self.waits = info.waits
        self.begun: list[Token] = []
        self.iterations = {0: Iteration(self, 0, info.inputs.copy(), info.waits.copy())}
        self.last = 0
        self.entering = info.enters
        self.deferred: list[tuple[FrameNode, Any]] = []
        self.exits: list[FrameNode] = []
        self.id = ""

    def name(self) -> str:
        """What distinguishes it from all other frames of the run, in all parts of that."""
        around = self.around
        if not self.id and around is not None:
            self.id = f"{around.frame.name()}/{around.number};{self.info.name}"
        return self.id


class Call(Frame):
    """A graph that runs, in a frame of its own: that of the run, or what ``item`` calls in
    iteration ``around``, the ``depth``-th call of a function around this one included. ``calling``
    goes on with its ``results``."""

    __slots__ = ("calling", "depth", "item", "results", "tokens")

    def __init__(
        self,
        tokens: Tokens,
        around: Iteration | None = None,
        item: FrameNode | None = None,
        calling: Any = None,
    ) -> None:
        super().__init__(tokens.root, around)
        self.tokens = tokens
        self.item = item
        self.calling = calling
        self.results: list[Any] = [None] * len(tokens.fetches)
        self.depth: int = 0
        if around is not None:
            self.depth = caller(around.frame).depth + bool(tokens.function)


def caller(frame: Frame) -> Call:
    """The call that a frame is in, or is."""
    while not isinstance(frame, Call):
        assert frame.around is not None
        frame = frame.around.frame
    return frame


Token: TypeAlias = tuple[FrameNode, Iteration, bool]
"""An item that has all that it waits for, in which iteration, and whether it is dead."""


class Flow:
    """The tokens of one run. ``most``: how many iterations a frame may have."""

    def __init__(self, most: int | None) -> None:
        self.ready: deque[Token] = deque()
        self._most = most

    def begin(self, call: Call, inputs: Sequence[Any]) -> None:
        """Let a graph begin with its inputs."""
        tokens, iteration = call.tokens, call.iterations[0]
        iteration.tokens = len(tokens.roots)
        self.ready.extend([(item, iteration, False) for item in tokens.roots])
        for item, value in zip(tokens.feeds, inputs, strict=True):
            self._deliver(item, iteration, (value,))
        if not iteration.tokens:
            self._close(iteration)

    def send(self, item: FrameNode, iteration: Iteration, outputs: Sequence[Any]) -> None:
        """Bring on what a living item has made, and count its own token as gone."""
        if item.leaves:
            self._leave(item, iteration, outputs[0])
        else:
            self._deliver(item, iteration, outputs)
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    def spent(self, reader: FrameNode, iteration: Iteration, left: int) -> None:
        """A token has gone to a reader that waits for more, or that now dies."""
        if left == DEATH:
            before = len(self.ready)
            self._die(reader, iteration)
            iteration.tokens += len(self.ready) - before
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    def bury(self, item: FrameNode, iteration: Iteration) -> None:
        """As ``send``, for a dead item: who waits for it learns that nothing will come."""
        if item.kind is _ENTER:
            self._enter(item, iteration, DEAD)
        else:
            self._kill(item, iteration)
        iteration.tokens -= 1
        if not iteration.tokens:
            self._close(iteration)

    # Within an iteration.

    def _deliver(self, item: FrameNode, iteration: Iteration, outputs: Sequence[Any]) -> None:
        """Bring outputs to all who wait for them in an iteration."""
        inputs, waits, ready = iteration.inputs, iteration.waits, self.ready
        before = len(ready)
        for (readers, merges), value in zip(item.edges, outputs, strict=True):
            if value is DEAD:
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
                # The first that lives counts: later ones find the bit gone.
                if left & 1:
                    inputs[reader.first : reader.end] = value, index
                    waits[at] = left = left - 1
                    if not left:
                        ready.append((reader, iteration, False))
        if item.controls:
            self._signal(item, iteration, False)
        iteration.tokens += len(ready) - before

    def _kill(self, item: FrameNode, iteration: Iteration) -> None:
        """Let all who wait for an item know that it is dead."""
        before = len(self.ready)
        for readers, merges in item.edges:
            self._kill_readers(readers, merges, iteration, item.kind is _ENTER)
        self._signal(item, iteration, True)
        iteration.tokens += len(self.ready) - before

    def _kill_readers(
        self,
        readers: Iterable[tuple[FrameNode, int, int]],
        merges: Iterable[tuple[FrameNode, int, Any]],
        iteration: Iteration,
        entered: bool,
    ) -> None:
        waits, ready = iteration.waits, self.ready
        for reader, at, _ in readers:
            waits[at] = left = (waits[at] | DEATH) - 1
            if left == DEATH:
                self._die(reader, iteration)
        for reader, at, _ in merges:
            waits[at + 1] += 1
            # What comes back around a loop is not waited for if nothing enters.
            if waits[at] == 1 and (entered or waits[at + 1] == reader.data):
                waits[at] = 0
                ready.append((reader, iteration, True))

    def _die(self, item: FrameNode, iteration: Iteration) -> None:
        """An item has all that it waits for, and something of that is dead."""
        if item.kind is _EXIT:
            # Kept until the frame ends, or another iteration begins.
            if iteration.number == iteration.frame.last:
                iteration.frame.exits.append(item)
        elif item.kind is not _NEXT_ITERATION:
            self.ready.append((item, iteration, True))

    def _signal(self, item: FrameNode, iteration: Iteration, dead: bool) -> None:
        """Let those go on who wait for an item, whatever it makes."""
        waits, ready = iteration.waits, self.ready
        for reader in item.controls:
            at = reader.place
            if reader.kind is Kind.MERGE:
                waits[at] = left = waits[at] - 2
                if not left:
                    ready.append((reader, iteration, False))
                elif left == 1 and waits[at + 1] == reader.data:
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

    def _leave(self, item: FrameNode, iteration: Iteration, value: Any) -> None:
        """Bring a living value to another iteration or frame."""
        frame = iteration.frame
        if item.kind is _NEXT_ITERATION:
            number = iteration.number
            if number == frame.last:
                if len(frame.iterations) >= frame.info.parallel:
                    frame.deferred.append((item, value))
                    return
                self._advance(frame)
            self._deliver(item, frame.iterations[number + 1], (value,))
        elif item.kind is _EXIT:
            assert frame.around is not None
            self._deliver(item, frame.around, (value,))
        else:
            self._enter(item, iteration, value)

    def _enter(self, item: FrameNode, iteration: Iteration, value: Any) -> None:
        info = item.child
        assert info is not None
        children = iteration.children
        if children is None:
            children = iteration.children = {}
        child = children.get(info.name)
        if child is None:
            child = children[info.name] = Frame(info, iteration)
        child.entering -= 1
        reached = list(child.iterations.values()) if item.constant else [child.iterations[0]]
        for each in reached:
            self._arrive(item, each, value)
        if item.constant:
            self._keep(item, child, value)
        first = child.iterations.get(0)
        if first is not None and not first.tokens and not child.entering:
            self._close(first)

    def _arrive(self, item: FrameNode, iteration: Iteration, value: Any) -> None:
        if value is DEAD:
            self._kill(item, iteration)
        else:
            self._deliver(item, iteration, (value,))

    def _keep(self, item: FrameNode, frame: Frame, value: Any) -> None:
        """Bring a value to all iterations to come: they begin as copies of one that has it."""
        if frame.inputs is frame.info.inputs:
            frame.inputs, frame.waits = frame.inputs.copy(), frame.waits.copy()
        ready, self.ready = self.ready, deque()
        self._arrive(item, Iteration(frame, -1, frame.inputs, frame.waits), value)
        frame.begun += self.ready
        self.ready = ready

    def _advance(self, frame: Frame) -> None:
        """Begin another iteration."""
        number = frame.last
        if self._most is not None and number >= self._most:
            raise LimitExceeded(
                f"the frame {frame.info.name!r} passed the limit of {self._most} iterations; raise "
                "Limits.max_iterations if that is what the model should do"
            )
        frame.last = number = number + 1
        iteration = Iteration(frame, number, frame.inputs.copy(), frame.waits.copy())
        frame.iterations[number] = iteration
        if frame.exits:
            frame.exits.clear()
        if frame.begun:
            iteration.tokens = len(frame.begun)
            self.ready.extend([(item, iteration, dead) for item, _, dead in frame.begun])
        if frame.deferred:
            deferred, frame.deferred = frame.deferred, []
            for item, value in deferred:
                self._deliver(item, iteration, (value,))

    def _close(self, iteration: Iteration) -> None:
        """End iterations, from this one on, and frames, as far as nothing goes on in them."""
        while True:
            frame, number = iteration.frame, iteration.number
            iterations = frame.iterations
            next_: Iteration | None = iterations.get(number)
            while (
                next_ is not None
                and not next_.tokens
                and not next_.children
                and (number - 1 not in iterations if number else not frame.entering)
            ):
                del iterations[number]
                number += 1
                if frame.deferred:
                    self._advance(frame)
                next_ = iterations.get(number)
            around = frame.around
            if iterations or frame.entering or around is None:
                return
            if isinstance(frame, Call):
                self.ready.append((frame.tokens.end, iteration, False))
                return
            assert around.children is not None
            del around.children[frame.info.name]
            for item in frame.exits:
                self._kill(item, around)
            if around.tokens:
                return
            iteration = around


# What a graph has not made.


def missing(call: Call, chosen: Mapping[FrameNode, int]) -> DeadTensor | None:
    """The error of a graph that has ended without one of its results, if one is missing."""
    for value, result in zip(call.tokens.graph.outputs, call.results, strict=True):
        if result is None or result is DEAD:
            return _dead(value, result is DEAD, chosen)
    return None


def _dead(value: Value, dead: bool, chosen: Mapping[FrameNode, int]) -> DeadTensor:
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
