"""ConvTranspose over one to three spatial axes, with groups, strides, dilations and a bias."""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.constant_cache import shared
from penstock.ops.common.windows import Window, behind
from penstock.ops.onnx.deconvolution import transposed_windows


def deconvolution(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of a ConvTranspose with constant weights and no or a constant bias.

    None if there are fewer filters than elements in a register: NumPy is faster then.
    """
    node, x, w, y = desc.node, desc.input(0), desc.constant(1), desc.output
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    biased = desc.with_bias(2, 1)
    if biased is None:
        return None
    bias, desc = biased
    group = node.attrs.get("group", 1)
    if w.shape[1] < _FEWEST and (group == 1 or prod(w.shape[2:]) < _SMALLEST):
        return None
    axes = [
        axis
        for axis in transposed_windows(node.attrs, w.shape[2:], x.dims[2:])
        if isinstance(axis, Window)
    ]
    weights = shared(("onednn deconvolution", group), lambda: _by_result(w, group), w)
    constants = {WEIGHTS: (weights.value, weights.value.shape)}
    if bias is not None:
        constants[BIAS] = (bias, bias.shape)

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_deconvolution_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_deconvolution_direct,
                context.source,
                context.any(weights.value.shape),
                context.of(bias),
                context.target,
                context.dims([a.stride for a in axes]),
                context.dims([a.dilation - 1 for a in axes]),
                context.dims([a.begin for a in axes]),
                context.dims(behind(axes)),
            ],
            context.ends,
            constants,
        )

    read = tuple([i for i in desc.post_ops.tensors if desc.tensors[i] == y])
    return PrimitiveSpec(
        desc, create_primitive, channels_last(len(y.dims)), (desc.inputs[0], *read)
    )


_FEWEST, _SMALLEST = 4, 9


def _by_result(w: np.ndarray, group: int) -> np.ndarray:
    """Weights [channels, filters of a group, ...] with the axes of group and filters first."""
    if group == 1:
        return np.swapaxes(w, 0, 1)
    return np.swapaxes(w.reshape(group, len(w) // group, *w.shape[1:]), 1, 2)
