"""Cases of ``bench.tflite_operators``: models of one operator, for the types that LiteRT has it in.

A builder gives the model of an operator for a ``Family``, which draws tensors of one type, and for
some dims. ``operator_cases`` registers it with a type and two tuples of dims for each row: a small
model, as those that spot keywords consist of, and a large one, of some 100 us to a few ms. Weights,
axes and whatever else a model fixes are ``held``; the rest is fed.

The types: those of tensors, of which int8, uint8 and int16 are codes with a scale and a zero point;
"int16x8", codes of 16 bits with weights of 8; "hybrid", real numbers with weights of int8; and
"float16", real numbers with weights that a DEQUANTIZE makes of float16. "int32", "int64" and "bool"
have no scales.

This module has operators element by element; ``bench.tflite_operator_cases_arrays`` has those of
arrays, shapes and tables, ``bench.tflite_operator_cases_layers`` layers and control flow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tests.support.tflite_models import TYPES, model, subgraph

import penstock as ps
from penstock.core.types import TensorType
from penstock.frontends.tflite.flatbuffer import schema

SIZES = ("small", "large")
CODES = {"int8": (0.05, -5), "uint8": (0.05, 120), "int16": (2.0**-11, 0), "int16x8": (2.0**-11, 0)}
"""The scale and the zero point of an input, by type."""
HALF = {"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)}
"""Those of a number from 0 to 1, as LiteRT's kernels demand."""
ONE = {"int8": (1 / 128, 0), "uint8": (1 / 128, 128), "int16": (1 / 32768, 0)}
"""Those of a number from -1 to 1."""
_TABLES = {name.lower(): name for name in schema().tables.entries}
Dims = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tensor:
    """An array that is fed, a constant (``held``), or the first value of a ``variable``; with the
    scales of codes along an axis, or one for all. Of a result, the array has no elements."""

    array: np.ndarray
    scale: Any = None
    zero: int = 0
    held: bool = False
    axis: int = 0
    variable: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the tensor in the file."""
        fields: dict[str, Any] = {"type": TYPES.index(self.array.dtype.name)}
        if self.variable:
            fields |= {"shape": list(self.array.shape), "is_variable": True}
        if self.scale is not None:
            scales = np.atleast_1d(self.scale).tolist()
            fields["quantization"] = {
                "scale": scales,
                "zero_point": [self.zero] * len(scales),
                "quantized_dimension": self.axis,
            }
        return fields


@dataclass(frozen=True, eq=False)
class SingleOperator:
    """An operator with its tensors; those of ``between`` are its intermediate ones. Its options are
    of the table that is named after it, or of ``table``. ``shapes`` are those of outputs ("y0")
    that Penstock knows in a run only."""

    name: str
    inputs: Sequence[Tensor | None]
    outputs: Sequence[Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    table: str = ""
    between: Sequence[Tensor] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    version: int = 1

    def built(self) -> BuiltModel:
        """The model, whose outputs have the shapes that Penstock finds: LiteRT's delegate takes no
        operator whose tensors have none."""
        feeds = {f"x{i}": x.array for i, x in enumerate(self.inputs) if x and is_fed(x)}
        known = self.shapes or known_shapes(self.file({}))
        return BuiltModel(self.file(known), feeds)

    def file(self, shapes: Mapping[str, Sequence[int]]) -> bytes:
        named = {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None}
        results = {f"y{i}": y for i, y in enumerate(self.outputs)}
        operators = []
        for name, x in list(named.items()):
            if x.array.dtype == np.float16 and x.held:
                operators.append(("DEQUANTIZE", [f"{name}h"], [name], None))
                named[f"{name}h"] = x
                named[name] = replace(x, array=np.zeros(x.array.shape, np.float32), held=False)
        widened = {name for _, _, (name,), _ in operators}
        order = [f"x{i}" if x is not None else None for i, x in enumerate(self.inputs)]
        options = self._options()
        operators.append((self.name, order, list(results), options))
        fields = {name: tensor.fields for name, tensor in {**named, **results}.items()}
        for name in widened:
            fields[name]["shape"] = list(named[name].array.shape)
        for name, shape in shapes.items():
            fields[name]["shape"] = list(shape)
        graph = subgraph(
            {
                name: (x.array.dtype.name if x.array.dtype != object else "object", x.array.shape)
                for name, x in named.items()
                if is_fed(x) and name not in widened
            },
            operators,
            list(results),
            {name: x.array for name, x in named.items() if x.held},
            **fields,
        )
        if self.between:
            first = len(graph["names"])
            options["intermediates"] = [*range(first, first + len(self.between))]
            names = [f"m{i}" for i in range(len(self.between))]
            graph["names"] += names
            graph["fields"] |= {
                name: {"name": name, "shape": [0], **tensor.fields}
                for name, tensor in zip(names, self.between, strict=True)
            }
        return model([graph], versions={self.name: self.version})

    def _options(self) -> Any:
        table = self.table or _TABLES.get(f"{self.name.replace('_', '').lower()}options")
        if table is None:
            return None
        if not self.between:
            return table, self.options
        unions = {name: number for number, name in schema().unions["BuiltinOptions"].items()}
        return {"builtin_options_type": unions[table], "builtin_options": (table, self.options)}


def is_fed(x: Tensor) -> bool:
    return not x.held and not x.variable


def known_shapes(file: bytes) -> dict[str, Sequence[int]]:
    """The shapes of outputs that are the same in all runs."""
    try:
        outputs = ps.compile(file, backends=["numpy"]).outputs
    except ps.PenstockError:
        return {}  # which is a row, too, that says so
    types = {each.name: each.type for each in outputs}
    return {
        name: type_.shape
        for name, type_ in types.items()
        if isinstance(type_, TensorType) and type_.static
    }


@dataclass(frozen=True)
class BuiltModel:
    """A file and what it is fed. ``alike``: both engines give the same, which random numbers are
    not."""

    file: bytes
    feeds: dict[str, np.ndarray]
    alike: bool = True


class Family:
    """Draws tensors of one type, the same each time."""

    def __init__(self, type_: str) -> None:
        self.type = type_
        self.rng = np.random.default_rng(7)
        kinds = {"int16x8": "int16", "hybrid": "float32", "float16": "float32"}
        self.dtype = np.dtype(object if type_ == "string" else kinds.get(type_, type_))
        self.scale, self.zero = CODES.get(type_, (None, 0))

    @property
    def is_of_codes(self) -> bool:
        return self.scale is not None

    def array(self, *shape: int, positive: bool = False) -> np.ndarray:
        rng, dtype = self.rng, self.dtype
        if dtype.kind == "c":
            return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
        if dtype.kind == "f":
            drawn = rng.standard_normal(shape).astype(dtype)
            return np.abs(drawn) + dtype.type(0.1) if positive else drawn
        if dtype.kind == "b":
            return rng.random(shape) > 0.5
        if not self.is_of_codes:
            return rng.integers(1 if positive else -50, 50, shape).astype(dtype)
        ends = np.iinfo(dtype)
        least = 1 if positive and dtype == np.int16 else ends.min + positive
        return rng.integers(least, ends.max + 1, shape).astype(dtype)

    def x(self, *shape: int, times: float = 1.0, positive: bool = False, **more: Any) -> Tensor:
        """A tensor of numbers in steps of ``times`` the type's scale."""
        drawn = self.array(*shape, positive=positive)
        zero = self.zero
        if positive and self.dtype != np.int16 and self.is_of_codes:
            zero = int(np.iinfo(self.dtype).min)
        return Tensor(drawn, self._scale(times), zero, **more)

    def y(self, times: float = 1.0) -> Tensor:
        """A result."""
        return Tensor(np.zeros(0, self.dtype), self._scale(times), self.zero)

    def in_range(self, ranges: Mapping[str, tuple[float, int]]) -> Tensor:
        """A result of codes whose range is given, or of real numbers."""
        return Tensor(np.zeros(0, self.dtype), *ranges.get(self.type, (None, 0)))

    def _scale(self, times: float) -> float | None:
        return None if self.scale is None else self.scale * times

    def weights(self, *shape: int, axis: int | None = None, inner: int = 1) -> Tensor:
        """Constants, with a scale for each index of ``axis`` where codes of int8 may have some;
        ``inner``: how many products are added up, so that their sum is about 1."""
        size = 1 / np.sqrt(inner)
        if self.type in ("float32", "float16"):
            drawn = (self.rng.standard_normal(shape) * size).astype(self.type)
            return Tensor(drawn, held=True)
        if self.type == "uint8":
            drawn = self.rng.integers(0, 256, shape).astype(np.uint8)
            return Tensor(drawn, 0.02 * size, 130, held=True)
        drawn = self.rng.integers(-127, 128, shape).astype(np.int8)
        scale: Any = 0.02 * size
        if axis is not None:
            scale = scale * (1 + np.arange(shape[axis]) % 7 / 7)
        return Tensor(drawn, scale, held=True, axis=axis or 0)

    def bias(self, weights: Tensor, count: int) -> Tensor:
        if not self.is_of_codes:
            drawn = self.rng.standard_normal(count).astype(np.float32)
            return Tensor(drawn.astype(np.float16) if self.type == "float16" else drawn, held=True)
        dtype = np.int32 if self.dtype.itemsize == 1 else np.int64
        drawn = self.rng.integers(-50, 50, count).astype(dtype)
        return Tensor(drawn, self.scale * np.asarray(weights.scale), held=True)

    def indices(self, end: int, *shape: int) -> Tensor:
        return Tensor(self.rng.integers(0, end, shape).astype(np.int32))

    def truths(self, *shape: int) -> Tensor:
        return Tensor(self.rng.random(shape) > 0.5)


