"""The compile cache: compiled sessions in a folder, found by the contents of a model's files.

::

    2f8a…91.penstock   a saved session, named by the checksum of a key: a digest of the model's
                       bytes and everything else that its plans depend on; the file has the full key
    77b0…3c.digest     the digest of one file, with the status of that file: it is used
                       again while the status is the same

With ``compile(cache=...)`` a session is kept when plans are compiled. Without it (``by_default``)
a session of a model in a file is kept in the user's folder when the session or the process ends, if
it is small: files are identified by their status (device, inode, size and times), and sessions that
cannot be kept are skipped silently.

Weights with the same layout in the model's files as in memory are read from there. Files are
written under a temporary name and then renamed, so that several processes may share a folder. The
modification time of a saved session is that of its last use; the least recently used are removed
while all together have more than ``MOST_BYTES``.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from typing import TYPE_CHECKING
from zlib import adler32, crc32

from penstock.artifact import VERSION
from penstock.backends.registry import BACKENDS, available, describe
from penstock.compiler.options import CompileOptions
from penstock.core import errors
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, warn
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.records import cached_property, dataclass
from penstock.frontends.common.model_files import Opened, open_inside, open_path
from penstock.host.machine import cache_folder, machine_name
from penstock.ir.graph import Model
from penstock.ops.registry import USER_OPERATIONS
from penstock.session.environment import VARIABLES

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    import numpy as np

    from penstock.artifact.writer import ArtifactWriter

# Most models are not in the cache: what reads and writes sessions is imported when it is needed.

MOST_BYTES = 1 << 30
"""bytes of saved sessions that a folder may have"""
MOST_BY_DEFAULT = 32 << 20
"""bytes of the largest entry that is written by default, without weights in the model's files"""
MOST_PLANS = 16
"""plans of one session that are kept"""
MOST_FILES = 1000
"""files that the folder of a model may have"""
_PIECE = 1 << 24
# A file that changed this shortly before it was read may change again without a new time stamp.
_SETTLED_NS = 2_000_000_000
# Options that determine what is compiled. A file cannot identify the values of those listed after
# them, and all other options concern only this process.
_KEYED = (
    *("executor", "place", "threads", "precision", "memory_planner", "max_streams", "limits"),
    *("signature", "map_weights", "autotune", "fixed_threads", "reproducible"),
)
_UNTOLD = ("cost_model", "grouping", "devices", "after_pass", "variables")


def folder_of(cache: bool | str | Path | None) -> str:
    """Return the folder of ``cache=``: the user's for True and None, "" if none is used."""
    if cache not in (True, None):
        return str(cache)
    folder = cache_folder()
    return folder and os.path.join(folder, "sessions")


def entries(folder: str) -> list[tuple[str, os.stat_result]]:
    """Return the names of a folder's saved sessions, most recently used first."""
    sessions = []
    for name in _names(folder, ".penstock"):
        with suppress(OSError):  # another process is removing it
            sessions.append((name, os.stat(os.path.join(folder, name))))
    return sorted(sessions, key=lambda entry: -entry[1].st_mtime_ns)


def _names(folder: str, *endings: str) -> list[str]:
    with suppress(FileNotFoundError):
        return [name for name in os.listdir(folder) if name.endswith(endings)]
    return []


def clear(folder: str) -> int:
    """Remove all files of the cache in a folder; return the bytes of the saved sessions."""
    freed = sum(status.st_size for _, status in entries(folder))
    for name in _names(folder, ".penstock", ".digest"):
        _remove(os.path.join(folder, name))
    return freed


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # another process was faster
        os.unlink(path)


def cache_entry(model: object, options: CompileOptions, form: str = "") -> CacheEntry | None:
    """Return the place of a model in the folder of ``cache=``, by default the user's. ``form`` says
    what is derived from the model. Return None if there is no place; if ``cache=`` is given, warn
    that some options cannot identify a session. Raises ``ValueError`` for a model that is neither a
    path nor bytes."""
    by_default = options.cache is None
    if not isinstance(model, str | os.PathLike | bytes):
        raise ValueError(
            f"cache= needs the path or the bytes of a model, not a {type(model).__name__}; save "
            "the session with Session.save instead"
        )
    untold = [name for name in _UNTOLD if options.get(name) is not None]
    if not all(isinstance(backend, str) for backend in options.backends or ()):
        untold.append("backends")
    if untold:
        if not by_default:
            reason = f"{untold[0]}= is an object of this process, by which it cannot be found again"
            warn(f"cache= keeps no session: {reason}")
        return None
    # User-defined operations and backends may differ in the next process.
    if by_default and (USER_OPERATIONS or not {*(options.backends or ())} <= BACKENDS.keys()):
        return None
    source = model if isinstance(model, bytes) else os.fspath(model)
    folder = folder_of(options.cache)
    if not folder or not (isinstance(source, bytes) or os.path.exists(source)):
        return None
    # Plans of a cluster cannot be saved.
    if by_default and (options.cluster is not None or not _is_private(folder)):
        return None
    return CacheEntry(folder, source, options, by_default, errors.warnings_given, form)


