"""Rules for operations of ONNX Runtime: their registry, and common checks and helpers."""

# tests: tests/frontends/onnx/test_microsoft.py tests/frontends/onnx/test_microsoft_rules.py

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from penstock.frontends.common.diagnostics import ConversionError, NodeError
from penstock.frontends.onnx.node_upgrade import NodeUpgrade, current
from penstock.ir.graph import Value
from penstock.ops.registry import MICROSOFT

Rule = Callable[[NodeUpgrade], None]

RULES: dict[tuple[str, str], Rule] = {}
"""rules by domain and name"""


def checked_rule(write: Callable[..., None]) -> Callable[..., None]:
    """Return ``write(b, ...)`` for operations without schemas in the onnx package: inputs or
    attributes that are missing or of a wrong type, and excess outputs, raise ``NodeError``."""

    @wraps(write)
    def checked(b: NodeUpgrade, *arguments: Any) -> None:
        try:
            write(b, *arguments)
            for node in b.nodes:  # inputs, outputs and attributes are those of the file
                schema = None if node.op.domain else current(node.op.name)[1]
                for fault in schema.node_faults(node, node.attrs) if schema else ():
                    raise ValueError(fault)
            if b.nodes and not set(b.outputs) <= {None, *(v for n in b.nodes for v in n.outputs)}:
                raise ValueError(f"{len(b.outputs)} outputs")
        except ConversionError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            raise NodeError(
                f"has inputs, outputs or attributes that are not those of {b.op}: {error!r}"
            ) from error

    return checked


def rewrites(*names: str, domain: str = MICROSOFT) -> Callable[[Rule], Rule]:
    """A decorator that registers a rule."""

    def register(write: Rule) -> Rule:
        RULES.update(((domain, name), checked_rule(write)) for name in names)
        return write

    return register


def as_scalar(b: NodeUpgrade, value: Value) -> Value:
    """Return the element of a one-element tensor as a scalar."""
    return b.emit("Reshape", [value, []])


def sum_of(b: NodeUpgrade, *terms: Value | None) -> Value:
    """Return the sum of the terms that are given."""
    total, *rest = [term for term in terms if term is not None]
    for term in rest:
        total = b.emit("Add", [total, term])
    return total


def scaled_product(
    b: NodeUpgrade, operands: Sequence[Value | None], scales: Sequence[Value | None]
) -> Value:
    """Return a product of integers, as real numbers."""
    product = b.cast(b.emit("MatMulInteger", operands), "float32")
    return b.emit("Mul", [product, b.emit("Mul", scales)])
