"""Operators one by one, of which the corpus has no or few cases, beside LiteRT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers

import penstock as ps
from penstock.core.types import TensorType
from penstock.frontends.tflite.flatbuffer import schema
from penstock.frontends.tflite.tensors import _NAMES
from tests.support.tflite_models import model, subgraph

litert = pytest.importorskip("ai_edge_litert.interpreter")

TABLES = {name.lower(): name for name in schema().tables}
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Op:
    """One operator. ``inputs`` that are arrays are fed, those in a list are constants, those that
    are tuples the shapes of variables. Options that are bytes are those of a custom operator."""

    name: str
    inputs: tuple[Any, ...]
    options: Any = field(default_factory=dict)
    outputs: tuple[str, ...] = ("float32",)
    version: int = 1
    kind: str = ""

    def __str__(self) -> str:
        options = self.options if isinstance(self.options, dict) else {}
        return f"{self.name} {' '.join(f'{k}={v}' for k, v in options.items())}"

    @property
    def file(self) -> bytes:
        kind = self.kind or TABLES.get(f"{self.name.replace('_', '').lower()}options")
        options = None if kind is None else (kind, self.options)
        options = self.options if isinstance(self.options, bytes) else options
        names = [f"x{i}" if x is not None else None for i, x in enumerate(self.inputs)]
        pairs = [(n, x) for n, x in zip(names, self.inputs, strict=True) if n is not None]
        numbers = {name: number for number, name in _NAMES.items()}
        ys = [f"y{i}" for i in range(len(self.outputs))]
        graph = subgraph(
            {n: (x.dtype.name, x.shape) for n, x in pairs if isinstance(x, np.ndarray)},
            [(self.name, names, ys, options)],
            ys,
            {n: x[0] for n, x in pairs if isinstance(x, list)},
            **{n: {"shape": x, "is_variable": True} for n, x in pairs if isinstance(x, tuple)},
            **{y: {"type": numbers[dtype]} for y, dtype in zip(ys, self.outputs, strict=True)},
        )
        return model([graph], versions={self.name: self.version})

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray)}


def f(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def i32(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def scalar(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array(value, dtype)


IMAGE = f(2, 7, 6, 4)
WINDOW = {"padding": 0, "stride_w": 2, "stride_h": 1, "filter_width": 3, "filter_height": 2}
OPS = [
    *(Op("ADD", (f(2, 3), f(3)), {"fused_activation_function": n}) for n in range(5) if n != 4),
    Op("ATAN2", (f(5), f(5))),
    Op("AVERAGE_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op("BITWISE_XOR", (i32(1, 2, 7), i32(3, 3, 3)), outputs=("int32",)),
    Op("BROADCAST_ARGS", (i32(2, 1), i32(3, 1, 4)), outputs=("int32",)),
    Op("BUCKETIZE", (f(3, 4),), {"boundaries": [-0.5, 0.0, 1.0]}, outputs=("int32",)),
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
    Op("DYNAMIC_UPDATE_SLICE", (f(4, 5), f(2, 3), i32(3, 1))),
    Op("EMBEDDING_LOOKUP", (i32(2, 0, 1), [f(3, 4)])),
    Op("FLOOR_DIV", (i32(7, -7, 7), i32(2, 2, -2)), outputs=("int32",)),
    Op("FLOOR_MOD", (i32(7, -7, 7), i32(2, 2, -2)), outputs=("int32",)),
    Op("FULLY_CONNECTED", (f(2, 3, 4), [f(5, 4)], None), {"keep_num_dims": True}, version=5),
    Op("FULLY_CONNECTED", (f(2, 3, 4), [f(5, 4)], [f(5)]), {"fused_activation_function": 3}),
    Op("FULLY_CONNECTED", (f(2, 6), [f(5, 4)], [f(5)])),
    Op("GATHER", (f(2, 3, 4), i32(2, 0)), {"axis": -2}),
    Op("GATHER", (f(2, 3, 4), i32([1, 0], [2, 2])), {"axis": 2, "batch_dims": 1}, version=5),
    Op("L2_POOL_2D", (IMAGE,), WINDOW, kind="Pool2DOptions"),
    Op(
        "LOCAL_RESPONSE_NORMALIZATION",
        (IMAGE,),
        {"radius": 2, "bias": 1.0, "alpha": 0.5, "beta": 0.75},
    ),
    Op("MATRIX_DIAG", (f(2, 3),)),
    Op("MATRIX_SET_DIAG", (f(2, 3, 4), f(2, 3))),
    Op("MAX_POOL_2D", (IMAGE,), {**WINDOW, "fused_activation_function": 1}, kind="Pool2DOptions"),
    Op("MIRROR_PAD", (f(4, 5), [i32([1, 2], [0, 3])]), {"mode": 0}),
    Op("MIRROR_PAD", (f(4, 5), [i32([1, 2], [0, 3])]), {"mode": 1}),
    Op(
        "NON_MAX_SUPPRESSION_V4",
        (
            np.abs(f(9, 4)),
            np.abs(f(9)),
            [scalar(4)],
            [scalar(0.3, np.float32)],
            [scalar(0.1, np.float32)],
        ),
        outputs=("int32", "int32"),
    ),
    Op(
        "NON_MAX_SUPPRESSION_V5",
        (
            np.abs(f(9, 4)),
            np.abs(f(9)),
            [scalar(4)],
            [scalar(0.3, np.float32)],
            [scalar(0.1, np.float32)],
            [scalar(0.5, np.float32)],
        ),
        outputs=("int32", "float32", "int32"),
    ),
    Op(
        "ONE_HOT",
        (i32([0, 2], [3, -1]), [scalar(3)], [scalar(2, np.float32)], [scalar(-1, np.float32)]),
        {"axis": 1},
    ),
    Op("RELU_0_TO_1", (f(9),)),
    Op(
        "REDUCE_ALL",
        (f(3, 4) > -1, [i32(1)]),
        {"keep_dims": True},
        ("bool",),
        kind="ReducerOptions",
    ),
    Op("RESIZE_BILINEAR", (IMAGE, [i32(5, 9)]), {"half_pixel_centers": True}),
    Op("RESIZE_NEAREST_NEIGHBOR", (IMAGE, [i32(5, 9)]), {"align_corners": True}),
    Op("REVERSE_SEQUENCE", (f(3, 4, 2), i32(2, 4, 1)), {"seq_dim": 1, "batch_dim": 0}),
    Op("REVERSE_SEQUENCE", (f(3, 4, 2), i32(2, 1, 3, 0)), {"seq_dim": 0, "batch_dim": 1}),
    Op("RIGHT_SHIFT", (i32(16, -16), i32(2, 2)), outputs=("int32",)),
    Op("SEGMENT_SUM", (f(5, 2), i32(0, 0, 1, 2, 2))),
    Op("SIGN", (f(5),)),
    Op("SPARSE_TO_DENSE", (i32([0, 1], [2, 0]), i32(3, 2), f(2), f(1).reshape(()))),
    Op("SPLIT_V", (f(2, 7), [i32(2, -1, 3)], [scalar(1)]), {"num_splits": 3}, ("float32",) * 3),
    Op("STRIDED_SLICE", (f(5, 6), [i32(4, 0)], [i32(0, 5)], [i32(-2, 2)]), {"begin_mask": 2}),
    Op(
        "TRANSPOSE_CONV",
        (i32(1, 8, 7, 3), [f(3, 3, 2, 4)], f(1, 4, 4, 4), [f(3)]),
        {"padding": 0, "stride_w": 2, "stride_h": 2, "fused_activation_function": 1},
        version=4,
    ),
    Op("UNIQUE", (f(4)[[0, 1, 0, 3, 1]],), {"idx_out_type": 2}, ("float32", "int32")),
    *(
        Op(f"UNSORTED_SEGMENT_{name}", (f(4, 2), i32(2, 0, -1, 2), [scalar(4)]))
        for name in ("MAX", "MIN", "PROD", "SUM")
    ),
]


COMPLEX = (f(3, 4) + 1j * f(3, 4)).astype(np.complex64)
OPS += [
    *(Op("CAST", (300 * f(3, 4),), outputs=(t,)) for t in ("uint8", "int8", "uint16", "complex64")),
    *(Op("CAST", (COMPLEX,), outputs=(t,)) for t in ("float32", "int32", "complex64")),
    Op("MUL", (COMPLEX, COMPLEX), outputs=("complex64",)),
    Op("GATHER", (f(3, 4), np.array([1, 0, 2], np.int16)), {"axis": 1}),
    Op("BITCAST", (f(3, 4),), outputs=("uint8",)),
    Op("BITCAST", (i32([1, 2], [3, 4]).astype(np.int16),), outputs=("int32",)),
    Op("BITCAST", (f(3, 4),), outputs=("int32",)),
    Op("REDUCE_MAX", (f(3, 4).astype(np.int8), [i32(1)]), {}, ("int8",), kind="ReducerOptions"),
]


def spoken(name: str, *inputs: Any, **options: Any) -> Op:
    """One of LiteRT's own custom operators."""
    return Op(f"CUSTOM:{name}", inputs, bytes(flexbuffers.Dumps(options)))