def _is_private(folder: str) -> bool:
    """Whether only the user can write to a folder, or it does not exist: an entry written by
    another user could give wrong answers."""
    try:
        status = os.stat(folder)
    except OSError:
        return True
    # On Windows a user's folders are private.
    is_own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return is_own and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022


@cache
def _program() -> list[object]:
    """Return what plans depend on besides model and options: formats, the machine, this program."""
    root = os.path.dirname(os.path.dirname(__file__))
    # An installed package is written at once; in a working copy any file may change.
    home = os.path.basename(os.path.dirname(root))
    is_installed = home in ("site-packages", "dist-packages")
    times = [os.stat(__file__).st_mtime_ns] if is_installed else [*_times(root)]
    return [VERSION, machine_name(), len(times), max(times, default=0)]


def _times(folder: str) -> Iterator[int]:
    """Yield the modification times of the program's files below a folder, in ns."""
    with os.scandir(folder) as folder_entries:
        for entry in folder_entries:
            if entry.name.endswith((".py", ".so", ".pyd", ".txt")):
                yield entry.stat().st_mtime_ns
            elif "." not in entry.name and entry.name != "__pycache__":
                yield from _times(entry.path)


def _open_beside(folder: str, path: str) -> BinaryIO:
    from pathlib import Path  # most models have all weights in one file

    return open_inside(Path(folder), path)


