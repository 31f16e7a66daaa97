"""Runs after the first, most of which feed arrays of the same types: few calls, the same checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import EXECUTORS
from penstock.core.errors import InvalidInput, PenstockError
from penstock.host.native import library
from tests.session.test_opening import calls_of
from tests.support.onnx_text import compile_text
from tests.support.tflite_models import model, subgraph

ADD = (
    "g (float[N,2] x, float[N,2] y) => (float[N,2] z, float[N,2] w) { z = Add(x, y) w = Mul(x, y) }"
)
FLOATS, SUB = ("float32", [2, 2]), ("SubOptions", {})
X, Y = np.arange(4, dtype=np.float32).reshape(2, 2), np.ones((2, 2), np.float32)


class Derived(np.ndarray):
    pass


def sums(session: ps.Session, **feeds: Any) -> Any:
    return session.run(feeds)["z"].tolist()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_run_with_other_feeds_after_the_first_gives_their_answers(executor):
    with compile_text(ADD, executor=executor, threads=1) as session:
        for _ in range(3):
            assert sums(session, x=X, y=Y) == (X + Y).tolist()
            assert sums(session, y=X, x=Y[:, ::-1]) == (X + Y).tolist()
            assert sums(session, x=X[:1], y=Y[:1]) == (X + Y)[:1].tolist()
            assert sums(session, x=X.T, y=Y) == (X.T + Y).tolist()
            assert sums(session, x=X.tolist(), y=Y) == (X + Y).tolist()
            assert sums(session, x=X.astype(">f4"), y=Y) == (X + Y).tolist()
            assert sums(session, x=X.view(Derived), y=Y) == (X + Y).tolist()
        assert list(session.run({"x": X, "y": Y})) == ["z", "w"]
        assert list(session.run({"x": X, "y": Y}, ["w", "z"])) == ["w", "z"]


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": X}, "'y'"),
        ({"x": X, "y": Y, "other": Y}, "'other'"),
        ({"x": X, "w ": Y}, "'w '"),
        ({"x": X, "y": Y.astype(np.float64)}, "'y' must be float32, not float64"),
        ({"x": X, "y": Y[:, :1]}, "'y' must have 2 at axis 1"),
        ({"x": X, "y": Y[0]}, "'y' has rank 2"),
        ({"x": X, "y": Y[:1]}, "dim 'N' at axis 0 is 1, but 2"),
        ({"x": X, "y": np.ma.masked_array(Y, Y > 0)}, "masked"),
        ([("x", X), ("y", Y)], "feeds must map"),
        ({"x": X, ("y",): Y}, "strings"),
    ],
)
def test_run_with_wrong_feeds_after_good_ones_is_refused(feeds, message):
    with compile_text(ADD) as session:
        for _ in range(2):
            session.run({"x": X, "y": Y})
            with pytest.raises(InvalidInput, match=message):
                session.run(feeds)


def test_run_of_a_closed_session_is_refused_after_good_runs():
    session = compile_text(ADD)
    session.run({"x": X, "y": Y})
    session.run({"x": X, "y": Y})
    session.close()
    with pytest.raises(PenstockError, match="closed"):
        session.run({"x": X, "y": Y})


def test_run_looks_at_the_strings_of_each_call():
    with compile_text("g (string[N] x) => (string[N] y) { y = Identity(x) }") as session:
        good, bad = np.array(["a", "b"], object), np.array(["a", 1], object)
        for _ in range(2):
            assert session.run({"x": good})["y"].tolist() == ["a", "b"]
            with pytest.raises(InvalidInput, match="takes strings"):
                session.run({"x": bad})


def test_run_again_with_arrays_of_the_same_types_makes_three_calls():
    """Return ``run`` of the session and of the executor, and the program."""
    if library() is None:
        pytest.skip("without compiled kernels, feeds are looked at in Python")
    with compile_text("g (float[N,2] x) => (float[N,2] z) { z = Neg(x) }", threads=1) as session:
        session.run({"x": X})
        assert calls_of(session.run, {"x": X}) == 3
        assert calls_of(session.run, {"x": X}, ["z"]) == 3
        assert calls_of(session.run, {"x": X[:1]}) > 3


@pytest.mark.parametrize("fed_before", [False, True])
def test_run_again_by_other_names_of_inputs_makes_three_calls(fed_before: bool) -> None:
    """The names of a signature of the first subgraph of a TFLite file."""
    if library() is None:
        pytest.skip("without compiled kernels, feeds are looked at in Python")
    names = [{"name": "a", "tensor_index": 0}, {"name": "b", "tensor_index": 1}]
    file = model(
        [subgraph({"x": FLOATS, "y": FLOATS}, [("SUB", ["x", "y"], ["z"], SUB)], ["z"])],
        signature_defs=[{"inputs": names, "outputs": [], "signature_key": "s"}],
    )
    with ps.compile(file, threads=1) as session:
        if fed_before:
            session.run({"x": X, "y": Y})
        session.run({"a": X, "b": Y})
        for feeds in ({"a": X, "b": Y}, {"x": X, "y": Y}, {"b": Y, "x": X}):
            assert calls_of(session.run, feeds) == 3
            assert session.run(feeds)["z"].tolist() == (X - Y).tolist()
        for feeds in ({"a": X, "x": Y}, {"b": X}, {"a": X, "b": Y, "x": Y}):
            with pytest.raises(InvalidInput):
                session.run(feeds)


def test_outputs_by_the_names_of_a_signature_are_of_the_same_plan() -> None:
    graph = subgraph(
        {"x": FLOATS, "y": FLOATS},
        [("SUB", ["x", "y"], ["z"], SUB), ("SUB", ["y", "x"], ["w"], SUB)],
        ["z", "w"],
    )
    names = [{"name": "a", "tensor_index": 3}, {"name": "b", "tensor_index": 2}]
    file = model([graph], signature_defs=[{"inputs": [], "outputs": names, "signature_key": "s"}])
    with ps.compile(file, threads=1) as session:
        feeds, out = {"x": X, "y": 3 * Y}, {"b": np.empty_like(X), "a": np.empty_like(X)}
        session.run(feeds)
        session.run(feeds, ["a", "b"])
        assert session.stats.plans_made == 1
        for options in ({}, {"out": out}):
            got = session.run(feeds, ["a", "b"], **options)
            assert list(got) == ["a", "b"]
            np.testing.assert_array_equal(got["a"], 3 * Y - X)
            np.testing.assert_array_equal(got["b"], X - 3 * Y)
        assert got["a"] is out["a"]
        np.testing.assert_array_equal(session.run(feeds, ["a"])["a"], 3 * Y - X)
