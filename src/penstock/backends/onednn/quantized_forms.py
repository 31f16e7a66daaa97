"""Decode quantized nodes into operations of real numbers, scales and zero points.

A code represents ``scale * (code - zero)``. Models express operations of codes in three ways: as
operations of codes (QLinearConv and so on); as operations between DequantizeLinear and
QuantizeLinear, which are fused; and as integer products that are cast to float32 and then scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from penstock.backends.onednn.eltwise_algorithms import ELTWISE
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PostOp, post_ops_of
from penstock.core.records import dataclass, field, replace
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.registry import COMPUTING, MICROSOFT

DTYPES: Collection[np.dtype] = frozenset({FLOAT32, INT8, UINT8})
"""of the inputs and outputs of such nodes"""
INTEGERS = frozenset({"ConvInteger", "MatMulInteger"})
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The scales and zero points of tensor ``tensor`` of an ``OpDesc``: one, or one for each index
    of ``axis``. Real numbers have the scale 1. A zero point that is no constant is tensor
    ``late``."""

    tensor: int
    scale: np.ndarray = field(default_factory=lambda: _ONE)
    zero: np.ndarray = field(default_factory=lambda: _ZERO)
    axis: int = 0
    late: int = -1

    @property
    def single(self) -> bool:
        """Whether there is one scale and zero point for all elements."""
        return self.scale.size == self.zero.size == 1


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The operation of ``node`` on ``inputs``, which are real numbers or codes, plus ``bias``,
    followed by ``post_ops``. The result is bounded by ``low`` and ``high``, and stored as
    ``output``."""

    node: Node
    inputs: Sequence[Codes | None]
    output: Codes
    low: float = -math.inf
    high: float = math.inf
    bias: np.ndarray | None = None
    post_ops: tuple[PostOp, ...] = ()

    @property
    def operands(self) -> tuple[Codes, Codes]:
        """The first two inputs, which no operation of two inputs leaves out."""
        x, w = self.inputs[:2]
        assert x is not None and w is not None
        return x, w

    def within(self, low: float, high: float) -> Form:
        """The same with its result bounded by ``low`` and ``high``."""
        bounds = [min(max(bound, low), high) for bound in (self.low, self.high)]
        return replace(self, low=bounds[0], high=bounds[1])


def form_of(desc: OpDesc) -> Form | None:
    """The form of the node of an ``OpDesc``; None unless its codes have one scale and zero point
    that are constants."""
    node = desc.node
    if not is_fused(node):
        form = _FORMS.get(node.op.full_name)
        return None if form is None else form(desc)
    return _of_integers(desc) if parts(node)[0].op.name in INTEGERS else _between_conversions(desc)


def _codes(desc: OpDesc, tensor: int, scale: int, zero: int, axis: int = 0) -> Codes | None:
    """Codes whose scale and zero point are inputs of the ``OpDesc``, -1 for none; None if these are
    no constants, or of a type that 8-bit codes do not have."""
    if scale < 0:
        return Codes(tensor)
    scales = desc.constants[scale]
    zeros = desc.constants[zero] if zero >= 0 else np.zeros(1, INT8)
    if scales is None or zeros is None or scales.dtype != FLOAT32:
        return None
    if zeros.dtype not in (INT8, UINT8, INT32) or max(scales.ndim, zeros.ndim) > 1:
        return None
    if not np.all(np.isfinite(scales) & (scales > 0)):
        return None
    return Codes(tensor, scales.reshape(-1), zeros.reshape(-1).astype(np.int32), axis)


def _operation(output: tuple[int, int], bias: int = -1) -> Callable[[OpDesc], Form | None]:
    """The form of an operation of two tensors of codes, each followed by its scale and zero point,
    with the indices of the inputs that have those of the ``output`` and the int32 bias."""

    def form(desc: OpDesc) -> Form | None:
        attrs = desc.node.attrs
        index = [desc.index(i) for i in range(9)]
        # Filters of a convolution and columns of a matrix may have scales of their own.
        axis = 0 if "Conv" in desc.node.op.name or attrs.get("transB") else -1
        x, w = _codes(desc, *index[:3]), _codes(desc, index[3], index[4], index[5], axis)
        y = _codes(desc, desc.outputs[0], index[output[0]], index[output[1]])
        if x is None or w is None or y is None or attrs.get("channels_last"):
            return None
        if bias < 0 or index[bias] < 0:
            return Form(desc.node, (x, w), y)
        term = desc.constant(bias)
        if term is None:
            return None
        # The bias is in units of both scales. float64 holds an int32 exactly, float32 does not.
        factor = attrs.get("alpha", 1.0) * x.scale.astype(np.float64) * w.scale
        return Form(desc.node, (x, w), y, bias=term * factor)

    return form


_FORMS: Mapping[str, Callable[[OpDesc], Form | None]] = {
    "QLinearConv": _operation((6, 7), bias=8),
    "QLinearMatMul": _operation((6, 7)),
    f"{MICROSOFT}.QGemm": _operation((7, 8), bias=6),
    f"{MICROSOFT}.QLinearConv": _operation((6, 7), bias=8),
}


def _parameters(desc: OpDesc, node: Node, place: Mapping[Value | None, int]) -> Codes | None:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear, for the tensor it reads."""
    types_ = [v.type for v in (node.inputs[0], node.outputs[0]) if v is not None]
    dtypes = {type_.dtype if isinstance(type_, TensorType) else None for type_ in types_}
    if node.attrs.get("block_size") or node.attrs.get("precision"):
        return None
    if not dtypes <= {*DTYPES, INT32}:
        return None
    x, scale, zero = [-1 if v is None else place[v] for v in [*node.inputs, None][:3]]
    axis = node.attrs.get("axis")
    if node.inputs[0] is not None and node.inputs[0].rank == 1:
        axis = 0  # the only one, whatever is said
    return _codes(desc, x, scale, zero, 1 if axis is None else axis)


