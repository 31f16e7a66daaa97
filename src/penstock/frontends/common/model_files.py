"""Open the files of a model: regular files only, and inside a folder none behind a link.

A path that the user gives is followed through links. A location that a file names is not: it is
opened component by component below the model's folder, and none of them may be a link, nor may the
file have a second name, so that a model cannot make Penstock read anything outside of its folder.
Where the model's path is itself a link, files beside it may be links to where it leads.
Anything but a regular file (a FIFO, a device) is never opened: reading it might not end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, BinaryIO

from penstock.core.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path

HEAD_BYTES = 512
"""bytes of a file's beginning that identify its format"""

_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# A FIFO may replace a file after the check; opening it must not block.
_CAREFUL = _FLAGS | getattr(os, "O_NONBLOCK", 0)
_NO_LINK = _CAREFUL | getattr(os, "O_NOFOLLOW", 0)


Opened = tuple["str | Path", "os.stat_result | None"]
"""a file, and its status just before it was opened"""

_OPENED: ContextVar[list[Opened] | None] = ContextVar("_OPENED", default=None)


@contextmanager
def opened_files() -> Iterator[list[Opened]]:
    """Return a list to which all files are added that are opened in the block."""
    paths: list[Opened] = []
    token = _OPENED.set(paths)
    try:
        yield paths
    finally:
        _OPENED.reset(token)


def _note(path: str | Path) -> None:
    paths = _OPENED.get()
    if paths is not None:
        status = None
        with suppress(OSError, ValueError):
            status = os.stat(path)  # before the file is opened: later changes are then noticed
        paths.append((path, status))


def open_path(path: str | Path) -> BinaryIO:
    """Open the file that a user names, which may be a link. Raises ``InvalidModel``."""
    _note(path)
    try:
        _check_type(os.stat(path))
        return _regular(os.open(path, _CAREFUL), path, names=None)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidModel(f"{os.fspath(path)!r} cannot be read: {reason}") from error


def is_pointer(head: bytes) -> bool:
    """Whether a file that begins with ``head`` is a Git LFS pointer to a file stored elsewhere."""
    return head.startswith(b"version https://git-lfs")


def open_inside(folder: Path, location: str) -> BinaryIO:
    """Open the file at ``location``, a relative path, inside the model's folder. Raises
    ``ValueError`` with a reason."""
    _note(folder / location)
    try:
        return _regular(_descriptor(folder, _components(location)), folder / location, names=1)
    except OSError as error:
        raise ValueError(error.strerror) from error


def open_beside(model: str, location: str) -> BinaryIO:
    """Open the file at ``location``, a relative path, inside the folder of the file ``model``; or
    beside what ``model`` leads to, if both are links into one folder: download caches, as that of
    huggingface_hub, keep files so. Raises ``ValueError`` with a reason."""
    from pathlib import Path

    folder = os.path.dirname(model) or os.curdir
    path = os.path.join(folder, *_components(location))
    if os.path.islink(model) and os.path.islink(path):
        store, name = os.path.split(os.path.realpath(path))
        if store == os.path.dirname(os.path.realpath(model)):
            _note(path)  # the link may lead elsewhere later
            folder, location = store, name
    return open_inside(Path(folder), location)


def _components(location: str) -> list[str]:
    """Return the folders and the file of a relative location, of which none may lead upward."""
    from pathlib import PureWindowsPath

    if PureWindowsPath(location).anchor or ".." in location.replace("\\", "/").split("/"):
        raise ValueError("that leads out of the model's folder")
    parts = [part for part in location.replace(os.sep, "/").split("/") if part not in ("", ".")]
    if not parts or "\0" in location:
        raise ValueError("that is not the name of a file")
    return parts


def _descriptor(folder: Path, parts: list[str]) -> int:
    """Return a descriptor of ``folder/parts``, opened without following links."""
    if os.open not in os.supports_dir_fd:  # checking for links then leaves a race
        path = folder
        for part in parts:
            path = path / part
            _check_type(os.lstat(path))
        return os.open(path, _NO_LINK)
    current = os.open(folder, _FLAGS | os.O_DIRECTORY)
    for i, part in enumerate(parts):
        mode = os.O_DIRECTORY if i < len(parts) - 1 else 0
        try:
            _check_type(os.stat(part, dir_fd=current, follow_symlinks=False))
            following = os.open(part, _NO_LINK | mode, dir_fd=current)
        finally:
            os.close(current)
        current = following
    return current


def _check_type(status: os.stat_result) -> None:
    """Raise ``ValueError`` unless the file may be opened."""
    if stat.S_ISLNK(status.st_mode):
        raise ValueError("that is a symbolic link, or inside one; copy the file")
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise ValueError("that is not a regular file")


def _regular(descriptor: int, path: str | Path, *, names: int | None) -> BinaryIO:
    """Return the open file of a descriptor, with its path as its name. Raises ``ValueError`` unless
    it is a regular file with at most this number of ``names``."""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("that is not a regular file")
        # Another name may lie outside of the folder.
        if names is not None and status.st_nlink > names:
            raise ValueError("that file has several names (hard links); copy it")
        return open(path, "rb", opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise
