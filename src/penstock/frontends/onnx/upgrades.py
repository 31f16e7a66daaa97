"""Older operator versions, rewritten as the current ones.

``UNCHANGED`` lists the operations whose versions all mean the same once the defaults of their own
version are filled in: newer ones have more types, or more attributes whose defaults are the old
meaning. ``UPGRADES`` has rules for the others: a rule emits nodes of current versions that compute
exactly what the old node did. Versions after the last one listed mean the same as the newest. Some
old versions are operations of their own, registered with the last version that has this meaning,
such as Softmax up to version 12. ``meaning`` combines all of these. FlexAttention has a rule
although it is not old, since it calls graphs, as do a loss and normalizations that rules write out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from math import inf
from typing import Any

import numpy as np

from penstock.analysis.schemas import (
    ELEMENT_TYPES,
    OnnxSchema,
    find_schema,
    first_schema,
    newest_opset,
)
from penstock.core.records import dataclass, field
from penstock.core.types import BOOL, FLOAT32
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.onnx.node_upgrade import NCHWC, NodeUpgrade
from penstock.frontends.onnx.schema_protos import defaults
from penstock.host.on_demand import imported
from penstock.ir.graph import Value
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.families import MODULES
from penstock.ops.registry import FORGET

Rule = Callable[[NodeUpgrade], None]

UPGRADES: dict[tuple[str, str], list[tuple[int, Rule]]] = {}
"""rules by domain and name, each with the last version to which it applies, in ascending order"""


def upgrade(last: int, *names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """A decorator that registers a rule for operations up to version ``last``."""

    def register(rule: Rule) -> Rule:
        for name in names:
            UPGRADES.setdefault((domain, name), []).append((last, rule))
        return rule

    return register


_GRAPHS = "penstock.frontends.onnx.upgrade_graphs"
upgrade(1, "FlexAttention", domain="ai.onnx.preview")(imported(f"{_GRAPHS}.flex_attention"))
upgrade(8, "Scan")(imported(f"{_GRAPHS}.scan_8"))


@upgrade(1, "Adagrad", "Adam", "Momentum", domain="ai.onnx.preview.training")
def optimizer(old: NodeUpgrade) -> None:
    from penstock.frontends.onnx import optimizers  # few models contain training steps

    optimizers.optimizer(old)


# Rules that serve many operations.

_OLD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Concat": {"axis": 1},
    "RoiAlign": {"coordinate_transformation_mode": "output_half_pixel"},
}
_RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "direction": {"foward": "forward"},  # a misspelt default of a first version
    "mode": {"bilinear": "linear", "bicubic": "cubic"},
}
_REDUCTIONS = "L1 L2 LogSum LogSumExp Max Mean Min Prod SumSquare"


@upgrade(6, "Gemm", "GRU", "LSTM", "RNN")
@upgrade(3, "Concat")
@upgrade(11, "Scatter")
@upgrade(15, "RoiAlign")
@upgrade(19, "GridSample")
def other_attributes(old: NodeUpgrade) -> None:
    """Keep the inputs. Attributes that the current version lacks are left out; those that it has
    added get the value of the old meaning."""
    name = {"Scatter": "ScatterElements"}.get(old.op, old.op)
    attrs = {**_OLD_DEFAULTS.get(old.op, {}), **old.attrs}
    for key, values in _RENAMED_VALUES.items():
        if key in attrs:
            attrs[key] = values.get(attrs[key], attrs[key])
    old.become(name, old.inputs, attrs)


# Attributes that became inputs after the first one.
_INPUTS: Mapping[str, Sequence[str]] = {
    "Clip": ("min", "max"),
    "Pad": ("pads", "value"),
    "Reshape": ("shape",),
    "Slice": ("starts", "ends", "axes"),
    "TopK": ("k",),
}


@upgrade(17, *(f"Reduce{name}" for name in _REDUCTIONS.split()))
@upgrade(12, "ReduceSum", "Squeeze", "Unsqueeze")
@upgrade(10, "Clip", "Pad")
@upgrade(9, "Slice", "TopK")
@upgrade(4, "Reshape")
def attributes_to_inputs(old: NodeUpgrade) -> None:
    """Convert attributes that became inputs: integers as vectors, other numbers as scalars of the
    data's type. Without axes, all are reduced, squeezed or sliced."""
    x, attrs = old.input(0), dict(old.attrs)
    if "paddings" in attrs:  # Pad-1
        attrs["pads"] = attrs["paddings"]
    inputs: list[Value | None] = [x]
    for key in _INPUTS.get(old.op, ("axes",)):
        entries = attrs.get(key)
        if entries is None and key == "shape":
            raise NodeError("lacks attribute 'shape'; add it")
        # Unsqueeze must have axes: an empty list of them means that no dim is added.
        if entries is None or (not entries and key in ("axes", "value") and old.op != "Unsqueeze"):
            inputs.append(None)
        # Bounds and padding values have the type of the data, but as attributes they were always
        # float32.
        elif isinstance(entries, float):
            inputs.append(old.like(entries, x))
        else:
            inputs.append(old.constant(entries if isinstance(entries, list) else [entries]))
    # Trailing inputs that are left out are dropped, since schemas allow fewer inputs than names.
    while inputs[-1] is None:
        inputs.pop()
    old.become(old.op, inputs, attrs)


