"""Measured costs of operations and transfers, kept between processes.

A SQLite file in the user's cache folder (``PENSTOCK_CACHE`` names another folder), with a row for
each operation, size and machine. A machine is its processor with the versions of all libraries
involved: measurements of another one are kept, but not used. As in onert (the runtime of Samsung's
ONE), sizes that were never measured are inter- and extrapolated by bytes. Two rows, the first of
a node, the second of a transfer to another backend::

    backend  operation  variant                                  exact             bytes  seconds
    numpy    Add        2 threads, float32, float32 -> float32   8x8, 8x8 -> 8x8     768  1.1e-06
    numpy    to device                                           4096               4096  2.5e-05
"""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from penstock.core.errors import warn
from penstock.core.records import NamedTuple, cached_property
from penstock.host.fork import shared_lock
from penstock.host.machine import cache_folder, machine_name

if TYPE_CHECKING:
    from sqlite3 import Connection

    from penstock.tuning.node_signature import NodeSignature

# Bounds on the file. Rows that were measured least recently are deleted first.
_MOST_BYTES = 64 * 2**20
_MOST_ROWS = 50_000

_MOST_INTEGER = 2**63 - 1
# Seconds to wait for another process that writes. Costs are a hint: a run does without them rather
# than late. After a wait in vain, none follows before the file could be used once.
_PATIENCE_S = 0.05

# A mean weighs as much as this many measurements at most: a single outlier counts little, yet costs
# measured under other conditions (an older kernel, a hotter processor) fade. onert takes the mean
# of old and new, and so forgets at once.
_MOST_COUNTED = 16

# The least that an estimate says, whatever a line through two sizes gives.
_LEAST_S = 1e-7

# Beyond the largest measured size, seconds per byte grow by at most this factor. A product of
# matrices needs 1.5; more is an artefact of two sizes that are close to each other.
_STEEPEST = 2.0


class _Record(NamedTuple):
    """The mean of ``times`` measurements of one size, the last of them at ``measured_at`` (ns)."""

    bytes: int
    seconds: float
    times: int
    measured_at: int


# Backend, operation and variant (dtypes and threads). A transfer is an operation of its source.
_Group = tuple[str, str, str]
_Records = dict[_Group, dict[str, _Record]]
_Pair = tuple[str, str]  # a backend and an operation


