"""SavedModels whose state is strings, a table that can change, or variables that are updated in places
(``models/tf_ops/make_state.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from tests.support.recorded import Recorded

MODELS = Recorded([Path(__file__).parents[2] / "models" / "tf_saved" / "state.npz.xz"])


@pytest.mark.parametrize("name", MODELS.names)
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_state_matches_tensorflow(name: str, executor: str, tmp_path: Path) -> None:
    MODELS.check(name, ps.compile(MODELS.saved(name, tmp_path), executor=executor))


def test_updates_in_places_stay_for_the_next_run(tmp_path: Path) -> None:
    session = ps.compile(MODELS.saved("Scattered", tmp_path))
    feeds = MODELS.part("Scattered", "in")
    first, second = session.run(feeds), session.run(feeds)
    assert second["text"].tolist() == ["p!!", "q!!"]
    np.testing.assert_array_equal(first["update"][1], second["update"][1])  # not among the indices
    assert (second["add"][0] != first["nd_max"][0]).any()


def test_strings_of_a_checkpoint_are_kept_in_an_artifact(tmp_path: Path) -> None:
    session = ps.compile(MODELS.saved("Index", tmp_path / "model"))
    session.save(tmp_path / "saved.penstock")
    out = ps.open(tmp_path / "saved.penstock").run(MODELS.part("Index", "in"))
    np.testing.assert_array_equal(out["names"], MODELS.part("Index", "out")["names"])


@pytest.mark.parametrize("part", ["length", "byte"])
def test_damaged_strings_of_a_checkpoint_are_refused(part: str, tmp_path: Path) -> None:
    MODELS.saved("Index", tmp_path)
    file = tmp_path / "variables" / "variables.data-00000-of-00001"
    data = file.read_bytes()
    text = data.index(b"long long")
    if part == "byte":
        data = data[:text] + b"L" + data[text + 1 :]
    else:  # the first of five lengths, before their checksum and the strings
        place = data.index(bytes([1, 0, 5, 3, 200, 1]))
        data = data[:place] + b"\x7f" + data[place + 1 :]
    file.write_bytes(data)
    match = {"length": "which do not fit its 5 strings", "byte": "checksum does not match"}[part]
    with pytest.raises(ps.InvalidModel, match=match):
        ps.compile(tmp_path)
