"""Post-ops: what a primitive does to its result before it writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.backends.onednn.eltwise_algorithms import (
    BINARY,
    COMMUTATIVE,
    ELTWISE,
    NAN_TO_ZERO,
    Eltwise,
)
from penstock.backends.onednn.layouts import (
    ITEM,
    broadcasts,
    canonical_strides,
    padded,
    regrouped_strides,
    with_leading_strides,
)
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.primitive import (
    SRC_1,
    WEIGHTS,
    append_post_ops,
    attributes,
    descriptor,
    memory,
    post_argument,
)
from penstock.ir.graph import Node, Value
from penstock.ir.layout import channels_last, packed_strides
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.types import FLOAT32, TensorType

_PRELU = "prelu"
BROADCASTING_PRELU = 7
"""the version since which the slopes of PRelu broadcast"""


@dataclass(frozen=True, slots=True)
class PostOp:
    """A function of each element, or of the result and a tensor of the ``OpDesc``, by index."""

    eltwise: Eltwise | None = None
    binary: str = ""
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class PostOps:
    """Post-ops in their order, for a result of ``dims``. ``constants`` are those of the ``OpDesc``,
    followed by any that a family has computed."""

    dims: tuple[int, ...] = ()
    ops: tuple[PostOp, ...] = ()
    constants: tuple[np.ndarray | None, ...] = ()

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def tensors(self) -> tuple[int, ...]:
        """The operands that are no constants, by index."""
        constants = self.constants
        return tuple([p.tensor for p in self.ops if p.tensor >= 0 and constants[p.tensor] is None])

    def behind(
        self, first: Sequence[PostOp], dims: Sequence[int], constants: Sequence[np.ndarray | None]
    ) -> PostOps:
        """``first``, then these, for a result of ``dims`` and with these ``constants``."""
        return PostOps(tuple(dims), (*first, *self.ops), tuple(constants))

    def without_bias(self, axis: int) -> tuple[np.ndarray | None, PostOps]:
        """The constant that the first post-op adds along ``axis``, and the other post-ops; None and
        all of them if it adds none."""
        adds = bool(self.ops) and self.ops[0].binary == "add"
        term = self.constants[self.ops[0].tensor] if adds else None
        if term is None:
            return None, self
        dims = padded(term.shape, len(self.dims))
        if any(n > 1 for i, n in enumerate(dims) if i != axis % len(dims)):
            return None, self
        bias = np.ascontiguousarray(np.broadcast_to(term.reshape(-1), self.dims[axis]))
        return bias, replace(self, ops=self.ops[1:])

    def repeats(self, tensors: Sequence[TensorType | None]) -> bool:
        """Whether an operand is broadcast along some axes of the result, and not along all."""
        operands = [op for op in self.ops if op.eltwise is None]
        return any(self._repeats(self._dims(op, tensors)) for op in operands)

    def _dims(self, op: PostOp, tensors: Sequence[TensorType | None]) -> tuple[int, ...]:
        constant = self.constants[op.tensor]
        if constant is not None:
            return constant.shape
        type_ = tensors[op.tensor]
        assert type_ is not None
        return type_.dims

    def _repeats(self, dims: Sequence[int]) -> bool:
        return any(n > 1 for n in dims) and padded(dims, len(self.dims)) != self.dims

    def attributes(
        self,
        library: Library,
        view: Callable[[Sequence[int]], Sequence[int]],
        tensors: Sequence[TensorType | None],
        strides: Sequence[Sequence[int] | None],
        summed: bool = False,
    ) -> tuple[Any, dict[int, int], dict[int, Any]]:
        """The attributes of a primitive that sees the result with the dims ``view(dims)``, and the
        operands likewise; and its further arguments: tensors by index, and constant memory.

        ``strides`` are those of ``tensors``, in bytes; with ``summed`` the first operand lies where
        the result is written."""
        attr, indices, fixed = attributes(library), {}, {}
        calls: list[tuple[Any, ...]] = []
        for i, op in enumerate(self.ops):
            if op.eltwise is not None:
                calls.append(op.eltwise.call(library))
            elif summed and i == 0:
                calls.append(("sum", 1.0, 0, library.lib.dnnl_data_type_undef))
            else:
                constant, dims, steps = self._operand(op, view, tensors, strides)
                layout = descriptor(library, dims, FLOAT32, steps)
                argument = post_argument(i, WEIGHTS if op.binary == _PRELU else SRC_1)
                if op.binary == _PRELU:
                    calls.append((_PRELU, sum(1 << axis for axis, n in enumerate(dims) if n > 1)))
                else:
                    calls.append(("binary", library.constant(f"binary_{op.binary}"), layout))
                if constant is None:
                    indices[argument] = op.tensor
                else:
                    fixed[argument] = memory(library, layout, constant)
        if calls:
            append_post_ops(library, attr, calls)
        return attr, indices, fixed

    def _operand(
        self,
        op: PostOp,
        view: Callable[[Sequence[int]], Sequence[int]],
        tensors: Sequence[TensorType | None],
        strides: Sequence[Sequence[int] | None],
    ) -> tuple[np.ndarray | None, Sequence[int], Sequence[int]]:
        """A binary post-op's operand if constant, and its dims and strides in the primitive."""
        constant, own = self.constants[op.tensor], self._dims(op, tensors)
        if constant is None:
            own_strides = strides[op.tensor] or packed_strides(own, ITEM)
        else:
            constant = _in_order_of(constant, self.dims, strides[-1])
            own_strides = constant.strides
        dims = padded(own, len(self.dims))
        if dims != self.dims and self._repeats(own) and not _is_usual(self.dims, strides[-1]):
            # In other layouts, oneDNN 3.2 reads the wrong elements, or some beyond the last.
            raise DnnlError(UNIMPLEMENTED)
        seen = view(dims)
        longer = with_leading_strides(own_strides, len(dims))
        return constant, seen, regrouped_strides(dims, longer, seen)


