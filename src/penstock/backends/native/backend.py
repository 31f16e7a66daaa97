"""The native backend: the kernel families that are registered in this folder."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from penstock.backends.native import RATES, family_of
from penstock.backends.native.kernel import (
    ROUNDED,
    NativeCall,
    Site,
    UnsupportedError,
    native_kernel,
    open_site,
    site_of,
)
from penstock.backends.specializing import SpecializingBackend
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import PenstockError
from penstock.core.records import replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary, library
from penstock.host.threads import core_budget
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import NO_PACKED_CONSTANTS, Kernel
from penstock.ops.common.constant_cache import REORDERED, SavedCopies, copies_of
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.internal.fused import parts, rounds_operand
from penstock.ops.work_estimate import WORTH_ROUNDING, Workload, flops

_PRODUCTS = ("Gemm", "MatMul")
# Workload families, and the multiplications per element of x that justify rounding it.
_ROUNDED, _LEAST_USES = frozenset({"dense", "image"}), 32


def _touches_objects(site: Site, call: NativeCall) -> bool:
    """Whether a call would copy references to Python objects without counting them."""
    tensors = site.tensors
    if call.finish is not None:
        tensors = (*tensors[: len(site.node.inputs)], *call.finish.writes)
    for type_ in tensors:  # a loop: this is asked for each kernel
        if type_ is not None and type_.dtype is not None and type_.dtype.hasobject:
            return True
    return False


def _in_any_order(node: Node) -> bool:
    """Whether results do not depend on the summation order, which follows the memory layout."""
    op = parts(node)[0].op
    return op.elementwise or op.moves or op.view or "Max" in op.name or "Min" in op.name


def _without_rounding(node: Node) -> Node:
    from penstock.ops.internal.rounded_operand import without_rounding  # rarely needed

    return without_rounding(node)


class NativeBackend(SpecializingBackend):
    """Penstock's compiled kernels: those in ``loaded``, by default those for this processor. With
    ``precision="bf16"``, operands of large products and convolutions with constants are rounded to
    bfloat16 and accumulated in float32, if the processor has instructions for that.
    ``reproducible``: products of dynamic shapes equal those of static ones. Raises
    ``PenstockError`` if the kernels were not compiled when Penstock was installed."""

    name = "native"
    fuses = True
    making_s, unbound_s = 0.15e-3, 0.25e-6
    threads_of_caller = True
    rates = RATES

    def __init__(
        self,
        loaded: NativeLibrary | None = None,
        *,
        precision: str = "float32",
        reproducible: bool = False,
    ) -> None:
        loaded = loaded or library()
        if loaded is None:
            raise PenstockError(
                "there are no compiled kernels: install Penstock with a C compiler, such as gcc; "
                "PENSTOCK_NATIVE=off turns them off"
            )
        self.library, self._precision, self.reproducible = loaded, precision, reproducible
        self.narrow = precision == "bf16" and bool(loaded.multiplies_bfloat16)
        """whether operands of large products are rounded to bfloat16"""

    def work(self, node: Node) -> Workload | None:
        rounded = "region" in node.attrs and rounds_operand(node)
        if rounded:
            if not self._rounds_for_models:
                return None
            node = _without_rounding(node)
        family = family_of(node)
        work = None if family is None else family.work(node)
        if work is None or work.family not in _ROUNDED:
            return work
        if not rounded and not (self.narrow and self._rounds(node)):
            return work
        # A pair is multiplied, and read, in the time of one float32 number.
        return work._replace(flops=work.flops / 2, weights=work.weights / 2)

    def outruns(self, node: Node) -> str:
        """NumPy's name, except for elementwise and float64 nodes, where it has faster functions
        than the C library. Of 500 nodes of models, estimates never preferred NumPy."""
        x = node.inputs[0] if node.inputs else None
        is_double = x is not None and isinstance(x.type, TensorType) and x.type.dtype == FLOAT64
        return "" if node.op.elementwise or is_double else "numpy"

    @property
    def _rounds_for_models(self) -> bool:
        """Whether kernels may perform the model's own rounding to bfloat16. They flush subnormals
        to 0, and have another summation order."""
        if self.reproducible or self._precision == "strict":
            return False
        return bool(self.library.multiplies_bfloat16)

    def _rounds(self, node: Node) -> bool:
        """Whether operands of a node are rounded where they may be: if it is a suitable product."""
        first = parts(node)[0]
        x = first.inputs[0].type if first.inputs and first.inputs[0] else None
        if not isinstance(x, TensorType) or not x.static:
            return False
        return flops(first) >= max(WORTH_ROUNDING, 2 * _LEAST_USES * x.elements)

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = family_of(node)
        if family is None:
            return None
        if family.any_shape is not None:
            kernel = family.any_shape(self.library, node, types)
            if kernel is not None:
                # With static shapes, a bound call needs no shape checks in each run.
                static = self.static_kernel(node, types)
                # The static kernel's own function takes inputs in one layout only.
                return kernel if static is None else replace(static, function=kernel.function)
        if family.static is None:
            return None
        kernel = super().kernel(node, types)
        if family.ahead_of_cache is None or kernel is None or self.reproducible:
            return kernel
        is_open = kernel.shapes.cached_bytes is not None
        takes_gaps = node.op.name in _PRODUCTS and not kernel.layout.contiguous
        if not is_open and (not takes_gaps or kernel.packed is not NO_PACKED_CONSTANTS):
            return kernel
        # It takes arrays of any shape, so new shapes need no kernel and no cache entry; products
        # also take any strides, which the static kernel's function would copy.
        try:
            call = family.ahead_of_cache(open_site(self.library, node, types))
        except UnsupportedError:
            call = None
        if call is None:
            return kernel
        function, settings = call
        given = partial(function, kernel.function, checkpoint, settings)
        return replace(kernel, function=given, packed=NO_PACKED_CONSTANTS)

    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        rounded = "region" in node.attrs and rounds_operand(node)
        exact = self._precision == "strict"
        if rounded:
            if not self._rounds_for_models:
                return None
            node = _without_rounding(node)
        family = family_of(node)
        if family is None or family.static is None:
            return None
        site = site_of(self.library, node, types, data_dependent=family.data_dependent)
        rounds = rounded or (self.narrow and self._rounds(node))
        if site is not None and (self.reproducible or rounds or exact):
            site = replace(site, rounds=rounds, ordered=self.reproducible, exact=exact)
        try:
            call = None if site is None else family.static(site)
        except UnsupportedError:
            return None
        if site is None or call is None or _touches_objects(site, call):
            return None
        if rounded and not call.kernel.startswith(ROUNDED):
            return None
        if call.can_fail and not call.items:
            return None  # the inputs, which may be invalid, would not be checked
        if self.reproducible and not call.dims_order and not _in_any_order(node):
            call = replace(call, restrided=None, any_layout=False)
        return native_kernel(site, call)

    def copies_of(self, constants: Sequence[Value]) -> Sequence[Mapping[str, np.ndarray]]:
        return copies_of(constants)

    def saved_copies(self, constant: np.ndarray, copies: Mapping[str, np.ndarray]) -> object:
        return SavedCopies(REORDERED, constant, copies)

    @property
    def threads(self) -> int:
        return core_budget()

    @property
    def set_threads(self) -> Callable[[int], None]:
        """Return the compiled function that sets the number of threads, which each run calls."""
        function: Callable[[int], None] = self.library.functions.set_threads
        return function


def reproducible_backend() -> NativeBackend:
    """Return the backend for ``reproducible=True``, with equal results on all processors that it
    supports. Raises ``PenstockError`` on others."""
    loaded = library()
    if not is_reproducible(loaded):
        raise PenstockError(
            "reproducible=True needs kernels for x86-64-v3 or -v4 (on other processors, any), "
            f"and this process has {loaded.level if loaded else 'none'}: use a processor with AVX2 "
            "and FMA, install a wheel, or with a C compiler, and unset PENSTOCK_NATIVE"
        )
    return NativeBackend(loaded, reproducible=True)


def is_reproducible(loaded: NativeLibrary | None) -> bool:
    """Whether kernels have the same bits as those of all libraries of the platform of which this is
    true: on x86-64, those with fused multiply-add."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return loaded is not None and (loaded.level in ("x86-64-v4", "x86-64-v3") or not is_x86)
