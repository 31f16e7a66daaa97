"""Feeds: conversion to the types of inputs, and the checks of ranks and dims."""

from __future__ import annotations

import sys
from fractions import Fraction

import numpy as np
import pytest

from penstock.compiler.options import EXECUTORS
from penstock.core.errors import InvalidInput
from penstock.core.types import ANY, STRING, MapType, OptionalType, SequenceType, TensorType
from penstock.executors import feeds
from penstock.executors.feeds import check_dims, checked, convert, feeds_fit
from penstock.host.native import library
from penstock.ir.graph import Value
from tests.support.onnx_text import compile_text

FLOAT = TensorType(np.dtype(np.float32), ("N",))
INT = TensorType(np.dtype(np.int64), None)
TEXT = TensorType(STRING, None)


class ArrayLike:
    def __array__(self, *arguments, **options):
        return np.ones(2, np.float32)


class DlpackOnly:
    def __init__(self) -> None:
        self.array = np.ones(2, np.float32)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Broken:
    def __array__(self, *arguments, **options):
        raise OSError("no such device")


@pytest.mark.parametrize(
    ("value", "input_type", "expected"),
    [
        ([1, 2.5], FLOAT, np.array([1, 2.5], np.float32)),
        (3, INT, np.array(3)),
        (True, INT, np.array(1)),
        ([], FLOAT, np.array([], np.float32)),
        (ArrayLike(), FLOAT, np.ones(2, np.float32)),
        (DlpackOnly(), FLOAT, np.ones(2, np.float32)),
        (np.float32(2), FLOAT, np.array(2, np.float32)),
        ("ab", TEXT, np.array("ab", object)),
        (["a", "b"], TEXT, np.array(["a", "b"], object)),
        (np.array(["a", "b"]), TEXT, np.array(["a", "b"], object)),
        (np.array([b"a"]), TEXT, np.array(["a"], object)),
        (b"a", TEXT, np.array("a", object)),
        (b"\xff\x00", TEXT, np.array("\udcff\x00", object)),
        ([b"\xff\x00"], TEXT, np.array(["\udcff\x00"], object)),
        ([["a", "\u00e9".encode()]], TEXT, np.array([["a", "\u00e9"]], object)),
        (np.array([[b"a", np.str_("b")]], object), TEXT, np.array([["a", "b"]], object)),
        ([b"a", "b"], TensorType(), np.array(["a", "b"], object)),
        (np.ma.array([1, 2], np.float32), FLOAT, np.array([1, 2], np.float32)),
        (np.ma.array([1, 2], np.float32, mask=[0, 0]), FLOAT, np.array([1, 2], np.float32)),
    ],
)
def test_convert_value_that_fits_gives_array_of_the_inputs_dtype(value, input_type, expected):
    array = convert("x", value, input_type)
    assert isinstance(array, np.ndarray)
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_convert_array_of_the_inputs_dtype_is_not_copied():
    array = np.ones(3, np.float32)
    assert convert("x", array, FLOAT) is array


