"""Outputs written into arrays of the caller's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import penstock as ps
from tests.session.test_opening import calls_of
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
    """NumPy reports every array that it allocates to tracemalloc; what other tests have left may be
    freed while a run is measured."""
    x = np.linspace(-1, 1, 1 << 18, dtype=np.float32)
    text = "g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }"
    session = compile_text(text, backends=backends, executor="linear", threads=1)
    out = {"y": np.empty_like(x)}
    for _ in range(3):
        session.run({"x": x}, out=out)
    assert most_bytes(lambda: session.run({"x": x}, out=out)) < 100_000
    assert most_bytes(lambda: session.run({"x": x})) > x.nbytes - 100_000


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
    session.run({"x": x}, out={"y": x})  # overwrites an input
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


def test_repeated_runs_into_arrays_call_few_functions():
    session = compile_text(TEXT, executor="linear", threads=1)
    out = arrays()
    for _ in range(2):
        session.run({"x": X}, out=out, timeout=5.0)
    assert calls_of(partial(session.run, {"x": X}, out=out)) < 60
    assert calls_of(partial(session.run, {"x": X}, timeout=5.0)) < 60
    np.testing.assert_array_equal(out["z"], out["y"].T)


@pytest.mark.parametrize("backends", [["numpy"], None])
def test_other_arrays_than_before_get_the_same_answers(backends):
    """Each run follows one that wrote directly into arrays."""
    session = compile_text(TEXT, backends=backends, executor="linear")
    expected = session.run({"x": X})
    both = np.empty(16000, np.float32)
    read_only = np.empty((8, 1000), np.float32)
    read_only.flags.writeable = False
    others = [
        {"y": np.empty((16, 1000), np.float32)[::2], "z": np.empty((1000, 8), np.float32)},
        {"y": np.empty((8, 1000), np.float32)},
        {"z": np.empty((8, 1000), np.float32).T, "y": np.empty((8, 1000), np.float32)},
        {"y": np.empty(32004, np.uint8)[4:].view(np.float32).reshape(8, 1000), "z": np.empty((1000, 8), np.float32)},
        {"y": both[:8000].reshape(8, 1000), "z": both[8000:].reshape(1000, 8)},
        {"z": both[:8000].reshape(1000, 8), "y": both[8000:].reshape(8, 1000)},
    ]  # fmt: skip
    for out in others:
        session.run({"x": X}, out=arrays())
        outputs = session.run({"x": X}, out=out)
        assert all(outputs[name] is array for name, array in out.items())
        for name, array in outputs.items():
            np.testing.assert_array_equal(array, expected[name])
    x = X.copy()
    session.run({"x": X}, out=arrays())
    assert session.run({"x": x}, out={"y": x, "z": np.empty((1000, 8), np.float32)})["y"] is x
    np.testing.assert_array_equal(x, expected["y"])
    for y in (read_only, np.empty((8, 1000)), np.empty((7, 1000), np.float32)):
        session.run({"x": X}, out=arrays())
        with pytest.raises(ps.InvalidInput):
            session.run({"x": X}, out=arrays() | {"y": y})


def test_arrays_are_written_for_other_shapes_and_after_plans_are_dropped():
    session = compile_text(TEXT, executor="linear")
    for rows in (8, 4, 8, 4):
        x, out = X[:rows], {"y": np.empty((rows, 1000), np.float32)}
        assert session.run({"x": x}, out=out)["y"] is out["y"]
        np.testing.assert_allclose(out["y"], -np.exp(x), rtol=1e-5)
    session.trim()
    session.run({"x": X[:4]}, out=out)
    session.close()
    with pytest.raises(ps.PenstockError, match="closed"):
        session.run({"x": X[:4]}, out=out)


def test_nothing_is_fetched_if_nothing_is_asked_for():
    session = compile_text(TEXT, executor="linear")
    session.run({"x": X})
    assert session.run({"x": X}, fetches=[], timeout=5.0) == {}


def test_stopped_runs_into_arrays_end_with_their_error():
    session = compile_text(TEXT, executor="linear")
    out, token = arrays(), ps.CancelToken()
    session.run({"x": X}, out=out)
    with pytest.raises(ps.DeadlineExceeded):
        session.run({"x": X}, out=out, timeout=0)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        session.run({"x": X}, out=out, cancel=token)
