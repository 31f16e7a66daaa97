"""Makes ``cases.npz.xz``: graphs of single operations, and what TensorFlow gives for them. The other
``make_*.py`` make further files in the same way, with what is defined here.

Needs TensorFlow (2.21), which the tests do not, and without its oneDNN, which makes less of what
gradients read: ``TF_ENABLE_ONEDNN_OPTS=0 python tests/models/tf_ops/make.py``. Of each case there
are ``name/graph`` (a GraphDef), ``name/in/x:0`` (what to feed) and ``name/out/y:0`` (what must come
out). Arguments in ``fed`` are placeholders, all others constants.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

FOUND: dict[str, np.ndarray] = {}
RNG = np.random.default_rng(11)
F = np.float32


def case(name: str, op: str, fed: dict[str, Any], **given: Any) -> None:
    """One operation of TensorFlow's, with these arguments and attributes."""

    def build(**holders: Any) -> list[tf.Tensor]:
        flat = tf.nest.flatten(getattr(tf.raw_ops, op)(**holders, **given))
        if op.startswith("FusedBatchNorm") and not given["is_training"]:
            return flat[:1]  # TensorFlow leaves the others as they are
        return flat

    several(name, build, fed)


def several(name: str, build: Callable[..., list[tf.Tensor]], fed: dict[str, Any]) -> None:
    """A graph of several operations, which ``build`` makes of the placeholders."""
    graph = tf.Graph()
    feeds = {}
    with graph.as_default():
        holders: dict[str, Any] = {}
        for key, value in fed.items():
            many = value if isinstance(value, list) else [value]
            named = []
            for i, x in enumerate(many):
                shape = [None] * x.ndim if name.endswith("dynamic") else x.shape
                whole = f"{key}_{i}" if isinstance(value, list) else key
                named.append(tf.compat.v1.placeholder(x.dtype, shape, whole))
                feeds[named[-1].name] = x
            holders[key] = named if isinstance(value, list) else named[0]
        flat = build(**holders)
        filling = tf.compat.v1.tables_initializer()
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(filling)
        results = session.run(flat, feeds)
    assert f"{name}/graph" not in FOUND, name
    encoded = graph.as_graph_def().SerializeToString(deterministic=True)
    FOUND[f"{name}/graph"] = np.frombuffer(encoded, np.uint8)
    for key, value in feeds.items():
        FOUND[f"{name}/in/{key}"] = value
    for tensor, value in zip(flat, results, strict=True):
        FOUND[f"{name}/out/{tensor.name}"] = np.asarray(value)


def save(name: str, folder: str = "tf_ops") -> None:
    """Write what was found since the last call to a file of this name; text as bytes."""
    for key, value in FOUND.items():
        if value.dtype == object:
            FOUND[key] = np.array([as_bytes(x) for x in value.reshape(-1)], "S").reshape(
                value.shape
            )
    file = io.BytesIO()
    np.savez(file, **FOUND)
    # Compressed as a whole: most of a case is what all of them have in common.
    path = Path(__file__).parents[1] / folder / f"{name}.npz.xz"
    path.write_bytes(lzma.compress(file.getvalue(), preset=9))
    print(name, sum(key.endswith("/graph") for key in FOUND), "cases")
    FOUND.clear()


def as_bytes(text: bytes | str) -> bytes:
    """Text as NumPy's arrays of bytes have it, whose elements end in no zeros."""
    encoded = text if isinstance(text, bytes) else text.encode()
    assert not encoded.endswith(b"\0"), encoded
    return encoded


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F)


def whole(low: int, high: int, *shape: int) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.int32)


