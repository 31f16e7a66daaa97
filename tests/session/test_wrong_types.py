"""Options of wrong types: a ``TypeError`` or ``ValueError`` that names the option."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

import penstock as ps
from penstock.compiler.options import CompileOptions, ExpertOptions
from penstock.observers.trace import Trace
from tests.support.onnx_text import compile_text, model_from_text

MODEL = model_from_text("g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }")
X = np.ones((1, 2), np.float32)

WRONG = {
    "executor": [1, np.array([1, 2]), ["linear"]],
    "precision": [1, np.array([1, 2])],
    "dead_rows": [1, ["any"]],
    "reproducible": [1, "yes", None],
    "compile_in_run": [1, "no"],
    "backends": ["numpy", 1, {"numpy": 1}, np.array([1, 2])],
    "place": [["Conv"], 1, "Conv", {"Conv": 1}, {1: "numpy"}],
    "shapes": [1, "x", {"x": 1.5}, {"x": True}, {1: [1, 2]}, {"x": "ab"}, [None], [[1, 2]]],
    "limits": [1, {}, "x", object()],
    "memory": [1.5, True, ["2GB"], "much", 0],
    "map_weights": [1, "yes", np.array([1, 2])],
    "signature": [1, ["s"], {}],
    "cache": [1, 1.5, ["x"]],
    "priority": [1.5, "high", True, None],
    "autotune": ["x", np.array([1, 2])],
    "devices": [1.5, "cpu:0", [1], {1: "numpy"}, True, 0, 10**30],
    "cluster": [1, "x", {"workers": 2}],
    "variables": [1, "x", {"v": np.zeros(2)}],
    "progress": [1, "x", np.array([1, 2])],
    "timeout": ["1", [1]],
    "cancel": [1, "x"],
    "expert": [1, {"capture": False}, ps.ExpertOptions],
}
WRONG_EXPERT = {
    "fixed_threads": [1, "x"],
    "capture": [1, "x"],
    "memory_planner": [1, np.array([1, 2])],
    "cost_model": [1, "x"],
    "pool": [1, "x"],
    "grouping": [1, len],
    "after_pass": [1, "x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_compile_refuses_an_option_of_a_wrong_type_by_its_name(name, value) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
        ps.compile(MODEL, **{name: value})


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG_EXPERT.items() for v in vs])
def test_expert_options_refuse_a_value_of_a_wrong_type_by_its_name(name, value) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name}\b"):
        ps.ExpertOptions(**{name: value})


def test_options_of_every_field_are_checked() -> None:
    counts = {"threads", "max_pending"}  # see test_options.py
    assert WRONG.keys() | counts == {field.name for field in fields(CompileOptions)}
    assert WRONG_EXPERT.keys() | {"max_streams"} == {field.name for field in fields(ExpertOptions)}


def test_compile_takes_options_of_all_their_types() -> None:
    shapes = [{"x": np.array([1, 2])}, {"x": (2, 2)}]
    session = ps.compile(MODEL, backends=("numpy",), place={"Neg": "numpy"}, shapes=shapes)
    assert session(X).tolist() == [[-1, -1]]
    assert ps.compile(MODEL, executor="frames", devices=2)(X).tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("limits", lambda s: ps.load(MODEL, limits={})),
        ("signature", lambda s: ps.load(MODEL, signature=["s"])),
        ("source", lambda s: ps.load(3)),
        ("source", lambda s: ps.compile(None)),
        ("path", lambda s: ps.open(3)),
        ("path", lambda s: s.save(b"file")),
        ("runs", lambda s: s.profile({"x": X}, runs="2")),
        ("workers", lambda s: s.inspect.forecast(None)),
        ("max_streams", lambda s: s.inspect.schedule("2")),
        ("done", lambda s: s.run_async(None, {"x": X})),
        ("observers", lambda s: s.run({"x": X}, observers=1)),
        ("max_events", lambda s: Trace(-1)),
        ("max_events", lambda s: Trace(10**30)),
        ("parent", lambda s: ps.CancelToken(1)),
    ],
)
def test_arguments_of_wrong_types_are_refused_by_their_names(name, call) -> None:
    session = compile_text("g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }")
    session(X)
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(name)}="):
        call(session)


def test_shapes_with_a_flag_for_a_dim_are_refused() -> None:
    with pytest.raises(ps.InvalidInput, match="shapes= must say every dim"):
        ps.compile(MODEL, shapes={"x": [True, 2]})