@dataclass
class CacheEntry:
    """The place of one model with given options in a folder. ``opened``: the files that were opened
    while the model was loaded. ``unsaved``: the number of the session's plans that are not saved.
    ``warnings_before``: the number of warnings of the process before. ``form``: what replaces the
    file's model in the session (``DerivedModel``), if anything."""

    folder: str
    source: str | bytes
    options: CompileOptions
    by_default: bool
    warnings_before: int
    form: str = ""
    opened: Sequence[Opened] = ()
    unsaved: int = 0

    @cached_property
    def key(self) -> str:
        """Everything that the session depends on, as JSON."""
        keyed = {
            "files": self._files,
            "form": self.form,
            "program": _program(),
            "options": {name: repr(self.options.get(name)) for name in _KEYED},
            # The model's own options apply where the caller gives none.
            "environment": [os.environ.get(name, "") for name in VARIABLES],
            # In the given order, since plans prefer the first.
            "backends": [[b, describe(str(b))] for b in self.options.backends or available()],
            "costs": self._costs,
        }
        return json.dumps(keyed, sort_keys=True)

    @cached_property
    def path(self) -> str:
        """The file of the session. It contains the whole key, since names may collide."""
        key = self.key.encode()  # a checksum, as importing a hash library would take milliseconds
        return os.path.join(self.folder, f"{crc32(key):08x}{adler32(key):08x}.penstock")

    @property
    def _costs(self) -> list[int]:
        """Return the status of the file of measured costs, on which plans depend; [] if none."""
        with suppress(OSError):
            return _status(os.stat(os.path.join(cache_folder(), "costs.sqlite")))
        return []

    @cached_property
    def _files(self) -> str | dict[str, str]:
        """The digests by which a session is found."""
        return self._digests()

    def _digests(self) -> str | dict[str, str]:
        """Return the digest of the model's bytes, or the digests of a folder's files by path."""
        source = self.source
        if isinstance(source, bytes):
            from penstock.core.digests import digest

            return digest(source)
        if not os.path.isdir(source):
            return self._digest(source)
        files: list[str] = []
        for folder, _, own in os.walk(source):
            files += [os.path.join(folder, name) for name in own]
            if len(files) > MOST_FILES:  # not a model, but perhaps a home directory
                raise OSError(f"{source!r} has more than {MOST_FILES:,} files")
        return {os.path.relpath(path, source): self._digest(path) for path in sorted(files)}

    def _is_unchanged(self) -> bool:
        return isinstance(self.source, bytes) or self._digests() == self._files

    def _digest(self, path: str) -> str:
        """Return the digest of a file, taken from the folder if the file has not changed. In the
        default cache it is the file's status."""
        status = _status(os.stat(path))
        if self.by_default:
            # A file that may still change gets a digest that is never found again.
            now = time.time_ns()
            return str([*status, now] if now - max(status[-2:]) < _SETTLED_NS else status)
        from penstock.core.digests import blake2b

        real = os.fsencode(os.path.realpath(path))
        name = blake2b(real, digest_size=16).hexdigest()
        kept = os.path.join(self.folder, f"{name}.digest")
        with suppress(OSError, ValueError, TypeError), open(kept) as text_file:
            before, digest = json.load(text_file)
            if before == status and type(digest) is str:
                return digest
        digest = blake2b(digest_size=16)
        with open_path(path) as file:
            while piece := file.read(_PIECE):
                checkpoint()
                digest.update(piece)
            after = _status(os.fstat(file.fileno()))
        text = digest.hexdigest()
        if after == status and time.time_ns() - max(after[-2:]) > _SETTLED_NS:
            from pathlib import Path

            from penstock.host.replace_file import replacing

            with suppress(OSError), replacing(Path(kept)) as written:
                written.write(json.dumps([status, text]).encode())
        return text

    @property
    def _base(self) -> str:
        """The folder that contains the model's files."""
        source = os.path.abspath(self.source) if isinstance(self.source, str) else os.curdir
        return source if os.path.isdir(source) else os.path.dirname(source)

    def load(self) -> Model | None:
        """Return the model with its saved plans, or None if there are none for these files."""
        limits = self.options.limits or DEFAULT_LIMITS
        try:
            if not os.path.isfile(self.path):
                return None
            from penstock.frontends.artifact.importer import load_artifact

            # Mapping is safe here: entries are replaced by renaming and never written in place.
            model = load_artifact(self.path, limits, map_weights=True)
            file = model.artifact
            file.check(quick=True)  # a damaged entry is removed and written again
            with ExitStack() as opened:
                file.read_references(self._weights(opened))
            if file.document("key") != self.key:
                return None
            beside = [
                (os.path.join(self._base, p), digest) for p, digest in file.document("sources")
            ]
            self.opened = [(path, os.stat(path)) for path, _ in beside]
            # Checked last: these must still be the files whose weights were read.
            same = all(self._digest(path) == digest for path, digest in beside)
            if not same or not self._is_unchanged():
                return None
        except OSError:
            return None
        except (InvalidModel, LookupError, TypeError, ValueError):
            self.remove()  # its version differs, or it is damaged
            return None
        with suppress(OSError):  # the folder may be read-only
            os.utime(self.path)
        # A derived model differs from the model in the file.
        if isinstance(self.source, bytes) or self.form:
            model.path = None
        else:
            model.path = os.path.abspath(self.source)
        return model

    def _weights(self, held: ExitStack) -> Callable[[str, int, int], np.ndarray]:
        """Return a function that reads parts of the model's files, by path below its folder; the
        latest of them stays open until ``held`` is closed."""
        from penstock.frontends.common.weight_file import WeightFile

        base, is_mapped, files = self._base, self.options.map_weights, {}
        source = None if isinstance(self.source, bytes) else os.path.abspath(self.source)

        def read(path: str, offset: int, count: int) -> np.ndarray:
            if path not in files:
                # The user's path may be a link, but a path from the file may not.
                whole = os.path.join(base, path)
                inside = partial(_open_beside, base, path)
                opened = partial(open_path, whole) if whole == source else inside
                files[path] = WeightFile(opened, is_mapped)
                files[path].hold(held)
            if not 0 <= offset <= files[path].size - count:
                raise ValueError(f"{path!r} has no {count} bytes at {offset}")
            return files[path].read(offset, count)

        return read

    def remove(self) -> None:
        """Remove the session."""
        with suppress(OSError):
            os.unlink(self.path)

    def writer(self) -> ArtifactWriter:
        """The writer of a session that is cached here."""
        from penstock.artifact.writer import ArtifactWriter

        base = None if isinstance(self.source, bytes) else self._base
        most, plans = (MOST_BY_DEFAULT, MOST_PLANS) if self.by_default else (None, None)
        return ArtifactWriter(base, most, plans)

    def save(self, writer: ArtifactWriter) -> None:
        """Keep a session unless its files have changed since they were read, and remove the least
        recently used ones down to ``MOST_BYTES``."""
        now = [(status, os.stat(path)) for path, status in self.opened]
        if any(old is None or _status(old) != _status(new) for old, new in now):
            return
        # The compiled model must be the one that was read, not one that replaced it since.
        if not self._is_unchanged():
            return
        if self.by_default:
            # Compiling the model again must warn again.
            if errors.warnings_given != self.warnings_before:
                return
            if not writer.fits() or not any(name.startswith("plan ") for name in writer.documents):
                return
        others: set[str] = set()
        if isinstance(self.source, str) and not os.path.isdir(self.source):
            others = {os.path.abspath(path) for path, _ in self.opened}
            others.discard(os.path.abspath(self.source))
        beside = [(os.path.relpath(p, self._base), self._digest(p)) for p in sorted(others)]
        writer.document("key", self.key)
        writer.document("sources", beside)
        from pathlib import Path

        Path(self.folder).mkdir(0o700, parents=True, exist_ok=True)
        writer.save(Path(self.path))
        held = 0
        for name, status in entries(self.folder):
            held += status.st_size
            # Keep the new session, or each process would save a large model in vain.
            if held > MOST_BYTES and name != os.path.basename(self.path):
                _remove(os.path.join(self.folder, name))


def _status(status: os.stat_result) -> list[int]:
    """Return the fields of a file's status that change when the file does."""
    return [
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    ]