@upgrade(6, "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less")
@upgrade(6, "PRelu")
def legacy_broadcast(old: NodeUpgrade) -> None:
    """Binary operations before NumPy's broadcasting: ``axis`` is the axis of A where B's dims
    begin. A PRelu has one slope, or one for each channel."""
    # Without ``axis`` B's dims are aligned with A's last dims, as in NumPy.
    axis = old.attrs.get("axis") if old.attrs.get("broadcast") else None
    axis = 1 if old.op == "PRelu" else axis
    old.become(old.op, [old.input(0), old.input(1) if axis is None else aligned(old, axis)])


def aligned(old: NodeUpgrade, axis: int) -> Value:
    """Return input 1 with dims of 1 appended, so that its first dim is at ``axis`` of input 0."""
    a, b = old.input(0), old.input(1)
    rank_a, rank_b = old.rank(0), old.rank(1)
    if rank_b is not None and (rank_a is not None or axis < 0):
        # A negative axis counts from the end of A, whose rank need not be known then.
        end = -axis if axis < 0 else rank_a - axis  # type: ignore[operator]
        if end <= rank_b:
            return b
        return old.emit("Unsqueeze", [b, list(range(rank_b, end))])
    start = rank_of(old, b)
    stop = old.constant(-axis)
    if axis >= 0:
        stop = old.emit("Sub", [rank_of(old, a), axis])
    return old.emit("Unsqueeze", [b, old.emit("Range", [start, stop, 1])])


def rank_of(old: NodeUpgrade, value: Value) -> Value:
    """Return the rank of a value, as a scalar known during the run."""
    return old.emit("Size", [old.emit("Shape", [value])])


@upgrade(1, "GlobalLpPool", "LpPool")
def integral_p(old: NodeUpgrade) -> None:
    """``p`` was a float."""
    p = old.attrs["p"]
    if not float(p).is_integer():
        raise InexpressibleError(f"p = {p} is not a whole number, and no other norm is supported")
    if old.op == "LpPool" and "kernel_shape" not in old.attrs:
        raise NodeError("lacks attribute 'kernel_shape'; add it")
    old.become(old.op, old.inputs, {**old.attrs, "p": int(p)})


# Rules of one operation each.


