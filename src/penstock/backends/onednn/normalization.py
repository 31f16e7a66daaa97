"""LayerNormalization, InstanceNormalization, and BatchNormalization with constant statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.backends.onednn.eltwise import binary_spec
from penstock.backends.onednn.eltwise_algorithms import Eltwise
from penstock.backends.onednn.layouts import broadcasts
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import DST, SCALE, SHIFT, SRC
from penstock.backends.onednn.primitive_spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.ir.layout import channels_last
from penstock.ops.common.shape_rules import normalize_axis
from penstock.types import FLOAT32


def layer_normalization(desc: OpDesc) -> PrimitiveSpec | None:
    """LayerNormalization over trailing axes, without the statistics as outputs."""
    x, node = desc.input(0), desc.node
    if x is None or not x.dims or len(desc.post_ops) or _has_more_results(desc):
        return None
    axis = normalize_axis(node.attrs.get("axis", -1), len(x.dims))
    tail = x.dims[axis:]
    width = math.prod(tail)
    shape = math.prod(x.dims[:axis]), width
    source, target = desc.inputs[0], desc.outputs[0]
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]] = {}
    tensors = {SRC: source, DST: target}
    flags = 0
    for argument, i, name in ((SCALE, 1, "scale"), (SHIFT, 2, "shift")):
        type_, known = desc.input(i), desc.constant(i)
        if type_ is None:
            if known is not None:
                return None  # of another dtype
            continue
        dims = _without(type_.dims, len(tail))
        if dims is None or not broadcasts(dims, tail):
            return None
        if known is not None:
            each = np.broadcast_to(known.reshape(dims), tail)
            constants[argument] = np.ascontiguousarray(each).reshape(width), (width,)
        elif math.prod(dims) == width:
            tensors[argument] = desc.inputs[i]
        else:
            return None
        flags |= _FLAGS[name]

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_layer_normalization_forward_primitive_desc_create,
            [
                lib.dnnl_forward_inference,
                context.descriptor(source, shape),
                context.descriptor(target, shape),
                context.ffi.NULL,
                node.attrs.get("epsilon", 1e-5),
                flags,
            ],
            tensors,
            constants,
        )

    contiguous = tuple([i for argument, i in tensors.items() if argument != DST])
    return PrimitiveSpec(
        desc, create_primitive, tuple(range(len(x.dims))), contiguous, inplace=(source,)
    )


_FLAGS = {"scale": 2, "shift": 4}  # dnnl_use_scale, dnnl_use_shift


def _without(dims: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """The last ``rank`` of ``dims``, if those before are 1."""
    before = len(dims) - rank
    return None if any(n != 1 for n in dims[: max(before, 0)]) else tuple(dims[max(before, 0) :])


def batch_normalization(desc: OpDesc) -> PrimitiveSpec | None:
    """BatchNormalization in inference: a factor and a term for each channel."""
    x, attrs = desc.input(0), desc.node.attrs
    if x is None or len(x.dims) < 2 or attrs.get("training_mode", 0) or _has_more_results(desc):
        return None
    scale, shift, mean, variance = (desc.constant(i) for i in range(1, 5))
    if scale is None or shift is None or mean is None or variance is None:
        return None
    epsilon = attrs.get("epsilon", 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    term = shift - mean * factor
    shape = (-1, *(1,) * (len(x.dims) - 2))
    parameters = [each.astype(FLOAT32).reshape(shape) for each in (factor, term)]
    count = len(desc.constants)
    first = PostOp(binary="mul", tensor=count), PostOp(binary="add", tensor=count + 1)
    posts = desc.post_ops.behind(first, desc.output.dims, (*desc.constants, *parameters))
    spec = binary_spec(replace(desc, post_ops=posts), desc.inputs[0])
    if any(each.dtype != FLOAT32 for each in (scale, shift, mean, variance)):
        return spec
    given = {SCALE: scale, SHIFT: shift, _MEAN: mean, _VARIANCE: variance}
    constants = {argument: (each, each.shape) for argument, each in given.items()}

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        if context.order(desc.inputs[0])[-1] != 1 or desc.post_ops.ops not in ((), (_RELU,)):
            return spec.create(context)
        # With the channels innermost, oneDNN's own primitive is twice as fast.
        context = SpecContext(context.library, desc, context.strides, context.dims_order)
        return context.primitive(
            lib.dnnl_batch_normalization_forward_primitive_desc_create,
            [lib.dnnl_forward_inference, context.source, context.target, epsilon, _GIVEN],
            context.ends,
            constants,
        )

    return replace(spec, create=create_primitive)


_MEAN, _VARIANCE = 49, 50  # DNNL_ARG_MEAN, DNNL_ARG_VARIANCE
# Flags: dnnl_use_scale and dnnl_use_shift, and with them dnnl_use_global_stats.
_SCALED, _GIVEN = 6, 7
_WIDTH = 8
_RELU = PostOp(Eltwise("relu"))


def instance_normalization(desc: OpDesc) -> PrimitiveSpec | None:
    """InstanceNormalization of one image, as BatchNormalization with statistics of the batch. None
    if the channels do not fill registers: oneDNN is many times slower then."""
    x, y = desc.input(0), desc.output
    scale, shift = desc.constant(1), desc.constant(2)
    if x is None or not 3 <= len(x.dims) <= 5 or x.dims[0] != 1 or len(desc.post_ops):
        return None
    if x.dims[1] % _WIDTH:
        return None
    if scale is None or shift is None or scale.dtype != FLOAT32 or shift.dtype != FLOAT32:
        return None
    constants = {SCALE: (scale, scale.shape), SHIFT: (shift, shift.shape)}
    epsilon = desc.node.attrs.get("epsilon", 1e-5)

    def create_primitive(context: SpecContext) -> BoundPrimitive:
        lib = context.lib
        return context.primitive(
            lib.dnnl_batch_normalization_forward_primitive_desc_create,
            [lib.dnnl_forward_inference, context.source, context.target, epsilon, _SCALED],
            context.ends,
            constants,
        )

    return PrimitiveSpec(desc, create_primitive, channels_last(len(y.dims)), (desc.inputs[0],))


def _has_more_results(desc: OpDesc) -> bool:
    return any(desc.tensors[i] is not None for i in desc.outputs[1:])
