"""Element types: casts, and constants made from attributes.

Casts follow NumPy wherever the specification agrees with it: integers wrap around, values out of a
float type's range become infinite, and float values out of an integer type's range are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from penstock.core.types import (
    BOOL,
    FLOAT32,
    INT64,
    STRING,
    Dim,
    ShapeError,
    TensorType,
    Type,
    constant_type,
    dtype_name,
    dtype_named,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import FLOAT8, FLOAT64, POWERS, SUB_BYTE
from penstock.ops.common.shape_rules import choice, dtype_attribute, tensor, with_data
from penstock.ops.onnx.shape import view_kernel
from penstock.ops.registry import operator

Convert = Callable[[np.ndarray], np.ndarray]


_WIDE_ENOUGH = {np.dtype(t) for t in (np.int32, np.int64, np.uint32, np.uint64)}


def _target(types: Types, attrs: Attrs) -> np.dtype | None:
    """The dtype to cast to; that of the second input of CastLike, if known."""
    if len(types) > 1:
        return tensor(types, 1).dtype
    dtype = dtype_attribute(attrs, "to")
    if dtype is None:
        raise ShapeError("Cast has no attribute to, which must be an element type")
    return dtype


def _infer_cast(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, dtype = tensor(types, 0), _target(types, attrs)
    if "round_mode" in attrs:
        _round_mode(attrs)
    if x.data is None:
        return (TensorType(dtype, x.shape),)

    def contents() -> tuple[Dim, ...] | None:
        if x.data is None or dtype is None:
            return None
        if dtype == BOOL:
            return tuple([int(d != 0) if isinstance(d, int) else None for d in x.data])
        # The known contents are integers: a cast to a narrower type may wrap, one to floats changes
        # them.
        if dtype not in _WIDE_ENOUGH:
            return None
        info = np.iinfo(dtype)
        # A symbolic dim is assumed to be in range.
        fits = all(info.min <= d <= info.max for d in x.data if isinstance(d, int))
        return x.data if fits else None

    return (with_data(TensorType(dtype, x.shape), contents),)


def _round_mode(attrs: Attrs) -> str:
    return choice(attrs, "round_mode", "up", ("up", "down", "nearest"))


@operator("Cast", infer=_infer_cast, elementwise=True, moves=True, strings=True)
@operator("CastLike", since=15, infer=_infer_cast, strings=True, traits={"exact"})
def cast(node: Node, types: Types) -> Kernel:
    attrs, source, dtype = node.attrs, tensor(types, 0).dtype, _target(types, node.attrs)
    saturate, mode = bool(attrs.get("saturate", 1)), _round_mode(attrs)
    if source is None or dtype is None:

        def run(x: np.ndarray, *like: np.ndarray) -> np.ndarray:
            target = like[0].dtype if dtype is None else dtype
            if x.dtype == target:
                return x.copy()
            return _conversion(x.dtype, target, saturate, mode)(x)

        return Kernel(run)
    if source == dtype:
        return view_kernel(lambda x, *_: x)
    convert = _conversion(source, dtype, saturate, mode)
    if not _direct(source, dtype) or (dtype.itemsize == 1 and dtype.name in {POWERS, *FLOAT8}):
        return returning(lambda x, *_: convert(x))

    def into(x: np.ndarray, *rest: Any) -> None:
        rest[-1][...] = x

    return Kernel(lambda x, *_: x.astype(dtype), into)


@cache
def _direct(source: np.dtype, dtype: np.dtype) -> bool:
    """Whether NumPy casts ``source`` to ``dtype`` itself, as it does for few of the small types."""
    if STRING in (source, dtype):
        return False
    try:
        np.empty(0, source).astype(dtype)
    except TypeError:
        return False
    return True


@cache
def _conversion(source: np.dtype, dtype: np.dtype, saturate: bool, mode: str) -> Convert:
    """The function that casts arrays of ``source`` to ``dtype``."""
    if source == dtype:
        return lambda x: x
    if dtype == STRING:
        return _to_strings
    if source == STRING:
        return lambda x: _from_strings(x, dtype, saturate, mode)
    if dtype.name == POWERS:
        return lambda x: _to_powers_of_two(x, saturate, mode)
    if dtype.name in FLOAT8:
        largest = FLOAT8[dtype.name]

        def to_small_float(x: np.ndarray) -> np.ndarray:
            wide = x if source.kind == "f" else x.astype(np.float32)
            return (wide.clip(-largest, largest) if saturate else wide).astype(dtype)

        return to_small_float
    if _direct(source, dtype):
        return lambda x: x.astype(dtype)
    # Small types without a direct cast go through float32, which represents all of their values.
    return lambda x: x.astype(np.float32).astype(dtype)


def _to_powers_of_two(x: np.ndarray, saturate: bool, mode: str) -> np.ndarray:
    """Cast to float8_e8m0: byte e stands for 2 ** (e - 127), and 255 for NaN. The sign is ignored.
    Values out of range become the nearest power if ``saturate``, else NaN."""
    wide = np.abs(x if x.dtype == FLOAT64 else x.astype(np.float32))
    fraction, exponent = np.frexp(wide)  # fraction in [0.5, 1)
    # The bias is 127, and the exponent of frexp is one more than for a fraction in [1, 2).
    power = exponent.astype(np.int32) + 126
    if mode != "down":
        power += fraction > 0.5 if mode == "up" else fraction >= 0.75
    # 0 has no code: it is out of range, below the lowest power.
    power[wide == 0] = -1
    if saturate:
        power[np.isinf(wide)] = 254
        encoded = np.where(np.isnan(wide), 255, power.clip(0, 254))
    else:
        encoded = np.where(np.isfinite(wide) & (power >= 0) & (power <= 254), power, 255)
    return encoded.astype(np.uint8).view(dtype_named(POWERS))


def _to_strings(x: np.ndarray) -> np.ndarray:
    """Format numbers with the fewest digits that parse back to the same number."""
    if x.dtype == BOOL:
        return x.astype(np.uint8).astype(str).astype(object)
    if "int" in x.dtype.name:
        return x.astype(np.int8 if x.dtype.name in SUB_BYTE else x.dtype).astype(str).astype(object)
    # Types that NumPy cannot print are formatted as float32.
    wide = x if x.dtype.kind == "f" else x.astype(np.float32)
    text = wide.astype(str).astype(object)
    # ONNX and NumPy spell NaN and the infinities differently.
    text[np.isnan(wide)] = "NaN"
    text[wide == np.inf] = "INF"
    text[wide == -np.inf] = "-INF"
    return text


def _check_bit_cast(source: np.dtype | None, attrs: Attrs) -> np.dtype:
    """Return the output dtype of BitCast for elements of ``source``, after checking its width."""
    dtype = dtype_attribute(attrs, "to")
    if dtype is None or dtype == STRING:
        raise ShapeError("the attribute to of BitCast must be an element type other than string")
    if source is not None and _bits(source) != _bits(dtype):
        raise ShapeError(f"BitCast to {dtype_name(dtype)} must not change the bits per element")
    return dtype


def _from_strings(x: np.ndarray, dtype: np.dtype, saturate: bool, mode: str) -> np.ndarray:
    if dtype.kind in "iu":
        # The text may be "2.5" or out of range. Try integers first: float64 does not represent all
        # int64.
        with suppress(ValueError, OverflowError):
            return x.astype(np.uint64 if dtype == np.uint64 else np.int64).astype(dtype)
    numbers = x.astype(np.float64)
    convert: Convert = _conversion(numbers.dtype, dtype, saturate, mode)
    return convert(numbers)


def _infer_bit_cast(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    return (TensorType(_check_bit_cast(x.dtype, attrs), x.shape),)


def _bits(dtype: np.dtype) -> int:
    return 0 if dtype == STRING else SUB_BYTE.get(dtype.name, 8 * dtype.itemsize)


@operator("BitCast", since=26, infer=_infer_bit_cast)
def bit_cast(node: Node, types: Types) -> Kernel:
    source = tensor(types, 0).dtype
    dtype = _check_bit_cast(source, node.attrs)
    if source is not None:
        return view_kernel(lambda x: x.view(dtype))
    return view_kernel(lambda x: x.view(_check_bit_cast(x.dtype, node.attrs)))


# The dtypes of the attributes that hold plain numbers or strings.
_VALUES: dict[str, np.dtype] = {"value_float": FLOAT32, "value_int": INT64, "value_string": STRING}
_VALUES |= {f"{name}s": dtype for name, dtype in _VALUES.items()}


def _constant_value(attrs: Attrs) -> np.ndarray:
    """The tensor that the attributes of a Constant give."""
    names = [name for name in ("value", "sparse_value", *_VALUES) if attrs.get(name) is not None]
    if len(names) != 1:
        raise ShapeError(
            f"a Constant needs exactly one value attribute, but has {', '.join(names) or 'none'}"
        )
    value = attrs[names[0]]
    if names[0] in _VALUES:
        return np.array(value, _VALUES[names[0]])
    if not isinstance(value, np.ndarray):
        raise ShapeError(f"attribute {names[0]} of a Constant must be a tensor")
    return value


@operator("Constant", infer=lambda t, attrs, c: (constant_type(_constant_value(attrs)),))
def constant(node: Node, types: Types) -> Kernel:
    value = _constant_value(node.attrs)

    def into(out: np.ndarray) -> None:
        out[...] = value

    return Kernel(value.copy, into)
