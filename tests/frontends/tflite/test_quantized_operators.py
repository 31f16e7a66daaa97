"""Quantized operators one by one: within one quantum of LiteRT's kernels without delegates.

Codes of the whole range are fed, with scales and zero points of their own for inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from penstock.frontends.tflite.flatbuffer import schema
from tests.support.litert import by_litert
from tests.support.tflite_models import TYPES, model, subgraph
from tests.support.timing import SOON

TABLES = {name.lower(): name for name in schema().tables.entries}
RNG = np.random.default_rng(5)
UNIT = {"int8": (0.05, -5), "uint8": (0.05, 120), "int16": (0.0003, 0)}
"""The scale and the zero point of an input."""
HALF = {"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)}
"""Those of a number from 0 to 1, as LiteRT's kernels demand."""
ONE = {"int8": (1 / 128, 0), "uint8": (1 / 128, 128), "int16": (1 / 32768, 0)}
"""Those of a number from -1 to 1."""
REAL = "float32", None, 0
POOL = {"padding": 1, "stride_w": 2, "stride_h": 1, "filter_width": 3, "filter_height": 2}


@dataclass(frozen=True, eq=False)
class Codes:
    """A quantized tensor, fed or constant; with scales for each index of ``axis`` or one for all."""

    array: np.ndarray
    scale: Any
    zero: Any = 0
    constant: bool = False
    axis: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        scale, zero = np.atleast_1d(self.scale), np.atleast_1d(self.zero)
        zeros = np.broadcast_to(zero, scale.shape)
        return {
            "quantization": {
                "scale": scale.tolist(),
                "zero_point": zeros.tolist(),
                "quantized_dimension": self.axis,
            }
        }


@dataclass(frozen=True, eq=False)
class Quantized:
    """An operator with an output of a dtype, a scale (or None) and a zero point; or with several.
    Arrays are fed, those in a list are constants."""

    name: str
    inputs: tuple[Any, ...]
    output: tuple[str, Any, int]
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = ""
    version: int = 2
    outputs: int = 1

    def __str__(self) -> str:
        dtypes = [x.array.dtype.name for x in self.inputs if isinstance(x, Codes)]
        options = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.name, *dtypes[:1], *options])

    def file(self) -> tuple[bytes, dict[str, np.ndarray]]:
        """The model of the operator, and what it is fed."""
        kind = self.kind or TABLES.get(f"{self.name.replace('_', '').lower()}options")
        names = [f"x{i}" for i in range(len(self.inputs))]
        fields: dict[str, Any] = {}
        fed: dict[str, np.ndarray] = {}
        constants = {}
        for name, x in zip(names, self.inputs, strict=True):
            if isinstance(x, Codes):
                fields[name] = x.fields
            if isinstance(x, list) or (isinstance(x, Codes) and x.constant):
                constants[name] = x[0] if isinstance(x, list) else x.array
            else:
                fed[name] = x.array if isinstance(x, Codes) else x
        dtype, scale, zero = self.output
        ys = [f"y{i}" for i in range(self.outputs)]
        quantized = {} if scale is None else Codes(np.zeros(0), scale, zero).fields
        fields |= {y: {"type": TYPES.index(dtype), **quantized} for y in ys}
        options = None if kind is None else (kind, self.options)
        graph = subgraph(
            {name: (x.dtype.name, x.shape) for name, x in fed.items()},
            [(self.name, names, ys, options)],
            ys,
            constants,
            **fields,
        )
        return model([graph], versions={self.name: self.version}), fed


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


