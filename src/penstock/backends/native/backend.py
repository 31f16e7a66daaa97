"""The native backend: which family of compiled kernels runs which operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.backends.base import HostBackend
from penstock.backends.native.cumulative import cumulative
from penstock.backends.native.elementwise import FORMULAS, elementwise_call, estimated_ns
from penstock.backends.native.features import (
    array_feature_extractor,
    imputer,
    label_encoder,
    normalizer,
    one_hot_encoder,
    scaler,
)
from penstock.backends.native.index import by_elements, by_tuples, top_k_call
from penstock.backends.native.kernel import NativeCall, Site, native_kernel, site_of
from penstock.backends.native.library import NativeLibrary, library
from penstock.backends.native.models import vector_model
from penstock.backends.native.normalization import group_normalization
from penstock.backends.native.recurrent import recurrent_call, recurrent_seconds
from penstock.backends.native.regions import roi_align, suppress
from penstock.backends.native.resize import resize
from penstock.backends.native.rows import row_reduction
from penstock.backends.native.sampling import affine_grid, grid_sample
from penstock.backends.native.trees import tree_ensemble
from penstock.backends.native.windows import col2im, max_pool
from penstock.backends.numpy import NumpyBackend
from penstock.errors import PenstockError
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.ops.internal.fused import FUSED
from penstock.types import TensorType, Type

Family = Callable[[Site], NativeCall | None]

_CLASSICAL: dict[Family, tuple[str, ...]] = {
    array_feature_extractor: ("ArrayFeatureExtractor",),
    imputer: ("Imputer",),
    label_encoder: ("LabelEncoder",),
    normalizer: ("Normalizer",),
    one_hot_encoder: ("OneHotEncoder",),
    scaler: ("Scaler",),
    tree_ensemble: ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"),
    vector_model: ("LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor"),
}

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

_OTHERS: dict[str, Family] = {
    "Col2Im": col2im,
    "MaxPool": max_pool,
    "NonMaxSuppression": suppress,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent_call),
    **dict.fromkeys(
        ("ArgMax", "ArgMin", *(f"Reduce{name}" for name in _REDUCTIONS)), row_reduction
    ),
    **dict.fromkeys(("CumProd", "CumSum"), cumulative),
    **{f"ai.onnx.ml.{name}": family for family, names in _CLASSICAL.items() for name in names},
}
_IMAGES: dict[str, Family] = {
    **dict.fromkeys(("GroupNormalization", "InstanceNormalization"), group_normalization),
    **dict.fromkeys(("GatherElements", "ScatterElements"), by_elements),
    **dict.fromkeys(("GatherND", "ScatterND"), by_tuples),
    "AffineGrid": affine_grid,
    "GridSample": grid_sample,
    "RoiAlign": roi_align,
    "Resize": resize,
    "TopK": top_k_call,
}
FAMILIES: dict[str, Family] = {
    **dict.fromkeys((*FORMULAS, "Cast", FUSED.full_name), elementwise_call),
    **_IMAGES,
    **_OTHERS,
}
"""by operation, the function that chooses a compiled kernel and its arguments"""

_FINISHED = frozenset({suppress})
"""families of outputs whose shapes depend on data"""

_SECONDS: dict[str, Callable[[Node], float]] = {
    **dict.fromkeys(("GRU", "LSTM", "RNN"), recurrent_seconds),
}
"""estimates of the time of operations that other backends compute as well"""


# Approximate costs on one core: of a call that does nothing, and bytes a second in the cache.
_CALL_S = 0.3e-6
_BYTES_PER_S = 60e9
_IMAGE_NS = 0.05  # an element of a result


class NativeBackend(HostBackend):
    """Penstock's compiled kernels: those in ``loaded``, by default those for this processor. Raises
    ``PenstockError`` if they were not compiled when Penstock was installed."""

    name = "native"
    fuses = True
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
        estimate = _SECONDS.get(node.op.full_name)
        if estimate is not None:
            return estimate(node)
        element_ns = _IMAGE_NS if node.op.full_name in _IMAGES else estimated_ns(node)
        if element_ns is None:
            # Compiled kernels are there because they are faster.
            return self._numpy.seconds(node) / 2 if node.op.full_name in _OTHERS else math.inf
        values = (*node.inputs, *node.outputs)
        types_ = [v.type for v in values if v is not None and v.const is None]
        tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
        if len(tensors) < len(types_):
            return math.inf
        moved = sum(t.nbytes for t in tensors)
        return _CALL_S + moved / _BYTES_PER_S + tensors[-1].elements * element_ns * 1e-9

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = FAMILIES.get(node.op.full_name)
        finished = family in _FINISHED
        site = None if family is None else site_of(self.library, node, types, finished=finished)
        call = None if family is None or site is None else family(site)
        return None if call is None or site is None else native_kernel(site, call)

    @property
    def threads(self) -> int:
        return core_budget()

    def set_threads(self, threads: int) -> None:
        self.library.set_threads(threads)
