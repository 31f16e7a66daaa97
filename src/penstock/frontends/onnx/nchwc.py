"""Graphs in ONNX Runtime's blocked layout (com.microsoft.nchwc), written in the plain layout.

A tensor of C channels is stored as [N, C/B, H, W, B] under the shape [N, C, H, W], where C is
rounded up to a multiple of B and the rest is zeros; so are the weights of Conv::

    in blocks  ReorderInput -> Conv -> MaxPool -> Reshape -> Add -> Reshape -> Conv -> ReorderOutput
    plain      Pad             Conv    MaxPool               Add               Conv    Slice

Besides blocked nodes there may be Concat, elementwise nodes, and Reshape to five dims and back for
broadcasting. Channels are padded and cut off only if the model has fewer than the blocks; an
adjacent Conv has its weights cut instead.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from penstock.core.errors import warn
from penstock.core.records import dataclass, field
from penstock.core.types import FLOAT32
from penstock.frontends.common.builder import Operand
from penstock.frontends.common.diagnostics import ConversionError, Diagnostics, InexpressibleError
from penstock.frontends.common.inferred_types import InferredTypes
from penstock.frontends.onnx.microsoft import fused_conv
from penstock.frontends.onnx.microsoft_rules import checked_rule
from penstock.frontends.onnx.node_upgrade import NCHWC, NodeUpgrade
from penstock.ir.graph import Graph, Node, Readers, Value, readers_of
from penstock.ir.op import Op
from penstock.ops.registry import NEWEST, no_kernel, unknown_types

DOMAIN = NCHWC
OPERATIONS = {
    name: Op(name, DOMAIN, 1, NEWEST, unknown_types, no_kernel("it is written in another layout"))
    for name in (
        *("AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"),
        *("ReorderInput", "ReorderOutput", "Upsample"),
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """``values``: the values in blocks of ``size`` channels. ``cut``: the number of channels to
    compute, for values that are padded to whole blocks. ``sources``: the inputs of ReorderInput and
    their channels, by its output."""

    values: set[Value | None]
    size: int
    cut: Mapping[Value | None, int]
    sources: dict[Value, tuple[Value, int]] = field(default_factory=dict)


def to_plain_layout(graph: Graph, unique: Callable[[str], str], diagnostics: Diagnostics) -> None:
    """Rewrite the blocked nodes of ``graph``; add faults to ``diagnostics``."""
    if not any(node.op.domain == DOMAIN for node in graph.nodes):
        return
    try:
        values, kept = _blocked_values(graph), _kept_channels(graph)
        size = _block_size(graph, values, kept)
    except ConversionError as error:
        diagnostics.record(error, DOMAIN, diagnostics.where, diagnostics.where)
        return
    readers = readers_of(graph)
    convs = [node for node in graph.nodes if _is(node, "Conv") and _may_be_cut(node, readers)]
    outputs = [node.outputs[0] for node in convs]
    blocks = _Blocks(values, size, {value: kept[value] for value in outputs if value in kept})
    types = InferredTypes()  # of the nodes as they are rewritten
    nodes: list[Node] = []
    for node in graph.nodes:
        view = node.op.name == "Reshape" and node.input(0) in values
        if node.op.domain != DOMAIN and not view:
            nodes.append(node)
            continue
        b = NodeUpgrade(
            node.name, node.inputs, node.outputs, node.attrs, types=types, unique=unique
        )
        b.op, b.version, b.origin = node.op.name, 1, node.origin
        try:
            _write(b, blocks)
        except ConversionError as error:
            diagnostics.record(error, f"{DOMAIN}.{b.op}", node.origin, node.origin)
        nodes += b.nodes
    graph.nodes = nodes


def _is(node: Node, name: str) -> bool:
    return node.op.domain == DOMAIN and node.op.name == name


def _blocked_values(graph: Graph) -> set[Value | None]:
    values: set[Value | None] = set()
    size = -1
    while size < len(values):  # one more time than the order of the nodes requires
        size = len(values)
        for node in graph.nodes:
            if node.op.domain == DOMAIN:
                if node.op.name != "ReorderOutput":
                    values.update(node.outputs)
            elif any(value in values for value in node.inputs if value is not None):
                if not node.op.elementwise and node.op.name not in ("Concat", "Reshape"):
                    raise InexpressibleError(f"{node.label} reads values in blocks of channels")
                values.update(node.outputs)
    return values


def _block_size(graph: Graph, blocked: set[Value | None], kept: Mapping[Value | None, int]) -> int:
    """Return the channels of a block, which the file does not give: the one of 8 and 16 that agrees
    with the sizes of weights, their channels and shapes; else the size of this machine."""
    sizes = {8, 16}  # of AVX2, and of AVX-512 and NEON
    for node in graph.nodes:
        x, target = node.input(0), node.const(1)
        if target is not None and node.op.name == "Reshape" and x in blocked:
            sizes &= {int(target.reshape(-1)[-1])} if target.size == 5 else sizes
        elif target is not None and _is(node, "Conv") and target.ndim == 4:
            inner = target.shape[1] if x in blocked and target.shape[1] > 1 else 0
            sizes &= {b for b in sizes if not target.shape[0] % b and not inner % b}
            if node.outputs[0] in kept:
                channels = kept[node.outputs[0]]
                sizes &= {b for b in sizes if target.shape[0] == -(-channels // b) * b}
    if not sizes:
        raise InexpressibleError("has weights in blocks neither of 8 nor of 16 channels")
    if len(sizes) > 1:
        flags = Path("/proc/cpuinfo")
        wide = flags.exists() and "avx512f" in flags.read_text("utf-8", "replace")
        sizes = {16 if wide or platform.machine() in ("aarch64", "arm64") else 8}
        warn(
            f"the model was saved in a layout of ONNX Runtime for one kind of machine, with "
            f"channels in blocks of 8 or 16; taken for {min(sizes)}, which it is on this one",
            RuntimeWarning,
        )
    return min(sizes)


def _kept_channels(graph: Graph) -> dict[Value | None, int]:
    """Return the channels that ReorderOutput keeps of its input."""
    return {
        node.input(0): node.attrs["channels"]
        for node in graph.nodes
        if _is(node, "ReorderOutput") and isinstance(node.attrs.get("channels"), int)
    }


def _may_be_cut(node: Node, readers: Readers) -> bool:
    """Whether a Conv may compute only the channels that a ReorderOutput keeps."""
    output = node.outputs[0]
    alone = output is not None and len(readers.get(output, ())) == 1
    # Channels of groups, and those of a tensor that is added, would have to be cut as well.
    return alone and node.attrs.get("group", 1) == 1 and node.input(3) is None


@checked_rule
def _write(b: NodeUpgrade, blocks: _Blocks) -> None:
    x = b.input(0)
    last = bool(b.attrs.get("channels_last", 0))
    if b.op == "Reshape":
        b.become("Identity", [x])
    elif b.op == "Conv":
        _write_conv(b, blocks)
    elif b.op == "Upsample":
        mode = {"mode": b.attrs.get("mode", "nearest"), "nearest_mode": "floor"}
        place = b.attrs.get("coordinate_transformation_mode", "asymmetric")
        scales = b.constant([1, 1, *b.attrs["scales"][-2:]], FLOAT32)
        b.become("Resize", [x, None, scales], {**mode, "coordinate_transformation_mode": place})
    elif b.op == "ReorderInput":
        channels = (b.shape(0) or (None,) * 4)[3 if last else 1]
        if last:
            x = b.emit("Transpose", [x], perm=[0, 3, 1, 2])
        pads: Operand
        if isinstance(channels, int):
            pads = [0] * 5 + [-channels % blocks.size, 0, 0]
            output = b.outputs[0]
            assert output is not None
            blocks.sources[output] = x, channels
        else:  # known in a run, behind a Reshape to a computed shape for example
            negated = b.emit("Neg", [b.emit("Shape", [x], start=1, end=2)])
            more = b.emit("Mod", [negated, [blocks.size]])
            pads = b.emit("Concat", [[0] * 5, more, [0, 0]], axis=0)
        b.become("Pad", [x, pads])
    elif b.op == "ReorderOutput":
        kept = b.attrs["channels"]
        if kept % blocks.size and x not in blocks.cut:
            x = b.emit("Slice", [x, *(b.constant([i]) for i in (0, kept, 1))])
        b.become(*("Transpose", [x], {"perm": [0, 2, 3, 1]}) if last else ("Identity", [x]))
    else:
        b.become(b.op, [x], b.attrs)


def _write_conv(b: NodeUpgrade, blocks: _Blocks) -> None:
    """Write a Conv with its weights in ONNX's order, cut to the channels of input and output."""
    x, weights, output = b.input(0), b.input_constant(1), b.outputs[0]
    bias = None if b.optional(2) is None else b.input_constant(2)
    if weights is None or output is None or (bias is None and b.optional(2) is not None):
        raise InexpressibleError("its weights are not constant")
    size, (filters, inner, *kernel) = blocks.size, weights.shape
    if x in blocks.values and inner > 1:
        # ONNX Runtime's order: blocks of filters and of channels, the kernel, and then the channels
        # and filters of a block.
        parts = weights.reshape(filters // size, inner // size, *kernel, size, size)
        weights = parts.transpose(0, 5, 1, 4, 2, 3)
    else:
        # The image itself is not in blocks, nor are its channels here.
        parts = weights.reshape(filters // size, inner, *kernel, size)
        weights = parts.transpose(0, 4, 1, 2, 3)
    weights = weights.reshape(filters, inner, *kernel)
    if b.attrs.get("group", 1) == 1 and x in blocks.sources:
        x, inner = blocks.sources[x]
    filters = blocks.cut.get(output, filters)
    plain = b.constant(np.ascontiguousarray(weights[:filters, :inner]), FLOAT32)
    shift = None if bias is None else b.constant(bias[:filters], FLOAT32)
    b.inputs = [x, plain, shift, *b.inputs[3:]]
    fused_conv(b)