class CostTable:
    """Seconds of operations on backends, and of transfers between these; for any thread to use. The
    rows of ``machine`` in the file ``path`` are read when they are first needed, those of each
    operation on each backend apart: a process asks for few of them. A file that is not a table of
    costs is ignored, with a warning, and replaced by ``save``."""

    def __init__(self, path: str | os.PathLike[str], machine: str) -> None:
        self.path = os.fspath(path)
        self.machine = machine
        self._lock = shared_lock()
        self._file_lock = shared_lock()  # taken first; looking up again waits for no write
        # The records of operations that were asked for, and those not yet in the file. The latter
        # are apart, so that ``save`` can merge them with what other processes have written.
        self._records: _Records = {}
        self._fresh: _Records = {}
        self._read: set[_Pair] = set()
        self._is_damaged = False
        self._is_locked = False
        self._points: dict[_Group, list[tuple[int, float]]] = {}

    def record(self, backend: str, where: NodeSignature, threads: int, seconds: float) -> None:
        """Record what a node took on ``backend``, with ``threads`` threads for a kernel. Repeated
        measurements are averaged. Raises ``ValueError`` for seconds that are negative or not
        finite."""
        self._record(_node_group(backend, where, threads), where.exact, where.bytes, seconds)

    @cached_property
    def measured(self) -> set[_Pair]:
        """Backends and operations of which any node was measured on them."""
        with self._file_lock:
            known: set[_Pair] | None = self.__dict__.get("measured")  # another thread's
            if known is None:
                known = {(backend, operation) for backend, operation in self._rows(_SELECT_PAIRS)}
                with self._lock:
                    known |= {(backend, operation) for backend, operation, _ in self._fresh}
                    # Before another thread records more.
                    self.__dict__["measured"] = known
        return known

    def lookup(self, backend: str, where: NodeSignature, threads: int) -> float | None:
        """The mean seconds of nodes of just this signature; None if none was measured."""
        group = _node_group(backend, where, threads)
        records = self._records_of(group)
        with self._lock:
            record = records.get(group, {}).get(where.exact)
        return None if record is None else record.seconds

    def estimate(self, backend: str, where: NodeSignature, threads: int) -> float | None:
        """As ``lookup``, else interpolated by bytes among nodes of the same operation and dtypes;
        at least 1e-7 s. None if none of these was measured."""
        seconds = self.lookup(backend, where, threads)
        if seconds is None:
            return self._estimate(_node_group(backend, where, threads), where.bytes)
        return max(seconds, _LEAST_S)

    def record_transfer(self, source: str, target: str, nbytes: int, seconds: float) -> None:
        """Record what bringing ``nbytes`` from one backend to another took; as ``record``."""
        self._record(_transfer_group(source, target), str(nbytes), nbytes, seconds)

    def transfer(self, source: str, target: str, nbytes: int) -> float | None:
        """Seconds of a transfer, interpolated by bytes; None if none between these backends was
        measured."""
        return self._estimate(_transfer_group(source, target), nbytes)

    def save(self) -> None:
        """Merge what was recorded since the last call into the file. Where that fails, in a
        read-only folder for instance, the records stay in memory."""
        with self._file_lock:
            with self._lock:
                fresh, self._fresh = self._fresh, {}
            if not fresh:
                return
            try:
                self._write(fresh)
            except OSError as error:
                _debug("costs are not kept in %s: %s", self.path, error)
                with self._lock:
                    _merge(fresh, self._fresh)
                    self._fresh = fresh
                return
            with self._lock:  # what others have written is read again
                self._records, self._points, self._read = {}, {}, set()
                self.__dict__.pop("measured", None)

    def _records_of(self, group: _Group) -> _Records:
        """All records that were read; those of the operation of ``group`` on its backend are."""
        backend, operation, _ = group
        if (backend, operation) not in self._read:
            with self._file_lock:
                known = (backend, operation) not in self._read and (
                    backend,
                    operation,
                ) in self.measured
                rows = self._rows(_SELECT, backend, operation) if known else []
                with self._lock:
                    if (backend, operation) not in self._read:
                        records = _records(backend, operation, rows)
                        _merge(records, _of_operation(self._fresh, backend, operation))
                        self._records.update(records)
                        self._read.add((backend, operation))
        return self._records

    def _rows(self, query: str, *arguments: str) -> list[Any]:
        """Return the rows of a query of the file, or an empty list if the file cannot be read."""
        try:
            if not self._is_damaged:
                with self._transaction() as connection:
                    return connection.execute(query, (self.machine, *arguments)).fetchall()
        except OSError as error:
            _debug("costs are not read from %s: %s", self.path, error)
        except ValueError as error:
            self._is_damaged = True
            message = f"the measured costs in {self.path} cannot be read and will be replaced"
            warn(f"{message}: {error}", RuntimeWarning)
        return []

    def _record(self, group: _Group, exact: str, nbytes: int, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a cost of {seconds} seconds is not one that can be measured")
        record = _Record(min(int(nbytes), _MOST_INTEGER), float(seconds), 1, time.time_ns())
        self._records_of(group)
        with self._lock:
            for records in (self._records, self._fresh):
                _merge(records, {group: {exact: record}})
            self._points.pop(group, None)
            if "measured" in self.__dict__:
                self.measured.add(group[:2])

    def _estimate(self, group: _Group, nbytes: int) -> float | None:
        records = self._records_of(group)
        with self._lock:
            points = self._points.get(group)
            if points is None:
                sizes: dict[int, list[float]] = {}
                for record in records.get(group, {}).values():
                    sizes.setdefault(record.bytes, []).append(record.seconds)
                points = [(size, math.fsum(s) / len(s)) for size, s in sorted(sizes.items())]
                self._points[group] = points
        return max(_LEAST_S, _interpolated(points, nbytes)) if points else None

    def _write(self, fresh: _Records) -> None:
        """Merge ``fresh`` into the file, in one transaction."""
        os.makedirs(os.path.dirname(self.path) or os.curdir, exist_ok=True)
        try:
            self._update(fresh)
        except ValueError:
            os.unlink(self.path)
            self._update(fresh)
        self._is_damaged = False

    def _update(self, fresh: _Records) -> None:
        with self._transaction(create=True) as connection:
            _update(connection, self.machine, fresh)

    @contextmanager
    def _transaction(self, *, create: bool = False) -> Iterator[Connection]:
        patience_s = 0.0 if self._is_locked else _PATIENCE_S
        try:
            with _transaction(self.path, patience_s, create=create) as connection:
                yield connection
            self._is_locked = False
        except BlockingIOError:
            self._is_locked = True
            raise


def _node_group(backend: str, where: NodeSignature, threads: int) -> _Group:
    return backend, where.operation, f"{threads} threads, {where.dtypes}"


def _transfer_group(source: str, target: str) -> _Group:
    return source, f"to {target}", ""


def _merge(into: _Records, new: Mapping[_Group, Mapping[str, _Record]]) -> None:
    """Add newer records to older ones of the same size; they come last in their group."""
    for group, records in new.items():
        own = into.setdefault(group, {})
        for exact, record in records.items():
            old = own.pop(exact, None)
            if old is not None:
                times = old.times + record.times
                mean = old.seconds + (record.seconds - old.seconds) * (record.times / times)
                record = record._replace(seconds=mean, times=min(times, _MOST_COUNTED))
            own[exact] = record


def _interpolated(points: list[tuple[int, float]], nbytes: int) -> float:
    """Seconds for ``nbytes``, on the line through the measured (bytes, seconds) next to it."""
    at = bisect_left(points, (nbytes, -math.inf))
    if 0 < at < len(points):
        (x0, y0), (x1, y1) = points[at - 1 : at + 1]
        part = (nbytes - x0) / (x1 - x0)
        return y0 * (1 - part) + y1 * part  # exact at both ends
    (x, y), near = (points[0], points[1:2]) if at == 0 else (points[-1], points[-2:-1])
    # More bytes never take less time, and fewer bytes take at least their proportional part, since
    # some of the time is that of the call. Two sizes close to each other may give any slope.
    per_byte = y / x if x else 0.0
    slope = (near[0][1] - y) / (near[0][0] - x) if near else per_byte
    steepest = per_byte if at == 0 else _STEEPEST * per_byte
    return y + min(max(slope, 0.0), steepest) * (nbytes - x)


# SQL.

# SQLite keeps this text, which identifies files with another schema or version.
_SCHEMA = """\
CREATE TABLE costs (  -- version 1
    machine TEXT, backend TEXT, operation TEXT, variant TEXT, exact TEXT,
    bytes INTEGER, seconds REAL, times INTEGER, measured_at INTEGER,
    PRIMARY KEY (machine, backend, operation, variant, exact)
) WITHOUT ROWID"""
# Rows with numbers that ``save`` cannot have written are skipped: anything may stand in the file.
_SELECT = f"""
SELECT variant, exact, bytes, seconds, times, measured_at FROM costs
WHERE machine = ? AND backend = ? AND operation = ?
AND bytes BETWEEN 0 AND {_MOST_INTEGER} AND seconds BETWEEN 0 AND 1e9
AND times BETWEEN 1 AND {_MOST_COUNTED} AND measured_at BETWEEN 0 AND {_MOST_INTEGER}
ORDER BY measured_at
"""
_SELECT_PAIRS = "SELECT DISTINCT backend, operation FROM costs WHERE machine = ?"
_REPLACE = "INSERT OR REPLACE INTO costs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
# Rows of versions that wrote attributes behind the shapes, where a digest of them stands now.
_DELETE_ATTRIBUTES = "DELETE FROM costs WHERE exact GLOB '*; *=*'"
_DELETE_OLDEST = """
DELETE FROM costs WHERE measured_at <=
(SELECT measured_at FROM costs ORDER BY measured_at LIMIT 1 OFFSET ?)
"""


@contextmanager
def _transaction(path: str, patience_s: float, *, create: bool) -> Iterator[Connection]:
    """A transaction on the file: reading, or with ``create``, writing. Raises ``OSError`` if the
    file cannot be read or written (``BlockingIOError``: another process has locked it for longer
    than ``patience_s``), ``ValueError`` if it is not a table of costs."""
    if not path:
        raise FileNotFoundError("nothing is to be kept in files")
    if not create or os.path.exists(path):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # reading from a pipe would block
            raise ValueError("it is not a regular file")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    import sqlite3  # takes 2 MB, which a process without a table does without

    # No name of a file may look like a part of the URI; "//" ends an empty authority.
    location = os.path.abspath(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    uri = f"file://{location}?mode={'rwc' if create else 'rw'}"
    try:
        with closing(
            sqlite3.connect(uri, timeout=patience_s, isolation_level=None, uri=True)
        ) as file:
            # Anything may stand in the file; text that is no UTF-8 matches nothing, and raises
            # nothing.
            file.text_factory = lambda text: text.decode(errors="replace")
            # A file damaged by a power failure is replaced: cheaper than waiting for the disk.
            file.execute("PRAGMA synchronous = OFF")
            # Overwrites what is deleted, such as the attributes of models that older versions
            # wrote.
            file.execute("PRAGMA secure_delete = ON")
            file.execute("BEGIN IMMEDIATE" if create else "BEGIN")
            schema = [sql for (sql,) in file.execute("SELECT sql FROM sqlite_master")]
            if not schema and create:
                file.execute(_SCHEMA)
            elif not schema:
                raise FileNotFoundError("another process has just created it")
            elif schema != [_SCHEMA]:
                raise ValueError("it is not a table of costs of this version")
            yield file
            file.execute("COMMIT")
    except sqlite3.OperationalError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the rest says more of the same kind
        is_locked = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
        kind = BlockingIOError if is_locked else OSError  # read-only, no space left
        raise kind(str(error)) from error
    except sqlite3.DatabaseError as error:
        raise ValueError(str(error)) from error


def _records(backend: str, operation: str, rows: Iterable[Any]) -> _Records:
    records: _Records = {}
    for variant, exact, *record in rows:
        records.setdefault((backend, operation, variant), {})[exact] = _Record(*record)
    return records


def _of_operation(records: _Records, backend: str, operation: str) -> _Records:
    return {group: own for group, own in records.items() if group[:2] == (backend, operation)}


def _update(connection: Connection, machine: str, fresh: _Records) -> None:
    connection.execute(_DELETE_ATTRIBUTES)
    for pair in {group[:2] for group in fresh}:
        own, rows = _of_operation(fresh, *pair), connection.execute(_SELECT, (machine, *pair))
        records = _records(*pair, rows.fetchall())
        _merge(records, own)
        for group, new in own.items():
            for exact in new:
                # Names of operations may have halves of surrogate pairs, which SQLite refuses.
                key = [x.encode(errors="replace").decode() for x in (machine, *group, exact)]
                connection.execute(_REPLACE, (*key, *records[group][exact]))
    (count,) = connection.execute("SELECT count(*) FROM costs").fetchone()
    if count > _MOST_ROWS:
        connection.execute(_DELETE_OLDEST, (count - _MOST_ROWS - 1,))


def _debug(message: str, *arguments: object) -> None:
    logging = sys.modules.get("logging")

    if logging is not None:  # else nothing listens
        logging.getLogger(__name__).debug(message, *arguments)


# By the variables that name their folders.
_TABLES: dict[tuple[str | None, ...], CostTable] = {}


def cost_table() -> CostTable:
    """The table of this process and machine; one for each folder that ``cache_folder`` names."""
    named = os.environ.get("PENSTOCK_CACHE")
    key = (named,) if named else (os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    table = _TABLES.get(key)
    if table is None:
        # Atomic, so that all threads get the same table.
        folder = cache_folder()
        fresh = CostTable(folder and os.path.join(folder, "costs.sqlite"), machine_name())
        table = _TABLES.setdefault(key, fresh)
    return table
