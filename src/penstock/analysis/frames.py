"""The frames of TensorFlow's control flow: find the frame of each node, and check validity.

An Enter and an Exit run in the frame that they leave, all other nodes in the frame of their inputs
and control inputs. Inputs of the graph and nodes without inputs are in the root frame. Analyse only
the part of a graph that a run needs: other parts may be broken.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import InvalidModel
from penstock.core.records import dataclass, field
from penstock.ir.graph import FramePath, Graph, Node, all_reads
from penstock.ir.op import Role


@dataclass(slots=True, eq=False)
class Frame:
    """A frame of a graph. A run creates an instance of it each time that it is entered.

    ``parent`` is None for the root. ``enters``: the nodes that enter it; the first determines how
    many iterations may run at once (``parallel_iterations``). ``loop_cond``: the LoopCond node that
    decides whether the loop continues, or None if there is no loop.
    """

    name: str
    parent: Frame | None
    parallel_iterations: int = 1
    enters: list[Node] = field(default_factory=list)
    loop_cond: Node | None = None

    @property
    def path(self) -> FramePath:
        """The names of the surrounding frames, outermost first, followed by its own."""
        return () if self.parent is None else (*self.parent.path, self.name)

    def __str__(self) -> str:
        return "the root frame" if self.parent is None else f"frame {self.name!r}"


class Frames:
    """The frames of ``graph``, which must be sorted. ``of`` maps each node to the frame in which it
    runs, ``of_outputs`` to the frame of its outputs. The two differ only for an Enter or an Exit.

    Raises ``InvalidModel`` if the inputs of a node are in different frames, an Exit is in no frame,
    or a frame has two parents or two LoopConds."""

    def __init__(self, graph: Graph) -> None:
        self.root = Frame("", None)
        self.of: dict[Node, Frame] = {}
        self.of_outputs: dict[Node, Frame] = {}
        self.by_name: dict[str, Frame] = {}
        for node in with_checkpoints(graph.nodes):
            frame = self.common(node)  # its producers precede it, except for back edges
            self.of[node] = frame
            self.of_outputs[node] = self.through(node, frame)
        for node in graph.nodes:
            if node.op.role is Role.MERGE:
                self.common(node)  # includes its inputs from the previous iteration

    def paths(self) -> dict[Node, FramePath]:
        """Return the ``path`` of the frame in which each node runs."""
        paths = {frame: frame.path for frame in {*self.of.values()}}
        return {node: paths[frame] for node, frame in self.of.items()}

    def common(self, node: Node) -> Frame:
        """Return the frame of all inputs of ``node``. Raises ``InvalidModel`` if they differ."""
        common: Frame | None = None
        first = ""
        for name, frame in self.sources(node):
            if common is not None and frame is not common:
                raise InvalidModel(
                    f"{node.label} ({node.op.name}) has inputs from different frames: {first!r} is "
                    f"in {common}, {name!r} in {frame}; let all of them "
                    "enter, or leave, the same one"
                )
            common, first = frame, name
        return common or self.root

    def sources(self, node: Node) -> Iterator[tuple[str, Frame]]:
        """Yield the name and frame of each input, control input and capture of ``node``, and of the
        node itself, as far as they are known: inputs over back edges become known later."""
        if node in self.of:
            yield node.name, self.of[node]
        for value in all_reads(node):
            producer = value.producer
            if producer is None:
                yield value.name, self.root
            elif producer in self.of_outputs:
                yield value.name, self.of_outputs[producer]
        for source in node.control_inputs:
            if source in self.of_outputs:
                yield f"^{source.name}", self.of_outputs[source]

    def through(self, node: Node, frame: Frame) -> Frame:
        """Return the frame of the outputs of a node that runs in ``frame``."""
        if node.op.role is Role.ENTER:
            return self.entered(node, frame)
        if node.op.role is Role.EXIT:
            if frame.parent is None:
                raise InvalidModel(
                    f"{node.label} is an Exit of no frame: none of its inputs enters one"
                )
            return frame.parent
        if node.op.role is Role.LOOP_COND:
            if frame.loop_cond is not None:
                raise InvalidModel(
                    f"{frame} has two LoopConds, {frame.loop_cond.label} and {node.label}; "
                    "give each loop a frame of its own"
                )
            frame.loop_cond = node
        return frame

    def entered(self, node: Node, parent: Frame) -> Frame:
        name = node.attrs["frame_name"]
        limit = node.attrs.get("parallel_iterations", 10)  # TensorFlow's default
        frame = self.by_name.setdefault(name, Frame(name, parent, limit))
        if frame.parent is not parent:
            assert frame.parent is not None
            raise InvalidModel(
                f"{frame} is entered from {parent} by {node.label}, and from "
                f"{frame.parent} by {frame.enters[0].label}; rename one of the two"
            )
        frame.enters.append(node)
        return frame