@upgrade(13, "BatchNormalization")
def batch_normalization(old: NodeUpgrade) -> None:
    """The mode was given by ``is_test``, and from version 7 to 13 by the number of outputs; with
    ``spatial`` 0, statistics were kept for each element instead of each channel."""
    if old.version < 7:
        training = not old.attrs.get("is_test", 0)
    else:
        training = any(output is not None for output in old.outputs[1:])
    if training and any(output is not None for output in old.outputs[3:]):
        raise InexpressibleError(
            "its outputs saved_mean and saved_var serve training only; export it for inference"
        )
    if old.attrs.get("spatial", 1):
        outputs = old.outputs[: 3 if training else 1]
        attrs = {**old.attrs, "training_mode": int(training)}
        old.become("BatchNormalization", old.inputs, attrs, outputs)
        return
    if training:
        raise InexpressibleError(
            "training with spatial = 0 is not supported; export it for inference"
        )
    x, scale, bias, mean, variance = [old.input(i) for i in range(5)]
    shifted = old.emit("Sub", [x, mean])
    widened = old.emit("Add", [variance, old.like(old.attrs["epsilon"], variance)])
    factor = old.emit("Div", [scale, old.emit("Sqrt", [widened])])
    old.become("Add", [old.emit("Mul", [shifted, factor]), bias], outputs=old.outputs[:1])


@upgrade(5, "Cast")
def cast(old: NodeUpgrade) -> None:
    """The target was named by a string."""
    code = ELEMENT_TYPES.get(old.attrs["to"].upper())
    if code is None:
        raise NodeError(f"casts to {old.attrs['to']!r}, which is no element type of TensorProto")
    old.become("Cast", old.inputs, {**old.attrs, "to": code})


@upgrade(11, "Dropout")
def dropout(old: NodeUpgrade) -> None:
    """The ratio was an attribute; so was the mode, which versions 7 to 11 fix to inference. Before
    version 10 the mask had the dtype of the input."""
    x = old.input(0)
    inputs = [x]
    if old.version < 7 and not old.attrs.get("is_test", 0):
        training = old.constant(True, BOOL)
        inputs += [old.constant(old.attrs["ratio"], FLOAT32), training]
    mask = old.outputs[1] if len(old.outputs) > 1 else None
    if mask is None or old.version >= 10:
        old.become("Dropout", inputs)
        return
    bool_mask = Value(old.fresh("mask"))  # today's mask is of truth values
    old.become("Dropout", inputs, outputs=[old.outputs[0], bool_mask])
    old.become("CastLike", [bool_mask, x], outputs=[mask])


@upgrade(20, "GroupNormalization")
def group_normalization(old: NodeUpgrade) -> None:
    """Scale and bias were per group: groups are the channels of an InstanceNormalization."""
    x = old.input(0)
    groups = old.attrs["num_groups"]
    # A dim of 0 is that of the input, the batch, whose size need not be known.
    split = old.emit("Reshape", [x, [0, groups, -1]])
    inputs = [split, old.input(1), old.input(2)]
    result = old.emit("InstanceNormalization", inputs, epsilon=old.attrs["epsilon"])
    old.become("Reshape", [result, old.emit("Shape", [x])], {"allowzero": 1})


@upgrade(10, "Resize", "Upsample")
def resample(old: NodeUpgrade) -> None:
    """Upsample, and the first version of Resize: output i is read at i / scale of the input. The
    nearest element is rounded down when growing and up when shrinking, as in ONNX Runtime and
    the test cases of that version; axes of both kinds take two steps."""
    x = old.input(0)
    factors = old.attrs.get("scales")
    if old.version == 1:
        factors = [1, 1, old.attrs["height_scale"], old.attrs["width_scale"]]
    scales = old.input(1) if factors is None else old.constant(factors, FLOAT32)
    mode = "nearest" if old.attrs["mode"] == "nearest" else "linear"
    common = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    fixed = scales.const
    # The two roundings differ only for the nearest element.
    if mode == "linear" or (fixed is not None and np.all(fixed >= 1)):
        old.become("Resize", [x, None, scales], {**common, "nearest_mode": "floor"})
        return
    if fixed is None or not np.all(fixed <= 1):
        one = old.constant(1, FLOAT32)
        growing = old.emit("Max", [scales, one])
        scales = old.emit("Min", [scales, one])
        x = old.emit("Resize", [x, None, growing], {**common, "nearest_mode": "floor"})
    old.become("Resize", [x, None, scales], {**common, "nearest_mode": "ceil"})


# With these roundings, (i + 0.5) / scale gives the same element as (i + 0.5) / scale - 0.5.
_HALF_PIXEL_ROUNDING = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}


@upgrade(12, "Resize")
def resize_11(old: NodeUpgrade) -> None:
    """One coordinate mode was dropped later, and unused inputs were empty tensors."""
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


@upgrade(17, "Split")
def split(old: NodeUpgrade) -> None:
    """The lengths were an attribute (in version 1 also an input of the data's type); without them,
    the data are split into as many parts as there are outputs."""
    attrs = {"axis": old.attrs.get("axis", 0)}
    lengths = old.optional(1)
    if old.attrs.get("split"):
        lengths = old.constant(old.attrs["split"])
    elif lengths is not None and old.version < 2:
        lengths = old.cast(lengths, "int64")
    if lengths is None:
        old.become("Split", [old.input(0)], {**attrs, "num_outputs": len(old.outputs)})
    else:
        old.become("Split", [old.input(0), lengths], attrs)


@upgrade(5, "Tile")
def tile(old: NodeUpgrade) -> None:
    """The tensor was repeated along one axis; the number and the axis were inputs."""
    x, one = old.input(0), old.constant([1])
    numbers = [old.cast(old.input(i), "int64") for i in (1, 2)]
    count, axis = (old.emit("Reshape", [number, one]) for number in numbers)
    # The shape of a shape is the rank, known only in a run.
    ones = old.emit("Expand", [one, old.emit("Shape", [old.emit("Shape", [x])])])
    old.become("Tile", [x, old.emit("ScatterElements", [ones, axis, count])])


