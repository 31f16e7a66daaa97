"""Weights that a model stores as 8-bit codes, each behind a DequantizeLinear of its own.

Constant folding would expand them to float32, four times as large, and leave no codes for integer
kernels; so it keeps these nodes until ``quantize`` has run.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import COMPUTING, MICROSOFT


def quantized_weights(graph: Graph) -> Collection[Node]:
    """Return the DequantizeLinear nodes of constants that are multiplied, perhaps transposed, with
    values that are dequantized during the run."""
    weights = set[Node]()
    for node in graph.walk() if "DequantizeLinear" in [op.name for op in graph.ops] else ():
        if node.op.name not in COMPUTING or node.op.domain:
            continue
        sources = [producer(_untransposed(value), "DequantizeLinear") for value in node.inputs]
        operands = [source for source in sources if source is not None]
        constant = [source for source in operands if _has_constant_inputs(source)]
        # A product of constants alone is not computed in a run: constant folding evaluates it.
        if len(constant) < len(operands):
            weights.update(constant)
    return weights


def _untransposed(value: Value | None) -> Value | None:
    """Return ``value``, or the source of a chain of Transposes that produces it."""
    while value is not None and value.producer and value.producer.op.full_name == "Transpose":
        value = value.producer.inputs[0]
    return value


def has_quantized_weights(graph: Graph) -> bool:
    """Whether the graph has constants behind a DequantizeLinear."""
    conversions = [node for node in graph.walk() if is_conversion(node, "DequantizeLinear")]
    return any(map(_has_constant_inputs, conversions))


def is_conversion(node: Node | None, name: str) -> bool:
    """Whether ``node`` is the conversion ``name`` and has no control inputs."""
    if node is None or node.op.name != name or node.op.domain not in ("", MICROSOFT):
        return False
    return not node.control_inputs


def producer(value: Value | None, name: str) -> Node | None:
    """Return the conversion of this name that produces ``value``, or None."""
    node = None if value is None else value.producer
    return node if is_conversion(node, name) else None


def _has_constant_inputs(node: Node) -> bool:
    """Whether a conversion reads constants, or codes that are quantized from constants."""
    values = [_untransposed(value) for value in node.inputs]
    quantizing = producer(values[0], "QuantizeLinear") if values else None
    if quantizing is not None:
        values[:1] = quantizing.inputs
    return all(value is None or value.const is not None for value in values)