@pytest.mark.parametrize(
    ("value", "input_type", "message"),
    [
        (np.ones(2), FLOAT, r"'x' must be float32, not float64; convert it with .*astype"),
        (np.ones(2, np.int64), FLOAT, "must be float32, not int64"),
        (np.array(["a"]), TensorType(np.dtype(float)), "float64, not an array of strings; give it"),
        (
            np.array([None]),
            FLOAT,
            r"must be float32, not object; convert it with .astype\('float32'\)",
        ),
        ([Fraction(1, 2)], INT, "cannot be converted from a list: its values are not all numbers"),
        (
            [2**70],
            TensorType(np.dtype(bool)),
            "cannot be converted from a list: its values are not all numbers",
        ),
        ([2**70], INT, "cannot be converted from a list"),
        (1.5, INT, "cannot be converted from a float: float64 does not fit int64"),
        ([1j], FLOAT, "cannot be converted from a list: complex128 does not fit float32"),
        ([[1], [2, 3]], FLOAT, "its rows have unequal lengths; pad them to the same length"),
        ("one", FLOAT, "cannot be converted from a str"),
        ("1", FLOAT, "cannot be converted from a str: its values are not all numbers"),
        (["1", "2"], INT, "cannot be converted from a list: its values are not all numbers"),
        (b"1", FLOAT, "cannot be converted from a bytes: its values are not all numbers"),
        (None, FLOAT, "cannot be converted from a NoneType: its values are not all numbers"),
        (Broken(), FLOAT, "cannot be converted from a Broken: no such device"),
        (np.ones(2), SequenceType(FLOAT), "is a sequence: give a list, not an array of float64"),
        (np.array([1, 2], object), TEXT, "'x' takes strings, not 1$"),
        (np.array(["a", None], object), TEXT, "'x' takes strings, not None$"),
        (np.array([1, 2], object), TensorType(), "'x' takes strings, not 1$"),
        ([["a"], ["b", "c"]], TEXT, r"'x' takes strings, not \['a'\]$"),
        (["a", 1], TEXT, "'x' takes strings, not 1$"),
        (["a", 1], TensorType(), "'x' takes strings, not 1$"),
        (1.5, TEXT, "'x' takes strings, not 1.5$"),
        (np.ones(2), TEXT, r"'x' must be string, not float64; convert it with .astype"),
        (
            np.ones(2),
            TensorType(np.dtype(np.int8)),
            r"real numbers, give their codes.*else convert",
        ),
        ({1: 1.0}, MapType(STRING, FLOAT), "'x' takes strings, not 1$"),
        ({1: 1}, MapType(np.dtype(np.int64), TEXT), "'x' takes strings, not 1$"),
        ({"a": 1}, MapType(np.dtype(np.int64), FLOAT), "'x' is a map whose keys must be integers"),
        (np.ma.array([1, 2], np.float32, mask=[0, 1]), FLOAT, r"masked elements.*\.filled\("),
        ([np.ma.array([1], np.float32, mask=[1])], FLOAT, "masked elements"),
        ([1.0, np.ma.masked], FLOAT, "masked elements"),
        (np.ma.array(["a"], mask=[1]), ANY, "masked elements"),
        ([1], MapType(np.dtype(np.int64), FLOAT), "is a map: give a dict, not a list"),
    ],
)
def test_convert_value_that_does_not_fit_is_refused_with_the_reason(value, input_type, message):
    with pytest.raises(InvalidInput, match=message):
        convert("x", value, input_type)


@pytest.mark.parametrize("ports", ["float[N] x", "seq(float[N]) x"])
def test_list_that_contains_itself_is_refused(ports):
    kind = ports[:-2]
    session = compile_text(f"g ({ports}) => ({kind} y) {{ y = Identity(x) }}")
    endless: list = []
    endless.append(endless)
    with pytest.raises(InvalidInput, match="input 'x"):
        session.run({"x": endless})


@pytest.mark.parametrize("input_type", [FLOAT, TensorType()])
def test_convert_brings_bytes_into_the_order_of_the_machine(input_type):
    order = ">" if sys.byteorder == "little" else "<"
    array = convert("x", np.array([1, 2], f"{order}f4"), input_type)
    assert array.dtype.isnative
    np.testing.assert_array_equal(array, np.array([1, 2], np.float32), strict=True)


def test_convert_sequence_converts_and_checks_each_element():
    pairs = SequenceType(TensorType(np.dtype(np.float32), (2,)))
    first, second = convert("s", [[1, 2], np.ones(2, np.float32)], pairs)
    assert first.dtype == second.dtype == np.float32
    with pytest.raises(InvalidInput, match=r"'s\[1\]' must have 2 at axis 0"):
        convert("s", [[1, 2], [1, 2, 3]], pairs)
    with pytest.raises(InvalidInput, match=r"'s\[0\]' has rank 1"):
        convert("s", [[[1, 2]]], pairs)


def test_convert_optional_takes_none_or_a_value():
    optional = OptionalType(FLOAT)
    assert convert("o", None, optional) is None
    assert convert("o", [1], optional).dtype == np.float32


def test_convert_undeclared_type_keeps_the_values_own():
    assert convert("x", np.ones(2, np.int8), ANY).dtype == np.int8
    array, nothing = convert("x", [np.ones(2), None], ANY)
    assert array.dtype == np.float64
    assert nothing is None
    assert convert("x", {"a": 1}, ANY) == {"a": 1}


def test_check_dims_equal_dims_of_one_name_pass():
    values = [Value("a", FLOAT), Value("b", FLOAT), Value("s", SequenceType(FLOAT))]
    arrays = [np.ones(3), np.ones(3), [np.ones(1)]]
    check_dims(values, arrays)
    assert feeds_fit(values, arrays)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3,), (4,)), "'b': dim 'N' at axis 0 is 4, but 3 at 'a' axis 0"),
        (((3, 1), (3,)), r"'a' has rank 1 .* shape \(3, 1\)"),
    ],
)
def test_check_dims_that_contradict_are_refused_with_their_place(shapes, message):
    values, arrays = [Value("a", FLOAT), Value("b", FLOAT)], [np.ones(s) for s in shapes]
    with pytest.raises(InvalidInput, match=message):
        check_dims(values, arrays)
    assert not feeds_fit(values, arrays)


