"""Kernels for shapes that only the run knows: functions of ``c/late.c``, which look at the arrays
that they are given, and do then what the other families do ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.algorithms.checkpoints import checkpoint
from penstock.backends.native.elementwise import OPERATIONS, late_program
from penstock.backends.native.kernel import Site
from penstock.backends.native.library import NativeLibrary
from penstock.ir.graph import Node
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.internal.fused import FUSED
from penstock.types import TensorType, Type

_KINDS = ("float32", "float64")


def late_function(
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
            constants = [None if v is None else v.const for v in node.inputs]
            site = Site(library, node, (*tensors, written), tuple(constants))
            settings = late_program(site)
            function = None if settings is None else library.functions.elementwise
    return None if function is None else partial(function, otherwise, checkpoint, settings)


def _is_last(node: Node, x: TensorType | None) -> bool:
    """Whether the axis of a Softmax is the last one."""
    if x is None or not x.shape or node.op.since < 13:
        return False
    return normalize_axis(node.attrs.get("axis", -1), len(x.shape)) == len(x.shape) - 1
