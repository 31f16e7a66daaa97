"""MaxPool, AveragePool and GlobalAveragePool in float32, over one to three spatial axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.backends.onednn.kernel import Made, Recipe, Tensors
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.primitive import DST, SRC, Descriptor, Primitive
from penstock.ir import Node
from penstock.ops.pooling import pool_windows
from penstock.ops.window import Window, behind


def pooling(library: Library, node: Node, inputs: Tensors, outputs: Tensors) -> Recipe | None:
    """Pooling without the indices of maxima."""
    (x,) = inputs
    if x is None or len(outputs) != 1 or outputs[0] is None or not 3 <= len(x.dims) <= 5:
        return None
    lib, ffi = library.lib, library.ffi
    name = node.op.name
    if name.startswith("Global"):
        axes: Sequence[Window] = [Window(size, 1, size) for size in x.dims[2:]]
    else:
        axes = pool_windows(node.attrs, x.dims)
    after = behind(axes)
    algorithm = lib.dnnl_pooling_max
    if name != "MaxPool":
        algorithm = lib.dnnl_pooling_avg_exclude_padding
        if node.attrs.get("count_include_pad", 0):
            # Elements that only ceil_mode has added do not count, which oneDNN cannot tell.
            if any(n > axis.end for n, axis in zip(after, axes, strict=True)):
                return None
            algorithm = lib.dnnl_pooling_avg_include_padding

    def dims(numbers: Sequence[int]) -> Any:
        return ffi.new("dnnl_dim_t[]", list(numbers))

    strides, sizes = dims([a.stride for a in axes]), dims([a.kernel for a in axes])
    dilations = dims([a.dilation - 1 for a in axes])
    begin, end = dims([a.begin for a in axes]), dims(after)

    def make(descriptors: Sequence[Descriptor | None]) -> Made:
        source, target = descriptors
        assert source is not None and target is not None

        def create(desc: Any, engine: Any, attr: Any) -> Any:
            return lib.dnnl_pooling_forward_primitive_desc_create(
                desc,
                engine,
                lib.dnnl_forward_inference,
                algorithm,
                source.handle,
                target.handle,
                strides,
                sizes,
                dilations,
                begin,
                end,
                attr,
            )

        return Made(Primitive(library, create), {SRC: 0, DST: 1}, {})

    return Recipe(library, inputs, outputs, make)
