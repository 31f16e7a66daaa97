"""ConvTranspose: one to three spatial axes, groups, strides, dilations, a bias."""

from __future__ import annotations

from math import prod

import numpy as np

from penstock.backends.onednn.layouts import channels_last
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import BIAS, WEIGHTS
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ops.common.constant_cache import shared
from penstock.ops.common.windows import Window, behind
from penstock.ops.onnx.deconvolution import transposed_windows


def deconvolution(work: OpDesc) -> PrimitiveSpec | None:
    """ConvTranspose with constant weights, and a constant bias if any.

    Of few filters NumPy is faster: for oneDNN, these are as many as fill a register.
    """
    node, x, w, y = work.node, work.input(0), work.constant(1), work.output
    if x is None or w is None or not 3 <= len(x.dims) <= 5:
        return None
    biased = work.with_bias(2, 1)
    if biased is None:
        return None
    bias, work = biased
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

    def make(maker: SpecContext) -> BoundPrimitive:
        lib = maker.lib
        return maker.primitive(
            lib.dnnl_deconvolution_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                lib.dnnl_deconvolution_direct,
                maker.source,
                maker.any(weights.value.shape),
                maker.of(bias),
                maker.target,
                maker.dims([a.stride for a in axes]),
                maker.dims([a.dilation - 1 for a in axes]),
                maker.dims([a.begin for a in axes]),
                maker.dims(behind(axes)),
            ],
            maker.ends,
            constants,
        )

    read = tuple([i for i in work.posts.tensors if work.tensors[i] == y])
    return PrimitiveSpec(work, make, channels_last(len(y.dims)), (work.inputs[0], *read))


_FEWEST, _SMALLEST = 4, 9


def _by_result(w: np.ndarray, group: int) -> np.ndarray:
    """Weights [channels, filters of a group, ...] with the filters first, behind the group."""
    if group == 1:
        return np.swapaxes(w, 0, 1)
    return np.swapaxes(w.reshape(group, len(w) // group, *w.shape[1:]), 1, 2)