def elementwise() -> None:
    x = np.concatenate([real(8), np.array([0.5, -0.5, 1.5, 2.5, 0, -0.0], F)])
    positive = np.abs(real(6)) + F(0.1)
    for op in (
        *("Abs", "Ceil", "Cos", "Exp", "Expm1", "Floor", "IsFinite", "IsInf", "IsNan", "Neg"),
        *("OnesLike", "Rint", "Round", "Sigmoid", "Sign", "Sin", "Square", "Tanh", "Atan", "Asinh"),
        *("Erf", "Erfc", "Sinh", "Cosh", "ZerosLike", "Tan"),
    ):
        case(op, op, {"x": x})
    for op in ("Log", "Log1p", "Reciprocal", "Rsqrt", "Sqrt", "Inv", "Acosh"):
        case(op, op, {"x": positive + (op == "Acosh")})
    for op in ("Elu", "Relu", "Relu6", "Selu", "Softplus", "Softsign"):
        case(op, op, {"features": 4 * x})
    case("LeakyRelu", "LeakyRelu", {"features": x}, alpha=0.3)
    a, b = np.array([7, -7, 7, -7, 0], np.int32), np.array([3, 3, -3, -3, 5], np.int32)
    for op in ("FloorDiv", "FloorMod", "TruncateDiv", "TruncateMod", "Div", "Mod"):
        case(f"{op}_int32", op, {"x": a, "y": b})
        case(f"{op}_float32", op, {"x": a.astype(F) / 2, "y": b.astype(F)})
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "SquaredDifference"):
        case(f"{op}_int32", op, {"x": a, "y": b})
    case("Add_int8_wraps", "AddV2", {"x": np.array([127, -128], np.int8)}, y=np.int8(1))
    case("Mul_uint8_wraps", "Mul", {"x": np.array([200, 3], np.uint8)}, y=np.uint8(2))
    c, d = real(3, 1), np.array([0, 1, -2, 0.5], F)
    for op in (
        *("Atan2",),
        *("AddV2", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SquaredDifference"),
        *("DivNoNan", "MulNoNan", "Xdivy", "Equal", "NotEqual", "Less", "GreaterEqual"),
    ):
        names = ("y", "x") if op == "Atan2" else ("x", "y")
        case(f"{op}_broadcast", op, dict(zip(names, (c, d), strict=True)))
    case("Xlogy", "Xlogy", {"x": np.array([0, 1, 2], F), "y": np.array([0, 2, 3], F)})
    case("Pow", "Pow", {"x": positive}, y=F(2.5))
    case("ApproximateEqual", "ApproximateEqual", {"x": d}, y=d + F(1e-3), tolerance=0.01)
    flags = np.array([True, False, True])
    case("Select_rows", "Select", {"condition": flags, "x": real(3, 2), "y": real(3, 2)})
    case("SelectV2", "SelectV2", {"condition": flags, "t": real(3), "e": real(2, 1)})
    case("LogicalAnd", "LogicalAnd", {"x": flags, "y": ~flags})
    case("ClipByValue", "ClipByValue", {"t": x}, clip_value_min=F(-1), clip_value_max=F(0.5))
    case("AddN", "AddN", {"inputs": [real(2, 2), real(2, 2), real(2, 2)]})
    case("Softmax", "Softmax", {"logits": real(2, 3, 4)})
    case("LogSoftmax", "LogSoftmax", {"logits": real(3, 4)})
    for low, high in ((-6.0, 6.0), (0.1, 3.0), (-3.0, -0.5), (-1.0, 2.0)):
        for narrow in (False, True):
            name = f"FakeQuant_{low}_{high}_{narrow}"
            case(
                name,
                "FakeQuantWithMinMaxArgs",
                {"inputs": 4 * real(20)},
                min=low,
                max=high,
                narrow_range=narrow,
            )
    case(
        "FakeQuant_channels",
        "FakeQuantWithMinMaxVarsPerChannel",
        {"inputs": real(5, 3)},
        min=np.array([-1, -2, 0], F),
        max=np.array([1, 0.5, 2], F),
    )
    for dtype in ("int32", "uint8", "bool", "float16", "int64", "float64", "bfloat16"):
        values = np.array([0, 1.7, -2.3, 100.5], F) if dtype != "uint8" else np.array([0, 3.9], F)
        if dtype != "bfloat16":
            case(f"Cast_{dtype}", "Cast", {"x": values}, DstT=getattr(tf, dtype))
    case("Cast_wraps", "Cast", {"x": np.array([300, -1], np.int32)}, DstT=tf.uint8)
    y, dy = real(5), real(5)
    for op in ("TanhGrad", "SigmoidGrad", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad"):
        case(op, op, {"y": np.abs(y) + F(0.1), "dy": dy})
    for op in ("ReluGrad", "Relu6Grad"):
        case(op, op, {"gradients": dy, "features": 5 * y})
    case("BiasAdd_last", "BiasAdd", {"value": real(1, 2, 2, 3), "bias": real(3)})
    case("BiasAdd_vector", "BiasAdd", {"value": real(4, 3), "bias": real(3)}, data_format="NHWC")
    case("BiasAddGrad", "BiasAddGrad", {"out_backprop": real(2, 2, 3)})
    case("L2Loss", "L2Loss", {"t": real(3, 3)})
    shapes = {"s0": np.array([2, 1, 3], np.int32), "s1": np.array([4, 1], np.int32)}
    case("BroadcastGradientArgs", "BroadcastGradientArgs", shapes)


def along_axes() -> None:
    x = real(2, 3, 4)
    for op in ("Max", "Mean", "Min", "Prod", "Sum"):
        case(f"{op}_one", op, {"input": x}, axis=1)
        case(f"{op}_two", op, {"input": x}, axis=[-1, 0], keep_dims=True)
        case(f"{op}_none", op, {"input": x}, axis=np.array([], np.int32))
        case(f"{op}_dynamic", op, {"input": x, "axis": np.array([2], np.int32)})
    case("Sum_int32", "Sum", {"input": whole(-9, 9, 3, 4)}, axis=[0, 1])
    for op in ("All", "Any"):
        flags = RNG.integers(0, 2, (3, 4)) > 0
        case(op, op, {"input": flags}, axis=[1])
        case(f"{op}_keep", op, {"input": flags}, axis=[0], keep_dims=True)
    for op in ("ArgMax", "ArgMin"):
        case(op, op, {"input": x}, dimension=-1)
        case(f"{op}_int32", op, {"input": x}, dimension=1, output_type=tf.int32)
    for op in ("Cumsum", "Cumprod"):
        case(op, op, {"x": x}, axis=1)
        case(f"{op}_exclusive", op, {"x": x}, axis=-1, exclusive=True, reverse=True)
    case("TopKV2", "TopKV2", {"input": np.array([[3, 1, 3, 2], [0, 5, 5, 1]], F)}, k=3)
    case("Unique", "Unique", {"x": np.array([4, 1, 4, 2, 1], np.int32)})
    ties = np.array([4.5, 1, 4.5, 2], F)
    case("UniqueWithCounts", "UniqueWithCounts", {"x": ties}, out_idx=tf.int64)
    case("Where", "Where", {"condition": np.array([[1, 0], [0, 2]], F)})


def arrays() -> None:
    x = real(2, 3, 4)
    case("Shape", "Shape", {"input": x})
    case("Shape_int64", "Shape", {"input": x}, out_type=tf.int64)
    case("ShapeN", "ShapeN", {"input": [x, real(5)]})
    case("Size", "Size", {"input": x})
    case("Rank", "Rank", {"input": x})
    case("Reshape", "Reshape", {"tensor": x}, shape=[4, -1])
    case("Reshape_dynamic", "Reshape", {"tensor": x, "shape": np.array([6, 4], np.int32)})
    case("Squeeze", "Squeeze", {"input": real(1, 2, 1)}, axis=[0])
    case("Squeeze_all", "Squeeze", {"input": real(1, 2, 1)})
    case("ExpandDims", "ExpandDims", {"input": x}, axis=-1)
    case("Transpose", "Transpose", {"x": x}, perm=[2, 0, 1])
    case("Transpose_dynamic", "Transpose", {"x": x, "perm": np.array([1, 0, 2], np.int32)})
    case("InvertPermutation", "InvertPermutation", {"x": np.array([2, 0, 1], np.int32)})
    case("BroadcastTo", "BroadcastTo", {"input": real(3, 1)}, shape=[2, 3, 4])
    case("BroadcastArgs", "BroadcastArgs", {"s0": np.array([3, 1], np.int32)}, s1=[2, 1, 4])
    case("Tile", "Tile", {"input": real(2, 3)}, multiples=[2, 1])
    case("Fill", "Fill", {"dims": np.array([2, 0, 3], np.int32)}, value=F(1.5))
    case("Range", "Range", {"start": np.int32(3).reshape(())}, limit=-4, delta=-2)
    case("LinSpace", "LinSpace", {"start": F(1).reshape(())}, stop=F(2), num=5)
    case("ConcatV2", "ConcatV2", {"values": [real(2, 3), real(2, 1)]}, axis=-1)
    case("ConcatV2_empty", "ConcatV2", {"values": [real(0, 3), real(2, 3)]}, axis=0)
    sizes = [np.array([2, 3], np.int32), np.array([4, 3], np.int32)]
    case("ConcatOffset", "ConcatOffset", {"shape": sizes}, concat_dim=0)
    case("Pack", "Pack", {"values": [real(2, 3), real(2, 3)]}, axis=1)
    case("Unpack", "Unpack", {"value": x}, num=3, axis=1)
    case("Split", "Split", {"value": x}, axis=2, num_split=2)
    case("SplitV", "SplitV", {"value": x}, size_splits=[1, -1, 2], axis=2, num_split=3)
    case("Slice", "Slice", {"input": x}, begin=[0, 1, 1], size=[2, -1, 2])
    masks = {
        "plain": {"begin": [0, 2, 1], "end": [2, 0, 4], "strides": [1, -1, 2]},
        "masks": {
            "begin": [1, 1, 3],
            "end": [9, 0, 0],
            "strides": [1, 1, -1],
            "begin_mask": 1,
            "end_mask": 6,
        },
        "shrink": {"begin": [-1, 0], "end": [0, 2], "strides": [1, 1], "shrink_axis_mask": 1},
        "ellipsis": {
            "begin": [0, 0, 1],
            "end": [0, 0, 3],
            "strides": [1, 1, 1],
            "ellipsis_mask": 2,
        },
        "axes": {"begin": [0, 0, 0], "end": [1, 0, 2], "strides": [1, 1, 1], "new_axis_mask": 2},
        "both": {
            "begin": [0, 0, 0, 1],
            "end": [0, 0, 0, 2],
            "strides": [1, 1, 1, 1],
            "ellipsis_mask": 1,
            "new_axis_mask": 2,
            "shrink_axis_mask": 8,
        },
        "empty": {"begin": [1, 2, 0], "end": [1, 9, 9], "strides": [1, 1, 1]},
    }
    for name, given in masks.items():
        case(f"StridedSlice_{name}", "StridedSlice", {"input": x}, **given)
    begin = np.array([1, 0], np.int32)
    case(
        "StridedSlice_dynamic",
        "StridedSlice",
        {"input": x, "begin": begin},
        end=[2, 2],
        strides=[1, 1],
    )
    case("GatherV2", "GatherV2", {"params": x, "indices": whole(0, 3, 2, 2)}, axis=1)
    places = whole(0, 4, 2, 3, 5)
    case("GatherV2_batch", "GatherV2", {"params": x, "indices": places}, axis=2, batch_dims=2)
    case(
        "GatherV2_batch_axis",
        "GatherV2",
        {"params": x, "indices": whole(0, 4, 2, 2)},
        axis=2,
        batch_dims=1,
    )
    case("GatherNd", "GatherNd", {"params": x}, indices=[[0, 1], [1, 2]])
    spots = np.array([[1], [3], [1]], np.int32)
    case("ScatterNd", "ScatterNd", {"indices": spots, "updates": real(3, 2)}, shape=[4, 2])
    case(
        "TensorScatterUpdate",
        "TensorScatterUpdate",
        {"tensor": real(4, 2), "updates": real(1, 2)},
        indices=[[2]],
    )
    case(
        "TensorScatterAdd",
        "TensorScatterAdd",
        {"tensor": real(4, 2), "updates": real(3, 2)},
        indices=spots,
    )
    case("Pad", "Pad", {"input": real(2, 3)}, paddings=[[1, 0], [0, 2]])
    case("PadV2", "PadV2", {"input": real(2, 3)}, paddings=[[1, 0], [0, 2]], constant_values=F(9))
    case(
        "MirrorPad_reflect",
        "MirrorPad",
        {"input": real(3, 3)},
        paddings=[[1, 2], [0, 2]],
        mode="REFLECT",
    )
    case(
        "MirrorPad_symmetric",
        "MirrorPad",
        {"input": real(3, 3)},
        paddings=[[1, 2], [0, 3]],
        mode="SYMMETRIC",
    )
    case("ReverseV2", "ReverseV2", {"tensor": x}, axis=[0, -1])
    case(
        "ReverseSequence",
        "ReverseSequence",
        {"input": real(2, 4)},
        seq_lengths=[3, 1],
        seq_dim=1,
        batch_dim=0,
    )
    case(
        "OneHot",
        "OneHot",
        {"indices": np.array([[1, -1], [3, 0]], np.int32)},
        depth=3,
        on_value=F(5),
        off_value=F(-1),
    )
    case(
        "OneHot_axis",
        "OneHot",
        {"indices": np.array([1, 2], np.int64)},
        depth=3,
        on_value=1,
        off_value=0,
        axis=0,
    )
    image = real(1, 4, 6, 4)
    case("SpaceToDepth", "SpaceToDepth", {"input": image}, block_size=2)
    case("DepthToSpace", "DepthToSpace", {"input": image}, block_size=2)
    case(
        "SpaceToBatchND",
        "SpaceToBatchND",
        {"input": real(1, 3, 4, 2)},
        block_shape=[2, 2],
        paddings=[[0, 1], [1, 1]],
    )
    case(
        "BatchToSpaceND",
        "BatchToSpaceND",
        {"input": real(4, 2, 3, 2)},
        block_shape=[2, 2],
        crops=[[0, 1], [1, 0]],
    )
    case("MatrixDiag", "MatrixDiag", {"diagonal": real(2, 3)})
    more = {"num_rows": -1, "num_cols": -1, "padding_value": F(0)}
    case("MatrixDiagV3", "MatrixDiagV3", {"diagonal": real(2, 3)}, k=0, **more)
    case("MatrixDiagV3_above", "MatrixDiagV3", {"diagonal": real(3)}, k=1, **more)
    for align in ("RIGHT_LEFT", "LEFT_RIGHT", "LEFT_LEFT", "RIGHT_RIGHT"):
        given = {"k": [-1, 1], "num_rows": 3, "num_cols": 4, "padding_value": F(7), "align": align}
        case(f"MatrixDiagV3_{align}", "MatrixDiagV3", {"diagonal": real(2, 3, 3)}, **given)
        case(
            f"MatrixDiagPartV3_{align}",
            "MatrixDiagPartV3",
            {"input": real(2, 3, 4)},
            k=[-1, 1],
            padding_value=F(7),
            align=align,
        )
        case(
            f"MatrixSetDiagV3_{align}",
            "MatrixSetDiagV3",
            {"input": real(2, 3, 4), "diagonal": real(2, 3, 3)},
            k=[-1, 1],
            align=align,
        )
    case("MatrixBandPart", "MatrixBandPart", {"input": real(4, 5)}, num_lower=1, num_upper=-1)


def products() -> None:
    case("MatMul", "MatMul", {"a": real(2, 3), "b": real(3, 4)})
    case(
        "MatMul_transposed",
        "MatMul",
        {"a": real(3, 2), "b": real(4, 3)},
        transpose_a=True,
        transpose_b=True,
    )
    case("MatMul_int32", "MatMul", {"a": whole(-9, 9, 2, 3), "b": whole(-9, 9, 3, 2)})
    case("BatchMatMulV2", "BatchMatMulV2", {"x": real(2, 1, 3, 4), "y": real(5, 4, 2)})
    case(
        "BatchMatMulV2_adjoint",
        "BatchMatMulV2",
        {"x": real(2, 4, 3), "y": real(2, 5, 4)},
        adj_x=True,
        adj_y=True,
    )
    z = (real(2, 3) + 1j * real(2, 3)).astype(np.complex64)
    case("BatchMatMulV2_complex", "BatchMatMulV2", {"x": z, "y": z}, adj_y=True)
    case("Einsum", "Einsum", {"inputs": [real(2, 3, 4), real(4, 5)]}, equation="abc,cd->abd")


def windows() -> None:
    image, square = real(2, 7, 6, 3), real(3, 3, 3, 4)
    for padding in ("SAME", "VALID"):
        for step in (1, 2):
            case(
                f"Conv2D_{padding}_{step}",
                "Conv2D",
                {"input": image, "filter": square},
                strides=[1, step, step, 1],
                padding=padding,
            )
            case(
                f"MaxPool_{padding}_{step}",
                "MaxPool",
                {"input": image},
                ksize=[1, 3, 2, 1],
                strides=[1, step, step, 1],
                padding=padding,
            )
            case(
                f"AvgPool_{padding}_{step}",
                "AvgPool",
                {"value": image},
                ksize=[1, 3, 2, 1],
                strides=[1, step, step, 1],
                padding=padding,
            )
            case(
                f"Depthwise_{padding}_{step}",
                "DepthwiseConv2dNative",
                {"input": image},
                filter=real(3, 3, 3, 2),
                strides=[1, step, step, 1],
                padding=padding,
            )
            sizes = [2, 7, 6, 3]
            rows = {
                ("SAME", 1): (7, 6),
                ("SAME", 2): (4, 3),
                ("VALID", 1): (5, 4),
                ("VALID", 2): (3, 2),
            }
            back = real(2, *rows[padding, step], 4)
            case(
                f"Conv2DBackpropInput_{padding}_{step}",
                "Conv2DBackpropInput",
                {"out_backprop": back},
                input_sizes=sizes,
                filter=square,
                strides=[1, step, step, 1],
                padding=padding,
            )
    case(
        "Conv2DBackpropInput_dynamic",
        "Conv2DBackpropInput",
        {"input_sizes": np.array([2, 7, 6, 3], np.int32), "out_backprop": real(2, 4, 3, 4)},
        filter=square,
        strides=[1, 2, 2, 1],
        padding="SAME",
    )
    case(
        "Conv2D_dilated",
        "Conv2D",
        {"input": image, "filter": square},
        strides=[1, 1, 1, 1],
        padding="SAME",
        dilations=[1, 2, 2, 1],
    )
    case(
        "Conv2D_explicit",
        "Conv2D",
        {"input": image, "filter": square},
        strides=[1, 2, 2, 1],
        padding="EXPLICIT",
        explicit_paddings=[0, 0, 1, 2, 0, 1, 0, 0],
    )
    case(
        "Conv3D",
        "Conv3D",
        {"input": real(1, 4, 5, 4, 2), "filter": real(2, 2, 2, 2, 3)},
        strides=[1, 1, 2, 1, 1],
        padding="SAME",
    )
    case(
        "MaxPool3D",
        "MaxPool3D",
        {"input": real(1, 4, 5, 4, 2)},
        ksize=[1, 2, 2, 2, 1],
        strides=[1, 2, 2, 2, 1],
        padding="SAME",
    )
    stats = {"scale": real(3), "offset": real(3), "mean": real(3), "variance": np.abs(real(3))}
    for op in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
        case(op, op, {"x": image}, is_training=False, epsilon=0.01, **stats)
    case(
        "FusedBatchNormV3_training",
        "FusedBatchNormV3",
        {"x": image},
        is_training=True,
        epsilon=0.01,
        scale=real(3),
        offset=real(3),
        mean=np.array([], F),
        variance=np.array([], F),
    )
    case("LRN", "LRN", {"input": image}, depth_radius=1, bias=1.5, alpha=0.3, beta=0.6)


def images() -> None:
    image = real(2, 4, 5, 3)
    for op in ("ResizeBilinear", "ResizeNearestNeighbor"):
        for size in ((7, 3), (2, 10), (8, 10)):
            for name, given in (
                ("plain", {}),
                ("corners", {"align_corners": True}),
                ("centres", {"half_pixel_centers": True}),
            ):
                case(f"{op}_{name}_{size[0]}", op, {"images": image}, size=list(size), **given)
    case(
        "ResizeBilinear_uint8",
        "ResizeBilinear",
        {"images": np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)},
        size=[3, 3],
    )
    boxes = np.array([[0, 0, 1, 1], [0.2, 0.1, 0.7, 0.9], [0.5, 0.5, 1.4, -0.2]], F)
    which = np.array([0, 1, 1], np.int32)
    for method in ("bilinear", "nearest"):
        for size in ((3, 4), (1, 2)):
            given = {"crop_size": list(size), "method": method, "extrapolation_value": -3.0}
            case(
                f"CropAndResize_{method}_{size[0]}",
                "CropAndResize",
                {"image": image, "boxes": boxes, "box_ind": which},
                **given,
            )
    corners = RNG.uniform(0, 0.6, (12, 2)).astype(F)
    many = np.concatenate([corners, corners + RNG.uniform(0.1, 0.4, (12, 2)).astype(F)], 1)
    scores = RNG.permutation(12).astype(F) / 12
    inputs = {"boxes": many, "scores": scores}
    case("NonMaxSuppression", "NonMaxSuppression", inputs, max_output_size=5, iou_threshold=0.3)
    some = {"max_output_size": 8, "iou_threshold": F(0.2), "score_threshold": F(0.25)}
    case("NonMaxSuppressionV3", "NonMaxSuppressionV3", inputs, **some)
    case("NonMaxSuppressionV4", "NonMaxSuppressionV4", inputs, pad_to_max_output_size=True, **some)
    case("NonMaxSuppressionV5", "NonMaxSuppressionV5", inputs, soft_nms_sigma=F(0), **some)
    soft = {**some, "iou_threshold": F(1), "score_threshold": F(0.1)}
    case("NonMaxSuppressionV5_soft", "NonMaxSuppressionV5", inputs, soft_nms_sigma=F(0.5), **soft)
    batch = {"boxes": many.reshape(2, 6, 1, 4), "scores": RNG.uniform(0, 1, (2, 6, 3)).astype(F)}
    all_of = {
        "max_output_size_per_class": 3,
        "max_total_size": 5,
        "iou_threshold": F(0.3),
        "score_threshold": F(0.2),
    }
    case("CombinedNonMaxSuppression", "CombinedNonMaxSuppression", batch, **all_of)
    few = {
        "max_output_size_per_class": 1,
        "max_total_size": 5,
        "iou_threshold": F(0.3),
        "score_threshold": F(0.2),
    }
    case(
        "CombinedNonMaxSuppression_pads",
        "CombinedNonMaxSuppression",
        batch,
        pad_per_class=True,
        clip_boxes=False,
        **few,
    )


def sounds() -> None:
    case("RFFT", "RFFT", {"input": real(2, 8)}, fft_length=[8])
    case("RFFT_shorter", "RFFT", {"input": real(2, 8)}, fft_length=[5])
    z = (real(2, 5) + 1j * real(2, 5)).astype(np.complex64)
    case("IRFFT", "IRFFT", {"input": z}, fft_length=[8])
    case("FFT", "FFT", {"input": z})
    case("IFFT", "IFFT", {"input": z})
    case("ComplexAbs", "ComplexAbs", {"x": z})
    case("Real", "Real", {"input": z})
    case("Imag", "Imag", {"input": z})
    case("Conj", "Conj", {"input": z})
    case("Complex", "Complex", {"real": real(3)}, imag=real(3))


def lists() -> None:
    raw = tf.raw_ops

    def made(x: tf.Tensor) -> tf.Tensor:
        return raw.TensorListFromTensor(tensor=x, element_shape=[2])

    def stacked(handle: tf.Tensor) -> tf.Tensor:
        return raw.TensorListStack(input_handle=handle, element_shape=[2], element_dtype=tf.float32)

    def resized(x: tf.Tensor) -> list[tf.Tensor]:
        handles = [raw.TensorListResize(input_handle=made(x), size=n) for n in (5, 2)]
        return [stacked(each) for each in handles]

    def scattered(x: tf.Tensor) -> list[tf.Tensor]:
        given = {"tensor": x, "indices": [3, 0, 1], "element_shape": [2]}
        handles = [raw.TensorListScatterV2(num_elements=n, **given) for n in (-1, 6)]
        return [stacked(each) for each in handles]

    def gathered(x: tf.Tensor) -> list[tf.Tensor]:
        handle = made(x)
        shape = raw.TensorListElementShape(input_handle=handle, shape_type=tf.int32)
        given = {"input_handle": handle, "element_shape": [2], "element_dtype": tf.float32}
        return [raw.TensorListGather(indices=[2, 0, 2], **given), shape]

    def joined(x: tf.Tensor) -> list[tf.Tensor]:
        parts = raw.TensorListSplit(tensor=x, element_shape=[-1, 2], lengths=[1, 0, 2])
        return list(
            raw.TensorListConcatV2(
                input_handle=parts,
                element_shape=[-1, 2],
                leading_dims=np.array([], np.int64),
                element_dtype=tf.float32,
            )
        )

    def reserved(x: tf.Tensor) -> list[tf.Tensor]:
        handle = raw.TensorListReserve(element_shape=[2], num_elements=2, element_dtype=tf.float32)
        handle = raw.TensorListSetItem(input_handle=handle, index=1, item=x[0])
        return [stacked(handle), raw.TensorListLength(input_handle=handle)]

    for build in (resized, scattered, gathered, joined, reserved):
        several(f"TensorList_{build.__name__}", build, {"x": real(3, 2)})


def inferred() -> None:
    """Operations that mean one thing or another by shapes that only follow from others."""
    raw = tf.raw_ops

    def expanded(x: tf.Tensor) -> list[tf.Tensor]:
        weights = tf.expand_dims(tf.constant(real(3, 2, 2)), 0)
        kinds = {"strides": [1, 1, 1, 1], "padding": "SAME"}
        return [raw.DepthwiseConv2dNative(input=x, filter=weights, **kinds)]

    several("DepthwiseConv2dNative_expanded", expanded, {"x": real(1, 4, 5, 2)})
    weights = real(3, 3, 2, 6)

    def grouped(x: tf.Tensor) -> list[tf.Tensor]:
        y = raw.Relu(features=x)
        kinds = {"strides": [1, 1, 1, 1], "padding": "VALID"}
        return [raw.Conv2D(input=y, filter=weights, **kinds)]

    several("Conv2D_grouped_behind", grouped, {"x": real(1, 4, 5, 4)})

    @tf.function(input_signature=[tf.TensorSpec(None, F)], autograph=False)
    def called(x: tf.Tensor) -> tf.Tensor:
        return grouped(x)[0]

    several("Conv2D_grouped_called", lambda x: [called(x)], {"x": real(1, 4, 5, 4)})
    square = real(3, 3, 2, 4)

    def as_large(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        kinds = {"strides": [1, 2, 2, 1], "padding": "SAME"}
        return [
            raw.Conv2DBackpropInput(input_sizes=tf.shape(x), filter=square, out_backprop=y, **kinds)
        ]

    several("Conv2DBackpropInput_shape", as_large, {"x": real(2, 7, 6, 2), "y": real(2, 4, 3, 4)})
    cube = real(2, 3, 3, 2, 4)
    for padding, sizes in (("SAME", (2, 4, 7, 5, 2)), ("VALID", (2, 4, 7, 6, 2))):
        for step in (1, 2):
            image = tf.zeros(sizes)
            kinds = {"strides": [1, step, step, step, 1], "padding": padding}
            back = real(*raw.Conv3D(input=image, filter=cube, **kinds).shape)
            case(
                f"Conv3DBackpropInputV2_{padding}_{step}",
                "Conv3DBackpropInputV2",
                {"out_backprop": back},
                input_sizes=np.array(sizes, np.int32),
                filter=cube,
                **kinds,
            )
    case(
        "Conv3DBackpropInputV2_dynamic",
        "Conv3DBackpropInputV2",
        {"input_sizes": np.array([2, 4, 7, 5, 2], np.int32), "out_backprop": real(2, 2, 4, 3, 4)},
        filter=cube,
        strides=[1, 2, 2, 2, 1],
        padding="SAME",
    )


if __name__ == "__main__":
    for part in (
        elementwise,
        along_axes,
        arrays,
        products,
        windows,
        images,
        sounds,
        lists,
        inferred,
    ):
        part()
    save("cases")
