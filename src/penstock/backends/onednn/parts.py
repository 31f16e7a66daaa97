"""Products and convolutions that take long, in parts between which the run may be stopped.

A part has some rows of a product, some images of a batch, or some rows of one image with what their
windows see of the input; a kernel of 3 rows, with padding of one row, and 8 rows in two parts::

    rows of the result 0-3: rows 0-4 of the input, with padding before
    rows of the result 4-7: rows 3-7 of the input, with padding behind
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.kernel import PrimitiveCache, kernel_of
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.spec import PrimitiveSpec
from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple, dataclass, replace
from penstock.core.types import RunValue, RunValues
from penstock.ir.graph import Node
from penstock.ir.kernel import (
    NO_PACKED_CONSTANTS,
    Binder,
    BoundCall,
    Kernel,
    LayoutHints,
    MemoryUse,
    PackedConstants,
)
from penstock.ops.common.windows import behind, windows

MOST_FLOPS = 8_000_000_000
"""Operations of a part: a fifth of a second on one core."""

Span = tuple[int, int]
Cut = tuple[slice, ...] | None


class _Part(NamedTuple):
    """What one call computes, and which part that is of each tensor; None for all of it."""

    desc: OpDesc
    cuts: tuple[Cut, ...]


def divided_axis(desc: OpDesc) -> int | None:
    """The axis of its result along which a product or a convolution is divided: the outermost of
    several elements; None if there is no such axis."""
    name, dims = desc.node.op.name, desc.output.dims
    axes: Sequence[int] = ()
    if "MatMul" in name:
        axes = range(len(dims) - 1)
    elif "Gemm" in name or name == "ConvTranspose":
        axes = range(0 if desc.node.attrs.get("transA") else 1)
    elif "Conv" in name:
        axes = (0, *range(2, len(dims)))
    return next((axis for axis in axes if dims[axis] > 1), None)


def kernel_in_parts(
    library: Library, make: Callable[[OpDesc], PrimitiveSpec | None], desc: OpDesc, work: float
) -> Kernel | None:
    """The kernel of ``desc``, in parts if it takes long and can be divided; ``work`` is its number
    of operations. ``make`` specifies its primitives; None if it does. Raises ``DnnlError``."""
    spec = make(desc)
    if spec is None:
        return None
    parts = list(_parts(desc, spec.desc, work)) if work > MOST_FLOPS else []
    if not parts or None in parts:
        return kernel_of(library, spec)
    kernels: dict[Any, Kernel] = {}
    calls: list[tuple[Kernel, tuple[Cut, ...]]] = []
    for part in filter(None, parts):
        # Parts between the first and the last are mostly equal, and one primitive serves them all.
        key = part.desc.tensors, str(part.desc.node.attrs.get("pads"))
        if key not in kernels:
            share = part.desc.output.elements / desc.output.elements
            kernel = kernel_in_parts(library, make, part.desc, work * share)
            if kernel is None:
                return None
            kernels[key] = kernel
        calls.append((kernels[key], part.cuts))
    return _joined(spec, list(kernels.values()), calls)


def _parts(desc: OpDesc, computed: OpDesc, work: float) -> Iterator[_Part | None]:
    """The parts of a descriptor, of which a family of primitives made ``computed``, with all terms
    as post-ops; None for one that there cannot be."""
    axis = divided_axis(desc)
    if axis is None:
        return
    size = desc.output.dims[axis]
    count = math.ceil(size / max(int(size * MOST_FLOPS / work), 1))
    # As large as one another: for a single row oneDNN may have reference code alone.
    step = math.ceil(size / count)
    for start in range(0, size, step):
        yield _part(desc, computed, axis, (start, min(start + step, size)))


def _part(desc: OpDesc, computed: OpDesc, axis: int, span: Span) -> _Part | None:
    """What is computed of the result's ``span`` along an axis."""
    dims, node = desc.output.dims, desc.node
    first, second = (*desc.inputs, -1)[:2]
    spans = {first: span}
    if "MatMul" in node.op.name:
        spans |= {second: span} if axis < len(dims) - 2 else {second: (0, -1)}
    elif axis > 1:
        node, spans[first] = _seen(desc, axis, span)
    for i in (desc.outputs[0], *[op.tensor for op in computed.post_ops if op.tensor >= 0]):
        if spans.setdefault(i, span) != span:
            return None  # an operand that is also read otherwise
    tensors = list(desc.tensors)
    cuts: list[Cut] = [None] * len(tensors)
    for i, (start, stop) in spans.items():
        shape = computed.dims(i)
        own = axis - (len(dims) - len(shape))
        if stop < 0 or own < 0 or shape[own] == 1:
            continue
        type_ = tensors[i] if i < len(tensors) and computed.constants[i] is None else None
        if type_ is None or start >= stop:
            return None
        tensors[i] = replace(type_, shape=(*shape[:own], stop - start, *shape[own + 1 :]))
        cuts[i] = (*[slice(None)] * own, slice(start, stop))
    return _Part(replace(desc, node=node, tensors=tuple(tensors)), tuple(cuts))


