"""Conv over one to three spatial axes, with groups, strides, dilations and a bias."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.windows import behind, windows


def convolution(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a Conv with constant weights and no or a constant bias."""
    node, x, w, y = desc.node, desc.input(0), desc.constant(1), desc.output
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    biased = desc.with_bias(2, 1)
    if biased is None:
        return None
    bias, desc = biased
    group = node.attrs.get("group", 1)
    axes = windows(node.attrs, w.shape[2:], x.dims[2:])
    # Axes of one element are dropped: over an axis of width 1, kernels are 100 times slower.
    kept = [i for i, axis in enumerate(axes) if not axis.trivial or axis.size > 1] or [0]
    axes = tuple([axes[i] for i in kept])

    def seen(dims: Sequence[int]) -> tuple[int, ...]:
        return (*dims[:2], *[dims[2 + i] for i in kept])

    channels = (group, w.shape[0] // group) if group > 1 else w.shape[:1]
    shape = (*channels, w.shape[1], *[w.shape[2 + i] for i in kept])
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {WEIGHTS: (w, shape)}
    if bias is not None:
        constants[BIAS] = (bias, bias.shape)

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_convolution_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_convolution_direct,
                context.operand(desc.inputs[0], seen(x.dims)),
                context.weights(shape),
                context.of(bias),
                context.descriptor(desc.outputs[0], seen(y.dims)),
                context.dims([a.stride for a in axes]),
                context.dims([a.dilation - 1 for a in axes]),
                context.dims([a.begin for a in axes]),
                context.dims(behind(axes)),
            ],
            context.ends,
            constants,
            view=seen,
        )

    read = tuple([i for i in desc.post_ops.tensors if desc.tensors[i] == y])
    return PrimitiveSpec(
        desc,
        create_primitive,
        channels_last(len(y.dims)),
        (desc.inputs[0], *read),
        summed=desc.summed,
    )
