"""Transposed inputs that kernels read through: no views are made, and results stay the same."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.host.native import library
from tests.support.onnx_text import compile_text, model_from_text

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")

RNG = np.random.default_rng(5)
IMAGE = RNG.normal(size=(1, 6, 7, 8)).astype(np.float32)
IDENTITY = "{" + ", ".join(str(float(i == j)) for i in range(8) for j in range(8)) + "}"
NET = f"""g (float[1,6,7,8] x) => (float[1,8,6,7] y%s) <float[8,8,1,1] w = {IDENTITY}> {{
    t = Transpose<perm = [0, 3, 1, 2]>(x) y = Conv(t, w) %s }}"""


def net(outputs: str = "", rest: str = "") -> ps.Session:
    return compile_text(NET % (outputs, rest), backends=["native", "numpy"], shapes={})


def test_transposed_input_is_read_without_a_view() -> None:
    session = net()
    assert "transpose" not in session.source and "(v0)" in session.source
    np.testing.assert_array_equal(session(IMAGE), IMAGE.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0)])
def test_input_in_any_layout_is_read_as_its_elements_are(order) -> None:
    image = np.empty([IMAGE.shape[i] for i in order], np.float32).transpose(np.argsort(order))
    image[...] = IMAGE
    wide = np.repeat(IMAGE, 2, 3)[..., ::2]
    for given in (image, wide, image[:, ::-1]):
        np.testing.assert_array_equal(net()(given), given.transpose(0, 3, 1, 2))


def test_observer_sees_the_transposed_input() -> None:
    trace = ps.Profile()
    net().run({"x": IMAGE}, trace=trace)
    assert [entry.step.node.op.name for entry in trace] == ["Transpose", "Conv"]


@pytest.mark.parametrize("other", ["Identity(t)", "Cos(t)"])
def test_transposed_input_that_others_read_is_made(other) -> None:
    session = net(", float[1,8,6,7] z", f"z = {other}")
    y, z = session(IMAGE)
    turned = IMAGE.transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(y, turned)
    np.testing.assert_allclose(z, turned if other[0] == "I" else np.cos(turned), rtol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
def test_transposed_weights_of_a_run_give_what_onnxruntime_gives(channels) -> None:
    """A dim of 1 has the stride of another: the order of dims cannot be told from strides."""
    ort = pytest.importorskip("onnxruntime")
    model = model_from_text(
        f"""g (float[1,{channels},6,6] x, float[2,3,{channels},4] w) => (float[1,4,5,4] y) {{
            t = Transpose<perm = [3, 2, 0, 1]>(w) y = Conv(x, t) }}"""
    )
    x = RNG.normal(size=(1, channels, 6, 6)).astype(np.float32)
    w = RNG.normal(size=(2, 3, channels, 4)).astype(np.float32)
    session = ps.compile(model, executor="linear", shapes={})
    assert "transpose" not in session.source
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w": w})
    np.testing.assert_allclose(session(x, w), wanted, rtol=1e-5, atol=1e-6)
