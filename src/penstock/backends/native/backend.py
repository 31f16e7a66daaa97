"""The native backend: which family of compiled kernels runs which operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.dynamic_shapes import SpecialisingBackend
from penstock.backends.native.elementwise import OPERATIONS, elementwise_call, estimated_ns
from penstock.backends.native.kernel import NativeCall, Site, native_kernel, site_of
from penstock.backends.numpy import NumpyBackend
from penstock.core.errors import PenstockError
from penstock.core.records import dataclass, replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary, library
from penstock.host.on_demand import imported
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.common.constant_cache import REORDERED, SavedCopies, copies_of
from penstock.ops.internal.fused import FUSED, has_softmax, parts
from penstock.ops.internal.transfer import REORDER
from penstock.ops.registry import MICROSOFT, TENSORFLOW
from penstock.ops.work_estimate import WORTH_ROUNDING, flops

Seconds = Callable[[Node], float]

# Approximate costs on one core: of a call that does nothing, bytes a second in the cache, and an
# element of a result.
_CALL_S = 0.12e-6
_BYTES_PER_S, _GATHERED_PER_S = 60e9, 8e9
_ELEMENT_NS = 0.05

_NUMPY = NumpyBackend()


def _of(name: str) -> Callable[..., Any]:
    """A function of a module of this folder, which is imported when the function is called."""
    return imported(f"penstock.backends.native.{name}")


_ATTENTION_CALL = _of("heads.attention_call")
_ATTENTION_SECONDS = _of("heads.attention_seconds")
_CODE_CONVOLUTION = _of("quantized_convolution.quantized_convolution")
_CODE_SECONDS = _of("quantized_convolution.code_seconds")
_DENSE_CALL = _of("dense.dense_call")
_DENSE_SECONDS = _of("dense.dense_seconds")
_IMAGE_CONVOLUTION = _of("image_convolution.image_convolution")
_IMAGE_SECONDS = _of("image_convolution.image_seconds")
_PRODUCT = _of("matmul.product")
_PRODUCT_SECONDS = _of("matmul.product_seconds")
_ANY_SHAPE_FUNCTION = _of("any_shape.any_shape_function")
_VIEW_KERNEL = _of("any_shape.any_shape_view")
_PLANE_CONVOLUTION = _of("convolution.convolution_call")
_PLANE_SECONDS = _of("convolution.convolution_seconds")


def _is_quantized_product(node: Node) -> bool:
    """Whether a fused node may be one that ``quantized_convolution`` has a kernel for."""
    names = [part.op.full_name for part in parts(node)]
    product = "Conv" in names or "Gemm" in names
    return names[0] == "DequantizeLinear" and product and names[-1] == "QuantizeLinear"


def _below_numpy(node: Node) -> float:
    """Half of NumPy's time: compiled kernels are there because they are faster."""
    return _NUMPY.seconds(node) / 2


def _by_memory(node: Node, element_ns: float = _ELEMENT_NS) -> float:
    """By what is read and written, and the elements of the result; infinite if a shape is
    unknown."""
    values = (*node.inputs, *node.outputs)
    types_ = [v.type for v in values if v is not None and not v.is_constant]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return math.inf
    moved = sum(t.nbytes for t in tensors)
    return _CALL_S + moved / _BYTES_PER_S + tensors[-1].elements * element_ns * 1e-9