def held(*values: Any, dtype: Any = np.int32) -> Tensor:
    """A constant vector, or matrix of rows."""
    return Tensor(np.array(values, dtype), held=True)


def held_scalar(value: float, dtype: Any = np.int32) -> Tensor:
    return Tensor(np.array(value, dtype), held=True)


def result(dtype: str) -> Tensor:
    """A result without scales."""
    return Tensor(np.zeros(0, object if dtype == "string" else dtype))


Builder = Callable[..., SingleOperator | BuiltModel]


@dataclass(frozen=True)
class OperatorCase:
    """The model of an operator, in one type and size. ``form`` tells the cases of an operator from
    one another."""

    operator: str
    type: str
    form: str
    size: str
    dims: Dims
    build: Builder

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.operator, self.form)))

    def model(self) -> BuiltModel:
        given = self.build(Family(self.type), self.operator, *self.dims)
        return given if isinstance(given, BuiltModel) else given.built()


CASES: list[OperatorCase] = []
"""All that are registered."""


def operator_cases(
    types: Mapping[str, str], small: Dims, large: Dims, form: str = ""
) -> Callable[[Builder], Builder]:
    """A decorator that registers a builder for each of these operators and their ``types``, which
    are separated by blanks."""

    def register(build: Builder) -> Builder:
        CASES.extend(
            OperatorCase(operator, type_, form, size, dims, build)
            for operator, listed in types.items()
            for type_ in listed.split()
            for size, dims in zip(SIZES, (small, large), strict=True)
        )
        return build

    return register


ACTIVATION = (1, 8, 16, 8), (1, 64, 64, 64)
"""The dims of small and large activations."""

# One input.


@operator_cases(
    {
        "ABS": "float32 int8 int16 int32",
        "CEIL": "float32",
        "COS": "float32",
        "FLOOR": "float32",
        "NEG": "float32 int8 int16 int32 int64",
        "RELU": "float32 int8 uint8 int16",
        "RELU6": "float32 int8 uint8 int16",
        "RELU_0_TO_1": "float32 int8 uint8",
        "RELU_N1_TO_1": "float32 int8 uint8",
        "ROUND": "float32",
        "SIGN": "float32 int32",
        "SIN": "float32",
        "ELU": "float32 int8",
        "GELU": "float32 int8 uint8 int16",
        "HARD_SWISH": "float32 int8 uint8",
        "SQUARE": "float32",
        "ZEROS_LIKE": "float32 int32 int64",
        "LOGICAL_NOT": "bool",
    },
    *ACTIVATION,
)
def unary(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.y()])


@operator_cases({"EXP": "float32 int8 int16"}, *ACTIVATION)
def exponential(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims, times=0.3)], [t.y(2)])


@operator_cases(
    {"LOG": "float32 int8 int16", "SQRT": "float32 int8 int16", "RSQRT": "float32 int8 int16"},
    *ACTIVATION,
)
def of_positive_numbers(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims, positive=True)], [t.y()])


