"""Kernels for any shapes, known only during the run: functions of ``c/any_shape*.c``.

They read the shapes of the arrays that they are given, and then compute what the other families
bind ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.backends.native.elementwise import OPERATIONS, late_program
from penstock.backends.native.kernel import Site
from penstock.core.checkpoints import checkpoint
from penstock.core.records import replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Contents, Node
from penstock.ir.kernel import Kernel
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.fused import FUSED

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


def _is_last(node: Node, x: TensorType | None) -> bool:
    """Whether the axis of a Softmax is the last one."""
    if x is None or not x.shape or node.op.since < 13:
        return False
    return normalize_axis(node.attrs.get("axis", -1), len(x.shape)) == len(x.shape) - 1
