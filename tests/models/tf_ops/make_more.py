"""Makes ``more.npz.xz``, as ``make.py`` does ``cases.npz.xz``: what the others leave out."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from make import RNG, F, case, real, save, several
from make_text import words


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rows() -> None:
    """Segments without rows, and rows in parts."""
    none = {"data": real(0, 3), "segment_ids": numbers()}
    for name in ("Sum", "Max"):
        for count in (0, 2):
            label = f"UnsortedSegment{name}_none_{count}"
            case(label, f"UnsortedSegment{name}", none, num_segments=np.int32(count))
    empty = {"data": real(2, 0), "segment_ids": numbers(0, 1)}
    case("UnsortedSegmentSum_of_nothing", "UnsortedSegmentSum", empty, num_segments=np.int32(3))
    parts = {"data": real(5, 2), "partitions": numbers(0, 2, 0, 2, 0)}
    case("DynamicPartition", "DynamicPartition", parts, num_partitions=3)
    case("DynamicPartition_dynamic", "DynamicPartition", parts, num_partitions=4)
    places = {"data": words(*"abcdef").reshape(2, 3), "partitions": numbers(1, 0, 1, 1, 1, 0)}
    places["partitions"] = places["partitions"].reshape(2, 3)
    case("DynamicPartition_tables", "DynamicPartition", places, num_partitions=2)
    case("DynamicPartition_one", "DynamicPartition", places | {"data": real(2, 3, 4)}, **ONE)
    pieces = {
        "indices": [numbers(3, 0), numbers(1, 2).reshape(2, 1), np.array(0, np.int32), numbers()],
        "data": [real(2, 3), real(2, 1, 3), real(3), real(0, 3)],
    }
    case("DynamicStitch", "DynamicStitch", pieces)
    case("DynamicStitch_dynamic", "DynamicStitch", pieces)
    nothing = {"indices": [numbers()], "data": [real(0, 3)]}
    case("DynamicStitch_of_nothing", "DynamicStitch", nothing)
    apart = {"indices": pieces["indices"][:2], "data": pieces["data"][:2]}
    case("ParallelDynamicStitch", "ParallelDynamicStitch", apart)


ONE = {"num_partitions": 2}


def wide_products() -> None:
    x, y = (RNG.integers(-100, 100, shape).astype(np.int8) for shape in ((2, 3, 40), (40, 5)))
    case("BatchMatMulV3_int8", "BatchMatMulV3", {"x": x, "y": y}, Tout=tf.int32)
    turned = {"x": x, "y": np.abs(y.T).astype(np.uint8)}
    case("BatchMatMulV3_adjoint", "BatchMatMulV3", turned, Tout=tf.int32, adj_y=True)
    real_y = {"x": np.abs(x).astype(np.uint8), "y": y}
    case("BatchMatMulV3_dynamic", "BatchMatMulV3", real_y, Tout=tf.int32)


def soft_boxes() -> None:
    """A share beyond the threshold does not matter where scores are lowered."""
    low = np.round(RNG.uniform(size=(20, 2)) * 4) / 4
    boxes = np.concatenate([low, low + np.round(RNG.uniform(size=(20, 2)) * 3 + 1) / 4], 1)
    scores = (RNG.permutation(20) / 20).astype(F)
    given = {"boxes": boxes.astype(F), "scores": scores}
    limits = {"max_output_size": np.int32(12), "score_threshold": F(0.1)}
    for share, sigma in ((0.5, 0.5), (0.2, 0.3), (0.0, 1.0)):
        label = f"NonMaxSuppressionV5_{share}_{sigma}"
        more = {"iou_threshold": F(share), "soft_nms_sigma": F(sigma)}
        case(label, "NonMaxSuppressionV5", given, **limits, **more)


def ragged() -> None:
    splits = [longs(0, 2, 2, 3), longs(0, 1, 4, 6)]
    given = {"params_nested_splits": splits, "params_dense_values": real(6, 2)}
    for name, indices, rank in (
        ("vector", longs(2, 0, 0, 1), 2),
        ("matrix_dynamic", longs(2, 1, 0, 0, 1, 2).reshape(2, 3), 3),
        ("nothing", longs(), 2),
    ):
        fed = given | {"indices": indices}
        case(f"RaggedGather_{name}", "RaggedGather", fed, OUTPUT_RAGGED_RANK=rank)
    texts = {"params_nested_splits": splits[1:], "params_dense_values": words(*"abcdef")}
    case("RaggedGather_texts", "RaggedGather", texts | {"indices": longs(1)}, OUTPUT_RAGGED_RANK=1)
    for name, values in (("rows", real(6, 2)), ("texts_dynamic", words(*"abcdef"))):
        nested = {"rt_nested_splits": splits, "rt_dense_values": values}
        case(f"RaggedTensorToSparse_{name}", "RaggedTensorToSparse", nested)
    none = {"rt_nested_splits": [longs(0)], "rt_dense_values": real(0)}
    case("RaggedTensorToSparse_none", "RaggedTensorToSparse", none)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def characters() -> None:
    texts = words("h\x01\u00e9llo", "", b"a\xffb", b"\xe6\x97", "\u65e5\U0001f600").reshape(5, 1)
    for errors in ("replace", "ignore"):
        for controls in (False, True):
            more = {"errors": errors, "replace_control_characters": controls}
            rest = {"input_encoding": "UTF-8", "replacement_char": 63, **more}
            label = f"{errors}_{controls}"
            given = {"input": texts}
            case(
                f"UnicodeTranscode_{label}",
                "UnicodeTranscode",
                given,
                output_encoding="UTF-8",
                **rest,
            )
            case(f"UnicodeDecodeWithOffsets_{label}", "UnicodeDecodeWithOffsets", given, **rest)
    wide = {"input": words("\u00e9\u65e5\U0001f600a")}
    codes = {"input_encoding": "utf-8", "output_encoding": "UTF-16-BE"}
    case("UnicodeTranscode_dynamic", "UnicodeTranscode", wide, **codes)


def scaled() -> None:
    image = {"images": RNG.uniform(size=(2, 7, 9, 2)).astype(F)}
    kernels = ("lanczos1", "lanczos3", "lanczos5", "gaussian", "box", "triangle", "keyscubic")
    for kernel in (*kernels, "mitchellcubic"):
        for height, width in ((4, 5), (12, 9), (1, 20)):
            size = np.array([height, width], np.int32)
            scale = (size / np.array([7, 9])).astype(F)
            more = {"size": size, "scale": scale, "kernel_type": kernel}
            label = f"ScaleAndTranslate_{kernel}_{height}"
            case(label, "ScaleAndTranslate", image, translation=np.zeros(2, F), **more)
    moved = {"scale": np.array([0.5, 2], F), "translation": np.array([1.5, -3], F)}
    given = image | {"size": np.array([6, 8], np.int32)} | moved
    case("ScaleAndTranslate_dynamic", "ScaleAndTranslate", given, antialias=False)
    codes = {"images": RNG.integers(0, 255, (1, 5, 4, 3)).astype(np.uint8)}
    more = {"size": np.array([3, 3], np.int32), "scale": np.array([0.6, 0.75], F)}
    case("ScaleAndTranslate_uint8", "ScaleAndTranslate", codes, translation=np.zeros(2, F), **more)


def complex_numbers() -> None:
    x = (real(3, 4) + 1j * real(3, 4)).astype(np.complex64)
    y = (real(3, 4) + 1j * real(3, 4)).astype(np.complex64)
    for name in ("Sigmoid", "Tanh", "Angle", "Square", "Exp"):
        argument = "input" if name == "Angle" else "x"
        case(f"{name}_complex", name, {argument: x})
    for name in ("Mean", "EuclideanNorm", "Sum", "Prod"):
        axis = np.array([1], np.int32)
        case(f"{name}_complex", name, {"input": x.astype(np.complex128)}, axis=axis)
    for kind in (tf.float32, tf.float64, tf.int32, tf.bool):
        case(f"Cast_complex_{kind.name}", "Cast", {"x": np.append(x, 1j)}, DstT=kind)
    for name in ("SquaredDifference", "Mul", "RealDiv"):
        case(f"{name}_complex", name, {"x": x, "y": y})
    for name in ("SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "TanhGrad", "SigmoidGrad"):
        case(f"{name}_complex", name, {"y": x, "dy": y})


def at_limits() -> None:
    zeros = {"y": np.array([0, np.inf, 2], F), "dy": np.zeros(3, F)}
    for name in ("SqrtGrad", "RsqrtGrad", "ReciprocalGrad"):
        case(f"{name}_of_0", name, zeros)
    x = numbers(5, -7, 2**31 - 1, 1, -1, 9)
    shifts = {"x": x, "y": numbers(31, 32, -1, 100, -5, 3)}
    for name in ("LeftShift", "RightShift"):
        case(f"{name}_far", name, shifts)
        few = {"x": np.arange(9, 15).astype(np.uint8), "y": np.arange(5, 11).astype(np.uint8)}
        case(f"{name}_uint8_dynamic", name, few)
    for kind in (F, np.int64):
        for name in ("Unique", "UniqueWithCounts"):
            case(f"{name}_none_{kind.__name__}", name, {"x": np.empty(0, kind)})
    empty = {"x": np.empty((0, 0), np.int64)}
    case("UniqueV2_none", "UniqueV2", empty, axis=np.array([1], np.int64))
    nothing = {"x": numbers().reshape(2, 0, 3), "y": numbers(0, 1, 0)}
    for name in ("FloorDiv", "FloorMod", "TruncateDiv"):
        case(f"{name}_of_nothing", name, nothing)


def codes() -> None:
    given = {"input": real(5, 4) * 2}
    for axis, low, high in ((-1, F(-1.3), F(2.1)), (1, -np.abs(real(4)), np.abs(real(4)))):
        limits = {"input_min": low, "input_max": high, "axis": axis}
        for bits, signed, narrow in ((8, True, False), (4, True, True), (3, False, False)):
            more = {**limits, "signed_input": signed, "narrow_range": narrow}
            for mode in ("HALF_TO_EVEN", "HALF_UP") if axis < 0 else ():
                label = f"QuantizeAndDequantizeV4_{axis}_{bits}_{mode}"
                rest = {"num_bits": bits, "round_mode": mode, "range_given": True}
                case(label, "QuantizeAndDequantizeV4", given, **more, **rest)
            label = f"QuantizeAndDequantizeV3_{axis}_{bits}"
            for range_given in (False, True):
                own = {"range_given": range_given, "num_bits": np.int32(bits)}
                case(f"{label}_{range_given}", "QuantizeAndDequantizeV3", given, **more, **own)
    ends = {"input_min": F(0), "input_max": F(0)}
    case("QuantizeAndDequantizeV2_dynamic", "QuantizeAndDequantizeV2", given | ends)


def decoded() -> None:
    scores, lengths = {"inputs": real(7, 3, 5)}, numbers(7, 4, 0)
    scores["inputs"][2] = scores["inputs"][1]  # the same class twice
    for merged in (False, True):
        for blank in (-1, 0):
            more = {"merge_repeated": merged, "blank_index": blank}
            label = f"CTCGreedyDecoder_{merged}_{blank}"
            case(label, "CTCGreedyDecoder", scores, sequence_length=lengths, **more)
    case("CTCGreedyDecoder_dynamic", "CTCGreedyDecoder", scores | {"sequence_length": lengths})


def differences() -> None:
    case("ListDiff", "ListDiff", {"x": numbers(1, 2, 3, 2, 5), "y": numbers(2, 9)})
    texts = {"x": words("a", "b", "", "a"), "y": words("b")}
    case("ListDiff_texts_dynamic", "ListDiff", texts, out_idx=tf.int64)
    case("ListDiff_none", "ListDiff", {"x": numbers(), "y": numbers(1)})
    pairs = {"x": np.array([0, 0, 2, -1, np.nan], F), "y": np.array([-1, np.nan, 3, -0.5, 0], F)}
    case("Xlog1py", "Xlog1py", pairs)


def tiled() -> None:
    """A filter that is repeated for each channel, whose number ShapeN gives."""
    window = real(3, 3, 1, 1)

    def build(x: tf.Tensor) -> list[tf.Tensor]:
        channels = tf.shape_n([x, x])[1][-1]
        filters = tf.tile(tf.constant(window), tf.stack([1, 1, channels, 1]))
        return [tf.nn.depthwise_conv2d(x, filters, [1, 1, 1, 1], "VALID")]

    several("DepthwiseConv2dNative_tiled", build, {"x": real(2, 6, 5, 3)})


if __name__ == "__main__":
    for make in (
        rows,
        wide_products,
        soft_boxes,
        ragged,
        characters,
        scaled,
        complex_numbers,
        at_limits,
        codes,
        decoded,
        differences,
        tiled,
    ):
        make()
    save("more")
