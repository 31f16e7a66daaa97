"""Operation descriptors: a node, or the first node of a fused one with the rest as post-ops."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from penstock.backends.onednn.layouts import padded
from penstock.backends.onednn.post_ops import PostOp, post_ops_of
from penstock.backends.onednn.quant_attrs import Scaling
from penstock.core.records import dataclass, replace
from penstock.core.types import FLOAT32, TensorType, Type
from penstock.ir.graph import Node
from penstock.ops.internal.fused import is_fused

Tensors = Sequence[TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class OpDesc:
    """A ``node`` as the families of primitives see it.

    ``tensors`` are the types of the inputs, then of the outputs, of the whole node (fused or not);
    ``constants`` the arrays of those that are constants, followed by any that a family of
    primitives has computed. ``inputs`` and ``outputs`` of the (first) node are indices into these,
    -1 for one left out. ``post_ops`` are applied to the result before it is written. With a
    ``scaling``, inputs, weights and outputs are integers that represent real numbers.
    """

    node: Node
    tensors: tuple[TensorType | None, ...]
    constants: tuple[np.ndarray | None, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    post_ops: tuple[PostOp, ...] = ()
    scaling: Scaling | None = None

    def index(self, i: int) -> int:
        """Which of the tensors is input ``i`` of the node; -1 for one left out."""
        return self.inputs[i] if i < len(self.inputs) else -1

    def input(self, i: int) -> TensorType | None:
        """The type of an input of the node, None for one left out."""
        index = self.index(i)
        return self.tensors[index] if index >= 0 else None

    def constant(self, i: int) -> np.ndarray | None:
        """An input of the node, if it is a constant."""
        index = self.index(i)
        return self.constants[index] if index >= 0 else None

    def dims(self, tensor: int) -> tuple[int, ...]:
        """The dims of a tensor or constant."""
        constant = self.constants[tensor]
        if constant is not None:
            return constant.shape
        type_ = self.tensors[tensor]
        assert type_ is not None
        return type_.dims

    def without_contents(self, tensor: int) -> OpDesc:
        """The same with the shape of a constant alone."""
        constants = list(self.constants)
        constant = constants[tensor]
        assert constant is not None
        # Of the shape and dtype, as families ask for these, with one element in memory.
        constants[tensor] = np.broadcast_to(np.zeros((), constant.dtype), constant.shape)
        return replace(self, constants=tuple(constants))

    @property
    def operands(self) -> tuple[int, ...]:
        """The operands of post-ops that are no constants."""
        tensors = [op.tensor for op in self.post_ops if op.tensor >= 0]
        return tuple([i for i in tensors if self.constants[i] is None])

    def behind(self, first: Sequence[PostOp], *constants: np.ndarray) -> OpDesc:
        """The same with the post-ops ``first`` before its own, and these ``constants``."""
        constants_ = (*self.constants, *constants)
        return replace(self, post_ops=(*first, *self.post_ops), constants=constants_)

    def without_bias(self, axis: int) -> tuple[np.ndarray | None, OpDesc]:
        """The constant that the first post-op adds along ``axis``, and the same without it; None
        and this one if it adds none."""
        adds = bool(self.post_ops) and self.post_ops[0].binary == "add"
        term, result = self.constants[self.post_ops[0].tensor] if adds else None, self.output.dims
        if term is None:
            return None, self
        dims = padded(term.shape, len(result))
        if any(n > 1 for i, n in enumerate(dims) if i != axis % len(dims)):
            return None, self
        # A bias of a primitive has an element for each channel, also where the model has one for
        # all.
        bias = np.ascontiguousarray(np.broadcast_to(term.reshape(-1), result[axis]))
        return bias, replace(self, post_ops=self.post_ops[1:])

    def repeats(self, tensor: int) -> bool:
        """Whether a tensor is broadcast along some axes of the result, and not along all."""
        dims, result = self.dims(tensor), self.output.dims
        return any(n > 1 for n in dims) and padded(dims, len(result)) != result

    def whole(self, *tensors: int) -> tuple[int, ...]:
        """Those of ``tensors`` and of the operands of post-ops that have the type of the result."""
        both = (*tensors, *self.operands)
        return tuple([i for i in both if self.tensors[i] == self.output])

    @property
    def summed(self) -> int:
        """The tensor that may lie where the result is written, so that the result is added to it:
        the operand of a first post-op that adds, if it has the type of the result and nothing else
        reads it; else -1."""
        ops = self.post_ops
        if not ops or ops[0].binary != "add":
            return -1
        tensor = ops[0].tensor
        if self.constants[tensor] is not None or self.tensors[tensor] != self.output:
            return -1
        read = [*self.inputs, *[op.tensor for op in ops]]
        return tensor if read.count(tensor) == 1 else -1

    @property
    def output(self) -> TensorType:
        """The type of the first output."""
        type_ = self.tensors[self.outputs[0]]
        assert type_ is not None
        return type_


def op_desc_of(
    node: Node, types: Sequence[Type | None], dtypes: Collection[np.dtype] = (FLOAT32,)
) -> OpDesc | None:
    """The descriptor of a node with these types of inputs; None if no primitive can run it: for
    tensors of other dtypes, of unknown shapes or without elements, and chains that post-ops do not
    express."""
    desc = whole_desc_of(node, types, dtypes)
    if desc is None or not is_fused(node):
        return desc
    region = node.attrs["region"]
    index = {value: i for i, value in enumerate(region.inputs)}
    post_ops = post_ops_of(region.nodes, index, desc.tensors)
    if post_ops is None or any(t is not None and t.dtype != FLOAT32 for t in desc.tensors):
        return None
    first = region.nodes[0]
    inputs = tuple([-1 if value is None else index[value] for value in first.inputs])
    return replace(desc, node=first, inputs=inputs, post_ops=post_ops)


def whole_desc_of(
    node: Node, types: Sequence[Type | None], dtypes: Collection[np.dtype]
) -> OpDesc | None:
    """As ``op_desc_of``, without looking into a fused node."""
    outputs = [None if value is None else value.type for value in node.outputs]
    constants = [None if value is None else value.const for value in node.inputs]
    constants += [None] * len(outputs)
    tensors: list[TensorType | None] = []
    for type_, constant in zip((*types, *outputs), constants, strict=True):
        if type_ is None or (
            constant is not None and (constant.dtype not in dtypes or not constant.size)
        ):
            tensors.append(None)
        elif not isinstance(type_, TensorType) or not type_.static:
            return None
        elif type_.dtype in dtypes and all(type_.dims):
            tensors.append(type_)
        else:
            return None
    count = len(node.inputs)
    if not any(tensors[count:]):
        return None
    inputs = tuple([-1 if value is None else i for i, value in enumerate(node.inputs)])
    outputs_ = tuple(range(count, len(tensors)))
    return OpDesc(node, tuple(tensors), tuple(constants), inputs, outputs_)
