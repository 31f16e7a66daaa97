"""The oneDNN backend: which family of primitives runs which operation.

``OneDnnBackend`` runs the operations that oneDNN has primitives for, in float32 and with known
shapes; a session has NumPy beside it for the others: ``backends=["onednn", "numpy"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.dynamic_shapes import SpecializingBackend
from penstock.backends.onednn.eltwise_algorithms import BINARY, ELTWISE, is_eltwise_chain
from penstock.backends.onednn.library import DnnlError, Library, library
from penstock.core.errors import PenstockError
from penstock.core.records import replace
from penstock.core.types import ANY, FLOAT32, RunValue, TensorType, Type
from penstock.host.on_demand import imported
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.common.constant_cache import weights_of
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.internal.transfer import REORDER
from penstock.ops.registry import MICROSOFT
from penstock.ops.work_estimate import (
    WORTH_ROUNDING,
    Rates,
    RateTable,
    Workload,
    flops,
    layout_seconds,
    moved_bytes,
)

if TYPE_CHECKING:
    from penstock.backends.onednn.op_desc import OpDesc
    from penstock.backends.onednn.spec import PrimitiveSpec

Family = Callable[["OpDesc"], "PrimitiveSpec | None"]


def _of(name: str) -> Callable[..., RunValue]:
    """A function of a module of this folder, which is imported when the function is called."""
    return imported(f"penstock.backends.onednn.{name}")


_OF_CODES = frozenset(
    {
        *("ConvInteger", "DequantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
        *[f"{MICROSOFT}.{name}" for name in ("DequantizeLinear", "QGemm", "QLinearConv")],
    }
)
"""the first operations of nodes with codes"""
_IN_PARTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", *_OF_CODES})
_KERNEL_IN_PARTS = _of("parts.kernel_in_parts")
_KERNEL_OF = _of("kernel.kernel_of")
_OP_DESC_OF, _CODES_DESC = _of("op_desc.op_desc_of"), _of("quantized.codes_desc")
_QUANTIZED = _of("quantized.quantized")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys([*ELTWISE, *BINARY], _of("eltwise.eltwise")),
    "BatchNormalization": _of("normalization.batch_normalization"),
    "Conv": _of("convolution.convolution"),
    "ConvTranspose": _of("convolution.deconvolution"),
    "Gemm": _of("matmul.gemm"),
    "LRN": _of("lrn.lrn"),
    "LayerNormalization": _of("normalization.layer_normalization"),
    "MatMul": _of("matmul.matmul"),
    "MaxPool": _of("pooling.pooling"),
    REORDER.full_name: _of("reorder.reorder"),
}
"""by operation, the function that specifies primitives for it and for chains that it begins"""

_MOVED = frozenset({FLOAT32, np.dtype(np.int8), np.dtype(np.uint8)})
MOVING = frozenset({"MaxPool", REORDER.full_name})
"""operations that run on 8-bit integers, too: their results are elements of their inputs"""

# Of one core of an Intel Xeon of the generation of 2023, with AVX-512 and AMX: fitted to times of
# layers of common networks, each primitive by itself.
# A call that copies nothing; a convolution among others takes less (``codegen.sequences``).
_CALL, _CONVOLUTION = 1.2e-6, 0.65e-6

RATES: RateTable = {
    "": Rates(_CALL, 20e9, 100e9),
    "codes product": Rates(_CALL, 20e9, 100e9, item_s=0.2e-6),
    "product": Rates(_CALL, 60e9, 157e9, weights_per_s=60e9),
    "convolution": Rates(_CONVOLUTION, 60e9, 180e9, element_s=4e-9, item_s=20e-9),
    "first convolution": Rates(_CALL, 60e9, 180e9, element_s=4e-9, item_s=20e-9),
    "depthwise convolution": Rates(_CONVOLUTION, 60e9, 75e9, element_s=4e-9),
    "first depthwise convolution": Rates(_CALL, 60e9, 75e9, element_s=4e-9),
    "codes convolution": Rates(4e-6, math.inf, 600e9, 30e9, 0.23e-9, 1.1e-9),
    "codes convolution by tiles": Rates(4e-6, math.inf, 2700e9, 30e9, 0.23e-9, 1.1e-9),
    "codes depthwise convolution": Rates(5.5e-6, flops_per_s=35e9, element_s=0.04e-9),
}
"""What an item is: of products, a matrix; of convolutions, a tap of a group; of those of codes, a
position of the result. What an element is: of convolutions, a position of the result of a
transposed one."""

_CACHED = 1 << 18  # bytes of a matrix that caches have
_FILTERS = 16  # convolutions compute filters in blocks of as many

_PRODUCTS = ("Gemm", "MatMul")
_ROUNDED = ("Conv", *_PRODUCTS)


def _convolution(node: Node, rounded: float) -> Workload:
    """The work of a convolution, or a chain that begins with one; ``rounded`` times as many
    operations are computed in the time of one."""
    first = parts(node)[0]
    w, group = weights_of(first.input(1)), first.attrs.get("group", 1)
    family, filters, taps, work = "convolution", _FILTERS, 0, flops(node)
    positions = 0.0
    if w is not None:
        transposed = first.op.name == "ConvTranspose"
        filters = w.shape[1] if transposed else w.shape[0] // group
        # Vectors of depthwise code are filled with channels, not with filters of a group.
        if w.shape[0] == group > 1 and filters == 1:
            family, filters, work = "depthwise convolution", group, work * (1 + transposed)
        elif group > 1:
            taps = group * math.prod(w.shape[2:])
        if transposed:
            positions = _positions(node, w.shape[2:])
    if node.inputs[0] is None or node.inputs[0].producer is None:
        family = f"first {family}"
    computed = work * math.ceil(filters / _FILTERS) * _FILTERS / max(filters, 1) / rounded
    copies_s = layout_seconds(node)[0]
    return Workload(family, moved_bytes(node), computed, 0, positions, taps, copies_s)


def _codes_convolution(node: Node, amx: bool) -> Workload | None:
    """The work of a convolution of 8-bit codes, by all filters of a group or one each; None for
    other nodes. ``amx``: the processor multiplies tiles."""
    conv = next((part for part in parts(node)[1:] if part.op.name == "Conv"), None)
    values = (node.outputs[0], None if conv is None else conv.inputs[1])
    types = [ANY if value is None else value.type for value in values]
    if conv is None or not all(isinstance(t, TensorType) and t.static for t in types):
        return None
    result, w = [t for t in types if isinstance(t, TensorType)]
    single = w.dims[1] == 1 and w.dims[0] == conv.attrs.get("group", 1)
    if conv.attrs.get("group", 1) > 1 and not single:
        return None
    elements = result.elements
    if single:
        taps = elements * math.prod(w.dims[2:])
        return Workload("codes depthwise convolution", flops=taps, elements=elements)
    family = "codes convolution by tiles" if amx else "codes convolution"
    positions = elements / max(w.dims[0], 1)
    return Workload(family, 0, flops(node), w.elements, elements, positions)


def _matrix_bytes(node: Node) -> int:
    """The size of the constant matrix of a product in float32; 0 for other nodes."""
    value = node.inputs[1] if node.op.name in _PRODUCTS else None
    if value is None or not value.is_constant or not isinstance(value.type, TensorType):
        return 0
    return value.type.nbytes if value.type.dtype == FLOAT32 else 0


def _matrices_of_codes(node: Node) -> int:
    """How many products of two matrices of codes that the run computes a fused node has."""
    product = next((part for part in parts(node)[1:] if part.op.name == "MatMul"), None)
    value = None if product is None else product.inputs[1]
    source = None if value is None else value.producer
    if source is None or source.op.name != "DequantizeLinear" or source.const(0) is not None:
        return 0
    type_ = ANY if node.outputs[0] is None else node.outputs[0].type
    if not isinstance(type_, TensorType) or not type_.static or len(type_.dims) < 3:
        return 0
    return math.prod(type_.dims[:-2])


def _positions(node: Node, kernel: Sequence[int]) -> float:
    """Positions of the result of a transposed convolution, which take time whatever it computes:
    twice where the bias and post-ops are a primitive of their own."""
    first, value = parts(node)[0], node.outputs[0]
    result = ANY if value is None else value.type
    if not isinstance(result, TensorType) or not result.static:
        return 0.0
    group, steps = first.attrs.get("group", 1), first.attrs.get("strides") or [1] * len(kernel)
    apart = group > 1 or any(k % step for k, step in zip(kernel, steps, strict=False))
    more = apart and (is_fused(node) or first.input(2) is not None)
    return (1 + more) * result.elements / max(result.dims[1], 1)


class OneDnnBackend(SpecializingBackend):
    """Runs the operations that oneDNN has primitives for. With ``precision="bf16"`` operands of
    convolutions and of products with constants are rounded to bfloat16, and summed in float32, if
    the processor has instructions for that. oneDNN is loaded at once, or ``lazy``, for the first
    node that it is asked for. Raises ``PenstockError``, then, if it is not installed."""

    name = "onednn"
    fuses = True
    making_s, unbound_s = 0.6e-3, 3e-6
    order_lacking = 1
    threads_of_caller = True  # as with OpenMP
    rates = RATES

    def __init__(self, precision: str = "float32", lazy: bool = False) -> None:
        super().__init__()
        self._precision, self._releasable = precision, False
        if not lazy:
            self.library  # noqa: B018 - loads it

    @cached_property
    def library(self) -> Library:
        """The library, loaded."""
        loaded = library()
        if loaded is None:
            raise PenstockError(
                "there is no oneDNN: install the wheel onednn-cpu-gomp, name a libdnnl.so.3 in "
                "PENSTOCK_DNNL, or choose other backends with backends="
            )
        return loaded

    @property
    def narrow(self) -> bool:
        """Whether products may be rounded to bfloat16."""
        return self._precision == "bf16" and self.library.bfloat16

    def unbound_cost(self, node: Node) -> float:
        """As ``SpecializingBackend``. Convolutions want layouts of their own, and shapes that only
        runs know seldom come again: a call makes a primitive, and copies image and weights."""
        if "Conv" not in parts(node)[0].op.name:
            return self.unbound_s
        tensors = [v.type for v in (*node.inputs[:2], node.outputs[0]) if v is not None]
        copied = sum([t.nbytes for t in tensors if isinstance(t, TensorType) and t.static])
        # A copy reads each byte and writes it.
        return self.making_s + 2 * copied / RATES[""].bytes_per_s

    def work(self, node: Node) -> Workload | None:
        name = node.op.full_name
        if name not in FAMILIES and name not in _OF_CODES and not is_fused(node):
            return None
        first = parts(node)[0]
        # Rounded to two bytes, operands are read in half of the time, and multiplied in half of it.
        rounded = 1 + (self.narrow and flops(node) >= WORTH_ROUNDING)
        if first.op.full_name in ("Conv", "ConvTranspose"):
            return _convolution(node, rounded)
        if name not in FAMILIES and is_fused(node):
            codes = _codes_convolution(node, "AMX" in self.library.isa)
            if codes is not None:
                return codes
        moved, work = moved_bytes(node), flops(node)
        if weights := _matrix_bytes(first):
            # Small matrices stay in a cache from one run to the next.
            read = max(weights - _CACHED, 0) / rounded
            return Workload("product", moved, work / rounded, read)
        matrices = _matrices_of_codes(node)
        return Workload("codes product" if matrices else "", moved, work, items=matrices)

    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        try:
            if parts(node)[0].op.full_name in _IN_PARTS:
                desc, make = self._desc(node, types), partial(self._spec, node, types)
                if desc is None:
                    return None
                kernel = _KERNEL_IN_PARTS(self.library, make, desc, flops(node))
                return self._told(kernel, node, desc)
            spec = self._spec(node, types)
            return None if spec is None else _KERNEL_OF(self.library, spec)
        except DnnlError:
            return None

    def _rounds(self, node: Node, desc: OpDesc) -> bool:
        """Whether operands of a product are rounded to bfloat16."""
        return self.narrow and desc.scaling is None and flops(node) >= WORTH_ROUNDING

    def _told(self, kernel: Kernel | None, node: Node, desc: OpDesc) -> Kernel | None:
        """``kernel``, which says to which dtype it rounds operands."""
        if kernel is None or parts(node)[0].op.name not in _ROUNDED:
            return kernel
        if not self._rounds(node, desc):
            return kernel
        return replace(kernel, operand_dtype="bfloat16")

    def supports(self, node: Node) -> bool:
        types = [None if value is None else value.type for value in node.inputs]
        return self._spec(node, types) is not None

    def _desc(self, node: Node, types: Sequence[Type | None]) -> OpDesc | None:
        """The descriptor of a node that begins with an operation of ``FAMILIES`` or with codes."""
        name = parts(node)[0].op.full_name
        if name in _OF_CODES:
            return _CODES_DESC(node, types) if self.library.int8 else None
        return _OP_DESC_OF(node, types, _MOVED if name in MOVING else (FLOAT32,))

    def _spec(
        self, node: Node, types: Sequence[Type | None], desc: OpDesc | None = None
    ) -> PrimitiveSpec | None:
        """The specification of the primitive of a node, or of its part ``desc``, if any."""
        nodes = parts(node)
        name = nodes[0].op.full_name
        family = _QUANTIZED if name in _OF_CODES else FAMILIES.get(name)
        if family is None or is_eltwise_chain(nodes):
            return None
        desc = desc or self._desc(node, types)
        spec = None if desc is None else family(desc)
        if spec is None:
            return None
        if self._releasable:
            spec = replace(spec, releasable=True)
        if self._rounds(node, spec.desc):
            spec = replace(spec, narrow=True)
        return spec

    def copies_of(self, constant: np.ndarray) -> Mapping[str, np.ndarray]:
        from penstock.backends.onednn.weights import copies_of

        return copies_of(constant)

    def saved_copies(self, constant: np.ndarray, copies: Mapping[str, np.ndarray]) -> object:
        from penstock.backends.onednn.weights import OWNER
        from penstock.ops.common.constant_cache import SavedCopies

        return SavedCopies(OWNER, constant, copies)

    @property
    def threads(self) -> int:
        return core_budget()

    @property
    def openmp(self) -> int:
        library = self.library
        function = library.ffi.addressof(library.lib, "omp_set_num_threads")
        return int(library.ffi.cast("intptr_t", function))

    def set_threads(self, threads: int) -> None:
        self.library.set_threads(threads)

    def save_memory(self) -> None:
        self._releasable = True

    expect_many_shapes = save_memory
