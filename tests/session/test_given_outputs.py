"""Outputs written into arrays of the caller's."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text

#  y is written by its step, z leaves from the arena or is a view
TEXT = "g (float[N, 1000] x) => (float[N, 1000] y, float[1000, N] z) { a = Exp(x) y = Neg(a) z = Transpose(y) }"
X = np.linspace(-1, 1, 8000, dtype=np.float32).reshape(8, 1000)


def arrays() -> dict[str, np.ndarray]:
    return {"y": np.full((8, 1000), 7, np.float32), "z": np.full((1000, 8), 7, np.float32)}


@pytest.mark.parametrize("backends", [["numpy"], None])
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "interpret"])
def test_outputs_are_in_the_given_arrays(executor, backends):
    session = compile_text(TEXT, executor=executor, backends=backends)
    out = arrays()
    for _ in range(3):
        outputs = session.run({"x": X}, out=out)
        assert outputs["y"] is out["y"] and outputs["z"] is out["z"]
        np.testing.assert_allclose(out["y"], -np.exp(X), rtol=1e-5)
        np.testing.assert_array_equal(out["z"], out["y"].T)
        out["y"][...] = out["z"][...] = 0
    only = session.run({"x": X}, out={"z": out["z"]})
    np.testing.assert_array_equal(only["y"].T, out["z"])
    assert not np.shares_memory(only["y"], out["z"])


@pytest.mark.parametrize("backends", [["numpy"], None])
def test_warm_run_with_given_outputs_allocates_none(backends, most_bytes):
    """NumPy tells tracemalloc of every array that it allocates."""
    x = np.linspace(-1, 1, 1 << 18, dtype=np.float32)
    text = "g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }"
    session = compile_text(text, backends=backends, executor="linear", threads=1)
    out = {"y": np.empty_like(x)}
    for _ in range(3):
        session.run({"x": x}, out=out)
    assert most_bytes(lambda: session.run({"x": x}, out=out)) < 100_000
    assert most_bytes(lambda: session.run({"x": x})) >= x.nbytes


def test_arrays_that_kernels_cannot_write_get_copies():
    session = compile_text(TEXT, backends=["numpy"])
    expected = session.run({"x": X})
    strided = np.empty((16, 1000), np.float32)[::2]
    odd = np.empty(8001 * 4, np.uint8)[4 - 4 : 8000 * 4].view(np.float32).reshape(8, 1000)
    for array in (strided, odd):
        out = session.run({"x": X}, out={"y": array})
        assert out["y"] is array
        np.testing.assert_array_equal(array, expected["y"])
    x = X.copy()
    session.run({"x": x}, out={"y": x})  # over what is read
    np.testing.assert_array_equal(x, expected["y"])


def test_given_arrays_serve_submitted_and_observed_runs():
    session = compile_text(TEXT, backends=["numpy"])
    expected, out, trace = session.run({"x": X}), arrays(), ps.Trace()
    assert session.submit({"x": X}, out=out).result()["y"] is out["y"]
    np.testing.assert_array_equal(out["y"], expected["y"])
    out = arrays()
    session.run({"x": X}, out=out, trace=trace)
    np.testing.assert_array_equal(out["z"], expected["z"])
    assert trace.counts.total()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"yy": np.empty((8, 1000), np.float32)}, "out= has 'yy': the run fetches no such value"),
        ({"y": np.empty((8, 1000))}, r"float64\[8, 1000\] for 'y', which is float32\[8, 1000\]"),
        ({"y": np.empty((7, 1000), np.float32)}, r"float32\[7, 1000\] for 'y'"),
        ({"y": np.broadcast_to(np.float32(0), (8, 1000))}, "read-only"),
    ],
)
def test_given_array_that_does_not_fit_is_refused(out, message):
    session = compile_text(TEXT, backends=["numpy"])
    with pytest.raises(ps.InvalidInput, match=message):
        session.run({"x": X}, out=out)


def test_given_value_that_is_no_array_is_a_type_error():
    session = compile_text(TEXT, backends=["numpy"])
    with pytest.raises(TypeError, match="out="):
        session.run({"x": X}, out={"y": [1.0]})


def test_array_for_dims_that_only_the_run_knows_is_checked_afterwards():
    session = compile_text("g (float[N] x) => (int64[R, M] y) { y = NonZero(x) }")
    x = np.array([1, 0, 2], np.float32)
    out = np.empty((1, 2), np.int64)
    assert session.run({"x": x}, out={"y": out})["y"] is out
    assert out.tolist() == [[0, 2]]
    with pytest.raises(ps.InvalidInput, match=r"int64\[1, 2\] for 'y', which is int64\[1, 1\]"):
        session.run({"x": np.array([0, 0, 2], np.float32)}, out={"y": out})
