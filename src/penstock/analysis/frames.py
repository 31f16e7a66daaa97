"""In which frame of TensorFlow's control flow each node runs, and whether the frames make sense.

An Enter runs in the frame that it leaves, an Exit in the one that it leaves, all other nodes in the
frame of what they read and wait for. What is fed, and nodes that come after nobody, are in the
root frame. This can only be asked of what a run needs: other parts of the graph may be broken.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import InvalidModel
from penstock.ir.graph import Graph, Node, Value, captures
from penstock.ir.op import Role


class Frame:
    """A frame as the graph has it; each time it is entered, a run makes one of its own.

    ``enters``: the nodes that enter it, of which the first says how many iterations may go on at
    once (``parallel_iterations``). ``parent`` is None for the root. ``loop_cond``: the one node
    that says whether a loop goes on, if there is a loop.
    """

    __slots__ = ("enters", "loop_cond", "name", "parallel_iterations", "parent")

    def __init__(self, name: str, parent: Frame | None, parallel_iterations: int = 1) -> None:
        self.name = name
        self.parent = parent
        self.parallel_iterations = parallel_iterations
        self.enters: list[Node] = []
        self.loop_cond: Node | None = None

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the frames around it, from the outermost one inwards, and its own."""
        return () if self.parent is None else (*self.parent.path, self.name)

    @property
    def depth(self) -> int:
        """How many frames are around it."""
        depth, frame = 0, self.parent
        while frame is not None:
            depth, frame = depth + 1, frame.parent
        return depth

    def __repr__(self) -> str:
        return f"Frame({self.name!r}, depth {self.depth})"


def frame_of(graph: Graph) -> dict[Node, Frame]:
    """The frame that each node of ``graph`` runs in; ``graph`` must be sorted.

    Raises ``InvalidModel``: where a node comes after nodes of different frames, an Exit or a
    NextIteration is in none, a frame has two parents, or two LoopConds.
    """
    return _Frames(graph).of


def frames_of(graph: Graph) -> tuple[dict[Node, Frame], dict[Node, Frame]]:
    """As ``frame_of``, and the frame that each node leaves what it makes in."""
    found = _Frames(graph)
    return found.of, found.after


class _Frames:
    def __init__(self, graph: Graph) -> None:
        self.root = Frame("", None)
        self.of: dict[Node, Frame] = {}
        self.after: dict[Node, Frame] = {}  # the frame of what a node makes
        self.by_name: dict[str, Frame] = {}
        for node in graph.nodes:
            frame = self.common(node)
            self.of[node] = frame
            self.after[node] = self.through(node, frame)
        for node in graph.nodes:
            if node.op.role is Role.MERGE:
                self.check_merge(node)

    def common(self, node: Node) -> Frame:
        """The frame of all that ``node`` comes after."""
        found: Frame | None = None
        first = ""
        for name, frame in self.sources(node):
            if found is not None and frame is not found:
                raise InvalidModel(
                    f"{node.label} ({node.op.name}) has inputs from different frames: {first!r} is "
                    f"in {_shown(found)}, {name!r} in {_shown(frame)}; let all of them enter, or "
                    "leave, the same one"
                )
            found, first = frame, name
        return found or self.root

    def sources(self, node: Node) -> Iterator[tuple[str, Frame]]:
        """What ``node`` comes after, and in which frame it leaves that behind; without what comes
        from the iteration before."""
        read: list[Value | None] = list(node.inputs)
        for _, inner in node.graphs:
            read += captures(inner)
        for value in read:
            if value is None or value.const is not None:
                continue
            producer = value.producer
            if producer is None:
                yield value.name, self.root
            elif producer in self.after:
                yield value.name, self.after[producer]
        for source in node.control_inputs:
            if source in self.after:
                yield f"^{source.name}", self.after[source]

    def through(self, node: Node, frame: Frame) -> Frame:
        """The frame of what a node makes that runs in ``frame``."""
        if node.op.role is Role.ENTER:
            return self.entered(node, frame)
        if node.op.role is Role.EXIT:
            if frame.parent is None:
                raise InvalidModel(f"{node.label} is an Exit of no frame: nothing before it enters")
            return frame.parent
        if node.op.role is Role.NEXT_ITERATION and frame.parent is None:
            raise InvalidModel(
                f"{node.label} is a NextIteration of no frame; let its loop enter one"
            )
        if node.op.role is Role.LOOP_COND:
            if frame.loop_cond is not None:
                raise InvalidModel(
                    f"{_shown(frame)} has two LoopConds, {frame.loop_cond.label} and {node.label}; "
                    "give each loop a frame of its own"
                )
            frame.loop_cond = node
        return frame

    def entered(self, node: Node, parent: Frame) -> Frame:
        name = node.attrs["frame_name"]
        frame = self.by_name.get(name)
        if frame is None:
            limit = node.attrs.get("parallel_iterations", 10)
            frame = self.by_name[name] = Frame(name, parent, limit)
        elif frame.parent is not parent:
            assert frame.parent is not None
            raise InvalidModel(
                f"{_shown(frame)} is entered from {_shown(parent)} by {node.label}, and from "
                f"{_shown(frame.parent)} by {frame.enters[0].label}; rename one of the two"
            )
        frame.enters.append(node)
        return frame

    def check_merge(self, node: Node) -> None:
        """What comes back to a Merge does so in its own frame."""
        for value in node.inputs:
            source = None if value is None else value.producer
            if source is None or source not in self.after:
                continue
            if self.after[source] is not self.of[node]:
                raise InvalidModel(
                    f"{node.label} ({node.op.name}) has inputs from different frames: it is in "
                    f"{_shown(self.of[node])}, {source.label} in {_shown(self.after[source])}; let "
                    "all of them enter the same one"
                )


def _shown(frame: Frame) -> str:
    return "the root frame" if frame.parent is None else f"frame {frame.name!r}"
