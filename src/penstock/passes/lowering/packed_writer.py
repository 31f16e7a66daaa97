"""Code that rewrites a graph for packed rows, as ``row_packing`` has proven it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from penstock.analysis.type_inference import node_types
from penstock.core.records import dataclass, field
from penstock.ir.graph import Node, Value, all_reads
from penstock.ir.op import AttrDict, Attrs, Op
from penstock.ops.internal.packed import LIVE_ROWS, PACKED_ATTENTION, UNPACK_ROWS
from penstock.ops.registry import standard
from penstock.passes.lowering.row_packing import RowPacking
from penstock.passes.lowering.row_rules import (
    ROWS,
    SAMPLES,
    Axes,
    Packed,
    place_of_rows,
    static_dims,
    without_samples,
)


@dataclass(eq=False)
class PackedWriter:
    """Writer of the packed graph: its ``nodes`` so far. ``values``: packed forms of values; those
    of padded values by the axes that were packed."""

    packing: RowPacking
    nodes: list[Node] = field(default_factory=list)
    values: dict[Value | tuple[Value, Axes], Value] = field(default_factory=dict)

    def write(self) -> None:
        """Rewrite the graph: nodes that need no packed rows, then the live rows, then the rest."""
        packing, graph = self.packing, self.packing.graph
        late: list[Node] = []
        behind: set[Value] = set()
        for node in graph.nodes:
            if node in packing.packed or not behind.isdisjoint(all_reads(node)):
                behind.update([value for value in node.outputs if value is not None])
                late.append(node)
            else:
                self.nodes.append(node)
        names = "ranges", "rows", "positions"
        of = f"{packing.batch}x{packing.rows}"  # apart from those of other encoders in the graph
        self.ranges, self.rows, self.positions = [Value(f"packed/{of}/{name}") for name in names]
        sizes = {"batch": packing.batch, "rows": packing.rows, "first": int(packing.first)}
        attrs = {**sizes, "groups": [group for _, group in packing.guards]}
        guards, found = [v for v, _ in packing.guards], [self.ranges, self.rows, self.positions]
        self.nodes += packing.bias_nodes
        self._add([*packing.attention, *packing.scores][0], LIVE_ROWS, guards, found, attrs)
        for node in late:
            if (own := packing.packed.get(node)) is not None:
                self._pack(node, own)
            elif node.outputs[0] in packing.repacked:
                self._repack(node, node.outputs[0])
            else:
                self.nodes.append(node)
                continue
            for value in node.outputs:
                readers = () if value is None else packing.readers.get(value, ())
                if value is not None and any(r not in packing.packed for r in readers):
                    self._unpack(node, value)
        graph.nodes = self.nodes

    def _add(
        self,
        beside: Node,
        op: Op,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        attrs: Attrs,
    ) -> None:
        node = beside.derived(inputs, outputs, attrs, op=op)
        for value, type_ in zip_longest(outputs, node_types(node)):
            if value is not None and type_ is not None:
                value.type = type_
        self.nodes.append(node)

    def _moved(
        self, beside: Node, x: Value, name: str, y: Value | Sequence[int], at: int = 0
    ) -> Value:
        """Return the result of a Gather along axis ``at``, or of a Reshape."""
        other = y if isinstance(y, Value) else Value("packed/dims", const=np.array(y))
        result = Value(f"{x.name}/packed{len(self.nodes)}")
        attrs = {"axis": at} if name == "Gather" else {}
        self._add(beside, standard(name), [x, other], [result], attrs)
        return result

    def _pack(self, node: Node, found: Packed) -> None:
        """Add a node for packed rows."""
        inputs = [
            value if value is None or axes is None else self._packed(node, value, axes)
            for value, axes in zip(node.inputs, found.inputs, strict=False)
        ]
        op, attrs = node.op, node.attrs if found.attrs is None else found.attrs
        if found.constants:
            op = standard(found.op)
            inputs += [Value("packed/dims", const=const) for const in found.constants]
        elif found.op:
            op, inputs = PACKED_ATTENTION, [*inputs, self.ranges, *node.inputs[3:]]
        else:
            inputs += node.inputs[len(inputs) :]
        outputs = [None if v is None else Value(f"{v.name}/packed", v.type) for v in node.outputs]
        self.values.update({v: w for v, w in zip(node.outputs, outputs, strict=True) if v and w})
        self._add(node, op, inputs, outputs, attrs)

    def _packed(self, beside: Node, value: Value, axes: Axes) -> Value:
        """Return the packed form of a value."""
        if value in self.values:
            return self.values[value]
        key = value, axes
        if key not in self.values:
            self.values[key] = self._gathered(beside, value, axes)
        return self.values[key]

    def _gathered(self, beside: Node, value: Value, axes: Axes) -> Value:
        """Gather the live rows of a padded value, or of one that all samples share."""
        if not self.packing.are_gathered(value, axes):
            axes = without_samples(axes)
            value = self._of_first_sample(beside, value)
            if not self.packing.are_gathered(value, axes):
                return value
        dims, at = static_dims(value), place_of_rows(axes)
        if len(axes[at]) > 1:  # samples and rows merged into one axis
            return self._moved(beside, value, "Gather", self.rows, at)
        if not self.packing.samples or self.packing.samples not in axes:
            return self._moved(beside, value, "Gather", self.positions, at)
        first = axes.index(self.packing.samples)
        merged = [*dims[:first], self.packing.batch * self.packing.rows, *dims[at + 1 :]]
        flat = self._moved(beside, value, "Reshape", merged)
        some = self._moved(beside, flat, "Gather", self.rows, first)
        target = [*dims[:first], *[1] * (at - first), -1, *dims[at + 1 :]]
        return self._moved(beside, some, "Reshape", target)

    def _of_first_sample(self, beside: Node, value: Value) -> Value:
        """Return the first sample's part of a value that repeats it along the first axis."""
        dims, source = static_dims(value), value.producer
        x = source.inputs[0] if source is not None else None
        result = Value(f"{value.name}/sample{len(self.nodes)}")
        part = dims[0] // self.packing.batch
        if source is not None and x is not None:  # skip the repetition
            if source.op.name == "Tile" and static_dims(x) == (part, *dims[1:]):
                return x
            if source.op.name == "Transpose":
                self._add(
                    beside, source.op, [self._of_first_sample(beside, x)], [result], source.attrs
                )
                return result
        bounds = [Value("packed/bound", const=np.array([number])) for number in (0, part, 0)]
        self._add(beside, standard("Slice"), [value, *bounds], [result], {})
        return result

    def _repack(self, node: Node, value: Value) -> None:
        """Add a node that computes all rows unpacked, and pack its result."""
        whole = Value(f"{value.name}/whole", value.type)
        self.nodes.append(node.derived(node.inputs, [whole]))
        self.values[value] = self._gathered(node, whole, self.packing.axes[value])

    def _unpack(self, node: Node, value: Value) -> None:
        """Restore a value's padded dims, for readers outside the packed part."""
        packing, dims, packed = self.packing, static_dims(value), self.values[value]
        parts = [part for axis in packing.axes[value] for part in axis or (("", 1),)]
        rows = next(at for at, (name, _) in enumerate(parts) if name == ROWS)
        # Each axis of the result is one factor: samples, rows or features; one of the value may
        # merge several.
        if packing.batch == 1:  # with one sample, no axis of samples exists
            if not rows or parts[rows - 1] != ("", 1):
                parts.insert(rows, ("", 1))
                rows += 1
            parts[rows - 1] = SAMPLES, 1
        sizes = [size for _, size in parts]
        result = value
        if sizes != [*dims]:
            single = {SAMPLES: 1, ROWS: -1}
            shape = [single.get(name, size) for name, size in parts]
            packed = self._moved(node, packed, "Reshape", shape)
            result = Value(f"{value.name}/padded")
        samples = next(at for at, (name, _) in enumerate(parts) if name == SAMPLES)
        attrs: AttrDict = {"dims": sizes, "samples": samples, "rows": rows}
        if value in packing.known:
            attrs["number"] = packing.known[value].number.item()
        self._add(node, UNPACK_ROWS, [packed, self.ranges], [result], attrs)
        if result is not value:
            target = Value("packed/dims", const=np.array(dims))
            self._add(node, standard("Reshape"), [result, target], [value], {})
