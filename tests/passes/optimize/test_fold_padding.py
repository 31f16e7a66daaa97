"""Pad, taken into the windows behind it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import penstock as ps
from penstock.host.native import library
from tests.support.onnx_text import compile_text, model_from_text

rng = np.random.default_rng(3)

BACKENDS = [["numpy"], *([["native", "numpy"]] if library() is not None else [])]


def counts(text: str, backends: list[str], low: float = -1.0) -> Counter[str]:
    """The operations of a model that are left, whose results are those of onnx.reference."""
    model = model_from_text(text)
    session = ps.compile(model, executor="linear", backends=backends)
    value = model.graph.input[0]
    dims = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
    x = rng.uniform(low, 1, dims).astype(np.float32)
    with np.errstate(divide="ignore"):
        (expected,) = ReferenceEvaluator(model).run(None, {value.name: x})
    (found,) = session.run({value.name: x}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert found.shape == expected.shape
    names = [
        name
        for step in session.inspect.plan.walk()
        for name in step.node.attrs.get("ops", step.node.op.name).split()
    ]
    return Counter(names)


PADS = "int64[8] pads = {0, 0, 1, 2, 0, 0, 0, 1}"
SOME = ", ".join(str(i % 7 - 3) for i in range(54))
WEIGHTS = f"float[3, 2, 3, 3] w = {{{SOME}}}"


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize(
    "attrs",
    [
        "",
        "<pads = [2, 0, 1, 1]>",
        "<strides = [2, 2]>",
        '<auto_pad = "VALID">',
        "<dilations = [2, 1]>",
    ],
)
def test_a_convolution_pads_with_zeros(attrs, backends):
    text = f"""g (float[n, 2, 9, 8] x) => (float[n, 3, a, b] y) <{PADS}, {WEIGHTS}>
        {{ p = Pad(x, pads) y = Conv {attrs} (p, w) }}"""
    found = counts(text, backends)
    assert found["Conv"] == 1 and found["Pad"] == 0


def test_axes_say_what_is_padded():
    text = f"""g (float[1, 2, 9, 8] x) => (float[1, 3, a, b] y)
        <int64[2] pads = {{2, 1}}, int64[1] axes = {{-1}}, float zero = {{0}}, {WEIGHTS}>
        {{ p = Pad(x, pads, zero, axes) y = Conv(p, w) }}"""
    assert counts(text, ["numpy"]) == {"Conv": 1}


@pytest.mark.parametrize("backends", BACKENDS)
def test_a_pad_that_others_read_stays_for_them(backends):
    #  x -- Pad -+- Conv -- y
    #            +- ReduceSum -- s
    text = f"""g (float[1, 2, 9, 8] x) => (float[1, 3, 8, 9] z) <{PADS}, {WEIGHTS}>
        {{ p = Pad(x, pads) y = Conv(p, w) s = ReduceMax(p) z = Add(y, s) }}"""
    found = counts(text, backends)
    assert found["Pad"] == found["Conv"] == 1


@pytest.mark.parametrize(
    "body",
    [
        # Channels are padded.
        "<int64[8] pads = {0, 1, 0, 0, 0, 0, 0, 0}> { p = Pad(x, pads) y = Conv(p, w) }",
        # Not with zeros.
        f"<{PADS}, float one = {{1}}> {{ p = Pad(x, pads, one) y = Conv(p, v) }}",
        # With what lies inside.
        f'<{PADS}> {{ p = Pad <mode = "edge"> (x, pads) y = Conv(p, v) }}',
        # The size of what it reads says how the convolution pads.
        f'<{PADS}> {{ p = Pad(x, pads) y = Conv <strides = [2, 2], auto_pad = "SAME_UPPER"> (p, v) }}',
    ],
)
def test_fold_padding_keeps_pads_that_a_convolution_cannot_take(body):
    ones = ", ".join("1" for _ in range(27))
    text = f"g (float[1, 2, 9, 8] x) => (float[1, a, b, c] y) {body}"
    text = text.replace(
        "<", f"<float[1, 3, 3, 3] w = {{{ones}}}, {WEIGHTS.replace(' w ', ' v ')}, ", 1
    )
    assert counts(text, ["numpy"]) == {"Pad": 1, "Conv": 1}


def test_fold_padding_keeps_negative_pads():
    graph = "g (float[1, 1, 9, 8] x) => (float[1, 1, 8, 8] y)"
    text = f"""{graph} <int64[8] pads = {{0, 0, -1, 1, 0, 0, 1, 0}},
        float[1, 1, 2, 2] w = {{1, 2, 3, 4}}> {{ p = Pad(x, pads) y = Conv(p, w) }}"""
    session = compile_text(text, backends=["numpy"])
    x = rng.standard_normal((1, 1, 9, 8)).astype(np.float32)
    p = np.pad(x[0, 0, 1:], ((0, 1), (1, 0)))
    expected = p[:-1, :-1] + 2 * p[:-1, 1:] + 3 * p[1:, :-1] + 4 * p[1:, 1:]
    np.testing.assert_allclose(session(x)[0, 0], expected, rtol=1e-4, atol=1e-5)


MAX = "MaxPool <kernel_shape = [3, 3], strides = [2, 2]"


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize(
    "body",
    [
        f"<{PADS}, float zero = {{0}}> {{ low = Log(zero) p = Pad(x, pads, low) y = {MAX}> (p) }}",
        # No element is below 0.
        f"<{PADS}> {{ r = Relu(x) p = Pad(r, pads) y = {MAX}> (p) }}",
        f"<{PADS}> {{ p = Pad(x, pads) y = AveragePool <kernel_shape = [3, 3]> (p) }}",
        f"<{PADS}> {{ p = Pad(x, pads) y = AveragePool <kernel_shape = [4, 4], pads = [1, 0, 0, 1], "
        "count_include_pad = 1, strides = [3, 2]> (p) }",
    ],
)
def test_pad_before_pooling_is_folded(body, backends):
    text = f"g (float[1, 2, 9, 8] x) => (float[1, 2, a, b] y) {body}"
    found = counts(text, backends)
    assert found["Pad"] == 0
    assert found["MaxPool"] + found["AveragePool"] == 1


@pytest.mark.parametrize(
    "body",
    [
        # Zeros are more than what is below them.
        f"<{PADS}> {{ p = Pad(x, pads) y = {MAX}> (p) }}",
        # A window of nothing but padding has a greatest element, of zeros.
        "<int64[8] pads = {0, 0, 3, 0, 0, 0, 0, 0}> "
        f"{{ r = Relu(x) p = Pad(r, pads) y = {MAX}> (p) }}",
        # The last window begins in the padding.
        f"<{PADS}> {{ r = Relu(x) p = Pad(r, pads) y = {MAX}, ceil_mode = 1> (p) }}",
        # Zeros of the first kind count, those of the second do not.
        f"<{PADS}> {{ p = Pad(x, pads) "
        "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p) }",
    ],
)
def test_fold_padding_keeps_pads_that_pooling_cannot_take(body):
    text = f"g (float[1, 2, 9, 8] x) => (float[1, 2, a, b] y) {body}"
    assert counts(text, ["numpy"], low=-5.0)["Pad"] == 1


def test_places_of_maxima_are_places_in_what_is_padded():
    text = f"""g (float[1, 2, 9, 8] x) => (int64[1, 2, a, b] i)
        <{PADS}> {{ r = Relu(x) p = Pad(r, pads) y, i = {MAX}> (p) }}"""
    assert counts(text, ["numpy"])["Pad"] == 1


@pytest.mark.parametrize(
    ("pads", "attrs"),
    [("{0, 0, 1}", ""), ("{0, 0, 1, 2, 0, 0, 0, 1}", "<pads = [1, 1]>")],
    ids=["pads", "attributes"],
)
def test_fold_padding_ignores_invalid_pads_of_nodes_that_never_run(pads, attrs):
    #  If -+- then: x
    #      +- else: a Pad, or a Conv, that can never be
    count = pads.count(",") + 1
    text = f"""g (float[1, 2, 9, 8] x, bool c) => (float[1, 2, 9, 8] y)
        <int64[{count}] pads = {pads}, {WEIGHTS}> {{ y = If (c) <
            then_branch = t () => (float[1, 2, 9, 8] a) {{ a = Identity(x) }},
            else_branch = e () => (z) {{ p = Pad(x, pads) z = Conv {attrs} (p, w) }}> }}"""
    session = compile_text(text, backends=["numpy"])
    x = rng.standard_normal((1, 2, 9, 8)).astype(np.float32)
    np.testing.assert_array_equal(session.run({"x": x, "c": np.True_})["y"], x)
    with pytest.raises(ps.PenstockError):
        session.run({"x": x, "c": np.False_})
