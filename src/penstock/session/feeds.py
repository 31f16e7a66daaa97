"""What callers hand to a run: made into values of the inputs' types, or refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidInput
from penstock.ir.graph import Value
from penstock.types import (
    STRING,
    AnyType,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    dtype_name,
)


def convert(name: str, value: Any, kind: Type) -> Any:
    """``value`` as input ``name`` of type ``kind``; raises ``InvalidInput`` if it cannot be."""
    if isinstance(kind, AnyType):
        return _of_any_type(name, value)
    if isinstance(kind, OptionalType):
        return None if value is None else _inner(name, value, kind.element)
    if isinstance(kind, SequenceType):
        if not isinstance(value, list | tuple):
            raise InvalidInput(f"input {name!r} is a sequence, give a list, not {_what(value)}")
        return [_inner(f"{name}[{i}]", x, kind.element) for i, x in enumerate(value)]
    if isinstance(kind, MapType):
        if not isinstance(value, dict):
            raise InvalidInput(f"input {name!r} is a map, give a dict, not {_what(value)}")
        return value
    own_dtype = getattr(value, "dtype", None)
    try:
        if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
            array = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            array = np.from_dlpack(value)
        elif kind.dtype is not None and own_dtype is None:
            # Lists and numbers have no dtype of their own, and take the input's.
            array = _from_python(value, kind.dtype)
        else:
            array = np.asarray(value)
    except Exception as error:  # out of the value's own __array__, say
        raise InvalidInput(
            f"input {name!r} of type {kind} cannot be made of {_what(value)}: {error}"
        ) from error
    if kind.dtype in (STRING, None) and array.dtype.kind in "UST":
        array = array.astype(object)
    if kind.dtype is not None and array.dtype != kind.dtype:
        raise InvalidInput(
            f"input {name!r} must be {dtype_name(kind.dtype)}, not {dtype_name(array.dtype)}; "
            f"convert it with .astype({dtype_name(kind.dtype)!r})"
        )
    return array


def _inner(name: str, value: Any, kind: Type) -> Any:
    """As ``convert``; plans go by the types of elements, and not by what each run has in them."""
    inner = convert(name, value, kind)
    if isinstance(kind, TensorType):
        _check_shape(name, kind, inner)
    return inner


def _of_any_type(name: str, value: Any) -> Any:
    """A value for an input of which nothing is known: it says itself what it is."""
    if isinstance(value, list | tuple):
        return [_of_any_type(f"{name}[{i}]", x) for i, x in enumerate(value)]
    if value is None or isinstance(value, dict):
        return value
    return convert(name, value, TensorType())


def _from_python(value: Any, dtype: np.dtype) -> np.ndarray:
    array = np.asarray(value)
    if dtype == STRING:
        return array.astype(object)
    # A number may become a wider kind, never a narrower one: 1.5 is no integer.
    ranks = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if array.size and ranks.get(array.dtype.kind, 0) > ranks.get(dtype.kind, 2):
        raise TypeError(f"{array.dtype} does not fit {dtype}")
    return np.asarray(value, dtype)


def _what(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {dtype_name(value.dtype)} and shape {value.shape}"
    return f"a {type(value).__name__}"


def check_dims(inputs: Sequence[Value], values: Sequence[Any]) -> None:
    """Ranks and dims fit the declared ones, and dims of one name are equal."""
    bound: dict[str, tuple[int, str]] = {}
    for declared, value in zip(inputs, values, strict=True):
        kind = declared.type
        if not isinstance(kind, TensorType) or kind.shape is None:
            continue
        _check_shape(declared.name, kind, value)
        for axis, (dim, given) in enumerate(zip(kind.shape, value.shape, strict=True)):
            if isinstance(dim, str):
                first, where = bound.setdefault(dim, (given, f"{declared.name!r} axis {axis}"))
                if first != given:
                    raise InvalidInput(
                        f"input {declared.name!r}: dim {dim!r} at axis {axis} is {given}, "
                        f"but {first} at {where}"
                    )


def _check_shape(name: str, kind: TensorType, array: np.ndarray) -> None:
    """Rank and known dims fit."""
    if kind.shape is None:
        return
    if len(kind.shape) != array.ndim:
        raise InvalidInput(
            f"input {name!r} has rank {len(kind.shape)} ({kind}), "
            f"an array of shape {array.shape} was given"
        )
    for axis, (dim, given) in enumerate(zip(kind.shape, array.shape, strict=True)):
        if isinstance(dim, int) and dim != given:
            raise InvalidInput(
                f"input {name!r} must have {dim} at axis {axis} ({kind}), "
                f"an array of shape {array.shape} was given"
            )


def checked(kind: Type) -> Type:
    """What of an input's type is checked when it is fed: all but that dims of one name are equal
    where they are in a sequence or an optional, each of whose elements may have others."""
    if isinstance(kind, SequenceType):
        return SequenceType(_nameless(kind.element))
    return OptionalType(_nameless(kind.element)) if isinstance(kind, OptionalType) else kind


def _nameless(kind: Type) -> Type:
    if not isinstance(kind, TensorType) or kind.shape is None:
        return checked(kind)
    dims = tuple([dim if isinstance(dim, int) else None for dim in kind.shape])
    return TensorType(kind.dtype, dims)
