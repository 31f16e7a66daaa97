"""Elementwise operations between a Reshape and one back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.passes.optimize import cancel_reshapes
from tests.support.onnx_text import model_from_text

rng = np.random.default_rng(3)


def operations(text: str) -> list[str]:
    """The operations of a model that are left, whose results are those of onnx.reference."""
    model = model_from_text(text)
    session = ps.compile(model, backends=["numpy"])
    feeds = {
        value.name: rng.normal(size=[d.dim_value for d in value.type.tensor_type.shape.dim])
        for value in model.graph.input
    }
    feeds = {name: x.astype(np.float32) for name, x in feeds.items()}
    wanted = ReferenceEvaluator(model).run(None, feeds)
    for found, want in zip(session.run(feeds).values(), wanted, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-6)
        assert found.shape == want.shape
    return [step.node.op.name for step in session.inspect.plan.walk()]


def shaped(dims) -> str:
    return "{" + ", ".join(str(n) for n in dims) + "}"


def numbers(dims) -> str:
    values = ", ".join(f"{(i * 7) % 11 - 5}" for i in range(int(np.prod(dims))))
    return f"float[{', '.join(map(str, dims))}] c = {{{values}}}"


def text_of(dims, inner, constant, between="b = Add(a, c)", back=None) -> str:
    back = back or dims
    outer = ", ".join(map(str, back))
    return f"""g (float[{", ".join(map(str, dims))}] x) => (float[{outer}] y)
        <int64[{len(inner)}] s = {shaped(inner)}, int64[{len(back)}] t = {shaped(back)},
         {numbers(constant)}> {{ a = Reshape(x, s) {between} y = Reshape(b, t) }}"""


CONSTANTS = {
    "a mask for each window": ((8, 3, 5, 5), (2, 4, 3, 5, 5), (1, 4, 1, 5, 5)),
    "one for all windows": ((8, 3, 5, 5), (2, 4, 3, 5, 5), (3, 5, 5)),
    "one for each image": ((8, 3, 5, 5), (2, 4, 3, 5, 5), (2, 1, 1, 1, 1)),
    "dims that are merged": ((2, 4, 3), (8, 3), (8, 1)),
    "dims of one": ((2, 3), (1, 2, 1, 3, 1), (2, 1, 3, 1)),
    "all": ((6, 4), (2, 3, 2, 2), (2, 3, 2, 2)),
    "one element": ((6, 4), (24,), (1,)),
    "other dims altogether": ((6, 4), (8, 3), (8, 1)),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_constants_are_reshaped(case):
    assert operations(text_of(*CONSTANTS[case])) == ["Add"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_any_dims(dims, data):
    factors = [n for dim in dims for n in ([2, 2] if dim == 4 else [dim])]
    inner, rest = [], factors
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        inner.append(int(np.prod(rest[:count])))
        rest = rest[count:]
    own = [n if data.draw(st.booleans()) else 1 for n in inner]
    names = operations(text_of(dims, inner, own[data.draw(st.integers(0, len(own) - 1)) :]))
    assert set(names) <= {"Add"}


@pytest.mark.parametrize(
    "between", ["b = Sub(c, a)", "b = Neg(a)", "d = Neg(a) e = Mul(d, c) b = Abs(e)"]
)
def test_other_operations(between):
    found = operations(text_of((8, 3), (2, 4, 3), (1, 4, 1), between))
    assert "Reshape" not in found


def test_chains_of_pairs():
    text = """g (float[6, 4] x) => (float[6, 4] y)
        <int64[2] s = {8, 3}, int64[2] t = {6, 4}, float[8, 1] c = {1, 2, 3, 4, 5, 6, 7, 8}> {
            a = Reshape(x, s) b = Add(a, c) d = Reshape(b, t)
            e = Reshape(d, s) f = Mul(e, c) y = Reshape(f, t) }"""
    assert operations(text) == ["Add", "Mul"]


def test_numbers_stay_numbers():
    text = """g (float[6, 4] x) => (float[6, 4] y)
        <int64[2] s = {8, 3}, int64[2] t = {6, 4}, float low = {-0.5}, float high = {0.5}>
        { a = Reshape(x, s) b = Clip(a, low, high) y = Reshape(b, t) }"""
    assert operations(text) == ["Clip"]
    (step,) = ps.compile(model_from_text(text), backends=["numpy"]).inspect.plan.walk()
    assert [value.const.shape for value in step.node.inputs[1:]] == [(), ()]


def test_what_others_read_keeps_its_shape():
    text = """g (float[6, 4] x) => (float[6, 4] y, float[8, 3] z)
        <int64[2] s = {8, 3}, int64[2] t = {6, 4}, float[8, 1] c = {1, 2, 3, 4, 5, 6, 7, 8}> {
            a = Reshape(x, s) b = Add(a, c) y = Reshape(b, t) z = Neg(b) }"""
    assert "Reshape" in operations(text)


KEPT = {
    "another shape behind": ((6, 4), (8, 3), (8, 1), "b = Add(a, c)", (4, 6)),
    "a constant that broadcasts": ((6, 1), (2, 3, 1), (2, 3, 4), "b = Add(a, c)", (6, 4)),
    "two operands": ((6, 4), (8, 3), (8, 1), "d = Mul(a, c) b = Add(a, d)"),
    "no operation by element": ((6, 4), (8, 3), (8, 1), "b = Softmax(a)"),
}


@pytest.mark.parametrize("case", KEPT)
def test_others_stay(case):
    assert "Reshape" in operations(text_of(*KEPT[case]))


def test_constants_do_not_grow_without_bounds(monkeypatch):
    case = CONSTANTS["a mask for each window"]
    monkeypatch.setattr(cancel_reshapes, "_MOST_ELEMENTS", 2 * 4 * 25)
    assert operations(text_of(*case)) == ["Add"]
    monkeypatch.setattr(cancel_reshapes, "_MOST_ELEMENTS", 2 * 4 * 25 - 1)
    assert "Reshape" in operations(text_of(*case))


def test_empty_tensors_stay():
    text = """g (float[0, 4] x) => (float[0, 4] y) <int64[2] s = {4, 0}, int64[2] t = {0, 4},
        float[4, 1] c = {1, 2, 3, 4}>
        { a = Reshape <allowzero = 1> (x, s) b = Add(a, c) y = Reshape <allowzero = 1> (b, t) }"""
    operations(text)
