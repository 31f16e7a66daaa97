"""PRelu as a primitive; behind a product or convolution it is a post-op."""

from __future__ import annotations

from penstock.backends.onednn.eltwise import eltwise
from penstock.backends.onednn.eltwise_algorithms import ELTWISE
from penstock.backends.onednn.layouts import broadcasts, padded
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import BROADCASTING_PRELU
from penstock.backends.onednn.primitive import DST, SRC, WEIGHTS
from penstock.backends.onednn.spec import BoundPrimitive, Constants, PrimitiveSpec, SpecContext
from penstock.backends.onednn.weights import weights_of
from penstock.ir.layout import channels_last


def prelu(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a PRelu whose slopes broadcast to its input."""
    if ELTWISE["PRelu"](desc.node) is not None:
        return eltwise(desc)
    x, slope = desc.input(0), desc.input(1)
    if x is None or not x.dims or slope is None or desc.post_ops:
        return None
    if desc.node.op.since < BROADCASTING_PRELU or not broadcasts(slope.dims, x.dims):
        return None
    rank = len(x.dims)
    dims = padded(slope.dims, rank)
    constant = desc.constant(1)
    source, slopes = desc.inputs
    tensors = {SRC: source, DST: desc.outputs[0]}
    if constant is None:
        tensors[WEIGHTS] = slopes

    def create(context: SpecContext) -> BoundPrimitive:
        order = context.order(source)
        layouts = [
            [axis for axis in axes if x.dims[axis] > 1]
            for axes in (order, range(rank), channels_last(rank))
        ]
        if layouts[0] not in layouts[1:]:
            # oneDNN 3.2 reads slopes of channels wrongly in other orders.
            raise DnnlError(UNIMPLEMENTED)
        constants: Constants = {}
        if constant is None:
            weights = context.descriptor(slopes, dims)
        else:
            weights = context.packed(dims, order)
            constants[WEIGHTS] = weights_of(constant, tuple(dims))
        ends = [context.source, weights, context.target]
        return context.primitive("prelu_forward", ends, tensors, constants)

    # Never in place: several threads of oneDNN 3.2 write some elements twice.
    whole = (source, slopes) if constant is None and slope == x else (source,)
    return PrimitiveSpec(desc, create, (), whole)
