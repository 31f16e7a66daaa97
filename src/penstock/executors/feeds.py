"""Conversion of feeds to the types of inputs, and checks of their dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Number
from typing import Any

import numpy as np

from penstock.core.errors import InvalidInput, quoted, suggest
from penstock.core.types import (
    STRING,
    AnyType,
    MapType,
    OptionalType,
    RunValue,
    RunValues,
    SequenceType,
    Shape,
    TensorType,
    Type,
    dtype_name,
)
from penstock.host.native import are_strings
from penstock.ir.graph import Value


def check_names(verb: str, names: Iterable[str], inputs: Mapping[str, Type]) -> None:
    """Raise ``InvalidInput`` unless ``names`` are the names of all ``inputs``. ``verb`` is used in
    the message, as in "cannot feed"."""
    given = [*names]
    if {*given} == inputs.keys():
        return
    for name in given:
        if name not in inputs:
            raise InvalidInput(f"cannot {verb} {quoted(name)}: {suggest(name, inputs)}")
    if missing := [f"{quoted(n)} ({type_})" for n, type_ in inputs.items() if n not in given]:
        raise InvalidInput(f"a value is missing for each of these inputs: {', '.join(missing)}")


def convert(name: str, value: RunValue, input_type: Type) -> RunValue:
    """Convert ``value`` to ``input_type``, for input ``name``: a tensor to an array (``value``
    itself if it has the dtype), a sequence to a list, a map to a dict. Raises ``InvalidInput``."""
    if isinstance(input_type, AnyType):
        return _of_any_type(name, value)
    if isinstance(input_type, OptionalType):
        return None if value is None else _inner(name, value, input_type.element)
    if isinstance(input_type, SequenceType):
        if not isinstance(value, list | tuple):
            raise InvalidInput(f"input {name!r} is a sequence: give a list, not {_what(value)}")
        return [_inner(f"{name}[{i}]", x, input_type.element) for i, x in enumerate(value)]
    if isinstance(input_type, MapType):
        if not isinstance(value, dict):
            raise InvalidInput(f"input {name!r} is a map: give a dict, not {_what(value)}")
        return _map(name, value, input_type)
    return _tensor(name, value, input_type)


def _tensor(name: str, value: RunValue, input_type: TensorType) -> RunValue:
    """Convert ``value`` to an array of the dtype of ``input_type``."""
    if type(value) is np.ndarray and value.dtype == input_type.dtype and value.dtype != STRING:
        return value
    try:
        _refuse_masks(name, value)
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            array = np.from_dlpack(value)
        elif input_type.dtype is None or hasattr(value, "dtype") or hasattr(value, "__array__"):
            array = np.asarray(value)
            if array.dtype.kind in "US" and isinstance(value, list | tuple):
                array = np.asarray(value, STRING)  # else NumPy converts other elements to strings
        else:  # lists and numbers have no dtype, and take the input's
            array = from_python(value, input_type.dtype)
    except InvalidInput:
        raise
    except Exception as error:  # for example, from the value's ``__array__``
        raise InvalidInput(
            f"input {name!r} of type {input_type} cannot be converted from {_what(value)}: {error}"
        ) from error
    if array.ndim == 1 and not isinstance(value, np.ndarray) and _takes_columns(input_type):
        # A column of a table has one dim; as a matrix of features, it needs two.
        array = array[:, np.newaxis] if hasattr(value, "to_numpy") else array
    if (input_type.dtype or STRING) == STRING and array.dtype.kind in "USTO":
        return _strings(name, array)
    # Compiled kernels only support the machine's byte order.
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if input_type.dtype is not None and array.dtype != input_type.dtype:
        raise InvalidInput(f"input {name!r} must be {_other_dtype(input_type.dtype, array.dtype)}")
    return array


_CODE_BYTES = 2
"""the largest size of integers that stand for real numbers by a scale"""


def _other_dtype(wanted: np.dtype, given: np.dtype) -> str:
    """Return the end of a message on a feed of the wrong dtype, with the conversion to use."""
    name = dtype_name(wanted)
    if given.kind in "UST":
        return f"{name}, not an array of strings; give it numbers"
    target = "str" if wanted == STRING else name
    remedy = f"convert it with .astype({target!r})"
    if wanted.kind in "iu" and wanted.itemsize <= _CODE_BYTES and given.kind == "f":
        codes = "round(x / scale) + zero point (of a TFLite file, session.model.metadata has both)"
        remedy = f"if it has real numbers, give their codes, {codes}; else {remedy}"
    return f"{name}, not {given.name}; {remedy}"


def _takes_columns(input_type: TensorType) -> bool:
    """Whether the shape of an input is [N, 1], that of a table's column."""
    shape = input_type.shape
    return shape is not None and len(shape) == 2 and shape[1] == 1


