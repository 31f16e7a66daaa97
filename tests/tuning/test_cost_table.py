"""Measured costs: lookup, estimates, and the SQLite file that keeps them."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.host.machine import cache_folder, machine_name
from penstock.tuning import cost_table as module
from penstock.tuning.cost_table import CostTable, cost_table
from penstock.tuning.node_signature import NodeSignature
from tests.support.costs import cost_rows
from tests.support.logs import logged


def sized(nbytes: int, exact: str | None = None, operation: str = "Add") -> NodeSignature:
    return NodeSignature(operation, "float32 -> float32", exact or str(nbytes), nbytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "costs.sqlite"


@pytest.fixture
def table(path: Path) -> CostTable:
    return CostTable(path, "here")


def no_table(**sizes: float) -> CostTable:
    """A table without a file, with the seconds of Add for ``b<bytes>``."""
    created = CostTable(Path("there/is/no/such/file"), "here")
    for name, seconds in sizes.items():
        created.record("numpy", sized(int(name[1:])), 1, seconds)
    return created


def estimate(table: CostTable, nbytes: int) -> float:
    result = table.estimate("numpy", sized(nbytes, "new"), 1)
    assert result is not None
    return result


# Looking up.


def test_lookup_returns_recorded_seconds(table):
    table.record("numpy", sized(8), 2, 0.5)
    assert table.lookup("numpy", sized(8), 2) == table.estimate("numpy", sized(8), 2) == 0.5


def test_lookup_of_other_key_returns_none(table):
    table.record("numpy", sized(8), 2, 0.5)
    other = NodeSignature("Add", "float64 -> float64", "8", 8)
    assert table.lookup("numpy", sized(8), 1) is None
    assert table.lookup("other", sized(8), 2) is None
    assert table.lookup("numpy", sized(8, "new"), 2) is None
    for backend, where, threads in [
        ("numpy", sized(8), 1),
        ("other", sized(8), 2),
        ("numpy", sized(8, operation="Sub"), 2),
        ("numpy", other, 2),
    ]:
        assert table.estimate(backend, where, threads) is None


def test_repeated_records_are_averaged(table):
    for seconds in (1.0, 2.0, 6.0):
        table.record("numpy", sized(8), 1, seconds)
    assert table.lookup("numpy", sized(8), 1) == pytest.approx(3)


def test_mean_follows_recent_records(table):
    for seconds in [5.0] * 1000 + [1.0] * 100:
        table.record("numpy", sized(8), 1, seconds)
    assert table.lookup("numpy", sized(8), 1) == pytest.approx(1, rel=0.05)
    table.record("numpy", sized(8), 1, 5.0)
    assert table.lookup("numpy", sized(8), 1) < 1.4, "a single measurement has little weight"


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
def test_record_of_negative_or_infinite_seconds_raises(table, seconds):
    with pytest.raises(ValueError, match="a cost of"):
        table.record("numpy", sized(8), 1, seconds)
    with pytest.raises(ValueError, match="a cost of"):
        table.record_transfer("a", "b", 8, seconds)


def test_record_accepts_numpy_scalars(table, path):
    table.record("numpy", sized(np.int64(8)), 1, np.float32(0.5))
    table.record_transfer("a", "b", np.int64(8), np.float64(0.25))
    table.save()
    again = CostTable(path, "here")
    assert again.lookup("numpy", sized(8), 1) == 0.5
    assert again.transfer("a", "b", 8) == 0.25


# Estimates.


def test_estimate_between_two_sizes_is_linear():
    assert estimate(no_table(b100=1, b200=3), 150) == pytest.approx(2)
    assert estimate(no_table(b100=1, b200=3, b300=10), 225) == pytest.approx(4.75)


def test_estimate_averages_records_of_equal_size(table):
    for exact, seconds in (("a", 1.0), ("b", 5.0)):
        table.record("numpy", sized(100, exact), 1, seconds)
    table.record("numpy", sized(200), 1, 5.0)
    assert estimate(table, 100) == 3
    assert estimate(table, 150) == 4


def test_estimate_from_one_size_is_proportional():
    assert estimate(no_table(b100=2), 300) == pytest.approx(6)
    assert estimate(no_table(b100=2), 50) == pytest.approx(1)
    assert estimate(no_table(b100=2), 100) == 2


def test_estimate_beyond_all_sizes_extrapolates():
    table = no_table(b100=2, b200=3)
    assert estimate(table, 300) == pytest.approx(4)
    assert estimate(table, 50) == pytest.approx(1.5)
    assert estimate(table, 0) == pytest.approx(1)


def test_extrapolation_from_close_sizes_is_bounded():
    rising, falling = no_table(b100=1, b101=2), no_table(b100=2, b101=1)
    assert estimate(rising, 202) == pytest.approx(6)  # by 2 in 101, and at most twice as steep
    assert estimate(rising, 50) == pytest.approx(0.5)
    assert estimate(falling, 202) == 1
    assert estimate(falling, 50) == 2


def test_estimate_is_at_least_100_ns():
    assert estimate(no_table(b100=0), 100) == 1e-7
    assert estimate(no_table(b1000=1e-6), 0) == 1e-7
    assert estimate(no_table(b0=1e-3), 10**9) == 1e-3
    table = no_table(b100=0)
    assert table.lookup("numpy", sized(100), 1) == 0
    assert table.estimate("numpy", sized(100), 1) == 1e-7


def test_estimate_includes_later_records():
    table = no_table(b100=1)
    assert estimate(table, 200) == 2
    table.record("numpy", sized(300), 1, 1.0)
    assert estimate(table, 200) == 1


POINTS = st.dictionaries(st.integers(0, 10**9), st.floats(0, 1e3), min_size=1, max_size=8)


def filled(points: dict[int, float]) -> CostTable:
    return no_table(**{f"b{size}": seconds for size, seconds in points.items()})


@given(POINTS, st.data())
def test_estimate_lies_between_its_neighbours(points, data):
    size = data.draw(st.integers(min(points), max(points)))
    below = points[max(s for s in points if s <= size)]
    above = points[min(s for s in points if s >= size)]
    result = estimate(filled(points), size)
    assert min(below, above) * (1 - 1e-9) <= result <= max(below, above, 1e-7) * (1 + 1e-9)


def test_estimate_at_measured_size_is_exact():
    points = {0: 17.0, 1: 4.345760885426803e-07}
    assert estimate(filled(points), 1) == points[1]


@given(POINTS, st.lists(st.integers(0, 10**12), min_size=2, max_size=2))
def test_extrapolation_is_monotonic(points, sizes):
    table, (few, many) = filled(points), sorted(sizes)
    if few >= max(points) or many <= min(points):
        result = [estimate(table, few), estimate(table, many)]
        assert 1e-7 <= result[0] <= result[1] * (1 + 1e-9) < math.inf


@given(POINTS, st.randoms())
def test_estimate_does_not_depend_on_order_of_records(points, random):
    shuffled = list(points.items())
    random.shuffle(shuffled)
    a, b = filled(points), filled(dict(shuffled))
    for size in (*points, 0, 77, 10**10):
        assert a.lookup("numpy", sized(size), 1) == b.lookup("numpy", sized(size), 1)
        assert estimate(a, size) == estimate(b, size)


# Transfers.


def test_transfer_is_interpolated_per_direction(table):
    table.record_transfer("host", "device", 100, 1.0)
    table.record_transfer("host", "device", 200, 2.0)
    table.record_transfer("host", "device", 200, 4.0)
    assert table.transfer("host", "device", 150) == pytest.approx(2)
    assert table.transfer("host", "device", 200) == pytest.approx(3)
    assert table.transfer("device", "host", 150) is None
    assert table.transfer("host", "other", 150) is None


def test_transfer_record_is_not_found_as_operation(table):
    table.record_transfer("host", "device", 100, 1.0)
    for name in ("device", "to device"):
        assert table.estimate("host", sized(100, operation=name), 1) is None


# The file.


def test_saved_file_has_one_row_per_record(table, path):
    table.record("numpy", sized(8, "2 -> 2"), 2, 0.5)
    table.record_transfer("numpy", "device", 64, 0.25)
    table.save()
    assert cost_rows(path) == {
        ("here", "numpy", "Add", "2 threads, float32 -> float32", "2 -> 2"): (8, 0.5, 1),
        ("here", "numpy", "to device", "", "64"): (64, 0.25, 1),
    }
    assert os.listdir(path.parent) == ["costs.sqlite"]


NAMES = st.text(max_size=8)


@given(
    st.dictionaries(
        st.tuples(NAMES, NAMES, NAMES, st.integers(1, 64)),
        st.tuples(st.integers(0, 2**40), st.lists(st.floats(0, 1e6), min_size=1, max_size=20)),
        max_size=6,
    ),
    st.dictionaries(st.tuples(NAMES, NAMES, st.integers(0, 2**40)), st.floats(0, 1e6), max_size=4),
)
def test_saved_records_are_read_again(tmp_path_factory, nodes, transfers):
    path = tmp_path_factory.mktemp("costs") / "costs.sqlite"
    table = CostTable(path, "here")
    for (backend, operation, exact, threads), (size, measured) in nodes.items():
        for seconds in measured:
            table.record(backend, NodeSignature(operation, "d", exact, size), threads, seconds)
    for (source, target, size), seconds in transfers.items():
        table.record_transfer(source, target, size, seconds)
    table.save()
    again = CostTable(path, "here")
    for (backend, operation, exact, threads), (size, _) in nodes.items():
        where = NodeSignature(operation, "d", exact, size)
        known = table.lookup(backend, where, threads)
        assert known is not None
        assert again.lookup(backend, where, threads) == known
    for source, target, size in transfers:
        known = table.transfer(source, target, size)
        assert known is not None
        assert again.transfer(source, target, size) == known


def test_save_without_new_records_writes_nothing(table, path):
    table.save()
    assert not path.exists()
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    table.save()
    CostTable(path, "here").save()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_save_merges_records_of_two_processes(path):
    ours, theirs = CostTable(path, "here"), CostTable(path, "here")
    ours.record("numpy", sized(8), 1, 1.0)
    ours.record("numpy", sized(16), 1, 2.0)
    theirs.record("numpy", sized(16), 1, 4.0)
    theirs.record("numpy", sized(32), 1, 8.0)
    ours.save()
    assert ours.lookup("numpy", sized(8), 1) == 1.0
    theirs.save()
    for table in (theirs, CostTable(path, "here")):
        result = [table.lookup("numpy", sized(n), 1) for n in (8, 16, 32)]
        assert result == [1.0, pytest.approx(3.0), 8.0]
    assert ours.lookup("numpy", sized(32), 1) is None
    ours.record("numpy", sized(8), 1, 1.0)
    ours.save()
    assert ours.lookup("numpy", sized(32), 1) == 8.0


def test_save_counts_each_record_once(table, path):
    table.record("numpy", sized(8), 1, 1.0)
    for seconds in (2.0, 6.0):
        table.save()
        table.record("numpy", sized(8), 1, seconds)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == pytest.approx(3.0)
    assert [*cost_rows(path).values()] == [(8, pytest.approx(3.0), 3)]


def test_concurrent_processes_lose_no_records(path):
    program = """
