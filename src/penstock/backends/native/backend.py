"""The native backend: kernels of the families that are registered in this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from penstock.backends.dynamic_shapes import SpecializingBackend
from penstock.backends.native import RATES, family_of
from penstock.backends.native.kernel import NativeCall, Site, native_kernel, open_site, site_of
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import PenstockError
from penstock.core.records import replace
from penstock.core.types import Type
from penstock.host.native import NativeLibrary, library
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.kernel import NO_PACKED_CONSTANTS, Kernel
from penstock.ops.common.constant_cache import REORDERED, SavedCopies, copies_of
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import WORTH_ROUNDING, Workload, flops

_PRODUCTS = ("Gemm", "MatMul")


def _touches_objects(site: Site, call: NativeCall) -> bool:
    """Whether a call would copy references to Python's objects, such as strings, which it cannot
    count."""
    tensors = site.tensors
    if call.finish is not None:
        tensors = (*tensors[: len(site.node.inputs)], *call.finish.writes)
    return any(t is not None and t.dtype is not None and t.dtype.hasobject for t in tensors)


class NativeBackend(SpecializingBackend):
    """Penstock's compiled kernels: those in ``loaded``, by default those for this processor. With
    ``precision="bf16"`` large products are left to backends that round their operands. Raises
    ``PenstockError`` if they were not compiled when Penstock was installed."""

    name = "native"
    fuses = True
    making_s, unbound_s = 0.15e-3, 0.25e-6
    order_lacking = -1
    threads_of_caller = True
    rates = RATES

    def __init__(self, loaded: NativeLibrary | None = None, *, precision: str = "float32") -> None:
        super().__init__()
        self._rounds = precision == "bf16"
        loaded = loaded or library()
        if loaded is None:
            raise PenstockError(
                "there are no compiled kernels: install Penstock with a C compiler, such as gcc; "
                "PENSTOCK_NATIVE=off turns them off"
            )
        self.library = loaded

    def work(self, node: Node) -> Workload | None:
        family = family_of(node)
        return None if family is None or self._leaves(node) else family.work(node)

    def _leaves(self, node: Node) -> bool:
        """Whether a node is left to backends that round the operands of products."""
        is_product = parts(node)[0].op.full_name in _PRODUCTS
        return self._rounds and is_product and flops(node) >= WORTH_ROUNDING

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = family_of(node)
        if family is None:
            return None
        if family.any_shape is not None:
            kernel = family.any_shape(self.library, node, types)
            if kernel is not None:
                # With known shapes, a call that is bound ahead spares a look at these in each run.
                static = self.static_kernel(node, types)
                # Its own function takes inputs in one layout.
                return kernel if static is None else replace(static, function=kernel.function)
        if family.static is None:
            return None
        kernel = super().kernel(node, types)
        if family.ahead_of_cache is None or kernel is None:
            return kernel
        is_open = kernel.shapes.cached_bytes is not None
        takes_gaps = node.op.name in _PRODUCTS and not kernel.layout.contiguous
        if not is_open and (not takes_gaps or kernel.packed is not NO_PACKED_CONSTANTS):
            return kernel
        # It takes arrays of any shapes, so that new ones need no kernel of their own, nor an entry
        # of a cache; products also of any strides, which the function of known shapes would copy.
        call = family.ahead_of_cache(open_site(self.library, node, types))
        if call is None:
            return kernel
        function, settings = call
        return replace(kernel, function=partial(function, kernel.function, checkpoint, settings))

    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = family_of(node)
        if family is None or family.static is None or self._leaves(node):
            return None
        site = site_of(self.library, node, types, data_dependent=family.data_dependent)
        call = None if site is None else family.static(site)
        if site is None or call is None or _touches_objects(site, call):
            return None
        if call.can_fail and not call.items:
            return None  # nothing would look at the inputs, which may be at fault
        return native_kernel(site, call)

    def copies_of(self, constant: np.ndarray) -> Mapping[str, np.ndarray]:
        return copies_of(constant)

    def saved_copies(self, constant: np.ndarray, copies: Mapping[str, np.ndarray]) -> object:
        return SavedCopies(REORDERED, constant, copies)

    @property
    def threads(self) -> int:
        return core_budget()

    @property
    def set_threads(self) -> Callable[[int], None]:
        """The compiled function: each run calls it."""
        function: Callable[[int], None] = self.library.functions.set_threads
        return function
