"""Older operator versions: what each means in terms of the current ones.

``UNCHANGED`` lists the operations whose versions all mean the same once the defaults of their own
version are filled in (newer ones have more types, or more attributes whose defaults are the old
meaning). ``REWRITES`` says how the others are rewritten: a function writes nodes of current
versions that compute exactly what the old node did. Versions after the last one listed mean the
same. Some old versions are operations of their own, registered with the last version that means
them: Softmax up to version 12, say. ``meaning`` puts all this together. One operation is listed for
what it takes, not for its age: FlexAttention calls graphs, so it is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import FunctionProto

from penstock.frontends.onnx.rewriter import InexpressibleError, NodeError, Rewriting
from penstock.frontends.onnx.schemas import Schema, find_schema, newest_opset
from penstock.frontends.onnx.tensors import ELEMENT_TYPES
from penstock.frontends.onnx.upgrade_attention import flex_attention
from penstock.frontends.onnx.upgrade_scan import scan_8
from penstock.ir.graph import Value
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.common.reference import reference_op
from penstock.types import BOOL, FLOAT32

Rule = Callable[[Rewriting], None]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How versions ``first`` to ``last`` of an operation are written today."""

    first: int
    last: int
    rule: Rule


# Rules that serve many operations.


def to(name: str, **attrs: Any) -> Rule:
    """The same inputs to operation ``name``, some attributes set, those it lacks left out."""

    def rule(old: Rewriting) -> None:
        old.become(name, old.inputs, {**old.attrs, **attrs})

    return rule


def axes_to_input(name: str) -> Rule:
    """``axes`` became an input; absent or empty, all axes are meant."""

    def rule(old: Rewriting) -> None:
        axes = old.attrs.get("axes")
        inputs = [old.input(0), old.constant(np.array(axes, np.int64))] if axes else old.inputs
        old.become(name, inputs, old.attrs)

    return rule


def legacy_broadcast(name: str) -> Rule:
    """Binary operations before NumPy's broadcasting: ``axis`` says where B's dims stand in A's."""

    def rule(old: Rewriting) -> None:
        a, b = old.input(0), old.input(1)
        axis = old.attrs.get("axis")
        if old.attrs.get("broadcast") and axis is not None:
            b = aligned(old, a, b, axis)
        old.become(name, [a, b])

    return rule


def aligned(old: Rewriting, a: Value, b: Value, axis: int) -> Value:
    """``b`` with dims of 1 appended, so that its first dim stands at ``axis`` of ``a``."""
    rank_a, rank_b = old.rank(a), old.rank(b)
    if rank_b is not None and (rank_a is not None or axis < 0):
        end = -axis if axis < 0 else rank_a - axis  # type: ignore[operator]
        if end <= rank_b:
            return b
        return old.emit("Unsqueeze", [b, old.constant(list(range(rank_b, end)))])
    start = rank_of(old, b)
    stop = old.constant(-axis)
    if axis >= 0:
        stop = old.emit("Sub", [rank_of(old, a), old.constant(axis)])
    return old.emit("Unsqueeze", [b, old.emit("Range", [start, stop, old.constant(1)])])


def rank_of(old: Rewriting, value: Value) -> Value:
    """The rank of a value, as a scalar known during the run."""
    return old.emit("Size", [old.emit("Shape", [value])])


def integral_p(name: str) -> Rule:
    """Lp pooling whose ``p`` was a float."""

    def rule(old: Rewriting) -> None:
        p = old.attrs["p"]
        if not float(p).is_integer():
            raise InexpressibleError(f"p = {p} is not a whole number")
        if name == "LpPool" and "kernel_shape" not in old.attrs:
            raise NodeError("lacks attribute 'kernel_shape'")
        old.become(name, old.inputs, {**old.attrs, "p": int(p)})

    return rule


# Rules of one operation each.


def batch_normalization(old: Rewriting) -> None:
    """Before version 14 the mode was ``is_test``, then whether outputs beyond the first were there;
    with ``spatial`` 0, statistics were kept for each element instead of each channel.
    """
    if old.version < 7:
        training = not old.attrs.get("is_test", 0)
    else:
        training = any(output is not None for output in old.outputs[1:])
    if training and any(output is not None for output in old.outputs[3:]):
        raise InexpressibleError("its outputs saved_mean and saved_var are for training only")
    if old.attrs.get("spatial", 1):
        outputs = old.outputs[: 3 if training else 1]
        old.become(
            "BatchNormalization", old.inputs, {**old.attrs, "training_mode": int(training)}, outputs
        )
        return
    if training:
        raise InexpressibleError("training with spatial = 0 is not supported")
    x, scale, bias, mean, variance = [old.input(i) for i in range(5)]
    shifted = old.emit("Sub", [x, mean])
    widened = old.emit("Add", [variance, old.like(old.attrs["epsilon"], variance)])
    factor = old.emit("Div", [scale, old.emit("Sqrt", [widened])])
    old.become("Add", [old.emit("Mul", [shifted, factor]), bias], outputs=old.outputs[:1])