def _refuse_masks(name: str, value: RunValue) -> None:
    """Raise ``InvalidInput`` for masked elements of an array, or of an array within a list."""
    if isinstance(value, list | tuple):
        for element in value:
            _refuse_masks(name, element)
    elif type(value) is np.ndarray or not isinstance(value, np.ndarray):
        return  # checked first, so that most feeds do not import numpy.ma
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise InvalidInput(
            f"input {name!r} has masked elements, and tensors have no masks; "
            "replace these elements with .filled(value)"
        )


def _strings(name: str, array: np.ndarray) -> np.ndarray:
    """Convert ``array``, whose elements must be str or bytes, to an object array of str."""
    if array.dtype != STRING:
        array = array.astype(object)
    if are_strings()(array):
        return array
    texts = np.empty(array.size, object)
    texts[:] = [_text(name, x) for x in array.flat]
    return texts.reshape(array.shape)


def _text(name: str, element: Any) -> str:
    if isinstance(element, str):
        return str(element)
    if not isinstance(element, bytes):
        raise InvalidInput(f"input {name!r} takes strings, not {element!r:.40}")
    # Bytes that are not UTF-8, as those of a serialized message, become lone surrogates.
    return element.decode("utf-8", "surrogateescape")


def _map(name: str, value: dict[Any, Any], input_type: MapType) -> dict[Any, Any]:
    """Convert the keys of a map, and its values if they are strings, to the input's types."""
    if input_type.key == STRING:
        value = {_text(name, key): x for key, x in value.items()}
    elif not all(issubclass(kind, int | np.integer) for kind in {*map(type, value)}):
        raise InvalidInput(f"input {name!r} is a map whose keys must be integers")
    of_strings = isinstance(input_type.value, TensorType) and input_type.value.dtype == STRING
    return {key: _text(name, x) for key, x in value.items()} if of_strings else value


def _inner(name: str, value: RunValue, input_type: Type) -> RunValue:
    """Convert an element of a sequence or an optional. Its shape is checked in each run, since
    plans depend on the types of elements."""
    inner = convert(name, value, input_type)
    if isinstance(input_type, TensorType):
        _check_shape(name, input_type, inner)
    return inner


def _of_any_type(name: str, value: RunValue) -> RunValue:
    """Convert a value for an input without a declared type, which takes the value's type."""
    if isinstance(value, list | tuple):
        return [_of_any_type(f"{name}[{i}]", x) for i, x in enumerate(value)]
    if value is None or isinstance(value, dict):
        return value
    return convert(name, value, TensorType())


def from_python(value: RunValue, dtype: np.dtype) -> np.ndarray:
    """Convert lists and numbers, which have no dtype, to an array of ``dtype``. Raises
    ``TypeError``, ``ValueError`` or ``OverflowError`` for values that do not fit."""
    try:
        array = np.asarray(value, STRING if dtype == STRING else None)
    except ValueError as error:
        if "inhomogeneous" not in str(error):
            raise
        raise ValueError("its rows have unequal lengths; pad them to the same length") from error
    if dtype == STRING:
        return array
    number = {"b": bool, "i": Integral, "u": Integral}.get(dtype.kind, Number)
    if array.dtype.kind in "USTMmO" and not all(isinstance(x, number) for x in array.flat):
        raise TypeError("its values are not all numbers")  # NumPy would parse strings
    # A number may be converted to a wider kind, never to a narrower one: 1.5 is not an integer.
    ranks = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if array.size and ranks.get(array.dtype.kind, 0) > ranks.get(dtype.kind, 2):
        raise TypeError(f"{array.dtype} does not fit {dtype}")
    return np.asarray(value, dtype)


