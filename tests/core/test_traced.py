"""Formulas give what the same code gives for other numbers, or nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.traced import (
    EXTREMES,
    TRACED,
    NumberTrace,
    UntraceableError,
    computed,
    deferred,
    int64s,
)
from penstock.ir.layout import packed_strides, strides_of


def chosen(rows, width):
    """Numbers of a kernel, with all that families do to dims."""
    blocks = max(-(-rows // 64), 1) if rows > 64 else 1
    smaller, larger = EXTREMES[type(rows) in TRACED]
    most = smaller(larger(rows // 3, 2), width)
    units = (math.ceil(rows / blocks), math.floor(width / 3), round(rows / 7), abs(rows - width))
    strides = [1]
    for dim in (width, rows):
        strides.append(strides[-1] * dim)
    whole = [*divmod(rows * width, 5), *divmod(1000, rows)]
    table, narrow = int64s([rows, *strides], [rows % 256, 3])
    packed = deferred(bytes, deferred(tuple, narrow))
    flat = tuple(range(min(width, 3))), f"{width > 7}", rows == width, not rows % 2
    lcm = computed(math.lcm, 4, rows)
    return (
        "kernel",
        units,
        tuple(strides),
        tuple(whole),
        table,
        packed,
        flat,
        lcm,
        most,
        math.prod((rows, width, 2)),
        sum([rows, width]),
        2**2 * rows**2,
        -width,
        7 - rows,
        3 / width,
    )


def same(a, b):
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and np.array_equal(a, b)


numbers = st.integers(1, 300)


@given(numbers, numbers, numbers, numbers)
def test_formula_of_other_numbers_gives_what_the_code_gives_or_none(rows, width, other, another):
    trace = NumberTrace()
    formula = trace.formula(chosen(trace.number(rows), trace.number(width)))
    assert same(formula([rows, width]), chosen(rows, width))
    result = formula([other, another])
    assert result is None or same(result, chosen(other, another))
    if (rows > 64) is (other > 64) and min(width, another) > 8 and rows % 2 == other % 2:
        assert (result is None) is ((rows == width) is not (other == another))


@pytest.mark.parametrize(
    "read",
    [
        lambda n: [*range(n)],
        lambda n: np.zeros(n),
        lambda n: np.arange(n, dtype=np.int64),
        lambda n: np.array([n, 2], np.int64),
        lambda n: [1, 2, 3, 4, 5, 6][n],
        lambda n: (1, 2, 3, 4, 5, 6)[:n],
        lambda n: bytes(n),
        lambda n: float(n),
        lambda n: math.sqrt(n),
        lambda n: math.gcd(n, 6),
        lambda n: f"{n}",
        lambda n: str(n),
        lambda n: (5).to_bytes(n, "little"),
    ],
)
def test_plain_numbers_are_guards(read):
    trace = NumberTrace()
    n = trace.number(4)
    read(n)
    formula = trace.formula((n,))
    assert formula([4]) == (4,)
    assert formula([5]) is None


def test_number_is_an_int_without_a_hash():
    n = NumberTrace().number(3)
    assert isinstance(n, int)
    with pytest.raises(UntraceableError):
        hash(n)
    with pytest.raises(UntraceableError):
        hash((1, n))


def test_array_of_objects_is_no_result():
    trace = NumberTrace()
    n = trace.number(3)
    with pytest.raises(UntraceableError):
        trace.formula((np.array([n, 2]),))


def test_numbers_of_numpy_leave_operations_to_traced_ones():
    trace = NumberTrace()
    n = trace.number(3)
    formula = trace.formula((np.int64(2) * n, n + np.float64(0.5)))
    assert formula([4]) == (8, 4.5)


def test_operation_with_an_array_cannot_be_traced():
    n = NumberTrace().number(3)
    with pytest.raises(UntraceableError):
        np.arange(3) * n


def test_strides_of_traced_dims_are_traced():
    trace = NumberTrace()
    strides = strides_of((2, trace.number(3), 5), 4)
    assert trace.formula(strides)([7]) == packed_strides((2, 7, 5), 4) == (140, 20, 4)
