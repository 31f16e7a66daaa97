"""Fused: several nodes as one, for backends with one kernel for all of them.

It is not in the table of operations, so that no file can use it. ``passes.lowering.fuse`` creates
these nodes where a backend accepts them. The nodes of its region define the computation.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.records import dataclass
from penstock.core.types import ANY, RunValue, Type
from penstock.ir.graph import Contents, Node, Value
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Op, Types
from penstock.ops.registry import COMPUTING


@dataclass(frozen=True, eq=False)
class Region:
    """The nodes of a fused node in order; the last one produces its only output.

    ``inputs`` are the values that the nodes read but do not produce, in the order of the fused
    node's inputs. Copies of the fused node read other values, in the same order.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]

    @property
    def output(self) -> Value:
        """The output of the last node."""
        value = self.nodes[-1].outputs[0]
        assert value is not None
        return value


def fused(nodes: Sequence[Node]) -> Node:
    """Return one node that replaces ``nodes``, each of which has one output that only later ones
    read. It is not added to their graph."""
    inner: set[Value | None] = {None}
    # Ordered sets.
    read: dict[Value | None, None] = {}
    waits: dict[Node, None] = {}
    ops, names = [], []
    for node in nodes:
        inner.update(node.outputs)
        read |= dict.fromkeys(node.inputs)
        waits |= dict.fromkeys(node.control_inputs)
        ops.append(node.op.name)
        names.append(node.name or node.op.name)
    inputs = tuple([value for value in read if value is not None and value not in inner])
    region = Region(tuple(nodes), inputs)
    result = region.output
    return Node(
        FUSED,
        inputs,
        [Value(result.name, result.type)],
        {"region": region, "ops": " ".join(ops)},
        name="+".join(names),
        control_inputs=list(waits),
        origin=nodes[0].origin,
    )


def fused_copies(nodes: Sequence[Node]) -> Node:
    """Like ``fused``, but with copies of ``nodes``, whose results other nodes may read too. Fused
    nodes among them are replaced by their parts."""
    copies: list[Node] = []
    copy_of: dict[Value | None, Value | None] = {}
    for node in nodes:
        if is_fused(node):
            read = zip(node.attrs["region"].inputs, node.inputs, strict=True)
            copy_of.update([(inner, copy_of.get(value, value)) for inner, value in read])
        for part in parts(node):
            (output,) = part.outputs
            assert output is not None
            inputs = [copy_of.get(value, value) for value in part.inputs]
            copy_of[output] = copy = Value(output.name, output.type)
            copies.append(part.derived(inputs, [copy]))
        copy_of[node.outputs[0]] = copy
    return fused(copies)


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    region: Region = attrs["region"]
    if region.output.type is ANY:  # if read from a file
        for value, type_ in _types_within(region, types).items():
            if not value.is_constant:
                value.type = type_ or ANY
    return (region.output.type,)


def type_of_result(node: Node, types: Types) -> Type:
    """The type of the result of a fused node for given types of inputs, even if its region lacks
    them."""
    region: Region = node.attrs["region"]
    return _types_within(region, types)[region.output] or ANY


def _types_within(region: Region, types: Types) -> dict[Value, Type | None]:
    """The types of the inputs and of all results in a region, given the types of the inputs."""
    known: dict[Value, Type | None] = dict(zip(region.inputs, types, strict=True))
    for part in region.nodes:
        inputs = [None if v is None else known.get(v, v.type) for v in part.inputs]
        (output,) = part.outputs
        assert output is not None
        types = part.op.infer(inputs, part.attrs, Contents(part.inputs))
        known[output] = next(iter(types), ANY)
    return known


def _compile(node: Node, types: Types) -> Kernel:
    """A kernel that runs the kernels of the nodes in order."""
    region: Region = node.attrs["region"]
    place = {value: i for i, value in enumerate(region.inputs)}
    calls = []
    for part in region.nodes:
        kernel = part.op.compile(part, [None if v is None else v.type for v in part.inputs])
        calls.append((kernel.function, [-1 if v is None else place[v] for v in part.inputs]))
        (output,) = part.outputs
        assert output is not None
        place[output] = len(place)

    def function(*inputs: RunValue) -> RunValue:
        values = list(inputs)
        for call, arguments in calls:
            values.append(call(*[None if i < 0 else values[i] for i in arguments]))
        return values[-1]

    return returning(function)


FUSED = Op("Fused", "penstock", 1, 1, _infer, _compile)
"""Attributes: ``region``, the fused nodes, and ``ops``, the names of their operations."""


def is_fused(node: Node) -> bool:
    """Whether ``node`` is a fused node."""
    return node.op is FUSED


def rounds_operand(node: Node) -> bool:
    """Whether a node with a ``region`` is a product or convolution whose input is rounded to
    bfloat16 first (``rounded_operand``). Callers check for the attribute ``region`` first, which
    few nodes have."""
    beginning = node.attrs["ops"].split(" ", 3)[:3] if node.op is FUSED else []
    return beginning[:2] == ["Cast", "Cast"] and beginning[-1] in COMPUTING


def operation_name(node: Node) -> str:
    """The display name of a node's operation, with its domain; for a fused node those of its parts,
    as in "Conv+HardSwish"."""
    return "+".join([part.op.full_name for part in parts(node)])


def parts(node: Node) -> tuple[Node, ...]:
    """The parts of a fused node; the node itself if it is not fused."""
    return node.attrs["region"].nodes if node.op is FUSED else (node,)
