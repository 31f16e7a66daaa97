"""Measured costs of operations and transfers, kept between processes.

One JSON file in the user's cache folder (``PENSTOCK_CACHE`` names another), with a section for each
machine and set of library versions: what was measured elsewhere says nothing here. As in onert (the
runtime of Samsung's ONE), sizes that nobody has measured are inter- and extrapolated by bytes::

    {"version": 1, "machines": {"AMD EPYC ..., 2 cores, Python 3.11.7, ...": {
        "numpy": {
            "Add": {"2 threads, float32, float32 -> float32": {
                "8x8, 8x8 -> 8x8": [768, 1.1e-06, 5]}},        bytes, mean seconds, measurements
            "to device": {"": {"4096": [4096, 2.5e-05, 3]}}}}}}                       a transfer

Old sections and records come first, and are the first to go where there are too many.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import threading
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.host.fork import in_child
from penstock.host.threads import core_budget
from penstock.ir.graph import Node, Value
from penstock.types import STRING, TensorType, dtype_name

# Of the file, which is read whole whenever a process needs costs.
_MOST_BYTES = 16 * 2**20
_MOST_MACHINES = 16
_MOST_RECORDS = 1000
"""sizes of one operation with the same dtypes and threads"""

# A mean counts as one of at most so many measurements: single ones have little weight, and yet what
# was measured under other conditions, an older kernel or a hotter processor, is forgotten in the
# end. onert takes the mean of old and new, and so forgets at once.
_MOST_COUNTED = 16

# No call takes less, whatever a line through two sizes says.
_LEAST_S = 1e-7

# Above all known sizes, what a byte more takes at most, in means of the largest known. A product of
# matrices takes 1.5; more is an accident of two sizes that are close to each other.
_STEEPEST = 2.0

# Characters of a part of a signature; longer ones end in a digest.
_LONGEST = 400

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signature:
    """What the cost of a node depends on.

    Among nodes of the same ``operation`` and ``dtypes`` costs are interpolated by ``bytes``, those
    of all inputs and outputs together; ``exact`` has the shapes and attributes too.
    """

    operation: str
    dtypes: str
    exact: str
    bytes: int


def nbytes(value: Value | None) -> int | None:
    """Bytes of a tensor of numbers whose shape is known, 0 for one left out; None of all others."""
    if value is None:
        return 0
    kind = _known(value)
    return None if kind is None else kind.nbytes


def signature(node: Node) -> Signature | None:
    """The signature of a node; None if it carries graphs, or a type is not that of a tensor of
    numbers whose shape is known.

    Attributes are those that are numbers, texts or lists of these. Versions of an operation's
    schema are not told apart.
    """
    if node.graphs:
        return None
    total = 0
    dtypes, shapes = [], []
    for values in (node.inputs, node.outputs):
        for value in values:
            if value is None:
                dtypes.append("_")
                shapes.append("_")
                continue
            kind = _known(value)
            if kind is None:
                return None
            assert kind.dtype is not None
            total += kind.nbytes
            dtypes.append(dtype_name(kind.dtype))
            # Of a constant, a kernel may have made what suits it beforehand.
            shapes.append("x".join(map(str, kind.dims)) + "=" * (value.const is not None))
    inputs = len(node.inputs)
    exact = f"{', '.join(shapes[:inputs])} -> {', '.join(shapes[inputs:])}"
    attrs = [f"{key}={x!r}" for key, x in sorted(node.attrs.items()) if _plain(x)]
    if attrs:
        exact = f"{exact}; {' '.join(attrs)}"
    form = f"{', '.join(dtypes[:inputs])} -> {', '.join(dtypes[inputs:])}"
    return Signature(node.op.full_name, _short(form), _short(exact), total)


def _known(value: Value) -> TensorType | None:
    kind = value.type
    if isinstance(kind, TensorType) and kind.static and kind.dtype != STRING:
        return kind
    return None


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    from hashlib import blake2b

    digest = blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    return f"{text[: _LONGEST // 2]}... {digest}"


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(x, bool | int | float | str) for x in value)
    return isinstance(value, bool | int | float | str)


class _Record(NamedTuple):
    """What one size took, in the mean of ``times`` measurements."""

    bytes: int
    seconds: float
    times: int = 1


# Backend, operation and variant: dtypes and threads. A transfer is an operation of its source.
_Group = tuple[str, str, str]
_Records = dict[_Group, dict[str, _Record]]


class CostTable:
    """Seconds of operations on backends, and of transfers between these; for any thread to use.

    Read from the file ``path``, of which the section of ``machine`` counts; a file that does not
    have the form is ignored, with a warning, and replaced by ``save``.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path = path
        self.machine = machine
        self._warned = False
        self._unlock()
        # What is known, and what of this the file does not have yet. Kept apart, so that what
        # another process measures meanwhile is joined with ours, and not replaced.
        self._known = self._read().get(machine, {})
        self._fresh: _Records = {}
        self._points: dict[_Group, list[tuple[int, float]]] = {}
        self._operations: set[str] | None = None

    def _unlock(self) -> None:
        self._lock = threading.Lock()
        self._saving = threading.Lock()  # taken first; files are slow, and looking up must not be

    # Operations.

    def record(self, backend: str, where: Signature, threads: int, seconds: float) -> None:
        """Keep what a node took on ``backend``, with so many threads for one kernel.

        What is measured again counts with the mean so far. Raises ``ValueError`` for seconds that
        are negative or not finite.
        """
        self._record(_group(backend, where, threads), where.exact, where.bytes, seconds)

    def knows(self, operation: str) -> bool:
        """Whether any node of an operation was measured on any backend."""
        with self._lock:
            if self._operations is None:
                self._operations = {group[1] for group in self._known}
            return operation in self._operations

    def lookup(self, backend: str, where: Signature, threads: int) -> float | None:
        """What just such a node took, in the mean; None if there was none."""
        with self._lock:
            found = self._known.get(_group(backend, where, threads), {}).get(where.exact)
        return None if found is None else found.seconds

    def estimate(self, backend: str, where: Signature, threads: int) -> float | None:
        """As ``lookup``, else by bytes between or beyond what nodes of the same operation and
        dtypes took, and never below 1e-7; None if there were none."""
        known = self.lookup(backend, where, threads)
        if known is not None:
            return max(known, _LEAST_S)
        return self._estimate(_group(backend, where, threads), where.bytes)

    # Transfers.

    def record_transfer(self, source: str, target: str, nbytes: int, seconds: float) -> None:
        """Keep what it took to bring so many bytes from one backend to another; as ``record``."""
        self._record(_transfer(source, target), str(nbytes), nbytes, seconds)

    def transfer(self, source: str, target: str, nbytes: int) -> float | None:
        """What that takes, by bytes between or beyond what was measured; None if nothing was."""
        return self._estimate(_transfer(source, target), nbytes)

    # The file.

    def save(self) -> None:
        """Write what was recorded since the last time, beside what other processes have written.

        The file is replaced as a whole. Where that cannot be done, in a folder that is read-only
        say, it stays as it is. Of two processes that save in the same moment one may be lost: its
        costs are measured again one day, which is cheaper than locks that work on all systems.
        """
        with self._saving:
            with self._lock:
                fresh, self._fresh = self._fresh, {}
            if not fresh:
                return
            machines = self._read()
            mine = machines.pop(self.machine, {})
            _merge(mine, fresh)
            machines[self.machine] = mine
            try:
                _write(self.path, _fitting(machines))
            except OSError as error:
                _LOG.debug("costs are not kept in %s: %s", self.path, error)
                with self._lock:
                    _merge(fresh, self._fresh)
                    self._fresh = fresh
                return
            with self._lock:
                _merge(mine, self._fresh)
                self._known = mine
                self._points.clear()
                self._operations = None

    def _record(self, group: _Group, exact: str, nbytes: int, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"nothing takes {seconds} seconds")
        new = {group: {exact: _Record(int(nbytes), float(seconds))}}
        with self._lock:
            _merge(self._known, new)
            _merge(self._fresh, new)
            self._points.pop(group, None)
            self._operations = None

    def _estimate(self, group: _Group, nbytes: int) -> float | None:
        with self._lock:
            points = self._points.get(group)
            if points is None:
                # Of several nodes of one size, the mean.
                sizes: dict[int, list[float]] = {}
                for record in self._known.get(group, {}).values():
                    sizes.setdefault(record.bytes, []).append(record.seconds)
                points = [(size, math.fsum(s) / len(s)) for size, s in sorted(sizes.items())]
                self._points[group] = points
        return max(_LEAST_S, _on_line(points, nbytes)) if points else None

    def _read(self) -> dict[str, _Records]:
        try:
            return _read(self.path)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                _LOG.debug("costs are not read from %s: %s", self.path, error)
        except (ValueError, RecursionError) as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the measured costs in {self.path} cannot be read and will be replaced: "
                    f"{error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return {}


