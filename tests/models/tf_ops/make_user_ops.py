"""Makes ``user_ops.npz.xz``, as ``make.py`` does ``cases.npz.xz``: operations of users' models that the
others leave out."""

from __future__ import annotations

import io
import wave
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from make import RNG, F, case, real, save, several
from make_text import words
from tensorflow.compiler.tf2xla.ops.gen_xla_ops import xla_dynamic_update_slice


def drawn() -> None:
    shape = {"shape": np.array([7, 9], np.int32)}
    seed = {"seed": np.array([-5, 2**40 + 3], np.int64)}
    for kind in (tf.float16, tf.float32, tf.float64):
        case(f"TruncatedNormal_{kind.name}", "TruncatedNormal", shape, dtype=kind, seed=3, seed2=-4)
        label = f"StatelessTruncatedNormal_{kind.name}"
        case(label, "StatelessTruncatedNormal", seed, **shape, dtype=kind)
    none = {"shape": np.array([0, 2], np.int32)}
    case("TruncatedNormal_none", "TruncatedNormal", none, dtype=tf.float32, seed=1)
    for name, value in (
        ("vector", np.arange(30)),
        ("matrix_dynamic", real(9, 2)),
        ("texts", words(*"abcdef")),
        ("one", real(1, 3)),
        ("none", real(0)),
    ):
        case(f"RandomShuffle_{name}", "RandomShuffle", {"value": value}, seed=5, seed2=9)


def slices() -> None:
    x = {"input": real(5, 4, 3), "value": real(2, 3)}
    ends = {"begin": [1, 2], "end": [5, 3], "strides": [2, 1]}
    given = {key: np.array(value, np.int32) for key, value in ends.items()}
    name = "TensorStridedSliceUpdate"
    case(f"{name}_shrunk", name, x, **given, shrink_axis_mask=2)
    case(f"{name}_dynamic", name, x | given, shrink_axis_mask=2)
    whole = {"value": real(5, 4, 2), "input": x["input"]}
    back = {"begin": np.array([0, -1]), "end": np.array([0, 0]), "strides": np.array([1, -1])}
    case(f"{name}_back", name, whole, **back, ellipsis_mask=1)
    for i, place in enumerate(([1, 2], [-3, 9])):
        given = {"input": real(4, 5), "update": real(2, 3)}
        given["indices"] = np.array(place, np.int32)
        label = f"XlaDynamicUpdateSlice_{i}_dynamic"
        several(label, lambda **x: [xla_dynamic_update_slice(**x)], given)


def sparse() -> None:
    flat = np.sort(RNG.choice(35, 12, replace=False))
    indices = np.stack(np.unravel_index(flat, (5, 7)), 1)
    parts = {"indices": indices, "values": real(12), "shape": np.array([5, 7])}
    for axis, count in ((0, 2), (1, 3), (1, 7)):
        more = {"split_dim": np.int64(axis), "num_split": count}
        case(f"SparseSplit_{axis}_{count}", "SparseSplit", parts, **more)
    given = {f"input_{key}": value for key, value in parts.items()}
    given["input_values"] = -np.abs(given["input_values"])  # which are below the absent zeros
    for name, axes in (("last", [-1]), ("all", [0, 1]), ("none", []), ("first_dynamic", [0])):
        more = {"reduction_axes": np.array(axes, np.int32), "keep_dims": name == "last"}
        case(f"SparseReduceMax_{name}", "SparseReduceMax", given, **more)
    nothing = {"indices": indices[:0], "values": real(0), "shape": parts["shape"]}
    empty = {f"input_{key}": value for key, value in nothing.items()}
    case("SparseReduceMax_empty", "SparseReduceMax", empty, reduction_axes=np.array([1], np.int32))


def lists() -> None:
    def build(x: tf.Tensor, i: tf.Tensor) -> list[tf.Tensor]:
        ops = tf.raw_ops
        made = ops.TensorListFromTensor(tensor=x, element_shape=[3])
        more = ops.TensorListScatterIntoExistingList(input_handle=made, tensor=x[:2] * 2, indices=i)
        stacked = ops.TensorListStack(
            input_handle=more, element_shape=[3], element_dtype=tf.float32, num_elements=-1
        )
        return [stacked]

    # Behind a gap, TensorFlow's own list has elements without rows, and a stack of it unset memory.
    for place in (3, 4):
        given = {"x": real(4, 3), "i": np.array([0, place], np.int32)}
        several(f"TensorListScatterIntoExistingList_{place}", build, given)