def _by_result(node: Node) -> float:
    """By the bytes of the result: of the rest, only some is read."""
    types_ = [v.type for v in node.outputs if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return math.inf
    return _CALL_S + sum([t.nbytes for t in tensors]) / _GATHERED_PER_S


def _by_program(node: Node) -> float:
    if parts(node)[0].op.full_name == "Conv":
        return float(_IMAGE_SECONDS(node))
    if has_softmax(node):
        return float(_ATTENTION_SECONDS(node))
    if parts(node)[0].op.full_name in _PRODUCTS:
        return float(_DENSE_SECONDS(node))
    if _is_quantized_product(node):
        return float(_CODE_SECONDS(node))
    element_ns = estimated_ns(node)
    return math.inf if element_ns is None else _by_memory(node, element_ns)


def _fused_call(site: Site) -> NativeCall | None:
    if parts(site.node)[0].op.full_name == "Conv":
        return _IMAGE_CONVOLUTION(site)
    if has_softmax(site.node):
        return _ATTENTION_CALL(site)
    if parts(site.node)[0].op.full_name in _PRODUCTS:
        return _DENSE_CALL(site)
    return (_CODE_CONVOLUTION if _is_quantized_product(site.node) else elementwise_call)(site)


def _product_seconds(node: Node) -> float:
    seconds = float(_DENSE_SECONDS(node))
    return seconds if seconds < math.inf else float(_PRODUCT_SECONDS(node))


def _product_call(site: Site) -> NativeCall | None:
    """With a constant matrix, or of small ones."""
    return _DENSE_CALL(site) or _PRODUCT(site)


def _convolution_seconds(node: Node) -> float:
    return float(min(_PLANE_SECONDS(node), _IMAGE_SECONDS(node)))


def _convolution_call(site: Site) -> NativeCall | None:
    """With channels innermost, or in the images' own order."""
    families = [_IMAGE_CONVOLUTION, _PLANE_CONVOLUTION]
    if _IMAGE_SECONDS(site.node) > _PLANE_SECONDS(site.node):
        families.reverse()
    calls = (family(site) for family in families)
    return next((call for call in calls if call is not None), None)


@dataclass(frozen=True, slots=True)
class Family:
    """Compiled kernels of some operations: ``choose`` returns the kernel and its arguments for a
    node, ``seconds`` an estimate of its time. ``data_dependent``: the shapes of the outputs follow
    from data, and ``choose`` is asked without them."""

    choose: Callable[[Site], NativeCall | None]
    seconds: Seconds = _below_numpy
    data_dependent: bool = False


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_POOLINGS = tuple(
    [p + name for name in ("AveragePool", "LpPool", "MaxPool") for p in ("", "Global")]
)
_PRODUCTS = ("Gemm", "MatMul")
_ML = "ai.onnx.ml."
_TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")
_VECTOR_MODELS = ("LinearClassifier", "LinearRegressor", "SVMClassifier", "SVMRegressor")

_FAMILIES: dict[tuple[str, ...], Family] = {
    OPERATIONS: Family(elementwise_call, _by_program),
    (FUSED.full_name,): Family(_fused_call, _by_program),
    ("AffineGrid",): Family(_of("sampling.affine_grid"), _by_memory),
    ("ArgMax", "ArgMin", *[f"Reduce{name}" for name in _REDUCTIONS]): Family(
        _of("reduce.reduction_call"), _by_memory
    ),
    ("Col2Im",): Family(_of("windows.col2im")),
    ("Concat",): Family(_of("arrays.join_call")),
    ("Conv",): Family(_convolution_call, _convolution_seconds),
    ("ConvInteger",): Family(_of("quantized_convolution.integer_convolution"), _CODE_SECONDS),
    ("ConvTranspose",): Family(_PLANE_CONVOLUTION, _PLANE_SECONDS),
    ("CumProd", "CumSum"): Family(_of("cumulative.cumulative")),
    ("DeformConv",): Family(_of("deformable.deform_conv")),
    ("DynamicQuantizeLinear",): Family(_of("integers.dynamically_quantized"), _by_memory),
    ("EyeLike",): Family(_of("select.eye_like")),
    ("penstock.ChosenMatMul",): Family(_of("matmul.chosen_product")),
    ("penstock.GruCell",): Family(_of("cells.gru_cell"), _by_memory),
    ("penstock.GruGates",): Family(_of("cells.gru_gates"), _by_memory),
    ("penstock.GruState",): Family(_of("cells.gru_state"), _by_memory),
    ("penstock.LstmCell",): Family(_of("cells.lstm_cell"), _by_memory),
    ("penstock.Recurrence",): Family(
        _of("recurrent.recurrence_call"), _of("recurrent.recurrence_seconds")
    ),
    ("GRU", "LSTM", "RNN"): Family(
        _of("recurrent.recurrent_call"), _of("recurrent.recurrent_seconds")
    ),
    (f"{MICROSOFT}.DynamicQuantizeLSTM",): Family(_of("recurrent.recurrent_call")),
    ("Gather",): Family(_of("index.gather_call"), _by_result),
    ("GatherElements", "ScatterElements"): Family(_of("index.by_elements"), _by_memory),
    ("GatherND", "ScatterND"): Family(_of("index.by_tuples"), _by_memory),
    ("GridSample",): Family(_of("sampling.grid_sample"), _by_memory),
    ("GroupNormalization", "InstanceNormalization"): Family(
        _of("normalization.group_normalization"), _by_memory
    ),
    ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"): Family(
        _of("normalization.layer_normalization"), partial(_by_memory, element_ns=0.3)
    ),
    ("MatMulInteger", "QLinearMatMul", f"{MICROSOFT}.QGemm"): Family(
        _of("integers.integer_product"), _of("integers.integer_seconds")
    ),
    _PRODUCTS: Family(_product_call, _product_seconds),
    ("Pad",): Family(_of("resize.pad"), _by_memory),
    ("Hardmax", "LogSoftmax", "Softmax"): Family(
        _of("softmax.softmax_call"), partial(_by_memory, element_ns=0.2)
    ),
    ("MaxRoiPool",): Family(_of("regions.max_roi_pool"), _by_memory),
    _POOLINGS: Family(_of("pooling.pooling_call"), _by_memory),
    ("NonMaxSuppression",): Family(_of("regions.suppress"), data_dependent=True),
    ("OneHot",): Family(_of("select.one_hot")),
    ("Resize",): Family(_of("resize.resize"), _by_memory),
    ("ReverseSequence",): Family(_of("select.reverse_sequence")),
    ("RotaryEmbedding", f"{MICROSOFT}.RotaryEmbedding"): Family(_of("rotary.rotary"), _by_memory),
    ("RoiAlign",): Family(_of("regions.roi_align"), _by_memory),
    ("TopK",): Family(_of("index.top_k_call"), _by_memory),
    ("Trilu",): Family(_of("select.trilu")),
    (_ML + "ArrayFeatureExtractor",): Family(_of("features.array_feature_extractor")),
    (_ML + "Imputer",): Family(_of("features.imputer")),
    (_ML + "LabelEncoder",): Family(_of("features.label_encoder")),
    (_ML + "Normalizer",): Family(_of("features.normalizer")),
    (_ML + "OneHotEncoder",): Family(_of("features.one_hot_encoder")),
    (_ML + "Scaler",): Family(_of("features.scaler")),
    (f"{MICROSOFT}.MatMulNBits",): Family(_of("blocks.block_product")),
    (f"{MICROSOFT}.QMoE",): Family(_of("blocks.experts_call")),
    tuple([_ML + name for name in _TREES]): Family(_of("trees.tree_ensemble")),
    tuple([_ML + name for name in _VECTOR_MODELS]): Family(_of("models.vector_model")),
}
FAMILIES = {name: family for names, family in _FAMILIES.items() for name in names}
"""the families of compiled kernels, by the full name of the operation"""
_TEXTS = ("CategoryMapper", "LabelEncoder", "OneHotEncoder", "ZipMap")
_STRINGS = ("RegexFullMatch", "StringSplit", "TfIdfVectorizer")
# Of ops/internal, whose modules are imported for graphs that have them.
_APPEND, _ATTEND = "penstock.Append", "penstock.Attend"
_VIEWS = ("Expand", "Range", "Reshape", "Slice")  # where dims of the result are unknown
_VARIABLES = [f"{TENSORFLOW}.{name}VariableOp" for name in ("Assign", "Read")]
_OF_ANY_SHAPES = {
    **dict.fromkeys(
        (_APPEND, "Concat", "Tile", REORDER.full_name, *_VARIABLES),
        _of("arrays.array_kernel"),
    ),
    _ATTEND: _of("any_shape.attend_kernel"),
    **dict.fromkeys(
        ("Attention", f"{MICROSOFT}.GroupQueryAttention"), _of("any_shape.attention_kernel")
    ),
    **dict.fromkeys(
        (
            *_STRINGS,
            f"{MICROSOFT}.MurmurHash3",
            f"{MICROSOFT}.Tokenizer",
            *[_ML + name for name in _TEXTS],
        ),
        _of("text.text_kernel"),
    ),
}
"""chooses kernels that take arrays of any shapes"""


