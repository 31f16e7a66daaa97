"""Declared element types as types of values."""

from __future__ import annotations

from penstock.types import ANY, Shape, TensorType, Type, dtypes


def declared_type(name: str | None, ref: bool = False, shape: Shape | None = None) -> Type:
    """The type of a value whose element type has this name; handles can be anything."""
    if ref or not isinstance(name, str) or name not in dtypes():
        return ANY
    return TensorType(dtypes()[name], shape)
