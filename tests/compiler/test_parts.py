"""Which batches run in parts: those of which no sample acts on another, for all that is known."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from tests.support.bounded import least, rows, session_of, whole
from tests.support.sweeps import sweep

ENCODERS = Path(__file__).parents[1] / "models" / "encoders.zip"

DEPENDENT = {
    "the diagonal": """n = Shape<end = 1>(x) s = Squeeze(n) i = Range(null, s, one)
        j = Unsqueeze(i, last) ij = Concat<axis = 1>(j, j) d = GatherND(x, ij)
        u = Unsqueeze(d, last) y = Mul(x, u)""",
    "the diagonal of what is flat": """n = Shape<end = 1>(x) s = Squeeze(n) i = Range(null, s, one)
        width = Constant<value = int64 {65}> () k = Mul(i, width) f = Reshape(x, minus)
        d = Gather(f, k) u = Unsqueeze(d, last) y = Mul(x, u)""",
    "a sum over the batch": "s = ReduceSum(x, zero) y = Mul(x, s)",
    "a mean of all": "s = ReduceMean(x) y = Sub(x, s)",
    "a sum from sample to sample": "y = CumSum(x, zero)",
    "the size of the batch": """n = Shape<end = 1>(x) f = Cast<to = 1>(n) y = Div(x, f)""",
    "the number of each sample": """n = Shape<end = 1>(x) s = Squeeze(n) i = Range(null, s, one)
        f = Cast<to = 1>(i) u = Unsqueeze(f, last) y = Mul(x, u)""",
    "samples in another order": "y = Slice(x, [-1], [-9999], zero, [-1])",
    "products of samples": "t = Transpose(x) g = MatMul(x, t) y = MatMul(g, x)",
    "random numbers": "r = RandomNormalLike(x) y = Add(x, r)",
}


@pytest.mark.parametrize("what", DEPENDENT)
def test_samples_that_act_on_one_another_stay_together(what):
    body = DEPENDENT[what]
    for text, name in (("[-1]", "minus"), ("[-9999]", "far")):
        body = body.replace(text, name)
    text = f"""g (float[N, 64] x) => (float[N, 64] y) {{
        zero = Constant<value = int64[1] {{0}}> () null = Constant<value = int64 {{0}}> ()
        one = Constant<value = int64 {{1}}> () last = Constant<value = int64[1] {{1}}> ()
        minus = Constant<value = int64[1] {{-1}}> () far = Constant<value = int64[1] {{-9999}}> ()
        a = Sin(x) b = Cos(a) c = Exp(b) {body.replace("(x", "(c").replace("x)", "c)")} }}"""
    x = rows(64, width=64)
    memory = least(text, {"x": x})
    with pytest.raises(ps.LimitExceeded, match="not run in parts"):
        session_of(text, memory=memory * 2 // 3).run({"x": x})


@pytest.mark.costly
@pytest.mark.parametrize("name", sweep(sorted(zipfile.ZipFile(ENCODERS).namelist()), 4))
@given(samples=st.integers(4, 9), seed=st.integers(0, 2**31), more=st.floats(-0.7, 0.2))
@settings(max_examples=4)
def test_encoders_give_the_same_in_parts(name, samples, seed, more):
    rng = np.random.default_rng(seed)
    mask = (np.arange(24) < rng.integers(1, 25, samples)[:, None]).astype(np.int64)
    model = zipfile.ZipFile(ENCODERS).read(name)
    plain = session_of(model)
    feeds = {}
    for port in plain.inputs:
        ids = rng.integers(3, 40, mask.shape)
        feeds[port.name] = mask if "mask" in port.name else ids * (port.name == "input_ids")
    expected = plain.run(feeds)
    memory = least(model, feeds)
    session = session_of(model, memory=memory + int(more * plain.memory.arenas))
    try:
        found = session.run(feeds)
    except ps.LimitExceeded as error:
        assert "parts" in str(error)
        return
    for key, value in found.items():
        np.testing.assert_allclose(value, expected[key], 1e-4, 2e-5)


def test_constant_that_is_too_large_to_be_kept_for_all_samples_stays_no_batch():
    """It is folded in the graph of a part, and a node in that of the batch."""
    text = """g (float[N, 1024] x) => (float[N, 4] y) {
        w = Constant<value = float[1, 4] {1, -1, 0.5, 2}> () n = Shape(x)
        last = Constant<value = int64[1] {1}> () zeros = ConstantOfShape(n) ones = Exp(zeros)
        a = Mul(x, ones) b = Sin(a) c = Cos(a) d = Mul(b, c) e = Softmax(d)
        m = ReduceMax<keepdims = 1>(e, last) y = Mul(m, w) }"""
    x = rows(64)
    limits = ps.Limits(max_folded_bytes=48 * 4096)
    expected = session_of(text).run({"x": x})["y"]
    session = session_of(text, limits=limits, memory=whole(text, {"x": x}) * 2 // 3)
    np.testing.assert_allclose(session.run({"x": x})["y"], expected, 1e-6)
