"""Loop-invariant code motion: values that do not change in a loop are computed before it.

::

    y, _ = loop(x, w):              v = w.T
        next = x @ w.T              y = loop(x):
        return next, w                  return x @ v

Converters of TensorFlow's loops make the weights of a layer loop-carried values. As captures they
are constants again, which kernels and other passes can prepare. A node of the body whose inputs are
all invariant moves before the loop. This must not make a run fail: if the loop may run zero times,
only nodes that cannot fail on any inputs move; they cost at most one iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import STRING, Dim, TensorType
from penstock.ir.graph import Graph, Node, all_reads
from penstock.ir.op import Role
from penstock.ops.internal.arrays import TRIP_COUNT
from penstock.ops.onnx.control_flow import ScanLayout, loop_carried
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import keep_carried
from penstock.passes.rewrite import Substitution, names_of, new_name

_LOOPS = frozenset({Role.LOOP, Role.SCAN})


class HoistInvariants(Pass):
    """Let loops capture unchanged loop-carried values, and compute invariant nodes before them.
    Graphs with frames are skipped: there, a loop's result, or a value that its body reads, may be
    dead although its input is live."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.framed:
            return False
        substitution = Substitution()
        graphs = graph.graphs()
        # Outer loops come first, so that the initial values of inner loops are already replaced.
        for inner in graphs:
            for node in with_checkpoints(inner.nodes):
                if node.op.role in _LOOPS:
                    _read_outside(node, substitution)
        substitution.apply_throughout(graph)
        # Inner loops come first, so that a node can leave several loops.
        taken, moved = names_of(graph), False
        for inner in graphs[::-1]:
            nodes: list[Node] = []
            for node in with_checkpoints(inner.nodes):
                if node.op.role in _LOOPS:
                    leaving = _leave(node, taken)
                    moved |= bool(leaving)
                    nodes += leaving
                nodes.append(node)
            inner.nodes = nodes
        return bool(substitution) or moved


def _read_outside(node: Node, substitution: Substitution) -> None:
    """Replace values that the loop ``node`` carries unchanged by their initial values. Skips loops
    whose trip count or condition may be invalid in a run, since it must have one element."""
    limits = node.inputs[:2] if node.op.role is Role.LOOP else ()
    types = [value.type for value in limits if value is not None]
    if not all(isinstance(t, TensorType) and t.static and t.elements == 1 for t in types):
        return
    entering, leaving = loop_carried(node)
    body: Graph = node.attrs["body"]
    places = zip(node.inputs[entering], body.inputs[entering], body.outputs[leaving], strict=True)
    live = []
    for place, (initial, inside, updated) in enumerate(places):
        live.append(initial is None or inside is not updated)
        if initial is not None and not live[-1]:
            initial = substitution.of(initial)
            for value in (inside, node.outputs[place]):
                if value is not None:
                    substitution[value] = initial
    if not all(live):
        keep_carried(node, live)


def _leave(loop: Node, taken: Counter[str]) -> list[Node]:
    """Remove the nodes from a loop's body that can be computed before it, and return them."""
    body: Graph = loop.attrs["body"]
    inside: set[object] = {*body.inputs}
    for node in body.nodes:
        inside.update([value for value in node.outputs if value is not None])
    at_least_once = _runs(loop)
    leaving: list[Node] = []
    for node in with_checkpoints(body.nodes):
        # Check the node's inputs first, since the reads of nested graphs take a walk to find.
        if not inside.isdisjoint(node.inputs) or not _may_move(node, body):
            continue
        if inside.isdisjoint(all_reads(node)) and (at_least_once or _cannot_fail(node)):
            leaving.append(node)
            # Nodes that depend on the loop only by this node may follow it.
            inside.difference_update(node.outputs)
    if leaving:
        moved = set(leaving)
        body.nodes = [node for node in body.nodes if node not in moved]
        for node in body.nodes:
            # A node before the loop has always run when the body begins.
            node.control_inputs = [before for before in node.control_inputs if before not in moved]
        for node in leaving:
            _rename(node, taken)
    return leaving


def _rename(node: Node, taken: Counter[str]) -> None:
    """Make the names of a node's outputs unique, since those of other bodies may be equal."""
    for value in node.outputs:
        if value is not None and taken[value.name] > 1:
            taken[value.name] -= 1
            value.name = new_name(value.name, taken)


def _runs(loop: Node) -> bool:
    """Whether a loop is known to run at least once."""
    if loop.op.role is Role.SCAN:
        layout = ScanLayout(loop)
        scans = zip(loop.inputs[layout.states :], layout.input_axes, strict=True)
        # All scan inputs have the same length, so one known length suffices.
        lengths = [x.shape[axis] for x, axis in scans if x is not None and x.shape]
        return any(isinstance(length, int) and length > 0 for length in lengths)
    limit, guard = loop.inputs[:2]
    if guard is not None and (guard.const is None or not guard.const.all()):
        return False
    # Without a limit, only the condition ends a Loop, and its initial value is true.
    if limit is None:
        return True
    if limit.const is not None:
        return limit.const.size == 1 and limit.const.item() > 0
    before = limit.producer
    return before is not None and before.op is TRIP_COUNT and before.attrs["least"] > 0


def _may_move(node: Node, body: Graph) -> bool:
    """Whether a node with invariant inputs may run once instead of in each iteration."""
    # Targets must run in each iteration, even if nothing reads them.
    if not node.op.pure or node.control_inputs or node in body.targets:
        return False
    if not all(isinstance(value.type, TensorType) for value in node.outputs if value is not None):
        return False  # lists may be modified in place
    return all(inner.op.pure for inner in node.inner)


def _cannot_fail(node: Node) -> bool:
    """Whether a node computes a result for any contents of its inputs."""
    op, tensors = node.op, _tensors(node)
    if op.domain or node.graphs or not tensors or "may fail" in op.traits:
        return False
    if op.elementwise:
        kinds = [None if tensor.dtype is None else tensor.dtype.kind for tensor in tensors]
        # Division by zero is infinite for floats, and an error for integers.
        if "fails on integers" in op.traits and ("i" in kinds or "u" in kinds):
            return False
        operands = [value.shape for value in node.inputs if value is not None]
        return len(operands) == 1 or _broadcast(operands)
    constant = all(value.const is not None for value in node.inputs[1:] if value is not None)
    by_parameters = not op.traits.isdisjoint(("total by parameters", "selects", "reshapes"))
    known = "total once static" in op.traits or (constant and by_parameters)
    return "total" in op.traits or (known and all(tensor.static for tensor in tensors))


def _tensors(node: Node) -> Sequence[TensorType]:
    """Return the types of a node's inputs and outputs; none if one is not a numeric tensor."""
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    tensors = [type_ for type_ in types if isinstance(type_, TensorType)]
    numeric = all(type_.dtype is not None and type_.dtype != STRING for type_ in tensors)
    return tensors if numeric and len(tensors) == len(types) else ()


def _broadcast(shapes: Sequence[Sequence[Dim] | None]) -> bool:
    """Whether tensors of these shapes are known to broadcast."""
    known = [shape[::-1] for shape in shapes if shape is not None]
    aligned = zip_longest(*known, fillvalue=1)
    return len(known) == len(shapes) and all(
        len({*dims} - {1}) <= 1 and None not in dims for dims in aligned
    )
