"""Rules of operations on images: convolution, pooling, resizing: beside LiteRT."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import IMAGE, WINDOW, Op, check_operator, f, i32, litert
from tests.support.tflite_models import TYPES, model, subgraph

OPS = [
    Op("AVERAGE_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op(
        "CONV_3D",
        (f(1, 4, 5, 5, 2), [f(2, 3, 3, 2, 3)], [f(3)]),
        {"padding": 1, "stride_d": 1, "stride_w": 2, "stride_h": 1},
        kind="Conv3DOptions",
    ),
    Op(
        "CONV_3D_TRANSPOSE",
        ([i32(1, 6, 7, 7, 3)], [f(3, 3, 3, 3, 2)], f(1, 3, 4, 4, 2)),
        {"padding": 0, "stride_d": 2, "stride_w": 2, "stride_h": 2},
        kind="Conv3DOptions",
    ),
    Op("L2_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op(
        "LOCAL_RESPONSE_NORMALIZATION",
        (IMAGE,),
        {"radius": 2, "bias": 1.0, "alpha": 0.5, "beta": 0.75},
    ),
    Op("MAX_POOL_2D", (IMAGE,), {**WINDOW, "fused_activation_function": 1}, kind="Pool2DOptions"),
    Op("RESIZE_BILINEAR", (IMAGE, [i32(5, 9)]), {"half_pixel_centers": True}),
    Op("RESIZE_NEAREST_NEIGHBOR", (IMAGE, [i32(5, 9)]), {"align_corners": True}),
    Op(
        "TRANSPOSE_CONV",
        (i32(1, 8, 7, 3), [f(3, 3, 2, 4)], f(1, 4, 4, 4), [f(3)]),
        {"padding": 0, "stride_w": 2, "stride_h": 2, "fused_activation_function": 1},
        version=4,
    ),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    check_operator(op)


SIZES = [[1, 5, 9, 8], [1, 4, 11, 8], [1, 2, 9, 8], [2, 4, 9, 8], [1, 4, 9, 7], [0, 0, 0, 0]]


def transposed(size: list[int] | None) -> bytes:
    """A TRANSPOSE_CONV of an image of 2 by 5, whose output shape is a constant or fed."""
    options = ("TransposeConvOptions", {"padding": 0, "stride_w": 2, "stride_h": 2})
    fed = {"s": ("int32", (4,))} if size is None else {}
    constants = {"w": np.ones((8, 3, 3, 3), np.float32)}
    constants |= {} if size is None else {"s": np.array(size, np.int32)}
    inputs = {**fed, "x": ("float32", (1, 2, 5, 3))}
    return model(
        [subgraph(inputs, [("TRANSPOSE_CONV", ["s", "w", "x"], ["y"], options)], ["y"], constants)]
    )


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_output_shape_that_does_not_fit_is_refused(size: list[int]) -> None:
    with pytest.raises(ps.InvalidModel, match="TRANSPOSE_CONV_0"):
        ps.compile(transposed(size)).run({"x": np.ones((1, 2, 5, 3), np.float32)})
    feeds = {"s": np.array(size, np.int32), "x": np.ones((1, 2, 5, 3), np.float32)}
    with pytest.raises(ps.PenstockError, match="TRANSPOSE_CONV_0"):
        ps.compile(transposed(None)).run(feeds)


@pytest.mark.parametrize("size", [[1, 4, 9, 8], [1, 3, 10, 8]], ids=str)
def test_output_shape_that_is_fed_says_which_of_two_sizes_it_is(size: list[int]) -> None:
    x = np.ones((1, 2, 5, 3), np.float32)
    y = ps.compile(transposed(None)).run({"s": np.array(size, np.int32), "x": x})["y"]
    assert list(y.shape) == size
    np.testing.assert_array_equal(y, ps.compile(transposed(size)).run({"x": x})["y"])


def upsampled(dtype: str) -> bytes:
    """A TRANSPOSE_CONV of any batch of images, whose output shape has the batch of the input, as
    Keras' Conv2DTranspose computes it; of float32 or of codes."""
    steps = ("TransposeConvOptions", {"padding": 0, "stride_w": 2, "stride_h": 3})
    operators = [
        ("SHAPE", ["x"], ["dims"], ("ShapeOptions", {"out_type": TYPES.index("int32")})),
        (
            "STRIDED_SLICE",
            ["dims", "at", "end", "one"],
            ["batch"],
            ("StridedSliceOptions", {"shrink_axis_mask": 1}),
        ),
        (
            "PACK",
            ["batch", "height", "width", "channels"],
            ["size"],
            ("PackOptions", {"values_count": 4}),
        ),
        ("TRANSPOSE_CONV", ["size", "w", "x"], ["y"], steps),
    ]
    rng = np.random.default_rng(1)
    w = rng.integers(-127, 128, (6, 3, 4, 8)).astype(np.int8)
    numbers = {"height": 12, "width": 10, "channels": 6}
    constants = {name: np.array(x, np.int32) for name, x in numbers.items()}
    constants |= {name: i32(x) for name, x in {"at": 0, "end": 1, "one": 1}.items()}
    constants["w"] = w if dtype == "int8" else w.astype(np.float32)
    scales = {"x": (0.05, -5), "w": (0.01, 0), "y": (0.3, 7)} if dtype == "int8" else {}
    fields = {
        name: {"quantization": {"scale": [scale], "zero_point": [zero]}}
        for name, (scale, zero) in scales.items()
    }
    fields["x"] = {**fields.get("x", {}), "shape_signature": [-1, 4, 5, 8]}
    fields["y"] = {**fields.get("y", {}), "type": TYPES.index(dtype)}
    fields |= {name: {"type": TYPES.index("int32")} for name in ("dims", "batch", "size")}
    inputs = {"x": (dtype, (1, 4, 5, 8))}
    graph = subgraph(inputs, operators, ["y"], constants, **fields)
    return model([graph], versions={"TRANSPOSE_CONV": 2 if dtype == "int8" else 1})


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_output_shape_of_an_unknown_batch_makes_an_onnx_operation(dtype: str) -> None:
    file = upsampled(dtype)
    kind = "ConvTranspose" if dtype == "float32" else "QLinearConv"
    for batch in (3, 1):
        x = np.random.default_rng(2).integers(-128, 128, (batch, 4, 5, 8)).astype(dtype)
        interpreter = litert.Interpreter(
            model_content=file, experimental_op_resolver_type=litert.OpResolverType.BUILTIN_REF
        )
        interpreter.resize_tensor_input(0, x.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], x)
        interpreter.invoke()
        wanted = interpreter.get_tensor(interpreter.get_output_details()[0]["index"])
        got = ps.compile(file).run({"x": x})["y"]
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape) == (dtype, (batch, 12, 10, 6))
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=0 if dtype == "int8" else 1e-2)
    nodes = ps.load(file).graph.nodes
    assert kind in [node.op.name for node in nodes]