import sys
from pathlib import Path
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable
from penstock.tuning.node_signature import NodeSignature
# On a busy machine, a process may hold its lock for longer than others wait by default.
cost_table._PATIENCE_S = 100.0
path, name = Path(sys.argv[1]), sys.argv[2]
for i in range(30):
    table = CostTable(path, "here")
    table.record(name, NodeSignature("Add", "d", str(i), i), 1, 1.0)
    table.save()
"""
    command = [sys.executable, "-W", "error", "-c", program, str(path)]
    running = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [each.wait(120) for each in running] == [0, 0]
    table = CostTable(path, "here")
    for name in "ab":
        for i in range(30):
            assert table.lookup(name, NodeSignature("Add", "d", str(i), i), 1) == 1.0
    assert os.listdir(path.parent) == ["costs.sqlite"]


def test_records_of_other_machines_are_kept_but_not_used(path):
    for machine, seconds in (("here", 1.0), ("there", 2.0)):
        table = CostTable(path, machine)
        assert table.estimate("numpy", sized(8), 1) is None
        table.record("numpy", sized(8), 1, seconds)
        table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0
    assert CostTable(path, "there").lookup("numpy", sized(8), 1) == 2.0


def test_save_deletes_least_recently_measured_rows(path, monkeypatch):
    monkeypatch.setattr(module, "_MOST_ROWS", 3)
    other = CostTable(path, "there")
    other.record("numpy", sized(1), 1, 1.0)
    other.save()
    table = CostTable(path, "here")
    for size in (1, 2, 3, 1, 4):
        table.record("numpy", sized(size), 1, 1.0)
    table.save()
    for again in (table, CostTable(path, "here")):
        seconds = [again.lookup("numpy", sized(size), 1) for size in (1, 2, 3, 4)]
        assert seconds == [1.0, None, 1.0, 1.0]
    assert CostTable(path, "there").lookup("numpy", sized(1), 1) is None
    table.record("numpy", sized(9), 1, 2.0)
    table.save()
    assert len(cost_rows(path)) == 3
    assert table.lookup("numpy", sized(3), 1) is None


def test_file_at_its_bound_is_small_enough_to_be_read():
    longest = 4 * 400 + 300  # characters of a row
    assert module._MOST_ROWS * 500 < module._MOST_BYTES < module._MOST_ROWS * longest


# Where it cannot be read or written.


def test_save_into_unwritable_folder_keeps_records_in_memory(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("")  # a file, where a folder should be
    table = CostTable(blocked / "costs.sqlite", "here")
    table.record("numpy", sized(8), 1, 1.0)
    with logged("penstock.tuning.cost_table", logging.DEBUG) as records:
        table.save()
    assert any("costs are not kept" in record.getMessage() for record in records)
    assert table.lookup("numpy", sized(8), 1) == 1.0
    table.record("numpy", sized(8), 1, 3.0)
    blocked.unlink()
    table.save()
    assert CostTable(table.path, "here").lookup("numpy", sized(8), 1) == 2.0


def test_save_while_file_is_locked_keeps_records_in_memory(table, path, monkeypatch):
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    before = path.read_bytes()
    table.record("numpy", sized(16), 1, 1.0)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        table.save()
    assert path.read_bytes() == before
    assert table.lookup("numpy", sized(16), 1) == 1.0
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(16), 1) == 1.0


def test_locked_file_is_waited_for_once(table, path, monkeypatch):
    """A run that finds the file locked goes on without it: costs are a hint."""
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    waits, connect = [], sqlite3.connect

    def connected(*arguments, timeout, **options):
        waits.append(timeout)
        return connect(*arguments, timeout=timeout, **options)

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite3, "connect", connected)
        for n in range(9):
            table.record("numpy", sized(16 + n, f"op{n}"), 1, 1.0)
            table.save()
        assert len(waits) >= 9
        assert sum(waits) <= 0.05
    table.save()  # at once, since nothing holds it now
    assert CostTable(path, "here").lookup("numpy", sized(24, "op8"), 1) == 1.0
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert waits[-1] == 0.05  # the file could be used in between


def test_names_that_are_not_unicode_do_not_fail(table, path):
    table.record("numpy", sized(8, "\ud800"), 1, 1.0)
    table.record("numpy", sized(10**30), 1, 1.0)
    table.record("numpy", sized(16), 1, 1.0)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(16), 1) == 1.0


@pytest.mark.parametrize("name", ["a b", "50%", "%41", "q?mode=ro", "c#1", "\u00e4", "\udcff"])
def test_file_of_any_name_is_found_again(tmp_path, name):
    path = tmp_path / name / "costs.sqlite"
    table = CostTable(path, "here")
    table.record("numpy", sized(100), 1, 0.5)
    table.save()
    assert path.stat().st_size
    assert CostTable(path, "here").lookup("numpy", sized(100), 1) == 0.5


def test_folder_in_place_of_file_is_ignored_with_warning(path):
    path.mkdir(parents=True)
    table = CostTable(path, "here")
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert table.lookup("numpy", sized(8), 1) == 1.0


def database(*statements: str) -> bytes:
    """The content of an SQLite file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)
        return connection.serialize()


