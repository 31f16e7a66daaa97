"""Models whose steps cannot be joined."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import penstock as ps
from tests.support.decoders import DEFAULTS, PLAIN
from tests.support.onnx_text import model_from_text
from tests.support.weight_cases import cases

RNG = np.random.default_rng(1)


def test_model_without_caches_is_refused() -> None:
    model = model_from_text("g (float[b, 4] x) => (float[b, 4] y) { y = Neg (x) }")
    with pytest.raises(ps.InvalidInput, match="no state that is fed back"):
        ps.Stepper(ps.load(model))


@pytest.mark.parametrize("parts", [[5, 1, 1, 1, 1, 1, 2], [12], [4, 8], [7, 5]])
def test_text_that_turns_long_is_computed_anew(tmp_path: Path, parts: list[int]) -> None:
    """The model turns all positions slower in texts of more than 8."""
    case = cases()["phi3_long"]
    ids = case.inputs["input_ids"][:1]
    with ps.Stepper(ps.load(case.write(tmp_path)), max_rows=6) as stepper:
        sequence, at = stepper.sequence(), 0
        for rows in parts:
            at += rows
            outputs = sequence.step({"input_ids": ids[:, at - rows : at]}, wanted=1)
        np.testing.assert_allclose(outputs["logits"][0, 0], case.expected[0, -1], atol=1e-4)


def test_fork_of_a_sequence_whose_caches_were_taken_away(tmp_path: Path) -> None:
    case = cases()["phi3_long"]
    ids = case.inputs["input_ids"]
    model = ps.load(case.write(tmp_path))
    with ps.Stepper(model) as stepper:
        sequence = stepper.sequence()
        sequence.step({"input_ids": ids[:1, :4]})
        nbytes = sum(array.nbytes for array in sequence._state.arrays.values())
        want = sequence.step({"input_ids": ids[:1, 4:5]})["logits"]
    with ps.Stepper(model, cache_bytes=2 * nbytes) as stepper:
        one, other = stepper.sequence(), stepper.sequence()
        for sequence in (one, other):
            sequence.step({"input_ids": ids[:1, :4]})
        other.step({"input_ids": ids[:1, 4:5]})
        assert stepper.stats.preempted
        fork = one.fork()
        got = fork.step({"input_ids": ids[:1, 4:5]})["logits"]
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_rows_of_a_draft_are_those_of_texts_of_their_length(tmp_path: Path) -> None:
    case = cases()["phi3_long"]
    ids = case.inputs["input_ids"][:1]
    with ps.Stepper(ps.load(case.write(tmp_path))) as stepper:
        one, other = stepper.sequence(), stepper.sequence()
        for row in range(12):
            (alone,) = one.step({"input_ids": ids[:, row : row + 1]})["logits"][0]
            if row == 5:
                other.step({"input_ids": ids[:, :6]})
                drafted = other.step({"input_ids": ids[:, 6:10]}, wanted=4)["logits"][0]
                other.cut(7)
            elif 6 <= row < 10:
                np.testing.assert_allclose(drafted[row - 6], alone, atol=1e-5)
                if row == 7:
                    again = other.step({"input_ids": ids[:, 7:8]})["logits"][0, 0]
                    np.testing.assert_allclose(again, alone, atol=1e-5)


def test_caches_of_halves_step_one_sequence_at_a_time() -> None:
    text = """g (int64[b, s] ids, float16[b, 1, p, 8] past) => (float16[b, s, 8] y,
        float16[b, 1, t, 8] present) <int64[1] one = {1}> {
        x = Gather (table, ids) r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r)
        k = Transpose <perm = [0, 1, 3, 2]> (present) s = MatMul (r, k) w = Softmax (s)
        a = MatMul (w, present) y = Squeeze (a, one) }"""
    model = model_from_text(text)
    table = RNG.standard_normal((9, 8)).astype(np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    past = np.zeros((1, 1, 0, 8), np.float16)
    with ps.Stepper(ps.load(model)) as stepper:
        assert stepper.reason is not None
        assert "is float16" in stepper.reason
        sequence = stepper.sequence()
        for token in (3, 1, 4, 1, 5):
            want, past = session.run(None, {"ids": np.array([[token]]), "past": past})
            got = sequence.step({"ids": [[token]]})["y"]
            assert got.dtype == np.float16
            np.testing.assert_allclose(got, want, atol=0.01)


def test_model_whose_rows_depend_on_one_another_steps_one_sequence_at_a_time() -> None:
    """Each row is normalized by the sum of all, which a step of other rows would change."""
    text = """g (float[b, s, 4] x, float[b, 1, p, 4] past) => (float[b, s, 4] y,
        float[b, 1, t, 4] present) <int64[1] one = {1}> {
        r = Unsqueeze (x, one) present = Concat <axis = 2> (past, r)
        k = Transpose <perm = [0, 1, 3, 2]> (present) s = MatMul (r, k) w = Softmax (s)
        a = MatMul (w, present) z = Squeeze (a, one) t = ReduceMax <keepdims = 1> (x, one)
        y = Add (z, t) }"""
    model = ps.load(model_from_text(text))
    session, x = ps.compile(model), RNG.standard_normal((1, 9, 4)).astype(np.float32)
    with ps.Stepper(model) as stepper:
        assert stepper.reason is not None
        sequence, other = stepper.sequence(), stepper.sequence()
        sequence.step({"x": x[:, :5]})
        other.step({"x": x[:, :2]})
        fork = sequence.fork()
        sequence.step({"x": x[:, :1]})
        sequence.cut(5)
        past = session.run({"x": x[:, :5], "past": np.zeros((1, 1, 0, 4), np.float32)})["present"]
        want = session.run({"x": x[:, 5:], "past": past})["y"]
        for each in (sequence, fork):
            got = each.step({"x": x[:, 5:]}, wanted=4)["y"]
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_model_without_caches_reads_all_rows_each_time() -> None:
    text = """g (int64[b, s] ids, int64[b, s] attention_mask) => (float[b, s, 4] y)
        <int64 last = {1}> { f = Cast <to = 1> (ids) c = CumSum (f, last) m = Cast <to = 1> (attention_mask)
        z = Mul (c, m) y = Unsqueeze (z, axes) }""".replace(
        "<int64 last = {1}>", "<int64 last = {1}, int64[1] axes = {2}>"
    )
    text = text.replace("float[b, s, 4] y", "float[b, s, 1] y")
    with ps.Stepper(ps.load(model_from_text(text))) as stepper:
        assert stepper.reason is not None
        sequence = stepper.sequence()
        assert sequence.step({"ids": [[1, 2, 3]]}, wanted=2)["y"][0, :, 0].tolist() == [3, 6]
        fork = sequence.fork()
        assert sequence.step({"ids": [[4]]})["y"][0, :, 0].tolist() == [10]
        sequence.cut(1)
        assert sequence.step({"ids": [[7, 1]]}, wanted=2)["y"][0, :, 0].tolist() == [8, 9]
        assert fork.step({"ids": [[5]]})["y"][0, :, 0].tolist() == [11]


def test_model_of_both_halves_has_the_inputs_of_its_encoder_fixed() -> None:
    text = """g (int64[b, s] input_ids, int64[b, s] attention_mask, int64[b, t] decoder_input_ids)
        => (float[b, t, 1] logits) <int64[1] axes = {2}, int64[1] rows = {1}, int64 along = {1}> {
        f = Cast <to = 1> (input_ids) m = Cast <to = 1> (attention_mask) p = Mul (f, m)
        e = ReduceSum <keepdims = 1> (p, rows) d = Cast <to = 1> (decoder_input_ids)
        c = CumSum (d, along) z = Mul (c, e) logits = Unsqueeze (z, axes) }"""
    with ps.Stepper(ps.load(model_from_text(text))) as stepper:
        assert [*stepper.fixed] == ["input_ids", "attention_mask"]
        assert [*stepper.rows] == ["decoder_input_ids"]
        sequences = [
            stepper.sequence(initial={"input_ids": [[n, 3]], "attention_mask": [[1, 1]]})
            for n in (2, 7)
        ]
        for n, sequence in zip((2, 7), sequences, strict=True):
            first = sequence.step({"decoder_input_ids": [[1, 2]]})["logits"]
            assert first.ravel().tolist() == [3 * (n + 3)]
        fork = sequences[0].fork()
        for n, sequence in zip((2, 7, 2), (*sequences, fork), strict=True):
            second = sequence.step({"decoder_input_ids": [[4]]})["logits"]
            assert second.ravel().tolist() == [7 * (n + 3)]
        with pytest.raises(ps.InvalidInput, match=r"begins with \['input_ids', 'attention_mask'\]"):
            stepper.sequence()
        with pytest.raises(ps.InvalidInput, match="of one sample"):
            stepper.sequence(initial={"input_ids": [[1], [2]], "attention_mask": [[1], [1]]})


_OF_ONE_ROW = """g (float[b, s, 4] x, float[b, 1, p, 4] past_self, float[b, e, 4] encoder_states)
    => (float[b, s, 4] y, float[b, 1, t, 4] present_self) <int64[1] one = {{1}}> {{
    r = Unsqueeze (x, one) present_self = Concat <axis = 2> (past_self, r)
    k = Transpose <perm = [0, 1, 3, 2]> (present_self) s = MatMul (r, k) {mask}
    w = Softmax (masked) a = MatMul (w, present_self) z = Squeeze (a, one)
    e = ReduceMean <keepdims = 1> (encoder_states, one) y = Add (z, e) }}"""
_MASK = """
    n = Shape <start = 1, end = 2> (x) m = Shape <start = 2, end = 3> (present_self)
    shape = Concat <axis = 0> (n, m) ones = ConstantOfShape <value = float[1] {1}> (shape)
    i = Sub (m, n) below = Trilu <upper = 0> (ones, i1) unit = Sub (ones, below)
    low = Constant <value_float = -10000.0> () hidden = Mul (unit, low) masked = Add (s, hidden)"""


@pytest.mark.parametrize("masked", [True, False])
def test_rows_are_stepped_one_by_one_where_a_model_was_traced_with_one(masked: bool) -> None:
    """Without a mask, a row of several sees those behind it."""
    mask = "masked = Identity (s)"
    if masked:
        mask = _MASK.replace("i = Sub (m, n)", "d = Sub (m, n) i1 = Squeeze (d)")
    model = ps.load(model_from_text(_OF_ONE_ROW.format(mask=mask)))
    x, states = RNG.standard_normal((1, 6, 4)), RNG.standard_normal((1, 3, 4))
    x, states = x.astype(np.float32), states.astype(np.float32)
    session = ps.compile(model)
    past, wanted = np.zeros((1, 1, 0, 4), np.float32), []
    for row in range(6):
        feeds = {"x": x[:, row : row + 1], "past_self": past, "encoder_states": states}
        outputs = session.run(feeds)
        wanted.append(outputs["y"])
        past = outputs["present_self"].copy()
    with ps.Stepper(model) as stepper:
        for _ in range(2):
            sequence = stepper.sequence(initial={"encoder_states": states})
            got = [
                sequence.step({"x": x[:, :1]})["y"],
                sequence.step({"x": x[:, 1:]}, wanted=5)["y"],
            ]
            np.testing.assert_allclose(np.concatenate(got, 1), np.concatenate(wanted, 1), atol=1e-6)
        assert stepper._engine.runner._one_row is not masked  # type: ignore[attr-defined]


def test_mask_of_a_whole_prompt_or_of_a_single_row_steps_the_others_one_by_one() -> None:
    """Its mask [rows, rows] does not broadcast to the scores of several rows after past ones."""
    mask = """i = Shape <start = 1, end = 2> (x) n = Squeeze (i) zero = Sub (n, n)
        all = Range (zero, n, first) c = Unsqueeze (all, one) hidden = Greater (all, c)
        low = Constant <value_float = -3e38> () m = Where (hidden, low, s)"""
    model = model_from_text(PLAIN.format(**DEFAULTS | {"mask": mask}))
    runtime = onnxruntime.InferenceSession(
        model_from_text(PLAIN.format(**DEFAULTS)).SerializeToString()
    )
    x = RNG.standard_normal((1, 12, 4)).astype(np.float32)
    (want,) = runtime.run(["y"], {"x": x, "past": np.zeros((1, 1, 0, 4), np.float32)})
    with ps.Stepper(ps.load(model), max_rows=5) as stepper:
        assert "cannot compute several rows after past ones" in str(stepper.reason)
        got = stepper.sequence().step({"x": x}, wanted=None)["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_error_of_rows_after_past_ones_is_that_of_a_single_row() -> None:
    model = model_from_text(PLAIN.format(**DEFAULTS | {"mask": "m = Sub (s, rows)"}))
    rows = np.zeros((3, 3), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rows, "rows"))
    x = RNG.standard_normal((1, 5, 4)).astype(np.float32)
    stepper = ps.Stepper(ps.load(model), max_rows=3)
    with stepper, pytest.raises(ps.InvalidInput, match="do not broadcast"):
        stepper.sequence().step({"x": x}, wanted=None)
