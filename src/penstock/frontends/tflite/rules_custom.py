"""Custom operators: operations of the domain "tflite" with their names.

A custom operator NAME becomes the operation NAME of that domain, if there is one, and its options
become the attributes. So whoever has a model with custom operators adds these as operations::

    @penstock.ops.operator("MyOperator", domain="tflite")
    def my_operator(node, types): ...
"""

from __future__ import annotations

from contextlib import suppress

from penstock.frontends.common.diagnostics import NO_KERNEL, InexpressibleError
from penstock.frontends.tflite.conversion import OperatorConversion
from penstock.frontends.tflite.flexbuffer import decode
from penstock.ops.registry import TFLITE, find


def custom(c: OperatorConversion) -> None:
    """Options are a FlexBuffer with a map, or other bytes, which become the attribute
    ``options``."""
    name = c.op.removeprefix("CUSTOM:")
    if find(name, TFLITE) is None:
        raise InexpressibleError(f"{NO_KERNEL}; register one with penstock.ops.operator")
    options = c.context.custom_options(c.operator)
    attrs: object = {}
    with suppress(ValueError):
        attrs = decode(options) if options else {}
    attrs = attrs if isinstance(attrs, dict) else {"options": options}
    c.emit_final(name, attrs=attrs, domain=TFLITE)
