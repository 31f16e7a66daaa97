"""Operations element by element, of one tensor or of two, and whole chains of them."""

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


def eltwise(work: OpDesc) -> PrimitiveSpec | None:
    """An operation that has an input of the very shape of its result."""
    y = work.output
    chain = ELTWISE[work.node.op.name](work.node) if work.node.op.name in ELTWISE else None
    if chain is None:
        return _binary(work) if len(work.inputs) == 2 else None
    first = next((i for i in work.inputs if i >= 0 and work.constants[i] is None), -1)
    x = work.tensors[first] if first >= 0 else None
    if x is None or x.dims != y.dims:
        return None
    one, *rest = chain
    posts = replace(work.posts, posts=(*map(PostOp, rest), *work.posts.posts))
    if not posts.dims:
        posts = replace(posts, dims=y.dims, constants=work.constants)
    work = replace(work, posts=posts)

    def make(maker: SpecContext) -> BoundPrimitive:
        lib = maker.lib
        return maker.primitive(
            lib.dnnl_eltwise_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                getattr(lib, f"dnnl_eltwise_{one.name}"),
                maker.descriptor(first),
                maker.target,
                one.alpha,
                one.beta,
            ],
            {SRC: first, DST: work.outputs[0]},
        )

    return PrimitiveSpec(work, make, (), _whole(work, first), inplace=(first,))


def _binary(work: OpDesc) -> PrimitiveSpec | None:
    """An operation of two tensors, the first of the shape of the result."""
    name, y = BINARY.get(work.node.op.name), work.output
    first, second = work.inputs
    if name is None or min(first, second) < 0:
        return None
    if name in ("add", "max", "min", "mul"):
        # The one that is as large, and is not known, comes first.
        first, second = sorted((first, second), key=lambda i: not _fits(work, i))
    if not _fits(work, first):
        return None
    other = work.tensors[second]
    if other is None or not broadcasts(other.dims, y.dims):
        return None
    post = PostOp(binary=name, tensor=second)
    return posted(replace(work, posts=work.posts.behind([post], y.dims, work.constants)), first)


def posted(work: OpDesc, first: int) -> PrimitiveSpec:
    """All that is done, done as post-ops: those of the work, of which the first is an operation of
    tensor ``first`` and another one.

    Only that one oneDNN takes as it is: functions of one element have no fast code for post-ops of
    two tensors.
    """
    post, *rest = work.posts.posts
    assert post.binary
    dims = work.output.dims
    known = work.posts.constants[post.tensor]
    kind = None if known is not None else work.tensors[post.tensor]
    other = padded(known.shape if kind is None else kind.dims, len(dims))  # type: ignore[union-attr]
    work = replace(work, posts=replace(work.posts, posts=tuple(rest)))
    # Of channels of one element each, oneDNN 3.2 gives all the first one's operand of a post-op.
    rank = 2 if all(n == 1 for n in dims[2:]) else len(dims)

    def seen(dims: Sequence[int]) -> Sequence[int]:
        return dims[:rank]

    def make(maker: SpecContext) -> BoundPrimitive:
        lib, target = maker.lib, work.outputs[0]
        tensors, constants = {SRC: first, DST: target}, {}
        if known is None:
            tensors[SRC_1] = post.tensor
            second = maker.descriptor(post.tensor, seen(other))
        else:
            constants[SRC_1] = known, tuple(seen(other))
            second = maker.packed(seen(other), [i for i in maker.order(target) if i < rank])
        return maker.primitive(
            lib.dnnl_binary_primitive_desc_create,
            [
                getattr(lib, f"dnnl_binary_{post.binary}"),
                maker.descriptor(first, seen(dims)),
                second,
                maker.descriptor(target, seen(dims)),
            ],
            tensors,
            constants,
            view=seen,
        )

    read = () if known is not None else (post.tensor,)
    return PrimitiveSpec(work, make, (), _whole(work, first, *read), inplace=(first,))


def _fits(work: OpDesc, i: int) -> bool:
    kind = work.tensors[i]
    return work.constants[i] is None and kind is not None and kind.dims == work.output.dims


def _whole(work: OpDesc, *tensors: int) -> tuple[int, ...]:
    """Those of ``tensors``, and of what post-ops read, that are of the shape of the result."""
    every = (*tensors, *work.posts.tensors)
    return tuple([i for i in every if work.tensors[i] == work.output])
