"""What a primitive is asked to do: a node, or the first of a fused one with what follows it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.backends.onednn.post_ops import PostOps, posts_of
from penstock.backends.onednn.quant_attrs import Scaling
from penstock.ir.graph import Node
from penstock.ops.internal.fused import is_fused
from penstock.types import FLOAT32, TensorType, Type

Tensors = Sequence[TensorType | None]


@dataclass(frozen=True, slots=True, eq=False)
class OpDesc:
    """A ``node`` as the families of primitives see it.

    ``tensors``: the types of all that the whole takes and makes, inputs first, then outputs;
    ``constants`` those of them that are known. ``inputs`` and ``outputs`` of the node itself are
    indices into these, -1 where one is left out; of a fused one, outputs are those of the whole.
    ``posts`` is what is done with the result before it is written. With a ``scaling``, what is
    read and written are integers that stand for real numbers, and so are the weights.
    """

    node: Node
    tensors: tuple[TensorType | None, ...]
    constants: tuple[np.ndarray | None, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    posts: PostOps
    scaling: Scaling | None = None

    def input(self, i: int) -> TensorType | None:
        """The type of an input of the node, None where it is left out."""
        index = self.inputs[i] if i < len(self.inputs) else -1
        return self.tensors[index] if index >= 0 else None

    def constant(self, i: int) -> np.ndarray | None:
        """An input of the node, if it is known."""
        index = self.inputs[i] if i < len(self.inputs) else -1
        return self.constants[index] if index >= 0 else None

    def with_bias(self, i: int, axis: int) -> tuple[np.ndarray | None, OpDesc] | None:
        """The bias, for each index of ``axis``, and the work without it: input ``i``, or else what
        the first post-op adds; None if it is no constant."""
        if i < len(self.inputs) and self.inputs[i] >= 0:
            bias = self.constant(i)
            return None if bias is None else (bias, self)
        bias, posts = self.posts.without_bias(axis)
        return bias, replace(self, posts=posts)

    @property
    def summed(self) -> int:
        """The tensor that may lie where the result is written, to which it is then added: what
        the first post-op adds, if nothing else reads it; -1 if there is none."""
        posts = self.posts.posts
        if not posts or posts[0].binary != "add":
            return -1
        if self.posts.constants[posts[0].tensor] is not None:
            return -1
        tensor = posts[0].tensor
        read = [*self.inputs, *[post.tensor for post in posts]]
        return tensor if read.count(tensor) == 1 else -1

    @property
    def output(self) -> TensorType:
        """The type of the first output."""
        kind = self.tensors[self.outputs[0]]
        assert kind is not None
        return kind


def op_desc_of(
    node: Node, types: Sequence[Type | None], dtypes: Collection[np.dtype] = (FLOAT32,)
) -> OpDesc | None:
    """The work of a node with these types of inputs; None for what no primitive does: tensors other
    than of these ``dtypes`` and of known shapes that are not empty, and chains that cannot be said.
    """
    found = tensors_of(node, types, dtypes)
    if found is None:
        return None
    tensors, constants = found
    count = len(node.inputs)
    first, posts, place = node, PostOps(), {}
    inputs = tuple([-1 if value is None else i for i, value in enumerate(node.inputs)])
    if is_fused(node):
        region = node.attrs["region"]
        first = region.nodes[0]
        place = {value: i for i, value in enumerate(region.inputs)}
        inputs = tuple([-1 if v is None else place[v] for v in first.inputs])
        chain = posts_of(region.nodes, place, tensors, constants)
        if chain is None or any(t is not None and t.dtype != FLOAT32 for t in tensors):
            return None
        posts = chain
    made = tuple(range(count, len(tensors)))
    return OpDesc(first, tuple(tensors), tuple(constants), inputs, made, posts)


def tensors_of(
    node: Node, types: Sequence[Type | None], dtypes: Collection[np.dtype]
) -> tuple[list[TensorType | None], list[np.ndarray | None]] | None:
    """The types of what a node takes and makes, and what of it is known; None if some is of another
    dtype, of unknown shape, or empty, or if nobody reads what it makes."""
    outputs = [None if value is None else value.type for value in node.outputs]
    constants = [None if value is None else value.const for value in node.inputs]
    constants += [None] * len(outputs)
    tensors: list[TensorType | None] = []
    for kind, known in zip((*types, *outputs), constants, strict=True):
        if kind is None or (known is not None and (known.dtype not in dtypes or not known.size)):
            tensors.append(None)
        elif (
            isinstance(kind, TensorType) and kind.static and kind.dtype in dtypes and all(kind.dims)
        ):
            tensors.append(kind)
        else:
            return None
    return (tensors, constants) if any(tensors[len(node.inputs) :]) else None
