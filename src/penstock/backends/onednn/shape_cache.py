"""Nodes whose shapes are known only during a run: one kernel for each set of shapes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from penstock.ir.graph import Node, Value
from penstock.ir.op import Kernel
from penstock.types import ANY, FLOAT32, TensorType, Type

# Sets of shapes whose kernels are kept.
_MOST_KERNELS = 32

OPERATIONS = frozenset({"Conv", "ConvTranspose", "Gemm", "LayerNormalization", "MatMul", "Softmax"})
"""those that are worth a look at their shapes in each run"""

Choose = Callable[[Node, Sequence[Type | None]], Kernel]


def is_dynamic(node: Node, types: Sequence[Type | None]) -> bool:
    """Whether a node may have a kernel for each set of shapes: its inputs are float32, and some
    dims are unknown."""
    if node.op.name not in OPERATIONS or node.op.domain or len(node.outputs) != 1:
        return False
    types_ = [type_ for type_ in types if type_ is not None]
    if not all(isinstance(type_, TensorType) and type_.dtype == FLOAT32 for type_ in types_):
        return False
    return not all(isinstance(type_, TensorType) and type_.static for type_ in types_)


class Dynamic:
    """The function of such a node; ``choose`` returns the kernel of a node of known shapes."""

    def __init__(self, node: Node, choose: Choose) -> None:
        self._node = node
        self._choose = choose
        self._lock = threading.Lock()
        self._kernels: OrderedDict[Any, Callable[..., Any]] = OrderedDict()

    def __call__(self, *inputs: Any) -> Any:
        key = tuple([None if x is None else x.shape for x in inputs])
        with self._lock:
            function = self._kernels.get(key)
            if function is not None:
                self._kernels.move_to_end(key)
        if function is None:
            function = self._made(inputs)
            with self._lock:
                self._kernels[key] = function
                while len(self._kernels) > _MOST_KERNELS:
                    self._kernels.popitem(last=False)
        return function(*inputs)

    def _made(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        node = self._node
        types = [None if x is None else TensorType(x.dtype, x.shape) for x in inputs]
        consts = [None if value is None else value.const for value in node.inputs]
        values = [
            value if value is None or value.const is not None else Value(value.name, type_ or ANY)
            for value, type_ in zip(node.inputs, types, strict=True)
        ]
        types_ = node.op.infer(types, node.attrs, consts)
        (output,) = node.outputs
        assert output is not None
        made = Value(output.name, types_[0] if types_ else output.type)
        known = Node(node.op, values, [made], node.attrs, name=node.name, origin=node.origin)
        return self._choose(known, types).function
