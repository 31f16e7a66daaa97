"""Sum, Mean, Max and Min of any number of tensors."""

from __future__ import annotations

from dataclasses import replace

from penstock.backends.onednn.eltwise import binary_spec, eltwise
from penstock.backends.onednn.eltwise_algorithms import BINARY, Eltwise
from penstock.backends.onednn.layouts import broadcasts
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive_spec import PrimitiveSpec

NARY = {"Max": "max", "Mean": "add", "Min": "min", "Sum": "add"}
"""``dnnl_binary_<name>`` of operations of any number of tensors"""

_MOST_POSTS = 16


def nary(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification for tensors of which one has the shape of the result; the others are
    operands of post-ops. None for a sum of two, which NumPy computes as fast in one call."""
    name, y = desc.node.op.name, desc.output
    if len(desc.inputs) <= 2:
        return eltwise(desc) if name in BINARY else None
    types_ = [desc.input(i) for i in range(len(desc.inputs))]
    if len(types_) > _MOST_POSTS or not y.dims:
        return None
    if any(type_ is None or not broadcasts(type_.dims, y.dims) for type_ in types_):
        return None
    fits = [i for i in desc.inputs if desc.tensors[i] == y and desc.constants[i] is None]
    if not fits:
        return None
    first = fits[0]
    rest = list(desc.inputs)
    rest.remove(first)
    posts = [PostOp(binary=NARY[name], tensor=i) for i in rest]
    if name == "Mean":
        posts.append(PostOp(Eltwise("linear", 1 / len(types_))))
    return binary_spec(
        replace(desc, post_ops=desc.post_ops.behind(posts, y.dims, desc.constants)), first
    )