def _group(backend: str, where: Signature, threads: int) -> _Group:
    return backend, where.operation, f"{threads} threads, {where.dtypes}"


def _transfer(source: str, target: str) -> _Group:
    return source, f"to {target}", ""


def _merge(into: _Records, new: Mapping[_Group, Mapping[str, _Record]]) -> None:
    """Add newer records; they come last, and the first are dropped where there are too many."""
    for group, records in new.items():
        own = into[group] = into.pop(group, {})
        for exact, record in records.items():
            old = own.pop(exact, None)
            if old is not None:
                times = old.times + record.times
                mean = old.seconds + (record.seconds - old.seconds) * (record.times / times)
                record = _Record(record.bytes, mean, min(times, _MOST_COUNTED))
            own[exact] = record
        while len(own) > _MOST_RECORDS:
            del own[next(iter(own))]


def _on_line(points: list[tuple[int, float]], nbytes: int) -> float:
    """Seconds for a size by those of others, which are sorted."""
    at = bisect_left(points, (nbytes, -math.inf))
    if 0 < at < len(points):
        (x0, y0), (x1, y1) = points[at - 1 : at + 1]
        part = (nbytes - x0) / (x1 - x0)
        return y0 * (1 - part) + y1 * part  # of both ends exactly what they are
    (x, y), near = (points[0], points[1:2]) if at == 0 else (points[-1], points[-2:-1])
    # A larger size never takes less, and a smaller one no less than in proportion: part of the time
    # goes into the call itself. Known sizes that are close to each other may say anything.
    per_byte = y / x if x else 0.0
    slope = (near[0][1] - y) / (near[0][0] - x) if near else per_byte
    steepest = per_byte if at == 0 else _STEEPEST * per_byte
    return y + min(max(slope, 0.0), steepest) * (nbytes - x)