@operator_cases({"LEAKY_RELU": "float32 int8 uint8 int16"}, *ACTIVATION)
def leaky_relu(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.y()], {"alpha": 0.2})


@operator_cases({"LOGISTIC": "float32 int8 uint8 int16"}, *ACTIVATION)
def logistic(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.in_range(HALF)])


@operator_cases({"TANH": "float32 int8 uint8 int16"}, *ACTIVATION)
def tanh(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.in_range(ONE)])


@operator_cases({"PRELU": "float32 int8 uint8 int16x8 float16"}, *ACTIVATION)
def prelu(t: Family, name: str, *dims: int) -> SingleOperator:
    alpha = t.weights(1, 1, dims[-1])
    return SingleOperator(name, [t.x(*dims), alpha], [t.y()])


@operator_cases({"FAKE_QUANT": "float32"}, *ACTIVATION)
def fake_quant(t: Family, name: str, *dims: int) -> SingleOperator:
    options = {"min": -2.0, "max": 2.0, "num_bits": 8}
    return SingleOperator(name, [t.x(*dims)], [t.y()], options)


@operator_cases({"BUCKETIZE": "float32 int32 int64"}, *ACTIVATION)
def bucketize(t: Family, name: str, *dims: int) -> SingleOperator:
    options = {"boundaries": np.linspace(-2, 2, 12).tolist()}
    return SingleOperator(name, [t.x(*dims)], [result("int32")], options)


@operator_cases(dict.fromkeys(("REAL", "IMAG", "COMPLEX_ABS"), "complex64"), *ACTIVATION)
def part_of_complex(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [result("float32")])


# Rows, along the last axis.

ROWS = (1, 12), (128, 1000)


@operator_cases({"SOFTMAX": "float32 int8 uint8 int16"}, *ROWS)
def softmax(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.in_range(HALF)], {"beta": 1.0})


@operator_cases({"LOG_SOFTMAX": "float32 int8 uint8"}, *ROWS)
def log_softmax(t: Family, name: str, *dims: int) -> SingleOperator:
    ranges = {"int8": (16 / 256, 127), "uint8": (16 / 256, 255)}
    return SingleOperator(name, [t.x(*dims)], [t.in_range(ranges)])


@operator_cases({"L2_NORMALIZATION": "float32 int8 uint8"}, *ROWS)
def l2_normalization(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.in_range(ONE)], table="L2NormOptions")


# Types.


@operator_cases({"CAST": "float32 int8 uint8 int16 int32 int64 bool complex64"}, *ACTIVATION)
def cast(t: Family, name: str, *dims: int) -> SingleOperator:
    x = replace(t.x(*dims), scale=None)
    return SingleOperator(name, [x], [result("int32" if t.type == "float32" else "float32")])


@operator_cases({"BITCAST": "float32 int32 int64"}, *ACTIVATION)
def bitcast(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(
        name, [t.x(*dims)], [result("int32" if t.type == "float32" else "float32")]
    )


@operator_cases({"DEQUANTIZE": "int8 uint8 int16"}, *ACTIVATION)
def dequantize(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [result("float32")])


@operator_cases({"DEQUANTIZE": "float16"}, *ACTIVATION)
def widen(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [Tensor(t.array(*dims).astype(np.float16))], [result("float32")])


@operator_cases({"QUANTIZE": "int8 uint8 int16"}, *ACTIVATION, form="of float32")
def quantize(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [Family("float32").x(*dims)], [t.y()])


@operator_cases({"QUANTIZE": "int8 uint8 int16"}, *ACTIVATION, form="of codes")
def requantize(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.y(1.3)])


# Two inputs and more.

NUMBERS = "float32 int8 uint8 int16 int32 int64"

PAIRS = {"ADD": NUMBERS, "SUB": NUMBERS, "MUL": f"{NUMBERS} complex64"}


