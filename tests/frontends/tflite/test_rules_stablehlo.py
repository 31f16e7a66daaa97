"""Operators of StableHLO, tables, words and random numbers, beside LiteRT or by what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.support.litert import Op, by_litert, f, i32, scalar
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


def test_region_of_several_operators_is_refused() -> None:
    both = [("ABS", ["a"], ["n"], None), ("STABLEHLO_ADD", ["n", "b"], ["c"], None)]
    options = {"window_dimensions": [2], "body_subgraph_index": 1}
    operators = [
        ("STABLEHLO_REDUCE_WINDOW", ["x", "i"], ["y"], ("StablehloReduceWindowOptions", options))
    ]
    main = subgraph(X, operators, ["y"], {"i": scalar(0, np.float32)})
    with pytest.raises(ps.Unsupported, match="its subgraph is no single addition"):
        ps.load(model([main, subgraph(PAIR, both, ["c"])]))


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
