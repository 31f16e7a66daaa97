"""A file takes the place of another whole, with its mode, and leaves nothing if it fails."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.host.replace_file import replacing


def write(path: Path, content: bytes = b"new") -> None:
    with replacing(path) as file:
        file.write(content)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=["unnamed", "named"])
def path(request, tmp_path, monkeypatch) -> Path:
    """A path in an empty folder, on systems with and without files that have no name."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    return tmp_path / "file"


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_new_file_has_the_mode_that_the_umask_leaves(path, umask):
    before = os.umask(umask)
    try:
        write(path)
    finally:
        os.umask(before)
    assert mode(path) == 0o666 & ~umask
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o664])
def test_file_that_is_replaced_gives_its_mode_to_the_new_one(path, bits):
    path.write_bytes(b"old")
    path.chmod(bits)
    write(path)
    assert (mode(path), path.read_bytes()) == (bits, b"new")


def test_link_stays_and_its_file_is_replaced(path):
    target = path.with_name("target")
    target.write_bytes(b"old")
    path.symlink_to("target")
    write(path)
    assert path.is_symlink()
    assert target.read_bytes() == b"new"


def test_link_to_nothing_makes_the_file_it_leads_to(path):
    path.symlink_to("target")
    write(path)
    assert path.is_symlink()
    assert path.with_name("target").read_bytes() == b"new"


def test_pipe_stays_and_is_named(path):
    os.mkfifo(path)
    with pytest.raises(OSError, match=f"only a regular file can be replaced.*{path.name}"):
        write(path)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_device_stays(path):
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match="only a regular file"):
        write(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_folder_stays_and_is_named(path):
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=path.name):
        write(path)


def test_folder_that_is_not_there_is_named_by_the_path(path):
    with pytest.raises(FileNotFoundError) as caught:
        write(path / "file")
    assert caught.value.filename == str(path / "file")


def test_failure_leaves_the_old_file_and_nothing_beside_it(path):
    path.write_bytes(b"old")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == ["file"]


def test_long_name_is_written(path):
    long = path.with_name("n" * 255)
    write(long)
    assert os.listdir(path.parent) == [long.name]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="the system has no files without a name")
def test_killed_process_leaves_nothing_beside_the_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = (
        "import os, sys, signal; from pathlib import Path\n"
        "from penstock.host.replace_file import replacing\n"
        "with replacing(Path(sys.argv[1])) as file:\n"
        "    file.write(bytes(1 << 20)); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == b"old"
