"""What each operation of TensorFlow becomes: rules, in families, by the operation's name.

A rule takes a ``Conversion`` and emits nodes; ``NodeError`` says that the node breaks TensorFlow's
rules, ``InexpressibleError`` that there is no kernel for it. Operations without a rule are those of
the domain "tensorflow" of the same name, inputs and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.frontends.tensorflow import rules_arrays, rules_functions, rules_images, rules_windows
from penstock.frontends.tensorflow.attrs import Tensor
from penstock.frontends.tensorflow.conversion import (
    Conversion,
    InexpressibleError,
    NodeError,
    Rule,
    registering,
)
from penstock.frontends.tensorflow.tensors import array_of
from penstock.frontends.tensorflow.types import declared_type
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW
from penstock.types import ANY, TensorType

__all__ = ["RULES", "InexpressibleError", "NodeError"]

# Operations with the meaning of one of ONNX's, input for input.
_SAME = {
    "Add": "Add",
    "AddN": "Sum",
    "AddV2": "Add",
    "AccumulateNV2": "Sum",
    "BitwiseAnd": "BitwiseAnd",
    "BitwiseOr": "BitwiseOr",
    "BitwiseXor": "BitwiseXor",
    "Equal": "Equal",
    "Greater": "Greater",
    "GreaterEqual": "GreaterOrEqual",
    "Identity": "Identity",
    "Inv": "Reciprocal",
    "Invert": "BitwiseNot",
    "IsInf": "IsInf",
    "IsNan": "IsNaN",
    "LessEqual": "LessOrEqual",
    "LogicalAnd": "And",
    "LogicalNot": "Not",
    "LogicalOr": "Or",
    "Maximum": "Max",
    "Minimum": "Min",
    "PlaceholderWithDefault": "Identity",
    "PreventGradient": "Identity",
    "RealDiv": "Div",
    "RefIdentity": "Identity",
    "SelectV2": "Where",
    "Snapshot": "Identity",
    "StopGradient": "Identity",
    **{
        name: name
        for name in (
            *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh"),
            *("Elu", "Erf", "Exp", "Floor", "Less", "Log", "Mul", "Neg", "Pow", "Range"),
            *("Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus"),
            *("Softsign", "Sqrt", "Sub", "Tan", "Tanh"),
        )
    },
}


def _same(name: str, attrs: Mapping[str, Any] | None = None) -> Rule:
    def rule(c: Conversion) -> None:
        c.end(name, attrs=attrs)

    return rule


RULES: dict[str, Rule] = {op: _same(name) for op, name in _SAME.items()}
RULES.update(rules_arrays.RULES)
RULES.update(rules_windows.RULES)
RULES.update(rules_images.RULES)
RULES.update(rules_functions.RULES)

rule = registering(RULES)


# Values from nowhere.


@rule("Const")
def const(c: Conversion) -> None:
    value = c.attrs.get("value")
    if not isinstance(value, Tensor):
        raise NodeError("has no tensor as its value")
    array = array_of(value.proto, c.importer.limits)
    array.flags.writeable = False  # it leaves runs as it is
    c.end("Const", [], {"value": array}, domain=TENSORFLOW)


@rule("Placeholder", "PlaceholderV2")
def placeholder(c: Conversion) -> None:
    """An input of the graph; what somebody feeds need not run for others that wait for it."""
    (value,) = c.outputs
    if c.scope.function:
        raise NodeError("is a placeholder in a function, which nobody can feed")
    shape = c.attrs.get("shape")
    kind = declared_type(c.attrs.get("dtype"), False, shape)
    # Old files have a scalar's shape where they mean that nothing is known.
    old = shape == () and c.importer.proto.versions.producer < _SHAPES_ARE_MEANT
    value.type = TensorType(kind.dtype) if old and isinstance(kind, TensorType) else kind
    c.scope.inputs.append(value)
    c.scope.placeholders[c.own_name] = value


_SHAPES_ARE_MEANT = 24  # the version of GraphDefs from which on a Placeholder's shape () is one


# Element by element.


@rule("Cast")
def cast(c: Conversion) -> None:
    number = element_number(str(c.attrs.get("DstT")))
    if not number:
        raise InexpressibleError(f"there is no cast to {c.attrs.get('DstT')}")
    c.end("Cast", attrs={"to": number})


@rule("Square")
def square(c: Conversion) -> None:
    (x,) = c.inputs
    c.end("Mul", [x, x])


@rule("Relu6")
def relu6(c: Conversion) -> None:
    _clip(c, 0, 6)


@rule("ClipByValue")
def clip_by_value(c: Conversion) -> None:
    low = c.node("Max", c.inputs[:2])
    c.end("Min", [low, c.inputs[2]])


def _clip(c: Conversion, low: float, high: float) -> None:
    dtype = c.dtype(0)
    if dtype is None:
        raise InexpressibleError("its element type is not known")
    c.end("Clip", [c.inputs[0], c.known(low, dtype), c.known(high, dtype)])


@rule("LeakyRelu")
def leaky_relu(c: Conversion) -> None:
    c.end("LeakyRelu", attrs={"alpha": c.attrs["alpha"]})


@rule("Erfc")
def erfc(c: Conversion) -> None:
    one = c.known(1, c.dtype(0))
    c.end("Sub", [one, c.node("Erf", c.inputs)])


@rule("Softmax", "LogSoftmax")
def softmax(c: Conversion) -> None:
    c.end(c.op, attrs={"axis": -1})


@rule("Mod")
def mod(c: Conversion) -> None:
    """Of C: the sign is that of what is divided."""
    c.end("TruncateMod", domain=TENSORFLOW)


@rule("Div")
def div(c: Conversion) -> None:
    dtype = c.dtype(0)
    if dtype is not None and dtype.kind not in "iu":
        c.end("Div")
    else:
        c.end("Div", domain=TENSORFLOW)


@rule("BiasAdd", "BiasAddV1")
def bias_add(c: Conversion) -> None:
    x, bias = c.inputs
    if c.attrs.get("data_format") != "NCHW":
        c.end("Add")
        return
    # [C] becomes [C, 1, ...]: as many ones as the image has dims.
    rank = c.rank(0) or 4
    axes = c.known(range(1, rank - 1), np.int64)
    c.end("Add", [x, c.node("Unsqueeze", [bias, axes]) if rank > 2 else bias])


# Products.


@rule("MatMul")
def matmul(c: Conversion) -> None:
    a, b = c.inputs
    if c.attrs["transpose_a"]:
        a = c.node("Transpose", [a], {"perm": [1, 0]})
    if c.attrs["transpose_b"]:
        b = c.node("Transpose", [b], {"perm": [1, 0]})
    c.end("MatMul", [a, b])


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(c: Conversion) -> None:
    """An adjoint is the transposed matrix, conjugated if it is complex."""
    operands = []
    for i, name in enumerate(("adj_x", "adj_y")):
        value, dtype = c.inputs[i], c.dtype(i)
        if c.attrs[name]:
            attrs = {"conjugate": int(dtype is not None and dtype.kind == "c")}
            value = c.node("MatrixTranspose", [value], attrs, domain=TENSORFLOW)
        operands.append(value)
    c.end("MatMul", operands)


@rule("Einsum")
def einsum(c: Conversion) -> None:
    c.end("Einsum", attrs={"equation": c.attrs.get("equation", "")})


# Variables.


@rule("VarHandleOp", "VariableV2", "Variable")
def variable(c: Conversion) -> None:
    shape = c.attrs.get("shape")
    attrs: dict[str, Any] = {
        "container": c.attrs["container"],
        "shared_name": c.attrs["shared_name"] or c.own_name,
        "dtype": c.attrs.get("dtype"),
        "store": c.importer.store,
    }
    if shape is not None:
        attrs["shape"] = [-1 if d is None else d for d in shape]
    (value,) = c.outputs
    value.type = ANY
    c.end("VarHandleOp" if c.op == "VarHandleOp" else "VariableV2", [], attrs, domain=TENSORFLOW)


@rule("ReadVariableOp")
def read_variable(c: Conversion) -> None:
    """The value itself where nothing can change it."""
    frozen = c.importer.handles.get(c.inputs[0])
    if frozen is None:
        attrs, kind = c.reading(c.inputs[0], c.attrs.get("dtype"))
        c.outputs[0].type = kind
        c.own((), **attrs)
    else:
        c.end("Const", [], {"value": frozen}, domain=TENSORFLOW)


@rule("ResourceGather")
def resource_gather(c: Conversion) -> None:
    handle, indices = c.inputs
    value = c.variable(handle, c.attrs.get("dtype"))
    c.end("GatherV2", [value, indices], {"batch_dims": c.attrs["batch_dims"]}, domain=TENSORFLOW)


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(c: Conversion) -> None:
    if c.inputs[0] in c.importer.handles:
        raise InexpressibleError("it assigns to a variable that was taken for a constant")
    c.own(())


# Control flow.


@rule("Switch", "RefSwitch", "Merge", "RefMerge", "Exit", "RefExit", "NextIteration")
def primitive(c: Conversion) -> None:
    c.own({"T", "N"})


RULES["RefNextIteration"] = primitive


@rule("LoopCond")
def loop_cond(c: Conversion) -> None:
    c.own((), T="bool")


@rule("_SwitchN")
def switch_n(c: Conversion) -> None:
    c.own({"T", "num_outs"})


@rule("Enter", "RefEnter")
def enter(c: Conversion) -> None:
    """The frames of a function's body are its own in each place that it is called from."""
    name = c.attrs.get("frame_name")
    if not isinstance(name, str) or not name:
        raise NodeError("has no frame_name")
    if c.attrs["parallel_iterations"] < 1:
        raise NodeError(
            f"allows {c.attrs['parallel_iterations']} parallel_iterations; at least one must be "
            "allowed"
        )
    constant = bool(c.attrs["is_constant"])
    c.own({"T", "parallel_iterations"}, frame_name=c.scope.prefix + name, is_constant=constant)


@rule("NoOp", "ControlTrigger")
def no_op(c: Conversion) -> None:
    c.own(())


@rule("Assert")
def assert_true(c: Conversion) -> None:
    c.own({"summarize"})
