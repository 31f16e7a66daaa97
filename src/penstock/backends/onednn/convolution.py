"""Conv: one to three spatial axes, groups, strides, dilations, a bias."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.backends.onednn.layouts import channels_last
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ops.common.windows import behind, windows


def convolution(work: OpDesc) -> PrimitiveSpec | None:
    """Conv with constant weights, and a constant bias if any."""
    node, x, w, y = work.node, work.input(0), work.constant(1), work.output
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    biased = work.with_bias(2, 1)
    if biased is None:
        return None
    bias, work = biased
    group = node.attrs.get("group", 1)
    axes = windows(node.attrs, w.shape[2:], x.dims[2:])
    # Axes of one element only cost: over one that is 1 wide, kernels take a hundred times as long.
    kept = [i for i, axis in enumerate(axes) if not axis.trivial or axis.size > 1] or [0]
    axes = tuple([axes[i] for i in kept])

    def seen(dims: Sequence[int]) -> tuple[int, ...]:
        return (*dims[:2], *[dims[2 + i] for i in kept])

    channels = (group, w.shape[0] // group) if group > 1 else w.shape[:1]
    shape = (*channels, w.shape[1], *[w.shape[2 + i] for i in kept])
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {WEIGHTS: (w, shape)}
    if bias is not None:
        constants[BIAS] = (bias, bias.shape)

    def make(maker: SpecContext) -> BoundPrimitive:
        lib = maker.lib
        return maker.primitive(
            lib.dnnl_convolution_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_convolution_direct,
                maker.operand(work.inputs[0], seen(x.dims)),
                maker.weights(shape),
                maker.of(bias),
                maker.descriptor(work.outputs[0], seen(y.dims)),
                maker.dims([a.stride for a in axes]),
                maker.dims([a.dilation - 1 for a in axes]),
                maker.dims([a.begin for a in axes]),
                maker.dims(behind(axes)),
            ],
            maker.ends,
            constants,
            view=seen,
        )

    read = tuple([i for i in work.posts.tensors if work.tensors[i] == y])
    return PrimitiveSpec(
        work, make, channels_last(len(y.dims)), (work.inputs[0], *read), summed=work.summed
    )
