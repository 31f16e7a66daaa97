"""Scan-8, which iterates over batches of sequences, each with its own length."""

from __future__ import annotations

from typing import Any

from penstock.frontends.common.diagnostics import NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade
from penstock.ir.graph import Graph, Value


def scan_8(old: NodeUpgrade) -> None:
    """Write Scan-8 as a Scan over the batch, whose body is a Scan over one sequence.

    ::

        old   (lengths?, *states [batch, ...], *inputs [batch, time, ...]) -> (*states, *outputs)
        outer scans states, inputs and lengths along axis 0; inner scans a sequence along axis 0

    With lengths, a sequence is cut to its length before, and its outputs are padded with zeros to
    the full length afterwards.
    """
    lengths, *values = old.inputs
    n = old.attrs["num_scan_inputs"]
    if not 0 < n <= len(values) or None in values:
        raise NodeError(f"has {len(values)} states and inputs, of which {n} are scanned")
    states = len(values) - n
    directions = old.attrs.get("directions") or [0] * n
    if len(directions) != n:
        raise NodeError(f"has {len(directions)} directions for {n} scanned inputs")

    inner = NodeUpgrade(
        old.name, [], old.outputs, {}, types=old.types, unique=old.unique, origin=old.origin
    )
    rows = [Value(inner.fresh("row")) for _ in values]
    results: list[Value | None] = [Value(inner.fresh("result")) for _ in old.outputs]
    attrs = {"body": old.attrs["body"], "num_scan_inputs": n, "scan_input_directions": directions}
    if lengths is None:
        inner.become("Scan", rows, attrs, results)
        outputs = [value for value in results if value is not None]
    else:
        length = Value(inner.fresh("length"))
        outputs = _scan_of_length(inner, rows, length, states, attrs, results)
        rows, values = [*rows, length], [*values, lengths]
    body = Graph(rows, outputs, inner.nodes, f"{old.name}, one of the batch")
    old.become("Scan", values, {"body": body, "num_scan_inputs": len(values)})


def _scan_of_length(
    inner: NodeUpgrade,
    rows: list[Value],
    length: Value,
    states: int,
    attrs: dict[str, Any],
    results: list[Value | None],
) -> list[Value]:
    """Scan the first ``length`` entries of a sequence, and pad the outputs."""
    zero = inner.constant([0])
    end = inner.emit("Reshape", [length, inner.constant([1])])
    cut = [inner.emit("Slice", [row, zero, end, zero]) for row in rows[states:]]
    full = inner.emit("Shape", [rows[states]], start=0, end=1)
    inner.become("Scan", rows[:states] + cut, attrs, results)
    outputs = [value for value in results if value is not None]
    missing = inner.emit("Sub", [full, end])
    pads = inner.emit("Concat", [zero, missing], axis=0)
    padded = [inner.emit("Pad", [value, pads, None, zero]) for value in outputs[states:]]
    return outputs[:states] + padded