@pytest.mark.parametrize(
    "content",
    [
        b"{" * 1000,
        b"\x00\xff\xfe" * 1000,
        b"SQLite format 3\x00",
        b"SQLite format 3\x00" + b"\xff" * 5000,
        database("CREATE TABLE other (x)"),
        database("CREATE TABLE costs (x)"),
        database("CREATE VIEW costs AS SELECT 1 AS machine"),
        database(module._SCHEMA.replace("version 1", "version 2")),
        database(module._SCHEMA, "CREATE TABLE other (x)"),
        database(module._SCHEMA)[:4096],
    ],
    ids=lambda content: repr(content[:30]),
)
def test_damaged_file_is_replaced_with_warning(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    table = CostTable(path, "here")
    with pytest.warns(RuntimeWarning, match=r"costs\.sqlite cannot be read and will be replaced"):
        assert table.estimate("numpy", sized(8), 1) is None
    table.record("numpy", sized(8), 1, 1.0)
    table.save()  # a second warning would be an error
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


@pytest.mark.parametrize(
    "content", [b"", database("PRAGMA user_version = 1")], ids=["no bytes", "no tables"]
)
def test_file_that_another_process_has_just_created_is_used(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    table = CostTable(path, "here")
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


def test_save_erases_attributes_that_older_versions_wrote(path, table):
    old = ["3x2 -> 3x2; offset=[13.25]", "2= -> 2; " + "a=[1, 2, " * 30 + "... 0123456789abcdef"]
    kept = ["3x2, 2= -> 3x2", "3x2 -> 3x2; 0123456789abcdef", "3x2 -> 3x2"]
    for exact in (*old, *kept):
        table.record("numpy", sized(48, exact), 1, 1.0)
    table.save()
    assert b"13.25" in path.read_bytes()
    again = CostTable(path, "here")
    again.record("numpy", sized(8), 1, 1.0)
    again.save()
    assert {exact for *_, exact in cost_rows(path)} == {*kept, "8"}
    assert b"13.25" not in path.read_bytes()
    assert CostTable(path, "here").lookup("numpy", sized(48, kept[0]), 1) == 1.0


def test_tuned_model_leaves_no_attribute_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    scaler = onnx.helper.make_node(
        "Scaler", ["x"], ["y"], "secret", domain="ai.onnx.ml", offset=[13.25, 3.5], scale=[7.75]
    )
    x, y = (onnx.helper.make_tensor_value_info(v, 1, [3, 2]) for v in ("x", "y"))
    graph = onnx.helper.make_graph([scaler], "secret", [x], [y])
    opsets = [onnx.helper.make_opsetid("ai.onnx.ml", 3), onnx.helper.make_opsetid("", 17)]
    ps.compile(onnx.helper.make_model(graph, opset_imports=opsets), shapes={}, autotune=True)
    data = (tmp_path / "costs.sqlite").read_bytes()
    assert b"Scaler" in data
    assert not any(word in data for word in (b"13.25", b"7.75", b"offset", b"secret"))


def test_oversized_file_is_not_read(path):
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.warns(RuntimeWarning, match=f"more than {module._MOST_BYTES} bytes"):
        assert not CostTable(path, "here").measured


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipe_in_place_of_file_does_not_block(path):
    path.parent.mkdir()
    os.mkfifo(path)
    table = CostTable(path, "here")
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


OUT_OF_RANGE = [
    (-1, 0.5, 1, 1),
    (8, -0.5, 1, 1),
    (8, math.inf, 1, 1),
    (8, 1e300, 1, 1),
    (1e300, 0.5, 1, 1),
    (8, 0.5, 0, 1),
    (8, 0.5, 10**9, 1),
    ("x", 0.5, 1, 1),
    (8, "x", 1, 1),
    (8, b"x", 1, 1),
    (8, None, 1, 1),
    (8, 0.5, 1, -1),
    (8, 0.5, 1, "x"),
]


@pytest.mark.parametrize("numbers", OUT_OF_RANGE, ids=repr)
def test_record_out_of_range_is_skipped(table, path, numbers):
    table.record("numpy", sized(16), 1, 0.25)
    table.save()
    key = ("here", "numpy", "Add", "1 threads, float32 -> float32", "8")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO costs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*key, *numbers))
    again = CostTable(path, "here")
    assert again.lookup("numpy", sized(8), 1) is None
    assert estimate(again, 32) == 0.5
    again.record("numpy", sized(8), 1, 1.0)
    again.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


