"""Custom operators: operations of the domain "tflite" with their names.

A custom operator NAME becomes the operation NAME of that domain, if there is one, and its options
become the attributes. So whoever has a model with custom operators adds these as operations::

    @penstock.ops.operator("MyOperator", domain="tflite")
    def my_operator(node, types): ...
"""

from __future__ import annotations

from contextlib import suppress

from penstock.frontends.common.diagnostics import NO_KERNEL, InexpressibleError
from penstock.frontends.tflite.conversion import OperatorConversion, operator_rule
from penstock.frontends.tflite.flexbuffer import decode
from penstock.ir.op import AttrDict
from penstock.ops.registry import TFLITE, find

_LEAST_TOLERANCE = 0.1  # below, LiteRT's NumericVerify never fails


def custom(c: OperatorConversion) -> None:
    """Options are a FlexBuffer with a map, or other bytes, which become the attribute
    ``options``."""
    name = c.op.removeprefix("CUSTOM:")
    if find(name, TFLITE) is None:
        raise InexpressibleError(f"{NO_KERNEL}; register one with penstock.ops.operator")
    options = c.context.custom_options(c.operator)
    attrs = options_of(options)
    c.emit_final(name, attrs={"options": options} if attrs is None else attrs, domain=TFLITE)


def options_of(options: bytes) -> AttrDict | None:
    """The map of a FlexBuffer; None for other bytes."""
    attrs: object = {}
    with suppress(ValueError):
        attrs = decode(options) if options else {}
    return attrs if isinstance(attrs, dict) else None


@operator_rule("CUSTOM:NumericVerify")
def numeric_verify(c: OperatorConversion) -> None:
    """LiteRT's, of models for debugging: the differences of a tensor's real numbers from those that
    it was computed from, which fails beyond ``tolerance`` quanta if it is asked to."""
    options, quantization = (
        options_of(c.context.custom_options(c.operator)) or {},
        c.quantizations[0],
    )
    tolerance = options.get("tolerance", 0.0)
    if not isinstance(tolerance, int | float):
        raise InexpressibleError(f"its tolerance is {tolerance!r}, which is no number")
    attrs = {}
    if options.get("log_if_failed") and tolerance >= _LEAST_TOLERANCE:
        attrs["most"] = tolerance * (quantization.scales[0] if quantization else 0.0)
    c.emit_final("NumericVerify", c.take(2), attrs, domain=TFLITE)
