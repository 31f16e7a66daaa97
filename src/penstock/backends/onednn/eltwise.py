"""Elementwise operations of one or two tensors, and chains of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.backends.onednn.eltwise_algorithms import BINARY, ELTWISE
from penstock.backends.onednn.layouts import broadcasts, padded
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import DST, SRC, SRC_1
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.graph import Node


def is_eltwise_chain(nodes: Sequence[Node]) -> bool:
    """Whether two of these nodes, the first among them, are functions of one tensor: eltwise
    primitives take binary post-ops only."""
    first, *rest = nodes
    return bool(rest) and _is_unary(first) and any(map(_is_unary, rest))


def _is_unary(node: Node) -> bool:
    algorithm = ELTWISE.get(node.op.name)
    return algorithm is not None and algorithm(node) is not None


def eltwise(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of an operation with an input of the shape of its result."""
    y = desc.output
    chain = ELTWISE[desc.node.op.name](desc.node) if desc.node.op.name in ELTWISE else None
    if chain is None:
        return _binary(desc) if len(desc.inputs) == 2 else None
    first = next((i for i in desc.inputs if i >= 0 and desc.constants[i] is None), -1)
    x = desc.tensors[first] if first >= 0 else None
    if x is None or x.dims != y.dims:
        return None
    one, *rest = chain
    posts = replace(desc.post_ops, ops=(*map(PostOp, rest), *desc.post_ops.ops))
    if not posts.dims:
        posts = replace(posts, dims=y.dims, constants=desc.constants)
    desc = replace(desc, post_ops=posts)

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_eltwise_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                getattr(lib, f"dnnl_eltwise_{one.name}"),
                context.descriptor(first),
                context.target,
                one.alpha,
                one.beta,
            ],
            {SRC: first, DST: desc.outputs[0]},
        )

    return PrimitiveSpec(desc, create_primitive, (), _whole(desc, first), inplace=(first,))


def _binary(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of an operation of two tensors, the first of the shape of the result."""
    name, y = BINARY.get(desc.node.op.name), desc.output
    first, second = desc.inputs
    if name is None or min(first, second) < 0:
        return None
    if name in ("add", "max", "min", "mul"):
        # A tensor of the shape of the result that is no constant comes first.
        first, second = sorted((first, second), key=lambda i: not _fits(desc, i))
    if not _fits(desc, first):
        return None
    other = desc.tensors[second]
    if other is None or not broadcasts(other.dims, y.dims):
        return None
    post = PostOp(binary=name, tensor=second)
    return binary_spec(
        replace(desc, post_ops=desc.post_ops.behind([post], y.dims, desc.constants)), first
    )


def binary_spec(desc: OpDesc, first: int) -> PrimitiveSpec:
    """A binary primitive of tensor ``first``: the first post-op of ``desc``, with the others as its
    post-ops.

    A binary primitive is used because eltwise primitives have no fast code for binary post-ops.
    """
    post, *rest = desc.post_ops.ops
    assert post.binary
    dims = desc.output.dims
    known = desc.post_ops.constants[post.tensor]
    type_ = None if known is not None else desc.tensors[post.tensor]
    other = padded(known.shape if type_ is None else type_.dims, len(dims))  # type: ignore[union-attr]
    desc = replace(desc, post_ops=replace(desc.post_ops, ops=tuple(rest)))
    # With channels of one element each, oneDNN 3.2 applies a post-op's first operand to all.
    rank = 2 if all(n == 1 for n in dims[2:]) else len(dims)

    def seen(dims: Sequence[int]) -> Sequence[int]:
        return dims[:rank]

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib, target = context.lib, desc.outputs[0]
        tensors, constants = {SRC: first, DST: target}, {}
        if known is None:
            tensors[SRC_1] = post.tensor
            second = context.descriptor(post.tensor, seen(other))
        else:
            constants[SRC_1] = known, tuple(seen(other))
            second = context.packed(seen(other), [i for i in context.order(target) if i < rank])
        return context.primitive(
            lib.dnnl_binary_primitive_desc_create,
            [
                getattr(lib, f"dnnl_binary_{post.binary}"),
                context.descriptor(first, seen(dims)),
                second,
                context.descriptor(target, seen(dims)),
            ],
            tensors,
            constants,
            view=seen,
        )

    read = () if known is not None else (post.tensor,)
    return PrimitiveSpec(desc, create_primitive, (), _whole(desc, first, *read), inplace=(first,))


def _fits(desc: OpDesc, i: int) -> bool:
    type_ = desc.tensors[i]
    return desc.constants[i] is None and type_ is not None and type_.dims == desc.output.dims


def _whole(desc: OpDesc, *tensors: int) -> tuple[int, ...]:
    """Those of ``tensors``, and of the operands of post-ops, that have the shape of the result."""
    every = (*tensors, *desc.post_ops.tensors)
    return tuple([i for i in every if desc.tensors[i] == desc.output])