CUSTOM = [
    *(
        spoken("AudioSpectrogram", f(n, 2), window_size=50, stride=20, magnitude_squared=squared)
        for n, squared in ((200, True), (219, False), (50, False))
    ),
    *(
        spoken(
            "Mfcc",
            np.abs(f(2, 5, 65)),
            [scalar(8000)],
            upper_frequency_limit=upper,
            lower_frequency_limit=lower,
            filterbank_channel_count=channels,
            dct_coefficient_count=10,
        )
        for channels, lower, upper in ((12, 20.0, 4000.0), (40, 20.0, 4000.0), (10, 300.0, 2000.0))
    ),
]


def lstm(inputs: int, units: int, outputs: int, *, coupled: bool = False) -> list[Any]:
    """Weights, recurrent weights, peepholes, biases, and a projection if there must be one."""
    gates = [None if coupled and i == 0 else [f(units, inputs)] for i in range(4)]
    recurrent = [None if coupled and i == 0 else [f(units, outputs)] for i in range(4)]
    peepholes = [None if coupled and i == 0 else [f(units)] for i in range(3)]
    biases = [None if coupled and i == 0 else [f(units)] for i in range(4)]
    projection = [[f(outputs, units)], [f(outputs)]] if outputs != units else [None, None]
    return [*gates, *recurrent, *peepholes, *biases, *projection]