def post_ops_of(
    nodes: Sequence[Node],
    index: Mapping[Value, int],
    tensors: Sequence[TensorType | None],
    constants: Sequence[np.ndarray | None],
) -> PostOps | None:
    """The post-ops that the nodes behind the first are; None if post-ops do not express them.
    ``index`` maps the values that come from outside the nodes to ``tensors``."""
    (value,) = nodes[0].outputs
    assert value is not None
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.static:
        return None
    ops: list[PostOp] = []
    for node in nodes[1:]:
        (output,) = node.outputs
        assert value is not None and output is not None
        if not isinstance(output.type, TensorType) or output.type.shape != type_.shape:
            return None
        chain = ELTWISE[node.op.name](node) if node.op.name in ELTWISE else None
        if node.op is ZERO_NAN and nodes[0].op.name == "Softmax":
            chain = (NAN_TO_ZERO,)
        if chain is not None and node.inputs[0 if node.inputs[0] is value else -1] is value:
            ops += map(PostOp, chain)
        else:
            binary = _binary(node, value, index)
            operand = tensors[binary[-1].tensor] if binary else None
            if operand is None or not broadcasts(operand.dims, type_.dims):
                return None
            ops += binary
        value = output
    return PostOps(type_.dims, tuple(ops), tuple(constants))


def _binary(node: Node, value: Value, index: Mapping[Value, int]) -> list[PostOp]:
    """A binary operation of the result and another tensor, as post-ops; empty if it is none."""
    if len(node.inputs) != 2 or None in node.inputs:
        return []
    first = node.inputs[0] is value
    other = node.inputs[1 if first else 0]
    assert other is not None
    name = BINARY.get(node.op.name)
    if node.op.name == "PRelu" and first and node.op.since >= BROADCASTING_PRELU:
        name = _PRELU
    if name is None or other not in index:
        return []
    operand = PostOp(binary=name, tensor=index[other])
    if first or name in COMMUTATIVE:
        return [operand]
    if name == "sub":
        return [PostOp(Eltwise("linear", -1.0)), replace(operand, binary="add")]
    return []  # the quotient of an operand by the result would be rounded twice


def _is_usual(dims: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether a tensor has its dims in their own order in memory, or its channels last."""
    layouts = [packed_strides(dims, ITEM), packed_strides(dims, ITEM, channels_last(len(dims)))]
    return strides is None or canonical_strides(dims, strides) in layouts


def _in_order_of(
    constant: np.ndarray, dims: Sequence[int], strides: Sequence[int] | None
) -> np.ndarray:
    """A constant with its dims in memory in the order of those of the result."""
    if strides is None or constant.ndim != len(dims):
        return np.ascontiguousarray(constant)
    order = sorted(range(len(dims)), key=lambda axis: -strides[axis])
    return np.ascontiguousarray(constant.transpose(order)).transpose(np.argsort(order))
