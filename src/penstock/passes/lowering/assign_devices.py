"""Which device runs which node: the one that it names, or the one of the handle that it reads.

Variables, stacks and tensor arrays stay where they are made, and so does whatever reads the handle
of one, whatever device it names.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidModel
from penstock.ir.device_name import LOCAL, DeviceName
from penstock.ir.graph import Graph, Node, Value, captures
from penstock.ir.op import Role
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.control_flow import PRIMITIVES
from penstock.ops.tensorflow.state import VARIABLES

_MAKERS = VARIABLES | {"StackV2", "TensorArrayV3", "TensorArrayGradV3"}
"""operations whose first output is a handle"""
_PASSING = frozenset({"Identity", "Assign", "AssignAdd", "AssignSub"})
"""operations that hand on the handle that they read first"""


def assign(graph: Graph, devices: Sequence[str]) -> None:
    """Give each node of ``graph`` one of ``devices``, which are full names.

    What a node's own name leaves open is the first device's; a node that names none runs there.
    Raises ``InvalidModel`` that names all nodes whose devices there are not.
    """
    known = [DeviceName.parse(each) for each in devices]
    wanted = {node.device for node in graph.nodes}
    fitting = {name: _fitting(name, known) for name in wanted}
    missing: dict[str, list[str]] = {}
    for node in graph.nodes:
        if fitting[node.device] is None:
            missing.setdefault(node.device, []).append(node.label)
    if missing:
        found = "; ".join(f"{name!r}, for {', '.join(who)}" for name, who in missing.items())
        raise InvalidModel(
            f"nodes name devices that the session, with {', '.join(devices)}, has not: {found}. "
            "Give it more with devices=, or leave that away, and all nodes run on one device"
        )
    homes = _homes(graph)
    chosen = {node: str(fitting[homes.get(node, node).device]) for node in graph.nodes}
    for node, device in chosen.items():
        node.device = device


def _fitting(name: str, known: Sequence[DeviceName]) -> DeviceName | None:
    """The first of the ``known`` devices that a node can mean."""
    try:
        wanted = DeviceName.parse(name).over(DeviceName.parse(LOCAL))
    except InvalidModel:
        return None
    return next((each for each in known if each.allows(wanted)), None)


def _homes(graph: Graph) -> dict[Node, Node]:
    """For each node that reads a handle the one that made it: of several, one for all of them."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        inner = [value for _, each in node.graphs for value in captures(each)]
        for value in (*node.inputs, *inner):
            if value is not None:
                readers.setdefault(value, []).append(node)
    home: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while home.get(node, node) is not node:
            node = home[node]
        return node

    left = [node.outputs[0] for node in graph.nodes if _is(node, _MAKERS)]
    seen: set[Value] = set()
    while left:
        handle = left.pop()
        if handle is None or handle in seen:
            continue
        seen.add(handle)
        assert handle.producer is not None
        maker = root(handle.producer)
        for node in readers.get(handle, ()):
            home[root(node)] = maker
            if node.op.role is Role.SWITCH and handle is node.inputs[0]:
                left += node.outputs
            elif node.op.role is Role.MERGE or (_passes(node) and handle is node.inputs[0]):
                left.append(node.outputs[0])
    return {node: root(node) for node in home}


def _passes(node: Node) -> bool:
    return node.op.role in PRIMITIVES or node.op.name in _PASSING


def _is(node: Node, names: frozenset[str]) -> bool:
    return node.op.name in names and node.op.domain == TENSORFLOW
