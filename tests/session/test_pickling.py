"""Pickled sessions come back as they were."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import penstock as ps
from tests.executors.test_variables import VERSION_1, add, counter, unset
from tests.frontends.tflite.test_importer import accumulating
from tests.session.test_signatures import two_signatures
from tests.support.onnx_text import model_from_text

TEXT = """
affine (float[N, 3] x, float s) => (float[N, 3] y, float z)
<float[3] w = {1, 2, 3}>
{
    a = Mul(x, s)
    y = Add(a, w)
    z = ReduceMax<keepdims=0>(y)
}
"""
X = np.ones((2, 3), np.float32), np.float32(3)


def again(session: ps.Session) -> ps.Session:
    copy = pickle.loads(pickle.dumps(session))
    assert isinstance(copy, ps.Session)
    return copy


def same(copy: ps.Session, original: ps.Session, *inputs: Any) -> None:
    assert [str(port) for port in copy.inputs] == [str(port) for port in original.inputs]
    got, want = copy(*inputs), original(*inputs)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", ["path", "bytes", "proto", "model", "saved"])
def test_session_is_pickled_with_its_options(form: str, tmp_path: Path) -> None:
    proto, path = model_from_text(TEXT), tmp_path / "m.onnx"
    onnx.save(proto, path)
    options: dict[str, Any] = {"executor": "dataflow", "limits": ps.Limits(max_iterations=5)}
    if form == "saved":
        ps.compile(proto, **options).save(tmp_path / "m.penstock")
        original = ps.open(tmp_path / "m.penstock", limits=options["limits"])
    else:
        content = proto.SerializeToString()
        sources = {"path": path, "bytes": content, "proto": proto, "model": ps.load(content)}
        original = ps.compile(sources[form], **options)
    copy = again(again(original))
    assert copy.options.executor == "dataflow"
    assert copy.limits == original.limits
    same(copy, original, *X)


def test_environment_decides_on_no_option_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(ps.compile(model_from_text(TEXT), executor="auto"))
    monkeypatch.setenv("PENSTOCK_EXECUTOR", "frames")
    assert pickle.loads(pickled).options.executor == "auto"


def test_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(model_from_text(TEXT), tmp_path / "m.onnx")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    for original in (ps.compile("m.onnx"), ps.compile(ps.load("m.onnx"))):
        monkeypatch.chdir(tmp_path / "other")
        same(again(original), original, *X)
        monkeypatch.chdir(tmp_path)


def test_chosen_signature_of_a_model_in_memory_is_kept() -> None:
    original = ps.compile(two_signatures(), signature="add")
    one = np.ones(2, np.float32)
    same(again(original), original, one, one)


def test_values_of_variables_come_back() -> None:
    original = counter()
    add(original, 3)
    copy = again(original)
    assert add(copy, 2) == 5
    assert original.variables["n"] == 3
    in_memory = ps.compile(accumulating())
    one = np.ones(2, np.float32)
    in_memory(one)
    np.testing.assert_array_equal(again(in_memory)(one), [12, 12])


def test_values_of_variables_without_a_first_one_come_back() -> None:
    original = ps.compile(unset())
    assert again(original).variables.get("v") is None
    original.variables["v"] = [1, 2]
    np.testing.assert_array_equal(again(original).run({}, ["y"])["y"], [1, 2])


def test_variables_that_are_as_at_first_take_no_bytes() -> None:
    sessions = counter(), ps.compile(VERSION_1)
    assert all(len(pickle.dumps(session)) < 5000 for session in sessions)
    assert not sessions[0].variables.state()
    add(sessions[0], 1)
    assert list(sessions[0].variables.state()) == ["n"]