_LOCK = threading.Lock()
_TABLES: dict[Path, CostTable] = {}


def table() -> CostTable:
    """The table of this process and machine; one for each folder that ``folder`` names."""
    path = folder() / "costs.json"
    with _LOCK:
        found = _TABLES.get(path)
        if found is None:
            found = _TABLES[path] = CostTable(path, machine())
    return found


@in_child
def _unlock() -> None:
    """After a fork, whatever the parent's threads held."""
    global _LOCK
    _LOCK = threading.Lock()
    for each in _TABLES.values():
        each._unlock()


def folder() -> Path:
    """The folder that Penstock keeps measurements in."""
    named = os.environ.get("PENSTOCK_CACHE")
    if named:
        return Path(named)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("penstock", appauthor=False))


@cache
def machine() -> str:
    """What costs depend on beside the model: processor, cores, and the versions of libraries."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    built = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    try:
        own = version("penstock")
    except PackageNotFoundError:  # run from its source, without being installed
        own = "?"
    parts = [
        _processor() or platform.processor() or platform.machine(),
        f"{core_budget()} cores",
        f"Python {platform.python_version()}",
        f"NumPy {np.__version__}",
        f"{blas.get('name')} {blas.get('version')}",
        f"Penstock {own}",
    ]
    return ", ".join(parts)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return ""


def _read(path: Path) -> dict[str, _Records]:
    """The sections of a file by machine; whatever in them has not the form is left out.

    Raises ``OSError`` if there is no such file, ``ValueError`` or ``RecursionError`` for one that
    is not ours.
    """
    import json

    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would keep us waiting
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    found = json.loads(content.decode())
    if not isinstance(found, dict) or found.get("version") != 1:
        raise ValueError("it is not of version 1")
    if not isinstance(found.get("machines"), dict):
        raise ValueError("it has no machines")
    return {machine: _records(section) for machine, section in found["machines"].items()}


def _records(section: Any) -> _Records:
    found: _Records = {}
    for backend, operations in _entries(section):
        for operation, variants in _entries(operations):
            for variant, records in _entries(variants):
                own = {exact: _Record(*r) for exact, r in _entries(records) if _valid(r)}
                if own:
                    _merge(found, {(backend, operation, variant): own})
    return found


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else ()


def _valid(record: Any) -> bool:
    """Whether this is a list of bytes, seconds and count; not even an int may be huge."""
    return (
        isinstance(record, list)
        and [type(x) for x in record] in ([int, float, int], [int, int, int])
        and 0 <= record[0] < 2**63
        and 0 <= record[1] < 2**31
        and 1 <= record[2] <= _MOST_COUNTED
    )


def _fitting(machines: dict[str, _Records]) -> str:
    """The text of the file, small enough to be read again; what is older is left out."""
    import json

    while len(machines) > _MOST_MACHINES:
        del machines[next(iter(machines))]
    while True:
        sections: dict[str, Any] = {}
        for name, groups in machines.items():
            section = sections[name] = {}
            for (backend, operation, variant), records in groups.items():
                section.setdefault(backend, {}).setdefault(operation, {})[variant] = records
        text = json.dumps({"version": 1, "machines": sections}, allow_nan=False)
        if len(text) <= _MOST_BYTES:
            return text
        name, groups = next(iter(machines.items()))
        if len(machines) > 1:
            del machines[name]
        elif any(len(records) > 1 for records in groups.values()):
            for group, records in groups.items():
                groups[group] = dict(islice(records.items(), len(records) // 2, None))
        else:
            for group in list(groups)[: (len(groups) + 1) // 2]:
                del groups[group]


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing of it, whoever reads or writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="ascii")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
