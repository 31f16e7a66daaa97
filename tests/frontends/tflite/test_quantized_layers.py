"""Layers with quantized weights and states: of codes within a quantum of LiteRT's kernels, of real
numbers (dynamic range) within what LiteRT rounds activations to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.frontends.tflite.flatbuffer import schema
from tests.support.litert import by_litert, f
from tests.support.tflite_models import TYPES, model, subgraph

RNG = np.random.default_rng(7)
RUNS = 3
Case = tuple[bytes, dict[str, np.ndarray]]


def quantized(scale: float | Sequence[float], zero: int = 0, axis: int = 0) -> dict[str, Any]:
    scales = [scale] if isinstance(scale, float) else [*scale]
    points = [zero] * len(scales)
    return {"quantization": {"scale": scales, "zero_point": points, "quantized_dimension": axis}}


def variable(dtype: str, shape: Sequence[int], *quantization: Any) -> dict[str, Any]:
    fields = quantized(*quantization) if quantization else {}
    return {"type": TYPES.index(dtype), "shape": [*shape], "is_variable": True, **fields}


def codes(*shape: int, dtype: Any = np.int8) -> np.ndarray:
    return RNG.integers(-127, 128, shape).astype(dtype)


def layer(
    op: str,
    x: np.ndarray,
    constants: dict[str, np.ndarray],
    order: Sequence[str | None],
    options: tuple[str, dict[str, Any]],
    version: int,
    tensors: dict[str, dict[str, Any]],
) -> Case:
    """A model of one operator with inputs in an order, where x is fed. Tensors m0 to m4 are its
    intermediate ones."""
    unions = {name: number for number, name in schema().unions["BuiltinOptions"].items()}
    fields: dict[str, Any] = {"builtin_options_type": unions[options[0]]}
    fields |= {"builtin_options": options}
    graph = subgraph(
        {"x": (x.dtype.name, x.shape)},
        [(op, order, ["y"], fields)],
        ["y"],
        constants,
        **{name: more for name, more in tensors.items() if name[0] != "m"},
    )
    between = {name: {"name": name, **more} for name, more in tensors.items() if name[0] == "m"}
    first = len(graph["names"])
    fields["intermediates"] = [*range(first, first + len(between))]
    graph["names"] += between
    graph["fields"] |= between
    return model([graph], versions={op: version}), {"x": x}


def lstm(
    x: np.ndarray,
    weights: Any,
    biases: Any,
    peepholes: bool,
    tensors: dict[str, dict[str, Any]],
    clip: float = 0.0,
) -> Case:
    units, features = 6, x.shape[2]
    constants = {f"w{g}": weights(units, features) for g in "ifgo"}
    constants |= {f"r{g}": weights(units, units) for g in "ifgo"}
    constants |= {f"p{g}": codes(units, dtype=np.int16) for g in "ifo" if peepholes}
    constants |= {f"b{g}": biases(units) for g in "ifgo"}
    order = ["x", *(f"{kind}{gate}" for kind in "wrpb" for gate in "ifgo" if kind + gate != "pg")]
    names = [n if n == "x" or n in constants else None for n in order]
    names += [None, None, "h", "cell", None, None, None, None]
    options = {"fused_activation_function": 4, "time_major": True, "cell_clip": clip}
    kind = "UnidirectionalSequenceLSTMOptions"
    version = 3 if x.dtype == np.int8 else 2
    return layer(
        "UNIDIRECTIONAL_SEQUENCE_LSTM", x, constants, names, (kind, options), version, tensors
    )


def integer_lstm(peepholes: bool, clip: float = 0.0) -> Case:
    x = codes(5, 2, 4)
    tensors: dict[str, Any] = {"x": quantized(0.015, 4), "cell": variable("int16", (2, 6), 2**-11)}
    tensors["h"] = variable("int8", (2, 6), 1 / 120, -7)
    tensors["y"] = {"type": TYPES.index("int8"), **quantized(1 / 120, -7)}
    for i, gate in enumerate("ifgo"):
        scale = 0.006 + 0.0005 * i
        tensors |= {f"w{gate}": quantized(scale), f"r{gate}": quantized(scale)}
        tensors |= {f"b{gate}": quantized(0.015 * scale), f"m{i}": inner("int16", 2**-12)}
    tensors |= {f"p{gate}": quantized(2**-9) for gate in "ifo" if peepholes}
    tensors["m4"] = inner("int8", 1 / 120, -7)
    return lstm(x, codes, lambda n: 20 * codes(n, dtype=np.int32), peepholes, tensors, clip)


def inner(dtype: str, *quantization: Any) -> dict[str, Any]:
    return {"type": TYPES.index(dtype), "shape": [0], **quantized(*quantization)}


def integer_svdf(
    rank: int = 2,
    *,
    batch: int = 2,
    bias: bool = True,
    activation: int = 1,
    memory: str = "int16",
    scale: float = 0.02,
    zero: int = -128,
) -> Case:
    constants = {"wf": codes(4 * rank, 6), "wt": 200 * codes(4 * rank, 5, dtype=np.int16)}
    constants |= {"b": codes(4, dtype=np.int32)} if bias else {}
    return layer(
        "SVDF",
        codes(batch, 6),
        constants,
        ["x", "wf", "wt", "b" if bias else None, "s"],
        ("SVDFOptions", {"rank": rank, "fused_activation_function": activation}),
        4,
        {
            "x": quantized(0.02, 3),
            "wf": quantized(0.01),
            "wt": quantized(2.0**-16),
            **({"b": quantized(2.0**-26)} if bias else {}),
            "s": variable(memory, (batch, 20 * rank), 2**-10),
            "y": {"type": TYPES.index("int8"), **quantized(scale, zero)},
        },
    )


INTEGERS = {
    "LSTM": integer_lstm(False),
    "LSTM with peepholes": integer_lstm(True),
    "SVDF": integer_svdf(),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]
)
def test_layer_of_codes_is_in_each_run_within_a_quantum_of_litert(name: str, executor: str) -> None:
    file, feeds = INTEGERS[name]
    session = ps.compile(file, executor=executor)
    for run in range(1, RUNS + 1):
        (want,), got = by_litert(file, feeds, run), session(feeds["x"])
        assert got.dtype == want.dtype
        assert len(np.unique(want)) > 3  # it says something
        np.testing.assert_allclose(got.astype(int), want.astype(int), rtol=0, atol=1)


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_lstm_of_integers_gives_the_codes_of_the_reference(
    clip: float, backends: list[str]
) -> None:
    """In each run, which goes on from the state of the one before."""
    file, feeds = integer_lstm(False, clip)
    session = ps.compile(file, backends=backends)
    assert "IntegerLstm" in [step.node.op.name for step in session.inspect.plan.steps]
    for run in range(1, RUNS + 1):
        (want,) = by_litert(file, feeds, run, "BUILTIN_REF")
        np.testing.assert_array_equal(session(feeds["x"]), want)


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize(
    ("rows", "matrix", "turned"),
    [
        ((2, 3, 40), (40, 8), False),
        ((3, 40), (40, 8), False),
        ((3, 40), (1, 40, 8), False),
        ((2, 5, 7, 40), (8, 40), True),
        ((1, 40), (1, 1, 40, 8), False),
    ],
)
def test_product_of_codes_with_a_constant_matrix_gives_the_codes_of_the_reference(
    rows: tuple[int, ...], matrix: tuple[int, ...], turned: bool, backends: list[str]
) -> None:
    tensors = {"x": quantized(0.02, 3), "w": quantized(0.011)}
    tensors["y"] = {"type": TYPES.index("int8"), **quantized(0.23, -4)}
    options = ("BatchMatMulOptions", {"adjoint_rhs": turned})
    file, feeds = layer(
        "BATCH_MATMUL", codes(*rows), {"w": codes(*matrix)}, ["x", "w"], options, 4, tensors
    )
    session = ps.compile(file, backends=backends)
    (want,) = by_litert(file, feeds, 1, "BUILTIN_REF")
    got = session(feeds["x"])
    assert (got.shape, len(np.unique(want)) > 3) == (want.shape, True)
    np.testing.assert_array_equal(got, want)
    assert "QLinearMatMul" in [step.node.op.name for step in session.inspect.plan.steps]


def test_product_of_codes_with_scales_of_rows_of_the_matrix_is_computed_in_real_numbers() -> None:
    scales = [0.01, 0.02, 0.03, 0.04]
    tensors = {"x": quantized(0.02, 3), "w": quantized(scales)}
    tensors["y"] = {"type": TYPES.index("int8"), **quantized(0.23, -4)}
    x, w = codes(3, 4), codes(4, 4)
    options: Any = ("BatchMatMulOptions", {})
    file, feeds = layer("BATCH_MATMUL", x, {"w": w}, ["x", "w"], options, 4, tensors)
    want = (x.astype(float) - 3) * 0.02 @ (w * np.array(scales)[:, None]) / 0.23 - 4
    got = ps.compile(file)(feeds["x"])
    np.testing.assert_allclose(got, np.clip(want, -128, 127), atol=0.51)


SVDF = {
    "rank 1": integer_svdf(1),
    "rank 3, 9 rows": integer_svdf(3, batch=9),
    "no bias": integer_svdf(4, bias=False),
    "saturated": integer_svdf(scale=0.0007, zero=0),
    "Relu that bounds codes alone": integer_svdf(zero=3),
}


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize("name", SVDF)
def test_svdf_of_integers_gives_the_codes_of_the_reference(name: str, backends: list[str]) -> None:
    """In each run, which goes on from the state of the one before."""
    file, feeds = SVDF[name]
    session = ps.compile(file, backends=backends)
    assert "IntegerSvdf" in [step.node.op.name for step in session.inspect.plan.steps]
    for run in range(1, 2 * RUNS + 1):
        (want,) = by_litert(file, feeds, run, "BUILTIN_REF")
        np.testing.assert_array_equal(session(feeds["x"]), want)


@pytest.mark.parametrize("options", [{"memory": "int8"}, {"activation": 3}], ids=str)
def test_svdf_unknown_to_litert_is_computed_in_real_numbers(options: dict[str, Any]) -> None:
    names = [node.op.name for node in ps.load(integer_svdf(**options)[0]).graph.nodes]
    assert "IntegerSvdf" not in names and "DequantizeLinear" in names


def hybrid(op: str, x: np.ndarray, options: Any, version: int, **weights: Any) -> Case:
    """With int8 weights, and scales of all or of their last or first axis."""
    constants = {name: array for name, (array, _) in weights.items()}
    scales = {name: given for name, (_, given) in weights.items() if given is not None}
    return layer(op, x, constants, ["x", *constants], options, version, scales)


CONV = {"stride_w": 1, "stride_h": 1, "depth_multiplier": 1}
SCALES = [0.01 + 0.001 * i for i in range(8)]
STATE = {"s": variable("float32", (2, 40))}
HYBRIDS = {
    "CONV_2D": hybrid(
        *("CONV_2D", f(1, 9, 9, 4), ("Conv2DOptions", {"stride_w": 1, "stride_h": 1}), 5),
        w=(codes(8, 3, 3, 4), quantized(SCALES)),
        b=(f(8), None),
    ),
    "DEPTHWISE_CONV_2D": hybrid(
        *("DEPTHWISE_CONV_2D", f(1, 9, 9, 8), ("DepthwiseConv2DOptions", CONV), 6),
        w=(codes(1, 3, 3, 8), quantized(SCALES, 0, 3)),
        b=(f(8), None),
    ),
    "BATCH_MATMUL": hybrid(
        *("BATCH_MATMUL", f(2, 3, 40), ("BatchMatMulOptions", {}), 3),
        w=(codes(2, 40, 8), quantized(0.01)),
    ),
    "SVDF": layer(
        "SVDF",
        f(2, 6),
        {"wf": codes(8, 6), "wt": codes(8, 5), "b": f(4)},
        ["x", "wf", "wt", "b", "s"],
        ("SVDFOptions", {"rank": 2}),
        2,
        {"wf": quantized(0.01), "wt": quantized(0.01), **STATE},
    ),
    "LSTM": lstm(
        f(5, 2, 4),
        codes,
        f,
        False,
        {
            **{f"{kind}{gate}": quantized(0.005) for kind in "wr" for gate in "ifgo"},
            "h": variable("float32", (2, 6)),
            "cell": variable("float32", (2, 6)),
        },
    ),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_layer_of_dynamic_range_is_as_near_to_litert_as_that_rounds(name: str) -> None:
    file, feeds = HYBRIDS[name]
    session = ps.compile(file)
    for run in range(1, RUNS + 1):
        (want,), got = by_litert(file, feeds, run), session(feeds["x"])
        assert np.abs(got - want).max() < 0.015 * np.abs(want).max()


CONV_OPTIONS = {"stride_w": 1, "stride_h": 1}
SIZES = np.array([1, 100, 0, 0.01], np.float32).reshape(-1, 1, 1, 1)
IMAGES = {
    "same": (f(1, 9, 9, 4), {}),
    "Relu": (f(1, 8, 7, 4), {"fused_activation_function": 1}),
    "of one sign, strided": (np.abs(f(1, 12, 9, 4)) + 1, {"stride_w": 2, "stride_h": 2}),
    "valid, Relu6": (f(1, 9, 9, 4), {"padding": 1, "fused_activation_function": 3}),
    "several": (f(4, 9, 9, 4) * SIZES, {}),
    "several, of one position": (f(4, 3, 3, 4) * SIZES, {"padding": 1}),
    "several, of one column": (f(4, 9, 3, 4) * SIZES, {"padding": 1}),
}


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids="-".join)
@pytest.mark.parametrize("name", IMAGES)
def test_convolution_of_dynamic_range_makes_codes_of_each_image_as_litert(
    name: str, backends: list[str]
) -> None:
    x, options = IMAGES[name]
    given = {"w": (codes(8, 3, 3, 4), quantized(SCALES)), "b": (f(8), None)}
    file, feeds = hybrid("CONV_2D", x, ("Conv2DOptions", {**CONV_OPTIONS, **options}), 5, **given)
    session = ps.compile(file, backends=backends)
    (want,), got = by_litert(file, feeds, 1, "BUILTIN_REF"), session(feeds["x"])
    for image, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(image, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    nodes = [step.node for step in session.inspect.plan.steps]
    ops = [name for n in nodes for name in n.attrs.get("ops", n.op.name).split()]
    assert "ConvInteger" in ops
    assert "Conv" not in ops


def test_images_of_dynamic_range_give_the_same_results_together_and_alone() -> None:
    given = {"w": (codes(8, 3, 3, 4), quantized(SCALES)), "b": (f(8), None)}
    x = f(4, 9, 9, 4) * SIZES
    results = []
    for images in (x, *x[:, None]):
        file, feeds = hybrid("CONV_2D", images, ("Conv2DOptions", CONV_OPTIONS), 5, **given)
        results.append(ps.compile(file)(feeds["x"]))
    np.testing.assert_array_equal(results[0], np.concatenate(results[1:]))


def dense_hybrid(
    x: np.ndarray, scales: Any = 0.01, units: int = 8, bias: bool = True, **options: Any
) -> Case:
    w = codes(units, x.shape[-1]), quantized(scales)
    given = {"b": (f(units), None)} if bias else {}
    return hybrid("FULLY_CONNECTED", x, ("FullyConnectedOptions", options), 9, w=w, **given)


ASYMMETRIC = {"asymmetric_quantize_inputs": True}
DENSE_HYBRIDS = {
    "one row": dense_hybrid(f(1, 40)),
    "rows, some of zeros": dense_hybrid(f(3, 40) * np.array([[0], [1], [1]], np.float32)),
    "a scale for each unit": dense_hybrid(f(3, 40), SCALES),
    "asymmetric": dense_hybrid(f(3, 40), **ASYMMETRIC),
    "asymmetric, of one sign": dense_hybrid(np.abs(f(3, 40)) + 1, **ASYMMETRIC),
    "asymmetric, a scale for each unit": dense_hybrid(f(3, 40), SCALES, **ASYMMETRIC),
    "no bias, Relu": dense_hybrid(f(9, 300), units=130, bias=False, fused_activation_function=1),
    "more dims": dense_hybrid(f(2, 3, 40), keep_num_dims=True, fused_activation_function=3),
    "many units": dense_hybrid(f(20, 64), units=200),
    **{
        f"product{name}": hybrid(
            *("BATCH_MATMUL", x, ("BatchMatMulOptions", options), 4),
            w=(codes(*((16, 40) if "adjoint_rhs" in options else (1, 40, 16))), quantized(0.01)),
        )
        for name, x, options in (
            ("", f(2, 3, 40), {}),
            (", transposed", f(3, 40), {"adjoint_rhs": True}),
            (", asymmetric", f(2, 3, 40) + 1, ASYMMETRIC),
        )
    },
}


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize("name", DENSE_HYBRIDS)
def test_dense_layer_of_dynamic_range_rounds_rows_as_litert(name: str, backends: list[str]) -> None:
    file, feeds = DENSE_HYBRIDS[name]
    assert "DynamicRangeDense" in [node.op.name for node in ps.load(file).graph.nodes]
    (want,), got = by_litert(file, feeds), ps.compile(file, backends=backends)(feeds["x"])
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


# Operators from codes to codes.


def of_codes(
    op: str = "FULLY_CONNECTED",
    activation: int = 0,
    *,
    dtype: str = "int8",
    w: Sequence[float] = (0.01,),
    y: tuple[float, int] = (0.5, -5),
    shape: Sequence[int] | None = None,
    **options: Any,
) -> Case:
    """An operator whose weights have these scales. Zero points are those of int8."""
    middle, x = 128 if dtype == "uint8" else 0, (0.02, 3)
    kind, version, given, weights, axis = {
        "FULLY_CONNECTED": ("FullyConnectedOptions", 5, (5, 40), (8, 40), 0),
        "CONV_2D": ("Conv2DOptions", 3, (1, 9, 9, 4), (8, 3, 3, 4), 0),
        "DEPTHWISE_CONV_2D": ("DepthwiseConv2DOptions", 3, (1, 9, 9, 8), (1, 3, 3, 8), 3),
    }[op]
    options |= {"fused_activation_function": activation}
    options |= {"stride_w": 1, "stride_h": 1} if op != "FULLY_CONNECTED" else {}
    options |= {"depth_multiplier": 1} if axis else {}
    fed, constant = (
        (codes(*dims).astype(int) + middle).astype(dtype) for dims in (shape or given, weights)
    )
    return layer(
        *(op, fed, {"w": constant, "b": 20 * codes(8, dtype=np.int32)}, ["x", "w", "b"]),
        *((kind, options), version),
        {
            "x": quantized(x[0], x[1] + middle),
            "w": quantized(w, middle, axis),
            "b": quantized([x[0] * scale for scale in w]),
            "y": {"type": TYPES.index(dtype), **quantized(y[0], y[1] + middle)},
        },
    )


RELU, RELU_1, RELU6, LOWEST = 1, 2, 3, (0.05, -128)
ON_CODES = {
    "dense": of_codes(),
    "dense, uint8": of_codes(dtype="uint8"),
    "dense, of images": of_codes(shape=(5, 2, 4, 5)),
    "dense, rows of more dims": of_codes(shape=(5, 2, 40), keep_num_dims=True),
    "dense, a scale for each row": of_codes(w=SCALES),
    "dense, Relu that changes nothing": of_codes(activation=RELU, y=LOWEST),
    "dense, Relu that bounds": of_codes(activation=RELU, y=(0.5, -50)),
    "dense, Relu6 that bounds": of_codes(activation=RELU6, y=(0.1, -128)),
    "dense, uint8, Relu6 that bounds": of_codes(activation=RELU6, dtype="uint8", y=(0.1, -100)),
    "convolution": of_codes("CONV_2D", w=SCALES),
    "convolution, one scale": of_codes("CONV_2D"),
    "convolution, padded": of_codes("CONV_2D", w=SCALES, padding=0),
    "convolution, uint8": of_codes("CONV_2D", dtype="uint8", y=(0.4, 2)),
    "convolution, Relu that bounds": of_codes("CONV_2D", RELU, w=SCALES, y=(0.5, -50)),
    "convolution, Relu to 1 that bounds": of_codes("CONV_2D", RELU_1, w=SCALES, y=(0.1, 7)),
    "convolution, scales above a half": of_codes(
        "CONV_2D", w=[s * 20 for s in SCALES], y=(0.01, 0)
    ),
    "depthwise": of_codes("DEPTHWISE_CONV_2D", w=SCALES, y=(0.1, -5)),
    "depthwise, Relu that changes nothing": of_codes("DEPTHWISE_CONV_2D", RELU, w=SCALES, y=LOWEST),
    "depthwise, Relu6 that bounds": of_codes("DEPTHWISE_CONV_2D", RELU6, w=SCALES, y=(0.1, -60)),
    "depthwise, scales above a half": of_codes(
        "DEPTHWISE_CONV_2D", w=[s * 20 for s in SCALES], y=(0.01, 0)
    ),
}
ON_REALS = {"convolution, Tanh": of_codes("CONV_2D", 4, w=SCALES, y=(1 / 128, 0))}


@pytest.mark.parametrize("name", [*ON_CODES, *ON_REALS])
def test_operator_of_codes_is_one_node_where_onnx_has_it(name: str) -> None:
    names = [node.op.name for node in ps.load((ON_CODES | ON_REALS)[name][0]).graph.nodes]
    assert ("DequantizeLinear" in names) == (name in ON_REALS)
    assert any(op in names for op in ("QGemm", "QLinearConv")) == (name in ON_CODES)


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize("name", ON_CODES)
def test_operator_of_codes_gives_the_codes_of_the_reference(name: str, backends: list[str]) -> None:
    file, feeds = ON_CODES[name]
    (want,) = by_litert(file, feeds, resolver="BUILTIN_REF")
    got = ps.compile(file, backends=backends)(feeds["x"])
    assert got.dtype == want.dtype
    assert len(np.unique(want)) > 3
    np.testing.assert_array_equal(got, want)


POOL = "AVERAGE_POOL_2D"


def mean_of_codes(
    op: str,
    options: dict[str, Any],
    *,
    dtype: str = "int8",
    y: tuple[float, int] = (0.02, 3),
    dims: Sequence[int] = (2, 8, 8, 5),
) -> Case:
    """A mean or sum over windows or all positions of an image of codes; zero points are those of int8."""
    middle = 128 if dtype == "uint8" else 0
    x = (codes(*dims).astype(int) + middle).astype(dtype)
    kind, constants, version = "Pool2DOptions", {}, 2
    if op != POOL:
        kind, constants = "ReducerOptions", {"axes": np.array(options.pop("axes"), np.int32)}
    else:
        options = {"stride_w": 2, "stride_h": 1, "filter_width": 4, "filter_height": 2, **options}
    tensors = {"x": quantized(0.02, 3 + middle)}
    tensors["y"] = {"type": TYPES.index(dtype), **quantized(y[0], y[1] + middle)}
    return layer(op, x, constants, ["x", *constants], (kind, options), version, tensors)


MEANS = {
    "pool": mean_of_codes(POOL, {"padding": 1}),
    "pool, padded": mean_of_codes(POOL, {"padding": 0}),
    "pool, uint8": mean_of_codes(POOL, {"padding": 1}, dtype="uint8"),
    "pool, Relu": mean_of_codes(POOL, {"padding": 0, "fused_activation_function": RELU}),
    "mean": mean_of_codes("MEAN", {"axes": [1, 2], "keep_dims": True}),
    "mean, dims dropped": mean_of_codes("MEAN", {"axes": [2, 1]}),
    "mean, other scale": mean_of_codes("MEAN", {"axes": [-3, -2]}, y=(0.003, -20)),
    "mean, uint8": mean_of_codes("MEAN", {"axes": [1, 2]}, dtype="uint8"),
    "mean of 49": mean_of_codes("MEAN", {"axes": [1, 2]}, dims=(2, 7, 7, 40), y=(0.011, 3)),
    "mean of 15, uint8": mean_of_codes(
        "MEAN", {"axes": [1, 2]}, dtype="uint8", dims=(2, 3, 5, 40), y=(0.011, 3)
    ),
    "mean of rows": mean_of_codes("MEAN", {"axes": [-2]}, dims=(2, 6, 12, 40), y=(0.011, 3)),
    "mean of all but rows": mean_of_codes("MEAN", {"axes": [3, 0, 1]}, dims=(2, 3, 9, 5)),
}


def test_mean_of_a_large_image_has_no_weights() -> None:
    """A file of a few bytes can declare any dims."""
    file, _ = mean_of_codes("MEAN", {"axes": [1, 2]}, dims=(1, 1 << 20, 1, 2))
    assert "QLinearConv" not in [node.op.name for node in ps.load(file).graph.nodes]


@pytest.mark.parametrize("backends", [["numpy"], ["native", "numpy"]], ids=str)
@pytest.mark.parametrize("name", MEANS)
def test_mean_of_codes_gives_the_codes_of_the_reference(name: str, backends: list[str]) -> None:
    """Of 8, 4 or 64 codes, of which many are ties, and of numbers that are no powers of two."""
    file, feeds = MEANS[name]
    (want,) = by_litert(file, feeds, resolver="BUILTIN_REF")
    got = ps.compile(file, backends=backends)(feeds["x"])
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sum_of_codes_is_one_step_and_within_one_of_litert(dtype: str) -> None:
    file, feeds = mean_of_codes("SUM", {"axes": [1, 2]}, dtype=dtype, y=(0.4, 3))
    (want,) = by_litert(file, feeds)
    session = ps.compile(file)
    assert [step.node.op.name for step in session.inspect.plan.steps] == ["IntegerMean"]
    got = session(feeds["x"])
    assert len(np.unique(want)) > 3
    assert np.abs(got.astype(int) - want).max() <= 1
    # The number of codes is that of the image that is fed: zeros add nothing.
    zeros = np.full_like(feeds["x"], 131 if dtype == "uint8" else 3)
    twice = session(np.concatenate([feeds["x"], zeros], 1))
    np.testing.assert_array_equal(twice, got)
