"""Feature transforms of classical models: scaling, imputation, normalization, encoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.backends.native import family, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor, Word, texts_of
from penstock.core.types import FLOAT32, INT64, STRING
from penstock.ops.onnx_ml.features import NORMS, categories, encoded_labels, imputed_values, span_of

_DTYPES = ("float32", "float64", "int32", "int64")
_MOST_SEARCHES = 256
"""most elements for which a search is faster than a call of NumPy's kernels, which use tables"""


def _of_rows(site: Site, kernel: str, *words: Word) -> NativeCall | None:
    """Return the call of a row-wise kernel on a numeric input, with further arguments ``words``."""
    x = site.tensor(0)
    if not x.dims or str_(x.dtype) not in _DTYPES:
        return None
    inplace = (0,) if x == site.output() else ()
    words = (Tensor(0), site.result(), *words)
    rows = math.prod(x.dims[:-1])
    row_ns = rows_ns(20 * x.dims[-1], rows=0.5)
    return NativeCall(f"{kernel}_{x.dtype}", words, rows, row_ns, inplace=inplace)


@family("ai.onnx.ml.ArrayFeatureExtractor")
def array_feature_extractor(site: Site) -> NativeCall | None:
    """ArrayFeatureExtractor."""
    x, places = site.tensor(0), site.tensor(1)
    if places.dtype != INT64 or not x.dims:
        return None
    if x.dtype is None or x.dtype == STRING or x.dtype.itemsize not in (1, 2, 4, 8):
        return None
    rows, width, count = math.prod(x.dims[:-1]), x.dims[-1], math.prod(places.dims)
    words = (Tensor(0), Tensor(1), site.result(), width, count)
    row_ns = rows_ns(20 * count, rows=0.2)
    return NativeCall(f"columns_{x.dtype.itemsize}", words, rows, row_ns, can_fail=True)


def _table(
    keys: np.ndarray, values: np.ndarray, default: Any
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return unique sorted keys, their last values with the default appended, and their number."""
    ascending, last = np.unique(keys[::-1], return_index=True)
    table = np.append(values[::-1][last], np.array(default, values.dtype))
    return ascending, table.astype(values.dtype, copy=False), len(ascending)


@family("ai.onnx.ml.LabelEncoder")
def label_encoder(site: Site) -> NativeCall | None:
    """LabelEncoder of numbers, since version 2."""
    x, y, attrs = site.tensor(0), site.output(), site.node.attrs
    if x.dtype == STRING or site.node.op.version < 2:
        return None
    keys, values, default = encoded_labels(attrs)
    if keys.dtype != x.dtype or str_(x.dtype) not in _DTYPES or len(keys) != len(values):
        return None
    if x.elements > _MOST_SEARCHES and span_of(keys) is not None:  # left to NumPy's tables
        return None
    ascending, table, count = _table(keys, values, default)
    texts = table if y.dtype == STRING else None
    if texts is not None:
        table = np.arange(count + 1)
    if table.dtype.itemsize not in (4, 8):
        return None
    words = (Tensor(0), site.result(), ascending, table, count)
    name = f"lookup_{x.dtype}_{table.dtype.itemsize}"
    item_ns = rows_ns(20 * count.bit_length(), rows=0.2)
    return NativeCall(name, words, math.prod(x.dims), item_ns, finish=texts_of(site, texts))


@family("ai.onnx.ml.OneHotEncoder")
def one_hot_encoder(site: Site) -> NativeCall | None:
    """OneHotEncoder of int64."""
    x, (cats, dtype) = site.tensor(0), categories(site.node.attrs)
    if x.dtype != INT64 or dtype != INT64:
        return None
    numbers = np.asarray(cats, np.int64)
    keys, table, count = _table(numbers, np.arange(len(cats)), -1)
    low, high = span_of(numbers) or (0, 0)
    places = np.full(high - low, -1)
    if len(places):
        places[keys - low] = table[:-1]
    lenient = bool(site.attr("zeros", 1))
    words = (Tensor(0), site.result(), keys, table, places)
    sizes = (count, len(cats), lenient, low, len(places))
    item_ns = rows_ns(2 * len(cats), rows=0.3)
    return NativeCall(
        "one_hot_int64", (*words, *sizes), math.prod(x.dims), item_ns, can_fail=not lenient
    )


def _by_feature(values: Any, width: int, dtype: np.dtype) -> np.ndarray | None:
    """Return per-feature parameters, broadcast if scalar; None for other sizes."""
    array = np.asarray(values).reshape(-1).astype(dtype)
    return np.broadcast_to(array, width).copy() if array.size in (1, width) else None


@family("ai.onnx.ml.Scaler")
def scaler(site: Site) -> NativeCall | None:
    """Scaler."""
    x = site.tensor(0)
    width = x.dims[-1] if x.dims else 0
    offset, scale = (
        _by_feature(site.attr(name, None) or [default], width, FLOAT32)
        for name, default in (("offset", 0.0), ("scale", 1.0))
    )
    if offset is None or scale is None:
        return None
    return _of_rows(site, "scaler", offset, scale, width)


@family("ai.onnx.ml.Imputer")
def imputer(site: Site) -> NativeCall | None:
    """Imputer."""
    x = site.tensor(0)
    if not x.dims or x.dtype is None:
        return None
    values, replaced, integers = imputed_values(site.node.attrs)
    imputed = _by_feature(values, x.dims[-1], x.dtype)
    if imputed is None or (x.dtype.kind in "iu") != integers:
        return None
    if integers and np.array(replaced).astype(x.dtype) != replaced:
        return None
    return _of_rows(site, "imputer", imputed, np.array([replaced], x.dtype), x.dims[-1])


@family("ai.onnx.ml.Normalizer")
def normalizer(site: Site) -> NativeCall | None:
    """Normalizer."""
    x, norm = site.tensor(0), site.attr("norm", "MAX")
    if len(x.dims) not in (1, 2) or norm not in NORMS:
        return None
    return _of_rows(site, "normalizer", x.dims[-1], list(NORMS).index(norm))
