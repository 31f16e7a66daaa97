"""Classical machine learning (domain ai.onnx.ml): features, categories, maps.

Where the specification is silent, results follow ONNX Runtime, with which models of this domain are
written and tested. Kernels allocate their outputs, which are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from penstock.core.types import (
    FLOAT32,
    INT64,
    STRING,
    Dim,
    MapType,
    RunValue,
    SequenceType,
    ShapeError,
    TensorType,
    Type,
    dtype_name,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops import registry
from penstock.ops.common.constant_cache import by_attributes
from penstock.ops.common.dtypes import FLOAT64
from penstock.ops.common.shape_rules import choice, dim_product, same_shape, same_type, tensor
from penstock.ops.onnx.text import strings
from penstock.ops.registry import ArrayFunction

operator = partial(registry.operator, domain="ai.onnx.ml")
array_operator = partial(registry.array_operator, domain="ai.onnx.ml")


def one_of(attrs: Attrs, *names: str) -> tuple[str, Any]:
    """The name and value of the only attribute among ``names`` that is not empty."""
    present = [name for name in names if attrs.get(name) is not None and np.size(attrs[name])]
    if len(present) != 1:
        raise ShapeError(f"exactly one of the attributes {', '.join(names)} must be given")
    return present[0], attrs[present[0]]


def _features(array: np.ndarray, values: Any, what: str) -> np.ndarray:
    """Check parameters along the last axis: one for all features, or one per feature."""
    parameters: np.ndarray = np.asarray(values)
    if parameters.size != 1 and (array.ndim == 0 or parameters.size != array.shape[-1]):
        raise ShapeError(
            f"{what} has {parameters.size} entries: it needs 1, or one per feature of the input "
            f"{array.shape}"
        )
    return parameters


@array_operator("Binarizer", infer=same_type)
def binarizer(x: np.ndarray, *, threshold: float = 0.0) -> np.ndarray:
    return np.asarray(x > np.float32(threshold)).astype(x.dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == FLOAT64 else x.astype(np.float32, copy=False)


@array_operator("Scaler", infer=same_shape(FLOAT32))
def scaler(
    x: np.ndarray, *, offset: Sequence[float] = (), scale: Sequence[float] = ()
) -> np.ndarray:
    offsets, scales = np.array(offset or [0.0], np.float32), np.array(scale or [1.0], np.float32)
    shifted = _wide(x) - _features(x, offsets, "offset")
    scaled: np.ndarray = np.asarray(shifted * _features(x, scales, "scale"))
    return scaled.reshape(x.shape).astype(np.float32)


NORMS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "MAX": lambda x: x.max(-1, keepdims=True, initial=-np.inf),
    "L1": lambda x: np.abs(x).sum(-1, keepdims=True),
    "L2": lambda x: np.sqrt(np.square(x).sum(-1, keepdims=True)),
}


@operator("Normalizer", infer=same_shape(FLOAT32))
def normalizer(node: Node, types: Types) -> Kernel:
    """L1 sums absolute values, and L2 keeps signs, unlike the formulas of the specification."""
    norm = NORMS[choice(node.attrs, "norm", "MAX", NORMS)]

    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim not in (1, 2):
            raise ShapeError(f"Normalizer needs an input of shape [C] or [N, C], not {x.shape}")
        wide = _wide(x)
        divisor = norm(wide)
        # Rows of zeros are not changed.
        return (wide / np.where(divisor == 0, 1, divisor)).astype(np.float32)

    return Kernel(run)


def imputed_values(attrs: Attrs) -> tuple[Any, Any, bool]:
    """Return the imputed values of an Imputer, the value they replace, and whether they are
    ints.
    """
    name, values = one_of(attrs, "imputed_value_floats", "imputed_value_int64s")
    integers = name == "imputed_value_int64s"
    replaced = attrs.get("replaced_value_int64" if integers else "replaced_value_float", 0)
    return values, replaced, integers


@operator("Imputer", infer=same_type)
def imputer(node: Node, types: Types) -> Kernel:
    values, replaced, integers = imputed_values(node.attrs)

    def run(x: np.ndarray) -> np.ndarray:
        if (x.dtype.kind in "iu") != integers:
            wanted = "integers" if integers else "floats"
            raise ShapeError(f"imputed values are {wanted}, but the input is {dtype_name(x.dtype)}")
        imputed = _features(x, values, "the imputed values").astype(x.dtype)
        own = replaced if integers else x.dtype.type(replaced)  # an int may be out of range
        # NaN compares unequal to itself.
        missing = np.isnan(x) if replaced != replaced else x == own
        return np.asarray(np.where(missing, imputed, x)).reshape(x.shape)

    return Kernel(run)


def _infer_extractor(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, y = tensor(types, 0), tensor(types, 1)
    if x.shape is None:
        return (TensorType(x.dtype),)
    count = None if y.shape is None else dim_product(y.shape)
    # A vector is one row.
    return (TensorType(x.dtype, (*(x.shape[:-1] or (1,)), count)),)


@array_operator("ArrayFeatureExtractor", infer=_infer_extractor, strings=True)
def array_feature_extractor(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if x.ndim == 0:
        raise ShapeError("the input is a scalar: it must have rank 1 or more")
    if y.size and (y.min() < 0 or y.max() >= x.shape[-1]):
        raise ShapeError(f"indices {y.min()} to {y.max()} must be in [0, {x.shape[-1]})")
    return (x if x.ndim > 1 else x[None]).take(y.reshape(-1), axis=-1)


def _infer_vectorizer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    first = tensor(types, 0).shape
    rows: Dim = None if first is None else first[0] if len(first) > 1 else 1
    widths = attrs.get("inputdimensions")
    return (TensorType(FLOAT32, (rows, sum(widths) if widths else None)),)


@array_operator("FeatureVectorizer", infer=_infer_vectorizer)
def feature_vectorizer(*inputs: np.ndarray, inputdimensions: Sequence[int] = ()) -> np.ndarray:
    if inputdimensions and len(inputdimensions) != len(inputs):
        raise ShapeError(f"inputdimensions has {len(inputdimensions)} entries, not {len(inputs)}")
    rows = [
        x.reshape(1, -1) if x.ndim < 2 else x.reshape(len(x), math.prod(x.shape[1:]))
        for x in inputs
    ]
    if any(len(x) != len(rows[0]) for x in rows):
        raise ShapeError(
            f"the inputs must have the same number of rows: {[x.shape for x in inputs]}"
        )
    widths = inputdimensions or [x.shape[1] for x in rows]
    result = np.zeros((len(rows[0]), sum(widths)), np.float32)
    start = 0
    for x, width in zip(rows, widths, strict=True):
        # Rows are truncated, or padded with zeros.
        used = min(width, x.shape[1])
        result[:, start : start + used] = x[:, :used]
        start += width
    return result


def span_of(keys: np.ndarray) -> tuple[int, int] | None:
    """Return (min - 1, max + 1) of int64 keys if a table of all integers between them is small
    enough, else None."""
    if keys.dtype != INT64 or not keys.size:
        return None
    low, high = int(keys.min()) - 1, int(keys.max()) + 1
    fits = low >= -(2**63) and high < 2**63 and high - low <= 16 * keys.size + 1024
    return (low, high) if fits else None


class _Lookup:
    """Maps each element of an array to the value of its key, or to the default. Of equal keys, the
    last one is used; all NaNs are equal."""

    def __init__(
        self, keys: Sequence[Any], dtype: np.dtype, values: np.ndarray, default: object
    ) -> None:
        self.dtype = dtype
        self.count = len(keys)
        self.values = np.empty(self.count + 1, values.dtype)
        self.values[:-1], self.values[-1] = values, default
        places = {key: i for i, key in enumerate(keys)}
        self.by_name: dict[Any, int] | None = places if dtype == STRING else None
        self.table: np.ndarray | None = None
        if dtype == STRING:
            return
        array = np.asarray(keys, dtype)
        if span := span_of(array):
            # The first and last entries hold the default.
            self.low, high = span
            self.table = np.full(high - self.low + 1, self.values[-1], values.dtype)
            self.table[np.fromiter(places, dtype) - self.low] = values[[*places.values()]]
            return
        # A stable sort keeps the last of equal keys at the right end of their run.
        self.order = np.argsort(array, kind="stable")
        self.sorted = array[self.order]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if x.dtype != self.dtype:
            raise ShapeError(
                f"the keys are {dtype_name(self.dtype)}, but the input is {dtype_name(x.dtype)}"
            )
        if self.table is not None:
            # Differences may wrap around, but never into the table.
            found = self.table.take(np.subtract(x, self.low), mode="clip")
        else:
            found = self.values[self._places(x)]
        return np.asarray(found, self.values.dtype).reshape(x.shape)

    def _places(self, x: np.ndarray) -> np.ndarray:
        if self.by_name is not None:
            get, missing = self.by_name.get, self.count
            flat = [get(key, missing) for key in x.reshape(-1).tolist()]
            return np.array(flat, np.int64).reshape(x.shape)
        if not self.count:
            return np.zeros(x.shape, np.int64)
        place = np.maximum(np.searchsorted(self.sorted, x, "right") - 1, 0)
        nearest = self.sorted[place]
        equal = nearest == x
        if self.dtype.kind == "f":
            equal |= (nearest != nearest) & (x != x)
        return np.where(equal, self.order[place], self.count)


def _infer_other(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    other = None if x.dtype is None else INT64 if x.dtype == STRING else STRING
    return (TensorType(other, x.shape),)


def category_names(attrs: Attrs) -> tuple[Sequence[str], Sequence[int]]:
    """The strings of a CategoryMapper, or of LabelEncoder version 1, and their integers."""
    classes = attrs.get("classes_strings")  # LabelEncoder numbers them from 0
    names = classes or attrs.get("cats_strings") or []
    ints = range(len(names)) if classes else attrs.get("cats_int64s") or []
    if len(ints) != len(names):
        raise ShapeError(f"cats_int64s has {len(ints)} entries, but cats_strings has {len(names)}")
    return names, ints


@operator("CategoryMapper", infer=_infer_other, strings=True)
@operator("LabelEncoder", version=1, infer=_infer_other, strings=True)
@by_attributes
def category_mapper(attrs: Attrs) -> ArrayFunction:
    """Map strings to integers or back, depending on the dtype of the input."""
    names, ints = category_names(attrs)
    number, name = attrs.get("default_int64", -1), attrs.get("default_string", "_Unused")
    to_int = _Lookup(names, STRING, np.array(ints, np.int64), number)
    to_name = _Lookup(ints, INT64, strings(names, (len(names),)), name)
    return lambda x: (to_int if x.dtype == STRING else to_name)(x)


_LISTS = {"strings": STRING, "int64s": INT64, "floats": FLOAT32}


def _labels(attrs: Attrs, prefix: str) -> np.ndarray:
    """The keys or the values of a LabelEncoder."""
    name, values = one_of(attrs, *(f"{prefix}_{name}" for name in (*_LISTS, "tensor")))
    dtype = values.dtype if isinstance(values, np.ndarray) else _LISTS[name.split("_")[1]]
    flat = np.asarray(values).reshape(-1).tolist()
    return strings(flat, (len(flat),)) if dtype.kind in "OU" else np.array(flat, dtype)


def encoded_labels(attrs: Attrs) -> tuple[np.ndarray, np.ndarray, Any]:
    """The keys of a LabelEncoder, their values, and the default value."""
    keys, values = _labels(attrs, "keys"), _labels(attrs, "values")
    if len(keys) != len(values):
        raise ShapeError(f"keys has {len(keys)} entries, but values has {len(values)}")
    default: Any = attrs.get("default_tensor")
    if default is not None and not np.size(default):
        raise ShapeError("default_tensor must have one element, but is empty")
    if default is not None:
        default = np.asarray(default).reshape(-1)[0]
    else:
        # The defaults of the schema, which is -0.0 for floats.
        defaults = {"O": ("string", "_Unused"), "f": ("float", -0.0)}
        name, default = defaults.get(values.dtype.kind, ("int64", -1))
        # For values_tensor, only default_tensor applies.
        if attrs.get("values_tensor") is None:
            default = attrs.get(f"default_{name}", default)
    return keys, values, default


@operator(
    "LabelEncoder",
    since=2,
    infer=same_shape(lambda attrs: _labels(attrs, "values").dtype),
    strings=True,
)
@by_attributes
def label_encoder(attrs: Attrs) -> ArrayFunction:
    keys, values, default = encoded_labels(attrs)
    return _Lookup(keys.tolist(), keys.dtype, values, default)


def categories(attrs: Attrs) -> tuple[Any, np.dtype]:
    """The categories of a OneHotEncoder, and their dtype."""
    name, cats = one_of(attrs, "cats_int64s", "cats_strings")
    return cats, STRING if name == "cats_strings" else INT64


def _infer_one_hot(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = tensor(types, 0).shape
    cats, _ = categories(attrs)
    return (TensorType(FLOAT32, None if shape is None else (*shape, len(cats))),)


@operator("OneHotEncoder", infer=_infer_one_hot, strings=True)
def one_hot_encoder(node: Node, types: Types) -> Kernel:
    cats, dtype = categories(node.attrs)
    width, lenient = len(cats), bool(node.attrs.get("zeros", 1))
    lookup = _Lookup(cats, dtype, np.arange(width), width)
    table = np.eye(width + 1, width, dtype=np.float32) if width < 64 else None

    def run(x: np.ndarray) -> np.ndarray:
        places = lookup(x.astype(INT64, copy=False) if dtype == INT64 and x.dtype != STRING else x)
        if not lenient and (places == width).any():
            unknown = x[places == width].reshape(-1)[0]
            raise ShapeError(f"{unknown!r} is not a category, which zeros=0 does not allow")
        if table is not None:
            return table.take(places, axis=0)  # the last row is of zeros
        # Zeroed pages need not be written. An additional element receives unknown categories.
        result = np.zeros(x.size * width + 1, np.float32)
        flat = places.reshape(-1)
        result[np.where(flat < width, flat + np.arange(0, x.size * width, width), -1)] = 1
        return result[:-1].reshape(*x.shape, width)

    return Kernel(run)


def _map_values(types: Types) -> np.dtype | None:
    type_ = types[0] if types else None
    if isinstance(type_, MapType) and isinstance(type_.value, TensorType):
        return type_.value.dtype
    return None


def _vocabulary(attrs: Attrs) -> Any:
    return one_of(attrs, "string_vocabulary", "int64_vocabulary")[1]


def _infer_dict_vectorizer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(_map_values(types), (1, len(_vocabulary(attrs)))),)


@operator("DictVectorizer", infer=_infer_dict_vectorizer, strings=True)
def dict_vectorizer(node: Node, types: Types) -> Kernel:
    vocabulary = _vocabulary(node.attrs)
    declared = _map_values(types)

    def run(x: Mapping[Any, Any]) -> np.ndarray:
        dtype = declared or _dtype_of(next(iter(x.values()), 0.0))
        values = map(x.get, vocabulary, repeat("" if dtype == STRING else dtype.type()))
        return np.fromiter(values, dtype, len(vocabulary))[None]

    return Kernel(run)


def _dtype_of(value: RunValue) -> np.dtype:
    """The element type of a map whose values are Python or NumPy scalars."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.dtype
    return STRING if isinstance(value, str) else INT64 if isinstance(value, int) else FLOAT32