def ragged() -> None:
    splits = [np.array([0, 2, 2, 3]), np.array([0, 1, 4, 6])]

    def build(a: tf.Tensor, b: tf.Tensor, x: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for batched, rank in ((False, 2), (True, 2), (True, 1), (True, 0)):
            ops, given = tf.raw_ops, [a, b][2 - rank :]
            variant = ops.RaggedTensorToVariant(
                rt_nested_splits=given, rt_dense_values=x, batched_input=batched
            )
            again = ops.RaggedTensorFromVariant(
                encoded_ragged=variant,
                input_ragged_rank=-1,
                output_ragged_rank=max(rank, 1),
                Tvalues=x.dtype,
                Tsplits=a.dtype,
            )
            results += tf.nest.flatten(again) if rank else []
        return results

    for name, values in (("rows", real(6, 2)), ("texts_dynamic", words(*"abcdef"))):
        given = {"a": splits[0], "b": splits[1], "x": values}
        several(f"RaggedTensorFromVariant_{name}", build, given)


def without_numbers() -> None:
    x = np.array([[1, 3, 2, 0], [2, 0, 1, 3], [3, 3, 0, 0]], F)
    x = np.concatenate([np.where(np.arange(4) == place, np.nan, x) for place in range(4)])
    info = np.finfo(F)
    low, high = [-np.inf, np.nan, info.min, -np.inf], [np.nan, np.inf, info.max, np.inf]
    x = np.concatenate([x, [[np.nan] * 4, low, high]]).astype(F)
    wide = real(6, 700)
    wide[RNG.random(wide.shape) < 0.2] = np.nan
    for name, op in (("", "ArgMax"), ("", "ArgMin"), ("dynamic", "ArgMax"), ("dynamic", "ArgMin")):
        for axis in (0, 1):
            case(f"{op}_nan_{axis}_{name}", op, {"input": x}, dimension=np.int32(axis))
            label = f"{op}_nan_wide_{axis}_{name}"
            case(label, op, {"input": wide}, dimension=np.int32(axis), output_type=tf.int32)
    for i, kind in enumerate((np.float16, np.float64)):
        case(f"ArgMax_nan_kind_{i}", "ArgMax", {"input": x.astype(kind)}, dimension=np.int32(1))
    for a, b in (([1, 4], [4]), ([1, 1], [1]), ([], [1, 1]), ([1, 2, 1], [2, 1]), ([1], [1])):
        shapes = {"s0": np.array(a, np.int32), "s1": np.array(b, np.int32)}
        label = "_".join(str(x) for x in [*a, "by", *b])
        case(f"BroadcastGradientArgs_{label}", "BroadcastGradientArgs", shapes)


def files() -> None:
    y, x = np.mgrid[:19, :23]
    image = np.stack(
        [128 + 100 * np.sin(x / 7 + y / 5), 128 + 90 * np.cos(x / 3), y * 9.0, x * 11.0]
    )
    image = np.clip(image.transpose(1, 2, 0) + 8 * real(19, 23, 4), 0, 255).astype(np.uint8)
    for count in (1, 2, 3, 4):
        data = words(tf.io.encode_png(image[..., :count]).numpy()).reshape(())
        for channels in (0, 1, 3, 4):
            label = f"DecodePng_{count}_{channels}"
            case(label, "DecodePng", {"contents": data}, channels=channels)
        case(f"DecodeImage_{count}", "DecodeImage", {"contents": data}, dtype=tf.float32)
    for count, kind in ((1, "grayscale"), (3, "rgb")):
        data = tf.io.encode_jpeg(image[..., :count], kind, quality=80, progressive=count == 3)
        given = {"contents": words(data.numpy()).reshape(())}
        for channels in (0, 1, 3)[: count + 1]:
            more = {"channels": channels, "dct_method": "INTEGER_ACCURATE"}
            case(f"DecodeJpeg_{kind}_{channels}", "DecodeJpeg", given, **more)
    wide = tf.io.encode_jpeg(np.full((8, 24, 3), (9, 200, 60), np.uint8)).numpy()
    case("DecodeJpeg_half", "DecodeJpeg", {"contents": words(wide).reshape(())}, ratio=2)
    case(
        "DecodeImage_jpeg",
        "DecodeImage",
        {"contents": words(wide).reshape(())},
        expand_animations=False,
    )


def delimited() -> None:
    lines = words("1.5,2,hello", ',3,"a,b"', "4,5,", '"6","7","a""b"', "1, 8 ,x", "\n1,2,é")
    defaults = [F([0.5]), np.zeros(0, np.int32), words("q")]
    case("DecodeCSV_quotes", "DecodeCSV", {"records": lines}, record_defaults=defaults)
    chosen = {"record_defaults": [F([2]), np.array([1])], "select_cols": [1, 3]}
    rows = words("a,2,b,3", "a,,b,", "x,1,1,1,1", "1,1,1,1").reshape(2, 2)
    case("DecodeCSV_chosen_dynamic", "DecodeCSV", {"records": rows}, **chosen)
    bare = {"field_delim": "\t", "na_value": "NA", "use_quote_delim": False}
    defaults = [np.zeros(0), words("none"), np.array([5], np.int32)]
    fed = {"records": words('2\tx"y\tNA', "2e3\tNA\t3")}
    case("DecodeCSV_tabs", "DecodeCSV", fed, record_defaults=defaults, **bare)
    parts = words("a", "é", "c", "d", "", "f").reshape(3, 2)
    for name, ids in (("rows", [2, 0, 2]), ("all_dynamic", [[1, 0], [1, 1], [3, 0]])):
        given = {"inputs": parts, "segment_ids": np.array(ids, np.int32)}
        label = f"UnsortedSegmentJoin_{name}"
        case(label, "UnsortedSegmentJoin", given, num_segments=np.int32(4), separator="-")
    long = [b"a longer text with many more characters"[:size] for size in range(36)]
    given = {"string_tensor": words("é", *long)}
    case("StringToHashBucket", "StringToHashBucket", given, num_buckets=2**62)


def special() -> None:
    x = np.concatenate([real(40) * 30, [0, np.nan, np.inf, -np.inf, 1e-30, 99.9, 100.1, -700]])
    for name in ("BesselI0", "BesselI0e", "BesselI1", "BesselI1e"):
        case(f"{name}_float64", name, {"x": x})
        case(f"{name}_float32_dynamic", name, {"x": x.astype(F)})
    pairs = {"x1": np.array([0, 1, -1, np.nan, 3], F), "x2": np.array([1, 0, -1, 1, np.inf], F)}
    case("NextAfter", "NextAfter", pairs)
    for kind in (np.int8, np.uint8, np.int64):
        x = RNG.integers(np.iinfo(kind).min, np.iinfo(kind).max, 9, endpoint=True, dtype=kind)
        case(f"PopulationCount_{kind.__name__}", "PopulationCount", {"x": x})


def sound() -> None:
    for channels, count in ((1, 50), (2, 30)):
        file = io.BytesIO()
        with wave.open(file, "wb") as written:
            written.setnchannels(channels)
            written.setsampwidth(2)
            written.setframerate(16000)
            written.writeframes((RNG.normal(size=(count, channels)) * 9000).astype("<i2").tobytes())
        contents = {"contents": words(file.getvalue()).reshape(())}
        for wanted, length in ((-1, -1), (3, 40), (1, 20)):
            label = f"DecodeWav_{channels}_{count}_{wanted}"
            case(label, "DecodeWav", contents, desired_channels=wanted, desired_samples=length)
    samples = {"input": real(700, 2)}
    for square in (False, True):
        label = f"AudioSpectrogram_{square}"
        given = {"window_size": 200, "stride": 90, "magnitude_squared": square}
        case(label, "AudioSpectrogram", samples, **given)
    power = {"spectrogram": np.abs(real(2, 3, 129)), "sample_rate": np.int32(16000)}
    case("Mfcc", "Mfcc", power)
    limits = {"upper_frequency_limit": 7000.0, "dct_coefficient_count": 20}
    case("Mfcc_dynamic", "Mfcc", power, **limits, filterbank_channel_count=25)


def layers() -> None:
    given = {"input": real(2, 6, 5, 3), "filter": real(3, 2, 3, 2)}
    for padding in ("SAME", "VALID"):
        more = {"strides": [1, 2, 2, 1], "padding": padding}
        case(f"DepthwiseConv2dNative_{padding}_dynamic", "DepthwiseConv2dNative", given, **more)
    for name, dims, target in (
        ("batch", (0, 3, 7), [0, -1]),
        ("none", (0,), [0, -1]),
        ("two", (2, 0, 6), [0, 3, -1]),
    ):
        fed = {"tensor": real(*dims), "shape": np.array(target, np.int32)}
        case(f"Reshape_{name}", "Reshape", fed)
        case(f"Reshape_{name}_constant", "Reshape", {"tensor": real(*dims)}, shape=fed["shape"])
    crossed = {
        "indices": [],
        "values": [],
        "shapes": [],
        "dense_inputs": [words("x", "y").reshape(2, 1), np.array([[1, 2], [3, -4]])],
    }
    hashed = {"hashed_output": True, "num_buckets": 50, "hash_key": 7, "out_type": tf.int64}
    case("SparseCross_mixed", "SparseCross", crossed, **hashed, internal_type=tf.int64)


def projected() -> None:
    """All coordinates beyond the images and among pixels, with a divisor that is 0 at places."""
    turned = [np.cos(0.7), -np.sin(0.7), 1.3, np.sin(0.7), np.cos(0.7), -2.1, 0, 0]
    shrunk = [2.5, 0.25, -9, -0.5, 3.5, -8, 0, 0]
    bent = [1, 0.5, -1, 0.25, 1, 0, -0.25, 0]
    for order in ("NEAREST", "BILINEAR"):
        for fill in ("CONSTANT", "NEAREST", "REFLECT", "WRAP"):
            images = {"images": real(3, 6, 7, 2)}
            images["transforms"] = np.array([turned, shrunk, bent], F)
            size = np.array([9, 8], np.int32)
            more = {"output_shape": size, "interpolation": order, "fill_mode": fill}
            name = "ImageProjectiveTransformV3"
            case(f"{name}_{order}_{fill}", name, images, fill_value=F(0.6), **more)
            small = {"images": real(2, 1, 2, 1), "transforms": np.array([shrunk], F)}
            case(f"{name}_{order}_{fill}_dynamic", name, small, fill_value=F(3), **more)
    for kind in (np.uint8, np.int32, np.float16, np.float64):
        images = (100 * RNG.random((1, 5, 5, 3))).astype(kind)
        given = {"images": images, "transforms": np.array([turned], F)}
        given["output_shape"] = np.array([4, 6], np.int32)
        name = "ImageProjectiveTransformV2"
        case(f"{name}_{kind.__name__}", name, given, interpolation="BILINEAR", fill_mode="REFLECT")
        label = f"{name}_{kind.__name__}_dynamic"
        case(label, name, given, interpolation="NEAREST", fill_mode="CONSTANT")


def dilated() -> None:
    for kind in (np.float32, np.float64, np.uint8, np.int32):
        x = {"input": (60 * real(2, 7, 9, 3)).astype(kind)}
        x["filter"] = (9 * real(3, 2, 3)).astype(kind)
        for name, padding, strides, rates in (
            ("same", "SAME", (1, 1), (1, 1)),
            ("apart", "SAME", (2, 3), (2, 4)),
            ("valid_dynamic", "VALID", (2, 1), (1, 2)),
        ):
            more = {"strides": [1, *strides, 1], "rates": [1, *rates, 1], "padding": padding}
            case(f"Dilation2D_{kind.__name__}_{name}", "Dilation2D", x, **more)
    gaps = {"input": real(1, 5, 5, 1), "filter": real(2, 2, 1)}
    gaps["input"][RNG.random((1, 5, 5, 1)) < 0.5] = np.nan
    more = {"strides": [1] * 4, "rates": [1] * 4, "padding": "SAME"}
    case("Dilation2D_nan", "Dilation2D", gaps, **more)


def selected() -> None:
    for kind in (np.float32, np.int64, np.complex64):
        for dims in ((3,), (2, 3)):
            label = f"{kind.__name__}_{len(dims)}"
            whole = real(*dims, *dims).astype(kind)
            case(f"Diag_{label}", "Diag", {"diagonal": real(*dims).astype(kind)})
            case(f"DiagPart_{label}", "DiagPart", {"input": whole})
            case(f"DiagPart_{label}_dynamic", "DiagPart", {"input": whole})
    x = {"input": real(3, 40)}
    case("ApproxTopK_rows", "ApproxTopK", x, k=7)


def running() -> None:
    for kind in (np.float32, np.float64):
        x = np.concatenate([20 * real(2, 30, 3), np.full((2, 2, 3), -np.inf)], 1).astype(kind)
        for exclusive in (False, True):
            for reverse in (False, True):
                label = f"CumulativeLogsumexp_{kind.__name__}_{exclusive}_{reverse}"
                more = {"exclusive": exclusive, "reverse": reverse, "axis": np.int32(1)}
                case(label, "CumulativeLogsumexp", {"x": x}, **more)
    case(
        "CumulativeLogsumexp_dynamic",
        "CumulativeLogsumexp",
        {"x": real(4, 5), "axis": np.int64(-1)},
    )
    case("CumulativeLogsumexp_none", "CumulativeLogsumexp", {"x": real(0, 5), "axis": np.int32(0)})
    for kind in (np.float32, np.float64, np.int32, np.int64):
        ends = {"value_range": np.array([-7, 12], kind), "nbins": np.int32(6)}
        values = (9 * real(5, 40)).astype(kind)
        case(
            f"HistogramFixedWidth_{kind.__name__}",
            "HistogramFixedWidth",
            {"values": values},
            **ends,
        )
    ends["value_range"] = F([-1, 1])
    values = F([-np.inf, np.inf, -1, 1, 0, 1 / 3, -1 / 3, 2e38, -3e38])
    label = "HistogramFixedWidth_ends_dynamic"
    case(label, "HistogramFixedWidth", {"values": values, **ends}, dtype=tf.int64)


def solved() -> None:
    for kind in (np.float32, np.float64, np.complex64):
        square = (real(2, 5, 5) + (1j * real(2, 5, 5) if kind is np.complex64 else 0)).astype(kind)
        case(f"Lu_{kind.__name__}", "Lu", {"input": square}, output_idx_type=tf.int64)
        case(f"Lu_{kind.__name__}_dynamic", "Lu", {"input": square[0]})
        bands = {"diagonals": square[:, :3], "rhs": square[:, :, :2]}
        for pivots in (False, True):
            label = f"TridiagonalSolve_{kind.__name__}_{pivots}"
            case(label, "TridiagonalSolve", bands, partial_pivoting=pivots)
        one = {"diagonals": square[0, :3, :1], "rhs": square[0, :1]}
        case(f"TridiagonalSolve_{kind.__name__}_one_dynamic", "TridiagonalSolve", one)
        rows = square[:, :3].swapaxes(0, 1)[:, :, np.newaxis]
        bands = dict(zip(("superdiag", "maindiag", "subdiag"), rows, strict=True))
        case(f"TridiagonalMatMul_{kind.__name__}", "TridiagonalMatMul", bands | {"rhs": square})
        even = square @ square.conj().swapaxes(1, 2) + np.eye(5, dtype=kind)
        jordan = np.array([[4, 1, 2], [0, 4, 3], [0, 0, 4]], kind)
        for name, x in (("even", even), ("jordan_dynamic", jordan)):
            case(f"MatrixSquareRoot_{kind.__name__}_{name}", "MatrixSquareRoot", {"input": x})
    zero = np.array([[0, 2, 0, 0], [1, 0, 3, 0], [0, 0, 2, 1], [4, 1, 0, 0]], F)
    case("Lu_zero", "Lu", {"input": zero})
    singular = {"diagonals": np.array([[1, 1, 0], [1, 1, 1], [0, 1, 0]], F), "rhs": real(3, 2)}
    for pivots in (False, True):
        label = f"TridiagonalSolve_singular_{pivots}"
        case(label, "TridiagonalSolve", singular, partial_pivoting=pivots)
    turned = np.array([[0, -1], [1, 0]], F)
    case("MatrixSquareRoot_turned", "MatrixSquareRoot", {"input": turned})
    for name, x in (("even", even), ("jordan", jordan), ("turned_dynamic", turned)):
        case(f"MatrixLogarithm_{name}", "MatrixLogarithm", {"input": x.astype(np.complex128)})
    negative = np.array([[[-1, 0], [0, 4]]], np.complex64)
    case("MatrixLogarithm_negative", "MatrixLogarithm", {"input": negative})


def zeta() -> None:
    """The last ones in float64 only: TensorFlow's float32 overflows, or has no digits left."""
    x = [1, 0.5, 2, 2, 3, 2.5, 2, 3, 2, np.inf, 2, np.nan, 200, 1.001, 30, 2, 1e3, 4, 3]
    q = [1, 1, 0, -1, -1, -0.5, -0.5, -0.5, 1e30, 2, np.inf, 1, 0.5, 9, 40, 1e-9, 1, np.nan, -20.25]
    a = [0, 1, 2, -1, 0.5, 1, 3, 0, 2, 1, 7, 1, np.nan, 3, 50, 170]
    y = [1.5, 1.5, 0.1, 1, 1, -1, -0.5, -0.5, -1, 1e8, 40, np.inf, 1, np.nan, 3, 200]
    for kind, all_x, all_a in ((np.float32, -1, -2), (np.float64, None, None)):
        pairs = {"x": np.array(x, kind)[:all_x], "q": np.array(q, kind)[:all_x]}
        case(f"Zeta_{kind.__name__}", "Zeta", pairs)
        wide = {"x": (1.1 + 9 * RNG.random((40, 1))).astype(kind)}
        wide["q"] = (30 * RNG.random(20)).astype(kind)
        case(f"Zeta_{kind.__name__}_wide_dynamic", "Zeta", wide)
        pairs = {"a": np.array(a, kind)[:all_a], "x": np.array(y, kind)[:all_a]}
        case(f"Polygamma_{kind.__name__}", "Polygamma", pairs)
        wide = {"a": np.arange(6).astype(kind)[:, np.newaxis], "x": wide["q"]}
        case(f"Polygamma_{kind.__name__}_wide_dynamic", "Polygamma", wide)


def codes() -> None:
    plain = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint16: tf.int16, tf.quint16: tf.uint16}

    def build(low: tf.Tensor, high: tf.Tensor, x: tf.Tensor, **given: Any) -> list[tf.Tensor]:
        ops, results = tf.raw_ops, []
        for kind, bits in plain.items():
            coded = ops.QuantizeV2(input=x, min_range=low, max_range=high, T=kind, **given)
            kept = {key: given[key] for key in ("mode", "axis", "narrow_range") if key in given}
            ends = {"min_range": coded[1], "max_range": coded[2]}
            results += [tf.bitcast(coded[0], bits), coded[1], coded[2]]
            results.append(ops.Dequantize(input=coded[0], **ends, **kept))
        return results

    x = np.concatenate([4 * real(5, 30), np.full((5, 1), 0.5, F)], 1)
    for mode in ("MIN_COMBINED", "MIN_FIRST", "SCALED"):
        for name, more in (
            ("plain", {}),
            ("even", {"round_mode": "HALF_TO_EVEN", "narrow_range": True}),
            ("tight_dynamic", {"ensure_minimum_range": 0.5}),
            ("axis", {"axis": 0}),
        ):
            if (name == "even" and mode != "SCALED") or (name == "axis" and mode == "MIN_FIRST"):
                continue  # which TensorFlow lacks
            many = 5 if name == "axis" else 1
            low = -np.abs(3 * real(many)) if name != "tight_dynamic" else np.array([0.25], F)
            high = low + np.abs(6 * real(many)) + F(0.1)
            ends = {"low": low, "high": high} if many > 1 else {"low": low[0], "high": high[0]}
            made = partial(build, mode=mode, **more)
            several(f"QuantizeV2_{mode}_{name}", made, {**ends, "x": x})


if __name__ == "__main__":
    for make in (
        drawn,
        slices,
        sparse,
        lists,
        ragged,
        special,
        sound,
        layers,
        without_numbers,
        files,
        delimited,
        projected,
        dilated,
        selected,
        running,
        solved,
        zeta,
        codes,
    ):
        make()
    save("user_ops")