LSTM = {"fused_activation_function": 4, "time_major": True}
TANH = {"fused_activation_function": 4}
SEQUENCE = f(5, 2, 3)
LAYERS = [
    Op("UNIDIRECTIONAL_SEQUENCE_LSTM", (SEQUENCE, *lstm(3, 4, 4), (2, 4), (2, 4)), LSTM),
    Op(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        (SEQUENCE, *lstm(3, 4, 2, coupled=True), (2, 2), (2, 4)),
        {**LSTM, "cell_clip": 0.5, "proj_clip": 0.7},
    ),
    Op(
        "UNIDIRECTIONAL_SEQUENCE_LSTM",
        (SEQUENCE, *lstm(3, 4, 4), (2, 4), (2, 4), *([f(4)] for _ in range(4))),
        LSTM,
    ),
    Op(
        "LSTM",
        (SEQUENCE[0], *lstm(3, 4, 4), (2, 4), (2, 4)),
        {"fused_activation_function": 4},
        kind="LSTMOptions",
    ),
    Op(
        "BIDIRECTIONAL_SEQUENCE_LSTM",
        (SEQUENCE, *lstm(3, 4, 4), *lstm(3, 4, 4), *((2, 4),) * 4, *(None,) * 9),
        {"fused_activation_function": 4, "time_major": True, "merge_outputs": False},
        outputs=("float32", "float32"),
    ),
    Op("RNN", (SEQUENCE[0], [f(4, 3)], [f(4, 4)], [f(4)], (2, 4)), TANH, kind="RNNOptions"),
    Op(
        "UNIDIRECTIONAL_SEQUENCE_RNN",
        (SEQUENCE, [f(4, 3)], [f(4, 4)], [f(4)], (5, 4)),
        {"fused_activation_function": 1, "time_major": False},
        kind="SequenceRNNOptions",
    ),
    Op(
        "BIDIRECTIONAL_SEQUENCE_RNN",
        (SEQUENCE, *2 * ([f(4, 3)], [f(4, 4)], [f(4)], (2, 4)), *(None,) * 3),
        {"fused_activation_function": 4, "time_major": True, "merge_outputs": True},
    ),
    Op("SVDF", (f(2, 3), [f(8, 3)], [f(8, 5)], [f(4)], (2, 40)), {"rank": 2}, kind="SVDFOptions"),
]