_CASTS: Mapping[str, tuple[np.dtype, Callable[[Any], Any], Any]] = {
    "TO_FLOAT": (FLOAT32, float, 0.0),
    "TO_INT64": (INT64, lambda v: int(float(v)), 0),
    # For a missing key, ONNX Runtime yields the string "0.f".
    "TO_STRING": (STRING, lambda v: v if isinstance(v, str) else f"{float(v):f}", "0.f"),
}


def _infer_cast_map(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dtype, _, _ = _CASTS[choice(attrs, "cast_to", "TO_FLOAT", _CASTS)]
    return (TensorType(dtype, (1, attrs.get("max_map", 1) if _sparse(attrs) else None)),)


def _sparse(attrs: Attrs) -> bool:
    return choice(attrs, "map_form", "DENSE", ("DENSE", "SPARSE")) == "SPARSE"


@operator("CastMap", infer=_infer_cast_map, strings=True, traits={"exact"})
def cast_map(node: Node, types: Types) -> Kernel:
    attrs = node.attrs
    dtype, cast, missing = _CASTS[choice(attrs, "cast_to", "TO_FLOAT", _CASTS)]
    sparse, width = _sparse(attrs), attrs.get("max_map", 1)

    def run(x: Mapping[int, Any]) -> np.ndarray:
        # Values are ordered by key, regardless of the order of the map.
        keys = sorted(x)
        if sparse and keys and not 0 <= keys[0] <= keys[-1] < width:
            raise ShapeError(f"keys {keys[0]} to {keys[-1]} must be below max_map={width}")
        values = np.fromiter(map(cast, map(x.__getitem__, keys)), dtype, len(keys))
        if not sparse:
            return values[None]
        result = np.full((1, width), missing, dtype)
        result[0, np.array(keys, np.int64)] = values
        return result

    return Kernel(run)


def _infer_zip_map(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    key = STRING if attrs.get("classlabels_strings") else INT64
    return (SequenceType(MapType(key, TensorType(FLOAT32, ()))),)


@operator("ZipMap", infer=_infer_zip_map)
def zip_map(node: Node, types: Types) -> Kernel:
    _, labels = one_of(node.attrs, "classlabels_strings", "classlabels_int64s")

    def run(x: np.ndarray) -> list[dict[Any, float]]:
        rows = x.reshape(1, -1) if x.ndim == 1 else x
        if rows.ndim != 2 or rows.shape[1] != len(labels):
            raise ShapeError(
                f"an input of shape {x.shape} must have {len(labels)} columns, one per class label"
            )
        return [dict(zip(labels, row)) for row in rows.tolist()]  # noqa: B905 - strict is slower

    return Kernel(run)
