"""Sink Transposes to channels last (NHWC) below operations that are independent of layout.

In an NHWC graph, each convolution is between two Transposes. These are views, but separate the
convolution from the elementwise operations that follow. If the operations are moved before the
Transpose, they can be fused; and the Transpose meets the one before the next convolution, and both
cancel. A Transpose to channels first (NCHW), or of constant codes, is moved before
DequantizeLinear, which is then adjacent to the convolution. Any Transpose is moved after a
reduction, whose result is smaller, if nothing else reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.analysis.quantized_weights import is_conversion
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ir.op import Op
from penstock.ops.registry import MICROSOFT, standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import replace_nodes

# Tensors of lower rank are mostly sequences of vectors rather than images.
_FEWEST_AXES = 4


class _Moved(NamedTuple):
    """A node rewritten to read the untransposed value: its new inputs and attributes, nodes to
    insert before it, and the permutation to apply to its result."""

    inputs: Sequence[Value | None]
    perm: Sequence[int]
    attrs: dict[str, int]
    before: Sequence[Node] = ()


class SinkTransposes(Pass):
    """Move Transposes after their readers, and those between a Pad or DequantizeLinear and a
    convolution before the former."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        sinking = _Sinking(graph)
        return replace_nodes(graph, dict.fromkeys(sinking.names, sinking.moved))


class _Sinking:
    """State of the walk over a graph. ``sources`` maps values that were transposed from channels
    first to last to the originals. ``names``: the operations concerned."""

    def __init__(self, graph: Graph) -> None:
        self.sources: dict[Value | None, Value | None] = {}
        self.readers = readers_of(graph)
        self.note([node for node in graph.walk() if node.op.full_name == "Transpose"])
        before, ops = ("Arg", "Reduce", "Transpose"), graph.ops
        self.names = [op.full_name for op in ops if op.full_name.startswith(before)]
        if self.sources:
            self.names += [op.full_name for op in ops if _rule_of(op) is not None]

    def note(self, nodes: Sequence[Node]) -> None:
        """Record the sources of new Transposes among ``nodes``."""
        for node in nodes:
            for value in node.outputs:
                self.sources.pop(value, None)
            perm = _perm(node)
            if perm and perm == _last(len(perm)):
                self.sources[node.outputs[0]] = node.inputs[0]

    def moved(self, node: Node) -> Sequence[Node] | None:
        """Return ``node`` and a Transpose in swapped order; None if they cannot be swapped."""
        reads = not self.sources.keys().isdisjoint(node.inputs)
        parts = self.through(node) if reads else None
        value = node.inputs[0] if node.inputs else None
        before = None if parts is not None or value is None else value.producer
        if before is not None and node.op.name == "Transpose":
            if before.op.full_name == "Pad":
                parts = _before_pad(node, before, self.readers)
            elif is_conversion(before, "DequantizeLinear"):
                parts = _before_dequantization(node, before)
        elif before is not None and node.op.full_name.startswith(("Arg", "Reduce")):
            parts = _before_transpose(node, before, self.readers)
        if parts is not None:
            self.note(parts)
        return parts

    def through(self, node: Node) -> Sequence[Node] | None:
        """Return ``node`` on the untransposed values, and a Transpose of its result."""
        rule = _rule_of(node.op)
        if rule is None or len(node.outputs) != 1:
            return None
        output = node.outputs[0]
        sources = [self.sources.get(value) for value in node.inputs]
        ranks = {source.rank for source in sources if source is not None}
        rank = ranks.pop() if len(ranks) == 1 else None
        moved = None if output is None or rank is None else rule(node, sources, rank)
        if moved is None or output is None:
            return None
        node.inputs = list(moved.inputs)
        node.attrs |= moved.attrs
        if list(moved.perm) == sorted(moved.perm):
            return *moved.before, node
        first = Value(f"{output.name}/first", _unmoved(output, moved.perm), node)
        node.outputs = [first]
        return *moved.before, node, _transposed(first, output, moved.perm, node)


def _perm(node: Node) -> list[int] | None:
    """Return the permutation of a Transpose of sufficient rank, else None."""
    if node.op.full_name != "Transpose" or node.control_inputs:
        return None
    perm = list(node.attrs.get("perm", ()))
    return perm if len(perm) >= _FEWEST_AXES else None


def _last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _first(rank: int) -> list[int]:
    return [0, rank - 1, *range(1, rank - 1)]


