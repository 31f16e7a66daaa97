"""Operators of StableHLO, tables, words and random numbers, beside LiteRT or by what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.frontends.tflite.test_operations import Op, by_litert, f, i32, scalar
from tests.support.tflite_models import TYPES, model, subgraph

X = {"x": ("float32", [2])}
PAIR = {"a": ("float32", []), "b": ("float32", [])}
ONE = np.array([1, 2], np.float32)
RESOURCE = {"type": TYPES.index("resource")}


def i64(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def padding(low: list[int], high: list[int], interior: list[int]) -> dict[str, Any]:
    return {"edge_padding_low": low, "edge_padding_high": high, "interior_padding": interior}


OPS = [
    *(Op(f"STABLEHLO_{n}", (f(2, 3), f(2, 3))) for n in ("ADD", "MULTIPLY", "MAXIMUM", "MINIMUM")),
    Op("STABLEHLO_AND", (f(5) > 0, f(5) > 0), outputs=("bool",)),
    Op("STABLEHLO_AND", (i32(12, -1), i32(10, 7)), outputs=("int32",)),
    Op("STABLEHLO_SHIFT_LEFT", (i32(1, -3, 7), i32(3, 2, 0)), outputs=("int32",)),
    Op("STABLEHLO_PAD", (f(2, 3), [scalar(7, np.float32)]), padding([1, 0], [2, 1], [0, 2])),
    Op("STABLEHLO_PAD", (f(4, 5), [scalar(7, np.float32)]), padding([-1, 2], [0, -2], [1, 0])),
    Op("DILATE", (f(2, 3), [i32(2, 3)], [scalar(7, np.float32)])),
    *(
        Op(
            "REDUCE_WINDOW",
            (f(5, 6), [scalar(0.5, np.float32)], [i64(2, 3)], [i64(2, 1)], [i64(1, 2)]),
            {"reduce_function": number},
        )
        for number in (1, 2, 3, 4)
    ),
    Op(
        "STABLEHLO_GATHER",
        (f(3, 4, 2), [i32([[0, 0], [1, 0], [2, 1]], [[0, 1], [1, 1], [0, 9]])]),
        {
            "offset_dims": [2, 3],
            "collapsed_slice_dims": [0],
            "start_index_map": [1, 0],
            "index_vector_dim": 2,
            "slice_sizes": [1, 2, 2],
        },
    ),
    Op(
        "STABLEHLO_GATHER",
        (f(4, 3), [i32([2], [0], [3])]),
        {
            "offset_dims": [1],
            "collapsed_slice_dims": [0],
            "start_index_map": [0],
            "index_vector_dim": 1,
            "slice_sizes": [1, 3],
        },
    ),
    *(
        Op(
            "EMBEDDING_LOOKUP_SPARSE",
            (i32(1, 3, 0), [i32([0, 0], [2, 0], [2, 1])], [i32(3, 2)], f(3), [f(4, 2, 3)]),
            {"combiner": combiner},
        )
        for combiner in (0, 1, 2)
    ),
    Op(
        "HASHTABLE_LOOKUP",
        (i32(1234, -292, -11, 0), [i32(-11, 0, 1234)], [f(3, 2)]),
        outputs=("float32", "uint8"),
    ),
]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_operator_gives_what_litert_gives(op: Op) -> None:
    if op.name in ("STABLEHLO_GATHER",):  # of LiteRT, the rank of the output must be declared
        file = declared(op, 4 if op.options["slice_sizes"] == [1, 2, 2] else 2)
    else:
        file = op.file
    wanted = by_litert(file, op.feeds)
    for executor in ("linear", "interpret"):
        got = ps.compile(file, executor=executor).run(op.feeds)
        for value, want in zip(got.values(), wanted, strict=True):
            assert (value.dtype, value.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)


def test_gather_takes_indices_without_a_dim_of_their_own() -> None:
    """LiteRT reads beyond its memory there."""
    op = OPS[-5]
    x, _ = op.inputs
    indices = i32(2, 0, 3)
    got = ps.compile(declared(Op(op.name, (x, [indices]), op.options), 2))(x)
    np.testing.assert_array_equal(got, x[indices])


def declared(op: Op, rank: int) -> bytes:
    """The file of an operator with one fed input, whose output is declared to be of a rank."""
    (x, indices), dims = op.inputs, [1] * rank
    graph = subgraph(
        {"x0": (x.dtype.name, x.shape)},
        [(op.name, ["x0", "x1"], ["y"], ("StablehloGatherOptions", op.options))],
        ["y"],
        {"x1": indices[0]},
        y={"shape": dims},
    )
    return model([graph])


def region(name: str) -> dict[str, Any]:
    """A subgraph of two scalars; without a name, it gives the second one."""
    return subgraph(PAIR, [(name, ["a", "b"], ["c"], None)] if name else [], ["c" if name else "b"])


@pytest.mark.parametrize("name", ["", "STABLEHLO_ADD", "STABLEHLO_MULTIPLY", "STABLEHLO_MAXIMUM"])
def test_scatter_gives_what_litert_gives(name: str) -> None:
    options = {
        "update_window_dims": [2, 3],
        "inserted_window_dims": [0],
        "scatter_dims_to_operand_dims": [1, 0],
        "index_vector_dim": 2,
        "update_computation_subgraph_index": 1,
    }
    feeds = {
        "x": np.arange(24, dtype=np.float32).reshape(3, 4, 2),
        "i": i64([[0, 2], [1, 0], [2, 1]], [[0, 1], [1, 1], [0, 9]]),
        "u": np.rint(8 * f(2, 3, 2, 2)) / np.float32(8),  # sums are exact in any order
    }
    ports = {key: (value.dtype.name, value.shape) for key, value in feeds.items()}
    operators = [("STABLEHLO_SCATTER", [*ports], ["y"], ("StablehloScatterOptions", options))]
    main = subgraph(ports, operators, ["y"], y={"shape": [3, 4, 2]})
    file = model([main, region(name)])
    (want,) = by_litert(file, feeds)
    np.testing.assert_allclose(ps.compile(file).run(feeds)["y"], want, rtol=1e-6)


@pytest.mark.parametrize("name", ["STABLEHLO_ADD", "STABLEHLO_MINIMUM", "STABLEHLO_MAXIMUM"])
def test_windows_of_a_subgraph_give_what_litert_gives(name: str) -> None:
    options = {
        "window_dimensions": [3, 2],
        "window_strides": [1, 2],
        "base_dilations": [2, 1],
        "window_dilations": [1, 2],
        "padding": [1, 2, 0, 1],
        "body_subgraph_index": 1,
    }
    x = np.rint(8 * f(4, 5)) / np.float32(8)  # whose sums are exact in any order
    operators = [
        ("STABLEHLO_REDUCE_WINDOW", ["x", "i"], ["y"], ("StablehloReduceWindowOptions", options))
    ]
    main = subgraph({"x": ("float32", x.shape)}, operators, ["y"], {"i": scalar(0.25, np.float32)})
    file = model([main, region(name)])
    (want,) = by_litert(file, {"x": x})
    np.testing.assert_array_equal(ps.compile(file)(x), want)


def test_region_of_several_operators_is_refused() -> None:
    both = [("ABS", ["a"], ["n"], None), ("STABLEHLO_ADD", ["n", "b"], ["c"], None)]
    options = {"window_dimensions": [2], "body_subgraph_index": 1}
    operators = [
        ("STABLEHLO_REDUCE_WINDOW", ["x", "i"], ["y"], ("StablehloReduceWindowOptions", options))
    ]
    main = subgraph(X, operators, ["y"], {"i": scalar(0, np.float32)})
    with pytest.raises(ps.Unsupported, match="its subgraph is no single addition"):
        ps.load(model([main, subgraph(PAIR, both, ["c"])]))


@pytest.mark.parametrize("dtype", ["int32", "uint64"])
@pytest.mark.parametrize(("algorithm", "words"), [(1, 2), (1, 3), (2, 2)])
def test_random_bits_are_those_of_litert(algorithm: int, words: int, dtype: str) -> None:
    state = np.array([2**40 + 7, 2**64 - 2, 99][:words], np.uint64)
    options = ("StablehloRngBitGeneratorOptions", {"algorithm": algorithm})
    graph = subgraph(
        {"s": ("uint64", [words])},
        [("STABLEHLO_RNG_BIT_GENERATOR", ["s"], ["n", "y"], options)],
        ["n", "y"],
        n={"type": TYPES.index("uint64"), "shape": [words]},
        y={"type": TYPES.index(dtype), "shape": [3, 5]},
    )
    file = model([graph])
    wanted = by_litert(file, {"s": state})
    for got, want in zip(ps.compile(file).run({"s": state}).values(), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


# Subgraphs.


def cases(*operators: str) -> bytes:
    options = ("StablehloCaseOptions", {"branch_subgraph_indices": [*range(1, len(operators) + 1)]})
    main = subgraph(
        {"i": ("int32", [1]), **X}, [("STABLEHLO_CASE", ["i", "x"], ["y"], options)], ["y"]
    )
    return model([main, *(subgraph(X, [(op, ["x"], ["y"], None)], ["y"]) for op in operators)])


@pytest.mark.parametrize("number", [-1, 0, 1, 2, 3, 7])
def test_case_runs_the_branch_of_its_number_and_the_last_one_for_others(number: int) -> None:
    feeds = {"i": i32(number), "x": np.array([-4, 9], np.float32)}
    for operators in (("NEG", "ABS", "SQUARE", "SIGN"), ("NEG", "ABS"), ("SQUARE",)):
        file = cases(*operators)
        (want,) = by_litert(file, feeds)
        np.testing.assert_array_equal(ps.compile(file).run(feeds)["y"], want)


def test_composite_runs_its_decomposition() -> None:
    options = ("StableHLOCompositeOptions", {"name": "n", "decomposition_subgraph_index": 1})
    main = subgraph(X, [("STABLEHLO_COMPOSITE", ["x"], ["y"], options)], ["y"])
    file = model([main, subgraph(X, [("SQUARE", ["x"], ["y"], None)], ["y"])])
    np.testing.assert_array_equal(ps.compile(file)(ONE), ONE**2)


# What is initialized once.

ONCE = ("CALL_ONCE", [], [], ("CallOnceOptions", {"init_subgraph_index": 1}))


def variable(name: str) -> tuple:
    return "VAR_HANDLE", [], [name], ("VarHandleOptions", {"container": "", "shared_name": name})


@pytest.mark.parametrize(
    "executor", ["linear", "dataflow", "parallel", "frames", "streams", "interpret"]
)
def test_variables_that_are_computed_at_first_are_computed_once(executor: str) -> None:
    """h begins as c + c, g as -c; each run adds x to h and gives h - g."""
    add = ("AddOptions", {})
    main = [
        ONCE,
        *(variable("h"), variable("g")),
        ("READ_VARIABLE", ["h"], ["old"], None),
        ("ADD", ["old", "x"], ["new"], add),
        ("ASSIGN_VARIABLE", ["h", "new"], [], None),
        ("READ_VARIABLE", ["g"], ["other"], None),
        ("SUB", ["new", "other"], ["y"], ("SubOptions", {})),
    ]
    first = [
        *(variable("h"), variable("g")),
        ("ADD", ["c", "c"], ["sum"], add),
        ("NEG", ["c"], ["n"], None),
        ("ASSIGN_VARIABLE", ["h", "sum"], [], None),
        ("ASSIGN_VARIABLE", ["g", "n"], [], None),
    ]
    handles = {"h": RESOURCE, "g": RESOURCE}
    c = {"c": np.array([10, 20], np.float32)}
    file = model([subgraph(X, main, ["y"], **handles), subgraph({}, first, [], c, **handles)])
    session = ps.compile(file, executor=executor)
    for run in range(1, 4):
        (want,) = by_litert(file, {"x": ONE}, run)
        np.testing.assert_array_equal(session(ONE), want)
        np.testing.assert_array_equal(want, 3 * c["c"] + run * ONE)


def test_branch_without_outputs_assigns_to_a_variable() -> None:
    """y = 10 until a positive x comes, and that x from then on."""
    main = [
        ONCE,
        ("GREATER", ["x", "zero"], ["positive"], None),
        (
            "IF",
            ["positive", "x"],
            [],
            ("IfOptions", {"then_subgraph_index": 2, "else_subgraph_index": 3}),
        ),
        variable("h"),
        ("READ_VARIABLE", ["h"], ["y"], None),
    ]
    first = [variable("h"), ("ASSIGN_VARIABLE", ["h", "c"], [], None)]
    assign = [variable("h"), ("ASSIGN_VARIABLE", ["h", "x"], [], None)]
    one = {"x": ("float32", [1])}
    constants = {"zero": np.zeros(1, np.float32)}
    truth = {"positive": {"type": TYPES.index("bool")}}
    graphs = [
        subgraph(one, main, ["y"], constants, h=RESOURCE, **truth),
        subgraph({}, first, [], {"c": np.array([10], np.float32)}, h=RESOURCE),
        subgraph(one, assign, [], h=RESOURCE),
        subgraph(one, [], []),
    ]
    file = model(graphs)
    for executor in ("linear", "dataflow", "parallel", "frames", "streams", "interpret"):
        session = ps.compile(file, executor=executor)
        outputs = [session(np.array([x], np.float32)).item() for x in (-1, 3, -2, 5)]
        assert outputs == [10, 3, 3, 5]


def table(query: np.ndarray, keys: np.ndarray, values: np.ndarray, default: Any) -> bytes:
    """y = what a table, which CALL_ONCE fills, has for the queries; n = its size."""
    names = {np.dtype(object): 4, np.dtype(np.int64): 5}
    kinds = {"key_dtype": names[keys.dtype], "value_dtype": names[values.dtype]}
    kinds = {key: TYPES.index({4: "object", 5: "int64"}[n]) for key, n in kinds.items()}
    made = ("HASHTABLE", [], ["t"], ("HashtableOptions", {"table_id": 3, **kinds}))
    main = [
        ONCE,
        made,
        ("HASHTABLE_FIND", ["t", "x", "d"], ["y"], ("HashtableFindOptions", {})),
        ("HASHTABLE_SIZE", ["t"], ["n"], ("HashtableSizeOptions", {})),
    ]
    fill = ("HASHTABLE_IMPORT", ["t", "k", "v"], [], ("HashtableImportOptions", {}))
    ports = {"x": (query.dtype.name, query.shape)}
    types = {"y": {"type": TYPES.index(values.dtype.name)}, "n": {"type": TYPES.index("int64")}}
    other = np.array(default, values.dtype).reshape(())
    resource = {"t": {**RESOURCE, "shape": [1]}}
    return model(
        [
            subgraph(ports, main, ["y", "n"], {"d": other}, **types, **resource),
            subgraph({}, [made, fill], [], {"k": keys, "v": values}, **resource),
        ]
    )


def test_tables_of_words_and_numbers_are_looked_up() -> None:
    words, numbers = np.array(["one", "two", "twö", "one"], object), i64(1, 2, 3, 9)
    query = np.array([["two", "none"], ["one", "twö"]], object)
    file = table(query, words, numbers, -1)
    y, n = ps.compile(file).run({"x": query}).values()
    assert (y.dtype, y.tolist(), n.tolist()) == (np.int64, [[2, -1], [1, 3]], [3])
    wanted = by_litert(file, {"x": query})
    np.testing.assert_array_equal(y, wanted[0])
    np.testing.assert_array_equal(n, wanted[1])
    back = ps.compile(table(i64(3, 4), numbers, words, "?")).run({"x": i64(3, 4)})
    assert back["y"].tolist() == ["twö", "?"]


def test_table_that_nothing_fills_is_refused() -> None:
    made = ("HASHTABLE", [], ["t"], ("HashtableOptions", {"table_id": 3}))
    find = ("HASHTABLE_SIZE", ["t"], ["n"], ("HashtableSizeOptions", {}))
    graph = subgraph({}, [made, find], ["n"], t=RESOURCE)
    with pytest.raises(ps.InvalidModel, match="reads a table that nothing has filled"):
        ps.load(model([graph]))


# Words and random numbers.


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(("size", "skip"), [(1, 0), (2, 0), (2, 1), (3, 2), (7, 1)])
def test_skip_grams_are_those_of_litert(size: int, skip: int, every: bool) -> None:
    options = {"ngram_size": size, "max_skip_size": skip, "include_all_ngrams": every}
    graph = subgraph(
        {"x": ("object", [1])},
        [("SKIP_GRAM", ["x"], ["y"], ("SkipGramOptions", options))],
        ["y"],
        y={"type": TYPES.index("object")},
    )
    x = np.array(["The quick\t brown fox jumps!"], object)
    (want,) = by_litert(model([graph]), {"x": x})
    got = ps.compile(model([graph])).run({"x": x})["y"]
    assert got.tolist() == [text.decode() for text in want.tolist()]


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [("RANDOM_UNIFORM", 0.5, 12**-0.5), ("RANDOM_STANDARD_NORMAL", 0, 1)],
)
def test_random_numbers_have_their_distribution(name: str, mean: float, deviation: float) -> None:
    options = ("RandomOptions", {"seed": 3, "seed2": 5})
    file = model([subgraph({"s": ("int32", [2])}, [(name, ["s"], ["y"], options)], ["y"])])
    session = ps.compile(file)
    shape = i32(100, 200)
    y = session(shape)
    assert (y.dtype, y.shape) == (np.float32, (100, 200))
    np.testing.assert_allclose([y.mean(), y.std()], [mean, deviation], atol=0.03)
    assert np.any(session(shape) != y)
    np.testing.assert_array_equal(ps.compile(file)(shape), y)


def test_draws_of_multinomial_have_their_probabilities() -> None:
    x = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-9]], np.float32))
    options = ("RandomOptions", {"seed": 3})
    graph = subgraph(
        {"x": ("float32", x.shape)},
        [("MULTINOMIAL", ["x", "n"], ["y"], options)],
        ["y"],
        {"n": scalar(20_000)},
        y={"type": TYPES.index("int64")},
    )
    y = ps.compile(model([graph]))(x)
    assert (y.dtype, y.shape) == (np.int64, (2, 20_000))
    shares = [np.bincount(row, minlength=3) / row.size for row in y]
    np.testing.assert_allclose(shares, np.exp(x), atol=0.02)


def test_lstm_of_the_basic_kind_gives_what_litert_gives() -> None:
    """Its states are inputs and outputs."""
    feeds = {"x": f(2, 3), "h": f(2, 4), "c": f(2, 4)}
    options = ("LSTMOptions", {"kernel_type": 1, "fused_activation_function": 4})
    graph = subgraph(
        {key: ("float32", value.shape) for key, value in feeds.items()},
        [("LSTM", ["x", "h", "w", "b", "c"], ["y", "n", "j", "g"], options)],
        ["y", "n"],
        {"w": f(16, 7), "b": f(16)},
    )
    file = model([graph], versions={"LSTM": 2})
    got = ps.compile(file).run(feeds)
    for value, want in zip(got.values(), by_litert(file, feeds), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
