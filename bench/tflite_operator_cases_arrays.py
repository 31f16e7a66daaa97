"""Cases of ``bench.tflite_operators``: operators that move, choose, reduce or make elements, and
those of tables and words."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from tests.support.tflite_models import TYPES, model, subgraph

from bench.tflite_operator_cases import (
    ACTIVATION,
    NUMBERS,
    ROWS,
    BuiltModel,
    Family,
    SingleOperator,
    Tensor,
    held,
    held_scalar,
    operator_cases,
    result,
)

IMAGE = (1, 8, 8, 8), (1, 64, 64, 64)
LIST = (60,), (100_000,)
TABLE = (20, 8), (2000, 256)
_RESOURCE = {"type": TYPES.index("resource")}

# Moved elements.


@operator_cases(
    {
        "RESHAPE": "float32 int8 uint8 int16 int32",
        "EXPAND_DIMS": "float32 int8 uint8 int16 int32",
        "SQUEEZE": "float32 int8 uint8 int16 int32",
        "TRANSPOSE": f"{NUMBERS} bool",
        "TILE": f"{NUMBERS} bool",
        "BROADCAST_TO": f"{NUMBERS} bool",
        "REVERSE_V2": f"{NUMBERS} bool",
        "PAD": f"{NUMBERS} bool",
        "MIRROR_PAD": NUMBERS,
        "SPACE_TO_BATCH_ND": NUMBERS,
        "BATCH_TO_SPACE_ND": NUMBERS,
        "SPACE_TO_DEPTH": "float32 int8 uint8 int32 int64",
        "DEPTH_TO_SPACE": "float32 int8 uint8 int32 int64",
        "SLICE": f"{NUMBERS} bool",
        "STRIDED_SLICE": f"{NUMBERS} bool",
    },
    *IMAGE,
)
def moved(t: Family, name: str, *dims: int) -> SingleOperator:
    batch, height, width, channels = dims
    x, options = t.x(*dims), {}
    constants = {
        "RESHAPE": [held(batch, height * width, channels)],
        "EXPAND_DIMS": [held(1)],
        "TRANSPOSE": [held(0, 3, 1, 2)],
        "TILE": [held(1, 1, 2, 1)],
        "BROADCAST_TO": [held(2, height, width, channels)],
        "REVERSE_V2": [held(2)],
        "PAD": [held([0, 0], [1, 1], [1, 1], [0, 0])],
        "MIRROR_PAD": [held([0, 0], [1, 1], [1, 1], [0, 0])],
        "SPACE_TO_BATCH_ND": [held(2, 2), held([0, 0], [0, 0])],
        "BATCH_TO_SPACE_ND": [held(2, 2), held([0, 0], [0, 0])],
        "SLICE": [held(0, 1, 1, 0), held(batch, height - 2, width - 2, channels)],
        "STRIDED_SLICE": [held(0, 1, 0, 0), held(*dims), held(1, 2, 1, 1)],
    }.get(name, [])
    if name == "SQUEEZE":
        options = {"squeeze_dims": [0]}
    elif name == "MIRROR_PAD":
        options = {"mode": 0}
    elif name.endswith("DEPTH") or name == "DEPTH_TO_SPACE":
        options = {"block_size": 2}
    elif name == "BATCH_TO_SPACE_ND":
        x = replace(x, array=x.array.reshape(4, height // 2, width // 2, channels))
    # LiteRT has no first version of BROADCAST_TO.
    number = 2 if name == "BROADCAST_TO" else 1
    return SingleOperator(name, [x, *constants], [t.y()], options, version=number)


@operator_cases({"PADV2": NUMBERS}, *IMAGE)
def pad_with_value(t: Family, name: str, *dims: int) -> SingleOperator:
    value = replace(t.x(1), held=True)
    pads = held([0, 0], [1, 1], [1, 1], [0, 0])
    return SingleOperator(name, [t.x(*dims), pads, value], [t.y()])


@operator_cases({"CONCATENATION": f"{NUMBERS} bool"}, *IMAGE)
def concatenation(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), t.x(*dims)], [t.y()], {"axis": 3})


@operator_cases({"PACK": NUMBERS}, *IMAGE)
def pack(t: Family, name: str, *dims: int) -> SingleOperator:
    options = {"values_count": 2, "axis": 1}
    return SingleOperator(name, [t.x(*dims), t.x(*dims)], [t.y()], options)


@operator_cases({"UNPACK": "float32 int8 uint8 int16 int32 bool"}, (4, 60), (4, 65536))
def unpack(t: Family, name: str, count: int, width: int) -> SingleOperator:
    options = {"num": count, "axis": 0}
    return SingleOperator(name, [t.x(count, width)], [t.y()] * count, options)


@operator_cases({"SPLIT": NUMBERS}, *IMAGE)
def split(t: Family, name: str, *dims: int) -> SingleOperator:
    inputs = [held_scalar(3), t.x(*dims)]
    return SingleOperator(name, inputs, [t.y(), t.y()], {"num_splits": 2})


@operator_cases({"SPLIT_V": NUMBERS}, *IMAGE)
def split_by_sizes(t: Family, name: str, *dims: int) -> SingleOperator:
    inputs = [t.x(*dims), held(3, dims[-1] - 3), held_scalar(3)]
    return SingleOperator(name, inputs, [t.y(), t.y()], {"num_splits": 2})


@operator_cases({"DYNAMIC_UPDATE_SLICE": f"{NUMBERS} bool"}, *IMAGE)
def update_slice(t: Family, name: str, *dims: int) -> SingleOperator:
    batch, height, width, channels = dims
    update = t.x(batch, 1, width, channels)
    place = Tensor(np.array([0, height // 2, 0, 0], np.int32))
    return SingleOperator(name, [t.x(*dims), update, place], [t.y()])


@operator_cases({"REVERSE_SEQUENCE": "float32 uint8 int16 int32 int64"}, *TABLE)
def reverse_sequence(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    lengths = t.indices(rows // 2, 4)
    options = {"seq_dim": 1, "batch_dim": 0}
    return SingleOperator(name, [t.x(4, rows // 2, width // 2), lengths], [t.y()], options)


@operator_cases({"MATRIX_DIAG": NUMBERS}, (4, 8), (16, 128))
def matrix_diag(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [t.y()])


@operator_cases({"MATRIX_SET_DIAG": NUMBERS}, (4, 8), (16, 128))
def matrix_set_diag(t: Family, name: str, count: int, size: int) -> SingleOperator:
    return SingleOperator(name, [t.x(count, size, size), t.x(count, size)], [t.y()])


# Chosen elements.


@operator_cases({"GATHER": f"{NUMBERS} bool"}, *TABLE)
def gather(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    return SingleOperator(
        name, [t.x(rows, width), t.indices(rows, rows // 2)], [t.y()], {"axis": 0}
    )


@operator_cases({"GATHER_ND": f"{NUMBERS} bool"}, *TABLE)
def gather_nd(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    return SingleOperator(name, [t.x(rows, width), t.indices(rows, rows // 2, 1)], [t.y()])


@operator_cases({"STABLEHLO_GATHER": f"{NUMBERS} bool"}, *TABLE)
def slice_gather(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    options = {
        "offset_dims": [1],
        "collapsed_slice_dims": [0],
        "start_index_map": [0],
        "index_vector_dim": 1,
        "slice_sizes": [1, width],
    }
    inputs, shapes = [t.x(rows, width), t.indices(rows, rows // 4, 1)], {"y0": [rows // 4, width]}
    return SingleOperator(name, inputs, [t.y()], options, shapes=shapes)


@operator_cases({"SCATTER_ND": "float32 int8 uint8 int32 int64 bool"}, *TABLE)
def scatter_nd(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    places = Tensor(t.rng.permutation(rows)[: rows // 2, None].astype(np.int32))
    return SingleOperator(name, [places, t.x(rows // 2, width), held(rows, width)], [t.y()])


@operator_cases({"EMBEDDING_LOOKUP": "float32 int8 uint8 int32 hybrid"}, *TABLE)
def embedding_lookup(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    if t.type == "hybrid":
        return SingleOperator(name, [t.indices(rows, 16), t.weights(rows, width)], [t.y()])
    table = replace(t.x(rows, width), held=True)
    return SingleOperator(name, [t.indices(rows, 16), table], [t.y()])


@operator_cases({"EMBEDDING_LOOKUP_SPARSE": "float32"}, *TABLE)
def embedding_lookup_sparse(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    count = rows // 4
    places = np.stack([np.arange(count) // 2, np.arange(count) % 2], 1)
    inputs = [
        t.indices(rows, count),
        held(*places.tolist()),
        held((count + 1) // 2, 2),
        t.x(count),
        replace(t.x(rows, width), held=True),
    ]
    return SingleOperator(name, inputs, [t.y()], {"combiner": 0})


@operator_cases({"HASHTABLE_LOOKUP": "float32 int8 int32"}, *TABLE)
def hashtable_lookup(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    keys = held(*range(0, 2 * rows, 2))
    table = replace(t.x(rows, width), held=True)
    inputs = [t.indices(2 * rows, 16), keys, table]
    return SingleOperator(name, inputs, [t.y(), result("uint8")])


@operator_cases({"TOPK_V2": NUMBERS}, *ROWS)
def top_k(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), held_scalar(5)], [t.y(), result("int32")])


@operator_cases(dict.fromkeys(("ARG_MAX", "ARG_MIN"), "float32 int8 uint8 int32 bool"), *ROWS)
def arg(t: Family, name: str, *dims: int) -> SingleOperator:
    number = TYPES.index("int32")
    return SingleOperator(name, [t.x(*dims), held(1)], [result("int32")], {"output_type": number})


@operator_cases({"WHERE": "float32 int8 uint8 int32 int64 bool"}, *ROWS)
def where(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims)], [result("int64")])


@operator_cases({"UNIQUE": NUMBERS}, *LIST)
def unique(t: Family, name: str, count: int) -> SingleOperator:
    x = t.x(count)
    x = replace(x, array=np.round(x.array * 2).astype(x.array.dtype))
    return SingleOperator(name, [x], [t.y(), result("int32")], {"idx_out_type": 2})


@operator_cases(dict.fromkeys(("NON_MAX_SUPPRESSION_V4", "NON_MAX_SUPPRESSION_V5"), "float32"),
                (10,), (2000,))  # fmt: skip
def suppression(t: Family, name: str, count: int) -> SingleOperator:
    corners = t.rng.random((count, 2))
    boxes = np.concatenate([corners, corners + 0.1], 1).astype(np.float32)
    numbers = [held_scalar(value, np.float32) for value in (0.5, 0.1, 0.5)]
    is_soft = name.endswith("5")
    inputs = [Tensor(boxes), Tensor(t.rng.random(count).astype(np.float32)), held_scalar(100)]
    outputs = [result("int32"), *[result("float32")] * is_soft, result("int32")]
    return SingleOperator(name, [*inputs, *numbers[: 2 + is_soft]], outputs)


# Made elements.


@operator_cases({"ONE_HOT": "float32 int8 uint8 int32 int64 bool"}, (20, 8), (2000, 100))
def one_hot(t: Family, name: str, count: int, depth: int) -> SingleOperator:
    ends = [held_scalar(value, t.dtype) for value in (1, 0)]
    ends = [replace(end, scale=t.scale, zero=t.zero) for end in ends]
    inputs = [t.indices(depth, count), held_scalar(depth), *ends]
    return SingleOperator(name, inputs, [t.y()], {"axis": -1})


@operator_cases({"FILL": f"{NUMBERS} bool"}, *ACTIVATION)
def fill(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [held(*dims), t.x()], [t.y()])


@operator_cases({"RANGE": "float32 int32 int64"}, *LIST)
def number_range(t: Family, name: str, count: int) -> SingleOperator:
    ends = [Tensor(np.array(value, t.dtype)) for value in (0, count, 1)]
    return SingleOperator(name, ends, [t.y()])


@operator_cases({"SHAPE": "float32 int8", "RANK": "float32 int8"}, *ACTIVATION)
def shape(t: Family, name: str, *dims: int) -> SingleOperator:
    number = TYPES.index("int32")
    options = {"out_type": number} if name == "SHAPE" else {}
    return SingleOperator(name, [t.x(*dims)], [result("int32")], options)


@operator_cases({"BROADCAST_ARGS": "int32 int64"}, (3,), (8,))
def broadcast_args(t: Family, name: str, rank: int) -> SingleOperator:
    x, y = np.arange(1, rank + 1), np.ones(rank - 1)
    return SingleOperator(name, [Tensor(each.astype(t.dtype)) for each in (x, y)], [t.y()])


@operator_cases({"SPARSE_TO_DENSE": "float32 int8 uint8 int32 int64"}, *LIST)
def sparse_to_dense(t: Family, name: str, count: int) -> SingleOperator:
    places = np.sort(t.rng.permutation(2 * count)[:count])[:, None].astype(np.int32)
    zero = held_scalar(t.zero, t.dtype)
    inputs = [
        Tensor(places),
        held(2 * count),
        t.x(count),
        replace(zero, scale=t.scale, zero=t.zero),
    ]
    return SingleOperator(name, inputs, [t.y()])


@operator_cases({"RANDOM_UNIFORM": "float32", "RANDOM_STANDARD_NORMAL": "float32"}, *LIST)
def random(t: Family, name: str, count: int) -> BuiltModel:
    options = {"seed": 3, "seed2": 5}
    drawn = SingleOperator(name, [held(count)], [t.y()], options, "RandomOptions")
    return replace(drawn.built(), alike=False)


@operator_cases({"MULTINOMIAL": "float32"}, *ROWS)
def multinomial(t: Family, name: str, *dims: int) -> BuiltModel:
    inputs = [t.x(*dims), held_scalar(20)]
    drawn = SingleOperator(name, inputs, [result("int64")], {"seed": 3}, "RandomOptions")
    return replace(drawn.built(), alike=False)


@operator_cases({"STABLEHLO_RNG_BIT_GENERATOR": "int32 int64"}, *LIST)
def random_bits(t: Family, name: str, count: int) -> SingleOperator:
    state = Tensor(np.array([1, 2, 3], np.uint64))
    outputs = [Tensor(np.zeros(0, np.uint64)), Tensor(np.zeros(0, t.dtype))]
    shapes = {"y0": [3], "y1": [count]}
    return SingleOperator(name, [state], outputs, {"algorithm": 1}, shapes=shapes)


# Reductions.


@operator_cases(
    {
        "MEAN": NUMBERS,
        "SUM": NUMBERS,
        "REDUCE_MAX": NUMBERS,
        "REDUCE_MIN": NUMBERS,
        "REDUCE_PROD": "float32 int8 int16 int32 int64",
        "REDUCE_ANY": "bool",
        "REDUCE_ALL": "bool",
    },
    *IMAGE,
)
def reduction(t: Family, name: str, *dims: int) -> SingleOperator:
    size = {"SUM": 8.0}.get(name, 1.0)
    options = {"keep_dims": False}
    x = _near_one(t.x(*dims)) if name == "REDUCE_PROD" else t.x(*dims)
    return SingleOperator(name, [x, held(1, 2)], [t.y(size)], options, "ReducerOptions")


def _near_one(x: Tensor) -> Tensor:
    """Of numbers whose product does not overflow."""
    if x.array.dtype.kind == "f":
        return replace(x, array=1 + x.array / 64)
    one = 0 if x.scale is None else x.zero + round(1 / x.scale)
    steps = x.array % 2 * 2 - 1 if x.scale is None else x.array % 3 - 1
    return replace(x, array=(one + steps).astype(x.array.dtype))


@operator_cases({"CUMSUM": "float32 int32 int64"}, *ROWS)
def cumsum(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), held_scalar(1)], [t.y()])


@operator_cases({"SEGMENT_SUM": "float32 int32"}, *TABLE)
def segment_sum(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    segments = Tensor(np.arange(rows, dtype=np.int32) // 4)
    return SingleOperator(name, [t.x(rows, width), segments], [t.y()])


@operator_cases(
    {f"UNSORTED_SEGMENT_{name}": "float32 int32" for name in ("MAX", "MIN", "PROD", "SUM")}, *TABLE
)
def unsorted_segments(t: Family, name: str, rows: int, width: int) -> SingleOperator:
    inputs = [t.x(rows, width), t.indices(rows // 4, rows), held_scalar(rows // 4)]
    return SingleOperator(name, inputs, [t.y()])


@operator_cases({"REDUCE_WINDOW": "float32 int8 int32 int64"}, *TABLE)
def reduce_window(t: Family, name: str, *dims: int) -> SingleOperator:
    first = Tensor(np.zeros((), t.dtype), t.scale, t.zero, held=True)
    numbers = [held(*pair, dtype=np.int64) for pair in ((2, 3), (2, 1), (1, 1))]
    return SingleOperator(name, [t.x(*dims), first, *numbers], [t.y()], {"reduce_function": 1})


@operator_cases({"STABLEHLO_REDUCE_WINDOW": "float32 int32"}, *TABLE)
def reduce_window_by_subgraph(t: Family, name: str, *dims: int) -> BuiltModel:
    options = {
        "window_dimensions": [2, 3],
        "window_strides": [2, 1],
        "padding": [0] * 4,
        "base_dilations": [1, 1],
        "window_dilations": [1, 1],
        "body_subgraph_index": 1,
    }
    y = {"type": TYPES.index(t.dtype.name), "shape": [dims[0] // 2, dims[1] - 2]}
    main = subgraph(
        {"x": (t.dtype.name, dims)},
        [(name, ["x", "zero"], ["y"], ("StablehloReduceWindowOptions", options))],
        ["y"],
        {"zero": np.zeros((), t.dtype)},
        y=y,
    )
    return BuiltModel(model([main, _scalars(t, "STABLEHLO_ADD")]), {"x": t.array(*dims)})


def _scalars(t: Family, operator: str) -> dict:
    """The subgraph of an operator on two scalars."""
    pair = {name: (t.dtype.name, []) for name in "ab"}
    number = TYPES.index(t.dtype.name)
    return subgraph(pair, [(operator, ["a", "b"], ["c"], None)], ["c"], c={"type": number})


@operator_cases({"STABLEHLO_SCATTER": "float32 int32"}, *TABLE)
def slice_scatter(t: Family, name: str, rows: int, width: int) -> BuiltModel:
    count = rows // 2
    options = {
        "update_window_dims": [1],
        "inserted_window_dims": [0],
        "scatter_dims_to_operand_dims": [0],
        "index_vector_dim": 1,
        "update_computation_subgraph_index": 1,
    }
    dtype = t.dtype.name
    shapes = {"x": (dtype, [rows, width]), "i": ("int32", [count, 1]), "u": (dtype, [count, width])}
    y = {"type": TYPES.index(dtype), "shape": [rows, width]}
    operator = (name, ["x", "i", "u"], ["y"], ("StablehloScatterOptions", options))
    main = subgraph(shapes, [operator], ["y"], y=y)
    feeds = {"x": t.array(rows, width), "i": t.indices(rows, count, 1).array}
    feeds["u"] = t.array(count, width)
    return BuiltModel(model([main, _scalars(t, "STABLEHLO_ADD")]), feeds)


@operator_cases({"STABLEHLO_PAD": f"{NUMBERS} bool"}, *TABLE)
def spread(t: Family, name: str, *dims: int) -> SingleOperator:
    options = {"edge_padding_low": [1, 0], "edge_padding_high": [2, 1], "interior_padding": [0, 2]}
    zero = Tensor(np.zeros((), t.dtype), t.scale, t.zero, held=True)
    return SingleOperator(name, [t.x(*dims), zero], [t.y()], options)


@operator_cases({"DILATE": f"{NUMBERS} bool"}, *TABLE)
def dilate(t: Family, name: str, *dims: int) -> SingleOperator:
    zero = Tensor(np.zeros((), t.dtype), t.scale, t.zero, held=True)
    return SingleOperator(name, [t.x(*dims), held(2, 3), zero], [t.y()])


@operator_cases({"RFFT2D": "float32"}, (1, 8, 16), (1, 128, 256))
def rfft2d(t: Family, name: str, *dims: int) -> SingleOperator:
    return SingleOperator(name, [t.x(*dims), held(*dims[1:])], [result("complex64")])


@operator_cases({"DENSIFY": "float32"}, *TABLE)
def densify(t: Family, name: str, rows: int, width: int) -> BuiltModel:
    """Of weights of which every second row has no elements, read by a layer."""
    present = np.arange(rows) % 2
    ends = np.concatenate([[0], np.cumsum(present * width)]).tolist()
    columns = np.tile(np.arange(width), present.sum()).tolist()
    sparse = {"format": 1, "array_segments_type": 1, "array_indices_type": 1}
    sparse |= {"array_segments": ("Int32Vector", {"values": ends})}
    sparse |= {"array_indices": ("Int32Vector", {"values": columns})}
    dims = [{"format": 0, "dense_size": rows}, sparse]
    sparsity = {"traversal_order": [0, 1], "block_map": [], "dim_metadata": dims}
    layer = ("FULLY_CONNECTED", ["x", "d"], ["y"], ("FullyConnectedOptions", {}))
    main = subgraph(
        {"x": ("float32", [1, width])},
        [(name, ["w"], ["d"], ("DensifyOptions", {})), layer],
        ["y"],
        {"w": t.array(len(columns))},
        w={"shape": [rows, width], "sparsity": sparsity},
        d={"shape": [rows, width]},
        y={"shape": [1, rows]},
    )
    return BuiltModel(model([main]), {"x": t.array(1, width)})


# Tables and words.


@operator_cases({"HASHTABLE_FIND": "int64", "HASHTABLE_SIZE": "int64"}, (16,), (5000,))
def hashtable(t: Family, name: str, count: int) -> BuiltModel:
    """A table from words to numbers, which CALL_ONCE fills."""
    words = np.array([f"word {i}" for i in range(count)], object)
    numbers = np.arange(count, dtype=np.int64)
    types = {"key_dtype": TYPES.index("object"), "value_dtype": TYPES.index("int64")}
    # LiteRT numbers the type of strings as the schema does.
    made = ("HASHTABLE", [], ["t"], ("HashtableOptions", {"table_id": 1, **types}))
    fill = subgraph(
        {},
        [made, ("HASHTABLE_IMPORT", ["t", "k", "v"], [], ("HashtableImportOptions", {}))],
        [],
        {"k": words, "v": numbers},
        t={**_RESOURCE, "shape": [1]},
    )
    once = ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1}))
    y = {"type": TYPES.index("int64"), "shape": [count if name.endswith("FIND") else 1]}
    t_ = {**_RESOURCE, "shape": [1]}
    if name.endswith("SIZE"):
        size = (name, ["t"], ["y"], ("HashtableSizeOptions", {}))
        return BuiltModel(model([subgraph({}, [once, made, size], ["y"], t=t_, y=y), fill]), {})
    find = (name, ["t", "q", "d"], ["y"], ("HashtableFindOptions", {}))
    other = {"d": np.array([-1], np.int64)}
    main = subgraph({"q": ("object", [count])}, [once, made, find], ["y"], other, t=t_, y=y)
    return BuiltModel(model([main, fill]), {"q": words[t.rng.permutation(count)]})


@operator_cases({"LSH_PROJECTION": "int32"}, (4, 8), (32, 1000))
def lsh_projection(t: Family, name: str, functions: int, count: int) -> SingleOperator:
    seeds = Tensor(t.rng.standard_normal((functions, 4)).astype(np.float32), held=True)
    inputs = [seeds, t.x(count, 2), Tensor(np.ones(count, np.float32))]
    options = {"type": 2}
    return SingleOperator(name, inputs, [result("int32")], options, "LSHProjectionOptions")


@operator_cases({"SKIP_GRAM": "string"}, (12,), (400,))
def skip_gram(t: Family, name: str, count: int) -> SingleOperator:
    words = " ".join(f"word{i % 37}" for i in range(count))
    options = {"ngram_size": 3, "max_skip_size": 2, "include_all_ngrams": False}
    x = Tensor(np.array([words], object))
    return SingleOperator(name, [x], [result("string")], options)