def _between_conversions(desc: OpDesc) -> Form | None:
    """The form of a fused node that begins with DequantizeLinear: a product and its bounds."""
    region = desc.node.attrs["region"]
    place: dict[Value | None, int] = {value: i for i, value in enumerate(region.inputs)}
    codes_of: dict[Value | None, Codes] = {}
    form = None
    for node in region.nodes:
        if form is None and node.op.name == "DequantizeLinear":
            codes = _parameters(desc, node, place)
            if codes is None:
                return None
            codes_of[node.outputs[0]] = codes
        elif form is None:
            if node.op.name not in COMPUTING:
                return None
            inputs = [
                None if v is None else codes_of.get(v) or Codes(place[v]) for v in node.inputs
            ]
            form = Form(node, inputs, Codes(desc.outputs[0]))
        elif node.op.name == "QuantizeLinear":
            output = _parameters(desc, node, {**place, node.inputs[0]: desc.outputs[0]})
            if output is None:
                return None
            form = replace(form, output=output)
        elif node.op.name == "Relu":
            form = form.within(0.0, math.inf)
        else:
            clip = ELTWISE["Clip"](node) if node.op.name == "Clip" else None
            if clip is None:
                return None
            form = form.within(clip[0].alpha, clip[0].beta)
    return form


def _of_integers(desc: OpDesc) -> Form | None:
    """The form of a ConvInteger or MatMulInteger, and of the Cast and the nodes behind it."""
    region = desc.node.attrs["region"]
    node, cast = region.nodes[:2]
    place = {value: i for i, value in enumerate(region.inputs)}
    chain = post_ops_of(region.nodes[1:], place, desc.tensors)
    if chain is None or cast.outputs[0].type.dtype != FLOAT32:
        return None
    x, w, *zeros = [-1 if v is None else place[v] for v in [*node.inputs, None, None][:4]]
    zero, zero_w = [_ZERO if i < 0 else desc.constants[i] for i in zeros]
    type_ = desc.tensors[zeros[0]] if zero is None else None
    if zero_w is None or zero_w.ndim > 1 or (type_ is not None and math.prod(type_.dims) > 1):
        return None
    axis = 0 if node.op.name == "ConvInteger" else -1
    weights = Codes(w, zero=zero_w.reshape(-1).astype(np.int32), axis=axis)
    if zero is None:
        source = Codes(x, late=zeros[0])
    else:
        source = Codes(x, zero=zero.reshape(-1).astype(np.int32))
    return Form(node, (source, weights), Codes(desc.outputs[0]), post_ops=chain)
