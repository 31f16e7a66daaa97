"""Kernels for shapes that are known only at run time: functions of ``c/any_shape*.c``.

They read the shapes of their arrays, and compute the strides and sizes that other families bind at
compile time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.backends.native import by_call, of_any_shape
from penstock.core.checkpoints import checkpoint
from penstock.core.records import replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel


@of_any_shape("Expand", "Range", "Reshape", "Slice", work=by_call)
def any_shape_view(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Expand, Range, Reshape and Slice to shapes that are known only at run time."""
    output = node.outputs[0]
    if output is None or not isinstance(output.type, TensorType) or output.type.static:
        return None
    plain = node.op.compile(node, types)
    settings = bool(node.attrs.get("allowzero")) if node.op.name == "Reshape" else None
    function = getattr(library.functions, node.op.name.lower())
    called = partial(function, plain.function, checkpoint, settings)
    return replace(plain, function=called, into=None)
