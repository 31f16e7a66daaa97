"""Elementwise operations as oneDNN's eltwise algorithms with alpha and beta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.ir.graph import Node


class Eltwise(NamedTuple):
    """A function of one element: ``dnnl_eltwise_<name>`` with its two parameters."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0


Chain = Sequence[Eltwise] | None


def _of(name: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[[Node], Chain]:
    return lambda node: (Eltwise(name, alpha, beta),)


def _scalar(node: Node, i: int) -> float | None:
    """An input if it is a constant of one element."""
    value = node.inputs[i] if i < len(node.inputs) else None
    if value is None or value.const is None or value.const.size != 1:
        return None
    return float(value.const.reshape(())[()])


def _clip(node: Node) -> Chain:
    bounds = []
    for i, name, otherwise in ((1, "min", -np.inf), (2, "max", np.inf)):
        left_out = i >= len(node.inputs) or node.inputs[i] is None
        bound = node.attrs.get(name, otherwise) if left_out else _scalar(node, i)
        if bound is None:
            return None
        bounds.append(float(bound))
    low, high = bounds
    return (Eltwise("clip", low, high),) if low <= high else None


def _gelu(node: Node) -> Chain:
    tanh = node.attrs.get("approximate", "none") == "tanh"
    return (Eltwise("gelu_tanh" if tanh else "gelu_erf"),)


def _selu(node: Node) -> Chain:
    alpha = node.attrs.get("alpha", 1.67326319217681884765625)
    gamma = node.attrs.get("gamma", 1.05070102214813232421875)
    return Eltwise("elu", alpha), Eltwise("linear", gamma)


def _pow(node: Node) -> Chain:
    """Constant powers; roots of negative numbers are NaN on both backends."""
    exponent = _scalar(node, 1)
    if exponent is None:
        return None
    known = {2.0: Eltwise("square"), 0.5: Eltwise("sqrt"), 1.0: Eltwise("linear", 1.0)}
    return (known.get(exponent, Eltwise("pow", 1.0, exponent)),)


def _add(node: Node) -> Chain:
    return _linear(node, lambda x: (1.0, x))


def _sub(node: Node) -> Chain:
    left = _scalar(node, 0)
    if left is not None:
        return (Eltwise("linear", -1.0, left),)
    return _linear(node, lambda x: (1.0, -x))


def _mul(node: Node) -> Chain:
    return _linear(node, lambda x: (x, 0.0))


def _linear(node: Node, parameters: Callable[[float], tuple[float, float]]) -> Chain:
    for i in (1, 0):
        known = _scalar(node, i)
        if known is not None:
            return (Eltwise("linear", *parameters(known)),)
    return None


def _div(node: Node) -> Chain:
    divisor, dividend = _scalar(node, 1), _scalar(node, 0)
    if dividend is not None:
        return (Eltwise("pow", dividend, -1.0),)
    # By a power of two, dividing and multiplying are the same; else they differ in the last bit.
    return (Eltwise("linear", 1 / divisor),) if divisor else None


def _prelu(node: Node) -> Chain:
    """PRelu with one slope for all elements."""
    slope = _scalar(node, 1)
    return None if slope is None else (Eltwise("relu", slope),)


def _at_least(node: Node) -> Chain:
    return _bounded(node, lambda x: (x, np.inf))


def _at_most(node: Node) -> Chain:
    return _bounded(node, lambda x: (-np.inf, x))


def _bounded(node: Node, bounds: Callable[[float], tuple[float, float]]) -> Chain:
    for i in (1, 0):
        known = _scalar(node, i)
        if known is not None and len(node.inputs) == 2 and np.isfinite(known):
            return (Eltwise("clip", *bounds(known)),)
    return None


ELTWISE: dict[str, Callable[[Node], Chain]] = {
    "Abs": _of("abs"),
    "Add": _add,
    "Clip": _clip,
    "Div": _div,
    "Elu": lambda node: (Eltwise("elu", node.attrs.get("alpha", 1.0)),),
    "Gelu": _gelu,
    "HardSigmoid": lambda node: (
        Eltwise("hardsigmoid", node.attrs.get("alpha", 0.2), node.attrs.get("beta", 0.5)),
    ),
    "HardSwish": _of("hardswish", 1 / 6, 0.5),
    "LeakyRelu": lambda node: (Eltwise("relu", node.attrs.get("alpha", 0.01)),),
    "Max": _at_least,
    "Min": _at_most,
    "Mish": _of("mish"),
    "Mul": _mul,
    "Neg": _of("linear", -1.0),
    "PRelu": _prelu,
    "Pow": _pow,
    "QuickGelu": lambda node: (Eltwise("swish", node.attrs.get("alpha", 1.702)),),
    "Reciprocal": _of("pow", 1.0, -1.0),
    "Relu": _of("relu"),
    "Round": _of("round"),
    "Selu": _selu,
    "Sigmoid": _of("logistic"),
    "Sqrt": _of("sqrt"),
    "Sub": _sub,
    "Swish": lambda node: (Eltwise("swish", node.attrs.get("alpha", 1.0)),),
    "Tanh": _of("tanh"),
}
"""What an operation is as functions of one element, one after the other; None if it is not.

Not here, as oneDNN 3.2 has them too inaccurate, or wrong: Log (3.6e-6 off, of which little is left
near 1), Softplus (2e-6 off, and below 0), Exp (of NaN, infinity).
"""

BINARY = {"Add": "add", "Div": "div", "Max": "max", "Min": "min", "Mul": "mul", "Sub": "sub"}
"""``dnnl_binary_<name>`` of operations of two tensors"""
