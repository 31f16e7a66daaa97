"""Files of models are regular files, and inside a model's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import InvalidModel
from penstock.frontends.common.model_files import open_inside, open_path
from tests.support.processes import end_of

FROZEN = Path(__file__).parents[2] / "models" / "tf_saved" / "frozen"
PARTS = (
    "saved_model.pb",
    "variables",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A SavedModel, with a folder beside it for what a model must not get hold of."""
    (tmp_path / "outside").mkdir()
    shutil.copytree(FROZEN, tmp_path / "model")
    return tmp_path / "model"


def symbolic(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def hard(path: Path, outside: Path) -> None:
    os.link(outside, path)


@pytest.mark.parametrize(
    ("part", "link"),
    [*((part, symbolic) for part in PARTS), *((part, hard) for part in PARTS if "." in part)],
)
def test_saved_model_with_a_link_is_refused(
    folder: Path, part: str, link: Callable[[Path, Path], None]
) -> None:
    assert ps.compile(folder).inputs
    outside = folder.parent / "outside" / "part"
    (folder / part).rename(outside)
    link(folder / part, outside)
    with pytest.raises(InvalidModel, match="inside its folder"):
        ps.load(folder)


def test_saved_model_behind_a_link_is_accepted(folder: Path) -> None:
    (folder.parent / "alias").symlink_to(folder)
    assert ps.load(folder.parent / "alias").graphs


def test_link_that_the_user_names_is_followed(folder: Path) -> None:
    (folder.parent / "alias.bin").symlink_to(folder / "saved_model.pb")
    with open_path(folder.parent / "alias.bin") as file:
        assert file.read() == (folder / "saved_model.pb").read_bytes()


LOADS = """
import sys, penstock as ps
try:
    ps.load(sys.argv[1])
except ps.InvalidModel as error:
    print(error)
"""


@pytest.mark.parametrize("part", PARTS)
def test_saved_model_with_a_fifo_is_refused(folder: Path, part: str) -> None:
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.mkfifo(path)
    message = end_of(LOADS, str(folder))
    # A FIFO in place of the folder holds no index, so that the model has no variables.
    assert "that is not a regular file" in message or part == "variables"


@pytest.mark.parametrize("name", ["m.onnx", "m.pb", "m.pbtxt", "m", "saved_model.pb"])
def test_model_that_is_a_fifo_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "that is not a regular file" in end_of(LOADS, str(tmp_path / name))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no such device")
def test_device_is_refused(tmp_path: Path) -> None:
    for name in ("m.onnx", "m.pb", "m.pbtxt"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(InvalidModel, match="that is not a regular file"):
            ps.load(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file of Linux")
@pytest.mark.parametrize("path", ["/proc/self/mem", "x" * 5000 + ".onnx"])
def test_file_that_the_system_does_not_read_is_refused(path: str) -> None:
    with pytest.raises(InvalidModel, match=r"cannot be read|there is no file"):
        ps.compile(path)


def test_refused_files_leave_no_descriptor_open(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "saved_model.pb")
    os.link(folder / "saved_model.pb", folder / "hard")
    os.mkfifo(folder / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for location in (
        "link",
        "hard",
        "pipe",
        "variables",
        "nothing",
        "../model/pipe",
        "a\0",
        "link/a",
    ):
        with pytest.raises(ValueError):
            open_inside(folder, location)
        with pytest.raises(InvalidModel):
            open_path(folder / "variables" / location)
    assert len(os.listdir("/proc/self/fd")) == before
