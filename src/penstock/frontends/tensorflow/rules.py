"""Rules for TensorFlow's operations, by the operation's name.

A rule takes a ``Conversion`` and emits nodes. It raises ``NodeError`` if the node breaks
TensorFlow's rules, ``InexpressibleError`` if no kernel is available for it. Operations without a
rule become the operation of the domain "tensorflow" with the same name, inputs and attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tensorflow import rules_arrays, rules_functions, rules_images, rules_windows
from penstock.frontends.tensorflow.attrs import EncodedTensor
from penstock.frontends.tensorflow.conversion import Conversion, Rule, registering
from penstock.frontends.tensorflow.tensors import declared_type, decode_tensor
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW
from penstock.types import ANY

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
        c.emit_final(name, attrs=attrs)

    return rule


RULES: dict[str, Rule] = {op: _same(name) for op, name in _SAME.items()}
RULES.update(rules_arrays.RULES)
RULES.update(rules_windows.RULES)
RULES.update(rules_images.RULES)
RULES.update(rules_functions.RULES)

rule = registering(RULES)


# Values without inputs.


@rule("Const")
def const(c: Conversion) -> None:
    value = c.attrs.get("value")
    if not isinstance(value, EncodedTensor):
        raise NodeError("has no tensor as its value")
    array = decode_tensor(value.proto, c.context.diagnostics.limits)
    array.flags.writeable = False  # a run may return it
    c.emit_final("Const", [], {"value": array}, domain=TENSORFLOW)


@rule("Placeholder", "PlaceholderV2")
def placeholder(c: Conversion) -> None:
    """An input of the graph. No node is emitted: nodes that wait for it need not run a node."""
    (value,) = c.outputs
    if c.scope.function:
        raise NodeError("is a placeholder in a function, which cannot be fed; make it an argument")
    shape = c.attrs.get("shape")
    value.type = declared_type(c.attrs.get("dtype"), shape)
    # Old files write a scalar's shape for an unknown one.
    if shape == () and c.context.producer < _SCALAR_SHAPES_SINCE:
        value.type = declared_type(c.attrs.get("dtype"))
    c.scope.inputs.append(value)
    c.scope.placeholders[c.own_name] = value


_SCALAR_SHAPES_SINCE = 24  # the GraphDef version from which a Placeholder's shape () is a scalar's


# Element by element.


@rule("Cast")
def cast(c: Conversion) -> None:
    number = element_number(str(c.attrs.get("DstT")))
    if not number:
        raise InexpressibleError(f"no cast to {c.attrs.get('DstT')} is available")
    c.emit_final("Cast", attrs={"to": number})


@rule("Square")
def square(c: Conversion) -> None:
    (x,) = c.inputs
    c.emit_final("Mul", [x, x])


@rule("Relu6")
def relu6(c: Conversion) -> None:
    (x,) = c.inputs
    c.emit_final("Clip", [x, c.like(0, x), c.like(6, x)])


@rule("ClipByValue")
def clip_by_value(c: Conversion) -> None:
    low = c.emit("Max", c.inputs[:2])
    c.emit_final("Min", [low, c.inputs[2]])


@rule("LeakyRelu")
def leaky_relu(c: Conversion) -> None:
    c.emit_final("LeakyRelu", attrs={"alpha": c.attrs["alpha"]})


@rule("Erfc")
def erfc(c: Conversion) -> None:
    (x,) = c.inputs
    c.emit_final("Sub", [c.like(1, x), c.emit("Erf", [x])])


@rule("Softmax", "LogSoftmax")
def softmax(c: Conversion) -> None:
    c.emit_final(c.op, attrs={"axis": -1})


@rule("Mod")
def mod(c: Conversion) -> None:
    """As in C: the result has the sign of the dividend."""
    c.emit_final("TruncateMod", domain=TENSORFLOW)


@rule("Div")
def div(c: Conversion) -> None:
    dtype = c.dtype(0)
    if dtype is not None and dtype.kind not in "iu":
        c.emit_final("Div")
    else:
        c.emit_final("Div", domain=TENSORFLOW)


@rule("BiasAdd", "BiasAddV1")
def bias_add(c: Conversion) -> None:
    x, bias = c.inputs
    if c.attrs.get("data_format") != "NCHW":
        c.emit_final("Add")
        return
    # [C] becomes [C, 1, ...], with a 1 for each spatial dim.
    rank = c.rank(0) or 4
    axes = c.constant(range(1, rank - 1))
    c.emit_final("Add", [x, c.emit("Unsqueeze", [bias, axes]) if rank > 2 else bias])


# Products.


@rule("MatMul")
def matmul(c: Conversion) -> None:
    a, b = c.inputs
    if c.attrs["transpose_a"]:
        a = c.emit("Transpose", [a], {"perm": [1, 0]})
    if c.attrs["transpose_b"]:
        b = c.emit("Transpose", [b], {"perm": [1, 0]})
    c.emit_final("MatMul", [a, b])


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matmul(c: Conversion) -> None:
    """An adjoint is the transposed matrix, conjugated if it is complex."""
    operands = []
    for i, name in enumerate(("adj_x", "adj_y")):
        value, dtype = c.inputs[i], c.dtype(i)
        if c.attrs[name]:
            attrs = {"conjugate": int(dtype is not None and dtype.kind == "c")}
            value = c.emit("MatrixTranspose", [value], attrs, domain=TENSORFLOW)
        operands.append(value)
    c.emit_final("MatMul", operands)


@rule("Einsum")
def einsum(c: Conversion) -> None:
    c.emit_final("Einsum", attrs={"equation": c.attrs.get("equation", "")})


# Variables.


@rule("VarHandleOp", "VariableV2", "Variable")
def variable(c: Conversion) -> None:
    shape = c.attrs.get("shape")
    attrs: dict[str, Any] = {
        "container": c.attrs["container"],
        "shared_name": c.attrs["shared_name"] or c.own_name,
        "dtype": c.attrs.get("dtype"),
        "store": c.context.variables.store,
    }
    if shape is not None:
        attrs["shape"] = [-1 if d is None else d for d in shape]
    (value,) = c.outputs
    value.type = ANY
    c.emit_final(
        "VarHandleOp" if c.op == "VarHandleOp" else "VariableV2", [], attrs, domain=TENSORFLOW
    )


@rule("ReadVariableOp")
def read_variable(c: Conversion) -> None:
    """A constant if nothing assigns to the variable."""
    frozen = c.context.variables.constant(c.inputs[0])
    if frozen is None:
        attrs, type_ = c.context.variables.read_attrs(c.inputs[0], c.attrs.get("dtype"))
        c.outputs[0].type = type_
        c.emit_same_op((), **attrs)
    else:
        c.emit_final("Const", [], {"value": frozen}, domain=TENSORFLOW)


@rule("ResourceGather")
def resource_gather(c: Conversion) -> None:
    handle, indices = c.inputs
    value = c.variable(handle, c.attrs.get("dtype"))
    c.emit_final(
        "GatherV2", [value, indices], {"batch_dims": c.attrs["batch_dims"]}, domain=TENSORFLOW
    )


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(c: Conversion) -> None:
    if c.context.variables.constant(c.inputs[0]) is not None:
        raise InexpressibleError("it assigns to a variable that was found to be constant")
    c.emit_same_op(())


# Control flow.


@rule("Switch", "RefSwitch", "Merge", "RefMerge", "Exit", "RefExit", "NextIteration")
def primitive(c: Conversion) -> None:
    c.emit_same_op({"T", "N"})


RULES["RefNextIteration"] = primitive


@rule("LoopCond")
def loop_cond(c: Conversion) -> None:
    c.emit_same_op((), T="bool")


@rule("_SwitchN")
def switch_n(c: Conversion) -> None:
    c.emit_same_op({"T", "num_outs"})


@rule("Enter", "RefEnter")
def enter(c: Conversion) -> None:
    """Each use of a function's body has frames of its own."""
    name = c.attrs.get("frame_name")
    if not isinstance(name, str) or not name:
        raise NodeError("has no frame_name; name its frame")
    if c.attrs["parallel_iterations"] < 1:
        raise NodeError(
            f"allows {c.attrs['parallel_iterations']} parallel_iterations; at least one must be "
            "allowed"
        )
    constant = bool(c.attrs["is_constant"])
    c.emit_same_op(
        {"T", "parallel_iterations"}, frame_name=c.scope.prefix + name, is_constant=constant
    )


@rule("NoOp", "ControlTrigger")
def no_op(c: Conversion) -> None:
    c.emit_same_op(())


@rule("Assert")
def assert_true(c: Conversion) -> None:
    c.emit_same_op({"summarize"})
