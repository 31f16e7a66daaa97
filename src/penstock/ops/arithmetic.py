"""Arithmetic, element by element, with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir import Node
from penstock.ops.base import Attrs, Consts, Kernel, Types, operator
from penstock.ops.infer import broadcast_type, ints, same_type, tensor, with_data
from penstock.types import Dim, TensorType, Type


def ufunc(function: Callable[..., Any], inputs: int) -> Kernel:
    """The kernel of a NumPy ufunc, whose last positional argument is where it writes."""
    return Kernel(function, function, inplace=tuple(range(inputs)))


def _with_ints(compute: Callable[[int, int], int], identity: int) -> Any:
    """Inference that carries integer contents along: the shape arithmetic of exported models."""

    def each(a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return compute(a, b)
        return a if b == identity else None

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        (kind,) = broadcast_type(types, attrs, consts)
        assert isinstance(kind, TensorType)

        def contents() -> tuple[Dim, ...] | None:
            a, b = ints(types, consts, 0), ints(types, consts, 1)
            if a is None or b is None:
                return None
            n = max(len(a), len(b)) if a and b else 0
            if n and (n % len(a) or n % len(b)):
                return None
            return tuple(each(a[i % len(a)], b[i % len(b)]) for i in range(n))

        return (with_data(kind, contents),)

    return infer


@operator("Add", since=7, infer=_with_ints(lambda a, b: a + b, 0))
def add(node: Node, types: Types) -> Kernel:
    return ufunc(np.add, 2)


@operator("Mul", since=7, infer=_with_ints(lambda a, b: a * b, 1))
def mul(node: Node, types: Types) -> Kernel:
    return ufunc(np.multiply, 2)


@operator("Sub", since=7, infer=_with_ints(lambda a, b: a - b, 0))
def sub(node: Node, types: Types) -> Kernel:
    return ufunc(np.subtract, 2)


@operator("Neg", since=1, infer=same_type)
def neg(node: Node, types: Types) -> Kernel:
    return ufunc(np.negative, 1)


_ = tensor
