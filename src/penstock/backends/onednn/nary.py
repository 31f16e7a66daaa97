"""Sum, Mean, Max and Min of any number of tensors."""

from __future__ import annotations

from dataclasses import replace

from penstock.backends.onednn.eltwise import eltwise, posted
from penstock.backends.onednn.eltwise_algorithms import BINARY, Eltwise
from penstock.backends.onednn.layouts import broadcasts
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive_spec import PrimitiveSpec

NARY = {"Max": "max", "Mean": "add", "Min": "min", "Sum": "add"}
"""``dnnl_binary_<name>`` of operations of any number of tensors"""

_MOST_POSTS = 16


def nary(work: OpDesc) -> PrimitiveSpec | None:
    """One of the tensors is of the shape of the result; the others follow as post-ops. A sum of two
    is one call of NumPy's, which is as fast."""
    name, y = work.node.op.name, work.output
    if len(work.inputs) <= 2:
        return eltwise(work) if name in BINARY else None
    kinds = [work.input(i) for i in range(len(work.inputs))]
    if len(kinds) > _MOST_POSTS or not y.dims:
        return None
    if any(kind is None or not broadcasts(kind.dims, y.dims) for kind in kinds):
        return None
    fits = [i for i in work.inputs if work.tensors[i] == y and work.constants[i] is None]
    if not fits:
        return None
    first = fits[0]
    rest = list(work.inputs)
    rest.remove(first)
    posts = [PostOp(binary=NARY[name], tensor=i) for i in rest]
    if name == "Mean":
        posts.append(PostOp(Eltwise("linear", 1 / len(kinds))))
    return posted(replace(work, posts=work.posts.behind(posts, y.dims, work.constants)), first)
