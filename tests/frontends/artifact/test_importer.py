"""Saved sessions as models."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from tests.session.test_artifact import assert_same, image, net


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.penstock"


def test_saved_session_is_a_model_like_any_other(path: Path) -> None:
    session = net()
    expected = session.run(image())
    session.save(path)
    assert_same(ps.compile(path).run(image()), expected)
    assert ps.load(path).graph.nodes[0].op.name == "Conv"