class Family:
    """Tensors of one dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.scale, self.zero = UNIT[dtype]

    def codes(self, *shape: int, times: float = 1.0, zero: int | None = None) -> Codes:
        ends = np.iinfo(self.dtype)
        array = RNG.integers(ends.min, ends.max + 1, shape).astype(self.dtype)
        return Codes(array, self.scale * times, self.zero if zero is None else zero)

    def drawn(self, *shape: int) -> Codes:
        """Codes that others do not depend on: LiteRT takes some for equal that are adjacent."""
        ends = np.iinfo(self.dtype)
        array = np.random.default_rng(11).integers(ends.min, ends.max + 1, shape)
        return Codes(array.astype(self.dtype), self.scale, self.zero)

    def result(self, times: float = 1.0, more: int = 0) -> tuple[str, float, int]:
        """The type of an output, whose zero point is ``more`` than that of inputs but for int16."""
        return self.dtype, self.scale * times, self.zero + (more if self.zero else 0)

    def weights(self, *shape: int, axis: int | None = None) -> Codes:
        """Constants, with a scale for each index of ``axis``."""
        if self.dtype == "uint8":
            return Codes(RNG.integers(0, 256, shape).astype(np.uint8), 0.02, 130, constant=True)
        array = RNG.integers(-127, 128, shape).astype(np.int8)
        scale: Any = 0.02
        if axis is not None:
            scale = 0.02 * (1 + np.arange(shape[axis]) / 7)
        return Codes(array, scale, constant=True, axis=axis or 0)

    def bias(self, weights: Codes, count: int) -> Codes:
        dtype = np.int64 if self.dtype == "int16" else np.int32
        array = RNG.integers(-3000, 3000, count).astype(dtype)
        return Codes(array, self.scale * np.asarray(weights.scale), constant=True)


def elementwise(t: Family) -> Iterator[Quantized]:
    x, y, small = t.codes, t.result, RNG.random((2, 30)) > 0.5
    no_power = {"pot_scale_int16": False}
    for op in ("ADD", "SUB"):
        yield Quantized(op, (x(2, 3, 4), x(2, 3, 4, times=0.7)), y(1.6, 9), no_power)
        activated = {"fused_activation_function": 1, **no_power}
        yield Quantized(op, (x(2, 3, 4), x(4, times=0.7)), y(1.6), activated)
    yield Quantized("MUL", (x(2, 30), x(2, 30, times=0.7)), y(4, -7))
    yield Quantized("MUL", (x(2, 30), x(30, times=0.7)), y(4), {"fused_activation_function": 3})
    for op in ("RELU", "RELU6", "LEAKY_RELU"):
        options = {"alpha": 0.2} if op == "LEAKY_RELU" else {}
        yield Quantized(op, (x(300),), y(1.1, 3), options)
    for op in ("EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"):
        yield Quantized(op, (x(200), x(200)), ("bool", None, 0))
    for op in ("MAXIMUM", "MINIMUM"):
        yield Quantized(op, (x(2, 30), x(30)), y(), kind="MaximumMinimumOptions")
    yield Quantized("LOGISTIC", (x(300),), (t.dtype, *HALF[t.dtype]))
    yield Quantized("SELECT_V2", (small, x(2, 30), x(2, 30)), y(), version=1)
    yield Quantized("CAST", (x(30),), REAL, version=1)
    yield Quantized("QUANTIZE", (x(300),), y(1.3, 2))
    if t.dtype == "int16":
        yield Quantized("QUANTIZE", (x(300),), ("int32", 0.001, 0))
    yield Quantized("QUANTIZE", (RNG.normal(0, 3, 300).astype(np.float32),), y(), version=1)
    yield Quantized("DEQUANTIZE", (x(300),), REAL)
    if t.dtype == "int16":
        every = np.arange(-32768, 32768).astype(np.int16)
        for op, step in (("EXP", 0.001), ("LOG", 0.0003), ("GELU", 0.0007)):
            yield Quantized(op, (Codes(every, t.scale),), (t.dtype, step, 0))
        for op in ("ABS", "NEG", "RELU", "RELU6"):
            yield Quantized(op, (Codes(every, t.scale),), y(), version=2 if op != "NEG" else 1)
        yield Quantized("RSQRT", (Codes(every[every > 0], t.scale),), (t.dtype, 0.01, 0))
        return
    # Twice the step: every second code is a tie.
    every = Codes(np.arange(256).astype(np.uint8).view(t.dtype), t.scale, t.zero)
    for op in ("RELU", "RELU6", "RELU_N1_TO_1", "RELU_0_TO_1"):
        yield Quantized(op, (every,), y(2, 3), version=1 if "_1" in op else 2)
    for dtype, zero in (("int8", 7), ("uint8", 131)):
        yield Quantized("QUANTIZE", (every,), (dtype, 2 * t.scale, zero))
        yield Quantized("QUANTIZE", (every,), (dtype, t.scale, zero))
    yield Quantized("TANH", (x(300),), (t.dtype, *ONE[t.dtype]))
    yield Quantized("HARD_SWISH", (x(300),), y(0.9), version=1)
    alpha = Codes(t.codes(1, 1, 8).array, 0.01, 3, constant=True)
    yield Quantized("PRELU", (x(2, 5, 6, 8), alpha), y(1.1), version=1)
    for op in ("RELU_N1_TO_1", "RELU_0_TO_1"):
        yield Quantized(op, (x(300),), y(), version=1)
    if t.dtype == "int8":
        for op in ("ABS", "ELU", "EXP", "GELU"):
            yield Quantized(op, (x(300),), y(), version=1)
        for op in ("LOG", "RSQRT", "SQRT"):
            yield Quantized(op, (x(300, zero=-128),), y(), version=1)
        yield Quantized("SQUARED_DIFFERENCE", (x(2, 30, times=0.3), x(30, times=0.3)), y(3))


def moved(t: Family) -> Iterator[Quantized]:
    x, y = t.codes, t.result()
    yield Quantized("PAD", (x(2, 3, 4, 2), [i32([0, 0], [1, 2], [0, 1], [0, 0])]), y)
    filler = Codes(np.full(1, t.zero + 1, t.dtype), t.scale, t.zero, constant=True)
    yield Quantized("PADV2", (x(2, 3, 4, 2), [i32([0, 0], [1, 2], [0, 1], [0, 0])], filler), y)
    yield Quantized("MIRROR_PAD", (x(4, 5), [i32([1, 2], [0, 3])]), y, {"mode": 1})
    yield Quantized("TRANSPOSE", (x(3, 4, 5), [i32(2, 0, 1)]), y)
    yield Quantized("STRIDED_SLICE", (x(5, 6), [i32(1, 0)], [i32(5, 6)], [i32(2, 3)]), y)
    yield Quantized("SLICE", (x(5, 6), [i32(1, 2)], [i32(3, 4)]), y)
    yield Quantized("PACK", (x(5, 6), x(5, 6)), y, {"values_count": 2, "axis": 1})
    yield Quantized("GATHER", (x(5, 6), i32(3, 1)), y, {"axis": 0})
    if t.dtype != "int16":
        table = Codes(x(5, 6).array, t.scale, t.zero, constant=True)
        yield Quantized("EMBEDDING_LOOKUP", (i32(3, 1, 0), table), y)
    yield Quantized("REVERSE_V2", (x(3, 4, 5), [i32(1)]), y)
    yield Quantized("TILE", (x(3, 4), [i32(2, 1)]), y)
    yield Quantized("EXPAND_DIMS", (x(3, 4), [i32(1)]), y, version=1)
    yield Quantized("CONCATENATION", (x(2, 3), x(2, 4)), y, {"axis": 1})
    yield Quantized("SPLIT", ([np.array(1, np.int32)], x(3, 4)), y, {"num_splits": 2}, outputs=2)
    yield Quantized("UNPACK", (x(2, 4),), y, {"num": 2, "axis": 0}, outputs=2)
    yield Quantized("BATCH_TO_SPACE_ND", (x(4, 2, 3, 2), [i32(2, 2)], [i32([0, 0], [0, 1])]), y)
    yield Quantized("SPACE_TO_BATCH_ND", (x(1, 4, 6, 2), [i32(2, 2)], [i32([0, 0], [2, 0])]), y)
    if t.dtype != "int16":
        places, size = [i32([1], [3], [1])], [i32(5, 2)]
        yield Quantized("SCATTER_ND", (places, x(3, 2), size), y, version=1)
        ends = [Codes(x().array, t.scale * n, n, constant=True) for n in (3, 1)]
        given = i32(2, 0, 5), [np.array(4, np.int32)], *ends
        yield Quantized("ONE_HOT", given, y, {"axis": -1}, version=1)
    half = {"half_pixel_centers": True}
    yield Quantized("RESIZE_NEAREST_NEIGHBOR", (x(1, 5, 6, 3), [i32(8, 9)]), y, half, version=3)
    if t.dtype != "int16":
        yield Quantized("RESIZE_BILINEAR", (x(1, 5, 6, 3), [i32(8, 9)]), y, half, version=3)
        yield Quantized("RESIZE_BILINEAR", (x(1, 5, 6, 3), [i32(10, 12)]), y, version=3)
        yield Quantized("ARG_MAX", (x(5, 6), [i32(1)]), ("int32", None, 0), {"output_type": 2})
        yield Quantized("SPACE_TO_DEPTH", (x(1, 4, 6, 2),), y, {"block_size": 2})
        yield Quantized("DEPTH_TO_SPACE", (x(1, 4, 6, 8),), y, {"block_size": 2})
    if t.dtype == "uint8":
        pieces = x(2, 3), x(2, 4, times=0.7), x(2, 1, times=0.5)
        yield Quantized("CONCATENATION", pieces, y, {"axis": 1})


def reduced(t: Family) -> Iterator[Quantized]:
    x, y = t.codes, t.result
    for op in ("AVERAGE_POOL_2D", "MAX_POOL_2D"):
        for act in (0, 1, 3):
            options = {**POOL, "padding": act % 2, "fused_activation_function": act}
            yield Quantized(op, (x(2, 9, 8, 5),), y(), options, "Pool2DOptions")
    for axes in ((1, 2), (0,), (3,), (0, 1, 2, 3)):
        for keep in (True, False):
            for op in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN"):
                result = {"MEAN": y(0.8, 3), "SUM": y(8, 3)}.get(op, y())
                given = x(2, 9, 8, 5), [i32(*axes)]
                yield Quantized(op, given, result, {"keep_dims": keep}, "ReducerOptions")
    if t.dtype != "uint8":
        for axes, scale in (((1, 2), 1), ((0,), 30), ((-1,), 0.01), ((0, 2), 1e-6)):
            keep = {"keep_dims": len(axes) > 1}
            given = t.drawn(2, 9, 8, 5), [i32(*axes)]
            yield Quantized("REDUCE_PROD", given, y(scale, 4), keep, "ReducerOptions")
    yield Quantized("MEAN", (x(2, 9, 8, 5), [i32(1, 2)]), y(), {}, "ReducerOptions")
    for beta, dims in ((1.0, (4, 10)), (0.3, (2, 3, 1)), (2.5, (5, 700))):
        yield Quantized("SOFTMAX", (t.drawn(*dims),), (t.dtype, *HALF[t.dtype]), {"beta": beta})
    if t.dtype == "int16":
        return
    for beta in (1.0, 0.3):
        yield Quantized("SOFTMAX", (x(4, 10),), (t.dtype, *HALF[t.dtype]), {"beta": beta})
    largest = t.dtype, 16 / 256, np.iinfo(t.dtype).max
    yield Quantized("LOG_SOFTMAX", (x(4, 10),), largest)
    yield Quantized("L2_NORMALIZATION", (x(4, 10),), (t.dtype, *ONE[t.dtype]), kind="L2NormOptions")


def products(t: Family) -> Iterator[Quantized]:
    x, y, w, of = t.codes, t.result(SOON), t.weights, t.bias
    axes = (None,) if t.dtype == "uint8" else (None, 0)
    for act in (0, 1, 3):
        activation = {"fused_activation_function": act}
        for axis in axes:
            matrix = w(5, 30, axis=axis)
            full = x(3, 30), matrix, of(matrix, 5)
            yield Quantized("FULLY_CONNECTED", full, y, activation, version=12 if axis == 0 else 7)
            kernel = w(6, 3, 3, 4, axis=axis)
            conv = x(1, 9, 8, 4), kernel, of(kernel, 6)
            wide = {"padding": act % 2, "stride_w": 2, "stride_h": 1, **activation}
            far = {"dilation_w_factor": 2, "dilation_h_factor": 2, "stride_w": 1, "stride_h": 1}
            yield Quantized("CONV_2D", conv, y, wide, version=4)
            yield Quantized("CONV_2D", conv, y, {**far, **activation}, version=4)
            kernel = w(1, 3, 3, 8, axis=None if axis is None else 3)
            depth = x(1, 9, 8, 4), kernel, of(kernel, 8)
            options = {"depth_multiplier": 2, **wide, "stride_h": 2}
            yield Quantized("DEPTHWISE_CONV_2D", depth, y, options, version=5)
    kernel = w(3, 3, 3, 4, axis=axes[-1])
    back = [i32(1, 8, 10, 3)], kernel, x(1, 4, 5, 4), of(kernel, 3)
    strides = {"padding": 0, "stride_w": 2, "stride_h": 2}
    yield Quantized("TRANSPOSE_CONV", back, y, strides, version=4)
    if t.dtype != "uint8":
        yield Quantized("BATCH_MATMUL", (x(2, 3, 8, times=0.2), x(2, 8, 5, times=0.2)), t.result())
        turned = {"adjoint_rhs": True}
        given = x(2, 3, 8, times=0.2), x(2, 5, 8, times=0.2)
        yield Quantized("BATCH_MATMUL", given, t.result(), turned)


def wide_transposes(t: Family) -> Iterator[Quantized]:
    """With enough channels to be convolutions of codes."""
    rng, ends = np.random.default_rng(3), np.iinfo(t.dtype)
    for size, step, padding, act in ((1, 2, 0, 0), (3, 2, 0, 1), (3, 3, 1, 0), (4, 1, 1, 3)):
        dtype, zero = ("uint8", 130) if t.dtype == "uint8" else ("int8", 0)
        array = rng.integers(-127 + zero, 126 + zero, (9, size, 3, 8)).astype(dtype)
        scales = 0.02 if zero else 0.02 * (1 + np.arange(9) / 7)
        kernel = Codes(array, scales, zero, constant=True)
        dims = [4 * step, 5 * step] if padding == 0 else [3 * step + size, 4 * step + 3]
        image = rng.integers(ends.min, ends.max + 1, (2, 4, 5, 8)).astype(t.dtype)
        terms = rng.integers(-3000, 3000, 9).astype("int64" if t.dtype == "int16" else "int32")
        bias = Codes(terms, t.scale * np.asarray(scales), constant=True)
        back = [i32(2, *dims, 9)], kernel, Codes(image, t.scale, t.zero), bias
        options = {"padding": padding, "stride_w": step, "stride_h": step}
        options["fused_activation_function"] = act
        yield Quantized("TRANSPOSE_CONV", back[: 3 + act % 2], t.result(SOON), options, version=4)


def operators() -> Sequence[Quantized]:
    families = [Family(dtype) for dtype in UNIT]
    themes = elementwise, moved, reduced, products
    own = [op for family in families for theme in themes for op in theme(family)]
    return own + [op for family in families for op in wide_transposes(family)]


@pytest.mark.parametrize("op", operators(), ids=str)
def test_quantized_operator_is_within_a_quantum_of_litert(op: Quantized) -> None:
    file, fed = op.file()
    wanted = by_litert(file, fed)
    for backends in (["numpy"], None):
        got = ps.compile(file, backends=backends).run(fed)
        for value, want in zip(got.values(), wanted, strict=True):
            assert (value.dtype, value.shape) == (want.dtype, want.shape)
            quantum = 1 if want.dtype.kind in "iu" else 1e-5
            np.testing.assert_allclose(value.astype(float), want.astype(float), 0, quantum)


WITHIN_ONE = "CONCATENATION L2_NORMALIZATION SUM"
"""Operators that are computed in real numbers, where the reference kernels round integers."""


WITHOUT_REFERENCE = ("DEPTH_TO_SPACE", "ELU")


OF_16_BITS = "ABS EXP GELU LOG LOGISTIC NEG REDUCE_PROD RSQRT SOFTMAX TANH"


def of_the_reference() -> Sequence[Quantized]:
    """Operators of 8 bits, and some of 16, that give the codes of the reference kernels."""
    others = {*WITHIN_ONE.split(), *WITHOUT_REFERENCE}

    def is_short(op: Quantized) -> bool:
        given = [x.dtype.name for x in op.file()[1].values()]
        return "int16" not in (*given, op.output[0])

    given = [x for x in operators() if x.name not in others]
    return [op for op in given if op.name in OF_16_BITS.split() or is_short(op)]


@pytest.mark.parametrize("op", of_the_reference(), ids=str)
def test_operator_gives_the_codes_of_the_reference_kernels(op: Quantized) -> None:
    file, fed = op.file()
    wanted = by_litert(file, fed, resolver="BUILTIN_REF")
    for backends in (["numpy"], None):
        got = ps.compile(file, backends=backends).run(fed)
        for value, want in zip(got.values(), wanted, strict=True):
            quantum = 0 if want.dtype.kind in "iub" else 1e-5
            np.testing.assert_allclose(value, want, 0, quantum)


def any_scales() -> Iterator[Quantized]:
    """Operators of int8 with scales and zero points of all sizes."""
    rng = np.random.default_rng(7)
    for _ in range(12):
        scale, step = (float(np.float32(10 ** rng.uniform(-3, 1))) for _ in range(2))
        zero, result = (int(n) for n in rng.integers(-128, 100, 2))
        every = np.arange(zero, 128).astype(np.int8)
        yield Quantized("RSQRT", (Codes(every, scale, zero),), ("int8", step, result), version=1)
        other = float(np.float32(scale * 10 ** rng.uniform(-1, 1)))
        a, b = rng.integers(-128, 128, (40, 30), np.int8), rng.integers(-128, 128, 30, np.int8)
        given = Codes(a, scale, zero), Codes(b, other, result)
        squares = float(np.float32((scale * 100) ** 2 * 10 ** rng.uniform(-4, -1)))
        yield Quantized("SQUARED_DIFFERENCE", given, ("int8", squares, zero), version=1)
        a, b = (
            rng.integers(-128, 128, (3, 2, 9), np.int8),
            rng.integers(-128, 128, (3, 7, 9), np.int8),
        )
        given = Codes(a, scale, zero), Codes(b, other, result)
        products = "int8", float(np.float32(scale * other * 60)), zero
        yield Quantized(
            "BATCH_MATMUL", given, products, {"adjoint_rhs": True, "adjoint_lhs": False}
        )
        given = Codes(a.swapaxes(1, 2).copy(), scale, zero), given[1]
        yield Quantized("BATCH_MATMUL", given, products, {"adjoint_rhs": True, "adjoint_lhs": True})


@pytest.mark.parametrize("op", list(any_scales()), ids=str)
def test_operator_with_any_scales_gives_the_codes_of_the_reference_kernels(op: Quantized) -> None:
    file, fed = op.file()
    (wanted,) = by_litert(file, fed, resolver="BUILTIN_REF")
    for backends in (["numpy"], None):
        (got,) = ps.compile(file, backends=backends).run(fed).values()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("scale", [2**-12, 2**-11, 2**-13, 0.00002, 0.01])
@pytest.mark.parametrize("name", ["LOGISTIC", "TANH"])
def test_function_of_all_16_bit_codes_gives_those_of_the_reference_kernels(name, scale):
    # Those of LiteRT's default kernels differ by up to 12 where the scale is a power of 2.
    every = Codes(np.arange(-32768, 32768).astype(np.int16), scale)
    file, fed = Quantized(name, (every,), ("int16", *ONE["int16"])).file()
    (wanted,) = by_litert(file, fed, resolver="BUILTIN_REF")
    np.testing.assert_array_equal(ps.compile(file)(every.array), wanted)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "float16"])
@pytest.mark.parametrize(
    ("tolerance", "fails"), [(1e4, True), (0.2, False), (0.2, True), (0.05, True)]
)
def test_numeric_verify_gives_differences_and_fails_as_litert_does(dtype, tolerance, fails):
    codes = np.arange(0, 100, 7).astype(dtype)
    reference = RNG.normal(size=codes.shape).astype(np.float32)
    fields = {} if dtype == "float16" else Codes(codes, *UNIT[dtype]).fields
    options = bytes(flexbuffers.Dumps({"tolerance": tolerance, "log_if_failed": fails}))
    inputs = {"q": (dtype, codes.shape), "reference": ("float32", codes.shape)}
    shape = {"shape": list(codes.shape)}
    verify = ("CUSTOM:NumericVerify", ["q", "reference"], ["y"], options)
    file = model([subgraph(inputs, [verify], ["y"], q=fields, y=shape)])
    feeds = {"q": codes, "reference": reference}
    session = ps.compile(file)
    try:
        (wanted,) = by_litert(file, feeds)
    except RuntimeError:
        with pytest.raises(ps.RunError, match="above"):
            session.run(feeds)
        assert fails and tolerance >= 0.1
    else:
        np.testing.assert_allclose(session(codes, reference), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", [op for op in operators() if op.name[:6] == "RESIZE"], ids=str)
def test_resize_of_codes_is_one_step(op: Quantized) -> None:
    file, fed = op.file()
    profile = ps.Profile()
    ps.compile(file).run(fed, trace=profile)
    assert len(profile.entries) == 1
