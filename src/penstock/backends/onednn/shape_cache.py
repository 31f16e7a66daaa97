"""Nodes whose shapes are known only during a run: one kernel for each set of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from penstock.ir.graph import Node, Value
from penstock.ir.op import Kernel
from penstock.types import ANY, FLOAT32, TensorType, Type

# Sets of shapes whose kernels are kept.
_MOST_KERNELS = 32

OPERATIONS = frozenset({"Conv", "ConvTranspose", "Gemm", "LayerNormalization", "MatMul", "Softmax"})
"""operations for which a look at the shapes in each run pays off"""

Choose = Callable[[Node, Sequence[Type | None]], Kernel]


def is_dynamic(node: Node, types: Sequence[Type | None]) -> bool:
    """Whether a node may have a kernel for each set of shapes: its inputs are float32, and some
    dims are unknown."""
    if node.op.name not in OPERATIONS or node.op.domain or len(node.outputs) != 1:
        return False
    inputs = [type_ for type_ in types if type_ is not None]
    tensors = [t for t in inputs if isinstance(t, TensorType) and t.dtype == FLOAT32]
    return len(tensors) == len(inputs) and not all(tensor.static for tensor in tensors)


def dynamic_kernel(node: Node, choose: Choose) -> Kernel:
    """The kernel of such a node; ``choose`` returns the kernel of a node of known shapes."""
    (output,) = node.outputs
    assert output is not None
    consts = [None if value is None else value.const for value in node.inputs]

    @lru_cache(maxsize=_MOST_KERNELS)
    def function_for(shapes: tuple[tuple[int, ...] | None, ...]) -> Callable[..., Any]:
        types = [None if shape is None else TensorType(FLOAT32, shape) for shape in shapes]
        values = [
            value if value is None or value.const is not None else Value(value.name, type_ or ANY)
            for value, type_ in zip(node.inputs, types, strict=True)
        ]
        inferred = node.op.infer(types, node.attrs, consts)
        result = Value(output.name, inferred[0] if inferred else output.type)
        return choose(node.derived(values, [result]), types).function

    def function(*inputs: Any) -> Any:
        shapes = tuple([None if x is None else x.shape for x in inputs])
        return function_for(shapes)(*inputs)

    return Kernel(function)