def _what(value: RunValue) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {dtype_name(value.dtype)} and shape {value.shape}"
    return f"a {type(value).__name__}"


def check_dims(inputs: Sequence[Value], values: RunValues) -> None:
    """Raise ``InvalidInput`` unless dims match the declared ones, and are equal by name."""
    bound: dict[str, tuple[int, str]] = {}
    for declared, value in zip(inputs, values, strict=True):
        if isinstance(declared.type, TensorType):
            _check_shape(declared.name, declared.type, value, bound)


def feeds_fit(inputs: Sequence[Value], values: RunValues) -> bool:
    """Whether ``check_dims`` accepts the values."""
    try:
        check_dims(inputs, values)
    except InvalidInput:
        return False
    return True


def _check_shape(
    name: str,
    input_type: TensorType,
    array: np.ndarray,
    bound: dict[str, tuple[int, str]] | None = None,
) -> None:
    """Check the dims of ``array``. ``bound``: the size of each named dim, and where it was set."""
    if input_type.shape is None:
        return
    if len(input_type.shape) != array.ndim:
        raise InvalidInput(
            f"input {name!r} has rank {len(input_type.shape)} ({input_type}), "
            f"an array of shape {array.shape} was given{_rank_hint(input_type.shape, array.shape)}"
        )
    for axis, (dim, size) in enumerate(zip(input_type.shape, array.shape, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise InvalidInput(
                f"input {name!r} must have {dim} at axis {axis} ({input_type}), "
                f"an array of shape {array.shape} was given"
                f"{_order_hint(input_type.shape, array.shape)}"
            )
        if isinstance(dim, str) and bound is not None:
            first, where = bound.setdefault(dim, (size, f"{name!r} axis {axis}"))
            if first != size:
                message = f"input {name!r}: dim {dim!r} at axis {axis} is {size}"
                raise InvalidInput(f"{message}, but {first} at {where}")


def _fit(dims: Shape, shape: Sequence[int]) -> bool:
    """Whether a shape matches the declared dims; unknown dims match any size."""
    return len(dims) == len(shape) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(dims, shape, strict=True)
    )


def _rank_hint(dims: Shape, shape: Sequence[int]) -> str:
    """Return a hint to add or to remove a dim of 1, if the array would then fit; else ""."""
    if _fit(dims, [1, *shape]):
        return "; add a first dim of 1 with array[np.newaxis]"
    if _fit(dims, [*shape, 1]):
        return "; add a last dim of 1 with array[..., np.newaxis]"
    for axis, size in enumerate(shape):
        if size == 1 and _fit(dims, [*shape[:axis], *shape[axis + 1 :]]):
            return f"; remove its dim of 1 with array.squeeze({axis})"
    return ""


def _order_hint(dims: Shape, shape: Sequence[int]) -> str:
    """Return a hint to move one axis, such as channels, if the array would then fit; else ""."""
    axes = range(len(shape))
    # The first axis is tried last: it is mostly the batch, which stays in place.
    for source in sorted(axes, key=lambda axis: (axis == 0, -axis)):
        others = [axis for axis in axes if axis != source]
        for target in sorted(axes, key=lambda axis: axis == 0):
            order = [*others[:target], source, *others[target:]]
            if _fit(dims, [shape[axis] for axis in order]):
                return f"; reorder its axes with array.transpose{(*order,)}"
    return ""


def checked(input_type: Type, *, inside: bool = False) -> Type:
    """Return the part of an input's type that is checked when a value is fed. Names of dims
    ``inside`` sequences and optionals are dropped: they may differ between elements."""
    if isinstance(input_type, SequenceType | OptionalType):
        return type(input_type)(checked(input_type.element, inside=True))
    if inside and isinstance(input_type, TensorType) and input_type.shape is not None:
        dims = tuple([dim if isinstance(dim, int) else None for dim in input_type.shape])
        return TensorType(input_type.dtype, dims)
    return input_type
