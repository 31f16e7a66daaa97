"""Properties of element types, and the types in which they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32

FLOAT64 = np.dtype(np.float64)
INT32 = np.dtype(np.int32)
UINT8 = np.dtype(np.uint8)
INT8 = np.dtype(np.int8)
INT16 = np.dtype(np.int16)

# The types of ml_dtypes go by their names: most models have none, and its import takes 5 ms.

FLOAT8: Mapping[str, float] = {
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}
"""The 8-bit floats of ONNX, with their largest finite values."""

POWERS = "float8_e8m0fnu"
"""Powers of two: no sign, no zero."""

SUB_BYTE: Mapping[str, int] = {
    "int2": 2,
    "uint2": 2,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1fn": 4,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
}
"""Types of less than a byte, with their bits; NumPy stores an element in a byte."""

BITS: Mapping[int, np.dtype] = {n: np.dtype(f"i{n}") for n in (1, 2, 4, 8)}
"""Integer types by their bytes, to copy elements regardless of their type."""


def dtype_info(dtype: np.dtype) -> Any:
    """The ``iinfo`` or ``finfo`` of a dtype: NumPy's, which has none of the types of ml_dtypes, or
    theirs."""
    about: Any = np.finfo if dtype.kind == "f" else np.iinfo
    if dtype.isbuiltin != 1:
        import ml_dtypes

        about = ml_dtypes.iinfo if "int" in dtype.name else ml_dtypes.finfo
    return about(dtype)


def is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating-point one, those of ml_dtypes included."""
    return dtype.kind == "f" or (dtype.kind == "V" and "int" not in dtype.name)


def is_small(dtype: np.dtype) -> bool:
    """Whether a dtype is a floating-point one of at most 16 bits."""
    return dtype.itemsize <= 2 and is_float(dtype)


def is_half(dtype: np.dtype | None) -> bool:
    """Whether a dtype is float16 or bfloat16, which are computed in float32, and rounded once at
    the end."""
    return dtype is not None and dtype.itemsize == 2 and is_float(dtype)


def wide(dtype: np.dtype) -> np.dtype:
    """The dtype in which formulas and sums over elements of ``dtype`` are computed."""
    return FLOAT32 if dtype == FLOAT32 or is_small(dtype) else FLOAT64