@upgrade(13, "SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(old: NodeUpgrade) -> None:
    """Compute the loss from log-probabilities, which may be an output."""
    loss, logs = [*old.outputs, None][:2]
    if logs is None:
        logs = old.emit("LogSoftmax", [old.input(0)], {"axis": 1})
    else:
        old.give([logs], "LogSoftmax", [old.input(0)], {"axis": 1})
    old.become("NegativeLogLikelihoodLoss", [logs, *old.inputs[1:]], old.attrs, outputs=[loss])


@upgrade(22, "LpNormalization")
def lp_normalization(old: NodeUpgrade) -> None:
    """Rows with a norm of 0 become 0."""
    x, p, axis = old.input(0), old.attrs.get("p", 2), old.constant([old.attrs.get("axis", -1)])
    if p not in (1, 2):
        raise NodeError(f"p must be 1 or 2, not {p}")
    norm = old.emit(f"ReduceL{p}", [x, axis], {"keepdims": 1})
    is_zero = old.emit("Equal", [norm, old.like(0.0, x)])
    old.become("Div", [x, old.emit("Where", [is_zero, old.like(inf, x), norm])])


@upgrade(13, "MeanVarianceNormalization")
def mean_variance_normalization(old: NodeUpgrade) -> None:
    """Divide the deviations from the mean by their root mean square."""
    x, axes = old.input(0), old.constant(old.attrs.get("axes", [0, 2, 3]))
    apart = old.emit("Sub", [x, old.emit("ReduceMean", [x, axes], {"keepdims": 1})])
    squares = old.emit("Mul", [apart, apart])
    deviation = old.emit("Sqrt", [old.emit("ReduceMean", [squares, axes], {"keepdims": 1})])
    # ONNX adds this to the deviation, not to the variance as in other normalizations.
    old.become("Div", [apart, old.emit("Add", [deviation, old.like(1e-9, x)])])


# The text of ConvTranspose-1 swaps the sides of an uneven padding. No runtime implements that, and
# version 11 corrects the text.
UNCHANGED = frozenset(
    """
    Abs Acos Acosh ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool Bernoulli BitShift
    CastLike Ceil Celu Compress Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum
    DeformConv DepthToSpace DequantizeLinear Det Einsum Elu Erf Exp Expand EyeLike Flatten Floor
    Gather GatherElements GatherND GlobalAveragePool GlobalMaxPool GreaterOrEqual HardSigmoid
    HardSwish Identity If InstanceNormalization IsInf IsNaN LRN LeakyRelu LessOrEqual Log Loop
    MatMul Max MaxPool MaxRoiPool MaxUnpool Mean Min Mish
    Mod Multinomial Neg NegativeLogLikelihoodLoss NonMaxSuppression NonZero Optional
    OptionalGetElement OptionalHasElement QLinearMatMul QuantizeLinear RandomNormal
    RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal Relu ReverseSequence Round
    ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Sinh Size Softplus
    Softsign SpaceToDepth SplitToSequence Sqrt Sum Tan Tanh ThresholdedRelu Transpose
    TreeEnsembleClassifier TreeEnsembleRegressor Unique Where
    """.split()  # noqa: SIM905 - a hundred names are easier to read without quotes
)


@dataclass(frozen=True, slots=True, eq=False)
class Meaning:
    """How to import nodes of one operation and opset. ``rule`` writes them as other nodes, or emits
    none; ``op`` is their operation otherwise. ``defaults`` are those of attributes that are not
    given. ``schema`` is ``None`` if ONNX has none."""

    schema: OnnxSchema | None
    rule: Rule | None = None
    op: Op | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _microsoft_rule(name: str, domain: str) -> Rule | None:
    """Return the rule for an operation of ONNX Runtime that Penstock does not have, or None."""
    from penstock.frontends.onnx import microsoft, microsoft_attention
    from penstock.frontends.onnx.microsoft_rules import RULES

    # These two fill ``RULES``. Other modules only have rules for operations that Penstock lacks.
    assert microsoft and microsoft_attention
    key = domain, name
    return RULES.get(key) if key in RULES or key in MODULES else microsoft_rules().get(key)


@cache
def microsoft_rules() -> Mapping[tuple[str, str], Rule]:
    """Return the rules for operations of ONNX Runtime, by domain and name."""
    from penstock.frontends.onnx import (
        generation,
        microsoft,
        microsoft_attention,
        microsoft_gates,
        microsoft_quantized,
    )
    from penstock.frontends.onnx.microsoft_rules import RULES

    # These modules fill ``RULES``.
    assert microsoft and microsoft_attention
    assert generation and microsoft_quantized and microsoft_gates
    return RULES


@lru_cache(maxsize=4096)
def meaning(name: str, domain: str, opset: int) -> Meaning:
    """Return the meaning of operation ``name`` in an opset of its domain."""
    schema = find_schema(name, domain, opset)
    if schema is None:
        if domain == NCHWC:
            from penstock.frontends.onnx import nchwc

            return Meaning(None, op=nchwc.OPERATIONS.get(name))
        rule, op = _microsoft_rule(name, domain), find(name, domain, opset)
        if rule is not None or op is None:
            return Meaning(None, rule, op)
        # ONNX Runtime writes LayerNormalization into models of earlier opsets.
        schema = first_schema(name, domain)
        return Meaning(schema, op=op, defaults={} if schema is None else defaults(schema))
    version = schema.version
    newest = find_schema(name, domain, newest_opset(domain))
    assert newest is not None
    op = find(name, domain, version)
    if op is not None and op.version < newest.version:
        return Meaning(schema, op=op, defaults=defaults(schema))  # registered as an old version
    upgrades = UPGRADES.get((domain, name), [])
    for last, rule in upgrades:
        if version <= last:
            return Meaning(schema, rule, defaults=defaults(schema))
    # Versions after those with a rule mean the same as the newest.
    unchanged = domain in ("", "ai.onnx.ml") and name in UNCHANGED
    if op is None and (upgrades or unchanged):
        op = find(name, domain)
    if op is None:
        return Meaning(schema, defaults=defaults(schema))
    added = {k: v for k, v in defaults(newest).items() if k not in schema.attributes}
    return Meaning(schema, op=op, defaults={**added, **defaults(schema)})


FORGET.append(meaning.cache_clear)