def _pair(t: Family, name: str, x: Tensor, y: Tensor) -> SingleOperator:
    options = {"pot_scale_int16": False} if name in ("ADD", "SUB") and t.type == "int16" else {}
    wider = {"MUL": 4.0, "ADD": 1.6, "SUB": 1.6}
    return SingleOperator(name, [x, y], [t.y(wider[name])], options)


@operator_cases(PAIRS, *ACTIVATION)
def arithmetic(t: Family, name: str, *dims: int) -> SingleOperator:
    return _pair(t, name, t.x(*dims), t.x(*dims, times=0.7))


@operator_cases(PAIRS, *ACTIVATION, form="of a vector")
def arithmetic_of_vector(t: Family, name: str, *dims: int) -> SingleOperator:
    return _pair(t, name, t.x(*dims), t.x(dims[-1], times=0.7, held=True))


@operator_cases(
    {
        "DIV": "float32 int32",
        "FLOOR_DIV": "float32 int8 int16 int32",
        "FLOOR_MOD": "float32 int8 int16 int32 int64",
        "POW": "float32 int32",
        "ATAN2": "float32",
    },
    *ACTIVATION,
)
def with_positive_numbers(t: Family, name: str, *dims: int) -> SingleOperator:
    plain = Family(t.type)
    plain.scale, plain.zero = None, 0  # of integers as they are
    x, y = plain.x(*dims, positive=name == "POW"), plain.x(*dims, positive=True)
    if name == "POW":  # so that no power overflows
        x, y = (replace(each, array=each.array % each.array.dtype.type(6)) for each in (x, y))
    return SingleOperator(name, [x, y], [plain.y()])


@operator_cases(
    {
        "MAXIMUM": NUMBERS,
        "MINIMUM": NUMBERS,
        "STABLEHLO_ADD": "float32 int32 int64",
        "STABLEHLO_MAXIMUM": "float32 int32 int64",
        "STABLEHLO_MINIMUM": "float32 int32 int64",
        "STABLEHLO_MULTIPLY": "float32 int32 int64",
        "STABLEHLO_AND": "int32 bool",
        "LOGICAL_AND": "bool",
        "LOGICAL_OR": "bool",
    },
    *ACTIVATION,
)
def binary(t: Family, name: str, *dims: int) -> SingleOperator:
    table = "MaximumMinimumOptions" if name in ("MAXIMUM", "MINIMUM") else ""
    return SingleOperator(name, [t.x(*dims), t.x(*dims)], [t.y()], table=table)


@operator_cases(
    {"BITWISE_XOR": "int8 uint8 int16 int32", "RIGHT_SHIFT": "int8 uint8 int16 int32"}
    | {"STABLEHLO_SHIFT_LEFT": "int8 int16 int32"},
    *ACTIVATION,
)
def of_bits(t: Family, name: str, *dims: int) -> SingleOperator:
    x, y = (Tensor(t.rng.integers(0, n, dims).astype(t.dtype)) for n in (120, 5))
    return SingleOperator(name, [x, y], [Tensor(np.zeros(0, t.dtype))])


@operator_cases({"DIV": "int8 uint8 int16"}, *ACTIVATION)
def divide_codes(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), t.x(*dims, positive=True)], [t.y()])


@operator_cases({"SQUARED_DIFFERENCE": "float32 int8 int32"}, *ACTIVATION)
def squared_difference(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims, times=0.3), t.x(*dims, times=0.3)], [t.y(3)])


@operator_cases(
    dict.fromkeys(("EQUAL", "NOT_EQUAL"), f"{NUMBERS} bool")
    | dict.fromkeys(
        ("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"), "float32 int8 uint8 int16 int32 int64"
    ),
    *ACTIVATION,
)
def comparison(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), t.x(*dims)], [result("bool")])


@operator_cases({"ADD_N": "float32 int32"}, *ACTIVATION)
def add_n(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims) for _ in range(3)], [t.y()])


@operator_cases(dict.fromkeys(("SELECT", "SELECT_V2"), f"{NUMBERS} bool"), *ACTIVATION)
def select(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.truths(*dims), t.x(*dims), t.x(*dims)], [t.y()])