@given(st.lists(st.tuples(st.integers(0, 8191), st.binary(min_size=1, max_size=64)), max_size=4))
def test_table_works_after_any_damage_to_file(tmp_path_factory, damages):
    path = tmp_path_factory.mktemp("costs") / "costs.sqlite"
    table = CostTable(path, "here")
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    content = bytearray(path.read_bytes())
    for start, damage in damages:
        content[start : start + len(damage)] = damage
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table = CostTable(path, "here")
        table.record("numpy", sized(16), 1, 1.0)
        table.save()
        assert table.lookup("numpy", sized(16), 1) == 1.0


# Threads.


def test_cost_table_is_thread_safe(path):
    table = CostTable(path, "here")

    def work(k: int) -> Sequence[float | None]:
        for i in range(100):
            table.record("numpy", sized(i), 1, 1.0)
            table.record(f"own{k}", sized(i), 1, float(k + 1))
            if i % 25 == 0:
                table.save()
        return [table.estimate("numpy", sized(50, "new"), 1), table.lookup(f"own{k}", sized(7), 1)]

    with ThreadPoolExecutor(4) as threads:
        result = list(threads.map(work, range(4)))
    assert result == [[1.0, k + 1.0] for k in range(4)]
    table.save()
    again = CostTable(path, "here")
    assert all(again.lookup(f"own{k}", sized(i), 1) == k + 1 for k in range(4) for i in range(100))


