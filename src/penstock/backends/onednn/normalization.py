"""LayerNormalization, and BatchNormalization with constant statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.backends.onednn.eltwise import binary_spec
from penstock.backends.onednn.eltwise_algorithms import Eltwise
from penstock.backends.onednn.layouts import broadcasts
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import DST, SCALE, SHIFT, SRC
from penstock.backends.onednn.spec import BoundPrimitive, Constants, PrimitiveSpec, SpecContext
from penstock.backends.onednn.weights import weights_of
from penstock.core.records import replace
from penstock.core.types import FLOAT32
from penstock.ops.common.shape_rules import normalize_axis

_MEAN, _VARIANCE = 49, 50  # DNNL_ARG_MEAN, DNNL_ARG_VARIANCE
_USE_STATISTICS, _USE_SCALE, _USE_SHIFT = 1, 2, 4  # dnnl_use_global_stats and so on
_RELU = PostOp(Eltwise("relu"))


def layer_normalization(desc: OpDesc) -> PrimitiveSpec | None:
    """LayerNormalization over trailing axes, without the statistics as outputs."""
    x, node = desc.input(0), desc.node
    if x is None or not x.dims or desc.post_ops or _has_more_results(desc):
        return None
    axis = normalize_axis(node.attrs.get("axis", -1), len(x.dims))
    tail = x.dims[axis:]
    width = math.prod(tail)
    shape = math.prod(x.dims[:axis]), width
    source, target = desc.inputs[0], desc.outputs[0]
    constants: Constants = {}
    tensors = {SRC: source, DST: target}
    flags = 0
    for argument, i, flag in ((SCALE, 1, _USE_SCALE), (SHIFT, 2, _USE_SHIFT)):
        type_, constant = desc.input(i), desc.constant(i)
        if type_ is None:
            if constant is not None:
                return None  # of another dtype
            continue
        dims = _without(type_.dims, len(tail))
        if dims is None or not broadcasts(dims, tail):
            return None
        if constant is not None:
            whole = np.broadcast_to(constant.reshape(dims), tail)
            constants[argument] = weights_of(np.ascontiguousarray(whole).reshape(width))
        elif math.prod(dims) == width:
            tensors[argument] = desc.inputs[i]
        else:
            return None
        flags |= flag

    def create(context: SpecContext) -> BoundPrimitive:
        ends = [context.descriptor(i, shape) for i in (source, target)]
        arguments = [*ends, None, node.attrs.get("epsilon", 1e-5), flags]
        return context.primitive("layer_normalization_forward", arguments, tensors, constants)

    contiguous = tuple([i for argument, i in tensors.items() if argument != DST])
    return PrimitiveSpec(desc, create, tuple(range(len(x.dims))), contiguous, inplace=(source,))


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
    parameters = [array.astype(FLOAT32).reshape(shape) for array in (factor, term)]
    count = len(desc.constants)
    first = PostOp(binary="mul", tensor=count), PostOp(binary="add", tensor=count + 1)
    spec = binary_spec(desc.behind(first, *parameters), desc.inputs[0])
    arguments = {SCALE: scale, SHIFT: shift, _MEAN: mean, _VARIANCE: variance}
    if any(array.dtype != FLOAT32 for array in arguments.values()):
        return spec

    def create(context: SpecContext) -> BoundPrimitive:
        if context.order(desc.inputs[0])[-1] != 1 or desc.post_ops not in ((), (_RELU,)):
            return spec.create(context)
        # With the channels innermost, oneDNN's own primitive is twice as fast.
        own = replace(context, desc=desc, summed=False)
        return own.primitive(
            "batch_normalization_forward",
            [own.source, own.target, epsilon, _USE_STATISTICS | _USE_SCALE | _USE_SHIFT],
            constants={argument: weights_of(array) for argument, array in arguments.items()},
        )

    return replace(spec, create=create)


def _has_more_results(desc: OpDesc) -> bool:
    return any(desc.tensors[i] is not None for i in desc.outputs[1:])
