"""Saved sessions that ``compile(cache=...)`` keeps in a folder, and finds again by what is in a
model's files.

::

    2f8a…91.penstock   a session that was saved, named by a digest of the model's bytes and of all
                       that its plans depend on
    77b0…3c.digest     the digest of one file, with what the system said of that file: it is used
                       again as long as the system says the same

Files are written beside their place and then renamed, so that several processes may share a folder.
The time of change of a saved session is that of its last use; those not used for longest are
removed while all have more than ``MOST_BYTES``.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.artifact.container import VERSION, ArtifactWriter
from penstock.backends.registry import available, describe
from penstock.compiler.options import CompileOptions
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InvalidModel, warn
from penstock.core.limits import DEFAULT_LIMITS
from penstock.core.records import cached_property, dataclass
from penstock.frontends.artifact.importer import load_artifact
from penstock.frontends.common.model_files import Opened, open_path
from penstock.host.machine import cache_folder, machine_name
from penstock.host.replace_file import replacing
from penstock.ir.graph import Model
from penstock.session.environment import VARIABLES

MOST_BYTES = 4 << 30
"""bytes of saved sessions that a folder may have"""
_PIECE = 1 << 24
# A file that was changed this short a time before it was read may change again without a trace.
_SETTLED_NS = 2_000_000_000
# Options that say what is compiled. Of those below them a file cannot say which they were, and the
# others are about this process.
_KEYED = (
    *("executor", "place", "threads", "precision", "memory_planner", "max_streams"),
    *("signature", "map_weights", "autotune", "fixed_threads"),
)
_UNTOLD = ("cost_model", "grouping", "devices", "after_pass")


def folder_of(cache: bool | str | Path) -> Path:
    """The folder that ``cache=`` names; True stands for the user's."""
    return Path(cache_folder(), "sessions") if cache is True else Path(str(cache))


