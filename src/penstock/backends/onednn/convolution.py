"""Conv in float32: one to three spatial axes, groups, strides, dilations, a bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.backends.onednn.kernel import Made, Recipe, Tensors, with_weights
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.primitive import BIAS, DST, SRC, WEIGHTS, Descriptor, Primitive
from penstock.ir import Node
from penstock.ops.window import behind, windows
from penstock.types import FLOAT32


def convolution(library: Library, node: Node, inputs: Tensors, outputs: Tensors) -> Recipe | None:
    """Conv with constant weights, and a constant bias if any."""
    x, w = inputs[:2]
    (y,) = outputs
    values = node.inputs[1:]
    if x is None or w is None or y is None or not 3 <= len(x.dims) <= 5:
        return None
    if len(node.inputs) > 3 or any(v is not None and v.const is None for v in values):
        return None
    lib, ffi = library.lib, library.ffi
    group = node.attrs.get("group", 1)
    axes = windows(node.attrs, w.dims[2:], x.dims[2:])

    def dims(numbers: Sequence[int]) -> Any:
        return ffi.new("dnnl_dim_t[]", list(numbers))

    strides, dilates = dims([a.stride for a in axes]), dims([a.dilation - 1 for a in axes])
    before = dims([a.begin for a in axes])
    after = dims(behind(axes))
    shape = (group, w.dims[0] // group, *w.dims[1:]) if group > 1 else w.dims
    constants = {
        argument: (value.const, shape if argument == WEIGHTS else value.const.shape)
        for argument, value in zip((WEIGHTS, BIAS), values, strict=False)
        if value is not None and value.const is not None
    }

    def make(descriptors: Sequence[Descriptor | None]) -> Made:
        source, target = descriptors[0], descriptors[-1]
        assert source is not None and target is not None
        weights = Descriptor(library, shape, FLOAT32)
        bias = Descriptor.of(library, constants[BIAS][0]).handle if BIAS in constants else ffi.NULL

        def create(desc: Any, engine: Any, attr: Any) -> Any:
            return lib.dnnl_convolution_forward_primitive_desc_create(
                desc,
                engine,
                lib.dnnl_forward_inference,
                lib.dnnl_convolution_direct,
                source.handle,
                weights.handle,
                bias,
                target.handle,
                strides,
                dilates,
                before,
                after,
                attr,
            )

        tensors = {SRC: 0, DST: len(inputs)}
        return with_weights(library, Primitive(library, create), tensors, constants)

    return Recipe(library, inputs, outputs, make)
