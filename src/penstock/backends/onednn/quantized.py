"""Convolutions and products of 8-bit codes.

The primitive applies the operation to codes less their zero points, and multiplies the result by
one factor, the product of all scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from penstock.backends.onednn.convolution import convolution
from penstock.backends.onednn.eltwise_algorithms import Eltwise
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError
from penstock.backends.onednn.matmul import batched, product
from penstock.backends.onednn.op_desc import OpDesc, whole_desc_of
from penstock.backends.onednn.post_ops import PostOp
from penstock.backends.onednn.primitive import DST, SRC, WEIGHTS
from penstock.backends.onednn.quant_attrs import ZERO_POINTS, MakeWeights, Scaling
from penstock.backends.onednn.quantized_forms import DTYPES, Codes, Form, form_of
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext
from penstock.backends.onednn.weights import Seen, weights_of
from penstock.core.records import replace
from penstock.core.types import FLOAT32, Type
from penstock.ir.graph import Node
from penstock.ops.common.dtypes import INT8, UINT8

_MOST_DIMS = 6

_WRONG = "gemm_"
"""oneDNN 3.2's name of its code for channels apart over three axes, which is wrong for some numbers
of channels, and for some numbers of threads"""


def codes_desc(node: Node, types: Sequence[Type | None]) -> OpDesc | None:
    """The descriptor of the convolution or product of a node that begins with one of ``_OF_CODES``
    (see ``backend``), with these types of inputs: its weights, bias, scales and zero points."""
    desc = whole_desc_of(node, types, DTYPES)
    if desc is None or len(node.outputs) != 1:
        return None
    form = form_of(desc)
    if form is None or not form.output.single:
        return None
    return _FAMILIES[form.node.op.name](desc, form)


def quantized(desc: OpDesc) -> PrimitiveSpec | None:
    """The specification of what ``codes_desc`` describes, or of a part of it."""
    if "Conv" in desc.node.op.name:
        spec = convolution(desc)
        return None if spec is None else replace(spec, create=partial(_correct, spec.create))
    assert desc.scaling is not None
    if desc.scaling.weights is None:
        return batched(desc, max(len(desc.dims(i)) for i in desc.inputs[:2]))
    dims, across = desc.dims(desc.inputs[0]), bool(desc.node.attrs.get("transA", 0))
    *rows, inner = dims[::-1] if across else dims
    weights = desc.scaling.weights((inner, desc.dims(desc.outputs[0])[-1]))
    return product(desc, weights, math.prod(rows), inner, (across, False))


def _correct(
    create: Callable[[SpecContext], BoundPrimitive], context: SpecContext
) -> BoundPrimitive:
    """The primitive, unless its code is wrong for some shapes."""
    bound = create(context)
    if _WRONG in bound.primitive.implementation:
        raise DnnlError(UNIMPLEMENTED)
    return bound


# Facts about codes.


def _constant(desc: OpDesc, codes: Codes) -> np.ndarray | None:
    """The real numbers that constant codes represent, in float64."""
    constant = desc.constants[codes.tensor]
    if constant is None:
        return None
    zero, scale = codes.zero, codes.scale.astype(np.float64)
    if not codes.single:
        along = [1] * constant.ndim
        along[codes.axis] = -1
        zero, scale = zero.reshape(along), scale.reshape(along)
    numbers: np.ndarray = (constant - zero.astype(np.float64)) * scale
    return numbers.reshape(constant.shape)


def _weights(desc: OpDesc, codes: Codes, axis: int) -> MakeWeights | None:
    """Constant codes less their zero points; None if int8 does not hold them. There may be a scale
    for each index of ``axis``, the first in convolutions and the last in matrices."""
    constant = desc.constants[codes.tensor]
    if constant is None or constant.dtype not in (INT8, UINT8):
        return None
    if not codes.single and codes.axis % constant.ndim != axis:
        return None
    zero = codes.zero
    spread = zero.reshape(-1, *[1] * (constant.ndim - 1 - axis)) if zero.size > 1 else zero
    turned = constant.ndim == 2 and axis == 0
    name = "codes", axis, zero.tobytes()
    # The constant is what is multiplied, so that its copies in layouts serve other kernels, too.
    if constant.dtype == INT8 and not np.any(zero):
        seen = Seen(name, np.transpose if turned else None)
        return partial(weights_of, constant, seen=seen)
    # The difference of a byte and a zero point may take nine bits.
    if np.any(constant < spread - 128) or np.any(constant > spread + 127):
        return None
    form = partial(_less, spread, turned)
    back = partial(_more, spread, turned, constant.shape, constant.dtype)
    return partial(weights_of, constant, seen=Seen(name, form, back=back, dtype=INT8))


def _less(zero: np.ndarray, turned: bool, codes: np.ndarray) -> np.ndarray:
    less = np.subtract(codes, zero, dtype=np.int32).astype(INT8)
    return less.T if turned else less


def _more(
    zero: np.ndarray, turned: bool, shape: tuple[int, ...], dtype: np.dtype, less: np.ndarray
) -> np.ndarray:
    """The codes of which ``_less`` makes ``less``, in whatever shape."""
    own = less.T if turned else less.reshape(shape)
    return np.add(own, zero, dtype=np.int32).astype(dtype)


def _dtype(desc: OpDesc, codes: Codes) -> np.dtype | None:
    type_ = desc.tensors[codes.tensor]
    return None if type_ is None else type_.dtype


def _is_read(desc: OpDesc, codes: Codes) -> bool:
    """Whether these codes are no constants, with one scale for all."""
    if not codes.single or desc.constants[codes.tensor] is not None:
        return False
    return _dtype(desc, codes) in (INT8, UINT8)


def _zeros(*codes: Codes) -> dict[int, int]:
    """The zero points of the source and of the result that are not 0, by argument."""
    both = zip((SRC, DST), codes, strict=False)
    return {argument: int(c.zero[0]) for argument, c in both if c.zero[0]}


def _posts(desc: OpDesc, form: Form) -> list[PostOp]:
    """Post-ops that bound the result, in units of its scale, before it is rounded and its zero
    point added; none where the range of the integers is as narrow."""
    dtype, y = desc.output.dtype, form.output
    scale, zero = float(y.scale[0]), int(y.zero[0])
    low, high = form.low / scale, form.high / scale
    posts = []
    assert dtype is not None
    if dtype != FLOAT32:
        ends = np.iinfo(dtype)
        low = low if np.rint(low) + zero > ends.min else -math.inf
        high = high if np.rint(high) + zero < ends.max else math.inf
    if low > -math.inf or high < math.inf:
        posts.append(PostOp(Eltwise("clip", low, high)))
    if zero:
        # oneDNN adds the zero point before it rounds: halves would be rounded to another even
        # number, and numbers near 1 would become 1.
        posts.append(PostOp(Eltwise("round")))
    return posts


def _bias(desc: OpDesc, form: Form) -> np.ndarray | None:
    """The term of each channel or column; None if the addend has another form, or varies."""
    addend = form.inputs[2] if len(form.inputs) > 2 else None
    bias = np.zeros(1) if form.bias is None else form.bias
    if addend is not None:
        constant = _constant(desc, addend)
        if constant is None:
            return None
        bias = constant * form.node.attrs.get("beta", 1.0)
    return bias.reshape(-1) if math.prod(bias.shape[:-1]) == 1 else None


def _scaled(desc: OpDesc, form: Form, weights: MakeWeights, mask: int, bias: np.ndarray) -> OpDesc:
    """The ``OpDesc`` of a product of codes with ``weights``, whose factors lie along the axes in
    ``mask``, plus a ``bias`` of a shape that broadcasts."""
    x, w = form.operands
    y = form.output
    factor = np.float32(form.node.attrs.get("alpha", 1.0)) * (x.scale * w.scale / y.scale)
    posts, constants = _posts(desc, form), desc.constants
    if np.any(bias):
        posts.insert(0, PostOp(binary="add", tensor=len(constants)))
        constants = (*constants, (bias / y.scale).astype(FLOAT32))
    scales = {WEIGHTS: (mask if factor.size > 1 else 0, factor)}
    return replace(
        desc,
        node=form.node,
        constants=constants,
        inputs=(x.tensor, w.tensor),
        post_ops=(*posts, *form.post_ops),
        scaling=Scaling(scales, _zeros(x, y), weights, _late(x)),
    )


def _late(x: Codes) -> dict[int, int]:
    """The zero point of the first operand if it is no constant: its tensor, by argument."""
    return {ZERO_POINTS | SRC: x.late} if x.late >= 0 else {}


# Families


def _conv(desc: OpDesc, form: Form) -> OpDesc | None:
    x, w = form.operands
    weights, bias = _weights(desc, w, 0), _bias(desc, form)
    if not _is_read(desc, x) or weights is None or bias is None:
        return None
    # With groups, oneDNN's filters are two axes of the weights: groups, and the filters of each.
    mask = 0b11 if form.node.attrs.get("group", 1) > 1 else 0b1
    bias = bias.reshape(-1, *[1] * (len(desc.dims(w.tensor)) - 2))
    return _scaled(desc, form, weights, mask, bias)


def _matrix(desc: OpDesc, form: Form) -> OpDesc | None:
    """A product with a constant matrix, or of two matrices of codes."""
    x, w = form.operands
    if desc.constants[w.tensor] is None:
        return _matrices(desc, form) if "MatMul" in form.node.op.name else None
    flipped = bool(form.node.attrs.get("transB", 0))
    weights, bias = _weights(desc, w, 0 if flipped else 1), _bias(desc, form)
    if not _is_read(desc, x) or weights is None or bias is None:
        return None
    if len(desc.dims(w.tensor)) != 2 or len(desc.dims(x.tensor)) < 2:
        return None
    return _scaled(desc, form, weights, 0b10, bias)


def _matrices(desc: OpDesc, form: Form) -> OpDesc | None:
    """A product of two matrices of codes; oneDNN takes int8 for the second."""
    (x, w), y = form.operands, form.output
    if not (_is_read(desc, x) and _is_read(desc, w)):
        return None
    ranks = [len(desc.dims(codes.tensor)) for codes in (x, w)]
    # Conversions to int8 are kept by tensor: one that is both operands would be converted as both.
    if min(ranks) < 2 or max(ranks) > _MOST_DIMS or x.tensor == w.tensor:
        return None
    unsigned = _dtype(desc, w) == UINT8
    zeros = _zeros(x, y)
    shift = int(w.zero[0]) - 128 * unsigned
    if shift:
        zeros[WEIGHTS] = shift
    scales, signed = {WEIGHTS: (0, x.scale * w.scale / y.scale)}, (w.tensor,) if unsigned else ()
    scaling = Scaling(scales, zeros, late=_late(x), signed=signed)
    posts, inputs = (*_posts(desc, form), *form.post_ops), (x.tensor, w.tensor)
    return replace(desc, node=form.node, inputs=inputs, post_ops=posts, scaling=scaling)


_FAMILIES: Mapping[str, Callable[[OpDesc, Form], OpDesc | None]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _conv),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger", "QGemm", "QLinearMatMul"), _matrix),
}
"""by the operation of a form, the function that describes its primitive"""