def entries(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The saved sessions of a folder, those used last first."""
    found = []
    for path in folder.glob("*.penstock"):
        with suppress(OSError):  # another process removes it
            found.append((path, path.stat()))
    return sorted(found, key=lambda entry: -entry[1].st_mtime_ns)


def clear(folder: Path) -> int:
    """Remove all that a folder keeps; returns the bytes of the saved sessions."""
    freed = sum(status.st_size for _, status in entries(folder))
    for path in [*folder.glob("*.penstock"), *folder.glob("*.digest")]:
        path.unlink(missing_ok=True)
    return freed


def cache_entry(model: object, options: CompileOptions) -> CacheEntry | None:
    """The place that ``cache=`` gives a model; None without it, and with a warning for options that
    do not let sessions be told apart. Raises ``ValueError`` for a model that is neither a path nor
    bytes."""
    if not options.cache:
        return None
    if not isinstance(model, str | os.PathLike | bytes):
        raise ValueError(
            f"cache= needs the path or the bytes of a model, not a {type(model).__name__}; save "
            "the session with Session.save instead"
        )
    untold = [name for name in _UNTOLD if options.get(name) is not None]
    if not all(isinstance(backend, str) for backend in options.backends or ()):
        untold.append("backends")
    if untold:
        reason = f"{untold[0]}= is an object of this process, by which it cannot be found again"
        warn(f"cache= keeps no session: {reason}")
        return None
    source = model if isinstance(model, bytes) else Path(model)
    exists = isinstance(source, bytes) or source.exists()
    return CacheEntry(folder_of(options.cache), source, options) if exists else None


@dataclass
class CacheEntry:
    """The place of one model with these options in a folder. ``opened``: the files that were opened
    while the model was loaded. ``unsaved``: how many plans its session has that are not there."""

    folder: Path
    source: Path | bytes
    options: CompileOptions
    opened: Sequence[Opened] = ()
    unsaved: int = 0

    @cached_property
    def path(self) -> Path:
        """The file of the session."""
        keyed = {
            "files": self._files,
            "machine": [VERSION, machine_name()],
            "options": {name: repr(self.options.get(name)) for name in _KEYED},
            # Its options hold where the caller gives none.
            "environment": [os.environ.get(name, "") for name in VARIABLES],
            # In their order, by which plans prefer them.
            "backends": [[b, describe(str(b))] for b in self.options.backends or available()],
        }
        # Sorted: the name must not depend on the order in which keys were added.
        text = json.dumps(keyed, sort_keys=True).encode()
        return self.folder / f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.penstock"

    @cached_property
    def _files(self) -> str | dict[str, str]:
        """The digests by which a session is found."""
        return self._digests()

    def _digests(self) -> str | dict[str, str]:
        """Digests of the bytes of the model, of a folder by file."""
        source = self.source
        if isinstance(source, bytes):
            return hashlib.blake2b(source, digest_size=16).hexdigest()
        if not source.is_dir():
            return self._digest(source)
        files = sorted(path for path in source.rglob("*") if path.is_file())
        return {str(path.relative_to(source)): self._digest(path) for path in files}

    def _digest(self, path: Path) -> str:
        """The digest of a file, from the folder if the file is as it was then."""
        name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()
        kept = self.folder / f"{name}.digest"
        status = _status(os.stat(path))
        with suppress(OSError, ValueError, TypeError):
            before, digest = json.loads(kept.read_text())
            if before == status and type(digest) is str:
                return digest
        digest = hashlib.blake2b(digest_size=16)
        with open_path(path) as file:
            while piece := file.read(_PIECE):
                checkpoint()
                digest.update(piece)
            after = _status(os.fstat(file.fileno()))
        text = digest.hexdigest()
        if after == status and time.time_ns() - max(after[-2:]) > _SETTLED_NS:
            with suppress(OSError), replacing(kept) as written:
                written.write(json.dumps([status, text]).encode())
        return text

    def load(self) -> Model | None:
        """The model with the plans that were saved; None if there is none for these files."""
        limits = self.options.limits or DEFAULT_LIMITS
        try:
            if not self.path.is_file():
                return None
            # Mapping is safe here: entries are replaced by renaming, and never written in place.
            model = load_artifact(self.path, limits, map_weights=True)
            model.artifact.check(quick=True)  # what is damaged is made again
            beside = model.artifact.document("sources")
            if not all(self._digest(Path(path)) == digest for path, digest in beside):
                return None
        except OSError:
            return None
        except (InvalidModel, LookupError, TypeError, ValueError):
            with suppress(OSError):
                self.path.unlink()  # of another version, or damaged
            return None
        with suppress(OSError):  # of a folder that is only read
            os.utime(self.path)
        model.path = None if isinstance(self.source, bytes) else os.path.abspath(self.source)
        return model

    def save(self, writer: ArtifactWriter) -> None:
        """Keep a session, unless its files have changed since they were read, and remove those not
        used for longest, down to ``MOST_BYTES``."""
        now = [(status, os.stat(path)) for path, status in self.opened]
        if any(old is None or _status(old) != _status(new) for old, new in now):
            return
        # The model that was compiled is the one that was read, not what is there now.
        if self._digests() != self._files:
            return
        others: set[Path] = set()
        if isinstance(self.source, Path) and not self.source.is_dir():
            others = {Path(path).resolve() for path, _ in self.opened} - {self.source.resolve()}
        beside = [(str(path), self._digest(path)) for path in sorted(others)]
        writer.document("sources", beside)
        self.folder.mkdir(parents=True, exist_ok=True)
        writer.save(self.path)
        held = 0
        for path, status in entries(self.folder):
            held += status.st_size
            # The one just saved stays, or a large model would be saved in vain by each process.
            if held > MOST_BYTES and path != self.path:
                path.unlink(missing_ok=True)


def _status(status: os.stat_result) -> list[int]:
    """What the system says of a file, that changes when the file does."""
    return [
        *(status.st_dev, status.st_ino, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    ]
