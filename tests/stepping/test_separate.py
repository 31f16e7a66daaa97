"""Models whose steps cannot be joined."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import model_from_text

RNG = np.random.default_rng(1)


def test_model_without_caches_is_refused() -> None:
    model = model_from_text("g (float[b, 4] x) => (float[b, 4] y) { y = Neg (x) }")
    with pytest.raises(ps.InvalidInput, match="no state that is fed back"):
        ps.Stepper(ps.load(model))


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
