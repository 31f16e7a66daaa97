"""PRelu by itself; behind a product or a convolution it is a post-op."""

from __future__ import annotations

import numpy as np

from penstock.backends.onednn.eltwise import eltwise
from penstock.backends.onednn.eltwise_algorithms import ELTWISE
from penstock.backends.onednn.layouts import broadcasts, channels_last, padded
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import BROADCASTING_PRELU
from penstock.backends.onednn.primitive import DST, SRC, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext


def prelu(work: OpDesc) -> PrimitiveSpec | None:
    """With slopes that are repeated where they have dims of 1."""
    if ELTWISE["PRelu"](work.node) is not None:
        return eltwise(work)
    x, slope = work.input(0), work.input(1)
    if x is None or not x.dims or slope is None or len(work.posts):
        return None
    if work.node.op.since < BROADCASTING_PRELU or not broadcasts(slope.dims, x.dims):
        return None
    dims = padded(slope.dims, len(x.dims))
    known = work.constant(1)
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {}
    tensors = {SRC: work.inputs[0], DST: work.outputs[0]}
    dense = [work.inputs[0]]
    if known is not None:
        constants[WEIGHTS] = (known, dims)
    else:
        tensors[WEIGHTS] = work.inputs[1]
        if slope == x:
            dense.append(work.inputs[1])

    def make(maker: SpecContext) -> BoundPrimitive:
        lib = maker.lib
        order = [axis for axis in maker.order(work.inputs[0]) if x.dims[axis] > 1]
        usual = range(len(x.dims)), channels_last(len(x.dims))
        if all(order != [axis for axis in each if x.dims[axis] > 1] for each in usual):
            # Slopes for each channel, oneDNN 3.2 reads wrongly then.
            raise DnnlError(UNIMPLEMENTED)
        if known is None:
            weights = maker.descriptor(tensors[WEIGHTS], dims)
        else:
            weights = maker.packed(dims, maker.order(work.inputs[0]))
        return maker.primitive(
            lib.dnnl_prelu_forward_primitive_desc_create,
            [lib.dnnl_forward_inference, maker.source, weights, maker.target],
            tensors,
            constants,
        )

    # Never in place: several threads of oneDNN 3.2 write some elements twice.
    return PrimitiveSpec(work, make, (), tuple(dense))
