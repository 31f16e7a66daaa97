"""Types of values: tensors with known, named or unknown dims, sequences, optionals and maps.

A dim is an ``int`` (known), a ``str`` (symbolic: two dims of one name are equal) or ``None``
(unknown). Dtypes are NumPy dtypes, with those of ``ml_dtypes`` (bfloat16, float8, int4, ...);
strings are ``object`` arrays of ``str``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np

from penstock.core.records import dataclass, replace

# Another package may have installed an older NumPy over ours. All modules that compute import this.
if np.__version__.startswith(("1.", "2.0.")):
    raise ImportError(
        f"Penstock needs NumPy 2.1 or newer, and NumPy {np.__version__} is installed: "
        "pip install 'numpy>=2.1'"
    )

Dim: TypeAlias = int | str | None
Shape: TypeAlias = tuple[Dim, ...]

STRING = np.dtype(object)
INT64 = np.dtype(np.int64)
BOOL = np.dtype(np.bool_)
FLOAT32 = np.dtype(np.float32)

MAX_DATA = 128  # elements; tensors that describe shapes are smaller


class ShapeError(ValueError):
    """Types, shapes or attributes that do not fit an operation. Raised by ``infer`` functions and
    kernels; callers add the node and its origin."""


_KNOWN = frozenset([int])  # the class of dims that are known
_class_of = attrgetter("__class__")  # also of traced numbers


class _Sizes:
    """Sizes that a ``TensorType`` computes on first access and then stores as attributes, since
    they are read many times for every value of a model."""

    __slots__ = ("dims", "elements", "nbytes", "static")

    static: bool
    """Whether dtype and every dim are known, so that memory can be planned."""
    elements: int
    """The number of elements of a static tensor, -1 of others."""
    dims: tuple[int, ...]
    """The shape of a static type."""
    nbytes: int
    """Bytes of a static tensor as NumPy stores it (4-bit types take a byte an element)."""

    def __getattr__(self, name: str) -> Any:
        if name not in _Sizes.__slots__:
            raise AttributeError(f"a TensorType has no attribute {name!r}")
        assert isinstance(self, TensorType)
        dtype, shape, put = self.dtype, self.shape, object.__setattr__
        known = dtype is not None and shape is not None and _KNOWN.issuperset(map(_class_of, shape))
        elements = math.prod(shape) if known else -1  # type: ignore[arg-type]
        static = elements >= 0
        put(self, "static", static)  # later reads do not call this method
        put(self, "elements", elements)
        if static:
            put(self, "dims", shape)
            put(self, "nbytes", elements * dtype.itemsize)  # type: ignore[union-attr]
        assert static or name in ("static", "elements"), self
        return getattr(self, name)


@dataclass(frozen=True, slots=True)
class TensorType(_Sizes):
    """Element type and shape of a tensor; ``None`` where unknown.

    ``data`` holds the elements, row-major, of a tensor of integers or truth values of rank 0 or 1
    whose contents are known in whole or in part (an element is a dim). It is how shape arithmetic
    is carried through inference when the dims themselves are symbolic.
    """

    dtype: np.dtype | None = None
    shape: Shape | None = None
    data: tuple[Dim, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not TensorType:
            return NotImplemented
        assert isinstance(other, TensorType)
        # In comparisons of dtypes NumPy takes None for float64: np.dtype(float) == None.
        return (
            self.shape == other.shape
            and (self.dtype is None) is (other.dtype is None)
            and self.dtype == other.dtype
            and self.data == other.data
        )

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def without_data(self) -> TensorType:
        return self if self.data is None else replace(self, data=None)

    def __str__(self) -> str:
        dtype = "?" if self.dtype is None else dtype_name(self.dtype)
        if self.shape is None:
            return f"{dtype}[...]"
        return f"{dtype}[{', '.join('?' if d is None else str(d) for d in self.shape)}]"


@dataclass(frozen=True, slots=True)
class SequenceType:
    """A list of values of one type, which is a Python ``list`` at run time."""

    element: Type

    def __str__(self) -> str:
        return f"seq({self.element})"


@dataclass(frozen=True, slots=True)
class OptionalType:
    """A value that may be missing, in which case it is ``None`` at run time."""

    element: Type

    def __str__(self) -> str:
        return f"optional({self.element})"


@dataclass(frozen=True, slots=True)
class MapType:
    """A mapping from keys of one dtype to values of one type, which is a ``dict`` at run time."""

    key: np.dtype
    value: Type

    def __str__(self) -> str:
        return f"map({dtype_name(self.key)}, {self.value})"


@dataclass(frozen=True, slots=True)
class AnyType:
    """An unknown type: a tensor, sequence, optional or map."""

    def __str__(self) -> str:
        return "any"


Type: TypeAlias = TensorType | SequenceType | OptionalType | MapType | AnyType
ANY = AnyType()

RunValue: TypeAlias = Any
"""a value of a run: an array, a sequence or mapping, None, or an object in a backend's memory"""
RunValues: TypeAlias = Sequence[RunValue]
"""the inputs or outputs of a graph or of a node, in their order"""
NamedValues: TypeAlias = Mapping[str, RunValue]
"""values by the names of inputs, outputs, or other values of a graph"""


class DataFrame(Protocol):
    """A table whose columns are values by name, as a table of pandas or polars is."""

    @property
    def columns(self) -> Iterable[object]:
        """The names of the columns."""
        ...

    def __getitem__(self, name: str, /) -> object:
        """The column of this name."""
        ...


Feeds: TypeAlias = NamedValues | DataFrame
"""values to feed by name"""
JsonObject: TypeAlias = dict[str, Any]
"""an object that JSON can represent"""