def detection(number: int, **options: Any) -> Op:
    """A detector of 20 boxes, with scores of the background and three classes."""
    given = {"max_detections": 6, "max_classes_per_detection": number, "num_classes": 3}
    given |= {"nms_score_threshold": 0.2, "nms_iou_threshold": 0.4, **options}
    given |= {"y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0}
    anchors = np.abs(f(20, 4)) + np.float32(0.1)
    return Op(
        "CUSTOM:TFLite_Detection_PostProcess",
        (f(1, 20, 4), RNG.random((1, 20, 4), np.float32), [anchors]),
        bytes(flexbuffers.Dumps(given)),
        ("float32",) * 4,
    )


DETECTIONS = [
    detection(1),
    detection(2),
    detection(1, use_regular_nms=True, detections_per_class=4),
]


def by_litert(file: bytes, feeds: dict[str, np.ndarray], runs: int = 1) -> list[np.ndarray]:
    resolver = litert.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = litert.Interpreter(model_content=file, experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], feeds[detail["name"]])
    for _ in range(runs):
        interpreter.invoke()
    return [interpreter.get_tensor(d["index"]) for d in interpreter.get_output_details()]


@pytest.mark.parametrize("op", [*OPS, *CUSTOM, *DETECTIONS], ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    wanted = by_litert(op.file, op.feeds)
    for backends in (["numpy"], None):
        got = ps.compile(op.file, backends=backends).run(op.feeds)
        for value, want in zip(got.values(), wanted, strict=True):
            assert (value.dtype, value.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4, 11, 12, 13, 28, 29, 60, 61, 124, 125, 300])
def test_projections_of_keys_of_any_length_are_those_of_litert(size: int) -> None:
    items = RNG.integers(0, 256, (5, size)).astype(np.uint8)
    weights = [f(5)] if size % 2 else []
    for kind in (1, 2):  # sparse and dense
        options = {"type": kind}
        op = Op("LSH_PROJECTION", (f(4, 6), items, *weights), options, outputs=("int32",))
        (want,) = by_litert(op.file, op.feeds)
        (got,) = ps.compile(op.file).run(op.feeds).values()
        assert got.dtype == want.dtype and got.tolist() == want.tolist()


@pytest.mark.parametrize("op", LAYERS, ids=str)
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "frames", "streams"])
def test_layer_with_states_gives_in_each_run_what_litert_gives(op: Op, executor: str) -> None:
    session = ps.compile(op.file, executor=executor)
    for run in range(1, 4):
        wanted = by_litert(op.file, op.feeds, run)
        for value, want in zip(session.run(op.feeds).values(), wanted, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", LAYERS[:3], ids=str)
@pytest.mark.parametrize("executor", ["linear", "frames", "interpret"])
def test_layer_refuses_another_batch_than_that_of_its_states(op: Op, executor: str) -> None:
    whole = ps.load(op.file)
    (x,) = whole.graph.inputs
    x.type = TensorType(x.dtype, (5, None, 3))
    session = ps.compile(whole, executor=executor)
    with pytest.raises((ps.InvalidInput, ps.RunError), match="has a dim of 2, expected is 1"):
        session.run({"x0": SEQUENCE[:, :1]})
    wanted = by_litert(op.file, op.feeds)
    for value, want in zip(session.run(op.feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 8, 32])
def test_rotation_is_a_product_with_hadamards_matrix(size: int) -> None:
    """LiteRT has it, but does not give its result a shape."""
    x = f(2, 3, 32)
    op = spoken("aeq.hadamard_rotation", x, hadamard_size=size, random_binary_vector=[1, -1])
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    wanted = x.reshape(-1, size) @ matrix / np.sqrt(size)
    got = ps.compile(op.file)(x)
    np.testing.assert_allclose(got.reshape(-1, size), wanted, rtol=1e-5, atol=1e-6)