def _unmoved(output: Value, perm: Sequence[int]) -> TensorType:
    """Return the type whose transpose is ``output``."""
    if output.shape is None or len(output.shape) != len(perm):
        return TensorType(output.dtype)
    by_axis = dict(zip(perm, output.shape, strict=True))
    return TensorType(output.dtype, tuple([by_axis[axis] for axis in range(len(perm))]))


def _transposed(value: Value, output: Value, perm: Sequence[int], beside: Node) -> Node:
    attrs, name = {"perm": list(perm)}, f"{beside.name}/transpose" if beside.name else ""
    return beside.derived([value], [output], attrs, op=standard("Transpose"), name=name)


# Rules that move an operation before a Transpose. ``sources``: the untransposed inputs.

_Rule = Callable[[Node, "Sequence[Value | None]", int], "_Moved | None"]


def _pointwise(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    """Move an elementwise operation, whose inputs broadcast."""
    inputs: list[Value | None] = []
    before: list[Node] = []
    for i, (value, source) in enumerate(zip(node.inputs, sources, strict=True)):
        if value is None or source is not None:
            inputs.append(source)
        elif value.const is not None:
            # A constant of higher rank adds axes that the Transpose does not permute.
            if value.const.ndim > rank:
                return None
            inputs.append(_constant(value.const, rank, _own(node, i)))
        elif value.rank == rank and all(dim == 1 for dim in (value.shape or ())[1:-1]):
            # Per-channel elements: transposing is a reshape.
            moved = Value(_own(node, i), _unmoved(value, _last(rank)))
            before.append(_transposed(value, moved, _first(rank), node))
            inputs.append(moved)
        else:
            return None
    return _Moved(inputs, _last(rank), {}, before)


def _prelu(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    """Move a PRelu with per-channel slopes, the only ones that backends have kernels for."""
    moved = _pointwise(node, sources, rank)
    slopes = None if moved is None else moved.inputs[1]
    if slopes is None or slopes.const is None:
        return None
    return moved if all(dim == 1 for dim in slopes.const.shape[2:]) else None


def _own(node: Node, i: int) -> str:
    """Return the name of the replacement of ``node``'s input ``i``."""
    output = node.outputs[0]
    return f"{node.name if output is None else output.name}/first{i}"


def _constant(const: np.ndarray, rank: int, name: str) -> Value:
    """Return a constant with its channels moved to axis 1."""
    if const.ndim:
        # Broadcasting aligns trailing axes, so leading axes must be added before transposing.
        whole = const.reshape((1,) * (rank - const.ndim) + const.shape)
        const = np.ascontiguousarray(whole.transpose(_first(rank)))
    return Value(name, const=const)


def _concat(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    axes = _axes(np.array([node.attrs["axis"]]), _last(rank))
    inputs = list(sources)
    for i, source in enumerate(sources):
        const = node.const(i)
        if source is None and const is not None and const.ndim == rank:
            inputs[i] = _constant(const, rank, _own(node, i))
    if axes is None or None in inputs:
        return None
    return _Moved(inputs, _last(rank), {"axis": axes[0]})


def _axes(named: np.ndarray, order: Sequence[int]) -> list[int] | None:
    """Map axes through the permutation ``order``; None if one is out of range."""
    rank = len(order)
    if not all(-rank <= axis < rank for axis in named.reshape(-1)):
        return None
    return [order[int(axis)] for axis in named.reshape(-1)]


def _pad(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    inputs = _padded(node, sources[0], _last(rank))
    return None if inputs is None else _Moved(inputs, _last(rank), {})


def _padded(node: Node, source: Value | None, order: Sequence[int]) -> list[Value | None] | None:
    """Return a Pad's inputs for ``source``, whose axis ``order[i]`` is axis i of its input."""
    axes = node.const(3)
    if source is None or node.const(1) is None or (node.input(3) is not None and axes is None):
        return None
    moved = _axes(np.arange(len(order)) if axes is None else axes, order)
    if moved is None:
        return None
    # The pads stay the same: only the axes that they name change.
    return [source, node.input(1), node.input(2), Value(_own(node, 3), const=np.array(moved))]


def _reduction(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    axes, perm = node.const(1), _last(rank)
    reduced = None if axes is None or not axes.size else _axes(axes, perm)
    # Channels are contiguous in NHWC memory, where a reduction over them is fast: moving it gains
    # nothing.
    if reduced is None or min(reduced) < 2:
        return None
    # Without keepdims, axes after a reduced one are renumbered.
    if not node.attrs.get("keepdims", 1):
        left = [axis for axis in range(rank) if axis not in reduced]
        perm = [left.index(axis) for axis in perm if axis in left]
    return _Moved([sources[0], Value(_own(node, 1), const=np.array(reduced))], perm, {})


def _conversion(node: Node, sources: Sequence[Value | None], rank: int) -> _Moved | None:
    """Move a per-tensor or per-axis QuantizeLinear or DequantizeLinear."""
    axis = _axes(np.array([node.attrs.get("axis", 1)]), _last(rank))
    # Block-wise scales have all axes of the input, and would have to be transposed as well.
    if sources[0] is None or axis is None or node.attrs.get("block_size"):
        return None
    return _Moved([sources[0], *node.inputs[1:]], _last(rank), {"axis": axis[0]})


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear"), _conversion),
    "PRelu": _prelu,
    "Concat": _concat,
    "Pad": _pad,
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"), _reduction),
}


def _rule_of(op: Op) -> _Rule | None:
    known = _RULES if op.domain in ("", MICROSOFT) else {}
    return known.get(op.name, _pointwise if op.elementwise else None)


def _before_pad(node: Node, pad: Node, readers: Readers) -> Sequence[Node] | None:
    """Move a Transpose to channels first before a Pad that no other node reads."""
    perm, padded, output = _perm(node), node.inputs[0], node.outputs[0]
    if perm is None or padded is None or output is None:
        return None
    rank, source = len(perm), pad.inputs[0]
    # Another reader of the Pad needs its original layout, so the Transpose would be needed for it
    # anyway.
    if perm != _first(rank) or source is None or len(readers.get(padded, ())) != 1:
        return None
    if pad.control_inputs or source.rank != rank:
        return None
    first = Value(f"{padded.name}/first", _unmoved(source, _last(rank)))
    inputs = _padded(pad, first, _last(rank))
    if inputs is None:
        return None
    return _transposed(source, first, perm, node), pad.derived(inputs, [output])


def _before_transpose(node: Node, transpose: Node, readers: Readers) -> Sequence[Node] | None:
    """Replace the reduction of a Transpose's otherwise unread output by one of its input."""
    value, output = node.inputs[0], node.outputs[0]
    # With another reader, the Transpose is needed anyway.
    if value is None or output is None or len(readers.get(value, ())) != 1:
        return None
    attrs, perm = dict(node.attrs), transpose.attrs.get("perm")
    axes = np.array([attrs.get("axis", 0)]) if node.op.name.startswith("Arg") else node.const(1)
    if transpose.op.full_name != "Transpose" or not perm or transpose.control_inputs:
        return None
    if len(perm) >= _FEWEST_AXES and perm == _last(len(perm)):
        return None  # as in _reduction
    reduced = None if axes is None or not axes.size else _axes(axes, perm)
    if reduced is None:
        return None
    inputs = [transpose.inputs[0]]
    if node.op.name.startswith("Arg"):
        attrs["axis"] = reduced[0]
    else:
        inputs.append(Value(_own(node, 1), const=np.array(reduced)))
    if not attrs.get("keepdims", 1):
        left = [axis for axis in range(len(perm)) if axis not in reduced]
        perm = [left.index(axis) for axis in perm if axis in left]
    if list(perm) == sorted(perm):
        return (node.derived(inputs, [output], attrs),)
    first = Value(f"{output.name}/first", _unmoved(output, perm))
    return node.derived(inputs, [first], attrs), _transposed(first, output, perm, node)


def _before_dequantization(node: Node, conversion: Node) -> Sequence[Node] | None:
    """Move a Transpose to channels first, or of a constant, before DequantizeLinear."""
    perm, output, codes = node.attrs.get("perm"), node.outputs[0], conversion.inputs[0]
    if codes is None or output is None or not perm or codes.rank != len(perm):
        return None
    is_constant = all(value is None or value.const is not None for value in conversion.inputs)
    if not is_constant and (len(perm) < _FEWEST_AXES or perm != _first(len(perm))):
        return None
    axis = conversion.attrs.get("axis", 1)
    if conversion.attrs.get("block_size") or not -len(perm) <= axis < len(perm):
        return None
    first = Value(f"{output.name}/codes", TensorType(codes.dtype, output.shape))
    # Map the axis of scales through the permutation.
    attrs = {**conversion.attrs, "axis": perm.index(axis % len(perm))}
    converted = conversion.derived([first, *conversion.inputs[1:]], [output], attrs)
    return _transposed(codes, first, perm, node), converted