def _seen(desc: OpDesc, axis: int, span: Span) -> tuple[Node, Span]:
    """The convolution of some rows of the result alone, and the rows of the input that they see."""
    x, w, node = desc.input(0), desc.constant(1), desc.node
    assert x is not None and w is not None
    axes = windows(node.attrs, w.shape[2:], x.dims[2:])
    rows, size = axes[axis - 2], x.dims[axis]
    low = span[0] * rows.stride - rows.begin
    high = (span[1] - 1) * rows.stride + rows.span - rows.begin
    begins, ends = [a.begin for a in axes], behind(axes)
    # Within the image a part sees rows of its neighbours, where the whole has no padding.
    begins[axis - 2], ends[axis - 2] = max(-low, 0), max(high - size, 0)
    attrs = {**node.attrs, "pads": [*begins, *[max(end, 0) for end in ends]]}
    # `pads` now says it all, and ONNX does not allow both.
    attrs.pop("auto_pad", None)
    return Node(node.op, node.inputs, (), attrs), (max(low, 0), min(high, size))


@dataclass(frozen=True, slots=True, eq=False)
class PartsBinder(Binder):
    """Binds the kernels of the parts anew in each run, as they take long."""

    kernels: Sequence[Kernel]
    packed_inputs: tuple[int, ...]
    into: Callable[..., None]

    @property
    def implementation(self) -> str:
        """oneDNN's name of the code of the first part."""
        binder = self.kernels[0].binder
        assert binder is not None
        return binder.implementation

    @property
    def packed(self) -> PartsBinder:
        return self

    def fixed(self) -> None:
        """Bring constants into the layouts of the primitives."""
        for kernel in self.kernels:
            binder = kernel.binder
            assert isinstance(binder, PrimitiveCache | PartsBinder)
            binder.packed.fixed()

    def bind(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        self.fixed()
        # Weights live in layouts of the primitives; a bound call that held them would keep both.
        given = [None if i in self.packed_inputs else x for i, x in enumerate(inputs)]
        return self.into, (*given, *outputs)


def _joined(
    spec: PrimitiveSpec, kernels: Sequence[Kernel], calls: Sequence[tuple[Kernel, tuple[Cut, ...]]]
) -> Kernel:
    """The kernel that makes the calls of the parts."""
    count = len(spec.desc.tensors) - len(spec.desc.outputs)

    def into(*arrays: RunValue) -> None:
        for kernel, cuts in calls:
            checkpoint()
            views = [
                x if x is None or cut is None else x[cut]
                for x, cut in zip(arrays, cuts, strict=False)
            ]
            run, arguments = kernel.bind(views[:count], views[count:], None)
            status = run(*arguments)
            if status and kernel.binder is not None and kernel.binder.check is not None:
                kernel.binder.check(status)

    output, packed_inputs = spec.desc.output, tuple(spec.weights)

    def function(*inputs: RunValue) -> RunValue:
        result = np.empty(output.dims, output.dtype)
        into(*inputs, result)
        return result

    def release() -> Mapping[int, Callable[[], np.ndarray]]:
        held: dict[int, Callable[[], np.ndarray]] = {}
        for kernel in kernels:
            assert kernel.packed.release is not None
            held.update(kernel.packed.release())
        return held

    return Kernel(
        function,
        into,
        binder=PartsBinder(kernels, packed_inputs, into),
        layout=LayoutHints(
            dims_order=spec.dims_order,
            contiguous_inputs=spec.contiguous_inputs,
            prefer_bound=True,
        ),
        packed=PackedConstants(packed_inputs, release) if packed_inputs else NO_PACKED_CONSTANTS,
        memory=MemoryUse(code_bytes=sum(kernel.memory.code_bytes for kernel in kernels)),
    )
