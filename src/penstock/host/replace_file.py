"""Replace a file completely or not at all.

The bytes go to a file without a name, which the system deletes with the process (``O_TMPFILE`` of
Linux). It gets a name just before it replaces the old file, which processes that have it open or
mapped keep. Systems without such files use a hidden one beside ``path``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

# Error codes of file systems that have no files without a name.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces the one at ``path`` when it is complete, with the old file's
    mode and owner, or those of any new file. A link stays, and its target is replaced. Raises
    ``OSError``, also for a path that is not a regular file: a folder, a pipe, a device."""
    with _named(path):
        target = path.resolve()
        old = _status(target)
        if old is not None and stat.S_ISDIR(old.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if old is not None and not stat.S_ISREG(old.st_mode):
            raise OSError(errno.EINVAL, "only a regular file can be replaced")
        descriptor, name = _create(target)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            if old is not None:
                _take_over(descriptor, old)
            # Before the file gets its name: after a power loss the name could refer to a file
            # without its bytes.
            os.fsync(descriptor)
            with _named(path):
                name = name or _give_name(descriptor, target)
        with _named(path):
            os.replace(name, target)
    except BaseException:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)
        raise


def _status(target: Path) -> os.stat_result | None:
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def _create(target: Path) -> tuple[int, Path | None]:
    """Return a descriptor of a new file in the folder of ``target``, and its name if it has one.
    The system applies the umask to its mode."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(target.parent, flags | os.O_TMPFILE, 0o666), None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    name = _hidden(target)
    flags |= os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(name, flags, 0o666), name


def _hidden(target: Path) -> Path:
    """Return an unused name beside ``target``. A file system takes names of up to 255 bytes."""
    return target.with_name(f".{os.urandom(8).hex()}.{target.name[:50]}")


def _take_over(descriptor: int, old: os.stat_result) -> None:
    if hasattr(os, "fchmod"):
        with suppress(PermissionError):  # only the administrator may change the owner
            os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _give_name(descriptor: int, target: Path) -> Path:
    """Link the file of a descriptor under an unused name."""
    name = _hidden(target)
    # With a descriptor of a folder, even one that is not used, Python asks the system to follow
    # the link.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return name


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let errors of the system name ``path``, not the temporary file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
