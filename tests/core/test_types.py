"""Types: what they say, what their union is, and what may be given where."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import (
    ANY,
    BOOL,
    FLOAT32,
    INT64,
    MAX_DATA,
    STRING,
    MapType,
    OptionalType,
    SequenceType,
    TensorType,
    Type,
    accepts,
    constant_type,
    dtype_name,
    dtypes,
    join,
    type_of,
)

UNKNOWN = TensorType()
DOUBLE = TensorType(np.dtype(np.float64), (3, 4))
MATRIX = TensorType(FLOAT32, (3, 4))
BATCH = TensorType(FLOAT32, ("N", 4))
VAGUE = TensorType(FLOAT32, (None, 4))
FLOATS = SequenceType(MATRIX)


def test_static_type_has_a_size_in_bytes() -> None:
    assert MATRIX.static and MATRIX.dims == (3, 4) and MATRIX.rank == 2
    assert MATRIX.nbytes == 48
    assert TensorType(FLOAT32, ()).nbytes == 4
    assert TensorType(FLOAT32, (0, 5)).nbytes == 0
    assert TensorType(np.dtype(ml_dtypes.int4), (3,)).nbytes == 3


@pytest.mark.parametrize("kind", [UNKNOWN, BATCH, VAGUE, TensorType(None, (3,))])
def test_a_type_with_gaps_is_not_static(kind: TensorType) -> None:
    assert not kind.static


def test_tensor_type_of_unknown_dtype_is_not_float64() -> None:
    """To NumPy, None and float64 are equal as dtypes."""
    known, unknown = DOUBLE, TensorType(None, (3, 4))
    assert known != unknown
    assert unknown != known
    assert accepts(known, unknown) and accepts(unknown, known)
    again = TensorType(np.dtype(np.float64), (3, 4))
    assert known == again and hash(known) == hash(again)


def test_rank_of_an_unknown_shape_is_none() -> None:
    assert UNKNOWN.rank is None
    assert TensorType(FLOAT32, ()).rank == 0


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MATRIX, "float32[3, 4]"),
        (BATCH, "float32[N, 4]"),
        (VAGUE, "float32[?, 4]"),
        (UNKNOWN, "?[...]"),
        (TensorType(STRING, ()), "string[]"),
        (TensorType(np.dtype(ml_dtypes.bfloat16), (2,)), "bfloat16[2]"),
        (FLOATS, "seq(float32[3, 4])"),
        (OptionalType(FLOATS), "optional(seq(float32[3, 4]))"),
        (MapType(INT64, MATRIX), "map(int64, float32[3, 4])"),
        (ANY, "any"),
    ],
)
def test_types_are_printed_as_text(kind: Type, text: str) -> None:
    assert str(kind) == text


def test_every_dtype_has_a_name_of_its_own() -> None:
    assert {"bool", "float32", "string", "bfloat16", "int4", "float8_e4m3fn"} <= dtypes().keys()
    for name, dtype in dtypes().items():
        assert dtype_name(dtype) == name
    assert len(set(dtypes().values())) == len(dtypes())


# Types of values


def test_constants_carry_what_shape_arithmetic_needs() -> None:
    assert constant_type(np.array([2, 3])) == TensorType(INT64, (2,), (2, 3))
    assert constant_type(np.array(7, np.int32)).data == (7,)
    assert constant_type(np.zeros((2, 2), np.int64)).data is None, "rank 2"
    assert constant_type(np.array([1.5])).data is None, "not integer"
    assert constant_type(np.array([True])).data is None
    assert constant_type(np.zeros(MAX_DATA, np.int64)).data == (0,) * MAX_DATA
    assert constant_type(np.zeros(MAX_DATA + 1, np.int64)).data is None, "too long"
    assert all(type(x) is int for x in constant_type(np.array([1, 2])).data or ())


def test_type_without_data_has_shape_and_dtype_alone() -> None:
    assert constant_type(np.array([2, 3])).without_data() == TensorType(INT64, (2,))
    assert MATRIX.without_data() is MATRIX


def test_types_of_run_time_values() -> None:
    a, b = np.zeros((3, 4), np.float32), np.zeros((5, 4), np.float32)
    assert type_of(a) == MATRIX
    assert type_of([a, b]) == SequenceType(VAGUE)
    assert type_of([a, b, a, [a], [b]]) == SequenceType(ANY)
    assert type_of([[a], [b]]) == SequenceType(SequenceType(VAGUE))
    assert type_of([]) == SequenceType(ANY)
    assert type_of(None) == OptionalType(ANY)
    assert type_of({"a": 1}) == ANY


# Unions


@pytest.mark.parametrize(
    ("a", "b", "union"),
    [
        (MATRIX, MATRIX, MATRIX),
        (MATRIX, TensorType(FLOAT32, (3, 5)), TensorType(FLOAT32, (3, None))),
        (MATRIX, BATCH, VAGUE),
        (BATCH, BATCH, BATCH),
        (BATCH, TensorType(FLOAT32, ("M", 4)), VAGUE),
        (MATRIX, TensorType(FLOAT32, (3,)), TensorType(FLOAT32, None)),
        (MATRIX, TensorType(INT64, (3, 4)), TensorType(None, (3, 4))),
        (MATRIX, UNKNOWN, UNKNOWN),
        (DOUBLE, TensorType(None, (3, 4)), TensorType(None, (3, 4))),
        (TensorType(INT64, (2,), (1, 2)), TensorType(INT64, (2,), (1, 3)),
         TensorType(INT64, (2,), (1, None))),
        (TensorType(INT64, (2,), (1, 2)), TensorType(INT64, (2,)), TensorType(INT64, (2,))),
        (TensorType(INT64, (1,), (1,)), TensorType(INT64, (2,), (1, 2)),
         TensorType(INT64, (None,))),
        (FLOATS, SequenceType(BATCH), SequenceType(VAGUE)),
        (OptionalType(MATRIX), OptionalType(BATCH), OptionalType(VAGUE)),
        (OptionalType(MATRIX), MATRIX, OptionalType(MATRIX)),
        (OptionalType(ANY), MATRIX, OptionalType(MATRIX)),
        (MATRIX, FLOATS, ANY),
        (MATRIX, ANY, ANY),
        (MapType(INT64, MATRIX), MATRIX, ANY),
    ],
)  # fmt: skip
def test_join_of_two_types_accepts_both(a: Type, b: Type, union: Type) -> None:
    assert join(a, b) == union == join(b, a)
    assert accepts(union, a) and accepts(union, b)


# What may be given where


@pytest.mark.parametrize(
    ("declared", "actual"),
    [
        (ANY, MATRIX),
        (MATRIX, ANY),
        (MATRIX, MATRIX),
        (BATCH, MATRIX),
        (VAGUE, MATRIX),
        (MATRIX, BATCH),
        (UNKNOWN, MATRIX),
        (MATRIX, UNKNOWN),
        (OptionalType(MATRIX), MATRIX),
        (OptionalType(MATRIX), OptionalType(ANY)),
        (SequenceType(BATCH), FLOATS),
        (MapType(INT64, MATRIX), MapType(INT64, MATRIX)),
    ],
)
def test_type_accepts_a_more_precise_one(declared: Type, actual: Type) -> None:
    assert accepts(declared, actual)


@pytest.mark.parametrize(
    ("declared", "actual"),
    [
        (MATRIX, TensorType(FLOAT32, (3, 5))),
        (MATRIX, TensorType(FLOAT32, (12,))),
        (MATRIX, TensorType(BOOL, (3, 4))),
        (MATRIX, DOUBLE),
        (DOUBLE, MATRIX),
        (BATCH, TensorType(FLOAT32, (3, 5))),
        (MATRIX, FLOATS),
        (FLOATS, MATRIX),
        (MATRIX, OptionalType(MATRIX)),
        (OptionalType(MATRIX), FLOATS),
        (OptionalType(MATRIX), OptionalType(TensorType(BOOL, (3, 4)))),
        (FLOATS, SequenceType(TensorType(INT64, (3, 4)))),
        (MapType(INT64, MATRIX), MATRIX),
    ],
)
def test_type_refuses_a_contradicting_one(declared: Type, actual: Type) -> None:
    assert not accepts(declared, actual)
