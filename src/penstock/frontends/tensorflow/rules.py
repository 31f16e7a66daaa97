"""Rules for TensorFlow's operations, by the operation's name.

A rule takes a ``Conversion`` and emits nodes. It raises ``NodeError`` if the node breaks
TensorFlow's rules, ``InexpressibleError`` if no kernel is available for it. Operations without a
rule become the operation of the domain "tensorflow" with the same name, inputs and attributes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.types import ShapeError, find_dtype
from penstock.frontends.common.diagnostics import InexpressibleError, NodeError
from penstock.frontends.tensorflow.conversion import Conversion, listed, rule
from penstock.frontends.tensorflow.tensors import declared_type
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import TENSORFLOW
from penstock.ops.tensorflow.state import variable_of

# Operations with the meaning of ONNX's operation of the same name, or after "=", input for input.
_AS_IN_ONNX = """
    Abs AccumulateNV2=Sum Acos Acosh Add AddV2=Add Asin Asinh Atan Atanh BitwiseAnd
    BitwiseOr BitwiseXor Ceil Cos Cosh Cumprod=CumProd Cumsum=CumSum Einsum Elu Equal Erf Exp Floor
    Greater GreaterEqual=GreaterOrEqual Identity Inv=Reciprocal Invert=BitwiseNot
    IsInf IsNan=IsNaN LeakyRelu Less LessEqual=LessOrEqual Log LogSoftmax LogicalAnd=And
    LogicalNot=Not LogicalOr=Or Maximum=Max Minimum=Min Mul Neg PlaceholderWithDefault=Identity Pow
    PreventGradient=Identity Range RealDiv=Div Reciprocal RefIdentity=Identity Relu Reshape
    SelectV2=Where Selu Sign Sin Sinh Snapshot=Identity Softmax Softplus Softsign Sqrt
    StopGradient=Identity Sub Tan Tanh
"""
_ONNX_NAMES = {
    name: onnx_name or name
    for name, _, onnx_name in (entry.partition("=") for entry in _AS_IN_ONNX.split())
}
_ONNX_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "LogSoftmax": {"axis": -1},
    # 0 is a dim of 0, not a copy of the input's dim, and does not count where -1 is inferred.
    "Reshape": {"allowzero": 1, "skip_zeros": 1},
    "Softmax": {"axis": -1},
}


# Attributes of the same name; truth values are integers in ONNX.
_SAME_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Cumprod", "Cumsum"), ("exclusive", "reverse")),
    "Einsum": ("equation",),
    "LeakyRelu": ("alpha",),
}


@rule(*_ONNX_NAMES)
def as_in_onnx(c: Conversion) -> None:
    same = ((key, c.attrs[key]) for key in _SAME_ATTRIBUTES.get(c.op, ()))
    attrs = {key: int(value) if isinstance(value, bool) else value for key, value in same}
    c.emit_final(_ONNX_NAMES[c.op], attrs=attrs | _ONNX_ATTRIBUTES.get(c.op, {}))


# Attributes that matter to operations of the domain "tensorflow" with the same name and inputs. An
# operation without a rule keeps all of its attributes.
_PRIMITIVES = "Exit Merge NextIteration RefExit RefMerge RefNextIteration RefSwitch Switch"
_KEPT_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_PRIMITIVES.split(), ("T", "N")),
    **dict.fromkeys(("ControlTrigger", "NoOp", "OptionalFromValue"), ()),
    **dict.fromkeys(("Unique", "UniqueWithCounts"), ("out_idx",)),
    "Assert": ("summarize",),
    "GatherV2": ("batch_dims",),
    "_SwitchN": ("T", "num_outs"),
}


@rule(*_KEPT_ATTRIBUTES)
def as_in_tensorflow(c: Conversion) -> None:
    c.emit_same_op(_KEPT_ATTRIBUTES[c.op])


@rule("AddN", "ZerosLike")
def tensors_or_variants(c: Conversion) -> None:
    if c.attrs.get("T") == "variant":
        c.emit_final("AddVariants" if c.op == "AddN" else "ZerosLikeVariant", domain=TENSORFLOW)
    elif c.op == "AddN":
        c.emit_final("Sum")
    else:
        c.emit_same_op(())


@rule("OptionalGetValue")
def optional_get_value(c: Conversion) -> None:
    names, shapes = c.attrs["output_types"], c.attrs["output_shapes"]
    if len(names) != len(shapes):
        raise NodeError(f"declares {len(names)} output_types, but {len(shapes)} output_shapes")
    types = [declared_type(name, shape) for name, shape in zip(names, shapes, strict=True)]
    c.emit_same_op((), types=types)


# Values without inputs.


@rule("Const")
def const(c: Conversion) -> None:
    array = c.scope.constant(c.own_name)
    if array is None:
        raise NodeError("has no tensor as its value")
    if find_dtype(c.attrs["dtype"]) != array.dtype:
        raise NodeError(f"declares {c.attrs['dtype']}, but its value is {array.dtype}")
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


# Elementwise operations.


COMPLEX = ("complex64", "complex128")


@rule("Cast")
def cast(c: Conversion) -> None:
    """Of complex numbers, others are the real parts."""
    number = element_number(str(c.attrs.get("DstT")))
    if not number:
        raise InexpressibleError(f"no cast to {c.attrs.get('DstT')} is available")
    x = c.inputs[0]
    if c.attrs["SrcT"] in COMPLEX and c.attrs["DstT"] not in COMPLEX:
        x = c.emit("Real", [x], domain=TENSORFLOW)
    c.emit_final("Cast", [x], {"to": number})


@rule("Round")
def round_(c: Conversion) -> None:
    """Integers, which ONNX's Round does not take, stay as they are."""
    c.emit_final("Identity" if c.attrs["T"].startswith("int") else "Round")