def cast(old: Rewriting) -> None:
    """The target was named by a string."""
    code = ELEMENT_TYPES.get(old.attrs["to"].upper())
    if code is None:
        raise NodeError(f"casts to {old.attrs['to']!r}, which is no element type")
    old.become("Cast", old.inputs, {**old.attrs, "to": code})


def clip(old: Rewriting) -> None:
    """The bounds were attributes."""
    x = old.input(0)
    bounds = [old.attrs.get("min"), old.attrs.get("max")]
    inputs = [x, *(None if bound is None else old.like(bound, x) for bound in bounds)]
    while inputs[-1] is None:
        inputs.pop()
    old.become("Clip", inputs)


def concat(old: Rewriting) -> None:
    """The axis was 1 unless given."""
    old.become("Concat", old.inputs, {"axis": 1, **old.attrs})


def dropout(old: Rewriting) -> None:
    """The ratio was an attribute, the mode an attribute and then always that of inference; the mask
    had the dtype of the input at first.
    """
    x = old.input(0)
    inputs = [x]
    if old.version < 7 and not old.attrs.get("is_test", 0):
        training = old.constant(True, BOOL)
        inputs += [old.constant(old.attrs["ratio"], FLOAT32), training]
    mask = old.outputs[1] if len(old.outputs) > 1 else None
    if mask is None or old.version >= 10:
        old.become("Dropout", inputs)
        return
    truth = Value(old.fresh("mask"))
    old.become("Dropout", inputs, outputs=[old.outputs[0], truth])
    old.become("CastLike", [truth, x], outputs=[mask])


def group_normalization(old: Rewriting) -> None:
    """Scale and bias were per group: groups then are the channels of an InstanceNormalization."""
    x = old.input(0)
    groups = old.attrs["num_groups"]
    split = old.emit("Reshape", [x, old.constant([0, groups, -1])])
    inputs = [split, old.input(1), old.input(2)]
    result = old.emit("InstanceNormalization", inputs, epsilon=old.attrs["epsilon"])
    old.become("Reshape", [result, old.emit("Shape", [x])], {"allowzero": 1})


def grid_sample(old: Rewriting) -> None:
    """The modes were named for images."""
    modes = {"bilinear": "linear", "bicubic": "cubic"}
    mode = old.attrs["mode"]
    old.become("GridSample", old.inputs, {**old.attrs, "mode": modes.get(mode, mode)})


def pad(old: Rewriting) -> None:
    """Pads and value were attributes."""
    x = old.input(0)
    pads = old.attrs["paddings" if old.version < 2 else "pads"]
    inputs = [x, old.constant(np.array(pads, np.int64))]
    if old.attrs["value"]:
        inputs.append(old.like(old.attrs["value"], x))
    old.become("Pad", inputs, old.attrs)


def recurrent(name: str) -> Rule:
    """The first versions had a flag about their outputs, and one a default spelt wrong."""

    def rule(old: Rewriting) -> None:
        direction = old.attrs["direction"]
        direction = "forward" if direction == "foward" else direction
        old.become(name, old.inputs, {**old.attrs, "direction": direction})

    return rule


def reshape(old: Rewriting) -> None:
    """The shape was an attribute."""
    if "shape" not in old.attrs:
        raise NodeError("lacks attribute 'shape'")
    old.become("Reshape", [old.input(0), old.constant(np.array(old.attrs["shape"], np.int64))])


def resample(old: Rewriting) -> None:
    """Upsample, and Resize as it began: output i is taken from i / scale of the input.

    To the nearest element before it when growing, behind it when shrinking (as ONNX Runtime and the
    test cases of that version have it), so that axes that do either need a step each.
    """
    x = old.input(0)
    factors = old.attrs.get("scales")
    if old.version == 1:
        factors = [1, 1, old.attrs["height_scale"], old.attrs["width_scale"]]
    scales = old.input(1) if factors is None else old.constant(factors, FLOAT32)
    mode = "nearest" if old.attrs["mode"] == "nearest" else "linear"
    common = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    known = scales.const
    if mode == "linear" or (known is not None and np.all(known >= 1)):
        old.become("Resize", [x, None, scales], {**common, "nearest_mode": "floor"})
        return
    if known is None or not np.all(known <= 1):
        one = old.constant(1, FLOAT32)
        growing = old.emit("Max", [scales, one])
        scales = old.emit("Min", [scales, one])
        x = old.emit("Resize", [x, None, growing], {**common, "nearest_mode": "floor"})
    old.become("Resize", [x, None, scales], {**common, "nearest_mode": "ceil"})


