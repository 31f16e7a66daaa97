"""Makes ``counts.npz.xz``, as ``make.py`` does ``cases.npz``: operations that count,
rank, sort into segments, move or look at bits; special functions; and more of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from make import RNG, F, case, real, save, whole


def counting() -> None:
    rows = np.array([[1, 2, 1], [1, 2, 1], [0, 2, 1], [1, 2, 1]], F)
    no_axis = np.empty(0, np.int64)
    vector = np.array([4, 1, 4, 2, 1], np.int32)
    case("UniqueV2", "UniqueV2", {"x": vector}, axis=no_axis)
    case("UniqueV2_vector_axis", "UniqueV2", {"x": vector}, axis=np.array([0], np.int64))
    case("UniqueV2_rows", "UniqueV2", {"x": rows}, axis=np.array([0], np.int64))
    axis = np.array([-1], np.int32)
    case("UniqueWithCountsV2", "UniqueWithCountsV2", {"x": rows}, axis=axis, out_idx=tf.int64)
    case("UniqueV2_dynamic", "UniqueV2", {"x": rows, "axis": axis})
    odd = np.array([np.nan, 0, np.nan, -0.0, np.inf], F)
    case("Unique_nan", "Unique", {"x": odd})
    case("UniqueV2_nan", "UniqueV2", {"x": odd[:, None]}, axis=np.array([0], np.int64))
    words = np.array([["a", "b"], ["a", "b"], ["b", "b"]], object)
    case("UniqueV2_words", "UniqueV2", {"x": words}, axis=np.array([0], np.int64))
    x = np.array([-1, 0, 0.25, 0.5, 7, np.inf, np.nan], F)
    case("Bucketize", "Bucketize", {"input": x}, boundaries=[0, 0.5, 0.5, 2])
    case("Bucketize_float64", "Bucketize", {"input": x.astype(np.float64)}, boundaries=[0.1, 0.5])
    numbers = np.array([[0, 1, 2**24 + 1]], np.int64)
    case("Bucketize_int64", "Bucketize", {"input": numbers}, boundaries=[0.5, 2.0**24 + 2])
    case("Bucketize_none", "Bucketize", {"input": x}, boundaries=[])
    ordered = np.array([[1, 2, 2, 5], [-3, 0, 4, 4]], F)
    wanted = np.array([[2, 0, 9, 5, np.nan], [4, -3, -9, 1, 5]], F)
    for op in ("LowerBound", "UpperBound"):
        case(op, op, {"sorted_inputs": ordered, "values": wanted})
        whole_ones = {"sorted_inputs": ordered.astype(np.int32), "values": whole(-4, 6, 2, 3)}
        case(f"{op}_dynamic", op, whole_ones, out_type=tf.int64)
    values = np.array([[1, 1, 5], [0, 2, 0]], np.int32)
    none = np.empty(0, F)
    weights = np.array([[1, 2, 4], [8, 16, 32]], F)
    case("Bincount", "Bincount", {"arr": values}, size=3, weights=none)
    case("Bincount_weights", "Bincount", {"arr": values, "weights": weights}, size=6)
    whole_weights = np.arange(6, dtype=np.int64).reshape(2, 3) + 2**60
    case("Bincount_int64", "Bincount", {"arr": values, "weights": whole_weights}, size=6)
    for name, given in (("", none), ("_weights", weights)):
        for binary in (False, True):
            more = {"binary_output": binary, "weights": given}
            case(
                f"DenseBincount{name}_{binary}", "DenseBincount", {"input": values}, size=4, **more
            )
    case("DenseBincount_vector", "DenseBincount", {"input": values[0]}, size=4, weights=none)
    case("DenseBincount_scalar", "DenseBincount", {"input": values[0, 0]}, size=4, weights=none)
    size = np.int64(3).reshape(())
    counted = {"input": values.astype(np.int64), "size": size}
    case("DenseBincount_dynamic", "DenseBincount", counted, weights=np.empty(0, np.int32))
    ragged = {"splits": np.array([0, 2, 2, 3, 6], np.int64), "values": values.reshape(-1)}
    case("RaggedBincount", "RaggedBincount", ragged, size=3, weights=none)
    odd_splits = ragged | {"splits": np.array([0, 4, 1, 6], np.int64)}
    case("RaggedBincount_falling", "RaggedBincount", odd_splits, size=6, weights=none)
    more = {"size": 6, "weights": weights.reshape(-1), "binary_output": True}
    case("RaggedBincount_binary", "RaggedBincount", ragged, **more)
    scores = np.array([[1, 2, 3], [1, 2, 2], [1, np.nan, 3], [1, 2, 3], [3, 2, 1]], F)
    targets = np.array([1, 1, 0, 7, -1], np.int32)
    for k in (0, 1, 2):
        case(f"InTopK_{k}", "InTopK", {"predictions": scores, "targets": targets}, k=k)
    k = np.int64(2).reshape(())
    case(
        "InTopKV2", "InTopKV2", {"predictions": scores, "targets": targets.astype(np.int64), "k": k}
    )


def segments() -> None:
    x, numbers = real(5, 2, 2), np.array([-3, -4, 5, 6, 7], np.int32)
    ids = np.array([0, 0, 2, 2, 4], np.int32)
    mixed = np.array([3, 0, -1, 0, 1], np.int32)
    for name in ("Sum", "Mean", "Max", "Min", "Prod"):
        op = f"Segment{name}"
        case(op, op, {"data": x, "segment_ids": ids})
        case(f"{op}_int32", op, {"data": numbers, "segment_ids": ids.astype(np.int64)})
        case(f"{op}_empty", op, {"data": x[:0], "segment_ids": ids[:0]})
        case(f"{op}_dynamic", op, {"data": x, "segment_ids": ids + 1})
        if name == "Mean":
            continue
        op = f"Unsorted{op}"
        case(op, op, {"data": x, "segment_ids": mixed}, num_segments=5)
        case(f"{op}_int32", op, {"data": numbers, "segment_ids": mixed}, num_segments=np.int64(5))
        half = {"data": numbers.astype(np.float16), "segment_ids": mixed}
        case(f"{op}_float16", op, half, num_segments=5)
        places = np.array([[0, 1], [1, 0], [-1, 0], [1, 1], [0, 0]], np.int32)
        count = np.int32(3).reshape(())
        dynamic = {"data": x, "segment_ids": places, "num_segments": count}
        case(f"{op}_dynamic", op, dynamic)
    chosen = {"data": x, "indices": np.array([4, 0, 0, 1], np.int32)}
    chosen["segment_ids"] = np.array([0, 0, 2, 2], np.int32)
    for name in ("Sum", "Mean", "SqrtN"):
        op = f"SparseSegment{name}"
        case(op, op, chosen)
        case(f"{op}_counted", f"{op}WithNumSegments", chosen, num_segments=4)
        none = {key: value[:0] if key != "data" else value for key, value in chosen.items()}
        case(f"{op}_none", op, none)
    case(
        "SegmentSum_float16", "SegmentSum", {"data": numbers.astype(np.float16), "segment_ids": ids}
    )


def arrays() -> None:
    x = real(3, 4, 2)
    for name, shift, axis in (
        ("one", np.int32(1), np.int32(1)),
        ("several", [1, -2, 5], [0, 1, 0]),
        ("negative", np.array([-7], np.int64), np.array([-1], np.int64)),
    ):
        case(f"Roll_{name}", "Roll", {"input": x}, shift=shift, axis=axis)
    moves = {"shift": np.array([1, 2], np.int32), "axis": np.array([0, 2], np.int32)}
    case("Roll_dynamic", "Roll", {"input": x, **moves})
    case("EnsureShape", "EnsureShape", {"input": x}, shape=[3, None, 2])
    case("EnsureShape_dynamic", "EnsureShape", {"input": x}, shape=[3, None, None])
    case("Bitcast_int32", "Bitcast", {"input": x}, type=tf.int32)
    case("Bitcast_smaller", "Bitcast", {"input": x}, type=tf.uint8)
    case("Bitcast_larger", "Bitcast", {"input": x}, type=tf.float64)
    halves = x.astype(np.float16)
    for name in ("int32", "uint8", "int16"):
        case(f"Bitcast_float16_{name}", "Bitcast", {"input": halves}, type=getattr(tf, name))
    case("Bitcast_complex", "Bitcast", {"input": x}, type=tf.complex64)
    case("Bitcast_dynamic", "Bitcast", {"input": whole(0, 99, 2, 2)}, type=tf.int8)
    case("Empty", "Empty", {"shape": np.array([2, 0, 3], np.int32)}, dtype=tf.float32, init=True)
    case("Empty_words", "Empty", {"shape": np.array([2], np.int32)}, dtype=tf.string, init=True)
    a, b = real(2, 3), real(2, 3)
    case("Cross", "Cross", {"a": a, "b": b})
    small = np.array([[100, 2, 3]], np.int8), np.array([[3, 2, 1]], np.int8)
    case("Cross_int8", "Cross", dict(zip("ab", small, strict=True)))
    places, updates = np.array([[1], [1], [0]], np.int32), real(3, 4, 2)
    cells = np.array([[1, 1, 0], [2, 3, 1]], np.int64)
    for name in ("Sub", "Max", "Min"):
        op = f"TensorScatter{name}"
        case(op, op, {"tensor": x, "indices": places, "updates": updates})
        case(f"{op}_cells", op, {"tensor": x, "indices": cells, "updates": real(2)})
        case(f"{op}_none", op, {"tensor": x, "indices": cells[:0], "updates": real(0)})
    dims = np.array([3, 4], np.int64)
    spots = np.array([[0, 1], [0, 3], [2, 0]], np.int64)
    dense = {"output_shape": dims, "default_value": F(-1)}
    case(
        "SparseToDense",
        "SparseToDense",
        {"sparse_indices": spots, "sparse_values": real(3)},
        **dense,
    )
    one = {"sparse_indices": spots, "sparse_values": np.array(7, F)}
    case("SparseToDense_one", "SparseToDense", one, **dense)
    loose = {"sparse_indices": np.array([2, 0, 2], np.int32), "sparse_values": whole(0, 9, 3)}
    more = {"output_shape": [4], "default_value": 0, "validate_indices": False}
    case("SparseToDense_loose", "SparseToDense", loose, **more)
    scalar = {"sparse_indices": np.array(2, np.int32), "sparse_values": np.array(5, F)}
    case("SparseToDense_scalar", "SparseToDense", scalar, output_shape=[4], default_value=F(0))
    words = {"sparse_indices": spots, "sparse_values": np.array(["a", "b", "c"], object)}
    case("SparseToDense_words", "SparseToDense", words, output_shape=dims, default_value="-")
    dynamic = {"sparse_indices": spots, "sparse_values": real(3), "output_shape": dims}
    case("SparseToDense_dynamic", "SparseToDense", dynamic, default_value=F(0))
    matrices = real(2, 3, 4)
    case("MatrixDiagPart", "MatrixDiagPart", {"input": matrices})
    more = {"k": [-1, 1], "padding_value": F(7)}
    case("MatrixDiagPartV2", "MatrixDiagPartV2", {"input": matrices}, **more)
    case("MatrixSetDiag", "MatrixSetDiag", {"input": matrices, "diagonal": real(2, 3)})
    band = {"input": matrices, "diagonal": real(2, 3, 3)}
    case("MatrixSetDiagV2", "MatrixSetDiagV2", band, k=[-1, 1])
    more = {"num_rows": 3, "num_cols": 4, **more}
    case("MatrixDiagV2", "MatrixDiagV2", {"diagonal": real(2, 3, 3)}, **more)


def special() -> None:
    inside = np.array([-1.5, -1, -0.999999, -0.5, -0.01, 0, 0.3, 0.9, 0.99999, 1, 2, np.nan])
    ends = np.array([-0.1, 0, 1e-30, 1e-4, 0.07, 0.08, 0.3, 0.5, 0.92, 0.999, 1, 1.5, np.nan])
    numbers = np.array(
        [-7.3, -2.5, -2, -0.5, -1e-3, 0, 1e-3, 0.4, 0.6, 1.1, 1.9, 3, 9.7, 12.5, 1e6]
    )
    edges = np.array([-np.inf, np.inf, np.nan])
    for name, x in (
        ("Erfinv", inside),
        ("Ndtri", ends),
        ("Lgamma", np.concatenate([numbers, edges])),
        ("Digamma", np.concatenate([numbers, edges])),
    ):
        for dtype in (np.float32, np.float64):
            case(f"{name}_{np.dtype(dtype).name}", name, {"x": x.astype(dtype)})


def incomplete() -> None:
    a = np.array([0, 0.5, 1, 2.5, 10, 50, -1, 1, 1, np.nan, 1e-3, 200, 1, 1, 3, 3])
    x = np.array([0, 0.3, 2, 2.5, 15, 40, 1, -1, np.inf, 1, 1e-4, 190, 0, 1e3, 0.01, 4])
    p = np.array([0.5, 1, 2.5, 10, 0.1, 0, -1, 2, 2, 2, 2, np.nan, 30, 0.5, np.inf, 300])
    q = np.array([0.5, 3, 2.5, 2, 0.2, 1, 1, 0, -1, 3, 3, 1, 40, 1e-3, 1, 200])
    z = np.array([0.3, 0.2, 0.5, 0.9, 0.99, 0.5, 0.5, 0.5, 0.5, 0, 1, 0.5, 0.4, 0.5, 0.5, 0.6])
    for dtype in (np.float32, np.float64):
        name = np.dtype(dtype).name
        for op in ("Igamma", "Igammac"):
            few = slice(None) if dtype == np.float64 else [1, 2, 3, 4, 8, 12, 14, 15]
            case(f"{op}_{name}", op, {"a": a[few].astype(dtype), "x": x[few].astype(dtype)})
        few = slice(None) if dtype == np.float64 else slice(0, 12)
        sides = {"a": p[few].astype(dtype), "b": q[few].astype(dtype), "x": z[few].astype(dtype)}
        case(f"Betainc_{name}", "Betainc", sides)
    rows = {"a": np.array([[1.0], [3.0]]), "x": np.array([0.5, 2.0, 7.0])}
    case("Igamma_rows_dynamic", "Igamma", rows)
    scalar = {"a": np.array(2.0), "b": np.array([1.0, 3.0]), "x": np.array([0.2, 0.7])}
    case("Betainc_scalar_dynamic", "Betainc", scalar)


def images() -> None:
    image = real(2, 5, 4, 3)
    for size in ((7, 3), (2, 10), (1, 1)):
        for name, given in (
            ("plain", {}),
            ("corners", {"align_corners": True}),
            ("centres", {"half_pixel_centers": True}),
        ):
            label = f"{name}_{size[0]}"
            case(f"ResizeBicubic_{label}", "ResizeBicubic", {"images": image}, size=size, **given)
            if name != "centres":
                case(f"ResizeArea_{label}", "ResizeArea", {"images": image}, size=size, **given)
    codes = np.arange(24, dtype=np.uint8).reshape(1, 4, 2, 3)
    for op in ("ResizeBicubic", "ResizeArea"):
        case(f"{op}_uint8", op, {"images": codes}, size=[3, 3])
        case(f"{op}_dynamic", op, {"images": image, "size": np.array([3, 6], np.int32)})
    for padding in ("SAME", "VALID"):
        given: dict[str, Any] = {
            "ksizes": [1, 2, 3, 1],
            "strides": [1, 2, 1, 1],
            "padding": padding,
        }
        name = f"ExtractImagePatches_{padding}"
        case(name, "ExtractImagePatches", {"images": image}, rates=[1, 2, 1, 1], **given)
        case(f"{name}_plain", "ExtractImagePatches", {"images": image}, rates=[1, 1, 1, 1], **given)
    kinds = {"ksizes": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1]}
    numbers = whole(0, 99, 1, 3, 4, 2)
    more = {"images": numbers}
    case("ExtractImagePatches_dynamic", "ExtractImagePatches", more, padding="SAME", **kinds)
    colours = RNG.uniform(0, 1, (2, 2, 3, 3)).astype(F)
    colours[0, 0] = [[1, 1, 1], [0, 0, 0], [0.5, 0.1, 0.5]]
    colours[1, 1] = [[-1, 2, 0.5], [0.2, 0.2, 0.2], [1.5, 0, 1.5]]
    for op in ("RGBToHSV", "HSVToRGB"):
        case(op, op, {"images": colours})
        case(f"{op}_vector", op, {"images": colours[0, 0, 2].astype(np.float64)})
    for delta in (-0.7, 0.3, 3.2):
        case(f"AdjustHue_{delta}", "AdjustHue", {"images": colours}, delta=F(delta))
    for scale in (-1, 0.5, 1.7):
        case(f"AdjustSaturation_{scale}", "AdjustSaturation", {"images": colours}, scale=F(scale))
    for op, name in (("AdjustHue", "delta"), ("AdjustSaturation", "scale")):
        case(f"{op}_dynamic", op, {"images": colours, name: np.array(0.4, F)})
    factor = np.array(-1.5, F)
    case("AdjustContrastv2", "AdjustContrastv2", {"images": colours, "contrast_factor": factor})
    dynamic = {"images": colours[0], "contrast_factor": factor}
    case("AdjustContrastv2_dynamic", "AdjustContrastv2", dynamic)


if __name__ == "__main__":
    for part in (counting, segments, arrays, special, images, incomplete):
        part()
    save("counts")