@cache
def dtype_name(dtype: np.dtype) -> str:
    """Return NumPy's name of a dtype, or ``string`` for object arrays."""
    return "string" if dtype == STRING else dtype.name


_NUMPY_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_DTYPES = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn"),
    *("float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


_OWN = {name: np.dtype(name) for name in _NUMPY_DTYPES} | {"string": STRING}
_OWN_DTYPES = {dtype: dtype for dtype in _OWN.values()}


@lru_cache(maxsize=64)  # bounded, since string dtypes have arbitrary lengths
def is_dtype(dtype: object) -> bool:
    """Whether a tensor may have this dtype."""
    return dtype in _OWN_DTYPES or dtype in dtypes().values()


@cache
def dtype_named(name: str) -> np.dtype:
    """Return the dtype of this name (``dtype_name``). Raises ``KeyError`` if there is none."""
    return _OWN[name] if name in _OWN else dtypes()[name]


def find_dtype(name: str) -> np.dtype | None:
    """Return the dtype of this name, or None."""
    return _OWN.get(name) or (dtypes().get(name) if name in _ML_DTYPES else None)


@cache
def dtypes() -> Mapping[str, np.dtype]:
    """Return every dtype that a tensor may have, by its name."""
    import ml_dtypes  # takes 5 ms, which ``dtype_named`` avoids for NumPy's own dtypes

    # Older versions of ml_dtypes lack some of the small types.
    small = (getattr(ml_dtypes, name, None) for name in _ML_DTYPES)
    return _OWN | {np.dtype(t).name: np.dtype(t) for t in small if t is not None}


@lru_cache(maxsize=1024)
def array_type(dtype: np.dtype, shape: tuple[int, ...]) -> TensorType:
    """The type of an array. One object stands for equal ones: it computes its sizes once."""
    # NumPy has several dtypes that are equal, such as "<f4" and "=f4".
    return TensorType(_OWN_DTYPES.get(dtype, dtype), shape)


def type_of(value: object) -> Type:
    """Return the type of a run-time value."""
    if isinstance(value, np.ndarray):
        return array_type(value.dtype, value.shape)
    if isinstance(value, list):
        # Among elements with arrays of one type only the last is examined: sequences may be long.
        samples = {(id(x.dtype), x.shape) if isinstance(x, np.ndarray) else id(x): x for x in value}
        return SequenceType(reduce(join, map(type_of, samples.values())) if value else ANY)
    if value is None:
        return OptionalType(ANY)
    return ANY


def is_static(type_: object, kinds: str = "") -> TypeGuard[TensorType]:
    """Whether a type is a tensor's whose dtype and dims are all known, with a dtype of one of these
    ``kinds``, if any are given."""
    if not isinstance(type_, TensorType) or not type_.static:
        return False
    return not kinds or (type_.dtype is not None and type_.dtype.kind in kinds)


def constant_type(array: np.ndarray) -> TensorType:
    """Return the type of a constant, with its contents if shape arithmetic may use them."""
    dtype, shape = array.dtype, array.shape
    if len(shape) <= 1 and array.size <= MAX_DATA and dtype.kind in "iu":
        return TensorType(dtype, shape, tuple(array.reshape(-1).tolist()))
    return array_type(dtype, shape)


def _common(a: Shape | None, b: Shape | None) -> Shape | None:
    """Return the dims with None where ``a`` and ``b`` differ, or None if their ranks differ."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def without_data(type_: Type) -> Type:
    """Return the type; a tensor's without its contents."""
    return type_.without_data() if isinstance(type_, TensorType) else type_


def join(a: Type, b: Type) -> Type:
    """Return the narrowest type that contains ``a`` and ``b``, e.g. of both branches of an If."""
    if a == b:
        return a
    if isinstance(a, TensorType) and isinstance(b, TensorType):
        same = a.dtype is not None and b.dtype is not None and a.dtype == b.dtype
        shape = _common(a.shape, b.shape)
        data = None if shape is None else _common(a.data, b.data)
        return TensorType(a.dtype if same else None, shape, data)
    if isinstance(a, SequenceType) and isinstance(b, SequenceType):
        return SequenceType(join(a.element, b.element))
    if isinstance(a, OptionalType) or isinstance(b, OptionalType):
        x = a.element if isinstance(a, OptionalType) else a
        y = b.element if isinstance(b, OptionalType) else b
        return OptionalType(y if x == ANY else x if y == ANY else join(x, y))
    return ANY


def accepts(declared: Type, actual: Type) -> bool:
    """Whether a value of type ``actual`` may be used where ``declared`` is expected. Symbolic dims
    accept any dim here: that equal names have equal sizes is checked over all inputs of a run."""
    if declared is actual or isinstance(declared, AnyType) or isinstance(actual, AnyType):
        return True
    if isinstance(declared, OptionalType):
        inner = actual.element if isinstance(actual, OptionalType) else actual
        return accepts(declared.element, inner)
    if isinstance(declared, TensorType) and isinstance(actual, TensorType):
        both = declared.dtype is not None and actual.dtype is not None
        if both and declared.dtype != actual.dtype:
            return False
        if declared.shape is None or actual.shape is None or declared.shape == actual.shape:
            return True
        return len(declared.shape) == len(actual.shape) and all(
            not isinstance(want, int) or not isinstance(got, int) or want == got
            for want, got in zip(declared.shape, actual.shape, strict=True)
        )
    if isinstance(declared, SequenceType) and isinstance(actual, SequenceType):
        return accepts(declared.element, actual.element)
    return isinstance(declared, MapType) and isinstance(actual, MapType)
