"""Device assignment: the device that a node names, or that of the resource handle that it reads.

Variables, stacks and tensor arrays stay on the device that creates them. All nodes that read their
handles run there, whatever device they name.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import InvalidModel
from penstock.ir.device_name import LOCAL, DeviceName
from penstock.ir.graph import Graph, Node, Value, all_reads
from penstock.ir.op import PRIMITIVES, Role
from penstock.passes.context import Pass, PassContext


class AssignDevices(Pass):
    """Set the device of each node to one of ``FramePolicy.devices``, if there are any (see
    ``assign_devices``)."""

    requires = frozenset()

    def run(self, graph: Graph, context: PassContext) -> bool:
        devices = context.frames.devices
        if not devices:
            return False
        before = [node.device for node in graph.walk()]
        assign_devices(graph, devices)
        return before != [node.device for node in graph.walk()]


def assign_devices(graph: Graph, devices: Sequence[str]) -> None:
    """Set the ``device`` of each node of ``graph`` to one of ``devices``, which are full names. A
    partial name selects the first matching device. A node without a device may run on any, and in a
    nested graph runs on the device of the node that owns it. Raises ``InvalidModel`` with all nodes
    whose device does not exist."""
    available = [DeviceName.parse(device) for device in devices]
    wanted = {node.device for node in graph.walk()}
    fitting = {name: _fitting(name, available) for name in wanted}
    missing: dict[str, list[str]] = {}
    # Check all nodes first, so that one error names all faults and no graph is half assigned.
    for node in graph.walk():
        if fitting[node.device] is None:
            missing.setdefault(node.device, []).append(node.label)
    if missing:
        names = "; ".join(f"{name!r}, for {', '.join(nodes)}" for name, nodes in missing.items())
        raise InvalidModel(
            f"nodes name devices that are not among those of the session, "
            f"{', '.join(devices)}: {names}. Give it more with devices=, or leave that option out, "
            "so that all nodes run on one device"
        )
    homes = _homes(graph)
    chosen = {node: str(fitting[homes.get(node, node).device]) for node in graph.nodes}
    for node, device in chosen.items():
        node.device = device
        for _, inner in node.graphs:
            for inner_node in inner.walk():
                inner_node.device = str(fitting[inner_node.device]) if inner_node.device else device


def _fitting(name: str, available: Sequence[DeviceName]) -> DeviceName | None:
    """Return the first of the ``available`` devices that matches a partial name, preferring this
    process's devices where the name leaves the process open."""
    try:
        wanted = DeviceName.parse(name)
    except InvalidModel:
        return None
    here = wanted.over(DeviceName.parse(LOCAL))
    return next((d for each in (here, wanted) for d in available if d.allows(each)), None)


def _homes(graph: Graph) -> dict[Node, Node]:
    """Map each node that reads a handle to the node that creates it; with several handles, to one
    of these for all."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in all_reads(node):
            readers.setdefault(value, []).append(node)
    home: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while home.get(node, node) is not node:
            node = home[node]
        return node

    makers = [node for node in graph.nodes if "makes handle" in node.op.traits]
    stack = [node.outputs[0] for node in makers]
    seen: set[Value] = set()
    while stack:
        handle = stack.pop()
        if handle is None or handle in seen:
            continue
        seen.add(handle)
        assert handle.producer is not None
        maker = root(handle.producer)
        for node in readers.get(handle, ()):
            home[root(node)] = maker
            if node.op.role is Role.SWITCH and handle is node.inputs[0]:
                stack += node.outputs
            elif node.op.role is Role.MERGE:
                stack.append(node.outputs[0])
            elif node.op.role in PRIMITIVES or "forwards handle" in node.op.traits:
                stack += node.outputs[:1] if handle is node.inputs[0] else ()
    return {node: root(node) for node in home}
