"""Cast, CastLike, BitCast, Constant."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.core.types import BOOL, INT64, ShapeError, TensorType
from tests.ops.cases import data_of, f32, fails, float_type, i64, infer, int_type, run
from tests.ops.harness import check_node, node_model, run_ort

NATIVE = [
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64", "bool"),
]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
SMALL = ["bfloat16", *FLOAT8, "float4_e2m1fn", "int4", "uint4", "int2", "uint2"]
E8M0 = int(TensorProto.FLOAT8E8M0)


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def code_of(name: str) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype_of(name)))


@pytest.mark.parametrize("source", NATIVE + SMALL)
@pytest.mark.parametrize("target", NATIVE + SMALL)
def test_cast_between_all_types(source: str, target: str) -> None:
    # Values that every type has, so that the way of the cast does not matter.
    unsigned = "u" in source[:1] or "u" in target[:1] or "bool" in (source, target)
    values = np.array([[0, 1], [1, 0]] if unsigned else [[0, 1], [-1, 0]], np.float32)
    x = values.astype(dtype_of(source))
    want = values.astype(dtype_of(target))
    attrs = {"to": code_of(target)}
    check_node("Cast", [x], attrs, expected=[want])
    check_node("Cast", [x.T], attrs, expected=[want.T])
    check_node("CastLike", [x, np.zeros(1, dtype_of(target))], expected=[want])


@pytest.mark.parametrize("target", [*NATIVE, *SMALL])
def test_casts_of_scalars_and_nothing(target: str) -> None:
    want = np.ones((), np.float32).astype(dtype_of(target))
    check_node("Cast", [np.ones((), np.float32)], {"to": code_of(target)}, expected=[want])
    empty = np.empty((0, 2), dtype_of(target))
    check_node("Cast", [np.empty((0, 2), np.float32)], {"to": code_of(target)}, expected=[empty])


@pytest.mark.parametrize("source", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("target", FLOAT8)
@pytest.mark.parametrize("saturate", [0, 1])
def test_cast_to_float8_out_of_range(source: str, target: str, saturate: int) -> None:
    largest = float(ml_dtypes.finfo(dtype_of(target)).max)
    values = [0.0, -0.0, 0.3, -1.7, largest, -largest, largest * 1.01, largest * 1.5, -largest * 2]
    x = np.array([*values, np.inf, -np.inf, np.nan]).astype(dtype_of(source))
    (y,) = run("Cast", [x], {"to": code_of(target), "saturate": saturate})
    got, given = y.astype(np.float64), x.astype(np.float64)
    exact = dtype_of(target)
    for value, result in zip(given, got, strict=True):
        rounded = float(np.float64(value).astype(exact))
        if np.isnan(value):
            assert np.isnan(result)
        elif abs(value) <= largest or np.isfinite(rounded):
            assert result == rounded
        elif saturate:
            assert result == np.copysign(largest, value)
        elif target == "float8_e5m2":
            assert result == np.copysign(np.inf, value)
        else:
            assert np.isnan(result)
    if source == "float32":
        check_node("Cast", [x], {"to": code_of(target), "saturate": saturate}, expected=[y])


def test_cast_of_integers_to_float8_saturates() -> None:
    x = i64(1000, -1000, 3)
    want = np.array([448, -448, 3], ml_dtypes.float8_e4m3fn)
    check_node("Cast", [x], {"to": code_of("float8_e4m3fn")}, expected=[want])
    (y,) = run("Cast", [x], {"to": code_of("float8_e4m3fn"), "saturate": 0})
    assert np.isnan(y.astype(np.float32)).tolist() == [True, True, False]


@pytest.mark.parametrize("source", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("mode", "powers"),
    [("up", [-3, 1, 1, 1, 2]), ("down", [-4, 0, 0, 0, 2]), ("nearest", [-3, 0, 1, 1, 2])],
)
def test_cast_to_powers_of_two(source: str, mode: str, powers: list[int]) -> None:
    x = np.array([0.125, 1.25, 1.5, 1.75, 4]) - np.array([0.015625, 0, 0, 0, 0])
    want = (2.0 ** np.array(powers)).astype(ml_dtypes.float8_e8m0fnu)
    attrs = {"to": E8M0, "round_mode": mode}
    check_node("Cast", [x.astype(dtype_of(source))], attrs, expected=[want])


def test_cast_to_powers_of_two_out_of_range() -> None:
    x = np.array([0, 2.0**-130, 2.0**-127, 1.9 * 2.0**127, np.inf, np.nan], np.float32)
    for given in (x, x.astype(np.float64)):
        (y,) = run("Cast", [given], {"to": E8M0})
        assert y.view(np.uint8).tolist() == [0, 0, 0, 254, 254, 255]
        (y,) = run("Cast", [given], {"to": E8M0, "saturate": 0, "round_mode": "nearest"})
        assert y.view(np.uint8).tolist() == [255, 255, 0, 255, 255, 255]
    (y,) = run("Cast", [np.array([0, 1e300, 1e-300])], {"to": E8M0})
    assert y.view(np.uint8).tolist() == [0, 254, 0]
    small = y.astype(np.float32).astype(ml_dtypes.bfloat16)
    check_node("Cast", [small], {"to": E8M0}, expected=[y])
    (back,) = run("Cast", [y], {"to": code_of("float8_e5m2")})
    assert back.dtype == ml_dtypes.float8_e5m2
    fails("Cast", [f32(2)], {"to": E8M0, "round_mode": "sideways"}, "round_mode")


def test_casts_of_integers_wrap_around() -> None:
    check_node("Cast", [np.array([200, -129, 70000], np.int32)], {"to": code_of("int8")})
    check_node("Cast", [i64(-1, 2**33 + 5)], {"to": code_of("uint32")})
    small = np.array([-9, 17, 7], np.int32)
    for name in ("int4", "uint4", "int2", "uint2"):
        check_node("Cast", [small], {"to": code_of(name)}, expected=[small.astype(dtype_of(name))])
    floats = np.array([np.nan, -0.0, 0.0, 1e-30, -np.inf], np.float32)
    check_node("Cast", [floats], {"to": code_of("bool")})
    check_node(
        "Cast",
        [floats.astype(ml_dtypes.bfloat16)],
        {"to": code_of("bool")},
        expected=[np.array([True, False, False, True, True])],
    )
    check_node("Cast", [np.array([1.9, -1.9, 2.5], np.float32)], {"to": code_of("int32")})
    check_node("Cast", [np.array([1e300, -1e300, 1e-320])], {"to": code_of("float32")})


def test_cast_from_strings_matches_the_reference() -> None:
    numbers = np.array(["1.5", "INF", "-inf", "NaN", "1e-5", "+INF", "100"], object)
    for name in ("float32", "float64", "float16", "bfloat16", "float8_e5m2"):
        want = numbers.astype(np.float64).astype(dtype_of(name))
        if name == "float8_e5m2":
            want[[1, 2, 5]] = [57344, -57344, 57344]
        check_node("Cast", [numbers], {"to": code_of(name)}, expected=[want])
    whole = np.array([["10", "-3"], ["100.7", "0"]], object)
    for name in ("int64", "int8", "float32", "bool"):
        model = node_model("Cast", [whole], {"to": code_of(name)}, opset=21)
        if name != "bool":
            check_node("Cast", [whole], {"to": code_of(name)}, expected=run_ort(model, [whole]))
    check_node("Cast", [whole], {"to": code_of("bool")}, expected=[whole.astype(float) != 0])
    large = np.array([str(2**64 - 1)], object)
    want = np.array([2**64 - 1], np.uint64)
    check_node("Cast", [large], {"to": code_of("uint64")}, expected=[want])
    small = np.array(["3", "-2"], object)
    check_node(
        "Cast", [small], {"to": code_of("int4")}, expected=[np.array([3, -2], ml_dtypes.int4)]
    )
    for name in ("float32", "int32", "bool"):
        words = np.array(["Hello World!"], object)
        fails("Cast", [words], {"to": code_of(name)}, "convert string", ValueError)


def test_cast_to_strings_matches_the_reference() -> None:
    cases: list[tuple[np.ndarray, list[str]]] = [
        (np.array([1.5, 3.1415927, 0.1, -2], np.float32), ["1.5", "3.1415927", "0.1", "-2.0"]),
        (np.array([1 / 3]), ["0.3333333333333333"]),
        (np.array([np.nan, np.inf, -np.inf], np.float32), ["NaN", "INF", "-INF"]),
        (np.array([0.3], np.float16), ["0.3"]),
        (np.array([0.5, np.inf], ml_dtypes.bfloat16), ["0.5", "INF"]),
        (i64(2**62, -5), [str(2**62), "-5"]),
        (np.array([3, -8], ml_dtypes.int4), ["3", "-8"]),
        (np.array([True, False]), ["1", "0"]),
        (np.array(["a"], object), ["a"]),
    ]
    for x, want in cases:
        code = int(TensorProto.STRING)
        check_node("Cast", [x], {"to": code}, expected=[np.array(want, object)])
    (y,) = run("Cast", [np.array(1, np.int32)], {"to": int(TensorProto.STRING)})
    assert y.shape == ()
    assert y.item() == "1"


def test_cast_to_the_same_type_is_a_view() -> None:
    x = f32(3)
    (y,) = run("Cast", [x], {"to": code_of("float32")})
    assert y is x


def test_casts_of_unknown_types_share_no_memory() -> None:
    from penstock.frontends.onnx.importer import load_onnx

    x = f32(3)
    for name, inputs in (("Cast", [x]), ("CastLike", [x, x])):
        attrs = {"to": code_of("float32")} if name == "Cast" else {}
        (node,) = load_onnx(node_model(name, inputs, attrs)).graph.nodes
        y = node.op.compile(node, [TensorType()] * len(inputs))(*inputs)
        np.testing.assert_array_equal(y, x)
        assert not np.shares_memory(y, x)


def test_cast_infers_its_types() -> None:
    to = {"to": code_of("int32")}
    assert infer("Cast", [int_type("N", 3, None)], to) == [
        TensorType(np.dtype(np.int32), (3,), ("N", 3, None))
    ]
    assert data_of("Cast", [int_type("N", 2**40)], to) is None
    assert infer("Cast", [int_type("N", 3, 0)], {"to": code_of("bool")}) == [
        TensorType(BOOL, (3,), (None, 1, 0))
    ]
    assert infer("Cast", [int_type("N")], {"to": 1}) == [float_type(1)]
    assert infer("CastLike", [float_type("N"), TensorType()]) == [TensorType(None, ("N",))]
    assert infer("CastLike", [TensorType(INT64, ("N",)), float_type()]) == [float_type("N")]
    for code in (0, 99, -1):
        with pytest.raises(ShapeError):
            infer("Cast", [float_type(1)], {"to": code})


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "int32"),
        ("float16", "bfloat16"),
        ("uint8", "int8"),
        ("int64", "float64"),
        ("float8_e4m3fn", "uint8"),
        ("uint16", "float16"),
    ],
)
def test_bit_cast_matches_the_reference(source: str, target: str) -> None:
    bits = np.arange(6).reshape(2, 3) * 37
    x = bits.astype(f"u{dtype_of(source).itemsize}").view(dtype_of(source))
    want = x.view(dtype_of(target))
    check_node("BitCast", [x], {"to": code_of(target)}, expected=[want])
    check_node("BitCast", [x.T], {"to": code_of(target)}, expected=[want.T])


def test_bit_cast_of_edge_cases_matches_the_definition() -> None:
    x = np.array([-1, 7, -8], ml_dtypes.int4)
    want = np.array([15, 7, 8], ml_dtypes.uint4)
    check_node("BitCast", [x], {"to": code_of("uint4")}, expected=[want])
    check_node("BitCast", [np.float32(1).reshape(())], {"to": code_of("uint32")})
    fails("BitCast", [f32(2)], {"to": code_of("int64")}, "must not change the bits per")
    fails("BitCast", [x], {"to": code_of("int8")}, "must not change the bits per")
    fails("BitCast", [f32(2)], {"to": int(TensorProto.STRING)}, "string")
    assert infer("BitCast", [float_type("N")], {"to": code_of("int32")}) == [
        TensorType(np.dtype(np.int32), ("N",))
    ]
    with pytest.raises(ShapeError):
        infer("BitCast", [float_type(1)], {"to": code_of("int8")})


@pytest.mark.parametrize(
    ("attrs", "want"),
    [
        ({"value_float": 1.5}, np.array(1.5, np.float32)),
        ({"value_floats": [1.5, 2]}, np.array([1.5, 2], np.float32)),
        ({"value_int": 3}, np.array(3)),
        ({"value_ints": [3, 4]}, i64(3, 4)),
        ({"value_string": "a"}, np.array("a", object)),
        ({"value_strings": ["a", "bc"]}, np.array(["a", "bc"], object)),
        ({"value": numpy_helper.from_array(f32(2, 2))}, f32(2, 2)),
    ],
)
def test_constant_gives_its_value(attrs: dict[str, Any], want: np.ndarray) -> None:
    given = {
        k: numpy_helper.to_array(v) if isinstance(v, TensorProto) else v for k, v in attrs.items()
    }
    (kind,) = infer("Constant", [], given)
    assert isinstance(kind, TensorType)
    assert (kind.dtype, kind.shape) == (want.dtype, want.shape)
    from penstock.ir.graph import Node, Value
    from penstock.ops import find

    op = find("Constant")
    assert op is not None
    kernel = op.compile(Node(op, [], [Value("y")], given), [])
    np.testing.assert_array_equal(kernel(), want)
    out = np.empty_like(want)
    assert kernel.into is not None
    kernel.into(out)
    np.testing.assert_array_equal(out, want)


def test_constant_with_bad_inputs_is_refused() -> None:
    with pytest.raises(ShapeError, match="one value"):
        infer("Constant", [], {})
    with pytest.raises(ShapeError, match="one value"):
        infer("Constant", [], {"value_int": 1, "value_float": 2.0})
    assert infer("Constant", [], {"value_ints": [1, 2]}) == [int_type(1, 2)]
