"""Scan as it began, in version 8: over batches of sequences, each with a length of its own."""

from __future__ import annotations

from penstock.frontends.onnx.rewriter import NodeError, Rewriting
from penstock.ir.graph import Graph, Value


def scan_8(old: Rewriting) -> None:
    """A Scan over the batch, whose body is a Scan over one sequence.

    ::

        old   (lengths?, *states [batch, ...], *inputs [batch, time, ...]) -> (*states, *outputs)
        outer scans states, inputs and lengths along axis 0; inner scans a sequence along axis 0

    Where lengths are given, a sequence is cut to its length before, and its outputs are padded with
    zeros to the longest length afterwards.
    """
    lengths, *values = old.inputs
    n = old.attrs["num_scan_inputs"]
    if not 0 < n <= len(values) or None in values:
        raise NodeError(f"has {len(values)} states and inputs, of which {n} are scanned")
    states = len(values) - n
    directions = old.attrs.get("directions") or [0] * n
    if len(directions) != n:
        raise NodeError(f"has {len(directions)} directions for {n} scanned inputs")

    inner = Rewriting(
        old.name, old.version, [], old.outputs, {}, origin=old.origin, unique=old.unique
    )
    rows = [Value(inner.fresh("row")) for _ in values]
    taken = rows
    if lengths is not None:
        length = Value(inner.fresh("length"))
        zero = inner.constant([0])
        end = inner.emit("Reshape", [length, inner.constant([1])])
        cut = [inner.emit("Slice", [row, zero, end, zero]) for row in rows[states:]]
        full = inner.emit("Shape", [rows[states]], start=0, end=1)
        taken = rows[:states] + cut
    results: list[Value | None] = [Value(inner.fresh("result")) for _ in old.outputs]
    attrs = {
        "body": old.attrs["body"],
        "num_scan_inputs": n,
        "scan_input_directions": directions,
    }
    inner.become("Scan", taken, attrs, results)
    given = [value for value in results if value is not None]
    if lengths is not None:
        missing = inner.emit("Sub", [full, end])
        pads = inner.emit("Concat", [zero, missing], axis=0)
        padded = [inner.emit("Pad", [v, pads, None, zero]) for v in given[states:]]
        given = given[:states] + padded
        rows = [*rows, length]
        values = [*values, lengths]
    body = Graph(rows, given, inner.nodes, f"{old.name}, one of the batch")
    old.become("Scan", values, {"body": body, "num_scan_inputs": len(values)})