# With these roundings, (i + 0.5) / scale comes to the same element as (i + 0.5) / scale - 0.5.
_HALF_PIXEL_ROUNDING = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}


def resize_11(old: Rewriting) -> None:
    """One coordinate mode was dropped later, and what was not used was given as an empty tensor."""
    x, roi, scales = old.input(0), old.optional(1), old.optional(2)
    sizes = old.optional(3)
    if roi is not None and roi.const is not None and not roi.const.size:
        roi = None
    attrs = dict(old.attrs)
    if attrs["coordinate_transformation_mode"] == "tf_half_pixel_for_nn":
        rounding = _HALF_PIXEL_ROUNDING.get(attrs["nearest_mode"])
        if attrs["mode"] != "nearest" or rounding is None:
            raise InexpressibleError(
                "tf_half_pixel_for_nn is supported with mode 'nearest' and nearest_mode 'floor' or "
                "'round_prefer_floor' only"
            )
        attrs |= {"coordinate_transformation_mode": "half_pixel", "nearest_mode": rounding}
    inputs = [x, roi, scales] if sizes is None else [x, roi, None, sizes]
    old.become("Resize", inputs, attrs)


def slice_1(old: Rewriting) -> None:
    """Starts, ends and axes were attributes."""
    starts = old.attrs["starts"]
    ends = old.attrs["ends"]
    axes = old.attrs.get("axes") or list(range(len(starts)))
    constants = [old.constant(np.array(x, np.int64)) for x in (starts, ends, axes)]
    old.become("Slice", [old.input(0), *constants])


def split(old: Rewriting) -> None:
    """The lengths were an attribute (at first, also an input of the data's type); without them, the
    number of outputs says how many parts there are.
    """
    attrs = {"axis": old.attrs.get("axis", 0)}
    lengths, given = old.attrs.get("split"), old.optional(1)
    if lengths:
        given = old.constant(np.array(lengths, np.int64))
    elif given is not None and old.version < 2:
        given = old.emit("Cast", [given], to=ELEMENT_TYPES["INT64"])
    if given is None:
        old.become("Split", [old.input(0)], {**attrs, "num_outputs": len(old.outputs)})
    else:
        old.become("Split", [old.input(0), given], attrs)


def top_k(old: Rewriting) -> None:
    """The number was an attribute."""
    old.become("TopK", [old.input(0), old.constant([old.attrs["k"]])], old.attrs)


def unsqueeze(old: Rewriting) -> None:
    """The axes were an attribute."""
    axes = np.array(old.attrs["axes"], np.int64)
    old.become("Unsqueeze", [old.input(0), old.constant(axes)])


_BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less")
_REDUCE = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

REWRITES: Mapping[tuple[str, str], tuple[Rewrite, ...]] = {
    **{("", name): (Rewrite(1, 6, legacy_broadcast(name)),) for name in _BINARY},
    **{
        ("", f"Reduce{name}"): (Rewrite(1, 17, axes_to_input(f"Reduce{name}")),) for name in _REDUCE
    },
    ("", "BatchNormalization"): (Rewrite(1, 13, batch_normalization),),
    ("", "Cast"): (Rewrite(1, 5, cast),),
    ("", "Clip"): (Rewrite(1, 10, clip),),
    ("", "Concat"): (Rewrite(1, 3, concat),),
    ("", "Dropout"): (Rewrite(1, 11, dropout),),
    ("", "Gemm"): (Rewrite(1, 6, to("Gemm")),),
    ("", "GlobalLpPool"): (Rewrite(1, 1, integral_p("GlobalLpPool")),),
    ("", "GridSample"): (Rewrite(16, 19, grid_sample),),
    ("", "GroupNormalization"): (Rewrite(18, 20, group_normalization),),
    ("", "GRU"): (Rewrite(1, 6, recurrent("GRU")),),
    ("", "LpPool"): (Rewrite(1, 1, integral_p("LpPool")),),
    ("", "LSTM"): (Rewrite(1, 6, recurrent("LSTM")),),
    ("", "Pad"): (Rewrite(1, 10, pad),),
    ("", "ReduceSum"): (Rewrite(1, 12, axes_to_input("ReduceSum")),),
    ("", "Reshape"): (Rewrite(1, 4, reshape),),
    ("", "Resize"): (Rewrite(10, 10, resample), Rewrite(11, 12, resize_11)),
    ("", "RNN"): (Rewrite(1, 6, recurrent("RNN")),),
    ("", "RoiAlign"): (
        Rewrite(10, 15, to("RoiAlign", coordinate_transformation_mode="output_half_pixel")),
    ),
    ("", "Scan"): (Rewrite(8, 8, scan_8),),
    ("", "Scatter"): (Rewrite(9, 11, to("ScatterElements")),),
    ("", "Slice"): (Rewrite(1, 9, slice_1),),
    ("", "Split"): (Rewrite(1, 17, split),),
    ("", "Squeeze"): (Rewrite(1, 12, axes_to_input("Squeeze")),),
    ("", "TopK"): (Rewrite(1, 9, top_k),),
    ("", "Unsqueeze"): (Rewrite(1, 12, unsqueeze),),
    ("", "Upsample"): (Rewrite(1, 10, resample),),
    ("ai.onnx.preview", "FlexAttention"): (Rewrite(1, 1, flex_attention),),
}

