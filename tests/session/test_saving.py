"""What a file has of a session."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import penstock as ps
from penstock.artifact.container import ArtifactFile
from penstock.core.limits import DEFAULT_LIMITS
from penstock.session.saving import has_state
from tests.support.onnx_text import model_from_text
from tests.support.variable_models import summing

MODEL = "g (float[N, 4] x, float[4, 4] w) => (float[N, 4] y) { m = MatMul(x, w) y = Relu(m) }"


def session_of(rows: list[int]) -> ps.Session:
    session = ps.compile(model_from_text(MODEL), threads=1)
    for n in rows:
        session.run({"x": np.ones((n, 4), np.float32), "w": np.eye(4, dtype=np.float32)})
    return session


def head_of(path: Path) -> dict:
    with path.open("rb") as file:
        return ArtifactFile(file, path.name, DEFAULT_LIMITS).head


def test_file_has_a_plan_for_each_set_of_shapes(tmp_path: Path) -> None:
    session_of([2, 3, 2]).save(tmp_path / "session")
    assert len(head_of(tmp_path / "session")["plans"]) == 2


def test_head_has_only_options_that_are_not_the_default(tmp_path: Path) -> None:
    session_of([2]).save(tmp_path / "session")
    assert head_of(tmp_path / "session")["options"] == {"threads": 1}


def test_equal_sessions_have_equal_files(tmp_path: Path) -> None:
    for name in ("one", "other"):
        session_of([2, 3]).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_only_models_with_variables_have_state() -> None:
    assert not has_state(ps.load(model_from_text(MODEL)))
    assert has_state(ps.load(summing()))
