"""Makes ``sparse.npz.xz``, as ``make.py`` does ``cases.npz.xz``: operations on sparse tensors, and
StringSplit, whose result is one."""

from __future__ import annotations

from typing import Any

import numpy as np
from make import RNG, case, real, save
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


if __name__ == "__main__":
    for make in (reshaped, filled, arranged, products, split):
        make()
    save("sparse")