# Of ConvTranspose, the text of version 1 has the sides of an uneven padding the other way round:
# nobody ever computed it so, and version 11 put it right.
UNCHANGED = frozenset(
    """
    Abs Acos Acosh ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool Bernoulli BitShift
    CastLike Ceil Celu Compress Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
    DeformConv DepthToSpace DequantizeLinear Det Einsum Elu Erf Exp Expand EyeLike Flatten Floor
    Gather GatherElements GatherND GlobalAveragePool GlobalMaxPool GreaterOrEqual HardSigmoid
    HardSwish Identity If InstanceNormalization IsInf IsNaN LRN LeakyRelu LessOrEqual Log Loop
    LpNormalization MatMul Max MaxPool MaxRoiPool MaxUnpool Mean MeanVarianceNormalization Min Mish
    Mod Multinomial Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Optional
    OptionalGetElement OptionalHasElement QLinearMatMul QuantizeLinear RandomNormal
    RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal Relu ReverseSequence Round
    ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Sinh Size SoftmaxCrossEntropyLoss Softplus
    Softsign SpaceToDepth SplitToSequence Sqrt Sum Tan Tanh ThresholdedRelu Transpose
    TreeEnsembleClassifier TreeEnsembleRegressor Unique Where
    """.split()  # noqa: SIM905 - a hundred names are easier to read without quotes
)


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """How nodes of one operation and opset are imported: the first of these that there is.

    ``rule`` rewrites them; ``op`` is what they are, with ``defaults`` for attributes not given;
    ``function`` is what ONNX itself defines them by. ``schema`` is ``None`` where ONNX has none.
    """

    schema: Schema | None
    rule: Rule | None = None
    op: Op | None = None
    function: FunctionProto | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=4096)
def meaning(name: str, domain: str, opset: int) -> Meaning:
    """What ``name`` means in an opset of its domain."""
    schema = find_schema(name, domain, opset)
    if schema is None:
        return Meaning(None, op=find(name, domain, opset))
    version = schema.version
    newest = find_schema(name, domain, newest_opset(domain))
    assert newest is not None
    op = find(name, domain, version)
    if op is not None and op.version < newest.version:
        return Meaning(schema, op=op, defaults=schema.defaults)  # registered as an old version
    rule = _rule(name, domain, version)
    if rule is not None:
        return Meaning(schema, rule, defaults=schema.defaults)
    if op is None and _unchanged(name, domain, version):
        op = find(name, domain)
    if op is not None:
        added = {k: v for k, v in newest.defaults.items() if k not in schema.attributes}
        return Meaning(schema, op=op, defaults={**added, **schema.defaults})
    if schema.function is not None:
        return Meaning(schema, function=schema.function, defaults=schema.defaults)
    return Meaning(schema, op=reference_op(name, domain, version), defaults=schema.defaults)


def _rule(name: str, domain: str, version: int) -> Rule | None:
    for rewrite in REWRITES.get((domain, name), ()):
        if rewrite.first <= version <= rewrite.last:
            return rewrite.rule
    return None


def _unchanged(name: str, domain: str, version: int) -> bool:
    """Whether a version means what the newest one does."""
    rewrites = REWRITES.get((domain, name))
    if rewrites is not None:
        return version > max(rewrite.last for rewrite in rewrites)
    return domain in ("", "ai.onnx.ml") and name in UNCHANGED
