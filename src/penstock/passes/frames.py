"""In which frame each node of a graph with TensorFlow's primitives of control flow is.

A frame is entered by Enter and left by Exit; what stands between is in it. A graph in which that
cannot be said of each node has no meaning, and is refused: after it has been cut down to what a run
needs, as TensorFlow does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from penstock.errors import InvalidModel
from penstock.ir import Graph, Node, captures

Path = tuple[str, ...]
"""names of frames, from the outermost one inwards"""

_ENTERS = frozenset({"Enter", "RefEnter"})
_EXITS = frozenset({"Exit", "RefExit"})
_NEXT = frozenset({"NextIteration", "RefNextIteration"})


def frames_of(graph: Graph) -> dict[Node, Path]:
    """The frame of each node, of an Enter that which it leaves. Raises ``InvalidModel``."""
    after = _successors(graph)
    found: dict[Node, Path] = {}
    from_: dict[Node, Node] = {}
    queue: deque[Node] = deque()
    waiting = {node for each in after.values() for node in each}
    for node in graph.nodes:
        if node not in waiting:
            found[node] = ()
            queue.append(node)
    while queue:
        node = queue.popleft()
        path = _behind(node, found[node])
        for reader in after.get(node, ()):
            if reader not in found:
                found[reader], from_[reader] = path, node
                queue.append(reader)
            elif found[reader] != path:
                raise InvalidModel(
                    f"{reader.label} has inputs from different frames: {_shown(found[reader])} by "
                    f"{_label(from_.get(reader))}, and {_shown(path)} by {node.label}"
                )
    _check(graph, found)
    for node in graph.nodes:
        found.setdefault(node, ())  # in a circle that nothing enters: it never runs
    return found


def _successors(graph: Graph) -> dict[Node, dict[Node, None]]:
    after: dict[Node, dict[Node, None]] = {}
    for node in graph.nodes:
        before = [value.producer for value in node.inputs if value is not None]
        for each in (*before, *node.control_inputs):
            if each is not None:
                after.setdefault(each, {})[node] = None
    return after


def _behind(node: Node, path: Path) -> Path:
    """The frame that what a node makes is in."""
    name = _primitive(node)
    if name in _ENTERS:
        return (*path, str(node.attrs["frame_name"]))
    if name in _EXITS:
        if not path:
            raise InvalidModel(f"{node.label} leaves a frame that nothing enters")
        return path[:-1]
    if name in _NEXT and not path:
        raise InvalidModel(f"{node.label} is in no frame that could have another iteration")
    return path


def _check(graph: Graph, found: Mapping[Node, Path]) -> None:
    conditions: dict[Path, Node] = {}
    places: dict[str, tuple[Path, Node]] = {}
    for node in graph.nodes:
        path, name = found.get(node), _primitive(node)
        if path is None:
            continue
        if name == "LoopCond":
            other = conditions.setdefault(path, node)
            if other is not node:
                raise InvalidModel(
                    f"{_shown(path)} has two loops, with the conditions {other.label} and "
                    f"{node.label}"
                )
        if name in _ENTERS:
            if int(node.attrs.get("parallel_iterations", 10)) < 1:
                raise InvalidModel(f"{node.label}: parallel_iterations must be positive")
            inside = str(node.attrs["frame_name"])
            where, first = places.setdefault(inside, (path, node))
            if where != path:
                raise InvalidModel(
                    f"the frame {inside!r} is entered from {_shown(where)} by {first.label}, and "
                    f"from {_shown(path)} by {node.label}"
                )


def _primitive(node: Node) -> str:
    return node.op.name if node.op.domain == "tensorflow" else ""


def _shown(path: Path) -> str:
    return f"the frame {'/'.join(path)!r}" if path else "no frame"


def _label(node: Node | None) -> str:
    return "what is fed" if node is None else node.label


def is_framed(graph: Graph) -> bool:
    """Whether some node needs an executor that knows of frames and dead values."""
    return any(map(is_framed_node, graph.nodes))


def is_framed_node(node: Node) -> bool:
    """Whether ``node`` itself does."""
    return _primitive(node) in _PRIMITIVES


_PRIMITIVES = frozenset(
    {
        *_ENTERS,
        *_EXITS,
        *_NEXT,
        "Call",
        "ControlTrigger",
        "LoopCond",
        "Merge",
        "RefMerge",
        "RefSwitch",
        "Switch",
        "_SwitchN",
    }
)


def keep_needed(graph: Graph) -> None:
    """Drop the nodes that no output needs, where loops lead back from later nodes to earlier."""
    needed: set[Node] = set()
    stack = [value.producer for value in graph.outputs]
    while stack:
        node = stack.pop()
        if node is None or node in needed:
            continue
        needed.add(node)
        stack += [value.producer for value in node.inputs if value is not None]
        stack += node.control_inputs
        for _, inner in node.graphs:
            stack += [value.producer for value in captures(inner)]
    graph.nodes = [node for node in graph.nodes if node in needed]
