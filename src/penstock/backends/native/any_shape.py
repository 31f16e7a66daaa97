"""Kernels for any shapes, known only during the run: functions of ``c/any_shape*.c``.

They read the shapes of the arrays that they are given, and then compute what the other families
bind ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from struct import Struct

import numpy as np

from penstock.backends.native import by_call, of_any_shape
from penstock.backends.native.growable import GrowableBuffers
from penstock.core.checkpoints import checkpoint
from penstock.core.records import replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, MemoryUse
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import MICROSOFT
from penstock.ops.result_bytes import counted


@of_any_shape("Expand", "Range", "Reshape", "Slice", seconds=by_call)
def any_shape_view(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Expand, Range, Reshape and Slice to shapes that only the run knows."""
    output = node.outputs[0]
    if output is None or not isinstance(output.type, TensorType) or output.type.static:
        return None
    plain = node.op.compile(node, types)
    settings = bool(node.attrs.get("allowzero")) if node.op.name == "Reshape" else None
    function = getattr(library.functions, node.op.name.lower())
    called = partial(function, plain.function, checkpoint, settings)
    return replace(plain, function=called, into=None)


_ATTENTION = Struct("=8q2d")  # as in c/any_shape_attention.c


@of_any_shape("Attention", "com.microsoft.GroupQueryAttention")
def attention_kernel(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """GroupQueryAttention of com.microsoft, and ONNX's Attention, with a past of real numbers. The
    present of one whose length is not known ahead grows in place (``c/growable.c``)."""
    attrs, grouped = node.attrs, node.op.domain == MICROSOFT
    tensors = [t if isinstance(t, TensorType) else None for t in types]
    past = 3 if grouped else 4
    read = [*tensors[:3], *tensors[past : past + 2]]
    if len(read) < 5 or any(t is None or t.dtype != np.float32 for t in read):
        return None
    if len(node.outputs) != 3 or None in node.outputs:
        return None
    scale, softcap = float(attrs.get("scale") or 0), float(attrs.get("softcap") or 0)
    if grouped:
        window = max(attrs.get("local_window_size", -1), 0)
        chosen = [attrs["num_heads"], attrs["kv_num_heads"], attrs.get("causal", 1), window]
        chosen += [attrs.get("do_rotary", 0), attrs.get("rotary_interleaved", 0), 1]
        plain = not attrs.get("sliding_window_cache") and attrs.get("smooth_softmax", -1) != 1
        plain = plain and {attrs.get(f"{name}_quant_type", "NONE") for name in "kv"} == {"NONE"}
    else:
        chosen = [attrs.get("q_num_heads", 0), attrs.get("kv_num_heads", 0), *[0] * 5]
        windows = [attrs.get(f"{side}_window_size", -1) for side in ("left", "right")]
        plain = not attrs.get("is_causal") and windows == [-1, -1] and attrs.get("scale") != 0
        plain = plain and not rules.dtype_attribute(attrs, "softmax_precision")
    if not plain:
        return None
    # A past of unknown length is that of a decoder, which is fed the present in its next step.
    grows = any(not t.static for t in read[3:] if t is not None)
    rooms = GrowableBuffers()
    settings = _ATTENTION.pack(*chosen, grows, scale, softcap), rooms
    otherwise = counted(node, node.op.compile(node, types).function)
    function = partial(library.functions.attention, otherwise, checkpoint, settings)
    return Kernel(function, memory=MemoryUse(grows, rooms.nbytes))


@of_any_shape("penstock.Attend")
def attend_kernel(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Attend of real numbers."""
    if any(not isinstance(t, TensorType) or t.dtype != np.float32 for t in types[:3]):
        return None
    otherwise = node.op.compile(node, types).function
    scale = float(node.attrs["scale"])
    return Kernel(partial(library.functions.attend, otherwise, checkpoint, scale))
