"""The native backend: which family of compiled kernels runs which operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.backends.base import HostBackend
from penstock.backends.native.cumulative import cumulative
from penstock.backends.native.kernel import NativeCall, Site, native_kernel, site_of
from penstock.backends.native.library import NativeLibrary, library
from penstock.backends.native.trees import tree_ensemble
from penstock.backends.numpy import NumpyBackend
from penstock.errors import PenstockError
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.types import Type

Family = Callable[[Site], NativeCall | None]

_TREES = [
    f"ai.onnx.ml.{name}"
    for name in ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
]

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("CumProd", "CumSum"), cumulative),
    **dict.fromkeys(_TREES, tree_ensemble),
}
"""by operation, the function that chooses a compiled kernel and its arguments"""


class NativeBackend(HostBackend):
    """Penstock's compiled kernels: those in ``loaded``, by default those for this processor. Raises
    ``PenstockError`` if they were not compiled when Penstock was installed."""

    name = "native"
    threads_of_caller = True  # as with OpenMP

    def __init__(self, loaded: NativeLibrary | None = None) -> None:
        loaded = loaded or library()
        if loaded is None:
            raise PenstockError(
                "there are no compiled kernels: install Penstock with a C compiler, such as gcc; "
                "PENSTOCK_NATIVE=off turns them off"
            )
        self.library = loaded
        self._numpy = NumpyBackend()

    def seconds(self, node: Node) -> float:
        # Compiled kernels are there because they are faster than NumPy's.
        return self._numpy.seconds(node) / 2

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = FAMILIES.get(node.op.full_name)
        site = None if family is None else site_of(node, types)
        call = None if family is None or site is None else family(site)
        return None if call is None or site is None else native_kernel(self.library, site, call)

    @property
    def threads(self) -> int:
        return core_budget()

    def set_threads(self, threads: int) -> None:
        self.library.set_threads(threads)
