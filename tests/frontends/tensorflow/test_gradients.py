"""Gradients of TensorFlow's loops, branches and tensor arrays equal TensorFlow's
(``models/tf_ops/make_loop_gradients.py``)."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.recorded import Recorded
from tests.support.sweeps import drawn

LOOPS = Recorded([Path(__file__).parents[2] / "models" / "tf_gradients" / "loops.npz.xz"])
OTHERS = ("dataflow", "parallel", "streams", "interpret")


def check(session: ps.Session, name: str) -> None:
    wanted = LOOPS.part(name, "out")
    out = session.run(LOOPS.part(name, "in"), list(wanted))
    for key, want in wanted.items():
        assert (out[key].dtype, out[key].shape) == (want.dtype, want.shape), key
        np.testing.assert_allclose(out[key], want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "executor"), drawn(product(LOOPS.names, ["auto", "frames"]), 34))
def test_gradient_matches_tensorflow(name: str, executor: str) -> None:
    session = ps.compile(LOOPS.graph(name), executor=executor)
    check(session, name)
    check(session, name)  # nothing is left of the first run


@pytest.mark.parametrize(("name", "executor"), drawn(product(LOOPS.names, OTHERS), 20))
def test_gradient_matches_tensorflow_on_other_executors(name: str, executor: str) -> None:
    check(ps.compile(LOOPS.graph(name), executor=executor), name)


@pytest.mark.parametrize("name", drawn(LOOPS.names, 17))
def test_gradient_runs_without_frames(name: str) -> None:
    session = ps.compile(LOOPS.graph(name))
    check(session, name)  # the whole graph has outputs inside of frames
    assert session.effective.executor == "linear"


@pytest.mark.parametrize("name", ["v2_branches_in_nested_loops", "v2_nested_arrays"])
def test_gradient_that_is_saved_as_an_artifact_matches_tensorflow(
    name: str, tmp_path: Path
) -> None:
    ps.compile(LOOPS.graph(name)).save(tmp_path / "saved.penstock")
    check(ps.open(tmp_path / "saved.penstock"), name)