def test_checked_type_drops_names_of_dims_inside_sequences():
    pairs = TensorType(np.dtype(np.float32), ("N", 2))
    nameless = TensorType(np.dtype(np.float32), (None, 2))
    assert checked(pairs) == pairs
    assert checked(SequenceType(pairs)) == SequenceType(nameless)
    assert checked(OptionalType(SequenceType(pairs))) == OptionalType(SequenceType(nameless))


def test_strings_of_the_shape_of_the_run_before_are_checked_and_not_converted(monkeypatch):
    session = compile_text("g (string[N] x) => (string[M] y) { y = Concat<axis=0>(x, x) }")
    texts = np.array(["a", "é", "b"], object)
    session.run({"x": texts})
    for x in (np.array(["a", b"\xc3\xa9", "b"], object), np.array([*"a-é-b"], object)[::2]):
        assert session.run({"x": x})["y"].tolist() == ["a", "é", "b"] * 2
    with pytest.raises(InvalidInput, match=r"'x' takes strings, not None$"):
        session.run({"x": np.array(["a", "b", None], object)})
    if library() is not None:
        monkeypatch.delattr(feeds, "convert")
    assert session.run({"x": texts})["y"].tolist() == ["a", "é", "b"] * 2


@pytest.mark.parametrize("input_type", ["optional(float[2])", "seq(float[2])", "seq(double[2])"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_array_of_float64_is_converted_where_an_input_is_no_tensor(input_type, executor) -> None:
    text = f"g ({input_type} x) => ({input_type} y) {{ y = Identity(x) }}"
    session = compile_text(text, executor=executor)
    with pytest.raises(InvalidInput, match=r"'x' (must be float32, not float64|is a sequence)"):
        session.run({"x": np.ones(2)})


@pytest.mark.parametrize(
    ("dims", "shape", "hint"),
    [
        ((None, 5, 3), (5, 3), "; add a first dim of 1 with array[np.newaxis]"),
        (("N", 1), (5,), "; add a last dim of 1 with array[..., np.newaxis]"),
        ((5, 3), (5, 1, 3), "; remove its dim of 1 with array.squeeze(1)"),
        ((5, 3), (2, 4, 3), None),
        ((1, 5, 3), (1, 3, 5), "; reorder its axes with array.transpose(0, 2, 1)"),
        (("N", 3, "H", "W"), (1, 8, 9, 3), "; reorder its axes with array.transpose(0, 3, 1, 2)"),
        (("N", "H", "W", 3), (1, 3, 8, 9), "; reorder its axes with array.transpose(0, 2, 3, 1)"),
        (("N", 2), (2, 3), "; reorder its axes with array.transpose(1, 0)"),
        ((1, 5, 3), (1, 4, 5), None),
    ],
)
def test_array_of_other_shape_is_refused_with_what_would_fit(dims, shape, hint):
    declared = Value("x", TensorType(np.dtype(np.float32), dims))
    with pytest.raises(InvalidInput) as caught:
        check_dims([declared], [np.zeros(shape, np.float32)])
    if hint is None:
        assert str(caught.value).endswith("was given")
    else:
        assert str(caught.value).endswith(hint)


class Column:
    """A column of a DataFrame, as pandas and polars have it."""

    def __init__(self, values: np.ndarray) -> None:
        self.dtype = values.dtype
        self.values = values

    def to_numpy(self) -> np.ndarray:
        return self.values

    def __array__(self, *arguments, **options):
        return self.values


def test_column_of_table_is_fed_as_a_matrix_of_one_column():
    features = TensorType(np.dtype(np.float32), ("N", 1))
    values = np.array([1, 2], np.float32)
    assert convert("x", Column(values), features).tolist() == [[1], [2]]
    assert convert("x", Column(values), FLOAT).tolist() == [1, 2]
    texts = convert("x", Column(np.array(["a", "b"])), TensorType(STRING, (None, 1)))
    assert texts.tolist() == [["a"], ["b"]]
    # An array has the rank that its owner gave it.
    assert convert("x", values, features).shape == (2,)


def test_column_of_table_of_another_dtype_is_refused_as_an_array_is():
    with pytest.raises(InvalidInput, match=r"'x' must be float32, not float64; .*astype"):
        convert("x", Column(np.ones(2)), TensorType(np.dtype(np.float32), ("N", 1)))
