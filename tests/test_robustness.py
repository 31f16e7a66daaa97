"""Whatever a file says, it loads and runs within limits, or a ``PenstockError`` says why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import parser

import penstock as ps
from penstock.cli import main
from penstock.compiler.options import EXECUTORS
from penstock.core.limits import machine_bytes
from tests.ops.harness import node_model
from tests.support.mutants import feed, models, mutant
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.sweeps import sweep

TIGHT = ps.Limits(max_bytes=2**24, max_constant_bytes=2**24, max_iterations=1000, max_nodes=10_000)
F32 = np.float32


def outcome(
    source: bytes | onnx.ModelProto,
    limits: ps.Limits = TIGHT,
    inputs: Sequence[Any] | None = None,
    seed: int = 0,
) -> str:
    """``ran``, or the name of the ``PenstockError``; any other error, and our own bugs, pass on."""
    rng = np.random.default_rng(seed)
    try:
        session = ps.compile(source, limits=limits)
        values = [feed(port.type, rng) for port in session.inputs] if inputs is None else inputs
        names = [port.name for port in session.inputs]
        session.run(dict(zip(names, values, strict=True)), timeout=1)
    except ps.InternalError:
        raise
    except ps.PenstockError as error:
        assert str(error)
        return type(error).__name__
    return "ran"


# Damaged files


@pytest.mark.parametrize("name", models())
def test_models_that_mutants_derive_from_run(name):
    assert outcome(models()[name]) == "ran"


@pytest.mark.parametrize("name", models())
def test_truncated_files_run_or_are_refused(name):
    data = models()[name]
    outcomes = {outcome(data[:size]) for size in range(len(data))}
    assert outcomes <= {"ran", "InvalidModel", "Unsupported"}


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("part", sweep(range(12), 1))
def test_mutated_models_run_or_are_refused(name, part):
    for i in range(100):
        seed = f"{name} {part} {i}"
        try:
            outcome(mutant(models()[name], seed), seed=i)
        except Exception as error:
            raise AssertionError(f"mutant(models()[{name!r}], {seed!r})") from error


# Bombs


def bomb(text: str) -> onnx.ModelProto:
    return model_from_text(text)


HUGE = 2**40
BOMBS = {
    "constant": "g () => (float[N] y) <int64[1] s = {%d}> { y = ConstantOfShape(s) }",
    "inside": """g (float[1] x) => (float y) <int64[1] s = {%d}>
        { c = ConstantOfShape(s) a = Add(x, c) y = ReduceSum<keepdims=0>(a) }""",
    "reduced": """g () => (float y) <int64[1] s = {%d}>
        { c = ConstantOfShape(s) y = ReduceSum<keepdims=0>(c) }""",
    "expand": "g (float[1] x) => (float[N] y) <int64[1] s = {%d}> { y = Expand(x, s) }",
    "tile": """g (float[1] x) => (float y) <int64[1] s = {%d}>
        { t = Tile(x, s) y = ReduceSum<keepdims=0>(t) }""",
    "pad": """g (float[1] x) => (float y) <int64[2] s = {%d, 0}>
        { t = Pad(x, s) y = ReduceSum<keepdims=0>(t) }""",
    "range": """g (float[1] x) => (int64 y) <int64 a = {0}, int64 s = {%d}, int64 d = {1}>
        { r = Range(a, s, d) y = ReduceSum<keepdims=0>(r) }""",
    "one-hot": """g (int64[1] x) => (float[A, B] y) <int64[1] s = {%d}, float[2] v = {0, 1}>
        { y = OneHot(x, s, v) }""",
    "input": "g (float[%d, 1024] x) => (float[A, B] y) { y = Relu(x) }",
    "weights": """g (float[1, 2, 8, 8] x) => (float[A, B, C, D] y) <int64[4] s = {%d, 2, 3, 3}>
        { w = ConstantOfShape(s) y = Conv(x, w) }""",
    "branch": """g (float[1] x, bool c) => (float[N] y) <int64[1] s = {%d}>
        { y = If(c) <then_branch = t () => (float[A] a) { a = Expand(x, s) },
                     else_branch = e () => (float[B] b) { b = Relu(x) }> }""",
}


@pytest.mark.parametrize("limits", [None, TIGHT], ids=["by default", "tight"])
@pytest.mark.parametrize("name", BOMBS)
def test_tensors_beyond_the_limit_are_refused_before_the_run(name, limits):
    session = ps.compile(bomb(BOMBS[name] % HUGE), limits=limits)
    shapes = {
        p.name: [d if isinstance(d, int) else 1 for d in p.type.shape] for p in session.inputs
    }
    with pytest.raises(ps.LimitExceeded, match=r"takes \d+ bytes, more than Limits\.max_bytes"):
        ps.compile(session.model, shapes=shapes, limits=limits)


@pytest.mark.parametrize("executor", sorted(EXECUTORS))
@pytest.mark.parametrize(
    "node", ['Tokenizer<mincharnum = 1, mark = 0, tokenexp = "a">(x)', "UnfoldTensor<dim = 0>(n)"]
)
def test_missing_attribute_of_a_domain_without_schemas_is_refused(node, executor):
    text = f"g (string[2] x, float[4] n) => (y) {{ y = com.microsoft.{node} }}"
    model = model_from_text(text, domains={"com.microsoft": 1})
    feeds = {"x": np.array(["a", "b"], object), "n": np.ones(4, F32)}
    with pytest.raises((ps.InvalidModel, ps.RunError)):
        ps.compile(model, executor=executor).run(feeds)


def test_empty_tensors_of_large_dims_are_refused():
    text = """g (float[1, 0, 2] x) => (float[A, B, C] y) {
        s = Constant<value_ints = [1, 0, 2147483648]>() y = Resize(x, , , s) }"""
    with pytest.raises(ps.LimitExceeded, match="max_bytes"):
        session = ps.compile(model_from_text(text), limits=ps.Limits(max_bytes=2**26))
        session.run({"x": np.zeros((1, 0, 2), np.float32)})


def test_resize_to_an_empty_result_makes_no_tables(most_bytes):
    text = """g (float[1, 0, 2] x) => (float[A, B, C] y) {
        s = Constant<value_ints = [1, 0, 67108864]>() y = Resize(x, , , s) }"""

    def job():
        session = ps.compile(model_from_text(text), timeout=60)
        assert session.run({"x": np.zeros((1, 0, 2), np.float32)})["y"].shape == (1, 0, 2**26)

    assert most_bytes(job) < 2**26


@pytest.mark.parametrize("name", BOMBS)
def test_sizes_that_overflow_are_refused(name):
    assert outcome(bomb(BOMBS[name] % (2**62)), ps.Limits(max_bytes=None)) in {
        "InvalidInput",
        "InvalidModel",
        "LimitExceeded",
    }


def test_arenas_beyond_the_limit_are_refused():
    chain = bomb("""g (float[1024, 1024] x) => (float y)
        { a = Sin(x) b = Cos(x) c = Exp(x) d = MatMul(a, b) e = MatMul(d, c)
          y = ReduceSum<keepdims=0>(e) }""")
    x = np.ones((1024, 1024), F32)
    with pytest.raises(ps.LimitExceeded, match="needs an arena of"):
        ps.compile(chain, limits=ps.Limits(max_bytes=5 * 2**20)).run({"x": x})
    ps.compile(chain, limits=ps.Limits(max_bytes=2**24)).run({"x": x})


def test_sizes_that_depend_on_data_are_limited_in_the_run():
    session = ps.compile(bomb("g (float[1] x, int64[1] n) => (float[N] y) { y = Tile(x, n) }"))
    with pytest.raises(ps.RunError, match=r"Tile \(Tile_0 in the model\)"):
        session.run({"x": np.ones(1, F32), "n": np.array([2**60])})
    assert session.run({"x": np.ones(1, F32), "n": np.array([2])})["y"].tolist() == [1, 1]


def test_default_limit_of_bytes_is_the_available_memory(tmp_path, monkeypatch):
    found = machine_bytes()
    assert found is None or 2**26 < found < 2**50
    assert ps.Limits().max_bytes == found
    group = tmp_path / "memory.max"
    monkeypatch.setattr("penstock.core.limits._CGROUPS", (str(group), str(tmp_path / "nothing")))
    group.write_text("123456789\n")
    assert machine_bytes() == 123456789
    group.write_text("max\n")
    assert machine_bytes() == (None if found is None else max(machine_bytes() or 0, found))


# Deep and endless


def nested(depth: int, kind: str) -> onnx.ModelProto:
    """Functions that call one another out of a branch or a loop: files nest graphs no deeper."""
    body = {
        "If": """y = If(c) <then_branch = t () => (a) { a = %s(x, c, n) },
                            else_branch = e () => (b) { b = Neg(x) }>""",
        "Loop": """y = Loop(n, c, x) <body = b (i, t, v) => (u, w) {
                                          u = Identity(t) w = %s(v, c, n) }>""",
    }[kind]
    head = '<domain: "own", opset_import: ["" : 21, "own" : 1]>'
    functions = []
    for i in range(depth):
        text = body % (f"own.f{i - 1}" if i else "")
        text = text.replace(" (x, c, n)", " Relu(x)").replace(" (v, c, n)", " Relu(v)")
        functions.append(parser.parse_function(f"{head} f{i} (x, c, n) => (y) {{ {text} }}"))
    proto = model_from_text(
        f"g (float[2] x, bool c, int64 n) => (float[A] y) {{ y = own.f{depth - 1}(x, c, n) }}",
        opset=21,
        domains={"own": 1},
    )
    proto.functions.extend(functions)
    return proto


@pytest.mark.parametrize(
    "kind, depth, max_depth, wanted",
    [
        ("If", 31, 64, "ran"),
        ("If", 64, 64, "InvalidModel"),
        ("If", 64, 1000, "ran"),
        ("If", 100, 1000, "ran"),
        ("If", 1000, 10_000, "LimitExceeded"),
        ("Loop", 18, 64, "ran"),
        ("Loop", 19, 64, "ran"),
        ("Loop", 64, 64, "InvalidModel"),
        ("Loop", 1000, 10_000, "LimitExceeded"),
    ],
)
def test_nesting_is_limited_by_max_depth(kind, depth, max_depth, wanted):
    assert outcome(nested(depth, kind), ps.Limits(max_depth=max_depth)) == wanted


ENDLESS = """g (float[2] x) => (float[2] y) {
    y = Loop( , , x) <body = b (int64 i, bool c, float[2] v) => (bool u, float[2] w) {
        u = Constant<value: tensor = bool {1}>() w = Loop( , u, v) <body = d
            (int64 j, bool e, float[2] p) => (bool f, float[2] q) {
                f = Identity(e) q = Add(p, x) }> }> }"""


def test_endless_loops_end_at_limits():
    session = ps.compile(bomb(ENDLESS))
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"x": np.ones(2, F32)}, timeout=0.1)
    with pytest.raises(ps.LimitExceeded, match="1000 iterations"):
        ps.compile(bomb(ENDLESS), limits=TIGHT).run({"x": np.ones(2, F32)})


# Attributes that make no sense


IMAGE, FILTER = np.ones((1, 2, 5, 5), F32), np.ones((2, 2, 3, 3), F32)
MATRIX, INTS = np.ones((3, 4), F32), np.array([1, 0])
BAD = (0, -1, 2**31 - 1, 2**62, 2**63 - 1, -(2**63))
SENSELESS = {
    "Conv": (
        [IMAGE, FILTER],
        {"strides": 2, "dilations": 2, "pads": 4, "kernel_shape": 2, "group": 0},
    ),
    "ConvTranspose": (
        [IMAGE, FILTER],
        {
            "strides": 2,
            "dilations": 2,
            "pads": 4,
            "output_padding": 2,
            "output_shape": 2,
            "group": 0,
        },
    ),
    "MaxPool": ([IMAGE], {"kernel_shape": 2, "strides": 2, "dilations": 2, "pads": 4}),
    "AveragePool": ([IMAGE], {"kernel_shape": 2, "strides": 2, "dilations": 2, "pads": 4}),
    "LpPool": ([IMAGE], {"p": 0, "kernel_shape": 2}),
    "LRN": ([IMAGE], {"size": 0}),
    "Col2Im": (
        [np.ones((1, 4, 4), F32), np.array([3, 3]), np.array([2, 2])],
        {"strides": 2, "pads": 4},
    ),
    "DepthToSpace": ([IMAGE], {"blocksize": 0}),
    "SpaceToDepth": ([IMAGE], {"blocksize": 0}),
    "MaxRoiPool": ([IMAGE, np.zeros((1, 5), F32)], {"pooled_shape": 2}),
    "RoiAlign": (
        [IMAGE, np.ones((1, 4), F32), np.array([0])],
        {"output_height": 0, "output_width": 0, "sampling_ratio": 0},
    ),
    "Softmax": ([MATRIX], {"axis": 0}),
    "Gather": ([MATRIX, INTS], {"axis": 0}),
    "GatherND": ([MATRIX, INTS], {"batch_dims": 0}),
    "ScatterElements": ([MATRIX, np.zeros((1, 1), int), np.ones((1, 1), F32)], {"axis": 0}),
    "Concat": ([MATRIX, MATRIX], {"axis": 0}),
    "Flatten": ([MATRIX], {"axis": 0}),
    "Transpose": ([MATRIX], {"perm": 2}),
    "ArgMax": ([MATRIX], {"axis": 0}),
    "TopK": ([MATRIX, np.array([1])], {"axis": 0}),
    "OneHot": ([INTS, np.array(3), np.array([0, 1])], {"axis": 0}),
    "Split": ([MATRIX], {"axis": 0, "num_outputs": 0}),
    "Unique": ([MATRIX], {"axis": 0}),
    "ReverseSequence": ([MATRIX, np.array([1, 1, 1, 1])], {"batch_axis": 0, "time_axis": 0}),
    "EyeLike": ([MATRIX], {"k": 0, "dtype": 0}),
    "Cast": ([MATRIX], {"to": 0}),
    "Shape": ([MATRIX], {"start": 0, "end": 0}),
    "LayerNormalization": ([MATRIX, np.ones(4, F32)], {"axis": 0}),
    "GroupNormalization": ([IMAGE, np.ones(2, F32), np.ones(2, F32)], {"num_groups": 0}),
    "LSTM": (
        [np.ones((2, 1, 3), F32), np.ones((1, 8, 3), F32), np.ones((1, 8, 2), F32)],
        {"hidden_size": 0},
    ),
    "RandomNormal": ([], {"shape": 2, "dtype": 0}),
    "Multinomial": ([MATRIX], {"sample_size": 0}),
    "QuantizeLinear": ([MATRIX, np.array(1, F32)], {"axis": 0, "block_size": 0, "output_dtype": 0}),
    "StringSplit": ([np.array(["a b"], object)], {"maxsplit": 0}),
    "TfIdfVectorizer": (
        [np.array([1, 2, 3])],
        {"max_gram_length": 0, "min_gram_length": 0, "max_skip_count": 0, "ngram_indexes": 1},
    ),
}
REQUIRED = {
    "MaxPool": {"kernel_shape": [2, 2]},
    "AveragePool": {"kernel_shape": [2, 2]},
    "LpPool": {"kernel_shape": [2, 2]},
    "MaxRoiPool": {"pooled_shape": [2, 2]},
    "LRN": {"size": 3},
    "DepthToSpace": {"blocksize": 1},
    "SpaceToDepth": {"blocksize": 1},
    "Concat": {"axis": 0},
    "Cast": {"to": 1},
    "GroupNormalization": {"num_groups": 1},
    "RandomNormal": {"shape": [2]},
    "Split": {"num_outputs": 1},
    "LSTM": {"hidden_size": 2},
    "TfIdfVectorizer": {
        "mode": "TF",
        "ngram_counts": [0, 1],
        "ngram_indexes": [0, 1],
        "pool_int64s": [1, 2, 3],
        "max_gram_length": 2,
        "min_gram_length": 1,
        "max_skip_count": 1,
    },
}


@pytest.mark.parametrize("op", SENSELESS)
def test_nonsensical_attributes_run_or_are_refused(op):
    """``SENSELESS`` has attributes with the length of their lists, 0 for a single number."""
    inputs, attributes = SENSELESS[op]
    usual = REQUIRED.get(op, {})
    outputs = 2 if op in ("TopK", "StringSplit") else 1
    assert outcome(node_model(op, inputs, usual, outputs=outputs), inputs=inputs) == "ran"
    for name, length in attributes.items():
        for bad in BAD:
            values = [[bad] * length, [1] * (length - 1) + [bad], [bad]] if length else [bad]
            for value in values:
                model = node_model(op, inputs, {**usual, name: value}, outputs=outputs)
                assert outcome(model, inputs=inputs) != "Unsupported", (name, value)


# Strings are no numbers


NUMERIC = {
    "Add": 2,
    "MatMul": 2,
    "Conv": 2,
    "MaxPool": 1,
    "AveragePool": 1,
    "GlobalAveragePool": 1,
    "ReduceSum": 1,
    "Softmax": 1,
    "Attention": 3,
    "LayerNormalization": 2,
    "CumSum": 2,
    "Einsum": 2,
}


@pytest.mark.parametrize("op", NUMERIC)
def test_strings_never_reach_a_numeric_kernel(op):
    """Their memory would be taken for numbers, or numbers for them."""
    inputs = [np.full((1, 1, 4, 4), "a", object)] * NUMERIC[op]
    attrs = {"MaxPool": {"kernel_shape": [2, 2]}, "AveragePool": {"kernel_shape": [2, 2]}}.get(
        op, {}
    )
    attrs = {"equation": "abcd,abce->de"} if op == "Einsum" else attrs
    assert outcome(node_model(op, inputs, attrs)) in {"InvalidModel", "InvalidInput"}


def test_branches_of_different_types_are_refused():
    with pytest.raises(ps.InvalidModel, match="must be of one type"):
        ps.compile(
            bomb("""g (float[2, 2] x, string[2, 2] s, bool c) => (float[A, B] y) {
            v = If(c) <then_branch = t () => (float[A, B] a) { a = Identity(x) },
                       else_branch = e () => (string[A, B] b) { b = Identity(s) }>
            y = MatMul(v, v) }""")
        )


# The command line


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--json"])


@pytest.mark.parametrize("name", models())
def test_commands_report_no_internal_error_on_damaged_files(name, tmp_path):
    for i in range(5):
        path = tmp_path / f"{i}.onnx"
        path.write_bytes(mutant(models()[name], f"{name} cli {i}"))
        for command in ("check", "info", "plan"):
            result = call(command, str(path))
            assert result.exception is None or isinstance(result.exception, SystemExit), i
            assert json.loads(result.stdout)
            assert "InternalError" not in result.stdout


@pytest.mark.parametrize(
    "text, arguments, error",
    [
        (ENDLESS, ["run", "MODEL", "--input", "x=zeros", "--timeout", "0.1"], "DeadlineExceeded"),
        (BOMBS["expand"] % HUGE, ["run", "MODEL", "--input", "x=zeros"], "LimitExceeded"),
        (BOMBS["expand"] % HUGE, ["info", "MODEL", "--plan"], "LimitExceeded"),
        (BOMBS["input"] % HUGE, ["info", "MODEL", "--plan"], "LimitExceeded"),
        (BOMBS["input"] % HUGE, ["run", "MODEL", "--input", "x=random"], "InvalidInput"),
        (BOMBS["input"] % 2**60, ["check", "MODEL"], None),
        (ENDLESS, ["run", "MODEL", "--input", f"x=zeros:{2**62}x16"], "InvalidInput"),
    ],
)
def test_commands_exit_with_1_on_models_that_exhaust_memory(
    text: str, arguments: list[str], error: str | None, tmp_path: Path
):
    path = tmp_path / "bomb.onnx"
    onnx.save(bomb(text), path)
    result = call(*[str(path) if argument == "MODEL" else argument for argument in arguments])
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    assert not printed["ok"]
    assert error is None or printed["error"]["type"] == error


# The dims of the padded image are known from the model, from the feeds, or only during the run.
IMAGES = {
    "model": ("1,1,4,4", "c = Identity(x)"),
    "feeds": ("1,1,N,4", "c = Identity(x)"),
    "run": (
        "1,1,4,4",
        "n = NonZero(x) s = Shape(n) o = Constant<value = int64[1] {1}>() t = Constant<value = int64[1] {2}>() l = Slice(s, o, t) "
        "q = Concat<axis = 0>(o, o, l, o) r = ConstantOfShape(q) c = Cast<to = 1>(r)",
    ),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("pad", [2**40, 2**62])
def test_window_that_slides_over_more_than_memory_is_refused(
    executor: str, image: str, pad: int
) -> None:
    dims, nodes = IMAGES[image]
    text = f"""g (float[{dims}] x) => (float[A, B, C, D] y) <float[1, 1, 1, 1] w = {{1}}> {{
        {nodes} y = Conv<pads = [0, 0, {pad}, 0]>(c, w) }}"""
    limits = ps.Limits(max_bytes=2**26)
    with pytest.raises(ps.PenstockError, match=r"max_bytes|memory|elements"):
        session = compile_text(text, executor=executor, backends=["numpy"], limits=limits)
        session.run({"x": np.ones((1, 1, 4, 4), np.float32)})
