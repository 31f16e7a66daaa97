"""PRelu as a primitive; behind a product or convolution it is a post-op."""

from __future__ import annotations

import numpy as np

from penstock.backends.onednn.eltwise import eltwise
from penstock.backends.onednn.eltwise_algorithms import ELTWISE
from penstock.backends.onednn.layouts import broadcasts, padded
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import BROADCASTING_PRELU
from penstock.backends.onednn.primitive import DST, SRC, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last


def prelu(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a PRelu whose slopes broadcast to its input."""
    if ELTWISE["PRelu"](desc.node) is not None:
        return eltwise(desc)
    x, slope = desc.input(0), desc.input(1)
    if x is None or not x.dims or slope is None or len(desc.post_ops):
        return None
    if desc.node.op.since < BROADCASTING_PRELU or not broadcasts(slope.dims, x.dims):
        return None
    dims = padded(slope.dims, len(x.dims))
    known = desc.constant(1)
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {}
    tensors = {SRC: desc.inputs[0], DST: desc.outputs[0]}
    contiguous = [desc.inputs[0]]
    if known is not None:
        constants[WEIGHTS] = (known, dims)
    else:
        tensors[WEIGHTS] = desc.inputs[1]
        if slope == x:
            contiguous.append(desc.inputs[1])

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        order = [axis for axis in context.order(desc.inputs[0]) if x.dims[axis] > 1]
        layouts = range(len(x.dims)), channels_last(len(x.dims))
        if all(order != [axis for axis in each if x.dims[axis] > 1] for each in layouts):
            # oneDNN 3.2 reads slopes of channels wrongly in other orders.
            raise DnnlError(UNIMPLEMENTED)
        if known is None:
            weights = context.descriptor(tensors[WEIGHTS], dims)
        else:
            weights = context.packed(dims, context.order(desc.inputs[0]))
        return context.primitive(
            lib.dnnl_prelu_forward_primitive_desc_create,
            [lib.dnnl_forward_inference, context.source, weights, context.target],
            tensors,
            constants,
        )

    # Never in place: several threads of oneDNN 3.2 write some elements twice.
    return PrimitiveSpec(desc, create_primitive, (), tuple(contiguous))
