"""Random nodes of every operation that compiled kernels are registered for, with inputs and shapes
that are likely to find faults, and the bound of the error of what they compute.

``DRAWS`` has a function for each full name in the index of the families. It draws a node: dims of 0
and 1, around multiples of vectors and prime, windows larger than what they look at, numbers of all
magnitudes, subnormal, infinite and NaN, indices out of range. A draw without a bound is compared with
NumPy bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from onnx.numpy_helper import to_array

from penstock.core.types import STRING
from penstock.ir.graph import Node
from penstock.ir.op import Op
from penstock.ops.internal.arrays import APPEND, ZERO_NAN
from penstock.ops.internal.attention import ATTENTION, STACKED_ATTENTION
from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from penstock.ops.internal.chosen_product import CHOSEN_MATMUL
from penstock.ops.internal.fused import fused
from penstock.ops.internal.packed import PACKED_ATTENTION
from penstock.ops.internal.pages import BY_DISTANCE, PAGED_ATTENTION
from penstock.ops.internal.recurrence import RECURRENCE
from penstock.ops.internal.search import SEARCH_END, SEARCH_START, SEARCH_STEP, STATE
from penstock.ops.internal.transfer import REORDER
from penstock.ops.onnx.convolution import conv_shape
from tests.support import tree_models
from tests.support.error_bounds import Rounded, gamma, smallest, unit
from tests.support.native_kernels import expected, node_of

FLOATS, WHOLE = ("float32", "float64"), ("int32", "int64")
CODES = ("uint8", "int8")
SIZES = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16, 17, 23, 31, 32, 33, 37, 63, 64, 65, 129, 257)


class Source(np.random.Generator):
    """A generator of random numbers that prefers what is awkward."""

    def pick(self, *options: Any) -> Any:
        return options[self.integers(len(options))]

    def chance(self, probability: float) -> bool:
        return bool(self.random() < probability)

    def size(self, most: int = 257, least: int = 1) -> int:
        return int(self.pick(*[n for n in SIZES if least <= n <= most]))

    def dims(self, rank: int, elements: int = 6000, least: int = 1) -> tuple[int, ...]:
        """As many dims; now and then one is 0."""
        dims = [1] * rank
        for axis in self.permutation(rank):
            room = elements // math.prod([max(n, 1) for n in dims])
            dims[axis] = self.size(max(min(room, 257), 1), least)
        if rank and not least and self.chance(0.9):
            dims = [max(n, 1) for n in dims]
        return tuple(dims)

    def numbers(self, dims: Sequence[int], dtype: str, wild: float = 0.0) -> np.ndarray:
        """Numbers of similar magnitudes, of different ones, or with probability ``wild`` of all that
        there are, special ones among them."""
        kind = np.dtype(dtype).kind if dtype != "bfloat16" else "f"
        if kind == "b":
            return self.random(dims) < 0.5
        if kind in "iu":
            ends = np.iinfo(dtype)
            x = self.integers(ends.min, ends.max, dims, dtype, endpoint=True)
            if self.chance(0.5):
                return np.asarray(x % 7).astype(dtype)
            special = np.array([ends.min, ends.max, 0, 1, ends.max // 2], dtype)
            return np.where(self.random(dims) < 0.1, self.choice(special, dims), x)
        x = self.normal(0, self.pick(0.3, 1, 4), dims)
        if self.chance(0.4):
            x = x * 2.0 ** self.integers(-8, 8, dims)
        if self.chance(0.2):
            x = x + self.pick(-30.0, 100.0)
        if self.chance(wild):
            ends = ml_dtypes.finfo(dtype)
            x = np.where(self.random(dims) < 0.2, x * 2.0 ** self.integers(-140, 120, dims), x)
            special = [*(np.nan, np.inf, -np.inf, 0.0, -0.0, float(ends.max), float(ends.tiny))]
            special += [float(ends.smallest_subnormal), -float(ends.max), 88.7, -103.9, 0.5, 1.5, 1]
            x = np.where(self.random(dims) < 0.1, self.choice(special, dims), x)
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def broadcast(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims that broadcast to these."""
        kept = [1 if self.chance(0.3) else n for n in dims]
        return tuple(kept[self.integers(len(kept) + 1) :] if self.chance(0.3) else kept)

    def named(self, texts: Sequence[str], dims: Sequence[int]) -> np.ndarray:
        return np.asarray(np.array(texts, STRING)[self.integers(len(texts), size=dims)], STRING)


@dataclass(eq=False)
class Draw:
    """A node with its inputs. ``bound`` gives the outputs with their errors, None for those that
    are as NumPy's; ``is_formula``: NumPy's kernel has no form in float64, and the value of the bound
    is the exact result. ``specials``: infinities and NaNs are those of the exact result."""

    name: str | Op
    inputs: list[Any]
    attrs: dict[str, Any] = field(default_factory=dict)
    bound: Callable[[Draw], Sequence[Rounded | None]] | None = None
    constants: Sequence[int] = ()
    outputs: int = 1
    domain: str = ""
    version: int = 26
    fused: Callable[[Node], Node] | None = None
    is_formula: bool = False
    specials: bool = False

    @cached_property
    def node(self) -> Node:
        return self._node(self.inputs)

    def _node(self, inputs: Sequence[Any]) -> Node:
        options = (self.constants, self.outputs, self.domain, self.version)
        attrs = {k: int(v) if isinstance(v, np.integer) else v for k, v in self.attrs.items()}
        node = node_of(self.name, inputs, *options, **attrs)
        return node if self.fused is None else self.fused(node)

    @property
    def dtype(self) -> np.dtype:
        """That of the arithmetic."""
        floats = [x.dtype for x in self.inputs if x is not None and _is_float(x)]
        is_wide = bool(floats) and floats[0].itemsize == 8
        return np.dtype("float64" if is_wide else "float32")

    def read(self, i: int) -> Rounded:
        return Rounded.exact(self.inputs[i], self.dtype)

    def wide(self, change: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> list[np.ndarray]:
        """NumPy's results in float64, of inputs that are changed."""
        inputs = [
            change(x.astype(np.float64)) if x is not None and _is_float(x) else x
            for x in self.inputs
        ]
        return [np.asarray(y) for y in expected(self._node(inputs), inputs)]

    def linear(self, roundings: float) -> list[Rounded | None]:
        """The bound of sums of products, each of as many factors and terms in all."""
        # Where a factor is below 1, what it is of may overflow.
        attrs = self.attrs.items()
        sizes = {k: max(abs(v), 1.0) if isinstance(v, float) else v for k, v in attrs}
        (value, *_), (most, *_) = self.wide(), replace(self, attrs=sizes).wide(np.abs)
        own = gamma(roundings, unit(self.dtype)) * most
        return [Rounded.exact(0, self.dtype).summed(value, own, most, roundings)]


def _is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16


Drawer: TypeAlias = Callable[[Source, str], Draw]
DRAWS: dict[str, Drawer] = {}


def draws(*names: str) -> Callable[[Drawer], Drawer]:
    """Register a function for operations of these full names, apart by spaces."""

    def register(function: Drawer) -> Drawer:
        DRAWS.update({name: function for text in names for name in text.split()})
        return function

    return register


def _short(full_name: str) -> tuple[str, str]:
    domain, _, name = full_name.rpartition(".")
    return name, domain


# Elementwise operations.

EXACT = """Abs Neg Sqrt Floor Ceil Sign Round Reciprocal IsNaN Relu ThresholdedRelu Shrink"""
_OF_INTEGERS = ("Abs", "Neg", "Sign", "Relu", "Shrink")
FORMULAS: dict[str, Callable[[Rounded], Rounded]] = {
    "LeakyRelu": lambda x: x.maximum(0.0) + x.minimum(0.0) * np.float64(0.01),
    "Elu": lambda x: x.maximum(0.0) + x.minimum(0.0).expm1(),
    "Celu": lambda x: x.maximum(0.0) + x.minimum(0.0).expm1(),
    "Selu": lambda x: (
        x.maximum(0.0) * _near(x, 1.0507009873554805)
        + x.minimum(0.0).expm1() * _near(x, 1.0507009873554805 * 1.6732632423543772)
    ),
    "HardSigmoid": lambda x: (x * _near(x, 0.2) + 0.5).maximum(0.0).minimum(1.0),
    "HardSwish": lambda x: x * (x * _near(x, 1 / 6) + 0.5).maximum(0.0).minimum(1.0),
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
        else x * 0.5 * ((x * _near(x, math.sqrt(0.5))).lipschitz(_erf, 1.13) + 1.0)
    ),
}


def _near(x: Rounded, number: float) -> Rounded:
    """A parameter, rounded to the type of ``x``."""
    return x.rounded(np.float64(number), 0.0)


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
        return Draw(name, [rng.numbers(dims, dtype)], {"table": table}, **options)
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
        "fixed_point": int(rng.chance(0.5)),
    }
    x = rng.integers(ends.min, ends.max + 1, dims).astype(dtype)
    return Draw("IntegerMean", [x], attrs, domain="tflite", version=1)


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
    if _is_float(x) and target[-1] in "2468" and "float" not in target:
        # What does not fit is undefined; so is NaN.
        x = np.clip(np.nan_to_num(x.astype(np.float64)), -100 * (target[0] != "u"), 100)
        x = x.astype(ml_dtypes.bfloat16 if source == "bfloat16" else source)
    return Draw(name, [x], {"to": types[target]})


@draws("QuantizeLinear DequantizeLinear com.microsoft.QuantizeLinear")
@draws("com.microsoft.DequantizeLinear")
def _quantize(rng: Source, full_name: str) -> Draw:
    (name, domain), dtype = _short(full_name), rng.pick(*CODES)
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


def followed(node: Node, after: Sequence[tuple[str, int]], other: Any) -> Node:
    """A node with operations behind it as one, which read ``other`` too if they are of two."""
    nodes = [node]
    for operation, more in after:
        values = [nodes[-1].outputs[0], *[other] * more]
        nodes.append(joined(operation, values))
    return fused(nodes)


def joined(operation: str, values: Sequence[Any], **attrs: Any) -> Node:
    """A node that reads these values, and may follow those that compute them."""
    arrays = [None if v is None else np.broadcast_to(_zero(v), v.type.dims) for v in values]
    node = node_of(operation, arrays, **attrs)
    return Node(node.op, list(values), node.outputs, attrs)


def _zero(value: Any) -> np.ndarray:
    return np.zeros((), value.type.dtype) if value.const is None else value.const


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

    return Draw(_HOLDER, inputs, constants=constants, fused=build)


_HOLDER = Op("Holder", "tests", 1, 1, lambda types, attrs, consts: types[:1], lambda *_: None)
"""holds the inputs of a fused node that does not begin with all of them"""


# Products.


def _product(rng: Source, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    k, n, m = rng.size(), rng.size(), rng.size(65)
    lead = rng.dims(rng.integers(3), 4)
    lead_b = rng.broadcast(lead) if rng.chance(0.5) else ()
    a = rng.numbers((*lead, m, k), dtype, 0.15)
    b = rng.numbers((*lead_b, k, n), dtype, 0.15)
    return a, b


@draws("MatMul penstock.Fused(MatMul)")
def _matmul(rng: Source, name: str) -> Draw:
    is_fused = "(" in name
    dtype = "float32" if is_fused else rng.pick(*FLOATS, *FLOATS, *WHOLE)
    a, b = _product(rng, dtype)
    constants = [1] if is_fused or rng.chance(0.5) else []
    if is_fused:
        b = b.reshape(-1, *b.shape[-2:])[0]
    elif rng.chance(0.1):
        a = a[(0,) * (a.ndim - 1)]
    bound = _of_products(a.shape[-1] + 1 + is_fused) if dtype in FLOATS else None
    draw = Draw("MatMul", [a, b], {}, bound, constants)
    return _with_activation(rng, draw) if is_fused else draw


@draws("Gemm penstock.Fused(Gemm)")
def _gemm(rng: Source, name: str) -> Draw:
    is_fused = "(" in name
    dtype = "float32" if is_fused else rng.pick(*FLOATS)
    a, b = (x.reshape(-1, *x.shape[-2:])[0] for x in _product(rng, dtype))
    return _gemm_of(rng, a, b, dtype, is_fused)


def _gemm_of(rng: Source, a: np.ndarray, b: np.ndarray, dtype: str, is_fused: bool) -> Draw:
    turned = [int(rng.chance(0.4)) for _ in range(2)]
    if is_fused:
        turned[0] = 0
    term = rng.pick(None, (), (b.shape[1],), (a.shape[0], 1), (a.shape[0], b.shape[1]))
    if is_fused:
        term = (b.shape[1],)
    inputs = [x.T.copy() if t else x for x, t in zip((a, b), turned, strict=True)]
    inputs += [] if term is None else [rng.numbers(term, dtype)]
    attrs = {"transA": turned[0], "transB": turned[1]}
    if rng.chance(0.3) and not is_fused:
        attrs |= {"alpha": 0.5, "beta": -2.0}
    constants = [1, 2] if is_fused else rng.pick([], [1])
    products = _of_products(a.shape[1] + 4)

    def bound(draw: Draw) -> Sequence[Rounded | None]:
        (result,) = products(draw)
        if "alpha" not in attrs or result is None:
            return [result]
        # It may multiply either operand first, by which a subnormal one is rounded: the other
        # operand multiplies this error.
        sums = np.abs(a.astype(float)).sum(1)[:, None], np.abs(b.astype(float)).sum(0)
        most = np.nan_to_num(np.maximum(*sums), nan=np.inf)
        return [result.inexact(smallest(result.dtype) / 2 * most)]

    draw = Draw("Gemm", inputs, attrs, bound, constants)
    return _with_activation(rng, draw) if is_fused else draw


def _of_products(roundings: float) -> Callable[[Draw], Sequence[Rounded | None]]:
    return lambda draw: draw.linear(roundings)


def _with_activation(rng: Source, draw: Draw) -> Draw:
    """With what may follow products, which changes no error but by its own rounding."""
    after = rng.pick([("Relu", 0)], [("Neg", 0)], [("Relu", 0), ("Neg", 0)])
    plain, bound = draw.node, draw.bound
    assert bound is not None

    def bounded(draw: Draw) -> Sequence[Rounded | None]:
        (result,) = bound(Draw(draw.name, draw.inputs, draw.attrs, bound, draw.constants))
        assert result is not None
        for operation, _ in after:
            result = result.maximum(0.0) if operation == "Relu" else -result
        return [result]

    draw.bound, draw.fused = bounded, lambda node: followed(node, after, plain.inputs[0])
    del draw.__dict__["node"]
    return draw


@draws("penstock.ChosenMatMul")
def _chosen(rng: Source, name: str) -> Draw:
    count, k, n, rows = rng.integers(1, 6), rng.size(129), rng.size(129), rng.size(9)
    turned, columns = rng.chance(0.5), rng.chance(0.5)
    dtype, lead = rng.pick(*FLOATS), rng.dims(2, 12)
    x = rng.numbers((*lead, *((k, 1) if columns else (rows, k))), dtype)
    matrices = rng.numbers((count, n, k) if turned else (count, k, n), dtype)
    indices = rng.integers(-count, count, (*lead, 1))
    if rng.chance(0.1):
        indices.flat[0] = rng.pick(count, -count - 1, 2**62)
    attrs = {"transposed": turned, "columns": columns}
    return Draw(CHOSEN_MATMUL, [x, matrices, indices], attrs, _of_products(k + 1))


@draws("MatMulInteger QLinearMatMul com.microsoft.QGemm penstock.Fused(MatMulInteger)")
def _codes_product(rng: Source, full_name: str) -> Draw:
    (x_dtype, w_dtype), k, n = (rng.pick(*CODES), rng.pick(*CODES)), rng.size(), rng.size()
    rows = rng.pick((rng.size(65),), rng.dims(2, 60))
    x, w = rng.numbers((*rows, k), x_dtype), rng.numbers((k, n), w_dtype)
    zeros = [rng.numbers((), x_dtype), rng.numbers(rng.pick((), (n,)), w_dtype)]
    if "MatMulInteger" in full_name:
        draw = Draw("MatMulInteger", [x, w, *zeros], constants=[1, 3])
        if "(" in full_name:
            scale = np.array(0.25, np.float32)
            return Draw(
                _HOLDER,
                [x, w, *zeros, scale],
                constants=[1, 3, 4],
                fused=lambda node: _scaled(node, "MatMulInteger"),
            )
        return draw
    scales = [np.array(0.02, np.float32), rng.uniform(0.001, 0.01, zeros[1].shape)]
    x_scale, w_scale = (np.asarray(s, np.float32) for s in scales)
    result = [np.array(0.1, np.float32), rng.numbers((), x_dtype)]
    if full_name == "QLinearMatMul":
        inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], *result]
        return Draw(full_name, inputs, constants=[1, *range(3, 8)])
    bias = rng.integers(-(10**6), 10**6, n, np.int32)
    x = x.reshape(-1, k)
    inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], bias, *result]
    constants = [1, *range(3, 9)]
    attrs = {"code_limits": _limits(rng, result[1])} if rng.chance(0.5) else {}
    return Draw("QGemm", inputs, attrs, None, constants, domain="com.microsoft", version=1)