@rule("Sigmoid")
def sigmoid(c: Conversion) -> None:
    """ONNX's Sigmoid takes no complex numbers."""
    if c.attrs["T"] in COMPLEX:
        (x,) = c.inputs
        power = c.emit("Exp", [c.emit("Neg", [x])])
        c.emit_final("Reciprocal", [c.emit("Add", [power, c.like(1, x)])])
    else:
        c.emit_final("Sigmoid")


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
    # TensorFlow's bounds may be tensors, but those of ONNX's Clip are scalars.
    low = c.emit("Max", c.inputs[:2])
    c.emit_final("Min", [low, c.inputs[2]])


@rule("Erfc")
def erfc(c: Conversion) -> None:
    (x,) = c.inputs
    c.emit_final("Sub", [c.like(1, x), c.emit("Erf", [x])])


@rule("Mod")
def mod(c: Conversion) -> None:
    """As in C: the result has the sign of the dividend."""
    c.emit_final("TruncateMod", domain=TENSORFLOW)


@rule("Div")
def div(c: Conversion) -> None:
    dtype = c.dtype(0)
    # For an unknown type, use TensorFlow's operation, which examines the elements in the run.
    integers = dtype is None or dtype.kind in "iu"
    c.emit_final("Div", domain=TENSORFLOW if integers else "")


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


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(c: Conversion) -> None:
    """An adjoint is the transposed matrix, conjugated if it is complex."""
    operands = list(c.inputs)
    names = ("transpose_a", "transpose_b") if c.op == "MatMul" else ("adj_x", "adj_y")
    for i, name in enumerate(names):
        if not c.attrs[name]:
            continue
        if c.op == "MatMul":
            operands[i] = c.emit("Transpose", [operands[i]], {"perm": [1, 0]})
            continue
        dtype = c.dtype(i)
        attrs = {"conjugate": int(dtype is not None and dtype.kind == "c")}
        operands[i] = c.emit("MatrixTranspose", [operands[i]], attrs, domain=TENSORFLOW)
    if c.op == "BatchMatMulV3":  # whose products and sums are of the output's type
        to = c.attrs["Tout"]
        if to == "int32" and {c.attrs["Ta"], c.attrs["Tb"]} <= {"int8", "uint8"}:
            c.emit_final("MatMulInteger", operands)
            return
        code = element_number(to)
        for i, given in enumerate((c.attrs["Ta"], c.attrs["Tb"])):
            if given != to:
                operands[i] = c.emit("Cast", [operands[i]], {"to": code})
    c.emit_final("MatMul", operands)


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
        attrs["shape"] = listed(shape)
    try:
        variable_of(attrs, c.name)  # executors that freeze the variable would not notice it
    except ShapeError as error:
        raise NodeError(f"cannot be: {error}") from error
    name = "VarHandleOp" if c.op == "VarHandleOp" else "VariableV2"
    c.emit_final(name, [], attrs, domain=TENSORFLOW)


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


@rule("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
def assign(c: Conversion) -> None:
    if c.context.variables.constant(c.inputs[0]) is not None:
        raise InexpressibleError("it assigns to a variable that is a constant")
    c.emit_same_op(())


_DRAWING = "Multinomial RandomShuffle RandomStandardNormal RandomUniform RandomUniformInt"


@rule("TruncatedNormal", *_DRAWING.split())
def draw(c: Conversion) -> None:
    """Seeds are the beginning of a state, a variable that each run moves on."""
    inputs, seeds = list(c.inputs), [c.attrs["seed"], c.attrs["seed2"]]
    if any(seeds):
        name = f"{c.name}#state"
        # As of generators: the counter, of which the second seed is the upper half, and the key.
        state = np.array([0, seeds[1], seeds[0]], np.int64)
        store = c.context.variables.store
        store.initial[name], store.constant = state, False
        attrs = {"container": "", "shared_name": name, "dtype": "int64", "shape": [3]}
        inputs.append(c.emit("VarHandleOp", [], attrs | {"store": store}, domain=TENSORFLOW))
    names: tuple[str, ...] = ("dtype", "Tout", "output_dtype")
    kept = {key: c.attrs[key] for key in names if key in c.attrs}
    c.emit_final(c.op, inputs, kept, domain=TENSORFLOW)


# Control flow.


@rule("LoopCond")
def loop_cond(c: Conversion) -> None:
    c.emit_same_op((), T="bool")


@rule("Enter", "RefEnter")
def enter(c: Conversion) -> None:
    """Each use of a function's body has frames of its own."""
    name = c.attrs.get("frame_name") or ""  # verification refuses an Enter without one
    attrs = {
        "frame_name": name and c.scope.prefix + name,
        "is_constant": bool(c.attrs["is_constant"]),
    }
    c.emit_same_op({"T", "parallel_iterations"}, **attrs)
