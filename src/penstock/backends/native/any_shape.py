"""Kernels for any shapes, known only during the run: functions of ``c/any_shape*.c``.

They read the shapes of the arrays that they are given, and then compute what the other families
bind ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Any

import numpy as np

from penstock.backends.native.elementwise import OPERATIONS, late_program
from penstock.backends.native.growable import GrowableBuffers
from penstock.backends.native.kernel import Site
from penstock.core.checkpoints import checkpoint
from penstock.core.records import replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Contents, Node
from penstock.ir.kernel import Kernel, MemoryUse
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.fused import FUSED
from penstock.ops.registry import MICROSOFT
from penstock.ops.result_bytes import counted

_KINDS = ("float32", "float64")


def any_shape_function(
    library: NativeLibrary,
    node: Node,
    types: Sequence[Type | None],
    otherwise: Callable[..., Any],
) -> Callable[..., Any] | None:
    """A function for arrays of any shapes, which calls ``otherwise`` where it has no kernel; None
    if it would do that always."""
    name = node.op.full_name
    tensors = [t for t in types if t is None or isinstance(t, TensorType)]
    if len(tensors) < len(types):
        return None
    settings: Any = None
    function = None
    first = tensors[0] if tensors else None
    is_real = first is not None and str(first.dtype) in _KINDS
    if name == "MatMul" and is_real:
        function = library.functions.product
    elif name in ("Softmax", "LogSoftmax") and is_real and _is_last(node, first):
        settings, function = name == "LogSoftmax", library.functions.softmax
    elif name in OPERATIONS or name == FUSED.full_name:
        (output,) = node.outputs if len(node.outputs) == 1 else (None,)
        written = None if output is None else output.type
        if isinstance(written, TensorType) and written.shape is not None:
            site = Site(library, node, (*tensors, written), Contents(node.inputs))
            settings = late_program(site)
            function = None if settings is None else library.functions.elementwise
    return None if function is None else partial(function, otherwise, checkpoint, settings)


def any_shape_view(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Expand, Range, Reshape and Slice to shapes that only the run knows."""
    plain = node.op.compile(node, types)
    settings = bool(node.attrs.get("allowzero")) if node.op.name == "Reshape" else None
    function = getattr(library.functions, node.op.name.lower())
    called = partial(function, plain.function, checkpoint, settings)
    return replace(plain, function=called, into=None)


_ATTENTION = Struct("=8q2d")  # as in c/late_attention.c


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


def attend_kernel(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Attend of real numbers."""
    if any(not isinstance(t, TensorType) or t.dtype != np.float32 for t in types[:3]):
        return None
    otherwise = node.op.compile(node, types).function
    scale = float(node.attrs["scale"])
    return Kernel(partial(library.functions.attend, otherwise, checkpoint, scale))


def _is_last(node: Node, x: TensorType | None) -> bool:
    """Whether the axis of a Softmax is the last one."""
    if x is None or not x.shape or node.op.since < 13:
        return False
    return normalize_axis(node.attrs.get("axis", -1), len(x.shape)) == len(x.shape) - 1
