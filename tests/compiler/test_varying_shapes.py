"""Shapes that grow from run to run share a plan with open dims."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.compiler.varying_shapes import CHANGED, GROWN, OFTEN, VaryingShapes
from tests.support.onnx_text import compile_text, model_from_text

EXECUTORS = ["linear", "dataflow", "parallel", "streams", "frames", "interpret", "auto"]
# One step of attention over a cache that grows.
DECODER = """g (float[b, 1, 8] x, float[b, p, 8] past) => (float[b, 1, 8] y, float[b, t, 8] present)
    <float scale = {0.5}> {
    present = Concat <axis = 1> (past, x)
    keys = Transpose <perm = [0, 2, 1]> (present)
    scores = MatMul (x, keys)
    scaled = Mul (scores, scale)
    parts = Softmax <axis = -1> (scaled)
    y = MatMul (parts, present)
}"""


def step(x: np.ndarray, past: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    present = np.concatenate([past, x], 1)
    scores = np.exp(x @ present.transpose(0, 2, 1) * np.float32(0.5))
    return scores / scores.sum(-1, keepdims=True) @ present, present


@pytest.mark.parametrize("executor", EXECUTORS)
def test_decoder_whose_cache_grows_equals_numpy_at_each_length(executor):
    session = compile_text(DECODER, executor=executor)
    rng = np.random.default_rng(2)
    for batch in (1, 2):
        past = np.zeros((batch, 0, 8), np.float32)
        for _ in range(20):
            x = rng.standard_normal((batch, 1, 8)).astype(np.float32)
            y, present = step(x, past)
            outputs = session.run({"x": x, "past": past})
            np.testing.assert_allclose(outputs["y"], y, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(outputs["present"], present)
            past = outputs["present"]


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "auto"])
def test_decoder_whose_cache_grows_compiles_few_plans(executor):
    session = compile_text(DECODER, executor=executor)
    x = np.ones((1, 1, 8), np.float32)
    for length in range(50):
        session.run({"x": x, "past": np.ones((1, length, 8), np.float32)})
    assert session.memory.count == GROWN + 1


def test_shapes_that_come_often_have_a_plan_of_their_own():
    session = compile_text(DECODER, executor="linear")
    x = np.ones((1, 1, 8), np.float32)
    for length in [*range(GROWN + 1), *[9] * OFTEN]:
        session.run({"x": x, "past": np.ones((1, length, 8), np.float32)})
    assert session.memory.count == GROWN + 1
    for _ in range(2):
        session.run({"x": x, "past": np.ones((1, 9, 8), np.float32)})
    assert session.memory.count == GROWN + 2


def test_observers_are_told_of_the_steps_of_a_plan_with_open_dims():
    session = compile_text(DECODER, executor="linear")
    x, profile = np.ones((1, 1, 8), np.float32), ps.Profile()
    for length in range(GROWN + 5):
        session.run({"x": x, "past": np.ones((1, length, 8), np.float32)}, observers=[profile])
    joins = [entry for entry in profile if entry.step.node.op.name in ("Append", "Concat")]
    assert sum(entry.count for entry in joins) == GROWN + 5
    assert session.memory.count == 2 * (GROWN + 1)


def test_feeds_that_do_not_fit_a_plan_with_open_dims_are_refused():
    session = compile_text(DECODER, executor="linear")
    x = np.ones((1, 1, 8), np.float32)
    for length in range(GROWN + 1):
        session.run({"x": x, "past": np.ones((1, length, 8), np.float32)})
    with pytest.raises(ps.InvalidInput, match="past"):
        session.run({"x": x, "past": np.ones((2, 7, 8), np.float32)})


def test_saved_session_has_plans_of_exact_shapes_only(tmp_path):
    session = compile_text(DECODER, executor="linear")
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, 1, 8)).astype(np.float32)
    pasts = [rng.standard_normal((1, n, 8)).astype(np.float32) for n in range(GROWN + 3)]
    for past in pasts:
        session.run({"x": x, "past": past})
    session.save(tmp_path / "decoder.penstock")
    opened = ps.open(tmp_path / "decoder.penstock")
    # The last one ran with an open dim, and has a plan of its own in the session opened:
    # their kernels may round differently.
    for past in (pasts[0], pasts[-1]):
        y = opened.run({"x": x, "past": past})["y"]
        np.testing.assert_allclose(y, step(x, past)[0], rtol=1e-5, atol=1e-6)
    assert opened.memory.count == 2


def test_open_dims_are_those_that_grow_by_the_same_step():
    varying = VaryingShapes(())
    prompts = [((1, n), (1, 0)) for n in (5, 8, 6)]
    steps = [((1, 1), (1, n)) for n in (5, 6, 7)]
    assert [varying.open(shapes, 0) for shapes in [*prompts, *steps]] == [None] * 6
    opened = varying.open(((1, 1), (1, 8)), 0)
    assert opened is not None and opened.shapes == ((1, 1), (1, None))
    assert varying.open(((1, 9), (1, 0)), 0) is None
    assert varying.open(((1, 1), (1, 30)), 0) is opened
    assert varying.open(((2, 1), (2, 9)), 0) is None


def test_sequences_that_grow_in_turns_share_a_plan():
    varying = VaryingShapes(())
    lengths = [n for step in range(GROWN) for n in (5 + step, 40 + step, 90 + step)]
    assert [varying.open(((1, 1), (1, n)), 0) for n in lengths] == [None] * len(lengths)
    opened = varying.open(((1, 1), (1, 5 + GROWN)), 0)
    assert opened is not None
    assert [varying.open(((1, 1), (1, n)), 0) for n in (41 + GROWN, 91 + GROWN)] == [opened] * 2


def test_dims_that_differ_when_the_same_ones_grow_again_are_opened_too():
    varying = VaryingShapes(())
    for length in range(GROWN + 1):
        first = varying.open(((1, 1), (1, length), (20, 4)), 0)
    assert first is not None and first.shapes == ((1, 1), (1, None), (20, 4))
    assert varying.open(((1, 1), (1, 0), (31, 4)), 0) is None
    second = varying.open(((1, 1), (1, 1), (31, 4)), 0)
    assert second is not None and second.shapes == ((1, 1), (1, None), (None, 4))
    assert varying.open(((1, 1), (1, 0), (77, 4)), 0) is second


@pytest.mark.parametrize("sizes", [(3, 1, 4, 2, 8), (1, 2, 4, 8, 16), (9, 8, 7, 6, 5)])
def test_shapes_that_do_not_grow_alike_have_plans_of_their_own(sizes):
    varying = VaryingShapes(())
    assert [varying.open(((1, 1), (n, 4)), 0) for n in sizes] == [None] * len(sizes)


def test_inputs_that_all_grow_have_plans_of_their_own():
    varying = VaryingShapes(())
    assert [varying.open(((n, 4), (), (2 * n, 4)), 0) for n in range(1, CHANGED)] == [None] * (
        CHANGED - 1
    )


def test_dims_of_shapes_that_keep_changing_are_open_after_many_plans():
    varying = VaryingShapes(())
    widths = [7 * n * n % 101 for n in range(1, CHANGED)]
    assert [varying.open(((1, 3, n), (2, 2)), 0) for n in widths] == [None] * (CHANGED - 1)
    opened = varying.open(((1, 3, 200), (2, 2)), CHANGED - 1)
    assert opened is not None and opened.shapes == ((1, 3, None), (2, 2))
    assert not opened.expects
    assert varying.open(((1, 3, 201), (2, 2)), CHANGED) is opened


def test_shapes_that_mostly_come_again_have_plans_of_their_own():
    varying = VaryingShapes(())
    widths = [7 * n * n % 101 for n in range(1, 30)]
    assert [varying.open(((n, 3),), 2 * i) for i, n in enumerate(widths)] == [None] * 29


RECOGNIZER = """g (float[1, 2, 8, w] x) => (float[1, w2, 3] y) {
    f = Constant<value = float[3, 2, 3, 3] {F}> ()
    c = Conv <pads = [1, 1, 1, 1], strides = [1, 2]> (x, f)
    r = Relu (c)
    p = GlobalAveragePool (r)
    g = Sigmoid (p)
    s = Mul (r, g)
    axes = Constant<value_ints = [2]> ()
    m = ReduceMean <keepdims = 0> (s, axes)
    y = Transpose <perm = [0, 2, 1]> (m)
}""".replace("{F}", "{" + ", ".join(str(n % 7 - 3) for n in range(54)) + "}")


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "auto"])
def test_convolutions_over_ever_new_widths_share_a_plan(executor):
    session = compile_text(RECOGNIZER, executor=executor)
    plain = compile_text(RECOGNIZER, executor="interpret", backends=["numpy"])
    rng = np.random.default_rng(5)
    for width in rng.permutation(60)[: 2 * CHANGED] + 4:
        x = rng.standard_normal((1, 2, 8, width)).astype(np.float32)
        expected = plain.run({"x": x})["y"]
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
    assert session.memory.count == CHANGED


def test_runs_of_the_plan_used_last_count_against_a_plan_with_open_dims():
    session = compile_text(RECOGNIZER, executor="linear")
    for width in range(4, 4 + 4 * CHANGED, 2):  # grow, but no other input stays as it was
        for _ in range(3):
            session.run({"x": np.ones((1, 2, 8, width), np.float32)})
    assert session.memory.count == 2 * CHANGED
    assert session.stats.plans_found == 4 * CHANGED


def test_shapes_of_other_ranks_share_no_plan():
    varying = VaryingShapes(())
    shapes = [((1,) * rank, None) for rank in range(8)]
    assert [varying.open(each, 0) for each in shapes] == [None] * 8


# The row of a step, cut out of those of twelve positions: how many there are is open to inference.
CUT = """g (float[b, 1, 8] x, float[b, p, 8] past) => (float[b, u, 8] y)
    <float[12, 8] rows, int64[1] one = {1}, int64[1] first = {0}> {
    whole = Concat <axis = 1> (past, x)
    end = Shape <start = 1, end = 2> (whole)
    begin = Sub (end, one)
    row = Slice (rows, begin, end, first)
    y = Add (x, row)
}"""


def cut_session(executor):
    rows = np.arange(96, dtype=np.float32).reshape(12, 8)
    model = model_from_text(CUT)
    model.graph.initializer.append(numpy_helper.from_array(rows, "rows"))
    return ps.compile(model, executor=executor), rows


def cut_run(session, rows, length):
    x = np.ones((1, 1, 8), np.float32)
    y = session.run({"x": x, "past": np.ones((1, length, 8), np.float32)})["y"]
    np.testing.assert_array_equal(y, x + rows[length : length + 1])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_dims_that_are_not_as_expected_are_computed_as_they_are(executor):
    session, rows = cut_session(executor)
    for length in [*range(20), 3, 14, 5]:
        cut_run(session, rows, length)


def test_dims_are_expected_until_a_run_has_others():
    session, rows = cut_session("linear")
    for expected, lengths in ((1, range(12)), (0, (12, 30, 2, *range(13, 25)))):
        for length in lengths:
            cut_run(session, rows, length)
        names = [step.node.op.name for step in session.inspect.plan.walk()]
        assert names.count("Expected") == expected
    assert session.memory.count <= GROWN + 3


# A decoder that reads what an encoder has written, of a length that is open to inference as well.
READER = """g (float[b, 1, 8] x, float[b, p, 8] past, float[b, e, 8] read) => (float[b, u, 8] y)
    <int64[1] one = {1}, int64[1] first = {0}> {
    whole = Concat <axis = 1> (past, x)
    sum = ReduceSum (whole, one)
    length = Shape <start = 1, end = 2> (read)
    part = Slice (read, first, length, one)
    y = Add (part, sum)
}"""


def test_lengths_that_do_not_grow_are_not_expected():
    session = compile_text(READER, executor="linear")
    x = np.ones((1, 1, 8), np.float32)
    for length in (20, 23, 26, 30):
        for past in range(GROWN + 2):
            feeds = {"x": x, "past": np.ones((1, past, 8), np.float32)}
            feeds["read"] = np.full((1, length, 8), 2, np.float32)
            np.testing.assert_array_equal(session.run(feeds)["y"], feeds["read"] + (past + 1))
    assert session.memory.count == GROWN + 1 + 2


@pytest.mark.parametrize("middle", [(), (3, 1), (5,)])
def test_feeds_that_are_refused_open_no_dims(middle):
    session = compile_text("g (float[N, 3, W] x) => (float[N, 3, W] y) { y = Exp(x) }")
    for i in range(2 * CHANGED):
        x = np.zeros((i + 1, 3, 7 * i * i % 101), np.float32)
        assert session.run({"x": x})["y"].shape == x.shape
        with pytest.raises(ps.InvalidInput, match="'x'"):
            session.run({"x": np.zeros((i + 1, *middle, 4), np.float32)})
