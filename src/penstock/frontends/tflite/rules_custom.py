"""Custom operators: operations of the domain "tflite" with their names.

A custom operator NAME becomes the operation NAME of that domain, if there is one, and its options
become the attributes. So whoever has a model with custom operators adds these as operations::

    @penstock.ops.operator("MyOperator", domain="tflite")
    def my_operator(node, types): ...
"""

from __future__ import annotations

from penstock.frontends.common.diagnostics import NO_KERNEL, InexpressibleError, NodeError
from penstock.frontends.tflite.conversion import OperatorConversion
from penstock.frontends.tflite.flexbuffer import decode
from penstock.ops.registry import TFLITE, find


def custom(c: OperatorConversion) -> None:
    """Options are a FlexBuffer with a map, or other bytes, which become the attribute ``options``.
    Operators of TensorFlow ("Flex...") have none of these."""
    name = c.op.removeprefix("CUSTOM:")
    if find(name, TFLITE) is None:
        raise InexpressibleError(f"{NO_KERNEL}; register one with penstock.ops.operator")
    options = c.operator.content("custom_options")
    try:
        decoded = decode(options) if options else {}
    except ValueError as error:
        raise NodeError(f"has options that are damaged: {error}") from error
    attrs = decoded if isinstance(decoded, dict) else {"options": options}
    c.emit_final(name, attrs=attrs, domain=TFLITE)
