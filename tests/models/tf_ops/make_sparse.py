"""Makes ``sparse.npz.xz``, as ``make.py`` does ``cases.npz.xz``: operations on sparse tensors, and
those whose results are such (StringSplit, ParseExample); and more of text and images."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from make import RNG, F, case, real, save
from make_text import words


def places(*shape: int, count: int) -> np.ndarray:
    """Distinct indices in row-major order."""
    flat = np.sort(RNG.choice(int(np.prod(shape)), count, replace=False))
    return np.stack(np.unravel_index(flat, shape), 1).astype(np.int64)


def longs(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def reshaped() -> None:
    given = {"input_indices": places(4, 3, 2, count=7), "input_shape": longs(4, 3, 2)}
    for name, shape in (
        ("matrix", longs(6, 4)),
        ("vector", longs(-1)),
        ("middle", longs(2, -1, 3)),
        ("same", longs(4, 3, 2)),
    ):
        case(f"SparseReshape_{name}", "SparseReshape", given, new_shape=shape)
    case("SparseReshape_dynamic", "SparseReshape", given | {"new_shape": longs(2, 12)})
    none = {"input_indices": np.empty((0, 2), np.int64), "input_shape": longs(0, 3)}
    case("SparseReshape_none", "SparseReshape", none, new_shape=longs(3, 0))


def filled() -> None:
    rows = np.array([[3, 1], [0, 0], [0, 2], [5, 0]], np.int64)
    ordered = rows[np.argsort(rows[:, 0], kind="stable")]
    for name, indices in (("in_order", ordered), ("mixed", rows)):
        for kind, values in (("float32", real(4)), ("string", words("a", "b", "", "d"))):
            default: Any = np.array("?" if kind == "string" else -1, values.dtype)
            fed = {"indices": indices, "values": values, "dense_shape": longs(7, 4)}
            label = f"SparseFillEmptyRows_{name}_{kind}"
            case(label, "SparseFillEmptyRows", fed, default_value=default)
    whole = {"indices": places(2, 3, count=6), "values": real(6), "dense_shape": longs(2, 3)}
    case("SparseFillEmptyRows_full", "SparseFillEmptyRows", whole, default_value=np.float32(9))
    none = {"indices": np.empty((0, 3), np.int64), "values": longs(), "dense_shape": longs(2, 1, 1)}
    case("SparseFillEmptyRows_none", "SparseFillEmptyRows", none, default_value=np.int64(4))
    case(
        "SparseFillEmptyRows_dynamic",
        "SparseFillEmptyRows",
        {
            "indices": ordered,
            "values": longs(1, 2, 3, 4),
            "dense_shape": longs(6, 3),
            "default_value": np.array(7),
        },
    )


def arranged() -> None:
    order = RNG.permutation(8)
    indices, values = places(5, 4, count=8)[order], real(8)
    given = {"input_indices": indices, "input_values": values, "input_shape": longs(5, 4)}
    case("SparseReorder", "SparseReorder", given)
    case("SparseReorder_dynamic", "SparseReorder", given | {"input_values": words(*"abcdefgh")})
    parts = [((3, 4), 5), ((3, 2), 3), ((3, 4), 0)]
    for axis in (1, -1, 0):
        shapes = [shape if axis else (shape[1], shape[0]) for shape, _ in parts]
        found = [
            places(*shape, count=count) for shape, (_, count) in zip(shapes, parts, strict=True)
        ]
        joined = {
            "indices": found,
            "values": [real(len(own)) for own in found],
            "shapes": [longs(*shape) for shape in shapes],
        }
        case(f"SparseConcat_{axis}", "SparseConcat", joined, concat_dim=axis)
    indices = places(5, 4, 3, count=20)
    whole = {"indices": indices, "values": real(20), "shape": longs(5, 4, 3)}
    for name, start, size in (
        ("inside", longs(1, 0, 1), longs(2, 3, 1)),
        ("beyond", longs(3, 2, 0), longs(9, 9, 9)),
        ("none", longs(5, 0, 0), longs(1, 1, 1)),
    ):
        case(f"SparseSlice_{name}", "SparseSlice", whole, start=start, size=size)
    case(
        "SparseSlice_dynamic",
        "SparseSlice",
        whole | {"start": longs(0, 1, 0), "size": longs(4, 2, 3)},
    )


def products() -> None:
    indices = places(4, 3, count=6)
    for adjoint_a in (False, True):
        for adjoint_b in (False, True):
            b = real(4 if adjoint_a else 3, 5)
            fed = {"a_indices": indices, "a_values": real(6), "b": b.T if adjoint_b else b}
            more = {"adjoint_a": adjoint_a, "adjoint_b": adjoint_b}
            label = f"SparseTensorDenseMatMul_{adjoint_a}_{adjoint_b}"
            case(label, "SparseTensorDenseMatMul", fed, a_shape=longs(4, 3), **more)
    values = (real(6) + 1j * real(6)).astype(np.complex64)
    b = (real(2, 4) + 1j * real(2, 4)).astype(np.complex64)
    fed = {"a_indices": indices.astype(np.int32), "a_values": values, "b": b}
    more = {"adjoint_a": True, "adjoint_b": True, "a_shape": longs(4, 3)}
    case("SparseTensorDenseMatMul_complex", "SparseTensorDenseMatMul", fed, **more)
    again = {"a_indices": indices, "a_values": real(6), "b": real(3, 2), "a_shape": longs(4, 3)}
    case("SparseTensorDenseMatMul_dynamic", "SparseTensorDenseMatMul", again)


def split() -> None:
    lines = words("", "a b", ",a;b,,", "aä€", b"\xc3\xa4\xff", "  ")
    for name, delimiter in (("space", " "), ("two", ",;"), ("bytes", ""), ("odd", "^]-")):
        for skip in (False, True):
            label = f"StringSplit_{name}_{skip}"
            case(label, "StringSplit", {"input": lines}, delimiter=delimiter, skip_empty=skip)
    fed = {"input": words("a-b]c", "^"), "delimiter": np.array("^]-", object)}
    case("StringSplit_dynamic", "StringSplit", fed)


def example(**features: Any) -> bytes:
    """A serialized example; a feature that is None has no list."""
    made = {}
    for key, values in features.items():
        if values is None:
            made[key] = tf.train.Feature()
        elif values and isinstance(values[0], bytes):
            made[key] = tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        elif values and isinstance(values[0], float):
            made[key] = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            made[key] = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    whole = tf.train.Example(features=tf.train.Features(feature=made))
    return whole.SerializeToString(deterministic=True)


def parsed() -> None:
    # A key may be that of one feature only.
    texts = words(
        example(f=[1.5, -2.0, 3.0, 0.25], n=[7], s=[b"a", b"\xc3\xa4\xff"], v=[1, -2, 3], z=[9]),
        example(n=[-(2**40)], v=[5], w=[6, 7], q=[b"x", b""], x=[1.0], z=[9]),
        example(f=[0.5, 1.0, 1.5, 2.0], s=[b"b"], n=None, w=[1], r=[3, 4], z=[9]),
    )
    given: dict[str, Any] = {
        "names": words(),
        "sparse_keys": words("s", "w", "absent"),
        "dense_keys": words("f", "n", "v"),
        "ragged_keys": words("r", "q"),
        "dense_defaults": [np.arange(4, dtype=F).reshape(2, 2), np.int64(-1), np.int64(77)],
        "num_sparse": 3,
        "sparse_types": [tf.string, tf.int64, tf.float32],
        "ragged_value_types": [tf.int64, tf.string],
        "ragged_split_types": [tf.int32, tf.int64],
        "dense_shapes": [[2, 2], [], [None]],
    }
    case("ParseExampleV2", "ParseExampleV2", {"serialized": texts}, **given)
    case("ParseExampleV2_dynamic", "ParseExampleV2", {"serialized": texts[:1]}, **given)
    one = np.array(texts[0], object)
    case("ParseExampleV2_one", "ParseExampleV2", {"serialized": one}, **given)
    case("ParseExampleV2_none", "ParseExampleV2", {"serialized": words()}, **given)
    pairs = {
        "names": words(),
        "sparse_keys": ["s", "w"],
        "dense_keys": ["f", "v"],
        "dense_defaults": [np.zeros((4,), F), np.array([5, 6], np.int64)[:1]],
        "sparse_types": [tf.string, tf.int64],
        "dense_shapes": [[4], [None, 1]],
    }
    case("ParseExample", "ParseExample", {"serialized": texts}, **pairs)


def written() -> None:
    """Text in other forms, and ranges."""
    table = words("a", "ä", "", "d", "€", "f", "g", "h").reshape(2, 2, 2)
    for name, axes, keep in (
        ("last", [2], False),
        ("two", [2, 0], False),
        ("kept", [-3, 1], True),
        ("all", [0, 1, 2], False),
        ("none", [], False),
    ):
        indices = np.array(axes, np.int32)
        more = {"reduction_indices": indices, "keep_dims": keep, "separator": "-"}
        case(f"ReduceJoin_{name}", "ReduceJoin", {"inputs": table}, **more)
    joined = {"inputs": table, "reduction_indices": np.array([1], np.int32)}
    case("ReduceJoin_dynamic", "ReduceJoin", joined)
    empty = {"inputs": words().reshape(2, 0)}
    case("ReduceJoin_of_nothing", "ReduceJoin", empty, reduction_indices=np.array([1], np.int32))
    data = words(b"\x01\x02\x03\x84", b"\xff\xfe\x00\x01")
    for kind in (tf.uint8, tf.int16, tf.int32, tf.float32):
        for little in (True, False):
            label = f"DecodeRaw_{kind.name}_{little}"
            case(label, "DecodeRaw", {"bytes": data}, out_type=kind, little_endian=little)
    texts = words("", "a", "ab", "abc", b"\xff\xfe\xfd>?")
    for pad in (False, True):
        case(f"EncodeBase64_{pad}", "EncodeBase64", {"input": texts}, pad=pad)
    case(
        "DecodeBase64",
        "DecodeBase64",
        {"input": words("", "YQ", "YQ==", "YWI=", "YWJj", "__79Pj8")},
    )
    ends = {"starts": np.array([0, 5, 3], np.int32), "limits": np.array([4, 1, 3], np.int32)}
    case("RaggedRange", "RaggedRange", ends, deltas=np.array([1, -2, 7], np.int32))
    case("RaggedRange_scalar", "RaggedRange", ends, deltas=np.int32(2), Tsplits=tf.int32)
    reals = {"starts": np.array(0.5, F), "limits": np.array([2, -1], F)}
    case("RaggedRange_dynamic", "RaggedRange", reals, deltas=np.float32(0.4))


def places_of_maxima() -> None:
    x = np.round(real(2, 7, 6, 3), 1)  # with equal elements
    for padding in ("SAME", "VALID"):
        for batch in (False, True):
            more = {"padding": padding, "include_batch_in_index": batch}
            size = {"ksize": [1, 3, 2, 1], "strides": [1, 2, 2, 1]}
            label = f"MaxPoolWithArgmax_{padding}_{batch}"
            case(label, "MaxPoolWithArgmax", {"input": x}, **size, **more)
    size = {"ksize": [1, 2, 2, 1], "strides": [1, 1, 1, 1], "Targmax": tf.int32}
    case("MaxPoolWithArgmax_int32", "MaxPoolWithArgmax", {"input": x}, padding="SAME", **size)


def combined() -> None:
    """Sums, products and softmax of sparse tensors."""
    a, b = places(4, 3, count=5), places(4, 3, count=4)
    x, y = real(5), real(4)
    parts = {"a_indices": a, "a_values": x, "a_shape": longs(4, 3)}
    more = {"b_indices": b, "b_values": y, "b_shape": longs(4, 3)}
    for least in (0.0, 0.8):
        case(f"SparseAdd_{least}", "SparseAdd", parts | more, thresh=np.float32(least))
    case("SparseAdd_dynamic", "SparseAdd", parts | more | {"thresh": np.float32(0.1)})
    case("SparseTensorDenseAdd", "SparseTensorDenseAdd", parts | {"b": real(4, 3)})
    whole = {"sp_indices": a, "sp_values": x, "sp_shape": longs(4, 3)}
    for name in ("Add", "Mul"):
        label = f"SparseDenseCwise{name}"
        case(label, label, whole | {"dense": real(4, 3)})
        case(f"{label}_row_dynamic", label, whole | {"dense": real(3)})
    case("SparseSoftmax", "SparseSoftmax", whole)
    cube = {
        "input_indices": places(2, 3, 4, count=9),
        "input_values": real(9),
        "input_shape": longs(2, 3, 4),
    }
    for name, axes in (
        ("last", [-1]),
        ("two", [0, 2]),
        ("none", []),
        ("all", [0, 1, 2]),
        ("middle_dynamic", [1]),
    ):
        for keep in (False, True):
            more = {"reduction_axes": np.array(axes, np.int32), "keep_dims": keep}
            case(f"SparseReduceSum_{keep}_{name}", "SparseReduceSum", cube, **more)


if __name__ == "__main__":
    for make in (
        reshaped,
        filled,
        arranged,
        products,
        split,
        parsed,
        written,
        places_of_maxima,
        combined,
    ):
        make()
    save("sparse")