def test_lookup_does_not_wait_for_save(table, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    update = module._update

    def update_slowly(*arguments: Any) -> Any:
        writing.set()
        assert go_on.wait(60)
        return update(*arguments)

    monkeypatch.setattr(module, "_update", update_slowly)
    table.record("numpy", sized(8), 1, 1.0)
    saver = threading.Thread(target=table.save)
    saver.start()
    assert writing.wait(60)
    assert table.lookup("numpy", sized(8), 1) == 1.0
    table.record("numpy", sized(8), 1, 3.0)
    table.record("numpy", sized(16), 1, 4.0)
    go_on.set()
    saver.join(60)
    for each in (8, 16):
        assert table.lookup("numpy", sized(each), 1) == mean([1.0, 3.0] if each == 8 else [4.0])
    monkeypatch.undo()
    table.save()
    again = CostTable(table.path, "here")
    assert [again.lookup("numpy", sized(each), 1) for each in (8, 16)] == [2.0, 4.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_does_not_wait_for_locks_of_parent(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    table = cost_table()
    with table._file_lock, table._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child = os.fork()
        if not child:
            done = 1
            try:
                cost_table().record("numpy", sized(8), 1, 1.0)
                table.save()
                done = 0
            finally:
                os._exit(done)
    assert os.waitpid(child, 0)[1] == 0
    assert CostTable(table.path, machine_name()).lookup("numpy", sized(8), 1) == 1.0


# The table of the process.


def test_environment_variable_names_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert cache_folder() == str(tmp_path)
    table = cost_table()
    assert table is cost_table()
    assert (table.path, table.machine) == (str(tmp_path / "costs.sqlite"), machine_name())
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
    assert cost_table() is not table


def test_importing_cost_table_imports_no_sqlite():
    program = (
        "import penstock, sys; assert 'penstock.tuning.cost_table' not in sys.modules; "
        "import penstock.tuning.cost_table; "
        "sys.exit(bool({'platformdirs', 'sqlite3', 'hashlib', 'importlib.metadata'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