def _scaled(node: Node, operation: str, **attrs: Any) -> Node:
    """Sums of codes, which become float32 and are multiplied by a power of two, exactly."""
    *operands, scale = node.inputs
    sums = joined(operation, operands, **attrs)
    real = joined("Cast", [sums.outputs[0]], to=1)
    return fused([sums, real, joined("Mul", [real.outputs[0], scale])])


@draws("DynamicQuantizeLinear")
def _dynamic(rng: Source, name: str) -> Draw:
    x = rng.numbers(rng.dims(rng.integers(4), least=0), "float32")
    return Draw(name, [x], outputs=3)


@draws("com.microsoft.MatMulNBits")
def _blocks(rng: Source, name: str) -> Draw:
    bits, block = rng.pick(2, 4, 8), rng.pick(16, 32, 64)
    k, n = 16 * rng.size(17), rng.size()
    count = -(-k // block)
    rows = rng.pick((rng.size(17),), rng.dims(2, 30))
    codes = rng.integers(0, 256, (n, count, block * bits // 8), np.uint8)
    inputs = [
        *(rng.numbers((*rows, k), "float32"), codes),
        *(rng.random((n, count), np.float32) / 2**bits, None, None, None),
    ]
    if rng.chance(0.5):
        inputs[3] = rng.integers(0, 256, (n, -(-count * bits // 8)), np.uint8)
    if rng.chance(0.3):
        inputs[5] = rng.numbers((n,), "float32")
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block}
    if by_codes := rng.chance(0.5):
        attrs["accuracy_level"] = 4

    def bound(draw: Draw) -> list[Rounded | None]:
        numbers, packed, scales, zeros, _, bias = draw.inputs
        x = draw.read(0)
        if by_codes:  # each block of a row may become int8 over its own range
            padding = [(0, 0)] * len(rows) + [(0, count * block - k)]
            blocks = np.abs(np.pad(numbers.astype(np.float64), padding)).reshape(
                *rows, count, block
            )
            x = x.inexact(np.repeat(blocks.max(-1) / 127 * 0.51, block, axis=-1)[..., :k])
        codes, half = _unpacked(packed, bits).reshape(n, count, block), 2.0 ** (bits - 1)
        # Codes, and what zero points shift them by, may be summed apart; weights are rounded once,
        # and sums as in any product.
        parts = [codes - half]
        if zeros is not None:
            shifts = half - _unpacked(zeros, bits)[:, :count, None]
            parts.append(np.broadcast_to(shifts, codes.shape))
        sums = []
        for part in parts:
            w = (part * scales[..., None].astype(np.float64)).reshape(n, -1)[:, :k]
            weights = Rounded.exact(w, draw.dtype).rounded(w, 0, 2)
            sums.append(x @ weights.map(np.transpose))
        y = sum(sums[1:], sums[0])
        return [y if bias is None else y + bias.astype(np.float64)]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    return Draw("MatMulNBits", inputs, attrs, bound, [1, 2, 3], **options)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits, the lowest of a byte first."""
    parts = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & (2**bits - 1)
    return np.asarray(parts.reshape(*packed.shape[:-1], -1))


@draws("com.microsoft.MoE", "com.microsoft.QMoE")
def _experts(rng: Source, name: str) -> Draw:
    tokens, experts, hidden, inner = rng.size(33), rng.integers(2, 6), 32, 32 * rng.integers(1, 4)
    is_quantized, activation = name.endswith(".QMoE"), rng.pick("relu", "silu", "identity", "gelu")
    inputs: list[Any] = [None] * (15 if is_quantized else 8)
    inputs[0] = rng.normal(size=(1, tokens, hidden)).astype(np.float32)
    inputs[1] = rng.normal(size=(tokens, experts)).astype(np.float32)
    layers = {2: (inner, hidden), 5 if is_quantized else 4: (hidden, inner)}
    for place, (rows, columns) in layers.items():
        if is_quantized:
            inputs[place] = rng.integers(0, 256, (experts, rows, columns // 2), np.uint8)
            inputs[place + 1] = rng.random((experts, rows), np.float32) / 64
        else:
            inputs[place] = rng.normal(size=(experts, rows, columns)).astype(np.float32) / 8
    attrs = {"k": 2, "activation_type": activation}
    attrs |= {"expert_weight_bits": 4} if is_quantized else {"normalize_routing_weights": 1}

    def weights_of(draw: Draw, place: int, expert: int) -> Rounded:
        w = draw.inputs[place][expert]
        if not is_quantized:
            return Rounded.exact(w.T.astype(np.float64), draw.dtype)
        w = _unpacked(w, 4) - 8.0
        w = w * draw.inputs[place + 1][expert][:, None].astype(np.float64)
        return Rounded.exact(w.T, draw.dtype).rounded(w.T, 0, 2)

    def bound(draw: Draw) -> list[Rounded | None]:
        x, shares = draw.read(0)[0], draw.read(1)
        order = np.argsort(-draw.inputs[1], axis=1, kind="stable")[:, :2]
        routes = shares.map(lambda v: np.take_along_axis(v, order, 1)).softmax(1)
        total = draw.read(0)[0] * 0.0
        for expert in range(experts):
            h = x
            for place in layers:
                h = h @ weights_of(draw, place, expert)
                h = _activated(h, activation) if place == 2 else h
            for choice in range(2):
                share = routes[:, choice : choice + 1]
                total = total + h * share * (order[:, choice : choice + 1] == expert)
        return [total[None]]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    constants = [i for i, array in enumerate(inputs) if i > 1 and array is not None]
    return Draw(_short(name)[0], inputs, attrs, bound, constants, **options)


def _activated(x: Rounded, name: str) -> Rounded:
    if name == "gelu":  # its form with tanh, or with erf: both have slopes below 1.13
        return x.lipschitz(
            lambda v: v * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))), 1.13
        ).inexact(8 * unit(x.dtype) * np.abs(x.value))
    return {"relu": x.maximum(0.0), "silu": x * x.sigmoid()}.get(name, x)


# Windows.


def _image(
    rng: Source, name: str, dtype: str, wild: float = 0.1
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Images and weights of a convolution, and its attributes: padding is as large as the window,
    or larger, and windows are as large as what they look at."""
    rank = rng.pick(1, 2, 2, 2, 3)
    depthwise = rng.chance(0.3)
    group = rng.size(33) if depthwise else rng.pick(1, 1, 1, 2, 3)
    channels = group * (1 if depthwise else rng.size(37))
    filters = group * (rng.pick(1, 1, 2) if depthwise else rng.size(37))
    sizes = [rng.size({1: 65, 2: 17, 3: 7}[rank]) for _ in range(rank)]
    kernel = [rng.pick(1, 1, 2, 3, 3, 4, 5, 7)] * rank
    if rng.chance(0.4):
        kernel = [rng.pick(1, 2, 3, 5) for _ in range(rank)]
    dilations = [rng.pick(1, 1, 1, 2, 5) for _ in range(rank)]
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [int(rng.integers(0, span + 1)) if rng.chance(0.6) else 0 for span in spans * 2]
    for axis in range(rank):
        lack = spans[axis] - sizes[axis] - pads[axis] - pads[axis + rank]
        sizes[axis] += max(lack, 0)
    attrs: dict[str, Any] = {"pads": pads, "dilations": dilations, "group": group}
    attrs["strides"] = [rng.pick(1, 1, 2, 3) for _ in range(rank)]
    if rng.chance(0.15) and name != "DeformConv":
        attrs["auto_pad"] = rng.pick("SAME_UPPER", "SAME_LOWER", "VALID")
        attrs.pop("pads")
    dims = (filters, channels // group) if "Transpose" not in name else (channels, filters // group)
    batch = rng.pick(1, 1, 2, 3)
    # Groups of few channels are multiplied together, by zeros where they do not belong.
    wild = wild if group == 1 or group == channels == filters else 0
    x = rng.numbers((batch, channels, *sizes), dtype, wild)
    # Transposed convolutions multiply some weights by zeros between elements.
    wild = 0 if "Transpose" in name else wild
    return x, rng.numbers((*dims, *kernel), dtype, wild), attrs


@draws("Conv ConvTranspose penstock.Fused(Conv)")
def _convolution(rng: Source, full_name: str) -> Draw:
    name = "Conv" if "(" in full_name else full_name
    x, w, attrs = _image(rng, name, "float32")
    if name == "ConvTranspose":
        attrs.pop("auto_pad", None)
        rank = x.ndim - 2
        attrs["output_padding"] = [int(rng.integers(0, s)) for s in attrs["strides"]]
        spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], attrs["dilations"], strict=True)]
        attrs["pads"] = [min(p, (spans * 2)[i] // 2) for i, p in enumerate([0] * 2 * rank)]
    terms = math.prod(w.shape[1:]) if name == "Conv" else x.shape[1] * math.prod(w.shape[2:])
    filters = w.shape[0] if name == "Conv" else w.shape[1] * attrs["group"]
    inputs = [x, w, *([rng.numbers((filters,), "float32")] if rng.chance(0.6) else [])]
    constants = [1, 2][: len(inputs) - 1] if rng.chance(0.8) or "(" in full_name else []
    draw = Draw(name, inputs, attrs, _of_products(terms + 2), constants)
    return _with_activation(rng, draw) if "(" in full_name else draw


@draws("ConvInteger penstock.Fused(ConvInteger) QLinearConv com.microsoft.QLinearConv")
@draws("penstock.Fused(DequantizeLinear)")
def _codes_convolution(rng: Source, full_name: str) -> Draw:
    x_dtype, w_dtype = rng.pick(*CODES), rng.pick(*CODES)
    if "(D" in full_name and rng.chance(0.3):
        a, b = _product(rng, "float32")
        x, w, attrs = a, b, {}
    else:
        x, w, attrs = _image(rng, "Conv", "float32", 0)
    x, w = rng.numbers(x.shape, x_dtype), rng.numbers(w.shape, w_dtype)
    filters = w.shape[0]
    by_filter = () if not attrs else rng.pick((), (filters,))
    zeros = [rng.numbers((), x_dtype), rng.numbers(by_filter, w_dtype)]
    if "ConvInteger" in full_name:
        if "(" in full_name:
            inputs = [x, w, *zeros, np.array(0.25, np.float32)]
            build = lambda node: _scaled(node, "ConvInteger", **attrs)  # noqa: E731
            return Draw(_HOLDER, inputs, constants=[1, 3, 4], fused=build)
        return Draw("ConvInteger", [x, w, *zeros], attrs, constants=[1, 2, 3])
    # Scales that are powers of two make NumPy's sums of real numbers exact.
    scales = [np.array(0.5, np.float32), 2.0 ** -rng.integers(3, 6, zeros[1].shape)]
    x_scale, w_scale = (np.asarray(s, np.float32) for s in scales)
    result = [np.array(rng.pick(8.0, 64.0), np.float32), rng.numbers((), x_dtype)]
    inputs = [x, x_scale, zeros[0], w, w_scale, zeros[1], *result]
    if "(" in full_name:
        return _of_real_codes(rng, inputs, attrs)
    if rng.chance(0.5):
        inputs.append(rng.integers(-2000, 2000, filters, np.int32))
    name, domain = _short(full_name)
    constants = [1, 2, *range(3, len(inputs))]
    attrs = {**attrs, **_of_integers(rng, inputs)}
    return Draw(name, inputs, attrs, None, constants, domain=domain, version=1 if domain else 26)


def _of_integers(rng: Source, inputs: list[Any]) -> dict[str, Any]:
    """Attributes of layers of TFLite, whose scales may be any: rescaled in integers, and bounded
    from the zero point on, or elsewhere."""
    if rng.chance(0.4):
        return {}
    inputs[4][...] = 2.0 ** rng.uniform(-12, 8, inputs[4].shape)
    return {"fixed_point": 1, "code_limits": _limits(rng, inputs[7])}


def _limits(rng: Source, zero: np.ndarray) -> list[int]:
    """Codes that bound others: from the lowest or the zero point on, up to the highest or less."""
    ends = np.iinfo(zero.dtype)
    low = rng.pick(ends.min, int(zero))
    return [low, rng.pick(ends.max, min(low + 90, ends.max))]


def _of_real_codes(rng: Source, inputs: list[Any], attrs: dict[str, Any]) -> Draw:
    """The codes of a Conv of what codes stand for, as exporters write it."""
    bounded = rng.chance(0.5)

    def build(node: Node) -> Node:
        values = node.inputs
        x = joined("DequantizeLinear", values[:3])
        w = joined("DequantizeLinear", values[3:6], axis=0)
        operation = "Conv" if attrs else "MatMul"
        nodes = [x, w, joined(operation, [x.outputs[0], w.outputs[0]], **attrs)]
        if bounded:
            nodes.append(joined("Relu", [nodes[-1].outputs[0]]))
        nodes.append(joined("QuantizeLinear", [nodes[-1].outputs[0], *values[6:8]]))
        return fused(nodes)

    constants = [i for i in range(1, 8) if attrs or i != 3]
    return Draw(_HOLDER, inputs, constants=constants, fused=build)


@draws("AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool")
def _pooling(rng: Source, name: str) -> Draw:
    dtype = rng.pick(*FLOATS, *(CODES if name == "MaxPool" else ()))
    x, w, attrs = _image(rng, name, "float32", 0)
    x = rng.numbers(x.shape, dtype, 0.4 if "Max" in name else 0)
    outputs = 1
    taps = math.prod(x.shape[2:] if name.startswith("Global") else w.shape[2:])
    attrs.pop("group")
    if name.startswith("Global"):
        attrs = {}
    else:
        attrs["kernel_shape"] = list(w.shape[2:])
        pads = attrs.get("pads", [])
        spans = [(k - 1) * d for k, d in zip(w.shape[2:], attrs["dilations"], strict=True)]
        for i, pad in enumerate(pads):  # no window may see padding alone
            attrs["pads"][i] = min(pad, (spans * 2)[i] // 2, w.shape[2 + i % len(spans)] - 1)
        attrs["ceil_mode"] = int(rng.chance(0.3))
        if "auto_pad" in attrs:
            attrs["ceil_mode"] = 0
    if name == "AveragePool":
        attrs["count_include_pad"] = int(rng.chance(0.5))
    p = rng.pick(1, 2) if "Lp" in name else 0
    attrs |= {"p": p} if p else {}
    if name == "MaxPool" and rng.chance(0.4):
        outputs, attrs["storage_order"] = 2, int(rng.chance(0.3))

    def bound(draw: Draw) -> list[Rounded | None]:
        if p == 2:
            (root,) = draw.wide()
            squares = Rounded.exact(root**2, draw.dtype)
            return [squares.rounded(squares.value, 0, taps + 1).sqrt()]
        return draw.linear(taps + 2)

    return Draw(name, [x], attrs, None if "Max" in name else bound, outputs=outputs)


@draws("Col2Im")
def _col2im(rng: Source, name: str) -> Draw:
    x, w, attrs = _image(rng, name, "float32", 0)
    attrs.pop("group"), attrs.pop("auto_pad", None)
    attrs.setdefault("pads", [0] * 2 * (x.ndim - 2))
    count = math.prod(conv_shape(x.shape, (1, x.shape[1], *w.shape[2:]), attrs)[2:])
    columns = rng.numbers((2, 3 * math.prod(w.shape[2:]), count), rng.pick(*FLOATS), 0.3)
    return Draw(name, [columns, np.array(x.shape[2:]), np.array(w.shape[2:])], attrs, None, [1, 2])


@draws("DeformConv")
def _deform(rng: Source, name: str) -> Draw:
    dtype = rng.pick(*FLOATS)
    x, w, attrs = _image(rng, name, dtype, 0)
    x, w = (v.reshape(*v.shape[:2], -1, 1) if v.ndim == 3 else v for v in (x, w))
    if x.ndim != 4 or w.shape[2:] != w.shape[2:][:2]:
        x, w = rng.numbers((1, 4, 6, 7), dtype), rng.numbers((3, 4, 3, 2), dtype)
        attrs = {"group": 1}
    rank = 2
    for key, neutral in (("strides", 1), ("dilations", 1), ("pads", 0)):
        length = rank * (1 + (key == "pads"))
        if len(attrs.get(key, ())) not in (0, length):
            attrs[key] = [neutral] * length
    shape = conv_shape(x.shape, w.shape, attrs)
    taps = math.prod(w.shape[2:])
    offsets = rng.normal(0, 2, (x.shape[0], 2 * taps, *shape[2:])).astype(dtype)
    inputs = [x, w, offsets, rng.numbers((w.shape[0],), dtype)]
    inputs += [rng.numbers((x.shape[0], taps, *shape[2:]), dtype)] if rng.chance(0.5) else []
    terms = math.prod(w.shape[1:])

    def bound(draw: Draw) -> list[Rounded | None]:
        # A place is wrong by its own rounding; between pixels, values change by at most twice the
        # largest along each axis, and so do the weights of its four neighbours.
        u = unit(draw.dtype)
        (value,) = draw.wide()
        reach = np.abs(draw.inputs[2]).max() + max(x.shape[2:]) + sum(attrs.get("pads", (0,))) + 9
        masks = 1.0 if len(draw.inputs) < 5 else np.abs(draw.inputs[4]).astype(np.float64).max()
        most = np.abs(x.astype(np.float64)).max() * masks
        per_filter = np.abs(w.astype(np.float64)).sum((1, 2, 3))[:, None, None] * most
        bias = np.abs(draw.inputs[3].astype(np.float64))[:, None, None]
        error = per_filter * (gamma(terms + 12, u) + 8 * 3 * u * reach) + gamma(terms, u) * bias
        return [Rounded(value, np.broadcast_to(error, value.shape), draw.dtype)]

    return Draw(name, inputs, attrs, bound)


@draws("tflite.IntegerResize")
def _integer_resize(rng: Source, full_name: str) -> Draw:
    # Twice as many: weights are sums of few powers of two, and products are exact.
    dims = (*rng.dims(2, 40), rng.size(17), rng.size(17))
    x = np.round(rng.numbers(dims, rng.pick("float32", "float64")) * 9)
    attrs = {"mode": "linear", "fraction_bits": 10}
    attrs["coordinate_transformation_mode"] = rng.pick("half_pixel", "asymmetric")
    inputs, (name, domain) = [x, None, None, np.array(dims) * [1, 1, 2, 2]], _short(full_name)
    return Draw(name, inputs, attrs, None, [3], domain=domain, version=1)


@draws("Resize")
def _resize(rng: Source, name: str) -> Draw:
    rank = rng.integers(1, 4)
    mode = rng.pick("nearest", "linear", "cubic")
    dtype = rng.pick(*FLOATS, *(("float16", *CODES, "int64") if mode == "nearest" else ()))
    dims = (*rng.dims(2, 40), *[rng.size(17) for _ in range(rank)])
    if mode == "linear" and rng.chance(0.4):
        # Twice as many: weights are sums of few powers of two, and products are exact.
        x = rng.numbers(dims, rng.pick(*CODES, "int16", "uint16", "int32"))
        return Draw(
            name,
            [x, None, None, np.array(dims) * ([1] * 2 + [2] * rank)],
            {"mode": mode},
            None,
            [3],
        )
    x = rng.numbers(dims, dtype, 0.5 * (mode == "nearest"))
    target = np.array([*dims[:2], *[rng.size(33) for _ in range(rank)]])
    attrs = {"mode": mode, "nearest_mode": rng.pick("round_prefer_floor", "ceil", "floor")}
    attrs["coordinate_transformation_mode"] = rng.pick(
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"
    )
    if mode != "nearest" and rng.chance(0.3):
        attrs["antialias"] = 1

    def bound(draw: Draw) -> list[Rounded | None]:
        # Weights are of float64, and rounded. The magnitudes of those of cubic interpolation with
        # the coefficient -0.75 sum up to at most 1.375 along an axis, and to 1 before that sum is
        # divided: with antialias, divisors may be 0.7 of it.
        (value,) = draw.wide()
        sums = (1.375 / 0.7) ** rank if mode == "cubic" else 1.0
        most = np.abs(x.astype(np.float64)).max((*range(2, x.ndim),), keepdims=True) * sums
        taps = [4 * max(1, math.ceil(a / b)) for a, b in zip(dims, target, strict=True)]
        own = gamma(sum(taps[2:]) + 3 * rank, unit(draw.dtype)) * most
        return [Rounded(value, np.broadcast_to(own, value.shape), draw.dtype)]

    return Draw(name, [x, None, None, target], attrs, None if mode == "nearest" else bound, [3])


@draws("Pad")
def _pad(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 2000)
    mode = rng.pick("constant", "constant", "reflect", "edge", "wrap")
    most = [max(n - 1, 0) if mode == "reflect" else n if mode == "wrap" else n + 3 for n in dims]
    pads = np.array([rng.integers(0, min(m, 40) + 1) for m in most * 2])
    if mode == "constant" and rng.chance(0.3):
        pads -= rng.integers(0, 2, len(pads)) * (np.array(dims * 2) > 2)
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE, "float16", *CODES, "bool"), 0.5)
    inputs = [x, pads] + ([x.reshape(-1)[0]] if mode == "constant" else [])
    inputs = [np.asarray(v) for v in inputs]
    return Draw(name, inputs, {"mode": mode}, None, rng.pick([], range(1, len(inputs))))


@draws("GridSample")
def _grid_sample(rng: Source, name: str) -> Draw:
    rank, dtype = rng.integers(1, 4), rng.pick(*FLOATS)
    dims = (*rng.dims(2, 12), *[rng.size(9) for _ in range(rank)])
    target = [rng.size(65 if rank == 1 else 9) for _ in range(rank)]
    x = rng.numbers(dims, dtype)
    grid = rng.normal(0, 0.8, (dims[0], *target, rank)).astype(dtype)
    mode = rng.pick("nearest", "linear", "cubic")
    padding = rng.pick("zeros", "border", "reflection")
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": int(rng.chance(0.5))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # A place is wrong by four roundings of at most its size and that of the image; values
        # change by at most twice the largest from pixel to pixel, cubic ones by three times.
        (value,) = draw.wide()
        u, most = unit(draw.dtype), np.abs(x.astype(np.float64)).max()
        place = 8 * u * max(dims[2:]) * (np.abs(grid.astype(np.float64)).max() + 2)
        sums = 1.375**rank if mode == "cubic" else 1.0
        error = most * sums * (gamma(16 * rank + 8, u) + 3 * rank * place)
        return [Rounded(value, np.full(value.shape, error), draw.dtype)]

    return Draw(name, [x, grid], attrs, None if mode == "nearest" else bound)


@draws("AffineGrid")
def _affine_grid(rng: Source, name: str) -> Draw:
    rank, dtype = rng.integers(2, 4), rng.pick(*FLOATS)
    size = (*rng.dims(2, 6), *[rng.size(17) for _ in range(rank)])
    theta = rng.numbers((size[0], rank, rank + 1), dtype)
    attrs = {"align_corners": int(rng.chance(0.5))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # Coordinates are at most 1, with four roundings; sums have rank + 1 products.
        (value,) = draw.wide()
        most = np.abs(theta.astype(np.float64)).sum(-1).reshape(-1, *[1] * rank, rank)
        own = gamma(rank + 6, unit(draw.dtype)) * most
        return [Rounded(value, np.broadcast_to(own, value.shape), draw.dtype)]

    return Draw(name, [theta, np.array(size)], attrs, bound, [1])


@draws("com.microsoft.CropAndResize tensorflow.CropAndResize")
def _crops(rng: Source, full_name: str) -> Draw:
    name, domain = _short(full_name)
    dims, count = (2, *[rng.size(13) for _ in range(3)]), rng.size(9)
    boxes = np.round(rng.uniform(-0.3, 1.3, (count, 4)), rng.pick(1, 7)).astype(np.float32)
    size = np.array([rng.size(6), rng.size(6)], np.int32)
    inputs = [rng.numbers(dims, "float32", 0.1), boxes, rng.integers(0, 2, count, np.int32), size]
    attr = "mode" if domain == "com.microsoft" else "method"
    attrs = {attr: rng.pick("bilinear", "nearest"), "extrapolation_value": rng.pick(0.0, -2.5)}
    return Draw(name, inputs, attrs, None, [3], 1, domain, 1)


@draws("RoiAlign MaxRoiPool NonMaxSuppression tensorflow.NonMaxSuppression")
def _regions(rng: Source, name: str) -> Draw:
    count, dtype = rng.size(33), rng.pick(*FLOATS)
    corners = rng.uniform(-3, 12, (count, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(-1, 9, (count, 2))], 1)
    if name.endswith("NonMaxSuppression"):
        scores = np.round(rng.normal(size=(1, 2, count)), 1).astype(np.float32)
        inputs = [boxes[None].astype(np.float32), scores, np.array([rng.pick(0, 1, 3, 1000)])]
        inputs += [np.array([rng.pick(0.0, 0.3, 1.0)], np.float32)]
        inputs += [np.array([0.2], np.float32)] if rng.chance(0.5) or name[0] == "t" else []
        if name[0] == "t":
            one = [inputs[0][0], scores[0, 0], inputs[2].astype(np.int32), *inputs[3:]]
            attrs = {"inclusive": rng.chance(0.5)}
            return Draw("NonMaxSuppression", one, attrs, None, [2], 1, "tensorflow", 1)
        return Draw(name, inputs, {"center_point_box": int(rng.chance(0.5))})
    dims = (2, *[rng.size(13) for _ in range(3)])
    if name == "MaxRoiPool":
        x = rng.numbers(dims, "float32", 0.5)
        rois = np.concatenate([rng.integers(0, 2, (count, 1)), boxes], 1).astype(np.float32)
        attrs = {"pooled_shape": [rng.size(5), rng.size(5)], "spatial_scale": rng.pick(0.9, 1.0)}
        return Draw(name, [x, rois], attrs)
    x = rng.numbers(dims, dtype)
    ratio, height, width = rng.pick(0, 1, 2, 3), rng.size(5), rng.size(5)
    mode = rng.pick("avg", "max")
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": height, "output_width": width}
    attrs["coordinate_transformation_mode"] = rng.pick("half_pixel", "output_half_pixel")

    def bound(draw: Draw) -> list[Rounded | None]:
        # As for GridSample; a place has at most eight roundings of numbers below 64.
        (value,) = draw.wide()
        u, most = unit(draw.dtype), np.abs(x.astype(np.float64)).max()
        samples = (ratio or 32) ** 2
        error = most * (gamma(4 * samples + 8, u) + 4 * 8 * u * 64)
        return [Rounded(value, np.full(value.shape, error), draw.dtype)]

    inputs = [x, boxes.astype(dtype), rng.integers(0, 2, count)]
    return Draw(name, inputs, attrs, bound)


# Rows.


@draws("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd")
@draws("ReduceSum ReduceSumSquare ArgMax ArgMin")
def _reduction(rng: Source, name: str) -> Draw:
    extreme = name in ("ReduceMax", "ReduceMin", "ArgMax", "ArgMin")
    dtype = rng.pick(*FLOATS, *FLOATS, *WHOLE, *(CODES if extreme else ()))
    dims = rng.dims(rng.integers(1, 5), least=0)
    if rng.chance(0.3):
        dims = (rng.size(5), rng.pick(511, 512, 513, 1030), rng.size(5))
    x = rng.numbers(dims, dtype, 0.4 if extreme else 0)
    if name in ("ReduceLogSum", "ReduceProd"):
        x = np.abs(x) if dtype in FLOATS else x
    if name == "ReduceProd" and dtype in FLOATS:
        x = 1 + rng.uniform(-0.05, 0.05, dims).astype(dtype)
    attrs: dict[str, Any] = {"keepdims": int(rng.chance(0.5))}
    if name.startswith("Arg"):
        attrs |= {"axis": int(rng.integers(-len(dims), len(dims)))}
        attrs |= {"select_last_index": int(rng.chance(0.5))}
        return Draw(name, [x], attrs)
    count = rng.integers(0, len(dims) + 1)
    start = rng.integers(0, len(dims) - count + 1)
    axes = tuple(range(start, start + count)) or tuple(range(len(dims)))
    inputs = [x, *([np.array(axes)] if count else [])]

    def bound(draw: Draw) -> list[Rounded | None]:
        x, options = draw.read(0), (axes, bool(attrs["keepdims"]))
        if name == "ReduceProd":
            (value,) = draw.wide()
            return [Rounded.exact(value, x.dtype).rounded(value, 0, math.prod(dims) + 1)]
        if name == "ReduceLogSumExp":
            highest = x.value.max(axes, keepdims=True)
            flat = highest if attrs["keepdims"] else highest.reshape(x.value.max(axes).shape)
            return [(x - highest).exp().sum(*options).log() + flat]
        total = x * x if name in ("ReduceL2", "ReduceSumSquare") else x
        total = abs(x) if name == "ReduceL1" else total
        total = total.mean(*options) if name == "ReduceMean" else total.sum(*options)
        if name == "ReduceLogSum":
            total = total.log()
        return [total.sqrt() if name == "ReduceL2" else total]

    exact = extreme or (dtype not in FLOATS)
    if dtype in WHOLE and name in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp"):
        # Computed in float64, and truncated: sums that fit in it.
        inputs[0] = (np.abs(x) % 30 + 1).astype(dtype)
    return Draw(name, inputs, attrs, None if exact else bound, rng.pick([], [1][:count]))


@draws("Softmax LogSoftmax Hardmax")
def _softmax(rng: Source, name: str) -> Draw:
    dims, dtype = rng.dims(rng.integers(1, 5)), rng.pick(*FLOATS)
    axis = int(rng.integers(-len(dims), len(dims)))
    x = rng.numbers(dims, dtype, 0.3)

    def bound(draw: Draw) -> list[Rounded | None]:
        x = draw.read(0)
        if name == "Softmax":
            return [x.softmax(axis)]
        return [(x - x.max(axis)) - x.powers(axis).sum(axis, keepdims=True).log()]

    return Draw(name, [x], {"axis": axis}, None if name == "Hardmax" else bound)


@draws("Det com.microsoft.Inverse")
def _matrices(rng: Source, full_name: str) -> Draw:
    """Of matrices in whose columns the diagonal dominates, but for their order of rows."""
    (name, domain), side, dtype = _short(full_name), rng.size(33), rng.pick(*FLOATS)
    x = rng.numbers((rng.size(70), side, side), dtype)
    x += x.dtype.type(2 * np.abs(x).sum(-2).max(initial=1)) * np.eye(side, dtype=dtype)
    x = x[:, rng.permutation(side)]

    def bound(draw: Draw) -> list[Rounded | None]:
        # N. Higham, Accuracy and Stability of Numerical Algorithms: of dominant matrices |L||U| is at most 2n
        # |A| (9.5), of which elimination makes an error of gamma(n); that of Gauss and Jordan has the
        # condition for a factor, several times (14.4). NumPy's own in float64 are as large again.
        (value,), u = draw.wide(), unit(draw.dtype)
        wide = x.astype(np.float64)
        inverses = np.abs(np.linalg.inv(wide)).sum(-1).max(-1)
        condition = inverses * np.abs(wide).sum(-1).max(-1)
        if name == "Det":
            change = np.expm1(4 * side**2 * gamma(side, u) * condition) + gamma(side, u)
            return [Rounded(value, np.abs(value) * change, draw.dtype)]
        error = (32 * gamma(side, u) * condition * inverses)[:, None, None]
        return [Rounded(value, np.broadcast_to(error, value.shape), draw.dtype)]

    return Draw(name, [x], {}, bound, domain=domain, version=1 if domain else 26)


@draws("CumSum CumProd")
def _cumulative(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4), least=0)
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE), 0.3)
    attrs = {"exclusive": int(rng.chance(0.5)), "reverse": int(rng.chance(0.5))}
    return Draw(name, [x, np.array(rng.integers(len(dims)))], attrs, None, [1])


@draws("InstanceNormalization GroupNormalization LayerNormalization RMSNormalization")
@draws("SimplifiedLayerNormalization")
def _normalization(rng: Source, name: str) -> Draw:
    dtype, groups = rng.pick(*FLOATS), rng.pick(1, 2, 4)
    by_group, epsilon = name in ("InstanceNormalization", "GroupNormalization"), 1e-3
    dims = (rng.size(3), groups * rng.size(9), *rng.dims(rng.integers(1, 4), 300))
    axis = 2 if by_group else int(rng.integers(1, len(dims)))
    x = rng.numbers(dims, dtype)
    sizes = (dims[1],) if by_group else dims[axis:]
    parameters = [rng.numbers(sizes, dtype) for _ in range(2)]
    inputs = [x, *(parameters if by_group or name[0] == "L" else parameters[:1])]
    attrs: dict[str, Any] = {"epsilon": epsilon}
    if name == "GroupNormalization":
        attrs["num_groups"] = groups
    elif not by_group:
        attrs["axis"] = axis

    def bound(draw: Draw) -> list[Rounded | None]:
        x, scale, bias = draw.read(0), draw.read(1), 0.0
        axes, back = tuple(range(axis, len(dims))), lambda v: v
        if by_group:
            parts = groups if name[0] == "G" else dims[1]
            grouped = (dims[0], parts, dims[1] // parts, *dims[2:])
            x, axes = x.map(lambda v: v.reshape(grouped)), tuple(range(2, len(grouped)))
            per_channel = (parts, dims[1] // parts, *[1] * (len(dims) - 2))
            back = lambda v: v.reshape(per_channel)  # noqa: E731
        centred = x - x.mean(axes, True) if name[0] not in "RS" else x
        deviation = ((centred * centred).mean(axes, True) + epsilon).sqrt()
        y = centred / deviation * scale.map(back)
        if len(draw.inputs) > 2:
            bias = draw.read(2).map(back)
            y = y + bias
        return [y.map(lambda v: np.broadcast_to(v, x.value.shape).reshape(dims))]

    return Draw(name, inputs, attrs, bound)


@draws("BatchNormalization penstock.Fused(BatchNormalization)")
def _batch(rng: Source, full_name: str) -> Draw:
    dtype = "float32" if "(" in full_name else rng.pick(*FLOATS)
    dims = (rng.size(3), rng.size(65), *rng.dims(rng.integers(0, 4), 200))
    inputs = [rng.numbers(dims, dtype), *[rng.numbers(dims[1:2], dtype) for _ in range(3)]]
    inputs.append(np.abs(rng.numbers(dims[1:2], dtype)))
    attrs = {"epsilon": 1e-3}

    def bound(draw: Draw) -> list[Rounded | None]:
        shape = (-1, *[1] * (len(dims) - 2))
        x, scale, bias, mean, variance = (draw.read(i) for i in range(5))
        scale, bias, mean, variance = (
            v.map(lambda a: a.reshape(shape)) for v in (scale, bias, mean, variance)
        )
        factor = scale / (variance + attrs["epsilon"]).sqrt()
        return [x * factor + (bias - mean * factor)]

    draw = Draw("BatchNormalization", inputs, attrs, bound, rng.pick([], [1, 2, 3, 4]), version=15)
    return _with_activation(rng, draw) if "(" in full_name else draw


@draws("LRN")
def _lrn(rng: Source, name: str) -> Draw:
    size, beta, bias = rng.pick(1, 2, 3, 5, 8), rng.pick(0.75, 0.5, 1.3), rng.pick(1.0, 2.0)
    x = rng.numbers((rng.size(3), rng.size(65), *rng.dims(rng.integers(1, 3), 100)), "float32")
    attrs = {"size": size, "alpha": 0.25, "beta": beta, "bias": bias}

    def bound(draw: Draw) -> list[Rounded | None]:
        x = draw.read(0)
        before, after = (size - 1) // 2, size // 2
        around = [(0, 0), (before, after), *[(0, 0)] * (x.value.ndim - 2)]
        padded = (x * x).map(lambda v: np.pad(v, around))
        total = padded[:, : x.value.shape[1]]
        for k in range(1, size):
            total = total + padded[:, k : k + x.value.shape[1]]
        sums = total * (0.25 / size) + bias
        return [x / (sums.log() * np.float64(np.float32(beta))).exp()]

    return Draw(name, [x], attrs, bound)


# Places, copies and tables.

_ALL = (*FLOATS, *WHOLE, *CODES, "float16", "bool")


def _places(rng: Source, dims: Sequence[int], size: int) -> np.ndarray:
    """Indices of an axis; now and then one is out of range."""
    dtype = rng.pick(*WHOLE)
    if not size:
        return np.zeros((0,) * len(dims), dtype)
    places = rng.integers(-size, size, dims).astype(dtype)
    if places.size and rng.chance(0.08):
        places.flat[rng.integers(places.size)] = rng.pick(size, -size - 1, np.iinfo(dtype).min)
    return np.asarray(places)


@draws("Gather GatherElements GatherND ScatterElements ScatterND")
def _index(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4), 2000)
    axis, attrs = int(rng.integers(-len(dims), len(dims))), {}
    reduced = (*FLOATS, *WHOLE) if name[0] == "S" else ()
    x = rng.numbers(dims, rng.pick(*_ALL, *reduced), 0.3)
    if name.endswith("ND"):
        depth = int(rng.integers(1, len(dims) + 1))
        batch = int(rng.integers(depth)) if name[0] == "G" and rng.chance(0.4) else 0
        shape = (*dims[:batch], *rng.dims(1), max(depth - batch, 1))
        columns = [_places(rng, shape[:-1], dims[batch + i]) for i in range(shape[-1])]
        indices = np.stack([c.astype(np.int64) for c in columns], -1)
        attrs = {"batch_dims": batch} if name[0] == "G" else {}
        update = (*shape[:-1], *dims[shape[-1] :])
    else:
        inner = [rng.size(max(n, 1)) for n in dims]
        inner[axis] = rng.size(33)
        shape = tuple(inner) if "Elements" in name else rng.dims(rng.integers(3), 60)
        indices, attrs, update = _places(rng, shape, dims[axis]), {"axis": axis}, shape
    inputs = [x, indices]
    if name[0] == "S":
        inputs.append(rng.numbers(update, x.dtype.name, 0.3))
        if x.dtype.name in reduced and rng.chance(0.7):
            attrs |= {"reduction": rng.pick("add", "mul", "max", "min")}
    return Draw(name, inputs, attrs)


@draws("tensorflow.ScatterNd tflite.Segment tflite.SparseToDense")
def _into_filled(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = _short(full_name), rng.dims(rng.integers(1, 4), 2000)
    x_type = rng.pick(*FLOATS, *WHOLE, *(() if name == "Segment" else (*CODES, "int16", "bool")))
    depth = {"Segment": 1, "ScatterNd": int(rng.integers(1, len(dims) + 1))}.get(name, len(dims))
    lead = rng.dims(1, 60)
    columns = [_places(rng, lead, dims[i]) for i in range(depth)]
    columns = [c if name == "Segment" or rng.chance(0.1) else np.abs(c) for c in columns]
    places = np.stack(columns, -1).astype(rng.pick(*WHOLE))
    shape = np.array(dims, rng.pick(*WHOLE))
    x = rng.numbers((*lead, *dims[depth:]), x_type, 0.3)
    if name == "ScatterNd":
        return Draw(name, [places, x, shape], {}, None, [2], domain=domain, version=1)
    if name == "Segment":
        attrs = {"reduction": rng.pick("sum", "prod", "max", "min")}
        inputs = [x, places[:, 0], shape[:1].reshape(())]
        return Draw(name, inputs, attrs, None, [2], domain=domain, version=1)
    inputs = [places, shape, x, rng.numbers((), x_type)]
    return Draw(name, inputs, {}, None, [1], domain=domain, version=1)


@draws("tflite.SliceGather tflite.SliceScatter")
def _whole_slices(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = _short(full_name), rng.dims(rng.integers(1, 4), 2000)
    depth, lead = int(rng.integers(1, len(dims) + 1)), rng.dims(rng.integers(1, 3), 40)
    axes = rng.permutation(depth).tolist()
    places = np.stack([_places(rng, lead, dims[axis]) for axis in axes], -1)
    places, at = (places[..., 0], len(lead)) if depth == 1 and rng.chance(0.5) else (places, -1)
    attrs: dict[str, Any] = {"index_vector_dim": at % places.ndim if at < 0 else at}
    windows = [*range(len(lead), len(lead) + len(dims) - depth)]
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE), 0.3)
    if name == "SliceGather":
        attrs |= {"offset_dims": windows, "collapsed_slice_dims": [*range(depth)]}
        attrs |= {"start_index_map": axes, "slice_sizes": [*[1] * depth, *dims[depth:]]}
        return Draw(name, [x, places], attrs, domain=domain, version=1)
    attrs |= {"update_window_dims": windows, "inserted_window_dims": [*range(depth)]}
    attrs |= {"scatter_dims_to_operand_dims": axes}
    attrs["reduction"] = rng.pick("", "add", "multiply", "minimum", "maximum")
    updates = rng.numbers((*lead, *dims[depth:]), x.dtype.name, 0.3)
    return Draw(name, [x, places, updates], attrs, domain=domain, version=1)


@draws("tflite.DynamicUpdateSlice tflite.Bucketize tflite.Spread")
def _parts(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = _short(full_name), rng.dims(rng.integers(1, 4), 1500)
    x = rng.numbers(dims, rng.pick(*(_ALL if name != "Bucketize" else (*FLOATS, *WHOLE))), 0.3)
    if name == "Bucketize":
        bounds = np.sort(rng.normal(0, 5, rng.pick(1, 3, 24, 25, 60))).astype(np.float32)
        return Draw(name, [x], {"boundaries": bounds.tolist()}, domain=domain, version=1)
    if name == "Spread":
        steps = np.array([rng.integers(1, 4) for _ in dims], rng.pick(*WHOLE))
        ends = [[int(rng.pick(0, 0, 1, 3, -1)) for _ in dims] for _ in range(2)]
        attrs = dict(zip(("low", "high"), ends, strict=True)) if rng.chance(0.7) else {}
        inputs = [x, steps, rng.numbers((), x.dtype.name)]
        return Draw(name, inputs, attrs, None, [1, 2], domain=domain, version=1)
    part = rng.numbers([rng.integers(1, n + 1) for n in dims], x.dtype.name, 0.3)
    start = np.array([rng.integers(-2, n + 2) for n in dims], rng.pick(*WHOLE))
    return Draw(name, [x, part, start], domain=domain, version=1)


@draws("tflite.ReduceWindow")
def _windows_of_any_axes(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = _short(full_name), rng.dims(rng.integers(1, 4), 1500)
    sizes = [int(rng.integers(1, min(n, 4) + 1)) for n in dims]
    numbers = [np.array(own) for own in (sizes, rng.integers(1, 3, len(dims)))]
    numbers.append(rng.integers(1, 3, len(dims)))
    x_type = rng.pick(*FLOATS, *WHOLE)
    reduction = rng.pick("add", "maximum", "minimum", "multiply")
    is_rounded = x_type in FLOATS and reduction in ("add", "multiply")
    x, first = rng.numbers(dims, x_type, 0 if is_rounded else 0.3), rng.numbers((), x_type)
    count = math.prod(sizes) + 1

    def bound(draw: Draw) -> list[Rounded | None]:
        if reduction == "add":
            return draw.linear(count)
        (value,) = draw.wide()
        return [Rounded.exact(value, draw.dtype).rounded(value, 0, count)]

    attrs, inputs = {"reduction": reduction}, [x, first, *numbers]
    own = bound if is_rounded else None
    return Draw(name, inputs, attrs, own, [2, 3, 4], domain=domain, version=1)


@draws("TopK")
def _top(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 4))
    axis = int(rng.integers(-len(dims), len(dims)))
    x = rng.numbers(dims, rng.pick(*FLOATS, *WHOLE, *CODES, "int16"), 0.5)
    if rng.chance(0.3):
        x = np.resize(x, (rng.pick(300, 1030), *x.shape[1:2])).astype(x.dtype)
        axis = 0
    count = np.array([rng.pick(rng.integers(0, x.shape[axis] + 1), x.shape[axis])])
    attrs = {"axis": axis, "largest": int(rng.chance(0.5)), "sorted": int(rng.chance(0.7))}
    return Draw(name, [x, count], attrs, None, [1], 2)


@draws("tensorflow.OneHot")
def _one_hot(rng: Source, full_name: str) -> Draw:
    dims, dtype = rng.dims(rng.pick(1, 2, 3), 300), rng.pick(*_ALL)
    picked = rng.integers(-2, 9, dims).astype(rng.pick(*WHOLE))
    inputs = [picked, np.array(rng.size(9)), rng.numbers((), dtype), rng.numbers((), dtype)]
    attrs = {"axis": int(rng.integers(-1, len(dims)))}
    return Draw("OneHot", inputs, attrs, None, [1, 2, 3], domain="tensorflow", version=1)


@draws("EyeLike OneHot ReverseSequence Trilu")
def _select(rng: Source, name: str) -> Draw:
    dims, far = rng.dims(rng.pick(2, 2, 3), 2000), int(rng.pick(0, 1, -2, 99, -99))
    x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
    if name == "EyeLike":
        return Draw(name, [x.reshape(dims[0], -1)], {"k": far})
    if name == "Trilu":
        return Draw(name, [x, np.array(far)], {"upper": int(rng.chance(0.5))}, None, [1])
    if name == "OneHot":
        picked, values = rng.integers(-9, 9, dims), rng.numbers((2,), rng.pick(*_ALL))
        inputs = [picked.astype(rng.pick(*WHOLE)), np.array([rng.size(9)]), values]
        return Draw(name, inputs, {"axis": int(rng.integers(-1, len(dims)))}, None, [1])
    time = int(rng.integers(2))
    most = dims[time] + 1 + rng.chance(0.1)
    lengths = rng.integers(0, max(most, 1), dims[1 - time])
    return Draw(name, [x, lengths], {"time_axis": time, "batch_axis": 1 - time})


@draws("Concat Tile penstock.Reorder penstock.Append")
def _copies(rng: Source, full_name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 1500, least=0)
    dtype, axis = rng.pick(*_ALL), int(rng.integers(len(dims)))
    x = rng.numbers(dims, dtype, 0.3)
    if full_name == "Tile":
        return Draw("Tile", [x, rng.integers(0, 4, len(dims))], constants=rng.pick([], [1]))
    if full_name == "penstock.Reorder":
        return Draw(REORDER, [x], {"order": tuple(rng.permutation(len(dims)).tolist())})
    count = 2 if full_name[0] == "p" else rng.integers(1, 5)
    sizes = [rng.size(33, 0) for _ in range(count)]
    parts = [rng.numbers((*dims[:axis], n, *dims[axis + 1 :]), dtype) for n in sizes]
    name: Any = APPEND if full_name[0] == "p" else "Concat"
    return Draw(name, parts, {"axis": axis})


@draws("Expand Range Reshape Slice")
def _views(rng: Source, name: str) -> Draw:
    dims = rng.dims(rng.integers(1, 5), 1500)
    x = rng.numbers(dims, rng.pick(*_ALL), 0.3)
    if name == "Range":
        dtype, step = rng.pick(*FLOATS, *WHOLE), rng.pick(1, 2, -1, 3)
        ends = [0, step * rng.size(65), step]
        return Draw(name, [np.array(v, dtype) for v in ends])
    if name == "Expand":
        target = [n if m == 1 else m for n, m in zip(rng.dims(len(dims), 30), dims, strict=True)]
        return Draw(name, [x, np.array(target)])
    if name == "Reshape":
        order = np.array([*rng.permutation(dims)])
        order[rng.integers(len(order))] = -1
        return Draw(name, [x, order])
    far = 2**62
    starts, ends = (
        np.array([rng.pick(0, -1, 1, n, -n - 5, far, -far) for n in dims]) for _ in range(2)
    )
    steps = np.array([rng.pick(1, 1, 2, -1, -3) for _ in dims])
    return Draw(name, [x, starts, ends, np.arange(len(dims)), steps])


def _ml(name: str, x: Any, constants: Any = (), version: int = 4, **attrs: Any) -> Draw:
    inputs = x if isinstance(x, list) else [x]
    outputs = 2 if name.endswith("Classifier") else 1
    return Draw(name, inputs, attrs, None, constants, outputs, "ai.onnx.ml", version)


@draws("ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Imputer ai.onnx.ml.LabelEncoder")
@draws("ai.onnx.ml.OneHotEncoder ai.onnx.ml.Scaler ai.onnx.ml.Normalizer")
@draws("ai.onnx.ml.FeatureVectorizer")
def _features(rng: Source, full_name: str) -> Draw:
    name, _ = _short(full_name)
    dtype, dims = rng.pick(*FLOATS, *WHOLE), (rng.size(65), rng.size(33))
    x = rng.numbers(dims, dtype, 0.3 * (name != "Normalizer"))
    if name == "ArrayFeatureExtractor":
        x = rng.numbers(dims, rng.pick(*_ALL))
        return _ml(
            name,
            [
                x,
                np.abs(_places(rng, (1, rng.size(9)), dims[1]).astype(np.int64) + 0.5).astype(
                    np.int64
                ),
            ],
        )
    if name == "Scaler":
        width = dims[1] if rng.chance(0.6) else 1
        offset, scale = (rng.numbers((width,), "float32").tolist() for _ in range(2))
        return _ml(name, x, offset=offset, scale=scale)
    if name == "Imputer":
        values = list(range(dims[1] if rng.chance(0.5) else 1))
        if dtype in WHOLE:
            return _ml(name, x % 4, imputed_value_int64s=values, replaced_value_int64=1)
        replaced = rng.pick(math.nan, 0.0, math.inf)
        floats = [float(v) for v in values]
        return _ml(name, x, imputed_value_floats=floats, replaced_value_float=replaced)
    if name == "LabelEncoder":
        if rng.chance(0.3):
            return _texts(rng, full_name)
        keys = np.asarray(rng.integers(-9, 9, rng.size(17))).astype(dtype)
        values = rng.numbers(keys.shape, rng.pick(*FLOATS, *WHOLE))
        known = rng.integers(-12, 12, dims).astype(dtype)
        default = np.array([7], values.dtype)
        options = {"keys_tensor": keys, "values_tensor": values, "default_tensor": default}
        return _ml(name, known, **options)
    if name == "FeatureVectorizer":
        parts = [rng.numbers((dims[0], rng.size(33)), "float32") for _ in range(rng.size(4))]
        widths = {"inputdimensions": [x.shape[1] for x in parts]} if rng.chance(0.5) else {}
        return _ml(name, parts, version=1, **widths)
    if name == "OneHotEncoder":
        if rng.chance(0.3):
            return _texts(rng, full_name)
        cats = [5, rng.pick(-1, -(1 << 40)), 2, 5][: rng.integers(1, 5)]
        return _ml(name, rng.integers(-2, 7, dims), version=1, cats_int64s=cats)
    norm = rng.pick("MAX", "L1", "L2")

    def bound(draw: Draw) -> list[Rounded | None]:
        x = Rounded.exact(draw.inputs[0], np.dtype("float32"))
        size = x.max(1) if norm == "MAX" else abs(x).sum(1, True)
        size = (x * x).sum(1, True).sqrt() if norm == "L2" else size
        return [x / size]

    draw = _ml(name, x if dtype in FLOATS else x % 99 + 1, norm=norm)
    draw.bound, draw.is_formula = bound, True
    return draw


@draws("ai.onnx.ml.LinearClassifier ai.onnx.ml.LinearRegressor")
@draws("ai.onnx.ml.SVMClassifier ai.onnx.ml.SVMRegressor")
def _models(rng: Source, full_name: str) -> Draw:
    (name, _), width = _short(full_name), rng.size(65)
    dtype = rng.pick(*FLOATS, *WHOLE)
    x = rng.normal(0, 1, (rng.size(33), width))
    x = (np.rint(3 * x) if dtype in WHOLE else x).astype(dtype)
    floats = lambda *dims: rng.normal(0, 0.3, dims).astype(np.float32)  # noqa: E731
    classes = rng.integers(2, 6)
    rows = classes if "Classifier" in name else rng.size(5)
    vectors = rng.pick(1, 7, 40, 600)
    if name.startswith("Linear"):
        weights, terms = floats(rows, width), floats(rows)
        attrs: dict[str, Any] = {"coefficients": weights.reshape(-1).tolist()}
        attrs |= {"intercepts": terms.tolist()}
        attrs |= {"targets": rows} if rows != classes or "Regressor" in name else {}
    elif name == "SVMRegressor":
        attrs = {"coefficients": floats(vectors).tolist(), "rho": [0.125], "n_supports": vectors}
    else:
        vectors = 3 * classes
        attrs = {"coefficients": floats(classes - 1, vectors).reshape(-1).tolist()}
        attrs |= {"vectors_per_class": [3] * classes}
        attrs |= {"rho": floats(classes * (classes - 1) // 2).tolist()}
    if name.startswith("SVM"):
        kernel = rng.pick("LINEAR", "POLY", "RBF", "SIGMOID")
        support = floats(vectors, width)
        attrs |= {"kernel_type": kernel, "kernel_params": [0.25, 0.5, 3.0]}
        attrs |= {"support_vectors": support.reshape(-1).tolist()}
    if "Classifier" in name:
        attrs |= {"classlabels_ints": list(range(classes))}

    def bound(draw: Draw) -> list[Rounded | None]:
        # All in float64, and products of float32 with many vectors in float32; results are float32.
        narrow = name.startswith("SVM") and dtype == "float32" and vectors * width >= 2**13
        kind = np.dtype("float32" if narrow or name.startswith("Linear") else "float64")
        x = Rounded.exact(draw.inputs[0], kind)
        if name.startswith("Linear"):
            y = x @ Rounded.exact(weights.T, kind) + terms.astype(np.float64)
        else:
            machine = Rounded.exact(support.T, kind)
            if kernel == "RBF":
                parts = (x * x).sum(1, True) + (machine * machine).sum(0, True) + (x @ machine) * -2
                sums = (parts * -0.25).lipschitz(np.exp, 1)
            else:
                sums = (x @ machine) * (0.25 if kernel != "LINEAR" else 1.0)
                sums = sums + 0.5 if kernel != "LINEAR" else sums
                sums = sums * sums * sums if kernel == "POLY" else sums
                sums = sums.tanh() if kernel == "SIGMOID" else sums
            coefficients = np.array(attrs["coefficients"])[:, None]
            y = sums @ Rounded.exact(coefficients, kind) + 0.125
        return [*[None] * ("Classifier" in name), y.cast(np.dtype("float32"))]

    draw = _ml(name, x, version=1, **attrs)
    if name == "SVMClassifier":
        draw.bound = lambda draw: [None, _of_numpy(draw, 1)]
    else:
        draw.bound = bound
    draw.is_formula = True
    return draw


def _of_numpy(draw: Draw, output: int) -> Rounded:
    """What NumPy's kernel computes in float64 and rounds to float32, as the compiled one does."""
    value = expected(draw.node, draw.inputs)[output].astype(np.float64)
    return Rounded.exact(0, np.dtype("float32")).rounded(value, np.full(value.shape, 2e-6), 4)


@draws("ai.onnx.ml.TreeEnsemble ai.onnx.ml.TreeEnsembleClassifier")
@draws("ai.onnx.ml.TreeEnsembleRegressor")
def _trees(rng: Source, full_name: str) -> Draw:
    name, _ = _short(full_name)
    dtype, count = rng.pick(*FLOATS, *WHOLE), rng.pick(1, 7, 8, 9, 40)
    x = tree_models.rows(rng, count, dtype in FLOATS)
    x = (np.nan_to_num(x) if dtype in WHOLE else x).astype(dtype)
    if name == "TreeEnsemble":
        wide = rng.pick(*FLOATS)
        attrs, _ = tree_models.ensemble(rng, np.dtype(wide).type, True)
        attrs = {k: to_array(v) if hasattr(v, "raw_data") else v for k, v in attrs.items()}
        x = tree_models.rows(rng, count, True).astype(wide)
        draw = _ml(name, x, version=5, **attrs, aggregate_function=int(rng.integers(4)))
    else:
        forest = tree_models.Trees(rng, rng.pick(1, 3, 11), 4, tree_models.MODES, True)
        classes, several = rng.pick(1, 2, 3), rng.chance(0.5)
        prefix = "class" if "Classifier" in name else "target"
        votes = forest.votes(prefix, list(range(classes)), rng.chance(0.5), several)
        labels = {"classlabels_int64s": list(range(max(classes, 2)))}
        attrs = {**forest.lists, **votes, **(labels if prefix == "class" else {})}
        attrs |= {} if prefix == "class" else {"n_targets": classes}
        draw = _ml(name, x, version=3, **attrs)
    # Votes are added in the order of the trees, in float64.
    return draw


NAMES = ("ant", "bee", "", "Ünï", "bee2", "The quick, brown_fox 7", "né à Paris\n", "日本 a-b", " ")


@draws("RegexFullMatch StringSplit TfIdfVectorizer ai.onnx.ml.CategoryMapper ai.onnx.ml.ZipMap")
@draws("com.microsoft.MurmurHash3 com.microsoft.Tokenizer")
def _texts(rng: Source, full_name: str) -> Draw:
    (name, domain), dims = _short(full_name), rng.dims(rng.integers(1, 3), 300)
    x = rng.named(NAMES, dims)
    if name == "RegexFullMatch":
        return Draw(
            name, [x], {"pattern": rng.pick(r"\w*", r"[^\d,]+", "日本.*", "", "(?i)THE .*")}
        )
    if name == "StringSplit":
        attrs = rng.pick({}, {"delimiter": ","}, {"delimiter": " ", "maxsplit": 1})
        return Draw(name, [x], attrs, outputs=2)
    if name == "MurmurHash3":
        x = rng.pick(x, *[rng.numbers(dims, d) for d in ("int32", "uint32", "float64")])
        return Draw(name, [x], {"seed": 7}, domain=domain, version=1)
    if name == "Tokenizer":
        attrs = {"mark": int(rng.chance(0.5)), "pad_value": "#", "mincharnum": 1}
        attrs |= rng.pick({"tokenexp": r"\w+"}, {"separators": [" "]}, {"separators": [""]})
        return Draw(name, [x], attrs, domain=domain, version=1)
    if name == "TfIdfVectorizer":
        attrs = {"mode": rng.pick("TF", "IDF", "TFIDF"), "min_gram_length": 1}
        attrs |= {"max_gram_length": 2, "max_skip_count": rng.integers(3)}
        attrs |= {"ngram_counts": [0, 3], "ngram_indexes": [2, 0, 1, 3, 4]}
        attrs |= {"weights": [0.5, 2.0, 3.0, 1.0, 4.0]}
        if rng.chance(0.5):
            attrs |= {"pool_int64s": [5, -1, 2**40, *(5, -1), *(5, 5)]}
            return Draw(name, [rng.choice([5, -1, 2**40, 0], dims)], attrs)
        attrs |= {"pool_strings": ["ant", "bee", "", *("ant", "bee"), *("bee", "bee")]}
        return Draw(name, [x], attrs)
    if name == "ZipMap":
        scores = rng.numbers((rng.size(65), 3), "float32", 0.3)
        return _ml(name, scores, version=1, classlabels_int64s=[3, 1, 2])
    if name == "OneHotEncoder":
        return _ml(name, x, version=1, cats_strings=list(NAMES[:4]), zeros=1)
    if name == "LabelEncoder":
        keys = {"keys_strings": list(NAMES[:4]), "values_int64s": [5, 6, 7, 8]}
        return _ml(name, x, version=4, **keys)
    cats = {"cats_strings": list(NAMES[:3]), "cats_int64s": [4, 5, 6], "default_int64": 9}
    return _ml(name, x, version=1, **cats)


# Attention and recurrent layers.


def _attended(q: Rounded, k: Rounded, v: Rounded, scale: float, bias: Any) -> Rounded:
    scores = (q @ k) * scale
    if bias is not None:
        scores = scores + (bias if isinstance(bias, Rounded) else bias.astype(np.float64))
    return scores.softmax(-1) @ v


@draws("penstock.Attention")
def _attention(rng: Source, name: str) -> Draw:
    lead, rows, keys = rng.dims(2, 6), rng.size(65), rng.pick(rng.size(65), 256, 257, 530)
    width, out = rng.size(33), rng.size(33)
    scale, keys_last = float(rng.pick(1.0, 0.25)), int(rng.chance(0.5))
    q = (rng.normal(size=(*lead, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(*lead, keys, width)).astype(np.float32)
    k = np.ascontiguousarray(k.swapaxes(-1, -2)) if keys_last else k
    v = rng.normal(size=(*lead, keys, out)).astype(np.float32)
    bias = rng.normal(size=rng.broadcast((*lead, rows, keys))).astype(np.float32)
    inputs = [q, k, v, *([bias] if rng.chance(0.5) else [])]

    def bound(draw: Draw) -> list[Rounded | None]:
        q, k, v = (draw.read(i) for i in range(3))
        keys = k if keys_last else k.map(lambda a: a.swapaxes(-1, -2))
        term = draw.inputs[3] if len(draw.inputs) > 3 else None
        return [_attended(q, keys, v, scale, term)]

    return Draw(ATTENTION, inputs, {"scale": scale, "keys_last": keys_last}, bound)


@draws("penstock.PackedAttention")
def _packed_attention(rng: Source, name: str) -> Draw:
    groups, share = rng.integers(1, 3), rng.integers(1, 3)
    width, out = rng.size(33), rng.size(33)
    counts = np.array(
        [rng.pick(0, rng.size(65), rng.size(65), 257) for _ in range(rng.integers(1, 5))]
    )
    starts = rng.integers(0, 3, counts.size)
    before, total = np.cumsum(counts) - counts, int(counts.sum())
    whole, rows = (
        int((starts + counts).max()) + int(rng.integers(0, 3)),
        total + int(rng.pick(0, 7)),
    )
    rows = max(rows, 1)
    scale, keys_last = float(rng.pick(1.0, 0.25)), int(rng.chance(0.5))
    q = (rng.normal(size=(1, groups * share, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(1, groups, rows, width)).astype(np.float32)
    v = rng.normal(size=(1, groups, rows, out)).astype(np.float32)
    dims = counts.size, groups * share, max(whole, 1), max(whole, 1)
    biases = [
        rng.normal(size=rng.broadcast(dims)).astype(np.float32) for _ in range(rng.integers(0, 3))
    ]
    ranges = np.stack((starts, counts, before), 1)
    keys = np.ascontiguousarray(k.swapaxes(-1, -2)) if keys_last else k
    if rng.chance(0.5):  # heads of a row side by side, as dense layers write them
        q, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, v))

    def bound(draw: Draw) -> list[Rounded | None]:
        result = Rounded.exact(np.zeros((*q.shape[:-1], out), np.float32), draw.dtype)
        for i, (start, count, first) in enumerate(ranges.tolist()):
            packed, own = slice(first, first + count), slice(start, start + count)
            terms = [
                np.broadcast_to(b, dims)[i : i + 1, :, own, own].astype(np.float64) for b in biases
            ]
            of_k, of_v = (
                Rounded.exact(np.repeat(x, share, 1)[:, :, packed], draw.dtype) for x in (k, v)
            )
            of_q = Rounded.exact(q[:, :, packed], draw.dtype)
            if count:
                each = _attended(
                    of_q,
                    of_k.map(lambda a: a.swapaxes(-1, -2)),
                    of_v,
                    scale,
                    sum(terms) if terms else None,
                )
                result.value[:, :, packed], result.error[:, :, packed] = each.value, each.error
        return [result]

    attrs = {"scale": scale, "keys_last": keys_last}
    return Draw(PACKED_ATTENTION, [q, keys, v, ranges, *biases], attrs, bound)


@draws("penstock.PagedAttention")
def _paged_attention(rng: Source, name: str) -> Draw:
    groups, share = rng.integers(1, 4), rng.integers(1, 6)
    width, out, positions = rng.size(65), rng.size(65), int(rng.pick(1, 3, 32, 32, 64))
    counts = np.array([rng.pick(0, 1, 1, 2, rng.size(65)) for _ in range(rng.integers(1, 5))])
    adds = rng.chance(0.7)  # new keys and values; else each row sees all positions
    pasts = np.array([rng.pick(1 - adds, rng.size(65), 257, 530) for _ in counts])
    needed = -(-(pasts + adds * counts) // positions)
    begins, first = np.cumsum(needed) - needed, np.cumsum(counts) - counts
    count, rows = int(needed.sum()) + 1, max(int(counts.sum()) + int(rng.pick(0, 3)), 1)
    pages = np.argsort(rng.normal(size=count))[: count - 1].astype(np.int64)
    keys_at = int(rng.pick(0, 5))
    values_at = keys_at + groups * positions * width
    pool = rng.normal(size=(count, values_at + groups * positions * out + 2)).astype(np.float32)
    q = (rng.normal(size=(1, groups * share, rows, width)) / math.sqrt(width)).astype(np.float32)
    k = rng.normal(size=(1, groups, rows, width)).astype(np.float32)
    v = rng.normal(size=(1, groups, rows, out)).astype(np.float32)
    window, scale = int(rng.pick(0, 0, 1, 40)), float(rng.pick(1.0, 0.25))
    runs = np.stack((first, counts, pasts, begins), 1)
    if rng.chance(0.5):  # heads of a row side by side, as dense layers write them
        q, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, v))
    table = rng.normal(size=(groups * share, rng.size(65, 2))).astype(np.float32)
    table[:, -1] *= np.float32(rng.pick(0, 0.03))  # for each position beyond
    attrs = {"scale": scale, "window": window if adds else 0, "positions": positions}
    attrs |= {"keys_at": keys_at, "values_at": values_at}
    inputs = [q, k, v, pool, runs, pages, *([table] if rng.chance(0.5) else [])]
    if not adds:
        inputs, attrs = [q, None, None, *inputs[3:6]], attrs | {"groups": groups, "value_size": out}

    def cache(i: int, at: int, new: np.ndarray) -> np.ndarray:
        size, own = new.shape[3], pages[begins[i] : begins[i] + needed[i]]
        old = pool[own, at : at + groups * positions * size]
        if at == keys_at:
            old = old.reshape(-1, groups, size, positions).swapaxes(2, 3)
        old = old.reshape(-1, groups, positions, size).swapaxes(0, 1).reshape(groups, -1, size)
        added = new[0, :, first[i] : first[i] + adds * counts[i]]
        return np.repeat(np.concatenate((old[:, : pasts[i]], added), 1), share, 0)[None]

    def added(own: np.ndarray, before: np.ndarray, like: Rounded) -> Rounded:
        """What is added to scores of rows at some positions."""
        distance, last = own - before, table.shape[1] - 2
        numbers = like.like(0)
        if len(inputs) > BY_DISTANCE:
            further = like.like(table[:, -1:, None]) * np.maximum(distance - last, 0)
            numbers = like.like(table[:, np.clip(distance, 0, last)]) + further
        hidden = (distance < 0) | ((distance >= window) if window else False)
        if not adds:
            hidden &= False
        value, error = (
            np.where(hidden, x, y) for x, y in ((-1e30, numbers.value), (0, numbers.error))
        )
        return Rounded(value, error, like.dtype)

    def bound(draw: Draw) -> list[Rounded | None]:
        result = Rounded.exact(np.zeros((*q.shape[:-1], out), np.float32), draw.dtype)
        for i, n in enumerate(counts.tolist()):
            own = np.arange(pasts[i], pasts[i] + n)[:, None]
            bias = added(own, np.arange(pasts[i] + adds * n), result)
            of_k, of_v = (
                Rounded.exact(cache(i, at, x), draw.dtype)
                for at, x in ((keys_at, k), (values_at, v))
            )
            some = slice(first[i], first[i] + n)
            if n:
                of_q = Rounded.exact(q[:, :, some], draw.dtype)
                turned = of_k.map(lambda a: a.swapaxes(-1, -2))
                each = _attended(of_q, turned, of_v, scale, bias)
                result.value[:, :, some], result.error[:, :, some] = each.value, each.error
        return [result]

    return Draw(PAGED_ATTENTION, inputs, attrs, bound)


@draws("Attention com.microsoft.GroupQueryAttention penstock.StackedAttention")
def _cached(rng: Source, full_name: str) -> Draw:
    (name, domain), groups, share = _short(full_name), rng.integers(1, 4), rng.pick(1, 2, 3)
    stacked, domain = name == "StackedAttention", domain if domain != "penstock" else ""
    batch, rows, past, size = rng.pick(1, 2), rng.pick(1, 1, 2, 5), rng.size(65), rng.size(33)
    heads = groups * share
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    caches = [normal(batch, groups, past, size) for _ in range(2)]
    total = past + rows
    if domain:
        q = normal(batch, rows, heads * size)
        k, v = (normal(batch, rows, groups * size) for _ in range(2))
        numbers = [np.full((batch, 1), total - 1, np.int32), np.array(total, np.int32)]
        inputs = [q, k, v, *caches, *numbers, None, None]
        attrs: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups}
    else:
        q = normal(batch, heads, rows, size)
        k, v = (normal(batch, groups, rows, size) for _ in range(2))
        inputs, attrs = [q, k, v, None, *([np.stack(caches)] if stacked else caches)], {}

    def bound(draw: Draw) -> list[Rounded | None]:
        split = lambda a, n: a.reshape(batch, rows, n, size).swapaxes(1, 2)  # noqa: E731
        q, k, v = (x.astype(np.float64) for x in draw.inputs[:3])
        q, k, v = (split(q, heads), split(k, groups), split(v, groups)) if domain else (q, k, v)
        cached = draw.inputs[3:5] if domain else draw.inputs[4] if stacked else draw.inputs[4:6]
        whole = [np.concatenate(pair, 2) for pair in zip(cached, (k, v), strict=True)]
        k, v = (np.repeat(a, share, 1) for a in whole)
        later = np.arange(total) > past + np.arange(rows)[:, None]
        mask = np.where(later & bool(domain), -np.inf, 0.0)
        q, k, v = (Rounded.exact(a, np.dtype("float32")) for a in (q, k.swapaxes(-1, -2), v))
        y = _attended(q, k, v, 1 / math.sqrt(size), mask)
        if domain:
            y = y.map(lambda a: a.swapaxes(1, 2).reshape(batch, rows, -1))
        return [y, None] if stacked else [y, None, None]

    options: dict[str, Any] = {"domain": domain, "version": 1 if domain else 24}
    op = STACKED_ATTENTION if stacked else name
    return Draw(op, inputs, attrs, bound, outputs=3 - stacked, is_formula=True, **options)


@draws("com.microsoft.DecoderMaskedMultiHeadAttention com.microsoft.SparseAttention")
def _buffered(rng: Source, full_name: str) -> Draw:
    name, sparse = _short(full_name)[0], full_name.endswith("SparseAttention")
    batch, heads, room, size = rng.size(4), rng.size(5), rng.size(65), rng.size(33)
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    parts, pasts = ([normal(*dims) for _ in range(n)] for n, dims in (
        (3, (batch, 1, heads * size)), (2, (batch, heads, room, size))))  # fmt: skip
    used, count = rng.integers(room), math.ceil(room / 16)
    seen = np.array([[rng.chance(0.5) or i == j for i in range(count)] for j in range(count)])
    inputs = [*parts, None, None, *pasts, np.array([used], np.int32)]
    attrs, mask = {"num_heads": heads}, None
    if sparse:
        starts, columns = np.append(0, seen.sum(1).cumsum()), np.nonzero(seen)[1]
        codes = [x.astype(np.int32)[None] for x in (starts, columns)]
        ends = [np.full(n, used + 1, np.int32) for n in (1, batch)]
        inputs = [*parts, *pasts, *codes, *ends]
        attrs |= {"kv_num_heads": heads, "sparse_block_size": 16}
        mask = np.where(seen[used // 16, np.arange(used + 1) // 16], 0, -np.inf)

    def bound(draw: Draw) -> list[Rounded | None]:
        q, k, v = (x.astype(np.float64).reshape(batch, heads, 1, size) for x in draw.inputs[:3])
        old = [x[:, :, :used] for x in draw.inputs[3 if sparse else 5 :][:2]]
        k, v = (np.concatenate(pair, 2) for pair in zip(old, (k, v), strict=True))
        q, k, v = (Rounded.exact(a, np.dtype("float32")) for a in (q, k.swapaxes(-1, -2), v))
        y = _attended(q, k, v, 1 / math.sqrt(size), mask)
        return [y.map(lambda a: a.swapaxes(1, 2).reshape(batch, 1, -1)), None, None]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1}
    return Draw(name, inputs, attrs, bound, outputs=3, is_formula=True, **options)


@draws("LinearAttention")
def _linear_attention(rng: Source, name: str) -> Draw:
    rule = rng.pick("linear", "gated", "delta", "gated_delta")
    lead, heads, share = (rng.size(3), rng.pick(0, 1, 2, 5)), rng.size(3), rng.size(3)
    size, values = rng.size(33), rng.size(129)
    normal = lambda *dims: rng.normal(size=dims).astype(np.float32)  # noqa: E731
    inputs: list[Any] = [
        normal(*lead, heads * share * size),
        normal(*lead, heads * size) / np.float32(size),
        normal(*lead, heads * values),
        normal(lead[0], heads, size, values) if rng.chance(0.5) else None,
        -abs(normal(*lead, heads * rng.pick(1, size))) if "gated" in rule else None,
        abs(normal(*lead, rng.pick(1, heads))) if "delta" in rule else None,
    ]
    attrs = {"q_num_heads": heads * share, "kv_num_heads": heads, "update_rule": rule}
    attrs |= {"scale": 0.5} if rng.chance(0.5) else {}

    def bound(draw: Draw) -> list[Rounded | None]:
        zeros = np.zeros((lead[0], heads, size, values))
        state = Rounded.exact(zeros, draw.dtype) if inputs[3] is None else draw.read(3)
        apart = lambda i, *dims: draw.read(i).map(lambda x: x.reshape(*lead, heads, *dims))  # noqa: E731
        q, k, v = apart(0, share, size), apart(1, 1, size), apart(2, 1, values)
        turned = lambda x: x.map(lambda y: y.swapaxes(-1, -2))  # noqa: E731
        scale = attrs.get("scale", 1 / math.sqrt(size))
        results: list[Rounded] = []
        for t in range(lead[1]):
            key, added = k[:, t], v[:, t]
            if inputs[4] is not None:
                state = state * apart(4, -1, 1)[:, t].exp()
            if inputs[5] is not None:
                rate = draw.read(5)[:, t].map(lambda x: x[..., None, None])
                added = (added - key @ state) * rate
            state = state + turned(key) * added
            results.append(q[:, t] @ state * _near(state, scale))
        if not results:
            return [None, state]
        joined = [np.stack([getattr(y, x) for y in results], 1) for x in ("value", "error")]
        y = Rounded(*[x.reshape(*lead, -1) for x in joined], draw.dtype)
        return [y, state]

    return Draw(name, inputs, attrs, bound, outputs=2, version=27, is_formula=True)


@draws("CausalConvWithState")
def _causal(rng: Source, name: str) -> Draw:
    (n, channels), length, kernel = rng.dims(2, 300), rng.pick(1, rng.size(161)), rng.integers(1, 7)
    dims, shapes = (n, channels, length), [(channels, 1, kernel), (channels,)]
    x, w, bias = (rng.numbers(shape, "float32") for shape in (dims, *shapes))
    past = rng.numbers((n, channels, kernel - 1), "float32") if rng.chance(0.7) else None
    attrs = {"activation": rng.pick("none", "silu")}

    def bound(draw: Draw) -> list[Rounded | None]:
        before = np.zeros((n, channels, kernel - 1), np.float32) if past is None else past
        rows = np.concatenate([before, x], -1)
        seen = np.lib.stride_tricks.sliding_window_view(rows, kernel, -1)
        one = np.ones((*dims, 1)) * (0 if draw.inputs[2] is None else bias[:, None, None])
        # The bias is among the terms of a sum.
        terms = Rounded.exact(np.concatenate([seen, one], -1), draw.dtype)
        y = (terms * np.concatenate([w, np.ones((channels, 1, 1))], -1)).sum(-1)
        return [y if attrs["activation"] == "none" else y * y.sigmoid(), None]

    inputs = [x, w, bias if rng.chance(0.7) else None, past]
    return Draw(name, inputs, attrs, bound, outputs=2, version=27, is_formula=True)


@draws("com.microsoft.GatherBlockQuantized")
def _gathered_blocks(rng: Source, full_name: str) -> Draw:
    (name, domain), bits, block = _short(full_name), rng.pick(2, 4, 4, 8), rng.pick(16, 32, 128)
    lead, nbytes = rng.dims(rng.pick(1, 2), 60), rng.size(129)
    blocks = -(-nbytes * 8 // bits // block)
    codes = rng.integers(0, 256, (*lead, nbytes)).astype(np.uint8)
    zeros = rng.integers(0, 256, (*lead, -(-blocks * bits // 8))).astype(np.uint8)
    scales = rng.numbers((*lead, blocks), "float32")
    dims, dtype = rng.dims(rng.integers(3), 40), rng.pick("int32", "int64")
    indices = rng.integers(-lead[0] - 1, lead[0] + 1, dims).astype(dtype)
    inputs = [codes, indices, scales, *([zeros] if rng.chance(0.5) else [])]
    attrs = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": len(lead)}
    return Draw(name, inputs, attrs, domain=domain, version=1)


@draws("com.microsoft.NGramRepeatBlock")
def _ngrams(rng: Source, full_name: str) -> Draw:
    (name, domain), rows, words = _short(full_name), rng.size(9), rng.size(65)
    ids = rng.integers(0, min(words, 3), (rows, rng.integers(0, 40)))
    scores, attrs = rng.numbers((rows, words), "float32"), {"ngram_size": rng.integers(1, 6)}
    return Draw(name, [ids, scores], attrs, domain=domain, version=1)


@draws("com.microsoft.NGramHashMapping com.microsoft.VarlenNGramHashMapping")
def _hashes(rng: Source, full_name: str) -> Draw:
    (name, domain), packed = _short(full_name), "Varlen" in full_name
    most, heads, lengths = rng.integers(2, 6), rng.size(9), rng.integers(1, 9, rng.size(7))
    batch, length = len(lengths), rng.size(17)
    hashes = (most - 1) * heads
    small, wide = (lambda *d: rng.integers(-1, 5, d)), (lambda *d: rng.numbers(d, "int64"))
    sizes = np.maximum(np.abs(rng.numbers((hashes,), "int64")) >> rng.integers(1, 60), 1)
    ids = small(lengths.sum()) if packed else small(batch, length)
    factors = wide(most + rng.integers(2))
    bounds = [np.append(0, lengths.cumsum()).astype(np.int32)] if packed else []
    past, offsets = small(batch, most - 1), small(hashes)
    rest = [past, offsets, np.array(rng.integers(4))][: rng.integers(4)]
    rest = [None if rng.chance(0.3) else x for x in rest[:-1]] + rest[-1:]
    attrs = {"pad_id": 3, "max_ngram_size": most, "n_head_per_ngram": heads}
    inputs = [ids, factors, sizes, *bounds, *rest]
    return Draw(name, inputs, attrs, domain=domain, outputs=rng.integers(1, 3), version=1)


@draws("com.microsoft.WordConvEmbedding")
def _words(rng: Source, full_name: str) -> Draw:
    (name, domain), characters, filters, width = _short(full_name), rng.size(9), rng.size(65), 4
    window, many = rng.integers(1, characters + 1), rng.size(17)
    words = rng.integers(0, many + rng.chance(0.1), (rng.size(33), characters)).astype(np.int32)
    weights = rng.normal(size=(filters, 1, window, width)).astype(np.float32)
    bias, table = (rng.normal(size=n).astype(np.float32) for n in (filters, (many, width)))

    def bound(draw: Draw) -> list[Rounded | None]:
        y = draw.wide()[0]
        # Sums of about 4 terms each, and the tanh of c/core/math32.h.
        return [Rounded.exact(y, np.dtype("float32")).inexact(2e-5)]

    inputs = [words, weights, bias, table]
    return Draw(name, inputs, {}, bound, [1, 2, 3], domain=domain, version=1)


@draws("com.microsoft.BifurcationDetector com.microsoft.DynamicTimeWarping")
def _of_unknown_length(rng: Source, full_name: str) -> Draw:
    (name, domain), length = _short(full_name), rng.size(129)
    if name == "DynamicTimeWarping":
        costs = rng.numbers((rng.size(33), rng.size(65)), "float32", 0.2)
        return Draw(name, [costs[None] if rng.chance(0.3) else costs], domain=domain, version=1)
    source, current = rng.integers(0, 3, length), rng.integers(0, 3, rng.integers(5))
    start = np.array([rng.integers(length + 1)])
    predicted = np.append(source[start[0] :], 1)
    predicted[rng.integers(len(predicted)) :] = 2
    inputs = [source, current, start, *([predicted] if rng.chance(0.7) else [])]
    sizes = {"min_ngram_size": rng.integers(1, 3), "max_ngram_size": rng.integers(3, 6)}
    return Draw(name, inputs, sizes, domain=domain, outputs=2, version=1)


_SEARCH = {"pad_token_id": 0, "eos_token_id": 1, "early_stopping": 0}


@draws("penstock.SearchEnd penstock.SearchStart penstock.SearchStep")
def _search(rng: Source, full_name: str) -> Draw:
    """A step of a search that has begun, its end, or its start."""
    kind = rng.pick("GreedySearch", "Sampling", "BeamSearch")
    beam = kind == "BeamSearch"
    batch, length, most, words = rng.size(5), rng.integers(1, 9), rng.integers(10, 17), rng.size(65)
    beams, words = rng.integers(1, 5) if beam else 1, max(words, 2)
    rows = batch * beams
    tokens = lambda *dims: rng.integers(0, words, dims).astype(np.int32)  # noqa: E731
    number = lambda x, dtype="float32": np.array([x], dtype)  # noqa: E731
    attrs = {**_SEARCH, "kind": kind, "beam_search": beam, "early_stopping": rng.integers(2)}
    attrs |= {"no_repeat_ngram_size": rng.integers(0, 4)}
    ids, penalty = tokens(batch, length), number(rng.pick(0.0, 1.0, 2.0))
    if full_name.endswith("Start"):
        mask = tokens(batch, length) if rng.chance(0.5) else None
        inputs = [ids, number(most, "int32"), number(beams, "int32"), mask]
        return Draw(SEARCH_START, inputs, attrs, outputs=2 + STATE)
    ended_scores = rng.normal(size=(batch, beams)).astype(np.float32)
    ended_scores[rng.random((batch, beams)) < 0.5] = -np.inf
    scores, done = rng.normal(size=rows).astype(np.float32), rng.random(batch) < 0.2
    kept = [scores, tokens(batch, beams, most), ended_scores, done]
    if full_name.endswith("End"):
        returned, first = number(rng.integers(1, beams + 1), "int32"), ended_scores[..., None]
        inputs = [tokens(rows, length), *kept, penalty, returned, first, None, ids]
        return Draw(SEARCH_END, inputs, attrs, outputs=1 + beam)
    logits = rng.normal(size=(rng.pick(rows, batch), rng.integers(1, 4), words))
    state = [tokens(rows, 1), tokens(rows, 1), tokens(rows, length), tokens(rows, length), *kept]
    limits = [number(rng.integers(12), "int32"), penalty, number(rng.pick(0.7, 1.0, 1.3))]
    limits += [rng.integers(0, 2, dims).astype(np.int32) for dims in (words, (batch, words))]
    present = rng.integers(0, 2, (batch, words)).astype(np.int32)
    limits += [number(rng.pick(0.5, 1.0)), present, number(rng.integers(99), "int32")]
    limits = [x if rng.chance(0.6) else None for x in limits]
    prompt = ids[:, : rng.integers(1, length + 1)]
    inputs = [logits.astype(np.float32), *state, prompt, *limits, None]
    if kind == "Sampling":
        attrs |= {"temperature": 1.5, "top_p": rng.pick(0.3, 0.8), "filter_value": -1e20}
        attrs |= {"presence_penalty": 0.5, "min_tokens_to_keep": rng.integers(4)}
        attrs |= {"custom": rng.integers(2)}

    def bound(draw: Draw) -> list[Rounded | None]:
        """Of scores, to which logarithms and exponentials are close."""
        outputs = expected(draw.node, draw.inputs)
        near = [Rounded.exact(y, np.dtype("float32")) for y in outputs]
        close = [y.inexact(1e-5 * (4 + np.abs(y.value))) for y in near]
        return [close[i] if i in (2, 7, 9) else None for i in range(len(outputs))]

    return Draw(SEARCH_STEP, inputs, attrs, bound, outputs=3 + STATE, is_formula=True)


@draws("RotaryEmbedding com.microsoft.RotaryEmbedding")
def _rotary(rng: Source, full_name: str) -> Draw:
    (name, domain), half = _short(full_name), rng.size(17)
    batch, heads, sequence, rest = rng.size(3), rng.size(5), rng.size(17), 2 * rng.integers(3)
    size = 2 * half + rest
    x = rng.numbers((batch, heads, sequence, size), "float32")
    cos, sin = (rng.numbers((24, half), "float32") for _ in range(2))
    ids = _places(rng, (batch, sequence), 24).astype(np.int64) % 25
    attrs = {"interleaved": int(rng.chance(0.5)), "rotary_embedding_dim": 2 * half}
    attrs["num_heads"] = heads
    inputs = [x, ids, cos, sin] if domain else [x, cos, sin, ids]
    return Draw(name, inputs, attrs, domain=domain, version=1 if domain else 26)


def _step(cell: str, parts: Sequence[Rounded], h: Rounded, c: Rounded | None, **more: Any) -> Any:
    """The next state and cell: ``parts`` are the sums of each gate, of the state apart for what a
    GRU resets behind its product."""
    if cell == "RNN":
        return parts[0].tanh(), None
    if cell == "GRU":
        z, r = parts[0].sigmoid(), parts[1].sigmoid()
        new = more["new"](r).tanh()
        return (1.0 - z) * new + z * h, None
    assert c is not None
    peep = more.get("peep", (0.0, 0.0, 0.0))
    i, f = (parts[0] + c * peep[0]).sigmoid(), (parts[2] + c * peep[2]).sigmoid()
    c, clip = f * c + i * parts[3].tanh(), more.get("clip", 0.0) or np.inf
    c = Rounded(np.clip(c.value, -clip, clip), c.error, c.dtype)
    return (parts[1] + c * peep[1]).sigmoid() * c.tanh(), c


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _layer(
    cell: str,
    x: Rounded,
    w: Rounded,
    r: Rounded,
    bias: np.ndarray,
    h: Rounded,
    c: Rounded,
    lengths: np.ndarray,
    *,
    peep: Any = (0.0, 0.0, 0.0),
    reverse: bool = False,
    behind: bool = False,
    state_error: float = 0.0,
    clip: float = 0.0,
) -> tuple[list[Rounded], Rounded, Rounded]:
    """The states of all steps of one direction, each [batch, units]; the last state and cell. Rows
    whose sequence has ended keep their states, and have zeros. ``state_error`` is what a state is
    changed by before it is multiplied."""
    steps, batch, units = *x.value.shape[:2], r.value.shape[-1]
    gates = GATES[cell]
    own, of_state = bias[: gates * units], bias[gates * units :]
    part = lambda a, i: a[..., i * units : (i + 1) * units]  # noqa: E731
    states = [Rounded.exact(np.zeros((batch, units)), x.dtype)] * steps
    for step in range(steps):
        at = lengths - 1 - step if reverse else np.full(batch, step)
        running = (step < lengths)[:, None]
        rows = x[np.clip(at, 0, steps - 1), np.arange(batch)]
        read = h.inexact(state_error)
        a, b = rows @ w.map(np.transpose) + own, read @ r.map(np.transpose) + of_state
        parts = [part(a, i) + part(b, i) for i in range(gates)]

        def new(reset: Rounded, a: Any = a, b: Any = b, h: Rounded = read) -> Rounded:
            if behind:
                return part(a, 2) + reset * part(b, 2)
            product = (reset * h) @ r.map(np.transpose)[:, 2 * units :]
            return part(a, 2) + (product + of_state[2 * units :])

        next_h, next_c = _step(cell, parts, h, c, new=new, peep=peep, clip=clip)
        h = _chosen_rows(running, next_h, h)
        c = c if next_c is None else _chosen_rows(running, next_c, c)
        for row in range(batch):
            if running[row]:
                place = at[row]
                keep = np.arange(batch)[:, None] == row
                states[place] = _chosen_rows(keep, h, states[place])
    return states, h, c


def _chosen_rows(mask: np.ndarray, a: Rounded, b: Rounded) -> Rounded:
    value, error = np.where(mask, a.value, b.value), np.where(mask, a.error, b.error)
    return Rounded(value, error, a.dtype)


def _stacked(parts: Sequence[Rounded], axis: int) -> Rounded:
    return Rounded(
        np.stack([p.value for p in parts], axis),
        np.stack([p.error for p in parts], axis),
        parts[0].dtype,
    )


@draws("GRU LSTM RNN tflite.Lstm")
def _recurrent(rng: Source, full_name: str) -> Draw:
    name, domain = _short(full_name)
    cell = name.upper()
    steps, batch, width, units = rng.size(7), rng.size(17), rng.size(33), rng.size(65)
    directions, gates = 1 if domain else rng.pick(1, 1, 2), GATES[cell]
    direction = "bidirectional" if directions == 2 else rng.pick("forward", "reverse")
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    w = normal(directions, gates * units, width) / np.float32(math.sqrt(width))
    r = normal(directions, gates * units, units) / np.float32(math.sqrt(units))
    given = lambda *dims: normal(*dims) if domain or rng.chance(0.5) else None  # noqa: E731
    some = rng.chance(0.4) and not domain
    lengths = rng.integers(0, steps + 1, batch).astype(np.int32) if some else None
    inputs = [normal(steps, batch, width), w, r, given(directions, 2 * gates * units), lengths]
    inputs.append(given(directions, batch, units))
    if cell == "LSTM":
        inputs += [given(directions, batch, units), given(directions, 3 * units)]
    attrs: dict[str, Any] = {"hidden_size": units, "direction": direction}
    clip = rng.pick(0.0, 0.1, 0.7) if domain else 0.0
    attrs |= {"cell_clip": clip, "proj_clip": 0.0, "activation": 4} if domain else {}
    behind = cell == "GRU" and rng.chance(0.5)
    attrs |= {"linear_before_reset": 1} if behind else {}
    outputs = 3 if cell == "LSTM" else 2

    def bound(draw: Draw) -> list[Rounded | None]:
        zeros = np.zeros((directions, batch, units))
        read = lambda i, other: draw.read(i).value if _has(draw, i) else other  # noqa: E731
        bias, h, c = read(3, np.zeros((directions, 2 * gates * units))), read(5, zeros), zeros
        peep = np.zeros((directions, 3 * units))
        if cell == "LSTM":
            c, peep = read(6, zeros), read(7, peep)
        ends = np.full(batch, steps) if draw.inputs[4] is None else draw.inputs[4]
        results = [
            _layer(
                *(cell, draw.read(0), draw.read(1)[d], draw.read(2)[d], bias[d]),
                *(draw.read(0).like(h[d]), draw.read(0).like(c[d]), ends),
                peep=np.split(peep[d], 3),
                reverse=d == 1 or direction == "reverse",
                behind=behind,
                clip=clip,
            )
            for d in range(directions)
        ]
        y = _stacked([_stacked(states, 0) for states, _, _ in results], 1)
        return [y, *[_stacked([x[i] for x in results], 0) for i in range(1, outputs)]]

    constants = [i for i in (1, 2, 3, 7) if i < len(inputs) and inputs[i] is not None]
    options: dict[str, Any] = {"domain": domain, "version": 1} if domain else {}
    return Draw(name, inputs, attrs, bound, constants, outputs, **options)


@draws("tflite.DynamicRangeDense")
def _dynamic_range_dense(rng: Source, full_name: str) -> Draw:
    """Codes, their sums and what is made of them are the same to the bit."""
    k, n = rng.size(200), rng.size(150)
    x = rng.normal(rng.pick(0.0, 2.0), 1, (*rng.dims(1, 9), k)).astype(np.float32)
    x[0] = x[0] * rng.pick(0, 1)
    scales = np.asarray(rng.uniform(0.001, 0.1, rng.pick((1,), (n,))), np.float32)
    inputs = [x, rng.numbers((n, k), "int8"), scales]
    inputs += [rng.normal(0, 1, n).astype(np.float32)] if rng.chance(0.6) else []
    attrs: dict[str, Any] = {"asymmetric": rng.pick(0, 1)}
    attrs |= rng.pick({}, {"limits": [0.0, math.inf]}, {"limits": [-1.0, 1.0]})
    constants = [*range(1, len(inputs))]
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("DynamicRangeDense", inputs, attrs, None, constants, **options)


@draws("tflite.IntegerLstm")
def _integer_lstm(rng: Source, full_name: str) -> Draw:
    """Sums of all sizes, up to gates that saturate; the result is the same to the bit."""
    steps, batch, width, units = rng.size(7), rng.size(17), rng.size(150), rng.size(90)
    layout, bits = rng.pick(0, 1), rng.pick(0, 3, 4, 6)
    dims = (batch, steps, width) if layout else (steps, batch, width)
    inputs = [rng.numbers(dims, "int8")]
    inputs += [rng.numbers((4 * units, size), "int8") for size in (width, units)]
    inputs += [rng.integers(-30000, 30000, 4 * units, np.int32) for _ in range(2)]
    inputs += [rng.numbers((batch, units), dtype) for dtype in ("int8", "int16")]
    scales = 2.0 ** rng.uniform(-9, 1, 8)
    attrs = {
        "hidden_size": units,
        "direction": rng.pick("forward", "reverse"),
        "layout": layout,
        "scales": [*scales.tolist(), 2.0 ** float(rng.uniform(-25, -20, ()))],
        "zero": rng.pick(0, -128, 5),
        "cell_bits": bits,
        "cell_clip": rng.pick(0, 20000),
    }
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("IntegerLstm", inputs, attrs, None, [1, 2, 3, 4], 3, **options)


@draws("tflite.IntegerSvdf")
def _integer_svdf(rng: Source, full_name: str) -> Draw:
    """Sums of all sizes, up to memories and codes that saturate, and sums that wrap."""
    batch, features, units, rank = rng.size(17), rng.size(150), rng.size(150), rng.pick(1, 2, 3)
    steps, filters = rng.size(20), rank * units
    inputs = [rng.numbers((batch, features), "int8"), rng.numbers((filters, features), "int8")]
    inputs += [rng.numbers((filters, steps), "int16")]
    inputs += [rng.integers(-30000, 30000, n, np.int32) for n in (filters, units)]
    inputs += [rng.numbers((batch, filters * steps), "int16")]
    scales = [2.0 ** float(rng.uniform(low, high, ())) for low, high in ((-12, 3), (-32, -16))]
    attrs = {"scales": scales, "zero": rng.pick(0, -128, 5)}
    options: dict[str, Any] = {"domain": "tflite", "version": 1}
    return Draw("IntegerSvdf", inputs, attrs, None, [1, 2, 3, 4], 2, **options)


def _has(draw: Draw, i: int) -> bool:
    return i < len(draw.inputs) and draw.inputs[i] is not None


@draws("com.microsoft.DynamicQuantizeLSTM")
def _codes_lstm(rng: Source, full_name: str) -> Draw:
    steps, batch, width, units = rng.size(5), rng.size(9), rng.size(33), rng.size(33)
    dtype = rng.pick(*CODES)
    weights, scales, zeros = [], [], []
    for k in (width, units):
        weights.append(rng.numbers((1, k, 4 * units), dtype))
        scales.append(rng.uniform(0.001, 0.003, (1, 4 * units)).astype(np.float32))
        zeros.append(rng.numbers((1, 4 * units), dtype))
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    x, states = normal(steps, batch, width), [normal(1, batch, units) for _ in range(2)]
    inputs = [x, *weights, normal(1, 8 * units), None, *states, None]
    inputs += [scales[0], zeros[0], scales[1], zeros[1]]

    def bound(draw: Draw) -> list[Rounded | None]:
        # Rows of x, and all states of a step, are rounded to one of 255 codes between their least and
        # their highest, of which 0 is one: by half of a code, one more as that is rounded itself.
        w, r = (
            (weights[i].astype(np.float64) - zeros[i]) * scales[i].astype(np.float64)
            for i in range(2)
        )
        exact = draw.read(0).like
        spread = max(float(x.max(initial=0)) - float(x.min(initial=0)), 1e-9)
        most = 2 * max(1.0, float(np.abs(states[0]).max()))
        states_and_ends = _layer(
            *("LSTM", draw.read(0).inexact(spread / 255), exact(w[0].T), exact(r[0].T)),
            *(draw.inputs[3][0].astype(np.float64), exact(states[0][0]), exact(states[1][0])),
            np.full(batch, steps),
            state_error=most / 255,
        )
        every, h, c = states_and_ends
        return [_stacked([_stacked(every, 0)], 1), _stacked([h], 0), _stacked([c], 0)]

    options: dict[str, Any] = {"domain": "com.microsoft", "version": 1, "is_formula": True}
    attrs = {"hidden_size": units, "direction": "forward"}
    constants = [1, 2, 3, *range(8, 12)]
    return Draw("DynamicQuantizeLSTM", inputs, attrs, bound, constants, 3, **options)


@draws("penstock.Recurrence")
def _recurrence(rng: Source, name: str) -> Draw:
    cell, steps, batch, units = rng.pick(*GATES), rng.size(5), rng.size(17), rng.size(65)
    gates, behind = GATES[cell], rng.chance(0.5)
    normal = lambda *dims: rng.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    places = tuple(rng.permutation(gates).tolist())
    r = normal(1, gates * units, units) / np.float32(math.sqrt(units))
    bias = normal(1, 2 * gates * units) if rng.chance(0.5) else None
    inputs = [normal(steps, batch, gates * units), r, bias, None]
    inputs += [normal(batch, units) for _ in range(2 if cell == "LSTM" else 1)]
    attrs = {"cell": cell, "hidden_size": units, "places": places}
    attrs |= {"linear_before_reset": int(behind), "activations": ()}

    def bound(draw: Draw) -> list[Rounded | None]:
        order = np.concatenate([np.arange(units) + units * place for place in places])
        x, exact = draw.read(0).map(lambda a: a[..., order]), draw.read(0).like
        own = np.zeros(2 * gates * units) if bias is None else bias[0].astype(np.float64)
        h = exact(draw.inputs[4])
        c = exact(draw.inputs[5]) if cell == "LSTM" else h
        # The products are given: those with the identity have no error but of zeros.
        states, h, c = _layer(
            *(cell, x, exact(np.eye(gates * units)), draw.read(1)[0], own, h, c),
            np.full(batch, steps),
            behind=behind,
        )
        return [_stacked(states, 0), h, *([c] if cell == "LSTM" else [])]

    constants = [1] if bias is None else [1, 2]
    return Draw(RECURRENCE, inputs, attrs, bound, constants, 3 if cell == "LSTM" else 2)


@draws("penstock.LstmCell penstock.GruCell penstock.GruGates penstock.GruState")
def _cells(rng: Source, full_name: str) -> Draw:
    name, rows, units = _short(full_name)[0], rng.size(5), rng.size(65)
    scale = rng.pick(0.1, 3.0, 1e4)
    gates = lambda n: (rng.normal(size=(rows, n * units)) * scale).astype(np.float32)  # noqa: E731
    state = rng.normal(size=(rows, units)).astype(np.float32)
    part = lambda x, i: x[:, i * units : (i + 1) * units]  # noqa: E731
    order = tuple(rng.permutation(4 if name == "LstmCell" else 3).tolist())
    if name == "LstmCell":

        def lstm(draw: Draw) -> list[Rounded | None]:
            i, f, o, n = (part(draw.read(0), place) for place in order)
            c = (f + 0.5).sigmoid() * draw.read(1) + i.sigmoid() * n.tanh()
            return [o.sigmoid() * c.tanh(), c]

        attrs = {"order": order, "forget_bias": 0.5}
        return Draw(LSTM_CELL, [gates(4), state], attrs, lstm, outputs=2, is_formula=True)
    if name == "GruCell":

        def gru(draw: Draw) -> list[Rounded | None]:
            (xz, xr, xn), (hz, hr, hn) = ([part(draw.read(i), p) for p in order] for i in (0, 1))
            new = (xn + (xr + hr).sigmoid() * hn).tanh()
            return [new + (xz + hz).sigmoid() * (draw.read(2) - new)]

        return Draw(GRU_CELL, [gates(3), gates(3), state], {"order": order}, gru, is_formula=True)
    if name == "GruGates":

        def resets(draw: Draw) -> list[Rounded | None]:
            hz, hr = (part(draw.read(0), p) for p in order[:2])
            xz, xr = (part(draw.read(2), p) for p in order[1:])
            return [(hz + xz).sigmoid(), (hr + xr).sigmoid() * draw.read(1)]

        attrs = {"order": (*order[:2], *order[1:])}
        return Draw(
            GRU_GATES, [gates(3), state, gates(3)], attrs, resets, outputs=2, is_formula=True
        )

    def update(draw: Draw) -> list[Rounded | None]:
        new = (draw.read(0) + part(draw.read(3), order[0])).tanh()
        return [new + draw.read(1) * (draw.read(2) - new)]

    z = rng.random((rows, units)).astype(np.float32)
    inputs = [gates(1), z, state, gates(3)]
    return Draw(GRU_STATE, inputs, {"order": order[:1]}, update, is_formula=True)
