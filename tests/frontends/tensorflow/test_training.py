"""Training steps that are exported as SavedModels give over a hundred steps what TensorFlow gave
(``models/tf_ops/make_training.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.recorded import Recorded
from tests.support.sweeps import drawn

MODELS = Recorded([Path(__file__).parents[2] / "models" / "tf_saved" / "training.npz.xz"])
OTHERS = ("dataflow", "parallel", "streams", "frames", "interpret")


def check(name: str, executor: str, folder: Path) -> None:
    """That the losses of all steps, and the weights after the last, are TensorFlow's."""
    for file, content in MODELS.part(name, "file").items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())
    batches, wanted = MODELS.part(name, "in"), MODELS.part(name, "out")
    session = ps.compile(folder, executor=executor)
    losses = []
    for step in range(len(wanted["loss"])):
        out = session.run({key: x[step % len(x)] for key, x in batches.items()})
        losses.append(out["loss"])
    out["loss"] = np.array(losses)
    for key, want in wanted.items():
        assert (out[key].dtype, out[key].shape) == (want.dtype, want.shape), key
        np.testing.assert_allclose(out[key], want, rtol=1e-3, atol=5e-5, err_msg=key)


@pytest.mark.parametrize("name", MODELS.names)
def test_training_matches_tensorflow(name: str, tmp_path: Path) -> None:
    check(name, "auto", tmp_path)


SOME = ["mlp_Adam", "lstm_Momentum", "convolutional_GradientDescent"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "executor"), drawn([(name, other) for name in SOME for other in OTHERS], 4)
)
def test_training_matches_tensorflow_on_other_executors(
    name: str, executor: str, tmp_path: Path
) -> None:
    check(name, executor, tmp_path)


@pytest.mark.costly
@pytest.mark.parametrize("executor", drawn(["parallel", "auto", "streams", "frames"], 2))
def test_measuring_is_no_training_step(executor: str, tmp_path: Path) -> None:
    """Neither ahead of the first run, with ``autotune``, nor by ``profile``."""
    name = "convolutional_GradientDescent"
    for file, content in MODELS.part(name, "file").items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())
    batches, wanted = MODELS.part(name, "in"), MODELS.part(name, "out")
    session = ps.compile(tmp_path, executor=executor, autotune=True)
    for step in range(3):
        feeds = {key: x[step % len(x)] for key, x in batches.items()}
        before = {key: np.array(value) for key, value in session.variables.items()}
        session.profile(feeds, runs=2)
        for key, value in session.variables.items():
            np.testing.assert_array_equal(value, before[key])
        loss = session.run(feeds)["loss"]
        np.testing.assert_allclose(loss, wanted["loss"][step], rtol=1e-3)
