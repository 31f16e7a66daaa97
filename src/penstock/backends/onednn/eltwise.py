"""Elementwise operations of one or two tensors, and chains of them."""

from __future__ import annotations

from penstock.backends.onednn.eltwise_algorithms import BINARY, COMMUTATIVE, ELTWISE
from penstock.backends.onednn.layouts import broadcasts, padded
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import DST, SRC, SRC_1
from penstock.backends.onednn.spec import BoundPrimitive, Constants, PrimitiveSpec, SpecContext
from penstock.backends.onednn.weights import weights_of
from penstock.core.records import replace


def eltwise(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of an operation with an input of the shape of its result."""
    y = desc.output
    chain = ELTWISE[desc.node.op.name](desc.node) if desc.node.op.name in ELTWISE else None
    if chain is None:
        return _binary(desc) if len(desc.inputs) == 2 else None
    # The other input, if any, is a constant scalar, which has become a parameter of the algorithm.
    first = next((i for i in desc.inputs if i >= 0 and desc.constants[i] is None), -1)
    x = desc.tensors[first] if first >= 0 else None
    if x is None or x.dims != y.dims:
        return None
    head, *rest = chain
    desc = desc.behind([*map(PostOp, rest)])

    def create(context: SpecContext) -> BoundPrimitive:
        ends = context.descriptor(first), context.target
        arguments = [f"eltwise_{head.name}", *ends, head.alpha, head.beta]
        return context.primitive("eltwise_forward", arguments, {SRC: first, DST: desc.outputs[0]})

    return PrimitiveSpec(desc, create, (), desc.whole(first), inplace=(first,))


def _binary(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of an operation of two tensors, the first of the shape of the result."""
    name, y = BINARY.get(desc.node.op.name), desc.output
    first, second = desc.inputs
    if name is None or min(first, second) < 0:
        return None
    if name in COMMUTATIVE:
        # A tensor of the shape of the result that is no constant comes first.
        first, second = sorted((first, second), key=lambda i: not _fits(desc, i))
    if not _fits(desc, first):
        return None
    other = desc.tensors[second]
    if other is None or not broadcasts(other.dims, y.dims):
        return None
    return binary_spec(desc.behind([PostOp(binary=name, tensor=second)]), first)


def binary_spec(desc: OpDesc, first: int) -> PrimitiveSpec:
    """A binary primitive of tensor ``first``: the first post-op of ``desc``, with the others as its
    post-ops. A binary primitive is used because eltwise primitives have no fast code for binary
    post-ops."""
    post, *rest = desc.post_ops
    assert post.binary
    dims, target = desc.output.dims, desc.outputs[0]
    constant, other = desc.constants[post.tensor], padded(desc.dims(post.tensor), len(dims))
    desc = replace(desc, post_ops=tuple(rest))
    # With channels of one element each, oneDNN 3.2 applies a post-op's first operand to all.
    rank = 2 if all(n == 1 for n in dims[2:]) else len(dims)
    tensors, constants = {SRC: first, DST: target}, Constants()
    if constant is None:
        tensors[SRC_1] = post.tensor
    else:
        constants[SRC_1] = weights_of(constant, tuple(other[:rank]))

    def create(context: SpecContext) -> BoundPrimitive:
        if constant is None:
            second = context.descriptor(post.tensor, other[:rank])
        else:
            second = context.packed(other[:rank], [i for i in context.order(target) if i < rank])
        source, result = (context.descriptor(i, dims[:rank]) for i in (first, target))
        arguments = [f"binary_{post.binary}", source, second, result]
        return context.primitive("binary", arguments, tensors, constants, view=lambda d: d[:rank])

    whole = desc.whole(first) if constant is not None else desc.whole(first, post.tensor)
    return PrimitiveSpec(desc, create, (), whole, inplace=(first,))


def _fits(desc: OpDesc, i: int) -> bool:
    type_ = desc.tensors[i]
    return desc.constants[i] is None and type_ is not None and type_.dims == desc.output.dims
