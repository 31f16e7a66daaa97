"""Random nodes of every operation that compiled kernels are registered for, with inputs and shapes
that are likely to find faults, and the bound of the error of what they compute.

``DRAWS`` has a function for each full name in the index of the families (``tests.support.draws``).
Those of elementwise operations stand here, others in a module ``draws_*`` for each group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from penstock.ir.graph import Node
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.arrays import ZERO_NAN
from penstock.ops.internal.fused import fused
from tests.support import (
    draws_attention,
    draws_products,
    draws_recurrent,
    draws_rows,
    draws_tables,
    draws_windows,
)
from tests.support.draws import (
    CODES,
    DRAWS,
    FLOATS,
    HOLDER,
    WHOLE,
    Draw,
    Source,
    draws,
    followed,
    is_float,
    joined,
    near,
    short_name,
)
from tests.support.error_bounds import Rounded, gamma, unit

__all__ = ["DRAWS", "GROUPS"]

GROUPS = (
    *(draws_attention, draws_products, draws_recurrent),
    *(draws_rows, draws_tables, draws_windows),
)
"""modules that register draws of other operations"""

# Elementwise operations.

EXACT = """Abs Neg Sqrt Floor Ceil Sign Round Reciprocal IsNaN Relu ThresholdedRelu Shrink"""
_OF_INTEGERS = ("Abs", "Neg", "Sign", "Relu", "Shrink")
FORMULAS: dict[str, Callable[[Rounded], Rounded]] = {
    "LeakyRelu": lambda x: x.maximum(0.0) + x.minimum(0.0) * np.float64(0.01),
    "Elu": lambda x: x.maximum(0.0) + x.minimum(0.0).expm1(),
    "Celu": lambda x: x.maximum(0.0) + x.minimum(0.0).expm1(),
    "Selu": lambda x: (
        x.maximum(0.0) * near(x, 1.0507009873554805)
        + x.minimum(0.0).expm1() * near(x, 1.0507009873554805 * 1.6732632423543772)
    ),
    "HardSigmoid": lambda x: (x * near(x, 0.2) + 0.5).maximum(0.0).minimum(1.0),
    "HardSwish": lambda x: x * (x * near(x, 1 / 6) + 0.5).maximum(0.0).minimum(1.0),
    "Softsign": lambda x: x / (abs(x) + 1.0),
    "Exp": lambda x: x.exp(),
    "Log": lambda x: x.log(),
    "Tanh": lambda x: x.tanh(),
    "Sigmoid": lambda x: x.sigmoid(),
    "Erf": lambda x: x.lipschitz(_erf, 1.13),
    "Sin": lambda x: x.lipschitz(np.sin, 1),
    "Cos": lambda x: x.lipschitz(np.cos, 1),
    "Asin": lambda x: x.lipschitz(np.arcsin, 0, ulps=2.4),
    "Acos": lambda x: x.lipschitz(np.arccos, 0, ulps=2.4),
    "Softplus": lambda x: x.maximum(0.0) + (-abs(x)).exp().log1p(),
    "Swish": lambda x: x * x.sigmoid(),
    "Mish": lambda x: _mish(x),
    "Gelu": lambda x: (
        x.lipschitz(_gelu, 1.13, ulps=0.5).inexact(1.2e-7 * np.abs(x.value))
        if x.dtype.itemsize < 8
        else x * 0.5 * ((x * near(x, math.sqrt(0.5))).lipschitz(_erf, 1.13) + 1.0)
    ),
}


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.vectorize(math.erf, otypes=[float])(x))


def _gelu(x: np.ndarray) -> np.ndarray:
    half = np.vectorize(math.erfc, otypes=[float])(-x * math.sqrt(0.5)) / 2
    return np.where(np.isneginf(x), 0 * x, x * half)


def _mish(x: Rounded) -> Rounded:
    e = x.minimum(40.0).exp()
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


def _elementwise(draw: Draw) -> list[Rounded | None]:
    result = FORMULAS[draw.node.op.name](draw.read(0))
    dtype = draw.inputs[0].dtype
    return [result.cast(dtype) if dtype.itemsize < 4 else result]


@draws(EXACT, " ".join(FORMULAS))
def _unary(rng: Source, name: str) -> Draw:
    dtype = rng.pick("float32", "float32", "float64", "float16")
    if name in _OF_INTEGERS and rng.chance(0.3):
        dtype = rng.pick("int8", "int32", "int64")
    x = rng.numbers(rng.dims(rng.integers(5), least=0), dtype, 0.7)
    if name in ("Asin", "Acos") and rng.chance(0.8):
        x = (rng.random(x.shape) * 2 - 1).astype(dtype)
    attrs = {"lambd": 40.5, "bias": 2.25} if name == "Shrink" else {}
    return Draw(name, [x], attrs, _elementwise if name in FORMULAS else None, specials=True)


@draws("penstock.ZeroNaN")
def _zero_nan(rng: Source, name: str) -> Draw:
    return Draw(ZERO_NAN, [rng.numbers(rng.dims(2), rng.pick(*FLOATS), 0.8)])


@draws(
    "Add Sub Mul Div Max Min Mean Sum Mod Equal Greater GreaterOrEqual Less LessOrEqual PRelu "
    "tensorflow.Div tensorflow.FloorDiv tensorflow.FloorMod tensorflow.TruncateMod"
)
def _binary(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), least=0)
    kinds = [*FLOATS, "float16", *WHOLE, *CODES, "int16", "uint16"]
    if name in ("Mean", "PRelu", "Sum"):
        kinds = [*FLOATS, "float16"]
    domain, _, name = name.rpartition(".")
    if domain or name == "Mod":
        kinds = ["float32", *WHOLE, *CODES, "int16"]
    dtype, count = rng.pick(*kinds), 2
    if name in ("Max", "Min", "Mean", "Sum"):
        count = rng.integers(1, 4)
    shapes = [dims, *[rng.broadcast(dims) for _ in range(count - 1)]]
    if name != "PRelu" and rng.chance(0.5):
        shapes.reverse()
    inputs = [rng.numbers(shape, dtype, 0.5) for shape in shapes]
    attrs = {"fmod": int(rng.chance(0.5))} if name == "Mod" else {}
    constants = [1] if len(inputs) > 1 and rng.chance(0.2) else []
    if domain:
        inputs[1] = np.where(inputs[1] == 0, np.array(3, dtype), inputs[1])
        return Draw(name, inputs, constants=constants, domain=domain, version=1)
    return Draw(name, inputs, attrs, None if dtype != "float16" else _in_half, constants)


@draws("tflite.IntegerArithmetic tflite.CodeTable")
def _integer_arithmetic(rng: Source, full_name: str) -> Draw:
    """Codes are the same to the bit, also at ties, which scales that are powers of two give."""
    name, dtype = full_name.removeprefix("tflite."), rng.pick("int8", "uint8")
    dims, ends = rng.dims(rng.integers(1, 5), least=0), np.iinfo(dtype)
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    if name == "CodeTable":
        table = rng.integers(ends.min, ends.max + 1, 256).tolist()
        if rng.chance(0.5):
            dtype = rng.pick("int16", "uint16")
            table = rng.integers(0, 1 << 16, 1 << 16).astype(dtype)
        attrs = {"table": table}
        if dtype == "uint8" and rng.chance(0.5):
            attrs = {"table": [code - 128 for code in table], "to": element_number("int8")}
        return Draw(name, [rng.numbers(dims, dtype)], attrs, **options)
    shapes = [dims, rng.broadcast(dims)]
    if rng.chance(0.5):
        shapes.reverse()
    sizes = rng.uniform(-9, 1, 3) if rng.chance(0.7) else rng.integers(-9, 2, 3)
    attrs = {
        "operation": rng.pick("Add", "Mul", "Sub"),
        "scales": np.exp2(sizes).astype(np.float32).tolist(),
        "zero_points": rng.integers(ends.min, ends.max + 1, 3).tolist(),
        "code_limits": sorted(rng.integers(ends.min, ends.max + 1, 2).tolist()),
    }
    return Draw(name, [rng.numbers(shape, dtype) for shape in shapes], attrs, **options)


def _in_half(draw: Draw) -> list[Rounded | None]:
    """Computed in float32 by at most four roundings of what operands are, and rounded once more."""
    value, *_ = draw.wide()
    if value.dtype.kind != "f":
        return [None]
    sizes = [np.abs(x.astype(np.float64)) for x in draw.inputs]
    most = np.maximum(np.abs(value), sum(sizes) if draw.node.op.name in ("Sum", "Mean") else 0)
    exact = Rounded.exact(value, np.dtype("float32"))
    return [exact.rounded(value, gamma(4, unit(exact.dtype)) * most).cast(np.dtype("float16"))]


@draws("tflite.IntegerMean")
def _mean_of_codes(rng: Source, full_name: str) -> Draw:
    dims, dtype = rng.dims(rng.integers(1, 5), 3000), np.dtype(rng.pick("int8", "uint8"))
    ends = np.iinfo(dtype)
    axes = sorted({int(rng.integers(len(dims))) for _ in range(rng.integers(1, 4))})
    zeros = [int(rng.integers(ends.min, ends.max + 1)) for _ in range(2)]
    attrs = {
        "axes": list(range(axes[0], axes[-1] + 1)),
        "keepdims": int(rng.chance(0.5)),
        "scales": [float(np.float32(rng.pick(0.02, 0.013, 1.0))) for _ in range(2)],
        "zero_points": zeros,
        "form": rng.pick("fixed point", "mean", "sum"),
    }
    x = rng.integers(ends.min, ends.max + 1, dims).astype(dtype)
    return Draw("IntegerMean", [x], attrs, domain="tflite", version=1)


@draws("tflite.IntegerSoftmax")
def _softmax_of_codes(rng: Source, full_name: str) -> Draw:
    x = rng.integers(-32768, 32768, rng.dims(rng.integers(1, 4), 3000)).astype(np.int16)
    attrs = {"scale": float(np.float32(rng.pick(0.0003, 1e-5, 0.02))), "beta": rng.pick(1.0, 0.3)}
    return Draw("IntegerSoftmax", [x], attrs, domain="tflite", version=1)


@draws("tflite.IntegerProduct")
def _product_of_codes(rng: Source, full_name: str) -> Draw:
    dims, dtype = rng.dims(rng.integers(1, 5), 3000), np.dtype(rng.pick("int8", "int16"))
    ends, first = np.iinfo(dtype), int(rng.integers(len(dims)))
    attrs = {
        "axes": list(range(first, int(rng.integers(first, len(dims))) + 1)),
        "keepdims": int(rng.chance(0.5)),
        "scales": [float(np.float32(rng.pick(0.02, 0.013, 1.0))) for _ in range(2)],
        "zero_points": [int(rng.integers(-128, 128)) if dtype == np.int8 else 0 for _ in range(2)],
    }
    x = rng.integers(ends.min, ends.max + 1, dims).astype(dtype)
    return Draw("IntegerProduct", [x], attrs, domain="tflite", version=1)


@draws("And Or Xor Not")
def _logic(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4), least=0)
    shapes = [dims] if name == "Not" else [dims, rng.broadcast(dims)]
    return Draw(name, [rng.numbers(shape, "bool") for shape in shapes])


@draws("Where")
def _where(rng: Source, name: str) -> Draw:
    dims, dtype = rng.dims(rng.integers(1, 5)), rng.pick(*FLOATS, *WHOLE, "bool", *CODES)
    choices = [rng.numbers(shape, dtype, 0.5) for shape in (rng.broadcast(dims), dims)]
    return Draw(name, [rng.numbers(rng.broadcast(dims), "bool"), *choices])


@draws("Clip")
def _clip(rng: Source, name: str) -> Draw:
    dtype = rng.pick(*FLOATS, *CODES, *WHOLE)
    ends = [rng.pick(None, np.array(value, dtype)) for value in (3, rng.pick(1, 90))]
    constants = [1, 2] if rng.chance(0.5) else []
    return Draw(
        name,
        [rng.numbers(rng.dims(2), dtype, 0.6), *ends],
        constants=[i for i in constants if ends[i - 1] is not None],
    )


@draws("Pow")
def _pow(rng: Source, name: str) -> Draw:
    dtype, dims = rng.pick(*FLOATS), rng.dims(rng.integers(1, 4))
    x = np.abs(rng.numbers(dims, dtype, 0.4))
    power = np.array(rng.pick(0.5, 1, 2, 3, -1, -2, -0.5, 0.3, 0, 7.5), dtype)
    if rng.chance(0.3):
        power = rng.numbers(rng.broadcast(dims), dtype)

    def bound(draw: Draw) -> list[Rounded | None]:
        # Three roundings of a product, root and quotient, or two units of glibc's pow; a quotient of
        # a subnormal square has another one and a half, and of one that overflows it is 0.
        (value,) = draw.wide()
        least = 1 / np.finfo(draw.dtype).max
        return [Rounded.exact(0, draw.dtype).rounded(value, least, 7)]

    return Draw(name, [x, power], {}, bound, [1] if power.size == 1 else [])


@draws("Cast")
def _cast(rng: Source, name: str) -> Draw:
    types = {"float32": 1, "float64": 11, "int32": 6, "int64": 7, "bool": 9, "float16": 10}
    types |= {"uint8": 2, "int8": 3, "bfloat16": 16}
    source, target = rng.pick(*types), rng.pick(*types)
    x = rng.numbers(rng.dims(2, least=0), source, 0.6)
    if is_float(x) and target[-1] in "2468" and "float" not in target:
        # What does not fit is undefined; so is NaN.
        x = np.clip(np.nan_to_num(x.astype(np.float64)), -100 * (target[0] != "u"), 100)
        x = x.astype(ml_dtypes.bfloat16 if source == "bfloat16" else source)
    return Draw(name, [x], {"to": types[target]})


@draws("QuantizeLinear DequantizeLinear com.microsoft.QuantizeLinear")
@draws("com.microsoft.DequantizeLinear")
def _quantize(rng: Source, full_name: str) -> Draw:
    (name, domain), dtype = short_name(full_name), rng.pick(*CODES)
    rank = rng.integers(1, 5)
    dims, axis = rng.dims(rank), rng.integers(rank)
    shape = (dims[axis],) if rng.chance(0.4) else ()
    scale = rng.uniform(0.001, 0.5, shape).astype(np.float32)
    zero = rng.numbers(shape, dtype)
    x = rng.numbers(dims, dtype if name[0] == "D" else "float32", 0.5)
    # NaN becomes the lowest code; NumPy's conversion of it is undefined.
    x = np.nan_to_num(x) if x.dtype.kind == "f" else x
    constants = [1, 2] if rng.chance(0.7) else []
    version = 1 if domain else 26
    return Draw(name, [x, scale, zero], {"axis": int(axis)}, None, constants, 1, domain, version)


@draws("penstock.Fused")
def _chain(rng: Source, name: str) -> Draw:
    """Chains of exact operations, and a sum of codes."""
    dims = rng.dims(rng.integers(1, 4))
    if rng.chance(0.3):
        dtype = rng.pick("int8", "uint8", "int16", "uint16")
        operation, bounded = rng.pick("Add", "Mul"), rng.chance(0.5)
        return _pair(rng, operation, dtype, dims, bounded=bounded)
    after = rng.pick([("Relu", 0)], [("Mul", 1), ("Neg", 0)], [("Add", 1), ("Abs", 0), ("Sqrt", 0)])
    inputs = [rng.numbers(shape, "float32", 0.4) for shape in (dims, rng.broadcast(dims))]
    return Draw("Add", inputs, fused=lambda node: followed(node, after, node.inputs[1]))


def _pair(rng: Source, operation: str, dtype: str, dims: Any, *, bounded: bool) -> Draw:
    codes = [rng.numbers(dims, dtype) for _ in range(2)]
    scales = [np.array(2.0 ** rng.integers(-6, 2), np.float32) for _ in range(3)]
    zeros = [rng.numbers((), dtype) for _ in range(3)]
    inputs = [codes[0], scales[0], zeros[0], codes[1], scales[1], zeros[1], scales[2], zeros[2]]
    constants = [i for i in range(8) if i not in (0, 3)]

    def build(node: Node) -> Node:
        values = node.inputs
        nodes = [joined("DequantizeLinear", values[i : i + 3]) for i in (0, 3)]
        nodes.append(joined(operation, [n.outputs[0] for n in nodes]))
        if bounded:
            nodes.append(joined("Relu", [nodes[-1].outputs[0]]))
        nodes.append(joined("QuantizeLinear", [nodes[-1].outputs[0], *values[6:8]]))
        return fused(nodes)

    return Draw(HOLDER, inputs, constants=constants, fused=build)


"""holds the inputs of a fused node that does not begin with all of them"""