def _is_static(node: Node) -> bool:
    """Whether the dims of the first output are known."""
    value = node.outputs[0]
    return value is None or not isinstance(value.type, TensorType) or value.type.static


def _touches_objects(site: Site, call: NativeCall) -> bool:
    """Whether a call would copy references to Python's objects, such as strings, which it cannot
    count. Output 0 may be of ``texts``."""
    first = len(site.node.inputs)
    return any(
        type_ is not None and type_.dtype is not None and type_.dtype.hasobject
        for i, type_ in enumerate(site.tensors)
        if call.texts is None or i != first
    )


class NativeBackend(SpecialisingBackend):
    """Penstock's compiled kernels: those in ``loaded``, by default those for this processor. With
    ``precision="bf16"`` large products are left to backends that round their operands. Raises
    ``PenstockError`` if they were not compiled when Penstock was installed."""

    name = "native"
    fuses = True
    making_s, unbound_s = 0.15e-3, 0.25e-6
    order_lacking = -1
    threads_of_caller = True  # as with OpenMP

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

    def seconds(self, node: Node) -> float:
        if node.op.full_name in _VIEWS:
            return _CALL_S
        if node.op.full_name in _OF_ANY_SHAPES:
            return _below_numpy(node)
        family = FAMILIES.get(node.op.full_name)
        return math.inf if family is None or self._leaves(node) else family.seconds(node)

    def _leaves(self, node: Node) -> bool:
        """Whether a node is left to backends that round the operands of products."""
        is_product = parts(node)[0].op.full_name in _PRODUCTS
        return self._rounds and is_product and flops(node) >= WORTH_ROUNDING

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        if node.op.full_name in _VIEWS:
            return None if _is_static(node) else _VIEW_KERNEL(self.library, node, types)
        chosen = _OF_ANY_SHAPES.get(node.op.full_name)
        if chosen is None:
            return self._any_shape_kernel(node, types, super().kernel(node, types))
        kernel, static = chosen(self.library, node, types), self.static_kernel(node, types)
        if kernel is None or static is None:
            return kernel or super().kernel(node, types)
        return replace(static, function=kernel.function)  # which takes inputs in any layout

    def _any_shape_kernel(
        self, node: Node, types: Sequence[Type | None], kernel: Kernel | None
    ) -> Kernel | None:
        """``kernel``, if it is for known shapes, or one that takes any."""
        if kernel is None or kernel.shapes.cached_bytes is None:
            return kernel
        function = _ANY_SHAPE_FUNCTION(self.library, node, types, kernel.function)
        return kernel if function is None else replace(kernel, function=function)

    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        family = FAMILIES.get(node.op.full_name)
        if family is None or self._leaves(node):
            return None
        site = site_of(self.library, node, types, data_dependent=family.data_dependent)
        call = None if site is None else family.choose(site)
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
    def openmp(self) -> int:
        return int(self.library.functions.openmp)

    @property
    def set_threads(self) -> Callable[[int], None]:
        """The compiled function: each run calls it."""
        function: Callable[[int], None] = self.library.functions.set_threads
        return function
