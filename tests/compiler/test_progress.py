"""How far compiling and measuring have come is told."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests.support.onnx_text import compile_text

TEXT = "g (float[N, 3] x) => (float[N, 3] y) { a = Exp(x) y = Neg(a) }"


X = {"x": np.ones((2, 3), np.float32)}


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, int]] = []

    def __call__(self, step: str, done: int, total: int) -> None:
        self.steps.append((step, done, total))


def ends(told: Told) -> list[str]:
    """The last step of each part of the work; the others must count up to it."""
    last, names = 0, []
    for step, done, total in told.steps:
        assert done == last or done == 0
        last = done + 1
        if done == total:
            names.append(step)
    return names


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_compiling_is_told_stage_by_stage(executor: str) -> None:
    told = Told()
    session = compile_text(TEXT, executor=executor, progress=told)
    assert told.steps == [("read the model", 0, 1)]
    session.run(X)
    assert ends(told) == ["compiled"]
    assert ("specialize", 0, told.steps[-1][2]) in told.steps
    count = len(told.steps)
    session.run(X)
    assert len(told.steps) == count
    session.run({"x": np.ones((5, 3), np.float32)})
    assert len(told.steps) > count or executor == "frames"


def test_measuring_is_told() -> None:
    told = Told()
    session = compile_text(TEXT, backends=["numpy"], threads=1)
    session.profile(X, runs=3, progress=told)
    assert ends(told)[-1] == "measured the plan"
    assert "measured nodes" in ends(told)
    assert any(step.startswith("measure nodes on numpy") for step, _, _ in told.steps)


def test_error_of_the_function_ends_compiling_and_leaves_the_session_usable() -> None:
    failures = iter([True])

    def fail(step: str, done: int, total: int) -> None:
        if step == "specialize" and next(failures, False):
            raise KeyError(step)

    session = compile_text(TEXT, progress=fail)
    with pytest.raises(KeyError):
        session.run(X)
    assert session.run(X)["y"].shape == (2, 3)


def test_wrong_progress_is_refused_and_a_pickle_has_none() -> None:
    with pytest.raises(TypeError, match="progress=3"):
        compile_text(TEXT, progress=3)
    session = compile_text(TEXT)
    with pytest.raises(TypeError, match="progress='x'"):
        session.profile(X, progress="x")
    copy = pickle.loads(pickle.dumps(compile_text(TEXT, progress=lambda *step: None)))
    assert copy.options.progress is False
