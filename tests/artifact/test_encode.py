"""What can be saved, and what cannot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.ir.graph import Model
from tests.session.test_artifact import assert_same, net, only_saved_plans
from tests.support.onnx_text import compile_text
from tests.support.random_graphs import feeds_for, seeded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.penstock"


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_survive_saving(path: Path, seed: int) -> None:
    graph = seeded(seed)
    model = Model({graph.name: graph}, graph.name)
    feeds = {k: v for k, v in feeds_for(seed).items() if k in {x.name for x in graph.inputs}}
    session = ps.compile(model, executor="linear")
    expected = session.run(feeds)
    session.save(path)
    opened = ps.open(path)
    with only_saved_plans():
        got = opened.run(feeds)
    for name, value in expected.items():
        np.testing.assert_equal(got[name], value)


def test_long_lists_and_texts_survive_saving(path: Path) -> None:
    values = [float(x) / 7 for x in range(500)]
    text = f"""g (float[1] x) => (float[500] y, string[2] s)
        <string[2] t = {{"a", "\\u00e9"}}> {{
        c = Constant<value_floats={values}>() y = Mul(c, x) s = Identity(t) }}"""
    session = compile_text(text, backends=["numpy"])
    x = {"x": np.array([3], np.float32)}
    expected = session.run(x)
    session.save(path)
    assert_same(ps.open(path).run(x), expected)


def test_attribute_that_is_no_data_cannot_be_saved(path: Path) -> None:
    session = net()
    session.model.graph.nodes[0].attrs["callback"] = print
    with pytest.raises(ps.PenstockError, match="attribute 'callback' is a builtin_function"):
        session.save(path)
    assert not list(path.parent.iterdir())


@pytest.mark.parametrize("place", ["missing/file.penstock", "folder"])
def test_session_that_cannot_be_saved_names_the_file_and_leaves_none(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    session = compile_text("g (float[2] x) => (float[2] y) { y = Neg (x) }")
    with pytest.raises(OSError, match=r"No such file|Is a directory") as raised:
        session.save(tmp_path / place)
    assert raised.value.filename == str(tmp_path / place)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
