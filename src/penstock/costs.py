"""Measured costs of operations and transfers, kept between processes.

One JSON file in the user's cache folder (``PENSTOCK_CACHE`` names another), with a section for each
machine and set of library versions: what was measured elsewhere says nothing here. As in onert (the
runtime of Samsung's ONE), sizes that nobody has measured are interpolated by bytes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import threading
import warnings
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from penstock.ir import Node, Value
from penstock.threads import core_budget
from penstock.types import TensorType

# Of the file: larger ones are not read, and more machines, or sizes of one operation, not kept.
_MOST_BYTES = 64 * 2**20
_MOST_MACHINES = 16
_MOST_RECORDS = 1000
# A repeat counts as one of at most so many: new conditions win in the end.
_MOST_COUNTED = 8
# No call takes less, whatever a line through two sizes says.
_LEAST_S = 1e-7
_TRANSFER = "transfer"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signature:
    """What the cost of a node depends on.

    ``group``: the operation with the dtypes of its inputs and outputs, among whose sizes costs are
    interpolated. ``exact``: shapes and attributes too. ``bytes``: of inputs and outputs together.
    """

    group: str
    exact: str
    bytes: int


def nbytes(value: Value | None) -> int | None:
    """Bytes of a value whose shape is known; None of others."""
    if value is None:
        return 0
    kind = value.type
    return kind.nbytes if isinstance(kind, TensorType) and kind.static else None


def signature(node: Node) -> Signature | None:
    """The signature of a node, if the types of its inputs and outputs are known."""
    dtypes, shapes, total = [], [], 0
    for value in (*node.inputs, *node.outputs):
        size = nbytes(value)
        if size is None:
            return None
        total += size
        if value is not None:
            assert isinstance(value.type, TensorType)
            dtypes.append(str(value.type.dtype))
            shapes.append("x".join(map(str, value.type.dims)))
    group = f"{node.op.full_name}({', '.join(dtypes)})"
    attrs = [f"{k}={v}" for k, v in sorted(node.attrs.items()) if _plain(v)]
    return Signature(group, " ".join([", ".join(shapes), *attrs]), total)


def _plain(value: Any) -> bool:
    """Whether an attribute is a number, a short text or a few of these."""
    if isinstance(value, list | tuple):
        return len(value) <= 16 and all(map(_plain, value))
    return isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 32)


@dataclass(slots=True)
class _Record:
    """What one size took, in the mean of ``count`` measurements."""

    bytes: int
    seconds: float
    count: int = 1

    def add(self, seconds: float) -> None:
        self.count = min(self.count + 1, _MOST_COUNTED)
        self.seconds += (seconds - self.seconds) / self.count


_Records = dict[str, dict[str, _Record]]


class CostTable:
    """Seconds of operations on backends, and of transfers between these; for any thread to use.

    ``path`` is the file; nothing is read or written before it is asked for.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path = path
        self.machine = machine
        self._lock = threading.Lock()
        self._changed: set[tuple[str, str]] = set()
        self._records = _section(_read(path), machine)

    # Operations.

    def record(self, backend: str, where: Signature, threads: int, seconds: float) -> None:
        """Keep what a node took on ``backend``, with so many threads for one kernel."""
        self._add(f"{backend}/{threads} {where.group}", where.exact, where.bytes, seconds)

    def lookup(self, backend: str, where: Signature, threads: int) -> float | None:
        """What just such a node took, in the mean; None if there was none."""
        found = self._records.get(f"{backend}/{threads} {where.group}", {}).get(where.exact)
        return None if found is None else found.seconds

    def estimate(self, backend: str, where: Signature, threads: int) -> float | None:
        """As ``lookup``, else by bytes between or beyond other sizes of the same operation and
        dtypes; None if there are none."""
        known = self.lookup(backend, where, threads)
        if known is not None:
            return known
        return self._interpolated(f"{backend}/{threads} {where.group}", where.bytes)

    # Transfers.

    def record_transfer(self, source: str, target: str, nbytes: int, seconds: float) -> None:
        """Keep what it took to bring so many bytes from one backend to another."""
        self._add(f"{_TRANSFER} {source} {target}", str(nbytes), nbytes, seconds)

    def transfer(self, source: str, target: str, nbytes: int) -> float | None:
        """What that takes, by bytes between or beyond what was measured; None if nothing was."""
        return self._interpolated(f"{_TRANSFER} {source} {target}", nbytes)

    # The file.

    def save(self) -> None:
        """Write what was recorded since, beside what other processes have written meanwhile.

        Where the folder cannot be written, nothing is kept.
        """
        with self._lock:
            if not self._changed:
                return
            machines = _read(self.path)
            mine = machines.pop(self.machine, {})
            merged = _section({self.machine: mine}, self.machine)
            for group, exact in self._changed:
                records = merged.setdefault(group, {})
                records.pop(exact, None)
                records[exact] = self._records[group][exact]
                while len(records) > _MOST_RECORDS:
                    del records[next(iter(records))]
            machines[self.machine] = {
                group: {key: [r.bytes, r.seconds, r.count] for key, r in records.items()}
                for group, records in merged.items()
            }
            while len(machines) > _MOST_MACHINES:
                del machines[next(iter(machines))]
            self._changed.clear()
            try:
                _write(self.path, {"version": 1, "machines": machines})
            except OSError as error:
                _LOG.debug("costs are not kept in %s: %s", self.path, error)

    def _add(self, group: str, exact: str, nbytes: int, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"nothing takes {seconds} seconds")
        with self._lock:
            # Others look while we write: what they see is whole at any time.
            records = self._records.get(group)
            if records is None:
                records = self._records[group] = {}
            found = records.get(exact)
            if found is None:
                self._records[group] = {**records, exact: _Record(nbytes, max(seconds, _LEAST_S))}
            else:
                found.add(max(seconds, _LEAST_S))
            self._changed.add((group, exact))

    def _interpolated(self, group: str, nbytes: int) -> float | None:
        # Of several nodes of one size, the mean.
        sizes: dict[int, list[float]] = {}
        for record in self._records.get(group, {}).values():
            sizes.setdefault(record.bytes, []).append(record.seconds)
        points = [(size, sum(all_) / len(all_)) for size, all_ in sorted(sizes.items())]
        if not points:
            return None
        if len(points) == 1:
            (size, seconds) = points[0]
            return max(_LEAST_S, seconds * nbytes / size if nbytes > size > 0 else seconds)
        at = min(max(bisect_left(points, (nbytes, -math.inf)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1 : at + 1]
        return max(_LEAST_S, y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0))

    def __iter__(self) -> Iterator[tuple[str, str, int, float]]:
        """Group, exact signature, bytes and seconds of everything known here."""
        for group, records in list(self._records.items()):
            for exact, record in list(records.items()):
                yield group, exact, record.bytes, record.seconds


_LOCK = threading.Lock()
_TABLES: dict[Path, CostTable] = {}


def table() -> CostTable:
    """The table of this process and machine."""
    path = folder() / "costs.json"
    with _LOCK:
        found = _TABLES.get(path)
        if found is None:
            found = _TABLES[path] = CostTable(path, machine())
    return found


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
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    parts = [
        _processor(),
        f"{core_budget()} cores",
        f"Python {platform.python_version()}",
        f"NumPy {np.__version__}",
        f"{blas.get('name')} {blas.get('version')}",
        f"Penstock {version('penstock')}",
    ]
    return ", ".join(parts)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, Any]:
    """The sections of a file by machine; none if there is no such file, or not one of ours."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("version") != 1:
            raise ValueError("it is not of version 1")
        machines = found.get("machines")
        if not isinstance(machines, dict):
            raise ValueError("it has no machines")
    except FileNotFoundError:
        return {}
    except OSError as error:
        _LOG.debug("costs are not read from %s: %s", path, error)
        return {}
    except (ValueError, RecursionError) as error:
        warnings.warn(
            f"the measured costs in {path} cannot be read and will be replaced: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return {}
    return machines


def _section(machines: dict[str, Any], machine: str) -> _Records:
    """The records of one machine; what is not one is left out."""
    section = machines.get(machine)
    found: _Records = {}
    for group, records in section.items() if isinstance(section, dict) else ():
        for exact, record in records.items() if isinstance(records, dict) else ():
            if _valid(record):
                found.setdefault(group, {})[exact] = _Record(*record)
    return found


def _valid(record: Any) -> bool:
    return (
        isinstance(record, list)
        and len(record) == 3
        and all(type(x) in (int, float) and 0 <= x < 2**62 for x in record)
        and type(record[0]) is int
        and type(record[2]) is int
        and record[2] >= 1
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write the whole file or nothing of it, whoever reads or writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
