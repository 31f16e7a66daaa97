"""Elementwise operations as oneDNN's eltwise algorithms with alpha and beta."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.backends.onednn.library import Library
from penstock.core.records import NamedTuple
from penstock.core.types import RunValue
from penstock.ir.graph import Node


class Eltwise(NamedTuple):
    """A function of one element: ``dnnl_eltwise_<name>`` with its two parameters."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def call(self, library: Library) -> tuple[RunValue, ...]:
        """The post-op for ``append_post_ops``."""
        return "eltwise", library.constant(f"eltwise_{self.name}"), self.alpha, self.beta


Chain = Sequence[Eltwise] | None
Parameters = Callable[[float], tuple[float, float]]


def _of(name: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[[Node], Chain]:
    return lambda node: (Eltwise(name, alpha, beta),)


def _with_attrs(name: str, **defaults: float) -> Callable[[Node], Chain]:
    """The algorithm with the attributes ``alpha`` and ``beta`` of the node."""
    return lambda node: (Eltwise(name, *[node.attrs.get(k, x) for k, x in defaults.items()]),)


def _scalar(node: Node, i: int) -> float | None:
    """An input if it is a constant of one element."""
    const = node.const(i)
    return None if const is None or const.size != 1 else float(const.reshape(())[()])


def _with_scalar(
    name: str, parameters: Parameters, inputs: Sequence[int] = (1, 0)
) -> Callable[[Node], Chain]:
    """The algorithm for two inputs, one of them (of the ``inputs`` given, the first) a constant
    scalar that gives the parameters."""

    def chain(node: Node) -> Chain:
        for i in inputs:
            scalar = _scalar(node, i)
            # A Max or Min must be of two inputs, and its bound finite.
            bounds = name == "clip"
            if scalar is None or (bounds and (len(node.inputs) != 2 or not np.isfinite(scalar))):
                continue
            return (Eltwise(name, *parameters(scalar)),)
        return None

    return chain


def _clip(node: Node) -> Chain:
    bounds = []
    for i, name, otherwise in ((1, "min", -np.inf), (2, "max", np.inf)):
        bound = _scalar(node, i) if node.input(i) else node.attrs.get(name, otherwise)
        if bound is None:
            return None
        bounds.append(float(bound))
    low, high = bounds
    # Where they cross, ONNX's result is the upper bound: left to kernels that know that.
    return (Eltwise("clip", low, high),) if low <= high else None


def _gelu(node: Node) -> Chain:
    return (Eltwise("gelu_tanh" if node.attrs.get("approximate") == "tanh" else "gelu_erf"),)


def _selu(node: Node) -> Chain:
    alpha = node.attrs.get("alpha", 1.67326319217681884765625)
    gamma = node.attrs.get("gamma", 1.05070102214813232421875)
    return Eltwise("elu", alpha), Eltwise("linear", gamma)


def _pow(node: Node) -> Chain:
    """Squares, roots, reciprocals: for other powers oneDNN calls ``powf``, 7 ns for each element.
    Roots of negative numbers are NaN on both backends."""
    special = {
        2.0: Eltwise("square"),
        1.0: Eltwise("linear", 1.0),
        0.5: Eltwise("sqrt"),
        -1.0: Eltwise("pow", 1.0, -1.0),
    }
    exponent = _scalar(node, 1)
    return None if exponent not in special else (special[exponent],)


def _sub(node: Node) -> Chain:
    left = _scalar(node, 0)
    if left is not None:
        return (Eltwise("linear", -1.0, left),)
    return _with_scalar("linear", lambda x: (1.0, -x))(node)


def _div(node: Node) -> Chain:
    divisor, dividend = _scalar(node, 1), _scalar(node, 0)
    if dividend is not None:
        return (Eltwise("pow", dividend, -1.0),)
    # By a power of two, dividing and multiplying are the same; else they differ in the last bit.
    return (Eltwise("linear", 1 / divisor),) if divisor else None


ELTWISE: dict[str, Callable[[Node], Chain]] = {
    "Abs": _of("abs"),
    "Add": _with_scalar("linear", lambda x: (1.0, x)),
    "Clip": _clip,
    "Div": _div,
    "Elu": _with_attrs("elu", alpha=1.0),
    "Gelu": _gelu,
    "HardSigmoid": _with_attrs("hardsigmoid", alpha=0.2, beta=0.5),
    "HardSwish": _of("hardswish", 1 / 6, 0.5),
    "LeakyRelu": _with_attrs("relu", alpha=0.01),
    "Max": _with_scalar("clip", lambda x: (x, np.inf)),
    "Min": _with_scalar("clip", lambda x: (-np.inf, x)),
    "Mish": _of("mish"),
    "Mul": _with_scalar("linear", lambda x: (x, 0.0)),
    "Neg": _of("linear", -1.0),
    "PRelu": _with_scalar("relu", lambda x: (x, 0.0), (1,)),
    "Pow": _pow,
    "Reciprocal": _of("pow", 1.0, -1.0),
    "Relu": _of("relu"),
    "Round": _of("round"),
    "Selu": _selu,
    "Sigmoid": _of("logistic"),
    "Sqrt": _of("sqrt"),
    "Sub": _sub,
    "Swish": _with_attrs("swish", alpha=1.0),
    "Tanh": _of("tanh"),
}
"""The functions of one element that an operation applies in turn; None if it is not elementwise.

Not here, as oneDNN 3.2 has them too inaccurate, or wrong: Log (3.6e-6 off, of which little is left
near 1), Softplus (2e-6 off, and below 0), Exp (of NaN, infinity).
"""

BINARY = {"Add": "add", "Div": "div", "Max": "max", "Min": "min", "Mul": "mul", "Sub": "sub"}
"""``dnnl_binary_<name>`` of operations of two tensors"""

COMMUTATIVE = frozenset({"add", "max", "min", "mul"})


def is_eltwise_chain(nodes: Sequence[Node]) -> bool:
    """Whether two of these nodes, the first among them, are functions of one tensor: eltwise
    primitives take binary post-ops only."""
    first, *rest = nodes
    return bool(rest) and _is_unary(first) and any(map(_is_unary, rest))


def _is_unary(node: Node) -> bool:
    algorithm = ELTWISE.get(node.op.name)
    return algorithm is not None and algorithm(node) is not None
