"""The objects that a SavedModel was saved from, and the keys of their variables in the checkpoint.

A SavedModel holds the tree of Python objects that it was saved from, next to the graph. A function
that captures variables takes their handles behind its arguments, and names the objects that they
belong to; the key of a variable in the checkpoint is the path to its object. This tells where the
values of variables are that no node of the graph restores: TensorFlow saves some twice, such as
those of Keras layers inside of a ``tf.Module``, and restores only the copies by nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.frontends.tensorflow.proto.graphdef_pb2 import NodeDef, SavedObjectGraph

# How checkpoints write the characters of a name that mean something in a key.
_ESCAPED = str.maketrans({".": "..", "/": ".S"})
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
# Objects that one key leads through at most, so that a file cannot ask for long keys without end.
_MAX_DEPTH = 100


class ObjectGraph:
    """The objects of a SavedModel by number, as ``proto`` has them."""

    def __init__(self, proto: SavedObjectGraph) -> None:
        self._proto = proto
        self._parents = _parents(proto)

    def captured(self, nodes: Iterable[NodeDef]) -> Iterator[tuple[str, int]]:
        """The inputs of ``nodes`` that are captured by the functions which they call: names of
        inputs, each with the number of its object."""
        for node in nodes:
            called = node.attr["f"].func.name if "f" in node.attr else ""
            if called in self._proto.concrete_functions:
                bound = self._proto.concrete_functions[called].bound_inputs
                inputs = [text for text in node.input if not text.startswith("^")]
                # What a function captures are the last of its arguments.
                yield from zip(reversed(inputs), reversed(bound), strict=False)

    def key(self, number: int, most: int) -> str:
        """The key of an object's value in a checkpoint, whose keys have up to ``most`` characters;
        "" if it can be none of these."""
        names: list[str] = []
        while number in self._parents and len(names) < _MAX_DEPTH and most >= 0:
            number, name = self._parents[number]
            names.append(name.translate(_ESCAPED))
            most -= len(names[-1])
        return "" if number or most < 0 else "/".join(reversed(names)) + _VALUE


def _parents(proto: SavedObjectGraph) -> dict[int, tuple[int, str]]:
    """For each object but the first the one that it is reached from in the fewest steps, and under
    which name."""
    parents: dict[int, tuple[int, str]] = {}
    reached = deque([0] if proto.nodes else [])
    while reached:
        number = reached.popleft()
        for child in proto.nodes[number].children:
            if 0 < child.node_id < len(proto.nodes) and child.node_id not in parents:
                parents[child.node_id] = number, child.local_name
                reached.append(child.node_id)
    return parents
