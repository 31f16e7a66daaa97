"""Registration of TensorFlow's operations, and helpers to read attributes and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np

from penstock.core.types import ANY, Dim, Shape, ShapeError, TensorType, Type, find_dtype
from penstock.ir.op import Attrs, Consts, Infer, Types
from penstock.ops import registry
from penstock.ops.common.shape_rules import tensor

T = TypeVar("T")
Outputs: TypeAlias = np.ndarray | tuple[np.ndarray, ...]

operator = partial(registry.operator, domain=registry.TENSORFLOW)
array_operator = partial(registry.array_operator, domain=registry.TENSORFLOW)


# Types.


def dtype_only(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """``infer`` for one output with the dtype of the first input and an unknown shape."""
    return (TensorType(tensor(types, 0).dtype),)


def sized(shape: Callable[..., Sequence[int]], *contents: int, index: int = 0) -> Infer:
    """``infer`` for one output with the dtype of input ``index``. The function ``shape`` computes
    its shape from the inputs, as elements (``contents``) or dims, and from the attributes in its
    signature; if these are unknown or invalid, the shape is unknown until run time.
    """

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype, places = tensor(types, index).dtype, [i % len(types) for i in contents]
        given = [consts[i] if i in places else tensor(types, i).shape for i in range(len(types))]
        if all(x is not None for x in given) and all(
            isinstance(dim, int) for x in given if isinstance(x, tuple) for dim in x
        ):
            with suppress(ShapeError):
                return (TensorType(dtype, tuple(shape(*given))),)
        return (TensorType(dtype),)

    return infer


def of_type(name: str) -> Infer:
    """``infer`` for one output whose dtype is the value of attribute ``name``."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dtype = find_dtype(attrs.get(name, ""))
        return (ANY if dtype is None else TensorType(dtype),)

    return infer


# Attributes and inputs.


def named_dtype(attrs: Attrs, name: str, default: str = "", codes: str = "") -> np.dtype:
    """The dtype in attribute ``name``; its NumPy kind must be in ``codes``, if not empty."""
    dtype = find_dtype(attrs.get(name) or default)
    if dtype is None or (codes and dtype.kind not in codes):
        raise ShapeError(f"{name} is {attrs.get(name)!r}, which is not a supported element type")
    return dtype


def out_type(attrs: Attrs) -> np.dtype:
    """The integer dtype of results that are indices or counts, in attribute ``out_type``."""
    return named_dtype(attrs, "out_type", "int32", "iu")


OUT_TYPE: registry.Prepared = {"out_type": lambda node: out_type(node.attrs)}


def integer(x: np.ndarray, name: str) -> int:
    """The value of an input that must be an integer tensor of one element."""
    if x.size != 1 or x.dtype.kind not in "iu":
        raise ShapeError(f"{name} must be one integer, not {x.dtype}{list(x.shape)}")
    return int(x.item())


def count(x: np.ndarray, name: str) -> int:
    """The value of an input that must be a count, an integer scalar of at least 0."""
    number = integer(x, name)
    if x.ndim or number < 0:
        raise ShapeError(f"{name} must be a scalar of at least 0, not {x.tolist()}")
    return number


def lengths(values: Sequence[Dim] | None) -> Shape | None:
    """Check the known elements of a tensor of dims, and return them as a shape."""
    if values is not None and any(isinstance(value, int) and value < 0 for value in values):
        raise ShapeError(f"dims must not be negative: {list(values)}")
    return None if values is None else tuple(values)


def dims_of(shape: Sequence[int | None] | None) -> Shape | None:
    """Convert a shape in attributes or tensors, in which -1 means an unknown dim."""
    return None if shape is None else tuple([None if d is None or d < 0 else d for d in shape])


def handle(type_: type[T], name: str) -> Callable[..., T]:
    """Return a function that checks that a value is a ``type_`` and returns it. Its optional second
    argument is the required element type."""

    def checked(value: object, dtype: str = "") -> T:
        if not isinstance(value, type_):
            raise ShapeError(f"the input must be a {name}, not a {type(value).__name__}")
        # Elements that are handles have dtype None.
        if dtype and find_dtype(dtype) != value.dtype:  # type: ignore[attr-defined]
            raise ShapeError(f"the elements of the {name} must have type {dtype}, as the node says")
        return value

    return checked


def outputs(parts: Sequence[np.ndarray]) -> Outputs:
    """The return value of a kernel with these outputs: a tuple, or the single output itself."""
    return parts[0] if len(parts) == 1 else tuple(parts)
